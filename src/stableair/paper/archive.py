"""The runs that are published with the package: written, read, and held against the experiments of their curves.

published/NAME.csv has a line for each round of each run of a figure, NAME.json says what these runs are: the curve,
the settings and the environment of each, the data, and the searches that gave the thresholds. A run belongs to a curve
when it is the curve's experiment, but for what published/differences.json lists with a reason. One that does not is
named and left out.
"""

import csv
import io
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from stableair.checks import InputError, choice
from stableair.data.table import IMAGE_SETS
from stableair.experiment import EXECUTION, HOMES, Experiment, components_of_record, settings_of_record
from stableair.files import write_whole
from stableair.results.run import Row, Run
from stableair.results.sealed import digest
from stableair.searches import Result, Trial, space

FOLDER = Path(__file__).parent / "published"
Wanted = dict[str, Experiment]  # the experiments of a figure's curves, by label


class Archive(NamedTuple):
    """What is published of a figure."""

    curves: dict[str, list[Run]]  # by label, the paper's first
    environments: dict[str, list[dict[str, Any]]]  # by the name of the run
    searches: dict[str, dict[str, Any]]  # as in search.json, by name
    data: str  # in words
    left_out: list[str]


def reasons(name: str) -> dict[str, str]:
    """In which settings the published runs of a figure may differ from its experiments, and why they do."""
    return json.loads((FOLDER / "differences.json").read_text())[name]


def differences(record: dict[str, Any], wanted: Experiment) -> set[str]:
    """The settings and arguments, such as receiver.C, in which a record is not that experiment, whatever its seed."""
    return _apart(_flat(record), _flat_experiment(wanted))


def _apart(mine: dict[str, Any], theirs: dict[str, Any]) -> set[str]:
    return {key for key in mine | theirs if mine.get(key) != theirs.get(key)}


@lru_cache(maxsize=256)
def _flat_experiment(wanted: Experiment) -> dict[str, Any]:
    return _flat(wanted.to_record())


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """All that an experiment is, by dotted keys; the data set's own model by its name."""
    data = str(settings_of_record(record)["data"]).partition("(")[0]
    if record["model"] == "auto" and data in IMAGE_SETS:
        record = record | {"model": IMAGE_SETS[data].model}
    ignored = {"seed", *HOMES, *EXECUTION} - {"rounds"}
    flat = {key: value for key, value in settings_of_record(record).items() if key not in ignored}
    for field, components in components_of_record(record).items():
        flat[field] = [component for component, _ in components]
        flat |= {f"{field}.{key}": value for _, arguments in components for key, value in arguments.items()}
    return flat


def curve_of(name: str, record: dict[str, Any], curves: Wanted) -> str | None:
    """The label of the curve that a run belongs to, by its settings; None where there is none."""
    listed, mine = reasons(name).keys(), _flat(record)
    unlike = {label: _apart(mine, _flat_experiment(wanted)) for label, wanted in curves.items()}
    fitting = [label for label, keys in unlike.items() if keys <= listed]
    return min(fitting, key=lambda label: len(unlike[label]), default=None)


def write(name: str, curves: Wanted, runs: dict[str, Run], searches: dict[str, Any], data: str) -> list[Path]:
    """Write the two files of a figure: the same runs give the same bytes."""
    columns = dict.fromkeys(key for run in runs.values() for row in run.rounds for key in row)
    text = io.StringIO()
    table = csv.DictWriter(text, ["run", *columns], lineterminator="\n")
    table.writeheader()
    for title, run in runs.items():
        table.writerows({"run": title} | {key: _cell(value) for key, value in row.items()} for row in run.rounds)
    described = {
        title: {"curve": curve_of(name, run.record, curves), "experiment": run.record, "environment": run.environments}
        for title, run in runs.items()
    }
    content = text.getvalue().encode()
    about = {"data": data, "csv": digest(content), "runs": described, "searches": searches}
    return [
        write_whole(FOLDER / f"{name}.csv", content),
        write_whole(FOLDER / f"{name}.json", (json.dumps(about, indent=1) + "\n").encode()),
    ]


def _cell(value: float | None) -> str:
    """A number with six digits; null where it was not finite or there was none, as in JSON."""
    return "null" if value is None else f"{value:.6g}"


def is_published(name: str) -> bool:
    """Whether there are published runs under a name."""
    return (FOLDER / f"{name}.json").exists()


def read(name: str, curves: Wanted) -> Archive:
    """What is published under a name; a run that is not the experiment of its curve is named and left out."""
    place = FOLDER / f"{name}.json"
    try:
        about, content = json.loads(place.read_text()), place.with_suffix(".csv").read_bytes()
        if digest(content) != about["csv"]:
            raise ValueError(f"{name}.csv is not the file that it describes")
        rows: dict[str, list[Row]] = {}
        for line in csv.DictReader(io.StringIO(content.decode())):
            rows.setdefault(line.pop("run"), []).append({key: _value(key, text) for key, text in line.items() if text})
        runs = {title: (said["curve"], Run(said["experiment"], rows.pop(title, []))) for title, said in
                about["runs"].items()}  # fmt: skip
        places = {title: said["environment"] for title, said in about["runs"].items()}
        archive = Archive({}, places, about["searches"], about["data"], [])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{name}.csv is missing" if isinstance(error, FileNotFoundError) else error
        raise InputError(f"{place}: nothing is drawn from it: {why}; install stableair again") from None
    archive.left_out.extend(f"{name}.csv: {title} is not described in {place.name}" for title in rows)
    found: dict[str, list[Run]] = {label: [] for label in curves}
    for title, (label, run) in runs.items():
        if wrong := _wrong(name, curves, label, run):
            archive.left_out.append(f"{name}.csv: {title} {wrong}")
        else:
            found[label].append(run)
    archive.curves.update({label: each for label, each in found.items() if each})
    return archive


def _value(key: str, text: str) -> Any:
    if key == "round":
        return int(text)
    return None if text == "null" else key == "diverged" or float(text)


def _wrong(name: str, curves: Wanted, label: str, run: Run) -> str:
    """Why a published run cannot be drawn as that curve; nothing where it can."""
    try:
        wanted = curves[choice("curve", label, curves)]
        if unlisted := differences(run.record, wanted) - reasons(name).keys():
            return f"is not the experiment of {label}: it differs in {', '.join(sorted(unlisted))}"
        if not finished(run) or [row["round"] for row in run.rounds] != list(range(len(run))):
            return f"has not all of its {run.settings['rounds']} rounds"
    except InputError as error:
        return f"cannot be read: {error}"
    return ""


def finished(run: Run) -> bool:
    """Whether a run came to its end, be it that it diverged."""
    return run.diverged is not None or len(run) >= run.settings["rounds"]


def search_of(found: dict[str, Any], base: Experiment) -> Result:
    """A search as it was recorded in search.json."""
    header = found["search"]
    ranges = {key: one for key, text in header.items() if isinstance(text, str) and (one := space(key, text))}
    return Result(base.with_(rounds=header["rounds"], seed=0), ranges, [Trial(**row) for row in found["trials"]])


def computed(archive: Archive) -> str:
    """On what the runs of a figure were computed, by which versions, at which commits where that is known."""
    entries = [entry for each in archive.environments.values() for entry in each]
    commits: dict[str, set[str]] = {}
    for entry in entries:
        commits.setdefault(f"stableair {entry['stableair']}", set()).update(filter(None, [entry.get("commit")]))
    versions = [f"{name} ({', '.join(sorted(at))})" if at else name for name, at in sorted(commits.items())]
    devices = sorted({f"{entry['device']}, {entry['engine']}, {entry['precision']}" for entry in entries})
    return f"computed by {' and '.join(versions)} on {'; '.join(devices)}"


def data_files(environments: Iterable[list[dict[str, Any]]]) -> set[str]:
    """The checksums of the data files that runs have read."""
    return {found for each in environments for entry in each for found in (entry.get("data") or {}).values()}
