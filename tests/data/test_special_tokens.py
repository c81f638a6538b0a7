"""Special tokens added to a tokenizer have ids of their own, as transformers adds them, and rows in the model."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_model import write_chat_model

from te_models import CausalLM, get_recipe
from te_models.cli.commands import main
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.tokenizer import load_tokenizer
from te_models.errors import UsageError
from te_models.training.run_model import ModelSource
from te_models.training.run_settings import run_settings

TOKENS = ["<|im_start|>", "<think>", "</think>"]  # the first is there already
TEXTS = ["a<think>b</think>c", "<|im_start|>user\n<think> x", "plain", "<thin"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_chat_model(tmp_path / "model")


@pytest.mark.parametrize("listed", [False, True])
def test_tokens_are_added_as_transformers_adds_them(listed: bool, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if listed:  # as older folders have them, beside tokenizer.json
        config = json.loads((folder / "tokenizer_config.json").read_text())
        form = {
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        config["added_tokens_decoder"] = {"256": {"content": "<|begin|>", **form}}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    reference.add_tokens(TOKENS, special_tokens=True)
    tokenizer = load_tokenizer(folder)
    before = tokenizer.vocab_size
    assert tokenizer.add_special_tokens(TOKENS) == 2
    assert tokenizer.add_special_tokens(TOKENS) == 0
    assert tokenizer.vocab_size == before + 2
    tokenizer.save(folder / "saved")
    again = load_tokenizer(folder / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "saved")
    for text in TEXTS:
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text) == again.encode(text) == expected
        assert theirs(text, add_special_tokens=False)["input_ids"] == expected
    assert again.decode(again.encode("a<think>b")) == "ab"  # special tokens are left out


def test_bytes_have_no_special_tokens() -> None:
    with pytest.raises(UsageError, match="bytes cannot have special tokens of yours"):
        ByteTokenizer().add_special_tokens(["<x>"])


@pytest.mark.filterwarnings("ignore:vocab_size=.* adds", "ignore:--lora does not train")
@pytest.mark.parametrize("more", [[], ["--lora", "2"]], ids=["full", "LoRA"])
def test_a_run_has_rows_for_them(more: list[str], folder: Path, tmp_path: Path) -> None:
    if more:
        pytest.importorskip("peft")
    rows = [{"prompt": f"<think>{n}</think>", "completion": f"<{n}>"} for n in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    new = ",".join(f"<t{n}>" for n in range(40))  # the model has 288 rows for 259 tokens
    command = [
        "finetune",
        "--model",
        str(folder),
        "--data",
        str(tmp_path / "a.jsonl"),
        "--steps",
        "1",
        "--device",
    ]
    command += [
        "cpu",
        "--batch-size",
        "1",
        "--seq-len",
        "32",
        "--sample-tokens",
        "0",
        "--special-tokens",
        new,
    ]
    assert main([*command, "--out", str(tmp_path / "run"), *more]) == 0
    if not more:
        model: Any = CausalLM.from_pretrained(tmp_path / "run")
        assert model.config.vocab_size == load_tokenizer(tmp_path / "run").vocab_size == 299
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["finetune", "--resume", str(tmp_path / "run"), "--steps", "2"]) == 0
    assert load_tokenizer(tmp_path / "run").encode("<t39>") == [298]


@pytest.mark.parametrize("more", [[], ["--special-tokens", "<new>"]], ids=["as it is", "grown"])
def test_a_tokenizer_of_another_model_is_refused_before_the_model_is_read(
    more: list[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """A new token makes rows for itself, and not for the 4,096 tokens of another model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(ModelSource, "build")
    rows = [{"prompt": f"{n}", "completion": f"{n}"} for n in range(30)]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["finetune", "--model", str(folder), "--tokenizer", "gated-nano"]
    command += ["--data", "a.jsonl", "--seq-len", "32", "--device", "cpu", "--out", "run"]
    assert main([*command, *more]) == 2
    error = capsys.readouterr().err
    assert (
        f"the tokenizer has {4096 + len(more) // 2} ids but the model's vocab_size is 288" in error
    )
    assert not Path("run").exists()


@pytest.mark.parametrize(("count", "state"), [(3, "as the model has them"), (40, "at the mean")])
def test_adapters_say_that_rows_of_new_tokens_stay(
    count: int, state: str, folder: Path, tmp_path: Path
) -> None:
    """The model has 288 rows for 259 tokens, and those to spare are not trained either."""
    pytest.importorskip("peft")
    new = ",".join(f"<t{n}>" for n in range(count))
    settings = run_settings(
        "finetune", {"model": str(folder), "lora": 2, "special_tokens": new, "device": "cpu"}
    )
    source = ModelSource(
        settings=settings,
        shape=CausalLM.from_pretrained(folder, device="cpu").config,
        dtype=torch.bfloat16,
        recipe=get_recipe("bf16"),
        options={},
    )
    with pytest.warns(UserWarning, match=f"--lora does not train the embedding: .* {state}"):
        source.with_rows_for(259 + count, new=count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert source.with_rows_for(259, new=0) is source
