"""Every program in examples/ runs at small size and does what its first lines say."""

import json
import re
import runpy
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_process

from te_models import CausalLM
from te_models.data.byte_tokenizer import ByteTokenizer

EXAMPLES = sorted(path.name for path in (Path(__file__).parent.parent / "examples").glob("*.py"))
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3 in Hugging Face's format, with a tokenizer of bytes that has a chat template."""
    folder = tmp_path_factory.mktemp("example") / "qwen3"
    torch.manual_seed(0)
    shape = dict(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    shape |= dict(
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    built = CausalLM.from_preset("qwen3-0.6b", device="cpu", engine="emulated", **shape)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    built.save_pretrained(folder, format="hf")
    documents = ByteTokenizer().documents()
    documents["tokenizer_config"]["chat_template"] = CHAT
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Any:
    """A function that runs an example with arguments and returns what it printed."""

    def call(name: str, *arguments: Any) -> str:
        path = Path(__file__).parent.parent / "examples" / name
        monkeypatch.setattr("sys.argv", [str(path), *map(str, arguments)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other libraries' notices
            runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(
        "".join(f"{number} green bottles, hanging on the wall.\n" for number in range(200))
    )
    return file


def test_load_hf(run: Any, model: Path, tmp_path: Path) -> None:
    out = run(
        "load_hf.py",
        model,
        "--recipe",
        "current",
        "--out",
        tmp_path / "back",
        "--attention-gate",
        "elementwise",
    )
    assert (
        "parameters on cpu" in out
        and "E4M3/E5M2 Float8CurrentScaling" in out
        and "logits [1, 16, 288]" in out
    )
    assert (
        CausalLM.from_pretrained(tmp_path / "back", device="cpu").config.attention_gate
        == "elementwise"
    )


def test_generate(run: Any, model: Path) -> None:
    out = run(
        "generate.py", model, "--prompt", "ab", "--prompt", "longer text", "--max-new-tokens", 8
    )
    assert "'ab' -> " in out and "'longer text' -> " in out and "sampled: ab" in out
    assert run("generate.py", model, "--prompt", "ab", "--max-new-tokens", 8) != run(
        "generate.py", model, "--prompt", "ab", "--max-new-tokens", 8, "--chat"
    )


SIZES = ["--seq-len", 32, "--batch-size", 2]


def printed_losses(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)", out, re.MULTILINE)]


def test_finetune_lora(run: Any, model: Path, corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    out = run(
        "finetune_lora.py",
        "--model",
        model,
        "--data",
        corpus,
        "--steps",
        8,
        *SIZES,
        "--out",
        tmp_path / "out",
    )
    losses = printed_losses(out)
    assert len(losses) == 8 and losses[-1] < losses[0] and "trainable params" in out
    assert (tmp_path / "out/adapter/adapter_model.safetensors").exists()
    before, after = (
        CausalLM.from_pretrained(f, device="cpu") for f in (model, tmp_path / "out/merged")
    )
    assert before.config == after.config
    assert not torch.equal(
        before.layers[0].mlp.down_proj.weight, after.layers[0].mlp.down_proj.weight
    )
    assert torch.equal(before.embed_tokens.weight, after.embed_tokens.weight)
    targets = ["--targets", "q_proj,v_proj", "--steps", 1]
    run(
        "finetune_lora.py",
        "--model",
        model,
        "--data",
        corpus,
        *targets,
        *SIZES,
        "--out",
        tmp_path / "two",
    )
    assert set(
        json.loads((tmp_path / "two/adapter/adapter_config.json").read_text())["target_modules"]
    ) == {
        "q_proj",
        "v_proj",
    }


def test_memory_plan(run: Any) -> None:
    out = run("memory_plan.py", "--preset", "gated-350m", "--gigabytes", 24)
    fits = [
        int(number)
        for number in re.findall(r"^activation_checkpointing=\w+: (\d+) x 2048", out, re.MULTILINE)
    ]
    assert len(fits) == 3 and 0 < fits[0] < fits[1] < fits[2]
    peak = re.search(r"\S+ \(peak\)", out)
    assert peak is not None and float(peak[0].split()[0]) < 24e9 / 2**30


@pytest.mark.slow
def test_own_recipe(run: Any, tmp_path: Path) -> None:
    out = run("own_recipe.py", "--steps", 3, "--out", tmp_path)
    assert "Float8BlockScaling" in out and "num_layers_at_start_in_bf16 = 2" in out
    before, after = map(
        float, re.findall(r"held-out loss ([\d.]+) before, ([\d.]+) after 3 steps", out)[0]
    )
    assert after < before
    saved = CausalLM.from_pretrained(tmp_path / "run", device="cpu").recipe
    assert saved.scheme == "Float8BlockScaling" and saved.num_layers_at_end_in_bf16 == 2


def test_export_and_parity(run: Any, corpus: Path, tmp_path: Path) -> None:
    out = run("export_and_parity.py", "--data", corpus, "--out", tmp_path / "served")
    agreement = re.search(r"([\d.]+) %", out)
    assert "linears quantized" in out and agreement is not None and float(agreement[1]) > 50
    assert json.loads((tmp_path / "served/config.json").read_text())["quantization_config"]


@pytest.mark.slow
def test_preferences_trl(run: Any, model: Path, tmp_path: Path) -> None:
    for package in ("trl", "datasets"):
        pytest.importorskip(package)
    pairs = [{"prompt": f"Say {n}: ", "chosen": "yes it is", "rejected": "no"} for n in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    out = run(
        "preferences_trl.py", "--model", model, "--data", tmp_path / "data.jsonl", "--recipe", "bf16",
        "--steps", 6, "--batch-size", 4, "--learning-rate", 1e-3, "--out", tmp_path / "dpo",
    )  # fmt: skip
    losses = printed_losses(out)
    assert (
        len(losses) == 6
        and losses[0] == pytest.approx(0.6931, abs=0.01)
        and losses[-1] < losses[0] - 0.1
    )
    tuned, first = (
        CausalLM.from_pretrained(folder, device="cpu") for folder in (tmp_path / "dpo", model)
    )
    assert not torch.equal(
        tuned.layers[0].mlp.down_proj.weight, first.layers[0].mlp.down_proj.weight
    )


def test_swap_recipes(run: Any, model: Path, corpus: Path, tmp_path: Path) -> None:
    args = [
        "--data",
        corpus,
        *SIZES,
        "--every",
        2,
        "--recipes",
        "bf16,delayed,mxfp8",
        "--out",
        tmp_path / "a",
    ]
    out = run("swap_recipes.py", "--model", model, *args)
    assert (
        re.findall(r"^step +\d+  loss [\d.]+  (\w+)$", out, re.MULTILINE)
        == ["bf16"] * 2 + ["delayed"] * 2 + ["mxfp8"] * 2
    )
    assert out.rstrip().endswith("under mxfp8")
    plain = run(
        "swap_recipes.py",
        "--model",
        model,
        *args[:-1],
        tmp_path / "b",
        "--recipes",
        "bf16",
        "--every",
        6,
    )
    assert (
        printed_losses(out)[:2] == printed_losses(plain)[:2]
        and printed_losses(out)[2:] != printed_losses(plain)[2:]
    )
    assert printed_losses(out) == pytest.approx(printed_losses(plain), rel=0.05)


def test_finetune(run: Any, model: Path, corpus: Path, tmp_path: Path) -> None:
    args = [
        "--model",
        model,
        "--data",
        corpus,
        *SIZES,
        "--recompute",
        "full",
        "--out",
        tmp_path / "whole",
    ]
    own = ["--recipe", "delayed", "--option", "amax_history_len=4"]  # which a resumed run keeps
    out = run("finetune.py", *args, *own, "--steps", 12)
    assert "eval loss" in out and "recipe=delayed" in out and len(printed_losses(out)) == 12
    saved = CausalLM.from_pretrained(tmp_path / "whole", device="cpu")
    assert saved.recipe.fields["amax_history_len"] == 4
    shutil.rmtree(tmp_path / "whole/checkpoints/step-00000012")
    assert (
        printed_losses(run("finetune.py", *args, "--steps", 12, "--resume"))
        == printed_losses(out)[10:]
    )


@pytest.mark.slow
def test_pretrain(run: Any, corpus: Path, tmp_path: Path) -> None:
    out = run(
        "pretrain.py", "--data", corpus.parent, "--steps", 2, *SIZES, "--out", tmp_path / "run"
    )
    assert "eval loss" in out and "E4M3/E5M2 Float8CurrentScaling" in out


def test_many_gpus(run: Any, corpus: Path, tmp_path: Path) -> None:
    out = run(
        "many_gpus.py",
        "--data",
        corpus,
        "--steps",
        2,
        *SIZES,
        "--out",
        tmp_path / "run",
        "--device",
        "cpu",
    )
    assert "processes: one" in out and len(printed_losses(out)) == 2


@pytest.mark.slow
def test_many_gpus_on_two_processes(run: Any, corpus: Path, tmp_path: Path) -> None:
    args = ["--data", corpus, "--steps", 3, *SIZES, "--device", "cpu", "--recipe", "bf16", "--out"]
    one = printed_losses(run("many_gpus.py", *args, tmp_path / "one"))
    program = Path(__file__).parent.parent / "examples/many_gpus.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        program,
        *args,
    ]
    done = run_process([*map(str, command), str(tmp_path / "two")])
    assert "processes: 2, fsdp (batches in 2)" in done.stdout
    assert printed_losses(done.stdout) == pytest.approx(one, rel=0.01)


@pytest.mark.slow
def test_chat_data(run: Any, model: Path, tmp_path: Path) -> None:
    out = run("chat_data.py", "--steps", 2, "--out", tmp_path / "run")
    assert (
        "messages (OpenAI) in JSONL" in out and "a plain one is used" in out and "eval loss" in out
    )
    chat = shutil.copytree(model, tmp_path / "chat")
    (chat / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    again = run("chat_data.py", "--model", chat, "--data", tmp_path / "run/colours.jsonl", "--steps", 1, "--seq-len",
                128, "--out", tmp_path / "other")  # fmt: skip
    assert "answers found by rendering the turns before each" in again
    (tmp_path / "more.csv").write_text(
        "prompt,completion\n" + "".join(f"{n}?,{n}.\n" for n in range(40))
    )
    pairs = run(
        "chat_data.py", "--data", tmp_path / "more.csv", "--steps", 1, "--out", tmp_path / "pairs"
    )
    assert "prompt/completion in CSV" in pairs and "after:" in pairs


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_own_modules(run: Any, recipe: str) -> None:
    out = run("own_modules.py", "--recipe", recipe, "--steps", 2)
    assert (
        "step 2  loss" in out and f"{32 if recipe == 'delayed' else 0} tensors of FP8 state" in out
    )


def test_own_modules_in_bf16(run: Any) -> None:
    """Transformer Engine's own default, which an enabled autocast takes for None, is MXFP8 on the emulated engine."""
    shown = {}
    for recipe in ("bf16", "mxfp8"):
        torch.manual_seed(0)
        shown[recipe] = run("own_modules.py", "--recipe", recipe, "--steps", 3)
    assert shown["bf16"] != shown["mxfp8"]


def test_every_example_is_tested_and_short() -> None:
    assert {f"test_{name.removesuffix('.py')}" for name in EXAMPLES} <= set(globals())
    for name in EXAMPLES:
        lines = (Path(__file__).parent.parent / "examples" / name).read_text().splitlines()
        assert len(lines) <= 90, name
