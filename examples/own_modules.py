"""Recompute and FP8 state for modules of your own, made of te layers.

python examples/own_modules.py --recipe delayed
"""

import argparse

import torch
from torch import nn

import te_models


class Block(nn.Module):
    """Two te.Linear with a residual connection, unknown to te_models."""

    def __init__(self, te, size: int, **place) -> None:
        super().__init__()
        self.up = te.Linear(size, 4 * size, params_dtype=torch.bfloat16, **place)
        self.down = te.Linear(4 * size, size, params_dtype=torch.bfloat16, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--recipe", default="delayed", help="bf16, delayed, current, blockwise, mxfp8 or nvfp4"
    )
    options.add_argument("--steps", type=int, default=5)
    arguments = options.parse_args()

    te, engine, reason = te_models.get_engine()
    print(f"engine {engine}: {reason}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = nn.ModuleList(Block(te, 64, device=device) for _ in range(4))
    recipe = te_models.get_recipe(arguments.recipe).build(te)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3)
    for step in range(1, arguments.steps + 1):
        y = x = torch.randn(128, 64, device=device, dtype=torch.bfloat16)
        # Of bf16 the recipe is None, for which Transformer Engine would take one of its own.
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            for block in blocks:
                y = te_models.checkpoint(
                    block, y
                )  # backward recomputes the block with the scales of this pass
        loss = (y - x.roll(1, dims=1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")

    state = te_models.fp8_state(blocks)  # plain tensors, to be saved with the state_dict
    print(f"{len(state)} tensors of FP8 state")
    if state:
        te_models.load_fp8_state(
            nn.ModuleList(Block(te, 64, device=device) for _ in blocks), state, arguments.recipe
        )


if __name__ == "__main__":
    main()
