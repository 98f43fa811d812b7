"""Callbacks, which observe runs: progress displays, trackers and custom observers."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stableair.errors import InputError, StableairError
from stableair.validation import short_repr

if TYPE_CHECKING:
    from stableair.experiment import Experiment
    from stableair.results.metrics import Row
    from stableair.results.run import Run


class Callback:
    """Base class of callbacks: override the methods that you need.

    `run`, `sweep`, `search`, `compare` and `figure` accept `callbacks`. One callback may observe many experiments, one
    after the other. With torchrun only rank 0 calls the callbacks. An exception in a callback stops the run. The
    recorded rounds are kept, and `resume=True` continues after them.

    >>> import stableair as sa
    >>> class Senders(sa.Callback):
    ...     def round(self, experiment, row):
    ...         print(f"round {row['round']}: {row['channel/senders']} clients")
    >>> experiment = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2)
    >>> run = sa.run(experiment, callbacks=[Senders()])
    round 0: 3 clients
    round 1: 3 clients
    """

    shows_progress = False  # whether the callback displays the rounds; if so, the progress bar is off by default

    def start(self, experiment: "Experiment", engine: dict[str, Any]) -> None:
        """Called before the first round that this process computes.

        Args:
            experiment: The experiment of the run.
            engine: Description of the computation: `engine`, `precision`, `chunk` (clients trained together), `why`
                (the reason for this choice) and `ranks` (number of processes).
        """

    def round(self, experiment: "Experiment", row: "Row") -> None:
        """Called after each round that this process computed and recorded.

        Args:
            experiment: The experiment of the run.
            row: The metrics of the round by name, as in rounds.jsonl.
        """

    def end(self, experiment: "Experiment", outcome: "Run | StableairError") -> None:
        """Called once per experiment, even if the run was already finished or another process computed it.

        Args:
            experiment: The experiment of the run.
            outcome: The run, or the error that stopped it. A search may stop a run before its last round.
        """


class CallbackList(Callback):
    """Call several callbacks, in their order.

    Args:
        callbacks: The callbacks.

    Raises:
        InputError: An element is not a Callback (`not-a-callback`).
    """

    def __init__(self, callbacks: Iterable[Callback] = ()):
        self.callbacks = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise InputError(
                    f"callbacks must be a list of stableair.Callback objects: got {short_repr(callback)}",
                    code="not-a-callback",
                )
        self.shows_progress = any(callback.shows_progress for callback in self.callbacks)

    def start(self, experiment: "Experiment", engine: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.start(experiment, engine)

    def round(self, experiment: "Experiment", row: "Row") -> None:
        for callback in self.callbacks:
            callback.round(experiment, row)

    def end(self, experiment: "Experiment", outcome: "Run | StableairError") -> None:
        for callback in self.callbacks:
            callback.end(experiment, outcome)


def is_main_process(rank: str = "RANK") -> bool:
    """Return whether this process reports to the user.

    Args:
        rank: "RANK": true on rank 0 of torchrun; "LOCAL_RANK": true on the first rank of each machine.
    """
    return "WORLD_SIZE" not in os.environ or os.environ.get(rank, "0") == "0"
