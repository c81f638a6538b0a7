"""Context parallelism of a CausalLM: each of several ranks has some tokens of every row, and all parameters.

All ranks get the same rows. A row is cut into two pieces per rank; rank r of n has pieces r and 2n - 1 - r, since a
later token attends to more keys: so all ranks have equally much to do. Everything but attention works on a rank's own
tokens. Attention gathers the keys and values of the whole row from all ranks, once more in backward so that no layer
keeps them, and backward sums their gradients over the ranks (as in Llama 3, arXiv 2407.21783, section
3.3.2). Mixers with a state divide their heads instead (te_models.model.whole_rows). Only passes that return a loss and
no logits are divided: generation and logits run whole on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from te_models.config.layer import LayerSpec
from te_models.device.allocations import counted_as
from te_models.device.autograd import Context
from te_models.distributed.collectives import all_gather, all_to_all, reduce_scatter
from te_models.distributed.mesh_ranks import MeshRanks
from te_models.errors import UsageError
from te_models.kernels.composed_attention import composed_attention
from te_models.kernels.prefix_attention import prefix_attention
from te_models.kernels.sdpa import attention_mask, causal_attention
from te_models.model.output import OutputRequest
from te_models.model.recompute import Recompute
from te_models.model.targets import IGNORED, PAD_DOCUMENT

PIECES = 2  # of a row, for each rank


@dataclass(frozen=True)
class ContextParallel(MeshRanks):
    """The ranks that share the tokens of each row; `mesh` None: one rank, which has all of them."""

    def __post_init__(self) -> None:
        self.check("cp_mesh", "the tokens of a row, mesh['cp']", "")

    def check_layers(self, layers: Sequence[LayerSpec]) -> None:
        """Raise a UsageError for layers whose tokens or heads the ranks cannot divide."""
        if self.size == 1:
            return
        for layer in layers:
            for mixer in layer.mixers:
                obstacle = mixer.rows_obstacle(self.size)
                if obstacle:
                    raise UsageError(obstacle)

    def share(self, seq: int) -> TokenShare | None:
        """Return this rank's share of rows of `seq` tokens; None if it has all of them."""
        if self.size == 1:
            return None
        pieces = PIECES * self.size
        return TokenShare(piece=-(-seq // pieces), rank=self.rank, size=self.size, group=self.group)


@dataclass(frozen=True)
class TokenShare:
    """The tokens of one rank in rows that are filled up to a multiple of the pieces.

    Attributes:
        piece: tokens of a piece.
        rank: the number of this rank, of `size`.
        size: the number of ranks.
        group: their process group.
    """

    piece: int
    rank: int
    size: int
    group: dist.ProcessGroup | None

    @property
    def row(self) -> int:
        """The number of tokens of a whole row."""
        return PIECES * self.size * self.piece

    @property
    def begins(self) -> tuple[int, int]:
        """The first slots of this rank's pieces."""
        return self.rank * self.piece, (PIECES * self.size - 1 - self.rank) * self.piece

    def local_tokens(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of x, whose dimension `dim` is the whole row."""
        return torch.cat([x.narrow(dim, begin, self.piece) for begin in self.begins], dim=dim)

    def filled(self, tokens: Tensor, request: OutputRequest) -> tuple[Tensor, OutputRequest]:
        """Return ids [B, S] or vectors [B, S, D] and the request, with padding at the end of each row.

        There is none where the pieces divide the rows.
        """
        missing = self.row - tokens.shape[1]
        if missing == 0:
            return tokens, request
        assert request.labels is not None
        real = request.attention_mask
        documents = request.document_ids
        if documents is not None:
            documents = F.pad(documents, (0, missing), value=PAD_DOCUMENT)
        else:
            real = tokens.new_ones(tokens.shape[:2], dtype=torch.int64) if real is None else real
            real = F.pad(real, (0, missing))
        vectors = (0, 0) * (tokens.dim() - 2)
        return F.pad(tokens, (*vectors, 0, missing)), request._replace(
            labels=F.pad(request.labels, (0, missing), value=IGNORED),
            attention_mask=real,
            document_ids=documents,
        )

    def own_filled(self, x: Tensor, value: int) -> Tensor:
        """Return this rank's tokens of x [B, S], whose rows end before the pieces do: `value` follows."""
        return self.local_tokens(F.pad(x, (0, self.row - x.shape[1]), value=value), dim=1)

    def gathered(self, x: Tensor, regathered: RegatheredRows | None = None) -> Tensor:
        """Return the tokens of all ranks in their order in the row, from x [B, K, own tokens, H]: [B, K, row, H].

        Backward drops what it has gathered in `regathered`.
        """
        return _Gathered.apply(x, self, regathered)

    def rows_of_heads(self, x: Tensor) -> Tensor:
        """Return all tokens of own heads [B, row, ...], given own tokens of all ranks' heads [B, S, ranks, ...]."""
        return _Exchanged.apply(x, self, True)

    def tokens_of_heads(self, x: Tensor) -> Tensor:
        """Return own tokens of all ranks' heads [B, S, ranks, ...], given all tokens of own heads [B, row, ...]."""
        return _Exchanged.apply(x, self, False)

    def in_order(self, x: Tensor) -> Tensor:
        """Return rows [row, ...] in the order of the row, from the tokens of each rank one after the other."""
        pieces = x.unflatten(0, (self.size, PIECES, self.piece))  # [ranks, 2, piece, ...]
        # Rank r has pieces r and 2n - 1 - r: the first ones in their order, then the second ones backwards.
        return torch.cat((pieces[:, 0], pieces[:, 1].flip(0))).flatten(0, 1)

    def by_rank(self, x: Tensor) -> Tensor:
        """Return the inverse of `in_order`."""
        first, second = x.unflatten(0, (PIECES * self.size, self.piece)).chunk(2)
        return torch.stack((first, second.flip(0)), dim=1).flatten(0, 2)


class _Gathered(torch.autograd.Function):
    """Tokens of all ranks; the gradient of a token is the sum over the ranks of theirs."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, share: TokenShare, regathered: RegatheredRows | None
    ) -> Tensor:
        ctx.share = share
        ctx.regathered = regathered
        return _whole_rows(x, share)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        share: TokenShare = ctx.share
        scattered = reduce_scatter(share.by_rank(grads[0].movedim(2, 0)), share.group)
        if ctx.regathered is not None:
            ctx.regathered.drop()
        return scattered.movedim(0, 2), None, None


def _whole_rows(x: Tensor, share: TokenShare) -> Tensor:
    """Return x [B, K, own tokens, H] of all ranks in the order of the row: [B, K, row, H]."""
    tokens = x.movedim(2, 0)  # [own tokens, B, K, H]
    return share.in_order(all_gather(tokens, share.group)).movedim(0, 2)


class _View(NamedTuple):
    """A view of gathered tokens, in place of a tensor that autograd would save."""

    number: int  # of the gathered tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class RegatheredRows:
    """Keys and values of whole rows that backward gathers once more, so that no layer keeps them until then.

    Inside `saving`, autograd saves views of them as numbers. All ranks gather in the same places: where the gradient of
    the attention's output arrives (`after`), whatever a rank's kernels have saved.
    """

    def __init__(self, share: TokenShare, *local: Tensor) -> None:
        self.share = share
        self.local = [x.detach() for x in local]  # as values: their graph leads here
        self.waiting = sum(x.requires_grad for x in local)  # gradients that are still to come
        self.rows: list[Tensor] = []  # empty but in backward
        self.numbers: dict[int, int] = {}  # storage -> number of the gathered tensor

    @contextlib.contextmanager
    def saving(self, *rows: Tensor) -> Iterator[None]:
        """Inside, save views of the gathered tensors `rows`, in the order of the own ones, as numbers."""
        self.numbers = {x.untyped_storage()._cdata: number for number, x in enumerate(rows)}
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield
        # Other tensors may have these addresses later.
        self.numbers = {}

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Return what to keep of a tensor that autograd saves."""
        number = self.numbers.get(tensor.untyped_storage()._cdata)
        if number is None or tensor.dtype != self.local[number].dtype:
            # An output itself would lead to the operation that saves it, and a pass without backward would never go.
            return tensor.detach()
        return _View(number, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Tensor | _View) -> Tensor:
        """Return the tensor that `pack` was given."""
        if isinstance(packed, Tensor):
            return packed
        return self.rows[packed.number].as_strided(packed.size, packed.stride, packed.offset)

    def after(self, out: Tensor) -> Tensor:
        """Return the output of the attention; its backward gathers first."""
        return _Regather.apply(out, self)

    def gather(self) -> None:
        """Gather the tensors once more."""
        with counted_as("recomputed"):
            self.rows = [_whole_rows(x, self.share) for x in self.local]

    def drop(self) -> None:
        """Free the tensors once the gradients of all of them are there."""
        self.waiting -= 1
        if self.waiting <= 0:
            self.rows = []


class _Regather(torch.autograd.Function):
    """The identity, whose backward gathers keys and values."""

    @staticmethod
    def forward(ctx: Context, out: Tensor, regathered: RegatheredRows) -> Tensor:
        ctx.regathered = regathered
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.regathered.gather()
        return grads[0], None


class _Exchanged(torch.autograd.Function):
    """Tokens for heads, or heads for tokens; backward exchanges gradients back."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, share: TokenShare, to_rows: bool) -> Tensor:
        ctx.share = share
        ctx.to_rows = to_rows
        return _rows_of_heads(x, share) if to_rows else _tokens_of_heads(x, share)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = _tokens_of_heads if ctx.to_rows else _rows_of_heads
        return back(grads[0], ctx.share), None, None


def _rows_of_heads(x: Tensor, share: TokenShare) -> Tensor:
    """Return x [B, S, ranks, ...] as [B, row, ...]; see TokenShare.rows_of_heads."""
    sent = x.movedim(2, 0).movedim(2, 1).flatten(0, 1)  # [ranks * S, B, ...]
    # Contiguous, as kernels want it: the row was the first dimension.
    return share.in_order(all_to_all(sent, share.group)).movedim(0, 1).contiguous()


def _tokens_of_heads(x: Tensor, share: TokenShare) -> Tensor:
    """Return x [B, row, ...] as [B, S, ranks, ...]; see TokenShare.tokens_of_heads."""
    exchanged = all_to_all(share.by_rank(x.movedim(1, 0)), share.group)  # [ranks * S, B, ...]
    return exchanged.unflatten(0, (share.size, -1)).movedim(2, 0).movedim(1, 2).contiguous()


@dataclass(frozen=True)
class SharedRows:
    """Attention of a rank's queries to the keys of whole rows; it stands where a mask does (forward_context.Visible).

    Attributes:
        share: the rank's tokens.
        window: the tokens that a query sees, itself included; None: all before it.
        real: bool [B, row], False at padding; None: there is none.
        documents: int [B or 1, row], the document of each token, or its chunk; None: a row is one.
        recompute: which activations backward recomputes.
    """

    share: TokenShare
    window: int | None
    real: Tensor | None
    documents: Tensor | None
    recompute: Recompute

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Return attention [B, N, own tokens, H] of q [B, N, own tokens, H] to k and v [B, K, own tokens, H]."""
        regathered = None
        # A block that is recomputed gathers in backward anyway.
        if self.recompute.saves_block and (k.requires_grad or v.requires_grad):
            regathered = RegatheredRows(self.share, k, v)
        keys = self.share.gathered(k, regathered)
        values = self.share.gathered(v, regathered)
        saving = contextlib.nullcontext() if regathered is None else regathered.saving(keys, values)
        outs = []
        with saving:
            for begin, queries in zip(self.share.begins, q.chunk(PIECES, dim=2), strict=True):
                outs.append(self._piece(begin, queries, keys, values, scale, sinks, cap))
        out = torch.cat(outs, dim=2)
        return out if regathered is None else regathered.after(out)

    def _piece(
        self,
        begin: int,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float | None,
        sinks: Tensor | None,
        cap: float | None,
    ) -> Tensor:
        """Return attention of the queries of a piece that begins at slot `begin`: [B, N, piece, H]."""
        end = begin + self.share.piece
        first = 0
        # A window counts tokens and not padding, so with padding older slots may be inside it.
        if self.window is not None and self.real is None:
            first = max(0, begin + 1 - self.window)
        keys = keys[:, :, first:end]
        values = values[:, :, first:end]
        mask = self._mask(slice(begin, end), slice(first, end), q.device)
        if cap is None and sinks is None:
            if mask is None:
                return prefix_attention(q, keys, values, scale=scale)
            return causal_attention(q, keys, values, mask, scale=scale)
        if mask is None:
            mask = attention_mask(end, None, None, None, q.device, rows=slice(begin, end))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return composed_attention(q, keys, values, mask, scale, cap, sinks)

    def _mask(self, queries: slice, keys: slice, device: torch.device) -> Tensor | None:
        """Return which keys the queries see; None: all up to their own."""
        window = self.window
        if window is not None and window >= queries.stop:
            window = None
        if window is None and self.real is None and self.documents is None:
            return None
        seen: dict[str, Any] = {"rows": queries, "window": window}
        seen["real"] = None if self.real is None else self.real[:, : queries.stop]
        seen["documents"] = None
        if self.documents is not None:
            seen["documents"] = self.documents[:, : queries.stop]
        mask = attention_mask(queries.stop, device=device, **seen)
        assert mask is not None
        return mask[..., keys.start :]
