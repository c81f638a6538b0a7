"""How much of a tuning is left in an export, and the rounding that loses none of it on average."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer import every
from tiny_runs import tiny_model
from torch import Tensor

from te_models import CausalLM, ModelConfig
from te_models.cli import main
from te_models.errors import UsageError
from te_models.interop.quantized import E4M3
from te_models.numerics.nvfp4 import unpack
from te_models.serving.formats import FORMATS, WeightOptions, encode_blocks
from te_models.serving.parity import parity
from te_models.serving.rounding import round_stochastically, scales_of, to_bfloat16

QUANTIZED = [name for name, format in FORMATS.items() if format.storage is not None]
NEEDS_DATA = ("fp8-tensor", "nvfp4")
E4M3_NUMBERS = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
E2M1_NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=256, intermediate_size=384, num_hidden_layers=3,
    num_attention_heads=2, num_key_value_heads=1, head_dim=128, attention_gate="none",
)  # fmt: skip
IDS = torch.arange(4 * 16).reshape(4, 16) % 89
BATCHES = [{"input_ids": IDS, "labels": IDS}]


def build(recipe: str, dtype: torch.dtype = torch.bfloat16, **fields: int) -> CausalLM:
    torch.manual_seed(1)
    config = ModelConfig(**{**SIZES, **fields})
    return CausalLM(config, recipe=recipe, device="cpu", dtype=dtype).eval()


def tuned_from(base: CausalLM, size: float, seed: int = 3) -> CausalLM:
    """The model with every weight of its blocks changed by a share `size` of its own spread."""
    torch.manual_seed(seed)
    tuned = CausalLM(base.config, recipe="delayed", device="cpu", dtype=torch.float32)
    tuned.load_state_dict(base.state_dict(), strict=False)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if name.startswith("layers.") and parameter.dim() == 2:
                parameter += size * parameter.std() * torch.randn_like(parameter)
    return tuned.eval()


def export(model: CausalLM, folder: Path, format: str, **options: Any) -> Any:
    data = BATCHES[0]["input_ids"] if format in NEEDS_DATA else None
    return model.export(folder, format=format, calibration=data, **options)


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The values of the linears of the middle layer, as te_models reads the folder, in FP64."""
    model = CausalLM.from_pretrained(folder, device="cpu", recipe="bf16", dtype=torch.float32)
    found = model.state_dict()
    return {
        name: value.double()
        for name, value in found.items()
        if name.startswith("layers.1.") and value.dim() == 2
    }


@pytest.mark.parametrize("format", every(2, QUANTIZED))
def test_the_share_is_that_of_the_values_in_the_two_folders(format: str, tmp_path: Path) -> None:
    base = build("delayed", dtype=torch.float32)
    tuned = tuned_from(base, 0.05)
    result = export(tuned, tmp_path / "tuned", format, base=base)
    export(base, tmp_path / "base", format)
    after, before = weights_in(tmp_path / "tuned"), weights_in(tmp_path / "base")
    along = size = 0.0
    for name, left in after.items():
        change = tuned.state_dict()[name].double() - base.state_dict()[name].double()
        along += ((left - before[name]) * change).sum().item()
        size += change.square().sum().item()
    assert result.survival.share == pytest.approx(along / size, rel=1e-5)
    assert 0.5 < result.survival.share < 1.5
    assert {change.name for change in result.survival.changes} == set(result.quantized)


@pytest.mark.parametrize("format", every(2, QUANTIZED[1:] + QUANTIZED[:1]))
def test_a_small_change_of_a_base_in_that_format_is_lost_by_nearest_alone(
    format: str, tmp_path: Path
) -> None:
    export(build("bf16", dtype=torch.float32), tmp_path / "base", format)
    base = CausalLM.from_pretrained(tmp_path / "base", device="cpu", dtype=torch.float32)
    tuned = CausalLM.from_pretrained(tmp_path / "base", device="cpu", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if name.startswith("layers.1.") and parameter.dim() == 2:
                # Less than half the distance to the next number; rows, blocks and tensors keep their largest.
                factors = 1 - 0.004 * torch.rand(parameter.shape, generator=generator)
                blocks = parameter.abs().unflatten(1, (-1, 16))
                largest = blocks == blocks.amax(-1, keepdim=True)
                parameter *= torch.where(largest.flatten(1), 1.0, factors)
    lost = export(tuned, tmp_path / "nearest", format, base=base)
    kept = export(tuned, tmp_path / "stochastic", format, base=base, rounding="stochastic")
    assert lost.survival.changes and kept.survival.changes
    assert kept.survival.share == pytest.approx(1, abs=0.1)
    assert lost.survival.share == pytest.approx(0, abs=0.02)
    assert "stochastic" in " ".join(lost.survival.lines("nearest"))
    assert "stochastic" not in " ".join(kept.survival.lines("stochastic"))


@pytest.mark.parametrize("format", every(2, QUANTIZED))
def test_stochastic_rounding_takes_a_neighbor_and_keeps_the_mean(format: str) -> None:
    storage = FORMATS[format].storage
    assert storage is not None
    torch.manual_seed(0)
    weight = torch.randn(128, 256) * torch.exp2(torch.randint(-6, 3, (128, 1)).float())
    encode = FORMATS[format].encode or encode_blocks
    parts = encode(weight, WeightOptions())
    rows, columns = weight.shape
    steps = storage.steps((rows, columns))
    divisors = scales_of(storage, parts).reshape(storage.grid((rows, columns)))
    divisors = divisors.repeat_interleave(steps[0], 0)[:rows].repeat_interleave(steps[1], 1)
    values = weight / divisors[:, :columns]
    numbers = E2M1_NUMBERS if storage.packed else E4M3_NUMBERS
    values = values.clamp(-numbers[-1], numbers[-1])
    size = values.abs()
    above = torch.searchsorted(numbers, size.contiguous()).clamp(max=len(numbers) - 1)
    upper = numbers[above]
    lower = torch.where(upper == size, size, numbers[(above - 1).clamp(min=0)])
    generator = torch.Generator().manual_seed(1)
    draws = 200
    total = torch.zeros_like(weight)
    for _ in range(draws):
        data = round_stochastically(storage, weight, parts, generator)[storage.data]
        rounded = unpack(data) if storage.packed else data.float()
        magnitude = rounded.abs()
        assert ((magnitude == lower) | (magnitude == upper)).all()
        assert (rounded * values >= 0).all()
        total += rounded
    spread = (upper - lower) / 2 / draws**0.5
    assert ((total / draws - values).abs() <= 6 * spread + 1e-6).all()


def test_an_export_rounded_at_random_is_the_same_again(tmp_path: Path) -> None:
    model = build("delayed")
    for name in ("one", "two"):
        export(model, tmp_path / name, "fp8-block", rounding="stochastic")
    export(model, tmp_path / "nearest", "fp8-block")
    files = [
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "nearest")
    ]
    assert files[0] == files[1] != files[2]


def test_parity_says_how_much_is_left() -> None:
    base = build("delayed", dtype=torch.float32)
    tuned = tuned_from(base, 0.05)
    result = parity(tuned, tuned.origin, ["fp8-block", "nvfp4", "bf16"], BATCHES, base=base)
    blocks, four_bits, plain = result.rows
    assert blocks.survives is not None and four_bits.survives is not None
    assert abs(blocks.survives - 1) < abs(four_bits.survives - 1) + 0.05
    assert plain.survives == pytest.approx(1, abs=0.01)
    assert "tuning" in str(result) and blocks.least is not None and blocks.least[0] in str(result)
    assert "tuning" not in str(parity(tuned, tuned.origin, "fp8-block", BATCHES))


def test_bf16_keeps_all_of_a_tuning_in_bf16(tmp_path: Path) -> None:
    base = build("bf16")
    tuned = build("bf16")
    tuned.load_state_dict(tuned_from(base, 0.05).state_dict(), strict=False)
    result = export(tuned, tmp_path / "out", "bf16", base=base)
    assert result.survival.lines("nearest") == [
        f"all of the tuning's change of {len(result.survival.changes)} weights survives"
    ]
    assert {change.share for change in result.survival.changes} == {1.0}
    untouched = export(base, tmp_path / "base", "bf16", base=base)
    assert untouched.survival.lines("nearest") == [
        "no weight that the format rounds differs from the base's"
    ]


def test_bf16_loses_a_small_change_of_weights_in_fp32_by_nearest_alone(tmp_path: Path) -> None:
    """A base of BF16's numbers, tuned in FP32 by less than half the distance to the next one."""
    base = build("bf16", dtype=torch.float32)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(parameter.bfloat16())
    tuned = build("bf16", dtype=torch.float32)
    tuned.load_state_dict(base.state_dict())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.dim() == 2:
                parameter *= 1 + 0.001 * torch.rand(parameter.shape, generator=generator)
    lost = export(tuned, tmp_path / "nearest", "bf16", base=base)
    kept = export(tuned, tmp_path / "random", "bf16", base=base, rounding="stochastic")
    names = {change.name for change in lost.survival.changes}
    assert {"model.embed_tokens", "model.layers.0.self_attn.q_proj"} <= names
    assert lost.survival.share == 0
    assert kept.survival.share == pytest.approx(1, abs=0.05)
    assert "stochastic" in " ".join(lost.survival.lines("nearest"))


def test_stochastic_rounding_to_bf16_takes_a_neighbor_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    values = torch.randn(64, 64) * torch.exp2(torch.randint(-100, 100, (64, 1)).float())
    toward_zero = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    away = ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    generator = torch.Generator().manual_seed(1)
    draws = 400
    total = torch.zeros_like(values, dtype=torch.float64)
    for _ in range(draws):
        rounded = to_bfloat16(values, "stochastic", generator).float()
        assert ((rounded == toward_zero) | (rounded == away)).all()
        total += rounded.double()
    distance = (away.double() - toward_zero.double()).abs()
    assert ((total / draws - values.double()).abs() <= 6 * distance / 2 / draws**0.5).all()
    special = torch.tensor([0.0, float("inf"), -float("inf"), torch.finfo(torch.float32).max, 1.5])
    expected = special.bfloat16()
    assert torch.equal(to_bfloat16(special, "stochastic", generator), expected)
    assert to_bfloat16(torch.tensor([float("nan")]), "stochastic", generator).isnan().all()


def test_a_base_of_other_sizes_is_refused(tmp_path: Path) -> None:
    other = build("bf16", dtype=torch.float32, intermediate_size=256)
    for format in ("fp8-block", "bf16"):
        with pytest.raises(UsageError, match="base model has no .*: give the model that was tuned"):
            export(build("bf16", dtype=torch.float32), tmp_path / "out", format, base=other)
        assert not (tmp_path / "out").exists()


def test_a_run_knows_what_it_was_tuned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / f"texts/{number}.txt").write_text(f"{number} green bottles " * 40)
    words = ["finetune", "--model", str(tmp_path / "base"), "--data", str(tmp_path / "texts")]
    words += ["--steps", "1", "--seq-len", "16", "--batch-size", "1", "--eval-batches", "1"]
    words += ["--sample-tokens", "0", "--learning-rate", "1e-2", "--device", "cpu"]
    for name, more in (("full", []), ("lora", ["--lora", "2"])):
        run = str(tmp_path / name)
        assert main([*words, *more, "--out", run]) == 0
        capsys.readouterr()
        common = ["--model", run, "--device", "cpu"]
        out = ["--out", str(tmp_path / f"{name}-export"), "--format", "fp8-channel"]
        assert main(["export", *common, *out]) == 0
        assert "of the tuning's change of" in capsys.readouterr().out
    assert main(["export", *common, *out, "--overwrite", "--base", "none"]) == 0
    assert "tuning" not in capsys.readouterr().out
    compare = ["parity", *common, "--export", "fp8-channel", "--data", str(tmp_path / "texts")]
    compare += ["--seq-len", "16", "--batches", "1", "--json"]
    assert main(compare) == 0
    row = json.loads(capsys.readouterr().out)["exports"][0]
    assert row["survives"] is not None and 0 <= row["kl"] < 1
