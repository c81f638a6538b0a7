"""Wrong arguments of a forward pass are one line of the project's type, and nothing runs."""

from typing import Any

import pytest
import torch
from bits import assert_same_tensors

from te_models import CausalLM
from te_models.errors import UsageError
from te_models.fp8.scaling_state import fp8_state
from te_models.model.inputs import invalid_token, known_ids

IDS = torch.arange(6).reshape(2, 3)
SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=1
)
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "an id that is too large": (torch.tensor([[3, 99999]]), {}, r"input_ids holds 99999: give 0 to 63 \("),
    "the first id after the last": (torch.tensor([[64]]), {}, "input_ids holds 64: "),
    "an id below zero": (torch.tensor([[1], [-1]]), {}, "input_ids holds -1: "),
    "ids of int32": (torch.tensor([[70]], dtype=torch.int32), {}, "input_ids holds 70: "),
    "one dimension": (IDS[0], {}, r"input_ids has shape \[3\]: .* such as input_ids\[None\]"),
    "no dimension": (torch.tensor(1), {}, r"input_ids has shape \[\]: "),
    "three dimensions": (IDS[None], {}, r"input_ids has shape \[1, 2, 3\]: give an int64 tensor \[B, S\]"),
    "floats": (IDS.float(), {}, "input_ids is of torch.float32: give an int64 tensor"),
    "bools": (IDS > 2, {}, "input_ids is of torch.bool: "),
    "bytes": (IDS.byte(), {}, "input_ids is of torch.uint8: "),
    "a list": ([[1, 2]], {}, "input_ids is a list: give an int64 tensor"),
    "no tokens": (IDS[:, :0], {}, r"input_ids has shape \[2, 0\]: give at least one row"),
    "no rows": (IDS[:0], {"labels": IDS[:0]}, r"input_ids has shape \[0, 3\]: give at least one row"),
    "too many tokens": (torch.zeros(1, 2049, dtype=torch.long), {}, "a sequence of 2049 tokens is longer than max_"),
    "labels that are shorter": (IDS, {"labels": IDS[:, 1:]}, r"labels has shape \[2, 2\], input_ids \[2, 3\]: "),
    "labels of one dimension": (IDS, {"labels": IDS.flatten()}, r"labels has shape \[6\], "),
    "labels of floats": (IDS, {"labels": IDS.float()}, "labels is of torch.float32: give an int64"),
    "labels of int32": (IDS, {"labels": IDS.int()}, "labels is of torch.int32: give an int64"),
    "labels as a list": (IDS, {"labels": [[0]]}, "labels is a list: give a tensor"),
    "a mask of one row": (IDS, {"attention_mask": IDS[:1] >= 0}, r"attention_mask has shape \[1, 3\], "),
    "a mask of scores": (IDS, {"attention_mask": torch.zeros(2, 1, 3, 3)}, r"attention_mask has shape \[2, 1, 3, 3\]"),
    "documents of one dimension": (IDS, {"document_ids": IDS[0]}, r"document_ids has shape \[3\], "),
    "a document of too many tokens": (
        torch.zeros(1, 2060, dtype=torch.long),
        {"document_ids": (torch.arange(2060)[None] > 10).long()},
        "a document of 2049 tokens is longer than max_",
    ),
    "documents beside a mask": (
        IDS, {"document_ids": IDS, "attention_mask": IDS >= 0}, "document_ids goes with neither a cache nor an attentio"
    ),
    "vectors of another size": (None, {"inputs_embeds": torch.zeros(2, 3, 5)}, r"inputs_embeds has shape .*D=32"),
    "vectors of one row": (None, {"inputs_embeds": torch.zeros(3, 32)}, r"inputs_embeds has shape \[3, 32\]: "),
    "vectors of integers": (None, {"inputs_embeds": torch.zeros(1, 3, 32).long()}, "inputs_embeds is of torch.int64"),
    "no vectors": (None, {"inputs_embeds": torch.zeros(1, 0, 32)}, r"inputs_embeds has shape \[1, 0, 32\]: give"),
    "ids elsewhere": (IDS.to("meta"), {}, "input_ids is on meta, and the model on cpu: move one"),
    "labels elsewhere": (IDS, {"labels": IDS.to("meta")}, "labels is on meta, and the model on cpu: move one"),
    "sparse ids": (IDS.to_sparse(), {}, "input_ids has the layout torch.sparse_coo: give a dense tensor"),
    "sparse labels": (IDS, {"labels": IDS.to_sparse()}, "labels has the layout torch.sparse_coo: give a dense"),
    "fewer logits than none": (IDS, {"logits_to_keep": -1}, "logits_to_keep=-1 is negative: give the number"),
    "nothing": (None, {}, "give either input_ids or inputs_embeds"),
    "both": (IDS, {"inputs_embeds": torch.zeros(2, 3, 32)}, "give either input_ids or inputs_embeds"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> CausalLM:
    torch.manual_seed(0)
    return CausalLM.from_preset(
        "gated-nano",
        recipe="delayed",
        amax_history_len=4,
        device="cpu",
        num_key_value_heads=1,
        **SHAPE,
    )


@pytest.mark.parametrize("case", WRONG)
def test_one_line_before_anything_runs(case: str, model: CausalLM) -> None:
    ids, others, message = WRONG[case]
    before = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        model(ids, **others)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fp8_state(model).items())


@pytest.mark.parametrize("case", WRONG)
def test_the_same_of_the_model_of_transformers(case: str, model: CausalLM) -> None:
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    ids, others, message = WRONG[case]
    if {"attention_mask", "document_ids"} & set(others) or case == "both":
        pytest.skip("its masks have other shapes")
    with pytest.raises(UsageError, match=f"^({message}|give input_ids or inputs_embeds)"):
        modeling.TEModelsForCausalLM.wrap(model)(ids, **others)


OF_TRANSFORMERS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer positions": (dict(position_ids=IDS[:, 1:]), r"position_ids has shape \[2, 2\], input_ids \[2, 3\]: "),
    "positions of other rows": (dict(position_ids=IDS.repeat(2, 1)), r"position_ids has shape \[4, 3\], "),
    "positions of three axes": (dict(position_ids=IDS.expand(3, 2, 3)), r"position_ids has shape \[3, 2, 3\], "),
    "positions of floats": (dict(position_ids=IDS.float()), "position_ids is of torch.float32: give an int64"),
    "positions as a list": (dict(position_ids=[0, 1, 2]), "position_ids is a list: give an int64 tensor"),
    "masks by name": (dict(attention_mask={"full_attention": IDS}), "attention_mask is a dict: give a tensor"),
    "a short mask and labels": (dict(attention_mask=IDS[:, 1:], labels=IDS), r"attention_mask has shape \[2, 2\], "),
    "masks by name and labels": (dict(attention_mask={"full_attention": IDS}, labels=IDS), "attention_mask is a dic"),
    "a mask of three axes": (dict(attention_mask=torch.ones(2, 3, 3)), r"attention_mask has shape \[2, 3, 3\]: give"),
    "a square mask of int64": (dict(attention_mask=torch.ones(2, 1, 3, 3).long()), "attention_mask of four .*int64: "),
    "a tuple as cache": (dict(past_key_values=((IDS, IDS),)), "past_key_values is a tuple: give a cache of transf"),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_TRANSFORMERS)
def test_what_only_the_model_of_transformers_takes(case: str, model: CausalLM) -> None:
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    arguments, message = OF_TRANSFORMERS[case]
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        modeling.TEModelsForCausalLM.wrap(model)(IDS, **arguments)
    assert "\n" not in str(caught.value)


def test_an_unknown_mode_of_recompute_of_a_live_model(model: CausalLM) -> None:
    with pytest.raises(
        UsageError, match="^unknown activation_checkpointing 'ful': did you mean 'full'"
    ):
        model.activation_checkpointing = "ful"
    assert model.activation_checkpointing == "none"


def test_labels_outside_the_vocabulary_of_the_model_of_transformers(model: CausalLM) -> None:
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    before = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    for name in ("labels", "shift_labels"):
        with pytest.raises(UsageError, match="^a label is 64: give 0 to 63"):
            modeling.TEModelsForCausalLM.wrap(model)(IDS, **{name: IDS.clone().fill_(64)})
    assert_same_tensors(fp8_state(model), before)


@torch.no_grad()
def test_a_row_of_documents_may_be_longer_than_the_longest_of_them() -> None:
    """Positions restart in each, so that a row of 40 tokens has no position that a model of 16 lacks."""
    model = CausalLM.from_preset(
        "gated-nano",
        device="cpu",
        dtype=torch.float32,
        max_position_embeddings=16,
        num_key_value_heads=1,
        **SHAPE,
    ).eval()
    ids = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(1))
    # Documents of 16, 13, and 10 tokens, and one of padding at the end, which is no document's.
    lengths = [16, 13, 10]
    documents = torch.tensor([0] * 16 + [1] * 13 + [2] * 10 + [-1])[None]
    packed = model(ids, labels=ids.clone(), document_ids=documents)
    start = 0
    for length in lengths:
        alone = model(ids[:, start : start + length]).logits
        torch.testing.assert_close(packed.logits[:, start : start + length], alone)
        start += length


def test_ids_of_int32_are_those_of_int64(model: CausalLM) -> None:
    model.eval()
    assert torch.equal(model(IDS.int()).logits, model(IDS).logits)


def test_on_a_gpu_no_kernel_sees_such_an_id_and_the_host_does_not_wait() -> None:
    known, unknown = known_ids(torch.zeros(2, 5, dtype=torch.long, device="meta"), 64)
    assert known.shape == (2, 5) and unknown.shape == () and unknown.dtype == torch.bool
    for ids, expected in (([[0, 63]], False), ([[-1, 3]], True), ([[3, 64]], True)):
        known, unknown = known_ids(torch.tensor(ids), 64)
        assert bool(unknown) == expected == (invalid_token(torch.tensor(ids), 64) is not None)
        assert 0 <= int(known.min()) <= int(known.max()) < 64 and expected != torch.equal(
            known, torch.tensor(ids)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
@pytest.mark.parametrize("return_logits", [True, False])
@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_a_bad_id_or_label_on_a_gpu(name: str, recipe: str, return_logits: bool) -> None:
    built = CausalLM.from_preset("gated-nano", device="cuda", recipe=recipe)
    ids = torch.randint(0, 256, (2, 128), device="cuda")
    good = dict(input_ids=ids, labels=ids)
    for bad in (-1, 288, 2**40):
        wrong = ids.clone()
        wrong[1, 3] = bad
        assert built(**good | {name: wrong}, return_logits=return_logits).loss.isnan()
    assert built(**good, return_logits=return_logits).loss.isfinite(), "the device works on"
