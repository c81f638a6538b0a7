"""The training command of a report on FP8 and compilation: gated-896, 16 x 1,024 tokens, 8 micro-batches, whole steps.

    python -m benchmarks.compiled_fp8 --shape 350m --out benchmarks/results/compiled_fp8_350m_h200.json
    python -m benchmarks.compiled_fp8 --shape 454m --out benchmarks/results/compiled_fp8_454m_h100.json
    python -m benchmarks.compiled_fp8 --tiny --out tiny.json                           # anywhere: does it work?

14 heads of 64, a width of 896, an MLP of 3,584, no recomputation, gradient norm and AdamW included. Ours beside
compiled PyTorch and torchao, and without compilation and CUDA graphs, for which the report expects FP8 to be slower
than BF16. PyTorch's rows sum gradients in BF16 and update BF16 weights without FP32 masters, which is less work than
ours do. The first row is repeated at the end, so that a GPU whose speed drifted shows it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.timed_steps import (
    DEVICE,
    TINY,
    attempt,
    build_run,
    free_memory,
    synchronize,
    time_steps,
)
from benchmarks.whole_step import RandomTokens
from te_models import ModelConfig, get_preset
from te_models.inspect.environment import environment
from te_models.inspect.peers import PEERS, peer_loss
from te_models.optim.gradients import clip_factor, gradient_norm, scale

LAYERS = {"350m": 24, "454m": 31}
SIZE = dict(batch_size=16, seq_len=1024, gradient_accumulation=8)
TINY_SIZE = dict(batch_size=2, seq_len=64, gradient_accumulation=2)
ALL_FP8 = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
PLAIN = dict(compile=False, fused=False)
# Name of the row -> options of the model and of the run.
OURS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": (dict(recipe="bf16"), {}),
    "delayed": (dict(recipe="delayed", **ALL_FP8), {}),
    "delayed, first and last layer in BF16": (dict(recipe="delayed"), {}),
    "current": (dict(recipe="current", **ALL_FP8), {}),
    "delayed, plain operations, no graph": (
        dict(recipe="delayed", **ALL_FP8, **PLAIN),
        dict(cuda_graph=False),
    ),
    "bf16, plain operations, no graph": (
        dict(recipe="bf16", **PLAIN),
        dict(cuda_graph=False),
    ),
    "delayed, no graph": (dict(recipe="delayed", **ALL_FP8), dict(cuda_graph=False)),
    "delayed, max-autotune": (dict(recipe="delayed", compile="max-autotune", **ALL_FP8), {}),
    "bf16, max-autotune": (dict(recipe="bf16", compile="max-autotune"), {}),
}
# Name of the row -> peer, and whether it is compiled.
THEIRS = {
    "PyTorch BF16, compiled": ("torch", True),
    "torchao float8, compiled": ("torchao", True),
    "torchao float8, not compiled": ("torchao", False),
    "PyTorch BF16, not compiled": ("torch", False),
}
ORDER = [
    "bf16",
    "delayed",
    "PyTorch BF16, compiled",
    "torchao float8, compiled",
    "torchao float8, not compiled",
    "delayed, max-autotune",
    "bf16, max-autotune",
    "delayed, plain operations, no graph",
    "PyTorch BF16, not compiled",
    "bf16, plain operations, no graph",
    "delayed, first and last layer in BF16",
    "current",
    "delayed, no graph",
]
REPEATED = "bf16, again"


def measure_ours(name: str, config: ModelConfig, size: dict[str, int]) -> dict[str, Any]:
    """Return the speed and peak of one of OURS."""
    model_options, training = OURS[name]
    run = build_run(config, model_options, {**size, **training})
    found = time_steps(run, warm_up=2, rounds=3, steps=1)
    run.close()
    return found


def measure_peer(name: str, config: ModelConfig, size: dict[str, int]) -> dict[str, Any]:
    """Return the speed and peak of one of THEIRS, with a whole step as a plain training loop has it."""
    peer_name, compiled = THEIRS[name]
    start_bytes = free_memory()
    torch.manual_seed(0)
    peer = PEERS[peer_name](config, DEVICE)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    loss_of = peer_loss(peer, DEVICE)
    data = RandomTokens(config.vocab_size, size["batch_size"], size["seq_len"])
    count = size["gradient_accumulation"]

    def step() -> Tensor:
        total = torch.zeros((), device=DEVICE)
        for _ in range(count):
            ids = next(data)["input_ids"].to(DEVICE)
            loss = loss_of(ids) / count
            loss.backward()
            total += loss.detach()
        gradients = [p.grad for p in peer.parameters() if p.grad is not None]
        factor = clip_factor(gradient_norm([], gradients), 1.0)
        assert factor is not None
        scale(gradients, factor)
        optimizer.step()
        optimizer.zero_grad()
        return total

    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        return _time(step, size, start_bytes)


def _time(step: Callable[[], Tensor], size: dict[str, int], start_bytes: int) -> dict[str, Any]:
    """Return speed, peak and last loss of a step, as benchmarks.timed_steps.time_steps does."""
    for _ in range(2):
        loss = step()
    seconds = []
    for _ in range(3):
        synchronize()
        begun = time.perf_counter()
        loss = step()
        synchronize()
        seconds.append(time.perf_counter() - begun)
    tokens = size["batch_size"] * size["seq_len"] * size["gradient_accumulation"]
    found = {
        "seconds": seconds,
        "tokens_per_second": tokens / statistics.median(seconds),
        "loss": loss.item(),
        "graph": False,
    }
    if DEVICE.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - start_bytes
    return found


@click.command()
@click.option("--shape", type=click.Choice(list(LAYERS)), default="350m", show_default=True)
@click.option("--seconds", default=140.0, show_default=True, help="No row starts after this time.")
@click.option("--tiny", is_flag=True, help="A small shape anywhere: a test, not a measurement.")
@click.option("--going-on", is_flag=True, help="Keep the rows of OUT that were measured.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(shape: str, seconds: float, tiny: bool, going_on: bool, out: Path) -> None:
    """Measure every row, and write the results after each."""
    if DEVICE.type == "cpu" and not tiny:
        raise click.UsageError("there is no CUDA device here: use --tiny to try the program")
    begun = time.monotonic()
    config = get_preset("gated-896", num_hidden_layers=LAYERS[shape])
    size = SIZE
    if tiny:
        config = get_preset("gated-896", **TINY)
        size = TINY_SIZE
    rows: dict[str, Any] = {}
    document = dict(environment=environment(), shape=shape, size=size, rows=rows)
    if going_on:
        for name, row in json.loads(out.read_text())["rows"].items():
            if "error" not in row and name != REPEATED:
                rows[name] = row
    for name in [*ORDER, REPEATED]:
        if name in rows:
            continue
        if time.monotonic() - begun > seconds and name != REPEATED:
            rows[name] = {"error": "no time was left"}
            continue
        # Every variant compiles the same functions anew.
        with torch._dynamo.config.patch(recompile_limit=64):
            if name in THEIRS:
                rows[name] = attempt(lambda name=name: measure_peer(name, config, size))
            else:
                own = "bf16" if name == REPEATED else name
                rows[name] = attempt(lambda own=own: measure_ours(own, config, size))
        document["seconds"] = round(time.monotonic() - begun, 1)
        out.write_text(json.dumps(document, indent=1) + "\n")
        speed = rows[name].get("tokens_per_second")
        print(
            f"{name:40} {speed:12,.0f} tokens/s" if speed else f"{name}: {rows[name]}", flush=True
        )


if __name__ == "__main__":
    main()
