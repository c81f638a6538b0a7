"""Predicted and measured peaks of every run on a GPU in benchmarks/results/."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.kinds_speed import SHAPES, shape_of
from benchmarks.tables.text import load
from te_models.config.attention import AttentionSpec
from te_models.config.presets import get_preset
from te_models.config.recipe import get_recipe
from te_models.engine import planned
from te_models.kernels.attention_parts import can_fuse
from te_models.planning import measured
from te_models.planning.memory_plan import MemoryPlan, plan_memory

NO_EDGES = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)


# Since then attention with norms of queries and keys, partial rotary embeddings, scales or caps is one operation, and
# so is an MLP of experts in FP8.
ONE_OPERATION_SINCE = "2026-11-26"
# The days since which kernels join several operations.
HANDED_OVER_SINCE = {
    "experts": ONE_OPERATION_SINCE,
    "experts_join": ONE_OPERATION_SINCE,
    "gated_heads": "2026-11-27",
}


class Run(NamedTuple):
    """A run on a GPU: its plan, its measured bytes and the day of the measurement."""

    name: str
    plan: MemoryPlan
    measured: int
    date: str
    without_workspace: bool = False  # the measurement does not count cuBLAS's workspace

    @property
    def peak(self) -> int:
        """The measured bytes and the workspace; a property, since a plan's peak takes a tenth of a second."""
        return self.measured + (self.plan.peak.workspace if self.without_workspace else 0)


def planned_and_measured() -> Iterator[tuple[str, int, int]]:
    """Yield (run, predicted bytes, measured bytes) for every peak measured on a GPU that the present code has."""
    for run in measured_runs():
        yield run.name, predicted(run), run.peak


def measured_runs() -> Iterator[Run]:
    """Yield every run whose peak was measured on a GPU and which the present code can plan.

    Left out are the peaks of attention whose operations have changed since: attention that is not one operation kept
    the whole output of its projection, and attention that is one operation now was several.
    """
    for run in _runs():
        mixers = _attention(run.plan)
        if any(mixer.copies_queries and not _fuses(mixer, run.plan) for mixer in mixers):
            continue
        if run.date < ONE_OPERATION_SINCE and any(_was_several(mixer) for mixer in mixers):
            continue
        yield run
    for run in _kinds():
        mixers = _attention(run.plan)
        if run.date < ONE_OPERATION_SINCE and any(_was_several(mixer) for mixer in mixers):
            continue
        yield run


def predicted(run: Run) -> int:
    """Return the predicted bytes of a run, with the kernels of its day."""
    later = [name for name, since in HANDED_OVER_SINCE.items() if run.date < since]
    with _without(later):
        return run.plan.peak.total


def _fuses(mixer: AttentionSpec, plan: MemoryPlan) -> bool:
    """Return whether attention is one operation in this run."""
    training = plan.training
    dtype = torch.float32 if training.dtype_bytes == 4 else torch.bfloat16
    slides = mixer.window is not None and mixer.window < training.seq_len
    spans = slides or mixer.sinks or mixer.softcap is not None
    there = can_fuse(mixer, training.seq_len, torch.device("cuda"), dtype, spans)
    return training.fused_kernels and there


@contextlib.contextmanager
def _without(names: list[str]) -> Iterator[None]:
    """Plan without these kernels: their parts are operations of their own."""
    now = {name: planned.handover.pop(name) for name in names}
    measured.forget()
    try:
        yield
    finally:
        planned.handover.update(now)
        measured.forget()


def _attention(plan: MemoryPlan) -> list[AttentionSpec]:
    """Return the attention of all layers that have it."""
    return [layer.mixer for layer in plan.config.layers if isinstance(layer.mixer, AttentionSpec)]


def _was_several(mixer: AttentionSpec) -> bool:
    """Return whether the fused kernels before ONE_OPERATION_SINCE did not compute this attention."""
    partial = mixer.rope is not None and mixer.rope.size != mixer.heads.dim
    scaled = mixer.query_scale is not None or mixer.multiplier is not None
    return mixer.qk_norm != "none" or partial or scaled or mixer.softcap is not None


def _runs() -> Iterator[Run]:
    """Yield every run of decoders with attention alone."""
    grid = load("checkpoint_grid_h200")
    for name, rows in grid["rows"].items():
        fields = dict(grid["shapes"][name])
        preset, size = (
            fields.pop("preset"),
            dict(batch_size=fields.pop("batch"), seq_len=fields.pop("seq")),
        )
        for row in rows:  # that benchmark has no optimizer, and every layer runs in the recipe
            recipe = get_recipe(row["recipe"], **({} if row["recipe"] == "bf16" else NO_EDGES))
            plan = plan_memory(get_preset(preset, **fields), recipe, **size, optimizer=None,
                               activation_checkpointing=row["mode"], fp8_params=row["fp8_params"])  # fmt: skip
            weights = ", FP8 weights" if row["fp8_params"] else ""
            yield Run(
                f"{name}, {row['recipe']}{weights}, {row['mode']}", plan, row["peak"], _date(grid)
            )
    tuned = load("finetune_against_trl_h200")
    for row in tuned["rows"]:
        if row["way"].startswith("trl"):
            continue
        own, lora = tuned["shapes"][row["shape"]], row["method"] == "lora"
        name, _, offload = row["way"].partition("+")
        plan = plan_memory(get_preset(row["shape"]), get_recipe(name), batch_size=own["batch_size"],
                           seq_len=own["seq_len"], activation_checkpointing=own["recompute"],
                           activation_offload=bool(offload), fp8_params=lora and name != "bf16",
                           lora_rank=tuned["rank"] if lora else 0, optimizer="adamw" if lora else "adamw8bit",
                           optimizer_options=dict(stochastic_rounding=not lora))  # fmt: skip
        trained = "LoRA" if lora else "all weights"
        yield Run(
            f"{row['shape']}, {trained}, {row['way'].replace('+', ', ')}",
            plan,
            row["peak"],
            _date(tuned),
        )
    light = load("first_light_h200")
    run = light["run"]
    for name, result in light["recipes"].items():
        plan = plan_memory(get_preset(run["preset"]), get_recipe(name), batch_size=run["batch_size"],
                           seq_len=run["seq_len"], logits=True, fused=False)  # fmt: skip
        yield Run(f"{run['preset']}, {name}, AdamW", plan, result["peak_memory"], _date(light))
    shapes = {
        "gated-8b": dict(num_hidden_layers=4, num_key_value_heads=32),
        "gated-896": dict(num_hidden_layers=31),
    }
    for run in load("step_h200")["runs"]:
        preset = run["settings"]["preset"].split(",")[0]
        size = {key: run["settings"][key] for key in ("batch_size", "seq_len")}
        for row in run["rows"]:
            if not row["name"].startswith("te-models") or row["name"].endswith("+graph"):
                continue
            recipe, *ways = row["name"].removeprefix("te-models ").split("+")
            edges = NO_EDGES if "no_edges" in ways else {}
            plan = plan_memory(get_preset(preset, **shapes.get(preset, {})), get_recipe(recipe, **edges), **size,
                               optimizer=None, logits=False, fused="plain" not in ways)  # fmt: skip
            # The benchmark subtracts what earlier variants hold, cuBLAS's workspace among that, and rounds to 0.01 GiB.
            peak = int((row["peak_gib"] + 0.005) * 2**30)
            kernels = (
                ", unfused"
                if "plain" in ways
                else ""
                if edges
                else ", first and last layer in BF16"
            )
            name = f"{run['settings']['preset']}, {recipe}{kernels}, {size['batch_size']} x {size['seq_len']:,}"
            yield Run(name, plan, peak, _date(run), without_workspace=True)


def _date(result: dict[str, Any]) -> str:
    """Return the day of a measurement, YYYY-MM-DD."""
    return result["environment"]["date"]


def _kinds() -> Iterator[Run]:
    """Yield the runs of hybrids and of experts, whose tokens a random router shares out almost evenly."""
    for file in ("kinds_h100", "kinds_h200"):
        result = load(file)
        for row in result["rows"]:
            if "planned_gib" not in row:
                continue
            shape, size, recipe = row["name"].split()
            batch, seq = map(int, size.split("x"))
            edges = NO_EDGES if SHAPES[shape][3] and recipe != "bf16" else {}
            plan = plan_memory(shape_of(shape, tiny=False), get_recipe(recipe, **edges), batch_size=batch, seq_len=seq,
                               optimizer=None, logits=False)  # fmt: skip
            gpu = file.removeprefix("kinds_").upper()
            name = shape.replace("-layers", " width, few layers")
            yield Run(
                f"{name}, {recipe}, {batch} x {seq:,}, {gpu}",
                plan,
                int(row["peak_gib"] * 2**30),
                _date(result),
            )
