"""How long does saving delay training? A blocking save against background saves, the first one included.

    python benchmarks/save_blocking.py --out benchmarks/results/save_blocking_cpu.json

`blocked` is all that a training step waits for: the call of `save`, and before the optimizer's update the wait until
every tensor is copied. The state is a real one: BF16 weights, FP32 masters and AdamW's moments, 14 bytes per parameter.
Rounds alternate the two, each with a new `Checkpoints`, so that every background save here is a first one or a second.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from te_models import CausalLM
from te_models.files.formats import flatten_state
from te_models.inspect.environment import environment
from te_models.optim import build_optimizer
from te_models.saving.pretrained import model_content
from te_models.saving.run_folder import Checkpoints


def seconds(action: Callable[..., Any], *args: Any, **options: Any) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    action(*args, **options)
    return time.perf_counter() - start


def forward_and_backward(model: CausalLM, ids: torch.Tensor) -> None:
    """One step up to the update."""
    model(ids, labels=ids).loss.backward()


@click.command()
@click.option("--out", type=click.Path(path_type=Path))
@click.option("--rounds", default=5)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Where to save; default: the temporary folder.",
)
@click.option("--hidden-size", default=512)
@click.option("--num-hidden-layers", default=10)
def main(
    out: Path | None, rounds: int, folder: Path | None, hidden_size: int, num_hidden_layers: int
) -> None:
    """Measure and print."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = CausalLM.from_preset(
        "gated-124m", hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=num_hidden_layers,
        num_attention_heads=hidden_size // 64, recipe="bf16",
    )  # fmt: skip
    optimizer = build_optimizer("adamw", model, lr=1e-3, weight_decay=0.1)
    ids = torch.randint(0, model.config.vocab_size, (1, 128), device=device)

    def step() -> None:
        forward_and_backward(model, ids)
        optimizer.take_gradients(1.0)
        optimizer.step()

    step()
    tensors, documents = model_content(model, model.origin)
    tensors["training"], documents["training"] = flatten_state(
        {"optimizer": optimizer.state_dict()}
    )
    size = sum(tensor.nbytes for members in tensors.values() for tensor in members.values())
    times: dict[str, list[float]] = {
        "blocking": [],
        "first": [],
        "second": [],
        "forward and backward": [],
    }
    for _ in range(rounds):
        root = Path(tempfile.mkdtemp(dir=folder))
        run = Checkpoints(root, keep_last=1)
        times["blocking"].append(seconds(run.save, 1, tensors, documents))
        run.reserve(tensors, documents)
        for number, name in enumerate(("first", "second")):
            step()  # as in training, between the reservation and the first save
            blocked = seconds(
                run.save, 2 + number, tensors, documents, blocking=False, copy_later=True
            )
            times["forward and backward"].append(seconds(forward_and_backward, model, ids))
            times[name].append(blocked + seconds(run.wait_for_copy))
            run.wait()
        shutil.rmtree(root)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name}: {value * 1e3:.1f} ms, {value / medians['blocking']:.4f} of a blocking save")
    print(f"{size / 1e6:.0f} MB")
    if out is not None:
        out.write_text(
            json.dumps({"environment": environment(), "bytes": size, "seconds": times}, indent=1)
        )


if __name__ == "__main__":
    main()
