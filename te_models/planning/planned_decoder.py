"""A model without data of which only some blocks exist, and whose passes note where each block begins and ends."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_models.config.layer import LayerSpec, LinearSpec
from te_models.config.model import ModelConfig
from te_models.config.precision import HEAD
from te_models.config.recipe import Recipe
from te_models.device.allocations import active, counted_as
from te_models.device.autograd import Context
from te_models.device.operations import OperationCount
from te_models.distributed.planned_ranks import PlannedRanks
from te_models.fp8.precision import ModelPrecision, model_precision
from te_models.kernels.dispatch import planned_kernels
from te_models.kernels.grouped_product import low_rank_product
from te_models.model.block import Block
from te_models.model.decoder import Decoder
from te_models.model.forward_context import ForwardContext
from te_models.model.output import Output, OutputRequest
from te_models.model.te_modules import Factory
from te_models.numerics.stored import StoredWeight
from te_models.planning.training import StepSetting


class _Boundary(torch.autograd.Function):
    """The identity, whose backward notes that it runs, and what its gradient is counted as."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        ctx.note = note
        # A view, so that autograd sees a new tensor; x itself would be marked as an input that is returned.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.note(grads[0])
        return grads[0], None


class AdaptedLinear(nn.Module):
    """A frozen te.Linear with an adapter: the products of te_models.adapters.low_rank."""

    def __init__(self, base: Any, spec: LinearSpec, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer = base
        self.a = nn.Parameter(torch.empty(rank, spec.inputs, dtype=dtype, device="meta"))
        self.b = nn.Parameter(torch.empty(spec.outputs, rank, dtype=dtype, device="meta"))

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Return the base layer's output and the adapter's."""
        result = self.base_layer(x, **options)
        return torch.addmm(result, nn.functional.linear(x, self.a), self.b.t())


class AdaptedExperts(nn.Module):
    """A frozen te.GroupedLinear whose experts have adapters, with their A below each other and their B interleaved."""

    def __init__(self, base: Any, spec: LinearSpec, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer = base
        self.rank = rank
        width = spec.experts * rank
        self.a = nn.Parameter(torch.empty(width, spec.inputs, dtype=dtype, device="meta"))
        self.b = nn.Parameter(torch.empty(spec.outputs, width, dtype=dtype, device="meta"))

    def forward(
        self, x: Tensor, rows: Any, run: Callable[..., Tensor] | None = None, **options: Any
    ) -> Tensor:
        """Return the experts' rows and their adapters'."""
        if run is None:
            result = self.base_layer(x, rows, **options)
        else:
            result = run(self.base_layer, x, rows, **options)
        a = self.a.unflatten(0, (-1, self.rank))
        b = self.b.unflatten(1, (self.rank, -1)).permute(2, 0, 1)
        return result + low_rank_product(x, a, b, 1.0, rows)


class PlannedDecoder(Decoder):
    """A model on meta of which only some blocks exist; a pass notes where each begins and ends."""

    def __init__(
        self, config: ModelConfig, recipe: Recipe, setting: StepSetting, layers: tuple[int, ...]
    ) -> None:
        self.measured = layers
        ranks: dict[str, Any] = {}  # which have the methods of a DeviceMesh that a model calls
        if setting.tensor_ranks > 1:
            ranks["tp_mesh"] = PlannedRanks(setting.tensor_ranks)
            ranks["sequence_parallel"] = setting.sequence
        if setting.expert_ranks > 1:
            ranks["ep_mesh"] = PlannedRanks(setting.expert_ranks)
            ranks["ep_replicas"] = PlannedRanks(setting.expert_replicas)
            ranks["ep_fp8"] = setting.fp8_dispatch
        if setting.context_ranks > 1:
            ranks["cp_mesh"] = PlannedRanks(setting.context_ranks)
        # Plain kernels first: the plan's kernels need the finished modules, and replace them below.
        super().__init__(
            config,
            **ranks,
            recipe=recipe,
            engine="planned",
            device="meta",
            dtype=torch.float32 if setting.dtype_bytes == 4 else torch.bfloat16,
            activation_checkpointing=setting.mode,
            fp8_params=setting.fp8_params,
            compile=False,
            fused=False,
            initialize=False,
            stored_linears=frozenset() if setting.stored is None else setting.stored.linears,
        )
        self._store_weights(setting)
        # On GPUs, whose buffers then have room for all rows that there can be, if rows of batches have one length.
        self.ranks_alike = setting.fused
        fused = setting.fused and setting.tensor_ranks == 1
        self.kernels = planned_kernels(self.te, compile=setting.compile, fused=fused)
        for module in self.modules():
            if setting.sharded and isinstance(module, self.te.LINEARS):
                # te.Linear reads it: under FSDP2 it caches no transposed copy of its weight.
                module._is_fsdp2 = True
        self.marks: list[tuple[str, int, tuple[int, ...]]] = []
        self.operations: OperationCount | None = None  # that counts what each layer computes
        self.layer_flops: dict[int, float] = {}
        self.held: list[Tensor] = []

    def _store_weights(self, setting: StepSetting) -> None:
        """Give the linears whose weights stay as they are stored such weights, without data."""
        if setting.stored is None:
            return
        for name in setting.stored.linears:
            # Other layers are copies of the measured ones, and have no modules.
            if int(name.split(".")[1]) not in self.measured:
                continue
            spec = self.config.linears[name]
            for weight in spec.weights:
                rows = setting.stored.form.rows(spec.outputs, spec.inputs)
                stored = nn.Parameter(StoredWeight(rows, self.dtype), requires_grad=False)
                self.get_submodule(name).register_parameter(weight, stored)

    def _make_block(self, spec: LayerSpec, layer: int, factory: Factory) -> nn.Module:
        return (
            super()._make_block(spec, layer, factory) if layer in self.measured else nn.Identity()
        )

    def _checked(self, recipe: Recipe) -> ModelPrecision:
        """Return the precision without the checks of a machine; sizes that a recipe cannot run are planned too."""
        precision = model_precision(self.te, recipe, self.specs, self.ep.divides)
        there = {f"layers.{layer}" for layer in self.measured}
        others = (n for n in precision.others if n == HEAD or n.rsplit(".", 2)[0] in there)
        return dataclasses.replace(precision, others=tuple(others))

    def note(self, name: str) -> None:
        """Note where the pass is."""
        allocations = active()
        assert allocations is not None
        self.marks.append((name, len(allocations.events), tuple(allocations.live)))

    def _run(self, layers: range, x: Tensor, context: ForwardContext) -> Tensor:
        # Only measured blocks run, so the input of a range of blocks is held in each of them or in none.
        self.held.append(x)  # as the caller does, but for all blocks alike
        for layer in layers:
            if layer not in self.measured:
                continue
            self.note(f"forward {layer}")
            # Backward passes these in the opposite order: its part of the block lies between "backward" and "after".
            x = self._bounded(x, f"after {layer}")
            before = 0.0 if self.operations is None else self.operations.total
            x = super()._run(range(layer, layer + 1), x, context)
            if self.operations is not None:
                self.layer_flops[layer] = self.operations.total - before
            x = self._bounded(x, f"backward {layer}")
        return x

    def _bounded(self, x: Tensor, name: str) -> Tensor:
        return _Boundary.apply(x, functools.partial(self._note_backward, name))

    def _note_backward(self, name: str, gradient: Tensor) -> None:
        allocations = active()
        assert allocations is not None
        # Moved, since the gradient that the head makes is allocated among its results.
        allocations.move(gradient, "activation_gradients")
        self.note(name)

    def _output(self, x: Tensor, context: ForwardContext, request: OutputRequest) -> Output:
        self.note("head")
        self.held.clear()
        return super()._output(self._bounded(x, "blocks"), context, request)

    def _logits(self, h: Tensor, shape: tuple[int, int], context: ForwardContext) -> Tensor:
        with counted_as("logits"):
            return super()._logits(h, shape, context)

    def _fused_loss(self, h: Tensor, targets: Tensor) -> Tensor:
        with counted_as("logits"):
            return super()._fused_loss(h, targets)


def add_adapters(model: Decoder, setting: StepSetting) -> None:
    """Freeze the model, and give its linears adapters."""
    model.requires_grad_(False)
    for block in model.layers:
        if not isinstance(block, Block):
            continue
        for part in block.linear_owners:
            for spec in part.spec.linears:
                # As `--lora` without targets does.
                kind = AdaptedLinear if spec.adapted else None
                if spec.experts and setting.lora_experts:
                    kind = AdaptedExperts
                if kind is not None:
                    base = part.get_submodule(spec.name)
                    adapted = kind(base, spec, setting.lora_rank, model.dtype)
                    part.add_module(spec.name, adapted)
