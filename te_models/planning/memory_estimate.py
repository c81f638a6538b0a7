"""Predict the memory of a training step, without a GPU and without data.

One block of each kind runs on the meta device (te_models/planning/measured.py). Going through all of them forward and
then backward gives the memory at every moment; the largest is the peak. tests/planning/test_memory_plan.py compares it
with peaks measured on GPUs.

Not counted: CUDA's context (outside PyTorch's allocator), fragmentation, and the up to 1 MiB by which the allocator
rounds up a tensor.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from te_models.config.chunk_sizes import EXCHANGE_CHUNK, FP32, UPDATE_CHUNK
from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe
from te_models.optim import OPTIMIZERS
from te_models.optim.projected import is_projected
from te_models.planning.measured import (
    PARTS,
    REST,
    HeldTensor,
    MeasuredStep,
    Profile,
    Standing,
    Stretches,
)
from te_models.planning.parameter_bytes import (
    has_masters,
    matrix_elements,
    optimizer_bytes,
    projected_sums,
    trained_elements,
)
from te_models.planning.training import Training

# Bytes; Transformer Engine on Hopper and newer (get_cublas_workspace_size_bytes).
CUBLAS_WORKSPACE = 2**25 + 1024


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


def memory_moments(config: ModelConfig, recipe: Recipe, training: Training) -> list[Memory]:
    """Return the moments that can be the peak: the loss, the worst of forward and backward, and the update."""
    measured = MeasuredStep(config, recipe, training.setting)
    run = measured.run(training.batch_size)
    tensors = measured.tensors(run.standing)
    standing = _standing(training, measured, run.standing, tensors)
    walk = _Walk(training)
    walk.through("embedding", run.embedding)
    moved = _moved(measured, run, training)
    for depth, layer in enumerate(measured.same):
        walk.through("forward", run.forward[layer])
        if depth in moved:
            walk.add(-moved[depth])
    walk.through("loss", run.head)
    walk.through("loss", run.loss)
    for depth in reversed(range(len(measured.same))):
        if depth - 1 in moved:  # the first backward of a block fetches the one below it
            walk.add(moved[depth - 1])
        walk.through(f"backward of layer {depth}", run.backward[measured.same[depth]])
    walk.through("backward of the embedding", run.rest)
    loss = walk.worst.pop("loss")
    name, worst = max(walk.worst.items(), key=lambda item: int(item[1].sum()))
    moments = [
        standing.plus("loss", **_memory_parts(loss)),
        standing.plus(name, **_memory_parts(worst)),
    ]
    if training.optimizer is not None and not training.lora_rank:
        moments.append(
            replace(
                standing,
                moment="optimizer step",
                gradients=_gradients_in_update(training, tensors),
            )
        )
    return moments


def _memory_parts(sizes: Tensor) -> dict[str, int]:
    """Return bytes [PARTS] by the parts of `Memory`."""
    parts = dict(zip(PARTS, sizes.tolist(), strict=True))
    parts["gradients"] += parts.pop("expert_gradients")
    return parts


class _Walk:
    """A walk along the stretches of a step, which adds up their memory in the columns of PARTS.

    Attributes:
        now: the bytes at the end of the last stretch, int64 [PARTS].
        worst: name of a stretch -> the bytes of its worst moment, int64 [PARTS].
    """

    def __init__(self, training: Training) -> None:
        # Under FSDP2 the shard of a gradient stays; whole ones are in buffers that `_standing` counts.
        shards = {"gradients": training.data_ranks, "expert_gradients": training.expert_replicas}
        self.divisor = torch.tensor([shards.get(name, 1) for name in PARTS])  # int64 [PARTS]
        self.now = torch.zeros(len(PARTS), dtype=torch.int64)
        self.worst: dict[str, Tensor] = {}

    def through(self, name: str, profile: Profile) -> None:
        """Add a stretch; of several under one name `worst` keeps the worst moment of all."""
        moments = profile.moments // self.divisor + self.now  # [moments, PARTS]
        highest = moments[int(moments.sum(1).argmax())]
        if name not in self.worst or highest.sum() > self.worst[name].sum():
            self.worst[name] = highest
        self.now = moments[-1]

    def add(self, change: Tensor) -> None:
        """Move tensors to the host, or back."""
        self.now = self.now + change


def _moved(measured: MeasuredStep, run: Stretches, training: Training) -> dict[int, Tensor]:
    """Return what activation offload moves to the host: of all blocks but the last what their forward leaves.

    FP8 copies of weights too, unless the next micro-batch uses them. Storages of up to 1 MiB, which
    te_models/model/offload.py leaves on the device, are not told apart.
    """
    if not training.activation_offload:
        return {}
    stays = "fp8_weight_copies" if training.cached_weights else ""
    is_moved = torch.tensor([name != stays for name in PARTS])  # [PARTS]
    moved = {}
    for depth, layer in enumerate(measured.same[:-1]):
        moved[depth] = run.forward[layer].end * is_moved
    return moved


def _standing(
    training: Training, measured: MeasuredStep, standing: Standing, tensors: Counter[HeldTensor]
) -> Memory:
    """Return the memory before the forward: weights, optimizer state, sums and buffers that stay during the step."""
    element = training.dtype_bytes
    ranks = training.data_ranks
    layers = measured.same
    # Bytes of weights: of the experts of all layers, of the rest of the layers, and of this rank's shard of all.
    experts = sum(standing.expert_weights[layer] for layer in layers)
    blocks = sum(standing.weights[layer] for layer in layers) - experts
    dense_shard = -(-(blocks + standing.weights[REST]) // ranks)
    expert_shard = -(-experts // training.expert_replicas)
    # Buffers of FSDP2, which gathers the weights of the running block and the next, and has whole gradients of as many.
    # Embedding, last norm and head stay gathered.
    gathered_weights = 0
    whole_gradients = 0
    if ranks > 1:
        depth = len(layers)
        tables = matrix_elements(standing.tensors[REST]) * element
        matrices = 0
        for layer in layers:
            for tensor, count in standing.tensors[layer].items():
                # Experts that only this rank has lie there whole.
                if tensor.is_matrix and not (tensor.expert and training.expert_replicas == 1):
                    matrices += count * tensor.numel * element
        whole_gradients = tables + 2 * (matrices // depth)
        shared = []  # bytes of each block's weights that other ranks have parts of
        for layer in layers:
            alone = standing.expert_weights[layer] if training.expert_replicas == 1 else 0
            shared.append(standing.weights[layer] - alone)
        # Blocks at the ends may be in BF16 beside others in FP8.
        pairs = [one + other for one, other in itertools.pairwise([*shared, 0])]
        gathered_weights = tables + max(pairs)
    trained = trained_elements(tensors)
    adapter_bytes = trained * element if training.lora_rank else 0
    state = 0
    if training.optimizer is not None and not training.optimizer_offload:
        state = planned_optimizer_bytes(training.optimizer, training, tensors)
    # FP32 sums of gradients: over micro-batches, and of adapters over GPUs, which FSDP2 does not sum.
    gradient_sums = 0
    if training.gradient_sums or (training.lora_rank > 0 and ranks > 1):
        projected, projections = projected_sums(tensors, training.projected_rank)
        gradient_sums = FP32 * (trained - projected + projections)
    scales = standing.states.get(REST, 0)
    for layer in layers:
        scales += standing.states.get(layer, 0)
    gradients = adapter_bytes if training.lora_rank else whole_gradients
    return Memory(
        weights=dense_shard + expert_shard + gathered_weights + adapter_bytes,
        gradients=gradients + gradient_sums,
        optimizer=state,
        fp8_weight_copies=scales,
        workspace=CUBLAS_WORKSPACE if training.cuda else 0,
    )


def planned_optimizer_bytes(name: str, training: Training, tensors: Counter[HeldTensor]) -> int:
    """Return the bytes of masters and state of an optimizer per GPU; the plan's own has the plan's options."""
    options = training.optimizer_options if name == training.optimizer else {}
    if training.lora_rank:  # each GPU has all adapters
        return optimizer_bytes(name, tensors, options)
    return optimizer_bytes(
        name,
        tensors,
        options,
        ranks=training.data_ranks,
        expert_ranks=training.expert_replicas,
    )


def _gradients_in_update(training: Training, tensors: Counter[HeldTensor]) -> int:
    """Return the bytes of gradients in the optimizer step: all that remain, and a chunk's in the masters' dtype.

    With owners (te_models.optim.parameter_owners) the gradients of a chunk, which may be one large table, are whole on
    the GPU that owns it, beside the buffers of an exchange.
    """
    assert training.optimizer is not None
    ranks = training.data_ranks
    masters = has_masters(training.optimizer_options)
    trained = {tensor: count for tensor, count in tensors.items() if tensor.trained}
    experts = sum(count * tensor.numel for tensor, count in trained.items() if tensor.expert)
    dense = trained_elements(trained) - experts
    # Elements of this rank's shards, rounded up.
    dense_share = -(-dense // ranks)
    expert_share = -(-experts // training.expert_replicas)
    share = dense_share + expert_share
    if ranks > 1 and not OPTIMIZERS[training.optimizer].elementwise:
        largest = max(tensor.numel for tensor in trained)
        owned = max(largest, min(share, UPDATE_CHUNK // ranks))  # elements of a chunk at its owner
        chunk_bytes = owned * (FP32 if masters else training.dtype_bytes)
        exchange_bytes = 3 * min(EXCHANGE_CHUNK, owned * training.dtype_bytes)
        return share * training.dtype_bytes + chunk_bytes + exchange_bytes
    rank = training.projected_rank
    projected, projections = projected_sums(trained, rank)
    share -= projected
    chunk = min(share, UPDATE_CHUNK)
    projection_bytes = projections * FP32 + _raised_bytes(trained, rank)
    if training.gradient_sums and ranks == 1:
        # FP32 masters take the sums themselves; others take a chunk at a time in their own dtype.
        chunk_bytes = 0 if masters else chunk * training.dtype_bytes
        return projection_bytes + share * FP32 + chunk_bytes
    # FP32 masters take a chunk at a time in FP32, in place of its gradients in the dtype of the parameters.
    chunk_bytes = chunk * max(0, FP32 - training.dtype_bytes) if masters else 0
    return projection_bytes + share * training.dtype_bytes + chunk_bytes


def _raised_bytes(tensors: Mapping[HeldTensor, int], rank: int) -> int:
    """Return the bytes of the largest update that GaLore makes of a projected one: before it is scaled, and after."""
    largest = 0
    for tensor in tensors:
        for role, shape in tensor.parts:
            if rank and is_projected(role, shape, rank):
                largest = max(largest, shape[0] * shape[1])
    return 2 * FP32 * largest


def saved_bytes(
    config: ModelConfig, recipe: Recipe, training: Training, on_host: bool = False
) -> int:
    """Return the bytes that a forward leaves for backward: activations, logits and FP8 copies of weights.

    With `on_host`, return only those that activation offload moves to the host.
    """
    measured = MeasuredStep(config, recipe, training.setting)
    if not on_host:
        return measured.kept(training.batch_size)
    moved = _moved(measured, measured.run(training.batch_size), training)
    return sum(int(part.sum()) for part in moved.values())
