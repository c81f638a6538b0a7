"""Options, shapes, forms of data and steps of a run's life, paired at random, each with a judge of its own.

Faults sit where two features meet that no list pairs. Each case is drawn by its number: `make test` runs the first few,
the slow tests some hundred more. TE_MODELS_SEED moves all of them to cases that nobody has seen.
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from fp64_model import logits_of
from random_runs import Life, Tokens, draw_config, draw_life, draw_tokens, other_kinds
from torch import Tensor

from te_models import CausalLM, list_recipes
from te_models.config.training import TrainConfig
from te_models.errors import ConfigError, UsageError
from te_models.fp8.scaling_state import fp8_state
from te_models.training.trainer import Trainer

SEED = int(os.environ.get("TE_MODELS_SEED", "0"))


def cases(few: int, many: int, found: tuple[int, ...] = ()) -> list[object]:
    """Numbers of cases, of which the first `few`, and those that have `found` a fault, are not slow."""
    return [
        pytest.param(SEED + n, marks=[] if n < few or n in found else [pytest.mark.slow])
        for n in range(many)
    ]


def judged(
    model: CausalLM, tokens: Tokens, weights: dict[str, Tensor]
) -> tuple[list[Tensor], Tensor | None]:
    """Return the FP64 logits of each document, and the mean loss; None where no token counts."""
    logits, losses = [], []
    for row, places in tokens.texts():
        logits.append(logits_of(model.config, weights, tokens.ids[row, places]))
        labels = tokens.labels[row, places]
        losses.append(
            F.cross_entropy(logits[-1][:-1], labels[1:], reduction="none", ignore_index=-100)[
                labels[1:] >= 0
            ]
        )
    counted = torch.cat(losses)
    return logits, counted.mean() if len(counted) else None


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@torch.no_grad()
def decoded(model: CausalLM, tokens: Tokens, rng: random.Random) -> Tensor:
    """Return the logits of rows that are read in parts, with a cache."""
    cache, size = model.new_cache(*tokens.ids.shape), rng.choice((1, 3, 9))
    mask = torch.ones_like(tokens.ids) if tokens.mask is None else tokens.mask
    parts = zip(tokens.ids.split(size, 1), mask.split(size, 1), strict=True)
    return torch.cat(
        [model(ids, cache=cache, attention_mask=seen).logits for ids, seen in parts], 1
    )


def rounded_gradients(model: CausalLM, tokens: Tokens) -> dict[str, Tensor | None]:
    """Return the gradients of the judge in FP32: how far they are from those in FP64 is what rounding does here."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    _, loss = judged(model, tokens, weights)
    assert loss is not None
    loss.backward()
    return {name: weight.grad for name, weight in weights.items()}


# 224: interleaved RoPE before norms with weights.
@pytest.mark.parametrize("number", cases(10, 250, found=(224,)))
def test_a_random_model_is_the_fp64_model(number: int) -> None:
    """Logits of every document, also while decoding, the loss with and without logits, and every gradient, in FP32."""
    rng = random.Random(number)
    config, tokens = (
        other_kinds(rng, draw_config(rng), width=rng.choice((12, 32))),
        draw_tokens(rng),
    )
    torch.manual_seed(number)
    place = dict(
        engine="emulated", device="cpu", fused=rng.random() < 0.5
    )  # on a CPU, the plain twins of fused kernels
    model = CausalLM(config, recipe="bf16", dtype=torch.float32, **place)
    model.train(config.moe is None)  # the losses of routers have tests of their own
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.0 if "bias" in name or config.zero_centered_norm else 1.0, 0.2)
    names = {id(p): name for name, p in model.named_parameters()}
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    mode = rng.choice(("none", "none", "selective", "full"))
    model.activation_checkpointing = mode
    about = f"{config}, {tokens.inputs}, {mode}, {place}"
    logits, loss = judged(model, tokens, weights)
    output, chunked = (model(**tokens.inputs, return_logits=whole) for whole in (True, False))
    found = (
        [output.logits]
        if tokens.documents is not None
        else [output.logits, decoded(model, tokens, rng)]
    )
    for (row, places), expected in zip(tokens.texts(), logits, strict=True):
        assert all(relative(one[row, places], expected) < 1e-4 for one in found), about
    if loss is None:
        return
    assert chunked.logits is None
    assert all(relative(one.loss, loss) < 1e-5 for one in (output, chunked)), about
    rng.choice((output, chunked)).loss.backward()
    loss.backward()
    whole = torch.stack([w.grad.norm() for w in weights.values() if w.grad is not None]).norm()
    for parameter in model.parameters():
        if not parameter.requires_grad:  # a bias of the choice of experts
            continue
        expected = weights[names[id(parameter)]].grad
        found = parameter.grad
        assert found is not None, about
        expected = (
            torch.zeros_like(found) if expected is None else expected
        )  # an expert that no token chose
        error = (found.double() - expected).norm()
        if error >= 1e-4 * expected.norm() + 1e-6 * whole:
            rounded = rounded_gradients(model, tokens)[names[id(parameter)]]
            assert rounded is not None, about
            # The same size; other orders of sums round differently.
            assert error < 4 * (rounded.double() - expected).norm(), (names[id(parameter)], about)


class Killed(Exception):
    pass


def trainer(life: Life, out: Path) -> Trainer:
    """Build the run; its random numbers do not depend on what ran before."""
    torch.manual_seed(life.fields["seed"])
    model = CausalLM(life.config, engine="emulated", device="cpu", **life.build)
    adapters = None
    if life.lora is not None:
        pytest.importorskip("peft")
        from te_models.training.lora_run import LoraRun  # noqa: PLC0415  needs peft
        from te_models.training.settings import LoraSettings  # noqa: PLC0415

        adapters = LoraRun(model, LoraSettings(**life.lora))
    held_out = life.batches[:1] if life.fields["eval_every"] else None
    return Trainer(model, life.batches, held_out, TrainConfig(**life.fields), out, saved=adapters)


def everything(run: Trainer) -> dict[str, Tensor]:
    """The tensors that a run consists of."""
    model = run.model
    masters = {f"master {number}": master for number, master in enumerate(run.optimizer.masters)}
    return {
        **{name: p.detach() for name, p in model.named_parameters()},
        **fp8_state(model),
        **masters,
    }


@pytest.mark.filterwarnings(
    "ignore:peft (has no|takes) adapters on"
)  # of some families, in transformers
@pytest.mark.parametrize("number", cases(2, 100))
def test_a_random_life_ends_as_if_nothing_had_happened(number: int, tmp_path: Path) -> None:
    """A run that saves in the background, is killed after random steps and resumed each time, ends in the same bits as
    one that did neither; its model, saved and loaded, answers as it does.
    """
    rng = random.Random(number)
    life = draw_life(rng, list_recipes())
    about = str(life._replace(batches=[]))
    try:
        trainer(life, tmp_path / "refused")
    except (
        ConfigError,
        UsageError,
    ) as refused:  # adapters or patterns that name nothing in this model
        assert "\n" not in str(refused), about
        return
    with torch.compiler.set_stance("force_eager"):
        whole = trainer(life._replace(fields=life.fields | dict(save_every=0)), tmp_path / "whole")
        whole.run()
        # Now, since training another model updates the scales of all, as in Transformer Engine.
        expected = {name: tensor.clone() for name, tensor in everything(whole).items()}
        for step in life.kills:
            run = trainer(life, tmp_path / "run")

            def kill(row: dict[str, Any], step: int = step) -> None:
                if row["step"] == step:
                    raise Killed

            run.on_step = kill
            with pytest.raises(Killed):
                run.run(resume=(tmp_path / "run" / "checkpoints").is_dir())
        last = trainer(life, tmp_path / "run")
        torch.manual_seed(99)
        assert (
            last.run(resume=(tmp_path / "run" / "checkpoints").is_dir()).step
            == life.fields["steps"]
        ), about
    found = everything(last)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(f"{name}; {about}", found[name], tensor)
    if life.lora is None:
        last.model.save_pretrained(tmp_path / "saved")
        again = CausalLM.from_pretrained(tmp_path / "saved", engine="emulated", device="cpu")
        ids = life.batches[0]["input_ids"]
        assert torch.equal(again.eval()(ids).logits, whole.model.eval()(ids).logits), about
        assert torch.equal(
            again.generate(ids, max_new_tokens=5), whole.model.generate(ids, max_new_tokens=5)
        ), about
