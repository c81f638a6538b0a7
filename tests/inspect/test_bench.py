"""te-models bench: every variant is the same model on the same tokens, and its figures match their names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import CausalLM
from te_models.cli import main
from te_models.config.presets import get_preset
from te_models.inspect import bench_report
from te_models.inspect.bench import WAYS, Measured, bench, parse
from te_models.inspect.bench_report import bench_table, plot_bench
from te_models.inspect.peers import TorchBlock, peer_step, torch_peer
from te_models.inspect.roofline import Roofline, model_flops

SHAPE: dict[str, Any] = dict(
    hidden_size=64, num_hidden_layers=3, intermediate_size=96, num_attention_heads=4
)
SHAPE |= dict(num_key_value_heads=2, vocab_size=96)
CPU = torch.device("cpu")


@pytest.mark.parametrize("gate", ["elementwise", "headwise", "none"])
def test_the_torch_peer_is_the_same_model(gate: str) -> None:
    config = get_preset("gated-nano", attention_gate=gate, **SHAPE)
    model, peer = (
        CausalLM(config, device="cpu", dtype=torch.float32),
        torch_peer(config, CPU).float(),
    )
    model_weights = {name: weight.detach() for name, weight in model.named_parameters()}
    with torch.no_grad():
        peer.embed.weight.copy_(model_weights["embed_tokens.weight"])
        peer.lm_head.weight.copy_(model_weights.get("lm_head.weight", peer.embed.weight))
        for number, block in enumerate(peer.blocks):
            assert isinstance(block, TorchBlock)
            for name in ("qkvg_proj", "o_proj"):
                block.get_parameter(f"{name}.weight").copy_(
                    model_weights[f"layers.{number}.self_attn.{name}.weight"]
                )
            for name in ("gate_up_proj", "down_proj"):
                block.get_parameter(f"{name}.weight").copy_(
                    model_weights[f"layers.{number}.mlp.{name}.weight"]
                )
    ids = torch.randint(0, 96, (2, 7))
    torch.testing.assert_close(peer(ids), model(ids).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        peer_step(peer, ids)(), model(ids, labels=ids).loss.detach(), rtol=1e-5, atol=0
    )


def test_flops_are_counted_by_the_tensors() -> None:
    """6 operations a weight and token, and 12 B S^2 A H of attention, of which causality spares half."""
    config = get_preset("gated-nano", attention_gate="elementwise", **SHAPE)
    model = CausalLM(config, device="cpu")
    weights = sum(
        p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n
    )
    weights += config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    expected = 6 * weights * 10 + 6 * 3 * 2 * 5 * 5 * 64
    assert model_flops(config, 2, 5) == expected
    assert model_flops(config, 2, 5, gated=False) == expected - 6 * 10 * 3 * 64 * 64


def test_ratios_are_at_equal_operations() -> None:
    reference = Measured("torch", flops=2e9, ms=[4.0, 4.0, 100.0])
    half = Measured("te-layer", flops=1e9, ms=[2.0, 2.0, 2.0], peak_gib=1.0)
    row = half.row(1000, Roofline(0.5, 0.25, 0.25), reference)
    assert row["speed"] == 1.0 and row["ms"] == 2.0 and row["tokens_per_second"] == 500_000
    assert row["model_tflops"] == 0.5 and row["of_roofline"] == 0.25
    assert half.row(1000, Roofline(1.0, 0.5, 0.5), half)["of_roofline"] == 1.0


@pytest.mark.parametrize("way", WAYS)
def test_a_way_to_run_reaches_the_model(way: str) -> None:
    name, options = parse(f"delayed+{way}")
    assert name == "delayed" and options == WAYS[way]
    keywords = {
        key: value for key, value in options.items() if key != "cuda_graph"
    }  # model_step's own
    CausalLM(
        get_preset("gated-nano", **SHAPE), device="meta", engine="emulated", recipe=name, **keywords
    )


@pytest.mark.slow
def test_bench_times_every_variant_as_often() -> None:
    sizes = dict(batch_size=1, seq_len=8, steps=3, warm_up=1, amax_history_len=4)
    variants = ["bf16", "delayed+fused", "auto"], ["torch"]
    result: Any = bench(get_preset("gated-nano", **SHAPE), *variants, device=CPU, **sizes)
    names = ["torch", "te-models bf16", "te-models delayed+fused", "te-models auto"]
    assert [row["name"] for row in result["rows"]] == names
    assert (
        result["reference"] == "torch"
        and result["rows"][0]["speed"] == 1.0
        and result["roofline"] is None
    )
    losses = [row["loss"] for row in result["rows"]]
    assert max(losses) - min(losses) < 0.5 and len(set(losses)) == 3 and losses[1] == losses[3]
    json.dumps(result)


def test_the_table_has_mebibytes_for_a_small_model() -> None:
    row = dict(
        name="torch",
        ms=3.0,
        ms_quartiles=[2.9, 3.2],
        speed=1.0,
        tokens_per_second=1.0,
        model_tflops=1.0,
    )
    rows = [row | dict(peak_gib=peak / 1024, loss=1.0) for peak in (37, 41)]
    settings = dict(batch_size=1, seq_len=8)
    table = bench_table(
        dict(settings=settings, environment={}, reference="torch", roofline=None, rows=rows)
    )
    assert (
        list(table.columns[-2].cells) == ["37.00", "41.00"]
        and table.columns[-2].header == "peak MiB"
    )


def test_the_plot_says_what_it_ran_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dict(name="torch", ms=3.0, ms_quartiles=[2.9, 3.2], peak_gib=1.5)
    result = dict(
        rows=[row, {**row, "name": "te-models delayed"}],
        roofline=dict(total=2.0),
        settings=dict(batch_size=8, seq_len=2048),
        environment=dict(gpu="NVIDIA H100"),
    )
    plot_bench(tmp_path / "bench.png", result, "a title")
    assert (tmp_path / "bench.png").stat().st_size > 5000
    drawn: list[Any] = []
    monkeypatch.setattr(bench_report, "save_figure", lambda figure, path: drawn.append(figure))
    for environment, place in ((dict(gpu="NVIDIA H100"), "NVIDIA H100"), ({}, "CPU: the emulated")):
        plot_bench(tmp_path / "bench.png", {**result, "environment": environment}, "a title")
        said = drawn[-1].get_suptitle()
        assert said.startswith("a title\nbatch 8 x 2048 tokens") and place in said


@pytest.mark.parametrize("matplotlib", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_command_writes_figures(
    matplotlib: bool, tmp_path: Path, pretend: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if not matplotlib:
        pretend("matplotlib", None)
    fields = [
        part
        for name, value in SHAPE.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    shape = [
        "--batch-size",
        "1",
        "--max-position-embeddings",
        "8",
        "--steps",
        "2",
        "--warm-up",
        "1",
        *fields,
    ]
    assert (
        main(
            [
                "bench",
                "--preset",
                "gated-nano",
                "--recipes",
                "bf16,current",
                "--out",
                str(tmp_path),
                *shape,
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "te-models current" in out
    if matplotlib:
        assert (
            tmp_path / "bench.png"
        ).stat().st_size > 5000 and f"plot: {tmp_path / 'bench.png'}\n" in out
    else:
        assert (
            "plot: not drawn: drawing needs matplotlib" in out
            and not (tmp_path / "bench.png").exists()
        )
    assert [row["name"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]] == [
        "te-models bf16", "te-models current"
    ]  # fmt: skip
