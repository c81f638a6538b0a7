"""Many processes, one a device: DDP, FSDP2 and tensor parallelism of PyTorch round an unchanged CausalLM.

torchrun starts the processes; `parallel` joins them. What the training loop must know of it is in `Parallel`, whose
default is a process alone: how the model is built and wrapped, which rank takes which rows, and what is summed over whom.

* "ddp": every process has the whole model; PyTorch's DistributedDataParallel averages gradients during backward.
* "fsdp": every block is one `fully_shard` unit and the rest of the model another. The model is made on the meta device,
  cut up, and only then given memory, so no process ever holds more than its share and one block. FP32 masters and
  moments are cut up as the parameters are (te_models.optim.master makes them from those).
* "tp", "fsdp+tp": te_models.model.tensor_parallel splits each layer; FSDP cuts up what is left of it over the other dimension.

FP8: with delayed scaling the amaxes of all processes are reduced (`CausalLM.amax_group`), so the scales are equal
everywhere, as gathering FP8 shards needs; the other recipes scale each process's own activations, and weights after they
are gathered, so nothing has to be reduced.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from te_models.causal_lm import CausalLM
from te_models.config.model import ModelConfig
from te_models.config.training import TrainConfig
from te_models.distributed.control import Ranks
from te_models.distributed.dtensor import local
from te_models.errors import LostPeer
from te_models.fp8.primary_weights import make_shards
from te_models.optim.parameter_owners import Owners

CONTROL_TIMEOUT = timedelta(minutes=30)  # for what may wait for a disk


@dataclass
class Parallel:
    """How the processes of a run share its work; as it is by default, one process does everything."""

    kind: str = "none"
    ranks: Ranks = field(default_factory=Ranks)
    device: torch.device | None = None
    dp: DeviceMesh | None = None  # over which batches are split
    tp: DeviceMesh | None = None  # over which layers are split
    config: TrainConfig = field(default_factory=TrainConfig)

    @property
    def sharded(self) -> bool:
        """Whether no process holds a whole model, so that all of them must take part in whatever runs it."""
        return self.kind in ("fsdp", "tp", "fsdp+tp")

    @property
    def keeps_weights(self) -> bool:
        """Whether the micro-batches of a step find the weights as the first one made or gathered them."""
        return not self.sharded or (self.kind == "fsdp" and not self.config.reshard_after_forward)

    @property
    def data_rank(self) -> int:
        """Which share of every batch this process takes."""
        return self.dp.get_local_rank() if self.dp is not None else 0

    @property
    def data_world(self) -> int:
        """Into how many shares a batch is split."""
        return self.dp.size() if self.dp is not None else 1

    def describe(self) -> str:
        """How the run is shared, in a few words; empty for one process."""
        split = [f"batches in {self.data_world}"] if self.data_world > 1 else []
        split += [f"layers in {self.tp.size()}"] if self.tp is not None else []
        return f"{self.ranks.world}, {self.kind} ({', '.join(split) or 'nothing split'})" if self.dp or self.tp else ""

    def rows(self, batch_size: int) -> int:
        """This process's sequences of a batch; a ValueError if they cannot be shared out evenly."""
        if batch_size % self.data_world:
            raise ValueError(
                f"batch_size={batch_size} sequences cannot be shared by {self.data_world} processes: give a multiple of "
                f"{self.data_world} (it counts the sequences of all processes)"
            )
        return batch_size // self.data_world

    def build(self, config: ModelConfig, *, initialize: bool = True, **options: Any) -> CausalLM:
        """A CausalLM, cut up where FSDP is on; arguments as CausalLM's."""
        if self.device is not None:
            options["device"] = self.device
        fsdp = self.kind.startswith("fsdp")
        if self.ranks.world > 1 and options.get("fp8_params") and self.kind != "fsdp":
            raise ValueError(
                f"FP8 primary weights are for one process or --parallel fsdp, not {self.kind}: leave out --fp8-params"
            )
        if self.tp is not None:
            options |= dict(tp_mesh=self.tp, sequence_parallel=self.config.sequence_parallel)
        model = CausalLM(config, **options, initialize=initialize and not fsdp, materialize=not fsdp)
        if self.ranks.world > 1:
            model.amax_group = dist.group.WORLD
        if fsdp:
            shard(model, self)
            model.to_empty(device=self.device)  # type: ignore[arg-type]
            model.tp.mark(model)
            if model.fp8_params:
                assert self.dp is not None
                make_shards(model, self.dp.get_group())
            if initialize:
                model.init_weights()
        return model

    def owners(self) -> Callable[[list[nn.Parameter]], Owners] | None:
        """What lets an optimizer that needs whole tensors work on parameters in pieces; None where nothing has to."""
        if self.kind != "fsdp" or self.config.optimizer == "adamw":
            return None
        assert self.dp is not None
        return lambda parameters: Owners(parameters, self.dp.get_group(), self.ranks)  # type: ignore[union-attr]

    def wrap(self, model: CausalLM) -> Callable[..., Any]:
        """What a training step calls instead of `model`."""
        if self.kind != "ddp":
            return model
        assert self.dp is not None
        return DistributedDataParallel(model, process_group=self.dp.get_group(), gradient_as_bucket_view=True)

    @contextlib.contextmanager
    def micro_batch(self, model: Callable[..., Any], last: bool) -> Iterator[None]:
        """Round forward and backward of one micro-batch: gradients travel with the last one of a step alone."""
        if isinstance(model, DistributedDataParallel) and not last:
            with model.no_sync():
                yield
            return
        if isinstance(model, FSDPModule):
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            if self.keeps_weights:
                model.set_reshard_after_backward(last)
        yield

    def weights(self, counts: Sequence[int], device: torch.device) -> list[Tensor] | list[float]:
        """By what to multiply each micro-batch's mean loss, so that the mean over processes is the mean over tokens.

        `counts` are the tokens that count in this process's part of each. All ones where the parts have as many.
        """
        if self.data_world == 1:
            return [1.0] * len(counts)
        assert self.dp is not None
        own = torch.tensor(counts, dtype=torch.float64)
        own = (own.pin_memory() if device.type == "cuda" else own).to(device, non_blocking=True)  # nothing waits for it
        total = own.clone()
        dist.all_reduce(total, group=self.dp.get_group())
        return list((own * self.data_world / total.clamp(min=1)).float())

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the shares of a batch."""
        if self.data_world > 1:
            assert self.dp is not None
            dist.all_reduce(values, group=self.dp.get_group())
        return values

    def mean_and_any(self, value: Tensor, flag: bool) -> tuple[Tensor, Tensor]:
        """The mean of a scalar over all processes, and how many raised the flag, as scalars on the device of `value`."""
        both = torch.stack([value, torch.full_like(value, flag)])
        if self.ranks.world > 1:
            dist.all_reduce(both)
        return both[0] / self.ranks.world, both[1]

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of the whole gradient, which lies in pieces: squares summed over all processes, each element once."""
        data, layers = self.data_world, self.tp.size() if self.tp is not None else 1
        held = [p for p in parameters if p.grad is not None]
        gradients = [local(p.grad) for p in held if p.grad is not None]
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        copies = [
            (1 if isinstance(p, DTensor) else data) * (1 if getattr(p, "tp_sharded", False) else layers) for p in held
        ]
        squares = torch.stack([norm.square() / count for norm, count in zip(norms, copies, strict=True)]).sum()
        dist.all_reduce(squares)
        return squares.sqrt()


def shard(model: CausalLM, parallel: Parallel) -> None:
    """Cut `model` up over the data-parallel processes: each block a unit of FSDP2, and the rest another."""
    config = parallel.config
    policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, config.reduce_dtype))
    options: dict[str, Any] = dict(mesh=parallel.dp, mp_policy=policy)
    blocks: list[Any] = list(model.layers)
    for block in blocks:
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # which nobody changes in place
    for number, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        if config.prefetch_blocks:
            block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + config.prefetch_blocks])
            block.set_modules_to_backward_prefetch(blocks[max(0, number - config.prefetch_blocks) : number][::-1])
    assert parallel.device is not None
    for module in model.modules():
        if isinstance(module, FSDPModule) and parallel.device.type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
        if isinstance(module, model.te.Linear):
            # Transformer Engine then keeps no FP8 copy of a weight for backward but makes it anew from the gathered one,
            # which is what resharding is for. Left unsharded, weights may as well keep their copies.
            module._is_fsdp2 = config.reshard_after_forward  # type: ignore[assignment]


def reshard(model: nn.Module) -> None:
    """Let go of weights that a forward without backward left gathered, so that the parameters are the pieces again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def launched() -> int:
    """How many processes torchrun started; 0 without it."""
    return int(os.environ.get("WORLD_SIZE", 0))


def restarts() -> int:
    """How often torchrun has restarted this job after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def check_launch(config: TrainConfig) -> None:
    """Raise a ValueError where `--parallel` and the way the program was started do not go together."""
    world, size = launched(), config.tensor_parallel_size
    if config.parallel == "none" and world > 1:
        raise ValueError(f"torchrun started {world} processes: add --parallel ddp, fsdp, tp or fsdp+tp")
    if config.parallel != "none" and not world:
        raise ValueError(
            f"--parallel {config.parallel} is for several processes: start it as torchrun --nproc-per-node N -m te_models ..."
        )
    if config.parallel == "fsdp+tp" and (size < 2 or world % size):
        raise ValueError(
            f"--parallel fsdp+tp on {world} processes needs --tensor-parallel-size, a divisor of {world} > 1"
        )
    if config.parallel in ("tp", "fsdp+tp") and config.optimizer != "adamw":
        raise ValueError(
            f"--parallel {config.parallel} divides each layer, which is possible for adamw alone: leave out --optimizer, or "
            "choose --parallel fsdp or ddp"
        )
    if config.parallel == "fsdp" and config.optimizer == "te-adam":
        raise ValueError("te-adam updates whole parameters alone: with --parallel fsdp choose another --optimizer")
    if config.parallel in ("fsdp", "tp", "fsdp+tp") and config.optimizer_offload:
        raise ValueError(
            f"--parallel {config.parallel} keeps the optimizer's state on the device: leave out --optimizer-offload, or choose "
            "--parallel ddp"
        )
    if size and config.parallel != "fsdp+tp":
        raise ValueError("--tensor-parallel-size goes with --parallel fsdp+tp alone; tp uses all processes")


@contextlib.contextmanager
def parallel(config: TrainConfig, device: torch.device | str | None = None) -> Iterator[Parallel]:
    """Join the processes that torchrun started, for the time of a run.

    Args:
        config: the run's; `parallel` and the fields after it are used.
        device: "cpu" trains on processors over gloo even where there are GPUs; None: this process's own GPU, if any.

    Raises:
        ValueError: the processes do not fit what was asked for.
        LostPeer: inside, another process died or did not answer for `config.collective_timeout` seconds.
    """
    check_launch(config)
    if config.parallel == "none":
        yield Parallel(config=config)
        return
    own = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if own.type == "cuda":
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.collective_timeout)
    try:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        # torchrun (2.13) keeps one store over all restarts, where a start would read the addresses of the one before it.
        store = dist.PrefixStore(f"start-{restarts()}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        control: Any = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        ranks = Ranks(control)
        yield Parallel(config.parallel, ranks, own, *meshes(config, own), config)
    except RuntimeError as error:
        if lost_peer(error):
            raise LostPeer(
                f"another process of this job died or gave no answer for {config.collective_timeout} s (its own message is "
                f"above, or on its node); the run ends here: start the same command with --resume ({_one_line(error)})"
            ) from error
        raise
    dist.destroy_process_group()


def meshes(config: TrainConfig, device: torch.device) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The data-parallel and the tensor-parallel dimension of all processes."""
    world = dist.get_world_size()
    if config.parallel == "tp":
        return None, init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    if config.parallel == "fsdp+tp":
        shape = (world // config.tensor_parallel_size, config.tensor_parallel_size)
        both = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
        return both["dp"], both["tp"]
    return init_device_mesh(device.type, (world,), mesh_dim_names=("dp",)), None


def lost_peer(error: BaseException) -> bool:
    """Whether an error of torch.distributed says that another process is gone."""
    signs = (
        "Connection closed by peer",
        "Connection reset",
        "Broken pipe",
        "Timed out waiting",
        "timed out",
        "timeout",
    )
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def _one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
