"""Models saved and loaded: the same bits under the same recipe, under another what applies is converted, and the rest
is left out aloud.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits, assert_same_tensors
from fewer import every
from kinds import KINDS
from kinds import build as build_kind
from small_model import RECIPES, Build, same, step, tokens
from small_run import IDS, trained
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from te_models import CausalLM, list_recipes
from te_models.config.recipe import get_recipe
from te_models.errors import UsageError
from te_models.fp8.scaling_state import fp8_state


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each recipe after three steps, saved."""
    root = tmp_path_factory.mktemp("recipes")
    for recipe in list_recipes():
        trained(recipe, num_hidden_layers=4).save_pretrained(root / recipe)
    return {recipe: root / recipe for recipe in list_recipes()}


@pytest.mark.parametrize(("old", "new"), every(3, list_recipes(), list_recipes()))
def test_every_recipe_loads_what_any_other_saved(
    old: str, new: str, folders: dict[str, Path]
) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = CausalLM.from_pretrained(folders[old], recipe=new, device="cpu")
    dropped = get_recipe(old).stateful and not get_recipe(new).stateful
    assert [str(w.message).splitlines() for w in said if "left out" in str(w.message)] == [
        [
            f"{folders[old]} was saved under recipe {old!r}; another recipe has no use for its scales and amax "
            "histories, which are left out"
        ]
    ] * dropped
    assert len(said) == dropped and model.recipe.name == new
    assert bool(fp8_state(model)) == (get_recipe(old).stateful and get_recipe(new).stateful)
    loss = model(IDS, labels=IDS).loss
    assert loss is not None and loss.isfinite()
    loss.backward()


MOVES = [
    dict(amax_history_len=4), dict(amax_history_len=2000), dict(amax_compute_algo="max"), dict(margin=2),
    dict(fp8_format="E4M3"), dict(fp8_format="E4M3", margin=1, amax_history_len=8),
]  # fmt: skip


@pytest.mark.parametrize("fields", MOVES, ids=str)
@pytest.mark.parametrize("way", ["from_pretrained", "set_recipe"])
def test_delayed_scales_are_those_that_the_other_recipe_would_have(
    fields: dict[str, Any], way: str, folders: dict[str, Path]
) -> None:
    if way == "from_pretrained":
        model = CausalLM.from_pretrained(folders["delayed"], device="cpu", **fields)
    else:
        model = CausalLM.from_pretrained(folders["delayed"], device="cpu")
        model.set_recipe("delayed", **fields)
    saved = fp8_state(CausalLM.from_pretrained(folders["delayed"], device="cpu"))
    wide = fields.get("fp8_format", "HYBRID") == "HYBRID"
    for name, tensor in fp8_state(model).items():
        if name.endswith("amax_history"):
            kept = min(len(tensor), len(saved[name])) - 1
            assert len(tensor) == fields.get("amax_history_len", len(saved[name]))
            assert_same_bits("tensor[-kept:]", tensor[-kept:], saved[name][-kept:])
            continue
        largest = (57344 if "bwd" in name and wide else 448) / 2 ** fields.get("margin", 0)
        newest = saved[name.removesuffix("scale") + "amax_history"][-1]
        expected = torch.where(newest > 0, torch.full_like(newest, largest).div(newest), 1.0)
        assert_same_bits(name, tensor, expected)


def test_a_scale_at_its_limit_does_not_become_infinite(folders: dict[str, Path]) -> None:
    model = CausalLM.from_pretrained(folders["delayed"], device="cpu", margin=2)
    largest = torch.finfo(torch.float32).max
    for name, tensor in fp8_state(model).items():
        if name.endswith("scaling_fwd.scale"):
            tensor.fill_(largest)
    model.set_recipe("delayed", margin=0)
    found = [
        tensor for name, tensor in fp8_state(model).items() if name.endswith("scaling_fwd.scale")
    ]
    assert found and all((tensor == largest).all() for tensor in found)


def test_layers_that_leave_fp8_leave_their_scales(folders: dict[str, Path]) -> None:
    with pytest.warns(
        UserWarning, match="with other linears in BF16 the model has no use for 16 of its 32 scales"
    ):
        model = CausalLM.from_pretrained(
            folders["delayed"], device="cpu", num_layers_at_end_in_bf16=2
        )
    assert {name.split(".")[1] for name in fp8_state(model)} == {"1"}
    more = CausalLM.from_pretrained(folders["delayed"], device="cpu", num_layers_at_end_in_bf16=0)
    assert {name.split(".")[1] for name in fp8_state(more)} == {"1", "2"}
    more(IDS, labels=IDS).loss.backward()
    assert {name.split(".")[1] for name in fp8_state(more)} == {"1", "2", "3"}


def test_saved_after_an_evaluation_outside_fp8_the_scales_are_there(tmp_path: Path) -> None:
    """Transformer Engine's own state_dict holds them only if the last forward was in FP8."""
    model = trained("delayed")
    before = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    with torch.no_grad(), model.te.autocast(enabled=False, recipe=model.te_recipe):
        model.layers[1].mlp.down_proj(torch.ones(16, 32, dtype=torch.bfloat16))
    model.save_pretrained(tmp_path / "m")
    after = fp8_state(CausalLM.from_pretrained(tmp_path / "m", device="cpu"))
    assert_same_tensors(before, after)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ["attention", "experts", "sinks, biased experts"])
def test_a_state_dict_has_the_scales_of_all_gemms(
    kind: str, backward: bool, tmp_path: Path
) -> None:
    """A te.GroupedLinear has as many as it has experts: here 5 or 3, the numbers of a te.Linear's own scales."""
    model = build_kind(KINDS[kind], recipe="delayed")
    ids = torch.arange(32).view(2, 16)
    loss = model(ids, labels=ids).loss
    if backward:
        loss.backward()
    again = build_kind(KINDS[kind], recipe="delayed")
    again.load_state_dict(model.state_dict())
    assert fp8_state(model) and same(fp8_state(again), fp8_state(model))
    model.save_pretrained(tmp_path / "own")
    (tmp_path / "te").mkdir()
    (tmp_path / "te/config.json").write_bytes((tmp_path / "own/config.json").read_bytes())
    torch.save(model.state_dict(), tmp_path / "te/model.pt")
    edges = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    loaded = CausalLM.from_pretrained(tmp_path / "te", device="cpu", recipe="delayed", **edges)
    assert same(fp8_state(loaded), fp8_state(model))


@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_and_loaded_it_continues_with_the_same_bits(
    small: Build, recipe: str, tmp_path: Path
) -> None:
    model = small(recipe)
    for seed in range(3):
        step(model, tokens(seed=seed))
    model.zero_grad()
    model.save_pretrained(tmp_path / "m")
    files = {path.name for path in (tmp_path / "m").iterdir()}
    assert {"config.json", "model.safetensors", "recipe.json"} <= files
    assert ("fp8_state.safetensors" in files) == (recipe == "delayed")
    loaded = CausalLM.from_pretrained(
        tmp_path / "m", engine=model.engine, device=model.device, compile=False
    )
    assert loaded.recipe.to_dict() == model.recipe.to_dict() and same(
        fp8_state(loaded), fp8_state(model)
    )
    for seed in range(3, 6):
        assert step(loaded, tokens(seed=seed)) == step(model, tokens(seed=seed))
    assert same(fp8_state(loaded), fp8_state(model))
    for p, q in zip(model.parameters(), loaded.parameters(), strict=True):
        assert_same_bits("p.grad", p.grad, q.grad)


def test_a_gate_is_not_added_where_it_would_change_the_output(tmp_path: Path) -> None:
    build_kind(KINDS["AFM"]).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="softplus"):
        CausalLM.from_pretrained(
            tmp_path,
            attention_gate="headwise",
            attention_gate_activation="softplus",
            engine="emulated",
            device="cpu",
        )
    model = CausalLM.from_pretrained(
        tmp_path, attention_gate="headwise", engine="emulated", device="cpu"
    ).eval()
    plain = CausalLM.from_pretrained(tmp_path, engine="emulated", device="cpu").eval()
    assert torch.equal(model(IDS).logits, plain(IDS).logits)


def _break(model: CausalLM) -> None:
    torch.nn.init.constant_(model.layers[1].mlp.down_proj.weight[2:3], torch.nan)


def _cut(model: CausalLM) -> None:
    del model.layers[-1]


def _widen(model: CausalLM) -> None:
    model.embed_tokens = torch.nn.Embedding(300, model.config.hidden_size)


def _save_wrapped(model: CausalLM, folder: Path) -> None:
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    modeling.TEModelsForCausalLM.wrap(model).save_pretrained(folder)


WRITERS: dict[str, Callable[[CausalLM, Path], object]] = {
    "te": lambda model, folder: model.save_pretrained(folder),
    "hf": lambda model, folder: model.save_pretrained(folder, format="hf"),
    "export": lambda model, folder: model.export(folder, format="bf16"),
    "transformers": _save_wrapped,
}


@pytest.mark.filterwarnings("ignore:.* needs its own code")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_break, "layers.1.mlp.down_proj.weight has a NaN or an infinity"),
        (_cut, "the model has 3 blocks, and its config 4: build a CausalLM of"),
        (_widen, "the embedding has 300 rows, and the config vocab_size=288"),
    ],
)
def test_a_model_that_would_not_load_replaces_no_earlier_save(
    change: Callable[[CausalLM], None], message: str, writer: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    model = trained("bf16", num_hidden_layers=4)
    WRITERS[writer](model, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with torch.no_grad():
        change(model)
    with pytest.raises(UsageError, match=f"^{message}"):
        WRITERS[writer](model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.filterwarnings("ignore:.* needs its own code")
@pytest.mark.parametrize("format", ["te", "hf"])
def test_a_sharded_model_is_not_saved(format: str, lone_rank: DeviceMesh, tmp_path: Path) -> None:
    """safetensors would read from an address that a shard does not have."""
    model = trained("bf16", num_hidden_layers=3)
    fully_shard(model, mesh=lone_rank)
    with pytest.raises(UsageError, match="is sharded: gather a full state_dict"):
        model.save_pretrained(tmp_path / "folder", format=format)
    assert not (tmp_path / "folder").exists()
