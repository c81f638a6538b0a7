#!/usr/bin/env python3
"""Capture golden vectors of te.GroupedLinear, the permutation kernels and the fused router.

    python capture_grouped.py OUT.safetensors SEED                  # real Transformer Engine, on a GPU
    python capture_grouped.py OUT.safetensors SEED emulated         # te_models' emulated engine, on CPU

On a GPU the parts run as processes of their own at the same time (`--part NAME` runs one of them): one part needs
another environment, others may end with an error that leaves the device unusable. The emulated engine runs the parts
"linear" and "errors", without the kernels that it does not have.

Every case draws its numbers from a generator of its own on the CPU, so inputs are not stored. Keys are
<case>.<tensor>. The metadata holds `digests` (SHA-256, 32 hex digits, of every tensor, stored or not) and `facts`:
comparisons made on the spot, error texts and versions.
"""

import hashlib
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

OUT, SEED, ENGINE = sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or ["native"])[0]
PART = sys.argv[sys.argv.index("--part") + 1] if "--part" in sys.argv else None
PARTS = ("linear", "kernels", "connections", "errors")
if ENGINE == "native":
    for name in (
        "USE_CUTLASS_GROUPED_GEMM",
        "GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM",
        "EXT_MARGIN_SM",
    ):
        os.environ.pop(f"NVTE_{name}", None)  # which change bits
    if PART == "connections":
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
NATIVE, DEV = ENGINE == "native", "cuda" if ENGINE == "native" else "cpu"
if PART or not NATIVE:
    if NATIVE:
        import transformer_engine.pytorch as te
        from transformer_engine import __version__ as version
        from transformer_engine.common import recipe as R
        from transformer_engine.pytorch import router as fused
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    else:
        import te_models.engine.emulated as te

        R, FP8GlobalStateManager = te.recipe, te.FP8GlobalStateManager
BF16 = torch.bfloat16
ROWS = [0, 16, 48, 128, 272, 1008, 0]
SMALL = [0, 16, 48, 32, 0]
SIZES = (
    (64, 256, 1024) if NATIVE else (64, 256)
)  # emulated tensor cores take a minute for a product of 1024s
tensors, digests, facts = {}, {}, {}


def put(key, t, whole=False):
    """Record a tensor: its digest, and all of it with `whole`."""
    t = t.detach().clone().contiguous().cpu()
    digests[key] = hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[
        :32
    ]
    if whole:
        tensors[key] = t


def attempt(case, fn, *args):
    """Call fn(case, *args); an error is recorded, so that a missing case is seen."""
    try:
        if NATIVE:
            torch.cuda.empty_cache()
        FP8GlobalStateManager.reset()
        fn(case, *args)
    except Exception as e:
        facts[f"{case}.error"] = f"{type(e).__name__}: {str(e)[:600]}"


class Draw:
    """Random numbers of one case."""

    def __init__(self, case):
        self.generator = torch.Generator().manual_seed(SEED * 2**32 + zlib.crc32(case.encode()))

    def __call__(self, *shape, scale=1.0, dtype=BF16):
        return (torch.randn(*shape, generator=self.generator) * scale).to(dtype).to(DEV)

    def integers(self, high, *shape):
        return torch.randint(high, shape, generator=self.generator).to(DEV)


def recipes():
    """Name -> recipe; bf16 has none."""
    return {
        "bf16": None,
        "current": R.Float8CurrentScaling(),
        "blockwise": R.Float8BlockScaling(),
        "delayed": R.DelayedScaling(amax_history_len=4, amax_compute_algo="max"),
        "recent": R.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
    }


def run(module, recipe, x, g, *args):
    """Return y, and the gradients of x and of the parameters, of one forward and backward."""
    x = x.detach().requires_grad_()
    for p in module.parameters():
        p.grad = None
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, *args)
    y.backward(g)
    return y, x.grad, {name: p.grad for name, p in module.named_parameters()}


def filled(draw, n, n_in, n_out, bias, **options):
    """A te.GroupedLinear with weights and biases drawn, expert by expert."""
    m = te.GroupedLinear(n, n_in, n_out, bias=bias, params_dtype=BF16, device=DEV, **options)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(draw(*p.shape, scale=0.05 if p.ndim == 2 else 0.1))
    return m


def expert(m, i):
    """The te.Linear of expert i, with equal parameters."""
    lin = te.Linear(m.in_features, m.out_features, bias=m.use_bias, params_dtype=BF16, device=DEV)
    with torch.no_grad():
        lin.weight.copy_(getattr(m, f"weight{i}"))
        if m.use_bias:
            lin.get_parameter("bias").copy_(getattr(m, f"bias{i}"))
    return lin


def state(case, m, whole=True):
    for d in ("fwd", "bwd"):
        s = m.fp8_meta.get(f"scaling_{d}")
        if getattr(s, "amax_history", None) is not None:
            put(f"{case}.scale_{d}", s.scale, whole)
            put(f"{case}.amax_history_{d}", s.amax_history, whole)


def codes(case, m, x, rows):
    """FP8 codes and inverse scales of each expert's input and weight; raises amaxes, so only at the end of a case."""
    quantizers = m.quantizers["scaling_fwd"]
    parts = x.split(rows)
    for i, part in enumerate(parts):
        for slot, value in enumerate((part, getattr(m, f"weight{i}"))):
            if not value.numel():
                continue
            quantizer = quantizers[3 * i + slot]
            quantizer.set_usage(rowwise=True, columnwise=True)
            q = quantizer(value.detach())
            for name in ("_data", "_scale_inv", "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv",
                         "_columnwise_scale_inv"):  # fmt: skip
                if isinstance(v := getattr(q, name, None), torch.Tensor):
                    put(f"{case}.{'xw'[slot]}{i}.{name}", v, whole=slot == 0 or "scale" in name)


def linear(case, recipe, n_in, n_out, bias, rows, whole):
    """te.GroupedLinear: output, gradients, scales and codes."""
    draw = Draw(case)
    m = filled(draw, len(rows), n_in, n_out, bias)
    x, g = draw(sum(rows), n_in), draw(sum(rows), n_out, scale=1e-2)
    y, dx, grads = run(m, recipe, x, g, rows)
    put(f"{case}.y", y, whole)
    put(f"{case}.dx", dx, whole)
    for name, value in grads.items():
        put(f"{case}.d{name}", value, whole or "bias" in name)
    if recipe is not None:
        state(case, m)
    if NATIVE:
        compare(case, m, recipe, x, g, rows, (y, dx, grads))
    if rows == SMALL and recipe is not None:
        codes(case, m, x, rows)


def compare(case, m, recipe, x, g, rows, found):
    """Note where a te.Linear per expert differs, and whether a second run gives the same."""
    y, dx, grads = found
    different = []
    for i, (xi, gi, yi, dxi) in enumerate(
        zip(*(t.split(rows) for t in (x, g, y, dx)), strict=True)
    ):
        one_y, one_dx, one = run(expert(m, i), recipe, xi, gi)
        pairs = {
            "y": (yi, one_y),
            "dx": (dxi, one_dx),
            "dweight": (grads[f"weight{i}"], one["weight"]),
        }
        if m.use_bias:
            pairs["dbias"] = (grads[f"bias{i}"], one["bias"])
        different += [
            f"{n}{i}" for n, (a, b) in pairs.items() if b is None or not torch.equal(a, b)
        ]
    facts[f"{case}.differs_from_linear"] = different
    if recipe is None or not isinstance(
        recipe, R.DelayedScaling
    ):  # whose second pass has other scales
        again = run(m, recipe, x, g, rows)
        same = torch.equal(y, again[0]) and torch.equal(dx, again[1])
        facts[f"{case}.same_twice"] = same and all(
            torch.equal(grads[n], v) for n, v in again[2].items()
        )


def idle(case, recipe, unfused):
    """Six steps of delayed scaling in which expert 1 is idle in steps 2 to 4 and expert 3 always."""
    draw = Draw(case.removeprefix("unfused_"))
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = str(int(unfused))
    m = filled(draw, 4, 64, 96, True)
    for t in range(6):
        rows = [32, 0 if 2 <= t <= 4 else 16, 48, 0]
        k = [1.0, 3.0, 0.2, 40.0, 0.5, 1.0][t]
        x, g = draw(sum(rows), 64, scale=k), draw(sum(rows), 96, scale=1e-3 * k)
        y, dx, grads = run(m, recipe, x, g, rows)
        put(f"{case}.{t}.y", y, True)
        put(f"{case}.{t}.dx", dx, True)
        for name, value in grads.items():
            put(f"{case}.{t}.d{name}", value)
        state(f"{case}.{t}", m)
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "0"


def empty(case, recipe):
    """No expert has a row."""
    m = filled(Draw(case), 3, 64, 96, True)
    x = torch.zeros(0, 64, dtype=BF16, device=DEV)
    y, dx, grads = run(m, recipe, x, torch.zeros(0, 96, dtype=BF16, device=DEV), [0, 0, 0])
    facts[case] = {
        "y": list(y.shape),
        "dx": None if dx is None else list(dx.shape),
        "grads": {n: None if v is None else float(v.float().abs().max()) for n, v in grads.items()},
    }
    state(case, m)


def recomputed(case, recipe, wrap):
    """Two grouped linears between gathers, four growing steps, with or without te.checkpoint."""
    draw = Draw("recomputed")
    a, b = filled(draw, 4, 64, 128, False), filled(draw, 4, 128, 64, False)
    for t in range(4):
        x, g = draw(40, 64, scale=2.0**t), draw(40, 64)
        order = torch.argsort(draw.integers(1000, 80), stable=True)  # two rows per token
        rows = [[16, 32, 0, 32], [0, 16, 32, 32], [16, 16, 32, 16], [80, 0, 0, 0]][t]

        def inner(x, order=order, rows=rows):
            h = b(silu(a(x[order % 40], rows)), rows)
            return torch.zeros(40, 64, device=DEV).index_add(0, order % 40, h.float()).to(BF16)

        leaf = x.requires_grad_()
        for p in (*a.parameters(), *b.parameters()):
            p.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = wrap(inner, leaf)
        y.backward(g)
        put(f"{case}.{t}.y", y)
        put(f"{case}.{t}.dx", leaf.grad)
        for which, m in (("a", a), ("b", b)):
            for name, p in m.named_parameters():
                put(f"{case}.{t}.{which}.d{name}", p.grad)
            state(f"{case}.{t}.{which}", m, whole=False)


def linear_part():
    for name, recipe in recipes().items():
        if name == "recent":
            continue
        for bias in (True, False):
            suffix = "" if bias else "_nobias"
            attempt(f"small_{name}{suffix}", linear, recipe, 64, 96, bias, SMALL, True)
            for n_in in SIZES if bias or NATIVE else ():
                for n_out in SIZES:
                    attempt(
                        f"{name}{suffix}_{n_in}_{n_out}",
                        linear,
                        recipe,
                        n_in,
                        n_out,
                        bias,
                        ROWS,
                        False,
                    )
        attempt(f"whole_{name}", linear, recipe, 256, 64, True, ROWS, True)
        attempt(f"empty_{name}", empty, recipe)
    attempt("bf16_odd", linear, None, 64, 96, True, [1, 7, 33, 0], True)
    for name in ("delayed", "recent"):
        attempt(f"idle_{name}", idle, recipes()[name], False)
        if NATIVE:
            attempt(f"unfused_idle_{name}", idle, recipes()[name], True)
    for name in ("delayed", "current", "bf16"):
        recipe = recipes()[name]
        attempt(f"plain_{name}", recomputed, recipe, lambda f, x: f(x))
        for mode in (False, True):
            wrap = lambda f, x, mode=mode: te.checkpoint(f, x, use_reentrant=mode)  # noqa: E731
            attempt(f"recompute{int(mode)}_{name}", recomputed, recipe, wrap)


def connections_part():
    """Some of the same cases with CUDA_DEVICE_MAX_CONNECTIONS=1; the caller compares the digests."""
    for name, recipe in recipes().items():
        if name != "recent":
            attempt(f"{name}_256_256", linear, recipe, 256, 256, True, ROWS, False)
            attempt(f"{name}_1024_64", linear, recipe, 1024, 64, True, ROWS, False)


# Errors and odd uses.


def unaligned(case, recipe, rows, train):
    draw = Draw(case)
    m = filled(draw, 2, 64, 96, True)
    x, g = draw(sum(rows), 64), draw(sum(rows), 96)
    if train:
        put(f"{case}.y", run(m, recipe, x, g, rows)[0])
        return
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        put(f"{case}.y", m(x, rows), True)


def frozen(case, recipe, which):
    """Weight `which` of three is frozen: which gradients come?"""
    draw = Draw(case)
    m = filled(draw, 3, 64, 96, True)
    getattr(m, f"weight{which}").requires_grad_(False)
    rows = [16, 32, 16]
    _, dx, grads = run(m, recipe, draw(64, 64), draw(64, 96), rows)
    facts[case] = {name: value is not None for name, value in {"dx": dx, **grads}.items()}


def errors_part():
    for name in ("current", "delayed", "blockwise"):
        recipe = recipes()[name]
        for rows in (8, 24):
            attempt(f"train_{name}_{rows}", unaligned, recipe, [16, rows], True)
        for rows in (5, 8, 24):
            attempt(f"forward_{name}_{rows}", unaligned, recipe, [16, rows], False)
    attempt(
        "features_current",
        lambda case: filled(Draw(case), 2, 64, 96, True)(Draw(case)(32, 48), [16, 16]),
    )
    attempt(
        "splits_current",
        lambda case: filled(Draw(case), 2, 64, 96, True)(Draw(case)(32, 64), [16, 8, 8]),
    )
    for name in ("current", "bf16", "delayed"):
        for which in (0, 1):
            attempt(f"frozen{which}_{name}", frozen, recipes()[name], which)


# Kernels of which the emulated engine has none.


def routing(draw, tokens, experts, k):
    """A mask [T, E] with k experts per token, and probabilities [T, E] that are zero elsewhere."""
    chosen = torch.rand(tokens, experts, generator=draw.generator).topk(k, dim=1).indices
    mask = torch.zeros(tokens, experts, dtype=torch.int32).scatter(1, chosen, 1)
    probs = torch.rand(tokens, experts, generator=draw.generator) * mask
    return mask.to(DEV), probs.to(DEV)


def permutation(case, k, probs_dtype):
    draw = Draw(case)
    mask, probs = routing(draw, 64, 16, k)
    probs = probs.to(probs_dtype)
    x = draw(64, 128).requires_grad_()
    rows, row_id_map = te.moe_permute(x, mask, 64 * k)
    put(f"{case}.rows", rows)
    h = (draw(64 * k, 128)).requires_grad_()
    p = probs.requires_grad_()
    y = te.moe_unpermute(h, row_id_map, p, restore_shape=torch.Size((64, 128)))
    g = draw(64, 128)
    y.backward(g)
    rows.backward(draw(64 * k, 128))
    put(f"{case}.y", y, True)
    put(f"{case}.dh", h.grad, True)
    put(f"{case}.dp", p.grad, True)
    put(f"{case}.dx", x.grad, True)


def router(case, score):
    draw = Draw(case)
    logits = draw(64, 64, dtype=torch.float32).requires_grad_()
    expert_bias = draw(64, scale=0.1, dtype=torch.float32) if score == "sigmoid" else None
    probs, chosen = fused.fused_topk_with_score_function(
        logits, 8, False, None, None, None, score, expert_bias
    )
    put(f"{case}.probs", probs, True)
    put(f"{case}.map", chosen, True)


def kernels_part():
    for k in (2, 4, 8):
        for name, dtype in (("fp32", torch.float32), ("bf16", BF16)):
            attempt(f"permute_{name}_{k}", permutation, k, dtype)
    attempt("router_softmax", router, "softmax")
    attempt("router_sigmoid_8", router, "sigmoid")


def save():
    metadata = {
        "digests": json.dumps(digests),
        "facts": json.dumps(facts),
        "torch": torch.__version__,
    }
    if NATIVE:
        metadata |= {"gpu": torch.cuda.get_device_name(), "te": version}
    save_file(tensors, OUT, metadata=metadata)


def merge():
    """Run the parts at the same time and join what they found."""
    started = {}
    for part in PARTS:
        command = [sys.executable, __file__, f"{OUT}.{part}", str(SEED), "native", "--part", part]
        started[part] = subprocess.Popen(command)
    metadata = {}
    for part, process in started.items():
        try:
            facts[f"part_{part}.status"] = process.wait(timeout=110)
        except subprocess.TimeoutExpired:
            process.kill()
            facts[f"part_{part}.status"] = "timeout"
        file = Path(f"{OUT}.{part}")
        if not file.exists():
            continue
        with safe_open(file, "pt") as opened:
            found = opened.metadata()
        theirs = json.loads(found.pop("digests"))
        facts.update(
            {f"{part}.{key}": value for key, value in json.loads(found.pop("facts")).items()}
        )
        if part == "connections":
            facts["connections.different"] = [
                key for key, value in theirs.items() if digests.get(key) != value
            ]
        else:
            digests.update(theirs)
            tensors.update(load_file(file))
            metadata = found
        file.unlink()
    return metadata | {"digests": json.dumps(digests), "facts": json.dumps(facts)}


if NATIVE and PART is None:
    save_file(tensors, OUT, metadata=merge())
else:
    for part in [PART] if PART else ["linear", "errors"]:
        globals()[f"{part}_part"]()
    save()
wrong = {
    key: value for key, value in facts.items() if key.endswith((".error", ".status")) and value
}
print(f"{PART or 'all'}: {len(tensors)} tensors, {len(digests)} digests;", wrong or "no errors")  # noqa: T201
