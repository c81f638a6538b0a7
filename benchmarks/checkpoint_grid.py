"""Memory and speed of activation checkpointing under each recipe: forward and backward, true peak memory.

    python -m benchmarks.checkpoint_grid run --out benchmarks/results/checkpoint_grid_h200.json     # on a GPU

Medians of interleaved rounds: every round times each variant of one model once, as a Trainer runs it (a CUDA graph, the
loss alone, gradients that are made by the backward). `activations` are the bytes that the forward saves for the
backward. Each FP8 recipe runs with BF16 and with FP8 primary weights. All layers run in the recipe. With --peers there
are rows of the same model in plain PyTorch and in torchao's float8 too, compiled, under none and full, where blocks are
checkpointed by torch.utils.checkpoint.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.timed_steps import free_memory, synchronize
from te_models import CausalLM, get_preset
from te_models.inspect.peers import PEERS, peer_step
from te_models.training.cuda_graph import WARM_UP, GraphedStep

SHAPES: dict[str, dict[str, Any]] = {
    "gated-1b": dict(preset="gated-1b", batch=8, seq=2048),
    "8B width, 4 layers": dict(
        preset="gated-8b", batch=4, seq=4096, num_hidden_layers=4, num_key_value_heads=32
    ),
}
RECIPES = (
    ("bf16", False),
    ("delayed", False),
    ("delayed", True),
    ("current", False),
    ("current", True),
)
MODES = ("none", "selective", "full")


@click.group()
def cli() -> None:
    """Run the grid."""


def prepared(
    model: CausalLM, mode: str, ids: torch.Tensor, weights: int
) -> tuple[Callable[[], float], int, int]:
    """Return a timer of a step under `mode` in milliseconds, a step's peak bytes, and the bytes saved for backward.

    No graph of another mode is alive.
    """
    model.activation_checkpointing = mode
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = GraphedStep(model)
    step(input_ids=ids, labels=ids)  # compiling takes memory of its own
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        step(input_ids=ids, labels=ids)
    peak = torch.cuda.max_memory_allocated() - before + weights
    before = torch.cuda.memory_allocated()
    loss = model(ids, labels=ids, return_logits=False).loss
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    del loss

    def milliseconds() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(input_ids=ids, labels=ids)
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)

    return milliseconds, peak, kept


def measure(
    shape: dict[str, Any], recipe: str, fp8_params: bool, rounds: int
) -> list[dict[str, Any]]:
    """Return one row per mode. One model at a time serves all modes of its recipe, so that memory is its own."""
    fields = dict(shape)
    preset, batch, seq = fields.pop("preset"), fields.pop("batch"), fields.pop("seq")
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    empty = torch.cuda.memory_allocated()
    edges = (
        {} if recipe == "bf16" else dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    )
    model = CausalLM.from_preset(
        preset, recipe=recipe, fp8_params=fp8_params, engine="native", **fields, **edges
    )
    weights = torch.cuda.memory_allocated() - empty
    ids = torch.randint(0, model.config.vocab_size, (batch, seq), device="cuda")
    steps = {mode: prepared(model, mode, ids, weights) for mode in MODES}
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        order = (
            MODES if number % 2 else MODES[::-1]
        )  # a GPU is warmer after a mode that computes more
        for mode in order:
            found[mode].append(steps[mode][0]())
    rows = []
    for mode, results in found.items():
        times, (_, peak, kept) = sorted(results), steps[mode]
        median = times[len(times) // 2]
        rows.append(dict(recipe=recipe, fp8_params=fp8_params, mode=mode, ms=median, fastest=times[0],
        slowest=times[-1],
                         tokens_per_second=batch * seq / median * 1e3, peak=peak, activations=kept))  # fmt: skip
        print(
            preset,
            recipe,
            "FP8" if fp8_params else "BF16",
            mode,
            f"{median:.1f} ms {peak / 2**30:.2f} GiB",
            flush=True,
        )
    return rows


class Recomputed(nn.Module):
    """A block of a peer whose backward computes its forward again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return what the block returns."""
        return checkpoint(self.block, *inputs, use_reentrant=False)


def measure_peer(
    name: str, shape: dict[str, Any], rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """Return a row per mode, none and full, of one of te_models.inspect.peers.PEERS."""
    fields = dict(shape)
    preset, batch, seq = fields.pop("preset"), fields.pop("batch"), fields.pop("seq")
    config = get_preset(preset, **fields)
    rows = []
    for mode in ("none", "full"):
        start_bytes = free_memory()
        torch.manual_seed(0)
        peer = PEERS[name](config, device)
        if mode == "full":
            for number, block in enumerate(peer.blocks):
                block._compiled_call_impl = None  # compiled again, together with its checkpoint
                peer.blocks[number] = Recomputed(block)
                if device.type == "cuda":
                    peer.blocks[number].compile()
        ids = torch.randint(0, config.vocab_size, (batch, seq), device=device)
        step = peer_step(peer, ids)
        for _ in range(2):
            step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(rounds + 1):  # the first is not timed
            synchronize()
            begun = time.perf_counter()
            loss = step()
            synchronize()
            times.append(1e3 * (time.perf_counter() - begun))
        peak = 0
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() - start_bytes
        times = sorted(times[1:])
        median = times[len(times) // 2]
        rows.append(
            dict(
                recipe=name,
                fp8_params=False,
                mode=mode,
                ms=median,
                fastest=times[0],
                slowest=times[-1],
                tokens_per_second=batch * seq / median * 1e3,
                peak=peak,
                loss=loss.item(),
            )
        )
        print(preset, name, mode, f"{median:.1f} ms {peak / 2**30:.2f} GiB", flush=True)
        del peer, step, loss
    return rows


@cli.command()
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--rounds", default=8)
@click.option(
    "--shape",
    "names",
    multiple=True,
    type=click.Choice(list(SHAPES)),
    help="May be repeated; default: all.",
)
@click.option("--peers", default="", help="Such as torch,torchao.")
def run(out: Path, rounds: int, names: tuple[str, ...], peers: str) -> None:
    """Measure the grid."""
    from te_models.inspect.environment import environment, require_gpu

    require_gpu()
    result: dict[str, Any] = {"environment": environment(), "shapes": SHAPES, "rows": {}}
    for name, shape in ((name, SHAPES[name]) for name in names or SHAPES):
        result["rows"][name] = []
        measures = [partial(measure, shape, *recipe, rounds) for recipe in RECIPES]
        for peer in filter(None, peers.split(",")):
            measures.append(partial(measure_peer, peer, shape, rounds, torch.device("cuda")))
        for rows in measures:
            try:
                with torch._dynamo.config.patch(recompile_limit=64):
                    result["rows"][name] += rows()
            except Exception:  # one variant that fails must not cost the others
                traceback.print_exc()
            out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    cli()
