"""Sizes of the chunks in which temporaries are allocated, shared by the allocating code and the memory plan."""

FP32 = 4  # bytes
# Parameters that te_models.optim.master updates at a time, with FP32 gradients.
UPDATE_CHUNK = 2**28
# Bytes that a rank sends, and that it receives, at a time in te_models.optim.parameter_owners.
EXCHANGE_CHUNK = 2**27
# Bytes of values of experts' stored weights at a time, in kernels/stored_experts_triton.py.
STORED_CHUNK = 2**28
HEAD_CHUNK = {True: 2**31, False: 2**28}  # cuda -> bytes of logits per chunk, counted in FP32


def head_rows(rows: int, vocabulary: int, width: int, cuda: bool, trained: bool = True) -> int:
    """Return how many rows of logits kernels/lm_head.py computes per chunk.

    On a GPU all rows form one chunk if their BF16 logits take no more memory than the default chunk plus the FP32 sum
    of the weight gradient that several chunks need. A weight that is not `trained` needs no sum, so its chunks can be
    small at no cost. `vocabulary` and `width` are the rows and columns of the head's weight.
    """
    allowed = HEAD_CHUNK[cuda]
    if cuda and not trained:
        allowed //= 4
    elif cuda and rows * vocabulary * 2 <= allowed // 2 + vocabulary * width * FP32:
        return rows
    return min(rows, max(256, allowed // (FP32 * vocabulary)))


def experts_at_a_time(experts: int, outputs: int, inputs: int, itemsize: int) -> int:
    """Return how many experts' weights [outputs, inputs] are dequantized at a time, to values of `itemsize` bytes."""
    return min(experts, max(1, STORED_CHUNK // (outputs * inputs * itemsize)))
