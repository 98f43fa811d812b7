"""The paper's claims, judged by the published runs. All comparisons are paired by seed."""

import math
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

from scipy.stats import t

from stableair.results.run import Run

ACCURACY, LOSS = "test/accuracy", "test/loss"
MISSING, NONE = "not run yet", "–"
TOLERANCE = 3.0  # points of accuracy, and dB: the meaning of "about the same"
SEARCHED_C = "τ = 0.3, C searched"

Curves = dict[str, list[Run]]  # the runs of a curve, one per seed, by label
Pair = tuple[Run, Run]
Measure = Callable[[Run, Run], float]


class Verdict(NamedTuple):
    """A row of a table: the claim, what the runs show, and whether the claim holds."""

    claim: str
    seen: str
    verdict: str


def pairs(one: list[Run], other: list[Run]) -> dict[int, Pair]:
    """Return the runs of two curves with the same seed, by seed."""
    first, second = ({run.settings["seed"]: run for run in runs} for runs in (one, other))
    return {seed: (first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())}


def accuracy_gain(one: Run, other: Run) -> float:
    """Points of settled accuracy of the first run above the second; a diverged run has accuracy 0."""
    return 100 * (one.settled(ACCURACY) - other.settled(ACCURACY))


def loss_increase(one: Run, other: Run) -> float:
    """Settled test loss of the first run above the second; a diverged run has an infinite loss."""
    first, second = (math.inf if run.diverged is not None else run.settled(LOSS) for run in (one, other))
    return first - second


def fluctuation_ratio(one: Run, other: Run) -> float:
    """How many times as much the accuracy of the first run fluctuates; infinite if that run diverged."""
    first, second = one.fluctuation(ACCURACY), other.fluctuation(ACCURACY)
    if not second:
        return 0.0
    return first / second if first is not None else math.inf


def describe_seeds(seeds: list[int]) -> str:
    """
    >>> describe_seeds([0]), describe_seeds([0, 1, 2])
    ('seed 0', 'seeds 0, 1 and 2')
    """
    *first, last = map(str, seeds)
    return f"seeds {', '.join(first)} and {last}" if first else f"seed {last}"


def describe_values(values: list[float], form: str) -> str:
    """One or two values as they are; of more, the mean with its 95 % interval (Student's t).

    >>> describe_values([1.0, 2.0], "{:+.1f}")
    '+1.0 and +2.0'
    >>> describe_values([1.0, 2.0, 3.0], "{:+.1f}")
    '+2.0 (95 % interval -0.5 to +4.5)'
    """
    if len(values) < 3:
        return " and ".join(form.format(value) for value in values)
    mean, n = statistics.fmean(values), len(values)
    half = float(t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return f"{form.format(mean)} (95 % interval {form.format(mean - half)} to {form.format(mean + half)})"


def verdict(holds: dict[int, bool], within: str = "") -> str:
    """Return whether a claim holds, by seed.

    >>> verdict({0: True, 1: True})
    'holds, seeds 0 and 1'
    >>> verdict({0: True, 1: False}, " within 3 points")
    '**mixed**: holds within 3 points with seed 0, does not with seed 1'
    """
    yes, no = ([seed for seed in sorted(holds) if holds[seed] == wanted] for wanted in (True, False))
    if yes and no:
        return f"**mixed**: holds{within} with {describe_seeds(yes)}, does not with {describe_seeds(no)}"
    if yes:
        return f"holds{within}, {describe_seeds(yes)}"
    return f"**does not hold**{within}, {describe_seeds(no)}"


class Judge:
    """Judges claims about the curves of one panel.

    Args:
        curves: The runs of each curve, by label.
        names: Names of curves that differ from their labels, such as "MAC, C = auto (version 0.2)".
    """

    def __init__(self, curves: Curves, names: dict[str, str]):
        self.curves, self.names = curves, names

    def judge(
        self,
        claim: str,
        one: str,
        other: str,
        measure: Measure,
        holds: Callable[[float], bool],
        describe: Callable[[str, str, list[Pair]], str],
        within: str = "",
    ) -> Verdict:
        """Judge a claim about two curves.

        Args:
            claim: The claim.
            one: Label of the first curve.
            other: Label of the second curve.
            measure: Compares two runs with the same seed.
            holds: Whether the claim holds at a value of the measure.
            describe: Describes the runs with the same seed of which none diverged.
            within: Tolerance of the claim, in words.
        """
        if lacking := [label for label in (one, other) if not self.curves.get(label)]:
            return Verdict(claim, f"{' and '.join(lacking)} {MISSING}", NONE)
        paired = pairs(self.curves[one], self.curves[other])
        if not paired:
            return Verdict(claim, f"{one} and {other} have no seed in common", NONE)
        finite = [pair for pair in paired.values() if all(run.diverged is None for run in pair)]
        seen = [describe(self.names.get(one, one), self.names.get(other, other), finite)] if finite else []
        seen += [text for label in (one, other) for text in self._divergence(label, paired)]
        judged = {seed: holds(measure(*pair)) for seed, pair in paired.items()}
        return Verdict(claim, "; ".join(seen), verdict(judged, within))

    def _divergence(self, label: str, paired: dict[int, Pair]) -> Iterator[str]:
        for run in self.curves[label]:
            if run.diverged is not None and run.settings["seed"] in paired:
                name = self.names.get(label, label)
                yield f"{name} diverged at round {run.diverged + 1} with seed {run.settings['seed']}"

    def above(self, claim: str, one: str, other: str) -> Verdict:
        """Judge that the first curve has the higher accuracy."""
        return self.judge(claim, one, other, accuracy_gain, lambda gain: gain > 0, _describe_gain)

    def kept(self, claim: str, one: str, other: str) -> Verdict:
        """Judge that the first curve is about as accurate as the second, or more accurate."""
        within = f" within {TOLERANCE:g} points"
        return self.judge(claim, one, other, accuracy_gain, lambda gain: gain >= -TOLERANCE, _describe_gain, within)

    def higher_loss(self, claim: str, one: str, other: str) -> Verdict:
        """Judge that the first curve has the higher test loss."""
        return self.judge(claim, one, other, loss_increase, lambda increase: increase > 0, _describe_losses)

    def fluctuates(self, claim: str, one: str, other: str) -> Verdict:
        """Judge that the first curve fluctuates more than twice as much."""
        return self.judge(claim, one, other, fluctuation_ratio, lambda ratio: ratio > 2, _describe_fluctuation)


def _describe_gain(one: str, other: str, paired: list[Pair]) -> str:
    gains = describe_values([accuracy_gain(*pair) for pair in paired], "{:+.1f}")
    return f"{one} compared with {other}: {gains} points"


def _describe_losses(one: str, other: str, paired: list[Pair]) -> str:
    first, second = (statistics.fmean(run.settled(LOSS) for run in runs) for runs in zip(*paired, strict=True))
    return f"loss {first:.3f} with {one}, {second:.3f} with {other}"


def _describe_fluctuation(one: str, other: str, paired: list[Pair]) -> str:
    ratios = describe_values([fluctuation_ratio(*pair) for pair in paired], "{:.1f}")
    return f"{one} fluctuates {ratios} times as much as {other}"


def claims(name: str, curves: Curves, names: dict[str, str]) -> Iterator[Verdict]:
    """Yield the claims about a panel, each with its verdict; "(ours)" marks what the paper does not state."""
    by = Judge(curves, names)
    if name.startswith("fig3"):
        yield by.above("MAC markedly improves the accuracy", "MAC", "Noisy")
        yield by.above("GNC cannot keep up with MAC", "MAC", "GNC")
        yield by.above("the ideal channel is the upper bound", "Ideal", "MAC")
        yield by.kept("MAC comes close to the ideal channel", "MAC", "Ideal")
        yield by.higher_loss("heavy-tailed noise raises the test loss", "Noisy", "Ideal")
        yield by.higher_loss("(ours) the ideal channel has the lowest test loss", "MAC", "Ideal")
        yield by.fluctuates("MAC removes most of the fluctuation", "Noisy", "MAC")
        yield by.kept("(ours) `auto` replaces the search of C", "MAC, C = auto", "MAC")
    if name == "fig4a":
        yield by.kept("MAC keeps its accuracy from α = 1.5 to 1.1", "α = 1.1", "α = 1.5")
        yield by.kept("(ours) `auto` keeps its accuracy from α = 1.5 to 1.1", "α = 1.1, C = auto", "α = 1.5, C = auto")
    if name == "fig4b":
        claim = "performance is sustained at -50 dB"
        yield by.kept(f"{claim}, C searched", SEARCHED_C, "τ = 0.05")
        yield by.kept(f"{claim}, (ours) one C for all τ", "τ = 0.3", "τ = 0.05")
        yield by.kept(f"{claim}, (ours) C = 1.3 τ", "τ = 0.3, C = 0.39", "τ = 0.05, C = 0.065")
        yield by.kept(f"{claim}, (ours) C = auto", "τ = 0.3, C = auto", "τ = 0.05, C = auto")
    if name == "fig4c":
        yield _alike("different thresholds converge alike", curves)


def _alike(claim: str, curves: Curves) -> Verdict:
    """Judge that all curves settle at about the same accuracy."""
    by_seed = [{run.settings["seed"]: run.settled(ACCURACY) for run in runs} for runs in curves.values()]
    seeds = sorted(set.intersection(*map(set, by_seed))) if by_seed else []
    if not seeds:
        return Verdict(claim, MISSING, NONE)
    reached = {seed: [each[seed] for each in by_seed] for seed in seeds}
    spreads = {seed: 100 * (max(each) - min(each)) for seed, each in reached.items()}
    seen = f"the best threshold is {describe_values(list(spreads.values()), '{:.1f}')} points above the worst"
    alike = {seed: spread <= TOLERANCE for seed, spread in spreads.items()}
    return Verdict(claim, seen, verdict(alike, f" within {TOLERANCE:g} points"))
