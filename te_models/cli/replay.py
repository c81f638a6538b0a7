"""`te-models capture`, which marks steps of a run, and `te-models replay`, which runs such a step again."""

import shlex
from pathlib import Path

import click

from te_models.cli.options import Command, json_option, option, setting_option, show, show_line
from te_models.errors import UsageError


@click.command(cls=Command)
@click.argument("run", metavar="RUN")
@option("--step", "steps", type=int, multiple=True, metavar="N", help="Step to keep; repeatable.")
@option("--every", type=int, default=0, metavar="N", help="Keep each N-th step; 0: none but those.")
def capture(run: str, steps: tuple[int, ...], every: int) -> None:
    """Mark steps of a run whose state and batch it is to keep.

    A run in one process sees the marks before its next step; several processes see them when the run starts or
    resumes. A kept step takes the size of the model on the disk.
    """
    from te_models.saving.checkpoint_choice import METRICS, check_run  # noqa: PLC0415  imports torch
    from te_models.training.captures import Marks, newest_saved_step, read_marks, write_marks  # noqa: PLC0415

    folder = Path(run)
    if not steps and not every:
        raise UsageError("give --step N or --every N")
    if any(step < 1 for step in steps) or every < 0:
        raise UsageError("steps are counted from 1")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{run} is not a folder")
    # A run is never started in such a folder, so it would keep nothing.
    if folder.exists():
        check_run(folder)
    before = read_marks(folder)
    saved = newest_saved_step(folder)
    for step in steps:
        if step <= saved and step not in before.steps:
            raise UsageError(
                f"{run} has passed step {step}, since it would resume after step {saved}: mark a later one, or mark it "
                f"for a new folder and repeat the run there from {shlex.quote(f'{run}/run.toml')} with --out"
            )
    # Marks add up: earlier ones stay, also --every where this command does not give it.
    marks = Marks(tuple(sorted({*before.steps, *steps})), every or before.every)
    write_marks(folder, marks)
    steps_to_keep = []
    if marks.steps:
        steps_to_keep.append(
            f"step{'s' * (len(marks.steps) > 1)} {', '.join(map(str, marks.steps))}"
        )
    if marks.every == 1:
        steps_to_keep.append("every step")
    elif marks.every:
        steps_to_keep.append(f"one step of every {marks.every}")
    again = f"te-models replay {shlex.quote(run)} --step N"
    show_line(f"{run} keeps {' and '.join(steps_to_keep)} when it gets there; then `{again}`")
    # Steps may be marked before the run starts; a name that was mistyped looks the same.
    if not (folder / METRICS).exists():
        show_line(
            f"there is no run in {run} yet: the one that is started with --out {shlex.quote(run)} keeps them"
        )


@click.command(cls=Command)
@click.argument("run", metavar="RUN")
@option("--step", type=int, required=True, metavar="N", help="The step to run again.")
@setting_option(
    "device", help="Device, such as cpu or cuda. Default: cpu, for the native engine cuda."
)
@option(
    "--engine",
    type=click.Choice(["emulated", "native"]),
    default="emulated",
    help="Transformer Engine's numbers anywhere, or itself on a GPU.",
)
@option(
    "--one-process",
    is_flag=True,
    help="Run a step of several processes in one, whose scales and sums are others; default: in as many.",
)
@option("--once", is_flag=True, help="Run the step once instead of twice.")
@option(
    "--what-if",
    "recipes",
    multiple=True,
    metavar="RECIPE",
    help="Also run it under this recipe, or under each: all; repeatable.",
)
@option(
    "--bf16",
    multiple=True,
    metavar="PATTERN",
    help="Also with these te.Linears in BF16; repeatable.",
)
@option("--margin", "margins", type=int, multiple=True, help="Also with this margin; repeatable.")
@option(
    "--history",
    "histories",
    type=int,
    multiple=True,
    help="Also with this amax_history_len; repeatable.",
)
@json_option
def replay(
    run: str,
    step: int,
    device: str | None,
    engine: str,
    one_process: bool,
    once: bool,
    recipes: tuple[str, ...],
    bf16: tuple[str, ...],
    margins: tuple[int, ...],
    histories: tuple[int, ...],
    as_json: bool,
) -> int:
    """Run a kept step of a run again, on any machine.

    Compares every FP8 tensor with the record, and says which other recipes would have been finite and how exact.
    """
    from te_models.inspect.replay import replay as run_again  # noqa: PLC0415  imports torch

    replayed = run_again(
        run,
        step,
        device=device,
        engine=engine,
        twice=not once,
        one_process=one_process,
        recipes=recipes,
        bf16=bf16,
        margins=margins,
        histories=histories,
    )
    show(replayed, as_json)
    return 0
