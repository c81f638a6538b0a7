"""Attention in a model: masks of documents, and one operation where kernels compute all that it asks for."""

import pytest
import torch
from kinds import KINDS, OPTIONS, assert_close, build, gradients, tokens

from te_models import CausalLM
from te_models.kernels.sdpa import attention_mask


def test_mask_and_window_stay_inside_a_document() -> None:
    mask = attention_mask(5, 2, None, torch.tensor([[3, 3, 3, 1, 1]]), torch.device("cpu"))
    assert mask is not None and mask.int().tolist() == [
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]]
    ]


def test_the_plan_says_what_fused_kernels_do_not_compute() -> None:
    notes = {name: " ".join(build(KINDS[name]).plan().notes) for name in OPTIONS}
    assert "attn_logit_softcapping" in notes["Gemma 2"] and "hidden_act" in notes["Gemma 2"]
    assert "attention_multiplier" in notes["Granite"] and "MLP" not in notes["Granite"]
    assert "attention_gate_activation" in notes["Laguna"] and "rope_interleaved" in notes["GLM-4"]
    assert "mlp_bias" in notes["biases"] and "attention" not in notes["biases"]
    assert "query_scale_beta" in notes["Ministral 3"] and "mlp_gate" in notes["AFM"]
    assert notes["Gemma 2"].split(":")[0] in str(build(KINDS["Gemma 2"]).plan())
    plain = CausalLM.from_preset("gated-nano", device="meta", engine="emulated")
    assert plain.plan().notes == () and "separate" not in str(plain.plan())


FUSED = ("attention", "headwise gate", "experts")  # of which attention is one operation


@pytest.mark.parametrize("name", [*FUSED, *OPTIONS, "sliding", "sinks, biased experts", "linear attention"])
@pytest.mark.parametrize("recipe", ["bf16", pytest.param("delayed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_a_model_with_fused_kernels_is_the_model_without(name: str, recipe: str, mode: str) -> None:
    """On a CPU `fused` takes the plain twin of the fused attention, which knows none of the options that avoid it."""
    found = []
    for fused in (False, True):
        model = build(KINDS[name], recipe, dtype=torch.float32, fused=fused, activation_checkpointing=mode)
        loss = model(tokens(model), labels=tokens(model)).loss
        loss.backward()
        found.append({"loss": loss.detach()} | gradients(model))
    for key, tensor in found[0].items():
        assert_close(found[1][key], tensor, 1e-5 if recipe == "bf16" else 1e-4, key)
