"""The dtypes of parameters and activations, as torch.dtype or by name."""

import torch

from te_models.errors import UsageError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def given_dtype(dtype: object) -> torch.dtype | None:
    """Return the dtype that a caller gives, or its name: "bfloat16" or "torch.bfloat16"; None for None and "auto".

    Raises:
        UsageError: te layers do not run in it, or it is no dtype.
    """
    if dtype in (None, "auto"):
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UsageError(f"dtype={dtype!r} is not supported: give {', '.join(DTYPES)} or 'auto'")
    return DTYPES[name]
