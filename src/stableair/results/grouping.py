"""Groups of runs that differ only in the seed, and labels for these groups."""

import statistics
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from stableair.experiment import EXECUTION, IDEAL, TYPES
from stableair.markup import html_table, sparkline
from stableair.results.run import FLOWER_KEYS, LAST, Run
from stableair.results.short_specs import short_settings
from stableair.spec import with_short_digests, without_digests
from stableair.validation import pluralize

PLAIN = {"channel": "flat()", "power": "none()"}  # an ideal run with these settings is labelled "ideal"
AMBIGUOUS = "none", "auto", "tensor", "layer"  # values of several settings: labels add the setting's name


class Sweep(list[Run]):
    """A list of runs, such as the runs of a sweep in the order of its plan.

    Notebooks display the list as a table with one row per configuration: the runs that differ only in the seed.

    >>> import stableair as sa
    >>> experiment = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2)
    >>> sa.Sweep([sa.run(experiment), sa.run(experiment.with_(seed=1))])
    Sweep(2 runs, 1 configuration; best accuracy: mac(C=1) 0.9167)
    """

    def __repr__(self) -> str:
        groups = group(self)
        means = {name: statistics.fmean(scores) for name, runs in groups.items() if (scores := _settled(runs))}
        best = max(means, key=means.__getitem__, default="")
        return f"Sweep({self._counts(groups)}{f'; best accuracy: {best} {means[best]:.4f}' if best else ''})"

    def _repr_html_(self) -> str:
        groups, rows = group(self), []
        for name, runs in groups.items():
            scores, lengths = _settled(runs), sorted({len(run) for run in runs})
            rounds = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else lengths[0]
            std = f" ± {statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
            mean = f"{statistics.fmean(scores):.4f}{std}" if scores else ""
            line = sparkline([row.get(_accuracy(runs[0])) for row in runs[0].rounds])
            rows.append((name, len(runs), rounds, mean, line))
        head = ("", "seeds", "rounds", f"accuracy, last {LAST} rounds", "first seed")
        return html_table(rows, head, self._counts(groups))

    def _counts(self, groups: dict[str, list[Run]]) -> str:
        diverged = sum(run.diverged is not None for run in self)
        ended = f", {diverged} diverged" if diverged else ""
        return f"{pluralize(len(self), 'run')}, {pluralize(len(groups), 'configuration')}{ended}"


def _accuracy(run: Run) -> str:
    """The metric of the accuracy on the data of the evaluation."""
    return f"{run.settings['evaluate']}/accuracy"


def _settled(runs: list[Run]) -> list[float]:
    """Return the mean accuracy over the last rounds of each run that has recorded one."""
    return [run.settled(_accuracy(run)) for run in runs if any(_accuracy(run) in row for row in run.rounds)]


def group(runs: list[Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in the seed.

    Args:
        runs: The runs.

    Returns:
        The runs of each group by its label. The labels show the settings that differ between the groups, without
        arguments that have their default in all groups. They do not depend on the order of the runs.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.identity[1:], []).append(run)
    members = [some[0] for some in groups.values()]
    settings = [one | run.flower for one, run in zip(short_settings(members), members, strict=True)]
    ideal, noisy = ([s for s in settings if _is_ideal(s) == which] for which in (True, False))
    label_settings = {True: _ideal_label_settings(ideal, noisy), False: _differing(noisy)}
    shown: dict[str, set[Any]] = {}  # the values in the labels
    for one in settings:
        for key in label_settings[_is_ideal(one)]:
            shown.setdefault(key, set()).add(one.get(key))
    named, power_differs = _named(shown), len(_values(settings, "power")) > 1
    specs = [_label(one, label_settings[_is_ideal(one)], named, power_differs) for one in settings]
    names = [without_digests(spec) for spec in specs]
    often = Counter(names)
    names = [with_short_digests(spec) if often[name] > 1 else name for spec, name in zip(specs, names, strict=True)]
    # Labels that are still equal omit the argument in which the groups differ: they are numbered.
    by_identity = sorted(range(len(names)), key=lambda i: list(groups)[i])
    seen: Counter[str] = Counter()
    for i in by_identity:
        seen[names[i]] += 1
        names[i] += f" ({seen[names[i]]})" if seen[names[i]] > 1 else ""
    return dict(zip(names, groups.values(), strict=True))


def _named(shown: dict[str, set[Any]]) -> list[str]:
    """Return the settings that need their name in all labels, since a value could belong to several settings.

    Args:
        shown: The values of each setting in the labels.
    """
    without = [key for key, values in shown.items() if "none()" in values]
    ambiguous = [key for key, values in shown.items() if values & {*AMBIGUOUS}]
    return ambiguous + (without if len(without) > 1 else [])


def _label(settings: dict[str, Any], keys: list[str], named: Collection[str], power_differs: bool) -> str:
    """Return the label of a group: the values of some settings.

    The label of an ideal run starts with "ideal", or with its channel if the channel is not flat.

    Args:
        settings: The settings of the group.
        keys: The settings in the label.
        named: The settings that are written with their name.
        power_differs: Whether the power rule differs between the groups. Otherwise it is not in the label.
    """
    words = []
    if _is_ideal(settings):
        channel, power = (None if settings[key] == value else settings[key] for key, value in PLAIN.items())
        words = [channel or "ideal", *([power] if power and power_differs else [])]
    several = len(words) + len(keys) > 1
    for key in keys:
        if key not in settings:  # only runs of Flower have a strategy
            continue
        bare = isinstance(settings[key], str) and not (several and key in named)
        words.append(settings[key] if bare else f"{key}={settings[key]}")
    return ", ".join(words) or settings["receiver"]


def _is_ideal(settings: dict[str, Any]) -> bool:
    """Return whether a run has neither fading nor interference, and a receiver without effect."""
    return all(settings[key] == value for key, value in IDEAL.items())


def _differing(runs: list[dict[str, Any]]) -> list[str]:
    """Return the names of the settings that differ between runs, except execution settings and the seed."""
    return [key for key in (*TYPES, *FLOWER_KEYS) if key not in (*EXECUTION, "seed") and len(_values(runs, key)) > 1]


def _ideal_label_settings(ideal: list[dict[str, Any]], noisy: list[dict[str, Any]]) -> list[str]:
    """Return the settings for the labels of ideal runs.

    They are the settings that differ among the ideal runs, or between all ideal and all noisy runs.
    """
    among, between = _differing(ideal), _differing(ideal + noisy) if ideal and noisy else []
    disjoint = [key for key in between if not _values(ideal, key) & _values(noisy, key)]
    return [key for key in (*TYPES, *FLOWER_KEYS) if key in (*among, *disjoint) and key not in IDEAL | PLAIN]


def _values(runs: list[dict[str, Any]], key: str) -> set[Any]:
    return {settings.get(key) for settings in runs}


def describe_seeds(runs: Iterable[Run]) -> str:
    """List the seeds of some runs, with ranges for three or more consecutive seeds.

    >>> import stableair as sa
    >>> describe_seeds([Run(sa.Experiment(seed=seed).to_dict(), []) for seed in (7, 0, 2, 1, 1, 8)])
    '0 to 2, 7, 8'
    """
    seeds = sorted({run.settings["seed"] for run in runs})
    starts = [seed for seed in seeds if seed - 1 not in seeds]
    ends = [seed for seed in seeds if seed + 1 not in seeds]
    links = {0: "{0}", 1: "{0}, {1}"}  # by the distance of the ends
    return ", ".join(links.get(b - a, "{0} to {1}").format(a, b) for a, b in zip(starts, ends, strict=True))
