"""The two implementations of te.Linear: Transformer Engine itself ("native")
and plain PyTorch with its numbers ("emulated").

An engine is a module with Transformer Engine's own names (Linear, RMSNorm, autocast, checkpoint, recipe, ...). Layers
receive it as `te` and read the same with either. `get_engine` chooses; nothing falls back silently.

Lives here: te.Linear, te.RMSNorm, autocast and recompute, in both implementations.
Not here: operations between the linears (te_models.kernels) and the FP8 state of a model (te_models.fp8).
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from types import ModuleType

import torch
from torch import nn

from te_models.config.gpus import missing_switches
from te_models.config.recipe import SCHEMES, Recipe
from te_models.device.cudnn import load_torchs_cudnn
from te_models.errors import UsageError, check_known
from te_models.garbage import collecting_later
from te_models.kernels.flash_4 import keep_compiled

ENGINES = ("auto", "native", "emulated")
# The oldest version of Transformer Engine tested; 2.16 already has the names that native.py uses.
OLDEST = (2, 20)


# Here rather than before the import of the native engine: other libraries import Transformer Engine too (peft does).
load_torchs_cudnn()
keep_compiled()


def get_engine(
    name: str | None = "auto", device: torch.device | str | None = None
) -> tuple[ModuleType, str, str]:
    """Choose the engine for modules on `device` (None: the default device).

    Args:
        name: "auto" or None (native where a CUDA device and Transformer Engine are available), "native" or "emulated".
        device: the modules' device; None: the first CUDA device if there is one, else the CPU.

    Returns:
        the engine's namespace, its name ("native" or "emulated") and the reason for the choice, in a few words.

    Raises:
        UsageError: for an unknown name, and for "native" where it cannot run.
    """
    if name is None:
        name = "auto"
    if name == "planned":  # for te_models.planning alone
        return engine_module("planned"), "planned", "for the memory plan"
    check_known("engine", name, ENGINES)
    missing = _native_missing(device)
    if name == "native" and missing:
        raise UsageError(
            f"engine='native' is not possible here: {missing}; engine='emulated' runs its numerics anywhere"
        )
    if name == "emulated" or missing:
        return engine_module("emulated"), "emulated", missing if name == "auto" else "asked for"
    native = engine_module("native")
    return (
        native,
        "native",
        f"{torch.cuda.get_device_name()}, Transformer Engine {native.__version__}",
    )


def engine_module(name: str) -> ModuleType:
    """Return the namespace of "native" or "emulated", imported on first use: Transformer Engine is slow to import."""
    full = f"te_models.engine.{name}"
    # torch.compile can trace a look-up in sys.modules, but no import.
    imported = sys.modules.get(full)
    if imported is not None:
        return imported
    with collecting_later():
        return importlib.import_module(full)


def engine_of(owner: nn.Module) -> ModuleType:
    """Return the engine of the te layers in `owner`; the emulated one where there is none."""
    for module in owner.modules():
        # Some classes of ours inherit from Transformer Engine's.
        if any(base.__module__.startswith("transformer_engine.") for base in type(module).__mro__):
            return engine_module("native")
    return engine_module("emulated")


def check_support(te: ModuleType, engine: str, recipe: Recipe) -> None:
    """Raise a UsageError with the reason if the engine cannot run the recipe on this machine."""
    for used in recipe.in_use:
        possible, reason = getattr(te, SCHEMES[used.scheme].available)(return_reason=True)
        if possible and engine == "native":
            reason = _known_failure(used)
        if not possible or reason:
            raise UsageError(
                f"recipe {used.name!r} does not run on the {engine} engine here: {reason} "
                "engine='emulated' runs its numerics on any device"
            )


def _known_failure(recipe: Recipe) -> str:
    """Return why a recipe fails on this GPU although Transformer Engine's check says that it runs; empty if it does.

    One case is known: NVFP4 on compute capability 12, with the random Hadamard transform or with stochastic rounding
    (section 1.3 of docs/internals/transformer_engine.md).
    """
    needed = missing_switches(recipe, torch.cuda.get_device_capability())
    if not needed:
        return ""
    return (
        "its kernels of the random Hadamard transform and of stochastic rounding fail on compute capability 12; give "
        f"{' and '.join(f'{name}=True' for name in needed)}, or recipe='current', which runs here;"
    )


def _native_missing(device: torch.device | str | None) -> str:
    """Return why the native engine cannot run here; empty if it can."""
    if device is not None and torch.device(device).type not in ("cuda", "meta"):
        return f"the device is {torch.device(device).type}, and Transformer Engine runs on CUDA devices only"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed (pip install 'te-models[te]')"
    installed = importlib.metadata.version("transformer-engine")
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"Transformer Engine {installed} is older than {oldest} (pip install -U 'te-models[te]')"
    return ""
