"""The products of rows with the matrix of their expert, in high precision: one launch on a GPU, one product per expert
elsewhere. Adapters use them; experts themselves are te.GroupedLinear."""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.device.allocations import on_gpu
from te_models.device.autograd import Context
from te_models.kernels.groups import Groups

BYTES = 16  # the rows of a matrix must be a multiple of this for the product in one launch
RANKS = 8  # a multiple of this is the rank of a product in one launch


class _Product(torch.autograd.Function):
    """Saves x whole, not its parts, so that te_models.kernels.early_save may recompute it instead."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weights: Tensor, rows: list[int] | Groups) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(x, weights)
        return _by_expert(x, weights.transpose(1, 2), rows)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        x, weights = ctx.saved_tensors
        dx = _by_expert(dy, weights, ctx.rows) if ctx.needs_input_grad[0] else None
        return dx, _sums(dy, x, ctx.rows), None


def grouped_product(x: Tensor, weights: Tensor, rows: list[int] | Groups) -> Tensor:
    """Return each row of x [R, I] times the weight of its expert, of `weights` [E, O, I]: [R, O].

    The first rows[0] rows belong to expert 0, and so on; of rows that belong to no expert, nothing is known. An expert
    without rows gets zeros as its gradient.
    """
    return _Product.apply(x, weights, rows)


def low_rank_product(
    x: Tensor, a: Tensor, b: Tensor, scaling: float, rows: list[int] | Groups
) -> Tensor:
    """Return scaling * B(A(x)) of x [R, I] with the A and B of each row's expert, `a` [E, r, I] and `b` [E, O, r]."""
    if extra := -a.shape[1] % RANKS * on_gpu(x):
        a = F.pad(a, (0, 0, 0, extra))
        b = F.pad(b, (0, extra))
    return grouped_product(grouped_product(x, a, rows) * scaling, b.contiguous(), rows)


def _by_expert(x: Tensor, matrices: Tensor, rows: list[int] | Groups) -> Tensor:
    """Return the product of x [R, A] with the matrices [E, A, B], [R, B]."""
    if x.is_meta:
        return x.new_empty(len(x), matrices.shape[2])
    if isinstance(rows, Groups) or _in_one_launch(x, matrices.shape[2]):
        return F.grouped_mm(x, matrices, offs=_ends(rows, x.device))
    return torch.cat([part @ matrix for part, matrix in zip(x.split(rows), matrices, strict=True)])


def _sums(dy: Tensor, x: Tensor, rows: list[int] | Groups) -> Tensor:
    """Return for each expert the sum of the outer products of its rows of dy [R, O] and x [R, I]: [E, O, I]."""
    if x.is_meta:
        experts = rows.experts if isinstance(rows, Groups) else len(rows)
        return x.new_empty(experts, dy.shape[1], x.shape[1])
    if isinstance(rows, list) and not _in_one_launch(x, dy.shape[1]):
        return torch.stack([a.t() @ b for a, b in zip(dy.split(rows), x.split(rows), strict=True)])
    ends = _ends(rows, x.device)
    sums = F.grouped_mm(dy.t(), x, offs=ends)
    # A sum over no rows need not have been written.
    idle = ends.diff(prepend=ends.new_zeros(1)) == 0
    return sums.masked_fill_(idle[:, None, None], 0)


def _in_one_launch(x: Tensor, width: int) -> bool:
    """Return whether the products of x [R, I] with matrices of `width` columns or rows can be one launch."""
    wide = all(size * x.element_size() % BYTES == 0 for size in (x.shape[1], width))
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0 and wide


def _ends(rows: list[int] | Groups, device: torch.device) -> Tensor:
    groups = rows if isinstance(rows, Groups) else Groups.of(rows, device)
    return groups.first[1:].to(torch.int32)
