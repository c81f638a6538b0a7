"""What a run with adapters changed in the model below them: read by every command, and in everything it writes.

The judge is peft's model in transformers, with the options of the run in its config.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bases import CHATML, write_chats, write_model, write_tokenizer
from torch import Tensor

pytest.importorskip("peft")
pytest.importorskip("transformers")

import peft
import transformers

from te_models import CausalLM, TEModelsForCausalLM, load_lora, load_tokenizer
from te_models.cli import main
from te_models.saving.folder import _digest

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:vocab_size=.* adds .* to the model:UserWarning"),
]
IDS = torch.tensor([[5 + 7 * place % 250 for place in range(60)]])
RUN = ["--steps", "4", "--learning-rate", "0.02", "--seq-len", "128", "--batch-size", "2"]
RUN += ["--recipe", "bf16", "--sample-tokens", "0", "--device", "cpu", "--eval-every", "0"]
PLACE: dict[str, Any] = dict(device="cpu", engine="emulated")
OPTIONS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "rope-theta": (["--rope-theta", "300"], dict(rope_theta=300.0)),
    "window": (["--sliding-window", "9"], dict(sliding_window=9)),
    "vocabulary": (["--vocab-size", "352"], dict(vocab_size=352)),
    "several": (
        ["--rope-theta", "300", "--max-position-embeddings", "512"],
        dict(rope_theta=300.0),
    ),
    "eps": (["--rms-norm-eps", "0.1"], dict(rms_norm_eps=0.1)),
}


def train(base: Path, out: Path, *more: str) -> Path:
    data = write_chats(out.parent / "chats.jsonl")
    assert main(["finetune", "--model", str(base), *more, "--lora", "4", "--data", str(data), *RUN,
                 "--out", str(out)]) == 0  # fmt: skip
    return out


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


def reference(base: Path, adapter: Path, **fields: Any) -> Tensor:
    """Return the logits of peft's model in transformers, on the base with these fields of its config."""
    size = fields.pop("vocab_size", None)
    config = transformers.AutoConfig.from_pretrained(base)
    theta = fields.pop("rope_theta", None)
    if theta is not None:
        config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    for name, value in fields.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, config=config)
    if size is not None:
        model.resize_token_embeddings(size, mean_resizing=True)
    return logits(peft.PeftModel.from_pretrained(model, adapter))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case != "rope-theta")) for case in OPTIONS],
)
def test_every_reader_takes_the_shape_of_the_run(case: str, tmp_path: Path, capsys: Any) -> None:
    flags, fields = OPTIONS[case]
    kind = "mistral" if case == "window" else "llama"
    base = write_model(tmp_path / "base", kind=kind, tokenizer=write_tokenizer(CHATML))
    run = train(base, tmp_path / "run", *flags, "--merge")
    wanted = reference(base, run / "adapter", **fields)
    bare = logits(CausalLM.from_pretrained(base, **PLACE))
    assert (bare - wanted[..., : bare.shape[-1]]).abs().max() > 0.05

    places = {"hf": tmp_path / "hf", "te": tmp_path / "te"}
    for format, out in places.items():
        told = ["--model", str(run), "--format", format, "--out", str(out)]
        assert main(["convert", *told]) == 0
    assert (
        main(["export", "--model", str(run), "--format", "bf16", "--out", str(tmp_path / "served")])
        == 0
    )
    models = {
        "run": CausalLM.from_pretrained(run, **PLACE),
        "merged while loading": CausalLM.from_pretrained(run, merge_adapters=True, **PLACE),
        "adapter": CausalLM.from_pretrained(run / "adapter", **PLACE),
        "merged": CausalLM.from_pretrained(run / "merged", **PLACE),
        "te": CausalLM.from_pretrained(places["te"], **PLACE),
        "transformers": transformers.AutoModelForCausalLM.from_pretrained(places["hf"]),
        "ours in transformers": TEModelsForCausalLM.from_pretrained(run, **PLACE),
    }
    for name, model in models.items():
        torch.testing.assert_close(logits(model), wanted, atol=2e-4, rtol=0, msg=name)
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype="float32")
    assert (logits(served) - wanted).abs().max() < 0.1  # rounded to BF16
    capsys.readouterr()
    assert main(["plan", "--model", str(run), "--device", "cpu"]) == 0
    plan = capsys.readouterr().out
    if "vocab_size" in fields:
        assert "-> 352" in plan


def test_what_a_load_leaves_open_is_as_it_was_trained(tmp_path: Path) -> None:
    """recipe="auto" and dtype=None choose nothing: the run's recipe, dtype and shape stay."""
    base = write_model(tmp_path / "base", write_tokenizer(CHATML), num_hidden_layers=3)
    data = write_chats(tmp_path / "chats.jsonl")
    options = ["current" if word == "bf16" else word for word in RUN]
    options += ["--rope-theta", "300", "--dtype", "bfloat16"]
    run = tmp_path / "run"
    told = ["--model", str(base), "--lora", "4", "--data", str(data), "--out", str(run)]
    assert main(["finetune", *told, *options]) == 0
    for folder in (run, run / "adapter"):
        for given in ({}, dict(recipe="auto", dtype=None), dict(recipe=None)):
            model = CausalLM.from_pretrained(folder, **PLACE, **given)
            assert model.recipe.name == "current", (folder, given)
            assert model.dtype == torch.bfloat16, (folder, given)
            assert model.config.rope_theta == 300
    chosen = CausalLM.from_pretrained(run, recipe="bf16", dtype=torch.float32, **PLACE)
    assert (chosen.recipe.name, chosen.dtype) == ("bf16", torch.float32)


def test_a_gate_that_a_run_added(tmp_path: Path) -> None:
    """Its parameters are adapted too; the loss of the run is that of its adapters when they are read again."""
    base = write_model(tmp_path / "base", tokenizer=write_tokenizer(CHATML))
    run = train(base, tmp_path / "run", "--attention-gate", "elementwise", "--merge")
    adapted = CausalLM.from_pretrained(run, **PLACE)
    assert adapted.config.attention_gate == "elementwise"
    for model in (CausalLM.from_pretrained(run / "merged", **PLACE), load_lora_again(base, run)):
        torch.testing.assert_close(logits(model), logits(adapted), atol=2e-4, rtol=0)


def load_lora_again(base: Path, run: Path) -> CausalLM:
    plain = CausalLM.from_pretrained(base, attention_gate="elementwise", recipe="bf16", **PLACE)
    return load_lora(plain, run).get_base_model()


def test_evaluate_measures_the_model_of_the_run(tmp_path: Path, capsys: Any) -> None:
    base = write_model(tmp_path / "base", tokenizer=write_tokenizer(CHATML))
    run = train(base, tmp_path / "run", "--rope-theta", "300", "--merge")
    data = str(tmp_path / "chats.jsonl")
    found = []
    for model in (run, run / "merged"):
        capsys.readouterr()
        assert (
            main(["evaluate", "--model", str(model), "--data", data, "--json", "--device", "cpu"])
            == 0
        )
        found.append(json.loads(capsys.readouterr().out))
    losses = [one["losses"][0]["loss"] for one in found]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_resumed_run_without_its_run_file_keeps_the_shape(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tokenizer=write_tokenizer(CHATML))
    run = train(base, tmp_path / "run", "--rope-theta", "300")
    (run / "run.toml").unlink()
    again = ["--model", str(base), "--lora", "4", "--data", str(tmp_path / "chats.jsonl")]
    flags = [word for word in RUN if word != "4"]
    flags.remove("--steps")
    assert main(["finetune", "--resume", str(run), *again, *flags, "--steps", "6"]) == 0
    assert CausalLM.from_pretrained(run, **PLACE).config.rope_theta == 300
    with pytest.warns(UserWarning, match="rope_theta=300"):
        load_lora(CausalLM.from_pretrained(base, **PLACE), run)


def test_checkpoints_of_earlier_versions_are_read_with_the_run_file(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tokenizer=write_tokenizer(CHATML))
    run = train(base, tmp_path / "run", "--rope-theta", "300")
    expected = logits(CausalLM.from_pretrained(run, **PLACE))
    (newest,) = (run / "checkpoints").glob("step-*")
    forget(newest, "base_config.json")
    assert torch.equal(logits(CausalLM.from_pretrained(run, **PLACE)), expected)


def forget(folder: Path, name: str) -> None:
    """Take a file out of a saved folder, and out of its manifest."""
    (folder / name).unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"][name]
    manifest["digest"] = _digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("lora", [pytest.param([], marks=pytest.mark.slow), ["--lora", "4"]])
def test_a_token_added_for_padding(lora: list[str], tmp_path: Path, capsys: Any) -> None:
    """As the message advises, with --vocab-size: chat, merge, evaluate and exports read the run."""
    words = write_tokenizer(CHATML)
    words.add_special_tokens({"pad_token": "[PAD]"})
    base = write_model(tmp_path / "base", vocab_size=len(words) - 1, tokenizer=words)
    data = str(write_chats(tmp_path / "chats.jsonl"))
    run = tmp_path / "run"
    start = ["finetune", "--model", str(base), *lora, "--data", data, *RUN, "--out", str(run)]
    assert main(start) == 2
    advice = f"--vocab-size {len(words)}"
    assert advice in capsys.readouterr().err
    assert main([*start, *advice.split(), *(["--merge"] if lora else [])]) == 0
    for model in (run, run / "merged") if lora else (run,):
        told = ["--model", str(model), "--device", "cpu"]
        assert main(["evaluate", *told, "--data", data]) == 0
        assert main(["generate", "--chat", "--prompt", "What is 2 + 2?", *told]) == 0
    assert (
        main(["export", "--model", str(run), "--format", "bf16", "--out", str(tmp_path / "out")])
        == 0
    )
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert served.config.vocab_size == len(words)
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out").pad_token_id == len(words) - 1
    )
    rows = served.get_input_embeddings().weight
    if lora:  # the base is frozen
        torch.testing.assert_close(rows[-1], rows[:-1].mean(0), atol=1e-3, rtol=0)


TEMPLATE = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # noqa: E501


@pytest.mark.parametrize("how", ["template", "tokenizer"])
def test_exports_have_the_tokenizer_of_the_run(how: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tokenizer=write_tokenizer(CHATML))
    write_tokenizer(TEMPLATE, text=" another vocabulary", size=300).save_pretrained(
        tmp_path / "own"
    )
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    more = {"template": ["--chat-template", str(tmp_path / "own.jinja")],
            "tokenizer": ["--tokenizer", str(tmp_path / "own")]}[how]  # fmt: skip
    run = train(base, tmp_path / "run", *more)
    wanted = transformers.AutoTokenizer.from_pretrained(
        tmp_path / "own" if how == "tokenizer" else base
    )
    assert main(["convert", "--model", str(run), "--out", str(tmp_path / "hf")]) == 0
    assert (
        main(["convert", "--model", str(run), "--format", "te", "--out", str(tmp_path / "te")]) == 0
    )
    assert (
        main(
            [
                "export",
                "--model",
                str(run / "adapter"),
                "--format",
                "bf16",
                "--out",
                str(tmp_path / "served"),
            ]
        )
        == 0
    )
    for name in ("hf", "te", "served"):
        found = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert found.get_vocab() == wanted.get_vocab(), name
        assert found.chat_template == TEMPLATE, name
        assert load_tokenizer(tmp_path / name).template_source() == TEMPLATE


@pytest.mark.parametrize("brings", ["all", "template"])
def test_adapters_of_peft_that_bring_a_tokenizer(brings: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tokenizer=write_tokenizer(CHATML))
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    own = write_tokenizer(TEMPLATE, text=" another vocabulary", size=300)
    if brings == "all":
        own.save_pretrained(tmp_path / "adapter")
    else:
        (tmp_path / "adapter/chat_template.jinja").write_text(TEMPLATE)
    told = ["--model", str(tmp_path / "adapter")]
    assert main(["convert", *told, "--out", str(tmp_path / "hf")]) == 0
    assert main(["export", *told, "--format", "bf16", "--out", str(tmp_path / "served")]) == 0
    vocabulary = own.get_vocab() if brings == "all" else write_tokenizer().get_vocab()
    for name in ("hf", "served"):
        found = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert (found.chat_template, found.get_vocab()) == (TEMPLATE, vocabulary)
    assert load_tokenizer(tmp_path / "adapter").template_source() == TEMPLATE
