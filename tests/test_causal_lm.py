"""CausalLM under every recipe: where FP8 runs, padding and evaluation change no state, and recipes can be changed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from fewer import every
from ranks import as_one_of
from small_model import RECIPES, SHAPE, Build, same, skip_unsupported, snapshot, step, tokens
from torch.distributed.device_mesh import init_device_mesh

from te_models import CausalLM, TEModelsForCausalLM, get_preset, plan
from te_models.config.model import ModelConfig
from te_models.errors import ConfigError, UsageError
from te_models.fp8.scaling_state import fp8_state


@pytest.mark.parametrize(("old", "new"), every(3, ["bf16", "delayed", "mxfp8"], RECIPES))
def test_a_swap_is_a_fresh_model_with_the_same_weights(small: Build, old: str, new: str) -> None:
    if old == new == "delayed":
        pytest.skip("the scales move along: the test below")
    model = small(old)
    if model.engine == "native":
        skip_unsupported(new)
    step(model, tokens())
    model.zero_grad()
    model.set_recipe(new)
    fresh = small(new, **({"amax_history_len": 1024} if new == "delayed" else {}))
    for seed in range(3):
        assert step(model, tokens(seed=seed)) == step(fresh, tokens(seed=seed))
    for (name, p), q in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert_same_bits(name, p.grad, q.grad)
    assert same(fp8_state(model), fp8_state(fresh)) and model.recipe.name == new


def test_a_swap_between_delayed_recipes_moves_the_scales_along(small: Build) -> None:
    model = small("delayed", amax_history_len=4)
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
        if name.endswith("fwd.amax_history")
        and not torch.equal(after[name][-3:], before[name][-3:])
    ]
    assert len(moved) == 12, "the moved histories are live: the next step writes into them"


def test_the_plan_names_every_linear_and_its_reason(small: Build) -> None:
    model = small("current")
    plan = model.plan()
    assert len(plan) == 21 and plan.count("FP8") == 12 and plan.count("BF16") == 9
    first = next(iter(plan))
    assert (first.layer, first.module, first.precision) == ("0", "self_attn.qkvg_proj", "BF16")
    assert first.gemm == "64 -> 192" and "num_layers_at_start_in_bf16 = 1" in first.reason
    text = str(plan)
    assert "E4M3/E5M2 Float8CurrentScaling" in text and "1-3" in text and "lm_head" in text
    assert (
        f"engine {model.engine} (asked for)" in text
        if model.engine == "emulated"
        else "NVIDIA" in text
    )


@pytest.mark.parametrize(
    "options, kind, message",
    [
        (dict(recipe="current", num_hidden_layers=2), ConfigError, "nothing would run in FP8"),
        (
            dict(recipe="current", precision={"*": "bf16"}),
            ConfigError,
            "keeps all linears in BF16: .* in FP8; lower",
        ),
        (
            dict(recipe="mxfp8", intermediate_size=112),
            ConfigError,
            "intermediate_size=112 is not a multiple of 32",
        ),
        (dict(sequence_parallel=True), UsageError, "give tp_mesh"),
        (dict(recipe="bf16", fp8_params=True), UsageError, "fp8_params"),
    ],
)
def test_unsupported_options_are_refused(
    small: Build, options: dict, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as error:
        small(**options)
    assert "\n" not in str(error.value)


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
    assert same(fp8_state(again), fp8_state(native)) and bool(fp8_state(native)) == (
        recipe == "delayed"
    )
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
    with pytest.raises(
        ValueError, match="compute capability 10.0 or higher.*engine='emulated' runs"
    ):
        CausalLM.from_preset("gated-nano", recipe="mxfp8", engine="native")


CONVERSIONS: dict[str, Callable[[CausalLM], Any]] = {
    "double()": lambda model: model.double(),
    "to(float64)": lambda model: model.to(torch.float64),
    "inside another module": lambda model: torch.nn.Sequential(model).to(torch.float64),
    "half()": lambda model: model.half(),
    "to(float16)": lambda model: model.to(dtype=torch.float16),
    "to(float8_e4m3fn)": lambda model: model.to(torch.float8_e4m3fn),
    "type(int8)": lambda model: model.type(torch.int8),
}

# Each makes a model, or its config and what else is known before weights are there, in a dtype.
WAYS_TO_A_DTYPE: dict[str, Callable[[Any], Any]] = {
    "from_preset": lambda dtype: CausalLM.from_preset(
        "gated-nano", **SHAPE, device="cpu", dtype=dtype
    ),
    "CausalLM": lambda dtype: CausalLM(
        get_preset("gated-nano", **SHAPE), device="cpu", dtype=dtype
    ),
    "from_pretrained": lambda dtype: CausalLM.from_pretrained(
        "gated-nano", device="cpu", dtype=dtype
    ),
    "torch_dtype": lambda dtype: CausalLM.from_pretrained(
        "gated-nano", device="cpu", torch_dtype=dtype
    ),
    "TEModelsForCausalLM": lambda dtype: TEModelsForCausalLM.from_pretrained(
        "gated-nano", device="cpu", dtype=dtype
    ),
}


@pytest.mark.parametrize("way", WAYS_TO_A_DTYPE)
def test_a_dtype_is_one_of_torch_or_its_name(way: str) -> None:
    build = WAYS_TO_A_DTYPE[way]
    for dtype in (torch.float32, "float32", "torch.float32"):
        assert build(dtype).dtype == torch.float32
    # A new model's, and that of the folder.
    for dtype in (None, "auto"):
        assert build(dtype).dtype == torch.bfloat16
    for dtype in ("bf16", "float64", torch.float64, torch.int8, 3):
        line = f"dtype={dtype!r} is not supported: give bfloat16, float16, float32 or 'auto'"
        with pytest.raises(UsageError, match=f"^{re.escape(line)}$"):
            build(dtype)


def test_a_plan_takes_the_name_of_a_dtype() -> None:
    assert (
        plan("gated-nano", dtype="float32").to_dict()
        == plan("gated-nano", dtype=torch.float32).to_dict()
    )
    with pytest.raises(UsageError, match="dtype='half' is not supported"):
        plan("gated-nano", dtype="half")


@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_conversion_to_another_dtype_is_refused_in_one_line(how: str) -> None:
    model = CausalLM.from_preset("gated-nano", **SHAPE, device="cpu")
    if "8" in how:
        says = f"te layers do not run in torch.{how[:-1].partition('(')[2]}: FP8 is a recipe, with"
    elif "half" in how or "16" in how:
        says = "build or load it with dtype=torch.float16"
    else:
        says = "te layers do not run in FP64"
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        CONVERSIONS[how](model)
    assert "\n" not in str(caught.value)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.to("cpu").to(torch.bfloat16).to_empty(device="cpu").dtype == torch.bfloat16


def test_data_parallel_is_refused_before_it_copies_a_model() -> None:
    model = CausalLM.from_preset("gated-nano", **SHAPE, device="cpu")
    with pytest.raises(
        UsageError, match="DataParallel cannot copy te modules: start the program with torchrun"
    ):
        model._replicate_for_data_parallel()  # torch.nn.DataParallel calls it on each module, on GPUs only


@pytest.mark.parametrize("moe", [False, True], ids=["tp", "ep"])
def test_the_number_of_parameters_is_that_of_all_ranks(moe: bool) -> None:
    sizes: dict[str, Any] = dict(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    sizes |= dict(
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        attention_sinks=True,
        attention_bias=True,
    )
    sizes |= (
        dict(moe=dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32))
        if moe
        else {}
    )
    deltanet = dict(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8)
    sizes |= dict(layer_types=("linear_attention", "full_attention"), linear_attention=deltanet)
    config = ModelConfig(**sizes, attention_gate="headwise")
    assert config.num_padding_parameters
    with as_one_of(2):
        mesh = init_device_mesh("cpu", (2,))
        model = CausalLM(
            config, recipe="bf16", device="cpu", **({"ep_mesh": mesh} if moe else {"tp_mesh": mesh})
        )
        assert model.num_parameters() == config.num_parameters
        model.layers[0].requires_grad_(False)
        only = config.num_parameters - config.layers[0].num_parameters
        assert model.num_parameters(only_trainable=True) == only
