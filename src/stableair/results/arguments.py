"""The arguments of recorded runs by the names that the command line uses: `receiver.C`, `noise.tau`, `seed`.

A component setting such as `receiver` has the name of its component as value, and an entry for each argument of it.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from stableair.errors import InputError
from stableair.experiment import COMPONENT_SETTINGS, EXECUTION, TYPES, components_of_record
from stableair.results.grouping import group
from stableair.results.resources import RESOURCES
from stableair.results.run import Run
from stableair.spec import OBJECT, format_call, format_value
from stableair.validation import suggest

Arguments = dict[str, Any]  # numbers and texts by name
Groups = dict[str, list[Run]]  # runs that differ only in the seed, by label


def arguments(run: Run) -> Arguments:
    """All arguments of a run, without execution settings; the seed is last.

    An argument that several receivers of a chain have is one value, or a text such as "1 | 2" if they differ.
    """
    components = components_of_record(run.record)
    result: Arguments = {}
    for setting in TYPES:
        if setting in COMPONENT_SETTINGS:
            result[setting] = " | ".join(_title(name, given) for name, given in components[setting]) or "auto"
            values: dict[str, list[Any]] = {}
            for _, given in components[setting]:
                for name, value in given.items():
                    values.setdefault(f"{setting}.{name}", []).append(_plain(value))
            result |= {
                name: one[0] if len(set(one)) == 1 else " | ".join(map(str, one)) for name, one in values.items()
            }
        elif setting not in (*EXECUTION, "seed"):
            result[setting] = run.settings[setting]
    return result | {"seed": run.settings["seed"]}


def _title(component: str, given: dict[str, Any]) -> str:
    """The name of a component, or the name of a Python object."""
    return given["name"] if component == OBJECT else component


def differing(runs: Iterable[Run]) -> list[str]:
    """Names of the arguments that have several values among the runs that have them; the seed is last."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in arguments(run).items():
            values.setdefault(name, set()).add(format_value(value))
    order = [*TYPES]
    names = sorted(values, key=lambda name: (name == "seed", order.index(name.partition(".")[0])))  # stable
    return [name for name in names if len(values[name]) > 1]


def ordered(runs: list[Run]) -> list[Run]:
    """Sort runs by the arguments that differ: numbers by value, then texts in the order of their appearance."""
    every = [arguments(run) for run in runs]
    appearance = {name: list(dict.fromkeys(one.get(name) for one in every)) for name in differing(runs)}

    def key(i: int) -> list[tuple[int, Any]]:
        values = [(every[i].get(name), texts) for name, texts in appearance.items()]
        return [(0, value) if is_number(value) else (1, texts.index(value)) for value, texts in values]

    return [runs[i] for i in sorted(range(len(runs)), key=key)]


def in_order(groups: Groups) -> Groups:
    """Sort groups as `ordered` sorts runs."""
    labels = {id(runs[0]): label for label, runs in groups.items()}
    return {labels[id(run)]: groups[labels[id(run)]] for run in ordered([runs[0] for runs in groups.values()])}


class Lines(NamedTuple):
    """Runs by the value of one argument."""

    lines: dict[str, dict[Any, list[Run]]]  # by label, then by value in ascending order
    references: Groups  # runs without a number for an argument that is a number elsewhere, such as `none()` or C=auto


def by_argument(runs: list[Run], name: str) -> Lines:
    """Group runs by the value of an argument, one line for each combination of the other arguments but the seed.

    The value of a component setting is its whole spec, such as "mac(C=1)".

    Raises:
        InputError: The argument is unknown or has one value only (`unknown-x`).
    """
    is_component = name in COMPONENT_SETTINGS
    valued = [(run, run.settings[name] if is_component else arguments(run).get(name)) for run in ordered(runs)]
    _check_differs(name, [value for _, value in valued], differing(runs))
    numeric = any(is_number(value) for _, value in valued)
    has_position = is_number if numeric else (lambda value: value is not None)
    on_line = [(run, value) for run, value in valued if has_position(value)]
    references = [run for run, value in valued if not has_position(value)]
    keys = [key for key in differing(run for run, _ in on_line) if key not in (name, "seed")]
    if is_component:
        keys = [key for key in keys if not key.startswith(f"{name}.")]
    lines: dict[str, dict[Any, list[Run]]] = {}
    for run, value in on_line:
        label = _label(run, keys) or ("mean" if name == "receiver" else arguments(run)["receiver"])
        lines.setdefault(label, {}).setdefault(value, []).append(run)
    if numeric:
        lines = {label: dict(sorted(line.items())) for label, line in lines.items()}
    return Lines(lines, group(references))


def _check_differs(name: str, values: list[Any], allowed: list[str]) -> None:
    """Refuse an argument that does not have several values."""
    if len({format_value(value) for value in values if value is not None}) < 2:
        constant = next((value for value in values if value is not None), None)
        problem = f"no run has an argument {name!r}" if constant is None else f"{name} is {constant} in all runs"
        allowed = ["round", *RESOURCES, *allowed]
        raise InputError(f"x: {problem}; {suggest(name, allowed)}", code="unknown-x", name=name, allowed=allowed)


def only_numeric_argument(groups: Groups, *ignored: str) -> str | None:
    """The argument that differs between groups, if it is the only one and a number; components may differ too."""
    ignored = *COMPONENT_SETTINGS, "seed", *ignored
    names = [name for name in differing(runs[0] for runs in groups.values()) if name not in ignored]
    values = [arguments(runs[0]).get(names[0]) for runs in groups.values()] if len(names) == 1 else []
    return names[0] if len(set(filter(is_number, values))) > 1 else None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    return value if is_number(value) or isinstance(value, str) else format_value(value)


def _label(run: Run, names: list[str]) -> str:
    """The arguments of a run among `names`, such as "mac(C=1), clients=5"."""
    values, words = arguments(run), []
    for setting in dict.fromkeys(name.partition(".")[0] for name in names):
        if setting in COMPONENT_SETTINGS:
            own = {
                name.partition(".")[2]: values[name]
                for name in names
                if name.startswith(f"{setting}.") and name in values
            }
            words.append(format_call(values[setting], own) if own else values[setting])
        else:
            words.append(f"{setting}={values[setting]}")
    return ", ".join(words)
