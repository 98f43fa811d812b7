"""The runs behind the page on the reproduction, in order of importance: what is there, and what to compute next.

    python bench/reproduce.py list
    python bench/reproduce.py run --minutes 25
    python bench/reproduce.py publish

Every run has a folder of its own in bench/reproduction, kept without its checkpoint once it is finished. The runs of
one call share a process, so that the kernels are compiled once. `publish` makes of all finished runs what comes with
the package, the pictures and the tables: see publish.py.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stableair.experiment import IDEAL, PRESETS, Experiment
from stableair.paper.figures import CHOICES, SEARCHED
from stableair.results.run import load
from stableair.results.sealed import CHECKPOINT, PREVIOUS
from stableair.runner import run
from stableair.searches import RESULT, search

FOLDER = Path(__file__).parent / "reproduction"
ROUNDS = {"cifar10": 60, "cifar10-noniid": 60, "cifar100": 40, "femnist": 60}
TRIALS, SEARCH_ROUNDS = 8, 12
SHORT_ROUNDS, SLOW_ROUNDS = 20, 10  # of a choice read the other way; group norm takes 18 s a round
TAUS, ALPHAS, CS = (0.05, 0.1, 0.2, 0.3), (1.1, 1.2, 1.3, 1.4, 1.5), (0.05, 0.13, 0.3, 1.0)


class Job(NamedTuple):
    """A run, or the search of a threshold."""

    name: str
    experiment: Experiment
    method: str = ""  # whose threshold is searched

    def done(self, folder: Path) -> bool:
        place = folder / self.name
        if self.method:
            return (place / RESULT).exists() and "best" in json.loads((place / RESULT).read_text())
        if not (place / "experiment.json").exists():
            return False
        found = load(place)
        return len(found) >= self.experiment.rounds or found.diverged is not None

    def compute(self, folder: Path) -> None:
        place = folder / self.name
        if self.method:
            _, key, space = SEARCHED[self.method]
            search(self.experiment, {key: space}, place, trials=TRIALS, log=lambda line: print("  " + line, flush=True))
        else:
            every = max(1, self.experiment.rounds // 6)
            run(
                self.experiment, place, resume=True, on_round=lambda row: row["round"] % every or print(row, flush=True)
            )
        for checkpoint in (*place.rglob(CHECKPOINT), *place.rglob(PREVIOUS)):
            checkpoint.unlink()


def methods(preset: str, seed: int, folder: Path) -> Iterator[Job]:
    """The five curves of a panel of Fig. 3; those of MAC and GNC once their thresholds are known."""
    base = Experiment(**PRESETS[preset]).with_(rounds=ROUNDS[preset], seed=seed)
    yield Job(f"{preset}-ideal-seed{seed}", base.with_(**IDEAL))
    for method in ("MAC", "GNC"):
        spec, key, _ = SEARCHED[method]
        wanted = Job(
            f"{preset}-search-{method.lower()}", base.with_(receiver=spec, rounds=SEARCH_ROUNDS, seed=0), method
        )
        yield wanted
        if wanted.done(folder):
            best = json.loads((folder / wanted.name / RESULT).read_text())["best"]["values"][key]
            yield Job(f"{preset}-{method.lower()}-seed{seed}", base.with_(receiver=spec, **{key: best}))
    yield Job(f"{preset}-auto-seed{seed}", base.with_(receiver="mac(C=auto)"))
    yield Job(f"{preset}-noisy-seed{seed}", base.with_(receiver="none()"))


def varied(**settings: float | str) -> Job:
    """A run of Fig. 4: what differs from alpha = 1.5, tau = 0.1, C = 0.13 names it."""
    preset = "cifar10-noniid"
    said = "-".join(f"{key.partition('.')[2]}{value}" for key, value in settings.items() if value != "")
    base = Experiment(**PRESETS[preset]).with_(rounds=ROUNDS[preset])
    return Job(f"{preset}-{said or 'plain'}-seed0", base.with_(**settings))


def jobs(folder: Path) -> Iterator[Job]:
    """All of them, the most important first; some come twice."""
    yield from methods("cifar10", 0, folder)
    yield from methods("cifar10", 1, folder)
    for tau in TAUS:
        yield varied(**{"noise.tau": tau})
    for tau in TAUS:
        yield varied(**{"noise.tau": tau, "receiver.C": "auto"})
    for tau in TAUS:
        yield varied(**{"noise.tau": tau, "receiver.C": round(1.3 * tau, 4)})
    for alpha in ALPHAS:
        yield varied(**{"noise.alpha": alpha})
    for alpha in (ALPHAS[0], ALPHAS[-1]):
        yield varied(**{"noise.alpha": alpha, "receiver.C": "auto"})
    yield from methods("femnist", 0, folder)
    yield from methods("cifar100", 0, folder)
    for C in CS:
        yield varied(**{"receiver.C": C})
    yield from methods("femnist", 1, folder)
    yield from methods("cifar100", 1, folder)
    yield from choices()


def choices() -> Iterator[Job]:
    """What the paper leaves open, each read the other way, in a short run beside the first rounds of Fig. 4's."""
    base = Experiment(**PRESETS["cifar10-noniid"])
    for label, settings in CHOICES.items():
        rounds = SLOW_ROUNDS if "group" in label else SHORT_ROUNDS
        said = "-".join(str(value) for value in settings.values())
        name = "".join(c if c.isalnum() else "-" for c in said).strip("-")
        yield Job(f"choice-{name}-seed0", base.with_(rounds=rounds, **settings))


def missing(folder: Path) -> Iterator[Job]:
    """What is still to be computed; of runs with the same settings one is enough."""
    seen = set()
    for job in jobs(folder):
        key = job.method, job.experiment.id()
        if key not in seen and not job.done(folder):
            yield job
        seen.add(key)


def chosen(folder: Path, beginnings: list[str]) -> Iterator[Job]:
    """Those of them whose names begin so, in the order of the beginnings."""
    return (job for start in beginnings for job in missing(folder) if job.name.startswith(start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["list", "run", "publish"])
    parser.add_argument("--minutes", type=float, default=25, help="begin no run after that long")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--only", nargs="+", default=[""], help="those whose names begin so, in this order")
    given = parser.parse_args()
    if given.what == "publish":
        from publish import publish

        for path in publish(given.out):
            print(path)
        return
    begin = time.perf_counter()
    if given.what == "list":
        for job in chosen(given.out, given.only):
            print(job.name, job.experiment.rounds)
        return
    while True:
        job = next(chosen(given.out, given.only), None)
        if job is None or time.perf_counter() - begin > 60 * given.minutes:
            break
        print(f"{time.perf_counter() - begin:.0f} s: {job.name}", flush=True)
        job.compute(given.out)


if __name__ == "__main__":
    main()
