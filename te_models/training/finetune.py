"""`te-models finetune` from data to sample: what the command line does, callable."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from te_models.causal_lm import CausalLM
from te_models.checkpoint.run_folder import Checkpoints
from te_models.config.training import TrainConfig
from te_models.data.dataset import check_vocabulary
from te_models.data.streaming import StreamingDataset
from te_models.data.tokenizer import load_tokenizer
from te_models.data.training_data import open_data
from te_models.generation.text import continue_text
from te_models.optim import resolve_options
from te_models.training.metrics import drawn, plot_losses, read_metrics
from te_models.training.parallel import Parallel, parallel, restarts
from te_models.training.report import outcome, progress, summary
from te_models.training.trainer import Result, Trainer

SAMPLE_PROMPT = "def "


def finetune(
    build: Callable[[Callable[..., CausalLM]], CausalLM],
    *,
    device: str | None = None,
    label: str | None = None,
    model_folder: str | None = None,
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
    """Train what `build` returns; see `te-models finetune --help` for the arguments.

    `build` is given what makes a CausalLM of a config, cut up over the processes where there are several. torchrun runs
    this in each of them.

    Raises:
        ValueError: a mistake in what was asked for; nothing was written.
        Diverged: the loss became NaN or infinite.
        LostPeer: another process of the run died.
    """
    config = TrainConfig(**train)
    resolve_options(
        config.optimizer, config.optimizer_options
    )  # a mistake in them should cost nobody the reading of data
    read = functools.partial(open_data, data, streaming=streaming, packing=packing, num_workers=data_workers)
    with parallel(config, device) as shared:
        return _finetune(build, read, shared, label, model_folder, tokenizer, out, resume, sample_tokens)


def _finetune(
    build: Callable[[Callable[..., CausalLM]], CausalLM],
    read: Callable[..., Any],
    shared: Parallel,
    label: str | None,
    model_folder: str | None,
    tokenizer: str | None,
    out: str | None,
    resume: bool,
    sample_tokens: int,
) -> Result:
    """`finetune` in one process of those that share the run."""
    config, console = shared.config, Console(quiet=not shared.ranks.first)
    own = dataclasses.replace(config, batch_size=shared.rows(config.batch_size))
    words = load_tokenizer(tokenizer or model_folder)
    dataset, eval_batches = read(words, own, rank=shared.data_rank, world_size=shared.data_world, ranks=shared.ranks)
    torch.manual_seed(config.seed)
    model = build(shared.build)
    check_vocabulary(words, model.config.vocab_size)
    if config.seq_len > model.config.max_position_embeddings:
        raise ValueError(
            f"--seq-len {config.seq_len} is longer than the model's max_position_embeddings="
            f"{model.config.max_position_embeddings}: lower it or raise --max-position-embeddings"
        )
    folder = Path(out or f"runs/{label or Path(model_folder or 'model').name}-{model.recipe.name}")
    resume = resume or (restarts() > 0 and Checkpoints(folder / "checkpoints").latest() is not None)
    start = _starting_step(folder, resume, config)
    console.print(summary(model, dataset, config, start, shared.describe()), highlight=False)
    with progress(console, config, start) as tell:
        trainer = Trainer(
            model=model,
            dataset=dataset,
            eval_batches=eval_batches,
            config=config,
            out=folder,
            documents=words.documents(),
            on_step=tell,
            parallel=shared,
        )
        try:
            result = trainer.run(resume=resume)
        finally:
            if isinstance(dataset, StreamingDataset):
                dataset.close()
    curve = _draw(folder, model.recipe.name) if shared.ranks.first else ""
    if result.interrupted:
        console.print(f"interrupted: step {result.step} is saved; the same command with --resume goes on from it")
        return result
    console.print(outcome(result), highlight=False)
    console.print(f"[dim] loss curve[/dim] {curve}", highlight=False)
    if sample_tokens and (shared.sharded or shared.ranks.first):
        room = model.config.max_position_embeddings - len(words.encode(SAMPLE_PROMPT))
        graph = False if shared.sharded else "auto"  # collectives are not captured
        text = continue_text(
            model, words, SAMPLE_PROMPT, min(sample_tokens, room), do_sample=True, seed=config.seed, cuda_graph=graph
        )
        console.print("\n[bold]sample[/bold]")
        console.print(text, markup=False, highlight=False)
    return result


def _draw(folder: Path, recipe: str) -> str:
    """Draw the run's loss curve; returns where it is, or why there is none."""
    path = folder / "loss.png"
    return drawn(path, lambda: plot_losses(path, {recipe: read_metrics(folder / "metrics.jsonl")}, folder.name))


def _starting_step(folder: Path, resume: bool, config: TrainConfig) -> int:
    """The step of the checkpoint to resume from, 0 for a new run; a ValueError where the two would collide."""
    newest = Checkpoints(folder / "checkpoints").latest()
    if resume and newest is None:
        raise ValueError(f"nothing to resume: {folder} has no checkpoint; start without --resume")
    if newest is None:
        return 0
    step = int(newest.name.removeprefix("step-"))
    if not resume:
        raise ValueError(f"{folder} already holds a run of {step} steps: add --resume or give another --out")
    if step >= config.steps:
        raise ValueError(f"{folder} has already reached step {step}: give more than --steps {config.steps}")
    return step
