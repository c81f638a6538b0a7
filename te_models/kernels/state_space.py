"""The state space of Mamba 2 (Dao and Gu 2024, arXiv 2405.21060): a matrix per head that decays as a whole.

    S <- exp(dt a) S + dt x b^T,    y = S c + d x

S [P, N] FP32 is the state. Shapes, and as in te_models.config.mamba2: x [B, S, H, P], the time steps dt FP32 [B, S, H],
which are 0 at padding, the negative rates a FP32 [H], b, c [B, S, G, N], d [H]; H/G consecutive heads share b and c.

The plain version runs everywhere, in FP32, and stores only its inputs for backward. On a GPU the Triton kernels of
mamba-ssm run instead, or of flash-linear-attention, whichever is installed.
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

from te_models.config.mamba2 import CHUNK
from te_models.device.allocations import on_gpu
from te_models.device.autograd import Context
from te_models.device.operations import count_flops
from te_models.kernels.chunks import chunked_decays
from te_models.kernels.delta_rule import FORGET
from te_models.kernels.from_inputs import from_inputs

log = logging.getLogger(__name__)

WIDEST = 256  # numbers of state per channel that the kernels compute
KERNEL_CHUNK = 256  # tokens that mamba-ssm's kernels compute at once
HINT = (
    "Mamba 2 runs in plain PyTorch: pip install 'te-models[hybrid]' for flash-linear-attention, or mamba-ssm, whose "
    "kernels are many times faster on a GPU"
)


def state_space(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs y [B, S, H, P] in the dtype of x, and the state after the last token.

    Args:
        x, dt, a, b, c, d: see above.
        state: before the first token, FP32 [B, H, P, N]; None: zeros, and no state is returned.
        documents: int [B, S]; the state is zero wherever a token and the one before it are of different documents.
    """
    kernels = _kernels(x, b)
    if kernels is not None:
        return kernels(x, dt, a, b, c, d, state, documents)
    if x.is_meta and on_gpu(x) and x.dtype.itemsize == 2:
        count_flops(x, scan_flops(x, b))
        return _KernelsWithoutData.apply(x, dt, a, b, c, d), None
    if state is None:
        return _outputs(x, dt, a, b, c, d, documents), None
    if x.shape[1] == 1:
        return recurrent(x, dt, a, b, c, d, state)
    return chunked(x, dt, a, b, c, d, state, documents)


def scan_flops(x: Tensor, b: Tensor) -> float:
    """Return the operations of the state space in chunks, of x [B, S, H, P] and b [B, S, G, N].

    Per token a chunk of C tokens has the products c b^T of each group, their product with the inputs of each head, and
    the input to and the output from the state: C (G N + H P) / 2 + 2 H P N multiplications.
    """
    chunk = min(CHUNK, x.shape[1])
    # H P
    inner = x.shape[2] * x.shape[3]
    scan = chunk * (b.shape[2] * b.shape[3] + inner) / 2 + 2 * inner * b.shape[3]
    return 2.0 * x.shape[:2].numel() * scan


class _KernelsWithoutData(torch.autograd.Function):
    """The memory of the kernels for whole rows, on meta: they save their inputs.

    Backward makes the states [P, N] before all chunks, and their gradients, in FP32.
    """

    @staticmethod
    def forward(ctx: Context, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors  # read once, since a recompute gives each only once
        x, _, _, b, *_ = inputs
        chunks = -(-x.shape[1] // KERNEL_CHUNK)
        shape = (x.shape[0], chunks, *x.shape[2:], b.shape[3])
        # Alive together with the gradients, which decides the peak.
        states = [x.new_empty(shape, dtype=torch.float32) for _ in "12"]
        gradients = tuple(torch.empty_like(value) for value in inputs)
        del states
        return gradients


@from_inputs
def _outputs(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, documents: Tensor | None
) -> Tensor:
    """Return the outputs of whole rows."""
    out, _ = chunked(x, dt, a, b, c, d, documents=documents)
    return out


def recurrent(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `state_space` token by token."""
    heads = x.shape[2]
    inputs = x.float() * dt[..., None]  # [B, S, H, P]
    b, c = (_per_head(t, heads) for t in (b, c))  # [B, S, H, N]
    if state is None:
        state = inputs.new_zeros(x.shape[0], heads, x.shape[3], b.shape[3])
    outputs = []
    for step in range(x.shape[1]):
        # [B, H, P, N]: the whole matrix of a head decays by one number.
        state = state * (dt[:, step] * a).exp()[..., None, None]
        state = state + inputs[:, step, :, :, None] * b[:, step, :, None, :]
        outputs.append((state * c[:, step, :, None, :]).sum(-1))
    return _with_skip(torch.stack(outputs, dim=1), x, d), state


def chunked(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor | None = None,
    documents: Tensor | None = None,
    size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute `state_space` in chunks of `size` tokens: attention without softmax inside, a state between them."""
    batch, seq, heads, width = x.shape
    size = min(size, seq)
    count = -(-seq // size)
    padding = count * size - seq

    def in_chunks(values: Tensor) -> Tensor:
        """Return values [B, S, H, n] as [B, H, chunks, C, n], with zeros behind the last token."""
        return F.pad(values.transpose(1, 2), (0, 0, 0, padding)).unflatten(2, (count, size))

    # [B, H, chunks, C, P]
    inputs = in_chunks(x.float() * dt[..., None])
    b, c = (in_chunks(_per_head(t, heads)) for t in (b, c))
    # log of the decay of each token, [B, H, chunks, C]; 0 at the tokens that fill the last chunk.
    g = F.pad((dt * a).transpose(1, 2), (0, padding)).unflatten(2, (count, size))
    decays = chunked_decays(g, documents, padding)
    # The products of queries c and keys b within a chunk, with the decay between the two tokens.
    scores = c @ b.mT * decays.between  # [B, H, chunks, C, C]
    within = scores @ inputs  # [B, H, chunks, C, P]
    c = c * decays.since[..., None]
    # The contribution of a chunk to the state at its end.
    written = inputs.mT @ (b * decays.until[..., None])  # [B, H, chunks, P, N]
    if state is None:
        state = inputs.new_zeros(batch, heads, width, b.shape[-1])
    outputs = []
    # unbind, since backward of an index would write all chunks once per chunk.
    passed = decays.passed[..., None, None]
    for read, inside, new, left in zip(
        c.unbind(2), within.unbind(2), written.unbind(2), passed.unbind(2), strict=True
    ):
        # From tokens of the chunk, and from the state before it [B, H, P, N].
        outputs.append(inside + read @ state.mT)
        state = state * left + new
    out = torch.cat(outputs, dim=2)[:, :, :seq].transpose(1, 2)  # [B, S, H, P]
    return _with_skip(out, x, d), state


def _per_head(values: Tensor, heads: int) -> Tensor:
    """Return values [B, S, G, N] repeated for each head, FP32 [B, S, H, N]."""
    return values.float().repeat_interleave(heads // values.shape[2], dim=2)


def _with_skip(out: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """Return out + d x in the dtype of x."""
    return (out + d.float()[:, None] * x.float()).to(x.dtype)


Scan = Callable[..., tuple[Tensor, Tensor | None]]


def _kernels(x: Tensor, b: Tensor) -> Scan | None:
    """Return the kernels that compute these tensors: on a GPU, in 16 bits, where a package has them."""
    if x.device.type != "cuda" or x.dtype.itemsize != 2 or b.shape[3] > WIDEST:
        return None
    _, scan = packaged()
    return scan


@functools.cache
def packaged() -> tuple[str, Scan | None]:
    """Return the distribution that has kernels, and `state_space` by them; ("", None), and one line, without any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what else the packages could use
        try:
            from mamba_ssm.ops.triton.ssd_combined import (  # noqa: PLC0415  an optional package
                mamba_chunk_scan_combined,
            )

            return "mamba-ssm", functools.partial(by_mamba, mamba_chunk_scan_combined)
        except ImportError:
            pass
        try:
            from fla.ops.simple_gla import (  # noqa: PLC0415  an optional package
                chunk_simple_gla,
                fused_recurrent_simple_gla,
            )

            from te_models.kernels import delta_rule_triton  # noqa: PLC0415  needs Triton

            # Of the package's kernels one refuses to run on Hopper with some versions of Triton.
            delta_rule_triton.register()
            return "fla-core", functools.partial(
                by_linear_attention, chunk_simple_gla, fused_recurrent_simple_gla
            )
        except ImportError:
            log.warning(HINT)
            return "", None


def state_space_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the kernels of the state space in a training step on this device, in a few words."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return "plain PyTorch"
    package, scan = packaged()
    if scan is None:
        return "plain PyTorch, many times slower: te-models[hybrid] is missing"
    names = {"fla-core": "flash-linear-attention"}
    version = importlib.metadata.version(package)
    return f"{names.get(package, package)} {version}, whose kernels are compiled in the first step"


def by_mamba(
    scan: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `state_space` by mamba-ssm's `mamba_chunk_scan_combined`, whose state has the layout of ours."""
    # A chunk of one token would cost as much as a whole one.
    if x.shape[1] == 1 and state is not None:
        return recurrent(x, dt, a, b, c, d, state)
    out = scan(
        x,
        dt,
        a,
        b,
        c,
        chunk_size=KERNEL_CHUNK,
        D=d.float(),
        initial_states=state,
        seq_idx=None if documents is None else documents.to(torch.int32).contiguous(),
        return_final_states=state is not None,
    )
    return out if state is not None else (out, None)


def by_linear_attention(
    scan: Callable[..., Any],
    step: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `state_space` by flash-linear-attention's simple GLA, attention that decays by one number per head.

    Queries are c, keys b, both repeated for each head, and values dt x; its state is the transpose of ours. Documents
    end by a decay that leaves nothing, not by their cumulative lengths: those have to be read by the host, and differ
    in number from batch to batch, which no CUDA graph can follow.
    """
    heads = x.shape[2]
    g = dt * a  # [B, S, H]
    if documents is not None:
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=False)
        g = g.masked_fill(begins[..., None], FORGET)
    q, k = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (c, b))  # [B, S, H, N]
    # The discretized input: simple GLA has no time step of its own.
    v = (x.float() * dt[..., None]).to(x.dtype)
    function = step if x.shape[1] == 1 and not torch.is_grad_enabled() else scan
    # [B, H, N, P] there.
    before = None if state is None else state.mT.contiguous()
    out, after = function(
        q, k, v, g=g, scale=1.0, initial_state=before, output_final_state=state is not None
    )
    return _with_skip(out, x, d), None if after is None else after.mT
