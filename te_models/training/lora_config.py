"""peft's LoraConfig: the fields that te-models supports, and the modules that a config targets."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from te_models.causal_lm import CausalLM
from te_models.errors import CheckpointError, UsageError, needs, refuse, unknown
from te_models.files.atomic import reraising
from te_models.interop.tensor_places import Place
from te_models.training.lora_targets import Adapter, Modules, module_of
from te_models.training.settings import names_experts

with needs("te_models.training.lora", "peft", "0.19", "lora"):
    import regex  # which transformers, and so peft, needs
    from peft import LoraConfig, PeftType
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

MAX_PATTERN = 4000  # characters of a regular expression
MAX_SECONDS = 1.0  # in which it has to match a name, or not
# Ways to match a name of 50 characters that a pattern may try, which takes a few ms.
MAX_WAYS = 300_000
ALL_LINEAR = "all-linear"
SUPPORTED = frozenset(
    (
        "r",
        "target_modules",
        "exclude_modules",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "modules_to_save",
        "init_lora_weights",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "target_parameters",
        "use_dora",
    )
)
# Fields without effect on an adapter: bookkeeping, and settings of features that other fields switch on.
HARMLESS = frozenset(
    (
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "runtime_config",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "ensure_weight_tying",
    )
)
# Fields that peft receives from a file: it would take others, such as trainable_token_indices=false, as switched on.
PASSED = SUPPORTED | {"task_type", "base_model_name_or_path", "revision", "inference_mode"}
INITS = (True, False, "gaussian")  # the others of peft change the base weights


def check_fields(values: Mapping[str, Any], init: bool = True, wrapped: bool = False) -> None:
    """Raise UsageError for a field of LoraConfig that te-models does not support, unless it has its default or is off.

    `init` checks `init_lora_weights` as for a new adapter; otherwise as for one that has been trained. `wrapped` is for
    an adapter of a TEModelsForCausalLM.
    """
    refuse(_field_mistakes(values, init, wrapped))


def _field_mistakes(values: Mapping[str, Any], init: bool, wrapped: bool) -> Iterator[str]:
    elsewhere = (
        ": leave it out, or give" if init else ": load it with peft.PeftModel.from_pretrained into"
    )
    elsewhere += " a TEModelsForCausalLM, which takes the methods of peft"
    owner = "on a CausalLM"
    if wrapped:
        owner = "by add_lora"
        elsewhere = ": leave it out, or call get_peft_model of peft with this model"
    kind = values.get("peft_type", PeftType.LORA)
    if kind != PeftType.LORA:
        name = kind.value if isinstance(kind, PeftType) else str(kind)[:40]
        yield f"an adapter of type {name} is not supported: a CausalLM has LORA{elsewhere}"
    defaults = {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in dataclasses.fields(LoraConfig)
    }
    for name, value in values.items():
        # peft writes all fields, also of methods that are switched off.
        off = value is None or value is False or value in ("none", {}, [], defaults.get(name))
        if name not in SUPPORTED | HARMLESS and not off:
            yield f"{name}={str(value)[:60]} is not supported {owner}{elsewhere}"
    dropout = values.get("lora_dropout", 0.0)
    if type(dropout) not in (int, float) or not 0 <= dropout <= 1:
        yield f"lora_dropout={str(dropout)[:40]} is not a probability: give a number from 0 to 1"
    initial = values.get("init_lora_weights", True)
    if initial not in INITS and not (initial == "orthogonal" and not init):
        yield f"init_lora_weights={str(initial)[:40]!r} is not supported: choose True, False or 'gaussian'"


def adapters_of(
    config: LoraConfig, modules: Modules, headless: bool | None = None
) -> dict[str, Adapter]:
    """Return the name of each module that `config` targets, by transformers' names or ours -> its adapter.

    Experts are parameters in transformers, which `target_parameters` name; in a new adapter, `target_modules` may too.
    `headless` selects the model that the config's names refer to (`Modules.named`); None: any, and names that match
    nothing are refused.

    Raises:
        UsageError: a target matches nothing; or in a new adapter a key of rank_pattern or alpha_pattern.
    """
    if config.target_modules is None and not config.target_parameters:
        raise UsageError(
            f"target_modules is missing: name the modules with adapters, or give {ALL_LINEAR!r}"
        )
    new = headless is None  # a new adapter, not one in a file: names that match nothing are refused
    _name_targets(config, modules, new)
    names = _targeted_modules(config, modules, headless)
    for target in config.target_parameters or ():
        named = modules.parameters_named([target], bool(headless))
        if not named and new:
            able = {".".join(name.split(".")[-2:]) for name in modules.experts}
            raise unknown(
                "target parameter", target, able, advice="" if able else "the model has no experts"
            )
        names |= {place: name for name, place in named.items()}
    if not names:
        raise UsageError(
            f"target_modules={str(config.target_modules)[:120]} matches no linear of the model"
        )
    if new:  # in a file, peft ignores patterns that match nothing
        _check_patterns(config, names.values())
    adapters = {}
    for place, name in names.items():
        rank, scaling = _rank_and_scaling(config, name)
        adapters[name.removesuffix(".weight")] = Adapter(place, rank, scaling)
    return adapters


def _name_targets(config: LoraConfig, modules: Modules, new: bool) -> None:
    """Write out "all-linear" in `config`, and move the experts among the targets of a new adapter to the parameters."""
    targets = config.target_modules
    if isinstance(targets, str) and targets.lower() != ALL_LINEAR:
        return  # a regular expression
    target_names = {ALL_LINEAR} if isinstance(targets, str) else set(targets or ())
    experts = set()
    if new:
        experts = set(filter(names_experts, target_names))
    names = target_names - experts - {ALL_LINEAR}
    if ALL_LINEAR in target_names:
        for name in modules.theirs:
            if name != "lm_head" and name not in modules.routers:
                names.add(name.rsplit(".", 1)[1])
    config.target_modules = sorted(names)
    config.target_parameters = sorted(experts.union(config.target_parameters or ()))


def _targeted_modules(
    config: LoraConfig, modules: Modules, headless: bool | None
) -> dict[Place, str]:
    """Return the place of each module that `target_modules` matches -> the first of its names that does."""
    if headless is None:
        # A user may name modules of a class with a head or without one; a file is of one of the two.
        names = modules.named(False) | modules.named(True) | modules.stored()
    else:
        names = modules.named(headless)
    targeted: dict[Place, str] = {}
    for name, place in names.items():
        if _is_target(config, name):
            # The first name of each place: te.Linears have several, as our own, and as transformers' parts.
            targeted.setdefault(place, name)
    if isinstance(config.target_modules, str):
        return _without_whole(targeted, modules)
    if headless is None:
        for target in config.target_modules or ():
            if not any(name == target or name.endswith(f".{target}") for name in names):
                choices = {ALL_LINEAR, *(name.rsplit(".", 1)[-1] for name in names)}
                if modules.experts:
                    choices.add("experts")
                raise unknown("target module", target, choices)
    return targeted


def _without_whole(names: Mapping[Place, str], modules: Modules) -> dict[Place, str]:
    """Return the places without fused modules of ours of which it has parts too.

    An expression for transformers' names, such as one for q_proj, may fit our name for the fused linear as well; it
    would then have two adapters.
    """
    divided = set()
    for place in names:
        if place != modules.ours[module_of(place)]:
            divided.add(module_of(place))
    parts = {}
    for place, name in names.items():
        if module_of(place) not in divided or place != modules.ours[module_of(place)]:
            parts[place] = name
    return parts


def _check_patterns(config: LoraConfig, names: Collection[str]) -> None:
    """Raise UsageError for a key of rank_pattern or alpha_pattern that matches none of the names with an adapter."""
    for field in ("rank_pattern", "alpha_pattern"):
        for key in getattr(config, field) or ():
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in names):
                raise UsageError(f"{field}: {key[:80]!r} matches no module that has an adapter")


def _is_target(config: LoraConfig, name: str) -> bool:
    """Return whether peft would adapt a module, also by expressions that its own search might never finish."""
    excluded = config.exclude_modules
    if isinstance(excluded, str):
        if _matches(excluded, name):
            return False
        config = dataclasses.replace(config, exclude_modules=None)
    if isinstance(config.target_modules, str):
        return _matches(config.target_modules, name)
    with reraising("a pattern of layers_pattern", re.error, error=UsageError):
        return bool(check_target_module_exists(config, name))


def _matches(pattern: str, name: str) -> bool:
    """Return whether a regular expression matches all of a name, as re.fullmatch does, in limited time."""
    with reraising(
        f"the regular expression {pattern[:80]!r}", re.error, regex.error, error=UsageError
    ):
        re.compile(pattern)
        try:
            return regex.fullmatch(pattern, name, timeout=MAX_SECONDS) is not None
        except TimeoutError:
            raise UsageError(
                f"the pattern {pattern[:80]!r} takes more than {MAX_SECONDS:g} s for {name!r}: list the modules"
            ) from None


def _rank_and_scaling(config: LoraConfig, name: str) -> tuple[int, float]:
    """Return the rank and the scaling of the adapter of one module, as peft computes them."""
    ranks = config.rank_pattern or {}
    alphas = config.alpha_pattern or {}
    rank = ranks.get(get_pattern_key(list(ranks), name), config.r)
    alpha = alphas.get(get_pattern_key(list(alphas), name), config.lora_alpha)
    if type(rank) is not int or rank < 1:
        raise UsageError(f"{name}: rank {rank!r} is not a positive whole number")
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)


def whole_modules(
    config: LoraConfig, modules: Modules, model: CausalLM, saved: frozenset[str] | None = None
) -> dict[str, str]:
    """Return their name -> ours of the modules that are fully trained, `modules_to_save`.

    `saved` are the modules with tensors in the adapter's file, and the modules that hold them; None: it is new. A name
    in the config of a saved one may match no module, as peft allows.
    """
    trained = {}
    mistakes = []
    for asked_for in config.modules_to_save or ():
        names = []
        # As peft does, by the end of a name; under transformers' names and under ours.
        for name in modules.whole:
            if name.endswith(asked_for) or modules.whole[name].endswith(asked_for):
                names.append(name)
        if not names:
            if saved is not None and not _ends_any(modules.every | saved, asked_for):
                continue
            able = ", ".join(modules.whole) or "none of a model with tied embeddings"
            mistakes.append(
                f"modules_to_save={asked_for!r} is not supported; te-models trains whole: {able}"
            )
        trained |= {name: modules.whole[name] for name in names}
    if "lm_head" in trained.values() and model.precision.head.recipe is not None:
        mistakes.append("modules_to_save='lm_head' needs a recipe with lm_head='bf16'")
    refuse(mistakes)
    return trained


def _ends_any(names: Iterable[str], end: str) -> bool:
    return any(name.endswith(end) for name in names)


def read_config(path: Path, values: Any, modules: Modules) -> LoraConfig:
    """Return peft's config of a saved adapter from `values`, the content of adapter_config.json at `path`.

    Its patterns are known to terminate. Experts that the model, which has `modules`, lacks are left out.
    """
    if not isinstance(values, dict) or not isinstance(values.get("peft_type"), str):
        raise CheckpointError(f"{path} is not the config of an adapter")
    with reraising(path, LookupError, TypeError, ValueError):
        values = _without_missing(values, modules)
        check_fields(values, init=False)
        refuse(_value_mistakes(values))
        config = LoraConfig(
            **{name: values[name] for name in PASSED & values.keys() if values[name] is not None}
        )
    # The file's values follow, so how they once began, "pissa" for one, no longer matters.
    config.init_lora_weights = True
    if config.target_modules and not isinstance(config.target_modules, str):
        config.target_modules = [modules.in_transformers(name) for name in config.target_modules]
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, field) or {}
        setattr(config, field, {modules.in_transformers(name): patterns[name] for name in patterns})
    return config


def _without_missing(values: Mapping[str, Any], modules: Modules) -> dict[str, Any]:
    """Return the config without the experts' parameters that peft targets in any architecture that can have them.

    A model without experts has none of those, and an adapter that has tensors for them is refused for the tensors.
    """
    parameters = values.get("target_parameters")
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        return dict(values)
    known = [name for name in parameters if modules.parameters_named([name])]
    missing = tuple(name for name in parameters if name not in known)
    left = {**values, "target_parameters": known}
    for field in ("rank_pattern", "alpha_pattern"):
        # Patterns of targets that are gone would be refused as patterns that match nothing.
        if isinstance(patterns := values.get(field), dict):
            present = {}
            for key, number in patterns.items():
                if not key.endswith(missing):
                    present[key] = number
            left[field] = present
    return left


def _value_mistakes(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with values that would make peft run forever or allocate unlimited memory."""
    yield from _type_mistakes(values)
    ranks = values.get("rank_pattern") or {}
    alphas = values.get("alpha_pattern") or {}
    if not isinstance(ranks, dict) or not isinstance(alphas, dict):
        yield "rank_pattern and alpha_pattern are objects"
    for number in (values.get("r"), *ranks.values()):  # also of no module; tensors have to fit
        if type(number) is not int or not 1 <= number < 2**16:
            yield f"rank {str(number)[:40]!r} is not a whole number from 1 to 65,535"
    for number in (values.get("lora_alpha", 8), *alphas.values()):
        if type(number) not in (int, float) or not abs(number) < 1e9:
            yield f"{str(number)[:40]!r} is no lora_alpha: give a number"
    for field in ("target_modules", "exclude_modules"):
        if isinstance(pattern := values.get(field), str):
            if len(pattern) > MAX_PATTERN:
                yield f"a pattern must be text of at most {MAX_PATTERN} characters"
        else:
            yield from _pattern_mistakes(pattern)
    for field in ("target_parameters", "modules_to_save"):
        yield from _pattern_mistakes(values.get(field))
    for patterns in (values.get("layers_pattern"), [*ranks, *alphas]):
        yield from _pattern_mistakes(patterns, inner=True)


def _type_mistakes(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with fields that peft uses without looking at their type."""
    texts = ("bias", "base_model_name_or_path", "revision", "task_type")
    wrong = [name for name in texts if not isinstance(values.get(name), str | None)]
    switches = (
        "fan_in_fan_out",
        "inference_mode",
        "use_rslora",
        "lora_bias",
        "use_dora",
        "ensure_weight_tying",
    )
    wrong += [name for name in switches if not isinstance(values.get(name), bool | None)]
    layers = values.get("layers_to_transform")
    if any(
        type(layer) is not int
        for layer in (layers if isinstance(layers, list) else [0 if layers is None else layers])
    ):
        wrong.append("layers_to_transform")
    if wrong:
        yield f"{wrong[0]} is {str(values[wrong[0]])[:40]!r}, which is of a type that it cannot have"


def _pattern_mistakes(patterns: Any, inner: bool = False) -> Iterator[str]:
    """Yield what is wrong with regular expressions: they must be short, and not backtrack excessively on a name.

    peft searches for `inner` ones after the beginning of a name.
    """
    if not isinstance(patterns, str | list | None):
        yield f"a list of modules is a {type(patterns).__name__}"
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
            yield f"a pattern must be text of at most {MAX_PATTERN} characters"
        try:
            re.compile(rf".*\.({pattern})" if inner else pattern)
        except re.error as error:
            yield f"the pattern {pattern[:80]!r} is not a regular expression: {error}"
        if (
            # A repeated group such as (a+)+ can take exponential time on a name that does not match.
            re.search(r"\)[*+?{]", pattern)
            or _ways(f".*{pattern}" if inner else pattern) > MAX_WAYS
        ):
            yield f"the pattern {pattern[:80]!r} repeats a group, or has too many repeats or choices: list the modules"


def _ways(pattern: str) -> int:
    """Return a bound of the ways in which a regular expression without repeated groups can match part of a name.

    Each optional character doubles them, as each choice multiplies them by its alternatives, and k repeats divide a
    name in at most comb(50 + k, k) ways.
    """
    # Without escapes, kinds of groups and lazy repeats.
    marks = re.sub(r"\\.|\(\?|([*+?}])[?+]", r"\1", pattern)
    repeats = len(re.findall(r"[*+{]", marks))
    choices = math.prod(part.count("|") + 1 for part in marks.split(")"))
    return math.comb(50 + repeats, repeats) * 2 ** marks.count("?") * choices
