"""The kernels of grouped_gemm_triton.py: products of each expert's rows, and gradients of each expert's weights.

A program computes a tile of BLOCK_M x BLOCK_N of the result, and reads BLOCK_K terms of its sum at a time. Programs go
down GROUP_M rows of tiles before they go right, so that they share what the L2 cache holds.
"""

import triton
import triton.language as tl


@triton.jit
def place_of_tile(t, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row and the column of tile t, of `tiles_m` x `tiles_n` tiles, in bands of GROUP_M rows."""
    before = t // (GROUP_M * tiles_n) * GROUP_M
    size = tl.maximum(tl.minimum(tiles_m - before, GROUP_M), 1)
    t = t % (GROUP_M * tiles_n)
    return before + t % size, t // size


@triton.jit
def own_tile(
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # columns of the result, and E
    width,
    count,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Return this program's expert, its first row and number of rows, and the row and column of the tile.

    A program behind the last tile gets expert `count`.
    """
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(width, BLOCK_N)
    number = tl.arange(0, EXPERTS)
    ends = tl.load(tiles + number, number < count, 2**40) * tiles_n
    e = tl.sum((ends <= tile).to(tl.int32), 0)
    readable = tl.minimum(
        e, count - 1
    )  # an expert whose rows a program behind the last tile can read
    begin = tl.load(first + readable)
    rows = (tl.load(first + readable + 1) - begin).to(tl.int32)
    before = tl.load(tiles + tl.maximum(e - 1, 0), e > 0, 0).to(tl.int32)
    m, n = place_of_tile(tile - before * tiles_n, tl.cdiv(rows, BLOCK_M), tiles_n, GROUP_M)
    return e, begin, rows, m, n


@triton.jit
def store_rows(
    # the sum, FP32 [BLOCK_M, BLOCK_N]
    total,
    # inverse scales FP32 [E], or None in BF16
    a_scale,
    b_scale,
    # [E, width] or None
    bias,
    # [R, width]
    out,
    # the tile: expert, its first row and number of rows, tile row and tile column
    e,
    begin,
    rows,
    m,
    n,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store a tile of a product, by both scales and plus the bias where there are any."""
    i = m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = n * BLOCK_N + tl.arange(0, BLOCK_N)
    if a_scale is not None:
        total *= tl.load(a_scale + e) * tl.load(b_scale + e)
    if bias is not None:
        total += tl.load(bias + e * width + j, j < width, 0.0).to(tl.float32)[None, :]
    y = out + begin * width + i.to(tl.int64)[:, None] * width + j[None, :]
    tl.store(y, total.to(out.dtype.element_ty), (i < rows)[:, None] & (j < width)[None, :])


@triton.jit
def rows_kernel(
    # rows of all experts [R, depth], or tokens, of which `source` names one for each row
    a,
    b,
    # elements from the first matrix to each, or None where they lie below each other
    places,
    source,
    # number of tokens: whoever points behind them reads zeros
    tokens,
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # inverse scales FP32 [E], or None in BF16
    a_scale,
    b_scale,
    # [E, width] or None, and the result [R, width]
    bias,
    out,
    # outputs, length of the sum, and E
    width,
    depth,
    count,
    # matrices are [depth, width] rather than [width, depth]; depth is whole tiles; FP32 sums
    DOWN: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISE: tl.constexpr,
    EXPERTS: tl.constexpr,
    # the tile: rows, columns, and how much of the sum is read at a time
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Write a tile of one expert's rows times its matrix; see grouped_gemm_triton.rows_times."""
    e, begin, rows, m, n = own_tile(first, tiles, width, count, EXPERTS, BLOCK_M, BLOCK_N, GROUP_M)
    if e >= count:
        return
    k = tl.arange(0, BLOCK_K)
    row = (m * BLOCK_M + tl.arange(0, BLOCK_M)) % rows
    column = (n * BLOCK_N + tl.arange(0, BLOCK_N)) % width
    if source is None:
        x = a + begin * depth + row.to(tl.int64)[:, None] * depth + k[None, :]
    else:
        token = tl.load(source + begin + row)
        is_token = (token < tokens)[:, None]
        x = a + tl.where(token < tokens, token, 0)[:, None] * depth + k[None, :]
    if places is None:
        matrix = b + e.to(tl.int64) * width * depth
    else:
        matrix = b + tl.multiple_of(tl.load(places + e), 8)
    if DOWN:  # the sum runs down the matrix [depth, width]
        w = matrix + k.to(tl.int64)[:, None] * width + column[None, :]
        step = BLOCK_K * width
    else:
        w = matrix + column.to(tl.int64)[None, :] * depth + k[:, None]
        step = BLOCK_K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            if source is None:
                left = tl.load(x)
            else:
                left = tl.load(x, is_token, 0.0)
            right = tl.load(w)
        else:
            inside = k[None, :] < depth - start
            if source is not None:
                inside = inside & is_token
            left = tl.load(x, inside, 0.0)
            right = tl.load(w, k[:, None] < depth - start, 0.0)
        total = tl.dot(left, right, total, max_num_imprecise_acc=BLOCK_K if PRECISE else None)
        x += BLOCK_K
        w += step
    store_rows(total, a_scale, b_scale, bias, out, e, begin, rows, m, n, width, BLOCK_M, BLOCK_N)


@triton.jit
def rows_by_tma_kernel(
    a,
    b,
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # inverse scales FP32 [E], or None in BF16
    a_scale,
    b_scale,
    # [E, width] or None, and the result [R, width]
    bias,
    out,
    # outputs, length of the sum, and E
    width,
    depth,
    count,
    DOWN: tl.constexpr,
    PRECISE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Multiply as `rows_kernel` does; a and b describe the rows of all experts, and their matrices below each other.

    A tile may contain rows of the next expert, which are not stored, and zeros behind the last column.
    """
    e, begin, rows, m, n = own_tile(first, tiles, width, count, EXPERTS, BLOCK_M, BLOCK_N, GROUP_M)
    if e >= count:
        return
    row = begin.to(tl.int32) + m * BLOCK_M
    column = n * BLOCK_N
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        left = a.load([row, start])
        if DOWN:
            right = b.load([e * depth + start, column])
        else:
            right = b.load([e * width + column, start]).T
        total = tl.dot(left, right, total, max_num_imprecise_acc=BLOCK_K if PRECISE else None)
    store_rows(total, a_scale, b_scale, bias, out, e, begin, rows, m, n, width, BLOCK_M, BLOCK_N)


@triton.jit
def _store_weights(
    total,
    a_scale,
    b_scale,
    out,
    e,
    m,
    n,
    height,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store a tile of expert e's gradient [height, width], by both scales where there are any."""
    i = m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = n * BLOCK_N + tl.arange(0, BLOCK_N)
    if a_scale is not None:
        total *= tl.load(a_scale + e) * tl.load(b_scale + e)
    z = out + (e.to(tl.int64) * height + i[:, None]) * width + j[None, :]
    tl.store(z, total.to(out.dtype.element_ty), (i < height)[:, None] & (j < width)[None, :])


@triton.jit
def weights_kernel(
    # gradient of the outputs and inputs of all experts: rows in 16 bits, or transposed copies in FP8
    a,
    b,
    # tokens of the inputs for each row, or None, and how many there are
    source,
    tokens,
    # where each expert begins, in rows and in the transposed copies, whose rows are `pitch` long
    first,
    aligned_first,
    pitch,
    # inverse scales FP32 [E], or None in BF16
    a_scale,
    b_scale,
    # gradient of the weights [E, height, width]
    out,
    height,
    width,
    PRECISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Write a tile of the gradient of one expert's weight, a sum over its rows (grouped_gemm_triton.weights_from)."""
    tiles_m = tl.cdiv(height, BLOCK_M)
    tiles_n = tl.cdiv(width, BLOCK_N)
    e = tl.program_id(0) // (tiles_m * tiles_n)
    m, n = place_of_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    begin = tl.load(first + e)
    rows = (tl.load(first + e + 1) - begin).to(tl.int32)
    k = tl.arange(0, BLOCK_K)
    row = (m * BLOCK_M + tl.arange(0, BLOCK_M)) % height
    column = (n * BLOCK_N + tl.arange(0, BLOCK_N)) % width
    if aligned_first is not None:  # FP8 matrices [height, pitch] and [width, pitch]
        rows = tl.cdiv(rows, BLOCK_K) * BLOCK_K  # zeros follow the last
        aligned_begin = tl.multiple_of(tl.load(aligned_first + e), 128)
        x = a + aligned_begin + row.to(tl.int64)[:, None] * pitch + k[None, :]
        y = b + aligned_begin + column.to(tl.int64)[None, :] * pitch + k[:, None]
        x_step = BLOCK_K
        y_step = BLOCK_K
    else:
        x = a + begin * height + k.to(tl.int64)[None, :] * height + row[:, None]
        y = b + column[None, :]
        if source is None:
            y += begin * width + k.to(tl.int64)[:, None] * width
        x_step = BLOCK_K * height
        y_step = BLOCK_K * width
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    whole = rows // BLOCK_K * BLOCK_K  # rows that fill steps of BLOCK_K; the others need a mask
    for start in range(0, whole, BLOCK_K):
        if source is None:
            right = tl.load(y)
            y += y_step
        else:
            token = tl.load(source + begin + start + k)
            right = tl.load(y + token[:, None] * width, (token < tokens)[:, None], 0.0)
        total = tl.dot(tl.load(x), right, total, max_num_imprecise_acc=BLOCK_K if PRECISE else None)
        x += x_step
    if whole < rows:
        left = tl.load(x, k[None, :] < rows - whole, 0.0)
        if source is None:
            right = tl.load(y, k[:, None] < rows - whole, 0.0)
        else:
            token = tl.load(source + begin + whole + k, k < rows - whole, tokens)
            right = tl.load(y + token[:, None] * width, (token < tokens)[:, None], 0.0)
        total = tl.dot(left, right, total, max_num_imprecise_acc=BLOCK_K if PRECISE else None)
    _store_weights(total, a_scale, b_scale, out, e, m, n, height, width, BLOCK_M, BLOCK_N)
