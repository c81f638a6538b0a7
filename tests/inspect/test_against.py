"""A card beside the one of a run: equal on one machine, named where products are added in another way."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plain_numbers
import pytest
import torch
from bits import assert_same_tensors
from planted import SHAPE, write_recipe
from tiny_runs import tiny_model, tiny_trainer

from te_models.cli import main
from te_models.engine import emulated
from te_models.errors import DataError
from te_models.fp8.scaling_state import fp8_state
from te_models.inspect import against
from te_models.inspect.against import verify_against
from te_models.saving.folder import load_folder
from te_models.training.card import GEMMS, read_card

RECIPES = ["delayed", "blockwise"]
OTHER_RECIPES = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("current", "mxfp8", "nvfp4")
]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Products as a GPU adds them, as outside the tests."""
    with plain_numbers.exact():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run under `delayed`."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with plain_numbers.exact():
        short_run(out, "delayed")
    return out


def short_run(out: Path, recipe: str, record: int = 1, **options: Any) -> Any:
    model = tiny_model(recipe, **{**SHAPE, **options})
    trainer = tiny_trainer(
        model, out, steps=2, batch_size=2, seq_len=64, record=record, eval_every=0
    )
    write_recipe(out, model)
    trainer.run()
    return trainer


@pytest.mark.parametrize("recipe", [*RECIPES, *OTHER_RECIPES])
def test_a_run_verifies_where_it_ran(recipe: str, tmp_path: Path) -> None:
    short_run(tmp_path / "run", recipe)
    found = verify_against(tmp_path / "run")
    assert found.same and found.loss == found.card.loss, found
    assert "all 6 recorded products have equal bits; the loss is the recorded one" in found.verdict
    assert {one.gemm for one in found.products} == set(GEMMS)
    linears = ["layers.1.self_attn.qkvg_proj", "layers.1.mlp.down_proj"]
    assert list(dict.fromkeys(one.linear for one in found.products)) in (linears, linears[::-1])
    exact = recipe in ("delayed", "current", "blockwise")
    assert all(one.recorded_as == (("hopper",) if exact else ()) for one in found.products)


def test_another_accumulation_is_named_with_its_loss(run: Path) -> None:
    with emulated.exact_gemm(gpu="ada"):
        found = verify_against(run)
    assert not found.same and "6 of 6 products differ" in found.verdict
    assert "the recorded ones add as Hopper does, those here as Ada" in found.verdict
    assert found.loss is not None and found.loss != found.card.loss
    assert f"({found.loss - found.card.loss:+.2g})" in found.verdict
    # FP8 itself leaves about 30 dB: another order of sums is far below.
    assert all(55 < one.sqnr < 90 and 0.001 < one.differing < 0.1 for one in found.products)
    with emulated.exact_gemm(0):
        found = verify_against(run)
    assert not found.same and "those here as no card that is emulated" in found.verdict


def test_a_card_that_computes_something_else(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM that leaves out the last 32 of K, as a kernel with a wrong bound would."""
    compute = against.compute

    def broken(te: Any, operands: dict[str, Any], recipe: Any) -> Any:
        x = operands["input"].clone()
        x[:, -32:] = 0
        return compute(te, {**operands, "input": x}, recipe)

    clean = verify_against(run)
    monkeypatch.setattr(against, "as_tensor_cores", lambda operands, recipe: {})
    monkeypatch.setattr(against, "compute", broken)
    found = verify_against(run)
    different = [one.gemm for one in found.products if not one.equal]
    assert set(different) == {"fprop", "wgrad"} and len(different) == 4
    assert "4 of 6 products differ" in found.verdict and min(o.sqnr for o in found.products) < 15
    assert clean.same


def test_a_recipe_that_does_not_run_here(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "available", lambda te, recipe: (False, "it needs a GPU"))
    found = verify_against(run)
    assert not found.same and "delayed does not run here: it needs a GPU" in found.verdict
    assert str(found) and json.dumps(found.to_dict(), allow_nan=False)


def test_a_run_keeps_its_state(tmp_path: Path) -> None:
    recorded = short_run(tmp_path / "recorded", "delayed")
    random = torch.get_rng_state()
    plain = short_run(tmp_path / "plain", "delayed", record=0)
    assert torch.equal(random, torch.get_rng_state())
    assert_same_tensors(fp8_state(recorded.model), fp8_state(plain.model))
    saved = load_folder(tmp_path / "recorded/checkpoints/step-00000002", ["fp8_state"])
    assert_same_tensors(saved.tensors["fp8_state"], fp8_state(recorded.model))
    assert recorded.model.training and not (tmp_path / "plain/record").exists()
    with pytest.raises(DataError, match="has recorded no card: a run with --record"):
        verify_against(tmp_path / "plain")


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_a_batch_with_fewer_rows_than_the_recipe_needs(recipe: str, tmp_path: Path) -> None:
    model = tiny_model(recipe, **SHAPE)
    trainer = tiny_trainer(
        model, tmp_path, steps=1, batch_size=1, seq_len=9, record=1, eval_every=0
    )
    write_recipe(tmp_path, model)
    trainer.run()
    found = verify_against(tmp_path)
    assert found.same and found.loss == found.card.loss, found
    for sample in found.card.linears:
        rows = sample.operands["input"]
        # Zeros as the model adds them while it trains, so that the products take the rows.
        assert len(rows) == sample.recipe.row_alignment > 9 and not rows[9:].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(recipe="current", fp8_params=True),
        dict(recipe="delayed", preset="gated-moe-nano"),
        dict(recipe="current", precision={"*.down_proj": "blockwise"}),
    ],
    ids=["fp8-weights", "experts", "mixed"],
)
def test_other_models(options: dict[str, Any], tmp_path: Path) -> None:
    short_run(tmp_path / "run", **options)
    found = verify_against(tmp_path / "run")
    assert found.same and found.loss == found.card.loss, found
    if "precision" in options:
        assert {one.recipe for one in found.products} == {"current", "blockwise"}


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--against", str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "recorded on cpu (emulated), here cpu (emulated)" in shown and "equal bits" in shown
    with emulated.exact_gemm(gpu="ada"):
        assert main(["verify", "--against", str(run), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False and document["recorded"]["engine"] == "emulated"
    assert document["recorded"]["versions"]["torch"] and len(document["products"]) == 6
    assert main(["verify", "--against", str(run), "--recipe", "current"]) == 2
    assert "--recipe has no part in --against" in capsys.readouterr().err
    for device in ("gpu", "mps", ""):
        assert main(["verify", "--against", str(run), "--device", device]) == 2
        assert f"device {device!r} is not supported: give cpu" in capsys.readouterr().err
    # The loss needs the checkpoint of the step at which the card was recorded.
    card = read_card(run)
    checkpoint = run / f"checkpoints/step-{card.step:08d}"
    checkpoint.rename(tmp_path / "away")
    try:
        found = verify_against(run)
    finally:
        (tmp_path / "away").rename(checkpoint)
    assert found.same and "the loss was not compared: its newest checkpoint is not" in found.verdict


def test_a_model_whose_loss_is_nan_has_a_card_too(tmp_path: Path) -> None:
    """The weights are finite, so the run that skips its steps ends as it would without a record."""
    model = tiny_model("delayed", **SHAPE)
    trainer = tiny_trainer(
        model, tmp_path, steps=5, batch_size=2, seq_len=64, record=1, eval_every=0, learning_rate=1e8,
        clip_grad_norm=0.0, on_nan="skip",
    )  # fmt: skip
    write_recipe(tmp_path, model)
    assert trainer.run().step == 5
    found = verify_against(tmp_path)
    assert math.isnan(found.card.loss) and found.card.step == 5
    assert "the recorded loss is not finite" in found.verdict
    assert found.to_dict()["recorded"]["loss"] is None
