"""The outcome of a run, which its checkpoints save."""

import math
from dataclasses import dataclass


@dataclass
class Result:
    """The outcome of a run.

    Attributes:
        step: optimizer steps completed, including those before a resume.
        first_eval_loss: evaluation loss before the first step, in nats per token, as all losses here.
        eval_loss: the last evaluation loss.
        loss: training loss of the last step.
        tokens_per_second: median over the last 100 steps, over all processes.
        peak_memory: peak bytes allocated on the device; None on a CPU.
        interrupted: True if the run was stopped before its last step.
        signal: the number of the signal that stopped this process; 0: none.
        checkpoint: path of the last checkpoint.
        best_eval_loss: the lowest evaluation loss after a step, infinite if none was below `first_eval_loss`.
        best_step: the step of that evaluation; 0: there was none.
        evaluations_since_best: evaluations in a row without a lower loss than all before them.
        stopped_early: True if the run ended because `patience` evaluations brought no lower loss.
    """

    step: int = 0
    first_eval_loss: float = math.nan
    eval_loss: float = math.nan
    loss: float = math.nan
    tokens_per_second: float = math.nan
    peak_memory: int | None = None
    interrupted: bool = False
    checkpoint: str | None = None
    best_eval_loss: float = math.inf
    best_step: int = 0
    evaluations_since_best: int = 0
    stopped_early: bool = False
    signal: int = 0
