"""Time the training step of recipes and of their alternatives in one process.

All variants exist side by side and take turns, so that a busy or throttling machine slows all of them; results are
medians with quartiles. A variant's peak memory is measured while it is built and warmed up, less the memory of the
others.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from te_models.causal_lm import CausalLM
from te_models.config.model import ModelConfig
from te_models.config.recipe import AUTO, EDGES, RECIPE_FIELDS, SCHEMES, get_recipe
from te_models.engine import get_engine
from te_models.errors import UsageError, check_known, check_least, unknown
from te_models.files.formats import Fields
from te_models.inspect.environment import environment
from te_models.inspect.peers import PEERS, StepFunction, peer_step, step_of
from te_models.inspect.roofline import Roofline, model_flops, roofline, timed
from te_models.training.cuda_graph import GraphedStep

# Options that may follow a recipe after a "+", such as "delayed+fused+graph".
WAYS: dict[str, dict[str, object]] = {
    "fused": {"fused": True},
    "plain": {"fused": False},
    "eager": {"compile": False},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "fp8_params": {"fp8_params": True},
    "graph": {"cuda_graph": True},
    "no_edges": {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0},
    "offload": {"activation_offload": True},
}


@dataclass(eq=False)
class Measured:
    """The measurements of one variant.

    Attributes:
        name: its name in the table.
        flops: floating-point operations of a forward and backward.
        loss: of the last pass before the timed ones, in nats per token.
        peak_gib: its peak memory in GiB; None on a CPU.
        ms: milliseconds of each timed forward and backward.
    """

    name: str
    flops: float
    loss: float = 0.0
    peak_gib: float | None = None
    ms: list[float] = field(default_factory=list)

    def row(self, tokens: int, floor: Roofline | None, reference: Measured) -> Fields:
        """Return the row of the table and of the JSON; a `speed` above 1 is faster than `reference` at equal FLOPs."""
        median = statistics.median(self.ms)
        quartiles = [median, median]
        if len(self.ms) > 1:
            low, _, high = statistics.quantiles(self.ms, n=4)
            quartiles = [low, high]
        row = dict(
            name=self.name,
            ms=median,
            ms_quartiles=quartiles,
            tokens_per_second=1e3 * tokens / median,
            model_tflops=self.flops / median / 1e9,
            peak_gib=self.peak_gib,
            loss=self.loss,
            speed=statistics.median(reference.ms) / median * self.flops / reference.flops,
        )
        if floor is not None:
            row["of_roofline"] = floor.total / median * self.flops / reference.flops
        return row


def parse(recipe: str) -> tuple[str, Fields]:
    """Split "delayed+fused" into ("delayed", {"fused": True}); an unknown name is an error."""
    name, *ways = recipe.split("+")
    if name != AUTO:
        # Raises a UsageError for an unknown name.
        get_recipe(name)
    options: Fields = {}
    for way in ways:
        check_known("way to run a recipe", way, WAYS)
        options |= WAYS[way]
    return name, options


def model_step(
    ids: torch.Tensor, config: ModelConfig, cuda_graph: bool = False, **options: Any
) -> StepFunction:
    """Return a function that runs forward and backward of CausalLM(config, **options) on ids [B, S], for the loss.

    With `cuda_graph` the step is replayed as one CUDA graph.
    """
    model = CausalLM(config, **options)
    if cuda_graph:
        graphed = GraphedStep(model)
        return lambda: graphed(input_ids=ids, labels=ids)

    return step_of(model, lambda: model(ids, labels=ids, return_logits=False).loss)


def builders(
    config: ModelConfig,
    recipes: Sequence[str],
    peers: Sequence[str],
    ids: torch.Tensor,
    **options: object,
) -> dict[str, Callable[[], StepFunction]]:
    """Return name -> function that builds the step of that variant, peers first. `options` are CausalLM's."""
    steps: dict[str, Callable[[], StepFunction]] = {}
    for name in peers:
        if name not in PEERS:
            raise unknown("peer", name, [*PEERS, "none"])
        # Built one by one, when their turn comes: the parameter keeps the name of this turn of the loop.
        steps[name] = lambda name=name: peer_step(PEERS[name](config, ids.device), ids)
    for option in options:
        if not any(_applies(option, parse(text)[0]) for text in recipes):
            raise UsageError(
                f"{option} is for none of the recipes that are timed ({', '.join(recipes) or 'none'}): leave it out"
            )
    for text in recipes:
        recipe, ways = parse(text)
        recipe_options = {name: value for name, value in options.items() if _applies(name, recipe)}
        keywords: Fields = {**recipe_options, **ways, "device": ids.device, "recipe": recipe}
        steps[f"te-models {text}"] = lambda keywords=keywords: model_step(ids, config, **keywords)
    return steps


def _applies(option: str, recipe: str) -> bool:
    """Return whether this recipe has the option; amax_history_len, for example, belongs to delayed scaling only.

    The table `precision` is for recipes in FP8: BF16 stays what they are compared with.
    """
    if option not in RECIPE_FIELDS:
        return True
    # What "auto" will choose is not known yet.
    scheme = "none" if recipe == AUTO else get_recipe(recipe).scheme
    precision_fields = {*EDGES} - ({"precision"} if scheme == "none" else set())
    return option in {*precision_fields, *SCHEMES[scheme].fields}


def bench(
    config: ModelConfig,
    recipes: Sequence[str],
    peers: Sequence[str] = (),
    *,
    batch_size: int,
    seq_len: int,
    steps: int = 15,
    warm_up: int = 3,
    device: torch.device,
    progress: Callable[[str], None] = lambda line: None,
    **options: object,
) -> dict[str, object]:
    """Measure every variant and return {"environment", "settings", "reference", "roofline", "rows"} for JSON.

    Args:
        recipes: recipes such as "delayed", with options from `WAYS` such as "delayed+fused".
        peers: names from te_models.inspect.peers.PEERS.
        steps: timed rounds, after `warm_up` others; in each, every variant runs once on batch_size x seq_len tokens.
        progress: called with a line per stage.
        options: options of CausalLM, such as `engine` and recipe fields.

    Raises:
        UsageError: for an unknown recipe, option or peer, naming the nearest one, and for a size below its least.
    """
    sizes = dict(batch_size=batch_size, seq_len=seq_len, steps=steps, warm_up=warm_up)
    check_least(1, batch_size=batch_size, seq_len=seq_len, steps=steps)
    check_least(0, warm_up=warm_up)
    # Import Transformer Engine before any use of cuDNN (te_models/device/cudnn.py).
    get_engine("auto", device)
    # On the CPU, so that every device gets the same ids.
    ids = torch.randint(
        0, config.vocab_size, (batch_size, seq_len), generator=torch.Generator().manual_seed(0)
    )
    ids = ids.to(device)
    results: dict[Measured, StepFunction] = {}
    clock = timed if device.type == "cuda" else _wall
    # Every variant compiles the same functions for its own shapes.
    with torch._dynamo.config.patch(recompile_limit=64):
        for name, build in builders(config, recipes, peers, ids, **options).items():
            progress(f"building {name}")
            result = Measured(
                name,
                model_flops(config, batch_size, seq_len, gated=not name.startswith("te-layer")),
            )
            results[result] = _prepared(build, result, warm_up, device)
        # Round by round, not variant by variant: a card that slows down as it warms up slows all of them alike.
        for turn in range(steps):
            progress(f"round {turn + 1} of {steps}")
            for result, step in results.items():
                result.ms.append(clock(step))
    reference = next(iter(results))
    floor = _floor(config, batch_size, seq_len, recipes, device, options)
    return dict(
        environment=environment(),
        settings=dict(config=asdict(config), **sizes),
        reference=reference.name,
        roofline=None if floor is None else {**floor._asdict(), "total": floor.total},
        rows=[result.row(ids.numel(), floor, reference) for result in results],
    )


def _prepared(
    build: Callable[[], StepFunction], result: Measured, warm_up: int, device: torch.device
) -> StepFunction:
    """Build, compile and warm up the step of a variant; record its peak memory and loss in `result`."""
    torch.manual_seed(0)
    # Memory that the variant before has left would count as memory of this one.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        step = build()
        step()  # compiling and autotuning need memory of their own
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # The memory of a CPU's process says nothing about a step.
        before = 0
        step = build()
    for _ in range(warm_up):
        result.loss = step().item()
    if device.type == "cuda":
        result.peak_gib = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    return step


def _floor(
    config: ModelConfig,
    batch: int,
    seq: int,
    recipes: Sequence[str],
    device: torch.device,
    options: Fields,
) -> Roofline | None:
    """Return the roofline of the first FP8 recipe; None on a CPU or if every recipe is BF16."""
    quantized = [(recipe, ways) for recipe, ways in map(parse, recipes) if recipe != "bf16"]
    if device.type != "cuda" or not quantized:
        return None
    recipe, ways = quantized[0]
    # Which layers stay in BF16; other options do not change the precision of a te.Linear.
    fields = {name: value for name, value in {**options, **ways}.items() if name in EDGES}
    # Without memory: only the precision of each te.Linear is asked for.
    on_meta = CausalLM(config, recipe=recipe, device="meta", engine="emulated", **fields)
    return roofline(config, batch, seq, on_meta.precision.linears, device)


def _wall(step: StepFunction) -> float:
    """Return the milliseconds of one call, by the host's clock."""
    # A CPU computes while it is called: the host's clock is the right one.
    start = time.perf_counter()
    step().item()
    return 1e3 * (time.perf_counter() - start)
