"""The Hugging Face hub: models by name, and the keywords of transformers' from_pretrained for them and for devices."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from te_models.config.recipe import unknown_option
from te_models.config.shipped import file_is_no_model, list_shipped, shipped_folder
from te_models.errors import UsageError, needs
from te_models.files.atomic import first_line, readable
from te_models.files.formats import Document, Fields, list_some
from te_models.interop.model_card import CARD, user_card
from te_models.model.dtypes import given_dtype
from te_models.model.options import HubOptions, LoadOptions

# The files of a repository that a model needs.
WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken")
# Mistral's and Meta's releases contain the same weights a second time, in their own format.
UNWANTED = ("consolidated*", "original/*", "onnx/*")
# The attn_implementation in the config of a TEModelsForCausalLM. TRL passes it on when it loads a reference model.
OUR_ATTENTION = "te_models"
NO_BITSANDBYTES = (
    "bitsandbytes is not part of te-models: recipe='current' with fp8_params=True stores one byte "
    "per weight"
)
NO_PLAN = "tensor parallelism is tp_mesh=, a DeviceMesh"
NO_DISK = "weights are not moved to disk: device= says where they are"
OWN_KERNELS = "te-models chooses its own kernels: fused= switches them"
TENSORFLOW = "only safetensors are read: save the model with transformers first"
# Keywords of transformers, with the alternative in te-models or the reason why there is none.
REFUSED = {
    "quantization_config": "te-models quantizes by its own recipes: recipe='current', or fp8_params=True to store FP8 "
    "weights",
    "load_in_8bit": NO_BITSANDBYTES,
    "load_in_4bit": NO_BITSANDBYTES,
    "max_memory": "a model is on one device: device=, or tp_mesh= to share it between GPUs",
    **dict.fromkeys(("offload_folder", "offload_buffers", "offload_state_dict"), NO_DISK),
    **dict.fromkeys(("tp_plan", "tp_size", "device_mesh", "distributed_config"), NO_PLAN),
    **dict.fromkeys(
        ("use_kernels", "kernel_config", "fusion_config", "experts_implementation"), OWN_KERNELS
    ),
    **dict.fromkeys(("from_tf", "from_flax"), TENSORFLOW),
    "key_mapping": "tensors have the names of their family: rename them in the folder",
    "adapter_name": "load an adapter with te_models.training.lora.load_lora",
    "adapter_kwargs": "load an adapter with te_models.training.lora.load_lora",
    "generation_config": "it is read from the folder: give its options to generate",
    "subfolder": "give the path of the folder itself",
    "variant": "weights are model.safetensors or its shards; give revision= for another version of the repository",
    "gguf_file": "GGUF is not read: give a folder with safetensors",
    "config": "a model has the shape of its config.json: give fields of ModelConfig as keywords",
    "state_dict": "build the model with from_preset, then load_state_dict",
    "ignore_mismatched_sizes": "every tensor must fit; convert the folder with transformers first",
    "output_loading_info": "there is none: tensors that are missing or not expected are an error",
    "use_auth_token": "give token=",
    "proxies": "set the environment variables HTTP_PROXY and HTTPS_PROXY",
}
# Keywords without effect: no code is run, no pickle is read, memory use is always low, and downloads always resume.
WITHOUT_EFFECT = frozenset(
    (
        "trust_remote_code",
        "code_revision",
        "use_safetensors",
        "weights_only",
        "low_cpu_mem_usage",
        "resume_download",
        "disable_mmap",
        "tqdm_class",
        "allow_all_kernels",
        "commit_hash",
        "_commit_hash",
        "mirror",
        "use_cache",
    )
)


def local_folder(name: str | Path, **hub: Any) -> Path:
    """Return the folder of a model: the path itself, a shipped model's, or the one to which the hub's is downloaded.

    Args:
        name: a path, or "owner/model".
        hub: HubOptions; ignored for a path.

    Raises:
        UsageError: it is a file, there is no such folder or model, or the hub did not give it; the message says why.
    """
    path = readable(Path(name))
    if path.is_file():
        raise file_is_no_model(path)
    # A folder here comes before a model of the same name elsewhere.
    if path.exists():
        return path
    if (shipped := shipped_folder(str(name))) is not None:
        return shipped
    owner, _, repository = str(name).partition("/")
    # Anything else was meant as a path: the hub is not asked for "./model" or "a/b/c".
    if not (owner and repository) or "/" in repository or owner[0] in ".~" or repository[0] in ".~":
        raise UsageError(
            f"{name}: no such folder, and no model that ships with te-models ({', '.join(list_shipped())}); models of "
            "the Hugging Face hub are named owner/model"
        )
    # As for data: a folder of the owner's name says that a path was meant.
    if Path(owner).is_dir():
        raise UsageError(_nothing_in(Path(owner), repository))
    with needs(
        f"{name} is no folder here, and the Hugging Face hub", "huggingface_hub", "0.26", "hf"
    ):
        from huggingface_hub import snapshot_download  # noqa: PLC0415
    with _answering(f"{name} is no folder here, and the Hugging Face hub did not give it"):
        return Path(
            snapshot_download(
                str(name), allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED), **hub
            )
        )


def _nothing_in(folder: Path, name: str) -> str:
    """Return the line for a model that is not in a folder of this directory."""
    members = sorted(path.name for path in folder.iterdir() if path.is_dir())
    choice = f"{folder} has {list_some(members)}" if members else f"{folder} has no folder in it"
    return (
        f"{folder}/{name}: no such folder, and {choice}; to load {folder}/{name} of the Hugging Face hub, start where "
        f"there is no folder {folder}"
    )


@contextmanager
def _answering(problem: str) -> Iterator[None]:
    """Turn every error of the hub's library in the block into a UsageError; they have no common base but Exception."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{problem} ({type(error).__name__}: {first_line(error)})") from None


def push_folder(folder: Path, repo_id: str, options: Document) -> str:
    """Upload a folder to a repository on the hub, which is created if it does not exist; return its address.

    A model card there that te-models did not write is left unchanged. `options` are PushOptions.

    Raises:
        UsageError: the hub refused it or did not answer; the message says why.
    """
    with needs("push_to_hub", "huggingface_hub", "0.26", "hf"):
        from huggingface_hub import HfApi  # noqa: PLC0415
    api = HfApi(token=options.get("token"))
    revision = options.get("revision")
    with _answering(f"the Hugging Face hub did not take {repo_id}"):
        repository = api.create_repo(repo_id, private=options.get("private"), exist_ok=True).repo_id
        # A pull request makes a branch by itself.
        if revision is not None and not options.get("create_pr"):
            api.create_branch(repository, branch=revision, exist_ok=True)
        ignored = []
        if api.file_exists(repository, CARD, revision=revision):
            card = Path(api.hf_hub_download(repository, CARD, revision=revision))
            # A card with text of its author's is worth more than a generated one.
            if user_card(card.parent) is not None:
                ignored = [CARD]
        return str(
            api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                ignore_patterns=ignored,
                commit_message=options.get("commit_message") or "Upload a model of te-models",
                revision=revision,
                create_pr=options.get("create_pr"),
            )
        )


def split_options(options: Document) -> tuple[Fields, Fields]:
    """Return the keywords of `from_pretrained` for the hub and for the model, translating transformers' own.

    Raises:
        UsageError: an unknown keyword (the nearest one is named), or one without an equivalent in te-models, with the
            reason.
    """
    known = LoadOptions.__annotations__
    model_options = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}
    for name, value in list(model_options.items()):
        if name in REFUSED and value not in (None, False, ""):
            raise UsageError(f"{name}={repr(value)[:60]} is not supported: {REFUSED[name]}")
        # Its default asks for nothing, and TRL and others give all keywords.
        if name in REFUSED:
            del model_options[name]
        elif name not in known:
            raise unknown_option("keyword", name, known, "te_models.model.options.LoadOptions")
    hub = {}
    for name in HubOptions.__annotations__:
        value = model_options.pop(name, None)
        if value is not None:
            hub[name] = value
    kernel = model_options.pop("attn_implementation", None)
    if kernel not in (None, "sdpa", OUR_ATTENTION):
        raise UsageError(
            f"attn_implementation={kernel!r} is not supported: attention is PyTorch's scaled_dot_product_attention "
            "('sdpa'), with cuDNN's or FlashAttention's kernel on a GPU; leave it out"
        )
    device_map = model_options.pop("device_map", None)
    if device_map is not None:
        if model_options.get("device") is not None:
            raise UsageError("give either device= or device_map=")
        model_options["device"] = _device(device_map)
    # transformers before 4.56 calls it torch_dtype.
    older = model_options.pop("torch_dtype", None)
    dtype = model_options.pop("dtype", older)
    # Otherwise left out: the checkpoint's then counts.
    if dtype not in (None, "auto"):
        model_options["dtype"] = given_dtype(dtype)
    return hub, model_options


def _device(device_map: Any) -> torch.device | str | None:
    """Return the one device of a device_map; None, the default one, for "auto"."""
    if isinstance(device_map, Mapping):
        # A map that names one device for all modules is that device.
        places = [*{str(place) for place in device_map.values()}]
    else:
        places = [device_map]
    if len(places) != 1:
        raise UsageError(
            f"device_map names {len(places)} devices, and a model is on one: give device=, or tp_mesh= to "
            "share it between GPUs"
        )
    if device_map in ("balanced", "balanced_low_0", "sequential"):
        raise UsageError(
            f"device_map={device_map!r} spreads layers over GPUs, which te-models does not: give device=, or "
            "tp_mesh= to share each layer between GPUs"
        )
    (device_map,) = places
    if device_map == "auto":
        return None
    if isinstance(device_map, int) or str(device_map).isdigit():
        return f"cuda:{device_map}"
    try:
        return torch.device(device_map)
    except (RuntimeError, TypeError):
        raise UsageError(
            f"device_map={device_map!r} is no device: give 'cuda', 'cuda:0', 'cpu' or 'auto'"
        ) from None
