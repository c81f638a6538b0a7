"""Forward and backward of a model as CUDA graphs, captured once and replayed.

Otherwise the host takes longer to launch the kernels of a small step than the device to run them (gated-350m: 158 of
185 ms were launches). A graph has fixed addresses and Python values, so each batch is copied to the buffers of the
first one, and gradients appear where the captured step produced them.

A step of several micro-batches has up to three graphs, by what Python decides in them: the first micro-batch quantizes
the weights and begins the sums of gradients, further ones use those weights and add to the sums, and the last also
reduces the sums over the processes. Under FSDP2 all micro-batches are one graph, which contains the sums. A step that a
recorder counts has as many graphs of its own, so that counting costs the other steps nothing.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from te_models.causal_lm import CausalLM
from te_models.config.training import TrainConfig
from te_models.device.choice import computing_device
from te_models.device.cuda_capture import capture, failed_capture, first_error
from te_models.distributed.gathers import wait_for_gathers
from te_models.errors import UsageError
from te_models.model.decoder_of import decoder_of
from te_models.model.graph_obstacle import graph_obstacle
from te_models.model.output import step_loss
from te_models.model.recompute import may_draw
from te_models.optim.gradients import Gradients
from te_models.training.fsdp_copies import no_host_copies
from te_models.training.parallel import restore_unreduced_gradients, unreduced_gradients

# Eager micro-batches before the capture, for compilers, workspaces of libraries and FP8 state created on first use.
WARM_UP = 3
# Micro-batches in one graph, each of which takes some thousand kernels' launches of the host's and device's memory.
MOST_TOGETHER = 16
ATTEMPTS = 3  # failed captures, one per step, after which all further steps run eagerly

log = logging.getLogger(__name__)


class MicroBatch(Protocol):
    """A function that runs forward and backward of a micro-batch."""

    def __call__(
        self,
        batch: Mapping[str, Tensor],
        weight: Tensor,
        router_weight: Tensor,
        /,
        first: bool,
        last: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return its part of the step's loss, and RoutingReport.metrics of a model with experts.

        `weight` is the factor of its loss and `router_weight` of the losses of its routers, FP32 scalars.
        """
        ...


class Kind(NamedTuple):
    """The place of a micro-batch in its step, and whether a recorder counts it: both decide what Python does in it."""

    first: bool
    last: bool
    recorded: bool = False


Unit = tuple[Kind, ...]  # the micro-batches that one graph runs
# The tensors of a micro-batch, the factor of its loss, and the factor of its routers' losses.
Input = tuple[Mapping[str, Tensor], Tensor | float, Tensor | float]


@dataclass
class Graph:
    """Captured micro-batches, and the tensors into which each replay writes their results.

    Attributes:
        replayed: a torch.cuda.CUDAGraph.
        loss: the sum of their losses.
        routing: RoutingReport.metrics of each; empty for a model without experts.
    """

    replayed: Any
    loss: Tensor
    routing: list[Tensor]


@dataclass
class Buffers:
    """The tensors from which a graph reads one micro-batch and the factors of its losses."""

    inputs: dict[str, Tensor]
    weight: Tensor
    router_weight: Tensor

    def take(
        self,
        batch: Mapping[str, Tensor],
        weight: Tensor | float,
        router_weight: Tensor | float,
    ) -> None:
        """Copy a micro-batch and the factors of its losses into them."""
        for name, buffer in self.inputs.items():
            buffer.copy_(batch[name], non_blocking=True)
        _fill(self.weight, weight)
        _fill(self.router_weight, router_weight)


def _fill(buffer: Tensor, value: Tensor | float) -> None:
    """Write a scalar into a buffer, at the address that a graph reads."""
    if isinstance(value, Tensor):
        buffer.copy_(value)
    else:
        buffer.fill_(value)


class GraphedStep:
    """Forward and backward of one training step, with the numbers of the eager step::

        step = GraphedStep(model)
        loss = step(input_ids=ids, labels=labels)
        optimizer.step()

    Each call replaces the gradients (there is nothing to zero) and returns the loss, an FP32 scalar that the next call
    overwrites. The first calls run eagerly, and so does a call whose capture another thread disturbs, for example by
    synchronizing the device; the next call tries again. Weights and FP8 state may be changed in place between calls.

    Under FSDP2 the graph includes the gathers of weights and the reductions of gradients. NCCL does not destroy a
    communicator that a graph still uses: call `close` before torch.distributed.destroy_process_group, which waits
    forever otherwise.

    Ranks that share experts (`ep_mesh`) call it at the same time, with tensors of the same shapes.

    Args:
        model: a CausalLM on a CUDA device, or a TEModelsForCausalLM, of which it runs the CausalLM.
        calibrate: under recipe "delayed", measure the first scales on the first call's batch (CausalLM.calibrate).
        micro_batch: runs forward and backward of a micro-batch; None: of the model, once per step.
        gradients: collects the gradients of the micro-batches of a step.

    Raises:
        ValueError: the model cannot be captured (`obstacle` says why), or a call's tensors differ in shape or name from
            the first call's, or the model's recipe has changed.
    """

    def __init__(
        self,
        model: nn.Module,
        calibrate: bool = True,
        micro_batch: MicroBatch | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        model = decoder_of(model)
        reason = obstacle(model)
        if reason is not None:
            raise UsageError(f"no CUDA graph of this model: {reason}")
        self.model = cast(CausalLM, model)
        self.recipe = self.model.recipe
        self.calibrate = calibrate
        self.micro_batch = micro_batch or self._micro_batch
        self.gradients = gradients or Gradients()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.calls = 0
        self.failures = 0
        self.disturbed = False  # whether a capture has failed in this step
        self.warm = 0  # micro-batches that have run eagerly
        self.graphs: dict[Unit, Graph] = {}
        # The gradients that a replayed step leaves (Gradients.snapshot), of steps that are recorded and of others.
        self.snapshots: dict[bool, object] = {}
        # A capture needs a stream of its own; warming up on it gives libraries their workspaces there.
        self.stream: Any = torch.cuda.Stream(model.device)
        # The addresses that the graphs read, per micro-batch of a graph: made with the first batch, kept for good.
        self.buffers: list[Buffers] = []
        # What routers did in the newest step (RoutingReport.metrics), per micro-batch.
        self.routing: list[Tensor] = []

    def __call__(
        self,
        weight: Tensor | float = 1.0,
        router_weight: Tensor | float | None = None,
        **batch: Tensor,
    ) -> Tensor:
        """Compute the gradients of `weight` times the loss; return that product.

        Args:
            weight: factor of the loss; if a tensor, on the model's device.
            router_weight: factor of the routers' losses in place of `weight`, which counts targets; None: `weight`.
            batch: tensors of CausalLM.forward, "input_ids" and "labels" among them.
        """
        router_weights = [weight if router_weight is None else router_weight]
        return self.step([batch], [weight], router_weights)

    def step(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        weights: Sequence[Tensor | float],
        router_weights: Sequence[Tensor | float] | None = None,
        recorded: bool = False,
    ) -> Tensor:
        """Compute the gradients of a sum of losses, each times its weight; return the sum, an FP32 scalar.

        Args:
            micro_batches: tensors of CausalLM.forward, as in a call, and as many in every step.
            weights: as many factors; tensors are on the model's device.
            router_weights: factors of the routers' losses in place of `weights`; None: `weights`.
            recorded: whether a recorder counts the casts of this step.
        """
        if router_weights is None:
            router_weights = weights
        misfit = self.misfit(micro_batches)
        if misfit:
            # Not run eagerly instead: a loop whose shapes vary would lose its speed without a word.
            raise UsageError(misfit)
        for module in self.fsdp_modules:
            module.reshard()  # evaluation leaves weights gathered, and a graph captured then would never gather them
        self._drop_gradients()
        if not self.calls and self.calibrate:
            # Before the warm-up: its passes update the histories, which would otherwise begin with scales of 1.
            self._calibrate(micro_batches, weights, router_weights)
        self.calls += 1
        self.disturbed = False
        self.routing = []
        units = self._units(len(micro_batches), recorded)
        inputs = list(zip(micro_batches, weights, router_weights, strict=False))
        if self.gradients.changes_projectors:
            # Such a step runs eagerly, also between replays, whose graphs stay.
            with self.gradients.collecting():
                return self._run_units(units, inputs, self._run_eagerly)
        if all(unit in self.graphs for unit in units):
            total = self._run_units(units, inputs, self._replay)
            # A replay writes to the same addresses; whoever set .grad to None only dropped the references.
            self.gradients.restore(self.parameters, self.snapshots[recorded])
            return total
        # Still warming up, or given up after failed captures.
        run = self._run_eagerly
        if self.warm >= WARM_UP and self.failures < ATTEMPTS:
            run = self._capture_and_replay
            # The graphs of both kinds of steps write their gradients to the same memory.
            for other, gradients in self.snapshots.items():
                self.snapshots[other] = self.gradients.without_ownership(gradients)
        with self.gradients.collecting():
            total = self._run_units(units, inputs, run)
        if all(unit in self.graphs for unit in units):
            self.snapshots[recorded] = self.gradients.snapshot(self.parameters)
        else:
            self.close()  # the graphs that were captured before a capture failed
        return total

    def _calibrate(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        weights: Sequence[Tensor | float],
        router_weights: Sequence[Tensor | float],
    ) -> None:
        """Measure the first scales of delayed scaling on the micro-batches of a step."""
        device = self.model.device
        batches = []
        for batch in micro_batches:
            batches.append({name: value.to(device) for name, value in batch.items()})
        self.model.calibrate(*batches, weights=weights, router_weights=router_weights)

    @property
    def graph(self) -> Any:
        """The torch.cuda.CUDAGraph with the step's last micro-batch; None before the capture."""
        last = next(reversed(self.graphs.values()), None)
        return None if last is None else last.replayed

    @property
    def captured(self) -> bool:
        """True once the step runs as CUDA graphs."""
        return bool(self.graphs)

    def close(self) -> None:
        """Free the graphs. The next call captures the step once more."""
        if self.graphs:
            # The newest replay may still run; its memory goes with the graph.
            torch.cuda.synchronize(self.model.device)
            for graph in self.graphs.values():
                graph.replayed.reset()
            self.graphs = {}
            if len(self.snapshots) > 1:
                self._drop_gradients()  # perhaps without ownership of memory that is free now
            self.snapshots = {}

    def misfit(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> str:
        """Return why a step of these micro-batches cannot be a graph; empty if it can."""
        if self.model.recipe is not self.recipe:
            return "the model's recipe has changed: make a new GraphedStep"
        if not self.model.training or not torch.is_grad_enabled():
            return "a GraphedStep trains: call model.train() before it, and evaluate with the model itself"
        # Before the first step there are no buffers: the micro-batches must then fit each other.
        before = self.buffers[0].inputs if self.buffers else micro_batches[0]
        for batch in micro_batches:
            if "attention_mask" in batch:
                return "a CUDA graph cannot test attention_mask for padding: pack documents (document_ids) instead"
            # Names of both, in order: a tensor that is missing is as bad as one too many.
            for name in dict.fromkeys((*before, *batch)):
                shape = _shape(batch, name)
                first = _shape(before, name)
                if shape != first:
                    return (
                        f"{name} has shape {shape}, in the first call {first}: a CUDA graph has one shape, so make a "
                        "GraphedStep for each"
                    )
        return ""

    def _units(self, count: int, recorded: bool) -> list[Unit]:
        """Return the micro-batches of a step of `count`, by the graph that runs them."""
        kinds = [
            Kind(first=number == 0, last=number == count - 1, recorded=recorded)
            for number in range(count)
        ]
        if self.fsdp_modules:
            # FSDP2 keeps unreduced gradients in tensors of its own between micro-batches.
            return [tuple(kinds)]
        return [(kind,) for kind in kinds]

    def _run_units(
        self, units: Sequence[Unit], inputs: Sequence[Input], run: Callable[[Unit], Tensor]
    ) -> Tensor:
        """Run the micro-batches of a step, unit by unit, by `run`; return the sum of the losses that it returns."""
        total = None
        number = 0  # of the micro-batch
        for unit in units:
            self._make_buffers(len(unit), like=inputs[0][0])
            for buffers in self.buffers[: len(unit)]:
                batch, weight, router_weight = inputs[number]
                buffers.take(batch, weight, router_weight)
                number += 1
            # A graph's loss is overwritten by the next replay, hence the sum as a new tensor.
            loss = run(unit)
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def _make_buffers(self, count: int, like: Mapping[str, Tensor]) -> None:
        """Make buffers for micro-batches of these names and shapes until there are `count`."""
        device = self.model.device
        while len(self.buffers) < count:
            inputs = {name: torch.empty_like(value, device=device) for name, value in like.items()}
            weight = torch.ones((), device=device)
            self.buffers.append(Buffers(inputs, weight, torch.ones_like(weight)))

    def _capture_and_replay(self, unit: Unit) -> Tensor:
        """Run micro-batches from a new graph if there is none for them yet, or eagerly once a capture has failed."""
        failures = self.failures
        if unit not in self.graphs and not self.disturbed:
            self._capture(unit)
            self.disturbed = self.failures > failures
        return self._run_eagerly(unit) if self.disturbed else self._replay(unit)

    def _capture(self, unit: Unit) -> None:
        """Capture micro-batches. A failure changes only `failures`, since a capture executes nothing."""
        graph = torch.cuda.CUDAGraph()
        # Graphs of a step are replayed in the order of their capture, and graphs of recorded steps never between the
        # others, so all of them may share memory.
        pool = None
        if self.graphs:
            pool = next(iter(self.graphs.values())).replayed.pool()
        if unit[0].first and not unit[0].last:
            # Whoever drops cached FP8 weights frees their memory, so a graph has to write to weights of its own.
            for module in self.model.modules():
                if isinstance(module, self.model.te.LINEARS):
                    self.model.te.drop_cached_weights(module)
        before = unreduced_gradients(self.model)
        try:
            with (
                no_host_copies() if self.fsdp_modules else nullcontext(),
                capture(graph, self.stream, pool=pool),
            ):
                loss, routing = self._run(unit)
        except RuntimeError as error:
            # Out of memory, for one, has to be told as it is.
            if not failed_capture(error):
                raise
            self.failures += 1
            self._drop_gradients()
            restore_unreduced_gradients(before)
            outlook = "all further steps run without it"
            if self.failures < ATTEMPTS:
                outlook = "the next step tries again"
            log.warning(
                "the CUDA graph of the step was not captured, %s: %s",
                outlook,
                str(first_error(error)).splitlines()[0],
            )
            return
        self.graphs[unit] = Graph(graph, loss, routing)

    def _replay(self, unit: Unit) -> Tensor:
        """Replay micro-batches; return the sum of their losses, which the next replay overwrites."""
        graph = self.graphs[unit]
        graph.replayed.replay()
        for routing in graph.routing:
            # The next replay writes to the same memory.
            self.routing.append(routing.clone())
        return graph.loss

    def _run_eagerly(self, unit: Unit) -> Tensor:
        """Run micro-batches on the stream of the captures; return the sum of their losses."""
        current = torch.cuda.current_stream(self.model.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            loss, routing = self._run(unit)
        # Two waits, so that the step is ordered with what the caller queued before and after it.
        current.wait_stream(self.stream)
        self.warm += len(unit)
        self.routing += routing
        return loss

    def _run(self, unit: Unit) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward of micro-batches eagerly; inside a capture they are recorded instead.

        Returns the sum of their losses, and what routers did in each.
        """
        total = None
        routing = []
        before = self.model.ranks_alike
        self.model.ranks_alike = True  # the caller's promise
        try:
            for buffers, kind in zip(self.buffers, unit, strict=False):
                loss, routed = self.micro_batch(
                    buffers.inputs,
                    buffers.weight,
                    buffers.router_weight,
                    first=kind.first,
                    last=kind.last,
                )
                total = loss if total is None else total + loss
                if routed is not None:
                    routing.append(routed)
        finally:
            self.model.ranks_alike = before
        assert total is not None
        return total, routing

    def _micro_batch(
        self,
        inputs: Mapping[str, Tensor],
        weight: Tensor,
        router_weight: Tensor,
        first: bool,
        last: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model on the only micro-batch of a step."""
        output = self.model(**inputs, return_logits=False)
        loss = step_loss(output, weight, router_weight, self.model.router_losses)
        loss.backward()
        wait_for_gathers(self.model)
        routed = None if output.routing is None else output.routing.metrics(router_weight)
        return loss.detach(), routed

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _shape(batch: Mapping[str, Tensor], name: str) -> list[int] | None:
    return [*batch[name].shape] if name in batch else None


def obstacle(model: nn.Module) -> str | None:
    """Return why this model's step cannot be captured in a CUDA graph; None if it can."""
    if not isinstance(model, CausalLM):
        return "the model is wrapped (by LoRA or another module)"
    device = computing_device(model.device).type
    if device != "cuda":
        return f"the model is on {device}"
    reason = graph_obstacle(model, ranks_alike=True)
    if reason:
        return reason
    if model.activation_checkpointing != "none" and any(may_draw(block) for block in model.layers):
        return "activation checkpointing must restore the random state for a hook or a third-party module"
    if model.activation_offload:
        return "activation offload copies to the host"
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return "dropout draws random numbers"
    if model.tp.size > 1:
        return "tensor parallelism"
    # A step would replay the scale of the captured one.
    if model.fp8_params and isinstance(model, FSDPModule):
        return "FP8 weights are gathered with scales that each step recomputes"
    return None


def step_obstacle(model: CausalLM, config: TrainConfig) -> str | None:
    """Return why a run's step is not a CUDA graph; None if it is."""
    if not config.cuda_graph:
        return "cuda_graph=False"
    accumulates = isinstance(model, FSDPModule) and config.gradient_accumulation > 1
    if accumulates and config.gradient_accumulation > MOST_TOGETHER:
        return f"FSDP2 collects the gradients of more than {MOST_TOGETHER} micro-batches eagerly"
    return obstacle(model)
