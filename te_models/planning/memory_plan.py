"""The memory plan: what a training step needs and which GPUs it fits on, as `te-models plan --memory` prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe
from te_models.config.recompute_modes import MODES
from te_models.optim import OPTIMIZERS
from te_models.planning.measured import HeldTensor, MeasuredStep
from te_models.planning.memory_estimate import (
    Memory,
    memory_moments,
    planned_optimizer_bytes,
    saved_bytes,
)
from te_models.planning.parameter_bytes import trained_elements
from te_models.planning.planned_run import PlannedRun
from te_models.planning.printable import Printable
from te_models.planning.training import Training

GPUS = {"24 GB": 24, "48 GB": 48, "80 GB": 80, "141 GB": 141}  # sizes as sold: 10^9 bytes
# The fraction left free covers the error of the prediction. CUDA's context fits in the memory that a GPU has beyond its
# nominal size: an H100 "80 GB" has 85.5 * 10^9 bytes, an H200 "141 GB" has 150.8 * 10^9.
HEADROOM = 0.05


@dataclass(frozen=True)
class MemoryPlan(Printable):
    """The predicted memory of a training step per GPU.

    Print it, or display it in a notebook, for tables; `to_dict` returns plain JSON values, in bytes.
    """

    config: ModelConfig
    recipe: Recipe
    training: Training

    @property
    def moments(self) -> list[Memory]:
        """The moments that can be the peak: the loss, the worst of forward and backward, and the optimizer step."""
        return memory_moments(self.config, self.recipe, self.training)

    @property
    def peak(self) -> Memory:
        """The moment that needs most memory; compare its `total` with torch.cuda.max_memory_allocated."""
        return max(self.moments, key=lambda memory: memory.total)

    @property
    def host(self) -> int:
        """Bytes of host memory that offload of activations, masters and optimizer state needs per GPU."""
        training = self.training
        state = 0
        if training.optimizer_offload and training.optimizer:
            state = planned_optimizer_bytes(training.optimizer, training, self._tensors)
        return saved_bytes(self.config, self.recipe, training, on_host=True) + state

    def fits(self, gigabytes: float) -> bool:
        """Return whether the peak fits on a GPU of `gigabytes` * 10^9 bytes with 5 % to spare."""
        return self.peak.total <= (1 - HEADROOM) * gigabytes * 10**9

    def largest_batch(self, gigabytes: float) -> int:
        """Return the largest number of sequences that fits, per GPU or GPUs that share rows; 0 if not even one does.

        The peak is nearly linear in the batch size, so a straight line between two batches gives the next to try.
        """

        def spare(batch: int) -> float:
            plan = replace(self, training=replace(self.training, batch_size=batch))
            return (1 - HEADROOM) * gigabytes * 10**9 - plan.peak.total

        least = 1
        most = 2
        below = spare(least)
        above = spare(most)
        if below < 0:
            return 0
        while above >= 0:
            further = most + 1 + int(1.05 * above * (most - least) / max(1.0, below - above))
            further = min(further, 100 * most)  # the update may need more than two small batches
            least = most
            below = above
            most = further
            above = spare(further)
        # `least` fits and `most` does not; the line between them is zero at `middle`, which has to lie inside.
        while most - least > 1:
            step = int(below * (most - least) / (below - above))
            middle = least + min(max(1, step), most - least - 1)
            free = spare(middle)
            if free >= 0:
                least = middle
                below = free
            else:
                most = middle
                above = free
        return least

    def by_mode(self) -> Iterator[tuple[str | int, MemoryPlan]]:
        """Yield this plan under every mode of activation checkpointing, its own included."""
        current = self.training.activation_checkpointing
        for mode in dict.fromkeys((*MODES, current)):
            training = replace(self.training, activation_checkpointing=mode)
            yield mode, replace(self, training=training)

    def optimizers(self) -> dict[str, int]:
        """Return name -> bytes of optimizer state and FP32 masters per GPU; the plan's own with its options.

        Of several GPUs, the one that has most counts.
        """
        tensors = self._tensors
        return {name: planned_optimizer_bytes(name, self.training, tensors) for name in OPTIMIZERS}

    @property
    def num_trained(self) -> int:
        """The number of parameters that a rank's model trains, before FSDP2 shards them."""
        return trained_elements(self._tensors)

    @property
    def _tensors(self) -> Counter[HeldTensor]:
        """The parameters of a rank's model, with their numbers."""
        measured = MeasuredStep(self.config, self.recipe, self.training.setting)
        return measured.tensors(measured.run(self.training.batch_size).standing)

    def to_dict(self) -> dict[str, object]:
        """Return the content of the tables as plain JSON values, in bytes."""
        modes = dict(self.by_mode())
        largest_batches = {}
        for name, size in GPUS.items():
            largest_batches[name] = {str(mode): p.largest_batch(size) for mode, p in modes.items()}
        return {
            "parameters": self.config.num_parameters,
            "recipe": self.recipe.to_dict(),
            # Of a stored base the JSON says only that there is one; its tensors are in the folder.
            "training": {**asdict(self.training), "stored": self.training.stored is not None},
            "moments": {
                memory.moment: {**memory.parts(), "total": memory.total} for memory in self.moments
            },
            "host": self.host,
            "peak": {"moment": self.peak.moment, "total": self.peak.total},
            "fits": {name: self.fits(size) for name, size in GPUS.items()},
            "largest_batch": largest_batches,
            "optimizers": self.optimizers(),
        }

    def __rich__(self) -> Group:
        t = self.training
        name, unit = unit_for(self.peak.total)
        each = " per GPU" if t.gpus > 1 or t.context_parallel_size > 1 else ""
        per_row = each if t.context_parallel_size == 1 else f" per {t.context_parallel_size} GPUs"
        lora = ""
        if t.lora_rank:
            lora = f", LoRA of rank {t.lora_rank}"
            if t.lora_experts:
                lora += " on experts too"
        stored = ", weights of the base as they are stored" if t.stored is not None else ""
        host = f", {self.host / unit:.2f} {name} on the host" if self.host else ""
        about = (
            f"{self.config.num_parameters:,} parameters{lora}{stored}, recipe {self.recipe.name}, {t.batch_size} x "
            f"{t.seq_len:,} tokens{per_row}, {t.optimizer or 'no optimizer'}, activation "
            f"checkpointing {t.activation_checkpointing}, {self._gpus()}{host}"
        )
        lines: list[RenderableType] = [about, ""]
        # A line above each table: rich would wrap a title of its own to the width of the table.
        tables = {
            f"memory of a training step{each}, {name}": self._parts_table(unit),
            f"largest batch{per_row or ' per GPU'}, in sequences of {t.seq_len:,} tokens": self._fit_table(),
            f"optimizer state, with FP32 masters where there are any{each}": self._optimizer_table(),
        }
        for title, table in tables.items():
            lines += [Text(title, style="bold"), table, ""]
        return Group(*lines[:-1])

    def _gpus(self) -> str:
        """Return the GPUs in words, and how they share the work."""
        training = self.training
        if training.gpus == 1:
            rows = training.context_parallel_size
            return "1 GPU" if rows == 1 else f"1 of {rows} GPUs (rows in {rows})"
        kinds = ["FSDP"] if training.data_ranks > 1 else []
        if training.tensor_parallel_size > 1:
            sequence = " and tokens" if training.sequence_parallel else ""
            kinds.append(f"layers{sequence} in {training.tensor_parallel_size}")
        if training.expert_parallel_size > 1:
            kinds.append(f"experts in {training.expert_parallel_size}")
        if training.context_parallel_size > 1:
            kinds.append(f"rows in {training.context_parallel_size}")
        return f"{training.gpus} GPUs ({', '.join(kinds)})"

    def _parts_table(self, unit: int) -> Table:
        moments = self.moments
        columns = (
            Column(m.moment, justify="right", style="green" if m == self.peak else "")
            for m in moments
        )
        table = Table("part", *columns, box=None, pad_edge=False)
        for name in moments[0].parts():
            # A part that is zero at each moment, such as FP8 copies in BF16, has no row.
            if any(values := [memory.parts()[name] for memory in moments]):
                table.add_row(
                    name.replace("_", " ").replace("fp8", "FP8"),
                    *(f"{value / unit:.2f}" for value in values),
                )
        totals = []
        for memory in moments:
            total = f"{memory.total / unit:.2f}"
            totals.append(f"{total} (peak)" if memory == self.peak else total)
        table.add_row("total", *totals, style="bold")
        return table

    def _fit_table(self) -> Table:
        plans = dict(self.by_mode())
        modes = (Column(f"checkpointing {mode}", justify="right") for mode in plans)
        table = Table("GPU", "this plan", *modes, box=None, pad_edge=False)
        for name, size in GPUS.items():
            # 0: not even one sequence fits, which the table shows as "-".
            batches = [plan.largest_batch(size) for plan in plans.values()]
            fits = "fits" if self.fits(size) else "does not fit"
            table.add_row(name, fits, *(f"{batch:,}" if batch else "-" for batch in batches))
        return table

    def _optimizer_table(self) -> Table:
        plans = self.optimizers()
        label, unit = unit_for(max(plans.values()))
        numbers = (
            Column(text, justify="right")
            for text in ("bytes per parameter", label, "against adamw")
        )
        table = Table("optimizer", *numbers, "state", box=None, pad_edge=False)
        # Per parameter of a rank's share, as `plans` counts the bytes of one rank.
        elements = self.num_trained / self.training.data_ranks
        for name, size in plans.items():
            saved = ""
            if name != "adamw":
                percent = round(100 * (size / plans["adamw"] - 1))
                saved = f"{percent:+d} %" if percent else "0 %"
            style = "green" if name == self.training.optimizer else ""
            table.add_row(
                name,
                f"{size / elements:.2f}",
                f"{size / unit:.2f}",
                saved,
                OPTIMIZERS[name].description,
                style=style,
            )
        return table


def unit_for(largest: int) -> tuple[str, int]:
    """Return the unit in which to print sizes up to `largest` bytes: its name and its bytes."""
    return ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)


def plan_memory(
    config: ModelConfig, recipe: Recipe, run: PlannedRun | None = None, **settings: Any
) -> MemoryPlan:
    """Predict the memory of a training step, for which the model runs without data; no GPU is needed.

    Args:
        config: the model's shape, for example from `te_models.get_preset`.
        recipe: the precision recipe, for example from `te_models.get_recipe`.
        run: the settings of the run; None: the defaults of te_models.planning.planned_run.PlannedRun.
        settings: fields of PlannedRun, such as batch_size=4, that replace the run's.

    Raises:
        UsageError: for a value that no training run could have.
        ConfigError: a size of the model does not suit the recipe.
    """
    run = replace(run or PlannedRun(), **settings)
    training = run.on_one_gpu(config, recipe)
    return MemoryPlan(config, recipe, training)
