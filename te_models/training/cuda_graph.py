"""Forward and backward of a model as one CUDA graph, captured once and replayed.

Otherwise the host takes longer to launch the kernels of a small step than the device to run them (gated-350m: 158 of
185 ms were launches). A graph has fixed addresses and Python values, so each batch is copied to the buffers of the
first one, and gradients appear where the captured step produced them.
"""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from te_models.causal_lm import CausalLM
from te_models.config.training import TrainConfig
from te_models.device.choice import computing_device
from te_models.device.cuda_capture import capture, failed_capture
from te_models.errors import UsageError, refuse
from te_models.model.dynamic import dynamic
from te_models.model.output import step_loss
from te_models.model.recompute import may_draw

WARM_UP = 3  # eager steps before the capture, for compilers, workspaces of libraries and FP8 state created on first use
ATTEMPTS = 3  # failed captures, one per step, after which all further steps run eagerly

log = logging.getLogger(__name__)


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

    Args:
        model: a model on a CUDA device.
        calibrate: under recipe "delayed", measure the first scales on the first call's batch (CausalLM.calibrate).

    Raises:
        ValueError: the model cannot be captured (`obstacle` says why), or a call's tensors differ in shape or name from
            the first call's, or the model's recipe has changed.
    """

    def __init__(self, model: CausalLM, calibrate: bool = True) -> None:
        if reason := obstacle(model):
            raise UsageError(f"no CUDA graph of this model: {reason}")
        self.model, self.recipe, self.calibrate = model, model.recipe, calibrate
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.shared = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.calls = self.failures = 0
        self.graph: Any = None  # a torch.cuda.CUDAGraph, once the step has been captured
        self.stream: Any = torch.cuda.Stream(model.device)
        self.inputs: dict[str, Tensor] = {}
        self.gradients: list[Tensor | None] = []
        self.loss = torch.empty(0)
        self.weight = torch.ones((), device=model.device)
        self.router_weight = torch.ones((), device=model.device)
        self.routing: list[
            Tensor
        ] = []  # what routers did in the newest step (RoutingReport.metrics)

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
        self._take(batch)
        router_weight = weight if router_weight is None else router_weight
        for buffer, value in ((self.weight, weight), (self.router_weight, router_weight)):
            buffer.copy_(value) if isinstance(value, Tensor) else buffer.fill_(value)
        for module in self.shared:
            module.reshard()  # evaluation leaves weights gathered, and a graph captured then would never gather them
        for parameter in self.parameters:
            parameter.grad = None
        if not self.calls and self.calibrate:
            self.model.calibrate(
                self.inputs, weights=[self.weight], router_weights=[self.router_weight]
            )
        self.calls += 1
        if self.graph is None and self.calls > WARM_UP and self.failures < ATTEMPTS:
            self._capture()
        if self.graph is None:
            current = torch.cuda.current_stream(self.model.device)
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                self._run()
            current.wait_stream(self.stream)
            return self.loss
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.loss

    def close(self) -> None:
        """Free the graph. The next call runs eagerly and captures the step once more."""
        if self.graph is not None:
            torch.cuda.synchronize(self.model.device)
            self.graph.reset()
            self.graph, self.gradients = None, []

    def _capture(self) -> None:
        """Capture the step. A failure changes only `failures`, since a capture executes nothing."""
        graph = torch.cuda.CUDAGraph()
        try:
            with NoHostCopies() if self.shared else nullcontext(), capture(graph, self.stream):
                self._run()
        except RuntimeError as error:
            if not failed_capture(error):
                raise
            self.failures += 1
            for parameter in self.parameters:
                parameter.grad = None
            outlook = (
                "the next step tries again"
                if self.failures < ATTEMPTS
                else "all further steps run without it"
            )
            log.warning(
                "the CUDA graph of the step was not captured, %s: %s",
                outlook,
                str(error).splitlines()[0],
            )
            return
        self.graph = graph
        self.gradients = [parameter.grad for parameter in self.parameters]

    def _run(self) -> None:
        """Run forward and backward eagerly; what is inside a capture is recorded."""
        output = self.model(**self.inputs, return_logits=False)
        loss = step_loss(output, self.weight, self.router_weight, self.model.router_losses)
        loss.backward()
        self.loss = loss.detach()
        self.routing = []
        if output.routing is not None:
            self.routing.append(output.routing.metrics(self.router_weight))

    def _take(self, batch: dict[str, Tensor]) -> None:
        """Copy the batch into the buffers that the graph reads."""
        refuse(self._mistakes(batch, self.inputs or batch))
        if not self.inputs:
            self.inputs = {
                name: torch.empty_like(value, device=self.model.device)
                for name, value in batch.items()
            }
        for name, buffer in self.inputs.items():
            buffer.copy_(batch[name], non_blocking=True)

    def _mistakes(self, batch: dict[str, Tensor], before: dict[str, Tensor]) -> Iterator[str]:
        if self.model.recipe is not self.recipe:
            yield "the model's recipe has changed: make a new GraphedStep"
        if not self.model.training or not torch.is_grad_enabled():
            yield "a GraphedStep trains: call model.train() before it, and evaluate with the model itself"
        if "attention_mask" in batch:
            yield "a CUDA graph cannot test attention_mask for padding: pack documents (document_ids) instead"
        for name in dict.fromkeys((*before, *batch)):
            now, first = (
                [*tensors[name].shape] if name in tensors else None for tensors in (batch, before)
            )
            if now != first:
                advice = "a CUDA graph has one shape, so make a GraphedStep for each"
                yield f"{name} has shape {now}, in the first call {first}: {advice}"


def obstacle(model: nn.Module) -> str | None:
    """Return why this model's step cannot be captured in a CUDA graph; None if it can."""
    if not isinstance(model, CausalLM):
        return "the model is wrapped (by LoRA or DDP)"
    if (place := computing_device(model.device).type) != "cuda":
        return f"the model is on {place}"
    if reason := dynamic(model):
        return reason
    if model.activation_checkpointing != "none" and any(may_draw(block) for block in model.layers):
        return "activation checkpointing must restore the random state for a hook or a third-party module"
    if model.activation_offload:
        return "activation offload copies to the host"
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return "dropout draws random numbers"
    if model.tp.size > 1:
        return "tensor parallelism"
    if model.fp8_params and isinstance(model, FSDPModule):
        return "FP8 weights are gathered with scales that each step recomputes"
    return None


def step_obstacle(model: CausalLM, config: TrainConfig, parallel: str) -> str | None:
    """Return why a run's step is not a CUDA graph; None if it is. `parallel` is a `Parallel.kind`."""
    if not config.cuda_graph:
        return "cuda_graph=False"
    if config.gradient_accumulation > 1:
        return "gradients are accumulated"
    if parallel == "ddp":
        return "DistributedDataParallel reduces gradients outside it"
    return obstacle(model)


class NoHostCopies(TorchDispatchMode):
    """Replace FSDP2's kernels that copy between one buffer and many tensors by one copy per tensor.

    FSDP2's kernels read the tensors' addresses from host memory that has been reused by the time of a replay.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.fsdp.split_with_sizes_copy.default:
            return _split(*args, **kwargs)
        if func is torch.ops.fsdp.chunk_cat.default:
            return _chunk_cat(*args, **kwargs)
        return func(*args, **(kwargs or {}))


def _split(source: Tensor, sizes: list[int], dim: int = 0, *, out: list[Tensor]) -> None:
    """Copy the pieces of `source` of these sizes along `dim` into the tensors `out`."""
    for piece, tensor in zip(source.split(sizes, dim), out, strict=True):
        tensor.copy_(piece)


def _chunk_cat(tensors: list[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
    """Split the rows of each tensor into `num_chunks` chunks, padded with zeros; row i of `out` gets all chunks i."""
    assert dim == 0
    first = 0
    for tensor in tensors:
        rows = -(-tensor.shape[0] // num_chunks)
        size = rows * tensor[0].numel()
        if tensor.shape[0] % num_chunks:
            out[:, first : first + size].zero_()
        for row, chunk in zip(out, tensor.split(rows), strict=False):
            row[first : first + chunk.numel()].copy_(chunk.flatten())
        first += size
