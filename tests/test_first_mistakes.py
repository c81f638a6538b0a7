"""What people try first in Python: it works, or one line says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judge import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from te_models import (
    Callback,
    CausalLM,
    TEModelsForCausalLM,
    TrainConfig,
    Trainer,
    get_engine,
    get_recipe,
    load_tokenizer,
    open_data,
    parity,
    plan,
    stream_text,
)
from te_models.errors import UsageError

IDS = torch.tensor([[5, 6, 7, 9]])
BATCH = {"input_ids": IDS, "labels": IDS}
SHAPE: dict[str, Any] = dict(vocab_size=320, num_hidden_layers=3, device="cpu")


def build(recipe: str = "bf16", **options: Any) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM.from_preset("gated-nano", recipe=recipe, **{**SHAPE, **options})


@pytest.fixture
def tokenizer() -> Any:
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    own.train_from_iterator(["hello world"] * 9, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|end|>")


def test_one_prompt_is_a_tensor_of_one_dimension_too() -> None:
    model = build()
    expected = model.generate(IDS, max_new_tokens=3)
    for prompt in (IDS[0], IDS[0].tolist(), IDS.numpy()):
        assert torch.equal(model.generate(prompt, max_new_tokens=3), expected)


def test_a_temperature_of_0_is_greedy_and_the_seed_is_that_of_torch() -> None:
    model = build(initializer_range=0.5)
    greedy = model.generate(IDS, max_new_tokens=6)
    for options in (dict(temperature=0), dict(do_sample=True, temperature=0.0, top_p=0.9, seed=3)):
        assert torch.equal(model.generate(IDS, max_new_tokens=6, **options), greedy)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts += [model.generate(IDS, max_new_tokens=12, do_sample=True) for _ in range(2)]
    assert torch.equal(texts[0], texts[2]) and torch.equal(texts[1], texts[3])
    assert not torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[4])
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    model.generate(IDS, max_new_tokens=2)
    model.generate(IDS, max_new_tokens=2, do_sample=True, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_tokenizers_of_transformers(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    own = load_tokenizer(tmp_path)
    config = TrainConfig(steps=1, seq_len=64, batch_size=1)
    texts = [{"text": "hello world " * 40}]
    for records in (texts, [{"messages": [{"role": "user", "content": "hello"},
                                          {"role": "assistant", "content": "world"}]}]):  # fmt: skip
        batches = [
            next(open_data(records, one, config, eval_data=records)[0]) for one in (tokenizer, own)
        ]
        assert torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])
    model = build()
    found = [
        "".join(stream_text(model, one, "hello", max_new_tokens=4)) for one in (tokenizer, own)
    ]
    assert found[0] == found[1]
    with pytest.raises(
        UsageError, match="the tokenizer is a int: give what load_tokenizer returns"
    ):
        open_data(texts, 5, config)  # type: ignore[arg-type]


def test_none_is_the_default_of_how_a_model_is_built(tmp_path: Path) -> None:
    names = (
        "activation_checkpointing",
        "activation_offload",
        "compile",
        "fp8_params",
        "dtype",
        "engine",
        "fused",
    )
    model = build(**dict.fromkeys(names))
    assert model.activation_checkpointing == "none" and model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path, safe_serialization=True)
    again = CausalLM.from_pretrained(tmp_path, recipe="bf16", device="cpu", **dict.fromkeys(names))
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_scales_for_inference_need_no_labels() -> None:
    """Those of inputs and weights are those of a calibration for training, which measures gradients later."""
    model, judge = build("delayed"), build("delayed")
    model.calibrate({"input_ids": IDS})
    judge.calibrate({"input_ids": IDS, "labels": IDS})
    assert torch.equal(model.eval()(IDS).logits, judge.eval()(IDS).logits)
    scales, expected = model.copied_fp8_state(), judge.copied_fp8_state()
    assert all(torch.equal(scales[name], expected[name]) for name in expected if "fwd" in name)
    assert not any((scales[name] != 1).any() for name in scales if name.endswith("bwd.scale"))
    model.train().calibrate({"input_ids": IDS, "labels": IDS})
    scales = model.copied_fp8_state()
    assert all(torch.equal(scales[n], expected[n]) for n in expected if n.endswith("bwd.scale"))


def run(model: Any, out: Any = "run") -> Trainer:
    batch = {"input_ids": IDS, "labels": IDS}
    return Trainer(model, [batch], None, TrainConfig(steps=1), out=out)


LINES: dict[str, tuple[Callable[[CausalLM], object], str]] = {
    "array": (lambda m: m(np.array([[5, 6]])), "input_ids is a ndarray: give an int64 tensor"),
    "list": (lambda m: TEModelsForCausalLM.wrap(m)([[5]]), "input_ids is a list: give an int64 tensor"),
    "cache": (lambda m: m(IDS, use_cache=True), "a model takes no use_cache: give cache=model.new_cache"),
    "keyword": (lambda m: m(IDS, foo=1), "a model takes no foo: leave it out"),
    "beams": (lambda m: m.generate(IDS, num_beams=2), "num_beams is an option of transformers' generate"),  # type: ignore[unexpected-keyword]
    "penalty": (lambda m: m.generate(IDS, repetition_penalty=1.2), "call TEModelsForCausalLM.wrap"),  # type: ignore[unexpected-keyword]
    "negative temperature": (lambda m: m.generate(IDS, temperature=-1.0), "temperature=-1.0 is negative: give"),
    "one dimension": (lambda m: TEModelsForCausalLM.wrap(m).generate(IDS[0]), r"has shape \[4\]: give an int64 tensor"),
    "no prompt": (lambda m: TEModelsForCausalLM.wrap(m).generate(max_new_tokens=8), "no bos token to begin with"),
    "config of transformers": (lambda m: CausalLM(transformers.LlamaConfig()), "is a LlamaConfig: give a ModelConfig"),
    "calibrate ids": (lambda m: m.calibrate(IDS), "a batch to calibrate on is a Tensor: give a dict"),
    "pickle": (lambda m: m.save_pretrained("x", safe_serialization=False), "would write a pickle, which can run code"),
    "pickle of a wrapped model": (
        lambda m: TEModelsForCausalLM.wrap(m).save_pretrained("x", safe_serialization=False), "would write a pickle"
    ),
    "compiled": (lambda m: run(torch.compile(m)), "compiled by torch.compile: give the model itself"),
    "frozen": (lambda m: run(m.requires_grad_(False)), "every parameter of the model is frozen: let some"),
    "nowhere": (lambda m: run(m, None), "out is None: give the folder of the run"),
    "no ids": (lambda m: m(), "give either input_ids or inputs_embeds"),
    "settings as a dict": (
        lambda m: Trainer(m, [BATCH], None, dict(steps=1), out="run"), r"config is a dict: give te_models.TrainConfig\("
    ),
    "one callback": (
        lambda m: Trainer(m, [BATCH], None, TrainConfig(steps=1), "run", callbacks=Callback()),
        "callbacks is a Callback: give a list",
    ),
    "data without settings": (
        lambda m: open_data(None, load_tokenizer(None), None), "config is a NoneType: give te_models.TrainConfig"
    ),
    "plan of a model": (lambda m: plan(m), "the shape is a CausalLM: give a preset's name .* a model has plan"),
    "no text": (
        lambda m: list(stream_text(m, load_tokenizer(None), None)), "the prompt is a NoneType: give a text or token ids"
    ),
    "parity on ids": (lambda m: parity(m, m.origin, "bf16", IDS), "parity compares on a list of batches: give"),
    "parity on a batch": (lambda m: parity(m, m.origin, "bf16", BATCH), "parity compares on a list of batches: give"),
    "parity without labels": (
        lambda m: parity(m, m.origin, "bf16", [{"input_ids": IDS}]), "batch 1 is no dict of input_ids and labels"
    ),
    "calibration of lists": (lambda m: m.export("x", "nvfp4", calibration=[[5, 6]]), "calibration holds a list: give"),
    "calibration of a text": (lambda m: m.export("x", "nvfp4", calibration="hello"), "calibration holds a str: give"),
    "calibration of a number": (lambda m: m.export("x", "nvfp4", calibration=5), "calibration is a int: give token"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", LINES)
def test_one_line_says_what_to_do(mistake: str) -> None:
    act, message = LINES[mistake]
    with pytest.raises(UsageError, match=message) as caught:
        act(build())
    assert "\n" not in str(caught.value)


def test_adapters_for_a_name() -> None:
    lora = pytest.importorskip("te_models.training.lora")
    with pytest.raises(UsageError, match="the model is a str: give a CausalLM"):
        lora.add_lora("gated-nano", r=2)


def test_save_lora_of_a_model_without_adapters() -> None:
    lora = pytest.importorskip("te_models.training.lora")
    with pytest.raises(
        UsageError, match="a CausalLM has no adapters that save_lora knows: give what"
    ):
        lora.save_lora(build(), "x")


def test_an_autocast_wants_the_recipe_of_its_engine() -> None:
    te, _, _ = get_engine()
    autocast = te.autocast(enabled=True, recipe=get_recipe("current"))
    with pytest.raises(UsageError, match=r"give recipe\.build\(te\)"):
        autocast.__enter__()
