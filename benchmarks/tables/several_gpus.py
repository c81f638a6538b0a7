"""Tables of long rows, and of adapters on a large model, on several GPUs."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.text import GIB, load, markdown, prose, table


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
    results = [load(f"lora_70b_h200_x{gpus}") for gpus in (2, 4)]
    lines = []
    for result in results:
        peak = result["peak"] / GIB
        planned = result["planned"] / GIB
        lines.append(
            [
                f"{result['gpus']} {card_of(result)}",
                f"{result['tokens_per_second']:,.0f}",
                f"{peak:.1f} GiB",
                f"{planned:.1f} GiB ({planned / peak - 1:+.1%})",
                f"{result['seconds'][0]:.1f} s",
                f"{result['seconds_to_build']:.0f} s, {result['peak_of_building'] / GIB:.1f} GiB",
                result["environment"]["date"],
            ]
        )
    about = prose(
        f"All {result['layers']} layers of Llama 3.1 70B's shape ({result['parameters'] / 1e9:.1f} billion parameters, "
        f"random) with adapters of rank {result['rank']} on the linears of all blocks ({result['trained'] / 1e9:.2f} "
        f"billion parameters), the rest in FP8 under `{result['recipe']}` and divided by FSDP2, all activations "
        f"recomputed, {result['batch']} x {result['seq']:,} tokens on each GPU."
    )
    header = (
        "GPUs | tokens/s of all | peak per GPU | planned | first step | building, peak | measured"
    )
    return f"{about}\n\n{markdown(header, lines)}"
