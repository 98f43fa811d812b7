"""Ctrl-C and SIGTERM: a command ends in order, says how to go on, and has the exit code that shells expect."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from stableair.cli.display import speaks

INTERRUPTED, CLOSED, TERMINATED = 130, 141, 143  # 128 + the number of the signal
INSISTENT = 3  # signals: whoever sends so many does not want to wait, and what is on the disk is whole at any moment


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is."""


def end_in_order() -> list[int]:
    """From here on the first Ctrl-C or SIGTERM ends the command in order, and the third at once.

    Returns the signals that came, a list that grows.
    """
    came: list[int] = []

    def stop(number: int, _: object) -> None:
        came.append(number)
        if len(came) >= INSISTENT:
            os._exit(128 + number)
        if len(came) == 1:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # such as nohup's
            signal.signal(number, stop)
    return came


def exit_code(stop: BaseException) -> int:
    """What a command that was stopped exits with; whatever wraps the signal's exception stands for it."""
    chain = (stop, stop.__cause__, stop.__context__)
    return TERMINATED if any(isinstance(error, Terminated) for error in chain) else INTERRUPTED


@contextmanager
def stop_politely(advice: str) -> Iterator[None]:
    """Whoever stops what is done in here is told how to go on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if speaks():
            print(f"stopped; {advice}", file=sys.stderr)
        raise typer.Exit(exit_code(stop)) from None
    except BrokenPipeError:
        raise OutputClosed(advice) from None


class OutputClosed(Exception):
    """The reader of our output has gone, as `| head -1` does; its text is how to go on."""
