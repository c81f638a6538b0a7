"""Prompts of a conversation, its memory after stopped and failed answers, and the cuts of a long history."""

from pathlib import Path

import pytest
from chat_model import write_chat_model

from te_models import CausalLM, load_tokenizer
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.errors import DataError, UsageError
from te_models.generation import conversation
from te_models.generation.conversation import Conversation
from te_models.generation.text import stream_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return CausalLM.from_pretrained(folder, device="cpu", engine="emulated")


@pytest.fixture
def talk(folder: Path, model: CausalLM) -> Conversation:
    return Conversation(model, load_tokenizer(folder), "be brief")


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [dict(role=role, content=content) for role, content in pairs]


def test_each_answer_sees_what_came_before(talk: Conversation) -> None:
    first = "".join(talk.answer("hi", 4))
    second = "".join(talk.answer("again", 4))
    before = said(("system", "be brief"), ("user", "hi"), ("assistant", first), ("user", "again"))
    assert talk.messages == [*before, *said(("assistant", second))]
    ids = talk.tokenizer.apply_chat_template(before)
    assert (
        second == "".join(stream_text(talk.model, talk.tokenizer, ids, 4)) and talk.forgotten == 0
    )


def test_variables_reach_the_template(
    folder: Path, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(
        conversation, "stream_text", lambda m, t, ids, n, **o: asked.append(ids) or iter(["ok"])
    )
    for variables in ({}, {"enable_thinking": False}):
        list(Conversation(model, load_tokenizer(folder), variables=variables).answer("hi"))
    assert asked[1][: len(asked[0])] == asked[0]
    assert load_tokenizer(folder).decode(asked[1][len(asked[0]) :]) == "<think></think>"


@pytest.mark.parametrize("how", ["close", "interrupt"])
def test_a_stopped_answer_stays_as_far_as_it_came(
    how: str, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces(*arguments: object, **options: object):
        yield "one "
        yield "two "
        raise KeyboardInterrupt

    monkeypatch.setattr(conversation, "stream_text", pieces)
    answer = talk.answer("count")
    assert next(answer) == "one "
    if how == "close":
        answer.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            list(answer)
    expected = "one " if how == "close" else "one two "
    assert talk.messages[1:] == said(("user", "count"), ("assistant", expected))


def test_an_answer_that_fails_leaves_nothing(talk: Conversation) -> None:
    list(talk.answer("hi", 2))
    before = list(talk.messages)
    with pytest.raises(UsageError, match="max_position_embeddings=96"):
        next(talk.answer("x" * 200))
    with pytest.raises(UsageError, match="temperature"):
        next(talk.answer("hi", temperature=-1.0))
    assert talk.messages == before


def test_the_oldest_turns_make_room(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def answered(model: object, tokenizer: object, ids: list[int], room: int, **options: object):
        asked.append((talk.tokenizer.decode(ids), room))
        return iter(["y" * 8])

    monkeypatch.setattr(conversation, "stream_text", answered)
    for letter in "QZX":
        list(talk.answer(letter * 10, 1000))
    assert [letter in asked[-1][0] for letter in "QZX"] == [
        False,
        False,
        True,
    ] and talk.forgotten == 4
    assert "be brief" in asked[-1][0]
    assert all(room >= 96 // 4 for _, room in asked)
    assert len(talk.turns()) == 6  # the history itself is whole


@pytest.mark.parametrize("wanted", [1, 7, 24, 25, 1000])
def test_turns_are_forgotten_only_for_room_that_the_answer_needs(
    wanted: int, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer needs the tokens that were asked for, up to a quarter of the 96 positions."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        conversation,
        "stream_text",
        lambda m, t, ids, n, **o: asked.append((len(ids), n)) or iter(["y"]),
    )
    talk.system = None
    for needed in range(0, 30):
        talk.reset()
        talk.messages += said(("user", "a"), ("assistant", "y"))
        ids = len(talk.tokenizer.apply_chat_template([*talk.messages, *said(("user", ""))]))
        list(talk.answer("q" * (96 - ids - needed), wanted))
        used, room = asked[-1]
        if needed >= min(wanted, 24):
            assert talk.forgotten == 0 and used == 96 - needed
        else:
            assert talk.forgotten == 2 and used < 96 - needed
        assert room == min(wanted, 96 - used)


def test_reset_undo_and_system(talk: Conversation) -> None:
    assert talk.undo() is None
    talk.messages += said(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert talk.undo() == "c" and talk.messages[-1]["content"] == "b"
    talk.system = "be kind"
    assert [m["content"] for m in talk.messages] == ["be kind", "a", "b"]
    talk.reset()
    assert talk.messages == said(("system", "be kind"))
    talk.system = None
    assert talk.messages == [] and talk.system is None


def test_a_tokenizer_without_template(model: CausalLM) -> None:
    with pytest.raises(DataError, match="no chat template"):
        Conversation(model, ByteTokenizer())
