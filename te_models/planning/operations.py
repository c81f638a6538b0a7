"""The operations of a training step, with the bytes that each saves, allocates and frees.

A block is a list of operations in forward order (`Tape.block`). No constant is fitted: every term is a tensor, and
docs/reference/memory.md names it. Shapes are those of te_models/model/block.py: N tokens padded to the recipe's row
alignment, T = B*S without padding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from te_models.config.attention import SoftmaxAttentionSpec
from te_models.config.chunk_sizes import head_rows
from te_models.config.layer import LayerSpec, LinearSpec, Step, distinct
from te_models.config.model import ModelConfig
from te_models.config.operand_layout import round_up
from te_models.config.precision import HEAD, precisions
from te_models.config.recipe import SCHEMES, Recipe
from te_models.config.recompute_modes import (
    offload_allows_fused,
    recomputes_block,
    recomputes_mlp,
    recomputes_product,
)
from te_models.planning.parameter_bytes import FP32

INT64 = 8


class Region(NamedTuple):
    """Consecutive steps that are recomputed and offloaded together."""

    steps: list[Step]
    recompute_input: int | None = (
        None  # bytes of the input that a recompute starts from; None: not recomputed
    )
    block: int | None = None  # index of the block they belong to
    offloaded: bool = False  # whether their saved tensors are on the host after the forward


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training step that its memory depends on; te_models.planning.memory_plan.plan_memory explains them.

    Under gradient accumulation, FP32 sums of all gradients exist, which FSDP2 does not shard (`gradient_sums`), and FP8
    copies of weights exist already (`cached_weights`). With `lora_rank`, all linears of blocks have an adapter of that
    rank, with `lora_experts` experts too, and nothing else is trained. `compile`, `fused` and `cuda` say which kernels
    run.
    """

    batch_size: int = 8  # per GPU and micro-batch
    seq_len: int = 256
    optimizer: str | None = "adamw"
    optimizer_offload: bool = False
    optimizer_options: Mapping[str, object] = field(default_factory=dict)
    lora_rank: int = 0
    lora_experts: bool = False
    activation_checkpointing: str | int = "none"
    activation_offload: bool = False
    gpus: int = 1
    gradient_sums: bool = False
    cached_weights: bool = False
    fp8_params: bool = False
    logits: bool = True
    compile: bool = True
    fused: bool = True
    cuda: bool = True
    dtype_bytes: int = 2

    @property
    def fused_kernels(self) -> bool:
        """Return whether fused kernels run, as model/decoder.py decides."""
        allowed = not self.activation_offload or offload_allows_fused(self.activation_checkpointing)
        return self.fused and self.cuda and allowed


PER_TENSOR = (
    "DelayedScaling",
    "Float8CurrentScaling",
)  # one scale per tensor, so the data can be transposed later


def operand_bytes(recipe: Recipe, rows: int, columns: int, role: str, copies: str = "both") -> int:
    """Return the bytes of a quantized matrix [rows, columns]: its data and its padded scales.

    `role` is "x", "w" or "grad", for which Float8BlockScaling may have other blocks, and `copies` "rowwise",
    "columnwise" or "both". The layout is that of the recipe's row in te_models.config.recipe.SCHEMES.
    """
    layout = SCHEMES[recipe.scheme].layout
    square = recipe.fields.get(f"{role}_block_scaling_dim") == 2
    total = layout.shared_bytes
    if copies in ("rowwise", "both"):
        total += layout.copy_bytes(rows, columns, square)
    if copies in ("columnwise", "both"):
        total += layout.copy_bytes(columns, rows, square)
    return total


class Tape:
    """The operations of a forward pass with the bytes of each; te_models.config.layer.Tape explains its attributes."""

    def __init__(self, config: ModelConfig, recipe: Recipe, training: Training) -> None:
        self.config = config
        self.recipe = recipe
        self.training = training
        self.tokens = training.batch_size * training.seq_len
        self.alignment = recipe.row_alignment
        self.rows = round_up(self.tokens, self.alignment)
        self.seq_len = training.seq_len
        self.element = training.dtype_bytes
        self.compiled = training.compile
        self.fused = training.fused_kernels
        self.cuda = training.cuda
        self.stream = (
            self.rows * config.hidden_size * self.element
        )  # the residual stream, or its gradient
        self.fp8_layers = recipe.fp8_layers(config.num_hidden_layers)
        self.precisions = precisions(recipe, config.layers)
        self._part = (
            ""  # of the names of the te.Linears that are being planned, such as "layers.0.mlp."
        )

    def norm(self, name: str) -> Step:
        """Return a te.RMSNorm: saves its input and one FP32 per row; its input gradient is added to the residual's."""
        saved = self.stream + self.rows * FP32
        weights = self.config.hidden_size * self.element
        return Step(name, saved, consumes=self.stream, scratch=self.stream, weights=weights)

    def gathers(self, linear: LinearSpec) -> bool:
        """Return whether experts read rows of tokens through indices, in FP8: see te_models.config.layer.Tape."""
        own = self.precisions[self._part + linear.name].recipe
        plain = self.training
        return (
            own is not None
            and self._casts_experts(own)
            and not (plain.lora_rank or plain.fp8_params)
        )

    def _casts_experts(self, recipe: Recipe) -> bool:
        """Return whether the casts of all experts are joint, as engine/native_experts.py decides."""
        fields = recipe.fields
        if fields.get("backward_override", "none") != "none":
            return False
        if recipe.scheme == "Float8BlockScaling":
            names = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
            usual = [fields[name] for name in names] == [1, 2, 1]
            joint = usual and fields["fp8_format"] == "E4M3" and not fields["use_f32_scales"]
        else:
            joint = recipe.scheme in PER_TENSOR and not fields.get("use_power_2_scales")
        return self.fused and joint and self.training.gpus == 1

    def linear(
        self,
        linear: LinearSpec,
        *,
        shared: bool = False,
        rows: int | None = None,
        gathered: bool = False,
    ) -> Step:
        """Return a te.Linear, which saves its input (in FP8 the columnwise copy) and the FP8 copies of its weight.

        Both copies of the weight are saved unless engine/native.py drops the rowwise one, and of experts' weights both.
        The backward quantizes the output gradient rowwise and columnwise. If `shared`, another operation already saves
        the unquantized input. It has `rows` rows (None: N). A te.GroupedLinear is that for all experts together.

        With an adapter, the adapter alone saves the input, unquantized, and its product with A; backward computes two
        gradients of the input, the linear's and the adapter's. Experts' adapters also save B in another order. Frozen
        linears without an adapter save no input.

        If `gathered`, experts make their rows from tokens again, which another operation saves.
        """
        name = linear.name
        inputs = linear.inputs
        outputs = linear.outputs
        recipe = self.precisions[self._part + name].recipe
        rows = rows or self.rows
        element = self.element
        gemms = linear.gemms
        lora = self.training.lora_rank if name != HEAD else 0
        rank = lora if linear.adapted or (linear.experts and self.training.lora_experts) else 0
        frozen = bool(lora) and not rank
        step = Step(
            name,
            saved=(0 if shared or frozen else rows * inputs * element)
            + self.adapter_bytes(linear, rank, rows),
            scratch=rows * inputs * element if rank else 0,
            consumes=rows * outputs * element,
            produces=rows * inputs * element,
            weights=linear.gemms * outputs * (inputs + linear.bias) * element,
        )
        override = (
            "high_precision" if recipe is None else recipe.fields.get("backward_override", "none")
        )
        if recipe is None or override == "high_precision":
            return step
        if override == "dequantized":
            x = (
                step.saved
                if lora
                else gemms * operand_bytes(recipe, rows // gemms, inputs, "x", "rowwise")
            )
            return step._replace(
                saved=x, copies=gemms * operand_bytes(recipe, outputs, inputs, "w", "rowwise")
            )
        x = (
            step.saved
            if lora
            else gemms * operand_bytes(recipe, rows // gemms, inputs, "x", "columnwise")
        )
        w = gemms * operand_bytes(recipe, outputs, inputs, "w")
        dy = gemms * operand_bytes(recipe, rows // gemms, outputs, "grad")
        if lora:
            dy = max(step.scratch, operand_bytes(recipe, rows, outputs, "grad", "rowwise"))
        if (
            self.training.fp8_params
        ):  # transposed data is freed before the larger weight gradient is allocated
            return step._replace(saved=x, scratch=dy)
        if (
            self.training.gpus > 1
        ):  # Transformer Engine requantizes weights sharded by FSDP2 in backward
            return step._replace(saved=x, scratch=dy + w)
        turned = gemms * operand_bytes(recipe, outputs, inputs, "w", "columnwise")
        if linear.experts and self._casts_experts(recipe):
            return self._experts(
                step._replace(saved=x, copies=w, scratch=dy), recipe, linear, rows, turned, gathered
            )
        handed = (
            self.fused
            and recipe.scheme == "DelayedScaling"
            and not recipe.fields.get("use_power_2_scales")
        )
        if handed and not linear.experts and not self.training.cached_weights:
            w = turned
        return step._replace(saved=x, copies=w, scratch=dy)

    def _experts(
        self, step: Step, recipe: Recipe, linear: LinearSpec, rows: int, turned: int, gathered: bool
    ) -> Step:
        """Return the linears of experts with joint casts, whose backward makes `turned` weights unless there are some.

        It makes the gradient of the input and frees them and dy's rowwise copy before it makes those of weights, for
        which it gathers the rows again.
        """
        made = 0 if self.training.cached_weights else turned
        from_rows, x = (step.produces, step.saved) if gathered else (0, 0)
        of_weights = 0 if self.training.lora_rank else step.weights
        dy = linear.gemms * operand_bytes(
            recipe, rows // linear.gemms, linear.outputs, "grad", "columnwise"
        )
        return step._replace(
            saved=step.saved - x,
            copies=step.copies if self.training.cached_weights else 0,
            produces=self.stream if gathered else step.produces,
            scratch=max(dy + x, step.scratch + made + from_rows - of_weights),
        )

    def adapter_bytes(self, linear: LinearSpec, rank: int, rows: int) -> int:
        """Return what an adapter of this rank saves beside its input: the product with A, and experts' B."""
        return (rows + linear.experts * linear.outputs) * rank * self.element

    def block(self, depth: int) -> tuple[list[Step], list[Step], list[Step]]:
        """Return a block in three parts: the mixer, the MLP up to what recompute may discard, and the rest of it."""
        layer = self.config.layers[depth]
        mixer: list[Step] = []
        hidden: list[Step] = []
        output: list[Step] = []
        if layer.mixer is not None:
            self._part = f"layers.{depth}.{layer.mixer.name}."
            mixer = self._after_norm(layer, "input_layernorm", layer.mixer.steps(self))
            mixer = self._into_residual(layer, "attention_output_norm", mixer)
        if layer.mlp is not None:
            self._part = f"layers.{depth}.{layer.mlp.name}."
            hidden, output = layer.mlp.halves(self)
            hidden = self._after_norm(layer, "post_attention_layernorm", hidden)
            output = self._into_residual(layer, "mlp_output_norm", output)
        self._part = ""
        scale = [Step("layer_scalar", produces=self.stream)] if layer.scaled else []
        return mixer, hidden, output + scale

    def _after_norm(self, layer: LayerSpec, name: str, steps: list[Step]) -> list[Step]:
        """Return a part after its norm; without one, its input's gradient is added to the residual's at once."""
        if layer.norm_position != "post":
            return [self.norm(name), *steps]
        first, *rest = steps
        return [first._replace(produces=0, scratch=first.scratch + first.produces), *rest]

    def _into_residual(self, layer: LayerSpec, name: str, steps: list[Step]) -> list[Step]:
        """Return a part with what is between it and the residual sum: te.RMSNorm, multiplication, both or none."""
        multiplied = self.config.residual_multiplier != 1
        if (
            layer.norm_position == "pre" and not multiplied
        ):  # its output's gradient is the residual's, which stays
            return [*steps[:-1], steps[-1]._replace(consumes=0)]
        found = list(steps)
        if layer.norm_position != "pre":
            consumed = self.stream * multiplied
            found.append(
                self.norm(name)._replace(consumes=consumed, produces=self.stream, scratch=0)
            )
        if multiplied:
            found.append(Step("residual_multiplier", produces=self.stream))
        return found

    def head(self) -> list[Step]:
        """Return the final norm, lm_head and the loss."""
        c = self.config
        routers = (
            [] if c.moe is None else [Step("losses of routers", (c.moe.num_experts + 1) * FP32)]
        )
        if not self.training.logits and self.precisions[HEAD].recipe is None:
            return [
                *routers,
                self.norm("norm")._replace(produces=self.stream, scratch=0),
                self.fused_head(),
            ]
        width = self.tokens * c.vocab_size
        logits = width * self.element
        fp32 = width * FP32
        cut = self.rows * c.vocab_size * self.element
        if (
            self.training.compile
        ):  # saves logits, a maximum and a sum per row, the targets and how many count
            kept = cut + self.tokens * (2 * FP32 + INT64) + INT64
            loss = Step("loss", kept, produces=logits, of_logits=True)
        else:  # saves log_softmax in FP32 and two counts; its backward needs a second FP32 buffer
            loss = Step(
                "loss",
                fp32 + self.tokens * INT64 + INT64 + FP32,
                produces=logits,
                scratch=2 * fp32,
                of_logits=True,
            )
        capped = c.final_logit_softcapping is not None  # saves the output of tanh
        cap = [Step("logit cap", cut, consumes=cut, produces=cut, of_logits=True)] if capped else []
        padding = (
            [Step("removal of padding", consumes=logits, produces=cut)]
            if self.rows > self.tokens
            else []
        )
        return [
            *routers,
            self.norm("norm")._replace(produces=self.stream, scratch=0),
            self.linear(c.head),
            *cap,
            *padding,
            loss,
        ]

    def fused_head(self) -> Step:
        """Return kernels/lm_head.py, which computes both gradients in the forward in chunks and saves only those.

        With fused kernels on a GPU a chunk's gradient overwrites its logits (kernels/lm_head_triton.py). The forward
        also allocates a chunk and the FP32 sum of the weight gradient (on a CPU one more product), while its input is
        there. That sum is rounded when the last chunk is gone. They count as scratch where they exceed the backward's
        own buffers.
        """
        c = self.config
        size = self.config.vocab_size * self.config.hidden_size
        trained = not self.training.lora_rank
        own = self.tokens * c.hidden_size * self.element
        weight = size * self.element * trained
        rows = head_rows(self.tokens, c.vocab_size, c.hidden_size, self.training.cuda, trained)
        chunk = rows * c.vocab_size
        sums = 1 if self.training.cuda else 2
        sums = (
            sums if trained and rows < self.tokens else 0
        )  # with one chunk its product is the gradient
        beside = self.element + (0 if self.training.compile else 3 * FP32)
        if self.fused:
            beside = 0
        if (
            c.final_logit_softcapping is not None or c.logits_scaling != 1
        ):  # the scaled logits, and two of FP32
            beside += self.element + 2 * FP32
        chunk *= self.element + beside
        forward = max(sums * FP32 * size + chunk, FP32 * size + weight) if sums else chunk + weight
        return Step(
            "head and loss",
            own + weight,
            produces=self.stream,
            weights=weight,
            of_logits=True,
            scratch=max(0, forward - 2 * weight),
        )

    def rotary_tables(self) -> int:
        """Return the bytes of cos and sin for each kind of layer that has RoPE, and of the scale of queries."""
        mixers = [
            layer.mixer
            for layer in self.config.layers
            if isinstance(layer.mixer, SoftmaxAttentionSpec)
        ]
        size = self.seq_len * self.element
        tables = sum(2 * size * rope.size for rope in distinct(mixer.rope for mixer in mixers))
        return tables + size * len(distinct(mixer.query_scale for mixer in mixers))

    def regions(self) -> Iterator[Region]:
        """Yield the whole forward pass; te_models/config/recompute_modes.py decides what is recomputed."""
        mode = self.training.activation_checkpointing
        c = self.config
        fp8_weights = self.training.fp8_params
        rotary = self.rotary_tables()
        table = c.vocab_size * c.hidden_size * self.element
        tied = c.tie_word_embeddings  # then its gradient is added to lm_head's
        lora = self.training.lora_rank > 0
        normed = Step(
            "embedding_norm",
            self.tokens * (c.hidden_size * self.element + FP32),
            consumes=self.stream,
            produces=self.stream,
        )
        embedding = Step(
            "embedding", self.tokens * INT64 * (not lora) + rotary, consumes=self.stream
        )
        yield Region(
            [
                embedding._replace(scratch=table) if tied else embedding._replace(weights=table),
                *([normed] if c.embedding_norm else []),
            ]
        )
        for layer in range(c.num_hidden_layers):
            attention, hidden, down = self.block(layer)
            # Storages of up to 1 MiB, which te_models/model/offload.py leaves on the device, are not counted.
            place = (layer, self.training.activation_offload and layer < c.num_hidden_layers - 1)
            fp8 = layer in self.fp8_layers
            spec = c.layers[layer].mlp
            if spec is None:
                yield Region(
                    attention, self.stream if recomputes_block(mode, layer) else None, *place
                )
                continue
            last = self.precisions[f"layers.{layer}.{spec.name}.{spec.last.name}"].recipe
            # Where SwiGLU writes the FP8 input of down_proj itself, it can also recompute it; an adapter saves its
            # output.
            own = fp8 and last is self.recipe and self.recipe.scheme in PER_TENSOR
            hands_over = fp8_weights and ((self.fused and own and not spec.obstacles) or lora)
            # After no norm, only a linear in high precision saves what a recompute starts from.
            first = [Step("input", self.stream)] if c.norm_position == "post" and fp8 else []
            if recomputes_block(mode, layer):
                yield Region([*first, *attention, *hidden, *down], self.stream, *place)
                continue
            if (
                lora and layer == 0 and c.norm_position != "post"
            ):  # nothing before it has a gradient
                begin = attention or hidden
                begin[0] = begin[0]._replace(saved=0)
            if attention:
                yield Region(attention, None, *place)
            mlp_input = (
                self.stream
                if recomputes_mlp(mode, layer, c.num_hidden_layers, fp8, fp8_weights)
                else None
            )
            hidden = hidden if mlp_input is None else [*first, *hidden]
            if recomputes_product(
                mode, last is not None, hands_over
            ):  # the backward of down_proj starts the recompute
                low = max(
                    0, down[0].saved - down[0].produces
                )  # what the adapter saves beside its input stays
                recomputed = down[0]._replace(
                    saved=low, scratch=down[0].scratch + down[0].saved - low
                )
                yield Region([*hidden, recomputed], mlp_input, *place)
                yield Region(down[1:], None, *place)
            else:
                yield Region(hidden, mlp_input, *place)
                yield Region(down, None, *place)
        yield Region(self.head())
