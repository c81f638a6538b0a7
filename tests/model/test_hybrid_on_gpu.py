"""Hybrids on a GPU at the sizes of heads that are published: fused against plain, packed, as a CUDA graph, decoding."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from places import PLACE
from torch import Tensor

from te_models import CausalLM, ModelConfig
from te_models.kernels import delta_rule
from te_models.training.cuda_graph import WARM_UP, GraphedStep

CONFIG = ModelConfig(
    vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=128, partial_rotary_factor=0.25, qk_norm=True, zero_centered_norm=True,
    layer_types=("linear_attention",) * 3 + ("full_attention",), max_position_embeddings=2048,
    linear_attention=dict(num_key_heads=4, num_value_heads=8, key_head_dim=128, value_head_dim=128),
)  # fmt: skip
NO_EDGES = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
RECIPES = ["bf16", "current", "delayed"]
# Of whole tensors, relative: 3 mantissa bits of E4M3 round by up to 2^-4, BF16 by up to 2^-9, and 30 roundings add up.
BOUND = {"bf16": 2.0**-6, "current": 2.0**-3, "delayed": 2.0**-3}

pytestmark = pytest.mark.gpu


def build(recipe: str, **options: Any) -> CausalLM:
    torch.manual_seed(0)
    edges = NO_EDGES if recipe != "bf16" else {}
    return CausalLM(CONFIG, recipe=recipe, **{**PLACE, **edges, **options})


def batch(model: CausalLM, seq: int = 700, packed: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(0, 512, (2, seq), generator=torch.Generator().manual_seed(seq)).to(
        model.device
    )
    found = dict(input_ids=ids, labels=ids)
    if packed:
        found["document_ids"] = (
            (torch.arange(seq, device=ids.device) // 93).expand_as(ids).contiguous()
        )
    return found


@contextlib.contextmanager
def plain_rule() -> Iterator[None]:
    """Inside, the delta rule runs in plain PyTorch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_rule, "runs_on_kernels", lambda device, dtype: False)
        yield


def gradients(model: CausalLM, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    model.calibrate(given)
    loss = model(**given, return_logits=False).loss
    assert loss is not None
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def difference(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def widened(weights: CausalLM) -> CausalLM:
    """A model in FP32, of separate modules, with the same weights."""
    model = build("bf16", fused=False, compile=False, dtype=torch.float32)
    with torch.no_grad():
        for own, other in zip(model.parameters(), weights.parameters(), strict=True):
            own.copy_(other)
    return model


def test_the_kernels_of_the_package_run() -> None:
    pytest.importorskip("fla")
    model = build("bf16")
    with torch.no_grad():
        assert delta_rule.runs_on_kernels(model.device, model.dtype)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_default_path_is_the_plain_one(recipe: str, packed: bool) -> None:
    """Compiled, fused and with the package's kernels it is as near to FP32 as separate modules and the plain rule are.

    Near each other they need not be: the gradients of A_log and dt_bias are small sums of large terms.
    """
    fast, plain = build(recipe), build(recipe, fused=False, compile=False)
    given = batch(fast, packed=packed)
    loss, found = gradients(fast, given)
    with plain_rule():
        expected, wanted = gradients(plain, given)
        reference = gradients(widened(plain), given)[1]
    assert loss.item() == pytest.approx(expected.item(), rel=2e-2)
    assert found.keys() == wanted.keys() == reference.keys()
    errors = {
        n: (difference(found[n], reference[n]), difference(wanted[n], reference[n]))
        for n in reference
    }
    assert {
        name: pair
        for name, pair in errors.items()
        if not pair[0] <= 2 * pair[1] + BOUND[recipe] / 4
    } == {}


@pytest.mark.parametrize(
    "recipe", ["bf16", "delayed"]
)  # under "current" the other documents change the scales
def test_packed_documents_are_those_alone(recipe: str) -> None:
    model = build(recipe).eval()
    given = batch(model, packed=True)
    wide = widened(model).eval()
    with torch.no_grad():
        together = model(given["input_ids"], document_ids=given["document_ids"]).logits
        for start in range(0, 700, 93):
            row = given["input_ids"][:, start : start + 93]
            alone = model(row).logits
            # Both differ from FP32 by their roundings, in chunks that begin elsewhere.
            assert difference(together[:, start : start + 93], alone) <= 3 * difference(
                alone, wide(row).logits
            )


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_step_is_captured_and_replays_the_eager_one(recipe: str, packed: bool, mode: str) -> None:
    captured, eager = (build(recipe, activation_checkpointing=mode) for _ in range(2))
    graphed, found, wanted = GraphedStep(captured), [], []
    given = batch(captured, packed=packed)
    eager.calibrate(given)
    for step in range(WARM_UP + 4):
        own = {name: t.roll(step, 1) if name != "document_ids" else t for name, t in given.items()}
        found.append(graphed(**own).item())
        eager.zero_grad()
        loss = eager(**own, return_logits=False).loss
        assert loss is not None
        loss.backward()
        wanted.append(loss.item())
    assert graphed.graph is not None
    assert found == pytest.approx(wanted, rel=1e-2)
    graphed.close()


@pytest.mark.parametrize("recipe", RECIPES)
def test_decoding_as_a_graph_is_the_forward_pass(recipe: str) -> None:
    model = build(recipe).eval()
    ids = batch(model, 100)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    found = model.generate(ids, 40, attention_mask=mask, eos_token_id=None)
    whole = torch.nn.functional.pad(mask, (0, 40), value=1)
    with torch.no_grad():
        logits = model(found, attention_mask=whole).logits[:, 99:-1].float()
    taken = logits.gather(2, found[:, 100:, None])[..., 0]
    assert (logits.amax(-1) - taken).max() <= 4 * BOUND[recipe] * logits.abs().max()


def test_a_long_row_fits() -> None:
    model = CausalLM(
        CONFIG, recipe="current", **PLACE, num_layers_at_end_in_bf16=0, activation_checkpointing="full"
    )  # fmt: skip
    ids = torch.randint(0, 512, (1, 2048), device=model.device)
    loss = model(ids, labels=ids, return_logits=False).loss
    assert loss is not None and bool(loss.isfinite())
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
