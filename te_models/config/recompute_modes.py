"""The modes of activation checkpointing, for those who plan memory and those who run them::

"none"       every activation is kept, but for SwiGLU's output with FP8 primary weights (recomputes_product)
"selective"  most blocks make gate_up_proj's output and the RMSNorm's before it again; in BF16 all make SwiGLU's again
"full"       every block keeps its input alone
N            every N-th block keeps its input alone, the others everything
"""

from __future__ import annotations

from te_models.errors import unknown

MODES = ("none", "selective", "full")
# Under "selective" one block in so many keeps gate_up_proj's output: the GEMM that makes it again is what the mode costs,
# and about so many blocks may keep it within 0.70 of the activations of "none" (tests/model/test_selective_recompute.py). They are more
# where SwiGLU's output, which is cheap to make again, is kept by no block.
KEPT_IN_BF16, KEPT_IN_FP8, KEPT_WITH_FP8_WEIGHTS = 2, 5, 4


def check_mode(mode: str | int) -> str | int:
    """The mode, if it is one; a string of digits becomes an int (from the command line)."""
    if isinstance(mode, str) and mode.isdigit():
        mode = int(mode)
    if mode in MODES or (isinstance(mode, int) and not isinstance(mode, bool) and mode > 0):
        return mode
    raise unknown("activation_checkpointing", mode, [*MODES, "a number N of blocks"])


def recomputes_block(mode: str | int, layer: int) -> bool:
    """Whether block number `layer` keeps its input alone."""
    return mode == "full" or (isinstance(mode, int) and layer % mode == 0)


def recomputes_mlp(mode: str | int, layer: int, layers: int, fp8: bool, fp8_weights: bool = False) -> bool:
    """Whether block number `layer` of `layers` makes the input of SwiGLU again.

    Counted from the end: the last keeps it, whose backward comes first.
    """
    kept = (KEPT_WITH_FP8_WEIGHTS if fp8_weights else KEPT_IN_FP8) if fp8 else KEPT_IN_BF16
    return mode == "selective" and (layers - 1 - layer) % kept != 0


def recomputes_product(mode: str | int, fp8: bool, fp8_weights: bool = False) -> bool:
    """Whether blocks make SwiGLU's output again: te.Linear keeps it in BF16, in FP8 only half as many bytes of codes.

    Those go too where weights are FP8, which somebody chose for the memory: a pass over SwiGLU's input a block, 1 % of a
    step. A block that is made again as a whole has nothing to gain.
    """
    return mode in ("none", "selective") if fp8 and fp8_weights else mode == "selective" and not fp8
