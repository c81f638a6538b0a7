"""The number of runs in which cuBLAS sums K where FP8 matrices have few results and a long K.

A result of few elements would occupy few of a GPU's multiprocessors, so several of them share K. How many is a choice
of cuBLAS. Up to 2^27 products, rows and columns counted in whole sixteens, it depends on K alone, and each run has at
least 8,192 / 3 elements. That is

* what te.Linear and torch._scaled_mm did on an H100 in 115 shapes, in every bit, for K of 1,024, 2,048, 4,096, 8,192
  and 16,384 (benchmarks/results/split_k_h100.json);
* the choice in all 12,880 queries of this size that the package mmaemu recorded on an H100 PCIe with another version
  of cuBLAS: K of 5,120, 5,760 and 12,288 as well, inputs in E4M3 and E5M2, five dtypes of results, with and without
  split accumulators (tests/engine/test_split_sums.py).

Between these K the rule is interpolated. Beyond 2^27 products the tile that cuBLAS prefers for a shape matters too, and
no rule is known: one run is assumed.
"""

from te_models.engine.emulated.tensor_core import HOPPER, TensorCore

LARGEST = 2**27  # products for which the rule holds
_STEP = 16  # rows and columns of the smallest tile


def runs_of_k(m: int, k: int, n: int, core: TensorCore = HOPPER) -> int:
    """Return the number of runs in which a product of [m, k] and [n, k] is summed; Ada's, without a rule, in one."""
    rows = -(-m // _STEP) * _STEP
    columns = -(-n // _STEP) * _STEP
    if core != HOPPER or rows * k * columns > LARGEST:
        return 1
    return max(1, 3 * k // 8192)
