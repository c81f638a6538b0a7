"""Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692): the delta rule whose state decays per channel of the keys.

    S <- diag(exp(g)) S + k (beta (v - (diag(exp(g)) S)^T k))^T,    o = S^T q

S [d, d_v] FP32 is the state. Queries and keys are L2-normed here and queries divided by sqrt(d). Shapes: q, k
[B, S, H, d], v [B, S, H, d_v], g FP32 [B, S, H, d], beta FP32 [B, S, H].

There are two implementations. The plain one runs everywhere, in FP32, and stores only its inputs for backward. On a
GPU the Triton kernels of flash-linear-attention run instead, if it is installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.config.kda import CHUNK
from te_models.device.allocations import on_gpu
from te_models.kernels.chunks import of_documents, through_chunks
from te_models.kernels.delta_rule import EPSILON, FORGET, kernels_without_data
from te_models.kernels.from_inputs import from_inputs

log = logging.getLogger(__name__)

WIDEST = 256  # channels per head that the kernels compute
HINT = (
    "Kimi Delta Attention runs in plain PyTorch: pip install 'te-models[hybrid]' for flash-linear-attention, whose "
    "kernels are many times faster on a GPU"
)
Rule = Callable[..., Any]


def kimi_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs o [B, S, H, d_v] in the dtype of v, and the state after the last token.

    Args:
        q, k, v, g, beta: see above.
        state: before the first token, FP32 [B, H, d, d_v]; None: zeros, and no state is returned.
        documents: int [B, S]; the state is zero wherever a token and the one before it are of different documents.
    """
    if runs_on_kernels(q.device, q.dtype) and k.shape[3] <= WIDEST:
        kernels = packaged()
        assert kernels is not None
        return by_linear_attention(*kernels, q, k, v, g, beta, state, documents)
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
    """Compute `kimi_delta_rule` token by token."""
    q, k, values, state = _prepared(q, k, v, state)
    g = g.transpose(1, 2)
    outputs = []
    for step in range(v.shape[1]):
        key = k[:, :, step, :, None]  # [B, H, d, 1]
        query = q[:, :, step, :, None]  # [B, H, d, 1]
        state = state * g[:, :, step, :, None].exp()
        error = values[:, :, step] - (state * key).sum(-2)  # [B, H, d_v]
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
    """Compute `kimi_delta_rule` in chunks of `size` tokens, as te_models.kernels.delta_rule.chunked.

    A decay per channel is inside the products of queries and keys. Its logarithms are subtracted before they are
    exponentiated, one pair of tokens at a time: exp(-g) of keys alone would overflow.
    """
    batch, seq, heads, _ = v.shape
    size = min(size, seq)
    count = -(-seq // size)
    padding = count * size - seq
    q, k, values, state = _prepared(q, k, v, state)
    # [B, H, n, C, d]
    q, k, values, g = (
        F.pad(x, (0, 0, 0, padding)).unflatten(2, (count, size))
        for x in (q, k, values, g.transpose(1, 2))
    )
    beta = F.pad(beta.transpose(1, 2), (0, padding)).unflatten(2, (count, size))[..., None]
    total = g.cumsum(-2)  # log of the decay since before the chunk

    seen = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    since = total.exp()
    until = (total[..., -1:, :] - total).exp()
    passed = total[..., -1, :].exp()
    if documents is not None:
        document = F.pad(documents.double(), (0, padding), mode="replicate").unflatten(
            1, (1, -1, size)
        )
        seen = seen & (document[..., :, None] == document[..., None, :])  # [B, 1, n, C, C]
        of_before, of_last, passes = of_documents(document)
        since = since * of_before[..., None]
        until = until * of_last[..., None]
        passed = passed * passes[..., None]
    between = total[..., :, None, :] - total[..., None, :, :]  # [B, H, n, C, C, d]
    between = between.masked_fill(~seen[..., None], float("-inf")).exp()
    system = beta * torch.einsum("...id,...jd,...ijd->...ij", k, k, between)
    scores = torch.einsum("...id,...jd,...ijd->...ij", q, k, between)
    # One solve for what the tokens write from their values, and for what they read of the state before the chunk.
    right_side = torch.cat((values, k * since), dim=-1) * beta
    written, read = torch.linalg.solve_triangular(
        system, right_side, upper=False, unitriangular=True
    ).split((values.shape[-1], k.shape[-1]), dim=-1)
    # The decay from before the chunk to the query, per channel of the keys.
    q = q * since
    k = k * until
    out, state = through_chunks(q, k, written, read, scores, passed[..., None], state)
    out = out[:, :, :seq]  # [B, H, S, d_v]
    return out.transpose(1, 2).to(v.dtype), state


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q and k normed, v, [B, H, S, d], and the state, in FP32."""
    width = k.shape[3]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[1], width, v.shape[3])
    return q * width**-0.5, k, v, state


@functools.cache
def packaged() -> tuple[Rule, Rule] | None:
    """Return flash-linear-attention's functions for whole rows and for decoding; None, and one line, without it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what else the package could use
            from fla.ops.kda import (  # noqa: PLC0415  an optional package
                chunk_kda,
                fused_recurrent_kda,
            )
            from fla.utils import IS_NVIDIA_HOPPER  # noqa: PLC0415
    except ImportError:
        log.warning(HINT)
        return None
    if IS_NVIDIA_HOPPER:
        from te_models.kernels.delta_rule_triton import fix_configurations  # noqa: PLC0415  needs Triton

        fix_configurations()
    return chunk_kda, fused_recurrent_kda


def runs_on_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether flash-linear-attention's kernels run: on a GPU, in 16 bits, where it is installed."""
    return device.type == "cuda" and dtype.itemsize == 2 and packaged() is not None


def kda_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """Return what computes the rule in a training step on this device, in a few words."""
    if runs_on_kernels(device, dtype):
        version = importlib.metadata.version("fla-core")
        return f"flash-linear-attention {version}, whose kernels are compiled in the first step"
    if device.type != "cuda" or dtype.itemsize != 2:
        return "plain PyTorch"
    return "plain PyTorch, many times slower: te-models[hybrid] is missing"


def by_linear_attention(
    rows: Rule,
    step: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `kimi_delta_rule` by flash-linear-attention's functions for whole rows, and for one token.

    Documents end by a decay that leaves nothing, not by their cumulative lengths: those have to be read by the host,
    and differ in number from batch to batch, which no CUDA graph can follow.
    """
    if documents is not None:
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=False)
        g = g.masked_fill(begins[..., None, None], FORGET)
    function = step if q.shape[1] == 1 and not torch.is_grad_enabled() else rows
    out, after = function(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=state is not None,
        use_qk_l2norm_in_kernel=True,
    )
    return out, after
