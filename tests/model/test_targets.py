"""Targets of the loss: padding predicts nothing, and labels outside the vocabulary are named."""

import pytest
import torch

from te_models import CausalLM, ModelConfig
from te_models.model.targets import IGNORED, invalid_label, nan_if, next_token_targets
from te_models.training.evaluation import count_targets

SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2
)


@pytest.fixture
def model() -> CausalLM:
    built = CausalLM(
        ModelConfig(**SHAPE), device="cpu", engine="emulated", dtype=torch.float32
    ).eval()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return built


def test_a_document_does_not_predict_the_next() -> None:
    documents = torch.tensor([[0] * 5 + [1] + [2] * 6])
    labels = torch.zeros(1, 12, dtype=torch.long)
    assert count_targets(dict(labels=labels, document_ids=documents)) == 4 + 0 + 5
    assert count_targets(dict(labels=labels, document_ids=documents - 1)) == 5, (
        "an id below 0 is padding"
    )


@pytest.mark.parametrize("label", [-1, -101, 64, 2**40])
@pytest.mark.parametrize("return_logits", [True, False])
def test_a_label_outside_the_vocabulary_is_one_line(
    label: int, return_logits: bool, model: CausalLM
) -> None:
    ids = torch.randint(0, 64, (2, 8))
    labels = ids.clone()
    labels[1, 3] = label
    with pytest.raises(
        ValueError, match=rf"^a label is {label}: give 0 to 63 \(vocab_size=64\), or -100"
    ):
        model(ids, labels=labels, return_logits=return_logits)
    labels[:, 0], labels[1, 3] = label, IGNORED  # the first label of a row has nothing before it
    assert model(ids, labels=labels, return_logits=return_logits).loss.isfinite()


def test_on_a_gpu_the_loss_is_nan_and_no_kernel_sees_the_label() -> None:
    """On the meta device, which stands for one that must not be waited for."""
    labels = torch.zeros(2, 5, dtype=torch.long, device="meta")
    targets, invalid = next_token_targets(labels, None, 64)
    assert targets.shape == (10,) and invalid is not None and invalid.shape == ()
    loss = torch.tensor(2.0, requires_grad=True)
    nan_if(loss, torch.tensor(True)).backward()
    assert (
        loss.grad == 0
        and nan_if(loss, torch.tensor(True)).isnan()
        and nan_if(loss, torch.tensor(False)) == 2
    )


def test_the_mistake_is_named_afterwards() -> None:
    assert invalid_label(torch.tensor([[3, IGNORED, 63]]), 64) is None
    assert "a label is 64" in str(invalid_label(torch.tensor([[3, 64, -7]]), 64))
