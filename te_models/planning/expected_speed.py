"""The speed to expect of a training run, from measured speeds."""

from __future__ import annotations

from dataclasses import dataclass

from te_models.config.gpus import peak_bf16
from te_models.config.measured_speed import MeasuredSpeed, card_name, nearest_speeds, size_of
from te_models.config.model import ModelConfig
from te_models.planning.flops import training_flops

# The distance (MeasuredSpeed.distance, in octaves) beyond which a measurement says nothing about a run.
FARTHEST = 1.0
# The relative difference of the operations per token up to which two shapes of equal width count as the same.
SAME = 1e-3


@dataclass(frozen=True)
class ExpectedSpeed:
    """The expected speed of a run.

    Attributes:
        tokens_per_second: of all GPUs.
        basis: the measurement it comes from, for people.
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
    """Return the speed that was measured for this shape on this GPU, else an estimate from the nearest measurement.

    The estimate assumes that the run reaches the same share of the GPU's peak as the nearest measurement under this
    recipe. None where nothing near was measured.

    Args:
        gpu: the name of the GPU.
        config: the shape of the model.
        recipe: the name of the recipe.
        batch: sequences per micro-batch on one GPU.
        seq_len: tokens per sequence.
        lora: whether only adapters are trained.
        recompute: the mode of activation checkpointing.
        gpus: the number of GPUs that share a batch.
    """
    peak = peak_bf16(gpu)
    rows = nearest_speeds(gpu, config, recipe, batch * seq_len, lora)
    if peak is None or not rows:
        return None
    flops = training_flops(config, seq_len, seq_len) / seq_len
    # No table has the time that GPUs which share a batch spend on communication.
    caveat = f", on {gpus} GPUs without what communication costs" if gpus > 1 else ""
    for row in rows:
        if _is_same(row, config, batch, seq_len, flops) and _part_of(recompute) == row.part:
            return ExpectedSpeed(row.tokens_per_second * gpus, f"measured with {row}{caveat}")
    nearest = rows[0]
    if nearest.distance(size_of(config), batch * seq_len) > FARTHEST:
        return None
    # `flops` and `peak_share` leave recomputed operations out, which take time all the same.
    nearest_recompute = "full" if "recomputed" in nearest.part else "none"
    share = nearest.peak_share * _work(config, nearest.seq_len, nearest_recompute)
    speed = share * peak / (flops * _work(config, seq_len, recompute))
    if nearest.part == "pass":
        caveat = f", without the optimizer's part{caveat}"
    return ExpectedSpeed(
        speed * gpus,
        f"expected from {100 * share:.0f} % of {card_name(gpu)}'s peak in {nearest}{caveat}",
    )


def _part_of(recompute: str | int) -> str:
    """Return the `part` of the rows with a mode of activation checkpointing; "" for modes that no row has."""
    return {"none": "step", "full": "recomputed step"}.get(str(recompute), "")


def _is_same(
    row: MeasuredSpeed, config: ModelConfig, batch: int, seq_len: int, flops: float
) -> bool:
    """Return whether a row was measured at this size and with as many operations per token, so at this shape."""
    if (row.batch, row.seq_len, row.size) != (batch, seq_len, size_of(config)):
        return False
    return abs(row.flops_per_token / flops - 1) < SAME


def _work(config: ModelConfig, seq_len: int, recompute: str | int) -> float:
    """Return the operations of a step with its recomputation, relative to a step without any.

    A recompute repeats the forward pass of a block, which is a third of its operations.
    """
    if recompute == "full":
        return 4 / 3
    # A number n recomputes every n-th block.
    if isinstance(recompute, int):
        return 1 + 1 / (3 * recompute)
    if recompute == "none":
        return 1.0
    # "selective" recomputes the MLPs only.
    mlp_flops = 0.0
    all_flops = 0.0
    for layer in config.layers:
        for part in layer.parts:
            flops = part.linear_flops(seq_len)
            all_flops += flops
            if part is layer.mlp:
                mlp_flops += flops
    return 1 + mlp_flops / all_flops / 3
