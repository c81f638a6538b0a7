"""Where a model came from: its folder, and Hugging Face's files in it that a save writes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_models.errors import CheckpointError, mistyped


@dataclass(frozen=True)
class Origin:
    """Origin of a model: its folder, and config.json and generation_config.json if they were Hugging Face's.

    `beside` is another folder with the tensors of other models that are saved with it, such as an image encoder's.

    Raises:
        CheckpointError: generation_config.json is no object, or a token id in it no whole number.
    """

    folder: Path | None = None
    config: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] | None = None
    beside: Path | None = None

    def __post_init__(self) -> None:
        if self.generation is None:
            return
        file = f"{self.folder}/generation_config.json"
        if not isinstance(self.generation, Mapping):
            raise CheckpointError(f"{file} is a JSON {type(self.generation).__name__}, not an object")
        for name in ("eos_token_id", "pad_token_id"):
            given = self.generation.get(name)
            ids = given if isinstance(given, list) and name == "eos_token_id" else [] if given is None else [given]
            if any(mistyped(number, int) or abs(number) >= 2**63 for number in ids):
                raise CheckpointError(f"{file}: {name} is {str(given)[:60]}: give the id of a token, a whole number")

    def documents(self) -> dict[str, Any]:
        """Return the documents to save with the model so that it can be written back unchanged."""
        found = {"hf_config": self.config, "generation_config": self.generation}
        return {name: document for name, document in found.items() if document is not None}
