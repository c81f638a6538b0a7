"""LoRA (Hu et al. 2021, arXiv 2106.09685) on te.Linear through `peft`, on either engine, with merge and unmerge.

peft has adapters for Transformer Engine's layers, but cannot merge them and does not know the emulated engine's.
`LoraLinear` does both; it is registered with peft as a custom module. The frozen te.Linear runs under the model's recipe,
FP8 included; the two low-rank products run in high precision, since a rank such as 8 is no multiple of the alignment that
FP8 GEMMs need.

Our projections are fused, so an adapter on `qkvg_proj` is one low-rank update of q, k, v and the gate together.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.errors import CheckpointError, UsageError, needs
from te_models.files.atomic import first_line
from te_models.fp8.primary_weights import plain, restore_weight, saved_weight, write_weight
from te_models.fp8.scaling_state import check_fp8_state, fp8_state
from te_models.interop.hub import local_folder
from te_models.saving.folder import MANIFEST, load_folder, match, save_folder
from te_models.saving.pretrained import read_recipe

with needs("te_models.training.lora", "peft", "0.19", "lora"):
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import check_adapters_to_merge

WEIGHTS = "adapter_model.safetensors"
MAX_PATTERN, MAX_REPEATS = 1000, 3  # of a regular expression, whose time grows as the length of a name to this power
PROJECTIONS = ("qkvg_proj", "o_proj", "gate_up_proj", "down_proj")


def add_lora(model: CausalLM, config: LoraConfig | None = None, **fields: Any) -> PeftModel:
    """Freeze `model` and add adapters to it, which start at zero and change no output.

    Args:
        model: changed in place.
        config: peft's LoraConfig; None: made of `fields`.
        fields: fields of LoraConfig, such as r=8, lora_alpha=16, target_modules=["o_proj"]. Without target_modules, all
            four projections of every block get adapters.
    """
    if config is None:
        fields.setdefault("target_modules", list(PROJECTIONS))
        config = LoraConfig(**fields)
    return get_peft_model(model, _registered(model, config))  # type: ignore[arg-type]


def save_lora(adapted: PeftModel, folder: str | Path) -> None:
    """Save the adapters of a model into `folder`, atomically, with the FP8 scales that a stateful recipe needs to continue.

    peft reads the folder as one of its own; `load_lora` also restores the scales.

    Raises:
        SaveError: writing failed; the previous content of `folder` is intact.
    """
    model: Any = adapted.get_base_model()
    config = {**adapted.peft_config[adapted.active_adapter].to_dict(), "inference_mode": True}
    config.pop("runtime_config", None)
    weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    tensors = {"adapter_model": {name: tensor.contiguous() for name, tensor in weights.items()}}
    if model.recipe.stateful and (state := fp8_state(model)):
        tensors["fp8_state"] = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items()}
    plain = json.loads(json.dumps(config, default=list))  # peft has sets and enums there
    save_folder(folder, tensors, {"adapter_config": plain, "recipe": model.recipe.to_dict()})


def load_lora(model: CausalLM, folder: str | Path, trainable: bool = False) -> PeftModel:
    """Add the adapters to `model` that `save_lora` or `PeftModel.save_pretrained` wrote into `folder`.

    Everything is read and checked before the model is changed: safetensors alone, exactly the tensors that the config asks
    for, of their shapes, and finite. Scales that `save_lora` saved replace the model's own.

    Raises:
        CheckpointError: the folder is damaged, or does not fit the model.
    """
    folder = local_folder(folder)
    if folder.is_dir() and not (folder / WEIGHTS).exists() and list(folder.glob("*.bin")):
        raise CheckpointError(f"{folder} holds its adapters as a pickle, which can run code: save them as safetensors")
    listed = (folder / MANIFEST).exists()
    names = ["adapter_config", "adapter_model"]
    saved = load_folder(folder, names, optional=["fp8_state", "recipe"] if listed else [], require_manifest=listed)
    tensors, values = saved.tensors["adapter_model"], saved.documents["adapter_config"]
    config = _checked_config(folder, values, tensors, trainable)
    sketch = type(model)(model.config, device="meta", engine="emulated")
    try:
        expected = get_peft_model_state_dict(
            get_peft_model(sketch, _registered(sketch, copy.deepcopy(config))), save_embedding_layers=False
        )
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / 'adapter_config.json'}: {first_line(error)}") from None
    match(expected, tensors, check_dtype=False)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{folder}: {name} has values that are not finite numbers")
    state = saved.tensors.get("fp8_state", {})
    check_fp8_state(model, state)
    recipe = read_recipe(saved) if state else model.recipe
    model.take_fp8_state(state, recipe)
    adapted = get_peft_model(model, _registered(model, config))
    set_peft_model_state_dict(adapted, tensors)
    return adapted if trainable else adapted.eval()


def _checked_config(folder: Path, values: Any, tensors: Mapping[str, Tensor], trainable: bool) -> LoraConfig:
    """Return peft's config of an adapter whose patterns end and whose ranks are those of its tensors."""
    path = folder / "adapter_config.json"
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} is not the config of a LoRA adapter")
    rank, ranks = values.get("r"), values.get("rank_pattern") or {}
    alphas = values.get("alpha_pattern") or {}
    if not isinstance(ranks, dict) or not isinstance(alphas, dict):
        raise CheckpointError(f"{path}: rank_pattern and alpha_pattern are objects")
    largest = max((t.shape[0] for name, t in tensors.items() if "lora_A" in name and t.dim() == 2), default=0)
    for number in (rank, *ranks.values()):
        if type(number) is not int or not 1 <= number <= largest:
            raise CheckpointError(f"{path}: rank {str(number)[:40]!r}, and the adapter's tensors have {largest}")
    for number in (values.get("lora_alpha", 8), values.get("lora_dropout", 0.0), *alphas.values()):
        if type(number) not in (int, float) or not abs(number) < 1e9:
            raise CheckpointError(f"{path}: {str(number)[:40]!r} is neither an alpha nor a dropout")
    for field in ("target_modules", "exclude_modules", "layers_pattern"):
        _check_patterns(path, values.get(field))
    _check_patterns(path, [*ranks, *alphas])
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    try:
        config = LoraConfig(**{name: value for name, value in values.items() if name in known})
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {first_line(error)}") from None
    config.inference_mode = not trainable
    return config


def _check_patterns(path: Path, patterns: Any) -> None:
    """Raise CheckpointError unless regular expressions are short and cannot backtrack without end on a module's name."""
    if not isinstance(patterns, str | list | None):
        raise CheckpointError(f"{path}: a list of modules is a {type(patterns).__name__}")
    for pattern in [patterns] if isinstance(patterns, str) else patterns or []:
        if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
            raise CheckpointError(f"{path}: a pattern must be text of at most {MAX_PATTERN} characters")
        repeats = len(re.findall(r"[*+{]", pattern))
        if re.search(r"\)[*+?{]", pattern) or repeats > MAX_REPEATS:
            raise CheckpointError(
                f"{path}: the pattern {pattern[:80]!r} repeats a group or more than {MAX_REPEATS} parts: list the modules"
            )


def _registered(model: CausalLM, config: Any) -> Any:
    """Return peft's config with LoraLinear registered for the model's te.Linear."""
    if model.tp.size > 1:
        raise UsageError("LoRA on a tensor-parallel model is not supported: load it without tp_mesh")
    # A task type would wrap the model in a class that passes it arguments that only models of transformers take.
    config.task_type = None
    config._register_custom_module({model.te.Linear: LoraLinear})
    return config


class LoraLinear(nn.Module, LoraLayer):
    """A frozen te.Linear with low-rank updates: base(x) + B(A(dropout(x))) * scaling."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, r: int = 0, lora_alpha: int = 1,
                 **options: Any) -> None:  # fmt: skip
        """Called by peft; raise a ValueError for DoRA."""
        if config.use_dora:
            raise UsageError("use_dora=True is not supported on te.Linear: leave it out")
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")  # the emulated engine's, which has both sizes
            LoraLayer.__init__(self, base_layer, **options)
        self._active_adapter = adapter_name
        self._before_merge: dict[str, Tensor] | None = None
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map x [N, in] to [N, out], in the dtype of the base layer's output."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        for name in self._active():
            a: Any = self.lora_A[name]
            b: Any = self.lora_B[name]
            update = b(a(self.lora_dropout[name](x.to(a.weight.dtype)))) * self.scaling[name]
            result = result + update.to(result.dtype)
        return result

    def _active(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.lora_A]

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return the adapter's update of the weight, FP32 [out, in]."""
        a: Any = self.lora_A[adapter]
        b: Any = self.lora_B[adapter]
        return self.scaling[adapter] * (b.weight.float() @ a.weight.float())

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters to the weight, rounding once; the old weight is stored for `unmerge`.

        Args:
            safe_merge: check that the sum is finite.
            adapter_names: the adapters to merge; None: all active ones.

        Raises:
            ValueError: with `safe_merge`, the sum is not finite; the weight is then unchanged.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) or () if name in self.lora_A]
        if not names:
            return
        weight: Any = self.base_layer.weight
        merged: Any = plain(weight).float() + sum(self.get_delta_weight(name) for name in names)
        if safe_merge and not bool(merged.isfinite().all()):
            raise UsageError(f"merging {', '.join(names)} gives values that are not finite: the adapter is broken")
        if self._before_merge is None:
            self._before_merge = saved_weight(weight)
        write_weight(weight, merged, for_master=False)
        self.merged_adapters += names

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the weight from before the first merge, bit for bit."""
        if self._before_merge is None:
            return
        weight: Any = self.base_layer.weight
        restore_weight(weight, self._before_merge)
        self._before_merge = None
        self.merged_adapters.clear()
