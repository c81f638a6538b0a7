"""Options by which families differ: under every recipe, recomputed, packed, padded, saved and in generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fewer import every
from torch import Tensor

from te_models import CausalLM, list_recipes
from te_models.errors import UsageError
from te_models.fp8.scaling_state import fp8_state

SHAPE: dict[str, Any] = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
)  # fmt: skip
WINDOW: dict[str, Any] = dict(
    sliding_window=5, layer_types=("sliding_attention", "full_attention", "sliding_attention")
)
OPTIONS: dict[str, dict[str, Any]] = {
    "Granite": dict(
        attention_gate="none", embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0,
        attention_multiplier=0.2,
    ),
    "OLMo 3": dict(
        attention_gate="none", norm_position="post", qk_norm=True, qk_norm_scope="all_heads", **WINDOW,
        sliding_rope=dict(rope_theta=100.0),
    ),
    "GLM-4": dict(
        attention_gate="none", norm_position="both", rope_interleaved=True, partial_rotary_factor=0.5,
        attention_bias=True,
    ),
    "Gemma 2": dict(
        attention_gate="none", norm_position="both", zero_centered_norm=True, hidden_act="gelu_pytorch_tanh",
        attn_logit_softcapping=3.0, final_logit_softcapping=4.0, embedding_multiplier=8.0, tie_word_embeddings=True,
        **WINDOW,
    ),
    "AFM": dict(attention_gate="none", hidden_act="relu2", mlp_gate=False),
    "Laguna": dict(attention_gate="headwise", attention_gate_activation="softplus", qk_norm=True),
    "Ministral 3": dict(query_scale_beta=0.3, query_scale_length=4),
    "biases": dict(attention_bias=True, attention_output_bias=True, mlp_bias=True, hidden_act="gelu"),
    "gated, capped, post": dict(
        norm_position="post", attn_logit_softcapping=2.0, mlp_bias=True, mlp_gate=False, attention_output_bias=True,
        logits_scaling=3.0,
    ),
}  # fmt: skip
EDGES: dict[str, Any] = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)


def build(name: str, recipe: str = "bf16", **options: Any) -> CausalLM:
    torch.manual_seed(2)
    edges = EDGES if recipe != "bf16" else {}
    model = CausalLM.from_preset(
        "gated-nano", **{**SHAPE, **OPTIONS[name], **edges, **options}, recipe=recipe, engine="emulated", device="cpu"
    )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    return model


def ids(rows: int = 2, length: int = 23, seed: int = 1) -> Tensor:
    """Rows that can be learned: each token is the one before plus a constant of the row."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 64, (rows, 1), generator=generator)
    stride = torch.randint(1, 5, (rows, 1), generator=generator)
    return (start + stride * torch.arange(length)) % 64


def gradients(model: CausalLM, tokens: Tensor, **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(tokens, labels=tokens, return_logits=False, **options).loss
    assert loss is not None
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(("name", "recipe"), every(6, OPTIONS, list_recipes()))
def test_every_recipe_trains_it(name: str, recipe: str) -> None:
    model, losses = build(name, recipe), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(4):
        found = gradients(model, ids(seed=step % 2))
        assert found.keys() == {"loss", *(n for n, _ in model.named_parameters())}, "every parameter has a gradient"
        assert all(bool(tensor.isfinite().all()) for tensor in found.values())
        losses.append(found["loss"].item())
        optimizer.step()
    assert losses[-1] < losses[1] < losses[0] + 0.1


@pytest.mark.parametrize(("name", "recipe"), every(3, OPTIONS, ["bf16", "delayed", "current"]))
def test_recompute_changes_no_bit(name: str, recipe: str) -> None:
    wanted = gradients(build(name, recipe), ids())
    for mode in ("selective", "full", 2):
        model = build(name, recipe, activation_checkpointing=mode)
        same_bits(gradients(model, ids()), wanted)
    same_bits(gradients(build(name, recipe, activation_offload=True), ids()), wanted)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_loss_without_logits_is_the_one_with_them(name: str) -> None:
    """Two routes through the head: autograd over all logits, and chunks that write their gradient themselves."""
    model, tokens = build(name, dtype=torch.float32), ids()
    chunked = gradients(model, tokens)
    model.zero_grad()
    output = model(tokens, labels=tokens)
    output.loss.backward()
    assert output.logits.shape == (2, 23, 64)
    for key, tensor in chunked.items():
        reference = output.loss if key == "loss" else model.get_parameter(key).grad
        torch.testing.assert_close(tensor, reference, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_packed_documents_are_rows_of_their_own(name: str) -> None:
    model = build(name, dtype=torch.float32).eval()
    lengths = (9, 5, 12)
    tokens = [ids(1, length, seed=length) for length in lengths]
    documents = torch.cat([torch.full((1, length), number) for number, length in enumerate(lengths)], 1)
    packed = model(torch.cat(tokens, 1), document_ids=documents).logits
    alone = torch.cat([model(one).logits for one in tokens], 1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_text_is_the_same_with_a_cache(name: str) -> None:
    model = build(name, dtype=torch.float32).eval()
    tokens, mask = ids(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    with_cache = model.generate(tokens, 12, attention_mask=mask)
    assert torch.equal(with_cache, model.generate(tokens, 12, attention_mask=mask, use_cache=False))
    cache, full = model.new_cache(3, 9), model(tokens).logits
    steps = [model(part, cache=cache).logits for part in tokens.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), full, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_padding_stays_zero(name: str, recipe: str) -> None:
    """Rows that fill up the alignment, and padding inside the batch, reach no GEMM and so no amax and no gradient."""
    model, tokens, mask = build(name, recipe), ids(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    seen: dict[str, Tensor] = {}

    def note(module: torch.nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        seen[names[module]] = inputs[0]
        inputs[0].register_hook(lambda slope: seen.__setitem__(names[module] + " gradient", slope))

    names = {module: name for name, module in model.named_modules() if isinstance(module, model.te.Linear)}
    for module in names:
        module.register_forward_hook(note)
    loss = model(tokens * mask, labels=tokens, attention_mask=mask).loss
    loss.backward()
    assert len(seen) == 2 * len(names)
    for where, tensor in seen.items():
        padding = torch.cat((mask.flatten() == 0, torch.ones(len(tensor) - 27, dtype=torch.bool)))
        assert not bool(tensor[padding].any()) and bool(tensor[~padding].any()), where


@pytest.mark.parametrize(("name", "weights"), every(4, OPTIONS, ["delayed", "delayed FP8", "current FP8", "bf16"]))
def test_a_folder_gives_it_back(name: str, weights: str, tmp_path: Path) -> None:
    recipe, fp8_params = weights.split()[0], weights.endswith("FP8")
    model = build(name, recipe, fp8_params=fp8_params)
    gradients(model, ids())
    model.save_pretrained(tmp_path)
    again = CausalLM.from_pretrained(tmp_path, engine="emulated", device="cpu")
    assert again.config == model.config and again.fp8_params == fp8_params
    same_bits(fp8_state(again), fp8_state(model))
    same_bits(gradients(again, ids(seed=5)), gradients(model, ids(seed=5)))


def test_the_plan_says_what_fused_kernels_do_not_compute() -> None:
    notes = {name: " ".join(build(name).plan().notes) for name in OPTIONS}
    assert "attn_logit_softcapping" in notes["Gemma 2"] and "hidden_act" in notes["Gemma 2"]
    assert "attention_multiplier" in notes["Granite"] and "MLP" not in notes["Granite"]
    assert "attention_gate_activation" in notes["Laguna"] and "rope_interleaved" in notes["GLM-4"]
    assert "mlp_bias" in notes["biases"] and "attention" not in notes["biases"]
    assert "query_scale_beta" in notes["Ministral 3"] and "mlp_gate" in notes["AFM"]
    assert notes["Gemma 2"].split(":")[0] in str(build("Gemma 2").plan())
    plain = CausalLM.from_preset("gated-nano", device="meta", engine="emulated")
    assert plain.plan().notes == () and "separate" not in str(plain.plan())


@pytest.mark.parametrize("name", OPTIONS)
def test_fused_kernels_are_avoided_where_unsupported(name: str) -> None:
    """On a CPU `fused` takes the plain twin of the fused attention, which knows none of these options."""
    fused, plain = (gradients(build(name, dtype=torch.float32, fused=fused), ids()) for fused in (True, False))
    for key, tensor in fused.items():
        torch.testing.assert_close(tensor, plain[key], atol=1e-6, rtol=1e-4)


def test_a_gate_is_not_added_where_it_would_change_the_output(tmp_path: Path) -> None:
    build("AFM").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="softplus"):
        CausalLM.from_pretrained(
            tmp_path, attention_gate="headwise", attention_gate_activation="softplus", engine="emulated", device="cpu"
        )
    model = CausalLM.from_pretrained(tmp_path, attention_gate="headwise", engine="emulated", device="cpu").eval()
    plain = CausalLM.from_pretrained(tmp_path, engine="emulated", device="cpu").eval()
    assert torch.equal(model(ids()).logits, plain(ids()).logits)
