"""Tune Qwen3.5-35B-A3B with adapters on attention and all experts, its frozen weights in FP8: tokens/s, peak, plan.

    python benchmarks/lora_experts.py --out benchmarks/results/lora_experts_h200.json   # on one GPU
    python benchmarks/lora_experts.py --tiny                                            # anywhere: does it work?

Random weights of the whole model; where its planned memory does not fit on the GPU, of as many layers as do, a multiple
of four, which the result states. A step is forward, backward and AdamW over FP32 masters of the adapters, on random
tokens, with full recomputation. Times are medians of steps, the peak is that of PyTorch's allocator from the first step
on.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
)  # 29 of 78 GiB lay unused without it

import click
import torch
from torch import Tensor

from te_models import CausalLM, ModelConfig, get_preset, get_recipe
from te_models.fp8.primary_weights import is_quantized, write_weight
from te_models.inspect.environment import environment
from te_models.optim import build_optimizer
from te_models.planning.memory_plan import MemoryPlan, plan_memory
from te_models.training.lora_run import LoraRun
from te_models.training.settings import LoraSettings

# Of transformers' Qwen3_5MoeTextConfig, whose defaults are this model's.
EXPERTS = dict(
    num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, norm_topk_prob=True
)
SHARED = dict(shared_expert_intermediate_size=512, shared_expert_gate=True)
PATTERN = ("linear_attention",) * 3 + ("full_attention",)
TINY = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)
LAYERS, WARM_UP, TIMED = 40, 2, 4
SPARE = 0.95  # of the free memory, which the plan may take


def shape_of(layers: int, tiny: bool) -> ModelConfig:
    """Return the config of the model with as many layers."""
    types = dict(num_hidden_layers=layers, layer_types=PATTERN * (layers // 4))
    if tiny:
        return get_preset("gated-hybrid-nano", **types, moe=dict(TINY, shared_expert_gate=True))
    linear = dict(num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128)
    size = dict(
        hidden_size=2048, num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=False
    )
    return get_preset("qwen3.5-2b", **size, **types, linear_attention=linear, moe=EXPERTS | SHARED)


@torch.no_grad()
def fill(model: CausalLM) -> None:
    """Give every parameter random values, without a copy in high precision of those in FP8."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not is_quantized(parameter):
            parameter.normal_(0, 0.02)
        elif parameter.dim() > 1:
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            write_weight(parameter, values.normal_(0, 0.02), for_master=False)
        else:  # decays of linear attention among them
            parameter.zero_() if name.endswith(
                "layernorm.weight"
            ) or "norm" in name else parameter.fill_(0.5)


@click.command()
@click.option(
    "--tiny", is_flag=True, help="A shrunken shape: a test of this program, not a measurement."
)
@click.option("--rank", default=16, show_default=True)
@click.option("--batch", default=4, show_default=True)
@click.option("--seq", default=4096, show_default=True)
@click.option("--recipe", default="current", show_default=True)
@click.option(
    "--experts/--attention", default=True, help="Adapt experts too, or only the other linears."
)
@click.option("--seconds", default=150.0, show_default=True, help="No step starts after this many.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file with the result.")
def main(
    tiny: bool,
    rank: int,
    batch: int,
    seq: int,
    recipe: str,
    experts: bool,
    seconds: float,
    out: Path | None,
) -> None:
    """Measure, and print the result."""
    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not tiny:
        raise click.UsageError("there is no CUDA device here: use --tiny to try the program")
    batch, seq = (1, 32) if tiny else (batch, seq)
    fp8 = get_recipe(recipe).quantized

    def planned(layers: int) -> MemoryPlan:
        return plan_memory(
            shape_of(layers, tiny), get_recipe(recipe), batch_size=batch, seq_len=seq, lora_rank=rank,
            lora_experts=experts, fp8_params=fp8, activation_checkpointing="full",
        )  # fmt: skip

    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 2**40
    fitting = [
        layers
        for layers in range(4 if tiny else LAYERS, 0, -4)
        if planned(layers).peak.total < SPARE * free
    ]
    if not fitting:
        raise click.UsageError(
            f"not even four layers fit into {free / 2**30:.0f} GiB: lower --batch or --rank"
        )
    plan, config = planned(fitting[0]), shape_of(fitting[0], tiny)
    click.echo(
        f"{fitting[0]} layers, {config.num_parameters:,} parameters, {plan.peak.total / 2**30:.1f} GiB planned"
    )

    torch.manual_seed(0)
    options: dict[str, Any] = dict(
        recipe=recipe, fp8_params=fp8, device=device, activation_checkpointing="full"
    )
    model = CausalLM(config, **options, initialize=False)
    fill(model)
    names = list(dict.fromkeys(linear.name for linear in config.linears.values() if linear.adapted))
    run = LoraRun(
        model, LoraSettings(rank=rank, alpha=2.0 * rank, targets=(*names, *["experts"] * experts))
    )
    optimizer = build_optimizer("adamw", model, 2e-4, 0.0)
    ids = torch.randint(0, config.vocab_size, (batch, seq), device=device)
    built = time.monotonic() - begun
    click.echo(f"built in {built:.0f} s")
    losses, times = measured(model.train(), optimizer, ids, begun + seconds)
    result = {
        "environment": environment(), "layers": config.num_hidden_layers, "whole": config.num_hidden_layers == LAYERS,
        "parameters": config.num_parameters, "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "adapters": "experts and all other linears" if experts else "all linears but experts", "rank": rank,
        "recipe": recipe, "fp8_params": fp8, "batch": batch, "seq": seq, "losses": losses, "seconds": times,
        "seconds_to_build": built, "tokens_per_second": batch * seq / statistics.median(times),
        "planned": plan.peak.total, "planned_moment": plan.peak.moment,
        "peak": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "targets": list(run.settings.targets),
    }  # fmt: skip
    click.echo(json.dumps(result, indent=1))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


def measured(
    model: CausalLM, optimizer: Any, ids: Tensor, end: float
) -> tuple[list[float], list[float]]:
    """Return the losses of all steps, and the seconds of those after the warm-up; none starts after `end`."""
    losses, times = [], []
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP + TIMED):
        if times and time.monotonic() > end:
            break
        start = time.perf_counter()
        loss = model(ids, labels=ids, return_logits=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        click.echo(f"step {len(times)}: {times[-1]:.2f} s, loss {losses[-1]:.4f}")
    return losses, times[WARM_UP:] or times


if __name__ == "__main__":
    main()
