"""The difference between one model as trained and as served, for every recipe and every format of `export`.

    python -m benchmarks.serving_parity --model gated-nano --out benchmarks/results/serving_parity.json

The same weights run under each recipe, as the trained model, and are exported from it in each format. DelayedScaling
first sees two training forwards, as it would have in training. Without --model the weights of --preset are random:
that ranks the formats, but does not show the loss of a trained model in serving. The default text is held-out
documentation of Python.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from benchmarks.recipe_accuracy import calibrate, held_out
from te_models import CausalLM, list_recipes
from te_models.serving.parity import parity


@click.command()
@click.option(
    "--model",
    metavar="DIR",
    help="A saved model, or one that ships with te-models; default: --preset.",
)
@click.option(
    "--preset",
    default="gated-nano",
    show_default=True,
    help="Shape of random weights, without --model.",
)
@click.option(
    "--data", metavar="PATH", help="Text to compare on, its held-out part; default: Python's own."
)
@click.option("--batches", default=2, show_default=True, help="Of 8 x 256 tokens.")
@click.option("--device", help="Default: the first GPU, else the CPU.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
def main(
    model: str | None,
    preset: str,
    data: str | None,
    batches: int,
    device: str | None,
    out: Path | None,
) -> None:
    """Compare every format under every recipe, print the tables, write the JSON."""
    from te_models.inspect.environment import environment

    text = held_out(model, data, batches)
    place = {} if device is None else {"device": device}
    built = (
        CausalLM.from_preset(preset, **place)
        if model is None
        else CausalLM.from_pretrained(model, **place)
    )
    recipes = {}
    for name in list_recipes():
        try:
            built.set_recipe(name)
        except ValueError as reason:  # such as MXFP8 on the native engine of a Hopper GPU
            click.echo(f"{name}: {reason}")
            continue
        calibrate(built, text[0]["input_ids"].to(built.device))
        result = parity(built, built.origin, [], text)
        recipes[name] = result.to_dict()
        click.echo(str(result))
    if out is not None:
        weights = "random weights" if model is None else "trained weights"
        about = {"model": preset if model is None else Path(model).name, "weights": weights}
        out.write_text(
            json.dumps({"environment": environment(), **about, "recipes": recipes}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
