"""Ctrl-C and SIGTERM: stop cleanly, print how to continue, and exit with the code that shells expect."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from stableair.results.callbacks import is_main_process

INTERRUPTED, PIPE_CLOSED, TERMINATED = 130, 141, 143  # exit codes: 128 + the number of the signal
FORCED = 3  # number of signals that makes the command exit immediately; files on the disk are always complete


class Terminated(KeyboardInterrupt):
    """SIGTERM was received; it has the same effect as Ctrl-C."""


def install_signal_handlers() -> list[int]:
    """Stop the command cleanly at the first Ctrl-C or SIGTERM, and immediately at the third.

    While torch is imported, the first signal stops the command immediately: C code can lose the exception, or abort.

    Returns:
        The list of received signals; each new signal is appended.
    """
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        if len(received) >= FORCED or _imports_torch():
            os._exit(128 + number)
        if len(received) == 1:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # keep ignoring what nohup ignores
            signal.signal(number, stop)
    return received


def _imports_torch() -> bool:
    """Whether torch is being imported."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return getattr(spec, "_initializing", False)  # set by the import system until the module is complete


def exit_code(stop: BaseException) -> int:
    """Return the exit code of a stopped command.

    The exception of the signal may be the cause or the context of `stop`.
    """
    chain = (stop, stop.__cause__, stop.__context__)
    return TERMINATED if any(isinstance(error, Terminated) for error in chain) else INTERRUPTED


@contextmanager
def advise_on_stop(advice: str) -> Iterator[None]:
    """Print how to continue if the user stops the block."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if is_main_process():
            print(f"stopped; {advice}", file=sys.stderr)
        raise typer.Exit(exit_code(stop)) from None
    except BrokenPipeError:
        raise BrokenPipe(advice) from None


class BrokenPipe(Exception):
    """The reader of the output has closed the pipe, as `| head -1` does; the message is the advice."""
