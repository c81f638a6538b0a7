"""Text to token ids and back: raw bytes, which need no files, or a Hugging Face tokenizer.json.

Both kinds are saved as tokenizer.json and tokenizer_config.json in Hugging Face's format. The byte tokenizer is a BPE
without merges that falls back to bytes, so that the `tokenizers` library gives the same ids; its special tokens are
only in the vocabulary, so that no text, not even "<eos>", encodes to one.
"""

import functools
import json
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from te_models.data.chat_template import (
    BESIDE,
    DEFAULT,
    PLAIN,
    PLAIN_WITH_BOS,
    TEMPLATES,
    TOOL_USE,
    ChatTemplate,
    Message,
    config_templates,
    template_source,
    template_sources,
    template_tokens,
)
from te_models.data.json_files import read_json_object
from te_models.data.tokenizer_conversion import convert_tokenizer
from te_models.data.tokenizers_library import check_charsmaps, library_errors, without_panics
from te_models.errors import DataError, UsageError, needs
from te_models.files.formats import Fields
from te_models.interop.hf import hugging_face_documents
from te_models.interop.hf_writing import tokenizer_files
from te_models.interop.hub import local_folder
from te_models.saving.folder import read_listed
from te_models.saving.pretrained import saved_folder
from te_models.saving.run_folder import offering_older

T = TypeVar("T")
CONTEXT = 16  # tokens before new ones that their text may depend on
_ROLES = ("bos", "eos", "pad")


class Tokenizer(ABC):
    """Base of all tokenizers. Ids are below `vocab_size`; a special id is None where there is none.

    Attributes:
        vocab_size: the highest id plus one.
        bos_token_id, eos_token_id, pad_token_id: ids that begin a text, end one, and fill up a row.
        folder: where its files were read, if anywhere.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    folder: Path | None = None
    _templates: Mapping[str, ChatTemplate] = MappingProxyType({})  # those in use, by name
    _template_source: str | None = None  # in place of the one in the folder

    def __repr__(self) -> str:
        place = f", {self.folder}" if self.folder is not None else ""
        ids = ", ".join(f"{role} {getattr(self, f'{role}_token_id')}" for role in _ROLES)
        return f"{type(self).__name__}({self.vocab_size:,} ids, {ids}{place})"

    def __getstate__(self) -> dict[str, object]:
        # Compiled templates are processes, which cannot be copied.
        return {name: value for name, value in self.__dict__.items() if name != "_templates"}

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens before or after it."""

    @abstractmethod
    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of `text` with the special tokens that a text begins with, such as bos."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the ids of each text as a 1-d integer array; faster than one `encode` per text."""

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]]
    ) -> list[tuple[NDArray[np.integer], int]]:
        """Encode pairs of prompt and completion, each as the one text prompt + completion.

        Returns:
            for each pair its ids [n], and how many of them are of the prompt alone. A token that holds the end of the
            prompt and the beginning of the completion is one of the completion.
        """
        prompts = self.encode_batch([prompt for prompt, _ in pairs])
        completions = self.encode_batch([completion for _, completion in pairs])
        return [
            (np.concatenate([prompt, completion]), len(prompt))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    @abstractmethod
    def encode_rendered(
        self, texts: Sequence[str]
    ) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        """Encode conversations that a chat template has rendered, in which special tokens are spelled out.

        Returns:
            for each text its ids [n], and the first and last character plus one of each token, int64 [n, 2].
        """

    @abstractmethod
    def add_special_tokens(self, tokens: Sequence[str]) -> int:
        """Make each of `tokens` a special token with an id of its own; return how many ids are new.

        `vocab_size` grows with them, and the model's embedding has to (`vocab_size` of CausalLM.from_pretrained).

        Raises:
            UsageError: the tokenizer cannot have more tokens.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special and unknown ids are skipped, invalid UTF-8 becomes U+FFFD."""

    @abstractmethod
    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` with special tokens spelled out."""

    @abstractmethod
    def marks(self) -> Mapping[int, bool]:
        """Return the ids of special and added tokens, with whether each is special: hidden in decoded text."""

    @abstractmethod
    def _documents(self) -> Fields:
        """Return the JSON of its files, by name without suffix, with a chat template only if they came with one."""

    def documents(self) -> dict[str, object]:
        """Return the content of its files, as `save` writes them: JSON by name without suffix, and a chat template that
        is not part of tokenizer_config.json as bytes, by its file's name."""
        documents = self._documents()
        sources = self.template_sources()
        config = dict(documents["tokenizer_config"])
        if sources == config_templates(config):
            return documents
        config.pop("chat_template", None)
        files = {
            BESIDE if name == DEFAULT else f"{TEMPLATES}/{name}.jinja": source.encode()
            for name, source in sources.items()
        }
        return {**documents, "tokenizer_config": config, **files}

    def files(self) -> dict[str, object]:
        """Return `documents`, and as bytes by name the other files of a tokenizer that its folder has.

        Templates among those are left out where `set_chat_template` has replaced them.
        """
        names = set(tokenizer_files(self.folder)) - {
            "tokenizer.json",
            "tokenizer_config.json",
            BESIDE,
        }
        if self._template_source is not None:
            names = {name for name in names if "chat_template" not in name}
        beside = read_listed(self.folder, sorted(names)) if self.folder is not None else {}
        return {**beside, **self.documents()}

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and perhaps chat_template.jinja, from which `load_tokenizer`
        restores it, atomically each."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, document in self.documents().items():
            raw = isinstance(document, bytes)
            file = Path(folder) / (name if raw else f"{name}.json")
            file.parent.mkdir(exist_ok=True)
            temp = file.with_name(f".{file.name}.saving")
            temp.write_bytes(
                document if raw else json.dumps(document, ensure_ascii=False, indent=2).encode()
            )
            os.replace(temp, file)

    def begins_with_bos(self) -> bool:
        """Return whether texts begin with the bos token."""
        bos = self.bos_token_id
        return bos is not None and self.encode_prompt("")[:1] == [bos]

    def template_sources(self) -> dict[str, str]:
        """Return the Jinja source of each chat template by name; without one, nothing."""
        if self._template_source is not None:
            return {DEFAULT: self._template_source}
        return {} if self.folder is None else template_sources(self.folder)

    def template_source(self) -> str | None:
        """Return the Jinja source of the chat template for conversations without tools; None where there is none."""
        return self.template_sources().get(DEFAULT)

    def set_chat_template(self, source: str | None = None) -> None:
        """Use, and save, this chat template; None: a plain one that any tokenizer can read (docs/reference/data.md).

        Raises:
            DataError: it is not valid Jinja.
        """
        if source is None:
            source = PLAIN_WITH_BOS if self.begins_with_bos() else PLAIN
        self._templates = {DEFAULT: ChatTemplate(source, self._template_tokens())}
        self._template_source = source

    def ensure_chat_template(self) -> bool:
        """Use the plain chat template if there is none; return whether there was none."""
        missing = not self.template_sources()
        if missing:
            self.set_chat_template()
        return missing

    def chat_template(self, tools: bool = False) -> ChatTemplate:
        """Return the chat template, of several the one for conversations with or without `tools`.

        Raises:
            DataError: there is none, or of several none is for such conversations.
        """
        if not self._templates:
            sources = self.template_sources()
            if not sources:
                if self.folder is None:
                    raise DataError(
                        "bytes have no chat template: give --model or --tokenizer a folder that has one"
                    )
                raise DataError(
                    f"{self.folder} has no chat template, so it is no chat model: give --chat-template, a FILE or "
                    "chatml, or use te-models generate without --chat"
                )
            used = {name: sources[name] for name in (DEFAULT, TOOL_USE) if name in sources}
            if not used:
                self._refuse_names(sources)
            tokens = self._template_tokens()
            self._templates = {name: ChatTemplate(text, tokens) for name, text in used.items()}
        if tools and TOOL_USE in self._templates:
            return self._templates[TOOL_USE]
        if DEFAULT not in self._templates:
            self._refuse_names(self.template_sources())
        return self._templates[DEFAULT]

    def _refuse_names(self, names: Iterable[str]) -> NoReturn:
        shown = ", ".join(map(repr, sorted(names)))
        raise DataError(
            f"{self.folder} has chat templates named {shown}, but none named {DEFAULT!r}: give --chat-template FILE"
        )

    def _template_tokens(self) -> dict[str, str]:
        return template_tokens(self._documents()["tokenizer_config"])

    def apply_chat_template(self, messages: Sequence[Message], **variables: object) -> list[int]:
        """Return the ids of a conversation, up to where the assistant speaks next.

        Args:
            messages: dicts with "role" and "content".
            variables: variables of the template, such as enable_thinking.

        Raises:
            DataError: there is no chat template, or it refuses the messages.
        """
        template = self.chat_template(tools=variables.get("tools") is not None)
        ids, _ = self.encode_rendered([template.render(messages, **variables)])[0]
        return ids.tolist()


class SavesItself(Protocol):
    """The part of transformers' tokenizers that is used here."""

    def save_pretrained(self, save_directory: str) -> Any: ...


TokenizerLike: TypeAlias = "Tokenizer | SavesItself | str | os.PathLike[str]"


def load_tokenizer(source: str | Path | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        source: a tokenizer.json, a folder with one, or with files that transformers can convert to one, a saved model,
            the folder of a run (its newest checkpoint), or the name of a model on the Hugging Face hub. None, and a
            model of te-models saved without a tokenizer, give the ByteTokenizer.

    Raises:
        ValueError: there is no such file, it is not a tokenizer, or the packages that read it are missing.
    """
    if source is None:
        return ByteTokenizer()
    file = Path(source)
    if file.is_file() or file.suffix == ".json":
        return _tokenizer_of(file)
    folder = saved_folder(local_folder(source))
    with offering_older(folder):
        return _tokenizer_in(folder)


def as_tokenizer(tokenizer: object) -> Tokenizer:
    """Return a Tokenizer: one as it is, a copy of a tokenizer of transformers, or what `load_tokenizer` loads.

    Raises:
        UsageError: it is something else, or a tokenizer of transformers without a tokenizer.json.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str | os.PathLike):
        return load_tokenizer(os.fspath(tokenizer))
    save = getattr(tokenizer, "save_pretrained", None)
    if save is None:
        raise UsageError(
            f"the tokenizer is a {type(tokenizer).__name__}: give what load_tokenizer returns, a folder, or a "
            "tokenizer of transformers"
        )
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        return load_tokenizer(folder)


def _tokenizer_in(folder: Path) -> Tokenizer:
    """Load the tokenizer in a folder."""
    file = folder / "tokenizer.json"
    if os.path.lexists(file):
        return _tokenizer_of(file)
    if (converted := convert_tokenizer(folder)) is not None:
        return HuggingFaceTokenizer(converted[0], file, converted[1])
    base = (read_json_object(folder / "adapter_config.json") or {}).get("base_model_name_or_path")
    if isinstance(base, str):  # adapters that peft has saved
        tokenizer = load_tokenizer(base)
        if (template := template_source(folder)) is not None:
            tokenizer.set_chat_template(template)
        return tokenizer
    has_model = (folder / "config.json").is_file()
    if has_model and hugging_face_documents(folder) is None:
        return ByteTokenizer()
    if has_model:
        raise DataError(f"{folder} has no tokenizer.json: give --tokenizer the path of one")
    if (
        folder / "best" / "checkpoints" / "latest"
    ).is_file():  # of a run that ended before its first save
        raise DataError(
            f"{folder} has no checkpoint of the run; {folder / 'best'} has the model of its lowest evaluation loss"
        )
    raise DataError(
        f"{folder} holds no model and no tokenizer; the folder of a run has them after its first save"
    )


def _tokenizer_of(file: Path) -> Tokenizer:
    """Load the tokenizer of a tokenizer.json and the files beside it."""
    document = read_json_object(file)
    if document is None:
        raise DataError(
            f"{file}: no such file; give a Hugging Face tokenizer.json or a folder that holds one"
        )
    if document == ByteTokenizer().documents()["tokenizer"]:
        return ByteTokenizer(file.parent)
    return HuggingFaceTokenizer(document, file)


def end_of_text(tokenizer: Tokenizer) -> int:
    """Return the id that ends each document; a DataError if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-text token to put between documents: name one as eos_token in "
            "tokenizer_config.json beside its tokenizer.json"
        )
    return tokenizer.eos_token_id


def first_token_after(places: NDArray[np.int64], character: int) -> int:
    """Return the index of the first token that holds text from this character on; all tokens, if none does.

    `places` are the first character and the last plus one of each token, int64 [n, 2].
    """
    later = np.flatnonzero(places[:, 1] > character)
    return int(later[0]) if len(later) else len(places)


def text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that `ids` add to the tokens `before`.

    SentencePiece-style decoders drop the space at the start of a text, so `ids` are decoded together with the last of
    `before`.
    """
    context = list(before[-CONTEXT:])
    start = tokenizer.decode(context)
    whole = tokenizer.decode([*context, *ids])
    return whole.removeprefix(start) if whole.startswith(start) else tokenizer.decode(ids)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, then the special ids bos, eos and pad.

    No text encodes to a special id, except the output of a chat template set by `set_chat_template`.
    """

    vocab_size = 259
    bos_token_id = 256
    eos_token_id = 257
    pad_token_id = 258

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._config = (
            (read_json_object(folder / "tokenizer_config.json") or {}) if folder is not None else {}
        )

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the bytes of each text, uint8, without a copy of each."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def encode_rendered(
        self, texts: Sequence[str]
    ) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        return [self._encode_rendered(text) for text in texts]

    def add_special_tokens(self, tokens: Sequence[str]) -> int:
        raise UsageError(
            "bytes cannot have special tokens of yours: give --tokenizer a tokenizer.json, or leave out "
            f"--special-tokens {','.join(tokens)}"
        )

    def _encode_rendered(self, text: str) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        if self._splits_special():
            special = {}
        else:
            special = {f"<{role}>": 256 + i for i, role in enumerate(_ROLES)}
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        at = 0
        for part in re.split("(" + "|".join(special) + ")", text) if special else [text]:
            if part in special:
                ids.append(special[part])
                places.append((at, at + len(part)))
            else:
                ids += part.encode()
                places += [
                    (at + i, at + i + 1) for i, letter in enumerate(part) for _ in letter.encode()
                ]
            at += len(part)
        return np.array(ids, dtype=np.int32), np.array(places, dtype=np.int64).reshape(-1, 2)

    def _splits_special(self) -> bool:
        """Return whether a special token spelled out in a rendered text is text, as transformers does by the config."""
        return (
            self._template_source is None
            and self._config.get("split_special_tokens", True) is not False
        )

    def marks(self) -> Mapping[int, bool]:
        return dict.fromkeys(range(256, self.vocab_size), True)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def spell(self, ids: Sequence[int]) -> str:
        spelled = b""
        for number in ids:
            if number < 256:
                spelled += bytes([number])
            elif number < self.vocab_size:
                spelled += f"<{_ROLES[number - 256]}>".encode()
        return spelled.decode(errors="replace")

    def _documents(self) -> Fields:
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
        special = {f"{role}_token": f"<{role}>" for role in _ROLES}
        model = {"type": "BPE", "byte_fallback": True, "merges": []}
        decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
        return {
            "tokenizer": {
                "version": "1.0",
                "added_tokens": [],
                "decoder": decoder,
                "model": {
                    **model,
                    "vocab": vocab | {token: 256 + i for i, token in enumerate(special.values())},
                },
            },
            "tokenizer_config": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                # With False, transformers reads "<eos>" in a text as the end of it, as a chat template of ours needs.
                "split_special_tokens": self._splits_special(),
                **(
                    {"chat_template": self._config["chat_template"]}
                    if "chat_template" in self._config
                    else {}
                ),
                **special,
            },
        }


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
                _special_id(role, beside, self._backend.token_to_id) for role in _ROLES
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
        for token, number in added.items():
            if token not in known and number < before:
                raise DataError(
                    f"{self._file}: the vocabulary has holes, so {token!r} would get the id {number} of another token"
                )
        self.vocab_size = max(before, *(number + 1 for number in added.values()))
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
        special = {
            f"{role}_token": self._backend.id_to_token(i)
            for role, i in ids.items()
            if i is not None
        }
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
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            number = token_to_id(token)
        elif isinstance(number, list):
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
