"""The recorder of a training run: which tensors it knows, which steps it records, and when it writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.config.training import TrainConfig
from te_models.fp8.primary_weights import quantized
from te_models.fp8.scale_age import ScalePlace, scale_histories
from te_models.fp8.scaling_state import gemms_of
from te_models.recorder.layout import INDEX, OPERANDS, RecordedTensor
from te_models.recorder.record import RecordWriter
from te_models.recorder.table import Observer, Observers, Table
from te_models.training.parallel import Parallel, reuses_fp8_weights
from te_models.training.timing import copy_to_host


@dataclass
class RecordedStep:
    """The entry of a step on its way to the host.

    Attributes:
        step: its number.
        values: the fields, float64 [tensors, RECORDED_FIELDS] on the host.
        codes: the hashes, int64 [tensors] on the host.
        ready: both are complete once this is reached; None: they are.
    """

    step: int
    values: Tensor
    codes: Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait until the host has the entry."""
        if self.ready is not None:
            self.ready.synchronize()


class Recorder:
    """Records the steps of a run: attached to the model's te.Linears for as long as the run lasts.

    Args:
        model: the model in training.
        parallel: how processes share the run; all of them make a recorder together.
        every: record each `every`-th step; 0: none but those for which the caller calls `begin`.
        micro_batches: micro-batches per step.
        weight_casts: how often a step casts each weight.
    """

    def __init__(
        self,
        model: CausalLM,
        parallel: Parallel,
        every: int,
        micro_batches: int = 1,
        weight_casts: int = 1,
    ) -> None:
        self.model = model
        self.every = every
        self.micro_batches = micro_batches
        self.weight_casts = weight_casts
        self.modules = dict(quantizing_modules(model))
        recorded = []
        for name, module in self.modules.items():
            for expert in experts_of(model, name, module):
                for operand in OPERANDS:
                    recorded.append(RecordedTensor(linear_name(name), operand, expert))
        tensors = _of_all_ranks(recorded, parallel)
        # Processes with the same weights would count each of them again.
        counts = dict(zip(recorded, _first_copies(self.modules, model, parallel), strict=True))
        counted = [counts.get(tensor, False) for tensor in tensors]
        distributed = parallel.ranks.world > 1
        self.table = Table(tensors, counted, model.device, distributed, every_step=every == 1)
        self.observers = {name: self._observers(name) for name in self.modules}
        self.scale_rows: dict[tuple[ScalePlace, ...], Tensor] = {}
        self.last_step: int | None = None  # the last one that was recorded

    @classmethod
    def of_run(
        cls, model: CausalLM, parallel: Parallel, config: TrainConfig, every: int
    ) -> Recorder:
        """Return a recorder of a run with these options."""
        micro_batches = config.gradient_accumulation
        once = model.fp8_params or reuses_fp8_weights(config, parallel)
        return cls(
            model,
            parallel,
            every,
            micro_batches=micro_batches,
            weight_casts=1 if once else micro_batches,
        )

    @property
    def tensors(self) -> list[RecordedTensor]:
        """The recorded tensors, in the order of the model."""
        return self.table.tensors

    @property
    def recording(self) -> bool:
        """True while the step in progress is recorded."""
        return self.table.recording

    def is_due(self, step: int) -> bool:
        """Return whether a step is one of those to record."""
        return self.every > 0 and step % self.every == 0

    def attach(self) -> None:
        """Let the casts of all te.Linears reach the table; again after anything that replaces quantizers."""
        for name, module in self.modules.items():
            self.model.te.set_observers(module, self.observers[name])
            for (_, weight, _), fp8 in zip(self.observers[name], _fp8_weights(module), strict=True):
                if fp8 is not None:
                    # The optimizer casts FP8 weights, by a quantizer of their own.
                    observer = Observer(self.table, weight.row, "stored weight")
                    self.model.te.observe_quantizer(fp8._quantizer, observer)

    def detach(self) -> None:
        """Leave the model as it was."""
        for module in self.modules.values():
            self.model.te.set_observers(module, None)
            for fp8 in _fp8_weights(module):
                if fp8 is not None:
                    self.model.te.observe_quantizer(fp8._quantizer, None)

    def begin(self, step: int = 0) -> None:
        """Record from here on; call it before the step's first forward pass.

        `step` is its number in the run; 0 for a step that belongs to no run.
        """
        # At every recorded step: a change of recipe, or a load, makes new quantizers, which know no observers.
        self.attach()
        self.table.begin()
        delayed = {}
        for name, module in self.modules.items():
            recipe = self.model.precision.recipe_of(name)
            if recipe is not None and recipe.stateful:
                delayed[name] = module
        between = self._steps_between(step)
        for history in scale_histories(
            delayed,
            micro_batches=self.micro_batches,
            weight_casts=self.weight_casts,
            last_steps=between,
        ):
            rows = self._rows_of(history.places)
            self.table.set_scale_ages(rows, history.ages)
            self.table.set_amaxes_between(rows, history.amaxes, history.amax_ages)

    def _steps_between(self, step: int) -> int:
        """Return how many steps before this one were not recorded, back to the last recorded one."""
        before = self.last_step
        self.last_step = step
        # The first recorded step since the run started or resumed, or one that is taken again.
        if before is None or before >= step:
            before = max(step - self.every, 0) if self.every else step
        return max(step - before - 1, 0)

    def _rows_of(self, places: Sequence[ScalePlace]) -> Tensor:
        """Return the rows of the table for scales, int64 on the device, where they stay for the next steps."""
        key = tuple(places)
        if key not in self.scale_rows:
            rows = [self.observers[name][gemm][operand].row for name, gemm, operand in key]
            self.scale_rows[key] = torch.tensor(rows, device=self.model.device)
        return self.scale_rows[key]

    def stop(self) -> None:
        """Stop recording a step that will not be finished."""
        self.table.stop()

    def bad_values(self) -> Tensor:
        """Return how many values of this process's tensors were not finite so far in this step, a scalar."""
        return self.table.parts[:, :, INDEX["nonfinite"]].sum()

    def next_micro_batch(self, first: bool) -> None:
        """Note that a micro-batch begins; only the `first` of a step counts the weights."""
        self.table.first_micro_batch = first

    def end(self, step: int) -> RecordedStep:
        """End the recording of a step after its update; return its entry. All processes call this together."""
        # Both copies run while the next step begins.
        values, codes = self.table.end()
        values, _ = copy_to_host(values)
        codes, ready = copy_to_host(codes)
        return RecordedStep(step, values, codes, ready)

    def _observers(self, name: str) -> list[Observers]:
        """Return the observers of each GEMM of a te module."""
        observers = []
        for expert in experts_of(self.model, name, self.modules[name]):
            # One row of the table for each operand; the casts of the GEMM add to it on the device.
            rows = [
                self.table.rows[RecordedTensor(linear_name(name), operand, expert)]
                for operand in OPERANDS
            ]
            x, weight, dy = (
                Observer(self.table, row, operand)
                for row, operand in zip(rows, OPERANDS, strict=True)
            )
            observers.append((x, weight, dy))
        return observers


class RecordLog:
    """The record of a run while it lasts. Leaving its `with` block detaches the recorder.

    Args:
        recorder: the recorder whose tensors it writes; None: none yet, see `use`.
        out: the folder of the run; None: this process writes nothing.
        after_step: the step after which the run goes on; entries of later steps are dropped.
    """

    def __init__(self, recorder: Recorder | None, out: Path | None, after_step: int) -> None:
        self.recorder: Recorder | None = None
        self.writer: RecordWriter | None = None
        self.out = out
        self.after_step = after_step
        if recorder is not None:
            self.use(recorder)

    def use(self, recorder: Recorder) -> None:
        """Open the record for what a recorder counts."""
        self.recorder = recorder
        if self.out is not None:
            self.writer = RecordWriter(self.out, recorder.tensors, self.after_step)

    def __enter__(self) -> RecordLog:
        return self

    def __exit__(self, *error: object) -> None:
        if self.recorder is not None:
            self.recorder.detach()
        self.close()

    def close(self) -> None:
        """Close the record's file; the recorder stays attached."""
        if self.writer is not None:
            self.writer.close()

    def write(self, recorded: RecordedStep) -> None:
        """Write the entry of a step once the host has it."""
        if self.writer is not None:
            recorded.wait()
            self.writer.write(recorded.step, recorded.values.numpy(), recorded.codes.numpy())

    def drop_after(self, step: int) -> None:
        """Drop the entries after `step`, which the run takes once more."""
        if self.writer is not None:
            self.writer.drop_after(step)


def quantizing_modules(model: CausalLM) -> Iterator[tuple[str, Any]]:
    """Yield the te.Linears and te.GroupedLinears of a model, with their names in it."""
    for name, module in model.named_modules():
        if isinstance(module, model.te.LINEARS):
            yield name, module


def linear_name(name: str) -> str:
    """Return the name of a te.Linear without the part "base_layer", which peft's layers add to it."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def experts_of(model: CausalLM, name: str, module: nn.Module) -> list[int | None]:
    """Return the numbers of a te module's experts in the whole model; of a te.Linear, None."""
    if not isinstance(module, model.te.GroupedLinear):
        return [None]
    count = gemms_of(module)
    # Under expert parallelism each rank holds `count` of the model's experts, one rank after the other.
    first = model.ep.rank * count if model.ep.divides(name) else 0
    return list(range(first, first + count))


def _fp8_weights(module: Any) -> list[Any]:
    """Return the quantized tensor of the weight of each GEMM of a te module; None for a weight in high precision."""
    count = gemms_of(module)
    names = [f"weight{gemm}" for gemm in range(count)]
    if hasattr(module, "weight"):
        names = ["weight"]
    return [quantized(getattr(module, name)) for name in names]


def _of_all_ranks(local_tensors: list[RecordedTensor], parallel: Parallel) -> list[RecordedTensor]:
    """Return the tensors of all ranks in the order of the model; ranks differ only in their experts."""
    by_module: dict[str, set[RecordedTensor]] = {}
    for rank in parallel.ranks.gather([tensor.to_dict() for tensor in local_tensors]):
        for entry in rank:
            tensor = RecordedTensor.from_dict(entry)
            by_module.setdefault(tensor.linear, set()).add(tensor)
    ordered = []
    for tensors in by_module.values():
        # Sorted: a set has another order in each process, and rows of the table are summed over processes.
        ordered += sorted(tensors, key=_order_in_module)
    return ordered


def _order_in_module(tensor: RecordedTensor) -> tuple[int, int]:
    """Return the key that sorts the tensors of one te module: by expert, then by operand."""
    return tensor.expert or 0, OPERANDS.index(tensor.operand)


def _first_copies(modules: dict[str, Any], model: CausalLM, parallel: Parallel) -> list[bool]:
    """Return, for each operand of each GEMM, whether this rank has the first copy of it, or a part of its own."""
    first_copies = []
    for name, module in modules.items():
        # Under tensor parallelism some operands are divided among ranks, and each rank counts its part. The others are
        # whole on all ranks, and the first rank alone counts them.
        is_first_rank = parallel.tp is None or parallel.tp.get_local_rank() == 0
        divided = dict.fromkeys(OPERANDS, True) if parallel.tp is None else divided_operands(module)
        for gemm, _ in enumerate(experts_of(model, name, module)):
            for operand in OPERANDS:
                counts = is_first_rank or divided[operand]
                if operand == "weight":
                    # FP8 weights under FSDP are cast shard by shard: each process has a part of its own.
                    stored = _fp8_weights(module)[gemm] is not None and parallel.uses_fsdp
                    counts = counts and (stored or _has_first_weight(name, model, parallel))
                first_copies.append(counts)
    return first_copies


def _has_first_weight(name: str, model: CausalLM, parallel: Parallel) -> bool:
    """Return whether this rank is the first of those that cast the same weight."""
    if not model.ep.divides(name):
        return parallel.part == 0
    return parallel.replicas is None or parallel.replicas.get_local_rank() == 0


def divided_operands(module: Any) -> dict[str, bool]:
    """Return, for each operand of a tensor-parallel te.Linear, whether it differs between the ranks that share it."""
    mode = module.parallel_mode
    return {
        "input": mode == "row" or (mode == "column" and module.sequence_parallel),
        "weight": mode is not None,
        "grad_output": mode == "column" or (mode == "row" and module.sequence_parallel),
    }
