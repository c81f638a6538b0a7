"""A training step as a CUDA graph: the same losses, gradients and scales as eager steps."""

import gc
import threading
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from fewer import chosen, every
from graph_tape import pretend_cuda
from places import PLACE
from torch import nn
from typed import gradient

from te_models import CausalLM, list_recipes
from te_models.config.recompute_modes import MODES
from te_models.engine import get_engine
from te_models.errors import UsageError
from te_models.fp8.scaling_state import fp8_state
from te_models.model import recompute
from te_models.training.cuda_graph import ATTEMPTS, WARM_UP, GraphedStep, obstacle
from te_models.training.fsdp_copies import no_host_copies
from te_models.training.trainer import deterministic

SHAPE: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4
)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=64)
STEPS = WARM_UP + 3


def build(recipe: str, **options: Any) -> CausalLM:
    torch.manual_seed(1)
    place = dict(device="cpu", engine="emulated", recipe=recipe)
    return CausalLM.from_preset("gated-nano", **{**place, **SHAPE, **options}).train()


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps are captured as on a GPU; the graphs that were made."""
    monkeypatch.setattr("te_models.training.cuda_graph.obstacle", lambda model: None)
    return pretend_cuda(monkeypatch)


def batch(step: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (rows, 16), generator=torch.Generator().manual_seed(step))


def trained(model: CausalLM, step: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of STEPS steps of SGD, an evaluation among them; the weights and scales after them."""
    losses = []
    for number in range(STEPS):
        ids = batch(number).to(model.device)
        torch.manual_seed(number)  # for stochastic rounding
        losses.append(step(input_ids=ids, labels=ids).item())
        with torch.no_grad():
            for parameter in filter(lambda one: one.requires_grad, model.parameters()):
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
            model.eval()(batch(99).to(model.device))
            model.train()
    return losses, {**model.state_dict(), **fp8_state(model)}


def eager(model: CausalLM) -> Any:
    def step(**inputs: torch.Tensor) -> torch.Tensor:
        model.calibrate(inputs)
        model.zero_grad()
        loss = model(**inputs, return_logits=False).loss
        loss.backward()
        return loss.detach()

    return step


def same(model: CausalLM, other: CausalLM, exactly: bool = True) -> None:
    wanted, got = trained(model, eager(model)), trained(other, GraphedStep(other))
    assert got[0] == (wanted[0] if exactly else pytest.approx(wanted[0], rel=1e-3))
    assert len(set(wanted[0])) == STEPS
    tensors = {name: value for name, value in wanted[1].items() if isinstance(value, torch.Tensor)}
    assert tensors.keys() == {
        name for name, value in got[1].items() if isinstance(value, torch.Tensor)
    }
    if exactly:
        assert [
            name for name, value in tensors.items() if not torch.equal(value, got[1][name])
        ] == []


@pytest.mark.parametrize(
    ("recipe", "mode"),
    chosen([("bf16", "none"), ("delayed", "full")], every(1, list_recipes(), MODES)),
)
def test_replayed_steps_are_the_eager_ones(recipe: str, mode: str, tapes: list[Any]) -> None:
    same(*(build(recipe, activation_checkpointing=mode) for _ in range(2)))
    assert tapes[0].replays == STEPS - WARM_UP


def test_a_weight_multiplies_the_gradients_of_eager_and_replayed_steps(tapes: list[Any]) -> None:
    """The weight is a number or a tensor, and another one in each step."""
    model, other, ids = (
        build("bf16", dtype=torch.float32),
        build("bf16", dtype=torch.float32),
        batch(0),
    )
    step = GraphedStep(model)
    loss = other(input_ids=ids, labels=ids, return_logits=False).loss
    loss.backward()
    for number in range(STEPS):
        weight = (number + 1) / 3
        found = step(
            weight=torch.tensor(weight) if number % 2 else weight, input_ids=ids, labels=ids
        )
        torch.testing.assert_close(found, loss.detach() * weight, rtol=1e-6, atol=0)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, gradient(q) * weight, rtol=1e-5, atol=1e-7)
    assert tapes[0].replays == STEPS - WARM_UP


def test_calibration_is_with_the_weight_and_for_whoever_wants_it(tapes: list[Any]) -> None:
    ids, own, calibrated, plain = batch(0), build("delayed"), build("delayed"), build("delayed")
    own.calibrate(dict(input_ids=ids, labels=ids), weights=[0.25])
    for model, calibrate in ((own, False), (calibrated, True), (plain, False)):
        GraphedStep(model, calibrate)(weight=0.25, input_ids=ids, labels=ids)
        assert all(bool((tensor != 0).any()) for tensor in fp8_state(model).values())
    states = [fp8_state(model) for model in (own, calibrated, plain)]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    assert all(
        bool((states[1][name][-2] != 0).any())
        for name in states[1]
        if name.endswith("amax_history")
    )
    assert not any(
        bool((states[2][name][-2] != 0).any())
        for name in states[2]
        if name.endswith("amax_history")
    )


@pytest.mark.parametrize("failures", every(ATTEMPTS, range(ATTEMPTS + 1)))
def test_a_disturbed_capture_costs_an_eager_step(
    failures: int,
    tapes: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """CUDA reports a synchronization by another thread after the forward, or at the end of the capture."""
    left = iter(range(failures))

    @contextmanager
    def disturbed(tape: Any, stream: Any, pool: Any) -> Any:
        with tape.capture():
            yield
            if next(left, None) is not None:
                raise torch.AcceleratorError(
                    "CUDA error: operation failed due to a previous error during capture"
                )

    monkeypatch.setattr("te_models.training.cuda_graph.capture", disturbed)
    same(build("delayed"), build("delayed"))
    assert sum(tape.replays for tape in tapes) == (
        STEPS - WARM_UP - failures if failures < ATTEMPTS else 0
    )
    said = ["tries again"] * min(failures, ATTEMPTS - 1) + ["run without it"] * (
        failures == ATTEMPTS
    )
    assert [next(w for w in said if w in record.message) for record in caplog.records] == said


def test_an_error_of_the_model_itself_is_no_disturbed_capture(tapes: list[Any]) -> None:
    model, ids = build("delayed"), batch(0)
    step = GraphedStep(model)
    for _ in range(WARM_UP):
        step(input_ids=ids, labels=ids)
    model.norm.register_forward_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(input_ids=ids, labels=ids)


@pytest.mark.gpu
def test_a_thread_that_synchronizes_the_device_disturbs_no_run() -> None:
    """Default flags, real shapes: the capture fails at first, and losses stay those of eager steps."""
    quick = dict(device="cuda", hidden_size=256, intermediate_size=512, max_position_embeddings=512)
    models = [build("delayed", engine="auto", **quick) for _ in range(2)]
    wanted, stop = trained(models[0], eager(models[0])), threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            with suppress(
                RuntimeError
            ):  # it may fail too: CUDA allows no synchronization during a capture
                torch.cuda.synchronize()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        got = trained(models[1], GraphedStep(models[1]))
    finally:
        stop.set()
        thread.join()
    assert got[0] == pytest.approx(wanted[0], rel=1e-3)
    assert torch.randn(3, device="cuda").isfinite().all()  # the generator has left the capture too


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["selective", "full", 2])
def test_a_capture_that_fails_inside_a_block_costs_an_eager_step(
    mode: str | int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is kept, as a debugger would; torch's hooks are not, or the eager step would save through them."""
    models = [build("bf16", **PLACE, activation_checkpointing=mode) for _ in range(2)]
    wanted = trained(models[0], eager(models[0]))
    errors: list[BaseException] = []
    own = recompute.checkpoint

    def disturbed(function: Any, *args: Any, **options: Any) -> Any:
        def passed(*inputs: Any, **named: Any) -> Any:
            result = function(*inputs, **named)
            if torch.cuda.is_current_stream_capturing() and not errors:
                try:
                    torch.cuda.synchronize()  # forbidden during a capture
                except RuntimeError as error:
                    errors.append(error)
                    raise
            return result

        return own(passed, *args, **options)

    monkeypatch.setattr(recompute, "checkpoint", disturbed)
    found = trained(models[1], GraphedStep(models[1]))
    assert len(errors) == 1 and "tries again" in caplog.text
    assert str(errors[0]).splitlines()[0] in caplog.text
    assert found[0] == pytest.approx(wanted[0], rel=1e-3)


@pytest.mark.gpu
def test_garbage_of_another_step_disturbs_no_capture(caplog: pytest.LogCaptureFixture) -> None:
    old = build("bf16", **PLACE)
    step = GraphedStep(old)
    trained(old, step)
    step.itself = step  # type: ignore[attr-defined]  # garbage once nothing else refers to it
    model = build("bf16", **PLACE)

    def collect(module: nn.Module, given: Any) -> None:
        if torch.cuda.is_current_stream_capturing() and gc.isenabled():
            gc.collect()

    del old, step
    model.layers[2].mlp.register_forward_pre_hook(collect)
    trained(model, GraphedStep(model))
    assert not caplog.records


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["native", "emulated"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", list_recipes())
def test_replayed_steps_are_the_eager_ones_on_a_gpu(recipe: str, mode: str, engine: str) -> None:
    te = get_engine("native", torch.device("cuda"))[0]
    if engine == "native" and recipe in ("mxfp8", "nvfp4") and not te.is_mxfp8_available():
        pytest.skip("this GPU runs neither MXFP8 nor NVFP4")
    place = dict(device="cuda", engine=engine, activation_checkpointing=mode)
    same(
        build(recipe, **place), build(recipe, **place), exactly=False
    )  # cuBLAS may sum in another order


@pytest.mark.parametrize(
    ("place", "recipe", "fp8_params"),
    [("cpu", "delayed", True)]
    + [
        pytest.param("gpu", recipe, fp8_params, marks=pytest.mark.gpu)
        for recipe, fp8_params in (
            ("bf16", False),
            ("delayed", False),
            ("delayed", True),
            ("current", True),
        )
    ],
)
def test_adapters_in_a_graph_train_as_eagerly(
    place: str, recipe: str, fp8_params: bool, request: pytest.FixtureRequest
) -> None:
    more: dict[str, Any] = dict(fp8_params=fp8_params)
    lora = pytest.importorskip("te_models.training.lora")
    if place == "cpu":
        request.getfixturevalue("tapes")
    else:
        more |= {**PLACE, "hidden_size": 256, "intermediate_size": 512}  # heads of 64 channels
    models = [build(recipe, **more) for _ in range(2)]
    for model in models:
        torch.manual_seed(2)
        lora.add_lora(model, r=4, lora_alpha=64)
    with deterministic():
        same(*models)


def test_a_model_on_a_cpu_has_no_graph() -> None:
    with pytest.raises(UsageError, match="the model is on cpu"):
        GraphedStep(build("delayed"))


def test_unsupported_steps_are_refused(tapes: list[Any]) -> None:
    model = build("delayed")
    step = GraphedStep(model)
    ids = batch(0)
    step(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match="input_ids has shape .3, 16., in the first call .2, 16."):
        step(input_ids=batch(0, rows=3), labels=batch(0, rows=3))
    with pytest.raises(ValueError, match="document_ids has shape"):
        step(input_ids=ids, labels=ids, document_ids=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="attention_mask"):
        GraphedStep(model)(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
    model.eval()
    with pytest.raises(ValueError, match="call model.train"):
        step(input_ids=ids, labels=ids)
    model.train().set_recipe("current")
    with pytest.raises(ValueError, match="recipe has changed"):
        step(input_ids=ids, labels=ids)


EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=96)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("biases", [{}, dict(bias=True)])
@pytest.mark.parametrize("recipe", ["bf16", "current", "delayed"])
def test_steps_of_experts_are_captured(recipe: str, biases: dict[str, bool], mode: str) -> None:
    """The numbers of rows stay on the device, so that every batch may send other tokens to each expert."""
    options = dict(
        device="cuda", engine="native", moe=EXPERTS | biases, activation_checkpointing=mode
    )
    models = [build(recipe, **options) for _ in range(2)]
    assert obstacle(models[0]) is None
    same(*models)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "current", "delayed", "blockwise"])
def test_experts_are_no_obstacle_where_kernels_count_rows_on_the_device(recipe: str) -> None:
    assert obstacle(build(recipe, device="cuda", engine="native", moe=EXPERTS)) is None


def test_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CausalLM, "device", torch.device("cuda"))
    model = build("delayed")
    assert obstacle(model) is None
    assert "wrapped" in str(obstacle(nn.Sequential(model)))
    model.activation_checkpointing = "selective"
    assert obstacle(model) is None
    hook = model.layers[0].register_forward_hook(
        lambda module, given, found: None
    )  # which may draw random numbers
    assert "checkpointing" in str(obstacle(model))
    hook.remove()
    model.activation_checkpointing = "none"
    model.layers[0].extra = nn.Dropout(0.1)
    assert "dropout" in str(obstacle(model))
    model.layers[0].extra = nn.Dropout(0.0)
    assert obstacle(model) is None


def test_gathered_weights_are_freed_before_every_step(
    tapes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a capture after an evaluation would contain no gather, and an evaluation after a replay old weights."""
    monkeypatch.setattr("te_models.training.cuda_graph.FSDPModule", CausalLM)
    model, plain, seen = build("delayed"), build("delayed"), []
    monkeypatch.setattr(CausalLM, "reshard", lambda self: seen.append("reshard"), raising=False)
    monkeypatch.setattr(
        GraphedStep,
        "_run",
        lambda self, kind, run=GraphedStep._run: (seen.append("run"), run(self, kind))[1],
    )
    same(plain, model)
    assert seen == ["reshard", "run"] * (WARM_UP + 1) + ["reshard"] * (STEPS - WARM_UP - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_copies_without_the_host_are_those_of_fsdp(ranks: int, dtype: torch.dtype) -> None:
    """Rows that divide, rows that do not, fewer rows than ranks, odd numbers of bytes and of words; also into FP32."""
    shapes = [(4 * ranks, 6), (4 * ranks + 1, 2), (12 * ranks,), (1, 5), (ranks, 4)]
    gradients = [torch.randn(shape).bfloat16() for shape in shapes]
    width = sum(-(-t.shape[0] // ranks) * t[0].numel() for t in gradients)
    wanted, found = torch.full((2, ranks, width), torch.nan, dtype=dtype)
    operation = torch.ops.fsdp.chunk_cat
    torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=ranks, out=wanted)
    with no_host_copies():
        torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=ranks, out=found)
    assert torch.equal(wanted, found)
    sizes = [3, width - 5, 2]
    parts = [[torch.empty(ranks, size, dtype=dtype) for size in sizes] for _ in range(2)]
    torch.ops.fsdp.split_with_sizes_copy(wanted, sizes, dim=1, out=parts[0])
    with no_host_copies():
        torch.ops.fsdp.split_with_sizes_copy(wanted, sizes, dim=1, out=parts[1])
        assert (torch.ones(2) + 1).tolist() == [2, 2], "everything else is as it is"
    assert all(torch.equal(a, b) for a, b in zip(*parts, strict=True))
    assert torch.ops.fsdp.chunk_cat is operation, "FSDP2 has its own kernels again"


def test_compiled_functions_stay_compiled_after_a_capture_under_fsdp() -> None:
    """Inside a TorchDispatchMode TorchDynamo gives up the functions that are called, compiled ones as well."""
    runs = []

    def compiler(module: Any, inputs: list[torch.Tensor]) -> Any:
        return lambda *own: (runs.append(1), module.forward(*own))[1]

    compiled = torch.compile(lambda x: x.sin() * 2, backend=compiler)
    x = torch.ones(3)
    compiled(x)
    with no_host_copies():
        compiled(x)
    compiled(x)
    assert len(runs) == 3
