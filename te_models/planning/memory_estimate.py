"""How much memory a training step takes and what fits on which GPU: plain Python over the shapes, no model, no GPU.

A block is written down as the list of its operations in the order of the forward (`_Tape.block`), each with the bytes it
keeps for backward and those its backward makes and frees. Walking that list once forward and once back gives the memory
at every moment; the largest is the peak. No constant is fitted: every term is a tensor that somebody holds, and
docs/memory.md says who. Of 42 peaks measured on an H200 the worst is 2.7 % off (tests/planning/test_memory_plan.py).

What this leaves out: CUDA's own context (outside PyTorch's allocator), fragmentation, the up to 1 MiB by which the
allocator rounds a tensor up, and forward temporaries, which are always less than those of the backward that follows.

Shapes as in te_models/model/block.py: N tokens padded to the recipe's rows, T = B*S without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from te_models.config.layout import linear_sizes
from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe
from te_models.config.recompute_modes import recomputes_block, recomputes_mlp, recomputes_product
from te_models.errors import unknown
from te_models.planning.parameter_bytes import FP32, OPTIMIZERS, model_parameters

INT64 = 8

# Parameters whose gradients te_models/optim/master.py holds in FP32 at a time.
UPDATE_CHUNK = 2**28
HEAD_CHUNK = {True: 2**31, False: 2**28}  # cuda: bytes of logits at a time, counted in FP32
CUBLAS_WORKSPACE = 2**25 + 1024  # Transformer Engine's, on Hopper and newer (get_cublas_workspace_size_bytes)


def head_rows(rows: int, vocabulary: int, width: int, cuda: bool) -> int:
    """Of how many of `rows` kernels/lm_head.py makes logits [rows, vocabulary] at a time, for hidden states of `width`.

    On a GPU of all, where they, in BF16, need no more than a part of them and the FP32 sum of the weight's gradient.
    """
    allowed = HEAD_CHUNK[cuda]
    if cuda and rows * vocabulary * 2 <= allowed // 2 + vocabulary * width * FP32:
        return rows
    return min(rows, max(256, allowed // (FP32 * vocabulary)))


class Step(NamedTuple):
    """One operation: what its forward keeps and what its backward does, in bytes. Freed means after its backward."""

    name: str
    saved: int = 0  # kept by the forward, freed
    copies: int = 0  # FP8 copies of its weight, kept by the forward, freed
    consumes: int = 0  # gradients of its outputs, freed
    produces: int = 0  # gradients of its inputs
    scratch: int = 0  # there during its backward alone
    weights: int = 0  # gradients of its parameters
    of_logits: bool = False  # whether `saved` is counted as logits


class Region(NamedTuple):
    """Steps that run one after the other; `kept` is the size of their input if they are recomputed, else None.

    `block` is the number of their block, if any; `away` says whether what they keep is on the host after the forward.
    """

    steps: list[Step]
    kept: int | None = None
    block: int | None = None
    away: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at one moment. `total` is their sum."""

    moment: str = ""
    weights: int = 0
    fp8_weight_copies: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    recomputed: int = 0
    logits: int = 0
    activation_gradients: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """All bytes of this moment."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Name -> bytes, without the moment."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "moment"}

    def plus(self, moment: str | None = None, **changes: int) -> Memory:
        """Another moment, so many bytes more of each part."""
        grown = {name: getattr(self, name) + change for name, change in changes.items()}
        return replace(self, moment=self.moment if moment is None else moment, **grown)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a step's memory depends on beside shape and recipe.

    `batch_size` sequences of `seq_len` tokens go through one GPU at a time; `gpus` share weights, gradients and optimizer
    (FSDP2, a unit a block). `held_gradients`: FP32 sums of all gradients, which FSDP2 does not shard, are there before the
    forward, as under gradient accumulation, and `cached_weights`: FP8 weights are, too. `activation_offload`: blocks keep theirs on the host. `logits`: they are returned, so all of them
    exist. `fp8_params`: the weights of FP8 layers are FP8. `compile`, `fused` and `cuda` choose the kernels; `dtype_bytes` is that of parameters and activations.
    """

    batch_size: int = 8
    seq_len: int = 256
    optimizer: str | None = "adamw"
    activation_checkpointing: str | int = "none"
    activation_offload: bool = False
    gpus: int = 1
    held_gradients: bool = False
    cached_weights: bool = False
    fp8_params: bool = False
    logits: bool = True
    compile: bool = True
    fused: bool = True
    cuda: bool = True
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("batch_size", "seq_len", "gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is out of range: give 1 or more")


def operand_bytes(recipe: Recipe, rows: int, columns: int, role: str, copies: str = "both") -> int:
    """Bytes of the "rowwise" or "columnwise" copy of a quantized matrix, or of "both": codes, and scales as padded.

    `role` is "x", "w" or "grad", to which Float8BlockScaling may give blocks of different shapes. Layouts: Transformer
    Engine's quantizers, described in te_models/engine/emulated/tensors.py.
    """
    size, m, k = rows * columns, -(-rows // 128), -(-columns // 128)
    shared = 0
    if recipe.scheme in ("DelayedScaling", "Float8CurrentScaling"):
        rowwise, columnwise, shared = size, size, FP32  # one scale, whichever copies there are
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


PER_TENSOR = ("DelayedScaling", "Float8CurrentScaling")  # one scale a tensor, so that codes can be transposed later


def fp8_saving(config: ModelConfig, recipe: Recipe, training: Training) -> int:
    """By how many bytes FP8 primary weights are smaller than others, in all layers together.

    Where a tensor has one scale they are kept rowwise alone (te_models.fp8.primary_weights.drop_transposed).
    """
    if not training.fp8_params:
        return 0
    copies = "rowwise" if recipe.scheme in PER_TENSOR else "both"
    every = [linear_sizes(config)] * (
        config.num_hidden_layers - recipe.num_layers_at_start_in_bf16 - recipe.num_layers_at_end_in_bf16
    )
    sizes = [size for layer in every for size in layer.values()]
    if recipe.lm_head == "fp8" and not config.tie_word_embeddings:
        sizes.append((config.hidden_size, config.vocab_size))
    element = training.dtype_bytes
    return sum(o * i * element - operand_bytes(recipe, o, i, "w", copies) for i, o in sizes)


class _Tape:
    """The operations of a forward, with the bytes of each."""

    def __init__(self, config: ModelConfig, recipe: Recipe, training: Training) -> None:
        self.config, self.recipe, self.training = config, recipe, training
        self.tokens = training.batch_size * training.seq_len
        self.rows = _up(self.tokens, recipe.row_alignment)
        self.element = training.dtype_bytes
        self.stream = self.rows * config.hidden_size * self.element  # the residual stream, or its gradient

    @property
    def copies_for_attention(self) -> bool:
        """Whether attention runs on FP32 copies: kernels/sdpa.py on a CPU."""
        return not self.training.cuda and self.element < FP32

    def fuses(self, layer: int) -> bool:
        """Whether attention with RoPE and gate is one operation: kernels.attention_core.can_fuse, on CUDA devices."""
        c, training, window = self.config, self.training, self.config.window(layer)
        plain = not c.qk_norm and c.rotary_size == c.head_dim and (window is None or window >= training.seq_len)
        cudnn = c.head_dim in (64, 128) and training.seq_len >= 128 and self.element == 2
        return training.fused and training.cuda and not training.activation_offload and plain and cudnn

    def fp8(self, layer: int) -> bool:
        """Whether this layer runs inside the autocast."""
        last = self.config.num_hidden_layers - self.recipe.num_layers_at_end_in_bf16
        return self.recipe.quantized and self.recipe.num_layers_at_start_in_bf16 <= layer < last

    def norm(self, name: str) -> Step:
        """te.RMSNorm keeps its input and one FP32 a row; its input's gradient is added to the residual's."""
        saved = self.stream + self.rows * FP32
        weights = self.config.hidden_size * self.element
        return Step(name, saved, consumes=self.stream, scratch=self.stream, weights=weights)

    def linear(
        self, name: str, inputs: int, outputs: int, fp8: bool, *, shared: bool = False, last: bool = False
    ) -> Step:
        """te.Linear keeps its input, in FP8 the columnwise copy alone, and in FP8 both copies of its weight; the columnwise
        one alone where engine/native.py casts it.

        `shared`: somebody else keeps the unquantized input already. `last`: its output's gradient is the residual's, which
        goes on living. Its backward quantizes that gradient rowwise and columnwise.
        """
        rows, element, override = self.rows, self.element, self.recipe.fields.get("backward_override", "none")
        step = Step(
            name,
            saved=0 if shared else rows * inputs * element,
            consumes=0 if last else rows * outputs * element,
            produces=rows * inputs * element,
            weights=outputs * inputs * element,
        )
        if not fp8 or override == "high_precision":
            return step
        if override == "dequantized":
            x = operand_bytes(self.recipe, rows, inputs, "x", "rowwise")
            return step._replace(saved=x, copies=operand_bytes(self.recipe, outputs, inputs, "w", "rowwise"))
        x = operand_bytes(self.recipe, rows, inputs, "x", "columnwise")
        w, dy = operand_bytes(self.recipe, outputs, inputs, "w"), operand_bytes(self.recipe, rows, outputs, "grad")
        if self.training.fp8_params:  # transposed codes are gone before the weight's gradient comes, which is larger
            return step._replace(saved=x, scratch=dy)
        if self.training.gpus > 1:  # Transformer Engine quantizes a weight sharded by FSDP2 again for its backward
            return step._replace(saved=x, scratch=dy + w)
        if self.training.fused and self.training.cuda and self.recipe.stateful and not self.training.cached_weights:
            w = operand_bytes(self.recipe, outputs, inputs, "w", "columnwise")
        return step._replace(saved=x, copies=w, scratch=dy)

    def block(self, layer: int) -> tuple[list[Step], list[Step], list[Step]]:
        """One Block in three parts: attention, the MLP up to the input of down_proj, and down_proj."""
        config, fp8, F = self.config, self.fp8(layer), self.rows * self.config.intermediate_size * self.element
        ungated = config.attention_gate == "none"
        # Without a gate o_proj's input is what attention returned, unless the rows were padded in between.
        shared = ungated and self.rows == self.tokens and not self.copies_for_attention
        sizes = linear_sizes(config)
        attention = [
            self.norm("input_layernorm"),
            self.linear("qkvg_proj", *sizes["qkvg_proj"], fp8),
            *([self.fused_attention()] if self.fuses(layer) else self.attention(layer)),
            *([] if ungated or self.fuses(layer) else [self.gate()]),
            self.linear("o_proj", *sizes["o_proj"], fp8, shared=shared, last=True),
        ]
        hidden = [
            self.norm("post_attention_layernorm"),
            self.linear("gate_up_proj", *sizes["gate_up_proj"], fp8),
            # Plain: in backward the gradients of the halves before their cat.
            Step("swiglu", 2 * F, consumes=F, produces=2 * F, scratch=0 if self.training.compile else 2 * F),
        ]
        return (
            attention,
            hidden,
            [self.linear("down_proj", *sizes["down_proj"], fp8, last=True)],
        )

    def fused_attention(self) -> Step:
        """kernels/gated_attention.py keeps the rotated projection, attention's output and one FP32 a query and head."""
        c, T = self.config, self.tokens
        q, kv = (T * size * self.element for size in (c.q_size, c.kv_size))
        whole, summed = self.rows * c.qkvg_size * self.element, T * c.q_size * FP32  # dq is summed up in FP32
        ungated = 0 if c.attention_gate == "none" else q  # the gradient of what the gate multiplies
        return Step(
            "attention", whole + q + T * c.num_attention_heads * FP32, consumes=q, produces=whole,
            scratch=ungated + q + 2 * kv + summed,
        )  # fmt: skip

    def attention(self, layer: int) -> list[Step]:
        """What lies between qkvg_proj and the gate, in the order of the forward.

        q, k, v and the gate are views of qkvg_proj's output, which lives as long as one of them is kept. SDPA keeps q, k, v,
        its output and one FP32 a query and head.
        """
        c, T, training = self.config, self.tokens, self.training
        q, kv, gate = (T * size * self.element for size in (c.q_size, c.kv_size, c.gate_size))
        whole = self.rows * c.qkvg_size * self.element
        split = [Step("split of q, k, v, gate", consumes=q + 2 * kv + gate, produces=whole)]
        norms = T * (c.num_attention_heads + c.num_key_value_heads) * FP32
        if c.qk_norm:  # te.RMSNorm works on contiguous heads and keeps those
            split.append(Step("q_norm, k_norm", q + kv + norms, consumes=q + kv, produces=q + kv))
        if c.has_rope(layer):  # linear in its input: keeps nothing but the tables, which all layers share
            split.append(Step("rope", consumes=q + kv, produces=q + kv))
        statistics = T * c.num_attention_heads * FP32
        grads = dict(consumes=q, produces=q + 2 * kv, scratch=T * c.q_size * FP32)  # dq is summed up in FP32
        if not self.copies_for_attention:
            own = q + kv if c.has_rope(layer) or c.qk_norm else 0
            saved = whole + own + q + statistics
        else:  # in FP32, on copies of q, k and v; the gate alone may still hold qkvg_proj's output
            held = c.attention_gate != "none" and training.compile
            saved = T * 2 * (c.q_size + c.kv_size) * FP32 + statistics + held * whole
        return [*split, Step("attention", saved + self._mask(layer), **grads)]

    def _mask(self, layer: int) -> int:
        """A sliding window is a mask, which SDPA turns into numbers of the activations' dtype and keeps."""
        window, seq = self.config.window(layer), self.training.seq_len
        width = self.element if self.training.cuda else FP32
        return 0 if window is None or window >= seq else seq * seq * width

    def gate(self) -> Step:
        """x * sigmoid(g). Compiled: keeps x and g, which attention and qkvg_proj's output hold. Plain: sigmoid(g) too."""
        c, T = self.config, self.tokens
        q, g = T * c.q_size * self.element, T * c.gate_size * self.element
        saved = 0
        if not self.training.compile:
            saved += q if c.attention_gate == "elementwise" else T * c.num_attention_heads * self.element
        saved += q if self.copies_for_attention else 0  # attention's output, rounded from FP32
        return Step("gate", saved, consumes=self.rows * c.q_size * self.element, produces=q + g)

    def head(self) -> list[Step]:
        """The final norm, lm_head and the loss."""
        c = self.config
        if not self.training.logits and not (self.recipe.quantized and self.recipe.lm_head == "fp8"):
            return [self.norm("norm")._replace(produces=self.stream, scratch=0), self.fused_head()]
        width = self.tokens * c.vocab_size
        logits, fp32 = width * self.element, width * FP32
        if self.training.compile:  # keeps logits, a maximum and a sum a row, and the targets
            loss = Step("loss", logits + self.tokens * (2 * FP32 + INT64), produces=logits, of_logits=True)
        else:  # keeps log_softmax in FP32 and two counts; its gradient is made from another one in FP32
            loss = Step(
                "loss", fp32 + self.tokens * INT64 + INT64 + FP32, produces=logits, scratch=2 * fp32, of_logits=True
            )
        cut = self.rows * c.vocab_size * self.element
        padding = [Step("cut of padding", consumes=logits, produces=cut)] if self.rows > self.tokens else []
        return [
            self.norm("norm")._replace(produces=self.stream, scratch=0),
            self.linear("lm_head", c.hidden_size, c.vocab_size, self.recipe.quantized and self.recipe.lm_head == "fp8"),
            *padding,
            loss,
        ]

    def fused_head(self) -> Step:
        """kernels/lm_head.py makes both gradients in the forward, a chunk of logits at a time, and keeps those alone.

        Fused on a GPU, the chunk's gradient is written over its logits (kernels/lm_head_triton.py). The FP32 sum of the weight's
        gradient and the chunk (on a CPU also a product to be added to that) are there in the forward; they are counted as
        scratch, so far as the backward's own copies do not take their place.
        """
        c, size = self.config, self.config.vocab_size * self.config.hidden_size
        own, weight = self.tokens * c.hidden_size * self.element, size * self.element
        rows = head_rows(self.tokens, c.vocab_size, c.hidden_size, self.training.cuda)
        chunk, sums = rows * c.vocab_size, 1 if self.training.cuda else 2
        sums = 0 if rows == self.tokens else sums  # one chunk's product is the gradient
        beside = self.element + (0 if self.training.compile else 3 * FP32)
        if self.training.cuda and self.training.fused and not self.training.activation_offload:
            beside = 0
        forward = sums * FP32 * size + chunk * (self.element + beside)
        return Step(
            "head and loss", own + weight, produces=self.stream, weights=weight, of_logits=True,
            scratch=max(0, forward - self.stream - weight),
        )  # fmt: skip

    def regions(self) -> Iterator[Region]:
        """The whole forward; what is recomputed in backward is as te_models/config/recompute_modes.py has it."""
        mode, c, fp8_weights = self.training.activation_checkpointing, self.config, self.training.fp8_params
        # SwiGLU's codes are its own where it hands them on, and it can make them again.
        hands_on = fp8_weights and self.training.fused and self.training.cuda and self.recipe.scheme in PER_TENSOR
        tables = 2 * self.training.seq_len * c.rotary_size * self.element
        rotary = tables if any(c.has_rope(layer) for layer in range(c.num_hidden_layers)) else 0
        table = c.vocab_size * c.hidden_size * self.element
        tied = c.tie_word_embeddings  # then its gradient is added to lm_head's
        embedding = Step("embedding", self.tokens * INT64 + rotary, consumes=self.stream)
        yield Region([embedding._replace(scratch=table) if tied else embedding._replace(weights=table)])
        for layer in range(c.num_hidden_layers):
            attention, hidden, down = self.block(layer)
            # What stays of a block (te_models/model/offload.py), storages of up to 1 MiB, is not counted.
            place = (layer, self.training.activation_offload and layer < c.num_hidden_layers - 1)
            if recomputes_block(mode, layer):
                yield Region(attention + hidden + down, self.stream, *place)
                continue
            yield Region(attention, None, *place)
            fp8 = self.fp8(layer)
            kept = self.stream if recomputes_mlp(mode, layer, c.num_hidden_layers, fp8, fp8_weights) else None
            if recomputes_product(mode, fp8, hands_on):  # for down_proj's backward, with which the recompute begins
                again = down[0]._replace(saved=0, scratch=down[0].scratch + down[0].saved)
                yield Region([*hidden, again], kept, *place)
            else:
                yield Region(hidden, kept, *place)
                yield Region(down, None, *place)
        yield Region(self.head())


def _after_forward(now: Memory, region: Region, activations: bool = True, copies: bool = True) -> Memory:
    """With what the region's forward leaves behind, or one part of it."""
    if region.kept is not None:
        return now.plus(activations=region.kept * activations)
    logits = sum(step.saved for step in region.steps if step.of_logits)
    saved = sum(step.saved for step in region.steps) - logits
    weights = sum(step.copies for step in region.steps)
    return now.plus(activations=saved * activations, logits=logits, fp8_weight_copies=weights * copies)


def _walk(regions: list[Region], now: Memory, training: Training) -> Iterator[Memory]:
    """The memory during each step's backward, from the loss down to the embedding.

    A block's first backward brings the block below back from the host. FP8 copies of weights go there too, unless the
    next micro-batch uses them.
    """
    shared, away = training.held_gradients, {region.block for region in regions if region.away}
    for region in regions:
        now = _after_forward(now, region, not region.away, shared or not region.away)
    for region in reversed(regions):
        if region.block is not None and (below := region.block - 1) in away:
            away.remove(below)
            for other in regions:
                now = _after_forward(now, other, True, not shared) if other.block == below else now
        where = "activations"
        if region.kept is not None:
            where = "recomputed"
            again = sum(step.saved for step in region.steps) - region.kept
            now = now.plus(recomputed=again, fp8_weight_copies=sum(step.copies for step in region.steps))
        for number, step in reversed(list(enumerate(region.steps))):
            passing = step.produces + step.scratch
            if training.held_gradients:
                yield now.plus(step.name, activation_gradients=passing + step.weights)
            else:  # autograd keeps what it makes; with FSDP2 its share, the rest is in the buffers counted from the start
                now = now.plus(gradients=step.weights // training.gpus)
                yield now.plus(step.name, activation_gradients=passing)
            change = step.produces - step.consumes
            now = now.plus(fp8_weight_copies=-step.copies, activation_gradients=change)
            saved = step.saved
            if region.kept is not None and number == 0:  # the region's input was kept all along
                now, saved = now.plus(activations=-region.kept), saved - region.kept
            now = _freed(now, "logits" if step.of_logits else where, saved)


def _freed(now: Memory, part: str, size: int) -> Memory:
    """So many bytes less of the part called so."""
    return replace(now, **{part: getattr(now, part) - size})


def _standing(config: ModelConfig, recipe: Recipe, training: Training) -> Memory:
    """What is there before the forward."""
    parameters, element, gpus = model_parameters(config), training.dtype_bytes, training.gpus
    every = sum(p.numel for p in parameters) * element - fp8_saving(config, recipe, training)
    share, gathered, whole = -(-every // gpus), 0, 0
    if gpus > 1:  # FSDP2 gathers the unit that runs and the next one; embedding, norm and head stay gathered
        block = sum(p.numel for p in parameters if p.kind in ("matrix", "gate")) // config.num_hidden_layers * element
        gathered = sum(p.numel for p in parameters if p.kind == "table") * element + 2 * block
        whole = gathered
        gathered -= 2 * fp8_saving(config, recipe, training) // config.num_hidden_layers
    state = 0
    if training.optimizer is not None:
        state = OPTIMIZERS[training.optimizer].of(parameters, element) // gpus
    return Memory(
        weights=share + gathered,
        gradients=whole + (sum(p.numel for p in parameters) * FP32 if training.held_gradients else 0),
        optimizer=state,
        fp8_weight_copies=_delayed_state(config, recipe),
        workspace=CUBLAS_WORKSPACE if training.cuda else 0,
    )


def _delayed_state(config: ModelConfig, recipe: Recipe) -> int:
    """Scales and amax histories of three forward and two backward tensors a linear, FP32."""
    if not recipe.stateful:
        return 0
    layers = config.num_hidden_layers - recipe.num_layers_at_start_in_bf16 - recipe.num_layers_at_end_in_bf16
    linears = 4 * layers + (recipe.lm_head == "fp8")
    return linears * 5 * FP32 * (recipe.fields["amax_history_len"] + 1)


def memory_moments(config: ModelConfig, recipe: Recipe, training: Training) -> list[Memory]:
    """The three moments of a step that can be its peak: the loss's backward, the worst one below it, the update."""
    standing = _standing(config, recipe, training)
    loss, *rest = _walk(list(_Tape(config, recipe, training).regions()), standing, training)
    worst = max(rest, key=lambda memory: memory.total)
    moments = [replace(loss, moment="loss"), replace(worst, moment=f"backward of {worst.moment}")]
    if training.optimizer is not None:
        share = -(-sum(p.numel for p in model_parameters(config)) // training.gpus)
        size = share * training.dtype_bytes + min(share, UPDATE_CHUNK) * max(0, FP32 - training.dtype_bytes)
        if training.held_gradients and training.gpus == 1:
            size = share * FP32  # the optimizer reads the sums themselves
        moments.append(replace(standing, moment="optimizer step", gradients=size))
    return moments


def kept_bytes(config: ModelConfig, recipe: Recipe, training: Training, on_host: bool = False) -> int:
    """What autograd holds between forward and backward, activations, logits and FP8 copies of weights, wherever it is;
    `on_host`: what of it `activation_offload` has there."""
    empty = Memory()
    for region in _Tape(config, recipe, training).regions():
        if region.away or not on_host:
            empty = _after_forward(empty, region, copies=not (on_host and training.cached_weights))
    return empty.total
