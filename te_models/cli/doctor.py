"""`te-models doctor`, advice from the record of a run, and `te-models report`, its page and table."""

import click

from te_models.cli.options import Command, json_option, option, show, show_line


@click.command(cls=Command)
@click.argument("run", metavar="RUN")
@json_option
def doctor(run: str, as_json: bool) -> None:
    """Say what stands out in the record of a run.

    Each finding has figures, the likely cause and what to change. The rules are in the troubleshooting guide. A
    healthy run gets one line.
    """
    from te_models.inspect.advice import diagnose, read_facts  # noqa: PLC0415  imports torch

    show(diagnose(read_facts(run)), as_json)


@click.command(cls=Command)
@click.argument("run", metavar="RUN")
@option("--out", metavar="FILE", help="The page to write; default: record/report.html in the run.")
def report(run: str, out: str | None) -> None:
    """Write the record of a run as an HTML page.

    Prints the tensors that stand out. The page has a map of each statistic over tensors and steps, loss and gradient
    norm above it, events, and advice. It needs no network.
    """
    from te_models.inspect.record_report import WorstTensors, write_report  # noqa: PLC0415
    from te_models.inspect.run_facts import read_facts  # noqa: PLC0415  imports torch

    facts = read_facts(run)
    path = write_report(run, facts, out)
    show(WorstTensors(facts), as_json=False)
    show_line(f"report: {path}")
