"""FLOPs of every kind of layer against PyTorch's own count of the operations that a CPU runs."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import kinds
import pytest
import torch
from kinds import KINDS, tokens
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from te_models import CausalLM
from te_models.config.attention import Heads, SeenKeys, SoftmaxAttentionSpec
from te_models.config.deltanet import DeltaNetSpec
from te_models.config.kda import KDASpec
from te_models.config.mamba2 import Mamba2Spec
from te_models.config.model import ModelConfig
from te_models.config.presets import get_preset, list_presets
from te_models.config.short_conv import ShortConvSpec
from te_models.inspect import roofline as roofline_module
from te_models.inspect.roofline import model_flops, roofline, seen_share
from te_models.inspect.verify import verify
from te_models.kernels import flash_4

BATCH, SEQ = 2, 32
PRODUCTS = ("mm", "addmm")
# Mixers whose operations are counted by hand below. Of any other, a new one too, PyTorch's count is the judge.
BY_HAND = (SoftmaxAttentionSpec, DeltaNetSpec, KDASpec, Mamba2Spec, ShortConvSpec)


def solve_flops(a: list[int], b: list[int], **options: Any) -> int:
    """A triangular system of n unknowns takes n^2 / 2 multiplications for each right-hand side."""
    return torch.Size(a[:-2]).numel() * a[-1] ** 2 * b[-1]


def counted(model: CausalLM, ids: Tensor) -> Counter[str]:
    """Operation -> FLOPs of a forward pass. Attention is composed of products, which compute every pair."""
    solve = {torch.ops.aten.linalg_solve_triangular: solve_flops}
    mode = FlopCounterMode(display=False, custom_mapping=solve)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), mode:
        model(ids)
    found: Counter[str] = Counter()
    for operation, flops in mode.get_flop_counts()["Global"].items():
        found[str(operation).removeprefix("aten.")] += flops
    return found


def convolution(mixer: Any, count: int) -> int:
    """FLOPs of the convolution of a mixer over `count` tokens, which are no products."""
    if isinstance(mixer, SoftmaxAttentionSpec):
        return 0
    sizes = getattr(mixer, "sizes", None)
    if isinstance(mixer, (DeltaNetSpec, Mamba2Spec)):
        return 2 * count * sizes.mixed_size * sizes.conv_kernel_dim
    if isinstance(mixer, KDASpec):
        return 2 * count * 3 * sizes.inner_size * sizes.conv_kernel_dim
    if isinstance(mixer, ShortConvSpec):
        return 2 * count * mixer.channels * sizes.kernel_dim
    return 0  # of the kind that only tests have, in plain multiplications, which PyTorch does not count


def rule_flops(mixer: Any, count: int, seq: int = SEQ) -> float:
    """By hand: the recurrence of a mixer over `count` tokens in chunks of 64, or one of `seq`."""
    sizes = getattr(mixer, "sizes", None)
    chunk = min(64, seq)
    if isinstance(mixer, DeltaNetSpec):
        k, v = sizes.key_head_dim, sizes.value_head_dim
        each = chunk * (2 * k + (k + v) / 2 + v) + 3 * k * v
        return 2 * count * sizes.num_value_heads * each
    if isinstance(mixer, KDASpec):
        return 2 * count * sizes.num_heads * (4 * chunk * sizes.head_dim + 3 * sizes.head_dim**2)
    if isinstance(mixer, Mamba2Spec):
        inside = chunk * (sizes.group_size + sizes.inner_size) / 2
        return 2 * count * (inside + 2 * sizes.inner_size * sizes.state_dim)
    return 0


def head_width(mixer: Any) -> int:
    """Return the channels of a key and a value of one head."""
    sizes = getattr(mixer, "sizes", None)
    return 2 * mixer.heads.dim if sizes is None else sizes.qk_head_dim + sizes.v_head_dim


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in kinds.RARER)) for name in KINDS],
)
def test_the_plan_counts_what_runs(name: str) -> None:
    """Half of the pairs of attention, which is causal."""
    kind = KINDS[name]
    with kind.known():
        model = kinds.build(kind, dtype=torch.float32).eval()
        found = counted(model, tokens(model, BATCH, SEQ))
        attention = linears = convolutions = rules = 0
        # The plain forms of the others compute whole chunks, or take elementwise what kernels take as products.
        comparable = True
        by_hand = True
        for layer in kind.config.layers:
            for part in layer.parts:
                linears += part.linear_flops(64)
            mixer: Any
            for mixer in layer.mixers:
                by_hand = by_hand and isinstance(mixer, BY_HAND)
                convolutions += convolution(mixer, 64)
                if isinstance(mixer, SoftmaxAttentionSpec):
                    attention += 2 * BATCH * mixer.heads.query * SEQ**2 * head_width(mixer) // 2
                else:
                    comparable = comparable and isinstance(mixer, DeltaNetSpec)
                    rules += rule_flops(mixer, 64)
        head = 2 * BATCH * SEQ * kind.config.hidden_size * kind.config.vocab_size
        # Only inputs per layer are made by a linear outside the layers.
        outside = sum(found[operation] for operation in PRODUCTS) - linears - head
        assert outside == 0 or (name.startswith("inputs per layer") and outside > 0)
        if rules and comparable:
            rule = found["bmm"] + found["linalg_solve_triangular"] - 2 * attention
            assert rule == pytest.approx(rules, rel=0.02)
        if not by_hand:
            # Composed attention computes both halves of the pairs.
            rules += found["bmm"] - 2 * attention
        expected = outside + linears + head + attention + convolutions + rules
        assert model_flops(kind.config, BATCH, SEQ) == 3 * expected


@pytest.fixture
def flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which a FLOP takes a millisecond, and a copied byte none."""

    def gemm(m: int, k: int, n: int, fp8: bool, device: torch.device) -> float:
        return 2.0 * m * k * n

    def attention(heads: Any, batch: int, seq: int, device: torch.device) -> float:
        return 6.0 * batch * seq**2 * heads.q_size

    def recurrence(sizes: Any, batch: int, seq: int, device: torch.device) -> float:
        alone = DeltaNetSpec(hidden_size=0, sizes=sizes)
        return 3 * (rule_flops(alone, batch * seq, seq) + convolution(alone, batch * seq))

    for name, measured in dict(_gemm=gemm, _attention=attention, _recurrence=recurrence).items():
        monkeypatch.setattr(roofline_module, name, measured)
    monkeypatch.setattr(roofline_module, "_copy_rate", lambda device: float("inf"))


def floor_of(config: ModelConfig, batch: int, seq: int, recipe: str = "current") -> Any:
    model = CausalLM(config, recipe=recipe, device="meta", engine="emulated")
    return roofline(config, batch, seq, model.precision.linears, torch.device("cpu"))


@pytest.mark.usefixtures("flops")
@pytest.mark.parametrize("name", KINDS)
def test_the_roofline_has_every_flop(name: str) -> None:
    """Of experts those that a token goes through, of mixers without a kernel here what the plan counts."""
    kind = KINDS[name]
    with kind.known():
        floor = floor_of(kind.config, BATCH, SEQ, "bf16")
        expected = model_flops(kind.config, BATCH, SEQ)
        for layer in kind.config.layers:
            for mixer in layer.mixers:
                if isinstance(mixer, SoftmaxAttentionSpec):
                    beside = BATCH * mixer.heads.query * SEQ**2 * head_width(mixer)
                    kernel = 2.0 * BATCH * SEQ**2 * mixer.heads.q_size  # whose heads have one width
                    expected += 3 * (kernel * seen_share(mixer.seen, SEQ) - beside)
        assert floor.total == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("flops")
@pytest.mark.parametrize(
    "preset", [name for name in list_presets() if "nano" in name or "moe" in name]
)
def test_the_roofline_of_presets(preset: str) -> None:
    config = get_preset(preset)
    windows = any(getattr(layer.mixer, "window", None) for layer in config.layers)
    if not windows and config.latent_attention is None:
        assert floor_of(config, 4, 512).total == pytest.approx(model_flops(config, 4, 512))


def test_a_window_sees_its_share_of_the_pairs() -> None:
    for seq, window in ((7, 3), (16, 1), (5, 5), (4, 9)):
        place = torch.arange(seq)
        distance = place[:, None] - place
        causal, inside = distance >= 0, (distance >= 0) & (distance < window)
        assert seen_share(SeenKeys(window), seq) == pytest.approx(
            (inside.sum() / causal.sum()).item()
        )
        own = place[:, None] // window == place // window
        share = (causal & own).sum() / causal.sum()
        assert seen_share(SeenKeys(chunk=window), seq) == pytest.approx(share.item())
    assert seen_share(SeenKeys(), 8) == 1.0


@pytest.mark.parametrize("flash", [False, True])
def test_attention_is_timed_by_the_kernel_that_runs(
    flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: None) -> tuple[Tensor, Tensor]:
        called.append(tuple(q.shape))
        return q * 1, q[..., 0]

    def backward(dy: Tensor, *tensors: Any, scale: None) -> None:
        called.append(tuple(dy.shape))

    monkeypatch.setattr(flash_4, "suits", lambda q: flash)
    monkeypatch.setattr(flash_4, "forward", forward)
    monkeypatch.setattr(flash_4, "backward", backward)

    def once(run: Callable[[], object]) -> float:
        run()
        return 1.0

    monkeypatch.setattr(roofline_module, "_milliseconds", once)
    roofline_module._attention(Heads(4, 2, 8, "none"), 3, 5, torch.device("cpu"))
    assert called == ([(3, 4, 5, 8)] * 2 if flash else [])


def test_verify_casts_the_weights_of_all_experts() -> None:
    config = get_preset(
        "gated-moe-nano", hidden_size=64, num_hidden_layers=1, vocab_size=96, num_attention_heads=4,
        num_key_value_heads=2, moe=dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64),
    )  # fmt: skip
    model = CausalLM(
        config,
        recipe="current",
        device="cpu",
        num_layers_at_start_in_bf16=0,
        num_layers_at_end_in_bf16=0,
    )
    found = {gemm.module: gemm for gemm in verify(model, 2, 16).gemms}
    experts = found["mlp.gate_up_proj"]
    assert experts.num_gemms == 8 and found["self_attn.o_proj"].num_gemms == 1
    bf16, fp8 = experts.h200_seconds()
    assert bf16 == pytest.approx(6 * experts.rows * 64 * 128 / 720e12)
    read = experts.rows * (64 + 128) + 8 * 64 * 128
    assert fp8 == pytest.approx(bf16 * 720 / 1250 + 4 * read / 4.15e12)
