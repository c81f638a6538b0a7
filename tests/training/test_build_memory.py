"""Building a model takes the memory of what it leaves, and of about one layer beside it."""

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocated import allocated
from fewer import every
from ranks import as_one_of

from te_models import CausalLM
from te_models.config.model import ModelConfig
from te_models.config.presets import get_preset
from te_models.config.training import TrainConfig
from te_models.distributed.control import Ranks
from te_models.distributed.dtensor import local
from te_models.fp8.primary_weights import is_quantized, quantized_weights
from te_models.training.launch import meshes
from te_models.training.parallel import Parallel

SHAPE: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
    vocab_size=256,
    tie_word_embeddings=False,
)
RANKS = 4
SMALL = 2**14  # bytes of what belongs to no weight, such as numbers of the GEMMs' quantizers


def shape() -> ModelConfig:
    return get_preset("gated-nano", **SHAPE)


def fsdp(device: str = "cpu", frozen: bool = False) -> Parallel:
    """Return the first of several processes that divide a model."""
    config, place = TrainConfig(parallel="fsdp"), torch.device(device)
    ranks = Ranks(dist.group.WORLD)
    return Parallel("fsdp", ranks, place, config=config, frozen=frozen, **meshes(config, place))


def block_bytes() -> int:
    """Return the bytes of the weights of a whole block in BF16."""
    sketch = CausalLM(shape(), recipe="bf16", engine="emulated", device="meta")
    return 2 * sum(parameter.numel() for parameter in sketch.layers[1].parameters())


def held_bytes(model: CausalLM) -> int:
    """Return the bytes of this process's parts of all parameters, FP8 ones a byte each, and of scales."""
    fp8 = quantized_weights(model)
    total = sum(local(tensor).nbytes for tensor in fp8.values())
    for name, parameter in model.named_parameters():
        if f"{name}.data" not in fp8:
            total += local(parameter).nbytes
    return total + sum(tensor.nbytes for tensor in model.copied_fp8_state().values())


def initial_bytes(model: CausalLM) -> int:
    """Return the bytes of this process's parts of the values in BF16 that FP8 weights are made from, which are kept."""
    parameters = filter(is_quantized, model.parameters())
    return sum(2 * local(parameter).numel() for parameter in parameters)


@pytest.mark.parametrize("initialize", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "current", "delayed"])
def test_a_process_builds_its_shards_and_nothing_else(recipe: str, initialize: bool) -> None:
    options = dict(recipe=recipe, fp8_params=recipe != "bf16", initialize=initialize)
    with as_one_of(RANKS):
        shared = fsdp(frozen=True)
        model, most, left = allocated(lambda: shared.build(shape(), **options))
        held = held_bytes(model)
    assert held <= left < held + SMALL
    # Whole values of a weight are drawn at a time.
    assert most < held + block_bytes()


@pytest.mark.parametrize("initialize", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_one_process_builds_its_weights(frozen: bool, initialize: bool) -> None:
    shared = Parallel(frozen=frozen)
    options: dict[str, Any] = dict(recipe="current", fp8_params=True, device="cpu")
    model, most, left = allocated(lambda: shared.build(shape(), **options, initialize=initialize))
    held = held_bytes(model)
    if initialize and not frozen:
        held += initial_bytes(model)
    assert held <= left < held + SMALL
    assert most < held + 2 * block_bytes()


@pytest.mark.parametrize(
    ("kind", "format", "frozen"), every(2, ["none", "fsdp"], ["te", "hf"], [False, True])
)
def test_a_folder_is_read_into_the_final_weights(
    kind: str, format: str, frozen: bool, tmp_path: Path
) -> None:
    CausalLM(shape(), recipe="current", device="cpu").save_pretrained(tmp_path, format=format)
    options: dict[str, Any] = dict(recipe="current", fp8_params=True, device="cpu")
    with as_one_of(RANKS) if kind == "fsdp" else nullcontext():
        shared = fsdp(frozen=frozen) if kind == "fsdp" else Parallel(frozen=frozen)
        model, most, left = allocated(
            lambda: CausalLM.from_pretrained(tmp_path, build=shared.build, **options)
        )
        held = held_bytes(model)
        if not frozen:
            held += initial_bytes(model)
    assert held <= left < held + SMALL
    # The parts of a fused weight, the weight, and what the emulated cast computes on the way, in FP32.
    assert most < held + 2 * block_bytes()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "current", "delayed"])
def test_on_a_gpu_a_process_builds_its_shards_and_nothing_else(recipe: str) -> None:
    options = dict(recipe=recipe, fp8_params=recipe != "bf16", initialize=False)
    with as_one_of(RANKS):
        shared = fsdp("cuda:0", frozen=True)
        # The first model of a process also makes the GEMMs' workspace, of 32 MiB.
        shared.build(shape(), **options)
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = shared.build(shape(), **options)
        most = torch.cuda.max_memory_allocated() - before
        held = held_bytes(model)
    assert most < held + block_bytes()
