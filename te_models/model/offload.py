"""Activation offload: what a block saves for backward is stored in host memory while later blocks run.

    compute   block 0 | block 1   | block 2   | block 3   | head, loss | block 3     | block 2     | block 1 ...
    copies            | 0 to host | 1 to host | 2 to host |            | 2 to device | 1 to device | 0 to device

Two blocks' worth is on the device at a time: a block's tensors are copied to the host when it finishes, their device
memory is freed when the next block finishes, and they are copied back while the block above runs backward. The last
block's tensors stay, since they would be needed again at once. Where the copies take longer than the computation, the
computation waits: memory is bounded, time is not.

The storages to move are chosen when the block finishes: only then is it known which FP8 copies of weights are cached
for the next micro-batch. Storages that something else uses (parameters, those copies, rotary tables, masks) stay, since
moving them would free nothing. A storage that several nodes saved, or saved views of, is moved once.

It relies only on PyTorch's hooks for saved tensors, and like activation checkpointing it belongs to a forward pass:
passes may be abandoned, or run backward in any order. Transformer Engine's own get_cpu_offload_context (2.20) counts
layers over all forwards, so that the next forward drops what an earlier one still needs, and leaves views such as q, k,
v on the device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from te_models.distributed.dtensor import local
from te_models.kernels.early_save import unchanged

# Storages up to this size stay: PyTorch's CUDA allocator serves them from segments that small tensors share, so
# moving one frees no room for a large one, and its copy would take longer to launch than to run.
SMALL = 2**20
# Bytes of a page of host memory; a power of two, to which PyTorch's allocator of pinned memory rounds up.
PAGE = 2**24
ALIGNMENT = 512  # of a storage's place in the pages, as of CUDA's allocations


class HostMemory:
    """Pages of host memory, pinned where they serve a GPU, and the stream of the copies to and from them.

    Pages are lent to blocks and reused when they come back, so that after the first step none is allocated, whatever
    the shapes: `pages` of PAGE bytes is the largest number ever in use at a time. A copy of this object starts with
    none.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.stream: torch.cuda.Stream | None = None
        self.free: list[Tensor] = []
        self.pages = 0

    def __reduce__(self) -> tuple[type[HostMemory], tuple[()]]:
        return HostMemory, ()

    def serve(self, device: torch.device) -> None:
        """Serve tensors on `device` from now on."""
        if device != self.device:
            self.device = device
            self.free = []
            self.pages = 0
            # A stream of its own: copies over the bus and GEMMs then run at the same time.
            self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def lend(self, size: int) -> list[Tensor]:
        """Return pages, uint8 [PAGE] each, for `size` bytes."""
        # Pages of one size, so that any free one serves any block, and memory does not fragment.
        while len(self.free) * PAGE < size:
            try:
                self.free.append(
                    torch.empty(PAGE, dtype=torch.uint8, pin_memory=self.stream is not None)
                )
            except RuntimeError as error:
                raise RuntimeError(
                    f"activation_offload: the host gives no more memory, {self.pages * PAGE / 2**30:.1f} GiB are in "
                    "use: use activation_checkpointing='full', or fewer tokens per micro-batch"
                ) from error
            self.pages += 1
        return [self.free.pop() for _ in range(-(-size // PAGE))]

    def take_back(self, pages: list[Tensor], device: torch.device) -> None:
        """End `lend`. Copies from or to the pages may still run: later ones follow them in the same stream."""
        # Pages of another device are not pinned for this one; they are left to the garbage collector.
        if device == self.device:
            self.free += pages

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Inside, run copies in parallel with the computation, but after all of it so far."""
        with torch.no_grad():
            if self.stream is None:
                yield
                return
            # The tensors to copy, or the memory to copy into, are ready once the computation gets here.
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                yield

    def mark(self) -> torch.Event | None:
        """Return an event after all copies so far; None: they have finished."""
        return None if self.stream is None else self.stream.record_event()


class _Storage:
    """The bytes of one storage, on the device or on the host.

    Args:
        block: the block that saved tensors in it; it has the pages on the host.
        start: the storage's first byte in those pages, as if they followed each other.
        content: the bytes on the device, uint8 [size]; later None, while they are on the host alone.
    """

    def __init__(self, block: _Block, start: int, content: Tensor) -> None:
        self.block = block
        self.start = start
        self.size = len(content)
        self.content: Tensor | None = content

    def __del__(self) -> None:
        self.block.wait()  # else its memory could be reused while a copy still writes to it

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (bytes on the host, bytes on the device) of each part of the storage that lies within one page."""
        assert self.content is not None
        done = 0  # bytes
        while done < self.size:
            page, offset = divmod(self.start + done, PAGE)
            piece = self.block.pages[page][offset : offset + self.size - done]
            yield piece, self.content[done : done + len(piece)]
            done += len(piece)


class _Layout(NamedTuple):
    """A tensor's place in its storage: the offset and the strides are in elements."""

    dtype: torch.dtype
    offset: int | torch.SymInt
    shape: torch.Size
    strides: tuple[int, ...]


class _SavedTensor:
    """The object that autograd saves in place of a tensor of a block.

    It has either the tensor, or the storage of a tensor that has left the device, with the layout of the tensor in it.
    """

    def __init__(self, block: _Block, tensor: Tensor) -> None:
        self.block = block
        self.version = tensor._version
        # Without its graph: autograd references this object, so a node that saved its own output would never be freed.
        self.tensor: Tensor | None = tensor if tensor.is_leaf else tensor.detach()
        self.storage: _Storage | None = None
        self.layout: _Layout | None = None

    def refer_to(self, storage: _Storage) -> None:
        """Keep the storage, which may leave the device, in place of the tensor."""
        assert self.tensor is not None
        tensor = unchanged(self.tensor, self.version)
        self.layout = _Layout(
            dtype=tensor.dtype,
            offset=tensor.storage_offset(),
            shape=tensor.shape,
            strides=tensor.stride(),
        )
        self.storage = storage
        self.tensor = None

    def unpack(self) -> Tensor:
        """Return the tensor as it was saved, on the device."""
        self.block.fetch()
        if self.tensor is not None:
            return unchanged(self.tensor, self.version)
        assert self.storage is not None and self.storage.content is not None
        assert self.layout is not None
        content = self.storage.content
        layout = self.layout
        tensor = torch.empty(0, dtype=layout.dtype, device=content.device)
        return tensor.set_(content.untyped_storage(), layout.offset, layout.shape, layout.strides)


class _Block:
    """The tensors that one block saves in one forward pass. It lives as long as autograd references one of them."""

    def __init__(self, memory: HostMemory, below: _Block | None) -> None:
        self.memory = memory
        self.device = memory.device
        # Weak: a pass that is abandoned halfway frees its blocks without a cycle collection.
        self.below = None if below is None else weakref.ref(below)
        self.storages: list[weakref.ref[_Storage]] = []
        self.pages: list[Tensor] = []
        self.event: torch.Event | None = None

    def __del__(self) -> None:
        self.memory.take_back(self.pages, self.device)

    def move(self, packed: list[_SavedTensor], stay: set[int]) -> None:
        """Start to copy the saved tensors to the host, except small storages and those at the addresses `stay`."""
        storages: dict[int, _Storage] = {}  # by address
        size = 0  # bytes on the host, of all storages so far
        for saved in packed:
            tensor = saved.tensor
            if (
                type(tensor) is not Tensor
                or tensor.layout is not torch.strided
                or tensor.device != self.device
            ):
                continue  # a subclass keeps its data elsewhere: FP8 weights, pieces of FSDP
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            nbytes = storage.nbytes()
            # By storage, not by tensor: views such as q, k and v of one projection move together, once.
            if nbytes <= SMALL or address in stay:
                continue
            if address not in storages:
                content = torch.empty(0, dtype=torch.uint8, device=self.device)
                content = content.set_(storage)
                storages[address] = _Storage(self, size, content)
                size += -(-nbytes // ALIGNMENT) * ALIGNMENT
            saved.refer_to(storages[address])
        self.pages = self.memory.lend(size)
        self.storages = [weakref.ref(storage) for storage in storages.values()]
        with self.memory.copying():
            for storage in storages.values():
                for on_host, on_device in storage.pieces():
                    on_host.copy_(on_device, non_blocking=True)
        self.event = self.memory.mark() if storages else None

    def release(self) -> None:
        """Free the device memory, after the copies to the host."""
        self.wait()
        for storage in self._alive():
            # The last reference, if autograd has none of its own: the allocator has the memory back.
            storage.content = None

    def fetch(self) -> None:
        """Bring everything that is still needed back to the device, and start to copy the block below."""
        self._load()
        self.wait()
        if self.below is not None and (below := self.below()) is not None:
            below._load()

    def _load(self) -> None:
        """Start to copy to the device the storages that are on the host alone and that backward still needs."""
        missing = [storage for storage in self._alive() if storage.content is None]
        if not missing:
            return
        # Allocated on the computation's stream, so free for copies once that stream gets here.
        for storage in missing:
            storage.content = torch.empty(storage.size, dtype=torch.uint8, device=self.device)
        with self.memory.copying():
            for storage in missing:
                for on_host, on_device in storage.pieces():
                    on_device.copy_(on_host, non_blocking=True)
        self.event = self.memory.mark()

    def wait(self) -> None:
        """Make the computation wait for the copies that this block has started."""
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)
            self.event = None

    def _alive(self) -> list[_Storage]:
        """Return the storages of which autograd still has a tensor."""
        alive = []
        for reference in self.storages:
            storage = reference()
            if storage is not None:
                alive.append(storage)
        return alive


class Offload:
    """The activation offload of one forward pass through `blocks` blocks, into `memory`."""

    def __init__(self, memory: HostMemory, blocks: int, device: torch.device) -> None:
        memory.serve(device)
        self.memory = memory
        self.last = blocks - 1
        self.below: _Block | None = None

    @contextlib.contextmanager
    def block(self, layer: int, module: nn.Module, arguments: object) -> Iterator[None]:
        """Offload what block number `layer` saves inside; all blocks use the tensors in their `arguments`."""
        block = _Block(self.memory, self.below)
        packed: list[_SavedTensor] = []

        def pack(tensor: Tensor) -> _SavedTensor:
            saved = _SavedTensor(block, tensor)
            packed.append(saved)
            return saved

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _SavedTensor.unpack):
                yield
            if layer < self.last:
                block.move(packed, _addresses(module, arguments))
        finally:
            packed.clear()  # autograd references `pack` as long as anything that it packed
        if self.below is not None:
            self.below.release()
        self.below = block


@torch.no_grad()
def _addresses(module: nn.Module, arguments: object) -> set[int]:
    """Return the addresses of storages that outlive the block's: parameters, FP8 weights kept between micro-batches."""
    tensors: list[Any] = [*module.parameters(), *module.buffers()]
    tensors += [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    for child in module.modules():
        # The te layers of either engine have such attributes.
        workspaces: Any = getattr(child, "_fp8_workspaces", {})
        tensors += workspaces.values()
    addresses = set()
    for tensor in tensors:
        # A quantized tensor consists of several, some of which may be None.
        parts = tensor.get_data_tensors() if hasattr(tensor, "get_data_tensors") else (tensor,)
        for part in parts:
            if part is not None:
                addresses.add(local(part).untyped_storage().data_ptr())
    return addresses
