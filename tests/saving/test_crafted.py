"""Crafted checkpoints, with a manifest that fits: each is refused in one line,
and the live run is unchanged."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer import some
from small_run import make_trainer
from torch import Tensor

from te_models import CausalLM
from te_models.errors import OutputInUse, TeModelsError
from te_models.files.formats import flatten_state, unflatten_state
from te_models.fp8.scaling_state import fp8_state
from te_models.saving.folder import load_folder, save_folder
from te_models.training.trainer import Trainer

Groups = dict[str, dict[str, Tensor]]
OPTIMIZERS = ("adamw", "muon", "muon8bit", "galore", "adamw8bit", "adamwfp8")


def of(optimizer: str) -> dict[str, Any]:
    """The settings of a run under this optimizer."""
    options = "rank=8" if optimizer == "galore" else ""
    return dict(steps=4, amax_history_len=4, optimizer=optimizer, optimizer_options=options)


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], tuple[Trainer, Path]]]:
    """`runs(optimizer)` is a live trainer after some steps, and the folder of its checkpoint."""
    made: dict[str, tuple[Trainer, Path]] = {}

    def run(optimizer: str) -> tuple[Trainer, Path]:
        if optimizer not in made:
            root = tmp_path_factory.mktemp(optimizer)
            with torch.compiler.set_stance(
                "force_eager"
            ):  # torchao compiles its step for each shape
                trainer = make_trainer(root / "whole", of(optimizer))
                trainer.run()
            made[optimizer] = trainer, Path(str(trainer.result.checkpoint))
        return made[optimizer]

    yield run


def live_state(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of everything that a restore may write."""
    state = [
        dict(trainer.model.state_dict()), fp8_state(trainer.model), trainer.optimizer.state_dict(),
        trainer.data.state_dict(), torch.get_rng_state(), trainer.result.step,
    ]  # fmt: skip
    tensors, document = flatten_state(state)
    return {name: t.clone() for name, t in tensors.items()} | {
        "document": torch.tensor(list(str(document).encode()))
    }


def craft(folder: Path, out: Path, change: Callable[[Groups, dict[str, Any], Any], None]) -> None:
    """Save a changed copy of a checkpoint: `change(tensors, documents, state)` works in place,
    `state` is the training's."""
    found = load_folder(folder)
    state = unflatten_state(found.tensors.pop("training"), found.documents.pop("training"))
    change(found.tensors, found.documents, state)
    found.tensors["training"], found.documents["training"] = flatten_state(state)
    save_folder(out, found.tensors, found.documents)


def optimizer_changes() -> Iterator[tuple[str, str, Callable[[Any], None]]]:
    """Optimizer, what is changed, and the change, for each value that each optimizer saves."""
    values = dict(
        adamw=("exp_avg", "exp_avg_sq", "step"), muon=("momentum_buffer",), muon8bit=("codes", "scales"),
        galore=("exp_avg", "exp_avg_sq", "projector", "step"),
        adamw8bit=("exp_avg", "exp_avg codes", "exp_avg scale", "exp_avg qmap", "exp_avg_sq scale", "exp_avg_sq qmap",
        "step"),
        adamwfp8=("exp_avg", "exp_avg codes", "exp_avg_sq codes", "exp_avg_sq scale", "step"),
    )  # fmt: skip
    for optimizer, names in values.items():
        for name in names:
            # A state that lost its only value is that of a parameter which never had a gradient.
            absent = () if len(names) == 1 else ("absent",)
            whole = (
                ("scalar", "text", "extra", *absent) if name == names[-1] else ()
            )  # alike for all values
            signs = ("exp_avg", "exp_avg codes", "exp_avg qmap", "buffer", "projector")
            for kind in (
                "wide",
                "dtype",
                "nan",
                *whole,
                *([] if name.endswith(signs) else ["negative"]),
            ):
                if not (
                    name == "codes" and kind == "negative"
                ):  # of Muon: every INT8 value is one of its momentum
                    yield (
                        optimizer,
                        f"{name} {kind}",
                        lambda saved, name=name, kind=kind: spoil(saved, name, kind),
                    )


def spoil(saved: dict[str, Any], name: str, kind: str) -> None:
    """Change the first state that has `name`, or a tensor of a quantized moment in it ("exp_avg codes")."""
    moment, _, part = name.rpartition(" ")
    states = [state.get(moment, {}) if moment else state for state in saved["state"]]
    name, state = part, next(state for state in states if isinstance(state, dict) and part in state)
    value = state[name]
    if kind == "absent":
        del state[name]
    elif kind == "negative":
        state[name] = torch.full_like(value, -1.0) if isinstance(value, Tensor) else -1
    elif kind == "text":
        state[name] = "1"
    elif kind == "extra":
        state["other"] = torch.zeros(1)
    elif not isinstance(value, Tensor) or kind == "scalar":
        state[name] = (
            torch.zeros(2) if isinstance(value, Tensor) and not value.dim() else torch.tensor(1.5)
        )
    elif kind == "wide":
        state[name] = torch.cat([value.flatten(), value.flatten()])
    elif kind == "dtype":
        state[name] = value.to(torch.int64)
    else:
        state[name] = torch.full_like(value, torch.nan) if value.is_floating_point() else value[:0]


@pytest.mark.parametrize(
    ("optimizer", "what", "change"),
    some(10, optimizer_changes()),
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_optimizer_state_is_checked_before_anything_is_written(
    optimizer: str,
    what: str,
    change: Callable[[Any], None],
    runs: Callable[..., tuple[Trainer, Path]],
    tmp_path: Path,
) -> None:
    trainer, folder = runs(optimizer)
    refused(trainer, folder, tmp_path, lambda tensors, documents, state: change(state["optimizer"]))


def refused(
    trainer: Trainer,
    folder: Path,
    root: Path,
    change: Callable[[Groups, dict[str, Any], Any], None],
) -> None:
    """Restoring a changed checkpoint raises one line and leaves the run as it is."""
    craft(folder, root / "checkpoints" / folder.name, change)
    before, was = live_state(trainer), trainer.checkpoints.root
    trainer.checkpoints.root = root / "checkpoints"
    try:
        with pytest.raises((TeModelsError, ValueError)) as caught:
            trainer.restore()
    finally:
        trainer.checkpoints.root = was
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    after = live_state(trainer)
    assert before.keys() == after.keys()
    assert not [name for name in before if not torch.equal(before[name], after[name])]


def set_state(name: str, value: Any) -> Callable[..., None]:
    return lambda tensors, documents, state: state.__setitem__(name, value)


def scale(group: str, suffix: str, function: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """Change the first tensor of a group whose name has this end."""

    def change(tensors: Groups, documents: dict[str, Any], state: Any) -> None:
        name = next(name for name in tensors[group] if name.endswith(suffix))
        tensors[group][name] = function(tensors[group][name])

    return change


def document(name: str, value: Any, key: str | None = None) -> Callable[..., None]:
    def change(tensors: Groups, documents: dict[str, Any], state: Any) -> None:
        if key is None:
            documents[name] = value
        else:
            documents[name] = {**documents[name], key: value}

    return change


def nested(*places: str | int, value: Any) -> Callable[..., None]:
    def change(tensors: Groups, documents: dict[str, Any], state: Any) -> None:
        for place in places[:-1]:
            state = state[place]
        state[places[-1]] = value

    return change


CRAFTED: dict[str, Callable[..., None]] = {
    "rng of wrong size": set_state("rng", torch.zeros(5, dtype=torch.uint8)),
    "rng of zeros": set_state("rng", torch.zeros(5056, dtype=torch.uint8)),
    "rng is a float": set_state("rng", torch.zeros(5056)),
    "rng is a number": set_state("rng", 5),
    "no optimizer": lambda tensors, documents, state: state.pop("optimizer"),
    "optimizer is a list": set_state("optimizer", []),
    "no masters": nested("optimizer", "masters", value=None),
    "a master less": lambda tensors, documents, state: state["optimizer"]["masters"].pop(),
    "a master is a scalar": nested("optimizer", "masters", 0, value=torch.tensor(1.0)),
    "a master is an integer": nested("optimizer", "masters", 0, value=torch.ones(288, 32, dtype=torch.int32)),
    "a master is nan": nested("optimizer", "masters", 0, value=torch.full((288, 32), torch.nan)),
    "state is a dict": nested("optimizer", "state", value={}),
    "a state less": lambda tensors, documents, state: state["optimizer"]["state"].pop(),
    "dataset is null": set_state("dataset", None),
    "position is text": nested("dataset", "position", value="7"),
    "position is negative": nested("dataset", "position", value=-1),
    "epoch is a float": nested("dataset", "epoch", value=1.5),
    "seed is null": nested("dataset", "seed", value=None),
    "fingerprint is a list": nested("dataset", "fingerprint", value=[1]),
    "result has another field": nested("result", "more", value=1),
    "result is a list": set_state("result", []),
    "step is text": nested("result", "step", value="4"),
    "step is negative": nested("result", "step", value=-4),
    "loss is a list": nested("result", "loss", value=[]),
    "scale is nan": scale("fp8_state", "scaling_fwd.scale", lambda t: t * torch.nan),
    "scale is infinite": scale("fp8_state", "scaling_fwd.scale", lambda t: t / 0),
    "scale is zero": scale("fp8_state", "scaling_bwd.scale", lambda t: t * 0),
    "scale is negative": scale("fp8_state", "scaling_bwd.scale", lambda t: -t),
    "scale is wide": scale("fp8_state", "scaling_fwd.scale", lambda t: torch.ones(4)),
    "scale is a scalar": scale("fp8_state", "scaling_fwd.scale", lambda t: torch.tensor(1.0)),
    "scale is BF16": scale("fp8_state", "scaling_fwd.scale", lambda t: t.bfloat16()),
    "history of 0 rows": scale("fp8_state", "scaling_fwd.amax_history", lambda t: t[:0]),
    "history of one dimension": scale("fp8_state", "scaling_fwd.amax_history", lambda t: t[0]),
    "history is negative": scale("fp8_state", "scaling_bwd.amax_history", lambda t: t - 1e9),
    "weight has a nan": scale("model", "o_proj.weight", lambda t: t.index_fill(1, torch.tensor([3]), torch.nan)),
    "norm weight is infinite": scale("model", "norm.weight", lambda t: t - torch.inf),
    "weight is FP8 with a nan": scale("model", "o_proj.weight", lambda t: (t * torch.nan).to(torch.float8_e4m3fn)),
    "weight is integer": scale("model", "weight", lambda t: t.to(torch.int16)),
    "weight is transposed": scale("model", "o_proj.weight", lambda t: t[:-1]),
    "recipe is text": document("recipe", "delayed"),
    "recipe is null": document("recipe", None),
    "recipe is a list": document("recipe", []),
    "recipe field is a list": document("recipe", [4], "amax_history_len"),
    "history of 1e8 rows": document("recipe", 10**8, "amax_history_len"),
    "margin of 1e9": document("recipe", 10**9, "margin"),
    "config is a list": document("config", []),
    "config is null": document("config", None),
    "300,000 layers": document("config", 300_000, "num_hidden_layers"),
    "1e12 words": document("config", 10**12, "vocab_size"),
    "hidden size is text": document("config", "32", "hidden_size"),
    "intermediate size of 1e18": document("config", 10**18, "intermediate_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_a_refused_restore_leaves_the_run_as_it_was(
    name: str, runs: Callable[..., tuple[Trainer, Path]], tmp_path: Path
) -> None:
    refused(*runs("adamw"), tmp_path, CRAFTED[name])


OF_THE_MODEL = (
    "recipe", "config", "layers", "words", "size of", "scale", "history", "margin", "weight", "hidden",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name in CRAFTED if any(word in name for word in OF_THE_MODEL)]
)
def test_from_pretrained_refuses_the_same(
    name: str, runs: Callable[..., tuple[Trainer, Path]], tmp_path: Path
) -> None:
    craft(runs("adamw")[1], tmp_path / "out", CRAFTED[name])
    with pytest.raises(TeModelsError) as caught:
        CausalLM.from_pretrained(tmp_path / "out", device="cpu")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_unchanged_checkpoint_is_restored(
    optimizer: str, runs: Callable[..., tuple[Trainer, Path]], tmp_path: Path
) -> None:
    trainer, folder = runs(optimizer)
    craft(folder, tmp_path / "checkpoints" / folder.name, lambda tensors, documents, state: None)
    fresh = make_trainer(tmp_path, of(optimizer))
    fresh.restore()
    want, have = live_state(trainer), live_state(fresh)
    assert [name for name in want if not torch.equal(want[name], have[name])] in ([], [f"{4}"])


def test_two_runs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    first, second = (make_trainer(tmp_path, of("adamw")) for _ in range(2))
    refusals: list[str] = []

    def try_second(row: dict[str, Any]) -> None:
        with pytest.raises(OutputInUse) as caught:
            second.run()
        refusals.append(str(caught.value))

    first.on_step = try_second
    first.run()
    assert len(refusals) == 4 and "is in use by process" in refusals[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_an_older_checkpoint_is_offered_where_the_newest_is_damaged(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, of("adamw"))
    trainer.run()
    trainer.result.step = 5
    trainer.save()
    newest = tmp_path / "checkpoints" / "step-00000005"
    for file, content in (("model.safetensors", b"x"), ("config.json", b"{")):
        before = (newest / file).read_bytes()
        (newest / file).write_bytes(content)
        for load in (trainer.restore, lambda: CausalLM.from_pretrained(tmp_path, device="cpu")):
            with pytest.raises(
                TeModelsError,
                match="step-00000004 is whole: move step-00000005 elsewhere to use it",
            ):
                load()
        (newest / file).write_bytes(before)
