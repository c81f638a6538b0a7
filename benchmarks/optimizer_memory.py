"""Measure the state of each optimizer for a model of 282M parameters, and the time of its step.

    python benchmarks/optimizer_memory.py [--out RESULT.json]

Bytes are those of the tensors that exist after one step at full size (the run d20-e3-full), a step without its
arithmetic: the bytes stored do not depend on the values. Times are those of a step at full size on a GPU. On a CPU,
where orthogonalizing 282M parameters takes minutes, they are of one layer with a quarter of the width, in processor
seconds of one thread, so that other processes do not count; torchao's, which would be compiled first, are left out. All
optimizers take turns, and the best of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from te_models import CausalLM
from te_models.inspect.environment import environment
from te_models.optim import build_optimizer, muon8bit
from te_models.optim.state_tensors import bytes_in, pack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
clock = time.perf_counter if DEVICE == "cuda" else time.process_time
FULL: dict[str, Any] = dict(preset="d20-e3-full")
SMALL: dict[str, Any] = dict(
    preset="gated-350m",
    num_hidden_layers=1,
    hidden_size=256,
    intermediate_size=704,
    num_attention_heads=2,
    vocab_size=8000,
)
# Name in the table -> optimizer, options, what its step is compared with; "": the step is not timed.
ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "adamw": ("adamw", {}, "adamw"),
    "adamw8bit": ("adamw8bit", {}, "adamw"),
    "adamw8bit, no masters": ("adamw8bit", {"stochastic_rounding": True}, ""),
    "adamwfp8": ("adamwfp8", {}, "adamw"),
    "galore, rank 128": ("galore", {}, "adamw"),
    "muon": ("muon", {}, "muon"),
    "muon8bit": ("muon8bit", {}, "muon"),
    "muon8bit, rest adamw8bit": ("muon8bit", {"rest": "adamw8bit"}, ""),
}


def is_timed(name: str, other: str) -> bool:
    """Return whether the table gives a time for the row."""
    return bool(other) and (DEVICE == "cuda" or name not in ("adamw8bit", "adamwfp8"))


def build(shape: dict[str, Any]) -> CausalLM:
    """Return a model in BF16: a preset, with fields changed."""
    fields = dict(shape)
    preset = fields.pop("preset")
    torch.manual_seed(0)
    return CausalLM.from_preset(preset, **fields, device=DEVICE)


def give_gradients(model: CausalLM, gradients: list[torch.Tensor]) -> None:
    """Set gradients for the next step, which frees them."""
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g


def measure_bytes(
    name: str, model: CausalLM, gradients: list[torch.Tensor], options: dict[str, Any]
) -> dict[str, Any]:
    """Bytes after one step: masters, all other state, and the state of the first optimizer a parameter of its own."""
    if name.startswith("muon"):
        options = {**options, "ns_steps": 0}  # the bytes stored do not depend on it
    optimizer = build_optimizer(name, model, 1e-4, 0.1, options)
    give_gradients(model, gradients)
    with (
        mock.patch("torchao.optim.adam.single_param_adam", lambda *arguments: None),
        mock.patch(
            "te_models.optim.galore.leading_directions",
            lambda matrix, rank, seed: matrix[:, :rank].clone(),
        ),
        torch.compiler.set_stance("force_eager"),
    ):
        optimizer.step()
    saved, first = optimizer.state_dict(), optimizer.optimizers[0]
    own = sum(p.numel() for group in first.param_groups for p in group["params"])
    return {
        "masters_bytes": bytes_in(saved["masters"]),
        "state_bytes": bytes_in(saved["state"]),
        "bytes_per_parameter_of_its_own": bytes_in([_plain(s) for s in first.state.values()]) / own,
    }


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: pack(value) for name, value in state.items()}


def measure_seconds(shape: dict[str, Any], rounds: int) -> dict[str, float]:
    """Best seconds of a step of every row, and of muon8bit with torch.optim.Muon's own BF16 products."""
    steps: dict[str, Callable[[], None]] = {}
    for row, (name, options, other) in ROWS.items():
        if not is_timed(name, other):
            continue
        model = build(shape)
        steps[row] = stepper(model, build_optimizer(name, model, 1e-4, 0.1, options))
    as_shipped = muon8bit.product_dtype

    def in_bf16() -> None:
        muon8bit.product_dtype = lambda device: torch.bfloat16
        steps["muon8bit"]()
        muon8bit.product_dtype = as_shipped

    turns = {**steps, "muon8bit, BF16 products": in_bf16}
    best = dict.fromkeys(turns, float("inf"))
    for i in range(rounds + 1):  # the first compiles
        for row, step in turns.items():
            start = clock()
            step()
            if i:
                best[row] = min(best[row], clock() - start)
    return best


def stepper(model: CausalLM, optimizer: Any) -> Callable[[], None]:
    """One step on fixed gradients."""
    gradients = [torch.randn_like(p) for p in model.parameters()]

    def step() -> None:
        give_gradients(model, gradients)
        optimizer.take_gradients(0.0)
        optimizer.step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return step


def table(result: dict[str, Any]) -> Table:
    """Return the result as a table, in GB of 10^9 bytes."""
    made = Table(
        title=f"{result['parameters']:,} parameters, BF16 weights and gradients",
        title_justify="left",
    )
    for column in (
        "optimizer",
        "weights",
        "gradients",
        "masters",
        "state",
        "bytes/param",
        "total",
        "saved",
        "step",
    ):
        made.add_column(column, justify="left" if column == "optimizer" else "right")
    weights = result["weights_bytes"]
    baseline = result["rows"]["adamw"]["total_bytes"]
    for row, r in result["rows"].items():
        sizes = [
            f"{size / 1e9:.2f} GB"
            for size in (weights, weights, r["masters_bytes"], r["state_bytes"])
        ]
        saved = f"{1 - r['total_bytes'] / baseline:.0%}" if row != "adamw" else ""
        times = f"{r['step_ratio']:.2f}x {r['step_compared_with']}" if "step_ratio" in r else ""
        per = f"{r['state_bytes'] / result['parameters']:.2f}"
        made.add_row(row, *sizes, per, f"{r['total_bytes'] / 1e9:.2f} GB", saved, times)
    return made


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = (
        Path(__file__).parent
        / "results"
        / f"optimizer_memory_{'h200' if DEVICE == 'cuda' else 'cpu'}.json"
    )
    parser.add_argument("--out", type=Path, default=default)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    seconds = measure_seconds(FULL if DEVICE == "cuda" else SMALL, rounds=3)
    model = build(FULL)
    weights = bytes_in([p.detach() for p in model.parameters()])
    gradients = [torch.randn_like(p) for p in model.parameters()]
    result: dict[str, Any] = {
        "environment": environment(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_bytes": weights,
        "timed": FULL if DEVICE == "cuda" else SMALL,
        "rows": {},
    }
    for row, (name, options, other) in ROWS.items():
        r = measure_bytes(name, model, gradients, options)
        r["total_bytes"] = 2 * weights + r["masters_bytes"] + r["state_bytes"]
        if is_timed(name, other):
            ratio = seconds[row] / seconds[other]
            r |= {"step_seconds": seconds[row], "step_compared_with": other, "step_ratio": ratio}
        result["rows"][row] = r
    same_products = seconds["muon8bit, BF16 products"] / seconds["muon"]
    result["muon8bit_step_ratio_with_the_same_products"] = same_products
    Console(width=130).print(table(result))
    print(f"muon8bit with muon's own BF16 products: {same_products:.3f}x muon")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
