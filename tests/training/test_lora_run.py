"""Runs with LoRA: exact resume, files, merging, and what is refused."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer import every
from tiny_runs import SHORT, losses, tiny_model, tiny_trainer

pytest.importorskip("peft")

from te_models import CausalLM, TrainConfig, Trainer, add_lora, load_lora, load_tokenizer
from te_models.adapters.layers import LoraLinear
from te_models.cli import main
from te_models.cli.options import build_model
from te_models.config.toml import read_toml
from te_models.errors import CheckpointError, UsageError
from te_models.fp8.primary_weights import plain
from te_models.fp8.scaling_state import fp8_state
from te_models.model.recompute import may_draw
from te_models.planning.memory_plan import MemoryPlan
from te_models.saving.pretrained import adapter_folder, read_shape
from te_models.training.evaluation import evaluate
from te_models.training.launch import choose_parallel
from te_models.training.lora_run import LoraRun, load_adapted, load_merged, trained
from te_models.training.merging import merged_loss, save_adapters
from te_models.training.run_settings import run_settings
from te_models.training.settings import LoraSettings

EXPERTS = dict(
    moe=dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32), qk_norm=True
)
FP8_EXPERTS = EXPERTS | dict(fp8_params=True)
ALL: dict[str, Any] = {"targets": ("all-linear", "experts")}


def trainer(
    out: Path,
    recipe: str = "delayed",
    lora: dict[str, Any] | None = None,
    base: Path | None = None,
    **fields: Any,
) -> Trainer:
    names = ("fp8_params", "activation_checkpointing", *EXPERTS)
    options = {name: fields.pop(name) for name in names if name in fields}
    if base is None:
        model = tiny_model(recipe, **options)
    else:
        model = CausalLM.from_pretrained(base, recipe=recipe, device="cpu", **options)
    adapters = LoraRun(
        model, LoraSettings(**{"rank": 4, "alpha": 8.0, **(lora or {})}), base and str(base)
    )
    return tiny_trainer(
        model, out, adapters, **dict(steps=4, learning_rate=0.01, eval_every=2) | fields
    )


def save_at_the_end(run: Trainer) -> dict[str, str]:
    """Train, and write what the command writes at the end of a run with adapters."""
    result, adapters = run.run(), run.saved
    assert isinstance(adapters, LoraRun)
    content = adapters.content(resumable=False)
    return save_adapters(adapters, content, run.out, load_tokenizer(None), run.evaluation, result)


@pytest.mark.parametrize(
    "recipe, lora, fields",
    [
        pytest.param("delayed", {}, {}, marks=pytest.mark.slow),
        pytest.param(
            "delayed", {}, dict(fp8_params=True, gradient_accumulation=2), marks=pytest.mark.slow
        ),
        pytest.param(
            "delayed",
            {"dropout": 0.3},
            dict(activation_checkpointing="full"),
            marks=pytest.mark.slow,
        ),
        (
            "delayed",
            ALL,
            FP8_EXPERTS | dict(gradient_accumulation=2, activation_checkpointing="selective"),
        ),
        pytest.param(
            "current",
            {**ALL, "dropout": 0.3},
            FP8_EXPERTS | dict(activation_checkpointing="full"),
            marks=pytest.mark.slow,
        ),
        pytest.param("bf16", {"targets": ("experts.down_proj",)}, EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_same_bits(
    recipe: str, lora: Any, fields: dict[str, Any], tmp_path: Path
) -> None:
    fields = {**fields, "schedule": "constant"}
    whole = trainer(tmp_path / "whole", recipe, lora, **fields)
    frozen = {
        name: plain(p).clone() for name, p in whole.model.named_parameters() if not p.requires_grad
    }
    whole.run()
    state = {name: tensor.clone() for name, tensor in fp8_state(whole.model).items()}
    trainer(tmp_path / "parts", recipe, lora, **fields, steps=2).run()
    resumed = trainer(tmp_path / "parts", recipe, lora, **fields)
    for parameter in trained(resumed.model).values():
        torch.nn.init.ones_(parameter)  # the checkpoint's must win
    torch.manual_seed(99)
    resumed.run(resume=True)
    assert (
        losses(tmp_path / "parts") == losses(tmp_path / "whole")
        and len(set(losses(tmp_path / "parts"))) == 4
    )
    assert len(state) == (
        16 if recipe == "delayed" else 0
    )  # an expert's scales are those of its te.GroupedLinear
    again = fp8_state(resumed.model)
    assert state.keys() == again.keys() and all(
        torch.equal(state[name], again[name]) for name in state
    )
    for (name, one), other in zip(
        whole.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(plain(one), plain(other)), name
        assert one.requires_grad or torch.equal(plain(one), frozen[name]), name


def test_recompute_changes_no_number(tmp_path: Path) -> None:
    """The first block's input needs no gradient, its adapters do, those of experts too."""
    for mode in ("none", "selective", "full"):
        trainer(
            tmp_path / mode,
            "current",
            ALL,
            activation_checkpointing=mode,
            fp8_params=True,
            **EXPERTS,
        ).run()
    trainer(
        tmp_path / "frozen", "current", ALL, fp8_params=True, learning_rate=0.0, **EXPERTS
    ).run()
    assert losses(tmp_path / "none") == losses(tmp_path / "selective") == losses(tmp_path / "full")
    assert losses(tmp_path / "none") != losses(tmp_path / "frozen")


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj")])
def test_adapters_need_random_numbers_only_for_dropout(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    """Random state without a use would keep recomputed steps from being CUDA graphs."""
    for dropout in (0.0, 0.5):
        run = trainer(tmp_path, "current", {"targets": targets, "dropout": dropout})
        assert [may_draw(block) for block in run.model.layers] == [dropout > 0] * 3


def test_frozen_parts_of_adapters_are_resumed(tmp_path: Path) -> None:
    """From another seed; and a run that trains other parts than before is refused in one line."""

    def run(frozen: str, steps: int, seed: int) -> Trainer:
        model = tiny_model()
        torch.manual_seed(seed)
        adapted = add_lora(model, r=2)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.requires_grad_(frozen not in name)
        ids = torch.arange(32)[None]
        config = TrainConfig(steps=steps, seq_len=32, batch_size=1, learning_rate=0.1)
        batches = [dict(input_ids=ids, labels=ids)] * 4
        return Trainer(adapted, batches, eval_batches=None, config=config, out=tmp_path / "run")

    run("lora_A", 1, seed=1).run()
    resumed = run("lora_A", 2, seed=2)
    assert resumed.run(resume=True).step == 2
    model = tiny_model()
    torch.manual_seed(1)
    again = add_lora(model, r=2)
    for name, parameter in again.named_parameters():
        if "lora_A" in name:
            own = resumed.model.get_parameter(name.removeprefix("base_model.model."))
            assert torch.equal(parameter, own), name
    with pytest.raises(UsageError, match="trained then and not now, .* frozen then and not now"):
        run("lora_B", 3, seed=1).run(resume=True)


def test_a_checkpoint_of_other_adapters_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, "bf16", steps=1).run()
    for lora in ({"rank": 8}, {"targets": ("o_proj",)}):
        with pytest.raises(CheckpointError):
            trainer(tmp_path, "bf16", lora).run(resume=True)
    with pytest.warns(
        UserWarning, match="was trained under recipe 'bf16'; it goes on with 'current'"
    ):
        trainer(tmp_path, "current").run(resume=True)


@pytest.fixture
def start(texts: None) -> list[str]:
    """The flags of a run from a small saved model on a few texts, in an empty folder."""
    saved_base(Path())
    return [
        "finetune",
        "--model",
        "base",
        *SHORT,
        "--steps",
        "3",
        "--learning-rate",
        "0.05",
        "--lora",
        "4",
    ]


def test_a_run_that_was_killed_at_its_end_is_finished(
    start: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise MemoryError("not enough to merge")

    with monkeypatch.context() as patched:
        patched.setattr("te_models.training.merging.load_merged", fail)
        assert main([*start, "--merge", "--out", "run"]) == 1
    assert (Path("run/adapter").is_dir(), Path("run/merged").is_dir()) == (True, False)
    assert main(["finetune", "--resume", "run"]) == 0
    assert "run/merged" in capsys.readouterr().out and len(losses("run")) == 3
    assert {path.name for path in Path("run").iterdir()} > {"adapter", "merged", "loss.png"}
    assert main(["finetune", "--resume", "run"]) == 2
    assert "run has already reached step 3: give --steps of more than 3" in capsys.readouterr().err


def test_plan_plans_a_run_with_adapters_as_it_is(
    start: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def planned(*words: str) -> Any:
        assert main(["plan", "--memory", "--device", "cpu", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    # What is planned; the bytes take a second.
    monkeypatch.setattr(MemoryPlan, "to_dict", lambda plan: asdict(plan.training))
    more = "--gradient-accumulation 2 --optimizer adamw8bit --activation-checkpointing full"
    recipe = "--recipe current --fp8-params"
    assert main([*start, *more.split(), *recipe.split(), "--out", "run"]) == 0
    saved = read_toml(Path("run/run.toml"))["training"]
    size = ["--batch-size", str(saved["batch_size"]), "--seq-len", str(saved["seq_len"])]
    capsys.readouterr()
    written_out = ["--model", "base", "--lora", "4", *recipe.split(), *more.split(), *size]
    for folder in ("run", "run/adapter", "run/best"):
        assert planned("--model", folder) == planned(*written_out)
    # The user's own come first.
    other = ["--lora", "2", "--batch-size", "3", "--optimizer", "adamw"]
    assert planned("--model", "run", *other) == planned(*written_out, *other)
    # Adapters that peft saved name no run.
    Path("run/adapter").rename("alone")
    for file in Path("alone").iterdir():
        if not file.name.startswith("adapter_"):
            file.unlink()
    assert planned("--model", "alone") == planned("--model", "base", "--lora", "4")


def test_a_finished_run_can_be_merged(start: list[str], capsys: Any) -> None:
    assert main([*start, "--out", "run"]) == 0
    assert main(["finetune", "--resume", "run"]) == 2
    assert main(["finetune", "--resume", "run", "--merge"]) == 0
    assert Path("run/merged").is_dir() and len(losses("run")) == 3
    assert "eval loss merged" in capsys.readouterr().out
    assert main(["finetune", "--resume", "run", "--merge"]) == 2
    assert main(["finetune", "--resume", "run", "--merge", "--merge-dtype", "float32"]) == 0
    assert " in float32, " in capsys.readouterr().out
    assert read_toml(Path("run/run.toml"))["lora"]["merge_dtype"] == "float32"
    assert CausalLM.from_pretrained("run/merged", device="cpu").dtype == torch.float32


def test_dora_and_rslora_by_flag(start: list[str], capsys: Any) -> None:
    """Trained, resumed with the same bits, and read by load_lora."""
    options = ["--dora", "--rslora", "--lora-alpha", "3", "--schedule", "constant"]
    assert main([*start, *options, "--out", "whole"]) == 0
    config = json.loads(Path("whole/adapter/adapter_config.json").read_text())
    assert config["use_dora"] and config["use_rslora"] and config["lora_alpha"] == 3
    model = CausalLM.from_pretrained("base", device="cpu", recipe="bf16")
    adapted = load_lora(model, "whole/adapter")
    lengths = {n: p for n, p in adapted.named_parameters() if "lora_magnitude" in n}
    layer = adapted.get_base_model().layers[0].mlp.down_proj
    start_lengths = layer.base_layer.weight.float().norm(dim=1)
    trained = layer.lora_magnitude_vector["default"].weight
    assert lengths and not torch.equal(trained, start_lengths)
    torch.testing.assert_close(trained, start_lengths, rtol=0, atol=0.2)
    assert main([*start, *options, "--steps", "2", "--save-every", "2", "--out", "part"]) == 0
    assert main(["finetune", "--resume", "part", "--steps", "3"]) == 0
    found = load_lora(CausalLM.from_pretrained("base", device="cpu", recipe="bf16"), "part")
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, adapted.get_parameter(name)), name


@pytest.mark.parametrize(
    "choices", every(2, [["--recipe", "current", "--fp8-params"], ["--recipe", "bf16"]])
)
def test_from_the_command_line_to_a_merged_model(
    choices: list[str], start: list[str], capsys: Any
) -> None:
    assert main([*start, *choices, "--merge", "--out", "run"]) == 0
    said = capsys.readouterr().out
    assert "of them trained" in said and "run/adapter" in said and "run/merged" in said
    recorded = dict(lora=4, lora_targets="", lora_alpha=8.0, lora_dropout=0.0, merge=True)
    recorded |= dict(dora=False, rslora=False)
    assert read_toml(Path("run/run.toml"))["lora"] == recorded
    assert json.loads(Path("run/adapter/adapter_config.json").read_text())[
        "base_model_name_or_path"
    ].endswith("/base")
    ids = torch.arange(16)[None] % 250
    base, merged = (
        CausalLM.from_pretrained(name, device="cpu", recipe="bf16")
        for name in ("base", "run/merged")
    )
    adapted = load_lora(CausalLM.from_pretrained("base", device="cpu"), "run/adapter")
    before, logits = base(ids).logits.float(), merged(ids).logits.float()
    assert (logits - before).abs().max() > 0.1
    torch.testing.assert_close(logits, adapted(ids).logits.float(), atol=0.05, rtol=0)
    assert not any(
        name.startswith("fp8_weights") for name in map(str, Path("run/merged").iterdir())
    )
    capsys.readouterr()
    said = []
    for model in ("run", "run/adapter", "run/merged", "base"):
        options = [
            "--greedy",
            "--prompt",
            "hello t",
            "--max-new-tokens",
            "8",
            "--device",
            "cpu",
            "--recipe",
            "bf16",
        ]
        assert main(["generate", "--model", model, *options]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] != said[3]
    assert main(["finetune", "--resume", "run", "--steps", "4"]) == 0
    assert len(losses("run")) == 4
    assert main(["finetune", "--resume", "run", "--steps", "5", "--lora", "8"]) == 2
    assert "a resumed run keeps its lora" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, given, message",
    [
        ("finetune", {"lora": 0}, "out of range: give 1 or more"),
        (
            "finetune",
            {"lora": 4, "lora_dropout": 1.0},
            "--lora-dropout 1.0 is out of range: give 0 or more, below 1",
        ),
        (
            "finetune",
            {"lora": 4, "lora_alpha": 0.0},
            "--lora-alpha 0.0 is out of range: give a number above 0",
        ),
        ("finetune", {"merge": True}, "--merge is for adapters: give --lora RANK"),
        ("finetune", {"lora_targets": "o_proj"}, "--lora-targets is for adapters"),
        ("finetune", {"merge_dtype": "float32"}, "--merge-dtype is for adapters"),
        (
            "finetune",
            {"lora": 4, "merge_dtype": "float32"},
            "is for the merged model: give --merge too",
        ),
        (
            "finetune",
            {"lora": 4, "merge": True, "merge_dtype": "float23"},
            "did you mean 'float32'",
        ),
        ("pretrain", {"lora": 4}, "--lora adapts a model that has weights: use finetune --model"),
        ("pretrain", {"merge": True}, "--merge adapts a model that has weights: use finetune"),
        ("pretrain", {"rslora": True}, "--rslora adapts a model that has weights: use finetune"),
        ("pretrain", {"base_weights": "stored"}, "is for a model that has weights: use finetune"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    command: str, given: dict[str, Any], message: str
) -> None:
    start = {"preset": "gated-nano"} if command == "pretrain" else {"model": "m"}
    with pytest.raises(UsageError, match=message):
        run_settings(command, {**start, **given})


@pytest.mark.parametrize(
    "kind, world, chosen", [("auto", 4, "ddp"), ("auto", 0, "none"), ("fsdp+ep", 4, "fsdp+ep")]
)
def test_adapters_run_on_whole_layers(
    kind: str, world: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert choose_parallel(TrainConfig(parallel=kind), lora=True).parallel == chosen
    with pytest.raises(
        UsageError, match="--lora adapts whole layers: use --parallel ddp, fsdp or fsdp.ep, not tp"
    ):
        choose_parallel(TrainConfig(parallel="tp"), lora=True)


def test_a_sharded_model_is_not_merged(start: list[str], capsys: Any) -> None:
    assert main([*start, "--merge", "--parallel", "fsdp", "--out", "run"]) == 2
    assert "--merge needs the whole model in one process: leave it out" in capsys.readouterr().err


def test_a_run_does_not_start_from_adapters(
    start: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*start, "--recipe", "bf16", "--out", "run"]) == 0
    advice = "holds adapters and not a model: te-models convert --format te --model .*from_pretrain"
    with pytest.raises(CheckpointError, match=advice):
        read_shape("run")
    (newest,) = Path("run/checkpoints").glob("step-*")
    capsys.readouterr()
    assert main(["convert", "--format", "te", "--model", str(newest), "--out", "run/merged"]) == 0
    assert main(["finetune", "--model", "run", "--data", "data.txt", "--out", "again"]) == 2
    assert "--model run/merged has both" in capsys.readouterr().err
    # The resumed run is at another step than its merged model.
    assert main(["finetune", "--resume", "run", "--steps", "4"]) == 0
    capsys.readouterr()
    assert main(["finetune", "--model", "run", "--data", "data.txt", "--out", "again"]) == 2
    assert "convert --format te --model run/checkpoints/step-00000004" in capsys.readouterr().err


@pytest.mark.parametrize(
    "recipe, lora, fields",
    [
        ("delayed", {"targets": ("q_proj", "down_proj")}, dict(fp8_params=True)),
        pytest.param("current", {}, dict(fp8_params=True), marks=pytest.mark.slow),
        ("delayed", ALL, FP8_EXPERTS),
    ],
)
def test_a_run_has_one_loss(recipe: str, lora: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    """The reported one is that of its checkpoint and of its adapters, loaded by any function, to the last bit."""
    shape = {name: value for name, value in fields.items() if name in EXPERTS}
    fields = {name: value for name, value in fields.items() if name not in EXPERTS}
    base = saved_base(tmp_path, **shape)
    run = trainer(tmp_path / "run", recipe, lora, base, **fields, learning_rate=0.02)
    assert save_at_the_end(run) == {"adapters": str(run.out / "adapter")}
    assert run.result.eval_loss < run.result.first_eval_loss - 0.005
    newest = adapter_folder(run.out)
    assert newest is not None
    plain = CausalLM.from_pretrained(base, device="cpu", recipe=recipe, **fields)
    models = [load_adapted(newest, device="cpu"), load_adapted(run.out / "adapter", device="cpu")]
    models += [
        load_lora(plain, newest).get_base_model(),
        build_model(None, str(run.out), {"device": "cpu"}),
    ]
    for model in models:
        assert evaluate(model, run.evaluation) == run.result.eval_loss
        assert (model.recipe.name, model.fp8_params) == (recipe, fields.get("fp8_params", False))
    assert load_merged(newest, device="cpu").recipe.name == recipe
    assert load_merged(newest, device="cpu", recipe="bf16").recipe.name == "bf16"


def saved_base(folder: Path, **shape: Any) -> Path:
    tiny_model(**shape).save_pretrained(folder / "base")
    return folder / "base"


def test_a_trainer_trains_what_add_lora_returns(tmp_path: Path) -> None:
    """Checkpoints hold the adapters alone and name the model; a resumed run continues, and load_lora reads it."""
    base = saved_base(tmp_path)
    ids = torch.arange(32)[None] % 200
    adapted: dict[str, Any] = {}
    for steps, out in ((4, "whole"), (2, "parts"), (4, "parts")):
        torch.manual_seed(5)
        adapted[out] = add_lora(CausalLM.from_pretrained(base, recipe="delayed", device="cpu"), r=4)
        config = TrainConfig(steps=steps, learning_rate=0.01, schedule="constant")
        data = [{"input_ids": ids, "labels": ids}]
        Trainer(adapted[out], data, None, config, tmp_path / out).run(
            resume=steps == 4 and out == "parts"
        )
    assert (
        losses(tmp_path / "parts") == losses(tmp_path / "whole")
        and len(set(losses(tmp_path / "parts"))) == 4
    )
    fresh = CausalLM.from_pretrained(base, recipe="delayed", device="cpu")
    newest = adapter_folder(tmp_path / "parts")
    assert newest is not None
    loaded = [
        load_lora(fresh, tmp_path / "parts").get_base_model(),
        load_adapted(newest, device="cpu"),
    ]
    for one in (*loaded, adapted["whole"]):
        assert torch.equal(one.eval()(ids).logits, adapted["parts"].eval()(ids).logits)


def test_a_model_with_adapters_in_it_is_not_saved_as_a_whole(tmp_path: Path) -> None:
    model = add_lora(tiny_model(), r=4).get_base_model()
    tries = (
        lambda: model.save_pretrained(tmp_path / "saved"),
        lambda: model.save_pretrained(tmp_path / "saved", format="hf"),
        lambda: model.export(tmp_path / "saved", "fp8-channel"),
        lambda: Trainer(model, [], None, TrainConfig(), tmp_path / "saved"),
    )
    for attempt in tries:
        with pytest.raises(
            UsageError, match=r"the model has LoRA adapters: give what add_lora returned"
        ):
            attempt()
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_merge_in_float32_keeps_updates_that_vanish_in_bfloat16(
    dtype: str, tmp_path: Path
) -> None:
    model = tiny_model()
    for layer in model.layers:
        layer.mlp.down_proj.weight.data.fill_(
            1.0
        )  # from which the next BF16 numbers are 2^-8 and 2^-7 away
    model.save_pretrained(tmp_path / "base")
    lora = {"targets": ("down_proj",), "merge": True, "merge_dtype": dtype}
    run = trainer(tmp_path / "run", "bf16", lora, tmp_path / "base", learning_rate=2e-4)
    written = save_at_the_end(run)
    merged = CausalLM.from_pretrained(written["merged"], device="cpu")
    after, adapted_loss = (evaluate(one, run.evaluation) for one in (merged, run.model))
    assert written["eval loss merged"].startswith(
        f"{after:.4f} in {dtype}, {adapted_loss:.4f} with adapters"
    )
    adapted = [
        (name, layer) for name, layer in run.model.named_modules() if isinstance(layer, LoraLinear)
    ]
    updates = {name: layer.get_delta_weight("default").detach() for name, layer in adapted}
    assert (
        len(updates) == 3
        and 0 < max(float(update.abs().max()) for update in updates.values()) < 2.0**-9
    )
    for name, update in updates.items():
        wanted = torch.ones_like(update) + (update if dtype == "float32" else 0)
        assert torch.equal(merged.get_parameter(f"{name}.weight"), wanted.to(merged.dtype))


@pytest.mark.parametrize(
    "loss, trained, before, dtype, said",
    [
        (
            8.4876,
            8.1429,
            8.9237,
            "bfloat16",
            "44 % of the gain with them; --merge-dtype float32 keeps more of it",
        ),
        (8.4876, 8.1429, 8.9237, "float32", "44 % of the gain with them; use the adapters"),
        (8.15, 8.1429, 8.9237, "bfloat16", "8.1500 in bfloat16, 8.1429 with adapters"),
        (8.1, 8.1429, 8.9237, "bfloat16", "8.1000 in bfloat16, 8.1429 with adapters"),
        (
            8.1468,
            8.1429,
            8.1528,
            "bfloat16",
            "8.1468 in bfloat16, 8.1429 with adapters",
        ),  # within rounding
        (
            9.2,
            9.1,
            8.9237,
            "bfloat16",
            "9.2000 in bfloat16, 9.1000 with adapters",
        ),  # there is no gain
        (8.2, 8.1, float("nan"), "bfloat16", "8.2000 in bfloat16, 8.1000 with adapters"),
    ],
)
def test_the_share_of_the_gain_that_a_merge_lost(
    loss: float, trained: float, before: float, dtype: str, said: str
) -> None:
    assert merged_loss(loss, trained, before, dtype).endswith(said)
