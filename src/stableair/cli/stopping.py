"""Ctrl-C and SIGTERM: a command ends in order, says how to go on, and has the exit code that shells expect."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

INTERRUPTED, TERMINATED = 130, 143  # 128 + the number of the signal


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is."""


def on_sigterm(*_: object) -> NoReturn:
    raise Terminated


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
        if os.environ.get("RANK", "0") == "0":  # of the processes of torchrun the first
            print(f"stopped; {advice}", file=sys.stderr)
        raise typer.Exit(exit_code(stop)) from None
