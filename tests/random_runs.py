"""Random models, data and lives of runs, for tests/test_random_pairs.py: drawn by a seed, so that a failure repeats."""

import dataclasses
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.config.model import NOT_LATENT, ModelConfig

HEAD_DIMS = (32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256)
VOCAB = 61


class Tokens(NamedTuple):
    """A batch: ids and labels int64 [B, S] (-100 counts in no loss), and perhaps document_ids or attention_mask."""

    ids: Tensor
    labels: Tensor
    documents: Tensor | None = None
    mask: Tensor | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The keywords of a forward pass."""
        given = dict(labels=self.labels, document_ids=self.documents, attention_mask=self.mask)
        return {
            "input_ids": self.ids,
            **{name: value for name, value in given.items() if value is not None},
        }

    def texts(self) -> list[tuple[int, Tensor]]:
        """Return (row, places int64 [n]) of every document, padding left out."""
        found = []
        for row in range(len(self.ids)):
            real = (
                torch.arange(self.ids.shape[1])
                if self.mask is None
                else self.mask[row].nonzero().flatten()
            )
            owner = torch.zeros_like(real) if self.documents is None else self.documents[row, real]
            edges = [0, *(1 + (owner[1:] != owner[:-1]).nonzero().flatten()).tolist(), len(real)]
            found += [
                (row, real[start:stop]) for start, stop in zip(edges[:-1], edges[1:], strict=True)
            ]
        return found


def draw_config(rng: random.Random, aligned: bool = False) -> ModelConfig:
    """Return a tiny model; `aligned` makes every te.Linear fit every recipe."""
    keys = rng.choice((1, 1, 2, 3))
    heads = keys * rng.choice((1, 1, 2, 3))
    dim = rng.choice(
        [d for d in HEAD_DIMS if heads * d <= 512 and not (aligned and (keys * d % 32 or d % 32))]
    )
    step, layers = 32 if aligned else rng.choice((2, 8, 32)), rng.choice((1, 2, 3))
    gate = rng.choice(("elementwise", "elementwise", "headwise", "none"))
    fields: dict[str, Any] = dict(
        vocab_size=64 if aligned else VOCAB, hidden_size=step * rng.randint(1, max(1, 96 // step)),
        intermediate_size=step * rng.randint(1, max(1, 128 // step)), num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, head_dim=dim, max_position_embeddings=128,
        attention_gate=gate, tie_word_embeddings=rng.random() < 0.5, initializer_range=0.1,
        norm_position=rng.choice(("pre", "pre", "post", "both")), rope_theta=rng.choice((100.0, 1e4)),
        hidden_act=rng.choice(("silu", "silu", "gelu", "gelu_pytorch_tanh", "relu2")),
    )  # fmt: skip
    some: dict[str, dict[str, Any]] = dict(
        bias=dict(attention_bias=True), output_bias=dict(attention_output_bias=True), mlp_bias=dict(mlp_bias=True),
        zero=dict(zero_centered_norm=True), plain_mlp=dict(mlp_gate=False), interleaved=dict(rope_interleaved=True),
        part=dict(partial_rotary_factor=0.5) if dim % 4 == 0 else {}, norm=dict(qk_norm=True),
        all_heads=dict(qk_norm=True, qk_norm_scope="all_heads"), window=dict(sliding_window=rng.randint(1, 40)),
        no_rope=dict(no_rope_layers=tuple(rng.randint(0, 1) for _ in range(layers))),
        cap=dict(attn_logit_softcapping=3.0), final_cap=dict(final_logit_softcapping=5.0),
        sinks=dict(attention_sinks=True), scale=dict(attention_multiplier=0.3),
        embedding=dict(embedding_multiplier=2.5), residual=dict(residual_multiplier=0.6),
        layer_norm=dict(norm_type="layer"), beside=dict(parallel_residual=True, norm_position="pre"),
        logits=dict(logits_scaling=1.7), query=dict(query_scale_beta=0.3, query_scale_length=5),
    )  # fmt: skip
    for name in rng.sample(sorted(some), rng.randint(0, 6)):
        fields |= some[name]
    if gate != "none" and rng.random() < 0.2:
        fields |= dict(attention_gate_activation="softplus")
    if "sliding_window" in fields and rng.random() < 0.6:
        kinds = ("sliding_attention", "full_attention")
        fields |= dict(layer_types=tuple(rng.choice(kinds) for _ in range(layers)))
    return ModelConfig(**fields)


def draw_tokens(rng: random.Random, rows: int = 0, length: int = 0) -> Tokens:
    """Return a batch (0: of any size): plain, packed with documents, or padded on either side; some labels left out."""
    rows = rows or rng.choice((1, 1, 2, 3))
    length = length or rng.choice((1, 2, 7, 16, 33, rng.randint(2, 70)))
    ids = torch.tensor([[rng.randrange(VOCAB) for _ in range(length)] for _ in range(rows)])
    labels = ids.clone()
    form, documents, mask = rng.choice(("plain", "packed", "padded")), None, None
    if form == "packed":
        cuts = torch.tensor([[rng.random() < 0.15 for _ in range(length)] for _ in range(rows)])
        documents = cuts.cumsum(1) * rng.choice((1, 7))
    if form == "padded":
        mask = torch.ones_like(ids)
        for row in range(rows):
            gone, left = rng.randrange(length), rng.random() < 0.5
            mask[row, : gone if left else 0] = 0
            mask[row, length - (0 if left else gone) :] = 0
        labels = labels.masked_fill(mask == 0, -100)
    out = torch.tensor([[rng.random() < 0.2 for _ in range(length)] for _ in range(rows)])
    return Tokens(ids, labels.masked_fill(out, -100), documents, mask)


class Life(NamedTuple):
    """A run: its model, how that is built, settings, batches, adapters, and the steps after which it is killed."""

    config: ModelConfig
    build: dict[str, Any]
    fields: dict[str, Any]
    batches: list[dict[str, Tensor]]
    lora: dict[str, Any] | None
    kills: tuple[int, ...]


def other_kinds(rng: random.Random, config: ModelConfig, width: int = 32) -> ModelConfig:
    """Return the same model, perhaps with other mixers in some layers, and with experts.

    Their sizes are multiples of `width`.
    """
    kinds = ("attention", "shared keys", "latent attention", "recurrent", "recurrent")
    kind = rng.choice(kinds)
    if kind in ("latent attention", "recurrent") and (
        kind == "latent attention" or rng.random() < 0.2
    ):
        config = with_latents(rng, config, width)
    if kind == "recurrent":
        config = with_recurrence(rng, config, width)
    if kind == "shared keys":
        config = with_shared_keys(rng, config, width)
    if (
        rng.random() < 0.7
        and config.mlp_multipliers is None
        and config.intermediate_sizes is None
        and config.mlp_gate
        and config.hidden_act == "silu"
        and not config.mlp_bias
    ):
        config = with_experts(rng, config, width)
    return config


def with_recurrence(rng: random.Random, config: ModelConfig, width: int) -> ModelConfig:
    """Return the model with convolutions, state spaces, delta rules, or several mixers beside each other."""
    keys = rng.choice((1, 2, 3))
    groups = rng.choice((1, 2))
    gated = rng.random() < 0.5
    heads = rng.choice((1, 2, 3))
    attention = "full_attention" if config.latent_attention is None else "latent_attention"
    kinds = ["conv", "mamba2", "linear_attention", "kda", attention]
    if config.sliding_window is not None and config.latent_attention is None:
        kinds.append("sliding_attention")
    beside = tuple(rng.sample(kinds, rng.choice((2, 2, 3))))
    fields: dict[str, Any] = dict(
        short_conv=dict(kernel_dim=rng.randint(1, 5), bias=rng.random() < 0.5),
        mamba2=dict(
            num_heads=groups * rng.choice((1, 2, 3)), head_dim=width, num_groups=groups, state_dim=rng.choice((8, 24)),
            conv_kernel_dim=rng.randint(1, 5), conv_bias=rng.random() < 0.5, bias=rng.random() < 0.3,
            out_bias=rng.choice((None, None, True, False)), norm=rng.choice(("gated", "before_gate", "none")),
            activation=rng.choice(("silu", "gelu")), time_step_min=rng.choice((None, 0.05)),
            time_step_max=rng.choice((None, 0.8)),
            multipliers=rng.choice((None, (0.9, 0.7, 1.2, 0.8, 1.1))),
        ),
        linear_attention=dict(
            num_key_heads=keys, num_value_heads=keys * rng.choice((1, 2)), key_head_dim=rng.choice((width, 16)),
            value_head_dim=width, conv_kernel_dim=rng.randint(1, 5),
        ),
        kda=dict(
            num_heads=heads, head_dim=width, conv_kernel_dim=rng.randint(1, 5), gate_rank=width if gated else None,
            decay_bound=rng.choice((None, 5.0)),
        ),
        parallel_mixers=dict(
            mixers=beside, input_multipliers=rng.choice((None, (1.1, 0.8, 1.3)[: len(beside)])),
            output_multipliers=rng.choice((None, (0.7, 1.2, 0.9)[: len(beside)])),
        ),
        layer_types=tuple(rng.choice((*kinds, "parallel")) for _ in range(config.num_hidden_layers)),
    )  # fmt: skip
    if config.mlp_gate and rng.random() < 0.3:
        fields |= dict(mlp_multipliers=(0.7, 1.4))
    return dataclasses.replace(config, **fields)


def with_shared_keys(rng: random.Random, config: ModelConfig, width: int) -> ModelConfig:
    """Return the model with parts of Gemma 4: keys that layers share, heads by kind of layer, inputs per layer."""
    layers = rng.choice((2, 3, 4, 5))
    window = rng.random() < 0.7
    types = [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    fields: dict[str, Any] = dict(
        num_hidden_layers=layers, layer_types=None, sliding_window=None, qk_norm_scope="head", no_rope_layers=None,
        value_norm=rng.random() < 0.5, layer_scale=rng.random() < 0.5,
    )  # fmt: skip
    if config.qk_norm:
        fields |= dict(qk_norm_weights=rng.random() < 0.6, qk_norm_after_rope=rng.random() < 0.3)
    if window:
        fields |= dict(layer_types=tuple(types), sliding_window=rng.randint(1, 20))
        if rng.random() < 0.5:
            sizes = dict(num_attention_heads=4, num_key_value_heads=rng.choice((1, 2, 4)))
            fields |= dict(sliding_heads=dict(sizes, head_dim=rng.choice((32, 64))))
        if rng.random() < 0.5:
            fields |= dict(sliding_rope=dict(rope_theta=300.0))
        fields |= dict(keys_as_values=rng.random() < 0.3)
    if rng.random() < 0.8:
        first = rng.randint(1, layers)  # of those that have no keys of their own
        kinds = types if window else ["full_attention"] * layers
        lenders = set(kinds[:first])
        shared = [int(n >= first and kind in lenders) for n, kind in enumerate(kinds)]
        fields |= dict(shared_key_layers=tuple(shared))
    if rng.random() < 0.5:
        fields |= dict(layer_inputs=dict(width=width, vocab_size=config.vocab_size + 3))
    if rng.random() < 0.3:
        sizes_of_mlps = [config.intermediate_size * rng.choice((1, 2)) for _ in range(layers)]
        fields |= dict(intermediate_sizes=tuple(sizes_of_mlps))
    return dataclasses.replace(config, **fields)


def with_latents(rng: random.Random, config: ModelConfig, width: int) -> ModelConfig:
    """Return the model with latents for queries, or none, and for keys and values; values narrower or wider."""
    turned = rng.choice((16, 32))
    sizes = dict(
        q_lora_rank=rng.choice((None, width, 2 * width)),
        kv_lora_rank=rng.choice((width, 3 * width)),
    )
    sizes |= dict(
        qk_nope_head_dim=rng.choice((16, 48)),
        qk_rope_head_dim=turned,
        v_head_dim=rng.choice((32, 96)),
    )
    biased = config.attention_bias and sizes["q_lora_rank"] is not None
    changes = NOT_LATENT | dict(
        num_key_value_heads=config.num_attention_heads, head_dim=turned, attention_bias=biased
    )
    gated = (
        config.attention_gate == "headwise" and not biased
    )  # the only gate on latents, without biases
    gate = "headwise" if gated else "none"
    changes |= dict(attention_gate=gate, qk_norm_scope="head", attention_gate_activation="sigmoid")
    return dataclasses.replace(config, latent_attention=sizes, layer_types=None, **changes)


def with_experts(rng: random.Random, config: ModelConfig, width: int) -> ModelConfig:
    """Return the model with experts in some layers, of the kinds of several families."""
    groups = rng.choice((1, 1, 2))
    count = groups * rng.randint(2, 4)
    chosen = rng.randint(1, count // groups)
    sizes: dict[str, Any] = dict(
        num_experts=count, num_experts_per_tok=chosen, moe_intermediate_size=width
    )
    sizes |= dict(
        n_group=groups, router_scores=rng.choice(("softmax", "sigmoid")), router_aux_loss_coef=0.01
    )
    sizes |= dict(
        norm_topk_prob=rng.random() < 0.5,
        expert_bias=rng.random() < 0.4,
        router_fp32=rng.random() < 0.5,
    )
    if rng.random() < 0.4:
        sizes |= dict(
            shared_expert_intermediate_size=2 * width, shared_expert_gate=rng.random() < 0.5
        )
    if rng.random() < 0.3:
        sizes |= dict(bias=True, swiglu_limit=rng.choice((0.5, 7.0)), routed_scaling_factor=1.5)
    types = tuple(
        rng.choice(("sparse", "sparse", "dense")) for _ in range(config.num_hidden_layers)
    )
    return dataclasses.replace(config, moe=sizes, mlp_layer_types=types)


def draw_life(rng: random.Random, recipes: list[str]) -> Life:
    """Return a run of a few steps on batches of random sizes and forms."""
    config, recipe, steps = (
        other_kinds(rng, draw_config(rng, aligned=True)),
        rng.choice(recipes),
        rng.randint(2, 4),
    )
    build: dict[str, Any] = dict(recipe=recipe, dtype=torch.bfloat16)
    if recipe != "bf16" and rng.random() < 0.3:
        names = (
            "*.down_proj",
            "*.o_proj",
            "layers.0.*",
            f"layers.{config.num_hidden_layers - 1}.*",
        )
        build |= dict(
            precision={
                name: rng.choice(("bf16", "current", "delayed")) for name in rng.sample(names, 2)
            }
        )
    if recipe != "bf16":
        edges = dict(
            num_layers_at_start_in_bf16=rng.choice((0, 0, 1)),
            num_layers_at_end_in_bf16=rng.choice((0, 0, 1)),
        )
        build |= (
            edges if sum(edges.values()) < config.num_hidden_layers else dict.fromkeys(edges, 0)
        )
    if recipe in ("delayed", "current", "blockwise", "mxfp8") and rng.random() < 0.3:
        build |= dict(fp8_params=True)
    later = [] if "fp8_params" in build else rng.sample(recipes, rng.choice((0, 0, 1, 2)))
    build |= dict(activation_checkpointing=rng.choice(("none", "none", "selective", "full", 2)))
    build |= dict(activation_offload=rng.random() < 0.2)
    accumulation = rng.choice((1, 1, 2, 3))
    fields: dict[str, Any] = dict(
        steps=steps, warmup_steps=1, learning_rate=0.01, eval_every=rng.choice((0, 1)), keep_last=9,
        save_every=rng.choice((1, 1, 2)), gradient_accumulation=accumulation, seed=rng.randrange(9),
        schedule=rng.choice(("cosine", "linear", "constant")), keep_best=rng.random() < 0.3,
        cache_fp8_weights=rng.random() < 0.7, calibrate=rng.random() < 0.7, optimizer_offload=rng.random() < 0.2,
        clip_grad_norm=rng.choice((0.0, 1.0)),
        recipe_schedule=",".join(f"{name}@{done}" for done, name in enumerate(later[: steps - 1], 1)),
    )  # fmt: skip
    lora = None
    if rng.random() < 0.35:
        names = (
            "o_proj",
            "o_proj",
            "all-linear",
            *(("all-linear", "experts") if config.moe else ("down_proj",)),
        )
        names += ("q_b_proj",) if config.latent_attention else ("q_proj", "v_proj")
        targets = rng.sample(names, rng.randint(1, 3))
        lora = dict(rank=rng.choice((2, 4)), targets=tuple(targets), dropout=rng.choice((0.0, 0.2)))
    fields |= dict(
        optimizer="adamw" if lora else rng.choice(("adamw", "adamw", "muon", "muon8bit", "galore"))
    )
    batches = [
        draw_tokens(rng, rng.choice((1, 2)), rng.choice((5, 16, 33))).inputs
        for _ in range(steps * accumulation)
    ]
    for batch in batches:
        batch["labels"][:, -1] = batch["input_ids"][:, -1]  # no batch without a target
    kills = tuple(step for step in range(2, steps + 1) if rng.random() < 0.5) or (
        steps,
    )  # before the step is saved
    return Life(config, build, fields, batches, lora, kills)
