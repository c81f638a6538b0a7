"""Recipes that follow each other in a run: the same bits as a loop that changes them by hand, also after a resume."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from bits import assert_same_bits
from fewer import some
from tiny_runs import PRETRAIN, tiny_model
from torch import Tensor

from te_models import CausalLM, TrainConfig, Trainer
from te_models.cli import main
from te_models.config.recipe import get_recipe
from te_models.config.toml import read_toml
from te_models.errors import ConfigError, UsageError
from te_models.fp8.scaling_state import fp8_state
from te_models.optim import build_optimizer
from te_models.training.metrics import read_metrics
from te_models.training.plots import recipes_of

STEPS = 6
SCHEDULES = {  # --recipe, schedule -> the recipe of each step
    ("current", "bf16@0.5"): ["current"] * 3 + ["bf16"] * 3,
    ("current", "delayed@3"): ["current"] * 3 + ["delayed"] * 3,
    ("delayed", "current@2,delayed@4"): ["delayed"] * 2 + ["current"] * 2 + ["delayed"] * 2,
}


def build(recipe: str = "current", **options: Any) -> CausalLM:
    return tiny_model(recipe, **dict(vocab_size=96, intermediate_size=64) | options)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 96, (2, 16), generator=generator) for _ in range(STEPS)]
    return [dict(input_ids=one, labels=one) for one in ids]


def config(**options: Any) -> TrainConfig:
    own = dict(steps=STEPS, learning_rate=0.01, warmup_steps=0, schedule="constant", eval_every=0)
    return TrainConfig(**{**own, **options})


def by_hand(recipe: str, names: list[str]) -> CausalLM:
    """The model after STEPS steps, each under the recipe of this name."""
    model, options = build(recipe).train(), config()
    optimizer = build_optimizer("adamw", model, options.learning_rate, options.weight_decay)
    for name, batch in zip(names, batches(), strict=True):
        if model.recipe.name != name:
            model.set_recipe(
                name, **(dict(amax_history_len=8) if name == recipe == "delayed" else {})
            )
        model.calibrate(batch)
        model(**batch, return_logits=False).loss.backward()
        optimizer.take_gradients(options.clip_grad_norm)
        optimizer.step()
    return model


def assert_same_model(found: CausalLM, expected: CausalLM) -> None:
    for (name, parameter), other in zip(
        found.named_parameters(), expected.parameters(), strict=True
    ):
        assert_same_bits(name, parameter, other)
    state, wanted = fp8_state(found), fp8_state(expected)
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(name, state[name], tensor)


@pytest.mark.parametrize(("recipe", "schedule"), some(2, SCHEDULES))
def test_a_run_is_a_loop_that_changes_the_recipe_also_resumed(
    recipe: str, schedule: str, tmp_path: Path
) -> None:
    """From a checkpoint before a change, at it, and after it."""
    how = config(recipe_schedule=schedule, save_every=1, keep_last=STEPS)
    whole = Trainer(build(recipe), batches(), None, how, tmp_path)
    whole.run()
    assert_same_model(whole.model, by_hand(recipe, SCHEDULES[recipe, schedule]))
    wanted = [(row["loss"], row["recipe"]) for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert [name for _, name in wanted] == SCHEDULES[recipe, schedule]
    for last in range(STEPS - 1, 0, -1):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{last + 1:08d}")
        resumed = Trainer(
            build(recipe), batches(), None, config(recipe_schedule=schedule), tmp_path
        )
        with mock.patch.object(resumed, "save"):
            resumed.run(resume=True)
        assert_same_model(resumed.model, whole.model)
        found = [(row["loss"], row["recipe"]) for row in read_metrics(tmp_path / "metrics.jsonl")]
        assert found == wanted, last


def test_the_command_and_its_file(texts: None) -> None:
    """Recorded in run.toml, resumed after the change without a flag, and run again from the file alone."""
    asked = [
        "--recipe",
        "current",
        "--precision",
        "*.down_proj=bf16",
        "--recipe-schedule",
        "bf16@0.5",
        "--steps",
        "4",
    ]
    assert main([*PRETRAIN, *asked, "--out", "one", "--save-every", "1"]) == 0
    saved = read_toml(Path("one/run.toml"))
    assert saved["recipe"]["name"] == "current" and saved["recipe"]["precision"] == {
        "*.down_proj": "bf16"
    }
    assert saved["training"]["recipe_schedule"] == "bf16@0.5"
    names = [row["recipe"] for row in read_metrics(Path("one/metrics.jsonl"))]
    assert names == ["current", "current", "bf16", "bf16"]
    last = CausalLM.from_pretrained("one")
    assert last.recipe.name == "bf16" and last.recipe.precision == {"*.down_proj": "bf16"}
    assert (
        main(["pretrain", "--resume", "one", "--steps", "8"]) == 0
    )  # half of eight: the first recipe comes back
    assert read_toml(Path("one/run.toml"))["recipe"] == saved["recipe"]
    names = [row["recipe"] for row in read_metrics(Path("one/metrics.jsonl"))]
    assert names == ["current"] * 2 + ["bf16"] * 6
    assert main(["pretrain", "one/run.toml", "--steps", "4", "--out", "two"]) == 0
    again, first = (read_metrics(Path(name) / "metrics.jsonl") for name in ("two", "one"))
    assert [row["loss"] for row in again[:2]] == [row["loss"] for row in first[:2]]


@pytest.mark.parametrize(
    "schedule",
    ["bf16", "bf16@", "bf16@x", "bf16@0", "bf16@-1", "bf16@inf", "@0.5", "bf16@nan", "bf16@1.5"],
)
def test_a_schedule_that_is_none_is_refused(schedule: str) -> None:
    with pytest.raises(ConfigError, match="write RECIPE@PLACE, a name and a share of the steps"):
        TrainConfig(recipe_schedule=schedule)


def test_a_misspelled_recipe_of_a_schedule_names_the_nearest() -> None:
    with pytest.raises(
        UsageError,
        match=r"unknown recipe 'curent' of recipe_schedule='curent@0.9': did you mean 'cur",
    ):
        TrainConfig(recipe_schedule="curent@0.9")


@pytest.mark.parametrize(
    "schedule, steps",
    [
        ("bf16@0.9,current@0.5", "9 and 5"),
        ("bf16@0.5,current@0.5", "5 and 5"),
        ("bf16@0.5,current@4", "5 and 4"),
    ],
)
def test_changes_come_in_order(schedule: str, steps: str) -> None:
    """A share and a number may be in order until a run resumes with more steps, so the steps are in the message."""
    with pytest.raises(
        ConfigError, match=f"in the order of their steps; of 10 steps these follow {steps}$"
    ):
        TrainConfig(recipe_schedule=schedule, steps=10)


def test_a_change_that_the_model_cannot_make_is_refused_before_the_run(tmp_path: Path) -> None:
    """FP8 weights have the format of one recipe."""
    with pytest.raises(
        UsageError, match="recipe_schedule='delayed@3': the FP8 primary weights were made for"
    ):
        Trainer(
            build(fp8_params=True), batches(), None, config(recipe_schedule="delayed@3"), tmp_path
        )
    with pytest.raises(UsageError, match="is not a multiple of 32"):
        Trainer(
            build(intermediate_size=48),
            batches(),
            None,
            config(recipe_schedule="mxfp8@3"),
            tmp_path,
        )


@pytest.mark.parametrize("change", ["bf16@0.5", "delayed@0.5"])
def test_fp8_weights_and_a_schedule_are_refused_with_a_way_out(
    change: str, texts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                *PRETRAIN,
                "--recipe",
                "current",
                "--fp8-params",
                "--recipe-schedule",
                change,
                "--out",
                "one",
            ]
        )
        == 2
    )
    assert (
        f"recipe_schedule={change!r}: FP8 weights have the format of one recipe"
        in capsys.readouterr().err
    )


def test_edges_and_table_stay() -> None:
    first = get_recipe(
        "delayed",
        num_layers_at_start_in_bf16=2,
        precision={"*.o_proj": "bf16", "layers.1.*": "current"},
    )
    then = first.followed_by("current")
    assert then.num_layers_at_start_in_bf16 == 2 and list(then.precision) == [
        "*.o_proj",
        "layers.1.*",
    ]
    assert (
        first.followed_by("bf16").precision == {"*.o_proj": "bf16"}
        and not first.followed_by("bf16").quantized
    )
    assert first.followed_by("delayed") is first


def test_a_change_after_the_last_step_is_said(tmp_path: Path) -> None:
    said = f"the run ends after step {STEPS}, before 'bf16' follows"
    with pytest.warns(UserWarning, match=said) as caught:
        Trainer(build(), batches(), None, config(recipe_schedule="bf16@6"), tmp_path)
    (warning,) = [one for one in caught if said in str(one.message)]
    assert warning.filename == __file__  # the caller of Trainer


def test_a_resumed_run_names_the_recipe_in_force(
    texts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with the first one given again; and more steps, which move a change at a share of them, are said."""
    asked = ["--recipe", "delayed", "--margin", "1", "--recipe-schedule", "bf16@0.5"]
    assert main([*PRETRAIN, *asked, "--steps", "4", "--out", "one"]) == 0
    assert "margin=1" in capsys.readouterr().out
    said = []
    for more in (["--steps", "5", *asked], ["--steps", "20"]):
        assert main(["pretrain", "--resume", "one", *more]) == 0
        said.append(" ".join(capsys.readouterr().out.split()))
    assert "recipe bf16 linears 0 in FP8" in said[0]
    assert "'bf16' follows after step 3, was 2: a share of the steps" in said[0]
    assert (
        "recipe delayed, from step 11 on bf16" in said[1]
        and "follows after step 10, was 3" in said[1]
    )
    names = [row["recipe"] for row in read_metrics(Path("one/metrics.jsonl"))]
    assert names == ["delayed"] * 2 + ["bf16"] * 3 + ["delayed"] * 5 + ["bf16"] * 10


@pytest.mark.filterwarnings("ignore:.*was trained under recipe")
def test_a_resume_under_another_recipe_is_marked_in_the_plot(texts: None) -> None:
    """Also without a schedule: every row of metrics.jsonl names its recipe."""
    assert main([*PRETRAIN, "--recipe", "bf16", "--steps", "1", "--out", "one"]) == 0
    assert main(["pretrain", "--resume", "one", "--recipe", "current", "--steps", "2"]) == 0
    rows = read_metrics(Path("one/metrics.jsonl"))
    assert recipes_of(rows) == [(1, "bf16"), (2, "current")]
