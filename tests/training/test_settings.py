"""Settings of a run: defaults per command, files, what a resumed run may change."""

from pathlib import Path
from typing import Any

import pytest

from te_models.cli.commands import cli
from te_models.config.model import config_fields
from te_models.config.recipe import Recipe
from te_models.config.settings import Setting
from te_models.config.training import TrainConfig
from te_models.errors import ConfigError, UsageError
from te_models.training.run_settings import changed_settings, read_run_file, run_settings
from te_models.training.settings import SETTINGS, TABLES, LoraSettings

WHOLE = """
[run]
command = "pretrain"
preset = "gated-nano"
[recipe]
name = "delayed"
amax_history_len = 16
[shape]
hidden_size = 64
[training]
steps = 7
learning_rate = 1
optimizer_options = { betas = [0.9, 0.99] }
[data]
data = "texts"
[record]
anything = ["at all"]
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_names_are_unique_over_all_tables() -> None:
    assert len(SETTINGS) == sum(map(len, TABLES.values()))


@pytest.mark.parametrize(
    "command, given, rate",
    [("pretrain", {"preset": "gated-nano"}, 1e-3), ("finetune", {"model": "m"}, 2e-5),
     ("finetune", {"model": "m", "lora": 8}, 2e-4), ("finetune", {"model": "m", "learning_rate": 0.5}, 0.5)],
)  # fmt: skip
def test_the_default_learning_rate_fits_the_command(
    command: str, given: dict[str, Any], rate: float
) -> None:
    settings = run_settings(command, given)
    assert settings.train.learning_rate == rate
    assert settings.recipe == "auto" and settings.train.parallel == "auto"
    assert settings.train.steps == TrainConfig().steps
    assert settings.lora == (LoraSettings(rank=8, alpha=16.0) if "lora" in given else None)


def test_a_file_gives_what_the_command_does_not(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", WHOLE)
    settings = run_settings("finetune", {"seed": 3, "steps": 9, "margin": 1}, file)
    assert (settings.command, settings.preset, settings.model) == ("pretrain", "gated-nano", None)
    assert (settings.train.steps, settings.train.seed, settings.train.learning_rate) == (9, 3, 1)
    assert settings.train.optimizer_options == {"betas": [0.9, 0.99]}
    assert isinstance(settings.recipe, Recipe) and settings.recipe.fields["amax_history_len"] == 16
    assert settings.build == {"hidden_size": 64, "margin": 1}
    assert settings.data.data == ("texts",) and settings.set_by_user == {"seed", "steps", "margin"}


def test_another_recipe_or_shape_replaces_that_of_the_file_as_a_whole(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", WHOLE + "[model]\nfp8_params = true\n")
    assert run_settings("pretrain", {}, file).build["fp8_params"] is True
    for recipe in ("current", "mxfp8", "auto"):
        settings = run_settings("pretrain", {"recipe": recipe, "preset": "gated-124m"}, file)
        assert (settings.recipe, settings.preset, settings.build) == (
            recipe,
            "gated-124m",
            {"fp8_params": True},
        )
    for recipe in ("bf16", "nvfp4"):
        with pytest.warns(
            UserWarning, match=f"recipe '{recipe}' has no FP8 weights: the run goes on without"
        ):
            assert (
                run_settings("pretrain", {"recipe": recipe, "preset": "gated-124m"}, file).build
                == {}
            )


@pytest.mark.parametrize(
    "given, size", [({"parallel": "fsdp+tp"}, 2), ({"parallel": "fsdp"}, 0), ({}, 2)]
)
def test_another_kind_of_parallelism_drops_the_sizes_of_that_in_the_file(
    given: dict[str, Any], size: int, tmp_path: Path
) -> None:
    text = '[training]\nparallel = "fsdp+tp"\ntensor_parallel_size = 2\nsequence_parallel = true\n'
    settings = run_settings(
        "pretrain", given | {"preset": "gated-nano"}, write(tmp_path / "run.toml", text)
    )
    assert (settings.train.tensor_parallel_size, settings.train.sequence_parallel) == (
        size,
        size > 0,
    )


def test_a_shape_in_a_file_without_a_model_changes_the_preset_given(tmp_path: Path) -> None:
    file = write(tmp_path / "shape.toml", "[shape]\nhidden_size = 64\n")
    assert run_settings("pretrain", {"preset": "gated-124m"}, file).build == {"hidden_size": 64}


@pytest.mark.parametrize(
    "text, message",
    [
        ("[runs]\n", "unknown table 'runs' of .*: did you mean 'run'"),
        (
            "[training]\nlearning_rat = 1\n",
            r"'learning_rat' of \[training\] in .*: did you mean 'learning_rate'",
        ),
        ("steps = 3\n", r"steps belongs in a table: write \[training\] above it"),
        ('model = "m"\n', r"model belongs in a table: write \[run\] above it"),
        ('[model]\nmodel = "m"\n', r"model belongs in \[run\], not in \[model\]"),
        ('recipe = "bf16"\n', r"recipe is a table: write \[recipe\], and name = NAME below"),
        ("stepps = 3\n", "unknown setting 'stepps' of .*: did you mean 'steps'"),
        ("run = 3\n", r"run is a table: write \[run\]"),
        ('[training]\nsteps = "many"\n', "steps='many' is of a wrong type: give a whole number"),
        ("[training]\nsteps = true\n", "steps=True is of a wrong type: give a whole number"),
        ("[training]\nsteps = 1.5\n", "steps=1.5 is of a wrong type: give a whole number"),
        (
            '[training]\nlearning_rate = "x"\n',
            "learning_rate='x' is of a wrong type: give a number",
        ),
        ("[model]\nfp8_params = 1\n", "fp8_params=1 is of a wrong type: give true or false"),
        ("[run]\npreset = 1\n", "preset=1 is of a wrong type: give text"),
        ("[data]\ndata = 5\n", "data=5 is of a wrong type: give a path, or a list of paths"),
        ("[training]\nsteps = 0\n", "steps=0 is out of range: give 1 or more"),
        ("[shape]\nhidden_size = 0\n", "hidden_size=0 is out of range: give 1 or more"),
        ("[shape]\nmoe = 3\n", "moe=3 is of a wrong type: give a table"),
        (
            "[data]\neval_data = ['a', 1]\n",
            r"eval_data=.'a', 1. is of a wrong type: give a path, or a list of paths",
        ),
    ],
)
def test_a_mistake_in_a_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, UsageError), match=message) as error:
        read_run_file(write(tmp_path / "run.toml", text))
    assert str(tmp_path) in str(error.value)


def test_a_file_with_an_unknown_command_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", '[run]\ncommand = "fine-tune"\nmodel = "m"\n')
    with pytest.raises(UsageError, match="unknown command 'fine-tune': did you mean 'finetune'"):
        run_settings("finetune", {}, file)


SAVED: dict[str, Any] = dict(
    seed=0, batch_size=8, seq_len=64, gradient_accumulation=1, packing="stream"
)
SAVED |= dict(
    streaming=False,
    preset="gated-nano",
    hidden_size=64,
    optimizer="adamw",
    truncate="drop",
    columns="",
)
SAVED |= dict(
    eval_split=0.05,
    chat_template="a.jinja",
    lora=4,
    lora_targets="",
    lora_alpha=8.0,
    lora_dropout=0.0,
    dora=False,
    rslora=False,
)


@pytest.mark.parametrize("name", SAVED)
def test_a_resumed_run_keeps_settings_that_define_it(name: str) -> None:
    other = (
        "other"
        if isinstance(SAVED[name], str)
        else True
        if name in ("streaming", "dora", "rslora")
        else 5
    )
    with pytest.raises(
        UsageError,
        match=f"a resumed run keeps its {name}.*: leave out --{name.replace('_', '-')}, or",
    ):
        changed_settings(SAVED, {name: other})
    assert changed_settings(SAVED, {name: SAVED[name]}) == {}


@pytest.mark.parametrize("given", [{"merge": True}, {"merge_dtype": "float32"}])
def test_a_resumed_run_without_adapters_has_none_to_merge(given: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match="keeps its adapters, and this one has none: leave out --merge"
    ):
        changed_settings({"preset": "gated-nano"}, given)


def test_changed_settings_are_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    saved = {
        "steps": 5,
        "recipe": {"name": "delayed", "margin": 0},
        "data": str(tmp_path / "texts"),
    }
    given = {"steps": 9, "recipe": "current", "margin": 1, "data": "texts", "out": "elsewhere"}
    assert changed_settings(saved, given) == {
        "steps": (5, 9),
        "recipe": ("delayed", "current"),
        "margin": (0, 1),
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_is_an_option(name: str) -> None:
    """Of both commands, with its help, but for lists and groups of the shape and what a command starts from."""
    options = [
        {p.name: p for p in cli.commands[command].params} for command in ("pretrain", "finetune")
    ]
    one = SETTINGS[name]
    assert one.help
    if name == "command" or (
        name in TABLES["shape"] and one.kinds[0] not in (bool, int, float, str)
    ):
        assert not any(name in found for found in options)
        return
    shown = [found[name] for found in options if not getattr(found[name], "hidden", False)]
    assert shown and all(getattr(option, "help", "") == one.help for option in shown)
    assert all(one.flag in option.opts for option in shown)


NUMBERS = [
    one
    for table in ("training", "data", "lora")
    for one in TABLES[table].values()
    if one.kinds[0] in (int, float)
]


@pytest.mark.parametrize("one", NUMBERS, ids=lambda one: one.name)
def test_a_number_out_of_range_is_refused(one: Setting) -> None:
    # Under these every number has an effect.
    given = {"model": "m", "lora": 4, "on_nan": "skip", "schedule": "warmup-stable-decay"}
    given |= {one.name: int(one.least) - 1}
    with pytest.raises(ConfigError, match="is out of range: give "):
        run_settings("finetune", given)
    edge = one.kinds[0](one.least) if not one.above else 0.5
    assert run_settings("finetune", given | {one.name: edge})


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """One source as text, lists of names as text, and no line for what was not given."""
    text = '[run]\ncommand = "finetune"\nmodel = "m"\n[data]\ndata = "texts"\n'
    text += 'eval_data = ["a", "b:2"]\ntokenizer = "t"\n'
    text += '[lora]\nlora = 4\nlora_targets = "q_proj, v_proj"\nlora_alpha = 8.0\n'
    text += 'merge = true\nmerge_dtype = "float32"\n'
    settings = run_settings("finetune", {}, write(tmp_path / "run.toml", text))
    assert (settings.data.data, settings.data.eval_data, settings.tokenizer) == (
        ("texts",),
        ("a", "b:2"),
        "t",
    )
    adapters = LoraSettings(
        rank=4, targets=("q_proj", "v_proj"), alpha=8.0, merge=True, merge_dtype="float32"
    )
    assert settings.lora == adapters and settings.data.truncate == "drop"
    tables = settings.tables()
    assert tables["lora"]["lora_targets"] == "q_proj,v_proj" and tables["data"]["data"] == (
        "texts",
    )


def test_no_two_tables_have_a_setting_of_one_name() -> None:
    """They are in one tree, in which a name has one meaning: a model's `parallel` once was the run's."""
    names = [name for table in TABLES.values() for name in table]
    assert sorted(names) == sorted(set(names))
    assert set(config_fields()) <= {*names}
