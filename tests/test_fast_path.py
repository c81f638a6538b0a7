"""The fast path at shapes that take it: cuDNN's attention, fused operations and a CUDA graph,
with sizes as users have them.

cuDNN's backward adds in an order that varies from run to run, so two runs of one and the same variant differ. How far
is measured in each case, and two variants may differ by a small multiple of it (SPREAD) plus what would be small anyway
(FLOOR). Where nothing varies, under deterministic algorithms, every bit has to be the same.

For fused operations against plain ones, which round to BF16 in other places, the measure is how far two plain variants
are from each other that round in other places too: eager operations with cuDNN's attention, and compiled ones with
FlashAttention.
"""

import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import length_sweep
from te_models import CausalLM
from te_models.config.attention import AttentionSpec
from te_models.config.presets import get_preset
from te_models.config.recompute_modes import MODES
from te_models.fp8.scaling_state import fp8_state
from te_models.kernels import sdpa
from te_models.kernels.attention_parts import can_fuse
from te_models.optim import build_optimizer
from te_models.training.cuda_graph import WARM_UP, GraphedStep
from te_models.training.trainer import deterministic

PLACE: dict[str, Any] = dict(device="cuda", engine="auto")
RECIPES: dict[str, dict[str, Any]] = {
    name: dict(recipe=name) for name in ("bf16", "delayed", "current", "blockwise")
}
# Linears in another precision than their neighbors, in the layers inside the autocast (1, 2) and outside (0, 3).
TABLE = {
    "*.down_proj": "bf16",
    "layers.1.self_attn.*": "current",
    "layers.3.mlp.gate_up_proj": "delayed",
}
RECIPES["delayed, with a table"] = dict(recipe="delayed", precision=TABLE)
SHAPES: dict[int, dict[str, Any]] = {
    64: dict(hidden_size=512, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1024),
    128: dict(
        hidden_size=512, num_attention_heads=4, num_key_value_heads=2, intermediate_size=1024
    ),
}
ROWS, TOKENS, STEPS = 4, 256, 8
assert STEPS > WARM_UP + 2  # replays with other batches and other weights than the capture's
SPREAD = 4.0
# Relative: of a loss, of the weights' way from where they began (in norm), and of scales and amax histories in the mean
# of their entries (an amax by itself is one element, which may be anything).
FLOOR = {
    "graph": dict(losses=2e-4, weights=0.01, scales=0.02),
    "plain": dict(losses=5e-4, weights=0.02, scales=0.05),
}

Run = dict[str, Any]
WAYS: dict[str, dict[str, Any]] = {
    "eager": dict(),
    "graph": dict(graph=True),
    "plain": dict(fused=False, compile=False),
    "other plain": dict(fused=False, compile=True, order=sdpa.SMALL_ORDER),
}


def train(
    size: int, recipe: str, mode: str, *, graph: bool = False, order: Any = None, **options: Any
) -> Run:
    """Eight steps of AdamW: losses, the way that each weight went, scales and amax histories."""
    torch.manual_seed(1)
    shape = dict(num_hidden_layers=4, max_position_embeddings=TOKENS, **SHAPES[size])
    how = dict(activation_checkpointing=mode, **RECIPES[recipe], **options)
    model = CausalLM.from_preset("gated-nano", **PLACE, **shape, **how).train()
    model.te.FP8GlobalStateManager.reset()  # a capture would update the scales of models that are gone
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer("adamw", model, lr=1e-3, weight_decay=0.1)
    graphed, losses = GraphedStep(model) if graph else None, []
    before = sdpa.CUDA_ORDER
    sdpa.CUDA_ORDER = order or before
    try:
        for step in range(STEPS):
            losses.append(one_step(model, graphed, step))
            optimizer.take_gradients(1.0)
            optimizer.set_learning_rate(
                1e-3 * (step + 1) / STEPS
            )  # AdamW's first steps are signs, which any last bit turns
            optimizer.step()
    finally:
        sdpa.CUDA_ORDER = before
    if graphed is not None:
        assert graphed.graph is not None and not graphed.failures, "the step was not captured"
    return dict(
        losses=torch.stack(losses).cpu(),
        weights={
            name: p.detach().float() - start[name].float() for name, p in model.named_parameters()
        },
        scales={name: tensor.clone() for name, tensor in fp8_state(model).items()},
    )


def one_step(model: CausalLM, graphed: GraphedStep | None, step: int) -> Tensor:
    """Forward and backward of a batch; the loss."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 256, (ROWS, TOKENS), generator=generator).to(model.device)
    ids = ids // (
        1 + ids % 7
    )  # some bytes come more often than others: there is something to learn
    if graphed is not None:
        return graphed(input_ids=ids, labels=ids).clone()
    model.calibrate(dict(input_ids=ids, labels=ids))  # in the first step, as the graphed one does
    loss = model(ids, labels=ids, return_logits=False).loss
    assert loss is not None
    loss.backward()
    return loss.detach()


def distances(one: Run, other: Run) -> dict[str, float]:
    """Return the relative distances of two runs; values that are not finite are infinitely far."""
    losses = ((one["losses"] - other["losses"]).abs() / one["losses"]).max()
    gap = torch.stack(
        [(way - other["weights"][name]).norm() for name, way in one["weights"].items()]
    ).norm()
    way = torch.stack([way.norm() for way in one["weights"].values()]).norm()
    assert one["scales"].keys() == other["scales"].keys()
    pairs = [(tensor, other["scales"][name]) for name, tensor in one["scales"].items()]
    scales = [
        ((a - b).abs() / torch.maximum(a.abs(), b.abs()).clamp(min=1e-30)).sum()
        / (a != 0).sum().clamp(min=1)
        for a, b in pairs
    ]
    found = dict(
        losses=losses,
        weights=gap / way,
        scales=torch.stack(scales).max() if scales else torch.zeros(()),
    )
    return {name: float(value.nan_to_num(torch.inf, torch.inf)) for name, value in found.items()}


def near(
    found: dict[str, float], usual: list[dict[str, float]], floor: dict[str, float]
) -> list[str]:
    """List distances beyond their limits."""
    limits = {name: SPREAD * max(pair[name] for pair in usual) + floor[name] for name in found}
    return [
        f"{name}: {value:.3g} > {limits[name]:.3g}"
        for name, value in found.items()
        if not value <= limits[name]
    ]


@pytest.mark.gpu
def test_these_shapes_take_the_fast_path() -> None:
    for size, shape in SHAPES.items():
        config = get_preset("gated-nano", **shape)
        assert config.head_dim == size and config.num_key_value_heads < config.num_attention_heads
        attention = config.layers[0].mixer
        assert isinstance(attention, AttentionSpec)
        assert can_fuse(attention, TOKENS, torch.device("cuda"), torch.bfloat16)
        model = CausalLM.from_preset("gated-nano", **PLACE, num_hidden_layers=4, **shape)
        assert model.engine == "native" and model.fused and model.kernels.attention is not None


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", SHAPES)
def test_graphed_fused_and_plain_steps_train_alike(size: int, recipe: str, mode: str) -> None:
    runs = {way: train(size, recipe, mode, **options) for way, options in WAYS.items()}
    again = [train(size, recipe, mode, **WAYS["eager"]) for _ in range(2)]
    assert runs["eager"]["losses"][-1] < 0.97 * runs["eager"]["losses"][0], "nothing was learned"
    noise = [
        distances(runs["eager"], again[0]),
        distances(*again),
        distances(runs["eager"], again[1]),
    ]
    assert not near(distances(runs["eager"], runs["graph"]), noise, FLOOR["graph"])
    rounding = [*noise, distances(runs["plain"], runs["other plain"])]
    assert not near(distances(runs["plain"], runs["eager"]), rounding, FLOOR["plain"])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", SHAPES)
def test_deterministic_steps_are_the_same_bits_in_a_graph(
    size: int, recipe: str, mode: str
) -> None:
    with deterministic():
        eager, again, graph = (
            train(size, recipe, mode, graph=graph) for graph in (False, False, True)
        )
    for other in (again, graph):
        assert torch.equal(eager["losses"], other["losses"])
        for part in ("weights", "scales"):
            assert [
                name
                for name, tensor in eager[part].items()
                if not torch.equal(tensor, other[part][name])
            ] == []


LENGTHS = (1, 2, 16, 17, 127, 128, 129, 192, 255, 257, 333, 511)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_any_length(size: int, compile: bool, recipe: str) -> None:
    """Of 3 rows, with half as many key heads as query heads; benchmarks/length_sweep.py tries all others."""
    bench = length_sweep.Bench("cuda", recipe)
    cases = [
        case for case in length_sweep.cases(list(LENGTHS), [3], [size], compile) if case["grouped"]
    ]
    wrong = {case["length"]: length_sweep.verdict(bench.compare(case)) for case in cases}
    assert {length: problems for length, problems in wrong.items() if problems} == {}


@pytest.mark.slow
def test_a_case_that_ends_its_process_is_reported_and_the_rest_runs() -> None:
    todo = length_sweep.cases([1, 16], [1], [64], False)
    todo[1]["head_dim"] = 63  # no pairs to rotate
    rows = length_sweep.run(todo, 1, "cpu", "bf16")
    found = length_sweep.summary(rows)
    assert found["cases"] == 4 and found["error"] == 1 and found["same"] == 3
    (bad,) = found["bad"]
    assert bad["head_dim"] == 63 and "odd" in bad["wrong"][0]


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_distances_of_equal_and_different_runs(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU: the same run is no distance from itself, and another seed, or a poisoned loss, is far."""
    monkeypatch.setitem(PLACE, "device", "cpu")
    monkeypatch.setitem(PLACE, "engine", "emulated")
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", 8)
    small = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64)
    monkeypatch.setitem(SHAPES, 64, small)
    with deterministic() if recipe == "bf16" else nullcontext():
        one, same = (train(64, recipe, "none", fused=True) for _ in range(2))
    assert distances(one, same) == dict(losses=0.0, weights=0.0, scales=0.0)
    monkeypatch.setitem(SHAPES, 64, {**small, "rms_norm_eps": 0.1})
    other = train(64, recipe, "none")
    assert near(distances(one, other), [distances(one, same)], FLOOR["graph"])
    other["losses"][3] = torch.nan
    assert distances(one, other)["losses"] == torch.inf
