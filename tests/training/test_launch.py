"""Refusals of options that do not fit the way the program was started."""

from typing import Any

import pytest

from te_models.config.training import TrainConfig
from te_models.training.launch import check_launch, choose_parallel


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


@pytest.mark.parametrize(
    "kind, world, recorded, fields, chosen",
    [
        ("auto", 0, False, {}, "none"),
        ("auto", 1, False, {}, "none"),
        ("auto", 4, False, {}, "fsdp"),
        ("auto", 4, False, {"optimizer": "te-adam"}, "ddp"),
        ("auto", 4, False, {"optimizer_offload": True}, "ddp"),
        ("ddp", 4, False, {}, "ddp"),
        ("ddp", 4, True, {}, "ddp"),
        ("none", 4, False, {}, "none"),
        ("fsdp", 0, False, {}, "fsdp"),
        # A file of another number of processes.
        ("none", 4, True, {}, "fsdp"),
        ("fsdp", 1, True, {}, "none"),
        ("fsdp+tp", 0, True, {"tensor_parallel_size": 2, "sequence_parallel": True}, "none"),
        ("none", 0, True, {}, "none"),
    ],
)
def test_the_kind_of_parallelism_fits_the_processes(
    kind: str, world: int, recorded: bool, fields: dict[str, Any], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world:
        monkeypatch.setenv("WORLD_SIZE", str(world))
    else:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = choose_parallel(TrainConfig(parallel=kind, **fields), recorded)
    assert config.parallel == chosen
    if kind != chosen and kind == "fsdp+tp":
        assert (config.tensor_parallel_size, config.sequence_parallel) == (0, False)
