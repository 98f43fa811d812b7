"""The command line: its commands, and what becomes of errors and signals. Nothing heavy is imported here."""

import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TextIO

import typer

from stableair.checks import InputError, Note
from stableair.cli import bench, data, paper, reference, results, runs, sweeps
from stableair.cli.display import speaks
from stableair.cli.stopping import CLOSED, INTERRUPTED, OutputClosed, end_in_order, exit_code
from stableair.spec import line_of

app = typer.Typer(
    name="stableair",
    help="Federated learning over the air under heavy-tailed interference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, Callable[..., None]] = {  # in the order of --help
    "run": runs.run,
    "search": runs.search,
    "sweep": sweeps.sweep,
    "compare": sweeps.compare,
    "figure": paper.figure,
    "plot": results.plot,
    "report": results.report,
    "list": reference.list_components,
    "theory": reference.theory,
    "air": reference.air,
    "bench": bench.bench,
    "demo": paper.demo,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(data.app, name="data")

# typer brings its own click from 0.21 on; either way this is the class of its complaints about a command line.
ClickException: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")

# The library knows no options: where one would help, its error says what it is about, and this is the option.
FLAGS = {
    "resume": "add --resume or choose another --out",
    "folder": "choose another --out",
    "record": "choose another --record",
    "data": "choose another --data-dir",
}


WRONG, BUG = 2, 1  # exit codes: what the user can set right, and what only we can
DEBUG = "STABLEAIR_DEBUG"


def main() -> NoReturn:
    """Run the command; whatever the user got wrong is one line on standard error and exit code 2."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a busy machine spinning threads stall each other
    signals = end_in_order()
    warnings.showwarning = print_note
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows no α loses no result
    if not speaks():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    try:
        code = _run(sys.argv[1:]) or 0
    except KeyboardInterrupt as stop:  # while an error was being told
        code = exit_code(stop)
    sys.exit(128 + signals[0] if code == INTERRUPTED and signals else code)  # typer takes every signal for Ctrl-C


def _run(words: list[str]) -> int | None:
    """The command's exit code; its errors are told."""
    try:
        code = app(sorted(words, key="--debug".__ne__), standalone_mode=False)  # --debug may stand anywhere
        if sys.stdout:
            sys.stdout.flush()  # a full disk or a reader that has gone is found here, and not when Python ends
        return code
    except InputError as error:
        return fail(with_flag(error))
    except ClickException as error:
        message = error.format_message()  # empty where the help was asked for by giving no command
        return fail(message) if message else WRONG
    except (OutputClosed, BrokenPipeError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        advice = f"; {error}" if isinstance(error, OutputClosed) else ""
        print(f"stopped: nobody reads the output any more{advice}", file=sys.stderr)
        return CLOSED
    except OSError as error:
        return fail(f"{error.filename or 'writing'}: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort) as stop:
        return exit_code(stop)
    except Exception as error:
        if own := line_of(error):
            return fail(own)
        said = f"{type(error).__name__}: {error}"
        return fail(f"{said} (a mistake in stableair itself: please report it with what --debug shows)", BUG)


def with_flag(error: InputError) -> str:
    """The library's message, and the option that would help in place of advice for Python."""
    flag = FLAGS.get(error.hint)
    return f"{error.message}; {flag}" if flag else str(error)


def fail(message: str, code: int = WRONG) -> int:
    """Tell an error in one line, after its traceback where that was asked for."""
    if os.environ.get(DEBUG, "0") not in ("", "0"):
        traceback.print_exc()
    if speaks("LOCAL_RANK"):  # another machine may lack what the first one has
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def print_note(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings in one line; those of the libraries below are not for the user of a command."""
    if issubclass(category, Note) and speaks():
        print(f"note: {message}", file=sys.stderr)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help=f"Show the whole traceback of an error, as {DEBUG}=1 does.")
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"
    if version:
        import stableair

        print(stableair.__version__)
        raise typer.Exit
