"""The smallest change that makes a run fit: it fits, fewer changes do not, and milder ones come first."""

import functools
import re
import time
from typing import Any

import pytest
from fewer import every

from te_models.config.presets import get_preset
from te_models.config.recipe import get_recipe
from te_models.errors import UsageError
from te_models.planning.memory_plan import plan_memory
from te_models.planning.smallest_change import smallest_change

ROUNDED = dict(stochastic_rounding=True)
OWN: dict[str, Any] = dict(
    batch_size=8, seq_len=2048, optimizer="adamw", optimizer_offload=False, optimizer_options={}, lora_rank=0,
    activation_checkpointing="none", activation_offload=False, gpus=1, gradient_accumulation=1, fp8_params=False,
)  # fmt: skip


def planner(preset: str, recipe: str, **options: Any) -> Any:
    return functools.partial(plan_memory, get_preset(preset), get_recipe(recipe), **OWN | options)


def keywords(flags: tuple[str, ...]) -> dict[str, Any]:
    """Return flags as a user would have typed them, as keywords of plan_memory."""
    text = " ".join(flags).replace("--lora", "--lora-rank")
    found: dict[str, Any] = {}
    if (rounded := "--optimizer-options stochastic_rounding=true") in text:
        text = text.replace(rounded, "")
        found["optimizer_options"] = ROUNDED
    for name, value in re.findall(r"--([\w-]+)(?: (\w+))?", text):
        found[name.replace("-", "_")] = int(value) if value.isdecimal() else value or True
    return found


@pytest.mark.parametrize(
    ("recipe", "preset", "gib"),
    [
        ("bf16", "gated-1b", 30),
        pytest.param("current", "gated-1b", 12, marks=pytest.mark.slow),
        ("current", "gated-350m", 10),
        ("bf16", "gated-8b", 80),
        pytest.param("current", "gated-1b", 30, marks=pytest.mark.slow),
        pytest.param("bf16", "gated-1b", 12, marks=pytest.mark.slow),
        pytest.param("bf16", "gated-350m", 10, marks=pytest.mark.slow),
        pytest.param("current", "gated-8b", 80, marks=pytest.mark.slow),
    ],
)
def test_the_change_is_enough_and_no_single_one_is_if_it_has_several(
    preset: str, gib: float, recipe: str
) -> None:
    plan, available = planner(preset, recipe), int(gib * 2**30)
    assert plan().peak.total > available
    change = smallest_change(plan, OWN, available)
    assert change is not None
    changed = keywords(change.flags)
    assert plan(**changed).peak.total == change.peak <= available
    if recipe == "bf16":
        assert "fp8_params" not in changed
    steps = [name for name in changed if name != "gradient_accumulation"]
    for left_out in steps:
        gone = {left_out}
        if left_out == "batch_size":
            gone.add("gradient_accumulation")
        if left_out == "optimizer":
            gone.add("optimizer_options")  # adamw has none of an 8-bit optimizer's
        kept = {name: value for name, value in changed.items() if name not in gone}
        assert plan(**kept).peak.total > available, f"{left_out} is not needed"


@pytest.mark.parametrize(("optimizer", "flags"), [
    ("adamw", ("--optimizer", "adamw8bit", "--optimizer-options", "stochastic_rounding=true")),
    ("adamwfp8", ("--optimizer-options", "stochastic_rounding=true")),
])  # fmt: skip
def test_masters_go_where_that_is_enough(optimizer: str, flags: tuple[str, ...]) -> None:
    options = {**OWN, "optimizer": optimizer, "activation_checkpointing": "full", "batch_size": 1}
    plan = planner("llama-3.1-8b", "current", **options)
    enough = plan(optimizer="adamw8bit", optimizer_options=ROUNDED).peak.total
    assert (
        enough < 0.62 * plan(optimizer="adamw8bit").peak.total
    )  # 16 GB each of weights, moments and gradients
    change = smallest_change(plan, options, enough)
    assert change is not None and change.flags == flags and change.peak <= enough
    with pytest.raises(UsageError, match="fp8_params=True needs FP32 masters"):
        plan(optimizer_options=ROUNDED, fp8_params=True)


def test_rounded_weights_do_not_hide_other_changes() -> None:
    """FP8 primary weights need masters, so they are no choice here."""
    options = {**OWN, "optimizer": "adamw8bit", "optimizer_options": ROUNDED}
    plan = planner("llama-3.1-8b", "current", **options)
    change = smallest_change(plan, options, 60 * 2**30)
    assert str(change) == "--activation-checkpointing full"
    adapters = {**options, "lora_rank": 16, "fp8_params": True}
    assert plan(**adapters).peak.weights < plan().peak.weights  # frozen weights need no masters
    for options in (adapters, {**OWN, "lora_rank": 16}):
        found = smallest_change(functools.partial(plan, **options), options, 8 * 2**30)
        assert found is None or "--optimizer-options" not in found.flags


def test_the_users_own_options_stay() -> None:
    options = {
        **OWN,
        "optimizer_options": dict(beta2=0.99),
        "activation_checkpointing": "full",
        "batch_size": 1,
    }
    plan = planner("llama-3.1-8b", "bf16", **options)
    enough = plan(optimizer="adamw8bit", optimizer_options=ROUNDED).peak.total
    change = smallest_change(plan, options, enough, own_options="beta2=0.99")
    assert change is not None and change.flags[-1] == "beta2=0.99,stochastic_rounding=true"


def test_a_shared_batch_counts_the_sequences_of_all_processes() -> None:
    options = {**OWN, "batch_size": 16}
    plan = planner("gated-350m", "bf16", **options)
    others = {name for name in OWN if name != "gradient_accumulation"} - {"batch_size"}
    enough = int(0.8 * plan().peak.total)
    alone, shared = (
        smallest_change(plan, options, enough, others, processes) for processes in (1, 4)
    )
    assert (
        alone is not None
        and shared is not None
        and alone.flags[0] == shared.flags[0] == "--batch-size"
    )
    assert int(shared.flags[1]) == 4 * int(alone.flags[1]) and shared.flags[2:] == alone.flags[2:]


def test_milder_changes_come_first() -> None:
    plan = planner("gated-1b", "current")
    peaks = {mode: plan(activation_checkpointing=mode).peak.total for mode in ("selective", "full")}
    assert (
        str(smallest_change(plan, OWN, peaks["selective"]))
        == "--activation-checkpointing selective"
    )
    assert (
        str(smallest_change(plan, OWN, peaks["selective"] - 1)) == "--activation-checkpointing full"
    )
    flags = str(smallest_change(plan, OWN, peaks["full"] - 1))
    assert "--seq-len" not in flags and "--lora" not in flags


def test_batches_keep_the_tokens_of_a_step() -> None:
    own = {**OWN, "activation_checkpointing": "full", "batch_size": 64, "gradient_accumulation": 2}
    plan = planner("gated-350m", "bf16", **own)
    change = smallest_change(plan, own, int(0.6 * plan().peak.total))
    assert change is not None and change.flags[0] == "--batch-size"
    assert int(change.flags[1]) * int(change.flags[3]) == 64 * 2


@pytest.mark.slow
def test_adapters_only_where_they_may_be() -> None:
    plan = planner("gated-350m", "current")
    least = smallest_change(plan, {**OWN, "seq_len": 256}, int(1.2 * 2**30))
    assert least is not None and "--lora" in least.flags
    without = smallest_change(plan, {**OWN, "seq_len": 256}, int(1.2 * 2**30), fixed={"lora_rank"})
    assert without is None or "--lora" not in without.flags
    assert smallest_change(plan, OWN, 2**20) is None


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_adapters_and_an_offloaded_optimizer_leave_their_parts_out(recipe: str) -> None:
    plan = planner("gated-350m", recipe)
    whole, lora, offloaded = plan(), plan(lora_rank=16), plan(optimizer_offload=True)
    assert whole.peak.optimizer and not offloaded.peak.optimizer
    assert [m.gradients for m in offloaded.moments] == [m.gradients for m in whole.moments]
    own = lora.peak.weights - whole.peak.weights  # BF16, with FP32 masters and moments
    assert 0 < own == lora.peak.gradients < whole.peak.weights / 20
    adapters = get_preset("gated-350m").num_hidden_layers * 4 * 2  # A and B of four linears
    assert lora.peak.optimizer == 6 * own + 4 * adapters  # and a count of steps for each


@pytest.mark.parametrize("batch", every(3, [2**61 - 1, 10**9, 10**12]), ids=str)
def test_an_enormous_batch_is_planned_at_once(batch: int) -> None:
    start = time.process_time()
    smallest_change(
        planner("gated-1b", "bf16", batch_size=batch), {**OWN, "batch_size": batch}, 2**34
    )
    assert time.process_time() - start < 5
