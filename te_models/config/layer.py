"""A layer of a decoder as data: the questions that every kind of layer answers about itself. No torch.

A block joins a mixer (attention) and an MLP. Each kind of the two is a subclass of PartSpec here in config, and a
module in te_models.model; te_models.config.layers and te_models.model.parts list them. Everything else asks these
descriptions, so that a new kind is one description, one module and a row in each list.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple, TypeVar

from typing_extensions import Self

# Output rows of a section that no recipe could use as they are (one per head) are padded to this: the widest alignment
# of a feature dimension that a recipe asks for (MXFP8 blocks of 32; Transformer Engine's
# get_align_size_for_quantization), so that one weight serves all recipes.
FEATURE_ALIGNMENT = 32

# The role of consecutive rows of a parameter, which decides how optimizers treat them: Muon and GaLore update the
# first, AdamW all others.
Role = Literal[
    "hidden",  # a projection from one hidden space to another: q, k, v, o, the elementwise gate, SwiGLU's three
    "gate",  # the headwise gate: one logit per head (and rows of padding), each row a separate vector
    "head",  # any other matrix: the language-model head, adapters
    "embedding",  # a table, tied to the head or not: a step reads few of its rows
    "vector",  # norms and biases
]


class Section(NamedTuple):
    """Consecutive rows of a fused weight that form one logical matrix."""

    name: str
    used: int  # rows that hold parameters of the model
    stored: int  # rows in the weight, padding included
    role: Role = "hidden"


def first_rows(sections: tuple[Section, ...]) -> list[int]:
    """Return the first row of each section in the weight."""
    return [0, *accumulate(section.stored for section in sections)][:-1]


@dataclass(frozen=True)
class LinearSpec:
    """A te.Linear of a layer, or a te.GroupedLinear: one linear per expert, all of this form.

    Attributes:
        name: its name in its part, such as "qkvg_proj".
        inputs: input features.
        sections: its output rows.
        split: how tensor parallelism divides it: the rows of every section ("column", as Transformer Engine calls it),
            or the inputs ("row"); None: every rank has all of it.
        bias: whether it has one.
        residual: whether it writes into the residual stream.
        fp8: whether it may run below BF16 (te_models.config.precision); False for a linear that is always BF16, as a
            router.
        experts: how many experts there are; 0: it is a te.Linear.
    """

    name: str
    inputs: int
    sections: tuple[Section, ...]
    split: Literal["column", "row"] | None = None
    bias: bool = False
    residual: bool = False
    fp8: bool = True
    experts: int = 0

    @property
    def adapted(self) -> bool:
        """Return True if LoRA adapts it by default: experts and routers only when they are named as targets."""
        # A few numbers per token from a router do not repay an adapter, and experts have many matrices.
        return not self.experts and self.name not in ("router", "context_proj")

    @property
    def gemms(self) -> int:
        """Linears in it: one, or one per expert."""
        return max(1, self.experts)

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of its weights."""
        return tuple(f"weight{expert}" for expert in range(self.experts)) or ("weight",)

    @property
    def rows(self) -> list[int]:
        """Output rows of each section, padding included."""
        return [section.stored for section in self.sections]

    @property
    def outputs(self) -> int:
        """Output features, padding included."""
        return sum(self.rows)

    @property
    def num_parameters(self) -> int:
        """Parameters that outputs depend on: without padding."""
        rows = sum(section.used for section in self.sections)
        # A bias is one more input per row.
        return self.gemms * rows * (self.inputs + self.bias)

    @property
    def num_padding_parameters(self) -> int:
        """Parameters of the rows of padding; nothing reads their output."""
        return self.gemms * self.outputs * (self.inputs + self.bias) - self.num_parameters

    @property
    def row_ranges(self) -> dict[str, tuple[int, int]]:
        """Section name -> (first row, rows used)."""
        first = first_rows(self.sections)
        return {
            section.name: (start, section.used)
            for section, start in zip(self.sections, first, strict=True)
        }


Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True)
class PartSpec(ABC):
    """A mixer or an MLP as data. Subclasses are frozen dataclasses, equal if and only if they compute the same."""

    hidden_size: int

    name: ClassVar[str]  # of the module in its block, and hence in the names of parameters
    title: ClassVar[str]  # in messages

    @property
    @abstractmethod
    def linears(self) -> tuple[LinearSpec, ...]:
        """Its te.Linears in forward order."""

    @property
    def vectors(self) -> Mapping[str, int]:
        """Module name -> elements of every other parameter."""
        return MappingProxyType({})

    @property
    def vector_rows(self) -> Mapping[str, tuple[Section, ...]]:
        """Module among `vectors`, such as "conv1d" -> the sections of the rows of its weight, if there are several."""
        return MappingProxyType({})

    @property
    def obstacles(self) -> tuple[str, ...]:
        """The fields of ModelConfig whose values the fused kernels do not compute."""
        return ()

    @property
    def graph_obstacle(self) -> str:
        """Return why no CUDA graph can contain it; "" if one can."""
        return ""

    def linear(self, name: str) -> LinearSpec:
        """Return its te.Linear of this name."""
        return next(linear for linear in self.linears if linear.name == name)

    @property
    def num_parameters(self) -> int:
        """Parameters that outputs depend on."""
        return sum(linear.num_parameters for linear in self.linears) + sum(self.vectors.values())

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token goes through."""
        return self.num_parameters

    @property
    @abstractmethod
    def features(self) -> Mapping[str, int]:
        """Name that users know, such as intermediate_size -> number, of the inputs and outputs of its te.Linears."""

    # Tensor parallelism.

    @property
    def divided(self) -> Mapping[str, int]:
        """Field of ModelConfig -> the count that tensor parallelism divides between the ranks."""
        return MappingProxyType({})

    def local(self, ranks: int) -> Self:
        """Return one rank's share: all of it where nothing is divided."""
        return self

    @property
    def divided_vectors(self) -> Mapping[str, tuple[Section, ...]]:
        """Parameter among `vectors` that it divides, such as "conv1d.weight" -> the sections of its rows."""
        return MappingProxyType({})

    def parallel_obstacle(self, sequence: bool) -> str:
        """Return why tensor parallelism (and sequence parallelism) cannot divide it, and what to do; "" if it can."""
        return ""

    # Costs.

    def rows_of(self, linear: LinearSpec, tokens: int) -> int:
        """Return the rows that one of its te.Linears has for `tokens` tokens, all experts together."""
        return tokens

    def linear_flops(self, tokens: int) -> float:
        """Return the FLOPs of a forward of its te.Linears."""
        products = (
            self.rows_of(linear, tokens) * linear.inputs * linear.outputs for linear in self.linears
        )
        return 2.0 * sum(products)


class MixerSpec(PartSpec):
    """A part that mixes tokens."""

    # What it keeps of earlier tokens while decoding: tensors that grow with the text, tensors of one size, or both
    # (te_models.model.kv_cache.KVState, RecurrentState and JointState).
    keeps: ClassVar[Literal["keys and values", "a recurrent state", "states of several mixers"]] = (
        "a recurrent state"
    )

    @property
    def members(self) -> tuple[MixerSpec, ...]:
        """The mixers that it consists of: itself, or several beside each other (te_models.config.parallel)."""
        return (self,)

    def rows_obstacle(self, ranks: int) -> str:
        """Return why context parallelism cannot divide it between this many ranks, and what to do; "" if it can.

        A kind with a state that allows it has `local`, the share of its heads, and mixes by te_models.model.whole_rows.
        """
        return (
            f"context parallelism does not divide {self.title}, whose state passes from token to token: leave out "
            "context_parallel_size"
        )

    @abstractmethod
    def state_bytes(self, batch: int, slots: int, element: int) -> int:
        """Return the bytes that it keeps while decoding `batch` rows of up to `slots` tokens."""


MOST_RANKS = 16  # ranks that a message suggests for one row


def undivided_heads(title: str, name: str, heads: int, ranks: int) -> str:
    """Return why the ranks that share rows cannot divide the heads of a mixer; "" if they can."""
    if heads % ranks == 0:
        return ""
    group_sizes = [str(size) for size in range(2, min(heads, MOST_RANKS) + 1) if heads % size == 0]
    fitting = f"give {' or '.join(group_sizes)}, or " if group_sizes else ""
    return (
        f"context_parallel_size={ranks} does not divide the heads of {title}, {name}={heads}: {fitting}leave it out, "
        "which gives each process whole rows"
    )


class FeedforwardSpec(PartSpec):
    """A part that treats each token by itself."""


@dataclass(frozen=True)
class LayerSpec:
    """One block: its mixer, its MLP, or both, and their norms.

    Attributes:
        norm_position: "pre", "post" or "both", as in ModelConfig.
        scaled: whether the output of the block is multiplied by a stored number.
        post_norm_eps: the epsilon of the norms after mixer and MLP; None: as of all others.
        input: the part that reads the input of the layer (te_models.config.layer_inputs); None: it has none.
        norm_type: "rms" or "layer", as in ModelConfig.
        parallel_residual: whether mixer and MLP, where there are both, read one norm of the layer's input.
    """

    mixer: MixerSpec | None
    mlp: FeedforwardSpec | None
    norm_position: str = "pre"
    scaled: bool = False
    post_norm_eps: float | None = None
    input: PartSpec | None = None
    norm_type: str = "rms"
    parallel_residual: bool = False

    @property
    def side_by_side(self) -> bool:
        """Return whether mixer and MLP read one norm of the layer's input."""
        return self.parallel_residual and self.mixer is not None and self.mlp is not None

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        """The parts that the layer has, of mixer, MLP, and the part that reads the layer's input."""
        return tuple(part for part in (self.mixer, self.mlp, self.input) if part is not None)

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """The mixers: none, one, or several beside each other."""
        return () if self.mixer is None else self.mixer.members

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.parts[0].hidden_size

    @property
    def linears(self) -> dict[str, LinearSpec]:
        """Name in the block, such as "self_attn.o_proj" -> te.Linear, in forward order."""
        linears = {}
        for part in self.parts:
            for linear in part.linears:
                linears[f"{part.name}.{linear.name}"] = linear
        return linears

    @property
    def divided(self) -> dict[str, int]:
        """Name of a count that tensor parallelism divides, such as "num_attention_heads" -> the count."""
        return {name: count for part in self.parts for name, count in part.divided.items()}

    @property
    def divided_vectors(self) -> dict[str, LinearSpec]:
        """Name in the block -> the parameters that tensor parallelism divides like the rows of a te.Linear."""
        vectors = {}
        for part in self.parts:
            for name, sections in part.divided_vectors.items():
                vectors[f"{part.name}.{name}"] = LinearSpec(name, 1, sections, "column")
        return vectors

    @property
    def vector_rows(self) -> dict[str, LinearSpec]:
        """Name in the block, such as "kda.conv1d" -> the parameters of it that have several sections of rows."""
        rows = {}
        for part in self.parts:
            for name, sections in part.vector_rows.items():
                rows[f"{part.name}.{name}"] = LinearSpec(name, 1, sections)
        return rows

    @property
    def num_norms(self) -> int:
        """Norms of the residual stream's width."""
        if self.side_by_side:
            return 1
        normed = [part for part in (self.mixer, self.mlp) if part is not None]
        return len(normed) * (2 if self.norm_position == "both" else 1)

    @property
    def num_parameters(self) -> int:
        """Parameters that outputs depend on."""
        in_parts = sum(part.num_parameters for part in self.parts)
        in_norms = self.num_norms * self.hidden_size
        return in_parts + in_norms + self.scaled  # `scaled`: one number

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token goes through."""
        # Of experts only those that a token is sent to.
        idle = sum(part.num_parameters - part.num_active_parameters for part in self.parts)
        return self.num_parameters - idle

    @property
    def num_padding_parameters(self) -> int:
        """Parameters of rows of padding; nothing reads their output."""
        return sum(linear.num_padding_parameters for linear in self.linears.values())

    def local(self, ranks: int) -> LayerSpec:
        """Return one rank's share under tensor parallelism."""
        return dataclasses.replace(
            self,
            mixer=None if self.mixer is None else self.mixer.local(ranks),
            mlp=None if self.mlp is None else self.mlp.local(ranks),
            input=None if self.input is None else self.input.local(ranks),
        )


# The module of a model that makes the inputs of all layers (te_models.model.layer_inputs).
LAYER_INPUTS = "layer_inputs"


def context_linear(hidden_size: int, outputs: int) -> LinearSpec:
    """Return the te.Linear that projects the embedded tokens to the inputs of all layers; it is always BF16."""
    section = Section("inputs", outputs, outputs, "head")
    return LinearSpec("context_proj", hidden_size, (section,), fp8=False)


def depth_of(name: str) -> int | None:
    """Return the number of the layer of a te.Linear of this name in a model; None: it is in no layer."""
    owner, _, below = name.partition(".")
    return int(below.partition(".")[0]) if owner == "layers" else None


def named_linears(layers: tuple[LayerSpec, ...]) -> Iterator[tuple[str, LinearSpec]]:
    """Yield the name in the model, such as "layers.0.self_attn.o_proj", and the description of every te.Linear."""
    inputs = [layer.input.features["layer_inputs.width"] for layer in layers if layer.input]
    if inputs:
        projection = context_linear(layers[0].hidden_size, sum(inputs))
        yield f"{LAYER_INPUTS}.{projection.name}", projection
    for depth, layer in enumerate(layers):
        for name, linear in layer.linears.items():
            yield f"layers.{depth}.{name}", linear


def distinct(values: Iterable[Item | None]) -> list[Item]:
    """Return the values without repetitions and without None, in order."""
    return [value for value in dict.fromkeys(values) if value is not None]
