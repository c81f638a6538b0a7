"""The Trainer against a training loop written here on torch.optim.AdamW, clip_grad_norm_ and the schedule's formula."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from fewer import every
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from te_models import CausalLM
from te_models.config.training import TrainConfig
from te_models.errors import Diverged
from te_models.optim.gradients import GradientSums
from te_models.training.metrics import read_metrics
from te_models.training.parallel import Parallel
from te_models.training.trainer import Trainer

# The Trainer says so, and trains on.
pytestmark = pytest.mark.filterwarnings("ignore:a batch of your own has no label that counts")

STEPS, WARM_UP, PEAK, LAST, DECAY, CLIP = 20, 4, 1e-2, 0.2, 0.5, 0.5
SHAPE: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)
SHAPE |= dict(
    num_key_value_heads=1, vocab_size=64, max_position_embeddings=64, attention_gate="headwise"
)


class Batches:
    """Random tokens of which some labels count, as many or as few as it happens, and in some micro-batches none."""

    def __init__(self, count: int, rows: int = 2, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(7)
        self.all = []
        for number in range(count):
            ids = torch.randint(0, SHAPE["vocab_size"], (rows, length), generator=generator)
            share = (0.3, 1.0, 0.6, 0.0)[number % 4]
            counts = torch.rand(rows, length, generator=generator) < share
            self.all.append(dict(input_ids=ids, labels=torch.where(counts, ids, -100)))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.all)

    def state_dict(self) -> dict[str, Any]:
        return {}


def build(dtype: torch.dtype = torch.float32, **options: Any) -> CausalLM:
    torch.manual_seed(3)
    return CausalLM.from_preset(
        "gated-nano", recipe="bf16", device="cpu", dtype=dtype, **SHAPE, **options
    )


def rate(step: int) -> float:
    """Linear to PEAK over WARM_UP steps, then half a cosine down to LAST * PEAK at the last step."""
    if step <= WARM_UP:
        return PEAK * step / WARM_UP
    progress = (step - WARM_UP) / (STEPS - WARM_UP)
    return PEAK * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * progress)))


def reference(model: CausalLM, batches: Batches, micro_batches: int) -> list[dict[str, float]]:
    """Train the model on FP32 masters; the mean over all tokens that a step counts, and no decay of table and norms."""
    parameters = dict(model.named_parameters())
    masters = {name: p.detach().float().clone().requires_grad_() for name, p in parameters.items()}
    decays = [m for name, m in masters.items() if m.dim() == 2 and "embed_tokens" not in name]
    others = [m for name, m in masters.items() if m.dim() != 2 or "embed_tokens" in name]
    groups = [dict(params=decays, weight_decay=DECAY), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    rows, stream = [], iter(batches)
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        parts = [next(stream) for _ in range(micro_batches)]
        logits = torch.cat([model(part["input_ids"]).logits[:, :-1] for part in parts]).flatten(
            0, 1
        )
        labels = torch.cat([part["labels"][:, 1:] for part in parts]).flatten()
        loss = F.cross_entropy(logits.float(), labels)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        for master, gradient in zip(masters.values(), gradients, strict=True):
            master.grad = gradient.float()
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), CLIP)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
        rows.append(dict(loss=loss.item(), grad_norm=norm.item(), learning_rate=rate(step)))
    return rows


def train(model: CausalLM, batches: Any, out: Path, **fields: Any) -> Trainer:
    given = dict(steps=STEPS, warmup_steps=WARM_UP, learning_rate=PEAK, final_learning_rate=LAST, weight_decay=DECAY,
                 clip_grad_norm=CLIP, batch_size=2, seq_len=12, eval_every=0)  # fmt: skip
    return Trainer(model, batches, [], TrainConfig(**{**given, **fields}), out)


@pytest.mark.parametrize(("ahead", "micro_batches"), every(2, [False, True], [1, 4]))
def test_twenty_steps_are_those_of_a_plain_loop(
    micro_batches: int, ahead: bool, tmp_path: Path
) -> None:
    """In FP32, where only the order of sums differs: 20 steps amplify 2**-24 to about 1e-6."""
    batches = Batches(STEPS * micro_batches if micro_batches > 1 else 4 * STEPS)
    if micro_batches == 1:  # a step without any counted token has no gradient to compare
        batches.all = [batch for number, batch in enumerate(batches.all) if number % 4 != 3]
    ours, plain = build(), build()
    wanted = reference(plain, batches, micro_batches)
    run = train(ours, batches, tmp_path, gradient_accumulation=micro_batches)
    run.ahead = ahead
    run.run()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert all(row["grad_norm"] > 1.5 * CLIP for row in wanted), (
        "clipping is part of what is compared"
    )
    for row, other in zip(rows, wanted, strict=True):
        assert {name: row[name] for name in other} == pytest.approx(other, rel=1e-4), (
            f"step {row['step']}"
        )
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            p,
            q,
            rtol=0,
            atol=1e-4 * float(q.detach().abs().max()),
            msg=lambda text, n=name: f"{n}: {text}",
        )


@pytest.mark.parametrize("ahead", [False, True])
def test_a_gradient_that_is_not_finite_stops_the_run_before_it_reaches_a_weight(
    ahead: bool, tmp_path: Path
) -> None:
    """Also where the loss is finite, and where the host reads both only after it has queued the update."""
    model = build()
    run = train(model, Batches(8), tmp_path, steps=6)
    run.ahead, seen = ahead, []

    def poison(gradient: Tensor) -> Tensor:
        seen.append(copy.deepcopy(list(model.parameters())))
        return gradient * (math.nan if len(seen) == 3 else 1.0)

    model.layers[0].mlp.down_proj.weight.register_hook(poison)
    with pytest.raises(
        Diverged, match="step 3: the gradient norm is nan; every forward value is finite"
    ):
        run.run()
    for p, (name, q) in zip(seen[2], model.named_parameters(), strict=True):
        assert_same_bits(name, p, q)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def add(total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)


def test_gradients_of_many_micro_batches_are_summed_in_fp32(tmp_path: Path) -> None:
    """BF16 alone loses a percent over 64 micro-batches; FP32 sums are off by at most 64 roundings of 2**-24."""
    count, model = 64, build(torch.bfloat16)
    run = train(model, Batches(count, rows=1), tmp_path, gradient_accumulation=count)
    exact = {
        name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, total=exact[name]: add(total, gradient))
    found: dict[str, Tensor] = {}
    take = run.optimizer.take_gradients

    def spy(max_norm: float) -> Tensor:
        found.update({name: run.gradients.of(p).clone() for name, p in model.named_parameters()})
        return take(max_norm)

    run.optimizer.take_gradients = spy
    assert isinstance(run.gradients, GradientSums)
    run.step(iter(run.dataset))
    for name, total in exact.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - total).norm() <= 1e-5 * total.norm(), name
    assert all(p.grad is None for p in model.parameters())
    model(**next(iter(run.dataset))).loss.backward()
    assert all(p.grad is not None for p in model.parameters()), (
        "outside a step gradients are where PyTorch has them"
    )


def test_unused_parameters_have_no_gradient_sum() -> None:
    used, once, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    sums = GradientSums([used, once, unused])
    for step in (1, 2):  # of the second step as of the first
        with sums.collecting():
            (2 * used + once if step == 1 else 2 * used).sum().backward()
            sums.last_micro_batch()
            (3 * used).sum().backward()
        assert torch.equal(sums.of(used), torch.full((3,), 5.0)) and sums.of(unused) is None
        assert (sums.of(once) is None) == (step == 2), (
            "it would decay in a step that does not use it"
        )


def test_micro_batches_weigh_as_many_tokens_as_they_count() -> None:
    assert Parallel().loss_weights([1, 63, 0], torch.device("cpu")) == [1 / 64, 63 / 64, 0.0]
    assert Parallel().loss_weights([0], torch.device("cpu")) == [0.0]


def test_padded_micro_batches_are_one_batch_without_padding(tmp_path: Path) -> None:
    """Each text alone has no padding to leave out; the two micro-batches count 12 and 5 tokens."""
    model, texts = (
        build(),
        [torch.randint(0, SHAPE["vocab_size"], (length,)) for length in (12, 2, 4, 3)],
    )

    def padded(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=0, padding_side="left")

    batches = []
    for rows in (texts[:2], texts[2:]):
        ids, mask = padded(rows), padded([torch.ones_like(row) for row in rows])
        batches.append(dict(input_ids=ids, labels=ids, attention_mask=mask))
    logits = torch.cat([model(text[None]).logits[0, :-1] for text in texts])
    loss = F.cross_entropy(logits, torch.cat([text[1:] for text in texts]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients]))
    row = train(model, Batches(0), tmp_path, gradient_accumulation=2).step(iter(batches))
    assert (row["loss"], row["grad_norm"]) == pytest.approx((loss.item(), norm.item()), rel=1e-5)
