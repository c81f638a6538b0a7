"""A tokenizer.json for folders without one: transformers converts SentencePiece, tiktoken and BPE files.

transformers is told not to run code from the folder and not to look anywhere else. Only tokenizer classes are called,
and the folder must contain only regular files of bounded size. The result for a SentencePiece model must give the ids
of the sentencepiece library: transformers 5.23 loses the space before the first word where config.json is of one family
and the tokenizer of another.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from te_models.data.json_files import read_file, read_json_object
from te_models.errors import DataError, needs
from te_models.files.atomic import first_line
from te_models.interop.hf_writing import tokenizer_files

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
SOURCES = (*SENTENCEPIECE, "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json")
PROBE = "The quick brown fox jumps over 12 lazy dogs."


def convert_tokenizer(folder: Path) -> tuple[object, dict[str, str]] | None:
    """Return the tokenizer.json that transformers makes of a folder's files, and its special tokens by name.

    None: the folder has no such files.
    """
    sources = [path for pattern in SOURCES for path in sorted(folder.glob(pattern))]
    if not sources:
        return None
    for name in {*tokenizer_files(folder), *(path.name for path in sources)}:
        read_file(folder / name)
    for path in folder.iterdir():  # transformers decides what else it opens
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(f"{path} is not a regular file")
    with needs(
        f"{folder} has {sources[0].name} and no tokenizer.json, which", "transformers", "5.0", "hf"
    ):
        import transformers  # noqa: PLC0415
    expected_ids = _sentencepiece_ids(sources[0])
    reasons = []
    files = [
        read_json_object(folder / name) or {} for name in ("tokenizer_config.json", "config.json")
    ]
    names = []
    for file in files:
        if file.get("tokenizer_class"):
            names.append(str(file["tokenizer_class"]).removesuffix("Fast"))
    if names or expected_ids is None:
        kinds = ["AutoTokenizer", *names[:1]]
    else:
        kinds = ["AutoTokenizer", "LlamaTokenizer"]
    for kind in kinds:
        try:
            for name in names:
                _check_class(transformers, name)
            options = dict(trust_remote_code=False, local_files_only=True)
            maker: Any = getattr(transformers, kind)
            with _without_cache():
                tokenizer = maker.from_pretrained(folder, **options)
            if (
                expected_ids is not None
                and tokenizer.encode(PROBE, add_special_tokens=False) != expected_ids
            ):
                raise ValueError("the result has other ids than the sentencepiece library")
            tokens = dict(
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                pad_token=tokenizer.pad_token,
            )
            document = json.loads(tokenizer.backend_tokenizer.to_str())
            return document, {name: token for name, token in tokens.items() if token is not None}
        except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
            raise
        # Raised by transformers, protobuf or tokenizers, whose panics have no other base.
        except BaseException as error:
            reasons.append(" ".join(str(error).split())[:200] or type(error).__name__)
    raise DataError(
        f"{folder} has {sources[0].name} and no tokenizer.json, and transformers cannot convert it ({reasons[0]}): "
        "give --tokenizer the path of a tokenizer.json"
    )


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Keep tiktoken in the block from its cache, which gives a path the content that it had at first."""
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    try:
        yield
    finally:
        # Removed first: there may have been none, which differs from an empty one.
        os.environ.pop("TIKTOKEN_CACHE_DIR")
        if before is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = before


def _check_class(transformers: Any, name: str) -> None:
    """Raise a ValueError if a file names a class of transformers that is no tokenizer.

    AutoTokenizer calls from_pretrained of any class that a file names, and a model's would load the folder's weights.
    """
    # The name comes from a file, which may leave out "Fast", or name what transformers does not have.
    tokenizer_class = getattr(transformers, name, None) or getattr(
        transformers, f"{name}Fast", None
    )
    bases = (transformers.PreTrainedTokenizerBase, transformers.AutoTokenizer)
    if tokenizer_class is not None and not (
        isinstance(tokenizer_class, type) and issubclass(tokenizer_class, bases)
    ):
        raise ValueError(f"{name} is no tokenizer")


def _sentencepiece_ids(path: Path) -> list[int] | None:
    """Return the ids of PROBE in a SentencePiece model; None for other files, and without the library.

    transformers needs the library too, and says so. What the library refuses may make tokenizers, which would read it
    next, end the process.
    """
    if path.name not in SENTENCEPIECE:
        return None
    try:
        from sentencepiece import SentencePieceProcessor  # noqa: PLC0415

        return SentencePieceProcessor(model_file=str(path)).encode(PROBE)
    except (ImportError, OSError):
        return None
    except RuntimeError as error:
        if "ParseFromArray" in str(error) or "could not parse ModelProto" in str(error):
            return None  # no SentencePiece model but one of tiktoken
        raise DataError(
            f"{path}: a damaged SentencePiece model ({first_line(error)}): get it again"
        ) from None
