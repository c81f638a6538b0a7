"""`te-models finetune` from data to sample, as a function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from te_models.causal_lm import CausalLM
from te_models.config.training import TrainConfig
from te_models.data.dataset import check_vocabulary
from te_models.data.streaming import StreamingDataset
from te_models.data.tokenizer import Tokenizer, load_tokenizer
from te_models.data.training_data import open_data
from te_models.errors import UsageError
from te_models.generation.options import GenerationOptions
from te_models.generation.text import continue_text
from te_models.optim import resolve_options
from te_models.training.launch import parallel, restarts
from te_models.training.metrics import read_metrics
from te_models.training.parallel import Parallel
from te_models.training.plots import plot_losses, try_drawing
from te_models.training.report import outcome, progress, summary
from te_models.training.resume import run_folder, saved_choices, starting_step
from te_models.training.trainer import Result, Trainer

SAMPLE_PROMPT = "def "
Build = Callable[..., CausalLM]


def finetune(
    build: Build,
    *,
    device: str | None = None,
    label: str | None = None,
    model_folder: str | None = None,
    recipe: str | None = None,
    data: str | None = None,
    streaming: bool | None = None,
    packing: str = "stream",
    data_workers: int = 2,
    tokenizer: str | None = None,
    out: str | None = None,
    resume: bool = False,
    sample_tokens: int = 200,
    train: dict[str, Any],
) -> Result:
    """Train the model that `build` returns, and print a summary, progress, the result and a sample.

    Under torchrun every process calls this.

    Args:
        build: builds the model with its first argument, a function with CausalLM's arguments; given as keywords are the
            choices of a resumed run, which hold where the user has made none.
        device: see te_models.training.launch.parallel.
        label: the model's part of the default folder's name; None: the name of `model_folder`.
        model_folder: the folder of the model to start from, if any: its tokenizer is the default.
        recipe: the recipe that the user named, if any: part of the default folder's name.
        data: path of the corpus; None: Python's documentation and sources.
        streaming: see te_models.data.training_data.open_data, as for `packing`.
        packing: "stream" or "documents".
        data_workers: processes that encode a streamed corpus ahead.
        tokenizer: path of a tokenizer; None: the model's own, else bytes.
        out: the run's folder; None: runs/<label>-<recipe>.
        resume: continue from the newest checkpoint in `out`.
        sample_tokens: length of the sample printed at the end; 0: none.
        train: fields of TrainConfig.

    Raises:
        ValueError: a mistake in the arguments; nothing has been written.
        Diverged: the loss became NaN or infinite.
        LostPeer: another process of the run died.
    """
    config = TrainConfig(**train)
    resolve_options(config.optimizer, config.optimizer_options)  # fail before reading data
    with parallel(config, device) as shared:
        console = Console(markup=False, emoji=False, quiet=not shared.ranks.first)
        words = load_tokenizer(tokenizer or model_folder)
        dataset, eval_batches = open_data(
            data,
            words,
            dataclasses.replace(config, batch_size=shared.rows(config.batch_size)),
            streaming=streaming,
            packing=packing,
            num_workers=data_workers,
            rank=shared.data_rank,
            world_size=shared.data_world,
            ranks=shared.ranks,
        )
        torch.manual_seed(config.seed)
        label = label or Path(model_folder or "model").name
        folder = run_folder(out, label, recipe, resume or restarts() > 0)
        saved = saved_choices(folder) if resume or restarts() else {}
        model = build(shared.build, **saved)
        _check_model(model, words, config)
        folder = folder or Path("runs", f"{label}-{model.recipe.name}")
        resume = resume or (restarts() > 0 and bool(saved))
        start = starting_step(folder, resume, config)
        console.print(summary(model, dataset, config, start, shared.describe()), highlight=False)
        try:
            with progress(console, config, start) as show:
                trainer = Trainer(
                    model=model,
                    dataset=dataset,
                    eval_batches=eval_batches,
                    config=config,
                    out=folder,
                    documents=words.documents(),
                    on_step=show,
                    parallel=shared,
                )
                result = trainer.run(resume=resume)
        finally:
            if isinstance(dataset, StreamingDataset):
                dataset.close()
        _print_result(console, result, folder, model, shared)
        if sample_tokens and not result.interrupted and (shared.sharded or shared.ranks.first):
            _print_sample(console, model, words, sample_tokens, shared)
        return result


def _check_model(model: CausalLM, words: Tokenizer, config: TrainConfig) -> None:
    """Raise a ValueError if the model does not fit the tokenizer or the length of the sequences."""
    check_vocabulary(words, model.config.vocab_size)
    if config.seq_len > model.config.max_position_embeddings:
        raise UsageError(
            f"--seq-len {config.seq_len} is longer than the model's max_position_embeddings="
            f"{model.config.max_position_embeddings}: lower it or raise --max-position-embeddings"
        )


def _print_result(console: Console, result: Result, folder: Path, model: CausalLM, shared: Parallel) -> None:
    """Print the outcome and draw the loss curve."""
    curve = ""
    if shared.ranks.first:
        path, runs = folder / "loss.png", {model.recipe.name: read_metrics(folder / "metrics.jsonl")}
        curve = try_drawing(path, functools.partial(plot_losses, path, runs, folder.name))
    if result.interrupted:
        console.print(f"interrupted: step {result.step} is saved; the same command with --resume continues from it")
        return
    console.print(outcome(result), highlight=False)
    console.print(Text(" loss curve ", "dim"), curve, sep="", highlight=False, soft_wrap=True)


def _print_sample(console: Console, model: CausalLM, words: Tokenizer, tokens: int, shared: Parallel) -> None:
    """Print a continuation of SAMPLE_PROMPT; every process of a sharded model takes part."""
    room = model.config.max_position_embeddings - len(words.encode(SAMPLE_PROMPT))
    options: GenerationOptions = {"do_sample": True, "seed": shared.config.seed}
    if shared.sharded:
        options["cuda_graph"] = False  # collectives are not captured
    text = continue_text(model, words, SAMPLE_PROMPT, min(tokens, room), **options)
    console.print(Text("\nsample", "bold"))
    console.print(text, highlight=False)
