"""AdamW on many tensors in one kernel, which reads every gradient, master and moment once and writes the rest once.

Products and sums of the moments are in FP64, each moment rounded once to FP32, then the update in FP32. (PyTorch 2.11's
fused AdamW rounds betas to FP32 first, so its moments differ by 2e-7 of themselves.) Beside it the kernel clips the
gradient, which may be BF16, and rounds the new master into the parameter: 28 bytes per BF16 parameter, where separate
passes move 48.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.optim.tensor_blocks import TensorBlocks, aligned

# Elements of a tensor that a program updates, and its warps: of seven choices the fastest on an H200, where 2^27
# parameters take 912 microseconds (940 with 2048 and 8).
BLOCK = 1024
WARPS = 4


class Entry(NamedTuple):
    """The tensors of one parameter, each contiguous and of its size, on one device.

    Attributes:
        gradient: BF16 or FP32; it is not written.
        master: FP32, updated in place.
        first: the first moment, FP32, updated in place.
        second: the second moment, FP32, updated in place.
        parameter: the master rounded to BF16; None where the master is all.
    """

    gradient: Tensor
    master: Tensor
    first: Tensor
    second: Tensor
    parameter: Tensor | None


class Numbers(NamedTuple):
    """The numbers of a step; at place i they belong to Entry number i.

    Attributes:
        decay: FP64 scalar, the learning rate times the weight decay.
        sizes: FP32 [n], the learning rate over the bias correction of the first moment.
        roots: FP32 [n], the root of the bias correction of the second moment.
    """

    decay: Tensor
    sizes: Tensor
    roots: Tensor


class Launch:
    """Tables on the device for a kernel that updates entries of one kind.

    Args:
        entries: what a step updates; other steps may have other tensors of the same kind and sizes.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        sizes = [entry.master.numel() for entry in entries]
        self.blocks = TensorBlocks(sizes, BLOCK, entries[0].master.device)

    def run(
        self,
        entries: Sequence[Entry],
        numbers: Numbers,
        betas: tuple[float, float],
        eps: float,
        factor: Tensor | None,
        bad: Tensor | None,
    ) -> None:
        """Update the masters, the moments and the parameters.

        Args:
            entries: as many as at first, of the same sizes.
            numbers: of this step.
            betas: decays of the moments.
            eps: added to the root of the second moment.
            factor: multiplies the gradients, FP32 scalar; None: 1.
            bad: if this FP32 scalar is 1, nothing changes; None: 0.
        """
        base = entries[0]
        with torch.cuda.device_of(base.master):
            _adamw_kernel[(self.blocks.programs,)](
                gradient=base.gradient,
                master=base.master,
                first=base.first,
                second=base.second,
                parameter=base.parameter,
                places=self.blocks.places(entries),
                counts=self.blocks.counts,
                begins=self.blocks.begins,
                owners=self.blocks.owners,
                decay=numbers.decay,
                sizes=numbers.sizes,
                roots=numbers.roots,
                factor=factor,
                bad=bad,
                BETA1=betas[0],
                BETA2=betas[1],
                EPS=eps,
                ALIGNED=aligned(base),
                BLOCK=BLOCK,
                num_warps=WARPS,
            )


def kind(entry: Entry) -> tuple[object, ...]:
    """Return the key of a launch: entries with the same key, of device, dtypes and alignment, share one."""
    dtypes = (tensor.dtype for tensor in entry if tensor is not None)
    return (entry.master.device, *dtypes, aligned(entry))


@triton.jit
def _offsets(places, gradient, ALIGNED: tl.constexpr):
    """Return where gradient, master, both moments and parameter of an entry begin, in elements from the first entry's.

    A kernel takes a fixed number of pointers: it gets the pointers of one entry, and distances.
    """
    gradient_at = tl.load(places)
    master_at = tl.load(places + 1)
    first_at = tl.load(places + 2)
    second_at = tl.load(places + 3)
    parameter_at = tl.load(places + 4)
    if ALIGNED:
        # Promises to the compiler, which then loads and stores 16 bytes at a time.
        gradient_at = tl.multiple_of(gradient_at, 4)
        if gradient.dtype.element_ty == tl.bfloat16:
            gradient_at = tl.multiple_of(gradient_at, 8)
        master_at = tl.multiple_of(master_at, 4)
        first_at = tl.multiple_of(first_at, 4)
        second_at = tl.multiple_of(second_at, 4)
        parameter_at = tl.multiple_of(parameter_at, 8)
    return gradient_at, master_at, first_at, second_at, parameter_at


@triton.jit
def _adamw_kernel(
    # the tensors of the first entry; all other entries are found by their distance from these
    gradient,
    master,
    first,
    second,
    parameter,
    # TensorBlocks: those distances, int64 [n, 5]; the elements of each entry, its first program; each program's entry
    places,
    counts,
    begins,
    owners,
    # Numbers
    decay,
    sizes,
    roots,
    # FP32 scalars: multiplies gradients, and 1 for a step that must change nothing; None: not compiled
    factor,
    bad,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update BLOCK elements of one tensor."""
    # Programs are numbered over all tensors; `owners` says which tensor one works on, `begins` its first program.
    program = tl.program_id(0)
    entry = tl.load(owners + program)
    count = tl.load(counts + entry)
    if bad is not None:
        # A step to skip updates no element. The flag stays on the device, so that the host need not wait.
        count = tl.where(tl.load(bad) == 1.0, 0, count)
    at = (program - tl.load(begins + entry)) * BLOCK + tl.arange(0, BLOCK)
    if ALIGNED:
        # A promise to the compiler, as in _offsets.
        count = tl.multiple_of(count, 16)
    gradient_at, master_at, first_at, second_at, parameter_at = _offsets(
        places + entry * 5, gradient, ALIGNED
    )
    here = at < count

    g = tl.load(gradient + gradient_at + at, here, 0.0).to(tl.float32)
    if factor is not None:
        g *= tl.load(factor)
    p = tl.load(master + master_at + at, here, 0.0)
    m = tl.load(first + first_at + at, here, 0.0)
    v = tl.load(second + second_at + at, here, 0.0)

    # FP64, since 1 - beta of an FP32 beta is off by 2e-7, and with it every moment.
    p64 = p.to(tl.float64)
    p = (p64 - tl.load(decay) * p64).to(tl.float32)
    g64 = g.to(tl.float64)
    m = (BETA1 * m.to(tl.float64) + (1 - BETA1) * g64).to(tl.float32)
    v = (BETA2 * v.to(tl.float64) + (1 - BETA2) * g64 * g64).to(tl.float32)
    # Rounded as IEEE says, not by the approximations that Triton would choose.
    root = tl.div_rn(tl.sqrt_rn(v), tl.load(roots + entry))
    below = (root.to(tl.float64) + EPS).to(tl.float32)
    p -= tl.div_rn(tl.load(sizes + entry) * m, below)

    tl.store(master + master_at + at, p, here)
    tl.store(first + first_at + at, m, here)
    tl.store(second + second_at + at, v, here)
    if parameter is not None:
        tl.store(parameter + parameter_at + at, p.to(parameter.dtype.element_ty), here)
