"""What compiled and fused operations keep for backward, which only a GPU runs, against the memory plan."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from autograd_bytes import autograd_bytes, planned_bytes
from fewer import some
from kinds import KINDS
from planned_shapes import ROWS, SHAPE, VARIANTS

from te_models import CausalLM, get_recipe
from te_models.kernels.dispatch import Kernels, compiled_kernels
from te_models.planning.operations import Tape, Training
from te_models.planning.parameter_bytes import FP32


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
    *itertools.product(HYBRIDS, ("bf16", "current"), ("none", "selective", "full"), ROWS),
    *((name, "bf16", "none", (2, 64)) for name in VARIANTS),
]


@pytest.mark.parametrize(("name", "recipe", "mode", "rows"), some(5, COMPILED_CASES))
def test_compiled_activations_are_what_autograd_keeps(
    compiled: Kernels, name: str, recipe: str, mode: str, rows: tuple[int, int]
) -> None:
    """To the byte. The compiler may keep a copy of what another operation keeps anyway: causal convolutions did."""
    fields = VARIANTS["hybrid"] | HYBRIDS[name] if name in HYBRIDS else VARIANTS[name]
    place: dict[str, Any] = dict(engine="emulated", device="cpu", activation_checkpointing=mode)
    model = CausalLM.from_preset("gated-nano", **SHAPE | fields, recipe=recipe, **place)
    model.kernels = compiled
    assert autograd_bytes(model, torch.randint(0, 288, rows)) == planned_bytes(
        model, *rows, compile=True
    )


@pytest.mark.parametrize(
    ("recipe", "joint"),
    [
        (get_recipe("current"), True),
        (get_recipe("blockwise"), True),
        (get_recipe("blockwise", use_f32_scales=True), False),
        (get_recipe("blockwise", backward_override="high_precision"), False),
    ],
)
def test_experts_make_rows_of_tokens_where_kernels_do(recipe: Any, joint: bool) -> None:
    config, prefix = KINDS["experts"].config, "layers.1.mlp."
    tape = Tape(config, recipe, Training(batch_size=1, seq_len=64))
    tape._part = prefix
    for name in ("gate_up_proj", "down_proj"):
        assert tape.gathers(config.linears[prefix + name]) == joint


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_fused_experts_keep_no_fp8_weights(recipe: str) -> None:
    """By hand: backward first holds dy in FP8 twice and one FP8 copy of the weights, then a gradient of them as well.

    Of dy that is its transposed copy alone; frozen weights in BF16 have no gradient.
    """
    config, name = KINDS["experts"].config, "layers.1.mlp.gate_up_proj"
    spec = config.linears[name]
    count, size = spec.gemms, spec.gemms * spec.inputs * spec.outputs
    factors = FP32 * count

    def planned(rows: int, gathered: bool = False, **fields: Any) -> tuple[int, int]:
        tape = Tape(config, get_recipe(recipe), Training(batch_size=1, seq_len=64, **fields))
        tape._part = name.removesuffix(spec.name)
        assert tape.gathers(spec) == (fields.keys() <= {"cached_weights"})
        step = tape.linear(spec, rows=rows, gathered=gathered)
        if gathered:
            assert step.saved == 0 and step.produces == 64 * 64 * 2
        return step.copies, step.scratch

    few, many = 16 * count, 4096 * count
    assert planned(few) == (0, few * spec.outputs + factors)
    assert planned(many) == (0, 2 * many * spec.outputs - size + 2 * factors)
    assert planned(few, cached_weights=True)[0] == 2 * size + factors
    assert planned(few, fused=False)[0] == 2 * size + factors
    rows_of_tokens = many * spec.inputs * 2  # their gradients, before they are summed
    assert planned(many, gathered=True) == (
        0,
        2 * many * spec.outputs - size + 2 * factors + rows_of_tokens,
    )
    assert planned(few, gathered=True) == (0, few * (spec.outputs + spec.inputs) + 2 * factors)
    frozen = dict(lora_rank=4)
    assert planned(few, **frozen)[0] == 0 and planned(few, **frozen)[1] >= size
