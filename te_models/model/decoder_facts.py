"""Facts about a decoder that its other methods and its users ask for, and changes of it that are refused."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from te_models.config.model import ModelConfig
from te_models.config.recipe import EngineRecipe, Recipe
from te_models.config.recompute_modes import check_mode
from te_models.engine import engine_module
from te_models.errors import UsageError
from te_models.fp8.kept_weights import forget_kept_weights
from te_models.fp8.precision import ModelPrecision
from te_models.fp8.primary_weights import relink
from te_models.kernels.dispatch import PLAIN, Kernels
from te_models.model.block import Block
from te_models.model.dtypes import DTYPES
from te_models.model.kv_cache import DecodingCache
from te_models.model.part import new_states
from te_models.model.te_modules import own_weight

REFUSED_DTYPES = {
    torch.float64: "te layers do not run in FP64: build the model with dtype=torch.float32 or torch.bfloat16",
    torch.float16: "a live model does not change its dtype: build or load it with dtype=torch.float16",
}

FP16_GRADIENTS = (
    "the model is trained in float16, in which most gradients underflow without loss scaling: load it with "
    "dtype=torch.bfloat16 or torch.float32"
)


class DecoderFacts(nn.Module):
    """The engine, the recipe, the dtype, the device and the special tokens of a decoder, and a cache that fits it.

    Attributes:
        config: the shape.
        engine: "native" or "emulated".
        precision: the precision of each te.Linear.
        fp8_params: the weights of the FP8 layers are stored in FP8.
        embed_tokens: the embedding.
        layers: the blocks.
        kernels: the operations between its GEMMs.
    """

    config: ModelConfig
    engine: str
    precision: ModelPrecision
    fp8_params: bool
    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    kernels: Kernels

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; raise a UsageError for an unknown mode of `activation_checkpointing`.

        So are more or fewer blocks, as peft's layer_replication would have them. Wrappers around each block, such as
        PyTorch's for checkpointing, are taken.
        """
        if name == "activation_checkpointing":
            value = check_mode(value)
        if name == "layers" and "layers" in self._modules and len(value) != len(self.layers):
            raise UsageError(
                "the blocks of a model cannot be repeated or left out: leave out layer_replication"
            )
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore a copy or a pickle, which trains its own scales."""
        super().__setstate__(state)
        for module in self.modules():
            if isinstance(module, self.te.LINEARS):
                self.te.separate_copy(module)
        # FP8 weights refer to the quantizers of their module: the copies still have the original's.
        relink(self, self.precision.te_recipe_of)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Raise a UsageError for conversions to dtypes but BF16 and FP32, and with FP8 weights to any other dtype.

        `to`, `type`, `float`, `double` and `half` all call this.
        """
        # `fn` says nothing about itself: an empty tensor shows the dtype that it makes.
        dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        if dtype in REFUSED_DTYPES and dtype != self.dtype:
            raise UsageError(REFUSED_DTYPES[dtype])
        if dtype not in DTYPES.values():
            raise UsageError(
                f"te layers do not run in {dtype}: FP8 is a recipe, with fp8_params=True also of the weights"
            )
        if self.fp8_params and dtype != self.dtype:
            # A conversion passes over weights in FP8, and leaves a model of two dtypes.
            raise UsageError(
                f"a live model with FP8 weights does not change its dtype: build or load it with dtype={dtype}, or "
                "without fp8_params"
            )
        # They would stay where the model was.
        forget_kept_weights(self)
        return super()._apply(fn, recurse)

    @property
    def te(self) -> ModuleType:
        """The engine's namespace, which is looked up since a model with a Python module inside could not be copied."""
        return engine_module(self.engine)

    @property
    def recipe(self) -> Recipe:
        """The precision recipe; `set_recipe` changes it."""
        return self.precision.recipe

    @property
    def te_recipe(self) -> EngineRecipe | None:
        """The engine's object of the recipe; None for BF16."""
        return self.precision.te_recipe

    @property
    def fp8_layers(self) -> range:
        """The layers inside the autocast of the recipe; empty for BF16. `plan` has the precision of each te.Linear."""
        return self.precision.layers

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return self._table.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._table.device

    @property
    def _table(self) -> nn.Parameter:
        """The weight of the embedding [V, D], which every model has and no recipe quantizes."""
        return own_weight(self.embed_tokens)

    def warn_of_fp16_gradients(self) -> None:
        """Warn of a pass with a loss that trains in FP16; no compiler traces the warning."""
        trains = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if trains and self.dtype == torch.float16:
            warnings.warn(FP16_GRADIENTS, stacklevel=2)

    @property
    def generation_values(self) -> Mapping[str, Any]:
        """The values of generation_config.json, which come before the config's; none in a Decoder."""
        return {}

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a text, from generation_config.json, else from the config."""
        ids = self.generation_values.get("eos_token_id", self.config.eos_token_id)
        if ids is None:
            return ()
        if isinstance(ids, int):
            return (ids,)
        return tuple(ids)

    @property
    def pad_token_id(self) -> int | None:
        """The token id of padding, from generation_config.json, else from the config; None if there is none."""
        return self.generation_values.get("pad_token_id", self.config.pad_token_id)

    def new_cache(self, batch: int, max_length: int) -> DecodingCache:
        """Return an empty cache for `batch` rows of up to `max_length` positions, padding included.

        Raises:
            OutOfMemory: it does not fit on the device.
        """
        mixers = [cast(Block, block).token_mixer for block in self.layers]
        states = new_states(mixers, batch, max_length, self.device, self.dtype)
        return DecodingCache(states, batch, max_length, self.device, self.dtype)

    @contextlib.contextmanager
    def unfused(self) -> Iterator[None]:
        """Inside, run the model with plain kernels, which pass BF16 between its modules."""
        before = self.kernels
        self.kernels = PLAIN
        try:
            yield
        finally:
            self.kernels = before
