"""TEModelsForCausalLM: a CausalLM as a model of transformers, for generate, pipelines, Trainer, TRL and others.

It adds no parameters and computes nothing itself: arguments are as in transformers' decoders, the work is the
Decoder's.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from te_models.causal_lm import CausalLM
from te_models.errors import UsageError
from te_models.files.formats import Fields, parse_size
from te_models.fp8.kept_weights import WeightReuse, reused_weights
from te_models.fp8.region import is_trained, saving
from te_models.huggingface.adapters import (
    HiddenNames,
    is_multimodal,
    mark_adapters,
    names_in_files,
    place_adapters,
    show_embedding,
    show_linears,
    take_away,
)
from te_models.huggingface.backbone import Backbone, hidden_states, refuse_unknown
from te_models.huggingface.config import TEModelsConfig
from te_models.huggingface.interface import ModelInterface
from te_models.huggingface.logits import checked_targets, kept_logits, label_loss
from te_models.huggingface.prompts import angles_change, check_prompt
from te_models.huggingface.reference import name_attention
from te_models.huggingface.saving import (
    MULTIMODAL,
    add_prefix,
    inside_multimodal,
    leave_out_empty,
    name_adapted_head,
    save_model,
    text_names,
)
from te_models.huggingface.seen_keys import seen_keys
from te_models.huggingface.stated_outputs import OUTPUTS, note_outputs, stated_outputs
from te_models.interop.hf import hugging_face_documents
from te_models.interop.hub import local_folder, split_options
from te_models.interop.remote_code.cache_name_te_models import CACHE, CACHES, cache_by_either_name
from te_models.model.inputs import check_labels, checked_tokens
from te_models.model.router import RoutingReport
from te_models.model.targets import IGNORED
from te_models.saving.pretrained import refuse_pickle


class TEModelsForCausalLM(ModelInterface, GenerationMixin):
    """A CausalLM with transformers' interface.

    Args:
        config: shape and build options of a new model with fresh weights.
        model: use this model, of the same shape, instead of building one.

    Attributes:
        model: the CausalLM, with its own methods, such as `plan`, `set_recipe` and a `generate` that uses CUDA graphs.
    """

    config_class = TEModelsConfig
    base_model_prefix = "model"
    # Read by accelerate: the parts of a Block stay on one device, and caches are not moved between devices.
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = [*CACHES]
    _tied_weights_keys = {"model.lm_head.weight": "model.embed_tokens.weight"}
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    # Trainer then divides by the tokens of all micro-batches (num_items_in_batch).
    accepts_loss_kwargs = True

    def __init__(
        self, config: TEModelsConfig, model: CausalLM | None = None, **options: Any
    ) -> None:
        super().__init__(config)
        if model is None:
            build_options = config.build_options()
            # transformers builds a model without memory inside a context with "meta" as the default device.
            build_options.setdefault(
                "device", "meta" if torch.get_default_device().type == "meta" else None
            )
            chosen = {**build_options, **options}
            keywords = {name: value for name, value in chosen.items() if value is not None}
            model = CausalLM(config.model_config(), **keywords)
        self.model = model
        self._hidden = HiddenNames.of(model)
        self._rows = show_linears(model)
        self._adapters: tuple[str, ...] = ()
        show_embedding(model)
        if model.origin.generation is not None:
            self.generation_config = GenerationConfig.from_dict(dict(model.origin.generation))
        # Modules that peft copies for modules_to_save, looking for the names of their state.
        copied = (model.te.RMSNorm, model.te.LayerNormWithoutBias, model.te.Linear)
        for module in (self, *(module for module in model.modules() if isinstance(module, copied))):
            module.register_state_dict_post_hook(leave_out_empty)
        self.register_state_dict_post_hook(name_adapted_head)
        self.register_load_state_dict_pre_hook(add_prefix)
        self._multimodal = is_multimodal(model)
        if self._multimodal:
            self.register_state_dict_post_hook(inside_multimodal)
            self._tied_weights_keys = {"model.lm_head.weight": f"{MULTIMODAL}embed_tokens.weight"}
        # Read by peft: adapters of the text class and of the multimodal one are adapters of this model.
        self._checkpoint_conversion_mapping = {
            **text_names(self._multimodal),
            **names_in_files(model),
        }
        # The quantized weights of the generation under way in each thread.
        self._weights: dict[int, WeightReuse] = {}
        self.post_init()
        name_attention(self.config)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; `peft_config` is set by peft, once it has placed an adapter."""
        if name == "lm_head":  # by peft, under the name that transformers has
            self.model.lm_head = value
            return
        super().__setattr__(name, value)
        if name == "peft_config":
            place_adapters(self.model, self._rows, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute; `peft_config` is deleted by peft, once it has unloaded its layers."""
        super().__delattr__(name)
        if name == "peft_config":
            take_away(self.model)

    def _mark_new_adapters(self) -> None:
        """Mark the layers of adapters that were added after the first, of which peft says nothing."""
        adapters = tuple(getattr(self, "peft_config", ()))
        if adapters != self._adapters and not torch.compiler.is_compiling():
            mark_adapters(self.model)
            self._adapters = adapters

    @classmethod
    def wrap(cls, model: CausalLM) -> TEModelsForCausalLM:
        """Return `model` with transformers' interface; both share all weights."""
        config = TEModelsConfig.of(getattr(model, "config", None))  # refuses other modules
        config.dtype = model.dtype
        for name, value in stated_outputs(model).items():
            setattr(config, name, value)
        return cls(config, model)

    @classmethod
    def _from_config(cls, config: TEModelsConfig, **options: Any) -> TEModelsForCausalLM:
        """Build a model with fresh weights; AutoModelForCausalLM.from_config calls it."""
        # AutoModel passes on which attention was asked for; the kernels of a Decoder are chosen elsewhere.
        options = {name: value for name, value in options.items() if name != "attn_implementation"}
        return cls(config, **options)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *others: object,
        config: TEModelsConfig | None = None,
        **options: Any,
    ) -> TEModelsForCausalLM:
        """Load a folder, or a model of the hub, as CausalLM.from_pretrained does, which documents options and errors.

        Args:
            folder: in our format or in Hugging Face's, also the checkpoint of a Trainer. Adapters in it are merged.
            config: fields in which it differs from the config of the folder are options.
            options: also `generation_config`, and `use_cache`, `output_hidden_states` and `return_dict`, which become
                the config's.
        """
        # AutoModel and pipelines add these for themselves; they say nothing about the model.
        internal = ("_from_auto", "adapter_kwargs", "_from_pipeline", "code_revision")
        changed_fields = {}
        for name, value in options.items():
            if name not in internal and value is not None:
                changed_fields[name] = value
        generation = changed_fields.pop("generation_config", None)
        outputs = {name: changed_fields.pop(name) for name in OUTPUTS if name in changed_fields}
        hub, model_options = split_options(changed_fields)
        path = local_folder(folder, **hub)
        if config is not None:
            model_options = {**config.build_options(), **_changed(config, path), **model_options}
        model_options.setdefault("merge_adapters", True)  # clients add adapters of peft's own kind
        model = cls.wrap(CausalLM.from_pretrained(path, **model_options))
        model.name_or_path = model.config._name_or_path = str(folder)
        model.generation_config = generation or model.generation_config
        for name, value in outputs.items():
            setattr(model.config, name, value)
        # In evaluation mode, as transformers returns a loaded model.
        return model.eval()

    @cache_by_either_name
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_router_logits: bool | None = None,
        **loss_options: Tensor,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast | tuple[object, ...]:
        """Logits, and the loss if there are labels, as transformers' decoders compute them.

        Args:
            input_ids: int64 [B, S].
            attention_mask: [B, past + S], 0 at padding on either side; or [B, 1, S, past + S], bool or additive. Of
                padding between tokens a sliding window counts none, as in transformers' FlashAttention, which removes
                it first; transformers' other implementations count it.
            position_ids: int64 [B or 1, S], positions for RoPE. Without mask and cache, a position that does not follow
                the one before it begins a new document, outside of which attention sees nothing.
            cache: a cache of transformers, which is extended; also as `past_key_values`.
            inputs_embeds: [B, S, D] instead of input_ids, as `get_input_embeddings()` returns them: Gemma's are scaled.
            labels: int64 [B, S], not shifted; -100 is not counted, nor is what padding would predict.
            use_cache: return a cache; by default in evaluation without labels, if the config says so.
            logits_to_keep: compute the logits of this many of the newest positions (0: of all), or of these positions.
            output_hidden_states: return the embeddings, the outputs of all blocks but the last, and the norm's.
            output_attentions: not supported.
            return_dict: False returns a tuple.
            num_items_in_batch: divide the summed loss by this number instead of the number of labels that count.
            output_router_logits: with experts and no cache, return the load-balancing loss as `aux_loss` (but no
                logits) and add it to the loss, if there are labels, by the factor in the config.
            loss_options: `shift_labels`, int64 [B, S], labels that are shifted already. (A Trainer assumes that
                each batch has every argument with "label" in its name.)

        Raises:
            UsageError: arguments that the model does not support.
        """
        if self._chosen("output_attentions", output_attentions):
            raise UsageError(
                "attention weights are never computed as a whole: leave out output_attentions"
            )
        shift_labels = loss_options.pop("shift_labels", None)
        refuse_unknown(loss_options)
        self._mark_new_adapters()
        tokens = self.tokens(input_ids, inputs_embeds, labels, shift_labels)
        wants_loss = labels is not None or shift_labels is not None
        if wants_loss:
            self.model.warn_of_fp16_gradients()
        cache = self._past(cache, use_cache, wants_loss)
        passed = self.attention(tokens, attention_mask, position_ids, cache)
        # Before anything runs: a pass in training moves the scales of delayed scaling.
        targets = checked_targets(self.model.config, labels, shift_labels, attention_mask)
        if isinstance(logits_to_keep, int) and logits_to_keep:
            passed["logits_to_keep"] = logits_to_keep
        if self._chosen("output_router_logits", output_router_logits) and cache is None:
            # With labels, even ignored ones, the model reports routing.
            passed["labels"] = tokens.new_full(tokens.shape[:2], IGNORED, dtype=torch.int64)
        logits, routing, hidden = self._run_model(
            input_ids,
            inputs_embeds,
            shape=tokens.shape,
            with_hidden=self._chosen("output_hidden_states", output_hidden_states),
            **passed,
        )
        logits = kept_logits(logits, logits_to_keep)
        loss = None
        if targets is not None:
            loss = label_loss(self.model, logits, targets, num_items_in_batch)
        output = self._output(loss, logits, cache, hidden or None, routing)
        if self._chosen("return_dict", return_dict):
            return output
        return output.to_tuple()

    def _run_model(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        *,
        shape: torch.Size,
        with_hidden: bool,
        **passed: Any,
    ) -> tuple[Any, RoutingReport | None, tuple[Tensor, ...]]:
        """Return the logits, the routing, and with `with_hidden` the hidden states [B, S, D] of a pass over tokens.

        `shape` begins with the tokens' [B, S]; `passed` are other arguments of CausalLM.
        """
        before: list[nn.Module] = []
        after: list[nn.Module] = []
        if with_hidden:
            before = [self.model.layers[0]]
            # transformers shows the last block's output only after the norm.
            after = [*self.model.layers[:-1], self.model.norm]
        weights = self._weights.get(threading.get_ident())
        first = None if weights is None else not weights.ready
        with hidden_states(before, after, shape) as hidden:
            _, logits, routing = self.model(
                input_ids, inputs_embeds=inputs_embeds, is_first_microbatch=first, **passed
            )
        if weights is not None:
            weights.note_pass()
        return logits, routing, tuple(hidden)

    def _output(
        self,
        loss: Tensor | None,
        logits: Tensor,
        cache: Cache | None,
        states: tuple[Tensor, ...] | None,
        routing: RoutingReport | None,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Return the output of `forward`; with `routing`, its balance loss too, which is added to a loss by labels."""
        if routing is None or self.model.config.moe is None:
            return CausalLMOutputWithPast(loss, logits, cache, states)
        moe = replace(self.model.config.moe, router_aux_loss_coef=self.config.router_aux_loss_coef)
        if loss is not None:
            loss = loss + routing.loss(moe)
        return MoeCausalLMOutputWithPast(loss, routing.balance_loss, logits, cache, states)

    def _chosen(self, name: str, value: bool | None) -> bool:
        """Return the value of an option of `forward`, which the config has where it is None."""
        return getattr(self.config, name) if value is None else value

    def calibrate(
        self, *batches: Mapping[str, Tensor], weights: Sequence[Tensor | float] | None = None
    ) -> None:
        """Measure the first scales of recipe "delayed" before a Trainer runs; see CausalLM.calibrate."""
        self.model.calibrate(*batches, weights=weights)

    @property
    def base_model(self) -> Backbone:
        """The model without its head; TRL calls it, and multiplies by the head's weight a piece at a time."""
        return Backbone(self)

    def tokens(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, *labels: Tensor | None
    ) -> Tensor:
        """Return the argument that is given, checked beside labels [B, S]."""
        ids = input_ids if inputs_embeds is None else None
        tokens = checked_tokens(self.model.config, ids, inputs_embeds, self.model.device)
        for targets in labels:
            check_labels(tokens, targets)
        return tokens

    def _past(self, past: Cache | None, use_cache: bool | None, wants_loss: bool) -> Cache | None:
        """Return the cache of a forward pass, a new one where it should return one."""
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not wants_loss
        return DynamicCache(config=self.config) if use_cache and past is None else past

    def attention(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, past: Cache | None
    ) -> Fields:
        """Return the Decoder's arguments that say what each token sees, and from which position."""
        return seen_keys(self.model.config, tokens, mask, positions, past)

    @torch.no_grad()
    @cache_by_either_name
    def generate(self, *args: Any, **options: Any) -> Any:
        """Continue prompts as transformers does, with all of its options; FP8 weights are quantized once."""
        # With a static cache generate would compile forward, into many pieces.
        options.setdefault("disable_compile", True)
        config = options.get("generation_config") or self.generation_config
        check_prompt(args, options, config)
        if options.get("assistant_early_exit", config.assistant_early_exit) is not None:
            raise UsageError(
                "assistant_early_exit is not supported: give a smaller model as assistant_model"
            )
        with self._weights_quantized_once():
            return super().generate(*args, **options)  # type: ignore[bad-argument-type]  # protocol without properties

    @cache_by_either_name
    def prepare_inputs_for_generation(  # type: ignore[bad-override]  # its other arguments differ between versions
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Fields:
        """As in the base class; without the cache where LongRoPE's angles change, as in transformers' Phi-3.

        transformers derives the arguments that `generate` accepts from these names.
        """
        kwargs.pop("tokenizer", None)  # with which `generate` looks for stop strings
        changes = cache is not None and angles_change(
            self.model.config,
            input_ids,
            cache,
            mask=kwargs.get("attention_mask"),
            positions=kwargs.get("position_ids"),
        )
        if changes:
            cache = None  # and all tokens are passed
            kwargs |= dict.fromkeys(kwargs.keys() & {"next_sequence_length"})
        kwargs |= {CACHE: cache, "inputs_embeds": inputs_embeds}
        prepare = super().prepare_inputs_for_generation
        inputs = prepare(input_ids, **kwargs)  # type: ignore[bad-argument-type]  # its protocol lacks properties
        if "prepare_inputs_for_generation" in self.__dict__:
            # Set by peft, which adds its prompts where it finds no cache by this name: else at every step.
            inputs["past_key_values"] = inputs.pop(CACHE)
        return inputs

    @contextlib.contextmanager
    def _weights_quantized_once(self) -> Iterator[None]:
        """Inside, passes in evaluation mode share the quantized weights, which the next generation may take over."""
        thread = threading.get_ident()
        if self.training or not self.model.recipe.quantized or thread in self._weights:
            yield
            return
        # Weights in training change before the next generation: their quantized copies would only take memory.
        with reused_weights(self.model, self.model.te, keep=not is_trained(self.model)) as weights:
            self._weights[thread] = weights
            try:
                yield
            finally:
                del self._weights[thread]

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None = None, **others: object
    ) -> Tensor | None:
        """Return the mask of padding as it is: the forward pass makes the masks of attention from it."""
        return attention_mask

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Fields | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        token: str | bool | None = None,
        save_peft_format: bool = True,
        save_original_format: bool = True,
        distributed_checkpoint: bool = False,
        safe_serialization: bool = True,
        **options: Any,
    ) -> None:
        """Write the model into a folder, beside other files in it.

        Args:
            save_directory: the folder; CausalLM.from_pretrained and AutoModelForCausalLM.from_pretrained load it.
            is_main_process: False writes nothing.
            state_dict: weights to write instead of the model's.
            push_to_hub: also upload it, with `token`; `options` as in `push_to_hub`, including repo_id.
            max_shard_size: weights larger than this are split; bytes, or text such as "5GB".
            variant, distributed_checkpoint, safe_serialization=False: not supported.
            save_peft_format, save_original_format: ignored.

        Raises:
            SaveError: writing failed.
            UsageError: something that is not supported.
        """
        refuse_pickle(safe_serialization)
        if variant is not None or distributed_checkpoint:
            raise UsageError(
                "variant= and distributed_checkpoint= are not supported: leave them out"
            )
        if is_main_process:
            note_outputs(self.model, self.config)
            generation = self.generation_config.to_diff_dict()
            size = parse_size(max_shard_size)
            with saving(self.model):
                save_model(
                    self.model,
                    self.config.model_config(),
                    generation=generation,
                    folder=Path(save_directory),
                    state=state_dict,
                    max_shard_bytes=size,
                )
        if push_to_hub:
            self.push_to_hub(**options, token=token)


def _changed(config: TEModelsConfig, folder: Path) -> Fields:
    """Return the fields of the shape in which `config` differs from the folder's; none if that is not ours."""
    if hugging_face_documents(folder) is not None:
        return {}
    # A config that was loaded from the folder and changed: only the changes are options.
    saved = TEModelsConfig.from_pretrained(folder).model_config().to_dict()
    changed = {}
    for name, value in config.model_config().to_dict().items():
        if saved[name] != value:
            changed[name] = value
    return changed


AutoModelForCausalLM.register(TEModelsConfig, TEModelsForCausalLM, exist_ok=True)
# Trainer's label smoothing and lm-evaluation-harness check there whether a model predicts the next token.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TEModelsConfig.model_type] = TEModelsForCausalLM.__name__
