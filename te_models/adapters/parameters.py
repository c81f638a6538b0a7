"""Weights of experts and routers as the parameters of transformers that peft's `target_parameters` name.

The experts of a layer are two parameters of `mlp.experts` in transformers, and a router's weight is one of `mlp.gate`.
peft puts a ParamWrapper around such a module for each of its parameters. Here it finds them in a module beside the te
modules (`Shown`), which has the values but no parameters; the te modules add the updates themselves (`AdaptedWeight`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from te_models.adapters.low_rank import Part, add_expert_updates, add_updates
from te_models.distributed.dtensor import whole
from te_models.fp8.primary_weights import plain, write_weight
from te_models.interop.tensor_places import Place
from te_models.kernels.groups import Groups


class Values(Tensor):
    """A copy of values that lie elsewhere, where an in-place operation on it, or on a view of it, writes them too.

    Attributes:
        whole: the copy as a plain tensor, the same memory.
        write: stores the whole copy there.
    """

    whole: Tensor
    write: Callable[[Tensor], None]

    @classmethod
    def of(
        cls, whole: Tensor, write: Callable[[Tensor], None], part: Tensor | None = None
    ) -> Values:
        """Return `part` of the copy, a view; None: all of it."""
        values = (whole if part is None else part).as_subclass(cls)
        values.whole = whole
        values.write = write
        return values

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation as on a plain tensor, and write the values if it has changed them."""
        sources = [arg for arg in args if isinstance(arg, Values)]
        # The version of a tensor counts the operations that changed it in place, views included.
        before = [source.whole._version for source in sources]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        for source, version in zip(sources, before, strict=True):
            if source.whole._version != version:
                source.write(source.whole)
        if not isinstance(result, Tensor) or any(result is source for source in sources):
            return result
        for source in sources:
            if _same_memory(result, source.whole):
                return cls.of(source.whole, source.write, result)
        return result.as_subclass(Tensor) if isinstance(result, Values) else result


class Alias(Tensor):
    """A stand-in for values that other tensors have: `data` reads them, and writing to it, as merges do, writes them.

    It has the shape, dtype and device of `like`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[bad-override]  # as nn.Parameter's

    def __new__(
        cls, like: Tensor, read: Callable[[], Tensor], write: Callable[[Tensor], None]
    ) -> Alias:
        return torch.Tensor._make_subclass(cls, like)

    def __init__(
        self, like: Tensor, read: Callable[[], Tensor], write: Callable[[Tensor], None]
    ) -> None:
        self.read = read
        self.write = write

    @property
    def data(self) -> Tensor:  # type: ignore[bad-override]  # an attribute of Tensor
        return Values.of(self.read(), self.write)

    @data.setter
    def data(self, values: Tensor) -> None:
        self.write(values)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@torch.no_grad()
def write_rows(owner: nn.Module, name: str, place: Place, values: Tensor) -> None:
    """Write the rows of a weight of `owner` that `place` describes."""
    weight = owner.get_parameter(name)
    full = whole(plain(weight)).clone()
    place.load(full, values.as_subclass(Tensor))
    write_weight(weight, full, for_master=False)


@dataclass(frozen=True)
class Stack:
    """A parameter of transformers: the weights [E, out, in] of the E experts of `owner`, or its one weight [out, in].

    Attributes:
        owner: our te module, or router.
        place: the rows of our weights that hold the parameter.
        experts: E; 0: the parameter is one weight.
        transposed: the parameter is [E, in, out].
        swapped: it is transposed, but peft does not know that, and takes inputs for outputs.
    """

    owner: nn.Module
    place: Place
    experts: int = 0
    transposed: bool = False
    swapped: bool = False

    @property
    def names(self) -> list[str]:
        """The names of our weights."""
        return [f"weight{expert}" for expert in range(self.experts)] or ["weight"]

    def alias(self) -> Alias:
        """Return a tensor of the shape of the parameter, which takes no memory before its values are read."""
        weight = self.owner.get_parameter(self.names[0])
        out, inputs = self.place.shape
        shape = (inputs, out) if self.transposed else (out, inputs)
        whole = (self.experts, *shape) if self.experts else shape
        like = torch.empty((), dtype=weight.dtype, device=weight.device).expand(whole)
        return Alias(like, self.read, self.write)

    def read(self) -> Tensor:
        """Return the values."""
        parts = [self.place.save(plain(self.owner.get_parameter(name))) for name in self.names]
        values = torch.stack(parts) if self.experts else parts[0].clone()
        return values.mT.contiguous() if self.transposed else values

    def write(self, values: Tensor) -> None:
        """Take new values."""
        for name, part in zip(self.names, values if self.experts else [values], strict=True):
            write_rows(self.owner, name, self.place, part.mT if self.transposed else part)

    def columns(self) -> Tensor | None:
        """Return which outputs of our weight the rows make, int64 [rows]; None: all of them in order."""
        rows = self.place.shape[0]
        if self.place == Place.whole(self.place.name, self.place.shape):
            return None
        device = self.owner.get_parameter(self.names[0]).device
        return self.place.save(torch.arange(rows, device=device))


class Listing(nn.Module):
    """A module that lists parameters of transformers that it does not have itself: they are weights of other modules.

    peft looks for them as it walks through a model. To `fully_shard`, which goes from module to module, they would be
    parameters to divide.
    """

    # Set by TEModelsForCausalLM.named_modules while it yields the module.
    listed = False

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield stand-ins for the parameters while the module is listed; a module around it never counts them."""
        if self.listed:
            for name, alias in self.aliases():
                yield f"{prefix}.{name}".removeprefix("."), cast(nn.Parameter, alias)

    def aliases(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each parameter and its stand-in."""
        raise NotImplementedError


@contextlib.contextmanager
def listed(module: nn.Module) -> Iterator[None]:
    """Let a module, if it is a Listing, list its parameters inside."""
    if not isinstance(module, Listing):
        yield
        return
    before = module.listed
    module.listed = True
    try:
        yield
    finally:
        module.listed = before


class Shown(Listing):
    """A module of transformers whose parameters are weights of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks: dict[str, Stack] = {}
        self.is_transposed = False  # read by peft

    def show(self, name: str, stack: Stack) -> None:
        """Add a parameter."""
        self.stacks[name] = stack
        self.is_transposed = stack.transposed and not stack.swapped

    def aliases(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and an alias of each parameter."""
        for name, stack in self.stacks.items():
            yield name, stack.alias()

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        stack = self.__dict__.get("stacks", {}).get(name)
        return super().__getattr__(name) if stack is None else stack.alias()


class AdaptedWeight(nn.Module):
    """A te.GroupedLinear, or a router, with the updates of the ParamWrappers around a `Shown`.

    That is the child `holder` of the module `part`, for the parameter `name`.
    """

    def __init__(self, base_layer: nn.Module, part: nn.Module, holder: str, name: str) -> None:
        nn.Module.__init__(self)
        self.base_layer = base_layer
        # The tuple hides `part` from nn.Module: as a child it would contain itself.
        self.part = (part,)
        self.holder = holder
        self.name = name

    def forward(
        self,
        x: Tensor,
        *rows: list[int] | Groups,
        run: Callable[..., Tensor] | None = None,
        **options: object,
    ) -> Tensor:
        """Map x [R, in] to [R, out]; `rows` counts the rows of each expert, and `run` computes base_layer's forward."""
        # Before the product: adapters that are merged and switched off leave the weight here.
        parts = self._parts()

        def base(x: Tensor) -> Tensor:
            if run is None:
                return self.base_layer(x, *rows, **options)
            return run(self.base_layer, x, *rows, **options)

        if rows:
            experts: Any = self.base_layer.num_gemms
            return add_expert_updates(base(x), x, parts, experts, rows[0])
        return add_updates(base(x), x, parts, base, bias=None)

    def _parts(self) -> list[Part]:
        """Return the layers of peft around the parameter."""
        layers: list[Any] = []
        holder: Any = self.part[0].get_submodule(self.holder)
        # ParamWrappers lie around each other, one per parameter; `Shown` is innermost.
        while not isinstance(holder, Shown):
            if holder.parameter_name == self.name:
                layers.append(holder)
            holder = holder.get_submodule("base_layer")
        for layer in layers:
            if layer.disable_adapters and layer.merged:
                layer.unmerge()
        stack = holder.stacks[self.name]
        columns = stack.columns()
        return [Part(layer, columns, stack.swapped) for layer in layers]

    def unload_and_optionally_merge_module(self, **options: object) -> nn.Module:
        """Return the te module, into which peft merges the adapters of its parameters; peft calls it."""
        return self.base_layer
