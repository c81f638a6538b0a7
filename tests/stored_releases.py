"""Small releases with quantized weights, in the layouts of several libraries, and the values that these mean.

Data and scales are random bits. Values are written out from tables in FP64, apart from te-models' own decoding.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from judge import AutoModelForCausalLM, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from te_models.data.byte_tokenizer import ByteTokenizer

SIZES: dict[str, Any] = dict(
    vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    "qwen3_moe": SIZES | dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32),
    "gpt_oss": SIZES | dict(
        intermediate_size=32, num_local_experts=3, num_experts_per_tok=2, sliding_window=5,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
}  # fmt: skip
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6.0])
F8 = torch.float8_e4m3fn
Parts = dict[str, Tensor]


def unpacked(data: Tensor) -> Tensor:
    """The values of bytes with two E2M1 numbers, the lower half first, FP64."""
    pairs = torch.stack([data & 0xF, data >> 4], -1).flatten(-2).long()
    return E2M1.double()[pairs]


def nvfp4(shape: torch.Size, modelopt: bool) -> tuple[Parts, Tensor]:
    """A weight in NVFP4: the tensors of compressed-tensors or of ModelOpt, and the values.

    The scale of a block is rounded to FP32 after its division or multiplication by the tensor's.
    """
    rows, columns = shape
    data = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = (torch.rand(rows, columns // 16) * 100 + 20).to(F8)
    if modelopt:
        factor = torch.rand(()) * 1e-3 + 5e-4
        each = scales.float() * factor
        made = {"weight": data, "weight_scale": scales, "weight_scale_2": factor}
        made["input_scale"] = torch.tensor(0.01)
    else:
        factor = torch.rand(1) * 1000 + 700
        each = scales.float() / factor
        made = {"weight_packed": data, "weight_scale": scales, "weight_global_scale": factor}
        made["input_global_scale"] = torch.tensor([300.0])
    return made, unpacked(data) * each.double().repeat_interleave(16, 1)


def fp8_blocks(shape: torch.Size) -> tuple[Parts, Tensor]:
    """A weight in FP8 with a scale for 32 x 64 values, as DeepSeek's releases have it."""
    rows, columns = shape
    data = torch.randn(rows, columns).mul(40).to(F8)
    scales = torch.rand(-(-rows // 32), -(-columns // 64)) * 2e-3 + 1e-3
    spread = scales.double().repeat_interleave(32, 0).repeat_interleave(64, 1)
    made = {"weight": data, "weight_scale_inv": scales}
    return made, data.double() * spread[:rows, :columns]


def fp8_rows(shape: torch.Size) -> tuple[Parts, Tensor]:
    """A weight in FP8 with a scale per row."""
    data = torch.randn(shape).mul(40).to(F8)
    scales = torch.rand(shape[0], 1) * 2e-3 + 1e-3
    return {"weight": data, "weight_scale": scales}, data.double() * scales.double()


def fp8_tensor(shape: torch.Size) -> tuple[Parts, Tensor]:
    """A weight in FP8 with one scale."""
    data = torch.randn(shape).mul(40).to(F8)
    scale = torch.rand(()) * 2e-3 + 1e-3
    return {"weight": data, "weight_scale": scale}, data.double() * scale.double()


def group(bits: int, **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors."""
    how = dict(num_bits=bits, type="float", symmetric=True, dynamic=False, **weights)
    activations = dict(num_bits=bits, type="float", dynamic=True, strategy="token")
    one = dict(targets=["Linear"], weights=how, input_activations=activations)
    return dict(quant_method="compressed-tensors", config_groups=dict(group_0=one))


# Name -> (function of a shape, quantization_config).
LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "nvfp4": (
        lambda shape: nvfp4(shape, modelopt=False),
        group(4, strategy="tensor_group", group_size=16) | dict(format="nvfp4-pack-quantized"),
    ),
    "modelopt-nvfp4": (
        lambda shape: nvfp4(shape, modelopt=True),
        dict(quant_method="modelopt", quant_algo="NVFP4", kv_cache_quant_algo="FP8", group_size=16),
    ),
    "fp8-block": (
        fp8_blocks,
        dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[32, 64]),
    ),
    "fp8-channel": (fp8_rows, group(8, strategy="channel") | dict(format="float-quantized")),
    "fp8-tensor": (fp8_tensor, dict(quant_method="modelopt", quant_algo="FP8")),
}


def publish(folder: Path, layout: str, model: str = "qwen3", plain: tuple[str, ...] = ()) -> Any:
    """Write a release, with a tokenizer; return transformers' model in FP32 with the values that it means.

    Linears whose name contains one of `plain` are not quantized. "mxfp4" is for "gpt_oss" alone.
    """
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(model, **MODELS[model])
    judge = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in judge.named_parameters():
            scale = 0.05 if parameter.dim() > 1 else 0.1
            values = torch.randn_like(parameter) * scale + ("norm" in name)
            parameter.copy_(values.bfloat16())
    copy.deepcopy(judge).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if layout == "mxfp4":
        tensors, values = mxfp4_experts(tensors)
        document = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    else:
        encode, document = LAYOUTS[layout]
        values = {}
        for name, tensor in list(tensors.items()):
            quantized = "_proj.weight" in name and not any(one in name for one in plain)
            if not quantized:
                continue
            made, values[name] = encode(tensor.shape)
            del tensors[name]
            for part, content in made.items():
                tensors[f"{name.removesuffix('weight')}{part}"] = content.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config_file = folder / "config.json"
    written = json.loads(config_file.read_text()) | dict(quantization_config=document)
    config_file.write_text(json.dumps(written))
    ByteTokenizer().save(folder)
    fill(judge, values)
    return judge


def mxfp4_experts(tensors: Parts) -> tuple[Parts, dict[str, Tensor]]:
    """The tensors of a gpt-oss with its experts in MXFP4, and the values of the stacks [E, in, out]."""
    made: Parts = {}
    values = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 123, (experts, outputs, inputs // 32), dtype=torch.uint8)
        made[f"{name}_blocks"] = blocks
        made[f"{name}_scales"] = scales
        each = torch.pow(2.0, scales.double() - 127)
        values[name] = (unpacked(blocks) * each[..., None]).flatten(2).mT
    return made, values


@torch.no_grad()
def fill(judge: Any, values: dict[str, Tensor]) -> None:
    """Give transformers' model, which stacks experts, the values of quantized weights."""
    stacks: dict[str, list[tuple[int, str, Tensor]]] = {}
    own = dict(judge.named_parameters())
    for name, value in values.items():
        if name in own:
            own[name].copy_(value.float())
            continue
        prefix, _, rest = name.partition(".experts.")
        expert, projection, _ = rest.split(".")
        stacks.setdefault(f"{prefix}.experts", []).append((int(expert), projection, value))
    for prefix, found in stacks.items():
        by_name = {(expert, projection): value for expert, projection, value in found}
        for expert in range(len(own[f"{prefix}.down_proj"])):
            both = [by_name[expert, part] for part in ("gate_proj", "up_proj")]
            own[f"{prefix}.gate_up_proj"][expert].copy_(torch.cat(both).float())
            own[f"{prefix}.down_proj"][expert].copy_(by_name[expert, "down_proj"].float())
