"""Tables of long rows on several GPUs."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.text import load, markdown, table

# Results of benchmarks/whole_step.py, of one row whose tokens all GPUs divide; those of a name are compared.
LONG_ROWS: dict[str, tuple[str, ...]] = {}


def card_of(result: dict[str, Any]) -> str:
    """Return the short name of the GPU of a result."""
    return str(result["environment"]["gpu"]).removeprefix("NVIDIA ").split()[0]


@table
def long_rows() -> str:
    """Steps of one long row, its tokens divided by the GPUs."""
    first = load("context_parallel_h200")
    lines = []
    alone = first["rows"][0]["tokens_per_second"]
    for row in first["rows"]:
        gpus = row["gpus"]
        lines.append(
            [
                "2,048 x 16, attention",
                f"{first['settings']['seq_len']:,}",
                f"{gpus} {card_of(first)}",
                f"`{row['recipe']}`",
                f"{first['settings']['seq_len'] / row['tokens_per_second']:.1f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['tokens_per_second'] / alone / gpus:.2f}" if row["recipe"] == "bf16" else "",
                f"{row['peak_gib']:.1f} GiB",
            ]
        )
    for label, names in LONG_ROWS.items():
        base: dict[str, float] = {}
        for name in names:
            result = load(name)
            settings = result["settings"]
            row = result["rows"][0]
            gpus = max(1, settings["context_parallel_size"])
            speed = row["tokens_per_second"]
            recipe = settings["recipe"]
            if gpus == 1:
                base[recipe] = speed
            lines.append(
                [
                    label,
                    f"{settings['seq_len']:,}",
                    f"{gpus} {card_of(result)}",
                    f"`{recipe}`",
                    f"{row['ms'] / 1e3:.1f}",
                    f"{speed:,.0f}",
                    f"{speed / base[recipe] / gpus:.2f}" if recipe in base else "",
                    f"{row['peak_gib']:.1f} GiB",
                ]
            )
    header = (
        "model | tokens | GPUs | recipe | seconds per step | tokens/s | of linear | peak per GPU"
    )
    return markdown(header, lines)
