"""Records of experiments: ids, JSON and TOML, and the records that run folders and published runs keep.

A record holds every setting, and under "arguments" every argument of every component, defaults included. It still
describes the same experiment if a default changes later. Records of older versions lack the settings of later versions.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from stableair.errors import InputError, StableairError
from stableair.experiment.baseline import BASELINE_ARGUMENTS, BASELINE_SETTINGS
from stableair.experiment.settings import COMPONENT_SETTINGS, EXECUTION, TYPES, check_known, registry
from stableair.spec import Call, Registry, canonical, equal, format_call, format_value, parse_unchecked
from stableair.validation import as_path, short_repr

ARGUMENTS = "arguments"  # key of a record: every argument of every component
OPTIONAL = (  # settings that the oldest records lack
    "participation", "power", "channel", "average", "snr_blocks",
    "local", "lr_decay", "label_smoothing", "evaluate_clients", "bandwidth", "symbol_energy",
)  # fmt: skip
NOISE_ON = "noise_on", "mean"  # version 0.1.0 recorded the default of flat(noise_on=...) as a separate setting

Arguments = dict[str, Any]
Components = list[tuple[str, Arguments]]  # the names and arguments of "a(x=1) | b(y=2)"
Calls = Mapping[str, tuple[Call, ...]]  # the parsed components of each component setting


# ----------------------------------------------------------------------------------------------------------------- ids


def experiment_id(settings: dict[str, Any], calls: Calls) -> str:
    """Return twelve hexadecimal digits that identify an experiment.

    The id hashes the differences to the frozen baseline. The id does not depend on a new setting or
    argument that has the value of the earlier behaviour. A changed default changes ids. Execution settings are ignored.
    """
    plain = {key: value for key, value in settings.items() if key not in (*EXECUTION, *COMPONENT_SETTINGS)}
    different: dict[str, Any] = {key: v for key, v in plain.items() if not equal(v, BASELINE_SETTINGS.get(key))}
    for name in COMPONENT_SETTINGS:
        components = [(call.name, call.full().arguments) for call in calls[name]]
        if (hashed := _beyond_baseline(name, components)) != _beyond_baseline(name, _baseline_components(name)):
            different[name] = hashed
    return hashlib.blake2b(json.dumps(different, sort_keys=True).encode(), digest_size=6).hexdigest()


@cache
def _baseline_components(name: str) -> Components:
    return _components(name, BASELINE_SETTINGS[name])


def _beyond_baseline(name: str, components: Components) -> list[Any]:
    """Return components with their arguments that differ from the baseline, also in nested specs."""
    result = []
    for component, arguments in components:
        baseline = BASELINE_ARGUMENTS.get(name, {}).get(component, {})
        specs = registry(name).entry(component).specs
        values, defaults = ({k: _hashed(v, specs.get(k)) for k, v in each.items()} for each in (arguments, baseline))
        different = {key: value for key, value in values.items() if key not in defaults or value != defaults[key]}
        result.append([component, dict(sorted(different.items()))])
    return result


def _hashed(value: Any, nested: Registry | None) -> Any:
    """Return the form of an argument in the hash: its text, or for a nested spec its differences to the baseline."""
    if nested is None:
        return format_value(value)
    call = nested.one(value)
    return _beyond_baseline(call.kind, [(call.name, call.full().arguments)])


# ------------------------------------------------------------------------------------------------------------- records


def to_record(settings: dict[str, Any], calls: Calls) -> dict[str, Any]:
    """Return the record of an experiment: its settings, and all arguments of every component."""
    arguments = {name: [_to_json(call.full().arguments) for call in calls[name]] for name in COMPONENT_SETTINGS}
    return settings | {ARGUMENTS: arguments}


def from_record(record: Any) -> dict[str, Any]:
    """Return the settings of the experiment that a record describes.

    Arguments whose default has changed since are written out; the text of all other arguments stays the same.

    Raises:
        InputError: The record is not a dict (`wrong-type`), or contradicts itself (`contradictory-record`).
    """
    if not isinstance(record, dict):
        raise InputError(
            f"a record must be a dict of settings: got {short_repr(record)}", code="wrong-type", value=record
        )
    settings = settings_of_record(record)
    specs = {}
    for name, components in components_of_record(record).items():
        calls = []
        for (component, arguments), (_, explicit) in zip(components, _components(name, settings[name]), strict=True):
            call = registry(name).one(format_call(component, arguments))
            calls.append(call.without_defaults([key for key in arguments if key not in explicit]))
        specs[name] = " | ".join(map(str, calls)) or "auto"
    return settings | specs


def settings_of_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a record by name; missing settings have their baseline value.

    The specs have the form in which `Experiment` writes them: earlier versions recorded both `none` and `none()`.

    Raises:
        InputError: A setting is missing (`missing-setting`), unknown (`unknown-setting`), of another type
            (`wrong-type`) or not a spec (`not-a-spec`).
    """
    record = {key: value for key, value in record.items() if (key, value) != NOISE_ON and key != ARGUMENTS}
    if missing := [key for key in TYPES if key not in (*OPTIONAL, *record)]:
        raise InputError(f"missing settings: {', '.join(missing)}", code="missing-setting", names=missing)
    check_known(record)
    for key, value in record.items():
        if type(value) is not TYPES[key] and (type(value), TYPES[key]) != (int, float):
            text = f"{key} must be of type {TYPES[key].__name__}: got {short_repr(value)}"
            raise InputError(text, code="wrong-type", name=key, value=value)
    settings = BASELINE_SETTINGS | record
    specs = {name: canonical(name, settings[name]) for name in COMPONENT_SETTINGS if settings[name] != "auto"}
    return settings | specs


def components_of_record(record: dict[str, Any]) -> dict[str, Components]:
    """Return the components of a record by setting, with all their arguments.

    Missing arguments have their baseline value.

    Raises:
        InputError: The recorded arguments contradict the settings (`contradictory-record`).
    """
    settings = settings_of_record(record)
    recorded = record.get(ARGUMENTS, {})
    result: dict[str, Components] = {}
    for name in COMPONENT_SETTINGS:
        components = _components(name, settings[name])
        arguments = (recorded.get(name) if isinstance(recorded, dict) else [None]) or [{} for _ in components]
        fits = isinstance(arguments, list) and len(arguments) == len(components)
        if not fits or not all(isinstance(one, dict) for one in arguments):
            raise _contradiction(name, settings)
        result[name] = []
        for (component, explicit), one in zip(components, map(_from_json, arguments), strict=True):
            if any(key in one and not equal(one[key], value) for key, value in explicit.items()):
                raise _contradiction(name, settings)
            baseline = BASELINE_ARGUMENTS.get(name, {}).get(component, {})
            result[name].append((component, baseline | one | explicit))
    return result


def _contradiction(name: str, settings: dict[str, Any]) -> InputError:
    text = f"the recorded {ARGUMENTS} contradict {name}={settings[name]}"
    return InputError(text, code="contradictory-record", name=name, value=settings[name])


def _components(name: str, text: str) -> Components:
    """Parse the components of a setting, with the arguments in its text."""
    return [] if text == "auto" else parse_unchecked(name, text)


def _to_json(arguments: Arguments) -> Arguments:
    """Convert arguments to values that JSON can represent: infinity becomes {"float": "inf"}."""
    special = {k: v for k, v in arguments.items() if isinstance(v, float) and not math.isfinite(v)}
    return arguments | {key: {"float": str(value)} for key, value in special.items()}


def _from_json(arguments: Arguments) -> Arguments:
    """Invert `_to_json`; JSON lists become tuples."""

    def convert(value: Any) -> Any:
        if isinstance(value, dict) and value.get("float") in ("inf", "-inf", "nan"):
            return float(value["float"])
        return tuple(value) if isinstance(value, list) else value

    return {key: convert(value) for key, value in arguments.items()}


# ------------------------------------------------------------------------------------------------------- JSON and TOML


def to_json(settings: dict[str, Any]) -> str:
    """Write settings as JSON."""
    return json.dumps(settings, indent=2) + "\n"


def to_toml(settings: dict[str, Any]) -> str:
    """Write settings as TOML; a single value has the same text in TOML and in JSON."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def parse_json(text: Any) -> dict[str, Any]:
    """Read settings, or a record, from JSON."""
    return _parse(text, lambda json_text: json.loads(json_text, object_pairs_hook=_without_duplicates), "JSON")


def parse_toml(text: Any) -> dict[str, Any]:
    """Read settings from TOML; `noise.tau = 0.3` gives the key "noise.tau"."""
    return _parse(text, tomllib.loads, "TOML")


def read_text(path: str | Path) -> str:
    """Read a file of settings in UTF-8, with or without a byte-order mark.

    Raises:
        InputError: The file cannot be read, or is not UTF-8 (`unreadable-file`).
    """
    path = as_path("path", path)
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise InputError(f"{path}: {reason}", code="unreadable-file", path=path) from None


def _parse(text: Any, loads: Callable[[str], Any], language: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise InputError(f"{language} must be a text: got {short_repr(text)}", code="wrong-type", value=text)
    code = "not-toml" if language == "TOML" else "not-json"
    try:
        settings = loads(text)
    except StableairError:
        raise
    except ValueError as error:
        raise InputError(f"not {language}: {error}", code=code) from None
    except RecursionError:
        raise InputError(f"not {language} of settings: nested too deeply", code=code) from None
    if not isinstance(settings, dict):
        text = f"not an experiment: {type(settings).__name__} instead of a table of settings"
        raise InputError(text, code="wrong-type", value=settings)
    if ARGUMENTS in settings:
        return from_record({key: value for key, value in settings.items() if key != "checksum"})
    return flatten(settings)


def flatten(table: Mapping[str, Any], *kept: str) -> dict[str, Any]:
    """Return a table with dotted keys: TOML reads `noise.tau = 0.3` as a table "noise".

    Args:
        table: The table.
        *kept: Keys whose tables stay unchanged.

    >>> flatten({"noise": {"tau": 0.3}, "rounds": 5})
    {'noise.tau': 0.3, 'rounds': 5}
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        is_nested = isinstance(value, dict) and key not in kept
        flat |= {f"{key}.{name}": one for name, one in value.items()} if is_nested else {key: value}
    return flat


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert the pairs of a JSON object to a dict; refuse a key that occurs twice."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise InputError(f"{key} is given twice", code="duplicate-setting", name=key)
        result[key] = value
    return result
