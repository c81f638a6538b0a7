"""Text as its UTF-8 bytes: a tokenizer that needs no files.

It is saved as a BPE without merges that falls back to bytes, so that the `tokenizers` library gives the same ids. Its
special tokens are only in the vocabulary, so that no text, not even "<eos>", encodes to one.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from te_models.data.json_files import read_json_object
from te_models.data.tokenizer_base import ROLES, Tokenizer
from te_models.errors import UsageError
from te_models.files.formats import Fields


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
            special = {f"<{role}>": 256 + i for i, role in enumerate(ROLES)}
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        # The position in the text, in characters: one character may be several ids.
        at = 0
        for part in re.split("(" + "|".join(special) + ")", text) if special else [text]:
            if part in special:
                ids.append(special[part])
                places.append((at, at + len(part)))
            else:
                ids += part.encode()
                # Each byte of a character has the place of the whole character, as in the tokenizers library.
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
                spelled += f"<{ROLES[number - 256]}>".encode()
        return spelled.decode(errors="replace")

    def _documents(self) -> Fields:
        # The names under which a BPE with byte_fallback looks for bytes.
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
        special = {f"{role}_token": f"<{role}>" for role in ROLES}
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
