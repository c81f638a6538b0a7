"""Generation beside transformers, on the same random weights in the same run; and how a checkpoint loads.

    python benchmarks/generate.py run --out benchmarks/results/generate_h200.json     # on a GPU, under 10 minutes
    python benchmarks/generate.py run --tiny                                          # anywhere: does it work?
    python benchmarks/generate.py tokens --out benchmarks/results/tokens_h200.json    # the first one, and the next
    python benchmarks/generate.py report benchmarks/results/generate_h200.json

A model is made once per shape, written to disk in shards, and read back by both. Prefill is the time to the first
token; decode is the slope between a generation of 8 tokens and one of 200, which leaves out the prompt and whatever
else happens once per call. Each call captures its graph, in 30 to 90 ms: two captures differ by up to 60 ms, which is
a sixteenth of 192 steps of 5 ms (and was a fifth of the 64 steps between 9 and 73 tokens). Therefore five repeats are
interleaved (long, short, one token, and again), and the median of their slopes counts. All slopes, and medians of
whole calls, are in the JSON. transformers runs with its defaults and at its best (static cache with torch.compile).
Rows skipped for lack of time are named.

`tokens` times the first token launched by the host, and replayed from a CUDA graph, as from the third prompt of a shape
on; and further tokens by the slope between two lengths, whose graphs are kept. These take turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from te_models import CausalLM
from te_models.files.atomic import first_line
from te_models.interop.hf_writing import MAX_SHARD_BYTES, write_hugging_face
from te_models.saving.pretrained import weights

TINY = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
TINY |= dict(head_dim=16, vocab_size=288, max_position_embeddings=512, dtype=torch.float32)


SHORT, LONG = 8, 200  # tokens of the two generations
REPEATS = 5


@dataclass
class Plan:
    """Settings: prompt length, the two lengths whose slope is the decode speed, repeats, and the time left."""

    prompt: int
    short: int
    long: int
    repeats: int
    deadline: float

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline - time.monotonic()


@click.group()
def cli() -> None:
    """Measure, or print the table of what was measured."""


@cli.command()
@click.option("--models", default="qwen3-0.6b,llama-3.1-8b", show_default=True)
@click.option("--recipes", default="bf16,current,delayed", show_default=True)
@click.option("--batches", default="1,16", show_default=True)
@click.option("--prompt", default=512, show_default=True, help="Tokens in each prompt.")
@click.option(
    "--budget", default=500.0, show_default=True, help="Seconds; later rows are skipped, by name."
)
@click.option(
    "--tiny",
    is_flag=True,
    help="Shrunken shapes and few tokens: a test of this program, not a measurement.",
)
@click.option(
    "--load/--no-load", "read", default=True, help="Measure loading too, in separate processes."
)
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write; only on a GPU.")
def run(models: str, recipes: str, batches: str, prompt: int, budget: float, tiny: bool, read: bool,
        out: Path | None) -> None:  # fmt: skip
    """Measure every model under every recipe and batch, transformers beside it."""
    from te_models.inspect.environment import environment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        raise click.UsageError("there is no CUDA device here: use --tiny to try the program")
    plan = Plan(prompt, SHORT, LONG, REPEATS, time.monotonic() + budget)
    if tiny:
        plan = Plan(8, 3, 7, 1, plan.deadline)
    sizes = [int(batch) for batch in batches.split(",")]
    result: dict[str, Any] = {
        "environment": environment(),
        "prompt": plan.prompt,
        "tokens": [plan.short, plan.long],
    }
    result |= {"repeats": plan.repeats, "rows": [], "loading": [], "skipped": []}
    started = time.monotonic()
    for name in models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            result["loading"] += written_and_loaded(
                name, Path(folder) / "model", device, tiny, read, plan.prompt
            )
            rows, skipped = measure_model(
                name, Path(folder) / "model", recipes.split(","), sizes, device, plan
            )
        result["rows"] += rows
        result["skipped"] += skipped
        result["seconds"] = time.monotonic() - started
        if (
            out is not None and device == "cuda"
        ):  # after each model, so that a failure leaves the others
            out.write_text(json.dumps(result, indent=1) + "\n")
    click.echo(table(result))


PROMPTS = ((1, 512), (1, 2048), (8, 512))  # rows and tokens of each
SLOPE = (8, 104)  # new tokens of the two generations whose slope is the time of a step


@cli.command()
@click.option("--models", default="qwen3-1.7b,llama-3.1-8b", show_default=True)
@click.option("--recipes", default="bf16,current,delayed", show_default=True)
@click.option("--rival", multiple=True, help="A model to measure transformers with too.")
@click.option("--tiny", is_flag=True, help="Small shapes, which run anywhere.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
def tokens(models: str, recipes: str, rival: tuple[str, ...], tiny: bool, out: Path | None) -> None:
    """Time the first token of prompts, launched by the host and replayed, and further tokens."""
    from te_models.inspect.environment import environment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {"environment": environment(), "repeats": REPEATS, "tokens": SLOPE}
    result["rows"] = rows = []
    for name in models.split(","):
        torch.manual_seed(0)
        model = CausalLM.from_preset(name, device=device, **(TINY if tiny else {}))
        plans = [Plan(8 if tiny else length, *SLOPE, REPEATS, 0) for _, length in PROMPTS]
        for recipe in recipes.split(","):
            model.set_recipe(recipe)
            warm_scales(model, plans[0])
            for (batch, _), plan in zip(PROMPTS, plans, strict=True):
                row = {"model": name, "recipe": recipe, "batch": batch, "prompt": plan.prompt}
                rows.append(row | first_and_next(model, batch, plan))
                click.echo(json.dumps(rows[-1]))
        if name in rival:
            with tempfile.TemporaryDirectory() as folder:
                write_hugging_face(model, model.origin, Path(folder) / "model", weights(model))
                del model
                judge = loaders()["transformers"](Path(folder) / "model", device)
            for (batch, _), plan in zip(PROMPTS, plans, strict=True):
                row = {"model": name, "recipe": "transformers", "batch": batch}
                rows.append(row | {"prompt": plan.prompt} | first_of_theirs(judge, batch, plan))
                click.echo(json.dumps(rows[-1]))
            del judge
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")


def first_and_next(model: CausalLM, batch: int, plan: Plan) -> dict[str, float]:
    """Return seconds to the first token, launched and replayed, and of a further one."""
    ids = prompts(model.config.vocab_size, batch, plan, model.device)
    generate = partial(model.generate, ids, eos_token_id=None)
    took = seconds_of_each(
        launched=lambda: generate(max_new_tokens=1, cuda_graph=False),
        replayed=lambda: generate(max_new_tokens=1),
        short=lambda: generate(max_new_tokens=plan.short),
        long=lambda: generate(max_new_tokens=plan.long),
    )
    steps = plan.long - plan.short
    slopes = [
        (long - short) / steps for long, short in zip(took["long"], took["short"], strict=True)
    ]
    return {
        "launched": statistics.median(took["launched"]),
        "replayed": statistics.median(took["replayed"]),
        "step": statistics.median(slopes),
    }


def first_of_theirs(judge: Any, batch: int, plan: Plan) -> dict[str, float]:
    """Return seconds to the first token of transformers' generate."""
    ids = prompts(judge.config.vocab_size, batch, plan, judge.device)
    judge.generation_config.eos_token_id = None
    judge.generation_config.pad_token_id = 0
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=1)
    took = seconds_of_each(launched=lambda: judge.generate(ids, **options))
    return {"launched": statistics.median(took["launched"])}


def seconds_of_each(**ways: Callable[[], torch.Tensor]) -> dict[str, list[float]]:
    """Return the seconds of each way, which take turns; three calls of each come before, for its graph."""
    took: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(REPEATS + 3):
        for way, generate in ways.items():
            synchronize()
            started = time.perf_counter()
            generate()
            synchronize()
            if repeat >= 3:
                took[way].append(time.perf_counter() - started)
    return took


@cli.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def report(path: Path) -> None:
    """Print the table."""
    click.echo(table(json.loads(path.read_text())))


@cli.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("device")
@click.argument("reader")
@click.argument("prompt", type=int)
def load(folder: Path, device: str, reader: str, prompt: int) -> None:
    """Load a model in a separate process and print seconds, peak bytes and times to the first token as JSON.

    The first token of the process is the cold one: kernels are loaded, or compiled where no cache on disk has them, and
    libraries choose theirs. The warm one is the fastest of three further prompts.
    """
    import resource

    def host_peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    torch.zeros(1, device=device)  # the device's own libraries are no part of loading
    build = loaders()[reader]
    before, started = host_peak(), time.perf_counter()
    model = build(folder, device)
    synchronize()
    seconds = time.perf_counter() - started
    on_device = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    weights = sum(parameter.nbytes for parameter in model.parameters())
    first_tokens = [seconds_of_first_token(model, prompt) for _ in range(4)]
    told = dict(
        reader=reader,
        seconds=seconds,
        first_token_cold_seconds=first_tokens[0],
        first_token_warm_seconds=min(first_tokens[1:]),
        peak_host_bytes=host_peak() - before,
        peak_device_bytes=on_device,
    )
    click.echo(json.dumps({**told, "weight_bytes": weights}))


def seconds_of_first_token(model: Any, prompt: int) -> float:
    """Return the seconds from a prompt of random ids to its first token, on the host."""
    ids = torch.randint(0, model.config.vocab_size, (1, prompt)).to(model.device)
    synchronize()
    started = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1).tolist()
    return time.perf_counter() - started


def loaders() -> dict[str, Callable[[Path, str], Any]]:
    """Return readers of a folder onto a device by name."""

    def theirs(folder: Path, device: str) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=device)

    return {
        "te-models": lambda folder, device: CausalLM.from_pretrained(folder, device=device),
        "transformers": theirs,
    }


def written_and_loaded(
    name: str, folder: Path, device: str, tiny: bool, read: bool, prompt: int
) -> list[dict[str, Any]]:
    """Write a random model of this shape into `folder` as a Hugging Face checkpoint, then let each reader load it."""
    torch.manual_seed(0)
    model = CausalLM.from_preset(name, device=device, **(TINY if tiny else {}))
    started = time.perf_counter()
    limit = 200_000 if tiny else MAX_SHARD_BYTES
    write_hugging_face(
        model, model.origin, folder, weights(model), max_shard_bytes=limit
    )  # several shards in any case
    written = time.perf_counter() - started
    shards = sorted(folder.glob("*.safetensors"))
    del model
    rows = []
    for reader in loaders() if read else ():
        command = [sys.executable, __file__, "load", str(folder), device, reader, str(prompt)]
        done = subprocess.run(command, capture_output=True, text=True)
        told = (
            json.loads(done.stdout.splitlines()[-1])
            if done.returncode == 0
            else {"error": done.stderr[-300:]}
        )
        largest = max(shard.stat().st_size for shard in shards)
        rows.append({"model": name, "shards": len(shards), "largest_shard_bytes": largest, "write_seconds": written,
                     "reader": reader, **told})  # fmt: skip
    return rows


def measure_model(
    name: str, folder: Path, recipes: list[str], batches: list[int], device: str, plan: Plan
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of one model, ours first, and the names of what was skipped; the longest to compile come last."""
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []

    def add(batch: int, who: str, needs: float, measure: Callable[[], dict[str, Any]]) -> None:
        if plan.left() < needs:
            skipped.append(f"{name}, batch {batch}, {who}: no time left")
            return
        try:
            rows.append({"model": name, "batch": batch, "who": who, **measure()})
        except Exception as error:  # one row that fails must not cost the others
            traceback.print_exc()
            skipped.append(f"{name}, batch {batch}, {who}: {first_line(error)}")

    model = loaders()["te-models"](folder, device)
    for recipe in recipes:
        model.set_recipe(recipe)
        warm_scales(model, plan)
        for batch in batches:
            for graph in (
                (False,) if device == "cpu" else (True, False) if recipe == "bf16" else (True,)
            ):
                who = f"te-models {recipe}" + ("" if graph else ", no graph")
                add(batch, who, 0, partial(ours, model, batch, graph, plan))
    del model
    try:
        judge = loaders()["transformers"](folder, device)
    except ImportError:
        for row in rows:
            row.pop("new")
        return rows, [*skipped, f"{name}, transformers: not installed"]
    for label, options in (
        ("default", {}),
        ("static cache + compile", dict(cache_implementation="static")),
    ):
        for batch in batches:
            needs = 60 if options and device == "cuda" else 0  # compiling
            add(batch, f"transformers {label}", needs, partial(theirs, judge, batch, options, plan))
    reference = {row["batch"]: row["new"] for row in rows if row["who"] == "transformers default"}
    for row in rows:
        same = [
            a == b for a, b in zip(row.pop("new"), reference.get(row["batch"], []), strict=False)
        ]
        row["same_first_tokens"] = same.index(False) if False in same else len(same)
    return rows, skipped


def prompts(vocab: int, batch: int, plan: Plan, device: Any) -> torch.Tensor:
    """The same random ids for everyone, [B, prompt]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab, (batch, plan.prompt), generator=generator).to(device)


def warm_scales(model: Any, plan: Plan) -> None:
    """Two training forwards, so that delayed scaling has scales of these activations."""
    ids = prompts(model.config.vocab_size, 1, plan, model.device)
    for _ in range(2 if model.recipe.stateful else 0):
        model.train()(ids, labels=ids)
    model.eval()


def ours(model: Any, batch: int, graph: bool, plan: Plan) -> dict[str, Any]:
    """The measurements of te-models."""
    ids = prompts(model.config.vocab_size, batch, plan, model.device)
    options = dict(eos_token_id=None, cuda_graph=graph)
    return measured(lambda count: model.generate(ids, max_new_tokens=count, **options), batch, plan)


def theirs(judge: Any, batch: int, options: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The measurements of transformers.generate."""
    ids = prompts(judge.config.vocab_size, batch, plan, judge.device)
    judge.generation_config.eos_token_id = None
    judge.generation_config.pad_token_id = 0
    fixed = dict(attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return measured(lambda count: judge.generate(ids, max_new_tokens=count, **fixed), batch, plan)


def measured(generate: Callable[[int], torch.Tensor], batch: int, plan: Plan) -> dict[str, Any]:
    """Return medians of prefill, decode and whole calls; the first call of each length does not count.

    Args:
        generate: returns ids [B, prompt + count] for a count of new tokens.
        batch: B.
        plan: lengths and repeats.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    # The longest first: transformers keeps, and compiles for, the longest cache so far.
    counts = (plan.long, plan.short, 1)
    took: dict[int, list[float]] = {count: [] for count in counts}
    new: list[int] = []
    # Lengths take turns, so that what slows the machine for a while slows both ends of a slope.
    for repeat in range(plan.repeats + 1):
        for count in counts:
            synchronize()
            started = time.perf_counter()
            out = generate(count)
            synchronize()
            if repeat:
                took[count].append(time.perf_counter() - started)
            new = new or out[0, plan.prompt :].tolist()
    slopes = []
    for longer, shorter in zip(took[plan.long], took[plan.short], strict=True):
        slopes.append((longer - shorter) / (plan.long - plan.short))
    slope = max(statistics.median(slopes), 1e-9)
    seconds = {count: statistics.median(times) for count, times in took.items()}
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "prefill_tokens_per_second": batch * plan.prompt / seconds[1],
        "decode_tokens_per_second": batch / slope,
        "seconds": {str(count): value for count, value in seconds.items()},
        "seconds_per_step": slopes,
        "peak_device_bytes": peak,
        "new": new,
    }


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def table(result: dict[str, Any]) -> str:
    """Two tables in Markdown: generation, and loading."""
    lines = [
        "| model | batch | | prefill, tokens/s | decode, tokens/s | against transformers | peak memory |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    base = {(row["model"], row["batch"]): row["decode_tokens_per_second"] for row in result["rows"]
            if row["who"] == "transformers default"}  # fmt: skip
    for row in result["rows"]:
        decode, reference = row["decode_tokens_per_second"], base.get((row["model"], row["batch"]))
        ratio = f"{decode / reference:.1f}x" if reference else "-"
        lines.append(
            f"| `{row['model']}` | {row['batch']} | {row['who']} | {row['prefill_tokens_per_second']:,.0f} | "
            f"{decode:,.0f} | {ratio} | {row['peak_device_bytes'] / 2**30:.2f} GiB |"
        )
    lines += [
        "",
        "| checkpoint | shards, largest | read by | seconds | first token after that, cold and warm "
        "| peak host memory | peak device memory |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for row in result["loading"]:
        if "error" in row:
            lines.append(f"| `{row['model']}` | {row['shards']} | {row['reader']} | failed | | | |")
            continue
        shard, host, device = (
            f"{row[name] / 2**30:.2f} GiB"
            for name in ("largest_shard_bytes", "peak_host_bytes", "peak_device_bytes")
        )
        # Files from before they were measured have no times to the first token.
        cold = row.get("first_token_cold_seconds")
        warm = row.get("first_token_warm_seconds")
        cells = (
            f"`{row['model']}`",
            f"{row['shards']}, {shard}",
            row["reader"],
            f"{row['seconds']:.1f}",
            "-" if cold is None else f"{cold:.2f} s, {warm:.3f} s",
            host,
            device,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *(f"skipped: {what}" for what in result["skipped"])])


if __name__ == "__main__":
    cli()
