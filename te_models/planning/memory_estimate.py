"""Predict the memory of a training step from the shapes alone, without a model or a GPU.

Walking the operations of te_models/planning/operations.py forward and then backward gives the memory at every moment;
the largest is the peak. tests/planning/test_memory_plan.py compares it with peaks measured on an H200.

Not counted: CUDA's context (outside PyTorch's allocator), fragmentation, the up to 1 MiB by which the allocator rounds
up a tensor, and temporaries of the forward, which are always smaller than those of the backward that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from te_models.config.chunk_sizes import EXCHANGE_CHUNK, UPDATE_CHUNK
from te_models.config.model import ModelConfig
from te_models.config.precision import HEAD, precisions
from te_models.config.recipe import SCHEMES, Recipe
from te_models.planning.operations import PER_TENSOR, Region, Tape, Training, operand_bytes
from te_models.planning.parameter_bytes import (
    FP32,
    OPTIMIZERS,
    has_masters,
    model_parameters,
    trained_parameters,
)

CUBLAS_WORKSPACE = (
    2**25 + 1024
)  # bytes; Transformer Engine on Hopper and newer (get_cublas_workspace_size_bytes)


@dataclass(frozen=True)
class Memory:
    """Bytes allocated on one GPU at one moment of a step; `total` is their sum."""

    moment: str = ""
    weights: int = 0
    fp8_weight_copies: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    recomputed: int = 0
    logits: int = 0
    activation_gradients: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return name -> bytes of every part."""
        return {name: value for name, value in vars(self).items() if name != "moment"}

    def plus(self, moment: str | None = None, **changes: int) -> Memory:
        """Return a copy with `changes` (name -> bytes) added, and with another name of the moment if given."""
        parts = self.parts()
        grown = {name: parts[name] + change for name, change in changes.items()}
        return Memory(self.moment if moment is None else moment, **{**parts, **grown})


def fp8_saving(config: ModelConfig, recipe: Recipe, training: Training) -> int:
    """Return the bytes that FP8 primary weights save over unquantized ones, in all layers together.

    With one scale per tensor only their rowwise copy is stored (te_models.fp8.primary_weights.drop_transposed).
    """
    if not training.fp8_params:
        return 0
    saved = 0
    element = training.dtype_bytes
    linears = {**config.linears, **({} if config.tie_word_embeddings else {HEAD: config.head})}
    found = precisions(recipe, config.layers)
    for name, linear in linears.items():
        own = found[name].recipe
        if own is not None:
            copies = "rowwise" if own.scheme in PER_TENSOR else "both"
            stored = operand_bytes(own, linear.outputs, linear.inputs, "w", copies)
            saved += linear.gemms * (linear.outputs * linear.inputs * element - stored)
    return saved


def _after_forward(
    now: Memory, region: Region, activations: bool = True, copies: bool = True
) -> Memory:
    """Add what the region's forward saves, or one part of it."""
    if region.recompute_input is not None:
        return now.plus(activations=region.recompute_input * activations)
    logits = sum(step.saved for step in region.steps if step.of_logits)
    saved = sum(step.saved for step in region.steps) - logits
    weights = sum(step.copies for step in region.steps)
    return now.plus(
        activations=saved * activations, logits=logits, fp8_weight_copies=weights * copies
    )


def _walk(regions: list[Region], now: Memory, training: Training) -> Iterator[Memory]:
    """Yield the memory during each step's backward, from the loss down to the embedding.

    The first backward of an offloaded block fetches the block below it from the host. FP8 copies of weights are
    offloaded too, unless the next micro-batch uses them.
    """
    shared = training.gradient_sums
    on_host = {region.block for region in regions if region.offloaded}
    for region in regions:
        now = _after_forward(now, region, not region.offloaded, shared or not region.offloaded)
    for region in reversed(regions):
        if region.block is not None and (below := region.block - 1) in on_host:
            on_host.remove(below)
            for other in regions:
                now = _after_forward(now, other, True, not shared) if other.block == below else now
        where = "activations"
        if region.recompute_input is not None:
            where = "recomputed"
            extra = sum(step.saved for step in region.steps) - region.recompute_input
            now = now.plus(
                recomputed=extra, fp8_weight_copies=sum(step.copies for step in region.steps)
            )
        for number, step in reversed(list(enumerate(region.steps))):
            passing = step.produces + step.scratch
            weights = 0 if training.lora_rank else step.weights
            if training.gradient_sums:
                yield now.plus(step.name, activation_gradients=passing + weights)
            else:  # a new gradient stays; under FSDP2 its shard does, and whole gradients are in buffers counted above
                now = now.plus(gradients=weights // training.gpus)
                yield now.plus(step.name, activation_gradients=passing)
            change = step.produces - step.consumes
            now = now.plus(fp8_weight_copies=-step.copies, activation_gradients=change)
            saved = step.saved
            if (
                region.recompute_input is not None and number == 0
            ):  # saved since the forward, so not recomputed
                now = now.plus(activations=-region.recompute_input)
                saved = saved - region.recompute_input
            now = now.plus(None, **{"logits" if step.of_logits else where: -saved})


def _standing(config: ModelConfig, recipe: Recipe, training: Training) -> Memory:
    """Return the memory before the forward."""
    parameters = model_parameters(config)
    element = training.dtype_bytes
    gpus = training.gpus
    every = sum(p.numel for p in parameters) * element - fp8_saving(config, recipe, training)
    share = -(-every // gpus)
    gathered = 0
    whole = 0
    if (
        gpus > 1
    ):  # FSDP2 gathers the running unit and the next; embedding, norm and head stay gathered
        block = (
            sum(p.numel for p in parameters if p.kind in ("hidden", "gate"))
            // config.num_hidden_layers
            * element
        )
        gathered = sum(p.numel for p in parameters if p.kind == "table") * element + 2 * block
        whole = gathered
        gathered -= 2 * fp8_saving(config, recipe, training) // config.num_hidden_layers
    trained = trained_parameters(config, training.lora_rank, training.lora_experts)
    own = sum(p.numel for p in trained) * element if training.lora_rank else 0
    state = 0
    if training.optimizer is not None and not training.optimizer_offload:
        sharing = 1 if training.lora_rank else gpus  # each GPU has all adapters
        state = OPTIMIZERS[training.optimizer].per_gpu(
            trained, element, training.optimizer_options, sharing
        )
    summed = training.gradient_sums or (training.lora_rank > 0 and gpus > 1)
    sums = summed * FP32 * sum(p.numel for p in trained)
    return Memory(
        weights=share + gathered + own,
        gradients=(own if training.lora_rank else whole) + sums,
        optimizer=state,
        fp8_weight_copies=_delayed_state(config, recipe),
        workspace=CUBLAS_WORKSPACE if training.cuda else 0,
    )


def _delayed_state(config: ModelConfig, recipe: Recipe) -> int:
    """Return the bytes of FP32 scales and amax histories: three forward and two backward slots per linear."""
    linears = {**config.linears, HEAD: config.head}
    found = [
        (linears[name].gemms, own.recipe) for name, own in precisions(recipe, config.layers).items()
    ]
    delayed = [
        (gemms, own) for gemms, own in found if own is not None and SCHEMES[own.scheme].stateful
    ]
    return sum(g * 5 * FP32 * (own.fields["amax_history_len"] + 1) for g, own in delayed)


def memory_moments(config: ModelConfig, recipe: Recipe, training: Training) -> list[Memory]:
    """Return the moments that can be the peak: backward of the loss, the worst of the rest, and the update."""
    standing = _standing(config, recipe, training)
    loss, *rest = _walk(list(Tape(config, recipe, training).regions()), standing, training)
    worst = max(rest, key=lambda memory: memory.total)
    moments = [replace(loss, moment="loss"), replace(worst, moment=f"backward of {worst.moment}")]
    if training.optimizer is not None and not training.lora_rank:
        moments.append(
            replace(standing, moment="optimizer step", gradients=_updated(config, training))
        )
    return moments


def _updated(config: ModelConfig, training: Training) -> int:
    """Return the bytes of gradients in the optimizer step: all that remain, and those of a chunk in the masters' dtype.

    With owners (te_models.optim.parameter_owners) the gradients of a chunk, which may be one large table, are whole on
    the GPU that owns it, beside the buffers of an exchange.
    """
    assert training.optimizer is not None
    parameters = model_parameters(config)
    masters = has_masters(training.optimizer_options)
    share = -(-sum(p.numel for p in parameters) // training.gpus)
    if training.gpus > 1 and not OPTIMIZERS[training.optimizer].elementwise:
        largest = max(p.numel // p.count for p in parameters if p.kind == "table")
        held = max(largest, min(share, UPDATE_CHUNK // training.gpus))
        whole = held * (FP32 if masters else training.dtype_bytes)
        return (
            share * training.dtype_bytes
            + whole
            + 3 * min(EXCHANGE_CHUNK, held * training.dtype_bytes)
        )
    chunk = min(share, UPDATE_CHUNK)
    if training.gradient_sums and training.gpus == 1:  # FP32 masters take the sums themselves
        return share * FP32 + (0 if masters else chunk * training.dtype_bytes)
    wider = max(0, FP32 - training.dtype_bytes) if masters else 0
    return share * training.dtype_bytes + chunk * wider


def saved_bytes(
    config: ModelConfig, recipe: Recipe, training: Training, on_host: bool = False
) -> int:
    """Return the bytes that autograd saves for backward: activations, logits and FP8 copies of weights.

    With `on_host`, return only those that activation offload moves to the host.
    """
    saved = Memory()
    for region in Tape(config, recipe, training).regions():
        if region.offloaded or not on_host:
            saved = _after_forward(saved, region, copies=not (on_host and training.cached_weights))
    return saved.total
