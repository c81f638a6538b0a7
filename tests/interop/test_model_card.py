"""Model cards say what is so: trained or not, by what, on what, from what, and with which losses."""

import json
from pathlib import Path
from typing import Any

import pytest
from bases import CHATML, write_chats, write_model, write_tokenizer

pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")

import huggingface_hub as hub

from te_models import CausalLM
from te_models.cli import main
from te_models.files.formats import read_json
from te_models.interop.model_card import license_in

RUN = ["--seq-len", "128", "--batch-size", "2", "--sample-tokens", "0", "--device", "cpu"]
LICENSED = "---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n# A base model\n"


def card_of(folder: Path) -> Any:
    return hub.ModelCard.load(folder / "README.md")


def row(card: Any, name: str) -> str:
    (line,) = [line for line in card.content.splitlines() if line.startswith(f"| {name} |")]
    return line.split("|")[2].strip()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model in the cache of the hub."""
    folder = tmp_path / "models--Owner--Base-1/snapshots/abc"
    write_model(folder, tokenizer=write_tokenizer(CHATML), num_hidden_layers=3)
    (folder / "README.md").write_text(LICENSED)
    return folder


def finetune(base: Path, out: Path, *more: str) -> dict[str, Any]:
    """Train, convert; return the result in the last checkpoint."""
    data = str(write_chats(out.parent / "chats.jsonl"))
    told = [
        "finetune",
        "--model",
        str(base),
        "--data",
        data,
        *RUN,
        *more,
        "--out",
        str(out / "run"),
    ]
    assert main(told) == 0
    assert main(["convert", "--model", str(out / "run"), "--out", str(out / "hf")]) == 0
    newest = max((out / "run/checkpoints").glob("step-*"))
    return read_json(newest / "training.json")["result"]


def test_a_model_that_was_only_converted(base: Path, tmp_path: Path) -> None:
    assert main(["convert", "--model", str(base), "--out", str(tmp_path / "hf")]) == 0
    assert (
        main(
            [
                "export",
                "--model",
                str(base),
                "--format",
                "fp8-channel",
                "--out",
                str(tmp_path / "fp8"),
            ]
        )
        == 0
    )
    assert (
        main(["convert", "--model", str(base), "--format", "te", "--out", str(tmp_path / "te")])
        == 0
    )
    CausalLM.from_pretrained(tmp_path / "te", device="cpu").save_pretrained(
        tmp_path / "again", format="hf"
    )
    for name in ("hf", "fp8", "again"):
        card = card_of(tmp_path / name)
        assert "trained with" not in card.content and "has not trained" in card.content
        assert card.data.library_name == "transformers"
    card = card_of(tmp_path / "hf")
    assert (card.data.base_model, card.data.license) == ("Owner/Base-1", "apache-2.0")


def test_a_schedule_of_recipes(base: Path, tmp_path: Path) -> None:
    result = finetune(
        base, tmp_path, "--steps", "5", "--recipe", "current", "--recipe-schedule", "bf16@0.8"
    )
    card = card_of(tmp_path / "hf")
    assert "under the recipe `current` until step 4, then `bf16`" in card.content
    assert {"current", "bf16"} <= {*card.data.tags}
    assert row(card, "steps") == "5" and row(card, "tokens") == f"{5 * 2 * 128:,}"
    assert (
        row(card, "eval loss before training") == f"{result['first_eval_loss']:.4f} nats per token"
    )
    assert row(card, "eval loss after") == f"{result['eval_loss']:.4f} nats per token"
    assert row(card, "last training loss") == f"{result['loss']:.4f} nats per token"
    assert row(card, "training data") == "chats.jsonl"
    assert (card.data.base_model, card.data.license) == ("Owner/Base-1", "apache-2.0")
    assert str(tmp_path) not in card.content


def test_a_run_with_adapters(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = ["--lora", "3", "--lora-targets", "q_proj,o_proj", "--lora-dropout", "0.1", "--merge"]
    result = finetune(base, tmp_path, "--steps", "3", "--recipe", "bf16", *lora)
    run = tmp_path / "run"
    CausalLM.from_pretrained(run / "merged", device="cpu").save_pretrained(
        tmp_path / "merged", format="hf"
    )
    assert (
        main(["export", "--model", str(run), "--format", "bf16", "--out", str(tmp_path / "bf16")])
        == 0
    )
    own = card_of(run / "adapter")
    assert own.data.library_name == "peft" and "LoRA adapters for Owner/Base-1" in own.content
    assert (own.data.base_model, own.data.license) == ("Owner/Base-1", "apache-2.0")
    assert row(own, "steps") == "3" and row(own, "LoRA").startswith("rank 3, alpha 6")
    for name in ("hf", "merged", "bf16"):
        card = card_of(tmp_path / name)
        assert row(card, "LoRA") == "rank 3, alpha 6, dropout 0.1, on `o_proj`, `q_proj`", name
        assert "LoRA adapters of rank 3" in card.content and "lora" in card.data.tags
        assert row(card, "steps") == "3"
        assert row(card, "eval loss after") == f"{result['eval_loss']:.4f} nats per token"
        assert (card.data.base_model, card.data.license) == ("Owner/Base-1", "apache-2.0")


def test_the_card_names_the_kind_of_adapters(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = ["--lora", "2", "--lora-targets", "q_proj", "--dora", "--rslora"]
    finetune(base, tmp_path, "--steps", "1", "--recipe", "bf16", *lora)
    cards = [card_of(tmp_path / "run/adapter"), card_of(tmp_path / "hf")]
    for card in cards:
        assert row(card, "LoRA").startswith("DoRA and rsLoRA, rank 2, alpha 4")


def test_a_resumed_run_and_one_after_it(base: Path, tmp_path: Path) -> None:
    finetune(base, tmp_path, "--steps", "2", "--recipe", "bf16")
    assert main(["finetune", "--resume", str(tmp_path / "run"), "--steps", "4"]) == 0
    words = ["convert", "--model", str(tmp_path / "run"), "--out", str(tmp_path / "hf")]
    assert main([*words, "--overwrite"]) == 0
    card = card_of(tmp_path / "hf")
    assert row(card, "steps") == "4" and "trained before" not in card.content
    assert row(card, "base model") == "Owner/Base-1"
    finetune(tmp_path / "run", tmp_path / "second", "--steps", "3", "--recipe", "bf16")
    card = card_of(tmp_path / "second/hf")
    assert row(card, "steps") == "3" and row(card, "trained before").startswith("4 steps")
    assert (card.data.base_model, card.data.license) == ("Owner/Base-1", "apache-2.0")


def test_the_best_checkpoint_has_its_own_facts(base: Path, tmp_path: Path) -> None:
    more = [
        "--steps",
        "6",
        "--learning-rate",
        "0.3",
        "--eval-every",
        "1",
        "--recipe",
        "bf16",
        "--schedule",
        "constant",
    ]
    result = finetune(base, tmp_path, *more)
    best = result["best_step"]
    assert 0 < best < 6, result
    card = card_of(tmp_path / "hf")
    assert row(card, "lowest eval loss").endswith(f"at step {best}: these are not its weights")
    assert (
        main(["convert", "--model", str(tmp_path / "run/best"), "--out", str(tmp_path / "b")]) == 0
    )
    card = card_of(tmp_path / "b")
    assert row(card, "steps") == str(best)
    assert row(card, "eval loss after") == f"{result['best_eval_loss']:.4f} nats per token"


def test_datasets_of_the_hub_are_named(tmp_path: Path) -> None:
    from te_models.training.facts import dataset_names  # noqa: PLC0415

    given = [
        "hub://a/b",
        "c/d#config",
        "hf://datasets/e/f/data/*.parquet",
        "local.jsonl",
        "c/d#config",
    ]
    assert dataset_names(given) == ["a/b", "c/d", "e/f"]
    assert json.dumps(dataset_names([])) == "[]"


@pytest.mark.parametrize(
    "card, license",
    [
        (LICENSED, "apache-2.0"),
        ("# A model\nwithout metadata\n", None),
        ("---\n---\nempty\n", None),
        ("---\n- a list\n---\nx\n", None),
        ("---\nlicense: [mit\nname: }\n---\nno YAML\n", None),
        ("---\nlicense: 3\n---\nno text\n", None),
    ],
)
def test_a_card_of_any_kind_is_read_without_a_word(
    card: str, license: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "README.md").write_text(card)
    assert license_in(tmp_path) == license
    assert not caplog.records
