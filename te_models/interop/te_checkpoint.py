"""Checkpoints of Transformer Engine's own modules: weights and pickled FP8 state, read without running any of it.

`torch.save(model.state_dict(), "model.pt")`, or the same tensors in safetensors files, hold every parameter and, for
each module, a uint8 tensor `<module>._extra_state`: empty, or under DelayedScaling a pickle (section 7.10 of
docs/internals/transformer_engine.md), which Transformer Engine refuses to load unless told that running it is safe. A
.pt file is read by PyTorch's restricted loader, which makes nothing but tensors, and the pickles in it by
te_models.interop.te_extra_state.
"""

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from te_models.config.recipe import SCHEMES, Recipe, get_recipe
from te_models.errors import CheckpointError
from te_models.files.atomic import CHUNK_BYTES, reraising
from te_models.files.formats import Fields, list_some, open_regular
from te_models.files.tensors import SafetensorsFile, check_finite, read_safetensors
from te_models.fp8.extra_state import EXTRA, read_extra_tensor
from te_models.interop.te_extra_state import read_extra_state

SUFFIXES = (".pt", ".pth")
MAX_PICKLE_BYTES = 16 * 2**20  # the names and shapes of a .pt file; about 200 bytes per tensor
_PARTS = {
    "scale_fwd": "scaling_fwd.scale",
    "amax_history_fwd": "scaling_fwd.amax_history",
    "scale_bwd": "scaling_bwd.scale",
    "amax_history_bwd": "scaling_bwd.amax_history",
}


@dataclass(frozen=True)
class TECheckpoint:
    """The content of a checkpoint.

    Attributes:
        weights: parameters by name.
        fp8_state: scales and amax histories by their names in te_models.fp8.scaling_state.
        fields: the recipe's fields in that state.
    """

    weights: dict[str, Tensor]
    fp8_state: dict[str, Tensor]
    fields: Fields = field(default_factory=dict)

    def recipe(self, layers: int) -> Recipe:
        """Return the recipe that a model of `layers` blocks was saved under.

        It is BF16 if there is no state; layers at both ends without state are in BF16.
        """
        if not self.fp8_state:
            return get_recipe("bf16")
        parts = [name.split(".") for name in self.fp8_state]
        # Fewer than nine digits: a name in a file may have any number, and int() of a long one takes forever.
        depths = []
        for part in parts:
            if part[0] == "layers" and part[1].isdecimal() and len(part[1]) < 9:
                depths.append(int(part[1]))
        # Only a module that ran in FP8 has a state.
        head = "fp8" if any(part[0] == "lm_head" for part in parts) else "bf16"
        # Blocks with FP8 state are consecutive; the ones before and behind ran in BF16.
        edges = dict(
            num_layers_at_start_in_bf16=min(depths, default=0),
            num_layers_at_end_in_bf16=layers - 1 - max(depths, default=0),
        )
        with reraising(
            "the checkpoint's FP8 state is of a recipe that cannot be", TypeError, ValueError
        ):
            return get_recipe("delayed", **self.fields, **edges, lm_head=head)


def _is_own_folder(folder: Path) -> bool:
    """Return whether te-models saved the model in a folder, which may have lost its manifest."""
    # Its model.safetensors has an _extra_state too, for transformers, and these files hold the same scales.
    return (folder / "recipe.json").exists() or any(folder.glob("fp8_*.safetensors"))


def te_files(folder: Path) -> list[Path]:
    """Return the files of a Transformer Engine checkpoint in `folder`; none if it holds something else."""
    if _is_own_folder(folder):
        return []
    pickles = sorted(path for path in folder.glob("*") if path.suffix in SUFFIXES)
    tensors = sorted(folder.glob("*.safetensors"))
    for path in tensors:
        with SafetensorsFile(path) as file:
            if any(name.endswith(EXTRA) for name in file.tensors):
                return tensors
    return pickles if not tensors else []


def read_te_checkpoint(
    path: str | Path, rename: Callable[[str], str] | None = None
) -> TECheckpoint:
    """Read a .pt, .pth or .safetensors file, or all such files of a folder.

    Args:
        path: the file or folder. A state_dict under the key "model" or "state_dict" of a larger dictionary is found.
        rename: maps their name of a parameter to ours, for a model with other names; it also renames modules.

    Raises:
        CheckpointError: there is none, it is damaged, or reading it would mean running code.
    """
    path = Path(path)
    if path.is_file() and path.suffix not in (*SUFFIXES, ".safetensors"):
        raise CheckpointError(
            f"{path} is no state_dict of Transformer Engine's modules: give a .pt, .pth or .safetensors file, or a "
            "folder with some"
        )
    files = te_files(path) if path.is_dir() else [path]
    if not files and _is_own_folder(path):
        raise CheckpointError(
            f"{path} is a model that te-models saved, and no checkpoint of Transformer Engine's modules: give it as "
            "--model (in Python: CausalLM.from_pretrained)"
        )
    if not files:
        raise CheckpointError(
            f"{path} holds no Transformer Engine checkpoint: no .pt or .pth, no {EXTRA} in safetensors"
        )
    weights: dict[str, Tensor] = {}
    extra_states: dict[str, Tensor | bytes] = {}
    for file in files:
        content = _read_pt(file) if file.suffix in SUFFIXES else read_safetensors(file)
        for name, value in content.items():
            if rename is not None:
                name = rename(name)
            if not name.endswith(EXTRA):
                weights[name] = value
            elif value is not None:
                extra_states[name] = value
    state: dict[str, Tensor] = {}
    fields: Fields = {}
    for name, value in extra_states.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            # A CausalLM's own state: a row for the scales, and one for each step of the history.
            owner = name.removesuffix(f".{EXTRA}")
            # A te.GroupedLinear has weight0, weight1, ...
            gemms = sum(weight.startswith(f"{owner}.weight") for weight in weights) or 1
            state |= read_extra_tensor(owner, value, gemms)
            fields = fields or {"amax_history_len": len(value) - 1}
            continue
        extra = read_extra_state(value)
        if extra:
            module = name.removesuffix(EXTRA)
            for part, own_name in _PARTS.items():
                if part in extra:
                    state[module + own_name] = extra[part]
            fields = fields or extra["recipe"]
    check_finite(weights, path)
    known = {}
    for name in SCHEMES["DelayedScaling"].fields:
        if fields.get(name) is not None:
            known[name] = fields[name]
    return TECheckpoint(weights, state, known)


def _read_pt(file: Path) -> Fields:
    """Return the state_dict in a .pt file: tensors, and None for modules without a state."""
    descriptor, status = open_regular(file)
    place = f"{file} is damaged, or holds more than tensors, which is not run"
    advice = "; save the model's state_dict() alone, with weights that are not in FP8"
    # The loader's errors have no common base but Exception.
    with reraising(place, Exception, advice=advice), open(descriptor, "rb") as opened:
        _check_archive(opened, status.st_size)
        opened.seek(0)
        # To the CPU, whatever device the tensors were saved on: this machine may lack it.
        content = torch.load(opened, map_location="cpu", weights_only=True)
    # Training scripts save a larger dictionary, with the optimizer beside the model.
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), Mapping):
            content = content[key]
    problem = " is no state_dict: it must map names to tensors"
    if isinstance(content, Mapping) and all(
        isinstance(name, str)
        and (isinstance(value, Tensor) or (value is None and name.endswith(EXTRA)))
        for name, value in content.items()
    ):
        wrong = []
        for name, value in content.items():
            if value is not None and not _is_plain(value):
                wrong.append(name)
        if not wrong:
            return dict(content)
        problem = f": {list_some(wrong[:1])} is no plain tensor in memory of its own size"
    raise CheckpointError(f"{file}{problem}")


def _check_archive(opened: BinaryIO, size: int) -> None:
    """Raise ValueError unless a file is an archive of uncompressed records, which take no more memory than the file."""
    if not zipfile.is_zipfile(opened):
        raise ValueError("it is no archive, as torch.save writes since PyTorch 1.6")
    archive = zipfile.ZipFile(opened)
    records = archive.infolist()
    pickles = [record.file_size for record in records if record.filename.endswith(".pkl")]
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("it is compressed")
    if sum(record.file_size for record in records) > size:
        raise ValueError("its records overlap")
    if any(length > MAX_PICKLE_BYTES for length in pickles):
        raise ValueError("it describes too many tensors")
    whole = [_checksum_fits(archive, record) for record in records]
    # All are wrong after torch.serialization.set_crc32_options(False).
    if any(whole) and not all(whole):
        raise ValueError("a checksum in it does not fit")


def _checksum_fits(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(record) as content:
            # Read to its end in pieces: zipfile compares the checksum there.
            while content.read(CHUNK_BYTES):
                pass
    except zipfile.BadZipFile:
        return False
    return True


def _is_plain(value: Tensor) -> bool:
    """Return whether a tensor is dense and its elements do not share memory."""
    if (
        type(value) not in (Tensor, torch.nn.Parameter)
        or value.layout != torch.strided
        or value.is_quantized
    ):
        return False
    return value.device.type == "cpu" and value.nbytes <= value.untyped_storage().nbytes()
