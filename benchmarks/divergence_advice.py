"""A report's troubleshooting of divergence, tried: each cause planted, and the loss with the change that it advises.

    python benchmarks/divergence_advice.py --out benchmarks/results/divergence_advice_cpu.json

gated-nano, which ships, is trained on. Each failure leaves the function of the model as it is, in exact arithmetic, so
that BF16 with the same failure is what FP8 is to be near. Under test are a recipe with scales per block, the first and
last layers in BF16, and a longer history of amaxes. Beside each there is a change that the cause does not ask for.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import te_models
from te_models import CausalLM
from te_models.config.attention import AttentionSpec
from te_models.data.dataset import TokenDataset
from te_models.data.documents import load_documents, split_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.inspect.environment import environment
from te_models.optim import build_optimizer

MODEL = Path(te_models.__file__).parent / "pretrained" / "gated-nano"
LAYERS = 6
STEPS = 24
LAST = 12  # steps whose losses are compared
OUTLIER = 2.0**15  # of a channel, which other weights undo
SPIKE = 2.0**6  # of the inputs of linears in some steps, whose weights undo it
RATE = 3e-4
EVERY = 3  # steps between two spikes
DELAYED = dict(recipe="delayed", num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
SHORT = dict(amax_history_len=1024, amax_compute_algo="most_recent")


@dataclass(frozen=True)
class Failure:
    """A failure and what is tried against it.

    Attributes:
        cause: what is planted, in a few words.
        layers: those whose inputs get an outlier channel, of six; none: all inputs are larger in some steps.
        options: the recipe under which it shows.
        advised: the options that the report advises.
        other: options that it advises for another cause.
    """

    cause: str
    layers: tuple[int, ...]
    advised: dict[str, Any]
    other: dict[str, Any]
    options: dict[str, Any] = field(default_factory=lambda: dict(DELAYED))


EDGES = dict(num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)
FAILURES = {
    "another recipe": Failure(
        "an outlier channel in every layer",
        tuple(range(LAYERS)),
        dict(recipe="mxfp8", num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0),
        {**DELAYED, "amax_history_len": 2048},
    ),
    "first and last layers in BF16": Failure(
        "an outlier channel in the first and in the last layer",
        (0, LAYERS - 1),
        {**DELAYED, **EDGES},
        {**DELAYED, "amax_history_len": 2048},
    ),
    "a longer history": Failure(
        "inputs that are 64 times as large in one of three steps",
        (),
        {**DELAYED, "amax_history_len": 2048, "amax_compute_algo": "max"},
        {**DELAYED, **SHORT, **EDGES},
        options={**DELAYED, **SHORT},
    ),
}


def pairs_of(model: CausalLM, layers: Iterable[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the weights of every norm of these layers, and of the linear that reads it."""
    for number in layers:
        block = model.layers[number]
        assert isinstance(model.config.layers[number].mixer, AttentionSpec)
        yield block.input_layernorm.weight, block.self_attn.qkvg_proj.weight
        yield block.post_attention_layernorm.weight, block.mlp.gate_up_proj.weight


@torch.no_grad()
def plant(model: CausalLM, layers: tuple[int, ...]) -> None:
    """Make the first channel of what both norms of these layers put out larger, and its weights smaller by as much."""
    for norm, linear in pairs_of(model, layers):
        norm[0] *= OUTLIER
        linear[:, 0] /= OUTLIER
        # Neither is trained: a step of the usual size would change so small a weight beyond recognition.
        norm.register_hook(partial(_without, slice(0, 1)))
        linear.register_hook(partial(_without, (slice(None), 0)))


@contextmanager
def spike(model: CausalLM) -> Iterator[None]:
    """Make the inputs of all layers larger inside, and weights smaller by as much; gradients become those without."""
    pairs = list(pairs_of(model, range(LAYERS)))
    with torch.no_grad():
        for norm, linear in pairs:
            norm *= SPIKE
            linear /= SPIKE
    yield
    with torch.no_grad():
        for norm, linear in pairs:
            norm /= SPIKE
            linear *= SPIKE
            assert norm.grad is not None and linear.grad is not None
            norm.grad *= SPIKE
            linear.grad /= SPIKE


def _without(place: Any, gradient: Tensor) -> Tensor:
    """Return the gradient with zeros at a place."""
    gradient = gradient.clone()
    gradient[place] = 0
    return gradient


def train(failure: Failure, planted: bool, options: dict[str, Any], seed: int) -> list[float]:
    """Return the loss of each step."""
    torch.manual_seed(seed)
    model = CausalLM.from_pretrained(MODEL, **options, device="cpu", engine="emulated").train()
    if planted:
        plant(model, failure.layers)
    model.te.FP8GlobalStateManager.reset()
    optimizer = build_optimizer("adamw", model, RATE, 0.0)
    documents, _ = split_documents(load_documents(None), seed=0)
    data = iter(TokenDataset(documents, load_tokenizer(MODEL), 64, batch_size=4, seed=seed))
    losses = []
    for step in range(STEPS):
        batch = next(data)
        if step == 0:
            model.calibrate(batch)
        spikes = planted and not failure.layers and step % EVERY == EVERY - 1
        with spike(model) if spikes else nullcontext():
            loss = model(**batch, return_logits=False).loss
            assert loss is not None
            loss.backward()
        optimizer.take_gradients(1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def distance(losses: list[float], wanted: list[float]) -> float:
    """Return the mean loss of the last steps above that of other losses."""
    return statistics.mean(losses[-LAST:]) - statistics.mean(wanted[-LAST:])


def measure(failure: Failure, say: Callable[[str], None], seeds: int) -> dict[str, Any]:
    """Return how far FP8's losses are above BF16's: without the failure, with it, and with each of the changes."""
    rows: dict[str, list[float]] = {"healthy": [], "planted": [], "advised": [], "other": []}
    for seed in range(seeds):
        healthy = train(failure, False, {"recipe": "bf16"}, seed)
        wanted = train(failure, True, {"recipe": "bf16"}, seed)
        rows["healthy"].append(distance(train(failure, False, failure.options, seed), healthy))
        for name, options in (
            ("planted", failure.options),
            ("advised", failure.advised),
            ("other", failure.other),
        ):
            rows[name].append(distance(train(failure, True, options, seed), wanted))
        say(", ".join(f"{name} {values[-1]:+.4f}" for name, values in rows.items()))
    return dict(
        cause=failure.cause, options=failure.options, advised=failure.advised, other=failure.other, distances=rows
    )  # fmt: skip


def main() -> None:
    """Try every failure from each seed, and write the distances."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).parent / "results" / "divergence_advice_cpu.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    result: dict[str, Any] = dict(
        environment=environment(), model=MODEL.name, steps=STEPS, last=LAST, rows={}
    )
    for name, failure in FAILURES.items():
        print(f"{failure.cause}: {name}", flush=True)
        result["rows"][name] = measure(failure, print, given.seeds)
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
