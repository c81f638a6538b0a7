"""Additions from outside: kinds of layers, families of Hugging Face and presets that another package registers.

A package registers them in a function that its entry point `te_models.extensions` names, which `import te_models`
calls; a program may also call these functions itself, before it asks for what they add. examples/extension is a whole
package, and design.md says what a kind of layer is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from te_models.config import kinds
from te_models.config.fields import ModelFields
from te_models.config.layer import FeedforwardSpec, MixerSpec
from te_models.config.model import ModelConfig
from te_models.config.presets import PRESETS
from te_models.errors import UsageError
from te_models.interop.hf_families import FAMILIES
from te_models.interop.hf_family import Family
from te_models.model import parts
from te_models.model.part import Feedforward, Mixer


def register_mixer(
    name: str,
    describe: Callable[[ModelFields, int], MixerSpec],
    spec: type[MixerSpec],
    module: type[Mixer[Any]],
) -> None:
    """Let `layer_types` name a mixer.

    Args:
        name: as in `layer_types`.
        describe: returns the description of such a layer, given the fields of the config and the number of the layer.
            Options of its own are in the field `kind_options`.
        spec: the class of the description.
        module: the class of the module that computes it.

    Raises:
        UsageError: the name is taken, or a class is no subclass of MixerSpec or Mixer.
    """
    _check_kind("mixer", name, kinds.MIXERS)
    _check_class("spec", spec, MixerSpec)
    _check_class("module", module, Mixer)
    kinds.MIXERS[name] = describe
    parts.MIXERS[spec] = module


def register_mlp(
    name: str,
    describe: Callable[[ModelFields, int], FeedforwardSpec],
    spec: type[FeedforwardSpec],
    module: type[Feedforward[Any]],
) -> None:
    """Let `mlp_layer_types` name an MLP; arguments and errors as in `register_mixer`."""
    _check_kind("MLP", name, kinds.MLPS)
    _check_class("spec", spec, FeedforwardSpec)
    _check_class("module", module, Feedforward)
    kinds.MLPS[name] = describe
    parts.MLPS[spec] = module


def register_family(family: Family) -> None:
    """Let from_pretrained read, and save_pretrained(format="hf") write, an architecture of Hugging Face.

    Raises:
        UsageError: there is such a model_type already, or something else than a Family.
    """
    if not isinstance(family, Family):
        raise UsageError(
            f"the family is a {type(family).__name__}: give a te_models.interop.hf_family.Family"
        )
    if any(known.model_type == family.model_type for known in FAMILIES):
        raise UsageError(f"there is a family of model_type {family.model_type!r} already")
    FAMILIES.insert(len(FAMILIES) - 1, family)


def register_preset(name: str, fields: Mapping[str, Any]) -> None:
    """Let get_preset and the command line name a shape, fields of ModelConfig.

    Raises:
        UsageError: there is such a preset already.
        ConfigError: the fields are no ModelConfig.
    """
    if not isinstance(fields, Mapping):
        raise UsageError(
            f"the fields are a {type(fields).__name__}: give a dict of them, as config.to_dict() returns"
        )
    if name in PRESETS:
        raise UsageError(f"there is a preset {name!r} already")
    ModelConfig(**fields)
    PRESETS[name] = dict(fields)


def _check_kind(part: str, name: str, known: Mapping[str, object]) -> None:
    if name in known:
        raise UsageError(f"there is a kind of {part} {name!r} already: choose another name")


def _check_class(argument: str, candidate: object, base: type) -> None:
    if not (isinstance(candidate, type) and issubclass(candidate, base)):
        raise UsageError(f"{argument}={candidate!r} is no subclass of {base.__name__}")
