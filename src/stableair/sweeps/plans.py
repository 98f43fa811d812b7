"""Plans: settings of an experiment, each with one value or a list. Every combination of values is an experiment.

A plan may also have the keys `preset`, `seeds` (the number of seeds, starting at `seed`) and `runs`, a list of tables.
Each of these tables is a plan that inherits the settings above it.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from stableair.errors import InputError
from stableair.experiment import (
    EXECUTION,
    PRESETS,
    Experiment,
    check_known,
    last_of_each,
    parse_overrides,
    preset,
    takes_argument,
)
from stableair.experiment.records import flatten, read_text
from stableair.objects import as_settings, is_object
from stableair.spec import OBJECT, OBJECT_SETTINGS, PassedObject, literal
from stableair.validation import integer, short_repr, suggest

Plan = Mapping[str, Any]
PLAN_KEYS = "preset", "seeds", "runs"  # the keys of a plan that are not settings
MAX_EXPERIMENTS = 10_000  # largest number of experiments of a plan


def over_seeds(experiment: Experiment, count: int) -> list[Experiment]:
    """Return `count` copies of an experiment, with the seeds seed, seed + 1, ...

    Args:
        experiment: The experiment with the first seed.
        count: Number of copies, at least 1.

    >>> [one.seed for one in over_seeds(Experiment(seed=3), 2)]
    [3, 4]
    """
    return [experiment.with_(seed=experiment.seed + i) for i in range(integer("seeds", count, 1))]


def expand_plan(plan: "Plan | str | Path | Iterable[Experiment]") -> list[Experiment]:
    """Return the experiments of a plan, each once.

    Args:
        plan: Settings, each with one value or a list; a .toml file with such settings; or a list of experiments.

    Raises:
        InputError: The plan is invalid, empty (`empty-plan`) or too large (`plan-too-large`).

    >>> [one.noise for one in expand_plan({"clients": 9, "noise": ["none()", "gaussian(std=1)"]})]
    ['none()', 'gaussian(std=1)']
    """
    if isinstance(plan, str | Path):
        plan = read_plan(plan)
    if isinstance(plan, Mapping):
        return _without_repeats(_experiments(plan))
    experiments = list(plan) if isinstance(plan, Iterable) else [plan]
    if wrong := [one for one in experiments if not isinstance(one, Experiment)]:
        text = f"a plan must be a table of settings, its file, or a list of experiments: got {short_repr(wrong[0])}"
        raise InputError(text, code="wrong-type", name="plan", value=wrong[0])
    if not experiments:
        raise InputError("the plan is empty: add an experiment", code="empty-plan")
    return _without_repeats(experiments)


def replace_objects(plan: "Plan | str | Path | Iterable[Experiment]") -> tuple[Any, dict[str, PassedObject]]:
    """Replace the Python objects in a plan by their specs.

    Args:
        plan: As for `expand_plan`; `data`, `model`, `receiver` and `server` may be Python objects or lists of them.

    Returns:
        The plan, and the objects by digest, for `spec.passed_objects`.
    """
    objects: dict[str, PassedObject] = {}
    if not isinstance(plan, Mapping):
        return plan, objects

    def spec_of(name: str, value: Any) -> Any:
        if type(value) in (list, tuple):  # a Dataset is a tuple too
            return [spec_of(name, one) for one in value]
        if name == "runs" and isinstance(value, Mapping):
            table, passed = replace_objects(value)
            objects.update(passed)
            return table
        if name not in OBJECT_SETTINGS or not is_object(value):
            return value
        settings, passed = as_settings(**{name: value})
        objects.update(passed)
        return settings[name]

    return {name: spec_of(name, value) for name, value in plan.items()}, objects


def with_objects(experiments: list[Experiment], **objects: Any) -> tuple[list[Experiment], dict[str, PassedObject]]:
    """Use the same Python objects in all experiments.

    Args:
        experiments: The experiments.
        **objects: As for `as_settings`.

    Returns:
        The experiments, and the objects by digest, for `spec.passed_objects`.

    Raises:
        InputError: An object cannot be used for its setting, or the setting varies among the experiments
            (`object-and-plan`).
    """
    settings, passed = as_settings(**objects)
    for name in settings:
        if len(values := {getattr(one, name) for one in experiments}) > 1:
            text = f"the plan has {len(values)} values of {name}, but the argument {name} would replace all of them"
            raise InputError(text, code="object-and-plan", name=name, advice="write the object into the plan")
    return [one.with_(**settings) for one in experiments] if settings else experiments, passed


def check_no_objects(experiments: Iterable[Experiment]) -> None:
    """Refuse experiments with Python objects: other processes do not have these objects.

    Raises:
        InputError: An experiment has a Python object (`object-needs-process`).
    """
    for one in experiments:
        for name in OBJECT_SETTINGS:
            if any(call.name == OBJECT for call in one.calls(name)):
                text = f"{name} is a Python object, which exists in this process only"
                advice = "use parallel=1, or register the component in a plug-in file and load it with sa.load_plugin"
                raise InputError(text, code="object-needs-process", name=name, advice=advice)


def _without_repeats(experiments: list[Experiment]) -> list[Experiment]:
    """Return each experiment once; `mac(C=1)` and `mac(C=1, gain=none)` are the same experiment.

    Raises:
        InputError: Two experiments differ only in execution settings (`planned-twice`): they would have the same
            folder.
    """
    by_name: dict[str, Experiment] = {}
    for one in experiments:
        first = by_name.setdefault(one.name, one)
        if different := [key for key in EXECUTION if getattr(first, key) != getattr(one, key)]:
            values = " and ".join(f"{key}={getattr(each, key)}" for key in different for each in (first, one))
            text = f"{one.name} is planned twice, with {values}: choose one"
            raise InputError(text, code="planned-twice", experiment=one.name, different=different)
    return list(by_name.values())


def _experiments(plan: Plan) -> list[Experiment]:
    settings = _flatten(plan)
    tables = settings.pop("runs", None)
    if tables is not None:
        if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
            text = "runs must be tables of settings, each under a line [[runs]]"
            raise InputError(text, code="wrong-type", name="runs", value=tables)
        return [one for table in tables for one in _experiments(settings | _flatten(table))]
    name, seeds = settings.pop("preset", None), settings.pop("seeds", 1)
    base = Experiment() if name is None else preset(name)
    axes = _axes(settings)
    size = math.prod(map(len, axes.values())) * integer("seeds", seeds, 1)
    if size > MAX_EXPERIMENTS:
        text = f"the plan has {size:,} experiments: at most {MAX_EXPERIMENTS:,} are allowed"
        raise InputError(text, code="plan-too-large", size=size, high=MAX_EXPERIMENTS)
    points = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [one for point in points for one in over_seeds(base.with_(**_applicable(point, axes)), seeds)]


def _applicable(point: dict[str, Any], axes: dict[str, list[Any]]) -> dict[str, Any]:
    """Return a combination of values without the arguments that its components do not accept.

    In receiver=mac,none receiver.C=1, only mac gets the threshold.
    """

    def is_for_others(key: str) -> bool:
        setting, dot, argument = key.partition(".")
        components = axes.get(setting, []) if dot else []
        accepting = [one for one in components if takes_argument(setting, one, argument)]
        return bool(accepting) and point[setting] not in accepting

    return {key: value for key, value in point.items() if not is_for_others(key)}


def _flatten(plan: Plan) -> dict[str, Any]:
    """Check the keys of a plan, and return it with dotted keys."""
    for key, value in plan.items():
        if not isinstance(key, str):
            raise InputError(
                f"the key of a setting must be a text: got {short_repr(key)}", code="wrong-type", value=key
            )
        check_known({key.partition(".")[0]: value}, *PLAN_KEYS)
    return flatten(plan, *PLAN_KEYS)


def _axes(settings: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each setting as a list."""
    axes = {key: list(value) if isinstance(value, list | tuple) else [value] for key, value in settings.items()}
    for key, values in axes.items():
        if not values:
            raise InputError(f"{key} is an empty list: add a value or leave {key} out", code="empty-list", name=key)
        if key in EXECUTION and len(values) > 1:
            text = f"{key} cannot vary: it does not change the experiment, only its computation; set one value"
            raise InputError(text, code="execution-varies", name=key)
    return axes


def read_plan(path: str | Path) -> dict[str, Any]:
    """Read a plan from a .toml file.

    Raises:
        InputError: The file cannot be read (`unreadable-file`) or is not TOML (`not-toml`).
    """
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}", code="not-toml", path=path) from None


def parse_plan(words: list[str], alternative: str = "") -> dict[str, Any]:
    """Parse the words of a command line: optionally a preset or the file of a plan, then `key=value,...`

    Args:
        words: The words.
        alternative: Another kind of first word that the command accepts, for the error message.

    Raises:
        InputError: The first word is neither a preset nor a file (`unknown-preset`), or a setting is invalid.

    >>> parse_plan(["digits", "receiver=mac(C=1),gnc(10)", "noise.tau=0.1,0.5", "rounds=3"])
    {'preset': 'digits', 'receiver': ['mac(C=1)', 'gnc(10)'], 'noise.tau': [0.1, 0.5], 'rounds': 3}
    """
    plan: dict[str, Any] = {}
    if words and "=" not in words[0]:
        first, *words = words
        if first in PRESETS:
            plan["preset"] = first
        elif Path(first).suffix == ".toml" or Path(first).is_file():
            plan = _flatten(read_plan(first))
        else:
            kinds = ", ".join(filter(None, ("a preset", "the file of a plan", alternative)))
            text = f"{first!r} is neither {kinds} nor key=value; {suggest(first, PRESETS)}"
            raise InputError(text, code="unknown-preset", value=first, allowed=list(PRESETS))
    for word in last_of_each(words):
        key, equals, text = word.partition("=")
        if key == "seeds":
            plan[key] = literal(text)
            continue
        values = [parse_overrides([key + equals + value])[key] for value in _split_values(text)]
        plan[key] = values[0] if len(values) == 1 else values
    return plan


def _split_values(text: str) -> list[str]:
    """Split a text at its commas, except at commas within brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
