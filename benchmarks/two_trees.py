"""Time the same training steps with two trees of te_models, in turns on one GPU.

Each tree runs in a process of its own and takes turns with the other, so that a busy or hot GPU slows both:

    python benchmarks/two_trees.py --before .before --after . --out two_trees.json

`--before` and `--after` are folders that contain a te_models package, for example one that
`git archive 168845b2 te_models recipes | tar x -C .before` made. A step is forward and backward of one batch. The
first losses of each step, which both trees compute with the same weights and tokens, are printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

# Preset, recipe, batch size, sequence length, and how the step runs: as one CUDA graph, or launched by Python.
CASES = [
    ("gated-1b", "delayed", 4, 2048, "graph"),
    ("gated-896", "bf16", 4, 2048, "graph"),
    ("gated-896", "bf16", 1, 512, "eager"),
]


def graph_step(model, ids):
    """Return a function that replays forward and backward as one CUDA graph and returns the loss."""
    from te_models.training.cuda_graph import GraphedStep

    graphed = GraphedStep(model)
    return lambda: graphed(input_ids=ids, labels=ids)


def eager_step(model, ids):
    """Return a function that launches forward and backward from Python and returns the loss."""

    def step():
        loss = model(ids, labels=ids, return_logits=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss

    return step


def serve(folder: str) -> None:
    """Run the steps that standard input asks for with the te_models in `folder`; answer in lines of JSON.

    A line "gated-1b delayed 4 2048 graph" builds that step, "run 10" times ten of them in milliseconds, "end" ends.
    """
    sys.path.insert(0, folder)
    import torch

    import te_models
    from te_models import CausalLM

    assert Path(te_models.__file__).is_relative_to(Path(folder).resolve()), te_models.__file__
    # Only the answers go to the pipe; whatever else prints goes to the terminal.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    step = None
    for line in sys.stdin:
        words = line.split()
        if words[0] == "end":
            return
        if words[0] == "run":
            begins = [torch.cuda.Event(enable_timing=True) for _ in range(int(words[1]))]
            ends = [torch.cuda.Event(enable_timing=True) for _ in begins]
            for begin, end in zip(begins, ends, strict=True):
                begin.record()
                step()
                end.record()
            torch.cuda.synchronize()
            answer = [begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)]
        else:
            preset, recipe, batch_size, seq_len, mode = words
            step = None
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            model = CausalLM.from_preset(
                preset, recipe=recipe, device="cuda", engine="native", fused=True
            )
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(
                0, model.config.vocab_size, (int(batch_size), int(seq_len)), generator=generator
            )
            ids = ids.cuda()
            step = graph_step(model, ids) if mode == "graph" else eager_step(model, ids)
            losses = [step().item() for _ in range(4)]
            answer = {"losses": losses, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        print(json.dumps(answer), file=answers, flush=True)


class Tree:
    """A process that runs steps with the te_models of one folder."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, __file__, "--serve", str(Path(folder).resolve())]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, request: str) -> None:
        """Send a request to the process without a wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()

    def answer(self) -> object:
        """Return the answer to the oldest open request."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended without an answer; its traceback is above")
        return json.loads(line)

    def ask(self, request: str) -> object:
        """Return the answer to a request."""
        self.send(request)
        return self.answer()


def main() -> None:
    """Time all cases, print their medians and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before")
    parser.add_argument("--after", default=".")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="steps per round and tree")
    parser.add_argument("--out", default="two_trees.json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return

    # Not at the top: a process that serves a tree imports its te_models alone.
    from te_models.inspect.environment import environment, require_gpu

    require_gpu()
    result = {"environment": environment(), "rows": []}
    start = time.monotonic()
    # Imports take many seconds and run side by side.
    trees = {"before": Tree(arguments.before), "after": Tree(arguments.after)}
    for words in CASES:
        case = " ".join(map(str, words))
        for tree in trees.values():
            tree.send(case)
        built = {name: tree.answer() for name, tree in trees.items()}
        times: dict[str, list[float]] = {"before": [], "after": []}
        for number in range(arguments.rounds + 1):
            # The tree that begins changes from round to round.
            order = list(trees) if number % 2 else list(reversed(trees))
            for name in order:
                measured = trees[name].ask(f"run {arguments.steps}")
                if number:  # the first round is a warm-up
                    times[name] += measured
        row = {"case": case}
        for name in trees:
            low, middle, high = statistics.quantiles(times[name], n=4)
            row[name] = {"ms": middle, "ms_quartiles": [low, high], **built[name]}
        row["speed"] = row["before"]["ms"] / row["after"]["ms"]
        result["rows"].append(row)
        print(
            f"{case}: speed of after {row['speed']:.4f} of before, {time.monotonic() - start:.0f} s"
        )
        for name in trees:
            print(f"  {name}: {json.dumps(row[name])}")
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    for tree in trees.values():
        tree.send("end")


if __name__ == "__main__":
    main()
