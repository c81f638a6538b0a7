"""The decoder in vLLM's layers, for folders whose architecture vLLM lacks: gated attention above all.

The shape is read from config.json by the folder's family, as from_pretrained reads it, and tensors are found by the
same tables. Linears, KV cache, quantization and tensor parallelism are vLLM's.

Shapes: T tokens of all requests, D hidden_size, A attention heads, K key/value heads, H head_dim, F intermediate_size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from te_models.config.attention import AttentionSpec
from te_models.config.layer import LayerSpec
from te_models.config.mlp import MLPSpec
from te_models.config.model import ModelConfig
from te_models.config.rope import Rope
from te_models.errors import UsageError
from te_models.interop.hf_families import Family, family_of
from te_models.interop.hf_places import TOP
from te_models.kernels import elementwise
from te_models.model.rope import rotary_tables

GATES = {"sigmoid": elementwise.gate, "softplus": elementwise.softplus_gate}
# Rows of our fused weights -> vLLM's module beside or in place of ours, and the name it has for them.
SHARDS: dict[str, tuple[str, str | int | None]] = {
    "q": ("qkv_proj", "q"),
    "k": ("qkv_proj", "k"),
    "v": ("qkv_proj", "v"),
    "g": ("g_proj", None),
    "gate": ("gate_up_proj", 0),
    "up": ("gate_up_proj", 1),
}


class TableRoPE(RotaryEmbedding):
    """vLLM's rotation with the angles of te-models."""

    def __init__(self, rope: Rope, length: int) -> None:
        self.rope = rope
        dtype = torch.get_default_dtype()
        super().__init__(rope.head_dim, rope.size, length, rope.theta, not rope.interleaved, dtype)

    # vLLM's hook for other angles: its kernel rotates with whatever this returns, [length, 2 * pairs].
    def _compute_cos_sin_cache(self) -> Tensor:
        positions = torch.arange(self.max_position_embeddings)
        tables = rotary_tables(self.rope, positions, torch.float32)
        return torch.cat([table[:, : self.rope.size // 2] for table in tables], dim=-1)


def _served_length(rope: Rope, length: int) -> int:
    """Return `length`; refuse angles that would change with the length of a text, since cached keys keep theirs."""
    kind = (rope.scaling or {}).get("rope_type")
    fixed = {"dynamic": rope.context, "longrope": rope.original_context}.get(kind or "", length)
    if length > fixed:
        raise UsageError(
            f"RoPE of type {kind!r} changes the angles of texts beyond {fixed} tokens: give --max-model-len {fixed}"
        )
    return length


class Builder:
    """Makes the layers of one model of this shape, for a server with vLLM's config `vllm`."""

    def __init__(self, vllm: VllmConfig, config: ModelConfig) -> None:
        self.config = config
        self.cache = vllm.cache_config
        self.quantization = vllm.quant_config
        self.length: int = vllm.model_config.max_model_len
        self.ranks: int = get_tensor_model_parallel_world_size()

    def norm(self, size: int) -> nn.Module:
        """Return a norm."""
        return (GemmaRMSNorm if self.config.zero_centered_norm else RMSNorm)(
            size, self.config.rms_norm_eps
        )

    def linear(
        self, kind: Callable[..., nn.Module], prefix: str, *sizes: object, bias: bool
    ) -> nn.Module:
        """Return one of vLLM's linears."""
        return kind(*sizes, bias=bias, quant_config=self.quantization, prefix=prefix)


# Of AttentionSpec.obstacles those that this plugin computes all the same.
COMPUTED = ("query_scale_beta", "head_dim")


def _refuse_unserved(spec: AttentionSpec, ranks: int) -> None:
    """Raise a UsageError for attention that this plugin does not compute, or not on so many ranks."""
    if spec.sinks:
        raise UsageError(
            "attention_sinks are served only in the families of Hugging Face that have them: gpt_oss"
        )
    by_slot = spec.query_scale is not None and spec.query_scale.by_slot
    if spec.chunk is not None or by_slot:
        raise UsageError(
            "attention_chunk_size and query_scale_rule='slot' are served only in the family of Hugging Face that "
            "has them: llama4"
        )
    for name in spec.obstacles:
        if name not in COMPUTED:
            raise UsageError(
                f"{name} is served only in the families of Hugging Face that have it, such as gemma4"
            )
    reason = spec.parallel_obstacle(sequence=False) if ranks > 1 else ""
    if reason:
        raise UsageError(f"--tensor-parallel-size {ranks}: {reason}")


class GatedAttention(nn.Module):
    """Attention with its gate."""

    def __init__(self, spec: AttentionSpec, build: Builder, prefix: str) -> None:
        super().__init__()
        self.spec = spec
        width = spec.hidden_size
        heads = spec.heads
        _refuse_unserved(spec, build.ranks)
        self.qkv_proj = build.linear(
            QKVParallelLinear,
            f"{prefix}.qkv_proj",
            width,
            heads.dim,
            heads.query,
            heads.key,
            bias=spec.bias,
        )
        gates = heads.sections[-1].used
        self.g_proj = None
        if gates:
            self.g_proj = build.linear(
                ColumnParallelLinear, f"{prefix}.g_proj", width, gates, bias=spec.bias
            )
        self.gate = GATES[spec.gate_activation]
        self.o_proj = build.linear(
            RowParallelLinear, f"{prefix}.o_proj", heads.q_size, width, bias=spec.output_bias
        )
        self.q_norm = build.norm(spec.vectors["q_norm"]) if "q_norm" in spec.vectors else None
        self.k_norm = build.norm(spec.vectors["k_norm"]) if "k_norm" in spec.vectors else None
        self.query = heads.query // build.ranks
        # With more ranks than key heads, vLLM gives several ranks a copy of one.
        self.key = max(1, heads.key // build.ranks)
        if spec.rope is None:
            self.rope = None
        else:
            self.rope = TableRoPE(spec.rope, _served_length(spec.rope, build.length))
        scale = heads.dim**-0.5 if spec.multiplier is None else spec.multiplier
        self.attn = Attention(
            self.query,
            heads.dim,
            scale,
            num_kv_heads=self.key,
            cache_config=build.cache,
            quant_config=build.quantization,
            logits_soft_cap=spec.softcap,
            per_layer_sliding_window=spec.window,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        """positions [T], x [T, D] -> [T, D]."""
        dim = self.spec.heads.dim
        q, k, v = self.qkv_proj(x)[0].split(
            [self.query * dim, self.key * dim, self.key * dim], dim=-1
        )
        if self.q_norm is not None and self.k_norm is not None:
            q = self._normed(self.q_norm, q)
            k = self._normed(self.k_norm, k)
        if self.rope is not None:
            q, k = self.rope(positions, q.contiguous(), k.contiguous())
        if self.spec.query_scale is not None:
            # Queries grow with the logarithm of their position.
            beta, length, _ = self.spec.query_scale
            q = q * (1 + beta * torch.log(1.0 + positions // length)).to(q.dtype)[:, None]
        # [T, A * dim]; vLLM's layer writes k and v to its cache.
        out = self.attn(q, k, v)
        if self.g_proj is not None:
            # vLLM's linears return their output and, where it is not added, their bias.
            g = self.g_proj(x)[0]
            heads = out.unflatten(-1, (self.query, dim))
            out = self.gate(heads, g.unflatten(-1, (self.query, -1))).flatten(-2)
        return self.o_proj(out)[0]

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        if self.spec.qk_norm == "all_heads":
            return norm(x.contiguous())
        return norm(x.unflatten(-1, (-1, self.spec.heads.dim)).contiguous()).flatten(-2)


class MLP(nn.Module):
    """down_proj(act(gate) * up), or down_proj(act(up))."""

    def __init__(self, spec: MLPSpec, build: Builder, prefix: str) -> None:
        super().__init__()
        self.spec = spec
        width = spec.hidden_size
        size = spec.intermediate_size
        kind, into = (
            (MergedColumnParallelLinear, [size, size])
            if spec.gate
            else (ColumnParallelLinear, size)
        )
        self.gate_up_proj = build.linear(
            kind, f"{prefix}.gate_up_proj", width, into, bias=spec.bias
        )
        self.down_proj = build.linear(
            RowParallelLinear, f"{prefix}.down_proj", size, width, bias=spec.bias
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]."""
        hidden = elementwise.mlp_activation(
            self.gate_up_proj(x)[0], self.spec.activation, self.spec.gate
        )
        return self.down_proj(hidden)[0]


class Layer(nn.Module):
    """A decoder block; see te_models.model.block."""

    def __init__(self, spec: LayerSpec, build: Builder, prefix: str) -> None:
        super().__init__()
        if not isinstance(spec.mixer, AttentionSpec) or not isinstance(spec.mlp, MLPSpec):
            raise UsageError(
                "te-models' plugin serves attention with dense MLPs: vLLM's own models have the others"
            )
        # Fields that change what a model computes: to leave one out would serve other logits.
        names = (
            "embedding_norm",
            "post_norm_eps",
            "plain_final_norm",
            "mlp_limits",
            "mlp_multipliers",
        )
        for name in (*names, "layer_inputs"):
            if getattr(build.config, name):
                raise UsageError(f"{name} is not served by te-models' plugin")
        if spec.norm_type != "rms" or spec.parallel_residual:
            raise UsageError(
                "norm_type='layer' and parallel_residual are served only in the families of Hugging Face that have "
                "them: cohere2"
            )
        if spec.scaled:
            raise UsageError(
                "layer_scale is served only in the families of Hugging Face that have it: gemma4"
            )
        width = spec.mixer.hidden_size
        self.multiplier = build.config.residual_multiplier
        before = spec.norm_position != "post"
        after = spec.norm_position != "pre"
        # Names of Hugging Face's Llama, which the packed modules above and quantization configs know.
        self.input_layernorm = build.norm(width) if before else nn.Identity()
        self.self_attn = GatedAttention(spec.mixer, build, f"{prefix}.self_attn")
        self.attention_output_norm = build.norm(width) if after else nn.Identity()
        self.post_attention_layernorm = build.norm(width) if before else nn.Identity()
        self.mlp = MLP(spec.mlp, build, f"{prefix}.mlp")
        self.mlp_output_norm = build.norm(width) if after else nn.Identity()

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        """positions [T], x [T, D] -> [T, D]."""
        x = (
            x
            + self.attention_output_norm(self.self_attn(positions, self.input_layernorm(x)))
            * self.multiplier
        )
        return (
            x + self.mlp_output_norm(self.mlp(self.post_attention_layernorm(x))) * self.multiplier
        )


def read_shape(vllm: VllmConfig) -> tuple[Family, ModelConfig]:
    """Return the family and shape of the folder that is served."""
    fields = vllm.model_config.hf_config.to_dict()
    family = family_of(fields)
    # transformers' to_dict adds fields of its own, which the family does not know.
    known = {key: value for key, value in fields.items() if key in family.known()}
    return family, family.read(known)


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "inputs_embeds": 0})
class TEModelsDecoderModel(nn.Module):
    """The decoder without a head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = read_shape(vllm_config)[1]
        build = Builder(vllm_config, config)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        # As the activations round it.
        self.multiplier = torch.tensor(
            config.embedding_multiplier, dtype=torch.get_default_dtype()
        ).item()
        self.layers = nn.ModuleList(
            Layer(spec, build, f"{prefix}.layers.{depth}")
            for depth, spec in enumerate(config.layers)
        )
        self.norm = build.norm(config.hidden_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] -> [T, D]."""
        x = self.embed_tokens(input_ids)
        return x if self.multiplier == 1 else x * self.multiplier

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """input_ids [T] or inputs_embeds [T, D], positions [T] -> [T, D]."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        x = inputs_embeds
        for layer in self.layers:
            x = layer(positions, x)
        return self.norm(x)


class TEModelsDecoderForCausalLM(nn.Module):
    """The decoder with a head over the vocabulary."""

    # Modules whose linears are one here; a gate has the precision of the queries, in whose tensor it may be.
    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "g_proj": ["q_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.family, self.shape = read_shape(vllm_config)
        if not self.shape.mlp_gate:
            self.packed_modules_mapping = {
                **self.packed_modules_mapping,
                "gate_up_proj": ["up_proj"],
            }
        self.model = TEModelsDecoderModel(vllm_config=vllm_config, prefix="model")
        self.lm_head = ParallelLMHead(
            self.shape.vocab_size, self.shape.hidden_size, prefix="lm_head"
        )
        if self.shape.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(self.shape.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] -> [T, D]."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """input_ids [T] or inputs_embeds [T, D], positions [T] -> [T, D]."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """hidden_states [T, D] -> [T, vocab_size]; None on ranks that sample nothing."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        if logits is None:
            return None
        return elementwise.scaled_logits(
            logits, self.shape.logits_scaling, self.shape.final_logit_softcapping
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the folder's tensors, scales included, and return the names of the parameters that they fill."""
        parameters = dict(self.named_parameters())
        loaded: set[str] = set()
        for theirs, tensor in weights:
            # One tensor under two names: it was loaded as the embedding.
            if theirs.startswith(f"{self.family.head}.") and self.shape.tie_word_embeddings:
                continue
            for name, shard, values in self._parts(theirs, tensor):
                # vLLM's own loaders take this rank's share of the rows.
                load = getattr(parameters[name], "weight_loader", default_weight_loader)
                load(parameters[name], values, *(() if shard is None else (shard,)))
                loaded.add(name)
        return loaded

    def _parts(self, theirs: str, tensor: Tensor) -> Iterator[tuple[str, str | int | None, Tensor]]:
        """Return the parameters, with vLLM's name of their rows, that one tensor of the folder fills."""
        path, _, kind = theirs.rpartition(".")
        match = re.fullmatch(rf"{re.escape(self.family.root)}layers\.(\d+)\.(.+)", path)
        if match is None:
            top = {
                name.replace("model.", self.family.root): f"model.{ours}"
                for name, ours in TOP.items()
            }
            yield f"{ {**top, self.family.head: 'lm_head'}[path] }.{kind}", None, tensor
            return
        depth = int(match[1])
        rows = self.family.layer[match[2]]
        if not rows.blocks:
            yield f"model.layers.{depth}.{rows.module}.{kind}", None, tensor
            return
        layer = self.shape.layers[depth]
        ranges = layer.linears[rows.module].row_ranges
        groups = 1 if rows.per is None else layer.divided[rows.per]
        sizes = {}
        for block in rows.blocks:
            _, size = ranges.get(block, (0, 0))
            if size:
                sizes[block] = size
        for block, values in zip(sizes, _split(tensor, list(sizes.values()), groups), strict=True):
            module, shard = SHARDS[block]
            # A linear of its own, which has no parts to name.
            if block == "up" and not self.shape.mlp_gate:
                shard = None
            yield (
                f"model.layers.{depth}.{rows.module.partition('.')[0]}.{module}.{kind}",
                shard,
                values,
            )


def _split(tensor: Tensor, sizes: list[int], groups: int) -> list[Tensor]:
    """Return the rows of each of several blocks that alternate `groups` times; a scale of the whole goes to all."""
    if len(sizes) == 1 or tensor.numel() == 1:
        return [tensor] * len(sizes)
    per = sum(sizes) // len(tensor)  # rows of the weight that one row of its scales stands for
    if any(size % (per * groups) for size in sizes):
        raise UsageError(
            f"blocks of {per} rows hold queries and gates together: export the model as fp8-channel"
        )
    pieces = tensor.unflatten(0, (groups, -1)).split(
        [size // per // groups for size in sizes], dim=1
    )
    return [piece.flatten(0, 1) for piece in pieces]
