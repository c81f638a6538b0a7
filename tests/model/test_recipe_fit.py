"""recipe="auto": what it chooses and why, that it is the default everywhere, and that a saved recipe comes first."""

import inspect
import json
import logging
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.expert_profile import SHAPES
from te_models import CausalLM, get_preset, plan
from te_models.cli import main
from te_models.config.recipe import AUTO
from te_models.engine import check_support
from te_models.errors import UsageError
from te_models.model import recipe_fit
from te_models.model.decoder import Decoder
from te_models.model.recipe_fit import WIDE_ENOUGH, WIDE_EXPERTS, auto_recipe
from te_models.training.settings import RunSettings

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
TINY = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
)
GPUS = {
    "H200": (True, False),
    "B200": (True, True),
    "A100": (False, False),
}  # whether they run FP8 and MXFP8
FP32 = dict(dtype=torch.float32)
EXPERTS = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
WIDE = dict(moe_intermediate_size=14336)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the choice find a GPU of this name with Transformer Engine."""

    def find(gpu: str) -> None:
        fp8, mxfp8 = GPUS[gpu]
        te = SimpleNamespace(is_fp8_available=lambda: fp8, is_mxfp8_available=lambda: mxfp8)
        found = (te, "native", f"{gpu}, Transformer Engine 2.20.2")
        monkeypatch.setattr(recipe_fit, "get_engine", lambda engine, device: found)

    return find


@pytest.mark.parametrize(
    ("gpu", "preset", "shape", "options", "name", "reason"),
    [
        ("H200", "gated-8b", {}, {}, "current", "H200, hidden size 4096"),
        ("H200", "gated-1b", {}, {}, "current", "H200, hidden size 2048"),
        ("B200", "gated-8b", {}, {}, "mxfp8", "B200, hidden size 4096"),
        ("A100", "gated-8b", {}, {}, "bf16", "A100 has no FP8"),
        (
            "H200",
            "gated-124m",
            {},
            {},
            "bf16",
            "no time at this size: current has 0.97 of BF16's speed in gated-124m",
        ),
        (
            "B200",
            "qwen3-0.6b",
            {},
            {},
            "bf16",
            "no time below a hidden size of 2048, and this one is 1024",
        ),
        ("H200", "gated-8b", dict(moe=EXPERTS), {}, "current", "H200, hidden size 4096"),
        (
            "H200",
            "gated-8b",
            dict(moe=EXPERTS | dict(moe_intermediate_size=512)),
            {},
            "bf16",
            "below a width of experts of 768, and this one is 512",
        ),
        (
            "B200",
            "gated-8b",
            dict(moe=EXPERTS),
            {},
            "bf16",
            "below a width of experts of 4096, and this one is 768",
        ),
        ("H200", "gated-8b", dict(moe=EXPERTS | WIDE), {}, "current", "H200, hidden size 4096"),
        ("H200", "gated-124m", {}, dict(fp8_params=True), "current", "H200, hidden size 768"),
        ("H200", "gated-8b", {}, FP32, "bf16", "dtype is float32"),
        (
            "B200",
            "gated-8b",
            dict(intermediate_size=14352),
            {},
            "current",
            "B200, hidden size 4096",
        ),
        (
            "H200",
            "gated-8b",
            dict(intermediate_size=14337),
            {},
            "bf16",
            "intermediate_size=14337 is not a multiple",
        ),
        (
            "H200",
            "gated-8b",
            dict(num_hidden_layers=2),
            {},
            "bf16",
            "keeps 2 layers in BF16 and the model has 2",
        ),
        (
            "H200",
            "gated-8b",
            dict(num_hidden_layers=2),
            dict(num_layers_at_end_in_bf16=0),
            "current",
            "H200",
        ),
    ],
)
def test_the_choice_and_its_reason(
    gpu: str,
    preset: str,
    shape: dict[str, Any],
    options: dict[str, Any],
    name: str,
    reason: str,
    on: Any,
) -> None:
    on(gpu)
    recipe, why = auto_recipe(get_preset(preset, **shape), **options)
    assert recipe.name == name and reason in why and "\n" not in why
    for field in options.keys() - {"dtype", "fp8_params"}:
        assert recipe.to_dict()[field] == options[field]


def test_a_cpu_gets_bf16() -> None:
    recipe, why = auto_recipe(get_preset("gated-8b"), device="cpu")
    assert (recipe.name, why) == ("bf16", "FP8 saves no time on the emulated engine")


def measured() -> list[tuple[int, float]]:
    """Return (hidden size, speed under current relative to bf16) of the training runs in benchmarks/results."""
    light = json.loads((RESULTS / "first_light_h200.json").read_text())
    runs = {name: light["recipes"][name]["tokens_per_second"] for name in ("bf16", "current")}
    found = [(get_preset(light["run"]["preset"]).hidden_size, runs["current"] / runs["bf16"])]
    tuning = json.loads((RESULTS / "finetune_against_trl_h200.json").read_text())
    times = {
        (row["shape"], row["method"], row["way"]): statistics.median(
            row["times"][tuning["warm_up"] :]
        )
        for row in tuning["rows"]
    }
    for shape, method, way in times:
        if way == "current":
            speed = times[shape, method, "bf16"] / times[shape, method, way]
            found.append((get_preset(shape).hidden_size, speed))
    return found


def test_the_width_agrees_with_every_measurement() -> None:
    found = measured()
    assert {width < WIDE_ENOUGH for width, _ in found} == {True, False}
    for width, speed in found:
        assert speed > 1.01 if width >= WIDE_ENOUGH else speed < 1.01, (
            f"hidden size {width}: {speed:.3f}"
        )


def test_the_width_of_experts_agrees_with_every_measurement() -> None:
    result = json.loads((RESULTS / "expert_profile_h200.json").read_text())
    found = [
        (SHAPES[row["shape"]][0]["moe"]["moe_intermediate_size"], row["speed_over_bf16"])
        for row in result["rows"]
        if row["recipe"] == "current"
    ]
    assert len(found) >= 2
    for width, speed in found:
        pays = width >= WIDE_EXPERTS["Hopper"]
        assert speed > 1.01 if pays else speed < 1.01, f"{width}: {speed:.3f}"


def test_auto_is_the_default_everywhere(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert (
        inspect.signature(Decoder.__init__).parameters["recipe"].default
        == AUTO
        == RunSettings().recipe
    )
    recipe_fit.say.cache_clear()
    with caplog.at_level(logging.WARNING):
        models = [CausalLM.from_preset("gated-nano", device="cpu", **TINY) for _ in range(2)]
    line = "recipe auto: bf16 (FP8 saves no time on the emulated engine)"
    assert caplog.messages == [line], "once per process"
    reason = "auto: FP8 saves no time on the emulated engine"
    assert (
        reason in repr(models[0])
        and reason in models[0].plan().title
        and reason in plan("gated-8b").title
    )
    models[0].set_recipe("current")
    assert "auto" not in repr(models[0])
    models[0].set_recipe("auto")
    assert models[0].recipe.name == "bf16" and reason in repr(models[0])
    models[0].save_pretrained(tmp_path / "hf", format="hf")
    assert reason in repr(CausalLM.from_pretrained(tmp_path / "hf", device="cpu")), (
        "it has no recipe of its own"
    )


def test_auto_is_the_default_of_transformers_class() -> None:
    huggingface = pytest.importorskip("te_models.huggingface.modeling")
    config = huggingface.TEModelsConfig.of(get_preset("gated-nano", **TINY))
    assert huggingface.TEModelsForCausalLM(config, device="cpu").model.recipe_reason


@pytest.mark.parametrize("asked", [{}, {"recipe": "auto"}])
def test_a_saved_recipe_comes_first(asked: dict[str, Any], tmp_path: Path) -> None:
    model = CausalLM.from_preset(
        "gated-nano", device="cpu", recipe="delayed", amax_history_len=4, **TINY
    )
    model.save_pretrained(tmp_path / "m")
    loaded = CausalLM.from_pretrained(tmp_path / "m", device="cpu", **asked)
    assert loaded.recipe.to_dict() == model.recipe.to_dict() and not loaded.recipe_reason
    other = CausalLM.from_pretrained(tmp_path / "m", device="cpu", amax_history_len=8, **asked)
    assert other.recipe.to_dict() == model.recipe.to_dict() | {"amax_history_len": 8}


def test_finetune_keeps_the_recipe_of_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / f"text/{number}.txt").write_text(f"{number} green bottles " * 40)
    CausalLM.from_preset("gated-nano", device="cpu", recipe="delayed", **TINY).save_pretrained(
        tmp_path / "m"
    )
    run = [
        "--data",
        str(tmp_path / "text"),
        "--device",
        "cpu",
        "--steps",
        "1",
        "--seq-len",
        "16",
        "--batch-size",
        "1",
    ]
    run += ["--sample-tokens", "0", "--eval-batches", "1", "--out", str(tmp_path / "run")]
    assert main(["finetune", "--model", str(tmp_path / "m"), *run]) == 0
    assert "recipe auto: delayed (the model's own)" in capsys.readouterr().out
    assert CausalLM.from_pretrained(tmp_path / "run", device="cpu").recipe.name == "delayed"


@pytest.mark.parametrize(
    ("capability", "fields", "missing"),
    [
        ((12, 0), {}, "disable_rht=True and disable_stochastic_rounding=True"),
        ((12, 1), dict(disable_rht=True), "give disable_stochastic_rounding=True, or"),
        ((12, 0), dict(disable_rht=True, disable_stochastic_rounding=True), ""),
        ((10, 0), {}, ""),
    ],
)
def test_nvfp4_where_transformer_engines_check_is_wrong(
    capability: tuple[int, int],
    fields: dict[str, Any],
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    te: Any = SimpleNamespace(is_nvfp4_available=lambda return_reason: (True, ""))
    recipe = recipe_fit.get_recipe("nvfp4", **fields)
    check_support(te, "emulated", recipe)
    if not missing:
        check_support(te, "native", recipe)
        return
    with pytest.raises(
        UsageError, match=f"'nvfp4' does not run on the native engine here: .*{missing}.*emulated"
    ):
        check_support(te, "native", recipe)
