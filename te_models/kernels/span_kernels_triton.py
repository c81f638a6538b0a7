"""The kernels of attention in spans of keys, which te_models.kernels.span_attention_triton launches."""

import triton
import triton.language as tl


@triton.jit
def _rows(base, token, token_stride, channel, seq, dim: tl.constexpr):
    """Load [tokens, width] of one head, zero beyond the end of the row and beyond the last channel."""
    inside = (token < seq)[:, None] & (channel < dim)[None, :]
    return tl.load(
        base + token.to(tl.int64)[:, None] * token_stride + channel[None, :], inside, 0.0
    )


@triton.jit
def _store_rows(base, token, token_stride, channel, seq, value, dim: tl.constexpr):
    inside = (token < seq)[:, None] & (channel < dim)[None, :]
    address = base + token.to(tl.int64)[:, None] * token_stride + channel[None, :]
    tl.store(address, value.to(base.dtype.element_ty), inside)


@triton.jit
def _place(blocks, heads):
    """Return this program's block of tokens, row of the batch and head, and the number of the head among all rows.

    The grid has one dimension, since the others end at 65,535; the numbers that strides are multiplied by have 64 bits.
    """
    pair = tl.program_id(0) // blocks
    return (
        tl.program_id(0) % blocks,
        (pair // heads).to(tl.int64),
        (pair % heads).to(tl.int64),
        pair.to(tl.int64),
    )


@triton.jit
def _scores(q, k, start, query, key, factor, cap):
    """Return the scores [queries, keys] times log2(e), -inf at keys that a query does not see, and their tanh.

    With a cap c, times log2(e), a score s becomes c * tanh(s / c), and `factor` belongs to s / c; else the second
    value means nothing.
    """
    seen = (key[None, :] <= query[:, None]) & (key[None, :] >= start[:, None])
    score = tl.dot(q, tl.trans(k)) * factor
    bend = score
    if cap is not None:
        bend = 2.0 * tl.sigmoid(2.0 * score) - 1.0  # tanh
        score = bend * cap
    return tl.where(seen, score, float("-inf")), bend


@triton.jit
def _forward_kernel(
    # queries, keys and values [B, heads, S, dim], with as many heads of keys as heads / group
    q,
    k,
    v,
    # FP32 [heads], a logit that takes part in the softmax, or None
    sinks,
    # [B, heads, S, dim], and log-sum-exp FP32 [B, heads, S] for backward
    out,
    log_sum,
    # int32 [B, S]: the first key that each query sees
    first,
    # strides in elements
    q_batch,
    q_head,
    q_seq,
    k_batch,
    k_head,
    k_seq,
    v_batch,
    v_head,
    v_seq,
    o_batch,
    o_head,
    o_seq,
    first_batch,
    # S, heads of queries, and heads of queries per head of keys
    seq,
    heads,
    group,
    # on the products of q and k, times log2(e), since exp2 is the instruction; with a cap see `_scores`
    factor,
    cap,
    # channels of a head and the power of two above; queries and keys per block
    dim: tl.constexpr,
    width: tl.constexpr,
    queries: tl.constexpr,
    keys: tl.constexpr,
):
    """Write attention of some queries over the keys of their spans, by an online softmax, and its log-sum-exp."""
    blocks = tl.cdiv(seq, queries)
    block, batch, head, pair = _place(blocks, heads)
    begin = (blocks - 1 - block) * queries  # longest first
    query = begin + tl.arange(0, queries)
    channel = tl.arange(0, width)
    k += batch * k_batch + head // group * k_head
    v += batch * v_batch + head // group * v_head
    first += batch * first_batch
    rows = _rows(q + batch * q_batch + head * q_head, query, q_seq, channel, seq, dim)
    start = tl.load(first + query, query < seq, 0)
    top = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    if sinks is not None:  # a key that every query sees, whose value is zero
        top = tl.zeros([queries], tl.float32) + tl.load(sinks + head)
        total += 1.0
    sums = tl.zeros([queries, width], tl.float32)
    for place in range(
        tl.load(first + begin) // keys * keys, tl.minimum(begin + queries, seq), keys
    ):
        key = place + tl.arange(0, keys)
        keyed = _rows(k, key, k_seq, channel, seq, dim)
        score, _ = _scores(rows, keyed, start, query, key, factor, cap)
        highest = tl.maximum(top, tl.max(score, 1))
        # A query that has seen no key yet.
        offset = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - offset[:, None])
        shrink = tl.exp2(top - offset)
        value = _rows(v, key, v_seq, channel, seq, dim)
        sums = sums * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        total = total * shrink + tl.sum(weight, 1)
        top = highest
    _store_rows(
        out + batch * o_batch + head * o_head,
        query,
        o_seq,
        channel,
        seq,
        sums / total[:, None],
        dim,
    )
    tl.store(log_sum + pair * seq + query, top + tl.log2(total), query < seq)


@triton.jit
def _dot_kernel(
    # output and its gradient [B, heads, S, dim], and their products to write, FP32 [B, heads, S]
    out,
    dy,
    dots,
    # strides in elements
    o_batch,
    o_head,
    o_seq,
    y_batch,
    y_head,
    y_seq,
    seq,
    heads,
    dim: tl.constexpr,
    width: tl.constexpr,
    queries: tl.constexpr,
):
    """Compute the product of each query's output with its gradient."""
    block, batch, head, pair = _place(tl.cdiv(seq, queries), heads)
    query = block * queries + tl.arange(0, queries)
    channel = tl.arange(0, width)
    one = _rows(out + batch * o_batch + head * o_head, query, o_seq, channel, seq, dim).to(
        tl.float32
    )
    other = _rows(dy + batch * y_batch + head * y_head, query, y_seq, channel, seq, dim).to(
        tl.float32
    )
    tl.store(dots + pair * seq + query, tl.sum(one * other, 1), query < seq)


@triton.jit
def _grad_query_kernel(
    # queries, keys and values [B, heads, S, dim], with as many heads of keys as heads / group
    q,
    k,
    v,
    # gradient of the output; log-sum-exp and `_dot_kernel` of each query, FP32 [B, heads, S]
    dy,
    log_sum,
    dots,
    # int32 [B, S]: the first key that each query sees
    first,
    # to write
    dq,
    # strides in elements
    q_batch,
    q_head,
    q_seq,
    k_batch,
    k_head,
    k_seq,
    v_batch,
    v_head,
    v_seq,
    y_batch,
    y_head,
    y_seq,
    d_batch,
    d_head,
    d_seq,
    first_batch,
    # S, heads of queries, and heads of queries per head of keys
    seq,
    heads,
    group,
    factor,
    scale,
    cap,
    dim: tl.constexpr,
    width: tl.constexpr,
    queries: tl.constexpr,
    keys: tl.constexpr,
):
    """Write the gradient of some queries, from all keys that they see."""
    blocks = tl.cdiv(seq, queries)
    block, batch, head, pair = _place(blocks, heads)
    begin = (blocks - 1 - block) * queries
    query = begin + tl.arange(0, queries)
    channel = tl.arange(0, width)
    k += batch * k_batch + head // group * k_head
    v += batch * v_batch + head // group * v_head
    first += batch * first_batch
    rows = _rows(q + batch * q_batch + head * q_head, query, q_seq, channel, seq, dim)
    slope = _rows(dy + batch * y_batch + head * y_head, query, y_seq, channel, seq, dim)
    start = tl.load(first + query, query < seq, 0)
    place_of_sums = pair * seq + query
    top = tl.load(log_sum + place_of_sums, query < seq, 0.0)
    dot = tl.load(dots + place_of_sums, query < seq, 0.0)
    grad = tl.zeros([queries, width], tl.float32)
    for place in range(
        tl.load(first + begin) // keys * keys, tl.minimum(begin + queries, seq), keys
    ):
        key = place + tl.arange(0, keys)
        keyed = _rows(k, key, k_seq, channel, seq, dim)
        score, bend = _scores(rows, keyed, start, query, key, factor, cap)
        weight = tl.exp2(score - top[:, None])
        change = weight * (
            tl.dot(slope, tl.trans(_rows(v, key, v_seq, channel, seq, dim))) - dot[:, None]
        )
        if cap is not None:
            change *= 1 - bend * bend
        grad += tl.dot(change.to(keyed.dtype), keyed)
    _store_rows(dq + batch * d_batch + head * d_head, query, d_seq, channel, seq, grad * scale, dim)


@triton.jit
def _grad_key_kernel(
    # queries, keys and values [B, heads, S, dim], with as many heads of keys as heads / group
    q,
    k,
    v,
    # gradient of the output; log-sum-exp and `_dot_kernel` of each query, FP32 [B, heads, S]
    dy,
    log_sum,
    dots,
    # int32 [B, S]: the first key that each query sees, and the last query that sees each key
    first,
    last,
    # to write
    dk,
    dv,
    # strides in elements
    q_batch,
    q_head,
    q_seq,
    k_batch,
    k_head,
    k_seq,
    v_batch,
    v_head,
    v_seq,
    y_batch,
    y_head,
    y_seq,
    d_batch,
    d_head,
    d_seq,
    first_batch,
    # S, heads of queries, and heads of queries per head of keys
    seq,
    heads,
    group,
    factor,
    scale,
    cap,
    dim: tl.constexpr,
    width: tl.constexpr,
    queries: tl.constexpr,
    keys: tl.constexpr,
):
    """Compute the gradients of one block of keys and values, over all heads of queries that share them."""
    block, batch, kv_head, _ = _place(tl.cdiv(seq, keys), heads // group)
    begin = block * keys
    key = begin + tl.arange(0, keys)
    channel = tl.arange(0, width)
    keyed = _rows(k + batch * k_batch + kv_head * k_head, key, k_seq, channel, seq, dim)
    value = _rows(v + batch * v_batch + kv_head * v_head, key, v_seq, channel, seq, dim)
    first += batch * first_batch
    end = tl.load(last + batch * first_batch + tl.minimum(begin + keys, seq) - 1) + 1
    grad_key = tl.zeros([keys, width], tl.float32)
    grad_value = tl.zeros([keys, width], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        sums = (batch * heads + head) * seq
        for place in range(begin // queries * queries, end, queries):
            query = place + tl.arange(0, queries)
            rows = _rows(q + batch * q_batch + head * q_head, query, q_seq, channel, seq, dim)
            slope = _rows(dy + batch * y_batch + head * y_head, query, y_seq, channel, seq, dim)
            start = tl.load(first + query, query < seq, 0)
            top = tl.load(log_sum + sums + query, query < seq, 0.0)
            dot = tl.load(dots + sums + query, query < seq, 0.0)
            score, bend = _scores(rows, keyed, start, query, key, factor, cap)
            weight = tl.exp2(score - top[:, None])
            grad_value += tl.dot(tl.trans(weight.to(slope.dtype)), slope)
            change = weight * (tl.dot(slope, tl.trans(value)) - dot[:, None])
            if cap is not None:
                change *= 1 - bend * bend
            grad_key += tl.dot(tl.trans(change.to(rows.dtype)), rows)
    d = batch * d_batch + kv_head * d_head
    _store_rows(dk + d, key, d_seq, channel, seq, grad_key * scale, dim)
    _store_rows(dv + d, key, d_seq, channel, seq, grad_value, dim)
