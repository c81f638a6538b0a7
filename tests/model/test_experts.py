"""Mixtures of experts: the router's choice, the way of the rows, losses; what padding and recompute must not change."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from autograd_bytes import autograd_bytes, planned_bytes
from bits import assert_same_bits, assert_same_tensors
from fewer import every
from torch import Tensor
from typed import gradient

import te_models.model.moe as moe_module
from te_models import CausalLM, ModelConfig
from te_models.config.moe import MoEConfig
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.documents import Document
from te_models.data.tokenizer import load_tokenizer
from te_models.errors import ConfigError
from te_models.fp8.primary_weights import is_quantized, plain, write_weight
from te_models.fp8.scaling_state import fp8_state
from te_models.kernels.expert_rows import combine, dispatch
from te_models.kernels.groups import Groups
from te_models.model.router import Routing, choose, describe, places, weights_of
from te_models.optim.groups import parts
from te_models.training.metrics import read_metrics
from te_models.training.trainer import Trainer

SHAPE: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=64)
NO_EDGES = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)


def config(mlp_layer_types: Any = None, **experts: Any) -> ModelConfig:
    return ModelConfig(**SHAPE, moe={**EXPERTS, **experts}, mlp_layer_types=mlp_layer_types)


def build(
    recipe: str = "bf16", dtype: torch.dtype = torch.bfloat16, mode: str = "none", **experts: Any
) -> CausalLM:
    torch.manual_seed(0)
    edges = NO_EDGES if recipe != "bf16" else {}
    options: dict[str, Any] = dict(
        recipe=recipe, dtype=dtype, activation_checkpointing=mode, device="cpu", **edges
    )
    return CausalLM(config(**experts), engine="emulated", **options)


def tokens(rows: int = 2, length: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def settings(**fields: Any) -> MoEConfig:
    return MoEConfig(**{**EXPERTS, **fields})


# The router.


def test_of_equal_scores_the_lowest_expert_is_chosen() -> None:
    logits = torch.tensor([[0.0] * 5, [1.0, 2.0, 1.0, 2.0, 1.0], [3.0, 0.0, 0.0, 0.0, 0.0]])
    assert choose(logits, None, None, settings()).tolist() == [[1, 0], [3, 1], [1, 0]]


def test_padding_chooses_no_expert() -> None:
    real = torch.tensor([True, False, True])[:, None]
    logits = torch.randn(3, 5)
    chosen = choose(logits, None, real, settings())
    assert chosen[1].tolist() == [5, 5] and (chosen[[0, 2]] < 5).all()
    where, those = places(chosen, 5, 4), places(chosen[[0, 2]], 5, 4)
    found = describe(logits, where.counts, real, settings())
    alone = describe(logits[[0, 2]], those.counts, None, settings())
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other)
    assert where.row[1].tolist() == [len(where.token)] * 2
    assert sorted(where.token[where.token < 3].tolist()) == [0, 0, 2, 2]


@pytest.mark.parametrize("alignment", [1, 8])
def test_the_host_need_not_know_the_numbers_of_rows(alignment: int) -> None:
    """The same places, with as many rows as there can be."""
    chosen = torch.tensor([[2, 0], [6, 2], [7, 7], [2, 1], [6, 0]])  # 7: padding
    known, found = (places(chosen, 7, alignment, on_device) for on_device in (False, True))
    assert isinstance(known.rows, list) and isinstance(found.rows, Groups)
    assert found.rows.first.tolist() == [0, *torch.tensor(known.rows).cumsum(0)]
    most, used = found.rows.most, sum(known.rows)
    assert most == len(found.token) == {1: 10, 8: 64}[alignment]
    assert torch.equal(found.token[:used], known.token) and (found.token[used:] == 6).all()
    assert torch.equal(found.row, torch.where(known.row < used, known.row, most))
    assert torch.equal(found.counts, known.counts) and found.counts.tolist() == [
        2,
        1,
        3,
        0,
        0,
        0,
        2,
    ]


# The way of the rows.


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_their_experts_and_back(alignment: int, dtype: torch.dtype) -> None:
    """In the order of experts and tokens, padded with zeros; sums and gradients are those of a loop."""
    moe, count = settings(num_experts=7, num_experts_per_tok=3), 40
    logits = torch.randn(count, 7)
    logits[:, 4] = -9.0  # an expert without tokens
    chosen = choose(logits, None, None, moe)
    where = places(chosen, 7, alignment)
    assert isinstance(where.rows, list)
    x = torch.randn(count, 8, dtype=dtype, requires_grad=True)
    weights = weights_of(logits, chosen, moe).requires_grad_()
    rows = dispatch(x, where.token, where.row)
    assert (
        where.rows[4] == 0
        and not any(n % alignment for n in where.rows)
        and len(rows) == sum(where.rows)
    )
    for expert, part in enumerate(rows.split(where.rows)):
        own = [t for t in range(count) if expert in chosen[t].tolist()]
        assert_same_bits(f"rows of expert {expert}", part[: len(own)], x[own])
        assert not part[len(own) :].any()
    factor = torch.arange(1.0, 8.0).repeat_interleave(torch.tensor(where.rows))[:, None]
    y = combine((rows * factor).to(dtype), weights, where.token, where.row)
    one, other = x.detach().float().requires_grad_(), weights.detach().requires_grad_()
    expected = sum((other[:, j] * (chosen[:, j] + 1))[:, None] * one for j in range(3))
    assert isinstance(expected, Tensor)
    g = torch.randn(count, 8).to(dtype)
    y.backward(g)
    expected.backward(g.float())
    for found, reference in ((y, expected), (x.grad, one.grad), (weights.grad, other.grad)):
        error = (found.float() - reference).norm() / reference.norm()
        assert error < (
            1e-6 if dtype == torch.float32 else 2.0**-7
        )  # rows, products and sums are rounded once each


# Scales, recompute, losses, memory.


@pytest.mark.parametrize("length", [5, 24])
def test_padding_of_rows_moves_no_scale(length: int) -> None:
    """Every amax of an expert's input is that of its tokens; of one without tokens it stays zero."""
    model, ids = build("delayed"), tokens(1, length)
    rows: dict[str, tuple[Tensor, list[int]]] = {}

    def note(name: str, inputs: tuple[Any, ...]) -> None:
        rows[name] = inputs[0].detach(), inputs[1]

    for name, module in model.named_modules():
        if isinstance(module, model.te.GroupedLinear):
            module.register_forward_pre_hook(lambda m, inputs, name=name: note(name, inputs))
    model(ids, labels=ids).loss.backward()
    assert rows and all(count % 16 == 0 for _, counts in rows.values() for count in counts)
    for name, (x, counts) in rows.items():
        history = fp8_state(model)[f"{name}.scaling_fwd.amax_history"][-1]
        expected = [
            part.abs().amax().float().item() if len(part) else 0.0 for part in x.split(counts)
        ]
        assert history[0::3].tolist() == expected
        assert (history[1::3] > 0).all()  # idle experts' weights too


@pytest.mark.parametrize("limit", [None, 7.0])
def test_a_bias_leaves_padding_of_rows_zero(limit: float | None) -> None:
    model, rows = build("delayed", bias=True, swiglu_limit=limit), dict[str, Tensor]()
    for name, module in model.named_modules():
        if isinstance(module, model.te.GroupedLinear):
            for bias in module.biases:
                bias.data.fill_(0.5)
            module.register_forward_pre_hook(
                lambda m, inputs, name=name: rows.update({name: inputs[0]}) and None
            )
    model(tokens(1, 9))
    for layer in range(3):
        into, out = (rows[f"layers.{layer}.mlp.{name}"] for name in ("gate_up_proj", "down_proj"))
        padding = ~into.any(1)
        assert padding.any() and torch.equal(~out.any(1), padding)


@pytest.mark.parametrize(
    "recipe, mode", [("bf16", "selective"), ("current", "full"), ("delayed", "selective")]
)
def test_a_recompute_keeps_the_choice(
    recipe: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it made again, and came out differently, gradients would be those of other experts."""
    ids, calls = tokens(), []

    def gradients(mode: str) -> dict[str, Any]:
        model = build(recipe, mode=mode)
        loss = model(ids, labels=ids).loss
        calls.clear()
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = gradients("none")

    def turned(*args: Any) -> Tensor:
        calls.append(args)
        return 4 - choose(*args).flip(1) if len(calls) > 3 else choose(*args)

    monkeypatch.setattr(moe_module, "choose", turned)
    assert_same_tensors(gradients(mode), expected)
    assert not calls


def test_jitter_is_drawn_in_training_alone_and_again_alike() -> None:
    ids = tokens()
    plain, model = build(), build(router_jitter_noise=0.3)
    assert_same_bits("logits", model.eval()(ids).logits, plain.eval()(ids).logits)
    found = []
    for mode in ("none", "full", "selective"):
        model = build(mode=mode, router_jitter_noise=0.3)
        torch.manual_seed(5)
        loss = model(ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert found[0][0] != plain.train()(ids, labels=ids).loss
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert_same_bits("jittered", one, two)


def test_losses_of_the_routers() -> None:
    """Added in training by their factors, in evaluation only reported; balance is k if all share equally."""
    ids = tokens()
    plain, model = (
        build(router_aux_loss_coef=0.0),
        build(router_aux_loss_coef=0.5, router_z_loss_coef=0.25),
    )
    base, output = plain(ids, labels=ids), model(ids, labels=ids)
    assert output.routing is not None and base.routing is not None
    expected = base.loss + 0.5 * output.routing.balance_loss + 0.25 * output.routing.z_loss
    torch.testing.assert_close(output.loss, expected)
    assert output.routing.shares.shape == (3, 5)
    torch.testing.assert_close(output.routing.shares.sum(1), torch.ones(3))
    output.loss.backward()
    base.loss.backward()
    names = [f"layers.{layer}.mlp.router.weight" for layer in range(3)]
    for name in names:
        ours, other = (gradient(one.get_parameter(name)) for one in (model, plain))
        assert (ours - other).norm() > 0
    evaluated = model.eval()(ids, labels=ids)
    assert_same_bits("loss in evaluation", evaluated.loss, plain.eval()(ids, labels=ids).loss)
    assert evaluated.routing is not None and model(ids).routing is None
    even = torch.eye(5).repeat(4, 1) * 3
    moe = settings(num_experts_per_tok=1)
    where = describe(even, places(choose(even, None, None, moe), 5, 1).counts, None, moe)
    routing = Routing()
    routing.layers.append(where)
    report = routing.take()
    assert report is not None
    torch.testing.assert_close(report.balance_loss, torch.tensor(1.0))
    torch.testing.assert_close(report.z_loss, even.logsumexp(1).square().mean())


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not normalized": dict(norm_topk_prob=False),
    "shared": dict(shared_expert_intermediate_size=128, shared_expert_gate=True),
    "GLM": dict(
        router_fp32=True,
        router_scores="sigmoid",
        expert_bias=True,
        shared_expert_intermediate_size=64,
    ),
    "gpt-oss": dict(bias=True, swiglu_limit=7.0),
}


@pytest.mark.parametrize(
    "name, recipe, mode", every(4, KINDS, ["bf16", "delayed"], ["none", "selective", "full"])
)
def test_the_memory_plan_is_what_autograd_keeps(name: str, recipe: str, mode: str) -> None:
    """But for rows of padding, of which the plan has the most that there can be, and choices that recomputes hold."""
    model = build(recipe, mode=mode, num_experts=3, num_experts_per_tok=3, **KINDS[name])
    held = 0 if mode == "none" else 16 * 64 * 3 * 8 * 8 * model.config.num_hidden_layers
    kept = autograd_bytes(model, tokens(16, 64))
    assert 0.99 * kept <= planned_bytes(model, 16, 64) <= 1.04 * kept + held


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_the_bias_of_the_choice_has_no_gradient_even_when_everything_is_unfrozen(mode: str) -> None:
    """A choice has none; a graph through it would differ between a pass and its recompute, which keeps the choice."""
    model = build("bf16", mode=mode, **KINDS["GLM"]).requires_grad_(True)
    ids = tokens(2, 16)
    model(ids, labels=ids).loss.backward()
    missing = {
        name.rsplit(".", 1)[-1]
        for name, parameter in model.named_parameters()
        if parameter.grad is None
    }
    assert missing == {"expert_bias"}


def test_parameters_and_their_roles() -> None:
    own = config(
        ("dense", "sparse", "sparse"), shared_expert_intermediate_size=32, shared_expert_gate=True
    )
    model = CausalLM(own, device="cpu", recipe="bf16")
    assert own.num_parameters + own.num_padding_parameters == sum(
        p.numel() for p in model.parameters()
    )
    idle = 2 * 3 * 3 * 64 * 64  # layers, experts, projections
    assert own.num_active_parameters == own.num_parameters - idle
    assert own.layers[1].mlp.linear_flops(10) == 20 * 64 * (5 + 2 * 3 * 64 + 3 * 32 + 1)
    roles = {(part.role, tuple(part.of(part.parameter).shape)) for part in parts(model)}
    assert {("hidden", (64, 64)), ("gate", (5, 64)), ("gate", (1, 64))} <= roles
    assert ModelConfig.from_dict(own.to_dict()) == own


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_experts=0), "num_experts=0 is out of range"),
        (dict(num_experts_per_tok=6), "num_experts_per_tok=6 is more than the 5 experts"),
        (dict(router_scores="tanh"), "router_scores"),
        (dict(num_experts=6, n_group=4), "n_group=4 must divide"),
        (dict(shared_expert_gate=True), "needs a shared expert"),
        (dict(norm_topk_prob=1), "norm_topk_prob=1 is of a wrong type"),
        (dict(swiglu_limit=-1.0), "swiglu_limit=-1.0 is out of range"),
        (dict(experts=3), "unknown field 'experts'"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**fields)
    with pytest.raises(ConfigError, match="leave out hidden_act='gelu'"):
        ModelConfig(**SHAPE, hidden_act="gelu", moe={**EXPERTS, "swiglu_limit": 7.0})
    with pytest.raises(ConfigError, match="give moe"):
        ModelConfig(**SHAPE, mlp_layer_types=("dense", "sparse", "dense"))


def test_a_backward_of_an_evaluation_changes_no_scale() -> None:
    """From the loss, and from what the routers report."""
    model, ids = build("delayed"), tokens()
    model(ids, labels=ids).loss.backward()
    before = model.copied_fp8_state()
    output = model.eval()(ids, labels=ids)
    assert output.routing is not None
    (output.loss + output.routing.balance_loss).backward()
    output = model(ids, labels=ids)
    output.routing.z_loss.backward()
    assert_same_tensors(fp8_state(model), before)


def batches(count: int) -> list[dict[str, Tensor]]:
    return [dict(input_ids=tokens(seed=seed), labels=tokens(seed=seed)) for seed in range(count)]


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_experts_are_stored_in_fp8(recipe: str, tmp_path: Path) -> None:
    """Each weight with its own scale; a run changes them, and a folder keeps every bit."""
    torch.manual_seed(0)
    options: dict[str, Any] = dict(recipe=recipe, device="cpu", engine="emulated", fp8_params=True)
    model = CausalLM(config(), **options, **NO_EDGES)
    with torch.no_grad():
        for expert in range(5):
            weight = model.get_parameter(f"layers.1.mlp.down_proj.weight{expert}")
            assert is_quantized(weight)
            write_weight(weight, torch.randn(64, 64) * 2.0**expert)
    assert not is_quantized(model.get_parameter("layers.1.mlp.router.weight"))
    before = {name: plain(p).clone() for name, p in model.named_parameters()}
    run = Trainer(
        model,
        batches(3),
        None,
        TrainConfig(steps=3, warmup_steps=1, eval_every=0),
        tmp_path / "run",
    )
    run.run()
    for name, parameter in model.named_parameters():
        assert "_proj.weight" not in name or not torch.equal(plain(parameter), before[name]), name
    if recipe == "delayed":
        scale = fp8_state(model)["layers.1.mlp.down_proj.scaling_fwd.scale"][1::3]
        for expert in range(5):
            weight: Any = model.get_parameter(f"layers.1.mlp.down_proj.weight{expert}")
            largest = weight.dequantize().abs().max().item()
            assert 200 < scale[expert].item() * largest <= 448 * 1.1
        twin, name = copy.deepcopy(model), "layers.1.mlp.down_proj"
        write_weight(twin.get_parameter(f"{name}.weight3"), torch.full((64, 64), 7.0))
        expected = fp8_state(model)[f"{name}.scaling_fwd.scale"].clone()
        expected[3 * 3 + 1] = 448 / 7
        assert_same_bits(
            "scales of the copy", fp8_state(twin)[f"{name}.scaling_fwd.scale"], expected
        )
    model.save_pretrained(tmp_path / "saved")
    again = CausalLM.from_pretrained(
        tmp_path / "saved", device="cpu", engine="emulated", fp8_params=True
    )
    assert_same_bits("logits", again.eval()(tokens()).logits, model.eval()(tokens()).logits)


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_padding_of_windows_reaches_no_expert(packing: str) -> None:
    """The losses of routers and the shares are those of the same documents without padding."""
    documents = [Document("a" * (2 + 5 * n), prompt="b") for n in range(4)]
    windows = TokenDataset(
        documents, load_tokenizer(None), 24, batch_size=2, seed=0, packing=packing
    )
    batch = {
        name: tensor % 64 if name != "document_ids" else tensor
        for name, tensor in next(windows).items()
    }
    real = batch["document_ids"] >= 0
    assert not real.all()
    model = build(dtype=torch.float32)
    ids, owners = (
        batch["input_ids"][real][None],
        (batch["document_ids"] + torch.tensor([[0], [9]]))[real][None],
    )
    report, expected = model(**batch).routing, model(ids, labels=ids, document_ids=owners).routing
    assert report is not None and expected is not None
    for found, wanted in zip(report, expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("numbers", [(0, 1), (3, 7), (0, -1)])
def test_documents_of_any_number_reach_their_experts(numbers: tuple[int, int]) -> None:
    """Each has the logits that it has alone; a number below 0 is padding's, and 0 is a document's like any other."""
    model = build(dtype=torch.float32)
    ids = tokens(1, 20)
    owners = torch.tensor([numbers[0]] * 8 + [numbers[1]] * 12)[None]
    found = model(ids, document_ids=owners).logits
    for number in numbers:
        if number >= 0:
            alone = model(ids[owners == number][None]).logits[0]
            torch.testing.assert_close(found[owners == number], alone, atol=1e-5, rtol=1e-5)


def test_metrics_have_what_the_routers_did(tmp_path: Path) -> None:
    """The mean of the step's micro-batches, as one forward of each reports it."""
    model = build(dtype=torch.float32)
    expected = []
    for batch in batches(2):
        report = model(**batch).routing
        assert report is not None
        expected.append(
            [report.balance_loss.item(), report.shares.max().item(), report.shares.mean(0)]
        )
    settings = TrainConfig(steps=1, warmup_steps=1, eval_every=0, gradient_accumulation=2)
    Trainer(model, batches(2), None, settings, tmp_path).run()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["balance_loss"] == pytest.approx((expected[0][0] + expected[1][0]) / 2, rel=1e-5)
    assert row["fullest_expert"] == pytest.approx((expected[0][1] + expected[1][1]) / 2, rel=1e-5)
    torch.testing.assert_close(
        torch.tensor(row["expert_shares"]), (expected[0][2] + expected[1][2]) / 2, atol=1e-5, rtol=0
    )
    assert row["z_loss"] > 0
