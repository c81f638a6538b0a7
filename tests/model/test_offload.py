"""Activation offload changes no bit, leaves nothing on the device that it should have moved,
and loses no host memory."""

import contextlib
import copy
import functools
import gc
import json
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fewer import every
from small_model import loss_of
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from typed import gradient

import te_models.training.finetune
from te_models import CausalLM, get_recipe
from te_models.cli import main
from te_models.config.presets import get_preset
from te_models.engine import emulated, get_engine
from te_models.fp8.scaling_state import fp8_state
from te_models.kernels import sdpa
from te_models.model import offload
from te_models.model.offload import HostMemory
from te_models.planning.memory_estimate import saved_bytes
from te_models.planning.memory_plan import plan_memory
from te_models.planning.training import Training
from te_models.training.parallel import Parallel
from te_models.training.run_model import new_model
from te_models.training.settings import RunSettings
from te_models.training.trainer import Result

MODES: list[str | int] = ["none", "selective", "full", 2]
RECIPES = ["bf16", "delayed", "current", "blockwise", "mxfp8", "nvfp4"]
SHAPE = dict(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2
)
SHAPE |= dict(num_key_value_heads=1, max_position_embeddings=64)
WIDE = SHAPE | dict(
    hidden_size=128, intermediate_size=128
)  # no scale is padded, and NVFP4's Hadamard transform fits
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8_params": ("current", dict(fp8_params=True)),
    "fused": ("delayed", dict(fused=True)),
    "Qwen3": ("mxfp8", dict(attention_gate="none", qk_norm=True)),
    "window": ("current", dict(sliding_window=4, attention_gate="headwise")),
    "FP32": ("bf16", dict(dtype=torch.float32)),
}


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors are moved too, and lie across pages."""
    monkeypatch.setattr(offload, "SMALL", 0)
    monkeypatch.setattr(offload, "PAGE", 2048)


def build(recipe: str, offloaded: bool, mode: str | int = "none", **options: Any) -> CausalLM:
    emulated.FP8GlobalStateManager.reset()
    torch.manual_seed(1)
    shape = WIDE if recipe == "nvfp4" else SHAPE
    history = dict(amax_history_len=4) if recipe == "delayed" else {}
    own = dict(
        device="cpu", recipe=recipe, activation_offload=offloaded, activation_checkpointing=mode
    )
    return CausalLM.from_preset("gated-nano", **{**shape, **history, **own, **options})


def run(model: CausalLM, cached: bool = True) -> list[Tensor]:
    """Two steps of two micro-batches with an evaluation, and an abandoned forward in between: all that they change."""
    found: list[Tensor] = []
    for step in range(2):
        for micro in range(2):
            loss = loss_of(
                model, 10 * step + micro, 2, 9, is_first_microbatch=micro == 0 if cached else None
            )
            if micro:
                loss_of(
                    model, 90, 1, 7, is_first_microbatch=False if cached else None
                )  # its backward never comes
            loss.backward()
            found.append(loss.detach())
        with torch.no_grad():
            found.append(loss_of(model.eval(), 50))
            model.train()
            for p in model.parameters():
                found.append(p.grad.clone())
                if not hasattr(p, "quantize_"):
                    p -= 0.1 * gradient(p)
                p.grad = None
    found += [p.detach().clone() for p in model.parameters() if not hasattr(p, "quantize_")]
    return found + [state.clone() for _, state in sorted(fp8_state(model).items())]


@functools.cache
def plain(recipe: str, **options: Any) -> list[Tensor]:
    """The run without offload and, since checkpointing changes no bit either, without checkpointing."""
    return run(build(recipe, False, **options))


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) > 20
    assert [
        i for i, (a, b) in enumerate(zip(one, other, strict=True)) if not torch.equal(a, b)
    ] == []


@pytest.mark.parametrize(("recipe", "mode"), every(6, RECIPES, MODES))
def test_offload_changes_no_bit(recipe: str, mode: str | int) -> None:
    model = build(recipe, True, mode)
    assert_same(run(model), plain(recipe))
    assert model.host_memory.pages > 0


@pytest.mark.parametrize(("variant", "mode"), every(3, VARIANTS, ["none", "full"]))
def test_offload_changes_no_bit_of_other_models(variant: str, mode: str) -> None:
    recipe, options = VARIANTS[variant]
    assert_same(run(build(recipe, True, mode, **options)), plain(recipe, **options))


class Late(HostMemory):
    """Copies that run only when somebody waits for them, as they may on a GPU.
    What they touch must be alive by then."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[list[tuple[StorageWeakRef, int, int]]] = []
        self.done = 0

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        queue = self.queue

        class Defer(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if func is not torch.ops.aten.copy_.default:
                    return func(*args, **(kwargs or {}))
                queue.append(
                    [
                        (StorageWeakRef(t.untyped_storage()), t.storage_offset(), len(t))
                        for t in args[:2]
                    ]
                )
                return args[0]

        with torch.no_grad(), Defer():
            yield

    def mark(self) -> Any:
        return len(self.queue)

    def wait_event(self, event: int) -> None:
        for ends in self.queue[self.done : event]:
            assert not any(ref.expired() for ref, _, _ in ends), (
                "memory was let go of before its copy was done"
            )
            storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref, _, _ in ends]
            whole = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages]
            to, source = (t[at : at + size] for t, (_, at, size) in zip(whole, ends, strict=True))
            to.copy_(source)
        self.done = max(self.done, event)


@pytest.mark.parametrize("mode", MODES)
def test_values_and_memory_wait_for_their_copies(
    mode: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies run as late as waiting allows: values are there when used, and memory lives until it is copied."""
    expected = plain("delayed")
    model = build("delayed", True, mode)
    late = model.host_memory = Late()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: late)
    assert_same(run(model), expected)
    middle: list[Tensor] = []
    hook = model.layers[2].register_forward_pre_hook(lambda m, inputs: middle.append(inputs[0]))
    torch.autograd.grad(
        loss_of(model, 0), middle.pop()
    )  # what is on its way back by then nobody wants any more
    hook.remove()
    hook = model.layers[2].register_forward_pre_hook(lambda *a: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        loss_of(model, 0)
    hook.remove()
    loss_of(model, 1).backward()
    assert late.done == len(late.queue) > 0


class Watch:
    """Numbers the blocks' passes in their order, and knows what their nodes saved and what of it is moved,
    while it lives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[Any] = []
        self.saved: list[tuple[int, StorageWeakRef]] = []
        self.moved: list[tuple[int, Any]] = []
        kept, storage = offload._SavedTensor.__init__, offload._Storage.__init__

        def note_saved(own: Any, block: Any, tensor: Tensor) -> None:
            kept(own, block, tensor)
            if tensor.untyped_storage().nbytes():  # torch 2.9 and 2.10 save empty tensors too
                self.saved.append((self._number(block), StorageWeakRef(tensor.untyped_storage())))

        def note_storage(own: Any, block: Any, start: int, content: Tensor) -> None:
            storage(own, block, start, content)
            self.moved.append((self._number(block), weakref.ref(own)))

        monkeypatch.setattr(offload._SavedTensor, "__init__", note_saved)
        monkeypatch.setattr(offload._Storage, "__init__", note_storage)

    def _number(self, block: Any) -> int:
        alive = [ref() for ref in self.blocks]
        if block not in alive:
            self.blocks.append(weakref.ref(block))
            return len(alive)
        return alive.index(block)

    def resident(self) -> set[int]:
        """Numbers of the blocks that have something of what was moved on the device."""
        return {
            n
            for n, ref in self.moved
            if (storage := ref()) is not None and storage.content is not None
        }


def identities(tensors: Any) -> set[int]:
    return {StorageWeakRef(t.untyped_storage()).cdata for t in tensors if t is not None}


@pytest.mark.parametrize(
    "recipe, mode",
    [
        ("bf16", "full"),
        ("bf16", 2),
        ("current", "selective"),
        ("current", 2),
        ("mxfp8", "none"),
        ("mxfp8", "selective"),
    ],
)
def test_saved_tensors_are_moved_once_and_none_stays(
    recipe: str, mode: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes on the host are those of the memory plan, which counts each storage once and no weight."""
    model = build(recipe, True, mode, **WIDE)
    watch = Watch(monkeypatch)
    loss = loss_of(
        model, 0, 2, 64, is_first_microbatch=True
    )  # so that FP8 weights are kept for the next one
    training = Training(batch_size=2, seq_len=64, activation_checkpointing=mode, activation_offload=True,
                        compile=False, fused=False,
                        cuda=False, gradient_sums=True, cached_weights=True)  # fmt: skip
    moved = sum(ref().size for _, ref in watch.moved)
    assert moved == saved_bytes(model.config, model.recipe, training, on_host=True) > 0
    assert {n for n, _ in watch.moved} == {0, 1, 2} and watch.resident() == set()
    stay = identities(model.parameters())
    for module in model.modules():
        workspaces: Any = getattr(module, "_fp8_workspaces", {})
        for weight in workspaces.values():
            stay |= identities(weight.get_data_tensors())
    alive = {
        (n, ref.cdata) for n, ref in watch.saved if not ref.expired() and ref.cdata not in stay
    }
    tables = {one for n, one in alive if n < 3}  # the rotary ones, which the last block uses too
    assert len(tables) == (0 if mode == "full" else 2) and all(
        (3, table) in alive for table in tables
    )
    loss.backward()
    assert not any(ref() for _, ref in watch.moved)


@pytest.mark.parametrize("recipe, mode", [("bf16", "selective"), ("delayed", "none")])
def test_at_most_two_blocks_are_resident(
    recipe: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block's are there before its backward begins, and no earlier than when that of the block above does."""
    model = build(recipe, True, mode, num_hidden_layers=6)
    watch = Watch(monkeypatch)
    forward, backward = [], []

    def look(module: Any, inputs: Any, output: Tensor) -> None:
        forward.append(watch.resident())
        output.register_hook(lambda gradient: backward.append(watch.resident()))

    for block in model.layers:
        block.register_forward_hook(look)
    loss = loss_of(model, 0)
    assert forward == [set(), {0}, {1}, {2}, {3}, {4}] and watch.resident() == set()
    loss.backward()
    assert backward == [set(), {4}, {3}, {2}, {1}, {0}] and watch.resident() == set()


@pytest.mark.parametrize("mode, order", [("none", (1, 0)), ("full", (0, 1)), ("full", (1, 0))])
def test_two_forwards_then_two_backwards_in_either_order(mode: str, order: tuple[int, int]) -> None:
    results = []
    for offloaded in (False, True):
        model = build("delayed", offloaded, mode)
        for step in range(2):
            losses = [loss_of(model, 2 * step), loss_of(model, 2 * step + 1, 1, 16) * 3]
            for index in order:
                losses[index].backward()
        results.append(
            [p.grad for p in model.parameters()] + [t.clone() for t in fp8_state(model).values()]
        )
    assert_same(*results)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_an_inner_grad_frees_what_it_does_not_need(mode: str) -> None:
    results = []
    for offloaded in (False, True):
        model = build("delayed", offloaded, mode)
        middle: list[Tensor] = []
        hook = model.layers[2].register_forward_pre_hook(
            lambda m, inputs, to=middle: to.append(inputs[0])
        )
        found = list(
            torch.autograd.grad(loss_of(model, 0), middle[0])
        )  # leaves the two blocks below as they are
        middle.clear()
        hook.remove()
        found += torch.autograd.grad(loss_of(model, 1), list(model.parameters()))
        results.append(found + [t.clone() for t in fp8_state(model).values()])
        assert len(model.host_memory.free) == model.host_memory.pages
    assert_same(*results)


@pytest.mark.parametrize("mode", every(2, MODES))
def test_pages_are_reused(mode: str | int) -> None:
    model = build("delayed", True, mode)
    memory = model.host_memory
    gc.collect()
    gc.disable()  # nothing may depend on it: CUDA's memory would not
    try:
        loss_of(model, 0, 2, 16).backward()
        pages = memory.pages
        for step in range(2):
            loss_of(model, step, 2, 16).backward()
            loss_of(model, step, 1, 7).backward()
            loss = loss_of(model, step, 2, 16)
            assert len(memory.free) < pages
            del loss
            assert len(memory.free) == memory.pages == pages
            hook = model.layers[2].mlp.down_proj.register_forward_pre_hook(lambda *a: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                loss_of(model, 0, 2, 16)
            hook.remove()
            assert len(memory.free) == memory.pages == pages
    finally:
        gc.enable()


def test_a_copied_model_has_host_memory_of_its_own() -> None:
    model = build("current", True)
    loss_of(model, 0).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.host_memory))):
        memory = getattr(twin, "host_memory", twin)
        assert memory is not model.host_memory and memory.pages == 0 and not memory.free


@pytest.mark.parametrize(
    "recipe, mode",
    [
        ("bf16", "selective"),
        pytest.param("bf16", "none", marks=pytest.mark.slow),
        pytest.param("bf16", "full", marks=pytest.mark.slow),
        pytest.param("current", "none", marks=pytest.mark.slow),
    ],
)
def test_the_plan_has_two_blocks_on_the_device_and_the_rest_on_the_host(
    recipe: str, mode: str, any_batch: None
) -> None:
    """With gradients held throughout, the last block's backward is the worst: of the others one has come back."""
    options = (
        dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
        if recipe == "current"
        else {}
    )
    layers = {} if mode == "selective" else dict(num_hidden_layers=8)
    (without, plan) = (
        plan_memory(get_preset("gated-1b", **layers), get_recipe(recipe, **options), seq_len=2048,
                    gradient_accumulation=2, activation_checkpointing=mode, activation_offload=offloaded, fused=False)
        for offloaded in (False, True)
    )  # fmt: skip
    count = plan.config.num_hidden_layers - 1
    assert without.host == 0 < plan.host and f"{plan.host / 2**30:.2f} GiB on the host" in str(plan)
    saved = [a.total - b.total for a, b in zip(without.moments, plan.moments, strict=True)]
    assert saved[::2] == [plan.host, 0]
    if (
        mode == "selective"
    ):  # whose blocks keep unlike amounts, so that another one's backward is the worst
        assert 0.9 * plan.host < saved[1] < plan.host
    else:
        assert saved[1] == plan.host * (count - 1) // count
    if recipe == "current":  # FP8 copies of weights that no next micro-batch wants go too
        once = plan_memory(plan.config, plan.recipe, seq_len=2048, activation_offload=True)
        assert (
            once.host > plan.host
            and once.moments[0].fp8_weight_copies < plan.moments[0].fp8_weight_copies
        )


def test_command_line(
    any_batch: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "plan",
        "--preset",
        "gated-1b",
        "--recipe",
        "delayed",
        "--memory",
        "--seq-len",
        "2048",
        "--json",
    ]
    command += ["--num-hidden-layers", "4"]
    assert main(command) == 0 and main([*command, "--activation-offload"]) == 0
    one, other = (json.loads(text + "}") for text in capsys.readouterr().out.split("\n}\n")[:2])
    assert one["host"] == 0 < other["host"] and other["peak"]["total"] < one["peak"]["total"]
    models: list[CausalLM] = []

    def build(settings: RunSettings, resume: bool) -> Result:
        models.append(new_model(settings).build(Parallel()))
        return Result()

    monkeypatch.setattr(te_models.training.finetune, "finetune", build)
    for flag in ([], ["--activation-offload"]):
        assert (
            main(
                ["pretrain", "--preset", "gated-nano", "--device", "cpu", "--recipe", "bf16", *flag]
            )
            == 0
        )
    assert [model.activation_offload for model in models] == [False, True]


LARGE = dict(vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
             num_key_value_heads=4, max_position_embeddings=1024, device="cuda", engine="native",
             fused=False)  # fmt: skip


def measured(recipe: str, offloaded: bool, mode: str | int) -> tuple[list[Tensor], int, int]:
    """Return what two steps change, their peak above the start, and the planned bytes on the host."""
    before = torch.cuda.memory_allocated()
    model = build(recipe, offloaded, mode, compile=False, **LARGE)
    model.te.FP8GlobalStateManager.reset()
    for step in range(2):
        for micro in range(2):
            torch.cuda.reset_peak_memory_stats()
            loss = loss_of(model, 2 * step + micro, 4, 1024, is_first_microbatch=micro == 0)
            loss_of(model, 90, 1, 512, is_first_microbatch=False)  # its backward never comes
            loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    memory = model.host_memory
    assert len(memory.free) == memory.pages and (memory.pages > 0) == offloaded
    assert all(page.is_pinned() for page in memory.free)
    training = Training(batch_size=4, seq_len=1024, activation_checkpointing=mode, gradient_sums=True,
                        cached_weights=True,
                        activation_offload=True, compile=False, fused=False)  # fmt: skip
    found = [loss.detach(), *(p.grad for p in model.parameters()), *fp8_state(model).values()]
    return (
        [t.cpu() for t in found],
        peak,
        saved_bytes(model.config, model.recipe, training, on_host=True),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_it_changes_no_bit_and_takes_less_memory(
    recipe: str, mode: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with copies that take longer than the computation: whoever does not wait for them reads something else."""
    te = get_engine("native")[0]
    if recipe in ("mxfp8", "nvfp4") and not getattr(te, f"is_{recipe}_available")():
        pytest.skip(f"this GPU does not run {recipe}")
    monkeypatch.undo()  # pages and sizes as they are
    monkeypatch.setattr(
        sdpa, "CUDA_ORDER", [SDPBackend.MATH]
    )  # the fast kernels' gradients vary from run to run
    copying = HostMemory.copying

    @contextlib.contextmanager
    def slow(memory: HostMemory) -> Iterator[None]:
        with copying(memory):
            torch.cuda._sleep(2_000_000)
            yield

    expected, peak, on_host = measured(recipe, False, mode)
    found, peak_offloaded, _ = measured(recipe, True, mode)
    assert_same(expected, found)
    monkeypatch.setattr(HostMemory, "copying", slow)
    assert_same(expected, measured(recipe, True, mode)[0])
    assert (
        peak_offloaded < peak - 0.7 * on_host
    )  # all but one of the blocks that are on the host is so at the peak


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "fused"), [("none", False), ("full", None)])
def test_on_a_gpu_with_compiled_kernels_and_cudnn_it_trains_as_without(
    mode: str, fused: bool | None
) -> None:
    losses = []
    for offloaded in (False, True):
        model = build("delayed", offloaded, mode, **{**LARGE, "fused": fused})
        assert model.fused == (mode == "full")
        model.te.FP8GlobalStateManager.reset()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses.append([])
        for _ in range(5):
            loss = loss_of(model, 0, 4, 1024)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3) and losses[0][-1] < losses[0][0]
