"""The expected speed of a run: what was measured for its shape, else what follows from the nearest measurement."""

from typing import Any

import pytest

from te_models import CausalLM
from te_models.config.gpus import peak_bf16
from te_models.config.measured_speed import gain, measured_speeds
from te_models.config.presets import get_preset
from te_models.config.training import TrainConfig
from te_models.planning.expected_speed import expected_speed
from te_models.planning.flops import training_flops
from te_models.training.report import expected_line

H200 = "NVIDIA H200"


def test_a_measured_shape_has_its_own_speed() -> None:
    for row in measured_speeds():
        if row.part == "step":
            found = expected_speed(
                row.gpu, get_preset(row.shape), row.recipe, row.batch, row.seq_len, lora=row.lora
            )
            assert found is not None and found.tokens_per_second == row.tokens_per_second
            assert found.basis.startswith("measured with") and row.date in found.basis


def test_another_shape_takes_the_share_of_the_peak() -> None:
    """By hand: a deeper gated-124m at the share that gated-124m reached."""
    config = get_preset("gated-124m", num_hidden_layers=24)
    (row,) = (r for r in measured_speeds() if (r.shape, r.recipe) == ("gated-124m", "delayed"))
    share = training_flops(get_preset("gated-124m"), 1024, 1024) / 1024
    share *= row.tokens_per_second / peak_bf16(H200)  # type: ignore[operator]
    flops = training_flops(config, 1024, 1024) / 1024
    found = expected_speed(H200, config, "delayed", 32, 1024)
    assert found is not None and found.basis.startswith("expected from 38 % of H200's peak")
    assert found.tokens_per_second == pytest.approx(share * peak_bf16(H200) / flops, rel=1e-3)  # type: ignore[operator]
    full = expected_speed(H200, config, "delayed", 32, 1024, recompute="full")
    assert full is not None
    assert full.tokens_per_second == pytest.approx(found.tokens_per_second * 3 / 4)
    every_second = expected_speed(H200, config, "delayed", 32, 1024, recompute=2)
    selective = expected_speed(H200, config, "delayed", 32, 1024, recompute="selective")
    assert every_second is not None and selective is not None
    assert full.tokens_per_second < every_second.tokens_per_second < found.tokens_per_second
    assert full.tokens_per_second < selective.tokens_per_second < found.tokens_per_second
    two = expected_speed(H200, config, "delayed", 32, 1024, gpus=2)
    assert two is not None and "without what communication costs" in two.basis
    assert two.tokens_per_second == 2 * found.tokens_per_second


@pytest.mark.parametrize(
    ("gpu", "preset", "recipe", "lora"),
    [
        ("RTX 4090", "gated-1b", "current", False),
        (H200, "gated-nano", "current", False),
        (H200, "gated-1b", "mxfp8", False),
        ("some card", "gated-1b", "current", False),
        ("H100", "gated-nano", "current", True),
    ],
)
def test_nothing_near_has_no_speed(gpu: str, preset: str, recipe: str, lora: bool) -> None:
    assert expected_speed(gpu, get_preset(preset), recipe, 8, 256, lora=lora) is None


def line(preset: str, gpu: str | None, shares: int = 1, start: int = 0, **settings: Any) -> str:
    model = CausalLM.from_preset(preset, device="meta", engine="emulated", recipe="delayed")
    return expected_line(model, TrainConfig(**settings), start, "delayed", shares, gpu)


def test_the_line_of_a_run() -> None:
    size: dict[str, Any] = dict(batch_size=32, seq_len=1024)
    text = line("gated-124m", H200, steps=10000, **size)
    # 10,000 steps of 32,768 tokens at 467,121 tokens/s: 701 s
    assert text.startswith(
        "about 470,000 tokens/s, 12 min without evaluations; measured with gated-124m"
    )
    half = line("gated-124m", H200, steps=10000, start=5000, **size)
    assert "tokens/s, 6 min" in half or "tokens/s, 5.8 min" in half
    several = line("gated-124m", H200, shares=2, steps=10000, batch_size=64, seq_len=1024)
    assert several.startswith("about 930,000 tokens/s, 12 min")
    nothing = line("gated-nano", H200, steps=100)
    assert (
        nothing
        == f"nothing is measured near this size under delayed on {H200}; estimated after step 10"
    )
    cpu = line("gated-nano", None, steps=100, start=20)
    assert cpu.endswith("estimated after step 30") and "no figure for the emulated engine" in cpu
    assert line("gated-nano", None, steps=5).endswith("too few steps to estimate")


@pytest.mark.parametrize(
    ("recipe", "tokens", "ratio", "pays"),
    [
        ("delayed", 32768, "1.18", True),
        ("current", 512, "0.78", False),
        ("blockwise", 32768, "1.01", None),
    ],
)
def test_a_card_with_the_same_chip_answers_where_its_answer_is_clear(
    recipe: str, tokens: int, ratio: str, pays: bool | None
) -> None:
    """No GH200 has measured anything; a ratio near 1 on an H100 may be on the other side of it there."""
    found = gain("GH200", get_preset("gated-350m"), recipe, tokens)
    assert found.pays is pays
    assert f"{recipe} has {ratio} of BF16's speed in 4 layers" in found.text
    assert "GH200 has the chip of H100" in found.text


def test_other_chips_answer_for_no_card() -> None:
    wide = get_preset("gated-350m")
    for card in ("H100 PCIe", "B200", "RTX 5090", "some card"):
        assert gain(card, wide, "delayed", 32768).pays is None
    # What was measured on the card itself comes first.
    own = gain("H100", get_preset("gated-1b"), "delayed", 16384)
    assert own.pays is True and "chip" not in own.text
