"""`te-models verify`: does it say what ran, does it notice what did not, and does it leave the model alone?"""

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import te_models.engine.emulated as emulated
from te_models import CausalLM, get_recipe, list_recipes
from te_models.cli import main
from te_models.config.presets import get_preset
from te_models.config.recipe import recipe_from_dict
from te_models.fp8.scaling_state import fp8_state
from te_models.inspect.verify import (
    Verification,
    Verified,
    _calls_in_training,
    sample_config,
    sqnr_db,
    verify,
)

SHAPE = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LINEARS = [
    "self_attn.qkvg_proj",
    "self_attn.o_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
    "lm_head",
]
FLOOR_DB = {
    "E4M3/E5M2": 20,
    "E4M3": 24,
    "E2M1": 12,
}  # 2 to 4 dB below what was measured; E5M2 has two mantissa bits


def small(recipe: str = "delayed", **options: Any) -> CausalLM:
    place = dict(engine="emulated", device="cpu")
    return CausalLM.from_preset("gated-nano", recipe=recipe, **{**SHAPE, **place, **options})


@pytest.mark.parametrize("recipe", list_recipes())
def test_the_report_lists_the_precision_that_ran(recipe: str) -> None:
    model = small(recipe)
    found = verify(model, 2, 64)
    assert [gemm.module for gemm in found.gemms] == LINEARS
    assert not found.failures
    for gemm in found.gemms:
        inside = recipe != "bf16" and gemm.module != "lm_head"
        assert (gemm.in_fp8, gemm.in_bf16) == (
            (1, 2) if inside else (0, 1 if gemm.module == "lm_head" else 3)
        )
        assert gemm.differs == (inside,) * 3
        assert gemm.saved_fp8 == inside
        assert len(gemm.quantizers) == 3 * inside
        if inside:
            assert all(FLOOR_DB[model.recipe.formats] < value < 60 for value in gemm.sqnr_db)
        else:
            assert gemm.sqnr_db == (math.inf,) * 3
    said = str(found)
    assert ("Try --recipe delayed" if recipe == "bf16" else "really ran in 4 of 13 linears") in said
    json.dumps(found.to_dict(), allow_nan=False)


def test_verify_samples_an_fp8_layer() -> None:
    model = small()
    calls = _calls_in_training(model, 2, 32)
    # 0 and 2 are in BF16
    assert calls["mlp.down_proj"].linear is model.layers[1].mlp.down_proj
    assert calls["lm_head"].linear is model.lm_head
    _, (x,), dy = calls["mlp.down_proj"]
    assert (x.shape[1], dy.shape[1]) == (96, 64)


def test_a_router_in_fp32_is_no_gemm_of_the_engine() -> None:
    """Its te.Linear lends only its weight."""
    experts = dict(num_experts=3, num_experts_per_tok=1, moe_intermediate_size=32, router_fp32=True)
    found = verify(small("current", moe=experts), 1, 32)
    assert [gemm.module for gemm in found.gemms] == LINEARS and not found.failures


@pytest.mark.parametrize(
    ("override", "backward"),
    [("none", "FP8"), ("high_precision", "BF16"), ("dequantized", "BF16 of dequantized")],
)
def test_backward_gemms_in_high_precision(override: str, backward: str) -> None:
    found = verify(small("current", backward_override=override), 2, 32)
    for gemm in found.gemms[:4]:
        assert gemm.saved_fp8 == (override != "high_precision")
        assert [found.ran_in(gemm, number) for number in range(3)] == ["FP8", backward, backward]
    assert not found.failures


@pytest.mark.parametrize("end", [0, 1])
def test_the_head_in_fp8(end: int) -> None:
    """Inside the autocast of the layers, or after layers in BF16 in its own."""
    found = verify(small("current", lm_head="fp8", num_layers_at_end_in_bf16=end), 2, 32)
    assert [(gemm.in_fp8, gemm.in_bf16) for gemm in found.gemms] == [(2 - end, 1 + end)] * 4 + [
        (1, 0)
    ]
    assert found.ran(found.gemms[-1])


def test_linears_under_several_recipes_are_listed_apart() -> None:
    table = {
        "*.down_proj": "bf16",
        "layers.1.mlp.gate_up_proj": "nvfp4",
        "layers.2.self_attn.o_proj": "current",
    }
    found = verify(small("delayed", num_layers_at_end_in_bf16=0, precision=table), 2, 64)
    listed = {gemm.module: (gemm.in_fp8, gemm.in_bf16) for gemm in found.gemms}
    assert listed == {
        "self_attn.qkvg_proj": (2, 1),
        "self_attn.o_proj": (1, 1),
        "mlp.gate_up_proj": (1, 1),
        "mlp.down_proj": (0, 3),
        "self_attn.o_proj (E4M3/E5M2 Float8CurrentScaling)": (1, 0),
        "mlp.gate_up_proj (E4M3/E5M2 DelayedScaling)": (1, 0),
        "lm_head": (0, 1),
    }
    ran = {gemm.module: [found.ran_in(gemm, number) for number in range(3)] for gemm in found.gemms}
    assert (
        ran["mlp.gate_up_proj"] == ["FP4"] * 3
        and ran["mlp.gate_up_proj (E4M3/E5M2 DelayedScaling)"] == ["FP8"] * 3
    )
    assert not found.failures and "E4M3/E5M2 and E2M1 really ran in 6 of 13 linears" in str(found)


def test_fp8_that_silently_did_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mistake that people could not see: everything works, in BF16."""
    monkeypatch.setattr(emulated, "autocast", lambda *args, **options: contextlib.nullcontext())
    monkeypatch.setattr(
        emulated.FP8GlobalStateManager, "is_fp8_enabled", lambda: True
    )  # the model's own guard
    with monkeypatch.context() as patch:
        patch.setattr("te_models.model.block.Block.forward", _without_guard)
        found = verify(small(), 2, 32)
    assert found.failures == LINEARS[:4]
    assert "FP8 DID NOT RUN in self_attn.qkvg_proj" in str(found)
    assert found.to_dict()["ok"] is False


def _without_guard(block: Any, x: torch.Tensor, context: Any) -> torch.Tensor:
    x = x + block.self_attn(block.input_layernorm(x), context)
    return x + block.mlp(block.post_attention_layernorm(x), context)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_verify_changes_no_state(mode: str) -> None:
    def losses(look: bool) -> list[float]:
        torch.manual_seed(0)
        model = small("delayed", activation_checkpointing=mode, num_layers_at_end_in_bf16=0)
        ids, found = torch.randint(0, 288, (2, 32)), []
        for _ in range(2):
            loss = model(ids, labels=ids).loss
            loss.backward()
            found.append(loss.item())
            if look:
                before = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
                grads = {
                    name: p.grad.clone()
                    for name, p in model.named_parameters()
                    if p.grad is not None
                }
                model.eval()
                verify(model, 1, 16)
                assert not model.training and model.activation_checkpointing == mode
                model.train()
                assert all(
                    torch.equal(before[name], tensor) for name, tensor in fp8_state(model).items()
                )
                assert all(
                    torch.equal(grads[name], p.grad)
                    for name, p in model.named_parameters()
                    if name in grads
                )
        return found

    assert losses(look=True) == losses(look=False)


@pytest.mark.parametrize(("start", "end", "layers"), [(1, 1, 3), (2, 0, 3), (0, 0, 1)])
def test_a_sample_has_one_layer_of_each_precision(start: int, end: int, layers: int) -> None:
    recipe = get_recipe("delayed", num_layers_at_start_in_bf16=start, num_layers_at_end_in_bf16=end)
    config = sample_config(get_preset("smollm3-3b"), recipe)
    assert config.num_hidden_layers == layers == len(config.no_rope_layers or ())
    whole = dataclasses.replace(config, num_hidden_layers=36, no_rope_layers=(1, 1, 1, 0) * 9)
    assert whole == get_preset("smollm3-3b")
    assert sample_config(config, get_recipe("bf16")).num_hidden_layers == 1


def found_with(rows: int, size: int, milliseconds: dict[str, float] | None = None) -> Verification:
    gemm = Verified("mlp.down_proj", size, size, rows, 18, 2, ("Float8Quantizer",) * 3, True, (True,) * 3, (28.0,) * 3,
                    milliseconds)  # fmt: skip
    device = "cpu" if milliseconds is None else "cuda"
    return Verification(
        get_recipe("delayed"), "emulated" if milliseconds is None else "native", device, (gemm,)
    )


def test_the_verdict_names_the_speedup() -> None:
    """Seed 004: small batches do not. By the measured time where there is one, else by the size."""
    small_batch, large = found_with(2048, 1024), found_with(16384, 4096)
    assert "do not expect FP8 to pay at this size: with 2,048 rows" in str(small_batch)
    assert "a linear takes less than 0.001 ms forward" in str(found_with(64, 64))
    assert "at best 1.56x" in str(large)
    bf16, fp8 = large.gemms[0].h200_seconds()
    assert bf16 == pytest.approx(6 * 16384 * 4096**2 / 720e12)
    assert fp8 == pytest.approx(
        6 * 16384 * 4096**2 / 1250e12 + 4 * (2 * 16384 * 4096 + 4096**2) / 4.15e12
    )
    slow = " ".join(found_with(2048, 1024, dict(bf16=1.0, recipe=1.5)).verdict())
    assert (
        "18.00 ms per step in BF16 and 27.00 ms" in slow
        and "does not pay at this size on this GPU" in slow
    )
    assert "2.00x as fast" in found_with(2048, 1024, dict(bf16=1.0, recipe=0.5)).verdict()[1]
    assert "H200" not in slow
    # A recipe that a saved model brings has no text about its hardware.
    saved = recipe_from_dict(get_recipe("mxfp8").to_dict())
    assert (
        "an H200 does not run MXFP8BlockScaling."
        in dataclasses.replace(large, recipe=saved).verdict()[-1]
    )


@pytest.mark.parametrize(
    "sign",
    [
        dict(saved_fp8=False),
        dict(quantizers=()),
        dict(differs=(True, True, False)),
        dict(differs=(False,) * 3),
    ],
)
def test_any_missing_sign_fails(sign: dict[str, Any]) -> None:
    whole = found_with(64, 64)
    assert not whole.failures
    broken = dataclasses.replace(whole, gemms=(dataclasses.replace(whole.gemms[0], **sign),))
    assert broken.failures == ["mlp.down_proj"]


def test_sqnr_by_hand() -> None:
    assert sqnr_db(torch.ones(4), torch.full((4,), 1.1)) == pytest.approx(20, abs=1e-4)
    assert sqnr_db(torch.ones(4), torch.ones(4)) == math.inf


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in (SHAPE | dict(num_hidden_layers=5)).items()
    ]
    assert (
        main(
            [
                "verify",
                "--preset",
                "gated-nano",
                *flags,
                "--device",
                "cpu",
                "--seq-len",
                "16",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["recipe"]["name"] == "delayed"
    assert [(gemm["in_fp8"], gemm["in_bf16"]) for gemm in found["gemms"]] == [(3, 2)] * 4 + [(0, 1)]
    small("current").save_pretrained(tmp_path / "model")
    assert (
        main(["verify", "--model", str(tmp_path / "model"), "--device", "cpu", "--seq-len", "16"])
        == 0
    )
    assert "recipe current" in capsys.readouterr().out
    assert main(["verify", "--preset", "gated-nano", "--device", "cpu", "--seq-len", "4097"]) == 2
    assert "max_position_embeddings" in capsys.readouterr().err


@pytest.mark.parametrize("words, fp8_params", [([], False), (["--fp8-params"], True)])
def test_the_sample_of_a_preset_has_the_weights_that_are_asked_for(
    words: list[str], fp8_params: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: list[CausalLM] = []

    def noted(model: CausalLM, *others: Any) -> Any:
        samples.append(model)
        return verify(model, *others)

    monkeypatch.setattr("te_models.inspect.verify.verify", noted)
    command = ["verify", "--preset", "gated-nano", "--device", "cpu", "--seq-len", "16", *words]
    assert main([*command, "--batch-size", "1"]) == 0
    assert [model.fp8_params for model in samples] == [fp8_params]


@pytest.mark.gpu
def test_on_a_gpu_times_are_measured() -> None:
    model = CausalLM.from_preset(
        "gated-nano", recipe="delayed", engine="native", num_hidden_layers=3
    )
    found = verify(model, 8, 256)
    assert not found.failures
    for gemm in found.gemms[:4]:
        assert gemm.quantizers == ("Float8Quantizer",) * 3
        assert gemm.milliseconds is not None and min(gemm.milliseconds.values()) > 0
        assert all(20 < value < 60 for value in gemm.sqnr_db)
