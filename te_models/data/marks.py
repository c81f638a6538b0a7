"""Fields of a record beside its texts: marks of what not to learn, media, and fields that nothing here reads.

A mark with one meaning is honoured, one that cannot be is refused, and every other field is named once per file.
"""

from collections.abc import Iterable, Iterator, Mapping

from te_models.errors import DataError

WEIGHTS = ("weight", "loss_weight", "loss_scale")  # of a turn or record: 1 counts, 0 does not
LEARNED = ("loss", "train", "training", "trainable")  # true counts, false does not
MASKED = ("masked",)  # false counts, true does not
MARKS = (*WEIGHTS, *LEARNED, *MASKED)
LABEL = "label"  # of a record for KTO: false marks a bad answer
PARTS_MARKED = ("train_detail", "training_detail")  # of a turn, by axolotl: marks of parts of it
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
TEMPLATE_VARIABLES = "chat_template_kwargs"  # of a record: variables of the chat template
RECORD_FIELDS = (*MARKS, LABEL, *MEDIA, TEMPLATE_VARIABLES)
# Arguments of transformers' apply_chat_template that are no variables of the template, and variables it adds.
_NOT_VARIABLES = (
    "messages",
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
_FILES_NAMED = 8  # with a line each, of files with ignored fields


def turn_counts(turn: Mapping[str, object], role: str, place: str) -> bool | None:
    """Return whether a turn is learned by its marks; None without one.

    Raises:
        DataError: a mark is neither true nor false, two contradict each other, or one asks to learn what somebody other
            than the assistant says.
    """
    for name in PARTS_MARKED:
        if is_set(turn.get(name)):
            raise DataError(
                f"{place} has {name!r}, marks of parts of an answer: an answer counts as a whole or not at all, so "
                "leave it out and mark the turn"
            )
    # All marks are read before any decides, since two of them may disagree.
    counts: dict[str, bool] = {}
    for name in MARKS:
        value = turn.get(name)
        if value is None:
            continue
        if not _is_switch(value):
            if name in WEIGHTS:
                problem = f"the {name} {str(value)[:60]!r}: an answer counts in full (1) or not (0)"
            else:
                problem = f"{str(value)[:60]!r} as {name!r}: give true or false"
            raise DataError(f"{place} has {problem}")
        # Marks of one kind say "learn this", of the other "leave this out".
        counts[name] = bool(value) != (name in MASKED)
    if role != "assistant":
        for name in LEARNED:
            if counts.get(name):
                raise DataError(
                    f"{place} has {name!r}: true, but is of the {role}: only what the assistant says is learned, so "
                    "leave the mark out"
                )
    if len(set(counts.values())) > 1:
        raise DataError(
            f"{place} has marks that contradict each other: {' and '.join(map(repr, counts))}"
        )
    return next(iter(counts.values()), None)


def record_counts(row: Mapping[str, object], used: set[str]) -> bool:
    """Return whether a record is learned by its own marks, and add to `used` those that say so.

    A value that is neither true nor false, such as a class or a weight of 0.3, has another meaning and is ignored.
    """
    counts = True
    for name in (*MARKS, LABEL):
        value = row.get(name)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        if _is_switch(value):
            used.add(name)
            counts = counts and bool(value) != (name in MASKED)
    return counts


def refuse_media(fields: Mapping[str, object], place: str) -> None:
    """Raise a DataError for a record or turn with images, sound or films, which its answer depends on."""
    for name in MEDIA:
        if is_set(fields.get(name)):
            raise DataError(
                f"{place} has {name!r}: only text can be learned, so leave the record out"
            )


def template_variables(value: object, place: str) -> dict[str, object]:
    """Return the variables of a chat template that a record gives."""
    if not isinstance(value, dict):
        raise DataError(
            f"{place}: {TEMPLATE_VARIABLES!r} is no object: give variables of the chat template, such as "
            '{"enable_thinking": false}, or leave it out'
        )
    for name in value:
        if name in _NOT_VARIABLES:
            raise DataError(
                f"{place}: {TEMPLATE_VARIABLES!r} has {name!r}, which is no variable of a template: leave it out"
            )
    return {str(name): inner for name, inner in value.items() if inner is not None}


def is_set(value: object) -> bool:
    """Return whether a field says anything: tables fill what a record does not have with null or nothing."""
    return value is not None and value != "" and value != [] and value != {}


def ignored_fields(records: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Return a line per file that names the fields that nothing reads; each record gives its file and these fields."""
    names_by_place: dict[str, dict[str, None]] = {}
    for file, names in records:
        if names:
            names_by_place.setdefault(file, {}).update(dict.fromkeys(names))
    lines = list(_lines(names_by_place))
    if len(lines) > _FILES_NAMED:
        more = len(lines) - _FILES_NAMED
        lines = [*lines[:_FILES_NAMED], f"and {more:,} more files with fields that are ignored"]
    return lines


def _lines(names_by_place: Mapping[str, Mapping[str, None]]) -> Iterator[str]:
    for file, fields in names_by_place.items():
        names = list(fields)
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        yield f"{file}: ignored fields: {', '.join(names[:12])}{more}"


def _is_switch(value: object) -> bool:
    return isinstance(value, bool | int | float) and value in (0, 1)
