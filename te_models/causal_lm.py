"""CausalLM: the decoder, read top to bottom, and what is done with it (recipes, saving, generation, its plan).

One enabled autocast lies round the FP8 layers and nothing else: the BF16 layers at the start and at the end are outside
it, so no autocast is ever nested and every scale is updated exactly once a step.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from te_models.checkpoint.pretrained import read_pretrained, save_tie_once, write_pretrained
from te_models.config.model import ModelConfig, config_fields
from te_models.config.presets import get_preset
from te_models.config.recipe import Recipe, get_recipe, recipe_fields
from te_models.config.recompute_modes import check_mode
from te_models.engine import check_support, engine_module, get_engine
from te_models.errors import unknown
from te_models.fp8.primary_weights import check_recipe, clear_states, drop_transposed, relink, same_codes
from te_models.fp8.scaling_state import convert_scales, fp8_state, frozen_fp8_state, load_fp8_state
from te_models.generation.generate import Prompts, generate, stream
from te_models.interop.hf import Origin
from te_models.kernels.dispatch import PLAIN, get_kernels
from te_models.kernels.lm_head import linear_cross_entropy
from te_models.kernels.sdpa import attention_kernel
from te_models.model.forward_context import Tokens, describe
from te_models.model.kv_cache import KVCache
from te_models.model.layers import Block, linear, norm_options, pad_rows
from te_models.model.offload import HostMemory, Offload
from te_models.model.recompute import Recompute, refuse_foreign_recompute
from te_models.model.tensor_parallel import TensorParallel
from te_models.planning.memory_plan import MemoryPlan, plan_memory
from te_models.planning.precision_plan import PlanRow, PrecisionPlan


class Output(NamedTuple):
    """loss: FP32 scalar, None without labels; logits [B, S, V] in the model's dtype, None if not asked for."""

    loss: Tensor | None
    logits: Any


class CausalLM(nn.Module):
    """A decoder language model whose blocks are te.Linear and te.RMSNorm alone.

    Args:
        config: the shape.
        recipe: a name (`list_recipes()`), the path of a TOML file, a Recipe, or a Transformer Engine recipe object.
        engine: "auto" (native where a CUDA device and Transformer Engine are there, else emulated), "native", "emulated".
        device: where the parameters live; None is the first CUDA device if there is one, else the CPU.
        dtype: of parameters and activations.
        activation_checkpointing: "none", "selective", "full" or an integer N (see te_models.config.recompute_modes).
        activation_offload: what a block keeps for its backward waits in the host's memory meanwhile (te_models.model.offload).
        fp8_params: keep the weights of the FP8 layers as FP8 codes alone (see te_models.fp8.primary_weights).
        compile: fuse the operations between the GEMMs with torch.compile (on CUDA devices).
        fused: attention with RoPE and gate as one operation, where its heads allow it, and FP8 handed from module to module,
            where the engine can (te_models.kernels); None: on CUDA devices, but not with activation_offload, which moves
            no FP8 that was handed on.
        initialize: False leaves the parameters without values, for a loader that fills them.
        materialize: False leaves them on the meta device, for te_models.training.parallel, which cuts them up before they take
            memory.
        tp_mesh: the ranks that share this model, a DeviceMesh of one dimension; each builds it (te_models.model.tensor_parallel).
        sequence_parallel: divide the rows between those ranks too, where no GEMM needs all of them.
        recipe_fields: any field of the recipe, such as `amax_history_len=16` or `num_layers_at_end_in_bf16=2`.

    Raises:
        ValueError: for an unknown name or field, and for what this machine cannot give, with the reason.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        recipe: str | Path | Recipe | Any = "bf16",
        engine: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        activation_checkpointing: str | int = "none",
        activation_offload: bool = False,
        fp8_params: bool = False,
        compile: bool = True,
        fused: bool | None = None,
        initialize: bool = True,
        materialize: bool = True,
        tp_mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        **recipe_fields: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp = TensorParallel(tp_mesh, sequence_parallel)
        self.local_config = self.tp.local(config)
        self.activation_checkpointing = check_mode(activation_checkpointing)
        self.activation_offload, self.host_memory = activation_offload, HostMemory()
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        _, self.engine, self.engine_reason = get_engine(engine, device)
        self.recipe = self._checked(get_recipe(recipe, **recipe_fields))
        self.te_recipe = self.recipe.build(self.te)
        self.fp8_params = fp8_params
        if fp8_params:
            check_recipe(self.recipe)
        self.compiled = compile and device.type == "cuda"
        self.amax_group: Any = None  # the processes that share their amaxes (DelayedScaling); None: all there are

        factory: dict[str, Any] = dict(device=device if materialize else torch.device("meta"), dtype=dtype)
        fast = device.type == "cuda" and not activation_offload if fused is None else fused
        self.fused = fast and self.tp.size == 1
        self.kernels = get_kernels(self.te, device, compile=compile, fused=self.fused)
        self.embed_tokens = nn.utils.skip_init(nn.Embedding, config.vocab_size, config.hidden_size, **factory)
        self.layers = nn.ModuleList()
        for layer in range(config.num_hidden_layers):
            with self._weights(in_fp8=layer in self.fp8_layers):
                block = Block(self.local_config, layer, self.te, self.kernels, self.tp, **factory)
            self.layers.append(block)
        self.norm = self.te.RMSNorm(config.hidden_size, **norm_options(config), **factory)
        with self._weights(in_fp8=self._head_in_fp8 and not config.tie_word_embeddings):
            self.lm_head = linear(self.te, config.hidden_size, config.vocab_size, **factory)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
            save_tie_once(self)
        self.origin = Origin()
        self._mark_fp8_blocks()
        self.tp.mark(self)
        clear_states(self)
        drop_transposed(self)
        if initialize and factory["device"].type != "meta":
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Every initial value, in one place: normal(0, initializer_range), the projections back into the residual
        stream divided by sqrt(2 * layers) (Radford et al. 2019), the scales of norms 1, biases 0."""
        std = self.config.initializer_range
        residual = std / math.sqrt(2 * self.config.num_hidden_layers)
        self.tp.check_same_random_state(self.device)
        for name, parameter in self.named_parameters():
            with self.tp.filling(name, parameter, self.config) as values:
                if name.endswith("bias"):
                    values.zero_()
                elif "norm" in name:
                    values.fill_(0.0 if self.config.zero_centered_norm else 1.0)
                else:
                    values.normal_(0.0, residual if name.endswith(("o_proj.weight", "down_proj.weight")) else std)
        self.tp.mark(self)

    @contextlib.contextmanager
    def _weights(self, in_fp8: bool) -> Iterator[None]:
        """Inside, te.Linear makes its weight in FP8 if the model is to have FP8 primary weights and `in_fp8`."""
        if not (self.fp8_params and in_fp8):
            yield
            return
        with (
            torch.enable_grad(),
            self.te.quantized_model_init(  # both copies, also of a model built under no_grad
                enabled=True, recipe=self.te_recipe, preserve_high_precision_init_val=True
            ),
        ):
            yield

    @property
    def te(self) -> ModuleType:
        """The engine's namespace. Looked up, since a model that held a module could not be copied."""
        return engine_module(self.engine)

    @property
    def fp8_layers(self) -> range:
        """The layers that run inside the autocast; empty for BF16."""
        if not self.recipe.quantized:
            return range(0)
        count = self.config.num_hidden_layers
        return range(self.recipe.num_layers_at_start_in_bf16, count - self.recipe.num_layers_at_end_in_bf16)

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return self._table.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self._table.device

    @property
    def _table(self) -> Tensor:
        weight = self.embed_tokens.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
        return_logits: bool = True,
        logits_to_keep: int | None = None,
        document_ids: Tensor | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Output:
        """Logits of every position, and the mean cross-entropy of predicting `labels` from the positions before them.

        Args:
            input_ids: int64 [B, S]; any B and S up to max_position_embeddings.
            labels: int64 [B, S], not shifted; -100 does not count.
            cache: positions seen before; the new ones are appended.
            attention_mask: [B, S], 1 for tokens and 0 for padding, which may lie on either side; None: no padding. The
                logits at padding mean nothing.
            return_logits: False gives the loss alone: the head and its loss then run a piece at a time and the logits,
                often the largest tensors of a step, never exist.
            logits_to_keep: compute them for this many of the newest positions alone; not with labels.
            document_ids: int [B, S], which document of its row a token is of, each in one piece: attention stays inside
                it and positions count from its start, as if it were alone. None: each row is one document. Not with a
                cache or an attention_mask.
            is_first_microbatch: under gradient accumulation, True in the first micro-batch of a step, which quantizes
                the weights and keeps the result, False in the others, which use it (not if the weights have changed
                since); None quantizes them every time and keeps nothing.
        """
        refuse_foreign_recompute(self.recipe.stateful)
        batch, seq = input_ids.shape
        offload = Offload(self.host_memory, len(self.layers), input_ids.device) if self.activation_offload else None
        mode, weights = self.activation_checkpointing, self.fp8_params
        recompute = Recompute(mode, self.te, self.te_recipe, len(self.layers), is_first_microbatch, offload, weights)
        tokens = describe(self.config, input_ids, cache, attention_mask, document_ids, recompute, self.dtype)
        x = self.kernels.embedding(self.embed_tokens, input_ids).flatten(0, 1)
        x = x if tokens.real is None else x * tokens.real
        if labels is None:
            kept = seq if logits_to_keep is None else min(logits_to_keep, seq)
            logits = self._decode(x, tokens, lambda h: self._newest_logits(h, tokens, kept))
            return Output(None, logits[: batch * kept].unflatten(0, (batch, kept)))
        targets = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()  # shifting the labels spares a copy of the logits
        if not return_logits and self._head_is_fused:
            return Output(self._decode(x, tokens, lambda h: self._head_loss(h, targets)), None)
        logits = self._decode(x, tokens, lambda h: self.lm_head(h, **tokens.weights))[: batch * seq]
        loss = self.kernels.cross_entropy(logits, targets)
        return Output(loss, logits.unflatten(0, (batch, seq)) if return_logits else None)

    @property
    def _head_is_fused(self) -> bool:
        """Whether the head and its loss can run as one: a plain BF16 head can, an FP8 or an adapted one cannot."""
        return not self._head_in_fp8 and type(self.lm_head) is self.te.Linear

    @property
    def _head_in_fp8(self) -> bool:
        return self.recipe.quantized and self.recipe.lm_head == "fp8"

    def _head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """x [N, D], of which the rows after len(targets) are padding."""
        weight = self.lm_head.get_parameter("weight").to(x.dtype)
        x = x if len(x) == len(targets) else x[: len(targets)]  # the gradient of a slice is a copy
        return linear_cross_entropy(x, weight, targets, None, self.kernels.loss_and_gradient, self.kernels.multiply)

    def _decode(self, x: Tensor, tokens: Tokens, head: Callable[[Tensor], Tensor]) -> Tensor:
        """x [B*S, D] -> the head's result for the last hidden states [N, D]."""
        fp8, layers = self.fp8_layers, list(enumerate(self.layers))
        x = self.tp.scatter(self._padded(x))
        for layer, block in layers[: fp8.start]:
            x = tokens.recompute.block(block, layer, x, tokens)
        with self._autocast():
            for layer, block in layers[fp8.start : fp8.stop]:
                x = tokens.recompute.block(block, layer, x, tokens)
            if self._head_in_fp8:
                return head(self._normed(x))
        for layer, block in layers[fp8.stop :]:
            x = tokens.recompute.block(block, layer, x, tokens)
        return head(self._normed(x))

    def _normed(self, x: Tensor) -> Tensor:
        """x, this rank's rows [N, D] -> the head's input, all rows."""
        return self.tp.gather(self.tp.norm(self.norm, x, self.tp.scatters))

    @property
    def _row_alignment(self) -> int:
        """What the number of a rank's rows is a multiple of."""
        return self.recipe.scattered_row_alignment if self.tp.scatters else self.recipe.row_alignment

    def _newest_logits(self, x: Tensor, tokens: Tokens, kept: int) -> Tensor:
        """x [N, D] -> the logits [N', V] of the last `kept` positions of each row."""
        if kept < tokens.seq:
            x = x[: tokens.batch * tokens.seq].unflatten(0, (tokens.batch, tokens.seq))[:, -kept:]
            x = self._padded(x.flatten(0, 1))
        return self.lm_head(x, **tokens.weights)

    def _padded(self, x: Tensor) -> Tensor:
        """x [n, D] with rows of zeros up to a multiple of the recipe's alignment."""
        return pad_rows(x, self.tp.rows(len(x), self._row_alignment))

    @contextlib.contextmanager
    def _autocast(self) -> Any:
        """The one FP8 region. Outside training it must not touch the scales that training goes on with."""
        if not self.recipe.quantized:
            yield
            return
        training = self.training and torch.is_grad_enabled()
        guard = frozen_fp8_state(self) if self.recipe.stateful and not training else contextlib.nullcontext()
        with guard, self.te.autocast(enabled=True, recipe=self.te_recipe, amax_reduction_group=self.amax_group):
            yield

    @contextlib.contextmanager
    def unfused(self) -> Iterator[None]:
        """Inside, the model runs with plain kernels and passes BF16 between its modules."""
        owners = [module for module in self.modules() if hasattr(module, "kernels")]
        before = self.kernels
        for owner in owners:
            owner.kernels = PLAIN  # type: ignore[assignment]
        try:
            yield
        finally:
            for owner in owners:
                owner.kernels = before  # type: ignore[assignment]

    def set_recipe(self, recipe: str | Path | Recipe | Any, **recipe_fields: Any) -> None:
        """Swap the recipe of the live model. Weights and gradients stay; the next forward runs under the new one.

        Between two stateful recipes the scales and histories move along; otherwise they start afresh. FP8 primary weights
        stay as they are, which another kind of FP8 cannot use: that is a ValueError.
        """
        new = self._checked(get_recipe(recipe, **recipe_fields))
        if self.fp8_params:
            self._check_weights_fit(new)
        old, keep = self.recipe, {}
        if new.stateful and old.stateful:
            keep = {name: tensor.clone() for name, tensor in fp8_state(self).items()}
        for module in self.modules():
            if isinstance(module, self.te.Linear):
                self.te.reset_fp8_state(module)
        self.recipe, self.te_recipe = new, new.build(self.te)
        self._mark_fp8_blocks()
        relink(self, self.te_recipe)
        if keep:
            self.take_fp8_state(keep, old)

    def take_fp8_state(self, state: dict[str, Tensor], old: Recipe) -> int:
        """Go on with the scales and histories that `fp8_state` gave under the recipe `old`; returns how many were taken.

        Those of layers that do not run in FP8 now are not. A ValueError, before anything is written, if they do not fit.
        """
        if not self.recipe.stateful:
            return 0
        layers = (layer for layer in range(self.config.num_hidden_layers) if layer not in self.fp8_layers)
        outside = (*(f"layers.{layer}." for layer in layers), *(["lm_head."] if self.recipe.lm_head != "fp8" else []))
        taken = {name: tensor for name, tensor in state.items() if not name.startswith(outside)}
        load_fp8_state(self, taken, self.te_recipe)
        if taken and self.recipe != old:
            convert_scales(self, old, self.recipe)
        return len(taken)

    def _check_weights_fit(self, new: Recipe) -> None:
        """Refuse a recipe that FP8 primary weights are not made for."""
        edges = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "lm_head")
        if not same_codes(self.recipe, new) or any(getattr(self.recipe, e) != getattr(new, e) for e in edges):
            raise ValueError(
                f"the FP8 primary weights were made for recipe {self.recipe.name!r} and its layers, and {new.name!r} needs "
                "others: save the model and load it with from_pretrained(folder, recipe=..., fp8_params=True)"
            )

    def _mark_fp8_blocks(self) -> None:
        """Tell each block whether it belongs inside the autocast."""
        for layer, block in enumerate(self.layers):
            block.in_fp8 = layer in self.fp8_layers  # type: ignore[assignment]

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """Hugging Face's name (its Trainer calls it) for activation_checkpointing="full"; its options do not apply."""
        self.activation_checkpointing = "full"

    def gradient_checkpointing_disable(self) -> None:
        """Hugging Face's name for activation_checkpointing="none"."""
        self.activation_checkpointing = "none"

    def _checked(self, recipe: Recipe) -> Recipe:
        """The recipe, if this model can run it here."""
        check_support(self.te, self.engine, recipe)
        edges = recipe.num_layers_at_start_in_bf16 + recipe.num_layers_at_end_in_bf16
        if recipe.quantized and edges >= self.config.num_hidden_layers:
            raise ValueError(
                f"recipe {recipe.name!r} keeps {edges} layers in BF16 and the model has {self.config.num_hidden_layers}:"
                " nothing would run in FP8; lower num_layers_at_start_in_bf16 or num_layers_at_end_in_bf16"
            )
        self.tp.check_recipe(recipe)
        local = self.local_config
        sizes = dict(hidden_size=local.hidden_size, intermediate_size=local.intermediate_size)
        sizes |= {"num_attention_heads * head_dim": local.q_size, "q, k, v and gate": local.qkvg_size}
        if recipe.lm_head == "fp8":
            sizes["vocab_size"] = self.config.vocab_size
        for name, size in sizes.items():
            if size % recipe.feature_alignment:
                raise ValueError(
                    f"{name}={size}{self.tp.each} is not a multiple of {recipe.feature_alignment}, which the GEMMs of recipe "
                    f"{recipe.name!r} need: change it or use recipe='bf16'"
                )
        return recipe

    def plan(self) -> PrecisionPlan:
        """Which te.Linear runs in what precision, on which engine, and why."""
        rows, fp8 = [], self.fp8_layers
        for name, module in self.named_modules():
            if not isinstance(module, self.te.Linear):
                continue
            if name == "lm_head":
                layer, inside = "head", self._head_in_fp8
                reason = f"lm_head = {self.recipe.lm_head!r}"
            else:
                layer = name.split(".")[1]
                inside, reason = int(layer) in fp8, self._reason(int(layer))
            precision = f"{self.recipe.formats} {self.recipe.scheme}" if inside else "BF16"
            if not inside and self.dtype != torch.bfloat16:
                precision = str(self.dtype).removeprefix("torch.").upper()
            short = name.removeprefix(f"layers.{layer}.")
            gemm = f"{module.in_features} -> {module.out_features}"
            rows.append(PlanRow(layer, short, gemm, precision, self.engine, reason))
        weights = ", FP8 primary weights" if self.fp8_params else ""
        title = f"recipe {self.recipe.name}{weights}, engine {self.engine} ({self.engine_reason})"
        return PrecisionPlan(title, tuple(rows))

    def plan_memory(self, batch_size: int, seq_len: int, **options: Any) -> MemoryPlan:
        """The predicted memory of training this model on a GPU, and what fits where.

        Options: te_models.planning.memory_plan.plan_memory's; what the model knows of itself is taken unless said otherwise.
        """
        own = {name: getattr(self, name) for name in ("activation_checkpointing", "activation_offload", "fp8_params")}
        own |= dict(dtype_bytes=self.dtype.itemsize, batch_size=batch_size, seq_len=seq_len)
        return plan_memory(self.config, self.recipe, **{**own, **options})

    def _reason(self, layer: int) -> str:
        """Why this layer runs in what it runs in."""
        if not self.recipe.quantized:
            return f"recipe = {self.recipe.name!r}"
        if layer < self.fp8_layers.start:
            return f"num_layers_at_start_in_bf16 = {self.recipe.num_layers_at_start_in_bf16}"
        if layer >= self.fp8_layers.stop:
            return f"num_layers_at_end_in_bf16 = {self.recipe.num_layers_at_end_in_bf16}"
        return f"inside the autocast of {self.recipe.name!r}"

    def attention_kernel(self) -> str:
        """The attention kernel that runs first on the model's device."""
        return attention_kernel(self.device)

    def generate(self, input_ids: Prompts, max_new_tokens: int = 64, **options: Any) -> Tensor:
        """Continue `input_ids`, [B, S] or lists of ids; returns [B, S + new]. Options: te_models.generation.generate.stream."""
        return generate(self, input_ids, max_new_tokens, **options)

    def stream(self, input_ids: Prompts, max_new_tokens: int = 64, **options: Any) -> Iterator[Tensor]:
        """The new tokens of all rows, [B], one step at a time. Options: te_models.generation.generate.stream."""
        return stream(self, input_ids, max_new_tokens, **options)

    def save_pretrained(self, folder: str | Path, format: str = "te") -> None:
        """Write the model into `folder`, atomically.

        `format` "te": config.json, model.safetensors, recipe.json and, for a stateful recipe, fp8_state.safetensors.
        With FP8 primary weights, model.safetensors holds their dequantized values, so that the folder loads under any
        recipe, and fp8_weights.safetensors the codes and scales themselves.
        "hf": what `transformers` loads, with the tokenizer that came along; the recipe has no place there.
        """
        write_pretrained(self, folder, format)

    @classmethod
    def from_preset(cls, name: str, *, build: Callable[..., CausalLM] | None = None, **options: Any) -> CausalLM:
        """A freshly initialised model: fields of the config and of the recipe and CausalLM's own keywords, mixed.

        `build`, here and in `from_pretrained`, makes it in place of CausalLM (te_models.training.parallel.Parallel.build).
        """
        shape, rest = _split(options)
        return (build or cls)(get_preset(name, **shape), **rest)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, build: Callable[..., CausalLM] | None = None, **options: Any
    ) -> CausalLM:
        """The model in `folder`, of te-models or of Hugging Face, or the one of that name on the Hugging Face hub.

        Its own recipe (BF16 for one of Hugging Face) is used unless `recipe=` says another; further keywords as in
        CausalLM, and fields of the config. `attention_gate=` adds a gate to an ungated model: zero weights, which halve
        the attention's output, and a doubled o_proj, so that no output changes and the gate trains from there.

        The folder is checked whole before a model is built; a damaged one is a ValueError.
        """
        return read_pretrained(build or cls, folder, options)


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config's fields, and the rest; a name that is neither the config's, the recipe's nor CausalLM's is an error."""
    config = config_fields()
    own = {
        name for name in inspect.signature(CausalLM).parameters if name not in ("config", "initialize", "materialize")
    }
    known = {*config, *recipe_fields(), *own - {"recipe_fields"}}
    for name in options:
        if name not in known:
            raise unknown("keyword", name, known)
    shape = {name: value for name, value in options.items() if name in config}
    return shape, {name: value for name, value in options.items() if name not in config}
