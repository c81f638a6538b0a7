"""Tables of speed and memory on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.scaling import Assumptions, ExpertLayer, dense_table, experts_table
from benchmarks.tables.text import GIB, TABLES, load, markdown, measured_on, prose, table

VARIANTS = {
    "torch": "torch BF16, compiled",
    "torchao": "torchao float8, compiled",
    "te-layer": "te.TransformerLayer, `delayed` (no gate, so fewer FLOPs)",
    "te-models delayed+plain+no_edges": "te-models `delayed`, `fused=False`, eager",
    "te-models delayed+no_edges": "te-models `delayed`, eager",
    "te-models bf16+graph": "te-models `bf16`",
    "te-models delayed+no_edges+graph": "**te-models `delayed`**",
    "te-models delayed": "te-models `delayed`, first and last layer in BF16, eager",
    "te-models delayed+graph": "**te-models `delayed`, first and last layer in BF16**",
}

OURS = {
    "all in FP8": "te-models delayed+no_edges+graph",
    "first and last in BF16": "te-models delayed+graph",
}

RUNS = {
    "350m": 5,
    "1b": 6,
    "8b-width": 7,
    "454m": 3,
    "350m-one-sequence": 4,
}  # place in step_h200.json

SHAPES = {"8b-width": "8B width (4 layers)", "454m": "454M (896 wide, 31 layers)"}


def step_rows(key: str) -> tuple[str, dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the name of a shape, its rows by variant, and the run they are from."""
    run = load("step_h200")["runs"][RUNS[key]]
    settings = run["settings"]
    name = SHAPES.get(key) or f"`{settings['preset']}`"
    return (
        f"{name}, {settings['batch_size']} x {settings['seq_len']:,}",
        {r["name"]: r for r in run["rows"]},
        run,
    )


def step(key: str) -> str:
    """One run of `te-models bench`."""
    shape, rows, run = step_rows(key)
    table = markdown(
        "variant | ms (quartiles) | tokens/s | model TFLOP/s | speed | of the roofline | peak memory",
        (
            [VARIANTS[name], f"{r['ms']:.1f} ({r['ms_quartiles'][0]:.1f} to {r['ms_quartiles'][1]:.1f})",
             f"{r['tokens_per_second']:,.0f}", f"{r['model_tflops']:,.0f}", f"{r['speed']:.2f}x",
             f"{r['of_roofline']:.2f}", f"{r['peak_gib']:.2f} GiB"]
            for name, r in rows.items()
        ),
    )  # fmt: skip
    return f"{prose(f'{shape} tokens per step. {measured_on(run)}')}\n\n{table}"


TABLES |= {f"step-{key}": partial(step, key) for key in RUNS}


@table
def readme_speed() -> str:
    """The one table of speed and memory in the README."""
    lines = []
    for key in ("350m", "1b", "8b-width"):
        shape, rows, _ = step_rows(key)
        for layers, name in OURS.items():
            ours, torch = rows[name], rows["torch"]
            others = [
                f"{ours['speed'] / rows[peer]['speed']:.2f}x"
                for peer in ("torch", "torchao", "te-layer")
            ]
            memory = f"{ours['peak_gib']:.1f} ({torch['peak_gib']:.1f}) GiB"
            lines.append([shape, layers, f"{ours['tokens_per_second']:,.0f}", *others, memory])
    header = "model, tokens per step | layers | tokens/s | torch | torchao | te.TransformerLayer | peak memory (torch)"
    return f"{markdown(header, lines)}\n\n{measured_on(load('step_h200')['runs'][RUNS['1b']])}"


@table
def readme_8b() -> str:
    """Summarize the speed of an 8B model on H200s in three sentences."""
    generated = {}
    for row in load("tokens_h200")["rows"]:
        if (row["model"], row["batch"]) == ("llama-3.1-8b", 1):
            generated[row["recipe"], row["prompt"]] = row
    fp8 = 1 / generated["delayed", 512]["step"]
    bf16 = 1 / generated["bf16", 512]["step"]
    prompts = []
    for length in (2048, 512):
        for recipe in ("delayed", "bf16"):
            prompts.append(f"{1e3 * generated[recipe, length]['replayed']:.1f}")
    hf = next(
        r["decode_tokens_per_second"]
        for r in load("generate_h200")["rows"]
        if (r["model"], r["batch"], r["who"]) == ("llama-3.1-8b", 1, "transformers default")
    )
    whole = trained_8b("full", "current")
    rows = [
        r for r in load("scaling_h200")["rows"] if r["preset"] == "llama-3.1-8b" and r.get("edges")
    ]
    best = {
        recipe: max(r["tokens_per_second_each"] for r in rows if r["recipe"] == recipe)
        for recipe in ("delayed", "bf16")
    }
    return (
        f"- `llama-3.1-8b` trains in full on one H200 in {whole['peak'] / GIB:.1f} GiB, with 8-bit AdamW and\n"
        f"  full recomputation, at {whole['tokens_per_second']:,.0f} tokens/s under `current`.\n"
        "- Compared with TRL's SFTTrainer in BF16, on packed chat records, it trains\n"
        f"  {to_trl('full', 'current')}; LoRA is {to_trl('lora', 'current')}, or, with\n"
        f"  activations offloaded, {to_trl('lora', 'current+offload')}.\n"
        f"- With FSDP2 on two H200s it trains at {best['delayed']:,.0f} tokens/s per GPU under `delayed`, "
        f"{best['delayed'] / best['bf16']:.2f} times as fast as in BF16.\n"
        f"- At batch size 1 it generates {fp8:.0f} tokens/s in FP8 and {bf16:.0f} in BF16; transformers generated "
        f"{hf:.0f} on another day.\n"
        f"- From the third prompt of a length on, one of 2,048 tokens takes {prompts[0]} ms under `delayed` and "
        f"{prompts[1]} in BF16,\n  one of 512 {prompts[2]} and {prompts[3]}; before, the host sets the pace."
    )


@table
def first_light() -> str:
    """One training run per recipe."""
    result = load("first_light_h200")
    run, base = result["run"], result["recipes"]["bf16"]
    table = markdown(
        "recipe | final eval loss | relative to BF16 | tokens/s | relative to BF16 | peak memory",
        (
            [f"`{name}`", f"{r['eval_loss']:.4f}", f"{100 * (r['eval_loss'] / base['eval_loss'] - 1):+.2f} %",
             f"{r['tokens_per_second']:,.0f}", f"{r['tokens_per_second'] / base['tokens_per_second']:.2f}x",
             f"{r['peak_memory'] / GIB:.2f} GiB"]
            for name, r in result["recipes"].items()
        ),
    )  # fmt: skip
    about = f"`{run['preset']}`, {run['steps']} steps of {run['batch_size']} x {run['seq_len']:,} tokens, one seed."
    return f"{prose(f'{about} {measured_on(result)}')}\n\n{table}"


@table
def profile() -> str:
    """Kernel times of an eager step."""
    runs = {"`gated-1b`": load("profile_1b_h200"), "8B width": load("profile_8b4_h200")}
    kinds = sorted(runs["`gated-1b`"]["ms"], key=lambda kind: -runs["`gated-1b`"]["ms"][kind])
    rows = [[kind, *(f"{run['ms'][kind]:.2f}" for run in runs.values())] for kind in kinds]
    rows.append(["**sum**", *(f"**{sum(run['ms'].values()):.1f}**" for run in runs.values())])
    return f"{markdown('kernels, ms per step | ' + ' | '.join(runs), rows)}"


@table
def checkpoint_grid() -> str:
    """Memory and speed of every mode of activation checkpointing."""
    result = load("checkpoint_grid_h200")

    def lines() -> Iterator[list[str]]:
        for name, rows in result["rows"].items():
            for r in rows:
                none = next(
                    o for o in rows if o["mode"] == "none" and precision_of(o) == precision_of(r)
                )
                yield [name, f"`{r['recipe']}`", precision_of(r)[1], r["mode"], f"{r['peak'] / GIB:.2f} GiB",
                       f"{r['activations'] / GIB:.2f} GiB", f"{r['activations'] / none['activations']:.2f}x",
                       f"{r['tokens_per_second']:,.0f}",
                       f"{r['tokens_per_second'] / none['tokens_per_second']:.2f}x"]  # fmt: skip

    header = (
        "model | recipe | weights | mode | peak | activations | vs `none` | tokens/s | vs `none`"
    )
    return f"{measured_on(result)}\n\n{markdown(header, lines())}"


def precision_of(row: dict[str, Any]) -> tuple[str, str]:
    """Return the recipe and the format of the weights of a row."""
    return row["recipe"], "FP8" if row["fp8_params"] else "BF16"


def _generation(name: str) -> str:
    """Return prefill and decoding beside transformers, as the result `name` has them."""
    result = load(name)
    base = {(r["model"], r["batch"]): r["decode_tokens_per_second"] for r in result["rows"]
            if r["who"] == "transformers default"}  # fmt: skip
    rows = (
        [f"`{r['model']}`", str(r["batch"]), r["who"], f"{r['prefill_tokens_per_second']:,.0f}",
         f"{r['decode_tokens_per_second']:,.0f}",
         f"{r['decode_tokens_per_second'] / base[r['model'], r['batch']]:.1f}x",
         f"{r['peak_device_bytes'] / GIB:.2f} GiB"]
        for r in result["rows"]
    )  # fmt: skip
    header = "model | batch | by | prefill, tokens/s | decoding, tokens/s | vs transformers | peak memory"
    return (
        f"A prompt of {result['prompt']} tokens. {measured_on(result)}\n\n{markdown(header, rows)}"
    )


@table
def generation() -> str:
    """Prefill and decoding beside transformers, at 1.7B."""
    return _generation("generate_h100")


@table
def generation_8b() -> str:
    """Prefill and decoding beside transformers, at 8B."""
    return _generation("generate_8b_h200")


@table
def generation_tokens() -> str:
    """Time of the first token of a prompt, launched by the host and replayed, and of a further one."""
    result = load("tokens_h200")
    bf16 = {}
    for row in result["rows"]:
        if row["recipe"] == "bf16":
            bf16[row["model"], row["batch"], row["prompt"]] = row
    lines = []
    for row in result["rows"]:
        base = bf16[row["model"], row["batch"], row["prompt"]]
        ours = row["recipe"] != "transformers"
        cells = [
            f"`{row['model']}`",
            f"{row['batch']} x {row['prompt']:,}",
            f"`{row['recipe']}`" if ours else row["recipe"],
            f"{1e3 * row['launched']:.1f}",
        ]
        for field, digits in (("replayed", 1), ("step", 2)):
            if not ours:
                cells += ["", ""]
                continue
            cells += [f"{1e3 * row[field]:.{digits}f}", f"{base[field] / row[field]:.2f}x"]
        lines.append(cells)
    header = (
        "model | prompts | recipe | first token, launched, ms | replayed, ms | of BF16's speed | "
        "next token, ms | of BF16's speed"
    )
    return f"{measured_on(result)}\n\n{markdown(header, lines)}"


@table
def loading() -> str:
    """Time and host memory to load a checkpoint."""
    rows = (
        [f"`{r['model']}`", f"{r['shards']}, {r['largest_shard_bytes'] / GIB:.2f} GiB", r["reader"],
         f"{r['seconds']:.1f}", f"{r['peak_host_bytes'] / GIB:.2f} GiB", f"{r['peak_device_bytes'] / GIB:.2f} GiB"]
        for r in load("generate_h200")["loading"]
    )  # fmt: skip
    return markdown(
        "checkpoint | shards, largest | read by | seconds | peak host memory | peak device memory",
        rows,
    )


@table
def chat_finetune() -> str:
    """Steps of fine-tuning on packed chat records, beside TRL's."""
    result = load("finetune_against_trl_h200")
    shapes, names = result["shapes"], {"trl": "TRL", "trl-documents": "TRL, documents apart"}
    names["current+offload"] = "`current`, activations offloaded"
    trl = {(r["shape"], r["method"]): r for r in result["rows"] if r["way"] == "trl"}

    def cells(r: dict[str, Any]) -> list[str]:
        other = trl[r["shape"], r["method"]]
        return [f"`{r['shape']}`, {shapes[r['shape']]['batch_size']} x {shapes[r['shape']]['seq_len']:,}",
                {"full": "all weights", "lora": f"LoRA, rank {result['rank']}"}[r["method"]],
                names.get(r["way"], f"`{r['way']}`"), f"{r['tokens_per_second']:,.0f}",
                f"{r['tokens_per_second'] / other['tokens_per_second']:.2f}x", f"{r['peak'] / GIB:.1f} GiB",
                f"{r['peak'] / other['peak']:.2f}x", f"{r['losses'][-1]:.3f} ({len(r['losses'])})"]  # fmt: skip

    header = "model, tokens per step | trained | recipe | tokens/s | to TRL | peak memory | to TRL | loss (steps)"
    return f"{markdown(header, map(cells, result['rows']))}\n\n{measured_on(result)}"


@table
def calibrated_finetune() -> str:
    """Losses of fine-tuning under delayed scaling as it starts now."""
    result = load("finetune_against_trl_h100")
    losses = {
        row["method"]: row["losses"][-1]
        for row in result["rows"]
        if row["way"] == "delayed" and row["shape"] == "llama-3.1-8b"
    }
    return prose(
        "The rows of `delayed` began with scales of 1. Calibrated, as it is by default now, `llama-3.1-8b` ends at "
        f"{losses['full']:.3f} (all weights) and {losses['lora']:.3f} (LoRA). {measured_on(result)}"
    )


@table
def span_attention() -> str:
    """Attention over documents and windows, with spans and with a mask."""
    result = load("span_attention_h200")
    shapes = result["shapes"]

    def cells(r: dict[str, Any]) -> list[str]:
        shape = shapes[str(r["channels"])]
        heads = (
            f"{shape['heads']}, {shape['shared']} shared"
            if shape["heads"] != shape["shared"]
            else f"{shape['heads']}"
        )
        times = [
            f"{r[way][part]:.2f}" for way in ("spans", "masked") for part in ("forward", "both")
        ]
        return [
            f"{shape['batch']} x {shape['seq']:,}",
            f"{heads} of {r['channels']}",
            r["mask"],
            *times,
        ]

    header = "tokens | heads | keys seen | spans: forward, ms | with backward, ms"
    header += " | PyTorch: forward, ms | with backward, ms"
    return f"{markdown(header, map(cells, result['rows']))}\n\n{measured_on(result)}"


@table
def finetune_8b() -> str:
    """A whole 8B model on one GPU."""
    result, row = load("finetune_against_trl_h200"), trained_8b("full", "delayed")
    shape = result["shapes"][row["shape"]]
    return prose(
        f"`{row['shape']}` under `{row['way']}`, `adamw8bit` with `stochastic_rounding=true`, "
        f'`activation_checkpointing="{shape["recompute"]}"`, {shape["batch_size"]} x {shape["seq_len"]:,} tokens: '
        f"{row['peak'] / GIB:.1f} GiB at the peak and {row['tokens_per_second']:,.0f} tokens/s. {measured_on(result)}"
    )


def trained_8b(method: str, way: str) -> dict[str, Any]:
    """Return a row of an 8B model that is fine-tuned on chat records."""
    wanted = ("llama-3.1-8b", method, way)
    rows = load("finetune_against_trl_h200")["rows"]
    return next(r for r in rows if (r["shape"], r["method"], r["way"]) == wanted)


def to_trl(method: str, way: str) -> str:
    """Return the speed and the memory of such a row relative to TRL's."""
    row, other = trained_8b(method, way), trained_8b(method, "trl")
    speed, memory = (
        row["tokens_per_second"] / other["tokens_per_second"],
        row["peak"] / other["peak"],
    )
    room = (
        "in the same memory"
        if abs(memory - 1) < 0.01
        else f"in {100 * (1 - memory):.0f} % less memory"
    )
    return f"{speed:.2f} times as fast {room}"


@table
def scaling() -> str:
    """Whole training steps on two GPUs and four."""
    rows = []
    names = ("scaling_h200", "expert_scaling_h100_x2", "expert_scaling_h200_x2")
    for name in (*names, "expert_scaling_h200_x4"):
        rows += load(name)["rows"]
    alone = next(r["tokens_per_second_alone"] for r in rows if r.get("alone"))

    def cells(r: dict[str, Any]) -> list[str]:
        flags = ["--no-reshard-after-forward"] * (not r["reshard"])
        flags += [f"--parallel {r['parallel']}"] * (r["parallel"] != "fsdp")
        flags += [f"--reduce-dtype {r['reduce_dtype']}"] * (r["reduce_dtype"] != "float32")
        flags += [f"--prefetch-blocks {r['prefetch']}"] * (r["prefetch"] != 1)
        edges = "" if r.get("edges", True) else ", all layers"
        share = r.get("kept") or (
            r["tokens_per_second_each"] / alone if r["preset"] == "gated-1b" else None
        )
        return [
            str(r["processes"]), r.get("label", f"`{r['preset']}`"),
            f"{r['accumulation']} x {r['batch_size']} x {r['seq_len']:,}",
            f"`{r['recipe']}`{edges}", " ".join(f"`{flag}`" for flag in flags) or "defaults",
            f"{r['tokens_per_second_each']:,}", f"{r['model_tflops_each']:.0f}", f"{share:.2f}" if share else "",
            f"{r['peak_gib']:.1f} GiB" if "peak_gib" in r else "", str(r["run"]),
        ]  # fmt: skip

    header = (
        "GPUs | model | micro-batches x sequences x tokens, per GPU | recipe | flags | tokens/s per GPU | "
        "model TFLOP/s | relative to one GPU | peak memory | run"
    )
    return markdown(header, map(cells, rows))


@table
def scaling_estimate() -> str:
    """The estimate for more GPUs."""
    a = Assumptions.measured()
    about = (
        f"{1e3 * a.compute:.1f} ms forward and backward of 8 x 2,048 tokens on one H200, and "
        f"{1e3 * a.contention:.1f} ms that FSDP2 adds on two."
    )
    return f"{prose(about)}\n\n{markdown(*dense_table(a))}"


@table
def experts_estimate() -> str:
    """The estimate for GPUs that share the experts of a layer."""
    layer = ExpertLayer.measured()
    about = f"{1e3 * layer.compute:.1f} ms of computation per layer: a quarter of four layers "
    about += "under `bf16`, on one H100."
    return f"{prose(about)}\n\n{markdown(*experts_table(Assumptions.measured(), layer))}"
