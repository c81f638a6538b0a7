"""Precision recipes: values from a TOML file for the fields of a Transformer Engine recipe class. No torch.

`SCHEMES` lists the fields of each class, a file in `recipes/` gives their values, and keywords override them. A new
recipe of a known scheme is one TOML file, a new scheme one row here.

Transformer Engine ignores unknown fields silently (section 1.1 of docs/internals/transformer_engine.md: a misspelled
`amax_histroy_len` does nothing); here each is an error that names the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn, Protocol

from te_models.config.settings import Setting
from te_models.config.toml import read_toml
from te_models.errors import ConfigError, UsageError, refuse, unknown

FIELDS = "Recipe fields"  # heading of the help
# Limits of a table `precision`: how many patterns, and the length of each.
MOST_PATTERNS = 256
LONGEST_PATTERN = 200


def _field(name: str, kind: type, text: str, **about: Any) -> tuple[str, Setting]:
    """Return a field of recipes, whose class in Transformer Engine has the default."""
    return name, Setting(name=name, kinds=(kind,), help=text, group=FIELDS, **about)


_FORMAT: dict[str, Any] = dict(choices=("HYBRID", "E4M3"))
_DIMENSIONS: dict[str, Any] = dict(choices=(1, 2))
_LAYERS: dict[str, Any] = dict(below=2**20 + 1)
# Every field of a recipe. An amax history takes 20 bytes per row and linear; FP32's exponent allows no larger margin.
RECIPE_FIELDS: dict[str, Setting] = dict((
    _field("margin", int, "Bits of headroom: scales are divided by 2**margin.", below=101),
    _field("fp8_format", str, "HYBRID: E4M3 forward, E5M2 for gradients; E4M3: both.", **_FORMAT),
    _field("amax_history_len", int, "Steps of amax history.", least=1, below=65537),
    _field("amax_compute_algo", str, "Scale from the most recent amax or the maximum of the history.",
           choices=("most_recent", "max")),
    _field("reduce_amax", bool, "Reduce amaxes over all processes."),
    _field("use_power_2_scales", bool, "Round scales down to powers of two."),
    _field("backward_override", str,
           "Operands of the backward GEMMs: as the recipe says (none), high_precision or dequantized.",
           choices=("none", "high_precision", "dequantized")),
    _field("use_f32_scales", bool, "FP32 scales instead of powers of two."),
    _field("x_block_scaling_dim", int, "Blocks of activations: 1 x 128 (1) or 128 x 128 (2).", **_DIMENSIONS),
    _field("w_block_scaling_dim", int, "Blocks of weights: 1 x 128 (1) or 128 x 128 (2).", **_DIMENSIONS),
    _field("grad_block_scaling_dim", int, "Blocks of gradients: 1 x 128 (1) or 128 x 128 (2).", **_DIMENSIONS),
    _field("enable_2d_quantization", bool, "Quantize weights in 32 x 32 blocks."),
    _field("disable_rht", bool, "Leave out the random Hadamard transform."),
    _field("disable_stochastic_rounding", bool, "Round gradients to nearest."),
    _field("disable_2d_quantization", bool, "Quantize weights in 1 x 16 blocks instead of 16 x 16."),
    _field("num_layers_at_start_in_bf16", int, "Blocks at the start that stay in BF16.", **_LAYERS),
    _field("num_layers_at_end_in_bf16", int, "Blocks at the end that stay in BF16.", **_LAYERS),
    _field("lm_head", str, "Precision of the output head: bf16 or fp8.", choices=("bf16", "fp8")),
    _field("precision", dict, 'Recipe of linears by pattern, such as "*.down_proj=bf16"; repeatable, the last match '
           "decides.", metavar="PATTERN=RECIPE"),
))  # fmt: skip
# Fields of te-models in every recipe: what stays out of FP8, or runs under another recipe.
EDGES = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "lm_head", "precision")


@dataclass(frozen=True)
class Scheme:
    """Requirements of a Transformer Engine recipe class: `rows` and `features` of a GEMM must be multiples of these."""

    # Name -> Transformer Engine's default.
    fields: Mapping[str, object] = field(default_factory=dict)
    rows: int = 16
    features: int = 16
    # The multiple for each rank under sequence parallelism, where quantized rows are sent; 0: `rows`.
    scattered_rows: int = 0
    capability: tuple[int, int] | None = (8, 9)  # the least that Transformer Engine runs it on
    available: str = "is_fp8_available"  # the engine's function that returns whether it runs here, else the reason
    # Scales and amax histories persist over steps and belong in a checkpoint.
    stateful: bool = False
    forward: str = "E4M3"  # the format of inputs and weights


# By the names of Transformer Engine's recipe classes. To add one: docs/internals/design.md, "Add a scheme".
SCHEMES: dict[str, Scheme] = {
    "none": Scheme(rows=1, features=1, capability=None, available="", forward="BF16"),
    "DelayedScaling": Scheme(
        dict(fp8_format="HYBRID", margin=0, amax_history_len=1024, amax_compute_algo="max", reduce_amax=True),
        stateful=True,
    ),
    "Float8CurrentScaling": Scheme(
        dict(fp8_format="HYBRID", use_power_2_scales=False, backward_override="none"),
    ),
    "Float8BlockScaling": Scheme(
        dict(fp8_format="E4M3", use_f32_scales=False, x_block_scaling_dim=1, w_block_scaling_dim=2,
             grad_block_scaling_dim=1, backward_override="none"),
        scattered_rows=128, capability=(9, 0), available="is_fp8_block_scaling_available",
    ),
    "MXFP8BlockScaling": Scheme(
        dict(fp8_format="E4M3", enable_2d_quantization=False, backward_override="none"),
        rows=32, features=32, capability=(10, 0), available="is_mxfp8_available",
    ),
    "NVFP4BlockScaling": Scheme(
        dict(disable_rht=False, disable_stochastic_rounding=False, disable_2d_quantization=False,
             backward_override="none"),
        rows=128, features=32, capability=(10, 0), available="is_nvfp4_available", forward="E2M1",
    ),
}  # fmt: skip

AUTO = "auto"  # in place of a recipe's name: the model's own, else what te_models.model.recipe_fit chooses
# The schemes under which weights can be stored in FP8.
FP8_WEIGHTS = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")

# Names that other libraries use, in lower case -> advice for the error.
RECIPES_ELSEWHERE = {
    "fp8": "give 'current', or 'delayed' for speed on Hopper",
    "float8": "give 'current', or 'delayed' for speed on Hopper",
    "tensorwise": "give 'current'",
    "delayedscaling": "give 'delayed'",
    "float8currentscaling": "give 'current'",
    "float8blockscaling": "give 'blockwise'",
    "mxfp8blockscaling": "give 'mxfp8'",
    "nvfp4blockscaling": "give 'nvfp4'",
    "hybrid": "give a recipe such as 'delayed', and fp8_format='HYBRID'",
    "e4m3": "give a recipe such as 'delayed', and fp8_format='E4M3'",
}


@dataclass(frozen=True)
class Recipe:
    """A precision recipe with every value resolved; change it with `replace`, which validates.

    Attributes:
        name: the name of the recipe, such as "delayed".
        scheme: the name of Transformer Engine's recipe class; "none" for BF16.
        fields: the values of that class's fields.
        num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: blocks at both ends that run in BF16.
        lm_head: precision of the output head, "bf16" or "fp8".
        precision: pattern of te.Linears, such as "layers.2.*" or "*.down_proj" -> the recipe that they run under:
            "bf16", another of `list_recipes()`, or this one by its name. The last pattern that matches decides, also
            over the fields above (te_models.config.precision).
        description, hardware: text for `te-models list`.
        in_use: this recipe, then those that `precision` names, BF16 left out.

    Raises:
        ConfigError: an unknown scheme or field, or a value out of range.
    """

    name: str
    scheme: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    num_layers_at_start_in_bf16: int = 1  # as in the files in recipes/; a saved recipe gives both
    num_layers_at_end_in_bf16: int = 1
    lm_head: str = "bf16"
    precision: Mapping[str, str] = field(default_factory=dict)
    description: str = field(default="", compare=False)
    hardware: str = field(default="", compare=False)
    in_use: tuple[Recipe, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fields = dict(self.fields)
        if isinstance(format_name := fields.get("fp8_format"), str):
            fields["fp8_format"] = format_name.upper()  # as Transformer Engine spells it
        refuse(self._mistakes(fields), ConfigError)
        object.__setattr__(
            self, "fields", MappingProxyType({**SCHEMES[self.scheme].fields, **fields})
        )
        object.__setattr__(self, "precision", MappingProxyType(dict(self.precision)))
        used = [self.called(name) for name in dict.fromkeys((self.name, *self.precision.values()))]
        object.__setattr__(self, "in_use", tuple(recipe for recipe in used if recipe is not None))

    def _mistakes(self, fields: Mapping[str, object]) -> Iterator[str | Exception]:
        for text in (self.name, self.scheme, self.description, self.hardware):
            if not isinstance(text, str):
                yield f"a recipe's name, scheme, description and hardware are text, not {text!r}"
        if self.scheme not in SCHEMES:
            yield unknown("scheme", self.scheme, SCHEMES)
        if (format_name := f"{fields.get('fp8_format')}".lower()) in _shipped():
            yield f"fp8_format={format_name!r} is a recipe, not a format: use recipe={format_name!r}"
        patterns = list(self.precision) if isinstance(self.precision, Mapping) else [None]
        if len(patterns) > MOST_PATTERNS or not all(
            isinstance(pattern, str) and 0 < len(pattern) <= LONGEST_PATTERN for pattern in patterns
        ):
            yield f'precision={self.precision!r:.60}: give a table of patterns, such as {{"*.down_proj": "bf16"}}'
        known = (*SCHEMES[self.scheme].fields, *EDGES)
        for name, value in {**fields, **self.edges}.items():
            if name not in known:
                yield unknown_option(f"field of recipe {self.name!r}", name, known)
            RECIPE_FIELDS[name].check(value)
        resolved = {**SCHEMES[self.scheme].fields, **fields}
        square = []
        for name, value in resolved.items():
            if name.endswith("_block_scaling_dim") and value == 2:
                square.append(name)
        if len(square) > 1:  # Transformer Engine asserts it
            yield f"{' and '.join(square)} are 2, and a GEMM takes one of its operands so: give 1 for all but one"
        for pattern, value in self.precision.items():
            if not isinstance(value, str) or value not in (self.name, *_shipped()):
                choices = dict.fromkeys((*_shipped(), self.name))
                yield unknown(f"recipe of precision[{pattern!r:.40}]", f"{value}"[:40], choices)

    def __reduce__(self) -> tuple[Callable[..., Recipe], tuple[dict[str, Any]]]:
        about = {"description": self.description, "hardware": self.hardware}
        return recipe_from_dict, (self.to_dict() | about,)

    def __deepcopy__(self, memo: object) -> Recipe:
        return self  # immutable

    @property
    def edges(self) -> dict[str, Any]:
        """The fields of EDGES, by name; without `precision` if it is empty."""
        edges: dict[str, Any] = {
            "num_layers_at_start_in_bf16": self.num_layers_at_start_in_bf16,
            "num_layers_at_end_in_bf16": self.num_layers_at_end_in_bf16,
            "lm_head": self.lm_head,
        }
        if self.precision:
            edges["precision"] = dict(self.precision)
        return edges

    def called(self, name: str) -> Recipe | None:
        """Return the recipe that `precision` calls by this name: this one by its own; None for BF16."""
        recipe = self if name == self.name else _named(name)
        return None if recipe.scheme == "none" else recipe

    @property
    def quantized(self) -> bool:
        """Return whether any te.Linear runs below BF16."""
        return len(self.in_use) > 0  # torch.compile of torch 2.10 traces no bool of a tuple

    @property
    def stateful(self) -> bool:
        """Return whether any te.Linear has scales and amax histories that persist over steps."""
        return any(SCHEMES[recipe.scheme].stateful for recipe in self.in_use)

    def fp8_layers(self, layers: int) -> range:
        """Return the numbers of the layers, of `layers` in all, that are inside the recipe's own autocast."""
        return self.inner_layers(layers) if self.scheme != "none" else range(0)

    def inner_layers(self, layers: int) -> range:
        """Return the numbers of the layers, of `layers` in all, that the recipe does not keep in BF16."""
        first = min(self.num_layers_at_start_in_bf16, layers)
        return range(first, max(first, layers - self.num_layers_at_end_in_bf16))

    @property
    def head_in_fp8(self) -> bool:
        """Return whether the output head is inside the recipe's own autocast."""
        return (
            self.scheme != "none" and self.lm_head == "fp8" and not self.num_layers_at_end_in_bf16
        )

    @property
    def row_alignment(self) -> int:
        """Alignment of the number of tokens of every GEMM."""
        return max([1, *(SCHEMES[recipe.scheme].rows for recipe in self.in_use)])

    @property
    def scattered_row_alignment(self) -> int:
        """Alignment of the number of tokens per rank under sequence parallelism."""
        schemes = [SCHEMES[recipe.scheme] for recipe in self.in_use]
        return max([1, *(scheme.scattered_rows or scheme.rows for scheme in schemes)])

    @property
    def feature_alignment(self) -> int:
        """Alignment of the input and output features of a GEMM under this recipe itself."""
        return SCHEMES[self.scheme].features

    @property
    def formats(self) -> str:
        """The formats of activations and gradients, such as "E4M3/E5M2"."""
        forward = SCHEMES[self.scheme].forward
        return f"{forward}/E5M2" if self.fields.get("fp8_format") == "HYBRID" else forward

    def replace(self, **overrides: Any) -> Recipe:
        """Return this recipe with some fields changed; an unknown field or a bad value is a ConfigError."""
        edges = {name: overrides.pop(name) for name in list(overrides) if name in EDGES}
        return dataclasses.replace(self, fields={**self.fields, **overrides}, **edges)

    def followed_by(self, name: str) -> Recipe:
        """Return the recipe `name` for a run that continues under it: with the edges and the table of this one.

        Under BF16 only those entries of the table remain that ask for BF16, which exports read.
        """
        other = _named(name)
        table = {}
        for pattern, used in self.precision.items():
            if other.quantized or used == "bf16":
                table[pattern] = used
        return self if name == self.name else other.replace(**{**self.edges, "precision": table})

    def to_dict(self) -> dict[str, Any]:
        """Return every resolved value as plain JSON values: the content of `recipe.json`."""
        return {"name": self.name, "scheme": self.scheme, **self.fields, **self.edges}

    def build(self, te: ModuleType) -> EngineRecipe | None:
        """Return the engine's recipe object, an instance of Transformer Engine's class; None for BF16."""
        if self.scheme == "none":
            return None
        values = dict(self.fields)
        if "fp8_format" in values:
            values["fp8_format"] = te.recipe.Format[values["fp8_format"]]
        if values.get("backward_override") == "none":
            values["backward_override"] = None
        built = getattr(te.recipe, self.scheme)(**values)  # a scheme has the name of its class
        # Of these two, Transformer Engine sets the three attributes from the environment, ignoring the arguments.
        if self.scheme in ("Float8CurrentScaling", "Float8BlockScaling"):
            power_of_two = _has_power_of_two_scales(values)
            for operand in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
                setattr(built, operand, te.recipe.QParams(power_2_scale=power_of_two))
        return built

    def delayed(self) -> NoReturn:
        """Refuse to be an engine's recipe: this is what te.autocast asks its recipe first."""
        raise UsageError(
            "te.autocast takes a recipe of its engine: give recipe.build(te), and enabled=False where that is None"
        )


class EngineRecipe(Protocol):
    """A recipe object of either engine: Transformer Engine's, or the emulated one's."""

    def delayed(self) -> bool:
        """Return whether it has scales and amax histories that persist over steps."""
        ...


RecipeLike = str | Path | Recipe | EngineRecipe  # a name, the path of a TOML file, or an object


def list_recipes() -> list[str]:
    """Return the names of the recipes that come with the package."""
    order = list(SCHEMES)
    return sorted(_shipped(), key=lambda name: order.index(get_recipe(name).scheme))


def get_recipe(recipe: RecipeLike, **overrides: Any) -> Recipe:
    """Return the Recipe for a name, the path of a TOML file, a Recipe or a Transformer Engine recipe object.

    Args:
        recipe: a name of `list_recipes()`, a path, or an object, as above.
        overrides: fields to change.

    Raises:
        UsageError: an unknown name, field or value (the message names the nearest), or a file that is not TOML.
    """
    if isinstance(recipe, Recipe):
        return recipe.replace(**overrides)
    if not isinstance(recipe, (str, Path)):
        return _from_object(recipe).replace(**overrides)
    shipped = _shipped()
    if str(recipe) in shipped:
        return _from_file(shipped[str(recipe)]).replace(**overrides)
    if str(recipe).endswith(".toml"):
        return _from_file(Path(recipe)).replace(**overrides)
    # Names of other libraries, such as "fp8", get advice of their own.
    choices = [*shipped, AUTO, "the path of a .toml file"]
    raise unknown("recipe", recipe, choices, advice=RECIPES_ELSEWHERE.get(str(recipe).lower(), ""))


def unknown_option(kind: str, option: str, choices: Iterable[str], listed: str = "") -> UsageError:
    """Return the error for a field of a recipe or a keyword that does not exist; arguments are as in `unknown`.

    It says which recipes have a field that this one lacks.
    """
    owners = [name for name in list_recipes() if option in SCHEMES[get_recipe(name).scheme].fields]
    advice = f"it is a field of {', '.join(map(repr, owners))}" if owners else ""
    return unknown(kind, option, choices, listed, advice)


def recipe_from_dict(values: Mapping[str, Any]) -> Recipe:
    """Return the Recipe that `Recipe.to_dict` or a TOML file describes."""
    if not isinstance(values, Mapping) or "scheme" not in values:
        actual = "" if isinstance(values, Mapping) else f", not {values!r:.40}"
        raise ConfigError(
            f"a recipe needs scheme = one of {', '.join(SCHEMES)}, in a table of names and values{actual}"
        )
    # Everything else is a field of the scheme, which Recipe checks.
    about: dict[str, Any] = {"name": "custom"}
    fields = {}
    for name, value in values.items():
        if name in ("name", "scheme", "description", "hardware", *EDGES):
            about[name] = value
        else:
            fields[name] = value
    return Recipe(fields=fields, **about)


def recipes_folder() -> Path:
    """Return the folder recipes/, which a wheel has inside the package and a checkout beside it."""
    package = Path(__file__).parent.parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


@functools.cache
def _shipped() -> dict[str, Path]:
    """Return name -> file."""
    return {path.stem: path for path in sorted(recipes_folder().glob("*.toml"))}


@functools.cache
def _named(name: str) -> Recipe:
    """Return a recipe that comes with the package, as `precision` names it."""
    return get_recipe(name)


def _from_file(path: Path) -> Recipe:
    return recipe_from_dict({"name": path.stem, **read_toml(path)})


def _from_object(recipe: EngineRecipe) -> Recipe:
    """Read a Transformer Engine recipe object of either engine."""
    scheme = type(recipe).__name__
    if scheme not in SCHEMES:
        names = ", ".join(_shipped())
        raise ConfigError(
            f"recipe={recipe!r}: give a name ({names}), a .toml file or a TE recipe object"
        )
    values = {name: getattr(recipe, name) for name in SCHEMES[scheme].fields}
    refuse(_other_fields(recipe, values), ConfigError)
    if "fp8_format" in values:
        values["fp8_format"] = values["fp8_format"].name
    if "backward_override" in values:
        # None in Transformer Engine; TOML has no null.
        values["backward_override"] = values["backward_override"] or "none"
    return Recipe(name=scheme, scheme=scheme, fields=values)


def _has_power_of_two_scales(fields: Mapping[str, Any]) -> bool:
    """Return whether scales are powers of two; the two schemes that can choose say it by opposite fields."""
    if "use_power_2_scales" in fields:
        return fields["use_power_2_scales"]
    return not fields.get("use_f32_scales", True)


def _other_fields(recipe: object, taken: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each field of Transformer Engine's object that is not `taken` and not at its default."""
    plain = type(recipe)(**taken)
    power_of_two = _has_power_of_two_scales(taken)
    for name, value in vars(recipe).items():
        if name in taken:
            continue
        default = getattr(plain, name, None)  # None for an attribute that the user has added
        allowed = [default]
        if name.startswith("fp8_quant_") and default is not None:  # as `build` sets it
            allowed.append(dataclasses.replace(default, power_2_scale=power_of_two))
        if value not in allowed:
            yield f"{type(recipe).__name__}.{name}={value!r} is not supported: leave it at {default!r}"
