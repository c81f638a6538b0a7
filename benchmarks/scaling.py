"""Tokens/s on several GPUs against one, under FSDP2 (or DDP), and an estimate for more GPUs.

    torchrun --nproc-per-node 2 benchmarks/scaling.py run --preset gated-1b --batch-size 8 --seq-len 2048
    torchrun --nproc-per-node 4 benchmarks/scaling.py run --preset llama-3.1-8b --batch-size 1 --seq-len 8192
    python benchmarks/scaling.py estimate

`run` first times single GPUs (the same program in a group of one, on every process at once, so that all GPUs are as
warm as in the second part; skipped with --no-alone where a model does not fit), then all of them together, and adds a
row to results/scaling_h200.json on GPUs. A step is forward, backward and the optimizer, on random tokens. `estimate`
computes the tables in docs/results/scaling.md from figures in results/; it measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from te_models.config.presets import get_preset
from te_models.config.training import TrainConfig
from te_models.inspect.environment import environment
from te_models.inspect.roofline import model_flops
from te_models.model.gathered_tokens import MOST_RANKS
from te_models.training.launch import meshes, parallel
from te_models.training.parallel import Parallel
from te_models.training.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "scaling_h200.json"


class RandomTokens:
    """Batches of random tokens, since the speed of data is not measured."""

    def __init__(self, vocabulary: int, batch: int, length: int) -> None:
        ids = torch.randint(0, vocabulary, (batch, length))
        self.batch = {"input_ids": ids, "labels": ids}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        return self.batch


def step_seconds(
    shared: Parallel, args: argparse.Namespace, shape: dict[str, int], amax_group: Any = None
) -> dict[str, float]:
    """The median seconds of a training step, and the peak memory of this process in GiB."""
    sizes = dict(seq_len=args.seq_len, gradient_accumulation=args.accumulation)
    sizes |= dict(cache_fp8_weights=args.cache, cuda_graph=args.graph)
    config = replace(shared.config, batch_size=args.batch_size * shared.data_world, **sizes)
    shared = replace(shared, config=config)
    preset = get_preset(args.preset, **shape)
    recipe = dict(
        recipe=args.recipe,
        activation_checkpointing=args.activation_checkpointing,
        fp8_params=args.fp8_params,
    )
    if not args.edges and args.recipe != "bf16":
        recipe |= dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    model = shared.build(preset, device=shared.device or args.device, **recipe)
    model.amax_group = amax_group or model.amax_group
    model.te.FP8GlobalStateManager.reset()  # of the model before, which Transformer Engine would go on reducing for
    data: Any = RandomTokens(preset.vocab_size, args.batch_size, args.seq_len)
    run = Trainer(model, data, [], config, Path("unused"), parallel=shared)
    cuda = model.device.type == "cuda"
    torch.cuda.reset_peak_memory_stats() if cuda else None
    times = []
    for row in islice(run.steps(data), args.warm_up + args.steps):
        times.append(config.tokens_per_step / row["tokens_per_second"])
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    found = {
        "seconds": statistics.median(times[args.warm_up :]),
        "peak_gib": round(peak, 2),
        "loss": row["loss"],
    }
    found |= {"graph": run.passes.graph is not None}
    # Nothing of a model alone may take the memory of the one that follows.
    run.passes.close()
    del run, model
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return found


def run(args: argparse.Namespace) -> None:
    """Time one process alone and all together, under each recipe in each way, and report."""
    args.fields = shape = {
        name: json.loads(value) for name, _, value in (item.partition("=") for item in args.shape)
    }
    fields = dict(
        reshard_after_forward=args.reshard,
        prefetch_blocks=args.prefetch,
        reduce_dtype=args.reduce_dtype,
    )
    kinds = args.parallel.split(",")
    recipes = args.recipe.split(",")
    config = TrainConfig(
        parallel=kinds[0],
        collective_timeout=600,
        eval_every=0,
        save_every=0,
        steps=10**6,
        **fields,
    )
    with parallel(config, args.device) as everyone:
        own, _ = dist.new_subgroups(group_size=1)
        for args.recipe in recipes:
            alone = None
            if args.alone:
                alone = step_seconds(Parallel(device=everyone.device), args, shape, own)
                if everyone.ranks.first:
                    print(json.dumps({"alone": alone, "recipe": args.recipe}), flush=True)
            for args.parallel in kinds:
                shared = divided(everyone, args.parallel)
                shared.ranks.gather(None)  # all of them begin at once
                together = step_seconds(shared, args, shape)
                slowest = max(shared.ranks.gather(together["seconds"]))
                if shared.ranks.first:
                    report(args, shared, alone, {**together, "seconds": slowest})


def divided(everyone: Parallel, kind: str) -> Parallel:
    """Return the same processes, divided for another kind of run."""
    if kind == everyone.kind:
        return everyone
    assert everyone.device is not None
    config = replace(everyone.config, parallel=kind)
    dimensions = dict(ep=None, replicas=None) | meshes(config, everyone.device)
    return replace(everyone, kind=kind, config=config, **dimensions)


def report(
    args: argparse.Namespace, shared: Parallel, alone: Any, together: dict[str, float]
) -> None:
    """Print the row and, on GPUs, add it to the results."""
    tokens = args.batch_size * args.seq_len * args.accumulation
    row: dict[str, Any] = {
        name: value
        for name, value in vars(args).items()
        if name not in ("command", "function", "fields", "out")
    }
    row |= {
        "processes": shared.ranks.world,
        "tokens_per_second_each": round(tokens / together["seconds"]),
    }
    row |= {
        "ms_a_step": round(1e3 * together["seconds"], 2),
        **{k: together[k] for k in ("peak_gib", "loss", "graph")},
    }
    flops = (
        model_flops(get_preset(args.preset, **args.fields), args.batch_size, args.seq_len)
        * args.accumulation
    )
    row["model_tflops_each"] = round(flops / together["seconds"] / 1e12, 1)
    if alone is not None:
        row["tokens_per_second_alone"] = round(tokens / alone["seconds"])
        row["kept"] = round(alone["seconds"] / together["seconds"], 4)
    print(json.dumps(row), flush=True)
    if shared.device is not None and shared.device.type == "cuda":
        before = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
        args.out.write_text(
            json.dumps({"environment": environment(), "rows": [*before, row]}, indent=2) + "\n"
        )


def load(name: str) -> Any:
    """Return the JSON file of this name in results/."""
    return json.loads((RESULTS.parent / f"{name}.json").read_text())


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of the estimate. Bandwidths in bytes per second that one GPU sends and receives."""

    compute: float  # measured: s, gated-1b forward and backward, 8 x 2048 tokens
    contention: float  # measured: s more on two GPUs, where all sending could hide: copies, and SMs that NCCL takes
    parameters: float = 1.243e9  # gated-1b
    # BF16 weights (1: FP8), gathered for forward and again for backward of every micro-batch.
    gather_bytes: int = 2
    reduce_bytes: int = 4  # FP32 gradients, summed once per step
    node: int = 8
    inside: float = 360e9  # assumed: NVLink, 80 % of an H200's 450 GB/s a direction (data sheet)
    # Assumed: InfiniBand, 80 % of the 50 GB/s a direction of a 400 Gb/s card a GPU.
    between: float = 40e9
    hop: float = 5e-6  # assumed: s for one step of a ring between nodes
    collectives: int = 21  # 20 blocks and the rest, each gathered twice and reduced once

    @classmethod
    def measured(cls, **assumed: Any) -> Self:
        """Return them with the newest figures under DelayedScaling, of results/step_h200.json and scaling_h200.json."""
        run = [
            run for run in load("step_h200")["runs"] if run["settings"].get("preset") == "gated-1b"
        ][-1]
        ms = next(row["ms"] for row in run["rows"] if row["name"] == "te-models delayed+graph")
        row = next(
            r for r in load("scaling_h200")["rows"] if r["preset"] == "gated-1b" and r.get("alone")
        )
        alone = row["batch_size"] * row["seq_len"] / row["tokens_per_second_alone"]
        return cls(ms / 1e3, row["ms_a_step"] / 1e3 - alone, **assumed)


def estimate(gpus: int, micro_batches: int, a: Assumptions) -> dict[str, float]:
    """Return seconds per step and speed relative to one GPU, with communication fully overlapped and not at all.

    A ring over N moves (N - 1) / N of the bytes through each GPU at the bandwidth of its slowest link, in N - 1 hops of
    which those between nodes count.
    """
    share, nodes = (gpus - 1) / gpus, -(-gpus // a.node)
    volume = a.parameters * share * (2 * a.gather_bytes * micro_batches + a.reduce_bytes)
    hops = a.collectives * (2 * micro_batches + 1) * (nodes - 1) * a.hop
    sending = volume / (a.inside if nodes == 1 else a.between) + hops
    alone = a.compute * micro_batches
    compute = alone + a.contention * micro_batches
    return {
        "sending": sending,
        "best": alone / max(compute, sending),
        "worst": alone / (compute + sending),
    }


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of the width of Qwen3-30B-A3B, of whose experts all get as many tokens."""

    compute: float  # measured: s, forward and backward
    tokens: int = 4 * 4096
    chosen: int = 8
    hidden: int = 2048
    experts: int = 128
    width: int = 768

    @classmethod
    def measured(cls) -> Self:
        """Return it with a quarter of the time of four layers in BF16, of results/kinds_h100.json."""
        rows = {row["name"]: row.get("ms") for row in load("kinds_h100")["rows"]}
        return cls(rows["a3b-layers 4x4096 bf16"] / 4e3)


def estimate_experts(
    gpus: int, size: int, node: int, a: Assumptions, layer: ExpertLayer
) -> dict[str, float]:
    """Return the seconds that a layer's experts' weights and rows travel, and the speed relative to one GPU.

    Each of `gpus` has its own tokens, `size` of them share the experts, and `node` are connected by NVLink. FSDP2
    gathers an expert's weights twice and reduces its gradients, over the GPUs that have it. Forward and backward, rows
    go to the experts and back in BF16: one per token and expert, or all tokens and their sums where few GPUs share
    experts.
    """
    weights = layer.experts * 3 * layer.hidden * layer.width / size * (1 - size / gpus)
    weights *= (2 * a.gather_bytes + a.reduce_bytes) / (a.inside if gpus <= node else a.between)
    near = min(size, node)
    # To each of the others: the rows of its experts, or all tokens.
    sent = 4 * 2 * layer.tokens * layer.hidden
    if size > MOST_RANKS:
        sent *= layer.chosen / size
    rows = sent * ((near - 1) / a.inside + (size - near) / a.between)
    sending = weights + rows
    best, worst = (
        layer.compute / max(layer.compute, sending),
        layer.compute / (layer.compute + sending),
    )
    return {"weights": weights, "rows": rows, "best": best, "worst": worst}


Table = tuple[str, list[list[str]]]  # the header, and the cells of each row


def dense_table(a: Assumptions) -> Table:
    """The estimate for whole models under FSDP2."""
    rows = []
    for micro_batches in (1, 8):
        for gpus in (2, 8, 64, 256, 512):
            row = estimate(gpus, micro_batches, a)
            sending = f"{1e3 * row['sending']:,.0f}"
            rows.append(
                [
                    str(gpus),
                    str(micro_batches),
                    sending,
                    f"{row['best']:.2f}",
                    f"{row['worst']:.2f}",
                ]
            )
    return (
        "GPUs | micro-batches per step | communication, ms | relative speed, all overlapped | none overlapped",
        rows,
    )


def experts_table(a: Assumptions, layer: ExpertLayer) -> Table:
    """The estimate for GPUs that share the experts of a layer."""
    rows = []
    for gpus, node, size in (
        (2, 8, 1), (2, 8, 2), (4, 8, 1), (4, 8, 4), (8, 8, 1), (8, 8, 4), (8, 8, 8),
        (64, 8, 1), (64, 8, 8), (64, 8, 64), (512, 8, 1), (512, 8, 8), (512, 8, 64),
        (64, 64, 64), (512, 64, 64),
    ):  # fmt: skip
        row = estimate_experts(gpus, size, node, a, layer)
        times = [f"{1e3 * row[name]:.1f}" for name in ("weights", "rows")]
        rows.append(
            [str(gpus), str(node), str(size), *times, f"{row['best']:.2f}", f"{row['worst']:.2f}"]
        )
    header = "GPUs | per NVLink domain | per set of experts | weights, ms | rows, ms | relative speed, all overlapped"
    return f"{header} | none overlapped", rows


def print_estimate(args: argparse.Namespace) -> None:
    """Print the estimates; make_tables.py writes them to docs/results/scaling.md."""
    a = Assumptions.measured(gather_bytes=1 if args.fp8_params else 2)
    for header, rows in (dense_table(a), experts_table(a, ExpertLayer.measured())):
        print(f"| {header} |", "|---" * (header.count("|") + 1) + "|", sep="\n")
        print(*(f"| {' | '.join(cells)} |" for cells in rows), sep="\n", end="\n\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    paper = commands.add_parser("estimate")
    paper.set_defaults(function=print_estimate)
    paper.add_argument(
        "--fp8-params", action="store_true", help="weights gathered in FP8, one byte per parameter"
    )
    one = commands.add_parser("run")
    one.set_defaults(function=run)
    one.add_argument("--preset", default="gated-1b")
    one.add_argument(
        "--shape",
        nargs="*",
        default=[],
        metavar="FIELD=JSON",
        help="fields of the config to change",
    )
    one.add_argument("--recipe", default="delayed", help="several by commas, one after the other")
    one.add_argument(
        "--fp8-params",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="gather weights in FP8",
    )
    one.add_argument("--parallel", default="fsdp", help="ddp, fsdp, fsdp+ep; several by commas")
    one.add_argument("--out", type=Path, default=RESULTS)
    one.add_argument("--batch-size", type=int, default=8, help="sequences of each process")
    one.add_argument("--seq-len", type=int, default=2048)
    one.add_argument("--accumulation", type=int, default=1, help="batches of each process per step")
    one.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="capture forward and backward",
    )
    one.add_argument("--activation-checkpointing", default="none")
    one.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=True)
    one.add_argument("--prefetch", type=int, default=1)
    one.add_argument("--reduce-dtype", default="float32")
    one.add_argument(
        "--cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep FP8 weights between micro-batches",
    )
    one.add_argument(
        "--edges",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="first and last layer in BF16",
    )
    one.add_argument("--alone", action=argparse.BooleanOptionalAction, default=True)
    one.add_argument("--warm-up", type=int, default=5)
    one.add_argument("--steps", type=int, default=12)
    one.add_argument("--device", default=None if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    os.environ.setdefault("WORLD_SIZE", "0")
    args.function(args)


if __name__ == "__main__":
    main()
