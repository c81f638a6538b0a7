"""The table of one step on the device: a row of fields per tensor, which casts add to while the step is recorded."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.recorder.layout import BETWEEN, FIELDS, INDEX, LARGEST, SMALLEST, RecordedTensor
from te_models.recorder.quantized import cast_of
from te_models.recorder.statistics import E2M1, E5M2, Cast, count_cast

SPREAD = 16  # rows of fields per tensor on a GPU
MOST_SPREAD = 4096  # a model with more tensors than this has one row for each
# Whether a field of several casts is the sum of theirs; the others are the largest or the smallest.
SUMMED = [name not in (*LARGEST, *SMALLEST) for name in FIELDS]


def kernels(name: str) -> ModuleType:
    """Return a module of kernels that count, "cast", "words", "blocks" or "experts"; it needs Triton."""
    return importlib.import_module(f"te_models.kernels.count_{name}_triton")


class Table:
    """The fields of every tensor in the step that is being recorded.

    `parts` float64 [tensors, spread, fields] and `codes` int64 [tensors] stay where they are, so that the kernels of a
    CUDA graph can add to them. A tensor has `spread` rows of fields on a GPU, since programs that add to one address
    wait for each other.

    Args:
        tensors: the names of the rows, of all ranks.
        counted: whether this rank's counts of a row enter the sums; among several copies of a tensor one does.
        device: the device of the model.
        distributed: whether other processes share the run.
        every_step: whether each step of the run is recorded. Inputs of casts that are not in memory are then not
            computed once more, which would take 2 % of the time of a step (docs/internals/recorder.md).
    """

    def __init__(
        self,
        tensors: Sequence[RecordedTensor],
        counted: Sequence[bool],
        device: torch.device,
        distributed: bool = False,
        every_step: bool = False,
    ) -> None:
        self.every_step = every_step
        self.tensors = list(tensors)
        self.rows = {tensor: row for row, tensor in enumerate(self.tensors)}
        self.distributed = distributed
        # In a model of very many tensors each has one row, or the table would take too much memory.
        spread = SPREAD if device.type == "cuda" and len(tensors) <= MOST_SPREAD else 1
        shape = (len(tensors), spread, len(FIELDS))
        self.parts = torch.zeros(shape, dtype=torch.float64, device=device)
        # Whether kernels count the casts, or operations of torch.
        self.kernels = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        self.codes = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        self.between = torch.zeros(len(tensors), len(BETWEEN), dtype=torch.float64, device=device)
        # Whether the step in progress is recorded. Other steps have a CUDA graph without kernels that count.
        self.recording = False
        self.first_micro_batch = True
        self._counted = torch.tensor(list(counted), device=device)
        self._summed = torch.tensor(SUMMED, device=device)
        self._largest = torch.tensor([name in LARGEST for name in FIELDS], device=device)
        self._empty = torch.zeros(len(FIELDS), dtype=torch.float64, device=device)
        self._empty[INDEX["scale_min"]] = math.inf

    @property
    def values(self) -> Tensor:
        """The fields of each tensor so far, float64 [tensors, fields]."""
        sums = self.parts.sum(1)
        largest = torch.where(self._largest, self.parts.amax(1), self.parts.amin(1))
        return torch.where(self._summed, sums, largest)

    def begin(self) -> None:
        """Empty the table; the casts that follow are recorded."""
        self.parts.copy_(self._empty.expand_as(self.parts))
        self.codes.zero_()
        self.between.fill_(-1.0)
        self.recording = True
        self.first_micro_batch = True

    def set_scale_ages(self, rows: Tensor, ages: Tensor) -> None:
        """Set the ages of the scales of some rows, int64 [rows], in steps: FP32 [rows]."""
        # In every row of fields that a tensor has: `values` takes the largest of them.
        ages = ages.to(self.parts)[:, None].expand(-1, self.parts.shape[1])  # [rows, spread]
        self.parts[:, :, INDEX["scale_age"]].index_copy_(0, rows, ages)

    def set_amaxes_between(self, rows: Tensor, amaxes: Tensor, ages: Tensor) -> None:
        """Set the largest amaxes of the steps since the last recorded one, FP32 [rows], and how long ago they were."""
        self.between.index_copy_(0, rows, torch.stack([amaxes, ages], 1).to(self.between))

    def stop(self) -> None:
        """Stop recording; the table keeps what it has."""
        self.recording = False

    def end(self) -> tuple[Tensor, Tensor]:
        """Stop recording; return the fields and the hashes of the step, over all processes, which call this together.

        Returns:
            values: float64 [tensors, RECORDED_FIELDS] on the device; -1 where a count is unknown.
            codes: int64 [tensors] on the device.
        """
        self.stop()
        values = self.values
        codes = self.codes.clone()
        between = self.between
        if self.distributed:
            values, codes = self._over_ranks(values, codes)
            between = self._largest_between()
        unknown = values.isnan()
        # As in a file (record.UNKNOWN), which has no NaN.
        values.masked_fill_(unknown, -1.0)
        # Without a cast the smallest scale is still what `begin` set.
        values[:, INDEX["scale_min"]].masked_fill_(values[:, INDEX["scale_min"]].isinf(), 0.0)
        return torch.cat([values, between], 1), codes

    def _largest_between(self) -> Tensor:
        """Return `between` of the rank that measured the largest amax of each tensor."""
        local_amaxes, ages = self.between.unbind(1)
        amaxes = local_amaxes.clone()
        dist.all_reduce(amaxes, dist.ReduceOp.MAX)
        ages = torch.where(local_amaxes == amaxes, ages, -1.0)
        dist.all_reduce(ages, dist.ReduceOp.MAX)
        return torch.stack([amaxes, ages], 1)

    def _over_ranks(self, values: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the fields of all ranks: sums over the first copies, and the largest and smallest values."""
        # A tensor of which several ranks have a copy, such as a replicated weight, is counted on one of them.
        sums = torch.where(self._counted[:, None] & self._summed, values, 0.0)
        # The smallest value is the largest negative one.
        extremes = torch.where(self._largest, values, -values)
        codes = torch.where(self._counted, codes, 0)
        dist.all_reduce(sums)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        dist.all_reduce(codes)
        extremes = torch.where(self._largest, extremes, -extremes)
        return torch.where(self._summed, sums, extremes), codes

    @torch.no_grad()
    def add(self, row: int, source: Tensor | None, storage: Any, scale: Tensor | None) -> None:
        """Count a cast.

        Args:
            row: the tensor's row of the table.
            source: the values before the cast, [..., K]; None: they are not in memory.
            storage: the quantized tensor of either engine.
            scale: the scale of the cast, FP32 [1], where it was known before; None: it follows from `storage`.
        """
        if source is not None:
            source = source.detach().reshape(-1, source.shape[-1])
        cast = cast_of(storage, scale)
        if cast is None:
            return
        # The kernels read one code per byte; FP4 has two.
        if self.kernels and cast.format != E2M1:
            self._count_on_device(row, source, cast)
        else:
            self.add_cast(row, source, cast)

    def _count_on_device(self, row: int, source: Tensor | None, cast: Cast) -> None:
        """Count a cast to FP8 by the fastest kernel that can."""
        counts = self.counts(row)
        e5m2 = cast.format == E5M2
        one_scale = cast.inverse.numel() == 1
        # Two kernels read four values at a time, where the memory allows that; the third one reads any.
        in_words = kernels("words").are_words(source, cast.codes)
        if in_words and one_scale:
            kernels("words").count_words(source, cast.codes, cast.inverse, cast.scale, e5m2, counts)
        elif in_words and source is not None:
            kernels("blocks").count_blocks(
                source, cast.codes, cast.inverse, cast.block, e5m2, counts
            )
        else:
            block = None if one_scale else cast.block
            kernels("cast").count_cast(
                source, cast.codes, cast.inverse, block, cast.scale, e5m2, counts
            )

    def counts(self, row: int) -> Any:
        """Return where a kernel adds the counts of a tensor (te_models.kernels.count_cast_triton.Counts)."""
        return kernels("cast").Counts(self.parts[row], self.codes[row : row + 1])

    def expert_counts(self, rows: Sequence[int]) -> Any:
        """Return where a kernel adds the counts of one operand of every expert.

        `rows` are the experts' rows of the table, which have one stride.
        """
        first = rows[0]
        stride = rows[1] - first if len(rows) > 1 else 1
        # The kernel finds the row of an expert by the stride.
        assert list(rows) == [first + stride * expert for expert in range(len(rows))]
        return kernels("experts").ExpertCounts(self.parts[first:], self.codes[first:], stride)

    def add_cast(self, row: int, source: Tensor | None, cast: Cast) -> None:
        """Count a cast, in plain PyTorch."""
        counts, codes = count_cast(source, cast)
        before = self.parts[row, 0]
        # Each field is a sum, the largest or the smallest of its casts.
        extremes = torch.where(
            self._largest, torch.maximum(before, counts), torch.minimum(before, counts)
        )
        self.parts[row, 0] = torch.where(self._summed, before + counts, extremes)
        self.codes[row] += codes


class Observer:
    """Counts the casts of one operand; a quantizer calls it with the values before and after each cast.

    Args:
        table: the table of the step.
        row: the operand's.
        operand: "input", "weight", "grad_output", or "stored weight" for FP8 weights, which the optimizer casts.
    """

    def __init__(self, table: Table, row: int, operand: str) -> None:
        self.table = table
        self.row = row
        self.operand = operand

    @property
    def counts_next(self) -> bool:
        """True if the next cast is counted: once per micro-batch, and for a weight once per step."""
        table = self.table
        if not table.recording:
            return False
        # This cast runs in backward, once per micro-batch; the check at the end is for casts of the forward pass.
        if self.operand == "grad_output":
            return True
        # The weights are the same in every micro-batch of a step.
        if self.operand == "weight" and not table.first_micro_batch:
            return False
        # A forward cast inside backward belongs to a recompute, and was counted in the first pass.
        in_backward = torch._C._current_graph_task_id() != -1
        return not in_backward

    @property
    def counts(self) -> Any:
        """Where a kernel that casts adds its counts; None if the next cast is not counted, or there are no kernels."""
        return self.table.counts(self.row) if self.table.kernels and self.counts_next else None

    @property
    def wants_values(self) -> bool:
        """True if the next cast is counted, and its input may be computed once more where it is not in memory."""
        return self.counts_next and not self.table.every_step

    def __call__(self, source: Tensor | None, storage: Any, scale: Tensor | None = None) -> None:
        """Count a cast; arguments as in Table.add."""
        if self.counts_next:
            self.table.add(self.row, source, storage, scale)

    def __deepcopy__(self, memo: object) -> None:
        """Leave the observer out of a copy: casts of a copied module are not recorded."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave the observer out of a pickle."""
        return type(None), ()


class ExpertObserver:
    """Counts the casts of one operand of all experts of a te.GroupedLinear, which a kernel makes at once.

    Args:
        observers: of this operand, one per expert.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    @property
    def counts(self) -> Any:
        """Where a kernel adds the counts of the next cast; None if it is not counted, or there are no kernels."""
        first = self.observers[0]
        if not (first.table.kernels and first.counts_next):
            return None
        return first.table.expert_counts([observer.row for observer in self.observers])


Observers = tuple[Observer, Observer, Observer]  # of input, weight and gradient of the output
