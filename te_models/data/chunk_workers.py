"""Processes that encode chunks of a corpus ahead of the step that needs them, and end with the run whatever ends it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_tracker

import numpy as np
from numpy.typing import NDArray

from te_models.data.corpus_chunks import ChunkReader
from te_models.data.rows import FileRange


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait until the worker that starts is known to the pool, which then waits for it before it ends.

    A worker that the pool does not know finds no semaphore of a parent that has ended, and prints a traceback. The
    fork server and its workers inherit the mask, so that they are not interrupted while they import. The mask is of
    this thread alone and any other one takes the signal, so the handler, which runs here, waits too.
    """
    with handler_waits():
        resource_tracker.ensure_running()  # before: it unblocks SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def handler_waits() -> Iterator[None]:
    """Call Python's handler of SIGINT at the end only. It runs in the main thread and interrupts no other one."""
    handler = signal.getsignal(signal.SIGINT)
    # Only the main thread may set handlers, and one of another language cannot be put back.
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupts:
            signal.raise_signal(signal.SIGINT)


def worker_pool(count: int, reader: ChunkReader) -> ProcessPoolExecutor:
    """Return a pool of processes that encode chunks with `reader`; each starts when a chunk finds no other one free."""
    # A fork server's children share no thread, lock or CUDA device with this process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["te_models.data.chunk_workers"])
    return ProcessPoolExecutor(count, context, _start_worker, (reader,))


# Of this worker process, set once: a chunk then travels to it without the tokenizer.
_READER: list[ChunkReader] = []


def _start_worker(reader: ChunkReader) -> None:
    """Prepare a worker process: it keeps the reader, and outlives Ctrl-C but not its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    os.setpgrp()  # Ctrl-C and torchrun signal the group; a run that stops cleanly still needs its next batch
    _READER[:] = [reader]
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """End with the process that started this one, even if that is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # It returns when the parent ends, also by a SIGKILL, after which no handler of the parent runs.
    parent.join()
    os._exit(1)


def encode_chunk(chunk: list[FileRange], order: tuple[int, ...] | None) -> NDArray[np.int32]:
    """Return the tokens and flags of a chunk, int32 [2, tokens], as `ChunkReader.encode` does, in a worker process."""
    return _READER[0].encode(chunk, order)
