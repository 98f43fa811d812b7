"""The arguments of recorded runs, named as on the command line: `receiver.C`, `noise.tau`, `seed`.

The value of a component setting, such as `receiver`, is the name of its component. Each argument of the component is a
separate entry, such as `receiver.C`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from stableair.errors import InputError
from stableair.experiment import COMPONENT_SETTINGS, EXECUTION, TYPES, components_of_record
from stableair.results.grouping import group
from stableair.results.resources import RESOURCES
from stableair.results.run import FLOWER_KEYS, Run
from stableair.results.short_specs import short_settings
from stableair.spec import OBJECT, format_call, format_value
from stableair.validation import suggest

Arguments = dict[str, Any]  # numbers and strings by name
Groups = dict[str, list[Run]]  # runs that differ only in the seed, by label


def arguments(run: Run) -> Arguments:
    """Return all arguments of a run except the execution settings; the seed is last.

    If several receivers of a chain have the same argument with different values, the values are joined: "1 | 2".
    """
    components = components_of_record(run.record)
    result: Arguments = {}
    for setting in TYPES:
        if setting in COMPONENT_SETTINGS:
            result[setting] = " | ".join(_title(name, values) for name, values in components[setting]) or "auto"
            by_name: dict[str, list[Any]] = {}
            for _, values in components[setting]:
                for name, value in values.items():
                    by_name.setdefault(f"{setting}.{name}", []).append(_plain(value))
            result |= {
                name: each[0] if len(set(each)) == 1 else " | ".join(map(str, each)) for name, each in by_name.items()
            }
        elif setting not in (*EXECUTION, "seed"):
            result[setting] = run.settings[setting]
    return result | run.flower | {"seed": run.settings["seed"]}


def _title(component: str, values: dict[str, Any]) -> str:
    """Return the name of a component, or of the Python object that replaces it."""
    return values["name"] if component == OBJECT else component


def differing(runs: Iterable[Run]) -> list[str]:
    """Return the names of the arguments whose values differ between runs; the seed is last.

    Runs without an argument are ignored for this argument.
    """
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in arguments(run).items():
            values.setdefault(name, set()).add(format_value(value))
    order = [*TYPES, *FLOWER_KEYS]
    names = sorted(values, key=lambda name: (name == "seed", order.index(name.partition(".")[0])))  # a stable sort
    return [name for name in names if len(values[name]) > 1]


def ordered(runs: list[Run]) -> list[Run]:
    """Sort runs by the arguments that differ: first numbers by value, then strings in the order of appearance."""
    all_arguments = [arguments(run) for run in runs]
    appearance = {name: list(dict.fromkeys(each.get(name) for each in all_arguments)) for name in differing(runs)}

    def key(i: int) -> list[tuple[int, Any]]:
        values = [(all_arguments[i].get(name), strings) for name, strings in appearance.items()]
        return [(0, value) if is_number(value) else (1, strings.index(value)) for value, strings in values]

    return [runs[i] for i in sorted(range(len(runs)), key=key)]


def in_order(groups: Groups) -> Groups:
    """Sort groups in the order in which `ordered` sorts runs."""
    labels = {id(runs[0]): label for label, runs in groups.items()}
    return {labels[id(run)]: groups[labels[id(run)]] for run in ordered([runs[0] for runs in groups.values()])}


class Lines(NamedTuple):
    """Runs by the value of one argument."""

    lines: dict[str, dict[Any, list[Run]]]  # by label, then by value in ascending order
    references: Groups  # runs without a number where other runs have one, such as `none()` or C=auto


def by_argument(runs: list[Run], name: str) -> Lines:
    """Group runs by the value of an argument, with one line per combination of the other arguments.

    The seed does not separate lines. The value of a component setting is its spec, such as "mac(C=1)", without
    arguments that have their default in all runs.

    Raises:
        InputError: The argument is unknown, or has the same value in all runs (`unknown-x`).
    """
    is_component = name in COMPONENT_SETTINGS
    runs = ordered(runs)
    values = (
        [each[name] for each in short_settings(runs)] if is_component else [arguments(run).get(name) for run in runs]
    )
    pairs = list(zip(runs, values, strict=True))
    totals = [resource for resource in RESOURCES if any(run.has(resource) for run in runs)]
    _check_differs(name, [value for _, value in pairs], ["round", *totals, *differing(runs)])
    numeric = any(is_number(value) for _, value in pairs)
    has_position = is_number if numeric else (lambda value: value is not None)
    on_line = [(run, value) for run, value in pairs if has_position(value)]
    references = [run for run, value in pairs if not has_position(value)]
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
    """Refuse an argument that has fewer than two different values."""
    if len({format_value(value) for value in values if value is not None}) < 2:
        constant = next((value for value in values if value is not None), None)
        problem = f"no run has an argument {name!r}" if constant is None else f"{name} is {constant} in all runs"
        raise InputError(f"x: {problem}; {suggest(name, allowed)}", code="unknown-x", name=name, allowed=allowed)


def only_numeric_argument(groups: Groups, *ignored: str) -> str | None:
    """Return the name of the only number that differs between groups; None if there is no such argument, or several.

    Component settings, the seed and the names in `ignored` may differ, too.
    """
    ignored = *COMPONENT_SETTINGS, "seed", *ignored
    names = [name for name in differing(runs[0] for runs in groups.values()) if name not in ignored]
    values = [arguments(runs[0]).get(names[0]) for runs in groups.values()] if len(names) == 1 else []
    return names[0] if len(set(filter(is_number, values))) > 1 else None


def is_number(value: object) -> bool:
    """Return whether a value is a number, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    return value if is_number(value) or isinstance(value, str) else format_value(value)


def _label(run: Run, names: list[str]) -> str:
    """Return some arguments of a run as a label, such as "mac(C=1), clients=5"."""
    values, words = arguments(run), []
    for setting in dict.fromkeys(name.partition(".")[0] for name in names):
        if setting in COMPONENT_SETTINGS:
            shown = {
                name.partition(".")[2]: values[name]
                for name in names
                if name.startswith(f"{setting}.") and name in values
            }
            words.append(format_call(values[setting], shown) if shown else values[setting])
        else:
            words.append(f"{setting}={values[setting]}")
    return ", ".join(words)
