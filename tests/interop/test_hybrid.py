"""Hybrids of gated attention and Gated DeltaNet inside transformers: generation, training and adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import Pair, close, load, read_by_transformers
from judge import transformers
from torch import Tensor

TOLERANCE = 1e-4  # of FP32 rounding, which a recurrence adds up


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(1, 131, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("case", ["hybrid-0", "hybrid-7", "hybrid-14"])
def test_transformers_generates_with_our_model(case: str, theirs: Callable[..., Pair]) -> None:
    """With its own cache, whose rows beam search reorders."""
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    judge, folder = theirs(case)
    wrapped, ids = modeling.TEModelsForCausalLM.wrap(load(folder)), tokens(3, 21)
    mask = torch.ones(3, 21, dtype=torch.long)
    mask[1, :8] = mask[2, :18] = 0
    for options in (dict(), dict(num_beams=3), dict(cache_implementation="static")):
        given: dict[str, Any] = dict(
            attention_mask=mask, max_new_tokens=10, do_sample=False, **options
        )
        assert torch.equal(wrapped.generate(ids, **given), judge.generate(ids, **given)), options


def test_a_pass_that_fills_a_cache_has_gradients(theirs: Callable[..., Pair]) -> None:
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    wrapped, ids = modeling.TEModelsForCausalLM.wrap(load(theirs("hybrid-7")[1])), tokens(2, 70)
    found = []
    for past in (None, transformers.DynamicCache(config=wrapped.config)):
        wrapped.zero_grad()
        wrapped(ids, cache=past, use_cache=past is not None).logits.square().mean().backward()
        found.append({name: p.grad.clone() for name, p in wrapped.named_parameters()})
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_packed_documents_from_any_position(theirs: Callable[..., Pair]) -> None:
    """As collators without padding give them: positions that do not follow begin a document."""
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    wrapped, ids = modeling.TEModelsForCausalLM.wrap(load(theirs("hybrid-7")[1])), tokens(1, 90)
    for first in (0, 3):
        positions = torch.cat((torch.arange(first, first + 40), torch.arange(50)))[None]
        both = wrapped(ids, position_ids=positions, use_cache=False).logits
        for part in (slice(0, 40), slice(40, 90)):
            alone = wrapped(ids[:, part], position_ids=positions[:, part], use_cache=False).logits
            close(both[:, part], alone, TOLERANCE)


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing", "ignore:.*were set but no parameter was matched"
)
@pytest.mark.filterwarnings("ignore:.*did not match any targeted module")
@pytest.mark.parametrize(
    "case", ["hybrid-0", pytest.param("hybrid-4", marks=pytest.mark.slow), "hybrid-14"]
)
@torch.no_grad()
def test_adapters_compute_the_same_in_transformers(
    case: str, theirs: Callable[..., Pair], tmp_path: Path
) -> None:
    lora, peft = pytest.importorskip("te_models.training.lora"), pytest.importorskip("peft")
    _, folder = theirs(case)
    adapted = lora.add_lora(load(folder), r=4, lora_alpha=8, target_modules="all-linear")
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.05)
    lora.save_lora(adapted, tmp_path)
    judge = peft.PeftModel.from_pretrained(read_by_transformers(folder), tmp_path).eval()
    close(adapted.eval()(tokens(2, 70)).logits, judge(tokens(2, 70)).logits, TOLERANCE)
