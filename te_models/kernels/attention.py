"""Causal attention through PyTorch's scaled_dot_product_attention, with cuDNN's kernel first where there is a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN is 1.65x FlashAttention-2 forward and backward on an H200 at head_dim 128, S 2048 (350 against 212 TFLOP/s).
CUDA_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention in which query i of the last S positions sees keys 0..P+i, P = keys - S, or those of `mask` alone.

    q [B, N, S, H]; k, v [B, K, P+S, H] with N a multiple of K; mask as from `attention_mask`; returns [B, N, S, H].
    """
    if mask is None and 1 < q.shape[-2] < k.shape[-2]:
        mask = attention_mask(q.shape[-2], k.shape[-2], None, None, q.device)
    options: dict[str, Any] = dict(
        attn_mask=mask, is_causal=mask is None and q.shape[-2] > 1, enable_gqa=q.shape[1] != k.shape[1]
    )
    if not q.is_cuda:  # most processors have no BF16 instructions: FP32 is five times faster there, and no less exact
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).to(q.dtype)
    with sdpa_kernel(CUDA_ORDER, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, **options)


def attention_mask(
    queries: int,
    keys: int,
    window: int | None,
    real: Tensor | None,
    device: torch.device,
    documents: Tensor | None = None,
) -> Tensor | None:
    """Which keys each of the newest `queries` positions sees, bool [(B, 1,) queries, keys]; None for plain causal.

    `window` counts the position itself; `real` bool [B, keys] is False at padding, which nothing sees but itself, so
    that no row is empty; `documents` int [B, keys], with queries == keys, lets each position see its own document alone.
    """
    if real is None and documents is None and (window is None or window >= keys) and queries in (1, keys):
        return None
    position = torch.arange(keys, device=device)
    distance = position[keys - queries :, None] - position
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return mask if real is None else (mask & real[:, None, None, :]) | (distance == 0)


def attention_kernel(device: torch.device) -> str:
    """The name of the kernel that runs first on this device, for the summary before training."""
    return "cuDNN (PyTorch SDPA)" if device.type == "cuda" else "PyTorch SDPA (CPU)"
