"""Checkpoints that commit 3a41a4b wrote under `delayed` load, evaluate to the recorded loss, and resume."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from te_models import CausalLM
from te_models.cli.commands import main
from te_models.fp8.scaling_state import fp8_state

SAVED = Path(__file__).parent / "fixtures" / "commit-3a41a4b"
EXPECTED = json.loads((SAVED / "expected.json").read_text())
IDS = torch.arange(32).reshape(2, 16)


@pytest.mark.parametrize("folder", ["run", "pretrained"])
def test_old_folders_evaluate_to_the_recorded_loss(folder: str) -> None:
    model = CausalLM.from_pretrained(SAVED / folder, engine="emulated", device="cpu").eval()
    with torch.no_grad():
        loss = model(IDS, labels=IDS).loss
    assert loss is not None
    # 1e-4 leaves room for another order of summation.
    assert loss.item() == pytest.approx(EXPECTED["eval_loss_of_arange"], rel=1e-4)
    # The scales come from the checkpoint: in a new model they are 1.
    state = fp8_state(model)
    assert len(state) == 16
    for name, tensor in state.items():
        if name.endswith("scale"):
            assert bool((tensor != 1).any()), name


def test_a_run_resumes_with_the_losses_of_then(tmp_path: Path) -> None:
    shutil.copytree(SAVED / "run", tmp_path / "run")
    options = (
        "--preset gated-nano --hidden-size 16 --intermediate-size 16 --num-hidden-layers 3 --num-attention-heads 1 "
        "--num-key-value-heads 1 --recipe delayed --amax-history-len 4 --num-layers-at-start-in-bf16 1 "
        "--num-layers-at-end-in-bf16 1 --engine emulated --device cpu --steps 6 --save-every 2 --keep-last 3 "
        "--batch-size 2 --seq-len 16 --eval-every 2 --eval-batches 2 --warmup-steps 1 --sample-tokens 0 --resume"
    )
    paths = ["--data", str(SAVED / "data.txt"), "--out", str(tmp_path / "run")]
    assert main(["pretrain", *options.split(), *paths]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row, expected in zip(rows[4:], EXPECTED["steps"], strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-3)
