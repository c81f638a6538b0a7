"""Buffers and graphs that one generation leaves for the next: the same tokens, and never those of another model."""

import contextlib
import copy
import gc
import operator
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from decoding import FEATURES, build
from fewer import every
from graph_tape import Tape, pretend_cuda
from torch.nn.modules.module import register_module_forward_hook

from te_models import CausalLM, list_recipes
from te_models.engine.emulated import exact_gemm
from te_models.fp8 import kept_weights
from te_models.fp8.kept_weights import te_linears
from te_models.generation import decode_state
from te_models.generation.decode_state import DecodeState, DecodeStates, fixed_places
from te_models.model.graph_obstacle import graph_obstacle

COUNT = 5
SAMPLED = dict(do_sample=True, top_k=40)


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """The graphs of all generations with cuda_graph=True, captured and replayed on the CPU."""
    return pretend_cuda(monkeypatch)


def prompt(seed: int, length: int = 9, rows: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, length), generator=generator)


def replayed(model: CausalLM, ids: Any, **options: Any) -> torch.Tensor:
    options = dict(max_new_tokens=COUNT, eos_token_id=None, cuda_graph=True) | options
    return model.generate(ids, **options)


def eager(model: CausalLM, ids: Any, **options: Any) -> torch.Tensor:
    """Return the tokens of a copy that has never generated."""
    options = dict(max_new_tokens=COUNT, eos_token_id=None, cuda_graph=False) | options
    return copy.deepcopy(model).generate(ids, **options)


@pytest.mark.parametrize("feature", FEATURES)
def test_later_prompts_are_replayed(feature: str, tapes: list[Tape]) -> None:
    model = build(**FEATURES[feature])
    wanted = [eager(model, prompt(seed)) for seed in range(4)]
    assert len({tuple(row.flatten().tolist()) for row in wanted}) == 4
    for seed in range(4):
        assert_same_bits("tokens", replayed(model, prompt(seed)), wanted[seed])
    step, of_prompt = tapes
    assert of_prompt.replays == 3
    assert step.replays == (COUNT - 2) + 3 * (COUNT - 1)


@pytest.mark.parametrize(("recipe", "options"), every(2, list_recipes(), [dict(), SAMPLED]))
def test_later_prompts_under_every_recipe(
    recipe: str, options: dict[str, Any], tapes: list[Tape]
) -> None:
    model = build(recipe)
    ids = prompt(9, length=16)
    model(ids, labels=ids).loss.backward()
    model.eval()
    for seed in range(3):
        given = options | dict(seed=seed) if options else options
        wanted = eager(model, prompt(seed), **given)
        assert_same_bits("tokens", replayed(model, prompt(seed), **given), wanted)


def test_latent_attention_multiplies_all_slots(tapes: list[Tape]) -> None:
    """Its keys are made of the whole cache, of which each step fills one more position."""
    model = build("current", **FEATURES["deepseek_v3"]).eval()
    ids = prompt(0, length=7)
    with exact_gemm():
        wanted = eager(model, ids)
        assert_same_bits("tokens", replayed(model, ids), wanted)


def test_a_stream_that_ended_early_leaves_them(tapes: list[Tape]) -> None:
    model = build("current").eval()
    options: dict[str, Any] = dict(max_new_tokens=COUNT, eos_token_id=None, cuda_graph=True)
    replayed(model, prompt(0))
    for seen in (1, 3):
        stream = model.stream(prompt(1), **options)
        for _ in range(seen):
            next(stream)
        stream.close()
    assert_same_bits("tokens", replayed(model, prompt(2)), eager(model, prompt(2)))
    assert len(tapes) == 2


def hook(model: CausalLM) -> None:
    linear = model.layers[1].mlp.down_proj
    linear.register_forward_hook(lambda module, inputs, output: output * -3)


def new_forward(model: CausalLM) -> None:
    linear = model.layers[1].mlp.down_proj
    old = linear.forward
    linear.forward = lambda *given, **options: -3 * old(*given, **options)


def new_embedding(model: CausalLM) -> None:
    weight = model.embed_tokens.weight
    model.embed_tokens.weight = torch.nn.Parameter(weight.flip(0).contiguous())


def new_norm(model: CausalLM) -> None:
    norm: Any = model.norm
    scale = torch.linspace(-1, 2, len(norm.weight)).to(norm.weight.dtype)
    norm.weight = torch.nn.Parameter(scale)


def edited_norm(model: CausalLM) -> None:
    norm: Any = model.norm
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, len(norm.weight)))


def new_weight(model: CausalLM) -> None:
    weight = model.layers[2].mlp.down_proj.weight
    model.layers[2].mlp.down_proj.weight = torch.nn.Parameter(-3 * weight.detach())


def edited_weight(model: CausalLM) -> None:
    model.layers[2].mlp.down_proj.weight.data.mul_(-3)


def trained(model: CausalLM) -> None:
    model.train()
    ids = prompt(3, length=16)
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=3.0).step()
    model.eval()


def other_recipe(model: CausalLM) -> None:
    model.set_recipe("blockwise")


def other_module(model: CausalLM) -> None:
    class Twice(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.on = True

        def forward(self, *given: Any, **options: Any) -> torch.Tensor:
            return (-3 if self.on else 1) * self.inner(*given, **options)

    model.layers[1].self_attn.o_proj = Twice(model.layers[1].self_attn.o_proj)


CHANGES: list[Callable[[CausalLM], None]] = [
    hook,
    new_forward,
    new_embedding,
    new_norm,
    edited_norm,
    new_weight,
    edited_weight,
    trained,
    other_recipe,
]


@pytest.mark.parametrize(("recipe", "change"), every(2, ["bf16", "current"], CHANGES))
def test_a_changed_model_gives_its_own_tokens(
    recipe: str, change: Callable[[CausalLM], None], tapes: list[Tape]
) -> None:
    model = build(recipe).eval()
    before = [replayed(model, prompt(seed)) for seed in (0, 1, 2)][-1]
    change(model)
    wanted = eager(model, prompt(2))
    assert not torch.equal(wanted, before)
    for _ in range(3):
        assert_same_bits("tokens", replayed(model, prompt(2)), wanted)


def test_a_module_of_another_package_may_be_switched(tapes: list[Tape]) -> None:
    model = build().eval()
    other_module(model)
    assert fixed_places(model) is None
    module = model.layers[1].self_attn.o_proj
    for on in (True, False, True):
        module.on = on
        assert_same_bits("tokens", replayed(model, prompt(0)), eager(model, prompt(0)))


def test_other_kernels_and_settings_have_a_state_of_their_own(tapes: list[Tape]) -> None:
    model = build().eval()
    replayed(model, prompt(0))
    kept = len(tapes)
    rope = model.kernels.rope
    model.kernels = replace(model.kernels, rope=lambda *given: rope(*given))
    replayed(model, prompt(0))
    assert len(tapes) == kept + 2
    torch.use_deterministic_algorithms(True)
    try:
        replayed(model, prompt(0))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(tapes) == kept + 4
    replayed(model, prompt(0))
    assert len(tapes) == kept + 4


@pytest.mark.parametrize("feature", FEATURES)
def test_autocast_around_a_generation(feature: str, tapes: list[Tape]) -> None:
    model = build(**FEATURES[feature]).eval()
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            wanted = eager(model, prompt(0), use_cache=False)
            found = replayed(model, prompt(0))
        assert_same_bits("tokens", found, wanted)
    assert len(tapes) == 4


def test_a_hook_on_all_modules(tapes: list[Tape]) -> None:
    model = build().eval()
    for _ in range(2):
        replayed(model, prompt(0))
    seen = []
    handle = register_module_forward_hook(lambda module, inputs, output: seen.append(module))
    try:
        replayed(model, prompt(0))
    finally:
        handle.remove()
    assert model in seen
    assert len(tapes) == 4


def test_precision_of_products_set_in_the_newer_way() -> None:
    """With which PyTorch no longer shows `allow_tf32`."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    model = build().eval()
    try:
        matmul.fp32_precision = "tf32"
        eager(model, prompt(0))
    finally:
        matmul.fp32_precision = before


def test_the_latest_shapes_are_kept(tapes: list[Tape]) -> None:
    model = build().eval()
    options: list[dict[str, Any]] = [
        dict(),
        dict(max_new_tokens=4),
        dict(do_sample=True, seed=1),
        dict(do_sample=True, seed=1, top_k=9),
    ]
    for seed in range(3):
        for given in options:
            wanted = eager(model, prompt(seed), **given)
            assert_same_bits("tokens", replayed(model, prompt(seed), **given), wanted)
    assert len(tapes) == 2 * len(options)
    replayed(model, prompt(1, length=8))  # in the place of the first one
    for given in options[1:]:
        replayed(model, prompt(1), **given)
    assert len(tapes) == 2 * len(options) + 2
    replayed(model, prompt(1))
    assert len(tapes) == 2 * len(options) + 4


def test_long_prompts_are_not_captured_and_large_caches_not_kept(
    tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build().eval()
    monkeypatch.setattr(decode_state, "CAPTURED_PROMPT", 17)
    for seed in range(3):
        assert_same_bits("tokens", replayed(model, prompt(seed)), eager(model, prompt(seed)))
    assert len(tapes) == 1
    size = model.new_cache(2, 9 + COUNT).nbytes
    room = 2 * size
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda device: SimpleNamespace(total_memory=room / decode_state.KEPT_SHARE),
    )
    model = build().eval()
    for number, captured in ((1, 2), (2, 3), (1, 3), (2, 3), (3, 4), (2, 4), (1, 5)):
        replayed(model, prompt(0), do_sample=True, top_k=number)
        assert len(tapes) == captured
    room = size - 1
    model = build().eval()
    for captured in (6, 7):
        replayed(model, prompt(0))
        assert len(tapes) == captured


def test_angles_that_change_in_a_text(tapes: list[Tape]) -> None:
    """LongRoPE computes all keys once more at a length, in each generation."""
    model = build(**FEATURES["longrope"])
    for seed in range(3):
        wanted = eager(model, prompt(seed), max_new_tokens=30)
        assert_same_bits("tokens", replayed(model, prompt(seed), max_new_tokens=30), wanted)


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_other_ways_take_turns_with_replays(recipe: str, tapes: list[Tape]) -> None:
    """A prompt with padding, and a generation without a graph, leave the graphs to the next one."""
    model = build(recipe).eval()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    for way in ("padded", "", "padded", "no graph", "", "", "no graph", "padded"):
        options: dict[str, Any] = dict(attention_mask=mask) if way == "padded" else {}
        wanted = eager(model, prompt(1), **options)
        found = replayed(model, prompt(1), cuda_graph=way != "no graph", **options)
        assert_same_bits("tokens", found, wanted)
    step, of_prompt = tapes
    assert of_prompt.replays == 3


def test_streams_in_turn(tapes: list[Tape]) -> None:
    model = build("current").eval()
    options: dict[str, Any] = dict(max_new_tokens=COUNT, eos_token_id=None, cuda_graph=True)
    wanted = [eager(model, prompt(seed))[:, 9:] for seed in range(2)]
    replayed(model, prompt(5))
    replayed(model, prompt(5))
    for _ in range(2):
        streams = [model.stream(prompt(seed), **options) for seed in range(2)]
        pairs = list(zip(*streams, strict=True))
        for number in range(2):
            found = torch.stack([pair[number] for pair in pairs], dim=1)
            assert_same_bits("tokens", found, wanted[number])


@pytest.mark.parametrize("inner", ["same", "failed", "other weights"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_weights_that_graphs_read_outlive_a_stream_inside(
    recipe: str, inner: str, tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation between two steps of a stream takes no weights away that the stream's graph reads."""
    model = build(recipe).eval()
    options: dict[str, Any] = dict(max_new_tokens=COUNT, eos_token_id=None, cuda_graph=True)
    wanted = [eager(model, prompt(seed)) for seed in range(3)]
    replayed(model, prompt(0))
    quantized = cached_weights(model)
    assert quantized
    stream = model.stream(prompt(1), **options)
    found = [next(stream), next(stream)]
    if inner == "other weights":
        edited_weight(model)
        wanted[2] = eager(model, prompt(2))
    if inner == "failed":
        with monkeypatch.context() as patch:
            patch.setattr(DecodeState, "begin", fail)
            with pytest.raises(RuntimeError, match="as asked"):
                replayed(model, prompt(2))
    else:
        assert_same_bits("tokens", replayed(model, prompt(2)), wanted[2])
    if inner != "other weights":
        assert all(map(operator.is_, cached_weights(model), quantized))
        found += list(stream)
        assert_same_bits("tokens", torch.stack(found, dim=1), wanted[1][:, 9:])
    stream.close()
    kept = kept_weights._KEPT.get(model)
    if inner == "same":
        assert kept is not None and kept.left is not None
        assert all(map(operator.is_, cached_weights(model), quantized))
    else:
        assert kept is None or kept.left is None
    assert not any(module._fp8_workspaces for module in te_linears(model, model.te))
    assert_same_bits("tokens", replayed(model, prompt(2)), wanted[2])


def cached_weights(model: CausalLM) -> list[Any]:
    """Return the quantized weights of the latest generations, in the modules or kept."""
    found: list[dict[str, Any]] = [
        vars(module)["_fp8_workspaces"] for module in te_linears(model, model.te)
    ]
    kept = kept_weights._KEPT.get(model)
    if kept is not None:
        found += [weights["quantized"] for weights in kept.weights if weights]
    return [quantized for weights in found for quantized in weights.values()]


def fail(*given: Any) -> None:
    raise RuntimeError("as asked")


@contextlib.contextmanager
def disturbed(tape: Tape) -> Iterator[None]:
    """As a capture that another thread disturbs: the host has run everything, the device nothing."""
    with Tape._undisturbed(tape):
        yield
    raise RuntimeError("the capture was disturbed")


@pytest.mark.parametrize("first", ["step", "prompt"])
def test_a_disturbed_capture(
    first: str,
    tapes: list[Tape],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build().eval()
    if first == "prompt":
        replayed(model, prompt(0))
    monkeypatch.setattr(Tape, "_undisturbed", Tape.capture, raising=False)
    monkeypatch.setattr(Tape, "capture", disturbed)
    for seed in range(3):
        assert_same_bits("tokens", replayed(model, prompt(seed)), eager(model, prompt(seed)))
    names = ["generation", "the prompt of a generation"]
    failed = names if first == "step" else names[1:]
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} goes on without its CUDA graph: the capture was disturbed" for name in failed
    ]


def test_they_keep_no_model_alive(tapes: list[Tape]) -> None:
    model = build("current").eval()
    replayed(model, prompt(0))
    replayed(model, prompt(1))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("seed", range(4))
def test_generations_drawn_at_random(seed: int, tapes: list[Tape]) -> None:
    """Each equals that of eager steps, whatever came before."""
    draw = random.Random(seed)
    model = build(draw.choice(["bf16", "current", "delayed"])).eval()
    changes = [edited_weight, edited_norm, new_norm, other_recipe]
    for _ in range(16):
        ids = prompt(draw.randrange(99), length=draw.choice([9, 9, 9, 12]))
        options: dict[str, Any] = dict(max_new_tokens=draw.choice([1, COUNT, COUNT]))
        if draw.random() < 0.3:
            options |= SAMPLED | dict(seed=draw.randrange(99))
        if draw.random() < 0.2:
            draw.choice(changes)(model)
        if draw.random() < 0.2:
            mask = torch.ones_like(ids)
            mask[0, : draw.randrange(1, 5)] = 0
            options["attention_mask"] = mask
        wanted = eager(model, ids, **options)
        assert_same_bits("tokens", replayed(model, ids, **options), wanted)


# A model of each kind, of few layers: heads of 128, windows, latent attention, linear attention, experts.
REAL = ("qwen3-1.7b", "gated-1b", "gemma3-1b", "deepseek-v2-lite", "qwen3.5-0.8b", "olmoe-1b-7b")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "blockwise"])
@pytest.mark.parametrize("preset", REAL)
def test_a_replayed_prompt_at_real_shapes(preset: str, recipe: str) -> None:
    torch.manual_seed(0)
    edges = dict(num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)
    model = CausalLM.from_preset(
        preset,
        recipe=recipe,
        device="cuda",
        num_hidden_layers=4,
        max_position_embeddings=4096,
        **({} if recipe == "bf16" else edges),
    ).eval()
    generator = torch.Generator().manual_seed(1)
    size = model.config.vocab_size
    prompts = torch.randint(0, size, (4, 2, 700), generator=generator)
    options: dict[str, Any] = dict(max_new_tokens=6, eos_token_id=None)
    wanted = [model.generate(ids, cuda_graph=False, **options) for ids in prompts]
    for ids, tokens in zip(prompts, wanted, strict=True):
        assert_same_bits("tokens", model.generate(ids, **options), tokens)
    if graph_obstacle(model):
        return
    states = kept_weights._KEPT[model].left
    assert isinstance(states, DecodeStates)
    (state,) = states.states
    assert state.prompt is not None and state.prompt.is_captured
    assert state.step is not None and state.step.is_captured


@pytest.mark.gpu
def test_memory_is_free_with_the_model() -> None:
    allocated = []
    for _ in range(2):  # the first leaves the workspaces of libraries
        model = CausalLM.from_preset("gated-124m", recipe="delayed", device="cuda").eval()
        for _ in range(3):
            model.generate(torch.randint(0, 256, (2, 512)), max_new_tokens=8, eos_token_id=None)
        del model
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] <= allocated[0]
