"""The parts of a block as modules: the interface between a block and its mixer and MLP, of whatever kind.

Shapes: B batch, S sequence, N = B*S tokens padded up to the recipe's alignment, D hidden_size.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from te_models.config.layer import FeedforwardSpec, MixerSpec, PartSpec
from te_models.errors import OutOfMemory
from te_models.kernels.decode import StepNorm
from te_models.model.forward_context import ForwardContext
from te_models.model.kv_cache import RecurrentState, State, slots_for
from te_models.model.te_modules import Factory

Spec = TypeVar("Spec", bound=PartSpec)


class BlockPart(nn.Module, ABC, Generic[Spec]):
    """A mixer or an MLP: this rank's share, as `spec` describes it, in block number `layer`.

    Its modules, which `factory` makes, have the names that its description gives them.
    """

    # The name of the te.Linear that alone reads the part's input, which may therefore be FP8; None: several read it.
    entry: ClassVar[str | None]
    # True if its te.Linears and vectors belong to parts inside it, which are modules of this kind too.
    holds_parts: ClassVar[bool] = False

    def __init__(self, spec: Spec, layer: int, factory: Factory) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.tp = factory.tp
        self.gain = factory.gain

    def remark(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return a remark for `plan` on the kernels that it runs there on activations of `dtype`; "" for none."""
        return ""

    def step(
        self, norm: StepNorm, x: Tensor, context: ForwardContext, factor: float
    ) -> Tensor | None:
        """Return x + factor * part(norm(x)) [N, D] for one new token per row, by the kernels of `context.step`.

        None where they do not compute this part, whose modules then run.
        """
        return None

    def initialize(self, name: str, values: Tensor, std: float, residual_std: float) -> None:
        """Set the initial values of the parameter `name` of this part.

        Args:
            name: such as "o_proj.weight".
            values: the whole parameter, also under tensor parallelism.
            std: the standard deviation of a projection's weight.
            residual_std: the standard deviation of a projection into the residual stream.
        """
        module, _, kind = name.rpartition(".")
        linear = {linear.name: linear for linear in self.spec.linears}.get(module)
        if kind.startswith("bias"):  # of an expert: bias<e>
            values.zero_()
        elif linear is None:
            values.fill_(self.gain)
        else:
            values.normal_(0.0, residual_std if linear.residual else std)


class Mixer(BlockPart[Spec]):
    """The part of a block that mixes tokens."""

    @abstractmethod
    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return its contribution to the residual stream [N, D], given its input x [N, D]."""

    @abstractmethod
    def new_state(self, batch: int, slots: int, device: torch.device, dtype: torch.dtype) -> State:
        """Return its state while decoding `batch` rows of up to `slots` tokens, in the model's `dtype`."""

    def stored_state(
        self, context: ForwardContext, like: Tensor
    ) -> tuple[RecurrentState | None, Mapping[str, Tensor]]:
        """Return the recurrent state that the cache has for this layer, and its tensors by name.

        Without a cache, and in a pass that stores nothing, they are None and empty. A new state has the device and
        dtype of `like`.
        """
        if context.cache is None:
            return None, {}

        def make() -> RecurrentState:
            state = self.new_state(context.batch, 0, like.device, like.dtype)
            assert isinstance(state, RecurrentState)
            return state

        # transformers' caches make their layers when they are first used, hence a function and not a state.
        state = context.cache.recurrent(self.layer, make)
        return state, {} if state is None else state.read()


class Feedforward(BlockPart[Spec]):
    """The part of a block that treats each token by itself; recompute may drop the tensors between its halves."""

    def hidden_with_residual(self, x: Tensor, residual: Tensor, context: ForwardContext) -> Any:
        """Return `hidden` of x; a part with norms of its own reads `residual` [N, D], x before the block's norm."""
        return self.hidden(x, context)

    @abstractmethod
    def hidden(self, x: Tensor, context: ForwardContext) -> Any:
        """Return the argument of `output`, such as the input of the last projection [N, F], from x [N, D]."""

    @abstractmethod
    def output(self, hidden: Any, context: ForwardContext) -> Tensor:
        """Return its contribution to the residual stream [N, D]."""

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return its contribution to the residual stream [N, D], given its input x [N, D]."""
        return self.output(self.hidden(x, context), context)


# The module of each kind of description; te_models.model.parts fills them.
MIXERS: dict[type[MixerSpec], type[Mixer]] = {}
MLPS: dict[type[FeedforwardSpec], type[Feedforward]] = {}


def new_states(
    mixers: Sequence[Mixer | None],
    batch: int,
    max_length: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[State]:
    """Return the states of the mixers of all layers for `batch` rows of up to `max_length` tokens.

    A layer without a mixer has an empty one.
    """
    slots = slots_for(max_length)
    try:
        states: list[State] = []
        for mixer in mixers:
            if mixer is None:
                states.append(RecurrentState())
            else:
                states.append(mixer.new_state(batch, slots, device, dtype))
        return states
    except torch.OutOfMemoryError:
        taken = 0
        for mixer in mixers:
            if mixer is not None:
                taken += mixer.spec.state_bytes(batch, slots, dtype.itemsize)
        size = taken / 2**30
        raise OutOfMemory(
            f"a KV cache for {batch} rows of {max_length} positions takes {size:.2f} GiB, which {device} does not have "
            "free: lower the batch or max_new_tokens"
        ) from None
