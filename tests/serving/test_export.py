"""Exports for servers: transformers and compressed-tensors read the same weights, and make the same tensors of them."""

import functools
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits, assert_same_tensors
from families import make_config
from hf_models import document_of, load, make_theirs, randomize, tensors_of
from judge import AutoModelForCausalLM
from safetensors.torch import load_file, save_file
from torch import Tensor
from typed import submodule

from te_models import CausalLM, ModelConfig
from te_models.cli import main
from te_models.errors import CheckpointError, UsageError
from te_models.optim import build_optimizer
from te_models.serving.export import default_format
from te_models.serving.formats import FORMATS

pytest.importorskip("compressed_tensors")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from transformers import CompressedTensorsConfig, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize, replace_with_fp8_linear


SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=256, intermediate_size=384, num_hidden_layers=3
)
SIZES |= dict(
    num_attention_heads=2, num_key_value_heads=1, head_dim=128, max_position_embeddings=128
)
SIZES |= dict(attention_gate="none")
ODD = dict(
    hidden_size=192,
    intermediate_size=160,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
)
GATED = dict(attention_gate="elementwise", qk_norm=True)
TYPES = dict(
    layer_types=("sliding_attention", "full_attention", "sliding_attention"), sliding_window=9
)
GEMMA = dict(
    norm_position="both",
    zero_centered_norm=True,
    hidden_act="gelu_pytorch_tanh",
    embedding_multiplier=16.0,
)
# The family that a model is written as -> its shape.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": dict(attention_bias=True, tie_word_embeddings=True),
    "qwen3": dict(qk_norm=True, **ODD),  # sizes that are no multiples of 128
    "phi3": dict(partial_rotary_factor=0.5),  # q, k, v and gate, up are one tensor
    "granite": dict(
        embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0, mlp_bias=True
    ),
    "arcee": dict(mlp_gate=False, hidden_act="relu2"),
    "olmo2": dict(norm_position="post", qk_norm=True, qk_norm_scope="all_heads"),
    "glm4": dict(
        norm_position="both", rope_interleaved=True, partial_rotary_factor=0.5, attention_bias=True
    ),
    "gemma2": dict(
        **GEMMA,
        **TYPES,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=9.0,
        tie_word_embeddings=True,
    ),
    "gemma3_text": dict(**GEMMA, **TYPES, qk_norm=True, sliding_rope=dict(rope_theta=100.0)),
    "qwen3_next": dict(**GATED, zero_centered_norm=True),  # the gate of each head is in q_proj
    "qwen3_5_text": dict(
        **GATED,
        zero_centered_norm=True,
        layer_types=("full_attention", "linear_attention", "linear_attention"),
        linear_attention=dict(
            num_key_heads=2, num_value_heads=4, key_head_dim=64, value_head_dim=64
        ),
    ),
    "afmoe": dict(**GATED, **TYPES, norm_position="both", no_rope_layers=(1, 0, 1)),
    "laguna": dict(GATED, attention_gate="headwise", attention_gate_activation="softplus"),
    "qwen3_moe": dict(
        qk_norm=True, moe=dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=128)
    ),
    "deepseek_v3": dict(
        num_key_value_heads=2,
        head_dim=64,
        latent_attention=dict(
            q_lora_rank=192, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=64
        ),
        moe=dict(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            router_scores="sigmoid",
            router_fp32=True,
            expert_bias=True,
            n_group=2,
            topk_group=1,
            router_aux_loss_coef=0.0,
        ),
        mlp_layer_types=("dense", "sparse", "sparse"),
    ),
    "te_models_decoder": dict(attention_gate="elementwise"),  # with code of its own in the folder
}
QUANTIZED = [name for name in FORMATS if name != "bf16"]
COMPRESSED = ["fp8-channel", "mxfp8", "nvfp4"]
IDS = torch.arange(2 * 24).reshape(2, 24) % 89


def build(
    recipe: str = "delayed", steps: int = 1, dtype: torch.dtype = torch.float32, **changes: Any
) -> CausalLM:
    """A small model that has trained for some steps."""
    options = {
        name: changes.pop(name)
        for name in list(changes)
        if name not in ModelConfig.__dataclass_fields__
    }
    model = CausalLM(
        ModelConfig(**{**SIZES, **changes}), recipe=recipe, device="cpu", dtype=dtype, **options
    )
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.linspace(-0.1, 0.1, parameter.numel()) * (number % 3 + 1))
    for _ in range(steps):
        model(IDS, labels=IDS).loss.backward()
    return model.eval()


@functools.cache
def trained(shape: str) -> CausalLM:
    """The model of a row of SHAPES, which tests leave as it is."""
    return build("delayed", **SHAPES[shape])


def theirs(folder: Path, format: str) -> Any:
    """transformers' model of an exported folder, dequantized in FP32.

    It has no name for vLLM's static scales, whose weights are multiplied here, and no quantization to read in "bf16".
    """
    if format == "fp8-tensor":
        config, stored = document_of(folder), tensors_of(folder)
        del config["quantization_config"]
        for name in [name for name in stored if name.endswith(".weight_scale")]:
            module = name.removesuffix("_scale")
            stored[module] = stored[module].float() * stored.pop(name)
            del stored[name.replace("weight_scale", "input_scale")]
        save_file(stored, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
    configs = {
        "fp8-block": FineGrainedFP8Config,
        **dict.fromkeys(COMPRESSED, CompressedTensorsConfig),
    }
    options = {"quantization_config": configs[format](dequantize=True)} if format in configs else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=True, **options
        ).eval()


def scheme_of(folder: Path) -> Any:
    return QuantizationConfig.model_validate(
        document_of(folder)["quantization_config"]
    ).config_groups["group_0"]


@pytest.mark.filterwarnings("ignore:.*needs its own code in transformers")
# Keys that servers want, and transformers has as constants.
@pytest.mark.filterwarnings("ignore:.*transformers does not read .*score_func")
@pytest.mark.parametrize(
    ("shape", "format"),
    [
        pytest.param(
            shape, format, marks=[pytest.mark.slow] if (row + column) % len(FORMATS) else []
        )
        for row, shape in enumerate(SHAPES)
        for column, format in enumerate(FORMATS)
    ],
)
def test_transformers_computes_the_same_logits(format: str, shape: str, tmp_path: Path) -> None:
    if "moe" in SHAPES[shape] and format in ("mxfp8", "nvfp4"):
        pytest.skip("transformers 5.23 fails to convert experts in this format")
    trained(shape).export(tmp_path / "out", format=format)
    assert document_of(tmp_path / "out")["model_type"] == shape
    ours = CausalLM.from_pretrained(tmp_path / "out", device="cpu", dtype=torch.float32)
    other = theirs(tmp_path / "out", format)
    if format == "nvfp4":  # compressed-tensors rounds its dequantized weights to BF16
        other.save_pretrained(tmp_path / "plain")
        ours = CausalLM.from_pretrained(tmp_path / "plain", device="cpu", dtype=torch.float32)
    with torch.no_grad():
        found, expected = ours(IDS).logits, other(IDS).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("gate", "format"), [("headwise", "fp8-channel"), ("elementwise", "mxfp8"), ("none", "nvfp4")]
)
def test_compressed_tensors_makes_the_same_tensors(gate: str, format: str, tmp_path: Path) -> None:
    """Data and scales of every weight, those of a gate included."""
    model = build("bf16", dtype=torch.bfloat16, attention_gate=gate, **ODD)
    exported = model.export(tmp_path / "out", format=format)
    model.save_pretrained(tmp_path / "plain", format="hf")
    stored, plain = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "plain")
    kind = document_of(tmp_path / "out")["quantization_config"]["format"]
    scheme, compressor = scheme_of(tmp_path / "out"), BaseCompressor.get_value_from_registry(kind)
    args = scheme.weights
    assert len(exported.quantized) == (7 + (gate != "none")) * SIZES["num_hidden_layers"]
    for module in exported.quantized:
        own = {
            n.removeprefix(f"{module}."): t for n, t in stored.items() if n.startswith(f"{module}.")
        }
        weight, scale, whole = (
            plain[f"{module}.weight"].float(),
            own["weight_scale"],
            own.get("weight_global_scale"),
        )
        blocks = weight if args.group_size is None else weight.unflatten(1, (-1, args.group_size))
        low, high = blocks.amin(-1), blocks.amax(-1)
        if whole is not None and module.endswith(
            ("o_proj", "down_proj")
        ):  # others share it with their neighbors
            # It multiplies by a reciprocal, which is rounded once more.
            torch.testing.assert_close(
                whole, generate_gparam(low.min(), high.max()), rtol=2**-23, atol=0
            )
        expected = calculate_qparams(low, high, args, global_scale=whole)[0]
        given = {"weight": weight, "weight_scale": expected.reshape(scale.shape)}
        given |= {} if whole is None else {"weight_global_scale": whole}
        expected = torch.log2(expected) + 127 if format == "mxfp8" else expected
        assert_same_bits(
            f"{module}: scales", scale.float().reshape(expected.shape), expected.float()
        )
        for name, tensor in compressor.compress(given, scheme).items():
            assert_same_bits(
                f"{module}.{name}", own[name], tensor.to(own[name].dtype).reshape(own[name].shape)
            )


@pytest.mark.parametrize("recipe", ["bf16", "blockwise"])
def test_blocks_are_those_of_transformers(recipe: str, tmp_path: Path) -> None:
    model = build(recipe, dtype=torch.bfloat16, attention_gate="elementwise")
    exported = model.export(tmp_path / "out")
    model.save_pretrained(tmp_path / "plain", format="hf")
    stored, plain = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "plain")

    class Quantizer:
        quantization_config = FineGrainedFP8Config(
            scale_fmt="float" if recipe == "bf16" else "ue8m0"
        )

    for module in exported.quantized:
        name = f"{module}.weight"
        for key, tensor in Fp8Quantize(Quantizer())._quantize_one(name, plain[name]).items():
            assert_same_bits(key, stored[key], tensor.float() if key.endswith("_inv") else tensor)


# What the loaders register for a linear [out, in]: vLLM's layers/quantization/fp8.py (0071b24b),
# compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py (00cb05c3), _w8a8_mxfp8.py (109f2f21), _w4a4_nvfp4.py
# (0094cb9b); SGLang's srt/layers/quantization/fp8.py (00563d36). Per-tensor scales are loaded from [] or [1].
F8, F32, U8 = torch.float8_e4m3fn, torch.float32, torch.uint8
LOADED: dict[str, dict[str, tuple[torch.dtype, Any]]] = {
    "fp8-block": {
        "weight": (F8, lambda o, i: (o, i)),
        "weight_scale_inv": (F32, lambda o, i: (math.ceil(o / 128), math.ceil(i / 128))),
    },
    "fp8-tensor": {
        "weight": (F8, lambda o, i: (o, i)),
        "weight_scale": (F32, lambda o, i: ()),
        "input_scale": (F32, lambda o, i: ()),
    },
    "fp8-channel": {
        "weight": (F8, lambda o, i: (o, i)),
        "weight_scale": (F32, lambda o, i: (o, 1)),
    },
    "mxfp8": {"weight": (F8, lambda o, i: (o, i)), "weight_scale": (U8, lambda o, i: (o, i // 32))},
    "nvfp4": {
        "weight_packed": (U8, lambda o, i: (o, i // 2)),
        "weight_scale": (F8, lambda o, i: (o, i // 16)),
        "weight_global_scale": (F32, lambda o, i: (1,)),
        "input_global_scale": (F32, lambda o, i: (1,)),
    },
}
NUMBER8 = dict(num_bits=8, type="float", symmetric=True)
NUMBER4 = dict(num_bits=4, type="float", symmetric=True)
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8-block": dict(
        quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]
    ),
    "fp8-tensor": dict(quant_method="fp8", activation_scheme="static"),
    "fp8-channel": dict(
        format="float-quantized",
        weights=dict(NUMBER8, strategy="channel", dynamic=False),
        input_activations=dict(NUMBER8, strategy="token", dynamic=True),
    ),
    "mxfp8": dict(
        format="mxfp8-quantized",
        weights=dict(NUMBER8, strategy="group", group_size=32, dynamic=False),
        input_activations=dict(NUMBER8, strategy="group", group_size=32, dynamic=True),
    ),
    "nvfp4": dict(
        format="nvfp4-pack-quantized",
        weights=dict(NUMBER4, strategy="tensor_group", group_size=16, dynamic=False),
        input_activations=dict(NUMBER4, strategy="tensor_group", group_size=16, dynamic="local"),
    ),
}


@pytest.mark.parametrize("format", QUANTIZED)
def test_loaders_find_the_names_shapes_and_dtypes_that_they_read(
    format: str, tmp_path: Path
) -> None:
    model = build("delayed", attention_bias=True, num_hidden_layers=4, num_layers_at_end_in_bf16=2)
    exported = model.export(tmp_path / "out", format=format)
    model.save_pretrained(tmp_path / "plain", format="hf")
    stored, plain = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "plain")
    inside = [f"model.layers.1.{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
              "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]  # fmt: skip
    assert list(exported.quantized) == inside
    expected = {f"{module}.{part}" for module in inside for part in LOADED[format]}
    expected |= {name for name in plain if name.removesuffix(".weight") not in inside}
    assert stored.keys() == expected
    for module in inside:
        out, width = plain[f"{module}.weight"].shape
        for part, (dtype, shape) in LOADED[format].items():
            tensor = stored[f"{module}.{part}"]
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape(out, width)), (
                f"{module}.{part}"
            )
    for name in plain.keys() & stored.keys() - {f"{module}.weight" for module in inside}:
        assert_same_bits(name, stored[name], plain[name])
    if format in ("fp8-tensor", "nvfp4"):
        for group in (inside[:3], inside[4:6]):  # vLLM fuses them and takes the largest scale
            for part in (
                "weight_scale",
                "input_scale",
                "weight_global_scale",
                "input_global_scale",
            ):
                values = [
                    stored[f"{m}.{part}"]
                    for m in group
                    if stored.get(f"{m}.{part}", torch.ones(2)).numel() == 1
                ]
                assert all(torch.equal(values[0], value) for value in values)
    config = document_of(tmp_path / "out")
    quantization = config.pop("quantization_config")
    assert config == document_of(tmp_path / "plain")
    linears = {n.removesuffix(".weight") for n in plain if n.endswith("_proj.weight")} | {"lm_head"}
    assert len(linears) == 4 * 7 + 1
    assert_says_what_loaders_read(quantization, format, sorted(linears - set(inside)))


def assert_says_what_loaders_read(
    quantization: dict[str, Any], format: str, ignored: list[str]
) -> None:
    """Check a quantization_config, which lists the linears that are not quantized."""
    wanted = CONFIGS[format]
    if "format" not in wanted:
        assert {key: quantization[key] for key in wanted} == wanted
        assert sorted(quantization["ignored_layers"]) == ignored
        assert sorted(quantization.get("modules_to_not_convert", ignored)) == ignored
        return
    assert (
        quantization["quant_method"] == "compressed-tensors"
        and quantization["format"] == wanted["format"]
    )
    assert (
        sorted(quantization["ignore"]) == ignored
        and quantization["quantization_status"] == "compressed"
    )
    (group,) = quantization["config_groups"].values()
    assert group["targets"] == ["Linear"]
    for part in ("weights", "input_activations"):
        assert {key: group[part][key] for key in wanted[part]} == wanted[part]
    QuantizationConfig.model_validate(quantization)


@pytest.mark.parametrize("recipe", ["delayed", "current", "bf16"])
def test_what_the_table_keeps_in_bf16_is_not_quantized(recipe: str, tmp_path: Path) -> None:
    """Under any recipe, BF16 too; a linear under another recipe is quantized, also one that an edge left out."""
    table = {
        "*.down_proj": "bf16",
        "layers.1.self_attn.*": "bf16",
        "layers.0.mlp.gate_up_proj": "current",
    }
    edges = dict(num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0)
    model = build(recipe, num_hidden_layers=3, precision=table, **edges)
    exported = model.export(tmp_path / "out", format="fp8-channel")
    projections = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    wanted = {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"}
    wanted |= {f"model.layers.{n}.mlp.{name}_proj" for n in (1, 2) for name in ("gate", "up")}
    wanted |= {f"model.layers.2.{name}" for name in projections}
    assert set(exported.quantized) == wanted
    kept = {f"model.layers.{n}.mlp.down_proj" for n in range(3)}
    kept |= {f"model.layers.{n}.{name}" for n in (0, 1) for name in projections}
    ignored = document_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert set(exported.ignored) == kept | {"lm_head"} == set(ignored)
    back = CausalLM.from_pretrained(tmp_path / "out", device="cpu", dtype=torch.float32)
    for name in ("layers.1.self_attn.qkvg_proj", "layers.2.mlp.down_proj"):
        assert_same_bits(name, back.get_submodule(name).weight, model.get_submodule(name).weight)


def test_transformers_finds_what_an_edge_keeps_in_bf16(tmp_path: Path) -> None:
    """By the names of its own modules, which differ from those of the folder; experts are one of them."""
    config = make_config("laguna-all-sparse")
    config.intermediate_size = config.moe_intermediate_size = (
        config.shared_expert_intermediate_size
    ) = 32
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path / "in")
    edges = dict(recipe="current", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0)
    CausalLM.from_pretrained(tmp_path / "in", device="cpu", **edges).export(tmp_path / "out")
    told = FineGrainedFP8Config(**document_of(tmp_path / "out")["quantization_config"])
    made = replace_with_fp8_linear(theirs, told.modules_to_not_convert, told, pre_quantized=True)
    found = [
        name for name, module in made.named_modules() if type(module).__name__.startswith("FP8")
    ]
    depths = [name.split(".")[2] for name in found]
    assert depths.count("0") == 0 and depths.count("1") == depths.count("2") == 9


def test_a_linear_under_another_recipe_is_served_as_it_trained(tmp_path: Path) -> None:
    """Power-of-two scales are those of blockwise; Float8CurrentScaling's, as the model's own, are any."""
    model = build(
        "current", precision={"layers.1.mlp.down_proj": "blockwise"}, dtype=torch.bfloat16
    )
    model.export(tmp_path / "out", format="fp8-block")
    stored = tensors_of(tmp_path / "out")
    powers = {
        name: bool((tensor[tensor > 0].frexp().mantissa == 0.5).all())
        for name, tensor in stored.items()
        if name.endswith("weight_scale_inv")
    }
    assert powers["model.layers.1.mlp.down_proj.weight_scale_inv"]
    assert not powers["model.layers.1.mlp.up_proj.weight_scale_inv"]
    with pytest.raises(UsageError, match="has them for 3 of 4 linears"):
        build("delayed", precision={"layers.1.mlp.down_proj": "current"}).export(
            tmp_path / "no", format="fp8-tensor"
        )


def test_static_scales_are_the_trained_ones(tmp_path: Path) -> None:
    model = build("delayed", steps=3, amax_history_len=4, amax_compute_algo="max", margin=1)
    for format, part in (("fp8-tensor", "input_scale"), ("nvfp4", "input_global_scale")):
        model.export(tmp_path / format, format=format)
        for ours, module in (("qkvg_proj", "self_attn.v_proj"), ("o_proj", "self_attn.o_proj")):
            scale = model.layers[1].self_attn.get_submodule(ours).fp8_meta["scaling_fwd"].scale[0]
            stored = tensors_of(tmp_path / format)[f"model.layers.1.{module}.{part}"].reshape(())
            expected = 1 / scale if part == "input_scale" else 448 * 6 / (448 / 2 / scale)
            torch.testing.assert_close(stored, expected, rtol=1e-6, atol=0)


def test_calibration_measures_the_inputs(tmp_path: Path) -> None:
    model = build("bf16")
    with pytest.raises(UsageError, match="recipe 'delayed' learns.*calibration"):
        model.export(tmp_path / "out", format="fp8-tensor")
    with pytest.raises(UsageError, match="has not trained"):
        build("delayed", steps=0).export(tmp_path / "out", format="fp8-tensor")
    assert not (tmp_path / "out").exists()
    seen: list[Tensor] = []
    module = model.layers[0].mlp.down_proj
    hook = module.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].abs().amax())
    )
    with torch.no_grad():
        model(IDS)
    hook.remove()
    (note,) = model.export(tmp_path / "out", format="fp8-tensor", calibration=IDS).notes
    assert note.startswith(
        "transformers 5.24 reads wrong values, without an error, from fp8-tensor"
    )
    stored = tensors_of(tmp_path / "out")["model.layers.0.mlp.down_proj.input_scale"]
    torch.testing.assert_close(stored, seen[0] / 448, rtol=1e-6, atol=0)
    assert "random tokens" in model.export(tmp_path / "four", format="nvfp4").notes[0]


@pytest.mark.parametrize("format", ["fp8-tensor", "nvfp4"])
def test_calibration_takes_the_largest_of_all_batches(format: str, tmp_path: Path) -> None:
    model = build("bf16")
    with torch.no_grad():
        model.embed_tokens.weight[5] *= 100  # against which the blocks' own outputs are small
    small, large = torch.full((1, 8), 2), torch.full((1, 8), 5)
    alone = {}
    for name, batch in (("small", small), ("large", large)):
        model.export(tmp_path / name, format=format, calibration=batch)
        alone[name] = tensors_of(tmp_path / name)
    part = "input_scale" if format == "fp8-tensor" else "input_global_scale"
    names = [name for name in alone["small"] if name.endswith(part)]
    assert any(not torch.equal(alone["small"][name], alone["large"][name]) for name in names)
    for number, batches in enumerate(([large, small], [small, large])):
        model.export(tmp_path / str(number), format=format, calibration=batches)
        found = tensors_of(tmp_path / str(number))
        for name in names:  # a divisor falls as the input grows
            choose = torch.maximum if format == "fp8-tensor" else torch.minimum
            assert_same_bits(name, found[name], choose(alone["small"][name], alone["large"][name]))


def test_random_tokens_leave_room_for_inputs_four_times_as_large(tmp_path: Path) -> None:
    model = build("bf16")
    model.export(tmp_path / "random", format="nvfp4")
    tokens = torch.randint(96, (4, 128), generator=torch.Generator().manual_seed(0))
    model.export(tmp_path / "same", format="nvfp4", calibration=tokens)
    random, same = tensors_of(tmp_path / "random"), tensors_of(tmp_path / "same")
    for name in [name for name in random if name.endswith("input_global_scale")]:
        torch.testing.assert_close(random[name], same[name] / 4, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("recipe", "format"), [("current", "fp8-tensor"), ("delayed", "fp8-tensor"),
                                                ("blockwise", "fp8-block"), ("mxfp8", "mxfp8")])  # fmt: skip
def test_fp8_primary_weights_are_served_as_they_are(
    recipe: str, format: str, tmp_path: Path
) -> None:
    more = dict(use_f32_scales=True) if recipe == "blockwise" else {}
    model = build(recipe, steps=2, dtype=torch.bfloat16, fp8_params=True, **more)
    model.export(tmp_path / "out", format=format, calibration=IDS)
    back = CausalLM.from_pretrained(tmp_path / "out", device="cpu", dtype=torch.float32)
    for name in ("self_attn.qkvg_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        weight = submodule(model.layers[1], name).weight.dequantize(dtype=torch.float32)
        assert_same_bits(
            name, back.layers[1].get_parameter(f"{name}.weight").detach(), weight.detach()
        )


def test_fp8_primary_weights_of_odd_sizes_get_scales_that_transformers_reads(
    tmp_path: Path,
) -> None:
    """Their own blocks of 128 do not fill the weight, from whose shape transformers derives the size of a block."""
    model = build("blockwise", dtype=torch.bfloat16, fp8_params=True, **ODD)
    exported = model.export(tmp_path / "out", format="fp8-block")
    stored, odd = tensors_of(tmp_path / "out"), 0
    for module in exported.quantized:
        scale, shape = stored[f"{module}.weight_scale_inv"], stored[f"{module}.weight"].shape
        for dim in (0, 1):
            if shape[dim] % 128 and scale.shape[dim] > 1:
                assert torch.equal(scale, scale.narrow(dim, 0, 1).expand_as(scale)), module
                odd += 1
    assert odd
    back = CausalLM.from_pretrained(tmp_path / "out", device="cpu", dtype=torch.float32)
    for name in ("self_attn.qkvg_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        weight = submodule(model.layers[1], name).weight.dequantize(dtype=torch.float32).detach()
        found = back.layers[1].get_parameter(f"{name}.weight").detach()
        assert (
            (found - weight).abs() <= weight.abs() * 2**-4 + weight.abs().amax() * 2**-15
        ).all(), name


@pytest.mark.parametrize(
    ("recipe", "format", "options"),
    [
        ("blockwise", "fp8-block", {}),
        ("blockwise", "fp8-block", dict(use_f32_scales=True)),
        ("mxfp8", "mxfp8", {}),
        ("mxfp8", "mxfp8", dict(enable_2d_quantization=True)),
        ("nvfp4", "nvfp4", {}),
        ("nvfp4", "nvfp4", dict(disable_2d_quantization=True)),
    ],
)
def test_a_model_is_served_with_the_weights_it_trained_with(
    recipe: str, format: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = build(recipe, dtype=torch.bfloat16, **options)
    model.export(tmp_path / "out", format=format)
    back = CausalLM.from_pretrained(tmp_path / "out", device="cpu", dtype=torch.float32)
    for name in ("self_attn.qkvg_proj", "mlp.gate_up_proj"):
        module: Any = model.layers[1].get_submodule(name)
        quantizer = module.quantizers["scaling_fwd"][1]
        quantizer.set_usage(rowwise=True, columnwise=False)
        trained = quantizer(module.weight.detach()).dequantize(dtype=torch.float32)
        served: Any = back.layers[1].get_submodule(name).weight
        # NVFP4 has two factors, whose product is rounded in another order.
        torch.testing.assert_close(
            served.detach(), trained, rtol=3e-7 if format == "nvfp4" else 0, atol=0
        )


def test_a_divisor_that_makes_scales_infinite_is_refused(tmp_path: Path) -> None:
    build("bf16", steps=0).export(tmp_path / "out", format="nvfp4")
    stored = tensors_of(tmp_path / "out")
    stored["model.layers.1.mlp.down_proj.weight_global_scale"].fill_(1e-42)
    save_file(stored, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match="down_proj.weight_global_scale has a scale that is .* not finite"
    ):
        CausalLM.from_pretrained(tmp_path / "out", device="cpu")


def test_bf16_is_the_plain_folder(tmp_path: Path) -> None:
    model = build("delayed")
    assert model.export(tmp_path / "out", format="bf16").quantized == ()
    model.save_pretrained(tmp_path / "plain", format="hf")
    plain = {
        name: tensor.to(torch.bfloat16) for name, tensor in tensors_of(tmp_path / "plain").items()
    }
    assert_same_tensors(tensors_of(tmp_path / "out"), plain)
    config = document_of(tmp_path / "out")
    assert config["torch_dtype"] == "bfloat16" and "quantization_config" not in config


def test_bf16_keeps_the_numbers_that_choose_experts(tmp_path: Path) -> None:
    """They are FP32 in transformers too, where rounded ones choose other experts."""
    theirs = AutoModelForCausalLM.from_config(make_config("glm4_moe-groups"))
    randomize(theirs)
    theirs.float().save_pretrained(tmp_path / "theirs")
    model = CausalLM.from_pretrained(
        tmp_path / "theirs", device="cpu", recipe="bf16", dtype=torch.bfloat16
    )
    model.export(tmp_path / "out", format="bf16")
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "out")
    names = [name for name in before if name.endswith("e_score_correction_bias")]
    assert names and all(torch.equal(before[name], after[name]) for name in names)


def test_adapters_are_merged_first(tmp_path: Path) -> None:
    lora = pytest.importorskip("te_models.training.lora")
    adapted = lora.add_lora(build("bf16"), r=4)
    with pytest.raises(UsageError, match="merge_and_unload"):
        adapted.get_base_model().export(tmp_path / "out")
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
    weights = {
        n.replace(".base_layer", ""): p
        for n, p in adapted.get_base_model().named_parameters()
        if ".lora_" not in n
    }
    for name, module in adapted.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            one, other = module.lora_A["default"].weight, module.lora_B["default"].weight
            weights[f"{name}.weight"] = (
                weights[f"{name}.weight"] + module.scaling["default"] * other @ one
            )
    by_hand = build("bf16", steps=0)
    by_hand.load_state_dict(
        {name: tensor.detach() for name, tensor in weights.items()}, strict=False
    )
    by_hand.export(tmp_path / "by-hand", format="bf16")
    exported = adapted.merge_and_unload().export(tmp_path / "out", format="bf16")
    assert len(exported.ignored) == 22 and len(weights) == len(dict(by_hand.named_parameters()))
    for name, tensor in tensors_of(tmp_path / "by-hand").items():
        torch.testing.assert_close(
            tensors_of(tmp_path / "out")[name], tensor, rtol=2**-8, atol=1e-8
        )


@pytest.mark.parametrize(
    "shape, format, recipe",
    [
        ("phi3", "fp8-block", "blockwise"),
        ("gemma2", "fp8-tensor", "delayed"),
        ("deepseek_v3", "fp8-channel", "current"),
    ],
)
def test_a_checkpoint_in_fp8_is_trained_and_served_again(
    shape: str, format: str, recipe: str, tmp_path: Path
) -> None:
    trained(shape).export(tmp_path / "hub", format=format)
    model = CausalLM.from_pretrained(tmp_path / "hub", device="cpu", recipe=recipe, fp8_params=True)
    optimizer = build_optimizer("adamw", model, 1e-3, 0.0)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.export(tmp_path / "out", format=format)
    first, second = tensors_of(tmp_path / "hub"), tensors_of(tmp_path / "out")
    assert first.keys() == second.keys() and not torch.equal(
        first["model.norm.weight"], second["model.norm.weight"]
    )
    assert document_of(tmp_path / "out") == document_of(tmp_path / "hub")
    ours = CausalLM.from_pretrained(tmp_path / "out", device="cpu", dtype=torch.float32)
    with torch.no_grad():
        found, expected = ours(IDS).logits, theirs(tmp_path / "out", format)(IDS).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8-tensor"])
def test_an_export_of_an_export_is_the_same(format: str, tmp_path: Path) -> None:
    """Its weights, until they change, and the scales of inputs, which random tokens would measure otherwise."""
    model = build("bf16", dtype=torch.bfloat16)
    with torch.no_grad():
        # E4M3 rounds it to its largest number.
        model.layers[1].self_attn.o_proj.weight[0, 0] = 447.9
    model.export(tmp_path / "first", format=format, calibration=IDS)
    again = CausalLM.from_pretrained(tmp_path / "first", device="cpu")
    again.export(tmp_path / "second", format=format)
    first, second = tensors_of(tmp_path / "first"), tensors_of(tmp_path / "second")
    assert_same_tensors(first, second)
    with torch.no_grad():
        again.layers[1].mlp.down_proj.weight.mul_(2)
    again.export(tmp_path / "third", format=format)
    changed = {
        name
        for name, t in tensors_of(tmp_path / "third").items()
        if not torch.equal(t.float(), first[name].float())
    }
    assert changed and all(
        name.startswith("model.layers.1.mlp.down_proj.weight") for name in changed
    )


@pytest.mark.parametrize("shape", [ODD, GATED, SHAPES["qwen3_moe"]], ids=["odd", "gated", "moe"])
@pytest.mark.parametrize("again", [None, "fp8-channel", "mxfp8"])
def test_an_export_of_an_export_quantizes_the_same_linears(
    shape: dict[str, Any], again: str | None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """An edge, or one linear, that the first export kept in BF16 would lose exactness in the second."""
    table = {"layers.1.*.down_proj*": "bf16"}
    edges = dict(num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0)
    model = build("current", **{**shape, "num_hidden_layers": 3}, precision=table, **edges)
    first = model.export(tmp_path / "first", format="fp8-channel")
    options = ["--model", str(tmp_path / "first"), "--out", str(tmp_path / "second")]
    assert main(["export", *options, *([] if again is None else ["--format", again])]) == 0
    shown = capsys.readouterr().out
    assert f"{len(first.quantized)} linears quantized, {len(first.ignored)} not" in shown
    assert "first has unquantized stay so: an FP8 recipe (--recipe) decides anew" in shown
    # The recipe that a load chooses by itself decides about training, and not about an export.
    loaded = CausalLM.from_pretrained(tmp_path / "first", device="cpu")
    second = loaded.export(tmp_path / "third", format=again or "fp8-channel")
    assert set(second.quantized) == set(first.quantized)
    assert set(second.ignored) == set(first.ignored)
    chosen = CausalLM.from_pretrained(
        tmp_path / "first",
        device="cpu",
        recipe="current",
        num_layers_at_start_in_bf16=0,
        num_layers_at_end_in_bf16=0,
    )
    third = chosen.export(tmp_path / "all", format=again or "fp8-channel")
    assert len(third.quantized) > len(first.quantized)
    assert not any("stay so" in note for note in third.notes)


def test_unsupported_exports_are_refused_in_one_line(tmp_path: Path) -> None:
    model = build("bf16", intermediate_size=176)
    with pytest.raises(UsageError, match="unknown format 'fp8-blocks'.*fp8-block"):
        model.export(tmp_path / "out", format="fp8-blocks")
    with pytest.raises(
        UsageError, match="down_proj has 176 inputs, no multiple of 32, which mxfp8 needs"
    ):
        model.export(tmp_path / "out", format="mxfp8")
    assert not (tmp_path / "out").exists()
    (note,) = model.export(tmp_path / "out", format="fp8-block").notes
    assert "no multiples of 128" in note and "fp8-channel" in note


@pytest.mark.parametrize(("format", "edges"), [("mxfp8", 0), ("nvfp4", 1), ("nvfp4", 0)])
def test_what_transformers_does_with_experts_is_noted(
    format: str, edges: int, tmp_path: Path
) -> None:
    in_bf16 = dict(num_layers_at_start_in_bf16=edges, num_layers_at_end_in_bf16=0)
    shape = {**SHAPES["qwen3_moe"], "num_hidden_layers": 2}
    model = build("current", dtype=torch.bfloat16, **shape, **in_bf16)
    (note,) = model.export(tmp_path, format=format, calibration=IDS).notes
    assert note.startswith(f"transformers 5.24 fails on experts in {format}")
    silent = format == "nvfp4" and not edges
    assert ("if no layer's are in BF16 reads wrong values" in note) == (format == "nvfp4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not silent:
            with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
                AutoModelForCausalLM.from_pretrained(tmp_path)
            return
        other = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = CausalLM.from_pretrained(tmp_path, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        found, expected = other.eval()(IDS).logits.float(), ours(IDS).logits
    assert (found - expected).norm() > 0.5 * expected.norm(), "it reads them: remove the note"


def test_scales_that_transformers_leaves_out_are_noted(tmp_path: Path) -> None:
    """It divides a weight of q, k and v into three, and finds no place for the scales."""
    make_theirs("sarvam_moe-one-key", tmp_path / "whole")
    notes = load(tmp_path / "whole").export(tmp_path / "out", format="fp8-block").notes
    assert "reads wrong values, without an error, for query_key_value" in notes[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert all(name.endswith("weight_scale_inv") for name in report["unexpected_keys"])
    assert report["unexpected_keys"], "transformers reads the scales now: remove the note"


def blocks_that_vllm_refuses(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the linears of an export in fp8-block that vLLM's validate_fp8_block_shape and its kernels refuse."""
    merged = [
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ("gate_proj", "up_proj"),
    ]
    tensors = load_file(folder / "model.safetensors")
    refused = []
    for name in (name for name in tensors if f"{name}_scale_inv" in tensors):
        rows, inputs = tensors[name].shape
        module = name.removesuffix(".weight")
        checked: list[int] = []
        for group in merged:
            leaf = next((part for part in group[:-1] if module.endswith(part)), None)
            if leaf is not None:
                checked = [rows]
        if module.endswith("qkv_proj"):
            width = config["hidden_size"] // config["num_attention_heads"]
            checked = [config[f"num_{kind}_heads"] * width for kind in ("attention", "key_value")]
        if module.endswith("gate_up_proj"):
            checked = [rows // 2]
        if inputs % 128 or any(size % 128 for size in checked):
            refused.append(module)
    return refused


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "arcee", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("whole", [True, False])
def test_the_format_for_a_server_is_one_that_it_reads(
    name: str, whole: bool, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = dict(hidden_size=256, intermediate_size=256, recipe="bf16", steps=0)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2 if whole else 1, head_dim=64)
    changes = {key: value for key, value in SHAPES[name].items() if key not in ODD}
    if name == "deepseek_v3":
        sizes |= dict(num_key_value_heads=4)
        latents = dict(
            q_lora_rank=128 if whole else 192,
            kv_lora_rank=128,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=64,
        )
        changes["latent_attention"] = latents
    model = build(**{**changes, **sizes})
    model.export(tmp_path / "out", format="fp8-block")
    refused = blocks_that_vllm_refuses(tmp_path / "out", document_of(tmp_path / "out"))
    assert whole == (not refused), refused
    chosen = default_format(model, model.origin)
    assert chosen == ("fp8-channel" if refused else "fp8-block")


def test_the_command_without_a_format_takes_one_that_servers_read(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name, inner in (("blocks", 256), ("channels", 320)):
        model = build("bf16", steps=0, num_key_value_heads=2, head_dim=64, intermediate_size=inner)
        model.save_pretrained(tmp_path / name)
        line = ["export", "--model", str(tmp_path / name), "--device", "cpu"]
        assert main([*line, "--out", str(tmp_path / f"{name}-out")]) == 0
    said = capsys.readouterr().out
    assert "blocks-out: fp8-block, 21 linears" in said
    assert "channels-out: fp8-channel, 21 linears" in said


def test_the_command_exports_with_text_to_measure_on(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    build("bf16", vocab_size=288).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("Ten green bottles, hanging on the wall. " * 40)
    line = [
        "export",
        "--model",
        str(tmp_path / "model"),
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    assert main([*line, "--format", "fp8-tensor"]) == 2
    assert "--data PATH" in capsys.readouterr().err
    assert (
        main(
            [
                *line,
                "--format",
                "fp8-tensor",
                "--data",
                str(tmp_path / "text.txt"),
                "--seq-len",
                "64",
            ]
        )
        == 0
    )
    assert "fp8-tensor, 21 linears quantized, 1 not" in capsys.readouterr().out
    assert document_of(tmp_path / "out")["quantization_config"]["activation_scheme"] == "static"


def test_an_export_does_not_replace_the_model_that_it_reads(tmp_path: Path) -> None:
    CausalLM(ModelConfig(**SIZES), recipe="bf16", device="cpu").save_pretrained(
        tmp_path / "hub", format="hf"
    )
    before = (tmp_path / "hub" / "model.safetensors").read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "hub")
    for out in ("hub", "link"):
        with pytest.raises(
            UsageError, match="holds the model that is exported, whose weights would be lost"
        ):
            CausalLM.from_pretrained(tmp_path / "hub", recipe="bf16", device="cpu").export(
                tmp_path / out
            )
    assert (tmp_path / "hub" / "model.safetensors").read_bytes() == before


@pytest.mark.filterwarnings("ignore:.*does not read topk_method")
@pytest.mark.parametrize(
    "case", ["deepseek_v3-odd", "deepseek_v3-dense", "glm4_moe_lite-odd", "glm4_moe_lite-dense"]
)
def test_an_export_says_how_experts_are_chosen(case: str, tmp_path: Path) -> None:
    """transformers' files do not, and vLLM then takes softmax scores without the bias of the choice."""
    make_theirs(case, tmp_path / "theirs")
    model = CausalLM.from_pretrained(tmp_path / "theirs", recipe="bf16", device="cpu")
    model.export(tmp_path / "export", format="bf16")
    found = document_of(tmp_path / "export")
    assert (found["topk_method"], found["scoring_func"]) == ("noaux_tc", "sigmoid")
    layers = model.config.num_hidden_layers
    alike = "sparse" if model.config.moe else "dense"
    kinds = model.config.mlp_layer_types or (alike,) * layers
    sparse = [kind == "sparse" for kind in kinds]
    first = found["first_k_dense_replace"]
    assert sparse == [False] * first + [True] * (len(sparse) - first)
    again = CausalLM.from_pretrained(tmp_path / "export", recipe="bf16", device="cpu")
    assert again.config == model.config


@pytest.mark.parametrize(
    "case, keys",
    [
        ("afmoe-experts", dict(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1)),
        ("deepseek_v2-odd", dict(topk_method="greedy", n_group=1, topk_group=1)),
    ],
)
def test_an_export_has_the_keys_without_which_vllm_stops(
    case: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    """transformers writes none of AFMoE's, and no number of groups for DeepSeek-V2 where it has none."""
    make_theirs(case, tmp_path / "theirs")
    model = CausalLM.from_pretrained(tmp_path / "theirs", recipe="bf16", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of who reads the folder
        model.export(tmp_path / "export", format="bf16")
        found = document_of(tmp_path / "export")
        assert {key: found[key] for key in keys} == keys
        again = CausalLM.from_pretrained(tmp_path / "export", recipe="bf16", device="cpu")
    assert again.config == model.config
