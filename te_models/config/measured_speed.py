"""Speeds of training that were measured: a table over GPU, width and tokens, which `auto`, `plan` and runs read.

The rows are in te_models/measurements/speed.json, which `python -m benchmarks.speed_map` makes. No torch.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from te_models.config.gpus import GPUS, get_gpu
from te_models.config.model import ModelConfig
from te_models.errors import UsageError

FILE = Path(__file__).parents[1] / "measurements" / "speed.json"
NEAR = 1.25  # factor up to which a width counts as measured
NEAR_TOKENS = 4.0  # the same for tokens per step
# Octaves of width that a model with other mixers is away: attention takes another part of a step than a recurrence.
OTHER_MIXERS = 0.5
# A recipe pays where it is faster than this: ratios of two runs vary by about a percent.
PAYS = 1.01
# The same ratio on two cards with one chip, an H100 and an H200, differed by up to 4 %: between this and its inverse a
# figure from the other card decides nothing.
PAYS_ELSEWHERE = 1.05


class Size(NamedTuple):
    """The facts about a model by which its measured speed is found.

    Attributes:
        width: hidden_size.
        expert_width: intermediate size of its experts; 0: it has none.
        recurrent: whether it has layers that keep a state in place of keys and values (linear attention, Mamba 2).
    """

    width: int
    expert_width: int
    recurrent: bool


@dataclass(frozen=True)
class MeasuredSpeed:
    """The speed of one shape under one recipe on one GPU.

    Attributes:
        gpu: a name of te_models.config.gpus.
        shape: its name, for people.
        width, expert_width, recurrent: its Size.
        batch: sequences per micro-batch and GPU.
        seq_len: tokens of each.
        recipe: its name.
        lora: whether only adapters are trained.
        part: "step", "recomputed step" (blocks are computed again in backward), or "pass", forward and backward alone.
        tokens_per_second: of one GPU.
        flops_per_token: te_models.planning.flops.training_flops of a token.
        peak_share: tokens_per_second * flops_per_token, relative to the GPU's peak of dense BF16 products.
        over_bf16: the speed relative to BF16, measured beside it; None: BF16 was not measured there.
        source: the file of benchmarks/results with the measurement.
        date: its day, YYYY-MM-DD.
    """

    gpu: str
    shape: str
    width: int
    expert_width: int
    recurrent: bool
    batch: int
    seq_len: int
    recipe: str
    lora: bool
    part: str
    tokens_per_second: float
    flops_per_token: float
    peak_share: float
    over_bf16: float | None
    source: str
    date: str

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch * self.seq_len

    @property
    def size(self) -> Size:
        """The size of the model."""
        return Size(self.width, self.expert_width, self.recurrent)

    def __str__(self) -> str:
        size = f"hidden size {self.width}"
        if self.expert_width:
            size += f", experts of {self.expert_width}"
        adapters = ", LoRA" if self.lora else ""
        return f"{self.shape} ({size}{adapters}, {self.batch} x {self.seq_len:,} tokens, {self.gpu}, {self.date})"

    def distance(self, size: Size, tokens: int | None) -> float:
        """Return how far a size is from the measured one, in octaves; tokens count a quarter."""
        octaves = abs(math.log2(self.width / size.width))
        if size.expert_width:
            octaves += abs(math.log2(self.expert_width / size.expert_width))
        if self.recurrent != size.recurrent:
            octaves += OTHER_MIXERS
        if tokens:
            octaves += abs(math.log2(self.tokens / tokens)) / 4
        return octaves

    def is_near(self, size: Size, tokens: int | None) -> bool:
        """Return whether a size counts as measured by it."""
        pairs = [(self.width, size.width, NEAR)]
        if size.expert_width:
            pairs.append((self.expert_width, size.expert_width, NEAR))
        if tokens:
            pairs.append((self.tokens, tokens, NEAR_TOKENS))
        # The larger by the smaller, since a factor counts alike in both directions.
        return all(max(a / b, b / a) <= most for a, b, most in pairs)


@functools.cache
def measured_speeds() -> tuple[MeasuredSpeed, ...]:
    """Return all rows of the table."""
    rows = json.loads(FILE.read_text())["rows"]
    return tuple(MeasuredSpeed(**row) for row in rows)


def card_name(gpu: str) -> str:
    """Return the name of a GPU in te_models.config.gpus, or `gpu` itself if none is known."""
    try:
        return get_gpu(gpu).name
    except UsageError:
        return gpu


def size_of(config: ModelConfig) -> Size:
    """Return the size of a model."""
    experts = 0 if config.moe is None else config.moe.moe_intermediate_size
    mixers = (mixer for layer in config.layers for mixer in layer.mixers)
    recurrent = any(mixer.keeps != "keys and values" for mixer in mixers)
    return Size(config.hidden_size, experts, recurrent)


def nearest_speeds(
    gpu: str, config: ModelConfig, recipe: str, tokens: int | None = None, lora: bool = False
) -> list[MeasuredSpeed]:
    """Return the rows of this card, recipe and kind of model (with experts or without), the nearest first."""
    size = size_of(config)
    rows = []
    for row in measured_speeds():
        same = row.gpu == card_name(gpu) and row.recipe == recipe and row.lora == lora
        # A model with experts says nothing about one without: its GEMMs have other sizes.
        if same and bool(row.expert_width) == bool(size.expert_width):
            rows.append(row)
    # Among equally near rows the one with the most tokens first: a run of unknown size probably fills its GPU.
    return sorted(rows, key=lambda row: (row.distance(size, tokens), -row.tokens))


@dataclass(frozen=True)
class Gain:
    """An answer to whether a recipe saves time, from measured speeds.

    Attributes:
        pays: whether it does; None where nothing was measured near.
        text: the figure that decides, for people.
    """

    pays: bool | None
    text: str


def gain(
    gpu: str, config: ModelConfig, recipe: str, tokens: int | None = None, lora: bool = False
) -> Gain:
    """Return whether a quantized recipe saves time for a model on a GPU, by what was measured near its sizes.

    Where nothing was measured on this card, one with the same chip answers if its answer is clear: an H100 for a GH200.

    Args:
        gpu: its name.
        config: the shape.
        recipe: the recipe's name.
        tokens: of a micro-batch on one GPU; None: any number.
        lora: whether only adapters are trained.
    """
    card = card_name(gpu)
    rows = [
        row
        for row in nearest_speeds(card, config, recipe, tokens, lora)
        if row.over_bf16 is not None
    ]
    size = size_of(config)
    # Ordered by distance: the first row that is near enough decides.
    for row in rows:
        if row.is_near(size, tokens):
            assert row.over_bf16 is not None
            pays = row.over_bf16 > PAYS
            return Gain(pays, f"{recipe} has {row.over_bf16:.2f} of BF16's speed in {row}")
    for row in _on_cards_with_the_chip(card, config, recipe, tokens, lora):
        if row.is_near(size, tokens):
            assert row.over_bf16 is not None
            text = f"{recipe} has {row.over_bf16:.2f} of BF16's speed in {row}"
            clear = row.over_bf16 > PAYS_ELSEWHERE or row.over_bf16 < 1 / PAYS_ELSEWHERE
            pays = row.over_bf16 > 1 if clear else None
            return Gain(pays, f"{text}; {card} has the chip of {row.gpu}")
    reason = f"{recipe} on {card} is not measured near this size"
    if not rows:
        return Gain(None, f"{recipe} on {card} is not measured for models of this kind")
    nearest = rows[0]
    return Gain(None, f"{reason}; nearest: {nearest.over_bf16:.2f} of BF16's speed in {nearest}")


def _on_cards_with_the_chip(
    card: str, config: ModelConfig, recipe: str, tokens: int | None, lora: bool
) -> list[MeasuredSpeed]:
    """Return what `nearest_speeds` has of other cards with the chip of `card`, of rows with a ratio to BF16."""
    try:
        gpu = get_gpu(card)
    except UsageError:  # a card without a description
        return []
    rows = []
    for other in GPUS:
        if other.has_chip_of(gpu):
            rows += nearest_speeds(other.name, config, recipe, tokens, lora)
    return [row for row in rows if row.over_bf16 is not None]
