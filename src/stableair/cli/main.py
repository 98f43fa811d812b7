"""The command line: commands, errors, signals and log output. Slow imports are deferred to the commands."""

import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from stableair.cli import bench, data, paper, reference, results, runs, sweeps
from stableair.cli.advice import advise_on_words, option_for, setting_for, with_flag
from stableair.cli.stopping import INTERRUPTED, PIPE_CLOSED, BrokenPipe, exit_code, install_signal_handlers
from stableair.errors import StableairError
from stableair.results.callbacks import is_main_process
from stableair.spec import traceback_location

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
    "export": results.export,
    "report": results.report,
    "watch": results.watch,
    "list": reference.list_components,
    "theory": reference.theory,
    "air": reference.air,
    "bench": bench.bench,
    "demo": paper.demo,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(data.app, name="data")

# The class of typer's errors about a command line; typer brings its own click from 0.21 on.
ClickException: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")

USER_ERROR, INTERNAL_ERROR = 2, 1  # exit codes
DEBUG = "STABLEAIR_DEBUG"


def main() -> NoReturn:
    """Run the command. User errors print one line to standard error and exit with code 2."""
    signals = install_signal_handlers()
    warnings.showwarning = lambda *_, **__: None  # hide warnings of other libraries; stableair logs its own
    install_note_printer()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # escape what the terminal cannot encode, such as α
    if not is_main_process():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process exits)
    try:
        code = _run(sys.argv[1:], signals) or 0
    except KeyboardInterrupt as stop:  # Ctrl-C while an error was being printed
        code = exit_code(stop)
    sys.exit(128 + signals[0] if code == INTERRUPTED and signals else code)  # typer reports every signal as Ctrl-C


def _run(words: list[str], signals: list[int]) -> int | None:
    """Run the command and print its error; returns the exit code.

    Args:
        words: The words of the command line.
        signals: The signals received so far.
    """
    try:
        code = app(sorted(words, key="--debug".__ne__), standalone_mode=False)  # --debug may appear anywhere
        if sys.stdout:
            sys.stdout.flush()  # raises the error of a full disk or a broken pipe here, not at exit
        return code
    except StableairError as error:
        option = option_for(error, words, COMMANDS)
        return fail(f"{error.fields['name']} is an option of this command: {option}" if option else with_flag(error))
    except ClickException as error:
        # The message is empty if no command was given: typer has printed the help.
        message = setting_for(error, words) or advise_on_words(error)
        return fail(message) if message else USER_ERROR
    except (BrokenPipe, BrokenPipeError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        advice = f"; {error}" if isinstance(error, BrokenPipe) else ""
        print(f"stopped: broken pipe{advice}", file=sys.stderr)
        return PIPE_CLOSED
    except OSError as error:
        return fail(f"{error.filename or 'writing'}: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort) as stop:
        return exit_code(stop)
    except Exception as error:
        if signals:  # a signal arrived in C code, such as an import, which then raised another error
            os._exit(128 + signals[0])  # after this, cleaning up the interpreter may crash
        if plugin_error := traceback_location(error):
            return fail(plugin_error)
        text = f"{type(error).__name__}: {error}"
        return fail(f"{text} (internal error: please report it with the output of --debug)", INTERNAL_ERROR)


def fail(message: str, code: int = USER_ERROR) -> int:
    """Print an error in one line, after its traceback with --debug."""
    if os.environ.get(DEBUG, "0") not in ("", "0"):
        traceback.print_exc()
    if is_main_process("LOCAL_RANK"):  # once per machine: the cause may be local
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


class NotePrinter(logging.Handler):
    """Print each log record as one line on standard error: `note: ...` or `warning: ...`."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = "warning" if record.levelno >= logging.WARNING else "note"
        print(f"{kind}: {' '.join(record.getMessage().split())}", file=sys.stderr)


def install_note_printer() -> None:
    """Print the log records of stableair, including notes; only rank 0 of torchrun prints them."""
    log = logging.getLogger("stableair")
    log.setLevel(logging.INFO)
    if not log.handlers:
        log.addHandler(NotePrinter() if is_main_process() else logging.NullHandler())


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help=f"Show the whole traceback of an error, as {DEBUG}=1 does.")
    ] = False,
) -> None:
    """Handle the options that every command has."""
    if debug:
        os.environ[DEBUG] = "1"
    if version:
        import stableair

        print(stableair.__version__)
        raise typer.Exit
