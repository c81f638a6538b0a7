"""Refusals of options that do not fit the way the program was started."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from te_models.cli.commands import main
from te_models.config.training import TrainConfig
from te_models.distributed.environment import check_place, number
from te_models.errors import UsageError
from te_models.training.finetune import training_config
from te_models.training.launch import check_launch, choose_parallel, parallel
from te_models.training.run_settings import run_settings

PLACE = dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29511")
SetAll = Callable[[Mapping[str, str | None]], None]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> SetAll:
    """A function that sets the variables of a job, which are not set otherwise; None: not this one."""
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)

    def set_all(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(
                name, value
            )

    return set_all


@pytest.mark.parametrize(
    "world, fields, message",
    [
        ("2", dict(), "add --parallel ddp, fsdp, tp, fsdp\\+tp or fsdp\\+ep"),
        (None, dict(parallel="fsdp"), "torchrun --nproc-per-node N"),
        ("4", dict(parallel="fsdp+tp"), "needs --tensor-parallel-size"),
        ("4", dict(parallel="fsdp+tp", tensor_parallel_size=3), "a divisor of 4"),
        ("4", dict(parallel="tp", tensor_parallel_size=2), "only for --parallel fsdp\\+tp"),
        ("4", dict(parallel="fsdp+ep", expert_parallel_size=3), "a divisor of the 4 processes"),
        ("4", dict(parallel="fsdp", fp8_dispatch=True), "only for --parallel fsdp\\+ep"),
        (
            "4",
            dict(parallel="fsdp", expert_parallel_size=2),
            "is for --parallel fsdp\\+ep, not fsdp",
        ),
        ("4", dict(parallel="ddp", context_parallel_size=3), "give a divisor of 4 above 1"),
        ("4", dict(parallel="tp", context_parallel_size=2), "for --parallel ddp and fsdp, not tp"),
        (
            "4",
            dict(parallel="ddp", reshard_after_forward=False),
            "--no-reshard-after-forward is for",
        ),
        (
            "4",
            dict(parallel="tp", prefetch_blocks=2),
            "--prefetch-blocks 2 is for --parallel fsdp,",
        ),
        ("4", dict(parallel="fsdp+ep", optimizer="muon"), "only adamw supports"),
        ("4", dict(parallel="fsdp+ep", optimizer_offload=True), "leave out --optimizer-offload"),
        (
            "2",
            dict(parallel="ddp", optimizer="galore", optimizer_options="in_backward=true"),
            "in_backward=true projects gradients before --parallel ddp can sum them",
        ),
    ],
)
def test_a_start_that_does_not_fit_is_refused(
    world: str | None, fields: dict[str, Any], message: str, environment: SetAll
) -> None:
    environment({"WORLD_SIZE": world})
    with pytest.raises(ValueError, match=message):
        check_launch(TrainConfig(**fields))


@pytest.mark.parametrize(
    "name, value, flag",
    [
        ("reduce_dtype", "float8", "--reduce-dtype"),
        ("reshard_after_forward", False, "--reshard-after-forward"),
        ("prefetch_blocks", 2, "--prefetch-blocks"),
        ("collective_timeout", 9, "--collective-timeout"),
    ],
)
def test_one_process_notes_what_several_share(
    name: str, value: object, flag: str, tmp_path: Path, environment: SetAll
) -> None:
    environment({"WORLD_SIZE": None})
    settings = run_settings("pretrain", {"preset": "gated-nano", name: value})
    with pytest.warns(UserWarning, match=f"^{flag} has no effect: the run is one process$"):
        training_config(settings)
    # A file has every setting, and serves any number of processes.
    file = tmp_path / "run.toml"
    file.write_text(f"[training]\n{name} = {json.dumps(value)}\n")
    training_config(run_settings("pretrain", {"preset": "gated-nano"}, file))
    environment({"WORLD_SIZE": "2"})
    training_config(settings)


def test_processes_are_joined_for_a_config() -> None:
    config: Any = {"parallel": "fsdp"}
    with pytest.raises(UsageError, match="config is a dict: give te_models.TrainConfig"):
        parallel(config).__enter__()


def test_adapters_have_no_sums_of_fsdp(environment: SetAll) -> None:
    environment({"WORLD_SIZE": "4"})
    config = TrainConfig(parallel="fsdp", reduce_dtype="float8")
    check_launch(config)
    with pytest.raises(UsageError, match="for gradients that FSDP2 sums, which adapters' are not"):
        check_launch(config, frozen=True)


@pytest.mark.parametrize(
    "kind, world, recorded, fields, chosen",
    [
        ("auto", 0, False, {}, "none"),
        ("auto", 1, False, {}, "none"),
        ("auto", 4, False, {}, "fsdp"),
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
    kind: str, world: int, recorded: bool, fields: dict[str, Any], chosen: str, environment: SetAll
) -> None:
    environment({"WORLD_SIZE": str(world) if world else None})
    config = choose_parallel(TrainConfig(parallel=kind, **fields), recorded)
    assert config.parallel == chosen
    if kind != chosen and kind == "fsdp+tp":
        assert (config.tensor_parallel_size, config.sequence_parallel) == (0, False)


@pytest.mark.parametrize(
    "changes, message",
    [
        *(({name: None}, f"{name} is not set, and WORLD_SIZE is") for name in list(PLACE)[1:]),
        *(
            ({name: "abc"}, f"{name} is 'abc', not a whole number")
            for name in PLACE
            if name != "MASTER_ADDR"
        ),
        (dict(WORLD_SIZE="-2"), "WORLD_SIZE is '-2', not a whole number"),
        (dict(RANK="2"), "RANK=2 and WORLD_SIZE=2 in the environment do not fit"),
        (dict(LOCAL_RANK="1"), "LOCAL_RANK=1, and this host has 1 GPU"),
        (dict(MASTER_PORT="99999"), "MASTER_PORT is 99999: give a port below 65536"),
    ],
)
def test_a_wrong_place_in_a_job_is_refused(
    changes: dict[str, str | None], message: str, environment: SetAll
) -> None:
    environment({**PLACE, **changes})
    with pytest.raises(UsageError, match=message):
        check_place(gpus=1)


def test_a_place_that_fits_is_taken(environment: SetAll) -> None:
    environment(PLACE)
    check_place(gpus=1)
    environment({"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": ""})
    check_place(gpus=0)
    assert number("LOCAL_WORLD_SIZE", 1) == 1


@pytest.mark.parametrize(
    "variables", [dict(WORLD_SIZE="2"), dict(WORLD_SIZE="abc"), dict(LOCAL_WORLD_SIZE="x")]
)
def test_the_command_line_survives_the_environment(
    variables: dict[str, str],
    environment: SetAll,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    environment(variables)
    kind = "ddp" if "WORLD_SIZE" in variables else "none"
    options = [
        "--preset",
        "gated-nano",
        "--device",
        "cpu",
        "--steps",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(["pretrain", "--parallel", kind, *options]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("te-models: the environment variable "), said


def test_a_job_without_a_place_does_not_start(environment: SetAll) -> None:
    environment({"WORLD_SIZE": "2"})
    with (
        pytest.raises(UsageError, match="RANK is not set"),
        parallel(TrainConfig(parallel="ddp"), "cpu"),
    ):
        pass
