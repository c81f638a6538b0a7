"""Tables of long rows, and of adapters on a large model, on several GPUs."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.text import COUNTS, GIB, load, markdown, measured_on, prose, table


def card_of(result: dict[str, Any]) -> str:
    """Return the short name of the GPU of a result."""
    return str(result["environment"]["gpu"]).removeprefix("NVIDIA ").split()[0]


@table
def long_rows() -> str:
    """Steps of one long row, its tokens divided by the GPUs."""
    result = load("context_parallel_h200")
    tokens = result["settings"]["seq_len"]
    alone = {}
    for row in result["rows"]:
        if row["gpus"] == 1:
            alone[row["recipe"]] = row["tokens_per_second"]
    lines = []
    for row in sorted(result["rows"], key=lambda row: row["recipe"]):
        speed = row["tokens_per_second"]
        gpus = row["gpus"]
        lines.append(
            [
                f"{gpus} {card_of(result)}",
                f"`{row['recipe']}`",
                f"{tokens / speed:.1f}",
                f"{speed:,.0f}",
                f"{speed / alone[row['recipe']] / gpus:.2f}",
                f"{row['peak_gib']:.1f} GiB",
            ]
        )
    return markdown("GPUs | recipe | seconds per step | tokens/s | of linear | peak per GPU", lines)


@table
def lora_70b() -> str:
    """Adapters on the shape of Llama 3.1 70B, whose FP8 weights several GPUs divide."""
    result = load("lora_70b_h200_x4")
    peak = result["peak"] / GIB
    planned = result["planned"] / GIB
    return prose(
        f"All {result['layers']} layers of Llama 3.1 70B's shape ({result['parameters'] / 1e9:.1f} billion parameters, "
        f"random) with adapters of rank {result['rank']} on the linears of all blocks ({result['trained'] / 1e9:.2f} "
        f"billion parameters), the rest in FP8 under `{result['recipe']}` and divided by FSDP2, all activations "
        f"recomputed, {result['batch']} x {result['seq']:,} tokens on each GPU: {result['tokens_per_second']:,.0f} "
        f"tokens/s of all {COUNTS[result['gpus']]}, {peak:.1f} GiB at the peak of each (planned: {planned:.1f}, "
        f"{planned / peak - 1:+.1%}), {result['seconds'][0]:.1f} s for the first step. Building the model took "
        f"{result['seconds_to_build']:.0f} s and up to {result['peak_of_building'] / GIB:.1f} GiB on a GPU. "
        f"{measured_on(result)}"
    )
