"""The memory plan: against autograd's own saved tensors, against peaks measured on an H200, and by hand."""

import html
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from autograd_bytes import assert_planned, autograd_bytes, planned_bytes
from fewer import every, some
from kinds import KINDS
from planned_shapes import ROWS, SHAPE, VARIANTS

import te_models.optim as optim
from benchmarks.planned_memory import Run, measured_runs, predicted
from te_models import CausalLM, get_recipe, list_presets, list_recipes
from te_models.cli import main
from te_models.config.chunk_sizes import EXCHANGE_CHUNK, head_rows
from te_models.config.presets import get_preset
from te_models.config.recipe import recipe_from_dict
from te_models.engine.emulated.recipe import DelayedScaling
from te_models.errors import ConfigError, UsageError
from te_models.files.formats import flatten_state
from te_models.fp8.primary_weights import is_quantized, quantized_weights
from te_models.fp8.scaling_state import fp8_state
from te_models.optim import OPTIMIZERS
from te_models.planning.measured import PARTS, REST, HeldTensor, MeasuredStep
from te_models.planning.memory_plan import MemoryPlan, plan_memory
from te_models.planning.parameter_bytes import optimizer_bytes
from te_models.planning.training import Training
from te_models.training.lora_run import LoraRun
from te_models.training.settings import LoraSettings

TABLES: list[tuple[str, dict[str, str]]] = [
    ("current", {"*.down_proj": "bf16", "layers.1.self_attn.*": "delayed"}),
    (
        "delayed",
        {"*.qkvg_proj": "bf16", "*.gate_up_proj": "bf16", "layers.0.mlp.down_proj": "current"},
    ),
    ("bf16", {"layers.2.*": "mxfp8", "*.o_proj": "current"}),
]
DEEP = dict(num_hidden_layers=7, num_layers_at_start_in_bf16=0)
CASES: list[tuple[str, str | int, dict[str, Any]]] = [
    *((recipe, "none", {}) for recipe in list_recipes()),
    *(("current", mode, {}) for mode in ("selective", "full", 2)),
    *((recipe, "selective", {}) for recipe in ("bf16", "delayed", "nvfp4")),
    *((recipe, "selective", DEEP) for recipe in ("current", "mxfp8")),
    ("bf16", "selective", VARIANTS["FP32"]),
    ("mxfp8", "selective", dict(backward_override="high_precision")),
    *((recipe, "none", fields) for recipe in ("bf16", "current") for fields in VARIANTS.values()),
    *(
        (recipe, mode, VARIANTS[name])
        for recipe in ("bf16", "current")
        for name in ("OLMo 3", "Gemma 2", "biases")
        for mode in ("selective", "full")
    ),
    *(("mxfp8", "none", dict(backward_override=how)) for how in ("high_precision", "dequantized")),
    ("blockwise", "none", dict(x_block_scaling_dim=2, w_block_scaling_dim=1)),
    ("current", "none", dict(lm_head="fp8", num_layers_at_end_in_bf16=0)),
    *(
        (recipe, mode, dict(precision=table, norm_position=position))
        for recipe, table in TABLES
        for mode in ("none", "selective", "full")
        for position in ("pre", "post")
    ),
]


@pytest.mark.parametrize(
    ("recipe", "mode", "fields", "rows"),
    some(
        7,
        ((*case, rows) for n, case in enumerate(CASES) for rows in (ROWS[n % 2], ROWS[n % 2 - 1])),
    ),
)
def test_activations_are_what_autograd_keeps(
    recipe: str, mode: str | int, fields: dict[str, Any], rows: tuple[int, int]
) -> None:
    """To the byte, on the emulated engine with plain kernels on a CPU.
    With padding only schemes whose scales are not."""
    if rows == (1, 23) and recipe == "blockwise":
        pytest.skip("the emulated engine pads odd blocks inside")
    model = CausalLM.from_preset(
        "gated-nano",
        **SHAPE | fields,
        recipe=recipe,
        engine="emulated",
        device="cpu",
        activation_checkpointing=mode,
    )
    kept = autograd_bytes(model, torch.randint(0, 288, rows))
    assert_planned(planned_bytes(model, *rows), kept, model, rows[1])


@pytest.mark.parametrize("rows", [(2, 64), (1, 23)], ids=["whole", "padded"])
@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_a_head_without_logits_keeps_two_gradients(recipe: str, rows: tuple[int, int]) -> None:
    model = CausalLM.from_preset(
        "gated-nano", **SHAPE, recipe=recipe, engine="emulated", device="cpu"
    )
    kept = autograd_bytes(model, torch.randint(0, 288, rows), logits=False)
    assert_planned(planned_bytes(model, *rows, logits=False), kept, model, rows[1])


@pytest.mark.parametrize(
    ("recipe", "mode", "name"),
    every(
        3,
        ["bf16", "delayed", "current", "mxfp8", "current, FP8 weights"],
        ["none", "full"],
        ["gated", "OLMo 3"],
    ),
)
def test_with_adapters_autograd_keeps_what_the_plan_says(recipe: str, mode: str, name: str) -> None:
    """To the byte: inputs of adapters, and their products with A, in place of what the frozen linears would save."""
    fields = {} if name == "gated" else VARIANTS[name]
    recipe, fp8_params = recipe.split(",")[0], "FP8 weights" in recipe
    place = dict(
        recipe=recipe,
        fp8_params=fp8_params,
        engine="emulated",
        device="cpu",
        activation_checkpointing=mode,
    )
    model = CausalLM.from_preset("gated-nano", **{**SHAPE, **fields, **place})
    LoraRun(model, LoraSettings(rank=4, alpha=8.0), None)
    planned = planned_bytes(model, 2, 64, logits=False, lora_rank=4)
    # The hooks that discard the input of down_proj hide what is saved beside it: one FP8 block's product with A.
    hidden = 2 * 64 * 4 * 2 if fp8_params and mode == "none" else 0
    kept = autograd_bytes(model, torch.randint(0, 288, (2, 64)), logits=False)
    assert_planned(planned - hidden, kept, model, 64)


@pytest.mark.parametrize("run", every(6, measured_runs()), ids=lambda run: run.name)
def test_measured_peaks(run: Run) -> None:
    """Within 5 % is what is promised; the allocator rounds up, and libraries hold what no plan knows of."""
    planned = predicted(run)
    assert planned == pytest.approx(run.peak, rel=0.02)
    assert planned < run.peak + 2**20  # the allocator only ever adds


@pytest.mark.parametrize(("name", "mode"), every(9, VARIANTS, ["none", "selective", "full", 2]))
def test_a_step_frees_all_that_it_allocates_but_gradients(name: str, mode: str | int) -> None:
    """Whatever blocks of other kinds are between: the profiles of all stretches add up to the gradients."""
    fields = {key: value for key, value in (SHAPE | VARIANTS[name]).items() if key != "dtype"}
    config = get_preset("gated-nano", **fields)
    training = Training(batch_size=8, seq_len=64, activation_checkpointing=mode)
    for recipe, sums in (("current", False), ("bf16", True)):
        setting = replace(training, gradient_sums=sums).setting
        measured = MeasuredStep(config, get_recipe(recipe), setting)
        run = measured.run(8)
        stretches = [run.embedding, run.head, run.loss, run.rest]
        for layer in measured.same:
            stretches += [run.forward[layer], run.backward[layer]]
        left = dict(zip(PARTS, sum(one.end for one in stretches).tolist(), strict=True))
        weights = sum(run.standing.weights[layer] for layer in (*measured.same, REST))
        assert left.pop("gradients") == pytest.approx(0 if sums else weights, abs=64)
        # Rotary tables, which several blocks share, are freed by the first of them: 8 KiB each.
        assert all(abs(size) < 2**15 for size in left.values()), left


@pytest.mark.parametrize(
    ("recipe", "head"),
    every(
        2,
        ["delayed", "current", "blockwise", "mxfp8"],
        [{}, dict(lm_head="fp8", num_layers_at_end_in_bf16=0, tie_word_embeddings=False)],
    ),
    ids=str,
)
def test_fp8_weights_are_the_models(recipe: str, head: dict[str, Any]) -> None:
    place = dict(recipe=recipe, fp8_params=True, device="cpu", engine="emulated")
    model = CausalLM.from_preset("gated-nano", **{**SHAPE, **place, **head})
    parts = [p for p in model.parameters() if not is_quantized(p)] + list(
        quantized_weights(model).values()
    )
    plan = model.plan_memory(batch_size=1, seq_len=32)
    own = plan.moments[0]
    assert own.weights == sum(part.numel() * part.itemsize for part in parts)
    other = replace(plan, training=replace(plan.training, fp8_params=False)).moments[0]
    assert (own.weights < other.weights) == (
        recipe in ("delayed", "current")
    )  # others keep both copies
    assert own.gradients == other.gradients


@pytest.mark.parametrize(
    ("rows", "vocabulary", "width", "cuda", "trained", "expected"),
    [
        (
            8192,
            128256,
            4096,
            True,
            True,
            8192,
        ),  # a part and the FP32 sum of the weight's gradient would need more
        (8192, 128256, 4096, True, False, 1046),
        (16384, 128256, 4096, True, True, 4185),
        (16384, 32000, 2048, True, True, 16384),
        (32768, 32000, 1024, True, True, 16777),
        (8192, 128256, 4096, False, True, 523),
        (8192, 128256, 4096, False, False, 523),
        (100, 128256, 4096, False, True, 100),
        (512, 2**24, 64, True, True, 256),
    ],
)
def test_rows_of_logits_at_a_time(
    rows: int, vocabulary: int, width: int, cuda: bool, trained: bool, expected: int
) -> None:
    assert head_rows(rows, vocabulary, width, cuda, trained) == expected


@pytest.mark.parametrize("name", every(11, list_presets()))
def test_parameters_are_the_models(name: str) -> None:
    model = CausalLM.from_preset(name, device="meta", engine="emulated", recipe="bf16")
    plan = model.plan_memory(batch_size=1, seq_len=16, optimizer=None)
    parameters = list(model.parameters())
    # Numbers for the choice of experts, in FP32, and factors of layers are not trained.
    assert plan.num_trained == sum(p.numel() for p in parameters if p.requires_grad)
    assert plan.moments[0].weights == sum(p.nbytes for p in parameters)


def held(*shape: int, role: Any = "hidden") -> HeldTensor:
    """A BF16 parameter that is one matrix."""
    return HeldTensor(((role, shape),), shape, 2, quantized=False, expert=False, trained=True)


def test_optimizers_a_parameter() -> None:
    """By hand, for a matrix of a block, without the master's 4 bytes and tables of codes, 2 KiB."""
    matrix, table = held(1024, 512), held(1024, 512, role="embedding")
    elements = 1024 * 512
    state = {name: optimizer_bytes(name, {matrix: 3}) / elements / 3 - 4 for name in OPTIMIZERS}
    assert state == pytest.approx({
        "adamw": 8, "adamw8bit": 2.03125, "adamwfp8": 2.03125, "muon": 4, "muon8bit": 1.03125,
        "galore": 4 * 128 * (2 * 1024 + 512) / (1024 * 512),
    }, rel=2e-3)  # fmt: skip
    full = {name for name in OPTIMIZERS if 11.9 < optimizer_bytes(name, {table: 1}) / elements < 13}
    assert full == {"adamw", "muon", "muon8bit", "galore"}
    in_fp32 = matrix._replace(itemsize=4)  # its own master
    assert optimizer_bytes("adamw", {in_fp32: 4}) == pytest.approx(8 * 4 * elements, rel=1e-6)
    assert optimizer_bytes("muon", {table: 1}, {"rest": "adamw8bit"}) < 6.1 * elements


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamWFp8"])
def test_torchao_keeps_as_much(name: str) -> None:
    torchao = pytest.importorskip("torchao.optim")
    for shape in ((64, 128), (63, 128), (64,)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        buffer = getattr(torchao, name)([weight])._new_buffer(weight, True)
        names = ("codes", "scale", "qmap")
        parts = [getattr(buffer, part) for part in names if hasattr(buffer, part)] or [buffer]
        size = sum(part.nbytes for part in parts)
        in_fp32 = held(*shape)._replace(itemsize=4)
        assert optimizer_bytes(name.lower(), {in_fp32: 1}) == 2 * size + 4, shape  # and a count


@pytest.mark.parametrize(
    ("name", "gate"), every(2, sorted(OPTIMIZERS), ["elementwise", "headwise"])
)
def test_optimizers_keep_as_much(name: str, gate: str) -> None:
    """Every tensor that the optimizers keep after a step, to the byte."""
    shape = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=2)
    model = CausalLM.from_preset(
        "gated-nano", **shape, num_key_value_heads=1, attention_gate=gate, device="cpu"
    )
    optimizer = optim.build_optimizer(name, model, 1e-3, 0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step for each shape
        optimizer.take_gradients(1.0)
        optimizer.step()
    kept = 0
    for tensor in flatten_state(optimizer.state_dict())[0].values():
        kept += tensor.nbytes
    plan = model.plan_memory(batch_size=1, seq_len=16, optimizer=name)
    assert plan.moments[-1].optimizer == kept == plan.optimizers()[name]


class Averages(torch.optim.Optimizer):
    """An optimizer of someone else's, which describes no state: a BF16 average, one number per row, and a count.

    `odd`: its step fails on meta, since it looks at values.
    """

    def __init__(self, params: Any, lr: float = 0.1, odd: bool = False) -> None:
        super().__init__(params, dict(lr=lr, odd=odd))

    def step(self, closure: Any = None) -> None:  # type: ignore[bad-override]  # PyTorch has overloads
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["average"] = p.grad.bfloat16()
                state["rows"] = p.grad.float().sum(-1)
                state["count"] = torch.zeros(())
                if group["odd"]:
                    assert float(p.grad.sum()) == 0


@pytest.mark.parametrize("odd", [False, True], ids=["on meta", "on a small tensor"])
def test_a_new_optimizer_adds_nothing_for_the_plan(
    odd: bool, any_batch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(lr: float, options: Any, groups: Any) -> list[torch.optim.Optimizer]:
        return [Averages(groups, lr=lr, odd=odd)]

    monkeypatch.setitem(optim.OPTIMIZERS, "averages", optim.Choice(build, {}, elementwise=True))
    plan = nano(optimizer="averages")
    matrices = plan.config.num_parameters
    expected = (4 + 2) * matrices
    # Numbers of rows, of which a small tensor has not the exact share.
    assert expected < plan.moments[-1].optimizer < expected * 1.02
    assert plan.optimizers()["averages"] == plan.moments[-1].optimizer
    assert "averages" in str(plan)
    two = nano(optimizer="averages", gpus=2)
    assert two.moments[-1].optimizer == pytest.approx(plan.moments[-1].optimizer / 2, abs=1)


def nano(**options: Any) -> MemoryPlan:
    fields = dict(batch_size=4, seq_len=64) | options
    return plan_memory(get_preset("gated-nano"), get_recipe("delayed"), **fields)


@pytest.mark.parametrize("mode", ["none", "selective", "full", 2])
def test_the_largest_batch_is_the_largest(mode: str | int) -> None:
    plan = nano(activation_checkpointing=mode)
    largest = plan.largest_batch(1)
    assert largest > 1
    assert nano(activation_checkpointing=mode, batch_size=largest).fits(1)
    assert not nano(activation_checkpointing=mode, batch_size=largest + 1).fits(1)
    assert plan.largest_batch(1e-3) == 0


def test_accumulation_holds_fp32_gradients_during_the_forward() -> None:
    """And both copies of FP8 weights, where the default keeps what backward reads."""
    config = nano().config
    plain, accumulated = nano().moments[0], nano(gradient_accumulation=2).moments[0]
    codes = accumulated.fp8_weight_copies - plain.fp8_weight_copies
    weights = sum(linear.inputs * linear.outputs for linear in config.layers[1].linears.values())
    assert codes == (config.num_hidden_layers - 2) * weights
    assert accumulated.total == plain.total + 4 * config.num_parameters + codes


def test_gpus_share_weights_gradients_and_optimizer() -> None:
    one, four = nano(), nano(gpus=4, batch_size=16)
    assert four.moments[2].optimizer == one.moments[2].optimizer // 4
    assert four.moments[2].gradients == one.moments[2].gradients // 4
    assert four.moments[0].activations == one.moments[0].activations  # the same rows on each
    assert (
        four.moments[0].fp8_weight_copies < one.moments[0].fp8_weight_copies
    )  # made again for each backward


@pytest.mark.parametrize("dtype_bytes", [2, 4])
@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_the_owner_of_a_large_table_has_it_whole(optimizer: str, dtype_bytes: int) -> None:
    """By hand, for an embedding that is larger than everything else together, so that its owner has nothing else."""
    shape = dict(
        vocab_size=151936,
        hidden_size=8192,
        intermediate_size=1024,
        num_hidden_layers=2,
        head_dim=64,
    )
    config = get_preset(
        "gated-nano",
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        **shape,
    )
    plan = plan_memory(
        config,
        get_recipe("delayed"),
        batch_size=8,
        seq_len=64,
        gpus=8,
        optimizer=optimizer,
        dtype_bytes=dtype_bytes,
    )
    table, parameters = 151936 * 8192, plan.config.num_parameters
    assert parameters < 1.2 * table
    moments = {"muon": 8, "adamw8bit": 2 * (1 + 4 / 256)}[optimizer]
    state = round(table * (4 + moments))
    assert state < plan.moments[2].optimizer < state + 4096  # and a count, and tables of codes
    assert plan.moments[2].optimizer == plan.optimizers()[optimizer]
    buffers = 3 * 2**27  # sent, received and put in place
    assert plan.moments[2].gradients == -(-parameters // 8) * dtype_bytes + 4 * table + buffers
    adamw = replace(plan, training=replace(plan.training, optimizer="adamw"))
    assert adamw.moments[2].optimizer == pytest.approx(
        (8 + 4 * (dtype_bytes == 2)) * parameters / 8, rel=1e-6
    )


def test_a_model_plans_with_its_own_settings() -> None:
    model = CausalLM.from_preset(
        "gated-nano", recipe="current", device="meta", activation_checkpointing="full"
    )
    plan = model.plan_memory(batch_size=2, seq_len=128, optimizer="muon8bit")
    assert plan == plan_memory(model.config, model.recipe, batch_size=2, seq_len=128, optimizer="muon8bit",
                               activation_checkpointing="full")  # fmt: skip


def test_command_line(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    command = [
        "plan",
        "--preset",
        "gated-1b",
        "--recipe",
        "delayed",
        "--memory",
        "--seq-len",
        "2048",
    ]
    assert main(command) == 0
    text = capsys.readouterr().out
    for word in ("141 GB", "muon8bit", "(peak)", "checkpointing selective", "FP8 weight copies"):
        assert word in text
    request.getfixturevalue("any_batch")
    assert main([*command, "--lora", "8"]) == 0
    assert "parameters, LoRA of rank 8, recipe" in capsys.readouterr().out
    assert main([*command, "--json", "--optimizer", "adamw8bit"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak"]["total"] == max(moment["total"] for moment in found["moments"].values())
    assert found["optimizers"]["adamw8bit"] < found["optimizers"]["adamw"] / 1.9
    assert found["fits"] == {"24 GB": False, "48 GB": True, "80 GB": True, "141 GB": True}


@pytest.mark.parametrize(
    "plan",
    [nano(), CausalLM.from_preset("gated-nano", device="meta").plan()],
    ids=["memory", "precision"],
)
def test_a_notebook_shows_the_printed_table(plan: Any, any_batch: None) -> None:
    text = html.unescape(re.sub("<[^>]+>", "", plan._repr_html_()))
    assert [line.rstrip() for line in text.splitlines()] == [
        line.rstrip() for line in str(plan).splitlines()
    ]


def test_a_small_plan_is_in_mib(any_batch: None) -> None:
    text = str(nano())
    assert (
        "memory of a training step, MiB" in text
        and "GiB" not in text
        and " 0.00  0.00  0.00" not in text
    )
    large = str(
        plan_memory(get_preset("gated-8b"), get_recipe("delayed"), batch_size=1, seq_len=64)
    )
    assert "memory of a training step, GiB" in large and "MiB" not in large


def test_a_recipe_without_a_history_length_has_that_of_the_engine() -> None:
    """A recipe file needs no field but its scheme."""
    shape, bare = get_preset("gated-nano"), recipe_from_dict({"scheme": "DelayedScaling"})
    whole = bare.replace(amax_history_len=DelayedScaling().amax_history_len)
    assert plan_memory(shape, bare).peak.total == plan_memory(shape, whole).peak.total


@pytest.mark.parametrize(
    ("options", "a_parameter", "a_parameter_of_the_chunk"),
    [
        ({}, 2, 2),  # BF16 gradients, and the chunk's in FP32
        (dict(dtype_bytes=4), 4, 0),
        (dict(gradient_accumulation=2), 4, 0),
        (dict(optimizer_options=dict(stochastic_rounding=True)), 2, 0),
        (dict(optimizer_options=dict(stochastic_rounding=True), gradient_accumulation=2), 4, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gated-nano", "llama-3.1-8b"])
def test_the_update_widens_the_gradients_of_at_most_2_to_28_parameters(
    name: str, options: dict[str, Any], a_parameter: int, a_parameter_of_the_chunk: int
) -> None:
    config = get_preset(name)
    own = dict(optimizer="adamw8bit", batch_size=1, seq_len=64)
    *_, update = plan_memory(config, get_recipe("bf16"), **own | options).moments
    count = config.num_parameters
    assert update.gradients == count * a_parameter + min(count, 2**28) * a_parameter_of_the_chunk


def test_owners_update_at_most_2_to_28_parameters_of_all_ranks_at_a_time() -> None:
    """Whatever the depth: the gradients of as many parameters are whole on their owner."""
    whole = []
    for layers in (16, 32):
        config = replace(get_preset("gated-8b"), num_hidden_layers=layers)
        plan = plan_memory(
            config, get_recipe("bf16"), optimizer="muon", batch_size=4, seq_len=64, gpus=4
        )
        whole.append(plan.moments[-1].gradients - config.num_parameters // 4 * 2)
    assert whole[0] == whole[1] == 32000 * 4096 * 4 + 3 * EXCHANGE_CHUNK


@pytest.mark.parametrize("head", [{}, dict(lm_head="fp8", num_layers_at_end_in_bf16=0)], ids=str)
def test_the_state_of_delayed_scaling_is_the_models(head: dict[str, Any]) -> None:
    """Every scale and every row of every history, to the byte."""
    options = dict(
        **SHAPE, recipe="delayed", amax_history_len=5, engine="emulated", device="cpu", **head
    )
    model = CausalLM.from_preset("gated-nano", **options)
    ids = torch.randint(0, 288, (1, 32))
    model(ids, labels=ids).loss.backward()
    plan = model.plan_memory(batch_size=1, seq_len=32)
    own = plan.moments[-1].fp8_weight_copies  # of the update, when there are no copies
    assert own == sum(tensor.nbytes for tensor in fp8_state(model).values())


def test_five_percent_of_a_gpu_stay_free() -> None:
    plan = nano()
    gigabytes = plan.peak.total / 0.95 / 10**9
    assert plan.fits(gigabytes * (1 + 1e-9)) and not plan.fits(gigabytes * (1 - 1e-9))
    batch = plan.training.batch_size
    assert plan.largest_batch(gigabytes * (1 + 1e-9)) == batch
    assert plan.largest_batch(gigabytes * (1 - 1e-9)) == batch - 1


def test_a_plan_changes_no_scale_of_a_model_in_training() -> None:
    """Scales belong to the thread that trains; the plan runs a model beside, in a thread of its own."""
    model = CausalLM.from_preset("gated-nano", **SHAPE, recipe="delayed", device="cpu")
    ids = torch.randint(0, 288, (2, 64))
    model(ids, labels=ids).loss.backward()
    before = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    with torch.no_grad():
        planned = model.plan_memory(batch_size=5, seq_len=32).peak.total
    assert planned > 0 and before
    for name, tensor in fp8_state(model).items():
        assert torch.equal(tensor, before[name]), name


def test_sizes_that_a_recipe_does_not_take_are_one_line() -> None:
    """Before a run builds its model, which would say so too."""
    shape = get_preset("gated-nano", intermediate_size=42)
    with pytest.raises(ConfigError, match="intermediate_size=42 is not a multiple of 32"):
        plan_memory(shape, get_recipe("mxfp8"))
    heads = get_preset("gated-nano", num_attention_heads=3, num_key_value_heads=3, head_dim=32)
    with pytest.raises(UsageError, match="num_attention_heads=3"):
        plan_memory(heads, get_recipe("bf16"), gpus=2, tensor_parallel_size=2)


def test_adapters_on_mixers_beside_each_other() -> None:
    """Their gradients and state are those of A and B of each linear."""
    config = KINDS["Mamba 2 beside attention"].config
    plan = plan_memory(config, get_recipe("bf16"), batch_size=1, seq_len=32, lora_rank=4)
    elements = sum(
        4 * (linear.inputs + linear.outputs) for linear in config.linears.values() if linear.adapted
    )
    assert plan.peak.optimizer == pytest.approx(3 * 4 * elements, rel=0.02)
