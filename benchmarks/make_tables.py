"""Generate the tables and plots of README.md and docs/ from benchmarks/results/*.json.

    python -m benchmarks.make_tables            # rewrite the tables
    python -m benchmarks.make_tables --plots    # draw the plots of docs/results/ as well

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a key of `TABLES`. tests/test_docs.py
fails if a file differs from what this script writes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.planned_memory import load, planned_and_measured
from benchmarks.soak import draw as draw_soak
from te_models.interop.hf_families import FAMILIES
from te_models.planning.parameter_bytes import OPTIMIZERS

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
GIB = 2**30

# The name of a variant in `te-models bench` -> its name in a table.
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
OURS = {"all in FP8": "te-models delayed+no_edges+graph", "first and last in BF16": "te-models delayed+graph"}
RUNS = {"350m": 5, "1b": 6, "8b-width": 7, "454m": 3, "350m-one-sequence": 4}  # place in step_h200.json
SHAPES = {"8b-width": "8B width (4 layers)", "454m": "454M (896 wide, 31 layers)"}


def markdown(header: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; `header` has its columns separated by "|"."""
    columns = [column.strip() for column in header.split("|")]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def prose(text: str) -> str:
    """Wrap one paragraph."""
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def measured_on(result: dict[str, Any]) -> str:
    """Return one sentence with the machine, versions and date of a result."""
    where = result["environment"]
    parts = [where.get("gpu") and f"one {where['gpu']}", f"torch {where['torch'].split('+')[0]}"]
    if "gpu" in where:
        parts.append(f"Transformer Engine {where['transformer-engine']}")
    return f"Measured on {', '.join(filter(None, parts))}, {where['date']}."


def step_rows(key: str) -> tuple[str, dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the name of a shape, its rows by variant, and the run they are from."""
    run = load("step_h200")["runs"][RUNS[key]]
    settings = run["settings"]
    name = SHAPES.get(key) or f"`{settings['preset']}`"
    return f"{name}, {settings['batch_size']} x {settings['seq_len']:,}", {r["name"]: r for r in run["rows"]}, run


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


def readme_speed() -> str:
    """The one table of speed and memory in the README."""
    lines = []
    for key in ("350m", "1b", "8b-width"):
        shape, rows, _ = step_rows(key)
        for layers, name in OURS.items():
            ours, torch = rows[name], rows["torch"]
            others = [f"{ours['speed'] / rows[peer]['speed']:.2f}x" for peer in ("torch", "torchao", "te-layer")]
            memory = f"{ours['peak_gib']:.1f} ({torch['peak_gib']:.1f}) GiB"
            lines.append([shape, layers, f"{ours['tokens_per_second']:,.0f}", *others, memory])
    header = "model, tokens per step | layers | tokens/s | torch | torchao | te.TransformerLayer | peak memory (torch)"
    return f"{markdown(header, lines)}\n\n{measured_on(load('step_h200')['runs'][RUNS['1b']])}"


def readme_story() -> str:
    """Show the end of `make finetune`: the loss, and the second of its samples with the first line of the answer before."""
    result = load("make_finetune_cpu")
    lines = [line.rstrip() for line in result["output"]]
    losses = [line.strip() for line in lines if line.startswith((" eval loss before", " eval loss after"))]
    parts: dict[str, list[str]] = {}
    samples = [n for n, line in enumerate(lines) if line.startswith("sample ")]
    for line in lines[samples[1] : samples[2]]:
        if line in ("prompt", "answer in the data", "before", "after"):
            parts[line] = []
        elif parts and line:
            list(parts.values())[-1].append(line)
    shown = [
        *losses,
        "",
        *parts["prompt"],
        "",
        f"before  {parts['before'][0].strip()} ...",
        f"after   {' '.join(parts['after'])}",
    ]
    minutes = f"{result['seconds'] // 60} min {result['seconds'] % 60} s"
    about = f"It took {minutes}, {'without' if result['installed_before'] else 'with'} the installation."
    return "\n".join(["```", *shown, "```", "", about])


def readme_8b() -> str:
    """Summarize the speed of an 8B model on H200s in three sentences."""
    run = {(r["model"], r["batch"], r["who"]): r["decode_tokens_per_second"] for r in load("generate_h200")["rows"]}
    fp8, bf16, hf = (
        run["llama-3.1-8b", 1, who] for who in ("te-models delayed", "te-models bf16", "transformers default")
    )
    whole = load("finetune_8b_h200")
    rows = [r for r in load("scaling_h200")["rows"] if r["preset"] == "llama-3.1-8b" and r.get("edges")]
    best = {recipe: max(r["tokens_per_second_each"] for r in rows if r["recipe"] == recipe) for recipe in
            ("delayed", "bf16")}  # fmt: skip
    return "\n".join(
        [
            f"- `llama-3.1-8b` trains in full on one H200 in {whole['peak_gb'] * 1e9 / GIB:.1f} GiB, with 8-bit AdamW and",
            f"  full recomputation, at {whole['tokens_per_second']:,.0f} tokens/s.",
            f"- With FSDP2 on two H200s it trains at {best['delayed']:,.0f} tokens/s per GPU under `delayed`, "
            f"{best['delayed'] / best['bf16']:.2f} times as fast as in BF16.",
            f"- At batch size 1 it generates {fp8:.0f} tokens/s in FP8 and {bf16:.0f} in BF16; transformers generates "
            f"{hf:.0f}.",
        ]
    )


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


def fast_and_plain() -> str:
    """Training with and without the fast path, from several seeds."""
    result = load("fast_and_plain_h200")
    settings, names = result["settings"], {"held_out": "held-out loss", "last_50_steps": "training loss, last 50 steps",
                                           "all_steps": "training loss, all steps"}  # fmt: skip
    about = (
        f"`{settings['preset']}` under `{settings['recipe']}`, {settings['steps']} steps of {settings['batch_size']} x "
        f"{settings['seq_len']} tokens,\n{len(result['runs']['fast'])} seeds; the default relative to "
        f"`fused=False, compile=False` without a CUDA graph.\n{measured_on(result)}"
    )
    rows = (
        [label, f"{100 * s['mean']:+.2f} %", f"{100 * s['standard_error']:.2f} %", f"{100 * s['between_seeds']:.1f} %"]
        for label, s in ((label, result["summary"][name]) for name, label in names.items())
    )
    return f"{about}\n\n{markdown('loss | mean change | standard error | spread between seeds', rows)}"


def profile() -> str:
    """Kernel times of an eager step."""
    runs = {"`gated-1b`": load("profile_1b_h200"), "8B width": load("profile_8b4_h200")}
    kinds = sorted(runs["`gated-1b`"]["ms"], key=lambda kind: -runs["`gated-1b`"]["ms"][kind])
    rows = [[kind, *(f"{run['ms'][kind]:.2f}" for run in runs.values())] for kind in kinds]
    rows.append(["**sum**", *(f"**{sum(run['ms'].values()):.1f}**" for run in runs.values())])
    return f"{markdown('kernels, ms per step | ' + ' | '.join(runs), rows)}"


def checkpoint_grid() -> str:
    """Memory and speed of every mode of activation checkpointing."""
    result = load("checkpoint_grid_h200")

    def lines() -> Iterator[list[str]]:
        for name, rows in result["rows"].items():
            for r in rows:
                none = next(o for o in rows if o["mode"] == "none" and _variant(o) == _variant(r))
                yield [name, f"`{r['recipe']}`", _variant(r)[1], r["mode"], f"{r['peak'] / GIB:.2f} GiB",
                       f"{r['activations'] / GIB:.2f} GiB", f"{r['activations'] / none['activations']:.2f}x",
                       f"{r['tokens_per_second']:,.0f}",
                       f"{r['tokens_per_second'] / none['tokens_per_second']:.2f}x"]  # fmt: skip

    header = "model | recipe | weights | mode | peak | activations | vs `none` | tokens/s | vs `none`"
    return f"{measured_on(result)}\n\n{markdown(header, lines())}"


def _variant(row: dict[str, Any]) -> tuple[str, str]:
    return row["recipe"], "FP8" if row["fp8_params"] else "BF16"


def memory_plan() -> str:
    """Predicted and measured peaks."""
    rows = list(planned_and_measured())
    errors = [predicted / measured - 1 for _, predicted, measured in rows]
    lines = (
        [name, f"{predicted / GIB:.2f} GiB", f"{measured / GIB:.2f} GiB", f"{100 * error:+.2f} %"]
        for (name, predicted, measured), error in zip(rows, errors, strict=True)
    )
    worst = max(errors, key=abs)
    about = f"{len(rows)} peaks; the largest error is {100 * worst:+.1f} %."
    return f"{about}\n\n{markdown('run | predicted | measured | error', lines)}"


def generation() -> str:
    """Prefill and decoding beside transformers."""
    result = load("generate_h200")
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
    return f"A prompt of {result['prompt']} tokens. {measured_on(result)}\n\n{markdown(header, rows)}"


def loading() -> str:
    """Time and host memory to load a checkpoint."""
    rows = (
        [f"`{r['model']}`", f"{r['shards']}, {r['largest_shard_bytes'] / GIB:.2f} GiB", r["reader"],
         f"{r['seconds']:.1f}", f"{r['peak_host_bytes'] / GIB:.2f} GiB", f"{r['peak_device_bytes'] / GIB:.2f} GiB"]
        for r in load("generate_h200")["loading"]
    )  # fmt: skip
    return markdown("checkpoint | shards, largest | read by | seconds | peak host memory | peak device memory", rows)


def recipe_accuracy() -> str:
    """Error of the logits per recipe."""
    result = load("recipe_accuracy_cpu")
    base = next(r["perplexity"] for r in result["rows"] if r["recipe"] == "bf16")

    def cells(r: dict[str, Any]) -> list[str]:
        if "sqnr_db" not in r:
            return ["exact", "", ""]
        predicted = f"{r['predicted_db']:.1f} dB" if r["predicted_db"] is not None else ""
        return [f"{r['sqnr_db']:.1f} dB", predicted, f"{r['same_next_token']:.1%}"]

    rows = (
        [f"`{r['recipe']}`", *cells(r), f"{r['perplexity']:.4f}", f"{100 * (r['perplexity'] / base - 1):+.2f} %"]
        for r in result["rows"]
    )
    header = "recipe | SQNR of the logits | predicted | same next token | perplexity | relative to BF16"
    return markdown(header, rows)


def serving_parity() -> str:
    """Divergence of the served model from the trained one, by recipe and format."""
    result = load("serving_parity")
    recipes = result["recipes"]
    formats = [row["export"] for row in next(iter(recipes.values()))["exports"]]

    def cell(row: dict[str, Any]) -> str:
        return row["reason"] or f"{row['kl']:.1e} ({row['largest']:.2f})"

    rows = ([f"`{name}`", *map(cell, recipes[name]["exports"])] for name in recipes)
    header = "trained under | " + " | ".join(f"`{name}`" for name in formats)
    tokens = next(iter(recipes.values()))["tokens"]
    about = f"`{result['model']}` with {result['weights']}, {tokens:,} tokens. {measured_on(result)}"
    return f"{prose(about)}\n\n{markdown(header, rows)}"


def optimizer_bytes() -> str:
    """Bytes per parameter of every optimizer, from the table that the memory plan uses."""
    rows = ([f"`{name}`", o.description, str(o.master) if name != "te-adam" else "2"] for name, o in OPTIMIZERS.items())
    return markdown("optimizer | state | bytes per parameter of the master", rows)


def families() -> str:
    """Every family of Hugging Face, from the table that reads and writes them."""
    rows = ([f"`{f.model_type}`" + f" {f.sign}" * bool(f.sign), f.models, f.note] for f in FAMILIES)
    return markdown("`model_type` in config.json | models | particulars", rows)


def optimizer_memory() -> str:
    """Measured bytes of optimizer state."""
    result = load("optimizer_memory_cpu")
    base = result["rows"]["adamw"]["total_bytes"]
    rows = (
        [f"`{name.split(',')[0]}`{name[len(name.split(',')[0]):]}", f"{r['masters_bytes'] / GIB:.2f} GiB",
         f"{r['state_bytes'] / GIB:.2f} GiB", f"{r['state_bytes'] / result['parameters']:.2f}",
         f"{r['total_bytes'] / GIB:.2f} GiB", f"{1 - r['total_bytes'] / base:.0%}" if name != "adamw" else ""]
        for name, r in result["rows"].items()
    )  # fmt: skip
    header = "optimizer | masters | state | state, bytes per parameter | total with weights and gradients | saved"
    about = f"{result['parameters']:,} parameters with BF16 weights and gradients, on a CPU."
    return f"{about}\n\n{markdown(header, rows)}"


def optimizer_loss() -> str:
    """Loss of short runs per optimizer."""
    found = load("optimizer_loss_cpu")["optimizers"]
    rows = (
        [f"`{name}`", f"{r['eval_loss']:.4f}", f"{100 * (r['eval_loss'] / found['adamw']['eval_loss'] - 1):+.2f} %"]
        for name, r in found.items()
    )
    return markdown("optimizer | eval loss (nats per byte) | relative to `adamw`", rows)


def recipe_finetune() -> str:
    """The held-out loss of one model after fine-tuning under each recipe."""
    result = load("recipe_finetune_cpu")
    rows, settings = result["rows"], result["settings"]
    base = rows[0]["after"]
    lines = ([f"`{r['recipe']}`", f"{r['before']:.4f}", f"{r['after']:.4f}", f"{100 * (r['after'] / base - 1):+.2f} %"]
             for r in rows)  # fmt: skip
    about = prose(
        f"`{result['model']}` on `{result['data']}`, {settings['steps']} steps of {settings['batch_size']} x "
        f"{settings['seq_len']} tokens on a CPU (emulated engine), the same batches under each recipe; nats per token."
    )
    return f"{about}\n\n{markdown('recipe | held-out loss before | after | relative to BF16', lines)}"


def chat_finetune() -> str:
    """Steps of fine-tuning on packed chat records."""
    result = load("finetune_against_trl_h200")
    shapes = result["shapes"]
    rows = (
        [f"`{r['shape']}`, {shapes[r['shape']]['batch_size']} x {shapes[r['shape']]['seq_len']:,}",
         {"full": "all weights", "lora": f"LoRA, rank {result['rank']}"}[r["method"]], f"`{r['way']}`",
         f"{r['tokens_per_second']:,.0f}"]
        for r in result["rows"]
    )  # fmt: skip
    return f"{markdown('model, tokens per step | trained | recipe | tokens/s', rows)}\n\n{measured_on(result)}"


def finetune_8b() -> str:
    """A whole 8B model on one GPU."""
    r = load("finetune_8b_h200")
    return prose(
        f"`{r['preset']}` ({r['parameters']:,} parameters) under `{r['recipe']}`, `{r['optimizer']}` with "
        f'`{r["optimizer_options"]}`, `activation_checkpointing="{r["activation_checkpointing"]}"`, '
        f"{r['batch_size']} x {r['seq_len']:,} tokens: {r['peak_gb'] * 1e9 / GIB:.1f} GiB at the peak and "
        f"{r['tokens_per_second']:,.0f} tokens/s. {measured_on(r)}"
    )


def scaling() -> str:
    """Whole training steps on two GPUs."""
    result = load("scaling_h200")
    alone = next(r["tokens_per_second_alone"] for r in result["rows"] if r.get("alone"))

    def cells(r: dict[str, Any]) -> list[str]:
        flags = ["--no-reshard-after-forward"] * (not r["reshard"])
        flags += [f"--reduce-dtype {r['reduce_dtype']}"] * (r["reduce_dtype"] != "float32")
        flags += [f"--prefetch-blocks {r['prefetch']}"] * (r["prefetch"] != 1)
        edges = "" if r.get("edges", True) else ", all layers"
        share = r.get("kept") or (r["tokens_per_second_each"] / alone if r["preset"] == "gated-1b" else None)
        return [f"`{r['preset']}`", f"{r['accumulation']} x {r['batch_size']} x {r['seq_len']:,}",
                f"`{r['recipe']}`{edges}", " ".join(f"`{flag}`" for flag in flags) or "defaults",
                f"{r['tokens_per_second_each']:,}", f"{r['model_tflops_each']:.0f}",
                f"{share:.2f}" if share else "", f"{r['peak_gib']:.1f} GiB" if "peak_gib" in r else "",
                str(r["run"])]  # fmt: skip

    header = (
        "model | micro-batches x sequences x tokens, per GPU | recipe | flags | tokens/s per GPU | model TFLOP/s | "
        "relative to one GPU | peak memory | run"
    )
    return markdown(header, map(cells, result["rows"]))


def scaling_estimate() -> str:
    """The estimate for more GPUs."""
    from benchmarks.scaling import Assumptions, estimate

    def lines() -> Iterator[list[str]]:
        for micro_batches in (1, 8):
            for gpus in (2, 8, 64, 256, 1000):
                row = estimate(gpus, micro_batches, Assumptions())
                yield [f"{gpus:,}", str(micro_batches), f"{1e3 * row['sending']:,.0f}", f"{row['best']:.2f}",
                       f"{row['worst']:.2f}"]  # fmt: skip

    header = "GPUs | micro-batches per step | communication, ms | relative speed, all overlapped | none overlapped"
    return markdown(header, lines())


def engine_gpu() -> str:
    """The emulated engine on a GPU."""
    sizes = load("engine_gpu_h200")["linear"]
    names = [name for name in next(iter(sizes.values())) if name not in ("nn.Linear bf16", "bf16")]

    def lines() -> Iterator[list[str]]:
        for name in names:
            recipe, _, plain = name.partition(" ")
            cells = (f"{s[name]['ratio']:.1f}x ({s[name]['ms']:.2f} ms), {s[name]['launches']}" for s in sizes.values())
            yield [f"`{recipe}`{', without Triton kernels' if plain else ''}", *cells]

    header = "recipe | " + " | ".join(f"{size.replace('x', ' x ')}: time, launches" for size in sizes)
    return f"{measured_on(load('engine_gpu_h200'))}\n\n{markdown(header, lines())}"


def engine_parity() -> str:
    """Training on both engines."""
    result = load("engine_parity_h200")
    rows = (
        [f"`{name}`", *(f"{100 * found[way]['worst_loss']:.2g} %" if found[way]["worst_loss"] else "equal in every bit"
                        for way in ("free", "lockstep", "twice"))]
        for name, found in result["recipes"].items()
    )  # fmt: skip
    steps = len(next(iter(result["recipes"].values()))["free"]["steps"])
    header = "recipe | native and emulated | the same, weights copied each step | native twice"
    about = prose(f"Largest difference of the loss over {steps} steps. {measured_on(result)}")
    return f"{about}\n\n{markdown(header, rows)}"


def checkpoint_parity() -> str:
    """Training with and without recomputation on Transformer Engine."""
    result = load("checkpoint_parity_h200")
    rows = result["rows"]
    equal = sum(all(r["same"].values()) for r in rows)
    losses = sum(r["same"]["losses"] for r in rows)
    recipes = ", ".join(f"`{name}`" for name in dict.fromkeys(r["recipe"] for r in rows))
    return prose(
        f"{len(rows)} runs of {result['steps']} steps on the native engine ({recipes}; modes `selective`, `full` and "
        "2; with and without FP8 primary weights and cached weights), each compared with the run without "
        f"recomputation. Losses are equal in every bit in {losses} of {len(rows)}; weights, gradients and FP8 state in "
        f"{equal}. The others are `blockwise` with FP8 primary weights, where the hash included uninitialized padding "
        f"of the scales. {measured_on(result)}"
    )


def save_blocking() -> str:
    """How long a save delays training."""
    result = load("save_blocking_cpu")
    rows = (
        [label, ", ".join(f"{1e3 * s:,.0f} ms" if s > 0.1 else f"{1e3 * s:.1f} ms" for s in result["seconds"][name])]
        for name, label in (
            ("blocking", "blocking save"),
            ("first", "first background save"),
            ("second", "second background save"),
        )
    )
    about = f"{result['bytes'] / 2**20:,.0f} MiB of state on a CPU, three runs."
    return f"{about}\n\n{markdown('save | delay of the step', rows)}"


def journeys() -> str:
    """Count the journeys that passed on one and on two GPUs."""
    lines = []
    for name, place in (("journeys_h200", "one"), ("journeys_h200_x2", "two")):
        result = load(name)
        rows = result["journeys"].values()
        fine = sum(not row["problems"] for row in rows)
        drops = [row["first_loss"] - row["last_loss"] for row in rows if row.get("first_loss")]
        lines.append([f"{place}, {result['environment']['date']}", f"{fine} of {len(rows)}", f"{min(drops):.2f} nats per token",
                      ", ".join(f"`{name.removeprefix('two-')}`" for name in result["journeys"])])  # fmt: skip
    return markdown("GPUs | passed | smallest fall of the loss | journeys", lines)


def soak() -> str:
    """A long run that is killed three times."""
    result = load("soak_h200")
    checks, steps = result["checks"], len(result["losses"])
    most = {kind: max(row["most"] for row in checks["growth"] if row["memory"] == kind) for kind in ("host", "device")}
    twice = max(row["most"] for row in checks["repeated"])
    killed = ", ".join(f"{kill['at']:,}" for kill in result["kills"])
    return prose(
        f"{steps:,} steps of `gated-124m`, with an evaluation and a save every {result['every']}, killed at steps {killed} and "
        f"resumed. After the first 100 steps of a process, device memory grew by {most['device']:.0f} MiB and host memory by "
        f"{most['host']:.1f} MiB. Steps that were done twice have the same loss within {100 * twice:.2g} %. "
        f"{measured_on(result)}"
    )


def length_sweep() -> str:
    """The step at every length, as a CUDA graph, eagerly, and with plain kernels."""
    result = load("length_sweep_h200")
    found, limits = result["summary"], result["settings"]
    largest = {name: row["value"] for name, row in found["largest"].items()}
    rows = (
        [label, f"{largest[f'{kind}_loss']:.2g}", f"{limits[f'{kind}_tolerances']['loss']:.2g}",
         f"{largest[f'{kind}_gradient']:.2g}", f"{limits[f'{kind}_tolerances']['gradient']:.2g}"]
        for kind, label in (("graph", "CUDA graph and eager step"), ("plain", "fused and plain kernels"))
    )  # fmt: skip
    bad = "; ".join(f"batch {r['batch']}, length {r['length']}, head_dim {r['head_dim']}: {', '.join(r['wrong'])}"
                    for r in found["bad"])  # fmt: skip
    about = prose(
        f"{found['cases']:,} cases under `delayed`: lengths 1 to 300, 333, 500, 511, 1000, 1001, 2047 and 4095, batch 1, 3 and "
        f"8, head_dim 64, 96, 128 and 256, with and without grouped queries. None died; {found['same']:,} are within "
        f"tolerance. Outside: {bad or 'none'}. {measured_on(result)}"
    )
    header = "largest relative difference of | loss | tolerance | gradient | tolerance"
    return f"{about}\n\n{markdown(header, rows)}"


def resume_parity() -> str:
    """Compare resumed runs with runs in one piece."""
    result = load("resume_parity_h200")
    names = {"again": "a second run", "saving": "a run that also saves", "resumed": "a resumed run"}
    lines = []
    for title, rows in result["parity"].items():
        cells = [
            "equal in every bit" if rows[name]["equal"] else f"{100 * rows[name]['losses']['most']:.2g} %"
            for name in names
        ]
        lines.append([f"`{title.split(',')[0]}`", title.split(", ")[1], *cells])
    about = prose(f"`{result['settings']['preset']}`, {result['settings']['steps']} steps at default flags, each compared with one "
                  f"run in one piece; where bits differ, the largest difference of a loss. {measured_on(result)}")  # fmt: skip
    return f"{about}\n\n{markdown('recipe | mode | ' + ' | '.join(names.values()), lines)}"


TABLES: dict[str, Callable[[], str]] = {
    "readme-story": readme_story,
    "readme-speed": readme_speed,
    "readme-8b": readme_8b,
    **{f"step-{key}": partial(step, key) for key in RUNS},
    "first-light": first_light,
    "fast-and-plain": fast_and_plain,
    "profile": profile,
    "checkpoint-grid": checkpoint_grid,
    "memory-plan": memory_plan,
    "generation": generation,
    "loading": loading,
    "recipe-accuracy": recipe_accuracy,
    "serving-parity": serving_parity,
    "families": families,
    "optimizer-bytes": optimizer_bytes,
    "optimizer-memory": optimizer_memory,
    "optimizer-loss": optimizer_loss,
    "chat-finetune": chat_finetune,
    "finetune-8b": finetune_8b,
    "scaling": scaling,
    "scaling-estimate": scaling_estimate,
    "engine-gpu": engine_gpu,
    "engine-parity": engine_parity,
    "checkpoint-parity": checkpoint_parity,
    "save-blocking": save_blocking,
    "journeys": journeys,
    "soak": soak,
    "length-sweep": length_sweep,
    "resume-parity": resume_parity,
}


def filled(text: str) -> str:
    """Return Markdown `text` with every generated block rewritten."""
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def documents() -> list[Path]:
    """Return the files that may contain generated blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def draw_plots(folder: Path) -> None:
    """Draw the plots of docs/results/ into `folder`."""
    from te_models.inspect.bench_report import plot_bench
    from te_models.training.plots import plot_losses

    light = load("first_light_h200")
    run, gpu = light["run"], light["environment"]["gpu"]
    title = f"{run['preset']}, {run['batch_size']} x {run['seq_len']} tokens per step, {gpu}"
    curves = {name: data["metrics"] for name, data in light["recipes"].items()}
    plot_losses(folder / "first_light_h200.png", curves, title)
    bench = load("step_h200")["runs"][RUNS["1b"]]
    plot_bench(folder / "step_1b_h200.png", bench, f"gated-1b, 8 x 2048 tokens, {gpu}")
    draw_grid(folder / "checkpoint_grid_h200.png")
    draw_soak(folder / "soak_h200.png", load("soak_h200"))


def draw_grid(path: Path) -> None:
    """Draw peak memory against speed: a panel per model, a line per recipe, a point per mode."""
    from matplotlib.figure import Figure

    shapes, markers = load("checkpoint_grid_h200")["rows"], {"none": "o", "selective": "s", "full": "^"}
    figure = Figure(figsize=(6 * len(shapes), 4.5), dpi=150, layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes.items(), strict=True):
        for variant in dict.fromkeys(map(_variant, rows)):
            points = [row for row in rows if _variant(row) == variant]
            x, y = [row["peak"] / GIB for row in points], [row["tokens_per_second"] for row in points]
            (line,) = axes.plot(x, y, "--" if variant[1] == "FP8" else "-", label=f"{variant[0]}, {variant[1]} weights")
            for row, across, up in zip(points, x, y, strict=True):
                axes.plot(across, up, markers[row["mode"]], color=line.get_color())
        for mode, marker in markers.items():
            axes.plot([], [], marker, color="grey", label=mode)
        axes.set(title=name, xlabel="peak memory (GiB)", ylabel="tokens/s", xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=2, loc="lower right")
    figure.savefig(path)


@click.command(help=__doc__)
@click.option("--plots", is_flag=True, help="Draw the plots of docs/results/ as well.")
def main(plots: bool) -> None:
    """Rewrite the generated blocks of README.md and docs/."""
    for path in documents():
        before = path.read_text()
        after = filled(before)
        if after != before:
            path.write_text(after)
            print(f"rewrote {path.relative_to(ROOT)}")
    if plots:
        draw_plots(ROOT / "docs" / "results")


if __name__ == "__main__":
    main()
