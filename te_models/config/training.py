"""The options of a training run, with their defaults. No torch."""

import contextlib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from te_models.config.recipe import list_recipes
from te_models.config.settings import MOST, Settings, setting
from te_models.config.shares import is_count_or_share, share_of
from te_models.errors import ConfigError, check_known, refuse

PARALLEL = ("auto", "none", "ddp", "fsdp", "tp", "fsdp+tp", "fsdp+ep")
SCHEDULES = ("cosine", "linear", "constant", "warmup-stable-decay")
# How layers and rows are divided, each by some kinds of PARALLEL: another kind leaves them at their defaults.
DIVISIONS = (
    "tensor_parallel_size",
    "expert_parallel_size",
    "context_parallel_size",
    "fp8_dispatch",
    "sequence_parallel",
)
REDUCE_DTYPES = ("float32", "bfloat16", "float8")
ON_NAN = ("stop", "skip", "demote", "rewind")
SPIKE_BOUND = 20.0  # where a guard that goes on is given no bound of its own
# Headings of the help.
TRAINING = "Training"
OPTIMIZER = "Optimizer"
EVALUATION = "Evaluation and checkpoints"
PROCESSES = "Several processes"
# A setting under one of these headings.
_training = functools.partial(setting, group=TRAINING)
_optimizer = functools.partial(setting, group=OPTIMIZER)
_evaluation = functools.partial(setting, group=EVALUATION)
_processes = functools.partial(setting, group=PROCESSES)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """The options of a training run. Sizes are in sequences and tokens, intervals in optimizer steps (0: never).

    `batch_size` counts the sequences of all processes together, so that a run is the same on any number of them.
    `warmup_steps` and `decay_steps` below 1 are shares of `steps`.

    Raises:
        ValueError: a field is unknown (the message names the nearest) or its value out of range.
    """

    steps: int = setting(300, "Optimizer steps.", least=1)
    epochs: float = setting(
        0.0, "Passes over the data in memory, in place of --steps; 0: use --steps."
    )
    batch_size: int = setting(
        8, "Sequences per micro-batch, over all processes.", least=1, fixed=True
    )
    seq_len: int = setting(256, "Tokens per sequence.", least=1, fixed=True)
    gradient_accumulation: int = _training(1, "Micro-batches per step.", least=1, fixed=True)
    cache_fp8_weights: bool = _training(
        True, "Quantize the weights once per step instead of once per micro-batch."
    )
    calibrate: bool = _training(
        True,
        "Measure the first scales of recipe delayed on the first step's batch; else they are 1, as in TE.",
    )
    cuda_graph: bool = _training(
        True, "Replay forward and backward as one CUDA graph where they can be captured."
    )
    memory_check: bool = _training(True, "Refuse a run that the memory plan says does not fit.")
    deterministic: bool = _training(
        False, "Give the same bits in every run on the same GPU; slower."
    )
    balance_loss: float | None = _training(
        None, "Factor of the load-balancing loss of experts; default: the model's."
    )
    z_loss: float | None = _training(
        None, "Factor of the z-loss of experts' routers; default: the model's."
    )
    optimizer: str = _optimizer(
        "adamw", "One of adamw, adamw8bit, adamwfp8, muon, muon8bit or galore.", fixed=True
    )
    optimizer_options: str | Mapping[str, object] = _optimizer(
        "", 'Written "name=value,name=value"; in Python also a dict. See docs/guide/optimizers.md.'
    )
    optimizer_offload: bool = _optimizer(
        False, "Store master weights and optimizer state in CPU memory."
    )
    learning_rate: float = setting(1e-3, "The peak learning rate, reached after warm-up.")
    schedule: str = _optimizer(
        "cosine",
        "Learning rate after warm-up: cosine, linear, constant or warmup-stable-decay (linear, at the end).",
        choices=SCHEDULES,
    )
    final_learning_rate: float = _optimizer(
        0.1, "Learning rate at the last step as a fraction of the peak."
    )
    warmup_steps: float = _optimizer(
        0.05, "Steps of linear warm-up; below 1, a share of all steps."
    )
    decay_steps: float = _optimizer(
        0.2, "Steps of decay of warmup-stable-decay; below 1, a share of all steps."
    )
    recipe_schedule: str = _training(
        "",
        'Recipes that follow --recipe: "bf16@0.9" trains the last tenth of the steps in BF16; also "bf16@900".',
    )
    weight_decay: float = _optimizer(0.1, "Weight decay of matrices.")
    clip_grad_norm: float = _optimizer(1.0, "Maximum norm of the gradient; 0 disables clipping.")
    eval_every: int = _evaluation(50, "Steps between evaluations; 0: only at the end.")
    eval_batches: int = _evaluation(8, "Batches per evaluation.", least=1)
    patience: int = _evaluation(
        0, "Evaluations in a row without a new lowest loss that end the run; 0: never."
    )
    keep_best: bool = _evaluation(
        True, "Save the model of the evaluation with the lowest loss in the folder best/."
    )
    save_every: int | None = _evaluation(
        None,
        "Steps between checkpoints; 0: only at the end. Default: about every 5 minutes.",
    )
    keep_last: int = _evaluation(2, "Number of checkpoints to keep.", least=1)
    record: int = _evaluation(
        0,
        "Record amax, scale and error of every FP8 tensor in each N-th step; without N in each 50th. 0: never.",
        metavar="N",
        bare=50,
    )
    profile: str = _evaluation(
        "",
        "Write a trace of these steps with the names of layers, for Perfetto: a step, or first:last.",
        metavar="STEPS",
    )
    on_nan: str = _evaluation(
        "stop",
        "After a step whose loss or gradient is not finite, or a spike: stop; skip it; demote the layer that broke "
        "it to BF16 and repeat it; or rewind to the last checkpoint and go on with later data.",
        choices=ON_NAN,
    )
    spike_bound: float | None = _evaluation(
        None,
        "Deviations above the median of recent steps from which a loss or gradient norm is a spike; 0: never. "
        "Default: 20, with --on-nan stop never.",
    )
    spike_window: int = _evaluation(
        100, "Steps whose loss and gradient norm tell what a spike is.", least=20
    )
    seed: int = setting(0, "Seed of weights, data order and sampling.", fixed=True)
    parallel: str = _processes(
        "none",
        "How the processes that torchrun starts share the work: auto, none, ddp, fsdp, tp, fsdp+tp or fsdp+ep.",
        choices=PARALLEL,
        shown="auto",
    )
    tensor_parallel_size: int = _processes(
        0, "With fsdp+tp: number of processes that share each layer."
    )
    expert_parallel_size: int = _processes(
        0, "With fsdp+ep: number of processes that share the experts; 0: all."
    )
    context_parallel_size: int = _processes(
        0, "With ddp or fsdp: number of processes that share the tokens of each sequence."
    )
    fp8_dispatch: bool = _processes(
        False, "With fsdp+ep: send tokens to experts in FP8, with a scale per row."
    )
    sequence_parallel: bool = _processes(
        False, "With tp: also split the tokens between tensor-parallel layers."
    )
    reshard_after_forward: bool = _processes(
        True, "With fsdp: free gathered weights after forward and gather them again in backward."
    )
    prefetch_blocks: int = _processes(
        1, "With fsdp: number of blocks whose weights are gathered ahead."
    )
    reduce_dtype: str = _processes(
        "float32",
        "With fsdp: dtype in which gradients are summed, float32 or bfloat16; float8 sends E4M3 with a scale for each "
        "128 elements and adds in FP32.",
        choices=REDUCE_DTYPES,
    )
    collective_timeout: int = _processes(
        60, "Seconds after which a process that does not answer ends the run.", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recipe_changes  # noqa: B018  raises if it cannot be read
        steps = {"warmup_steps": self.warmup_steps, "decay_steps": self.decay_steps}
        mistakes: dict[str, object] = {
            f"{name}={value} is neither: give a share of the steps below 1, or a whole number": not is_count_or_share(
                value
            )
            for name, value in steps.items()
        }
        counts = (
            f"patience={self.patience} counts evaluations, and eval_every=0 makes none: give both"
        )
        refuse(mistakes | {counts: self.patience and not self.eval_every}, ConfigError)

    @property
    def spike_deviations(self) -> float:
        """Deviations above the median from which a loss or a gradient norm is a spike; 0: none is."""
        if self.spike_bound is not None:
            return self.spike_bound
        return 0.0 if self.on_nan == "stop" else SPIKE_BOUND

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all processes."""
        return self.batch_size * self.seq_len * self.gradient_accumulation

    @property
    def recipe_changes(self) -> list[tuple[int, str]]:
        """The steps done before each change of `recipe_schedule`, and the name of the recipe that follows, in order."""
        changes = []
        for change in filter(None, self.recipe_schedule.split(",")):
            name, _, at = change.strip().partition("@")
            # No number: 0 is refused below, with the message about the form.
            place = 0.0
            with contextlib.suppress(ValueError):
                place = float(at)
            if not name or not 0 < place < MOST or not is_count_or_share(place):
                raise ConfigError(
                    f"recipe_schedule={self.recipe_schedule!r}: write RECIPE@PLACE, a name and a share of the steps "
                    'below 1 or a whole number of them, such as "bf16@0.9" or "bf16@900"'
                )
            check_known(f"recipe of recipe_schedule={self.recipe_schedule!r}", name, list_recipes())
            changes.append((self._count(place), name))
        # Shares are rounded to steps, so two changes may meet at one step.
        if [done for done, _ in changes] != sorted({done for done, _ in changes}):
            steps = " and ".join(f"{done:,}" for done, _ in changes)
            raise ConfigError(
                f"recipe_schedule={self.recipe_schedule!r}: give the changes in the order of their steps; of "
                f"{self.steps:,} steps these follow {steps}"
            )
        return changes

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 1: linear warm-up to the peak, then the schedule.

        The last step has `final_learning_rate` times the peak, except under "constant". "warmup-stable-decay" (Hu et
        al. 2024, arXiv 2404.06395) stays at the peak until the last `decay_steps`, over which it falls linearly.
        """
        warmup = self._count(self.warmup_steps)
        decay = self._count(self.decay_steps)
        if step <= warmup:
            return self.learning_rate * step / warmup
        if self.schedule == "constant":
            return self.learning_rate
        # The step after which the rate falls.
        begin = (
            max(warmup, self.steps - decay) if self.schedule == "warmup-stable-decay" else warmup
        )
        done = min(1.0, max(0.0, (step - begin) / max(1, self.steps - begin)))
        # From 1 to 0 between `begin` and the last step.
        left = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.learning_rate * (
            self.final_learning_rate + (1 - self.final_learning_rate) * left
        )

    def _count(self, steps: float) -> int:
        """Return a number of steps that may be given as a share of all of them; a share is at least one step."""
        return math.ceil(share_of(steps, self.steps)) if steps < 1 else round(steps)
