"""Chat templates by name write conversations as the models of these names expect them, and mark the answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from te_models.config.training import TrainConfig
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.named_templates import NAMED_TEMPLATES, use_template
from te_models.data.training_data import open_data
from te_models.errors import DataError

USER = {"role": "user", "content": " What is 2 + 3? "}
REPLY = {"role": "assistant", "content": " It is 5.\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
TALKS = [
    [USER, REPLY],
    [USER, REPLY, {**USER, "content": "Sure?"}, {**REPLY, "content": "Yes."}],
    [USER],
]
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}

# Each, as its models' own template is published: of the turns, then of what asks for an answer.
LITERAL = {
    "chatml": ("<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n", ""),
    "llama3": (
        "<|start_header_id|>{role}<|end_header_id|>\n\n{trimmed}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos>",
    ),
    "gemma": ("<start_of_turn>{model}\n{trimmed}<end_of_turn>\n", "<start_of_turn>model\n", "<bos>"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_turns_are_written_as_published(name: str) -> None:
    tokenizer = ByteTokenizer()
    use_template(tokenizer, name)
    turn, asked, begin = LITERAL[name]
    for talk in TALKS:
        expected = begin
        for message in talk:
            model = message["role"].replace("assistant", "model")
            trimmed = message["content"].strip()
            expected += turn.format(**message, trimmed=trimmed, model=model)
        requests = [{"messages": talk, "add_generation_prompt": ask} for ask in (False, True)]
        texts = [found.text for found in tokenizer.chat_template().render_all(requests)]  # type: ignore[union-attr]
        assert texts == [expected, expected + asked]


@pytest.mark.parametrize(
    ("name", "theirs"), [("llama3", "llama3"), ("gemma", "gemma3"), ("gemma", "gemma")]
)
def test_the_texts_are_those_of_the_models_own_templates(name: str, theirs: str) -> None:
    trl = pytest.importorskip("trl")
    own, reference = ByteTokenizer(), ByteTokenizer()
    use_template(own, name)
    reference.set_chat_template(
        (Path(trl.__file__).parent / f"chat_templates/{theirs}.jinja").read_text()
    )
    talks = TALKS if theirs == "gemma" else [*TALKS, [SYSTEM, *TALKS[1]]]
    for talk in talks:
        assert own.chat_template().render(talk) == reference.chat_template().render(talk)


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_answers_and_their_ends_are_learned(name: str, tmp_path: Path) -> None:
    config = TrainConfig(steps=1, seq_len=512, batch_size=1)
    record = {"messages": [SYSTEM, *TALKS[1]]}
    dataset, _ = open_data(
        [record], ByteTokenizer(), config, eval_data=[record], chat_template=name
    )
    labels = next(dataset)["labels"][0].tolist()
    learned = bytes(label for label in labels if 0 <= label < 256).decode()
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}[name]
    first = REPLY["content"] if name == "chatml" else REPLY["content"].strip()
    assert learned == f"{first}{end}Yes.{end}"
    assert f"the template {name} as several tokens each: --special-tokens" in dataset.describe()


def test_chatml_writes_tools_and_calls() -> None:
    tokenizer = ByteTokenizer()
    use_template(tokenizer, "chatml")
    messages: list[dict[str, Any]] = [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "6"},
        REPLY,
    ]
    text = tokenizer.chat_template().render(messages, tools=[TOOL])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n" in text
    answers = "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>"
    assert f"<|im_start|>user\n{answers}<|im_end|>\n" in text
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.dumps(TOOL) in text
    assert text.count("Be brief.") == 1


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_templates_without_tools_refuse_them(name: str) -> None:
    tokenizer = ByteTokenizer()
    use_template(tokenizer, name)
    with pytest.raises(DataError, match="has no form for tools"):
        tokenizer.chat_template().render([USER], tools=[TOOL])


def test_other_names_are_files() -> None:
    with pytest.raises(
        DataError,
        match="chatml2: no such file; give a Jinja chat template, or one of chatml, llama3",
    ):
        use_template(ByteTokenizer(), "chatml2")


def test_a_file_of_an_editor_on_windows_is_read(tmp_path: Path) -> None:
    """UTF-8 with a mark in front reads as without it; UTF-16, as PowerShell writes it, is refused."""
    path = tmp_path / "mine.jinja"
    source = "{% for m in messages %}\u00ab{{ m.content }}\u00bb\r\n{% endfor %}"
    tokenizer = ByteTokenizer()
    path.write_bytes(("\ufeff" + source).encode())
    use_template(tokenizer, str(path))
    (text,) = tokenizer.chat_template().render_all([{"messages": [USER]}])
    assert text.text == f"\u00ab{USER['content']}\u00bb\n"  # type: ignore[union-attr]
    path.write_bytes(source.encode("utf-16"))
    with pytest.raises(DataError, match=r"mine.jinja is not UTF-8 text: .*; save it as UTF-8$"):
        use_template(tokenizer, str(path))
