"""The result of a forward pass."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import _register_namedtuple

from te_models.config.moe import MoEConfig
from te_models.model.router import Routing, RoutingReport
from te_models.model.targets import IGNORED, shifted


class Wanted(NamedTuple):
    """The outputs that the arguments of Decoder.forward ask for."""

    labels: Tensor | None
    attention_mask: Tensor | None
    document_ids: Tensor | None
    return_logits: bool
    logits_to_keep: int | None


class Output(NamedTuple):
    """loss: FP32 scalar, None without labels; logits [B, S, V] in the model's dtype, None if not asked for.

    In training, the loss of a model with experts includes those of its routers, which `routing` has.
    """

    loss: Tensor | None
    logits: Any
    routing: RoutingReport | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of it that a backward may start from."""
        return [
            tensor
            for tensor in (self.loss, self.logits, *(self.routing or ()))
            if tensor is not None
        ]


_register_namedtuple(Output, serialized_type_name="te_models.Output")  # for torch.export.save


def with_routing(
    output: Output,
    wanted: Wanted,
    routing: Routing,
    moe: MoEConfig | None,
    group: ProcessGroup | None,
) -> Output:
    """Return the output with what routers did, and in training with their losses by the factors of `moe`, else None.

    `group`: the processes that train together.
    """
    counted = None
    if moe is not None and group is not None and routing.layers and wanted.labels is not None:
        targets = shifted(wanted.labels, wanted.attention_mask, wanted.document_ids)
        counted = (targets != IGNORED).sum()
    report = routing.take(group, counted)
    if report is None or output.loss is None:
        return output
    return Output(
        output.loss if moe is None else output.loss + report.loss(moe), output.logits, report
    )
