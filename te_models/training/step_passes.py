"""Forward and backward of the micro-batches of a step, as eager passes or as one CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.config.recipe import Recipe
from te_models.config.training import TrainConfig
from te_models.distributed.gathers import wait_for_gathers
from te_models.model.output import step_loss
from te_models.optim.gradients import Gradients
from te_models.training.cuda_graph import GraphedStep, step_obstacle
from te_models.training.evaluation import Batch, count_targets, count_tokens, to_device
from te_models.training.parallel import Parallel, reuses_fp8_weights
from te_models.training.recording import Recorder
from te_models.training.routers import StepWeights

log = logging.getLogger(__name__)


class StepPasses:
    """Computes the gradients of a step. It knows nothing of the optimizer, of checkpoints or of the loop.

    Attributes:
        train_model: the model, as a function of a micro-batch; a test may put another in its place.
        graph: the step as a CUDA graph; None: every step runs eagerly.
        routed: RoutingReport.metrics of the last step's micro-batches; empty for a model without experts.
    """

    def __init__(
        self,
        model: CausalLM,
        gradients: Gradients,
        parallel: Parallel,
        config: TrainConfig,
        recorder: Recorder | None = None,
    ) -> None:
        self.model = model
        self.gradients = gradients
        self.parallel = parallel
        self.config = config
        self.recorder = recorder
        self.device = model.device
        self.train_model: Callable[..., Any] = model
        self.routed: list[Tensor] = []
        self._calibrated_for: Recipe | None = None  # the model is known to have scales for it
        self._logged_misfit = False
        self.graph = self._new_graph()

    def calibrated(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return `batches` once the first step's micro-batches have given the model the scales that it needs."""
        # The first step then trains on the same micro-batches: they are put back in front.
        first = list(islice(batches, self.config.gradient_accumulation))
        self._calibrate(first, self._weights(first))
        return chain(first, batches)

    def run(
        self, micro_batches: list[Batch], eager: bool = False, use_graph: bool = True
    ) -> Tensor:
        """Compute the gradients of the mean loss per counted token of the step.

        Args:
            micro_batches: this process's.
            eager: run without the CUDA graph and without attaching the recorder.
            use_graph: False: run without the CUDA graph, but with the recorder.

        Returns:
            this process's part of the loss, a scalar on the device; `routed` then has the metrics of the routers.
        """
        self.model.train()
        # Shares of the targets of the whole step, on all processes: the loss is a mean over tokens, not over batches.
        weights = self._weights(micro_batches)
        self.routed.clear()
        self._calibrate(micro_batches, weights)
        # Calibrated first: a graph that is captured below must find its scales.
        self._follow_recipe()
        batches = [to_device(batch, self.device) for batch in micro_batches]
        if self.recorder is not None and not eager:
            self.recorder.attach()  # a new recipe may have replaced the quantizers
        graph = self.graph if use_graph and not eager else None
        self.model.ranks_alike = self._ranks_alike(batches)
        try:
            return self._run(batches, weights, graph, eager)
        finally:
            # An evaluation compares no shapes, and its batches may differ.
            self.model.ranks_alike = False

    def _ranks_alike(self, micro_batches: list[Batch]) -> bool:
        """Return whether ranks that share experts have batches of one shape, and may give each other all tokens."""
        # Only a graph needs it. Without one each rank sends the rows of its own tokens, however many there are.
        if self.model.ep.gathered is None or not self.config.cuda_graph:
            return False
        own_shapes = []
        for batch in micro_batches:
            own_shapes.append({name: list(value.shape) for name, value in batch.items()})
        # A message between the hosts, so that none waits for a device.
        shapes_of_ranks = self.parallel.ranks.gather(own_shapes)
        return all(shapes == shapes_of_ranks[0] for shapes in shapes_of_ranks)

    def _run(
        self,
        batches: list[Batch],
        weights: StepWeights,
        graph: GraphedStep | None,
        eager: bool,
    ) -> Tensor:
        """Compute the gradients and the loss as `run` does, from batches on the device; `graph` None: eagerly."""
        if graph is not None and self._fits(graph, batches):
            recorded = self.recorder is not None and self.recorder.recording
            loss = graph.step(batches, weights.predictions, weights.routers, recorded)
            self.routed += graph.routing
            return loss
        # Summed on the device, so that no micro-batch waits for the host to read a loss.
        total = torch.zeros((), device=self.device)
        last = len(batches) - 1
        with self.gradients.collecting():
            for number, batch in enumerate(batches):
                loss, routed = self._micro_batch(
                    batch,
                    weights.predictions[number],
                    weights.routers[number],
                    first=number == 0,
                    last=number == last,
                )
                total += loss
                if routed is not None:
                    self.routed.append(routed)
        return total

    def use_recorder(self, recorder: Recorder) -> None:
        """Let a recorder count from the next step on; a recorded step has a graph of its own."""
        self.recorder = recorder

    def close(self) -> None:
        """Free the CUDA graph, before which no process group can be destroyed."""
        if self.graph is not None:
            self.graph.close()

    @property
    def calibrates(self) -> bool:
        """True if the next step first gives scales to the te.Linears that have none for the model's recipe."""
        return self.config.calibrate and self._calibrated_for is not self.model.recipe

    def _calibrate(self, micro_batches: list[Batch], weights: StepWeights) -> None:
        """Give the model scales from the micro-batches of a step, if it has none for its recipe."""
        if not self.calibrates:
            return
        self.model.train()
        batches = [to_device(batch, self.device) for batch in micro_batches]
        self.model.calibrate(
            *batches,
            weights=weights.predictions,
            router_weights=weights.routers,
        )
        self._calibrated_for = self.model.recipe

    def _weights(self, micro_batches: list[Batch]) -> StepWeights:
        """Return the factors of this process's micro-batches in the loss of their step."""
        targets = [count_targets(batch, self.model.cp) for batch in micro_batches]
        predictions = self.parallel.loss_weights(targets, self.device)
        if self.model.config.moe is None:
            return StepWeights(predictions=predictions, routers=predictions)
        tokens = [count_tokens(batch, self.model.cp) for batch in micro_batches]
        routers = self.parallel.router_weights(tokens, self.device)
        return StepWeights(predictions=predictions, routers=routers)

    def _micro_batch(
        self,
        batch: Mapping[str, Tensor],
        weight: Tensor | float,
        router_weight: Tensor | float,
        first: bool,
        last: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Run forward and backward of a micro-batch.

        Args:
            batch: arguments of the model.
            weight: the factor of its loss in the step's.
            router_weight: the factor of its router losses.
            first: whether it is the first micro-batch of its step.
            last: whether it is the last one.

        Returns:
            its part of the step's loss (te_models.model.output.step_loss), and RoutingReport.metrics of a model with
            experts, else None.
        """
        config = self.config
        if self.recorder is not None:
            self.recorder.next_micro_batch(first)
        self.parallel.prepare_micro_batch(self.train_model, last=last)
        # Weights change once per step: the first micro-batch quantizes them and keeps the copies (True), the others
        # reuse these (False). None: each quantizes them, and keeps nothing.
        is_first_microbatch = None
        if config.gradient_accumulation > 1 and reuses_fp8_weights(config, self.parallel):
            is_first_microbatch = first
        with self.gradients.micro_batch(first, last):
            output = self.train_model(
                **batch, is_first_microbatch=is_first_microbatch, return_logits=False
            )
            loss = step_loss(output, weight, router_weight, self.model.router_losses)
            loss.backward()
            wait_for_gathers(self.model)
        routed = None if output.routing is None else output.routing.metrics(router_weight)
        return loss.detach(), routed

    def _new_graph(self) -> GraphedStep | None:
        """Return the step as a CUDA graph if the run asks for one and it is possible."""
        reason = step_obstacle(self.model, self.config)
        if reason:
            log.info("no CUDA graph of the step: %s", reason)
            return None
        # Without a calibration of its own: `run` has calibrated the model when the graph is captured.
        return GraphedStep(
            self.model, calibrate=False, micro_batch=self._micro_batch, gradients=self.gradients
        )

    def _follow_recipe(self) -> None:
        """Make a new CUDA graph of the step if the schedule or a callback has changed the model's recipe."""
        if self.graph is not None and self.graph.recipe is not self.model.recipe:
            self.graph.close()  # frees the memory of the old graph first, once the last step has run
            self.graph = self._new_graph()

    def _fits(self, graph: GraphedStep, micro_batches: list[Batch]) -> bool:
        """Return whether the step's graph can take these batches; the first time that it cannot, log why."""
        reason = graph.misfit(micro_batches)
        if self.model.ep.size > 1 and not self.model.ranks_alike:
            reason = reason or "processes that share experts have batches of different shapes"
        if reason and not self._logged_misfit:
            log.warning("such steps run without their CUDA graph: %s", reason)
            self._logged_misfit = True
        return not reason
