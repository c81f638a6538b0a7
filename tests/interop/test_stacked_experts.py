"""gpt-oss as OpenAI publishes it, with experts in MXFP4, and stacks that are damaged; transformers is the judge."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DEFAULT, SIZES
from hf_models import load, randomize
from judge import AutoModelForCausalLM, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from te_models import CausalLM, add_lora
from te_models.errors import CheckpointError, UsageError
from te_models.saving.pretrained import read_shape
from te_models.serving.export import default_format

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
SHAPE: dict[str, Any] = SIZES | dict(
    hidden_size=64, intermediate_size=32, num_hidden_layers=2, sliding_window=5
)
SHAPE |= dict(num_local_experts=3, num_experts_per_tok=2, rope_parameters=DEFAULT)
STACKS = [
    f"model.layers.{layer}.mlp.experts.{name}_proj"
    for layer in range(2)
    for name in ("gate_up", "down")
]


def publish(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Save transformers' model as gpt-oss is published: MXFP4, no dtype in config.json, scales in a file of their own.

    Return the model with the values that transformers dequantizes, and all tensors of the folder.
    """
    torch.manual_seed(1)
    judge = AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("gpt_oss", **SHAPE)
    ).eval()
    randomize(judge)
    tensors = {name: tensor.bfloat16() for name, tensor in judge.state_dict().items()}
    for name in STACKS:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8
        )
    values = {
        name: t.float() for name, t in tensors.items() if not name.endswith(("_blocks", "_scales"))
    }
    for name in STACKS:
        parts = (tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        values[name] = mxfp4.convert_moe_packed_tensors(*parts, dtype=torch.bfloat16).float()
    judge.load_state_dict(values)
    write(folder, tensors, judge.config.to_dict())
    return judge, tensors


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    files = {
        name: f"model-0000{1 + name.endswith('_scales')}-of-00002.safetensors" for name in tensors
    }
    for file in set(files.values()):
        save_file({name: t for name, t in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(dict(metadata={}, weight_map=files))
    )
    skipped = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    quantized = dict(quant_method="mxfp4", modules_to_not_convert=skipped)
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    config |= dict(quantization_config=quantized, initial_context_length=4096, experts_per_token=2)
    (folder / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def test_mxfp4_is_read_as_transformers_dequantizes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge, _ = publish(tmp_path / "published")
    model = load(tmp_path / "published", dtype=torch.float32)
    assert "its experts are MXFP4" in caplog.text
    ids = torch.randint(1, SHAPE["vocab_size"], (2, 13))
    torch.testing.assert_close(model(ids).logits, judge(ids).logits, atol=1e-4, rtol=0)
    model = CausalLM.from_pretrained(tmp_path / "published", device="cpu", recipe="bf16")
    assert model.dtype == read_shape(tmp_path / "published").dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "back", format="hf")
    saved, config = (
        load_file(tmp_path / "back" / "model.safetensors"),
        tmp_path / "back" / "config.json",
    )
    assert "quantization_config" not in json.loads(config.read_text())
    expected = judge.state_dict()
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor.float(), expected[name]), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    torch.testing.assert_close(again(ids).logits, judge(ids).logits)


def test_every_byte_of_mxfp4(tmp_path: Path) -> None:
    """All pairs of E2M1 under scales from the smallest that BF16 holds to the largest without infinity."""
    _, tensors = publish(tmp_path)
    name = STACKS[0]
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    blocks[0, :16, 0] = torch.arange(256).view(16, 16).to(torch.uint8)
    blocks[1, :16, 0] = blocks[0, :16, 0]
    scales[0, :16, 0], scales[1, :16, 0] = 252, 3
    write(tmp_path, tensors, transformers.AutoConfig.for_model("gpt_oss", **SHAPE).to_dict())
    model = load(tmp_path, dtype=torch.bfloat16)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    for expert in range(3):
        ours = model.get_parameter(f"layers.0.mlp.gate_up_proj.weight{expert}")
        gate, up = expected[expert].T[0::2], expected[expert].T[1::2]
        assert torch.equal(ours.view(torch.int16), torch.cat((gate, up)).view(torch.int16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{STACKS[0]}_scales"), "it lacks .*gate_up_proj_scales"),
        (
            lambda t: t.update({f"{STACKS[1]}_scales": t[f"{STACKS[1]}_scales"][:2].clone()}),
            "MXFP4 has two values",
        ),
        (
            lambda t: t.update({f"{STACKS[1]}_blocks": t[f"{STACKS[1]}_blocks"].int()}),
            "MXFP4 has two values",
        ),
        (lambda t: t.update({f"{STACKS[2]}_bias": torch.zeros(32)}), "missing"),
        (lambda t: t.pop(f"{STACKS[3]}_blocks"), "missing"),
        (lambda t: t[f"{STACKS[0]}_scales"].fill_(255), "NaN"),
        (
            lambda t: t.update(
                {name: tensor[:2].clone() for name, tensor in t.items() if "experts" in name}
            ),
            "missing",
        ),
    ],
)
def test_a_damaged_stack_is_one_line(change: Any, message: str, tmp_path: Path) -> None:
    _, tensors = publish(tmp_path)
    change(tensors)
    write(tmp_path, tensors, transformers.AutoConfig.for_model("gpt_oss", **SHAPE).to_dict())
    with pytest.raises(CheckpointError, match=message) as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def test_an_export_keeps_experts_in_bf16_or_is_refused(tmp_path: Path) -> None:
    publish(tmp_path / "published")
    model = CausalLM.from_pretrained(tmp_path / "published", device="cpu", recipe="bf16")
    random = CausalLM(
        model.config, device="cpu", recipe="bf16"
    )  # as a preset: no folder says its family
    assert default_format(model, model.origin) == default_format(random, random.origin) == "bf16"
    # As a run with --lora sees it, when it says what to do next.
    adapted = CausalLM.from_pretrained(tmp_path / "published", device="cpu", recipe="bf16")
    add_lora(adapted, r=2, target_modules=["all-linear", "experts"])
    assert default_format(adapted, adapted.origin) == "bf16"
    ungated = dict(attention_gate="none", qk_norm=True, device="cpu", recipe="bf16")
    apart = CausalLM.from_preset("gated-nano", moe=EXPERTS, **ungated)  # a tensor per expert
    assert default_format(apart, apart.origin).startswith("fp8")
    model.export(tmp_path / "bf16", "bf16")
    saved = load_file(tmp_path / "bf16" / "model.safetensors")
    assert saved[STACKS[0]].shape == (3, 64, 64)
    model.set_recipe("current", num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    with pytest.raises(UsageError, match=r"experts.* would be quantized.*are stacked") as refused:
        model.export(tmp_path / "fp8", "fp8-channel")
    assert not (tmp_path / "fp8").exists()
    edges = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    advised = dict(item.split("=") for item in re.findall(r"\*\S+=bf16", str(refused.value)))
    model.set_recipe("current", precision=advised, **edges)
    assert model.export(tmp_path / "fp8", "fp8-channel").quantized
    assert default_format(model, model.origin).startswith("fp8")
