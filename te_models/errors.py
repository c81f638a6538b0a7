"""Every exception that te-models raises on purpose, each with the exit code of the command line. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib.metadata
import inspect
import logging
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SAID = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
MANY = 20  # choices, in the line about an unknown one
CLOSE = 0.6  # similarity of a name that was probably meant
# Names of ours, and those that transformers, TRL, peft and other libraries have for the same thing.
SYNONYMS = {
    "model": "model_name_or_path model_name",
    "preset": "model model_name_or_path model_name",  # of a command that takes no trained model
    "data": "dataset dataset_name train_file train_dataset",
    "out": "output_dir output save_dir",
    "steps": "max_steps num_steps train_steps iterations max_iters",
    "epochs": "num_train_epochs num_epochs",
    "batch_size": "per_device_train_batch_size micro_batch_size train_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps grad_accum_steps grad_accum",
    "seq_len": "max_length max_seq_length max_seq_len sequence_length block_size cutoff_len context_length",
    "learning_rate": "lr max_lr",
    "schedule": "lr_scheduler_type lr_scheduler",
    "warmup_steps": "warmup_ratio warmup",
    "clip_grad_norm": "max_grad_norm grad_clip",
    "optimizer": "optim",
    "optimizer_offload": "cpu_offload offload_optimizer",
    "eval_every": "eval_steps eval_interval",
    "save_every": "save_steps save_interval",
    "keep_last": "save_total_limit keep_last_checkpoints",
    "log": "report_to",
    "lora": "lora_rank lora_r use_lora",
    "lora_targets": "lora_target_modules target_modules",
    "activation_checkpointing": "gradient_checkpointing no_gradient_checkpointing ac",
    "compile": "compile_model torch_compile",
    "dtype": "torch_dtype",
    "max_new_tokens": "max_tokens",
    "hidden_size": "dim d_model n_embd hidden_dim",
    "intermediate_size": "ffn_dim ffn_hidden_size",
    "num_hidden_layers": "n_layer n_layers num_layers",
    "num_attention_heads": "n_head n_heads num_heads",
    "num_key_value_heads": "n_kv_heads num_query_groups",
    "max_position_embeddings": "block_size n_positions max_seq_len",
    "tie_word_embeddings": "weight_tied weight_tying tie_weights",
}
# torchao, which peft and lm-evaluation-harness import, logs its missing kernels and its use of torch.
QUIET = ("torchao", "torch.utils._pytree")
LONGEST = 1000  # characters of a message
# What to do with names that Megatron-LM, older releases of Transformer Engine and guides to FP8 use.
ELSEWHERE = {
    "fp8": "give recipe='delayed' or another; 'hybrid' and 'e4m3' are fp8_format='HYBRID' and 'E4M3'",
    "use_fp8": "give recipe='current' or another; recipe='bf16' is without FP8",
    "bf16": "give recipe='bf16'",
    "enabled": "give recipe='current' or another; recipe='bf16' is without FP8",
    "fp8_recipe": "give recipe",
    "fp8_margin": "give margin",
    "fp8_interval": "leave it out: scales are updated in every step",
    "interval": "leave it out: scales are updated in every step",
    "fp8_amax_history_len": "give amax_history_len",
    "fp8_amax_compute_algo": "give amax_compute_algo",
    "use_flash_attn": "leave it out: attention has a fused kernel wherever the device has one",
    "use_8bit_optim": "give optimizer='adamw8bit' or 'muon8bit'",
    "use_galore": "give optimizer='galore'",
    "layer_precision": 'give precision, such as {"layers.2.*": "bf16"}',
    "first_last_layers_bf16": "give num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16, which are 1 by default",
}
# What takes an argument in Python -> its arguments, for those that another constructor or function was given.
PLACES = {
    "open_data": (
        "data eval_data eval_split columns truncate on_bad_record packing chat_template special_tokens streaming "
        "num_workers"
    ),
    "CausalLM.from_pretrained or from_preset": (
        "recipe engine device dtype fp8_params activation_checkpointing activation_offload compile fused precision "
        "amax_history_len amax_compute_algo margin fp8_format lm_head attention_gate"
    ),
    "add_lora(model, r=...)": "lora lora_alpha lora_dropout",
    "TrainConfig": (
        "steps epochs batch_size seq_len gradient_accumulation calibrate cuda_graph deterministic optimizer "
        "optimizer_options optimizer_offload learning_rate schedule warmup_steps weight_decay clip_grad_norm "
        "eval_every eval_batches patience save_every keep_last record on_nan recipe_schedule parallel"
    ),
}
# Characters that reorder the text around them.
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = dict.fromkeys([*range(32), *range(127, 160), 0x2028, 0x2029, *_DIRECTIONS], " ")
_OBEYED = {**dict.fromkeys(_CONTROLS, "\ufffd"), ord("\r"): None, ord("\n"): "\n", ord("\t"): "\t"}


def one_line(message: str) -> str:
    """Return a message as one line that no terminal obeys and every stream can write.

    Control characters, and those that change the direction of text, become spaces, half surrogate pairs their numbers,
    and of more than LONGEST characters the middle is left out.
    """
    line = message.translate(_CONTROLS).encode(errors="backslashreplace").decode()
    return (
        f"{line[: LONGEST // 2]} ... {line[-(LONGEST // 2 - 5) :]}" if len(line) > LONGEST else line
    )


def for_terminal(text: str) -> str:
    """Return `text` with U+FFFD for characters that a terminal would obey, but for line feeds and tabs.

    These are control characters, and those that change the direction of the text around them.
    """
    return text.translate(_OBEYED)


def for_stream(text: str, stream: TextIO) -> str:
    """Return a line as `stream` shows it: broken between words where a terminal would break inside of one.

    In a file or a pipe it stays one line.
    """
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    if len(text) <= width or "\n" in text:
        return text
    return textwrap.fill(
        text,
        width,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


class TeModelsError(Exception):
    """Base of every error that te-models raises on purpose. Its message is one line: what is wrong and what to do.

    A message may show a name or a value from a file, so `one_line` makes it safe to print.

    Attributes:
        exit_code: the exit code of the command line. 2 means that the request or its input is wrong, 1 that the run
            failed.
    """

    exit_code = 1

    def __init__(self, message: str = "", *others: object) -> None:
        super().__init__(one_line(str(message)), *others)


class UsageError(TeModelsError, ValueError):
    """The request cannot be met: a wrong name or value, or a combination that is not supported."""

    exit_code = 2


class ConfigError(UsageError):
    """A field of a model's config, of a recipe or of a training config is wrong."""


class MissingPackage(UsageError, ImportError):
    """An optional package is not installed, too old, or cannot be imported; the message says what to install."""


class OutputInUse(UsageError):
    """Another process writes to the output folder."""


class CheckpointError(TeModelsError, ValueError):
    """Saved state is damaged, incomplete, hostile or does not fit; nothing of it was used."""

    exit_code = 2


class DataError(TeModelsError, ValueError):
    """Training data or a tokenizer is damaged, empty, too large or of an unknown format."""

    exit_code = 2


class DataUnavailable(DataError, OSError):
    """Training data cannot be read: it is missing, or its server no longer answers."""


class SaveError(TeModelsError, RuntimeError):
    """Saving failed; anything saved under that name before is intact."""

    exit_code = 2


class EngineError(TeModelsError, RuntimeError):
    """A model or an engine was used in an order or a place where its results would be wrong."""


class OutOfMemory(TeModelsError, RuntimeError):
    """A device or the host ran out of memory; the message suggests remedies."""


class Diverged(TeModelsError, RuntimeError):
    """The loss or the gradient norm became NaN or infinite; that step updated no weight."""


class LostPeer(TeModelsError, RuntimeError):
    """Another process of the run died or no longer answers."""


def unknown(
    kind: str, value: object, choices: Iterable[str], listed: str = "", advice: str = ""
) -> UsageError:
    """Return the error for a `value` that is not among `choices`; it names the nearest valid one.

    `listed` says where more than MANY choices are listed, so that the line stays short. `advice` takes the place of
    the nearest name and of the choices.
    """
    noun, of, owner = kind.partition(" of ")
    line = f"unknown {noun} {value!r}{of}{owner}: "
    if noun in ("option", "keyword", "field"):
        advice = advice or ELSEWHERE.get(_bare(str(value)), "")
    names = sorted(choices)
    bare = {_bare(name): name for name in names}
    if noun in ("keyword", "field"):
        advice = advice or _place(_bare(str(value)), bare)
    if advice:
        return UsageError(line + advice)
    near = _nearest(_bare(str(value)), bare)
    hint = f"did you mean {bare[near]!r}? " if near else ""
    if listed and len(names) > MANY:
        listing = f"{listed} lists all {len(names)}"
    else:
        listing = f"choose one of {', '.join(names)}"
    return UsageError(f"{line}{hint}{listing}")


def _bare(name: str) -> str:
    """Return an option, a field or a value without what only spells it: dashes and capitals."""
    return name.lstrip("-").replace("-", "_").lower()


def _place(name: str, known: Collection[str]) -> str:
    """Return where to give `name`, or our argument of the same meaning; "" if that is among those `known` here."""
    ours = [mine for mine, others in SYNONYMS.items() if name in others.split()]
    if not known or any(mine in known for mine in ours):
        return ""
    for place, arguments in PLACES.items():
        for argument in [name, *ours]:
            if argument in arguments.split():
                return f"give {'it' if argument == name else argument} to {place}"
    return ""


def _nearest(misspelled: str, names: Collection[str]) -> str:
    """Return the name that was probably meant, or "": by another library's name, its start, its initials or letters."""
    synonyms = []
    for name, others in SYNONYMS.items():
        if misspelled in others.split() and name in names:
            synonyms.append(name)
    longer = sorted(name for name in names if name.startswith(f"{misspelled}_"))
    initials = []
    for name in names:
        if "".join(word[:1] for word in name.split("_")) == misspelled:
            initials.append(name)
    return next(
        iter(
            [
                *synonyms,
                *longer,
                *initials,
                *difflib.get_close_matches(misspelled, names, n=1, cutoff=CLOSE),
            ]
        ),
        "",
    )


def check_known(kind: str, value: object, choices: Collection[object], listed: str = "") -> None:
    """Raise the error of `unknown` unless `value` is among `choices`."""
    if value not in choices:
        raise unknown(kind, value, map(str, choices), listed)


def check_least(least: int, **sizes: int) -> None:
    """Raise a UsageError that names the first of `sizes` below `least`."""
    for name, size in sizes.items():
        if size < least:
            raise UsageError(f"{name}={size} is out of range: give {least} or more")


def require(condition: bool, message: str, error: type[Exception] = ValueError) -> None:
    """Raise `error` unless the condition holds."""
    if not condition:
        raise error(message)


def refuse(
    mistakes: Iterable[str | Exception] | Mapping[str, object], error: type[Exception] = UsageError
) -> None:
    """Raise the first of the mistakes: `error` with a line that says what is wrong, or one that is an error already.

    `mistakes` are lines or errors, or a mapping {line: condition}, of which lines with a true condition count.
    """
    for mistake in mistakes:
        if not isinstance(mistakes, Mapping) or mistakes[str(mistake)]:
            raise mistake if isinstance(mistake, Exception) else error(mistake)


def plural(number: int, noun: str, nouns: str = "") -> str:
    """Return "1 record" or "2,000 records"; `nouns` is a plural that is not formed with s."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def mistyped(value: object, kind: type) -> str:
    """Return what a value of this kind is, such as "a whole number", if `value` is none; else an empty text.

    An int is a float too, and a bool no number. A kind that has no name here takes any value.
    """
    allowed = (int, float) if kind is float else kind
    good = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
    return "" if good or kind not in SAID else SAID[kind]


class NamedFields:
    """Base of dataclasses whose constructor names the nearest field when it is given an unknown one.

    The docstring of a subclass lists the fields that have a help text (te_models.config.settings).
    """

    def __init_subclass__(cls) -> None:
        """Add the fields' help texts to the docstring."""
        # Fields of a base class, which is a dataclass already, and its own.
        fields = dict(getattr(cls, "__dataclass_fields__", {}))
        fields |= {
            name: value for name, value in vars(cls).items() if isinstance(value, dataclasses.Field)
        }
        texts = [
            f"{name}: {field.metadata['help']}"
            for name, field in fields.items()
            if "help" in field.metadata
        ]
        if texts and cls.__doc__:
            lines = [
                textwrap.fill(text, 116, initial_indent=" " * 4, subsequent_indent=" " * 8)
                for text in texts
            ]
            cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__), "", "Attributes:", *lines])

    def __new__(cls, *values: Any, **fields: Any) -> Any:
        """Raise a ValueError for a keyword that is not a field; the dataclass's own `__init__` does the rest."""
        known, takes_any = _constructor(cls.__init__)  # of a subclass perhaps its own
        for name in () if takes_any else fields:
            check_known(f"field of {cls.__name__}", name, known, f"help(te_models.{cls.__name__})")
        return super().__new__(cls)


@functools.cache
def _constructor(function: Callable[..., None]) -> tuple[list[str], bool]:
    """Return the names that a constructor takes, and whether it takes any other as well."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return list(parameters)[1:], takes_any


def field_values(instance: DataclassInstance) -> dict[str, Any]:
    """Return name -> value of each field of a dataclass, for checks that walk over all of them."""
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


@contextlib.contextmanager
def needs(feature: str, package: str, oldest: str, extra: str) -> Iterator[None]:
    """Turn a failed import of an optional package in the block into one line that says what to install.

    Libraries of QUIET log no warning meanwhile. `feature` needs the package, and `extra` is the extra of
    te-models that installs it, as in pyproject.toml.

    Raises:
        MissingPackage: the package is not installed, is older than `oldest`, or fails to import.
    """
    install = f"{feature} needs {package} {oldest} or newer%s: pip install -U 'te-models[{extra}]'"
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackage(install % "") from None
    if _release(installed) < _release(oldest):
        raise MissingPackage(install % f", not {installed}")
    levels = {logger: logger.level for logger in map(logging.getLogger, QUIET)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise MissingPackage(
            f"{feature} needs {package}, and the installed {installed} cannot be imported ({reason}): "
            f"pip install -U torch 'te-models[{extra}]'"
        ) from None
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
