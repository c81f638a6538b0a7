"""Show peft the linears of transformers, which are rows of our fused te.Linears: q, k, v and the gate are one of them.

peft puts a layer of its own around each nn.Linear that an adapter targets, and names the adapter's tensors after it.
So each group of rows gets an nn.Linear without parameters of its own (`NamedRows`), beside the te.Linear. The forward
pass does not enter it until it has an adapter; then `AdaptedRows` stands in the place of the te.Linear.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_models.adapters.low_rank import Part, add_updates
from te_models.adapters.merged import forget_merges
from te_models.adapters.parameters import Alias, Listing, write_rows
from te_models.distributed.dtensor import whole
from te_models.engine import engine_module
from te_models.engine.torch_linear import padded_product
from te_models.fp8.primary_weights import plain
from te_models.interop.tensor_places import Place
from te_models.numerics.stored import StoredWeight


class NamedRows(Listing, nn.Linear):
    """Rows of a te.Linear under their name in transformers.

    Args:
        linear: the te.Linear. It is not a submodule of this one, so that its parameters are not listed twice.
        place: which of its rows.
    """

    def __init__(self, linear: nn.Module, place: Place) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = place.shape
        self._linear = (linear,)  # in a tuple, so that it is no module of this one
        self.place = place
        self._columns: Tensor | None = None
        # While AdaptedRows runs: a function from the input of the rows to their output.
        self.run: Callable[[Tensor], Tensor] | None = None

    @property
    def linear(self) -> nn.Module:
        """The te.Linear."""
        return self._linear[0]

    @property
    def weight(self) -> Tensor:  # type: ignore[bad-override]  # a parameter of nn.Linear
        """The rows of the weight, [rows, in]; writing to its `data`, or assigning a weight, changes the te.Linear."""
        return self._alias("weight")

    @property
    def bias(self) -> Tensor | None:  # type: ignore[bad-override]  # a parameter of nn.Linear
        """The rows of the bias, [rows], written as the weight is; None if the te.Linear has no bias."""
        return self._alias("bias") if "bias" in self.linear._parameters else None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a weight or bias that peft assigns is written into the rows."""
        if name in ("weight", "bias"):
            self._write(name, value)
        else:
            super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Write a weight or bias into the rows, as an assignment does: they are not parameters of this module."""
        setattr(self, name, param)

    def _alias(self, name: str) -> Tensor:
        parameter = self.linear.get_parameter(name)
        if isinstance(parameter, (DTensor, StoredWeight)):
            # peft often asks only for dtype and device: a shard of FSDP2 is gathered, and a stored weight dequantized,
            # when the values are read.
            shape = (self.out_features, self.in_features)[: parameter.dim()]
            like = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(shape)
            return Alias(
                like,
                lambda: self.place.save(whole(plain(parameter))).clone(),
                lambda new: write_rows(self.linear, name, self.place, new),
            )
        values = self.place.save(plain(parameter)).clone()

        def write(new: Tensor) -> None:
            values.copy_(new.as_subclass(Tensor))
            write_rows(self.linear, name, self.place, values)

        return Alias(values, lambda: values, write)

    def _write(self, name: str, value: Tensor | None) -> None:
        """Write a tensor into the rows; None, and an alias of the rows themselves, change nothing."""
        if value is not None and not isinstance(value, Alias):
            write_rows(self.linear, name, self.place, value)

    def aliases(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weight, which peft's `target_parameters` looks for."""
        yield "weight", self.weight

    def columns(self) -> Tensor:
        """Return the indices of the rows among the te.Linear's outputs, int64 [rows]."""
        weight = self.linear.get_parameter("weight")
        if self._columns is None or self._columns.device != weight.device:
            # The first pass may be a generation in inference mode, whose tensors no later pass could train with.
            with torch.inference_mode(False):
                self._columns = self.place.save(torch.arange(len(weight), device=weight.device))
        return self._columns

    def forward(self, input: Tensor, *args: object, **options: object) -> Tensor:
        """Return the rows' output, [..., rows], for input [..., in].

        AdaptedRows, which runs the te.Linear, gives it during its own forward; otherwise the rows are multiplied here.
        """
        if self.run is not None:
            return self.run(input)
        return F.linear(input, self.weight, self.bias)


class AdaptedRows(nn.Module):
    """A te.Linear with adapters on some of its rows.

    Args:
        base_layer: the te.Linear.
        part: the block that contains it.
        names: names below `part` of the NamedRows, or of peft's layers around them.
    """

    def __init__(self, base_layer: nn.Module, part: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.part = (part,)  # in a tuple, so that it is no module of this one
        self.names = names
        self.fp8_enabled = fp8_enabled(type(base_layer))

    @property
    def weight(self) -> Tensor:
        """The weight of the te.Linear [out, in], as layers of peft have it."""
        return self.base_layer.get_parameter("weight")

    @property
    def bias(self) -> Tensor | None:
        """The bias of the te.Linear [out]; None without one."""
        return self.base_layer._parameters.get("bias")

    def layers(self) -> list[nn.Module]:
        """Return the layers of peft around NamedRows."""
        modules = [self.part[0].get_submodule(name) for name in self.names]
        return [module for module in modules if not isinstance(module, NamedRows)]

    @property
    def by_sequence(self) -> bool:
        """True if a layer of peft may need sequences [B, S, in], not tokens [N, in]; only low-rank ones never do."""
        return not all(getattr(layer, "low_rank", False) for layer in self.layers())

    def forward(self, x: Tensor, **options: object) -> Tensor:
        """Map x [..., in] to [..., out], and add the updates of the rows' adapters.

        If all adapters are low-rank and no layer has a hook, their updates are computed together. Otherwise each layer
        of peft runs, and asks its NamedRows for the rows' output. These take it from the product for x; for a layer
        that changes its input, the whole weight multiplies the changed input once more.
        """
        layers: list[Any] = self.layers()
        together = all(
            getattr(layer, "low_rank", False) and not layer._forward_pre_hooks for layer in layers
        )

        def product(x: Tensor) -> Tensor:
            return padded_product(self.base_layer, x, self.fp8_enabled(), **options)

        if together:
            for layer in layers:
                if layer.disable_adapters and layer.merged:
                    layer.unmerge()
            parts = [Part(layer, layer.get_base_layer().columns()) for layer in layers]
            return add_updates(product(x), x, parts, product, self.bias)
        base = product(x)
        out = base
        for layer in layers:
            rows = base_of(layer)
            assert isinstance(rows, NamedRows)
            columns = rows.columns()

            def run(inputs: Tensor, columns: Tensor = columns) -> Tensor:
                product_rows = base if inputs is x else product(inputs.to(x.dtype))
                return product_rows.index_select(-1, columns)

            rows.run = run
            try:
                out = out.index_copy(-1, columns, layer(x).to(out.dtype))
            finally:
                rows.run = None
        return out

    def merge(self, *args: object, **options: object) -> None:
        """Do nothing when peft calls it: the layers around NamedRows merge into the te.Linear themselves."""

    def get_base_layer(self) -> nn.Module:
        """Return the te.Linear."""
        return self.base_layer

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> nn.Module:
        """Return the te.Linear without this module, as peft asks; with `merge` the adapters become part of its rows."""
        for name in self.names:
            layer: Any = self.part[0].get_submodule(name)
            if not hasattr(layer, "merged_weight"):
                continue  # a layer of another method, which peft itself unloads
            # All rows are merged before forget_merges: each sum starts from the weight as it was before the merges.
            rows = layer.unload_and_optionally_merge_module(merge, safe_merge, adapter_names)
            parent, _, leaf = name.rpartition(".")
            self.part[0].get_submodule(parent).add_module(leaf, rows)
        forget_merges(self.base_layer)
        return self.base_layer


def base_of(layer: nn.Module) -> nn.Module:
    """Return the module inside a layer of peft, or inside several nested ones; another module itself."""
    while True:
        inside = layer._modules.get("base_layer", layer._modules.get("original_module"))
        if inside is None:
            return layer
        layer = inside


def fp8_enabled(kind: type[nn.Module]) -> Callable[[], bool]:
    """Return `is_fp8_enabled` of the engine that defines a class of modules."""
    native = not kind.__module__.startswith("te_models.engine.emulated.")
    te = engine_module("native" if native else "emulated")
    return te.FP8GlobalStateManager.is_fp8_enabled


class Holder(nn.Module):
    """A stand-in for a module of transformers that te-models lacks, such as a shared expert; it holds NamedRows."""


def show_rows(model: nn.Module, name: str, linear: str, place: Place) -> None:
    """Add the NamedRows `name` to a model, and the modules on the way to it, unless they are there.

    Args:
        model: the model.
        name: the name to give the rows.
        linear: the name of the te.Linear in the model.
        place: which of its rows.
    """
    owner = base_of(model.get_submodule(linear))
    *above, leaf = name.split(".")
    holder = model
    for step in above:
        if not hasattr(holder, step):
            holder.add_module(step, Holder())
        holder = holder.get_submodule(step)
    if hasattr(holder, leaf):
        return
    holder.add_module(leaf, NamedRows(owner, place))
    # Directly behind the te.Linear: peft draws initial values in the order of the modules.
    behind = False
    for other, module in list(holder._modules.items()):
        inside = None if module is None else base_of(module)
        if behind and not (isinstance(inside, NamedRows) and inside.linear is owner):
            holder._modules[other] = holder._modules.pop(other)
        behind = behind or inside is owner


def hide_rows(model: nn.Module) -> None:
    """Remove all NamedRows from a model without adapters."""
    shown = []
    for name, module in model.named_modules():
        if isinstance(module, (NamedRows, Holder)):
            shown.append(name)
    # From the inside out: a Holder comes before the rows that it holds.
    for name in reversed(shown):
        parent, _, leaf = name.rpartition(".")
        del model.get_submodule(parent)._modules[leaf]


def place_rows(model: nn.Module, rows: Mapping[str, Sequence[str]]) -> None:
    """Put an AdaptedRows in the place of each te.Linear whose rows have adapters.

    Args:
        model: the model.
        rows: name of a te.Linear -> names of its NamedRows with adapters.
    """
    for linear, names in rows.items():
        parent, _, leaf = linear.rpartition(".")
        holder = model.get_submodule(parent)
        module = holder.get_submodule(leaf)
        while not isinstance(module, AdaptedRows) and "base_layer" in module._modules:
            # A layer of peft for all rows: the te.Linear is inside.
            holder = module
            leaf = "base_layer"
            module = module.get_submodule(leaf)
        if not isinstance(module, AdaptedRows):
            module = AdaptedRows(module, model.get_submodule(_block_of(names[0])), ())
            holder.add_module(leaf, module)
        for name in names:
            below = name.removeprefix(f"{_block_of(name)}.")
            if below not in module.names:
                module.names = (*module.names, below)


def _block_of(name: str) -> str:
    """Return the name of the block of a linear: "layers.0" of "layers.0.mlp.shared_expert.up_proj"."""
    return ".".join(name.split(".")[:2])


def without_layers(name: str) -> str:
    """Return the name of a module or tensor as it is without layers of peft and AdaptedRows around it."""
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)
