"""CausalLM under every recipe: where FP8 runs, padding and evaluation change no state, and recipes can be changed."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from fewer import every
from torch.nn.attention import SDPBackend

from te_models import CausalLM, list_recipes
from te_models.engine import get_engine
from te_models.errors import UsageError
from te_models.fp8.scaling_state import fp8_state
from te_models.kernels import sdpa

RECIPES = [name for name in list_recipes() if name != "nvfp4"]
FP8 = [name for name in RECIPES if name != "bf16"]
SHAPE = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=64)


ENGINES = ["emulated", pytest.param("native", marks=pytest.mark.gpu)]
Build = Callable[..., CausalLM]


@pytest.fixture(params=ENGINES)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Build:
    """A function that builds the small model under a recipe, on the CPU or for real; skips what the GPU cannot run."""
    native = request.param == "native"
    monkeypatch.setattr(sdpa, "CUDA_ORDER", [SDPBackend.MATH])  # the fast kernels' gradients vary from run to run

    def make(recipe: str = "delayed", **options: Any) -> CausalLM:
        torch.manual_seed(1)
        if recipe == "delayed":
            options.setdefault("amax_history_len", 8)
        if native:
            skip_unsupported(recipe)
        place = dict(device="cuda" if native else "cpu", engine=request.param, compile=False)
        return CausalLM.from_preset("gated-nano", **{**SHAPE, **place, "recipe": recipe, **options})

    return make


def tokens(batch: int = 2, seq: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (batch, seq), generator=torch.Generator().manual_seed(seed))


def skip_unsupported(recipe: str) -> None:
    """Skip a test of the native engine that needs MXFP8 on a GPU without."""
    if recipe == "mxfp8" and not get_engine("native")[0].is_mxfp8_available():
        pytest.skip("this GPU does not run MXFP8")


def registry(model: CausalLM) -> Any:
    return model.te.FP8GlobalStateManager


def step(model: CausalLM, ids: torch.Tensor) -> float:
    ids = ids.to(model.device)
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.item()


def snapshot(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in fp8_state(model).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gate", ["elementwise", "headwise", "none"])
def test_every_parameter_gets_a_gradient(build: Build, recipe: str, gate: str) -> None:
    model = build(recipe, attention_gate=gate, qk_norm=gate == "none", attention_bias=gate == "headwise")
    loss = step(model, tokens())
    assert loss == pytest.approx(math.log(SHAPE["vocab_size"]), abs=0.3)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("recipe", FP8)
def test_the_fp8_layers_save_codes_and_the_edges_do_not(build: Build, recipe: str) -> None:
    model = build(recipe)
    kept: dict[str, set[torch.dtype]] = {}
    inside: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if inside:
            fp8 = hasattr(tensor, "quantize_")  # Transformer Engine's tensor of codes, which says BF16
            kept.setdefault(inside[-1], set()).add(torch.uint8 if fp8 else tensor.dtype)
        return tensor

    for name, module in model.named_modules():
        if isinstance(module, model.te.Linear):
            module.register_forward_pre_hook(lambda m, i, name=name: inside.append(name))
            module.register_forward_hook(lambda m, i, o: inside.pop() and None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(tokens().to(model.device))
    codes = {torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2}
    fp8 = {name for name, dtypes in kept.items() if dtypes & codes}
    assert fp8 == {name for name in kept if re.match(r"layers\.[123]\.", name)} and len(fp8) == 12
    assert "lm_head" in kept


@pytest.mark.parametrize("mode", ["none", "full"])
def test_every_scale_is_updated_exactly_once_a_step(build: Build, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("delayed", amax_compute_algo="max", activation_checkpointing=mode)
    calls = {True: 0, False: 0}
    original = registry(model).reduce_and_update_fp8_tensors

    def spy(forward: bool = True) -> None:
        calls[forward] += 1
        original(forward)

    monkeypatch.setattr(registry(model), "reduce_and_update_fp8_tensors", staticmethod(spy))
    for count in range(1, 5):
        step(model, tokens(seed=count))
        if mode == "none":
            assert calls == {True: count, False: count}
        for name, history in fp8_state(model).items():
            if name.endswith("amax_history"):
                slots = history.shape[1] - 1  # the last slot, of outputs in FP8, is unused
                assert (history[:, :slots] > 0).sum() == count * slots, name
                assert history[0].abs().sum() == 0, "the row under way was rolled into the history"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("batch, seq", [(1, 1), (1, 5), (3, 7), (2, 33)])
def test_any_batch_and_length_works(build: Build, recipe: str, batch: int, seq: int) -> None:
    model = build(recipe)
    ids = tokens(batch, seq).to(model.device)
    logits = model(ids).logits
    assert logits.shape == (batch, seq, SHAPE["vocab_size"])
    logits.float().square().mean().backward()
    assert model.embed_tokens.weight.grad.isfinite().all()


def test_padding_changes_no_scale(build: Build) -> None:
    """15 tokens are padded to 16: every amax is that of the 15 alone, forward and backward."""
    model = build("delayed", attention_bias=True, fused=False)  # fused, a linear may get codes
    seen: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
            seen[f"{name}.fwd"] = inputs[0][:15].abs().max().item()
            assert inputs[0].shape[0] == 16
            output.register_hook(lambda g: seen.__setitem__(f"{name}.bwd", g[:15].abs().max().item()))

        return hook

    with torch.no_grad():  # a bias on q, k, v makes the padded rows of that GEMM differ from zero
        for block in model.layers:
            block.self_attn.qkvg_proj.bias.normal_(0, 3)
    for layer in model.fp8_layers:
        for part in ("self_attn.qkvg_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            name = f"layers.{layer}.{part}"
            model.get_submodule(name).register_forward_hook(watch(name))
    step(model, tokens(3, 5))
    state = fp8_state(model)
    for key, amax in seen.items():
        name, direction = key.rsplit(".", 1)
        assert state[f"{name}.scaling_{direction}.amax_history"][-1, 0].item() == amax, key
    assert len(seen) == 24


@pytest.mark.parametrize("how", ["eval", "no_grad", "generate"])
def test_a_forward_outside_training_changes_no_scale(build: Build, how: str) -> None:
    model = build("delayed", amax_compute_algo="max")
    for seed in range(3):
        step(model, tokens(seed=seed))
    before = snapshot(model)
    loud = tokens(seed=9).to(model.device)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(50)
    if how == "eval":
        model.eval()(loud)
        model.train()
    elif how == "no_grad":
        with torch.no_grad():
            model(loud)
    else:
        model.generate(loud[:, :3], max_new_tokens=2)
        assert model.training
    assert before and same(before, fp8_state(model))


@pytest.mark.parametrize("recipe", RECIPES)
def test_full_checkpointing_changes_no_bit(build: Build, recipe: str) -> None:
    runs = []
    for mode in ("none", "full"):
        model = build(recipe, activation_checkpointing=mode)
        registry(model).reset()
        losses = []
        for seed in range(4):
            losses.append(step(model, tokens(3, 7, seed)))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        runs.append((losses, [p.detach() for p in model.parameters()], snapshot(model)))
    (losses, weights, state), (losses_full, weights_full, state_full) = runs
    assert losses == losses_full and len(set(losses)) == 4
    assert all(map(torch.equal, weights, weights_full))
    assert same(state, state_full) and bool(state) == (recipe == "delayed")


@pytest.mark.parametrize(("old", "new"), every(3, ["bf16", "delayed", "mxfp8"], RECIPES))
def test_a_swap_is_a_fresh_model_with_the_same_weights(build: Build, old: str, new: str) -> None:
    if old == new == "delayed":
        pytest.skip("the scales move along: the test below")
    model = build(old)
    if model.engine == "native":
        skip_unsupported(new)
    step(model, tokens())
    model.zero_grad()
    model.set_recipe(new)
    fresh = build(new, **({"amax_history_len": 1024} if new == "delayed" else {}))
    for seed in range(3):
        assert step(model, tokens(seed=seed)) == step(fresh, tokens(seed=seed))
    for (name, p), q in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert_same_bits(name, p.grad, q.grad)
    assert same(fp8_state(model), fp8_state(fresh)) and model.recipe.name == new


def test_a_swap_between_delayed_recipes_moves_the_scales_along(build: Build) -> None:
    model = build("delayed", amax_history_len=4)
    for seed in range(3):
        step(model, tokens(seed=seed))
    before = snapshot(model)
    model.set_recipe("delayed", amax_history_len=8, amax_compute_algo="max")
    after = fp8_state(model)
    for name, tensor in before.items():
        assert_same_bits(name, after[name][-3:], tensor[-3:])
    step(model, tokens(seed=5))
    moved = [
        name
        for name in before
        if name.endswith("fwd.amax_history") and not torch.equal(after[name][-3:], before[name][-3:])
    ]
    assert len(moved) == 12, "the moved histories are live: the next step writes into them"


def test_the_plan_names_every_linear_and_its_reason(build: Build) -> None:
    model = build("current")
    plan = model.plan()
    assert len(plan) == 21 and plan.count("FP8") == 12 and plan.count("BF16") == 9
    first = next(iter(plan))
    assert (first.layer, first.module, first.precision) == ("0", "self_attn.qkvg_proj", "BF16")
    assert first.gemm == "64 -> 192" and "num_layers_at_start_in_bf16 = 1" in first.reason
    text = str(plan)
    assert "E4M3/E5M2 Float8CurrentScaling" in text and "1-3" in text and "lm_head" in text
    assert f"engine {model.engine} (asked for)" in text if model.engine == "emulated" else "NVIDIA" in text


def test_the_edges_move_by_keyword(build: Build) -> None:
    model = build("current", num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=0, lm_head="fp8")
    assert model.fp8_layers == range(2, 5)
    assert list(model.plan())[-1].precision.startswith("E4M3")
    step(model, tokens())


@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_and_loaded_it_continues_with_the_same_bits(build: Build, recipe: str, tmp_path: Path) -> None:
    model = build(recipe)
    for seed in range(3):
        step(model, tokens(seed=seed))
    model.zero_grad()
    model.save_pretrained(tmp_path / "m")
    files = {path.name for path in (tmp_path / "m").iterdir()}
    assert {"config.json", "model.safetensors", "recipe.json"} <= files
    assert ("fp8_state.safetensors" in files) == (recipe == "delayed")
    loaded = CausalLM.from_pretrained(tmp_path / "m", engine=model.engine, device=model.device, compile=False)
    assert loaded.recipe.to_dict() == model.recipe.to_dict() and same(fp8_state(loaded), fp8_state(model))
    for seed in range(3, 6):
        assert step(loaded, tokens(seed=seed)) == step(model, tokens(seed=seed))
    assert same(fp8_state(loaded), fp8_state(model))
    for p, q in zip(model.parameters(), loaded.parameters(), strict=True):
        assert_same_bits("p.grad", p.grad, q.grad)


def test_loaded_under_another_recipe_the_scales_are_left_out_aloud(build: Build, tmp_path: Path) -> None:
    model = build("delayed")
    step(model, tokens())
    model.save_pretrained(tmp_path / "m")
    with pytest.warns(UserWarning, match="has no use for its scales"):
        loaded = CausalLM.from_pretrained(tmp_path / "m", recipe="current", engine=model.engine, compile=False)
    assert loaded.recipe.name == "current" and fp8_state(loaded) == {}
    longer = CausalLM.from_pretrained(tmp_path / "m", amax_history_len=16, engine=model.engine, compile=False)
    assert {len(t) for n, t in fp8_state(longer).items() if n.endswith("history")} == {16}


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_generation_with_a_cache_is_generation_without(build: Build, recipe: str) -> None:
    model = build(recipe, dtype=torch.float32 if recipe == "bf16" else torch.bfloat16).eval()
    ids = tokens(2, 5).to(model.device)
    out = model.generate(ids, max_new_tokens=8)
    assert out.shape == (2, 13) and torch.equal(out[:, :5], ids)
    if recipe == "bf16":
        grown = ids
        for _ in range(8):
            grown = torch.cat((grown, model(grown).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        assert_same_bits("out", out, grown)
    sampled = [model.generate(ids, max_new_tokens=8, do_sample=True, seed=s, top_k=20, top_p=0.9) for s in (3, 3, 4)]
    assert torch.equal(sampled[0], sampled[1]) and not torch.equal(sampled[0], sampled[2])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(recipe="delayd"), "did you mean 'delayed'"),
        (dict(engine="nativ"), "did you mean 'native'"),
        (dict(engine="native", device="cpu"), "engine='native' is not possible here"),
        (dict(recipe="current", num_hidden_layers=2), "nothing would run in FP8"),
        (dict(recipe="mxfp8", intermediate_size=112), "intermediate_size=112 is not a multiple of 32"),
        (dict(recipe="current", amax_history_len=4), "unknown field 'amax_history_len' of recipe 'current'"),
        (dict(amax_histroy_len=4), "did you mean 'amax_history_len'"),
        (dict(activation_checkpointing="ful"), "did you mean 'full'"),
    ],
)
def test_unsupported_options_are_refused(build: Build, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=".") as error:
        build(**options)
    assert message in str(error.value)


def test_a_sequence_beyond_the_positions_is_refused(build: Build) -> None:
    model = build("bf16")
    with pytest.raises(ValueError, match="max_position_embeddings=64"):
        model(tokens(1, 65).to(model.device))
    with pytest.raises(ValueError, match="max_new_tokens=60"):
        model.generate(tokens(1, 5).to(model.device), max_new_tokens=60)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "blockwise"])
def test_the_two_engines_agree_and_exchange_their_state(recipe: str, tmp_path: Path) -> None:
    options = dict(SHAPE, recipe=recipe, device="cuda", compile=False, fused=False)
    torch.manual_seed(1)
    native = CausalLM.from_preset("gated-nano", engine="native", **options)
    emulated = CausalLM.from_preset("gated-nano", engine="emulated", **options)
    emulated.load_state_dict(native.state_dict(), strict=False)
    for seed in range(5):
        one, other = step(native, tokens(8, 32, seed)), step(emulated, tokens(8, 32, seed))
        assert one == pytest.approx(other, rel=2e-3)
    for name, tensor in fp8_state(native).items():
        assert torch.allclose(tensor, fp8_state(emulated)[name], rtol=0.05), name
    torch.save(native.state_dict(), tmp_path / "state.pt")
    again = CausalLM.from_preset("gated-nano", engine="native", **options)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same(fp8_state(again), fp8_state(native)) and bool(fp8_state(native)) == (recipe == "delayed")
    assert step(again, tokens(8, 32, 8)) == step(native, tokens(8, 32, 8))
    native.save_pretrained(tmp_path / "n")
    place = dict(device="cuda", compile=False, fused=False)
    moved = CausalLM.from_pretrained(tmp_path / "n", engine="emulated", **place)
    assert same(fp8_state(moved), fp8_state(native))
    assert step(moved, tokens(8, 32, 9)) == pytest.approx(step(native, tokens(8, 32, 9)), rel=2e-3)


@pytest.mark.gpu
def test_mxfp8_on_hopper_is_refused_with_the_reason() -> None:
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU runs MXFP8")
    with pytest.raises(ValueError, match="compute capability 10.0 or higher.*engine='emulated' runs"):
        CausalLM.from_preset("gated-nano", recipe="mxfp8", engine="native")


CONVERSIONS: dict[str, Callable[[CausalLM], Any]] = {
    "double()": lambda model: model.double(),
    "to(float64)": lambda model: model.to(torch.float64),
    "to(cpu, float64)": lambda model: model.to("cpu", torch.float64),
    "to(tensor)": lambda model: model.to(torch.ones(1, dtype=torch.float64)),
    "type(float64)": lambda model: model.type(torch.float64),
    "inside another module": lambda model: torch.nn.Sequential(model).to(torch.float64),
    "half()": lambda model: model.half(),
    "to(float16)": lambda model: model.to(dtype=torch.float16),
}


@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_conversion_to_fp64_or_fp16_is_refused_in_one_line(how: str) -> None:
    model = CausalLM.from_preset("gated-nano", **SHAPE, device="cpu")
    says = (
        "build or load it with dtype=torch.float16" if "half" in how or "16" in how else "te layers do not run in FP64"
    )
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        CONVERSIONS[how](model)
    assert "\n" not in str(caught.value)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.to("cpu").to(torch.bfloat16).to_empty(device="cpu").dtype == torch.bfloat16
