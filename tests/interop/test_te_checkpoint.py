"""A checkpoint of Transformer Engine's own modules: its weights and pickled scales come in,
and nothing in it is run."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits, assert_same_tensors
from safetensors.torch import save_file
from small_run import IDS, trained
from tiny_runs import TINY

from te_models import CausalLM
from te_models.cli import main
from te_models.errors import CheckpointError
from te_models.fp8.scaling_state import fp8_state
from te_models.interop.te_checkpoint import read_te_checkpoint
from te_models.saving.load_model import load_te_checkpoint
from tests.interop.test_te_extra_state import DelayedScaling, Format, payload, te  # noqa: F401 - a fixture

OPTIONS: dict[str, Any] = dict(
    amax_history_len=6, margin=1, num_hidden_layers=4
)  # of delayed scaling, as stock's


def stock(model: CausalLM) -> dict[str, Any]:
    """Its state_dict as Transformer Engine writes it, with the state of delayed scaling pickled."""
    found: dict[str, Any] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        states = [
            getattr(module, "fp8_meta", {}).get(key) for key in ("scaling_fwd", "scaling_bwd")
        ]
        if model.recipe.stateful and all(states):
            forward, backward = states
            recipe = DelayedScaling(
                margin=1,
                amax_history_len=6,
                fp8_format=Format.HYBRID,
                amax_compute_algo="most_recent",
            )
            found[f"{name}._extra_state"] = payload({
                "recipe": recipe, "scale_fwd": forward.scale, "amax_history_fwd": forward.amax_history,
                "scale_bwd": backward.scale, "amax_history_bwd": backward.amax_history,
                "extra_fp8_variables": {"num_gemms": 1},
            })  # fmt: skip
    return found


def write(form: str, folder: Path, tensors: dict[str, Any]) -> Path:
    """The checkpoint in one of its forms; returns what to read."""
    folder.mkdir(exist_ok=True)
    if form == "safetensors":
        save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors"
    torch.save(
        {"model": tensors, "step": 7} if form == "nested.pt" else tensors, folder / "model.pt"
    )
    return folder / "model.pt"


def assert_same(one: CausalLM, other: CausalLM) -> None:
    assert one.recipe.to_dict() == other.recipe.to_dict()
    assert_same_tensors(dict(one.named_parameters()), dict(other.named_parameters()))
    assert_same_tensors(fp8_state(one), fp8_state(other))


@pytest.mark.parametrize("form", ["safetensors", "model.pt", "nested.pt"])
@pytest.mark.parametrize("recipe", ["delayed", "bf16"])
def test_a_folder_with_a_config_loads_by_itself(form: str, recipe: str, tmp_path: Path) -> None:
    model = trained(recipe, **(OPTIONS if recipe == "delayed" else {}))
    write(form, tmp_path / "te", stock(model))
    config = {"model_type": "te_models", "dtype": "bfloat16", **model.config.to_dict()}
    (tmp_path / "te" / "config.json").write_text(json.dumps(config))
    loaded = CausalLM.from_pretrained(tmp_path / "te", device="cpu")
    assert_same(loaded, model)
    with torch.no_grad():
        assert_same_bits("loaded(IDS).logits", loaded(IDS).logits, model(IDS).logits)
    assert (
        main(
            [
                "convert",
                "--model",
                str(tmp_path / "te"),
                "--format",
                "te",
                "--out",
                str(tmp_path / "ours"),
            ]
        )
        == 0
    )
    assert_same(CausalLM.from_pretrained(tmp_path / "ours", device="cpu"), model)


@pytest.mark.parametrize("lost", [["manifest.json"], ["manifest.json", "recipe.json"]], ids=len)
def test_our_own_folder_is_no_such_checkpoint(
    lost: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights have an _extra_state too: a copy without its manifest was refused by a list of the scales' names."""
    folder = tmp_path / "ours"
    trained("delayed", **OPTIONS).save_pretrained(folder)
    options = ["--preset", "gated-nano", "--out", str(tmp_path / "out")]
    assert main(["convert", "--te-checkpoint", str(folder), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "a model that te-models saved" in error
    for name in lost:
        (folder / name).unlink()
    for command in (["plan"], ["generate", "--prompt", "x"]):
        assert main([*command, "--model", str(folder)]) == 2
        error = capsys.readouterr().err
        assert error == (
            f"te-models: {folder} has no manifest.json: it is incomplete; copy or save the whole folder again\n"
        )


def test_into_a_model_of_other_names_and_another_recipe(tmp_path: Path) -> None:
    model = trained("delayed", num_layers_at_end_in_bf16=0, **OPTIONS)
    path = write(
        "model.pt", tmp_path, {f"decoder.{name}": value for name, value in stock(model).items()}
    )
    options = {**TINY, **OPTIONS, "num_layers_at_end_in_bf16": 0}
    fresh = CausalLM.from_preset("gated-nano", recipe="delayed", device="cpu", **options)
    load_te_checkpoint(fresh, path, rename=lambda name: name.removeprefix("decoder."))
    assert_same(fresh, model)
    assert (
        read_te_checkpoint(path, lambda name: name[8:]).recipe(4).to_dict()
        == model.recipe.to_dict()
    )
    current = CausalLM.from_preset(
        "gated-nano", recipe="current", device="cpu", **{**TINY, "num_hidden_layers": 4}
    )
    with pytest.warns(UserWarning, match="has no use for its scales"):
        load_te_checkpoint(current, path, rename=lambda name: name.removeprefix("decoder."))
    with pytest.raises(CheckpointError, match="missing: embed_tokens.weight"):
        load_te_checkpoint(fresh, path)


class Evil:
    """Unpickling it makes a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("run",)


@pytest.mark.parametrize("where", ["file", "state"])
def test_no_code_in_a_checkpoint_runs(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tensors: dict[str, Any] = {"w": torch.ones(2)}
    if where == "file":
        tensors["lm_head._extra_state"] = Evil()
    else:
        tensors["lm_head._extra_state"] = torch.frombuffer(
            bytearray(pickle.dumps(Evil())), dtype=torch.uint8
        )
    with pytest.raises(
        CheckpointError, match="more than tensors" if where == "file" else "refused"
    ):
        read_te_checkpoint(write("model.pt", tmp_path / "te", tensors))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content", [[1, 2], {"a": 3}, {"a": {"b": torch.ones(1)}}, "truncated", None], ids=str
)
def test_files_without_a_state_dict_are_refused(content: Any, tmp_path: Path) -> None:
    if content == "truncated":
        path = write("model.pt", tmp_path, {"a": torch.ones(100)})
        path.write_bytes(path.read_bytes()[:-300])
    elif content is not None:
        torch.save(content, tmp_path / "model.pt")
    with pytest.raises(
        CheckpointError, match="is no state_dict|is damaged|holds no Transformer Engine checkpoint"
    ):
        read_te_checkpoint(tmp_path)


@pytest.mark.parametrize("form", ["safetensors", "model.pt"])
def test_a_weight_that_is_not_finite_is_refused(form: str, tmp_path: Path) -> None:
    model = trained("delayed", **OPTIONS)
    tensors = stock(model)
    tensors["layers.1.mlp.down_proj.weight"] = tensors["layers.1.mlp.down_proj.weight"] / 0
    path = write(form, tmp_path / "te", tensors)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(CheckpointError, match="layers.1.mlp.down_proj.weight has a NaN"):
        load_te_checkpoint(model, path)
    assert_same_tensors(dict(model.named_parameters()), before)
