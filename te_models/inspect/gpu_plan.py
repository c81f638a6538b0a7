"""The recipes that run on a GPU which need not be here, and the one that "auto" would choose there."""

from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from te_models.config.gpus import Gpu, how_it_runs, suited, why_not
from te_models.config.measured_speed import gain
from te_models.config.model import ModelConfig
from te_models.config.recipe import get_recipe, list_recipes
from te_models.model.recipe_fit import best_on
from te_models.planning.memory_plan import MemoryPlan
from te_models.planning.printable import Printable


@dataclass(frozen=True)
class GpuPlan(Printable):
    """The plan of a model for one GPU; print it, or take `to_dict`.

    Attributes:
        gpu: the GPU.
        recipes: name of each recipe -> how it runs there, "" if it does not.
        reasons: name of each recipe that does not run -> why.
        auto: the recipe that "auto" stands for there.
        why: the reason for it.
        memory: the plan of a training step; None: not asked for.
        speed: what is measured of quantized recipes there near the model's size, a line each.
    """

    gpu: Gpu
    recipes: dict[str, str]
    reasons: dict[str, str]
    auto: str
    why: str
    memory: MemoryPlan | None = None
    speed: tuple[str, ...] = ()

    @property
    def fit(self) -> str:
        """Return whether the planned step fits, in a line; empty without a plan of memory."""
        if self.memory is None:
            return ""
        size = self.gpu.memory
        fits = "fits" if self.memory.fits(size) else "does not fit"
        batch = self.memory.largest_batch(size)
        most = f"the largest batch is {batch}" if batch else "not even one sequence does"
        return f"this step {fits} on its {size} GB; {most}"

    def __rich__(self) -> Group:
        """Return the table of recipes, and the lines around it."""
        major, minor = self.gpu.capability
        gpu = f"{self.gpu.name}, {self.gpu.generation}, compute capability {major}.{minor}"
        table = Table("recipe", "runs", "how", box=None, pad_edge=False)
        for name, status in self.recipes.items():
            table.add_row(
                name, "no" if name in self.reasons else "yes", status or self.reasons[name]
            )
        lines = [f"recipe auto: {self.auto} ({self.why})"]
        lines += [f"speed: {line}" for line in self.speed]
        if self.fit:
            lines.append(self.fit)
        title = Text(f"{gpu}: {self.gpu.evidence}", "bold")
        return Group(title, table, *map(Text, lines), Text())

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        document: dict[str, Any] = {
            "gpu": self.gpu.name,
            "compute_capability": list(self.gpu.capability),
            "generation": self.gpu.generation,
            "evidence": self.gpu.evidence,
            "recipes": {name: name not in self.reasons for name in self.recipes},
            "reasons": self.reasons,
            "auto": self.auto,
            "why": self.why,
            "speed": list(self.speed),
        }
        if self.memory is not None:
            document["fits"] = self.memory.fits(self.gpu.memory)
            document["largest_batch"] = self.memory.largest_batch(self.gpu.memory)
        return document


def plan_for_gpu(gpu: Gpu, config: ModelConfig, memory: MemoryPlan | None = None) -> GpuPlan:
    """Return how the shipped recipes run on a GPU, and which one "auto" takes there for a model of this shape."""
    training = None if memory is None else memory.training
    tokens = None if training is None else training.batch_size * training.seq_len
    lora = training is not None and training.lora_rank > 0
    recipes: dict[str, str] = {}
    speed: list[str] = []
    reasons: dict[str, str] = {}
    for name in list_recipes():
        recipe = get_recipe(name)
        reason = why_not(suited(recipe, gpu), gpu.capability)
        if reason:
            reasons[name] = reason
        recipes[name] = "" if reason else how_it_runs(recipe, gpu.capability)
        # BF16 is what the others are compared with.
        if recipe.quantized and not reason:
            speed.append(gain(gpu.name, config, name, tokens, lora).text)
    auto, why = best_on(gpu, config, tokens, lora)
    return GpuPlan(
        gpu=gpu,
        recipes=recipes,
        reasons=reasons,
        auto=auto.name,
        why=why,
        memory=memory,
        speed=tuple(speed),
    )
