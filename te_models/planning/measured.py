"""The memory of a training step, counted while the real model runs without data.

A `Decoder` on the meta device, with the planned engine, runs one block of each kind, forward and backward, inside
`te_models.device.allocations`. What each block's forward leaves behind, and what is alive at every moment of its
forward and backward, is a `Profile`; te_models.planning.memory_estimate puts all profiles together. All sizes
are affine in the batch, so that two batches give any other.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from te_models.config.chunk_sizes import head_rows
from te_models.config.layer import Role
from te_models.config.layers import reuses_keys
from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe
from te_models.device.allocations import Allocations, counted_as
from te_models.device.operations import OperationCount
from te_models.fp8.scaling_state import fp8_state
from te_models.model.decoder import Decoder
from te_models.numerics.stored import StoredWeight
from te_models.numerics.tensors import QuantizedTensor
from te_models.optim.gradients import Gradients
from te_models.optim.groups import ParameterRows
from te_models.optim.groups import parts as parameter_rows
from te_models.optim.projected import ProjectedGradients
from te_models.planning.block_memory import first_with_same_memory
from te_models.planning.planned_decoder import (
    AdaptedExperts,
    AdaptedLinear,
    PlannedDecoder,
    add_adapters,
)
from te_models.planning.training import StepSetting

# Parts of te_models.planning.memory_estimate.Memory that the run counts, in the order of the columns of a Profile.
PARTS = (
    "activations",
    "fp8_weight_copies",
    "gradients",
    "logits",
    "activation_gradients",
    "recomputed",
    "expert_gradients",  # a part of "gradients" there, which fewer ranks share under expert parallelism
)


class Profile(NamedTuple):
    """The memory of a stretch of a step, relative to its beginning: int64 [moments, PARTS]; the last is its end."""

    moments: Tensor

    @property
    def end(self) -> Tensor:
        """The bytes that the stretch leaves, int64 [PARTS]."""
        return self.moments[-1]

    def between(self, other: Profile, share: float) -> Profile | None:
        """Return the profile of a batch at `share` of the way to `other`'s; None if they cannot be compared."""
        # Another number of moments: some kernel takes another way at this size, so that a line through both means
        # nothing.
        if self.moments.shape != other.moments.shape:
            return None
        change = (other.moments - self.moments).double() * share
        return Profile(self.moments + change.round().long())


class Stretches(NamedTuple):
    """The profiles of a step."""

    embedding: Profile
    forward: Mapping[int, Profile]  # layer -> profile, of one layer of each kind
    head: Profile  # final norm, head and loss
    loss: Profile  # their backward
    backward: Mapping[int, Profile]
    rest: Profile  # backward of the embedding
    standing: Standing


class HeldTensor(NamedTuple):
    """A parameter of a rank's model.

    Attributes:
        parts: the role and the shape of what an optimizer of whole matrices updates of it at a time, in its order.
        shape: its own.
        itemsize: bytes per element of its values, also where they are stored in FP8.
        quantized: whether they are.
        expert: whether it belongs to an expert.
        trained: whether it is.
    """

    parts: tuple[tuple[Role, tuple[int, ...]], ...]
    shape: tuple[int, ...]
    itemsize: int
    quantized: bool
    expert: bool
    trained: bool

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """True for a weight, False for norms and biases."""
        return self.parts[0][0] != "vector"


class Standing(NamedTuple):
    """The memory before a step: of each measured layer, and under REST of everything else."""

    weights: Mapping[int, int]  # bytes, without adapters
    expert_weights: Mapping[int, int]  # the part of `weights` in experts
    states: Mapping[int, int]  # bytes of scales and amax histories
    tensors: Mapping[int, Counter[HeldTensor]]  # with their numbers, adapters too


REST = -1


def stretches(
    config: ModelConfig, recipe: Recipe, setting: StepSetting, layers: tuple[int, ...], batch: int
) -> Stretches:
    """Run a step of `batch` rows through these layers, and return the profiles of its stretches.

    In a thread of its own, where no autocast, scale or grad mode of the caller is.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_run_step, config, recipe, setting, layers, batch).result()


def _run_step(
    config: ModelConfig, recipe: Recipe, setting: StepSetting, layers: tuple[int, ...], batch: int
) -> Stretches:
    """Run forward and backward as the Trainer does, and return the profiles between the places that the model notes."""
    model = PlannedDecoder(config, recipe, setting, layers)
    if setting.lora_rank:
        add_adapters(model, setting)
    ids = torch.empty(batch, setting.seq_len, dtype=torch.int64, device="meta")
    labels = torch.empty_like(ids)
    with Allocations(PARTS, setting.cuda) as allocations:
        # Weights and inputs are there before the step: only what the step itself allocates is counted.
        weights: list[Tensor] = []
        for parameter in model.parameters():
            weights += _parts(parameter)
        allocations.leave_out([ids, labels, *weights])
        gradients: Gradients = Gradients()
        projected: list[nn.Parameter] = []
        if setting.projected_rank:
            projection = _projection(model, setting)
            gradients = projection
            # Their gradients never exist as a whole: hooks project each as backward makes it.
            projected = projection.parameters
        _count_gradients(model, setting, allocations, left_out=projected)
        model.note("embedding")
        first = True if setting.cached_weights else None
        loss = model(
            # As the Trainer calls it; what it does not ask for must not be counted.
            ids,
            labels=labels,
            return_logits=setting.logits,
            is_first_microbatch=first,
        ).loss
        assert loss is not None
        model.note("loss")
        with counted_as("activation_gradients"), gradients.collecting():
            loss.backward()
        del loss
        model.note("end")
    return _divided(model.marks, allocations.events, _standing(model))


def _projection(model: Decoder, setting: StepSetting) -> _Projection:
    """Return the gradients that backward projects: the run's own class, so that the plan does what the run does."""
    with counted_as(None):
        # New projectors in each step: the steps that compute them need most memory.
        projection = _Projection(parameter_rows(model), setting.projected_rank, 1, Gradients())
    projection.keeps_sums = setting.gradient_sums  # counted before the step
    return projection


def _count_gradients(
    model: Decoder,
    setting: StepSetting,
    allocations: Allocations,
    left_out: Sequence[nn.Parameter],
) -> None:
    """Let backward drop each gradient that is added to a sum, and count the others under their part of PARTS."""
    experts = _expert_parameters(model)
    ids_left_out = set(map(id, left_out))
    for parameter in model.parameters():
        if not parameter.requires_grad or id(parameter) in ids_left_out:
            continue
        if setting.gradient_sums:
            parameter.register_post_accumulate_grad_hook(_drop)
        else:
            part = "expert_gradients" if id(parameter) in experts else "gradients"
            keep = functools.partial(_keep, allocations, part)
            parameter.register_post_accumulate_grad_hook(keep)


def count_pass(
    config: ModelConfig,
    recipe: Recipe,
    setting: StepSetting,
    layers: tuple[int, ...],
    operations: OperationCount,
) -> dict[int, float]:
    """Run a forward of one row through these layers, and return the operations of each.

    Inside `operations` and an Allocations; afterwards `operations` has the head's as well.
    """
    model = PlannedDecoder(config, recipe, setting, layers)
    model.operations = operations
    model(torch.empty(1, setting.seq_len, dtype=torch.int64, device="meta"))
    return model.layer_flops


def _standing(model: Decoder) -> Standing:
    """Return what a model holds: parameters, and the state of delayed scaling."""
    weights: Counter[int] = Counter()
    expert_weights: Counter[int] = Counter()
    tensors: dict[int, Counter[HeldTensor]] = {}
    experts = _expert_parameters(model)
    rows: dict[int, list[ParameterRows]] = {}
    for part in parameter_rows(model, trainable_only=False):
        rows.setdefault(id(part.parameter), []).append(part)
    for name, parameter in model.named_parameters():
        layer = _layer(name)
        expert = id(parameter) in experts
        owner = name.rpartition(".")[0]
        if not isinstance(model.get_submodule(owner), AdaptedLinear | AdaptedExperts):
            # An adapter's memory depends on its rank, and is added by the optimizer's part of the estimate.
            size = sum(part.nbytes for part in _parts(parameter))
            weights[layer] += size
            expert_weights[layer] += size if expert else 0
        held = HeldTensor(
            parts=tuple(_part_of(part) for part in rows[id(parameter)]),
            shape=tuple(parameter.shape),
            itemsize=parameter.dtype.itemsize,
            quantized=isinstance(parameter, QuantizedTensor),
            expert=expert,
            trained=parameter.requires_grad,
        )
        tensors.setdefault(layer, Counter())[held] += 1
    states: Counter[int] = Counter()
    for name, tensor in fp8_state(model).items():
        states[_layer(name)] += tensor.nbytes
    return Standing(weights, expert_weights, states, tensors)


def _part_of(rows: ParameterRows) -> tuple[Role, tuple[int, ...]]:
    """Return the role and the shape of rows of a parameter that an optimizer updates together."""
    shape = tuple(rows.parameter.shape)
    if rows.stop is not None:
        shape = (rows.stop - rows.start, *shape[1:])
    return rows.role, shape


def _expert_parameters(model: Decoder) -> set[int]:
    """Return the ids of the parameters of experts."""
    ids = set()
    for module in model.modules():
        if isinstance(module, model.te.GroupedLinear):
            ids.update(id(parameter) for parameter in module.parameters())
    return ids


def _layer(name: str) -> int:
    """Return the number of the layer that a parameter belongs to by its name; REST outside the layers."""
    return int(name.split(".")[1]) if name.startswith("layers.") else REST


def _parts(parameter: Tensor) -> list[Tensor]:
    """Return the tensors that hold a parameter."""
    if isinstance(parameter, StoredWeight):
        return parameter.rows.tensors
    if not isinstance(parameter, QuantizedTensor):
        return [parameter]
    return [part for part in parameter.get_data_tensors() if part is not None]


def _drop(parameter: Tensor) -> None:
    """Free a gradient, which is in an FP32 sum now."""
    parameter.grad = None


class _Projection(ProjectedGradients):
    """Projected gradients whose memory counts as gradients; sums that stay are left out."""

    def _new_sums(self, key: int) -> None:
        with counted_as(None if self.keeps_sums else "gradients"):
            super()._new_sums(key)

    def _add(self, parameter: Tensor) -> None:
        with counted_as("gradients"):
            super()._add(parameter)


def _keep(allocations: Allocations, part: str, parameter: Tensor) -> None:
    """Count a gradient that stays as `part`, in place of the part under which backward allocated it."""
    if parameter.grad is not None:
        allocations.move(parameter.grad, part)


def _divided(
    marks: list[tuple[str, int, tuple[int, ...]]], events: list[Any], standing: Standing
) -> Stretches:
    """Return the stretches between the marks of a step."""
    profiles: dict[str, Profile] = {}
    for (name, begin, before), (_, end, after) in zip(marks, marks[1:], strict=False):
        # Bytes of each part [moments, parts], relative to those at the stretch's beginning.
        moments = torch.tensor([*events[begin:end], after], dtype=torch.int64)
        profiles[name] = Profile(moments - torch.tensor(before, dtype=torch.int64))
    forward: dict[int, Profile] = {}
    backward: dict[int, Profile] = {}
    # Without a gradient of the embedding, nothing follows the backward of the first block.
    rest = Profile(torch.zeros(1, len(PARTS), dtype=torch.int64))
    for name, profile in profiles.items():
        # "forward 3", and of backward "backward 3" and then "after 3" (PlannedDecoder._run).
        stretch, _, layer = name.partition(" ")
        if stretch == "forward":
            forward[int(layer)] = profile
        elif stretch == "backward":
            backward[int(layer)] = profile
        elif stretch == "after":
            rest = profile
    return Stretches(
        embedding=profiles["embedding"],
        forward=forward,
        head=profiles["head"],
        loss=profiles["loss"],
        backward=backward,
        rest=rest,
        standing=standing,
    )


@dataclass(frozen=True)
class MeasuredStep:
    """The profiles of a model under a setting, for any batch."""

    config: ModelConfig
    recipe: Recipe
    setting: StepSetting

    def __hash__(self) -> int:
        return hash((self.config, repr(self.recipe), self.setting))

    @functools.cached_property
    def same(self) -> tuple[int, ...]:
        """For each layer the one whose profiles it has."""
        return first_with_same_memory(self.config, self.recipe, self.setting)

    def run(self, batch: int) -> Stretches:
        """Return the profiles of a batch, computed from two small batches where their rows need no padding."""
        # Sizes are affine in the batch, so two runs give any other; a small batch is run itself.
        unit = self._unit
        layers = tuple(dict.fromkeys(self.same))
        if batch % unit or batch <= 2 * unit:
            return self._run(layers, batch)
        scaled = self._scaled(layers, unit, batch)
        return self._run(layers, batch) if scaled is None else scaled

    def tensors(self, standing: Standing) -> Counter[HeldTensor]:
        """Return the parameters of a rank's model, with their numbers, from what a run found."""
        tensors = standing.tensors
        counted: Counter[HeldTensor] = Counter(tensors.get(REST, Counter()))
        for layer in self.same:
            counted.update(tensors.get(layer, Counter()))
        return counted

    @property
    def _unit(self) -> int:
        """The sequences whose rows need no padding."""
        tokens = self.setting.row_tokens
        return math.lcm(tokens, self.recipe.row_alignment) // tokens

    def kept(self, batch: int) -> int:
        """Return the bytes that a forward of a batch leaves for backward."""
        run = self.run(batch)
        blocks = sum(int(run.forward[layer].end.sum()) for layer in self.same)
        return int(run.embedding.end.sum()) + blocks + int(run.head.end.sum())

    def _scaled(self, layers: tuple[int, ...], unit: int, batch: int) -> Stretches | None:
        """Return the profiles of a batch, computed from one and from two units; None if these do different things."""
        one = self._run(layers, unit)
        two = self._run(layers, 2 * unit)
        share = batch / unit - 1
        scaled: dict[str, Any] = {}
        for name in ("forward", "backward"):
            profiles = {}
            for layer, profile in getattr(one, name).items():
                profiles[layer] = profile.between(getattr(two, name)[layer], share)
            scaled[name] = profiles
        for name in ("embedding", "head", "loss", "rest"):
            scaled[name] = getattr(one, name).between(getattr(two, name), share)
        # Without the head and its loss, which may be made in chunks.
        profiles_of_rows = [
            *scaled["forward"].values(),
            *scaled["backward"].values(),
            scaled["embedding"],
            scaled["rest"],
        ]
        if any(profile is None for profile in profiles_of_rows):
            return None
        # In one chunk the head's memory is affine in the batch like a block's; in several it is one chunk's.
        whole = self._head_rows(batch) >= batch * self.setting.row_tokens
        if whole and scaled["head"] is not None and scaled["loss"] is not None:
            return one._replace(**scaled)
        head, loss = self._head_in_chunks(layers, unit, batch)
        # What a head alone frees when the forward ends, and a block saves, such as rotary tables: int64 [PARTS].
        saved_by_one = one.head.end - self._head(layers, unit).head.end
        saved_by_two = two.head.end - self._head(layers, 2 * unit).head.end
        moments = head.moments.clone()
        moments[-1] += saved_by_one
        moments[-1] += ((saved_by_two - saved_by_one).double() * share).round().long()
        return one._replace(**scaled | {"head": Profile(moments), "loss": loss})

    def _head_rows(self, batch: int) -> int:
        """Return the rows of logits that the head makes at a time."""
        return head_rows(
            batch * self.setting.row_tokens,
            vocabulary=self.config.vocab_size,
            width=self.config.hidden_size,
            cuda=self.setting.cuda,
            trained=not self.setting.lora_rank,
        )

    def _head(self, layers: tuple[int, ...], batch: int) -> Stretches:
        """Return the profiles of the head alone; frozen, it would have nothing to differentiate."""
        if not self.setting.lora_rank:
            return self._run((), batch)
        with_keys = [layer for layer in layers if not reuses_keys(self.config, layer)]
        return self._run(tuple(with_keys[-1:]), batch)

    def _head_in_chunks(
        self, layers: tuple[int, ...], unit: int, batch: int
    ) -> tuple[Profile, Profile]:
        """Return the profiles of a head that makes its logits in chunks, of which only few are measured."""
        # Three chunks have a first, a middle and a last one; a longer head only repeats the middle one.
        tokens = 3 * self._head_rows(batch)
        few = -(-tokens // (unit * self.setting.row_tokens)) * unit
        if batch > few:
            small = self._head(layers, few)
            large = self._head(layers, 2 * few)
            share = batch / few - 1
            head = small.head.between(large.head, share)
            loss = small.loss.between(large.loss, share)
            if head is not None and loss is not None:
                return head, loss
        profiles = self._head(layers, batch)
        return profiles.head, profiles.loss

    def _run(self, layers: tuple[int, ...], batch: int) -> Stretches:
        return _stretches(self, layers, batch)


@functools.lru_cache(256)
def _stretches(measured: MeasuredStep, layers: tuple[int, ...], batch: int) -> Stretches:
    return stretches(measured.config, measured.recipe, measured.setting, layers, batch)


def forget() -> None:
    """Forget what was measured: what allocates has changed."""
    _stretches.cache_clear()
