"""`te-models verify`: show for each GEMM that it runs in FP8, with its error and its speed."""

import json
from collections.abc import Mapping
from typing import Any

import click

from te_models.cli.from_record import advice_of, from_record_option, shape_of, try_step_option
from te_models.cli.options import (
    Command,
    build_model,
    given_options,
    given_shape,
    json_option,
    model_options,
    option,
    refuse_all_but,
    seq_len_for,
    setting_options,
    show,
)


@click.command(cls=Command)
@model_options
@setting_options("batch_size", "seq_len")
@from_record_option
@try_step_option
@option(
    "--against",
    default=None,
    metavar="RUN",
    help="Instead, compare this card's FP8 with the one of a recorded run (--record): products, bit for bit, and loss.",
)
@json_option
def verify(
    preset: str | None,
    model: str | None,
    batch_size: int,
    seq_len: int,
    from_record: str | None,
    try_step: bool,
    against: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Check that each GEMM runs in FP8; measure errors and speed.

    The speed is relative to BF16 on this device at this size. With --from-record the recipe is the one that the record
    of a short run suggests; without --model or --preset the model is that run's too.
    """
    from te_models.causal_lm import CausalLM  # noqa: PLC0415  imports torch
    from te_models.inspect.verify import sample_config  # noqa: PLC0415
    from te_models.inspect.verify import verify as verify_model  # noqa: PLC0415

    if against is not None:
        return _verify_against(against, as_json, options)
    advice = None
    if try_step and from_record is None:
        raise click.UsageError("--try-step tries the advice of --from-record RUN: give both")
    if from_record is not None:
        config = shape_of(preset, model, given_shape(options))
        advice = advice_of(from_record, config, options, try_step=try_step)
        options["recipe"] = advice.recipe
        if preset is None and model is None:
            model = from_record
    # A saved model has a recipe of its own.
    if options["recipe"] is None and model is None:
        options["recipe"] = "delayed"
    if preset is None:
        built = build_model(None, model, options, merge=True)
        result = verify_model(built, batch_size, seq_len_for(built.config, seq_len))
    else:
        # A preset may be too large for this machine: plan all of it without data, and run one layer of each precision.
        whole = build_model(
            preset, model, {**options, "engine": "emulated", "device": "meta"}, merge=True
        )
        names = ("engine", "device", "fp8_params")
        build_options = given_options({name: options[name] for name in names})
        sample = CausalLM(
            sample_config(whole.config, whole.recipe), recipe=whole.recipe, **build_options
        )
        result = verify_model(sample, batch_size, seq_len_for(whole.config, seq_len), whole.plan())
    if advice is not None and as_json:
        click.echo(json.dumps({"advice": advice.to_dict(), **result.to_dict()}, indent=1))
        return 1 if result.failures else 0
    if advice is not None:
        show(advice, as_json=False)
        click.echo()
    show(result, as_json)
    return 1 if result.failures else 0


def _verify_against(run: str, as_json: bool, options: Mapping[str, Any]) -> int:
    """Compare this card with the one of a recorded run; return 1 if any product differs."""
    from te_models.inspect.against import verify_against  # noqa: PLC0415  imports torch

    refuse_all_but(
        ("against", "as_json", "device", "engine"),
        f"has no part in --against {run}, which has its own model and recipe",
    )
    result = verify_against(run, options["device"], options["engine"])
    show(result, as_json)
    return 0 if result.same else 1
