"""The memory plan: what a training step needs and which GPUs it fits on, as `te-models plan --memory` prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group
from rich.table import Table
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
            """Return the bytes that a batch leaves free; negative if it does not fit."""
            plan = replace(self, training=replace(self.training, batch_size=batch))
            return (1 - HEADROOM) * gigabytes * 10**9 - plan.peak.total

        # Two batches with the bytes that are left beside each of them.
        least = 1
        most = 2
        least_spare = spare(least)
        most_spare = spare(most)
        if least_spare < 0:
            return 0
        while most_spare >= 0:
            # Both fit: go on to where the line through them is zero, and 5 % further.
            bytes_per_sequences = max(1.0, least_spare - most_spare)
            further = most + 1 + int(1.05 * most_spare * (most - least) / bytes_per_sequences)
            further = min(further, 100 * most)  # the update may need more than two small batches
            least = most
            least_spare = most_spare
            most = further
            most_spare = spare(further)
        # `least` fits and `most` does not; the line between them is zero at `middle`, which has to lie inside.
        while most - least > 1:
            step = int(least_spare * (most - least) / (least_spare - most_spare))
            middle = least + min(max(1, step), most - least - 1)
            middle_spare = spare(middle)
            if middle_spare >= 0:
                least = middle
                least_spare = middle_spare
            else:
                most = middle
                most_spare = middle_spare
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
        largest_batches: dict[str, dict[str, int]] = {}
        for name, size in GPUS.items():
            largest_batches[name] = {}
            for mode, plan in modes.items():
                largest_batches[name][str(mode)] = plan.largest_batch(size)
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
        """Return a line about the run, and a table each of its memory, of larger batches, and of optimizers."""
        training = self.training
        label, unit = unit_for(self.peak.total)
        per_gpu = ""
        if training.gpus > 1 or training.context_parallel_size > 1:
            per_gpu = " per GPU"
        per_row = per_gpu
        if training.context_parallel_size > 1:
            per_row = f" per {training.context_parallel_size} GPUs"
        batch = f"largest batch{per_row or ' per GPU'}, in sequences of {training.seq_len:,} tokens"
        # A line above each table: rich would wrap a title of its own to the width of the table.
        return Group(
            self._about(per_row, label, unit),
            "",
            Text(f"memory of a training step{per_gpu}, {label}", style="bold"),
            self._parts_table(unit),
            "",
            Text(batch, style="bold"),
            self._fit_table(),
            "",
            Text(f"optimizer state, with FP32 masters where there are any{per_gpu}", style="bold"),
            self._optimizer_table(),
        )

    def _about(self, per_row: str, label: str, unit: int) -> str:
        """Return the line about the run: the model, the recipe and the settings that its memory depends on."""
        training = self.training
        parts = [f"{self.config.num_parameters:,} parameters"]
        if training.lora_rank:
            experts = " on experts too" if training.lora_experts else ""
            parts.append(f"LoRA of rank {training.lora_rank}{experts}")
        if training.stored is not None:
            parts.append("weights of the base as they are stored")
        parts += [
            f"recipe {self.recipe.name}",
            f"{training.batch_size} x {training.seq_len:,} tokens{per_row}",
            training.optimizer or "no optimizer",
            f"activation checkpointing {training.activation_checkpointing}",
            self._gpus(),
        ]
        if self.host:
            parts.append(f"{self.host / unit:.2f} {label} on the host")
        return ", ".join(parts)

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
        """Return the table of the memory at each moment, in `unit` bytes."""
        moments = self.moments
        table = Table("part", box=None, pad_edge=False)
        for memory in moments:
            style = "green" if memory == self.peak else ""
            table.add_column(memory.moment, justify="right", style=style)
        for name in moments[0].parts():
            values = [memory.parts()[name] for memory in moments]
            # A part that is zero at each moment, such as FP8 copies in BF16, has no row.
            if any(values):
                title = name.replace("_", " ").replace("fp8", "FP8")
                table.add_row(title, *(f"{value / unit:.2f}" for value in values))
        totals = []
        for memory in moments:
            total = f"{memory.total / unit:.2f}"
            totals.append(f"{total} (peak)" if memory == self.peak else total)
        table.add_row("total", *totals, style="bold")
        return table

    def _fit_table(self) -> Table:
        """Return the table of the largest batch on each GPU, under each mode of activation checkpointing."""
        plans = dict(self.by_mode())
        table = Table("GPU", "this plan", box=None, pad_edge=False)
        for mode in plans:
            table.add_column(f"checkpointing {mode}", justify="right")
        for name, size in GPUS.items():
            cells = [name, "fits" if self.fits(size) else "does not fit"]
            for plan in plans.values():
                batch = plan.largest_batch(size)
                cells.append(f"{batch:,}" if batch else "-")  # 0: not even one sequence fits
            table.add_row(*cells)
        return table

    def _optimizer_table(self) -> Table:
        """Return the table of the state that each optimizer would have."""
        sizes = self.optimizers()
        label, unit = unit_for(max(sizes.values()))
        table = Table("optimizer", box=None, pad_edge=False)
        for title in ("bytes per parameter", label, "against adamw"):
            table.add_column(title, justify="right")
        table.add_column("state")
        # Per parameter of a rank's share, as `sizes` are the bytes of one rank.
        elements = self.num_trained / self.training.data_ranks
        for name, size in sizes.items():
            saved = ""
            if name != "adamw":
                percent = round(100 * (size / sizes["adamw"] - 1))
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
