"""The first step of the delta rule on a machine, and the configurations of its kernels, tuned and fixed.

    python benchmarks/delta_rule_tuning.py --heads 16x32 --out benchmarks/results/delta_rule_16x32_h100.json
    python benchmarks/delta_rule_tuning.py --heads 16x32 --tune --out ...     # flash-linear-attention times all of them

With `--tune` the result has the milliseconds of every configuration that was timed, from which the table in
te_models/kernels/delta_rule_triton.py was made. Triton keeps compiled kernels and timings on disk: delete its cache, or
name another in TRITON_CACHE_DIR, for the time of a first step.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch

from te_models.inspect.environment import environment, require_gpu
from te_models.kernels import delta_rule as rule


@click.command()
@click.option("--heads", default="16x32", show_default=True, help="Heads of keys and of values.")
@click.option("--channels", default=128, show_default=True, help="Per head.")
@click.option("--batch", default=4, show_default=True)
@click.option("--seq", default=4096, show_default=True)
@click.option("--tune", is_flag=True, help="Let flash-linear-attention time all configurations.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(heads: str, channels: int, batch: int, seq: int, tune: bool, out: Path) -> None:
    """Time the first forward and backward, and 20 later ones, of one layer."""
    require_gpu()
    if tune:
        rule._kernels()
        for kernel in autotuned().values():
            kernel.early_config_prune = None
    key_heads, value_heads = map(int, heads.split("x"))
    made: dict[str, Any] = dict(device="cuda", requires_grad=True)
    shapes = [(key_heads, channels)] * 2 + [(value_heads, channels)]
    q, k, v = (torch.randn(batch, seq, *shape, dtype=torch.bfloat16, **made) for shape in shapes)
    gates = torch.rand(batch, seq, value_heads, device="cuda")
    leaves = (q, k, v, (-gates).requires_grad_(), gates.clone().requires_grad_())
    slope = torch.randn_like(v)
    seconds = []
    for _ in range(21):
        start = time.perf_counter()
        torch.autograd.grad(rule.delta_rule(*leaves)[0], leaves, slope)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    result = dict(
        environment=environment(), heads=heads, channels=channels, batch=batch, seq=seq, tuned=tune,
        first_seconds=seconds[0], ms=1e3 * statistics.median(seconds[1:]),
        kernels={name: timings(kernel) for name, kernel in autotuned().items() if kernel.cache},
    )  # fmt: skip
    click.echo(json.dumps({name: value for name, value in result.items() if name != "environment"}))
    out.write_text(json.dumps(result, indent=1) + "\n")


def autotuned() -> dict[str, Any]:
    """Return the kernels of flash-linear-attention that are autotuned, by name."""
    from te_models.kernels.delta_rule_triton import autotuned

    return dict(autotuned())


def timings(kernel: Any) -> dict[str, Any]:
    """Return which configuration each key got, and the milliseconds of those that were timed last."""
    timed = getattr(kernel, "configs_timings", {})
    return dict(
        chosen={str(key): str(config) for key, config in kernel.cache.items()},
        milliseconds={str(config): found for config, found in timed.items()},
    )


if __name__ == "__main__":
    main()
