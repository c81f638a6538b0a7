"""The modes of activation recompute, shared by the memory plan and the model.

* "none": no recompute, except of SwiGLU's output with FP8 primary weights (`recomputes_product`).
* "selective": most blocks recompute the output of gate_up_proj and of the RMSNorm before it; in BF16 all blocks
  recompute SwiGLU's output.
* "full": every block stores only its input.
* N: every N-th block stores only its input, the others store everything.
"""

from te_models.errors import UsageError, unknown

MODES = ("none", "selective", "full")
# Under "selective", one block in this many stores the output of gate_up_proj, since recomputing it costs a GEMM. The
# numbers keep activations within 0.70 of the bytes of "none" (tests/model/test_selective_recompute.py). More blocks may
# store it where no block stores SwiGLU's output, which is cheap to recompute.
KEPT_IN_BF16 = 2
KEPT_IN_FP8 = 5
KEPT_WITH_FP8_WEIGHTS = 4


def check_mode(mode: str | int | None) -> str | int:
    """Return a valid mode; a string of digits, from the command line, becomes an int, and None the default."""
    if mode is None:
        mode = "none"
    if isinstance(mode, str) and mode.isdigit():
        mode = int(mode)
    if mode in MODES or (isinstance(mode, int) and not isinstance(mode, bool) and mode > 0):
        return mode
    raise unknown("activation_checkpointing", mode, [*MODES, "a number N of blocks"])


def trainers_mode(
    offloads: bool, *, every_n_layers: int = 1, offload: bool = False, **options: object
) -> str | int:
    """Return the mode that transformers' Trainer asks for.

    Args:
        offloads: whether the model was built with activation_offload.
        every_n_layers: 1 is "full", a larger N the integer N.
        offload: whether activations have to be in host memory until backward.
        options: options of torch's function, which is not used; they are ignored.

    Raises:
        UsageError: `offload` of a model that does not offload, or another number than 1 or more.
    """
    if offload and not offloads:
        raise UsageError(
            "offload=True moves activations to host memory: build the model with activation_offload=True instead"
        )
    return "full" if every_n_layers == 1 else check_mode(every_n_layers)


def recomputes_block(mode: str | int, layer: int) -> bool:
    """Return whether block number `layer` stores only its input."""
    return mode == "full" or (isinstance(mode, int) and layer % mode == 0)


def offload_allows_fused(mode: str | int) -> bool:
    """Return whether activation offload can move all that blocks save when fused kernels run.

    It moves plain tensors. Fused kernels also save FP8 data that one module hands to the next, unless every block
    stores only its input.
    """
    return mode in ("full", 1)


def recomputes_mlp(
    mode: str | int, layer: int, layers: int, fp8: bool, fp8_weights: bool = False
) -> bool:
    """Return whether block number `layer` of `layers` recomputes the input of SwiGLU.

    Blocks are counted from the end, since backward begins with the last one, which stores it.
    """
    not_recomputed = (
        (KEPT_WITH_FP8_WEIGHTS if fp8_weights else KEPT_IN_FP8) if fp8 else KEPT_IN_BF16
    )
    return mode == "selective" and (layers - 1 - layer) % not_recomputed != 0


def recomputes_product(mode: str | int, fp8: bool, fp8_weights: bool = False) -> bool:
    """Return whether blocks recompute the output of SwiGLU.

    te.Linear stores it in BF16, or in half as many bytes as FP8 data. FP8 weights are chosen for the memory, so there
    the FP8 data goes too, at the cost of one pass over SwiGLU's input per block, 1 % of a step. A block that is
    recomputed as a whole gains nothing from this.
    """
    return mode in ("none", "selective") if fp8 and fp8_weights else mode == "selective" and not fp8
