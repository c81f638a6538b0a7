"""Did FP8 really run, what did it cost in exactness, and did it pay: every distinct GEMM of a model, tried out.

A pass of the model gives each linear the input and the output gradient that it meets in training. With those a copy of the
linear runs twice, without and with the recipe's autocast, and three things are looked at: what was kept for backward (codes
or BF16), whether the results of the three GEMMs (fprop y, dgrad dx, wgrad dw) differ from BF16's at all, and by how much. A
linear that ran in BF16 cannot pass as FP8: its results are BF16's to the bit.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe
from te_models.fp8.scaling_state import frozen_fp8_state
from te_models.planning.precision_plan import Plan

GEMMS = ("fprop", "dgrad", "wgrad")
CODES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
WARM_UP = 3  # passes before the one that counts: a delayed scale follows its tensor one pass late
ROUNDS = 20

# What one H200 reached with Transformer Engine 2.20.2 in GEMMs of 16,384 rows, the middle of the range, in FLOP/s, and in
# a device copy, in bytes/s. Small GEMMs reach less, so an estimate from these is the best to hope for.
H200_BF16, H200_FP8, H200_COPY = 720e12, 1250e12, 4.15e12
# Seconds of BF16 a linear, forward and backward, below which nothing was left of FP8's gain there: launches took the
# time (gated-124m and gated-350m, 0.6 and 0.9 ms); gated-1b with 1.9 ms a linear gained 1.25x.
LAUNCH_BOUND = 1e-3


class Trial(NamedTuple):
    """A linear's results y, dx, dw; whether codes were kept for backward; the quantizers of x, w and dy ([] in BF16)."""

    results: tuple[Tensor, ...]
    kept_codes: bool
    quantizers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Verified:
    """One distinct GEMM; tuples have an entry for each of `GEMMS`."""

    module: str
    inputs: int
    outputs: int
    rows: int
    in_fp8: int  # linears of this kind that the plan has below BF16 ...
    in_bf16: int  # ... and in BF16
    quantizers: tuple[str, ...]
    kept_codes: bool
    differs: tuple[bool, ...]  # from BF16's result, in any bit
    sqnr_db: tuple[float, ...]  # against BF16's result; infinite where they are equal
    milliseconds: dict[str, float] | None  # "bf16" and "recipe", forward and backward; None where nothing was timed

    def h200_seconds(self) -> tuple[float, float]:
        """Forward and backward on an H200 at its best: in BF16, and in FP8 with the casts of x, w and dy.

        A cast reads two bytes an element and writes two codes, rowwise and columnwise.
        """
        work = 2 * len(GEMMS) * self.rows * self.inputs * self.outputs
        elements = self.rows * self.inputs + self.inputs * self.outputs + self.rows * self.outputs
        return work / H200_BF16, work / H200_FP8 + 4 * elements / H200_COPY


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found. Prints as a table with a verdict; `to_dict` has plain JSON values."""

    recipe: Recipe
    engine: str
    device: str
    gemms: tuple[Verified, ...]

    @property
    def failures(self) -> list[str]:
        """The modules that the plan has below BF16 and that did not run there."""
        return [gemm.module for gemm in self.gemms if gemm.in_fp8 and not self.ran(gemm)]

    def ran(self, gemm: Verified) -> bool:
        """Whether a linear ran below BF16, in all GEMMs that the recipe has there, by every sign there is."""
        override = self.recipe.fields.get("backward_override", "none")
        wanted = gemm.differs[:1] if override == "high_precision" else gemm.differs
        codes = gemm.kept_codes or override == "high_precision"
        return all(wanted) and codes and len(gemm.quantizers) == len(GEMMS)

    def ran_in(self, gemm: Verified, number: int) -> str:
        """What GEMM `number` of a linear ran in."""
        override = self.recipe.fields.get("backward_override", "none")
        if not gemm.differs[number]:
            return "BF16"
        if number and override == "dequantized":
            return "BF16 of dequantized"
        return "FP4" if self.recipe.formats == "E2M1" else "FP8"

    def verdict(self) -> list[str]:
        """What it all means, a sentence each."""
        fp8, bf16 = (sum(getattr(gemm, name) for gemm in self.gemms) for name in ("in_fp8", "in_bf16"))
        if not fp8:
            return [
                f"All {bf16} linears run in BF16: recipe {self.recipe.name!r} quantizes nothing. Try --recipe delayed."
            ]
        if self.failures:
            return [f"FP8 DID NOT RUN in {', '.join(self.failures)}: their results are BF16's, or no codes were kept."]
        ran = f"{self.recipe.formats} really ran in {fp8} of {fp8 + bf16} linears; {bf16} are in BF16, as planned."
        return [ran, *self._measured(), *self._estimate()]

    def _measured(self) -> list[str]:
        times = [
            (gemm.milliseconds["bf16"] * gemm.in_fp8, gemm.milliseconds["recipe"] * gemm.in_fp8)
            for gemm in self.gemms
            if gemm.in_fp8 and gemm.milliseconds is not None
        ]
        if not times:
            return ["Nothing was timed: the emulated engine shows FP8's numbers, not its speed."]
        before, after = (sum(column) for column in zip(*times, strict=True))
        said = f"These linears take {before:.2f} ms a step in BF16 and {after:.2f} ms under {self.recipe.name!r}"
        if after < before:
            return [f"{said}: {before / after:.2f}x as fast."]
        return [f"{said}: FP8 does not pay at this size on this GPU. {ADVICE}"]

    def _estimate(self) -> list[str]:
        """What to expect of a GPU, where there is none to measure."""
        fp8 = [gemm for gemm in self.gemms if gemm.in_fp8]
        if any(gemm.milliseconds for gemm in fp8):
            return []  # a measurement says more
        if self.recipe.scheme in ("MXFP8BlockScaling", "NVFP4BlockScaling"):
            return [f"No estimate of its speed: it needs {self.recipe.hardware}."]
        seconds = [[gemm.in_fp8 * time for time in gemm.h200_seconds()] for gemm in fp8]
        before, after = (sum(column) for column in zip(*seconds, strict=True))
        each, rows = before / sum(gemm.in_fp8 for gemm in fp8), fp8[0].rows
        if each < LAUNCH_BOUND:
            return [f"On an H200 do not expect FP8 to pay at this size: with {rows:,} rows a linear takes {each * 1e3:.1g} "
                    f"ms forward and backward in BF16, and below {LAUNCH_BOUND * 1e3:.0f} ms launches eat the gain. {ADVICE}"]  # fmt: skip
        return [f"On an H200 expect these linears to be at best {before / after:.2f}x as fast as in BF16 (estimated)."]

    def to_dict(self) -> dict[str, Any]:
        """Everything found, as plain JSON values; an infinite SQNR is null."""
        rows = []
        for gemm in self.gemms:
            decibels = [None if math.isinf(value) else round(value, 2) for value in gemm.sqnr_db]
            ran = [self.ran_in(gemm, number) for number in range(len(GEMMS))]
            rows.append({**dataclasses.asdict(gemm), "sqnr_db": dict(zip(GEMMS, decibels, strict=True)),
                         "differs": dict(zip(GEMMS, gemm.differs, strict=True)),
                         "ran_in": dict(zip(GEMMS, ran, strict=True))})  # fmt: skip
        about = dict(recipe=self.recipe.to_dict(), engine=self.engine, device=self.device)
        return {**about, "gemms": rows, "ok": not self.failures, "verdict": self.verdict()}

    def __rich__(self) -> Group:
        table = Table(box=None, pad_edge=False)
        timed = any(gemm.milliseconds for gemm in self.gemms)
        for column in (
            "module",
            "gemm",
            "linears",
            "quantizers of x, w, dy",
            *GEMMS,
            *(["BF16 / FP8 ms"] if timed else []),
        ):
            table.add_column(column)
        for gemm in self.gemms:
            counts = ((gemm.in_fp8, "FP8" if self.recipe.formats != "E2M1" else "FP4"), (gemm.in_bf16, "BF16"))
            linears = " + ".join(f"{count} {kind}" for count, kind in counts if count)
            passes = [
                self.ran_in(gemm, i) + (f" {gemm.sqnr_db[i]:.1f} dB" if gemm.differs[i] else "")
                for i in range(len(GEMMS))
            ]
            shape = f"{gemm.rows} x {gemm.inputs} -> {gemm.outputs}"
            names = ", ".join(dict.fromkeys(gemm.quantizers)) or "none"
            ms = gemm.milliseconds
            times = [f"{ms['bf16']:.3f} / {ms['recipe']:.3f} ({ms['bf16'] / ms['recipe']:.2f}x)" if ms else ""]
            style = "red" if gemm.module in self.failures else "green" if gemm.in_fp8 else ""
            table.add_row(gemm.module, shape, linears, names, *passes, *(times if timed else []), style=style)
        title = Text(f"recipe {self.recipe.name}, engine {self.engine} on {self.device}; dB: SQNR against BF16", "bold")
        return Group(title, table, "", *self.verdict())

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=160, no_color=True).print(self)
        return out.getvalue().rstrip()


ADVICE = "Give a GPU more rows at a time (--batch-size, --seq-len), or take --recipe bf16."


def verify(model: CausalLM, batch_size: int, seq_len: int, plan: Plan | None = None) -> Verification:
    """Try out every distinct GEMM of `model`, on random tokens [batch_size, seq_len]; leaves no trace in the model.

    `plan` is the one to count linears by, where `model` is a shortened sample of a larger one (`sample_config`).

    Raises:
        ValueError: the sequence is longer than the model allows.
    """
    counts: dict[str, list[int]] = {}
    for row in plan or model.plan():
        counts.setdefault(row.module, [0, 0])[row.precision in ("BF16", "FLOAT32", "FLOAT16")] += 1
    with frozen_fp8_state(model):
        met = _met_in_training(model, batch_size, seq_len)
        gemms = tuple(_verified(model, name, linear, x, dy, counts[name]) for name, (linear, x, dy) in met.items())
    return Verification(model.recipe, model.engine, model.device.type, gemms)


def sample_config(config: ModelConfig, recipe: Recipe) -> ModelConfig:
    """The config with one layer of each precision: what `verify` needs of a model that nobody has trained yet."""
    start, end = (recipe.num_layers_at_start_in_bf16, recipe.num_layers_at_end_in_bf16) if recipe.quantized else (0, 0)
    layers = min(config.num_hidden_layers, start + 1 + end)
    no_rope, types = config.no_rope_layers, config.layer_types
    return dataclasses.replace(
        config,
        num_hidden_layers=layers,
        no_rope_layers=no_rope and no_rope[:layers],
        layer_types=types and types[:layers],
    )


def _met_in_training(model: CausalLM, batch_size: int, seq_len: int) -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Module -> one linear of the kind, its input [N, I] and its output's gradient [N, O], as a pass meets them.

    Of several with one name the first that the recipe quantizes.
    """
    met: dict[str, list[Any]] = {}
    hooks = []
    for name, linear in model.named_modules():
        if isinstance(linear, model.te.Linear):
            layer, short = _kind(name)
            known = met.get(short)
            if known is None or (not known[1] and layer in model.fp8_layers):
                met[short] = [linear, layer in model.fp8_layers]
    found: dict[nn.Module, list[Tensor]] = {}

    def keep(linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found[linear] = [inputs[0].detach()]
        output.register_hook(lambda gradient: found[linear].append(gradient.detach().clone()))

    ids = torch.randint(0, model.config.vocab_size, (batch_size, seq_len), device=model.device)
    training, mode = model.training, model.activation_checkpointing
    try:
        model.activation_checkpointing = "none"  # a recompute would be a second forward
        hooks = [linear.register_forward_hook(keep) for linear, _ in met.values()]
        with model.unfused():  # fused, a linear may get codes already
            loss = model.train()(ids, labels=ids).loss
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    finally:
        model.train(training)
        model.activation_checkpointing = mode
        for hook in hooks:
            hook.remove()
    return {name: (linear, *found[linear]) for name, (linear, _) in met.items()}  # type: ignore[misc]


def _kind(name: str) -> tuple[int, str]:
    """ "layers.3.mlp.down_proj" -> (3, "mlp.down_proj"); what is in no layer has number -1."""
    if not name.startswith("layers."):
        return -1, name
    _, layer, short = name.split(".", 2)
    return int(layer), short


@torch.enable_grad()
def _verified(model: CausalLM, name: str, linear: Any, x: Tensor, dy: Tensor, counts: list[int]) -> Verified:
    """One linear, tried out on its input and output gradient."""
    te, copy = model.te, _copy(model, linear)
    recipe = model.te_recipe if counts[0] else None
    try:
        bf16 = _trial(te, copy, x, dy, None)
        trial = [_trial(te, copy, x, dy, recipe) for _ in range(WARM_UP)][-1]
        differs = tuple(not torch.equal(a, b) for a, b in zip(bf16.results, trial.results, strict=True))
        decibels = tuple(sqnr_db(a, b) for a, b in zip(bf16.results, trial.results, strict=True))
        times = None
        if x.is_cuda and model.engine == "native" and recipe is not None:  # an emulation's time means nothing
            times = _milliseconds({"bf16": lambda: _trial(te, copy, x, dy, None),
                                   "recipe": lambda: _trial(te, copy, x, dy, recipe)})  # fmt: skip
    finally:
        te.reset_fp8_state(copy)
    return Verified(
        module=name,
        inputs=linear.in_features,
        outputs=linear.out_features,
        rows=len(x),
        in_fp8=counts[0],
        in_bf16=counts[1],
        quantizers=trial.quantizers,
        kept_codes=trial.kept_codes,
        differs=differs,
        sqnr_db=decibels,
        milliseconds=times,
    )


def _copy(model: CausalLM, linear: Any) -> nn.Module:
    """A linear of the same parameters with FP8 state of its own."""
    bias = next((p for name, p in linear.named_parameters() if name == "bias"), None)
    copy = model.te.Linear(linear.in_features, linear.out_features, bias=bias is not None, params_dtype=model.dtype,
                           device=model.device)  # fmt: skip
    with torch.no_grad():
        copy.weight.copy_(linear.weight)
        if bias is not None:
            copy.bias.copy_(bias)
    return copy


def _trial(te: Any, linear: Any, x: Tensor, dy: Tensor, recipe: Any) -> Trial:
    """Forward and backward of one linear under the recipe (None: BF16)."""
    kept: list[bool] = []
    x = x.detach().requires_grad_()

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.dtype in CODES)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, te.autocast(enabled=recipe is not None, recipe=recipe):
        y = linear(x)
    dx, dw = torch.autograd.grad(y, (x, linear.weight), dy)
    quantizers: tuple[str, ...] = ()
    if recipe is not None:
        used = (*linear.quantizers["scaling_fwd"][:2], *linear.quantizers["scaling_bwd"][:1])
        quantizers = tuple(type(quantizer).__name__ for quantizer in used)
    return Trial((y.detach(), dx, dw), any(kept), quantizers)


def _milliseconds(variants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each, in rounds that alternate them, by CUDA's own clock."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(ROUNDS + WARM_UP):
        for name, run in variants.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            if number >= WARM_UP:
                found[name].append(start.elapsed_time(stop))
    return {name: sorted(times)[len(times) // 2] for name, times in found.items()}


def sqnr_db(reference: Tensor, got: Tensor) -> float:
    """Signal-to-quantization-noise ratio of `got` in dB; infinite where the two are equal."""
    reference, got = reference.double(), got.double()
    noise = (reference - got).norm()
    return math.inf if noise == 0 else (20 * torch.log10(reference.norm() / noise)).item()
