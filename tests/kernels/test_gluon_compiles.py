"""Kernels in Gluon, which has no interpreter: their compiler accepts them for Hopper on any machine, without spills.

Their results are compared on a GPU with those of other kernels and with FP64 (grouped_linear_cases.py and others).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", "3.6")
gluon = pytest.importorskip("triton.experimental.gluon")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from te_models.kernels import hopper_block_products_triton as blocks  # noqa: E402
from te_models.kernels import hopper_products_triton as plain  # noqa: E402

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
POINTERS = dict(
    first="*i64", tiles="*i64", aligned_first="*i64", a_scale="*fp32", b_scale="*fp32", b_inv="*fp32", bias="*bf16",
    out="*bf16",
)  # fmt: skip


def tile(rows: int, form: Any = gl.float8e4nv) -> str:
    """The type of a description of a matrix of bytes."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, 128], form)
    return f"tensordesc<{form}[{rows}, 128],{layout!r}>"


def line(columns: int) -> str:
    """The type of a description of FP32 scales."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return f"tensordesc<fp32[1, {columns}],{layout!r}>"


def compiled(kernel: Any, operands: dict[str, str], fixed: dict[str, Any], fuse: bool) -> str:
    """The assembly of a kernel; arguments that are neither operands nor fixed nor pointers are numbers."""
    fixed = fixed | dict(num_warps=4)
    types = {}
    values = {}
    sixteens = {}  # what a launch finds of pointers and sizes
    for number, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in fixed:
            types[name] = "constexpr"
            values[number,] = fixed[name]
        else:
            types[name] = (POINTERS | operands).get(name, "i32")
            if name not in operands and not name.startswith("step"):
                sixteens[number,] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, types, values, sixteens)
    options = dict(num_warps=4, enable_fp_fusion=fuse)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def spilled(ptx: str, folder: Path) -> int:
    """The bytes of registers that the assembler of NVIDIA moves to memory."""
    given = folder / "kernel.ptx"
    given.write_text(ptx)
    command = [str(PTXAS), "-arch=sm_90a", "-v", str(given), "-o", str(folder / "kernel")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (found,) = re.findall(r"(\d+) bytes spill stores", said)
    return int(found)


@pytest.mark.slow
@pytest.mark.skipif(not PTXAS.exists(), reason="Triton came without NVIDIA's assembler")
@pytest.mark.parametrize("precise", [False, True])
def test_products(precise: bool, tmp_path: Path) -> None:
    """With gradients in E5M2, with and without a bias."""
    operands = dict(a=tile(plain.BLOCK_M, gl.float8e5), b=tile(plain.BLOCK_N))
    fixed = dict(STAGES=plain.STAGES, PRECISE=precise)
    for kernel, more in (
        (plain._rows_kernel, dict(bias=None)),
        (plain._rows_kernel, {}),
        (plain._weights_kernel, {}),
    ):
        assert spilled(compiled(kernel, operands, fixed | more, False), tmp_path) == 0


@pytest.mark.slow
@pytest.mark.skipif(not PTXAS.exists(), reason="Triton came without NVIDIA's assembler")
def test_products_of_blocks(tmp_path: Path) -> None:
    fixed = dict(PARTS=blocks.PARTS, STAGES=blocks.STAGES)
    operands = dict(a=tile(blocks.ROWS), b=tile(blocks.BLOCK_N), a_inv=line(blocks.ROWS))
    for more in (dict(bias=None, step_k=1), dict(step_n=1)):  # forward and backward
        assert spilled(compiled(blocks._rows_kernel, operands, fixed | more, True), tmp_path) == 0
    operands["b_inv"] = line(blocks.BLOCK_N)
    assert spilled(compiled(blocks._weights_kernel, operands, fixed, True), tmp_path) == 0
