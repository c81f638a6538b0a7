"""RoPE stretched to longer contexts: every kind against transformers, inside and beyond the original context."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from fewer import every
from judge import transformers

from te_models import CausalLM, TEModelsForCausalLM
from te_models.config.model import ModelConfig
from te_models.config.rope import ROPE_SCALINGS
from te_models.model.rope import SCALINGS, rotary_tables

ORIGINAL = 24
SIZES: dict[str, Any] = dict(
    vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=2
)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5)
SIZES |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
DENSE = dict(layer_types=["full_attention"] * 2, mlp_only_layers=[0, 1])
LONG = dict(
    short_factor=[1.0 + 0.05 * i for i in range(8)], long_factor=[1.0 + 0.6 * i for i in range(8)]
)

# One row a case: the family, max_position_embeddings, rope_parameters, and what else differs from SIZES.
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "linear": ("llama", 96, dict(rope_type="linear", factor=4.0), {}),
    "proportional": ("llama", 96, dict(rope_type="proportional", partial_rotary_factor=0.6, factor=2.0), {}),
    "dynamic": ("llama", ORIGINAL, dict(rope_type="dynamic", factor=4.0), {}),
    "dynamic-qwen3": ("qwen3", ORIGINAL, dict(rope_type="dynamic", factor=5.0), dict(head_dim=32)),
    "llama3": ("llama", 96, dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                 original_max_position_embeddings=ORIGINAL), {}),
    "yarn": ("llama", 96, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL), {}),
    "yarn-of-its-window": ("llama", ORIGINAL, dict(rope_type="yarn", factor=4.0), {}),
    "yarn-betas": ("qwen3", 96, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL,
                                     beta_fast=4.0, beta_slow=0.5, truncate=False), dict(head_dim=32)),
    # So slow a beta that the ramp ends beyond the last channel, where it is cut off.
    "yarn-clamped": ("llama", 96, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL,
                                       beta_slow=1e-5), {}),
    "yarn-factor": ("mistral", 96, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL,
                                        attention_factor=1.7), dict(sliding_window=9)),
    "yarn-mscale": ("smollm3", 96, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL,
                                        mscale=2.0, mscale_all_dim=0.7), dict(no_rope_layers=[1, 0])),
    "yarn-partial": ("qwen3_next", 96, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL,
                                            partial_rotary_factor=0.5), dict(head_dim=32, **DENSE)),
    "longrope": ("llama", 96, dict(rope_type="longrope", original_max_position_embeddings=ORIGINAL, **LONG), {}),
    "longrope-factors": ("qwen2", 96, dict(rope_type="longrope", original_max_position_embeddings=ORIGINAL, factor=8.0,
                                           attention_factor=1.3, **LONG), {}),
}  # fmt: skip
# Where the angles depend on the length, keys in a cache keep those of their time, in transformers and under "dynamic"
# here; under LongRoPE text is computed once more when its angles change, as in transformers' Phi-3.
BY_LENGTH = ("dynamic", "dynamic-qwen3", "longrope", "longrope-factors")


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, CausalLM]:
    kind, window, rope, changes = CASES[request.param]
    values = {
        **SIZES,
        "max_position_embeddings": window,
        "rope_parameters": {"rope_theta": 500.0, **rope},
        **changes,
    }
    torch.manual_seed(3)
    judge = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **values)
    ).eval()
    with torch.no_grad():
        for parameter in judge.parameters():
            if parameter.ndim > 1:  # sharp attention, so that angles matter
                parameter.normal_(0, 0.2)
    judge.save_pretrained(tmp_path / "theirs")
    return judge, CausalLM.from_pretrained(
        tmp_path / "theirs", device="cpu", engine="emulated"
    ).eval()


@torch.no_grad()
def test_logits_inside_and_beyond_the_original_context(pair: tuple[Any, CausalLM]) -> None:
    judge, model = pair
    for length in (ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL):
        ids = torch.randint(1, SIZES["vocab_size"], (2, length))
        expected = judge(ids).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=0)


PACK = (8, ORIGINAL + 8, 5, ORIGINAL, ORIGINAL + 1)


def packed(lengths: tuple[int, ...] = PACK) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, documents and positions [2, S] of two packs, of which one has the documents in the other order."""
    ids = torch.randint(1, SIZES["vocab_size"], (2, sum(lengths)))
    documents, positions = [], []
    for order in (lengths, lengths[::-1]):
        documents.append(torch.repeat_interleave(torch.arange(len(order)), torch.tensor(order)))
        positions.append(torch.cat([torch.arange(length) for length in order]))
    return ids, torch.stack(documents), torch.stack(positions)


@pytest.mark.parametrize("pair", every(2, CASES), indirect=True)
def test_each_document_of_a_pack_is_the_document_alone(pair: tuple[Any, CausalLM]) -> None:
    """In logits, and in the gradients of all parameters."""
    judge, model = pair
    ids, documents, positions = packed()
    model.train()
    output = model(ids, labels=ids, document_ids=documents)
    output.loss.backward()
    wrapped = TEModelsForCausalLM.wrap(model).eval()
    with torch.no_grad():
        by_positions = wrapped(ids, position_ids=positions, use_cache=False).logits
    loss, targets = torch.zeros(()), 0
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for row, order in enumerate((PACK, PACK[::-1])):
        for number, own in enumerate(ids[row].split(order)):
            here = documents[row] == number
            # transformers keeps the angles of the longest text so far under "dynamic".
            alone = copy.deepcopy(judge)(own[None]).logits[0]
            torch.testing.assert_close(output.logits[row, here], alone, atol=1e-4, rtol=0)
            torch.testing.assert_close(by_positions[row, here], alone, atol=1e-4, rtol=0)
            mean = model(own[None], labels=own[None]).loss
            loss = loss + mean * (len(own) - 1)
            targets += len(own) - 1
    (loss / targets).backward()
    torch.testing.assert_close(output.loss, loss / targets, atol=1e-5, rtol=0)
    for name, parameter in model.named_parameters():
        close = dict(atol=1e-4 * parameter.grad.abs().max().item(), rtol=0)
        torch.testing.assert_close(gradients[name], parameter.grad, **close, msg=name)


def test_a_window_with_a_rope_of_its_own_too() -> None:
    """Both ropes stretch; padding at the end of a pack is a document of its own."""
    sliding = dict(rope_theta=100.0, rope_type="dynamic", factor=4.0)
    config = ModelConfig(
        **SMALL | dict(num_hidden_layers=2), sliding_window=9, sliding_rope=sliding, max_position_embeddings=96,
        layer_types=("sliding_attention", "full_attention"), initializer_range=0.2,
        rope_scaling=dict(rope_type="longrope", original_max_position_embeddings=24, **LONG),
    )  # fmt: skip
    torch.manual_seed(0)
    model = CausalLM(config, device="cpu", dtype=torch.float32)
    lengths = (6, 90, 30, 20)
    ids = torch.randint(0, 64, (1, sum(lengths)))
    documents = torch.repeat_interleave(torch.tensor((7, 3, 8, -1)), torch.tensor(lengths))[None]
    parts = model(ids[:, :96], document_ids=documents[:, :96]).logits
    torch.testing.assert_close(parts[0, :6], model(ids[:, :6]).logits[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(parts[0, 6:], model(ids[:, 6:96]).logits[0], atol=1e-4, rtol=0)
    parts = model(ids[:, 90:], document_ids=documents[:, 90:]).logits[0, 6:36]
    torch.testing.assert_close(parts, model(ids[:, 96:126]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("pair", [*BY_LENGTH, "yarn", "llama3"], indirect=True)
@torch.no_grad()
def test_text_across_the_end_of_the_original_context(
    pair: tuple[Any, CausalLM], request: Any
) -> None:
    (judge, model), case = pair, request.node.callspec.params["pair"]
    mask = (torch.arange(9) >= torch.tensor([[0], [4]])).long()
    ids = torch.randint(1, SIZES["vocab_size"], (2, 9)) * mask
    cached = not case.startswith("longrope")
    expected = judge.generate(
        ids, attention_mask=mask, max_new_tokens=24, do_sample=False, use_cache=cached
    )
    assert_same_bits(
        "result", model.generate(ids, attention_mask=mask, max_new_tokens=24), expected
    )
    uncached = model.generate(ids[:1], max_new_tokens=24, use_cache=False)
    if case in BY_LENGTH:
        expected = judge.generate(ids[:1], max_new_tokens=24, do_sample=False, use_cache=False)
    assert_same_bits("uncached", uncached, expected[:1])


@pytest.mark.parametrize("pair", every(2, [*CASES][::-1]), indirect=True)
def test_the_config_goes_back_as_it_came(pair: tuple[Any, CausalLM], tmp_path: Path) -> None:
    judge, model = pair
    model.origin = type(model.origin)()  # as if it had begun here
    model.save_pretrained(tmp_path / "back", format="hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    ids = torch.randint(1, SIZES["vocab_size"], (1, 2 * ORIGINAL))
    assert_same_bits("again(ids).logits", again(ids).logits, judge.eval()(ids).logits)
    assert CausalLM.from_pretrained(tmp_path / "back", device="cpu").config == model.config
    model.save_pretrained(tmp_path / "own")
    assert CausalLM.from_pretrained(tmp_path / "own", device="cpu").config == model.config
    assert (
        ModelConfig.from_dict(model.config.to_dict()) == model.config
    )  # as earlier versions wrote it
    assert transformers.AutoConfig.from_pretrained(tmp_path / "own").model_config() == model.config
    transformers.PreTrainedConfig.from_json_file(
        tmp_path / "own/config.json"
    )  # as a Trainer that resumes does


SMALL = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
)


@pytest.mark.parametrize("window, scaling, longest", [
    (96, None, 96),
    (96, dict(rope_type="linear", factor=4.0), 96),
    (24, dict(rope_type="dynamic", factor=4.0), 96),
    (24, dict(rope_type="yarn", factor=4.0), 96),
    (40, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), 128),
    (200, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), 200),
    (96, dict(rope_type="longrope", original_max_position_embeddings=24, **LONG), 96),
])  # fmt: skip
def test_longest_rows(window: int, scaling: Any, longest: int) -> None:
    config = ModelConfig(**SMALL, max_position_embeddings=window, rope_scaling=scaling)
    assert config.longest_sequence == longest
    model = CausalLM(config, device="cpu", engine="emulated")
    assert model(torch.zeros(1, longest, dtype=torch.long)).logits.shape[1] == longest
    name = "max_position_embeddings" if longest == window else "the stretched limit of RoPE"
    with pytest.raises(
        ValueError, match=f"a sequence of {longest + 1} tokens is longer than {name}={longest}"
    ):
        model(torch.zeros(1, longest + 1, dtype=torch.long))
    with pytest.raises(ValueError, match=f"more than {name}={longest}"):
        model.generate([1] * longest, max_new_tokens=1)


@pytest.mark.parametrize("scaling, message", [
    (dict(rope_type="axial", factor=4.0), "'axial' is not supported"),
    (dict(rope_type="dynamic", factor=4.0, alpha=2.0), "alpha=2.0 is not supported"),
    (dict(rope_type="yarn"), "lacks factor"),
    (dict(rope_type="yarn", factor=2.0, truncate="no"), "truncate='no'"),
    (dict(rope_type="yarn", factor=2.0, beta_fast=0), "beta_fast=0"),
    (dict(rope_type="longrope", short_factor=[1.0] * 8), "lacks long_factor"),
    (dict(rope_type="longrope", short_factor=[1.0] * 7, long_factor=[1.0] * 8), "short_factor has 7 numbers: give 8"),
    (dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[1.0] * 7 + ["x"]), "'x'] is of a wrong type"),
])  # fmt: skip
def test_missing_and_unknown_fields_of_a_scaling_are_named(scaling: dict, message: str) -> None:
    with pytest.raises(ValueError, match="rope_scaling") as error:
        ModelConfig(**SMALL, rope_scaling=scaling)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_one_table_of_kinds() -> None:
    assert (
        set(SCALINGS)
        == set(ROPE_SCALINGS)
        == {rope["rope_type"] for _, _, rope, _ in CASES.values()}
    )
    config = ModelConfig(
        **SMALL, rope_scaling=dict(rope_type="yarn", factor=4.0, attention_factor=None)
    )
    assert config.rope_scaling == dict(rope_type="yarn", factor=4.0)
    cos, sin = rotary_tables(config.rope, torch.arange(5), torch.float32)
    factor = 0.1 * math.log(4) + 1
    torch.testing.assert_close(cos**2 + sin**2, torch.full((5, 16), factor**2))
