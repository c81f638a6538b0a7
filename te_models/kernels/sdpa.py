"""Causal attention through PyTorch's scaled_dot_product_attention, with cuDNN's kernel first where there is a GPU."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_models.config.attention import CUDNN_DIMS, CUDNN_DIMS_ANYWHERE
from te_models.device.allocations import on_gpu
from te_models.device.autograd import Context
from te_models.device.cudnn import cudnn_is_sound
from te_models.device.operations import count_flops
from te_models.kernels import flash_4

# cuDNN takes 0.5 to 0.9 of FlashAttention-2's time for every head dimension of CUDNN_DIMS, at all lengths that
# benchmarks/attention_kernels.py times (docs/results/training_speed.md).
CUDA_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# For heads and lengths at which no measurement shows cuDNN to be faster.
SMALL_ORDER = CUDA_ORDER[1:]
# For one query per row under a mask: FlashAttention supports no mask, and cuDNN would plan anew for every cache length.
DECODE_ORDER = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def suits_cudnn(seq: int, size: int, dtype: torch.dtype, masked: bool = False) -> bool:
    """Return whether to use cuDNN for `seq` queries of `size` channels per head, `masked` by a tensor or causal.

    With a mask, cuDNN 9.19 makes NaN gradients at some lengths that are not multiples of its tiles of 128 keys
    (pytorch/pytorch#196678). Its backward is not deterministic.
    """
    if dtype.itemsize != 2 or seq < 128 or torch.are_deterministic_algorithms_enabled():
        return False
    if masked and (seq % 128 or size not in CUDNN_DIMS_ANYWHERE):
        return False
    dims = CUDNN_DIMS if _is_hopper() else CUDNN_DIMS_ANYWHERE
    return size in dims and cudnn_is_sound()


@functools.cache
def _is_hopper() -> bool:
    """Return whether the GPU is an H100 or H200, the only ones measured; True where there is none, for plans."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float | None = None
) -> Tensor:
    """Return attention in which query i sees keys 0..i, or those that `mask` (bool, or added to the scores) allows.

    q [B, N, S, H]; k, v [B, K, M, H] with N a multiple of K and M = S without a mask; returns [B, N, S, H]. `scale` is
    the factor on the products of q and k; None: H ** -0.5.
    """
    # Decoding: one new query per row, and a mask over the slots of the cache.
    if mask is not None and q.shape[-2] == 1:
        return _decode_attention(q, k, v, mask, scale)
    causal = False
    # Else there is one query, which sees all keys of a cache. A branch makes a bool of what is symbolic in a trace.
    if mask is None and q.shape[-2] == k.shape[-2]:
        causal = True
    options: dict[str, Any] = dict(
        attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1], scale=scale
    )
    suits = q.is_cuda and suits_cudnn(q.shape[-2], q.shape[-1], q.dtype, mask is not None)
    if suits and causal and q.shape[-1] == v.shape[-1] and not torch.is_grad_enabled():
        # What the call below ends in: to set an order of kernels and to choose takes the host of a prompt longer than
        # to launch one. Positional: no mask, no sums for backward, no dropout, causal, no mask of the dropout.
        out, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, False, 0.0, True, False, scale=scale
        )
        return out
    order = CUDA_ORDER if suits else SMALL_ORDER
    out = _attention(q, k, v, order, options)
    if suits and out.requires_grad:
        out.register_hook(functools.partial(gradient_like, strides=out.stride()))
    return out


def gradient_like(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the gradient of cuDNN's output with the strides of that output.

    PyTorch keeps one graph of cuDNN's backward for all calls with q, k and v of the same shapes and strides, and the
    strides of the output's gradient at the first call are part of it (up to torch 2.11 at least): a later gradient with
    other strides would be read at wrong places.
    """
    for size, stride, wanted_stride in zip(gradient.shape, gradient.stride(), strides, strict=True):
        if size > 1 and stride != wanted_stride:
            return torch.empty_strided(
                gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
    return gradient


def _decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attend with one query per row; the heads that share a key are queries of one head, so that no key is copied."""
    # [B, N, 1, H] to [B, K, N/K, H]: the query heads of a key head become its queries.
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    return _attention(grouped, k, v, DECODE_ORDER, dict(attn_mask=mask, scale=scale)).reshape(
        q.shape
    )


def _attention(
    q: Tensor, k: Tensor, v: Tensor, order: list[SDPBackend], options: dict[str, Any]
) -> Tensor:
    if q.is_meta:
        return attention_without_data(q, k, v, options["attn_mask"])
    if q.is_cuda:
        with sdpa_kernel(order, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, **options)
    # Most CPUs have no BF16 instructions: FP32 is five times faster there, and at least as exact.
    if (mask := options["attn_mask"]) is not None and mask.is_floating_point():
        options = {**options, "attn_mask": mask.float()}
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).to(q.dtype)


class _WithoutData(torch.autograd.Function):
    """The memory of PyTorch's kernels: they save q, k, v, the mask, their output, and one FP32 per query and head."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        log_sum = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        out = out.transpose(1, 2)
        ctx.save_for_backward(q, k, v, mask, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        workspace = backward_workspace(q)
        gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        del workspace
        return *gradients, None


def attention_flops(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the operations of causal attention of q [B, N, S, H], k and v [B, K, M, H or V]: half of the pairs.

    It counts the products of queries and keys and the sums of values, as many where a window shows a query fewer keys.
    """
    return q.shape[:3].numel() * k.shape[2] * (q.shape[3] + v.shape[3])


def attention_without_data(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Run attention on meta, where PyTorch would compose it of operations."""
    count_flops(q, attention_flops(q, k, v))
    if on_gpu(q):
        return _WithoutData.apply(q, k, v, None if mask is None else mask.to(q.dtype))
    mask = None if mask is None else mask.float()
    return _WithoutData.apply(q.float(), k.float(), v.float(), mask).to(q.dtype)


def backward_workspace(q: Tensor) -> Tensor | None:
    """Return the memory that a kernel takes in backward beside the gradients, on meta: dq is summed in FP32."""
    if not (q.is_meta and on_gpu(q)):
        return None
    return torch.empty(q.shape, dtype=torch.float32, device=q.device)


def attention_mask(
    seq: int,
    window: int | None,
    real: Tensor | None,
    documents: Tensor | None,
    device: torch.device,
    rows: slice | None = None,
) -> Tensor | None:
    """Return which keys each of `seq` positions sees, bool [(B, 1,) S, S]; None for plain causal.

    `window` counts tokens, the position itself included and padding left out; `real` bool [B, S] is False at padding,
    which only the same position sees, so that no row is empty; with `documents` int [B, S] each position sees only its
    own document. With `rows` only the positions of that slice ask, and the result is a mask in any case.
    """
    # A traced graph serves any seq.
    covers = window is None or not torch.compiler.is_compiling() and window >= seq
    if real is None and documents is None and covers and rows is None:
        return None
    asking = slice(None) if rows is None else rows
    slot = torch.arange(seq, device=device)
    # [S, S], of query minus key: below 0 lies the future.
    distance = slot[asking, None] - slot
    mask = distance >= 0
    if window is not None:
        if real is None:
            mask = mask & (distance < window)
        else:
            # Padding takes slots but no positions, so a window counts along the tokens.
            position = real.cumsum(-1)
            mask = mask & within_window(position[:, asking], position, window)
    if documents is not None:
        mask = mask & (documents[:, None, asking, None] == documents[:, None, None, :])
    # A row without any key would be a softmax over nothing, NaN; padding sees itself instead.
    return mask if real is None else (mask & real[:, None, None, :]) | (distance == 0)


def chunk_numbers(positions: Tensor, documents: Tensor | None, chunk: int) -> Tensor:
    """Return a number for each chunk of `chunk` tokens that tells it from all others of its row, int64 [(B,) S].

    `positions` [S] or [B, S] are counted in each document of `documents`, int [B, S], which are below 0 at padding, as
    the numbers are there then.
    """
    chunks = positions // chunk
    if documents is None:
        return chunks
    numbers = documents.long() * (positions.shape[-1] + 1) + chunks
    return torch.where(documents < 0, documents.long(), numbers)


def within_window(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Return which keys at positions [B, M] are newer than `window` tokens before the queries [B, S]: [B, 1, S, M]."""
    return keys[:, None, None, :] > queries[:, None, :, None] - window


def within_chunk(queries: Tensor, keys: Tensor, chunk: int) -> Tensor:
    """Return which keys at positions [B, M] are in the chunk of the queries [B, S]: bool [B, 1, S, M]."""
    return (queries // chunk)[:, None, :, None] == (keys // chunk)[:, None, None, :]


def masks_nothing(mask: Tensor) -> bool:
    """Return whether a mask of padding has no zero; this synchronizes with the device.

    False while a graph is being traced (torch.compile, torch.export), since it must be correct for every mask, and of a
    mask without values (a memory plan's): there is one where context parallelism fills rows.
    """
    if torch.compiler.is_compiling() or mask.is_meta:
        return False
    return bool(mask.all())


def attention_kernel(
    device: torch.device, channels: int, capped: bool = False, sinks: bool = False
) -> str:
    """Return the name of the kernel of a training step on this device, for capped logits or with sinks.

    `channels` is the head dimension.
    """
    reason = "capped logits" if capped else "sinks"
    if device.type != "cuda":
        return f"composed in FP32, for its {reason}" if capped or sinks else "PyTorch SDPA (CPU)"
    if capped or sinks:
        return f"Triton, for its {reason}"
    if flash_4.has_heads(channels):
        return f"FlashAttention-4 {flash_4.VERSION}, Triton for documents"
    return "cuDNN (PyTorch SDPA), Triton for documents"
