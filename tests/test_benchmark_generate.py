"""benchmarks/generate.py at small size: every row is measured, and nothing is written without a GPU."""

import json
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers")

from benchmarks import generate


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.1-8b"])
def test_every_row_is_measured(name: str, tmp_path: Path) -> None:
    plan = generate.Plan(8, 2, 4, 1, time.monotonic() + 100)
    folder = tmp_path / "model"
    generate.written_and_loaded(name, folder, "cpu", tiny=True, read=False, prompt=plan.prompt)
    assert len(list(folder.glob("*.safetensors"))) > 1
    rows, skipped = generate.measure_model(name, folder, ["bf16", "delayed"], [1], "cpu", plan)
    who = ["te-models bf16, no graph", "te-models delayed, no graph"]
    who += ["transformers default", "transformers static cache + compile"]
    assert [row["who"] for row in rows] == who and not skipped
    assert all(
        row["decode_tokens_per_second"] > 0 < row["prefill_tokens_per_second"] for row in rows
    )
    assert rows[0]["same_first_tokens"] == 4, "FP32: the same tokens as transformers"
    told = CliRunner().invoke(generate.cli, ["load", str(folder), "cpu", "te-models", "8"])
    loaded = json.loads(told.stdout)
    assert loaded["first_token_cold_seconds"] > 0 < loaded["first_token_warm_seconds"]
    assert loaded["weight_bytes"] > 200_000 and loaded["seconds"] > 0
    plan.deadline = 0.0
    rows, skipped = generate.measure_model(name, folder, ["bf16"], [1], "cpu", plan)
    assert not rows and len(skipped) == 3 and all("no time left" in what for what in skipped)


def test_decode_is_the_median_of_slopes_of_interleaved_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of 5 ms, a prompt of 40 ms, and captures of 30 to 90 ms; one repeat is slowed by other work."""
    clock = [0.0]
    calls: list[int] = []
    captures = [0.09, 0.06, 0.03, 0.06, 0.03, 0.06, 0.09, 0.06, 0.03]

    def generate_tokens(count: int) -> torch.Tensor:
        capture = captures[len(calls) % len(captures)]
        slow = 3.0 if len(calls) == 6 else 1.0
        clock[0] += slow * (0.04 + capture * (count > 1) + 0.005 * (count - 1))
        calls.append(count)
        return torch.zeros(1, 4 + count, dtype=torch.long)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    plan = generate.Plan(4, generate.SHORT, generate.LONG, generate.REPEATS, 0.0)
    assert plan.long - plan.short >= 192 and plan.repeats >= 5
    found = generate.measured(generate_tokens, 2, plan)
    assert calls == [plan.long, plan.short, 1] * (plan.repeats + 1)
    assert len(found["seconds_per_step"]) == plan.repeats
    # A capture is off by 60 ms at the most, over 192 steps.
    assert abs(2 / found["decode_tokens_per_second"] - 0.005) <= 0.06 / 192
    assert max(found["seconds_per_step"]) > 0.01, "the slow one, which the median leaves out"
    assert found["prefill_tokens_per_second"] == pytest.approx(2 * 4 / 0.04)


@pytest.mark.filterwarnings("ignore")
def test_a_run_says_all_and_writes_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "result.json"
    monkeypatch.setattr(
        generate, "theirs", lambda *args: (_ for _ in ()).throw(RuntimeError("no compiler"))
    )
    options = [
        "run",
        "--tiny",
        "--no-load",
        "--models",
        "qwen3-0.6b",
        "--recipes",
        "bf16",
        "--batches",
        "2",
    ]
    told = CliRunner().invoke(generate.cli, [*options, "--out", str(out)], catch_exceptions=False)
    assert told.exit_code == 0 and not out.exists()
    assert "| `qwen3-0.6b` | 2 | te-models bf16, no graph |" in told.stdout
    assert "skipped: qwen3-0.6b, batch 2, transformers default: no compiler" in told.stdout
    refused = CliRunner().invoke(generate.cli, ["run"])
    assert refused.exit_code == 2 and "use --tiny" in refused.output
