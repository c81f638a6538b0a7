"""Where FP8 pays: a map of width x tokens per step, and the table that `auto`, `plan` and runs read.

On a GPU, `python -m benchmarks.speed_map` measures forward and backward of four layers over widths, widths of experts
and numbers of tokens under each recipe, writes benchmarks/results/speed_map_<gpu>.json, and makes
te_models/measurements/speed.json anew from all measurements in benchmarks/results. `--collect` does the latter
alone. With several GPUs, `--part 0/2 --out a.json` and `--part 1/2 --out b.json` measure half of the shapes each, and
`--merge a.json --merge b.json` makes one file of them.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks import expert_profile, fused_families, kinds_speed
from benchmarks.expert_profile import step_of
from te_models.config.gpus import get_gpu, peak_bf16
from te_models.config.measured_speed import FILE, size_of
from te_models.config.model import ModelConfig
from te_models.config.presets import get_preset
from te_models.inspect.environment import environment
from te_models.planning.flops import training_flops

RESULTS = Path(__file__).parent / "results"
RECIPES = ("bf16", "current", "delayed", "blockwise")
WIDTHS = (512, 768, 1024, 1536, 2048, 2560, 3072, 4096)
EXPERTS = ((1024, 512), (2048, 768), (2048, 1024), (2880, 2880), (4096, 14336))  # width, of experts
TOKENS = ((1, 512), (1, 2048), (2, 4096), (8, 4096))  # sequences, tokens of each
TINY: dict[str, Any] = dict(vocab_size=512, num_hidden_layers=2)


def dense(width: int) -> ModelConfig:
    """Return four layers of a width, with heads of 128 or 64."""
    head = 128 if width >= 1024 else 64
    heads = width // head
    keys = heads // 4 if heads % 4 == 0 else heads
    return ModelConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 256) * 256,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=head,
        max_position_embeddings=4096,
    )


def sparse(width: int, experts: int) -> ModelConfig:
    """Return four layers with experts of a width: 8 chosen of 64, or of large ones 2 of 8."""
    count, chosen = (8, 2) if experts > 4096 else (64, 8)
    moe = dict(num_experts=count, num_experts_per_tok=chosen, moe_intermediate_size=experts)
    fields = {**dense(width - width % 128).to_dict(), "hidden_size": width, "moe": moe}
    return ModelConfig.from_dict(fields)


def row_of(
    gpu: str,
    shape: str,
    config: ModelConfig,
    batch: int,
    seq: int,
    recipe: str,
    seconds: float,
    *,
    bf16: float | None,
    source: str,
    date: str,
    lora: bool = False,
    part: str = "pass",
) -> dict[str, Any]:
    """Return a row of the table from the seconds of a step over `batch` x `seq` tokens, and those under BF16."""
    peak = peak_bf16(gpu)
    assert peak is not None, gpu
    size = size_of(config)
    flops = training_flops(config, batch * seq, seq)
    return dict(
        gpu=get_gpu(gpu).name,
        shape=shape,
        **size._asdict(),
        batch=batch,
        seq_len=seq,
        recipe=recipe,
        lora=lora,
        part=part,
        tokens_per_second=round(batch * seq / seconds),
        flops_per_token=float(f"{flops / batch / seq:.6g}"),
        peak_share=round(flops / seconds / peak, 4),
        over_bf16=None if bf16 is None or recipe == "bf16" else round(bf16 / seconds, 3),
        source=source,
        date=date,
    )


def load(name: str) -> dict[str, Any]:
    """Return a file of benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows() -> Iterator[dict[str, Any]]:
    """Yield the rows of all measurements."""
    yield from of_training()
    for name in ("finetune_against_trl_h100", "finetune_against_trl_h200"):
        yield from of_tuning(name)
    yield from of_bench()
    # Before older figures of the same sizes, since the first of equally near rows counts.
    for name in ("expert_profile_h100", "expert_profile_h200"):
        yield from of_experts(name)
    for name in ("kinds_h100", "kinds_h200"):
        yield from of_kinds(name)
    yield from of_families()
    for path in sorted(RESULTS.glob("speed_map_*.json")):
        yield from of_map(path.stem)


def of_training() -> Iterator[dict[str, Any]]:
    """Yield the runs of gated-124m."""
    found = load("first_light_h200")
    run = found["run"]
    size = (run["batch_size"], run["seq_len"])
    seconds = {}
    for recipe, result in found["recipes"].items():
        seconds[recipe] = size[0] * size[1] / result["tokens_per_second"]
    for recipe, each in seconds.items():
        yield row_of(
            found["environment"]["gpu"], run["preset"], get_preset(run["preset"]), *size, recipe, each,
            bf16=seconds["bf16"], source="first_light_h200.json", date=found["environment"]["date"], part="step",
        )  # fmt: skip


def of_tuning(name: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of fine-tuning, of all weights and of adapters."""
    found = load(name)
    seconds = {}
    for row in found["rows"]:
        if row["way"] in RECIPES and "times" in row:
            times = row["times"][found["warm_up"] :]
            seconds[row["shape"], row["method"], row["way"]] = statistics.median(times)
    for (shape, method, recipe), each in seconds.items():
        own = found["shapes"][shape]
        recomputes = own["recompute"] != "none"
        yield row_of(
            found["environment"]["gpu"], shape, get_preset(shape), own["batch_size"], own["seq_len"], recipe, each,
            bf16=seconds.get((shape, method, "bf16")), source=f"{name}.json",
            date=found["environment"]["date"], lora=method == "lora",
            part="recomputed step" if recomputes else "step",
        )  # fmt: skip


# The shapes of step_h200.json, whose settings name them; the last run of each counts.
BENCHED: dict[str, dict[str, Any]] = {
    "gated-8b, 4 layers, 32 KV heads": dict(num_hidden_layers=4, num_key_value_heads=32),
    "gated-896, 31 layers": dict(num_hidden_layers=31),
}


def of_bench() -> Iterator[dict[str, Any]]:
    """Yield the runs of `te-models bench` as CUDA graphs."""
    latest = {}
    for run in load("step_h200")["runs"]:
        settings = run["settings"]
        latest[settings["preset"], settings["batch_size"], settings["seq_len"]] = run
    for (label, batch, seq), run in latest.items():
        seconds = {}
        for row in run["rows"]:
            name = row["name"].removeprefix("te-models ")
            if name != row["name"] and name.endswith("+graph"):
                recipe = name.removesuffix("+graph").removesuffix("+no_edges")
                seconds.setdefault(
                    recipe, row["ms"] / 1e3
                )  # without layers in BF16, where both are
        config = get_preset(label.split(",")[0], **BENCHED.get(label, {}))
        for recipe, each in seconds.items():
            yield row_of(
                run["environment"]["gpu"], label, config, batch, seq, recipe, each, bf16=seconds.get("bf16"),
                source="step_h200.json", date=run["environment"]["date"],
            )  # fmt: skip


def of_kinds(name: str) -> Iterator[dict[str, Any]]:
    """Yield hybrids and experts."""
    found = load(name)
    seconds = {}
    for row in found["rows"]:
        label, size, recipe, *_ = (*row["name"].split(), "", "")
        if "ms" in row and recipe in RECIPES and label in kinds_speed.SHAPES:
            seconds[label, size, recipe] = row["ms"] / 1e3
    for (label, size, recipe), each in seconds.items():
        batch, seq = map(int, size.split("x"))
        shape = label.replace("-layers", " width, few layers")
        yield row_of(
            found["environment"]["gpu"], shape, kinds_speed.shape_of(label, tiny=False), batch, seq, recipe, each,
            bf16=seconds.get((label, size, "bf16")), source=f"{name}.json", date=found["environment"]["date"],
        )  # fmt: skip


def of_experts(name: str) -> Iterator[dict[str, Any]]:
    """Yield the widths of published models with experts."""
    found = load(name)
    seconds = {(row["shape"], row["recipe"]): row["ms"] / 1e3 for row in found["rows"]}
    for (shape, recipe), each in seconds.items():
        fields, batch, seq = expert_profile.SHAPES[shape]
        config = ModelConfig(**expert_profile.COMMON | fields)
        yield row_of(
            found["environment"]["gpu"], f"{shape} width, few layers", config, batch, seq, recipe, each,
            bf16=seconds[shape, "bf16"], source=f"{name}.json", date=found["environment"]["date"],
        )  # fmt: skip


def of_families() -> Iterator[dict[str, Any]]:
    """Yield ten layers of a plain Llama shape: what a family is compared with in the same run."""
    found = load("fused_families_h200")
    seconds = {}
    for row in found["rows"]:
        if row["family"] == "Qwen3":
            seconds[row["recipe"]] = row["plain_ms"] / 1e3
    config = ModelConfig(**fused_families.COMMON)
    for recipe, each in seconds.items():
        yield row_of(
            found["environment"]["gpu"], "Llama, 10 layers", config, found["batch"], found["seq"], recipe, each,
            bf16=seconds["bf16"], source="fused_families_h200.json", date=found["environment"]["date"],
        )  # fmt: skip


def of_map(name: str) -> Iterator[dict[str, Any]]:
    """Yield what this program measured."""
    found = load(name)
    seconds = {}
    for row in found["rows"]:
        seconds[row["width"], row["experts"], row["batch"], row["seq"], row["recipe"]] = (
            row["ms"] / 1e3
        )
    for (width, experts, batch, seq, recipe), each in seconds.items():
        config = sparse(width, experts) if experts else dense(width)
        yield row_of(
            found["environment"]["gpu"], "4 layers", config, batch, seq, recipe, each,
            bf16=seconds.get((width, experts, batch, seq, "bf16")), source=f"{name}.json",
            date=found["environment"]["date"],
        )  # fmt: skip


def collect() -> int:
    """Write the table; return the number of its rows."""
    found = list(rows())
    lines = ",\n".join(" " + json.dumps(row) for row in found)
    FILE.write_text(f'{{"made_by": "benchmarks/speed_map.py", "rows": [\n{lines}\n]}}\n')
    return len(found)


def shapes_of(part: str) -> list[tuple[int, int]]:
    """Return (width, width of experts or 0) of every shape of part "i/n": each n-th one, beginning with the i-th."""
    number, parts = map(int, part.split("/"))
    return ([(width, 0) for width in WIDTHS] + list(EXPERTS))[number::parts]


def measure(
    shapes: list[tuple[int, int]], seconds: float, tiny: bool, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield the time of forward and backward of every width, size and recipe; what does not fit is left out.

    No measurement begins after `seconds`.
    """
    end = time.monotonic() + seconds
    sizes = TOKENS
    if tiny:
        shapes, sizes = [(256, 0)], ((1, 64),)
    for width, experts in shapes:
        config = sparse(width, experts) if experts else dense(width)
        if tiny:
            config = ModelConfig.from_dict({**config.to_dict(), **TINY})
        for batch, seq in sizes:
            ids = torch.randint(0, config.vocab_size, (batch, seq), device=device)
            for recipe in RECIPES[:2] if tiny else RECIPES:
                if time.monotonic() > end:
                    return
                gc.collect()
                try:
                    ms = _median(config, recipe, ids)
                except torch.OutOfMemoryError:
                    continue
                yield dict(width=width, experts=experts, batch=batch, seq=seq, recipe=recipe, ms=ms)


def _median(config: ModelConfig, recipe: str, ids: Tensor) -> float:
    """Return the milliseconds of a step without an optimizer."""
    step, _ = step_of(config, recipe, ids)
    for _ in range(expert_profile.WARM_UP if ids.is_cuda else 1):
        step()
    times = []
    for _ in range(9 if ids.is_cuda else 2):
        if ids.is_cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        if ids.is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


@click.command()
@click.option("--collect", "only_collect", is_flag=True, help="Measure nothing.")
@click.option("--tiny", is_flag=True, help="One small shape anywhere: a test.")
@click.option("--part", default="0/1", show_default=True, help="Of the shapes: i/n.")
@click.option("--seconds", default=3000.0, help="No measurement begins after this time.")
@click.option("--merge", multiple=True, type=click.Path(path_type=Path), help="Files of parts.")
@click.option("--out", type=click.Path(path_type=Path), help="Instead of benchmarks/results.")
def main(
    only_collect: bool, tiny: bool, part: str, seconds: float, merge: tuple[Path, ...], out: Path | None
) -> None:  # fmt: skip
    """Measure the map on this GPU, and make the table."""
    if merge:
        documents = [json.loads(path.read_text()) for path in merge]
        merged = [row for document in documents for row in document["rows"]]
        write(documents[0]["environment"], merged, out)
    elif not only_collect:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if not tiny and device.type != "cuda":
            raise click.UsageError("this needs a GPU: --collect makes the table from what is there")
        about = environment()
        found = []
        for row in measure(shapes_of(part), seconds, tiny, device):
            found.append(row)
            click.echo(json.dumps(row))
            if not tiny or out is not None:
                write(about, found, out)
    if not tiny and out is None:
        click.echo(f"{collect()} rows in {FILE}")


def write(about: dict[str, Any], found: list[dict[str, Any]], out: Path | None) -> None:
    """Write rows measured on the GPU that `about` names to `out`, or to the file of that GPU in benchmarks/results."""
    if out is None:
        card = get_gpu(about["gpu"]).name.lower().replace(" ", "_")
        out = RESULTS / f"speed_map_{card}.json"
    out.write_text(json.dumps(dict(environment=about, rows=found), indent=1) + "\n")


if __name__ == "__main__":
    main()
