"""The gated delta rule by FlashQLA and flash-linear-attention: time, memory, error, and the same bits as a CUDA graph.

    python -m benchmarks.delta_rule_kernels --out benchmarks/results/delta_rule_kernels_h200.json     # about 4 minutes

One layer of the width of Qwen3.5-4B and 9B, 16 heads of keys and 32 of values of 128 channels, in BF16. Times are of
CUDA graphs, as in a training step, since launches take longer than the kernels of a few rows. Errors are relative to
the plain version in FP32. FlashQLA compiles each kernel for 3 to 40 s, once per machine and number of rows.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor

from te_models.inspect.environment import environment, require_gpu
from te_models.kernels import flash_qla
from te_models.kernels.delta_rule import chunked, delta_rule

KEY_HEADS = 16
VALUE_HEADS = 32
CHANNELS = 128
DOCUMENT = 700  # tokens
REPEATS = 15


@click.command()
@click.option(
    "--shapes",
    default="1x2048,1x6144,2x6144,4x6144,1x16384,1x65536",
    show_default=True,
    help="Rows x tokens.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(shapes: str, out: Path) -> None:
    """Measure each shape with and without FlashQLA, plain and packed."""
    require_gpu()
    # Leaves of a backward pass that is captured must not belong to the default stream.
    torch.cuda.set_stream(torch.cuda.Stream())
    rows = []
    for shape in shapes.split(","):
        batch, seq = map(int, shape.split("x"))
        for packed in (False, True):
            rows += measured(batch, seq, packed)
            out.write_text(
                json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n"
            )
            for row in rows[-2:]:
                click.echo(json.dumps(row))


def measured(batch: int, seq: int, packed: bool) -> list[dict[str, Any]]:
    """Return the row of each package."""
    torch.manual_seed(0)
    leaves = [x.requires_grad_() for x in inputs(batch, seq)]
    slope = torch.randn_like(leaves[2])
    documents = None
    if packed:
        documents = (torch.arange(seq, device="cuda") // DOCUMENT).expand(batch, -1)

    def forward() -> Tensor:
        return delta_rule(*leaves, documents=documents)[0]

    def both() -> list[Tensor]:
        out = forward()
        return [out.detach(), *torch.autograd.grad(out, leaves, slope)]

    wanted, _ = chunked(*leaves, documents=documents)
    references = [wanted.detach(), *torch.autograd.grad(wanted, leaves, slope)]
    del wanted
    rows = []
    for package in ("flash-linear-attention", "FlashQLA"):
        with chosen(package):
            found = both()
            errors = [
                ((x.float() - y.float()).norm() / y.float().norm()).item()
                for x, y in zip(found, references, strict=True)
            ]
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            eager = both()
            peak = torch.cuda.max_memory_allocated() - before
            with torch.no_grad():
                forward()  # its own configurations may be tuned here, which no graph can capture
                forward_graph, _ = captured(forward)
            both_graph, results = captured(both)
            both_ms = milliseconds(both_graph)
            equal = all(torch.equal(x, y) for x, y in zip(eager, results, strict=True))
            row = dict(
                package=package,
                batch=batch,
                seq=seq,
                packed=packed,
                forward_ms=milliseconds(forward_graph),
                forward_backward_ms=both_ms,
                peak_bytes=peak,
                relative_errors=errors,
                graph_equal=equal,
            )
        rows.append(row)
        del eager, results, forward_graph, both_graph
    return rows


def inputs(batch: int, seq: int) -> list[Tensor]:
    """Return q, k, v, g and beta of a layer."""
    half: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
    q, k = (torch.randn(batch, seq, KEY_HEADS, CHANNELS, **half) for _ in "qk")
    v = torch.randn(batch, seq, VALUE_HEADS, CHANNELS, **half)
    gates = torch.randn(batch, seq, VALUE_HEADS, device="cuda")
    # Some heads forget at once, others almost nothing.
    g = -torch.exp(2 * gates - 2)
    beta = torch.rand(batch, seq, VALUE_HEADS, device="cuda")
    return [q, k, v, g, beta]


@contextmanager
def chosen(package: str) -> Iterator[None]:
    """Have one package compute whole rows, however few."""
    least = 1 if package == "FlashQLA" else 2**31
    with mock.patch.object(flash_qla, "LEAST_PROGRAMS", least):
        if package == "FlashQLA" and flash_qla._functions() is None:
            raise click.ClickException(
                "FlashQLA cannot run here: install flash-qla on a Hopper GPU"
            )
        yield


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph of the call, and what the call returned while it was captured."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        result = call()
    return graph, result


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the median time of the graph."""
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    main()
