"""Calibration gives delayed scaling the scales of a step with the amaxes of BF16, and changes nothing else."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import assert_same_tensors
from fewer import every
from kinds import EMULATED, KINDS, tokens
from ranks import run_ranks
from torch import Tensor

import te_models.engine.emulated as emulated
from te_models import CausalLM
from te_models.config.presets import get_preset
from te_models.config.recipe import get_recipe
from te_models.engine.emulated.gemm import exact_gemm
from te_models.errors import UsageError
from te_models.fp8.scaling_state import WIDTHS, delayed_states, fp8_state, gemms_of
from te_models.planning.memory_plan import plan_memory

SHAPE: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2
)
SHAPE |= dict(num_key_value_heads=1, max_position_embeddings=64)
RECIPES: dict[str, dict[str, Any]] = {
    "max": dict(amax_history_len=4),
    "most-recent": dict(amax_history_len=8, amax_compute_algo="most_recent", margin=1),
    "no-history": dict(amax_history_len=1),
    "e4m3": dict(amax_history_len=3, fp8_format="E4M3"),
    "head": dict(amax_history_len=2, lm_head="fp8", num_layers_at_end_in_bf16=0),
    "all-blocks": dict(
        amax_history_len=2, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0
    ),
}


def build(recipe: str = "delayed", **options: Any) -> CausalLM:
    torch.manual_seed(1)
    return CausalLM.from_preset(
        "gated-nano", recipe=recipe, device="cpu", **{**SHAPE, **options}
    ).train()


def batch(seed: int = 0, rows: int = 2, length: int = 24) -> dict[str, Tensor]:
    ids = torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))
    return dict(input_ids=ids, labels=ids)


def state(model: CausalLM) -> dict[str, Tensor]:
    found = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    assert found
    return found


def amaxes(model: CausalLM, weight: float = 1.0) -> dict[str, tuple[float, float, float]]:
    """Module -> amax of input, weight and gradient of the output, of the same weights in BF16, by retained tensors."""
    twin, seen = copy.deepcopy(model), {}
    names = [name for name, m in twin.named_modules() if isinstance(m, twin.te.Linear)]
    twin.set_recipe("bf16")

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            output.retain_grad()
            seen[name] = inputs[0], module.weight, output

        return hook

    for name in names:
        twin.get_submodule(name).register_forward_hook(keep(name))
    (twin(**batch()).loss * weight).backward()

    def amax(tensor: Any) -> float:
        return tensor.detach().abs().max().item()

    return {name: (amax(x), amax(w), amax(y.grad)) for name, (x, w, y) in seen.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_scales_and_histories_are_those_of_a_step_with_these_amaxes(name: str) -> None:
    """The engine's own update, after amaxes where its casts record them."""
    model, other = build(**RECIPES[name]), build(**RECIPES[name])
    measured = amaxes(model, weight=0.25)
    model.calibrate(batch(), weights=[0.25])
    emulated.FP8GlobalStateManager.reset()
    other(**batch())  # registers its modules for updates
    for key, tensor in fp8_state(other).items():
        tensor.fill_(1.0 if key.endswith("scale") else 0.0)
        if key.endswith("amax_history"):
            x, w, dy = measured[key.removesuffix(".amax_history").rpartition(".")[0]]
            tensor[0] = torch.tensor([x, w, 0.0] if "fwd" in key else [dy, 0.0])
    for forward in (True, False):
        emulated.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=forward)
    assert_same_tensors(state(model), state(other))
    assert len(state(model)) == 4 * (4 * len(model.fp8_layers) + model.recipe.head_in_fp8)


@pytest.mark.parametrize(
    "options",
    [
        dict(activation_checkpointing="full"),
        dict(activation_checkpointing="selective"),
        dict(activation_checkpointing=2),
        dict(activation_offload=True),
        dict(fused=True),
    ],
    ids=str,
)
def test_how_activations_are_stored_changes_no_scale(options: dict[str, Any]) -> None:
    model, other = build(), build(**options)
    for each in (model, other):
        each.calibrate(batch())
    assert_same_tensors(state(other), state(model))
    assert other.activation_checkpointing == options.get("activation_checkpointing", "none")


def test_fp8_weights_keep_the_scale_they_were_written_with() -> None:
    model, other = build(fp8_params=True), build()
    for each in (model, other):
        each.calibrate(batch())
    scales, others = state(model), state(other)
    for name, tensor in scales.items():
        if name.endswith("fwd.scale"):
            owner = name.removesuffix(".scaling_fwd.scale")
            weight: Any = model.get_parameter(f"{owner}.weight")
            assert tensor[1] * weight._scale_inv == pytest.approx(1, rel=1e-6)
            assert tensor[0] == pytest.approx(
                others[name][0].item(), rel=0.1
            )  # the weights are rounded to FP8
        assert (tensor != 0).any()


def test_nothing_but_scales_changes() -> None:
    model = build()
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    weights, recipe, before = (
        [p.detach().clone() for p in parameters],
        model.recipe,
        torch.get_rng_state(),
    )

    def draw(*given: Any) -> None:
        torch.rand(1)

    model.layers[1].register_forward_hook(draw)
    with torch.no_grad():
        model.calibrate(batch())
    assert torch.equal(torch.get_rng_state(), before) and model.recipe is recipe and model.training
    assert all(torch.equal(p, w) for p, w in zip(parameters, weights, strict=True))
    assert torch.equal(parameters[0].grad, torch.ones_like(parameters[0]))
    assert all(p.grad is None for p in parameters[1:])
    linears = [m for m in model.modules() if isinstance(m, model.te.Linear)]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in linears)


def test_gradients_reach_the_first_step_however_small_the_loss() -> None:
    """With scales of 1 most of them are below E5M2's smallest number. FP8 moves a norm by a percent or two."""
    norms = {}
    for name, recipe, calibrated in (
        ("bf16", "bf16", True),
        ("delayed", "delayed", True),
        ("te", "delayed", False),
    ):
        model = build(recipe)
        if calibrated:
            model.calibrate(batch(), weights=[2.0**-16])
        (model(**batch()).loss * 2.0**-16).backward()
        gradients = [p.grad for p in model.layers[1].parameters() if p.grad is not None]
        norms[name] = torch.nn.utils.get_total_norm(gradients).item() * 2**16
    assert norms["delayed"] == pytest.approx(norms["bf16"], rel=0.03)
    assert norms["te"] < 0.5 * norms["bf16"]


def test_micro_batches_are_measured_together() -> None:
    """Each has its own half of the largest values, and the loss of both is the mean."""
    model, other, whole = (build(dtype=torch.float32) for _ in range(3))
    both = {name: torch.cat([batch(1)[name], batch(2)[name]]) for name in batch()}
    model.calibrate(batch(1), batch(2))
    other.calibrate(batch(2), batch(1), weights=[0.5, torch.tensor(0.5)])
    whole.calibrate(both)
    assert_same_tensors(state(other), state(model))
    for name, tensor in state(whole).items():
        torch.testing.assert_close(state(model)[name], tensor, rtol=1e-4, atol=0)


@pytest.mark.parametrize("length", [1, 4])
def test_scales_that_are_there_are_kept(length: int, tmp_path: Path) -> None:
    model = build(amax_history_len=length)
    model.calibrate(batch())
    first = state(model)
    model.calibrate(batch(1))
    assert_same_tensors(state(model), first)
    model.save_pretrained(tmp_path)
    loaded = CausalLM.from_pretrained(tmp_path, device="cpu")
    loaded.calibrate(batch(1))
    assert_same_tensors(state(loaded), first)


def test_a_measured_scale_may_be_1() -> None:
    model = build(amax_history_len=4)
    model.calibrate(batch())
    for name, tensor in fp8_state(model).items():
        tensor.fill_(1.0) if name.endswith("scale") else tensor[-1].fill_(448.0)
    first = state(model)
    model.calibrate(batch())
    assert_same_tensors(state(model), first)


def test_a_change_of_recipe_is_measured_anew() -> None:
    model = build()
    model.calibrate(batch())
    first = state(model)
    model.set_recipe("current")
    model.calibrate(batch(1))
    assert not fp8_state(model)
    model.set_recipe("delayed")
    with torch.no_grad():
        model.eval()(**batch(1))  # its first forward makes the state, and leaves it as new
    model.train().calibrate(batch())
    assert_same_tensors(state(model), first)


def test_only_linears_without_scales_are_measured() -> None:
    """A recipe with fewer BF16 layers keeps the scales that it finds."""
    model = build()
    model.calibrate(batch(1))
    first = state(model)
    model.set_recipe("delayed", num_layers_at_start_in_bf16=0)
    model.calibrate(batch())
    second = state(model)
    assert len(second) == len(first) * 3 // 2
    assert_same_tensors({name: second[name] for name in first}, first)
    assert all(bool((tensor != 0).any()) for tensor in second.values())


@pytest.mark.parametrize("recipe", ["bf16", "current", "blockwise", "mxfp8"])
def test_other_recipes_need_no_scales(recipe: str) -> None:
    model = build(recipe)
    model.layers[0].register_forward_hook(lambda *given: 1 / 0)
    model.calibrate(batch())


def test_what_cannot_be_measured_is_an_error() -> None:
    model = build()
    with pytest.raises(UsageError, match="no batches"):
        model.calibrate()
    with pytest.raises(UsageError, match="have labels: give all labels, or none"):
        model.calibrate(batch(), dict(input_ids=batch()["input_ids"]))
    assert model.recipe.name == "delayed" and not fp8_state(model)


def test_documents_and_masks_are_taken_too() -> None:
    model, other = build(), build()
    ids = batch(length=32)
    model.calibrate(
        {**ids, "document_ids": torch.arange(32).div(16, rounding_mode="floor").expand(2, 32)}
    )
    other.calibrate({**ids, "attention_mask": torch.ones(2, 32, dtype=torch.int64)})
    assert all(
        bool((tensor != 0).any()) for each in (model, other) for tensor in state(each).values()
    )
    assert any(not torch.equal(tensor, state(other)[name]) for name, tensor in state(model).items())


def test_blocks_are_recomputed_to_save_memory() -> None:
    model, calls = build(), []
    for layer in (1, 2):
        model.layers[layer].self_attn.register_forward_pre_hook(
            lambda *given, layer=layer: calls.append(layer)
        )
    model.calibrate(batch())
    assert calls == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("shape", "mode"),
    every(
        2,
        [("gated-124m", 64, 512), ("llama-3.1-8b", 1, 8192)],
        ["none", "selective", "full"],
    ),
)
def test_calibration_fits_where_the_step_does(shape: tuple[str, int, int], mode: str) -> None:
    """It has no gradients of weights, which a plan of BF16 for LoRA leaves out too."""
    preset, rows, length = shape
    config, options = get_preset(preset), dict(batch_size=rows, seq_len=length, lora_rank=8)
    step = plan_memory(config, get_recipe("delayed"), activation_checkpointing=mode, **options)
    calibration = plan_memory(
        config, get_recipe("bf16"), activation_checkpointing="full", **options
    )
    assert calibration.peak.total <= step.peak.total


def unmeasured_gradients(name: str, edge: int) -> list[str]:
    """Calibrate a model of a kind; return what has an input, and no amax of its output gradient."""
    kind = KINDS[name]
    with kind.known():
        torch.manual_seed(0)
        edges = dict(num_layers_at_start_in_bf16=edge, num_layers_at_end_in_bf16=0)
        model = CausalLM(kind.config, recipe="delayed", **EMULATED, **edges).train()
        ids = tokens(model)
        model.calibrate(dict(input_ids=ids, labels=ids))
    found = []
    for module_name, module in model.named_modules():
        states = delayed_states(module) if isinstance(module, model.te.LINEARS) else {}
        if not states:
            continue
        for gemm in range(gemms_of(module)):
            x = states[".scaling_fwd"].amax_history[:, WIDTHS["scaling_fwd"] * gemm]
            dy = states[".scaling_bwd"].amax_history[:, WIDTHS["scaling_bwd"] * gemm]
            if x.any() and not dy.any():
                found.append(f"{module_name}[{gemm}]")
    return found


@pytest.mark.parametrize("edge", [0, 1])
def test_gradients_reach_each_of_several_mixers_beside_each_other(edge: int) -> None:
    """Each scales the input of its block by a factor, so that no mixer's input leads to another's."""
    assert not unmeasured_gradients("Mamba 2 beside attention", edge)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_gradients_reach_every_linear(name: str) -> None:
    assert not unmeasured_gradients(name, edge=0) and not unmeasured_gradients(name, edge=1)


def _compare_a_step_with_one_process(rank: int, folder: str) -> None:
    """Take a first step on this rank's half of a batch, and compare it with the same step on the whole batch."""
    groups = [dist.new_group([number]) for number in range(2)]
    own_group = groups[rank]
    assert isinstance(own_group, dist.ProcessGroup)
    whole = batch(rows=4, length=32)
    half = {name: tensor.chunk(2)[rank] for name, tensor in whole.items()}
    alone = build(num_hidden_layers=3)
    alone.amax_group = own_group
    shared = build(num_hidden_layers=3)
    # Sums as on tensor cores: else products of up to 2^20 terms are summed in another order than larger ones.
    with exact_gemm():
        alone.calibrate(whole)
        shared.calibrate(half, weights=[0.5])
        assert_same_tensors(state(shared), state(alone))
        expected = alone(**whole)
        output = shared(**half)
        assert torch.equal(output.logits, expected.logits.chunk(2)[rank])
        expected.loss.backward()
        (output.loss / 2).backward()
        assert_same_tensors(state(shared), state(alone))


def test_two_processes_have_the_scales_and_logits_of_one(tmp_path: Path) -> None:
    """The update of the weights is the first thing that differs: gradients are summed in another order."""
    run_ranks(_compare_a_step_with_one_process, tmp_path, 2, exact=True)
