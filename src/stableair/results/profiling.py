"""Profile of a run: the seconds of each step of a round, and the peak memory.

The functions of a `Simulation` are wrapped from outside. Therefore a run without a profile has no overhead. A profile
does not change the results of a run.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from stableair.algorithm import Simulation, simulate
from stableair.contracts import Metrics, Received, Round, State, Upload
from stableair.results.run import Run
from stableair.vector import ModelState

STEPS = "training", "channel", "receiver", "server", "evaluation"
SECONDS, PEAK = "seconds/{}", "memory/peak_mb"

P = ParamSpec("P")
T = TypeVar("T")


def profiled(sim: Simulation, state: State, rounds: int, start: int = 0) -> Iterator[Round]:
    """Run Algorithm 1 like `simulate`, and add the profile of each round to its metrics.

    `seconds/recording` is the time to record the previous round, including its callbacks; None for the first round.

    Args:
        sim: The parts of Algorithm 1.
        state: The state before the first round.
        rounds: Number of rounds of the run.
        start: The first round.

    Yields:
        The rounds.
    """
    stopwatch = Stopwatch(state.model.w.device)
    recording: float | None = None
    for each in simulate(_instrumented(sim, stopwatch), state, rounds, start):
        profile: Metrics = {SECONDS.format(step): stopwatch.seconds[step] for step in STEPS}
        profile |= {SECONDS.format("recording"): recording, PEAK: stopwatch.peak_megabytes()}
        yielded = time.perf_counter()
        yield each._replace(metrics=each.metrics | profile)
        recording = time.perf_counter() - yielded
        stopwatch.reset()


def profile_rows(run: Run) -> list[tuple[str, float, float]]:
    """Return the profile of a run; [] for a run without a profile.

    Returns:
        One row per step: its name, its mean seconds per round, and its share of the total. The step "other" is the
        remaining time of a round.
    """
    rows = [row for row in run.rounds if row.get(SECONDS.format("training")) is not None]
    if not rows:
        return []
    names = [*STEPS, "recording"]
    seconds = {name: [row[SECONDS.format(name)] for row in rows] for name in names}
    means = {name: statistics.fmean([v for v in values if v is not None] or [0.0]) for name, values in seconds.items()}
    steps = sum(means[step] for step in STEPS)
    means["other"] = max(0.0, statistics.fmean(row["seconds"] for row in rows) - steps)
    total = sum(means.values()) or 1.0
    return [(name, mean, mean / total) for name, mean in means.items()]


class Stopwatch:
    """Measure the seconds of each step. While a nested step runs, the clock of the outer step is paused.

    Args:
        device: Device of the run; a GPU is synchronised whenever a step starts or ends.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Reset the seconds and the peak memory, for a new round."""
        self.seconds = dict.fromkeys(STEPS, 0.0)
        self.running: list[str] = []
        self.switched = 0.0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def measure(self, step: str) -> Iterator[None]:
        """Add the time of the `with` block to a step."""
        self._switch()
        self.running.append(step)
        try:
            yield
        finally:
            self._switch()
            self.running.pop()

    def timed(self, step: str, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function whose time is added to a step."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.measure(step):
                return function(*args, **kwargs)

        return call

    def peak_megabytes(self) -> float | None:
        """Return the peak memory in MB: of the round on a GPU, of the whole process on a CPU; None on Windows."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e6
        try:
            import resource
        except ImportError:  # on Windows
            return None
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6

    def _switch(self) -> None:
        """Add the time since the last switch to the step that was running."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self.running:
            self.seconds[self.running[-1]] += now - self.switched
        self.switched = now


@dataclass(frozen=True)
class TimedChannel:
    """A channel whose functions are timed."""

    draw: Callable[..., Any]
    superpose: Callable[..., Received]


def _instrumented(sim: Simulation, stopwatch: Stopwatch) -> Simulation:
    """Return a simulation whose functions are timed."""

    def train(model: ModelState, k: int, clients: Tensor) -> Iterable[Upload]:
        with stopwatch.measure("training"):
            uploads = iter(sim.train(model, k, clients))
        while True:  # the channel reads the uploads one by one during the training
            with stopwatch.measure("training"):
                upload = next(uploads, None)
            if upload is None:
                return
            yield upload

    channel = TimedChannel(
        stopwatch.timed("channel", sim.channel.draw), stopwatch.timed("channel", sim.channel.superpose)
    )
    return replace(
        sim,
        train=train,
        channel=channel,
        receiver=replace(sim.receiver, apply=stopwatch.timed("receiver", sim.receiver.apply)),
        server=replace(sim.server, apply=stopwatch.timed("server", sim.server.apply)),
        evaluate=stopwatch.timed("evaluation", sim.evaluate),
        average=stopwatch.timed("evaluation", sim.average) if sim.average else None,
    )
