"""Gathers of FSDP2's weights that no block waits for."""

from typing import Any

import torch
from torch import nn


def wait_for_gathers(model: nn.Module) -> None:
    """Let the device's current stream wait for every gather that FSDP2 has begun; call it after each backward pass.

    FSDP2 gathers the weights of a block before its backward. Where the backward pass ends earlier (a calibration,
    frozen blocks), nobody waits for the last gather: FSDP2 means to do so by a stream of torch.accelerator, but such a
    stream does not wait for events of torch.cuda (torch 2.11 to 2.13). It then frees memory that is still written to,
    and the next forward pass gathers other weights into it. A model without FSDP2 has no gathers.
    """
    state_of: Any = getattr(model, "_get_fsdp_state", None)
    if state_of is None:
        return
    # There is no stream before the first forward pass, nor on a CPU.
    gathering = getattr(state_of()._comm_ctx, "all_gather_stream", None)
    if isinstance(gathering, torch.cuda.Stream):
        torch.cuda.current_stream(gathering.device).wait_stream(gathering)
