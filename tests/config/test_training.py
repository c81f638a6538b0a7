"""The options of a run: the schedule, ranges, and misspelt names."""

import pytest

from te_models.config.training import TrainConfig


@pytest.mark.parametrize(
    "given, meant",
    [
        ("lr", "learning_rate"),
        ("batchsize", "batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation"),
        ("wd", "weight_decay"),
    ],
)
def test_a_misspelt_option_names_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown field of TrainConfig '{given}': did you mean '{meant}'"):
        TrainConfig(**{given: 1})


def test_the_schedule_warms_up_and_falls() -> None:
    config = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [config.learning_rate_at(step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True) and rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("field", ["steps", "batch_size", "gradient_accumulation", "keep_last"])
def test_sizes_out_of_range_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0 is out of range"):
        TrainConfig(**{field: 0})
