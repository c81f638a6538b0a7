"""Hugging Face folders of old and new forms, of our format in between, and gates that are added to a model."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fewer import every
from hf_models import Pair, close, document_of, load, prompts, same_folder, save_hf, tensors_of
from hybrids import HYBRIDS
from judge import AutoModelForCausalLM
from safetensors.torch import save_file

from te_models.errors import CheckpointError


@pytest.mark.parametrize(
    "case", ["llama3", "qwen2-window", "smollm3", "qwen3_next", "headwise", "hybrid-7"]
)
def test_a_round_trip_through_our_own_format_is_exact(
    case: str, theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    _, folder = theirs(case)
    recipe = "bf16" if case in HYBRIDS else "current"  # which needs other sizes
    load(folder, recipe=recipe).save_pretrained(tmp_path / "own")
    own = load(tmp_path / "own")
    assert own.recipe.name == recipe and own.config == load(folder).config
    save_hf(own, tmp_path / "back", gated=case == "headwise")
    same_folder(folder, tmp_path / "back")


@pytest.mark.parametrize(
    "case", ["llama3", "llama-linear", "qwen2-window", "smollm3", "qwen3_next"]
)
@torch.no_grad()
def test_configs_of_older_transformers_are_read(
    case: str, theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    """Before transformers 5: rope_theta and rope_scaling, torch_dtype, no layer_types; tables tied and still saved."""
    judge, folder = theirs(case)
    config = document_of(folder)
    rope = config.pop("rope_parameters")
    old = {
        "rope_theta": rope.pop("rope_theta"),
        "torch_dtype": config.pop("dtype"),
        "tie_word_embeddings": False,
    }
    old |= (
        {"partial_rotary_factor": rope.pop("partial_rotary_factor")}
        if "partial_rotary_factor" in rope
        else {}
    )
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if case != "qwen3_next":
        config.pop("layer_types", None)
    tensors = tensors_of(folder) | {"lm_head.weight": judge.lm_head.weight.clone()}
    save_file(
        tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        tmp_path / "model.safetensors",
    )
    for tied in {False, judge.config.tie_word_embeddings}:
        (tmp_path / "config.json").write_text(
            json.dumps({**config, **old, "tie_word_embeddings": tied})
        )
        ids, mask = prompts()
        logits = load(tmp_path)(ids, attention_mask=mask).logits
        close(logits[mask.bool()], judge(ids, attention_mask=mask).logits[mask.bool()])


def test_text_ends_as_generation_config_says(theirs: Callable[..., Pair], tmp_path: Path) -> None:
    judge, folder = theirs("llama2")
    judge.save_pretrained(tmp_path)
    ids, mask = prompts()
    free = load(folder).generate(ids, attention_mask=mask, max_new_tokens=12)[:, 13:]
    ends = dict(eos_token_id=[int(free[0, 4]), int(free[2, 7])], pad_token_id=3)
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    judge = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = judge.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(
        load(tmp_path).generate(ids, attention_mask=mask, max_new_tokens=12), expected
    )
    assert (expected[:, 13:] == 3).any()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "is a JSON list, not an object"),
        (3, "is a JSON int, not an object"),
        ("x", "is a JSON str, not an object"),
        ({"eos_token_id": "x"}, "eos_token_id is x"),
        ({"eos_token_id": [1, [2]]}, "eos_token_id is "),
        ({"eos_token_id": {"a": 1}}, "eos_token_id is "),
        ({"eos_token_id": True}, "eos_token_id is True"),
        ({"eos_token_id": 2**70}, "eos_token_id is "),
        ({"pad_token_id": [1]}, "pad_token_id is "),
        ({"pad_token_id": 1.5}, "pad_token_id is 1.5"),
    ],
)
def test_a_damaged_generation_config_is_one_line(
    document: object, message: str, theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    load(theirs("llama2")[1]).save_pretrained(tmp_path, format="hf")
    (tmp_path / "generation_config.json").write_text(json.dumps(document))
    with pytest.raises(
        CheckpointError, match="generation_config.json:? .*" + re.escape(message)
    ) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_negative_ids_of_generation_config_are_no_tokens(
    theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    load(theirs("llama2")[1]).save_pretrained(tmp_path, format="hf")
    (tmp_path / "generation_config.json").write_text(
        json.dumps(dict(eos_token_id=None, pad_token_id=-1))
    )
    assert int(load(tmp_path).generate([[1], [2, 3]], max_new_tokens=2).min()) >= 0


@pytest.mark.parametrize(
    ("case", "gate", "recipe"),
    every(
        3,
        ["llama3", "qwen2", "mistral", "ungated"],
        ["elementwise", "headwise"],
        ["bf16", "current"],
    ),
)
def test_a_gate_starts_as_the_identity_and_trains(
    case: str, gate: str, recipe: str, theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    _, folder = theirs(case)
    options = dict(recipe=recipe, dtype=torch.float32 if recipe == "bf16" else torch.bfloat16)
    plain, gated = load(folder, **options), load(folder, attention_gate=gate, **options)
    ids, mask = prompts()
    with torch.no_grad():
        assert torch.equal(
            gated(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits
        )
    assert gated.config.attention_gate == gate and plain.config.attention_gate == "none"
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        losses.append(gated.train()(ids, labels=ids).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    start, rows = gated.config.linears["layers.0.self_attn.qkvg_proj"].row_ranges["g"]
    moved = gated.layers[1].self_attn.qkvg_proj.weight[start : start + rows].abs().amax(dim=1)
    assert (moved > 0).all() and losses[-1] < losses[0], "every gate has left its start"
    plain.save_pretrained(tmp_path / "own")
    assert torch.equal(
        load(tmp_path / "own", attention_gate=gate)(ids, attention_mask=mask).logits,
        plain(ids, attention_mask=mask).logits,
    )


@pytest.mark.parametrize("case", ["llama3", "qwen2"])  # a head of its own, and a tied one
def test_a_larger_vocabulary_has_the_mean_of_the_rows_as_transformers_resize(
    case: str, theirs: Callable[..., Pair]
) -> None:
    model, folder = theirs(case)
    plain = load(folder)
    with pytest.warns(UserWarning, match=r"vocab_size=\d+ adds 7 tokens to the model: new rows"):
        larger = load(folder, vocab_size=plain.config.vocab_size + 7)
    resized = copy.deepcopy(model)
    resized.resize_token_embeddings(plain.config.vocab_size + 7, mean_resizing=True)
    for ours, wanted in (
        (larger.embed_tokens.weight, resized.get_input_embeddings().weight),
        (larger.get_parameter("lm_head.weight"), resized.get_output_embeddings().weight),
    ):
        torch.testing.assert_close(ours, wanted, atol=2e-4, rtol=0)  # theirs draws around the mean
        assert ours[-7:].abs().max() > 1e-3
    assert larger.embed_tokens.weight[:-7].equal(plain.embed_tokens.weight)
    with pytest.warns(UserWarning, match="adds 7 tokens"):
        in_bf16 = load(folder, vocab_size=plain.config.vocab_size + 7, dtype=torch.bfloat16)
    assert in_bf16.embed_tokens.weight.equal(larger.embed_tokens.weight.bfloat16())


@pytest.mark.parametrize("case", ["qwen3", "llama2"])
def test_a_gate_added_to_a_model_round_trips(
    case: str, theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    model = load(theirs(case)[1], attention_gate="elementwise")
    with torch.no_grad():
        model.layers[0].self_attn.qkvg_proj.weight.normal_(0, 0.1)
    save_hf(model, tmp_path / "gated", gated=True)
    again = load(tmp_path / "gated")
    assert again.config == model.config and again.config.attention_gate == "elementwise"
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
