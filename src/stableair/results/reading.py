"""Read recorded runs from folders."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stableair.errors import InputError, StableairError
from stableair.results.checksums import EXPERIMENT
from stableair.results.grouping import Sweep
from stableair.results.metrics import unknown_metric
from stableair.results.run import Run
from stableair.results.run_files import read_record, read_rounds
from stableair.validation import as_path, pluralize, short_repr

log = logging.getLogger("stableair")


def load(folder: str | Path) -> Run | Sweep:
    """Read a run folder, or all runs below a folder.

    Args:
        folder: A run folder, or a folder that contains run folders at any depth.

    Returns:
        The run of a run folder; for any other folder, a list of the runs below it. Copies of a run are listed once. A
        run that cannot be read is left out with a warning.

    Raises:
        InputError: The folder does not exist (`no-folder`), or contains no run (`no-run`).
        CorruptRunError: `folder` is a run folder, and one of its files is damaged.

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> experiment = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2)
    >>> with TemporaryDirectory() as folder:
    ...     run = sa.run(experiment, f"{folder}/mac")
    ...     print(len(sa.load(f"{folder}/mac")), sa.load(folder))
    2 Sweep(1 run, 1 configuration; best accuracy: mac(C=1) 0.9167)
    """
    folder = as_path("folder", folder)
    if (folder / EXPERIMENT).exists():
        return read_run(folder)
    runs, left_out = find([folder])
    log_left_out(left_out)
    return Sweep(runs)


def read_run(folder: str | Path) -> Run:
    """Read the run in a run folder.

    Raises:
        InputError: The folder contains no run (`no-run`).
        CorruptRunError: A file of the run is damaged.
    """
    folder = as_path("folder", folder)
    if not (folder / EXPERIMENT).exists():
        raise InputError(f"{folder} is not a run folder: it has no {EXPERIMENT}", code="no-run", folder=folder)
    run = Run(read_record(folder), read_rounds(folder), folder)
    _ = run.labels, run.environments  # read these files, too: damage is reported now
    return run


def find(folders: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """Read the runs in some folders and their subfolders.

    Args:
        folders: The folders.

    Returns:
        Each run once, the longest of several copies; and for each folder that was left out, a line with the reason.

    Raises:
        InputError: No run can be read (`no-run`).
    """
    run_folders: dict[Path, Path] = {}
    read, left_out = [], []
    for folder in folders:
        try:
            run_folders |= {path.resolve(): path for path in _run_folders(as_path("folder", folder))}
        except (InputError, OSError) as error:
            left_out.append(str(error))
    for path in run_folders.values():
        try:
            run = read_run(path)
            _ = run.identity  # an unreadable record fails here
            read.append(run)
        except Exception as error:  # the other runs are read nevertheless
            known = isinstance(error, StableairError)
            left_out.append(str(error) if known else f"{path}: {type(error).__name__}: {error}")
    runs, copies = _without_copies(read)
    left_out += copies
    if not runs:
        first = left_out[0] if left_out else "the list of folders is empty"
        text = first if len(left_out) < 2 else f"none of {len(left_out)} folders can be read; the first: {first}"
        raise InputError(text, code="no-run", left_out=left_out)
    return runs, left_out


def _without_copies(runs: Iterable[Run]) -> tuple[list[Run], list[str]]:
    """Keep the longest of several copies of a run; return also a line for each copy that was left out."""
    kept: dict[tuple[Any, ...], Run] = {}
    left_out = []
    for run in runs:
        twin = kept.get(run.identity)
        if twin and len(twin) >= len(run):
            run, twin = twin, run
        if twin and twin is not run:
            left_out.append(f"{twin.folder or twin}: the same run as {run.folder or run}")
        kept[run.identity] = run
    return list(kept.values()), left_out


def _run_folders(folder: Path) -> list[Path]:
    """Return the run folders among a folder and its subfolders.

    Raises:
        InputError: The folder does not exist (`no-folder`), or contains no run (`no-run`).
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder", code="no-folder", folder=folder)
    run_folders = sorted(path.parent for path in folder.rglob(EXPERIMENT))
    if not run_folders:
        text = f"{folder} contains no run: neither the folder nor a subfolder has a file {EXPERIMENT}"
        raise InputError(text, code="no-run", folder=folder)
    return run_folders


def runs_from(sources: "Run | str | Path | Iterable[Run | str | Path]") -> tuple[list[Run], list[str]]:
    """Collect runs from Run objects and from folders.

    Args:
        sources: Runs, run folders, or folders that contain run folders.

    Returns:
        Each run once, the longest of several copies; and for each folder or copy that was left out, a line with the
        reason.

    Raises:
        InputError: No folder contains a run (`no-run`), or a source is neither a run nor a path (`wrong-type`).
    """
    if isinstance(sources, Run | str | Path) or not isinstance(sources, Iterable):
        sources = [sources]
    items = list(sources)
    for source in items:
        if not isinstance(source, Run | str | Path):
            raise InputError(
                f"expected a Run or a folder of runs: got {short_repr(source)}", code="wrong-type", value=source
            )
    folders = [source for source in items if not isinstance(source, Run)]
    read, left_out = find(folders) if folders else ([], [])
    runs, copies = _without_copies([*(source for source in items if isinstance(source, Run)), *read])
    return runs, left_out + copies


def log_left_out(lines: Iterable[str]) -> None:
    """Log a warning for each run that was left out."""
    for line in lines:
        log.warning("left out: %s", line)


def on_one_split(runs: list[Run]) -> tuple[str, list[Run]]:
    """Keep the runs on the test data, or all runs if every run was evaluated on validation data.

    The trials of a search are runs on validation data. One warning covers all runs that are left out.

    Returns:
        The split, "test" or "validation", and its runs.
    """
    splits = {run.settings["evaluate"] for run in runs if run.rounds}
    if "test" not in splits:
        return "validation" if splits else "test", runs
    if others := [run for run in runs if run.settings["evaluate"] != "test"]:
        first = others[0].folder or others[0]
        log.warning("left out: %s on validation data, such as %s", pluralize(len(others), "run"), first)
    return "test", [run for run in runs if run.settings["evaluate"] == "test"]


def with_metric(runs: list[Run], metric: str) -> tuple[list[Run], list[Run]]:
    """Split runs into those with and without a metric or resource: (runs with it, runs without it).

    Raises:
        InputError: No run has recorded the metric (`unknown-metric`).
    """
    recorded, others = ([run for run in runs if run.has(metric) == having] for having in (True, False))
    if not recorded:
        raise unknown_metric(metric, (row for run in runs for row in run.rounds[-1:]))
    return recorded, others
