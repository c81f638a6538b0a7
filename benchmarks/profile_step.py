"""Times of the kernels of one training step on a GPU by kind, in milliseconds.

    python benchmarks/profile_step.py gated-1b delayed --batch-size 8 --seq-len 2048 \\
        --out benchmarks/results/profile_1b_h200.json
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import click
import torch
from torch.profiler import ProfilerActivity, profile

from te_models.config.presets import get_preset
from te_models.inspect.bench import model_step, parse
from te_models.inspect.environment import environment, require_gpu

# The first row whose words are all in a kernel's name says of what kind it is.
KINDS: list[tuple[str, tuple[str, ...]]] = [
    ("attention", ("cudnn",)),
    ("attention", ("flash",)),
    ("BF16 GEMM", ("gemm",)),
    ("RMSNorm backward and residual add", ("rmsnorm_bwd",)),
    ("RMSNorm and residual add", ("rmsnorm",)),
    ("RMSNorm and residual add", ("_norm_kernel",)),
    ("SwiGLU backward", ("dgated",)),
    ("SwiGLU backward", ("_dswiglu_kernel",)),
    ("SwiGLU", ("gated_act",)),
    ("SwiGLU", ("_swiglu_kernel",)),
    ("RoPE", ("_rotate",)),
    ("gate", ("_gate",)),
    ("casts of weights", ("_cast_kernel",)),
    ("casts", ("cast_transpose",)),
    ("transposes of codes", ("transpose",)),
    ("scale update", ("amax",)),
    ("loss", ("log_softmax",)),
    ("loss", ("_cross_entropy_kernel",)),
    ("embedding", ("_sum_kernel",)),
    ("residual add", ("cudafunctor_add",)),
    ("compiled", ("triton",)),
    ("copies", ("_copy_kernel",)),
    ("copies", ("memcpy",)),
]


def kind(name: str) -> str:
    """Return the kind of a kernel; the names of cuBLAS's GEMMs (nvjet_sm90_qqtst_...) have a letter per operand.

    q and r are FP8."""
    lower = name.lower()
    if lower.startswith("nvjet"):
        return "FP8 GEMM" if lower.split("_")[2].startswith("q") else "BF16 GEMM"
    return next((kind for kind, words in KINDS if all(word in lower for word in words)), "other")


@click.command()
@click.argument("preset")
@click.argument("recipe")
@click.option("--batch-size", default=8)
@click.option("--seq-len", default=2048)
@click.option("--layers", type=int, help="num_hidden_layers")
@click.option("--kv-heads", type=int, help="num_key_value_heads")
@click.option("--steps", default=3)
@click.option("--out", type=click.Path(path_type=Path))
def main(preset: str, recipe: str, batch_size: int, seq_len: int, layers: int | None, kv_heads: int | None,
         steps: int, out: Path | None) -> None:  # fmt: skip
    """RECIPE as in `te-models bench`, such as delayed+plain."""
    require_gpu()
    shape = dict(num_hidden_layers=layers, num_key_value_heads=kv_heads)
    config = get_preset(preset, **{name: value for name, value in shape.items() if value})
    name, ways = parse(recipe)
    ids = torch.randint(0, config.vocab_size, (batch_size, seq_len), device="cuda")
    step = model_step(ids, config, recipe=name, **ways)
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            milliseconds = event.device_time / 1e3 / steps
            times[kind(event.name)] += milliseconds
            kernels[event.name][0] += milliseconds
            kernels[event.name][1] += 1
    for label, value in sorted(times.items(), key=lambda item: -item[1]):
        print(f"{label:22} {value:8.2f} ms")
    print(f"{'all kernels':22} {sum(times.values()):8.2f} ms")
    top = sorted(kernels.items(), key=lambda item: -item[1][0])[:40]
    for label, (value, count) in top:
        print(f"{value:8.3f} ms {count // steps:5} x  {label[:110]}")
    if out is not None:
        rows = [
            dict(kernel=label, ms=value, launches=count / steps) for label, (value, count) in top
        ]
        settings = dict(
            preset=preset, recipe=recipe, batch_size=batch_size, seq_len=seq_len, **shape
        )
        document = dict(environment=environment(), settings=settings, ms=dict(times), kernels=rows)
        out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
