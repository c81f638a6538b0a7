"""Hybrids of gated attention and Gated DeltaNet against transformers' qwen3_5 and qwen3_next."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import load, tensors_of
from hybrids import SEEDS, hybrid_judge, randomize_hybrid
from judge import CACHE, AutoModelForCausalLM, transformers
from torch import Tensor

from te_models.errors import UsageError
from te_models.interop.hf import tensor_places
from te_models.interop.hf_families import family_of
from te_models.interop.origin import Origin

Pair = tuple[Any, Path]
TOLERANCE = 1e-4  # of the largest logit, but at least of 1
# A few in every run: both model types, and 1, 2 and 4 value heads per key head.
FEW = [seed if seed in (0, 1, 7, 14) else pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Pair]:
    """A function that gives transformers' model of a seed, and the folder it is saved in."""
    made: dict[int, Pair] = {}

    def make(seed: int) -> Pair:
        if seed not in made:
            model, folder = hybrid_judge(seed), tmp_path_factory.mktemp("hybrids") / str(seed)
            model.save_pretrained(folder)
            made[seed] = model, folder
        return made[seed]

    return make


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(1, 131, (batch, length), generator=torch.Generator().manual_seed(length))


def close(ours: Tensor, reference: Tensor) -> None:
    size = reference.abs().max().item()
    assert size > 0.05, "a comparison of zeros would prove nothing"
    torch.testing.assert_close(ours, reference, atol=TOLERANCE * max(size, 1.0), rtol=0)


@pytest.mark.parametrize("seed", FEW)
@torch.no_grad()
def test_logits_are_those_of_transformers(seed: int, theirs: Callable[[int], Pair]) -> None:
    judge, folder = theirs(seed)
    model = load(folder)
    assert model.config.num_parameters == sum(p.numel() for p in judge.parameters())
    for length in (1, 2, 3, 63, 64, 65, 129, 300):
        close(model(tokens(2, length)).logits, judge(tokens(2, length)).logits)
    ids, mask = tokens(3, 70), torch.ones(3, 70, dtype=torch.long)
    mask[1, :8] = mask[2, :66] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    reference = judge(ids, attention_mask=mask, position_ids=positions).logits
    close(model(ids, attention_mask=mask).logits[mask.bool()], reference[mask.bool()])


@pytest.mark.parametrize("seed", FEW)
def test_gradients_are_those_of_transformers(seed: int, theirs: Callable[[int], Pair]) -> None:
    judge, folder = theirs(seed)
    model, ids = load(folder).train(), tokens(2, 100)
    model(ids, labels=ids).loss.backward()
    judge.zero_grad()
    judge(ids, labels=ids).loss.backward()
    ours, reference = (dict(m.named_parameters()) for m in (model, judge))
    places = tensor_places(family_of(model.origin.config), model.config, {n: p.shape for n, p in ours.items()})
    assert places.keys() == reference.keys()
    for name, place in places.items():
        found, wanted = place.save(ours[place.name].grad), reference[name].grad
        assert (found - wanted).norm() <= 1e-3 * wanted.norm(), name


@pytest.mark.parametrize("seed", FEW)
@torch.no_grad()
def test_generation_is_that_of_transformers(seed: int, theirs: Callable[[int], Pair]) -> None:
    judge, folder = theirs(seed)
    model, ids = load(folder), tokens(3, 21)
    mask = torch.ones(3, 21, dtype=torch.long)
    mask[1, :8] = mask[2, :18] = 0
    wanted = judge.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=20), wanted)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=20, use_cache=False), wanted)
    cache, other = model.new_cache(2, 90), transformers.DynamicCache(config=judge.config)
    whole = tokens(2, 90)
    for part in (whole[:, :30], whole[:, 30:31], *whole[:, 31:35].split(2, dim=1), whole[:, 35:]):
        wanted = judge(part, **{CACHE: other}, use_cache=True).logits
        close(model(part, cache=cache).logits, wanted)


@pytest.mark.parametrize("seed", FEW[::7])
def test_transformers_generates_with_our_model(seed: int, theirs: Callable[[int], Pair]) -> None:
    """With its own cache, whose rows beam search reorders."""
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    judge, folder = theirs(seed)
    wrapped, ids = modeling.TEModelsForCausalLM.wrap(load(folder)), tokens(3, 21)
    mask = torch.ones(3, 21, dtype=torch.long)
    mask[1, :8] = mask[2, :18] = 0
    for options in (dict(), dict(num_beams=3), dict(cache_implementation="static")):
        given: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=10, do_sample=False, **options)
        assert torch.equal(wrapped.generate(ids, **given), judge.generate(ids, **given)), options


def test_a_pass_that_fills_a_cache_has_gradients(theirs: Callable[[int], Pair]) -> None:
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    wrapped, ids = modeling.TEModelsForCausalLM.wrap(load(theirs(7)[1])), tokens(2, 70)
    found = []
    for past in (None, transformers.DynamicCache(config=wrapped.config)):
        wrapped.zero_grad()
        wrapped(ids, cache=past, use_cache=past is not None).logits.square().mean().backward()
        found.append({name: p.grad.clone() for name, p in wrapped.named_parameters()})
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_packed_documents_from_any_position(theirs: Callable[[int], Pair]) -> None:
    """As collators without padding give them: positions that do not follow begin a document."""
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    wrapped, ids = modeling.TEModelsForCausalLM.wrap(load(theirs(7)[1])), tokens(1, 90)
    for first in (0, 3):
        positions = torch.cat((torch.arange(first, first + 40), torch.arange(50)))[None]
        both = wrapped(ids, position_ids=positions, use_cache=False).logits
        for part in (slice(0, 40), slice(40, 90)):
            alone = wrapped(ids[:, part], position_ids=positions[:, part], use_cache=False).logits
            close(both[:, part], alone)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:.*were set but no parameter was matched")
@pytest.mark.filterwarnings("ignore:.*did not match any targeted module")
@pytest.mark.parametrize("seed", [0, pytest.param(4, marks=pytest.mark.slow), 14])
@torch.no_grad()
def test_adapters_compute_the_same_in_transformers(seed: int, theirs: Callable[[int], Pair], tmp_path: Path) -> None:
    lora, peft = pytest.importorskip("te_models.training.lora"), pytest.importorskip("peft")
    _, folder = theirs(seed)
    adapted = lora.add_lora(load(folder), r=4, lora_alpha=8, target_modules="all-linear")
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.05)
    lora.save_lora(adapted, tmp_path)
    judge = peft.PeftModel.from_pretrained(hybrid_judge(seed), tmp_path).eval()
    close(adapted.eval()(tokens(2, 70)).logits, judge(tokens(2, 70)).logits)


@pytest.mark.parametrize("seed", FEW)
@torch.no_grad()
def test_a_round_trip_is_exact(seed: int, theirs: Callable[[int], Pair], tmp_path: Path) -> None:
    _, folder = theirs(seed)
    model = load(folder)
    model.save_pretrained(tmp_path / "back", format="hf")
    same_folder(folder, tmp_path / "back")
    model.save_pretrained(tmp_path / "native")
    again = load(tmp_path / "native")
    assert again.config == model.config
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters(), strict=True))
    model.origin = Origin()  # as if it had begun here
    model.save_pretrained(tmp_path / "own", format="hf")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "qwen3_5_text"
    fresh, report = AutoModelForCausalLM.from_pretrained(tmp_path / "own", output_loading_info=True)
    assert not any(report.values()), report
    close(fresh.eval()(tokens(2, 17)).logits, model(tokens(2, 17)).logits)


def same_folder(one: Path, other: Path) -> None:
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (one, other)]
    assert configs[0] == configs[1]


TEXT: dict[str, Any] = dict(
    vocab_size=131, hidden_size=48, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=12, max_position_embeddings=64, attn_output_gate=True, mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False, mamba_ssm_dtype="float32", mlp_only_layers=[], full_attention_interval=4,
    rope_parameters=dict(
        rope_type="default", rope_theta=1e7, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True
    ),
)  # fmt: skip
VISION = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=48, patch_size=4)


@pytest.fixture
def multimodal(tmp_path: Path) -> Pair:
    """transformers' multimodal model of the text model TEXT, and the folder it is saved in."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5Config(
        text_config=TEXT, vision_config={**VISION, "num_position_embeddings": 16}, tie_word_embeddings=True,
        image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4,
    )  # fmt: skip
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    randomize_hybrid(model)
    model.save_pretrained(tmp_path / "multimodal")
    return model, tmp_path / "multimodal"


@torch.no_grad()
def test_the_text_of_a_multimodal_folder_is_read_and_the_rest_written_back(
    multimodal: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge, folder = multimodal
    with caplog.at_level(logging.WARNING):
        model = load(folder)
    assert "model.visual.*, mtp.*" in caplog.text
    ids = tokens(2, 33).clamp(min=5)
    close(model(ids).logits, judge(ids).logits)
    model.save_pretrained(tmp_path / "back", format="hf")
    same_folder(folder, tmp_path / "back")
    model.save_pretrained(folder, format="hf")  # over the tensors that it reads
    same_folder(folder, tmp_path / "back")
    model.save_pretrained(tmp_path / "native")
    native = load(tmp_path / "native")
    native.save_pretrained(tmp_path / "whole", format="hf", beside=folder)
    same_folder(folder, tmp_path / "whole")
    with pytest.raises(UsageError, match="has no tensors that belong beside"):
        native.save_pretrained(tmp_path / "none", format="hf", beside=tmp_path / "native")
    with pytest.warns(UserWarning, match="the text model alone"):
        native.save_pretrained(tmp_path / "text", format="hf")
    text, report = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(report.values()), report
    close(text.eval()(ids).logits, judge(ids).logits)
