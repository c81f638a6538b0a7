"""Verify that FP8 runs: every distinct GEMM of a model, with its error and, on a GPU, its speed-up.

A training pass records the input and output gradient of each linear. A copy of the linear then runs on them without and
with the recipe's autocast. Three things are compared: the dtype of the tensors saved for backward, whether the results
of the three GEMMs (fprop y, dgrad dx, wgrad dw) differ from those in BF16 at all, and by how much. A linear that ran in
BF16 cannot pass as FP8, since its results equal BF16's in every bit.
"""

import contextlib
import dataclasses
import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, cast

import torch
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.config.layer import LinearSpec
from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe
from te_models.errors import check_least
from te_models.fp8.scaling_state import frozen_fp8_state, gemms_of
from te_models.inspect.roofline import timed
from te_models.model.decoder_of import decoder_of
from te_models.planning.precision_plan import UNQUANTIZED, PrecisionPlan
from te_models.planning.printable import Printable

GEMMS = ("fprop", "dgrad", "wgrad")
FP8_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
WARM_UP = 3  # passes before the measured one: a delayed scale follows its tensor one pass late
ROUNDS = 20

# Rates of one H200 with Transformer Engine 2.20.2: GEMMs of 16,384 rows (the middle of the range) in FLOP/s, and a
# device copy in bytes/s. Small GEMMs are slower, so an estimate from these rates is an upper bound.
H200_BF16 = 720e12
H200_FP8 = 1250e12
H200_COPY = 4.15e12
# Seconds per linear (BF16, forward and backward) below which kernel launches cancelled the gain of FP8 on that GPU:
# gated-124m with 0.6 ms and gated-350m with 0.9 ms gained nothing, gated-1b with 1.9 ms gained 1.25x.
LAUNCH_BOUND = 1e-3


class Trial(NamedTuple):
    """One forward and backward of a linear."""

    results: tuple[Tensor, ...]  # y, dx, dw
    saved_fp8: bool  # for backward
    quantizers: tuple[str, ...]  # of x, w and dy; none in BF16


@dataclasses.dataclass(frozen=True)
class Verified:
    """The findings on one distinct linear; tuples have one entry per name in `GEMMS`."""

    module: str
    inputs: int
    outputs: int
    rows: int
    in_fp8: int  # number of linears of this kind that the plan has below BF16
    in_bf16: int  # and of those in BF16
    quantizers: tuple[str, ...]
    saved_fp8: bool
    differs: tuple[bool, ...]  # from the BF16 result, in any bit
    sqnr_db: tuple[float, ...]  # against the BF16 result; infinite where they are equal
    # Times under "bf16" and "recipe", forward and backward; None if not timed.
    milliseconds: dict[str, float] | None
    formats: str = "E4M3/E5M2"  # of its recipe, as is the next
    override: str = "none"
    num_gemms: int = 1  # one, or one per expert, which share the rows

    def h200_seconds(self) -> tuple[float, float]:
        """Return an estimate of forward and backward on an H200: seconds in BF16, and in FP8 with casts of x, w and dy.

        A cast reads two bytes per element and writes one each for the rowwise and the columnwise copy.
        """
        work = 2 * len(GEMMS) * self.rows * self.inputs * self.outputs
        weights = self.num_gemms * self.inputs * self.outputs
        elements = self.rows * self.inputs + weights + self.rows * self.outputs
        return work / H200_BF16, work / H200_FP8 + 4 * elements / H200_COPY


@dataclasses.dataclass(frozen=True)
class Verification(Printable):
    """The findings of `verify`. Print it for a table with a verdict; `to_dict` returns plain JSON values."""

    width: ClassVar[int] = 160

    recipe: Recipe
    engine: str
    device: str
    gemms: tuple[Verified, ...]

    @property
    def failures(self) -> list[str]:
        """Modules that the plan has below BF16 but that ran in BF16."""
        return [gemm.module for gemm in self.gemms if gemm.in_fp8 and not self.ran(gemm)]

    def ran(self, gemm: Verified) -> bool:
        """Return whether a linear ran below BF16 in every GEMM for which the recipe asks so, by all evidence."""
        # Under that override only the forward is quantized: backward in BF16 is what the recipe asks for.
        shown = gemm.differs[:1] if gemm.override == "high_precision" else gemm.differs
        saved = gemm.saved_fp8 or gemm.override == "high_precision"
        return all(shown) and saved and len(gemm.quantizers) == len(GEMMS)

    def ran_in(self, gemm: Verified, number: int) -> str:
        """Return the precision that GEMM `number` (an index into `GEMMS`) of a linear ran in."""
        if not gemm.differs[number]:
            return "BF16"
        if number and gemm.override == "dequantized":
            return "BF16 of dequantized"
        return "FP4" if gemm.formats == "E2M1" else "FP8"

    def verdict(self) -> list[str]:
        """Return the conclusions, one sentence each."""
        fp8 = sum(gemm.in_fp8 for gemm in self.gemms)
        bf16 = sum(gemm.in_bf16 for gemm in self.gemms)
        if not fp8:
            return [
                f"All {bf16} linears run in BF16: recipe {self.recipe.name!r} quantizes nothing. "
                "Try --recipe delayed."
            ]
        if failed := ", ".join(self.failures):
            return [
                f"FP8 DID NOT RUN in {failed}: their results equal BF16's, or no FP8 data was saved."
            ]
        formats = " and ".join(dict.fromkeys(gemm.formats for gemm in self.gemms if gemm.in_fp8))
        ran = f"{formats} really ran in {fp8} of {fp8 + bf16} linears; {bf16} are in BF16, as planned."
        return [ran, *self._measured(), *self._estimate()]

    def _measured(self) -> list[str]:
        before = 0.0
        after = 0.0
        for gemm in self.gemms:
            if gemm.in_fp8 and gemm.milliseconds is not None:
                before += gemm.in_fp8 * gemm.milliseconds["bf16"]
                after += gemm.in_fp8 * gemm.milliseconds["recipe"]
        if not before:
            return ["Nothing was timed: the emulated engine has the numbers of FP8, not its speed."]
        line = f"These linears take {before:.2f} ms per step in BF16 and {after:.2f} ms under {self.recipe.name!r}"
        if after < before:
            return [f"{line}: {before / after:.2f}x as fast."]
        return [f"{line}: FP8 does not pay at this size on this GPU. {ADVICE}"]

    def _estimate(self) -> list[str]:
        """Estimate the speed-up on an H200 if nothing could be measured."""
        fp8 = [gemm for gemm in self.gemms if gemm.in_fp8]
        if any(gemm.milliseconds for gemm in fp8):
            return []  # a measurement is better
        if self.recipe.scheme in ("MXFP8BlockScaling", "NVFP4BlockScaling"):
            return [f"No estimate of its speed: an H200 does not run {self.recipe.scheme}."]
        before = 0.0
        after = 0.0
        for gemm in fp8:
            in_bf16, in_recipe = gemm.h200_seconds()
            before += gemm.in_fp8 * in_bf16
            after += gemm.in_fp8 * in_recipe
        each = before / sum(gemm.in_fp8 for gemm in fp8)
        rows = fp8[0].rows
        if each < LAUNCH_BOUND:
            took = f"{each * 1e3:.1g}" if each >= 1e-6 else "less than 0.001"
            return [
                f"On an H200 do not expect FP8 to pay at this size: with {rows:,} rows a linear takes "
                f"{took} ms forward and backward in BF16, and below {LAUNCH_BOUND * 1e3:.0f} ms launches "
                f"cancel the gain. {ADVICE}"
            ]
        return [
            f"On an H200 expect these linears to be at best {before / after:.2f}x as fast as in BF16 (estimated)."
        ]

    def to_dict(self) -> dict[str, object]:
        """Return all findings as plain JSON values; an infinite SQNR is null."""
        rows = []
        for gemm in self.gemms:
            decibels: list[float | None] = []
            for value in gemm.sqnr_db:
                decibels.append(None if math.isinf(value) else round(value, 2))
            ran = [self.ran_in(gemm, number) for number in range(len(GEMMS))]
            rows.append(
                {
                    **dataclasses.asdict(gemm),
                    "sqnr_db": dict(zip(GEMMS, decibels, strict=True)),
                    "differs": dict(zip(GEMMS, gemm.differs, strict=True)),
                    "ran_in": dict(zip(GEMMS, ran, strict=True)),
                }
            )
        about = dict(recipe=self.recipe.to_dict(), engine=self.engine, device=self.device)
        return {**about, "gemms": rows, "ok": not self.failures, "verdict": self.verdict()}

    def __rich__(self) -> Group:
        names = ["rows", "in -> out", "quantized", *GEMMS]
        if any(gemm.milliseconds for gemm in self.gemms):
            names += ["BF16 ms", "FP8 ms"]
        columns = (Column(name, justify="right") for name in names)
        table = Table("module", *columns, box=None, pad_edge=False)
        for gemm in self.gemms:
            shape = f"{gemm.inputs} -> {gemm.outputs}"
            linears = f"{gemm.in_fp8} of {gemm.in_fp8 + gemm.in_bf16}"
            passes = []
            for number, decibels in enumerate(gemm.sqnr_db):
                precision = self.ran_in(gemm, number)
                passes.append(precision if "BF16" in precision else f"{decibels:.1f}")
            times = []
            if gemm.milliseconds:
                times = [f"{time:.3f}" for time in gemm.milliseconds.values()]
            if gemm.module in self.failures:
                style = "red"
            elif gemm.in_fp8:
                style = "green"
            else:
                style = ""
            table.add_row(gemm.module, f"{gemm.rows}", shape, linears, *passes, *times, style=style)
        title = Text(f"recipe {self.recipe.name}, engine {self.engine} on {self.device}", "bold")
        legend = "fprop, dgrad, wgrad: dB (SQNR) between the result and BF16's; BF16 where they are equal\n"
        return Group(title, table, legend, *self.verdict(), *self._quantizers())

    def _quantizers(self) -> list[str]:
        """Return a line per set of quantizers, with the modules that have it where there are several."""
        modules: dict[str, list[str]] = {}
        for gemm in self.gemms:
            kinds = [name.removesuffix("Quantizer") for name in dict.fromkeys(gemm.quantizers)]
            modules.setdefault(", ".join(kinds), []).append(gemm.module)
        modules.pop("", None)  # the linears in BF16
        lines = []
        for names, linears in modules.items():
            where = f" in {', '.join(linears)}" if len(modules) > 1 else ""
            lines.append(f"Quantizers of x, w and dy{where}: {names}.")
        return lines


ADVICE = "Raise the rows per step (--batch-size, --seq-len), or use --recipe bf16."


def verify(
    model: nn.Module, batch_size: int, seq_len: int, plan: PrecisionPlan | None = None
) -> Verification:
    """Run every distinct GEMM of a model with and without FP8 on random tokens; the model is unchanged afterwards.

    `model` is a CausalLM, or a TEModelsForCausalLM. `plan` is the one to count linears in, if `model` is a shortened
    sample of a larger one (`sample_config`).

    Raises:
        UsageError: a size is below 1, or the sequence is longer than the model allows.
    """
    check_least(1, batch_size=batch_size, seq_len=seq_len)
    model = cast(CausalLM, decoder_of(model))
    in_fp8: Counter[str] = Counter()
    in_bf16: Counter[str] = Counter()
    for label, unquantized in _labels(plan or model.plan()):
        if unquantized:
            in_bf16[label] += 1
        else:
            in_fp8[label] += 1
    gemms = []
    with frozen_fp8_state(model):
        for label, call in _calls_in_training(model, batch_size, seq_len).items():
            gemms.append(
                _verified(model, label, call, in_fp8=in_fp8[label], in_bf16=in_bf16[label])
            )
    return Verification(model.recipe, model.engine, model.device.type, tuple(gemms))


def sample_config(config: ModelConfig, recipe: Recipe) -> ModelConfig:
    """Return `config` with one layer of all with the same GEMMs in one precision: enough for an untrained model.

    A recipe whose patterns may name layers needs all of them.
    """
    # Patterns may name layers by number, which a shortened model would shift.
    if recipe.precision:
        return config
    count = config.num_hidden_layers
    inside = recipe.fp8_layers(count) or range(count)
    first: dict[tuple[LinearSpec, ...], int] = {}  # one layer of all that have the same GEMMs
    for depth in inside:
        # Linears compare equal where sizes and roles do, whatever their layer.
        first.setdefault(tuple(config.layers[depth].linears.values()), depth)
    return config.with_layers([*range(inside.start), *first.values(), *range(inside.stop, count)])


class LinearCall(NamedTuple):
    """A call of a linear in a training pass.

    Attributes:
        linear: the te.Linear or te.GroupedLinear.
        inputs: its arguments, of which the first is the input [N, I].
        dy: the gradient of its output [N, O].
    """

    linear: nn.Module
    inputs: tuple[Any, ...]
    dy: Tensor


def _calls_in_training(model: CausalLM, batch_size: int, seq_len: int) -> dict[str, LinearCall]:
    """Return label -> call, of one linear of each label (`_labels`) in a training pass on random tokens.

    Of several linears with one label, take the first in the recipe, or one in BF16 if there is no other. A router whose
    weight is used in FP32 is not called, and left out.
    """
    chosen: dict[str, nn.Module] = {}
    chosen_in_bf16: set[str] = set()
    linears = [module for module in model.modules() if isinstance(module, model.te.LINEARS)]
    for (label, unquantized), linear in zip(_labels(model.plan()), linears, strict=True):
        # One in the recipe says more than one in BF16.
        if label not in chosen or (label in chosen_in_bf16 and not unquantized):
            chosen[label] = linear
            if unquantized:
                chosen_in_bf16.add(label)
            else:
                chosen_in_bf16.discard(label)
    inputs_of: dict[nn.Module, tuple[Any, ...]] = {}
    gradients: dict[nn.Module, Tensor] = {}

    def keep(linear: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        def keep_gradient(gradient: Tensor) -> None:
            gradients[linear] = gradient.detach().clone()

        inputs_of[linear] = (inputs[0].detach(), *inputs[1:])
        output.register_hook(keep_gradient)

    ids = torch.randint(0, model.config.vocab_size, (batch_size, seq_len), device=model.device)
    with contextlib.ExitStack() as stack:
        for linear in chosen.values():
            stack.enter_context(linear.register_forward_hook(keep))
        stack.callback(model.train, model.training)
        stack.callback(setattr, model, "activation_checkpointing", model.activation_checkpointing)
        # With fused kernels the input of a linear may be quantized already.
        stack.enter_context(model.unfused())
        model.activation_checkpointing = "none"  # a recompute would be a second forward
        loss = model.train()(ids, labels=ids).loss
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        torch.autograd.grad(loss, trained, allow_unused=True)
    calls = {}
    for label, linear in chosen.items():
        if linear in inputs_of:
            calls[label] = LinearCall(linear, inputs=inputs_of[linear], dy=gradients[linear])
    return calls


def _labels(plan: PrecisionPlan) -> Iterator[tuple[str, bool]]:
    """Yield the label under which each linear is listed, and whether it is unquantized: in BF16, FP32 or FP16.

    A label is the name of the module; with the precision, where a module of this name has another one in an earlier
    layer.
    """
    first_precision: dict[str, str] = {}
    for row in plan:
        unquantized = row.precision in UNQUANTIZED
        label = row.module
        if not unquantized:
            first = first_precision.setdefault(row.module, row.precision)
            if first != row.precision:
                label = f"{row.module} ({row.precision})"
        yield label, unquantized


@torch.enable_grad()
def _verified(model: CausalLM, label: str, call: LinearCall, in_fp8: int, in_bf16: int) -> Verified:
    """Verify one linear on its recorded call; `in_fp8` and `in_bf16` count the linears of its label."""
    te = model.te
    linear: Any = call.linear
    inputs = call.inputs
    dy = call.dy
    # The trials change scales and gradients: the model keeps its own.
    copy = _copy(model, linear)
    names = {module: name for name, module in model.named_modules()}
    module_name = names[linear]
    recipe = model.precision.te_recipe_of(module_name)
    used = model.precision.recipe_of(module_name) or model.recipe
    try:
        bf16 = _trial(te, copy, inputs, dy, None)
        # Delayed scaling finds its scale from the passes before; the other recipes only warm up.
        trial = [_trial(te, copy, inputs, dy, recipe) for _ in range(WARM_UP)][-1]
        differs = tuple(
            not torch.equal(a, b) for a, b in zip(bf16.results, trial.results, strict=True)
        )
        decibels = tuple(sqnr_db(a, b) for a, b in zip(bf16.results, trial.results, strict=True))
        times = None
        # The emulated engine's time is meaningless.
        if dy.is_cuda and model.engine == "native" and recipe is not None:
            times = _milliseconds(
                {
                    "bf16": lambda: _trial(te, copy, inputs, dy, None),
                    "recipe": lambda: _trial(te, copy, inputs, dy, recipe),
                }
            )
    finally:
        # The engine keeps every module that has run under an autocast, to update its scales.
        te.reset_fp8_state(copy)
    return Verified(
        module=label,
        inputs=linear.in_features,
        outputs=linear.out_features,
        rows=len(dy),
        in_fp8=in_fp8,
        in_bf16=in_bf16,
        quantizers=trial.quantizers,
        saved_fp8=trial.saved_fp8,
        differs=differs,
        sqnr_db=decibels,
        milliseconds=times,
        formats=used.formats,
        override=used.fields.get("backward_override", "none"),
        num_gemms=gemms_of(linear),
    )


def _copy(model: CausalLM, linear: Any) -> nn.Module:
    """Return a linear with the same parameters and its own FP8 state."""
    parameters = dict(linear.named_parameters())
    te = model.te
    bias = any(name.startswith("bias") for name in parameters)
    make = te.Linear
    if isinstance(linear, te.GroupedLinear):
        make = functools.partial(te.GroupedLinear, linear.num_gemms)
    copy = make(
        linear.in_features,
        linear.out_features,
        bias=bias,
        params_dtype=model.dtype,
        device=model.device,
    )
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            parameter.copy_(parameters[name])
    return copy


def _trial(te: Any, linear: Any, inputs: tuple[Any, ...], dy: Tensor, recipe: Any) -> Trial:
    """Run forward and backward of one linear under `recipe` (None: BF16)."""
    saved: list[bool] = []
    x = inputs[0].detach().requires_grad_()

    def pack(tensor: Tensor) -> Tensor:
        # FP8 data that backward keeps is evidence that a GEMM read it.
        saved.append(tensor.dtype in FP8_DTYPES)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, te.autocast(enabled=recipe is not None, recipe=recipe):
        y = linear(x, *inputs[1:])
    weights = []
    for name, parameter in linear.named_parameters():
        if name.startswith("weight"):
            weights.append(parameter)
    dx, *dw = torch.autograd.grad(y, (x, *weights), dy)
    quantizers: tuple[str, ...] = ()
    if recipe is not None:
        used = (*linear.quantizers["scaling_fwd"][:2], *linear.quantizers["scaling_bwd"][:1])
        quantizers = tuple(type(quantizer).__name__ for quantizer in used)
    return Trial((y.detach(), dx, torch.stack(dw)), any(saved), quantizers)


def _milliseconds(variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median milliseconds of each variant, from CUDA events, in rounds that alternate them."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS + WARM_UP):
        for name, run in variants.items():
            # Alternating, so that a change of the clock meets both.
            times[name].append(timed(run))
    return {name: statistics.median(measured[WARM_UP:]) for name, measured in times.items()}


def sqnr_db(reference: Tensor, got: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio of `got` in dB; infinite if the two are equal."""
    reference = reference.double()
    got = got.double()
    noise = (reference - got).norm()
    return math.inf if noise == 0 else (20 * torch.log10(reference.norm() / noise)).item()
