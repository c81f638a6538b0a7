"""One forward pass, as the layers see it: positions and masks of its tokens, and how to run its operations."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from einops import rearrange
from torch import Tensor, nn

from te_models.config.attention import WIDEST_SPANS, QueryScale, SeenKeys, SoftmaxAttentionSpec
from te_models.config.layer import LayerSpec, distinct
from te_models.config.rope import Rope
from te_models.device.hooks import is_untouched
from te_models.fp8.region import Autocasts
from te_models.fp8.step_linear import step_linear
from te_models.kernels.decode import MOST_ROWS, DecodeKernels, StepLinear, StepNorm
from te_models.kernels.dispatch import Kernels
from te_models.kernels.expert_rows import Route
from te_models.kernels.groups import Groups
from te_models.kernels.sdpa import attention_mask, chunk_numbers, masks_nothing
from te_models.model.context_parallel import SharedRows, TokenShare
from te_models.model.inputs import positions_in_documents
from te_models.model.kv_cache import Cache, DecodingCache
from te_models.model.recompute import Recompute
from te_models.model.rope import rotary_tables
from te_models.model.router import Routing
from te_models.model.te_modules import (
    first_rows,
    pad_rows,
    refuse_lost_gradients,
    with_bias_gradient,
)

if TYPE_CHECKING:
    from te_models.kernels.span_attention_triton import Spans

# Which keys are seen: a mask of kernels.sdpa.attention_mask, a span, keys of all ranks that share a row, or all before
# the query.
Visible: TypeAlias = "Tensor | Spans | SharedRows | None"


class ForwardContext(NamedTuple):
    """The tokens of one forward pass, described once for all layers, and how it runs."""

    batch: int
    seq: int
    positions: Tensor  # int64 [S] or [B, S]: tokens of the same row, or document, before each token
    # cos and sin [S, R] or [B, S, R], R channels rotated, in the dtype of the activations
    rotary: dict[Rope, tuple[Tensor, Tensor]]
    # SoftmaxAttentionSpec.query_scale -> factors [S] or [B, S]
    query_scales: dict[QueryScale, Tensor]
    cache: Cache | None
    masks: dict[SeenKeys, Visible]
    # bool [B*S, 1], False at padding inside the batch; None where there is none
    real: Tensor | None
    # bool [B*S, 1], False at padding of either kind, which no expert gets; None: all are tokens
    routed: Tensor | None
    # int [B, S], the document of each token, below 0 at padding; None: each row is one
    documents: Tensor | None
    recompute: Recompute  # which activations backward recomputes
    kernels: Kernels
    fp8_layers: range  # the blocks that belong inside the model's autocast
    autocasts: Autocasts
    routing: Routing  # what routers did
    alignment: int  # the number of rows of each GEMM is a multiple of this
    # sliding window -> keys and values [B, K, slots, H] of the layer that lends them to later ones with that window; a
    # layer puts its own into `lent_keys`, and `Decoder._run` moves them
    shared_keys: dict[int | None, tuple[Tensor, Tensor]]
    lent_keys: dict[int | None, tuple[Tensor, Tensor]]
    layer_inputs: tuple[Tensor, ...] = ()  # of each layer [N, P], where layers have inputs
    share: TokenShare | None = None  # this rank's tokens of each row; None: all of them
    # Whether all ranks that share experts have as many tokens in this pass.
    ranks_alike: bool = False
    whole: "ForwardContext | None" = None  # with `share`: the pass over the tokens of all ranks

    def of_member(self, number: int) -> "ForwardContext":
        """Return the pass for one of several mixers side by side (config/parallel.py), with its part of the cache."""
        if self.cache is None:
            return self
        return self._replace(cache=self.cache.of_member(number))

    def without_padding(self, x: Tensor) -> Tensor:
        """Return x [N, D] with zeros at padding, which a bias has made nonzero."""
        count = self.batch * self.seq
        if x.shape[0] != count:
            x = pad_rows(x[:count], x.shape[0])
        return x if self.real is None else x * pad_rows(self.real.to(x.dtype), x.shape[0])

    def rotated(self, x: Tensor, rope: Rope, ordered: bool = False) -> Tensor:
        """Return x [B, S, heads, H] with RoPE on the first channels of each head, as many as the tables have.

        Interleaved pairs of channels become halves and stay so: products of queries and keys ignore the order. With
        `ordered` they go back to their places, where a norm has a weight for each channel.
        """
        cos, sin = self.rotary[rope]
        all_channels = rope.size == x.shape[-1]
        rotated = x if all_channels else x[..., : rope.size]  # [B, S, heads, R]
        if rope.interleaved:
            # The kernels know halves only.
            rotated = rearrange(rotated, "b s a (r two) -> b s a (two r)", two=2)
        rotated = self.kernels.rope(rotated, cos, sin)
        if rope.interleaved and ordered:
            rotated = rearrange(rotated, "b s a (two r) -> b s a (r two)", two=2)
        return rotated if all_channels else torch.cat((rotated, x[..., rope.size :]), dim=-1)

    def tokens_first(self) -> tuple[Tensor, Tensor] | None:
        """Return the order of each row's tokens with padding at its end, int64 [B, S], and their count [B].

        None where there is no padding.
        """
        if self.real is None:
            return None
        real = self.real.view(self.batch, self.seq)
        # A stable sort of one bit: the tokens keep their order. As uint8, since not every device sorts bool.
        return real.logical_not().to(torch.uint8).argsort(dim=1, stable=True), real.sum(1)

    def linear(self, module: nn.Module, x: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Return a te.Linear of x [N, I], [N, O]; it reuses its quantized weight where this pass allows it.

        The first rows of x are B sequences of S tokens; `shape` is (B, S), None: as in the pass.
        """
        if module not in self.autocasts.others:
            return self.run_linear(module, x, shape)
        self.recompute.check_restored(self.autocasts.te_recipe_of(module))
        with self.autocasts.linear(module):
            return self.run_linear(module, x, shape)

    def run_linear(self, module: nn.Module, x: Tensor, shape: tuple[int, int] | None) -> Tensor:
        """Return a te.Linear of x [N, I] in the autocast that is open; arguments as in `linear`."""
        first = self.recompute.first_microbatch
        batch, seq = (self.batch, self.seq) if shape is None else shape
        # A layer of peft in the linear's place may treat each sequence differently.
        if not getattr(module, "by_sequence", False) or batch * seq > x.shape[0]:
            y = self.kernels.linear(module, x, is_first_microbatch=first)
            return with_bias_gradient(y, module, self.autocasts.te_recipe_of(module))
        tokens = first_rows(x, batch * seq).unflatten(0, (batch, seq))
        y = module(tokens, is_first_microbatch=first)  # [B, S, O]
        return pad_rows(y.flatten(0, 1), x.shape[0])

    def neighbour(self, module: nn.Module | None) -> nn.Module | None:
        """Return a te.Linear for which a kernel beside it may write FP8; None if it has an autocast of its own."""
        return None if module in self.autocasts.others else module

    @property
    def step(self) -> DecodeKernels | None:
        """The kernels of a step of decoding, where this pass is one: a new token in each of a few rows of our cache."""
        if not isinstance(self.cache, DecodingCache) or self.cache.is_first:
            return None
        few_rows = self.batch <= MOST_ROWS and self.alignment <= MOST_ROWS
        if self.seq != 1 or not few_rows or self.real is not None:
            return None
        # They have no backward, and are not traced.
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return None
        return self.kernels.decode

    def linear_of_step(self, module: nn.Module) -> StepLinear | None:
        """Return a te.Linear as the kernels of `step` read it; None where the module has to run."""
        te_recipe = self.autocasts.te_recipe_of(module)
        cached = self.recompute.first_microbatch is False
        return step_linear(self.autocasts.te, module, te_recipe, cached)

    def norm_of_step(self, module: nn.Module) -> StepNorm | None:
        """Return a te.RMSNorm as the kernels of `step` compute it; None where the module has to run."""
        if type(module) is not self.autocasts.te.RMSNorm or not is_untouched(module):
            return None
        return StepNorm(module.weight, module.eps, module.zero_centered_gamma)

    def counts_on_device(self, *modules: nn.Module) -> bool:
        """Return whether all te.GroupedLinears take the number of rows of each expert as a tensor on the device."""
        for module in modules:
            te_recipe = self.autocasts.te_recipe_of(module)
            if not self.kernels.counts_on_device(module, te_recipe):
                return False
        return True

    def experts_join(self, *modules: nn.Module) -> bool:
        """Return whether `experts` takes these te.GroupedLinears; not if backward recomputes their activation."""
        # Each of the two would need an autocast of its own, and a recomputation needs what lies between them.
        apart = any(module in self.autocasts.others for module in modules)
        if apart or self.kernels.experts is None or self.recompute.mode == "selective":
            return False
        return self.kernels.experts_join(*modules)

    def experts(
        self,
        up: nn.Module,
        down: nn.Module,
        x: Tensor,
        *,
        gates: Tensor | None,
        rows: list[int] | Groups,
        route: Route | None,
        limit: float | None,
        alpha: float,
        padding: tuple[Tensor, int] | None,
    ) -> Tensor:
        """Return the result of two te.GroupedLinears and the operations between and around them.

        It is [T, D], the sums over the rows of each token, or without `gates` the rows [R, D].

        Args:
            up: makes the hidden states.
            down: reads them.
            x: the input of `up`: tokens [T, D] with a `route`, else the rows of the experts [R, D].
            gates: FP32 [T, k], the factors of a token's rows in their sum; None: rows are returned.
            rows: the numbers of rows of the experts.
            route: the way from tokens to rows and back.
            limit: the limit of a clamped SwiGLU; None: it has none.
            alpha: the factor in its sigmoid.
            padding: the token of each row, int64 [R], and the number of tokens: rows of no token have to give zeros.
                None: they may give anything.
        """
        assert self.kernels.experts is not None
        return self.kernels.experts(
            up=up,
            down=down,
            x=x,
            gates=gates,
            rows=rows,
            route=route,
            limit=limit,
            alpha=alpha,
            padding=padding,
            is_first_microbatch=self.recompute.first_microbatch,
        )

    def grouped(
        self, module: nn.Module, x: Tensor, rows: list[int] | Groups, route: Route | None = None
    ) -> Tensor:
        """Return a te.GroupedLinear of x [R, I], whose experts have these numbers of rows: [R, O].

        With `route`, x [T, I] are tokens, from which it makes those rows.
        """
        te_recipe = self.autocasts.te_recipe_of(module)
        refuse_lost_gradients(module, te_recipe)
        if module in self.autocasts.others:
            self.recompute.check_restored(te_recipe)
        with self.autocasts.linear(module):
            return self.kernels.grouped(
                module,
                x,
                rows,
                is_first_microbatch=self.recompute.first_microbatch,
                route=route,
            )


def forward_context(
    layers: tuple[LayerSpec, ...],
    ids: Tensor,
    cache: Cache | None,
    real: Tensor | None,
    documents: Tensor | None,
    recompute: Recompute,
    kernels: Kernels,
    fp8_layers: range,
    dtype: torch.dtype,
    autocasts: Autocasts,
    alignment: int = 1,
    share: TokenShare | None = None,
    ranks_alike: bool = False,
) -> ForwardContext:
    """Compute positions and masks of the newest tokens `ids` [B, S] (or [B, S, D]) of each row, on their device.

    `real` and `documents` [B, S] are Decoder.forward's attention_mask and document_ids, already checked. With
    `share` the rows are whole and the context is of its tokens.
    """
    batch, seq = ids.shape[:2]
    token_mask = _token_mask(real, ids.device)
    documents = None if documents is None else documents.to(ids.device)
    attentions = _attentions(layers)
    positions = cache.extend(seq, token_mask) if cache else None
    masks: dict[SeenKeys, Visible]
    if cache and positions is not None:
        # A cache with tokens knows which of its slots the new ones see.
        masks = {seen: cache.visible(seen) for seen in distinct(spec.seen for spec in attentions)}
    else:
        positions = _positions(seq, token_mask, documents, ids.device)
        masks = _masks(
            attentions, positions, token_mask, documents, kernels, dtype, share, recompute
        )
    real = None if token_mask is None else token_mask.reshape(-1, 1)  # [B*S, 1]
    routed = _routed(real, documents)  # [B*S, 1] or None
    if cache:
        documents = cache.documents
    # Made once per pass and kind of layer: all layers of a kind rotate by the same angles.
    ropes = distinct(spec.rope for spec in attentions)
    rotary = {rope: rotary_tables(rope, positions, dtype, documents) for rope in ropes}
    slots = _slots(cache, positions, documents, seq)
    context = ForwardContext(
        batch=batch,
        seq=seq,
        positions=positions,
        rotary=rotary,
        query_scales=_query_scales(attentions, positions, slots, dtype),
        cache=cache,
        masks=masks,
        real=real,
        routed=routed,
        documents=documents,
        recompute=recompute,
        kernels=kernels,
        fp8_layers=fp8_layers,
        autocasts=autocasts,
        routing=Routing(),
        alignment=alignment,
        shared_keys={},
        lent_keys={},
        ranks_alike=ranks_alike,
    )
    return context if share is None else _shared(context, share)


def _token_mask(real: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the attention_mask as bool [B, S]; None if it hides nothing: fast causal kernels take no mask."""
    if real is None or masks_nothing(real):
        return None
    return real.to(device, torch.bool)


def _routed(real: Tensor | None, documents: Tensor | None) -> Tensor | None:
    """Return which tokens experts may get, bool [B*S, 1]; None: all of them."""
    if documents is None:
        return real
    # Padding beside documents (below 0) needs no mask, since no document sees it. But no expert may get it: experts are
    # balanced by counts.
    return documents.reshape(-1, 1) >= 0


def _shared(context: ForwardContext, share: TokenShare) -> ForwardContext:
    """Return the context of this rank's tokens, from one of whole rows."""
    rows = (context.batch, context.seq)

    def local_values(x: Tensor | None) -> Tensor | None:
        """Return the values of this rank's tokens [B*S / ranks, 1], from one per token [B*S, 1]."""
        return None if x is None else share.local_tokens(x.view(rows), dim=1).reshape(-1, 1)

    rotary = {}
    for rope, (cos, sin) in context.rotary.items():
        rotary[rope] = (share.local_tokens(cos, dim=-2), share.local_tokens(sin, dim=-2))
    query_scales = {}
    for scale, factors in context.query_scales.items():
        query_scales[scale] = share.local_tokens(factors, dim=-1)
    documents = context.documents
    return context._replace(
        seq=share.row // share.size,
        positions=share.local_tokens(context.positions, dim=-1),
        rotary=rotary,
        query_scales=query_scales,
        real=local_values(context.real),
        routed=local_values(context.routed),
        documents=None if documents is None else share.local_tokens(documents, dim=1),
        share=share,
        # Without the keys of this pass, which would hold it as long as it holds them.
        whole=context._replace(shared_keys={}, lent_keys={}),
    )


def _documents_or_chunks(
    spec: SoftmaxAttentionSpec, positions: Tensor, documents: Tensor | None, seq: int
) -> Tensor | None:
    """Return the document of each token, or its chunk where attention stays inside chunks, int [B or 1, S]."""
    # One chunk that holds the whole row hides nothing; a compiled graph must not depend on the length.
    if spec.chunk is not None and (torch.compiler.is_compiling() or spec.chunk < seq):
        # A chunk is to attention what a document is.
        return torch.atleast_2d(chunk_numbers(positions, documents, spec.chunk))
    return documents


def _slots(cache: Cache | None, positions: Tensor, documents: Tensor | None, seq: int) -> Tensor:
    """Return the slot of each token in its row, padding counted: int64 [S] or [B, S]."""
    if documents is not None:
        return positions  # each document as if it had a row to itself
    if cache and cache.slots is not None:
        return cache.slots
    return torch.arange(seq, device=positions.device)


def _attentions(layers: Iterable[LayerSpec]) -> list[SoftmaxAttentionSpec]:
    """Return the different kinds of attention with a softmax; other mixers need neither masks nor angles."""
    kinds = []
    for layer in layers:
        for mixer in layer.mixers:
            if isinstance(mixer, SoftmaxAttentionSpec):
                kinds.append(mixer)
    return distinct(kinds)


def _masks(
    attentions: Iterable[SoftmaxAttentionSpec],
    positions: Tensor,
    token_mask: Tensor | None,
    documents: Tensor | None,
    kernels: Kernels,
    dtype: torch.dtype,
    share: TokenShare | None,
    recompute: Recompute,
) -> dict[SeenKeys, Visible]:
    """Return which keys each kind of attention sees in a pass without a cache, of tokens at `positions` [.., S]."""
    seq = positions.shape[-1]
    masks: dict[SeenKeys, Visible] = {}
    for spec in attentions:
        # Layers that see the same keys share a mask, which may be of S x S.
        if spec.seen in masks:
            continue
        pieces = _documents_or_chunks(spec, positions, documents, seq)
        if share is not None:
            masks[spec.seen] = SharedRows(share, spec.window, token_mask, pieces, recompute)
        else:
            masks[spec.seen] = _mask(
                spec,
                seq,
                token_mask=token_mask,
                documents=pieces,
                kernels=kernels,
                device=positions.device,
                dtype=dtype,
            )
    return masks


def _mask(
    spec: SoftmaxAttentionSpec,
    seq: int,
    token_mask: Tensor | None,
    documents: Tensor | None,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
) -> Visible:
    """Return which keys the queries of `spec` see in a pass without a cache.

    `documents` int [B or 1, S] number the documents of the tokens, or their chunks; None: each row is one.
    """
    spans = None if kernels.attention is None else kernels.attention.spans
    # A span is every key from a first one to the query; padding among them would need a mask.
    if token_mask is not None or dtype.itemsize != 2 or spec.heads.dim > WIDEST_SPANS:
        spans = None
    slides = spec.window is not None and spec.window < seq
    # Otherwise it is plain causal attention, which needs neither a span nor a mask.
    if spans is not None and (documents is not None or slides or spec.needs_spans):
        return spans(seq, spec.window, documents, device)
    return attention_mask(seq, spec.window, token_mask, documents, device)


def _query_scales(
    attentions: Iterable[SoftmaxAttentionSpec], positions: Tensor, slots: Tensor, dtype: torch.dtype
) -> dict[QueryScale, Tensor]:
    """Return the factors of queries of each kind of attention that has some."""
    scales = {}
    for scale in distinct(spec.query_scale for spec in attentions):
        scales[scale] = _query_scale(scale, positions, slots, dtype)
    return scales


def _query_scale(scale: QueryScale, positions: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor of each query in `dtype`, by its position (Ministral 3) or by its slot (Llama 4)."""
    count = slots + 1 if scale.by_slot else positions
    return (1 + scale.beta * torch.log(1.0 + count // scale.length)).to(dtype)


def _positions(
    seq: int, token_mask: Tensor | None, documents: Tensor | None, device: torch.device
) -> Tensor:
    """Return how many tokens of its row, or of its document, come before each token: int64 [S] or [B, S]."""
    if documents is not None:
        return positions_in_documents(documents)
    place = torch.arange(seq, device=device)
    return place if token_mask is None else (token_mask.cumsum(-1) - 1).clamp(min=0)
