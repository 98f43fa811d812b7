"""The command line: its commands, and what becomes of errors and signals. Nothing heavy is imported here."""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TextIO

import typer

from stableair.checks import InputError, Note
from stableair.cli import bench, data, paper, reference, results, runs
from stableair.cli.stopping import exit_code, on_sigterm

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


def main() -> NoReturn:
    """Run the command; whatever the user got wrong is one line on standard error and exit code 2."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a busy machine spinning threads stall each other
    signal.signal(signal.SIGTERM, on_sigterm)
    warnings.showwarning = print_note
    if not speaks():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    try:
        code = app(standalone_mode=False)
    except InputError as error:
        fail(with_flag(error))
    except ClickException as error:
        code = 2
        if message := error.format_message():  # empty where the help was asked for by giving no command
            fail(message)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        fail(f"{error.filename or 'writing'}: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort) as stop:
        code = exit_code(stop)
    sys.exit(code or 0)


def with_flag(error: InputError) -> str:
    """The library's message, and the option that would help."""
    flag = FLAGS.get(getattr(error, "hint", ""))
    return f"{error}; {flag}" if flag else str(error)


def speaks() -> bool:
    """Whether this process is the one that talks to the user: of those of torchrun the first."""
    return "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"


def fail(message: str) -> NoReturn:
    if speaks():  # what goes wrong on one rank is told to all of them
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


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
def options(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        import stableair

        print(stableair.__version__)
        raise typer.Exit
