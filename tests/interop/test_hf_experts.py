"""Losses and gradients of families with experts, with latents and with a recurrence: transformers is the judge."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES, FAMILY_CASES
from fewer import every
from hf_models import document_of, load, make_theirs, tensors_of
from hybrids import HYBRIDS
from torch import Tensor

from te_models import CausalLM
from te_models.interop.hf_families import family_of
from te_models.interop.hf_family import Family
from te_models.interop.stacked_experts import experts_of
from te_models.interop.tensor_places import tensor_places

# The families whose loss transformers computes, with a case of each kind of choice.
ROUTED = [
    "granitemoe_swa-shared", "granitemoe_swa-no_rope", "granitemoe-one-key", "granitemoeshared-biases",
    "granitemoeshared-odd", "flint-odd", "flint-tied", "flint-normed",
    "qwen3_moe-one-key", "qwen3_moe-all-keys", "qwen3_moe-tied", "qwen3_moe-normed", "qwen2_moe-odd",
    "qwen2_moe-normed", "qwen2_moe-steps", "mixtral-all-keys", "mixtral-window", "olmoe-all-keys", "olmoe-normed",
    "gpt_oss-odd", "gpt_oss-all-keys", "gpt_oss-untied", "gpt_oss-untruncated", "gpt_oss-window", "gpt_oss-plain",
    "mellum-one-key", "mellum-ropes", "mellum-mixed", "minimax_m2-odd", "minimax_m2-half", "minimax_m2-all",
    "flex_olmo-one-key", "flex_olmo-normed", "ernie4_5_moe-odd", "ernie4_5_moe-interval", "ernie4_5_moe-none",
    "granitemoehybrid-one-key", "laguna-all-sparse", "qwen3_next-mixed", "qwen3_next-plain", "qwen3_5_moe_text-one-key",
]  # fmt: skip
OTHERS = [
    "glm4_moe-groups",
    "glm4_moe-normed",
    "glm4_moe-sparse",
    "afmoe-experts",
    "laguna-experts",
    "gemma4_text-one",
    "gemma4_text-shared",
    "gemma4_text-wide",
    "gemma4_text-share",
    "gemma4_text-small-wide",
    "gemma4_text-small-untied",
    "gemma4_text-small-window",
    "gemma4_text-small-full",
    "gemma4_text-experts-untied",
    "gemma4_text-experts-share",
    "hunyuan_v1_dense-alpha",
    "hunyuan_v1_moe-biases",
    "hunyuan_v1_moe-list",
    "dots1-groups",
    "dots1-window",
    "exaone_moe-groups",
    "exaone_moe-mixed",
    "solar_open-groups",
    "granite_swa-thetas",
    "granite_swa-no-rope",
    "hyperclovax-biases",
    "hyperclovax-pre",
    "sarvam_mla-mscale",
    "mistral4-groups",
    "mistral4-mscale",
    "youtu-biases",
    "minicpm3-scales",
    "axk1-plain",
    "axk1-groups",
    "minicpm3-filled",
    "sarvam_moe-groups",
    "sarvam_moe-biases",
    "hy_v3-mixed",
    "hy_v3-scaled",
    "helium-biases",
    "cohere2-biases",
    "llama4_text-types",
    "llama4_text-no_rope",
    "exaone-biases",
    "vaultgemma-odd",
]
LATENT = [f"deepseek_v3-{name}" for name in FAMILY_CASES["deepseek_v3"]]
LATENT += [f"deepseek_v2-{name}" for name in ("plain", "groups", "direct", "mscale")]
LATENT += ["glm4_moe_lite-plain", "glm4_moe_lite-width"]
OTHERS += LATENT
RECURRENT = [
    f"{family}-{name}"
    for family in (
        "lfm2",
        "lfm2_moe",
        "granitemoehybrid",
        "kimi_linear",
        "nemotron_h",
        "lfm3",
        "bamba",
        "falcon_h1",
        "bailing_hybrid",
    )
    for name in FAMILY_CASES[family]
]
FEW = (
    "hybrid-0",
    "hybrid-1",
    "hybrid-7",
    "hybrid-14",
    "lfm2-biases",
    "lfm2_moe-odd",
    "granitemoehybrid-odd",
)


def pair(case: str, folder: Path, **changes: Any) -> tuple[Any, CausalLM]:
    """transformers' model of a case, every parameter random, and ours."""
    return make_theirs(case, folder, **changes), load(folder)


def batch(padded: bool, length: int = 17) -> dict[str, Tensor]:
    ids = torch.randint(1, 131, (3, length))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 11:] = mask[2, 5:] = 0
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))


@pytest.mark.parametrize(
    "case",
    [
        *every(7, [*ROUTED, *OTHERS]),
        *(
            pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW))
            for name in (*HYBRIDS, *RECURRENT)
        ),
    ],
)
def test_losses_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """The balance loss is reported in evaluation, and in training added with its factor."""
    routed = case in ROUTED
    judge, model = pair(case, tmp_path, **(dict(router_aux_loss_coef=0.3) if routed else {}))
    for padded in (False, True):
        inputs = batch(padded, 100 if case in HYBRIDS else 17)
        expected = judge(**inputs, **(dict(output_router_logits=True) if routed else {}))
        found = whole = model.eval()(**inputs)
        if routed:
            whole = model.train()(**inputs)
            assert found.routing.balance_loss.item() == pytest.approx(
                expected.aux_loss.item(), abs=1e-5
            )
            assert (whole.loss - found.loss).item() == pytest.approx(
                0.3 * expected.aux_loss.item(), rel=1e-3
            )
        assert whole.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    expected.loss.backward()
    whole.loss.backward()
    family = family_of(document_of(tmp_path)).stored_as(tensors_of(tmp_path))
    theirs = gradients_of(judge, tmp_path / "gradients", family)
    parameters = dict(model.named_parameters())
    places = tensor_places(family, model.config, {n: p.shape for n, p in parameters.items()})
    names = [name for name, place in places.items() if parameters[place.name].requires_grad]
    assert {name for name in names if name not in theirs} == set()
    for name in names:
        gradient = parameters[places[name].name].grad
        assert gradient is not None, name
        found, expected = places[name].save(gradient), theirs[name]
        error = (found - expected).norm()
        assert error <= 1e-3 * expected.norm() + 1e-7, (
            f"{name}: {error:.2g} of {expected.norm():.2g}"
        )


def test_a_model_of_transformers_has_the_balance_loss_where_it_is_asked_for(tmp_path: Path) -> None:
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    judge, model = pair("qwen3_moe-tied", tmp_path, router_aux_loss_coef=0.3)
    wrapped, inputs = modeling.TEModelsForCausalLM.wrap(model), batch(padded=True)
    expected = judge(**inputs, output_router_logits=True)
    found = wrapped(**inputs, output_router_logits=True)
    assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), abs=1e-5)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert wrapped(**inputs).loss.item() == pytest.approx(judge(**inputs).loss.item(), rel=1e-5)
    del inputs["labels"]
    alone = wrapped(**inputs, output_router_logits=True, use_cache=False)
    assert alone.loss is None and alone.aux_loss.item() == found.aux_loss.item()


@pytest.mark.parametrize("mode", ["none", "full"])
def test_trl_finds_what_its_balance_loss_is_made_of(mode: str, tmp_path: Path) -> None:
    """It takes the numbers of experts and the factor from the config, and the routers' logits from the backbone."""
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    judge, model = pair("qwen3_moe-one-key", tmp_path, router_aux_loss_coef=0.3)
    wrapped, inputs = modeling.TEModelsForCausalLM.wrap(model).train(), batch(padded=True)
    model.activation_checkpointing = mode
    losses = []
    for config, network in ((judge.config, judge.model), (wrapped.config, wrapped.base_model)):
        logits = network(
            inputs["input_ids"], inputs["attention_mask"], output_router_logits=True
        ).router_logits
        sizes = (config.num_experts, config.num_experts_per_tok, inputs["attention_mask"])
        losses.append(
            config.router_aux_loss_coef * mixtral.load_balancing_loss_func(logits, *sizes)
        )
        losses[-1].backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    theirs, ours = (
        judge.model.layers[0].mlp.gate.weight.grad,
        model.layers[0].mlp.router.weight.grad,
    )
    assert ours is not None and (ours - theirs).norm() < 1e-4 * theirs.norm()
    before = wrapped(**inputs, output_router_logits=True)
    wrapped.config.router_aux_loss_coef = 0.8  # as TRL sets it
    after = wrapped(**inputs, output_router_logits=True)
    assert (after.loss - before.loss).item() == pytest.approx(0.5 * after.aux_loss.item(), rel=1e-3)
    sizes = dict(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    unused = dict(
        moe=dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8),
        mlp_layer_types=["dense"],
    )
    for dense in (type(wrapped.config)(**sizes), type(wrapped.config)(**sizes, **unused)):
        assert not hasattr(dense, "router_aux_loss_coef"), "TRL would ask for router logits"


@torch.no_grad()
def gradients_of(judge: Any, folder: Path, family: Family) -> dict[str, Tensor]:
    """transformers' gradients by the names in its folders, into which it writes them in place of the parameters."""
    for parameter in judge.parameters():
        parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    judge.save_pretrained(folder)
    # Of stacked experts each by itself; there are no scales.
    return {
        own: part
        for name, t in tensors_of(folder).items()
        for own, part in experts_of(family.as_stack(name), t, torch.Tensor, family.stacked)
    }


def test_cases_exist() -> None:
    assert {*ROUTED, *OTHERS} <= CASES.keys() and {*FEW} <= HYBRIDS.keys() | CASES.keys()
