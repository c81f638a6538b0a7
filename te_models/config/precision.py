"""The precision of every te.Linear of a model, with the reason: the one place that decides it. No torch.

Four rules in this order, of which the last that applies to a te.Linear decides:

1. the recipe itself;
2. the recipe's edges (`num_layers_at_start_in_bf16`, `num_layers_at_end_in_bf16`, `lm_head`);
3. the patterns of the recipe's table `precision`, from first to last;
4. LinearSpec.fp8: a linear without it is BF16 under every recipe.
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

from te_models.config.layer import LayerSpec, LinearSpec, depth_of, named_linears
from te_models.config.recipe import Recipe
from te_models.errors import ConfigError, unknown

HEAD = "lm_head"


class Precision(NamedTuple):
    """The precision of one te.Linear.

    Attributes:
        recipe: the recipe, the model's own or another; None: BF16, or the dtype of the model if that is another.
        reason: why, in a few words.
        stays: whether an edge, a pattern or LinearSpec.fp8 makes it BF16: then exports for servers do not quantize it.
    """

    recipe: Recipe | None
    reason: str
    stays: bool = False


def precisions(recipe: Recipe, layers: tuple[LayerSpec, ...]) -> dict[str, Precision]:
    """Return the precision of every te.Linear, "lm_head" included, by its name in the model and in forward order.

    Raises:
        ConfigError: a pattern of the table `precision` matches nothing, or only linears that are always BF16.
    """
    linears = dict(named_linears(layers))
    names = [*linears, HEAD]
    chosen_for = {name: _by_edges(recipe, len(layers), name) for name in names}
    always_bf16 = {name for name in linears if not linears[name].fp8}
    # In the order of the table: of several patterns that match a linear, the last decides.
    for pattern, value in recipe.precision.items():
        matches = [name for name in names if fnmatchcase(name, pattern)]
        chosen = Precision(recipe.called(value), f"pattern {pattern!r}")
        chosen = chosen._replace(stays=chosen.recipe is None)
        if not matches:
            raise _unknown_pattern(pattern, linears)
        if chosen.recipe is not None and always_bf16.issuperset(matches):
            raise ConfigError(
                f"precision[{pattern!r}]={value!r}: {matches[0]} is BF16 under every recipe: leave it out"
            )
        for name in matches:
            chosen_for[name] = chosen
    for name in always_bf16:
        chosen_for[name] = Precision(None, "under every recipe", stays=True)
    return chosen_for


def _by_edges(recipe: Recipe, layers: int, name: str) -> Precision:
    """Return the precision that the recipe and its edges give a te.Linear."""
    recipe_itself = recipe.called(recipe.name)
    if name == HEAD:
        reason = f"lm_head = {recipe.lm_head!r}"
        if recipe.lm_head == "fp8":
            return Precision(recipe_itself, reason)
        return Precision(None, reason, stays=True)
    # Besides the head, a te.Linear may lie outside the blocks, such as the projection of inputs per layer.
    depth = depth_of(name)
    if depth is None:
        return Precision(None, "under every recipe", stays=True)
    inner = recipe.inner_layers(layers)
    if depth not in inner:
        end = "start" if depth < inner.start else "end"
        field = f"num_layers_at_{end}_in_bf16"
        reason = f"{field} = {recipe.edges[field]}"
        # Under "bf16" all layers are in BF16, whatever the edges are.
        if recipe_itself is None:
            reason = f"recipe = {recipe.name!r}"
        return Precision(None, reason, stays=True)
    return Precision(recipe_itself, f"recipe = {recipe.name!r}")


def _unknown_pattern(pattern: str, linears: dict[str, LinearSpec]) -> Exception:
    """Return the error for a pattern that matches nothing; it names the fused te.Linear of q_proj and the like."""
    before, _, leaf = pattern.rpartition(".")
    for name, linear in linears.items():
        fused = f"{before or '*'}.{linear.name}"
        parts = [
            part for section in linear.sections for part in (section.name, f"{section.name}_proj")
        ]
        if leaf in parts and leaf != linear.name and fnmatchcase(name, fused):
            advice = f"its rows are part of {linear.name}, one GEMM: write {fused!r}"
            return unknown("te.Linear of precision", pattern, (), advice=advice)
    # Patterns such as "*.self_attn.o_proj".
    kinds = dict.fromkeys(f"*.{name.split('.', 2)[2]}" for name in linears)
    return unknown("te.Linear of precision", pattern, [*kinds, HEAD])
