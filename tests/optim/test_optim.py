"""Optimizers: which part of the model each updates, what it stores, that it resumes in every bit,
and that it learns."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from fewer import some
from state_bytes import state_bytes
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typed import gradient

from te_models import CausalLM
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.documents import Document
from te_models.data.tokenizer import load_tokenizer
from te_models.errors import Diverged
from te_models.files.formats import flatten_state
from te_models.model.attention import GatedAttention
from te_models.optim import OPTIMIZERS, build_optimizer, master, muon8bit, resolve_options
from te_models.optim.groups import groups, parts
from te_models.optim.muon8bit import dequantize, quantize
from te_models.saving.load_model import read_training_state
from te_models.training.metrics import read_metrics
from te_models.training.trainer import Trainer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchao_optim = pytest.importorskip("torchao.optim")

SHAPE: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
TEXT = [
    Document(f"line {i}: the quick brown fox jumps over the lazy dog; {i * i}\n" * 3)
    for i in range(30)
]
# Every optimizer, with options that matter for what is stored.
CASES = [
    ("adamw", ""),
    ("adamw8bit", ""),
    ("adamw8bit", "stochastic_rounding=true"),
    ("adamwfp8", ""),
    ("muon", ""),
    ("muon", "rest=adamwfp8"),
    ("muon8bit", ""),
    ("galore", "rank=8,refresh=3"),
]
NAMES = [f"{name} {options}".strip() for name, options in CASES]


def test_the_cases_are_all_optimizers() -> None:
    assert {name for name, _ in CASES} == set(OPTIMIZERS)


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """torchao compiles its step for each shape, which takes longer than these tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


def trainer(
    out: Path, optimizer: str, options: str, dtype: torch.dtype = torch.bfloat16, **fields: Any
) -> Trainer:
    torch.manual_seed(5)
    model = CausalLM.from_preset("gated-nano", recipe="bf16", device="cpu", dtype=dtype, **SHAPE)
    defaults = dict(steps=4, batch_size=2, seq_len=32, eval_every=0, clip_grad_norm=0.5)
    # No warm-up is longer than its run.
    defaults["warmup_steps"] = min(2, fields.get("steps", defaults["steps"]))
    config = TrainConfig(
        **{**defaults, "optimizer": optimizer, "optimizer_options": options, **fields}
    )
    data = TokenDataset(
        TEXT, load_tokenizer(None), config.seq_len, batch_size=config.batch_size, seed=config.seed
    )
    return Trainer(model, data, [], config, out)


def assert_same_state(one: Any, other: Any) -> None:
    """Two nested states are equal in every bit."""
    (tensors, document), (others, other_document) = flatten_state(one), flatten_state(other)
    assert document == other_document and tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert_same_bits(name, tensor, others[name])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Trainer]:
    """The finished run of four steps that variants are compared with, one an optimizer."""

    @cache
    def run(optimizer: str, options: str) -> Trainer:
        with torch.compiler.set_stance("force_eager"):
            made = trainer(tmp_path_factory.mktemp("whole"), optimizer, options)
            made.run()
        return made

    return run


def assert_same_run(one: Trainer, other: Trainer) -> None:
    """Metrics, weights, masters and optimizer state are equal in every bit."""
    rows, others = (
        [
            {**row, "tokens_per_second": 0, "data_wait": 0}
            for row in read_metrics(run.out / "metrics.jsonl")
        ]
        for run in (one, other)
    )
    assert rows == others
    for (name, p), q in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert_same_bits(name, p, q)
    for name in ("kind", "state"):
        assert_same_state(one.optimizer.state_dict()[name], other.optimizer.state_dict()[name])
    for number, (m, n) in enumerate(
        zip(one.optimizer.masters, other.optimizer.masters, strict=True)
    ):
        assert_same_bits(f"master {number}", m, n)
    assert quantized(one) == quantized(other)


def quantized(run: Trainer) -> list[str]:
    """Return the repr of every moment of torchao: shape, block size and signedness."""
    values = [
        v for o in run.optimizer.optimizers for state in o.state.values() for v in state.values()
    ]
    return [repr(v) for v in values if is_traceable_wrapper_subclass(v)]


@pytest.mark.parametrize("optimizer, options", CASES, ids=NAMES)
def test_four_steps_are_two_saved_and_two_resumed(
    optimizer: str, options: str, whole: Callable[[str, str], Trainer], tmp_path: Path
) -> None:
    half = trainer(tmp_path, optimizer, options, save_every=2)
    half.on_step = stop_at_three
    with pytest.raises(KeyboardInterrupt):
        half.run()
    resumed = trainer(tmp_path, optimizer, options)
    torch.manual_seed(
        99
    )  # the checkpoint's own random state must win: stochastic rounding draws from it
    assert resumed.run(resume=True).step == 4
    assert_same_run(whole(optimizer, options), resumed)
    assert state_bytes(resumed.optimizer.state_dict()["state"]) > 0


def stop_at_three(row: dict[str, Any]) -> None:
    if row["step"] == 3:
        raise KeyboardInterrupt


@pytest.mark.parametrize("optimizer, options", some(2, CASES[::-1]))
def test_offloading_and_updating_a_few_at_a_time_change_no_bit(
    optimizer: str,
    options: str,
    whole: Callable[[str, str], Trainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once = whole(optimizer, options)
    monkeypatch.setattr(master, "UPDATE_CHUNK", 5000)
    run = trainer(tmp_path, optimizer, options, optimizer_offload=True)
    assert len({id(t) for t in (*run.optimizer.parameters, *run.optimizer.masters)}) == 2 * len(
        run.optimizer.masters
    )
    run.run()
    assert_same_run(at_once, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("optimizer, options", some(2, CASES))
def test_a_run_resumes_with_the_optimizer_in_the_other_memory(
    optimizer: str, options: str, offload: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """8-bit states are rounded elsewhere on the way, but not by the move."""
    before = trainer(tmp_path, optimizer, options, dtype, optimizer_offload=offload, steps=2)
    before.run()
    after = trainer(tmp_path, optimizer, options, dtype, optimizer_offload=not offload, steps=2)
    # The parameters of the checkpoint are not those that the optimizer was made of.
    with torch.no_grad():
        for parameter in after.model.parameters():
            parameter.zero_()
    assert after.run(resume=True).step == 2
    assert_same_run(before, after)


def test_masters_that_repeat_their_parameters_were_saved_once(tmp_path: Path) -> None:
    """As in checkpoints of earlier versions, of optimizers in CPU memory."""
    options = dict(optimizer="adamw", options="", dtype=torch.float32, steps=2)
    before = trainer(tmp_path, **options, optimizer_offload=True)
    state_dict = before.optimizer.state_dict

    def with_all_masters() -> dict[str, Any]:
        masters = [master.detach() for master in before.optimizer.masters]
        return {**state_dict(), "masters": masters}

    before.optimizer.state_dict = with_all_masters  # type: ignore[method-assign]
    before.run()
    before.optimizer.state_dict = state_dict  # type: ignore[method-assign]
    assert state_dict()["masters"] == []
    for offload in (False, True):
        after = trainer(tmp_path, **options, optimizer_offload=offload)
        assert after.run(resume=True).step == 2
        assert_same_run(before, after)


@pytest.mark.parametrize("optimizer, options", some(2, CASES))
def test_parameters_that_are_their_own_masters_are_updated_once_a_step(
    optimizer: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is updated in the chunks before theirs: their gradients are there all the time."""
    dtype = torch.bfloat16 if "stochastic_rounding" in options else torch.float32
    runs = []
    for chunk in (2**28, 5000):
        monkeypatch.setattr(master, "UPDATE_CHUNK", chunk)
        monkeypatch.setattr(muon8bit, "BATCH", chunk)
        run = trainer(tmp_path / str(chunk), optimizer, options, dtype)
        assert all(
            m is p for m, p in zip(run.optimizer.masters, run.optimizer.parameters, strict=True)
        )
        run.run()
        runs.append(run)
    assert_same_run(*runs)


@pytest.mark.parametrize("optimizer, options", dict(reversed(CASES)).items())
def test_optimizers_learn_and_stop_at_a_bad_loss(
    optimizer: str, options: str, tmp_path: Path
) -> None:
    run = trainer(tmp_path, optimizer, options, steps=16, clip_grad_norm=1.0, learning_rate=1e-2)
    run.run()
    losses = [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert sum(losses[-3:]) / 3 < losses[0] - 1.0
    before = copy.deepcopy(run.optimizer.state_dict())
    with torch.no_grad():
        run.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(Diverged, match="step 17: the loss is nan"):
        run.step(iter(run.dataset))
    assert_same_state(before, run.optimizer.state_dict())


def test_another_optimizers_state_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, "galore", "rank=8", steps=1).run()
    for optimizer, options, message in (
        ("adamw", "", "optimizer='galore', not 'adamw'"),
        ("galore", "rank=16", "rank=8, not 16"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, optimizer, options, steps=2).run(resume=True)
    run = trainer(tmp_path, "galore", "rank=8", steps=1)
    state = read_training_state(run.model, run.checkpoints.latest()).state["optimizer"]
    with pytest.raises(ValueError, match="of another model"):
        run.optimizer.load_state_dict({**state, "masters": state["masters"][:-1]})


# Which part goes where.


@pytest.mark.parametrize("gate", ["elementwise", "headwise", "none"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_row_is_in_one_part_and_roles_follow_the_structure(gate: str, tied: bool) -> None:
    fields = dict(attention_bias=True, qk_norm=True, tie_word_embeddings=tied, attention_gate=gate)
    model = CausalLM.from_preset("gated-nano", device="cpu", **SHAPE, **fields)
    found, config = parts(model), model.config
    covered = {id(p): torch.zeros(len(p), dtype=torch.int) for p in model.parameters()}
    for part in found:
        part.of(covered[id(part.parameter)]).add_(1)
    assert all((rows == 1).all() for rows in covered.values())

    role = {(id(part.parameter), part.start): part.role for part in found}
    q, kv = (config.head_dim * n for n in (config.num_attention_heads, config.num_key_value_heads))
    for block in model.layers:
        rows = {
            0: "hidden",
            q: "hidden",
            q + kv: "hidden",
            q + 2 * kv: "gate" if gate == "headwise" else "hidden",
        }
        for start, expected in rows.items():
            weight = block.self_attn.qkvg_proj.weight
            assert start == len(weight) or role[id(weight), start] == expected
        up = block.mlp.gate_up_proj.weight
        assert role[id(up), 0] == role[id(up), config.intermediate_size] == "hidden"
        assert (
            role[id(block.self_attn.o_proj.weight), 0]
            == role[id(block.mlp.down_proj.weight), 0]
            == "hidden"
        )
        norms = [
            block.input_layernorm,
            block.post_attention_layernorm,
            block.self_attn.q_norm,
            block.self_attn.k_norm,
        ]
        assert (
            {role[id(norm.weight), 0] for norm in norms}
            == {role[id(block.self_attn.qkvg_proj.bias), 0]}
            == {"vector"}
        )
    assert role[id(model.embed_tokens.weight), 0] == "embedding"
    assert role[id(model.lm_head.weight), 0] == ("embedding" if tied else "head")


def test_only_projections_of_linear_attention_are_matrices() -> None:
    """Gates are rows, each a vector; taps [C, 1, K], decays and the norm are vectors, and do not decay."""
    model = CausalLM.from_preset("gated-hybrid-nano", device="meta", engine="emulated")
    mixer = model.layers[0].linear_attn
    names = {id(parameter): name for name, parameter in mixer.named_parameters()}
    roles: dict[str, list[str]] = {}
    for part in parts(model):
        if id(part.parameter) in names:
            roles.setdefault(names[id(part.parameter)], []).append(part.role)
    vectors = dict.fromkeys(("conv1d.weight", "A_log", "dt_bias", "norm.weight"), ["vector"])
    projections = {
        "qkvz_proj.weight": ["hidden"] * 4,
        "ba_proj.weight": ["gate"] * 2,
        "out_proj.weight": ["hidden"],
    }
    assert roles == vectors | projections
    decays = {
        id(part.parameter): g["weight_decay"]
        for g in groups(model, 0.1, True)
        for part in g["params"]
    }
    assert {name for key, name in names.items() if decays[key] == 0} == vectors.keys()


@pytest.mark.parametrize("matrices", [True, False])
def test_only_matrices_outside_the_table_decay(matrices: bool) -> None:
    model = CausalLM.from_preset(
        "gated-nano", device="cpu", **SHAPE, attention_bias=True, tie_word_embeddings=False
    )
    names = {id(p): name for name, p in model.named_parameters()}
    decay: dict[str, set[float]] = {}
    for group in groups(model, 0.1, matrices):
        for part in group["params"]:
            decay.setdefault(names[id(part.parameter)], set()).add(group["weight_decay"])
    decayed = {n for n in names.values() if n.endswith("proj.weight")} | {"lm_head.weight"}
    assert decay == {name: {0.1 if name in decayed else 0.0} for name in names.values()}


def test_frozen_parameters_take_no_memory() -> None:
    model = CausalLM.from_preset("gated-nano", device="cpu", **SHAPE)
    model.embed_tokens.weight.requires_grad_(False)
    assert all(part.parameter is not model.embed_tokens.weight for part in parts(model))


@pytest.mark.parametrize("optimizer", ["muon", "muon8bit"])
def test_muon_orthogonalizes_each_logical_matrix_of_a_fused_weight(optimizer: str) -> None:
    """Without decay and with the original scaling a square matrix moves by learning rate x an orthogonal matrix."""
    model = CausalLM.from_preset("gated-nano", device="cpu", dtype=torch.float32, **SHAPE)
    attention = model.layers[0].self_attn
    assert isinstance(attention, GatedAttention)
    weight = attention.get_parameter("qkvg_proj.weight")
    before = weight.detach().clone()
    tuned = build_optimizer(
        optimizer, model, lr=1.0, weight_decay=0.0, options="adjust_lr=original"
    )
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    spans = ((0, 32), (32, 48), (48, 64), (64, 96))  # q, k, v, gate
    for start, stop in spans:
        nn.init.orthogonal_(gradient(weight)[start:stop])
    gradient(weight)[:32] *= 1000  # q's gradient must not decide how far k, v and the gate move
    tuned.take_gradients(0.0)
    tuned.step()
    moved = before - weight.detach()
    for start, stop in spans:
        singular = torch.linalg.svdvals(moved[start:stop])
        assert singular.min() > 0.5 and singular.max() < 1.3, (start, stop)


def test_the_rest_has_its_own_learning_rate() -> None:
    model = CausalLM.from_preset("gated-nano", device="cpu", **SHAPE)
    tuned = build_optimizer("muon", model, 1e-3, 0.1, {"rest_lr": 0.25, "rest": "adamw8bit"})
    tuned.set_learning_rate(0.01)
    assert [float(g["lr"]) for g in tuned.param_groups] == pytest.approx(
        [0.01] + [0.0025] * (len(tuned.param_groups) - 1)
    )


# Options.


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("adam", "", "did you mean 'adamw'"),
        (
            "muon",
            "momentun=0.9",
            "unknown option 'momentun' of optimizer 'muon': did you mean 'momentum'",
        ),
        ("muon", "momentum=1.0", "momentum=1.0 is out of range"),
        ("muon", "momentum", "'momentum' has no value"),
        ("muon", "ns_steps=2.5", "not a whole number"),
        ("muon8bit", "nesterov=perhaps", "choose one of false, true"),
        ("galore", "rank=0", "rank=0 is out of range"),
        ("galore", {"rank": "many"}, "rank='many' is not a number"),
        ("muon", "rest=sgd", "choose one of adamw, adamw8bit, adamwfp8"),
    ],
)
def test_mistakes_are_named(name: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(
            name, CausalLM.from_preset("gated-nano", device="cpu", **SHAPE), 1e-3, 0.1, options
        )


ADAM = dict(betas=(0.5, 0.7), eps=0.1)
ADAM_TEXT = "beta1=0.5,beta2=0.7,eps=0.1"
MUON = dict(momentum=0.5, nesterov=False, ns_steps=2, adjust_lr_fn="original")
MUON_TEXT = "momentum=0.5,nesterov=false,ns_steps=2,adjust_lr=original"


@pytest.mark.parametrize(
    "name, options, matrix, reference, error",
    [
        ("adamw", ADAM_TEXT, None, partial(torch.optim.AdamW, **ADAM), 1e-5),
        ("adamw8bit", ADAM_TEXT, None, partial(torchao_optim.AdamW8bit, **ADAM), 1e-5),
        ("adamwfp8", ADAM_TEXT, None, partial(torchao_optim.AdamWFp8, **ADAM), 1e-5),
        ("muon", MUON_TEXT, (64, 64), partial(torch.optim.Muon, **MUON), 1e-5),
        ("muon", f"{ADAM_TEXT},rest=adamwfp8", None, partial(torchao_optim.AdamWFp8, **ADAM), 1e-5),
        (
            "muon8bit",
            MUON_TEXT,
            (64, 64),
            partial(torch.optim.Muon, **MUON),
            0.02,
        ),  # its momentum is rounded
        ("muon8bit", "", (32, 80), partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"), 0.02),
        ("muon8bit", "adjust_lr=original", (80, 32), torch.optim.Muon, 0.02),
        (
            "muon8bit",
            f"{ADAM_TEXT},rest=adamw8bit",
            None,
            partial(torchao_optim.AdamW8bit, **ADAM),
            1e-5,
        ),
        (
            "galore",
            f"{ADAM_TEXT},rank=64",
            (64, 64),
            partial(torch.optim.AdamW, **ADAM),
            1e-5,
        ),  # of full rank
        ("galore", ADAM_TEXT, None, partial(torch.optim.AdamW, **ADAM), 1e-5),
    ],
)
def test_options_reach_the_update(
    name: str, options: str, matrix: tuple[int, int] | None, reference: Any, error: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Three updates are those of torch or torchao with the same options; `matrix`: the shape of a hidden one."""
    monkeypatch.setattr(muon8bit, "product_dtype", lambda device: torch.bfloat16)
    start = torch.randn(matrix or (64, 64))  # large enough for moments in 8 bits
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    group = dict(params=[ours], weight_decay=0.01, matrices=matrix is not None)
    (optimizer,) = OPTIMIZERS[name].build(0.02, resolve_options(name, options), [group])
    other = reference([theirs], lr=0.02, weight_decay=0.01)
    for _ in range(3):
        ours.grad = torch.randn_like(start)
        theirs.grad = ours.grad.clone()
        optimizer.step(), other.step()
    assert (ours - theirs).norm() <= error * (theirs - start).norm()


def test_options_come_from_text_or_a_dict() -> None:
    text = resolve_options("muon", "momentum=0.9, ns-steps=6, nesterov=false, adjust_lr=original")
    assert text == resolve_options(
        "muon", dict(momentum=0.9, ns_steps=6, nesterov=False, adjust_lr="original")
    )
    assert (
        text["momentum"] == 0.9
        and text["ns_steps"] == 6
        and text["nesterov"] is False
        and text["rest"] == "adamw"
    )


@pytest.mark.parametrize("version", [None, "0.16.0"])
def test_a_missing_or_old_torchao_is_named(pretend: Any, version: str | None) -> None:
    pretend("torchao", version)
    with pytest.raises(
        ValueError, match=r"needs torchao 0.17 or newer.*: pip install -U 'te-models\[optim\]'"
    ):
        build_optimizer("adamw8bit", nn.Linear(2, 2), 1e-3, 0.0)


# Muon in INT8.


@pytest.mark.parametrize("shape", [(64, 64), (3, 50), (1, 128), (257, 5)])
def test_quantization_is_within_half_a_step_of_each_block(shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * torch.logspace(-30, 6, shape[0]).unsqueeze(1)
    codes, scales = quantize(x)
    assert (
        codes.dtype == torch.int8
        and codes.shape == (-(-x.numel() // 128), 128)
        and codes.min() >= -127
    )
    step = scales.expand(-1, 128).flatten()[: x.numel()].view(shape)
    assert ((dequantize(codes, scales, x.shape) - x).abs() <= step * 0.5001).all()
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 128)).view(-1, 128)
    assert_same_bits("scales.squeeze(1)", scales.squeeze(1), blocks.abs().amax(1) / 127)
    assert not quantize(torch.zeros(5, 5))[0].any()
