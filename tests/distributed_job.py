"""Runs that tests of several processes compare; one start of the processes serves all cases."""

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import seeds  # noqa: F401  processes of a test move their seeds too
import torch
from bits import assert_same_tensors
from ranks import run_ranks
from tiny_runs import TEXT
from torch import nn

import te_models.engine.emulated as emulated
from te_models import CausalLM
from te_models.config.presets import get_preset
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.documents import Document
from te_models.data.tokenizer import load_tokenizer
from te_models.distributed.dtensor import local
from te_models.errors import Diverged
from te_models.fp8.scaling_state import fp8_state
from te_models.model import offload
from te_models.optim import gradients, master
from te_models.saving.folder import Folder, load_folder
from te_models.training.launch import meshes, parallel
from te_models.training.lora_run import LoraRun
from te_models.training.metrics import read_metrics
from te_models.training.parallel import Parallel, reshard
from te_models.training.settings import LoraSettings
from te_models.training.trainer import Result, Trainer

Case = dict[str, Any] | Callable[[Parallel, Path], Any]
SHAPE = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
)
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
ANSWERS = [
    Document("yes " * (1 + 7 * (i % 4)), prompt="how many legs has an animal? " * (1 + i % 3))
    for i in range(40)
]


def make_trainer(shared: Parallel, out: Path, case: dict[str, Any]) -> Trainer:
    """Return the run of a case, in this process's share of it.

    Keys of a case that are no field of TrainConfig: recipe, mode (of recomputation), offload, dtype, tied, fp8_params
    and shape build the model; experts gives it experts; folder loads it from a folder of Hugging Face; answers trains
    on prompts with answers; lora has the fields of LoraSettings. Checkpoints are written with `save_every` alone.
    """
    case = dict(case)
    emulated.FP8GlobalStateManager.reset()
    torch.manual_seed(5)
    recipe = case.pop("recipe", "bf16")
    from_folder = case.pop("folder", False)
    lora = case.pop("lora", None)
    documents = ANSWERS if case.pop("answers", False) else TEXT
    options: dict[str, Any] = dict(
        recipe=recipe,
        device="cpu",
        dtype=getattr(torch, case.pop("dtype", "float32")),
        fp8_params=case.pop("fp8_params", False),
        activation_checkpointing=case.pop("mode", "none"),
        activation_offload=case.pop("offload", False),
    )
    if recipe == "delayed":
        options["amax_history_len"] = 4
    shape: dict[str, Any] = dict(SHAPE, tie_word_embeddings=case.pop("tied", True))
    if case.pop("experts", False):
        shape["moe"] = EXPERTS | dict(shared_expert_gate=from_folder)
    if from_folder:
        # As Qwen3-Next is, so that its architecture can express the model.
        shape |= dict(qk_norm=True, zero_centered_norm=True)
    shape |= case.pop("shape", {})
    model_config = get_preset("gated-nano", **shape)
    # All other keys are settings of the run.
    fields = dict(
        steps=3, batch_size=4, seq_len=48, eval_every=0, keep_best=False, learning_rate=3e-3
    )
    # No warm-up is longer than its run.
    fields["warmup_steps"] = min(2, case.get("steps", fields["steps"]))
    config = TrainConfig(**{**fields, **case})

    shared = replace(shared, kind=config.parallel, config=config, frozen=lora is not None)
    if config.parallel in ("tp", "fsdp+tp", "fsdp+ep") or config.context_parallel_size:
        shared = replace(shared, **{"dp": None, **meshes(config, torch.device("cpu"))})
    assert (shared.cp is not None) == bool(config.context_parallel_size)
    if from_folder:
        # There q, k, v and the gate are tensors of their own.
        shared.ranks.from_first(
            lambda: CausalLM(model_config, device="cpu").save_pretrained(out / "base", format="hf")
        )
        model = CausalLM.from_pretrained(out / "base", build=shared.build, **options)
    else:
        model = shared.build(model_config, **options)

    tokenizer = load_tokenizer(None)
    sizes: dict[str, Any] = dict(
        batch_size=shared.rows(config.batch_size),
        seed=0,
        rank=shared.data_rank,
        world_size=shared.data_world,
    )
    data = TokenDataset(documents[:30], tokenizer, config.seq_len, **sizes)
    held_out = TokenDataset(documents[30:], tokenizer, config.seq_len, shuffle=False, **sizes)
    saved = None
    if lora is not None:
        base = str(out / "base") if from_folder else None
        saved = LoraRun(model, LoraSettings(**lora), base)
    run = Trainer(model, data, held_out.eval_batches(2), config, out, parallel=shared, saved=saved)
    if not config.save_every:
        # Nobody reads the last checkpoint, which would take a third of so short a run.
        run.save = lambda blocking=True, interrupted=False: None
    return run


def outcome(run: Trainer, result: Result) -> dict[str, Any]:
    """Return what tests compare: the curves, and the scales and next random number of each rank."""
    reshard(run.model)
    shared = run.parallel
    scales = {n: t.tolist() for n, t in run.model.copied_fp8_state().items()}
    local_parameters = sum(local(p).numel() for p in run.model.parameters())
    rows = read_metrics(run.out / "metrics.jsonl") if shared.ranks.first else []
    return dict(
        losses=[row["loss"] for row in rows],
        norms=[row["grad_norm"] for row in rows],
        fullest=[row["fullest_expert"] for row in rows if "fullest_expert" in row],
        balance=[row["balance_loss"] for row in rows if "balance_loss" in row],
        eval_loss=result.eval_loss,
        step=result.step,
        interrupted=result.interrupted,
        scales=shared.ranks.gather(scales),
        held=shared.ranks.gather(local_parameters),
        weights=shared.ranks.gather(digest(run.model)),
        drawn=shared.ranks.gather(torch.rand(()).item()),
    )


def digest(model: nn.Module) -> str:
    """Return a hash of the bits of all weights that this process has."""
    bits = (
        local(p).detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for p in model.parameters()
    )
    return hashlib.sha256(b"".join(bits)).hexdigest()


def stop(run: Trainer) -> None:
    """Send SIGTERM to the process."""
    os.kill(os.getpid(), signal.SIGTERM)


def poison(run: Trainer) -> None:
    """Set a weight of the process to NaN."""
    with torch.no_grad():
        local(run.model.layers[2].mlp.down_proj.weight)[0, 0] = float("nan")


def enlarge(run: Trainer) -> None:
    """Enlarge the backward amaxes of the process, so that they are the largest of all when the step is saved."""
    for name, history in fp8_state(run.model, ("scaling_bwd",)).items():
        if name.endswith("amax_history"):
            history[0] = 4 * history[-1]


def spoil(run: Trainer) -> None:
    """Make the loss of the process's next pass NaN, and no weight."""
    forward = run.passes.train_model

    def spoiled(**batch: Any) -> Any:
        output = forward(**batch)
        return output._replace(loss=output.loss * float("nan"))

    run.passes.train_model = spoiled


EVENTS = {"stop": stop, "poison": poison, "enlarge": enlarge, "spoil": spoil}


def strike(run: Trainer, event: Callable[[Trainer], None], rank: int) -> None:
    """Let the event happen to process `rank` alone, after step 2."""

    def on_step(row: dict[str, Any]) -> None:
        if row["step"] == 2 and run.parallel.ranks.rank == rank:
            event(run)

    run.on_step = on_step


def run_case(shared: Parallel, root: Path, name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Run a case; `resume` is the folder whose oldest checkpoint it continues, one in EVENTS a rank to strike."""
    case = dict(case)
    source = case.pop("resume", None)
    struck = {name: case.pop(name) for name in EVENTS.keys() & case.keys()}
    out = root / name
    if source is not None:
        shared.ranks.from_first(lambda: continue_from(root / source, out))
    run = make_trainer(shared, out, case)
    for event, rank in struck.items():
        strike(run, EVENTS[event], rank)
    try:
        return outcome(run, run.run(resume=source is not None))
    except Diverged as error:
        return dict(errors=shared.ranks.gather(str(error)))


def continue_from(source: Path, out: Path) -> None:
    """Copy a run as it was at its oldest checkpoint."""
    shutil.copytree(source, out)
    for later in sorted((out / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(later)


def run_cases(cases: dict[str, Case], rank: int, folder: str) -> None:
    """Run the cases one after the other, and write the outcome of each to CASE.json; for run_ranks without a backend.

    A function is called with this process's share and the folder. They go on once the outcome is written: a rank that
    fails fails in the first case without a file.
    """
    offload.SMALL = 0  # tiny tensors are moved too
    # So small that tiny models have several buckets and chunks; a single process has one of each.
    gradients.BUCKET = 5000
    master.UPDATE_CHUNK = 5000
    root = Path(folder)
    # A rank that dies ends the job at once; the time is for ranks that wait for a processor.
    config = TrainConfig(parallel="fsdp", collective_timeout=600)
    # torchao would compile its steps.
    with torch.compiler.set_stance("force_eager"), parallel(config, "cpu") as shared:
        for name, case in cases.items():
            result = case(shared, root) if callable(case) else run_case(shared, root, name, case)
            shared.ranks.from_first(partial((root / f"{name}.json").write_text, json.dumps(result)))


def newest_checkpoint(run: Path) -> Folder:
    return load_folder(max((run / "checkpoints").glob("step-*")))


def assert_same_checkpoints(one: Path, other: Path) -> None:
    """Compare the newest checkpoints of two runs in every bit of all tensors: of the model, the optimizer and more."""
    groups = newest_checkpoint(one).tensors
    other_groups = newest_checkpoint(other).tensors
    assert groups.keys() == other_groups.keys() and len(groups) > 1
    for group, tensors in groups.items():
        assert_same_tensors(tensors, other_groups[group])


# Settings that one process does not have.
MANY = (
    "parallel",
    "resume",
    "tensor_parallel_size",
    "expert_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
)


def alone(case: dict[str, Any]) -> dict[str, Any]:
    """Return the case for one process.

    Where scales are those of a micro-batch alone, each of the two processes has its own: one process has as many
    micro-batches in all.
    """
    case = {key: value for key, value in case.items() if key not in MANY}
    if case.get("recipe") not in ("delayed", "bf16"):
        case |= dict(batch_size=2, gradient_accumulation=2 * case.get("gradient_accumulation", 1))
    return case


def solo(out: Path, case: dict[str, Any], resume: bool = False) -> dict[str, Any]:
    """Run the case in one process."""
    with torch.compiler.set_stance("force_eager"):
        run = make_trainer(Parallel(), out, alone(case))
        return outcome(run, run.run(resume=resume))


# Settings that change no number of one process.
UNSEEN = ("mode", "reshard_after_forward", "prefetch_blocks", "save_every", "record")
_by_one: dict[str, dict[str, Any]] = {}


def by_one(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what one process computes, in `folder`; cases that are the same to it share a run."""
    own = {key: value for key, value in case.items() if key not in UNSEEN}
    name = repr(sorted(alone(own).items()))
    if name not in _by_one:
        _by_one[name] = solo(folder, own)
    return _by_one[name]


class Outcomes(dict[str, Any]):
    """Case -> its outcome, or the message of a failure, with which a test that asks for the case fails."""

    def __getitem__(self, name: str) -> Any:
        result = super().__getitem__(name)
        if isinstance(result, str):
            pytest.fail(f"case {name}: {result}", pytrace=False)
        return result


def start(root: Path, world: int, cases: dict[str, Case]) -> Outcomes:
    """Run the cases in `world` processes. After a failure new processes run the cases that were not reached."""
    outcomes = Outcomes()
    while left := {name: case for name, case in cases.items() if name not in outcomes}:
        failure = ""
        try:
            run_ranks(partial(run_cases, left), root, world, backend=None)
        except pytest.fail.Exception as error:
            failure = str(error)
        for name in left:
            file = root / f"{name}.json"
            if not file.exists():
                # The processes ended in this case, and reached none after it.
                outcomes[name] = failure
                break
            outcomes[name] = json.loads(file.read_text())
    return outcomes
