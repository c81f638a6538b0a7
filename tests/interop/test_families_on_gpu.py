"""Families on Transformer Engine and fused kernels, against transformers in FP32 and against the emulated engine."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_tensors
from families import DEFAULT, DENSE_LAGUNA, FULL, HALF, SLIDING
from judge import transformers
from places import DEVICE, EMULATED, PLACE
from safetensors.torch import load_file
from torch import Tensor

from te_models import CausalLM, get_recipe
from te_models.fp8.primary_weights import quantized_weights
from te_models.planning.memory_plan import plan_memory
from te_models.training.cuda_graph import WARM_UP, GraphedStep

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = dict(
    vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=4, head_dim=64
)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
SIZES |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
GATE: dict[str, Any] = dict(
    DENSE_LAGUNA, mlp_layer_types=["dense"] * 4, gating="per-head", layer_types=[FULL] * 4
)
GATE |= dict(
    rope_parameters=dict(full_attention={**HALF, "rope_type": "default"}, sliding_attention=DEFAULT)
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bias": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "gelu": ("llama", dict(hidden_act="gelu_pytorch_tanh")),
    "relu2": ("arcee", {}),
    "softplus-gate": ("laguna", GATE),
    "post-norms": ("olmo2", {}),
    "softcaps": ("gemma2", dict(query_pre_attn_scalar=64, sliding_window=48, attn_logit_softcapping=2.0,
                                layer_types=[SLIDING, FULL] * 2)),
    "sinks": ("gpt_oss", dict(sliding_window=48, num_local_experts=3, num_experts_per_tok=3,
                              rope_parameters=DEFAULT)),  # all experts, since a rounding may choose others
    "partial-rotary": ("glm4", dict(rope_parameters=dict(rope_theta=10000.0, partial_rotary_factor=0.5))),
    # Heads of 192 channels, with values of 128.
    "latent": ("deepseek_v3", dict(num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=128, first_k_dense_replace=4)),
    "fused-rows": ("phi3", dict(rope_parameters=HALF)),
    "layer-norms": ("cohere2", dict(sliding_window=48, layer_types=[SLIDING, FULL] * 2, logit_scale=0.5)),
    "chunks": ("llama4_text", dict(attention_chunk_size=48, intermediate_size_mlp=384, moe_layers=[1, 3],
                                   num_local_experts=3, num_experts_per_tok=3, floor_scale=20)),
}  # fmt: skip
IDS = torch.randint(0, 512, (2, 160), generator=torch.Generator().manual_seed(4))
IDS = IDS // (1 + IDS % 5)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """A function that gives transformers' FP32 model of a case, and its folder."""
    made: dict[str, tuple[Any, Path]] = {}

    def make(case: str) -> tuple[Any, Path]:
        if case not in made:
            family, fields = CASES[case]
            if family not in transformers.CONFIG_MAPPING:
                pytest.skip(f"transformers {transformers.__version__} has no {family}")
            fields = copy.deepcopy({**SIZES, **fields})
            if family == "phi3":
                del fields["head_dim"]
            torch.manual_seed(7)
            config = transformers.AutoConfig.for_model(family, **fields)
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager"
            )
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    norm = parameter.ndim == 1 and "bias" not in name
                    centre = 1.0 if norm and parameter.abs().max() else 0.0
                    parameter.copy_(
                        centre
                        + torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.06)
                    )
            folder = tmp_path_factory.mktemp(case)
            model.save_pretrained(folder)
            made[case] = model.to(DEVICE).train(), folder
        return made[case]

    return make


def step(model: Any, times: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of the last of several equal passes, which give delayed scaling its scales."""
    ids = IDS.to(DEVICE)
    found: Any = None
    for _ in range(times):
        model.zero_grad()
        found = model(input_ids=ids, labels=ids)
        found.loss.backward()
    return found.logits.detach().float(), {
        n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None
    }


def apart(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The distance of gradients, relative to their norm."""
    assert found.keys() == truth.keys()
    gap = torch.stack([(found[name] - tensor).norm() for name, tensor in truth.items()]).norm()
    return float(gap / torch.stack([tensor.norm() for tensor in truth.values()]).norm())


@pytest.mark.parametrize("case", CASES)
def test_bf16_is_as_near_to_fp32_as_that_of_transformers(
    case: str, judged: Callable[..., Any]
) -> None:
    judge, folder = judged(case)
    model = CausalLM.from_pretrained(folder, dtype=torch.bfloat16, recipe="bf16", **PLACE).train()
    truth, wanted = step(judge)
    theirs, rounded = step(copy.deepcopy(judge).to(torch.bfloat16))
    ours = step(model)[0]
    usual = (theirs - truth).norm() / truth.norm()
    assert truth.std() > 0.1 and usual < 0.05, "a comparison that would prove nothing"
    assert (ours - truth).norm() / truth.norm() <= 1.25 * usual
    # Both have the embedding under one name.
    name = "embed_tokens.weight"
    gap = (dict(model.named_parameters())[name].grad.float() - wanted[f"model.{name}"]).norm()
    assert gap <= 1.25 * (rounded[f"model.{name}"] - wanted[f"model.{name}"]).norm()


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
@pytest.mark.parametrize("case", CASES)
def test_a_native_step_is_as_near_to_fp32_as_an_emulated_one(
    case: str, recipe: str, judged: Callable[..., Any]
) -> None:
    """Fused and compiled against plain PyTorch; both have the errors of FP8, and of BF16 in different places."""
    folder = judged(case)[1]
    plain: dict[str, Any] = dict(**EMULATED, compile=False, fused=False)
    exact = CausalLM.from_pretrained(folder, dtype=torch.float32, recipe="bf16", **plain).train()
    emulated = CausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, recipe=recipe, **plain
    ).train()
    native = CausalLM.from_pretrained(folder, dtype=torch.bfloat16, recipe=recipe, **PLACE).train()
    (truth, wanted), (usual, expected), (ours, found) = (
        step(model, 3) for model in (exact, emulated, native)
    )
    assert (ours - truth).norm() <= 1.2 * (usual - truth).norm()
    assert apart(found, wanted) <= 1.2 * apart(expected, wanted) < 0.6


@pytest.mark.parametrize("size", ["gemma2", "olmo2", "deepseek_v3"])
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_memory_is_as_planned(size: str, recipe: str, tmp_path: Path) -> None:
    """Peaks of real widths, within the 5 % that the plan's verdict leaves."""
    fields = dict(
        SIZES,
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=16,
        head_dim=128,
    )
    fields |= dict(num_key_value_heads=8, max_position_embeddings=2048)
    if DEVICE == "cpu":
        fields |= dict(
            hidden_size=256, intermediate_size=512, num_attention_heads=2, num_key_value_heads=1
        )
    if size == "deepseek_v3":
        fields |= dict(
            num_key_value_heads=fields["num_attention_heads"], head_dim=64, first_k_dense_replace=4
        )
    config = transformers.AutoConfig.for_model(size, **fields)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        tmp_path
    )
    gc.collect()  # the graphs of cases before, whose memory would be counted here and freed later
    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    model = CausalLM.from_pretrained(tmp_path, recipe=recipe, **PLACE).train()
    plan = plan_memory(model.config, get_recipe(recipe), batch_size=4, seq_len=2048, optimizer=None)
    if DEVICE == "cpu":
        return
    ids = torch.randint(0, 32000, (4, 2048), device=DEVICE)
    run = GraphedStep(model)
    run(input_ids=ids, labels=ids)  # compiling takes memory of its own
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP - 1):
        run(input_ids=ids, labels=ids)
    measured = torch.cuda.max_memory_allocated() - before
    assert plan.peak.total == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("scales", [False, True])
def test_fp8_blocks_are_read_trained_and_written_natively(scales: bool, tmp_path: Path) -> None:
    """Data and scales of a checkpoint stay in every bit, and are those that the emulated engine has."""
    torch.manual_seed(3)
    edges: dict[str, Any] = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    shape = dict(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=512,
    )
    source = CausalLM.from_preset(
        "qwen3-0.6b", recipe="bf16", num_key_value_heads=1, head_dim=128, **shape, **EMULATED
    )
    source.export(tmp_path / "in", format="fp8-block")
    how: dict[str, Any] = dict(recipe="blockwise", fp8_params=True, use_f32_scales=scales, **edges)
    native = CausalLM.from_pretrained(tmp_path / "in", **how, **PLACE)
    emulated = CausalLM.from_pretrained(tmp_path / "in", **how, device="cpu", engine="emulated")
    wanted = quantized_weights(emulated)
    assert wanted
    assert_same_tensors(quantized_weights(native), wanted)
    native.export(tmp_path / "out", format="fp8-block")
    assert_same_tensors(
        *(load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    )
    ids = IDS.to(DEVICE)
    native.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in native.parameters())
