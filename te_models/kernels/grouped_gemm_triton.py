"""The matrix products of all experts in one launch each, in BF16 or FP8.

The experts' numbers of rows are read on the device, so that the host waits for nothing and a step can be one CUDA
graph. Shapes: E experts, R rows of all experts (te_models/kernels/groups.py); of a result's rows, those that belong to
no expert are left as they are. Sums are FP32, in ascending order: the bits are cuBLAS' for the shapes of models. On
Hopper FP8 goes to hopper_products_triton.py, which has the same bits.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from te_models.kernels.grouped_gemm_kernels_triton import (
    rows_by_tma_kernel,
    rows_kernel,
    weights_kernel,
)
from te_models.kernels.groups import LINE, Groups
from te_models.kernels.hopper_products_triton import hopper_rows_times, hopper_weights_from


class ExpertMatrices(NamedTuple):
    """A matrix per expert, BF16, or FP8 with its factors from data to values, FP32 [E].

    `data` holds them one below the other; with `places`, int64 [E], it is one of them, and matrix e begins places[e]
    elements behind it, a multiple of 8.
    """

    data: Tensor
    scale_inv: Tensor | None = None
    places: Tensor | None = None


class Tiles(NamedTuple):
    """The tile of a product, and how its kernel is compiled.

    Attributes:
        height, width: rows and columns of the result that a program computes.
        depth: terms of the sum that are read at a time.
        stages: copies to shared memory on their way.
        warps: of a program.
        tma: whether the copy engine of Hopper reads whole tiles of rows and matrices (TMA), where they allow it.
    """

    height: int
    width: int
    depth: int
    stages: int
    warps: int = 8
    tma: bool = True


BF16 = Tiles(128, 256, 64, 3)
FP8 = Tiles(128, 256, 128, 3)
# Two programs per multiprocessor: one adds while the other multiplies.
PRECISE = Tiles(128, 128, 128, 3, 4)
# With the copy engine there is room for one more, where rows begin at whole lines (benchmarks/expert_products.py).
MORE_STAGES = 1
# Rows of tiles whose programs follow each other, so that they share what the L2 cache holds.
GROUP_M = 8


def rows_times(
    a: ExpertMatrices,
    b: ExpertMatrices,
    groups: Groups,
    width: int,
    bias: Tensor | None = None,
    *,
    down: bool,
    precise: bool,
    dtype: torch.dtype,
    source: Tensor | None = None,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return each expert's rows of a [R, D] times its matrix of b, plus its row of `bias` [E, width]: [R, width].

    The sum is rounded to `dtype` once.

    Args:
        down: whether the matrix is [D, width], which FP8 does not allow; otherwise [width, D], transposed.
        precise: FP8 sums leave the tensor cores, which keep fewer bits, every 128 terms.
        source: int64 [R], the row of a [T, D] of each row; zeros for T.
        tiles: the tile; None: the one for this product.
        out: where the rows of these experts are written, [R, width] in `dtype`; None: memory of its own.
    """
    depth = a.data.shape[1]
    count = groups.experts
    if out is None:
        out = torch.empty(groups.most, width, dtype=dtype, device=a.data.device)
    if tiles is None and source is None and _on_hopper(a, b):
        assert a.scale_inv is not None and b.scale_inv is not None
        hopper_rows_times(
            a.data,
            b.data,
            groups,
            bias,
            out,
            a_scale=a.scale_inv,
            b_scale=b.scale_inv,
            precise=precise,
        )
        return out
    tiles = tiles or _tiles_of_rows(a, width, precise)
    grid = (groups.most_tiles(tiles.height) * triton.cdiv(width, tiles.width),)
    shared_arguments: dict[str, Any] = dict(
        first=groups.first,
        tiles=groups.tiles(tiles.height),
        a_scale=a.scale_inv,
        b_scale=b.scale_inv,
        bias=bias,
        out=out,
        width=width,
        depth=depth,
        count=count,
        DOWN=down,
        EXPERTS=triton.next_power_of_2(count),
        **_options(tiles, a, precise),
    )
    # Each tile of b has to be of one expert, and the rows of both operands where the copy engine expects them.
    one_expert = not down or depth % tiles.depth == 0
    in_place = source is None and b.places is None
    with torch.cuda.device_of(out):
        if tiles.tma and one_expert and in_place and by_tma(a.data, b.data):
            if down:
                described_b = _described(
                    b.data, count * depth, width, block=[tiles.depth, tiles.width]
                )
            else:
                described_b = _described(
                    b.data, count * width, depth, block=[tiles.width, tiles.depth]
                )
            rows_by_tma_kernel[grid](
                a=_described(a.data, len(a.data), depth, block=[tiles.height, tiles.depth]),
                b=described_b,
                **shared_arguments,
            )
        else:
            rows_kernel[grid](
                a=a.data,
                b=b.data,
                places=b.places,
                source=source,
                tokens=len(a.data),
                EVEN=depth % tiles.depth == 0,
                **shared_arguments,
            )
    return out


def weights_from(
    a: ExpertMatrices,
    b: ExpertMatrices,
    groups: Groups,
    height: int,
    width: int,
    *,
    precise: bool,
    dtype: torch.dtype,
    source: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return each expert's rows of a [R, height], transposed, times its rows of b [R, width]: [E, height, width].

    In FP8 `data` holds the transposed matrices (FP8Matrices.transposed). With `source`, int64 [R], b is [T, width], and
    row r of it is row source[r], zeros for T.
    """
    out = torch.empty(groups.experts, height, width, dtype=dtype, device=a.data.device)
    if tiles is None and _on_hopper(a, b):
        assert a.scale_inv is not None and b.scale_inv is not None
        hopper_weights_from(
            a.data,
            b.data,
            groups,
            out,
            a_scale=a.scale_inv,
            b_scale=b.scale_inv,
            precise=precise,
        )
        return out
    tiles = tiles or _tiles(a, precise)
    grid = (groups.experts * triton.cdiv(height, tiles.height) * triton.cdiv(width, tiles.width),)
    # FP8 operands are transposed copies, in which experts begin at other places than in rows.
    aligned_first = None
    pitch = 0
    if a.scale_inv is not None:
        aligned_first = groups.aligned.first
        pitch = groups.aligned.most
    with torch.cuda.device_of(out):
        weights_kernel[grid](
            a=a.data,
            b=b.data,
            source=source,
            tokens=len(b.data),
            first=groups.first,
            aligned_first=aligned_first,
            pitch=pitch,
            a_scale=a.scale_inv,
            b_scale=b.scale_inv,
            out=out,
            height=height,
            width=width,
            **_options(tiles, a, precise),
        )
    return out


def by_tma(*operands: Tensor) -> bool:
    """Return whether the copy engine can read tiles of these matrices: on Hopper, with rows of 16 bytes."""
    return all(
        (not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] == 9)
        and x.data_ptr() % 16 == 0
        and x.shape[-1] * x.element_size() % 16 == 0
        and x.numel() > 0
        for x in operands
    )


def _on_hopper(a: ExpertMatrices, b: ExpertMatrices) -> bool:
    """Return whether kernels in Gluon can multiply these matrices: FP8, one below the other, on Hopper."""
    if a.scale_inv is None or b.scale_inv is None or b.places is not None:
        return False
    return a.data.is_cuda and by_tma(a.data, b.data)


def _described(data: Tensor, rows: int, columns: int, block: list[int]) -> TensorDescriptor:
    """Return the copy engine's description of a matrix [rows, columns] that begins with `data`."""
    return TensorDescriptor(data, [rows, columns], [columns, 1], block)


def _tiles(a: ExpertMatrices, precise: bool) -> Tiles:
    """Return the tile of a product with `a`."""
    if a.scale_inv is None:
        return BF16
    return PRECISE if precise else FP8


def _tiles_of_rows(a: ExpertMatrices, width: int, precise: bool) -> Tiles:
    """Return the tile of `rows_times`.

    The copy engine is slower than pointers where rows of a tile do not begin at whole lines of memory, or where the
    last tile of a row is half empty; not with tiles of `PRECISE`, which wait for additions.
    """
    tiles = _tiles(a, precise)
    if a.scale_inv is not None and precise:
        return tiles
    lines = a.data.shape[1] * a.data.element_size() % LINE == 0
    if lines and width % tiles.width == 0:
        return tiles._replace(stages=tiles.stages + MORE_STAGES)
    return tiles._replace(tma=False)


def _options(tiles: Tiles, a: ExpertMatrices, precise: bool) -> dict[str, Any]:
    """Return the sizes that a kernel is compiled for, and the compiler's options."""
    return dict(
        BLOCK_M=tiles.height,
        BLOCK_N=tiles.width,
        BLOCK_K=tiles.depth,
        GROUP_M=GROUP_M,
        num_stages=tiles.stages,
        num_warps=tiles.warps,
        PRECISE=precise and a.scale_inv is not None,
        enable_fp_fusion=False,  # cuBLAS rounds the scaled sum before it adds the bias
    )
