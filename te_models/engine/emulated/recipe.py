"""Transformer Engine's precision recipes: the format and the scaling of each operand of a GEMM.

Class names, fields, defaults and messages follow `transformer_engine.common.recipe` 2.20 (section 1 of
docs/internals/transformer_engine.md), with two differences. An unknown or ill-typed field raises a ValueError that
names the nearest valid one, where Transformer Engine ignores it. CustomRecipe and the fields for row scaling and
"4over6" of NVFP4 are not emulated. Defaults that come from the environment are read once, when this module is imported.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, cast

from te_models.errors import unknown

_BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")
_BACKWARD_OVERRIDE = os.getenv("NVTE_BACKWARD_OVERRIDE")
_CURRENT_POWER_2 = os.getenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0") == "1"
_BLOCK_FP32_SCALES = os.getenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") == "1"


class _MaxValues(NamedTuple):
    """Largest finite values of a format in the forward and in the backward pass."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Number formats; HYBRID is E4M3 in the forward pass and E5M2 for gradients."""

    E2M1 = _MaxValues(6, 6)
    E4M3 = _MaxValues(448, 448)
    E5M2 = _MaxValues(57344, 57344)
    HYBRID = _MaxValues(448, 57344)


@dataclass(frozen=True)
class MMParams:
    """Options of one GEMM. Split accumulation adds partial sums to an FP32 accumulator every 128 elements of K."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Quantization options of one operand."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def _as_int(value: Any) -> int:
    if isinstance(value, bool) or float(value) != int(float(value)):
        raise ValueError
    return int(float(value))


def _as_bool(value: Any) -> bool:
    if value not in (True, False):
        raise ValueError
    return bool(value)


def _as(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError
        return value

    return check


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "int": _as_int,
    "bool": _as_bool,
    "Format": _as(Format),
    "MMParams": _as(MMParams),
    "str": _as(str),
}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class Recipe:
    """Base of all recipes. Equality compares the declared fields; `repr` is the key of the global amax registry."""

    fp8_format: Format
    backward_override: str | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Recipe:
        """Raise a ValueError for a keyword that is not a field of the recipe."""
        names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        for name in kwargs:
            if name in names:
                continue
            if name.startswith("fp8_quant_") and name in vars(cls):
                raise ValueError(f"{name} is not a field of {cls.__name__}: assign it to the recipe after construction")
            raise unknown(f"field of {cls.__name__}", name, names)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check types, and the rules that all recipes share."""
        for field in dataclasses.fields(cast(Any, self)):
            if check := _CHECKS.get(str(field.type)):
                value = getattr(self, field.name)
                try:
                    setattr(self, field.name, check(value))
                except (TypeError, ValueError):
                    owner = type(self).__name__
                    raise ValueError(f"{owner}.{field.name} must be of type {field.type}, not {value!r}") from None
        _require(
            self.backward_override in _BACKWARD_OVERRIDES,
            "NVTE_BACKWARD_OVERRIDE must be unset or one of: 'high_precision', 'dequantized'.",
        )

    def _repr_fields(self) -> tuple[str, ...]:
        """Return the names of the fields in `repr`, which tell recipes apart in the registry of delayed scales."""
        return ()

    def __repr__(self) -> str:
        shown = [f"recipe_type={type(self).__name__}"]
        for name in self._repr_fields():
            value = getattr(self, name)
            shown.append(f"{name}={value.name if isinstance(value, Format) else value}")
        return ", ".join(shown).replace("fp8_format=", "format=") if not self.nvfp4() else ", ".join(shown)

    @classmethod
    def nvfp4(cls) -> bool:
        """Return True for NVFP4BlockScaling."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Return True for MXFP8BlockScaling."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        """Return True for DelayedScaling."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Return True for Float8CurrentScaling."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Return True if a tensor has a single scale."""
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Return True for Float8BlockScaling."""
        return issubclass(cls, Float8BlockScaling)

    def options(self, operand: str) -> QParams:
        """Return the quantization options of "fwd_inp", "fwd_weight" or "bwd_grad"."""
        return getattr(self, f"{'fp4' if self.nvfp4() else 'fp8'}_quant_{operand}")

    @property
    def split_accumulators(self) -> tuple[bool, bool, bool]:
        """Split accumulation in the forward, input gradient and weight gradient GEMMs (section 7.6)."""
        return False, True, True

    def _forbid_e5m2(self) -> None:
        _require(self.fp8_format != Format.E5M2, "Pure E5M2 training is not supported.")


@dataclass(repr=False)
class DelayedScaling(Recipe):
    """One scale per tensor, from the amaxes of the last `amax_history_len` steps."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _BACKWARD_OVERRIDE

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._forbid_e5m2()
        _require(self.backward_override is None, "Delayed scaling only supports backward_override=None.")
        _require(self.amax_history_len >= 1, f"amax_history_len must be at least 1, not {self.amax_history_len}")
        if self.amax_compute_algo not in ("max", "most_recent"):  # nor is a function emulated
            raise unknown("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        _require(self.scaling_factor_compute_algo is None, "scaling_factor_compute_algo is not emulated: leave it out")

    def _repr_fields(self) -> tuple[str, ...]:
        return (
            "margin", "fp8_format", "amax_history_len", "reduce_amax", "fp8_dpa", "fp8_mha", "backward_override",
        )  # fmt: skip


@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from the tensor itself. te.Linear reads its quantization options from `fp8_quant_*`."""

    use_power_2_scales: bool = _CURRENT_POWER_2
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _BACKWARD_OVERRIDE

    # Not fields, as in Transformer Engine: they follow the environment at import, not `use_power_2_scales`.
    fp8_quant_fwd_inp = QParams(power_2_scale=_CURRENT_POWER_2)
    fp8_quant_fwd_weight = QParams(power_2_scale=_CURRENT_POWER_2)
    fp8_quant_bwd_grad = QParams(power_2_scale=_CURRENT_POWER_2)

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._forbid_e5m2()

    @property
    def split_accumulators(self) -> tuple[bool, bool, bool]:
        """Split accumulation in the forward, input gradient and weight gradient GEMMs (section 7.6)."""
        gemms = self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad
        fprop, dgrad, wgrad = (gemm.use_split_accumulator for gemm in gemms)
        return fprop, dgrad, wgrad

    def _repr_fields(self) -> tuple[str, ...]:
        return (
            "fp8_format", "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad",
            "fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad", "fp8_dpa", "fp8_mha", "backward_override",
        )  # fmt: skip


@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale (E8M0) per 32 consecutive elements; `margin` is unused."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _BACKWARD_OVERRIDE
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._forbid_e5m2()

    def _repr_fields(self) -> tuple[str, ...]:
        return ("margin", "fp8_format", "backward_override", "enable_2d_quantization")


@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    """One FP32 scale per 1x128 (dim 1) or 128x128 (dim 2) elements; `fp8_quant_*` restricts scales to powers of two."""

    use_f32_scales: bool = _BLOCK_FP32_SCALES
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _BACKWARD_OVERRIDE

    # Not fields, as in Transformer Engine: they follow the environment at import, not `use_f32_scales`.
    fp8_quant_fwd_inp = QParams(power_2_scale=not _BLOCK_FP32_SCALES)
    fp8_quant_fwd_weight = QParams(power_2_scale=not _BLOCK_FP32_SCALES)
    fp8_quant_bwd_grad = QParams(power_2_scale=not _BLOCK_FP32_SCALES)

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        dims = {"x": self.x_block_scaling_dim, "w": self.w_block_scaling_dim, "grad": self.grad_block_scaling_dim}
        for name, dim in dims.items():
            _require(dim in (1, 2), f"Only 1D or 2D blocks supported for {name}")
        _require(list(dims.values()).count(2) <= 1, "2D by 2D block gemm not supported.")
        for name in ("fprop", "dgrad", "wgrad"):
            split = getattr(self, f"fp8_gemm_{name}").use_split_accumulator
            _require(split, f"Split accumulator required for {name}.")
        _require(not self.fp8_dpa and not self.fp8_mha, "FP8 attention is not supported for Float8BlockScaling.")
        self._forbid_e5m2()

    @property
    def split_accumulators(self) -> tuple[bool, bool, bool]:
        """Split accumulation in all GEMMs, as `__post_init__` demands."""
        return True, True, True

    def _repr_fields(self) -> tuple[str, ...]:
        return (
            "fp8_format", "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad",
            "x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim",
            "fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad", "fp8_dpa", "fp8_mha", "backward_override",
        )  # fmt: skip


@dataclass(repr=False)
class NVFP4BlockScaling(Recipe):
    """E2M1 with an E4M3 scale per 16 elements and an FP32 scale per tensor (arXiv:2509.25149).

    By default weights share a scale over 16x16 elements, gradients are rounded stochastically, and the operands of the
    weight gradient go through a random Hadamard transform; the three `disable_*` fields turn these off.
    """

    disable_rht: bool = os.getenv("NVTE_NVFP4_DISABLE_RHT", "0") == "1"
    disable_stochastic_rounding: bool = os.getenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "0") == "1"
    disable_2d_quantization: bool = os.getenv("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "0") == "1"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _BACKWARD_OVERRIDE

    def __post_init__(self) -> None:
        """Check the fields and derive the quantization options of the three operands."""
        super().__post_init__()
        _require(self.fp4_format == Format.E2M1, "Only E2M1 is supported for NVFP4 scaling")
        _require(self.fp8_format == Format.E4M3, "Only E4M3 is supported for NVFP4 scaling")
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=not self.disable_rht)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
        )

    def _repr_fields(self) -> tuple[str, ...]:
        return (
            "fp4_format", "fp8_format", "fp8_dpa", "fp8_mha", "backward_override",
            "fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad",
        )  # fmt: skip
