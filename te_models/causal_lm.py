"""CausalLM: a Decoder with loading, saving, planning and generation."""

from __future__ import annotations

import dataclasses
import html
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from te_models.config.layer import depth_of
from te_models.config.model import ModelConfig, config_fields
from te_models.config.precision import HEAD
from te_models.config.presets import get_preset
from te_models.config.recipe import unknown_option
from te_models.config.recompute_modes import trainers_mode
from te_models.data.tokenizer_base import Tokenizer
from te_models.device.choice import computing_device
from te_models.errors import UsageError, check_known
from te_models.files.formats import Document, Fields, parse_size
from te_models.generation.generate import Prompts, generate, stream
from te_models.generation.options import GenerationOptions
from te_models.interop.hub import local_folder, push_folder, split_options
from te_models.interop.origin import Origin
from te_models.kernels.sdpa import attention_kernel
from te_models.model.calibration import calibrate
from te_models.model.decoder import Decoder
from te_models.model.graph_obstacle import graph_obstacle
from te_models.model.options import BuildOptions, LoadOptions, ModelOptions, PushOptions
from te_models.model.part import BlockPart
from te_models.planning.memory_plan import MemoryPlan, plan_memory
from te_models.planning.model_run import run_of_model
from te_models.planning.precision_plan import PRECISION_NAMES, PlanRow, PrecisionPlan
from te_models.saving.adapters import adapter_reader
from te_models.saving.pretrained import (
    adapter_folder,
    read_pretrained,
    refuse_pickle,
    write_pretrained,
)
from te_models.saving.state_dict import keep_fp8_state, save_tie_once, tie_head
from te_models.serving.export import Export, export


class CausalLM(Decoder):
    """A Decoder with presets, loading, saving, plans and generation. Arguments: te_models.model.decoder.Decoder."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        initialize: bool = True,
        materialize: bool = True,
        **options: Unpack[BuildOptions],
    ) -> None:
        if not isinstance(config, ModelConfig):
            raise UsageError(
                f"the config is a {type(config).__name__}: give a ModelConfig, or load a folder with "
                "CausalLM.from_pretrained, which reads the configs of transformers too"
            )
        super().__init__(config, initialize=initialize, materialize=materialize, **options)
        self.origin = Origin()
        keep_fp8_state(self)
        if config.tie_word_embeddings:
            save_tie_once(self)

    @property
    def language_model(self) -> CausalLM:
        """The model itself: the name of a text model inside a multimodal one, in transformers."""
        return self

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """Set `activation_checkpointing` by the options of Hugging Face's Trainer (config/recompute_modes.py)."""
        self.activation_checkpointing = trainers_mode(self.activation_offload, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Set activation_checkpointing="none", for Hugging Face's Trainer."""
        self.activation_checkpointing = "none"

    def _replicate_for_data_parallel(self) -> CausalLM:
        """Raise a UsageError: transformers' Trainer wraps a model in DataParallel where it sees several GPUs."""
        raise UsageError(
            "torch.nn.DataParallel cannot copy te modules: start the program with torchrun --nproc-per-node N, "
            "or with CUDA_VISIBLE_DEVICES=0 for one GPU"
        )

    def tie_weights(self) -> None:
        """Tie the head to the embedding's table again after one of Hugging Face's loaders has separated them."""
        if self.config.tie_word_embeddings:
            tie_head(self)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters on all ranks, counting tied ones once; transformers.Trainer calls it.

        As in ModelConfig.num_parameters, rows that only pad a weight are none.
        """
        left_out = self.embed_tokens.weight if exclude_embeddings else None
        total = 0
        for name, parameter in self.named_parameters():
            if parameter is left_out:
                continue
            if parameter.requires_grad or not only_trainable:
                total += self._count(name, parameter)
        return total

    def _count(self, name: str, parameter: Tensor) -> int:
        """Return the elements of a parameter on all ranks, as its description has them: without rows of padding."""
        module, _, kind = name.rpartition(".")
        module = module.replace(".base_layer", "")  # the part that an adapter adds
        linear = self.config.linears.get(module)
        if linear is None or kind not in (*linear.weights, "bias"):
            vector = self.config.divided_vectors.get(name)
            if vector is None:
                return parameter.numel()
            return vector.num_parameters * parameter.shape[1:].numel()
        used = sum(section.used for section in linear.sections)
        return (
            used
            * (1 if kind == "bias" else linear.inputs)
            * (self.ep.size if self.ep.divides(module) else 1)
        )

    def __repr__(self) -> str:
        """Show recipe, engine, and each linear's precision; identical layers share a line."""
        recipe = (
            f"{self.recipe.name} ({self.recipe.scheme}, {self.recipe.formats}{self._chosen('; ')})"
        )
        dtype = str(self.dtype).removeprefix("torch.")
        head = f"{type(self).__name__}({self.num_parameters():,} parameters in {dtype}, recipe={recipe}, "
        lines = [f"{head}engine={self.engine}, device={self.device})"]
        for layer, module, gemm, precision, *_ in self.plan().folded():
            inputs, outputs = gemm.split(" -> ")
            several = not layer.isdecimal()
            place = (
                module if layer in ("head", "inputs") else f"layer{'s' * several} {layer}: {module}"
            )
            lines.append(f"  {place}: Linear(in={inputs}, out={outputs}, {precision})")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def plan(self) -> PrecisionPlan:
        """Return the precision and engine of each te.Linear with the reason, and what fused kernels do not support."""
        rows = []
        high = PRECISION_NAMES[str(self.dtype).removeprefix("torch.")]
        for name, module in self.named_modules():
            if not isinstance(module, self.te.LINEARS):
                continue
            name = self.precision.known(name)  # without the part that an adapter adds
            recipe, reason, _ = self.precision.linears[name]
            depth = depth_of(name)
            layer = "head" if name == HEAD else "inputs" if depth is None else str(depth)
            precision = high if recipe is None else f"{recipe.formats} {recipe.scheme}"
            short = name.removeprefix(f"layers.{layer}.")
            experts = f"{module.num_gemms} x " if isinstance(module, self.te.GroupedLinear) else ""
            gemm = f"{experts}{module.in_features} -> {module.out_features}"
            rows.append(PlanRow(layer, short, gemm, precision, self.engine, reason))
        weights = ", FP8 primary weights" if self.fp8_params else ""
        recipe = f"recipe {self.recipe.name}{self._chosen(', ')}{weights}"
        title = f"{recipe}, engine {self.engine} ({self.engine_reason})"
        obstacles: dict[str, list[str]] = {}
        for part in self.config.parts:
            known = obstacles.setdefault(part.title, [])
            known += [name for name in part.obstacles if name not in known]
        if self.config.norm_type != "rms":
            obstacles["norms"] = ["norm_type"]
        notes = [
            f"{title}: separate kernels, since the fused ones do not compute {', '.join(names)}"
            for title, names in obstacles.items()
            if names
        ]
        # Parts of the same spec have the same remark: once for all layers.
        parts = [module for module in self.modules() if isinstance(module, BlockPart)]
        for spec, part in {part.spec: part for part in parts}.items():
            if remark := part.remark(computing_device(self.device), self.dtype):
                notes.append(f"{spec.title}: {remark}")
        if self.engine == "native" and (reason := graph_obstacle(self, ranks_alike=True)):
            notes.append(f"no CUDA graph of a step: {reason}")
        return PrecisionPlan(title, tuple(rows), tuple(notes))

    def plan_memory(self, batch_size: int, seq_len: int, **options: Any) -> MemoryPlan:
        """Predict the memory of training this model on a GPU, and list the GPUs it fits on.

        Options are fields of te_models.planning.planned_run.PlannedRun; the model's own settings are the defaults, its
        LoRA adapters among them, which then are what is trained; lora_rank=0 plans the training of all weights.
        """
        if options.get("lora_rank") == 0:
            options.setdefault("lora_experts", False)
        run = run_of_model(self, batch_size, seq_len)
        return plan_memory(self.config, self.recipe, run, **options)

    def _chosen(self, separator: str) -> str:
        """Return why recipe="auto" chose the recipe, after a separator; empty if the recipe was given."""
        return f"{separator}auto: {self.recipe_reason}" if self.recipe_reason else ""

    def attention_kernel(self) -> str:
        """Return the attention kernel that runs first on the model's device."""
        capped = self.config.attn_logit_softcapping is not None
        return attention_kernel(
            self.device, self.config.head_dim, capped, self.config.attention_sinks
        )

    @property
    def generation_values(self) -> Document:
        """The values of generation_config.json in the folder that the model came from."""
        return self.origin.generation or {}

    def add_stop_tokens(self, ids: Iterable[int]) -> None:
        """Let generation end at these tokens too, here and in the generation_config.json of what is saved or exported.

        A run does so with the tokens that end the answers of its data (te_models.data.answer_ends).
        """
        stops = self.stop_token_ids
        new = []
        for token in ids:
            if token not in stops and token < self.config.vocab_size:
                new.append(token)
        if not new:
            return
        both = [*stops, *new]
        values: Fields = {"eos_token_id": both if len(both) > 1 else both[0]}
        if self.origin.generation is None:  # in its place a save would write the ids of the config
            fields = self.config.to_dict()
            for name in ("bos_token_id", "pad_token_id"):
                if fields[name] is not None:
                    values[name] = fields[name]
        self.origin = self.origin.with_token_ids(values)

    def calibrate(
        self,
        *batches: Mapping[str, Tensor],
        weights: Sequence[Tensor | float] | None = None,
        router_weights: Sequence[Tensor | float] | None = None,
    ) -> None:
        """Measure the first scales of recipe "delayed", with one forward and backward in BF16 that change nothing else.

        Transformer Engine begins with scales of 1, under which most gradients of the first steps are zero in FP8. Call
        this before the first step, and after `set_recipe`, as `Trainer` and `GraphedStep` do: linears that have scales
        keep them, and under other recipes nothing happens. Every process of the model's `amax_group` has to call it.

        Args:
            batches: the micro-batches of the first step: tensors of `forward`, "labels" among them. Without labels, for
                inference alone, gradients get no scales: calibrate with labels before training a model anew.
            weights: the factors of their losses in that step; None: 1 / len(batches) each.
            router_weights: the factors of the losses of their routers; None: `weights`.

        Raises:
            UsageError: no batch, something else than a dict of tensors, or labels in some batches only.
        """
        calibrate(self, batches, weights, router_weights)

    def generate(
        self,
        input_ids: Prompts,
        max_new_tokens: int = 64,
        attention_mask: Tensor | None = None,
        tokenizer: Tokenizer | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Tensor:
        """Continue prompts; see te_models.generation.generate.stream for arguments and errors.

        Returns:
            int64 [B, S + new], prompts included; finished rows are padded with the pad token.
        """
        return generate(self, input_ids, max_new_tokens, attention_mask, tokenizer, **options)

    def stream(
        self,
        input_ids: Prompts,
        max_new_tokens: int = 64,
        attention_mask: Tensor | None = None,
        tokenizer: Tokenizer | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[Tensor]:
        """Yield the new tokens of all rows, int64 [B], step by step; arguments as in `generate`."""
        return stream(self, input_ids, max_new_tokens, attention_mask, tokenizer, **options)

    def save_pretrained(
        self,
        folder: str | Path,
        format: str = "te",
        max_shard_size: int | str = "5GB",
        beside: str | Path | None = None,
        safe_serialization: bool = True,
    ) -> None:
        """Write the model into `folder`, atomically.

        Args:
            folder: the folder to write; an earlier save in it is replaced.
            format: "te" writes config.json, model.safetensors, recipe.json and, for a stateful recipe,
                fp8_state.safetensors. With FP8 primary weights, model.safetensors holds their dequantized values, so
                that the folder loads under any recipe, and fp8_weights.safetensors the quantized values and scales.
                "hf" writes what `transformers` loads, with a model card (where the package huggingface_hub is
                installed) unless the folder has one of yours; the recipe is only in the card. Both save the
                tokenizer's files that came along.
            max_shard_size: weights larger than this are split into files of this size; bytes, or text such as "5GB".
            beside: the Hugging Face folder of a multimodal release, for a text model that came from it: with format
                "hf" the tensors of its other parts are written too, unchanged. None: as in the folder that the model
                was loaded from.
            safe_serialization: as in transformers; False, a pickle, is refused.

        Raises:
            ValueError: an unknown format, `beside` with another format than "hf", or a model or folder that does not
                allow it.
            SaveError: writing failed; the previous content is intact.
        """
        refuse_pickle(safe_serialization)
        origin = self.origin
        if beside is not None:
            if format == "te":
                raise UsageError(
                    f"format te has no place for the tensors of {beside}: leave beside out, or give format hf"
                )
            origin = dataclasses.replace(origin, beside=Path(beside))
        write_pretrained(self, origin, folder, format, parse_size(max_shard_size))

    def push_to_hub(
        self, repo_id: str, *, max_shard_size: int | str = "5GB", **options: Unpack[PushOptions]
    ) -> str:
        """Write the model as `save_pretrained(format="hf")` does and upload it to the Hugging Face hub.

        A model card that you wrote yourself is left unchanged.

        Args:
            repo_id: "owner/model", or "model" for the account of the token; created if it does not exist.
            max_shard_size: as in `save_pretrained`.
            options: token, private, revision (a branch), commit_message and create_pr, as in transformers.

        Returns:
            the address of the commit.

        Raises:
            UsageError: the package huggingface_hub is missing, an unknown keyword, or the hub refused it.
        """
        for name in options:
            check_known("keyword", name, PushOptions.__annotations__)
        # Every rank has its part in writing; only the first uploads.
        with tempfile.TemporaryDirectory() as temp:
            folder = Path(temp) / "model"
            write_pretrained(
                self, self.origin, folder, "hf", parse_size(max_shard_size), name=repo_id
            )
            return push_folder(folder, repo_id, options) if self.tp.rank == 0 else ""

    def export(
        self,
        folder: str | Path,
        format: str = "fp8-block",
        calibration: Tensor | Iterable[Tensor] | None = None,
        rounding: str = "nearest",
        base: CausalLM | str | Path | None = None,
    ) -> Export:
        """Write the model into `folder`, atomically, as a quantized Hugging Face checkpoint for a server.

        The linears of blocks are quantized, except those that the recipe keeps in BF16 by its edges or its table
        `precision`, and those that a quantized folder has in BF16, unless an FP8 recipe was chosen. Weights follow the
        recipe of their linear where it has the format: its power-of-two scales, its square blocks, and the data of FP8
        primary weights.

        Args:
            folder: the folder to write; an earlier save in it is replaced.
            format: "fp8-block" (128 x 128, as DeepSeek and Qwen), "fp8-tensor" (static), "fp8-channel", "mxfp8",
                "nvfp4" or "bf16"; or "stored", the base of saved adapters byte for byte, with the adapters beside it.
                See docs/guide/serving.md.
            calibration: token ids, int64 [B, S], or several such batches, on which to measure the linears' inputs. Only
                fp8-tensor and nvfp4 need it: without it they use the scales that recipe "delayed" has learned, or those
                of the folder that the model was read from, and nvfp4 amaxes of random tokens otherwise.
            rounding: "nearest", or "stochastic", which loses no small change of a weight on average.
            base: the model before it was tuned, or its folder; the result's `survival` says how much of the change of
                the weights is left. None: it says nothing.

        Returns:
            the names of the quantized modules and of the others, and notes on limits of the format.

        Raises:
            UsageError: an unknown format, sizes that it does not allow, no scales for fp8-tensor, weights that are not
                finite, or an architecture that Hugging Face does not have.
            SaveError: writing failed; the previous content is intact.
        """
        if isinstance(base, (str, Path)):
            # Only its weights are compared: on the CPU, beside a model that may fill the GPU.
            base = CausalLM.from_pretrained(base, device="cpu", recipe="bf16", dtype=self.dtype)
        return export(self, self.origin, folder, format, calibration, rounding, base)

    @classmethod
    def from_preset(
        cls,
        name: str,
        *,
        build: Callable[..., CausalLM] | None = None,
        **options: Unpack[ModelOptions],
    ) -> CausalLM:
        """Build a preset with fresh weights.

        Args:
            name: one of `list_presets()`.
            build: called in place of CausalLM, as te_models.training.parallel.Parallel.build is.
            options: keywords of the model, fields of its config and of its recipe, mixed.

        Raises:
            UsageError: an unknown name or keyword (the nearest one is named), or values that do not fit.
        """
        shape, rest = _split(options)
        return (build or cls)(get_preset(name, **shape), **rest)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        build: Callable[..., CausalLM] | None = None,
        **options: Unpack[LoadOptions],
    ) -> CausalLM:
        """Load a model from `folder`, in our format or Hugging Face's, or from the Hugging Face hub by name.

        A folder of ours keeps its recipe, and a model of Hugging Face gets recipe="auto", as a new model does,
        unless `recipe=` names another. `attention_gate=`
        adds a gate to an ungated model: zero weights, which halve the output of attention, and a doubled o_proj, so
        that no output changes and the gate trains from there. Keywords of transformers are accepted, or refused with
        the reason.

        A folder of LoRA adapters, such as a run with --lora leaves, gives the model that they were trained on, in the
        shape that it had there, with the adapters in it, frozen and in evaluation mode. `merge_adapters=True` adds them
        to its weights instead, for everything that takes a whole model: `save_pretrained`, `export`, training.

        Raises:
            ValueError: an unknown keyword, or a folder that is damaged or does not fit; it is checked before a model is
                built.
        """
        merge = options.pop("merge_adapters", False)
        hub, rest = split_options(options)
        path = local_folder(folder, **hub)
        adapters = adapter_folder(path)
        # A folder of adapters names the model that they belong to, which is read first.
        if adapters is not None:
            return adapter_reader()(adapters, merge=merge, build=build, **hub, **rest)
        model, model.origin = read_pretrained(build or cls, path, rest)
        return model


def _split(options: Document) -> tuple[Fields, Fields]:
    """Return the fields of the config, and all other options; an unknown name is an error."""
    known = ModelOptions.__annotations__
    fields = config_fields()
    shape = {}
    others = {}
    for name, value in options.items():
        if name not in known:
            raise unknown_option("keyword", name, known, "te_models.model.options.ModelOptions")
        if name in fields:
            shape[name] = value
        else:
            others[name] = value
    return shape, others


def plan(shape: str | ModelConfig, **options: Unpack[ModelOptions]) -> PrecisionPlan:
    """Plan a model without allocating it: the precision and the engine of each te.Linear, with the reason.

    Args:
        shape: a preset's name or a config.
        options: keywords of CausalLM.from_preset.

    Raises:
        UsageError: an unknown name or keyword (the nearest one is named), or values that do not fit.
    """
    if not isinstance(shape, str | ModelConfig):
        raise UsageError(
            f"the shape is a {type(shape).__name__}: give a preset's name or a ModelConfig; a model has plan() itself"
        )
    # On the meta device nothing is allocated, whatever the size.
    settings, recipe_options = _split({"device": "meta", **options})
    config = (
        get_preset(shape, **settings)
        if isinstance(shape, str)
        else dataclasses.replace(shape, **settings)
    )
    return CausalLM(config, **recipe_options).plan()
