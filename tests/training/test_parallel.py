"""Several processes are one run: losses, gradient norms, scales, checkpoints, stopping and dying,
over gloo on the CPU."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from distributed_job import EXPERTS as MOE
from distributed_job import (
    SHAPE,
    assert_same_checkpoints,
    by_one,
    continue_from,
    digest,
    newest_checkpoint,
    solo,
    start,
)
from fewer import asked_for
from tiny_runs import PRETRAIN
from torch.distributed.fsdp import FSDPModule

from benchmarks import scaling
from te_models import CausalLM
from te_models.cli import main
from te_models.config.training import TrainConfig
from te_models.errors import UsageError
from te_models.files.tensors import all_finite
from te_models.saving.folder import load_folder
from te_models.saving.run_folder import Checkpoints
from te_models.training.launch import check_launch
from te_models.training.metrics import read_metrics
from te_models.training.parallel import Parallel
from te_models.training.trainer import Trainer

# How far several processes may be from one, relative. They sum in another order, which changes FP32's last bit, and
# under FP8 a value near the middle between two codes then takes the other code. Losses: rounding all values to FP8,
# instead of none, moves them by 1e-4 to 2.7e-4 (an FP8 run against its BF16 twin, six seeds); some codes that differ
# move them less. Norms: a gradient of E5M2 has two bits of mantissa, so that its code is 2^-2 of it or less from the
# next; where one entry makes up a quarter of the norm's square, the norm moves by 2^-2 / 4, and half of that on
# average. Seen over 13 seeds: 1.8e-4 of losses, 6.8e-3 of norms. Under BF16 nothing is rounded to codes.
FP8 = dict(losses=3e-4, eval_loss=3e-4, norms=2.0**-5)
CLOSE = dict(
    bf16=dict.fromkeys((*FP8, "fullest", "balance"), 1e-4),
    delayed=FP8,
    current=FP8,
    blockwise=FP8,
    mxfp8=FP8,
)
RUNS = {
    f"fsdp-{recipe}": dict(parallel="fsdp", recipe=recipe, reshard_after_forward=False)
    for recipe in CLOSE
}
RUNS |= {
    f"ddp-{recipe}": dict(parallel="ddp", recipe=recipe) for recipe in ("bf16", "delayed", "mxfp8")
}
RUNS |= {
    "fsdp-full": dict(parallel="fsdp", recipe="current", mode="full", gradient_accumulation=2),
    "fsdp-selective": dict(parallel="fsdp", recipe="mxfp8", mode="selective", tied=False),
    "fsdp-folder": dict(parallel="fsdp", recipe="current", folder=True),
    "ddp-accumulating": dict(parallel="ddp", recipe="delayed", mode="full", gradient_accumulation=2, record=2),
    "fsdp-accumulating": dict(
        parallel="fsdp", recipe="delayed", gradient_accumulation=2, reshard_after_forward=False, prefetch_blocks=0
    ),
    "tp-bf16": dict(parallel="tp", recipe="bf16", save_every=2, tied=False),
    "tp-delayed": dict(parallel="tp", recipe="delayed", sequence_parallel=True, save_every=3, record=2),
    # Every micro-batch of every process counts another number of tokens.
    "ddp-answers": dict(parallel="ddp", recipe="bf16", answers=True, gradient_accumulation=3),
    "fsdp-answers": dict(parallel="fsdp", recipe="bf16", answers=True, gradient_accumulation=3),
    "tp-answers": dict(parallel="tp", recipe="bf16", answers=True, gradient_accumulation=3),
}  # fmt: skip
BESIDE = dict(
    layer_types=("parallel",) * 3,
    parallel_mixers=dict(input_multipliers=(0.9, 1.2), output_multipliers=(1.1, 0.7)),
    mamba2=dict(num_heads=4, head_dim=16, state_dim=16, num_groups=2, multipliers=(0.9, 0.8, 1.1, 1.2, 0.7)),
    mlp_multipliers=(0.8, 1.2),
)  # fmt: skip
RUNS |= {
    "fsdp-beside": dict(parallel="fsdp", recipe="bf16", shape=BESIDE),
    "ddp-beside": dict(parallel="ddp", recipe="delayed", shape=BESIDE, mode="full"),
}
HYBRID = dict(
    layer_types=("linear_attention", "kda", "conv"),
    linear_attention=dict(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16),
    kda=dict(num_heads=4, head_dim=16),
    short_conv=dict(),
)
ROWS = dict(context_parallel_size=2)  # both processes have some tokens of every sequence
RUNS |= {
    "rows-fsdp": dict(ROWS, parallel="fsdp", recipe="delayed", mode="full", save_every=2),
    "rows-ddp-answers": dict(ROWS, parallel="ddp", recipe="bf16", answers=True, gradient_accumulation=3),
    "rows-experts": dict(ROWS, parallel="fsdp", recipe="bf16", experts=True, balance_loss=0.9),
    "rows-current": dict(ROWS, parallel="fsdp", recipe="current", gradient_accumulation=2),
    "rows-beside": dict(ROWS, parallel="fsdp", recipe="bf16", shape=BESIDE),
    "rows-hybrid": dict(ROWS, parallel="ddp", recipe="delayed", mode="full", shape=HYBRID),
}  # fmt: skip
EXPERTS = dict(parallel="fsdp+ep", experts=True, balance_loss=0.9)
BIASED = dict(moe=MOE | dict(bias=True, swiglu_limit=0.5), attention_sinks=True)
RUNS |= {
    "experts-bf16": dict(EXPERTS, recipe="bf16", clip_grad_norm=0.5, save_every=2, shape=BIASED),
    "experts-delayed": dict(EXPERTS, recipe="delayed", save_every=2, record=2),
    # One process has micro-batches of fewer tokens here, over which experts are balanced.
    "experts-current": dict(EXPERTS, recipe="current", mode="selective", balance_loss=0.0),
    "experts-folder": dict(EXPERTS, recipe="bf16", folder=True),
    "experts-answers": dict(
        EXPERTS, recipe="bf16", answers=True, gradient_accumulation=2, mode="full"
    ),
}


def begin_apart(shared: Parallel, root: Path) -> list[str]:
    """Processes whose own models have other weights; returns a hash of each one's weights after two steps."""
    config = TrainConfig(parallel="ddp", batch_size=2, seq_len=16, eval_every=0)
    shared = replace(shared, kind="ddp", config=config)
    torch.manual_seed(shared.ranks.rank)
    model = CausalLM.from_preset("gated-nano", device="cpu", recipe="bf16", **SHAPE)
    ids = torch.randint(0, 200, (1, 16), generator=torch.Generator().manual_seed(7))
    run = Trainer(
        model, [dict(input_ids=ids, labels=ids)], None, config, root / "a", parallel=shared
    )
    batches = iter(run.data)
    for _ in range(2):
        run.step(batches)
    return shared.ranks.gather(digest(model))


SAVED = dict(recipe="delayed", dtype="bfloat16", steps=4, save_every=2, eval_every=2)
SPECIAL = {
    "saved": dict(SAVED, parallel="fsdp", mode="selective", enlarge=1),
    "saved-ddp": dict(SAVED, parallel="ddp"),
    "sent-in-fp8": dict(parallel="fsdp", recipe="bf16", reduce_dtype="float8"),
    "resharded": dict(parallel="fsdp", recipe="delayed"),
    "resharded-full": dict(parallel="fsdp", recipe="delayed", mode="full"),
    "resharded-offload": dict(parallel="fsdp", recipe="delayed", offload=True),
    "stopped": dict(parallel="fsdp", stop=1, steps=50, save_every=50),
    "poisoned-loss-ddp": dict(parallel="ddp", recipe="delayed", spoil=1, save_every=50),
    "poisoned-loss-fsdp": dict(parallel="fsdp", recipe="current", spoil=0, save_every=50),
    "poisoned-ddp": dict(parallel="ddp", recipe="delayed", poison=1),
    "poisoned-fsdp": dict(parallel="fsdp", recipe="current", poison=1, gradient_accumulation=2),
}
# The scales after one step, whose amaxes are those of the calibration and of the step.
FIRST: dict[str, dict[str, Any]] = {
    f"first-{name}": dict(case, recipe="delayed", steps=1)
    for name, case in {
        "ddp": dict(parallel="ddp"),
        "fsdp": dict(parallel="fsdp"),
        "fsdp-kept": dict(parallel="fsdp", reshard_after_forward=False, gradient_accumulation=2),
        # The update casts each process's shards, whose amaxes the next forward joins, or a save.
        "fsdp-fp8": dict(parallel="fsdp", fp8_params=True, keep_best=True),
        "experts": EXPERTS,
        "tp": dict(parallel="tp", sequence_parallel=True),
        "ddp-accumulating": dict(parallel="ddp", gradient_accumulation=2),
    }.items()
}
FROM_ONE = dict(recipe="delayed", steps=4, save_every=2, resume="one", reshard_after_forward=False)
RESUMED: dict[str, dict[str, Any]] = {
    "resumed": dict(SPECIAL["saved"], resume="saved"),
    "resumed-ddp": dict(SPECIAL["saved-ddp"], resume="saved-ddp"),
    "resumed-experts": dict(RUNS["experts-bf16"], resume="experts-bf16"),
    "resumed-experts-delayed": dict(RUNS["experts-delayed"], resume="experts-delayed"),
    "resumed-from-one": dict(FROM_ONE, parallel="fsdp"),
}
FOUR_EXPERTS = {  # two processes of four have the same experts; then each has its own
    "four-experts-delayed": dict(
        RUNS["experts-delayed"], expert_parallel_size=2, resume="one-experts-delayed"
    ),
    "four-experts-delayed-apart": dict(RUNS["experts-delayed"], resume="four-experts-delayed"),
    "four-experts": dict(RUNS["experts-bf16"], expert_parallel_size=2, resume="one-experts"),
    "four-experts-apart": dict(RUNS["experts-bf16"], resume="four-experts"),
}
FOUR = {
    "four": dict(parallel="fsdp", recipe="delayed", steps=4, reshard_after_forward=False),
    "four-rows": dict(FROM_ONE, context_parallel_size=2, parallel="fsdp"),
    "four-both": dict(FROM_ONE, parallel="fsdp+tp", tensor_parallel_size=2),
}


def assert_close(
    found: dict[str, Any],
    expected: dict[str, Any],
    recipe: str,
    parts: Sequence[str] = ("losses", "norms"),
) -> None:
    """Two outcomes of a run under the recipe differ by rounding alone."""
    for part in parts:
        assert found[part] == pytest.approx(expected[part], rel=CLOSE[recipe][part]), part


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def one(root: Path) -> dict[str, Any]:
    """A run by one process, with a checkpoint half way."""
    return solo(root / "one", dict(recipe="delayed", steps=4, save_every=2))


# What other cases run too, apart from it: in slow tests.
RARER = (
    "fsdp-blockwise",
    "fsdp-mxfp8",
    "ddp-mxfp8",
    "fsdp-full",
    "ddp-accumulating",
    "ddp-answers",
    "first-ddp",
)
RARER += ("first-fsdp", "first-fsdp-fp8", "ddp-beside", "fsdp-beside")
RARER += ("experts-current", "tp-answers", "rows-current", "rows-beside", "rows-hybrid")
RARER += ("fsdp-selective", "fsdp-current", "rows-ddp-answers", "experts-answers", "first-tp")
RARER += ("first-fsdp-kept", "ddp-delayed", "tp-bf16", "experts-folder")
RARER += ("poisoned-loss-fsdp", "poisoned-ddp", "resharded-full", "resumed-ddp", "resumed-experts")


def named(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in RARER)) for name in cases]


@pytest.fixture(scope="module")
def two(root: Path, one: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    """The outcomes of all cases that are asked for; of the usual ones, where a test that is not slow asks."""
    asked, quick = asked_for(request, "name"), False
    for item in request.session.items:
        if item.path == request.path and "two" in item.fixturenames:
            quick = quick or item.get_closest_marker("slow") is None
    # A resumed run needs the one that it continues, and what is resharded another way the plain one.
    for name in asked & RESUMED.keys():
        asked.add(RESUMED[name]["resume"])
    if "resharded-full" in asked:
        asked |= {"resharded", "fsdp-delayed"}
    runs: dict[str, Any] = {}
    for name, case in {**RUNS, **FIRST, **SPECIAL, **RESUMED}.items():
        if name in asked or (quick and name not in RARER):
            runs[name] = case
    if quick:
        runs["apart"] = begin_apart
    return start(root, 2, runs)


@pytest.mark.parametrize("name", named(RUNS))
def test_two_processes_compute_what_one_does(
    name: str, two: dict[str, Any], tmp_path: Path
) -> None:
    expected, found = by_one(RUNS[name], tmp_path), two[name]
    # Under the other recipes each process's own amaxes scale its share of the evaluation.
    evaluated = ["eval_loss"] if RUNS[name]["recipe"] in ("bf16", "delayed") else []
    routed = ["fullest", "balance"] if RUNS[name]["recipe"] == "bf16" else []
    assert_close(found, expected, RUNS[name]["recipe"], ["losses", "norms", *evaluated, *routed])


@pytest.mark.parametrize("name", named(FIRST))
def test_two_processes_measure_the_amaxes_that_one_does(
    name: str, two: dict[str, Any], tmp_path: Path
) -> None:
    """Of gradients too, which in each process are those of a loss per token of all of them."""
    expected, found = by_one(FIRST[name], tmp_path)["scales"][0], two[name]["scales"][0]
    assert found.keys() == expected.keys()
    row = -1 - FIRST[name].get("gradient_accumulation", 1)
    for key in filter(lambda key: key.endswith("amax_history"), expected):
        assert found[key][row] == pytest.approx(expected[key][row], rel=1e-4), key
        assert found[key][row][0] > 0, key


@pytest.mark.parametrize(
    "name",
    named(
        name
        for name, case in {**RUNS, **SPECIAL, **FIRST}.items()
        if case.get("recipe") == "delayed"
    ),
)
def test_delayed_scales_are_the_same_bits_on_every_process(name: str, two: dict[str, Any]) -> None:
    if "errors" in two[name]:
        pytest.skip("the run diverges on purpose")
    first, second = two[name]["scales"]
    assert first and first == second
    assert any(
        value != 1.0 for scale in first.values() for value in torch.tensor(scale).flatten().tolist()
    )


@pytest.mark.parametrize(
    "name",
    named(
        name for name in {**RUNS, **SPECIAL, **RESUMED} if "ddp" in name and "poisoned" not in name
    ),
)
def test_replicas_stay_the_same(name: str, two: dict[str, Any]) -> None:
    assert len(set(two[name]["weights"])) == 1 and len(two[name]["weights"]) == 2


@pytest.mark.slow
def test_stochastic_rounding_is_the_same_on_all_replicas(tmp_path: Path) -> None:
    """Though each process has random numbers of its own, for dropout."""
    rounded = dict(
        optimizer="adamw8bit", optimizer_options="stochastic_rounding=true", dtype="bfloat16"
    )
    found = start(tmp_path, 2, {"rounded": dict(parallel="ddp", recipe="bf16", **rounded)})[
        "rounded"
    ]
    assert len(set(found["weights"])) == 1 and len(found["weights"]) == 2


def test_fsdp_holds_half_the_parameters(two: dict[str, Any]) -> None:
    whole = two["ddp-bf16"]["held"][0]
    assert (
        sum(two["fsdp-bf16"]["held"]) == whole and max(two["fsdp-bf16"]["held"]) <= whole / 2 + 64
    )
    first, second = two["experts-bf16"]["held"]
    assert abs(first - second) <= 64


@pytest.mark.parametrize("name", named(["resharded-full", "resharded-offload"]))
def test_resharded_weights_are_quantized_again_in_backward(name: str, two: dict[str, Any]) -> None:
    """Weights gathered again are quantized with the scales after the forward, so the curves are near, not equal.

    Neither activation checkpointing nor offload changes a bit of them."""
    found, kept, other = two["resharded"], two["fsdp-delayed"], two[name]
    assert found["losses"] == other["losses"] and found["scales"] == other["scales"]
    assert found["losses"][0] == kept["losses"][0] and found["norms"][1] != kept["norms"][1]
    # All codes of a weight differ in backward, which is as much as between FP8 and BF16 (2.7e-4), and each run has its
    # own.
    assert found["losses"] == pytest.approx(kept["losses"], rel=1e-3)


def test_gradients_sent_in_fp8_are_nearly_those_of_fp32(two: dict[str, Any]) -> None:
    """The first loss is computed before any gradient. E4M3 moves each by up to 2^-4, and so a norm by less."""
    found, exact = two["sent-in-fp8"], two["fsdp-bf16"]
    assert found["losses"][0] == exact["losses"][0] and found["losses"][1:] != exact["losses"][1:]
    assert found["losses"] == pytest.approx(exact["losses"], rel=1e-3)
    assert found["norms"][0] != exact["norms"][0]
    assert found["norms"] == pytest.approx(exact["norms"], rel=2.0**-4)


@pytest.mark.parametrize("reduce_dtype", ["bfloat16", "float8"])
@pytest.mark.parametrize("kind", ["ddp", "tp"])
def test_only_fsdp_sums_in_other_dtypes(
    kind: str, reduce_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=f"--reduce-dtype {reduce_dtype} is for --parallel fsdp"):
        check_launch(TrainConfig(parallel=kind, reduce_dtype=reduce_dtype))


@pytest.mark.parametrize("name", named(name for name in RESUMED if name != "resumed-from-one"))
def test_a_resume_on_as_many_ranks_is_exact(name: str, two: dict[str, Any], root: Path) -> None:
    first = RESUMED[name]["resume"]
    assert two[name] == two[first]
    assert len(set(two[first]["drawn"])) == 2, "each rank has random numbers of its own"
    assert_same_checkpoints(root / first, root / name)


def test_one_process_continues_a_run_that_divides_experts(
    two: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    """Its folder has the tensors of one process's, the optimizer's too."""
    case, found = RUNS["experts-bf16"], two["experts-bf16"]
    continue_from(root / "experts-bf16", tmp_path / "run")
    assert_close(
        solo(tmp_path / "run", case, resume=True), found, "bf16", ["losses", "norms", "eval_loss"]
    )
    alone, both = (
        newest_checkpoint(folder) for folder in (tmp_path / "run", root / "experts-bf16")
    )
    for group in ("model", "training"):
        shapes = [
            {n: t.shape for n, t in one.tensors[group].items() if "rng" not in n}
            for one in (alone, both)
        ]
        assert shapes[0] == shapes[1]


def test_one_process_continues_a_run_of_two(
    two: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    continue_from(root / "saved-ddp", tmp_path / "run")
    found = solo(tmp_path / "run", SPECIAL["saved-ddp"], resume=True)
    assert found["losses"][:2] == two["saved-ddp"]["losses"][:2]
    # BF16 gradients are summed in another order.
    assert found["losses"] == pytest.approx(two["saved-ddp"]["losses"], rel=1e-3)


def test_two_processes_go_on_where_one_stopped(two: dict[str, Any], one: dict[str, Any]) -> None:
    found = two["resumed-from-one"]
    assert found["losses"][:2] == one["losses"][:2]
    assert_close(found, one, "delayed")


@pytest.mark.slow
def test_four_processes_too(root: Path, one: dict[str, Any]) -> None:
    """Most of the processes have no row of a small parameter; they also resume a run of one process."""
    four = start(root, 4, FOUR)
    for found in (four[name] for name in FOUR):
        assert_close(found, one, "delayed")
        assert all(scales == found["scales"][0] for scales in found["scales"])


@pytest.mark.slow
def test_four_processes_share_experts(root: Path) -> None:
    """They go on where one stopped, and where four with another division of the experts did."""
    one = {
        recipe: solo(root / folder, RUNS[f"experts-{recipe}"])
        for recipe, folder in {"bf16": "one-experts", "delayed": "one-experts-delayed"}.items()
    }
    four = start(root, 4, FOUR_EXPERTS)
    for name in FOUR_EXPERTS:
        recipe = "delayed" if "delayed" in name else "bf16"
        assert_close(four[name], one[recipe], recipe, ["losses", "norms", "eval_loss"])
        assert all(scales == four[name]["scales"][0] for scales in four[name]["scales"])


def test_a_checkpoint_of_two_is_a_model_folder(
    two: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    folder = Checkpoints(root / "saved" / "checkpoints").latest()
    assert folder is not None and (folder / "model-00002-of-00002.safetensors").exists()
    assert not [path for path in folder.iterdir() if path.suffix not in (".safetensors", ".json")]
    model = CausalLM.from_pretrained(root / "saved", device="cpu")
    assert (
        main(
            [
                "convert",
                "--model",
                str(root / "saved"),
                "--out",
                str(tmp_path / "out"),
                "--format",
                "te",
            ]
        )
        == 0
    )
    again = CausalLM.from_pretrained(tmp_path / "out", device="cpu")
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_a_signal_to_one_process_stops_all_after_the_same_step(
    two: dict[str, Any], root: Path
) -> None:
    assert two["stopped"]["interrupted"] and two["stopped"]["step"] == 3
    newest = Checkpoints(root / "stopped" / "checkpoints").latest()
    assert newest is not None and newest.name == "step-00000003"


@pytest.mark.parametrize("name", named(["poisoned-ddp", "poisoned-fsdp"]))
def test_a_bad_value_on_one_process_stops_all_with_one_message(
    name: str, two: dict[str, Any]
) -> None:
    first, second = two[name]["errors"]
    assert (
        first == second and "step 3: the loss is nan" in first and "layers.2.mlp.down_proj" in first
    )


@pytest.mark.parametrize("name", named(["poisoned-loss-ddp", "poisoned-loss-fsdp"]))
def test_a_bad_loss_on_one_process_leaves_a_checkpoint_of_the_step_before(
    name: str, two: dict[str, Any], root: Path
) -> None:
    first, second = two[name]["errors"]
    assert first == second and "step 3: the loss is nan" in first and "step 2 is saved" in first
    saved = Checkpoints(root / name / "checkpoints").all()
    assert [folder.name for folder in saved] == ["step-00000002"]
    found = load_folder(saved[0], ["model", "training"], optional=["fp8_state"])
    assert all(all_finite(t) for group in found.tensors.values() for t in group.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "--parallel fsdp --preset gated-nano --recipe delayed",
        "--parallel fsdp+ep --preset gated-moe-nano --recipe current",
    ],
)
def test_a_killed_process_ends_the_job_and_torchrun_resumes_it(
    kind: str, texts: None, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    more = ["--batch-size", "2", "--save-every", "4", "--steps", "40", "--out", "run"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    command += ["--standalone", "-m", "te_models", *PRETRAIN, *more, *kind.split()]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        try:
            killed = kill_one(job, run)
            code = job.wait(timeout=300)
        finally:
            job.kill()
    said = (tmp_path / "log").read_text()
    assert code == 0, said
    assert "another process of this job died" in " ".join(said.split()) or f"pid: {killed}" in said
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 41))
    # The second start went on from a checkpoint.
    assert "steps 1 to" not in said and "to 40" in said


def kill_one(job: subprocess.Popen, run: Path) -> int:
    """Kill the last process that torchrun started, once a checkpoint is there; returns its id."""
    deadline = time.time() + 120
    while time.time() < deadline and not (run / "checkpoints" / "latest").exists():
        assert job.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    workers = [
        int(pid) for pid in children if b"te_models" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(workers[-1], signal.SIGKILL)
    return workers[-1]


def test_a_checkpoint_without_a_ranks_file_is_refused(
    two: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    """An incomplete folder is refused with the name of the missing file."""
    shutil.copytree(root / "saved" / "checkpoints", tmp_path / "c")
    (tmp_path / "c" / "step-00000004" / "training-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"training-00002-of-00002\.safetensors"):
        load_folder(tmp_path / "c" / "step-00000004")


def test_all_processes_begin_with_the_weights_of_the_first(two: dict[str, Any]) -> None:
    assert len(set(two["apart"])) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_gradients_are_reduced_with_the_last_micro_batch(kept: bool) -> None:
    """Weights are gathered once per step, or for every forward and backward."""
    config = TrainConfig(parallel="fsdp", reshard_after_forward=not kept)
    shared, model = Parallel("fsdp", config=config), create_autospec(FSDPModule, instance=True)
    for last in (False, False, True):
        shared.prepare_micro_batch(model, last)
    assert shared.retains_weights == kept
    assert [call.args[0] for call in model.set_requires_gradient_sync.call_args_list] == [
        False,
        False,
        True,
    ]
    resharded = [call.args[0] for call in model.set_reshard_after_backward.call_args_list]
    assert resharded == ([False, False, True] if kept else [])
    assert Parallel().retains_weights and not Parallel("tp", config=config).retains_weights


@pytest.mark.parametrize(
    "field, value, near", [("parallel", "fsdp2", "fsdp"), ("reduce_dtype", "float16", "bfloat16")]
)
def test_unknown_names_are_refused(field: str, value: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {field} '{value}'.*'?{near}'?"):
        TrainConfig(**{field: value})


def test_the_benchmark_runs_and_its_estimate_is_one_of_costs() -> None:
    args = argparse.Namespace(preset="gated-nano", recipe="delayed", activation_checkpointing="none", batch_size=1,
                              seq_len=32, warm_up=1, steps=1, accumulation=1, fp8_params=False, device="cpu",
                              cache=True,
                              edges=True, graph=True)  # fmt: skip
    assert scaling.step_seconds(Parallel(), args, SHAPE)["seconds"] > 0
    layer = scaling.ExpertLayer(0.02)
    alone, inside, between = (
        scaling.estimate_experts(*way, scaling.Assumptions(0.16, 0.02), layer)
        for way in ((1, 1, 8), (8, 8, 8), (64, 64, 8))
    )
    assert alone["worst"] == 1 > inside["worst"] > between["worst"]
    # Seven eighths of the rows leave a GPU, and no weight does.
    assert inside["weights"] == 0 and inside["rows"] == pytest.approx(
        4 * 16384 * 8 * 2048 * 2 * 7 / 8 / 360e9
    )
    kept = [scaling.estimate(gpus, 1, scaling.Assumptions(0.16, 0.02)) for gpus in (2, 8, 64, 1000)]
    assert all(row["worst"] < row["best"] <= 1 for row in kept)
    assert [row["worst"] for row in kept] == sorted((row["worst"] for row in kept), reverse=True)
