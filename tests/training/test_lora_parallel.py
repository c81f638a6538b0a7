"""Adapters of a model that FSDP2 shards, with experts divided among processes or not: what one process computes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_job import assert_same_checkpoints, by_one, start
from fewer import asked_for

from te_models.training.lora_run import load_merged

pytest.importorskip("peft")

LORA = dict(rank=4, alpha=8.0)
ROWS = dict(LORA, targets=("q_proj", "v_proj", "o_proj"), dora=True)
MIXED = dict(LORA, targets=("qkvg_proj", "o_proj"), dora=True)
ALL = dict(LORA, targets=("all-linear", "experts"))
SOME = dict(clip_grad_norm=0.05, save_every=2)
RUNS: dict[str, dict[str, Any]] = {
    "dense": dict(
        parallel="fsdp", recipe="delayed", lora=LORA, mode="selective", clip_grad_norm=0.05
    ),
    "in FP8": dict(
        parallel="fsdp",
        recipe="delayed",
        lora=LORA,
        fp8_params=True,
        gradient_accumulation=2,
        save_every=2,
    ),
    # Magnitudes of DoRA stay in FP32 in a model in BF16, and are their own masters.
    "rows": dict(
        parallel="fsdp",
        recipe="current",
        lora=ROWS,
        fp8_params=True,
        dtype="bfloat16",
        folder=True,
        save_every=2,
    ),
    "sharded": dict(SOME, parallel="fsdp", recipe="bf16", lora=ALL, experts=True),
    "divided rows": dict(SOME, parallel="fsdp", recipe="bf16", lora=LORA, context_parallel_size=2),
    "divided": dict(SOME, parallel="fsdp+ep", recipe="bf16", lora=LORA, experts=True, answers=True),
    "divided in FP8": dict(SOME, parallel="fsdp+ep", recipe="delayed", lora=LORA, experts=True),
    "mixed": dict(
        SOME, parallel="fsdp+ep", recipe="bf16", lora=MIXED, experts=True, dtype="bfloat16"
    ),
}
AGAIN = ("divided", "in FP8", "rows", "mixed")
RESUMED = {f"{name}, resumed": dict(RUNS[name], resume=name) for name in AGAIN}
# In slow tests: others have FP8, adapters of experts that are divided, and magnitudes in BF16, each apart.
RARER = ("in FP8", "mixed", "divided in FP8")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


def named(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in RARER)) for name in cases]


@pytest.fixture(scope="module")
def two(root: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The outcomes of the runs that are asked for."""
    asked = {"rows", *asked_for(request, "name")}
    runs = {name: case for name, case in RUNS.items() if name in asked}
    runs |= {name: case for name, case in RESUMED.items() if case["resume"] in asked}
    return start(root, 2, runs)


@pytest.mark.parametrize("name", named(RUNS))
def test_two_processes_train_what_one_does(name: str, two: dict[str, Any], tmp_path: Path) -> None:
    expected, found = by_one(RUNS[name], tmp_path), two[name]
    close = 2e-6 if RUNS[name]["recipe"] == "bf16" else 1e-3
    if RUNS[name].get("dtype") == "bfloat16":
        close = 1e-3  # sums of rows of two processes are rounded to BF16
    for part in ("losses", "norms", "eval_loss"):
        assert found[part] == pytest.approx(expected[part], rel=close), part
    assert expected["losses"][-1] != expected["losses"][0]


@pytest.mark.parametrize("name", named(AGAIN))
def test_a_resumed_run_has_the_same_bits(name: str, two: dict[str, Any], root: Path) -> None:
    assert two[f"{name}, resumed"] == two[name]
    assert_same_checkpoints(root / name, root / f"{name}, resumed")


def test_with_stateless_scales_two_processes_have_the_bits_of_one(
    two: dict[str, Any], tmp_path: Path
) -> None:
    """On a base in FP8: each scales its own rows, as one process does in as many micro-batches."""
    expected, found = by_one(RUNS["rows"], tmp_path), two["rows"]
    assert found["losses"] == expected["losses"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)  # sums in another order


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about peft
def test_peft_reads_what_two_processes_save(two: dict[str, Any], root: Path) -> None:
    """A checkpoint of a base in FP8: peft on transformers' model has the logits of ours, both in FP32."""
    assert two["rows"]["step"] == 3
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    base = root / "rows/base"
    checkpoint = max((root / "rows/checkpoints").glob("step-*"))
    assert (checkpoint / "adapter_model.safetensors").is_file()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, checkpoint).eval()
    ours = load_merged(
        checkpoint, base=str(base), recipe="bf16", dtype=torch.float32, device="cpu"
    ).eval()
    ids = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids).logits
        with theirs.disable_adapter():
            plain = theirs(ids).logits
        found = ours(ids).logits[..., : expected.shape[-1]]
    assert (expected - plain).abs().max() > 1e-3  # the adapters do something
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
