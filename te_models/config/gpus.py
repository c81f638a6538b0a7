"""NVIDIA's GPUs by name, and the recipes that Transformer Engine runs on each. No torch.

The conditions are those in Transformer Engine 2.20's source (pytorch/quantization.py); section 1.3 of
docs/internals/transformer_engine.md. Cards of Hopper were measured here, all others are known from source alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from te_models.config.recipe import SCHEMES, Recipe
from te_models.errors import UsageError, unknown

MEASURED = "measured here"
FROM_SOURCE = "from Transformer Engine's source, not measured here"


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name, compute capability, memory as sold in 10^9 bytes, and generation.

    `bf16_tflops` are its dense BF16 products at most, 10^12 operations per second from NVIDIA's data sheet; 0 where no
    figure is at hand.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    generation: str
    bf16_tflops: float = 0.0

    @property
    def evidence(self) -> str:
        """Where the facts about this card come from."""
        return MEASURED if self.name in ("H100", "H200") else FROM_SOURCE

    def has_chip_of(self, other: Gpu) -> bool:
        """Return whether this is another card with the same chip, as fast in products; their memories may differ."""
        same = (self.capability, self.bf16_tflops) == (other.capability, other.bf16_tflops)
        return same and self.bf16_tflops > 0 and self.name != other.name


GPUS = (
    Gpu("RTX 3090", (8, 6), 24, "Ampere"),
    Gpu("A100", (8, 0), 80, "Ampere", 312),
    Gpu("RTX 4080", (8, 9), 16, "Ada"),
    Gpu("RTX 4090", (8, 9), 24, "Ada", 165),
    Gpu("L4", (8, 9), 24, "Ada", 121),
    Gpu("L40S", (8, 9), 48, "Ada", 362),
    Gpu("RTX 6000 Ada", (8, 9), 48, "Ada"),
    Gpu("H100", (9, 0), 80, "Hopper", 989),
    Gpu("H100 PCIe", (9, 0), 80, "Hopper", 756),
    Gpu("H100 NVL", (9, 0), 94, "Hopper", 835),
    Gpu("H200", (9, 0), 141, "Hopper", 989),
    Gpu("GH200", (9, 0), 96, "Hopper", 989),
    Gpu("B200", (10, 0), 180, "data-centre Blackwell", 2250),
    Gpu("GB200", (10, 0), 186, "data-centre Blackwell"),
    Gpu("B300", (10, 3), 288, "data-centre Blackwell"),
    Gpu("RTX 5060", (12, 0), 8, "consumer Blackwell"),
    # Also sold with 8 GB.
    Gpu("RTX 5060 Ti", (12, 0), 16, "consumer Blackwell"),
    Gpu("RTX 5070", (12, 0), 12, "consumer Blackwell"),
    Gpu("RTX 5070 Ti", (12, 0), 16, "consumer Blackwell"),
    Gpu("RTX 5080", (12, 0), 16, "consumer Blackwell"),
    Gpu("RTX 5090", (12, 0), 32, "consumer Blackwell"),
    Gpu("RTX PRO 6000", (12, 0), 96, "consumer Blackwell"),
    Gpu("DGX Spark", (12, 1), 128, "consumer Blackwell"),
)
# Switches without which NVFP4's kernels fail on compute capability 12, though Transformer Engine's check passes.
NVFP4_SWITCHES = ("disable_rht", "disable_stochastic_rounding")


# The name under which CUDA knows a card, and its name above.
CHIPS = {"gb10": "DGX Spark"}


def get_gpu(name: str) -> Gpu:
    """Return the GPU of a name, such as "RTX 5090", "5090" or "NVIDIA H100 80GB HBM3".

    Raises:
        UsageError: no GPU of this name is known; the message has the nearest.
    """
    chip = re.search(rf"\b({'|'.join(CHIPS)})\b", name.lower())
    name = CHIPS[chip[0]] if chip else name
    plain_name = _plain(name)
    for gpu in GPUS:
        known_name = _plain(gpu.name)
        if plain_name in (known_name, known_name.removeprefix("rtx")):
            return gpu
    # The longest first, so that "RTX 6000 Ada" is not taken for another card.
    for gpu in sorted(GPUS, key=lambda gpu: -len(gpu.name)):
        if re.search(rf"(?<![a-z0-9]){re.escape(gpu.name.lower())}(?![a-z0-9])", name.lower()):
            return gpu
    raise unknown("GPU", name, [gpu.name for gpu in GPUS])


def peak_bf16(name: str) -> float | None:
    """Return the most dense BF16 operations per second of a GPU, by its name; None where no figure is at hand."""
    try:
        tflops = get_gpu(name).bf16_tflops
    except UsageError:
        return None
    return tflops * 1e12 if tflops else None


def _plain(name: str) -> str:
    """Return a name in lower case, without spaces, hyphens and maker."""
    return re.sub(r"[\s_-]|nvidia|geforce", "", name.lower())


def why_not(recipe: Recipe, capability: tuple[int, int]) -> str:
    """Return why Transformer Engine does not run a recipe on a compute capability; empty if it does.

    CUDA and torch are taken to be recent; the blocks of Float8BlockScaling need CUDA 12.9.
    """
    for used in recipe.in_use:
        scheme = used.scheme
        least = SCHEMES[scheme].capability
        if least is not None and capability < least:
            return f"needs compute capability {least[0]}.{least[1]} or higher"
        # By Transformer Engine's own check; a later version may take it.
        if scheme == "MXFP8BlockScaling" and capability >= (12, 0):
            return "Transformer Engine refuses MXFP8 on compute capability 12.0 and higher"
        if scheme == "Float8BlockScaling" and capability >= (12, 0):
            return "its products are MXFP8 ones there, which Transformer Engine refuses on 12.0 and higher"
        missing = missing_switches(used, capability)
        if missing:
            return f"its kernels fail there without {' and '.join(missing)}"
    return ""


def how_it_runs(recipe: Recipe, capability: tuple[int, int]) -> str:
    """Return in a few words how a recipe that runs on a compute capability does so."""
    if not recipe.quantized:
        return "on any card"
    if recipe.scheme == "Float8BlockScaling" and capability >= (10, 0):
        return "through MXFP8 products, so its scales have to be powers of two"
    switches = missing_switches(recipe, capability)
    return "with " + " and ".join(f"{name}=True" for name in switches) if switches else "natively"


def missing_switches(recipe: Recipe, capability: tuple[int, int]) -> list[str]:
    """Return the switches of NVFP4 that a recipe lacks on a compute capability."""
    if recipe.scheme != "NVFP4BlockScaling" or capability < (12, 0):
        return []
    return [name for name in NVFP4_SWITCHES if not recipe.fields.get(name)]


def suited(recipe: Recipe, gpu: Gpu) -> Recipe:
    """Return a recipe as it runs on a GPU: NVFP4 without the switches that fail there."""
    switches = missing_switches(recipe, gpu.capability)
    return recipe.replace(**dict.fromkeys(switches, True))
