"""SQNR of the logits and perplexity of one model under all recipes, against FP32.

    python benchmarks/recipe_accuracy.py --out benchmarks/results/recipe_accuracy_cpu.json     # tunes gated-nano first
    python benchmarks/recipe_accuracy.py --model runs/mine

The reference runs the same (BF16) weights with FP32 activations and products. DelayedScaling first sees two training
forwards, as it would have in training; nothing else is fitted. Perplexity is over held-out text.

What to expect: rounding to m mantissa bits makes an error of mean square 4^-m / 12 times the square of the value's
power of two. Where a value lies between two powers of two is evenly spread on a logarithmic scale, so the noise is 4^-m
/ 12 times the integral of 4^-u for u from 0 to 1, which is 4^-m / (16 ln 4) of the signal: 31.5 dB for an E4M3 operand,
28.5 dB for a product of two. How a model passes noise on is its own affair, so it is asked: `predicted_db` is the SQNR
of the FP32 model whose FP8 layers get random noise of this size on their operands instead of any rounding, with the
measured noise of BF16 on top.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from te_models import CausalLM, list_recipes
from te_models.data.dataset import TokenDataset
from te_models.data.documents import load_documents, split_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.training.evaluation import evaluate
from te_models.training.finetune import finetune
from te_models.training.run_settings import run_settings

MANTISSA_BITS = {
    "BF16": 7,
    "E4M3": 3,
    "E4M3/E5M2": 3,
    "E2M1": 1,
}  # of the formats in the forward pass


@click.command()
@click.option(
    "--model",
    metavar="DIR",
    help="A saved model; default: gated-nano, tuned here on Python's documentation.",
)
@click.option("--steps", default=150, show_default=True, help="Of tuning, without --model.")
@click.option(
    "--data", metavar="PATH", help="Text to measure on, its held-out part; default: Python's own."
)
@click.option(
    "--batches", default=8, show_default=True, help="Of 8 x 256 tokens, for the perplexity."
)
@click.option("--out", type=click.Path(path_type=Path), help="Where the JSON goes.")
def main(model: str | None, steps: int, data: str | None, batches: int, out: Path | None) -> None:
    """Measure every recipe, print the table, write the JSON."""
    from te_models.inspect.environment import environment

    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            given = dict(preset="gated-nano", recipe="bf16", data=data, out=folder)
            given |= dict(steps=steps, eval_every=0, sample_tokens=0)
            finetune(
                run_settings(
                    "pretrain", {name: value for name, value in given.items() if value is not None}
                )
            )
        text = held_out(model, data, batches)
        rows = measure(model or folder, text)
    click.echo(table(rows))
    if out is not None:
        tuned: dict[str, Any] = {
            "model": Path(model).name if model else "gated-nano",
            "steps": None if model else steps,
        }
        tuned["tokens"] = sum(batch["input_ids"].numel() for batch in text)
        out.write_text(
            json.dumps({"environment": environment(), **tuned, "rows": rows}, indent=1) + "\n"
        )


def held_out(model: str | None, data: str | None, batches: int) -> list[dict[str, Tensor]]:
    """Batches of text that tuning has not seen."""
    _, documents = split_documents(load_documents(data), seed=0)
    dataset = TokenDataset(
        documents, load_tokenizer(model), 256, batch_size=8, seed=0, shuffle=False
    )
    return dataset.eval_batches(batches)


@torch.no_grad()
def measure(
    folder: str | Path, batches: list[dict[str, Tensor]], **options: Any
) -> list[dict[str, Any]]:
    """One row a recipe that runs here: SQNR of the logits of the first batch, and perplexity over all of them."""
    exact = CausalLM.from_pretrained(folder, recipe="bf16", dtype=torch.float32, **options).eval()
    ids = batches[0]["input_ids"].to(exact.device)
    reference = exact(ids).logits.double()
    rows: list[dict[str, Any]] = [
        {"recipe": "fp32", "perplexity": math.exp(evaluate(exact, batches))}
    ]
    model, bf16 = (
        CausalLM.from_pretrained(folder, recipe="bf16", dtype=torch.bfloat16, **options),
        math.inf,
    )
    for name in ("bf16", *(name for name in list_recipes() if name != "bf16")):
        try:
            model.set_recipe(name)
        except ValueError as reason:
            rows.append({"recipe": name, "skipped": str(reason)})
            continue
        calibrate(model, ids)
        logits = model(ids).logits.double()
        sqnr = sqnr_db(reference, logits)
        if model.recipe.quantized:
            predicted = add_db(bf16, noisy_db(exact, ids, model.recipe.formats, model.fp8_layers))
        else:
            bf16, predicted = sqnr, None
        rows.append({
            "recipe": name,
            "sqnr_db": sqnr,
            "predicted_db": predicted,
            "same_next_token": (logits.argmax(-1) == reference.argmax(-1)).double().mean().item(),
            "perplexity": math.exp(evaluate(model, batches)),
        })  # fmt: skip
    return rows


def calibrate(model: CausalLM, ids: Tensor) -> None:
    """Two training forwards for a recipe with scales to find, and evaluation mode for all."""
    with torch.enable_grad():
        for _ in range(2 if model.recipe.stateful else 0):
            model.train()(ids)
    model.eval()


def sqnr_db(reference: Tensor, got: Tensor) -> float:
    """Signal-to-quantization-noise ratio in decibels; 6 dB is one bit."""
    return (20 * torch.log10(reference.norm() / (reference - got).norm())).item()


def add_db(*parts: float) -> float:
    """The SQNR under independent noises of these SQNRs."""
    return -10 * math.log10(sum(10 ** (-part / 10) for part in parts))


def rounding_db(formats: str) -> float:
    """SQNR of one operand rounded to `formats`."""
    return 10 * math.log10(16 * math.log(4) * 4.0 ** MANTISSA_BITS[formats])


def noisy_db(exact: CausalLM, ids: Tensor, formats: str, layers: range) -> float:
    """SQNR of an FP32 model whose te.Linear of these layers have noise of `formats` on input and weight."""
    reference, size = exact(ids).logits.double(), 10 ** (-rounding_db(formats) / 20)
    generator = torch.Generator(ids.device).manual_seed(0)

    def noisy(values: Tensor) -> Tensor:
        return values * (
            1 + size * torch.randn(values.shape, generator=generator, device=values.device)
        )

    chosen = [
        module
        for layer in layers
        for module in exact.layers[layer].modules()
        if isinstance(module, exact.te.Linear)
    ]
    kept = [module.weight.clone() for module in chosen]
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: (noisy(inputs[0]),))
        for module in chosen
    ]
    for module in chosen:
        module.weight.copy_(noisy(module.weight))
    got = exact(ids).logits.double()
    for module, weight, hook in zip(chosen, kept, hooks, strict=True):
        module.weight.copy_(weight)
        hook.remove()
    return sqnr_db(reference, got)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| recipe | SQNR of the logits | predicted | same next token | perplexity | against BF16 |"
    ]
    lines.append("|---|---|---|---|---|---|")
    bf16 = next(row["perplexity"] for row in rows if row["recipe"] == "bf16")
    for row in rows:
        if "skipped" in row:
            lines.append(f"| `{row['recipe']}` | {row['skipped']} | | | | |")
            continue
        change = f"{100 * (row['perplexity'] / bf16 - 1):+.2f} %"
        measured = ("exact", "", "")
        if "sqnr_db" in row:
            predicted = "" if row["predicted_db"] is None else f"{row['predicted_db']:.1f} dB"
            measured = (f"{row['sqnr_db']:.1f} dB", predicted, f"{row['same_next_token']:.1%}")
        lines.append(
            f"| `{row['recipe']}` | {' | '.join(measured)} | {row['perplexity']:.4f} | {change} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
