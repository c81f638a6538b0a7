"""Tune the shape of Llama 3.1 70B with adapters on several GPUs, which divide its FP8 weights: tokens/s, peak, plan.

    torchrun --nproc-per-node 4 benchmarks/lora_sharded.py --out benchmarks/results/lora_70b_h200_x4.json
    torchrun --nproc-per-node 2 benchmarks/lora_sharded.py --tiny   # anywhere: does it work?

FSDP2 divides a model on the meta device, and each process fills its own rows with random FP8 values, so that no process
ever has a whole weight. A step is the one of `te-models finetune --lora 16 --fp8-params --parallel fsdp`: forward,
backward with full recomputation, and AdamW over FP32 masters of the adapters, on random tokens. The file is written
after each step. Times are medians of steps; the peak is the largest of the processes, by PyTorch's allocator, from the
first step on.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import click
import torch

from te_models import CausalLM, ModelConfig, get_preset, get_recipe
from te_models.config.training import TrainConfig
from te_models.distributed.dtensor import from_shard, local
from te_models.fp8.primary_weights import is_quantized, take_master
from te_models.inspect.environment import environment
from te_models.planning.memory_plan import MemoryPlan, plan_memory
from te_models.training.launch import parallel
from te_models.training.lora_run import LoraRun
from te_models.training.parallel import Parallel
from te_models.training.settings import LoraSettings
from te_models.training.trainer import Trainer

WARM_UP = 2  # steps that are not timed
TIMED = 6


def shape_of(layers: int, tiny: bool) -> ModelConfig:
    """Return the config of Llama 3.1 70B, with as many layers."""
    if tiny:
        sizes = dict(hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=256)
    else:
        sizes = dict(hidden_size=8192, intermediate_size=28672)
    heads = dict(num_attention_heads=64, num_key_value_heads=8)
    if tiny:
        heads = dict(num_attention_heads=4, num_key_value_heads=2)
    return get_preset("llama-3.1-8b", **sizes, **heads, num_hidden_layers=layers)


@torch.no_grad()
def fill(model: CausalLM) -> None:
    """Give this process's rows of every parameter random values."""
    for parameter in model.parameters():
        own = local(parameter)
        if parameter.dim() == 1:
            own.fill_(1.0)
        elif is_quantized(parameter):
            values = torch.empty(own.shape, dtype=parameter.dtype, device=own.device)
            take_master(parameter, from_shard(values.normal_(0, 0.02), parameter))
        else:
            own.normal_(0, 0.02)


def data_of(config: ModelConfig, shared: Parallel, batch: int, seq: int) -> Any:
    """Yield batches of random tokens, others in each process."""
    generator = torch.Generator().manual_seed(shared.data_rank)
    while True:
        ids = torch.randint(0, config.vocab_size, (batch, seq), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def built(
    config: ModelConfig, shared: Parallel, recipe: str, fp8: bool, rank: int
) -> tuple[CausalLM, LoraRun]:
    """Return the divided model with adapters on the linears of all blocks."""
    torch.manual_seed(shared.ranks.rank)
    model = shared.build(
        config,
        recipe=recipe,
        fp8_params=fp8,
        activation_checkpointing="full",
        initialize=False,
    )
    fill(model)
    # Adapters are whole on each process: all begin with the same.
    torch.manual_seed(0)
    return model, LoraRun(model, LoraSettings(rank=rank, alpha=2.0 * rank))


def planned(
    config: ModelConfig, recipe: str, fp8: bool, rank: int, batch: int, seq: int, gpus: int
) -> MemoryPlan:
    """Return the plan of one process's memory."""
    return plan_memory(
        config,
        get_recipe(recipe),
        batch_size=batch * gpus,
        seq_len=seq,
        lora_rank=rank,
        fp8_params=fp8,
        activation_checkpointing="full",
        gpus=gpus,
    )


@click.command()
@click.option("--tiny", is_flag=True, help="A small shape: a test of this program.")
@click.option("--layers", default=80, show_default=True)
@click.option("--rank", default=16, show_default=True)
@click.option("--batch", default=1, show_default=True, help="Sequences of each GPU.")
@click.option("--seq", default=4096, show_default=True)
@click.option("--recipe", default="current", show_default=True)
@click.option("--seconds", default=150.0, show_default=True, help="No step starts after this many.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file with the result.")
def main(
    tiny: bool,
    layers: int,
    rank: int,
    batch: int,
    seq: int,
    recipe: str,
    seconds: float,
    out: Path | None,
) -> None:
    """Measure, and write the result."""
    begun = time.monotonic()
    cuda = torch.cuda.is_available()
    if not cuda and not tiny:
        raise click.UsageError("there is no CUDA device here: use --tiny to try the program")
    if tiny:
        layers = min(layers, 3)
        seq = min(seq, 32)
    config = shape_of(layers, tiny)
    fp8 = get_recipe(recipe).quantized
    gpus = int(os.environ["WORLD_SIZE"])
    settings = TrainConfig(
        steps=1000,
        eval_every=0,
        warmup_steps=0,
        learning_rate=2e-4,
        parallel="fsdp",
        batch_size=batch * gpus,
        seq_len=seq,
        seed=0,
    )
    with parallel(settings, None if cuda else "cpu", frozen=True) as shared:
        first = shared.ranks.first
        plan = planned(config, recipe, fp8, rank, batch, seq, gpus)
        if first:
            gib = plan.peak.total / 2**30
            click.echo(
                f"{layers} layers, {config.num_parameters:,} parameters, {gib:.1f} GiB planned"
            )
        model, run = built(config, shared, recipe, fp8, rank)
        peak_of_building = torch.cuda.max_memory_allocated() if cuda else 0
        result: dict[str, Any] = {
            "environment": environment(),
            "layers": layers,
            "parameters": config.num_parameters,
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "rank": rank,
            "recipe": recipe,
            "fp8_params": fp8,
            "gpus": gpus,
            "batch": batch,
            "seq": seq,
            "planned": plan.peak.total,
            "planned_moment": plan.peak.moment,
            "seconds_to_build": time.monotonic() - begun,
            "peak_of_building": peak_of_building,
        }
        data = data_of(config, shared, batch, seq)
        trainer = Trainer(model, data, None, settings, Path("unused"), parallel=shared, saved=run)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        steps = trainer.steps(trainer.passes.calibrated(data))
        measure(result, steps, shared, begun + seconds, out if first else None)
        trainer.passes.close()


def measure(
    result: dict[str, Any], steps: Any, shared: Parallel, end: float, out: Path | None
) -> None:
    """Take steps until `end` and add what they took to the result, which goes to `out` after each."""
    rows: list[dict[str, Any]] = []
    times: list[float] = []
    for number in range(WARM_UP + TIMED):
        late = time.monotonic() > end
        if number and shared.ranks.from_first(lambda late=late: late):
            break
        begun = time.perf_counter()
        rows.append(next(steps))
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.synchronize()
        own = {"seconds": time.perf_counter() - begun}
        own["peak"] = torch.cuda.max_memory_allocated() if cuda else 0
        found = shared.ranks.gather(own)
        times.append(max(row["seconds"] for row in found))
        timed = times[WARM_UP:] or times
        tokens = result["batch"] * result["seq"] * result["gpus"]
        result |= {
            "losses": [row["loss"] for row in rows],
            "norms": [row["grad_norm"] for row in rows],
            "seconds": times,
            "tokens_per_second": tokens / statistics.median(timed),
            "peak": max(row["peak"] for row in found),
        }
        if shared.ranks.first:
            click.echo(
                f"step {len(times)}: {times[-1]:.2f} s, loss {rows[-1]['loss']:.4f}, "
                f"{result['tokens_per_second']:,.0f} tokens/s, {result['peak'] / 2**30:.1f} GiB"
            )
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
