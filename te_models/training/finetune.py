"""The function behind `te-models pretrain` and `finetune`: a run, its parts, and which settings each of them gets."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from te_models.causal_lm import CausalLM
from te_models.config.recipe import Recipe
from te_models.config.training import TrainConfig
from te_models.data.dataset import check_fit
from te_models.data.training_data import steps_of
from te_models.errors import Diverged, UsageError
from te_models.files.formats import Fields
from te_models.optim import resolve_options
from te_models.recorder.record import FOLDER as RECORD
from te_models.recorder.record import has_record
from te_models.training.callback import Callback
from te_models.training.facts import dataset_names
from te_models.training.launch import choose_parallel, parallel
from te_models.training.loggers import LoggedRun, Loggers
from te_models.training.parallel import Parallel
from te_models.training.preflight import check_memory
from te_models.training.profiling import FOLDER as PROFILE
from te_models.training.report import summary
from te_models.training.result import Result
from te_models.training.resume import check_unfinished
from te_models.training.run_data import RunData, open_run_data
from te_models.training.run_file import read_provenance, run_document, run_id
from te_models.training.run_model import ModelSource, add_adapters, find_model
from te_models.training.run_report import Report, model_notes
from te_models.training.run_start import check_before_build
from te_models.training.samples import Sampler, run_sampler
from te_models.training.settings import SETTINGS, RunSettings
from te_models.training.trainer import Trainer

if TYPE_CHECKING:
    from te_models.training.lora_run import LoraRun


def finetune(
    settings: RunSettings, resume: bool = False, callbacks: Sequence[Callback] = ()
) -> Result:
    """Train a model, and print a summary, progress, the result and a sample; under torchrun every process calls this.

    te_models.training.settings makes the settings. With `resume` the run continues from the newest checkpoint in its
    folder. `callbacks` are called during the run.

    Raises:
        ValueError: a mistake in the settings; nothing has been written.
        Diverged: the loss became NaN or infinite.
        LostPeer: another process of the run died.
    """
    config = training_config(settings)
    # Fail before reading data.
    resolve_options(config.optimizer, config.optimizer_options, config.optimizer_offload)
    loggers = Loggers(settings.log)
    device = settings.build.get("device")
    with parallel(config, device, frozen=settings.lora is not None) as processes:
        # Config, recipe and dtype are known from here on; weights are read last, once nothing cheap can fail any more.
        source, folder = find_model(settings, processes, resume)
        check_before_build(source, config)
        report = Report(source.settings, folder, quiet=not processes.ranks.first)
        # Before the data, which may take minutes to open.
        memory = check_memory(source, config, processes)
        data = open_run_data(
            source.settings,
            config,
            processes,
            checkpoint=source.checkpoint,
            limit=source.shape.longest_sequence,
        )
        with contextlib.closing(data):  # after Ctrl-C too, while processes that read it start
            source, config = fit_to_data(source, config, data, folder)
            model, adapters = build_model(source, config, processes, data)
            first_recipe = source.first_recipe(model)
            settings_in_force = summary(
                model,
                data.dataset,
                config,
                start=source.steps_taken,
                processes=processes.describe(),
                command=source.settings.command,
                memory=memory,
                first_recipe=first_recipe,
                batch_shares=processes.data_world,
            )
            report.begin([*source.notes, *model_notes(source, folder, model)], settings_in_force)
            sampler = run_sampler(source.settings, model, data, processes)
            if sampler is not None and _samples_before(sampler, source, processes):
                sampler.note_before_training(report.console, data.eval_batches[0], config)
            provenance = find_provenance(source, folder, processes)
            trainer = build_trainer(
                source.settings,
                config,
                processes,
                data,
                model,
                adapters,
                folder=folder,
                provenance=provenance,
                recipe=first_recipe,
                callbacks=[loggers, *callbacks],
            )
            run = Run(
                settings=source.settings,
                data=data,
                model=model,
                adapters=adapters,
                trainer=trainer,
                loggers=loggers,
                report=report,
                sampler=sampler,
                provenance=provenance,
                resumed=source.checkpoint is not None,
            )
            return run.execute()


def _samples_before(sampler: Sampler, source: ModelSource, processes: Parallel) -> bool:
    """Return whether the model answers the prompts before training as well as after it."""
    # The answers of random weights say nothing, and several processes would have to wait for each other.
    trained = source.settings.model is not None and source.checkpoint is None
    return bool(sampler.prompts) and trained and processes.ranks.world == 1


@dataclass(frozen=True)
class Run:
    """A run with its parts.

    Attributes:
        settings: the settings of the whole run, as in run.toml.
        data: the tokenizer, the training data and the batches to evaluate on.
        model: the model that is trained.
        adapters: the adapters that --lora trains; None: the whole model is trained.
        trainer: the loop, with optimizer, evaluation and checkpoints.
        loggers: the callback that sends metrics to services such as Weights & Biases, which are open during the run.
        report: everything that is printed.
        sampler: generates the answers before and after; None on a process that does not take part.
        provenance: the facts of the run in run.toml so far, with its id (te_models.training.run_file).
        resumed: whether the run continues from a checkpoint.
    """

    settings: RunSettings
    data: RunData
    model: CausalLM
    adapters: LoraRun | None
    trainer: Trainer
    loggers: Loggers
    report: Report
    sampler: Sampler | None
    provenance: Mapping[str, object]
    resumed: bool

    def execute(self) -> Result:
        """Train, write the loss curve and the adapters, and print the outcome, samples and the next commands."""
        begun = time.monotonic()
        result = self._train()
        seconds = time.monotonic() - begun
        self.data.close()  # its processes need no memory while samples are drawn
        written = self._write_end()
        self.report.end(self.trainer, written)
        if not result.interrupted:
            if self.sampler is not None:
                self.sampler.show_after_training(self.report.console, seconds)
            self.report.suggest(self.trainer, self.data, self.sampler)
        return result

    def _train(self) -> Result:
        """Train to the last step; draw the loss curve also if the run diverges."""
        first = self.trainer.parallel.ranks.first
        with self.loggers.open(self._logged()) if first else contextlib.nullcontext():
            try:
                return self.trainer.run(resume=self.resumed, progress=True)
            except Diverged:
                if first:
                    self.report.draw_losses(self.trainer)
                raise

    def _logged(self) -> LoggedRun:
        """Return the description of the run for loggers: folder, id and settings."""
        settings = dataclasses.asdict(self.trainer.config)
        settings["model"] = self.settings.label
        settings |= self.model.recipe.to_dict()
        return LoggedRun(self.trainer.out, str(self.provenance["id"]), settings)

    def _write_end(self) -> dict[str, str]:
        """Write the loss curve, and the adapters of a complete run; return what was written and where."""
        trainer = self.trainer
        content = None
        if self.adapters is not None and not trainer.result.interrupted:
            content = self.adapters.content(resumable=False)  # all processes take part
        if not trainer.parallel.ranks.first:
            return {}
        saved = {}
        if self.adapters is not None and content is not None:
            from te_models.training.merging import save_adapters  # noqa: PLC0415  needs peft

            saved = save_adapters(
                self.adapters,
                content,
                folder=trainer.out,
                tokenizer=self.data.tokenizer,
                batches=trainer.evaluation,
                result=trainer.result,
            )
        written = {"loss curve": self.report.draw_losses(trainer), **saved}
        if has_record(trainer.out):
            show = shlex.join(["te-models", "report", str(trainer.out)])
            written["record"] = f"{trainer.out / RECORD}, which `{show}` shows"
        if (trainer.out / PROFILE).is_dir():
            written["profile"] = f"{trainer.out / PROFILE}, for ui.perfetto.dev"
        return written


def training_config(settings: RunSettings) -> TrainConfig:
    """Return the run's training config with the kind of parallelism resolved."""
    from_file = settings.file is not None and "parallel" not in settings.set_by_user
    config = choose_parallel(settings.train, from_file, lora=settings.lora is not None)
    if settings.lora is not None and settings.lora.merge and config.parallel.startswith("fsdp"):
        raise UsageError(
            "--merge needs the whole model in one process: leave it out, and merge with te-models convert"
        )
    for name in ("reshard_after_forward", "prefetch_blocks", "reduce_dtype", "collective_timeout"):
        if config.parallel == "none" and name in settings.set_by_user:
            warnings.warn(
                f"{SETTINGS[name].flag} has no effect: the run is one process", stacklevel=2
            )
    return config


def fit_to_data(
    source: ModelSource, config: TrainConfig, data: RunData, folder: Path
) -> tuple[ModelSource, TrainConfig]:
    """Return the source and the config, completed by the opened data: steps for epochs, and rows for new tokens.

    Raises:
        UsageError: a run to resume has no steps left.
    """
    if config.epochs:
        config = dataclasses.replace(config, steps=steps_of(data.dataset, config))
        source = source.with_steps(config.steps)
    if source.checkpoint is not None:
        check_unfinished(source.settings, folder, source.steps_taken, config.steps)
    # The tokenizer may have more tokens than the model rows.
    return source.with_rows_for(data.tokenizer.vocab_size, data.new_tokens), config


def build_model(
    source: ModelSource, config: TrainConfig, processes: Parallel, data: RunData
) -> tuple[CausalLM, LoraRun | None]:
    """Check that the data fits the model, build it, and add the adapters of --lora, if any; return both."""
    check_fit(data.tokenizer, source.shape, config.seq_len, data.dataset.packing)
    torch.manual_seed(config.seed)
    model = source.build(processes)
    model.add_stop_tokens(data.dataset.ends)  # for the answers before the first step too
    return model, add_adapters(source.settings, model)


def find_provenance(source: ModelSource, folder: Path, processes: Parallel) -> Mapping[str, object]:
    """Return the provenance of the run that this one continues, with the run's id; of a new run the id alone."""
    before = read_provenance(folder) if source.checkpoint is not None else {}
    return {**before, "id": processes.ranks.from_first(lambda: run_id(before))}


def build_trainer(
    settings: RunSettings,
    config: TrainConfig,
    processes: Parallel,
    data: RunData,
    model: CausalLM,
    adapters: LoraRun | None,
    *,
    folder: Path,
    provenance: Mapping[str, object],
    recipe: Recipe,
    callbacks: Sequence[Callback],
) -> Trainer:
    """Return the Trainer, with the texts that it writes: run.toml and the facts for the model card."""
    run_file = run_document(
        settings,
        model,
        data.dataset,
        data.eval_batches,
        processes,
        before=provenance,
        recipe=recipe,
    )
    return Trainer(
        model=model,
        dataset=data.dataset,
        eval_batches=data.eval_batches,
        config=config,
        out=folder,
        documents=data.tokenizer.files(),
        run_file=run_file,
        callbacks=callbacks,
        parallel=processes,
        saved=adapters,
        recipe=recipe,
        about=card_facts(settings),
    )


def card_facts(settings: RunSettings) -> Fields:
    """Return the facts of the run for the model card: the command, and the names of model and data."""
    data = settings.data.data
    return {
        "command": settings.command,
        "base": settings.label,
        "data": [Path(name).name or name for name in data],
        "datasets": dataset_names(data),
    }
