"""The speed that a training run can be expected to have, from speeds that were measured."""

from __future__ import annotations

from dataclasses import dataclass

from te_models.config.gpus import peak_bf16
from te_models.config.measured_speed import MeasuredSpeed, card_name, like, sizes_of
from te_models.config.model import ModelConfig
from te_models.planning.flops import training_flops

# Octaves of width, width of experts and (a quarter of) tokens beyond which a measurement says nothing of a run.
FARTHEST = 1.0
SAME = 1e-3  # relative difference of the operations per token of one shape


@dataclass(frozen=True)
class ExpectedSpeed:
    """The expected speed of a run.

    Attributes:
        tokens_per_second: of all GPUs.
        basis: what it follows from, in words.
    """

    tokens_per_second: float
    basis: str


def expected_speed(
    gpu: str,
    config: ModelConfig,
    recipe: str,
    batch: int,
    seq_len: int,
    *,
    lora: bool = False,
    recompute: str | int = "none",
    gpus: int = 1,
) -> ExpectedSpeed | None:
    """Return the speed that was measured for this shape on this GPU, else one that follows from the nearest.

    The nearest measurement of this recipe has reached a share of the GPU's peak, at which this shape's operations take
    their time. None where nothing is measured near.

    Args:
        gpu: its name.
        config: the shape.
        recipe: the recipe's name.
        batch: sequences of a micro-batch on one GPU.
        seq_len: tokens of each.
        lora: whether only adapters are trained.
        recompute: the mode of activation checkpointing.
        gpus: that share a batch.
    """
    peak = peak_bf16(gpu)
    rows = like(gpu, config, recipe, batch * seq_len, lora)
    if peak is None or not rows:
        return None
    flops = training_flops(config, seq_len, seq_len) / seq_len
    # Pairs of GPUs that share a batch also communicate, which costs a part that no table has.
    several = f", on {gpus} GPUs without what communication costs" if gpus > 1 else ""
    for row in rows:
        if _is_same(row, config, batch, seq_len, flops) and _part_of(recompute) == row.part:
            return ExpectedSpeed(row.tokens_per_second * gpus, f"measured with {row}{several}")
    row = rows[0]
    if row.distance(*sizes_of(config), batch * seq_len) > FARTHEST:
        return None
    # Recomputed operations are work that the share of the peak does not count.
    share = row.peak_share * _work(
        config, row.seq_len, "full" if "recomputed" in row.part else "none"
    )
    speed = share * peak / (flops * _work(config, seq_len, recompute))
    without = ", without the optimizer's part" if row.part == "pass" else ""
    return ExpectedSpeed(
        speed * gpus,
        f"expected from {100 * share:.0f} % of {card_name(gpu)}'s peak in {row}{without}{several}",
    )


def _part_of(recompute: str | int) -> str:
    """Return the `part` of a row under a mode of activation checkpointing; of modes that no row has, none."""
    return {"none": "step", "full": "recomputed step"}.get(str(recompute), "")


def _is_same(
    row: MeasuredSpeed, config: ModelConfig, batch: int, seq_len: int, flops: float
) -> bool:
    """Return whether a row is of this shape and size: of as many operations per token."""
    size = (row.batch, row.seq_len, row.width, row.expert_width)
    if size != (batch, seq_len, *sizes_of(config)):
        return False
    return abs(row.flops_per_token / flops - 1) < SAME


def _work(config: ModelConfig, seq_len: int, recompute: str | int) -> float:
    """Return how many operations a step has for each that counts: a recompute repeats a third of a block's."""
    if recompute == "full":
        return 4 / 3
    if isinstance(recompute, int):
        return 1 + 1 / (3 * recompute)
    if recompute == "none":
        return 1.0
    # "selective" repeats MLPs.
    mlps = 0.0
    every = 0.0
    for layer in config.layers:
        for part in layer.parts:
            flops = part.linear_flops(seq_len)
            every += flops
            mlps += flops if part is layer.mlp else 0.0
    return 1 + mlps / every / 3
