"""The options of a run: the schedule, ranges, and misspelled names."""

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)

from te_models.config.training import SCHEDULES, TrainConfig


@pytest.mark.parametrize(
    "given, meant",
    [("lr", "learning_rate"), ("batchsize", "batch_size"), ("wd", "weight_decay")],
)
def test_a_misspelled_option_names_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(
        ValueError, match=f"unknown field '{given}' of TrainConfig: did you mean '{meant}'"
    ):
        TrainConfig(**{given: 1})


@pytest.mark.parametrize("field", ["warmup_steps", "decay_steps"])
def test_a_share_of_the_steps_is_the_decimal_number_that_was_written(field: str) -> None:
    """0.07 of 100 steps are 7; FP64's product is 7.000000000000001, which was rounded up to 8."""
    for hundredths, steps in itertools.product(range(1, 100), (1, 7, 50, 100, 300, 1000, 12_345)):
        text = f"0.{hundredths:02}"
        options = dict(warmup_steps=0, decay_steps=0) | {field: float(text)}
        config = TrainConfig(
            steps=steps, learning_rate=1.0, schedule="warmup-stable-decay", **options
        )
        count = math.ceil(Fraction(text) * steps)
        peak, below = (
            (count, count - 1) if field == "warmup_steps" else (steps - count, steps - count + 1)
        )
        if peak:
            assert config.learning_rate_at(peak) == 1.0 > config.learning_rate_at(below), (
                text,
                steps,
            )


@pytest.mark.parametrize("warmup", [0, 0.1, 3])
@pytest.mark.parametrize("steps", [7, 100])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_is_that_of_transformers(schedule: str, steps: int, warmup: float) -> None:
    """Its warm-up of warmup-stable-decay begins at the least rate instead of 0, so that is left out."""
    count = math.ceil(warmup * steps) if warmup < 1 else int(warmup)
    decay = math.ceil(0.2 * steps)
    make: Any = {
        "cosine": lambda o: get_cosine_with_min_lr_schedule_with_warmup(
            o, count, steps, min_lr_rate=0.1
        ),
        "linear": lambda o: get_polynomial_decay_schedule_with_warmup(
            o, count, steps, lr_end=0.05, power=1.0
        ),
        "constant": lambda o: get_constant_schedule_with_warmup(o, count),
        "warmup-stable-decay": lambda o: get_wsd_schedule(
            o,
            count,
            decay,
            num_stable_steps=max(0, steps - count - decay),
            min_lr_ratio=0.1,
            decay_type="linear",
        ),
    }
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    theirs = make[schedule](optimizer)
    config = TrainConfig(steps=steps, warmup_steps=warmup, learning_rate=0.5, schedule=schedule)
    for step in range(1, steps + 1):
        optimizer.step()
        theirs.step()
        if step >= count or schedule != "warmup-stable-decay":
            assert config.learning_rate_at(step) == pytest.approx(
                theirs.get_last_lr()[0], abs=1e-12
            ), step


def test_patience_needs_evaluations() -> None:
    with pytest.raises(
        ValueError, match="patience=2 counts evaluations, and eval_every=0 makes none"
    ):
        TrainConfig(patience=2, eval_every=0)


@pytest.mark.parametrize("field", ["steps", "batch_size", "gradient_accumulation", "keep_last"])
def test_sizes_out_of_range_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0 is out of range"):
        TrainConfig(**{field: 0})
