"""Fifty training steps under every mode of activation checkpointing, compared bit for bit with none.

    python benchmarks/checkpoint_parity.py --out benchmarks/results/checkpoint_parity_h200.json      # on a GPU
    python benchmarks/checkpoint_parity.py --engine emulated --recipe delayed --steps 3              # anywhere
    python benchmarks/checkpoint_parity.py --steps 200 --attention own --seq-len 256 --processes 14 --every 10 \
        --out benchmarks/results/checkpoint_parity_cudnn_h100.json

Four layers, three micro-batches per step, an evaluation every fifth step, one forward that is abandoned and one that
ends in an exception. It compares every loss, and after every step gradients, weights, scales and amax histories, and
counts the scale updates of a step. Attention runs PyTorch's plain kernel: the gradients of the fused ones vary from run
to run. With `--attention own` it runs what a training run takes, cuDNN's from 128 tokens on, or with --deterministic
the deterministic kernel. "again" is none once more: where it differs, a mode cannot be equal either.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch
from torch.nn.attention import SDPBackend

from te_models import CausalLM
from te_models.device.determinism import deterministic
from te_models.fp8.primary_weights import plain, quantized_weights
from te_models.fp8.scaling_state import fp8_state
from te_models.inspect.environment import environment
from te_models.kernels import sdpa
from te_models.optim import build_optimizer

RECIPES: dict[str, dict[str, Any]] = {
    "bf16": dict(recipe="bf16"),
    "delayed": dict(recipe="delayed", amax_history_len=16, amax_compute_algo="most_recent"),
    "delayed_max": dict(recipe="delayed", amax_history_len=16, amax_compute_algo="max"),
    "current": dict(recipe="current"),
    "blockwise": dict(recipe="blockwise"),
    "mxfp8": dict(recipe="mxfp8"),
}
MODES: tuple[str | int, ...] = ("none", "selective", "full", 2)
SHAPE = dict(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
MICRO_BATCHES = 3


def digest(model: CausalLM) -> str:
    """Return one hash of everything that a step changes."""
    found = hashlib.sha256()
    parameters = dict(model.named_parameters())
    values = {name: plain(p) for name, p in parameters.items()}
    values |= {f"{name}.grad": p.grad for name, p in parameters.items() if p.grad is not None}
    for name, tensor in sorted((values | quantized_weights(model) | fp8_state(model)).items()):
        found.update(name.encode())
        found.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


def run(
    options: dict[str, Any], mode: str | int, steps: int, cache: bool, seq_len: int, every: int
) -> dict[str, Any]:
    """Return the losses, a hash per `every` steps, and how often a step updated forward and backward scales."""
    torch.manual_seed(0)
    model = CausalLM.from_preset(
        "gated-nano",
        activation_checkpointing="none" if mode == "again" else mode,
        compile=False,
        **SHAPE,
        **options,
    )
    model.te.FP8GlobalStateManager.reset()
    optimizer = build_optimizer("adamw", model, lr=1e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Any] = {"losses": [], "digests": [], "updates": []}
    counts = {True: 0, False: 0}
    registry = model.te.FP8GlobalStateManager
    original = registry.reduce_and_update_fp8_tensors

    def counting(forward: bool = True) -> None:
        counts[forward] += 1
        original(forward)

    def loss_of(**how: Any) -> torch.Tensor:
        ids = torch.randint(0, model.config.vocab_size, (4, seq_len), generator=generator).to(
            model.device
        )
        loss = model(ids, labels=ids, **how).loss
        assert loss is not None
        return loss

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    registry.reduce_and_update_fp8_tensors = staticmethod(counting)
    try:
        for step in range(steps):
            if step == 1:
                loss_of()  # its backward never comes
            if step == 2:
                hook = model.layers[2].mlp.down_proj.register_forward_pre_hook(fail)
                with contextlib.suppress(ZeroDivisionError):
                    loss_of()
                hook.remove()
            counts[True] = counts[False] = 0
            for micro in range(MICRO_BATCHES):
                loss = loss_of(is_first_microbatch=micro == 0 if cache else None)
                (loss / MICRO_BATCHES).backward()
                found["losses"].append(loss.item())
            found["updates"].append([counts[True], counts[False]])
            if step % every == every - 1:
                found["digests"].append(digest(model))
            optimizer.take_gradients(1.0)
            optimizer.step()
            if step % 5 == 4:
                with torch.no_grad():
                    found["losses"].append(loss_of().item())
    finally:
        registry.reduce_and_update_fp8_tensors = original
    return found


def attempt(
    task: tuple[tuple[str, bool, bool], str | int], engine: str, steps: int, attention: str, exact: bool, seq_len: int,
    every: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the run of a case (a recipe, with FP8 weights or not, with quantized weights shared or not) in a mode, or
    why there is none."""
    (name, fp8_params, cache), mode = task
    options = dict(RECIPES[name], engine=engine, fp8_params=fp8_params)
    if attention == "plain":
        sdpa.CUDA_ORDER = sdpa.SMALL_ORDER = [SDPBackend.MATH]
    try:
        with deterministic() if exact else contextlib.nullcontext():
            return run(options, mode, steps, cache, seq_len, every)
    except Exception as error:  # one case that fails must not cost the others
        kind = "skipped" if isinstance(error, ValueError) else "error"
        print(name, f"{kind}:", error, flush=True)
        return {kind: str(error)}


def compare(
    case: tuple[str, bool, bool], runs: dict[str | int, dict[str, Any]], every: int
) -> list[dict[str, Any]]:
    """Return a row for each mode of a case, or one that says why there is none."""
    name, fp8_params, cache = case
    labels: dict[str, Any] = dict(recipe=name, fp8_params=fp8_params, cached_weights=cache)
    for found in runs.values():
        if "losses" not in found:
            return [labels | found]
    rows = []
    expected = runs["none"]
    for mode, found in runs.items():
        if mode == "none":
            continue
        same = {part: found[part] == expected[part] for part in ("losses", "digests", "updates")}
        equal = [a == b for a, b in zip(found["digests"], expected["digests"], strict=True)]
        difference = None
        if False in equal:
            difference = every * (equal.index(False) + 1)
        rows.append(
            labels
            | dict(
                mode=mode,
                same=same,
                first_difference=difference,
                last_loss=found["losses"][-1],
                updates_a_micro_batch=[n / MICRO_BATCHES for n in found["updates"][-1]],
            )
        )
        print(rows[-1], flush=True)
    return rows


@click.command()
@click.option("--out", type=click.Path(path_type=Path))
@click.option("--engine", default="native", type=click.Choice(["native", "emulated"]))
@click.option("--steps", default=50)
@click.option("--every", default=1, help="Steps between comparisons of weights and gradients.")
@click.option("--seq-len", default=64)
@click.option("--attention", default="plain", type=click.Choice(["plain", "own"]))
@click.option("--deterministic", "exact", is_flag=True)
@click.option("--processes", default=1, help="Runs at a time.")
@click.option(
    "--recipe",
    "only",
    multiple=True,
    type=click.Choice(list(RECIPES)),
    help="May be repeated; default: all.",
)
def main(
    out: Path | None, engine: str, steps: int, every: int, seq_len: int, attention: str, exact: bool, processes: int,
    only: tuple[str, ...],
) -> None:  # fmt: skip
    """Compare; exits with 1 if a bit differs."""
    cases = []
    for name in only or RECIPES:
        for fp8_params, cache in ((False, False), (False, True), (True, False)):
            if not (fp8_params and name == "bf16"):
                cases.append((name, fp8_params, cache))
    settings = dict(
        engine=engine, steps=steps, attention=attention, exact=exact, seq_len=seq_len, every=every
    )
    modes = MODES if attention == "plain" else (*MODES, "again")
    tasks = [(case, mode) for case in cases for mode in modes]
    runs: dict[tuple[str, bool, bool], dict[str | int, dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        found_runs = pool.map(functools.partial(attempt, **settings), tasks)
        for (case, mode), found in zip(tasks, found_runs, strict=True):
            runs.setdefault(case, {})[mode] = found
            if len(runs[case]) < len(modes):
                continue
            rows += compare(case, runs.pop(case), every)
            if out is not None:
                result = {"environment": environment(), **settings, "shape": SHAPE, "rows": rows}
                out.write_text(json.dumps(result, indent=1))
    failed = any("error" in row or not all(row.get("same", {}).values()) for row in rows)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
