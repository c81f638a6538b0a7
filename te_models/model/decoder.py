"""The decoder: embedding, blocks, norm and head, and the recipe that they run under.

One enabled autocast surrounds the layers that run under the model's recipe, and a te.Linear that runs in something else
than its surroundings has one of its own (te_models.fp8.region.Autocasts). The layers in BF16 are outside, whatever
autocast a caller opens around the model, and every scale is updated exactly once per training pass.
"""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from te_models.config.layer import LayerSpec
from te_models.config.model import ModelConfig
from te_models.config.options import RecipeOptions
from te_models.config.recipe import AUTO, RecipeLike
from te_models.config.recompute_modes import check_mode, offload_allows_fused
from te_models.device.autograd import refuse_second_derivatives
from te_models.device.choice import choose_device
from te_models.engine import get_engine
from te_models.fp8.primary_weights import check_recipe, clear_states
from te_models.fp8.region import Autocasts, forward_pass, preserve_scales_in_backward
from te_models.kernels.dispatch import compile_mode, get_kernels
from te_models.kernels.elementwise import rounded, scaled_logits
from te_models.kernels.lm_head import linear_cross_entropy, with_scaled_logits
from te_models.kernels.unit_norm import unit_norm
from te_models.model import live_recipe
from te_models.model.block import Block
from te_models.model.context_parallel import ContextParallel, TokenShare
from te_models.model.decoder_recipe import DecoderRecipe
from te_models.model.dtypes import given_dtype
from te_models.model.expert_parallel import ExpertParallel
from te_models.model.forward_context import ForwardContext, forward_context
from te_models.model.initial_values import set_initial_values
from te_models.model.inputs import (
    check_inputs,
    checked_tokens,
    known_ids,
    refuse_one_graph,
    refuse_unknown,
)
from te_models.model.kv_cache import Cache
from te_models.model.layer_inputs import LayerInputs
from te_models.model.offload import HostMemory, Offload
from te_models.model.output import Output, OutputRequest, with_routing
from te_models.model.recompute import Recompute, refuse_foreign_recompute
from te_models.model.targets import nan_if, next_token_targets
from te_models.model.te_modules import Factory, first_rows, pad_rows
from te_models.model.tensor_parallel import TensorParallel


@_disable_dynamo  # torch.compiler.disable would import TorchDynamo now, which takes a second
def _not_traced(
    model: Decoder,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    request: OutputRequest,
    cache: Cache | None,
    first_microbatch: bool | None,
) -> Output:
    """Run a pass under an FP8 recipe inside a user's torch.compile, which would trace it in many small pieces."""
    warnings.warn(
        "torch.compile leaves a model under an FP8 recipe as it is: on a GPU te-models compiles the operations between "
        "its GEMMs itself (compile=True)",
        stacklevel=4,
    )
    return model._pass(input_ids, inputs_embeds, request, cache, first_microbatch)


class Decoder(DecoderRecipe):
    """A decoder language model whose blocks consist of te.Linear and te.RMSNorm.

    Args:
        config: the shape.
        recipe: a name (`list_recipes()`), the path of a TOML file, a Recipe, or a Transformer Engine recipe object;
            "auto": FP8 where it saves time (te_models.model.recipe_fit.auto_recipe), which is logged with the reason.
        engine: "auto" or None (native where a CUDA device and Transformer Engine are, else emulated), "native" or
            "emulated".
        device: the device of the parameters; None is the first CUDA device if there is one, else the CPU.
        dtype: the dtype of parameters and activations, or its name; None and "auto": bfloat16.
        activation_checkpointing: "none", "selective", "full" or an integer N (te_models.config.recompute_modes).
        activation_offload: store the activations that a block saves for backward in host memory until then
            (te_models.model.offload).
        fp8_params: store the weights of the FP8 layers in FP8, without a BF16 copy (te_models.fp8.primary_weights).
        compile: fuse the operations between the GEMMs with torch.compile (on CUDA devices); "max-autotune" also times
            variants of each kernel and uses the fastest.
        fused: run attention with RoPE and gate as one operation, where its heads allow it, and pass FP8 from module to
            module, where the engine supports it (te_models.kernels.dispatch); None: on CUDA devices, but under
            activation_offload only if every block stores just its input, since offload does not move FP8 passed on.
        initialize: False leaves the parameters without values, for a loader that fills them.
        materialize: False leaves them on the meta device, for a caller that shards them before they take memory.
        tp_mesh: the ranks that share this model, a DeviceMesh of one dimension; each rank builds it
            (te_models.model.tensor_parallel).
        sequence_parallel: divide the rows between those ranks too, where no GEMM needs all of them.
        ep_mesh: the ranks that share the experts of this model, a DeviceMesh of one dimension; each rank builds it and
            passes it tokens of its own, all at the same time (te_models.model.expert_parallel).
        ep_fp8: send tokens to the ranks of their experts in FP8, with a scale per row.
        ep_replicas: the ranks that have the same experts, a DeviceMesh of one dimension; DelayedScaling needs it.
        cp_mesh: the ranks that share the tokens of each row, a DeviceMesh of one dimension; each rank builds the model
            and passes it the same rows. The loss is then the mean over this rank's tokens
            (te_models.model.context_parallel).
        amax_group: the processes that share their amaxes (DelayedScaling), but for experts; None: all of them.
        stored_linears: names of te.Linears and te.GroupedLinears whose weights stay as a release stores them
            (te_models.numerics.stored); from_pretrained gives them.
        recipe_options: any field of the recipe, such as `amax_history_len=16` or `num_layers_at_end_in_bf16=2`.

    Raises:
        UsageError: an unknown name or field, or a request that this machine cannot satisfy, with the reason.
    """

    # transformers' Trainer would pass num_items_in_batch to a forward with any keywords.
    accepts_loss_kwargs = False

    def __init__(
        self,
        config: ModelConfig,
        *,
        recipe: RecipeLike = AUTO,
        engine: str | None = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = torch.bfloat16,
        activation_checkpointing: str | int | None = "none",
        activation_offload: bool | None = False,
        fp8_params: bool | None = False,
        compile: bool | str | None = True,
        fused: bool | None = None,
        initialize: bool = True,
        materialize: bool = True,
        tp_mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        ep_mesh: DeviceMesh | None = None,
        ep_fp8: bool = False,
        ep_replicas: DeviceMesh | None = None,
        cp_mesh: DeviceMesh | None = None,
        amax_group: ProcessGroup | None = None,
        stored_linears: frozenset[str] = frozenset(),
        **recipe_options: Unpack[RecipeOptions],
    ) -> None:
        super().__init__()
        self.config = config
        # The factors of the routers' losses in training; a run may have others.
        self.router_losses = config.moe
        # The processes over whose tokens a run balances experts.
        self.router_group: ProcessGroup | None = None
        # Whether all ranks of ep_mesh have as many tokens in each pass, as in the steps of a CUDA graph.
        self.ranks_alike = False
        self.tp = TensorParallel(mesh=tp_mesh, sequence=sequence_parallel)
        self.ep = ExpertParallel(ep_mesh, config, ep_fp8, ep_replicas)
        # The layers as this rank holds them: fewer heads and channels by tp, fewer experts by ep.
        self.specs = self.ep.local(self.tp.local(config))
        self.cp = ContextParallel(cp_mesh)
        self.cp.check_layers(self.specs)
        self.activation_checkpointing = check_mode(activation_checkpointing)
        self.activation_offload = bool(activation_offload)
        self.host_memory = HostMemory()
        dtype = given_dtype(dtype) or torch.bfloat16
        device = choose_device(device)
        _, self.engine, self.engine_reason = get_engine(engine, device)
        self.fp8_params = bool(fp8_params)
        # Whether FP8 weights keep the values that they are made from on the CPU, for the masters of an optimizer.
        self.keeps_initial_values = True
        self.stored_linears = stored_linears
        if stored_linears:
            live_recipe.check_stored(self)
        # After the divisions and the engine: which recipe pays, and which fits, depends on the sizes of this rank.
        chosen, self.recipe_reason = live_recipe.choose(self, recipe, recipe_options, device, dtype)
        self.precision = self._checked(chosen)
        if self.fp8_params:
            check_recipe(self.recipe)
        self.compile_mode = compile_mode(True if compile is None else compile)
        self.amax_group = amax_group
        # On meta nothing has memory: FSDP2 shards the modules first, and a loader or init_weights fills the shards.
        where = device if materialize else torch.device("meta")
        self._make_modules(self._factory(where, dtype))
        self._choose_kernels(fused, device)
        if initialize and where.type != "meta":
            self.init_weights()

    def _choose_kernels(self, fused: bool | None, device: torch.device) -> None:
        """Set `fused` and the operations between the GEMMs on this device."""
        self.fused = self._runs_fused(fused, device)
        # No module holds them: a pass hands them on, so that `unfused` can take others for some passes.
        self.kernels = get_kernels(self.te, device, compile=self.compile_mode, fused=self.fused)

    def _factory(self, device: torch.device, dtype: torch.dtype) -> Factory:
        """Return the factory of the te modules, with what all of them share."""
        return Factory(
            te=self.te,
            tp=self.tp,
            ep=self.ep,
            eps=self.config.rms_norm_eps,
            zero_centered=self.config.zero_centered_norm,
            norm_type=self.config.norm_type,
            device=device,
            dtype=dtype,
            fp8_weights=self.precision.te_recipes if self.fp8_params else {},
            stored_linears=self.stored_linears,
        )

    def _runs_fused(self, fused: bool | None, device: torch.device) -> bool:
        """Return whether attention runs as one operation and FP8 passes from module to module."""
        if fused is None:
            fused = device.type == "cuda"
            if self.activation_offload:
                fused = fused and offload_allows_fused(self.activation_checkpointing)
        # Under tensor parallelism te.Linear communicates between the operations that `fused` would join.
        return fused and self.tp.size == 1

    def _make_block(self, spec: LayerSpec, layer: int, factory: Factory) -> nn.Module:
        return Block(spec, layer, factory, self.config.residual_multiplier)

    def _make_modules(self, factory: Factory) -> None:
        """Make the embedding, the blocks, the norm and the head, without values."""
        config = self.config
        table = torch.empty(
            config.vocab_size, config.hidden_size, device=factory.device, dtype=factory.dtype
        )
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        # 1.0 where the embedding is a ScaledEmbedding.
        self.embedding_multiplier = config.embedding_multiplier
        self.layer_inputs = None
        if config.layer_inputs is not None:
            self.layer_inputs = LayerInputs(
                config.layer_inputs, config.num_hidden_layers, config.hidden_size, factory
            )
        self.layers = nn.ModuleList()
        for layer, spec in enumerate(self.specs):
            self.layers.append(self._make_block(spec, layer, factory))
        # None: as all norms of the model; some families store gamma - 1 everywhere but here.
        plain = False if config.plain_final_norm else None
        self.norm = factory.residual_norm(config.hidden_size, zero_centered=plain)
        self.lm_head = factory.linear(config.head, fp8_weight=not config.tie_word_embeddings)
        # One Parameter under two names: gradients of both uses add up in it.
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.tp.mark(self, config)
        clear_states(self)

    def init_weights(self) -> None:
        """Set every initial value (te_models.model.initial_values)."""
        set_initial_values(self)

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        return_logits: bool = True,
        logits_to_keep: int | None = None,
        document_ids: Tensor | None = None,
        is_first_microbatch: bool | None = None,
        inputs_embeds: Tensor | None = None,
        **others: object,
    ) -> Output:
        """Return the logits of every position and the mean cross-entropy of predicting `labels` from earlier tokens.

        Args:
            input_ids: int64 [B, S]; any B and S up to max_position_embeddings. None with inputs_embeds. Ids outside the
                vocabulary are an error on a CPU; on a GPU they make the loss NaN, and without labels PyTorch fails.
            labels: int64 [B, S], not shifted; -100 is not counted, nor is a target predicted from padding. Other labels
                outside the vocabulary are an error on a CPU; on a GPU they make the loss NaN.
            cache: positions seen before; the new ones are appended.
            attention_mask: [B, S], 1 for tokens and 0 for padding, which may be anywhere; None: no padding. Positions
                and sliding windows count tokens alone. The logits at padding are meaningless.
            return_logits: False returns only the loss: the head and its loss then run in chunks, and the logits, often
                the largest tensor of a step, are never stored as a whole.
            logits_to_keep: compute the logits of this many of the newest positions only; not with labels.
            document_ids: int [B, S], the document that each token of a row belongs to, each in one piece: attention
                stays inside it and positions count from its start, as if it had a row to itself, so that a row may be
                longer than max_position_embeddings where no document is. Below 0: padding. None: each row is one
                document. Not with a cache or an attention_mask.
            is_first_microbatch: under gradient accumulation, True in the first micro-batch of a step, which quantizes
                the weights and caches the result, False in the others, which use it (unless the weights have changed
                since); None quantizes them every time and caches nothing.
            inputs_embeds: [B, S, D], vectors to use in place of the embeddings of input_ids.

        Raises:
            UsageError: an argument is unknown, out of range, or of the wrong shape or dtype.
        """
        refuse_unknown(others)
        refuse_one_graph(self.recipe.quantized)
        request = OutputRequest(labels, attention_mask, document_ids, return_logits, logits_to_keep)
        if self.recipe.quantized and torch.compiler.is_compiling():
            return _not_traced(self, input_ids, inputs_embeds, request, cache, is_first_microbatch)
        return self._pass(input_ids, inputs_embeds, request, cache, is_first_microbatch)

    def _pass(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        request: OutputRequest,
        cache: Cache | None,
        first_microbatch: bool | None,
    ) -> Output:
        """Run one pass: its arguments are checked, embedded, padded and decoded; `forward` documents them."""
        # torch.utils.checkpoint around the whole model would recompute with scales that have moved on.
        refuse_foreign_recompute(self.recipe.stateful)
        tokens = checked_tokens(self.config, input_ids, inputs_embeds, self.device)
        check_inputs(
            self.config,
            tokens,
            request.labels,
            cache,
            request.attention_mask,
            request.document_ids,
            request.logits_to_keep,
        )
        has_loss = request.labels is not None
        if has_loss:
            self.warn_of_fp16_gradients()
        unknown = None
        if has_loss and input_ids is not None and tokens.device.type != "cpu":
            # Testing the ids on the host would wait for the device; unknown ones make the loss NaN instead.
            tokens, unknown = known_ids(tokens, self.config.vocab_size)
        share = None
        if has_loss and not request.return_logits:
            share = self.cp.share(tokens.shape[1])
        whole = tokens
        if share is not None:
            whole, request = share.filled(tokens, request)
            tokens = share.local_tokens(whole, dim=1)
        # FP8 GEMMs need a multiple of 8 or 16 rows (32 with MXFP8): rows of zeros are added once for all layers, not
        # per linear.
        with self.te.row_padding(self, tokens, self.recipe.row_alignment) as alignment:
            context = self._context(whole, request, cache, first_microbatch, alignment, share)
            with forward_pass(self, self.te, self.recipe, self.te_recipe, self._table):
                evaluated = not self.training
                # Read once inside the lock: another thread may start an evaluation at any time.
                losses = None if evaluated else self.router_losses
                decoded = self._decode(tokens, context, request)
                if decoded.loss is not None and unknown is not None:
                    decoded = decoded._replace(loss=nan_if(decoded.loss, unknown))
                output = with_routing(decoded, request, context.routing, losses, self.router_group)
        if self.recipe.stateful and evaluated:
            # Its backward, if there is one, may not count into the histories either.
            preserve_scales_in_backward(self, output.tensors)
        refuse_second_derivatives(output.tensors)
        return output

    def _context(
        self,
        tokens: Tensor,
        request: OutputRequest,
        cache: Cache | None,
        first_microbatch: bool | None,
        alignment: int,
        share: TokenShare | None,
    ) -> ForwardContext:
        """Describe the pass over ids [B, S] or vectors [B, S, D] that begins, whose rows are padded to `alignment`.

        With `share` it is over this rank's tokens of them.
        """
        offload = None
        if self.activation_offload:
            offload = Offload(self.host_memory, len(self.layers), tokens.device)
        recompute = Recompute(
            self.activation_checkpointing,
            te=self.te,
            te_recipe=self.te_recipe,
            layers=len(self.layers),
            first_microbatch=first_microbatch,
            offload=offload,
            fp8_weights=self.fp8_params,
            lock=self.te.region_lock(self, self.recipe.quantized),
            mixed=bool(self.precision.others),
        )
        # The te.Linears that run in something else than their surroundings.
        others = {}
        for name in self.precision.others:
            group = self.ep.amax_group(name, self.amax_group)
            others[self.get_submodule(name)] = (self.precision.te_recipes[name], group)
        return forward_context(
            self.specs,
            tokens,
            cache=cache,
            real=request.attention_mask,
            documents=request.document_ids,
            recompute=recompute,
            kernels=self.kernels,
            fp8_layers=self.fp8_layers,
            dtype=self.dtype,
            autocasts=Autocasts(self.te, self.te_recipe, self.amax_group, others),
            alignment=alignment,
            share=share,
            ranks_alike=self.ranks_alike,
        )

    def _decode(self, tokens: Tensor, context: ForwardContext, request: OutputRequest) -> Output:
        """Pass ids [B, S] or vectors [B, S, D] through all blocks and the head."""
        fp8 = self.fp8_layers
        x = self._padded(self._embedded(tokens, context), context)
        if self.layer_inputs is not None:
            context = context._replace(layer_inputs=self.layer_inputs(tokens, x, context))
        # Sequence parallelism: from here to the head each rank has its share of the rows, x [N / ranks, D].
        x = self.tp.scatter(x)
        # Blocks before the FP8 range run outside the autocast, in BF16.
        x = self._run(range(fp8.start), x, context)
        autocast: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if fp8 or self.recipe.head_in_fp8:
            autocast = context.autocasts.layers()
        with autocast:
            x = self._run(fp8, x, context)
            if self.recipe.head_in_fp8:
                return self._output(x, context, request)
        x = self._run(range(fp8.stop, len(self.layers)), x, context)
        return self._output(x, context, request)

    def _embedded(self, tokens: Tensor, context: ForwardContext) -> Tensor:
        """Return ids [B, S] or vectors [B, S, D] as [B*S, D], zero at padding."""
        x = tokens
        if tokens.dim() == 2:
            x = self.kernels.embedding(self.embed_tokens, tokens)  # [B, S, D]
        # One matrix for all GEMMs: te layers flatten anyway, and padding of rows stands at the end of all of them.
        x = x.flatten(0, 1)  # [B*S, D]
        if self.config.embedding_norm:
            x = unit_norm(x, self.config.rms_norm_eps)
        if self.embedding_multiplier != 1:
            x = x * rounded(self.embedding_multiplier, self.dtype)
        return x if context.real is None else x * context.real

    def _run(self, layers: range, x: Tensor, context: ForwardContext) -> Tensor:
        """Pass x [N, D] through these blocks."""
        for layer in layers:
            run_context = context
            if self.config.shared_key_layers is not None:
                # Copies: what a recompute holds may not lead to what it makes, or the pass would hold itself.
                run_context = context._replace(shared_keys=dict(context.shared_keys), lent_keys={})
            x = context.recompute.run_block(self.layers[layer], layer, x, run_context)
            context.shared_keys.update(run_context.lent_keys)
            run_context.lent_keys.clear()
        return x

    def _output(self, x: Tensor, context: ForwardContext, request: OutputRequest) -> Output:
        """Return norm, head and loss of the last hidden states x [N, D]."""
        batch = context.batch
        seq = context.seq
        refuse_second_derivatives([x])  # here too: a caller may begin at the hidden states
        # [N, D]; sequence parallelism divides the rows up to here, but the head needs all of them.
        h = self.tp.gather(self.tp.norm(self.norm, x, self.tp.scatters))  # the rows of all ranks
        if request.labels is None:
            count = seq if request.logits_to_keep is None else min(request.logits_to_keep, seq)
            # Generation reads the newest position only: a head over all of a prompt would be wasted.
            # The head's alignment pads these rows anew, hence the slice below.
            logits = self._logits(self._newest(h, context, count), (batch, count), context)
            return Output(None, logits[: batch * count].unflatten(0, (batch, count)))
        size = self.config.vocab_size
        targets, invalid = next_token_targets(
            request.labels, request.attention_mask, size, request.document_ids
        )
        if context.share is not None:
            targets = context.share.local_tokens(targets.view(batch, -1), dim=1).flatten()
        # The head is neither in FP8 nor adapted.
        plain = self.precision.head.recipe is None and isinstance(self.lm_head, self.te.Linear)
        # A head in FP8 or with adapters has a forward of its own, which makes whole logits.
        if not request.return_logits and plain:
            return Output(nan_if(self._fused_loss(h, targets), invalid), None)
        logits = first_rows(self._logits(h, (batch, seq), context), batch * seq)
        loss = nan_if(self.kernels.cross_entropy(logits, targets), invalid)
        return Output(loss, logits.unflatten(0, (batch, seq)) if request.return_logits else None)

    def _logits(self, h: Tensor, shape: tuple[int, int], context: ForwardContext) -> Tensor:
        """Return the logits [N, V] of h [N, D], whose first rows are B sequences of S tokens, `shape` (B, S)."""
        with context.autocasts.linear(self.lm_head):
            logits = context.run_linear(self.lm_head, h, shape)
        return scaled_logits(
            logits, self.config.logits_scaling, self.config.final_logit_softcapping
        )

    def _fused_loss(self, h: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of h [N, D], of which the rows after len(targets) are padding."""
        weight = self.lm_head.get_parameter("weight").to(h.dtype)
        h = h if len(h) == len(targets) else h[: len(targets)]  # the gradient of a slice is a copy
        kernel = with_scaled_logits(
            self.kernels.loss_and_gradient,
            divisor=self.config.logits_scaling,
            cap=self.config.final_logit_softcapping,
        )
        return linear_cross_entropy(
            h, weight, targets, kernel=kernel, multiply=self.kernels.multiply
        )

    def _newest(self, h: Tensor, context: ForwardContext, count: int) -> Tensor:
        """Return the rows of h [N, D] of the newest `count` positions of each sequence, padded."""
        if count == context.seq:
            return h
        h = h[: context.batch * context.seq].unflatten(0, (context.batch, context.seq))[:, -count:]
        return self._padded(h.flatten(0, 1), context)

    def _padded(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return x [n, D] with rows of zeros up to a multiple of the pass's alignment, on each rank."""
        alignment = self.recipe.scattered_row_alignment if self.tp.scatters else context.alignment
        return pad_rows(x, self.tp.rows(x.shape[0], alignment))
