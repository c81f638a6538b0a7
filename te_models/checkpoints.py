"""Checkpoints of a training run: numbered folders with rotation, saved at once or in the background."""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_models.durable import discard, readable, replace_text, sweep
from te_models.state import MAX_SHARD_BYTES, Content, prepare, write_content

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
            raise ValueError(f"keep_last is {keep_last}; it must be at least 1, or None to keep all")
        self.root = Path(root)
        self.keep_last = keep_last
        self.max_shard_bytes = max_shard_bytes
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        documents: Mapping[str, Any],
        *,
        blocking: bool = True,
    ) -> Path:
        """Saves `root/step-<step>`, then names it in `latest`, then deletes what `keep_last` does not keep.

        With `blocking=False` the tensors are copied to host memory (kept and reused from save to save: one checkpoint's
        size) before this returns, and all else happens in a thread that the interpreter waits for at exit. One such
        save is under way at a time: the next call waits for it first.

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
            content = replace(content, tensors=self._snapshot(content.tensors))
            self._thread = threading.Thread(target=self._commit_in_background, args=(path, content))
            self._thread.start()
        return path

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

    def _snapshot(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copies tensors to reused host buffers, pinned where the source is on a CUDA device."""
        buffers: dict[tuple[str, str], Tensor] = {}
        for group, members in tensors.items():
            for name, tensor in members.items():
                buffer = self._buffers.get((group, name))
                if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                buffers[group, name] = buffer.copy_(tensor, non_blocking=True)
        for device in {tensor.device for members in tensors.values() for tensor in members.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self._buffers = buffers
        return {group: {name: buffers[group, name] for name in members} for group, members in tensors.items()}

    def _commit_in_background(self, path: Path, content: Content) -> None:
        try:
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
