"""A training run with LoRA adapters: the content of its checkpoints, resuming, and the merged model at its end.

A checkpoint contains the adapters twice: as peft's files, which peft and `load_lora` read, and as the trained tensors,
from which a run resumes with the same bits. The frozen model is not saved: `adapter_config.json` names it.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_models.adapters.rows import without_layers
from te_models.causal_lm import CausalLM
from te_models.config.base_weights import DEQUANTIZED
from te_models.config.model import config_fields
from te_models.config.recipe import AUTO, Recipe
from te_models.errors import CheckpointError
from te_models.files.formats import read_json
from te_models.fp8.primary_weights import drop_initial_values
from te_models.fp8.scaling_state import check_fp8_state
from te_models.interop.origin import TOKEN_IDS
from te_models.saving.adapters import facts_in, trained_config, trained_generation
from te_models.saving.folder import load_folder, match
from te_models.saving.load_model import TrainingState, read_recipe, training_document
from te_models.saving.pretrained import ADAPTERS
from te_models.saving.run_folder import offering_older
from te_models.training.lora import AdaptedModel, adapter_content, add_lora, load_lora
from te_models.training.lora_files import warn_of_peft
from te_models.training.resume import saved_choices
from te_models.training.run_settings import read_run_file
from te_models.training.settings import RUN_FILE, LoraSettings

LIVE = "adapters"  # the group of tensors that are trained, and of frozen ones of adapters
Content = tuple[dict[str, dict[str, Tensor]], dict[str, object]]  # tensors by group, and documents


class SavedAdapters:
    """The adapters of a model that a Trainer trains, as its `saved` argument."""

    def __init__(self, adapted: AdaptedModel) -> None:
        self.adapted = adapted
        self.model = adapted.get_base_model()
        # No optimizer starts from the weights before their rounding to FP8.
        drop_initial_values(self.model)

    def content(self, live: bool = True) -> Content:
        """Return a checkpoint's tensors and documents; without `live` only those that peft and `load_lora` read.

        All processes that share experts call it.
        """
        tensors, documents = adapter_content(self.adapted, of_run=True)
        if live:
            tensors[LIVE] = {
                name: parameter.detach() for name, parameter in saved_live(self.model).items()
            }
        return tensors, documents

    def read(self, folder: Path) -> TrainingState:
        """Read and check a checkpoint of these adapters; see te_models.saving.load_model.read_training_state.

        Raises:
            CheckpointError: the checkpoint is damaged, or of other adapters.
        """
        with offering_older(folder):
            saved = load_folder(folder, ["recipe", "training", LIVE], optional=["fp8_state"])
        live = saved_live(self.model)
        for name, parameter in list(live.items()):
            # A checkpoint up to November 2026 has what was trained alone.
            if not parameter.requires_grad and name not in saved.tensors[LIVE]:
                del live[name]
        match(live, saved.tensors[LIVE])
        self._check_shape(folder)
        state = training_document(saved)
        scales = self._live_names(saved.tensors.get("fp8_state", {}))
        check_fp8_state(self.model, scales)
        recipe = read_recipe(saved)
        if recipe.to_dict() != self.model.recipe.to_dict():
            new = self.model.recipe.name
            warnings.warn(
                f"{folder} was trained under recipe {recipe.name!r}; it goes on with {new!r}",
                stacklevel=3,
            )
        return TrainingState(state, lambda: self._write(saved.tensors[LIVE], scales, recipe))

    def _check_shape(self, folder: Path) -> None:
        """Raise a CheckpointError if the adapters were trained on a model of another shape."""
        config = trained_config(folder)
        if config is None:
            return
        now = self.model.config.to_dict()
        for name, then in config.config.to_dict().items():
            if then != now[name]:
                raise CheckpointError(
                    f"{folder} was trained with {name}={then!r}, not {now[name]!r}: resume with the same config, or "
                    "start a new run"
                )

    @torch.no_grad()
    def _write(
        self, tensors: Mapping[str, Tensor], scales: dict[str, Tensor], recipe: Recipe
    ) -> None:
        live = saved_live(self.model)
        for name, tensor in tensors.items():
            live[name].copy_(tensor)
        self.model.take_fp8_state(scales, recipe)

    def _live_names(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return saved FP8 state under the names of te.Linears with adapters."""
        live = {without_layers(name): name for name, _ in self.model.named_modules()}
        names = {}
        for name, tensor in state.items():
            owner, *rest = name.rsplit(".", 2)
            names[".".join((live.get(owner, owner), *rest))] = tensor
        return names


class LoraRun(SavedAdapters):
    """Adapters that are added to a model in place, in its own dtype, over which the optimizer has FP32 masters.

    `base` is the model's name or folder, for adapter_config.json.
    """

    def __init__(self, model: CausalLM, settings: LoraSettings, base: str | None = None) -> None:
        self.settings = settings
        self.base = base
        fields: dict[str, Any] = dict(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            use_dora=settings.dora,
            use_rslora=settings.rslora,
        )
        if settings.targets:
            fields["target_modules"] = list(settings.targets)
        super().__init__(add_lora(model, **fields))
        self.adapted.peft_config["default"].base_model_name_or_path = base
        # Before hours of training, and not only when they are saved.
        warn_of_peft(model, "default", settings.dora)
        take_dtype(model)


def take_dtype(model: CausalLM) -> None:
    """Give A and B of the adapters that train the model's dtype, in which their gradients are then summed."""
    # peft makes and loads them in FP32, for a Trainer with autocast. Here the masters are FP32.
    for name, parameter in trained(model).items():
        if "lora_magnitude" not in name:
            parameter.data = parameter.data.to(model.dtype)


def saved_live(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter of those that a checkpoint holds: what a run trains, and all of the adapters."""
    live = {}
    for name, parameter in model.named_parameters():
        of_adapter = ".lora_" in name or ".modules_to_save." in name
        if parameter.requires_grad or of_adapter:
            live[name] = parameter
    return live


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter of those that a run trains."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def load_adapted(folder: Path, merge: bool = False, **options: Any) -> CausalLM:
    """Return the model that the adapters in `folder` were trained on, with them in it, in evaluation mode.

    The folder is a checkpoint of a run with adapters, or what it or `save_lora` wrote at its end; `options` are those
    of CausalLM.from_pretrained. Without `recipe` and `dtype` the model runs as it was trained: under that recipe,
    with weights of that kind and dtype. Its shape is the one that the run had, and the folder's tokenizer and token ids
    are saved with it. Adapters that name no model, or do not fit it, are a CheckpointError. `merge` is load_merged.
    """
    if merge:
        return load_merged(folder, **options)
    return _load(folder, None, options).get_base_model()


def load_merged(folder: Path, *, base: str | None = None, **options: Any) -> CausalLM:
    """Return the model of `load_adapted` with the adapters merged into its weights, each sum rounded once.

    Under dtype=torch.float32 no small update vanishes in the rounding. The weights are not in FP8 unless `fp8_params`
    says so, and a quantized release's weights are dequantized unless `base_weights` says otherwise. `base` is the
    model; None: the one that adapter_config.json names.
    """
    whole = {"fp8_params": False, "base_weights": DEQUANTIZED}
    model = _load(folder, base, {**whole, **options}).merge_and_unload()
    assert isinstance(model, CausalLM)
    return model


def _load(folder: Path, base: str | None, options: dict[str, Any]) -> AdaptedModel:
    """Return the model with adapters; see `load_adapted`."""
    if base is None:
        config = read_json(folder / ADAPTERS)
        base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not base:
        raise CheckpointError(
            f"{folder / ADAPTERS} does not name the model that the adapters are for"
        )
    with warnings.catch_warnings():
        # The run said so when it began.
        warnings.filterwarnings("ignore", "vocab_size=.* adds .* to the model")
        model = CausalLM.from_pretrained(base, **_as_trained(folder, options))
    chosen = {name: model.config.to_dict()[name] for name in TOKEN_IDS if name in options}
    generation = trained_generation(folder) or model.origin.generation
    facts = facts_in(folder)
    origin = replace(model.origin, adapters=folder, generation=generation, trained=facts)
    model.origin = origin.with_token_ids(chosen)
    return load_lora(model, folder)


def _as_trained(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with which the model of adapters is built: `options`, else the ones it was trained with."""
    if not (folder / "recipe.json").is_file():  # of peft
        return dict(options)
    saved = saved_choices(folder)
    shape = {name: value for name, value in saved.items() if name in config_fields()}
    shape = shape or _recorded_shape(folder)
    if "base_weights" in saved:
        shape["base_weights"] = saved["base_weights"]
    chosen = dict(options)
    if chosen.get("dtype") is None and "dtype" in saved:
        chosen["dtype"] = saved["dtype"]
    if chosen.get("recipe") in (None, AUTO):
        shape["fp8_params"] = saved["fp8_params"]
        chosen["recipe"] = saved["recipe"]
    return {**shape, **chosen}


def _recorded_shape(folder: Path) -> dict[str, Any]:
    """Return the options of the shape in the run.toml above a checkpoint that does not hold the shape itself."""
    for parent in folder.resolve().parents[:4]:
        if (parent / RUN_FILE).is_file():
            saved = read_run_file(parent / RUN_FILE)
            return {name: value for name, value in saved.items() if name in config_fields()}
    return {}
