"""Quantized checkpoints of other libraries: their own values, true gradients, and nothing built from a broken one."""

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits, assert_same_tensors
from fewer import every
from judge import AutoModelForCausalLM, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from te_models import CausalLM
from te_models.cli import main
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.errors import CheckpointError
from te_models.fp8.primary_weights import is_quantized, quantized_weights
from te_models.interop.quantized import (
    BLOCK,
    CHANNEL,
    NVFP4,
    WeightStorage,
    dequantize,
    read_storage,
)
from te_models.optim import build_optimizer

pytest.importorskip("compressed_tensors")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize


SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=256, intermediate_size=384, num_hidden_layers=3
)
SIZES |= dict(
    num_attention_heads=2, num_key_value_heads=1, head_dim=128, max_position_embeddings=128
)
SIZES |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
IDS = torch.arange(2 * 16).reshape(2, 16) % 89
F8 = torch.float8_e4m3fn
Quantized = dict[str, Tensor]


def plain_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("qwen3", **SIZES)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.05 if parameter.dim() == 2 else 0.2))
    return model.to(dtype)


def transformers_blocks(weight: Tensor) -> Quantized:
    """128 x 128 blocks, by transformers."""

    class Quantizer:
        quantization_config = FineGrainedFP8Config()

    made = Fp8Quantize(Quantizer())._quantize_one("m.weight", weight)
    return {name.removeprefix("m."): tensor for name, tensor in made.items()}


def compressed(scheme: QuantizationScheme, weight: Tensor) -> Quantized:
    """A weight by compressed-tensors."""
    args, blocks = scheme.weights, weight[None]
    assert args is not None
    if args.strategy == "channel":
        blocks = weight[:, None]
    elif args.strategy == "block":
        blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2)
    low, high = (f(blocks.flatten(-2), -1) for f in (torch.amin, torch.amax))
    scale = calculate_qparams(low, high, args)[0]
    scale = scale[:, None] if args.strategy == "channel" else scale
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    tensors = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def compressed_config(scheme: QuantizationScheme) -> dict[str, Any]:
    group = json.loads(scheme.model_dump_json())
    return dict(quant_method="compressed-tensors", format="float-quantized", config_groups=dict(group_0=group),
                ignore=["lm_head"], quantization_status="compressed", kv_cache_scheme=None, version="0.20.0",
                sparsity_config={}, transform_config={}, global_compression_ratio=None)  # fmt: skip


def per_tensor(weight: Tensor) -> Quantized:
    scale = weight.abs().amax() / 448
    return {
        "weight": (weight / scale).to(F8),
        "weight_scale": scale,
        "input_scale": torch.tensor(0.02),
    }


def per_channel(weight: Tensor) -> Quantized:
    scale = weight.abs().amax(1) / 448
    return {"weight": (weight / scale[:, None]).to(F8), "weight_scale": scale}


def modelopt_blocks(weight: Tensor) -> Quantized:
    made = transformers_blocks(weight)
    return {"weight": made["weight"], "weight_scale": made["weight_scale_inv"][:, None, :, None]}


def with_cache_scales(weight: Tensor) -> Quantized:
    return {**per_tensor(weight), "k_scale": torch.tensor(1.0), "v_scale": torch.tensor(0.5)}


FP8, FP8_DYNAMIC, FP8_BLOCK = (
    preset_name_to_scheme(name, ["Linear"]) for name in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK")
)
DEEPSEEK = dict(
    quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128]
)
# Name -> (function of a weight, quantization_config, hf_quant_config.json).
KINDS: dict[str, tuple[Callable[[Tensor], Quantized], dict[str, Any] | None, dict[str, Any] | None]] = {
    "block": (transformers_blocks, dict(DEEPSEEK, modules_to_not_convert=["lm_head"], scale_fmt="ue8m0"), None),
    "vllm-static": (per_tensor, dict(quant_method="fp8", activation_scheme="static", ignored_layers=["lm_head"]), None),
    "ct-tensor": (lambda w: compressed(FP8, w), compressed_config(FP8), None),
    "ct-channel": (lambda w: compressed(FP8_DYNAMIC, w), compressed_config(FP8_DYNAMIC), None),
    "ct-block": (lambda w: compressed(FP8_BLOCK, w), compressed_config(FP8_BLOCK), None),
    "modelopt": (with_cache_scales, None,
                 dict(quant_algo="FP8", kv_cache_quant_algo="FP8", exclude_modules=["lm_head"])),
    "modelopt-channel": (per_channel, None, dict(quant_algo="FP8_PER_CHANNEL_PER_TOKEN", kv_cache_quant_algo=None)),
    "modelopt-block": (modelopt_blocks, None, dict(quant_algo="FP8_PB_WO", exclude_modules=["lm_head", "model.x*"])),
    "modelopt-config": (per_tensor, dict(quant_method="modelopt", quant_algo="FP8", ignore=["lm_head"],
                                         producer=dict(name="modelopt", version="0.39.0")), None),
}  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, Tensor]]]:
    """A function that writes a checkpoint of a kind, and returns its folder and its true values in FP32."""

    def write(
        kind: str, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> tuple[Path, dict[str, Tensor]]:
        encode, config, modelopt = KINDS[kind]
        model = plain_model(dtype)
        folder = tmp_path / kind
        model.save_pretrained(folder)
        tensors, values = load_file(folder / "model.safetensors"), {}
        for name, tensor in list(tensors.items()):
            values[name] = tensor.float()
            if "_proj" in name:
                made = encode(tensor.float())
                del tensors[name]
                tensors |= {
                    f"{name.removesuffix('weight')}{part}": t.contiguous()
                    for part, t in made.items()
                }
                values[name] = true_values(made)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        document = json.loads((folder / "config.json").read_text()) | changes
        if config is not None:
            document["quantization_config"] = config
        if modelopt is not None:
            text = json.dumps(dict(producer=dict(name="modelopt"), quantization=modelopt))
            (folder / "hf_quant_config.json").write_text(text)
        (folder / "config.json").write_text(json.dumps(document))
        return folder, values

    return write


def true_values(made: Quantized) -> Tensor:
    """The product that every library means, written out for each shape of scales."""
    weight, scale = made["weight"].double(), made.get("weight_scale_inv", made.get("weight_scale"))
    assert scale is not None
    scale = scale.double()
    if scale.numel() == 1:
        return (weight * scale.reshape(())).float()
    if scale.numel() == len(weight):
        return (weight * scale.reshape(-1, 1)).float()
    scale = (
        scale.reshape(-(-weight.shape[0] // 128), -1)
        .repeat_interleave(128, 0)
        .repeat_interleave(128, 1)
    )
    return (weight * scale[: weight.shape[0], : weight.shape[1]]).float()


def change(folder: Path, function: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    function(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_library(kind: str, written: Any, tmp_path: Path) -> None:
    folder, values = written(kind)
    model = CausalLM.from_pretrained(folder, device="cpu")
    assert model.dtype == torch.float32 and model.recipe.name == "bf16"
    model.save_pretrained(tmp_path / "plain", format="hf")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert not (tmp_path / "plain/hf_quant_config.json").exists()
    plain = load_file(tmp_path / "plain/model.safetensors")
    assert_same_tensors(plain, values)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, other(IDS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("recipe", "adapters"), every(2, ["current", "blockwise"], [False, True]))
def test_fp8_checkpoints_train(recipe: str, adapters: bool, written: Any) -> None:
    folder, _ = written("block" if recipe == "blockwise" else "vllm-static", torch.bfloat16)
    model: Any = CausalLM.from_pretrained(folder, device="cpu", recipe=recipe, fp8_params=True)
    if adapters:
        lora = pytest.importorskip("te_models.training.lora")
        before = {name: tensor.clone() for name, tensor in quantized_weights(model).items()}
        trained: Any = lora.add_lora(model, r=4, lora_alpha=8)
        optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], 1e-2)
    else:
        trained, before = model, {}
        optimizer = build_optimizer("adamw", model, 1e-3, 0.0)
    losses = []
    for _ in range(5):
        loss = trained(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        trained.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    for name, tensor in before.items():
        assert_same_bits(
            name, quantized_weights(model)[name.replace(".weight.", ".base_layer.weight.")], tensor
        )


@pytest.mark.parametrize(
    ("kind", "words", "format"),
    [
        ("block", ("--recipe", "blockwise", "--fp8-params"), "fp8-block"),
        pytest.param(
            "ct-channel",
            ("--recipe", "current", "--lora", "4"),
            "fp8-channel",
            marks=pytest.mark.slow,
        ),
        pytest.param("modelopt", ("--recipe", "delayed"), "fp8-tensor", marks=pytest.mark.slow),
    ],
)
def test_the_commands_train_and_serve_a_checkpoint_in_fp8(
    kind: str,
    words: tuple[str, ...],
    format: str,
    written: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(SIZES, "vocab_size", 288)
    folder, _ = written(kind, torch.bfloat16)
    ByteTokenizer().save(folder)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("Ten green bottles, hanging on the wall.\n" * 60)
    data = ["--data", "text.txt", "--seq-len", "32", "--device", "cpu"]
    line = f"finetune --model {folder} --out run --steps 2 --batch-size 2 --sample-tokens 0".split()
    assert main([*line, *words, *data]) == 0
    assert (
        main(["export", "--model", "run", "--format", format, "--out", "served", "--device", "cpu"])
        == 0
    )
    assert main(["evaluate", "--model", "served", *data]) == 0
    assert json.loads(Path("served/config.json").read_text())["quantization_config"]


KEPT = [("vllm-static", "delayed", {}), ("block", "blockwise", dict(use_f32_scales=True)), ("block", "blockwise", {}),
        ("ct-block", "blockwise", {}), ("modelopt-block", "blockwise", {}), ("ct-tensor", "current", {})]  # fmt: skip


@pytest.mark.parametrize(("kind", "recipe", "options"), KEPT)
def test_weights_of_the_recipes_format_are_kept_as_fp8(
    kind: str, recipe: str, options: dict[str, Any], written: Any
) -> None:
    folder, _ = written(kind)
    if recipe != "blockwise":  # one scale per fused weight
        change(folder, share_scales)
    stored = load_file(folder / "model.safetensors")
    more = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=1, **options)
    model: Any = CausalLM.from_pretrained(
        folder, device="cpu", recipe=recipe, fp8_params=True, **more
    )
    attention, mlp = model.layers[0].self_attn, model.layers[1].mlp
    prefixes = (
        [f"model.layers.0.self_attn.{n}_proj." for n in "qkv"],
        ["model.layers.1.mlp.down_proj."],
    )
    values = torch.empty(0)
    for weight, names in zip(
        (attention.qkvg_proj.weight, mlp.down_proj.weight), prefixes, strict=True
    ):
        codes = weight._rowwise_data if recipe == "blockwise" else weight._data
        data = torch.cat([stored[f"{n}weight"] for n in names])
        assert_same_bits(names[0], codes, data.view(torch.uint8))
        values = torch.cat([true_values({k.removeprefix(n): t for k, t in stored.items() if k.startswith(n)})
                            for n in names])  # fmt: skip
        assert_same_bits(names[0], weight.dequantize(dtype=torch.float32).detach(), values)
        # The GEMM has the products of data and FP32 scale, not these rounded to BF16.
        module = attention.qkvg_proj if weight is attention.qkvg_proj.weight else mlp.down_proj
        x = torch.eye(weight.shape[1])[:64] * 448
        with torch.no_grad(), model.te.autocast(recipe=model.te_recipe):
            y = module(x)
        if recipe == "blockwise":
            torch.testing.assert_close(y, 448 * values[:, :64].t(), rtol=1e-6, atol=0)
    assert not is_quantized(model.layers[2].mlp.down_proj.weight)
    model.set_recipe(model.recipe.replace(num_layers_at_start_in_bf16=0))
    assert_same_bits(
        "relinked",
        model.layers[1].mlp.down_proj.weight.dequantize(dtype=torch.float32).detach(),
        values,
    )


def share_scales(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] = torch.full_like(tensors[name], 0.003)


def test_unequal_scales_of_a_fused_weight_are_quantized_again(written: Any) -> None:
    folder, values = written("vllm-static")
    more = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    model: Any = CausalLM.from_pretrained(
        folder, device="cpu", recipe="current", fp8_params=True, **more
    )
    names = [f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"]
    found = model.layers[0].self_attn.qkvg_proj.weight.dequantize().detach()
    expected = torch.cat([values[name] for name in names])
    assert not torch.equal(found, expected)
    torch.testing.assert_close(
        found, expected, rtol=2**-4, atol=expected.abs().max().item() / 448 / 2
    )
    down = (
        model.layers[0].mlp.down_proj.weight.dequantize().detach()
    )  # one tensor, hence its own scale
    assert_same_bits("down_proj", down, values["model.layers.0.mlp.down_proj.weight"])


def test_kept_weights_survive_our_own_folder(written: Any, tmp_path: Path) -> None:
    folder, _ = written("block", torch.bfloat16)
    model = CausalLM.from_pretrained(folder, device="cpu", recipe="blockwise", fp8_params=True)
    model.save_pretrained(tmp_path / "te")
    back: Any = CausalLM.from_pretrained(tmp_path / "te", device="cpu")
    assert_same_tensors(quantized_weights(back), quantized_weights(model))
    assert not back.layers[1].mlp.down_proj.weight._quantizer.force_pow_2_scales
    with torch.no_grad():
        assert_same_bits("logits", back(IDS).logits, model(IDS).logits)


def test_scales_may_lie_in_another_shard(written: Any) -> None:
    folder, values = written("block")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {"a": {}, "b": {}}
    for name, tensor in tensors.items():
        shards["a" if name.endswith("scale_inv") else "b"][name] = tensor
    for name, part in shards.items():
        save_file(part, folder / f"model-{name}.safetensors", metadata={"format": "pt"})
    weight_map = {
        name: f"model-{shard}.safetensors" for shard, part in shards.items() for name in part
    }
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(dict(metadata={}, weight_map=weight_map))
    )
    model: Any = CausalLM.from_pretrained(folder, device="cpu")
    name = "model.layers.1.mlp.down_proj.weight"
    assert_same_bits(name, model.layers[1].mlp.down_proj.weight.detach(), values[name])


Q = "model.layers.1.self_attn.q_proj"
BROKEN: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str]] = {
    "nan": ("block", lambda t: t[f"{Q}.weight_scale_inv"][0, 0].fill_(torch.nan), "negative or not finite"),
    "infinite": ("ct-channel", lambda t: t[f"{Q}.weight_scale"][0].fill_(torch.inf), "negative or not finite"),
    "negative": ("modelopt", lambda t: t[f"{Q}.weight_scale"].neg_(), "negative or not finite"),
    "input": ("modelopt", lambda t: t[f"{Q}.input_scale"].zero_(), "input_scale has a scale that is negative or"),
    "missing": ("block", lambda t: t.pop(f"{Q}.weight_scale_inv"), "q_proj is quantized .* and has 0 of"),
    "two": ("block", lambda t: t.update({f"{Q}.weight_scale": torch.ones(2, 2)}), "has 2 of"),
    "shape": ("block", lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(3, 2)}), r"shape \[3, 2\].*\[2, 2\]"),
    "one-for-all": ("ct-channel", lambda t: t.update({f"{Q}.weight_scale": torch.ones(1)}), r"has scales \[256, 1\]"),
    "dtype": ("block", lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(2, 2, dtype=torch.int32)}), "no scale"),
    "flat": ("block", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].reshape(-1)}), "is quantized"),
    "rows": ("block", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:, :128].contiguous(),
                                          f"{Q}.weight_scale_inv": torch.ones(2, 1)}), r"shape \[256, 128\], not"),
    "e5m2": ("block", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.float8_e5m2)}),
             "q_proj.weight is torch.float8_e5m2"),
    "no columns": ("modelopt", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:, :0].contiguous()}),
                   "is quantized"),
    "stray": ("block", lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1)}), "unexpected"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused_before_anything_is_built(case: str, written: Any) -> None:
    kind, break_, message = BROKEN[case]
    folder, _ = written(kind)
    change(folder, break_)

    def build(config: Any, **options: Any) -> Any:
        assert options.get("device") == "meta", "a model was built"
        return CausalLM(config, **options)

    with pytest.raises(CheckpointError, match=message) as found:
        CausalLM.from_pretrained(folder, device="cpu", build=build)
    assert "\n" not in str(found.value)


def test_a_block_larger_than_the_weight_takes_no_more_memory() -> None:
    """A config with blocks of 65,536 x 65,536 took 17 GB."""
    data = torch.randn(16, 32).to(torch.float8_e4m3fn)
    huge = dataclasses.replace(BLOCK, block=(2**16, 2**16))
    assert huge.grid((16, 32)) == (1, 1) and huge.grid((2**16 + 1, 32)) == (2, 1)
    assert_same_bits("huge", dequantize(huge, data, torch.full((1, 1), 0.5)), data.float() / 2)


@pytest.mark.parametrize("scheme", [CHANNEL, NVFP4], ids=["E4M3", "E2M1"])
def test_every_code_under_every_scale(scheme: WeightStorage) -> None:
    """From FP32's smallest subnormal to its largest number: the product in FP64, rounded to FP32."""
    exponents = torch.arange(-149, 128).double()
    scales = torch.cat(
        [torch.exp2(exponents), 1.75 * torch.exp2(exponents), torch.zeros(1)]
    ).float()
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(F8).double()
    if scheme.packed:
        numbers = torch.tensor(
            [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
        ).double()
        values = torch.stack([numbers[codes.int() & 15], numbers[codes.int() >> 4]], 1).flatten()
    data = codes.view(torch.uint8 if scheme.packed else F8).repeat(len(scales), 1)
    columns = scheme.grid((1, len(values)))[1]
    found = dequantize(scheme, data, scales[:, None].repeat(1, columns))
    expected = (scales.double()[:, None] * values).float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert_same_bits(
        "values", found.nan_to_num(-7.0, 9.0, -9.0), expected.nan_to_num(-7.0, 9.0, -9.0)
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "gptq": (dict(quant_method="gptq", bits=4), "quantization_config=.*gptq.* te-models reads fp8, compressed-tensors"),
    "nothing": (dict(bits=8), "te-models reads"),
    "list": ([1], "is not supported: te-models reads fp8"),
    "e5m2": (dict(DEEPSEEK, fmt="e5m2"), "fmt='e5m2'"),
    "scheme": (dict(DEEPSEEK, activation_scheme="row"), "activation_scheme='row'"),
    "block": (dict(DEEPSEEK, weight_block_size=[128, 0]), "positive numbers"),
    "block-bool": (dict(DEEPSEEK, weight_block_size=[True, 128]), "positive numbers"),
    "block-three": (dict(DEEPSEEK, weight_block_size=[1, 2, 3]), "pair of positive numbers"),
    "unknown": (dict(DEEPSEEK, rotation="hadamard"), "rotation='hadamard' is not known"),
    "int8": (dict(compressed_config(FP8), config_groups=dict(g=dict(weights=dict(type="int", num_bits=8)))), "'int'"),
    "groups": (dict(quant_method="compressed-tensors", format="float-quantized", config_groups={}), "no weights"),
    "no-groups": (dict(quant_method="compressed-tensors", format="float-quantized"), "config_groups"),
    "mixed": (dict(compressed_config(FP8), config_groups=dict(a=json.loads(FP8.model_dump_json()),
                                                              b=json.loads(FP8_DYNAMIC.model_dump_json()))), "several"),
    "sparse": (dict(compressed_config(FP8), sparsity_config=dict(format="sparse-24")), "sparsity_config"),
    "packed": (dict(compressed_config(FP8), format="pack-quantized"), "format='pack-quantized'"),
    "modelopt": (dict(quant_method="modelopt", quant_algo="W4A8_AWQ"), "quant_algo='W4A8_AWQ'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_quantization_has_one_clear_line(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as found:
        read_storage(tmp_path, dict(quantization_config=config))
    text = str(found.value)
    assert "\n" not in text and len(text) < 400 and "take it out" not in text


def test_fp8_without_a_config_is_not_read_as_numbers(written: Any) -> None:
    folder, _ = written("block")
    document = json.loads((folder / "config.json").read_text())
    del document["quantization_config"]
    (folder / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="is FP8, and config.json has no quantization_config"):
        CausalLM.from_pretrained(folder, device="cpu")
