"""The factory of a model's te.Linear and norms, with the options that all of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.config.layer import LinearSpec
from te_models.config.recipe import EngineRecipe
from te_models.errors import UsageError
from te_models.fp8.primary_weights import drop_transposed
from te_models.model.expert_parallel import ExpertParallel
from te_models.model.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Factory:
    """Makes te.Linear and te.RMSNorm for one rank of a model.

    Attributes:
        te: the engine.
        tp: the ranks that share the model.
        ep: the ranks that share its experts.
        eps, zero_centered: of every norm, as ModelConfig's rms_norm_eps and zero_centered_norm.
        norm_type: of the norms of the residual stream, as in ModelConfig.
        fp8_weights: name in the model -> the engine's recipe object of te.Linears whose weight is stored in FP8; None:
            it is not.
        stored_linears: names in the model of those whose weights stay as a release stores them.
        prefix: of the names of what it makes, such as "layers.0.mlp.".
    """

    te: ModuleType
    tp: TensorParallel
    ep: ExpertParallel
    eps: float
    zero_centered: bool
    norm_type: str
    device: torch.device
    dtype: torch.dtype
    fp8_weights: Mapping[str, EngineRecipe | None] = dataclasses.field(default_factory=dict)
    stored_linears: frozenset[str] = frozenset()
    prefix: str = ""

    def inside(self, prefix: str) -> Factory:
        """Return a factory of a part of the model."""
        return dataclasses.replace(self, prefix=prefix)

    @property
    def gain(self) -> float:
        """The initial value of a norm's weight."""
        return 0.0 if self.zero_centered else 1.0

    @property
    def te_device(self) -> torch.device | str:
        """The device of te.Linears, as the text "meta" if they are to have no memory yet."""
        # Transformer Engine compares with that text: for a torch.device("meta") it makes whole weights on the GPU.
        return "meta" if self.device.type == "meta" else self.device

    def linear(self, spec: LinearSpec, fp8_weight: bool = True) -> nn.Module:
        """Return the te.Linear of this rank's share `spec`, without values: `initialize`, or a loader, gives them.

        With `fp8_weight` False its weight is not stored in FP8, whatever its precision. A description of several
        experts is a te.GroupedLinear, each of whose GEMMs is a te.Linear's.
        """
        if self.prefix + spec.name in self.stored_linears:
            return self._stored_linear(spec)
        recipe = self.fp8_weights.get(self.prefix + spec.name) if fp8_weight else None
        if recipe is None:
            return self._linear(spec)
        # Whoever writes the values keeps them for a master.
        # Transformer Engine decides at construction: a parameter that is BF16 once stays so.
        quantized = self.te.quantized_model_init(recipe=recipe)
        with torch.enable_grad(), quantized:  # both copies, also under no_grad
            module = self._linear(spec)
        # At once: if they are dropped from the finished model, they leave half of its memory in holes.
        drop_transposed(module)
        return module

    def _stored_linear(self, spec: LinearSpec) -> nn.Module:
        """Return a te.Linear or te.GroupedLinear whose weights are on the meta device until a loader brings them."""
        options = dict(
            bias=spec.bias, init_method=_leave_empty, params_dtype=self.dtype, device="meta"
        )
        if spec.experts:
            module = self.te.StoredGroupedLinear(
                spec.experts, spec.inputs, spec.outputs, use_grouped_tensor=False, **options
            )
        else:
            module = self.te.StoredLinear(spec.inputs, spec.outputs, **options)
        for name, parameter in list(module.named_parameters(recurse=False)):
            parameter.requires_grad_(False)
            if name.startswith("bias"):
                values = torch.empty(parameter.shape, dtype=self.dtype, device=self.device)
                module.register_parameter(name, nn.Parameter(values))
        return module

    def _linear(self, spec: LinearSpec) -> nn.Module:
        """Return the te.Linear of a description, or the te.GroupedLinear of its experts, with empty weights."""
        if spec.experts:
            # Not as one grouped tensor: masters, checkpoints and adapters know a weight per expert.
            grouped = self.te.GroupedLinear(
                spec.experts,
                spec.inputs,
                spec.outputs,
                bias=spec.bias,
                init_method=_leave_empty,
                params_dtype=self.dtype,
                device=self.te_device,
                use_grouped_tensor=False,
            )
            lay_together(grouped)
            return grouped
        # te.Linear takes the sizes of the whole layer, and `spec` has this rank's share.
        inputs = spec.inputs
        outputs = spec.outputs
        if spec.split == "row":
            inputs *= self.tp.size
        elif spec.split == "column":
            outputs *= self.tp.size
        parallel: dict[str, Any] = {}
        if spec.split is not None:
            parallel = self.tp.linear(spec.split)
        return self.te.Linear(
            inputs,
            outputs,
            bias=spec.bias,
            init_method=_leave_empty,
            params_dtype=self.dtype,
            device=self.te_device,
            **parallel,
        )

    def norm(
        self, size: int, zero_centered: bool | None = None, eps: float | None = None
    ) -> nn.Module:
        """Return a te.RMSNorm of this many channels; `zero_centered` and `eps` None: as the model's others."""
        return self._norm(self.te.RMSNorm, size, zero_centered, eps)

    def residual_norm(
        self, size: int, zero_centered: bool | None = None, eps: float | None = None
    ) -> nn.Module:
        """Return a norm of the residual stream, of the model's type; arguments as of `norm`."""
        kind = self.te.LayerNormWithoutBias if self.norm_type == "layer" else self.te.RMSNorm
        return self._norm(kind, size, zero_centered, eps)

    def _norm(
        self, kind: type[nn.Module], size: int, zero_centered: bool | None, eps: float | None
    ) -> nn.Module:
        """Return a norm of this class."""
        if zero_centered is None:
            zero_centered = self.zero_centered
        return kind(
            size,
            eps=eps or self.eps,
            zero_centered_gamma=zero_centered,
            device=self.device,
            dtype=self.dtype,
        )

    def vector(self, *shape: int) -> nn.Parameter:
        """Return a parameter of this shape without values."""
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=self.dtype))


def lay_together(grouped: nn.Module) -> None:
    """Give the weights of a te.GroupedLinear memory that follows each other, without values.

    Kernels that find them so read them as one matrix. In a state_dict each has a storage to itself.
    """
    number: Any = grouped.num_gemms
    weights = [grouped.get_parameter(f"weight{expert}") for expert in range(number)]
    if not all(type(weight) is nn.Parameter and not weight.is_meta for weight in weights):
        return  # in FP8, or without memory
    memory = weights[0].new_empty(len(weights), *weights[0].shape)
    # By .data, so that the Parameters that hooks and names refer to stay the same objects.
    for weight, part in zip(weights, memory, strict=True):
        weight.data = part
    grouped.register_state_dict_post_hook(_separate_storages)


def _separate_storages(
    grouped: nn.Module, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    """Give each weight in a state_dict a storage of its own, over the same memory.

    A hook after state_dict. By a common storage accelerate and safetensors recognize tensors that are tied: accelerate
    would save only the first expert of a layer.
    """
    for name in list(state):
        value = state[name]
        if not name.startswith(prefix) or type(value) is not Tensor or value.is_meta:
            continue
        if value.untyped_storage().nbytes() > value.nbytes:
            # By .data, so that writing to it still counts as a change of the parameter.
            value.data = torch.from_dlpack(value)


def _leave_empty(weight: Tensor) -> None:
    """Leave a new weight without values. A function of the module, so that models can be pickled."""


def with_bias_gradient(y: Tensor, module: nn.Module, te_recipe: EngineRecipe | None) -> Tensor:
    """Return the output y [..., O] of a te.Linear under `te_recipe` such that a bias that trains gets its gradient.

    Outside FP8, Transformer Engine sums it in the product that makes the weight's gradient, which a frozen weight does
    not have (section 7.5).
    """
    bias = module._parameters.get("bias")
    if bias is None or not bias.requires_grad or not torch.is_grad_enabled():
        return y
    weight = module._parameters.get("weight")
    if weight is None or weight.requires_grad:
        return y
    if _gives_bias_gradient(te_recipe):
        return y
    zero = bias.detach() - bias
    # Less a zero, and not plus one, which would change the bits of a -0.
    return y - zero.to(y.dtype)


def refuse_lost_gradients(module: nn.Module, te_recipe: EngineRecipe | None) -> None:
    """Raise a UsageError if experts of a te.GroupedLinear under `te_recipe` train without getting a gradient.

    Transformer Engine asks the first weight alone whether weights train, and outside FP8 biases have gradients only
    beside it (section 7.5).
    """
    first = module._parameters.get("weight0")
    if first is None or first.requires_grad or not module.training or not torch.is_grad_enabled():
        return
    biases_train = _gives_bias_gradient(te_recipe)
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.requires_grad or (biases_train and name.startswith("bias")):
            continue
        raise UsageError(
            f"{name} of experts would get no gradient, since the weight of expert 0 is frozen: train the weights of "
            "all experts, or freeze all of them and their biases"
        )


def _gives_bias_gradient(te_recipe: EngineRecipe | None) -> bool:
    """Return whether a bias gets its gradient beside a frozen weight under this recipe."""
    # Not every recipe class has the field.
    return te_recipe is not None and getattr(te_recipe, "backward_override", None) is None


def own_weight(module: nn.Module) -> nn.Parameter:
    """Return the weight of a module, or of the one that a layer of peft in its place has inside."""
    while True:
        weight = module._parameters.get("weight")
        if weight is not None:
            return weight
        inside: Any = getattr(module, "original_module", None)
        module = module.get_submodule("base_layer") if inside is None else inside


def first_rows(x: Tensor, rows: int) -> Tensor:
    """Return the first rows of x [n, ...], [rows, ...]; x itself if it has no others."""
    # A slice of all rows is an operation to autograd: its backward fills a tensor with zeros and copies into it.
    return x if x.shape[0] == rows else x[:rows]


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Return x [n, D] with rows of zeros appended up to [rows, D]; x itself if it has enough."""
    return x if x.shape[0] == rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))
