"""Text to token ids and back: raw bytes, which need no files, or a Hugging Face tokenizer.json.

A tokenizer's files are tokenizer.json and tokenizer_config.json in Hugging Face's format, for either kind. The byte
tokenizer writes a BPE without merges that falls back to bytes, so that the `tokenizers` library gives the same ids; its
special tokens are in the vocabulary only, so that no text, not even "<eos>", can encode to one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from te_models.checkpoint.folder import read_listed
from te_models.errors import DataError, needs
from te_models.files.atomic import first_line
from te_models.files.formats import parse_json

_ROLES = ("bos", "eos", "pad")


class Tokenizer(Protocol):
    """What training and generation need of a tokenizer. Ids are below vocab_size."""

    @property
    def vocab_size(self) -> int:
        """The highest id plus one."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, None if there is none."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, None if there is none."""
        ...

    @property
    def pad_token_id(self) -> int | None:
        """The id that fills up a row, None if there is none."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; no special token is added."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of `text` with the special tokens that it begins with for this model, such as bos."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The ids of each text as a 1-d integer array, faster than one `encode` a text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: special and unknown ids are skipped, invalid UTF-8 becomes replacement characters."""
        ...

    def documents(self) -> dict[str, Any]:
        """The JSON of its files, by name without suffix: what `save` writes."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write its files into `folder`, from which `load_tokenizer` gives the same tokenizer."""
        ...


def load_tokenizer(path: str | Path | None = None) -> Tokenizer:
    """The tokenizer at `path`: a tokenizer.json, or a folder that holds one; None gives the ByteTokenizer.

    Raises:
        ValueError: there is no such file, it is not a tokenizer, or the `tokenizers` package is missing.
    """
    if path is None:
        return ByteTokenizer()
    file = Path(path)
    if file.is_dir():
        file /= "tokenizer.json"
    document = _read_json(file)
    if document is None:
        raise DataError(f"{file}: no such file; give a Hugging Face tokenizer.json or a folder that holds one")
    if document == ByteTokenizer().documents()["tokenizer"]:
        return ByteTokenizer()
    return HuggingFaceTokenizer(document, file)


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then the special ids bos, eos and pad."""

    vocab_size = 259
    bos_token_id = 256
    eos_token_id = 257
    pad_token_id = 258

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        """The bytes of `text`: nothing goes before them."""
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The bytes of each text, uint8, without a copy for each."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the bytes among `ids`, with replacement characters for invalid UTF-8."""
        return bytes(i for i in ids if i < self.bos_token_id).decode(errors="replace")

    def documents(self) -> dict[str, Any]:
        """tokenizer and tokenizer_config, as `save` writes them."""
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
        special = {f"{role}_token": f"<{role}>" for role in _ROLES}
        model = {"type": "BPE", "byte_fallback": True, "merges": []}
        decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
        return {
            "tokenizer": {
                "version": "1.0",
                "added_tokens": [],
                "decoder": decoder,
                "model": {**model, "vocab": vocab | {token: 256 + i for i, token in enumerate(special.values())}},
            },
            # Without split_special_tokens, transformers would read "<eos>" in a text as the end of it.
            "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True, **special},
        }

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        _write_documents(Path(folder), self.documents())


class HuggingFaceTokenizer:
    """A tokenizer.json, run by the `tokenizers` library. `tokenizers>=0.20`.

    The special tokens are those that the files beside it name: tokenizer_config.json, else special_tokens_map.json, else
    generation_config.json (of several eos ids, the first).

    Args:
        document: the content of tokenizer.json.
        file: where it was read; the other files are looked for beside it.
    """

    def __init__(self, document: Any, file: Path) -> None:
        with needs(str(file), "tokenizers", "0.20", "train"):
            from tokenizers import Tokenizer as Backend  # noqa: PLC0415
        try:
            self._backend = Backend.from_str(json.dumps(document))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises nothing more specific, and panics outside of Exception
            reason = first_line(error)
            raise DataError(f"{file}: not a tokenizer.json of Hugging Face's tokenizers library ({reason})") from None
        # A file may carry the truncation of the model it was made for, which would silently cut documents.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._document = document
        self._config = _read_object(file.with_name("tokenizer_config.json"))
        beside = [self._config] + [
            _read_object(file.with_name(name)) for name in ("special_tokens_map.json", "generation_config.json")
        ]
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (
            _special_id(role, beside, self._backend.token_to_id) for role in _ROLES
        )
        self.vocab_size = max(self._backend.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; a special token spelled out in it becomes its id, as is usual for these tokenizers."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of `text` as transformers gives them: with what the file's post-processor adds."""
        return self._backend.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The ids of each text, int32, on all cores."""
        encoded = []
        # In parts, because the library's encodings take many times the memory of their ids.
        for start in range(0, len(texts), 1024):
            part = self._backend.encode_batch_fast(list(texts[start : start + 1024]), add_special_tokens=False)
            encoded += [np.array(encoding.ids, dtype=np.int32) for encoding in part]
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; also skips special tokens that tokenizer.json itself does not mark as special."""
        special = (self.bos_token_id, self.eos_token_id, self.pad_token_id)
        return self._backend.decode([i for i in ids if i not in special], skip_special_tokens=True)

    def documents(self) -> dict[str, Any]:
        """tokenizer as it was read, and tokenizer_config with the special tokens that are in force."""
        ids = {"bos": self.bos_token_id, "eos": self.eos_token_id, "pad": self.pad_token_id}
        special = {f"{role}_token": self._backend.id_to_token(i) for role, i in ids.items() if i is not None}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config, **special}
        return {"tokenizer": self._document, "tokenizer_config": config}

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        _write_documents(Path(folder), self.documents())


def _special_id(role: str, documents: Iterable[dict[str, Any]], token_to_id: Callable[[str], int | None]) -> int | None:
    """The id of a role's token, from the first document that names the token or its id."""
    for document in documents:
        token, number = document.get(f"{role}_token"), document.get(f"{role}_token_id")
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            number = token_to_id(token) if isinstance(token, str) else token
        if isinstance(number, list):
            number = number[0] if number else None
        if number is not None:
            if type(number) is not int or not 0 <= number < 2**31:
                raise DataError(f"the tokenizer's {role}_token is {str(number)[:40]!r}, which is no token")
            return number
    return None


def _read_json(file: Path) -> Any:
    """The content of a JSON file, None if there is no such file."""
    found = read_listed(file.parent, [file.name])
    return parse_json(found[file.name], file, DataError) if file.name in found else None


def _read_object(file: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object, empty if there is no such file."""
    found = _read_json(file)
    if not isinstance(found, dict | None):
        raise DataError(f"{file} is not an object of names and values")
    return found or {}


def _write_documents(folder: Path, documents: dict[str, Any]) -> None:
    """Each document as a file of its own, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in documents.items():
        temp = folder / f".{name}.json.saving"
        temp.write_bytes(json.dumps(document, ensure_ascii=False, indent=2).encode())
        os.replace(temp, folder / f"{name}.json")
