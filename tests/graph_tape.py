"""A CUDA graph on the CPU: records the operations of a captured region and replays them on the same tensors.

Like the real one it bakes in every Python value, writes results where they were at capture, runs nothing of the host
program on replay, and refuses what a capture refuses: asking for a value, shapes that depend on data, and constants
from the host's memory. What the recording itself changed is undone, since a capture executes nothing.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from te_models.model.targets import shifted
from te_models.numerics import casts
from te_models.numerics.formats import TORCH_FP8

FORBIDDEN = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# What these hold is garbage until it is written to.
UNWRITTEN = ("empty", "new_empty", "empty_like")


class Tape(TorchDispatchMode):
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.generators = [torch.default_generator]
        self.replays = 0
        self._before: dict[Any, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if any(tag in func.tags for tag in FORBIDDEN) or name in ("lift_fresh", "lift_fresh_copy"):
            raise RuntimeError(
                f"{func} waits for the device or the host: not possible in a CUDA graph"
            )
        for generator in tree_leaves(kwargs):
            if isinstance(generator, torch.Generator):
                known = [
                    known.initial_seed() for known in self.generators
                ]  # torch wraps a generator anew each time
                assert generator.initial_seed() in known, "a generator that the graph does not know"
        for tensor in mutated(func, args, kwargs):
            key = (tensor.data_ptr(), tensor.shape, tensor.stride())
            self._before.setdefault(key, (tensor, tensor.clone()))
        result = func(*args, **kwargs)
        self.calls.append(
            (func, args, kwargs, [t for t in tree_leaves(result) if isinstance(t, Tensor)])
        )
        return result

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def pool(self) -> None:
        """Results stay where they are, so tapes share no memory."""

    def reset(self) -> None:
        self.calls.clear()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        states = [generator.get_state() for generator in self.generators]
        try:
            with self:
                yield
        finally:
            # Of views that overlap, the first one's value is the oldest.
            for tensor, value in reversed(self._before.values()):
                tensor.copy_(value)
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)

    def replay(self) -> None:
        with (
            torch._C._AutoDispatchBelowAutograd()
        ):  # what was recorded lies below it, backward included
            self._replay()

    def _replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, results in self.calls:
            name = func.overloadpacket.__name__
            if name in UNWRITTEN:
                continue
            now = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for old, new in zip(results, now, strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def pretend_cuda(patch: Any) -> list[Tape]:
    """Let te_models.device.captured_call and te_models.training.cuda_graph capture on the CPU:
    `patch` is pytest's monkeypatch; returns the tapes that are made."""
    tapes: list[Tape] = []

    def graph() -> Tape:
        tapes.append(Tape())
        return tapes[-1]

    class Stream:
        device = None

        def __init__(self, *device: Any) -> None: ...

        def wait_stream(self, other: Any) -> None: ...

    patch.setattr("torch.cuda.CUDAGraph", graph)
    patch.setattr("torch.cuda.Stream", Stream)
    patch.setattr("torch.cuda.graph_pool_handle", lambda: None)
    patch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=2**35)
    )
    patch.setattr("torch.cuda.current_stream", Stream)
    patch.setattr("torch.cuda.stream", lambda stream: contextlib.nullcontext())
    for module in ("device.captured_call", "training.cuda_graph"):
        patch.setattr(
            f"te_models.{module}.capture",
            lambda tape, stream, *generators, pool=None: tape.capture(),
        )
    # On a processor labels are checked at once, on a GPU without waiting for it.
    patch.setattr(
        "te_models.model.decoder.next_token_targets",
        lambda labels, mask, size, documents: (shifted(labels, mask, documents).flatten(), None),
    )
    patch.setattr(
        "te_models.model.inputs.invalid_token", lambda ids, size: None
    )  # ids are checked likewise
    # On a processor the emulated engine looks for NaN before it decodes; this is what it does on a GPU.
    patch.setattr(casts, "decode_fp8", lambda codes, dtype: codes.view(TORCH_FP8[dtype]).float())
    patch.setattr(
        "te_models.generation.generate._with_graph",
        lambda model, settings: settings.cuda_graph is True,
    )
    return tapes
