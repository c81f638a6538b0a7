"""Where a model comes from: an opened folder, whatever its format, and Hugging Face's files that a save writes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe
from te_models.errors import CheckpointError, mistyped
from te_models.files.atomic import first_line
from te_models.files.formats import Document, list_some
from te_models.model.decoder import Decoder
from te_models.model.dtypes import DTYPES

MODEL_TYPE = "te_models"  # of our own format, in config.json
TRAINED = "trained"  # a document with the facts of the run that trained a model
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Endings of names that hold no values of a model.
SCALES = ("scale", "scale_inv", "scales", "blocks")


@dataclass(frozen=True)
class Origin:
    """Origin of a model: its folder, and config.json and generation_config.json if they were Hugging Face's.

    `beside` is another folder with the tensors of other models that are saved with it, such as an image encoder's, and
    `adapters` the folder of the adapters that are in the model or were merged into it, which may bring a tokenizer.
    `shape` is the config in the folder, `token_ids` are ids that the model has in place of those in the folder, and
    `trained` the facts of the run that trained it (te_models.training.facts); None: none that is known.

    Raises:
        CheckpointError: generation_config.json is no object, or a token id in it no whole number.
    """

    folder: Path | None = None
    config: Document | None = None
    generation: Document | None = None
    beside: Path | None = None
    adapters: Path | None = None
    shape: ModelConfig | None = None
    token_ids: Document = field(default_factory=dict)
    trained: Document | None = None

    def __post_init__(self) -> None:
        generation = {} if self.generation is None else self.generation
        file = f"{self.folder}/generation_config.json"
        if not isinstance(generation, Mapping):
            raise CheckpointError(f"{file} is a JSON {type(generation).__name__}, not an object")
        for name in ("eos_token_id", "pad_token_id"):
            token_ids = generation.get(name)
            if isinstance(token_ids, list) and name == "eos_token_id":
                # Several tokens may end an answer; padding is one.
                ids = token_ids
            elif token_ids is None:
                ids = []
            else:
                ids = [token_ids]
            if any(mistyped(number, int) or abs(number) >= 2**63 for number in ids):
                raise CheckpointError(
                    f"{file}: {name} is {str(token_ids)[:60]}: give the id of a token, a whole number"
                )

    def documents(self) -> dict[str, Document]:
        """Return the documents to save with the model so that it can be written back unchanged."""
        documents = {
            "hf_config": self.config,
            "generation_config": self.generation,
            TRAINED: self.trained,
        }
        return {name: document for name, document in documents.items() if document is not None}

    def with_token_ids(self, ids: Mapping[str, object]) -> Origin:
        """Return the origin of a model with other token ids, such as eos_token_id, than the folder has."""
        if not ids:
            return self
        generation = {**(self.generation or {}), **ids}
        # transformers would derive a config with this mark from config.json again.
        generation.pop("_from_model_config", None)
        return replace(self, generation=generation, token_ids={**self.token_ids, **ids})


@dataclass(frozen=True, kw_only=True)
class Opened(ABC):
    """A folder with a model, whose names, sizes and documents were checked; values may be read as they are asked for.

    Attributes:
        path: the folder.
        config: the shape of the model.
        dtype: the dtype of its weights.
        origin: what a save of the model writes back.
        recipe: the recipe that it was saved under; None for a model of Hugging Face.
        in_fp8: whether its weights are FP8 primary weights.
    """

    path: Path
    config: ModelConfig
    dtype: torch.dtype
    origin: Origin = field(default_factory=Origin)
    recipe: Recipe | None = None
    in_fp8: bool = False

    @abstractmethod
    def fit(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise a CheckpointError unless the tensors fit a model whose parameters have these shapes."""

    @abstractmethod
    def parameters(
        self, like: Tensor, without: Container[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and values of each parameter, whole; one that is made of parts has the dtype and device of `like`.

        The weights of the linears `without` are left out.

        Raises:
            CheckpointError: a value is not finite, or a file changed.
        """

    def storable(self) -> Collection[str]:
        """Return the names of the linears whose weights can stay as they are stored."""
        return ()

    def stored_parameters(
        self, linears: Container[str], like: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and te_models.numerics.stored.StoredWeight of each GEMM of these linears."""
        return iter(())

    @abstractmethod
    def fitting_fp8(self, model: Decoder) -> dict[str, Tensor]:
        """Return the data and scales of FP8 weights that `model` can take over, under its names, once they fit."""

    @abstractmethod
    def restore_fp8(self, model: Decoder) -> None:
        """Give `model`, which has the weights, the scales and quantized weights of the folder that it has a use for."""


def as_facts(document: object, folder: Path) -> Document | None:
    """Return the content of a trained.json; a CheckpointError if it is no object."""
    if document is None or isinstance(document, Mapping):
        return document
    raise CheckpointError(f"{folder / TRAINED}.json is not an object of names and values")


def read_own_config(
    path: Path, document: object, tensors: Mapping[str, Tensor] | None = None
) -> tuple[ModelConfig, torch.dtype]:
    """Return the config and the dtype in a config.json of ours, `path`; sizes beyond `tensors` are refused."""
    if tensors is not None:
        check_sizes(path, document, tensors)
    try:
        values = {} if not isinstance(document, Mapping) else dict(document)
        kind = values.pop("model_type", None)
        name = values.pop("dtype", None)
        if kind != MODEL_TYPE:
            raise ValueError(
                f"a model of type {list_some([repr(kind)])}, and this version reads {MODEL_TYPE!r}"
            )
        return ModelConfig.from_dict(values), saved_dtype(path, name)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: {first_line(error)}") from None


def saved_dtype(file: str | Path, name: object) -> torch.dtype:
    """Return the dtype called `name` in a config.json, `file`; a CheckpointError for any other than these three."""
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(
            f"{file}: dtype {list_some([repr(name)])} is not bfloat16, float16 or float32"
        )
    return DTYPES[name]


def stored_dtype(tensors: Mapping[str, Tensor] | None) -> torch.dtype:
    """Return the dtype in which most values of a folder are stored, for a config.json that names none.

    FP8 and MXFP4 weights and their scales do not count; a folder of nothing else is BF16. Without `tensors` it is FP32,
    as a new model is in transformers.
    """
    if tensors is None:
        return torch.float32
    sizes: Counter[torch.dtype] = Counter()
    for name, tensor in tensors.items():
        if not name.endswith(SCALES):
            sizes[tensor.dtype] += tensor.numel()
    sizes[torch.float32] += sizes.pop(torch.float64, 0)
    values = {dtype: sizes[dtype] for dtype in DTYPES.values()}
    dtype = max(values, key=lambda dtype: values[dtype])
    return dtype if values[dtype] else torch.bfloat16


def check_sizes(
    path: Path,
    values: object,
    tensors: Mapping[str, Tensor],
    layers: str = "layers.",
    embedding: str = "embed_tokens",
) -> None:
    """Compare the sizes in a config.json with the tensors of the model, before anything of such a size is made.

    Args:
        path: of the config.json, for errors.
        values: its content.
        tensors: all tensors of the model, on any device.
        layers, embedding: the prefix of the names of layers, and the name of the embedding.

    Raises:
        CheckpointError: it has more layers, a larger vocabulary or a larger hidden size than the tensors.
    """
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{path} is not an object of names and values")
    # A config.json of a few bytes could ask for a model of any size.
    numbers = set()
    for name in tensors:
        if name.startswith(layers):
            numbers.add(name.removeprefix(layers).split(".")[0])
    actual: dict[str, int] = {"num_hidden_layers": len(numbers)}
    table = tensors.get(f"{embedding}.weight")  # [vocab_size, hidden_size]
    if table is not None and table.dim() == 2:
        actual["vocab_size"], actual["hidden_size"] = table.shape
    for name, size in actual.items():
        if isinstance(values.get(name), int) and values[name] > size:
            raise CheckpointError(f"{path}: {name} is {values[name]}, and the tensors have {size}")
