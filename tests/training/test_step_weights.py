"""A step means the same however it is divided: its loss, its gradients, and what FP8's scales know of them.

Judges: one process with all rows, the load-balancing loss of transformers, and a run that was not interrupted.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed_job import continue_from, newest_checkpoint, outcome, solo, start
from distributed_job import make_trainer as trainer_of
from fewer import asked_for, every
from judge import transformers
from torch import Tensor

from te_models import CausalLM, TrainConfig, Trainer
from te_models.config.model import ModelConfig
from te_models.training import run_saves, run_state
from te_models.training.check_state import gradient_factor
from te_models.training.launch import meshes
from te_models.training.parallel import Parallel

# Prompts alone are what is tried here.
pytestmark = pytest.mark.filterwarnings("ignore:a batch of your own has no label that counts")

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
SHAPE = ModelConfig(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.2, moe=EXPERTS,
)  # fmt: skip
BALANCE, Z = 3.0, 0.5
IDS = torch.randint(0, 96, (8, 12), generator=torch.Generator().manual_seed(7))


def rows(answers: str, padded: bool) -> dict[str, Tensor]:
    """Eight rows, of which those that `answers` marks with "a" have targets and the others are prompts alone."""
    labels = IDS.clone()
    labels[:, :5] = -100
    for row, kind in enumerate(answers):
        if kind == "p":
            labels[row] = -100
    batch = dict(input_ids=IDS, labels=labels)
    if padded:
        mask = torch.ones_like(IDS)
        mask[1, 8:] = 0
        mask[6, :7] = 0
        batch |= dict(attention_mask=mask, labels=labels.masked_fill(mask == 0, -100))
    return batch


def run_step(
    answers: str, padded: bool, micro_batches: int, kind: str, shared: Parallel, root: Path
) -> dict[str, Any]:
    """Return the metrics of a step on the rows, divided into micro-batches and each of those among the processes."""
    config = TrainConfig(
        steps=1, batch_size=8 // micro_batches, seq_len=12, gradient_accumulation=micro_batches,
        balance_loss=BALANCE, z_loss=Z, parallel=kind, warmup_steps=0, eval_every=0, clip_grad_norm=0.0,
    )  # fmt: skip
    shared = dataclasses.replace(shared, kind=kind, config=config)
    if kind == "fsdp+ep":
        shared = dataclasses.replace(shared, **{"dp": None, **meshes(config, torch.device("cpu"))})
    torch.manual_seed(3)
    model = shared.build(
        SHAPE, recipe="bf16", dtype=torch.float32, **({} if shared.device else {"device": "cpu"})
    )
    batches = []
    for number in range(micro_batches):
        micro = {name: t.chunk(micro_batches)[number] for name, t in rows(answers, padded).items()}
        batches.append(
            {name: t.chunk(shared.data_world)[shared.data_rank] for name, t in micro.items()}
        )
    run = Trainer(model, batches, None, config, root / "unused", parallel=shared)
    row = run.step(iter(run.data))
    keys = ("loss", "grad_norm", "balance_loss", "z_loss", "fullest_expert", "expert_shares")
    return {name: row[name] for name in keys}


def expected_step(answers: str, padded: bool, micro_batches: int) -> dict[str, float]:
    """The same from the formulas: cross-entropy per target, and of each micro-batch transformers' balance loss and the
    mean squared logsumexp, weighted by its tokens; gradients by autograd through all of it at once."""
    mixtral = transformers.models.mixtral.modeling_mixtral
    torch.manual_seed(3)
    model = CausalLM(SHAPE, recipe="bf16", dtype=torch.float32, device="cpu").eval()
    batch = rows(answers, padded)
    seen: list[Tensor] = []
    for layer in model.layers:
        layer.mlp.router_logits.register_forward_hook(lambda m, inputs, out: seen.append(out))
    losses, counted, balance, z, tokens = [], 0, [], [], []
    for number in range(micro_batches):
        micro = {name: t.chunk(micro_batches)[number] for name, t in batch.items()}
        mask = micro.get("attention_mask", torch.ones_like(micro["input_ids"]))
        seen.clear()
        logits = model(micro["input_ids"], attention_mask=mask).logits
        targets = micro["labels"][:, 1:].masked_fill(mask[:, :-1] == 0, -100)
        losses.append(
            F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        )
        counted += int((targets != -100).sum())
        balance.append(mixtral.load_balancing_loss_func(tuple(seen), 4, 2, mask))
        real = mask.flatten().bool()
        z.append(torch.cat([out[real].logsumexp(1).square() for out in seen]).mean())
        tokens.append(int(mask.sum()))
    shares = [count / sum(tokens) for count in tokens]
    balance_loss = sum(share * value for share, value in zip(shares, balance, strict=True))
    z_loss = sum(share * value for share, value in zip(shares, z, strict=True))
    prediction = sum(losses) / max(1, counted)
    loss = prediction + BALANCE * balance_loss + Z * z_loss
    gradients = torch.autograd.grad(
        torch.as_tensor(loss), [p for p in model.parameters() if p.requires_grad]
    )
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return dict(
        loss=loss.item(),
        grad_norm=norm.item(),
        balance_loss=balance_loss.item(),
        z_loss=z_loss.item(),
    )


# Which rows have answers, whether some are padded, and how many micro-batches there are.
STEPS = {
    "answers everywhere": ("aaaaaaaa", False, 1),
    "one process has prompts alone": ("aaaapppp", False, 1),
    "the other has": ("ppppaaaa", True, 1),
    "a micro-batch of prompts alone": ("ppppaaaa", False, 2),
    "a share of a micro-batch": ("aappaaap", True, 2),
    "prompts alone": ("pppppppp", False, 1),
    "four micro-batches": ("aapppppp", True, 4),
}
KINDS = ("ddp", "fsdp", "fsdp+ep")


@pytest.fixture(scope="module")
def divided(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """The steps by two processes that are asked for."""
    cases = {
        f"{kind}, {name}": partial(run_step, *STEPS[name], kind)
        for name, kind in sorted(asked_for(request, "step", "kind"))
    }
    return start(tmp_path_factory.mktemp("divided"), 2, cases)


@pytest.fixture(scope="module", params=STEPS)
def step(request: pytest.FixtureRequest) -> str:
    """The name of a step."""
    return request.param


@pytest.fixture(scope="module")
def undivided(step: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The step by one process, with which those of all kinds of parallelism are compared."""
    torch.manual_seed(0)
    return run_step(*STEPS[step], "none", Parallel(), tmp_path_factory.mktemp("undivided"))


def test_routers_learn_from_every_token(step: str, undivided: dict[str, Any]) -> None:
    for key, value in expected_step(*STEPS[step]).items():
        assert undivided[key] == pytest.approx(value, rel=1e-4), key


@pytest.mark.parametrize(("step", "kind"), every(2, STEPS, KINDS), indirect=["step"])
def test_two_processes_take_the_step_of_one(
    step: str, kind: str, divided: dict[str, Any], undivided: dict[str, Any]
) -> None:
    found = divided[f"{kind}, {step}"]
    for key in ("loss", "grad_norm", "balance_loss", "z_loss", "fullest_expert"):
        assert found[key] == pytest.approx(undivided[key], rel=1e-4), key
    assert found["expert_shares"] == pytest.approx(undivided["expert_shares"], abs=1e-5)


# Scales of gradients. The histories are short, so that each step's amaxes decide the scales of the next.
DELAYED: dict[str, Any] = dict(recipe="delayed", steps=4, save_every=3, reshard_after_forward=False)
ANSWERS = DELAYED | dict(answers=True, gradient_accumulation=2)


def as_before(shared: Parallel, root: Path, name: str, case: dict[str, Any]) -> dict[str, Any]:
    """A run whose checkpoint is one of the versions that averaged gradients: it names no factor, and its scales know
    gradients as many times as large as there are processes."""
    run = trainer_of(shared, root / name, case)
    flatten = run_state.flatten_state
    content = run_state.checkpoint_content

    def flat(state: dict[str, Any]) -> Any:
        del state["gradient_factor"]
        return flatten(state)

    def old_content(trainer: Trainer) -> Any:
        tensors, documents = content(trainer)
        state = {n: t.clone() for n, t in tensors["fp8_state"].items()}
        for key in state:
            if ".scaling_bwd." in key:
                wider = key.endswith("amax_history")
                state[key] *= shared.data_world if wider else 1 / shared.data_world
        return tensors | {"fp8_state": state}, documents

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_state, "flatten_state", flat)
        patch.setattr(run_saves, "checkpoint_content", old_content)
        return outcome(run, run.run())


CHANGED: dict[str, dict[str, Any]] = {
    "ddp from one": dict(DELAYED, parallel="ddp", resume="one"),
    "fsdp from one": dict(DELAYED, parallel="fsdp", resume="one"),
    "accumulating ddp": dict(ANSWERS, parallel="ddp", resume="answers"),
    "accumulating fsdp": dict(ANSWERS, parallel="fsdp", resume="answers"),
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("resumed")
    one = {"one": solo(root / "one", DELAYED), "answers": solo(root / "answers", ANSWERS)}
    ddp = dict(DELAYED, parallel="ddp")
    two = start(
        root, 2,
        CHANGED | {
            "new": ddp, "old": partial(as_before, name="old", case=ddp), "from old": dict(ddp, resume="old"),
        },
    )  # fmt: skip
    return root, one | two


def gradient_amaxes(found: dict[str, Any]) -> Tensor:
    """The newest finished amaxes of all gradients of a run."""
    histories = {n: v for n, v in found["scales"][0].items() if n.endswith("bwd.amax_history")}
    return torch.tensor([history[-1][0] for _, history in sorted(histories.items())])


@pytest.mark.parametrize("name", CHANGED)
def test_scales_mean_the_same_for_any_number_of_processes(
    name: str, resumed: tuple[Path, dict[str, Any]]
) -> None:
    """Amaxes of the step after a resume in two processes are those of one that goes on, but for roundings to FP8."""
    found, expected = resumed[1][name], resumed[1][CHANGED[name]["resume"]]
    ratio = gradient_amaxes(found) / gradient_amaxes(expected)
    assert len(ratio) == 4 and (ratio.log2().abs() < 0.25).all()
    assert ratio.log2().median().abs() < 0.02
    assert found["losses"][:3] == expected["losses"][:3]
    assert found["losses"][3] == pytest.approx(expected["losses"][3], rel=3e-4)
    assert found["norms"][3] == pytest.approx(expected["norms"][3], rel=2.0**-7)


def test_a_run_of_an_earlier_version_goes_on_with_its_scales(
    resumed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    root, found = resumed
    assert found["from old"] == found["new"], "two processes: every bit"
    continue_from(root / "old", tmp_path / "old")
    continue_from(root / "new", tmp_path / "new")
    alone = [solo(tmp_path / name, DELAYED, resume=True) for name in ("old", "new")]
    assert alone[0] == alone[1], "one process"
    documents = newest_checkpoint(root / "new").documents["training"]
    assert "gradient_factor" in str(documents)


@pytest.mark.parametrize(
    "processes, world, factor",
    [
        ("one", 1, 1),
        ("2, ddp (batches in 2)", 2, 2),
        ("4, fsdp+tp (batches in 2, layers in 2)", 4, 2),
        ("4, fsdp+ep (batches in 4, experts in 2)", 4, 4),
        ("2, tp (layers in 2)", 2, 1),
        ("8, ddp (batches in 8)", 4, 4),  # a later run, which has saved nothing yet
        (None, 1, 1),
        (None, 4, 4),
    ],
)
def test_the_factor_of_a_checkpoint_that_names_none(
    processes: str | None, world: int, factor: int, tmp_path: Path
) -> None:
    if processes is not None:
        (tmp_path / "run.toml").write_text(f'[record]\nprocesses = "{processes}"\n')
    random = torch.get_rng_state()
    state = {"rng": random if world == 1 else random.repeat(world, 1)}
    assert gradient_factor(state, tmp_path, Parallel()) == factor
    assert gradient_factor(state | {"gradient_factor": 1}, tmp_path, Parallel()) == 1
