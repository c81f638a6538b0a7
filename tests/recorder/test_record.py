"""The files of a record: written, cut short, continued and read."""

from pathlib import Path

import numpy as np
import pytest

from te_models.errors import DataError
from te_models.recorder.layout import INDEX, RECORDED_FIELDS, RecordedTensor
from te_models.recorder.record import FOLDER, LAYOUT, STEPS, RecordWriter, read_record

TENSORS = [
    RecordedTensor("layers.0.attention.o_proj", "input"),
    RecordedTensor("layers.3.mlp.down_proj", "weight", expert=5),
    RecordedTensor("lm_head", "grad_output"),
]


def values(**fields: float) -> np.ndarray:
    made = np.zeros((len(TENSORS), len(RECORDED_FIELDS)))
    for name, value in fields.items():
        made[:, INDEX[name]] = value
    return made


def write(folder: Path, *steps: int, after: int = 0) -> None:
    writer = RecordWriter(folder, TENSORS, after)
    for step in steps:
        codes = np.array([-step, step, 2], dtype=np.int64)
        writer.write(step, values(elements=8, saturated=step, amax=2.5), codes)
    writer.close()


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, 2, 4)
    record = read_record(tmp_path)
    assert record.steps == [2, 4] and record.tensors == TENSORS
    assert record.share("saturated").tolist() == [[0.25] * 3, [0.5] * 3]
    assert record.codes[1].tolist() == [2**64 - 4, 4, 2]
    assert [tensor.layer for tensor in record.tensors] == [0, 3, None]
    assert record.tensors[1].name == "layers.3.mlp.down_proj.experts.5.weight"


def test_an_entry_cut_short_is_ignored_and_a_resumed_run_goes_on_after_its_step(
    tmp_path: Path,
) -> None:
    write(tmp_path, 1, 2, 3)
    path = tmp_path / FOLDER / STEPS
    path.write_bytes(path.read_bytes()[:-5])
    assert read_record(tmp_path).steps == [1, 2]
    write(tmp_path, 2, 3, after=1)
    assert read_record(tmp_path).steps == [1, 2, 3]
    write(tmp_path, 1)  # a new run
    assert read_record(tmp_path).steps == [1]


def test_a_tensor_that_was_not_quantized_has_no_statistics(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, TENSORS)
    made = values(elements=8, signal=100, noise=1, blocks=2, block_log2=2, block_log2_squares=10)
    made[1] = 0
    made[2, INDEX["signal"]] = -1
    writer.write(1, made, np.zeros(3, np.int64))
    writer.close()
    record = read_record(tmp_path)
    assert record.sqnr()[0, 0] == 20 and np.isnan(record.sqnr()[0, 1:]).all()
    assert record.block_spread()[0, 0] == 2 and np.isnan(record.field("amax")[0, 1])


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--record"):
        read_record(tmp_path)
    write(tmp_path, 7)
    with pytest.raises(DataError, match="step 3 was not recorded: the record has 1 steps from 7"):
        read_record(tmp_path).at(3)
    (tmp_path / FOLDER / LAYOUT).write_text('{"version": 2}')
    with pytest.raises(DataError, match="no layout of a record"):
        read_record(tmp_path)
