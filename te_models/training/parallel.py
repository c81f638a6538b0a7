"""Data parallelism, FSDP2 and tensor parallelism of PyTorch around an unchanged CausalLM, one process per device.

`Parallel` is all that the training loop knows about other processes: how the model is built and wrapped, which rows of
a batch this process gets, and over which ranks to sum. Its default is a single process.

* "ddp": every process has the whole model; gradients are summed in buckets during backward, as PyTorch's
  DistributedDataParallel averages them.
* "fsdp": every block is a `fully_shard` unit and the rest of the model another. The model is built on the meta device,
  sharded, and only then given memory, so no process ever has more than its shards and one block. FP32 masters and
  optimizer state are sharded as the parameters are (te_models.optim.master derives them).
* "fsdp+ep": as "fsdp", but te_models.model.expert_parallel divides the experts of each layer, and FSDP shards each of
  them only over the processes that have it.
* "tp", "fsdp+tp": te_models.model.tensor_parallel splits each layer; FSDP shards the result over the other dimension.

A gradient has the size that it has in one process with all tokens of the step (`Parallel.loss_weights`), so that FP8
scales mean the same for any number of processes.

FP8: delayed scaling reduces the amaxes of all processes (`CausalLM.amax_group`), so scales are equal everywhere, as
gathering FP8 shards needs; an expert's are reduced over the processes that have it. The other recipes scale each
process's own activations, and weights after they are gathered, so nothing has to be reduced.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from te_models.causal_lm import CausalLM
from te_models.config.model import ModelConfig
from te_models.config.training import TrainConfig
from te_models.distributed.control import Ranks
from te_models.distributed.dtensor import local
from te_models.errors import UsageError
from te_models.fp8.primary_weights import make_shards
from te_models.model.dtypes import DTYPES
from te_models.optim import OPTIMIZERS
from te_models.optim.gradients import Gradients, GradientSums, Norm, gradient_norm, tensor_norms
from te_models.optim.parameter_owners import Owners
from te_models.training.fp8_reduce import FP8ReduceScatter


@dataclass
class Parallel:
    """The division of a run's work among its processes; by default there is one process.

    Attributes:
        kind: "none", "ddp", "fsdp", "tp", "fsdp+tp" or "fsdp+ep".
        ranks: control messages between all processes.
        device: this process's device; None: CausalLM's default.
        dp: the ranks that split each batch, by its rows and by the tokens of a row.
        tp: the ranks that split each layer.
        ep: the ranks that divide the experts of each layer.
        replicas: the ranks that have the same experts.
        cp: the ranks that split the tokens of each row, next to each other in `dp`.
        config: the run's options; `parallel` and the fields after it are used.
        frozen: whether the model's weights are not trained (LoRA).
        sharded: whether no process has a whole model, so that all of them must take part in whatever runs it.
        uses_fsdp: whether FSDP2 shards the parameters.
        retains_weights: whether the weights that the first micro-batch of a step quantized or gathered serve the
            others too.
        data_world: the number of shares of the rows of a batch.
        parts: the number of shares of a batch by rows and tokens.
    """

    kind: str = "none"
    ranks: Ranks = field(default_factory=Ranks)
    device: torch.device | None = None
    dp: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    ep: DeviceMesh | None = None
    replicas: DeviceMesh | None = None
    cp: DeviceMesh | None = None
    config: TrainConfig = field(default_factory=TrainConfig)
    frozen: bool = False
    sharded: bool = field(init=False)
    uses_fsdp: bool = field(init=False)
    retains_weights: bool = field(init=False)
    data_world: int = field(init=False)
    parts: int = field(init=False)

    def __post_init__(self) -> None:
        self.sharded = self.kind not in ("none", "ddp")
        self.uses_fsdp = self.kind.startswith("fsdp")
        # Weights that stay gathered between micro-batches need not be gathered, nor quantized, again.
        resident = not self.config.reshard_after_forward
        self.retains_weights = not self.sharded or (self.kind in ("fsdp", "fsdp+ep") and resident)
        self.parts = self.dp.size() if self.dp is not None else 1
        self.data_world = self.parts if self.cp is None else self.parts // self.cp.size()

    @property
    def data_rank(self) -> int:
        """The number of this process's share of the rows of every batch."""
        return self.part * self.data_world // self.parts

    @property
    def part(self) -> int:
        """The number of this process's share of every batch, by rows and tokens."""
        return self.dp.get_local_rank() if self.dp is not None else 0

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The process group that splits each batch, by rows and tokens."""
        assert self.dp is not None
        return self.dp.get_group()

    def describe(self) -> str:
        """Describe the sharing in a few words; empty for one process."""
        if not self.dp and not self.tp:
            return ""
        split = []
        if self.data_world > 1:
            split.append(f"batches in {self.data_world}")
        for name, mesh in (("rows", self.cp), ("layers", self.tp), ("experts", self.ep)):
            if mesh is not None:
                split.append(f"{name} in {mesh.size()}")
        return f"{self.ranks.world}, {self.kind} ({', '.join(split) or 'nothing split'})"

    def rows(self, batch_size: int) -> int:
        """Return the number of sequences of a batch for this process.

        Raises:
            ValueError: the batch cannot be split evenly.
        """
        if batch_size % self.data_world:
            raise UsageError(
                f"batch_size={batch_size} sequences cannot be shared by {self.data_world} processes: give a multiple "
                f"of {self.data_world} (it counts the sequences of all processes), or another number of processes "
                "(a resumed run keeps its batch_size)"
            )
        return batch_size // self.data_world

    def build(self, config: ModelConfig, *, initialize: bool = True, **options: Any) -> CausalLM:
        """Build a CausalLM, with CausalLM's arguments, split over the processes; on the meta device it is whole."""
        if options.get("device") in ("meta", torch.device("meta")):
            # The caller compares its shapes with the ones in a folder.
            return CausalLM(config, **options, initialize=initialize)
        if self.device is not None:
            options["device"] = self.device
        if (
            self.ranks.world > 1
            and options.get("fp8_params")
            and self.kind != "fsdp"
            and not self.frozen
        ):
            raise UsageError(
                f"FP8 primary weights are for one process or --parallel fsdp, not {self.kind}: leave out --fp8-params"
            )
        if options.get("stored_linears"):
            self.refuse_stored()
        if self.tp is not None:
            options |= dict(tp_mesh=self.tp, sequence_parallel=self.config.sequence_parallel)
        if self.ep is not None:
            options |= dict(
                ep_mesh=self.ep, ep_fp8=self.config.fp8_dispatch, ep_replicas=self.replicas
            )
        if self.cp is not None:
            options |= dict(cp_mesh=self.cp)
        fsdp = self.uses_fsdp
        if self.ranks.world > 1:
            options["amax_group"] = dist.group.WORLD
        model = CausalLM(config, **options, initialize=False, materialize=not fsdp)
        # Weights that are not trained get no masters.
        model.keeps_initial_values = not self.frozen
        if fsdp:
            shard(model, self)
            assert self.device is not None
            # Sharded on the meta device first: no process ever holds a whole model.
            if model.fp8_params:
                make_shards(
                    model,
                    self.device,
                    linears=model.te.LINEARS,
                    recipe=model.recipe,
                    built=model.precision.te_recipe_of,
                    group=self.data_group,
                )
            else:
                model.to_empty(device=self.device)
            model.tp.mark(model, model.config)
        if initialize:
            model.init_weights()
        return model

    def refuse_stored(self) -> None:
        """Raise a UsageError if the processes would divide weights that stay as a release stores them."""
        if self.uses_fsdp:
            raise UsageError(
                f"--parallel {self.kind} would split weights without their scales: use --parallel ddp, or leave out "
                "--base-weights stored"
            )

    def owners(self) -> Callable[[list[nn.Parameter]], Owners] | None:
        """Return a function that assigns owners to parameters, for optimizers that need whole tensors; else None."""
        elementwise = OPTIMIZERS[self.config.optimizer].elementwise
        if self.kind != "fsdp" or elementwise or self.frozen:
            return None
        return lambda parameters: Owners(parameters, self.data_group, self.ranks)

    def gradients(
        self, model: CausalLM, micro_batches: int, projected: Sequence[nn.Parameter] = ()
    ) -> Gradients:
        """Return the source of a step's gradients: FP32 sums for several micro-batches, except under FSDP2.

        FSDP2 has no part in adapters, which are made after it has sharded the model, and whole on each process.
        Parameters in `projected` have no sums: te_models.optim.projected keeps theirs. Several processes have none.
        """
        # FSDP2 knows nothing of adapters: they are summed like DDP's parameters.
        adapters = self.uses_fsdp and self.frozen
        reduced = adapters or self.kind == "ddp"
        if self.uses_fsdp and not adapters:
            return Gradients()
        if micro_batches == 1 and not reduced:
            return Gradients()
        left_out = set(map(id, projected))
        trained = [p for p in model.parameters() if p.requires_grad and id(p) not in left_out]
        in_fp32 = micro_batches > 1 or adapters
        return GradientSums(trained, self.data_group if reduced else None, in_fp32)

    @property
    def norm(self) -> Norm:
        """The function that computes the norm of all gradients."""
        return self._sharded_norm if self.sharded else gradient_norm

    def prepare(self, model: CausalLM) -> None:
        """Prepare a model for training in all processes: weights, sums of gradients, and statistics of routers."""
        model.router_group = self.data_group if self.parts > 1 else None
        self.start_alike(model)
        self.sum_gradients(model)

    def start_alike(self, model: CausalLM) -> None:
        """Give what every process has a copy of, and trains, the values of the first process, as DDP does.

        Under FSDP2 those are adapters. Where experts are divided, each process has adapters of its own, and the random
        states with which they are made have to agree.
        """
        if self.kind != "ddp" and not (self.kind == "fsdp" and self.frozen):
            return
        first = dist.get_global_rank(self.data_group, 0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                # In the order of the model, which is the same everywhere; a collective has no names.
                dist.broadcast(parameter.detach(), src=first, group=self.data_group)

    def sum_gradients(self, model: CausalLM) -> None:
        """Let FSDP2 sum gradients over the processes: a model that `build` returned averages them until then."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def prepare_micro_batch(self, model: Callable[..., Any], last: bool) -> None:
        """Make FSDP2 reduce gradients, and where possible reshard weights, only in the last micro-batch of a step."""
        if isinstance(model, FSDPModule):
            # Micro-batches add up in place before anything is sent.
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            if self.retains_weights:
                model.set_reshard_after_backward(last)

    def loss_weights(
        self, counts: Sequence[int], device: torch.device
    ) -> list[Tensor] | list[float]:
        """Return the factor of each micro-batch's mean loss that makes gradients means over all tokens of the step.

        Micro-batch i of this process counts `counts[i]` tokens; its factor is that over the tokens that all
        micro-batches of all processes count. Gradients are then summed over the processes: averages of gradients N
        times as large would have the same values, but FP8 would scale other numbers for every N.
        """
        if self.parts == 1:
            return [count / max(1, sum(counts)) for count in counts]
        # Counted on the host, but summed on the device: the host does not wait for the other processes.
        own_counts = _sent_to_device([*counts, sum(counts)], device)
        total = own_counts[-1].clone()
        dist.all_reduce(total, group=self.data_group)
        return list((own_counts[:-1] / total.clamp(min=1)).float())

    def router_weights(
        self, tokens: Sequence[int], device: torch.device
    ) -> list[Tensor] | list[float]:
        """Return the factor of the routers' losses of each micro-batch: its share of the step's tokens.

        Micro-batch i of this process has `tokens[i]` of them, targets or not. Its losses are this process's part of
        the losses of micro-batch i over all processes.
        """
        if self.parts == 1:
            return [count / max(1, sum(tokens)) for count in tokens]
        counts = _sent_to_device(tokens, device)
        dist.all_reduce(counts, group=self.data_group)
        return list((counts / counts.sum().clamp(min=1)).float())

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the shares of a batch; may overwrite `values`."""
        if self.parts > 1:
            dist.all_reduce(values, group=self.data_group)
        return values

    def sum_and_any(self, values: Tensor, *flags: bool) -> Tensor:
        """Return the sums of `values` [n] over the shares of a batch, and how many processes raised each flag.

        Every process takes part, and `copies` of them have each share. The result has n + flags elements.
        """
        # Processes that share a model have the same loss: each adds its part of one.
        copies = self.ranks.world // self.parts
        # No copy from the host, which would wait.
        raised = [values.new_full((1,), flag) for flag in flags]
        both = torch.cat([values / copies, *raised])
        if self.ranks.world > 1:
            dist.all_reduce(both)
        return both

    def _sharded_norm(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of the whole gradient: squares summed over all processes, each element counted once."""
        layers = self.tp.size() if self.tp is not None else 1
        # Of the local shards; DTensor's own norm would communicate once per parameter.
        norms = tensor_norms([local(gradient) for gradient in gradients])
        copies_of_each = []  # the number of processes with the same elements of each gradient
        for parameter in parameters:
            copies = 1
            if not isinstance(parameter, DTensor):
                copies *= self.parts
            # tensor_parallel marks what differs between its ranks.
            if not getattr(parameter, "tp_sharded", False):
                copies *= layers
            copies_of_each.append(copies)
        # Three kernels for all parameters, of which a model with experts has thousands.
        squares = norms.square()
        if any(copies > 1 for copies in copies_of_each):
            squares /= _sent_to_device(copies_of_each, squares.device).float()
        total = squares.sum()
        dist.all_reduce(total)
        return total.sqrt()


def shard(model: CausalLM, parallel: Parallel) -> None:
    """Shard `model` over the data-parallel processes: each block is a unit of FSDP2, and the rest another."""
    config = parallel.config
    sends_fp8 = config.reduce_dtype == "float8"
    mesh: Any = parallel.dp
    policy = sum_policy(model, parallel, mesh.size())
    reshards = config.reshard_after_forward
    blocks: list[Any] = list(model.layers)
    # From the inside out: a unit of FSDP2 takes the parameters that no unit inside it has taken.
    if parallel.replicas is not None:
        _shard_experts(model, parallel, parallel.replicas)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    # What is left, embeddings and head: backward begins with the head, so it would be gathered again at once.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if sends_fp8:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                communication: Any = FP8ReduceScatter()
                module.set_custom_reduce_scatter(communication)
    # FSDP2 warns of views that are changed in place, which none of ours is.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    if config.prefetch_blocks:
        _prefetch(blocks, config.prefetch_blocks)
    assert parallel.device is not None
    if parallel.device.type == "cpu":
        _sum_without_average(model, parallel.replicas)
    requantize_in_backward(model, reshards)


def _shard_experts(model: CausalLM, parallel: Parallel, replicas: DeviceMesh) -> None:
    """Shard the experts of each layer over the processes that have the same ones, each layer's as a unit of FSDP2."""
    policy = sum_policy(model, parallel, replicas.size())
    for module in list(model.modules()):  # a list: fully_shard changes the modules
        if isinstance(module, model.te.GroupedLinear):
            unit = fully_shard(
                module,
                mesh=replicas,
                mp_policy=policy,
                reshard_after_forward=parallel.config.reshard_after_forward,
            )
            # They have the gradients of the tokens of all processes, which are to be averaged like all others.
            unit.set_gradient_divide_factor(float(parallel.parts))


def _prefetch(blocks: list[Any], count: int) -> None:
    """Let each block gather the weights of its experts and of the `count` blocks that run next, before they run."""
    for number, block in enumerate(blocks):
        experts = []
        for module in block.modules():
            if isinstance(module, FSDPModule) and module is not block:
                experts.append(module)
        after = blocks[number + 1 :]
        before = blocks[:number][::-1]
        # In the order in which a pass needs them: the block's own experts first.
        block.set_modules_to_forward_prefetch(experts + after[:count])
        block.set_modules_to_backward_prefetch(experts[::-1] + before[:count])


def _sum_without_average(model: CausalLM, replicas: DeviceMesh | None) -> None:
    """Let FSDP2 sum gradients and divide them afterwards: gloo, unlike NCCL, has no average."""
    experts_on_one_rank = replicas is not None and replicas.size() == 1
    for module in model.modules():
        if experts_on_one_rank and isinstance(module, model.te.GroupedLinear):
            continue  # FSDP2 would divide the gradients of a unit on one rank twice
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def sum_policy(model: CausalLM, parallel: Parallel, processes: int) -> MixedPrecisionPolicy:
    """Return the dtype in which FSDP2 sums the gradients of a model's unit over so many processes."""
    config = parallel.config
    if config.gradient_accumulation == 1:
        if processes == 1:
            return MixedPrecisionPolicy()  # nothing is added up, so FP32 would only be copied
        in_bf16 = all(p.dtype == torch.bfloat16 for p in model.parameters() if p.requires_grad)
        assert parallel.device is not None
        # The sum of two BF16 gradients has the same bits in BF16, whether it is rounded to FP32 before or not, and
        # takes half the bytes to send. A CPU's gloo adds no BF16.
        nccl = parallel.device.type == "cuda"
        if processes == 2 and in_bf16 and nccl and config.reduce_dtype == "float32":
            return MixedPrecisionPolicy()
    # FP8 is for sending alone: micro-batches and processes are added in FP32.
    name = "float32" if config.reduce_dtype == "float8" else config.reduce_dtype
    return MixedPrecisionPolicy(reduce_dtype=DTYPES[name])


def _sent_to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers as FP64 on the device, for which nothing waits."""
    values = torch.tensor(numbers, dtype=torch.float64)
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def requantize_in_backward(model: CausalLM, requantize: bool) -> None:
    """Choose whether te.Linear quantizes the gathered weight again in backward or retains its FP8 copy from forward.

    With resharding after forward, quantizing again frees the copy together with the gathered weight. Transformer Engine
    decides it in a module's first forward pass, unless `_is_fsdp2` has been set before.
    """
    for module in model.modules():
        if isinstance(module, model.te.LINEARS):
            object.__setattr__(module, "_is_fsdp2", requantize)


def reshard(model: nn.Module) -> None:
    """Reshard weights that a forward without backward left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def unreduced_gradients(model: nn.Module) -> list[tuple[Any, Tensor | None, Tensor | None]]:
    """Return what FSDP2 keeps of earlier micro-batches' gradients, for `restore_unreduced_gradients`.

    An entry is a parameter of FSDP2, the sum of its gradients in the dtype of the reduction, and that in its own dtype.
    """
    gradients = []
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        # Newer versions of PyTorch have several groups per module, older ones a single one.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in filter(None, groups):
            for parameter in group.fsdp_params:
                unsharded = getattr(parameter, "_unsharded_param", None)
                own_dtype = None if unsharded is None else unsharded.grad
                gradients.append((parameter, parameter.unsharded_accumulated_grad, own_dtype))
    return gradients


def restore_unreduced_gradients(gradients: list[tuple[Any, Tensor | None, Tensor | None]]) -> None:
    """Undo what a failed capture has done to the gradients that FSDP2 keeps: nothing of it was computed."""
    for parameter, total, own_dtype in gradients:
        parameter.unsharded_accumulated_grad = total
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = own_dtype


def reuses_fp8_weights(config: TrainConfig, parallel: Parallel) -> bool:
    """Return whether further micro-batches of a step use the FP8 weights that the first one cast."""
    # FSDP2 that reshards after forward has no weights for a cache to hold.
    return config.cache_fp8_weights and parallel.retains_weights
