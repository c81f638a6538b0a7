"""Hugging Face folders, read tensor by tensor into the rows of te.Linear and te.RMSNorm that each fills.

Each tensor is read when its turn comes, so that host memory holds one at a time, and the rows of a parameter whose
other rows are still to come. te_models.interop.hf_families says which rows those are.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from te_models.config.model import ModelConfig
from te_models.errors import CheckpointError
from te_models.files.atomic import reraising
from te_models.files.formats import Document, Fields, as_object, list_some, parse_index, read_json
from te_models.files.tensors import SafetensorsFile, check_finite
from te_models.interop.hf_families import Family, family_of
from te_models.interop.origin import (
    MODEL_TYPE,
    Opened,
    Origin,
    check_sizes,
    saved_dtype,
    stored_dtype,
)
from te_models.interop.quantized import (
    CONFIG_KEYS,
    MXFP4,
    StoredWeights,
    WeightStorage,
    dequantize,
    open_weights,
    read_storage,
)
from te_models.interop.stacked_experts import (
    INPUTS_FIRST,
    experts_of,
    first_expert,
    stack_order,
    weights_in,
)
from te_models.interop.stored_base import RawWeight, storable, stored_weights
from te_models.interop.stored_weights import keep_stored_weights
from te_models.interop.tensor_places import Place, tensor_places
from te_models.model.decoder import Decoder

log = logging.getLogger(__name__)

MANY_ROWS = 4096  # of an embedding, compared at a time
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def hugging_face_documents(folder: Path) -> Fields | None:
    """Return the content of config.json and generation_config.json ("config", "generation"; those that are there).

    None: the folder has no config.json, or one of our model type.
    """
    file = folder / "config.json"
    generation = folder / "generation_config.json"
    if not file.is_file():
        return None
    config = as_object(read_json(file), file)
    if config.get("model_type") == MODEL_TYPE:
        return None
    documents: Fields = {"config": config}
    if generation.is_file():
        documents["generation"] = read_json(generation)
    return documents


@dataclass(frozen=True)
class Description:
    """The architecture, shape, dtype and origin of a model, as the JSON files of its folder describe them."""

    family: Family
    config: ModelConfig
    dtype: torch.dtype
    origin: Origin
    other_prefixes: tuple[str, ...]


def describe(
    folder: Path, documents: Document, tensors: Mapping[str, Tensor] | None = None
) -> Description:
    """Return what the documents of a folder describe; sizes beyond the shapes of `tensors` are refused first.

    Raises:
        CheckpointError: they are damaged, or describe a model that te-models does not compute; the message says why.
    """
    file = folder / "config.json"
    # `read_storage` reads how weights are quantized; a family describes the same model without it.
    document = {key: value for key, value in documents["config"].items() if key not in CONFIG_KEYS}
    damage = (AttributeError, LookupError, ArithmeticError, TypeError, ValueError)
    with reraising(file, *damage):
        family = family_of(document)
        text = family.text(document)
    if tensors is not None:
        family = family.stored_as(tensors)
        layers = f"{family.root}{family.blocks}."
        check_sizes(file, text, tensors, layers, f"{family.root}{family.embedding}")
        # transformers has saved stacks of experts in either order, which only the shapes tell.
        if family.stacked == INPUTS_FIRST and not family.inputs_first:
            order = stack_order(tensors, text["hidden_size"])
            family = dataclasses.replace(family, stacked=order)
    with reraising(file, *damage):
        config = family.read(document)
    name = _dtype_name(document, text)
    dtype = stored_dtype(tensors) if name is None else saved_dtype(file, name)
    origin = Origin(folder, document, documents.get("generation"), shape=config)
    return Description(family, config, dtype, origin, family.other_prefixes(document))


def _dtype_name(*parts: Document) -> object:
    """Return the name of the dtype in a config.json or, after it, in its part of the text model; None without one."""
    # Recent versions of transformers write "dtype", earlier ones "torch_dtype".
    for part in parts:
        name = part.get("dtype") or part.get("torch_dtype")
        if name:
            return name
    return None


def read_description(folder: Path, documents: Document) -> Description:
    """Return the description of a folder, also of one without weights, from its small files.

    The files of tensors are opened only for what config.json leaves open: the dtype, where it names none, and whether a
    head that it ties to the embedding has values of its own.

    Raises:
        CheckpointError: as `open_hugging_face`.
    """
    facts = describe(folder, documents)
    config = documents["config"]
    named = _dtype_name(config, facts.family.text(config)) is not None
    stored = any((folder / name).is_file() for name in (WEIGHTS, INDEX))
    if not stored or (named and not facts.config.tie_word_embeddings):
        return facts
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with SafetensorsFile(path) as file:
            tensors |= file.tensors
    facts = describe(folder, documents, tensors)
    if not facts.config.tie_word_embeddings or f"{facts.family.head}.weight" not in tensors:
        return facts
    with open_hugging_face(folder, documents) as opened:  # it compares the head with the embedding
        return dataclasses.replace(facts, config=opened.config)


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFolder(Opened):
    """An opened folder of Hugging Face.

    Attributes:
        family: its architecture.
        other_prefixes: the prefixes of the tensors that are not of the text model.
        files: its safetensors files.
        stored: the tensors in them.
        places: name of each of their tensors -> its rows in ours, once `fit` was told the shapes of ours.
        shapes: those shapes.
        absent: our parameters that its release lacks, which are zeros.
        untied: whether it has a head of its own, although config.json ties it to the embedding.
        mxfp4: whether its stacks of experts are MXFP4.
    """

    family: Family
    other_prefixes: tuple[str, ...]
    files: tuple[SafetensorsFile, ...]
    stored: StoredWeights
    places: dict[str, Place] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    untied: bool = False
    mxfp4: bool = False

    def fit(self, shapes: Mapping[str, torch.Size]) -> None:
        """Find the place of each tensor; raise a CheckpointError for one that has none, or is missing."""
        self.shapes.update(shapes)
        self.places.update(tensor_places(self.family, self.config, shapes))
        embedding, head = self.names_of_ends
        # Of a tied pair, some folders have the head in place of the embedding.
        only_head = head in self.stored.tensors and embedding not in self.stored.tensors
        if self.config.tie_word_embeddings and only_head:
            self.places[head] = self.places.pop(embedding)
        text = {}  # the tensors of the text model
        for name, tensor in self.stored.tensors.items():
            if not name.startswith(self.other_prefixes):
                text[name] = tensor
        for name in sorted(self.places.keys() - text.keys()):
            if self.family.absent and name.endswith(self.family.absent):
                self.absent.append(self.places.pop(name).name)
        self._check_tensors(text, head)
        self._warn(len(text), head)

    def _check_tensors(self, text: Mapping[str, Tensor], head: str) -> None:
        """Raise a CheckpointError if the tensors of the text model are not the ones that have a place, in its shape."""
        unexpected = []
        different = []
        for name, tensor in sorted(text.items()):
            place = self.places.get(name)
            if place is None:
                # Some releases store the tied head a second time, and older ones the frequencies of RoPE.
                tied = self.config.tie_word_embeddings and name == f"{self.family.head}.weight"
                if not tied and not name.endswith("rotary_emb.inv_freq"):
                    unexpected.append(name)
            elif tuple(tensor.shape) != place.shape:
                different.append(f"{name} has shape {list(tensor.shape)}, not {list(place.shape)}")
            elif not tensor.is_floating_point():
                different.append(f"{name} is {tensor.dtype}")
        problems = {
            "missing": sorted(self.places.keys() - text),
            "unexpected": unexpected,
            "different": different,
        }
        if problems["missing"] == [head]:
            raise CheckpointError(
                f"{self.path} has no {head}, and config.json does not tie the head to the embedding: it is a model "
                "without a head, which predicts no tokens"
            )
        for problem, names in problems.items():
            if names:
                raise CheckpointError(
                    f"{self.path}: the tensors do not fit config.json; {problem}: {list_some(names, limit=2)}"
                )

    def _warn(self, text: int, head: str) -> None:
        """Warn of what the model does not take from the folder as config.json says; `text` tensors are of its text."""
        if self.untied:
            log.warning(
                "%s: config.json ties the head to the embedding, and %s has other values: it is kept, as in "
                "transformers",
                self.path,
                head,
            )
        document = self.origin.config or {}
        family = family_of(document)
        if unread := family.unread(document):
            warnings.warn(
                f"{self.path / 'config.json'}: transformers does not read {', '.join(unread)} of {family.model_type}: "
                "such keys change nothing in the model, and are written back",
                stacklevel=3,
            )
        other_prefixes = family.other_prefixes(document)
        if others := len(self.stored.tensors) - text:
            log.warning(
                "%s: the text model is read; %s tensors of other parts (%s) are not: save_pretrained(format='hf') "
                "copies them from there, and exports for servers leave them out",
                self.path,
                others,
                ", ".join(f"{prefix}*" for prefix in other_prefixes),
            )

    @property
    def names_of_ends(self) -> tuple[str, str]:
        """The names of the embedding and of the head."""
        return f"{self.family.root}{self.family.embedding}.weight", f"{self.family.head}.weight"

    def has_own_head(self) -> bool:
        """Return whether the head is tied by config.json and stored with other values than the embedding."""
        if not self.config.tie_word_embeddings:
            return False
        names = self.names_of_ends
        if not self.stored.tensors.keys() >= {*names}:
            return False
        values = {name: tensor for _, name, tensor in self.values_of(names)}
        embedding, head = (values[name] for name in names)
        if embedding.shape != head.shape:
            return True
        parts = zip(embedding.split(MANY_ROWS), head.split(MANY_ROWS), strict=True)
        return any(not torch.equal(rows.float(), of_head.float()) for rows, of_head in parts)

    @property
    def quantized(self) -> dict[str, WeightStorage]:
        """The storage of each quantized weight, by its name; stacked experts have an entry per expert."""
        storages = {}
        if self.stored.storage is not None:
            storages = dict.fromkeys(self.stored.scales, self.stored.storage)
        if not self.mxfp4:
            return storages
        for file in self.files:
            for data in file.tensors:
                stack = self.family.as_stack(data)
                if stack.endswith("_blocks") and first_expert(stack) in self.places:
                    experts = weights_in(stack, len(file.tensors[data]))
                    storages |= dict.fromkeys(experts, MXFP4)
        return storages

    def storable(self) -> dict[str, list[str]]:
        """Return our linears whose weights can stay as they are stored; see te_models.interop.stored_base."""
        return storable(self, self.config.linears)

    def stored_parameters(
        self, linears: Container[str], like: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and stored weight of the GEMMs of these linears, for a model with parameters as `like`."""
        modules = {name: parts for name, parts in self.storable().items() if name in linears}
        return stored_weights(
            self,
            self.config.linears,
            modules,
            like.device,
            like.dtype,
            lambda module: f"{self.path}: {module} (of {modules[module][0]})",
        )

    def raw_weights(self, names: Iterable[str]) -> Iterator[tuple[str, RawWeight | Tensor]]:
        """Yield name and content of these weights, in the order of the files: raw if they are quantized."""
        requested = frozenset(names)
        storage = self.stored.storage
        for file in self.files:
            for data in file.tensors:
                name = self.stored.data.get(data, data)
                stack = self.family.as_stack(data)
                if name in requested and name in self.stored.scales and storage is not None:
                    # NVFP4 has one scale per block and a factor of the whole tensor.
                    scales, *factors = map(self.read, self.stored.scale_names[name])
                    grid = storage.grid((self.places[name].shape[0], self.places[name].shape[1]))
                    factor = factors[0].float().reshape(()) if factors else None
                    values = file.read(data).view(torch.uint8)
                    yield name, RawWeight(values, scales.reshape(grid), factor)
                elif name in requested:
                    values = file.read(data)
                    check_finite({name: values}, file.path)
                    yield name, values
                elif self.mxfp4 and stack.endswith("_blocks") and first_expert(stack) in requested:
                    blocks = file.read(data)
                    exponents = self.read(data.removesuffix("_blocks") + "_scales")
                    # A stack of all experts: [experts, rows, blocks, bytes], of which each is a weight.
                    for expert, name in enumerate(weights_in(stack, len(blocks))):
                        yield name, RawWeight(blocks[expert].flatten(1), exponents[expert])

    def parameters(
        self, like: Tensor, without: Container[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter once all its rows were read, dequantized; rows that no tensor fills are zeros.

        The weights of the linears `without` are left out.
        """
        read = {}
        for name, place in self.places.items():
            module, _, kind = place.name.rpartition(".")
            if not (kind.startswith("weight") and module in without):
                read[name] = place
        if self.mxfp4 and not self.quantized.keys().isdisjoint(read):
            log.warning(
                "%s: its experts are MXFP4, and are read as BF16 of the same values; base_weights='stored' leaves "
                "them as they are",
                self.path,
            )
        # A fused parameter is filled by several tensors; it is complete when the last was read.
        left = Counter(place.name for place in read.values())
        begun: dict[str, Tensor] = {}
        for file, name, values in self.values_of(read):
            check_finite({name: values}, file.path)
            place = self.places[name]
            whole = values
            shape = self.shapes[place.name]
            if len(place.blocks) > 1 or place.groups > 1 or values.shape != shape:
                whole = begun.setdefault(
                    place.name, torch.zeros(shape, dtype=like.dtype, device=like.device)
                )
                place.load(whole, values)
            left[place.name] -= 1
            if not left[place.name]:
                begun.pop(place.name, None)
                yield place.name, whole
        for name in self.absent:
            yield name, torch.zeros(self.shapes[name], dtype=torch.float32, device=like.device)

    def values_of(self, names: Container[str]) -> Iterator[tuple[SafetensorsFile, str, Tensor]]:
        """Yield the file, the name and the dequantized values of each tensor among `names`, and of stacked experts."""
        for file in self.files:
            for data in file.tensors:
                name = self.stored.data.get(data, data)
                if name in names:
                    values = file.read(data)
                    if data in self.stored.data and self.stored.storage is not None:
                        values = dequantize(self.stored.storage, values, self.stored.scales[name])
                    yield file, name, values
                    continue
                stack = self.family.as_stack(data)
                if self.family.stacked and first_expert(stack) in names:
                    for expert, values in experts_of(
                        stack, file.read(data), self.read, self.family.stacked
                    ):
                        yield file, expert, values

    def has(self, name: str) -> bool:
        """Return whether a tensor is stored under this name."""
        return any(name in file.tensors for file in self.files)

    def read(self, name: str) -> Tensor:
        """Return a stored tensor, from whichever file has it."""
        return next(file for file in self.files if name in file.tensors).read(name)

    def fitting_fp8(self, model: Decoder) -> dict[str, Tensor]:
        """Return nothing: `restore_fp8` reads the data again, one weight after the other."""
        return {}

    def restore_fp8(self, model: Decoder) -> None:
        """Give FP8 weights the data and scales of the folder; see te_models.interop.stored_weights."""
        if self.stored.storage is not None:
            keep_stored_weights(model, self.places, self.files, self.stored)


@contextmanager
def open_hugging_face(
    folder: Path, documents: Document, read_scales: bool = True
) -> Iterator[HuggingFaceFolder]:
    """Open a folder with these documents, and check everything in it that needs neither a model nor the values.

    Without `read_scales` the scales of quantized weights are left unread, for names and sizes alone.

    Raises:
        CheckpointError: something is missing, damaged, of a wrong shape or not supported, or, on leaving the block, a
            file changed.
    """
    with ExitStack() as stack:
        files = tuple(stack.enter_context(SafetensorsFile(path)) for path in weight_files(folder))
        tensors: dict[str, Tensor] = {}
        for file in files:
            # Files of one folder are read as one: a second tensor of a name would win without a word.
            if twice := tensors.keys() & file.tensors.keys():
                raise CheckpointError(
                    f"{folder}: tensor {min(twice)} is both in {file.path.name} and before it"
                )
            tensors |= file.tensors
        facts = describe(folder, documents, tensors)
        scheme = read_storage(folder, documents["config"])
        if facts.family.stacked:
            stacks = {facts.family.as_stack(name): tensor for name, tensor in tensors.items()}
            tensors = _single_experts(folder, stacks, facts.family.stacked)
        mxfp4 = scheme is MXFP4
        # MXFP4 is the storage of whole stacks of experts, which are read as stacks, and not of single weights.
        stored = open_weights(folder, None if mxfp4 else scheme, tensors, files, read_scales)
        opened = HuggingFaceFolder(
            path=folder, **vars(facts), files=files, stored=stored, mxfp4=mxfp4
        )
        if opened.has_own_head():
            # transformers keeps a head with other values, whatever config.json says of ties.
            untied = dataclasses.replace(facts.config, tie_word_embeddings=False)
            origin = dataclasses.replace(facts.origin, shape=untied)
            opened = dataclasses.replace(opened, config=untied, origin=origin, untied=True)
        yield opened


def _single_experts(folder: Path, tensors: Mapping[str, Tensor], order: str) -> dict[str, Tensor]:
    """Return tensors on the meta device, with single experts in place of stacks."""

    def scales(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(f"{folder}: it lacks {name}")
        return tensors[name]

    return {
        part_name: part
        for name, tensor in tensors.items()
        for part_name, part in experts_of(name, tensor, scales, order)
    }


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, in the order of their names.

    Raises:
        CheckpointError: one is missing, there are none, or the weights are a pickle.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        names = sorted(set(parse_index(read_json(folder / INDEX), folder / INDEX).values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if not absent:
            return [folder / name for name in names]
        problem = f"lacks {list_some(absent)} of its {len(names)} shards: download it again"
    elif pickles := sorted(path.name for path in folder.glob("*.bin")):
        problem = (
            f"holds its weights as a pickle ({list_some(pickles)}), which can run code and is not read: load it with "
            "transformers and save it again with save_pretrained(..., safe_serialization=True)"
        )
    else:
        problem = f"holds no weights: neither {WEIGHTS} nor {INDEX} is there"
    raise CheckpointError(f"{folder} {problem}")
