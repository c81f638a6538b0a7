"""The decoding step: fit for a CUDA graph, equal to the plain loop, and leaving nothing behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from decoding import FEATURES, PROMPTS, build
from fewer import every
from graph_tape import pretend_cuda

from te_models import CausalLM, list_recipes
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.fp8.kept_weights import reused_weights, te_linears
from te_models.fp8.scaling_state import fp8_state
from te_models.generation.decode_loop import DecodeLoop
from te_models.generation.decode_state import DecodeStates, shape_of
from te_models.generation.sampling import Sampling

RECIPES = list_recipes()


@pytest.fixture
def on_tape(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """model.generate(...) with cuda_graph=True, captured and replayed on the CPU."""
    tapes = pretend_cuda(monkeypatch)

    def generate(
        model: CausalLM, prompts: Any = PROMPTS, count: int = 16, **options: Any
    ) -> torch.Tensor:
        before = sum(tape.replays for tape in tapes)
        out = model.generate(prompts, max_new_tokens=count, cuda_graph=True, **options)
        assert sum(tape.replays for tape in tapes) > before
        return out

    return generate


@pytest.mark.parametrize("feature", FEATURES)
def test_a_replayed_step_is_the_eager_step(
    feature: str, on_tape: Callable[..., torch.Tensor]
) -> None:
    model = build(**FEATURES[feature])
    eager = model.generate(PROMPTS, max_new_tokens=16)
    assert len(set(eager[:, 19:].flatten().tolist())) > 8
    assert_same_bits("on_tape(model)", on_tape(model), eager)


@torch.no_grad()
def test_replays_count_the_positions_that_they_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the count the cache would accept more positions than it has room for."""
    tapes, model, count = pretend_cuda(monkeypatch), build(), 6
    ids = torch.randint(0, 256, (2, 9))
    state = DecodeStates(ids.device).state_for(model, shape_of(model, ids, count, Sampling()))
    for _ in range(3):
        state.begin(ids, None)
        lengths = []
        with reused_weights(model, model.te, keep=False) as weights:
            loop = DecodeLoop(model, state, None, weights)
            for step in range(count):
                loop.launch(step)
                lengths.append(state.cache.length)
        assert lengths == [9, 10, 11, 12, 13, 14]
    step, prompt = tapes
    assert step.replays == count - 2 + 2 * (count - 1) and prompt.replays == 2
    with pytest.raises(ValueError, match="room for 15 positions, not 16"):
        model(torch.zeros(2, 2, dtype=torch.long), cache=state.cache)


@pytest.mark.parametrize(("recipe", "batch"), every(2, RECIPES, [1, 3]))
def test_a_replayed_step_under_every_recipe(
    recipe: str, batch: int, on_tape: Callable[..., torch.Tensor]
) -> None:
    model = build(recipe)
    ids = torch.randint(0, 256, (2, 16))
    model(ids, labels=ids).loss.backward()
    before = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    eager = model.generate(PROMPTS[:batch], max_new_tokens=6)
    assert_same_bits(
        "on_tape(model, PROMPTS[:batch], 6)", on_tape(model, PROMPTS[:batch], 6), eager
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in fp8_state(model).items())


@pytest.mark.parametrize("options", [
    dict(), dict(temperature=1.7), dict(top_k=7), dict(top_p=0.7), dict(min_p=0.05),
    dict(top_k=50, top_p=0.9, min_p=0.01),
], ids=str)  # fmt: skip
def test_replayed_sampling_draws_the_same(
    options: dict, on_tape: Callable[..., torch.Tensor]
) -> None:
    model = build()
    eager = model.generate(PROMPTS, max_new_tokens=16, do_sample=True, seed=5, **options)
    assert_same_bits("result", on_tape(model, do_sample=True, seed=5, **options), eager)
    assert not torch.equal(on_tape(model, do_sample=True, seed=6, **options), eager)


def test_stops_are_the_same_under_replay(on_tape: Callable[..., torch.Tensor]) -> None:
    model, words = build(), ByteTokenizer()
    free = model.generate(PROMPTS, max_new_tokens=16)[:, 19:]
    stops = [int(free[0, 3]), int(free[1, 9])]
    eager = model.generate(PROMPTS, max_new_tokens=16, eos_token_id=stops)
    assert eager.shape[1] < 35 or (eager[:, -1] == stops[0]).any()
    assert_same_bits(
        "on_tape(model, eos_token_id=stops)", on_tape(model, eos_token_id=stops), eager
    )
    ending = words.decode(free[0, 5:7].tolist())
    options = dict(stop_strings=ending, tokenizer=words, eos_token_id=None)
    assert_same_bits(
        "on_tape(model, **options)",
        on_tape(model, **options),
        model.generate(PROMPTS, max_new_tokens=16, **options),
    )


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
@torch.no_grad()
def test_weights_quantized_once_are_those_quantized_every_time(recipe: str) -> None:
    model = build(recipe).eval()
    ids = torch.randint(0, 256, (2, 16))
    steps = torch.randint(0, 256, (3, 2, 1))
    logits = []
    for once in (False, True):
        cache = model.new_cache(2, 20)
        row = []
        for number, new in enumerate((ids, *steps)):
            first = number == 0 if once else None
            row.append(model(new, cache=cache, is_first_microbatch=first).logits)
        logits.append(row)
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))
    fp8 = [
        module for layer in model.fp8_layers for module in linears_of(model, model.layers[layer])
    ]
    assert fp8 and all(module._fp8_workspaces for module in fp8)


def linears_of(model: CausalLM, block: torch.nn.Module) -> list[Any]:
    return [module for module in block.modules() if isinstance(module, model.te.Linear)]


@pytest.mark.parametrize("close_early", [False, True])
def test_fp8_weights_are_freed_after_generation(close_early: bool) -> None:
    model = build("current")
    first = model.generate(PROMPTS, max_new_tokens=4)
    stream = model.stream(PROMPTS, max_new_tokens=4)
    next(stream)
    assert any(module._fp8_workspaces for module in te_linears(model, model.te))
    stream.close() if close_early else list(stream)
    assert not any(module._fp8_workspaces for module in te_linears(model, model.te))
    with torch.no_grad():
        for block in model.layers:
            block.mlp.down_proj.weight.mul_(-3)
    assert not torch.equal(model.generate(PROMPTS, max_new_tokens=4), first)


def test_codes_of_older_weights_are_not_used() -> None:
    model = build("current").eval()
    with torch.no_grad():
        model(torch.randint(0, 256, (2, 16)), is_first_microbatch=True)
    with torch.no_grad():
        for block in model.layers:
            block.mlp.down_proj.weight.mul_(-3)
    text = model.generate(PROMPTS, max_new_tokens=4)
    assert_same_bits(
        "the second time nothing was kept", model.generate(PROMPTS, max_new_tokens=4), text
    )


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["native", "emulated"])
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "blockwise"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_cuda_graph_gives_the_eager_tokens(
    engine: str, recipe: str, batch: int, tmp_path: Path
) -> None:
    model = build(recipe, engine=engine, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 256, (2, 16), device="cuda")
    model(ids, labels=ids).loss.backward()
    before = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    for options in (dict(), dict(do_sample=True, seed=3, top_k=20, top_p=0.9, min_p=0.01)):
        eager = model.generate(PROMPTS[:batch], max_new_tokens=24, cuda_graph=False, **options)
        assert_same_bits(
            "result",
            model.generate(PROMPTS[:batch], max_new_tokens=24, cuda_graph=True, **options),
            eager,
        )
        assert_same_bits(
            "result", model.generate(PROMPTS[:batch], max_new_tokens=24, **options), eager
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in fp8_state(model).items())


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
def test_a_cuda_graph_of_every_feature(feature: str) -> None:
    model = build("current", device="cuda", engine="native", **FEATURES[feature])
    eager = model.generate(PROMPTS, max_new_tokens=16, cuda_graph=False)
    assert_same_bits("result", model.generate(PROMPTS, max_new_tokens=16, cuda_graph=True), eager)
