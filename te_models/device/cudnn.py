"""Ensure one version of cuDNN per process, since mixed versions corrupt attention.

PyTorch's wheels include cuDNN, and Transformer Engine prefers the system's if there is one. cuDNN is a family of
libraries that load each other by name, so parts of one version then serve calls of the other. With 9.14 and 9.19 mixed,
the backward of attention writes to wrong addresses at sequence lengths that are not multiples of 128: an illegal memory
access in a CUDA graph, silently wrong gradients elsewhere (docs/log/2026-11.md, 2026-11-22).
"""

import ctypes
import functools
import os
import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

_LIBRARY = re.compile(r"(/\S*)/libcudnn[a-z_]*\.so\.(\d+)\S*$")


def loaded_cudnns() -> dict[Path, str]:
    """Return folder -> major version of the cuDNN libraries in this process; empty without /proc/self/maps."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return {}
    libraries = {}
    for line in lines:
        match = _LIBRARY.search(line)
        if match is not None:
            libraries[Path(match[1]).resolve()] = match[2]
    return libraries


def load_torchs_cudnn() -> None:
    """Load every part of PyTorch's cuDNN. Call before importing Transformer Engine, which then uses the same."""
    loaded = loaded_cudnns()
    if (
        len(loaded) != 1
        or "transformer_engine" in sys.modules
        or find_spec("transformer_engine") is None
    ):
        return
    ((folder, major),) = loaded.items()
    # All of them: a part that is loaded later, by name, is then the one that is there already.
    for library in sorted(folder.glob(f"libcudnn*.so.{major}")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ.setdefault("CUDNN_HOME", str(folder))  # where Transformer Engine looks first


def cudnn_is_sound() -> bool:
    """Return whether cuDNN's attention can be trusted. Warn once if two versions are mixed, and return False."""
    return _is_sound("transformer_engine" in sys.modules)


@functools.cache
def _is_sound(with_transformer_engine: bool) -> bool:
    loaded = loaded_cudnns()
    if len(loaded) < 2:
        return True
    warnings.warn(
        f"two versions of cuDNN are loaded in this process ({', '.join(map(str, loaded))}), which makes cuDNN's "
        "attention compute wrong gradients: using FlashAttention instead, which is slower. Import te_models.CausalLM "
        "before transformer_engine and before libraries that import it, such as peft",
        stacklevel=2,
    )
    return False
