"""Plug-ins of a run: results of different versions of a plug-in are never mixed without a warning."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stableair.errors import InputError, RunBusyError
from stableair.experiment import COMPONENT_SETTINGS, Experiment
from stableair.literals import PluginChange
from stableair.results.checksums import ENVIRONMENT, read_environments, seal
from stableair.results.lock import LockedFolder, locked
from stableair.results.run import Run
from stableair.sources import UNKNOWN, Source
from stableair.spec import Call

log = logging.getLogger("stableair")

PLUGINS, KEPT = "plugins", "plugins_kept"  # keys of an environment
MIXED = "†"  # marks lines of tables with results of an earlier version of a plug-in
Environments = Sequence[dict[str, Any]]


def component_sources(experiment: Experiment) -> dict[str, dict[str, str]]:
    """Return file and version of each user-defined component: {"receiver soft": {"file": ..., "version": ...}}."""
    calls = [call for setting in COMPONENT_SETTINGS for call in experiment.calls(setting)]
    return {name: source._asdict() for call in calls for name, source in _sources(call)}


def _sources(call: Call) -> Iterator[tuple[str, Source]]:
    """Yield name and source of a user-defined component, and of the user-defined components in its arguments."""
    if call.entry.source:
        yield f"{call.kind} {call.name}", call.entry.source
    arguments = call.full().arguments
    for name, registry in call.entry.specs.items():
        if isinstance(arguments.get(name), str):
            yield from _sources(registry.one(arguments[name]))


def may_reuse(folder: Path, experiment: Experiment, environments: Environments, plugin_changed: PluginChange) -> bool:
    """Return whether the recorded rounds of a run may be used.

    Args:
        folder: The run folder.
        experiment: The experiment, with its components as they are now.
        environments: The recorded environments of the run.
        plugin_changed: What to do if a plug-in has changed since the last round: "refuse" raises an error, "keep" uses
            the recorded rounds, "recompute" discards them, even if an earlier call has kept them.

    Returns:
        True to use the recorded rounds; False to discard them.

    Raises:
        InputError: A plug-in has changed and `plugin_changed` is "refuse" (`plugin-changed`; fields file, component).
    """
    if plugin_changed == "recompute":
        return not any(_changed(experiment, [each | {KEPT: {}}]) for each in environments)
    changed = _changed(experiment, environments)
    if changed and plugin_changed == "keep":
        log.warning("%s: results of an earlier version of the %s are kept", folder, ", ".join(changed))
    if not changed or plugin_changed == "keep":
        return True
    component, source = next(iter(changed.items()))
    reason = f"{source['file']}, or a local module that it imports, has changed since"
    if source["version"].startswith(UNKNOWN):
        reason = f"its source code is not available ({source['file']}), so it may have changed"
    raise InputError(
        f"{folder} holds results of the {component}: {reason}", code="plugin-changed", hint="plugin",
        advice="plugin_changed='keep' uses these results, 'recompute' restarts the run",
        path=str(folder), file=source["file"], component=component,
    )  # fmt: skip


def record_kept(folder: LockedFolder, experiment: Experiment, environments: Environments) -> None:
    """Record in environment.json that results of another version of a plug-in are used, with both versions."""
    if _changed(experiment, environments):
        last = environments[-1] | {KEPT: component_sources(experiment)}
        folder.write(ENVIRONMENT, seal([*environments[:-1], last]))


def lock_and_record_kept(folder: Path, experiment: Experiment) -> None:
    """Call `record_kept` for a folder that this process has not locked.

    If another process has locked the folder, that process computes the run and records the versions.
    """
    if _changed(experiment, read_environments(folder)):
        with suppress(RunBusyError), locked(folder) as lock:
            record_kept(lock, experiment, read_environments(folder))


def mixed_components(runs: Iterable[Run]) -> list[str]:
    """Return the components for which the runs contain results of several versions."""
    versions: dict[str, set[Any]] = {}
    for environment in (environment for run in runs for environment in run.environments):
        for plugins in (environment.get(PLUGINS, {}), environment.get(KEPT, {})):
            for name in plugins:
                versions.setdefault(name, set()).add(_recorded_version(plugins, name))
    return [name for name, recorded in versions.items() if len(recorded) > 1]


def _changed(experiment: Experiment, environments: Environments) -> dict[str, dict[str, str]]:
    """Return name and source of the components whose code has changed since the last recorded round."""
    last = environments[-1] if environments else {}
    recorded = [last.get(key, {}) for key in (PLUGINS, KEPT)]
    return {
        name: source for name, source in component_sources(experiment).items()
        if environments and source["version"] not in [_recorded_version(each, name) for each in recorded]
    }  # fmt: skip


def _recorded_version(plugins: Any, name: str) -> Any:
    source = plugins.get(name) if isinstance(plugins, dict) else None
    return source.get("version") if isinstance(source, dict) else None
