"""The run whose memory is planned: its settings over all GPUs, the checks of them, and one GPU's part of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe
from te_models.config.recompute_modes import check_mode
from te_models.distributed.planned_ranks import PlannedRanks
from te_models.errors import UsageError, check_known
from te_models.model.context_parallel import ContextParallel
from te_models.model.expert_parallel import ExpertParallel
from te_models.model.recipe_fit import check_sizes
from te_models.model.tensor_parallel import TensorParallel
from te_models.optim import OPTIMIZERS
from te_models.planning.parameter_bytes import Options, has_masters
from te_models.planning.stored_base import StoredBase
from te_models.planning.training import Training


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Settings of a training run that its memory depends on.

    Attributes:
        batch_size: sequences of one micro-batch over all `gpus`, as in `te_models.TrainConfig`.
        seq_len: tokens per sequence.
        gradient_accumulation: micro-batches per step; from two on, FP32 sums of gradients take 4 bytes per parameter.
        optimizer: a name of `te_models.optim.OPTIMIZERS`; None for forward and backward only.
        optimizer_offload: whether masters and optimizer state are in host memory.
        optimizer_options: its options, as te_models.optim.resolve_options returns them; those left out are defaults.
        lora_rank: rank of LoRA adapters on all linears of blocks, which alone are trained; 0: all weights are.
        lora_experts: whether experts have adapters of this rank too.
        activation_checkpointing: "none", "selective", "full", or an integer N for every N-th block.
        activation_offload: whether the saved tensors of blocks are moved to the host (te_models.model.offload).
        gpus: all GPUs; FSDP2 shares weights, gradients and optimizer state among those that divide batches.
        tensor_parallel_size: GPUs that share each layer, a divisor of `gpus`; the others divide batches. 0 counts as 1,
            here and below: a run's settings have it for layers that are not divided.
        sequence_parallel: whether these also divide the tokens between tensor-parallel layers.
        expert_parallel_size: GPUs that share the experts of each layer, a divisor of those that divide batches.
        context_parallel_size: GPUs that share the tokens of each row, a divisor of those that divide batches; with one
            of `gpus`, which shares no weights, any number of GPUs with a whole model each (DDP).
        fp8_dispatch: whether tokens are sent to experts in FP8.
        fp8_params: whether the primary weights of FP8 layers are FP8 (te_models.fp8.primary_weights).
        base_weights: the form in which a release stores weights that stay so: "mxfp4" (experts), "nvfp4" or "fp8-block"
            (all linears of blocks), or what te_models.planning.stored_base says of a folder; None: they are
            dequantized.
        dtype_bytes: bytes per element of parameters and activations.
        logits: whether the forward returns logits. The Trainer's does not, so they never exist all at once.
        compile, fused: as for `CausalLM`.
    """

    batch_size: int = 8
    seq_len: int = 256
    gradient_accumulation: int = 1
    optimizer: str | None = "adamw"
    optimizer_offload: bool = False
    optimizer_options: Options = field(default_factory=dict)
    lora_rank: int = 0
    lora_experts: bool = False
    activation_checkpointing: str | int = "none"
    activation_offload: bool = False
    gpus: int = 1
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    expert_parallel_size: int = 1
    context_parallel_size: int = 1
    fp8_dispatch: bool = False
    fp8_params: bool = False
    base_weights: StoredBase | str | None = None
    dtype_bytes: int = 2
    logits: bool = False
    compile: bool = True
    fused: bool = True

    def on_one_gpu(self, config: ModelConfig, recipe: Recipe) -> Training:
        """Check the run; return one GPU's part of it, whose memory is planned.

        Raises:
            UsageError: for a value that no training run could have.
            ConfigError: a size of the model does not suit the recipe.
        """
        if self.optimizer is not None:
            check_known("optimizer", self.optimizer, OPTIMIZERS)
        training = self._training(config)
        self._check_counts()
        _check_shares(training, self.batch_size)
        if training.seq_len > config.longest_sequence:
            raise UsageError(
                f"seq_len={training.seq_len} is longer than {config.length_limit}: lower it or raise that field"
            )
        _check_adapters(training, config)
        _check_weights(training, recipe)
        _check_layers(training, config, recipe)
        return training

    def _training(self, config: ModelConfig) -> Training:
        """Return one GPU's part of the run, which may have values that do not fit together."""
        tensor_ranks = max(self.tensor_parallel_size, 1)
        context_ranks = max(self.context_parallel_size, 1)
        data_ranks = max(self.gpus // tensor_ranks, 1)
        batch_shares = max(data_ranks // context_ranks, 1)
        accumulates = self.gradient_accumulation > 1
        stored = self.base_weights
        if isinstance(stored, str):
            stored = StoredBase.of(config, stored)
        return Training(
            batch_size=self.batch_size // batch_shares,
            seq_len=self.seq_len,
            gpus=self.gpus,
            tensor_parallel_size=tensor_ranks,
            sequence_parallel=self.sequence_parallel,
            expert_parallel_size=max(self.expert_parallel_size, 1),
            context_parallel_size=context_ranks,
            fp8_dispatch=self.fp8_dispatch,
            gradient_sums=accumulates,
            # FSDP2 frees gathered weights after each micro-batch, and their FP8 copies with them.
            cached_weights=accumulates and data_ranks == 1,
            optimizer=self.optimizer,
            optimizer_offload=self.optimizer_offload,
            optimizer_options=dict(self.optimizer_options),
            lora_rank=self.lora_rank,
            lora_experts=self.lora_experts,
            activation_checkpointing=check_mode(self.activation_checkpointing),
            activation_offload=self.activation_offload,
            fp8_params=self.fp8_params,
            stored=stored,
            dtype_bytes=self.dtype_bytes,
            logits=self.logits,
            compile=self.compile,
            fused=self.fused,
        )

    def _check_counts(self) -> None:
        """Raise a UsageError for a count below 1."""
        for name in ("batch_size", "seq_len", "gpus", "gradient_accumulation"):
            number = getattr(self, name)
            if number < 1:
                raise UsageError(f"{name}={number} is out of range: give 1 or more")


def _check_shares(training: Training, batch_size: int) -> None:
    """Raise a UsageError if the GPUs cannot be divided so, or share a batch of `batch_size` over all of them."""
    gpus = training.gpus
    tensor = training.tensor_parallel_size
    experts = training.expert_parallel_size
    context = training.context_parallel_size
    if gpus % tensor:
        raise UsageError(
            f"tensor_parallel_size={tensor} does not divide gpus={gpus}: give a divisor of it, or more gpus"
        )
    if context > 1 and gpus > 1 and training.data_ranks % context:
        raise UsageError(
            f"context_parallel_size={context} does not divide gpus={gpus}: give a divisor of it, or more gpus"
        )
    if batch_size % training.batch_shares:
        whole = tensor == 1 and context == 1
        shares = training.batch_shares
        sharers = f"gpus={gpus}" if whole else f"the {shares} shares of a batch"
        raise UsageError(
            f"batch_size={batch_size} cannot be shared by {sharers}: give a multiple of {shares}, or another number "
            "of gpus (a resumed run keeps its batch_size)"
        )
    if experts > 1 and training.data_ranks % experts:
        raise UsageError(
            f"expert_parallel_size={experts} does not divide gpus={gpus}: give a divisor of it, or more gpus"
        )
    if training.sequence_parallel and tensor == 1:
        raise UsageError(
            "sequence_parallel=True divides tokens between tensor-parallel layers: give tensor_parallel_size"
        )
    if training.fp8_dispatch and experts == 1:
        raise UsageError(
            "fp8_dispatch=True sends tokens to experts of other GPUs: give expert_parallel_size"
        )
    if tensor > 1 and experts > 1:
        raise UsageError(
            "tensor_parallel_size and expert_parallel_size are for different runs: give one of them"
        )
    if context > 1 and (tensor > 1 or experts > 1):
        raise UsageError(
            "context_parallel_size is for runs that divide neither layers nor experts: leave it out, or "
            "tensor_parallel_size and expert_parallel_size"
        )
    if tensor > 1 and training.lora_rank:
        raise UsageError(
            "adapters are on whole layers: leave out tensor_parallel_size, or lora_rank"
        )


def _check_adapters(training: Training, config: ModelConfig) -> None:
    """Raise a UsageError if the model cannot have these adapters."""
    if training.lora_rank < 0:
        raise UsageError(
            f"lora_rank={training.lora_rank}: a rank is 1 or more, such as 16, or 0 to train all weights"
        )
    if training.lora_experts and not training.lora_rank:
        raise UsageError("lora_experts=True is for adapters: give lora_rank, or leave it out")
    if training.lora_experts and not config.moe:
        raise UsageError(
            "the model has no experts to adapt: leave out lora_experts, or experts among the targets of adapters"
        )


def _check_weights(training: Training, recipe: Recipe) -> None:
    """Raise a UsageError if the weights or their gradients cannot have the form that is asked for."""
    if training.stored is not None and training.gpus > 1:
        raise UsageError(
            "weights that stay as they are stored cannot be shared by FSDP: leave out base_weights, or gpus"
        )
    if training.stored is not None and not training.lora_rank:
        raise UsageError(
            "weights that stay as they are stored are not trained: give lora_rank too, or leave out base_weights"
        )
    if training.stored is not None and training.fp8_params:
        raise UsageError(
            "fp8_params=True quantizes weights that base_weights leaves as they are: leave out one of them"
        )
    if training.projected_rank and training.gpus > 1 and not training.lora_rank:
        raise UsageError(
            "in_backward=true projects the gradients of one GPU: leave it out, or gpus"
        )
    if training.projected_rank and training.optimizer_offload:
        raise UsageError("in_backward=true projects on the GPU: leave it out, or optimizer_offload")
    if not training.fp8_params:
        return
    if not recipe.quantized:
        raise UsageError(
            f"fp8_params=True needs an FP8 recipe, but {recipe.name!r} is not one: choose another, or leave "
            "fp8_params out"
        )
    if not training.lora_rank and not has_masters(training.optimizer_options):
        raise UsageError(
            "fp8_params=True needs FP32 masters: leave stochastic_rounding out, or fp8_params"
        )


def _check_layers(training: Training, config: ModelConfig, recipe: Recipe) -> None:
    """Raise an error if the layers or experts cannot be divided so, or have sizes that the recipe does not take."""
    tensor = training.tensor_parallel_size
    experts = training.expert_parallel_size
    mesh: Any = PlannedRanks(tensor) if tensor > 1 else None
    ranks = TensorParallel(mesh, training.sequence_parallel)
    # The run's own checks, with a mesh that has only a size.
    layers = ranks.local(config)
    check_sizes(layers, config.vocab_size, recipe, ranks.each)
    experts_mesh: Any = PlannedRanks(experts) if experts > 1 else None
    ExpertParallel(experts_mesh, config).local(layers)
    rows: Any = PlannedRanks(training.context_parallel_size)
    ContextParallel(rows).check_layers(layers)
