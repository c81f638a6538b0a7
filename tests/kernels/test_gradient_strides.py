"""Gradients and inputs of any strides: each operation with a backward of its own gives what contiguous tensors give.

`y.sum().backward()` hands on one number whose strides are all 0; a kernel that computes addresses from the shape would
read beyond it.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kernels.test_gated_attention import setting
from torch import Tensor, nn

import te_models
from te_models.engine import emulated
from te_models.kernels import (
    composed_attention,
    early_save,
    elementwise,
    gated_attention,
    handover,
    lm_head,
)
from te_models.kernels.expert_rows import combine, dispatch
from te_models.kernels.from_inputs import from_inputs
from te_models.kernels.gradient_room import GradientRoom, split
from te_models.kernels.grouped_product import grouped_product
from te_models.kernels.unit_norm import unit_norm
from te_models.model import router

ROOT = Path(te_models.__file__).parent
Operation = Callable[[Tensor], Tensor]


def _te(module: nn.Module, quantized: bool, *rows: list[int]) -> Operation:
    def run(x: Tensor) -> Tensor:
        with emulated.autocast(enabled=quantized, recipe=emulated.recipe.Float8CurrentScaling()):
            return module(x, *rows)

    return run


def _routed(x: Tensor) -> Tensor:
    chosen = torch.arange(32).view(16, 2) % 3
    places = router.places(chosen, 3, 8)
    rows = dispatch(x, places.token, places.row)
    return combine(rows, torch.linspace(0, 1, 32).view(16, 2), places.token, places.row)


def _divided(x: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, 3 * 24 * 64).view(3, 24, 64).requires_grad_()
    return grouped_product(x, weights, [5, 0, 11])


def _attention(x: Tensor) -> Tensor:
    heads = gated_attention.Heads(2, 2, 8, "elementwise")
    angle = torch.linspace(0, 3, 8 * 4).view(8, 4).repeat(1, 2)
    return gated_attention.attention_core(x * 1.0, setting(2, 8, heads, angle.cos(), angle.sin()))


def _composed(x: Tensor) -> Tensor:
    q, k, v = x.view(2, 8, 4, 16).transpose(1, 2).split([2, 1, 1], dim=1)
    return composed_attention.composed_attention(q, k, v, None, 0.3, 5.0, torch.tensor([0.3, -1.0]))


def _of_parts(x: Tensor) -> Tensor:
    one, two = split(x, GradientRoom((24, 40)))
    return torch.cat((two * 2.0, one), dim=-1)


def _swiglu(x: Tensor) -> Tensor:
    return handover.swiglu(
        x, nn.Identity(), nn.Identity(), elementwise.swiglu, elementwise.swiglu_backward
    )


def _quantized(x: Tensor) -> Tensor:
    quantizer = emulated.Float8CurrentScalingQuantizer(emulated.DType.kFloat8E4M3)
    return quantizer(x).dequantize()


def _loss(x: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, 64 * 24).view(24, 64).requires_grad_()
    return lm_head.linear_cross_entropy(x, weight, torch.arange(16) % 24, chunk=5).expand(3)


# The names of autograd Functions -> an operation of x [16, 64] that uses them.
OPERATIONS: dict[str, Operation] = {
    "engine/emulated/linear.py": _te(emulated.Linear(64, 32), True),
    "engine/emulated/linear.py, unquantized": _te(emulated.Linear(64, 32), False),
    "engine/emulated/grouped.py": _te(emulated.GroupedLinear(3, 64, 32), True, [0, 16, 0]),
    "engine/emulated/grouped.py, unquantized": _te(
        emulated.GroupedLinear(3, 64, 32), False, [3, 0, 13]
    ),
    "engine/emulated/layernorm.py": emulated.LayerNormWithoutBias(64),
    "engine/emulated/rmsnorm.py": emulated.RMSNorm(64),
    "numerics/tensors.py": _quantized,
    "kernels/gated_attention.py": _attention,
    "kernels/composed_attention.py": _composed,
    "kernels/handover.py": _swiglu,
    "kernels/early_save.py": early_save.save_early,
    "kernels/lm_head.py": _loss,
    "kernels/from_inputs.py": lambda x: from_inputs(elementwise.silu_gate)(x, x * 0.5),
    "kernels/expert_rows.py": _routed,
    "kernels/grouped_product.py": _divided,
    "kernels/gradient_room.py": _of_parts,
    "kernels/unit_norm.py": lambda x: unit_norm(x, 1e-6),
}
# Backward passes of the memory plan, of tensors without data.
WITHOUT_DATA = {
    "engine/planned.py",
    "engine/planned_experts.py",
    "engine/planned_modules.py",
    "kernels/delta_rule.py",
    "kernels/planned.py",
    "kernels/sdpa.py",
    "kernels/state_space.py",
    "planning/planned_decoder.py",
}
# Tested by the file named, in Triton's interpreter, by several processes or on a GPU.
ELSEWHERE = {
    "kernels/prefix_attention.py": "kernels/test_prefix_attention.py",
    "model/context_parallel.py": "model/test_context_parallel.py",
    "kernels/span_attention_triton.py": "kernels/stride_cases.py",
    "kernels/embedding_triton.py": "kernels/stride_cases.py",
    "kernels/conv_triton.py": "kernels/recurrent_cases.py",
    "kernels/grouped_linear_triton.py": "kernels/grouped_linear_cases.py",
    "kernels/joint_experts_triton.py": "kernels/joint_experts_cases.py",
    "kernels/grouped_blocks_triton.py": "kernels/expert_blocks_cases.py",
    "kernels/stored_experts_triton.py": "kernels/stored_cases.py",
    "engine/native_handover.py": "model/test_strides_on_gpu.py",
    "engine/native_norm.py": "model/test_strides_on_gpu.py",
    "engine/native_residual_norm.py": "model/test_strides_on_gpu.py",
    "model/tensor_parallel.py": "model/test_tensor_parallel.py",
}


def test_every_operation_with_a_backward_is_here() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if re.search(r"class \w+\(torch\.autograd\.Function\)", path.read_text())
    }
    here = {name.partition(",")[0] for name in OPERATIONS} | ELSEWHERE.keys()
    assert found - WITHOUT_DATA == here
    for name in ELSEWHERE.values():
        assert (Path(__file__).parents[1] / name).exists()


def assert_alike(found: Tensor, wanted: Tensor) -> None:
    """To the last bits of FP32: PyTorch's functions of other strides may be other code."""
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def gradient(operation: Operation, x: Tensor, spread: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of x for one of the output that `spread` makes of a contiguous one."""
    torch.manual_seed(1)
    leaf = x.detach().requires_grad_()
    y = operation(leaf)
    (found,) = torch.autograd.grad(y, leaf, spread(y))
    return found


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one number": lambda y: torch.full((), 0.5, dtype=y.dtype).expand(y.shape),
    "one row": lambda y: torch.linspace(-1, 1, y.shape[-1]).to(y.dtype).expand(y.shape),
    "transposed": lambda y: (
        torch.linspace(-1, 1, y.numel()).view(y.shape[::-1]).permute(*range(y.ndim)[::-1])
    ),
}


@pytest.mark.parametrize("strides", GRADIENTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_gradient_of_any_strides_gives_that_of_a_contiguous_one(name: str, strides: str) -> None:
    x, odd = torch.linspace(-2, 2, 16 * 64).sin().view(16, 64), GRADIENTS[strides]
    plain = gradient(OPERATIONS[name], x, lambda y: odd(y).contiguous())
    assert_alike(gradient(OPERATIONS[name], x, odd), plain)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_input_of_any_strides_gives_the_gradient_of_a_contiguous_one(name: str) -> None:
    if name == "kernels/composed_attention.py":
        pytest.skip("views its input itself")

    def plain(y: Tensor) -> Tensor:
        return GRADIENTS["transposed"](y).contiguous()

    wide = torch.linspace(-2, 2, 16 * 128).sin().view(16, 128)
    for x in (
        wide[:, 32:96],
        wide[:1, :64].expand(16, 64),
        wide.view(32, 64)[::2],
        wide.view(128, 16)[:64].t(),
    ):
        assert not x.is_contiguous()
        found, wanted = (gradient(OPERATIONS[name], own, plain) for own in (x, x.contiguous()))
        assert_alike(found, wanted)
