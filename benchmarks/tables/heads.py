"""Tables of attention kernels by head dimension, and of the families whose attention or MLP asks for more."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.text import load, markdown, measured_on, prose, table

KERNELS = {
    "cudnn": "cuDNN",
    "flash2": "FlashAttention-2",
    "spans": "ours",
}
BOUND = (
    0.01  # relative error of BF16's rounding, with room: a kernel beyond it computed something else
)


@table
def attention_kernels() -> str:
    """Forward and backward of each attention kernel."""
    result = load("attention_kernels_h100")

    def cell(row: dict[str, Any], name: str) -> str:
        if name not in row["ms"] or row["error"][name] > BOUND:
            return ""
        right = [ms for other, ms in row["ms"].items() if row["error"][other] <= BOUND]
        text = f"{row['ms'][name]:.2f}"
        return f"**{text}**" if row["ms"][name] == min(right) else text

    rows = []
    for row in result["rows"]:
        heads = f"{row['heads']}, {row['shared']} shared"
        if row["heads"] == row["shared"]:
            heads = str(row["heads"])
        tokens = f"{row['batch']} x {row['seq']:,}"
        rows.append(
            [str(row["dim"]), heads, tokens, row["mask"], *(cell(row, name) for name in KERNELS)]
        )
    names = " | ".join(f"{name}, ms" for name in KERNELS.values())
    header = f"head dimension | heads | tokens | keys seen | {names}"
    return f"{markdown(header, rows)}\n\n{measured_on(result)}"


@table
def fused_families() -> str:
    """Families beside a plain Llama of the same matrices."""
    result = load("fused_families_h100")
    rows = [
        [
            row["family"],
            f"`{row['recipe']}`",
            f"{row['ms']:.1f}",
            f"{row['plain_ms']:.1f}",
            f"{row['speed']:.3f}",
        ]
        for row in result["rows"]
        if row["family"] != "heads of 80"  # it differs from the plain model in nothing
    ]
    header = "family | recipe | ms per step | plain Llama, ms | speed"
    return f"{markdown(header, rows)}\n\n{measured_on(result)}"


@table
def heads_80() -> str:
    """A model with heads of 80."""
    result = load("heads_80_h100")
    torchao = next(row for row in result["rows"] if row["name"] == "torchao")
    rows = [
        [
            f"`{row['name']}`",
            f"{row['ms']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['speed']:.2f}x",
            f"{row['speed'] / torchao['speed']:.2f}x",
            f"{row['peak_gib']:.1f} GiB",
        ]
        for row in result["rows"]
    ]
    header = "variant | ms | tokens/s | torch | torchao | peak memory"
    return f"{markdown(header, rows)}\n\n{measured_on(result)}"


@table
def readme_heads() -> str:
    """Summarize what other heads, families and experts cost."""
    heads = {row["name"]: row["ms"] for row in load("heads_80_h100")["rows"]}
    ours = heads["te-models delayed+no_edges+graph"]
    speeds = [
        r["speed"] for r in load("fused_families_h100")["rows"] if r["family"] != "heads of 80"
    ]
    experts = {
        (row["shape"], row["recipe"]): row["speed_over_bf16"]
        for row in load("expert_profile_h200")["rows"]
    }

    def over(recipe: str) -> str:
        """Say how many times as fast as BF16 a recipe is, of the widths below."""
        each = [experts[shape, recipe] for shape in ("olmoe", "gpt-oss", "a3b", "mixtral")]
        return ", ".join(f"{one:.2f}" for one in each)

    rows = [
        "With heads of 80, ten layers of width 2,560 train "
        f"{heads['torch'] / ours:.2f} times as fast as compiled PyTorch and "
        f"{heads['torchao'] / ours:.2f} times as fast as torchao. Layers of Qwen3, Qwen3.5, Gemma 3, "
        f"GLM-4, OLMo 2 and Granite have {min(speeds):.2f} to {max(speeds):.2f} of the speed of a "
        "plain Llama with the same matrices.",
        "**FP8 pays less with narrow experts**: layers of OLMoE's, gpt-oss', Qwen3-30B-A3B's and "
        f"Mixtral's widths are {over('delayed')} times as fast as our own BF16 under `delayed`, "
        f"{over('current')} under `current` and {over('blockwise')} under `blockwise` (on an H200).",
    ]
    return "\n".join(f"- {prose(row)}".replace("\n", "\n  ") for row in rows)


@table
def expert_recipes() -> str:
    """Steps of models with experts under each recipe."""
    result = load("expert_profile_h200")
    names = {
        "olmoe": "OLMoE's width",
        "gpt-oss": "gpt-oss' width",
        "a3b": "Qwen3-30B-A3B's width",
        "mixtral": "Mixtral's width",
    }
    rows = []
    for row in result["rows"]:
        rows.append(
            [
                names[row["shape"]],
                f"`{row['recipe']}`",
                f"{row['ms']:.1f}",
                f"{row['speed_over_bf16']:.2f}x",
                f"{row['peak_gib']:.1f} GiB",
            ]
        )
    header = "shape | recipe | ms | over own BF16 | peak memory"
    about = "All as CUDA graphs, no BF16 edges, a vocabulary of 32,000."
    return f"{markdown(header, rows)}\n\n{prose(about)} {measured_on(result)}"
