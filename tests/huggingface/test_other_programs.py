"""Programs written for models of transformers: the same numbers with ours."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from judge import transformers

from te_models import TEModelsForCausalLM
from te_models.config.recipe import Recipe, get_recipe
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.errors import UsageError

pytestmark = [pytest.mark.filterwarnings("ignore")]

SIZES: dict[str, Any] = dict(
    vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=512, bos_token_id=256, eos_token_id=257,
    pad_token_id=258,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers with a tokenizer, and in te/ the same in our format."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("qwen3", **SIZES)
    ).float()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    model.save_pretrained(path)
    ByteTokenizer().save(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = "<pad>"
    tokenizer.save_pretrained(path)
    TEModelsForCausalLM.from_pretrained(path, device="cpu").save_pretrained(path / "te")
    return path


def both(folder: Path) -> tuple[Any, TEModelsForCausalLM]:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    return theirs, TEModelsForCausalLM.from_pretrained(folder, device_map="cpu")


def test_a_pipeline_gives_the_same_texts(folder: Path) -> None:
    texts = []
    for path in (folder, folder / "te"):
        pipe = transformers.pipeline("text-generation", model=str(path), device="cpu")
        texts.append(
            pipe(["Hello", "Why not? Then"], batch_size=2, max_new_tokens=10, do_sample=False)
        )
    assert isinstance(pipe.model, TEModelsForCausalLM) and texts[0] == texts[1]


def test_label_smoothing_predicts_the_next_token(folder: Path, tmp_path: Path) -> None:
    ids = torch.arange(20)[None] + 60
    losses = []
    for model in both(folder):
        arguments = transformers.TrainingArguments(
            str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[]
        )
        trainer = transformers.Trainer(model=model, args=arguments)
        losses.append(float(trainer.compute_loss(model.eval(), dict(input_ids=ids, labels=ids))))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_lm_evaluation_harness_measures_the_same(folder: Path) -> None:
    models = pytest.importorskip("lm_eval.models.huggingface")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pairs = [("The cat", " sat"), ("A", " longer text here"), ("Zzz", " b")]
    asked = [
        ("loglikelihood", pairs),
        ("loglikelihood_rolling", [("A text that is long enough for two windows. " * 12,)]),
        (
            "generate_until",
            [
                (text, {"until": [end], "max_gen_toks": 20})
                for text, end in (("Hello wor", "\n"), ("A", "x"))
            ],
        ),
    ]
    found = []
    for model in both(folder):
        harness = models.HFLM(
            pretrained=model.eval(), tokenizer=tokenizer, batch_size=2, max_length=256
        )
        found.append(
            [
                getattr(harness, kind)(
                    [instance(kind, {}, args, n) for n, args in enumerate(all_args)]
                )
                for kind, all_args in asked
            ]
        )
    for ours, theirs in zip(found[1][0], found[0][0], strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5) and ours[1] == theirs[1]
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5) and found[1][2] == found[0][2]
    assert isinstance(
        models.HFLM(pretrained=str(folder / "te"), device="cpu").model, TEModelsForCausalLM
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, dict(packing=True, max_length=64), dict(gradient_checkpointing=True)]
)
def test_sft_of_trl_has_the_same_losses(options: dict, folder: Path, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(
        [{"text": f"The quick brown fox number {n} jumps."} for n in range(16)]
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    losses = []
    for model in both(folder):
        config = trl.SFTConfig(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1,
            report_to=[], use_cpu=True, bf16=False, save_strategy="no", **{"gradient_checkpointing": False, **options},
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model=model, args=config, train_dataset=rows, processing_class=tokenizer
        )
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0][-1] < losses[0][0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("route", ["peft_config", "add_lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_train_under_trl_and_their_files_load(
    route: str, checkpointing: bool, folder: Path, tmp_path: Path
) -> None:
    """The same losses as with the model of transformers, which reads the adapters; a checkpoint continues."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    peft, lora = pytest.importorskip("peft"), pytest.importorskip("te_models.training.lora")
    rows = datasets.Dataset.from_list(
        [{"text": f"The quick brown fox number {n} jumps."} for n in range(16)]
    )
    tokenizer, ids = transformers.AutoTokenizer.from_pretrained(folder), torch.arange(20)[None] + 60
    first: dict[str, torch.Tensor] = {}

    def trainer(model: Any, out: str) -> Any:
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj"])
        config = trl.SFTConfig(
            str(tmp_path / out), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
            report_to=[], use_cpu=True, bf16=False, save_steps=2, gradient_checkpointing=checkpointing,
        )  # fmt: skip
        options: dict[str, Any] = dict(args=config, train_dataset=rows, processing_class=tokenizer)
        if route == "add_lora" and isinstance(model, TEModelsForCausalLM):
            found = trl.SFTTrainer(model=lora.add_lora(model, adapters), **options)
        else:
            found = trl.SFTTrainer(model=model, peft_config=adapters, **options)
        trained = {name: p for name, p in found.model.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            parameter.data.copy_(first.setdefault(name, parameter.detach().clone()))
        assert trained.keys() == first.keys()
        return found

    def losses(run: Any) -> list[float]:
        return [row["loss"] for row in run.state.log_history if "loss" in row]

    their_model, our_model = both(folder)
    their_run = trainer(their_model, "theirs")
    their_run.train()
    run = trainer(our_model, "ours")
    run.train()
    assert losses(run) == pytest.approx(losses(their_run), rel=1e-5)
    run.save_model(str(tmp_path / "final"))
    wanted = run.model.eval()(input_ids=ids).logits
    for model in both(folder):
        again = peft.PeftModel.from_pretrained(model, tmp_path / "final").eval()
        torch.testing.assert_close(again(input_ids=ids).logits, wanted, rtol=0, atol=1e-4)
    resumed = trainer(both(folder)[1], "ours")
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert losses(resumed)[-1] == losses(run)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["copy", "our folder"])
def test_dpo_of_trl_has_the_same_losses(reference: str, folder: Path, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = [{"prompt": f"Say {n}: ", "chosen": "yes it is", "rejected": "no"} for n in range(16)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs, ours = both(folder)
    if reference == "our folder":  # from which DPOTrainer loads the reference
        ours = TEModelsForCausalLM.from_pretrained(folder / "te", device_map="cpu")
    losses = []
    for model in (theirs, ours):
        config = trl.DPOConfig(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1,
            report_to=[], use_cpu=True, bf16=False, save_strategy="no", gradient_checkpointing=False,
        )  # fmt: skip
        second = copy.deepcopy(model) if reference == "copy" else None
        data = datasets.Dataset.from_list(rows)
        trainer = trl.DPOTrainer(
            model=model,
            ref_model=second,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
        )
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3) and losses[0][-1] < losses[0][0] - 0.1


def quantizing_all_layers(name: str) -> Recipe:
    """The recipe without layers in BF16 at the edges: the model has two layers."""
    recipe = get_recipe(name)
    edges = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    return recipe.replace(**edges) if recipe.quantized else recipe


def first_dpo_loss(model: TEModelsForCausalLM, folder: Path, out: Path, **options: Any) -> float:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = [{"prompt": f"Say {n}: ", "chosen": "yes it is", "rejected": "no"} for n in range(8)]
    config = trl.DPOConfig(
        str(out), max_steps=1, per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True, bf16=False,
        save_strategy="no", gradient_checkpointing=False, precompute_ref_log_probs=options.pop("precompute", False),
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        **options,
    )
    trainer.train()
    return next(row["loss"] for row in trainer.state.log_history if "loss" in row)


@pytest.mark.parametrize(
    ("reference", "recipe"),
    [
        *itertools.product(["ref_model", "peft_config", "our folder"], ["bf16", "current"]),
        ("precomputed", "bf16"),  # in other batches, whose FP8 scales are others
    ],
)
def test_dpo_begins_at_ln_2(reference: str, recipe: str, folder: Path, tmp_path: Path) -> None:
    """Policy and reference are the same model before the first step, under the same recipe."""
    how: dict[str, Any] = dict(
        device_map="cpu", recipe=quantizing_all_layers(recipe), dtype="bfloat16"
    )
    model, options = TEModelsForCausalLM.from_pretrained(folder, **how), {}
    if reference == "ref_model":
        options = dict(ref_model=TEModelsForCausalLM.from_pretrained(folder, **how))
    if reference == "peft_config":
        peft = pytest.importorskip("peft")
        options = dict(peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    if reference == "precomputed":
        options = dict(precompute=True)
    if reference == "our folder":  # DPOTrainer loads the reference from there
        model.save_pretrained(tmp_path / "own")
        model = TEModelsForCausalLM.from_pretrained(tmp_path / "own", device_map="cpu")
    loss = first_dpo_loss(model, folder, tmp_path, **options)
    assert loss == pytest.approx(math.log(2), abs=1e-4)


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_dpo_refuses_a_reference_of_another_class(
    recipe: str, folder: Path, tmp_path: Path
) -> None:
    model = TEModelsForCausalLM.from_pretrained(
        folder, device_map="cpu", recipe=quantizing_all_layers(recipe)
    )
    with pytest.raises(UsageError, match="give DPOTrainer ref_model=TEModelsForCausalLM"):
        first_dpo_loss(model, folder, tmp_path)


def test_a_model_of_transformers_with_our_attention_is_refused(folder: Path) -> None:
    """TRL loads a reference with the attention that the policy's config names."""
    ours = TEModelsForCausalLM.from_pretrained(folder, device_map="cpu")
    named = ours.config._attn_implementation
    ids = torch.arange(20)[None] + 60
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=named)
    with pytest.raises(UsageError, match="without its recipe"):
        theirs(input_ids=ids)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "te", attn_implementation=named, device_map="cpu"
    )
    assert torch.equal(again(input_ids=ids).logits, ours(input_ids=ids).logits)
