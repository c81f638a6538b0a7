"""The router against its definition, written as loops over tokens, groups and experts; and what its losses count."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models import CausalLM, ModelConfig
from te_models.config.moe import MoEConfig
from te_models.model import forward_context
from te_models.model.router import LayerRouting, Routing, choose, describe, places, weights_of

TOKENS, EXPERTS = 40, 8


def settings(**fields: Any) -> MoEConfig:
    shape = dict(num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=64)
    return MoEConfig(**{**shape, **fields})


def scores_of(row: Tensor, moe: MoEConfig) -> list[float]:
    """The scores of one token, in the FP32 that ties are decided in."""
    return (row.sigmoid() if moe.router_scores == "sigmoid" else row.softmax(0)).tolist()


def chosen_by_definition(row: Tensor, bias: Tensor | None, moe: MoEConfig) -> list[int]:
    """Choose groups by the sum of their best scores, then experts by their scores; of equals the lower number."""
    choice = torch.tensor(scores_of(row, moe)) + (0 if bias is None else bias)
    size = EXPERTS // moe.n_group
    groups = []
    for group in range(moe.n_group):
        best = sorted(choice[group * size : (group + 1) * size].tolist(), reverse=True)
        # The sum that FP32 has, in which equal groups are equal.
        total = torch.tensor(best[: moe.group_scores]).sum().item()
        groups.append((-total, group))
    allowed = [group for _, group in sorted(groups)[: moe.topk_group]]
    experts = [expert for expert in range(EXPERTS) if expert // size in allowed]
    return sorted(experts, key=lambda e: (-choice[e].item(), e))[: moe.num_experts_per_tok]


CHOICES = [
    dict(router_scores=scores, n_group=groups, topk_group=kept, group_scores=judged, expert_bias=biased)
    for scores, (groups, kept), judged, biased in itertools.product(
        ("softmax", "sigmoid"), ((1, 1), (2, 1), (4, 2), (4, 3)), (1, 2), (False, True)
    )
    if groups > 1 or judged == 2
]  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fields", CHOICES, ids=lambda fields: "-".join(map(str, fields.values())))
def test_experts_are_chosen_by_definition(fields: dict[str, Any], tied: bool) -> None:
    moe = settings(**fields)
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(TOKENS, EXPERTS, generator=draw)
    bias = torch.randn(EXPERTS, generator=draw) * 0.3 - 1 if fields["expert_bias"] else None
    if tied:  # few values, so that experts and whole groups are equal
        logits = torch.randint(0, 2, (TOKENS, EXPERTS), generator=draw).float()
        bias = None if bias is None else torch.tensor([0.25, 0.0] * (EXPERTS // 2))
    found = choose(logits, bias, None, moe)
    for row, experts in zip(logits, found.tolist(), strict=True):
        wanted = chosen_by_definition(row, bias, moe)
        assert experts == sorted(wanted, reverse=True)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_weights_are_those_by_definition(scores: str, factor: float, normed: bool) -> None:
    """Of a sigmoid the sum has 1e-20 added to it, as in DeepSeek V3, and of a softmax nothing, as in Mixtral."""
    moe = settings(router_scores=scores, norm_topk_prob=normed, routed_scaling_factor=factor)
    tiny = torch.full((1, EXPERTS), -46.0)  # whose sigmoids are 1e-20
    small = torch.zeros(1, EXPERTS)
    small[0, 0] = 12.0  # of the others a softmax is 6e-6
    logits = torch.cat((torch.randn(TOKENS, EXPERTS), tiny, small))
    chosen = choose(logits, None, None, moe)
    chosen[-1] = torch.tensor([5, 3])
    found = weights_of(logits, chosen, moe)
    for row, experts, weights in zip(logits.double(), chosen.tolist(), found, strict=True):
        if scores == "sigmoid":
            every = [1 / (1 + math.exp(-x)) for x in row.tolist()]
        else:
            total = sum(math.exp(x) for x in row.tolist())
            every = [math.exp(x) / total for x in row.tolist()]
        own = [every[expert] for expert in experts]
        if normed:
            total = sum(own) + (1e-20 if scores == "sigmoid" else 0.0)
            own = [weight / total for weight in own]
        expected = torch.tensor([weight * factor for weight in own])
        torch.testing.assert_close(weights, expected, rtol=2e-5, atol=0)


def test_weights_of_padding_are_numbers() -> None:
    """Padding has no expert, whose number is beyond the scores; its weights mean nothing and move nothing."""
    moe = settings()
    logits = torch.randn(3, EXPERTS, requires_grad=True)
    real = torch.tensor([[True], [False], [True]])
    weights = weights_of(logits, choose(logits, None, real, moe), moe)
    assert weights.isfinite().all()
    torch.testing.assert_close(weights[[0, 2]].sum(1), torch.ones(2))


@pytest.mark.parametrize("fields", [{}, dict(expert_bias=True), dict(n_group=4, topk_group=1)])
@pytest.mark.parametrize("padded", [False, True])
def test_losses_count_the_largest_logits_of_every_token(
    fields: dict[str, Any], padded: bool
) -> None:
    """Whatever groups and numbers for the choice do: FP64 sums over tokens, padding left out."""
    moe = settings(**fields)
    layers, expected_balance, expected_z = [], torch.zeros(EXPERTS, 2).double(), []
    routing, tokens = Routing(), 0
    shares = []
    for seed in (0, 1):
        draw = torch.Generator().manual_seed(seed)
        logits = torch.randn(TOKENS, EXPERTS, generator=draw) * 2
        bias = torch.linspace(-1, 1, EXPERTS) if moe.expert_bias else None
        real = (torch.arange(TOKENS) % 3 > 0)[:, None] if padded else None
        chosen = choose(logits, bias, real, moe)
        where = places(chosen, EXPERTS, 1)
        routing.layers.append(describe(logits, where.counts, real, moe))
        kept = logits if real is None else logits[real[:, 0]]
        own = chosen if real is None else chosen[real[:, 0]]
        for row in kept.double():
            best = sorted(range(EXPERTS), key=lambda e: -row[e].item())[: moe.num_experts_per_tok]
            expected_balance[best, 0] += 1
            expected_balance[:, 1] += row.softmax(0)
            expected_z.append(row.logsumexp(0).item() ** 2)
            tokens += 1
        shares.append(torch.bincount(own.flatten(), minlength=EXPERTS) / own.numel())
        layers.append(logits)
    report = routing.take()
    assert report is not None
    balance = EXPERTS * (expected_balance[:, 0] / tokens * expected_balance[:, 1] / tokens).sum()
    assert report.balance_loss.item() == pytest.approx(balance.item(), rel=1e-5)
    assert report.z_loss.item() == pytest.approx(sum(expected_z) / tokens, rel=1e-5)
    torch.testing.assert_close(report.shares, torch.stack(shares).float())


def test_a_report_of_no_token_is_zero() -> None:
    """In a micro-batch that is all padding."""
    moe = settings()
    real = torch.zeros(4, 1, dtype=torch.bool)
    logits = torch.randn(4, EXPERTS)
    counts = places(choose(logits, None, real, moe), EXPERTS, 1).counts
    layer: LayerRouting = describe(logits, counts, real, moe)
    routing = Routing()
    routing.layers.append(layer)
    report = routing.take()
    assert report is not None
    assert report.balance_loss == 0 and report.z_loss == 0 and not report.shares.any()


def test_jitter_reaches_the_router_the_experts_and_the_shared_expert_alike() -> None:
    """As one noise on the input of the whole MLP, within its bounds on both sides of 1."""
    noise = 0.25
    config = ModelConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        moe=dict(num_experts=4, num_experts_per_tok=4, moe_intermediate_size=64, router_jitter_noise=noise,
                 shared_expert_intermediate_size=96, shared_expert_gate=True),
    )  # fmt: skip
    torch.manual_seed(0)
    model = CausalLM(config, recipe="bf16", dtype=torch.float32, device="cpu")
    mlp = model.layers[0].mlp
    seen: dict[str, Tensor] = {}
    given: list[Tensor] = []
    norm = model.layers[0].post_attention_layernorm
    norm.register_forward_hook(
        lambda m, inputs, output: given.append(output[0] if isinstance(output, tuple) else output)
    )
    for name in ("router", "shared_gate_up_proj", "shared_gate", "gate_up_proj"):
        module = mlp.get_submodule(name)
        module.register_forward_pre_hook(
            lambda m, inputs, name=name: seen.update({name: inputs[0]})
        )
    ids = torch.arange(24).reshape(1, 24)
    model.train()(ids, labels=ids)
    for name in ("shared_gate_up_proj", "shared_gate"):
        assert torch.equal(seen[name], seen["router"]), name
    # Every token goes to all experts, so the rows of the first expert are the tokens.
    assert torch.equal(seen["gate_up_proj"][:24], seen["router"])
    ratio = (seen["router"] / given[0])[given[0].abs() > 1e-3]
    assert 1 - noise <= ratio.min() < 1 - 0.8 * noise and 1 + 0.8 * noise < ratio.max() <= 1 + noise
    model.eval()(ids)
    assert torch.equal(seen["router"], given[1])


LAYERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "router in FP32, biases": dict(router_fp32=True, bias=True),
    "clamped": dict(bias=True, swiglu_limit=0.5),
    "shared": dict(shared_expert_intermediate_size=96),
    "shared, gated": dict(shared_expert_intermediate_size=96, shared_expert_gate=True),
    "groups": dict(
        router_scores="sigmoid", n_group=4, topk_group=2, group_scores=2, expert_bias=True,
        routed_scaling_factor=1.5, shared_expert_intermediate_size=32,
    ),
    "groups by maxima": dict(n_group=2, topk_group=1, group_scores=1, norm_topk_prob=False),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_mixture_is_the_sum_over_its_experts(name: str) -> None:
    """In FP64, token by token and expert by expert."""
    moe = settings(**LAYERS[name])
    config = ModelConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, moe=moe
    )  # fmt: skip
    torch.manual_seed(0)
    model = CausalLM(config, recipe="bf16", dtype=torch.float32, device="cpu").eval()
    mlp = model.layers[0].mlp
    for parameter in mlp.parameters():
        parameter.normal_(0, 0.3)
    seen: list[Tensor] = []
    model.layers[0].register_forward_hook(lambda m, inputs, output: seen.append(output))
    attended: list[Tensor] = []
    norm = model.layers[0].post_attention_layernorm
    norm.register_forward_pre_hook(lambda m, inputs: attended.append(inputs[0]))
    model(torch.arange(20).reshape(1, 20))
    weights = {n: p.double() for n, p in mlp.named_parameters()}
    x = norm_of(attended[0], norm, config.rms_norm_eps)
    output = (seen[-1] - attended[0]).double()

    def linear(which: str, row: Tensor, number: int | str = "") -> Tensor:
        bias = weights.get(f"{which}.bias{number}")
        product = weights[f"{which}.weight{number}"] @ row
        return product if bias is None else product + bias

    def activated(both: Tensor) -> Tensor:
        gate, up = both.chunk(2)
        if moe.swiglu_limit is None:
            return gate * torch.sigmoid(gate) * up
        gate, up = gate.clamp(max=moe.swiglu_limit), up.clamp(-moe.swiglu_limit, moe.swiglu_limit)
        return (up + 1) * gate * torch.sigmoid(moe.swiglu_alpha * gate)

    for row, found in zip(x, output, strict=True):
        logits = linear("router", row)
        bias = mlp.expert_bias if moe.expert_bias else None
        experts = chosen_by_definition(logits.float(), bias, moe)
        scores = logits.sigmoid() if moe.router_scores == "sigmoid" else logits.softmax(0)
        own = scores[experts]
        own = own / own.sum() if moe.norm_topk_prob else own
        total = torch.zeros(64).double()
        for weight, expert in zip(own * moe.routed_scaling_factor, experts, strict=True):
            hidden = activated(linear("gate_up_proj", row, expert))
            total += weight * linear("down_proj", hidden, expert)
        if moe.shared_expert_intermediate_size:
            shared = linear("shared_down_proj", activated(linear("shared_gate_up_proj", row)))
            gate = torch.sigmoid(linear("shared_gate", row)) if moe.shared_expert_gate else 1.0
            total += gate * shared
        torch.testing.assert_close(found, total, rtol=1e-3, atol=1e-4 * total.abs().max().item())


def norm_of(x: Tensor, norm: torch.nn.Module, epsilon: float) -> Tensor:
    """RMSNorm of x [N, D] in FP64."""
    x = x.double()
    scale = norm.get_parameter("weight").double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * scale


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_recompute_describes_no_layer_again(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it described would stay in the context of the pass, and with it the graph."""
    passes: list[Routing] = []

    class Watched(Routing):
        def __init__(self) -> None:
            super().__init__()
            passes.append(self)

    monkeypatch.setattr(forward_context, "Routing", Watched)
    config = ModelConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        moe=settings(),
    )  # fmt: skip
    model = CausalLM(config, recipe="bf16", device="cpu", activation_checkpointing=mode)
    ids = torch.arange(24).reshape(1, 24)
    model(ids, labels=ids).loss.backward()
    assert len(passes) == 1 and not passes[0].layers
