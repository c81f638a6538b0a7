"""Weights that another process rewrites while they are loaded: one of the two versions, or one line."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import CausalLM
from te_models.errors import CheckpointError
from te_models.files import tensors

SHAPE = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=1,
    num_key_value_heads=1,
)
FILE = "model.safetensors"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(CausalLM.from_pretrained(folder, device="cpu").named_parameters())


def change(file: Path, other: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif how == "replaced":
        shutil.copy(other, file.with_suffix(".new"))
        os.replace(file.with_suffix(".new"), file)
    else:
        with file.open("r+b") as opened:
            opened.write(other.read_bytes())


@pytest.mark.parametrize("how", ["rewritten", "replaced", "truncated"])
@pytest.mark.parametrize("format", ["te", "hf"])
def test_a_file_that_changes_while_it_is_loaded(
    format: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate: dict[str, Any] = {"attention_gate": "none"} if format == "hf" else {}
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = CausalLM.from_preset("gated-nano", recipe="bf16", device="cpu", **SHAPE, **gate)
        model.save_pretrained(tmp_path / str(seed), format=format)
    versions = [weights(tmp_path / str(seed)) for seed in (0, 1)]
    safe_open, read_tensor, reads, refused = tensors.safe_open, tensors.SafetensorsFile.read, 0, 0
    for moment in range(40):
        folder = tmp_path / f"at {moment}"
        shutil.copytree(tmp_path / "0", folder)
        os.utime(folder / FILE, (1, 1))  # long ago, as its changes are seen by their time
        reads = 0

        def changing(
            step: Callable[..., Any], at: int = moment, folder: Path = folder
        ) -> Callable[..., Any]:
            def changed(*arguments: Any, **options: Any) -> Any:
                nonlocal reads
                if reads == at:
                    change(folder / FILE, tmp_path / "1" / FILE, how)
                reads += 1
                return step(*arguments, **options)

            return changed

        monkeypatch.setattr(tensors, "safe_open", changing(safe_open))
        monkeypatch.setattr(tensors.SafetensorsFile, "read", changing(read_tensor))
        try:
            found = weights(folder)
            assert any(
                all(torch.equal(found[name], version[name]) for name in version)
                for version in versions
            )
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error) and FILE in str(error)
        if reads <= moment:
            break
    assert 4 < reads <= moment, "the file was changed before every read"
    assert refused > 4
