"""Samples: the choice of prompts from evaluation batches, and the part of the answers that is shown."""

import io
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_runs import said_at_the_end, tiny_model

from te_models import CausalLM
from te_models.cli import main
from te_models.config.training import TrainConfig
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.dataset import TokenDataset
from te_models.data.documents import Document
from te_models.generation.text import stream_text
from te_models.planning.printable import Terminal
from te_models.training import samples
from te_models.training.next_commands import print_next
from te_models.training.progress import TimeLeft, duration
from te_models.training.result import Result
from te_models.training.run_settings import run_settings
from te_models.training.samples import OPENING, Prompt, Sampler, held_out_prompts

WORDS = ByteTokenizer()


def batches(
    documents: list[Document], packing: str, seq_len: int = 64
) -> list[dict[str, torch.Tensor]]:
    dataset = TokenDataset(
        documents, WORDS, seq_len, batch_size=2, seed=0, shuffle=False, packing=packing
    )
    return dataset.eval_batches(100)


def texts(prompts: list[Prompt]) -> list[tuple[str, str]]:
    return [(WORDS.decode(prompt.ids), WORDS.decode(prompt.reference)) for prompt in prompts]


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_prompts_and_answers_are_whole_records(packing: str) -> None:
    records = [Document(f"answer {n:02}", prompt=f"question {n:02}: ") for n in range(40)]
    found = texts(held_out_prompts(batches(records, packing), WORDS, 60))
    pairs = [(record.prompt, record.text) for record in records]
    assert len(found) == 3 and all(pair in pairs for pair in found)
    places = [pairs.index(pair) for pair in found]
    assert places == sorted(places) and places[-1] - places[0] > 15  # spread over the data


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_text_gives_its_opening(packing: str) -> None:
    records = [
        Document(f"{n:02} " + "the quick brown fox jumps over the lazy dog, again")
        for n in range(20)
    ]
    found = held_out_prompts(batches(records, packing), WORDS, 60)
    assert len(found) == 3 and all(
        not prompt.reference and len(prompt.ids) == OPENING for prompt in found
    )
    if packing == "documents":
        assert all(any(r.text.startswith(text) for r in records) for text, _ in texts(found))


def test_truncated_records_come_last() -> None:
    records = [
        Document("b" * 20, prompt="a" * 30),
        Document("z", prompt="yy"),
        Document("x", prompt="ww"),
    ]
    assert texts(held_out_prompts(batches(records, "stream", 61), WORDS, 60, count=1))[0] == (
        "yy",
        "z",
    )
    assert texts(held_out_prompts(batches(records[:1], "stream"), WORDS, 60, count=1))[0] == (
        "a" * 30,
        "b" * 20,
    )
    assert held_out_prompts(batches(records[:1], "stream"), WORDS, 8, count=1) == []


def test_fewer_records_than_samples_are_shown_once_each() -> None:
    records = [Document(f"{number}", prompt=f"n {number}: ") for number in range(2)]
    found = texts(held_out_prompts(batches(records, "documents"), WORDS, 60))
    assert sorted(found) == [("n 0: ", "0"), ("n 1: ", "1")]


def test_padding_and_short_texts_are_no_prompts() -> None:
    assert held_out_prompts(batches([Document("ab")], "documents"), WORDS, 60) == []


@pytest.fixture
def model() -> CausalLM:
    return tiny_model("delayed")


def test_answers_before_and_after(model: CausalLM) -> None:
    prompts = [Prompt(tuple(b"ab"), tuple(b"cd")), Prompt(tuple(b"once"))]
    sampler = Sampler(model, WORDS, prompts, 6, {"seed": 3})
    sampler.note_before()
    expected = "".join(stream_text(model, WORDS, list(b"ab"), 6))
    assert sampler.before[0] == expected
    with torch.no_grad():
        model.get_parameter("lm_head.weight").zero_()
    out = io.StringIO()
    sampler.show(Console(file=out, width=200))
    text = out.getvalue()
    parts = "sample 1 of 2|prompt\nab|answer in the data\ncd|before\n|after\n|sample 2 of 2|opening\nonce"
    places = [text.index(part) for part in parts.split("|")]
    assert places == sorted(places)
    assert "".join(sampler.answer(prompts[0])) != expected


def shown(sampler: Sampler, console: type[Console] = Console) -> str:
    """Return what a run prints of its samples, when it has noted the answers before."""
    out = io.StringIO()
    sampler.note_before()
    sampler.show(console(file=out, width=200))
    return out.getvalue()


def test_answers_end_after_some_lines(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*given: Any, **options: Any) -> Iterator[str]:
        yield from (f"{number}\n\n{number}" for number in itertools.count())

    monkeypatch.setattr(samples, "stream_text", endless)
    said = shown(Sampler(model, WORDS, [Prompt(tuple(b"ab"), tuple(b"cd"))], 6, {}))
    for answer in said.split("before\n")[1].split("after\n"):
        lines = answer.strip().splitlines()
        assert len(lines) == samples.MAX_LINES + 1 and lines[-1] == "..." and "" in lines


def test_a_terminal_gets_no_control_characters(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        samples,
        "stream_text",
        lambda *_, **__: (piece for piece in ("\x1b]0;x\x07", "a\r\n\tb\x9b")),
    )
    said = shown(Sampler(model, WORDS, [Prompt(tuple(b"\x1b[2J"), tuple(b"cd"))], 6, {}), Terminal)
    assert not any(character in said for character in "\x1b\x07\r\x9b")
    assert (
        said.count("\ufffd]0;xa\n        b\ufffd\n") == 2
    )  # before and after; rich itself drops the bell


@pytest.mark.parametrize("pieces, text", [((), "(nothing)"), (("\n", "\n\na", "\n\nb"), "a\n\nb")])
def test_both_answers_begin_with_their_text(
    pieces: tuple[str, ...], text: str, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "stream_text", lambda *_, **__: (piece for piece in pieces))
    sampler = Sampler(model, WORDS, [Prompt(tuple(b"ab"), tuple(b"cd"))], 6, {})
    assert shown(sampler).endswith(f"before\n{text}\nafter\n{text}\n")


def test_samples_change_nothing_of_a_run(model: CausalLM) -> None:
    state, draw = {name: p.clone() for name, p in model.named_parameters()}, torch.get_rng_state()
    Sampler(model, WORDS, [Prompt(tuple(b"once"))], 4, {"seed": 3}).note_before()
    assert torch.equal(draw, torch.get_rng_state()) and model.training
    assert all(torch.equal(p, state[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("early", [True, False])
def test_the_end_says_that_a_run_stopped_early(early: bool, tmp_path: Path) -> None:
    result = Result(
        step=3,
        first_eval_loss=1.0,
        eval_loss=3.0,
        best_eval_loss=2.0,
        best_step=1,
        stopped_early=early,
    )
    said = said_at_the_end(result, TrainConfig(steps=8, patience=2), tmp_path)
    assert ("at step 3 of 8: no lower eval loss in 2 evaluations" in said) == early


def next_commands(
    *prompts: bytes,
    words: ByteTokenizer = WORDS,
    format: str = "fp8-block",
    folder: Path = Path("my run"),
    result: Result | None = None,
) -> list[str]:
    """Return the title and the commands that a run prints at its end."""
    out = io.StringIO()
    print_next(
        Console(file=out, width=200),
        folder,
        words,
        [Prompt(tuple(text)) for text in prompts],
        format=format,
        result=result or Result(),
        settings=run_settings("finetune", {"model": "gated-nano", "learning_rate": 3e-4}),
    )
    return out.getvalue().splitlines()[1:]


def test_next_commands() -> None:
    """A suggested prompt ends as in training."""
    _, first, second = next_commands(b"\n def f(it's):\n  pass")
    assert first.startswith(
        "  te-models generate --model 'my run' --prompt 'def f(it'\"'\"'s):'  #"
    )
    assert second.startswith(
        "  te-models export --model 'my run' --out 'my run/export' --format fp8-block  #"
    )
    assert "--prompt '7 times 2 is '" in next_commands(b"7 times 2 is ")[1]


@pytest.mark.parametrize(("prompt", "command"), [(b"<user>Hi", "chat"), (b"2 + 2 = ", "generate")])
def test_the_next_command_is_chat_only_after_conversations(prompt: bytes, command: str) -> None:
    """A tokenizer with a template may have been given prompts and completions, which `chat` would render otherwise."""
    words = ByteTokenizer()
    words.set_chat_template(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    )
    assert next_commands(prompt, words=words)[1].startswith(f"  te-models {command} ")


def test_the_next_command_is_an_export_that_the_model_has() -> None:
    *_, export = next_commands(format="bf16")
    assert export.endswith("--format bf16  # write it for vLLM, SGLang or transformers, in BF16")
    assert len(next_commands(format="")) == 2


def test_no_next_command_takes_a_model_that_training_made_worse() -> None:
    worse = Result(step=9, first_eval_loss=2.0, eval_loss=2.5)
    title, again = next_commands(result=worse)
    assert title == "next, since training made the model worse:"
    assert again.startswith(
        "  te-models finetune 'my run/run.toml' --learning-rate 3e-05 --out 'my run-3e-05'  # again"
    )
    diverged = Result(step=9, first_eval_loss=2.0)
    assert next_commands(result=diverged)[1] == again
    without_evaluations = Result(step=9)
    assert " export " in next_commands(result=without_evaluations)[2]


def test_the_next_command_keeps_the_best_step_that_a_run_lost(tmp_path: Path) -> None:
    lost = Result(step=9, first_eval_loss=2.0, eval_loss=2.5, best_eval_loss=1.5, best_step=3)
    title, again = next_commands(result=lost)
    assert "made the model worse" in title
    assert again.startswith(
        "  te-models finetune 'my run/run.toml' --keep-best --out 'my run-best'"
    )
    assert "keeping step 3, which had 1.5000" in again
    (tmp_path / "best" / "checkpoints" / "step-00000003").mkdir(parents=True)
    (tmp_path / "best" / "checkpoints" / "latest").write_text("step-00000003\n")
    title, first, _ = next_commands(folder=tmp_path, result=lost)
    assert "step 3, the lowest eval loss: 1.5000; step 9, the last, has 2.5000" in title
    assert f"--model {tmp_path}/best " in first
    better = Result(step=9, first_eval_loss=2.0, eval_loss=1.8, best_eval_loss=1.5, best_step=3)
    title, first, _ = next_commands(result=better)
    assert title.endswith("an eval loss of 1.8000; step 3 had 1.5000 and was not saved")
    assert "--model 'my run' " in first


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0412, "41 ms"),
        (3.24, "3.2 s"),
        (59.7, "60 s"),
        (100, "2 min"),
        (5300, "88 min"),
        (9000, "2 h 30 min"),
    ],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("start", [0, 7])
def test_the_time_is_estimated_once_without_the_first_steps(start: int) -> None:
    config = TrainConfig(steps=110 + start, batch_size=2, seq_len=50, eval_every=0, eval_batches=30)
    left = TimeLeft(config, start)
    speed = {
        start + n: 1.0 if n <= 4 else 50.0 for n in range(1, 111)
    }  # tokens/s; a step has 100 tokens
    lines = [left.line(dict(step=step, tokens_per_second=rate)) for step, rate in speed.items()]
    # 100 steps of 2 s, and one evaluation of 30 batches, each a third of a step
    assert [(n + 1, line) for n, line in enumerate(lines) if line] == [
        (10, "estimated time: 4 min for the other 100 steps, of 2.0 s each")
    ]
    for steps in (5, 10):  # too few to measure, and none left
        left = TimeLeft(TrainConfig(steps=start + steps), start)
        assert not any(
            left.line(dict(step=start + n, tokens_per_second=9.0)) for n in range(1, steps + 1)
        )


@pytest.fixture
def start(texts: None) -> list[str]:
    """The words of a run on pairs of prompts and answers, in a folder of its own."""
    pairs = [dict(prompt=f"number {n:03} is ", completion=f"written {n:03}.") for n in range(120)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tiny_model("current").save_pretrained("start")
    options = ["--seq-len", "64", "--device", "cpu", "--eval-every", "0", "--out", "run"]
    return ["finetune", "--model", "start", "--data", "pairs.jsonl", *options]


def test_a_run_shows_the_same_prompts_before_and_after(
    start: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert main([*start, "--steps", "12", "--batch-size", "2", "--sample-tokens", "6"]) == 0
    out = capsys.readouterr().out
    for part in (
        "memory", "tokens", "epochs", "estimated time: ", "eval loss before", "eval loss after",
        "sample 3 of 3", "\nprompt\nnumber ", "\nanswer in the data\nwritten ", "\nbefore\n", "\nafter\n",
        "metrics.jsonl", "run.toml", "loss.png", "te-models generate --model", "te-models export --model",
    ):  # fmt: skip
        assert part in out, part
    assert "free on cpu" in " ".join(out.split())
    assert main(["finetune", "--resume", "run", "--steps", "14", "--sample-tokens", "6"]) == 0
    assert "\nbefore\n" not in capsys.readouterr().out
    assert main(["finetune", "--resume", "run", "--steps", "15", "--sample-tokens", "0"]) == 0
    out = capsys.readouterr().out
    assert "sample 1" not in out and "--prompt 'number " in out


PIECE = "0123456789"


def timed(
    monkeypatch: pytest.MonkeyPatch, seconds: float, each: float = 1.0, pieces: int = 9
) -> tuple[Sampler, str]:
    """Show two answers of so many pieces of ten characters, which take `each` second, within `seconds`."""
    now = 0.0

    def slow(*args: Any, **options: Any) -> Iterator[str]:
        nonlocal now
        for _ in range(pieces):
            now += each
            yield PIECE

    monkeypatch.setattr(samples, "stream_text", slow)
    monkeypatch.setattr(samples.time, "monotonic", lambda: now)
    sampler = Sampler(tiny_model(), WORDS, [Prompt((1, 2), (3,)), Prompt((4, 5), (6,))], 9, {})
    out = io.StringIO()
    sampler.show(Console(file=out, width=200), seconds)
    return sampler, out.getvalue()


@pytest.mark.parametrize(
    "seconds, lengths",
    [
        (math.inf, [9, 9]),
        (12.5, [7, 6]),  # half of the time for the first, and of the rest
        (8.5, [5, 4]),
        (6.5, [4]),  # a line for the first, and too little for another
        (4.5, [4]),
        (2.5, []),
        (0.0, []),
    ],
)
def test_an_answer_out_of_time_is_cut_or_left_out(
    seconds: float, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, said = timed(monkeypatch, seconds)
    answers = [part.split("\n")[0] for part in said.split("answer\n")[1:]]
    assert answers == [PIECE * n + ("..." if n < 9 else "") for n in lengths]
    assert sampler.cut == (seconds < math.inf) == ("--sample-tokens 9 writes all 2 whole" in said)
    assert ("too little for an answer here" in said) == (not lengths)


def test_a_short_answer_that_ends_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    _, said = timed(monkeypatch, 4.5, pieces=2)
    assert said.count(f"answer\n{PIECE * 2}\n") == 2 and "a tenth" not in said


def test_processes_stop_at_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's clock decides, for all of them equally often."""
    asked: list[bool] = []

    def ask(late: bool) -> bool:
        asked.append(late)
        return late

    def answers(agree: Any) -> list[str]:
        now = 0.0

        def slow(*args: Any, **options: Any) -> Iterator[str]:
            nonlocal now
            for _ in range(9):
                now += 1.0 if agree is ask else 0.01
                yield PIECE

        monkeypatch.setattr(samples, "stream_text", slow)
        monkeypatch.setattr(samples.time, "monotonic", lambda: now)
        prompts = [Prompt((n, 2), (3,)) for n in range(3)]
        sampler = Sampler(tiny_model(), WORDS, prompts, 9, {}, agree)
        return ["".join(pieces) for _, pieces in sampler.answers(10.5)]

    first = answers(ask)
    told = iter(asked)
    assert answers(lambda late: next(told)) == first and next(told, None) is None
    assert len(first) == 2


@pytest.mark.parametrize("asked", [False, True])
def test_samples_of_a_short_run_are_short_unless_asked_for(
    asked: bool, start: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert (
        main(
            [
                *start,
                "--steps",
                "1",
                "--batch-size",
                "1",
                *(["--sample-tokens", "16"] if asked else []),
            ]
        )
        == 0
    )
    assert ("samples take at most a tenth" in " ".join(capsys.readouterr().out.split())) != asked
    assert main(["finetune", "--resume", "run", "--steps", "2"]) == 0  # run.toml has what was asked
    assert ("samples take at most a tenth" in " ".join(capsys.readouterr().out.split())) != asked
