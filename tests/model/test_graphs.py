"""The graphs that torch.export, ONNX and torch.compile make of a model in BF16 compute what the model computes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer import every
from torch import Tensor

from te_models import CausalLM, ModelConfig, TEModelsForCausalLM
from te_models.errors import UsageError

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torch 2.10 cannot trace the models as one graph"
)
SIZES: dict[str, Any] = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2,
)  # fmt: skip
GEMMA: dict[str, Any] = dict(
    attention_gate="none", norm_position="both", zero_centered_norm=True, hidden_act="gelu_pytorch_tanh",
    embedding_multiplier=5.65, attn_logit_softcapping=20.0, final_logit_softcapping=9.0, sliding_window=4,
    layer_types=("sliding_attention", "full_attention"), attention_multiplier=0.3, tie_word_embeddings=True,
    num_hidden_layers=2,
)  # fmt: skip
LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1.0] * 4,
    long_factor=[2.0, 3.0, 4.0, 5.0],
    original_max_position_embeddings=8,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "gated": dict(tie_word_embeddings=True),
    "headwise": dict(
        attention_gate="headwise", attention_bias=True, mlp_bias=True, attention_output_bias=True
    ),
    "qwen3-longrope": dict(attention_gate="none", qk_norm=True, rope_scaling=LONGROPE),
    "mistral-wide": dict(
        attention_gate="none", sliding_window=5, hidden_size=512
    ),  # norms of 512 have their own kernel
    "gemma2": GEMMA,
    "deepseek_v3": dict(
        attention_gate="none",
        num_key_value_heads=4,
        rope_interleaved=True,
        latent_attention=dict(
            q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12
        ),
    ),
    "gemma3": {
        **GEMMA,
        "attn_logit_softcapping": None,
        "qk_norm": True,
        "sliding_rope": dict(rope_theta=500.0),
    },
    "sinks": {**GEMMA, "attn_logit_softcapping": None, "attention_sinks": True},
}
QUICK = every(len(CONFIGS), CONFIGS)


def build(name: str, dtype: torch.dtype) -> CausalLM:
    torch.manual_seed(1)
    config = ModelConfig(**{**SIZES, **CONFIGS[name]})
    return CausalLM(config, engine="emulated", device="cpu", dtype=dtype).eval()


def tokens(batch: int, seq: int) -> Tensor:
    return torch.randint(0, 97, (batch, seq), generator=torch.Generator().manual_seed(seq))


def padding(ids: Tensor) -> Tensor:
    """A mask with padding on the left of every row but the first."""
    mask = torch.ones_like(ids)
    for row in range(len(ids)):
        mask[row, :row] = 0
    return mask


def assert_close(found: Tensor, model: CausalLM, ids: Tensor, mask: Tensor | None = None) -> None:
    """Logits of the graph differ from the model's by what adding in another order and rounding again can make."""
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    assert found.dtype == expected.dtype and found.shape == expected.shape
    real = slice(None) if mask is None else mask.bool()
    error = (found[real].float() - expected[real].float()).norm() / expected[real].float().norm()
    units = (
        2 if model.dtype == torch.bfloat16 else 32
    )  # of rounding: graphs add in another order in FP32
    assert error < units * torch.finfo(model.dtype).eps, f"relative difference {error:.1e}"


def dynamic(mask: bool) -> dict[str, Any]:
    sizes = {
        0: torch.export.Dim("batch"),
        1: torch.export.Dim("seq", max=SIZES["max_position_embeddings"]),
    }
    return dict(input_ids=sizes, **({"attention_mask": sizes} if mask else {}))


@pytest.mark.parametrize(
    "mask", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "mask"]
)
@pytest.mark.parametrize("name", QUICK)
def test_export(name: str, mask: bool) -> None:
    model = build(name, torch.float32 if mask else torch.bfloat16)
    ids = tokens(3, 12)
    given = dict(attention_mask=padding(ids)) if mask else {}
    program = torch.export.export(model, (ids,), given, dynamic_shapes=dynamic(mask)).module()
    for shape in ((3, 12), (2, 7), (5, 32)):
        ids = tokens(*shape)
        given = dict(attention_mask=padding(ids)) if mask else {}
        assert_close(program(ids, **given).logits, model, ids, given.get("attention_mask"))


@pytest.mark.slow
def test_strict_export_is_saved_with_its_output(tmp_path: Path) -> None:
    model, ids = build("gemma2", torch.bfloat16), tokens(2, 9)
    with pytest.warns(UserWarning, match="side effects"):  # te.Linear notes the dtype of its input
        program = torch.export.export(model, (ids,), strict=True)
    torch.export.save(program, tmp_path / "model.pt2")
    found = torch.export.load(tmp_path / "model.pt2").module()(ids)
    assert type(found) is type(model(ids)) and found.loss is None
    assert_close(found.logits, model, ids)


@pytest.mark.slow
def test_export_from_cold(tmp_path: Path) -> None:
    """Nothing that the first eager forward pass prepares is needed, and nothing of the graph stays behind."""
    code = (
        "import sys, torch; sys.path[:0] = sys.argv[1:]; import test_graphs as t\n"
        "for name in ('mistral-wide', 'qwen3-longrope'):\n"
        "    model, ids = t.build(name, torch.bfloat16), t.tokens(2, 9)\n"
        "    graph = torch.export.export(model, (ids,)).module()\n"
        "    t.assert_close(graph(ids).logits, model, ids)\n"
    )
    here = Path(__file__)
    subprocess.run(
        [sys.executable, "-c", code, *map(str, here.parents[:3])], check=True, timeout=300
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the exporter, about itself
@pytest.mark.parametrize("name", list(CONFIGS)[::2])
def test_onnx(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, ids, file = build(name, torch.float32), tokens(3, 12), tmp_path / "model.onnx"
    given, names = dict(attention_mask=padding(ids)), ["input_ids", "attention_mask"]
    torch.onnx.export(
        model, (ids,), file, kwargs=given, dynamo=True, dynamic_shapes=dynamic(True), input_names=names,
        output_names=["logits"], verbose=False,
    )  # fmt: skip
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for shape in ((3, 12), (2, 7)):
        ids = tokens(*shape)
        (logits,) = session.run(
            None, dict(input_ids=ids.numpy(), attention_mask=padding(ids).numpy())
        )
        assert_close(torch.from_numpy(logits), model, ids, padding(ids))


@pytest.fixture
def compiler() -> Iterator[None]:
    """Room for new graphs, and none left afterwards."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # said of torch's own tracing
@pytest.mark.parametrize("name", list(CONFIGS)[1::2])
def test_compile_in_one_graph(name: str, compiler: None) -> None:
    """backend="eager" runs the graph's own operations, which are the model's."""
    model, ids = build(name, torch.bfloat16), tokens(2, 9)
    graph = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = graph(ids).logits
        assert torch.equal(found, model(ids).logits)
        assert_close(graph(ids, attention_mask=padding(ids)).logits, model, ids, padding(ids))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("code", ["wrapper", "remote code"])
def test_export_as_a_model_of_transformers(code: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.14")
    own = build("gated", torch.float32)
    if code == "wrapper":
        model = TEModelsForCausalLM.wrap(own).eval()
    else:
        own.save_pretrained(tmp_path, format="hf")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, trust_remote_code=True
        ).eval()
    ids = tokens(3, 12)
    given = dict(input_ids=ids, attention_mask=padding(ids), use_cache=False)
    program = torch.export.export(
        model, (), given, dynamic_shapes=dynamic(True) | dict(use_cache=None)
    ).module()
    ids = tokens(2, 7)
    found = program(input_ids=ids, attention_mask=padding(ids), use_cache=False).logits
    assert_close(found, own, ids, padding(ids))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_training_in_one_graph(compiler: None) -> None:
    model, ids = build("gated", torch.bfloat16).train(), tokens(2, 8)
    losses, gradients = [], []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss = run(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert torch.equal(*losses)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_fp8_recipe_says_why_it_makes_no_single_graph(whole: bool, compiler: None) -> None:
    model, ids = build("gated", torch.bfloat16), tokens(2, 16)
    model.set_recipe("current", num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    compiled: Any = torch.compile(model, fullgraph=whole, backend="eager")
    with torch.no_grad():
        if not whole:
            assert torch.equal(compiled(ids).logits, model(ids).logits)
            return
        with pytest.raises(
            RuntimeError, match="Message: a model under an FP8 recipe does not make one graph.*bf16"
        ):
            compiled(ids)
    with pytest.raises(UsageError, match="^a model under an FP8 recipe does not make one graph"):
        torch.export.export(model, (), dict(input_ids=ids))


@pytest.mark.slow
@torch.no_grad()
def test_a_hybrid_is_one_graph_of_one_length() -> None:
    """Its scan over chunks is unrolled, so a program is of one length, and of any batch."""
    place: dict[str, Any] = dict(
        device="cpu", engine="emulated", recipe="bf16", dtype=torch.float32
    )
    model = CausalLM.from_preset("gated-hybrid-nano", **place).eval()
    ids = torch.randint(0, 256, (3, 70), generator=torch.Generator().manual_seed(0))
    wanted = model(ids).logits
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids).logits, wanted, atol=1e-5, rtol=0)
    batch = {0: torch.export.Dim("batch", min=1, max=8)}
    program: Any = torch.export.export(
        model, (ids[:2],), dynamic_shapes=dict(input_ids=batch)
    ).module()
    torch.testing.assert_close(program(ids).logits, wanted, atol=1e-5, rtol=0)
