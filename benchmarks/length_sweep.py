"""Do all lengths give the same losses and gradients, as a CUDA graph, eagerly and with plain kernels?

    python benchmarks/length_sweep.py --out benchmarks/results/length_sweep_h200.json               # every length,
    4 minutes
    python benchmarks/length_sweep.py --lengths 127,128,129 --batches 3 --heads 64 --processes 2    # a few
    python benchmarks/length_sweep.py --device cpu --lengths 1,16,33 --batches 1 --heads 64 --processes 1

Each case is a two-layer model with a small vocabulary at one length, batch size and head size, with as many key heads
as query heads or half as many. Its weights do not change, so that ways to compute the same step can be compared:

* the CUDA graph of the step (its first replay included) with the eager step, five batches one after the other;
* the eager step with one of plain kernels and FlashAttention, three batches.

compile=False, since that would compile for each shape; lengths in COMPILED also run with the default, compile=True.
Cases run in separate processes. One that ends a process (an illegal memory access, say) is reported as having died,
and the next one gets a new process. Exits with 1 if anything differs by more than the tolerances below, or died.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from te_models import CausalLM
from te_models.fp8.scaling_state import fp8_state
from te_models.inspect.environment import environment
from te_models.kernels import sdpa
from te_models.training.cuda_graph import WARM_UP, GraphedStep

LENGTHS = (*range(1, 301), 333, 500, 511, 1000, 1001, 2047, 4095)
COMPILED = (1, 2, 16, 17, 64, 100, 127, 128, 129, 192, 255, 256, 257, 300, 333, 511, 1001)
SHAPE: dict[str, Any] = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                             max_position_embeddings=4096)  # fmt: skip
EDGES = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
CALLS, PLAIN_CALLS = WARM_UP + 2, 3  # a capture, and one replay of it with another batch
# A graph runs the eager step's own kernels: what is left is the order in which cuDNN's backward adds (LOSS and GRADIENT
# are relative, a gradient's by its norm). Plain kernels round to BF16 elsewhere, and a sum that falls on the other side
# of a rounding changes an FP8 value by up to 1/8.
GRAPH = dict(loss=1e-5, gradient=2e-2)
PLAIN = dict(loss=5e-3, gradient=0.25)
SECONDS = 120  # for a case, the first one of a process (imports, compilers) included

Case = dict[str, Any]


def cases(lengths: list[int], batches: list[int], heads: list[int], compile: bool) -> list[Case]:
    """Every combination; those that share a model come one after the other."""
    return [
        dict(head_dim=size, grouped=grouped, batch=batch, length=length, compile=compile)
        for size in heads
        for grouped in (False, True)
        for batch in batches
        for length in lengths
    ]


class Bench:
    """The model of the newest case, kept for those that differ in batch and length alone."""

    def __init__(self, device: str, recipe: str) -> None:
        self.device, self.recipe, self.key = device, recipe, None
        self.models: list[CausalLM] = []

    def prepare(self, case: Case) -> None:
        """Build the fast and the plain model, with the same weights."""
        key: Any = (case["head_dim"], case["grouped"], case["compile"])
        if self.key == key:
            return
        for model in self.models[:1]:
            model.te.FP8GlobalStateManager.reset()  # it would go on with the scales of models that are gone
        self.models.clear()
        heads = dict(head_dim=case["head_dim"], num_key_value_heads=2 if case["grouped"] else 4)
        edges = EDGES if self.recipe != "bf16" else {}
        for fused, compile in ((None, case["compile"]), (False, False)):
            torch.manual_seed(1)
            options = dict(
                fused=fused, compile=compile, device=self.device, recipe=self.recipe, **edges
            )
            self.models.append(
                CausalLM.from_preset("gated-nano", **SHAPE, **heads, **options).train()
            )
        self.key = key

    def compare(self, case: Case) -> dict[str, float]:
        """Return the distances of loss and gradients of the graph and the plain model from the eager step."""
        self.prepare(case)
        fast, plain = self.models
        found: dict[str, float] = {}
        eager = list(steps(fast, case, CALLS))
        if self.device != "cpu":
            graph = GraphedStep(fast, calibrate=False)
            found |= differences("graph", eager, list(steps(fast, case, CALLS, graph)), CALLS - 1)
            if graph.graph is None:
                raise RuntimeError("the step was not captured")
        order, sdpa.CUDA_ORDER = sdpa.CUDA_ORDER, sdpa.SMALL_ORDER
        try:
            found |= differences(
                "plain", eager, list(steps(plain, case, PLAIN_CALLS)), PLAIN_CALLS - 1
            )
        finally:
            sdpa.CUDA_ORDER = order
        return found


def steps(
    model: CausalLM, case: Case, count: int, graph: GraphedStep | None = None
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Loss and gradients of `count` batches, from fresh scales on; the weights stay."""
    for name, tensor in fp8_state(model).items():
        tensor.fill_(1.0 if name.endswith("scale") else 0.0)
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 256, (case["batch"], case["length"]), generator=generator).to(
            model.device
        )
        if graph is not None:
            loss = graph(input_ids=ids, labels=ids)
        else:
            model.zero_grad(set_to_none=True)
            loss = model(ids, labels=ids, return_logits=False).loss
            assert loss is not None
            loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)).float()
        last = (
            [gradient.clone() for gradient in gradients]
            if number in (PLAIN_CALLS - 1, CALLS - 1)
            else []
        )
        yield torch.cat([loss.detach().float().reshape(1), norms]), last
    model.zero_grad(set_to_none=True)


def differences(name: str, wanted: list[Any], found: list[Any], last: int) -> dict[str, float]:
    """The largest relative difference of the losses, and of the gradients of call number `last` in norm."""
    losses = torch.stack(
        [torch.stack([row[0][0] for row in rows]) for rows in (wanted[: len(found)], found)]
    ).tolist()
    pairs = list(zip(*losses, strict=True))
    loss = max(0.0 if a == b else abs(a - b) / max(abs(a), 1e-30) for a, b in pairs)
    whole = torch.stack([g.float().norm() for g in wanted[last][1]]).norm()
    gaps = [
        (a.float() - b.float()).norm() for a, b in zip(wanted[last][1], found[last][1], strict=True)
    ]
    sizes = [a.float().norm() for a in wanted[last][1]]
    # A gradient that is nothing but rounding errors (of a head's key, where it sees one key alone) is measured by all
    # of them.
    ratios = torch.stack(
        [gap / size.clamp(min=1e-3 * whole) for gap, size in zip(gaps, sizes, strict=True)]
    )
    gradient = (
        float(ratios.max().nan_to_num(math.inf, math.inf))
        if float(whole)
        else float(torch.stack(gaps).max())
    )
    finite = all(bool(row[0].isfinite().all()) for row in (*wanted, *found))
    return {
        f"{name}_loss": loss if finite else math.inf,
        f"{name}_gradient": gradient if finite else math.inf,
    }


def verdict(found: dict[str, float]) -> list[str]:
    """Return the differences that are out of tolerance."""
    limits = {
        f"{name}_{what}": limit
        for name, of in (("graph", GRAPH), ("plain", PLAIN))
        for what, limit in of.items()
    }
    return [
        f"{name} {value:.3g} > {limits[name]}"
        for name, value in found.items()
        if not value <= limits[name]
    ]


def work(device: str, recipe: str) -> None:
    """Run a worker process: one case per line on standard input, one result per line on standard output."""
    bench = Bench(device, recipe)
    torch.set_num_threads(1)
    for number, line in enumerate(sys.stdin):
        try:
            answer: dict[str, Any] = bench.compare(json.loads(line))
        except (
            Exception
        ) as error:  # what an error leaves of a CUDA context is of no use to the next case
            print(json.dumps(dict(error=f"{type(error).__name__}: {str(error)[:500]}")), flush=True)
            os._exit(3)
        print(json.dumps(answer), flush=True)
        if number == 0:
            gc.collect()
            gc.freeze()  # a capture collects garbage, and all that was imported is none


class Worker:
    """A process that cases are given to, one after the other; a new one follows where it dies."""

    def __init__(self, device: str, recipe: str) -> None:
        self.command = [sys.executable, __file__, "--work", "--device", device, "--recipe", recipe]
        self.job: subprocess.Popen[str] | None = None

    def ask(self, case: Case) -> dict[str, Any]:
        """The result of a case: differences, or what ended it."""
        if self.job is None:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            pipes: dict[str, Any] = dict(
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self.job = subprocess.Popen(self.command, text=True, env=env, **pipes)
        job = self.job
        assert job.stdin is not None and job.stdout is not None
        timer = threading.Timer(SECONDS, job.kill)
        timer.start()
        try:
            job.stdin.write(json.dumps(case) + "\n")
            job.stdin.flush()
            answer = job.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer.startswith("{"):
            found = json.loads(answer)
        else:
            found = dict(error=f"the process died with exit code {job.wait()}")
        if "error" in found:
            self.close()
        return found

    def close(self) -> None:
        """End the process."""
        if self.job is not None:
            self.job.kill()
            for pipe in (self.job.stdin, self.job.stdout):
                with contextlib.suppress(
                    OSError
                ):  # it may still hold what the process did not read
                    pipe.close()
            self.job.wait()
            self.job = None


def run(
    todo: list[Case], processes: int, device: str, recipe: str, limit: float = math.inf
) -> list[dict[str, Any]]:
    """All cases with their results, in order; after `limit` seconds none is begun."""
    size = max(1, min(40, -(-len(todo) // processes)))
    chunks: queue.SimpleQueue[range] = queue.SimpleQueue()
    for first in range(0, len(todo), size):
        chunks.put(range(first, min(first + size, len(todo))))
    results: list[dict[str, Any]] = [dict(case, skipped="no time was left") for case in todo]
    start = time.perf_counter()

    def serve() -> None:
        worker = Worker(device, recipe)
        while time.perf_counter() - start < limit:
            try:
                chunk = chunks.get_nowait()
            except queue.Empty:
                break
            for number in chunk:
                if time.perf_counter() - start < limit:
                    results[number] = todo[number] | worker.ask(todo[number])
        worker.close()

    threads = [threading.Thread(target=serve) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts, the largest differences, and every case that failed."""
    kinds: Counter[str] = Counter()
    bad = []
    largest: dict[str, tuple[float, Case]] = {}
    for row in rows:
        case = {name: row[name] for name in ("head_dim", "grouped", "batch", "length", "compile")}
        found = {name: value for name, value in row.items() if name not in case}
        kind = next((key for key in ("skipped", "error") if key in found), "")
        wrong = [found["error"]] if kind == "error" else [] if kind else verdict(found)
        kinds[kind or ("differs" if wrong else "same")] += 1
        bad += [case | dict(wrong=wrong)] if wrong else []
        for name, value in () if kind else found.items():
            largest[name] = max(
                largest.get(name, (-1.0, {})), (value, case), key=lambda pair: pair[0]
            )
    worst = {name: dict(value=value, case=case) for name, (value, case) in largest.items()}
    return dict(cases=len(rows), **kinds, largest=worst, bad=bad)


def numbers(text: str | None, default: tuple[int, ...]) -> list[int]:
    """A list of numbers given as 1,2,3."""
    return [int(word) for word in text.split(",")] if text else list(default)


@click.command()
@click.option("--lengths", help="Such as 127,128; default: 1 to 300 and seven longer ones.")
@click.option("--batches", help="Default: 1,3,8.")
@click.option("--heads", help="Sizes of a head; default: 64,96,128,256.")
@click.option("--recipe", default="delayed")
@click.option("--processes", default=14)
@click.option(
    "--seconds", default=math.inf, help="No case starts after this many; those left are counted."
)
@click.option("--device", default="cuda")
@click.option("--out", type=click.Path(path_type=Path))
@click.option("--work", "working", is_flag=True, hidden=True)
def main(lengths: str | None, batches: str | None, heads: str | None, recipe: str, processes: int, seconds: float,
         device: str, out: Path | None, working: bool) -> None:  # fmt: skip
    """Sweep, print and write."""
    if working:
        work(device, recipe)
        return
    start = time.perf_counter()
    sizes = numbers(heads, (64, 96, 128, 256))
    chosen = numbers(lengths, LENGTHS)
    todo = cases(
        [n for n in chosen if n in COMPILED],
        [3],
        [size for size in sizes if size in (64, 128)],
        True,
    )
    todo += cases(chosen, numbers(batches, (1, 3, 8)), sizes, False)
    rows = run(todo, processes, device, recipe, seconds)
    found = summary(rows) | dict(seconds=round(time.perf_counter() - start))
    settings = dict(
        shape=SHAPE, recipe=recipe, lengths=chosen, graph_tolerances=GRAPH, plain_tolerances=PLAIN
    )
    document = dict(
        environment=environment(), settings=settings, processes=processes, summary=found
    )
    print(json.dumps(found, indent=1)[:6000])
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(bool(found["bad"]) or bool(found.get("skipped")))


if __name__ == "__main__":
    main()
