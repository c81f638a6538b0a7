"""The keywords with which a model is built, by name and type, for editors and type checkers."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypedDict

from te_models.config.options import ConfigOptions, RecipeOptions
from te_models.config.recipe import RecipeLike


class BuildOptions(RecipeOptions, total=False):
    """Keywords that build a model of a given shape; Decoder documents each."""

    recipe: RecipeLike
    engine: Literal["auto", "native", "emulated"] | None
    device: torch.device | str | None
    dtype: torch.dtype | str | None
    activation_checkpointing: str | int
    activation_offload: bool
    fp8_params: bool
    compile: bool | str
    fused: bool | None
    tp_mesh: DeviceMesh | None
    sequence_parallel: bool
    ep_mesh: DeviceMesh | None
    ep_fp8: bool
    ep_replicas: DeviceMesh | None
    cp_mesh: DeviceMesh | None
    amax_group: ProcessGroup | None
    stored_linears: frozenset[str]


# Of a model without values whose shapes are compared; no recipe is chosen for it.
SKETCH: BuildOptions = dict(recipe="bf16", engine="emulated", device="meta")


class ModelOptions(BuildOptions, ConfigOptions, total=False):
    """Every keyword of CausalLM.from_preset: how to build the model, and fields of its config."""


class HubOptions(TypedDict, total=False):
    """Keywords of a download from the Hugging Face hub, as in transformers; ignored for a local folder.

    revision: a branch, tag or commit.
    token: access token of an account that may read it; True for the stored one.
    cache_dir: the folder for downloads.
    local_files_only: use files downloaded before, without contacting the hub.
    force_download: download again.
    """

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool


class PushOptions(TypedDict, total=False):
    """Keywords of CausalLM.push_to_hub, as in transformers.

    token: access token of an account that may write; None or True for the stored one.
    private: whether a new repository is private; None: the account's default.
    revision: the branch to write to, created if it does not exist.
    commit_message: the message of the commit.
    create_pr: open a pull request instead.
    """

    token: str | bool | None
    private: bool | None
    revision: str | None
    commit_message: str | None
    create_pr: bool


class LoadOptions(ModelOptions, HubOptions, total=False):
    """Every keyword of CausalLM.from_pretrained: for a new model, for the hub, and some of transformers.

    dtype: None and "auto" stand for the checkpoint's; torch_dtype is the same.
    device_map: the one device, by name, number or in a dict, or "auto", which is device=None.
    attn_implementation: only "sdpa".
    merge_adapters: add the adapters in the folder, if any, to the weights.
    base_weights: "stored" leaves the quantized weights of a release as they are on the device, frozen, and dequantizes
        one linear's at a time where a product needs them; "dequantized" reads them as numbers of `dtype`.
    """

    torch_dtype: torch.dtype | str | None
    device_map: Any
    attn_implementation: str | None
    merge_adapters: bool
    base_weights: Literal["stored", "dequantized"]
