"""A small run of the Trainer, and a small model after three steps, whose saves the tests of saved state look at."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TEXT, TINY

from te_models import CausalLM
from te_models.config.presets import get_preset
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.tokenizer import load_tokenizer
from te_models.training.parallel import Parallel
from te_models.training.trainer import Trainer

STEPS = 3
IDS = torch.arange(32).reshape(2, 16)


def make_trainer(out: Path, case: dict[str, Any], shared: Parallel | None = None) -> Trainer:
    """A run that saves after each step, by default of three steps under `delayed`."""
    case = {"recipe": "delayed", "steps": STEPS, **case}
    names = ("recipe", "amax_history_len", "fp8_params", "activation_checkpointing")
    options, lora = {name: case.pop(name) for name in names if name in case}, case.pop("lora", None)
    config = TrainConfig(batch_size=2, seq_len=16, warmup_steps=1, learning_rate=0.01, eval_every=0, save_every=1,
                         keep_last=STEPS, keep_best=False, **case)  # fmt: skip
    if config.optimizer in ("adamw8bit", "adamwfp8"):
        pytest.importorskip("torchao.optim")
    shared = Parallel() if shared is None else shared
    shared = replace(shared, kind=config.parallel, config=config, frozen=lora is not None)
    torch.manual_seed(5)
    model = shared.build(get_preset("gated-nano", **TINY), device="cpu", **options)
    words = load_tokenizer(None)
    sizes: dict[str, Any] = dict(
        batch_size=shared.rows(2), seed=0, rank=shared.data_rank, world_size=shared.data_world
    )
    data = TokenDataset(TEXT[:15], words, 16, **sizes)
    held_out = TokenDataset(TEXT[15:20], words, 16, shuffle=False, **sizes)
    saved = None
    if lora is not None:
        pytest.importorskip("peft")
        from te_models.training.lora_run import LoraRun  # noqa: PLC0415  needs peft
        from te_models.training.settings import LoraSettings  # noqa: PLC0415

        saved = LoraRun(model, LoraSettings(**{"rank": 4, **lora}))
    return Trainer(model, data, held_out.eval_batches(1), config, out, parallel=shared, saved=saved)


def trained(recipe: str, **fields: Any) -> CausalLM:
    """Return a small model after three steps on the CPU."""
    torch.manual_seed(2)
    model = CausalLM.from_preset("gated-nano", recipe=recipe, device="cpu", **{**TINY, **fields})
    for number in range(3):
        loss = model((IDS + number) % 200, labels=IDS).loss
        assert loss is not None
        loss.backward()
    model.zero_grad()
    return model
