"""Time whole training steps of the Trainer: forward, backward, gradient norm, optimizer and weight casts.

    python benchmarks/whole_step.py speed gated-896 delayed --batch-size 16 --seq-len 1024 --accumulation 1,8
    python benchmarks/whole_step.py profile gated-1b delayed --batch-size 8 --seq-len 2048
    python benchmarks/whole_step.py first gated-1b delayed --batch-size 8 --seq-len 2048
    torchrun --nproc-per-node 2 benchmarks/whole_step.py speed gated-1b delayed --accumulation 1,8 --parallel fsdp
    torchrun --nproc-per-node 2 benchmarks/whole_step.py parity gated-350m delayed --accumulation 3 --parallel ddp
    torchrun --nproc-per-node 4 benchmarks/whole_step.py speed gated-1b delayed --batch-size 1 --seq-len 131072 \
        --parallel fsdp --context-parallel-size 4 --accumulation 1-eager --warm-up 1 --rounds 2 --micro-batches 1 \
        --num-hidden-layers 16 --model-options '{"activation_checkpointing": "full"}'

`speed` trains one model per number of micro-batches in one process, in turns, and prints tokens per second. `profile`
lists the kernels of a step outside its CUDA graph, which are those of the gradient norm, the optimizer and the casts,
beside the bytes that an AdamW step has to move. `first` starts processes with empty and then with filled caches of
compiled kernels and prints the seconds until each of the first steps is done. `parity` compares losses, norms and
weights of steps with and without CUDA graphs.
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

START = time.perf_counter()

from te_models.garbage import collect_rarely  # noqa: E402

collect_rarely()  # as the command line does

import click  # noqa: E402
import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from typing_extensions import Self  # noqa: E402

from te_models.config.presets import get_preset  # noqa: E402
from te_models.config.training import TrainConfig  # noqa: E402
from te_models.device.determinism import deterministic  # noqa: E402
from te_models.distributed.dtensor import local  # noqa: E402
from te_models.inspect.environment import environment, require_gpu  # noqa: E402
from te_models.training.evaluation import evaluate  # noqa: E402
from te_models.training.launch import parallel  # noqa: E402
from te_models.training.parallel import Parallel  # noqa: E402
from te_models.training.trainer import Trainer  # noqa: E402

FIRST_STEPS = 6  # of `first`: the eager ones, the capture and a replay


class RandomTokens:
    """Batches of random tokens, since the speed of data is not measured."""

    def __init__(self, vocabulary: int, batch: int, length: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.batches = []
        for _ in range(4):
            ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
            self.batches.append({"input_ids": ids, "labels": ids})
        self.position = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        self.position += 1
        return self.batches[self.position % len(self.batches)]


def build(
    shared: Parallel, shape: dict[str, Any], accumulation: int, **options: Any
) -> tuple[Trainer, RandomTokens]:
    """Return a Trainer of a new model and its data."""
    torch.manual_seed(0)
    layers = shape["num_hidden_layers"]
    changes = {"num_hidden_layers": layers} if layers else {}
    config = get_preset(shape["preset"], **changes)
    if config.max_position_embeddings < shape["seq_len"]:
        changes["max_position_embeddings"] = shape["seq_len"]
        config = get_preset(shape["preset"], **changes)
    # Options of the model in JSON, such as '{"activation_checkpointing": "full"}'.
    more = json.loads(shape["model_options"])
    lora = more.pop("lora", None)
    model: Any = shared.build(
        config, device=shared.device or "cuda", recipe=shape["recipe"], **more
    )
    if lora is not None:
        model = import_module("te_models.training.lora").add_lora(model, **lora)
    data = RandomTokens(
        config.vocab_size, shape["batch_size"], shape["seq_len"], seed=shared.data_rank
    )
    chosen = replace(
        shared.config,
        batch_size=shape["batch_size"] * shared.data_world,
        seq_len=shape["seq_len"],
        gradient_accumulation=accumulation,
        **options,
    )
    return Trainer(model, data, None, chosen, Path("unused"), parallel=shared), data


@contextmanager
def joined(shape: dict[str, Any]) -> Iterator[Parallel]:
    """Join the processes that torchrun started, if it did."""
    config = TrainConfig(
        steps=100_000,
        eval_every=0,
        parallel=shape["parallel"],
        reshard_after_forward=shape["reshard"],
        reduce_dtype=shape["reduce_dtype"],
        context_parallel_size=shape["context_parallel_size"],
    )
    with parallel(config) as shared:
        yield shared


def shape_options(command: Any) -> Any:
    """Add the options that say what is trained, and by whom."""
    for option in (
        click.option("--model-options", default="{}", help="JSON; lora: options of add_lora"),
        click.option("--reduce-dtype", default="float32"),
        click.option("--reshard/--no-reshard", default=True),
        click.option("--parallel", default="none"),
        click.option("--context-parallel-size", default=0),
        click.option("--num-hidden-layers", type=int),
        click.option("--seq-len", default=2048),
        click.option("--batch-size", default=8),
        click.argument("recipe"),
        click.argument("preset"),
    ):
        command = option(command)
    return command


@click.group()
def main() -> None:
    """See the module."""
    require_gpu()


@main.command()
@shape_options
@click.option(
    "--accumulation", default="1,8", help="numbers of micro-batches, or 8-eager: no graph"
)
@click.option("--rounds", default=7)
@click.option("--micro-batches", default=16, help="forward passes per round and variant")
@click.option("--warm-up", default=7, help="steps that are not timed")
@click.option("--optimizer", default="adamw")
@click.option("--out", type=click.Path(path_type=Path))
def speed(
    accumulation: str,
    rounds: int,
    micro_batches: int,
    warm_up: int,
    optimizer: str,
    out: Path | None,
    **shape: Any,
) -> None:
    """Print tokens per second for each number of micro-batches per step."""
    with joined(shape) as shared:
        rows = _speed(
            shared, accumulation.split(","), rounds, micro_batches, warm_up, optimizer, shape
        )
        if out is not None and shared.ranks.first:
            settings = dict(shape, optimizer=optimizer, rounds=rounds)
            document = dict(environment=environment(), settings=settings, rows=rows)
            out.write_text(json.dumps(document, indent=1) + "\n")


def _speed(
    shared: Parallel,
    variants: list[str],
    rounds: int,
    micro_batches: int,
    warm_up: int,
    optimizer: str,
    shape: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return a row per number of micro-batches; all variants take turns."""
    say = print if shared.ranks.first else lambda *words, **options: None
    runs = {}
    for variant in variants:
        number, _, eager = variant.partition("-")
        count = int(number)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer, data = build(shared, shape, count, optimizer=optimizer, cuda_graph=not eager)
        steps = trainer.steps(trainer.passes.calibrated(data))
        for _ in range(warm_up):
            row = next(steps)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        say(
            f"{variant} per step: loss {row['loss']:.4f}, norm {row['grad_norm']:.4f}, {peak:.2f} GiB",
            flush=True,
        )
        runs[variant] = (count, trainer, steps, peak, [])
    tokens = shape["batch_size"] * shape["seq_len"] * shared.data_world
    for _ in range(rounds):
        for count, _, steps, _, seconds in runs.values():
            taken = max(1, micro_batches // count)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(taken):
                next(steps)
            torch.cuda.synchronize()
            own = (time.perf_counter() - start) / taken
            seconds.append(max(shared.ranks.gather(own)))
    rows = []
    first = None
    for variant, (count, trainer, _, peak, seconds) in runs.items():
        middle = statistics.median(seconds)
        first = first or middle / count
        graph = trainer.passes.graph is not None and trainer.passes.graph.captured
        rows.append(
            dict(
                accumulation=count,
                ms=1e3 * middle,
                tokens_per_second=count * tokens / middle,
                per_token=middle / count / first,
                peak_gib=peak,
                graph=graph,
            )
        )
        say(
            f"{variant:>7} per step: {1e3 * middle:8.2f} ms, {count * tokens / middle:10,.0f} tokens/s, "
            f"{middle / count / first:.3f}x the time per token, graph: {graph}"
        )
        trainer.passes.close()
    return rows


@main.command()
@shape_options
@click.option("--accumulation", default=3)
@click.option("--steps", default=8)
def parity(accumulation: int, steps: int, **shape: Any) -> None:
    """Compare losses, gradient norms and weights with those of eager steps, bit for bit."""
    with joined(shape) as shared, deterministic():
        results = []
        for graph in (False, True):
            trainer, data = build(shared, shape, accumulation, cuda_graph=graph)
            batches = trainer.passes.calibrated(data)
            rows = []
            for number in range(steps):
                row = trainer.step(batches)
                rows.append((row["loss"], row["grad_norm"]))
                if number == steps - 3:
                    evaluate(trainer.model, data.batches[:1], shared.sum)
            weights = [local(p.detach()).float() for p in trainer.model.parameters()]
            weights = [weight.double().cpu() for weight in weights]
            captured = trainer.passes.graph is not None and trainer.passes.graph.captured
            results.append((rows, weights, captured))
            trainer.passes.close()
            trainer.model.te.FP8GlobalStateManager.reset()
            del trainer
            gc.collect()
            torch.cuda.empty_cache()
        (rows, weights, _), (found, others, captured) = results
        different = sum(
            not torch.equal(one, other) for one, other in zip(weights, others, strict=True)
        )
        verdict = "equal" if rows == found and not different else "DIFFERENT"
        verdicts = shared.ranks.gather(f"{verdict}, graph: {captured}")
        if shared.ranks.first:
            print(
                f"{shape['preset']} {shape['recipe']} {shape['parallel']} x{accumulation}: {verdicts}"
            )
            if verdict != "equal":
                print(f"  {different} of {len(weights)} weights differ; {rows} {found}")


@main.command(name="profile")
@shape_options
@click.option("--accumulation", default=1)
@click.option("--optimizer", default="adamw")
@click.option("--steps", default=3)
@click.option("--top", default=30)
def profile_step(accumulation: int, optimizer: str, steps: int, top: int, **shape: Any) -> None:
    """Print the kernels of a step that run between a replay of the graph and the next."""
    with joined(shape) as shared:
        trainer, data = build(shared, shape, accumulation, optimizer=optimizer)
    run = trainer.steps(trainer.passes.calibrated(data))
    for _ in range(7):
        next(run)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        next(run)
    torch.cuda.synchronize()
    whole = (time.perf_counter() - start) * 100
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            next(run)
        torch.cuda.synchronize()
    # Kernels of a graph share the correlation of its launch.
    replays = {event.id for event in found.events() if event.name.startswith("cudaGraphLaunch")}
    inside = 0.0
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in found.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or "Optimizer" in event.name:
            continue  # or the span of an optimizer's step
        milliseconds = event.device_time / 1e3 / steps
        if event.id in replays:
            inside += milliseconds
            continue
        kernels[event.name][0] += milliseconds
        kernels[event.name][1] += 1
    outside = sum(value for value, _ in kernels.values())
    print(f"step {whole:.2f} ms; kernels inside graphs {inside:.2f} ms, outside {outside:.2f} ms")
    for label, (value, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[:top]:
        print(f"{value:8.3f} ms {count / steps:7.1f} x  {label[:150]}")
    _print_gaps(found.events(), steps)
    parameters = sum(p.numel() for p in trainer.optimizer.parameters)
    # Read: gradient BF16, master, two moments; written: master, two moments, the BF16 parameter.
    print(
        f"{parameters / 1e9:.3f} billion parameters, {28 * parameters / 2**30:.2f} GiB for AdamW at 28 bytes each"
    )
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    print(f"a copy moves {20 * 2**30 / begin.elapsed_time(end) / 1e9:.2f} TB/s, read and written")
    trainer.passes.close()


def _print_gaps(events: Any, steps: int) -> None:
    """Print how long the device waits in a step, and between which kernels it waits longest."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and "Optimizer" not in event.name
    )
    end, before, gaps = spans[0][1], spans[0][2], []
    for start, stop, name in spans:
        if start > end:
            gaps.append((start - end, before, name))
        if stop > end:
            end, before = stop, name
    short = sum(gap for gap, _, _ in gaps if gap < 10)
    idle = sum(gap for gap, _, _ in gaps)
    print(f"idle: {idle / 1e3 / steps:.2f} ms, in gaps below 10 us {short / 1e3 / steps:.2f} ms")
    for gap, before, after in sorted(gaps, reverse=True)[:8]:
        print(f"{gap:9.1f} us between {before[:60]} and {after[:60]}")


@main.command()
@shape_options
@click.option("--accumulation", default=1)
@click.option("--functions", default=0, help="lines of a profile of Python during the first step")
@click.option("--inside", is_flag=True, hidden=True, help="this process is the one that is timed")
def first(accumulation: int, functions: int, inside: bool, **shape: Any) -> None:
    """Print the seconds from the start of a process to the end of each of its first steps."""
    if inside:
        _first_steps(shape, accumulation, functions)
        return
    with tempfile.TemporaryDirectory() as caches:
        own = {
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TRITON_CACHE_DIR": f"{caches}/triton",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{caches}/flash_attention",
        }
        for state in ("cold", "warm"):
            print(f"--- {state} caches", flush=True)
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, *sys.argv, "--inside"], env={**os.environ, **own}, check=True
            )
            print(f"process: {time.perf_counter() - start:.1f} s", flush=True)


def _first_steps(shape: dict[str, Any], accumulation: int, functions: int) -> None:
    def say(what: str) -> None:
        torch.cuda.synchronize()
        print(f"{time.perf_counter() - START:7.2f} s  {what}", flush=True)

    print(f"{time.perf_counter() - START:7.2f} s  imported", flush=True)
    with joined(shape) as shared:
        trainer, data = build(shared, shape, accumulation)
    say("built")
    profiler = cProfile.Profile()
    if functions:
        profiler.enable()
    batches = trainer.passes.calibrated(data)
    say("calibrated")
    for number in range(1, FIRST_STEPS + 1):
        trainer.step(batches)
        profiler.disable()
        say(f"step {number}")
    if functions:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(functions)
    print(torch._dynamo.utils.compile_times(repr="str", aggregate=True))
    trainer.passes.close()


if __name__ == "__main__":
    main()
