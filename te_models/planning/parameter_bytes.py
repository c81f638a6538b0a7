"""Parameters of a model by shape, and bytes of optimizer state per parameter, computed from a config alone."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from te_models.config.chunk_sizes import FP32
from te_models.config.model import ModelConfig
from te_models.config.shares import share_out


class Parameter(NamedTuple):
    """`count` matrices or vectors of one shape; a fused weight counts as its parts.

    `kind` is the te_models.config.layer.Role of its rows, or "table" for embedding and head.
    """

    kind: str
    shape: tuple[int, ...]
    count: int

    @property
    def numel(self) -> int:
        """Elements of all `count` tensors."""
        return self.count * math.prod(self.shape)


Options = Mapping[
    str, Any
]  # of an optimizer, as from te_models.optim.resolve_options; those left out: defaults
DEFAULTS: Options = MappingProxyType({})
State = Callable[..., float]  # (parameter, options) -> bytes per element


def _adamw(p: Parameter, options: Options = DEFAULTS) -> float:
    return 4 + 4


def _adamw_blocks(p: Parameter, options: Options = DEFAULTS) -> float:
    """Return the bytes of torchao's moments: two of one byte, an FP32 scale per 256; small or odd tensors in FP32."""
    size = math.prod(p.shape)
    return 2 * (1 + 4 / 256) if size >= 4096 and size % 256 == 0 else _adamw(p)


def _rest(p: Parameter, options: Options) -> float:
    """Return the bytes of the optimizer of what is no hidden matrix."""
    return _adamw(p) if options.get("rest", "adamw") == "adamw" else _adamw_blocks(p)


def _muon(momentum: float) -> State:
    """Return the bytes of Muon (Jordan et al. 2024): one momentum for the matrices of blocks, AdamW for the rest."""
    return lambda p, options=DEFAULTS: momentum if p.kind == "hidden" else _rest(p, options)


def _galore(p: Parameter, options: Options = DEFAULTS) -> float:
    """Return the bytes of GaLore (Zhao et al. 2024, arXiv 2403.03507): AdamW on a low rank, FP32 projectors."""
    rank = options.get("rank", 128)
    if p.kind != "hidden":
        return _rest(p, options)
    if min(p.shape) <= rank:
        return _adamw(p)
    return 4 * rank * (2 * max(p.shape) + min(p.shape)) / math.prod(p.shape)


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes per element of the state of an optimizer. A parameter that is not FP32 also has an FP32 master.

    `elementwise`: under FSDP2 it updates shards; else each parameter has an owner with its whole master and state
    (te_models.optim.parameter_owners).
    """

    state: State
    description: str
    elementwise: bool = False

    def of(self, parameters: list[Parameter], dtype_bytes: int, options: Options = DEFAULTS) -> int:
        """Return the bytes of state, and of the FP32 masters if there are any, of `parameters`."""
        master = FP32 if has_masters(options) and dtype_bytes < FP32 else 0
        return round(sum(p.numel * (self.state(p, options) + master) for p in parameters))

    def per_gpu(
        self,
        parameters: list[Parameter],
        dtype_bytes: int,
        options: Options = DEFAULTS,
        gpus: int = 1,
    ) -> int:
        """Return the bytes of state and masters on that of `gpus` GPUs, among which FSDP2 shares them, that has most.

        An owner has whole masters even of FP32 parameters, of which FSDP2 leaves it a shard.
        """
        if gpus == 1 or self.elementwise:
            return self.of(parameters, dtype_bytes, options) // gpus
        master = FP32 if has_masters(options) else dtype_bytes
        owned = [0.0] * gpus
        tensors = [p._replace(count=1) for p in parameters for _ in range(p.count)]
        for tensor, owner in zip(tensors, share_out([t.numel for t in tensors], gpus), strict=True):
            owned[owner] += tensor.numel * (self.state(tensor, options) + master)
        return round(max(owned))


def has_masters(options: Options) -> bool:
    """Return whether parameters that are not FP32 have FP32 masters."""
    return not options.get("stochastic_rounding", False)


# One row per optimizer, under the names of `--optimizer`.
OPTIMIZERS: dict[str, OptimizerBytes] = {
    "adamw": OptimizerBytes(_adamw, "two FP32 moments", elementwise=True),
    "adamw8bit": OptimizerBytes(
        _adamw_blocks, "two 8-bit moments, one FP32 scale per 256 elements"
    ),
    "adamwfp8": OptimizerBytes(_adamw_blocks, "two FP8 moments, one FP32 scale per 256 elements"),
    "muon": OptimizerBytes(_muon(4), "FP32 momentum for matrices, AdamW for the rest"),
    "muon8bit": OptimizerBytes(
        _muon(1 + 4 / 128), "INT8 momentum, one FP32 scale per 128 elements; AdamW for the rest"
    ),
    "galore": OptimizerBytes(_galore, "AdamW on gradients of rank 128; AdamW for the rest"),
}


def trained_parameters(
    config: ModelConfig, lora_rank: int, lora_experts: bool = False
) -> list[Parameter]:
    """Return every parameter of a CausalLM; with `lora_rank`, the A and B of the adapters that `lora` makes.

    `lora_experts` says whether experts have some too, each of this rank.
    """
    if not lora_rank:
        return model_parameters(config)
    return [
        Parameter("vector", (lora_rank * linear.gemms, size), count)
        for layer, count in Counter(config.layers).items()
        for linear in layer.linears.values()
        if linear.adapted or (linear.experts and lora_experts)
        for size in (linear.inputs, linear.outputs)
    ]


def model_parameters(config: ModelConfig) -> list[Parameter]:
    """Return every parameter of a CausalLM; vectors (norms and biases) as one."""
    tables = 1 if config.tie_word_embeddings else 2
    found = [Parameter("table", (config.vocab_size, config.hidden_size), tables)]
    for layer, count in Counter(config.layers).items():
        for linear in layer.linears.values():
            for section in linear.sections:
                if section.stored:
                    found.append(
                        Parameter(
                            section.role, (section.stored, linear.inputs), count * linear.gemms
                        )
                    )
    total = config.num_parameters + config.num_padding_parameters
    return [*found, Parameter("vector", (total - sum(p.numel for p in found),), 1)]
