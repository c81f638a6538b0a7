"""What compiled and fused operations keep for backward, which only a GPU runs, against the memory plan."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from autograd_bytes import autograd_bytes, held_bytes
from fewer import every, some
from kinds import KINDS
from planned_shapes import ROWS, SHAPE, VARIANTS

from te_models import CausalLM, get_recipe
from te_models.kernels.dispatch import Kernels, compiled_kernels
from te_models.planning.measured import MeasuredStep
from te_models.planning.training import Training


@pytest.fixture(scope="module")
def compiled() -> Kernels:
    """The compiled operations of a GPU. What they keep is the choice of AOT autograd, which needs no code generator."""
    with pytest.MonkeyPatch.context() as patch:
        whole = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
        patch.setattr(torch, "compile", lambda function, mode: whole(function))
        return compiled_kernels.__wrapped__("default")


HYBRIDS: dict[str, dict[str, Any]] = {
    "equal heads": {},
    "groups": dict(
        linear_attention=dict(
            num_key_heads=1, num_value_heads=4, key_head_dim=32, value_head_dim=64
        )
    ),
    "8 taps": dict(
        linear_attention=dict(
            num_key_heads=2,
            num_value_heads=2,
            key_head_dim=64,
            value_head_dim=32,
            conv_kernel_dim=8,
        ),
    ),
}
COMPILED_CASES = [
    *every(9, HYBRIDS, ("bf16", "current"), ("none", "selective", "full"), ROWS, rest=2),
    *some(9, ((name, "bf16", "none", (2, 64)) for name in VARIANTS)),
]


@pytest.mark.parametrize(("name", "recipe", "mode", "rows"), COMPILED_CASES)
def test_compiled_activations_are_what_autograd_keeps(
    compiled: Kernels, name: str, recipe: str, mode: str, rows: tuple[int, int]
) -> None:
    """The compiler may keep a copy of what another operation keeps anyway: causal convolutions did."""
    fields = VARIANTS["hybrid"] | HYBRIDS[name] if name in HYBRIDS else VARIANTS[name]
    place: dict[str, Any] = dict(engine="emulated", device="cpu", activation_checkpointing=mode)
    model = CausalLM.from_preset("gated-nano", **SHAPE | fields, recipe=recipe, **place)
    model.kernels = compiled
    training = Training(
        batch_size=rows[0],
        seq_len=rows[1],
        activation_checkpointing=mode,
        dtype_bytes=model.dtype.itemsize,
        cuda=False,
    )
    setting = dataclasses.replace(training.setting, compile=True)
    planned = MeasuredStep(model.config, model.recipe, setting).kept(rows[0])
    kept = autograd_bytes(model, torch.randint(0, 288, rows))
    assert 0.99 * kept <= planned <= 1.01 * kept + held_bytes(model, rows[1])


@pytest.mark.parametrize(
    ("recipe", "joint"),
    [
        pytest.param(get_recipe("current"), True, marks=pytest.mark.slow),
        (get_recipe("delayed"), True),
        (get_recipe("blockwise"), True),
        pytest.param(get_recipe("mxfp8"), False, marks=pytest.mark.slow),
        pytest.param(get_recipe("blockwise", use_f32_scales=True), False, marks=pytest.mark.slow),
        (get_recipe("blockwise", backward_override="high_precision"), False),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_an_mlp_of_experts_is_one_operation_where_kernels_do_it(recipe: Any, joint: bool) -> None:
    """Then neither rows of tokens nor FP8 weights are kept: by hand, the tokens, both projections and small change."""
    config = KINDS["experts"].config
    experts = config.moe
    assert experts is not None
    training = Training(batch_size=512, seq_len=64)
    edges = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    run = MeasuredStep(config, recipe.replace(**edges), training.setting).run(512)
    activations, copies = run.forward[1].end.tolist()[:2]
    tokens, width = 512 * 64, config.hidden_size
    rows = tokens * experts.num_experts_per_tok
    linears = [linear for linear in config.layers[1].mlp.linears if linear.experts]
    weights = sum(linear.gemms * linear.inputs * linear.outputs for linear in linears)
    quantized = recipe.fields.get("backward_override", "none") == "none"
    assert (copies < 2 * weights) == (joint or not quantized)
    if joint:
        assert copies < 2 * sum(
            linear.inputs * linear.outputs * 1.2
            for linear in config.layers[1].linears.values()
            if not linear.experts
        )
    separate = rows * (width + experts.moe_intermediate_size)  # FP8 rows of both projections
    plain = dataclasses.replace(training, fused=False).setting
    apart = MeasuredStep(config, recipe.replace(**edges), plain).run(512).forward[1].end.tolist()[0]
    assert (apart - activations > separate) == joint
