"""Folders of Hugging Face: refusals, shards, dtypes, names on the hub, and the memory that loading takes."""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_tensors
from hf_models import Pair, close, document_of, load, prompts, tensors_of
from judge import AutoModelForCausalLM
from ranks import run_process
from safetensors.torch import load_file, save_file

from te_models import CausalLM
from te_models.errors import UsageError
from te_models.interop.hf_writing import MAX_SHARD_BYTES, write_hugging_face
from te_models.saving.pretrained import weights


@pytest.mark.parametrize(
    "case, change, message",
    [
        ("llama2", dict(model_type="gpt2"), "unknown architecture (model_type) 'gpt2'"),
        ("llama2", dict(model_type="lama"), "did you mean 'llama'"),
        ("llama2", dict(model_type=None), "(model_type) None: the file lacks it"),
        ("llama2", dict(model_type="jamba"), "'jamba'"),
        (
            "llama2",
            dict(architectures=["LlamaForSequenceClassification"]),
            "LlamaForSequenceClassification",
        ),
        ("llama2", dict(attention_bias=True), "missing: model.layers.0.self_attn.k_proj.bias"),
        ("llama2", dict(mlp_bias=True), "missing: model.layers.0.mlp.down_proj.bias"),
        ("llama2", dict(hidden_act="quick_gelu"), "unknown hidden_act 'quick_gelu'"),
        ("llama2", dict(attention_dropout=0.1), "attention_dropout=0.1"),
        (
            "llama2",
            dict(quantization_config=dict(quant_method="gptq", bits=4)),
            "quantization_config=",
        ),
        (
            "llama2",
            dict(rope_parameters=dict(rope_type="axial", factor=4.0)),
            "'axial' is not supp",
        ),
        (
            "llama2",
            dict(rope_parameters=None, rope_scaling=dict(type="axial", factor=2.0)),
            "'axial'",
        ),
        (
            "llama2",
            dict(rope_parameters=dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)),
            "'linear' is not",
        ),
        (
            "llama2",
            dict(rope_parameters=dict(full_attention=dict(rope_type="default"))),
            "by layer type",
        ),
        ("llama2", dict(sliding_window=64), "sliding_window=64"),
        ("llama2", dict(attention_chunk_size=8), "attention_chunk_size=8"),
        ("llama2", dict(layer_types=["chunked_attention"] * 4), "layer_types=['chunked_attention'"),
        ("llama2", dict(head_dim="16"), "head_dim='16'"),
        ("llama2", dict(dtype="int8"), "dtype 'int8'"),
        ("qwen3", dict(attention_bias=True), "missing: model.layers.0.self_attn.k_proj.bias"),
        (
            "qwen3",
            dict(layer_types=["full_attention"] * 3 + ["linear_attention"]),
            "'linear_attention'",
        ),
        ("smollm3", dict(mlp_bias=True), "missing: model.layers.0.mlp.down_proj.bias"),
        ("headwise", dict(qkv_bias=True), "qkv_bias=True"),
        ("headwise", dict(use_sliding_window=True), "use_sliding_window=True"),
        ("headwise", dict(elementwise_attn_output_gate=True), "together are not supported"),
        (
            "qwen3_next",
            dict(layer_types=["full_attention"] * 3 + ["sliding_attention"]),
            "layer 3 is 'sliding_attention'",
        ),
        ("llama2", dict(hidden_size=None), "lacks hidden_size"),
        ("smollm3", dict(num_hidden_layers="4"), "num_hidden_layers='4' is not a whole number"),
        ("smollm3", dict(no_rope_layers=[1]), "no_rope_layers has 1 entries"),
        ("smollm3", dict(no_rope_layers=7), "config.json: "),
        ("llama2", dict(rope_parameters="linear"), "config.json: "),
        ("llama2", dict(is_encoder_decoder=True), "is_encoder_decoder=True"),
        (
            "llama2",
            dict(intermediate_size=100),
            "model.layers.0.mlp.gate_proj.weight has shape [96, 64], not [100, 64]",
        ),
        ("llama2", dict(num_hidden_layers=5), "num_hidden_layers is 5, and the tensors have 4"),
        ("llama2", dict(num_hidden_layers=3), "unexpected: model.layers.3"),
    ],
)
def test_unsupported_fields_of_a_config_are_named(
    case: str, change: dict[str, Any], message: str, theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    folder = theirs(case)[1]
    config = document_of(folder) | change
    if change.get("hidden_size", 1) is None:
        del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    refused(tmp_path, message)


def test_fields_without_effect_are_accepted(theirs: Callable[..., Pair], tmp_path: Path) -> None:
    folder = theirs("llama2")[1]
    more = {
        "transformers.js_config": {"dtype": "q4"},
        "_name_or_path": "x",
        "unsloth_fixed": True,
        "temperature": 0.6,
    }
    more |= {
        "pretraining_tp": 2,
        "rope_interleaved": False,
        "some_feature": None,
        "id2label": {"0": "a"},
    }
    config = document_of(folder) | more
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    model = load(tmp_path)
    assert model.config == load(folder).config
    model.save_pretrained(tmp_path / "back", format="hf")
    assert document_of(tmp_path / "back") == config


def refused(folder: Path | str, message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=".") as error:
        load(folder, **options)
    assert (
        message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400
    ), error.value


@pytest.fixture
def sharded(theirs: Callable[..., Pair], tmp_path: Path) -> Path:
    """A checkpoint of several shards."""
    theirs("llama3")[0].save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


def test_shards_are_read_and_damage_is_named(sharded: Path, theirs: Callable[..., Pair]) -> None:
    ids = prompts()[0]
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert torch.equal(load(sharded)(ids).logits, load(theirs("llama3")[1])(ids).logits)
    tensors = tensors_of(sharded)
    for value in (math.nan, -math.inf):
        name = sorted(load_file(shards[1]))[0]
        good = shards[1].read_bytes()
        broken = {
            n: t.index_fill(0, torch.tensor([0]), value) if n == name else t
            for n, t in load_file(shards[1]).items()
        }
        save_file(broken, shards[1], {"format": "pt"})
        refused(sharded, f"{name} has a NaN or an infinity")
        shards[1].write_bytes(good)
    assert_same_tensors(tensors, tensors_of(sharded))
    moved = shards[1].rename(sharded / "elsewhere")
    refused(sharded, f"lacks {shards[1].name}")
    moved.rename(shards[1]).write_bytes(shards[0].read_bytes())
    refused(sharded, "is both in")
    shards[1].write_bytes(shards[0].read_bytes()[:1000])
    refused(sharded, f"{shards[1].name} is damaged")
    (sharded / "model.safetensors.index.json").write_text("{}")
    refused(sharded, "no map of tensor names")
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, "holds no weights")
    (sharded / "pytorch_model.bin").touch()
    refused(sharded, "as a pickle (pytorch_model.bin)")


def test_unsupported_conversions_are_refused(theirs: Callable[..., Pair], tmp_path: Path) -> None:
    refused(theirs("headwise")[1], "cannot become 'elementwise'", attention_gate="elementwise")
    refused(theirs("elementwise")[1], "cannot become 'none'", attention_gate="none")
    model = load(theirs("mistral")[1])
    with pytest.raises(ValueError, match="did you mean 'hf'"):
        model.save_pretrained(tmp_path / "x", format="hff")
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="holds thesis.txt"):
        load(theirs("llama2")[1]).save_pretrained(tmp_path, format="hf")
    assert not (tmp_path / "x").exists() and (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(
    "override",
    [
        dict(hidden_size=128),
        dict(num_hidden_layers=1),
        dict(num_hidden_layers=9),
        dict(vocab_size=32),
        dict(attention_bias=True),
        dict(qk_norm=True),
    ],
)
def test_weights_keep_their_shape(
    override: dict[str, Any], theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    _, folder = theirs("llama3")
    ((name, value),) = override.items()
    message = (
        f"the weights in .* do not fit {name}={value}: a model that has weights keeps their shape"
    )
    with pytest.raises(UsageError, match=message):
        CausalLM.from_pretrained(folder, **override)
    CausalLM.from_pretrained(folder).save_pretrained(tmp_path / "ours")
    with pytest.raises(UsageError, match=message):
        CausalLM.from_pretrained(tmp_path / "ours", **override)


def test_saving_in_shards(theirs: Callable[..., Pair], tmp_path: Path) -> None:
    judge, folder = theirs("qwen3")
    model = load(folder)
    write_hugging_face(
        model, model.origin, tmp_path / "back", weights(model), max_shard_bytes=60_000
    )
    assert (
        len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 3
        and MAX_SHARD_BYTES == 5e9
    )
    assert_same_tensors(tensors_of(folder), tensors_of(tmp_path / "back"))
    ids = prompts()[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    close(again(ids).logits, judge(ids).logits)
    load(tmp_path / "back").save_pretrained(tmp_path / "back", format="hf")
    assert [f.name for f in (tmp_path / "back").glob("*.safetensors")] == ["model.safetensors"], (
        "the old shards are gone"
    )


def test_names_are_resolved_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, theirs: Any, pretend: Any, tmp_path: Path
) -> None:
    refused(
        "nobody/nothing-0.1b",
        "nobody/nothing-0.1b is no folder here, and the Hugging Face hub did not give it",
    )
    refused("/no/such/folder", "/no/such/folder")
    # A folder of the owner's name says that a path was meant: the hub is not asked.
    monkeypatch.chdir(tmp_path)
    Path("runs/one").mkdir(parents=True)
    Path("runs/notes.txt").write_text("no folder")
    refused("runs/two", "runs/two: no such folder, and runs has one; to load runs/two of the Hug")
    refused("runs/one/two", "runs/one/two: no such folder, and no model")
    Path("runs/one").rmdir()
    refused("runs/two", "runs/two: no such folder, and runs has no folder in it; to load runs/two")
    folder = theirs("llama2")[1]
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    assert load("meta/llama").config == load(folder).config
    pretend("huggingface_hub", None)
    refused("meta/llama", "pip install -U 'te-models[hf]'")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_that_of_the_argument_or_the_file(
    dtype: Any, theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    judge, folder = theirs("llama3")
    model = load(folder, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    model.save_pretrained(tmp_path, format="hf")
    expected = {name: value.to(dtype) for name, value in judge.state_dict().items()}
    assert_same_tensors(tensors_of(tmp_path), expected)
    assert load(tmp_path).dtype == dtype


STREAMING = """
import resource, sys, torch
from te_models import CausalLM

def peak(): return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

CausalLM.from_pretrained(sys.argv[2], device="cpu", engine="emulated")  # everything is imported and warm
open("/proc/self/clear_refs", "w").write("5")
before = peak()
model = CausalLM.from_pretrained(sys.argv[1], device="cpu", engine="emulated")
print(peak() - before - sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peak memory"
)
@pytest.mark.slow
def test_loading_takes_one_shard_of_memory_beside_the_model(
    theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    sizes = dict(
        vocab_size=4000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
    )
    model = CausalLM.from_preset(
        "qwen3-0.6b", device="cpu", **{**sizes, "head_dim": 64, "num_key_value_heads": 8}
    )
    shard = 20_000_000
    write_hugging_face(model, model.origin, tmp_path, weights(model), max_shard_bytes=shard)
    files = [file.stat().st_size for file in tmp_path.glob("model-*.safetensors")]
    assert len(files) >= 4
    command = [sys.executable, "-c", STREAMING, str(tmp_path), str(theirs("llama2")[1])]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = run_process(command, env=environment)
    assert int(done.stdout) <= 1.15 * max(files), (
        f"{int(done.stdout) / max(files):.2f} of the largest shard"
    )
