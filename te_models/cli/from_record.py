"""The options --from-record and --try-step, which several commands have: the recipe that suits a recorded run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from te_models.cli.options import option
from te_models.config.gpus import Gpu
from te_models.config.recipe import AUTO
from te_models.errors import UsageError

if TYPE_CHECKING:
    from te_models.config.model import ModelConfig
    from te_models.inspect.recipe_report import RecipeAdvice

from_record_option = option(
    "--from-record",
    default=None,
    metavar="RUN",
    help="Let --recipe auto be what the record of this short run (--record) speaks for.",
)
try_step_option = option(
    "--try-step",
    is_flag=True,
    help="With --from-record: also run the last captured step again, as recorded, advised and in BF16.",
)


def advice_of(
    run: str,
    config: ModelConfig | None,
    options: Mapping[str, Any],
    gpu: Gpu | None = None,
    try_step: bool = False,
) -> RecipeAdvice:
    """Return the advice that the record of a run gives.

    Args:
        run: the folder of the run.
        config: the shape of the model that the advice is for; None: the run's own.
        options: of the command; a recipe among them is refused.
        gpu: the GPU that the advice is for; None: this machine's, or where it has none, or the engine is the emulated
            one, the run's.
        try_step: whether to run the last captured step again under the advised recipe.

    Raises:
        UsageError: --recipe was given too.
    """
    from te_models.inspect.recipe_advice import advise_recipe, card_at_hand  # noqa: PLC0415  torch

    if options.get("recipe") not in (None, AUTO):
        raise UsageError(
            f"--from-record {run} chooses the recipe: leave out --recipe {options['recipe']}"
        )
    if gpu is None and options.get("engine") != "emulated":
        gpu = card_at_hand()
    return advise_recipe(
        run,
        config,
        gpu,
        fp8_params=bool(options.get("fp8_params")),
        try_step=try_step,
    )


def shape_of(
    preset: str | None, model: str | None, fields: Mapping[str, Any]
) -> ModelConfig | None:
    """Return the shape of a preset, with the `fields` that replace its own, or of a saved model; None: neither."""
    from te_models.config.presets import get_preset  # noqa: PLC0415
    from te_models.saving.pretrained import trained_shape  # noqa: PLC0415  imports torch

    if preset is not None:
        return get_preset(preset, **fields)
    return None if model is None else trained_shape(model)
