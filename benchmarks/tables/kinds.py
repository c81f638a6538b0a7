"""Tables of the speed of hybrids and of models with experts."""

from __future__ import annotations

import textwrap
from typing import Any

from benchmarks.tables.text import GIB, load, markdown, measured_on, prose, table


def _beside(row: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the cells of a step: milliseconds, speed over the other's, peak memory."""
    return [f"{row['ms']:.0f}", f"{other['ms'] / row['ms']:.2f}x", f"{row['peak_gib']:.1f} GiB"]


KINDS_RECIPES = (
    "bf16",
    "current",
    "delayed",
)  # under which a step of any kind of layer is one CUDA graph


@table
def experts_speed() -> str:
    """Slices of models with experts, beside transformers."""
    result = load("kinds_h100")
    rows = {row["name"]: row for row in result["rows"]}
    labels = {
        "transformers": "transformers BF16, compiled",
        "torchao": "the same, torchao's FP8 for experts",
    }
    labels |= {name: f"te-models `{name}`" for name in KINDS_RECIPES}
    slices = {"a3b-layers": "128 experts of 768", "mixtral-layers": "8 experts of 14,336"}
    lines = []
    for shape, experts in slices.items():
        for name, label in labels.items():
            row, theirs = (rows[f"{shape} 4x4096 {one}"] for one in (name, "transformers"))
            lines.append([experts, label, *_beside(row, theirs)])
    about = (
        "Four layers of the width of Qwen3-30B-A3B (8 of 128 experts per token) and two of Mixtral (2 of 8), with a "
        "vocabulary of 1,024: 4 x 4,096 tokens, forward and backward, beside transformers' `grouped_mm`. "
        f"{measured_on(result)}"
    )
    return f"{prose(about)}\n\n{markdown('experts | variant | ms | speed | peak memory', lines)}"


@table
def lora_experts() -> str:
    """Adapters on all experts of a large model."""
    result = load("lora_experts_h100")
    return prose(
        f"All {result['layers']} layers of Qwen3.5-35B-A3B ({result['parameters'] / 1e9:.1f} billion parameters, "
        f"random) with adapters of rank {result['rank']} on {result['adapters']} ({result['trained'] / 1e9:.2f} "
        f"billion parameters), the rest in FP8 under `{result['recipe']}`, all activations recomputed: "
        f"{result['tokens_per_second']:,.0f} tokens/s at {result['batch']} x {result['seq']:,} tokens per step, "
        f"{result['peak'] / GIB:.1f} GiB at the peak (planned: {result['planned'] / GIB:.1f}). {measured_on(result)}"
    )


@table
def hybrids_speed() -> str:
    """A slice of a hybrid beside transformers."""
    result = load("kinds_h100")
    rows = {row["name"]: row for row in result["rows"]}
    labels = {
        "transformers": "transformers BF16, compiled",
        **{name: f"te-models `{name}`" for name in KINDS_RECIPES},
    }
    theirs, recurrence = (
        rows[f"9b-layers 4x4096 {name}"] for name in ("transformers", "recurrence")
    )
    lines = [
        [label, *_beside(rows[f"9b-layers 4x4096 {name}"], theirs)]
        for name, label in labels.items()
    ]
    about = (
        "Four layers of the width of Qwen3.5-9B, with a vocabulary of 1,024: 4 x 4,096 tokens, forward and backward, "
        "beside transformers with flash-linear-attention. The recurrence, which stays in BF16 and FP32, takes "
        f"{recurrence['ms']:.0f} ms of them. {measured_on(result)}"
    )
    generated = {
        name: rows[f"2b decode {name}"]["tokens_per_s"]
        for name in ("current", "bf16", "transformers")
    }
    below = (
        "At batch size 1 Qwen3.5-2B generates {current:.0f} tokens/s under `current` and {bf16:.0f} in BF16; "
        "transformers generates {transformers:.0f}."
    )
    header = "variant | ms | speed | peak memory"
    parts = [
        prose(about),
        markdown(header, lines),
        prose(below.format(**generated)),
        prose(_whole_hybrid()),
    ]
    return "\n\n".join(parts)


def _whole_hybrid() -> str:
    """Return a sentence about all layers of a hybrid beside transformers."""
    result = load("kinds_h200")
    rows = {row["name"]: row for row in result["rows"]}
    cells = {name: rows[f"2b 2x4096 {name}"] for name in ("bf16", "current", "transformers")}
    ms, peak = ({name: row[key] for name, row in cells.items()} for key in ("ms", "peak_gib"))
    return (
        f"All layers of Qwen3.5-2B, 2 x 4,096 tokens, forward and backward: {ms['current']:.0f} ms under `current` and "
        f"{ms['bf16']:.0f} in BF16, {ms['transformers']:.0f} with transformers, whose layers are compiled one by one "
        f"({ms['transformers'] / ms['current']:.1f} times as long); peaks of {peak['current']:.0f}, {peak['bf16']:.0f} "
        f"and {peak['transformers']:.0f} GiB. With 4 x 4,096 tokens transformers needs more than this GPU has; "
        f"te-models needs {rows['2b 4x4096 current']['peak_gib']:.0f} GiB. {measured_on(result)}"
    )


@table
def kinds_recipes() -> str:
    """Slices with experts and of a hybrid under each recipe, beside their own BF16."""
    now, before = load("kinds_h100"), load("kinds_recipes_h100")
    slices = {
        "2b 4x4096": "Qwen3.5-2B, 4 x 4,096",
        "9b-layers 4x4096": "Qwen3.5-9B, 4 layers, 4 x 4,096",
        "9b-layers 1x32768": "Qwen3.5-9B, 4 layers, 1 x 32,768",
        "mixtral-layers 4x4096": "Mixtral, 2 layers, 4 x 4,096",
        "a3b-layers 4x4096": "Qwen3-30B-A3B, 4 layers, 4 x 4,096",
    }
    lines = []
    for shape, label in slices.items():
        for result, recipes in ((now, KINDS_RECIPES), (before, ("blockwise",))):
            rows = {row["name"]: row for row in result["rows"]}
            for recipe in recipes:
                if (row := rows.get(f"{shape} {recipe}")) is not None:
                    lines.append([label, f"`{recipe}`", *_beside(row, rows[f"{shape} bf16"])])
    about = (
        f"Forward and backward; slices have a vocabulary of 1,024. {measured_on(now)} Rows of `blockwise` are of "
        f"{before['environment']['date']}, beside BF16 of that day."
    )
    return f"{prose(about)}\n\n{markdown('model, tokens | recipe | ms | speed over `bf16` | peak memory', lines)}"


@table
def hybrid_finetune() -> str:
    """A hybrid fine-tuned on packed chat records, beside TRL."""
    result = load("finetune_against_trl_h100")
    rows = {
        (row["method"], row["way"]): row for row in result["rows"] if row["shape"] == "qwen3.5-2b"
    }
    names = {"trl": "TRL, BF16"} | {name: f"te-models `{name}`" for name in KINDS_RECIPES}
    lines = []
    for (method, way), row in rows.items():
        other = rows[method, "trl"]
        trained = {"full": "all weights", "lora": f"LoRA, rank {result['rank']}"}[method]
        speed, peak = (
            f"{row['tokens_per_second'] / other['tokens_per_second']:.2f}x",
            f"{row['peak'] / GIB:.1f} GiB",
        )
        loss = f"{row['losses'][-1]:.3f} ({len(row['losses'])})"
        lines.append([trained, names[way], f"{row['tokens_per_second']:,.0f}", speed, peak, loss])
    shape = result["shapes"]["qwen3.5-2b"]
    about = (
        f"The shape of Qwen3.5-2B with random weights, {shape['batch_size']} x {shape['seq_len']:,} tokens of packed "
        "conversations, all activations recomputed, 8-bit AdamW (AdamW for adapters, on FP8 weights under `current` "
        f"and `delayed`); TRL's SFTTrainer on the same rows sees the documents of a row as one. {measured_on(result)}"
    )
    table = markdown("trained | with | tokens/s | speed | peak memory | loss (steps)", lines)
    return f"{prose(about)}\n\n{table}\n\n{prose(_documents_apart())}"


def _documents_apart() -> str:
    """Return a sentence about TRL where it knows the documents of a row."""
    result = load("finetune_hybrid_h200")
    rows = {(row["method"], row["way"]): row for row in result["rows"]}
    full, lora = (rows[method, "trl-documents"] for method in ("full", "lora"))
    return (
        f"Told where each document begins, as te-models is, TRL ends at {full['losses'][-1]:.3f} (all weights) "
        f"and {lora['losses'][-1]:.3f} (LoRA); with {full['tokens_per_second']:,.0f} and "
        f"{lora['tokens_per_second']:,.0f} tokens/s, beside {rows['lora', 'trl']['tokens_per_second']:,.0f} with the "
        f"documents as one and te-models' {rows['lora', 'current']['tokens_per_second']:,.0f} under `current` (LoRA). "
        f"{measured_on(result)} A fused projection has one A here, a separate one per part in peft."
    )


@table
def readme_kinds() -> str:
    """Summarize the speed of hybrids and experts in two sentences."""
    own, whole = (
        {row["name"]: row for row in load(name)["rows"]} for name in ("kinds_h100", "kinds_h200")
    )
    tuned = {row["way"]: row["tokens_per_second"] for row in load("finetune_against_trl_h100")["rows"]
             if (row["shape"], row["method"]) == ("qwen3.5-2b", "full")}  # fmt: skip
    lora = load("lora_experts_h100")

    def gain(
        rows: dict[str, dict[str, Any]], shape: str, words: str = " times as fast with"
    ) -> str:
        ours, theirs = rows[f"{shape} current"], rows[f"{shape} transformers"]
        return f"{theirs['ms'] / ours['ms']:.1f}{words} {ours['peak_gib'] / theirs['peak_gib']:.2f} of the memory"

    sentences = (
        "Beside transformers in BF16, compiled and with flash-linear-attention, a step of the hybrid Qwen3.5-2B is "
        f"{gain(whole, '2b 2x4096')} (four layers of 9B's width: {gain(own, '9b-layers 4x4096', ' times,')}). "
        f"Fine-tuning it is {tuned['current'] / tuned['trl']:.1f} times as fast as with TRL.",
        "Beside transformers' compiled `grouped_mm`, layers of Qwen3-30B-A3B, with 128 experts, are "
        f"{gain(own, 'a3b-layers 4x4096')}, of Mixtral {gain(own, 'mixtral-layers 4x4096', ' times,')}. LoRA on all "
        f"experts of Qwen3.5-35B-A3B takes one H100: {lora['tokens_per_second']:,.0f} tokens/s in "
        f"{lora['peak'] / GIB:.1f} GiB.",
    )
    return "\n".join(
        textwrap.fill(f"- {sentence}", 118, subsequent_indent="  ") for sentence in sentences
    )


# Slices of kinds_speed.py --mixers, beside the packages that transformers ran with.
MIXERS = {
    "mamba2": "Mamba 2 (Granite 4 H Micro)",
    "short_conv": "short convolution (LFM2 1.2B)",
    "kda": "Kimi Delta Attention (Kimi Linear's width, dense)",
    "mamba2_beside_attention": "Mamba 2 beside attention (Falcon-H1 3B)",
}


@table
def mixers_speed() -> str:
    """Slices with newer mixers beside transformers, as far as they were measured."""
    parts = [_mixers(name) for name in ("mixers_h200", "mixers_h100")]
    about = prose(
        "Slices of four layers, six with Mamba 2, with a vocabulary of 1,024: 2 x 4,096 tokens, forward and backward, "
        "beside transformers 5.17.0 in BF16, compiled."
    )
    return "\n\n".join([about, *parts])


def _mixers(file: str) -> str:
    """Return the table of one GPU's measurements."""
    result = load(file)
    rows = {row["name"]: row for row in result["rows"] if "error" not in row}
    labels = {name: f"te-models `{name}`" for name in KINDS_RECIPES}
    labels |= {"transformers": "transformers"}
    lines = []
    for mixer, said in MIXERS.items():
        theirs = rows.get(f"{mixer} 2x4096 transformers")
        own = rows.get(f"{mixer} 2x4096 bf16")
        for name, label in labels.items():
            row = rows.get(f"{mixer} 2x4096 {name}")
            if row is None:
                continue
            cells = [said, label, f"{row['ms']:.1f}", f"{row['peak_gib']:.2f} GiB"]
            if theirs is None:
                cells += ["", ""]
            else:
                cells += [
                    f"{theirs['ms'] / row['ms']:.2f}x",
                    f"{row['peak_gib'] / theirs['peak_gib']:.2f}",
                ]
            cells.append("" if own is None else f"{own['ms'] / row['ms']:.2f}x")
            lines.append(cells)
    header = (
        "mixer | variant | ms | peak memory | speed to transformers | memory to transformers | "
        "speed to own BF16"
    )
    text = f"{measured_on(result)}\n\n{markdown(header, lines)}"
    failed = [row for row in result["rows"] if "error" in row and row["name"].split()[0] in MIXERS]
    if failed:
        said = ", ".join(f"`{row['name']}` ({row['error']})" for row in failed)
        text += "\n\n" + prose(f"Without a figure: {said}.")
    return text
