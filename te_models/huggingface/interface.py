"""Methods that clients of transformers call on any model: embedding and head, names, sizes, checkpointing, dtypes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from te_models.adapters.parameters import listed
from te_models.causal_lm import CausalLM
from te_models.errors import UsageError
from te_models.files.formats import Fields
from te_models.huggingface.adapters import HiddenNames, is_adapted
from te_models.huggingface.saving import HEAD, WRAPPED, multimodal_name


class ModelInterface(PreTrainedModel):
    """The part of transformers' interface that neither computes nor loads anything.

    transformers' own implementations would look for modules, or set attributes, that a CausalLM does not have.

    Attributes:
        model: the CausalLM that has the weights.
    """

    model: CausalLM
    # True if the weights came from a multimodal folder, whose text model is below "model.language_model".
    _multimodal = False
    # The names of te modules that no target of peft may end like; filled by TEModelsForCausalLM.
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
        """Yield the name and the module of each module, under transformers' names, which peft gives to adapters.

        - A head with adapters has its name in files, "lm_head" without "model." before it.
        - Of a multimodal model, names begin with "model.language_model" as in transformers.
        - te modules without a counterpart in transformers get names that end like none of peft's targets, which would
          adapt them too: a target "down_proj" is for every module whose name ends so.
        - A module that is yielded lists parameters of transformers that are rows or stacks of ours.
        """
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            relative = name.removeprefix(prefix).removeprefix(".")
            if relative.startswith(HEAD) and is_adapted(self.lm_head):
                name = f"{prefix}.{relative.removeprefix(WRAPPED)}".removeprefix(".")
            name = self._hidden.renamed(name)
            if self._multimodal:
                name = multimodal_name(name, prefix)
            with listed(module):
                yield name, module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name and the parameter of each parameter, under its name in a state_dict."""
        # The base class takes names from named_modules, where some were changed for peft.
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield self._hidden.original(name), parameter

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, [vocabulary, D]."""
        return self.model.embed_tokens

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters; rows of padding in te.Linears do not count."""
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
        """Return the embedding, if it has as many rows as the call asks for.

        TRL and others call this for every model, mostly with the size that it has.

        Raises:
            UsageError: it has another number of rows.
        """
        rows = self.model.config.vocab_size
        new_rows = rows if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of:
            new_rows += -new_rows % pad_to_multiple_of
        if new_rows != rows:
            advice = f": load it with vocab_size={new_rows}" if new_rows > rows else ""
            raise UsageError(
                f"the vocabulary has {rows} tokens and cannot be resized to {new_rows}{advice}"
            )
        return self.model.embed_tokens

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: Fields | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
        **others: object,
    ) -> None:
        """Set `activation_checkpointing`, as CausalLM's method does; the options of torch's function are ignored."""
        self.model.gradient_checkpointing_enable(every_n_layers=every_n_layers, offload=offload)

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
