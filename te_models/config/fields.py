"""The fields of a model's config: each is declared here once, with its default, its help and its range. No torch.

te_models.config.layers makes descriptions of layers from them, and te_models.config.model checks that they fit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import MISSING, dataclass

from te_models.config.attention import HeadSizes
from te_models.config.deltanet import DeltaNetConfig
from te_models.config.kda import KDAConfig
from te_models.config.kinds import MIXERS, MLPS
from te_models.config.latent import LatentConfig
from te_models.config.layer_inputs import LayerInputsConfig
from te_models.config.mamba2 import Mamba2Config
from te_models.config.moe import MoEConfig
from te_models.config.parallel import ParallelConfig
from te_models.config.rope import Rope, Scaling, frozen
from te_models.config.settings import Settings, count, positive, setting
from te_models.config.short_conv import ShortConvConfig

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2")
MAX_LAYERS = 10_000  # planning a model loops over its layers
# Fields with one entry per layer.
PER_LAYER = (
    "no_rope_layers",
    "layer_types",
    "mlp_layer_types",
    "expert_limits",
    "mlp_limits",
    "shared_key_layers",
    "intermediate_sizes",
)


@dataclass(kw_only=True, unsafe_hash=True)
class ModelFields(Settings):
    """The fields of ModelConfig, which explains them together, and the rotary embeddings that follow from them."""

    vocab_size: int = count(MISSING, "Number of token ids.")
    hidden_size: int = count(MISSING, "Width of the residual stream.")
    intermediate_size: int = count(MISSING, "Width of the MLP.")
    num_hidden_layers: int = count(MISSING, "Number of blocks.", below=MAX_LAYERS + 1)
    num_attention_heads: int = count(MISSING, "Number of query heads.")
    num_key_value_heads: int = count(
        None, "Number of key and value heads; default: one per query head."
    )
    head_dim: int = count(None, "Channels per head; default: hidden size / query heads.")
    max_position_embeddings: int = count(4096, "Longest sequence.")
    rms_norm_eps: float = positive(1e-5, "Epsilon of every norm.")
    rope_theta: float = positive(10000.0, "Base of the RoPE frequencies.")
    rope_scaling: Scaling | None = setting(
        None, "Scaling of RoPE beyond the trained length.", hash=False
    )
    sliding_rope: Scaling | None = setting(
        None, "RoPE of the layers with a window, where it differs (Gemma 3, OLMo 3).", hash=False
    )
    rope_interleaved: bool = setting(
        False, "RoPE rotates neighboring channels instead of the two halves (GLM-4)."
    )
    partial_rotary_factor: float = positive(
        1.0, "Share of a head's channels that RoPE rotates (Qwen3-Next)."
    )
    no_rope_layers: tuple[int, ...] | None = setting(
        None, "One entry per layer: 1 with RoPE, 0 without (SmolLM3).", choices=(0, 1)
    )
    sliding_window: int | None = count(
        None, "Number of keys that a query sees, itself included (Mistral)."
    )
    attention_chunk_size: int | None = count(
        None,
        "Tokens of a chunk in the chunked_attention layers, where a query sees the keys of its own (Llama 4).",
    )
    layer_types: tuple[str, ...] | None = setting(
        None,
        'One entry per layer, "full_attention", "sliding_attention", "chunked_attention", "linear_attention", '
        '"latent_attention", "conv", "mamba2", "kda", "parallel", or "mlp" without a mixer; None: the window applies '
        "to all, or all are latent.",
        choices=MIXERS,
    )
    linear_attention: DeltaNetConfig | None = setting(
        None, "Sizes of the linear_attention layers, Gated DeltaNet (Qwen3.5, Qwen3-Next)."
    )
    latent_attention: LatentConfig | None = setting(
        None,
        "Sizes of multi-head latent attention, whose keys and values come from a latent (DeepSeek-V3).",
    )
    kda: KDAConfig | None = setting(
        None, "Sizes of the kda layers, Kimi Delta Attention (Kimi Linear, Ling 3)."
    )
    mamba2: Mamba2Config | None = setting(
        None, "Sizes of the mamba2 layers, state spaces (Nemotron-H, Granite 4, Falcon-H1)."
    )
    short_conv: ShortConvConfig | None = setting(
        None, "Sizes of the conv layers, gated short convolutions (LFM2)."
    )
    parallel_mixers: ParallelConfig | None = setting(
        None, "The mixers beside each other in each parallel layer (Falcon-H1)."
    )
    sliding_heads: HeadSizes | None = setting(
        None, "Heads of the layers with a window, where they differ (Gemma 4)."
    )
    keys_as_values: bool = setting(
        False,
        "Layers without a window have no projection of values: keys before norm and RoPE are those (Gemma 4).",
    )
    shared_key_layers: tuple[int, ...] | None = setting(
        None,
        "One entry per layer: 1 with the keys and values of the last layer of its kind that has 0 (Gemma 4 E2B).",
        choices=(0, 1),
    )
    layer_inputs: LayerInputsConfig | None = setting(
        None, "Sizes of a second embedding, with a vector for each layer (Gemma 4 E2B)."
    )
    kind_options: Scaling | None = setting(
        None,
        "Options of the kinds of layers that other packages register, by names of theirs.",
        hash=False,
    )
    attention_gate: str = setting(
        "elementwise",
        "Gate of the attention output: elementwise, headwise or none.",
        choices=("elementwise", "headwise", "none"),
    )
    attention_gate_activation: str = setting(
        "sigmoid",
        "Function of the gate: sigmoid or softplus (Laguna).",
        choices=("sigmoid", "softplus"),
    )
    attention_bias: bool = setting(False, "Bias on q, k and v (Qwen2).")
    attention_output_bias: bool = setting(False, "Bias on o_proj.")
    attention_multiplier: float | None = positive(
        None,
        "Factor on the products of queries and keys; default: head_dim ** -0.5 (Granite, Gemma).",
    )
    attn_logit_softcapping: float | None = positive(None, "Cap of the attention logits (Gemma 2).")
    attention_sinks: bool = setting(
        False, "A trained logit per query head in the denominator of attention's softmax (gpt-oss)."
    )
    query_scale_beta: float | None = positive(
        None, "Scale queries by 1 + beta * log(1 + position // query_scale_length) (Ministral 3)."
    )
    query_scale_length: int | None = count(
        None, "Positions that query_scale_beta leaves as they are."
    )
    query_scale_rule: str = setting(
        "position",
        "What scales queries: their position; or slot + 1, padding counted, in layers without RoPE (Llama 4).",
        choices=("position", "slot"),
    )
    qk_norm: bool = setting(False, "RMSNorm on q and k (Qwen3).")
    qk_norm_layers: str = setting(
        "all", "Layers with qk_norm: all, or those with rope (Llama 4).", choices=("all", "rope")
    )
    qk_norm_scope: str = setting(
        "head",
        "Scope of qk_norm: each head, or all_heads together (OLMo 2).",
        choices=("head", "all_heads"),
    )
    qk_norm_weights: bool = setting(
        True, "Norms of q and k have weights; without, they only divide by the root mean square."
    )
    qk_norm_after_rope: bool = setting(
        False, "Norms of q and k come after RoPE instead of before (Hunyuan)."
    )
    value_norm: bool = setting(False, "RMSNorm without weights on each head of v (Gemma 4).")
    norm_type: str = setting(
        "rms",
        "Norms of the residual stream: rms (te.RMSNorm), or layer (te.LayerNorm without a bias; Cohere).",
        choices=("rms", "layer"),
    )
    parallel_residual: bool = setting(
        False,
        "Attention and MLP read one norm of the same input, beside each other (Cohere).",
    )
    norm_position: str = setting(
        "pre",
        "RMSNorm of attention and MLP: pre (their input), post (their output) or both.",
        choices=("pre", "post", "both"),
    )
    zero_centered_norm: bool = setting(False, "Store gamma - 1 in every norm (Qwen3-Next).")
    hidden_act: str = setting(
        "silu",
        "Activation of the MLP: silu, gelu, gelu_pytorch_tanh or relu2.",
        choices=ACTIVATIONS,
    )
    intermediate_sizes: tuple[int, ...] | None = setting(
        None, "One entry per layer: the width of its MLP, in place of intermediate_size."
    )
    mlp_gate: bool = setting(True, "Gate the MLP, act(gate) * up; without, act(up) (Arcee).")
    mlp_bias: bool = setting(False, "Bias on the projections of the MLP.")
    moe: MoEConfig | None = setting(None, "Experts in place of MLPs.")
    mlp_layer_types: tuple[str, ...] | None = setting(
        None,
        'One entry per layer, "dense", "sparse" (experts) or "none"; None: all sparse with moe, else all dense.',
        choices=MLPS,
    )
    expert_limits: tuple[float, ...] | None = setting(
        None,
        "One entry per layer: the bound of silu(gate) and |up| in its experts; 0: none (Step-3.7).",
    )
    mlp_limits: tuple[float, ...] | None = setting(
        None, "The same for the MLPs and the shared experts."
    )
    mlp_multipliers: tuple[float, ...] | None = setting(
        None,
        "Two factors in each MLP: on the gate before its activation, and on the output (Falcon-H1).",
        least=-math.inf,
    )
    embedding_multiplier: float = positive(1.0, "Factor on the embeddings (Granite, Gemma).")
    embedding_norm: bool = setting(
        False, "RMSNorm without weights on the embeddings (Muse-Glimmer)."
    )
    post_norm_eps: float | None = positive(
        None, "Epsilon of the norms after attention and MLP; default: rms_norm_eps (Muse-Glimmer)."
    )
    plain_final_norm: bool = setting(
        False, "The last norm stores gamma also where zero_centered_norm is set (Muse-Glimmer)."
    )
    layer_scale: bool = setting(
        False,
        "Multiply the output of each layer by a stored number, which is not trained (Gemma 4).",
    )
    residual_multiplier: float = positive(
        1.0, "Factor on the outputs of attention and MLP before the residual addition (Granite)."
    )
    logits_scaling: float = positive(1.0, "Divisor of the logits (Granite).")
    final_logit_softcapping: float | None = positive(None, "Cap of the logits (Gemma 2).")
    tie_word_embeddings: bool = setting(False, "Share one table between embedding and head.")
    initializer_range: float = positive(0.02, "Standard deviation of initial weights.")
    bos_token_id: int | None = setting(None, "Token id that begins a text.")
    eos_token_id: int | tuple[int, ...] | None = setting(
        None, "Token id that ends a text; may be several."
    )
    pad_token_id: int | None = setting(None, "Token id of padding.")

    @functools.cached_property
    def rope(self) -> Rope:
        """The rotary embedding of layers without a window, and of the others too where there is no `sliding_rope`."""
        return Rope(
            theta=self.rope_theta,
            head_dim=self.head_dim,
            share=self.partial_rotary_factor,
            context=self.max_position_embeddings,
            interleaved=self.rope_interleaved,
            stretching=frozen(self.rope_scaling),
        )

    @functools.cached_property
    def window_rope(self) -> Rope:
        """The rotary embedding of layers with a window."""
        dim = self.head_dim if self.sliding_heads is None else self.sliding_heads.head_dim
        if self.sliding_rope is None:
            return dataclasses.replace(self.rope, head_dim=dim)
        scaling = dict(self.sliding_rope)
        theta = scaling.pop("rope_theta")
        share = scaling.pop("partial_rotary_factor", 1.0)
        return dataclasses.replace(
            self.rope, theta=theta, head_dim=dim, share=share, stretching=frozen(scaling)
        )
