"""mac(C=auto) against fixed thresholds chosen on a validation split, in interference that does not change.

    python bench/auto_steady.py [--half tuning] [--seeds 0 1 2 3 4] [--settings 3 17 ...] [--processes 2]

60 settings are drawn once by a hash: 54 with interference, 6 without. The 30 with an even number are for the tuning of
the rule, the 30 with an odd number are held out until the rule is frozen. In each setting, C = 0.1, 0.3, 1, 3 and 10,
without and with gain correction, run on a validation split with the seeds of --validation-seeds. The best of them and
mac(C=auto) run on the test split with the seeds of --seeds, paired. The score of a run is its settled accuracy: the
mean of the last ten rounds, and 0 if it diverged. With --hindsight all ten fixed thresholds run on the test split; the
table then also shows the best of them, which cannot be known beforehand.

Every run is one line of a CSV file; finished runs are not repeated. Runs of mac(C=auto) are recorded with the commit of
the rule and repeated if the rule has changed. The program prints a table and the distribution of the paired differences
as Markdown.
"""

import argparse
import csv
import hashlib
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import stableair as sa

ALPHAS = 0.8, 1.1, 1.5, 1.8, 2.0
TAUS = 0.03, 0.1, 0.3, 1.0, 3.0
COMMON = (
    (0.01, 0.03, 0.1),  # server's learning rate
    (30, 120),  # rounds
    ("logistic()", "mlp(50)", "mlp(50, depth=2)", "cnn(width=16)"),
    ("all()", "sample(10)"),
)
NOISY, NOISELESS = 54, 6
HALVES = "tuning", "held-out"
RULES = [f"mac(C={C}{gain})" for gain in ("", ", gain=True") for C in (0.1, 0.3, 1, 3, 10)]
SOURCE = "src/stableair/receivers/adaptive.py"


class Job(NamedTuple):
    """One run: a line of the CSV file without its result."""

    setting: int
    receiver: str
    evaluate: str
    seed: int
    commit: str  # of the rule, for mac(C=auto); fixed thresholds do not depend on it


def drawn(candidates: Iterable[tuple], n: int) -> list[tuple]:
    """The first n candidates in the order of their hashes."""
    return sorted(candidates, key=lambda each: hashlib.sha256(repr(each).encode()).digest())[:n]


def settings() -> dict[int, sa.Experiment]:
    """The 60 settings by number; those with an even number are for tuning."""
    noisy = [(f"sas(alpha={a}, tau={t})", *rest) for a, t, *rest in product(ALPHAS, TAUS, *COMMON)]
    every = drawn(noisy, NOISY) + drawn(product(["none()"], *COMMON), NOISELESS)
    return {number: experiment(*each) for number, each in enumerate(every)}


def experiment(noise: str, lr: float, rounds: int, model: str, participation: str) -> sa.Experiment:
    return sa.Experiment(
        noise=noise, server=f"sgd(lr={lr})", rounds=rounds, model=model, participation=participation, device="cpu"
    )


def score(job: Job) -> float:
    """Run a job and return its settled accuracy in per cent."""
    import torch

    torch.set_num_threads(1)
    run = sa.run(settings()[job.setting].with_(receiver=job.receiver, evaluate=job.evaluate, seed=job.seed))
    return 100 * run.settled(f"{job.evaluate}/accuracy")


class Results:
    """The scores of finished jobs, in a CSV file."""

    def __init__(self, path: Path):
        self.path, self.scores = path, dict[Job, float]()
        if path.exists():
            with path.open(newline="") as file:
                for setting, receiver, evaluate, seed, commit, value in list(csv.reader(file))[1:]:
                    self.scores[Job(int(setting), receiver, evaluate, int(seed), commit)] = float(value)

    def add(self, job: Job, value: float) -> None:
        """Append a line to the file."""
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow([*Job._fields, "accuracy"])
            writer.writerow([*job, f"{value:.3f}"])
        self.scores[job] = value

    def compute(self, jobs: Iterable[Job], pool: ProcessPoolExecutor) -> None:
        """Run the unfinished jobs, and print the progress."""
        todo = {pool.submit(score, job): job for job in jobs if job not in self.scores}
        for done, future in enumerate(as_completed(todo), 1):
            self.add(todo[future], future.result())
            print(f"\r{done}/{len(todo)} runs", end="", file=sys.stderr, flush=True)

    def of(self, jobs: Sequence[Job]) -> list[float]:
        return [self.scores[job] for job in jobs]

    def best(self, jobs: Sequence[Sequence[Job]]) -> str:
        """The receiver of the jobs with the best mean score."""
        return max(jobs, key=lambda some: statistics.mean(self.of(some)))[0].receiver


def rule_commit() -> str:
    """The last commit that changed the rule; + marks changes that are not committed."""
    git = partial(subprocess.run, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    commit = git(["git", "log", "-1", "--format=%h", "--", SOURCE], check=True)
    changed = git(["git", "diff", "--quiet", "HEAD", "--", SOURCE]).returncode
    return commit.stdout.strip() + "+" * bool(changed)


def main() -> None:
    options = arguments()
    results, commit = Results(options.out), rule_commit()
    chosen = [n for n in settings() if n in options.settings] if options.settings else range(len(settings()))
    numbers = [n for n in chosen if options.half in (None, HALVES[n % 2])]

    def jobs(number: int, rule: str, evaluate: str = "test") -> list[Job]:
        seeds = options.seeds if evaluate == "test" else options.validation_seeds
        return [Job(number, rule, evaluate, seed, commit if "auto" in rule else "") for seed in seeds]

    rows, differences = [], []
    with ProcessPoolExecutor(options.processes) as pool:
        searches = {n: [jobs(n, rule, "validation") for rule in RULES] for n in numbers}
        results.compute((job for n in numbers for some in searches[n] for job in some), pool)
        rules = {n: [results.best(searches[n]), options.receiver, *RULES * options.hindsight] for n in numbers}
        results.compute((job for n in numbers for rule in dict.fromkeys(rules[n]) for job in jobs(n, rule)), pool)
    for n in numbers:
        fixed, auto = (results.of(jobs(n, rule)) for rule in rules[n][:2])
        hindsight = results.best([jobs(n, rule) for rule in RULES]) if options.hindsight else ""
        known = results.of(jobs(n, hindsight)) if hindsight else []
        differences.append([a - b for a, b in zip(auto, fixed, strict=True)])
        rows.append(row(n, (rules[n][0], fixed), (hindsight, known), auto, differences[-1]))
    print(f"\n\nThe rule of commit {commit}, seeds {options.seeds}, validation seeds {options.validation_seeds}:\n")
    print(
        "| | noise | lr | rounds | model | clients | fixed, validated | | fixed, in hindsight | | auto | difference |"
    )
    print("|" + "---|" * 12, *rows, "", summary(differences), sep="\n")


def row(n: int, fixed: tuple, hindsight: tuple, auto: list[float], differences: list[float]) -> str:
    """The row of a setting; (!) marks a loss beyond 2 points and two standard errors."""
    e, mean = settings()[n], lambda values: f"{statistics.mean(values):.1f}" if values else ""
    law = "none" if e.noise == "none()" else " ".join(map(str, e.call("noise").arguments.values()))
    rules = [cell for rule, values in (fixed, hindsight) for cell in (short(rule), mean(values))]
    lost = "" if statistics.mean(differences) >= -2 - 2 * error(differences) else " (!)"
    difference = f"{statistics.mean(differences):+.1f} ± {error(differences):.1f}{lost}"
    clients = e.participation.removesuffix("()")
    cells = [n, law, e.call("server").arguments["lr"], e.rounds, e.model, clients, *rules, mean(auto), difference]
    return f"| {' | '.join(map(str, cells))} |"


def short(rule: str) -> str:
    """mac(C=0.3, gain=True) -> 0.3, gain."""
    return rule.removeprefix("mac(C=").removesuffix(")").replace("gain=True", "gain")


def error(values: list[float]) -> float:
    """The standard error of a mean; NaN for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def summary(differences: list[list[float]]) -> str:
    """The distribution over the settings of the mean paired difference."""
    means = sorted(map(statistics.mean, differences))
    below = sum(mean < -2 for mean in means) / len(means)
    quartiles = statistics.quantiles(means, n=4) if len(means) > 1 else means * 3
    text = f"{len(means)} settings: mean {statistics.mean(means):+.2f}, worst {means[0]:+.1f}, "
    return text + f"quartiles {', '.join(f'{q:+.1f}' for q in quartiles)}, {below:.0%} below -2"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--half", choices=HALVES, help="half of the settings (default: both)")
    parser.add_argument("--settings", type=int, nargs="+", help="numbers of settings, 0 to 59 (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--validation-seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--receiver", default="mac(C=auto)")
    parser.add_argument("--hindsight", action="store_true", help="run all fixed thresholds on the test split")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "auto_steady.csv")
    return parser.parse_args()


if __name__ == "__main__":
    main()
