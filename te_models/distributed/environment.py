"""The environment variables with which torchrun tells a process its place in the job."""

import os

from te_models.errors import UsageError, refuse

NEEDED = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")  # and LOCAL_RANK on GPUs
_STARTED = "start the processes with torchrun, which sets all of them, or unset WORLD_SIZE for a single one"


def number(name: str, default: int) -> int:
    """Return the number in a variable of torchrun's; a UsageError if it holds no whole number from 0."""
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(
            f"the environment variable {name} is {text!r}, not a whole number: {_STARTED}"
        )
    return int(text)


def check_place(gpus: int) -> None:
    """Raise a UsageError unless the variables say which process of a job this is and how to reach the others.

    `gpus` is the number of this host's GPUs, 0 for a job on CPUs.
    """
    needed = (*NEEDED, "LOCAL_RANK") if gpus else NEEDED
    rank = number("RANK", 0)
    world = number("WORLD_SIZE", 1)
    port = number("MASTER_PORT", 0)
    local = number("LOCAL_RANK", 0) if gpus else 0
    mistakes = {
        **{
            f"the environment variable {name} is not set, and WORLD_SIZE is: {_STARTED}": not os.environ.get(
                name
            )
            for name in needed
        },
        f"RANK={rank} and WORLD_SIZE={world} in the environment do not fit: {_STARTED}": rank
        >= world,
        f"the environment variable MASTER_PORT is {port}: give a port below 65536": port >= 2**16,
        f"LOCAL_RANK={local}, and this host has {gpus} GPUs: start one process per GPU": gpus
        and local >= gpus,
    }
    refuse(mistakes)
