"""The dtype that a run trains in: BF16 in place of FP16, whose gradients underflow, or the one of `--dtype`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_theirs
from safetensors.torch import load_file, save_file
from tiny_runs import PRETRAIN, SHORT

from te_models import CausalLM
from te_models.cli import main
from te_models.config.toml import read_toml
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.saving.pretrained import read_shape
from te_models.training.lora_run import load_adapted
from te_models.training.resume import saved_choices

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def save_model(folder: Path, dtype: torch.dtype) -> Path:
    """Save a model of transformers in a dtype, with a tokenizer of bytes."""
    make_theirs("llama2", folder, vocab_size=288).to(dtype).save_pretrained(folder)
    tokenizer = ByteTokenizer().documents()["tokenizer"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("options", [[], ["--lora", "4"]], ids=["full", "lora"])
def test_a_model_in_fp16_is_trained_in_bf16_with_a_line(
    options: list[str], tmp_path: Path, texts: None, capsys: pytest.CaptureFixture
) -> None:
    folder = save_model(tmp_path / "half", torch.float16)
    run = tmp_path / "run"
    command = ["finetune", "--model", str(folder), *SHORT, "--steps", "1", "--out", str(run)]
    assert main([*command, *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the model is in float16 and trained in bfloat16" in said
    assert "0 in FP8, 17 in BF16" in said
    assert read_toml(run / "run.toml")["model"]["dtype"] == "bfloat16"
    newest = run / "checkpoints" / "step-00000001"
    assert saved_choices(newest)["dtype"] == torch.bfloat16
    model = load_adapted(newest) if options else CausalLM.from_pretrained(run)
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("command", ["pretrain", "finetune"])
def test_a_run_has_the_dtype_that_is_asked_for(
    command: str, dtype: str, tmp_path: Path, texts: None, capsys: pytest.CaptureFixture
) -> None:
    if command == "finetune":
        begin = ["finetune", "--model", str(save_model(tmp_path / "half", torch.float16)), *SHORT]
    else:
        begin = PRETRAIN
    run = tmp_path / "run"
    assert main([*begin, "--steps", "1", "--dtype", dtype, "--out", str(run)]) == 0
    assert CausalLM.from_pretrained(run).dtype == DTYPES[dtype]
    assert "trained in" not in capsys.readouterr().out  # it is what was asked for
    assert main(["finetune", "--resume", str(run), "--steps", "2"]) == 0
    assert CausalLM.from_pretrained(run).dtype == DTYPES[dtype]


def test_fp16_is_refused_and_a_resumed_run_keeps_its_dtype(
    tmp_path: Path, texts: None, capsys: pytest.CaptureFixture
) -> None:
    run = str(tmp_path / "run")
    assert main([*PRETRAIN, "--steps", "1", "--dtype", "float16", "--out", run]) == 2
    assert "--dtype float16: most FP16 gradients underflow" in capsys.readouterr().err
    assert main([*PRETRAIN, "--steps", "1", "--out", run]) == 0
    assert main(["pretrain", "--resume", run, "--steps", "2", "--dtype", "float32"]) == 2
    assert "keeps its dtype, which is 'bfloat16'" in capsys.readouterr().err


def test_a_pass_that_trains_in_fp16_warns(tmp_path: Path) -> None:
    model = CausalLM.from_pretrained(save_model(tmp_path / "half", torch.float16), device="cpu")
    ids = torch.arange(3, 19)[None]
    with pytest.warns(UserWarning, match="gradients underflow without loss scaling"):
        model.train()(ids, labels=ids)
    with torch.no_grad():
        model(ids, labels=ids)  # which trains nothing
    model.eval()(ids, labels=ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [False, True])
def test_without_a_dtype_in_config_json_it_is_that_of_the_tensors(
    shards: bool, dtype: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", DTYPES[dtype])
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    # A few values of another dtype, as router biases in FP32 are, change nothing.
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    if shards:
        names = sorted(tensors)
        for number, part in enumerate((names[:5], names[5:])):
            save_file({name: tensors[name] for name in part}, folder / f"{number}.safetensors")
        places = {name: f"{int(name in names[5:])}.safetensors" for name in names}
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "model.safetensors").unlink()
    else:
        save_file(tensors, folder / "model.safetensors")
    assert CausalLM.from_pretrained(folder, device="cpu").dtype == DTYPES[dtype]
    assert read_shape(folder).dtype == DTYPES[dtype]


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "BF16"), ("float16", "FP16"), ("float32", "FP32")]
)
def test_a_plan_counts_linears_by_the_dtype_of_the_model(dtype: str, name: str) -> None:
    model = CausalLM.from_preset("gated-nano", dtype=DTYPES[dtype], recipe="bf16", device="meta")
    plan = model.plan()
    assert plan.count("FP8") == 0 and plan.count(name) == len(plan)
