"""Checkpoints of a training run: numbered folders with rotation, saved at once or in the background."""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_models.checkpoint.folder import MAX_SHARD_BYTES, Content, prepare, write_content
from te_models.device.cuda_capture import outside_captures
from te_models.errors import UsageError
from te_models.files.atomic import discard, readable, replace_text, sweep

_LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,18})")
_HIDDEN_STEP = re.compile(r"\.(step-\d{8,18})\.replaced")


class Checkpoints:
    """The checkpoints of one run: `root/step-00000200`, ..., and the file `root/latest` that names the newest whole one.

    Args:
        root: the run's folder; other files in it are left alone.
        keep_last: how many checkpoints to keep; older ones are deleted once a new one is durable. None keeps all.
        max_shard_bytes: a group of tensors larger than this is split into shards.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, keep_last: int | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise UsageError(f"keep_last is {keep_last}; it must be at least 1, or None to keep all")
        self.root = Path(root)
        self.keep_last = keep_last
        self.max_shard_bytes = max_shard_bytes
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._reserving: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        documents: Mapping[str, Any],
        *,
        blocking: bool = True,
        copy_later: bool = False,
    ) -> Path:
        """Saves `root/step-<step>`, then names it in `latest`, then deletes what `keep_last` does not keep.

        With `blocking=False` the tensors are copied to host memory (kept and reused from save to save: one checkpoint's
        size; see `reserve` for the first) before this returns, and all else happens in a thread that the interpreter
        waits for at exit. One such save is under way at a time: the next call waits for it first. With `copy_later` the
        copy, too, happens in the thread (on a CUDA device on a stream of its own), and the caller must not change the
        tensors until `copied` has returned: a training step changes them at its very end.

        Raises:
            ValueError: something given cannot be saved exactly.
            SaveError: this save failed, or the one that was under way; earlier checkpoints are intact.
        """
        self.wait()
        content = prepare(tensors, documents)
        path = self.root / f"step-{step:08d}"
        if blocking:
            self._commit(path, content)
        else:
            self._copied.clear()
            streams = [_side_stream(device) for device in _cuda_devices(content.tensors)]
            self._thread = threading.Thread(target=self._commit_in_background, args=(path, content, streams))
            self._thread.start()
            if not copy_later:
                self.copied()
        return path

    def copied(self) -> None:
        """Waits until the save under way no longer needs the tensors it was given; at once where there is none."""
        self._copied.wait()

    def reserve(self, tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, Any]) -> None:
        """Makes the host memory for saves in the background now, in a thread, so that the first one need not wait for it.

        Takes what `save` will take; the values do not matter. Memory that was never written to costs more to fill than
        the copy itself (the kernel clears every page), and pinning it costs more still.
        """
        content = prepare(tensors, documents)
        shapes = {
            (group, name): (tensor.shape, tensor.dtype, tensor.is_cuda)
            for group, members in content.tensors.items()
            for name, tensor in members.items()
        }
        self._reserving = threading.Thread(target=self._make_buffers, args=(shapes,))
        self._reserving.start()

    def _make_buffers(self, shapes: Mapping[tuple[str, str], tuple[torch.Size, torch.dtype, bool]]) -> None:
        for key, (shape, dtype, pinned) in shapes.items():
            with outside_captures():
                self._buffers[key] = torch.empty(shape, dtype=dtype, pin_memory=pinned)
            self._buffers[key].zero_()

    def wait(self) -> None:
        """Waits for the save under way.

        Raises:
            SaveError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None where there is none."""
        name = ""
        with contextlib.suppress(OSError), open(self.root / _LATEST, "rb") as file:
            name = file.read(64).decode("ascii", "replace").strip()
        if _STEP.fullmatch(name) and readable(self.root / name).is_dir():
            return self.root / name
        return next(reversed(self.all()), None)

    def all(self) -> list[Path]:
        """All whole checkpoints, oldest step first."""
        if not self.root.is_dir():
            return []
        names = {_HIDDEN_STEP.sub(r"\1", name) for name in os.listdir(self.root)}
        return [self.root / name for name in sorted(filter(_STEP.fullmatch, names), key=lambda name: int(name[5:]))]

    def _snapshot(
        self, tensors: Mapping[str, Mapping[str, Tensor]], streams: Iterable[Any]
    ) -> dict[str, dict[str, Tensor]]:
        """Copies tensors to reused host buffers, pinned where the source is on a CUDA device, on its stream."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        buffers: dict[tuple[str, str], Tensor] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(outside_captures())
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            for group, members in tensors.items():
                for name, tensor in members.items():
                    buffer = self._buffers.get((group, name))
                    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                    buffers[group, name] = buffer.copy_(tensor, non_blocking=True)
            for stream in streams:
                stream.synchronize()
        self._buffers = buffers
        return {group: {name: buffers[group, name] for name in members} for group, members in tensors.items()}

    def _commit_in_background(self, path: Path, content: Content, streams: list[Any]) -> None:
        try:
            try:
                content = replace(content, tensors=self._snapshot(content.tensors, streams))
            finally:
                self._copied.set()
            self._commit(path, content)
        except BaseException as error:
            # Logged as well, for a run that ends without asking.
            logging.getLogger(__name__).error("%s", error)
            self._error = error

    def _commit(self, path: Path, content: Content) -> None:
        self.sweep()
        write_content(path, content, self.max_shard_bytes)
        self.publish(path)

    def sweep(self) -> None:
        """Tidies up after a save that was killed."""
        sweep(self.root, "step-*")
        sweep(self.root, _LATEST)

    def publish(self, path: Path) -> None:
        """Names `path`, which is whole, in `latest`, and deletes what `keep_last` does not keep."""
        replace_text(self.root / _LATEST, f"{path.name}\n")
        if self.keep_last is not None:
            for old in self.all()[: -self.keep_last]:
                if old != path:
                    discard(old)


def _cuda_devices(tensors: Mapping[str, Mapping[str, Tensor]]) -> set[torch.device]:
    return {tensor.device for members in tensors.values() for tensor in members.values() if tensor.is_cuda}


def _side_stream(device: torch.device) -> Any:
    """A stream that starts where the device's current one is now."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
