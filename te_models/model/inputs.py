"""Checks of the arguments of a forward pass, before anything runs: one line for each mistake."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.config.model import ModelConfig
from te_models.errors import UsageError
from te_models.model.kv_cache import Cache

ONE_GRAPH = (
    "a model under an FP8 recipe does not make one graph, since its scales change in Python between operations: call "
    "model.set_recipe('bf16') before torch.export, or leave out fullgraph=True of torch.compile"
)


def refuse_one_graph(quantized: bool) -> None:
    """Raise UsageError where torch.export traces a `quantized` recipe.

    torch.compile breaks the graph here instead; with fullgraph=True it raises an error, whose second line has the
    reason.
    """
    if not quantized or not torch.compiler.is_compiling():
        return
    if not torch.compiler.is_dynamo_compiling():
        raise UsageError(ONE_GRAPH)
    torch._dynamo.graph_break(msg=ONE_GRAPH)


# Arguments of transformers' models -> what a model here has instead.
OF_TRANSFORMERS = {
    "use_cache": "give cache=model.new_cache(batch, max_length)",
    "past_key_values": "give cache=model.new_cache(batch, max_length)",
    "position_ids": "give document_ids, or use TEModelsForCausalLM.wrap(model)",
    "output_hidden_states": "use TEModelsForCausalLM.wrap(model)",
    "output_attentions": "attention weights are never computed as a whole",
    "return_dict": "the output is a named tuple",
    "num_items_in_batch": "use TEModelsForCausalLM.wrap(model)",
}


def refuse_unknown(options: Mapping[str, object]) -> None:
    """Raise a UsageError for arguments that a model does not take."""
    for name in options:
        advice = OF_TRANSFORMERS.get(name, "leave it out")
        raise UsageError(f"a model takes no {name}: {advice}")


def checked_tokens(
    config: ModelConfig, ids: object, embeds: object, device: torch.device
) -> Tensor:
    """Return the one that is given of ids [B, S] and vectors [B, S, D].

    Raises:
        UsageError: it is of another form, without tokens, or on a device of another kind than the model's. On a CPU ids
            outside the vocabulary are refused too; on a GPU reading their values would wait for the device.
    """
    embedded = ids is None
    tokens = embeds if embedded else ids
    name, expected = (
        ("inputs_embeds", "vectors [B, S, D]")
        if embedded
        else ("input_ids", "an int64 tensor [B, S]")
    )
    if (ids is None) == (embeds is None):
        mistake = "give either input_ids or inputs_embeds, the vectors that stand for them"
    elif not isinstance(tokens, Tensor):
        mistake = f"{name} is a {type(tokens).__name__}: give {expected}"
    elif embedded and config.layer_inputs is not None:
        mistake = "a model with layer_inputs looks each token up in two tables: give input_ids"
    elif embedded and (tokens.dim() != 3 or tokens.shape[2] != config.hidden_size):
        mistake = f"{name} has shape {list(tokens.shape)}: give {expected}, D={config.hidden_size}"
    elif not embedded and tokens.dim() != 2:
        hint = ", such as input_ids[None] for a single row" if tokens.dim() == 1 else ""
        mistake = f"{name} has shape {list(tokens.shape)}: give {expected}, rows of token ids{hint}"
    elif embedded != tokens.is_floating_point() or (
        not embedded and tokens.dtype not in (torch.int64, torch.int32)
    ):
        mistake = f"{name} is of {tokens.dtype}: give {expected}"
    elif misplaced := _misplaced(name, tokens, device):
        mistake = misplaced
    elif not tokens.numel():
        mistake = (
            f"{name} has shape {list(tokens.shape)}: give at least one row of at least one token"
        )
    elif embedded or tokens.device.type != "cpu" or torch.compiler.is_compiling():
        # A trace has no values.
        mistake = ""
    else:
        mistake = invalid_token(torch.stack(tokens.aminmax()), config.vocab_size) or ""
    if mistake or not isinstance(tokens, Tensor):
        raise UsageError(mistake)
    return tokens


def check_inputs(
    config: ModelConfig,
    tokens: Tensor,
    labels: Tensor | None,
    cache: Cache | None,
    attention_mask: Tensor | None,
    document_ids: Tensor | None,
    logits_to_keep: int | None,
) -> None:
    """Raise a UsageError for other arguments of Decoder.forward that do not fit `tokens` [B, S, ...] or each other."""
    documents = document_ids
    if documents is None and cache is not None:
        documents = cache.documents
    length = tokens.shape[1] + (cache.length if cache else 0)
    if documents is None and length > config.longest_sequence:
        raise UsageError(_too_long("a sequence", length, config))
    check_labels(tokens, labels)
    if logits_to_keep is not None and logits_to_keep < 0:
        raise UsageError(
            f"logits_to_keep={logits_to_keep} is negative: give the number of newest positions"
        )
    for name, t in {"attention_mask": attention_mask, "document_ids": document_ids}.items():
        if t is not None and (why := _unfit(name, t, tokens)):
            raise UsageError(why)
    if document_ids is not None:
        if document_ids.is_floating_point() or document_ids.is_complex():
            raise UsageError(
                f"document_ids is of {document_ids.dtype}: give whole numbers, such as an int64 tensor [B, S]"
            )
        if cache is not None or attention_mask is not None:
            raise UsageError(
                "document_ids goes with neither a cache nor an attention_mask: give padding the document -1"
            )
    # Positions restart in each document, so a row of many may be longer than the model allows for one.
    if documents is not None and length > config.longest_sequence and _is_readable(documents):
        longest = longest_document(documents)
        if longest > config.longest_sequence:
            raise UsageError(_too_long("a document", longest, config))


def check_labels(tokens: Tensor, labels: Tensor | None) -> None:
    """Raise a UsageError for labels that do not fit `tokens` [B, S, ...]."""
    if labels is None:
        return
    if why := _unfit("labels", labels, tokens):
        raise UsageError(why)
    if labels.dtype != torch.int64:
        raise UsageError(f"labels is of {labels.dtype}: give an int64 tensor [B, S]")


def positions_in_documents(documents: Tensor) -> Tensor:
    """Return how many tokens of its document come before each token, int64 [B, S]; `documents` [B, S] has their ids."""
    place = torch.arange(documents.shape[1], device=documents.device)
    first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=False)
    # The largest start up to a token is the start of its own document.
    return place - torch.where(first, place, 0).cummax(dim=1).values


def longest_document(documents: Tensor) -> int:
    """Return the number of tokens of the longest document of ids [B, S], of which those below 0 are padding."""
    positions = positions_in_documents(documents)
    return int((positions + 1).where(documents >= 0, 0).max())


def _too_long(text: str, length: int, config: ModelConfig) -> str:
    return f"{text} of {length} tokens is longer than {config.length_limit}: shorten it or raise that field"


def _is_readable(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read: not in a trace, in a capture, nor on the meta device."""
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _unfit(name: str, value: object, tokens: Tensor) -> str:
    """Return why an argument does not have one entry per token; "" if it does."""
    if not isinstance(value, Tensor):
        return f"{name} is a {type(value).__name__}: give a tensor [B, S]"
    if value.shape != tokens.shape[:2]:
        return f"{name} has shape {list(value.shape)}, input_ids {list(tokens.shape[:2])}: give one entry per token"
    return _misplaced(name, value, tokens.device)


def _misplaced(name: str, tensor: Tensor, device: torch.device) -> str:
    """Return why a tensor is of no use to a model on `device`, "" if it is: sparse, or on a device of another kind."""
    if tensor.layout != torch.strided:
        return f"{name} has the layout {tensor.layout}: give a dense tensor"
    # Accelerate's hooks fetch parameters from disk later.
    if tensor.device.type != device.type != "meta":
        return f"{name} is on {tensor.device}, and the model on {device}: move one of them"
    return ""


def known_ids(ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return ids [B, S] that a kernel may use as indices, and whether others were among them, a bool scalar on their
    device, without waiting for it."""
    known = ids.clamp(0, vocab_size - 1)
    return known, (known != ids).any()


def invalid_token(ids: Tensor, vocab_size: int) -> str | None:
    """Return one line about the first id outside the vocabulary, None if there is none. Waits for the device."""
    invalid = ids[(ids < 0) | (ids >= vocab_size)]
    if len(invalid):
        return f"input_ids holds {int(invalid[0])}: give 0 to {vocab_size - 1} ({vocab_size=})"
    return None
