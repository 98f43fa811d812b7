"""A plan: the settings of an experiment, of which any may be a list. Every combination is an experiment of its own.

Beside settings a plan may have `preset`, `seeds` (how many, counted from `seed`) and `runs`, a list of tables: each is
a plan on top of what stands above it.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from stableair.checks import InputError, choice, nearest, shown, whole
from stableair.experiment import EXECUTION, PRESETS, Experiment, check_known, settings_of
from stableair.spec import literal

Plan = Mapping[str, Any]
BESIDE = "preset", "seeds", "runs"  # what a plan may have beside settings
MOST = 10_000  # experiments; a plan of more is a slip


def over_seeds(experiment: Experiment, count: int) -> list[Experiment]:
    """The experiment with the seeds seed, seed + 1, ..., so many of them.

    >>> [one.seed for one in over_seeds(Experiment(seed=3), 2)]
    [3, 4]
    """
    return [experiment.with_(seed=experiment.seed + i) for i in range(whole("seeds", count, 1))]


def planned(plan: "Plan | str | Path | Iterable[Experiment]") -> list[Experiment]:
    """The experiments of a plan, of a plan's file, or those that are given; each once.

    >>> [one.noise for one in planned({"clients": 9, "noise": ["none()", "gaussian(std=1)"]})]
    ['none()', 'gaussian(std=1)']
    """
    if isinstance(plan, str | Path):
        plan = read_plan(plan)
    if isinstance(plan, Mapping):
        return _once(_experiments(plan))
    given = list(plan) if isinstance(plan, Iterable) else [plan]
    if wrong := [one for one in given if not isinstance(one, Experiment)]:
        raise InputError(f"a plan is a table of settings, its file, or a list of experiments: got {shown(wrong[0])}")
    if not given:
        raise InputError("the plan is empty: it has no experiment")
    return _once(given)


def _once(experiments: list[Experiment]) -> list[Experiment]:
    """Each experiment once; the same one for more rounds, or on another device, would share its folder."""
    found: dict[str, Experiment] = {}
    for one in experiments:
        if found.setdefault(one.name, one) != one:
            raise InputError(f"{one.name} is planned twice, with another {' or '.join(EXECUTION)}: choose one")
    return list(found.values())


def _experiments(plan: Plan) -> list[Experiment]:
    settings = _flat(plan)
    parts = settings.pop("runs", None)
    if parts is not None:
        if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
            raise InputError("runs must be tables of settings, each under a line [[runs]]")
        return [one for part in parts for one in _experiments(settings | _flat(part))]
    preset, seeds = settings.pop("preset", None), settings.pop("seeds", 1)
    base = Experiment() if preset is None else Experiment(**PRESETS[choice("preset", preset, PRESETS)])
    axes = _axes(settings)
    size = math.prod(map(len, axes.values())) * whole("seeds", seeds, 1)
    if size > MOST:
        raise InputError(f"the plan has {size:,} experiments: at most {MOST:,} fit into one")
    points = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [one for point in points for one in over_seeds(base.with_(**point), seeds)]


def _flat(plan: Plan) -> dict[str, Any]:
    """noise.tau = 0.3 in TOML is a table of its own."""
    flat: dict[str, Any] = {}
    for key, value in plan.items():
        if not isinstance(key, str):
            raise InputError(f"a setting of a plan has a name: got {shown(key)}")
        check_known({key.partition(".")[0]: value}, *BESIDE)
        within = isinstance(value, dict) and key not in BESIDE
        flat |= {f"{key}.{k}": v for k, v in value.items()} if within else {key: value}
    return flat


def _axes(settings: dict[str, Any]) -> dict[str, list[Any]]:
    """The values of each setting, one where it is no list."""
    axes = {key: list(value) if isinstance(value, list | tuple) else [value] for key, value in settings.items()}
    for key, values in axes.items():
        if not values:
            raise InputError(f"{key} is an empty list: give it a value or leave it out")
        if key in EXECUTION and len(values) > 1:
            raise InputError(f"{key} cannot vary: it says how a run is computed, not what it is; give one value")
    return axes


def read_plan(path: str | Path) -> dict[str, Any]:
    """A plan from its .toml file."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None


def plan_of_words(words: list[str], other: str = "") -> dict[str, Any]:
    """The plan that words of a command line stand for: a preset or a plan's file first, then key=value,value,...

    `other` is what else the first word might have been.

    >>> plan_of_words(["digits", "receiver=mac(C=1),gnc(10)", "noise.tau=0.1,0.5", "rounds=3"])
    {'preset': 'digits', 'receiver': ['mac(C=1)', 'gnc(10)'], 'noise.tau': [0.1, 0.5], 'rounds': 3}
    """
    plan: dict[str, Any] = {}
    if words and "=" not in words[0]:
        first, *words = words
        if first in PRESETS:
            plan["preset"] = first
        elif Path(first).suffix == ".toml" or Path(first).is_file():
            plan = _flat(read_plan(first))
        else:
            kinds = ", ".join(filter(None, ("a preset", "a plan's file", other)))
            raise InputError(f"{first!r} is neither {kinds} nor key=value; {nearest(first, PRESETS)}")
    keys = [word.partition("=")[0] for word in words]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise InputError(f"{repeated[0]} is given twice")
    for word in words:
        key, equals, text = word.partition("=")
        if key == "seeds":
            plan[key] = literal(text)
            continue
        values = [settings_of([key + equals + value])[key] for value in _values(text)]
        plan[key] = values[0] if len(values) == 1 else values
    return plan


def _values(text: str) -> list[str]:
    """The parts of a text between commas, leaving alone those within brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
