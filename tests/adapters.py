"""Adapters on a model of ours and on that of transformers with the same weights, where peft is the judge."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from hf_models import class_of, document_of
from safetensors.torch import load_file

from te_models import CausalLM
from te_models.training.lora_targets import adaptable_modules

pytest.importorskip("peft")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

    from te_models.training.lora import add_lora, save_lora


def ours(folder: Path, **options: Any) -> CausalLM:
    place = dict(dtype=torch.float32, device="cpu", engine="emulated")
    return CausalLM.from_pretrained(folder, **place | options)


def theirs(folder: Path) -> Any:
    how: dict[str, Any] = dict(dtype=torch.float32, attn_implementation="eager")
    return class_of(document_of(folder)["model_type"]).from_pretrained(folder, **how).eval()


@torch.no_grad()
def randomize_adapters(adapted: Any, std: float = 0.3) -> None:
    """Give every adapter values, of which B has none at first; what a part of a fused linear has not stays zero."""
    torch.manual_seed(7)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            p.copy_(torch.randn_like(p) * std)
        elif "modules_to_save" in name:
            p.add_(torch.randn_like(p) * 0.02)


def trained_by_transformers(folder: Path, out: Path, std: float = 0.3, **fields: Any) -> Any:
    """Transformers' model with an adapter of random values, saved in `out`."""
    adapted = peft.get_peft_model(theirs(folder), peft.LoraConfig(task_type="CAUSAL_LM", **fields))
    randomize_adapters(adapted, std)
    adapted.save_pretrained(out)
    return adapted


def save_adapters_on_everything(folder: Path, out: Path) -> Any:
    """Return our model of a folder with random adapters on all linears of blocks, experts and routers, saved in `out`.

    But on none that peft refuses in transformers.
    """
    model = ours(folder)
    modules = adaptable_modules(model)
    linears = {name.rpartition(".")[2] for name in modules.theirs.keys() - modules.routers}
    refused = {"out_proj"} if modules.architecture in ("nemotron_h", "falcon_h1") else set()
    experts = {".".join(name.split(".")[-2:]) for name in modules.experts}
    routers = {f"{name.rpartition('.')[2]}.weight" for name in modules.routers}
    adapted = add_lora(
        model,
        r=2,
        target_modules=sorted(linears - refused - {"lm_head"}),
        target_parameters=sorted(experts | routers),
    )
    randomize_adapters(adapted)
    save_lora(adapted, out)
    return adapted.eval()


def assert_same_files(first: Path, second: Path) -> None:
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    a.pop(
        "base_model.model.lm_head.base_layer.weight", None
    )  # peft saves a frozen head that has an adapter
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert_same_bits(name, tensor, b[name])
