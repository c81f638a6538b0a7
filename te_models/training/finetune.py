"""The function behind `te-models pretrain` and `finetune`, from data to samples."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from te_models.causal_lm import CausalLM
from te_models.config.model import config_fields
from te_models.config.presets import get_preset
from te_models.config.recipe import AUTO, RECIPE_FIELDS, Recipe
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset, check_fit
from te_models.data.streaming import StreamingDataset
from te_models.data.tokenizer import Tokenizer, load_tokenizer
from te_models.data.training_data import open_data, steps_of
from te_models.errors import ConfigError, Diverged, UsageError
from te_models.files.formats import Fields
from te_models.generation.options import GenerationOptions
from te_models.model.recipe_fit import auto_recipe
from te_models.optim import resolve_options
from te_models.saving.checkpoint_choice import describe_choice
from te_models.saving.pretrained import read_shape, refuse_adapters
from te_models.saving.run_folder import Checkpoints
from te_models.serving.export import default_format
from te_models.training.callback import Callback
from te_models.training.evaluation import Batch, evaluate
from te_models.training.facts import dataset_names
from te_models.training.launch import choose_parallel, parallel, restarts
from te_models.training.loggers import Run, check_loggers, open_loggers
from te_models.training.parallel import Parallel
from te_models.training.preflight import check_memory
from te_models.training.report import (
    draw_run,
    print_next,
    print_outcome,
    progress,
    run_console,
    summary,
)
from te_models.training.result import Result
from te_models.training.resume import (
    resumed_options,
    run_folder,
    saved_choices,
    scheduled_recipes,
    starting_step,
    torch_dtype,
)
from te_models.training.run_file import read_record, run_document, run_id
from te_models.training.samples import SHARE, Prompt, Sampler, held_out_prompts
from te_models.training.settings import (
    RUN_FILE,
    SETTINGS,
    RunSettings,
    changed_settings,
    read_run_file,
    resolved_path,
)
from te_models.training.trainer import Trainer

if TYPE_CHECKING:
    from te_models.training.lora_run import Content, LoraRun


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
    config = _train_config(settings)
    resolve_options(config.optimizer, config.optimizer_options)  # fail before reading data
    loggers = check_loggers(settings.log)
    with parallel(config, settings.build.get("device")) as shared, contextlib.ExitStack() as stack:
        shared.frozen = settings.lora is not None
        console = run_console(quiet=not shared.ranks.first)
        chosen: list[str] = []
        if not resume:
            settings, chosen = _resolved(settings)
        folder, newest = _place(settings, shared, resume)
        memory = check_memory(settings, config, shared, newest)
        saved = newest if "tokenizer" not in settings.given else None
        words = load_tokenizer(saved or settings.tokenizer or settings.model)
        dataset, eval_batches = _open_data(settings, config, words, shared, newest)
        if isinstance(dataset, StreamingDataset):
            stack.callback(dataset.close)  # after Ctrl-C too, while its workers start
        if config.epochs:
            config = dataclasses.replace(config, steps=steps_of(dataset, config))
            settings = dataclasses.replace(
                settings, train=dataclasses.replace(settings.train, steps=config.steps)
            )
        settings = _with_room(settings, words, newest)
        torch.manual_seed(config.seed)
        model = _build(settings, shared, newest)
        check_fit(words, model.config, config.seq_len)
        model.add_stop_tokens(dataset.ends)  # for the answers before the first step too
        adapters = _adapters(settings, model)
        start = starting_step(
            folder, newest is not None, config.steps, settings.lora, "merge_dtype" in settings.given
        )
        first = _first_recipe(settings, model)
        about = summary(
            model, dataset, config, start, shared.describe(), settings.command, memory, first
        )
        for part in (*chosen, *_notes(settings, folder, newest, model), about):
            console.print(part, soft_wrap=isinstance(part, str))  # paths stay whole
        sampler = _sampler(settings, model, words, eval_batches, shared)
        if (
            sampler
            and sampler.prompts
            and settings.model is not None
            and not start
            and shared.ranks.world == 1
        ):
            _note_before(console, sampler, model, eval_batches[0], config)
        record = {**(read_record(folder) if newest is not None else {})}
        record["id"] = shared.ranks.from_first(lambda: run_id(record))
        run_file = run_document(settings, model, dataset, eval_batches, shared, record, first)
        parts: Fields = dict(run_file=run_file, parallel=shared, saved=adapters, recipe=first)
        parts["about"] = _about(settings)
        trainer = Trainer(model, dataset, eval_batches, config, folder, words.files(), **parts)
        logged = dataclasses.asdict(config) | {"model": settings.label, **model.recipe.to_dict()}
        names, run = loggers if shared.ranks.first else [], Run(folder, record["id"], logged)
        with progress(console, config, start) as trainer.on_step, open_loggers(names, run) as sent:
            trainer.callbacks = [*sent, *callbacks]
            begun = time.monotonic()
            try:
                result = trainer.run(resume=newest is not None)
            except Diverged:
                if shared.ranks.first:
                    _draw(settings, trainer)
                raise
            seconds = time.monotonic() - begun
        stack.close()  # its processes need no memory while samples are drawn
        content = None if adapters is None or result.interrupted else adapters.content(live=False)
        written = (
            _write_end(settings, trainer, adapters, content, words) if shared.ranks.first else {}
        )
        print_outcome(console, result, config, settings.command, folder, written)
        if not result.interrupted:
            _show_samples(console, sampler, folder, words, model, eval_batches, seconds, result)
        return result


def _about(settings: RunSettings) -> Fields:
    """Return the facts of the run for the model card: the command, and the names of model and data."""
    data = settings.data.data
    return {
        "command": settings.command,
        "base": settings.label,
        "data": [Path(name).name or name for name in data],
        "datasets": dataset_names(data),
    }


def _train_config(settings: RunSettings) -> TrainConfig:
    """Return the run's training config with the kind of parallelism resolved."""
    recorded = settings.file is not None and "parallel" not in settings.given
    config = choose_parallel(settings.train, recorded, lora=settings.lora is not None)
    if settings.lora is not None and settings.lora.merge and config.parallel.startswith("fsdp"):
        raise UsageError(
            "--merge needs the whole model in one process: leave it out, and merge with te-models convert"
        )
    return config


def _first_recipe(settings: RunSettings, model: CausalLM) -> Recipe:
    """Return the recipe of the run's first step; a resumed model may have left that of its schedule."""
    scheduled = settings.train.recipe_schedule and settings.recipe != AUTO
    return scheduled_recipes(settings)[0] if scheduled else model.recipe


def _write_end(
    settings: RunSettings,
    trainer: Trainer,
    adapters: LoraRun | None,
    content: Content | None,
    words: Tokenizer,
) -> dict[str, str]:
    """Write the adapters, if any and the run is complete, and the loss curve; return what was written and where."""
    written, result = {}, trainer.result
    if adapters is not None and content is not None:
        from te_models.training.merging import save_adapters  # noqa: PLC0415  needs peft

        written = save_adapters(adapters, content, trainer.out, words, trainer.evaluation, result)
    return {"loss curve": _draw(settings, trainer), **written}


def _draw(settings: RunSettings, trainer: Trainer) -> str:
    """Draw the loss curve; return where, or why not."""
    recipe = trainer.model.recipe.name
    about = f"{trainer.config.tokens_per_step:,} tokens; {settings.command}"
    return draw_run(trainer.result, settings.label, recipe, settings.data.data, trainer.out, about)


def _note_before(
    console: Console, sampler: Sampler, model: CausalLM, batch: Batch, config: TrainConfig
) -> None:
    """Note the model's answers before the first step, in a share of the time that the run is expected to take."""
    with console.status("answering prompts of the evaluation data before the first step"):
        sampler.note_before(
            SHARE / 2 * _expected_seconds(model, batch, config) if sampler.bounded else math.inf
        )


def _expected_seconds(model: CausalLM, batch: Batch, config: TrainConfig) -> float:
    """Return about how long a run will train: a step takes three times as long as a forward pass."""
    begun = time.monotonic()
    evaluate(model, [batch])
    return 3 * (time.monotonic() - begun) * config.steps * config.gradient_accumulation


def _resolved(settings: RunSettings) -> tuple[RunSettings, list[str]]:
    """Return the settings with dtype and recipe resolved to those of the model, and lines about what was chosen.

    A recipe "auto" becomes the model's own, or one for a new model. A model in FP16 is trained in BF16.
    """
    fields = {name: value for name, value in settings.build.items() if name in config_fields()}
    lines = []
    if settings.preset is not None:
        shape = get_preset(settings.preset, **fields)
        recipe = None
        dtype = torch.bfloat16
    else:
        shape, recipe, dtype, _ = read_shape(settings.model or "", fields)
        if "dtype" not in settings.build and dtype == torch.float16:
            dtype = torch.bfloat16
            lines.append(
                "the model is in float16 and trained in bfloat16, since most FP16 gradients underflow without loss "
                "scaling; --dtype float32 keeps every bit of its weights"
            )
    dtype = torch_dtype(settings.build, dtype)
    build: Fields = {**settings.build, "dtype": str(dtype).removeprefix("torch.")}
    settings = dataclasses.replace(settings, build=build)
    if settings.recipe != AUTO:
        return settings, lines
    reason = "the model's own"
    if recipe is None:
        names = ("engine", "device", "fp8_params", *RECIPE_FIELDS)
        own: Fields = {name: value for name, value in build.items() if name in names}
        recipe, reason = auto_recipe(shape, dtype=dtype, **own)
    lines.append(f"recipe auto: {recipe.name} ({reason})")
    return dataclasses.replace(settings, recipe=recipe), lines


def _with_room(settings: RunSettings, words: Tokenizer, newest: Path | None) -> RunSettings:
    """Return the settings with a vocab_size that has a row for each special token that the run adds."""
    if not settings.data.special_tokens or newest is not None:
        return settings
    fields = {name: value for name, value in settings.build.items() if name in config_fields()}
    if settings.preset is not None:
        shape = get_preset(settings.preset, **fields)
    else:
        shape, _, _, _ = read_shape(settings.model or "", fields)
    if words.vocab_size <= shape.vocab_size:
        return settings
    if settings.lora is not None:
        warnings.warn(
            f"--lora does not train the embedding: the rows of --special-tokens {settings.data.special_tokens} stay at "
            "the mean of the others",
            stacklevel=2,
        )
    build = {**settings.build, "vocab_size": words.vocab_size}
    return dataclasses.replace(settings, build=build)


def _place(settings: RunSettings, shared: Parallel, resume: bool) -> tuple[Path, Path | None]:
    """Return the run's folder, and the checkpoint from which it resumes: under torchrun also after a restart."""
    restarted = restarts() > 0
    folder = Path(shared.ranks.from_first(lambda: str(run_folder(settings, restarted)), UsageError))
    saved = Checkpoints(folder / "checkpoints")
    return folder, saved.to_resume() if resume else saved.latest() if restarted else None


def _open_data(
    settings: RunSettings,
    config: TrainConfig,
    words: Tokenizer,
    shared: Parallel,
    newest: Path | None,
) -> tuple[TokenDataset | StreamingDataset, list[Batch]]:
    """Return this process's share of the training data, and its evaluation batches."""
    data = settings.data
    if newest is not None and "chat_template" not in settings.given:
        data = dataclasses.replace(data, chat_template=None)  # the checkpoint's tokenizer has it
    return open_data(
        data,
        words,
        dataclasses.replace(config, batch_size=shared.rows(config.batch_size)),
        rank=shared.data_rank,
        world_size=shared.data_world,
        ranks=shared.ranks,
    )


def _build(settings: RunSettings, shared: Parallel, newest: Path | None) -> CausalLM:
    """Return the model to train, split over the processes: a new one, a loaded one, or that in the checkpoint."""
    options: Fields = {**settings.build, "recipe": settings.recipe}
    if newest is not None:
        options = resumed_options(settings, saved_choices(newest))
    if "dtype" in options:
        options["dtype"] = torch_dtype(options)
    if settings.preset is not None:
        return CausalLM.from_preset(settings.preset, build=shared.build, **options)
    assert settings.model is not None
    if newest is None or settings.lora is not None:
        model = CausalLM.from_pretrained(settings.model, build=shared.build, **options)
        refuse_adapters(model)
        return model
    options = {
        name: value for name, value in options.items() if name not in config_fields()
    }  # the checkpoint has them
    return CausalLM.from_pretrained(newest, build=shared.build, **options)


def _adapters(settings: RunSettings, model: CausalLM) -> LoraRun | None:
    """Freeze the model and add the adapters that the settings ask for, if any."""
    if settings.lora is None:
        return None
    from te_models.training.lora_run import LoraRun  # noqa: PLC0415  needs peft

    torch.manual_seed(settings.train.seed)
    return LoraRun(model, settings.lora, resolved_path(settings.model))


def _notes(settings: RunSettings, folder: Path, newest: Path | None, model: CausalLM) -> list[str]:
    """Return what is said before the summary: that weights are random, or what a resumed run changes.

    Of another recipe the checkpoint's loader warns (te_models.saving.pretrained).
    """
    if newest is None and settings.preset is not None:
        return [f"{settings.preset} starts from random weights"]
    if newest is None:
        line = describe_choice(settings.model or "")
        return [] if line is None else [line]
    before, lines = saved_choices(newest).get("engine", model.engine), []
    if before != model.engine:
        lines = [f"changed: the engine is {model.engine} ({model.engine_reason}), was {before}"]
    if not (folder / RUN_FILE).is_file():
        return lines
    now = {name: value for table in settings.tables().values() for name, value in table.items()}
    given = {name: now[name] for name in settings.given & now.keys()}
    then = read_run_file(folder / RUN_FILE)
    changed = changed_settings(then, given)
    lines += [
        f"changed: {name} = {new!r}, was {old!r}" for name, (old, new) in sorted(changed.items())
    ]
    same = then.get("recipe_schedule") == settings.train.recipe_schedule
    return lines + (
        _moved_changes(settings.train, then.get("steps", settings.train.steps)) if same else []
    )


def _moved_changes(config: TrainConfig, steps: int) -> list[str]:
    """Return what is said of changes of the recipe at shares of the steps, which more steps than before move."""
    before = dataclasses.replace(config, steps=steps).recipe_changes
    moved = [
        (old, new, name)
        for (old, name), (new, _) in zip(before, config.recipe_changes, strict=True)
        if old != new
    ]
    return [
        f"changed: recipe {name!r} follows after step {new}, was {old}: a share of the steps"
        for old, new, name in moved
    ]


def _show_samples(
    console: Console,
    sampler: Sampler | None,
    folder: Path,
    words: Tokenizer,
    model: CausalLM,
    eval_batches: list[Batch],
    seconds: float,
    result: Result,
) -> None:
    """Print the answers of the model, which has been trained for so many seconds, and the commands to run next."""
    if sampler:
        share = SHARE / 2 if sampler.before else SHARE
        sampler.show(console, share * seconds if sampler.bounded else math.inf)
    prompts = (
        sampler.prompts
        if sampler
        else held_out_prompts(eval_batches, words, model.config.longest_sequence)
    )
    try:
        format = default_format(model, model.origin)
    except ConfigError:  # no server has this architecture
        format = ""
    print_next(console, folder, words, prompts, format, result)


def _sampler(
    settings: RunSettings, model: CausalLM, words: Tokenizer, batches: list[Batch], shared: Parallel
) -> Sampler | None:
    """Return the sampler; None on a process that does not take part. With a sharded model all do."""
    tokens = settings.sample_tokens
    if not tokens or not (shared.sharded or shared.ranks.first):
        return None
    longest = model.config.longest_sequence
    options: GenerationOptions = {"seed": shared.config.seed}
    prompts = held_out_prompts(batches, words, longest - min(tokens, longest // 4))
    if shared.sharded:
        options["cuda_graph"] = False  # collectives are not captured
        prompts = [Prompt(*map(tuple, found)) for found in shared.ranks.from_first(lambda: prompts)]
    agree: Callable[[bool], bool] = bool
    if shared.sharded:
        agree = functools.partial(_first_ones, shared)
    sampler = Sampler(model, words, prompts, tokens, options, agree)
    chosen = "sample_tokens" in settings.given or tokens != SETTINGS["sample_tokens"].default
    sampler.bounded = not chosen
    return sampler


def _first_ones(shared: Parallel, answer: bool) -> bool:
    """Return the answer of the first process, on every process."""
    return shared.ranks.gather(answer)[0]
