"""The summary of a run: compiled or not, a CUDA graph or not, and why."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY, said_at_the_end

from te_models import CausalLM
from te_models.cli import main
from te_models.config.training import TrainConfig
from te_models.kernels.dispatch import COMPILE_MODES, compile_mode
from te_models.training.report import _parameters, speed_rows
from te_models.training.result import Result

GRAPH, COMPILED = "forward and backward", "elementwise operations"


@pytest.mark.parametrize(
    "options, fields, compiled, graph",
    [
        ({}, {}, COMPILED, GRAPH),
        (dict(compile="max-autotune"), {}, f"{COMPILED}, max-autotune", GRAPH),
        (
            dict(compile=False),
            dict(cuda_graph=False),
            "off, because compile=False",
            "off, because cuda_graph=False",
        ),
        ({}, dict(gradient_accumulation=2), COMPILED, GRAPH),
        ({}, dict(gradient_accumulation=2, parallel="ddp"), COMPILED, GRAPH),
        ({}, dict(parallel="ddp"), COMPILED, GRAPH),
        (
            dict(activation_offload=True),
            {},
            COMPILED,
            "off, because activation offload copies to the host",
        ),
    ],
)
def test_on_a_gpu(
    options: dict[str, Any],
    fields: dict[str, Any],
    compiled: str,
    graph: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planned on the meta device, where a GPU would be the default."""
    model = CausalLM.from_preset("gated-nano", device="meta", engine="emulated", **TINY, **options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert speed_rows(model, TrainConfig(**fields)) == {"compiled": compiled, "CUDA graph": graph}


def test_the_plan_says_so_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", "--preset", "gated-nano"]) == 0
    said = capsys.readouterr().out
    for name in ("compiled", "CUDA graph"):
        assert f"{name}: off, because the model is on cpu" in said


def test_modes_of_compilation() -> None:
    assert [compile_mode(given) for given in (True, False, *COMPILE_MODES)] == [
        "default",
        None,
        *COMPILE_MODES,
    ]
    with pytest.raises(
        ValueError, match="unknown compile 'max_autotune': did you mean 'max-autotune'"
    ):
        CausalLM.from_preset("gated-nano", device="meta", compile="max_autotune")


def test_a_run_has_the_parameters_of_its_plan() -> None:
    """Without rows of padding, as of a gate per head; of a model with adapters too."""
    model = CausalLM.from_preset(
        "gated-nano", device="meta", engine="emulated", attention_gate="headwise", **TINY
    )
    count = model.config.num_parameters
    assert (
        model.config.num_padding_parameters > 0 and _parameters(model) == f"{count:,} in bfloat16"
    )
    model.requires_grad_(False)
    model.norm.weight.requires_grad_(True)
    assert _parameters(model) == f"{count:,} in bfloat16, 32 of them trained"


@pytest.mark.parametrize(("peak", "printed"), [(37 * 2**20, "37.00 MiB"), (3 * 2**30, "3.00 GiB")])
def test_peak_memory_has_the_unit_of_its_size(peak: int, printed: str) -> None:
    said = said_at_the_end(Result(peak_memory=peak, checkpoint="a"), TrainConfig(), Path("runs"))
    assert re.search(r"peak memory +(.+?) *\n", said)[1] == printed
