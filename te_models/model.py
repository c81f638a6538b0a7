"""CausalLM: the decoder, read top to bottom, and what is done with it (recipes, saving, generation, its plan).

One enabled autocast lies round the FP8 layers and nothing else: the BF16 layers at the start and at the end are outside
it, so no autocast is ever nested and every scale is updated exactly once a step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from te_models.checkpointing import Recompute, check_mode, refuse_foreign_recompute
from te_models.config import ModelConfig, config_fields
from te_models.engine import check_support, engine_module, get_engine
from te_models.errors import unknown
from te_models.fp8_state import fp8_state, frozen_fp8_state, load_fp8_state
from te_models.generate import Prompts, generate, stream
from te_models.hf import Origin
from te_models.kernels import get_kernels
from te_models.kernels.attention import attention_kernel
from te_models.kernels.attention import attention_mask as visible_keys
from te_models.layers import Block, KVCache, Tokens, linear, norm_options, pad_rows, rotary_tables
from te_models.plan import Plan, PlanRow
from te_models.presets import get_preset
from te_models.recipe import Recipe, get_recipe, recipe_fields
from te_models.saved import read_pretrained, write_pretrained
from te_models.tensor_parallel import TensorParallel


class Output(NamedTuple):
    """loss FP32 scalar (None without labels) and logits [B, S, V] in the model's dtype."""

    loss: Tensor | None
    logits: Tensor


class CausalLM(nn.Module):
    """A decoder language model whose blocks are te.Linear and te.RMSNorm alone.

    Args:
        config: the shape.
        recipe: a name (`list_recipes()`), the path of a TOML file, a Recipe, or a Transformer Engine recipe object.
        engine: "auto" (native where a CUDA device and Transformer Engine are there, else emulated), "native", "emulated".
        device: where the parameters live; None is the first CUDA device if there is one, else the CPU.
        dtype: of parameters and activations.
        activation_checkpointing: "none", "selective", "full" or an integer N (see te_models.checkpointing).
        compile: fuse the operations between the GEMMs with torch.compile (on CUDA devices).
        initialize: False leaves the parameters without values, for a loader that fills them.
        materialize: False leaves them on the meta device, for te_models.distributed, which cuts them up before they take
            memory.
        tp_mesh: the ranks that share this model, a DeviceMesh of one dimension; each builds it (te_models.tensor_parallel).
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
        compile: bool = True,
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
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        _, self.engine, self.engine_reason = get_engine(engine, device)
        self.recipe = self._checked(get_recipe(recipe, **recipe_fields))
        self.te_recipe = self.recipe.build(self.te)
        self.compiled = compile and device.type == "cuda"
        self.amax_group: Any = None  # the processes that share their amaxes (DelayedScaling); None: all there are

        factory: dict[str, Any] = dict(device=device if materialize else torch.device("meta"), dtype=dtype)
        self.kernels = get_kernels(compile, device)
        self.embed_tokens = nn.utils.skip_init(nn.Embedding, config.vocab_size, config.hidden_size, **factory)
        self.layers = nn.ModuleList(
            Block(self.local_config, layer, self.te, self.kernels, self.tp, **factory)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = self.te.RMSNorm(config.hidden_size, **norm_options(config), **factory)
        self.lm_head = linear(self.te, config.hidden_size, config.vocab_size, **factory)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
            self.register_state_dict_post_hook(_leave_out_tie)
            self.register_load_state_dict_pre_hook(_restore_tie)
        self.origin = Origin()
        self._mark_fp8_blocks()
        self.tp.mark(self)
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
    ) -> Output:
        """Logits of every position, and the mean cross-entropy of predicting `labels` from the positions before them.

        Args:
            input_ids: int64 [B, S]; any B and S up to max_position_embeddings.
            labels: int64 [B, S], not shifted; -100 does not count.
            cache: positions seen before; the new ones are appended.
            attention_mask: [B, S], 1 for tokens and 0 for padding, which may lie on either side; None: no padding. The
                logits at padding mean nothing.
        """
        refuse_foreign_recompute(self.recipe.stateful)
        batch, seq = input_ids.shape
        start = cache.length if cache else 0
        if start + seq > self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence of {start + seq} tokens is longer than max_position_embeddings="
                f"{self.config.max_position_embeddings}: shorten it or raise that field"
            )
        tokens = self._tokens(batch, seq, cache, attention_mask)
        x = self.embed_tokens(input_ids).flatten(0, 1)
        logits = self._logits(x if tokens.real is None else x * tokens.real, tokens)
        logits = logits[: batch * seq].unflatten(0, (batch, seq))
        if labels is None:
            return Output(None, logits)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)  # shifting the labels spares a copy of the logits
        return Output(self.kernels.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)

    def _tokens(self, batch: int, seq: int, cache: KVCache | None, attention_mask: Tensor | None) -> Tokens:
        """Positions and masks of the newest `seq` tokens of each row."""
        start = cache.length if cache else 0
        if attention_mask is not None and attention_mask.shape != (batch, seq):
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}, input_ids [{batch}, {seq}]: give one entry a token"
            )
        padded = None
        if attention_mask is not None and not bool(attention_mask.all()):
            padded = attention_mask.to(self.device, torch.bool)
        real = cache.mask(padded, seq) if cache else padded
        if real is None:
            positions = torch.arange(start, start + seq, device=self.device)
        else:
            positions = (real.cumsum(-1) - 1).clamp(min=0)[:, start:]
        windows = {self.config.window(layer) for layer in range(self.config.num_hidden_layers)}
        masks = {w: visible_keys(seq, start + seq, w, real, self.device) for w in windows}
        cos, sin = rotary_tables(self.config, positions, self.dtype)
        recompute = Recompute(self.activation_checkpointing, self.te, self.te_recipe)
        return Tokens(batch, seq, cos, sin, cache, masks, None if padded is None else padded.reshape(-1, 1), recompute)

    def _logits(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [B*S, D] -> [N, V]."""
        fp8, layers = self.fp8_layers, list(enumerate(self.layers))
        x = self.tp.scatter(pad_rows(x, self.tp.rows(len(x), self._row_alignment)))
        for layer, block in layers[: fp8.start]:
            x = tokens.recompute.block(block, layer, x, tokens)
        with self._autocast():
            for layer, block in layers[fp8.start : fp8.stop]:
                x = tokens.recompute.block(block, layer, x, tokens)
            if self.recipe.lm_head == "fp8":
                return self._head(x)
        for layer, block in layers[fp8.stop :]:
            x = tokens.recompute.block(block, layer, x, tokens)
        return self._head(x)

    def _head(self, x: Tensor) -> Tensor:
        """x, this rank's rows [N, D] -> the logits of all rows [N, V]."""
        return self.lm_head(self.tp.gather(self.tp.norm(self.norm, x, self.tp.scatters)))

    @property
    def _row_alignment(self) -> int:
        """What the number of a rank's rows is a multiple of."""
        return self.recipe.scattered_row_alignment if self.tp.scatters else self.recipe.row_alignment

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

    def set_recipe(self, recipe: str | Path | Recipe | Any, **recipe_fields: Any) -> None:
        """Swap the recipe of the live model. Weights and gradients stay; the next forward runs under the new one.

        Between two stateful recipes of one format the scales and histories move along; otherwise they start afresh.
        """
        new = self._checked(get_recipe(recipe, **recipe_fields))
        keep = {}
        if new.stateful and self.recipe.stateful and new.formats == self.recipe.formats:
            keep = {name: tensor.clone() for name, tensor in fp8_state(self).items()}
        for module in self.modules():
            if isinstance(module, self.te.Linear):
                self.te.reset_fp8_state(module)
        self.recipe, self.te_recipe = new, new.build(self.te)
        self._mark_fp8_blocks()
        if keep:
            load_fp8_state(self, keep, self.te_recipe)

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

    def plan(self) -> Plan:
        """Which te.Linear runs in what precision, on which engine, and why."""
        rows, fp8 = [], self.fp8_layers
        for name, module in self.named_modules():
            if not isinstance(module, self.te.Linear):
                continue
            if name == "lm_head":
                layer, inside = "head", self.recipe.lm_head == "fp8" and self.recipe.quantized
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
        title = f"recipe {self.recipe.name}, engine {self.engine} ({self.engine_reason})"
        return Plan(title, tuple(rows))

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
        """Continue `input_ids`, [B, S] or lists of ids; returns [B, S + new]. Options: te_models.generate.stream."""
        return generate(self, input_ids, max_new_tokens, **options)

    def stream(self, input_ids: Prompts, max_new_tokens: int = 64, **options: Any) -> Iterator[Tensor]:
        """The new tokens of all rows, [B], one step at a time. Options: te_models.generate.stream."""
        return stream(self, input_ids, max_new_tokens, **options)

    def save_pretrained(self, folder: str | Path, format: str = "te") -> None:
        """Write the model into `folder`, atomically.

        `format` "te": config.json, model.safetensors, recipe.json and, for a stateful recipe, fp8_state.safetensors.
        "hf": what `transformers` loads, with the tokenizer that came along; the recipe has no place there.
        """
        write_pretrained(self, folder, format)

    @classmethod
    def from_preset(cls, name: str, *, build: Callable[..., CausalLM] | None = None, **options: Any) -> CausalLM:
        """A freshly initialised model: fields of the config and of the recipe and CausalLM's own keywords, mixed.

        `build`, here and in `from_pretrained`, makes it in place of CausalLM (te_models.distributed.Parallel.build).
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


def _leave_out_tie(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A tied table is in a state_dict once, as in Hugging Face's files: safetensors, and with it transformers.Trainer,
    saves no tensor under two names."""
    del state[f"{prefix}lm_head.weight"]


def _restore_tie(model: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """The other half of `_leave_out_tie`."""
    if f"{prefix}embed_tokens.weight" in state:
        state.setdefault(f"{prefix}lm_head.weight", state[f"{prefix}embed_tokens.weight"])


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config's fields, and the rest; a name that is neither the config's, the recipe's nor CausalLM's is an error."""
    config, own = config_fields(), ("recipe", "engine", "device", "dtype", "activation_checkpointing", "compile")
    known = {*config, *recipe_fields(), *own, "tp_mesh", "sequence_parallel"}
    for name in options:
        if name not in known:
            raise unknown("keyword", name, known)
    shape = {name: value for name, value in options.items() if name in config}
    return shape, {name: value for name, value in options.items() if name not in config}
