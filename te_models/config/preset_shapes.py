"""Shapes of families: the fields that the presets of one family share (te_models.config.presets). No torch."""

from typing import Any

PresetFields = dict[str, Any]  # fields of ModelConfig


def llama3_scaling(factor: float) -> PresetFields:
    """Return the RoPE scaling of Llama 3.1 and 3.2, which differ in the factor."""
    original = dict(
        low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    return dict(rope_type="llama3", factor=factor, **original)


LLAMA3: PresetFields = dict(
    vocab_size=128256,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    attention_gate="none",
    bos_token_id=128000,
    eos_token_id=128001,
)
QWEN3: PresetFields = dict(
    vocab_size=151936,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rope_theta=1000000.0,
    rms_norm_eps=1e-6,
    attention_gate="none",
    qk_norm=True,
    bos_token_id=151643,
    eos_token_id=151645,
)
MISTRAL: PresetFields = dict(
    vocab_size=131072,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    attention_gate="none",
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=11,
)
MINISTRAL3: PresetFields = dict(
    **MISTRAL,
    max_position_embeddings=262144,
    rope_theta=1000000.0,
    query_scale_beta=0.1,
    query_scale_length=16384,
    rope_scaling=dict(
        rope_type="yarn",
        factor=16.0,
        original_max_position_embeddings=16384,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
)
GRANITE: PresetFields = dict(
    vocab_size=49155,
    num_hidden_layers=40,
    num_attention_heads=32,
    num_key_value_heads=8,
    attention_gate="none",
    max_position_embeddings=131072,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)
OLMO: PresetFields = dict(
    rms_norm_eps=1e-6,
    rope_theta=500000.0,
    attention_gate="none",
    norm_position="post",
    qk_norm=True,
    qk_norm_scope="all_heads",
    eos_token_id=100257,
    pad_token_id=100277,
)
OLMO2: PresetFields = dict(**OLMO, vocab_size=100352, max_position_embeddings=4096)
OLMO3: PresetFields = dict(
    **OLMO,
    vocab_size=100278,
    max_position_embeddings=65536,
    sliding_window=4096,
    rope_scaling=dict(
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=8192,
        attention_factor=1.2079441541679836,
        beta_fast=32.0,
        beta_slow=1.0,
    ),
    sliding_rope=dict(rope_theta=500000.0),
)
EXAONE4: PresetFields = dict(
    vocab_size=102400,
    num_key_value_heads=8,
    rope_theta=1000000.0,
    rope_scaling=llama3_scaling(16.0),
    attention_gate="none",
    norm_position="post",
    qk_norm=True,
    bos_token_id=1,
    eos_token_id=361,
    pad_token_id=0,
)


def shape_of(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int | None = None,
    **fields: Any,
) -> PresetFields:
    """Return a shape of these sizes and `fields`."""
    sizes = dict(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers)
    key_value_heads = {} if kv_heads is None else dict(num_key_value_heads=kv_heads)
    return {**sizes, **key_value_heads, "num_attention_heads": heads, **fields}


def windowed(count: int, period: int, first: int = 0) -> PresetFields:
    """Return the kinds of `count` layers: every `period`-th, starting with number `first`, sees all keys."""
    kinds = ["sliding_attention"] * count
    for layer in range(count):
        if layer % period == first:
            kinds[layer] = "full_attention"
    return dict(num_hidden_layers=count, layer_types=tuple(kinds))


def command_r(
    hidden: int, intermediate: int, layers: int, heads: int, **fields: Any
) -> PresetFields:
    """Return the shape of a Command R: attention and MLP side by side after LayerNorm."""
    shape = dict(
        vocab_size=256000,
        norm_type="layer",
        parallel_residual=True,
        rope_interleaved=True,
        attention_gate="none",
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=5,
        eos_token_id=255001,
        pad_token_id=0,
    )
    return {**shape_of(hidden, intermediate, layers, heads, 8, **shape), **fields}


def gpt_oss(layers: int, experts: int) -> PresetFields:
    """Return the shape of a gpt-oss: attention with sinks, under a window in every second layer, and experts."""
    return dict(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        **windowed(layers, 2, 1),
        sliding_window=128,
        max_position_embeddings=131072,
        rope_theta=150000.0,
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            original_max_position_embeddings=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
        ),
        rms_norm_eps=1e-5,
        attention_gate="none",
        attention_bias=True,
        attention_output_bias=True,
        attention_sinks=True,
        eos_token_id=200002,
        pad_token_id=199999,
        moe=dict(
            num_experts=experts,
            num_experts_per_tok=4,
            moe_intermediate_size=2880,
            bias=True,
            swiglu_limit=7.0,
        ),
    )


def qwen_hybrid(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    value_heads: int = 16,
    **fields: Any,
) -> PresetFields:
    """Return the shape of a Qwen3.5's text model: three layers of linear attention, then one of gated attention."""
    shape = dict(
        linear_attention=dict(
            num_key_heads=16, num_value_heads=value_heads, key_head_dim=128, value_head_dim=128
        ),
        vocab_size=248320,
        max_position_embeddings=262144,
        head_dim=256,
        rope_theta=10000000.0,
        rms_norm_eps=1e-6,
        eos_token_id=248044,
    )
    return shape_of(
        hidden, intermediate, layers, heads, kv_heads, **hybrid_layers(layers), **shape, **fields
    )


def hybrid_layers(layers: int) -> PresetFields:
    """Return the fields that all hybrids share, whatever their sizes."""
    kinds = ("linear_attention",) * 3 + ("full_attention",)
    return dict(
        layer_types=kinds * (layers // 4),
        partial_rotary_factor=0.25,
        qk_norm=True,
        zero_centered_norm=True,
    )


def lfm2(
    hidden: int, intermediate: int, layers: int, attention: tuple[int, ...], **fields: Any
) -> PresetFields:
    """Return the shape of an LFM2: gated short convolutions, and attention in the layers `attention`."""
    kinds = ("full_attention" if layer in attention else "conv" for layer in range(layers))
    shape = dict(
        layer_types=tuple(kinds),
        short_conv=dict(kernel_dim=3),
        vocab_size=65536,
        max_position_embeddings=128000,
        rope_theta=1000000.0,
        attention_gate="none",
        qk_norm=True,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=7,
        pad_token_id=0,
    )
    return shape_of(hidden, intermediate, layers, hidden // 64, 8, **shape, **fields)


def granite4(
    hidden: int, intermediate: int, heads: int, kv_heads: int, **fields: Any
) -> PresetFields:
    """Return the shape of a hybrid Granite 4: Mamba 2, and attention without RoPE in four of 40 layers."""
    kinds = ("full_attention" if layer % 10 == 5 else "mamba2" for layer in range(40))
    shape = dict(
        layer_types=tuple(kinds),
        no_rope_layers=(0,) * 40,
        vocab_size=100352,
        max_position_embeddings=131072,
        mamba2=dict(num_heads=hidden // 32, head_dim=64, state_dim=128, num_groups=1),
        attention_gate="none",
        # 1 / head_dim, and not its root, as in muP.
        attention_multiplier=1 / (hidden // heads),
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        tie_word_embeddings=True,
        bos_token_id=100257,
        eos_token_id=100257,
        pad_token_id=100256,
    )
    return shape_of(hidden, intermediate, 40, heads, kv_heads, **shape, **fields)


def nemotron(pattern: str, **fields: Any) -> PresetFields:
    """Return the fields of a Nemotron: one part per layer, M Mamba 2, E experts, - an MLP, * attention."""
    mixers = {"M": "mamba2", "*": "full_attention", "E": "mlp", "-": "mlp"}
    mlps = {"M": "none", "*": "none", "E": "sparse", "-": "dense"}
    return dict(
        num_hidden_layers=len(pattern),
        layer_types=tuple(mixers[letter] for letter in pattern),
        mlp_layer_types=tuple(mlps[letter] for letter in pattern),
        # Positions follow from the order in which Mamba 2 reads the tokens.
        no_rope_layers=(0,) * len(pattern),
        vocab_size=131072,
        head_dim=128,
        hidden_act="relu2",
        mlp_gate=False,
        attention_gate="none",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **fields,
    )


def falcon_h1(
    hidden: int, intermediate: int, layers: int, heads: int, mamba2: PresetFields, **fields: Any
) -> PresetFields:
    """Return the shape of a Falcon-H1, with Mamba 2 beside attention in every layer."""
    common: PresetFields = dict(
        num_key_value_heads=2,
        vocab_size=65537,
        head_dim=128,
        max_position_embeddings=131072,
        parallel_mixers={},
    )
    return shape_of(
        hidden,
        intermediate,
        layers,
        heads,
        **{**common, **fields},
        layer_types=("parallel",) * layers,
        rope_theta=1e11,
        mamba2={"state_dim": 256, "num_groups": 1, **mamba2},
        attention_gate="none",
        pad_token_id=0,
    )


def granite3_moe(hidden: int, layers: int, heads: int, experts: int) -> PresetFields:
    """Return the shape of a Granite 3.1 with experts of 512 channels, of which a token goes through eight."""
    shape = {name: value for name, value in GRANITE.items() if name[:4] != "num_"}
    return shape_of(
        hidden,
        512,
        layers,
        heads,
        8,
        **shape,
        rope_theta=10000000.0,
        rms_norm_eps=1e-6,
        logits_scaling=6.0,
        attention_multiplier=0.015625,
        moe=dict(
            num_experts=experts,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            router_aux_loss_coef=0.001,
        ),
    )


def trinity(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, expert: int
) -> PresetFields:
    """Return the shape of a Trinity (AFMoE), whose experts have `expert` channels."""
    moe = dict(
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=expert,
        shared_expert_intermediate_size=expert,
        router_scores="sigmoid",
        routed_scaling_factor=2.826,
        expert_bias=True,
        router_aux_loss_coef=0.0,
    )
    return dict(
        vocab_size=200192,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        **windowed(layers, 4, 3),
        sliding_window=2048,
        no_rope_layers=(1, 1, 1, 0) * (layers // 4),
        max_position_embeddings=131072,
        qk_norm=True,
        norm_position="both",
        embedding_multiplier=hidden**0.5,
        mlp_layer_types=("dense",) * 2 + ("sparse",) * (layers - 2),
        moe=moe,
    )


EXAONE35: PresetFields = dict(
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=102400,
    max_position_embeddings=32768,
    rope_theta=1000000.0,
    rope_scaling=llama3_scaling(8.0),
    attention_gate="none",
    bos_token_id=1,
    eos_token_id=361,
    pad_token_id=0,
)
LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)

# QwQZh/gated_attention; the elementwise model pays for its gate with a narrower MLP.
QWEN_GATED: PresetFields = dict(
    vocab_size=152064,
    hidden_size=2048,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    qk_norm=True,
    tie_word_embeddings=True,
    bos_token_id=151643,
    eos_token_id=151645,
)

HUNYUAN: PresetFields = dict(
    head_dim=128, max_position_embeddings=262144, attention_gate="none", qk_norm=True, qk_norm_after_rope=True,
    tie_word_embeddings=True,
    # Their files have 10000 and an alpha of 1000, which changes the base once and for all.
    rope_theta=10000.0 * 1000.0 ** (128 / 126),
)  # fmt: skip
