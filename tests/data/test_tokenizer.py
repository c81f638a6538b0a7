"""Tokenizers: bytes, Hugging Face's format, and what is saved comes back."""

import base64
import importlib
import json
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from ranks import run_once

from te_models.data.byte_tokenizer import ByteTokenizer
from te_models.data.tokenizer import load_tokenizer
from te_models.data.tokenizer_base import Tokenizer
from te_models.errors import DataError
from te_models.saving.folder import save_folder

TEXTS = [
    "",
    "plain",
    "h\u00e9llo \u4f60\u597d \U0001f600",
    "<eos><bos> <0x41>",
    "a\u2028b\r\n\0c",
    " it 's , fine . ",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE that adds, truncates and pads, as a file may say, and its special tokens beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<x>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(["the cat and the hat and the bat"] * 8, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=6)
    folder = tmp_path_factory.mktemp("bpe")
    backend.save(str(folder / "tokenizer.json"))
    write(
        folder,
        "tokenizer_config.json",
        {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "x"},
    )
    return folder


def write(folder: Path, name: str, document: object) -> None:
    (folder / name).write_text(json.dumps(document))


def copy_bare(folder: Path, target: Path) -> Path:
    target.mkdir()
    (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return target


def ids(tokenizer: Tokenizer) -> tuple[int | None, ...]:
    return (
        tokenizer.vocab_size,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )


def test_bytes_are_the_default() -> None:
    tokenizer = load_tokenizer()
    assert isinstance(tokenizer, ByteTokenizer)
    assert ids(tokenizer) == (259, 256, 257, 258)
    assert tokenizer.encode("a\u00e9") == [97, 0xC3, 0xA9]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([256, 104, 105, 257, 258], "hi"),
        ([104, 0xC3], "h\ufffd"),
        ([0xFF, 104], "\ufffdh"),
        ([104, 259, 400, 105], "hi"),  # a model's vocabulary may be larger than its tokenizer's
        ([], ""),
    ],
)
def test_byte_decoding(tokens: list[int], text: str) -> None:
    assert ByteTokenizer().decode(tokens) == text


@given(st.text())
@example("<eos>")
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, text])[1].tolist() == tokenizer.encode(text)


@given(st.text())
@example("<eos> <0x41>")
@example("".join(TEXTS))
def test_the_tokenizers_library_reads_the_byte_tokenizer(text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer.from_str(json.dumps(ByteTokenizer().documents()["tokenizer"]))
    assert backend.encode(text).ids == ByteTokenizer().encode(text)
    assert backend.decode(backend.encode(text).ids) == text
    assert [backend.token_to_id(f"<{role}>") for role in ("bos", "eos", "pad")] == [256, 257, 258]


def test_byte_tokenizer_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    ByteTokenizer().save(tmp_path / "new" / "folder")
    assert isinstance(load_tokenizer(tmp_path / "new" / "folder"), ByteTokenizer)
    assert isinstance(
        load_tokenizer(str(tmp_path / "new" / "folder" / "tokenizer.json")), ByteTokenizer
    )


def test_saving_writes_two_files_over_what_was_there(folder: Path, tmp_path: Path) -> None:
    for tokenizer in (load_tokenizer(folder), ByteTokenizer()):
        tokenizer.save(tmp_path)
        again = load_tokenizer(tmp_path)
        again.save(tmp_path)  # over the files it came from
        assert type(again) is type(tokenizer) and ids(again) == ids(tokenizer)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        assert {
            path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()
        } == tokenizer.documents()


@pytest.mark.parametrize("text", [*TEXTS, "the cat and the hat and the bat " * 5])
def test_hugging_face_file_round_trip(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text  # so nothing was truncated, padded or added
    assert [batch.tolist() for batch in tokenizer.encode_batch(["x", text])][1] == tokens
    assert not {0, 1} & set(tokens)


def test_batches_longer_than_a_part_keep_their_order(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    texts = [f"the {number}" for number in range(2500)]
    assert [tokenizer.decode(tokens.tolist()) for tokens in tokenizer.encode_batch(texts)] == texts


def test_hugging_face_file_is_loaded_with_its_special_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    assert ids(tokenizer) == (
        len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]),
        0,
        1,
        None,
    )
    assert tokenizer.decode([0, *tokenizer.encode("hat"), 2, 1, 5000]) == "hat"
    assert (
        repr(tokenizer)
        == f"HuggingFaceTokenizer({tokenizer.vocab_size} ids, bos 0, eos 1, pad None, {folder})"
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, None, None)),
        ({"special_tokens_map.json": {"eos_token": "</s>", "pad_token": "a"}}, (None, 1, "a")),
        ({"generation_config.json": {"bos_token_id": 0, "eos_token_id": [1, 0]}}, (0, 1, None)),
        (
            {
                "tokenizer_config.json": {"eos_token": "<s>"},
                "special_tokens_map.json": {"eos_token": "</s>"},
            },
            (None, 0, None),
        ),
        (
            {
                "tokenizer_config.json": {"eos_token": None},
                "generation_config.json": {"eos_token_id": 1},
            },
            (None, 1, None),
        ),
        ({"tokenizer_config.json": {"eos_token": "absent"}}, (None, None, None)),
        ({"tokenizer_config.json": {"eos_token": {}}}, (None, None, None)),
        ({"tokenizer_config.json": {"eos_token_id": -1}}, (None, None, None)),
    ],
)
def test_special_tokens_are_found(
    folder: Path, tmp_path: Path, files: dict[str, object], expected: tuple
) -> None:
    bare = copy_bare(folder, tmp_path / "bare")
    for name, document in files.items():
        write(bare, name, document)
    tokenizer = load_tokenizer(bare)
    pad = tokenizer.encode("a")[0] if expected[2] == "a" else None
    assert ids(tokenizer)[1:] == (*expected[:2], pad)
    tokenizer.save(tmp_path / "saved")
    assert ids(load_tokenizer(tmp_path / "saved")) == ids(tokenizer)
    assert tokenizer.decode([i for i in ids(tokenizer)[1:] if i is not None]) == ""


def test_adapters_without_a_tokenizer_have_that_of_their_model(
    folder: Path, tmp_path: Path
) -> None:
    write(tmp_path, "adapter_config.json", {"base_model_name_or_path": str(folder)})
    assert load_tokenizer(tmp_path).documents() == load_tokenizer(folder).documents()


def test_vocabulary_with_holes_counts_to_its_highest_id(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 99}, unk_token="a")).save(
        str(tmp_path / "t.json")
    )
    assert load_tokenizer(tmp_path / "t.json").vocab_size == 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no model and no tokenizer"),
        (b"{", "tokenizer.json is not strict JSON"),
        (b"\xff\xfe\x00", "tokenizer.json is not strict JSON"),
        (b"{}", "tokenizer.json: not a tokenizer.json of Hugging Face's tokenizers library"),
        (b"[1]", "tokenizer.json is a JSON list, not an object"),
        (b"[" * 100_000, "tokenizer.json: JSON that is nested too deeply"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    pytest.importorskip("tokenizers")
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="tokenizer.json: no such file; give a Hugging Face tokenizer.json or a folder",
    ):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_missing_package_is_named(folder: Path, pretend: Callable) -> None:
    pretend("tokenizers", None)
    with pytest.raises(
        ValueError, match=r"needs tokenizers .*: pip install -U 'te-models\[train\]'"
    ):
        load_tokenizer(folder)


def test_transformers_reads_the_byte_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ByteTokenizer().save(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ids(tokenizer) == ids(ByteTokenizer())
    for text in TEXTS:
        tokens = tokenizer(text).input_ids
        assert tokens == ByteTokenizer().encode(text)
        assert tokenizer.decode([256, *tokens, 257], skip_special_tokens=True) == text


CONFIGS: dict[str, tuple[bytes, str]] = {
    "a list": (b'["<s>"]', "tokenizer_config.json is a JSON list, not an object"),
    "no JSON": (b"{,}", "tokenizer_config.json is not strict JSON"),
    "nested": (b'{"a":' * 100_000, "tokenizer_config.json: JSON that is nested too deeply"),
    "eos as a list": (
        b'{"eos_token": ["</s>"]}',
        r'eos_token is \["</s>"\]: give the text of one token',
    ),
    "eos as a number": (b'{"eos_token": 3}', "eos_token is 3: give the text"),
    "eos with a number inside": (b'{"eos_token": {"content": 3}}', "eos_token is 3: give the text"),
    "eos id as text": (b'{"eos_token_id": "2"}', 'eos_token_id is "2": give a whole number'),
    "large": (b" " * (2**26 + 1), "tokenizer_config.json has 67108865 bytes, more than the limit"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_damaged_configuration_is_one_line(case: str, folder: Path, tmp_path: Path) -> None:
    bare = copy_bare(folder, tmp_path / "bare")
    content, message = CONFIGS[case]
    (bare / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(bare)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "link to a device", "folder"])
def test_only_regular_files_are_read(name: str, kind: str, folder: Path, tmp_path: Path) -> None:
    bare = copy_bare(folder, tmp_path / "bare")
    (bare / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe")
    if kind == "pipe":
        os.mkfifo(bare / name)
    elif kind == "folder":
        (bare / name).mkdir()
    else:
        (bare / name).symlink_to("/dev/zero" if "device" in kind else tmp_path / "pipe")
    with pytest.raises(DataError, match=rf"{name} is not a regular file"):
        load_tokenizer(bare)


@pytest.mark.parametrize(
    "name", ["manifest.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_a_loop_of_links_is_one_line(name: str, folder: Path, tmp_path: Path) -> None:
    bare = copy_bare(folder, tmp_path / "bare")
    (bare / name).unlink(missing_ok=True)
    (bare / name).symlink_to(name)
    with pytest.raises(
        DataError, match="cannot be read.*Too many levels|has no tokenizer.json"
    ) as caught:
        load_tokenizer(bare)
    assert "\n" not in str(caught.value)


PANICS: dict[str, tuple[str, object]] = {
    "loading": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "////fwAAAAA="}),
    "a charsmap": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}),
    "chunks of nothing": ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
}


@pytest.mark.parametrize("case", PANICS)
def test_a_panic_of_the_library_is_one_line(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    part, value = PANICS[case]
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    write(
        tmp_path,
        "tokenizer.json",
        {"version": "1.0", "added_tokens": [], "model": model, part: value},
    )
    with pytest.raises(
        DataError, match=r"tokenizer.json: (a precompiled_charsmap|encoding failed)"
    ) as caught:
        load_tokenizer(tmp_path).encode_batch(["a b"])
    assert "\n" not in str(caught.value)
    assert case != "loading" or not capfd.readouterr().err, (
        "Rust's own lines while a file is loaded"
    )


@pytest.mark.parametrize("damage", ["two bytes", "all files"])
def test_a_damaged_tokenizer_of_a_run_offers_an_older_checkpoint(
    damage: str, tmp_path: Path
) -> None:
    for step in (1, 2):
        content = {"weights": {"a": torch.ones(1)}}
        save_folder(
            tmp_path / "checkpoints" / f"step-{step:08d}", content, ByteTokenizer().documents()
        )
    newest = tmp_path / "checkpoints" / "step-00000002"
    assert load_tokenizer(tmp_path).folder == newest
    if damage == "two bytes":
        text = (newest / "tokenizer.json").read_text()
        (newest / "tokenizer.json").write_text(text.replace("0x41", "0x14", 1))
    else:
        for file in newest.iterdir():
            file.unlink()
    with pytest.raises(
        DataError, match="; step-00000001 is whole: move step-00000002 elsewhere to use it$"
    ):
        load_tokenizer(tmp_path)


def load_in_limited_memory(folders: list[Path], out: Path) -> None:
    importlib.import_module("tokenizers")
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    for folder in folders:
        try:
            load_tokenizer(folder).encode("a")
        except DataError as error:
            with out.open("a") as file:
                file.write(f"refused: {error}\n")


def test_a_charsmap_that_lies_about_its_size_does_not_end_the_process(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    for size in (2**32 - 1, 2**32 - 4, 2**31):
        table = base64.b64encode(size.to_bytes(4, "little") + bytes(8)).decode()
        alone = {"type": "Precompiled", "precompiled_charsmap": table}
        for normalizer in (alone, {"type": "Sequence", "normalizers": [alone]}):
            document = {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": normalizer,
                "model": model,
            }
            folder = tmp_path / f"{normalizer['type']}-{size}"
            folder.mkdir()
            (folder / "tokenizer.json").write_text(json.dumps(document))
    run_once(partial(load_in_limited_memory, list(tmp_path.iterdir()), tmp_path / "said"))
    said = (tmp_path / "said").read_text().splitlines()
    assert len(said) == 6 and all(
        "refused:" in line and "longer than it is" in line for line in said
    ), said
