"""What the benchmarks of mac(C=auto) share: a CSV file of runs, and the statistics of paired differences."""

import ast
import csv
import hashlib
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, as_completed
from pathlib import Path
from typing import NamedTuple

AUTO, NOISELESS = "mac(C=auto)", "noiseless"
FIXED = [f"mac(C={C}{gain})" for gain in ("", ", gain=True") for C in (0.1, 0.3, 1, 3, 10)]
RULE = Path(__file__).parent.parent / "src/stableair/receivers/adaptive.py"


class Job(NamedTuple):
    """One run: a line of the CSV file without its accuracy."""

    setting: str  # its number or name
    receiver: str  # or NOISELESS
    evaluate: str
    seed: int
    rule: str = ""  # `rule_digest`, for mac(C=auto); other receivers do not depend on it


def overrides(receiver: str) -> dict[str, str]:
    """The settings of an experiment with a receiver; NOISELESS has neither noise nor receiver, and the same fading."""
    return {"noise": "none()", "receiver": "none()"} if receiver == NOISELESS else {"receiver": receiver}


def rule_digest(source: str | None = None) -> str:
    """Return a digest of the rule's code without comments and docstrings."""
    tree = ast.parse(RULE.read_text() if source is None else source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:7]


class Results:
    """The accuracies of finished jobs, in a CSV file."""

    def __init__(self, path: Path):
        self.path, self.scores = path, dict[Job, float]()
        if path.exists():
            with path.open(newline="") as file:
                for setting, receiver, evaluate, seed, rule, value in list(csv.reader(file))[1:]:
                    self.scores[Job(setting, receiver, evaluate, int(seed), rule)] = float(value)

    def add(self, job: Job, value: float) -> None:
        """Append a line to the file."""
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow([*Job._fields, "accuracy"])
            writer.writerow([*job, f"{value:.3f}"])
        self.scores[job] = round(value, 3)

    def compute(self, jobs: Iterable[Job], score: Callable[[Job], float], pool: Executor) -> None:
        """Run the unfinished jobs, and print the progress."""
        todo = {pool.submit(score, job): job for job in dict.fromkeys(jobs) if job not in self.scores}
        for done, future in enumerate(as_completed(todo), 1):
            self.add(todo[future], future.result())
            print(f"\r{done}/{len(todo)} runs", end="", file=sys.stderr, flush=True)

    def of(self, jobs: Iterable[Job]) -> list[float]:
        return [self.scores[job] for job in jobs]

    def best(self, jobs: Iterable[Sequence[Job]]) -> str:
        """Return the receiver of the jobs with the best mean accuracy."""
        return max(jobs, key=lambda some: statistics.mean(self.of(some)))[0].receiver


class Comparison(NamedTuple):
    """Accuracies of one setting, one per seed: without noise, with a fixed threshold, and with mac(C=auto)."""

    noiseless: list[float]
    fixed: list[float]
    auto: list[float]

    def noise_helps(self) -> bool:
        """Return whether the fixed threshold exceeds the noiseless run by more than a standard error."""
        return statistics.mean(difference := paired(self.fixed, self.noiseless)) > error(difference)


def paired(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(some, others, strict=True)]


def error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; NaN for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def certainly_below(differences: Sequence[float], bound: float = -2) -> bool:
    """Return whether the mean is below the bound by more than two standard errors."""
    return statistics.mean(differences) < bound - 2 * error(differences)


def table(header: Sequence[str], rows: Iterable[Sequence]) -> str:
    """Return a Markdown table: lists of numbers become their mean."""
    lines = [header, ["---"] * len(header), *([text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(cell: object) -> str:
    return f"{statistics.mean(cell):.1f}" if isinstance(cell, list) else str(cell)


def difference(some: Sequence[float], others: Sequence[float]) -> str:
    """Return the mean paired difference and its standard error."""
    gaps = paired(some, others)
    return f"{statistics.mean(gaps):+.1f} ± {error(gaps):.1f}"


def loss(some: Sequence[float], others: Sequence[float]) -> str:
    """Return the difference; (!) marks a loss beyond 2 points and two standard errors."""
    return difference(some, others) + " (!)" * certainly_below(paired(some, others))


def short(rule: str) -> str:
    """mac(C=0.3, gain=True) -> 0.3, gain."""
    return rule.removeprefix("mac(C=").removesuffix(")").replace("gain=True", "gain")


def distribution(label: str, comparisons: Sequence[Comparison]) -> str:
    """The distribution of auto minus fixed, over all settings and over those where noise does not help, as Markdown."""
    limited = [each for each in comparisons if not each.noise_helps()]
    header = ["settings", "number", "mean", "worst", "quartiles", "below -2", "by two standard errors"]
    parts = {label: comparisons, f"{label}, noise does not help": limited}
    return table(header, [[name, *cells(some)] for name, some in parts.items() if some])


def cells(comparisons: Sequence[Comparison]) -> list[str]:
    differences = [paired(each.auto, each.fixed) for each in comparisons]
    means = sorted(map(statistics.mean, differences))
    quartiles = statistics.quantiles(means, n=4) if len(means) > 1 else means * 3
    below = f"{sum(mean < -2 for mean in means)} ({sum(mean < -2 for mean in means) / len(means):.0%})"
    numbers = [f"{statistics.mean(means):+.2f}", f"{means[0]:+.1f}", ", ".join(f"{q:+.1f}" for q in quartiles)]
    return [str(len(means)), *numbers, below, str(sum(map(certainly_below, differences)))]
