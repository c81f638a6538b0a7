"""Packed documents: a document's logits, loss and gradients do not depend on what shares its window."""

from typing import Any

import pytest
import torch
from bits import assert_same_bits
from torch import Tensor

from te_models import CausalLM
from te_models.data.dataset import TokenDataset
from te_models.data.documents import Document
from te_models.data.tokenizer import ByteTokenizer
from te_models.fp8.region import Autocasts
from te_models.kernels.sdpa import attention_mask
from te_models.model.forward_context import ForwardContext, forward_context
from te_models.model.recompute import Recompute

LENGTHS = ((5, 1, 18), (24,), (3, 9, 2, 10))  # of the documents in each window
SHAPES: dict[str, dict[str, Any]] = {
    "gated": {},
    "headwise": dict(attention_gate="headwise"),
    "window": dict(sliding_window=4, layer_types=("full_attention", "sliding_attention")),
    "qwen3": dict(qk_norm=True, attention_gate="none"),
    "partial rope": dict(partial_rotary_factor=0.5, no_rope_layers=(1, 0)),
    "linear rope": dict(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "full": dict(activation_checkpointing="full"),
    "selective": dict(activation_checkpointing="selective"),
}


def build(recipe: str = "bf16", **options: Any) -> CausalLM:
    torch.manual_seed(0)
    shape = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    place = dict(
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, device="cpu", engine="emulated"
    )
    return CausalLM.from_preset("gated-nano", **{**shape, **place, "recipe": recipe, **options})


def packed() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 96, (len(LENGTHS), 24), generator=torch.Generator().manual_seed(0))
    documents = [torch.repeat_interleave(torch.arange(7, 7 + len(row)), torch.tensor(row)) for row in LENGTHS]
    return ids, torch.stack(documents)


def alone(ids: Tensor) -> list[tuple[int, slice, Tensor]]:
    """Row, place and ids [1, n] of each document."""
    found = []
    for row, lengths in enumerate(LENGTHS):
        for length, end in zip(lengths, torch.tensor(lengths).cumsum(0).tolist(), strict=True):
            place = slice(end - length, end)
            found.append((row, place, ids[row : row + 1, place]))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_single_documents(shape: str) -> None:
    model, (ids, documents) = build(dtype=torch.float32, **SHAPES[shape]), packed()
    logits = model(ids, document_ids=documents).logits
    for row, place, own in alone(ids):
        torch.testing.assert_close(logits[row, place], model(own).logits[0], rtol=0, atol=1e-5)
    assert (logits - model(ids).logits)[0, 23].abs().max() > 1e-2, "the documents before them would have been seen"


@pytest.mark.parametrize("shape", ["gated", "window", "full"])
def test_loss_and_gradients_equal_those_of_single_documents(shape: str) -> None:
    model, (ids, documents) = build(dtype=torch.float32, **SHAPES[shape]), packed()
    first = torch.nn.functional.pad(documents.diff(dim=1) != 0, (1, 0), value=True)
    loss = model(ids, labels=ids.masked_fill(first, -100), document_ids=documents).loss
    loss.backward()
    together = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    parts = [(own, own.shape[1] - 1) for _, _, own in alone(ids) if own.shape[1] > 1]
    mean = sum(model(own, labels=own).loss * count for own, count in parts) / sum(count for _, count in parts)
    mean.backward()
    torch.testing.assert_close(loss, mean, rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "blockwise", "mxfp8"])
def test_one_document_per_row_is_the_plain_forward(recipe: str) -> None:
    """Only the kernel of attention may differ, since it has a mask."""
    edges = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0) if recipe != "bf16" else {}
    one, other = build(recipe, **edges), build(recipe, **edges)
    ids, _ = packed()
    plain, masked = one(ids, labels=ids), other(ids, labels=ids, document_ids=torch.zeros_like(ids))
    torch.testing.assert_close(masked.loss, plain.loss, rtol=2e-3, atol=0)


def test_packed_batches_of_a_dataset_train_alike() -> None:
    """The whole path: what TokenDataset packs, forward gives as each document with its end-of-text token alone."""
    model = build(dtype=torch.float32, vocab_size=288)
    words, texts = ByteTokenizer(), ["ab", "a longer text", "c", "no more"]
    data = TokenDataset(
        [Document(t) for t in texts], words, 27, batch_size=1, seed=0, shuffle=False, packing="documents"
    )
    batch = next(data)
    total, count = 0.0, 0
    for text in texts:
        own = torch.tensor([[*words.encode(text), words.eos_token_id]])
        total, count = total + model(own, labels=own).loss.item() * (own.shape[1] - 1), count + own.shape[1] - 1
    assert int((batch["labels"] >= 0).sum()) == count
    assert model(**batch).loss.item() == pytest.approx(total / count, abs=1e-5)


def test_mask_and_window_stay_inside_a_document() -> None:
    mask = attention_mask(5, 2, None, torch.tensor([[3, 3, 3, 1, 1]]), torch.device("cpu"))
    assert mask is not None and mask.int().tolist() == [
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]]
    ]


def test_positions_count_from_the_start_of_each_document() -> None:
    """RoPE is relative, so no logit of FP32 would tell; the BF16 rounding of its tables would."""
    model, (ids, documents) = build(), packed()

    def described(tokens: torch.Tensor, documents: torch.Tensor | None = None) -> ForwardContext:
        recompute = Recompute("none", model.te, model.te_recipe, 4)
        how = (recompute, model.kernels, model.fp8_layers, model.dtype)
        autocasts = Autocasts(model.te, model.te_recipe, None, {})
        return forward_context(model.specs, tokens, None, None, documents, *how, autocasts)

    together = described(ids, documents)
    for row, place, own in alone(ids):
        assert_same_bits(
            "cos of RoPE",
            together.rotary[model.config.rope][0][row, place],
            described(own).rotary[model.config.rope][0],
        )
    assert described(ids).masks == {None: None}, "without documents: the causal kernel"


def test_unsupported_options_are_refused() -> None:
    model, (ids, documents) = build(), packed()
    with pytest.raises(
        ValueError, match=r"document_ids has shape \[3, 23\], input_ids \[3, 24\]: give one entry per token"
    ):
        model(ids, document_ids=documents[:, 1:])
    with pytest.raises(ValueError, match="document_ids goes with neither a cache nor an attention_mask"):
        model(ids, document_ids=documents, attention_mask=torch.ones_like(ids))
