"""A tokenizer.json of Hugging Face, run by the `tokenizers` library."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from te_models.data.json_files import read_json_object
from te_models.data.tokenizer_base import ROLES, Tokenizer, first_token_after
from te_models.data.tokenizers_library import check_charsmaps, library_errors, without_panics
from te_models.errors import DataError, needs
from te_models.files.formats import Fields

T = TypeVar("T")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, run by the `tokenizers` library. `tokenizers>=0.20`.

    Special tokens come from the files beside it: tokenizer_config.json, else special_tokens_map.json, else
    generation_config.json (of several eos ids, the first).

    Args:
        document: the content of tokenizer.json.
        file: its path; the other files are looked for beside it.
        special: special tokens by name, such as "eos_token", for roles that no file beside it names.
    """

    def __init__(
        self, document: object, file: Path, special: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        with needs(str(file), "tokenizers", "0.20", "train"):
            from tokenizers import Tokenizer as Backend  # noqa: PLC0415
        self._file = file
        self.folder = file.parent
        self._encoding = functools.partial(library_errors, file, "encoding failed")
        check_charsmaps(document, file)
        with (
            library_errors(file, "not a tokenizer.json of Hugging Face's tokenizers library"),
            without_panics(),
        ):
            self._backend = Backend.from_str(json.dumps(document))
            # A file may contain the truncation of the model it was made for, which would silently cut documents.
            self._backend.no_truncation()
            self._backend.no_padding()
            self.vocab_size = max(self._backend.get_vocab().values(), default=-1) + 1
        self._document = document
        names = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
        beside = [*(read_json_object(file.with_name(name)) or {} for name in names), dict(special)]
        self._config = beside[0]
        with library_errors(self.folder, "its special tokens are damaged"):
            self.bos_token_id, self.eos_token_id, self.pad_token_id = (
                _special_id(role, beside, self._backend.token_to_id) for role in ROLES
            )

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens spelled out in it become their ids, as is usual."""
        with self._encoding():
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of `text` as transformers does, with the tokens that the post-processor adds."""
        with self._encoding():
            return self._backend.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        parts = self._in_parts(self._backend.encode_batch_fast, texts, 1024)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in parts]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]]
    ) -> list[tuple[NDArray[np.integer], int]]:
        """Encode each pair as one text: a tokenizer like SentencePiece's begins every text with a space."""
        texts = [prompt + completion for prompt, completion in pairs]
        encoded: list[tuple[NDArray[np.integer], int]] = []
        parts = self._in_parts(self._backend.encode_batch, texts, 256)
        for encoding, (prompt, _) in zip(parts, pairs, strict=True):
            length = encoding.char_to_token(len(prompt)) if prompt else 0
            # No token holds that character, such as a space that the places leave out.
            if length is None:
                places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
                length = first_token_after(places, len(prompt))
            encoded.append((np.array(encoding.ids, dtype=np.int32), length))
        return encoded

    def encode_rendered(
        self, texts: Sequence[str]
    ) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        parts = self._in_parts(self._backend.encode_batch, texts, 256)
        return [
            (np.array(e.ids, dtype=np.int32), np.array(e.offsets, dtype=np.int64).reshape(-1, 2))
            for e in parts
        ]

    def _in_parts(
        self, encode: Callable[..., Iterable[T]], texts: Sequence[str], size: int
    ) -> Iterator[T]:
        """Yield the library's encodings of texts, `size` at a time: they take many times the memory of their ids."""
        for start in range(0, len(texts), size):
            with self._encoding():
                part = encode(list(texts[start : start + size]), add_special_tokens=False)
            yield from part

    def add_special_tokens(self, tokens: Sequence[str]) -> int:
        before = self.vocab_size
        known = self._backend.get_vocab()
        with self._encoding():
            self._backend.add_special_tokens(list(tokens))
            vocabulary = self._backend.get_vocab()
            added = {token: vocabulary[token] for token in tokens}
            self._document = json.loads(self._backend.to_str())
        # The library gives out the ids after the last one that it counts, which holes in the numbering make too low.
        for token, number in added.items():
            if token not in known and number < before:
                raise DataError(
                    f"{self._file}: the vocabulary has holes, so {token!r} would get the id {number} of another token"
                )
        self.vocab_size = max(before, *(number + 1 for number in added.values()))
        # transformers reads added tokens from tokenizer_config.json where it repeats them.
        if isinstance(listed := self._config.get("added_tokens_decoder"), dict):
            form = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
            entries = {
                str(number): {"content": token, **form, "special": True}
                for token, number in added.items()
            }
            self._config = {**self._config, "added_tokens_decoder": {**listed, **entries}}
        return len([token for token in added if token not in known])

    def marks(self) -> Mapping[int, bool]:
        """Return the added tokens of tokenizer.json, and the special tokens in use."""
        added = self._backend.get_added_tokens_decoder()
        special = {number: bool(token.special) for number, token in added.items()}
        special_ids = (self.bos_token_id, self.eos_token_id, self.pad_token_id)
        return special | {number: True for number in special_ids if number is not None}

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, also without special tokens that tokenizer.json does not mark as special."""
        special = (self.bos_token_id, self.eos_token_id, self.pad_token_id)
        with library_errors(self._file, "decoding failed"):
            return self._backend.decode(
                [i for i in ids if i not in special], skip_special_tokens=True
            )

    def spell(self, ids: Sequence[int]) -> str:
        with library_errors(self._file, "decoding failed"):
            return self._backend.decode(list(ids), skip_special_tokens=False)

    def _documents(self) -> Fields:
        """Return tokenizer as it was read, and tokenizer_config with the special tokens in use."""
        ids = {"bos": self.bos_token_id, "eos": self.eos_token_id, "pad": self.pad_token_id}
        special = {}
        for role, i in ids.items():
            if i is not None:
                special[f"{role}_token"] = self._backend.id_to_token(i)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config, **special}
        return {"tokenizer": self._document, "tokenizer_config": config}


def _special_id(
    role: str, documents: Iterable[Fields], token_to_id: Callable[[str], int | None]
) -> int | None:
    """Return the id of a role's token from the first document that names the token or its id.

    Ids that no vocabulary has, such as -1, count as none.
    """
    for document in documents:
        token = document.get(f"{role}_token")
        number = document.get(f"{role}_token_id")
        # Older files write a token as an object, AddedToken, with its text as content.
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            number = token_to_id(token)
        elif isinstance(number, list):
            # Llama 3 has a list of ids that end an answer; its first is the end of a text.
            number = number[0] if number else None
        if not isinstance(token, str | None) or not (number is None or type(number) is int):
            wrong, advice = (
                ("token", "the text of one token")
                if token is not None
                else ("token_id", "a whole number")
            )
            value = token if token is not None else number
            raise DataError(f"{role}_{wrong} is {json.dumps(value)[:60]}: give {advice}")
        if number is not None and number >= 0:
            return number
    return None
