"""Native against emulated on one GPU: the same seeded model and data, step by step, for every recipe the GPU runs.

    python benchmarks/engine_parity.py --out benchmarks/results/engine_parity_h200.json

Three comparisons per recipe. "free": both train by themselves from the same start, so rounding differences add up.
"lockstep": before each step the emulated model takes over weights, scales and histories of the native one, so that each
step is compared by itself. "twice": the native engine against itself, which shows how much of "free" comes from the
arithmetic itself. Attention runs in PyTorch's plain kernel, since the fast ones' gradients vary from run to run. Also
timed: forward and backward of one te.Linear, emulated, against BF16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import torch
from torch.nn.attention import SDPBackend

from te_models import CausalLM
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.documents import load_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.fp8.scaling_state import fp8_state, load_fp8_state
from te_models.kernels import sdpa
from te_models.optim import build_optimizer
from te_models.saving.load_model import load_weights
from te_models.saving.pretrained import weights

SHAPE = dict(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": dict(amax_history_len=64),
    "delayed_max": dict(amax_history_len=16, amax_compute_algo="max"),
    "current": {},
    "blockwise": {},
}


def pair(recipe: str, engines: tuple[str, str]) -> tuple[CausalLM, CausalLM]:
    """The same model on both engines."""
    models = []
    for engine in engines:
        torch.manual_seed(0)
        name = recipe.removesuffix("_max")
        # Not fused: that the native engine hands FP8 from module to module spares a rounding to BF16.
        options = dict(SHAPE, fused=False, **RECIPES[recipe])
        models.append(CausalLM.from_preset("gated-nano", recipe=name, engine=engine, **options))
    load_weights(models[1], weights(models[0]))
    return models[0], models[1]


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest relative difference of two tensors of non-negative entries, where either is not zero."""
    top = torch.maximum(one, other)
    return ((one - other).abs() / top.clamp(min=1e-30)).max().item()


def frobenius(one: torch.Tensor, other: torch.Tensor) -> float:
    """||one - other|| / ||one||; 0 where both are zero."""
    return ((one - other).norm() / one.norm().clamp(min=1e-30)).item()


def compare(recipe: str, steps: int, how: str) -> dict[str, Any]:
    """Train both engines `steps` steps; per step the losses, and how far apart amax histories and scales are."""
    words = load_tokenizer(None)
    data = TokenDataset(load_documents(None), words, 256, batch_size=16, seed=0)
    native, emulated = pair(recipe, ("native", "native" if how == "twice" else "emulated"))
    schedule = TrainConfig(steps=steps, warmup_steps=10, learning_rate=3e-4)
    optimizers = [
        build_optimizer("adamw", model, schedule.learning_rate, 0.1) for model in (native, emulated)
    ]
    rows = []
    for step in range(1, steps + 1):
        batch = {name: tensor.cuda() for name, tensor in next(data).items()}
        if how == "lockstep":
            load_weights(emulated, weights(native))
            load_fp8_state(
                emulated,
                {k: v.clone() for k, v in fp8_state(native).items()},
                emulated.precision.te_recipe_of,
            )
        losses = []
        for model, optimizer in zip((native, emulated), optimizers, strict=True):
            loss = model(**batch).loss
            loss.backward()
            optimizer.take_gradients(1.0)
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate_at(step)
            optimizer.step()
            losses.append(loss.item())
        row = dict(
            native=losses[0], emulated=losses[1], loss=abs(losses[0] - losses[1]) / losses[0]
        )
        if state := fp8_state(native):
            other = fp8_state(emulated)
            histories = [name for name in state if name.endswith("amax_history")]
            newest = [(state[name][-1], other[name][-1]) for name in histories]
            differing = [relative(a, b) for a, b in newest]
            row["amax_max"] = max(differing)
            row["amax_equal"] = sum(bool(torch.equal(a, b)) for a, b in newest) / len(newest)
            row["amax_frobenius"] = max(frobenius(state[name], other[name]) for name in histories)
        rows.append(row)
    columns = [name for name in rows[0] if name not in ("native", "emulated")]
    worst = {
        f"worst_{name}": (min if name == "amax_equal" else max)(row[name] for row in rows)
        for name in columns
    }
    return {**worst, "steps": rows}


def linear_ratio(recipe: str, size: int = 1024, rows: int = 512) -> float:
    """Forward and backward of an emulated te.Linear, its time over nn.Linear's in BF16; medians, interleaved."""
    from te_models import get_recipe
    from te_models.engine import emulated as te

    built = (
        get_recipe(recipe.removesuffix("_max"), **RECIPES[recipe]).build(te)
        if recipe in RECIPES
        else get_recipe(recipe).build(te)
    )
    fp8 = te.Linear(size, size, bias=False, params_dtype=torch.bfloat16, device="cuda")
    plain = torch.nn.Linear(size, size, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)

    def run(module: torch.nn.Module, context: Any) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with context:
            y = module(x)
        y.backward(g)
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)

    times = [
        (run(fp8, te.autocast(enabled=True, recipe=built)), run(plain, torch.enable_grad()))
        for _ in range(60)
    ][10:]
    median = [sorted(column)[len(column) // 2] for column in zip(*times, strict=True)]
    return median[0] / median[1]


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--steps", default=50)
def main(out: Path, steps: int) -> None:
    """Compare the engines and write the figures."""
    from te_models.inspect.environment import environment, require_gpu

    require_gpu()
    sdpa.CUDA_ORDER[:] = [SDPBackend.MATH]
    result: dict[str, Any] = {
        "environment": environment(),
        "model": SHAPE,
        "recipes": {},
        "linear_time_over_bf16": {},
    }
    for recipe in RECIPES:
        parts = {how: compare(recipe, steps, how) for how in ("free", "twice", "lockstep")}
        result["recipes"][recipe] = parts
        for name, part in parts.items():
            print(
                recipe,
                name,
                {key: f"{value:.2e}" for key, value in part.items() if key != "steps"},
                flush=True,
            )
        out.write_text(json.dumps(result))
    for size, rows in ((1024, 512), (4096, 8192)):
        for recipe in (*RECIPES, "mxfp8"):
            ratio = linear_ratio(recipe, size, rows)
            result["linear_time_over_bf16"][f"{recipe} {rows}x{size}x{size}"] = ratio
            print(recipe, rows, size, f"{ratio:.2f}x BF16", flush=True)
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
