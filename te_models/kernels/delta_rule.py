"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): attention whose memory is one matrix per head.

    S <- exp(g) S + k (beta (v - exp(g) S^T k))^T,    o = S^T q

S [d_k, d_v] FP32 is the state. Queries and keys are L2-normed here and queries divided by sqrt(d_k). Shapes, and as in
te_models.config.deltanet: q, k [B, S, key heads, d_k], v [B, S, value heads, d_v], g and beta FP32 [B, S, value heads].

There are three implementations. The plain one runs everywhere, in FP32, and stores only its inputs for backward. On a
GPU the Triton kernels of flash-linear-attention run instead, if it is installed, and whole rows on Hopper may take
FlashQLA (te_models.kernels.flash_qla).
"""

import functools
import importlib.metadata
import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.config.deltanet import CHUNK, DeltaNetConfig
from te_models.device.allocations import on_gpu
from te_models.device.autograd import Context
from te_models.device.operations import count_flops
from te_models.kernels import flash_qla
from te_models.kernels.chunks import chunked_decays, through_chunks
from te_models.kernels.from_inputs import from_inputs

log = logging.getLogger(__name__)

WIDEST = 256  # channels per key head that the kernels compute
EPSILON = 1e-6  # added to the squared lengths of queries and keys
# Instead of exp(g) = 0 at the first token of a document: kernels without document boundaries sum g, and differences of
# sums with -infinity are NaN. exp(-60) is 9e-27, which changes no FP32 number that it is added to.
FORGET = -60.0
HINT = (
    "linear attention runs in plain PyTorch: pip install 'te-models[hybrid]' for flash-linear-attention, whose kernels "
    "are many times faster on a GPU"
)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs o [B, S, value heads, d_v] in the dtype of v, and the state after the last token.

    Args:
        q, k, v, g, beta: see above.
        state: before the first token, FP32 [B, value heads, d_k, d_v]; None: zeros, and no state is returned.
        documents: int [B, S]; the state is zero wherever a token and the one before it are of different documents.
    """
    # The kernels compute in 16 bits with FP32 states; FP32 models and wider heads take the plain path.
    if runs_on_kernels(q.device, q.dtype) and k.shape[3] <= WIDEST:
        return _by_kernels(q, k, v, g, beta, state, documents)
    # A memory plan of a GPU run, on meta.
    if q.is_meta and on_gpu(q) and q.dtype.itemsize == 2:
        return kernels_without_data(q, k, v, g, beta), None
    if state is None:
        return _outputs(q, k, v, g, beta, documents), None
    if q.shape[1] == 1:
        return recurrent(q, k, v, g, beta, state)
    return chunked(q, k, v, g, beta, state, documents)


@from_inputs
def _outputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None
) -> Tensor:
    """Return the outputs of whole rows."""
    out, _ = chunked(q, k, v, g, beta, documents=documents)
    return out


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule` token by token."""
    q, k, values, state = _prepared(q, k, v, state)
    outputs = []
    for step in range(v.shape[1]):
        key = k[:, :, step, :, None]  # [B, heads, d_k, 1]
        query = q[:, :, step, :, None]  # [B, heads, d_k, 1]
        # Forget, look up what the key reads now, and write the difference to the value (the delta).
        state = state * g[:, step, :, None, None].exp()
        error = values[:, :, step] - (state * key).sum(-2)  # [B, heads, d_v]
        state = state + key * (beta[:, step, :, None] * error)[..., None, :]
        outputs.append((state * query).sum(-2))
    return torch.stack(outputs, dim=1).to(v.dtype), state


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    documents: Tensor | None = None,
    size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule` in chunks of `size` tokens.

    Within a chunk the values that the tokens write depend on each other, through a unit lower triangular system: token
    i subtracts beta_i (k_i . k_j) of what token j wrote, decayed by what is between them. The state passes from chunk
    to chunk.
    """
    batch, seq, heads, _ = v.shape
    # [B, heads, chunks, C, d] from here on; the last chunk is filled with zeros, which write nothing.
    size = min(size, seq)
    count = -(-seq // size)
    padding = count * size - seq
    q, k, values, state = _prepared(q, k, v, state)
    q, k, values = (
        F.pad(x, (0, 0, 0, padding)).unflatten(2, (count, size)) for x in (q, k, values)
    )
    g, beta = (
        F.pad(x.transpose(1, 2), (0, padding)).unflatten(2, (count, size)) for x in (g, beta)
    )
    between, since, until, passed = chunked_decays(g, documents, padding)

    # One triangular solve gives what every token of a chunk writes, both the part from its own values and the part that
    # depends on the state before the chunk, which is not known yet.
    system = (beta[..., None] * k) @ k.mT * between  # [B, heads, chunks, C, C]
    right_side = torch.cat((values, k * since[..., None]), dim=-1) * beta[..., None]
    written, read = torch.linalg.solve_triangular(
        system, right_side, upper=False, unitriangular=True
    ).split((values.shape[-1], k.shape[-1]), dim=-1)
    scores = q @ k.mT * between  # [B, heads, chunks, C, C]
    # Decays from the start of the chunk to the query, and from the key to the end of the chunk.
    q = q * since[..., None]
    k = k * until[..., None]
    decays = passed[..., None, None]
    out, state = through_chunks(q, k, written, read, scores, decays, state)
    out = out[:, :, :seq]  # [B, heads, S, d_v]
    return out.transpose(1, 2).to(v.dtype), state


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q and k normed and repeated for each value head, v, [B, heads, S, d], and the state, in FP32."""
    heads = v.shape[2]
    width = k.shape[3]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    # Value heads share keys in groups, as in grouped-query attention.
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q * width**-0.5, k))
    if state is None:
        state = v.new_zeros(v.shape[0], heads, width, v.shape[3])
    return q, k, v, state


@functools.cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return flash-linear-attention's functions for whole rows and for decoding; None, and one line, without it.

    Where FlashQLA is installed, that package hands it all whole rows, also prompts, for each kind of which it compiles
    for half a minute. Here the function behind that choice is taken.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what else the package could use
            from fla.ops.gated_delta_rule import (  # noqa: PLC0415  an optional package
                chunk_gated_delta_rule,
                fused_recurrent_gated_delta_rule,
            )

            from te_models.kernels import delta_rule_triton  # noqa: PLC0415  needs Triton

            delta_rule_triton.register()
    except ImportError:
        log.warning(HINT)
        return None
    # As the decorated function is: torch.compile does not look into it.
    whole_rows = torch.compiler.disable(inspect.unwrap(chunk_gated_delta_rule))
    return whole_rows, fused_recurrent_gated_delta_rule


def runs_on_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether flash-linear-attention's kernels run: on a GPU, in 16 bits, where it is installed."""
    return device.type == "cuda" and dtype.itemsize == 2 and _kernels() is not None


def delta_rule_kernel(device: torch.device, dtype: torch.dtype, sizes: DeltaNetConfig) -> str:
    """Return the name of the kernels of the delta rule in a training step on this device, in a few words."""
    if runs_on_kernels(device, dtype):
        kernel = f"flash-linear-attention {importlib.metadata.version('fla-core')}"
        rows = flash_qla.least_rows(
            key_channels=sizes.key_head_dim,
            value_heads=sizes.num_value_heads,
            value_channels=sizes.value_head_dim,
        )
        if rows == 1:
            kernel = flash_qla.name()
        elif rows is not None:
            kernel = f"{flash_qla.name()} for {rows} rows or more at a time, otherwise {kernel}"
        return f"{kernel}, whose kernels are compiled in the first step"
    if device.type != "cuda" or dtype.itemsize != 2:
        return "plain PyTorch"
    return "plain PyTorch, many times slower: te-models[hybrid] is missing"


def kernels_without_data(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of whole rows, on meta, with the memory of flash-linear-attention's kernels.

    Per token and value head a chunk of C tokens has the products k k^T and q k^T, the triangular solve of v and k, its
    product with the values, and three products with the state: C (2 dk + (dk + dv) / 2 + dv) + 3 dk dv multiplications.
    """
    keys = k.shape[3]
    values = v.shape[3]
    chunk = min(CHUNK, v.shape[1])
    rule = chunk * (2 * keys + (keys + values) / 2 + values) + 3 * keys * values
    count_flops(v, 2.0 * v.shape[:3].numel() * rule)
    return _KernelsWithoutData.apply(q, k, v, g, beta)


class _KernelsWithoutData(torch.autograd.Function):
    """The memory of flash-linear-attention's kernels for whole rows, on meta.

    They save their inputs, the lengths of queries and keys, and per token, value head and token of its chunk an element
    of the inverse of the chunk's system. Backward makes the states [d_k, d_v] of all chunks and their gradients, three
    tensors like the values, four like the keys of all value heads, one like the keys and one like the gates.
    """

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        batch, seq, heads, _ = v.shape
        lengths = [q.new_empty(q.shape[:3], dtype=torch.float32) for _ in "qk"]
        inverse = v.new_empty(batch, seq, heads, min(CHUNK, seq))
        ctx.save_for_backward(q, k, v, g, beta, inverse, *lengths)
        return torch.empty_like(v)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta, *_ = ctx.saved_tensors
        batch, seq, heads, width = v.shape
        chunks = -(-seq // min(CHUNK, seq))
        states = [v.new_empty(batch, chunks, heads, k.shape[3], width) for _ in "12"]
        values = [torch.empty_like(v) for _ in "123"]
        keys = [v.new_empty(batch, seq, heads, k.shape[3]) for _ in "1234"]
        others = (torch.empty_like(k), torch.empty_like(g), torch.empty_like(beta))
        gradients = tuple(torch.empty_like(x) for x in (q, k, v, g, beta))
        del states, values, keys, others
        return gradients


def _by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `delta_rule` by flash-linear-attention or FlashQLA.

    Documents end by a decay that leaves nothing, not by their cumulative lengths: those have to be read by the host,
    and differ in number from batch to batch, which no CUDA graph can follow.
    """
    library = _kernels()
    assert library is not None
    if documents is not None:
        # True at the first token of each document but the first, whose state is zero anyway.
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=False)
        g = g.masked_fill(begins[..., None], FORGET)
    # Evaluation takes the same kernels as training, and so does the first of two passes of recomputation.
    if state is None and flash_qla.takes(q, v):
        return flash_qla.whole_rows(q, k, v, g, beta), None
    # The recurrent kernel has no backward; for one token it skips the work of a chunk.
    function = library[1] if q.shape[1] == 1 and not torch.is_grad_enabled() else library[0]
    # By name: the two functions have other orders of arguments.
    return function(
        q,
        k,
        v,
        g=g,
        beta=beta,
        use_qk_l2norm_in_kernel=True,
        initial_state=state,
        output_final_state=state is not None,
    )
