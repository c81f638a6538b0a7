"""Tables of attention kernels by head dimension, and of the families whose attention or MLP asks for more."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.text import load, markdown, measured_on, prose, table

KERNELS = {
    "cudnn": "cuDNN",
    "flash2": "FlashAttention-2",
    "spans": "ours",
    "flash4": "FlashAttention-4",
}
# Relative error of BF16's rounding, with room: a kernel beyond it computed something else.
BOUND = 0.01


@table
def attention_kernels() -> str:
    """Forward and backward of each attention kernel on an H100, without FlashAttention-4."""
    return _attention_kernels("attention_kernels_h100", ("cudnn", "flash2", "spans"))


@table
def attention_kernels_4() -> str:
    """Forward and backward of FlashAttention-4 beside the kernels that a model takes, on an H200."""
    return _attention_kernels("attention_kernels_h200", tuple(KERNELS))


def _attention_kernels(file: str, names: tuple[str, ...]) -> str:
    """Return the table of the kernels `names` in a result of benchmarks/attention_kernels.py."""
    result = load(file)

    def cell(row: dict[str, Any], name: str) -> str:
        if name not in row["ms"]:
            return ""
        if row["error"][name] > BOUND:
            return "wrong" if name == "flash4" else ""
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
            [str(row["dim"]), heads, tokens, row["mask"], *(cell(row, name) for name in names)]
        )
    titles = " | ".join(f"{KERNELS[name]}, ms" for name in names)
    header = f"head dimension | heads | tokens | keys seen | {titles}"
    return f"{markdown(header, rows)}\n\n{measured_on(result)}"


FAMILIES = "fused_families_h200"
GOAL = 0.97  # of the speed of a plain Llama, which was asked of each family


def family_rows() -> list[dict[str, Any]]:
    """Return the rows of the families; "heads of 80" differs from its plain model in nothing."""
    return [row for row in load(FAMILIES)["rows"] if row["family"] != "heads of 80"]


@table
def fused_families() -> str:
    """Families beside a plain Llama of the same matrices."""
    rows = []
    for row in family_rows():
        times = [f"{row['ms']:.1f}", f"{row['plain_ms']:.1f}", f"{row['ms'] - row['plain_ms']:.1f}"]
        rows.append([row["family"], f"`{row['recipe']}`", *times, f"{row['speed']:.3f}"])
    header = "family | recipe | ms per step | plain Llama, ms | more, ms | speed"
    return f"{markdown(header, rows)}\n\n{measured_on(load(FAMILIES))}"


@table
def fused_families_result() -> str:
    """Families that are slower than was asked, under each recipe."""
    lines = []
    for recipe in ("delayed", "bf16"):
        below = []
        for row in family_rows():
            if row["recipe"] == recipe and row["speed"] < GOAL:
                below.append(f"{row['family']} {row['speed']:.3f}")
        lines.append(f"- Below {GOAL} under `{recipe}`: {', '.join(below) or 'none'}.")
    return "\n".join(lines)


# Kernels of benchmarks/head_casts.py -> what they compute.
CASTS = {
    "rotate": "RoPE's gradient",
    "norm_backward": "QK-norm's and RoPE's gradient",
    "gate": "gate",
    "gate_backward": "gate's gradient",
}


@table
def head_casts() -> str:
    """Kernels of heads that write FP8 beside a copy of their bytes, and their tile beside the others."""
    result = load("head_casts_h200")
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_case.setdefault((row["shape"]["name"], row["kernel"]), []).append(row)
    lines = []
    over_best: dict[tuple[int, int], list[float]] = {}
    default = (0, 0)
    for (name, kernel), rows in by_case.items():
        best = min(rows, key=lambda row: row["ms"])
        for row in rows:
            tile = (row["tokens"], row["warps"])
            over_best.setdefault(tile, []).append(row["ms"] / best["ms"])
            if row["default"]:
                default = tile
                own = row
        shape = best["shape"]
        size = f"{shape['batch']} x {shape['seq']:,}, {shape['heads']} of {shape['dim']}"
        times = [f"{1e3 * ms:.0f}" for ms in (own["ms"], own["copy_ms"], best["ms"])]
        ratio = f"{own['ms'] / own['copy_ms']:.2f}x"
        lines.append([f"{name}: {size}", CASTS[kernel], *times, ratio])
    means = {tile: sum(ratios) / len(ratios) for tile, ratios in over_best.items()}
    others = sorted(mean for tile, mean in means.items() if tile != default)
    about = prose(
        f"Medians in a CUDA graph, microseconds. The tile in use, {default[0]} tokens by {default[1]} warps, takes "
        f"{means[default]:.2f} times the best of six tiles in the mean of these rows, the others {others[0]:.2f} to "
        f"{others[-1]:.2f} times. {measured_on(result)}"
    )
    header = "tokens, query heads | kernel | time | copy of its bytes | best tile | time over copy"
    return f"{about}\n\n{markdown(header, lines)}"


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
    speeds = [row["speed"] for row in family_rows()]
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
        f"{heads['torchao'] / ours:.2f} times as fast as torchao (on an H100).",
        "Layers of Qwen3, Qwen3.5, Gemma 3, GLM-4, OLMo 2 and Granite have "
        f"{min(speeds):.2f} to {max(speeds):.2f} of the speed of a plain Llama with the same matrices (on an H200).",
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
