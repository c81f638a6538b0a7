"""How to train: the fields of a run, with their defaults. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from te_models.errors import unknown

PARALLEL = ("none", "ddp", "fsdp", "tp", "fsdp+tp")
AT_LEAST_ONE = ("steps", "batch_size", "seq_len", "keep_last", "collective_timeout")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. Sizes in sequences and tokens, intervals in optimizer steps (0: never).

    `batch_size` counts the sequences of all processes together, so that a run is the same on any number of them.
    """

    steps: int = 300
    batch_size: int = 8
    seq_len: int = 256
    gradient_accumulation: int = 1
    cache_fp8_weights: bool = True  # quantize the weights once a step, not once a micro-batch
    optimizer: str = "adamw"
    optimizer_options: str | Mapping[str, Any] = ""  # "name=value,name=value" or a dict: see docs/optimizers.md
    optimizer_offload: bool = False  # masters and optimizer state in the CPU's memory
    learning_rate: float = 1e-3
    final_learning_rate: float = 0.1  # as a share of learning_rate, reached by a cosine at the last step
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_grad_norm: float = 1.0
    eval_every: int = 50
    eval_batches: int = 8
    save_every: int = 0
    keep_last: int = 2
    seed: int = 0
    parallel: str = "none"  # none, ddp, fsdp, tp or fsdp+tp: how the processes that torchrun starts share the work
    tensor_parallel_size: int = 0  # processes that share each layer under fsdp+tp
    sequence_parallel: bool = False  # tp: divide the tokens between layers too
    reshard_after_forward: bool = True  # fsdp: drop gathered weights after forward and gather them again in backward
    prefetch_blocks: int = 1  # fsdp: how many blocks ahead weights are gathered
    reduce_dtype: str = "float32"  # fsdp: in what gradients are summed over the processes, float32 or bfloat16
    collective_timeout: int = 60  # seconds after which a process that no longer answers ends the run

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
