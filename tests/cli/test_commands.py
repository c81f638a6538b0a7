"""The command line: what it prints, that mistakes end in one line and exit code 2, that help is fast."""

import contextlib
import functools
import json
import os
import re
import shlex
import signal
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from fewer import every
from ranks import run_process

import te_models.training.finetune
from te_models import CausalLM, list_presets, list_recipes
from te_models.cli import main
from te_models.cli.commands import cli
from te_models.cli.options import console, setting_option
from te_models.config.model import ModelConfig
from te_models.config.presets import PRESETS, get_preset
from te_models.config.toml import read_toml
from te_models.errors import UsageError
from te_models.saving.folder import save_folder

ROOT = Path(__file__).parents[2]
TINY = [
    "--hidden-size",
    "64",
    "--intermediate-size",
    "96",
    "--num-hidden-layers",
    "4",
    "--num-attention-heads",
    "2",
]
TINY += ["--num-key-value-heads", "1", "--device", "cpu"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"{number} green bottles, hanging on the wall. " * 12)
    return folder


def finetune(out: Path, corpus: Path, *more: str) -> list[str]:
    fixed = ["--steps", "3", "--seq-len", "32", "--batch-size", "2", "--sample-tokens", "8"]
    return [
        "pretrain",
        "--preset",
        "gated-nano",
        *TINY,
        "--data",
        str(corpus),
        "--out",
        str(out),
        *fixed,
        *more,
    ]


def test_the_list_of_commands_is_not_cut(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    assert "..." not in capsys.readouterr().out.replace("[ARGS]...", "")


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_help_is_short_and_help_all_is_grouped_and_complete(
    command: str, capsys: pytest.CaptureFixture
) -> None:
    found = cli.commands[command]
    groups = {
        getattr(p, "group", "Options") for p in found.params if not getattr(p, "hidden", False)
    }
    assert all(p.help for p in found.params if isinstance(p, click.Option))
    assert main([command, "--help"]) == 0
    short = capsys.readouterr().out
    assert short.startswith("Usage: te-models") and 4 < len(short.splitlines()) <= 48
    if groups <= {"Options"}:
        assert "--help-all" not in short
        return
    assert main([command, "--help-all"]) == 0
    whole = capsys.readouterr().out
    for parameter in found.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            place = re.compile(rf"^  {re.escape(parameter.opts[0])}\b", re.MULTILINE)
            assert place.search(whole), parameter.name
            everyday = getattr(parameter, "group", "Options") == "Options"
            assert bool(place.search(short)) == everyday, parameter.name
    for title in groups - {"Options"}:
        assert f"\n{title}:\n" in whole and f"{title} (" in " ".join(short.split())


@pytest.mark.parametrize(
    ("flag", "shown"),
    [
        ("--steps", "[default: 300; x>=1]"),
        ("--learning-rate", "[default: 2e-5, with --lora 2e-4; x>=0]"),
        ("--eval-split", "[0<=x<1]"),
        ("--lora-dropout", "[default: 0.0; 0<=x<1]"),
        ("--lora-alpha", "[x>0]"),
        ("--data-workers", "[default: 2; x>=0]"),
    ],
)
def test_help_shows_defaults_and_ranges(
    flag: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["finetune", "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert text[text.index(f"{flag} ") :].partition("]")[0].rpartition("[")[2] == shown[1:-1]


def test_the_surface_is_what_the_documents_promise(capsys: pytest.CaptureFixture) -> None:
    names = "list data plan verify pretrain finetune generate chat serve evaluate bench convert"
    names += " export parity capture replay report doctor"
    assert set(cli.commands) == set(names.split())
    main(["finetune", "--help-all"])
    text = capsys.readouterr().out
    promised = "--model --recipe --engine --data --steps --batch-size --seq-len --seed --out --resume --optimizer"
    promised += " --activation-checkpointing --amax-history-len --num-hidden-layers --num-layers-at-start-in-bf16"
    for flag in promised.split():
        assert flag in text, flag
    first = [
        "  --data",
        "  --steps",
        "  --recipe",
        "  --lora RANK",
        "\nOptimizer:",
        "\nRecipe fields:",
    ]
    assert first == sorted(first, key=text.index), "it begins with the everyday options"


def test_a_second_interrupt_ends_the_program_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """It would show where the libraries' last calls were interrupted. A caller in Python keeps its handler."""

    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    codes: list[int] = []
    monkeypatch.setattr(type(cli), "main", interrupted)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "argv", ["te-models", "list"])
    assert main(["list"]) == 130 and signal.getsignal(signal.SIGINT) is before
    try:
        assert main() == 130
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert codes == [130] and capsys.readouterr().err == "te-models: stopped\n" * 2


@pytest.mark.parametrize("error", [AttributeError("no attribute 'matrix'"), ValueError("half")])
def test_an_interrupt_that_an_import_swallowed_stops_the_program(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def half_imported(*arguments: Any, **options: Any) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise error

    monkeypatch.setattr(type(cli), "main", half_imported)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert main(["list"]) == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capsys.readouterr().err == "te-models: stopped\n"


@pytest.mark.parametrize(
    "rank, said", [(None, "te-models: note: a b\n"), ("0", "te-models: note: a b\n"), ("1", "")]
)
def test_warnings_are_one_line_each_once(
    rank: str | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Those of torch.compile about its own work and of Python about sources are none.

    Of several processes the first one shows them.
    """
    if rank is not None:
        monkeypatch.setenv("RANK", rank)

    def warn() -> None:
        for text in ("a\n  b", "a\n  b", "\nDynamo detected a call to something"):
            warnings.warn(text, stacklevel=2)
        warnings.warn("invalid escape sequence '\\.'", SyntaxWarning, stacklevel=2)

    monkeypatch.setitem(cli.commands, "warn", click.Command("warn", callback=warn))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["warn"]) == 0
    assert capsys.readouterr().err == said


def test_list_names_every_preset_and_recipe(capsys: pytest.CaptureFixture) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in [*list_presets(), *list_recipes()]) and "1.24 B" in out
    shipped = CausalLM.from_pretrained("gated-nano", device="cpu")
    assert (
        f"{shipped.num_parameters() / 1e6:.1f} M" in out.split("models that ship with te-models")[1]
    )


def test_list_cuts_nothing_on_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("te_models.cli.list.console", functools.partial(console, 80))
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.split()[:1] == [name] for line in lines) for name in list_presets())
    assert not any("…" in line or len(line) > 80 for line in lines)


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_no_name_of_a_linear_is_cut_on_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("te_models.cli.options.console", functools.partial(console, 80))
    assert main([command, "--preset", "gated-nano", "--recipe", "current"]) == 0
    out = capsys.readouterr().out
    assert all(
        f"{name} " in out
        for name in ("self_attn.qkvg_proj", "mlp.gate_up_proj", "mlp.down_proj", "lm_head")
    )
    assert "…" not in out and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("command", "source"),
    every(2, [["plan", "--memory", "--batch-size", "2"], ["verify"]], ["--preset", "--model"]),
)
def test_rows_are_no_longer_than_the_model_reads(
    command: list[str],
    source: str,
    any_batch: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """Nobody asked for the 256 tokens of the default; a length that was given is an error as before."""
    given = ["gated-nano", "--max-position-embeddings", "64"]
    if source == "--model":
        CausalLM.from_preset(
            "gated-nano", recipe="bf16", max_position_embeddings=64
        ).save_pretrained(tmp_path)
        given = [str(tmp_path), "--recipe", "current"]
    command = [*command, source, *given, "--device", "cpu", "--json"]
    assert main(command) == 0
    assert main([*command, "--seq-len", "65"]) == 2
    assert "max_position_embeddings=64" in capsys.readouterr().err


@pytest.mark.parametrize("preset", every(7, list_presets()[::3]))
def test_plan_shows_any_preset_at_once(preset: str, capsys: pytest.CaptureFixture) -> None:
    start = time.process_time()
    assert (
        main(
            ["plan", "--preset", preset, "--recipe", "delayed", "--num-layers-at-end-in-bf16", "2"]
        )
        == 0
    )
    assert time.process_time() - start < 5, "the plan of a model needs no memory for it"
    out = capsys.readouterr().out
    assert "E4M3/E5M2 DelayedScaling" in out and "num_layers_at_end_in_bf16 = 2" in out


def test_plan_as_json_has_the_rows_of_the_table_and_of_the_step(
    capsys: pytest.CaptureFixture,
) -> None:
    assert (
        main(["plan", "--preset", "gated-nano", "--recipe", "current", "--device", "cpu", "--json"])
        == 0
    )
    *linears, compiled, graph, speed = json.loads(capsys.readouterr().out)
    assert len(linears) == 6 * 4 + 1
    assert {row["precision"] for row in linears} == {"BF16", "E4M3/E5M2 Float8CurrentScaling"}
    assert (
        compiled["module"] == "compiled"
        and compiled["reason"] == "off, because the model is on cpu"
    )
    assert graph["module"] == "CUDA graph" and graph["reason"] == "off, because the model is on cpu"
    assert speed["module"] == "FP8 speed"
    assert compiled.keys() == graph.keys() == speed.keys() == linears[0].keys()
    assert main(["plan", "--preset", "gated-nano", "--recipe", "current", "--device", "cpu"]) == 0
    assert f"CUDA graph: {graph['reason']}" in capsys.readouterr().out


@pytest.mark.drawn
def test_finetune_resume_and_generate(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "run"
    command = finetune(out, corpus, "--recipe", "delayed", "--amax-history-len", "4")
    assert main(command) == 0
    printed = capsys.readouterr().out
    for part in (
        "parameters", "engine", "emulated", "8 in E4M3/E5M2, 9 in BF16", "tokens per step", "eval loss before",
        "sample",
    ):  # fmt: skip
        assert part in printed, part
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    run_file = read_toml(out / "run.toml")
    assert run_file["model"]["engine"] == "auto" and run_file["record"]["engine"] == "emulated"
    newest = out / "checkpoints" / "step-00000003"
    assert json.loads((newest / "recipe.json").read_text())["amax_history_len"] == 4
    assert main([*command, "--steps", "5", "--resume"]) == 0
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 5
    capsys.readouterr()
    for model in (out, newest):
        options = ["--prompt", "7 green", "--max-new-tokens", "8", "--device", "cpu"]
        assert main(["generate", "--model", str(model), *options]) == 0
        assert capsys.readouterr().out.startswith("7 green")


def test_equal_seeds_give_equal_weights_and_losses(corpus: Path, tmp_path: Path) -> None:
    """The weights are those of the start: the learning rate is 0."""
    losses, weights = [], []
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        short = [
            "--steps",
            "1",
            "--sample-tokens",
            "0",
            "--eval-batches",
            "1",
            "--learning-rate",
            "0",
        ]
        assert (
            main(finetune(tmp_path / name, corpus, "--recipe", "current", "--seed", seed, *short))
            == 0
        )
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
        weights.append(CausalLM.from_pretrained(tmp_path / name, device="cpu").embed_tokens.weight)
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


MISTAKES = [
    ("pretrain --preset gated-nan", "did you mean 'gated-nano'"),
    (
        "pretrain --fp8-interval 1",
        "'--fp8-interval': leave it out: scales are updated in every step",
    ),
    ("pretrain --model gated-nano", "pretrain starts from random weights"),
    (
        "pretrain --activation-offload 2",
        "unexpected 2: the one argument is RUN.TOML, a file of settings",
    ),
    ("pretrain --preset gated-nano --amax-histroy-len 1", "--amax-history-len"),
    ("pretrain --preset gated-nano --engine nativ", "did you mean 'native'"),
    (
        "pretrain --preset gated-nano --engine native --device cpu",
        "engine='native' is not possible here",
    ),
    ("pretrain --preset gated-nano --data /does/not/exist", "/does/not/exist"),
    (
        "pretrain --preset gated-nano --data hf://datasets/nobody/nothing/*.jsonl",
        "hf://datasets/nobody",
    ),
    ("pretrain --preset gated-nano --data ''", "the path of the data is empty"),
    ("pretrain --preset gated-nano --device cuda:77", "device 'cuda:77' is not available"),
    ("pretrain --preset gated-nano --vocab-size 64", "--vocab-size 259 or more"),
    ("pretrain --preset gated-nano --seq-len 4096", "max_position_embeddings=1024"),
    ("pretrain --preset gated-nano --optimizer adam", "did you mean 'adamw'"),
    ("pretrain --preset gated-nano --warmup-steps 1.5", "warmup_steps=1.5 is neither"),
    ("pretrain --preset gated-nano --resume", "nothing to resume"),
    ("finetune", "give --model: a folder"),
    (
        "finetune --preset llama-3.1-8b",
        "`te-models pretrain --preset llama-3.1-8b` trains it from random",
    ),
    ("finetune --preset llama-3.1-8", "did you mean 'llama-3.1-8b'"),
    ("finetune --model llama-3.1-8b", "a preset, a shape without weights"),
    ("finetune --model .", "has no config.json: it holds no model"),
    (
        "finetune --model nosuch",
        "nosuch: no such folder, and no model that ships with te-models (gated-nano)",
    ),
    (
        "chat --model nosuch",
        "nosuch: no such folder, and no model that ships with te-models (gated-nano)",
    ),
    (
        "chat --model gated-nano --template-option thinking",
        "has no value or no name: write NAME=VALUE",
    ),
    ("chat --model gated-nano", "no chat template"),
    ("finetune text", "text is a folder: a model is given as --model text"),
    (
        "finetune --model text --out text",
        "is the folder of the model, whose place the run would take",
    ),
    ("pretrain --preset gated-nano --out file", "file is not a folder"),
    ("pretrain --preset gated-nano --out file/run", "file is not a folder"),
    ("pretrain --preset gated-nano --data file/below", "file/below"),
    ("pretrain --preset gated-nano --tokenizer file", "file"),
    ("generate --model gated-nano --tokenizer file --prompt x", "file is not strict JSON"),
    ("generate --preset gated-nano --prompt x --device gpu", "device 'gpu' is not supported"),
    ("generate --preset gated-nano --prompt x --device meta", "--device meta has no numbers"),
    ("generate --preset gated-nano --prompt ''", "the prompt is empty"),
    # Before the model is looked for.
    ("generate --model nosuch --prompt x --greedy --seed 3", "seed=3 draws nothing"),
    ("generate --model nosuch --prompt x --temperature 0 --seed 3", "seed=3 draws nothing"),
    ("generate --model nosuch --prompt x --temperature 0 --top-k 3", "top_k=3 does not change"),
    ("chat --model nosuch --greedy --top-p 0.9", "top_p=0.9 does not change"),
    ("generate --num-samples 2", "unknown option '--num-samples': --help-all lists all"),
    ("evaluate --model gated-nano", "give --data PATH, --tasks NAMES, or both"),
    ("evaluate --model gated-nano --data a --data b", "give --data once, not 2 times"),
    ("evaluate --model gated-nano --data a --recipe bf16 --recipes current", "not both"),
    ("evaluate --model gated-nano --data a --recipes bf16,curent", "did you mean 'current'"),
    ("evaluate --model gated-nano --data missing", "missing"),
    ("export --preset gated-nano", "give --out DIR, such as --out exported: folder to write"),
    ("convert --model gated-nano", "give --out DIR, such as --out exported: folder to write"),
    ("convert --model text --out text", "--out text is the folder of --model: give another one"),
    ("finetune --model gated-nano --epochs 0", "--epochs 0 trains nothing"),
    ("parity --model gated-nano", "give --data PATH, such as --data notes.txt: text or records"),
    ("bench", "give --preset NAME, such as --preset gated-nano"),
    ("bench --model gated-nano", "unknown option '--model': did you mean '--preset'?"),
    ("bench --preset gated-nano --steps 0", "steps=0 is out of range: give 1 or more"),
    ("bench --preset gated-nano --seq-len 0", "seq_len=0 is out of range: give 1 or more"),
    ("bench --preset gated-nano --warm-up -1", "warm_up=-1 is out of range: give 0 or more"),
    ("bench --preset gated-nano --device xpu", "device 'xpu' is not supported"),
    ("bench --preset gated-nano --out /dev/null", "--out /dev/null: /dev/null is not a folder"),
    ("bench --preset gated-nano --recipe bf16", "did you mean '--recipes'"),
    ("bench --preset gated-nano --recipes bf16,delayd", "did you mean 'delayed'"),
    ("bench --preset gated-nano --recipes delayed+fussed", "did you mean 'fused'"),
    ("bench --preset gated-nano --peers tourch", "did you mean 'torch'"),
    ("bench --preset gated-nano --peers torchao --device cpu", "needs a CUDA device"),
    ("bench --preset gated-nano --peers torch --sliding-window 8", "no sliding_window"),
    ("verify --preset gated-nano --seq-len 0", "seq_len=0 is out of range: give 1 or more"),
    ("verify --preset gated-nano --batch-size -1", "batch_size=-1 is out of range: give 1 or more"),
    (
        "evaluate --model gated-nano --data text --batch-size 0",
        "batch_size=0 is out of range: give 1 or more",
    ),
    (
        "evaluate --model gated-nano --data text --max-batches -1",
        "max_batches=-1 is out of range: give 0 or more",
    ),
    (
        "evaluate --model gated-nano --data text --seq-len 0",
        "seq_len=0 is out of range: give 2 or more",
    ),
    (
        "parity --model gated-nano --data text --batches 0",
        "batches=0 is out of range: give 1 or more",
    ),
    (
        "export --model gated-nano --format nvfp4 --data text --batches 0 --out served",
        "batches=0 is out of range: give 1 or more",
    ),
    ("plane", "plan"),
    ("plan gated-nano", "give it to an option, such as --preset NAME or --model DIR"),
    ("plan --presett gated-nano", "did you mean '--preset'?"),
    (f"plan --preset gated-nano --intermediate-size {2**62}", "parameters: choose smaller ones"),
    ("plan --preset gated-nano --lora 16", "--lora changes no precision: add --memory"),
    ("plan --preset gated-nano --batch-size 4", "--batch-size changes no precision: add --memory"),
    ("plan --preset gated-nano --memory --optimizer adamv", "did you mean 'adamw'"),
    (
        "plan --preset gated-nano --memory --fp8-params --recipe bf16",
        "fp8_params=True needs an FP8 recipe",
    ),
    (
        "export --preset gated-nano --out e --batches 2",
        "--batches is about --data: add --data PATH",
    ),
    ("export --preset gated-nano --out e --seq-len 16", "--seq-len is about --data: add --data"),
    ("export --preset gated-nano --out e --truncate prompt", "--truncate is about --data: add"),
    ("export --preset gated-nano --out e --columns prompt=text", "--columns is about --data: add"),
    (
        "export --preset gated-nano --out e --format fp8-channel --data text",
        "fp8-channel stores none: leave it out, or choose fp8-tensor or nvfp4",
    ),
    (
        "export --model gated-nano --out e --format stored --rounding stochastic",
        "--rounding has no part in --format stored, which copies a base unchanged: leave it out",
    ),
    (
        "serve --preset gated-nano --backend own --format fp8-block",
        "--format fp8-block is for vLLM, and the model itself answers here: leave it out",
    ),
    ("evaluate --preset gated-nano --data text --limit 1", "--limit is about --tasks: add"),
    ("evaluate --preset gated-nano --data text --few-shot 1", "--few-shot is about --tasks: add"),
    ("evaluate --preset gated-nano --tasks arc_easy --seq-len 8", "--seq-len is about --data: add"),
    (
        "evaluate --preset gated-nano --tasks arc_easy --max-batches 1",
        "--max-batches is about --data: add",
    ),
    (
        "evaluate --preset gated-nano --tasks arc_easy --columns prompt=text",
        "--columns is about --data: add",
    ),
    (
        "evaluate --preset gated-nano --tasks arc_easy --truncate prompt",
        "--truncate is about --data: add",
    ),
    (
        "evaluate --preset gated-nano --tasks arc_easy --chat-template chatml",
        "--chat-template is about --data: add",
    ),
    (
        "evaluate --preset gated-nano --tasks arc_easy --on-bad-record skip",
        "--on-bad-record is about --data: add",
    ),
    ("export --preset gated-nano --out e --tokenizer file", "--tokenizer is about --data: add"),
    (
        "export --model gated-nano --out e --format stored --tokenizer file",
        "--tokenizer has no part in --format stored",
    ),
    (
        "export --model gated-nano --out e --format stored --overwrite",
        "--overwrite has no part in --format stored",
    ),
    (
        "export --model gated-nano --out e --format nvfp4 --data text --columns prompt=x",
        "the first records of text have no 'x'",
    ),
    (
        "parity --model gated-nano --data text --export text --rounding stochastic",
        "--rounding is about exports that parity writes",
    ),
    (
        "parity --model gated-nano --data text --export text --base none",
        "--base is about exports that parity writes",
    ),
    (
        "parity --model gated-nano --data python-docs --columns prompt=x",
        "the first records of Python's own documentation have no 'x'",
    ),
    (
        "evaluate --model gated-nano --data text --columns prompt=x",
        "the first records of text have no 'x'",
    ),
    (
        "data preview --data python-docs --columns prompt=x",
        "the first records of Python's own documentation have no 'x'",
    ),
    (
        "pretrain --preset gated-nano --data python-docs --columns prompt=x",
        "the first records of Python's own documentation have no 'x'",
    ),
    ("bench --preset gated-nano --base-weights stored", "--base-weights is for --model: a preset"),
    (
        "bench --preset gated-nano --recipes bf16 --margin 3",
        "margin is for none of the recipes that are timed (bf16): leave it out",
    ),
    (
        "bench --preset gated-nano --recipes none --peers torch --fp8-params",
        "fp8_params is for none of the recipes that are timed (none): leave it out",
    ),
    (
        "plan --preset gated-nano --gpu H100 --engine native",
        "--engine native runs on the GPU that is here, and --gpu plans for another",
    ),
    (
        "pretrain --preset gated-nano --base-weights dequantized",
        "--base-weights is for a model that has weights: use finetune --model",
    ),
    (
        "pretrain --preset gated-nano --decay-steps 9",
        "--decay-steps is for --schedule warmup-stable-decay, not cosine",
    ),
    (
        "pretrain --preset gated-nano --schedule constant --final-learning-rate 0",
        "--final-learning-rate has no part in --schedule constant",
    ),
    ("pretrain --preset gated-nano --spike-window 50", "--spike-window is about spikes"),
    (
        "pretrain --preset gated-nano --eval-split 0 --eval-every 5",
        "--eval-every is about evaluation, which --eval-split 0 turns off",
    ),
    (
        "pretrain --preset gated-nano --eval-split 0 --sample-tokens 9",
        "--sample-tokens 9 samples from prompts of the evaluation data, which --eval-split 0 turns off",
    ),
    # Before the summary, which the Trainer would come after.
    ("pretrain --preset gated-nano --balance-loss 0.1", "balance_loss and z_loss are for experts"),
    ("finetune --model gated-nano --z-loss 0.1", "balance_loss and z_loss are for experts"),
    (
        "pretrain --preset gated-nano --recipe current --fp8-params --on-nan demote",
        "on_nan='demote' moves a layer to BF16, and with fp8_params=True there are no BF16 weights",
    ),
    (
        "pretrain --preset gated-nano --optimizer galore --optimizer-options in_backward=true "
        "--optimizer-offload",
        "in_backward=true projects on the GPU: leave it out, or optimizer_offload",
    ),
    # A resumed run cannot follow the first half of the advice.
    (
        "plan --preset gated-nano --memory --gpus 3",
        "cannot be shared by gpus=3: give a multiple of 3, or another number of gpus (a resumed run keeps",
    ),
    ("plan --preset gated-nano --memory --gpus 0", "gpus=0 is out of range: give 1 or more"),
    (
        "plan --preset gated-nano --memory --batch-size 0",
        "batch_size=0 is out of range: give 1 or more",
    ),
    ("plan --preset gated-nano --memory --seq-len 9999", "max_position_embeddings"),
    (
        "plan --preset gated-nano --memory --activation-checkpointing some",
        "activation_checkpointing",
    ),
    ("plan --preset gated-nano --memory --lora -1", "lora_rank=-1: a rank is 1 or more"),
    (
        "plan --preset gated-nano --memory --lora 4 --lora-experts",
        "has no experts to adapt: leave out lora_experts",
    ),
]


def takes_model(command: click.Command) -> bool:
    """Return whether a command has --model."""
    return any(parameter.name == "model" for parameter in command.params)


@pytest.mark.parametrize("command, message", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    command: str,
    message: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)
    if arguments[0] in ("pretrain", "finetune"):
        for name, value in {"--out": "run", "--data": corpus.name}.items():
            arguments += [name, value] if name not in arguments else []
    Path("file").write_text("no folder")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert (
        message in captured.err
        and captured.err.count("\n") == 1
        and captured.err.startswith("te-models: ")
    )
    assert (
        not captured.out and "Errno" not in captured.err and Path("file").read_text() == "no folder"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"file", "text"}, "nothing is left behind"


# pretrain has --model to say that it takes none.
WITH_A_MODEL = [
    name for name, found in cli.commands.items() if takes_model(found) and name != "pretrain"
]


@pytest.mark.parametrize("file", ["notes.txt", "weights.safetensors", "model/config.json"])
@pytest.mark.parametrize("command", [*WITH_A_MODEL, "data preview"])
def test_a_file_in_place_of_a_model_is_named_with_what_to_give(
    command: str,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    for name in ("notes.txt", "weights.safetensors", "model/config.json"):
        Path(name).write_bytes(b"\x00hello\xff")
    required = {"export": ["--format", "bf16"], "generate": ["--prompt", "x"]}
    data = ["--data", "notes.txt"] if command in ("data preview", "evaluate", "parity") else []
    out = ["--out", "out"] if command in ("export", "convert", "finetune") else []
    arguments = [*command.split(), "--model", file, *data, *out, *required.get(command, [])]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    folder = "the folder that it lies in, model" if file.startswith("model") else "folder with"
    assert error.startswith(f"te-models: {file} is a file, and a model is a folder: give ")
    assert folder in error and error.count("\n") == 1
    assert not Path("out").exists()
    # The same in Python, where no option is read.
    with pytest.raises(UsageError, match=f"{file} is a file, and a model is a folder"):
        CausalLM.from_pretrained(file)


@pytest.mark.parametrize("command", [*sorted(cli.commands), "data preview"])
def test_an_option_that_is_missing_is_asked_for_by_an_example(
    command: str, capsys: pytest.CaptureFixture
) -> None:
    group, _, name = command.partition(" ")
    found = cli.commands[group]
    if isinstance(found, click.Group):
        found = found.commands[name or "preview"]
    required = [p for p in found.params if isinstance(p, click.Option) and p.required]
    arguments = ["x" for p in found.params if isinstance(p, click.Argument) and p.required]
    for missing in required:
        given = []
        for other in required:
            given += [] if other is missing else [other.opts[0], "1"]
        assert main([*command.split(), *arguments, *given]) == 2
        error = capsys.readouterr().err
        flag = missing.opts[0]
        assert f"give {flag} {missing.metavar}, such as {flag} " in error and error.count("\n") == 1


def out_of_memory(kind: str) -> BaseException:
    size = "Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.8 GiB\nmore"
    return {
        "cuda": torch.OutOfMemoryError(f"CUDA out of memory. {size}"),
        "cpu": RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 9 bytes"
        ),
        "python": MemoryError(),
    }[kind]


@pytest.mark.parametrize("kind", ["cuda", "cpu", "python"])
def test_out_of_memory_is_one_line_with_what_helps(
    kind: str,
    corpus: Path,
    any_batch: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise out_of_memory(kind)

    monkeypatch.setattr("te_models.training.trainer.Trainer.run", full)
    assert (
        main(finetune(tmp_path / "run", corpus, "--recipe", "delayed", "--no-activation-offload"))
        == 1
    )
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        error.startswith("te-models: out of memory (")
        and "--activation-checkpointing full" in error
    )
    command = error.split("`")[1]
    assert (
        "--batch-size 2 --seq-len 32" in command
        and "--recipe delayed" in command
        and "--steps" not in command
    )
    if kind == "cuda":
        assert main(shlex.split(command)[1:]) == 0, "the command that it names works"
    monkeypatch.setattr("te_models.causal_lm.CausalLM.from_preset", full)
    assert main(["generate", "--preset", "gated-nano", "--prompt", "x"]) == 1
    assert "use a smaller model" in capsys.readouterr().err


def test_another_error_is_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr("te_models.causal_lm.CausalLM.from_preset", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["generate", "--preset", "gated-nano", "--prompt", "x"])


def test_names_with_markup_are_printed_as_they_are(
    corpus: Path, any_batch: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data, out = tmp_path / "[train] :smile:", tmp_path / "r/[x]y[/b]"
    corpus.rename(data)
    recipe = tmp_path / "[red]mine.toml"
    recipe.write_text('scheme = "DelayedScaling"\namax_history_len = 4\n')
    assert (
        main(
            finetune(
                out, data, "--recipe", str(recipe), "--eval-batches", "1", "--sample-tokens", "0"
            )
        )
        == 0
    )
    printed = "".join(capsys.readouterr().out.split())
    for part in (
        data.name,
        str(out / "loss.png"),
        str(out / "checkpoints/step-00000003"),
        "[red]mine",
    ):
        assert "".join(part.split()) in printed, part
    for more in ([], ["--memory"]):
        assert main(["plan", "--preset", "gated-nano", "--recipe", str(recipe), *more]) == 0
        assert "[red]mine" in capsys.readouterr().out
    assert main(["pretrain", "--preset", "[/x]"]) == 2
    assert "[/x]" in capsys.readouterr().err


def test_a_run_is_not_overwritten_nor_a_damaged_checkpoint_read(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "run"
    assert main(finetune(out, corpus)) == 0
    assert main(finetune(out, corpus)) == 2
    assert (
        "already holds a run of 3 steps: add --resume or give another --out"
        in capsys.readouterr().err
    )
    assert main(["finetune", str(out)]) == 2
    again = f"{out} is a folder: {out}/run.toml runs it once more, and --resume {out} continues"
    assert again in capsys.readouterr().err
    weights = next(out.glob("checkpoints/*/model.safetensors"))
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert main(["generate", "--model", str(out), "--prompt", "x", "--device", "cpu"]) == 2
    assert "model.safetensors" in capsys.readouterr().err


HELP = """
import sys, time
import te_models
from te_models.cli import main
main(["--help"])
print(sorted({"torch", "transformer_engine", "transformers", "matplotlib", "numpy"} & set(sys.modules)))
te_models.CausalLM
print(sorted({"transformer_engine", "transformers", "matplotlib", "torch._dynamo"} & set(sys.modules)))
import torch
x = torch.ones(10**6)

def spun():
    x + 1
    begun = time.process_time()
    time.sleep(0.01)
    return time.process_time() - begun

print(sorted(spun() for _ in range(30))[15])
"""


@pytest.fixture(scope="module")
def of_help() -> list[str]:
    """Return a process's lines: packages that --help imports, that CausalLM adds, and seconds of an idle thread."""
    chosen = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in chosen}
    out = run_process([sys.executable, "-c", HELP], env=env | {"OMP_NUM_THREADS": "2"})
    return out.stdout.splitlines()[-3:]


def test_help_and_import_need_no_heavy_package(of_help: list[str]) -> None:
    assert of_help[:2] == ["[]", "[]"]


@pytest.mark.slow
def test_characters_that_the_locale_lacks_end_nothing(tmp_path: Path) -> None:
    """A pipe has the locale's encoding, on Windows one of 256 characters: in it others are escapes."""
    record = {"prompt": "caf\u00e9 ", "completion": "\U0001f44d"}
    (tmp_path / "r.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    run_toml = tmp_path / "run.toml"
    run_toml.write_text('# caf\u00e9\n[run]\nout = "caf\u00e9"\n', encoding="utf-8")
    code = (
        "import pathlib, sys, te_models; from te_models.training.run_file import rewrite_recipe; "
    )
    code += "rewrite_recipe(pathlib.Path('run.toml'), te_models.get_recipe('current')); "
    code += "from te_models.cli import main; sys.argv = ['te-models', 'data', 'preview', '--data', 'r.jsonl']; main()"
    plain = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii")
    out = run_process(
        [sys.executable, "-c", code],
        env={**os.environ, **plain, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    assert "caf\\xe9" in out.stdout and "\\U0001f44d" in out.stdout, out
    text = run_toml.read_text(encoding="utf-8")
    assert text.startswith("# caf\u00e9\n") and 'out = "caf\u00e9"' in text


@pytest.mark.skipif(
    sys.platform != "linux", reason="the OpenMP of other systems has no such variable"
)
def test_idle_threads_of_openmp_sleep_soon(of_help: list[str]) -> None:
    assert float(of_help[2]) < 1e-3  # seconds; libgomp's own is 4e-3


@pytest.mark.parametrize(
    "name, value, spins", [("OMP_WAIT_POLICY", "ACTIVE", None), ("GOMP_SPINCOUNT", "7", "7")]
)
def test_users_own_choice_for_openmp_stays(
    name: str, value: str, spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv(name, value)
    main(["--help"])
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_a_model_of_the_users_own_needs_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Only a shipped model is tuned on Python's documentation without being asked to."""
    monkeypatch.chdir(tmp_path)
    CausalLM.from_preset("gated-nano", num_hidden_layers=1, device="cpu").save_pretrained("m")
    short = ["--device", "cpu", "--steps", "1", "--seq-len", "256", "--batch-size", "1"]
    short += ["--eval-batches", "1", "--sample-tokens", "0"]
    Path("run.toml").write_text('[run]\nmodel = "m"\n')
    for command in (["--model", "m"], ["run.toml"]):
        assert main(["finetune", *command, *short]) == 2
        assert "te-models: give --data PATH, the records or texts" in capsys.readouterr().err
        assert not Path("runs").exists()
    begun = []

    def begin(settings: Any, resume: bool) -> Any:  # in place of a run
        begun.append(settings.model)
        return SimpleNamespace(signal=None)

    monkeypatch.setattr(te_models.training.finetune, "finetune", begin)
    assert main(["finetune", "--model", "m", "--data", "python-docstrings", *short]) == 0
    assert main(["finetune", "--model", "gated-nano", *short]) == 0
    assert begun == ["m", "gated-nano"]


def test_commands_take_the_data_that_every_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    data = [
        "--model",
        "gated-nano",
        "--device",
        "cpu",
        "--data",
        "python-docstrings",
        "--batches",
        "1",
    ]
    data += ["--seq-len", "640"]  # as long as the longest record
    assert main(["export", *data, "--format", "fp8-tensor", "--out", "e"]) == 0
    assert main(["parity", *data, "--export", "fp8-tensor"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["convert"], ["convert", "--format", "te"], ["export", "--format", "bf16"]]
)
def test_a_model_in_the_folder_to_write_is_replaced_only_when_asked(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    config = get_preset("gated-nano", num_hidden_layers=1, vocab_size=256)
    CausalLM(config, device="cpu").save_pretrained(model)
    command = [*words, "--model", str(model)]
    assert main([*command, "--out", str(out)]) == 0
    before = (out / "config.json").stat().st_mtime_ns
    assert main([*command, "--out", str(out)]) == 2
    line = f"te-models: {out} already holds a model: add --overwrite or give another --out\n"
    assert capsys.readouterr().err.endswith(line)
    assert (out / "config.json").stat().st_mtime_ns == before
    assert main([*command, "--out", str(out), "--overwrite"]) == 0
    assert (out / "config.json").stat().st_mtime_ns != before
    (out / "notes.txt").write_text("mine")
    assert main([*command, "--out", str(out), "--overwrite"]) != 0
    assert "notes.txt" in capsys.readouterr().err and (out / "notes.txt").exists()
    assert main([*command, "--out", str(model), "--overwrite"]) == 2
    assert "is the folder of --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["convert"], ["convert", "--format", "te"], ["export", "--format", "bf16", "--overwrite"]],
)
@pytest.mark.parametrize(
    "file, message",
    [("notes.txt", "notes.txt"), ("adapter_config.json", "out already holds adapters")],
)
def test_other_files_in_the_folder_to_write_are_named_before_the_model_is_read(
    words: list[str],
    file: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A large model takes minutes to read; and te-models replaces adapters that it has saved itself."""
    monkeypatch.chdir(tmp_path)
    if file == "notes.txt":
        Path("out").mkdir()
        Path("out", file).write_text("mine")
    else:
        save_folder("out", {}, {file: b"{}"})
    assert main([*words, "--model", "missing/model", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert Path("out", file).exists()


@pytest.mark.parametrize("content", ["a model", "adapters"])
@pytest.mark.parametrize(
    "words",
    [
        "doctor saved",
        "report saved",
        "replay saved --step 1",
        "capture saved --step 1",
        "verify --against saved",
        "plan --from-record saved",
        "verify --from-record saved",
        "pretrain --preset gated-nano --from-record saved",
    ],
)
def test_a_folder_that_holds_no_run_is_named_as_what_it_is(
    words: str,
    content: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No option could give it a record: a run is never started there."""
    monkeypatch.chdir(tmp_path)
    Path("saved").mkdir()
    file = "config.json" if content == "a model" else "adapter_config.json"
    Path("saved", file).write_text("{}")
    assert main(words.split()) == 2
    line = f"te-models: saved holds {content} and no run: give the folder of a run, its --out\n"
    assert capsys.readouterr().err == line


def test_the_release_beside_a_model_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["convert", "--model", "gated-nano", "--beside", "mine", "--out", "mine/"]
    assert main([*command, "--overwrite"]) == 2
    assert "--out mine/ is the folder of --beside" in capsys.readouterr().err


def test_a_recipe_is_not_dropped_where_the_format_has_no_place_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["convert", "--model", "gated-nano", "--recipe", "current", "--out", str(out)]
    assert main(command) == 2
    line = "te-models: --format hf has no place for a recipe: leave --recipe out, or give --format te\n"
    assert capsys.readouterr().err.endswith(line)
    assert not out.exists()


@pytest.mark.parametrize("words", ["-h", "list -h", "finetune -h", "chat -h"])
def test_h_is_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    assert capsys.readouterr().out.startswith("Usage: te-models")


@pytest.mark.parametrize("words", ["-V", "list --jsn"])
def test_an_unknown_option_is_told_those_there_are(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert re.search("did you mean '--.+'\\? choose one of --help, --", capsys.readouterr().err)


def test_the_list_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["presets"].keys() == PRESETS.keys() and "gated-nano" in found["models"]
    assert list(found["recipes"]) == list_recipes()
    for name, shape in found["presets"].items():
        count = shape.pop("num_parameters")
        assert ModelConfig.from_dict(shape).num_parameters == count, name


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("", None),
        ("--compile", "default"),
        ("--no-compile", False),
        ("--compile max-autotune", "max-autotune"),
        ("--compile=max-autotune", "max-autotune"),
        ("--compile --recipe bf16", "default"),
        ("--compile max-autotune --no-compile", False),
    ],
)
def test_compile_is_a_switch_or_a_mode(words: str, value: str | bool | None) -> None:
    @click.command()
    @setting_option("compile")
    @setting_option("recipe")
    def command(**given: object) -> None:
        click.echo(repr(given["compile"]))

    found = CliRunner().invoke(command, words.split())
    assert found.output.strip() == repr(value)


def test_a_run_in_a_mode_of_compile_says_so(tmp_path: Path) -> None:
    """It is in the file of the run, too, from which a resumed run takes it."""
    words = "pretrain --preset gated-nano --num-hidden-layers 3 --steps 1 --batch-size 1 --seq-len 32 --eval-every 0"
    words += f" --sample-tokens 0 --compile max-autotune --out {tmp_path / 'run'}"
    found = CliRunner().invoke(cli, words.split())
    assert found.exit_code == 0, found.output
    assert "compiled" in found.output
    assert 'compile = "max-autotune"' in (tmp_path / "run" / "run.toml").read_text()


@pytest.mark.skipif(os.name == "nt", reason="a shell of POSIX closes the streams")
def test_closed_streams_end_no_command() -> None:
    """Some schedulers of jobs start commands without standard streams, for which Python has None."""
    command = shlex.join([sys.executable, "-m", "te_models", "list"])
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert run_process(["sh", "-c", f"exec {command} >&-"], env=env).stderr == ""
    assert "gated-nano" in run_process(["sh", "-c", f"exec {command} <&- 2>&-"], env=env).stdout
