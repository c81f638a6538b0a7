"""Optimizers by name, with their options and defaults. docs/guide/optimizers.md says when to use which.

All have the interface of te_models.optim.master.MasterWeights, so the training loop does not distinguish them.

Lives here: update rules, and the FP32 master weights that they update.
Not here: the training loop and its learning-rate schedule (te_models.training).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from te_models.config.data import split_names, split_pair
from te_models.errors import UsageError, check_known, needs
from te_models.optim.adamw import AdamW
from te_models.optim.galore import GaLore
from te_models.optim.gradients import Gradients, Norm, gradient_norm
from te_models.optim.groups import groups, parts
from te_models.optim.lowbit_state import EIGHT_BIT_CODES, FP8_CODES, lowbit_state
from te_models.optim.master import MasterWeights
from te_models.optim.muon8bit import Muon8bit
from te_models.optim.parameter_owners import Owners
from te_models.optim.projected import ProjectedGradients, projected_parameters
from te_models.optim.state_tensors import (
    Group,
    Options,
    State,
    bytes_in,
    like,
    state_after_step,
)

Groups = list[Group]
Built = list[torch.optim.Optimizer]
# A function of a learning rate, options and groups of parameters.
Build = Callable[[float, Options, Groups], Built]

# Options and their defaults; a tuple lists the choices, the default first. The betas are the usual ones for language
# models (Touvron et al. 2023, arXiv 2307.09288).
ADAM: Options = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
LOWBIT: Options = ADAM | {"stochastic_rounding": False}
REST: Options = {"rest": ("adamw", "adamw8bit", "adamwfp8"), "rest_lr": 1.0} | ADAM
# An option that changes where gradients are, not the state, so a run may be resumed with another value.
IN_BACKWARD = "in_backward"
ADJUST = ("match_rms_adamw", "original")
MUON: Options = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr": ADJUST} | REST
GALORE: Options = {"rank": 128, "refresh": 200, "scale": 1.0, IN_BACKWARD: False} | REST


class Muon(torch.optim.Muon):
    """PyTorch's, with the state that it keeps of each matrix."""

    def expected_state(self, view: Tensor, group: Group) -> State:
        return dict(momentum_buffer=like(view))


def adamw(lr: float, options: Options, parameters: Groups) -> Built:
    """Return PyTorch's fused AdamW: two FP32 moments, 8 bytes per parameter."""
    betas = (options["beta1"], options["beta2"])
    return [AdamW(parameters, lr=lr, betas=betas, eps=options["eps"], fused=True)]


def _lowbit(name: str, lr: float, options: Options, parameters: Groups) -> Built:
    with needs(f"optimizer {name!r}", "torchao", "0.17", "optim"):
        # torchao is an extra, which most runs do without, and takes two seconds to import.
        lowbit = importlib.import_module("te_models.optim.lowbit")
    return lowbit.lowbit_adamw(name, parameters, lr, {"stochastic_rounding": False, **options})


def _with_rest(build: Callable[[float, Options, Groups], torch.optim.Optimizer]) -> Build:
    """Use `build` for hidden matrices and the optimizer that option `rest` names for everything else."""

    def both(lr: float, options: Options, parameters: Groups) -> Built:
        hidden = []
        rest = []
        for group in parameters:
            if group["matrices"]:
                hidden.append(group)
            else:
                # Norms and embeddings want AdamW's learning rate, which matrices under Muon need not have.
                rest.append({**group, "lr_scale": options["rest_lr"]})
        optimizers = []
        if hidden:
            optimizers.append(build(lr, options, hidden))
        if rest:
            optimizers += OPTIMIZERS[options["rest"]].build(lr, options, rest)
        return optimizers

    return both


def _muon(
    kind: type[Muon | Muon8bit], lr: float, options: Options, hidden: Groups
) -> torch.optim.Optimizer:
    return kind(
        hidden,
        lr=lr,
        momentum=options["momentum"],
        nesterov=options["nesterov"],
        ns_steps=options["ns_steps"],
        adjust_lr_fn=options["adjust_lr"],
    )


def _galore(lr: float, options: Options, hidden: Groups) -> torch.optim.Optimizer:
    return GaLore(
        hidden,
        lr=lr,
        betas=(options["beta1"], options["beta2"]),
        eps=options["eps"],
        rank=options["rank"],
        refresh=options["refresh"],
        scale=options["scale"],
    )


@dataclass(frozen=True, eq=False)
class Choice:
    """An optimizer by name.

    Attributes:
        build: makes the torch optimizers from (learning rate, options, parameter groups).
        options: names and defaults of its options.
        matrices: whether it updates each hidden matrix as a whole (te_models.optim.groups).
        elementwise: whether it may update a shard of a tensor by itself, as under FSDP2; else each parameter has an
            owner (te_models.optim.parameter_owners).
        description: its state in a few words.
        state: the state of a tensor after a step, for an optimizer whose package is slow to import or may be missing;
            None: the optimizers that `build` makes are asked (te_models.optim.state_tensors.state_after_step).
    """

    build: Build
    options: Options = field(default_factory=dict)
    matrices: bool = False
    elementwise: bool = False
    description: str = ""
    state: Callable[[Tensor], State] | None = None


# By the names that settings use. To add one: docs/internals/design.md, "Add an optimizer".
OPTIMIZERS: dict[str, Choice] = {
    "adamw": Choice(adamw, ADAM, elementwise=True, description="two FP32 moments"),
    "adamw8bit": Choice(
        partial(_lowbit, "adamw8bit"),
        LOWBIT,
        description="two 8-bit moments, one FP32 scale per 256 elements",
        state=partial(lowbit_state, EIGHT_BIT_CODES),
    ),
    "adamwfp8": Choice(
        partial(_lowbit, "adamwfp8"),
        LOWBIT,
        description="two FP8 moments, one FP32 scale per 256 elements",
        state=partial(lowbit_state, FP8_CODES),
    ),
    "muon": Choice(
        _with_rest(partial(_muon, Muon)),
        MUON,
        matrices=True,
        description="FP32 momentum for matrices, AdamW for the rest",
    ),
    "muon8bit": Choice(
        _with_rest(partial(_muon, Muon8bit)),
        MUON,
        matrices=True,
        description="INT8 momentum, one FP32 scale per 128 elements; AdamW for the rest",
    ),
    "galore": Choice(
        _with_rest(_galore),
        GALORE,
        matrices=True,
        description="AdamW on gradients of rank 128; AdamW for the rest",
    ),
}


def state_bytes(name: str, options: Options, view: Tensor, hidden: bool) -> int:
    """Return the bytes that an optimizer keeps of a tensor after a step, without its master.

    Args:
        name: one of OPTIMIZERS.
        options: its options, as `resolve_options` returns them.
        view: the tensor that it updates, a master or rows of one, on meta.
        hidden: whether `view` is a hidden matrix (te_models.optim.groups).
    """
    choice = OPTIMIZERS[name]
    # Parameters other than hidden matrices get the optimizer that `rest` names.
    if choice.matrices and not hidden and "rest" in options:
        rest = options["rest"]
        state_options = OPTIMIZERS[rest].options
        return state_bytes(
            rest, {key: options.get(key, state_options[key]) for key in state_options}, view, hidden
        )
    if choice.state is not None:
        return bytes_in(choice.state(view))
    size = 0
    group = {"params": [view], "weight_decay": 0.0, "matrices": choice.matrices and hidden}
    for optimizer in choice.build(1e-3, options, [group]):
        for built in optimizer.param_groups:
            for parameter in built["params"]:
                size += bytes_in(state_after_step(optimizer, parameter, built))
    return size


def build_optimizer(
    name: str,
    model: nn.Module,
    lr: float,
    weight_decay: float,
    options: str | Mapping[str, object] = "",
    offload: bool = False,
    owners: Callable[[list[nn.Parameter]], Owners] | None = None,
    gradients: Gradients | None = None,
    norm: Norm = gradient_norm,
) -> MasterWeights:
    """Return the optimizer called `name` over the model's trainable parameters.

    Args:
        name: one of OPTIMIZERS.
        model: a CausalLM or any other module.
        lr: learning rate of every group.
        weight_decay: applied to matrices only (te_models.optim.groups).
        options: the optimizer's options, as a dict or as "name=value,name=value".
        offload: store masters and state in CPU memory and step there.
        owners: see MasterWeights.
        gradients: see MasterWeights.
        norm: see MasterWeights.
    """
    values = resolve_options(name, options, offload)
    choice = OPTIMIZERS[name]
    kind = {"optimizer": name, **values}
    if kind.pop(IN_BACKWARD, False):
        if owners is not None:
            raise UsageError(
                f"{IN_BACKWARD}=true needs whole gradients, which FSDP2 divides: leave it out"
            )
        if not isinstance(gradients, ProjectedGradients):
            gradients = ProjectedGradients(
                parts(model), values["rank"], values["refresh"], gradients or Gradients()
            )
    return MasterWeights(
        kind,
        groups(model, weight_decay, choice.matrices),
        lambda groups: choice.build(lr, values, groups),
        keep=not values.get("stochastic_rounding", False),
        offload=offload,
        owners=owners,
        gradients=gradients,
        norm=norm,
    )


def projected_in_backward(
    name: str, options: str | Mapping[str, object], model: nn.Module
) -> list[nn.Parameter]:
    """Return the parameters of which no full gradients are kept; none but with GaLore's option `in_backward`.

    Args:
        name: one of OPTIMIZERS.
        options: its options, as a dict or as "name=value,name=value".
        model: the model to train.
    """
    values = resolve_options(name, options)
    return projected_parameters(parts(model), values["rank"]) if values.get(IN_BACKWARD) else []


def resolve_options(
    name: str, options: str | Mapping[str, object], offload: bool = False
) -> Options:
    """Return all options of the optimizer `name`: the defaults updated with `options`, in the types of the defaults.

    Raises:
        UsageError: an unknown name or option, a value out of range, or one that excludes the `offload` of its state.
    """
    check_known("optimizer", name, OPTIMIZERS)
    known = OPTIMIZERS[name].options
    values = {}
    for key, default in known.items():
        values[key] = default[0] if isinstance(default, tuple) else default
    if isinstance(options, Mapping):
        chosen = dict(options)
    else:
        pairs = (
            split_pair("optimizer option", text, "name=value,name=value")
            for text in split_names(options)
        )
        chosen = {key.replace("-", "_"): value for key, value in pairs}
    for key, value in chosen.items():
        check_known(f"option of optimizer {name!r}", key, known)
        values[key] = _checked(key, value, known[key])
    if offload and values.get(IN_BACKWARD):
        raise UsageError(
            f"{IN_BACKWARD}=true projects on the GPU: leave it out, or optimizer_offload"
        )
    return values


def _checked(key: str, value: Any, default: object) -> object:
    """Return `value`, which may be text, in the type of `default` or as one of its choices."""
    if isinstance(default, tuple):
        check_known(f"value of {key}", value, default)
        return value
    # Before the numbers below: a bool is an int in Python.
    if isinstance(default, bool):
        text = {"1": "true", "0": "false"}.get(str(value).lower(), str(value).lower())
        check_known(f"value of {key}", text, ("true", "false"))
        return text == "true"
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    share = key in ("beta1", "beta2", "momentum")
    mistake = ""
    if math.isnan(number):
        mistake = f"{value!r} is not a number: give one such as {default}"
    elif isinstance(default, int) and not number.is_integer():
        mistake = f"{value!r} is not a whole number: give one such as {default}"
    elif not 0 <= number < math.inf or (share and number >= 1):
        mistake = f"{value} is out of range: give 0 or more{' and less than 1' * share}"
    if mistake:
        raise UsageError(f"{key}={mistake}")
    return int(number) if isinstance(default, int) else number
