"""Do two tensor-parallel GPUs differ from one GPU only in the order of sums?

    torchrun --nproc-per-node 2 benchmarks/tp_seeds.py --out benchmarks/results/tp_seeds_h200_x2.json
    torchrun --nproc-per-node 2 benchmarks/tp_seeds.py --device cpu --seeds 3 --recipes bf16 --out tp_seeds.json

tests/model/test_tensor_parallel.py takes five steps of gradient descent at a rate of 0.1. From each seed of weights and
tokens they are taken by one GPU with plain kernels (those that tensor parallelism has), by two GPUs with and without
sequence parallelism, and by one GPU in other ways that differ from the first by a rounding, its twins:

* "jittered": the outputs of o_proj and down_proj, and the input gradients of qkvg_proj and gate_up_proj, one rounding
  up or down: those are the sums that two GPUs divide. A rounding is BF16's; of FP32 results 2^-14 under FP8, where a
  tensor core truncates its sums, and otherwise FP32's;
* "turned": the hidden channels of every MLP in another order, hence the order of sums (and which elements share a
  block);
* "tipped": one weight of each projection moved to the next number in its dtype;
* "fused": with fused operations, a GPU's default, in BF16;
* "again": nothing is changed; the effect of an order that varies from run to run.

Training magnifies a rounding, so a difference at the fifth step says little by itself. A defect shows in the first
steps, as a mean signed difference that is several times its standard error, or as differences much larger than the
twins'. It reports, for each step, the mean signed relative difference of the loss over the seeds with its standard
error, and its root mean square; and at the first step that of the gradients, by norm.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from te_models import CausalLM
from te_models.inspect.environment import environment
from te_models.model.tensor_parallel import gather_state

TESTS = Path(__file__).parent.parent / "tests"
TWINS = ("jittered", "turned", "tipped", "fused", "again")
SPLITS = {"two": dict(sequence_parallel=False), "two, rows divided": dict(sequence_parallel=True)}
# What is varied of the test's own settings: a dtype, a learning rate.
SETTINGS: dict[str, dict[str, Any]] = {
    "as in the test": dict(rate=0.1),
    "a tenth of the rate": dict(rate=0.01),
    "FP32 weights": dict(rate=0.1, dtype=torch.float32),
    "FP32 weights, a tenth of the rate": dict(rate=0.01, dtype=torch.float32),
}
STEPS = 5


@functools.cache
def test_module() -> Any:
    """tests/model/test_tensor_parallel.py, for its shapes and options."""
    sys.path[:0] = [str(TESTS)]
    spec = importlib.util.spec_from_file_location(
        "test_tensor_parallel", TESTS / "model" / "test_tensor_parallel.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(
    seed: int, recipe: str, device: str, dtype: torch.dtype = torch.bfloat16, **split: Any
) -> CausalLM:
    """The test's model, from a seed; on a GPU by Transformer Engine."""
    test = test_module()
    torch.manual_seed(seed)
    engine = "native" if device == "cuda" else "emulated"
    options = {**test.OPTIONS[recipe], "engine": engine, "device": device, "dtype": dtype, **split}
    model = CausalLM(test.SHAPES["blocks"], recipe=recipe, **options)
    model.te.FP8GlobalStateManager.reset()  # else scales of models that are gone would be reduced too
    return model


@torch.no_grad()
def turn(model: CausalLM, seed: int) -> None:
    """Reorder the hidden channels of every MLP."""
    generator = torch.Generator().manual_seed(seed)
    for block in model.layers:
        up, down = block.mlp.gate_up_proj.weight, block.mlp.down_proj.weight
        order = torch.randperm(down.shape[1], generator=generator).to(down.device)
        up.copy_(torch.cat([half[order] for half in up.chunk(2)]))
        down.copy_(down[:, order])


@torch.no_grad()
def tip(model: CausalLM, seed: int) -> None:
    """Move one weight of each projection to the next number that its dtype has."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "proj.weight" not in name:
            continue
        flat = parameter.view(-1)
        place = int(torch.randint(len(flat), (1,), generator=generator))
        up = bool(torch.randint(2, (1,), generator=generator))
        step = torch.finfo(flat.dtype).eps * (1 if up else -1)
        flat[place] = flat[place] * (1 + step) if flat[place] else torch.finfo(flat.dtype).tiny


def jitter(model: CausalLM, seed: int, size: float) -> None:
    """Have the sums that tensor parallelism divides be `size` larger or smaller, relative, each element by itself."""
    generator = torch.Generator(model.device).manual_seed(seed)

    def moved(x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator, device=x.device) * 2 - 1
        return (x.double() * (1 + size * signs)).to(x.dtype)

    def forward(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + (moved(output.detach()) - output.detach())

    def backward(module: Any, inputs: Any) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(moved)

    for block in model.layers:
        for module in (block.self_attn.o_proj, block.mlp.down_proj):
            module.register_forward_hook(forward)
        for module in (block.self_attn.qkvg_proj, block.mlp.gate_up_proj):
            module.register_forward_pre_hook(backward)


def train(model: CausalLM, seed: int, rate: float) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, and the gradients of the first."""
    losses, gradients = [], {}
    tokens = torch.randint(0, 64, (2, 23), generator=torch.Generator().manual_seed(seed)).to(
        model.device
    )
    for step in range(STEPS):
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        assert loss is not None
        loss.backward()
        if step == 0:
            own = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
            whole = gather_state(own, model.config, model.tp)
            gradients = {name: tensor.float().cpu() for name, tensor in whole.items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
        losses.append(loss.item())
    return losses, gradients


def ways(
    seed: int, recipe: str, device: str, settings: dict[str, Any], mesh: Any
) -> Iterator[tuple[str, Any]]:
    """Every way to take the five steps; each process yields the same names."""
    options = {name: value for name, value in settings.items() if name != "rate"}
    for name, split in SPLITS.items():
        yield (
            name,
            train(
                build(seed, recipe, device, tp_mesh=mesh, **split, **options),
                seed,
                settings["rate"],
            ),
        )
    wide = settings.get("dtype") == torch.float32
    rounding = 2**-8 if not wide else 2**-24 if recipe == "bf16" else 2**-14
    for name in ("one", *TWINS):
        model = build(seed, recipe, device, fused=name == "fused" and not wide, **options)
        if name == "jittered":
            jitter(model, seed, rounding)
        if name == "turned":
            turn(model, seed)
        if name == "tipped":
            tip(model, seed)
        yield name, train(model, seed, settings["rate"])


def gradient_gap(name: str, one: dict[str, Tensor], other: dict[str, Tensor]) -> float | None:
    """Return the relative distance of the first gradients in norm, without channels in another order."""
    if name == "turned":
        one, other = ({n: g for n, g in of.items() if ".mlp." not in n} for of in (one, other))
    gap, size = (
        torch.stack([tensor.norm() for tensor in tensors]).norm()
        for tensors in ([other[n] - g for n, g in one.items()], list(one.values()))
    )
    return float(gap / size)


def summary(runs: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """For each way, against one GPU: mean signed difference and its standard error, root mean square, step by step."""
    found = {}
    for name in (*SPLITS, *TWINS):
        rows = []
        for step in range(STEPS):
            gaps = [
                run[name]["losses"][step] / run["one"]["losses"][step] - 1 for run in runs.values()
            ]
            error = statistics.stdev(gaps) / len(gaps) ** 0.5
            mean = statistics.mean(gaps)
            rows.append(
                dict(mean=mean, standard_error=error, in_errors=mean / error if error else 0.0,
                     root_mean_square=statistics.mean(gap * gap for gap in gaps) ** 0.5, largest=max(map(abs, gaps)))
            )  # fmt: skip
        gradients = [run[name]["gradient_gap"] for run in runs.values()]
        found[name] = dict(
            steps=rows, first_gradient=dict(mean=statistics.mean(gradients), largest=max(gradients))
        )
    return found


def verdict(found: dict[str, Any]) -> list[str]:
    """List differences that look like a defect rather than rounding."""
    said = []
    for name in SPLITS:
        for step in range(STEPS):
            own, twins = found[name]["steps"][step], [found[twin]["steps"][step] for twin in TWINS]
            if abs(own["in_errors"]) > 4 and abs(own["mean"]) > 2 * max(
                abs(twin["mean"]) for twin in twins
            ):
                said.append(
                    f"{name}: step {step + 1} is biased by {own['mean']:+.2e}, {own['in_errors']:+.1f} standard errors"
                )
            usual = max(twin["root_mean_square"] for twin in twins)
            if own["root_mean_square"] > 3 * usual + 1e-6:
                said.append(
                    f"{name}: step {step + 1} differs by {own['root_mean_square']:.2e}, the twins by {usual:.2e}"
                )
    return said


def one_setting(
    recipe: str, device: str, settings: dict[str, Any], seeds: int, mesh: Any
) -> dict[int, dict[str, Any]]:
    """All ways from all seeds: losses, and how far the first gradients are from those of one GPU."""
    runs: dict[int, dict[str, Any]] = {}
    for seed in range(seeds):
        found = dict(ways(seed, recipe, device, settings, mesh))
        reference = found["one"][1]
        runs[seed] = {
            name: dict(losses=losses, gradient_gap=gradient_gap(name, reference, gradients))
            for name, (losses, gradients) in found.items()
        }
    return runs


@click.command()
@click.option("--seeds", default=12, type=click.IntRange(min=2))
@click.option("--recipes", default="bf16,delayed,current,blockwise")
@click.option("--device", default="cuda")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(seeds: int, recipes: str, device: str, out: Path) -> None:
    """Run in both processes; the first one prints and writes."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh, first = init_device_mesh(device, (dist.get_world_size(),)), dist.get_rank() == 0
    document: dict[str, Any] = dict(environment=environment(), seeds=seeds, steps=STEPS, results={})
    for label, settings in SETTINGS.items():
        for recipe in recipes.split(","):
            try:
                runs = one_setting(recipe, device, settings, seeds, mesh)
            except (RuntimeError, ValueError) as error:  # the same in both: the engine cannot do it
                document["results"][f"{recipe}, {label}"] = dict(
                    error=f"{type(error).__name__}: {error}"[:500]
                )
                print(f"{recipe}, {label}: {error}", file=sys.stderr, flush=True)
                continue
            found = summary(runs)
            document["results"][f"{recipe}, {label}"] = dict(
                summary=found, looks_wrong=verdict(found), runs=runs
            )
            if first:
                show(f"{recipe}, {label}", found)
                out.write_text(json.dumps(document, indent=1) + "\n")
    dist.destroy_process_group()


def show(title: str, found: dict[str, Any]) -> None:
    """The first and the last step of every way, in percent."""
    print(title)
    for name, row in found.items():
        cells = [
            f"step {step + 1}: {one['mean']:+.4%} +- {one['standard_error']:.4%}, rms {one['root_mean_square']:.4%}"
            for step, one in enumerate(row["steps"])
            if step in (0, 1, STEPS - 1)
        ]
        print(f"  {name:18} {'; '.join(cells)}; first gradient {row['first_gradient']['mean']:.2e}")
    print("  looks like a defect:", "; ".join(verdict(found)) or "nothing", flush=True)


if __name__ == "__main__":
    main()
