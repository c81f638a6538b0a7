#!/usr/bin/env python3
"""Capture golden vectors of te.Linear, te.RMSNorm, te.checkpoint and the quantizers.

    python capture.py OUT.safetensors SEED                  # real Transformer Engine, on a GPU
    python capture.py OUT.safetensors SEED emulated         # te_models' emulated engine, on CPU

Keys: <case>.<step>.<tensor>; the recipe and sizes of each case are in the file's metadata. `x` inputs, `g` output
gradients, `y` outputs, `dx dw db` gradients, `scale_fwd/bwd` and `amax_history_fwd/bwd` after the step; quantizers
give their data (`_data`, `_rowwise_data`, ...) and inverse scales. A quantizer that this GPU does not run natively is
left out: on Hopper Transformer Engine's MXFP8 quantizer returns uninitialized memory without an error.
"""

import json
import sys
from functools import partial

import torch
from safetensors.torch import save_file

OUT, SEED, ENGINE = sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or ["native"])[0]
if ENGINE == "native":
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as R

    DEV = "cuda"
else:
    import te_models.engine.emulated as te

    R, DEV = te.recipe, "cpu"
BF16 = torch.bfloat16
tensors, meta = {}, {}
gen = torch.Generator().manual_seed(SEED)  # on CPU, so that both engines draw the same numbers


def put(key, t):
    tensors[key] = t.detach().clone().contiguous().cpu()


def randn(*shape, scale=1.0, dtype=BF16):
    return (torch.randn(*shape, generator=gen) * scale).to(dtype).to(DEV)


def attempt(case, fn, *args):
    try:
        fn(case, *args)
    except Exception as e:  # recorded, so that a missing case is seen
        meta[f"{case}.error"] = f"{type(e).__name__}: {str(e)[:300]}"


def linear(case, recipe, n_in, n_out, rows, steps):
    """A te.Linear over inputs that grow, shrink and spike."""
    m = te.Linear(n_in, n_out, bias=True, params_dtype=BF16, device=DEV)
    with torch.no_grad():
        m.weight.copy_(randn(n_out, n_in, scale=0.05))
        m.get_parameter("bias").copy_(randn(n_out, scale=0.1))
    put(f"{case}.weight", m.weight)
    put(f"{case}.bias", m.bias)
    for t in range(steps):
        k = 1.7 ** (t if t < steps - 2 else steps - 2 - t) * (50 if t == 2 else 1)
        x, g = randn(rows, n_in, scale=k).requires_grad_(), randn(rows, n_out, scale=1e-3 * k)
        m.weight.grad = m.bias.grad = None
        with te.autocast(enabled=True, recipe=recipe):
            y = m(x)
        y.backward(g)
        for name, v in dict(x=x, g=g, y=y, dx=x.grad, dw=m.weight.grad, db=m.bias.grad).items():
            put(f"{case}.{t}.{name}", v)
        if isinstance(recipe, R.DelayedScaling):
            for d in ("fwd", "bwd"):
                put(f"{case}.{t}.scale_{d}", m.fp8_meta[f"scaling_{d}"].scale)
                put(f"{case}.{t}.amax_history_{d}", m.fp8_meta[f"scaling_{d}"].amax_history)
    meta[case] = dict(recipe=type(recipe).__name__, I=n_in, O=n_out, N=rows, steps=steps)


def wide(rows, cols):
    """Rows spanning 2^-9..2^9, one of zeros, and the E4M3 edge values."""
    x = torch.randn(rows, cols, generator=gen) * torch.logspace(-9, 9, rows, base=2)[:, None]
    x[0, :7] = torch.tensor([0.0, -0.0, 448.0, 449.0, 464.0, 465.0, 1e4])
    x[1] = 0
    return x.to(BF16).to(DEV)


def quantizer(case, cast, rows, cols):
    x = wide(rows, cols)
    y = cast(x)
    put(f"{case}.x", x)
    for name in ("_data", "_transpose", "_scale_inv", "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv",
                 "_columnwise_scale_inv"):  # fmt: skip
        if isinstance(v := getattr(y, name, None), torch.Tensor):
            put(f"{case}.{name}", v)


def rmsnorm(case):
    m = te.RMSNorm(96, eps=1e-5, dtype=BF16, device=DEV)
    with torch.no_grad():
        m.weight.copy_(1 + randn(96, scale=0.2))
    x, g = randn(33, 96, scale=3).requires_grad_(), randn(33, 96)
    y = m(x)
    y.backward(g)
    for name, v in dict(weight=m.weight, x=x, g=g, y=y, dx=x.grad, dw=m.weight.grad).items():
        put(f"{case}.{name}", v)


def checkpointed(case, wrap, seed):
    """Two Linears, four growing steps, with or without activation checkpointing: every case must be the same."""
    recipe, own = R.DelayedScaling(amax_history_len=4), torch.Generator().manual_seed(seed)
    a = te.Linear(64, 128, bias=False, params_dtype=BF16, device=DEV)
    b = te.Linear(128, 64, bias=False, params_dtype=BF16, device=DEV)
    with torch.no_grad():
        for m in (a, b):
            m.weight.copy_(torch.randn(m.weight.shape, generator=own) * 0.1)
    put(f"{case}.wa", a.weight)
    put(f"{case}.wb", b.weight)
    for t in range(4):
        x = (torch.randn(32, 64, generator=own) * 2**t).to(BF16).to(DEV).requires_grad_()
        g = torch.randn(32, 64, generator=own).to(BF16).to(DEV)
        a.weight.grad = b.weight.grad = None
        with te.autocast(enabled=True, recipe=recipe):
            y = wrap(lambda v: b(torch.nn.functional.silu(a(v))), x)
        y.backward(g)
        for name, v in dict(x=x, g=g, y=y, dx=x.grad, dwa=a.weight.grad, dwb=b.weight.grad).items():
            put(f"{case}.{t}.{name}", v)
        for name, m in (("a", a), ("b", b)):
            for d in ("fwd", "bwd"):
                put(f"{case}.{t}.{name}.scale_{d}", m.fp8_meta[f"scaling_{d}"].scale)
                put(f"{case}.{t}.{name}.amax_{d}", m.fp8_meta[f"scaling_{d}"].amax_history)


maximum = R.DelayedScaling(amax_history_len=4, amax_compute_algo="max")
recent = R.DelayedScaling(amax_history_len=8, amax_compute_algo="most_recent", margin=1)
attempt("delayed_max", linear, maximum, 64, 96, 48, 7)
attempt("delayed_recent", linear, recent, 64, 96, 48, 7)
attempt(
    "delayed_e4m3",
    linear,
    R.DelayedScaling(amax_history_len=3, fp8_format=R.Format.E4M3),
    64,
    96,
    48,
    5,
)
attempt("current", linear, R.Float8CurrentScaling(), 64, 96, 48, 3)
attempt("block", linear, R.Float8BlockScaling(), 256, 384, 256, 3)
for nm, dt in (("e4m3", te.DType.kFloat8E4M3), ("e5m2", te.DType.kFloat8E5M2)):
    scale, amax = torch.tensor([3.0], device=DEV), torch.zeros(1, device=DEV)
    attempt(f"q_delayed_{nm}", quantizer, te.Float8Quantizer(scale, amax, dt), 64, 128)
    current = partial(te.Float8CurrentScalingQuantizer, dt, torch.device(DEV))
    attempt(f"q_current_{nm}", quantizer, current(), 64, 128)
    attempt(
        f"q_current_pow2_{nm}",
        quantizer,
        current(force_pow_2_scales=True, amax_epsilon=1e-3),
        64,
        128,
    )
    for dim in (1, 2):
        for pow2 in (True, False):
            block = te.Float8BlockQuantizer(
                dt, rowwise=True, columnwise=True, block_scaling_dim=dim, force_pow_2_scales=pow2
            )
            attempt(f"q_block{dim}{'' if pow2 else '_nopow2'}_{nm}", quantizer, block, 256, 384)
    if te.is_mxfp8_available():
        attempt(f"q_mxfp8_{nm}", quantizer, te.MXFP8Quantizer(dt), 128, 256)
attempt("rms", rmsnorm)
attempt("plain", checkpointed, lambda f, x: f(x), SEED)
attempt("ckpt", checkpointed, partial(te.checkpoint, use_reentrant=False), SEED)
attempt("ckpt_re", checkpointed, partial(te.checkpoint, use_reentrant=True), SEED)
differ = [
    k
    for k in tensors
    if k.startswith("plain.")
    for c in ("ckpt.", "ckpt_re.")
    if not torch.equal(tensors[k], tensors[k.replace("plain.", c)])
]
print("checkpointing changes nothing" if not differ else f"checkpointing changes {differ[:8]}")  # noqa: T201
for k in [k for k in tensors if k.startswith("ckpt_re.")]:
    del tensors[k]
gpu = torch.cuda.get_device_name() if DEV == "cuda" else ""
metadata = {"meta": json.dumps(meta), "engine": ENGINE, "torch": torch.__version__, "gpu": gpu}
save_file(tensors, OUT, metadata=metadata)
print(  # noqa: T201
    f"{len(tensors)} tensors;",
    {k: v for k, v in meta.items() if k.endswith(".error")} or "no errors",
)
