"""A Trainer on batches of the user's own: lists, DataLoaders and generators, with exact resume where it is possible."""

import multiprocessing
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from fewer import chosen, every
from tiny_runs import losses
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from te_models import CausalLM, ModelConfig, TrainConfig, Trainer
from te_models.errors import DataError, UsageError
from te_models.training.metrics import read_metrics

SHAPE: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2
)
Batch = dict[str, Tensor]


def batches(number: int = 5, rows: int = 2, length: int = 16) -> list[Batch]:
    random = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 64, (rows, length), generator=random) for _ in range(number)]
    return [{"input_ids": row, "labels": row} for row in ids]


class Rows(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Batch:
        row = (torch.arange(16) * (index + 3)) % 64
        noise = torch.randint(0, 64, (16,))  # of the data's own random state
        return {"input_ids": torch.where(noise < 8, noise, row), "labels": row}


def generator() -> Iterator[Batch]:
    while True:
        yield from batches()


DATA = {
    "generator": generator,
    "list": batches,
    "tuple": lambda: tuple(batches(3)),
    "shuffled loader": lambda: DataLoader(Rows(), batch_size=3, shuffle=True),
    "loader": lambda: DataLoader(batches(), batch_size=None),
    "workers": lambda: DataLoader(Rows(), batch_size=3, shuffle=True, num_workers=1),
}


def run(
    out: Path, data: Any, evaluated: Any = None, steps: int = 8, resume: bool = False, **fields: Any
) -> Trainer:
    torch.manual_seed(5)
    model = CausalLM(ModelConfig(**SHAPE), device="cpu", engine="emulated", recipe="bf16")
    usual: dict[str, Any] = dict(learning_rate=1e-2, schedule="constant")
    config = TrainConfig(steps=steps, **{**usual, **fields})
    trainer = Trainer(model, data, evaluated, config, out)
    trainer.run(resume=resume)
    return trainer


@pytest.mark.parametrize("kind", every(3, DATA))
def test_a_run_learns_from_any_batches(kind: str, tmp_path: Path) -> None:
    trainer = run(tmp_path, DATA[kind](), steps=30)
    found = losses(tmp_path)
    assert len(found) == 30 and found[-1] < found[0] - 0.3
    assert all("eval_loss" not in row for row in read_metrics(tmp_path / "metrics.jsonl"))
    assert (
        trainer.result.eval_loss != trainer.result.eval_loss
        and trainer.result.tokens_per_second > 0
    )


@pytest.mark.parametrize(
    ("kind", "micro"),
    chosen(
        [("list", 1), ("shuffled loader", 2)],
        every(4, ["list", "loader", "shuffled loader", "tuple", "workers"], [1, 2]),
    ),
)
def test_resume_is_exact(kind: str, micro: int, tmp_path: Path) -> None:
    """Steps 4 to 8 cross the end of an epoch; the numbers that the program itself draws meanwhile do not matter."""
    whole = run(tmp_path / "whole", DATA[kind](), gradient_accumulation=micro)
    run(tmp_path / "parts", DATA[kind](), steps=3, gradient_accumulation=micro)
    torch.rand(7)
    again = run(tmp_path / "parts", DATA[kind](), resume=True, gradient_accumulation=micro)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name, weight in whole.model.named_parameters():
        assert_same_bits(name, again.model.get_parameter(name), weight)


def test_workers_end_with_the_run(tmp_path: Path) -> None:
    """And a program that goes on gets the batches that follow."""
    before = set(multiprocessing.active_children())
    trainer = run(tmp_path / "workers", DATA["workers"](), steps=7)
    assert set(multiprocessing.active_children()) <= before
    wanted = run(tmp_path / "loader", DATA["workers"](), steps=4)
    rows = [[next(one.data)["labels"].tolist() for _ in range(6)] for one in (trainer, wanted)]
    assert rows[0][:3] == rows[1][3:]
    for one in (trainer, wanted):
        one.data.pause()


def test_epochs_shuffle_anew_and_by_the_seed(tmp_path: Path) -> None:
    found = {}
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        trainer = run(
            tmp_path / name, DataLoader(Rows(), batch_size=2, shuffle=True), steps=1, seed=seed
        )
        found[name] = [
            next(trainer.data)["labels"][:, 1].tolist() for _ in range(14)
        ]  # after the first of 5
    assert found["one"] == found["same"] != found["other"]
    assert found["one"][4:9] != found["one"][9:14]


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (generator, generator, "a generator, which has one pass, so the run cannot be resumed"),
        (batches, lambda: iter(batches()), "which has one pass"),
        (batches, lambda: batches()[::-1], "other batches than in the saved run"),
        (batches, lambda: batches(2), "other batches than in the saved run"),
    ],
)
def test_data_that_cannot_go_back_is_refused(
    then: Any, now: Any, message: str, tmp_path: Path
) -> None:
    run(tmp_path, then(), steps=4)
    before = losses(tmp_path)
    with pytest.raises(UsageError, match=message):
        run(tmp_path, now(), resume=True)
    assert losses(tmp_path) == before


GOOD = batches(1)[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "the dataset is a int"),
        (GOOD, "the dataset is a dict"),
        ([], "the data has no batch"),
        (iter(batches(2)), "the data ended after 2 batches"),
        ([GOOD["input_ids"]], "batch 1 is a Tensor"),
        ([GOOD, {"input_ids": GOOD["input_ids"]}], "batch 2 has no 'labels'"),
        ([{**GOOD, "position_ids": GOOD["labels"]}], "batch 1 has 'position_ids'"),
        (
            [{**GOOD, "labels": GOOD["labels"].tolist()}],
            "labels is no tensor of the shape of input_ids",
        ),
        ([{**GOOD, "labels": GOOD["labels"][:1]}], "labels is no tensor of the shape of input_ids"),
        (
            [{name: tensor[0] for name, tensor in GOOD.items()}],
            r"input_ids has shape \[16\]: give .* \[B, S\]",
        ),
    ],
)
def test_a_mistake_in_the_data_is_named(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((DataError, UsageError), match=message):
        run(tmp_path, data)


def test_evaluation_batches_may_be_any_iterable(tmp_path: Path) -> None:
    results = [
        run(tmp_path / str(number), batches(), evaluated, eval_every=3).result.eval_loss
        for number, evaluated in enumerate(
            (batches(2), iter(batches(2)), DataLoader(batches(2), batch_size=None))
        )
    ]
    assert len(set(results)) == 1 and results[0] == results[0]
    with pytest.raises(DataError, match="evaluation batch 1 has no 'labels'"):
        run(tmp_path / "x", batches(), [{"input_ids": GOOD["input_ids"]}])
    with pytest.raises(UsageError, match="patience=2 counts evaluations: give eval_batches"):
        run(tmp_path / "x", batches(), patience=2)


def test_the_speed_counts_the_tokens_that_there_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, tokens = iter((0.5, 0.25, 2.0)), 2 * 3 * 10
    monkeypatch.setattr("te_models.training.trainer.elapsed", lambda start, end: next(seconds))
    result = run(tmp_path, batches(2, rows=3, length=10), steps=3, gradient_accumulation=2).result
    found = [row["tokens_per_second"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert found == [2 * tokens, 4 * tokens, tokens / 2] and result.tokens_per_second == 2 * tokens


def test_subclasses_of_trainer_and_config(tmp_path: Path) -> None:
    class Weighted(Trainer):
        def __init__(self, *args: Any, factor: float, **options: Any) -> None:
            super().__init__(*args, **options)
            self.factor = factor

        def _forward_backward(self, micro_batches: list[Batch]) -> Tensor:
            return self.factor * super()._forward_backward(micro_batches)

    class Plain(ModelConfig):
        pass

    @dataclass(eq=False, kw_only=True)
    class Noted(ModelConfig):
        note: str = "of mine"

    assert Noted(**SHAPE, note="x").note == "x"
    with pytest.raises(
        UsageError, match="unknown field .num_layers. of Plain: did you mean 'num_hidden_layers'"
    ):
        Plain(**SHAPE, num_layers=3)
    for kind in (Plain, Noted):
        model = CausalLM(kind(**SHAPE), device="cpu", engine="emulated", recipe="bf16")
        Weighted(
            model, batches(), None, TrainConfig(steps=2), tmp_path / kind.__name__, factor=2.0
        ).run()
        model.save_pretrained(tmp_path / "saved" / kind.__name__)
        loaded = CausalLM.from_pretrained(
            tmp_path / "saved" / kind.__name__, device="cpu", engine="emulated"
        )
        ids = GOOD["input_ids"]
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_size_that_the_batches_do_not_have_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"seq_len=32 has no effect: .* has 2 x 16 tokens") as said:
        run(tmp_path / "other", batches(), steps=2, batch_size=2, seq_len=32)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tmp_path / "same", batches(), steps=2, batch_size=2, seq_len=16)
        run(tmp_path / "usual", batches(), steps=2)


def test_a_batch_that_teaches_nothing_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="a batch of your own has no label that counts"):
        run(tmp_path, [{**GOOD, "labels": torch.full_like(GOOD["labels"], -100)}], steps=1)


@pytest.mark.parametrize("model", ["gated-nano", torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_one_line(model: Any, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=rf"the model is a {type(model).__name__}: give a CausalLM, or what add_lora",
    ):
        Trainer(model, batches(), None, TrainConfig(steps=1), tmp_path)
