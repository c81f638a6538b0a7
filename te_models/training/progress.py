"""The progress of a run while it trains: a bar or lines in a log, and one estimate of the time left."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from te_models.config.training import TrainConfig
from te_models.errors import plural
from te_models.training.timing import Row

LINES = 20  # steps of a run that a log has a line about, besides evaluations
LINE_PAUSE = 60.0  # seconds without a line in a log, where steps are slow


@contextmanager
def progress(console: Console, config: TrainConfig, start: int) -> Iterator[Callable[[Row], None]]:
    """Show a progress bar with loss, tokens/s and time left; yield the function that takes each step's metrics.

    Evaluations have a line each. If the output is not a terminal, so do a few other steps: about LINES of the run, and
    one a minute.
    """
    time_left = TimeLeft(config, start)
    every = max(1, math.ceil((config.steps - start) / LINES))
    printed = time.monotonic()
    with Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        console=console,
        # A bar takes over sys.stdout, and a quiet console would swallow what a program of the user's prints meanwhile.
        disable=console.quiet or not console.is_terminal,
    ) as bar:
        task = bar.add_task("train", total=config.steps, completed=start, loss="-", speed="-")

        def show(row: Row) -> None:
            nonlocal printed
            bar.update(
                task,
                completed=row["step"],
                loss=f"{row['loss']:.3f}",
                speed=f"{row['tokens_per_second']:,.0f}",
            )
            if line := time_left.line(row):
                console.print(line)
            now = time.monotonic()
            # A bar moves in a terminal; in a file lines must do, neither too many nor none for minutes.
            due = (row["step"] - start) % every == 0 or now - printed > LINE_PAUSE
            if "eval_loss" in row or (due and not console.is_terminal):
                printed = now
                evaluated = f"  eval loss {row['eval_loss']:.4f}" if "eval_loss" in row else ""
                console.print(
                    f"step {row['step']:>6}  loss {row['loss']:.4f}{evaluated}  "
                    f"{row['tokens_per_second']:,.0f} tokens/s"
                )

        yield show


class TimeLeft:
    """The remaining time of a run, estimated once, from a few steps after the first ones.

    The first steps compile kernels, and the one after three eager steps captures a CUDA graph.
    """

    SKIPPED = 4  # steps
    MEASURED = 6  # steps

    def __init__(self, config: TrainConfig, start: int) -> None:
        self.config = config
        self.start = start
        self.seconds: list[float] = []

    def line(self, row: Row) -> str:
        """Record the metrics of a step; return the line to print after it, or ""."""
        config = self.config
        step = row["step"]
        due = self.start + self.SKIPPED + self.MEASURED
        if step > due or config.steps <= due:  # nothing is left to estimate
            return ""
        if step > self.start + self.SKIPPED:
            self.seconds.append(config.tokens_per_step / row["tokens_per_second"])
        if step < due:
            return ""
        each = statistics.median(self.seconds)
        left = config.steps - step
        every = config.eval_every or config.steps
        evaluations = config.steps // every - step // every + bool(config.steps % every)
        # an evaluation is only a forward, about a third of a step without accumulation
        whole = (
            each * left
            + evaluations * config.eval_batches * each / config.gradient_accumulation / 3
        )
        return f"estimated time: {duration(whole)} for the other {plural(left, 'step')}, of {duration(each)} each"


def duration(seconds: float) -> str:
    """Return a time in words, with about two digits: "40 ms", "3.2 s", "12 min", "1 h 05 min"."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
