"""The settings of a training step that its memory depends on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from te_models.config.recompute_modes import offload_allows_fused
from te_models.model.context_parallel import PIECES
from te_models.optim import IN_BACKWARD, resolve_options
from te_models.planning.stored_base import StoredBase


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """The part of `Training` that changes what the blocks of a model allocate, beside the batch."""

    seq_len: int
    mode: str | int  # of activation checkpointing
    dtype_bytes: int
    fp8_params: bool
    stored: StoredBase | None
    lora_rank: int
    lora_experts: bool
    gradient_sums: bool
    # The rank to which backward projects the gradients of hidden matrices; 0: it projects none.
    projected_rank: int
    cached_weights: bool
    sharded: bool  # whether FSDP2 shards the weights
    tensor_ranks: int
    sequence: bool
    expert_ranks: int
    expert_replicas: int  # ranks that have the same experts
    fp8_dispatch: bool
    context_ranks: int  # ranks that share the tokens of each row
    logits: bool
    compile: bool
    fused: bool
    cuda: bool

    @property
    def row_tokens(self) -> int:
        """The tokens of each row that one rank has, those included that fill the row up."""
        if self.context_ranks == 1:
            return self.seq_len
        return PIECES * -(-self.seq_len // (PIECES * self.context_ranks))


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training step that its memory depends on; te_models.planning.planned_run explains them.

    Under gradient accumulation, FP32 sums of all gradients exist, which FSDP2 does not shard (`gradient_sums`), and FP8
    copies of weights exist already (`cached_weights`). Of `gpus`, each `tensor_parallel_size` share every layer, and
    the others divide batches and weights; each `expert_parallel_size` of those share the experts, and each
    `context_parallel_size` the tokens of every row (with one of `gpus`: GPUs with a whole model each). `stored` are the
    weights that stay as a release has them. With `lora_rank`, all linears of blocks have an adapter of that rank, with
    `lora_experts` experts too, and nothing else is trained. `compile`, `fused` and `cuda` say which kernels run.
    """

    batch_size: int = 8  # per micro-batch and GPU, or GPUs that share rows
    seq_len: int = 256
    optimizer: str | None = "adamw"
    optimizer_offload: bool = False
    optimizer_options: Mapping[str, object] = field(default_factory=dict)
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
    gradient_sums: bool = False
    cached_weights: bool = False
    fp8_params: bool = False
    stored: StoredBase | None = None
    logits: bool = True
    compile: bool = True
    fused: bool = True
    cuda: bool = True
    dtype_bytes: int = 2

    @property
    def projected_rank(self) -> int:
        """The rank at which backward projects the gradients of hidden matrices (te_models.optim.projected); 0: none."""
        if self.optimizer is None or not self.optimizer_options.get(IN_BACKWARD):
            return 0
        return int(resolve_options(self.optimizer, self.optimizer_options)["rank"])

    @property
    def fused_kernels(self) -> bool:
        """Return whether fused kernels run, as model/decoder.py decides."""
        allowed = not self.activation_offload or offload_allows_fused(self.activation_checkpointing)
        return self.fused and self.cuda and allowed

    @property
    def data_ranks(self) -> int:
        """The number of GPUs that divide a batch, and among which FSDP2 shares what each layer's ranks hold."""
        return self.gpus // self.tensor_parallel_size

    @property
    def batch_shares(self) -> int:
        """The number of parts of a batch: one for each GPU that divides it, or for GPUs that share rows."""
        return max(self.data_ranks // self.context_parallel_size, 1)

    @property
    def expert_replicas(self) -> int:
        """The number of GPUs that have the same experts, among which FSDP2 shares them."""
        return self.data_ranks // self.expert_parallel_size

    @property
    def setting(self) -> StepSetting:
        """Return the part of it that a measurement depends on (te_models.planning.measured)."""
        return StepSetting(
            seq_len=self.seq_len,
            mode=self.activation_checkpointing,
            dtype_bytes=self.dtype_bytes,
            fp8_params=self.fp8_params,
            stored=self.stored,
            lora_rank=self.lora_rank,
            lora_experts=self.lora_experts,
            gradient_sums=self.gradient_sums,
            projected_rank=self.projected_rank,
            cached_weights=self.cached_weights,
            sharded=self.data_ranks > 1,
            tensor_ranks=self.tensor_parallel_size,
            sequence=self.sequence_parallel,
            expert_ranks=self.expert_parallel_size,
            expert_replicas=self.expert_replicas,
            fp8_dispatch=self.fp8_dispatch,
            context_ranks=self.context_parallel_size,
            logits=self.logits,
            compile=self.compile and self.cuda,
            fused=self.fused_kernels,
            cuda=self.cuda,
        )
