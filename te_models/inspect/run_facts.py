"""The facts about a run that the rules of te_models.inspect.advice look at: its record, its metrics and its recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from te_models.config.recipe import Recipe, list_recipes, recipe_from_dict
from te_models.config.toml import read_toml
from te_models.numerics.formats import FP8_MAX
from te_models.recorder.layout import RecordedTensor
from te_models.recorder.record import Floats, Record, read_record
from te_models.saving.checkpoint_choice import METRICS, check_run
from te_models.training.metrics import read_events, read_metrics
from te_models.training.settings import PROVENANCE, RUN_FILE
from te_models.training.timing import Row

# A tensor with fewer values other than 0 than this share counts as if it had so many.
FEWEST_VALUES = 1 / 64
PER_TENSOR = ("DelayedScaling", "Float8CurrentScaling")  # schemes with one scale per tensor


Steps = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass
class RunFacts:
    """The input of the rules: the record of a run, its metrics and its recipe.

    Attributes:
        record: the statistics of the recorded steps.
        rows: the rows of metrics.jsonl, one per step.
        events: the rows of metrics.jsonl about actions of the guard.
        recipe: the recipe of the first step, from run.toml.
        engine: "native" or "emulated"; "" if run.toml does not say.
        explained: indices of the tensors that an earlier rule has explained; later rules leave them out.
    """

    record: Record
    rows: list[Row]
    events: list[Row]
    recipe: Recipe
    engine: str = ""
    explained: set[int] = field(default_factory=set)

    @property
    def steps(self) -> Steps:
        """The recorded steps, int64 [steps]."""
        return np.array(self.record.steps, np.int64)

    @property
    def tensors(self) -> list[RecordedTensor]:
        """The recorded tensors."""
        return self.record.tensors

    def first_nonfinite(self) -> Row | None:
        """Return the first event of a step whose loss or gradient was not finite; None for a run without one."""
        for event in self.events:
            if event["event"] == "nonfinite":
                return event
        return None

    def headroom(self) -> Floats:
        """Return the powers of two between each tensor's largest magnitude and the format's, [steps, tensors].

        Negative where the largest magnitude saturates; NaN for blocks, which have scales of their own.
        """
        # Formats without an entry, such as FP4, stay NaN: no rule about scales applies to them.
        largest = np.full_like(self.record.field("amax"), np.nan)
        formats = self.record.field("format")
        for number, value in FP8_MAX.items():
            largest[formats == int(number)] = value
        scaled = self.record.field("amax") * self.record.field("scale_min")
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.log2(largest / scaled)
        return np.where(self.one_scale() & np.isfinite(room), room, np.nan)

    def one_scale(self) -> Mask:
        """Return which tensors have one scale per cast, bool [steps, tensors]; the others have one per block.

        The number of scales does not tell: it is a sum over micro-batches and processes.
        """
        if not self.recipe.quantized:  # of a run without run.toml
            return np.asarray(self.record.field("blocks") == 1)
        return self.under_schemes(*PER_TENSOR)

    def under_schemes(self, *schemes: str) -> Mask:
        """Return which tensors ran under a recipe of one of these classes, bool [steps, tensors]."""

        def listed(recipe: Recipe) -> bool:
            return recipe.scheme in schemes

        return self._by_recipe(listed).astype(bool)

    def margin(self) -> Steps:
        """Return the powers of two that the recipe of each tensor keeps free above amaxes, int64 [steps, tensors]."""

        def margin(recipe: Recipe) -> int:
            return int(recipe.fields.get("margin", 0))

        return self._by_recipe(margin)

    def _by_recipe(self, figure: Callable[[Recipe], int]) -> Steps:
        """Return a figure of the recipe that each tensor ran under, int64 [steps, tensors]; 0 for BF16.

        A run with a schedule has several recipes, and a recipe with a table of patterns has others for some tensors.
        """
        recipe_of_step = self._recipe_of_step()
        by_first_recipe = _of_tensors(self.recipe, self.tensors, figure)
        by_recipe: dict[str, list[int]] = {self.recipe.name: by_first_recipe}
        figures = np.zeros(self.record.values.shape[:2], np.int64)
        for place, step in enumerate(self.record.steps):
            name = recipe_of_step.get(step, self.recipe.name)
            # A recipe of the schedule. list_recipes reads files, so it is asked last.
            if name not in by_recipe and name in list_recipes():
                scheduled = self.recipe.followed_by(name)
                by_recipe[name] = _of_tensors(scheduled, self.tensors, figure)
            figures[place] = by_recipe.get(name, by_first_recipe)
        return figures

    def later_recipes(self) -> tuple[str, ...]:
        """Return the names of the recipes that a schedule gave to recorded steps, in their order, without the first."""
        recipe_of_step = self._recipe_of_step()
        names = [recipe_of_step.get(step, self.recipe.name) for step in self.record.steps]
        return tuple(dict.fromkeys(name for name in names if name != self.recipe.name))

    def _recipe_of_step(self) -> dict[int, str]:
        """Return step -> the name of its recipe, as the metrics have it."""
        return {int(row["step"]): row["recipe"] for row in self.rows if "recipe" in row}

    def rms(self) -> Floats:
        """Return the root mean square of each tensor before its cast, [steps, tensors]."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self.record.field("signal") / self.record.field("elements"))

    def lost(self) -> Floats:
        """Return the share of each tensor's values other than 0 that became zero or subnormal, [steps, tensors]."""
        return self.share_of_values("flushed") + self.share_of_values("subnormal")

    def share_of_values(self, name: str) -> Floats:
        """Return the share of each tensor's values other than 0 that a field counts, [steps, tensors].

        Zeros say nothing: an expert's rows are padded with them.
        """
        elements = self.record.field("elements")
        zeros = np.nan_to_num(self.record.field("zeros"))  # 0 where they are not counted
        # The few values of a tensor of almost only zeros say little.
        values = np.maximum(elements - zeros, FEWEST_VALUES * elements)
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.record.field(name) / values

    def peak(self) -> Floats:
        """Return the largest magnitude of each tensor over its root mean square, [steps, tensors]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.record.field("amax") / self.rms()

    def operand(self, *names: str) -> Mask:
        """Return which tensors are one of these operands ("input", "weight", "grad_output"), bool [tensors]."""
        return np.array([tensor.operand in names for tensor in self.tensors], bool)

    def first_computed(self, tensors: Sequence[int] | Steps) -> int:
        """Return which of these tensors a step computes first: inputs and weights forward, then gradients backward."""
        forward = [int(one) for one in tensors if self.tensors[one].operand != "grad_output"]
        return forward[0] if forward else int(tensors[-1])


def _of_tensors(
    recipe: Recipe, tensors: Sequence[RecordedTensor], figure: Callable[[Recipe], int]
) -> list[int]:
    """Return a figure of the recipe of each tensor, this one or one of its table of patterns; 0 for BF16."""
    figures = []
    for tensor in tensors:
        own_recipe: Recipe | None = recipe
        for pattern, name in recipe.precision.items():
            # No break: of several patterns the last one counts.
            if fnmatchcase(tensor.linear, pattern):
                own_recipe = recipe.called(name)
        figures.append(0 if own_recipe is None else figure(own_recipe))
    return figures


def read_facts(run: str | Path) -> RunFacts:
    """Return what the rules look at in the folder of a run.

    Raises:
        DataError: there is no such folder, it is not the folder of a run, or the run has no record.
    """
    folder = Path(run)
    check_run(folder)
    record = read_record(folder)
    file = folder / RUN_FILE
    document = read_toml(file) if file.is_file() else {}
    recipe = recipe_from_dict(document.get("recipe", {"name": "bf16", "scheme": "none"}))
    metrics = folder / METRICS
    rows = read_metrics(metrics) if metrics.is_file() else []
    events = read_events(metrics) if metrics.is_file() else []
    engine = str(document.get(PROVENANCE, {}).get("engine", ""))
    return RunFacts(record, rows, events, recipe, engine)
