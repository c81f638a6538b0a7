"""A fingerprint of the GPU ("card") that a run was trained on: a few of its products, with operands, and a loss.

A recorded run writes it when it ends, into the folder record/card; `te-models verify --against RUN` computes the same
products on another card (te_models.inspect.against), which shows whether the two compute alike.

A product is a sample of a te.Linear of the model: the first rows of its weight over the whole of K, and rows of its
real input. The three GEMMs run under the te.Linear's own recipe, with scales that follow the sampled operands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.config.recipe import Recipe, recipe_from_dict
from te_models.errors import DataError
from te_models.fp8.primary_weights import quantized
from te_models.fp8.region import evaluating
from te_models.fp8.scaling_state import frozen_fp8_state
from te_models.model.te_modules import pad_rows
from te_models.recorder.record import FOLDER as RECORD
from te_models.saving.checkpoint_choice import check_run
from te_models.saving.folder import load_folder, save_folder
from te_models.training.captures import device_name
from te_models.training.evaluation import Batch, evaluate, to_device
from te_models.training.recording import linear_name, quantizing_modules
from te_models.training.run_file import versions

if TYPE_CHECKING:
    from te_models.training.trainer import Trainer

CARD = "card"
GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = ("input", "weight", "grad_output")
# Rows of a sample's input, and of its weight: so many that cuBLAS need not split K to fill a GPU.
ROWS = 256
LINEARS = 4  # te.Linears that are sampled
WARM_UP = 3  # passes before the one that counts: a delayed scale follows its tensor one pass late
SEED = 2711  # of output gradients, and of stochastic rounding


@dataclass(frozen=True)
class LinearSample:
    """A sample of a te.Linear.

    Attributes:
        name: of the te.Linear in the model.
        recipe: its own.
        operands: input [N, K], weight [M, K] and output gradient [N, M], in the model's dtype, on the CPU.
        results: of each of GEMMS: y [N, M], dx [N, K] and dw [M, K], in the model's dtype, on the CPU.
    """

    name: str
    recipe: Recipe
    operands: dict[str, Tensor]
    results: dict[str, Tensor]


@dataclass(frozen=True)
class Card:
    """A card as a run recorded it.

    Attributes:
        device, engine: of the run.
        capability: compute capability, such as [9, 0]; None on a CPU.
        versions: of the packages that numbers depend on.
        step: the step after which it was recorded, when the run ended.
        batch: the first sequences of the last micro-batch.
        loss: of the model on it after that step; NaN if it is not finite.
        deterministic: whether the run was, and the loss therefore: its attention adds in another order.
        linears: samples of te.Linears.
    """

    device: str
    engine: str
    capability: list[int] | None
    versions: dict[str, str]
    step: int
    batch: Batch
    loss: float
    deterministic: bool
    linears: list[LinearSample]


def keep_card(trainer: Trainer) -> None:
    """Write the card of a recorded run that ends; nothing for a model without te.Linears in FP8.

    All processes call this together; the first one writes. No state of the run changes.
    """
    model = trainer.model
    drawn = trainer.drawn
    if trainer.recorder is None or drawn is None:
        return
    micro_batch = drawn.micro_batches[-1]
    # As many whole sequences as have ROWS tokens together.
    sequences = math.ceil(ROWS / micro_batch["input_ids"].shape[1])
    batch = _of_first({name: tensor[:sequences] for name, tensor in micro_batch.items()}, trainer)
    samples = []
    # Under delayed scaling an autocast that ends updates the scales of all te modules.
    with frozen_fp8_state(model):
        for name, (tensors, recipe) in _operands(model, batch).items():
            for tensor in tensors.values():
                _same_on_all_ranks(tensor)
            results = compute(model.te, tensors, recipe)
            samples.append(LinearSample(name, recipe, _on_cpu(tensors), _on_cpu(results)))
    loss = evaluate(model, [batch])
    if not samples or not trainer.parallel.ranks.first:
        return
    cuda = trainer.device.type == "cuda"
    card = Card(
        device=device_name(trainer.device),
        engine=model.engine,
        capability=list(torch.cuda.get_device_capability(trainer.device)) if cuda else None,
        versions=dict(versions()),
        step=trainer.result.step,
        batch=batch,
        loss=loss,
        deterministic=trainer.config.deterministic,
        linears=samples,
    )
    write_card(trainer.out, card)


def write_card(run: Path, card: Card) -> None:
    """Write the card of a run."""
    tensors = {}
    linears = []
    # Numbered, since a linear's own name has dots too.
    for number, sample in enumerate(card.linears):
        for name, tensor in (*sample.operands.items(), *sample.results.items()):
            tensors[f"{number}.{name}"] = tensor
        linears.append({"name": sample.name, "recipe": sample.recipe.to_dict()})
    document = {
        "device": card.device,
        "engine": card.engine,
        "capability": card.capability,
        "versions": card.versions,
        "step": card.step,
        "loss": card.loss if math.isfinite(card.loss) else None,
        "deterministic": card.deterministic,
        "linears": linears,
    }
    save_folder(run / RECORD / CARD, {"gemms": tensors, "batch": card.batch}, {CARD: document})


def read_card(run: str | Path) -> Card:
    """Return the card that a run recorded.

    Raises:
        DataError: it recorded none, or there is no such folder, or it is not the folder of a run.
    """
    check_run(run)
    folder = Path(run) / RECORD / CARD
    if not folder.is_dir():
        raise DataError(
            f"{run} has recorded no card: a run with --record and an FP8 recipe does so when it ends"
        )
    opened = load_folder(folder, ["gemms", "batch", CARD])
    document: Any = opened.documents[CARD]
    tensors = opened.tensors["gemms"]
    linears = []
    for number, entry in enumerate(document["linears"]):
        linears.append(
            LinearSample(
                name=entry["name"],
                recipe=recipe_from_dict(entry["recipe"]),
                operands={name: tensors[f"{number}.{name}"] for name in OPERANDS},
                results={name: tensors[f"{number}.{name}"] for name in GEMMS},
            )
        )
    batch = dict(opened.tensors["batch"])
    about = {name: document[name] for name in ("device", "engine", "capability", "versions")}
    loss = math.nan if document["loss"] is None else document["loss"]
    return Card(
        **about,
        step=document["step"],
        batch=batch,
        loss=loss,
        # Cards of earlier versions do not say it.
        deterministic=document.get("deterministic", False),
        linears=linears,
    )


@torch.enable_grad()
def compute(te: ModuleType, operands: dict[str, Tensor], recipe: Recipe) -> dict[str, Tensor]:
    """Return the results of a sample's three GEMMs on an engine, where its operands are: y, dx and dw by GEMMS."""
    x = operands["input"].detach().requires_grad_()
    weight = operands["weight"]
    te_recipe = recipe.build(te)

    def one_pass() -> tuple[Tensor, Tensor, Tensor]:
        with te.autocast(enabled=True, recipe=te_recipe):
            y = linear(x)
        dx, dw = torch.autograd.grad(y, (x, linear.weight), operands["grad_output"])
        return y.detach(), dx, dw

    # A new te.Linear draws its weights, which must not move the caller's random numbers.
    with torch.random.fork_rng([weight.device] if weight.is_cuda else []):
        torch.manual_seed(SEED)
        linear = te.Linear(
            weight.shape[1],
            weight.shape[0],
            bias=False,
            params_dtype=weight.dtype,
            device=weight.device,
        )
        with torch.no_grad():
            linear.weight.copy_(weight)
        for _ in range(WARM_UP):
            one_pass()
        # The emulated engine leaves the order of large sums to this machine's libraries, if it is not told otherwise.
        with getattr(te, "exact_unless_set", contextlib.nullcontext)():
            results = one_pass()
    te.reset_fp8_state(linear)
    return dict(zip(GEMMS, results, strict=True))


@torch.no_grad()
def _operands(model: CausalLM, batch: Batch) -> dict[str, tuple[dict[str, Tensor], Recipe]]:
    """Return name of a te.Linear -> the operands of its sample, and its recipe, from a forward pass over `batch`."""
    chosen = dict(_chosen(model))
    operands: dict[str, tuple[dict[str, Tensor], Recipe]] = {}

    def sample(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        (x, *_) = inputs
        recipe = chosen[name]
        weight = module.get_parameter("weight")
        fp8_weight = quantized(weight)
        rows = x.reshape(-1, x.shape[-1])[:ROWS]
        # The emulated engine adds no rows of zeros to a pass without a backward, but these products need them.
        alignment = recipe.row_alignment
        count = -(-len(rows) // alignment) * alignment
        if fp8_weight is None:
            values = weight.detach()
        else:
            values = fp8_weight.dequantize(dtype=model.dtype).detach()
        tensors = {
            "input": pad_rows(rows, count).clone(),
            "weight": values[:ROWS].to(model.dtype).clone(),
        }
        generator = torch.Generator().manual_seed(SEED)
        # Drawn on the CPU, so that each device gets the same numbers.
        gradient = torch.randn(count, len(tensors["weight"]), generator=generator)
        tensors["grad_output"] = gradient.to(model.device, model.dtype)
        operands[linear_name(name)] = tensors, recipe

    modules = dict(quantizing_modules(model))
    hooks = []
    for name in chosen:
        hook = functools.partial(sample, name)
        hooks.append(modules[name].register_forward_hook(hook))
    try:
        # With fused kernels the input of a te.Linear may be quantized already.
        with frozen_fp8_state(model), evaluating(model, model.te, model.recipe), model.unfused():
            model(**to_device(batch, model.device), return_logits=False)
    finally:
        for hook in hooks:
            hook.remove()
    return operands


def _chosen(model: CausalLM) -> Iterator[tuple[str, Recipe]]:
    """Yield name and recipe of each te.Linear to sample: one per recipe and K, the longest K first."""
    lengths: dict[tuple[str, int], tuple[str, Recipe]] = {}
    for name, module in quantizing_modules(model):
        recipe = model.precision.recipe_of(name)
        if recipe is None or isinstance(module, model.te.GroupedLinear):
            continue
        if recipe.scheme == "NVFP4BlockScaling":
            # Random numbers are another sequence on another kind of device.
            recipe = recipe.replace(disable_stochastic_rounding=True)
        recipe = dataclasses.replace(recipe, precision={})
        # The first of its recipe and K stands for all: the same kernels run for the others.
        lengths.setdefault((recipe.name, module.in_features), (name, recipe))
    by_length = sorted(lengths, key=lambda key: -key[1])
    for key in by_length[:LINEARS]:
        yield lengths[key]


def _of_first(batch: Batch, trainer: Trainer) -> Batch:
    """Return the first process's batch: operands, which processes share, would have other sizes from other batches."""
    ranks = trainer.parallel.ranks
    if ranks.world == 1:
        return batch
    of_first = ranks.from_first(lambda: {name: tensor.tolist() for name, tensor in batch.items()})
    # All of them have the same names and dtypes, as the model takes them.
    return {name: torch.tensor(rows, dtype=batch[name].dtype) for name, rows in of_first.items()}


def _same_on_all_ranks(tensor: Tensor) -> None:
    """Give all processes the first one's values, since they reduce the amaxes of delayed scaling together."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tensor, src=0)


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
