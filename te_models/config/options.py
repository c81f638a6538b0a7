"""The keywords of models by name and type, for editors and type checkers. No torch.

A test compares each class with the fields that are checked at run time (ModelConfig, recipe.SCHEMES).
"""

from collections.abc import Mapping
from typing import Literal

from typing_extensions import TypedDict

from te_models.config.attention import HeadSizes
from te_models.config.deltanet import DeltaNetConfig
from te_models.config.kda import KDAConfig
from te_models.config.latent import LatentConfig
from te_models.config.layer_inputs import LayerInputsConfig
from te_models.config.mamba2 import Mamba2Config
from te_models.config.moe import MoEConfig
from te_models.config.parallel import ParallelConfig
from te_models.config.rope import Scaling
from te_models.config.short_conv import ShortConvConfig


class RecipeOptions(TypedDict, total=False):
    """Fields of a recipe; each recipe accepts the fields of its scheme (te_models.config.recipe.SCHEMES)."""

    # All recipes: what stays out of FP8, or runs under another recipe.
    num_layers_at_start_in_bf16: int
    num_layers_at_end_in_bf16: int
    lm_head: Literal["bf16", "fp8"]
    precision: Mapping[str, str]
    # All but nvfp4.
    fp8_format: Literal["HYBRID", "E4M3"]
    # DelayedScaling
    margin: int
    amax_history_len: int
    amax_compute_algo: Literal["most_recent", "max"]
    reduce_amax: bool
    # Float8CurrentScaling
    use_power_2_scales: bool
    # Float8BlockScaling
    use_f32_scales: bool
    x_block_scaling_dim: Literal[1, 2]
    w_block_scaling_dim: Literal[1, 2]
    grad_block_scaling_dim: Literal[1, 2]
    # MXFP8BlockScaling
    enable_2d_quantization: bool
    # NVFP4BlockScaling
    disable_rht: bool
    disable_stochastic_rounding: bool
    disable_2d_quantization: bool
    # All but DelayedScaling
    backward_override: Literal["none", "high_precision", "dequantized"]


class ConfigOptions(TypedDict, total=False):
    """Fields of ModelConfig, which documents them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Scaling | None
    sliding_rope: Scaling | None
    rope_interleaved: bool
    partial_rotary_factor: float
    no_rope_layers: tuple[int, ...] | None
    sliding_window: int | None
    attention_chunk_size: int | None
    layer_types: tuple[str, ...] | None
    linear_attention: DeltaNetConfig | None
    kda: KDAConfig | Mapping[str, int | float | None] | None
    mamba2: Mamba2Config | Mapping[str, int | float | str | bool | tuple[float, ...] | None] | None
    short_conv: ShortConvConfig | Mapping[str, int | bool] | None
    latent_attention: LatentConfig | Mapping[str, float | None] | None
    parallel_mixers: (
        ParallelConfig | Mapping[str, tuple[str, ...] | tuple[float, ...] | None] | None
    )
    sliding_heads: HeadSizes | Mapping[str, int] | None
    keys_as_values: bool
    shared_key_layers: tuple[int, ...] | None
    layer_inputs: LayerInputsConfig | Mapping[str, int] | None
    kind_options: Scaling | None
    attention_gate: str
    attention_gate_activation: str
    attention_bias: bool
    attention_output_bias: bool
    attention_multiplier: float | None
    attn_logit_softcapping: float | None
    attention_sinks: bool
    query_scale_beta: float | None
    query_scale_length: int | None
    query_scale_rule: str
    qk_norm: bool
    qk_norm_layers: str
    qk_norm_scope: str
    qk_norm_weights: bool
    qk_norm_after_rope: bool
    value_norm: bool
    norm_type: str
    parallel_residual: bool
    norm_position: str
    zero_centered_norm: bool
    hidden_act: str
    intermediate_sizes: tuple[int, ...] | None
    mlp_gate: bool
    mlp_bias: bool
    moe: MoEConfig | Mapping[str, float | str] | None
    mlp_layer_types: tuple[str, ...] | None
    expert_limits: tuple[float, ...] | None
    mlp_limits: tuple[float, ...] | None
    mlp_multipliers: tuple[float, ...] | None
    embedding_multiplier: float
    embedding_norm: bool
    post_norm_eps: float | None
    plain_final_norm: bool
    layer_scale: bool
    residual_multiplier: float
    logits_scaling: float
    final_logit_softcapping: float | None
    tie_word_embeddings: bool
    initializer_range: float
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None
