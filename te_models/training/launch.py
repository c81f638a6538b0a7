"""Join the processes that torchrun started: check the options, connect, split the ranks, and name a lost peer."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from te_models.config.training import DIVISIONS, TrainConfig
from te_models.device.choice import choose_device
from te_models.distributed.control import Ranks
from te_models.distributed.environment import check_place, number
from te_models.errors import LostPeer, UsageError
from te_models.files.atomic import first_line
from te_models.files.formats import Fields
from te_models.optim import IN_BACKWARD, resolve_options
from te_models.training.parallel import Parallel

CONTROL_TIMEOUT = timedelta(minutes=30)  # for messages that may wait for a disk


def restarts() -> int:
    """Return how often torchrun has restarted this job after a failure."""
    return number("TORCHELASTIC_RESTART_COUNT", 0)


@contextlib.contextmanager
def parallel(
    config: TrainConfig, device: torch.device | str | None = None, *, frozen: bool = False
) -> Iterator[Parallel]:
    """Join the processes that torchrun started, for the duration of a run.

    Args:
        config: `parallel` and the fields after it are used.
        device: "cpu" trains on CPUs, over gloo, even where there are GPUs; None: this process's own GPU, if any.
        frozen: whether the run trains adapters of a model whose own weights stay as they are.

    Yields:
        the run's Parallel: `build` for CausalLM, `data_rank` and `data_world` for open_data, itself for the Trainer.

    Raises:
        ValueError: the options do not fit each other or the number of processes.
        LostPeer: inside, another process died or did not answer for `config.collective_timeout` seconds.
    """
    if not isinstance(config, TrainConfig):
        raise UsageError(
            f"config is a {type(config).__name__}: give te_models.TrainConfig(parallel=...)"
        )
    config = choose_parallel(config)
    check_launch(config, frozen)
    if config.parallel == "none":
        alone = None if device is None else choose_device(device)
        yield Parallel(config=config, device=alone, frozen=frozen)
        return
    chosen_device = choose_device(device)
    check_place(gpus=torch.cuda.device_count() if chosen_device.type == "cuda" else 0)
    if chosen_device.type == "cuda":
        # torchrun numbers the processes of a node, which has a GPU for each.
        chosen_device = torch.device("cuda", number("LOCAL_RANK", 0))
        torch.cuda.set_device(chosen_device)
    backend = "cpu:gloo,cuda:nccl" if chosen_device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.collective_timeout)
    try:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        # torchrun (2.13) has one store for all restarts, in which a restart would find the old addresses.
        store = dist.PrefixStore(f"start-{restarts()}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        # A group of its own, since control messages wait longer than the run's collectives may.
        control: Any = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        yield Parallel(
            kind=config.parallel,
            ranks=Ranks(control),
            device=chosen_device,
            config=config,
            frozen=frozen,
            **meshes(config, chosen_device),
        )
    except RuntimeError as error:
        if lost_peer(error):
            reason = first_line(error)[:160]
            raise LostPeer(
                f"another process of this job died or gave no answer for {config.collective_timeout} s (its own "
                f"message is above, or on its node); the run ends here: start the same command with --resume ({reason})"
            ) from error
        raise
    dist.destroy_process_group()


def choose_parallel(config: TrainConfig, recorded: bool = False, lora: bool = False) -> TrainConfig:
    """Return `config` with parallel="auto" resolved: fsdp, or ddp where the optimizer or `lora` needs whole parameters.

    With `recorded` the value comes from a file: if it does not fit the number of processes, it counts as
    "auto", so that one file serves any number.
    """
    world = number("WORLD_SIZE", 0)
    # One process with a kind of parallelism from the file, or several without one.
    if recorded and (config.parallel == "none") == (world > 1):
        undivided: Fields = {name: getattr(TrainConfig, name) for name in DIVISIONS}
        config = dataclasses.replace(config, parallel="auto", **undivided)
    if lora and config.parallel in ("tp", "fsdp+tp"):
        raise UsageError(
            f"--lora adapts whole layers: use --parallel ddp, fsdp or fsdp+ep, not {config.parallel}"
        )
    if config.parallel != "auto":
        return config
    kind = "fsdp"
    if world <= 1:
        kind = "none"
    elif lora or config.optimizer_offload:
        kind = "ddp"
    return dataclasses.replace(config, parallel=kind)


def check_launch(config: TrainConfig, frozen: bool = False) -> None:
    """Raise a UsageError if the options do not fit each other or the way the program was started.

    `frozen`: whether the run trains adapters of a model whose own weights stay as they are.
    """
    kind = config.parallel
    world = number("WORLD_SIZE", 0)
    tensor = config.tensor_parallel_size
    experts = config.expert_parallel_size
    if kind == "none" and world > 1:
        # Each process would train a model of its own, in the same folder.
        raise UsageError(
            f"torchrun started {world} processes: add --parallel ddp, fsdp, tp, fsdp+tp or fsdp+ep"
        )
    if kind != "none" and not world:
        raise UsageError(
            f"--parallel {kind} is for several processes: start it as torchrun --nproc-per-node N -m te_models ..."
        )
    if kind == "fsdp+tp" and (tensor < 2 or world % tensor):
        raise UsageError(
            f"--parallel fsdp+tp on {world} processes needs --tensor-parallel-size, a divisor of {world} > 1"
        )
    if experts and kind != "fsdp+ep":
        raise UsageError(
            f"--expert-parallel-size is for --parallel fsdp+ep, not {kind}: leave it out, or choose that"
        )
    if experts and (world % experts or experts < 2):
        raise UsageError(
            f"--expert-parallel-size {experts} has to be a divisor of the {world} processes, and more than 1: change it"
        )
    context = config.context_parallel_size
    if context and kind not in ("ddp", "fsdp"):
        raise UsageError(
            f"--context-parallel-size is for --parallel ddp and fsdp, not {kind}: leave it out, or choose one of them"
        )
    if context and (world % context or context < 2):
        raise UsageError(
            f"--context-parallel-size {context} on {world} processes: give a divisor of {world} above 1"
        )
    if config.fp8_dispatch and kind != "fsdp+ep":
        raise UsageError(
            "--fp8-dispatch sends tokens to the experts of other processes, which is only for --parallel fsdp+ep: "
            "leave it out"
        )
    if kind in ("tp", "fsdp+tp", "fsdp+ep") and config.optimizer != "adamw":
        raise UsageError(
            f"--parallel {kind} splits each layer, which only adamw supports: leave out --optimizer, or choose "
            "--parallel fsdp or ddp"
        )
    options = resolve_options(config.optimizer, config.optimizer_options)
    if kind != "none" and options.get(IN_BACKWARD):
        # A projection of a sum is not the sum of projections by projectors that each process computed from its own
        # gradient.
        raise UsageError(
            f"{IN_BACKWARD}=true projects gradients before --parallel {kind} can sum them over the processes: leave it "
            "out, or use one process"
        )
    if kind in ("fsdp", "tp", "fsdp+tp", "fsdp+ep") and config.optimizer_offload:
        raise UsageError(
            f"--parallel {kind} stores the optimizer's state on the device: leave out --optimizer-offload, or choose "
            "--parallel ddp"
        )
    if kind in ("ddp", "tp"):
        option = ""
        if config.reduce_dtype != "float32":
            option = f"--reduce-dtype {config.reduce_dtype}"
        elif not config.reshard_after_forward:
            option = "--no-reshard-after-forward"
        elif config.prefetch_blocks != 1:
            option = f"--prefetch-blocks {config.prefetch_blocks}"
        if option:
            raise UsageError(
                f"{option} is for --parallel fsdp, fsdp+tp and fsdp+ep: leave it out, or choose one of them"
            )
    if frozen and kind.startswith("fsdp") and config.reduce_dtype == "float8":
        raise UsageError(
            "--reduce-dtype float8 is for gradients that FSDP2 sums, which adapters' are not: leave it out"
        )
    if config.sequence_parallel and kind not in ("tp", "fsdp+tp"):
        raise UsageError("--sequence-parallel is only for --parallel tp and fsdp+tp: leave it out")
    if tensor and kind != "fsdp+tp":
        raise UsageError(
            "--tensor-parallel-size is only for --parallel fsdp+tp: leave it out; tp uses all processes"
        )


def meshes(config: TrainConfig, device: torch.device) -> Fields:
    """Return the meshes of one dimension that `config` asks for, by the fields of Parallel: "dp", "tp", "ep"...

    Each has this process and those that it works with in that dimension.
    """
    world = dist.get_world_size()
    sizes = {"dp": world}
    if config.parallel == "tp":
        sizes = {"tp": world}
    elif config.parallel == "fsdp+tp":
        sizes = {"dp": world // config.tensor_parallel_size, "tp": config.tensor_parallel_size}
    dimensions = _dimensions(device, sizes)
    # The processes that share experts have different parts of each batch.
    if config.parallel == "fsdp+ep":
        size = config.expert_parallel_size or world
        dimensions |= _dimensions(device, {"replicas": world // size, "ep": size})
    if config.context_parallel_size:
        size = config.context_parallel_size
        dimensions["cp"] = _dimensions(device, {"rows": world // size, "cp": size})["cp"]
    return dimensions


def _dimensions(device: torch.device, sizes: Mapping[str, int]) -> dict[str, DeviceMesh]:
    """Return the dimensions of a mesh over all processes, by name; the last one has neighbouring processes."""
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {name: mesh[name] for name in sizes}


def lost_peer(error: BaseException) -> bool:
    """Return whether an error of torch.distributed means that another process is gone."""
    signs = (
        "Connection closed by peer",
        "Connection reset",
        "Broken pipe",
        "timed out",
        "Timed out",
        "timeout",
    )
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)
