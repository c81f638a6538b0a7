"""Transformer Engine's precision recipes: the format and the scaling of each operand of a GEMM.

Class names, fields, defaults and messages follow `transformer_engine.common.recipe` 2.20 (section 1 of
docs/internals/transformer_engine.md), with two differences. An unknown or ill-typed field raises a ValueError that
names the nearest valid one, where Transformer Engine ignores it. CustomRecipe and the fields for row scaling and
"4over6" of NVFP4 are not emulated. Defaults that come from the environment are read once, when this module is imported.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from te_models.errors import check_known, require, unknown
from te_models.numerics.formats import DType

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")
# Transformer Engine reads its environment variables when it is imported, and so does this.
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


_TYPES = {"int": int, "bool": bool, "str": str, "Format": Format, "MMParams": MMParams}


def _typed(value: Any, kind: type) -> object:
    """Return `value` as a `kind`; raise a TypeError or a ValueError if it is something else."""
    # 0 and 1 are booleans in TOML files and flags; 2 is an error.
    if kind is bool and value in (True, False):
        return bool(value)
    if kind is int and not isinstance(value, bool) and float(value).is_integer():
        return int(float(value))
    if kind in (bool, int) or not isinstance(value, kind):
        raise TypeError
    return value


def refuse_options(owner: str, **options: object) -> None:
    """Raise a NotImplementedError for an option of Transformer Engine's that is given and not emulated."""
    # A falsy value asks for nothing, such as the default of Transformer Engine's signature.
    unsupported = [f"{owner}({name}={value!r})" for name, value in options.items() if value]
    require(
        not unsupported,
        f"{', '.join(unsupported)} is not emulated: leave it out",
        NotImplementedError,
    )


def _predicate(*names: str) -> Any:
    """Return a class method that is True for the recipes of these names."""

    def holds(cls: type) -> bool:
        # By name, over the bases, so that a user's subclass of a recipe counts as that recipe.
        return any(base.__name__ in names for base in cls.__mro__)

    return classmethod(holds)


def fp8_dtype(fp8_format: Format, forward: bool) -> DType:
    """Return the FP8 type of forward tensors or of gradients."""
    e4m3 = fp8_format == Format.E4M3 or (fp8_format == Format.HYBRID and forward)
    return DType.kFloat8E4M3 if e4m3 else DType.kFloat8E5M2


class Recipe:
    """Base of all recipes. Equality compares the declared fields; `repr` is the key of the global amax registry."""

    fp8_format: Format
    backward_override: str | None
    # The fields in `repr`, by which the registry of delayed scales tells recipes apart.
    _shown: ClassVar[tuple[str, ...]]

    delayed = _predicate("DelayedScaling")
    float8_current_scaling = _predicate("Float8CurrentScaling")
    float8_per_tensor_scaling = _predicate("DelayedScaling", "Float8CurrentScaling")
    float8_block_scaling = _predicate("Float8BlockScaling")
    mxfp8 = _predicate("MXFP8BlockScaling")
    nvfp4 = _predicate("NVFP4BlockScaling")

    def __new__(cls, *args: object, **kwargs: object) -> Recipe:
        """Raise a ValueError for a keyword that is not a field of the recipe."""
        names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        for name in kwargs:
            if name in names:
                continue
            # A class attribute in Transformer Engine, which people take for a field.
            if name.startswith("fp8_quant_") and name in vars(cls):
                raise ValueError(
                    f"{name} is not a field of {cls.__name__}: assign it to the recipe after construction"
                )
            raise unknown(f"field of {cls.__name__}", name, names)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check types, and the rules that all recipes share."""
        for field in dataclasses.fields(cast("DataclassInstance", self)):
            if kind := _TYPES.get(str(field.type)):
                value = getattr(self, field.name)
                try:
                    setattr(self, field.name, _typed(value, kind))
                except (TypeError, ValueError):
                    owner = type(self).__name__
                    raise ValueError(
                        f"{owner}.{field.name} must be of type {field.type}, not {value!r}"
                    ) from None
        require(
            self.backward_override in _BACKWARD_OVERRIDES,
            "NVTE_BACKWARD_OVERRIDE must be unset or one of: 'high_precision', 'dequantized'.",
        )
        # NVFP4 has its own message for a format other than E4M3.
        e5m2 = self.fp8_format == Format.E5M2 and not self.nvfp4()
        require(not e5m2, "Pure E5M2 training is not supported.")

    def __repr__(self) -> str:
        shown = [f"recipe_type={type(self).__name__}"]
        for name in self._shown:
            value = getattr(self, name)
            shown.append(f"{name}={value.name if isinstance(value, Format) else value}")
        # The texts of Transformer Engine, which saved states contain.
        text = ", ".join(shown)
        return text if self.nvfp4() else text.replace("fp8_format=", "format=")

    def options(self, operand: str) -> QParams:
        """Return the quantization options of "fwd_inp", "fwd_weight" or "bwd_grad"."""
        return getattr(self, f"{'fp4' if self.nvfp4() else 'fp8'}_quant_{operand}")

    @property
    def split_accumulators(self) -> tuple[bool, bool, bool]:
        """Split accumulation in the forward, input gradient and weight gradient GEMMs (section 7.6)."""
        return False, True, True


@dataclass(repr=False)
class DelayedScaling(Recipe):
    """One scale per tensor, from the amaxes of the last `amax_history_len` steps."""

    _shown = (
        "margin",
        "fp8_format",
        "amax_history_len",
        "reduce_amax",
        "fp8_dpa",
        "fp8_mha",
        "backward_override",
    )
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
        require(
            self.backward_override is None, "Delayed scaling only supports backward_override=None."
        )
        require(
            self.amax_history_len >= 1,
            f"amax_history_len must be at least 1, not {self.amax_history_len}",
        )
        # A function of the user's is not emulated.
        check_known("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        require(
            self.scaling_factor_compute_algo is None,
            "scaling_factor_compute_algo is not emulated: leave it out",
        )


@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from the tensor itself. te.Linear reads its quantization options from `fp8_quant_*`."""

    _shown = (
        "fp8_format",
        "fp8_quant_fwd_inp",
        "fp8_quant_fwd_weight",
        "fp8_quant_bwd_grad",
        "fp8_gemm_fprop",
        "fp8_gemm_dgrad",
        "fp8_gemm_wgrad",
        "fp8_dpa",
        "fp8_mha",
        "backward_override",
    )
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

    @property
    def split_accumulators(self) -> tuple[bool, bool, bool]:
        """Split accumulation in the forward, input gradient and weight gradient GEMMs (section 7.6)."""
        gemms = self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad
        fprop, dgrad, wgrad = (gemm.use_split_accumulator for gemm in gemms)
        return fprop, dgrad, wgrad


@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale (E8M0) per 32 consecutive elements; `margin` is unused."""

    _shown = ("margin", "fp8_format", "backward_override", "enable_2d_quantization")
    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _BACKWARD_OVERRIDE
    enable_2d_quantization: bool = False


@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    """One FP32 scale per 1x128 (dim 1) or 128x128 (dim 2) elements; `fp8_quant_*` restricts scales to powers of two."""

    _shown = (
        "fp8_format",
        "fp8_quant_fwd_inp",
        "fp8_quant_fwd_weight",
        "fp8_quant_bwd_grad",
        "x_block_scaling_dim",
        "w_block_scaling_dim",
        "grad_block_scaling_dim",
        "fp8_gemm_fprop",
        "fp8_gemm_dgrad",
        "fp8_gemm_wgrad",
        "fp8_dpa",
        "fp8_mha",
        "backward_override",
    )
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
        dims = {
            "x": self.x_block_scaling_dim,
            "w": self.w_block_scaling_dim,
            "grad": self.grad_block_scaling_dim,
        }
        for name, dim in dims.items():
            require(dim in (1, 2), f"Only 1D or 2D blocks supported for {name}")
        # cuBLAS has no product of two operands with 128 x 128 blocks.
        require(list(dims.values()).count(2) <= 1, "2D by 2D block gemm not supported.")
        gemms = {
            "fprop": self.fp8_gemm_fprop,
            "dgrad": self.fp8_gemm_dgrad,
            "wgrad": self.fp8_gemm_wgrad,
        }
        for name, gemm in gemms.items():
            require(gemm.use_split_accumulator, f"Split accumulator required for {name}.")
        require(
            not self.fp8_dpa and not self.fp8_mha,
            "FP8 attention is not supported for Float8BlockScaling.",
        )

    split_accumulators = Float8CurrentScaling.split_accumulators


@dataclass(repr=False)
class NVFP4BlockScaling(Recipe):
    """E2M1 with an E4M3 scale per 16 elements and an FP32 scale per tensor (arXiv:2509.25149).

    By default weights share a scale over 16x16 elements, gradients are rounded stochastically, and the operands of the
    weight gradient go through a random Hadamard transform; the three `disable_*` fields turn these off.
    """

    _shown = (
        "fp4_format",
        "fp8_format",
        "fp8_dpa",
        "fp8_mha",
        "backward_override",
        "fp4_quant_fwd_inp",
        "fp4_quant_fwd_weight",
        "fp4_quant_bwd_grad",
    )
    disable_rht: bool = os.getenv("NVTE_NVFP4_DISABLE_RHT", "0") == "1"
    disable_stochastic_rounding: bool = (
        os.getenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "0") == "1"
    )
    disable_2d_quantization: bool = os.getenv("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "0") == "1"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _BACKWARD_OVERRIDE

    def __post_init__(self) -> None:
        """Check the fields and derive the quantization options of the three operands."""
        super().__post_init__()
        require(self.fp4_format == Format.E2M1, "Only E2M1 is supported for NVFP4 scaling")
        require(self.fp8_format == Format.E4M3, "Only E4M3 is supported for NVFP4 scaling")
        # The transform is for the operands of the weight gradient, x and dy.
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=not self.disable_rht)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
        )
