"""Options that do not fit the way the program was started."""

from typing import Any

import pytest

from te_models.config.training import TrainConfig
from te_models.training.launch import check_launch


@pytest.mark.parametrize(
    "world, fields, message",
    [
        ("2", dict(), "add --parallel ddp, fsdp, tp or fsdp\\+tp"),
        (None, dict(parallel="fsdp"), "torchrun --nproc-per-node N"),
        ("4", dict(parallel="fsdp+tp"), "needs --tensor-parallel-size"),
        ("4", dict(parallel="fsdp+tp", tensor_parallel_size=3), "a divisor of 4"),
        ("4", dict(parallel="tp", tensor_parallel_size=2), "only for --parallel fsdp\\+tp"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(
    world: str | None, fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ValueError, match=message):
        check_launch(TrainConfig(**fields))
