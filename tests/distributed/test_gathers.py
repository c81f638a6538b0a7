"""Gathers of FSDP2 that a backward pass has begun and no block waited for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from te_models import CausalLM, ModelConfig
from te_models.config.training import TrainConfig
from te_models.device.determinism import deterministic
from te_models.distributed.control import Ranks
from te_models.distributed.gathers import wait_for_gathers
from te_models.fp8.scaling_state import fp8_state
from te_models.model import calibration
from te_models.training import step_passes
from te_models.training.launch import meshes
from te_models.training.parallel import Parallel
from te_models.training.trainer import Trainer

SHAPE: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=2,
    max_position_embeddings=64,
)
LARGER = SHAPE | dict(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=512,
)


class Sharded(nn.Module):
    """A model whose FSDP2 gathers in `stream`."""

    def __init__(self, stream: object) -> None:
        super().__init__()
        self.stream = stream

    def _get_fsdp_state(self) -> SimpleNamespace:
        return SimpleNamespace(_comm_ctx=SimpleNamespace(all_gather_stream=self.stream))


def test_models_without_streams_have_no_gathers() -> None:
    for model in (nn.Linear(2, 2), Sharded(None), Sharded(object())):
        wait_for_gathers(model)


def test_calibrations_and_micro_batches_wait_after_each_backward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits: list[nn.Module] = []
    monkeypatch.setattr(calibration, "wait_for_gathers", waits.append)
    monkeypatch.setattr(step_passes, "wait_for_gathers", waits.append)
    ids = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(0))
    batches = iter([{"input_ids": ids, "labels": ids}] * 6)
    model = CausalLM(ModelConfig(**SHAPE), recipe="delayed", device="cpu")
    config = TrainConfig(steps=1, batch_size=1, seq_len=16, gradient_accumulation=3, eval_every=0)
    trainer = Trainer(model, batches, None, config, tmp_path)
    data = trainer.passes.calibrated(batches)
    assert waits == [model] * 3
    trainer.step(data)
    assert waits == [model] * 6


def written_late(wait: Any) -> bool:
    """Return whether `wait(stream)` lets the current stream see what another stream writes after a while."""
    stream = torch.cuda.Stream()
    value = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
        value.fill_(1.0)
    wait(stream)
    return bool(value.clone().item() == 1.0)


@pytest.mark.gpu
def test_the_current_stream_waits_for_gathers() -> None:
    assert written_late(lambda stream: wait_for_gathers(Sharded(stream)))


@pytest.mark.gpu
def test_a_stream_of_the_accelerator_does_not_wait_for_events_of_cuda() -> None:
    """PyTorch relies on it (te_models.distributed.gathers, which can go once this test fails)."""
    assert not written_late(
        lambda stream: torch.accelerator.current_stream().wait_event(stream.record_event())
    )


def calibrated_scales(build: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the scales of inputs and weights after a calibration on three batches, the same for each rank."""
    torch.manual_seed(0)
    model = build(ModelConfig(**LARGER), recipe="delayed", device=device)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(3):
        ids = torch.randint(0, 1024, (4, 512), generator=generator).to(device)
        batches.append({"input_ids": ids, "labels": ids})
    model.train()
    model.calibrate(*batches)
    found = {}
    for name, tensor in fp8_state(model, ("scaling_fwd",)).items():
        if name.endswith(".scale"):
            found[name] = tensor.clone()
    model.te.FP8GlobalStateManager.reset()
    return found


def compare_calibrations(rank: int, folder: str) -> None:
    """With blocks in BF16 before the first one in FP8, backward passes of a calibration leave a gather behind."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    config = TrainConfig(parallel="fsdp")
    shared = Parallel(
        "fsdp",
        Ranks(dist.new_group(backend="gloo")),
        device,
        config=config,
        **meshes(config, device),
    )
    with deterministic():
        one = calibrated_scales(CausalLM, device)
        for _ in range(4):
            divided = calibrated_scales(shared.build, device)
            assert divided.keys() == one.keys() and len(one) > 0
            for name, scale in one.items():
                torch.testing.assert_close(divided[name], scale, rtol=1e-2, atol=0, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_calibrations_over_divided_weights_have_the_scales_of_whole_ones(tmp_path: Path) -> None:
    run_ranks(compare_calibrations, tmp_path, 2, "nccl")
