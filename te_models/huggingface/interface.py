"""Methods that clients of transformers call on any model: names of modules, ends, sizes, checkpointing, dtypes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from te_models.causal_lm import CausalLM
from te_models.errors import UsageError
from te_models.files.formats import Fields
from te_models.huggingface.adapters import HiddenNames, is_adapted
from te_models.huggingface.saving import HEAD, WRAPPED, inside


class ModelInterface(PreTrainedModel):
    """The part of transformers' interface that neither computes nor loads anything.

    Attributes:
        model: the CausalLM that has the weights.
    """

    model: CausalLM
    _multimodal = False  # whether the model came from a folder with another model beside it
    _hidden = HiddenNames([])

    def init_weights(self) -> None:
        """Do nothing: CausalLM has initialized and tied its weights already."""

    @property
    def lm_head(self) -> nn.Module:  # type: ignore[bad-override]  # an attribute of other classes
        """The head, where transformers has it; it is a module of the CausalLM."""
        return self.model.lm_head

    def named_modules(  # type: ignore[bad-override]  # yields what the base class does
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules by the names of transformers, after which peft names adapters.

        A head that peft has adapted has the name that it has in files; names of a multimodal folder are below
        "model.language_model", where CausalLM.language_model leads. te modules that are none in transformers, or are
        elsewhere, have names that end like no target of peft: it would take "down_proj" for one of them too.
        """
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            own = name.removeprefix(prefix).removeprefix(".")
            if own.startswith(HEAD) and is_adapted(self.lm_head):
                name = f"{prefix}.{own.removeprefix(WRAPPED)}".removeprefix(".")
            name = self._hidden.renamed(name)
            yield inside(name, prefix) if self._multimodal else name, module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters by their names in a state_dict."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield self._hidden.original(name), parameter

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the CausalLM's number: without rows of padding."""
        return self.model.num_parameters(only_trainable, exclude_embeddings)

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, an nn.Linear as in transformers; peft leaves it out of "all-linear"."""
        return self.model.lm_head

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Return the embedding if it already has this many rows; raise a UsageError otherwise."""
        rows = self.model.config.vocab_size
        wanted = rows if new_num_tokens is None else new_num_tokens
        step = pad_to_multiple_of or 1
        if (wanted := -(-wanted // step) * step) != rows:
            raise UsageError(f"the vocabulary has {rows} tokens and cannot be resized to {wanted}")
        return self.model.embed_tokens

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Fields | None = None, **others: object
    ) -> None:
        """Set `activation_checkpointing` to "full"; the options of torch's function are ignored."""
        self.model.gradient_checkpointing_enable()

    def gradient_checkpointing_disable(self) -> None:
        """Set `activation_checkpointing` to "none"."""
        self.model.gradient_checkpointing_disable()

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Return whether backward recomputes activations."""
        return self.model.activation_checkpointing != "none"

    def half(self, *args: object) -> ModelInterface:
        self.model.half()
        return self

    def double(self, *args: object) -> ModelInterface:
        self.model.double()
        return self
