"""Forward and backward of a model as one CUDA graph: the host launches a step once and replays it.

Without that, the host takes longer to launch the kernels of a small step than the device to run them (gated-350m: 158 of
185 ms were launches). A graph bakes in addresses and Python values, so what it reads is copied to where the first step
had it, and gradients appear where the first step made them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from te_models.model import CausalLM

WARM_UP = 3  # eager steps before the capture: compilers, libraries' workspaces, and FP8 state that the first step makes


class GraphedStep:
    """One training step's forward and backward, the same computation as the eager one::

        step = GraphedStep(model)
        loss = step(input_ids=ids, labels=labels)
        optimizer.step()

    Each call makes the gradients anew (there is nothing to zero) and returns the loss, an FP32 scalar that the next call
    overwrites. The first calls run eagerly. Weights and FP8 state may be changed in place between calls.

    Args:
        model: on a CUDA device, trained by this process alone.

    Raises:
        ValueError: for what cannot be captured (`obstacle` says why), and when a call's tensors have other shapes or names
            than the first one's, or the model has changed its recipe since.
    """

    def __init__(self, model: CausalLM) -> None:
        if reason := obstacle(model):
            raise ValueError(f"no CUDA graph of this model: {reason}")
        self.model, self.recipe = model, model.recipe
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.calls = 0
        self.graph: Any = torch.cuda.CUDAGraph()
        self.stream: Any = torch.cuda.Stream(model.device)
        self.inputs: dict[str, Tensor] = {}
        self.gradients: list[Tensor | None] = []
        self.loss = torch.empty(0)

    def __call__(self, **batch: Tensor) -> Tensor:
        """`batch`: CausalLM.forward's tensors, `input_ids` and `labels` among them; returns the loss."""
        self._take(batch)
        for parameter in self.parameters:
            parameter.grad = None
        self.calls += 1
        if self.calls <= WARM_UP:
            current = torch.cuda.current_stream(self.model.device)
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                self._run()
            current.wait_stream(self.stream)
            return self.loss
        if self.calls == WARM_UP + 1:
            with torch.cuda.graph(self.graph, stream=self.stream):
                self._run()
            self.gradients = [parameter.grad for parameter in self.parameters]
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.loss

    def _run(self) -> None:
        loss = self.model(**self.inputs, return_logits=False).loss
        loss.backward()
        self.loss = loss.detach()

    def _take(self, batch: dict[str, Tensor]) -> None:
        """Copy the batch to where the graph reads it."""
        if self.model.recipe is not self.recipe:
            raise ValueError("the model's recipe has changed: make a new GraphedStep")
        if not self.model.training or not torch.is_grad_enabled():
            raise ValueError("a GraphedStep trains: call model.train() before it, and evaluate with the model itself")
        if "attention_mask" in batch:
            raise ValueError(
                "a CUDA graph cannot ask whether attention_mask has padding: pack documents (document_ids)"
            )
        if not self.inputs:
            self.inputs = {name: torch.empty_like(value, device=self.model.device) for name, value in batch.items()}
        for name in dict.fromkeys((*self.inputs, *batch)):
            shapes = [list(tensors[name].shape) if name in tensors else None for tensors in (self.inputs, batch)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"{name} has shape {shapes[1]}, in the first call {shapes[0]}: a CUDA graph has one shape, so make a "
                    "GraphedStep for each"
                )
            self.inputs[name].copy_(batch[name], non_blocking=True)


def obstacle(model: Any) -> str | None:
    """Why this model's step cannot be captured in a CUDA graph; None if it can."""
    if not isinstance(model, CausalLM):
        return "it is wrapped (by LoRA, FSDP or DDP)"
    if model.device.type != "cuda":
        return f"it is on {model.device.type}"
    if model.activation_checkpointing != "none":
        return "activation checkpointing sets the random state, which a graph cannot"
    if model.activation_offload:
        return "activation offload copies to the host"
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return "its dropout"
    if model.tp.size > 1 or torch.distributed.is_initialized():
        return "it shares its work with other processes"
    return None
