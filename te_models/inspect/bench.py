"""Time the training step of every recipe, and of what else a user could train with, in one process.

All variants live side by side and take turns, so that a busy or throttling machine slows them alike; the figures are
medians with the quartiles. A variant's peak memory is measured while it is built and warmed up, less what the others
hold.
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
from te_models.config.recipe import EDGES, SCHEMES, get_recipe, recipe_fields
from te_models.engine import get_engine
from te_models.errors import unknown
from te_models.inspect.environment import environment
from te_models.inspect.peers import PEERS, Step, peer_step
from te_models.inspect.roofline import Roofline, model_flops, roofline, timed
from te_models.training.cuda_graph import GraphedStep

# What may follow a recipe after a "+": one row a way to run it. Later ones add to earlier ones.
WAYS: dict[str, dict[str, Any]] = {
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


@dataclass
class Measured:
    """One variant's figures: milliseconds of a forward and backward, and GiB at the peak (None on a CPU)."""

    name: str
    flops: float
    loss: float = 0.0
    peak_gib: float | None = None
    ms: list[float] = field(default_factory=list)

    def row(self, tokens: int, floor: Roofline | None, reference: Measured) -> dict[str, Any]:
        """What the table and the JSON say of it; ratios above 1 mean faster than `reference`, at equal FLOPs."""
        middle = statistics.median(self.ms)
        low, _, high = statistics.quantiles(self.ms, n=4) if len(self.ms) > 1 else (middle, middle, middle)
        found = dict(
            name=self.name, ms=middle, ms_quartiles=[low, high], tokens_per_second=1e3 * tokens / middle,
            model_tflops=self.flops / middle / 1e9, peak_gib=self.peak_gib, loss=self.loss,
            speed=statistics.median(reference.ms) / middle * self.flops / reference.flops,
        )  # fmt: skip
        if floor is not None:
            found["of_roofline"] = floor.total / middle * self.flops / reference.flops
        return found


def parse(recipe: str) -> tuple[str, dict[str, Any]]:
    """("delayed", {"fused": True}) of "delayed+fused"."""
    name, *ways = recipe.split("+")
    for way in ways:
        if way not in WAYS:
            raise unknown("way to run a recipe", way, WAYS)
    return name, {key: value for way in ways for key, value in WAYS[way].items()}


def model_step(ids: torch.Tensor, config: ModelConfig, cuda_graph: bool = False, **options: Any) -> Step:
    """One forward and backward of CausalLM(config, **options) on ids [B, S], predicting each next token; the loss."""
    model = CausalLM(config, **options)
    if cuda_graph:
        graphed = GraphedStep(model)
        return lambda: graphed(input_ids=ids, labels=ids)

    def step() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(ids, labels=ids, return_logits=False).loss
        assert loss is not None
        loss.backward()
        return loss.detach()

    return step


def builders(
    config: ModelConfig, recipes: Sequence[str], peers: Sequence[str], ids: torch.Tensor, **options: Any
) -> dict[str, Callable[[], Step]]:
    """Name -> what builds that variant's step; peers first. `options` are CausalLM's."""
    made: dict[str, Callable[[], Step]] = {}
    for name in peers:
        if name not in PEERS:
            raise unknown("peer", name, [*PEERS, "none"])
        made[name] = lambda name=name: peer_step(PEERS[name](config, ids.device), ids)
    for text in recipes:
        recipe, ways = parse(text)
        own = {name: value for name, value in options.items() if _applies(name, recipe)}
        given: dict[str, Any] = {**own, **ways, "device": ids.device, "recipe": recipe}
        made[f"te-models {text}"] = lambda given=given: model_step(ids, config, **given)
    return made


def _applies(option: str, recipe: str) -> bool:
    """Whether an option is for this recipe: amax_history_len, say, is for delayed alone."""
    return option not in recipe_fields() or option in {*EDGES, *SCHEMES[get_recipe(recipe).scheme].fields}


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
    tell: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> dict[str, Any]:
    """Measure every variant and return {"environment", "settings", "roofline", "rows"}, ready for JSON.

    Args:
        config: the shape, also the peers'.
        recipes: such as "delayed", or "delayed+fused" with ways to run it from WAYS.
        peers: names from te_models.inspect.peers.PEERS.
        batch_size, seq_len: tokens of a step.
        steps: timed rounds, in each of which every variant runs once; `warm_up` ones before them do not count.
        device: a CPU or a CUDA device.
        tell: told what is going on, line by line.
        options: CausalLM's own, such as `engine` and recipe fields.
    """
    get_engine("auto", device)  # Transformer Engine before any use of cuDNN: its copy of that must be loaded first
    torch._dynamo.config.recompile_limit = 64  # every variant compiles the same functions for its own shapes
    ids = torch.randint(0, config.vocab_size, (batch_size, seq_len), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    results, running = [], []
    for name, build in builders(config, recipes, peers, ids, **options).items():
        tell(f"building {name}")
        gated = not name.startswith("te-layer")
        result = Measured(name, model_flops(config, batch_size, seq_len, gated))
        running.append(_prepared(build, result, warm_up, device))
        results.append(result)
    clock = timed if device.type == "cuda" else _wall
    for turn in range(steps):
        tell(f"round {turn + 1} of {steps}")
        for result, step in zip(results, running, strict=True):
            result.ms.append(clock(step))
    floor = _floor(config, batch_size, seq_len, recipes, device, options)
    settings = dict(config=asdict(config), batch_size=batch_size, seq_len=seq_len, steps=steps, warm_up=warm_up)
    return dict(
        environment=environment(), settings=settings, reference=results[0].name,
        roofline=None if floor is None else {**floor._asdict(), "total": floor.total},
        rows=[result.row(ids.numel(), floor, results[0]) for result in results],
    )  # fmt: skip


def _prepared(build: Callable[[], Step], result: Measured, warm_up: int, device: torch.device) -> Step:
    """The variant's step, compiled and warmed up; notes its peak memory and its loss."""
    torch.manual_seed(0)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        step = build()
        step()  # compiling, and choosing algorithms, takes memory of its own
        torch.cuda.reset_peak_memory_stats(device)
    else:
        before, step = 0, build()
    for _ in range(warm_up):
        result.loss = step().item()
    if device.type == "cuda":
        result.peak_gib = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    return step


def _floor(
    config: ModelConfig, batch: int, seq: int, recipes: Sequence[str], device: torch.device, options: dict[str, Any]
) -> Roofline | None:
    """The roofline of the first FP8 recipe; None on a CPU or where all is BF16."""
    quantized = [(name, ways) for name, ways in map(parse, recipes) if name != "bf16"]
    if device.type != "cuda" or not quantized:
        return None
    recipe, ways = quantized[0]
    fields = {name: value for name, value in {**options, **ways}.items() if name in EDGES}
    on_meta = CausalLM(config, recipe=recipe, device="meta", engine="emulated", **fields)
    return roofline(config, batch, seq, len(on_meta.fp8_layers), device)


def _wall(step: Step) -> float:
    start = time.perf_counter()
    step().item()
    return 1e3 * (time.perf_counter() - start)
