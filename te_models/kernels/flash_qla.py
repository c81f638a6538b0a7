"""FlashQLA (the package flash-qla), whose kernels of the gated delta rule run on Hopper where it is installed.

A program computes one value head of one row from its first chunk to its last, with the state in registers, where
flash-linear-attention's kernels write each chunk's state to memory and read it back. The time therefore depends on the
length, not on the number of heads, until every multiprocessor has a program.
"""

import functools
import importlib.metadata
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_models.files.atomic import first_line

log = logging.getLogger(__name__)

HOPPER = (9, 0)  # compute capability; on others it was not measured
CHANNELS = 128  # per head of keys and of values: its kernels have no other width
# Programs, which are rows times value heads, from which on it was measured (benchmarks/delta_rule_kernels.py): it is
# faster than flash-linear-attention at each length from 2,048 tokens to 65,536, and the faster the more there are.
LEAST_PROGRAMS = 32


@functools.cache
def _functions() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return FlashQLA's function for whole rows and flash-linear-attention's L2 norm; None where FlashQLA cannot run.

    FLA_FLASH_QLA=0 in the environment turns it off, as it does in flash-linear-attention.
    """
    if os.environ.get("FLA_FLASH_QLA") == "0" or importlib.util.find_spec("flash_qla") is None:
        return None
    if torch.cuda.get_device_capability() != HOPPER:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about versions, which are no error where warnings are
            from fla.modules.l2norm import l2norm  # noqa: PLC0415  an optional package
            from flash_qla import chunk_gated_delta_rule  # noqa: PLC0415  an optional package
            from tilelang.contrib.nvcc import find_cuda_path  # noqa: PLC0415  a package that FlashQLA needs

            find_cuda_path()  # its kernels are compiled by nvcc
    except (
        Exception
    ) as error:  # of any kind: versions of the packages that do not fit, a missing compiler
        log.warning("flash-linear-attention runs, since FlashQLA cannot: %s", first_line(error))
        return None
    return chunk_gated_delta_rule, l2norm


def takes(q: Tensor, v: Tensor) -> bool:
    """Return whether FlashQLA computes whole rows, for queries [B, S, key heads, d_k] and values [B, S, heads, d_v]."""
    programs = v.shape[0] * v.shape[2]
    if programs < LEAST_PROGRAMS or not q.shape[3] == v.shape[3] == CHANNELS:
        return False
    return _functions() is not None


def whole_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of te_models.kernels.delta_rule.delta_rule [B, S, value heads, d_v], from zero states."""
    functions = _functions()
    assert functions is not None
    rule, l2norm = functions
    # Without auto_cp, which would divide the rows of a batch of one by a rule of the package that differs between
    # evaluation and training: a pass that is computed again for backward would not have the bits of the first one.
    out, _ = rule(l2norm(q), l2norm(k), v, g, beta, auto_cp=False)
    return out


def least_rows(key_channels: int, value_heads: int, value_channels: int) -> int | None:
    """Return the number of rows from which on FlashQLA computes a batch; None: it computes none."""
    if not key_channels == value_channels == CHANNELS or _functions() is None:
        return None
    return -(-LEAST_PROGRAMS // value_heads)


def name() -> str:
    """Return the package's name and version, for a plan."""
    return f"FlashQLA {importlib.metadata.version('flash-qla')}"
