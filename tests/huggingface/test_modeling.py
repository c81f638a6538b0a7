"""TEModelsForCausalLM against transformers' own models of the same weights."""

import copy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from judge import CACHE, takes_a_cache_by_either_name, transformers
from places import PLACE
from torch import Tensor

from te_models import CausalLM, TEModelsConfig, TEModelsForCausalLM
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.errors import MissingPackage, UsageError
from te_models.fp8.kept_weights import forget_kept_weights, te_linears

IDS = torch.randint(3, 96, (3, 11), generator=torch.Generator().manual_seed(5))
MASK = torch.ones_like(IDS)
MASK[0, :5], MASK[1, :1] = 0, 0
CLOSE: dict[str, float] = dict(rtol=1e-4, atol=5e-5)
FAMILIES = ("llama", "mistral-window", "qwen2-mixed-window", "qwen3-tied", "smollm3", "qwen3-next", "gemma2",
            "phi3-longrope")  # fmt: skip
GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "static": dict(cache_implementation="static"),
    "no-padding": dict(attention_mask=None),
    "no-cache": dict(use_cache=False),
    "sampling": dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9),
    "min-p": dict(do_sample=True, min_p=0.05, num_return_sequences=3),
    "beams": dict(num_beams=4, num_return_sequences=2, length_penalty=0.5),
    "ended-beams": dict(
        num_beams=5,
        num_return_sequences=4,
        early_stopping="never",
        eos_token_id=[7, 11, 20, 33, 40],
    ),
    "static-beams": dict(num_beams=3, cache_implementation="static"),
    "sampled-beams": dict(num_beams=3, do_sample=True),
    "penalties": dict(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=8),
    "stop": dict(eos_token_id=[7, 11, 40], max_new_tokens=40),
    "chunked-prefill": dict(prefill_chunk_size=4),
}


def run(model: Any, **options: Any) -> Tensor:
    torch.manual_seed(9)
    return model.generate(
        IDS, **{"attention_mask": MASK, "max_new_tokens": 14, "eos_token_id": None, **options}
    )


@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(
            case, way, marks=[pytest.mark.slow] if n and m != n % 2 else []
        )  # all ways for one family, one of two for the others
        for n, case in enumerate(FAMILIES)
        for m, way in enumerate(GENERATE)
    ],
)
def test_generate_gives_the_tokens_of_transformers(
    case: str, way: str, pair: Callable[..., Any]
) -> None:
    """A batch of unequal prompts, padded on the left, beyond the sliding windows and the context of LongRoPE."""
    models, options = pair(case), GENERATE[way]
    try:
        wanted = run(models.theirs, **options)
    except (AttributeError, TypeError, ValueError) as error:
        pytest.skip(f"transformers itself fails: {error}")
    assert torch.equal(run(models.ours, **options), wanted)


def test_generate_where_no_layer_of_the_cache_counts_tokens(build: Callable[..., CausalLM]) -> None:
    sizes = dict(num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8)
    model = build(
        num_hidden_layers=2,
        layer_types=("linear_attention",) * 2,
        linear_attention=sizes,
        vocab_size=96,
    )
    ours = TEModelsForCausalLM.wrap(model).eval()
    assert torch.equal(run(ours), run(ours, use_cache=False))


@pytest.mark.parametrize(
    "way, padding", [("greedy", 0), ("greedy", 6), ("static", 2), ("beams", 2)]
)
def test_longrope_with_a_cache_is_transformers_without_one(
    way: str, padding: int, pair: Callable[..., Any]
) -> None:
    """The angles change with the longest text, not with the longest row; the prompt ends before or after that."""
    models = pair("phi3-longrope")
    for length in (11, 17):
        ids = torch.randint(12, 60, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        mask[:, :padding] = 0
        mask[0, : padding + 2] = 0
        options = {
            **GENERATE[way],
            "attention_mask": mask,
            "max_new_tokens": 14,
            "eos_token_id": None,
        }
        wanted = models.theirs.generate(
            ids, **{**options, "cache_implementation": None, "use_cache": False}
        )
        assert torch.equal(models.ours.generate(ids, **options), wanted)


def test_longrope_needs_all_ids_where_its_angles_change(pair: Callable[..., Any]) -> None:
    model = pair("phi3-longrope").ours
    vectors, ids = model.model.embed_tokens(IDS[2:]), torch.cat((IDS, IDS), 1)[2:, :17]
    assert model.generate(inputs_embeds=vectors, eos_token_id=None, max_new_tokens=5).shape == (
        1,
        5,
    )
    assert model.generate(
        ids[:, :8], prefill_chunk_size=4, eos_token_id=None, max_new_tokens=12
    ).shape == (1, 20)
    for prompt in (dict(inputs_embeds=vectors), dict(inputs=ids, prefill_chunk_size=4)):
        with pytest.raises(
            UsageError, match="LongRoPE has other angles after 15 tokens.* give no inputs_embeds"
        ):
            model.generate(**prompt, eos_token_id=None, max_new_tokens=8)


def test_keywords_of_a_config_and_of_generation_are_taken(pair: Callable[..., Any]) -> None:
    folder, ids = pair("llama").folder, IDS[:, 5:]
    ending = transformers.GenerationConfig(max_new_tokens=3, eos_token_id=None)
    keywords = dict(
        use_cache=False, output_hidden_states=True, return_dict=True, generation_config=ending
    )
    model = TEModelsForCausalLM.from_pretrained(folder, device="cpu", **keywords)
    output = model(ids)
    assert CACHE not in output and len(output.hidden_states) == 4
    assert torch.equal(
        model.generate(ids), pair("llama").theirs.generate(ids, generation_config=ending)
    )


@pytest.mark.parametrize("options", [{}, dict(do_sample=True), dict(prompt_lookup_num_tokens=3)])
def test_assisted_generation_gives_the_tokens_of_transformers(
    options: dict, pair: Callable[..., Any]
) -> None:
    models, drafts = pair("qwen3-tied"), pair("llama")
    found = []
    for model, draft in ((models.theirs, drafts.theirs), (models.ours, drafts.ours)):
        torch.manual_seed(9)
        helper = {} if "prompt_lookup_num_tokens" in options else dict(assistant_model=draft)
        found.append(
            model.generate(IDS[2:], max_new_tokens=14, eos_token_id=None, **helper, **options)
        )
    assert torch.equal(*found)


def test_stop_strings_need_the_tokenizer(pair: Callable[..., Any], tmp_path: Path) -> None:
    models = pair("llama")
    ByteTokenizer().save(tmp_path)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    options: dict[str, Any] = dict(max_new_tokens=14, eos_token_id=None, do_sample=False)
    text = words.decode(models.theirs.generate(IDS[2:], **options)[0, 11:])
    options |= dict(stop_strings=[text[5:7], "never"], tokenizer=words)
    wanted = models.theirs.generate(IDS[2:], **options)
    assert torch.equal(models.ours.generate(IDS[2:], **options), wanted) and wanted.shape[1] < 25


def test_an_early_exit_is_refused(pair: Callable[..., Any]) -> None:
    with pytest.raises(
        UsageError,
        match="assistant_early_exit is not supported: give a smaller model as assistant_",
    ):
        run(pair("llama").ours, assistant_early_exit=1)


@pytest.mark.parametrize("case", FAMILIES[::3])
def test_scores_and_hidden_states_of_generate_are_those_of_transformers(
    case: str, pair: Callable[..., Any]
) -> None:
    wanted: dict[str, Any] = dict(
        output_hidden_states=True, output_scores=True, return_dict_in_generate=True
    )
    models = pair(case)
    theirs, ours = (
        run(model, max_new_tokens=4, **wanted) for model in (models.theirs, models.ours)
    )
    for a, b in zip(ours.scores, theirs.scores, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    real = MASK.bool()
    for step, (a, b) in enumerate(zip(ours.hidden_states, theirs.hidden_states, strict=True)):
        for layer, (x, y) in enumerate(zip(a, b, strict=True)):
            where = real if step == 0 else slice(None)
            # Of the order of the largest number: each is a sum over all channels of the layer before.
            close = dict(rtol=1e-4, atol=1e-4 * y[where].abs().max().item())
            torch.testing.assert_close(
                x[where], y[where], **close, msg=lambda text, n=layer: f"layer {n}: {text}"
            )


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "left padding": dict(attention_mask=MASK),
    "right padding": dict(attention_mask=MASK.flip(-1)),
    "packed documents": dict(
        position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]]), use_cache=False
    ),
    "positions from 7": dict(position_ids=torch.arange(7, 18)[None], use_cache=False),
    "positions with gaps": dict(
        position_ids=torch.tensor([[3, 4, 9, 10, 11, 12, 30, 31, 1, 2, 3]]), use_cache=False
    ),
    "positions and mask": dict(position_ids=torch.arange(2, 24, 2)[None], attention_mask=MASK),
    "mask of pairs": dict(
        attention_mask=torch.ones(3, 1, 11, 11).tril().bool() & (torch.arange(11) != 4),
        use_cache=False,
    ),
    "newest logits": dict(logits_to_keep=3),
    "some logits": dict(logits_to_keep=torch.tensor([2, 5])),
    "loss": dict(labels=IDS.where(IDS > 20, -100)),
    "loss over a count": dict(labels=IDS.where(IDS > 20, -100), num_items_in_batch=57),
    "shifted labels": dict(labels=IDS, shift_labels=IDS.flip(-1)),
    "padding in the loss": dict(labels=IDS, attention_mask=MASK.flip(-1)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", ["llama", "qwen2-mixed-window"])
def test_a_forward_pass_is_that_of_transformers(
    case: str, call: str, pair: Callable[..., Any]
) -> None:
    models, options = pair(case), CALLS[call]
    if call == "mask of pairs" and case != "llama":
        return  # transformers then takes no windows either, which "positions with gaps" covers
    theirs, ours = models.theirs(IDS, **options), models.ours(IDS, **options)
    mask = options.get("attention_mask")
    real = (
        mask.bool()
        if mask is not None and mask.dim() == 2
        else torch.ones(ours.logits.shape[:2], dtype=torch.bool)
    )
    torch.testing.assert_close(ours.logits[real], theirs.logits[real], **CLOSE)
    if "labels" in options and call != "padding in the loss":
        torch.testing.assert_close(ours.loss, theirs.loss, **CLOSE)


@pytest.mark.parametrize("case", ["llama", "qwen2-mixed-window"])
@torch.no_grad()
def test_a_row_of_documents_may_be_longer_than_a_text_of_the_model(
    case: str, pair: Callable[..., Any]
) -> None:
    """As collators without padding make of a batch (DataCollatorWithFlattening, TRL's padding_free)."""
    models = pair(case)
    longest = models.ours.model.config.longest_sequence
    lengths = [longest, longest - 3, 5]
    ids = torch.randint(3, 60, (1, sum(lengths)), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    found = models.ours(ids, position_ids=positions, labels=ids, use_cache=False)
    expected = models.theirs(ids, position_ids=positions, use_cache=False)
    torch.testing.assert_close(found.logits, expected.logits, **CLOSE)
    # Two documents, the first of which is too long.
    positions = torch.cat([torch.arange(longest + 1), torch.arange(longest + 1)])[None]
    with pytest.raises(UsageError, match=f"^a document of {longest + 1} tokens is longer"):
        models.ours(torch.zeros_like(positions), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_predicts_nothing(side: str, pair: Callable[..., Any]) -> None:
    """transformers counts the first token of a row after padding, from logits that mean nothing."""
    models, mask = pair("llama"), MASK if side == "left" else MASK.flip(-1)
    rows = [row[real.bool()] for row, real in zip(IDS, mask, strict=True)]
    sums = [
        F.cross_entropy(models.theirs(row[None]).logits[0, :-1], row[1:], reduction="sum")
        for row in rows
    ]
    labels = IDS.masked_fill(mask == 0, -100)
    expected = sum(sums) / sum(len(row) - 1 for row in rows)
    torch.testing.assert_close(
        models.ours(IDS, attention_mask=mask, labels=labels).loss, expected, **CLOSE
    )


@pytest.mark.parametrize("case", ["mistral-window", "gemma2"])
def test_the_loss_of_vectors_and_of_a_continued_cache_are_those_of_transformers(
    case: str, pair: Callable[..., Any]
) -> None:
    """Gemma's embedding in transformers scales its rows itself, and so the vectors in their place."""
    models = pair(case)
    vectors = models.theirs.get_input_embeddings()(IDS)
    assert_same_bits("embeddings", models.ours.get_input_embeddings()(IDS), vectors)
    assert_same_bits("vectors", models.ours(inputs_embeds=vectors).logits, models.ours(IDS).logits)
    found = []
    for model in (models.theirs, models.ours):
        cache = model(IDS, use_cache=True)[CACHE]
        found.append(model(IDS[:, :4], **{CACHE: cache}).logits)
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    texts = [
        m.generate(inputs_embeds=vectors, max_new_tokens=6, eos_token_id=None)
        for m in (models.theirs, models.ours)
    ]
    assert torch.equal(*texts)


@torch.no_grad()
def test_a_cache_has_either_name(pair: Callable[..., Any]) -> None:
    model = pair("llama").ours
    takes_a_cache_by_either_name(model, IDS)
    past = model(IDS[:, :4], use_cache=True)[CACHE]
    again, whole = (
        model.base_model(x, **given)
        for x, given in ((IDS[:, 4:], dict(past_key_values=past)), (IDS, {}))
    )
    torch.testing.assert_close(again.last_hidden_state, whole.last_hidden_state[:, 4:], **CLOSE)


@pytest.mark.parametrize("case", ["llama", "mistral-window", "gemma2"])
@torch.no_grad()
def test_a_prompt_with_padding_on_the_right_goes_on_as_each_row_alone(
    case: str, pair: Callable[..., Any]
) -> None:
    """From a cache that keeps all tokens; one of windows, which transformers fills with padding, is refused."""
    models = pair(case)
    mask = torch.ones(3, 14, dtype=torch.long)
    mask[0, 4:11] = 0
    mask[1, 9:11] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ids = torch.cat((IDS, IDS[:, :3].flip(-1)), dim=1)

    def steps(cache: Any) -> list[Tensor]:
        found = []
        for start, stop in ((0, 11), (11, 12), (12, 14)):
            options = {CACHE: cache, "attention_mask": mask[:, :stop]}
            places = positions[:, start:stop]
            found.append(models.ours(ids[:, start:stop], position_ids=places, **options).logits)
        return found

    found = torch.cat(steps(transformers.DynamicCache()), dim=1)
    for row in range(3):
        real = mask[row].bool()
        alone = models.theirs(ids[row : row + 1, real]).logits[0]
        torch.testing.assert_close(found[row, real], alone, **CLOSE)
    if case != "llama":
        with pytest.raises(UsageError, match="pad the prompts on the left"):
            steps(transformers.DynamicCache(config=models.theirs.config))


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_the_padding_token_is_trained_where_it_is_text(case: str, pair: Callable[..., Any]) -> None:
    """transformers' embedding passes its row no gradient (`padding_idx`), also where the token ends a text.

    Without that all gradients are the same; under a mask the token adds nothing here either.
    """
    models, pad = pair(case), int(IDS[0, 3])
    ours = TEModelsForCausalLM.from_pretrained(models.folder, device="cpu").train()
    found = gradients(ours, IDS)
    for index in (pad, None):
        theirs = copy.deepcopy(models.theirs).requires_grad_(True)
        theirs.model.embed_tokens.padding_idx = index
        expected = gradients(theirs, IDS)
        rows = torch.arange(len(found)) != (-1 if index is None else pad)
        torch.testing.assert_close(found[rows], expected[rows], rtol=1e-3, atol=1e-4)
        assert index is None or (found[pad] - expected[pad]).norm() > 0.1 * found[pad].norm()
    padded, other = IDS.masked_fill(MASK == 0, pad), IDS.masked_fill(MASK == 0, 5)
    torch.testing.assert_close(
        gradients(ours, padded, MASK), gradients(ours, other, MASK), rtol=0, atol=0
    )


def gradients(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the gradient of the embedding, [V, D]."""
    model.zero_grad()
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    return model.get_input_embeddings().weight.grad.clone()


def test_a_tuple_has_the_order_of_transformers(pair: Callable[..., Any]) -> None:
    models = pair("llama")
    ours, theirs = (m(IDS, labels=IDS, return_dict=False) for m in (models.ours, models.theirs))
    torch.testing.assert_close(ours[0], theirs[0], **CLOSE)
    torch.testing.assert_close(ours[1], theirs[1], **CLOSE)


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_fp8_weights_are_quantized_once_and_the_tokens_are_those_of_our_own_generate(
    recipe: str, build: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TEModelsForCausalLM.wrap(build(recipe)).eval()
    wanted = model.model.generate([[5, 6, 7, 8]], max_new_tokens=8)
    forget_kept_weights(model.model)
    passes = []
    forward = model.model.forward
    monkeypatch.setattr(
        model.model,
        "forward",
        lambda *a, **k: (passes.append(k["is_first_microbatch"]), forward(*a, **k))[1],
    )
    assert torch.equal(model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8), wanted)
    assert passes == [True] + [False] * 7
    assert torch.equal(model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8), wanted)
    assert passes[8:] == [False] * 8
    model(torch.tensor([[5, 6]]))
    assert passes[-1] is None, "outside of generate the weights may have changed"


def test_generations_of_two_threads_leave_no_weights_in_the_modules(
    build: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins inside the first, which ends during the second one's first pass."""
    model = TEModelsForCausalLM.wrap(build("current")).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = model.generate(ids, max_new_tokens=8)
    inside, first_is_over = threading.Event(), threading.Event()
    found: dict[str, Tensor] = {}

    def second() -> None:
        found["second"] = model.generate(ids, max_new_tokens=8)

    thread = threading.Thread(target=second)
    forward = model.model.forward

    def waiting(*given: Any, **options: Any) -> Any:
        if threading.current_thread() is thread:
            inside.set()
            assert first_is_over.wait(60)
        return forward(*given, **options)

    def begin_second(ids: Tensor, scores: Any, **options: Any) -> Tensor:
        if not inside.is_set():
            thread.start()
            assert inside.wait(60)
        return torch.zeros(len(ids), dtype=torch.bool)

    monkeypatch.setattr(model.model, "forward", waiting)
    found["first"] = model.generate(ids, max_new_tokens=8, stopping_criteria=[begin_second])
    first_is_over.set()
    thread.join()
    for name in ("first", "second"):
        assert_same_bits(name, found[name], wanted)
    assert not any(module._fp8_workspaces for module in te_linears(model.model, model.model.te))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_on_a_gpu_the_tokens_are_those_of_our_own_generate(
    recipe: str, cache: str, build: Callable[..., CausalLM]
) -> None:
    """Equal, or at the first difference a tie within the rounding of BF16, or of E4M3 where activations are in FP8: the
    two ways of attention differ in BF16's last bit, which may move an activation by a step of E4M3.
    """
    step = 2**-6 if recipe == "bf16" else 2**-3
    shape = dict(
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    model = TEModelsForCausalLM.wrap(build(recipe, **shape, **PLACE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(
                3 if parameter.dim() == 2 else 1
            )  # so that probabilities are far from uniform
    ids = (IDS % 64).to(model.device)
    model.train()(ids, labels=ids)  # scales for delayed scaling
    options: dict[str, Any] = dict(max_new_tokens=14, eos_token_id=None, cache_implementation=cache)
    found = model.eval().generate(ids, **options, output_scores=True, return_dict_in_generate=True)
    wanted = model.model.generate(ids, max_new_tokens=14)
    assert found.sequences.shape == wanted.shape == (3, 25)
    for one, other, scores in zip(
        found.sequences, wanted, torch.stack(found.scores, 1), strict=True
    ):
        if place := (one != other).nonzero().flatten().tolist():
            at = scores[place[0] - 11].float()
            assert at[one[place[0]]] - at[other[place[0]]] <= step * at.abs().max()


def test_recompute_follows_gradient_checkpointing(build: Callable[..., CausalLM]) -> None:
    model = TEModelsForCausalLM.wrap(build()).train()
    model(IDS % 64, labels=IDS % 64).loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert model.is_gradient_checkpointing and model.model.activation_checkpointing == "full"
    model(IDS % 64, labels=IDS % 64).loss.backward()
    for (name, p), grad in zip(model.named_parameters(), wanted, strict=True):
        assert_same_bits(name, p.grad, grad)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_options_of_gradient_checkpointing_are_not_dropped(build: Callable[..., CausalLM]) -> None:
    model = TEModelsForCausalLM.wrap(build())
    model.gradient_checkpointing_enable(every_n_layers=2)
    assert model.model.activation_checkpointing == 2
    with pytest.raises(UsageError, match="build the model with activation_offload=True"):
        model.gradient_checkpointing_enable(offload=True)
    model.model.activation_offload = True
    model.gradient_checkpointing_enable(offload=True)
    assert model.model.activation_checkpointing == "full"


@pytest.mark.parametrize(
    "call", [dict(output_attentions=True), dict(shape_labels=IDS), dict(input_ids=None)]
)
def test_unsupported_calls_are_refused_in_one_line(call: dict, pair: Callable[..., Any]) -> None:
    with pytest.raises(UsageError) as caught:
        pair("llama").ours(**{"input_ids": IDS, **call})
    assert "\n" not in str(caught.value)


def test_the_vocabulary_is_not_resized(pair: Callable[..., Any]) -> None:
    model = pair("llama").ours
    assert (
        model.resize_token_embeddings(96)
        is model.get_input_embeddings()
        is model.model.embed_tokens
    )
    with pytest.raises(UsageError, match="96 tokens and cannot be resized to 97"):
        model.resize_token_embeddings(97)


def test_parts_that_other_programs_look_for(build: Callable[..., CausalLM]) -> None:
    model = TEModelsForCausalLM.wrap(build(tie_word_embeddings=True))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model._no_split_modules == {"Block"} and type(model.model.layers[0]).__name__ == "Block"
    assert model.can_generate() and model.device.type == "cpu"
    hidden = model.base_model(
        torch.arange(8)[None]
    ).last_hidden_state  # what reward models and losses of TRL start from
    assert torch.equal(model.get_output_embeddings()(hidden), model(torch.arange(8)[None]).logits)
    assert "model.lm_head.weight" not in model.state_dict() and not any(
        "_extra_state" in n for n in model.state_dict()
    )
    assert model.num_parameters() == model.model.num_parameters()


def test_a_model_is_built_from_a_config() -> None:
    shape = dict(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    config = TEModelsConfig(**shape, recipe="current", device="cpu", num_layers_at_end_in_bf16=1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert isinstance(model, TEModelsForCausalLM) and model.model.recipe.name == "current"
    assert (
        model.model.fp8_layers == range(1, 2) and model.config.model_config() == model.model.config
    )
    in_fp32 = transformers.AutoModelForCausalLM.from_config(config, dtype="float32")
    assert in_fp32.dtype == torch.float32


IMPORTS = {
    "te_models first": "import te_models; from transformers import AutoConfig, AutoModelForCausalLM",
    "transformers first": "from transformers import AutoConfig, AutoModelForCausalLM; import te_models",
    "in the middle": "import transformers, te_models; from transformers import AutoConfig, AutoModelForCausalLM",
    "models first": "import te_models; from transformers import PreTrainedModel, AutoConfig, AutoModelForCausalLM",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", IMPORTS)
def test_any_order_of_imports_registers_the_classes(
    order: str, tmp_path: Path, build: Callable[..., CausalLM]
) -> None:
    build("current").save_pretrained(tmp_path / "model")
    code = f"{IMPORTS[order]}\nfolder = {str(tmp_path / 'model')!r}\n"
    code += "model = AutoModelForCausalLM.from_pretrained(folder, device_map='cpu')\n"
    code += "print(type(AutoConfig.from_pretrained(folder)).__name__, type(model).__name__, model.model.recipe.name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["TEModelsConfig", "TEModelsForCausalLM", "current"], done.stderr


def test_an_old_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.0")
    monkeypatch.delitem(sys.modules, "te_models.huggingface.config")
    with pytest.raises(
        MissingPackage, match=r"TEModelsForCausalLM needs transformers 5.14 or newer, not 4.57.0"
    ):
        __import__("te_models.huggingface.config")
