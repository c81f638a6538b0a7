"""The first steps under delayed scaling with and without calibration, beside BF16 and current scaling.

    python benchmarks/calibration.py [--out RESULT.json]
    torchrun --nproc-per-node 2 benchmarks/calibration.py [--out RESULT.json]

One model, one seed and the same tokens in every run: losses and gradient norms of every step, and how far the last loss
is from BF16's. One process also takes a step in two micro-batches; several processes run DDP and FSDP2. Each call adds
its runs to the result.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from te_models.config.presets import get_preset
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.documents import Document, load_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.inspect.environment import environment
from te_models.training.launch import choose_parallel, parallel
from te_models.training.parallel import Parallel
from te_models.training.trainer import Trainer

RECIPES: dict[str, dict[str, Any]] = {
    "bf16": dict(recipe="bf16"),
    "current": dict(recipe="current"),
    "delayed": dict(recipe="delayed"),
    "delayed, scales of 1": dict(recipe="delayed", calibrate=False),
}


def train(
    shared: Parallel, args: argparse.Namespace, documents: list[Document], case: dict[str, Any]
) -> Any:
    """Return the losses and gradient norms of one run; `case` has the recipe, and fields of TrainConfig."""
    case = dict(case)
    recipe, micro_batches = case.pop("recipe"), case.get("gradient_accumulation", 1)
    rate = dict(learning_rate=args.learning_rate, warmup_steps=0, schedule="constant")
    sizes = dict(batch_size=args.batch_size // micro_batches, seq_len=args.seq_len)
    config = TrainConfig(steps=10**6, eval_every=0, **rate, **sizes, **case)
    shared = replace(shared, kind=config.parallel, config=config)
    shape = dict(num_hidden_layers=args.layers) | {
        n: int(v) for n, v in (pair.split("=") for pair in args.set)
    }
    torch.manual_seed(0)
    model = shared.build(
        get_preset(args.preset, **shape), recipe=recipe, device=shared.device or args.device
    )
    model.te.FP8GlobalStateManager.reset()  # of the models before, which Transformer Engine would go on reducing for
    share: dict[str, Any] = dict(rank=shared.data_rank, world_size=shared.data_world, seed=0)
    rows = shared.rows(config.batch_size)
    data = TokenDataset(documents, load_tokenizer(None), config.seq_len, batch_size=rows, **share)
    run = Trainer(model, data, [], config, Path("unused"), parallel=shared)
    steps = list(islice(run.steps(iter(data)), args.steps))
    run.passes.close()
    return {
        "losses": [row["loss"] for row in steps],
        "grad_norms": [row["grad_norm"] for row in steps],
    }


def cases(world: int) -> dict[str, dict[str, Any]]:
    """Return the runs of this number of processes, by name."""
    if world == 1:
        halves = {
            f"{name}, 2 micro-batches": dict(how, gradient_accumulation=2)
            for name, how in RECIPES.items()
        }
        return {**RECIPES, **halves}
    return {
        f"{name}, {kind} on {world}": dict(how, parallel=kind)
        for kind in ("ddp", "fsdp")
        for name, how in RECIPES.items()
    }


def main() -> None:
    """Run all cases, write the JSON after each, and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    place = "h200" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / f"calibration_{place}.json"
    )
    parser.add_argument("--preset", default="gated-124m")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--batch-size", type=int, default=12, help="sequences per step, over all processes"
    )
    parser.add_argument("--seq-len", type=int, default=521)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--device", default=None if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=N", help="a field of the shape"
    )
    args = parser.parse_args()
    documents = load_documents(None)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    config = choose_parallel(TrainConfig(parallel="auto", collective_timeout=600))
    with parallel(config, args.device) as shared:
        known = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
        result = {"environment": environment(), "settings": settings, "runs": known["runs"]}
        for name, case in cases(shared.ranks.world).items():
            found = result["runs"][name] = train(shared, args, documents, case)
            if not shared.ranks.first:
                continue
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
            reference = result["runs"].get("bf16", found)
            first, last = (
                found[key][place] / reference[key][place] - 1
                for key, place in (("grad_norms", 0), ("losses", -1))
            )
            print(
                f"{name:36} first gradient norm {found['grad_norms'][0]:8.4f} ({first:+.2%} against bf16)  "
                f"last loss {found['losses'][-1]:.4f} ({last:+.2%})",
                flush=True,
            )


if __name__ == "__main__":
    main()
