"""Emulated serving: linears agree with compressed-tensors, and a format served as trained changes nothing."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from judge import AutoModelForCausalLM
from torch import Tensor, nn

from te_models import CausalLM, ModelConfig
from te_models.cli import main
from te_models.config.moe import MoEConfig
from te_models.data.tokenizer import load_tokenizer
from te_models.errors import UsageError
from te_models.interop.quantized import BLOCK, CHANNEL, MXFP8, NVFP4, WeightStorage
from te_models.model import recipe_fit
from te_models.model.decoder import Decoder
from te_models.serving.formats import FORMATS
from te_models.serving.parity import compare, parity, read_batches, read_ids
from te_models.serving.served import INPUTS, ServedExperts, ServedLinear, read_served

pytest.importorskip("compressed_tensors")

SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=256, intermediate_size=384, num_hidden_layers=3
)
SIZES |= dict(
    num_attention_heads=2, num_key_value_heads=1, head_dim=128, max_position_embeddings=128
)
SIZES |= dict(attention_gate="none")
IDS = torch.arange(4 * 16).reshape(4, 16) % 89
BATCHES = [{"input_ids": IDS[:2], "labels": IDS[:2]}, {"input_ids": IDS[2:], "labels": IDS[2:]}]


def build(
    recipe: str, steps: int = 2, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> CausalLM:
    config = {
        name: options.pop(name)
        for name in list(options)
        if name in ModelConfig.__dataclass_fields__
    }
    torch.manual_seed(1)
    model = CausalLM(
        ModelConfig(**{**SIZES, **config}), recipe=recipe, device="cpu", dtype=dtype, **options
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)  # so that the probabilities are far from uniform
    for _ in range(steps):
        model(IDS, labels=IDS).loss.backward()
    return model.eval()


@pytest.mark.parametrize("format", ["fp8-channel", "mxfp8", "nvfp4"])
def test_linears_compute_what_compressed_tensors_computes(format: str, tmp_path: Path) -> None:
    build("delayed", dtype=torch.float32, attention_bias=True).export(
        tmp_path / "out", format=format
    )
    served = read_served(tmp_path / "out", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dtype = (
            torch.float32 if format == "fp8-channel" else torch.bfloat16
        )  # that of its dequantized weights
        other = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).eval()
        with torch.no_grad():
            other(IDS)  # which decompresses the weights
    ours: Any = served.layers[1].self_attn.qkvg_proj
    theirs: Any = nn.Module.float(other.model.layers[1].self_attn)
    x = torch.randn(1, 24, SIZES["hidden_size"]) * 3
    x[0, 0] = 0
    with torch.no_grad():
        found = ours(x[0])
        expected = torch.cat([getattr(theirs, f"{name}_proj")(x)[0] for name in "qkv"], -1)
    assert isinstance(ours, ServedLinear) and not isinstance(
        served.layers[0].mlp.down_proj, ServedLinear
    )
    # The product of code and two scales of NVFP4 is no BF16 number.
    limit = 2**-8 if format == "nvfp4" else 1e-5
    assert (found - expected).norm() <= limit * expected.norm()
    exact = nn.functional.linear(x[0], ours.weight, ours.bias)
    assert (found - exact).norm() > 0.01 * exact.norm(), "the input was not quantized"


def test_inputs_are_quantized_per_group_and_with_static_scales() -> None:
    x = torch.randn(5, 320) * torch.logspace(-3, 3, 320)
    groups = INPUTS["block"](x, None)
    for start, stop in ((0, 128), (128, 256), (256, 320)):
        part = x[:, start:stop]
        scale = part.abs().amax(1, keepdim=True) / 448
        expected = (part / scale).to(torch.float8_e4m3fn).float() * scale
        torch.testing.assert_close(groups[:, start:stop], expected, rtol=1e-6, atol=0)
    static = INPUTS["static"](x, torch.tensor(0.5))
    assert static.abs().max() == 448 * 0.5
    torch.testing.assert_close(
        static, (x / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.5
    )
    assert INPUTS["none"](x, None) is x


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scheme", [CHANNEL, MXFP8, NVFP4, BLOCK], ids=lambda s: s.activations)
def test_a_product_is_rounded_once(scheme: WeightStorage, biased: bool) -> None:
    """In FP64: of BF16 inputs, after their quantization, and with the bias inside."""
    weight, bias = torch.randn(64, 128), torch.randn(64) * 30 if biased else None
    static, x = torch.tensor(1.0), torch.randn(40, 128).bfloat16()
    found = ServedLinear(weight, bias, scheme, static)(x)
    inputs = INPUTS[scheme.activations](x.float(), static).double()
    exact = inputs @ weight.double().t() + (0 if bias is None else bias.double())
    assert found.dtype == torch.bfloat16
    # Half of the distance of two BF16 numbers, and what FP32 sums differ by.
    error = (found.double() - exact).abs()
    assert (error <= exact.abs() * 2.0**-8 + 1e-4).all()


@pytest.mark.parametrize(
    "scheme", [CHANNEL, MXFP8, NVFP4, BLOCK], ids=lambda scheme: scheme.activations
)
def test_an_expert_without_tokens_adds_no_row(scheme: WeightStorage) -> None:
    """As most have in a model of many experts."""
    linears = [ServedLinear(torch.randn(32, 64), None, scheme, torch.tensor(1.0)) for _ in range(3)]
    x = torch.randn(5, 64)
    found = ServedExperts(linears)(x, [2, 0, 3])
    assert torch.equal(found, torch.cat((linears[0](x[:2]), linears[2](x[2:]))))


def test_more_than_ten_experts_are_served_in_their_order(tmp_path: Path) -> None:
    """A file has the tensors of expert 10 before those of expert 2."""
    moe = MoEConfig(num_experts=12, num_experts_per_tok=2, moe_intermediate_size=32)
    model = build("bf16", steps=0, moe=moe, num_hidden_layers=1, qk_norm=True)
    model.export(tmp_path, format="fp8-channel")
    read, served = CausalLM.from_pretrained(tmp_path, device="cpu"), read_served(tmp_path, "cpu")
    experts: Any = served.get_submodule("layers.0.mlp.down_proj")
    for number, linear in enumerate(experts.linears):
        expected = read.get_parameter(f"layers.0.mlp.down_proj.weight{number}")
        torch.testing.assert_close(linear.weight, expected.float(), rtol=2**-8, atol=0)


@pytest.mark.parametrize(("recipe", "format"), [("bf16", "bf16"), ("mxfp8", "mxfp8")])
def test_a_model_served_as_it_trained_has_the_same_bits(recipe: str, format: str) -> None:
    model = build(recipe)
    rows = parity(model, model.origin, [format, "nvfp4"], BATCHES).rows
    assert [row.export for row in rows] == [format, "nvfp4"] and rows[0].trained_loss > 1
    assert rows[0].kl == rows[0].largest == 0 and rows[0].agreement == 1
    assert rows[1].kl > 1e-4 and rows[1].largest > 0.01


@pytest.mark.parametrize(
    ("recipe", "format"),
    [
        ("blockwise", "fp8-block"),
        pytest.param("delayed", "fp8-tensor", marks=pytest.mark.slow),
    ],
)
def test_the_format_of_the_recipe_differs_least(recipe: str, format: str) -> None:
    more = dict(use_f32_scales=True) if recipe == "blockwise" else {}
    model = build(recipe, dtype=torch.float32, **more)
    rows = {row.export: row.kl for row in parity(model, model.origin, [], BATCHES).rows}
    assert rows.pop(format) < min(rows.values()) / 3


def test_divergence_is_that_of_torch(tmp_path: Path) -> None:
    one, other = build("bf16", dtype=torch.float32), build("bf16", dtype=torch.float32)
    with torch.no_grad():
        other.layers[1].mlp.down_proj.weight.mul_(1.5)
    labels = IDS.clone()
    labels[:, :4] = -100
    found = compare(one, other, [{"input_ids": IDS, "labels": labels}])
    with torch.no_grad():
        p, q = (model(IDS).logits[:, 3:-1].log_softmax(-1).flatten(0, 1) for model in (one, other))
    assert len(p) == 4 * 12
    divergence = nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    loss = nn.functional.nll_loss(q, IDS[:, 4:].flatten())
    expected = (
        divergence.mean(),
        divergence.max(),
        (p - q).abs().max(),
        (p.argmax(-1) == q.argmax(-1)).float().mean(),
    )
    values = (found.kl, found.largest_kl, found.largest, found.agreement)
    torch.testing.assert_close(torch.tensor(values), torch.stack(expected), rtol=1e-4, atol=1e-7)
    assert found.served_loss == pytest.approx(loss.item(), rel=1e-5) and found.kl > 1e-3


def test_parity_leaves_the_model_as_it_was() -> None:
    model = build("delayed").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scale = model.layers[1].mlp.down_proj.fp8_meta["scaling_fwd"].scale.clone()
    result = parity(model, model.origin, [], BATCHES)
    assert [row.export for row in result.rows] == list(FORMATS) and not any(
        row.reason for row in result.rows
    )
    assert result.tokens == 4 * 15 and "nvfp4" in str(result)
    assert model.training and torch.equal(
        scale, model.layers[1].mlp.down_proj.fp8_meta["scaling_fwd"].scale
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    nvfp4, channel = result.rows[4], result.rows[2]
    assert nvfp4.kl > channel.kl > 0, "four bits differ more than eight"


def test_sizes_that_a_format_does_not_allow_have_a_reason() -> None:
    model = build("bf16", steps=0, intermediate_size=176)
    rows = {row.export: row for row in parity(model, model.origin, [], BATCHES).rows}
    assert "no multiple of 32" in rows["mxfp8"].reason and rows["fp8-tensor"].reason == ""
    assert "no multiple of 32" in str(parity(model, model.origin, [], BATCHES))
    with pytest.raises(UsageError, match="no multiple of 32"):
        parity(model, model.origin, ["mxfp8"], BATCHES)


def test_static_scales_of_fused_weights_are_the_largest(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    build("delayed").export(tmp_path / "out", format="fp8-tensor")
    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.input_scale"] = torch.tensor(7.0)
    save_file(tensors, file, metadata={"format": "pt"})
    served: Decoder = read_served(tmp_path / "out", "cpu")
    linear: Any = served.layers[1].self_attn.qkvg_proj
    static: Tensor = linear.static
    assert static.item() == 7.0


@pytest.mark.parametrize("asked", [[], ["--recipe", "auto"]])
def test_what_is_quantized_does_not_depend_on_this_machine(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A model without a recipe of its own is exported from BF16, all of its layers; one with a recipe follows it."""
    monkeypatch.setattr(
        recipe_fit, "auto_recipe", lambda *shape, **place: pytest.fail("it asked for the GPU")
    )
    build("current", vocab_size=288).save_pretrained(tmp_path / "te")
    build("current", vocab_size=288).save_pretrained(tmp_path / "hf", format="hf")
    found = []
    for name in ("te", "hf"):
        line = [
            "export",
            "--model",
            str(tmp_path / name),
            "--out",
            str(tmp_path / f"{name}-out"),
            "--device",
            "cpu",
        ]
        assert main([*line, *asked]) == 0
        found.append(int(capsys.readouterr().out.split("fp8-block, ")[1].split()[0]))
    own, layers = found[0], build("current", vocab_size=288).config.num_hidden_layers
    assert own * layers == found[1] * (layers - 2)


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    build("current", vocab_size=288).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("Ten green bottles, hanging on the wall. " * 40)
    line = [
        "parity",
        "--model",
        str(tmp_path / "model"),
        "--data",
        str(tmp_path / "text.txt"),
        "--device",
        "cpu",
    ]
    line += ["--seq-len", "32", "--batches", "2"]
    assert (
        main(
            [
                "export",
                "--model",
                str(tmp_path / "model"),
                "--out",
                str(tmp_path / "out"),
                "--device",
                "cpu",
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert main([*line, "--export", str(tmp_path / "out"), "--export", "fp8-block", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    folder, format = result["exports"]
    assert result["tokens"] == 62 and folder["export"] == str(tmp_path / "out")
    assert {**folder, "export": ""} == {**format, "export": ""} and format["kl"] > 0
    assert main([*line, "--export", "fp8-block"]) == 0
    said = capsys.readouterr().out
    assert "KL (nats" in said and "trained against served, on 62 tokens" in said
    rows = [
        dict(q=[dict(role="user", content=f"{n}?")], a=[dict(role="assistant", content="yes")])
        for n in range(9)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line[line.index("--data") + 1] = str(
        tmp_path / "talks.jsonl"
    )  # the model's tokenizer has no chat template
    line += ["--columns", "prompt=q,completion=a"]
    assert main([*line, "--export", "fp8-block"]) == 2
    assert "--truncate prompt" in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main([*line, "--truncate", "prompt", "--export", "fp8-block"]) == 0
    printed = capsys.readouterr()
    assert "KL (nats" in printed.out and "9 of 9 prompts are cut" in printed.err
    line[line.index("--seq-len") + 1] = "64"
    assert main([*line, "--export", "fp9"]) == 2
    assert "fp9 is neither a format" in capsys.readouterr().err
    build("current", vocab_size=320).export(tmp_path / "other", format="bf16")
    assert main([*line, "--export", str(tmp_path / "other")]) == 2
    assert "they are two models" in capsys.readouterr().err


def test_records_are_judged_one_by_one(tmp_path: Path) -> None:
    """Records that share a window do not see each other, nor does their loss or their calibration."""
    records = [
        {"prompt": f"{word} " * times, "completion": word.upper()}
        for times, word in enumerate(["red", "green", "blue", "white"], start=1)
    ]
    data = tmp_path / "records.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    model = build("bf16", vocab_size=288, dtype=torch.float32)
    words = load_tokenizer(None)
    losses = []
    lengths = []
    for record in records:
        prompt = words.encode(record["prompt"])
        answer = [*words.encode(record["completion"]), words.eos_token_id]
        ids = torch.tensor([prompt + answer])
        lengths.append(ids.shape[1])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        losses += nn.functional.cross_entropy(
            logits, torch.tensor(answer), reduction="none"
        ).tolist()
    batches = read_batches(model, str(data), None, count=8, seq_len=96)
    assert len(batches) == 1, "all four in one window"
    found = compare(model, model, batches)
    assert found.trained_loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found.kl == 0
    assert [ids.shape[1] for ids in read_ids(batches)] == lengths
    with pytest.warns(UserWarning, match="1 of 4 records is longer than seq_len=24"):
        read_batches(model, str(data), None, count=8, seq_len=24)


def test_one_export_needs_no_list() -> None:
    model = CausalLM.from_preset(
        "gated-nano",
        recipe="bf16",
        device="cpu",
        num_attention_heads=1,
        num_key_value_heads=1,
        hidden_size=128,
        intermediate_size=128,
    )
    ids = torch.arange(16)[None]
    batches = [dict(input_ids=ids, labels=ids)]
    found = parity(model, model.origin, "fp8-block", batches)
    assert [row.export for row in found.rows] == ["fp8-block"]
    with pytest.raises(UsageError, match="export fp8 is neither a format"):
        parity(model, model.origin, "fp8", batches)
