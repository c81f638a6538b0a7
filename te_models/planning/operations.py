"""The operations of a training step, with the bytes that each saves, allocates and frees.

A block is a list of operations in forward order (`Tape.block`). No constant is fitted: every term is a tensor, and
docs/guide/memory.md names it. Shapes are those of te_models/model/block.py: N tokens padded to the recipe's row
alignment, T = B*S without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from te_models.config.chunk_sizes import head_rows
from te_models.config.layout import linear_sizes
from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe
from te_models.config.recompute_modes import (
    offload_allows_fused,
    recomputes_block,
    recomputes_mlp,
    recomputes_product,
)
from te_models.errors import UsageError, unknown
from te_models.planning.parameter_bytes import FP32, OPTIMIZERS

INT64 = 8


class Step(NamedTuple):
    """One operation, in bytes: what its forward saves and what its backward allocates and frees."""

    name: str
    saved: int = 0  # saved by the forward, freed after the backward
    copies: int = 0  # FP8 copies of its weight, saved and freed in the same way
    consumes: int = 0  # gradients of its outputs, freed after the backward
    produces: int = 0  # gradients of its inputs
    scratch: int = 0  # allocated during its backward only
    weights: int = 0  # gradients of its parameters
    of_logits: bool = False  # whether `saved` is counted as logits


class Region(NamedTuple):
    """Consecutive steps that are recomputed and offloaded together."""

    steps: list[Step]
    recompute_input: int | None = None  # bytes of the input that a recompute starts from; None: not recomputed
    block: int | None = None  # index of the block they belong to
    offloaded: bool = False  # whether their saved tensors are on the host after the forward


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training step that its memory depends on; te_models.planning.memory_plan.plan_memory explains them.

    Under gradient accumulation, FP32 sums of all gradients exist, which FSDP2 does not shard (`gradient_sums`), and FP8
    copies of weights exist already (`cached_weights`). With `lora_rank`, all linears of blocks have an adapter of that
    rank, and nothing else is trained. `compile`, `fused` and `cuda` say which kernels run.
    """

    batch_size: int = 8  # per GPU and micro-batch
    seq_len: int = 256
    optimizer: str | None = "adamw"
    optimizer_offload: bool = False
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    lora_rank: int = 0
    activation_checkpointing: str | int = "none"
    activation_offload: bool = False
    gpus: int = 1
    gradient_sums: bool = False
    cached_weights: bool = False
    fp8_params: bool = False
    logits: bool = True
    compile: bool = True
    fused: bool = True
    cuda: bool = True
    dtype_bytes: int = 2

    @property
    def fused_kernels(self) -> bool:
        """Return whether fused kernels run, as model/decoder.py decides."""
        allowed = not self.activation_offload or offload_allows_fused(self.activation_checkpointing)
        return self.fused and self.cuda and allowed

    def __post_init__(self) -> None:
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        for name, value in dict(batch_size=self.batch_size, seq_len=self.seq_len, gpus=self.gpus).items():
            if value < 1:
                raise UsageError(f"{name}={value} is out of range: give 1 or more")


PER_TENSOR = ("DelayedScaling", "Float8CurrentScaling")  # one scale per tensor, so the data can be transposed later


def operand_bytes(recipe: Recipe, rows: int, columns: int, role: str, copies: str = "both") -> int:
    """Return the bytes of a quantized matrix [rows, columns]: its data and its padded scales.

    Layouts are those of Transformer Engine's quantizers; see te_models/engine/emulated/tensors.py. `role` is "x", "w"
    or "grad", for which Float8BlockScaling may have other blocks, and `copies` "rowwise", "columnwise" or "both".
    """
    size, m, k = rows * columns, -(-rows // 128), -(-columns // 128)
    shared = 0
    if recipe.scheme in ("DelayedScaling", "Float8CurrentScaling"):
        rowwise, columnwise, shared = size, size, FP32  # one scale, for any number of copies
    elif recipe.scheme == "Float8BlockScaling" and recipe.fields[f"{role}_block_scaling_dim"] == 2:
        rowwise, columnwise = size + FP32 * m * _up(k, 4), size + FP32 * k * _up(m, 4)
    elif recipe.scheme == "Float8BlockScaling":
        rowwise, columnwise = size + FP32 * k * _up(rows, 4), size + FP32 * m * _up(columns, 4)
    elif recipe.scheme == "MXFP8BlockScaling":
        rowwise = size + _up(rows, 128) * _up(columns // 32, 4)
        columnwise = size + _up(rows // 32, 4) * _up(columns, 128)
    else:
        assert recipe.scheme == "NVFP4BlockScaling", recipe.scheme
        rowwise = size // 2 + _up(rows, 128) * _up(columns // 16, 4) + FP32
        columnwise = size // 2 + _up(columns, 128) * _up(rows // 16, 4) + FP32
    return shared + {"rowwise": rowwise, "columnwise": columnwise, "both": rowwise + columnwise}[copies]


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


class Tape:
    """The operations of a forward pass with the bytes of each."""

    def __init__(self, config: ModelConfig, recipe: Recipe, training: Training) -> None:
        self.config, self.recipe, self.training = config, recipe, training
        self.tokens = training.batch_size * training.seq_len
        self.rows = _up(self.tokens, recipe.row_alignment)
        self.element = training.dtype_bytes
        self.stream = self.rows * config.hidden_size * self.element  # the residual stream, or its gradient

    @property
    def copies_for_attention(self) -> bool:
        """Return whether attention runs on FP32 copies, as kernels/sdpa.py does on a CPU."""
        return not self.training.cuda and self.element < FP32

    def fuses(self, layer: int) -> bool:
        """Return whether attention, RoPE and gate are one operation, as kernels/gated_attention.py decides on GPUs."""
        c, training = self.config, self.training
        cudnn = c.head_dim in (64, 128) and training.seq_len >= 128 and self.element == 2
        kernel = self._spans if self._slides(layer) else training.fused_kernels and cudnn
        return kernel and not c.attention_obstacles

    def _slides(self, layer: int) -> bool:
        window = self.config.window(layer)
        return window is not None and window < self.training.seq_len

    @property
    def _spans(self) -> bool:
        """Return whether windows are spans of keys, for kernels/span_attention_triton.py, rather than masks."""
        capped, training = self.config.attn_logit_softcapping is not None, self.training
        return training.fused_kernels and self.element == 2 and self.config.head_dim <= 256 and not capped

    def fp8(self, layer: int) -> bool:
        """Return whether this layer runs inside the autocast."""
        last = self.config.num_hidden_layers - self.recipe.num_layers_at_end_in_bf16
        return self.recipe.quantized and self.recipe.num_layers_at_start_in_bf16 <= layer < last

    def norm(self, name: str) -> Step:
        """Return a te.RMSNorm: saves its input and one FP32 per row; its input gradient is added to the residual's."""
        saved = self.stream + self.rows * FP32
        weights = self.config.hidden_size * self.element
        return Step(name, saved, consumes=self.stream, scratch=self.stream, weights=weights)

    def output_norm(self, name: str) -> list[Step]:
        """Return the steps between attention or MLP and the residual sum: te.RMSNorm, multiplication, both or none."""
        c, multiplied = self.config, self.config.residual_multiplier != 1
        steps = [Step("residual_multiplier", produces=self.stream)] if multiplied else []
        if c.norm_position == "pre":
            return steps
        norm = self.norm(name)._replace(consumes=self.stream * multiplied, produces=self.stream, scratch=0)
        return [norm, *steps]

    def linear(
        self, name: str, inputs: int, outputs: int, fp8: bool, *, shared: bool = False, last: bool = False,
        bias: bool = False,
    ) -> Step:  # fmt: skip
        """Return a te.Linear, which saves its input (in FP8 the columnwise copy) and the FP8 copies of its weight.

        Both copies of the weight are saved unless engine/native.py drops the rowwise one. The backward quantizes the
        output gradient rowwise and columnwise. If `shared`, another operation already saves the unquantized input; if
        `last`, the output gradient is the residual stream's, which is not freed by this backward.

        With an adapter, the adapter alone saves the input, unquantized, and its product with A; backward computes two
        gradients of the input, the linear's and the adapter's.
        """
        rows, element, override = self.rows, self.element, self.recipe.fields.get("backward_override", "none")
        rank = 0 if name == "lm_head" else self.training.lora_rank
        step = Step(
            name,
            saved=(0 if shared else rows * inputs * element) + rows * rank * element,
            scratch=rows * inputs * element if rank else 0,
            consumes=0 if last else rows * outputs * element,
            produces=rows * inputs * element,
            weights=outputs * (inputs + bias) * element,
        )
        if not fp8 or override == "high_precision":
            return step
        if override == "dequantized":
            x = step.saved if rank else operand_bytes(self.recipe, rows, inputs, "x", "rowwise")
            return step._replace(saved=x, copies=operand_bytes(self.recipe, outputs, inputs, "w", "rowwise"))
        x = step.saved if rank else operand_bytes(self.recipe, rows, inputs, "x", "columnwise")
        w, dy = operand_bytes(self.recipe, outputs, inputs, "w"), operand_bytes(self.recipe, rows, outputs, "grad")
        if rank:
            dy = max(step.scratch, operand_bytes(self.recipe, rows, outputs, "grad", "rowwise"))
        if self.training.fp8_params:  # transposed data is freed before the larger weight gradient is allocated
            return step._replace(saved=x, scratch=dy)
        if self.training.gpus > 1:  # Transformer Engine requantizes weights sharded by FSDP2 in backward
            return step._replace(saved=x, scratch=dy + w)
        if self.training.fused_kernels and self.recipe.stateful and not self.training.cached_weights:
            w = operand_bytes(self.recipe, outputs, inputs, "w", "columnwise")
        return step._replace(saved=x, copies=w, scratch=dy)

    def block(self, layer: int) -> tuple[list[Step], list[Step], list[Step]]:
        """Return a block in three parts: attention, the MLP up to the input of down_proj, and down_proj."""
        config, fp8 = self.config, self.fp8(layer)
        ungated, capped = config.attention_gate == "none", config.attn_logit_softcapping is not None
        # Without a gate the input of o_proj is attention's output, unless rows are padded in between.
        shared = ungated and self.rows == self.tokens and not self.copies_for_attention and not capped
        sizes, last = linear_sizes(config), config.norm_position == "pre" and config.residual_multiplier == 1
        F, width = (self.rows * size * self.element for size in (config.intermediate_size, sizes["gate_up_proj"][1]))
        qkvg = self.linear("qkvg_proj", *sizes["qkvg_proj"], fp8, bias=config.attention_bias)
        gate_up = self.linear("gate_up_proj", *sizes["gate_up_proj"], fp8, bias=config.mlp_bias)
        out = dict(shared=shared, last=last, bias=config.attention_output_bias)
        attention = [
            *self._after_norm("input_layernorm", qkvg),
            *([self.fused_attention()] if self.fuses(layer) else self.attention(layer)),
            *([] if ungated or self.fuses(layer) else [self.gate()]),
            self.linear("o_proj", *sizes["o_proj"], fp8, **out),
            *self.output_norm("attention_output_norm"),
        ]
        hidden = [
            *self._after_norm("post_attention_layernorm", gate_up),
            # Uncompiled, backward holds the gradients of both halves before it concatenates them.
            Step("swiglu", width, consumes=F, produces=width, scratch=0 if self.training.compile else width),
        ]
        down = self.linear("down_proj", *sizes["down_proj"], fp8, last=last, bias=config.mlp_bias)
        return attention, hidden, [down, *self.output_norm("mlp_output_norm")]

    def _after_norm(self, name: str, linear: Step) -> list[Step]:
        """Return a linear after its norm; without one, its input's gradient is added to the residual's at once."""
        if self.config.norm_position != "post":
            return [self.norm(name), linear]
        return [linear._replace(produces=0, scratch=linear.scratch + linear.produces)]

    def fused_attention(self) -> Step:
        """Return the kernel that saves the rotated projection, attention's output and one FP32 per query and head."""
        c, T = self.config, self.tokens
        q, kv = (T * size * self.element for size in (c.q_size, c.kv_size))
        whole, summed = self.rows * c.qkvg_size * self.element, T * c.q_size * FP32  # dq is summed in FP32
        ungated = 0 if c.attention_gate == "none" else q  # the gradient of what the gate multiplies
        return Step(
            "attention", whole + q + T * c.num_attention_heads * FP32, consumes=q, produces=whole,
            scratch=ungated + q + 2 * kv + summed,
        )  # fmt: skip

    def attention(self, layer: int) -> list[Step]:
        """Return the operations between qkvg_proj and the gate, in forward order.

        q, k, v and the gate are views of the output of qkvg_proj, which lives as long as one of them is saved. SDPA
        saves q, k, v, its output and one FP32 per query and head.
        """
        c, T, training = self.config, self.tokens, self.training
        q, kv, gate = (T * size * self.element for size in (c.q_size, c.kv_size, c.gate_size))
        whole = self.rows * c.qkvg_size * self.element
        split = [Step("split of q, k, v, gate", consumes=q + 2 * kv + gate, produces=whole)]
        normed = c.num_attention_heads + c.num_key_value_heads if c.qk_norm_scope == "head" else 2
        norms = T * normed * FP32
        if c.qk_norm:  # te.RMSNorm makes the heads contiguous and saves those
            split.append(Step("q_norm, k_norm", q + kv + norms, consumes=q + kv, produces=q + kv))
        if c.has_rope(layer):  # linear in its input: saves only the tables, which all layers share
            split.append(Step("rope", consumes=q + kv, produces=q + kv))
        statistics = T * c.num_attention_heads * FP32
        grads = dict(consumes=q, produces=q + 2 * kv, scratch=T * c.q_size * FP32)  # dq is summed in FP32
        own = q + kv if c.has_rope(layer) or c.qk_norm else q if c.query_scale_beta is not None else 0
        if c.attn_logit_softcapping is not None:  # saves q, k and v; of one row of the batch it makes FP32 scores
            square = c.num_attention_heads * training.seq_len**2 * FP32
            return [*split, Step("attention", whole + own, **grads)._replace(scratch=4 * square)]
        if not self.copies_for_attention:
            saved = whole + own + q + statistics
        else:  # FP32 copies of q, k and v; only the gate may still need the output of qkvg_proj
            softplus = c.attention_gate_activation == "softplus"
            gate_saves_projection = c.attention_gate != "none" and (training.compile or softplus)
            saved = T * 2 * (c.q_size + c.kv_size) * FP32 + statistics + gate_saves_projection * whole
        return [*split, Step("attention", saved + self._mask(layer), **grads)]

    def _mask(self, layer: int) -> int:
        """Return the bytes of the mask of a sliding window, which SDPA saves in the dtype of the activations."""
        seq, width = self.training.seq_len, self.element if self.training.cuda else FP32
        return seq * seq * width if self._slides(layer) and not self._spans else 0

    def gate(self) -> Step:
        """Return x * sigmoid(g): saves x and g, which attention saves too; uncompiled it saves sigmoid(g) as well."""
        c, T = self.config, self.tokens
        q, g = T * c.q_size * self.element, T * c.gate_size * self.element
        saved = 0
        if not self.training.compile:
            saved += q if c.attention_gate == "elementwise" else T * c.num_attention_heads * self.element
        if self.copies_for_attention or c.attn_logit_softcapping is not None:
            saved += q  # attention's output, which attention itself does not save, or not in this dtype
        return Step("gate", saved, consumes=self.rows * c.q_size * self.element, produces=q + g)

    def head(self) -> list[Step]:
        """Return the final norm, lm_head and the loss."""
        c = self.config
        if not self.training.logits and not (self.recipe.quantized and self.recipe.lm_head == "fp8"):
            return [self.norm("norm")._replace(produces=self.stream, scratch=0), self.fused_head()]
        width = self.tokens * c.vocab_size
        logits, fp32 = width * self.element, width * FP32
        if self.training.compile:  # saves logits, a maximum and a sum per row, and the targets
            loss = Step("loss", logits + self.tokens * (2 * FP32 + INT64), produces=logits, of_logits=True)
        else:  # saves log_softmax in FP32 and two counts; its backward needs a second FP32 buffer
            loss = Step(
                "loss", fp32 + self.tokens * INT64 + INT64 + FP32, produces=logits, scratch=2 * fp32, of_logits=True
            )
        capped = c.final_logit_softcapping is not None  # saves the output of tanh
        cut = self.rows * c.vocab_size * self.element
        cap = [Step("logit cap", cut, consumes=cut, produces=cut, of_logits=True)] if capped else []
        padding = [Step("removal of padding", consumes=logits, produces=cut)] if self.rows > self.tokens else []
        return [
            self.norm("norm")._replace(produces=self.stream, scratch=0),
            self.linear("lm_head", c.hidden_size, c.vocab_size, self.recipe.quantized and self.recipe.lm_head == "fp8"),
            *cap,
            *padding,
            loss,
        ]

    def fused_head(self) -> Step:
        """Return kernels/lm_head.py, which computes both gradients in the forward in chunks and saves only those.

        With fused kernels on a GPU a chunk's gradient overwrites its logits (kernels/lm_head_triton.py). The forward
        also allocates a chunk and the FP32 sum of the weight gradient (on a CPU one more product). They count as
        scratch where they exceed the backward's own buffers.
        """
        c, size = self.config, self.config.vocab_size * self.config.hidden_size
        trained = not self.training.lora_rank
        own, weight = self.tokens * c.hidden_size * self.element, size * self.element * trained
        rows = head_rows(self.tokens, c.vocab_size, c.hidden_size, self.training.cuda, trained)
        chunk, sums = rows * c.vocab_size, 1 if self.training.cuda else 2
        sums = sums if trained and rows < self.tokens else 0  # with one chunk its product is the gradient
        beside = self.element + (0 if self.training.compile else 3 * FP32)
        if self.training.fused_kernels:
            beside = 0
        if c.final_logit_softcapping is not None or c.logits_scaling != 1:  # the scaled logits, and two of FP32
            beside += self.element + 2 * FP32
        forward = sums * FP32 * size + chunk * (self.element + beside)
        return Step(
            "head and loss", own + weight, produces=self.stream, weights=weight, of_logits=True,
            scratch=max(0, forward - self.stream - weight),
        )  # fmt: skip

    def rotary_tables(self) -> int:
        """Return the bytes of cos and sin for each kind of layer that has RoPE, and of the scale of queries."""
        c, size = self.config, self.training.seq_len * self.element
        layers = [layer for layer in range(c.num_hidden_layers) if c.has_rope(layer)]
        kinds = {c.sliding if c.window(layer) is not None else c for layer in layers}
        return sum(2 * size * kind.rotary_size for kind in kinds) + size * (c.query_scale_beta is not None)

    def regions(self) -> Iterator[Region]:
        """Yield the whole forward pass; te_models/config/recompute_modes.py decides what is recomputed."""
        mode, c, fp8_weights = self.training.activation_checkpointing, self.config, self.training.fp8_params
        # Where SwiGLU writes the FP8 input of down_proj itself, it can also recompute it; an adapter saves its output.
        writes = self.training.fused_kernels and self.recipe.scheme in PER_TENSOR and not c.mlp_obstacles
        hands_over = fp8_weights and (writes or self.training.lora_rank > 0)
        low = self.rows * self.training.lora_rank * self.element  # the adapter's product with A stays
        rotary = self.rotary_tables()
        table = c.vocab_size * c.hidden_size * self.element
        tied = c.tie_word_embeddings  # then its gradient is added to lm_head's
        lora = self.training.lora_rank > 0
        embedding = Step("embedding", self.tokens * INT64 * (not lora) + rotary, consumes=self.stream)
        yield Region([embedding._replace(scratch=table) if tied else embedding._replace(weights=table)])
        for layer in range(c.num_hidden_layers):
            attention, hidden, down = self.block(layer)
            # Storages of up to 1 MiB, which te_models/model/offload.py leaves on the device, are not counted.
            place = (layer, self.training.activation_offload and layer < c.num_hidden_layers - 1)
            fp8 = self.fp8(layer)
            # After no norm, only a linear in high precision saves what a recompute starts from.
            first = [Step("input", self.stream)] if c.norm_position == "post" and fp8 else []
            if recomputes_block(mode, layer):
                yield Region([*first, *attention, *hidden, *down], self.stream, *place)
                continue
            if lora and layer == 0 and c.norm_position != "post":  # nothing before it has a gradient
                attention[0] = attention[0]._replace(saved=0)
            yield Region(attention, None, *place)
            mlp_input = self.stream if recomputes_mlp(mode, layer, c.num_hidden_layers, fp8, fp8_weights) else None
            hidden = hidden if mlp_input is None else [*first, *hidden]
            if recomputes_product(mode, fp8, hands_over):  # the backward of down_proj starts the recompute
                recomputed = down[0]._replace(saved=low, scratch=down[0].scratch + down[0].saved - low)
                yield Region([*hidden, recomputed], mlp_input, *place)
                yield Region(down[1:], None, *place)
            else:
                yield Region(hidden, mlp_input, *place)
                yield Region(down, None, *place)
        yield Region(self.head())
