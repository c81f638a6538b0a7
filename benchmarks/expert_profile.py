"""Steps of models with experts under every recipe: milliseconds, peaks, and kernels by kind.

    python benchmarks/expert_profile.py --profile --out benchmarks/results/expert_profile_h200.json    # about 4 minutes
    python benchmarks/expert_profile.py --shapes olmoe --recipes bf16,delayed --profile

Slices of published models with a vocabulary of 32,000 and no BF16 edges. All recipes of a shape exist side by side and
take turns, each as the CUDA graph that `Trainer` runs where its layers allow one. Times are medians of CUDA events
around several steps (`--together`), which a training loop queues without waiting in between.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from te_models import CausalLM, ModelConfig
from te_models.inspect.environment import environment, require_gpu
from te_models.training.cuda_graph import GraphedStep, obstacle

COMMON: dict[str, Any] = dict(vocab_size=32000, attention_gate="none", max_position_embeddings=4096)
OLMOE: dict[str, Any] = dict(
    hidden_size=2048, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=16, head_dim=128,
    qk_norm=True, qk_norm_scope="all_heads",
    moe=dict(num_experts=64, num_experts_per_tok=8, moe_intermediate_size=1024, norm_topk_prob=False),
)  # fmt: skip
GPT_OSS: dict[str, Any] = dict(
    hidden_size=2880, intermediate_size=2880, num_hidden_layers=4, num_attention_heads=64, num_key_value_heads=8,
    head_dim=64, attention_bias=True, attention_output_bias=True, attention_sinks=True, sliding_window=128,
    layer_types=("sliding_attention", "full_attention") * 2,
    moe=dict(
        num_experts=32, num_experts_per_tok=4, moe_intermediate_size=2880, bias=True, swiglu_limit=7.0,
    ),
)  # fmt: skip
A3B: dict[str, Any] = dict(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, qk_norm=True,
    moe=dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
)  # fmt: skip
MIXTRAL: dict[str, Any] = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128,
    moe=dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=14336),
)  # fmt: skip
# The fields of ModelConfig, and the rows and tokens of a batch.
SHAPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "olmoe": (OLMOE, 3, 4096),
    "gpt-oss": (GPT_OSS, 2, 4096),
    "a3b": (A3B, 4, 4096),
    "mixtral": (MIXTRAL, 2, 4096),
}
NO_EDGES = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
TINY: dict[str, Any] = dict(
    vocab_size=288,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)
WARM_UP = 5

# The first row of which a word is in a kernel's name says of what kind it is.
KINDS: list[tuple[str, tuple[str, ...]]] = [
    ("products of experts", ("rows_kernel", "rows_by_tma", "weights_kernel", "grouped_mm", "groupproblem")),
    ("casts of experts", ("expert_cast", "_amax_kernel", "_cast_kernel", "_transpose_kernel", "_flat_kernel")),
    ("casts of experts", ("_cast_transposed_kernel", "_hidden_kernel", "_gradient_kernel")),
    ("rows to experts and back", ("_gather_kernel", "_total_kernel", "_dots_kernel")),
    ("router", ("_choose_kernel", "_count_kernel", "_before_kernel", "_padding_kernel", "_place_kernel", "_ends_")),
    ("attention", ("cudnn_generated", "flash", "_span_", "_attention", "fmha")),
    ("other products", ("nvjet", "gemm", "cutlass", "splitk")),
    ("SwiGLU", ("swiglu", "gated_act", "dgated", "silu")),
    ("norms", ("rmsnorm", "_norm_kernel", "_norm_backward", "rms_norm")),
    ("RoPE and gate", ("_rotate", "rope", "_gate")),
    ("router", ("sort", "radix", "searchsorted", "topk", "scan", "softmax", "gather", "scatter", "index")),
    ("casts", ("cast_transpose", "cast", "amax", "quantize", "transpose")),
    ("head and loss", ("cross_entropy", "log_softmax", "nll")),
    ("copies", ("memcpy", "catarray", "copy", "cat_")),
    ("fills", ("memset", "fill")),
    ("compiled", ("triton",)),
    ("elementwise", ("elementwise", "reduce")),
]  # fmt: skip


def kind(name: str) -> str:
    """Return the kind of a kernel by its name."""
    lower = name.lower()
    return next((kind for kind, words in KINDS if any(word in lower for word in words)), "other")


def step_of(
    config: ModelConfig, recipe: str, ids: Tensor
) -> tuple[Callable[[], Tensor], str | None]:
    """Return a training step without an optimizer, a CUDA graph where possible, and why it is none."""
    torch.manual_seed(0)
    edges = {} if recipe == "bf16" else NO_EDGES
    model = CausalLM(config, recipe=recipe, device=ids.device, **edges).train()
    if (reason := obstacle(model)) is None:
        graphed = GraphedStep(model)
        return lambda: graphed(input_ids=ids, labels=ids), None
    if ids.is_cuda:
        model.calibrate(dict(input_ids=ids, labels=ids))

    def eager() -> Tensor:
        model.zero_grad()
        loss = model(ids, labels=ids, return_logits=False).loss
        loss.backward()
        return loss

    return eager, reason


def milliseconds(step: Callable[[], Tensor], steps: int = 1) -> float:
    """Return the time of a step on the GPU, of so many that the host queues one after the other, as training does."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


def kernels(step: Callable[[], Tensor], steps: int = 3) -> list[dict[str, Any]]:
    """Return name, kind, milliseconds and launches of every kernel of a step, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name][0] += event.device_time / 1e3 / steps
            total[event.name][1] += 1 / steps
    rows = [
        dict(name=name[:160], kind=kind(name), ms=ms, launches=round(count, 1))
        for name, (ms, count) in total.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def by_kind(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the milliseconds of each kind, the longest first."""
    total: dict[str, float] = defaultdict(float)
    for row in rows:
        total[row["kind"]] += row["ms"]
    return dict(sorted(total.items(), key=lambda item: -item[1]))


@click.command()
@click.option("--shapes", default=",".join(SHAPES), show_default=True)
@click.option("--recipes", default="bf16,current,delayed,blockwise", show_default=True)
@click.option("--steps", default=15, show_default=True, help="Measurements of each recipe.")
@click.option("--together", default=4, show_default=True, help="Steps of a measurement.")
@click.option("--profile/--no-profile", "profiled", default=False, help="Print kernels by kind.")
@click.option("--top", default=40, show_default=True, help="Kernels to print.")
@click.option("--tiny", is_flag=True, help="Shrunken shapes anywhere: a test of this program.")
@click.option("--out", type=click.Path(path_type=Path))
def main(
    shapes: str,
    recipes: str,
    steps: int,
    together: int,
    profiled: bool,
    top: int,
    tiny: bool,
    out: Path | None,
) -> None:
    """Measure every recipe on every shape."""
    if not tiny:
        require_gpu()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {"environment": environment(), "rows": []}
    for shape in shapes.split(","):
        fields, batch, seq = SHAPES[shape]
        fields = COMMON | fields
        if tiny:
            few = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96)
            fields = fields | TINY | dict(moe=fields["moe"] | few)
            batch, seq = 2, 64
        config = ModelConfig(**fields)
        made = torch.Generator().manual_seed(0)
        ids = torch.randint(0, config.vocab_size, (batch, seq), generator=made).to(device)
        steps_of: dict[str, Callable[[], Tensor]] = {}
        rows = {}
        for recipe in recipes.split(","):
            gc.collect()
            before = torch.cuda.memory_allocated() if ids.is_cuda else 0
            step, reason = step_of(config, recipe, ids)
            row = dict(shape=shape, recipe=recipe, graph=reason is None, obstacle=reason)
            step()
            if ids.is_cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                for _ in range(WARM_UP):
                    step()
                row["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
            row["loss"] = step().item()
            steps_of[recipe] = step
            rows[recipe] = row
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(steps if ids.is_cuda else 0):
            for recipe, step in steps_of.items():
                times[recipe].append(milliseconds(step, together))
        for recipe, row in rows.items():
            if ids.is_cuda:
                row["ms"] = statistics.median(times[recipe])
                row["all_ms"] = times[recipe]
                row["steps_together"] = together
            if "bf16" in rows and ids.is_cuda:
                row["speed_over_bf16"] = rows["bf16"]["ms"] / row["ms"]
            shown = {key: value for key, value in row.items() if key != "all_ms"}
            click.echo(json.dumps(shown))
            if profiled and ids.is_cuda:
                found = kernels(steps_of[recipe])
                row["kernels"] = found[:top]
                row["ms_by_kind"] = by_kind(found)
                for label, value in row["ms_by_kind"].items():
                    click.echo(f"  {label:26} {value:8.2f} ms")
                for one in found[:top]:
                    click.echo(
                        f"    {one['ms']:8.3f} ms {one['launches']:7} x  {one['name'][:120]}"
                    )
            result["rows"].append(row)
            if out is not None:
                out.write_text(json.dumps(result, indent=1) + "\n")
        steps_of.clear()
        del step  # which keeps the last model alive
        gc.collect()
        torch._dynamo.reset()  # or the next shape's sizes would be compiled as variables
        if ids.is_cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
