"""How to train: the fields of a run, with their defaults. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from te_models.errors import unknown

PARALLEL = ("none", "ddp", "fsdp", "tp", "fsdp+tp")
AT_LEAST_ONE = ("steps", "batch_size", "seq_len", "keep_last", "collective_timeout")


def _field(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. Sizes in sequences and tokens, intervals in optimizer steps (0: never).

    `batch_size` counts the sequences of all processes together, so that a run is the same on any number of them.
    """

    steps: int = _field(300, "Optimizer steps.")
    batch_size: int = _field(8, "Sequences of a micro-batch, of all processes together.")
    seq_len: int = _field(256, "Tokens of a sequence.")
    gradient_accumulation: int = _field(1, "Micro-batches of a step.")
    cache_fp8_weights: bool = _field(True, "Quantize the weights once a step, not once a micro-batch.")
    cuda_graph: bool = _field(True, "Replay forward and backward as one CUDA graph, where they can be captured.")
    deterministic: bool = _field(False, "The same bits in every run on the same GPU; slower.")
    optimizer: str = _field("adamw", "One of adamw, adamw8bit, adamwfp8, te-adam, muon, muon8bit or galore.")
    optimizer_options: str | Mapping[str, Any] = _field(
        "", 'As "name=value,name=value", in Python also a dict: docs/guide/optimizers.md.'
    )
    optimizer_offload: bool = _field(False, "Masters and optimizer state in the CPU's memory.")
    learning_rate: float = _field(1e-3, "The highest, after the warm-up.")
    final_learning_rate: float = _field(0.1, "As a share of it, reached by a cosine at the last step.")
    warmup_steps: int = _field(20, "Steps of linear warm-up.")
    weight_decay: float = _field(0.1, "Of matrices.")
    clip_grad_norm: float = _field(1.0, "The largest norm of the gradient; 0: not clipped.")
    eval_every: int = _field(50, "Steps between evaluations; 0: at the end alone.")
    eval_batches: int = _field(8, "Batches of an evaluation.")
    save_every: int = _field(0, "Steps between checkpoints; 0: at the end alone.")
    keep_last: int = _field(2, "Checkpoints that are kept.")
    seed: int = _field(0, "Of weights, data order and sampling.")
    parallel: str = _field(
        "none", "One of none, ddp, fsdp, tp, fsdp+tp: how the processes that torchrun starts share the work."
    )
    tensor_parallel_size: int = _field(0, "With fsdp+tp: processes that share each layer.")
    sequence_parallel: bool = _field(False, "With tp: divide the tokens between layers too.")
    reshard_after_forward: bool = _field(
        True, "With fsdp: drop gathered weights after forward and gather them again in backward."
    )
    prefetch_blocks: int = _field(1, "With fsdp: how many blocks ahead weights are gathered.")
    reduce_dtype: str = _field(
        "float32", "With fsdp: in what gradients are summed over the processes, float32 or bfloat16."
    )
    collective_timeout: int = _field(60, "Seconds after which a process that no longer answers ends the run.")

    def __post_init__(self) -> None:
        for f in fields(self):
            value, least = getattr(self, f.name), 1 if f.name in AT_LEAST_ONE else 0
            if not isinstance(f.default, (int, float)):
                continue
            if not least <= value < math.inf:
                raise ValueError(f"{f.name}={value} is out of range: give {least} or more")
        if not self.gradient_accumulation:
            raise ValueError("gradient_accumulation=0 is out of range: give 1 or more")
        for name, choices in dict(parallel=PARALLEL, reduce_dtype=("float32", "bfloat16")).items():
            if getattr(self, name) not in choices:
                raise unknown(name, getattr(self, name), choices)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch_size * self.seq_len * self.gradient_accumulation

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine from learning_rate to its final share; `step` counts from 1."""
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        share = self.final_learning_rate + (1 - self.final_learning_rate) * (1 + math.cos(math.pi * min(done, 1))) / 2
        return self.learning_rate * share
