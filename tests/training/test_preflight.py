"""Memory before a run: what is compared with what, and that a run which does not fit is refused before data is read."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY

from te_models import CausalLM
from te_models.cli import main
from te_models.config.presets import get_preset
from te_models.config.recipe import get_recipe
from te_models.config.training import TrainConfig
from te_models.distributed.planned_ranks import PlannedRanks
from te_models.errors import UsageError
from te_models.planning.memory_plan import plan_memory
from te_models.saving.pretrained import read_shape
from te_models.training import preflight, run_model
from te_models.training.parallel import Parallel
from te_models.training.preflight import available_memory, check_memory
from te_models.training.run_model import new_model, resumed_model
from te_models.training.run_settings import run_settings
from te_models.training.settings import LoraSettings, RunSettings


def settings(**given: Any) -> RunSettings:
    return run_settings(
        "pretrain", {"preset": "gated-1b", "recipe": "current", "device": "cpu", **given}
    )


def check(own: RunSettings) -> Any:
    return check_memory(new_model(own), own.train, Parallel(config=own.train))


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`there(gib)` has so much memory free."""
    return lambda gib: monkeypatch.setattr(
        preflight, "available_memory", lambda device: int(gib * 2**30)
    )


def test_the_plan_is_that_of_the_run(there: Any) -> None:
    there(500)
    size = dict(batch_size=4, seq_len=1024, fp8_params=True, activation_checkpointing="selective")
    own = settings(**size, num_hidden_layers=6)
    found = check(own)
    expected = plan_memory(
        get_preset("gated-1b", num_hidden_layers=6), get_recipe("current"), **size
    )
    on_cpu = dataclasses.replace(
        expected, training=dataclasses.replace(expected.training, cuda=False)
    )
    assert found.needed == on_cpu.peak.total
    assert found.plan.recipe == get_recipe("current") and found.available == 500 * 2**30
    lora = dataclasses.replace(own, lora=LoraSettings(rank=8))
    assert check(lora).needed < found.needed
    assert 0 < check(lora).plan.peak.optimizer < found.plan.peak.optimizer / 20
    assert "500.0 GiB free on cpu" in str(found)


def test_a_run_that_does_not_fit_names_the_smallest_change(there: Any) -> None:
    there(20)
    with pytest.raises(ValueError, match="does not fit") as error:
        check(settings(batch_size=8, seq_len=2048))
    line = str(error.value)
    assert "20.0 GiB free on cpu: add --activation-checkpointing" in line
    assert check(settings(batch_size=8, seq_len=2048, memory_check=False)).needed > 20 * 2**30
    there(0.01)
    with pytest.raises(ValueError, match="no option of this run makes it fit"):
        check(settings(batch_size=8, seq_len=2048))


def gpu_with(monkeypatch: pytest.MonkeyPatch, gib: float, host: float = 10**4) -> None:
    """Runs find a GPU with so much free memory, on a host with `host` GiB."""
    free = {"cuda": gib, "cpu": host}
    monkeypatch.setattr(
        preflight, "available_memory", lambda device: int(free[device.type] * 2**30)
    )
    monkeypatch.setattr(preflight, "choose_device", lambda device: torch.device("cuda"))


GATED_8B = dict(preset="gated-8b", batch_size=8, seq_len=2048)


FP8, OFFLOAD = "--fp8-params", "--optimizer-offload"


@pytest.mark.parametrize(
    ("given", "options", "gib", "never"),
    [
        pytest.param(dict(recipe="nvfp4"), {}, 30, [FP8], marks=pytest.mark.slow),
        (dict(optimizer="adamw8bit", optimizer_options="stochastic_rounding=true"), {}, 60, [FP8]),
        pytest.param(dict(optimizer_options="beta2=0.99"), {}, 60, [], marks=pytest.mark.slow),
        pytest.param(dict(batch_size=3), {}, 20, [], marks=pytest.mark.slow),
        (dict(optimizer_offload=True), {}, 35, []),
        pytest.param({}, dict(kind="ddp", world=2), 50, [FP8], marks=pytest.mark.slow),
        ({}, dict(kind="fsdp", world=4), 20, ["--lora", OFFLOAD]),
        pytest.param(
            dict(recipe="blockwise"),
            dict(kind="fsdp", world=4),
            20,
            [FP8, "--lora", OFFLOAD],
            marks=pytest.mark.slow,
        ),
        ({}, dict(resumed=True), 90, [FP8, "--batch-size", "--optimizer ", "--seq-len"]),
    ],
    ids=str,
)
def test_what_a_refusal_suggests_can_be_done(
    given: dict[str, Any],
    options: dict[str, Any],
    gib: float,
    never: list[str],
    monkeypatch: Any,
    tmp_path: Path,
) -> None:
    """On GPUs: with the flags of the line the run fits, and nothing that it would refuse is among them."""
    gpu_with(monkeypatch, gib)
    monkeypatch.setattr(run_model, "saved_choices", lambda checkpoint: {})
    monkeypatch.setattr(
        run_model,
        "resumed_options",
        lambda settings, saved: {**settings.build, "recipe": "current"},
    )
    world = options.get("world", 1)
    own = run_settings("pretrain", {"recipe": "current", **GATED_8B, **given})
    if options.get("resumed"):
        monkeypatch.setattr(run_model, "read_shape", lambda folder: read_shape("gated-nano", {}))
        model = resumed_model(own, tmp_path)
    else:
        model = new_model(own)
    mesh: Any = type("Mesh", (), dict(size=lambda self: world))()
    shared = Parallel(
        config=own.train, kind=options.get("kind", "none"), dp=mesh if world > 1 else None
    )
    shared.ranks.world = world
    with pytest.raises(UsageError, match="does not fit") as refused:
        check_memory(model, own.train, shared)
    flags = re.findall(r"(?:add|, and add) (.*?)(?:, which| \(--no)", str(refused.value))
    line = " ".join(flags)
    assert bool(flags) != ("no option" in str(refused.value)) or "start it on" in str(refused.value)
    assert not any(flag in line for flag in never), line
    if "beta2=0.99" in given.values() and "--optimizer-options" in line:
        assert "beta2=0.99,stochastic_rounding=true" in line


def test_memory_of_the_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters and moments of 8 billion parameters take 12 bytes each there, of every process."""
    own = run_settings("pretrain", {"recipe": "current", **GATED_8B, "optimizer_offload": True})
    gpu_with(monkeypatch, 500, 130)
    plan = check(own).plan
    assert plan.host == pytest.approx(12 * plan.config.num_parameters, rel=1e-6)  # and counts
    gpu_with(monkeypatch, 500, 40)
    with pytest.raises(
        UsageError, match=r"--optimizer-offload needs \d+.\d GiB of .* 40.0 GiB free: leave it out"
    ):
        check(own)
    assert (
        check(
            dataclasses.replace(own, train=dataclasses.replace(own.train, memory_check=False))
        ).plan
        == plan
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    gpu_with(monkeypatch, 500, 130)
    with pytest.raises(UsageError, match="32.5 GiB free"):
        check(own)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    own = run_settings(
        "pretrain", {"recipe": "current", **GATED_8B, "batch_size": 1, "seq_len": 512}
    )
    lines = []
    for host in (130, 40):
        gpu_with(monkeypatch, 35, host)
        with pytest.raises(UsageError) as refused:
            check(own)
        lines.append(str(refused.value))
    assert "--optimizer-offload" in lines[0] and "--optimizer-offload" not in lines[1]


def test_options_of_the_optimizer_count(there: Any) -> None:
    there(500)
    plain, rounded = (
        check(settings(optimizer="adamw8bit", optimizer_options=text)).plan.peak.optimizer
        for text in ("", "stochastic_rounding=true")
    )
    elements = get_preset("gated-1b").num_parameters
    assert plain - rounded == pytest.approx(4 * elements, rel=0.01)
    ranks = [
        check(settings(optimizer="galore", optimizer_options=f"rank={n}")).plan.peak.optimizer
        for n in (8, 4096)
    ]
    whole = check(settings(optimizer="adamw")).plan.peak.optimizer
    assert ranks[0] < ranks[1] == pytest.approx(whole, rel=1e-6)


def test_refusals_come_before_data_is_read(
    there: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    there(1)
    run = [
        "pretrain",
        "--preset",
        "llama-3.1-8b",
        "--device",
        "cpu",
        "--data",
        str(tmp_path / "missing"),
    ]
    assert main([*run, "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert (
        "does not fit" in err
        and "GiB" in err
        and len(err.splitlines()) == 1
        and not (tmp_path / "run").exists()
    )
    there(10**4)
    assert main([*run, "--out", str(tmp_path / "run")]) == 2
    assert "missing" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["te", "hf"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_saved_model_is_planned_from_its_small_files(
    format: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    options = dict(engine="emulated", device="cpu", dtype=dtype, **TINY)
    model = CausalLM.from_preset("llama-3.1-8b", recipe="current", vocab_size=288, **options)
    model.save_pretrained(tmp_path / "m", format=format)
    (weights,) = (tmp_path / "m").glob("model*.safetensors")
    weights.write_bytes(bytes(weights.stat().st_size))  # nothing reads it
    found = read_shape(tmp_path / "m")
    assert found.config == model.config and found.dtype == dtype
    assert (found.recipe and found.recipe.to_dict()) == (
        model.recipe.to_dict() if format == "te" else None
    )
    own = run_settings(
        "finetune", {"model": str(tmp_path / "m"), "recipe": "current", "device": "cpu"}
    )
    elements = sum(p.numel() for p in model.parameters())
    assert check(own).plan.peak.weights >= elements * dtype.itemsize
    gated = read_shape(tmp_path / "m", {"attention_gate": "elementwise"})
    assert gated.config.attention_gate == "elementwise"


def test_memory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "CGROUP", tmp_path)
    free = available_memory(torch.device("cpu"))
    assert 2**20 < free < 2**50
    for name, text in dict(
        max=str(free // 2), current=str(free // 4), stat="anon 5\ninactive_file 1024\n"
    ).items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_memory(torch.device("cpu")) == free // 2 - free // 4 + 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(torch.device("cpu")) > free // 2


def test_split_layers_are_planned(there: Any) -> None:
    """One of two processes that share each layer; what is advised is what such a run can do."""
    there(500)
    mesh: Any = PlannedRanks(2)
    config = TrainConfig(batch_size=4, seq_len=512, parallel="tp", sequence_parallel=True)
    shared = Parallel(config=config, kind="tp", tp=mesh)
    found = check_memory(new_model(settings()), config, shared)
    plan = plan_memory(get_preset("gated-1b"), get_recipe("current"), batch_size=4, seq_len=512,
                       gpus=2, tensor_parallel_size=2, sequence_parallel=True)  # fmt: skip
    on_cpu = dataclasses.replace(plan, training=dataclasses.replace(plan.training, cuda=False))
    assert found.needed == on_cpu.peak.total
    there(11.5)
    with pytest.raises(
        ValueError, match="add --batch-size|add --activation-checkpointing"
    ) as error:
        check_memory(new_model(settings()), config, shared)
    assert "--optimizer" not in str(error.value) and "--fp8-params" not in str(error.value)


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_divided_rows_are_planned(there: Any, kind: str) -> None:
    """Two of four processes share each row; what is advised is in the run's own sizes."""
    there(500)
    four: Any = PlannedRanks(4)
    two: Any = PlannedRanks(2)
    config = TrainConfig(batch_size=4, seq_len=512, parallel=kind, context_parallel_size=2)
    shared = Parallel(config=config, kind=kind, dp=four, cp=two)
    found = check_memory(new_model(settings()), config, shared)
    sizes = dict(batch_size=4, gpus=4) if kind == "fsdp" else dict(batch_size=2, gpus=1)
    plan = plan_memory(get_preset("gated-1b"), get_recipe("current"), seq_len=512,
                       context_parallel_size=2, **sizes)  # fmt: skip
    on_cpu = dataclasses.replace(plan, training=dataclasses.replace(plan.training, cuda=False))
    assert found.needed == on_cpu.peak.total
    there(found.needed / 2**30 - 0.2)
    with pytest.raises(ValueError, match="add --batch-size|add --activation-checkpointing"):
        check_memory(new_model(settings()), config, shared)
