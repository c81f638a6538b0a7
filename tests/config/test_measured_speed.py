"""The table of measured speeds: made from the committed measurements, and read without inventing figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import speed_map
from te_models.cli import main
from te_models.config.gpus import get_gpu
from te_models.config.measured_speed import FILE, MeasuredSpeed, gain, measured_speeds
from te_models.config.presets import get_preset
from te_models.model.recipe_fit import best_on

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_the_table_is_that_of_the_committed_measurements() -> None:
    """Run `python -m benchmarks.speed_map --collect` where this fails."""
    rows = json.loads(FILE.read_text())["rows"]
    assert rows == json.loads(json.dumps(list(speed_map.rows())))
    for row in rows:
        environment = json.loads((RESULTS / row["source"]).read_text()).get("environment")
        if environment is not None:  # of whole files
            assert environment["gpu"].startswith(f"NVIDIA {row['gpu']}")
            assert environment["date"] == row["date"]


def test_figures_are_those_of_the_files() -> None:
    """By hand, from the files themselves."""
    light = json.loads((RESULTS / "first_light_h200.json").read_text())["recipes"]
    found = gain("NVIDIA H200", get_preset("gated-124m"), "current", 32 * 1024)
    ratio = light["current"]["tokens_per_second"] / light["bf16"]["tokens_per_second"]
    assert not found.pays and f"current has {ratio:.2f} of BF16's speed" in found.text
    experts = json.loads((RESULTS / "expert_profile_h100.json").read_text())["rows"]
    (speed,) = (
        row["speed_over_bf16"]
        for row in experts
        if (row["shape"], row["recipe"]) == ("olmoe", "delayed")
    )
    moe = dict(num_experts=64, num_experts_per_tok=8, moe_intermediate_size=1024)
    olmoe = get_preset("gated-1b", moe=moe)
    found = gain("NVIDIA H100 80GB HBM3", olmoe, "delayed", 3 * 4096)
    assert found.pays and f"{speed:.2f} of BF16's speed in olmoe width" in found.text


@pytest.mark.parametrize(
    ("gpu", "preset", "recipe", "tokens"),
    [
        ("H200", "gated-nano", "current", None),  # far narrower than anything measured
        ("H200", "gated-124m", "current", 64),  # far fewer tokens
        ("H200", "gated-124m", "mxfp8", None),
        ("RTX 4090", "gated-1b", "current", None),
        ("a card of tomorrow", "gated-1b", "current", None),
        ("H200", "gated-moe-nano", "current", None),  # no experts were measured there
    ],
)
def test_what_is_not_measured_has_no_verdict(
    gpu: str, preset: str, recipe: str, tokens: int | None
) -> None:
    found = gain(gpu, get_preset(preset), recipe, tokens)
    assert found.pays is None and "not measured" in found.text


def test_the_map_counts_at_its_sizes() -> None:
    """By hand, from its file: width 768, 1 x 512 and 8 x 4,096 tokens; and the most tokens where none are given."""
    rows = json.loads((RESULTS / "speed_map_h200.json").read_text())["rows"]
    times = {}
    for row in rows:
        if not row["experts"]:
            times[row["width"], row["batch"] * row["seq"], row["recipe"]] = row["ms"]
    for width, preset, tokens in ((768, "gated-124m", 512), (4096, "gated-8b", 32768)):
        ratio = times[width, tokens, "bf16"] / times[width, tokens, "blockwise"]
        found = gain("H200", get_preset(preset), "blockwise", tokens)
        assert (
            found.pays == (ratio > 1) and f"blockwise has {ratio:.2f} of BF16's speed" in found.text
        )
    assert gain("H200", get_preset("gated-8b"), "blockwise").pays


def test_the_nearest_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sizes in tokens the nearer one, whatever the other says."""
    row = MeasuredSpeed(
        gpu="H200", shape="small", width=768, expert_width=0, recurrent=False, batch=1, seq_len=1024, recipe="current",
        lora=False, part="pass", tokens_per_second=1.0, flops_per_token=1.0, peak_share=0.1, over_bf16=0.8, source="",
        date="",
    )  # fmt: skip
    rows = (row, replace(row, batch=32, over_bf16=1.3))
    monkeypatch.setattr("te_models.config.measured_speed.measured_speeds", lambda: rows)
    config = get_preset("gated-124m")
    assert gain("H200", config, "current", 2048).pays is False
    assert gain("H200", config, "current", 16384).pays is True
    assert gain("H200", config, "current", 2**20).pays is None
    few, many = best_on(get_gpu("H200"), config, 1024), best_on(get_gpu("H200"), config, 32768)
    assert (few[0].name, many[0].name) == ("bf16", "current")
    assert "0.80 of BF16's speed" in few[1] and "1.30 of BF16's speed" in many[1]
    assert gain("H200", config, "current", 2048, lora=True).pays is None


def test_a_row_of_the_same_mixers_counts_first() -> None:
    """Hybrids and models of attention alone have rows at width 2,048; without those of its kind, a model has others."""
    by_attention = gain("H200", get_preset("gated-1b"), "current")
    hybrid = gain("H200", get_preset("qwen3.5-2b"), "current")
    assert "in 4 layers (hidden size 2048" in by_attention.text
    assert "in 2b (hidden size 2048" in hybrid.text
    assert (
        "in 4 layers (hidden size 1024" in gain("H200", get_preset("qwen3.5-0.8b"), "current").text
    )


def test_plan_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--preset", "gated-124m", "--gpu", "H200"]
    assert main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "recipe auto: bf16 (FP8 saves no time at this size: current has 0.97 of" in text
    assert "speed: delayed has 0.99" in text or "speed: delayed has 1.00" in text
    assert "speed: blockwise has 0.94" in text
    assert main([*command[:-1], "RTX 5090", "--json"]) == 0
    speed = json.loads(capsys.readouterr().out)["speed"]
    assert speed and all("not measured" in line for line in speed)
    assert main([*command[:3], "--recipe", "current"]) == 0
    assert "FP8 speed: this machine has no GPU" in capsys.readouterr().out


def test_the_benchmark_runs_anywhere() -> None:
    found = CliRunner().invoke(speed_map.main, ["--tiny"], catch_exceptions=False)
    rows = [json.loads(line) for line in found.output.splitlines()]
    assert {row["recipe"] for row in rows} == {"bf16", "current"} and rows[0]["ms"] > 0
    assert len(measured_speeds()) > 40
