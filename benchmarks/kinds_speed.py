"""Hybrids and mixtures of experts beside transformers: forward and backward, memory, decoding, in one process.

    python benchmarks/kinds_speed.py --out benchmarks/results/kinds_h200.json     # on a GPU, about 15 minutes
    python benchmarks/kinds_speed.py --mixers --out benchmarks/results/mixers_h100.json       # newer mixers, a minute
    python benchmarks/kinds_speed.py --tiny                                       # anywhere: does it work?

Random weights of Qwen3.5-2B, and slices of Qwen3.5-9B (4 layers), Qwen3-30B-A3B (4) and Mixtral (2), whose recipes have
no BF16 edges. The head of a slice is as large as that of the whole model, so "-layers" has the same slice with a
vocabulary of 1,024. Ours runs as `Trainer` runs it, as one CUDA graph where the layers allow one; transformers in BF16
with torch.compile, flash-linear-attention and grouped_mm, or torchao's grouped FP8 for experts. Times are medians of
CUDA events, peaks those of PyTorch's allocator above what was there before. Ratios are within this process.

`--mixers` has slices of models with Kimi Delta Attention, Mamba 2, gated short convolutions, and Mamba 2 beside
attention. Its variants compile at the same time in processes of their own, and then run in turn, alone on the GPU.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.kinds_rivals import (
    WAIT_FOR_TURN,
    held,
    measured,
    their_model,
    theirs,
    tokens,
    with_torchao,
)
from benchmarks.shared_autotuning import tune_together
from te_models import CausalLM, ModelConfig, get_preset
from te_models.config.deltanet import DeltaNetSpec
from te_models.files.atomic import first_line
from te_models.inspect.environment import environment
from te_models.kernels.delta_rule import delta_rule, delta_rule_kernel
from te_models.training.cuda_graph import GraphedStep, obstacle

HEADS: dict[str, Any] = dict(num_attention_heads=32, head_dim=128, attention_gate="none")
A3B: dict[str, Any] = dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_key_value_heads=4, qk_norm=True, **HEADS,
    moe=dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
)  # fmt: skip
MIXTRAL: dict[str, Any] = dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, **HEADS,
    moe=dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=14336),
)  # fmt: skip
# The preset or the fields, the layers, the batches (rows, tokens), and whether it is a slice of a larger model.
SHAPES: dict[str, tuple[str | dict[str, Any], int, tuple[tuple[int, int], ...], bool]] = {
    "2b": ("qwen3.5-2b", 24, ((4, 4096), (1, 32768)), False),
    "9b-wide": ("qwen3.5-9b", 4, ((4, 4096), (1, 32768)), True),
    "a3b-wide": (A3B, 4, ((4, 4096),), True),
    "mixtral-wide": (MIXTRAL, 2, ((4, 4096),), True),
}
SHAPES |= {name.replace("wide", "layers"): found for name, found in SHAPES.items() if found[3]}
# Slices of --mixers: the preset or the fields of the model, and those of the slice. Two of them run at a time.
KIMI: dict[str, Any] = dict(
    hidden_size=2304, intermediate_size=9216, num_attention_heads=32, num_key_value_heads=32, head_dim=64,
    attention_gate="none", kda=dict(num_heads=32, head_dim=128, gate_rank=128),
    latent_attention=dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
)  # fmt: skip
MIXERS: dict[str, tuple[str | dict[str, Any], dict[str, Any]]] = {
    "mamba2": ("granite-4.0-h-micro", dict(
        layer_types=("mamba2",) * 5 + ("full_attention",), no_rope_layers=(0,) * 6,
    )),
    "short_conv": ("lfm2-1.2b", dict(layer_types=("conv", "conv", "full_attention", "conv"))),
    "kda": (KIMI, dict(layer_types=("kda",) * 3 + ("latent_attention",), no_rope_layers=(0,) * 4)),
    "mamba2_beside_attention": ("falcon-h1-3b", dict(layer_types=("parallel",) * 4)),
}  # fmt: skip
MIXER_BATCH = (2, 4096)
MIXER_RECIPES = ("bf16", "current", "delayed")
TURN_SECONDS = 20.0
# Mixers whose kernels have hundreds of variants, and the processes that compile a share of them each. Those of Kimi
# Delta Attention are fixed on Hopper.
TUNED_MIXERS = ("mamba2", "mamba2_beside_attention")
COMPILERS = 12
RECIPES = ("bf16", "current", "delayed", "blockwise")
NO_EDGES = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
TINY: dict[str, Any] = dict(
    vocab_size=288, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    linear_attention=dict(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16),
)  # fmt: skip
TINY_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96)


@click.command()
@click.option(
    "--tiny", is_flag=True, help="Shrunken shapes: a test of this program, not a measurement."
)
@click.option("--shapes", default=",".join(SHAPES), show_default=True)
@click.option(
    "--recipes", default=",".join(RECIPES), show_default=True, help="Ours; '' for the others alone."
)
@click.option(
    "--seconds", default=1500.0, show_default=True, help="No variant starts after this many."
)
@click.option("--decode/--no-decode", default=True, help="Measure generation at batch 1 too.")
@click.option("--mixers", is_flag=True, help="Slices with newer mixers instead of --shapes.")
@click.option("--only", default=",".join(MIXERS), show_default=True, help="With --mixers: these.")
@click.option(
    "--ready",
    default=240.0,
    show_default=True,
    help="With --mixers: a variant that has not compiled after this many seconds is left out.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="JSON file, written after every variant."
)
def main(
    tiny: bool, shapes: str, recipes: str, seconds: float, decode: bool, mixers: bool, only: str, ready: float,
    out: Path | None,
) -> None:  # fmt: skip
    """Measure everything and print one line per variant."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not tiny:
        raise click.UsageError("there is no CUDA device here: use --tiny to try the program")
    begun = time.monotonic()
    result: dict[str, Any] = {"environment": environment() | packages(), "rows": [], "skipped": []}
    if mixers:
        names = only.split(",")
        for start in range(0, len(names), 2):
            for row in in_turn(names[start : start + 2], tiny, ready):
                result["rows"].append(row)
                click.echo(json.dumps(row))
            result["ratios"] = ratios(result["rows"])
            result["seconds"] = time.monotonic() - begun
            if out is not None:
                out.write_text(json.dumps(result, indent=1) + "\n")
        click.echo(json.dumps({"ratios": result["ratios"]}, indent=1))
        return
    for shape in shapes.split(","):
        config, is_slice = shape_of(shape, tiny), SHAPES[shape][3]
        hybrid = config.linear_attention is not None
        if config.linear_attention is not None:
            kernel = delta_rule_kernel(device, torch.bfloat16, config.linear_attention)
            result["environment"]["delta rule"] = kernel
        variants: dict[str, Callable[[], dict[str, Any]]] = {}
        if decode and shape == "2b":
            for name in ("bf16", "current", "transformers"):
                variants[f"{shape} decode {name}"] = functools.partial(
                    decoding, config, device, name, 4 if tiny else 64
                )
        for batch, seq in [(2, 70)] if tiny else SHAPES[shape][2]:
            size = (config, batch, seq, device)
            for recipe in filter(None, recipes.split(",")):
                variants[f"{shape} {batch}x{seq} {recipe}"] = functools.partial(
                    ours, *size, recipe, is_slice
                )
            variants[f"{shape} {batch}x{seq} transformers"] = functools.partial(theirs, *size)
            if config.moe is not None:
                variants[f"{shape} {batch}x{seq} torchao"] = functools.partial(with_torchao, *size)
            if hybrid:
                variants[f"{shape} {batch}x{seq} recurrence"] = functools.partial(recurrence, *size)
        for name, run in variants.items():
            if time.monotonic() - begun > seconds:
                result["skipped"].append(name)
                continue
            row = {"name": name, **attempt(run)}
            result["rows"].append(row)
            click.echo(json.dumps(row))
            result["ratios"] = ratios(result["rows"])
            result["seconds"] = time.monotonic() - begun
            if out is not None:
                out.write_text(json.dumps(result, indent=1) + "\n")
    click.echo(json.dumps({"ratios": result.get("ratios"), "skipped": result["skipped"]}, indent=1))


def mixer_config(name: str, tiny: bool) -> ModelConfig:
    """Return the config of a slice of --mixers."""
    base, fields = MIXERS[name]
    own = dict(fields, num_hidden_layers=len(fields["layer_types"]), vocab_size=1024)
    own |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if tiny:
        own |= dict(
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
        )
        if "mamba2" in name:
            own |= dict(mamba2=dict(num_heads=4, head_dim=32, state_dim=16, num_groups=1))
        if name == "kda":
            own |= dict(kda=dict(num_heads=2, head_dim=32, gate_rank=32))
            own |= dict(latent_attention=dict(
                kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
            ))  # fmt: skip
    if isinstance(base, dict):
        return ModelConfig(**{**base, **own})
    if "mamba2" in own and name == "mamba2_beside_attention":
        own["mamba2"] |= dict(norm="none")
    return get_preset(base, **own)


def in_turn(names: list[str], tiny: bool, ready_seconds: float) -> list[dict[str, Any]]:
    """Measure the variants of these slices; they compile at once, and are timed one after the other.

    A variant that is not compiled after `ready_seconds` is left out.
    """
    begun = time.monotonic()
    for name in names if not tiny else ():
        if name in TUNED_MIXERS:
            tuned = tune_together(
                one_step, name, COMPILERS, 0.4 * ready_seconds, 0.35 * ready_seconds
            )
            click.echo(json.dumps({"tuned": name, **tuned}))
    spawn = multiprocessing.get_context("spawn")
    waiting: dict[str, tuple[Any, Connection]] = {}
    for name in names:
        for variant in (*MIXER_RECIPES, "transformers"):
            ours_end, theirs_end = spawn.Pipe()
            process = spawn.Process(target=in_process, args=(name, variant, tiny, theirs_end))
            process.start()
            theirs_end.close()
            waiting[f"{name} {MIXER_BATCH[0]}x{MIXER_BATCH[1]} {variant}"] = (process, ours_end)
    deadline = begun + ready_seconds
    rows = []
    ready = {}
    for name, (process, connection) in waiting.items():
        answer = answer_of(connection, deadline - time.monotonic())
        if answer == "ready":
            ready[name] = (process, connection)
        else:
            rows.append({"name": name, **(answer or {"error": "not ready in time"})})
            process.kill()
    for name, (process, connection) in ready.items():
        connection.send("go")
        answer = answer_of(connection, TURN_SECONDS)
        rows.append({"name": name, **(answer or {"error": "no result in time"})})
        process.kill()
    return rows


def one_step(name: str) -> None:
    """Run an eager step of a slice in BF16, for the packages' kernels that it compiles."""
    config = mixer_config(name, False)
    device = torch.device("cuda")
    model = CausalLM(config, recipe="bf16", device=device, compile=False).train()
    ids = tokens(config, *MIXER_BATCH, device)
    model(ids, labels=ids, return_logits=False).loss.backward()


def answer_of(connection: Connection, seconds: float) -> Any:
    """Return the next message of a process; None: there was none in time, or the process ended."""
    try:
        return connection.recv() if connection.poll(max(0.0, seconds)) else None
    except EOFError:
        return None


def in_process(name: str, variant: str, tiny: bool, connection: Connection) -> None:
    """Measure one variant of a slice; wait for a turn between the warm-up and the steps that count."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def wait() -> None:
        connection.send("ready")
        connection.recv()

    WAIT_FOR_TURN.set(wait)
    size = (mixer_config(name, tiny), *((2, 70) if tiny else MIXER_BATCH), device)
    run = functools.partial(theirs, *size)
    if variant != "transformers":
        run = functools.partial(ours, *size, variant, True)
    connection.send(attempt(run))


def packages() -> dict[str, str]:
    """Return the versions of the packages that this compares with."""
    found = {}
    for package in (
        "transformers",
        "flash-linear-attention",
        "fla-core",
        "causal-conv1d",
        "mamba-ssm",
    ):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def shape_of(name: str, tiny: bool) -> ModelConfig:
    """Return the config of a shape, with as many layers as it is measured with."""
    base, layers, *_ = SHAPES[name]
    small = dict(vocab_size=1024) if name.endswith("layers") else {}
    if isinstance(base, dict):
        made = base | small | (TINY | dict(linear_attention=None, moe=TINY_EXPERTS) if tiny else {})
        return ModelConfig(num_hidden_layers=layers, **made)
    layers = 4 if tiny else layers
    types = get_preset(base).layer_types
    assert types is not None
    return get_preset(
        base, num_hidden_layers=layers, layer_types=types[:layers], **(TINY if tiny else small)
    )


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `run` measured, or the first line of its error; frees the device's memory."""
    try:
        return run()
    except (RuntimeError, ImportError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {first_line(error)}"}
    finally:
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def ours(
    config: ModelConfig, batch: int, seq: int, device: torch.device, recipe: str, is_slice: bool
) -> dict[str, Any]:
    """Measure te-models under a recipe, and its blocks alone."""
    before = held()
    torch.manual_seed(0)
    edges = NO_EDGES if is_slice and recipe != "bf16" else {}
    model = CausalLM(config, recipe=recipe, device=device, **edges).train()
    ids = tokens(config, batch, seq, device)
    if device.type == "cpu":
        return measured(
            lambda: model(ids, labels=ids, return_logits=False).loss.backward(), device, before
        )
    plan = model.plan_memory(batch, seq, optimizer=None, logits=False)
    graphed = None if obstacle(model) else GraphedStep(model)

    def step() -> Tensor:
        if graphed is not None:
            return graphed(input_ids=ids, labels=ids)
        model.zero_grad()
        loss = model(ids, labels=ids, return_logits=False).loss
        loss.backward()
        return loss

    if graphed is None:
        model.calibrate(dict(input_ids=ids, labels=ids))
    found = measured(step, device, before)
    found |= {
        "planned_gib": plan.peak.total / 2**30,
        "graph": graphed is not None,
        "loss": step().item(),
    }
    if graphed is not None:
        graphed.close()
    return found


def recurrence(config: ModelConfig, batch: int, seq: int, device: torch.device) -> dict[str, Any]:
    """Measure the delta rule alone, forward and backward, times the layers that have one."""
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, DeltaNetSpec)]
    sizes = mixers[0].sizes
    shapes = [(sizes.num_key_heads, sizes.key_head_dim)] * 2 + [
        (sizes.num_value_heads, sizes.value_head_dim)
    ]
    made: dict[str, Any] = dict(device=device, requires_grad=True)
    q, k, v = (torch.randn(batch, seq, *shape, dtype=torch.bfloat16, **made) for shape in shapes)
    gates = torch.rand(batch, seq, sizes.num_value_heads, device=device)
    g, beta = (-gates).requires_grad_(), gates.clone().requires_grad_()
    slope = torch.randn_like(v)
    leaves = (q, k, v, g, beta)

    def step() -> None:
        torch.autograd.grad(delta_rule(*leaves)[0], leaves, slope)

    one = measured(step, device, held())
    return {"ms": one["ms"] * len(mixers), "layers": len(mixers), "ms_per_layer": one["ms"]}


def decoding(config: ModelConfig, device: torch.device, name: str, count: int) -> dict[str, Any]:
    """Measure tokens/s at batch 1, from the slope between a short and a long generation."""
    prompt = tokens(config, 1, 16, device)
    if name == "transformers":
        model = their_model(config, device).eval()
        model.generation_config.eos_token_id = None

        def run(new: int) -> None:
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False
            )
    else:
        own = CausalLM(config, recipe=name, device=device).eval()

        def run(new: int) -> None:
            own.generate(prompt, new, eos_token_id=())

    times = []
    for new in (count, count, 3 * count):
        started = time.perf_counter()
        run(new)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return {"tokens_per_s": 2 * count / (times[2] - times[1])}


def ratios(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many times faster each recipe is than transformers and than our BF16, and its peak beside theirs."""
    by_name = {row["name"]: row for row in rows if "error" not in row}
    found: dict[str, Any] = {}
    for name, row in by_name.items():
        place, _, variant = name.rpartition(" ")
        if variant not in RECIPES:
            continue
        for other in ("transformers", "torchao", "bf16"):
            beside = by_name.get(f"{place} {other}")
            if beside is None or beside is row:
                continue
            if "ms" in row:
                found[f"{name} speed over {other}"] = beside["ms"] / row["ms"]
            else:
                found[f"{name} speed over {other}"] = row["tokens_per_s"] / beside["tokens_per_s"]
            if "peak_gib" in row:
                found[f"{name} peak over {other}"] = row["peak_gib"] / beside["peak_gib"]
        if "ms" in row and (alone := by_name.get(f"{place} recurrence")) is not None:
            found[f"{name} share of the recurrence"] = alone["ms"] / row["ms"]
    return found


if __name__ == "__main__":
    main()
