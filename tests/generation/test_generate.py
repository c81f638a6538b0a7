"""Generation: sampling, unequal prompts, stops, streaming, chat templates, and that training is left as it was."""

import io
import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from chat_model import write_chat_model
from decoding import PROMPTS, build

from te_models import CausalLM, list_recipes
from te_models.cli import main
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.tokenizer import load_tokenizer
from te_models.fp8.scaling_state import fp8_state
from te_models.generation.sampling import sample
from te_models.generation.text import stream_text

pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import PreTrainedTokenizerFast
    from transformers.generation import logits_process

RECIPES = [name for name in list_recipes() if name != "nvfp4"]


@pytest.mark.parametrize("original", [12, 19, 22])
def test_text_that_outgrows_the_context_of_longrope_is_that_without_a_cache(original: int) -> None:
    scaling = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[9.0 - pair for pair in range(8)],
                   original_max_position_embeddings=original)  # fmt: skip
    model = build(rope_scaling=scaling, head_dim=16, qk_norm=True, attention_multiplier=2.0)
    with torch.no_grad():  # attention sharp and large enough for the angles to matter
        for block in model.layers:
            block.self_attn.o_proj.weight.mul_(40)
    together = model.generate(PROMPTS, max_new_tokens=12)
    assert torch.equal(together, model.generate(PROMPTS, max_new_tokens=12, use_cache=False))


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_state_does_not_change(recipe: str) -> None:
    model = build(recipe)
    for seed in range(2):
        ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(seed))
        model(ids, labels=ids).loss.backward()
    before = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    for _ in range(3):
        model.generate(PROMPTS, max_new_tokens=3, do_sample=True, seed=1)
    stream = model.stream(PROMPTS, max_new_tokens=5)
    next(stream)
    stream.close()
    assert model.training and torch.is_grad_enabled() and torch.equal(state, torch.get_rng_state())
    assert bool(before) == (recipe == "delayed")
    assert all(torch.equal(tensor, before[name]) for name, tensor in fp8_state(model).items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


def test_a_stream_gives_the_tokens_of_generate() -> None:
    model = build()
    whole = model.generate(PROMPTS, max_new_tokens=6, do_sample=True, seed=3, temperature=1.5)
    steps = list(model.stream(PROMPTS, max_new_tokens=6, do_sample=True, seed=3, temperature=1.5))
    assert torch.equal(torch.stack(steps, dim=1), whole[:, -6:])


@pytest.mark.parametrize(
    "options, judge",
    [
        (dict(top_k=5), logits_process.TopKLogitsWarper(5)),
        (dict(top_p=0.6), logits_process.TopPLogitsWarper(0.6)),
        (dict(min_p=0.2), logits_process.MinPLogitsWarper(0.2)),
        (dict(temperature=0.5), logits_process.TemperatureLogitsWarper(0.5)),
        # In transformers' order the temperature comes first; the others would keep other tokens before it.
        (
            dict(temperature=3.0, min_p=0.5),
            [logits_process.TemperatureLogitsWarper(3.0), logits_process.MinPLogitsWarper(0.5)],
        ),
        (
            dict(temperature=3.0, top_p=0.5),
            [logits_process.TemperatureLogitsWarper(3.0), logits_process.TopPLogitsWarper(0.5)],
        ),
    ],
)
def test_sampling_follows_the_distribution_of_transformers(options: dict, judge: Any) -> None:
    logits = torch.randn(1, 40) * 2
    expected = logits.clone()
    for warper in judge if isinstance(judge, list) else [judge]:
        expected = warper(None, expected)
    expected = expected.softmax(-1)[0]
    drawn = sample(logits.expand(40_000, -1), torch.Generator().manual_seed(0), **options)
    share = torch.bincount(drawn, minlength=40) / len(drawn)
    assert (share[expected == 0] == 0).all()
    torch.testing.assert_close(share, expected, atol=0.01, rtol=0)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_min_p_of_1_leaves_the_likeliest_tokens(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.999, 3.0, -1.0]]).expand(500, -1)
    drawn = sample(logits, torch.Generator().manual_seed(0), temperature=temperature, min_p=1.0)
    assert set(drawn.tolist()) == {1, 3}, "a tie is drawn from"
    assert set(sample(logits, torch.Generator().manual_seed(0), min_p=0.0).tolist()) == {
        0,
        1,
        2,
        3,
        4,
    }


def test_top_p_is_the_smallest_set_of_its_probability() -> None:
    """Which sets of equal probabilities may have exactly."""
    logits = torch.tensor([[30.0, 30.0, -99.0, 30.0, 30.0]]).expand(500, -1)
    for top_p, size in ((0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4)):
        assert len(sample(logits, torch.Generator().manual_seed(0), top_p=top_p).unique()) == size


def test_a_seed_is_a_text_and_top_k_1_is_greedy() -> None:
    model = build()
    runs = [
        model.generate(PROMPTS, max_new_tokens=8, do_sample=True, seed=seed) for seed in (3, 3, 4)
    ]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    greedy = model.generate(PROMPTS, max_new_tokens=8)
    assert torch.equal(model.generate(PROMPTS, max_new_tokens=8, do_sample=True, top_k=1), greedy)


def test_without_a_seed_each_text_is_another() -> None:
    """24 tokens at a high temperature: two texts are equal once in 250^24."""
    model, options = build(), dict(max_new_tokens=8, do_sample=True, temperature=100.0)
    assert not torch.equal(*(model.generate(PROMPTS, **options) for _ in range(2)))


def test_rows_end_at_their_stop_tokens_and_are_filled_up() -> None:
    model = build()
    free = model.generate(PROMPTS, max_new_tokens=10)[:, 19:]
    stops = [int(free[0, 3]), int(free[1, 5])]
    out = model.generate(PROMPTS, max_new_tokens=10, eos_token_id=stops)[:, 19:]
    for row, reference in zip(out, free, strict=True):
        hits = [i for i, token in enumerate(reference.tolist()) if token in stops]
        kept = hits[0] + 1 if hits else 10
        assert torch.equal(row[:kept], reference[:kept][: len(row)])
        assert set(row[kept:].tolist()) <= {stops[0]}, (
            "without a pad token, the first stop token fills up"
        )
    own = build(eos_token_id=stops, pad_token_id=9)
    own.load_state_dict(model.state_dict())
    mine = own.generate(PROMPTS, max_new_tokens=10)[:, 19:]
    assert torch.equal(mine == 9, (out == stops[0]) & (mine != out)) and (mine == 9).any()
    assert torch.equal(own.generate(PROMPTS, max_new_tokens=10, eos_token_id=None)[:, 19:], free)


def test_rows_end_at_their_stop_strings() -> None:
    model, words = build(), ByteTokenizer()
    free = model.generate(PROMPTS[:1], max_new_tokens=24, eos_token_id=None)[0, 19:].tolist()
    text = words.decode(free)
    start = next(i for i in range(3, 20) if all(32 <= token < 127 for token in free[i : i + 2]))
    ending = bytes(free[start : start + 2]).decode()
    out = model.generate(PROMPTS[:1], max_new_tokens=24, stop_strings=ending, tokenizer=words)[
        0, 19:
    ].tolist()
    assert (
        words.decode(out).endswith(ending) and words.decode(out) == text[: text.index(ending) + 2]
    )
    pieces = list(stream_text(model, words, words.decode(PROMPTS[0]), 24, stop_strings=[ending]))
    assert "".join(pieces) == text[: text.index(ending)], "text ends before the stop string"


class Scripted(ByteTokenizer):
    """Decodes ids to fixed pieces of text."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: Any) -> str:
        return b"".join(self.pieces[i] for i in ids if i < len(self.pieces)).decode(
            errors="replace"
        )


@pytest.mark.parametrize(
    "pieces, stops, told",
    [
        ([b"a", b"b", b"c"], (), ["a", "b", "c"]),
        ([b"a", "\u20ac".encode()[:2], "\u20ac".encode()[2:], b"d"], (), ["a", "\u20ac", "d"]),
        ([b"a", b"<", b"b", b"<", b"/s>", b"never"], ("</s>",), ["a", "<b"]),
        ([b"a", b"<", b"/"], ("</s>",), ["a", "</"]),
    ],
)
def test_streamed_text_is_final(
    pieces: list[bytes], stops: Sequence[str], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def scripted(model: Any, ids: Any, count: int, **options: Any) -> Any:
        yield from (torch.tensor([i]) for i in range(count))

    monkeypatch.setattr("te_models.generation.text.stream", scripted)
    assert (
        list(stream_text(build(), Scripted(pieces), "x", len(pieces), stop_strings=stops)) == told
    )


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Words that begin with a space, as a Llama 2 tokenizer has them; its decoder drops the space before the first."""
    words = ["<unk>", "</s>", "\u2581Hello", "\u2581world", "\u2581and", "s", "\u2581"]
    model = tokenizers.models.BPE(
        {word: i for i, word in enumerate(words)}, [], unk_token="<unk>", fuse_unk=True
    )
    backend = tokenizers.Tokenizer(model)
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])
    folder = tmp_path_factory.mktemp("sentencepiece")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    "tokens, stops, text",
    [
        ([3], (), " world"),
        ([3, 5, 4, 3], (), " worlds and world"),
        ([5, 3], (), "s world"),
        ([3, 5, 4, 3], (" and",), " worlds"),
        ([4, 3], (" and",), ""),
    ],
)
def test_streamed_text_keeps_its_first_space(
    tokens: list[int],
    stops: Sequence[str],
    text: str,
    sentencepiece: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scripted(model: Any, ids: Any, count: int, **options: Any) -> Any:
        yield from (torch.tensor([i]) for i in tokens)

    monkeypatch.setattr("te_models.generation.text.stream", scripted)
    assert sentencepiece.decode([3]) == "world", "the decoder drops the space by itself"
    assert (
        "".join(stream_text(build(), sentencepiece, [2], len(tokens), stop_strings=stops)) == text
    )


def test_a_stop_string_may_begin_with_the_first_space(
    sentencepiece: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = iter([4, 3, 3])
    monkeypatch.setattr(
        "torch.argmax", lambda logits, dim: torch.full(logits.shape[:1], next(tokens))
    )
    out = build().generate(
        [2], max_new_tokens=3, stop_strings=" and", tokenizer=sentencepiece, eos_token_id=None
    )
    assert out.tolist() == [[2, 4]]


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([], {}, "the prompt is empty"),
        ([[]], {}, "the prompt is empty"),
        ([[1, 2], []], {}, "the prompt is empty"),
        (torch.zeros(1, 0, dtype=torch.long), {}, "the prompt is empty"),
        (
            torch.ones(2, 3, dtype=torch.long),
            dict(attention_mask=torch.tensor([[0] * 3, [1] * 3])),
            "prompt is empty",
        ),
        (
            torch.ones(1, 3, dtype=torch.long),
            dict(attention_mask=torch.tensor([[1, 1, 0]])),
            "padding on the right",
        ),
        (
            torch.ones(1, 3, dtype=torch.long),
            dict(attention_mask=torch.ones(1, 4)),
            "attention_mask has shape [1, 4]",
        ),
        ([1, 999], {}, "the prompt has token 999"),
        ([1] * 97, {}, "max_position_embeddings=96"),
        ([1], dict(max_new_tokens=96), "max_position_embeddings=96"),
        ([1], dict(max_new_tokens=0), "max_new_tokens=0"),
        (
            [1],
            dict(max_new_tokens="8"),
            "max_new_tokens='8' is of a wrong type: give a whole number",
        ),
        ([1], dict(do_sample=True, temperature=-0.5), "temperature=-0.5"),
        ([1], dict(do_sample=True, top_k=0), "top_k=0"),
        ([1], dict(do_sample=True, top_p=1.5), "top_p=1.5"),
        ([1], dict(do_sample=True, min_p=-0.1), "min_p=-0.1"),
        ([1], dict(top_k=5), "top_k=5 does not change which token is likeliest: give do_sample="),
        ([1], dict(seed=0), "seed=0 draws nothing, since the likeliest token is taken: give do_"),
        ([1], dict(stop_strings=["x"]), "needs tokenizer="),
        ([1], dict(stop_strings=[""], tokenizer=ByteTokenizer()), "a stop string is empty"),
        ([1], dict(cuda_graph=True), "cuda_graph=True needs a CUDA device and the model is on cpu"),
        ([1], dict(cuda_graph=True, use_cache=False), "cuda_graph=True needs the cache"),
        ([1], dict(cuda_graph="yes"), "unknown cuda_graph 'yes'"),
    ],
)
def test_bad_prompts_are_refused_in_one_line(prompt: Any, options: dict, message: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=".") as error:
        model.generate(prompt, **{"max_new_tokens": 4, **options})
    assert message in str(error.value) and "\n" not in str(error.value) and model.training


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Hugging Face folder whose tokenizer has a chat template."""
    return write_chat_model(tmp_path_factory.mktemp("chat") / "model")


MESSAGES = [
    [dict(role="user", content=" hello ")],
    [dict(role="system", content="be brief"), dict(role="user", content="hi")],
    [
        dict(role="user", content="1"),
        dict(role="assistant", content=" 2 "),
        dict(role="user", content="3 <b> \u00e9"),
    ],
]


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize(
    "options", [{}, dict(enable_thinking=False), dict(tools=[{"name": "\u00e9t\u00e9", "b": [1]}])]
)
def test_a_chat_template_gives_what_transformers_gives(
    messages: list, options: dict, chat_model: Path
) -> None:
    judge = PreTrainedTokenizerFast.from_pretrained(chat_model)
    text = load_tokenizer(chat_model).chat_template().render(messages, **options)
    assert text == judge.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    ids = judge.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **options
    )
    assert load_tokenizer(chat_model).encode(text) == ids


def test_a_prompt_begins_as_transformers_begins_it(chat_model: Path, tmp_path: Path) -> None:
    document = json.loads((chat_model / "tokenizer.json").read_text())
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    begin = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    special = {"<|begin|>": dict(id="<|begin|>", ids=[256], tokens=["<|begin|>"])}
    processor = dict(
        type="TemplateProcessing", single=[begin, sequence], pair=[begin, sequence, sequence]
    )
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({**document, "post_processor": {**processor, "special_tokens": special}})
    )
    words = load_tokenizer(tmp_path)
    assert (
        words.encode_prompt("ab")
        == PreTrainedTokenizerFast.from_pretrained(tmp_path)("ab").input_ids
        == [256, 97, 98]
    )
    assert words.encode("ab") == ByteTokenizer().encode_prompt("ab") == [97, 98]
    told = []
    model = build(vocab_size=288)
    model.register_forward_pre_hook(lambda module, inputs: told.append(inputs[0].tolist()))
    list(stream_text(model, words, "ab", 1))
    assert told == [[[256, 97, 98]]]


def test_chat_templates_are_found_in_every_place(chat_model: Path, tmp_path: Path) -> None:
    config = json.loads((chat_model / "tokenizer_config.json").read_text())
    forms = {
        "list": [
            dict(name="tool_use", template="x"),
            dict(name="default", template="{{ bos_token }}!"),
        ]
    }
    forms |= {"text": "{{ bos_token }}!", "file": "y"}
    shutil.copy(chat_model / "tokenizer.json", tmp_path)
    for form, template in forms.items():
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({**config, "chat_template": template})
        )
        if form == "file":
            (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}!")
        assert load_tokenizer(tmp_path).chat_template().render(MESSAGES[0]) == "<|begin|>!"
    (tmp_path / "chat_template.jinja").write_text("{% nonsense %}")
    with pytest.raises(ValueError, match="not valid Jinja"):
        load_tokenizer(tmp_path).chat_template()
    with pytest.raises(ValueError, match="say something"):
        load_tokenizer(chat_model).chat_template().render([dict(role="user", content="")])


def run(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    fixed = ["--device", "cpu", "--engine", "emulated", "--max-new-tokens", "6", "--greedy"]
    assert main(["generate", *arguments, *fixed]) == 0
    return capsys.readouterr().out


def test_the_command_line_continues_and_talks(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    model = CausalLM.from_pretrained(chat_model, device="cpu", engine="emulated")
    words = load_tokenizer(chat_model)
    at = ["--model", str(chat_model)]
    assert (
        run(capsys, *at, "--prompt", "ab")
        == "ab" + "".join(stream_text(model, words, "ab", 6)) + "\n"
    )
    prompt = words.chat_template().render(MESSAGES[1])
    answer = "".join(stream_text(model, words, words.encode(prompt), 6))
    assert run(capsys, *at, "--chat", "--system", "be brief", "--prompt", "hi") == answer + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nagain\n"))
    both = run(capsys, *at, "--chat", "--system", "be brief")
    talk = [
        *MESSAGES[1],
        dict(role="assistant", content=answer),
        dict(role="user", content="again"),
    ]
    second = "".join(stream_text(model, words, words.encode(words.chat_template().render(talk)), 6))
    assert both == f"{answer}\n{second}\n"
    assert (
        main(
            [
                "convert",
                *at,
                "--format",
                "te",
                "--out",
                str(tmp_path / "own"),
                "--recipe",
                "current",
            ]
        )
        == 0
    )
    assert "parameters in float32" in capsys.readouterr().out
    assert run(capsys, "--model", str(tmp_path / "own"), "--recipe", "bf16", "--chat", "--prompt", "hi", "--system",
               "be brief") == answer + "\n"  # fmt: skip
    assert main(["convert", "--model", str(tmp_path / "own"), "--out", str(tmp_path / "back")]) == 0
    assert (tmp_path / "back/tokenizer.json").exists() and (
        tmp_path / "back/model.safetensors"
    ).exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give --prompt TEXT, or --chat"),
        (["--chat", "--prompt", "x", "--tokenizer", "PLAIN"], "has no chat template"),
        (
            ["--prompt", "x", "--tokenizer", "LARGE"],
            "the tokenizer has 300 ids but the model's vocab_size is 288",
        ),
        (["--prompt", "x" * 97], "max_position_embeddings=96"),
        (["--prompt", "x", "--max-new-tokens", "4", "--top-p", "2"], "top_p=2.0"),
        (["--prompt", "x", "--max-new-tokens", "4", "--temperature", "-1"], "0 for the likeliest"),
        (["--prompt", "x", "--model", "EMPTY"], "has no config.json: it holds no model"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str],
    message: str,
    chat_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    for name, size in (("PLAIN", 288), ("LARGE", 300)):
        document = json.loads((chat_model / "tokenizer.json").read_text())
        document["model"]["vocab"] |= {f"word{i}": i for i in range(259, size)}
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "EMPTY").mkdir()
    shutil.copy(chat_model / "tokenizer.json", tmp_path / "EMPTY")
    arguments = [str(tmp_path / a) if a in ("PLAIN", "LARGE", "EMPTY") else a for a in arguments]
    assert main(["generate", "--model", str(chat_model), "--device", "cpu", *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1
    assert not told.out, "the prompt is not repeated before a refusal"


@pytest.mark.parametrize("arguments, message", [
    (["--format", "hff"], "did you mean 'hf'"), (["--dtype", "float8"], "unknown dtype"),
    (["--attention-gate", "element"], "did you mean 'elementwise'"),
])  # fmt: skip
def test_mistakes_in_converting(
    arguments: list[str],
    message: str,
    chat_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    out = tmp_path / "out"
    assert main(["convert", "--model", str(chat_model), "--out", str(out), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not out.exists()


def test_a_hugging_face_model_without_tokenizer_is_no_model_of_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    build().save_pretrained(tmp_path, format="hf")
    assert main(["generate", "--model", str(tmp_path), "--device", "cpu", "--prompt", "x"]) == 2
    assert "has no tokenizer.json: give --tokenizer" in capsys.readouterr().err
