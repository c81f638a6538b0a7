"""The command line, from te-models list and plan to finetune, generate, chat and convert.

A user's mistake ends with exit code 2 and one line on stderr; set TE_MODELS_DEBUG=1 for the traceback. Commands import
torch when they run, so that `--help` is fast.
"""

import contextlib
import io
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType

import click

import te_models
from te_models.cli.bench import bench
from te_models.cli.chat import chat
from te_models.cli.convert import convert
from te_models.cli.data import data
from te_models.cli.doctor import doctor, report
from te_models.cli.evaluate import evaluate
from te_models.cli.export import export
from te_models.cli.generate import generate
from te_models.cli.list import list_command
from te_models.cli.parity import parity
from te_models.cli.plan import plan
from te_models.cli.replay import capture, replay
from te_models.cli.serve import serve
from te_models.cli.training import finetune, pretrain
from te_models.cli.verify import verify
from te_models.errors import TeModelsError, for_stream, one_line, unknown
from te_models.garbage import collect_rarely

# Turns for which an idle thread of OpenMP spins before it sleeps. libgomp's own 300,000 keep a core for milliseconds
# that the thread it waits for may need: beside other work a step of training took twenty times as long as alone.
SPINS = "2000"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:  # the process is the command's own
        collect_rarely()
        _open_closed_streams()
        _print_any_text()
    if "OMP_WAIT_POLICY" not in os.environ:  # a choice of the user's own
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # OpenMP reads it when torch is imported
    try:
        with _plain_warnings(), _interrupts_kept():
            code = cli.main(
                command_line,
                prog_name="te-models",
                standalone_mode=False,
                obj=shlex.join(["te-models", *command_line]),
            )
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.NoSuchOption as error:
        options = []
        if error.ctx is not None:
            for parameter in error.ctx.command.get_params(error.ctx):
                options += [name for name in parameter.opts if name.startswith("--")]
        return _fail(error, str(unknown("option", error.option_name, options, "--help-all")))
    except click.ClickException as error:
        return _fail(error, error.format_message())
    except (click.Abort, KeyboardInterrupt):
        # The process ends: a second Ctrl-C would interrupt what libraries do then.
        if arguments is None:
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
        return _fail(None, "stopped", code=130)
    except TeModelsError as error:
        return _fail(error, str(error), error.exit_code)
    except (ValueError, OSError) as error:  # of Python and of libraries, for bad input
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            return _fail(error, f"{error.filename}: {error.strerror}")
        return _fail(error, str(error))


def _open_closed_streams() -> None:
    """Connect standard streams that are closed to a file that reads and writes nothing.

    Some schedulers of jobs, and `>&-` in a shell, start a process with closed streams, for which Python has None. The
    next file that the command opens would get the number of such a stream, and with it whatever libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  for the rest of the process


def _print_any_text() -> None:
    """Let standard output write a character that its encoding lacks as an escape, as standard error does.

    Files and pipes have the encoding of the system's locale, on Windows one of 256 characters: an answer of a model
    with another one would end a run that has trained for hours.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _fail(error: BaseException | None, message: str, code: int = 2) -> int:
    if error is not None and os.environ.get("TE_MODELS_DEBUG"):
        raise error
    _say(message)
    return code


def _say(message: str) -> None:
    """Print one line on standard error."""
    several = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
    rank = f" [rank {os.environ['RANK']}]" if several else ""
    line = one_line(f"te-models{rank}: {' '.join(message.split())}")
    click.echo(for_stream(line, sys.stderr), err=True)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show warnings in the block as one line each, once, without file names and lines of source.

    Of the processes of a run, the first one shows them.
    """
    shown: set[str] = set()
    first = os.environ.get("RANK", "0") == "0"

    def show(message: Warning | str, *place: object, **more: object) -> None:
        if first and str(message) not in shown:  # a run that resumes reads its checkpoint twice
            shown.add(str(message))
            _say(f"note: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        # These warnings of torch.compile address its developers.
        warnings.filterwarnings("ignore", message=r"\s*Dynamo ")
        # Python says them of the source of another package when it compiles that.
        warnings.simplefilter("ignore", SyntaxWarning)
        yield


@contextlib.contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Raise KeyboardInterrupt for any error in the block that follows a Ctrl-C.

    An import may swallow it, as torch does when it imports NumPy. What was imported half fails later, with an error
    that has nothing to do with its cause.
    """
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    # A program that calls `main` may have a handler of its own, or run it in a thread, which can set none.
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@click.group(context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
@click.version_option(te_models.__version__, prog_name="te-models")
def cli() -> None:
    """Train decoder language models in FP8: with Transformer Engine on a GPU, emulated elsewhere."""


COMMANDS = (
    list_command,
    data,
    plan,
    verify,
    pretrain,
    finetune,
    generate,
    chat,
    serve,
    evaluate,
    bench,
    convert,
    export,
    parity,
    capture,
    replay,
    report,
    doctor,
)
for _command in COMMANDS:
    cli.add_command(_command)
