"""The decoder block, built only from te.Linear and te.RMSNorm, or te.LayerNorm without its bias.

`te` is an engine (te_models.engine): Transformer Engine or its emulation; the code of all layers is the same for both.

Shapes: B batch, S sequence, N = B*S tokens padded up to the recipe's alignment, D hidden_size, A attention heads,
K key/value heads, H head_dim, F intermediate_size.

Activations are [N, D], tokens padded with rows of zeros. A row of zeros remains one through every layer here (attention
discards the bias on q, k, v, and after any other bias the row is set to zero again), and so do its gradients, hence
padding changes no amax, no scale and no weight gradient. The padding inside a batch of unequal prompts is kept at zero
in the same way.
"""

from typing import cast

from torch import Tensor, nn

from te_models.config.layer import LayerSpec
from te_models.config.layer_inputs import LayerInputSpec
from te_models.device.hooks import is_untouched
from te_models.model.forward_context import ForwardContext
from te_models.model.layer_inputs import LayerInput
from te_models.model.part import BlockPart, Feedforward, Mixer
from te_models.model.parts import MIXERS, MLPS
from te_models.model.te_modules import Factory


class Block(nn.Module):
    """A decoder block, which joins a mixer (such as attention) and an MLP of any kind::

        x -+- RMSNorm - mixer -+-> + -+- RMSNorm - MLP -+-> +
           +-------------------+      +-----------------+

    A third part may read an input of the layer after the MLP (te_models.model.layer_inputs), and add to the residual
    stream. A block may have one of the first two alone. With `norm_position` "post" each RMSNorm comes after instead,
    under other names; with "both" there are all four. With `parallel_residual` mixer and MLP are side by side::

        x -+- norm -+- mixer -+-> + -> +
           |        +--- MLP -|-------'
           +------------------+

    Args:
        spec: the description of this rank's share.
        layer: the number of the block.
        factory: makes its te.Linears and norms.
        residual_multiplier: factor on what each part adds to the residual stream.
    """

    def __init__(
        self, spec: LayerSpec, layer: int, factory: Factory, residual_multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.tp = factory.tp
        self.residual_multiplier = residual_multiplier
        self.gain = factory.gain
        self.fp8_enabled = factory.te.FP8GlobalStateManager.is_fp8_enabled
        width = spec.hidden_size
        before = spec.norm_position != "post"
        after = spec.norm_position != "pre"

        mixer = spec.mixer
        mlp = spec.mlp
        post_eps = spec.post_norm_eps
        self.input_layernorm = factory.residual_norm(width) if before and mixer else None
        if mixer is not None:
            inside = factory.inside(f"layers.{layer}.{mixer.name}.")
            self.add_module(mixer.name, MIXERS[type(mixer)](mixer, layer, inside))
        self.attention_output_norm = (
            factory.residual_norm(width, eps=post_eps) if after and mixer else None
        )
        mlp_has_norm = before and mlp is not None and not spec.side_by_side
        self.post_attention_layernorm = factory.residual_norm(width) if mlp_has_norm else None
        if mlp is not None:
            inside = factory.inside(f"layers.{layer}.{mlp.name}.")
            self.add_module(mlp.name, MLPS[type(mlp)](mlp, layer, inside))
        self.mlp_output_norm = factory.residual_norm(width, eps=post_eps) if after and mlp else None
        if spec.input is not None:
            inside = factory.inside(f"layers.{layer}.{spec.input.name}.")
            self.add_module(
                spec.input.name, LayerInput(cast(LayerInputSpec, spec.input), layer, inside)
            )
        self.layer_scalar = None
        if spec.scaled:
            # Gemma 4's factor of a layer is a buffer in transformers: stored, and not trained.
            self.layer_scalar = factory.vector(1).requires_grad_(False)

    @property
    def token_mixer(self) -> Mixer | None:
        """The part that mixes tokens, if there is one. "mixer" is a name in transformers, which adapters need."""
        spec = self.spec.mixer
        return None if spec is None else cast(Mixer, self._modules[spec.name])

    @property
    def feedforward(self) -> Feedforward | None:
        """The MLP, of whatever kind, if there is one."""
        spec = self.spec.mlp
        return None if spec is None else cast(Feedforward, self._modules[spec.name])

    @property
    def input_reader(self) -> BlockPart | None:
        """The part that reads the input of the layer, if there is one."""
        spec = self.spec.input
        return None if spec is None else cast(BlockPart, self._modules[spec.name])

    @property
    def block_parts(self) -> list[BlockPart]:
        """The parts that there are."""
        parts = (self.token_mixer, self.feedforward, self.input_reader)
        return [part for part in parts if part is not None]

    @property
    def linear_owners(self) -> list[BlockPart]:
        """The parts whose te.Linears are modules of theirs: of several mixers beside each other, each of them."""
        owners = []
        for part in self.block_parts:
            for module in part.modules():
                if isinstance(module, BlockPart) and not module.holds_parts:
                    owners.append(module)
        return owners

    def initialize(self, name: str, values: Tensor, std: float, residual_std: float) -> None:
        """Set the initial values of the parameter `name`; see te_models.model.part.BlockPart.initialize."""
        owner, _, rest = name.partition(".")
        for part in self.block_parts:
            if owner == part.spec.name:
                # The part knows which of its linears lead back into the residual stream.
                return part.initialize(rest, values, std, residual_std)
        values.fill_(1.0 if name == "layer_scalar" else self.gain)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the block applied to x [N, D]: [N, D]."""
        fp8 = context.fp8_layers
        inside = fp8.start <= self.layer < fp8.stop  # `in` cannot be traced with dynamic=True
        if inside and not self.fp8_enabled():
            with context.recompute.by_a_third_party():
                return self._forward(x, context)
        return self._forward(x, context)

    def _forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the block applied to x [N, D]: norm and mixer, then norm and MLP, each added to x."""
        if self.spec.side_by_side:
            return self._side_by_side(x, context)
        if context.step is not None:
            return self._step(x, context)
        mixer = self.token_mixer
        mlp = self.feedforward
        delta = None
        if mixer is not None:
            h, x = self._normed(self.input_layernorm, x, None, mixer, context)
            delta = self._delta(self.attention_output_norm, mixer(h, context), context)
        if mlp is not None:
            # x and delta are added behind this call: the norm's kernel adds them on its way, in one pass over memory.
            hidden, x = context.recompute.run_mlp(self, mlp, self._mlp_hidden, x, delta, context)
            delta = self._delta(self.mlp_output_norm, mlp.output(hidden, context), context)
        assert delta is not None  # a block has at least one of the two
        # The next block's norm could fuse this sum too, but the result of a block is one tensor, whatever comes next.
        return self._ended(x + delta, context)

    def _side_by_side(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the block applied to x [N, D] where mixer and MLP read the same norm of x."""
        mixer = self.token_mixer
        mlp = self.feedforward
        assert mixer is not None and mlp is not None
        # No consumer: mixer and MLP have quantizers of their own, so that the norm cannot write FP8 for both.
        h, x = self._normed(self.input_layernorm, x, None, None, context)
        mixed = self._delta(None, mixer(h, context), context)
        hidden = context.recompute.run_mlp(self, mlp, self._hidden_beside, h, None, context)
        from_mlp = self._delta(None, mlp.output(hidden, context), context)
        return self._ended(x + mixed + from_mlp, context)

    def _hidden_beside(self, h: Tensor, delta: None, context: ForwardContext) -> Tensor:
        """Return the input of the second half of the MLP [N, F] from the norm h [N, D] that the mixer reads too."""
        mlp = self.feedforward
        assert mlp is not None
        return mlp.hidden(h, context)

    def _step(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the block applied to one new token per row: each part by kernels of a step, or by its modules."""
        mixer = self.token_mixer
        mlp = self.feedforward
        if mixer is not None:
            output = self._by_kernels(
                mixer, self.input_layernorm, self.attention_output_norm, x, context
            )
            if output is None:
                h, x = self._normed(self.input_layernorm, x, None, mixer, context)
                output = x + self._delta(self.attention_output_norm, mixer(h, context), context)
            x = output
        if mlp is not None:
            output = self._by_kernels(
                mlp, self.post_attention_layernorm, self.mlp_output_norm, x, context
            )
            if output is None:
                hidden, x = self._mlp_hidden(x, None, context)
                output = x + self._delta(self.mlp_output_norm, mlp.output(hidden, context), context)
            x = output
        return self._ended(x, context)

    def _by_kernels(
        self,
        part: BlockPart,
        before: nn.Module | None,
        after: nn.Module | None,
        x: Tensor,
        context: ForwardContext,
    ) -> Tensor | None:
        """Return x [N, D] and what the part adds to it; None where its modules have to run."""
        norm = None if before is None else context.norm_of_step(before)
        # A hook or an adapter on a module would not run, and a norm behind the part is not in these kernels.
        if norm is None or after is not None or not is_untouched(part):
            return None
        return part.step(norm, x, context, self.residual_multiplier)

    def _ended(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return x [N, D] after mixer and MLP with what the layer makes of its input, and its factor."""
        reader = self.input_reader
        if reader is not None:
            x = x + reader(x, context)
        # Detached: a user who unfreezes all parameters does not train it either.
        return x if self.layer_scalar is None else x * self.layer_scalar.detach()

    def _mlp_hidden(
        self, x: Tensor, delta: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return the input of the second half of the MLP [N, F], and x + delta [N, D]."""
        mlp = self.feedforward
        assert mlp is not None
        h, x = self._normed(self.post_attention_layernorm, x, delta, mlp, context)
        return mlp.hidden_with_residual(h, x, context), x

    def _delta(self, norm: nn.Module | None, out: Tensor, context: ForwardContext) -> Tensor:
        """Return the contribution of a part's output to the residual stream."""
        if norm is not None:
            if self.tp.size == 1:
                out = context.kernels.output_norm(norm, out)
            else:
                out = self.tp.norm(norm, out, self.tp.scatters)
        return out if self.residual_multiplier == 1 else out * self.residual_multiplier

    def _normed(
        self,
        norm: nn.Module | None,
        x: Tensor,
        delta: Tensor | None,
        reader: BlockPart | None,
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """Return the input of the part `reader` (None: of two parts), and x + delta."""
        # Under tensor parallelism the weight's gradient is summed over ranks in the graph, which the fused norm has
        # not.
        if norm is not None and self.tp.size == 1:
            consumer = None
            if reader is not None and reader.entry is not None:
                consumer = context.neighbour(reader._modules[reader.entry])
            return context.kernels.norm(norm, x, delta, consumer)
        if delta is not None:
            x = x + delta
        return x if norm is None else self.tp.norm(norm, x, self.tp.scatters), x
