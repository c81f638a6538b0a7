"""The suite that every kind of layer passes. A new kind enters it by a row of KINDS.

The judges know no kind: a pass without padding, without neighbors, without a cache or without recompute; autograd's own
saved tensors; a run that was not interrupted; the modules of the model.
"""

import gc
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from autograd_bytes import assert_planned, autograd_bytes, planned_bytes
from bits import assert_same_tensors
from fewer import every, slow
from kinds import (
    EMULATED,
    KINDS,
    OPTIONS,
    RARER,
    WHERE,
    Kind,
    Where,
    assert_close,
    build,
    gradients,
    tokens,
)  # fmt: skip
from places import PLACE
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from te_models import CausalLM, list_recipes
from te_models.errors import UsageError
from te_models.fp8.scaling_state import fp8_state
from te_models.inspect.verify import verify
from te_models.model.tensor_parallel import divided_linear, gather_state


def each_kind(*axes: Sequence[Any], first: int = 0, step: int = 1) -> list[Any]:
    """Return a case per kind with a value of each axis in turn; other tests cover the axes' pairs.

    Of the usual kinds each `step`-th from the `first` on is not slow: tests that are near to each other share them.
    """
    usual = [name for name in KINDS if name not in RARER]
    quick = usual[first::step]
    return [
        pytest.param(
            *(axis[number % len(axis)] for axis in axes),
            name,
            marks=[pytest.mark.slow] * (name not in quick),
        )
        for number, name in enumerate(KINDS)
    ]


def one_of(first: Any, second: Any) -> list[Any]:
    """Return a case per kind with one of two values, in turn; with the other it is slow."""
    return [*each_kind((first, second)), *slow(each_kind((second, first)))]


# Each kind with one mode in every run, and with the others in the long tests.
MODES = every(3, ("none", "selective", "full"), [name for name in KINDS if name not in RARER])


@pytest.fixture(params=each_kind())
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    with KINDS[request.param].known():
        yield KINDS[request.param]


@pytest.mark.parametrize("where", WHERE)
def test_packed_documents_are_those_alone(kind: Kind, where: Where) -> None:
    place, bound = kind.at(where)
    model, lengths = build(kind, **place), (1, 5, 18)
    ids = tokens(model, 1)
    documents = torch.repeat_interleave(torch.tensor((4, 2, 9)), torch.tensor(lengths))[None].to(
        ids.device
    )
    labels = ids.clone()
    labels[:, [0, 1, 6]] = -100
    together = model(ids, labels=labels, document_ids=documents)
    together.loss.backward()
    found = gradients(model)
    loss = torch.zeros((), device=ids.device)
    for own, logits in zip(ids.split(lengths, 1), together.logits.split(lengths, 1), strict=True):
        alone = model(own, labels=own) if own.shape[1] > 1 else model(own)
        assert_close(logits, alone.logits, bound)
        loss = loss if alone.loss is None else loss + alone.loss * (own.shape[1] - 1) / 21
    assert_close(together.loss, loss, bound)
    loss.backward()
    for name, gradient in gradients(model).items():
        assert_close(found[name], gradient, 4 * bound, name)
    assert (together.logits - model(ids).logits)[0, -12:].norm() > 2 * bound * together.logits[
        0, -12:
    ].norm()


@pytest.mark.parametrize("side, kind", one_of("left", "right"), indirect=["kind"])
@pytest.mark.parametrize("where", WHERE)
def test_padding_changes_nothing(kind: Kind, where: Where, side: str) -> None:
    place, bound = kind.at(where)
    model, count = build(kind, **place), 11
    ids = tokens(model)
    mask = torch.ones_like(ids)
    real = slice(24 - count, 24) if side == "left" else slice(count)
    mask[1] = 0
    mask[1, real] = 1
    padded = model(ids, labels=ids.masked_fill(mask == 0, -100), attention_mask=mask)
    padded.loss.backward()
    found = gradients(model)
    own = [ids[:1], ids[1:, real]]
    outputs = [model(row, labels=row) for row in own]
    assert_close(padded.logits[0], outputs[0].logits[0], bound)
    assert_close(padded.logits[1, real], outputs[1].logits[0], bound)
    loss = (outputs[0].loss * 23 + outputs[1].loss * (count - 1)) / (23 + count - 1)
    assert_close(padded.loss, loss, bound)
    loss.backward()
    for name, gradient in gradients(model).items():
        assert_close(found[name], gradient, 4 * bound, name)


@pytest.mark.parametrize("mode, kind", MODES, indirect=["kind"])
def test_a_pass_without_a_backward_keeps_no_memory(kind: Kind, mode: str) -> None:
    """The graph is gone, and with it what it stored: its leaves forget what was noted on them."""
    model = build(kind, activation_checkpointing=mode)
    ids = tokens(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def leaves() -> list[dict[Any, Any]]:
        return [
            parameter.view_as(parameter).grad_fn.next_functions[0][0].metadata
            for parameter in parameters
        ]

    output = model(ids, labels=ids)
    for noted in leaves():
        noted["pass"] = 1
    assert all("pass" in noted for noted in leaves())
    del output, noted
    gc.collect()
    assert not any("pass" in noted for noted in leaves())


@pytest.mark.parametrize("recipe, kind", one_of("bf16", "delayed"), indirect=["kind"])
def test_padding_stays_zero(kind: Kind, recipe: str) -> None:
    """Between all blocks and before every te.Linear, in both directions, so that it changes no scale: before, after and
    below the tokens.
    """
    model = build(kind, recipe)
    ids = tokens(model, 3, 7)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[1, 5:] = 0
    rows: list[tuple[str, Tensor]] = []

    def keep(name: str, tensor: Tensor) -> None:
        rows.append((name, tensor))
        tensor.register_hook(lambda slope: rows.append((f"gradient of {name}", slope)))

    for name, module in model.named_modules():
        if isinstance(module, model.te.Linear):
            module.register_forward_pre_hook(lambda m, inputs, name=name: keep(name, inputs[0]))
    for number, block in enumerate(model.layers):
        block.register_forward_hook(
            lambda m, inputs, output, number=number: keep(f"output of {number}", output)
        )
    model(ids, labels=ids.masked_fill(mask == 0, -100), attention_mask=mask).loss.backward()
    linears = [n for n, module in model.named_modules() if isinstance(module, model.te.Linear)]
    fp32 = [n for n in linears if n.endswith(".router") and model.config.moe.router_fp32]
    assert len(rows) == 2 * (
        len(model.layers) + len(linears) - len(fp32)
    )  # whose forward does not run
    for name, row in rows:
        padding = torch.cat((mask.flatten() == 0, torch.ones(len(row) - 21, dtype=torch.bool)))
        assert not row[padding].any() and row[~padding].any(), name


@pytest.mark.parametrize("padded, kind", one_of(False, True), indirect=["kind"])
@pytest.mark.parametrize("where", WHERE)
@torch.no_grad()
def test_decoding_is_the_forward_pass(kind: Kind, where: Where, padded: bool) -> None:
    """A prompt, several tokens at once and single ones, twice with one cache, which forgets the first text."""
    place, bound = kind.at(where)
    model = build(kind, **place).eval()
    cache = model.new_cache(2, 24)
    for seed in (1, 2):
        ids = tokens(model, seed=seed)
        mask = torch.ones_like(ids)
        if padded:
            mask[0, :5] = 0
        expected = model(ids, attention_mask=mask).logits
        cache.clear()
        steps = [
            model(part, cache=cache, attention_mask=seen).logits
            for part, seen in zip(
                ids.split((8, 3, 1, 1, 2, 9), 1), mask.split((8, 3, 1, 1, 2, 9), 1), strict=True
            )
        ]
        found = torch.cat(steps, 1)
        assert_close(found[mask.bool()], expected[mask.bool()], bound)
    assert cache.nbytes == sum(
        spec.mixer.state_bytes(2, cache.real.shape[1], model.dtype.itemsize)
        for spec in model.specs
        if spec.mixer is not None
    )


@pytest.mark.parametrize("kind", each_kind(step=2), indirect=True)
@torch.no_grad()
def test_a_cleared_cache_is_a_new_one(kind: Kind) -> None:
    """In every bit, also in FP8, where a number that nothing else reads would change the scale of a tensor."""
    model = build(kind, "current").eval()
    used, new, ids = model.new_cache(1, 32), model.new_cache(1, 32), tokens(model, 1, 8, seed=1)
    model(tokens(model, 1, 32), cache=used)
    used.clear()
    for part in ids.split((5, 1, 2), 1):
        assert torch.equal(model(part, cache=used).logits, model(part, cache=new).logits)


@pytest.mark.parametrize("kind", each_kind(first=1, step=2), indirect=True)
@torch.no_grad()
def test_a_text_that_is_no_number_leaves_a_cleared_cache(kind: Kind) -> None:
    """A hidden slot takes part in products all the same, and NaN times 0 is NaN."""
    model = build(kind).eval()
    model.get_parameter("embed_tokens.weight")[95] = torch.nan
    used, new = model.new_cache(1, 32), model.new_cache(1, 32)
    assert model(torch.full((1, 32), 95), cache=used).logits.isnan().all()
    used.clear()
    for part in torch.arange(8)[None].split((5, 1, 2), 1):
        found = model(part, cache=used).logits[..., :95]  # a tied head has NaN for that token
        assert found.isfinite().all()
        assert torch.equal(found, model(part, cache=new).logits[..., :95])


@pytest.mark.parametrize("where", WHERE)
def test_generation_with_a_cache_is_that_without(kind: Kind, where: Where) -> None:
    """On a GPU the steps are a CUDA graph. Where two logits are equal up to rounding, either may be taken."""
    place, bound = kind.at(where)
    model = build(kind, **place).eval()
    ids = tokens(model, 2, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    found = model.generate(ids, 12, attention_mask=mask, eos_token_id=None)
    mask = torch.nn.functional.pad(mask, (0, 12), value=1)
    with torch.no_grad():
        logits = model(found, attention_mask=mask).logits[:, 6:-1].float()
    taken = logits.gather(2, found[:, 7:, None])[..., 0]
    assert (logits.amax(-1) - taken).max() <= 4 * bound * logits.abs().max()


@pytest.mark.parametrize("kind", each_kind(first=1, step=2), indirect=True)
def test_transformers_generates_the_same(kind: Kind) -> None:
    modeling = pytest.importorskip("te_models.huggingface.modeling")
    model = build(kind, dtype=torch.float32).eval()
    ids = tokens(model, 2, 7)
    expected = model.generate(ids, 6, eos_token_id=None)
    wrapped = modeling.TEModelsForCausalLM.wrap(model).eval()
    options: dict[str, Any] = dict(
        attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
    )
    assert torch.equal(wrapped.generate(ids, use_cache=False, **options), expected)
    assert torch.equal(wrapped.generate(ids, **options), expected)


def step_of(kind: Kind, recipe: str, mode: str | int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return all gradients and scales after two passes, the second with packed documents."""
    model = build(kind, recipe, activation_checkpointing=mode, **options)
    model.te.FP8GlobalStateManager.reset()
    ids = tokens(model)
    documents = (torch.arange(24, device=ids.device) // 7).expand_as(ids)
    model(ids, labels=ids).loss.backward()
    model(ids, labels=ids, document_ids=documents).loss.backward()
    return gradients(model) | fp8_state(model)


MODES = ("selective", "full", 2)
FP8_RECIPES = [name for name in list_recipes() if name != "bf16"]
RECOMPUTED = each_kind([*FP8_RECIPES, "bf16"], MODES, first=1, step=4)
RECOMPUTED += slow(
    case for n in (1, 2) for case in each_kind([*FP8_RECIPES, "bf16"], MODES[n:] + MODES[:n])
)


@pytest.mark.parametrize("recipe, mode, kind", RECOMPUTED, indirect=["kind"])
def test_recompute_changes_no_bit(kind: Kind, recipe: str, mode: str | int) -> None:
    assert_same_tensors(
        step_of(kind, recipe, mode, EMULATED), step_of(kind, recipe, "none", EMULATED)
    )


@pytest.mark.parametrize(
    "recipe, mode, kind",
    each_kind(FP8_RECIPES, ("none", "full", "selective"), step=4),
    indirect=["kind"],
)
def test_an_autocast_per_linear_is_one_around_the_layers(
    kind: Kind, recipe: str, mode: str | int
) -> None:
    """A model in BF16 whose table has every linear of the blocks in FP8, against a model under that recipe."""
    precision = {"layers.*": recipe}
    assert_same_tensors(
        step_of(kind, "bf16", mode, dict(precision=precision)),
        step_of(kind, recipe, "none", EMULATED),
    )


@pytest.mark.parametrize(
    "recipe, kind", each_kind(list_recipes(), first=1, step=3), indirect=["kind"]
)
def test_every_recipe_trains(kind: Kind, recipe: str) -> None:
    """One batch is learned by heart."""
    found = losses(build(kind, recipe))
    assert found[-1] < 0.95 * found[0]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_every_recipe_trains_by_the_default_path(kind: Kind, recipe: str) -> None:
    """And begins with the loss of the emulated engine, up to the rounding of FP8's three mantissa bits in a logit."""
    native, emulated = build(kind, recipe, **PLACE), build(kind, recipe)
    native.load_state_dict(dict(emulated.named_parameters()), strict=False)
    found, expected = losses(native), losses(emulated)
    assert found[0] == pytest.approx(expected[0], rel=2.0**-5)
    assert found[-1] < 0.95 * found[0]


def losses(model: CausalLM) -> list[float]:
    """Return the loss of each of a few steps on one batch."""
    ids, found = tokens(model), []
    model.calibrate(dict(input_ids=ids, labels=ids))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        assert loss is not None and bool(loss.isfinite())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", each_kind(first=1, step=2), indirect=True)
def test_a_folder_keeps_every_bit(kind: Kind, tmp_path: Path) -> None:
    model = build(kind, "delayed")
    ids = tokens(model)
    model(ids, labels=ids).loss.backward()
    model.save_pretrained(tmp_path / "te")
    again = CausalLM.from_pretrained(tmp_path / "te", **EMULATED)
    assert again.config == kind.config
    assert_same_tensors(
        {**again.state_dict(), **fp8_state(again)}, {**model.state_dict(), **fp8_state(model)}
    )
    if kind.family:
        model.save_pretrained(tmp_path / "hf", format="hf")
        again = CausalLM.from_pretrained(tmp_path / "hf", **EMULATED, recipe="bf16")
        assert torch.equal(again.eval()(ids).logits, build(kind).eval()(ids).logits)
        found, expected = (
            {n: p for n, p in m.named_parameters() if p.dim() > 1} for m in (again, build(kind))
        )
        assert_same_tensors(found, expected)  # rows of padding too, which are in no folder
    else:
        with pytest.raises(
            UsageError, match="no architecture of Hugging Face has all of this model"
        ) as refused:
            model.save_pretrained(tmp_path / "hf", format="hf")
        # Also of an export, which has no format "te".
        assert "save_pretrained, or `te-models convert --format te`" in str(refused.value)
        assert not (tmp_path / "hf").exists()


# Attention runs on FP32 copies of BF16.
STEPS = list(
    itertools.product(
        ("bf16", "current", "delayed"),
        ("none", "selective", "full"),
        (torch.bfloat16, torch.float32),
    )
)
# One of the 18 steps with each second kind in every run, and six with every kind in the long tests.
PLANNED = each_kind(*zip(*STEPS, strict=True), first=2, step=4)
PLANNED += slow(
    case for n in (2, 5, 7, 11, 15) for case in each_kind(*zip(*STEPS[n:], *STEPS[:n], strict=True))
)


@pytest.mark.parametrize("recipe, mode, dtype, kind", PLANNED, indirect=["kind"])
def test_the_memory_plan_is_what_autograd_keeps(
    kind: Kind, recipe: str, mode: str, dtype: torch.dtype
) -> None:
    model = build(kind, recipe, activation_checkpointing=mode, dtype=dtype)
    rows = 2 if kind.config.moe is None else 16  # whole blocks of 128 rows
    planned = planned_bytes(model, rows, 64)
    kept = autograd_bytes(model, tokens(model, rows, 64))
    if kind.config.moe is None:
        assert_planned(planned, kept, model, 64)
    elif mode != "full":  # rows of experts are padded; recomputes hold the routers' choices
        assert planned == pytest.approx(kept, rel=0.05)
    assert kind.config.num_parameters + kind.config.num_padding_parameters == sum(
        p.numel() for p in model.parameters()
    )


def test_plan_and_verify_know_every_linear(kind: Kind) -> None:
    model = build(kind, "current")
    linears = {
        name for name, module in model.named_modules() if isinstance(module, model.te.LINEARS)
    }
    planned = {
        f"layers.{row.layer}.{row.module}" if row.layer.isdecimal() else row.module: row
        for row in model.plan().rows
    }
    assert planned.keys() == linears
    high = {"lm_head"} | {name for name, linear in model.config.linears.items() if not linear.fp8}
    assert {name for name, row in planned.items() if row.precision == "BF16"} == high
    found = verify(model, 2, 24)
    assert not found.failures
    assert sum(gemm.in_fp8 for gemm in found.gemms) == len(linears) - len(high)
    routers = sum(name.endswith(".router") for name in high)
    fp32 = routers if model.config.moe is not None and model.config.moe.router_fp32 else 0
    assert sum(gemm.in_bf16 for gemm in found.gemms) == len(high) - fp32


@pytest.mark.filterwarnings(
    "ignore:peft (has no|takes) adapters"
)  # on the shared experts of DeepSeek's families
@pytest.mark.parametrize("kind", each_kind(first=1, step=2), indirect=True)
def test_adapters_train_merge_and_come_back(kind: Kind, tmp_path: Path) -> None:
    lora = pytest.importorskip("te_models.training.lora")
    model = build(kind, dtype=torch.float32)
    ids = tokens(model)
    plain = model(ids).logits.detach()
    adapted = lora.add_lora(
        model, r=4, lora_alpha=8, target_modules=["all-linear"] + ["experts"] * kind.chooses
    )
    adapters = {name for name, p in adapted.named_parameters() if p.requires_grad}
    modules = pytest.importorskip("te_models.training.lora_targets").adaptable_modules(build(kind))
    linears = {name for name in modules.theirs if name != "lm_head"} - modules.routers
    experts = len(modules.experts) if kind.chooses else 0
    assert len(adapters) == 2 * (len(linears) + experts)  # of each linear in transformers
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(ids, labels=ids).loss.backward()
        optimizer.step()
    tuned = adapted(ids).logits.detach()
    assert (tuned - plain).norm() > 0.01 * plain.norm()
    lora.save_lora(adapted, tmp_path)
    again = lora.load_lora(build(kind, dtype=torch.float32), tmp_path)
    assert_close(again(ids).logits, tuned, 1e-6)
    assert_close(adapted.merge_and_unload()(ids).logits, tuned, 1e-5)


@pytest.mark.filterwarnings(
    "ignore:peft (has no|takes) adapters on"
)  # of latent attention's family, in transformers
@pytest.mark.filterwarnings("ignore:no expert has an adapter")
@pytest.mark.filterwarnings("ignore:peft adapts no layers")  # Gemma 4's mlp.down_proj
@pytest.mark.parametrize("kind", each_kind(step=2), indirect=True)
def test_peft_adapts_all_linears_of_transformers(kind: Kind) -> None:
    """All te.Linears but the head, routers and experts; files are judged in tests/huggingface/test_adapters.py."""
    peft, modeling = (
        pytest.importorskip(name) for name in ("peft", "te_models.huggingface.modeling")
    )
    model = build(kind, dtype=torch.float32).eval()
    ids = tokens(model)
    plain = model(ids).logits.detach()
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(modeling.TEModelsForCausalLM.wrap(model).eval(), config)
    names = {
        name.partition(".lora_")[0] for name, p in adapted.named_parameters() if p.requires_grad
    }
    assert not any(name.endswith((".gate", ".router", "lm_head")) for name in names)
    adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, p in adapted.named_parameters():
        assert p.grad is None or p.requires_grad, name
    tuned = model(ids).logits
    assert (tuned - plain).norm() > 0.01 * plain.norm()
    adapted.merge_adapter()
    assert_close(model(ids).logits, tuned, 1e-4)


DIVIDED = {name: kind for name, kind in KINDS.items() if name not in OPTIONS}


def on_two_ranks(rank: int, folder: str) -> None:
    """Save each kind's loss and gradients, or the reason why it is not divided."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for name, kind in DIVIDED.items():
        with kind.known():
            try:
                model = build(kind, dtype=torch.float32, tp_mesh=mesh)
            except UsageError as error:
                found[name] = str(error)
                continue
            ids = tokens(model)
            loss = model(ids, labels=ids).loss
            loss.backward()
            found[name] = {"loss": loss.detach()} | gather_state(
                gradients(model), model.config, model.tp
            )
    torch.save(found, f"{folder}/{rank}.pt")


def test_two_ranks_compute_the_same_or_say_why_not(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, tmp_path, 2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, kind in DIVIDED.items():
        with kind.known():
            model = build(kind, dtype=torch.float32)
            if obstacles := [
                o for part in kind.config.parts if (o := part.parallel_obstacle(sequence=False))
            ]:
                assert [found[name] for found in ranks] == obstacles[:1] * 2
                continue
            assert any(
                divided_linear(parameter, model.config) for parameter, _ in model.named_parameters()
            )
            ids = tokens(model)
            loss = model(ids, labels=ids).loss
            loss.backward()
        expected = {"loss": loss.detach()} | gradients(model)
        for rank, found in enumerate(ranks):
            for parameter, tensor in expected.items():
                where = f"{name}, rank {rank}: {parameter}"
                assert_close(found[name][parameter], tensor, 1e-5, where)
