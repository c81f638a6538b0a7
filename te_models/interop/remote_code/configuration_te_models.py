"""Configuration of decoders of te-models that no architecture of transformers computes."""

from typing import Any

from transformers import PretrainedConfig

# What `decoder_options` may hold, with the values of those that are left out.
DEFAULTS: dict[str, Any] = {
    # RoPE: base, stretching (the fields of `rope_scaling` of transformers 4), another for the layers with a window,
    # whether it rotates neighboring channels instead of halves, the share of channels that it rotates, and 1 per
    # layer that has it.
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_rope": None,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "no_rope_layers": None,
    # Attention: keys that a query sees, itself included, in the layers of type "sliding_attention" (None: in all).
    "sliding_window": None,
    "layer_types": None,
    # Tokens of a chunk, in the layers of type "chunked_attention": a query sees the keys of its own.
    "attention_chunk_size": None,
    "attention_gate": "elementwise",  # or "headwise", "none": a factor on the output, from a projection of its own
    "attention_gate_activation": "sigmoid",  # or "softplus"
    "attention_bias": False,
    "attention_output_bias": False,
    "attention_multiplier": None,  # of the products of queries and keys; None: head_dim ** -0.5
    "attn_logit_softcapping": None,
    "attention_sinks": False,  # a trained logit per head in the denominator of the softmax
    "query_scale_beta": None,  # queries times 1 + beta * log(1 + position // query_scale_length)
    "query_scale_length": None,
    "query_scale_rule": "position",  # or "slot": + 1, with padding counted, and in layers without RoPE alone
    "qk_norm": False,
    "qk_norm_layers": "all",  # or "rope"
    "qk_norm_scope": "head",  # or "all_heads"
    "qk_norm_weights": True,
    "qk_norm_after_rope": False,
    "value_norm": False,  # of each head, without weights
    # Norms: "rms", or "layer" (LayerNorm without a bias) but for q and k; of one input for attention and MLP side by
    # side; before attention and MLP ("pre"), after ("post"), or "both"; gamma - 1 as the weight.
    "norm_type": "rms",
    "parallel_residual": False,
    "norm_position": "pre",
    "zero_centered_norm": False,
    "post_norm_eps": None,  # of the norms after attention and MLP; None: rms_norm_eps
    "plain_final_norm": False,  # gamma itself as the weight of the last norm
    "embedding_norm": False,  # without weights
    "hidden_act": "silu",  # or "gelu", "gelu_pytorch_tanh", "relu2"
    "mlp_gate": True,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "final_logit_softcapping": None,
}


def choose(table: dict[str, Any], option: str, value: str) -> Any:
    """Return the entry of a table for the value of an option."""
    if value not in table:
        raise ValueError(f"{option}={value!r} is not known to this code")
    return table[value]


class TEModelsDecoderConfig(PretrainedConfig):
    """Shape of a decoder; `decoder_options` are DEFAULTS where they are not given.

    The options are apart from the other fields so that no version of transformers gives some of their names a meaning
    of its own.

    Raises:
        ValueError: an option that this file does not know.
    """

    model_type = "te_models_decoder"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 768,
        intermediate_size: int = 2304,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        max_position_embeddings: int = 4096,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = False,
        use_cache: bool = True,
        decoder_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = (
            num_attention_heads if num_key_value_heads is None else num_key_value_heads
        )
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.decoder_options = dict(decoder_options or {})
        if unknown := sorted(set(self.decoder_options) - set(DEFAULTS)):
            raise ValueError(
                f"decoder_options: {', '.join(unknown)} not known to this configuration_te_models.py"
            )
        kwargs["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(**kwargs)

    @property
    def options(self) -> dict[str, Any]:
        """All options of the decoder."""
        return {**DEFAULTS, **self.decoder_options}

    def slides(self, layer: int) -> bool:
        """Return whether a layer has a sliding window."""
        types = self.options["layer_types"]
        return self.options["sliding_window"] is not None and (
            types is None or types[layer] == "sliding_attention"
        )

    def chunks(self, layer: int) -> bool:
        """Return whether attention of a layer stays in chunks."""
        types = self.options["layer_types"]
        return types is not None and types[layer] == "chunked_attention"

    def has_rope(self, layer: int) -> bool:
        """Return whether a layer rotates its queries and keys."""
        layers = self.options["no_rope_layers"]
        return layers is None or bool(layers[layer])
