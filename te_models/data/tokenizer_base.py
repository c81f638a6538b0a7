"""The base of all tokenizers: text to token ids and back, chat templates, and the files that they are saved as."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

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
    template_sources,
    template_tokens,
)
from te_models.errors import DataError
from te_models.files.formats import Fields
from te_models.interop.hf_writing import tokenizer_files
from te_models.saving.folder import read_listed

CONTEXT = 16  # tokens before new ones that their text may depend on
ROLES = ("bos", "eos", "pad")


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
        ids = ", ".join(f"{role} {getattr(self, f'{role}_token_id')}" for role in ROLES)
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

    def documents(self) -> dict[str, Any]:
        """Return the content of its files, as `save` writes them: JSON by name without suffix, and a chat template that
        is not part of tokenizer_config.json as bytes, by its file's name."""
        documents = self._documents()
        sources = self.template_sources()
        config = dict(documents["tokenizer_config"])
        # The template is as it was read: the files stay as they were.
        if sources == config_templates(config):
            return documents
        config.pop("chat_template", None)
        files = {}
        for name, source in sources.items():
            if name == DEFAULT:
                files[BESIDE] = source.encode()
            else:
                files[f"{TEMPLATES}/{name}.jinja"] = source.encode()
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
            # Renamed into place, so that a reader never meets half a file.
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
                    "chatml, or ask for completions (te-models generate without --chat, /v1/completions of a server)"
                )
            # Of several named templates only these two are for conversations as such.
            used = {name: sources[name] for name in (DEFAULT, TOOL_USE) if name in sources}
            if not used:
                self._refuse_names(sources)
            tokens = self._template_tokens()
            self._templates = {name: ChatTemplate(text, tokens) for name, text in used.items()}
        # The special template for tools is used where there are tools; without one, the default may write them too.
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

    def apply_chat_template(self, messages: Sequence[Message], /, **variables: object) -> list[int]:
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
    # By the end of a token: one that begins before the character may hold it too.
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
