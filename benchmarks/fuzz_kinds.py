"""The kinds of saved folders that benchmarks.fuzz damages: how each is made and loaded, and the live run beside it."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from te_models import CausalLM
from te_models.config.model import config_fields
from te_models.config.presets import get_preset
from te_models.config.recipe import get_recipe
from te_models.config.toml import render_toml
from te_models.config.training import TrainConfig
from te_models.data.chat_template import SECONDS as TEMPLATE_SECONDS
from te_models.data.chat_template import ChatTemplate, template_source, template_tokens
from te_models.data.corpus_chunks import ChunkReader, find_chunks
from te_models.data.dataset import TokenDataset
from te_models.data.documents import Document, load_documents
from te_models.data.json_files import read_json_object
from te_models.data.sources import open_sources
from te_models.data.tokenizer import load_tokenizer
from te_models.errors import DataError, TeModelsError
from te_models.files.formats import flatten_state
from te_models.fp8.scaling_state import fp8_state
from te_models.planning.memory_plan import plan_memory
from te_models.saving.load_model import load_te_checkpoint
from te_models.training.run_file import read_provenance
from te_models.training.run_settings import run_settings
from te_models.training.settings import RUN_FILE
from te_models.training.trainer import Trainer

SECONDS = 5.0
SHAPE = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=1,
    num_key_value_heads=1,
)
PLACE: dict[str, Any] = dict(engine="emulated", device="cpu")
SECRET = "TE_MODELS_FUZZ_SECRET"  # an environment variable that no template may see
TEXT = [Document(f"line {i}: the quick brown fox\n" * 4) for i in range(12)]
CONVERSATION = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
TEMPLATE = """{{ bos_token }}{% macro turn(m) %}<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}{% endmacro %}
{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('role ' ~ m.role) }}{% endif %}
{{ turn(m) }}{% endfor %}{% set n = namespace(i=messages | length) %}{{ n.i * 2 }}{{ messages | tojson }}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""


def build(recipe: str = "delayed") -> CausalLM:
    """A model of some steps, with scales that are not 1."""
    torch.manual_seed(0)
    options: dict[str, Any] = dict(amax_history_len=4) if recipe == "delayed" else {}
    edges: dict[str, Any] = (
        dict(num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1) if options else {}
    )
    model = CausalLM.from_preset("gated-nano", recipe=recipe, **SHAPE, **PLACE, **options, **edges)
    ids = torch.arange(32).reshape(2, 16)
    for _ in range(2):
        loss = model(ids, labels=ids).loss
        assert loss is not None
        loss.backward()
    model.zero_grad()
    return model


def make_trainer(out: Path) -> Trainer:
    """A run whose checkpoints have their tensors in several files."""
    torch.manual_seed(1)
    config = TrainConfig(
        steps=2, batch_size=2, seq_len=16, warmup_steps=1, eval_every=0, save_every=1
    )
    words = load_tokenizer(None)
    trainer = Trainer(build(), TokenDataset(TEXT, words, 16, batch_size=2, seed=0), [], config, out)
    trainer.checkpoints.max_shard_bytes = 20_000
    return trainer


def make_folders(root: Path) -> None:
    """One folder of each kind."""
    model, words = build(), load_tokenizer(None)
    model.save_pretrained(root / "own")
    words.save(root / "words")
    plain = CausalLM.from_preset("gated-nano", attention_gate="none", **SHAPE, **PLACE)
    plain.save_pretrained(root / "hf", format="hf")
    words.save(root / "hf")
    for format in ("fp8-block", "nvfp4"):
        plain.export(root / format, format)
    (root / "te").mkdir()
    torch.save(model.state_dict(), root / "te" / "model.pt")
    make_trainer(root / "run").run()
    (root / "chat").mkdir()
    (root / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    tokens = dict(bos_token="<s>", eos_token={"content": "</s>"}, chat_template=TEMPLATE)
    (root / "chat" / "tokenizer_config.json").write_text(json.dumps(tokens))
    make_data(root / "data")
    make_run_file(root / "settings")
    with contextlib.suppress(ImportError, TeModelsError):
        from te_models.training.lora import add_lora, save_lora

        save_lora(add_lora(model, r=2), root / "lora")


def make_data(folder: Path) -> None:
    """A corpus in every format: text, JSONL plain and compressed, Parquet."""
    (folder / "more").mkdir(parents=True)
    rows = "".join(
        json.dumps({"text": f"{i} the quick brown fox \u00fc\n" * 3}) + "\n" for i in range(8)
    )
    pairs = "".join(
        json.dumps({"prompt": f"{i} + 1 =", "completion": f" {i + 1}"}) + "\n" for i in range(8)
    )
    (folder / "a.jsonl").write_text(rows)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(pairs.encode(), mtime=0))
    (folder / "more" / "c.txt").write_text("jumps over the lazy dog\n" * 20)
    with contextlib.suppress(ImportError):
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": [f"row {i} of a table" for i in range(8)]})
        pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=3)


def make_run_file(folder: Path) -> None:
    """The run.toml of a run of a small model."""
    folder.mkdir()
    sections: dict[str, dict[str, Any]] = {
        "run": dict(command="pretrain", preset="gated-nano", sample_tokens=8, log=""),
        "model": {**PLACE, "compile": False, "fp8_params": False, "activation_checkpointing": "none"},
        "recipe": get_recipe("delayed", amax_history_len=4).to_dict(),
        "shape": {**SHAPE, "vocab_size": 288, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                  "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}},
        "data": dict(data=["a.jsonl:2", "b"], eval_split=0.1, streaming=False, packing="documents", data_workers=0),
        "training": asdict(TrainConfig(steps=2, batch_size=2, seq_len=16)),
        "record": dict(id="0123abcd", commands=["te-models pretrain"], versions={"torch": torch.__version__}),
    }  # fmt: skip
    (folder / RUN_FILE).write_text(render_toml(sections, "Every setting"))


class Live:
    """A live model and a live run, and whether anything changed them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trainer = make_trainer(root / "run")
        self.reset()

    def reset(self) -> None:
        """Make the state that refused loads must not change."""
        self.model = build()
        self.restore(self.root / "run")
        self.before = self.digest()

    def restore(self, run: Path) -> None:
        """Continue the live run from the newest checkpoint in a folder."""
        self.trainer.checkpoints.root = run / "checkpoints"
        self.trainer.restore()

    def digest(self) -> str:
        """The hash of every parameter and scale, and of the run's optimizer, data position and result."""
        found, trainer = hashlib.sha256(), self.trainer
        training = [
            trainer.optimizer.state_dict(),
            trainer.dataset.state_dict(),
            vars(trainer.result),
        ]
        tensors, document = flatten_state(training)
        for state in (
            state_of(self.model),
            state_of(trainer.model),
            {n: data_of(t) for n, t in tensors.items()},
        ):
            for name, data in sorted(state.items()):
                found.update(name.encode() + data)
        frozen = [name for name, p in self.model.named_parameters() if not p.requires_grad]
        found.update(json.dumps([document, frozen]).encode())
        return found.hexdigest()


def data_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def state_of(model: Any) -> dict[str, bytes]:
    """Every parameter and scale of a model."""
    return {
        name: data_of(t)
        for name, t in {**dict(model.named_parameters()), **fp8_state(model)}.items()
    }


def load_own(folder: Path, live: Live) -> Any:
    """Return the content of a folder of ours or of Hugging Face in a form that can be compared."""
    return state_of(CausalLM.from_pretrained(folder, **PLACE))


def load_run(folder: Path, live: Live) -> Any:
    """The newest checkpoint of a run into the live run, which a refusal must not change."""
    live.restore(folder)
    state = live.digest(), data_of(torch.get_rng_state())
    live.reset()
    return state


def load_te(folder: Path, live: Live) -> Any:
    """Transformer Engine's checkpoint into the live model, which a refusal must not change."""
    load_te_checkpoint(live.model, folder / "model.pt")
    state = state_of(live.model)
    live.reset()
    return state


def load_adapter(folder: Path, live: Live) -> Any:
    """A LoRA adapter on the live model, which a refusal must not change."""
    from te_models.training.lora import load_lora

    state = state_of(load_lora(live.model, folder))
    live.reset()
    return state


def load_words(folder: Path, live: Live) -> Any:
    """Load a tokenizer and encode a text."""
    words = load_tokenizer(folder)
    return words.encode("the quick brown fox <eos>"), words.eos_token_id


def load_chat(folder: Path, live: Live) -> Any:
    """Load a chat template and render a conversation, without a word of the environment."""
    os.environ[SECRET] = "sesame"
    source, config = (
        template_source(folder),
        read_json_object(folder / "tokenizer_config.json") or {},
    )
    if source is None:
        raise DataError(f"{folder} has no chat template")
    text = ChatTemplate(source, template_tokens(config)).render(CONVERSATION)
    assert "sesame" not in text
    return text


def load_data(folder: Path, live: Live) -> Any:
    """The documents of a corpus, which are the same in memory and streamed, or refused both times."""

    def in_memory() -> str:
        open_sources([str(folder)], {})
        return "".join(f"{d.prompt or ''}{d.text}" for d in load_documents(folder))

    def streamed() -> str:
        chunks = find_chunks(str(folder), 400)
        reader = ChunkReader(chunks.source, load_tokenizer(None), 0)
        found = [d for number in range(len(chunks)) for d in reader.documents(chunks[number])]
        if not found:
            raise DataError("no text")
        return "".join(f"{d.prompt or ''}{d.text}" for d in found)

    outcomes: list[str | TeModelsError] = []
    for read in (in_memory, streamed):
        try:
            outcomes.append(
                "".join(read().split())
            )  # a streamed text ends where a range does, and blank ends are dropped
        except TeModelsError as error:
            outcomes.append(error)
    one, other = outcomes
    assert isinstance(one, str) == isinstance(other, str), (
        f"in memory {one!s:.100}, streamed {other!s:.100}"
    )
    assert not isinstance(one, str) or one == other, "in memory and streamed differ"
    for outcome in outcomes:
        if isinstance(outcome, TeModelsError):
            raise outcome
    return one


def load_settings(folder: Path, live: Live) -> Any:
    """The settings and the record in a run.toml, the model that they describe, and the memory that it would take."""
    settings = run_settings("finetune", {}, folder / RUN_FILE)
    record = dict(read_provenance(folder))
    shape = get_preset(
        str(settings.preset), **{n: v for n, v in settings.build.items() if n in config_fields()}
    )
    recipe = get_recipe("bf16" if settings.recipe == "auto" else settings.recipe)
    train = settings.train
    plan = plan_memory(
        shape, recipe, batch_size=train.batch_size, seq_len=train.seq_len, optimizer=train.optimizer
    )
    return [repr(settings), repr(record), repr(shape), repr(recipe), plan.peak.total]


def load_interface(folder: Path, live: Live) -> Any:
    """A folder of ours as a model of transformers."""
    from te_models.huggingface.modeling import TEModelsForCausalLM

    return state_of(TEModelsForCausalLM.from_pretrained(folder, **PLACE).model)


class Kind(NamedTuple):
    """A kind of folder, whether its manifests are made to fit after the damage, its loader,
    and the loader's time in s."""

    folder: str
    fits: bool
    load: Callable[[Path, Live], Any]
    seconds: float = SECONDS


KINDS: dict[str, Kind] = {
    "own, damaged": Kind("own", False, load_own),
    "own, crafted": Kind("own", True, load_own),
    "sharded run, damaged": Kind("run", False, load_run),
    "sharded run, crafted": Kind("run", True, load_run),
    "Hugging Face": Kind("hf", False, load_own),
    "Hugging Face, FP8": Kind("fp8-block", False, load_own),
    "Hugging Face, NVFP4": Kind("nvfp4", False, load_own),
    "interface of transformers": Kind("own", True, load_interface),
    "run.toml": Kind("settings", False, load_settings),
    "Transformer Engine": Kind("te", False, load_te),
    "LoRA, damaged": Kind("lora", False, load_adapter),
    "LoRA, crafted": Kind("lora", True, load_adapter),
    "tokenizer": Kind("words", False, load_words),
    "chat template": Kind("chat", False, load_chat, SECONDS + TEMPLATE_SECONDS),
    "data": Kind("data", False, load_data),
}
