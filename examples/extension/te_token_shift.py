"""A package that adds a mixer, an MLP, a preset and a family of Hugging Face to te-models.

The mixer is a token shift (as in RWKV, Peng et al. 2023, arXiv 2305.13048): each token sees itself and the one before
it. The MLP is down_proj(tanh(up_proj(x))). `register` is the entry point that pyproject.toml names; without installing
the package, call it before the first model:

    import te_token_shift
    te_token_shift.register()
    model = te_models.CausalLM.from_preset("token-shift-nano")

Shapes: B batch, S sequence, N = B*S tokens padded up to the recipe's alignment, D hidden_size, F intermediate_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import te_models
from te_models.config.fields import ModelFields
from te_models.config.layer import FeedforwardSpec, LinearSpec, MixerSpec, Section
from te_models.config.model import ModelConfig
from te_models.interop import hf_places
from te_models.interop.hf_family import Family
from te_models.interop.hf_parts import ConfigKeys
from te_models.interop.hf_rope_parts import ROPE
from te_models.model.forward_context import ForwardContext
from te_models.model.kv_cache import RecurrentState
from te_models.model.part import Feedforward, Mixer
from te_models.model.te_modules import Factory, pad_rows

KIND = "token_shift"


@dataclass(frozen=True)
class TokenShiftSpec(MixerSpec):
    """out_proj(act(x + share * previous x)), x of `width` channels from in_proj."""

    width: int

    name: ClassVar[str] = "shift"
    title: ClassVar[str] = "token shift"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The two projections; the rows of a weight may have several sections, as q, k and v have."""
        into = (Section("x", self.width, self.width),)
        out = (Section("out", self.hidden_size, self.hidden_size),)
        return (
            LinearSpec("in_proj", self.hidden_size, into),
            LinearSpec("out_proj", self.width, out, residual=True),
        )

    @property
    def vectors(self) -> Mapping[str, int]:
        """Other parameters with their sizes."""
        return {"share": self.width}

    @property
    def features(self) -> Mapping[str, int]:
        """Sizes that FP8 wants to be multiples of 16 or 32."""
        return {"hidden_size": self.hidden_size, "kind_options.shift_width": self.width}

    def parallel_obstacle(self, sequence: bool) -> str:
        return "a token shift is not divided between ranks: build the model without tp_mesh"

    def state_bytes(self, batch: int, slots: int, element: int) -> int:
        """Return the bytes that decoding keeps: one token per row."""
        return batch * self.width * element


class TokenShift(Mixer[TokenShiftSpec]):
    """The module of TokenShiftSpec."""

    entry = "in_proj"

    def __init__(self, spec: TokenShiftSpec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        into, out = spec.linears
        self.in_proj = factory.linear(into)
        self.share = factory.vector(spec.width)
        self.out_proj = factory.linear(out)

    def initialize(self, name: str, values: Tensor, std: float, residual_std: float) -> None:
        if name == "share":
            values.fill_(0.5)
        else:
            super().initialize(name, values, std, residual_std)

    def new_state(
        self, batch: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> RecurrentState:
        """Return the state of rows without tokens: the newest token of each, [B, 1, width]."""
        size = (batch, 1, self.spec.width)
        return RecurrentState(newest=torch.zeros(size, device=device, dtype=dtype))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return [N, D] of x [N, D]."""
        batch, seq, rows = context.batch, context.seq, x.shape[0]
        x = context.linear(self.in_proj, x)[: batch * seq].unflatten(
            0, (batch, seq)
        )  # [B, S, width]
        state, stored = self.stored_state(context, like=x)
        before = stored.get("newest", x.new_zeros(batch, 1, x.shape[2]))
        previous = torch.cat((before, x[:, :-1]), dim=1)
        if state is not None:  # which overwrites `before`
            state.write(newest=self._newest(x, context))
        # The first token of a row, or of a document of a pack, has none before it.
        positions = context.positions.expand(batch, seq)
        previous = previous * (positions > 0)[..., None]
        y = torch.nn.functional.silu(x + previous * self.share).flatten(0, 1)  # [B*S, width]
        if context.real is not None:  # zeros at padding, so that it changes no scale
            y = y * context.real
        return context.linear(self.out_proj, pad_rows(y, rows))

    def _newest(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the last token of each row of x [B, S, width], padding left out: [B, 1, width]."""
        if context.real is None:
            return x[:, -1:]
        real = context.real.view(context.batch, context.seq)
        place = (real * torch.arange(context.seq, device=x.device)).argmax(1)
        return x.gather(1, place[:, None, None].expand(-1, 1, x.shape[2]))


@dataclass(frozen=True)
class TanhMLPSpec(FeedforwardSpec):
    """down_proj(tanh(up_proj(x)))."""

    intermediate_size: int

    name: ClassVar[str] = "mlp"
    title: ClassVar[str] = "MLP with tanh"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        size = self.intermediate_size
        return (
            LinearSpec("up_proj", self.hidden_size, (Section("up", size, size),)),
            LinearSpec(
                "down_proj",
                size,
                (Section("down", self.hidden_size, self.hidden_size),),
                residual=True,
            ),
        )

    @property
    def features(self) -> Mapping[str, int]:
        return {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}

    def parallel_obstacle(self, sequence: bool) -> str:
        return "an MLP with tanh is not divided between ranks: build the model without tp_mesh"


class TanhMLP(Feedforward[TanhMLPSpec]):
    """The module of TanhMLPSpec."""

    entry = "up_proj"

    def __init__(self, spec: TanhMLPSpec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        up, down = spec.linears
        self.up_proj = factory.linear(up)
        self.down_proj = factory.linear(down)

    def hidden(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the input of down_proj [N, F] from x [N, D]."""
        return torch.tanh(context.linear(self.up_proj, x))

    def output(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return [N, D]."""
        return context.linear(self.down_proj, hidden)


def describe_mixer(config: ModelFields, layer: int) -> TokenShiftSpec:
    options = config.kind_options or {}
    width = options.get("shift_width", config.hidden_size)
    return TokenShiftSpec(hidden_size=config.hidden_size, width=width)


def describe_mlp(config: ModelFields, layer: int) -> TanhMLPSpec:
    return TanhMLPSpec(hidden_size=config.hidden_size, intermediate_size=config.intermediate_size)


PRESET: dict[str, Any] = dict(
    vocab_size=288,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    attention_gate="none",
    layer_types=(KIND, KIND, KIND, "full_attention"),
    mlp_layer_types=("tanh", "dense", "tanh", "dense"),
    kind_options=dict(shift_width=96),
)


def _read_kinds(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json, which has the numbers of the layers with a token shift, and of those with a tanh."""
    layers = range(theirs["num_hidden_layers"])
    shifts, tanhs = theirs["shift_layers"], theirs["tanh_layers"]
    return {
        "layer_types": [KIND if layer in shifts else "full_attention" for layer in layers],
        "mlp_layer_types": ["tanh" if layer in tanhs else "dense" for layer in layers],
        "kind_options": {"shift_width": theirs["shift_width"]},
    }


def _write_kinds(config: ModelConfig) -> dict[str, Any]:
    mixers = config.layer_types or ()
    mlps = config.mlp_layer_types or ()
    options = config.kind_options or {}
    return {
        "shift_layers": [layer for layer, kind in enumerate(mixers) if kind == KIND],
        "tanh_layers": [layer for layer, kind in enumerate(mlps) if kind == "tanh"],
        "shift_width": options.get("shift_width", config.hidden_size),
    }


# Its tensors are named as Llama's, and below "shift.". A name has one place: the MLPs with a gate have another "up".
FAMILY = Family(
    model_type="token_shift",
    architecture="TokenShiftForCausalLM",
    models="models of this example",
    layer={
        **{name: rows for name, rows in hf_places.LAYER.items() if name[:4] != "mlp."},
        "shift.in_proj": hf_places.Rows("shift.in_proj"),
        "shift.share": hf_places.Rows("shift.share"),
        "shift.out_proj": hf_places.Rows("shift.out_proj"),
        "mlp.gate_proj": hf_places.Rows("mlp.gate_up_proj", ("gate",)),
        "mlp.up": hf_places.Rows("mlp.gate_up_proj", ("up",)),
        "mlp.up_proj": hf_places.Rows("mlp.up_proj"),
        "mlp.down_proj": hf_places.Rows("mlp.down_proj"),
    },
    parts=(
        ROPE,
        ConfigKeys(("shift_layers", "tanh_layers", "shift_width"), _read_kinds, _write_kinds),
    ),
    constants={"attention_gate": "none"},
    note="an example",
)


def register() -> None:
    """Add everything to te-models."""
    te_models.register_mixer(KIND, describe_mixer, TokenShiftSpec, TokenShift)
    te_models.register_mlp("tanh", describe_mlp, TanhMLPSpec, TanhMLP)
    te_models.register_preset("token-shift-nano", PRESET)
    te_models.register_family(FAMILY)
