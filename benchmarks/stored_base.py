"""Tune a release whose quantized weights stay as they are stored, beside the same base in BF16 and in FP8.

    python benchmarks/stored_base.py loss                            # two small models, 200 steps, on a CPU
    python benchmarks/stored_base.py loss --device cuda --recipe current
    python benchmarks/stored_base.py plan                            # the peaks of large shapes on 80 GB
    python benchmarks/stored_base.py speed --out benchmarks/results/stored_base_h100.json     # on one GPU

`loss` prints the largest difference between the losses of both bases over all steps. `speed` has random weights: of
gpt-oss-120b's and Qwen3.6-35B-A3B's shapes as many layers as fit in the form in question, with the number stated, or
`--layers`, of which a base that does not fit says so; a step is forward, backward and the update of adapters on
attention and on every expert, with full recomputation. Results are written after every row and every 50 steps.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import click
import torch
from torch import Tensor, nn

from te_models import CausalLM, ModelConfig, get_preset, get_recipe
from te_models.files.atomic import first_line
from te_models.fp8.primary_weights import is_quantized, plain, write_weight
from te_models.inspect.environment import environment, require_gpu
from te_models.numerics.stored import StoredRows, StoredWeight
from te_models.optim import build_optimizer
from te_models.planning.memory_plan import plan_memory
from te_models.planning.stored_base import StoredBase
from te_models.training.lora_run import LoraRun
from te_models.training.settings import LoraSettings

TARGETS = ("all-linear", "experts")
# Bases of `speed`, and the recipes of their products.
BASES = (
    ("stored", "bf16"),
    ("stored", "current"),
    ("bf16", "bf16"),
    ("bf16", "current"),
    ("fp8", "current"),
)
# Name -> the form in which its release is stored.
LARGE = {"gpt-oss-120b": "mxfp4", "qwen3.6-35b-a3b": "nvfp4"}
SMALL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt-oss": ("gpt-oss-120b", "mxfp4", dict(
        hidden_size=128, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, sliding_window=16, max_position_embeddings=256,
        moe=dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
    )),
    "qwen moe": ("gated-moe-nano", "nvfp4", dict(
        hidden_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4,
        moe=dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
    )),
}  # fmt: skip


def small_shape(name: str) -> tuple[ModelConfig, str]:
    """Return the config of a small model and the form of its release."""
    preset, form, fields = SMALL[name]
    moe = get_preset(preset).to_dict()["moe"] | fields["moe"]
    return get_preset(preset, vocab_size=256, **{**fields, "moe": moe}), form


def random_rows(base: StoredBase, outputs: int, inputs: int, device: str) -> StoredRows:
    """Return rows of random bits, whose values have the magnitude of a model's weights."""
    rows = base.form.rows(outputs, inputs).mapped(
        lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    )
    data = rows.data.random_(0, 256) if rows.packed else rows.data.random_(0, 0x38)
    if rows.scales.dtype == torch.uint8:
        rows.scales.random_(119, 121)
    elif rows.scales.dtype == torch.float8_e4m3fn:
        rows.scales.view(torch.uint8).random_(0x38, 0x40)
    else:
        rows.scales.uniform_(0.02, 0.04)
    if rows.factors is not None:
        rows.factors.fill_(0.005)
    if rows.scale_rows is not None:
        rows.scale_rows.copy_(torch.arange(outputs, device=device) // base.form.height)
    assert data is rows.data
    return rows


@torch.no_grad()
def stored_model(config: ModelConfig, form: str, device: str, **options: Any) -> CausalLM:
    """Return a model with random weights, of which those of a release in `form` stay so."""
    base = StoredBase.of(config, form)
    options = {"device": device, **options}
    model = CausalLM(config, stored_linears=base.linears, initialize=False, **options)
    torch.manual_seed(1)
    for name in sorted(base.linears):
        spec = config.linears[name]
        for weight in spec.weights:
            rows = random_rows(base, spec.outputs, spec.inputs, device)
            made = StoredWeight(rows, model.dtype)
            parameter = nn.Parameter(made, requires_grad=False)
            model.get_submodule(name).register_parameter(weight, parameter)
    fill(model)
    return model


@torch.no_grad()
def fill(model: CausalLM) -> None:
    """Give every parameter that has no form of its own random values, in an order that all models share."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, StoredWeight):
            continue
        if parameter.dim() > 1 and is_quantized(parameter):
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            write_weight(parameter, values.normal_(0, 0.02), for_master=False)
        elif parameter.dim() > 1:
            parameter.normal_(0, 0.02)
        elif "norm" in name and not model.config.zero_centered_norm:
            parameter.fill_(1.0)
        else:
            parameter.zero_()


@torch.no_grad()
def dequantized(stored: CausalLM, **options: Any) -> CausalLM:
    """Return the same model with the values of its weights."""
    model = CausalLM(stored.config, initialize=False, **options)
    for name, parameter in model.named_parameters():
        parameter.copy_(plain(stored.get_parameter(name)))
    return model


def text(length: int) -> Tensor:
    """Return bytes of Python's standard library as token ids."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    content = bytearray()
    for path in sorted(folder.glob("*.py")):
        content += path.read_bytes()
        if len(content) >= length:
            break
    return torch.tensor(list(content[:length]))


def train(
    model: CausalLM, batches: list[Tensor], rank: int = 8, optimizer: str = "adamw"
) -> Iterator[float]:
    """Train adapters on attention and on every expert; yield the loss of each step."""
    torch.manual_seed(3)
    LoraRun(model, LoraSettings(rank=rank, alpha=2.0 * rank, targets=TARGETS))
    update = build_optimizer(optimizer, model, 2e-3, 0.0)
    model.train()
    for number, ids in enumerate(batches):
        ids = ids.to(model.device)
        if number == 0:
            model.calibrate({"input_ids": ids, "labels": ids})
        loss = model(ids, labels=ids, return_logits=False).loss
        assert loss is not None
        loss.backward()
        update.step()
        model.zero_grad()
        yield loss.item()


@click.group()
def main() -> None:
    """Measure bases that stay as they are stored."""


@main.command()
@click.option("--steps", default=200)
@click.option("--device", default="cpu")
@click.option("--recipe", default="bf16")
@click.option("--shapes", default=",".join(SMALL), show_default=True)
@click.option("--out", default=None)
def loss(steps: int, device: str, recipe: str, shapes: str, out: str | None) -> None:
    """Compare the losses of the stored and of the dequantized base."""
    found: dict[str, Any] = {}
    begun = time.perf_counter()
    document: dict[str, Any] = dict(
        environment=environment(), recipe=recipe, steps=steps, rows=found
    )
    for name in shapes.split(","):
        config, form = small_shape(name)
        tokens = text(steps * 2 * 64).view(steps, 2, 64)
        # Compiling four small models would take longer than their steps.
        options: dict[str, Any] = dict(recipe=recipe, device=device, compile=False)
        if recipe != "bf16":
            options |= dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
        stored = stored_model(config, form, **options)
        other = dequantized(stored, **options)
        losses: dict[str, list[float]] = {}
        for base, model in (("stored", stored), ("dequantized", other)):
            losses[base] = []
            for step, value in enumerate(train(model, list(tokens)), 1):
                losses[base].append(value)
                if step % 50 == 0:
                    found[name] = compared(losses, form)
                    write(out, document)
                    seconds = time.perf_counter() - begun
                    click.echo(f"{name}, {base}: {step} steps, loss {value:.4f}, {seconds:.0f} s")
        row = found[name] = compared(losses, form)
        write(out, document)
        click.echo(
            f"{name} ({form}, {recipe}): loss {row['first']:.4f} to {row['last']:.4f}; the dequantized base differs by "
            f"at most {100 * row['worst_difference']:.4f} %, and has the same bits in {row['equal_steps']} of {steps} "
            "steps"
        )
    if not all(
        math.isfinite(row["last"]) and row["worst_difference"] <= 1e-3 for row in found.values()
    ):
        raise SystemExit("losses differ by more than 0.1 %")


def compared(losses: dict[str, list[float]], form: str) -> dict[str, Any]:
    """Return how far the losses of both bases are apart in the steps that both have."""
    stored = losses["stored"]
    pairs = list(zip(stored, losses.get("dequantized", []), strict=False))
    return dict(
        form=form,
        first=stored[0],
        last=stored[-1],
        worst_difference=max((abs(a / b - 1) for a, b in pairs), default=0.0),
        equal_steps=sum(a == b for a, b in pairs),
        compared_steps=len(pairs),
    )


@main.command()
@click.option("--rank", default=8)
@click.option("--tokens", default=4096)
def plan(rank: int, tokens: int) -> None:
    """Print the planned peaks of the large shapes."""
    for name, form in LARGE.items():
        config = get_preset(name)
        for recipe in ("bf16", "current"):
            for mode in ("none", "full"):
                made = plan_memory(
                    config, get_recipe(recipe), base_weights=form, lora_rank=rank, lora_experts=True,
                    batch_size=1, seq_len=tokens, optimizer="adamw8bit", activation_checkpointing=mode,
                )  # fmt: skip
                fits = "fits" if made.fits(80) else "does not fit"
                click.echo(
                    f"{name} in {form}, {recipe}, recomputation {mode}: {made.peak.total / 2**30:.1f} GiB, "
                    f"{fits} on 80 GB"
                )


@main.command()
@click.option("--tokens", default=4096)
@click.option("--rank", default=8)
@click.option("--steps", default=6)
@click.option("--layers", default=None, type=int, help="Of each shape; default: what fits.")
@click.option("--shapes", default=",".join(LARGE), show_default=True)
@click.option(
    "--bases",
    default=",".join(f"{base}:{recipe}" for base, recipe in BASES),
    show_default=True,
    help="Base and recipe of its products.",
)
@click.option("--seconds", default=600.0, show_default=True, help="No row starts after this time.")
@click.option("--out", default=None)
def speed(
    tokens: int, rank: int, steps: int, layers: int | None, shapes: str, bases: str, seconds: float, out: str | None
) -> None:  # fmt: skip
    """Measure tokens/s and peaks of stored, BF16 and FP8 bases."""
    require_gpu()
    begun = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for name in shapes.split(","):
        for pair in bases.split(","):
            base, _, recipe = pair.partition(":")
            row: dict[str, Any] = dict(shape=name, form=LARGE[name], base=base, recipe=recipe)
            if time.perf_counter() - begun > seconds:
                row |= dict(error="no time was left")
            else:
                try:
                    row |= measure(name, LARGE[name], base, recipe, tokens, rank, steps, layers)
                except torch.OutOfMemoryError as error:
                    row |= dict(error=f"out of memory: {first_line(error)}")
                # The model has circles of references, and its memory is what the next row needs.
                gc.collect()
                torch.cuda.empty_cache()
                row["row_seconds"] = round(time.perf_counter() - begun, 1)
            rows.append(row)
            click.echo(json.dumps(row))
            # After each row: the large shapes take long.
            write(out, dict(environment=environment(), rows=rows))


def measure(
    name: str, form: str, base: str, recipe: str, tokens: int, rank: int, steps: int, layers: int | None
) -> dict[str, Any]:  # fmt: skip
    """Return tokens/s, the peak and the planned one of a base with `layers` layers, or with as many as fit."""
    free = 0.93 * torch.cuda.mem_get_info()[0]
    whole = get_preset(name).num_hidden_layers
    count = layers or whole
    planned: dict[str, Any] = dict(
        lora_rank=rank, lora_experts=True, batch_size=1, seq_len=tokens, optimizer="adamw8bit",
        activation_checkpointing="full",
    )  # fmt: skip
    planned |= dict(fp8_params=base == "fp8", base_weights=form if base == "stored" else None)
    while True:
        config = get_preset(name, num_hidden_layers=count)
        expected = plan_memory(config, get_recipe(recipe), **planned).peak.total
        if expected < free or layers or count <= 4:
            break
        count -= 4
    sizes = dict(layers=count, of_layers=whole, planned_gib=round(expected / 2**30, 2))
    if expected >= free:
        return sizes | dict(error=f"does not fit in the {free / 2**30:.1f} GiB that are free")
    options: dict[str, Any] = dict(recipe=recipe, activation_checkpointing="full")
    if base == "stored":
        model = stored_model(config, form, "cuda", **options)
    else:
        model = CausalLM(
            config, device="cuda", fp8_params=base == "fp8", initialize=False, **options
        )
        fill(model)
    LoraRun(model, LoraSettings(rank=rank, alpha=16.0, targets=TARGETS))
    update = build_optimizer("adamw8bit", model, 1e-4, 0.0)
    model.train()
    times = []
    for step in range(steps):
        ids = torch.randint(0, config.vocab_size, (1, tokens), device="cuda")
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        found = model(ids, labels=ids, return_logits=False).loss
        assert found is not None
        found.backward()
        update.step()
        model.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return sizes | dict(
        tokens=tokens, rank=rank, tokens_per_s=round(tokens / statistics.median(times[2:]), 1),
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2), loss=round(found.item(), 4),
    )  # fmt: skip


def write(out: str | None, content: dict[str, Any]) -> None:
    """Write a result as JSON."""
    if out is not None:
        Path(out).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
