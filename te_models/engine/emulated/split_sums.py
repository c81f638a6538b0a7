"""The number of runs in which cuBLAS sums K where FP8 matrices have few results and a long K.

A result of few elements would occupy few of a GPU's multiprocessors, so several of them share K. How many is a choice
of cuBLAS. While they are enough for all runs, it depends on K alone: each run has at least 2,560 elements, and the
last one begins before K ends. That is

* what te.Linear did on an H200 in 368 shapes, and te.Linear and torch._scaled_mm on an H100 in 107, in every bit
  (benchmarks/results/split_k_bits_h200.json and split_k_h100.json);
* the choice in 6,520 of 6,527 shapes that cuBLAS 13.1 was asked about on an H200, for 37 values of K from 2,048 to
  131,072 (split_k_choices_h200.json); the others have K of 49,152 and 131,072;
* the choice in all 12,880 queries that the package mmaemu recorded on an H100 PCIe with another version of cuBLAS:
  inputs in E4M3 and E5M2, five dtypes of results, with and without split accumulators
  (tests/engine/test_split_sums.py).

Beyond the bounds below the tile that cuBLAS prefers for a shape matters too, and no rule is known: one run is assumed,
which 3,797 of 12,697 shapes have that are beyond and have a K above 5,120.
"""

from te_models.engine.emulated.tensor_core import HOPPER, TensorCore

RUN = 2560  # elements that a run has at least
# Bounds of the rule: outputs where there are up to three runs, products where there are more.
FEW_RUNS = 4 * RUN
MOST_OUTPUTS = 49_151
MOST_PRODUCTS = 2**27
_STEP = 16  # rows and columns of the smallest tile


def is_known(m: int, k: int, n: int) -> bool:
    """Return whether the rule holds for a product of [m, k] and [n, k], rows and columns counted in whole sixteens."""
    outputs = (-(-m // _STEP) * _STEP) * (-(-n // _STEP) * _STEP)
    if k <= FEW_RUNS:
        return outputs <= MOST_OUTPUTS
    return outputs * k <= MOST_PRODUCTS


def runs_of_k(m: int, k: int, n: int, core: TensorCore = HOPPER) -> int:
    """Return the number of runs in which a product of [m, k] and [n, k] is summed; Ada's, without a rule, in one."""
    if core != HOPPER or not is_known(m, k, n):
        return 1
    return max(1, (k - 1) // RUN)
