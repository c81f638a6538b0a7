"""The token that ends every answer of the data becomes one at which the model stops, in everything that it becomes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bases import CHATML, write_chats, write_model, write_tokenizer
from fewer import every

from te_models import CausalLM, TrainConfig, load_tokenizer, open_data
from te_models.cli import main
from te_models.data.byte_tokenizer import ByteTokenizer

transformers = pytest.importorskip("transformers")

END, START, TURN = 0, 1, 2  # ids of <|endoftext|>, <|im_start|> and <|im_end|>
RUN = ["--steps", "2", "--seq-len", "128", "--batch-size", "2", "--recipe", "bf16"]
RUN += ["--sample-tokens", "0", "--device", "cpu", "--eval-every", "0"]
GENERATION_MARKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}{% endfor %}"
)


def chat(*answers: str) -> dict[str, Any]:
    turns = []
    for answer in answers:
        turns += [{"role": "user", "content": "What?"}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


@pytest.mark.parametrize(
    "template, records, expected",
    [
        (CHATML, [chat("The answer is 4."), chat("4", "5")], (TURN,)),
        # A token that an answer also has inside ends nothing: gpt-oss' <|end|> does.
        (CHATML, [chat("one<|im_end|>two"), chat("4")], ()),
        # The template's marks leave the end of a turn out, so it is not learned.
        (GENERATION_MARKS, [chat("The answer is 4."), chat("5.")], ()),
        (CHATML, [{"prompt": "What?", "completion": " 4"}], (END,)),
        (CHATML, [{"prompt": "What?", "completion": " 4"}, chat("4")], (END, TURN)),
        (
            CHATML,
            [{"messages": [*chat("4")["messages"], {"role": "user", "content": "?"}]}],
            (TURN,),
        ),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_ends(
    template: str, records: list[Any], expected: tuple[int, ...], streaming: bool, tmp_path: Path
) -> None:
    write_tokenizer(template).save_pretrained(tmp_path)
    words = load_tokenizer(tmp_path)
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records * 8)))
    (tmp_path / "eval.jsonl").write_text(json.dumps(records[0]))
    config = TrainConfig(steps=1, seq_len=64, batch_size=1)
    given = dict(eval_data=str(tmp_path / "eval.jsonl"), streaming=streaming)
    dataset, _ = open_data(str(tmp_path / "data.jsonl"), words, config, **given)
    assert dataset.ends == expected


def test_texts_end_with_the_end_of_text_token(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    config = TrainConfig(steps=1, seq_len=16, batch_size=1)
    dataset, _ = open_data(str(tmp_path / "text.txt"), ByteTokenizer(), config)
    assert dataset.ends == (ByteTokenizer.eos_token_id,)


@pytest.mark.parametrize(("eos", "lora"), every(2, [END, [END, 7], None], [[], ["--lora", "4"]]))
def test_the_run_stops_there(eos: Any, lora: list[str], tmp_path: Path) -> None:
    if lora:
        pytest.importorskip("peft")
    base = write_model(tmp_path / "base", tokenizer=write_tokenizer(CHATML), eos_token_id=eos)
    data, run = str(write_chats(tmp_path / "chats.jsonl")), tmp_path / "run"
    told = ["finetune", "--model", str(base), *lora, "--data", data, *RUN, "--out", str(run)]
    assert main([*told, *(["--merge"] if lora else [])]) == 0
    assert main(["finetune", "--resume", str(run), "--steps", "3"]) == 0
    before = [] if eos is None else [eos] if isinstance(eos, int) else eos
    wanted = {*before, TURN}
    model = CausalLM.from_pretrained(run, device="cpu", engine="emulated")
    assert set(model.stop_token_ids) == wanted
    places = [
        tmp_path / "hf",
        tmp_path / "bf16",
        tmp_path / "fp8",
        *([run / "merged"] if lora else []),
    ]
    assert main(["convert", "--model", str(run), "--out", str(places[0])]) == 0
    for format, place in (("bf16", places[1]), ("fp8-channel", places[2])):
        assert main(["export", "--model", str(run), "--format", format, "--out", str(place)]) == 0
    for place in places:
        ids = json.loads((place / "generation_config.json").read_text())["eos_token_id"]
        assert {*([ids] if isinstance(ids, int) else ids)} == wanted, place
    theirs = transformers.AutoModelForCausalLM.from_pretrained(places[0])
    with torch.no_grad():  # the head says <|im_end|> whatever is asked
        theirs.lm_head.weight.zero_()
        theirs.lm_head.weight[TURN] = 1
        theirs.model.norm.weight.fill_(0.0)
        theirs.model.norm.weight += 1
        theirs.lm_head.weight[TURN] = theirs.model(torch.tensor([[5, 6]])).last_hidden_state[0, -1]
    assert theirs.generate(torch.tensor([[5, 6]]), do_sample=False, max_new_tokens=5).tolist() == [
        [5, 6, TURN]
    ]


def test_a_given_eos_token_comes_first(tmp_path: Path) -> None:
    """Before that of a generation_config.json, which is written again with it."""
    base = write_model(tmp_path / "base", tokenizer=write_tokenizer(CHATML))
    model = CausalLM.from_pretrained(base, eos_token_id=9, device="cpu", engine="emulated")
    assert model.stop_token_ids == (9,)
    model.save_pretrained(tmp_path / "saved", format="hf")
    assert json.loads((tmp_path / "saved/generation_config.json").read_text())["eos_token_id"] == 9
