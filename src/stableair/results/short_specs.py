"""Specs for labels: without the arguments that have their default in all runs."""

from collections.abc import Iterator, Sequence
from typing import Any

from stableair.errors import InputError
from stableair.experiment import COMPONENT_SETTINGS, NESTED_COMPONENTS, components_of_record
from stableair.experiment.baseline import BASELINE_ARGUMENTS
from stableair.results.run import Run
from stableair.spec import equal, format_call, parse_unchecked

Components = list[tuple[str, dict[str, Any]]]  # the names and arguments of "a(x=1) | b(y=2)"
Path = tuple[str, ...]  # position of an argument, such as ("noise", "markov", "bad", "sas", "tau")


def short_settings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the settings of each run, with specs that omit uninformative arguments.

    An argument is omitted, also in a nested spec, if its value is the default in every run that has this component.

    Args:
        runs: The runs whose labels are shown together.

    Returns:
        The settings of each run by name.

    >>> import stableair as sa
    >>> markov = "markov(bad='sas(tau=2)', p=0.2, q=0.5)"
    >>> runs = [Run(sa.Experiment(noise=noise).to_record(), []) for noise in (markov, "sas(alpha=1.5, tau=0.3)")]
    >>> [settings["noise"] for settings in short_settings(runs)]
    ["markov(bad='sas(tau=2)', p=0.2)", 'sas(tau=0.3)']
    """
    informative = {
        path
        for run in runs
        for setting, components in components_of_record(run.record).items()
        for path in _differing_from_default(setting, components, (setting,))
    }
    return [
        run.settings | {name: _short(name, run.settings[name], informative, (name,)) for name in COMPONENT_SETTINGS}
        for run in runs
    ]


def _differing_from_default(kind: str, components: Components, path: Path) -> Iterator[Path]:
    """Yield the positions of the arguments that differ from their default."""
    for component, arguments in components:
        defaults = BASELINE_ARGUMENTS.get(kind, {}).get(component, {})
        for name, value in arguments.items():
            if name not in defaults or not equal(value, defaults[name]):
                here = (*path, component, name)
                yield here
                if nested := _nested_spec(kind, value):
                    yield from _differing_from_default(*nested, here)


def _short(kind: str, text: str, informative: set[Path], path: Path) -> str:
    """Return a spec with the informative arguments only."""
    if text == "auto":
        return text
    calls = []
    for component, arguments in parse_unchecked(kind, text):
        kept = {}
        for name, value in arguments.items():
            if (here := (*path, component, name)) in informative:
                nested = _nested_spec(kind, value)
                kept[name] = _short(nested[0], value, informative, here) if nested else value
        calls.append(format_call(component, kept))
    return " | ".join(calls)


def _nested_spec(kind: str, value: Any) -> tuple[str, Components] | None:
    """Return the kind and the components of an argument that is a spec of this package; None for other arguments."""
    if not isinstance(value, str) or "(" not in value:
        return None
    try:
        components = parse_unchecked(kind, value)
    except InputError:  # another text, such as the name of a file
        return None
    kinds = (kind, *NESTED_COMPONENTS)
    return next(((one, components) for one in kinds if components[0][0] in BASELINE_ARGUMENTS[one]), None)
