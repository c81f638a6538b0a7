"""The result of a forward pass."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import _register_namedtuple

from te_models.config.moe import MoEConfig
from te_models.model.router import Routing, RoutingReport


class OutputRequest(NamedTuple):
    """The outputs that the arguments of Decoder.forward ask for."""

    labels: Tensor | None
    attention_mask: Tensor | None
    document_ids: Tensor | None
    return_logits: bool
    logits_to_keep: int | None


class Output(NamedTuple):
    """loss: FP32 scalar, None without labels; logits [B, S, V] in the model's dtype, None if not asked for.

    In training, the loss of a model with experts includes the losses of its routers, which `routing` has.
    """

    loss: Tensor | None
    logits: Any
    routing: RoutingReport | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of it that a backward may start from."""
        outputs = (self.loss, self.logits, *(self.routing or ()))
        return [tensor for tensor in outputs if tensor is not None]


_register_namedtuple(Output, serialized_type_name="te_models.Output")  # for torch.export.save


def with_routing(
    output: Output,
    request: OutputRequest,
    routing: Routing,
    moe: MoEConfig | None,
    group: ProcessGroup | None,
) -> Output:
    """Return the output with what routers did, and in training with their losses by the factors of `moe`, else None.

    `group`: the processes that train together; the loss then has this process's part of the routers' losses.
    """
    trains = moe is not None and request.labels is not None
    report = routing.take(group if trains else None)
    if report is None or output.loss is None:
        return output
    if moe is None:
        return Output(output.loss, output.logits, report)
    report = report._replace(prediction_loss=output.loss)
    return Output(output.loss + report.loss(moe), output.logits, report)


def step_loss(
    output: Output,
    weight: Tensor | float,
    router_weight: Tensor | float,
    moe: MoEConfig | None,
) -> Tensor:
    """Return the part of a pass in the loss of its step, FP32 [].

    Args:
        output: of a pass in training, with labels.
        weight: the factor of its mean cross-entropy: its share of the targets of the step.
        router_weight: the factor of the losses of its routers, which count every token, not only targets.
        moe: the factors of those losses; None: the model has no experts.
    """
    assert output.loss is not None
    if output.routing is None or moe is None:
        return output.loss * weight
    assert output.routing.prediction_loss is not None
    return output.routing.prediction_loss * weight + output.routing.loss(moe) * router_weight
