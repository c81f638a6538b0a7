"""Checkpoints of a training run: numbered folders with rotation, saved in the foreground or in the background."""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from te_models.device.cuda_capture import outside_captures
from te_models.errors import CheckpointError, DataError, SaveError, UsageError
from te_models.files.atomic import discard, readable, replace_text, sweep
from te_models.files.formats import Document, read_bytes
from te_models.saving.folder import (
    MAX_SHARD_BYTES,
    Content,
    TensorGroups,
    load_folder,
    prepare,
    write_content,
)

LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,18})")
MAX_FAILED_SAVES = 2  # in a row, in the background, before the next save raises
_HIDDEN_STEP = re.compile(r"\.(step-\d{8,18})\.replaced")


def step_name(step: int) -> str:
    """Return the name of a checkpoint's folder, such as "step-00000200"."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


class Checkpoints:
    """The checkpoints of one run: `root/step-00000200`, ..., and the file `root/latest` with the newest complete one.

    Args:
        root: the run's folder; other files in it are left unchanged.
        keep_last: the number of checkpoints to keep; older ones are deleted once a new one is durable. None keeps all.
        max_shard_bytes: a group of tensors larger than this is split into shards.
        retry_pauses: seconds to wait before each further attempt at a save that failed; each failure is logged.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        retry_pauses: Sequence[float] = (),
    ) -> None:
        self.root = Path(root)
        self.keep_last = keep_last
        self.max_shard_bytes = max_shard_bytes
        self.retry_pauses = retry_pauses
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._reserving: threading.Thread | None = None
        # Cleared while a background save still reads the caller's tensors.
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # from the newest background save
        self._failed_saves = 0  # background saves in a row that failed
        self.seconds = 0.0  # the time that the newest save took

    def save(
        self,
        step: int,
        tensors: TensorGroups,
        documents: Document,
        *,
        blocking: bool = True,
        copy_later: bool = False,
    ) -> Path:
        """Save `root/step-<step>`, then name it in `latest`, then delete checkpoints beyond `keep_last`.

        With `blocking=False` the tensors are copied to host memory before this returns, and a thread does the rest; the
        next save, and the interpreter at exit, wait for it. The host memory is as large as a checkpoint and serves all
        saves (`reserve` allocates it early).

        A background save that fails is logged, and the next save tries again; `MAX_FAILED_SAVES` in a row are an error.

        Args:
            step: the number of steps so far, which names the folder.
            tensors: group -> name -> tensor.
            documents: name -> JSON object or file.
            blocking: return when the checkpoint is durable.
            copy_later: with `blocking=False`, let the thread copy the tensors too (on a CUDA device on a separate
                stream). The caller must not change them before `wait_for_copy` has returned: a training step changes
                them only at its end.

        Returns:
            The folder of the checkpoint.

        Raises:
            UsageError: an argument cannot be saved exactly.
            SaveError: this save failed, or background saves keep failing (a save with `blocking` is always tried);
                earlier checkpoints are intact.
        """
        self._join()
        if self._failed_saves >= MAX_FAILED_SAVES and not blocking:
            self.wait()
        content = prepare(tensors, documents)
        path = self.root / step_name(step)
        if blocking:
            self._retrying(lambda: self._commit(path, content))
        else:
            self._start_thread(path, content)
            if not copy_later:
                self.wait_for_copy()
        return path

    def _start_thread(self, path: Path, content: Content) -> None:
        """Start the thread that copies the tensors and writes the checkpoint."""
        # Before the thread starts, or `wait_for_copy` could return too early.
        self._copied.clear()
        devices = set()
        for members in content.tensors.values():
            for tensor in members.values():
                if tensor.is_cuda:
                    devices.add(tensor.device)
        # Streams beside the training one, so that the copy and the next step run side by side.
        streams = [_side_stream(device) for device in devices]
        self._thread = threading.Thread(
            target=self._commit_in_background, args=(path, content, streams)
        )
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Wait until the save under way, if any, no longer reads the caller's tensors."""
        self._copied.wait()

    def reserve(self, tensors: TensorGroups, documents: Document) -> None:
        """Allocate the host memory of background saves in a thread, so that the first save need not wait for it.

        It takes the arguments of `save`, of which only shapes, dtypes and devices count. The first write to new memory
        takes longer than the copy itself, since the operating system clears every page, and pinning takes even longer.
        """
        content = prepare(tensors, documents)
        shapes = {}
        for group, members in content.tensors.items():
            for name, tensor in members.items():
                shapes[(group, name)] = (tensor.shape, tensor.dtype, tensor.is_cuda)
        self._reserving = threading.Thread(target=self._make_buffers, args=(shapes,))
        self._reserving.start()

    def _make_buffers(
        self, shapes: Mapping[tuple[str, str], tuple[torch.Size, torch.dtype, bool]]
    ) -> None:
        for key, (shape, dtype, pinned) in shapes.items():
            with outside_captures():
                self._buffers[key] = torch.empty(shape, dtype=dtype, pin_memory=pinned)
            # Touch every page: the operating system maps memory only when it is written to.
            self._buffers[key].zero_()

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            SaveError: the newest background save failed; a second call does not raise it again.
        """
        self._join()
        if (error := self._error) is not None:
            self._error = None
            self._failed_saves = 0
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, or None."""
        # `latest` may be damaged or missing, as after a kill: the highest complete number stands in for it.
        name = ""
        with contextlib.suppress(CheckpointError):
            name = read_bytes(self.root / LATEST, 64).decode("ascii", "replace").strip()
        if _STEP.fullmatch(name) and readable(self.root / name).is_dir():
            return self.root / name
        return next(reversed(self.all()), None)

    def to_resume(self) -> Path:
        """Return the newest complete checkpoint; a UsageError if there is none."""
        latest_checkpoint = self.latest()
        if latest_checkpoint is None:
            raise UsageError(
                f"nothing to resume: {self.root.parent} has no checkpoint; start without --resume"
            )
        return latest_checkpoint

    def all(self) -> list[Path]:
        """Return all complete checkpoints, oldest step first."""
        if not self.root.is_dir():
            return []
        # A kill between the two renames of a replacement leaves the old folder under a hidden name: it still counts.
        names = {_HIDDEN_STEP.sub(r"\1", name) for name in os.listdir(self.root)}
        paths = [self.root / name for name in names if _STEP.fullmatch(name)]
        return sorted(paths, key=step_of)

    def _snapshot(
        self, tensors: TensorGroups, streams: Iterable[torch.cuda.Stream]
    ) -> dict[str, dict[str, Tensor]]:
        """Copy tensors to the host buffers, on `streams` where the source is on a CUDA device; return the buffers.

        Buffers of the save before are used again. Those for CUDA tensors are pinned.
        """
        if self._reserving is not None:
            # The thread of `reserve`, which fills self._buffers.
            self._reserving.join()
            self._reserving = None
        buffers: dict[tuple[str, str], Tensor] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(outside_captures())
            # These streams began by waiting for the step that is saved (_side_stream).
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            for group, members in tensors.items():
                for name, tensor in members.items():
                    buffer = self._buffers.get((group, name))
                    if (
                        buffer is None
                        or buffer.shape != tensor.shape
                        or buffer.dtype != tensor.dtype
                    ):
                        # Pinned memory is slow to allocate, and lets the copy run beside the next step.
                        buffer = torch.empty(
                            tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                        )
                    buffers[group, name] = buffer.copy_(tensor, non_blocking=True)
            for stream in streams:
                stream.synchronize()
        self._buffers = buffers
        return {
            group: {name: buffers[group, name] for name in members}
            for group, members in tensors.items()
        }

    def _commit_in_background(
        self, path: Path, content: Content, streams: list[torch.cuda.Stream]
    ) -> None:
        try:
            try:
                content = replace(content, tensors=self._snapshot(content.tensors, streams))
            finally:
                self._copied.set()
            self._retrying(lambda: self._commit(path, content))
        # An exception would end this thread unseen: the next save, or `wait`, raises it.
        except BaseException as error:
            self._note_failure(error)

    def _note_failure(self, error: BaseException) -> None:
        """Remember that a save failed; logged here, for a run that ends without another one."""
        logging.getLogger(__name__).warning("%s; the next save tries again", error)
        self._error = error
        self._failed_saves += 1

    def _retrying(self, save: Callable[[], None]) -> None:
        """Run `save`; while it fails, wait for the next of `retry_pauses` and run it again."""
        begun = time.monotonic()
        for pause in self.retry_pauses:
            try:
                save()
                break
            except SaveError as error:
                logging.getLogger(__name__).warning("%s; trying again in %g s", error, pause)
                time.sleep(pause)
        # The last attempt: its error ends the save.
        else:
            save()
        self._error = None
        self._failed_saves = 0
        self.seconds = time.monotonic() - begun

    def _commit(self, path: Path, content: Content) -> None:
        self.sweep()
        write_content(path, content, self.max_shard_bytes)
        self.publish(path)

    def sweep(self) -> None:
        """Clean up after a save that was killed."""
        sweep(self.root, "step-*")
        sweep(self.root, LATEST)

    def publish(self, path: Path) -> None:
        """Name `path`, which is complete, in `latest`, and delete checkpoints beyond `keep_last`."""
        # `latest` changes before older checkpoints are deleted, so that it always names an existing folder.
        replace_text(self.root / LATEST, f"{path.name}\n")
        if self.keep_last is not None:
            for old in self.all()[: -self.keep_last]:
                # A run that resumed from an earlier step saves one that is not the newest.
                if old != path:
                    discard(old)


@contextlib.contextmanager
def offering_older(path: Path) -> Iterator[None]:
    """Add the newest undamaged checkpoint of the run to an error about a damaged checkpoint `path`."""
    try:
        yield
    except (CheckpointError, DataError) as error:
        # An undamaged checkpoint is not at fault: then the request was, and the error stays as it is.
        if not _STEP.fullmatch(path.name) or _whole(path):
            raise
        for older in reversed(Checkpoints(path.parent).all()):
            if _whole(older):
                raise type(error)(
                    f"{error}; {older.name} is whole: move {path.name} elsewhere to use it"
                ) from None
        raise


def _whole(path: Path) -> bool:
    """Return whether a checkpoint's files have the sizes and hashes of its manifest."""
    try:
        load_folder(path)
    except CheckpointError:
        return False
    return True


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that starts after the work now queued on the device's current stream."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
