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
from te_models.saving.checkpoint_choice import ADAPTER_CONFIG
from te_models.saving.folder import load_folder, match
from te_models.saving.load_model import TrainingState, read_recipe, training_document
from te_models.saving.run_folder import offering_older
from te_models.training.lora import AdaptedModel, adapter_content, add_lora, load_lora
from te_models.training.lora_files import warn_of_peft
from te_models.training.resume import saved_choices
from te_models.training.run_settings import read_run_file, run_file_above
from te_models.training.settings import LoraSettings

# The group of tensors in a checkpoint from which a run resumes: those that it trains, and frozen ones of adapters.
RUN_TENSORS = "adapters"
Content = tuple[dict[str, dict[str, Tensor]], dict[str, object]]  # tensors by group, and documents


class SavedAdapters:
    """The adapters of a model that a Trainer trains, as its `saved` argument: what checkpoints contain, and its loader.

    Attributes:
        adapted: peft's model around `model`.
        model: the model with the adapters in it.
    """

    def __init__(self, adapted: AdaptedModel) -> None:
        self.adapted = adapted
        self.model = adapted.get_base_model()
        # No optimizer starts from the weights before their rounding to FP8.
        drop_initial_values(self.model)

    def content(self, resumable: bool = True) -> Content:
        """Return the tensors and documents of a checkpoint from which a run can resume.

        Without `resumable` only those that peft and `load_lora` read. All processes that share experts call it.
        """
        tensors, documents = adapter_content(self.adapted, of_run=True)
        if resumable:
            tensors[RUN_TENSORS] = {
                name: parameter.detach() for name, parameter in run_parameters(self.model).items()
            }
        return tensors, documents

    def read(self, folder: Path) -> TrainingState:
        """Read and check a checkpoint of these adapters; see te_models.saving.load_model.read_training_state.

        Raises:
            CheckpointError: the checkpoint is damaged, or of other adapters.
        """
        with offering_older(folder):
            saved = load_folder(folder, ["recipe", "training", RUN_TENSORS], optional=["fp8_state"])
        tensors = saved.tensors[RUN_TENSORS]
        parameters = run_parameters(self.model)
        for name, parameter in list(parameters.items()):
            # Checkpoints up to November 2026 have no frozen tensors of adapters.
            if not parameter.requires_grad and name not in tensors:
                del parameters[name]
        match(parameters, tensors)
        self._check_shape(folder)
        state = training_document(saved)
        fp8_state = self._with_adapted_names(saved.tensors.get("fp8_state", {}))
        check_fp8_state(self.model, fp8_state)
        recipe = read_recipe(saved)
        if recipe.to_dict() != self.model.recipe.to_dict():
            new = self.model.recipe.name
            warnings.warn(
                f"{folder} was trained under recipe {recipe.name!r}; it goes on with {new!r}",
                stacklevel=3,
            )
        return TrainingState(state, lambda: self._write(tensors, fp8_state, recipe))

    def _check_shape(self, folder: Path) -> None:
        """Raise a CheckpointError if the adapters were trained on a model of another shape."""
        saved = trained_config(folder)
        if saved is None:
            return
        own_fields = self.model.config.to_dict()
        for name, value in saved.config.to_dict().items():
            if value != own_fields[name]:
                raise CheckpointError(
                    f"{folder} was trained with {name}={value!r}, not {own_fields[name]!r}: resume with the same "
                    "config, or start a new run"
                )

    @torch.no_grad()
    def _write(
        self, tensors: Mapping[str, Tensor], fp8_state: dict[str, Tensor], recipe: Recipe
    ) -> None:
        """Copy what was read into the model."""
        parameters = run_parameters(self.model)
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
        self.model.take_fp8_state(fp8_state, recipe)

    def _with_adapted_names(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return saved FP8 state under the names that te.Linears have inside of adapters.

        peft's layers add a part to the name of the te.Linear that they wrap, and files leave it out.
        """
        adapted_names = {without_layers(name): name for name, _ in self.model.named_modules()}
        renamed = {}
        for name, tensor in state.items():
            module, *rest = name.rsplit(".", 2)
            renamed[".".join((adapted_names.get(module, module), *rest))] = tensor
        return renamed


class LoraRun(SavedAdapters):
    """Adapters that are added to a model in place, in its own dtype; the optimizer has FP32 masters of them.

    Args:
        model: the model, whose own weights are frozen.
        settings: rank, targets and the other options of the adapters.
        base: the model's name or folder, for adapter_config.json.
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
        cast_adapters(model)


def cast_adapters(model: CausalLM) -> None:
    """Give A and B of the adapters that train the model's dtype, in which their gradients are then summed."""
    # peft makes and loads them in FP32, for a Trainer with autocast. Here the masters are FP32.
    for name, parameter in trained(model).items():
        if "lora_magnitude" not in name:
            parameter.data = parameter.data.to(model.dtype)


def run_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter of those that a checkpoint holds: what a run trains, and all of the adapters."""
    parameters = {}
    for name, parameter in model.named_parameters():
        of_adapter = ".lora_" in name or ".modules_to_save." in name
        if parameter.requires_grad or of_adapter:
            parameters[name] = parameter
    return parameters


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter of those that a run trains."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def load_adapted(folder: Path, merge: bool = False, **options: Any) -> CausalLM:
    """Return the model that the adapters in `folder` were trained on, with them in it, in evaluation mode.

    Its shape is the one that the run had, and the folder's tokenizer and token ids are saved with it.

    Args:
        folder: a checkpoint of a run with adapters, or the folder that the run or `save_lora` wrote at its end.
        merge: add the adapters to the weights, as `load_merged` does.
        options: the options of CausalLM.from_pretrained. Without `recipe` and `dtype` the model runs as it was trained:
            under that recipe, with weights of that kind and dtype.

    Raises:
        CheckpointError: the adapters name no model, or do not fit it.
    """
    if merge:
        return load_merged(folder, **options)
    return _load(folder, base=None, options=options).get_base_model()


def load_merged(folder: Path, *, base: str | None = None, **options: Any) -> CausalLM:
    """Return the model of `load_adapted` with the adapters merged into its weights, each sum rounded once.

    Args:
        folder: as in `load_adapted`.
        base: the model's name or folder; None: the one that adapter_config.json names.
        options: as in `load_adapted`. Under dtype=torch.float32 no small update vanishes in the rounding. The weights
            are not in FP8 unless `fp8_params` says so, and a quantized release's weights are dequantized unless
            `base_weights` says otherwise.
    """
    # Weights that a sum can be written into.
    plain_weights = {"fp8_params": False, "base_weights": DEQUANTIZED}
    model = _load(folder, base, {**plain_weights, **options}).merge_and_unload()
    assert isinstance(model, CausalLM)
    return model


def _load(folder: Path, base: str | None, options: dict[str, Any]) -> AdaptedModel:
    """Return the model with adapters; see `load_adapted` and `load_merged`."""
    if base is None:
        config = read_json(folder / ADAPTER_CONFIG)
        base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not base:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG} does not name the model that the adapters are for"
        )
    with warnings.catch_warnings():
        # The run said so when it began.
        warnings.filterwarnings("ignore", "vocab_size=.* adds .* to the model")
        model = CausalLM.from_pretrained(base, **_as_trained(folder, options))
    token_ids = {name: model.config.to_dict()[name] for name in TOKEN_IDS if name in options}
    origin = replace(
        model.origin,
        adapters=folder,
        generation=trained_generation(folder) or model.origin.generation,
        trained=facts_in(folder),
    )
    model.origin = origin.with_token_ids(token_ids)
    return load_lora(model, folder)


def _as_trained(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of from_pretrained for the model of adapters: `options`, else the options of the run."""
    # Adapters that peft saved: nothing says how they were trained.
    if not (folder / "recipe.json").is_file():
        return dict(options)
    saved = saved_choices(folder)
    shape = {name: value for name, value in saved.items() if name in config_fields()}
    shape = shape or _shape_in_run_file(folder)
    if "base_weights" in saved:
        shape["base_weights"] = saved["base_weights"]
    chosen = dict(options)
    if chosen.get("dtype") is None and "dtype" in saved:
        chosen["dtype"] = saved["dtype"]
    if chosen.get("recipe") in (None, AUTO):
        shape["fp8_params"] = saved["fp8_params"]
        chosen["recipe"] = saved["recipe"]
    return {**shape, **chosen}


def _shape_in_run_file(folder: Path) -> dict[str, Any]:
    """Return the options of the shape in the run.toml above a checkpoint; empty without such a file."""
    file = run_file_above(folder)
    saved = {} if file is None else read_run_file(file)
    return {name: value for name, value in saved.items() if name in config_fields()}
