"""LoRA (Hu et al. 2021, arXiv 2106.09685) on te.Linear through `peft`, in files that peft and transformers read.

Our projections are fused: an adapter on `qkvg_proj` is one low-rank update of q, k, v and the gate together, one on
`q_proj` updates the rows of q. Files have one adapter for each linear of transformers in both cases
(te_models.training.lora_targets).
"""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor

from te_models.adapters.layers import LoraExperts, LoraLinear
from te_models.adapters.rows import (
    AdaptedRows,
    NamedRows,
    hide_rows,
    place_rows,
    show_rows,
    without_layers,
)
from te_models.causal_lm import CausalLM
from te_models.errors import CheckpointError, UsageError, needs, unknown
from te_models.fp8.region import saving
from te_models.fp8.scaling_state import check_fp8_state
from te_models.interop.hub import local_folder
from te_models.interop.origin import TOKEN_IDS, TRAINED
from te_models.interop.tensor_places import names_taken
from te_models.saving.adapters import BASE_CONFIG, GENERATION, trained_config
from te_models.saving.folder import MANIFEST, save_folder
from te_models.saving.load_model import read_recipe
from te_models.saving.pretrained import config_document, saved_folder
from te_models.training.lora_config import adapters_of, check_fields, whole_modules
from te_models.training.lora_files import (
    DROPOUT,
    SavedAdapter,
    adapter_file,
    adapters_in,
    parameters_in,
    ranks_of,
    read_adapter,
    their_targets,
)
from te_models.training.lora_targets import (
    Adapter,
    adaptable_modules,
    alpha_of,
    layers_of,
    module_of,
)

with needs("te_models.training.lora", "peft", "0.19", "lora"):
    from peft import LoraConfig, LoraModel, PeftConfig, PeftModel, get_peft_model

if TYPE_CHECKING:
    from te_models.huggingface.modeling import TEModelsForCausalLM

WITHOUT_EFFECT = (*TOKEN_IDS, "initializer_range")  # on the outputs of a model


class AdaptedModel(PeftModel):
    """peft's PeftModel around a CausalLM: its configs may name the linears of transformers, and its files do."""

    def __init__(
        self,
        model: CausalLM,
        peft_config: PeftConfig,
        adapter_name: str = "default",
        layers: Mapping[str, Adapter] | None = None,
        **options: Any,
    ) -> None:
        """Freeze `model` and add adapters: `layers`, name -> adapter, or what `peft_config` targets."""
        config, layers = _resolved(model, peft_config, layers)
        # peft freezes everything; `unload` gives back what trained before.
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        rows = _show(model, layers)
        super().__init__(model, config, adapter_name, **options)
        self._trained_before = trained
        place_rows(model, rows)

    def get_base_model(self) -> CausalLM:
        """Return the model inside, with the adapters in it."""
        model = super().get_base_model()
        assert isinstance(model, CausalLM)
        return model

    def unload(self) -> CausalLM:
        """Return the model without adapters, whose weights train again as before."""
        cast(LoraModel, self.base_model).unload()
        return self._thawed()

    def merge_and_unload(
        self,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> CausalLM:
        """Return the model with the adapters in its weights, which train again as before; arguments are peft's."""
        cast(LoraModel, self.base_model).merge_and_unload(progressbar, safe_merge, adapter_names)
        return self._thawed()

    def _thawed(self) -> CausalLM:
        model = self.get_base_model()
        hide_rows(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self._trained_before)
        return model

    def add_adapter(
        self,
        adapter_name: str,
        peft_config: PeftConfig,
        low_cpu_mem_usage: bool = False,
        autocast_adapter_dtype: bool = True,
        layers: Mapping[str, Adapter] | None = None,
    ) -> None:
        """Add another adapter, which starts at zero and is inactive until `set_adapter`."""
        model = self.get_base_model()
        config, layers = _resolved(model, peft_config, layers)
        rows = _show(model, layers)
        super().add_adapter(adapter_name, config, low_cpu_mem_usage, autocast_adapter_dtype)
        place_rows(model, rows)

    # The methods below leave out peft's options for reading and writing files, which is done here.
    def load_adapter(  # type: ignore[override]  # fewer options
        self, model_id: str | Path, adapter_name: str, is_trainable: bool = False
    ) -> None:
        """Load another adapter, or new values of an existing one; see `load_lora`. Scales do not change.

        Raises:
            CheckpointError: the folder is damaged, does not fit the model, or has other modules or ranks than the
                adapter of that name.
        """
        adapter = read_adapter(
            self.get_base_model(), saved_folder(local_folder(model_id)), is_trainable
        )
        if adapter_name not in self.peft_config:
            self.add_adapter(adapter_name, adapter.config, layers=adapter.layers)
        elif ranks_of(adapter.layers) != ranks_of(adapters_in(self.get_base_model(), adapter_name)):
            raise CheckpointError(
                f"{model_id} has other modules or ranks than adapter {adapter_name!r}: load it by another name"
            )
        _fill(self, adapter_name, adapter)

    def save_pretrained(  # type: ignore[override]  # fewer options
        self,
        save_directory: str | Path,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        is_main_process: bool = True,
        **options: object,
    ) -> None:
        """Save each adapter as `save_lora` does; other files in `save_directory` are left unchanged.

        Args:
            save_directory: the folder of the adapter "default"; others are saved in subfolders with their names.
            safe_serialization: False is refused.
            selected_adapters: their names; None: all.
            is_main_process: False saves nothing.
            options: other options of peft, which are ignored.
        """
        if not safe_serialization:
            raise UsageError(
                "safe_serialization=False would write a pickle, which can run code: leave it out"
            )
        for name in selected_adapters or list(self.peft_config) if is_main_process else ():
            folder = Path(save_directory) / name if name != "default" else Path(save_directory)
            folder.mkdir(parents=True, exist_ok=True)
            # Written aside and moved file by file, the manifest last: other files in the folder stay, and a kill leaves
            # no mixture that passes for whole.
            with tempfile.TemporaryDirectory(dir=folder, prefix=".adapter-") as temp:
                save_lora(self, Path(temp) / "new", name)
                for file in sorted(
                    (Path(temp) / "new").iterdir(), key=lambda path: path.name == MANIFEST
                ):
                    os.replace(file, folder / file.name)

    @classmethod
    def from_pretrained(  # type: ignore[override]  # fewer options
        cls,
        model: CausalLM,
        model_id: str | Path,
        adapter_name: str = "default",
        is_trainable: bool = False,
    ) -> AdaptedModel:
        """Return `load_lora(model, model_id, is_trainable)`."""
        return load_lora(model, model_id, is_trainable, adapter_name)


@overload
def add_lora(model: CausalLM, config: LoraConfig | None = None, **fields: Any) -> AdaptedModel: ...
@overload
def add_lora(
    model: TEModelsForCausalLM, config: LoraConfig | None = None, **fields: Any
) -> PeftModel: ...
def add_lora(
    model: CausalLM | TEModelsForCausalLM, config: LoraConfig | None = None, **fields: Any
) -> PeftModel:
    """Freeze `model` and add adapters to it, which start at zero and change no output.

    Targets are our linears (`qkvg_proj`, `o_proj`, `gate_up_proj`, `down_proj`, `lm_head`) or linears of transformers
    (`q_proj`, `k_proj`, `v_proj`, `gate_proj`, `up_proj` ..., or "all-linear" for all of these in the blocks), each
    with its own rank, named in any way that LoraConfig supports. Experts are named in target_modules or, as in
    transformers, in target_parameters: `experts.gate_up_proj`, `experts.down_proj`, or `experts` for both; each expert
    gets an A and a B of its own.

    Args:
        model: changed in place. A TEModelsForCausalLM gets peft's own adapters on the linears of transformers, also
            where ours are named: give it to trainers of transformers and TRL, or give those the LoraConfig.
        config: peft's LoraConfig; None: one with `fields`.
        fields: fields of LoraConfig, such as r=8, lora_alpha=16, target_modules=["o_proj"]. Without target_modules
            and target_parameters, every linear of every block gets an adapter, but no expert of a mixture and no
            router.

    Raises:
        UsageError: a field that is not supported, DoRA on experts, or a target that matches nothing.
    """
    if isinstance(model, PeftModel):
        raise UsageError(
            "the model has adapters already: add another with its add_adapter(name, config)"
        )
    # A TEModelsForCausalLM has one inside; transformers' own models have a module of that name too.
    if not isinstance(getattr(model, "model", model), CausalLM):
        raise UsageError(
            f"the model is a {type(model).__name__}: give a CausalLM or a TEModelsForCausalLM"
        )
    if config is None:
        # peft would raise a TypeError of its constructor, without the nearest name.
        known = [field.name for field in dataclasses.fields(LoraConfig)]
        for name in fields.keys() - set(known):
            advice = "write r, as peft does" if name == "rank" else ""
            raise unknown("field of LoraConfig", name, known, "help(peft.LoraConfig)", advice)
        config = LoraConfig(**fields)
    if (
        isinstance(config, LoraConfig)
        and config.target_modules is None
        and not config.target_parameters
    ):
        config = dataclasses.replace(config, target_modules=_linears_of_blocks(model))
    if isinstance(model, CausalLM):
        return AdaptedModel(model, config)
    return _add_to_linears(model, config)


def _linears_of_blocks(model: CausalLM | TEModelsForCausalLM) -> list[str]:
    """Return our names of the linears in blocks that are adapted by default."""
    whole = isinstance(model, CausalLM)
    linears = (model if whole else model.model).config.linears.values()
    # Of mixers beside each other the names begin with the mixer's.
    leaves = dict.fromkeys(linear.name.rpartition(".")[2] for linear in linears if linear.adapted)
    # Linears of a shared expert, which peft drops in some architectures of transformers, have to be asked for there.
    return [leaf for leaf in leaves if whole or not leaf.startswith("shared_")]


def _add_to_linears(model: TEModelsForCausalLM, config: LoraConfig) -> PeftModel:
    """Add adapters of peft to the linears of transformers that `config` names by their names or ours."""
    check_fields(config.to_dict(), wrapped=True)
    modules = adaptable_modules(model.model)
    adapters = adapters_of(config, modules)
    if config.modules_to_save:
        raise UsageError(
            "modules_to_save needs a CausalLM: give add_lora the model inside (`.model`)"
        )
    if any(module_of(one.place) == "lm_head" for one in adapters.values()):
        raise UsageError(
            "an adapter on lm_head needs a CausalLM: give add_lora the model inside (`.model`)"
        )
    their_adapters: dict[str, Adapter] = {}
    for name, one in adapters.items():
        parts = [name] if name in modules.theirs else modules.parts_of(module_of(one.place))
        their_adapters |= dict.fromkeys(parts, one)
    taken = names_taken(modules.root, model.model.config, modules.theirs)
    for name in their_adapters:
        if name.removeprefix(modules.root) in taken:
            raise UsageError(
                f"an adapter on {name} needs a CausalLM: give add_lora the model inside (`.model`)"
            )
    parameters = not (config.use_dora or config.lora_dropout)
    targets = their_targets(their_adapters, modules, config.use_rslora, parameters)
    config = dataclasses.replace(config, **targets, task_type="CAUSAL_LM")
    # peft's own layer for Transformer Engine's linears refuses DoRA.
    config._register_custom_module({NamedRows: LoraLinear, model.model.te.Linear: LoraLinear})
    return get_peft_model(model, config)


def save_lora(adapted: AdaptedModel, folder: str | Path, adapter_name: str | None = None) -> None:
    """Save an adapter into `folder`, atomically, with the FP8 scales that a stateful recipe needs to continue.

    It has the names and shapes of transformers' linears: `PeftModel.from_pretrained(model, folder)` of peft reads it
    for the same model in transformers, and `load_lora` here, which also restores the scales. An earlier save in
    the folder is replaced. `adapter_name` None means the active adapter.

    Raises:
        SaveError: writing failed; the previous content of `folder` is intact.
    """
    if not isinstance(adapted, AdaptedModel):
        raise UsageError(
            f"a {type(adapted).__name__} has no adapters that save_lora knows: give what add_lora or load_lora "
            "returned for a CausalLM, or call save_pretrained of the model itself"
        )
    with saving(adapted.get_base_model()):
        save_folder(folder, *adapter_content(adapted, adapter_name))


def adapter_content(
    adapted: AdaptedModel, adapter_name: str | None = None, of_run: bool = False
) -> tuple[dict[str, dict[str, Tensor]], dict[str, object]]:
    """Return the tensors and documents of a saved adapter, for te_models.saving.folder.save_folder.

    The config and the token ids of the model are among them if it has others than its folder, and always `of_run`.
    """
    name = adapter_name or adapted.active_adapter
    model = adapted.get_base_model()
    adapter_config = adapted.peft_config[name]
    assert isinstance(adapter_config, LoraConfig)
    tensors, config = adapter_file(model, adapter_config, name)
    groups = {"adapter_model": tensors}
    if state := model.copied_fp8_state():
        groups["fp8_state"] = {without_layers(name): tensor for name, tensor in state.items()}
    documents: dict[str, object] = {"adapter_config": config, "recipe": model.recipe.to_dict()}
    if config["lora_dropout"] != adapter_config.lora_dropout:
        documents[DROPOUT] = adapter_config.lora_dropout
    origin = model.origin
    # peft has no field for the shape of the base, and adapters of a changed one fit no other.
    if of_run or (origin.shape is not None and origin.shape != model.config):
        documents[BASE_CONFIG] = config_document(model)
    if origin.generation is not None and (of_run or origin.token_ids):
        documents[GENERATION] = dict(origin.generation)
    if of_run and origin.trained is not None:
        documents[TRAINED] = {**origin.trained, "lora": _facts(config, adapter_config.lora_dropout)}
    return groups, documents


def _facts(config: Mapping[str, Any], dropout: float) -> dict[str, object]:
    """Return rank, alpha, kind and modules of adapters whose file has this config, and the dropout in training."""
    linears = config["target_modules"] or []
    if isinstance(linears, str):  # an expression
        linears = [linears]
    targets = [*linears, *(config["target_parameters"] or ())]
    return {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "dropout": dropout,
        "targets": sorted(targets),
        "whole": sorted(config["modules_to_save"] or ()),
        "dora": bool(config.get("use_dora")),
        "rslora": bool(config.get("use_rslora")),
    }


def load_lora(
    model: CausalLM, folder: str | Path, trainable: bool = False, adapter_name: str = "default"
) -> AdaptedModel:
    """Add the adapters in `folder` to `model`: saved by `save_lora`, or by a PeftModel in transformers.

    Everything is read and checked before the model is changed: only safetensors are read, with exactly the tensors that
    the config asks for, of the right shapes, and finite. Scales that `save_lora` saved replace the model's own.

    Args:
        model: changed in place.
        folder: the folder, a run's folder (its newest checkpoint), or the name of an adapter on the Hugging Face hub.
        trainable: whether the adapters are to be trained further; else the model is returned in eval mode.
        adapter_name: the name that the adapter gets.

    Returns:
        peft's model around `model`, whose te.Linear now have adapters.

    Raises:
        CheckpointError: the folder is damaged, does not fit the model, or is of a kind that is not supported.
    """
    if isinstance(model, PeftModel):
        raise UsageError(
            "the model has adapters already: load another with its load_adapter(folder, name)"
        )
    if not isinstance(model, CausalLM):
        raise UsageError(
            f"{type(model).__name__} is no CausalLM: load its adapters with peft.PeftModel.from_pretrained"
        )
    path = saved_folder(local_folder(folder))
    adapter = read_adapter(model, path, trainable)
    _compare_shapes(model, path)
    state = adapter.saved.tensors.get("fp8_state", {})
    # Before anything changes: scales that do not fit are an error, and the model stays as it was.
    check_fp8_state(model, state)
    recipe = read_recipe(adapter.saved) if state else model.recipe
    model.take_fp8_state(state, recipe)
    adapted = AdaptedModel(model, adapter.config, adapter_name, adapter.layers)
    _fill(adapted, adapter_name, adapter)
    return adapted if trainable else adapted.eval()


def _compare_shapes(model: CausalLM, folder: Path) -> None:
    """Warn if adapters were trained on a model of another shape, such as another rope_theta, than `model`."""
    trained = trained_config(folder)
    if trained is None:
        return
    now = model.config.to_dict()
    then = trained.config.to_dict()
    changed = []
    for name in now:
        # Tensors of other sizes are an error elsewhere; a field such as rope_theta changes no size.
        if now[name] != then[name] and name not in WITHOUT_EFFECT:
            changed.append(name)
    if changed:
        values = ", ".join(f"{name}={then[name]!r}" for name in changed)
        warnings.warn(
            f"the adapters in {folder} were trained on a model with {values}, and this one differs: load the model "
            "with these options, or both with CausalLM.from_pretrained of the adapters' folder",
            stacklevel=3,
        )


def _resolved(
    model: CausalLM, config: PeftConfig, layers: Mapping[str, Adapter] | None
) -> tuple[LoraConfig, Mapping[str, Adapter]]:
    """Return peft's config with the layers that it targets and their ranks, by their names in the model, and these."""
    if model.tp.size > 1:
        raise UsageError(
            "LoRA on a tensor-parallel model is not supported: load it without tp_mesh"
        )
    # The user may give the same config to another model.
    config = copy.deepcopy(config)
    check_fields(config.to_dict(), init=layers is None)
    assert isinstance(config, LoraConfig)
    modules = adaptable_modules(model)
    whole = whole_modules(config, modules, model)
    if layers is None:
        layers = layers_of(adapters_of(config, modules).values(), modules)
    on_experts = bool(modules.counts.keys() & layers.keys())
    if model.ep.size > 1 and on_experts:
        raise UsageError(
            "adapters on experts need all experts on each process: use --parallel fsdp, not fsdp+ep"
        )
    if config.use_dora and on_experts:
        raise UsageError("DoRA on experts is not supported: leave experts out of the targets")
    alphas = {
        name: alpha_of(one.scaling, one.rank, config.use_rslora) for name, one in layers.items()
    }
    config.target_modules = cast(Any, set(layers))  # peft takes a set, and declares a list
    config.target_parameters = None
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.modules_to_save = list(whole.values()) or None
    config.rank_pattern = {name: one.rank for name, one in layers.items() if one.rank != config.r}
    patterns = {}
    for name, alpha in alphas.items():
        if alpha != config.lora_alpha:
            patterns[name] = alpha
    config.alpha_pattern = patterns
    if config.base_model_name_or_path is None and model.origin.folder is not None:
        config.base_model_name_or_path = str(model.origin.folder)
    # A task type would wrap the model in a class that passes it arguments that only models of transformers accept.
    config.task_type = None
    config._register_custom_module(
        {
            NamedRows: LoraLinear,
            AdaptedRows: LoraLinear,
            model.te.Linear: LoraLinear,
            model.te.GroupedLinear: LoraExperts,
        }
    )
    return config, layers


def _show(model: CausalLM, layers: Mapping[str, Adapter]) -> dict[str, list[str]]:
    """Show peft the rows of te.Linears that get adapters of their own; return te.Linear -> their names."""
    rows: dict[str, list[str]] = {}
    for name, one in layers.items():
        module = module_of(one.place)
        if name != module:
            rows.setdefault(module, []).append(name)
            show_rows(model, name, module, one.place)
    return rows


@torch.no_grad()
def _fill(adapted: AdaptedModel, adapter_name: str, adapter: SavedAdapter) -> None:
    for name, parameter in parameters_in(adapted.get_base_model(), adapter_name).items():
        parameter.copy_(adapter.values[name])
