"""Which recipes run on which GPU, beside the conditions in Transformer Engine's source."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_models.cli import main
from te_models.config.gpus import GPUS, get_gpu, how_it_runs, suited, why_not
from te_models.config.presets import get_preset
from te_models.config.recipe import SCHEMES, get_recipe, list_recipes
from te_models.engine import check_support
from te_models.errors import UsageError
from te_models.model import recipe_fit
from te_models.planning.flops import training_flops, utilization

# Transformer Engine 2.20, pytorch/quantization.py: the functions that check a scheme, as conditions.
CHECKS = {
    "is_fp8_available": lambda version: version >= (8, 9),
    "is_fp8_block_scaling_available": lambda version: version >= (9, 0),
    "is_mxfp8_available": lambda version: (10, 0) <= version < (12, 0),
    "is_nvfp4_available": lambda version: version >= (10, 0),
}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_runs_where_the_check_of_transformer_engine_passes(name: str, gpu: Any) -> None:
    recipe = get_recipe(name)
    checks = SCHEMES[recipe.scheme].available
    passes = not checks or CHECKS[checks](gpu.capability)
    runs = not why_not(suited(recipe, gpu), gpu.capability)
    if name == "blockwise" and gpu.capability >= (12, 0):
        passes = False  # the check passes, the MXFP8 products behind it are refused
    assert runs == passes


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("RTX 5090", "RTX 5090"),
        ("rtx5090", "RTX 5090"),
        ("5090", "RTX 5090"),
        ("GeForce 5060 Ti", "RTX 5060 Ti"),
        ("NVIDIA GeForce RTX 5070", "RTX 5070"),
        ("NVIDIA GeForce RTX 4080 SUPER", "RTX 4080"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("h100", "H100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA L40S", "L40S"),
        ("l4", "L4"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GB10", "DGX Spark"),
        ("NVIDIA GB200", "GB200"),
    ],
)
def test_names_as_people_and_drivers_write_them(given: str, name: str) -> None:
    assert get_gpu(given).name == name


@pytest.mark.parametrize("given", ["RTX 5091", "V100", "H1000", ""])
def test_an_unknown_gpu_is_refused_by_name(given: str) -> None:
    with pytest.raises(UsageError, match=f"unknown GPU {given!r}"):
        get_gpu(given)


@pytest.mark.parametrize(
    ("gpu", "preset", "recipe"),
    [
        ("H100", "gated-1b", "current"),
        ("B200", "gated-1b", "mxfp8"),
        ("RTX 5090", "gated-1b", "current"),
        ("A100", "gated-1b", "bf16"),
        ("B200", "gated-124m", "bf16"),
    ],
)
def test_auto_of_a_gpu_that_is_not_here(gpu: str, preset: str, recipe: str) -> None:
    assert recipe_fit.best_on(get_gpu(gpu), get_preset(preset))[0].name == recipe


@pytest.mark.parametrize(
    ("capability", "fields", "changed"),
    [
        ((12, 0), {}, ["disable_rht", "disable_stochastic_rounding"]),
        ((12, 1), {"disable_rht": True}, ["disable_stochastic_rounding"]),
        ((10, 0), {}, []),
    ],
)
def test_nvfp4_loses_what_fails_on_a_consumer_card_with_a_line(
    capability: tuple[int, int],
    fields: dict[str, Any],
    changed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    recipe_fit.say.cache_clear()
    asked = get_recipe("nvfp4", **fields)
    assert recipe_fit.suit_to_gpu(asked, "emulated") is asked
    suited_recipe = recipe_fit.suit_to_gpu(asked, "native")
    differs = [name for name in asked.fields if asked.fields[name] != suited_recipe.fields[name]]
    assert differs == changed
    assert all(f"{name}=True" in caplog.text for name in changed)
    assert bool(changed) == bool(caplog.text)
    te: Any = SimpleNamespace(is_nvfp4_available=lambda return_reason: (True, ""))
    check_support(te, "native", suited_recipe)


def test_blocks_on_blackwell_are_told_to_be_mxfp8() -> None:
    assert how_it_runs(get_recipe("blockwise"), (9, 0)) == "natively"
    assert "MXFP8" in how_it_runs(get_recipe("blockwise"), (10, 0))


def test_plan_answers_for_a_card_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--preset", "gated-350m", "--gpu", "RTX 5090"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "consumer Blackwell, compute capability 12.0" in shown
    assert "with disable_rht=True and disable_stochastic_rounding=True" in shown
    memory = ["--memory", "--batch-size", "4", "--seq-len", "1024", "--recipe", "current", "--json"]
    assert main([*words, *memory]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recipes"]["mxfp8"] is False and document["recipes"]["current"] is True
    assert document["auto"] == "bf16"  # too narrow for FP8 to pay
    assert document["fits"] is True and document["largest_batch"] >= 4
    assert main([*words, "--recipe", "mxfp8"]) == 0
    assert "recipe mxfp8 on RTX 5090: does not run" in capsys.readouterr().out


def test_the_share_of_the_peak() -> None:
    config = get_preset("llama-3.1-8b")
    tokens, length = 8192, 4096
    flops = training_flops(config, tokens, length)
    # Six per weight that multiplies and token, and attention's 6 B S^2 A H.
    weights = config.num_parameters - config.vocab_size * config.hidden_size
    attention = 6 * tokens * length * config.num_attention_heads * 128 * config.num_hidden_layers
    assert flops == pytest.approx(6 * weights * tokens + attention, rel=1e-3)
    per_token = training_flops(config, length, length) / length
    speed = 989e12 / 2 / per_token
    assert utilization(config, length, speed, "NVIDIA H100 80GB HBM3") == pytest.approx(0.5)
    assert utilization(config, length, speed, "NVIDIA H100 PCIe") == pytest.approx(0.5 * 989 / 756)
    assert utilization(config, length, speed, "NVIDIA GeForce RTX 5090") is None
    assert utilization(config, length, speed, "Some other card") is None
