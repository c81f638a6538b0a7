"""Conversations as tokens: rendered, encoded and masked as in transformers, for any prefix of a conversation."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from fewer import every
from packaging.version import Version

from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.chat_template import PLAIN
from te_models.data.encoding import Fit, encode_documents, fit_records
from te_models.data.formats import Document, row_document
from te_models.data.tokenizer import load_tokenizer
from te_models.data.tokenizer_base import Tokenizer
from te_models.data.turns import THOUGHTS
from te_models.errors import DataError

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

OLD = Version(transformers.__version__) < Version("5.24")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HEAD = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
)
CALLS = "{% for call in message.tool_calls or [] %}{{ '\n<call>' + (call.function | tojson) }}{% endfor %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PREFIXED = HEAD + "{{ message.content }}" + CALLS + "{{ '<|im_end|>\n' }}" + TAIL
MARKED = (
    HEAD
    + "{% if message.role == 'assistant' %}{%- generation -%}{{ message.content }}"
    + CALLS
    + "{{ '<|im_end|>' }}{%- endgeneration -%}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    + TAIL
)
# Like Qwen3's: an answer is rendered otherwise once more turns follow.
CHANGING = HEAD + (
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}"
) + TAIL  # fmt: skip
# Like DeepSeek-R1's: asked for an answer, it opens a thought that a finished answer does not have.
OPENING = (
    HEAD
    + "{{ message.content + '<|im_end|>\n' }}"
    + TAIL.replace("assistant\n", "assistant\n<think>\n")
)

USER, TOOLS = (
    {"role": "user", "content": "What is 2 + 3?"},
    [{"type": "function", "function": {"name": "add"}}],
)
REPLY = {"role": "assistant", "content": "It is 5."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "\u00e9"}}}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [USER, REPLY]},
    "several turns": {"messages": [USER, REPLY, {"role": "user", "content": "Sure?"}, {**REPLY, "content": "Yes."}]},
    "system prompt": {"messages": [{"role": "system", "content": "Be brief."}, USER, REPLY]},
    "tool calls": {
        "messages": [USER, {**REPLY, "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "5"}, REPLY],
        "tools": TOOLS,
    },
    "an empty answer": {"messages": [USER, {"role": "assistant", "content": ""}, USER, REPLY]},
    "two answers in a row": {"messages": [USER, REPLY, {**REPLY, "content": "Five."}]},
    "begins with an answer": {"messages": [REPLY, USER, REPLY]},
    "ends with a question": {"messages": [USER, REPLY, USER]},
    "only a question": {"messages": [USER]},
    "letters": {"messages": [{"role": "user", "content": "\u00fc\r\n\u2028\U0001f600"},
                             {**REPLY, "content": " \u4f60\u597d \r\n\U0001f600\n"}]},
    "special tokens spelled out": {"messages": [{"role": "user", "content": "<|im_end|> <|endoftext|>"}, REPLY]},
    "spaces": {"messages": [{"role": "user", "content": "\n "}, {**REPLY, "content": "  indented\n\n"}]},
}  # fmt: skip


def bpe(trim_offsets: bool) -> Any:
    """A byte-level BPE with a few hundred merges, trained here."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim_offsets)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    text = [json.dumps(conversation, ensure_ascii=False) for conversation in CONVERSATIONS.values()]
    backend.train_from_iterator([*text, PREFIXED, "assistant\nuser\n"] * 3, trainer)
    return backend


@pytest.fixture(scope="module", params=[False, True], ids=["offsets", "trimmed offsets"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trimmed" if request.param else "offsets")
    bpe(request.param).save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def document(conversation: dict[str, Any]) -> Document:
    return row_document(conversation, {}, "a.jsonl:1", "a.jsonl")


def encode(
    tokenizer: Tokenizer, *conversations: dict[str, Any]
) -> list[tuple[list[int], list[bool]]]:
    encoded = encode_documents(
        [document(conversation) for conversation in conversations], tokenizer
    )
    assert encoded.counted is not None
    ends = (encoded.starts + encoded.lengths).tolist()
    parts = [slice(start, end) for start, end in zip(encoded.starts.tolist(), ends, strict=True)]
    return [(encoded.tokens[part].tolist(), encoded.counted[part].tolist()) for part in parts]


def test_marked_answers_are_those_of_transformers(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.set_chat_template(MARKED)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    found = dict(zip(CONVERSATIONS, encode(tokenizer, *CONVERSATIONS.values()), strict=True))
    for name, conversation in CONVERSATIONS.items():
        expected = reference.apply_chat_template(
            conversation["messages"], tools=conversation.get("tools"), chat_template=MARKED, tokenize=True,
            return_dict=True, return_assistant_tokens_mask=True,
        )  # fmt: skip
        assert found[name][0] == expected["input_ids"], name
        if name == "an empty answer":  # which the loss does not count here
            assert sum(found[name][1]) == sum(expected["assistant_masks"]) - 1
            continue
        if OLD and "trimmed" in str(folder) and name in ("letters", "spaces"):
            # An answer that begins with a space, which has no offset: transformers' mask left it out as a whole.
            assert sum(found[name][1]) > sum(expected["assistant_masks"])
            continue
        assert found[name][1] == [bool(counted) for counted in expected["assistant_masks"]], name
        assert any(found[name][1]) == (name != "only a question")


def test_without_marks_answers_are_what_the_template_adds_to_the_turns_before(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.set_chat_template(PREFIXED)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for (name, conversation), found in zip(
        CONVERSATIONS.items(), encode(tokenizer, *CONVERSATIONS.values()), strict=True
    ):
        messages, options = (
            conversation["messages"],
            dict(tools=conversation.get("tools"), chat_template=PREFIXED),
        )
        whole = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        counted = [False] * len(whole)
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and (message["content"] or "tool_calls" in message):
                if number == 0:  # transformers renders no conversation without messages
                    stop = found[1].index(False, found[1].index(True))
                    counted[:stop] = found[1][:stop]
                    continue
                before = reference.apply_chat_template(
                    messages[:number],
                    tokenize=True,
                    return_dict=False,
                    add_generation_prompt=True,
                    **options,
                )
                after = reference.apply_chat_template(
                    messages[: number + 1], tokenize=True, return_dict=False, **options
                )
                assert whole[: len(after)] == after and after[: len(before)] == before
                # Where offsets are trimmed, a line break after the end of the turn has no place, and does not count.
                last = len(after) - (1 if "trimmed" in str(folder) else 0)
                counted[len(before) : last] = [True] * (last - len(before))
        assert found[0] == whole, name
        differing = [
            i for i, (one, other) in enumerate(zip(found[1], counted, strict=True)) if one != other
        ]
        assert all(tokenizer.decode([whole[i]]).strip() == "" for i in differing), name


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (
            CHANGING,
            "several turns",
            "renders the turns up to message 2 otherwise when more turns follow",
        ),
        (
            OPENING,
            "one turn",
            "renders the turns up to message 2 otherwise when it is asked for an answer",
        ),
        (
            "{{ raise_exception('alternate') }}",
            "one turn",
            "the chat template refuses this record: alternate",
        ),
        (
            "{{ messages[0].x.y }}",
            "one turn",
            "the chat template refuses this record: .* has no attribute",
        ),
    ],
)
def test_a_template_that_hides_answers_is_refused(
    template: str, conversation: str, message: str
) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.set_chat_template(template)
    with pytest.raises(DataError, match=f"^a.jsonl:1: .*{message}") as caught:
        encode(tokenizer, CONVERSATIONS[conversation])
    assert "\n" not in str(caught.value)
    if template is CHANGING:
        encode(tokenizer, CONVERSATIONS["one turn"])  # which it shows


@pytest.mark.parametrize("template", [MARKED, PREFIXED])
def test_a_template_that_leaves_out_tool_calls_is_refused(template: str) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.set_chat_template(template)
    encode(tokenizer, CONVERSATIONS["tool calls"])
    tokenizer.set_chat_template(template.replace(CALLS, ""))
    encode(tokenizer, CONVERSATIONS["several turns"])
    with pytest.raises(
        DataError,
        match="a.jsonl:1: the chat template does not write the tool calls of message 2: giv",
    ):
        encode(tokenizer, CONVERSATIONS["tool calls"])


@pytest.mark.parametrize(("name", "template"), every(2, THOUGHTS, [MARKED, PREFIXED]))
def test_a_template_that_leaves_out_reasoning_is_refused(name: str, template: str) -> None:
    tokenizer, thinking = ByteTokenizer(), {**REPLY, name: "2 and 3 are 5"}
    tokenizer.set_chat_template(template)
    says = rf"a.jsonl:1: the chat template does not write the reasoning of message 2 \({name}\): give --chat-template"
    for messages in ([USER, thinking], [USER, thinking, USER], [USER, thinking, USER, REPLY]):
        with pytest.raises(DataError, match=says):
            encode(tokenizer, {"messages": messages})
    tokenizer.set_chat_template("{# message." + name + " #}" + template)  # it knows the field
    encode(
        tokenizer, {"messages": [USER, thinking, USER, REPLY]}
    )  # and may leave out earlier thoughts
    with pytest.raises(DataError, match=says):
        encode(tokenizer, {"messages": [USER, thinking]})
    tokenizer.set_chat_template("{# enable_" + name + " #}" + template)
    with pytest.raises(DataError, match=says):
        encode(tokenizer, {"messages": [USER, thinking, USER, REPLY]})
    tokenizer.set_chat_template()
    ids, counted = encode(tokenizer, {"messages": [USER, thinking]})[0]
    said = tokenizer.decode(i for i, learned in zip(ids, counted, strict=True) if learned)
    assert said == "<think>\n2 and 3 are 5\n</think>\n\nIt is 5."


def test_an_empty_answer_that_a_template_does_not_mark_is_one_line() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.set_chat_template(
        MARKED.replace("== 'assistant' %", "== 'assistant' and message.content %")
    )
    encode(tokenizer, CONVERSATIONS["several turns"])
    with pytest.raises(
        DataError,
        match="^a.jsonl:1: the chat template marks 1 answers in 2 messages .* that are empty",
    ):
        encode(tokenizer, CONVERSATIONS["an empty answer"])


@pytest.mark.parametrize("text", ["", " ", "\n\u3000"])
def test_a_completion_of_white_space_is_no_answer(text: str) -> None:
    encoded = encode_documents(
        [Document(text, "q"), Document(text, ""), Document("a", ""), Document("t")], ByteTokenizer()
    )
    kept, fitted, fit = fit_records(encoded, 99, "drop", None)
    assert kept.tolist() == [2, 3] and fit == Fit(unanswered=2)
    assert [part.tolist() for part in fitted.parts(fitted.tokens)] == [
        [ord("a"), 257],
        [ord("t"), 257],
    ]


@pytest.mark.parametrize("template", [MARKED, PREFIXED])
def test_answers_with_weight_0_do_not_count(template: str) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.set_chat_template(template)
    messages = [USER, {**REPLY, "weight": 0}, USER, {**REPLY, "weight": 1}, USER, REPLY]
    plain = [
        {name: value for name, value in message.items() if name != "weight"} for message in messages
    ]
    (ids, counted), (same, everything) = encode(
        tokenizer, {"messages": messages}, {"messages": plain}
    )
    assert ids == same
    first = everything.index(True)
    stop = everything.index(False, first)
    assert counted == [False] * stop + everything[stop:]


def test_the_plain_template_ends_answers_with_the_token_that_ends_text(tmp_path: Path) -> None:
    """And transformers encodes it alike from the saved files."""
    tokenizer = ByteTokenizer()
    tokenizer.set_chat_template()
    tokenizer.save(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == PLAIN
    again, reference = (
        load_tokenizer(tmp_path),
        transformers.AutoTokenizer.from_pretrained(tmp_path),
    )
    assert again.documents() == tokenizer.documents()
    for name, conversation in CONVERSATIONS.items():
        if "spelled out" in name:
            continue
        ids, counted = encode(tokenizer, conversation)[0]
        assert encode(again, conversation) == [(ids, counted)]
        expected = reference.apply_chat_template(
            conversation["messages"], tools=conversation.get("tools"), tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True,
        )  # fmt: skip
        assert ids == expected["input_ids"], name
        answers = [
            message for message in conversation["messages"] if message["role"] == "assistant"
        ]
        learned = [message for message in answers if message["content"] or "tool_calls" in message]
        marked = sum(expected["assistant_masks"]) - len(answers) + len(learned)
        assert counted.count(True) >= marked > (0 if name != "only a question" else -1)
        assert [t for t, c in zip(ids, counted, strict=True) if c].count(
            tokenizer.eos_token_id
        ) == len(learned)
        prompt = tokenizer.apply_chat_template(conversation["messages"][:1])
        assert len(answers) < 1 or conversation["messages"][0]["role"] != "user" or "tools" in conversation or (
            ids[: len(prompt)] == prompt and (not answers[0]["content"] or counted[len(prompt)])
        )  # fmt: skip


def with_bos() -> Tokenizer:
    """Bytes that begin each text with <bos>, as Llama's tokenizer does."""

    class Begins(ByteTokenizer):
        def encode_prompt(self, text: str) -> list[int]:
            assert self.bos_token_id is not None
            return [self.bos_token_id, *self.encode(text)]

    return Begins()


def test_prompts_and_the_plain_template_begin_as_generation_does() -> None:
    tokenizer = with_bos()
    encoded = encode_documents([Document("a", "pq"), Document("t")], tokenizer, begin_prompts=True)
    assert encoded.tokens.tolist() == [256, *b"pqa", 257, ord("t"), 257]
    assert encoded.counted is not None and encoded.counted.tolist() == [False] * 3 + [True] * 4
    tokenizer.set_chat_template()
    ids, counted = encode(tokenizer, CONVERSATIONS["one turn"])[0]
    assert ids[0] == 256 and ids.count(256) == 1 and not counted[0]


PAIRS = [
    Document("abc", "0123456789"),
    Document("x" * 20, "p"),
    Document("q", "q" * 6),
    Document("t" * 40),
]


@pytest.mark.parametrize(
    ("truncate", "bos", "texts", "fit"),
    [
        ("drop", None, [b"qqqqqqq", b"t" * 40], Fit(too_long=2, longest=22)),
        ("prompt", None, [b"6789abc", b"qqqqqqq", b"t" * 40], Fit(too_long=1, longest=22, cut=1)),
        ("prompt", 256, [b"789abc", b"qqqqqqq", b"t" * 40], Fit(too_long=1, longest=23, cut=2)),
    ],
)
def test_records_that_do_not_fit(
    truncate: str, bos: int | None, texts: list[bytes], fit: Fit
) -> None:
    tokenizer = ByteTokenizer() if bos is None else with_bos()
    encoded = encode_documents(PAIRS, tokenizer, begin_prompts=True)
    kept, fitted, found = fit_records(encoded, 8, truncate, bos)
    parts = list(fitted.parts(fitted.tokens))
    assert found == fit
    assert kept.tolist() == ([0, 2, 3] if truncate == "prompt" else [2, 3])
    for part, text in zip(parts, texts, strict=True):
        ids = part.tolist()
        assert ids[-1] == tokenizer.eos_token_id
        assert bytes(i for i in ids if i < 256).endswith(text[-6:])
        assert len(ids) <= 8 or set(text) == {ord("t")}
        assert (ids[0] == 256) == (bos is not None and set(text) != {ord("t")})


@pytest.mark.parametrize("begins", [True, False])
def test_a_cut_record_begins_with_bos_if_it_did_before(begins: bool) -> None:
    """Its other tokens are those of the end, and only the token in whose place bos comes is lost."""
    tokenizer = with_bos() if begins else ByteTokenizer()
    prompt, bos = "0123456789", 256
    for seq_len in range(2, 16):
        encoded = encode_documents(
            [Document("abc", prompt), Document("", "q")], tokenizer, begin_prompts=begins
        )
        before = encoded.tokens.tolist()
        kept, fitted, found = fit_records(encoded, seq_len, "prompt", bos)
        whole = [bos] * begins + [*prompt.encode(), *b"abc", 257]
        assert before[: len(whole)] == whole
        # At least one token before the answer, and one of the prompt after bos.
        fits = seq_len >= 4 + 1 + begins
        assert (0 in kept) == fits and found.too_long == (not fits)
        if fits:
            expected = whole[-seq_len:]
            expected[0] = bos if begins else expected[0]
            assert next(fitted.parts(fitted.tokens)).tolist() == expected


def sentencepiece_like(kind: str) -> Any:
    """A tokenizer that begins each text with a space, as those of Llama 2 and Mistral, or a byte-level one."""
    pre, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    alphabet = []
    if kind == "prepended":
        replace = tokenizers.normalizers.Replace(" ", "\u2581")
        prepend = tokenizers.normalizers.Prepend("\u2581")
        backend.normalizer = tokenizers.normalizers.Sequence([prepend, replace])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )  # fmt: skip
    elif kind == "metaspace":
        backend.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=kind == "byte level, prefix")
        backend.decoder = decoders.ByteLevel()
        alphabet = pre.ByteLevel.alphabet()
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *bytes_], initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    texts = ["Hello world, the answer is yes", "Question: x? Answer: no\n\n  good"]
    backend.train_from_iterator(texts * 5, trainer)
    if kind.startswith("byte level"):
        backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    else:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("kind", ["prepended", "metaspace", "byte level", "byte level, prefix"])
def test_prompt_and_completion_are_encoded_as_one_text(kind: str, tmp_path: Path) -> None:
    reference = sentencepiece_like(kind)
    reference.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    draw = random.Random(0)
    parts = ["Hello", " world", "yes", "no", "\n", " ", "  ", "x?", "A: ", "\u00e9", "\U0001f600"]
    same_boundary = 0
    for _ in range(100):
        prompt = "".join(draw.choices(parts, k=draw.randint(0, 4)))
        completion = "".join(draw.choices(parts, k=draw.randint(1, 4))) + "yes"
        pair = Document(completion, prompt)
        encoded = encode_documents([pair], tokenizer, begin_prompts=True)
        assert encoded.counted is not None
        whole = reference(prompt + completion)["input_ids"]
        assert encoded.tokens.tolist() == [*whole, reference.eos_token_id]
        boundary = int(encoded.prompts[0])
        assert encoded.counted.tolist() == [False] * boundary + [True] * (len(whole) + 1 - boundary)
        alone = reference(prompt)["input_ids"]
        if (
            whole[: len(alone)] == alone
        ):  # else a token holds the end of one and the start of the other
            assert boundary == len(alone)
            same_boundary += 1
    assert same_boundary > 30


def test_a_completion_gets_no_space_of_its_own(tmp_path: Path) -> None:
    reference = sentencepiece_like("prepended")
    reference.save_pretrained(tmp_path)
    encoded = encode_documents([Document("yes", "Question: x?\n")], load_tokenizer(tmp_path))
    assert reference.decode(encoded.tokens, skip_special_tokens=True) == "Question: x?\nyes"


# A call with its arguments as text, as in DeepSeek's templates, and three ways to tell a turn that only calls.
_TEXT_CALL = "{{ '[' + c.function.name + '|' + c.function.arguments + ']' }}"
_CALLS = "{% for c in m.tool_calls or [] %}" + _TEXT_CALL + "{% endfor %}"
_TURN = (
    "{%% for m in messages %%}{%% if m.role == 'assistant' %%}{{ 'A:' }}%s{{ eos_token }}"
    "{%% else %%}{{ m.role + ':' + m.content + '\n' }}{%% endif %%}{%% endfor %%}"
    "{%% if add_generation_prompt %%}A:{%% endif %%}"
)
CALLING_TEMPLATES = {
    "text": _TURN % (_CALLS + "{{ m.content or '' }}"),
    "text, marked": _TURN % ("{% generation %}" + _CALLS + "{{ m.content or '' }}{% endgeneration %}"),
    "null content": _TURN % ("{% if m.content is none %}" + _CALLS + "{% else %}{{ m.content }}{% endif %}"),
    "no content": _TURN % ("{% if m.content is defined %}{{ m.content }}{% else %}" + _CALLS + "{% endif %}"),
    "joined by any means": _TURN % (
        "{% for c in m.tool_calls or [] %}{{ '[' ~ c.function.name ~ '|' ~ c.function.arguments ~ ']' }}{% endfor %}"
        "{{ m.content or '' }}"
    ),
    "JSON of objects": _TURN % (
        "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + '|' + (c.function.arguments | tojson) + ']' }}"
        "{% endfor %}{{ m.content or '' }}"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "content", "arguments"),
    every(
        3,
        CALLING_TEMPLATES,
        ["", None, "absent"],
        [{"x": "\u00e9", "n": 1}, '{"x":"\u00e9", "n":1}'],
    ),
)
def test_calls_are_written_in_the_form_that_a_template_expects(
    case: str, content: str | None, arguments: Any, folder: Path
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turn: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [call]}
    if content == "absent":
        del turn["content"]
    tokenizer = load_tokenizer(folder)
    tokenizer.set_chat_template(CALLING_TEMPLATES[case])
    record = {"messages": [USER, turn, {"role": "tool", "content": "2"}, REPLY]}
    ((ids, counted),) = encode(tokenizer, record)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    as_object = isinstance(arguments, dict) or case == "JSON of objects"
    written = '{"x": "\u00e9", "n": 1}' if as_object else arguments
    answer = f"[f|{written}]<|im_end|>"
    text = f"user:{USER['content']}\nA:{answer}tool:2\nA:It is 5.<|im_end|>"
    assert reference.decode(ids) == text
    kept = [token for token, learned in zip(ids, counted, strict=True) if learned]
    if case == "text, marked":  # its mark ends before the end of the turn
        answer = answer.removesuffix("<|im_end|>")
        assert reference.decode(kept) == answer + "It is 5."
    else:
        assert reference.decode(kept) == answer + "It is 5.<|im_end|>"


def test_a_name_in_another_word_is_no_call(folder: Path) -> None:
    """A template without calls is refused, though the name of the call is part of what the turn says."""
    tokenizer = load_tokenizer(folder)
    call = {"type": "function", "function": {"name": "get", "arguments": {}}}
    for said in ("together we get it", "get", "<call>get"):
        turn = {"role": "assistant", "content": said, "tool_calls": [call]}
        for template in (PREFIXED.replace(CALLS, ""), MARKED.replace(CALLS, "")):
            tokenizer.set_chat_template(template)
            with pytest.raises(DataError, match="does not write the tool calls of message 2"):
                encode(tokenizer, {"messages": [USER, turn]})


@pytest.mark.parametrize(
    ("role", "expected"),
    [("ipython", "tool"), ("tool_response", "tool"), ("tool_call", "assistant")],
)
def test_roles_of_other_programs(role: str, expected: str) -> None:
    content = '{"name": "f", "arguments": {"x": 1}}' if role == "tool_call" else "2"
    found = json.loads(
        document({"messages": [USER, {"role": role, "content": content}]}).conversation or ""
    )
    message = found["messages"][1]
    assert message["role"] == expected
    assert ("tool_calls" in message) == (role == "tool_call")


@pytest.mark.slow
def test_templates_of_trl_are_rendered_and_masked_as_by_transformers(folder: Path) -> None:
    """Of its templates with marks, each has the ids and the mask of transformers, with calls as well."""
    trl = pytest.importorskip("trl")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    call = {
        "id": "call12345",
        "type": "function",
        "function": {"name": "get", "arguments": {"x": "1"}},
    }
    answer = {"role": "tool", "name": "get", "tool_call_id": "call12345", "content": "2"}
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}}
    tools = [
        {
            "type": "function",
            "function": {"name": "get", "description": "d", "parameters": parameters},
        }
    ]
    talk = [USER, REPLY, USER, {**REPLY, "content": "5"}]
    calling = [USER, {**REPLY, "content": "", "tool_calls": [call]}, answer, REPLY]
    compared = 0
    for file in sorted(Path(trl.__file__).parent.glob("chat_templates/*_training.jinja")):
        reference.chat_template = file.read_text()
        tokenizer.set_chat_template(file.read_text())
        for record in ({"messages": talk}, {"messages": calling, "tools": tools}):
            if "deepseek" in file.name and "tools" in record:
                continue  # it joins arguments to text, which transformers refuses
            try:
                ((ids, counted),) = encode(tokenizer, record)
            except DataError:
                continue  # a template without calls, or of images
            expected = reference.apply_chat_template(
                record["messages"],
                tools=record.get("tools"),
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            compared += 1
            assert ids == expected["input_ids"], file
            assert counted == [bool(value) for value in expected["assistant_masks"]], file
    assert compared >= 35
