"""A base model, how it is tuned, and what becomes of it, drawn at random; the last is compared with the first.

The first is the model as it was at the end of training, in the process that trained it (of peft: in transformers). The
last is what another command, another library or another process reads of the files: token ids of a conversation, text,
logits, and the tokens at which it stops. `judge(draw(number), folder)` raises an AssertionError where they differ.
"""

import contextlib
import copy
import io
import json
import random
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import families
import torch
from bases import CHATML, SPECIAL, write_chats
from hf_models import class_of, document_of, of_config
from judge import transformers
from torch import Tensor

from te_models import CausalLM, TEModelsForCausalLM, load_tokenizer
from te_models.cli import main
from te_models.errors import ConfigError, DataError, UsageError
from te_models.interop.hf_expert_families import dropped_by_peft
from te_models.training.finetune import finetune
from te_models.training.run_settings import run_settings
from te_models.training.trainer import Callback, Trainer

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_EOS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '[A]' + m.content + eos_token }}"
    "{% else %}{{ '[U]' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "marked": MARKED, "eos": WITH_EOS, "none": None}
END, TURN = 0, 2  # ids of <|endoftext|> and <|im_end|> in every tokenizer here
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
VOCABULARY = 320
PLACE: dict[str, Any] = dict(device="cpu", engine="emulated")
# Families whose files other programs read by code of their own, or that need more than these sizes.
LEFT_OUT = ("ministral",)
# Options of a run's shape that fit any family.
OPTIONS: tuple[dict[str, Any], ...] = (
    dict(rope_theta=123.0),
    dict(max_position_embeddings=200),
    dict(rms_norm_eps=0.03),
    dict(vocab_size=352),
    dict(sliding_window=7),
    dict(attention_gate="headwise"),
    dict(attention_gate="elementwise"),
    dict(rope_theta=77.0, vocab_size=328),
)
RECIPES = ("bf16", "bf16", "delayed", "current", "blockwise", "mxfp8", "nvfp4")
TARGETS = ("", "q_proj,v_proj", "o_proj,down_proj", "all-linear")


# The relative difference of logits that another order of sums in FP32 explains.
EXACT = 3e-4


class Refused(Exception):
    """The command refused the case in one line, which is no fault of what comes after."""


@dataclass(frozen=True)
class Case:
    """One draw; `describe` says it in a line."""

    number: int
    shape: str  # of families.CASES
    dtype: str
    tied: bool
    tokenizer: str
    template: str
    eos: Any
    pad_added: bool
    how: str
    data: str
    options: dict[str, Any]
    own_template: str
    own_tokenizer: bool
    targets: str
    outcomes: tuple[str, ...]
    recipe: str = "bf16"

    def describe(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items())


def draw(number: int, trl: bool = False) -> Case:
    """Return the case of a number; `trl` also draws runs of TRL, which has to be installed."""
    rng = random.Random(number)
    shapes = sorted(families.CASES)
    kinds = [name for name in families.FAMILY_CASES if name not in LEFT_OUT]
    family = rng.choice(kinds)
    how = rng.choice(("full", "lora", "lora", "lora", "peft", *(("trl",) if trl else ())))
    template = rng.choice(("chatml", "chatml", "marked", "eos", "none"))
    data = rng.choice(("chats", "chats", "pairs", "text"))
    if how == "trl":
        template, data = rng.choice(("chatml", "marked", "eos")), "chats"
    own_template = rng.choice(("", "", "", "chatml", "marked", "eos")) if data == "chats" else ""
    own = how in ("full", "lora")
    ways = {
        "full": ("resume", "convert", "convert te", "bf16", "fp8", "evaluate", "chat", "python", "wrap"),
        "lora": ("resume", "convert", "convert te", "bf16", "fp8", "evaluate", "chat", "python", "wrap",
                 "merged", "adapter", "peft"),
        "peft": ("convert", "convert te", "bf16", "fp8", "chat", "python", "wrap"),
        "trl": ("convert", "convert te", "bf16", "chat", "python", "wrap"),
    }  # fmt: skip
    return Case(
        number=number,
        shape=rng.choice([name for name in shapes if families.CASES[name][0] == family]),
        dtype=rng.choice(("float32", "float32", "bfloat16")),
        tied=rng.random() < 0.3,
        tokenizer=rng.choice(("bytes", "bytes", "metaspace")),
        template=template,
        eos=rng.choice((END, END, None, [END, 9], 9)),
        pad_added=rng.random() < 0.2,
        how=how,
        data=data,
        options=copy.deepcopy(rng.choice(OPTIONS)) if own and rng.random() < 0.6 else {},
        own_template=own_template if own or how == "peft" else "",
        own_tokenizer=rng.random() < 0.2 and how != "trl",
        targets=rng.choice(TARGETS),
        outcomes=tuple(rng.sample(ways[how], 3)),
        recipe=rng.choice(RECIPES) if own else "bf16",
    )


def make_tokenizer(kind: str, template: str | None, text: str = "") -> Any:
    """Return a tokenizer of transformers whose first ids are SPECIAL: byte-level BPE, or SentencePiece's kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    corpus = [
        "What is 2 + 2? The answer is 4. user assistant ### User: Assistant:\n [A] [U]" + text
    ] * 9
    letters = pre_tokenizers.ByteLevel.alphabet()
    if kind == "bytes":
        words = Tokenizer(models.BPE())
        words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        words.decoder = decoders.ByteLevel()
    else:
        words = Tokenizer(models.BPE(unk_token="<|endoftext|>", fuse_unk=True))
        words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        words.decoder = decoders.Metaspace(prepend_scheme="first")
        letters = [chr(number) for number in range(33, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 20,
        special_tokens=list(SPECIAL),
        initial_alphabet=letters,
        show_progress=False,
    )
    words.train_from_iterator(corpus, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=SPECIAL[0])
    tokenizer.chat_template = template
    return tokenizer


@dataclass
class World:
    """A case that was tuned: where its files are, and the first model's answers."""

    case: Case
    folder: Path
    base: Path
    logits: Tensor  # FP32 [1, S, V], under its recipe
    plain: Tensor  # FP32 [1, S, V], under bf16, for those that know no recipes
    stops: set[int]  # at which it stops
    wanted_stops: set[int]  # at which it has to
    template: str | None  # of the run
    vocabulary: dict[str, int]  # of the run
    eval_loss: float | None = None
    same_bits: bool = True  # of the folder read again, since it has the same modules
    generated: list[int] = field(default_factory=list)  # after QUESTION, greedy
    margin: float = 0.0  # between the two likeliest tokens, at its narrowest

    @property
    def run(self) -> Path:
        return self.folder / "run"


def ids_of(case: Case) -> Tensor:
    return torch.tensor([[(5 + 7 * place) % 280 for place in range(40)]])


@torch.no_grad()
def logits_of(model: Any, case: Case) -> Tensor:
    try:
        return model.eval()(ids_of(case)).logits.float()
    except RuntimeError as error:
        if "strides should be multiple of 16 bytes" in str(
            error
        ):  # grouped products of transformers
            raise Refused(str(error)) from None
        raise


def difference(found: Tensor, wanted: Tensor) -> float:
    """Return the relative difference of logits whose mean over the vocabulary is taken away."""
    if found.shape != wanted.shape:
        return float("inf")
    found, wanted = (each - each.mean(-1, keepdim=True) for each in (found, wanted))
    return ((found - wanted).norm() / wanted.norm()).item()


def quietly(arguments: list[str]) -> str:
    """Run a command in this process; return its standard output. A refusal is `Refused`, anything else an error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    said = err.getvalue().strip().splitlines()
    if code == 2:
        raise Refused(said[-1] if said else "")
    assert code == 0, (arguments, said[-3:])
    return out.getvalue()


def _widen(config: Any) -> None:
    """Make a shape's sizes multiples of 32, which the GEMMs of every recipe take."""
    for name, size in vars(config).items():
        if name == "hidden_size":
            config.hidden_size = 96  # for 3 and 6 heads
        elif name.endswith(("_size", "_rank", "head_dim")) and isinstance(size, int):
            setattr(config, name, -(-size // 32) * 32)
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type == "mistral4":  # whose config works it out when it is made
        whole = config.qk_nope_head_dim + config.qk_rope_head_dim
        rope["partial_rotary_factor"] = config.qk_rope_head_dim / whole
    if (
        "short_factor" in rope
    ):  # LongRoPE has a factor for each pair of channels, of which there are more now
        whole = getattr(config, "head_dim", None)
        whole = whole or config.hidden_size // config.num_attention_heads
        pairs = int(whole * rope.get("partial_rotary_factor", 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            rope[name] = (rope[name] * pairs)[:pairs]
    if config.model_type == "helium":  # whose o_proj is as wide as the residual stream
        config.head_dim = config.hidden_size // config.num_attention_heads
    if hasattr(config, "mamba_d_head"):
        inner = getattr(config, "mamba_d_ssm", None) or config.mamba_expand * config.hidden_size
        config.mamba_d_head = inner // config.mamba_n_heads


def write_base(case: Case, folder: Path) -> Any:
    """Save the base model with its tokenizer; return transformers' model."""
    torch.manual_seed(case.number)
    config = families.make_config(case.shape)
    if case.recipe != "bf16":
        _widen(config)
    config.vocab_size = VOCABULARY
    config.max_position_embeddings = 160
    config.eos_token_id = case.eos
    config.initializer_range = 0.1
    if (
        config.model_type == "youtu"
    ):  # transformers 5.24 zeroes this token's row whenever it reads the model
        config.pad_token_id = None
    if case.tied and case.shape.split("-")[0] not in ("gemma2", "gemma3_text"):
        config.tie_word_embeddings = True
    dtype = getattr(torch, case.dtype)
    model = of_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "norm" not in name:
                parameter.normal_(0, 0.12)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(case.tokenizer, TEMPLATES[case.template])
    if case.pad_added:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    return model


def write_data(case: Case, folder: Path) -> dict[str, Any]:
    """Write the records; return the settings that name them."""
    file = folder / f"{case.data}.jsonl"
    write_chats(file, 24)
    records = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    if case.data == "pairs":
        lines = [
            json.dumps({"prompt": q["content"], "completion": " " + a["content"]})
            for q, a in records
        ]
        file.write_text("\n".join(lines))
    if case.data == "text":
        file = folder / "text.txt"
        file.write_text("\n".join(f"{q['content']} {a['content']}" for q, a in records))
    held_out = folder / f"held-out{file.suffix}"
    held_out.write_text("\n".join(file.read_text().splitlines()[:6]))
    return dict(data=(str(file),), eval_data=(str(held_out),))


class Keep(Callback):
    """Keeps the trainer of a run, and with it the first model."""

    trainer: Trainer

    def on_step(self, trainer: Trainer, row: Any) -> None:
        self.trainer = trainer


def settings_of(case: Case, base: Path, folder: Path) -> dict[str, Any]:
    """Return the settings of a run, as options of the command give them."""
    given: dict[str, Any] = dict(
        model=str(base), steps=4, seq_len=96, batch_size=2, learning_rate=5e-3, schedule="constant",
        warmup_steps=0, recipe=case.recipe, sample_tokens=0, eval_every=2, memory_check=False, engine="emulated",
        device="cpu", **write_data(case, folder), **case.options,
    )  # fmt: skip
    if case.how == "lora":
        given |= dict(lora=3, lora_targets=case.targets, merge=True, learning_rate=2e-2)
    if case.recipe != "bf16":
        given |= dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    if case.own_template:
        path = folder / "own.jinja"
        path.write_text(TEMPLATES[case.own_template] or "")
        given["chat_template"] = str(path)
    if case.own_tokenizer:
        own = make_tokenizer(case.tokenizer, TEMPLATES[case.template], " other words than before")
        own.save_pretrained(folder / "own")
        given["tokenizer"] = str(folder / "own")
    return given


def train(given: dict[str, Any], out: Path, resume: bool = False) -> Trainer:
    keep = Keep()
    settings = run_settings("finetune", {**given, "out": str(out)})
    with contextlib.redirect_stdout(io.StringIO()):
        finetune(settings, resume=resume, callbacks=[keep])
    return keep.trainer


def wanted_stops(case: Case, template: str) -> set[int]:
    """Return where the model has to stop: at its own tokens, and at the one that ended its answers."""
    own = set() if case.eos is None else {case.eos} if isinstance(case.eos, int) else set(case.eos)
    ended_by_turn = case.data == "chats" and template in ("chatml", "marked")
    return own | {TURN if ended_by_turn else END}


def tune_ourselves(case: Case, folder: Path) -> World:
    base = folder / "base"
    write_base(case, base)
    given = settings_of(case, base, folder)
    trainer = train(given, folder / "run")
    model = trainer.model
    template = case.own_template or case.template
    words = make_tokenizer(
        case.tokenizer, None, " other words than before" if case.own_tokenizer else ""
    )
    if case.pad_added and not case.own_tokenizer:
        words.add_special_tokens({"pad_token": "[PAD]"})
    world = World(
        case,
        folder,
        base,
        logits_of(model, case),
        torch.empty(0),
        set(model.stop_token_ids),
        wanted_stops(case, template),
        TEMPLATES[template],
        words.get_vocab(),
        trainer.result.eval_loss,
    )
    _generate(world, model)
    model.set_recipe("bf16")
    world.plain = logits_of(model, case)
    return world


def _generate(world: World, model: CausalLM) -> None:
    """Note what the first model answers, by the tokenizer of its folder."""
    words = load_tokenizer(world.run)
    if words.template_source() is None:
        return
    ids = words.apply_chat_template(QUESTION)
    whole = model.generate([ids], max_new_tokens=8)[0].tolist()
    with torch.no_grad():
        logits = model(torch.tensor([whole])).logits[0, len(ids) - 1 : -1].float()
    best = logits.topk(2, -1).values
    world.generated = whole[len(ids) :]
    world.margin = ((best[:, 0] - best[:, 1]).min() / logits.std()).item()


def tune_with_peft(case: Case, folder: Path) -> World:
    import peft  # noqa: PLC0415  optional

    base = folder / "base"
    write_base(case, base)
    model = in_transformers(base)
    targets = case.targets.split(",") if case.targets not in ("", "all-linear") else "all-linear"
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError as error:  # names that this family does not have
            raise Refused(str(error)) from None
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(folder / "run")
    template, text = case.template, ""
    if case.own_template or case.own_tokenizer:
        template, text = case.own_template or case.template, " other words than before"
        own = make_tokenizer(case.tokenizer, TEMPLATES[template], text)
        own.save_pretrained(folder / "run")
    words = make_tokenizer(case.tokenizer, None, text)
    if case.pad_added and not text:
        words.add_special_tokens({"pad_token": "[PAD]"})
    logits = logits_of(adapted, case)
    own_stops = {case.eos} if isinstance(case.eos, int) else set(case.eos or ())
    world = World(
        case, folder, base, logits, logits, own_stops, own_stops, TEMPLATES[template],
        words.get_vocab(), same_bits=False,
    )  # fmt: skip
    return world


def tune_with_trl(case: Case, folder: Path) -> World:
    import datasets  # noqa: PLC0415  optional
    import trl  # noqa: PLC0415  optional

    base = folder / "base"
    write_base(case, base)
    told = write_data(case, folder)
    rows = [json.loads(line) for line in Path(told["data"][0]).read_text().splitlines()]
    model = TEModelsForCausalLM.from_pretrained(base, recipe="bf16", **PLACE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    arguments = trl.SFTConfig(
        output_dir=str(folder / "out"), max_steps=2, per_device_train_batch_size=2, learning_rate=5e-3,
        report_to=[], use_cpu=True, bf16=False, save_strategy="no", logging_strategy="no", max_length=96,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model, arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model(str(folder / "run"))
    template = TEMPLATES[case.template]
    stops = set(CausalLM.from_pretrained(folder / "run", **PLACE).stop_token_ids)
    logits = logits_of(model, case)
    return World(case, folder, base, logits, logits, stops, stops, template, tokenizer.get_vocab())


def tune(case: Case, folder: Path) -> World:
    """Return the tuned case; Refused where a line said that it cannot be."""
    ways: dict[str, Callable[[Case, Path], World]] = {
        "full": tune_ourselves,
        "lora": tune_ourselves,
        "peft": tune_with_peft,
        "trl": tune_with_trl,
    }
    return ways[case.how](case, folder)


# What becomes of it.


def tolerance(world: World, rounded: bool) -> float:
    """Return the relative difference that rounding explains: to BF16 of the weights, or in BF16's operations."""
    if world.case.dtype == "bfloat16":
        return 0.12
    return 0.05 if rounded else EXACT


def check_tokenizer(world: World, place: Path) -> None:
    """Check vocabulary, template and ids of a conversation by transformers and by our reader."""
    # AutoTokenizer gives some families a class that splits otherwise than a tokenizer.json of another kind says.
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(place)
    ours = load_tokenizer(place)
    assert theirs.get_vocab() == world.vocabulary, "another vocabulary"
    if world.template is None and world.case.data != "chats":
        return
    template = theirs.chat_template
    if world.template is not None:
        assert template == world.template, f"template {template}"
    elif world.case.how == "peft":
        return
    wanted = theirs.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    found = ours.apply_chat_template(QUESTION)
    assert found == wanted, f"ids of a conversation {found}, not {wanted}"


def check_model(world: World, model: Any, rounded: bool, what: str, recipe: bool = False) -> None:
    """Compare logits with the first model's, under its recipe if `recipe`, else under bf16."""
    wanted = world.logits if recipe else world.plain
    if recipe and world.case.recipe != "bf16" and world.case.how == "lora":
        # A merged weight is cast as one, where the adapter was beside the cast.
        own = model.model if isinstance(model, TEModelsForCausalLM) else model
        own.set_recipe("bf16")
        wanted = world.plain
    found = difference(logits_of(model, world.case), wanted)
    limit = tolerance(world, rounded)
    if found >= limit > EXACT and not recipe and _has_experts(world):
        # A rounding sends a token to another expert: with the same weights, in FP32, none does.
        found, limit = difference(logits_of(model, world.case), _logits_in_fp32(world)), EXACT
    assert found < limit, f"{what}: logits differ by {found:.2g}"


def _has_experts(world: World) -> bool:
    return CausalLM.from_pretrained(world.run, **PLACE).config.moe is not None


def _logits_in_fp32(world: World) -> Tensor:
    """Return the logits that the run's weights, rounded to BF16, have in operations of FP32."""
    folder, model = world.run, None
    for dtype in ("float32", "bfloat16", "float32"):  # adapters are merged before the rounding
        model = CausalLM.from_pretrained(folder, dtype=dtype, merge_adapters=True, **PLACE)
        folder = world.folder / f"in {dtype}"
        model.save_pretrained(folder)
    assert model is not None
    model.set_recipe("bf16")
    return logits_of(model, world.case)


def check_stops(world: World, place: Path) -> None:
    ids = json.loads((place / "generation_config.json").read_text()).get("eos_token_id")
    found = set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
    assert found == world.wanted_stops, f"stops at {found}, not {world.wanted_stops}"


def in_transformers(place: Path) -> Any:
    """Return transformers' model in FP32, in which its grouped products take experts of any size."""
    return class_of(document_of(place)["model_type"]).from_pretrained(
        place, trust_remote_code=True, attn_implementation="eager", dtype=torch.float32
    )


def convert(world: World) -> None:
    out = world.folder / "hf"
    quietly(["convert", "--model", str(world.run), "--out", str(out)])
    theirs = in_transformers(out)
    check_model(world, theirs, False, "transformers")
    check_tokenizer(world, out)
    check_stops(world, out)
    exact = world.case.dtype == "float32" and world.case.recipe == "bf16"
    if world.generated and exact and world.margin > 0.01:
        ids = load_tokenizer(out).apply_chat_template(QUESTION)
        options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
        text = theirs.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
        assert text == world.generated, f"text {text}, not {world.generated}"


def convert_te(world: World) -> None:
    out = world.folder / "te"
    quietly(["convert", "--model", str(world.run), "--format", "te", "--out", str(out)])
    model = CausalLM.from_pretrained(out, **PLACE)
    check_model(world, model, False, "te", recipe=True)
    check_tokenizer(world, out)
    assert set(model.stop_token_ids) == world.wanted_stops, f"stops at {model.stop_token_ids}"


def bf16(world: World) -> None:
    out = world.folder / "bf16"
    quietly(
        [
            "export",
            "--model",
            str(world.run),
            "--format",
            "bf16",
            "--out",
            str(out),
            "--device",
            "cpu",
        ]
    )
    check_model(world, in_transformers(out), True, "bf16 in transformers")
    check_tokenizer(world, out)
    check_stops(world, out)


def fp8(world: World) -> None:
    out = world.folder / "fp8"
    quietly(
        [
            "export",
            "--model",
            str(world.run),
            "--format",
            "fp8-channel",
            "--out",
            str(out),
            "--device",
            "cpu",
        ]
    )
    model = CausalLM.from_pretrained(out, recipe="bf16", **PLACE)
    found = difference(logits_of(model, world.case), world.plain)
    if _has_experts(
        world
    ):  # routers choose others for some tokens, so that the median token counts
        pairs = zip(logits_of(model, world.case)[0], world.plain[0], strict=True)
        found = statistics.median(difference(token, wanted) for token, wanted in pairs)
    assert found < 0.35, f"fp8: logits differ by {found:.2g}"
    check_tokenizer(world, out)
    check_stops(world, out)


def python(world: World) -> None:
    """Read the folder as it is, adapters included: every bit is that of the run."""
    model = CausalLM.from_pretrained(world.run, **PLACE)
    if world.same_bits and world.case.how in ("full", "lora"):
        assert torch.equal(logits_of(model, world.case), world.logits), (
            "from_pretrained has other bits"
        )
    check_model(world, model, False, "from_pretrained", recipe=True)
    assert set(model.stop_token_ids) == world.wanted_stops, f"stops at {model.stop_token_ids}"


def wrap(world: World) -> None:
    model = TEModelsForCausalLM.from_pretrained(world.run, **PLACE)
    check_model(world, model, False, "TEModelsForCausalLM", recipe=True)
    ids = model.generation_config.eos_token_id
    found = set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
    assert found == world.wanted_stops or (not found and model.config.eos_token_id is not None)


def merged(world: World) -> None:
    model = CausalLM.from_pretrained(world.run / "merged", **PLACE)
    check_model(world, model, False, "merged", recipe=True)
    check_tokenizer(world, world.run / "merged")
    assert set(model.stop_token_ids) == world.wanted_stops, f"stops at {model.stop_token_ids}"


def adapter(world: World) -> None:
    model = CausalLM.from_pretrained(world.run / "adapter", **PLACE)
    assert torch.equal(logits_of(model, world.case), world.logits), "adapter/ has other bits"


def in_peft(world: World) -> None:
    """Read adapter/ with peft in transformers, which knows no options of the shape."""
    import peft  # noqa: PLC0415  optional

    config = json.loads((world.run / "adapter" / "adapter_config.json").read_text())
    family = families.CASES[world.case.shape][0]
    if world.case.options or dropped_by_peft(family, config["target_modules"]):
        return  # adapters of dense or shared MLPs, of which save_lora warned
    model = in_transformers(world.base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(model, world.run / "adapter")
    check_model(world, adapted, False, "peft")


def evaluate(world: World) -> None:
    held_out = next(world.folder.glob("held-out*"))
    told = [
        "evaluate",
        "--model",
        str(world.run),
        "--data",
        str(held_out),
        "--json",
        "--seq-len",
        "96",
    ]
    found = json.loads(quietly([*told, "--device", "cpu", "--batch-size", "2"]))["losses"][0][
        "loss"
    ]
    limit = 0.02 if world.case.dtype == "bfloat16" else 2e-4
    if world.case.data != "text":  # whose windows may be others
        assert abs(found - (world.eval_loss or 0)) < limit, f"loss {found}, not {world.eval_loss}"


def chat(world: World) -> None:
    if not world.generated:
        return
    told = [
        "generate",
        "--model",
        str(world.run),
        "--chat",
        "--prompt",
        QUESTION[0]["content"],
        "--greedy",
    ]
    said = quietly([*told, "--max-new-tokens", "8", "--device", "cpu"])
    words = load_tokenizer(world.run)
    ids = [
        token for token in world.generated if token not in world.wanted_stops | {words.eos_token_id}
    ]
    before = words.apply_chat_template(QUESTION)
    whole = words.decode([*before, *ids])
    assert said.rstrip("\n") == whole[len(words.decode(before)) :].rstrip("\n"), (
        said,
        world.generated,
    )


def resume(world: World) -> None:
    given = settings_of(world.case, world.base, world.folder)
    parts = world.folder / "parts"
    train({**given, "steps": 2}, parts)
    if world.case.number % 2:
        (parts / "run.toml").unlink()
    trainer = train(given, parts, resume=True)
    found = logits_of(trainer.model, world.case)
    assert torch.equal(found, world.logits), f"resumed: {difference(found, world.logits):.2g}"
    stops = trainer.model.stop_token_ids
    assert set(stops) == world.wanted_stops, f"stops at {stops}"


OUTCOMES: dict[str, Callable[[World], None]] = {
    "resume": resume, "convert": convert, "convert te": convert_te, "bf16": bf16, "fp8": fp8,
    "evaluate": evaluate, "chat": chat, "python": python, "wrap": wrap, "merged": merged, "adapter": adapter,
    "peft": in_peft,
}  # fmt: skip


def judge(case: Case, folder: Path) -> dict[str, str]:
    """Tune a case and compare what becomes of it; return outcome -> what was refused, in a line."""
    refused = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            world = tune(case, folder)
        except (Refused, ConfigError, DataError, UsageError) as error:
            return {"tuning": str(error).splitlines()[0]}
        assert world.stops == world.wanted_stops, (
            f"stops at {world.stops}, not {world.wanted_stops}"
        )
        for name in case.outcomes:
            try:
                OUTCOMES[name](world)
            except Refused as error:
                refused[name] = str(error)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}\n{case.describe()}") from None
            except Exception as error:
                raise AssertionError(
                    f"{name}: {type(error).__name__}: {error}\n{case.describe()}"
                ) from error
    return refused
