"""`TEST_SEED=3 make test` runs all tests on other random numbers, which shows a test that its own seed lets pass."""

import os

import torch

OFFSET = int(os.environ.get("TEST_SEED", "0"))
manual_seed = torch.manual_seed


class Generator(torch.Generator):
    """A generator whose every seed is moved by OFFSET."""

    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed(seed + OFFSET)


if OFFSET:
    torch.manual_seed = lambda seed: manual_seed(seed + OFFSET)
    torch.Generator = Generator
