"""Hugging Face's decoder families as tables that map their config keys and tensor names to ours. No torch.

A family is one entry of FAMILIES: the keys of config.json that are copied, the values of other keys that te-models can
compute, and the rows of our fused weights that hold each of their tensors. Reading refuses every other key unless it is known
to have no effect; writing uses the same entry in reverse. Facts: the configuration and modeling files of
transformers 5.23, and modeling_qwen3.py of qiuzh20/gated_attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from te_models.config.model import ModelConfig
from te_models.errors import ConfigError, unknown

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """The place of a tensor of theirs in ours: these blocks of rows of `module`, or all of it.

    Several blocks alternate in their tensor, once per unit of `per` (a count in ModelConfig): for instance, the gate of each
    head after the queries of that head.
    """

    module: str
    blocks: tuple[str, ...] = ()
    per: str | None = None


@dataclass(frozen=True)
class Part:
    """Keys of config.json that belong together, with a function to read them and one to write them."""

    keys: tuple[str, ...]
    read: Callable[[Values], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of Hugging Face.

    Attributes:
        model_type, architecture: as in config.json.
        layer: their name below "model.layers.<i>." -> its place in ours, for weights and biases.
        parts: keys that need more than copying.
        constants: values of our fields that all models of the family share.
        defaults: the values that transformers uses for absent keys.
        only: their keys -> the values that te-models supports; any other is refused.
        ignored: their keys that change nothing in a model that is accepted.
        marks: keys that distinguish the family from others of its model_type.
        written: False if only models that came as it are written as it, since transformers has no code for it.
        code: whether its folders come with te-models' own code for transformers (te_models.interop.remote_code).
    """

    model_type: str
    architecture: str
    layer: Mapping[str, Rows]
    parts: tuple[Part, ...]
    constants: Values = field(default_factory=dict)
    defaults: Values = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    marks: tuple[str, ...] = ()
    written: bool = True
    code: bool = False

    def read(self, config: Values) -> ModelConfig:
        """Return the ModelConfig of a config.json; a ConfigError names a request that te-models does not support."""
        self._refuse_unsupported(config)
        for key in SIZES:
            if not isinstance(config.get(key), int):
                raise ConfigError(
                    f"{key}={config[key]!r} is not a whole number" if key in config else f"it lacks {key}"
                )
        stated = {**self.defaults, **config}  # a null among these is a statement, such as having no eos token
        ours = {key: stated[key] for key in COPIED if key in stated}
        theirs = {**self.defaults, **{key: value for key, value in config.items() if value is not None}}
        for part in self.parts:
            ours |= part.read(theirs)
        return ModelConfig.from_dict({**ours, **self.constants})

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The config.json of a model, without its dtype."""
        ours = config.to_dict()
        theirs: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        theirs |= {key: ours[key] for key in COPIED}
        theirs |= {key: values[0] for key, values in self.only.items()}
        for part in self.parts:
            theirs |= part.write(config)
        return theirs

    def known(self) -> set[str]:
        """The keys that `write` writes or a part reads."""
        return {*COPIED, *self.only, *(key for part in self.parts for key in part.keys)}

    def _refuse_unsupported(self, config: Values) -> None:
        for key, value in config.items():
            if key in self.only and value not in self.only[key]:
                wanted = " or ".join(map(repr, self.only[key]))
                raise ConfigError(
                    f"{key}={value!r} is not supported for {self.model_type}: te-models computes {wanted}"
                )
            known = key in self.known() or key in HARMLESS or key in self.ignored or key.startswith(("_", "unsloth_"))
            if not known and value is not None and value is not False:
                shown = repr(value) if len(repr(value)) < 80 else f"{repr(value)[:77]}..."
                raise ConfigError(
                    f"{key}={shown} is not supported for {self.model_type}: te-models does not know it; if it changes "
                    "nothing in what the model computes, take it out of config.json"
                )
        for name in config.get("architectures") or ():
            if not name.endswith("ForCausalLM"):
                raise ConfigError(f"architectures={name!r} is not supported: te-models reads {self.architecture}")


COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range", "bos_token_id",
    "eos_token_id", "pad_token_id",
)  # fmt: skip

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Keys without effect on logits or training: bookkeeping, and defaults of generation and of other heads.
HARMLESS = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "pretraining_tp",
    "tokenizer_class", "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params",
    "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "output_scores",
    "torchscript", "chunk_size_feed_forward", "is_decoder", "do_sample", "early_stopping", "max_length", "min_length",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty",
    "encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "num_beams", "num_beam_groups", "num_return_sequences",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids",
    "begin_suppress_tokens", "suppress_tokens", "remove_invalid_values", "prefix", "sep_token_id",
    "decoder_start_token_id", "model_max_length", "tf_legacy_loss", "use_bfloat16", "keys_to_ignore_at_inference",
    "max_sequence_length", "attn_implementation", "cache_implementation", "is_llama_config", "transformers.js_config",
})  # fmt: skip


def _read_rope(theirs: Values) -> dict[str, Any]:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of earlier versions."""
    values = {**(theirs.get("rope_scaling") or {}), **(theirs.get("rope_parameters") or {})}
    if any(isinstance(value, Mapping) for value in values.values()):
        raise ConfigError("rope_parameters by layer type are not supported: te-models has one RoPE for all layers")
    found = {key: values.pop(key, theirs.get(key)) for key in ("rope_theta", "partial_rotary_factor")}
    found = {key: value for key, value in found.items() if value is not None}
    kinds = [values.pop(key) for key in ("type", "rope_type") if key in values]
    if kinds and kinds[-1] != "default":
        found["rope_scaling"] = {"rope_type": kinds[-1], **values}
    elif values:
        raise ConfigError(f"rope_scaling with {', '.join(values)} but no rope_type is not supported")
    return found


def _read_whole_rope(theirs: Values) -> dict[str, Any]:
    """Read the RoPE of families in which transformers always rotates whole heads.

    There it ignores `partial_rotary_factor` under the default RoPE, and fails on it under any other.
    """
    found = _read_rope(theirs)
    share = found.pop("partial_rotary_factor", 1.0)
    if share != 1.0 and "rope_scaling" in found:
        kind = found["rope_scaling"]["rope_type"]
        raise ConfigError(
            f"partial_rotary_factor={share} with RoPE of type {kind!r} is not supported for this model type"
        )
    return found


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    """Return the older form, which every version of transformers reads."""
    return {"rope_theta": config.rope_theta, "rope_scaling": config.to_dict()["rope_scaling"]}


def _write_partial_rope(config: ModelConfig) -> dict[str, Any]:
    return {**_write_rope(config), "partial_rotary_factor": config.partial_rotary_factor}


def _layer_types(theirs: Values) -> list[str]:
    """Return the default: layers from `max_window_layers` on use a sliding window."""
    count, full = theirs["num_hidden_layers"], theirs["max_window_layers"]
    return ["sliding_attention" if layer >= full else "full_attention" for layer in range(count)]


def _layer_types_without_rope(theirs: Values) -> list[str]:
    """Return the default of SmolLM3: layers without RoPE use a sliding window."""
    rope = _rope_layers(theirs)
    return ["full_attention" if rope[layer] else "sliding_attention" for layer in range(theirs["num_hidden_layers"])]


def _read_window_by_layer(default: Callable[[Values], list[str]]) -> Callable[[Values], dict[str, Any]]:
    def read(theirs: Values) -> dict[str, Any]:
        window = theirs.get("sliding_window") if theirs.get("use_sliding_window") else None
        types = theirs.get("layer_types") or (default(theirs) if window else ["full_attention"])
        if set(types) == {"full_attention"}:
            return {}
        return {"sliding_window": window, "layer_types": None if set(types) == {"sliding_attention"} else types}

    return read


def _write_window_by_layer(config: ModelConfig) -> dict[str, Any]:
    slides = [config.window(layer) is not None for layer in range(config.num_hidden_layers)]
    types = ["sliding_attention" if slide else "full_attention" for slide in slides]
    window = config.sliding_window if any(slides) else None
    return {"use_sliding_window": any(slides), "sliding_window": window, "layer_types": types}


def _rope_layers(theirs: Values) -> list[int]:
    count, interval = theirs["num_hidden_layers"], theirs["no_rope_layer_interval"]
    return theirs.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]


def _read_no_rope(theirs: Values) -> dict[str, Any]:
    count = theirs["num_hidden_layers"]
    layers = _rope_layers(theirs)[:count]
    return {} if layers == [1] * count else {"no_rope_layers": layers}


def _write_no_rope(config: ModelConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(config.has_rope(layer)) for layer in range(config.num_hidden_layers)]}


GATE_FLAGS = {"headwise": "headwise_attn_output_gate", "elementwise": "elementwise_attn_output_gate"}


def _read_gate(theirs: Values) -> dict[str, Any]:
    gates = [gate for gate, flag in GATE_FLAGS.items() if theirs.get(flag)]
    if len(gates) > 1:
        raise ConfigError(f"{' and '.join(GATE_FLAGS.values())} together are not supported: set one of them to false")
    return {"attention_gate": gates[0] if gates else "none", "qk_norm": bool(theirs["use_qk_norm"])}


def _write_gate(config: ModelConfig) -> dict[str, Any]:
    flags = {flag: config.attention_gate == gate for gate, flag in GATE_FLAGS.items()}
    return {**flags, "use_qk_norm": config.qk_norm}


def _read_dense(theirs: Values) -> dict[str, Any]:
    """Refuse experts and linear attention; te-models supports the dense full-attention layers of Qwen3-Next."""
    count = theirs["num_hidden_layers"]
    interval = theirs.get("full_attention_interval", 4)
    types = theirs.get("layer_types") or [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(count)
    ]
    for layer, kind in enumerate(types):
        if kind != "full_attention":
            raise ConfigError(
                f"layer_types: layer {layer} is {kind!r}, which is not supported: te-models reads full_attention"
            )
    experts, step = theirs["num_experts"], theirs["decoder_sparse_step"]
    for layer in range(count):
        if experts and (layer + 1) % step == 0 and layer not in theirs["mlp_only_layers"]:
            raise ConfigError(f"num_experts={experts} in layer {layer} is not supported: te-models reads dense layers")
    return {}


def _write_dense(config: ModelConfig) -> dict[str, Any]:
    layers = list(range(config.num_hidden_layers))
    return {"num_experts": 0, "mlp_only_layers": layers, "layer_types": ["full_attention"] * len(layers)}


ROPE = Part(("rope_theta", "rope_scaling", "rope_parameters"), _read_whole_rope, _write_rope)
PARTIAL_ROPE = Part((*ROPE.keys, "partial_rotary_factor"), _read_rope, _write_partial_rope)
WINDOW = Part(
    ("sliding_window",),
    lambda theirs: {"sliding_window": theirs.get("sliding_window")},
    lambda config: {"sliding_window": config.sliding_window},
)
_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
WINDOW_BY_LAYER = Part(_WINDOW_KEYS, _read_window_by_layer(_layer_types), _write_window_by_layer)
WINDOW_WITHOUT_ROPE = Part(_WINDOW_KEYS, _read_window_by_layer(_layer_types_without_rope), _write_window_by_layer)
NO_ROPE = Part(("no_rope_layers", "no_rope_layer_interval"), _read_no_rope, _write_no_rope)
GATE = Part((*GATE_FLAGS.values(), "use_qk_norm"), _read_gate, _write_gate)
DENSE = Part(
    ("mlp_only_layers", "num_experts", "decoder_sparse_step", "layer_types", "full_attention_interval"),
    _read_dense,
    _write_dense,
)

# The options of remote_code/configuration_te_models.py; all other fields are keys of config.json.
OWN_OPTIONS = (
    "rope_theta", "rope_scaling", "partial_rotary_factor", "no_rope_layers", "sliding_window", "layer_types",
    "attention_gate", "attention_bias", "qk_norm", "zero_centered_norm", "sliding_rope", "rope_interleaved",
    "attention_gate_activation", "attention_output_bias", "attention_multiplier", "attn_logit_softcapping",
    "query_scale_beta", "query_scale_length", "qk_norm_scope", "norm_position", "hidden_act", "mlp_gate", "mlp_bias",
    "embedding_multiplier", "residual_multiplier", "logits_scaling", "final_logit_softcapping",
)  # fmt: skip
_AUTO_MAP = {
    "AutoConfig": "configuration_te_models.TEModelsDecoderConfig",
    "AutoModel": "modeling_te_models.TEModelsDecoderModel",
    "AutoModelForCausalLM": "modeling_te_models.TEModelsDecoderForCausalLM",
}


def _read_own(theirs: Values) -> dict[str, Any]:
    options = theirs.get("decoder_options") or {}
    for name in options:
        if name not in OWN_OPTIONS:
            raise unknown("field of decoder_options", name, OWN_OPTIONS)
    return dict(options)


def _write_own(config: ModelConfig) -> dict[str, Any]:
    options = {name: value for name, value in config.to_dict().items() if name in OWN_OPTIONS}
    return {"auto_map": _AUTO_MAP, "decoder_options": options}


OWN = Part(("decoder_options", "auto_map"), _read_own, _write_own)

LAYER = {
    "input_layernorm": Rows("input_layernorm"),
    "self_attn.q_proj": Rows("self_attn.qkvg_proj", ("q",)),
    "self_attn.k_proj": Rows("self_attn.qkvg_proj", ("k",)),
    "self_attn.v_proj": Rows("self_attn.qkvg_proj", ("v",)),
    "self_attn.o_proj": Rows("self_attn.o_proj"),
    "post_attention_layernorm": Rows("post_attention_layernorm"),
    "mlp.gate_proj": Rows("mlp.gate_up_proj", ("gate",)),
    "mlp.up_proj": Rows("mlp.gate_up_proj", ("up",)),
    "mlp.down_proj": Rows("mlp.down_proj"),
}
NORMED_LAYER = {**LAYER, "self_attn.q_norm": Rows("self_attn.q_norm"), "self_attn.k_norm": Rows("self_attn.k_norm")}
# The gate comes out of q_proj: after the queries of each group of heads that share a key, or of each head.
GATED_BY_GROUP = {**NORMED_LAYER, "self_attn.q_proj": Rows("self_attn.qkvg_proj", ("q", "g"), "num_key_value_heads")}
GATED_BY_HEAD = {**NORMED_LAYER, "self_attn.q_proj": Rows("self_attn.qkvg_proj", ("q", "g"), "num_attention_heads")}
OWN_LAYER = {
    **NORMED_LAYER,
    "self_attn.g_proj": Rows("self_attn.qkvg_proj", ("g",)),
    "attention_output_norm": Rows("attention_output_norm"),
    "mlp_output_norm": Rows("mlp_output_norm"),
}
# Outside the layers: their name -> ours.
TOP = {"model.embed_tokens": "embed_tokens", "model.norm": "norm", "lm_head": "lm_head"}

SILU = {"hidden_act": ("silu", "swish"), "attention_dropout": (0.0,)}
NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}
UNGATED = {"attention_gate": "none"}
_LENGTHS = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}

FAMILIES = (
    Family(
        model_type="llama", architecture="LlamaForCausalLM", layer=LAYER, parts=(ROPE,), constants=UNGATED,
        defaults={**_LENGTHS, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        only={**SILU, **NO_BIAS},
    ),
    Family(
        model_type="mistral", architecture="MistralForCausalLM", layer=LAYER, parts=(ROPE, WINDOW), constants=UNGATED,
        defaults={**_LENGTHS, "max_position_embeddings": 131072, "num_key_value_heads": 8, "bos_token_id": 1,
                  "eos_token_id": 2},
        only=SILU,
    ),
    Family(
        model_type="qwen2", architecture="Qwen2ForCausalLM", layer=LAYER, parts=(ROPE, WINDOW_BY_LAYER),
        constants={**UNGATED, "attention_bias": True},
        defaults={**_LENGTHS, "num_key_value_heads": 32, "max_window_layers": 28}, only=SILU,
    ),
    Family(
        model_type="qwen3", architecture="Qwen3ForCausalLM", layer=NORMED_LAYER, parts=(ROPE, WINDOW_BY_LAYER),
        constants={**UNGATED, "qk_norm": True},
        defaults={**_LENGTHS, "num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28},
        only={**SILU, "attention_bias": (False,)},
    ),
    Family(
        model_type="smollm3", architecture="SmolLM3ForCausalLM", layer=LAYER, parts=(ROPE, NO_ROPE, WINDOW_WITHOUT_ROPE),
        constants=UNGATED,
        defaults={**_LENGTHS, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2000000.0,
                  "no_rope_layer_interval": 4, "bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004},
        only={**SILU, **NO_BIAS},
    ),
    Family(  # qiuzh20/gated_attention, whose published files say "qwen2"
        model_type="qwen3", architecture="Qwen3ForCausalLM", layer=GATED_BY_GROUP, parts=(ROPE, GATE),
        defaults={**_LENGTHS, "num_key_value_heads": 32, "head_dim": 128, "use_qk_norm": True},
        only={**SILU, "attention_bias": (False,), "qkv_bias": (False,), "use_sliding_window": (False,)},
        ignored=frozenset(("auto_map", "sliding_window", "max_window_layers")),
        marks=(*GATE.keys, "qkv_bias"), written=False,
    ),
    Family(
        model_type="qwen3_next", architecture="Qwen3NextForCausalLM", layer=GATED_BY_HEAD, parts=(PARTIAL_ROPE, DENSE),
        constants={"attention_gate": "elementwise", "qk_norm": True, "zero_centered_norm": True},
        defaults={**_LENGTHS, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
                  "num_experts": 512, "decoder_sparse_step": 1, "mlp_only_layers": ()},
        only={**SILU, "attention_bias": (False,)},
        ignored=frozenset((
            "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads",
            "linear_value_head_dim", "moe_intermediate_size", "norm_topk_prob", "num_experts_per_tok",
            "output_router_logits", "router_aux_loss_coef", "shared_expert_intermediate_size",
        )),
    ),
    Family(  # all that the others do not express
        model_type="te_models_decoder", architecture="TEModelsDecoderForCausalLM", layer=OWN_LAYER, parts=(OWN,),
        code=True,
    ),
)  # fmt: skip


def family_of(config: Values) -> Family:
    """Return the family that a config.json belongs to; raise UsageError for an unsupported architecture."""
    kind = config.get("model_type")
    marked = [f for f in FAMILIES if f.marks and kind in ("qwen2", "qwen3") and any(mark in config for mark in f.marks)]
    plain = [f for f in FAMILIES if not f.marks and f.model_type == kind]
    for family in (*marked, *plain):
        return family
    raise unknown("architecture (model_type)", kind, {f.model_type for f in FAMILIES})


def family_for(config: ModelConfig, preferred: Family | None = None) -> Family:
    """Return the first family, starting with `preferred`, whose config.json can express all of `config`."""
    for family in ((preferred,) if preferred else ()) + FAMILIES:
        if not family.written and family is not preferred:
            continue
        try:
            if family.read(family.write(config)) == config:
                return family
        except ValueError:
            continue
    features = {name: value for name, value in config.to_dict().items() if name in _FEATURES and value}
    raise ConfigError(f"no architecture of Hugging Face combines {features}: save it with format='te'")


_FEATURES = (
    "attention_gate", "attention_bias", "qk_norm", "rope_scaling", "partial_rotary_factor", "no_rope_layers",
    "sliding_window", "layer_types", "zero_centered_norm",
)  # fmt: skip
