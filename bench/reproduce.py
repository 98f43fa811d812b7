"""Compute and publish the runs behind docs/reproduction.md.

    python bench/reproduce.py list                # the missing runs, in the order of computation
    python bench/reproduce.py run --minutes 25    # compute them, on a GPU, with the data sets in the data folder
    python bench/reproduce.py publish             # write the published files, the pictures and the tables: publish.py

Each run has its own folder in bench/reproduction. A finished run is kept without its checkpoint; an interrupted run
continues from its checkpoint. All runs of one call share a process, so that the kernels are compiled once. Runs of an
earlier version of `mac(C=auto)` are in bench/reproduction/version-0.2: they are published until the new ones replace
them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stableair.errors import StableairError
from stableair.experiment import IDEAL, PRESETS, Experiment
from stableair.paper.catalogue import AUTO, CHOICES, SEARCHED
from stableair.results.callbacks import Callback
from stableair.results.checksums import CHECKPOINT, PREVIOUS
from stableair.results.reading import read_run
from stableair.runner import run
from stableair.searches import RESULT, search

FOLDER = Path(__file__).parent / "reproduction"
ROUNDS = {"cifar10": 60, "cifar10-noniid": 60, "cifar100": 40, "femnist": 60}
TRIALS, SEARCH_ROUNDS = 8, 12  # budget of a threshold, the same for MAC and GNC
SHORT_ROUNDS, SLOW_ROUNDS = 20, 10  # of a modelling choice; group norm takes 18 s per round
TAUS, ALPHAS, CS = (0.05, 0.1, 0.2, 0.3), (1.1, 1.2, 1.3, 1.4, 1.5), (0.05, 0.3, 1.0, 0.13)


class OutOfTimeError(Exception):
    """Raised between two trials of a search when the time is up."""


class Printed(Callback):
    """Prints the engine, six rounds and the result of each run."""

    def start(self, experiment: Experiment, engine: dict[str, Any]) -> None:
        print(f"  {experiment.receiver}: {engine_text(engine)}", flush=True)

    def round(self, experiment: Experiment, row: dict[str, Any]) -> None:
        if row["round"] % max(1, experiment.rounds // 6) == 0:
            print(f"  {row}", flush=True)


class EndOfTime(Callback):
    """Ends a search after a trial when the time is up."""

    def __init__(self, path: Path, out_of_time: Callable[[], bool]):
        self.path, self.out_of_time = path, out_of_time

    def end(self, experiment: Experiment, outcome: object) -> None:
        if self.out_of_time():
            _delete_checkpoints(self.path)
            raise OutOfTimeError


class Job(NamedTuple):
    """One run, or one search of a threshold."""

    name: str
    experiment: Experiment
    method: str = ""  # the method whose threshold is searched; empty for a run

    def done(self, folder: Path) -> bool:
        """Return whether the folder holds the finished run, including by divergence, or the finished search."""
        path = folder / self.name
        if self.method:
            return (path / RESULT).exists() and "best" in json.loads((path / RESULT).read_text())
        if not (path / "experiment.json").exists():
            return False
        recorded = read_run(path)
        return len(recorded) >= self.experiment.rounds or recorded.diverged is not None

    def best(self, folder: Path) -> dict[str, float]:
        """Return the threshold that a finished search found, as a setting."""
        recorded = json.loads((folder / self.name / RESULT).read_text())
        return recorded["best"]["values"]

    def compute(self, folder: Path, out_of_time: Callable[[], bool] = lambda: False) -> None:
        """Compute the run or the search, or continue it.

        Raises:
            OutOfTimeError: The time was up after a trial of a search. The search continues there with the next call.
            InputError: The engine cannot accelerate the model. The reference loop would take hours.
        """
        path, experiment = folder / self.name, self.experiment.with_(engine="fast")  # fast: never the reference loop
        if self.method:
            _, key, space = SEARCHED[self.method]
            search(experiment, {key: space}, path, trials=TRIALS, callbacks=[Printed(), EndOfTime(path, out_of_time)])
        else:
            run(experiment, path, resume=True, callbacks=[Printed()])
        _delete_checkpoints(path)


def engine_text(engine: dict[str, Any]) -> str:
    """How a run is computed, in one line."""
    return f"engine {engine['engine']}, {engine['precision']}, chunks of {engine['chunk']} clients: {engine['why']}"


def _delete_checkpoints(path: Path) -> None:
    for checkpoint in (*path.rglob(CHECKPOINT), *path.rglob(PREVIOUS)):
        checkpoint.unlink()


def jobs(folder: Path) -> Iterator[Job]:
    """Yield all jobs in the order of computation; jobs with the same experiment occur more than once.

    A run with a searched threshold appears once its search in `folder` is finished.
    """
    # Published with version 0.2.
    yield from fig3("cifar10", 0, folder, "ideal", "mac", "gnc", "noisy")
    yield from fig3("cifar10", 1, folder, "ideal", "mac")
    yield from fig3("femnist", 0, folder, "ideal", "mac", "gnc", "noisy")
    yield from (fig4(**{"noise.tau": tau}) for tau in TAUS)
    yield from (fig4(**{"noise.alpha": alpha}) for alpha in (1.1, 1.5))
    # 1. Fig. 3(b) and (e), the runs without a search first.
    yield from fig3("cifar100", 0, folder, "ideal", "noisy", "mac", "gnc")
    # 2. Fig. 4(c), then the rest of Fig. 4(a).
    yield from (fig4(**{"receiver.C": C}) for C in CS)
    yield from (fig4(**{"noise.alpha": alpha}) for alpha in ALPHAS)
    # 3. More seeds.
    yield from fig3("cifar10", 1, folder, "gnc", "noisy")
    yield from fig3("femnist", 1, folder, "ideal", "mac", "gnc", "noisy")
    yield from fig3("cifar100", 1, folder, "ideal", "mac")
    yield from fig3("cifar10", 2, folder, "ideal", "mac")
    # 4. Fig. 4(b) with C in proportion to tau.
    yield from (fig4(**{"noise.tau": tau, "receiver.C": round(1.3 * tau, 4)}) for tau in TAUS)
    # 5. Modelling choices.
    yield from choices()
    # 6. Attempts to close the gap at tau = 0.3.
    yield SEARCH_AT_LARGEST_TAU
    for label, experiment in gap_curves(folder).items():
        yield Job(f"gap-{_as_name(label)}-seed0", experiment)
    # 7. mac(C=auto), last: its rule has to be final.
    for seed in range(3):
        yield from fig3("cifar10", seed, folder, "auto")
    yield from fig3("cifar100", 0, folder, "auto")
    yield from fig3("femnist", 0, folder, "auto")
    yield from (fig4(**{"noise.alpha": alpha, "receiver.C": "auto"}) for alpha in (1.1, 1.5))
    yield from (fig4(**{"noise.tau": tau, "receiver.C": "auto"}) for tau in TAUS)


def fig3(preset: str, seed: int, folder: Path, *methods: str) -> Iterator[Job]:
    """The runs of one panel of Fig. 3 with one seed; the search of a threshold, with seed 0, comes before its run."""
    base = Experiment(**PRESETS[preset]).with_(rounds=ROUNDS[preset], seed=seed)
    settings = {"ideal": IDEAL, "noisy": {"receiver": "none()"}, "auto": {"receiver": AUTO}}
    for method in methods:
        if method in settings:
            yield Job(f"{preset}-{method}-seed{seed}", base.with_(**settings[method]))
            continue
        receiver = SEARCHED[method.upper()][0]
        search_base = base.with_(receiver=receiver, rounds=SEARCH_ROUNDS, seed=0)
        threshold = Job(f"{preset}-search-{method}", search_base, method.upper())
        yield threshold
        if threshold.done(folder):
            tuned = base.with_(receiver=receiver, **threshold.best(folder))
            yield Job(f"{preset}-{method}-seed{seed}", tuned)


def fig4(**settings: float | str) -> Job:
    """Return a run of Fig. 4; its name lists the settings that differ from alpha = 1.5, tau = 0.1, C = 0.13.

    >>> fig4(**{"noise.tau": 0.3, "receiver.C": "auto"}).name
    'cifar10-noniid-tau0.3-Cauto-seed0'
    """
    preset = "cifar10-noniid"
    varied = "-".join(f"{key.partition('.')[2]}{value}" for key, value in settings.items())
    base = Experiment(**PRESETS[preset]).with_(rounds=ROUNDS[preset])
    return Job(f"{preset}-{varied}-seed0", base.with_(**settings))


def choices() -> Iterator[Job]:
    """Short runs, each with one alternative modelling choice; the first rounds of Fig. 4 are the baseline."""
    base = Experiment(**PRESETS["cifar10-noniid"])
    for label, settings in CHOICES.items():
        rounds = SLOW_ROUNDS if "group" in label else SHORT_ROUNDS
        values = "-".join(str(value) for value in settings.values())
        yield Job(f"choice-{_as_name(values)}-seed0", base.with_(rounds=rounds, **settings))


def _as_name(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text).strip("-")


SEARCH_AT_LARGEST_TAU = Job(
    "cifar10-noniid-tau0.3-search-mac", fig4(**{"noise.tau": 0.3}).experiment.with_(rounds=SEARCH_ROUNDS), "MAC"
)


def gap_curves(folder: Path) -> dict[str, Experiment]:
    """Attempts to close the gap between tau = 0.3 and tau = 0.05, one change each, by label.

    The searched threshold is included once its search in `folder` is finished.
    """
    target, start = (fig4(**{"noise.tau": tau}).experiment for tau in (0.05, 0.3))
    curves = {
        "target: tau = 0.05": target,
        "start: tau = 0.3": start,
        "C = 1.3 tau": start.with_(**{"receiver.C": 0.39}),
        "server learning rate halved": start.with_(server=f"sgd(lr={start.lr / 2:g})"),
        "averaged model": start.with_(average=0.8),
        "120 rounds": start.with_(rounds=120),
    }
    if SEARCH_AT_LARGEST_TAU.done(folder):
        curves["searched C"] = start.with_(**SEARCH_AT_LARGEST_TAU.best(folder))
    return curves


def missing(folder: Path) -> Iterator[Job]:
    """Yield the jobs that are not finished; one job per experiment."""
    seen = set()
    for job in jobs(folder):
        key = job.method, job.experiment.id(), job.experiment.rounds
        if key not in seen and not job.done(folder):
            yield job
        seen.add(key)


def selected(folder: Path, prefixes: list[str]) -> Iterator[Job]:
    """Return the missing jobs whose names start with one of the prefixes, in the order of the prefixes."""
    return (job for prefix in prefixes for job in missing(folder) if job.name.startswith(prefix))


def run_missing(folder: Path, prefixes: list[str], minutes: float) -> dict[str, str]:
    """Compute the missing jobs one after the other; start no run and no trial after `minutes`.

    Returns:
        The errors of the jobs that could not be computed, by name. The other jobs are computed nevertheless.
    """
    start, failed = time.perf_counter(), {}

    def out_of_time() -> bool:
        return time.perf_counter() - start > 60 * minutes

    while not out_of_time():
        job = next((job for job in selected(folder, prefixes) if job.name not in failed), None)
        if job is None:
            break
        print(f"{time.perf_counter() - start:.0f} s: {job.name}", flush=True)
        try:
            job.compute(folder, out_of_time)
        except OutOfTimeError:
            break
        except StableairError as error:
            failed[job.name] = str(error)
            print(f"  failed: {error}", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["list", "run", "publish"])
    parser.add_argument("--minutes", type=float, default=25, help="start no run and no trial after this time")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the runs")
    parser.add_argument("--only", nargs="+", default=[""], help="prefixes of job names, in the order of computation")
    options = parser.parse_args()
    if options.what == "publish":
        from publish import publish

        for path in publish(options.out):
            print(path)
    elif options.what == "list":
        for job in selected(options.out, options.only):
            print(job.name, job.experiment.rounds)
    elif failed := run_missing(options.out, options.only, options.minutes):
        sys.exit("\n".join(f"{name} failed: {error}" for name, error in failed.items()))


if __name__ == "__main__":
    main()
