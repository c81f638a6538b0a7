"""`TEST_SEED=3 make test` runs all tests on other random numbers, which shows a test that its own seed lets pass."""

import os

import torch

OFFSET = int(os.environ.get("TEST_SEED", "0"))
seed_everywhere = torch.manual_seed


class Generator(torch.Generator):
    """A generator whose every seed is moved by OFFSET."""

    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed(seed + OFFSET)


def seed_cpu(seed: int) -> torch.Generator:
    """Seed the CPU alone.

    Without a GPU torch.manual_seed keeps the stack of each call, three times, for devices that never start: half a
    millisecond a test.
    """
    return torch.default_generator.manual_seed(int(seed))


seed_here = seed_everywhere if torch.cuda.is_available() else seed_cpu
if OFFSET:
    torch.manual_seed = lambda seed: seed_here(seed + OFFSET)
    torch.Generator = Generator
else:
    torch.manual_seed = seed_here
