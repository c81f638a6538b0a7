"""Keep the buffers, the cache and the CUDA graphs of a generation for the next one of the same shape.

A graph reads and writes tensors at fixed addresses: it may be used as long as the model's are where they were, and as
long as nothing else decides what a pass computes.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from te_models.device.captured_call import CapturedCall
from te_models.device.hooks import has_hooks_on_all_modules, is_untouched
from te_models.fp8.primary_weights import is_quantized
from te_models.generation.sampling import Sampling
from te_models.kernels.dispatch import Kernels
from te_models.model.decoder import Decoder

# The longest prompt that is captured, in tokens of all rows. Beyond it the device needs longer than the host does to
# launch the kernels, and the graph would keep gibibytes for its activations.
CAPTURED_PROMPT = 4096
# How many states are kept between generations, and the share of the device's memory for their caches.
MOST_KEPT = 4
KEPT_SHARE = 1 / 32
# Packages whose modules compute the same in every pass of the same shape, unless there is a hook on them.
KNOWN_PACKAGES = ("te_models", "torch", "transformer_engine")

Places = list[tuple[int, torch.Size]]

log = logging.getLogger(__name__)


class Shape(NamedTuple):
    """The sizes and settings of a generation: two with equal ones run the same kernels on the same tensors."""

    batch: int
    length: int  # of the prompt
    count: int  # of new tokens
    sampling: Sampling
    kernels: Kernels
    process: tuple[object, ...]  # settings of the process that choose kernels


def shape_of(model: Decoder, ids: Tensor, count: int, sampling: Sampling) -> Shape:
    """Return the shape of a generation of `count` tokens after a prompt, ids [B, S]."""
    device = ids.device.type
    process = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        # PyTorch refuses to show allow_tf32 to a program that has set this one.
        torch.backends.cuda.matmul.fp32_precision,
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
    )
    return Shape(
        batch=ids.shape[0],
        length=ids.shape[1],
        count=count,
        sampling=sampling,
        kernels=model.kernels,
        process=process,
    )


class DecodeState:
    """The tensors of generations of one shape, and the graphs that read and write them.

    It refers to no model, which it would keep alive.

    Args:
        model: the decoder.
        shape: of the generations.
        places: of the model's tensors, by `fixed_places`; None: the state serves one generation.

    Attributes:
        ids: int64 [B, S], the prompt.
        last_token: int64 [B, 1], the input of the next step.
        generated: int64 [count, B], all tokens so far; later rows hold anything.
        done: int64 [1], number of steps so far, on the device. A step writes the row of `generated` with this number,
            which is a tensor, so that a replayed graph writes the next row.
        host: int64 [count, B], a copy of `generated` on the host.
        events: one per launched step, after which its row is in `host`; only on a GPU.
        prompt, step: their graphs; None: they run eagerly.
        is_warm: whether a step has run on the stream of the graphs.
        generations: how many began with this state.
    """

    def __init__(self, model: Decoder, shape: Shape, places: Places | None = None) -> None:
        device = model.device
        self.shape = shape
        self.places = places
        self.generator = torch.Generator(device=device)
        self.cache = model.new_cache(shape.batch, shape.length + shape.count)
        log.info("%r", self.cache)
        integers: Any = dict(dtype=torch.long, device=device)
        self.ids = torch.zeros(shape.batch, shape.length, **integers)
        self.last_token = torch.zeros(shape.batch, 1, **integers)
        self.generated = torch.zeros(shape.count, shape.batch, **integers)
        self.done = torch.zeros(1, **integers)
        self.host = self.generated
        if device.type == "cuda":
            # Pinned: a copy to other memory would wait for the device.
            self.host = torch.empty(shape.count, shape.batch, dtype=torch.long, pin_memory=True)
        self.events: list[Any] = []
        self.is_warm = False
        self.generations = 0
        self.prompt: CapturedCall | None = None
        self.step: CapturedCall | None = None

    def add_graphs(self, stream: Any, pool: Any) -> None:
        """Have steps captured on this stream, and in later generations the prompt; `pool` is the graphs' memory."""
        self.step = CapturedCall("generation", stream, pool, self.generator)
        if self.shape.batch * self.shape.length <= CAPTURED_PROMPT:
            name = "the prompt of a generation"
            self.prompt = CapturedCall(name, stream, pool, self.generator)

    def begin(self, ids: Tensor, seed: int | None) -> None:
        """Take the prompt of a new generation, and the seed of its random numbers."""
        if self.events:
            # The last generation may have ended with a step under way, in another stream.
            torch.cuda.current_stream(ids.device).wait_event(self.events[-1])
            self.events.clear()
        self.generations += 1
        self.ids.copy_(ids)
        if seed is not None:
            self.generator.manual_seed(seed)

    def clear(self) -> None:
        """Forget the tokens of the generation before. Part of a captured prompt."""
        self.cache.clear()
        self.done.zero_()


class DecodeStates:
    """The states of a model's latest generations with graphs.

    All graphs run on one stream, one after the other, and leave no result in their memory, which they share.
    """

    def __init__(self, device: torch.device) -> None:
        self.states: list[DecodeState] = []  # the latest last
        self.stream: Any = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.room = KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory

    def state_for(self, model: Decoder, shape: Shape) -> DecodeState:
        """Return the state that a generation of this shape has left, or a new one, and keep it for the next.

        The caller makes sure that the quantized weights are still the model's (te_models.fp8.kept_weights).
        """
        places = fixed_places(model)
        fitting = [state for state in self.states if places is not None and state.places == places]
        found = next((state for state in fitting if state.shape == shape), None)
        # Before a new one needs memory.
        self.states = [state for state in fitting if state is not found]
        if found is None:
            found = DecodeState(model, shape, places)
            found.add_graphs(self.stream, self.pool)
        if places is not None:
            self.states.append(found)
        self._drop_oldest()
        return found

    def _drop_oldest(self) -> None:
        """Drop states until there are no more than may be kept, and their caches no larger."""
        while len(self.states) > MOST_KEPT or self.nbytes > self.room:
            del self.states[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(state.cache.nbytes for state in self.states)


def fixed_places(model: Decoder) -> Places | None:
    """Return address and shape of every parameter and buffer; None where a graph does not repeat a pass of the model.

    A hook would run in the first generations only, and a module of another package, such as an adapter that may be
    switched off, may compute something else without a trace.
    """
    if has_hooks_on_all_modules():
        return None
    places = []
    for module in model.modules():
        if not _is_known(type(module)) or not is_untouched(module):
            return None
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                # Weights in FP8 are among those that te_models.fp8.kept_weights compares.
                if tensor is not None and not is_quantized(tensor):
                    places.append((tensor.data_ptr(), tensor.shape))
    return places


@functools.cache
def _is_known(kind: type[nn.Module]) -> bool:
    """Return whether a class of modules and all that it inherits from are of KNOWN_PACKAGES."""
    # Layers of adapters are of this package, and inherit from peft's what switches them.
    classes = [base for base in kind.__mro__ if issubclass(base, nn.Module)]
    packages = {base.__module__.partition(".")[0] for base in classes}
    return packages <= set(KNOWN_PACKAGES)
