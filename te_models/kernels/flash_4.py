"""FlashAttention-4 (the package flash-attn-4), whose kernels run on Hopper where it is installed.

They compute causal attention and sliding windows, in the place of cuDNN's and of our own in spans. Documents stay with
the spans: the package wants their number on the host, and it differs from batch to batch.

The package is a beta, and what is called here are its inner functions, one pass each. So one version is taken, the one
that benchmarks/attention_kernels.py measured, with the head dimensions for which its gradients were right.
TE_MODELS_FLASH_ATTENTION_4=0 turns it off.
"""

import functools
import importlib.metadata
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_models.errors import EngineError
from te_models.files.atomic import first_line

log = logging.getLogger(__name__)

HOPPER = (9, 0)  # compute capability; on others it was not measured
VERSION = "4.0.0b36"
# On Hopper backward pads channels to a multiple of 16, and converts the gradient of q as if to a multiple of 32.
CHANNELS = (32, 64, 96, 128, 160, 192, 256)
SHORTEST = 128  # queries per row, as for cuDNN: shorter rows were not measured


@functools.cache
def _functions() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the package's functions of forward and backward; None where it is not installed, turned off or unfit."""
    choice = os.environ.get("TE_MODELS_FLASH_ATTENTION_4")
    if choice == "0" or not torch.cuda.is_available():
        return None
    try:
        return _loaded()
    except importlib.metadata.PackageNotFoundError:
        reason = f"install flash-attn-4[cu13]=={VERSION}"
        level = logging.WARNING if choice == "1" else logging.DEBUG
    except EngineError as error:
        reason = str(error)
        level = logging.WARNING if choice == "1" else logging.INFO
    except Exception as error:  # of any kind: versions of its packages that do not fit
        reason = first_line(error)
        level = logging.WARNING
    log.log(level, "FlashAttention-4 does not run, cuDNN's attention does: %s", reason)
    return None


def _loaded() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Import the package's functions.

    Raises:
        EngineError: another GPU or version than the ones that were measured.
        PackageNotFoundError: it is not installed.
    """
    version = importlib.metadata.version("flash-attn-4")
    if torch.cuda.get_device_capability() != HOPPER:
        raise EngineError("it was measured on an H200 alone")
    if version != VERSION:
        raise EngineError(f"flash-attn-4 {version} was not measured: install {VERSION}")
    with _quiet():
        from flash_attn.cute.interface import (  # noqa: PLC0415  an optional package
            _flash_attn_bwd,
            _flash_attn_fwd,
        )
    return _flash_attn_fwd, _flash_attn_bwd


def keep_compiled() -> None:
    """Have the package keep what it compiles, so that a second process need not compile it again.

    The package reads these variables when it is imported, and importing Transformer Engine imports it too: so
    te_models.engine calls this before either. The package's own folder is in /tmp, where others could put files that it
    would load. Where the user has no folder that can be written nothing is kept: the package could not be imported.
    """
    try:
        importlib.metadata.version("flash-attn-4")
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "flash_attention_4"
        folder.mkdir(parents=True, exist_ok=True)
    except (importlib.metadata.PackageNotFoundError, OSError, RuntimeError):
        return
    if os.access(folder, os.W_OK):
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore its compiler's warnings, which are no errors even where warnings are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def has_heads(channels: int) -> bool:
    """Return whether FlashAttention-4 runs here for heads of this many channels."""
    return channels in CHANNELS and _functions() is not None


def suits(q: Tensor) -> bool:
    """Return whether it computes the attention of q [B, N, S, H], whose keys and values are as many and as wide.

    Its backward adds parts of a gradient in an order that varies from run to run. torch.compile cannot trace it.
    """
    if (
        torch.compiler.is_compiling()
        or not q.is_cuda
        or q.dtype.itemsize != 2
        or q.shape[2] < SHORTEST
    ):
        return False
    return not torch.are_deterministic_algorithms_enabled() and has_heads(q.shape[3])


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention's output [B, N, S, H], and the logarithms of its sums FP32 [B, N, S].

    q [B, N, S, H]; k, v [B, K, S, H], N a multiple of K, with contiguous channels and any other strides. Query i sees
    the keys up to i, with `window` the last ones of them, its own included. `scale` is the factor on the products of q
    and k; None: H ** -0.5.
    """
    functions = _functions()
    assert functions is not None
    tokens = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, heads, H]
    run_forward, _ = functions
    with _quiet():
        out, log_sum, *_ = run_forward(*tokens, return_lse=True, **_mask(q, scale, window))
    return out.transpose(1, 2), log_sum


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, for `dy`, the gradient of `out`; the rest as in and from `forward`."""
    functions = _functions()
    assert functions is not None
    q_rows, k_rows, v_rows, out_rows, dy_rows = (x.transpose(1, 2) for x in (q, k, v, out, dy))
    _, run_backward = functions
    with _quiet():
        dq, dk, dv, *_ = run_backward(
            q_rows, k_rows, v_rows, out_rows, dy_rows, log_sum, **_mask(q, scale, window)
        )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _mask(q: Tensor, scale: float | None, window: int | None) -> dict[str, Any]:
    """Return the arguments for the scale and the mask."""
    factor = q.shape[3] ** -0.5 if scale is None else scale
    if window is None:
        return dict(softmax_scale=factor, causal=True)
    return dict(
        softmax_scale=factor, causal=False, window_size_left=window - 1, window_size_right=0
    )
