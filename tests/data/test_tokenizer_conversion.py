"""Folders without tokenizer.json: the libraries that the files are from judge what transformers makes of them."""

import base64
import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from te_models import load_tokenizer
from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.errors import DataError

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = [
    "Ten green bottles, hanging on the wall.",
    "The quick brown fox jumps over the lazy dog!",
    "12345 + 67 = 12412",
]
TEXTS = ["the quick fox", "Ten walls, 451 dogs!", "two  spaces\nand a line", "naïve 日本 🙂"]
SPECIAL = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write_json(folder: Path, name: str, document: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(document))


def sentencepiece_model(folder: Path, name: str) -> Any:
    """Write a SentencePiece model and return the library's own reader of it."""
    library = pytest.importorskip("sentencepiece")
    made = io.BytesIO()
    options: dict[str, Any] = dict(
        vocab_size=330, model_type="bpe", byte_fallback=True, minloglevel=2, split_digits=True
    )
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS * 40), model_writer=made, normalization_rule_name="identity",
        remove_extra_whitespaces=False, **options,
    )  # fmt: skip
    (folder / name).write_bytes(made.getvalue())
    return library.SentencePieceProcessor(model_proto=made.getvalue())


@pytest.mark.parametrize("kind", ["llama", "granite", "qwen2"])
@pytest.mark.parametrize("name", ["LlamaTokenizer", None])
def test_a_sentencepiece_model_is_converted(name: str | None, kind: str, tmp_path: Path) -> None:
    write_json(tmp_path, "config.json", {"model_type": kind})
    if name is not None:
        write_json(tmp_path, "tokenizer_config.json", {"tokenizer_class": name, **SPECIAL})
    judge = sentencepiece_model(tmp_path, "tokenizer.model")
    ours = load_tokenizer(tmp_path)
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id) == (330, 1, 2)
    for text in TEXTS:
        assert ours.encode(text) == judge.encode(text), text
        assert ours.decode(ours.encode(text)) == text
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode(TEXTS[0]) == ours.encode(TEXTS[0])


def test_vocabulary_and_merges_are_converted(tmp_path: Path) -> None:
    judge = tokenizers.ByteLevelBPETokenizer()
    judge.train_from_iterator(
        WORDS * 4, vocab_size=320, min_frequency=1, special_tokens=["<|endoftext|>"]
    )
    judge.save_model(str(tmp_path))
    names = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    write_json(tmp_path, "tokenizer_config.json", names)
    write_json(tmp_path, "config.json", {"model_type": "granite"})
    ours = load_tokenizer(tmp_path)
    assert ours.eos_token_id == 0
    for text in TEXTS:
        assert ours.encode(text) == judge.encode(text).ids
        assert ours.decode(ours.encode(text)) == text


def tiktoken_file(folder: Path, *merged: bytes) -> dict[bytes, int]:
    """Write a file of tiktoken with all bytes and `merged`; return the rank of each."""
    pieces = [*(bytes([byte]) for byte in range(256)), *merged]
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    lines = (base64.b64encode(piece) + b" %d" % rank for piece, rank in ranks.items())
    (folder / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    write_json(folder, "config.json", {"model_type": "llama"})
    write_json(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return ranks


def test_a_changed_tiktoken_file_gives_the_new_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tiktoken")
    folder, cache = tmp_path / "model", tmp_path / "temp"
    folder.mkdir()
    cache.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(cache))
    for piece in (b"th", b"he"):
        rank = tiktoken_file(folder, piece)[piece]
        assert load_tokenizer(folder).encode(piece.decode()) == [rank]
    assert not list(cache.iterdir()), "nothing is kept outside the folder"
    assert "TIKTOKEN_CACHE_DIR" not in os.environ


def test_a_tiktoken_file_is_converted(tmp_path: Path) -> None:
    library = pytest.importorskip("tiktoken")
    ranks = tiktoken_file(tmp_path, b"th", b"the", b" f", b" fo")
    judge = library.Encoding(
        "own", pat_str=r" ?\w+|[^\w\s]+|\s+", mergeable_ranks=ranks, special_tokens={}
    )
    ours = load_tokenizer(tmp_path)
    for text in (*TEXTS[:2], "the fox the"):
        assert ours.encode(text) == judge.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_a_sentencepiece_model_with_a_false_size_is_not_converted(tmp_path: Path) -> None:
    """The library refuses it, and the tokenizers library would reserve the memory that it asks for."""
    sentencepiece_model(tmp_path, "tokenizer.model")
    model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = model_pb2.ModelProto()
    model.ParseFromString((tmp_path / "tokenizer.model").read_bytes())
    model.normalizer_spec.precompiled_charsmap = (2**32 - 4).to_bytes(4, "little") + bytes(8)
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    write_json(tmp_path, "config.json", {"model_type": "llama"})
    with pytest.raises(DataError, match="tokenizer.model: a damaged SentencePiece model"):
        load_tokenizer(tmp_path)


def damaged(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(b"\x08\xff\xfe nothing\n")

    return write


def runs_code(folder: Path) -> None:
    names = {"AutoTokenizer": ["tokenization_own.Own", None]}
    write_json(folder, "tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": names})
    (folder / "tokenization_own.py").write_text("open('ran', 'w')\nclass Own: pass\n")
    (folder / "own.tiktoken").write_bytes(b"IQ== 0\n")


REFUSED = {
    "a damaged model": (damaged("tokenizer.model"), "has tokenizer.model and no tokenizer.json"),
    "a damaged vocabulary": (damaged("vocab.json"), "has vocab.json and no tokenizer.json"),
    "tekken": (
        lambda folder: write_json(folder, "tekken.json", {"vocab": []}),
        "has tekken.json and no tokenizer.json",
    ),
    "code": (runs_code, "has own.tiktoken and no tokenizer.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path, "config.json", {"model_type": "llama"})
    write(tmp_path)
    with pytest.raises(
        DataError, match=f"{message}, and transformers cannot.*give --tokenizer"
    ) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "vocab.json", "own.tiktoken", "merges.txt", "added_tokens.json"]
)
def test_only_regular_files_are_there(name: str, tmp_path: Path) -> None:
    damaged("spiece.model")(tmp_path)
    write_json(tmp_path, "config.json", {"model_type": "llama"})
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(tmp_path / name)
        with pytest.raises(DataError, match=f"{name} is not a regular file"):
            load_tokenizer(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "LlamaModel", "pipeline", "os"])
def test_only_classes_of_tokenizers_are_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged("vocab.json")(tmp_path)
    write_json(tmp_path, "config.json", {"model_type": "llama"})
    write_json(tmp_path, "tokenizer_config.json", {"tokenizer_class": name})
    asked: list[Any] = []
    model = __import__("transformers").PreTrainedModel
    monkeypatch.setattr(model, "from_pretrained", lambda *given, **options: asked.append(given))
    with pytest.raises(
        DataError, match="has vocab.json and no tokenizer.json, and transformers cannot"
    ):
        load_tokenizer(tmp_path)
    assert not asked


def test_without_transformers_the_line_says_what_to_install(
    tmp_path: Path, pretend: Callable
) -> None:
    write_json(tmp_path, "config.json", {"model_type": "llama"})
    (tmp_path / "spiece.model").write_bytes(b"")
    pretend("transformers", None)
    with pytest.raises(
        ValueError,
        match=r"spiece.model and no tokenizer.json, which needs transformers .*te-models\[hf\]",
    ):
        load_tokenizer(tmp_path)


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    damaged("tokenizer.model")(tmp_path)
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    assert load_tokenizer(tmp_path).files()["tokenizer.model"].startswith(b"\x08")
