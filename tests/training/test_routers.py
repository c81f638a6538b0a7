"""The factors of the routers' losses that a run may give."""

from pathlib import Path

import pytest
import torch
from tiny_runs import TINY

from te_models import CausalLM, TrainConfig, Trainer
from te_models.errors import UsageError

IDS = torch.arange(32).reshape(2, 16)


def trainer(tmp_path: Path, preset: str = "gated-moe-nano", **options: float) -> Trainer:
    model = CausalLM.from_preset(preset, recipe="bf16", dtype=torch.float32, device="cpu", **TINY)
    batches = [dict(input_ids=IDS, labels=IDS)]
    return Trainer(
        model, batches, None, TrainConfig(steps=1, learning_rate=0.0, **options), tmp_path
    )


@pytest.mark.parametrize(
    "options", [{}, {"balance_loss": 0.5}, {"z_loss": 0.25}, {"balance_loss": 0.0, "z_loss": 2.0}]
)
def test_the_loss_has_the_factors_of_the_run(options: dict[str, float], tmp_path: Path) -> None:
    run = trainer(tmp_path, **options)
    moe = run.model.config.moe
    assert moe is not None
    before = run.model.config.to_dict()
    row = run.step(iter(run.data))
    plain = run.model.eval()(IDS, labels=IDS).loss
    assert plain is not None
    balance, z = (
        options.get("balance_loss", moe.router_aux_loss_coef),
        options.get("z_loss", moe.router_z_loss_coef),
    )
    expected = plain.item() + balance * row["balance_loss"] + z * row["z_loss"]
    assert row["loss"] == pytest.approx(expected, abs=1e-5)
    assert run.model.config.to_dict() == before, "the model that is saved is as it was"


def test_a_model_without_experts_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="balance_loss and z_loss are for experts, which this model does not have"
    ):
        trainer(tmp_path, "gated-nano", balance_loss=0.1)
