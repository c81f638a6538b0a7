"""The precision of each te.Linear: the same bits as a walk that calls it in an autocast of its own."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits, assert_same_tensors
from fewer import every
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typed import gradient, submodule

from te_models import CausalLM
from te_models.config.recipe import get_recipe
from te_models.errors import EngineError, UsageError
from te_models.fp8.region import Autocasts
from te_models.fp8.scaling_state import fp8_state
from te_models.kernels import elementwise
from te_models.model.forward_context import forward_context
from te_models.model.recompute import Recompute
from te_models.training.lora import add_lora

SHAPE: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4
)
SHAPE |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=64)
PLACE: dict[str, Any] = dict(engine="emulated", device="cpu")
OPTIONS: dict[str, dict[str, Any]] = dict(
    delayed=dict(amax_history_len=4), nvfp4=dict(disable_stochastic_rounding=True)
)
RECIPES = ["bf16", "delayed", "current", "blockwise", "mxfp8", "nvfp4"]
EDGES = ("layers.0.", "layers.3.", "lm_head")
MIXED = {"*.down_proj": "bf16", "layers.1.self_attn.*": "current"}

# A table -> what it asks of the te.Linear `name` in a model under the recipe `own`, written without patterns.
TABLES: dict[str, tuple[Callable[[str], dict[str, str]], Callable[[str, str], str]]] = {
    "edges alone": (lambda own: {}, lambda name, own: "bf16" if name.startswith(EDGES) else own),
    "bf16 and another": (
        lambda own: MIXED,
        lambda name, own: "bf16" if name.endswith("down_proj") or name.startswith(EDGES)
        else "current" if "layers.1.self_attn" in name else own,
    ),
    "edges come back": (
        lambda own: {"layers.0.*": own, "layers.3.mlp.down_proj": "delayed", "lm_head": "current"},
        lambda name, own: {"layers.3.mlp.down_proj": "delayed", "lm_head": "current"}.get(
            name, "bf16" if name.startswith("layers.3.") else own
        ),
    ),
    "delayed in a few": (
        lambda own: {"*": "bf16", "layers.[12].mlp.gate_up_proj": "delayed", "layers.2.mlp.*": "current"},
        lambda name, own: "delayed" if name == "layers.1.mlp.gate_up_proj"
        else "current" if "2.mlp" in name else "bf16",
    ),
}  # fmt: skip


def build(recipe: str, precision: dict[str, str] | None = None, **options: Any) -> CausalLM:
    torch.manual_seed(0)
    given = {**SHAPE, **PLACE, **OPTIONS.get(recipe, {}), **options}
    return CausalLM.from_preset(
        "gated-nano", recipe=recipe, **given, **({"precision": precision} if precision else {})
    )


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(
        0, SHAPE["vocab_size"], (2, 64), generator=torch.Generator().manual_seed(seed)
    )


def walk(model: CausalLM, ids: Tensor, asked: Callable[[str], Any]) -> Tensor:
    """The loss of `model` on ids [B, S] by hand; `asked` returns the engine's recipe of a te.Linear, None for BF16."""
    te, state = model.te, model.te.FP8GlobalStateManager.quantization_state
    recompute = Recompute("none", te, None, len(model.layers))
    own = (recompute, model.kernels, range(0), model.dtype, Autocasts(te, None, None, {}))
    context = forward_context(model.specs, ids, None, None, None, *own)

    def linear(name: str, x: Tensor) -> Tensor:
        with te.autocast(enabled=asked(name) is not None, recipe=asked(name)):
            state.is_first_fp8_module = False  # the caller updates the backward scales
            return model.get_submodule(name)(x)

    x = model.embed_tokens(ids).flatten(0, 1)
    for layer, block in enumerate(model.layers):
        at = f"layers.{layer}"
        mixed = block.self_attn._composed(
            linear(f"{at}.self_attn.qkvg_proj", submodule(block, "input_layernorm")(x)), context
        )
        x = x + linear(f"{at}.self_attn.o_proj", mixed)
        gate_up = linear(f"{at}.mlp.gate_up_proj", submodule(block, "post_attention_layernorm")(x))
        x = x + linear(f"{at}.mlp.down_proj", elementwise.swiglu(gate_up))
    logits = linear("lm_head", model.norm(x))
    targets = F.pad(ids[:, 1:], (0, 1), value=-100).flatten()
    return elementwise.cross_entropy(logits, targets)


def reference(model: CausalLM, ids: Tensor, asked: Callable[[str], Any]) -> Tensor:
    """A training step's loss and gradients by `walk`; scales are updated once after forward, once after backward."""
    te = model.te
    with te.autocast(enabled=False):  # so that no inner autocast updates a scale when it ends
        loss = walk(model, ids, asked)
    te.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
    loss.backward()
    te.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
    return loss


def step(model: CausalLM) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad.sign() * 2**-8)  # so that every step has other amaxes
            parameter.grad = None


def assert_same_step(found: CausalLM, expected: CausalLM) -> None:
    for (name, parameter), other in zip(
        found.named_parameters(), expected.parameters(), strict=True
    ):
        assert_same_bits(f"gradient of {name}", parameter.grad, other.grad)
    assert_same_tensors(fp8_state(found), fp8_state(expected))


def asking(model: CausalLM, own: str, expected: Callable[[str, str], str]) -> Callable[[str], Any]:
    built = {name: get_recipe(name).build(model.te) for name in RECIPES if name != own}
    built[own] = get_recipe(own, **OPTIONS.get(own, {})).build(model.te)
    return lambda name: built[expected(name, own)]


def assert_steps_are_those_by_hand(
    model: CausalLM, by_hand: CausalLM, asked: Callable[[str], Any], steps: int
) -> None:
    for number in range(steps):
        loss = model(tokens(number), labels=tokens(number)).loss
        loss.backward()
        assert_same_bits("loss", loss, reference(by_hand, tokens(number), asked))
        assert_same_step(model, by_hand)
        step(model)
        step(by_hand)


@pytest.mark.parametrize("own, table", every(4, RECIPES, TABLES))
def test_a_pass_is_that_of_linears_with_autocasts_of_their_own(own: str, table: str) -> None:
    precision, expected = TABLES[table][0](own), TABLES[table][1]
    model, by_hand = build(own, precision), build("bf16")
    assert_steps_are_those_by_hand(model, by_hand, asking(by_hand, own, expected), steps=3)
    delayed = [name for name in model.precision.linears if expected(name, own) == "delayed"]
    assert len(fp8_state(model)) == 4 * len(delayed)
    for name, tensor in fp8_state(model).items():
        if name.endswith("amax_history"):  # three of its rows, the length of recipe delayed is 1024
            assert int((tensor[:, 0] > 0).sum()) == 3, name


@pytest.mark.parametrize(
    "table, own, how",
    every(
        3,
        TABLES,
        ["delayed", "current", "bf16"],
        [("none", "pre"), ("full", "pre"), ("none", "post")],
    ),
)
def test_scales_are_updated_once_per_pass(
    table: str, own: str, how: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second update would be one more collective, and would change histories wherever a module ran twice."""
    mode, position = how
    model = build(own, TABLES[table][0](own), activation_checkpointing=mode, norm_position=position)
    manager, updates = model.te.FP8GlobalStateManager, []
    monkeypatch.setattr(
        manager, "reduce_and_update_fp8_tensors", lambda forward=True: updates.append(forward)
    )
    for _ in range(2):
        updates.clear()
        model(tokens(), labels=tokens()).loss.backward()
        assert updates == [True] * model.recipe.stateful + [False] * model.recipe.quantized


@pytest.mark.parametrize(
    "own, mode", every(3, ["delayed", "current", "bf16"], ["selective", "full", 2])
)
@pytest.mark.parametrize("table", every(2, [*TABLES][1:]))
def test_a_recompute_has_the_precision_of_its_first_pass(
    table: str, own: str, mode: str | int
) -> None:
    precision = TABLES[table][0](own)
    plain, model = build(own, precision), build(own, precision, activation_checkpointing=mode)
    for number in range(3):
        losses = [one(tokens(number), labels=tokens(number)).loss for one in (plain, model)]
        for loss in losses:
            loss.backward()
        assert_same_bits("loss", *losses)
        assert_same_step(model, plain)
        step(model)
        step(plain)


@pytest.mark.parametrize(("start", "end"), [(4, 0), (9, 0), (3, 3), (0, 9)])
def test_edges_that_meet_run_every_layer_once(start: int, end: int) -> None:
    own = "delayed"
    edges = dict(num_layers_at_start_in_bf16=start, num_layers_at_end_in_bf16=end)
    model, by_hand = build(own, {"layers.1.*": own}, lm_head="fp8", **edges), build("bf16")
    inside = ("layers.1.", "lm_head")
    asked = asking(by_hand, own, lambda name, own: own if name.startswith(inside) else "bf16")
    assert_steps_are_those_by_hand(model, by_hand, asked, steps=2)


@pytest.mark.parametrize("own", [name for name in RECIPES if name != "bf16"])
def test_a_head_in_fp8_after_layers_in_bf16(own: str) -> None:
    model, by_hand = build(own, lm_head="fp8"), build("bf16")
    asked = asking(
        by_hand, own, lambda name, own: own if not name.startswith(EDGES[:2]) else "bf16"
    )
    assert_steps_are_those_by_hand(model, by_hand, asked, steps=2)


def test_two_passes_and_then_their_backwards() -> None:
    """As with gradient accumulation in pipelines: each recompute has the scales of its own first pass."""
    table = TABLES["delayed in a few"][0]("bf16")
    plain, model = build("bf16", table), build("bf16", table, activation_checkpointing="full")
    for one in (plain, model):
        losses = [one(tokens(number), labels=tokens(number)).loss for number in range(3)]
        for loss in reversed(losses):
            loss.backward()
    assert_same_step(model, plain)


def test_the_layers_of_the_edges_are_in_no_autocast() -> None:
    """Without a table nothing is opened around a te.Linear, and one autocast around the layers is all."""
    model = build("delayed")
    opened: list[bool] = []
    real = model.te.autocast

    class Spy(real):  # type: ignore[misc, valid-type]
        def __enter__(self) -> Any:
            opened.append(self._enabled)
            return super().__enter__()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.te, "autocast", Spy)
        model(tokens())
    assert opened == [True] and not model.precision.others


@pytest.mark.parametrize("own", ["delayed", "current"])
def test_evaluation_and_a_failed_pass_change_no_scale(own: str) -> None:
    model = build(own, TABLES["delayed in a few"][0](own) | {"lm_head": "delayed"})
    model(tokens(), labels=tokens()).loss.backward()
    before = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    model.eval()(tokens(5))
    model.train()
    hook = model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens(6))
    hook.remove()
    assert_same_tensors(fp8_state(model), before)


def test_a_third_party_recompute_of_delayed_linears_is_refused() -> None:
    """A block in BF16 with one te.Linear under delayed scaling, around which PyTorch's checkpoint is put."""
    model = build("bf16", {"layers.1.mlp.down_proj": "delayed"})
    block = model.layers[1]
    forward = block.forward
    block.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)  # type: ignore[method-assign]
    loss = model(tokens(), labels=tokens()).loss
    with pytest.raises(EngineError, match="third-party checkpoint"):
        loss.backward()


@pytest.mark.parametrize("own", ["delayed", "current", "bf16"])
def test_calibration_gives_scales_to_the_delayed_linears_alone(own: str) -> None:
    model = build(own, {**MIXED, "layers.2.mlp.down_proj": "delayed"})
    batch = dict(input_ids=tokens(), labels=tokens())
    model.calibrate(batch)
    plan = {f"layers.{row.layer}.{row.module}": row.precision for row in model.plan()}
    delayed = {name for name, precision in plan.items() if "Delayed" in precision}
    assert "layers.2.mlp.down_proj" in delayed
    assert {name.rsplit(".", 2)[0] for name in fp8_state(model)} == delayed
    for name, tensor in fp8_state(model).items():
        assert not name.endswith("scaling_fwd.scale") or bool((tensor[:2] != 1).all())
    whole = build("delayed", num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    whole.calibrate(batch)  # measured in BF16, so what else is in FP8 makes no difference
    for name, tensor in fp8_state(model).items():
        if name.endswith("scale"):
            assert_same_bits(name, tensor, fp8_state(whole)[name])


@pytest.mark.parametrize("own", ["delayed", "current"])
def test_save_and_load_keep_the_table_and_the_scales(own: str, tmp_path: Path) -> None:
    table = {**MIXED, "layers.0.mlp.down_proj": "delayed"}
    model = build(own, table)
    for number in range(2):
        model(tokens(number), labels=tokens(number)).loss.backward()
        step(model)
    model.save_pretrained(tmp_path)
    loaded = CausalLM.from_pretrained(tmp_path, **PLACE).train()
    assert loaded.recipe.to_dict() == model.recipe.to_dict() and list(
        loaded.recipe.precision
    ) == list(table)
    assert str(loaded.plan()) == str(model.plan())
    for one in (model, loaded):
        one(tokens(3), labels=tokens(3)).loss.backward()
    assert_same_step(loaded, model)
    with pytest.warns(UserWarning, match="has no use for"):
        without = CausalLM.from_pretrained(tmp_path, **PLACE, precision={})
    assert without.recipe.to_dict() == get_recipe(own, **OPTIONS.get(own, {})).to_dict()


def test_set_recipe_converts_the_scales_of_linears_that_keep_one() -> None:
    model = build("delayed", margin=1)
    for number in range(2):
        model(tokens(number), labels=tokens(number)).loss.backward()
        step(model)
    before = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    model.set_recipe("current", precision={"layers.1.*": "delayed"})
    after = fp8_state(model)
    assert after.keys() == {name for name in before if name.startswith("layers.1.")}
    for name, tensor in after.items():
        if name.endswith("scale"):
            seen = before[name] != 1
            assert_same_bits(
                name, tensor[seen], before[name][seen] * 2
            )  # the shipped recipe has no margin
        else:
            assert_same_bits(
                name, tensor[1:][tensor[1:] > 0], before[name][1:][before[name][1:] > 0]
            )
    model(tokens(5), labels=tokens(5)).loss.backward()
    model.set_recipe("bf16")
    assert not fp8_state(model) and model.plan().count("FP8") == 0


@pytest.mark.parametrize("own", ["delayed", "current", "blockwise", "bf16"])
def test_fp8_weights_are_made_per_linear(own: str, tmp_path: Path) -> None:
    table = {
        "*.down_proj": "bf16",
        "layers.1.self_attn.*": "current",
        "layers.0.mlp.gate_up_proj": "blockwise",
    }
    model, plain = build(own, table, fp8_params=True), build(own, table)
    kinds = {name: type(module.weight).__name__ for name, module in linears(model)}
    blocks = {name for name, kind in kinds.items() if kind == "Float8BlockwiseQTensor"}
    assert (
        kinds["layers.1.self_attn.o_proj"] == "Float8Tensor"
        and kinds["layers.1.mlp.down_proj"] == "Parameter"
    )
    assert "layers.0.mlp.gate_up_proj" in blocks and (len(blocks) == 1) == (own != "blockwise")
    assert kinds["layers.0.self_attn.o_proj"] == kinds["lm_head"] == "Parameter"
    with torch.no_grad():
        for (name, quantized), (_, other) in zip(linears(model), linears(plain), strict=True):
            if kinds[name] != "Parameter":
                other.get_parameter("weight").copy_(quantized.get_parameter("weight").dequantize())
    for one in (model, plain):
        one.calibrate(dict(input_ids=tokens(), labels=tokens()))
        one(tokens(), labels=tokens()).loss.backward()
    for (name, quantized), (_, other) in zip(linears(model), linears(plain), strict=True):
        ours, theirs = (gradient(one.get_parameter("weight")) for one in (quantized, other))
        apart = (ours - theirs).norm() / theirs.norm()
        assert float(apart) < 2**-3, (
            name
        )  # weights that are rounded to E4M3 once more, by up to 2**-4
    model.save_pretrained(tmp_path)
    loaded = CausalLM.from_pretrained(tmp_path, **PLACE)
    assert loaded.fp8_params
    assert_same_bits("logits", loaded.eval()(tokens()).logits, model.eval()(tokens()).logits)
    with pytest.raises(UsageError, match="FP8 primary weights were made for"):
        model.set_recipe(
            own, precision={**table, "layers.2.*": "bf16" if own != "bf16" else "current"}
        )


def linears(model: CausalLM) -> list[tuple[str, nn.Module]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, model.te.Linear)
    ]


@pytest.mark.parametrize("own", ["delayed", "bf16"])
def test_a_copy_trains_as_the_original(own: str) -> None:
    model = build(own, TABLES["edges come back"][0](own))
    model(tokens(), labels=tokens()).loss.backward()
    step(model)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one(tokens(2), labels=tokens(2)).loss.backward()
    assert_same_step(twin, model)


@pytest.mark.parametrize("own, mode", [("delayed", "full"), ("current", "none"), ("bf16", "full")])
def test_the_base_of_an_adapter_keeps_its_precision(own: str, mode: str) -> None:
    """Adapters start at zero, so that the loss and the forward scales are those of the model without them."""
    table = {**MIXED, "layers.2.mlp.down_proj": "delayed", "layers.0.self_attn.o_proj": "current"}
    plain, model = build(own, table), build(own, table, activation_checkpointing=mode)
    plan = str(model.plan())
    adapted = add_lora(model, r=4)
    assert str(model.plan()) == plan
    for number in range(2):
        for one in (plain, adapted):
            one.zero_grad()
        losses = [
            one(input_ids=tokens(number), labels=tokens(number)).loss for one in (plain, adapted)
        ]
        assert_same_bits("loss", *losses)
        for loss in losses:
            loss.backward()
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in fp8_state(model).items()}
    wanted = fp8_state(plain)
    assert state.keys() == wanted.keys()
    for name in wanted:
        if "scaling_fwd" in name:
            assert_same_bits(name, state[name][..., 0], wanted[name][..., 0])


def test_micro_batches_share_the_quantized_weights() -> None:
    model, plain = (build("current", {**MIXED, "layers.0.mlp.*": "blockwise"}) for _ in range(2))
    for first in (True, False):
        model(tokens(), labels=tokens(), is_first_microbatch=first).loss.backward()
        plain(tokens(), labels=tokens()).loss.backward()
    assert_same_step(model, plain)
    caches = {name for name, module in linears(model) if module._fp8_workspaces}
    fp8 = {name for name, found in model.precision.linears.items() if found.recipe is not None}
    assert caches == fp8


@pytest.mark.gpu
@pytest.mark.parametrize("own", ["delayed", "current"])
def test_fp8_is_handed_over_only_to_linears_of_the_same_precision(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Transformer Engine with fused kernels; tests/test_fast_path.py compares the numbers with unfused ones."""
    place: dict[str, Any] = dict(
        engine="native", device="cuda", hidden_size=256, intermediate_size=512, head_dim=64
    )
    place |= dict(
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=5,
        max_position_embeddings=128,
    )
    model = build(own, {**MIXED, "layers.4.mlp.gate_up_proj": own}, **place)
    ids = tokens().repeat(1, 2).cuda()  # from 128 tokens on attention writes FP8
    manager, updates = model.te.FP8GlobalStateManager, []
    model.calibrate(dict(input_ids=ids, labels=ids))
    update = manager.reduce_and_update_fp8_tensors
    spy = classmethod(
        lambda cls, forward=True: (updates.append(forward), update(forward=forward))[1]
    )
    monkeypatch.setattr(manager, "reduce_and_update_fp8_tensors", spy)
    quantized: dict[str, bool] = {}
    for name, module in linears(model):
        module.register_forward_pre_hook(
            lambda _, inputs, name=name: quantized.update(
                {name: isinstance(inputs[0], model.te.QuantizedTensor)}
            )
        )
    model(ids, labels=ids).loss.backward()
    assert updates == [True] * (own == "delayed") + [False]
    handed = {f"layers.{layer}.mlp.gate_up_proj" for layer in (1, 2, 3)}
    handed |= {
        f"layers.{layer}.self_attn.qkvg_proj"
        for layer in ((1, 2, 3) if own == "current" else (2, 3))
    }
    if own == "delayed":  # attention writes FP8 only with a scale that it knows before
        handed |= {f"layers.{layer}.self_attn.o_proj" for layer in (2, 3)}
    assert {name for name, found in quantized.items() if found} == handed
    for name, module in linears(model):
        recipe = model.precision.linears[name].recipe
        assert module.fp8 == (recipe is not None), name
        if recipe is not None:
            kind = (
                "Float8Quantizer" if recipe.name == "delayed" else "Float8CurrentScalingQuantizer"
            )
            quantizers: Any = module.quantizers
            assert type(quantizers["scaling_fwd"][0]).__name__ == kind, name
