"""Chat templates run with bounds: no template hangs, takes the memory or reads the environment."""

import gc
import json
import os
import pickle
import sys
from pathlib import Path

import pytest

import te_models.data.chat_template as module
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.chat_template import ChatTemplate, template_source
from te_models.data.encoding import encode_documents
from te_models.data.formats import row_document
from te_models.data.tokenizer import load_tokenizer
from te_models.errors import DataError, UsageError

MESSAGES = [{"role": "user", "content": "hi"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

REFUSED: dict[str, tuple[str, str]] = {
    "division": ("{{ 1 / 0 }}", "division"),
    "include": ("{% include 'x' %}", "refuses these messages"),
    "undefined": ("{{ x.y.z }}", "undefined"),
    "types": ("{{ messages + 1 }}", "refuses these messages"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "refuses these messages"),
    "doubling": (
        "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "memory",
    ),
    "repeated text": ("{{ 'a' * 10 ** 10 }}", "memory"),
    "width": ("{{ '%9999999999d' % 1 }}", "refuses these messages"),
    "long text": ("{{ 'a' * 17 * 2 ** 20 }}", "longer than 16 MiB"),
    "a long message": (
        "{{ raise_exception('no ' * 999 ~ '\\n' ~ 'second') }}",
        "refuses these messages: no no",
    ),
    "classes": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "a filter's way round": (
        "{{ ''|attr('format')|attr('__globals__') }}",
        "refuses these messages",
    ),
}


# "doubling" fills the memory that a template may have.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "doubling" else name
        for name in REFUSED
    ],
)
def test_a_template_that_fails_is_one_line(case: str) -> None:
    source, message = REFUSED[case]
    template = ChatTemplate(source, {})
    try:
        text = template.render(MESSAGES)
    except DataError as error:
        assert message in str(error) and "\n" not in str(error) and len(str(error)) < 400
    else:
        assert case in ("a filter's way round", "classes") and text == "", (
            "Jinja renders what is unsafe as nothing"
        )


def test_a_template_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 1)
    template = ChatTemplate(LOOPS, {})
    with pytest.raises(DataError, match="takes more than 1 s"):
        template.render(MESSAGES)
    with pytest.raises(DataError, match="its process died"):
        template.render(MESSAGES)


def test_the_process_knows_no_variables_and_ends_with_the_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET", "x")
    template = ChatTemplate("{{ messages[0].content }}", {})
    process = template._process.popen
    assert b"SECRET" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert [
        template.render([{"role": "user", "content": text}]) for text in ("1", "\u2028\n2")
    ] == ["1", "\u2028\n2"]
    with pytest.raises(UsageError, match="plain JSON values"):
        template.render(MESSAGES, tools=[object()])
    del template
    gc.collect()
    assert process.returncode is not None


def test_forks_render_with_processes_of_their_own() -> None:
    """As in a DataLoader: each side reads its own texts, and the end of a fork leaves the parent's process alone."""
    template = ChatTemplate("{{ messages[0].content }}", {})

    def mistakes(who: str) -> int:
        texts = [f"{who} {number}" for number in range(50)]
        return sum(template.render([{"role": "user", "content": text}]) != text for text in texts)

    assert mistakes("before") == 0
    children = []
    for number in range(2):
        if not (child := os.fork()):
            wrong = 1
            try:
                wrong = mistakes(f"child {number}")
                del template
                gc.collect()
            finally:
                os._exit(wrong != 0)
        children.append(child)
    assert mistakes("parent") == 0
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert mistakes("after") == 0


@pytest.mark.parametrize(
    "config",
    [{"chat_template": 3}, {"chat_template": [3]}, {"chat_template": [{"name": "default"}]}],
)
def test_odd_templates_are_none(config: dict, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert template_source(tmp_path) is None


def test_a_pipe_in_place_of_a_template_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(DataError, match="not a regular file"):
        template_source(tmp_path)


def test_a_tokenizer_travels_without_its_template(tmp_path: Path) -> None:
    documents = ByteTokenizer().documents()
    documents["tokenizer_config"]["chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    for name, document in documents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    tokenizer = load_tokenizer(tmp_path)
    expected = list(b"<bos>hi")
    assert tokenizer.apply_chat_template(MESSAGES) == expected
    assert tokenizer.chat_template() is tokenizer.chat_template()
    assert pickle.loads(pickle.dumps(tokenizer)).apply_chat_template(MESSAGES) == expected
    with pytest.raises(DataError, match="bytes have no chat template"):
        ByteTokenizer().chat_template()


def test_the_guide_shows_the_plain_template() -> None:
    guide = Path(__file__).parents[2] / "docs/reference/data.md"
    assert f"```jinja\n{module.PLAIN}```\n" in guide.read_text()


@pytest.mark.parametrize("name", ["random", "json", "jinja2", "te_models"])
def test_modules_beside_the_data_are_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert (
        ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": "hello"}])
        == "hello"
    )
    assert not Path("ran").exists()


NAMED = {
    "default": "{{ messages[0].content }}",
    "tool_use": "T{{ tools | length }}{{ messages[0].content }}",
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


def tokenizer_with(templates: dict[str, str], how: str, folder: Path) -> None:
    """Write a tokenizer with several templates, in tokenizer_config.json or in files."""
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    if how == "config":
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    for name, template in templates.items() if how == "files" else ():
        path = (
            "chat_template.jinja"
            if name == "default"
            else f"additional_chat_templates/{name}.jinja"
        )
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("how", ["config", "files"])
def test_a_template_for_tools_is_used_with_tools(how: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer_with(NAMED, how, tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    saved = tmp_path / "saved"
    tokenizer.save(saved)
    for one in (tokenizer, load_tokenizer(saved)):
        for tools in (None, TOOLS):
            expected = reference.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
            assert one.decode(one.apply_chat_template(MESSAGES, tools=tools)) == expected
    assert transformers.AutoTokenizer.from_pretrained(saved).chat_template == NAMED


def test_records_with_tools_use_the_template_for_tools(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    tokenizer_with(
        {"default": template, "tool_use": "T{{ tools | length }}" + template}, "config", tmp_path
    )
    tokenizer = load_tokenizer(tmp_path)
    talk = [*MESSAGES, {"role": "assistant", "content": "a"}]
    rows = [{"messages": talk}, {"messages": talk, "tools": TOOLS}, {"messages": talk}]
    documents = [row_document(row, {}, "a:1", "a") for row in rows]
    encoded = encode_documents(documents, tokenizer)
    begin = [tokenizer.decode(encoded.tokens[start : start + 2]) for start in encoded.starts]
    assert begin == ["us", "T1", "us"]


@pytest.mark.parametrize("how", ["config", "files"])
def test_no_default_template_is_said_so(how: str, tmp_path: Path) -> None:
    tokenizer_with({"rag": "x", "tool_use": NAMED["tool_use"]}, how, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(
        DataError, match="has chat templates named 'rag', 'tool_use', but none named 'default'"
    ):
        tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.decode(tokenizer.apply_chat_template(MESSAGES, tools=TOOLS)) == "T1hi"
    assert not tokenizer.ensure_chat_template()


def limited(mebibytes: int, folder: Path) -> str:
    """A Python that may have so much address space, as under `ulimit -v`."""
    script = folder / f"python{mebibytes}"
    script.write_text(f'#!/bin/sh\nulimit -v {mebibytes * 1024}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_a_lower_limit_of_memory_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "executable", limited(600, tmp_path))
    assert ChatTemplate("{{ messages[0].content }}", {}).render(MESSAGES) == "hi"
    with pytest.raises(DataError, match="it takes more than 600 MiB of memory"):
        ChatTemplate("{{ 'a' * 10 ** 9 }}", {}).render(MESSAGES)


def test_a_process_that_cannot_start_is_no_slow_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.sys, "executable", limited(12, tmp_path))
    monkeypatch.setattr(module, "memory_limit", lambda: 12 << 20)
    with pytest.raises(DataError) as caught:
        ChatTemplate("x", {})
    said = str(caught.value)
    assert "more than 10 s" not in said
    assert said.startswith("the chat template cannot be rendered: its process died ")
    assert said.endswith("memory is limited to 12 MiB here (ulimit -v), raise that")


def test_a_process_that_is_killed_says_by_what() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    template._process.popen.kill()
    with pytest.raises(DataError, match=r"its process died by signal 9 \(Killed\)"):
        template.render(MESSAGES)


def test_a_file_beside_another_template_is_the_one_that_is_saved(tmp_path: Path) -> None:
    """transformers reads the file; what tokenizer_config.json has as well was left from before."""
    transformers = pytest.importorskip("transformers")
    tokenizer_with({"default": "old"}, "config", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("new")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.template_source() == "new"
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").template_source() == "new"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == "new"
    files = tokenizer.files()
    assert files["chat_template.jinja"] == b"new"
    assert "chat_template" not in files["tokenizer_config"]  # type: ignore[operator]
