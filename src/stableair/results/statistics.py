"""Statistics over seeds: means, paired differences, confidence intervals, t-tests and Holm's correction.

Runs with the same seed have the same data and batches and, on equal channels, the same fading and noise. Therefore two
methods are compared seed by seed. With the differences d_1, ..., d_n of two methods on n shared seeds:

    mean difference        m = (1/n) sum_i d_i
    standard error         s = sqrt(sum_i (d_i - m)^2 / (n - 1)) / sqrt(n)
    95 % interval          m -+ t_{n-1}(0.975) s
    p-value, two-sided     2 P(T_{n-1} >= |m| / s)

where T_{n-1} follows Student's t distribution with n - 1 degrees of freedom and t_{n-1}(q) is its q-quantile.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from stableair.literals import Band
from stableair.results.run import Run

PAIRED_BY = "data", "partition", "clients", "model", "evaluate"  # settings that paired groups must have in common
CHANNEL = "power", "channel", "fading", "noise"  # settings that define the channel
MIN_SEEDS = 5  # with fewer seeds, a t-test depends entirely on its assumption of normality
SIGNIFICANCE = 0.05
CONFIDENCE = 0.95
ROUNDING = 1e-12  # relative spread of equal differences; rounding changes means of ten float64 values by about 1e-15


class PairedDifference(NamedTuple):
    """The mean difference between two groups of runs on their common seeds."""

    better: str  # name of the group with the higher mean
    worse: str  # name of the other group
    seeds: int  # number of common seeds
    difference: float  # mean over the seeds, better minus worse: at least 0
    error: float | None  # standard error of the mean; None for a single seed
    interval: tuple[float, float] | None  # 95 % confidence interval; None for a single seed
    p: float | None = None  # Holm-corrected p-value; None for fewer than MIN_SEEDS seeds or equal differences

    @property
    def mark(self) -> str:
        """A star if the difference is significant."""
        return "*" if self.p is not None and self.p < SIGNIFICANCE else ""


def mean_and_std(values: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and sample standard deviation over the first axis, ignoring NaN.

    Args:
        values: (n, ...), such as one row per seed; NaN marks a missing value.

    Returns:
        The mean (...), NaN where all values are missing, and the standard deviation (...), 0 for a single value.

    >>> mean, std = mean_and_std([[1.0, 5.0], [3.0, float("nan")]])
    >>> mean.tolist(), std.round(4).tolist()
    ([2.0, 5.0], [1.4142, 0.0])
    """
    table = np.asarray(values, dtype=float)
    count = np.maximum((~np.isnan(table)).sum(0), 1)
    mean = np.where(np.isnan(table).all(0), np.nan, np.nansum(table, 0) / count)
    return mean, np.sqrt(np.nansum((table - mean) ** 2, 0) / np.maximum(count - 1, 1))


def mean_and_band(values: ArrayLike, band: Band = "std") -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over the first axis and half the width of its band, ignoring NaN.

    Args:
        values: (n, ...), such as one row per seed; NaN marks a missing value.
        band: "std": one standard deviation; "sem": one standard error of the mean; "ci95": 95 % confidence interval.

    Returns:
        The mean (...), and half the width of the band (...), 0 for a single value.

    >>> [mean_and_band([1.0, 3.0, 5.0], band)[1].round(3).item() for band in ("std", "sem", "ci95")]
    [2.0, 1.155, 4.968]
    """
    mean, std = mean_and_std(values)
    if band == "std":
        return mean, std
    n = np.maximum((~np.isnan(np.asarray(values, dtype=float))).sum(0), 1)
    error = std / np.sqrt(n)
    if band == "sem":
        return mean, error
    factors = {k: _t_quantile((1 + CONFIDENCE) / 2, k - 1) if k > 1 else 0.0 for k in np.unique(n).tolist()}
    return mean, np.vectorize(factors.get, otypes=[float])(n) * error


def confidence_interval(mean: float, error: float, n: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a mean: mean -+ t_{n-1}(0.975) error.

    Args:
        mean: Mean of n values.
        error: Standard error of the mean.
        n: Number of values, at least 2.

    Returns:
        The lower and the upper end.

    >>> low, high = confidence_interval(0.0, 1.0, n=5)
    >>> round(low, 3), round(high, 3)
    (-2.776, 2.776)
    """
    half_width = _t_quantile((1 + CONFIDENCE) / 2, n - 1) * error
    return mean - half_width, mean + half_width


@cache
def _t_quantile(q: float, degrees_of_freedom: int) -> float:
    from scipy.stats import t  # imported here, since the import takes a second

    return float(t.ppf(q, degrees_of_freedom))


def p_value(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the two-sided p-value of a paired t-test.

    Args:
        first: (n,) values of the first method, one per seed.
        second: (n,) values of the second method on the same seeds.

    Returns:
        The p-value. None for fewer than MIN_SEEDS seeds. Also None if all differences are equal up to rounding, since
        the t statistic of their spread, which is 0 or a rounding error, has no meaning.

    >>> round(p_value([0.5, 0.6, 0.7, 0.6, 0.5], [0.4, 0.6, 0.5, 0.6, 0.4]), 4)
    0.0993
    >>> p_value([0.3, 0.6, 0.7, 0.8, 0.9], [0.2, 0.5, 0.6, 0.7, 0.8])
    """
    if len(first) < MIN_SEEDS or equal_differences(first, second):
        return None
    from scipy.stats import ttest_rel  # imported here, since the import takes a second

    return float(ttest_rel(first, second).pvalue)


def equal_differences(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether all paired differences are equal up to rounding.

    >>> equal_differences([0.3, 0.6], [0.2, 0.5])  # 0.3 - 0.2 and 0.6 - 0.5 differ in their last bits
    True
    >>> equal_differences([0.3, 0.6], [0.2, 0.50001])
    False
    """
    scale = np.abs([first, second]).max()
    return bool(np.ptp(np.subtract(first, second)) <= ROUNDING * scale)


def holm(p_values: Sequence[float | None], tests: int | None = None) -> list[float | None]:
    """Apply Holm's correction for several tests (Holm 1979, Scandinavian Journal of Statistics 6).

    With m tests and the p-values in ascending order, p_(1) <= p_(2) <= ..., the corrected values are
    max over j <= i of min(1, (m - j + 1) p_(j)). The probability of any false rejection at level a is at most a.

    Args:
        p_values: Uncorrected p-values; None stays None.
        tests: Number of tests m. Default: the number of p-values that are not None. Include a planned test without a
            p-value, since its outcome must not weaken the correction of the other tests.

    Returns:
        The corrected p-values, in the order of `p_values`.

    >>> [round(p, 2) for p in holm([0.04, 0.01, 0.03])]
    [0.06, 0.03, 0.06]
    >>> holm([0.01, None], tests=2)
    [0.02, None]
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    m = len(known) if tests is None else tests
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (m - rank) * p))
        corrected[i] = largest
    return corrected


def paired_difference(names: tuple[str, str], first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Compare two methods on their common seeds.

    Args:
        names: Names of the two methods.
        first: (n,) values of the first method, one per seed.
        second: (n,) values of the second method on the same seeds.

    Returns:
        The difference, with an uncorrected p-value; `better` is the method with the higher mean. If all differences are
        equal up to rounding, the standard error and the width of the interval are 0, and there is no p-value.

    >>> pair = paired_difference(("mac", "none"), [0.50, 0.40], [0.60, 0.60])
    >>> pair.better, pair.seeds, round(pair.difference, 3), round(pair.error, 3), pair.p
    ('none', 2, 0.15, 0.05, None)
    """
    differences = np.subtract(first, second)
    if differences.sum() < 0:
        return paired_difference((names[1], names[0]), second, first)
    n = len(differences)
    mean, std = map(float, mean_and_std(differences))
    if n == 1:
        return PairedDifference(*names, n, mean, None, None)
    error = 0.0 if equal_differences(first, second) else std / math.sqrt(n)
    return PairedDifference(*names, n, mean, error, confidence_interval(mean, error, n), p_value(first, second))


def compare_groups(groups: dict[str, list[Run]], metric: str, *, equal_rounds: bool = True) -> list[PairedDifference]:
    """Compare all pairs of groups with the same task, seed by seed.

    The value of a run is `Run.settled(metric)` over the rounds that both runs have. Holm's correction treats the pairs
    on one channel as one family of tests. The pairs between two channels also form one family.

    Args:
        groups: The runs of each group by its name. The runs of a group differ in the seed only.
        metric: Name of the metric, such as "test/accuracy".
        equal_rounds: False for runs with equal resources: the value of a run is `Run.settled(metric)` over all its
            rounds, and all pairs form one family.

    Returns:
        The pairs with at least one common seed, largest difference first.
    """
    pairs: dict[frozenset[Any], list[PairedDifference]] = {}  # by the channels of the two groups
    for one, other in combinations(groups, 2):
        settings = groups[one][0].settings, groups[other][0].settings
        if any(settings[0][key] != settings[1][key] for key in PAIRED_BY):
            continue
        if values := _shared_seed_values(groups[one], groups[other], metric, equal_rounds):
            channels = frozenset(tuple(each[key] for key in CHANNEL) for each in settings if equal_rounds)
            pairs.setdefault(channels, []).append(paired_difference((one, other), *zip(*values, strict=True)))
    corrected = [pair for family in pairs.values() for pair in _with_holm(family)]
    return sorted(corrected, key=lambda pair: -pair.difference)


def _shared_seed_values(
    first: list[Run], second: list[Run], metric: str, equal_rounds: bool
) -> list[tuple[float, float]]:
    """Return the values of both groups on each common seed, over their common rounds if `equal_rounds`."""
    by_seed = [{run.settings["seed"]: run for run in runs} for runs in (first, second)]
    values = []
    for seed in sorted(by_seed[0].keys() & by_seed[1].keys()):
        one, other = (runs[seed] for runs in by_seed)
        if equal_rounds:
            rounds = min(len(one), len(other))
            one, other = _truncated(one, rounds), _truncated(other, rounds)
        values.append((one.settled(metric), other.settled(metric)))
    return values


def _truncated(run: Run, rounds: int) -> Run:
    """Return a run with its first rounds only. A diverged run is not cut, since its last round marks the divergence."""
    return run if run.diverged is not None else replace(run, rounds=run.rounds[:rounds])


def _with_holm(pairs: list[PairedDifference]) -> list[PairedDifference]:
    """Correct the p-values of a family of tests.

    A pair with equal differences is a test without p-value. A pair with fewer than MIN_SEEDS seeds is not a test.
    """
    tests = sum(pair.seeds >= MIN_SEEDS for pair in pairs)
    p_values = holm([pair.p for pair in pairs], tests)
    return [pair._replace(p=p) for pair, p in zip(pairs, p_values, strict=True)]


def snrs(runs: Iterable[Run], rounds: int | None = None) -> list[float]:
    """Return the SNR in dB of each round of some runs, without the rounds that have no interference.

    Args:
        runs: The runs.
        rounds: Number of first rounds of each run. None: all rounds.
    """
    return [db for run in runs for row in run.rounds[:rounds] if (db := row.get("channel/snr_db")) is not None]


def linear_mean(decibels: list[float]) -> float:
    """Return the mean of the linear ratios, in dB: 10 log10 of the mean of 10^(x / 10).

    Rounds with a high SNR dominate this mean, whereas rounds with impulses dominate a mean of the values in dB.

    >>> round(linear_mean([-40, -60]), 1)
    -43.0
    """
    return 10 * math.log10(fmean(10 ** (db / 10) for db in decibels))
