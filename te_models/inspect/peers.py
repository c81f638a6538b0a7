"""Alternatives to compare with: the same decoder in plain PyTorch, in torchao float8, and in te.TransformerLayer.

Each peer has the shape of a ModelConfig and its best known settings: torch.compile of every block and of the loss, and
cuDNN attention where it applies. Only the timed part is here: one forward and backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_models.config.attention import AttentionSpec
from te_models.config.mlp import MLPSpec
from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe, get_recipe
from te_models.engine import engine_module
from te_models.errors import UsageError, needs
from te_models.kernels import elementwise
from te_models.kernels.attention_parts import split_heads
from te_models.kernels.sdpa import causal_attention
from te_models.model.rope import rotary_tables

StepFunction = Callable[[], Tensor]


class TorchBlock(nn.Module):
    """The block of te_models/model/block.py in torch.nn modules. x [B, S, D] -> [B, S, D]."""

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        layer = config.layers[0]
        assert isinstance(layer.mixer, AttentionSpec)
        self.heads = layer.mixer.heads
        qkvg, o, gate_up, down = layer.linears.values()
        self.qkvg_proj = nn.Linear(qkvg.inputs, qkvg.outputs, bias=False, **factory)
        self.o_proj = nn.Linear(o.inputs, o.outputs, bias=False, **factory)
        self.gate_up_proj = nn.Linear(gate_up.inputs, gate_up.outputs, bias=False, **factory)
        self.down_proj = nn.Linear(down.inputs, down.outputs, bias=False, **factory)
        d = config.hidden_size
        self.norms = nn.ModuleList(nn.RMSNorm(d, config.rms_norm_eps, **factory) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the block's output [B, S, D] for x [B, S, D] and rotary tables [S, rotary channels]."""
        # [B, S, heads, channels] each; the gate has one channel per head, or as many as q.
        q, k, v, gate = split_heads(
            self.heads, self.qkvg_proj(self.norms[0](x)).flatten(0, 1), len(x)
        )
        q = elementwise.rope(q, cos, sin)
        k = elementwise.rope(k, cos, sin)
        # Attention takes heads before positions, [B, heads, S, channels].
        out = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(
            1, 2
        )
        if gate is not None:
            out = elementwise.gate(out, gate)
        x = x + self.o_proj(out.flatten(-2))
        return x + self.down_proj(elementwise.swiglu(self.gate_up_proj(self.norms[1](x))))


class Peer(nn.Module):
    """Embedding, blocks, norm and head; `call` runs all blocks."""

    def __init__(
        self,
        config: ModelConfig,
        blocks: list[nn.Module],
        call: Callable[..., Tensor],
        **factory: Any,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
        self.blocks = nn.ModuleList(blocks)
        self.call = call
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **factory)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, S, V] for ids [B, S]."""
        x = self.embed(ids)
        return self.lm_head(self.norm(self.call(self.blocks, x)))


def torch_peer(
    config: ModelConfig, device: torch.device, convert: Callable[[nn.Module], None] | None = None
) -> Peer:
    """Build the BF16 peer of nn.Linear and nn.RMSNorm; `convert` modifies it before blocks are compiled on a GPU."""
    _check(config)
    factory: dict[str, Any] = dict(device=device, dtype=torch.bfloat16)

    def call(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        # Once for all blocks, as in ours.
        positions = torch.arange(x.shape[1], device=x.device)
        cos, sin = rotary_tables(config.rope, positions, x.dtype)
        for block in blocks:
            x = block(x, cos, sin)
        return x

    peer = Peer(
        config,
        [TorchBlock(config, **factory) for _ in range(config.num_hidden_layers)],
        call,
        **factory,
    )
    if convert is not None:
        convert(peer)
    if device.type == "cuda":
        for block in peer.blocks:
            # Block by block, since all of them share one compiled graph.
            block.compile()
    return peer


def torchao_peer(config: ModelConfig, device: torch.device) -> Peer:
    """Build the torch peer with torchao's float8 training: tensorwise dynamic scales in all linears except the head."""
    _need_cuda(device, "torchao")
    with needs("--peers torchao", "torchao", "0.17", "optim"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415  optional

    def convert(peer: nn.Module) -> None:
        settings = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(
            peer, config=settings, module_filter_fn=lambda _, name: name != "lm_head"
        )

    return torch_peer(config, device, convert)


def te_layer_peer(config: ModelConfig, device: torch.device, recipe: Recipe | None) -> Peer:
    """Build the peer of NVIDIA's te.TransformerLayer: no gate, hence fewer FLOPs; every layer runs in the recipe."""
    _check(config)
    _need_cuda(device, "te-layer")
    te = engine_module("native")
    factory: dict[str, Any] = dict(device=device, dtype=torch.bfloat16)
    blocks = [
        te.TransformerLayer(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            num_gqa_groups=config.num_key_value_heads,
            kv_channels=config.head_dim,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            layernorm_epsilon=config.rms_norm_eps,
            bias=False,
            normalization="RMSNorm",
            activation="swiglu",
            attn_input_format="bshd",
            self_attn_mask_type="causal",
            fuse_qkv_params=True,
            params_dtype=torch.bfloat16,
            device=device,
        )
        for _ in range(config.num_hidden_layers)
    ]
    rope = te.RotaryPositionEmbedding(config.head_dim)
    te_recipe = recipe.build(te) if recipe is not None else None

    def call(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        frequencies = rope(x.shape[1]).to(device)
        with te.autocast(enabled=te_recipe is not None, recipe=te_recipe):
            for block in blocks:
                x = block(x, rotary_pos_emb=frequencies)
        return x

    return Peer(config, blocks, call, **factory)


PEERS: dict[str, Callable[[ModelConfig, torch.device], Peer]] = {
    "torch": torch_peer,
    "torchao": torchao_peer,
    "te-layer": lambda config, device: te_layer_peer(config, device, get_recipe("delayed")),
    "te-layer-bf16": lambda config, device: te_layer_peer(config, device, None),
}


MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "final_logit_softcapping",
)


def _check(config: ModelConfig) -> None:
    """Raise for features that the peers lack, rather than time another model."""
    missing_in_peers = {
        "attention_bias": config.attention_bias,
        "sliding_window": config.sliding_window,
        "attention_sinks": config.attention_sinks,
    }
    for part in config.parts:
        if type(part) not in (AttentionSpec, MLPSpec):
            missing_in_peers[f"{part.name} of its kind"] = True
        missing_in_peers |= dict.fromkeys(part.obstacles, True)
    missing_in_peers |= {
        "qk_norm": config.qk_norm,
        "partial_rotary_factor": config.partial_rotary_factor != 1,
        "rope_interleaved": config.rope_interleaved,
        "attn_logit_softcapping": config.attn_logit_softcapping is not None,
        "query_scale_beta": config.query_scale_beta is not None,
        "attention_gate_activation": config.attention_gate_activation != "sigmoid",
        "norm_position": config.norm_position != "pre",
        "attention_chunk_size": config.attention_chunk_size is not None,
        "norm_type": config.norm_type != "rms",
        "parallel_residual": config.parallel_residual,
        "attention_output_bias": config.attention_output_bias,
    }
    fields = config.to_dict()
    missing_in_peers |= {name: fields[name] not in (1, None) for name in MULTIPLIERS}
    if present := [name for name, value in missing_in_peers.items() if value]:
        raise UsageError(
            f"the peers have no {present[0]}: choose a gated-* preset, or --peers none"
        )


def _need_cuda(device: torch.device, name: str) -> None:
    if device.type != "cuda":
        raise UsageError(f"peer {name!r} needs a CUDA device: choose --peers torch, or none")


def step_of(model: nn.Module, loss_of: Callable[[], Tensor | None]) -> StepFunction:
    """Return a function that computes the gradients of the loss that `loss_of` returns, and returns it."""

    def step() -> Tensor:
        for parameter in model.parameters():
            # As in training: backward writes the gradients instead of adding to them.
            parameter.grad = None
        loss = loss_of()
        assert loss is not None
        loss.backward()
        return loss.detach()

    return step


def peer_loss(peer: Peer, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function of ids [B, S] that returns the loss of `peer` on them, compiled on a GPU."""

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return elementwise.cross_entropy(logits.flatten(0, 1), targets.flatten())

    if device.type == "cuda":
        loss_of = torch.compile(loss_of)

    def loss(ids: Tensor) -> Tensor:
        # Shifted targets instead of shifted logits, which would be a copy of [B, S, V].
        # [B, S]; nothing follows the last token.
        targets = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        return loss_of(peer(ids), targets)

    return loss


def peer_step(peer: Peer, ids: Tensor) -> StepFunction:
    """Return a function that runs forward and backward of `peer` on ids [B, S]; it returns the loss."""
    loss = peer_loss(peer, ids.device)
    return step_of(peer, lambda: loss(ids))
