"""Saving survives kills, full disks and failures at every point; rotation and background saving keep their promises."""

import contextlib
import errno
import json
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from bits import assert_same_bits
from ranks import run_process
from torch import Tensor

from te_models import CausalLM
from te_models.distributed.control import Ranks
from te_models.errors import SaveError
from te_models.files import atomic
from te_models.saving import folder, sharded
from te_models.saving.folder import load_folder, save_folder
from te_models.saving.run_folder import MAX_FAILED_SAVES, Checkpoints
from te_models.saving.sharded import ShardedCheckpoints

REPOSITORY = Path(__file__).parents[2]


def content(step: int) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    return {"model": {"w": torch.full((100,), float(step)), "v": torch.tensor(step)}}, {
        "training": {"step": step}
    }


def step_of(path: Path | None) -> int:
    """The step of a checkpoint, after checking that all of it is of that step."""
    assert path is not None
    found = load_folder(path)
    step = found.documents["training"]["step"]
    assert found.tensors["model"]["v"] == step
    assert_same_bits(
        "found.tensors['model']['w']", found.tensors["model"]["w"], torch.full((100,), float(step))
    )
    return step


def entries(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


# Failures


OPEN = os.open


class Fault:
    """Makes the n-th call of `Path.mkdir`, or of `os` functions that write, fail as on a full disk;
    `open` is that of a folder."""

    NAMES = ("open", "fsync", "rename", "replace")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.calls, self.at = 0, at
        monkeypatch.setattr(
            Path, "mkdir", self.faulty(Path.mkdir)
        )  # which has an os.mkdir of its own in Python 3.10
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self.faulty(getattr(os, name)))

    def faulty(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts = function is not OPEN or os.path.isdir(args[0])
            self.calls += counts
            if counts and self.calls == self.at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize("replaces", [True, False], ids=["replaces", "new"])
def test_a_failure_at_any_point_leaves_the_previous_one(
    replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 0
    for at in range(1, 100):
        root = tmp_path / str(at)
        root.mkdir()
        if replaces:
            save_folder(root / "out", *content(1))
        with monkeypatch.context() as patch:
            fault = Fault(patch, at)
            try:
                save_folder(root / "out", *content(2), max_shard_bytes=8)
                error = None
            except SaveError as caught:
                error = str(caught)
        if error is None:
            assert step_of(root / "out") == 2
        else:
            failures += 1
            assert error.startswith(f"could not save {root / 'out'}: No space left on device")
            assert "\n" not in error
            assert entries(root) == ({"out"} if replaces else set())
            assert not replaces or step_of(root / "out") == 1
        save_folder(root / "out", *content(3))
        assert entries(root) == {"out"}
        if fault.calls < at:
            break
    # mkdir of the folder, an fsync for each of 5 files, open and fsync of it and its parent, the rename in, and the
    # rename aside.
    assert failures == 11 + replaces


@contextlib.contextmanager
def tiny_disk() -> Iterator[None]:
    """No file may grow beyond 2 KB: writes fail half-way, in the system itself.

    The limit is the whole process's, so it ends within the test: pytest's own report may be going to a longer file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_disk_leaves_the_previous_one(blocking: bool, tmp_path: Path) -> None:
    run = Checkpoints(tmp_path)
    run.save(1, *content(1))
    tensors, documents = content(2)
    tensors["optimizer"] = {"m": torch.zeros(10_000)}
    with (
        tiny_disk(),
        pytest.raises(SaveError, match=r"could not save .*step-00000002: .*File too large"),
    ):
        run.save(2, tensors, documents, blocking=blocking)
        run.wait()
    assert entries(tmp_path) == {"step-00000001", "latest"}
    assert step_of(run.latest()) == 1
    run.save(2, *content(2))
    assert step_of(run.latest()) == 2


def test_an_interrupt_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path / "out", *content(1))

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_folder(tmp_path / "out", *content(2))
    assert entries(tmp_path) == {"out"}
    assert step_of(tmp_path / "out") == 1


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """The calls of fsync, rename and replace: their names, and what is made durable, moved or replaced."""
    found: list[tuple[str, Path]] = []
    paths = {
        "fsync": lambda file: os.readlink(f"/proc/self/fd/{file}"),
        "rename": lambda one, other: one,
    }
    paths["replace"] = lambda one, other: other

    def record(name: str, call: Callable[..., Any], *args: Any) -> Any:
        found.append((name, Path(paths[name](*args))))
        return call(*args)

    for name in paths:
        monkeypatch.setattr(os, name, partial(record, name, getattr(os, name)))
    return found


def test_every_folder_of_a_save_is_fsynced(events: list[tuple[str, Path]], tmp_path: Path) -> None:
    """Those inside it before they are renamed into place, and those above that were made for it."""
    template = {"additional_chat_templates/tools.jinja": b"{{ messages }}"}
    save_folder(tmp_path / "runs" / "mine" / "out", content(1)[0], template)
    told = [f"{name} {path.relative_to(tmp_path)}" for name, path in events]
    told = [re.sub(r"/\.out\.saving-[0-9a-f]+", "/NEW", line) for line in told]
    assert told[:2] == ["fsync .", "fsync runs"] and told[-1] != "rename runs/mine/NEW"
    renamed = told.index("rename runs/mine/NEW")
    files, after = told[2:renamed], told[renamed + 1 :]
    inside = "runs/mine/NEW/additional_chat_templates"
    durable = {f"runs/mine/NEW/{name}" for name in ("model.safetensors", "manifest.json")}
    assert {line.removeprefix("fsync ") for line in files} >= {
        f"{inside}/tools.jinja",
        inside,
        *durable,
    }
    assert files[-1] == "fsync runs/mine/NEW" and "fsync runs/mine" in after


def test_the_name_of_the_newest_is_durable_too(
    events: list[tuple[str, Path]], tmp_path: Path
) -> None:
    """Before an older checkpoint goes: after a power failure `latest` must not name one that is gone."""
    runs = Checkpoints(tmp_path, keep_last=1)
    runs.save(1, *content(1))
    events.clear()
    runs.save(2, *content(2))
    told = [f"{name} {path.name.split('.saving-')[0]}" for name, path in events]
    at = told.index("replace latest")
    assert told[at - 1 : at + 3] == [
        "fsync .latest", "replace latest", f"fsync {tmp_path.name}", "rename step-00000001",
    ]  # fmt: skip


# Kills


def test_kills_never_damage_or_lose_a_checkpoint(tmp_path: Path) -> None:
    script = REPOSITORY / "benchmarks" / "kill_while_saving.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), "--kills", "4", "--folder", str(tmp_path)]
    done = run_process(command, env=environment, timeout=120)
    summary = json.loads(done.stdout)
    assert summary["whole"] + summary["none saved yet"] == 4
    assert summary["whole"] > 0


def test_a_pipe_in_place_of_latest_makes_nobody_wait(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path)
    run.save(1, *content(1))
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    found: list[Path | None] = []
    reader = threading.Thread(target=lambda: found.append(run.latest()), daemon=True)
    reader.start()
    reader.join(10)
    assert found == [tmp_path / "step-00000001"]


def test_a_kill_between_the_two_renames_is_recovered_from(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path)
    run.save(1, *content(1))
    os.rename(tmp_path / "step-00000001", tmp_path / ".step-00000001.replaced")
    (tmp_path / ".step-00000001.saving-0123abcd").mkdir()
    assert run.latest() == tmp_path / "step-00000001"
    assert run.all() == [tmp_path / "step-00000001"]
    assert step_of(run.latest()) == 1
    run.save(2, *content(2))
    assert entries(tmp_path) == {"latest", "step-00000001", "step-00000002"}
    assert step_of(tmp_path / "step-00000001") == 1


def test_leftovers_are_swept_and_nothing_else(tmp_path: Path) -> None:
    for name in (
        "..step-1",
        ".step-00000003.saving-ab",
        ".latest.saving-cd",
        ".other.saving-ef",
        "metrics.jsonl",
    ):
        (tmp_path / name).write_text("x")
    (tmp_path / ".step-00000002.saving-00").mkdir()
    (tmp_path / ".step-00000002.saving-00" / "model.safetensors").write_text("x")
    run = Checkpoints(tmp_path)
    run.save(1, *content(1))
    kept = {"..step-1", ".other.saving-ef", "metrics.jsonl"}
    assert entries(tmp_path) == {"latest", "step-00000001", *kept}


# Rotation


@pytest.mark.parametrize(("keep", "left"), [(None, [1, 2, 3, 4]), (3, [2, 3, 4]), (1, [4])])
@pytest.mark.parametrize("blocking", [True, False])
def test_keeps_the_last_ones(
    keep: int | None, left: list[int], blocking: bool, tmp_path: Path
) -> None:
    run = Checkpoints(tmp_path / "a" / "b", keep_last=keep)
    assert run.latest() is None
    assert run.all() == []
    for step in (1, 2, 3, 4):
        path = run.save(step, *content(step), blocking=blocking)
        assert path.name == f"step-{step:08d}"
    run.wait()
    assert [step_of(path) for path in run.all()] == left
    assert step_of(run.latest()) == 4
    assert (tmp_path / "a" / "b" / "latest").read_text() == "step-00000004\n"


def test_old_ones_go_only_after_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Checkpoints(tmp_path, keep_last=1)
    run.save(1, *content(1))
    with monkeypatch.context() as patch:
        fault = Fault(patch, 10**6)
        run.save(2, *content(2))
    for at in range(1, fault.calls):
        with monkeypatch.context() as patch:
            Fault(patch, at)
            try:
                run.save(3, *content(3))
            except SaveError:
                assert step_of(run.latest()) in (2, 3)
    assert step_of(run.latest()) == 3


def test_a_rerun_from_an_earlier_step_keeps_what_it_saves(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path, keep_last=2)
    for step in (10, 20, 5):
        run.save(step, *content(step))
    assert step_of(run.latest()) == 5
    assert [step_of(path) for path in run.all()] == [5, 10, 20]


@pytest.mark.parametrize(
    "text", [b"", b"step-00000009\n", b"../elsewhere\n", b"\xff\xfe", b"x" * 10_000]
)
def test_latest_falls_back_on_the_newest_folder(text: bytes, tmp_path: Path) -> None:
    run = Checkpoints(tmp_path)
    for step in (1, 2):
        run.save(step, *content(step))
    (tmp_path / "latest").write_bytes(text)
    assert step_of(run.latest()) == 2


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path)
    for step in (99_999_999, 100_000_000, 3):
        run.save(step, *content(step))
    assert [step_of(path) for path in run.all()] == [3, 99_999_999, 100_000_000]


# Background


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold back every write until the event is set."""
    event = threading.Event()

    def late(write: Callable[..., Any]) -> Callable[..., Any]:
        def write_late(*args: Any) -> Any:
            assert event.wait(30)
            return write(*args)

        return write_late

    for owner, name in (
        (folder, "write_file"),
        (atomic, "write_file"),
        (folder, "write_safetensors"),
    ):
        monkeypatch.setattr(owner, name, late(getattr(owner, name)))
    yield event
    event.set()


def test_background_saves_are_of_the_moment_of_the_call(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    run = Checkpoints(tmp_path)
    weight = torch.ones(100)
    documents = {"training": {"list": [1]}}
    tensors = {
        "model": {
            "w": weight,
            "tied": weight,
            "t": weight.view(10, 10).t(),
            "f8": weight.to(torch.float8_e5m2),
        }
    }
    run.save(1, tensors, documents, blocking=False)
    weight.zero_()
    documents["training"]["list"].append(2)
    assert run.latest() is None
    slow_disk.set()
    run.wait()
    found = load_folder(tmp_path / "step-00000001")
    assert found.documents["training"] == {"list": [1]}
    assert all(
        torch.equal(tensor.float(), torch.ones_like(tensor).float())
        for tensor in found.tensors["model"].values()
    )
    assert found.tensors["model"]["tied"].data_ptr() == found.tensors["model"]["w"].data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_background_saves_of_cuda_tensors_are_of_the_moment_of_the_call(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path)
    weight = torch.ones(1 << 24, device="cuda")
    for step in (1, 2):
        weight.fill_(float(step))
        run.save(
            step, {"model": {"w": weight, "t": weight.view(4096, 4096).t()}}, {}, blocking=False
        )
        weight.zero_()
        assert run._buffers["model", "w"].is_pinned()
    run.wait()
    for path, step in zip(run.all(), (1, 2), strict=True):
        assert all((tensor == step).all() for tensor in load_folder(path).tensors["model"].values())


def test_background_buffers_are_reused_and_follow_the_shapes(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path)
    pointers = []
    for step, size in enumerate((10, 10, 20)):
        run.save(step, {"model": {"w": torch.full((size,), float(step))}}, {}, blocking=False)
        pointers.append(run._buffers["model", "w"].data_ptr())
    run.wait()
    assert pointers[0] == pointers[1]
    for step, size in enumerate((10, 10, 20)):
        found = load_folder(tmp_path / f"step-{step:08d}").tensors["model"]["w"]
        assert_same_bits("found", found, torch.full((size,), float(step)))


def test_a_failed_background_save_surfaces_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        Fault(patch, 3)
        run.save(1, *content(1), blocking=False)
        with pytest.raises(SaveError, match="No space left"):
            run.wait()
    assert "No space left" in caplog.text
    run.wait()
    run.save(3, *content(3))
    assert [step_of(path) for path in run.all()] == [3]


def of_one(root: Path) -> Checkpoints:
    return Checkpoints(root)


def of_several(root: Path) -> ShardedCheckpoints:
    """The checkpoints of a job, of which this is the only process."""
    model = CausalLM.from_preset(
        "gated-nano", device="cpu", hidden_size=96, intermediate_size=96, num_hidden_layers=3
    )
    return ShardedCheckpoints(
        root, ranks=Ranks(), model=model, names={}, fetch=lambda *arguments: arguments[-1]
    )


@pytest.mark.parametrize("of", [of_one, of_several])
def test_one_failed_background_save_does_not_end_the_run(
    of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = of(tmp_path)
    run.save(1, *content(1))
    with monkeypatch.context() as patch:
        Fault(patch, 3)
        run.save(2, *content(2), blocking=False)
        run.save(3, *content(3), blocking=False)
        run.wait()
    assert "No space left" in caplog.text and "the next save tries again" in caplog.text
    assert [step_of(path) for path in run.all()] == [1, 3]


@pytest.mark.parametrize("of", [of_one, of_several])
def test_saves_that_keep_failing_end_the_run(
    of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the last one, in the foreground, is tried all the same."""
    run = of(tmp_path)
    run.save(1, *content(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "broken")))
        for step in range(2, 2 + MAX_FAILED_SAVES):
            run.save(step, *content(step), blocking=False)
        with pytest.raises(SaveError, match="broken"):
            run.save(9, *content(9), blocking=False)
        for step in range(10, 10 + MAX_FAILED_SAVES):
            run.save(step, *content(step), blocking=False)
        with pytest.raises(SaveError, match="broken"):
            run.save(20, *content(20))
    assert step_of(run.latest()) == 1
    run.save(21, *content(21))
    run.wait()
    assert step_of(run.latest()) == 21


def test_no_process_waits_for_a_disk_in_a_collective_on_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only control messages have the time that a slow disk takes."""
    run, calls = of_several(tmp_path), Mock()
    for owner, name in ((sharded, "whole"), (sharded, "write_safetensors"), (run.ranks, "gather")):
        calls.attach_mock(Mock(side_effect=getattr(owner, name)), name)
        monkeypatch.setattr(owner, name, getattr(calls, name))
    run.save(1, {"model": {"w": torch.ones(3)}, "training": {"w": torch.ones(3)}}, {})
    assert [call[0] for call in calls.mock_calls] == ["whole", "write_safetensors", "gather"] * 2


@pytest.mark.parametrize("blocking", [True, False])
def test_a_failure_is_tried_again_after_each_pause(
    blocking: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, slept = Checkpoints(tmp_path, retry_pauses=(1, 5)), Mock()
    monkeypatch.setattr(time, "sleep", slept)
    with monkeypatch.context() as patch:
        fsync = Mock(side_effect=[OSError(errno.EIO, "broken")] * 2 + [None] * 20)
        patch.setattr(os, "fsync", fsync)
        run.save(1, *content(1), blocking=blocking)
        run.wait()
    assert step_of(run.latest()) == 1
    assert [call.args for call in slept.call_args_list] == [(1,), (5,)]
    assert caplog.text.count("broken") == 2 and "trying again in 5 s" in caplog.text


def test_unsavable_state_is_refused_at_once(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="flatten_state"):
        run.save(1, {}, {"training": {1: 2}}, blocking=False)
    run.wait()
    assert list(tmp_path.iterdir()) == []


def test_pending_saves_finish_at_exit(tmp_path: Path) -> None:
    program = (
        "import sys, time, torch\n"
        "from te_models.saving import folder\n"
        "from te_models.saving.run_folder import Checkpoints\n"
        "write = folder.write_file\n"
        "folder.write_file = lambda *args: (time.sleep(0.1), write(*args))[1]\n"
        "Checkpoints(sys.argv[1]).save(1, {'model': {'w': torch.full((100,), 1.0), 'v': torch.tensor(1)}},\n"
        "                              {'training': {'step': 1}}, blocking=False)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run_process([sys.executable, "-c", program, str(tmp_path)], env=environment, timeout=60)
    assert step_of(Checkpoints(tmp_path).latest()) == 1
