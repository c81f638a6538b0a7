"""Fine-tune shapes of Qwen3-0.6B, Llama-3.1-8B and Qwen3.5-2B on chat records, beside TRL's SFTTrainer.

    python benchmarks/finetune_against_trl.py run --out benchmarks/results/finetune_against_trl_h200.json
    python benchmarks/finetune_against_trl.py run --tiny --device cpu --out finetune.json    # anywhere

It takes 10 minutes on one GPU. 2,000 conversations of mixed length (functions of Python's standard library as
questions, their docstrings as answers, one to twelve turns) are rendered, labeled and packed by te-models. TRL gets
the same rows, so both train on the same tokens with the same labels, from the same random weights; losses are compared
after the last step.

Each variant runs in its own process. Both use BF16 weights without masters, an 8-bit AdamW with stochastic
rounding (full) or AdamW (LoRA), the same recomputation of activations, batch and sequence length. TRL's attention is
PyTorch's SDPA: "trl" sees the documents of a row as one, which is its fastest way without FlashAttention's package;
"trl-documents" knows where each begins, as te-models does. "current+offload" stores the inputs of blocks on the host.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import click
import torch

from te_models import CausalLM
from te_models.config.presets import get_preset
from te_models.config.training import TrainConfig
from te_models.data.python_docstrings import python_docstrings
from te_models.data.tokenizer import load_tokenizer
from te_models.data.training_data import open_data
from te_models.inspect.environment import environment
from te_models.kernels.delta_rule import runs_on_kernels

RANK = 16
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": dict(seq_len=4096, batch_size=4, recompute="none", learning_rate=2e-5),
    "llama-3.1-8b": dict(
        seq_len=4096, batch_size=2, recompute="full", learning_rate=1e-6
    ),  # 2e-5 diverges: no warm-up
    "qwen3.5-2b": dict(seq_len=4096, batch_size=2, recompute="full", learning_rate=5e-6),
}
TINY = dict(vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32)  # fmt: skip
TINY_HYBRID = dict(
    layer_types=("linear_attention",) * 3 + ("full_attention",),
    linear_attention=dict(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16),
)
WAYS = ("trl", "trl-documents", "bf16", "delayed", "current", "current+offload")
STEPS, WARM_UP = 24, 8


def write_records(path: Path, count: int) -> None:
    """Write conversations of one to twelve turns, of the mixed lengths that functions and docstrings have."""
    pairs = [pair for side in python_docstrings() for pair in side]
    with path.open("w") as file:
        place = 0
        for number in range(count):
            messages = []
            for _ in range(1 + (number * 7) % 12):
                pair = pairs[place % len(pairs)]
                place += 1
                messages += [dict(role="user", content=f"Document this function.\n{pair.prompt}"),
                             dict(role="assistant", content=pair.text)]  # fmt: skip
            file.write(json.dumps(dict(messages=messages)) + "\n")


@dataclasses.dataclass(frozen=True)
class Job:
    """One variant."""

    shape: str
    method: str  # "full" or "lora"
    way: str
    device: str
    data: str
    tokenizer: str
    tiny: bool

    def settings(self) -> dict[str, Any]:
        found = dict(SHAPES[self.shape])
        return found | dict(seq_len=256, batch_size=2) if self.tiny else found

    def shape_options(self) -> dict[str, Any]:
        """Return what shrinks the preset, where that was asked for."""
        hybrid = TINY_HYBRID if get_preset(self.shape).linear_attention else {}
        return TINY | hybrid if self.tiny else {}

    def train_config(self) -> TrainConfig:
        own = self.settings()
        quantized = self.method == "full" and not self.tiny
        return TrainConfig(
            steps=STEPS, seq_len=own["seq_len"], batch_size=own["batch_size"], eval_every=0, save_every=0,
            learning_rate=2e-4 if self.method == "lora" else own["learning_rate"], schedule="constant",
            warmup_steps=0, weight_decay=0.0, optimizer="adamw8bit" if quantized else "adamw",
            optimizer_options=dict(stochastic_rounding=True) if quantized else {},
        )  # fmt: skip

    def rows(self) -> Any:
        """Return the packed dataset."""
        return open_data(self.data, load_tokenizer(self.tokenizer), self.train_config())[0]


def ours(job: Job) -> dict[str, Any]:
    """Train with te-models; return losses, gradient norms, seconds per step and peak memory."""
    from te_models.training.lora_run import LoraRun
    from te_models.training.settings import LoraSettings
    from te_models.training.trainer import Trainer

    torch.manual_seed(0)
    recipe, _, offload = job.way.partition("+")
    fp8_params = job.method == "lora" and recipe != "bf16"
    model = CausalLM.from_preset(job.shape, recipe=recipe, device=job.device, fp8_params=fp8_params,
                                 activation_checkpointing=job.settings()["recompute"],
                                 activation_offload=bool(offload), **job.shape_options())  # fmt: skip
    saved = (
        LoraRun(model, LoraSettings(rank=RANK, alpha=2.0 * RANK), None)
        if job.method == "lora"
        else None
    )
    run = Trainer(model, job.rows(), [], job.train_config(), Path("unused"), saved=saved)
    return measure(run.steps(iter(run.dataset)), job.device)


def measure(rows: Any, device: str) -> dict[str, Any]:
    """Run the steps of an iterator of metrics, and time those after the warm-up."""
    losses, norms, times = [], [], []
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()  # not later: the eager steps allocate what the graph then owns
    start = time.perf_counter()
    for row in rows:
        losses.append(row["loss"])
        norms.append(row["grad_norm"])
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
    peak = torch.cuda.max_memory_allocated() if device != "cpu" else None
    return dict(
        losses=losses,
        norms=norms,
        times=times,
        seconds=statistics.median(times[WARM_UP:]),
        peak=peak,
    )


def as_dataset(rows: list[dict[str, list[int]]]) -> Any:
    """Return the rows as a dataset of `datasets`, or of what stands in for it."""
    import datasets

    if hasattr(datasets.Dataset, "from_list"):
        return datasets.Dataset.from_list(rows)

    class Rows(datasets.Dataset):
        column_names = ["input_ids", "labels"]
        cache_files: list[str] = []

        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return rows[index]

        def __iter__(self) -> Any:
            return iter(rows)

    return Rows()


def stand_in_for_datasets() -> None:
    """Let TRL be imported where `datasets` is missing: it needs only its class names, since rows come packed."""
    if "datasets" in sys.modules or importlib.util.find_spec("datasets") is not None:
        return
    made: dict[str, Any] = {}
    for name in ("datasets", "datasets.fingerprint", "datasets.arrow_writer"):
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__version__ = "4.7.0"

        def attribute(wanted: str) -> Any:
            if wanted.startswith("__"):
                raise AttributeError(wanted)
            return made.setdefault(wanted, type(wanted, (), {}))

        module.__getattr__ = attribute
        sys.modules[name] = module


def theirs(job: Job) -> dict[str, Any]:
    """Train with TRL's SFTTrainer; the same results as of `ours`."""
    stand_in_for_datasets()
    # flash-linear-attention refuses some GPUs without our kernel, which this registers.
    runs_on_kernels(torch.device(job.device), torch.bfloat16)
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    own, on_gpu = job.settings(), job.device != "cpu"
    batches = list(zip(range(STEPS), job.rows(), strict=False))
    rows = [{name: batch[name][n].tolist() for name in ("input_ids", "labels")} | places(job, batch["document_ids"][n])
            for _, batch in batches for n in range(own["batch_size"])]  # fmt: skip
    shape = get_preset(job.shape, **job.shape_options())
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(
            their_config(shape), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.load_state_dict(our_weights(job))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{job.tokenizer}/tokenizer.json", eos_token="<|endoftext|>",
                                        pad_token="<|endoftext|>")  # fmt: skip
    train = job.train_config()
    if train.optimizer == "adamw8bit":
        optimizer = dict(optim="adamw_torch_8bit", optim_args="bf16_stochastic_round=True")
    else:
        optimizer = dict(optim="adamw_torch_fused" if on_gpu else "adamw_torch")
    options = SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=own["batch_size"], report_to=[],
        save_strategy="no", logging_steps=1, learning_rate=train.learning_rate, lr_scheduler_type="constant",
        weight_decay=0.0, bf16=on_gpu, use_cpu=not on_gpu, max_length=own["seq_len"], disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True}, gradient_checkpointing=own["recompute"] == "full",
        **optimizer,
        train_sampling_strategy="sequential", remove_unused_columns=False,
    )  # fmt: skip
    found: dict[str, Any] = dict(losses=[], norms=[], times=[])

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            found["times"].append(time.perf_counter())

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if logs and "loss" in logs:
                found["losses"].append(float(logs["loss"]))
                found["norms"].append(float(logs["grad_norm"]))

    adapters = (
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        if job.method == "lora"
        else None
    )
    trainer = SFTTrainer(model=model, args=options, train_dataset=as_dataset(rows), processing_class=tokenizer,
                         peft_config=adapters, callbacks=[Watch()], data_collator=stack)  # fmt: skip
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    gaps = [b - a for a, b in zip(found["times"], found["times"][1:], strict=False)]
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    results = dict(losses=found["losses"], norms=found["norms"], times=gaps)
    return dict(results, seconds=statistics.median(gaps[WARM_UP - 1 :]), peak=peak)


def stack(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return the rows as one batch."""
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def our_weights(job: Job) -> dict[str, torch.Tensor]:
    """Return the weights that `ours` starts from, under the names of transformers."""
    from te_models.interop.hf_families import family_for
    from te_models.interop.tensor_places import tensor_places
    from te_models.saving.pretrained import weights

    torch.manual_seed(0)
    model = CausalLM.from_preset(job.shape, recipe="bf16", device=job.device, **job.shape_options())
    own = weights(model)
    places = tensor_places(
        family_for(model.config), model.config, {name: p.shape for name, p in own.items()}
    )
    found = {name: place.save(own[place.name]) for name, place in places.items()}
    if model.config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def places(job: Job, documents: torch.Tensor) -> dict[str, list[int]]:
    """Return the positions [S] by which transformers tells the documents of a row apart; a mask of ones for one."""
    if job.way == "trl":
        return dict(attention_mask=[1] * len(documents))
    starts = torch.nn.functional.pad(documents[1:] != documents[:-1], (1, 0), value=True)
    place = torch.arange(len(documents))
    return dict(position_ids=(place - torch.where(starts, place, 0).cummax(0).values).tolist())


def their_config(config: Any) -> Any:
    """Return the transformers config of a ModelConfig."""
    from transformers import CONFIG_MAPPING

    from te_models.interop.hf_families import family_for

    family = family_for(config)
    return CONFIG_MAPPING[family.model_type](
        **{k: v for k, v in family.write(config).items() if k != "architectures"}
    )


@click.group()
def main() -> None:
    """Run all variants, or one."""


@main.command(hidden=True)
@click.argument("job")
def one(job: str) -> None:
    """Run one variant in this process and print its result as JSON."""
    made = Job(**json.loads(job))
    found = theirs(made) if made.way.startswith("trl") else ours(made)
    print("RESULT " + json.dumps(found), flush=True)


@main.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--device", default="cuda")
@click.option("--tiny", is_flag=True)
@click.option("--shapes", default=",".join(SHAPES))
@click.option("--methods", default="full,lora")
@click.option("--ways", default=",".join(WAYS))
@click.option(
    "--tokenizer", default=str(Path(__file__).parent.parent / "te_models/pretrained/gated-nano")
)
@click.option("--seconds", default=1e9, help="No variant starts after this many.")
def run(
    out: Path,
    device: str,
    tiny: bool,
    shapes: str,
    methods: str,
    ways: str,
    tokenizer: str,
    seconds: float,
) -> None:
    """Run all variants, each in its own process, and write the results after each."""
    begun = time.perf_counter()
    document: dict[str, Any] = dict(
        environment=environment(), rank=RANK, steps=STEPS, warm_up=WARM_UP, shapes=SHAPES, rows=[]
    )
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "chat.jsonl"
        write_records(data, 60 if tiny else 2000)
        for shape in shapes.split(","):
            for method in methods.split(","):
                for way in ways.split(","):
                    if time.perf_counter() - begun > seconds:
                        continue
                    job = Job(shape, method, way, device, str(data), tokenizer, tiny)
                    command = [sys.executable, __file__, "one", json.dumps(dataclasses.asdict(job))]
                    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
                    lines = [
                        line for line in done.stdout.splitlines() if line.startswith("RESULT ")
                    ]
                    row: dict[str, Any] = dict(shape=shape, method=method, way=way)
                    if lines:
                        row |= json.loads(lines[-1][7:])
                        tokens = job.settings()["batch_size"] * job.settings()["seq_len"]
                        row["tokens_per_second"] = tokens / row["seconds"]
                    else:
                        row["error"] = done.stderr[-1500:]
                    document["rows"].append(row)
                    out.write_text(json.dumps(document, indent=1) + "\n")
                    print(
                        {k: v[-1:] if isinstance(v, list) else v for k, v in row.items()},
                        flush=True,
                    )


if __name__ == "__main__":
    main()
