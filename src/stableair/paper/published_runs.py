"""The runs that are published with the package: writing, reading, and comparison with their curves' experiments.

published/NAME.csv has one line per round of every run of a figure. published/NAME.json describes these runs: the
curve, the settings and the environment of each, the data, and the searches for the thresholds. A run belongs to a
curve if it has the settings of the curve's experiment, apart from the differences in published/differences.json, each
of which has a reason. `read` skips and reports all other runs.
"""

import csv
import io
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from stableair.data.image_sets import IMAGE_SETS
from stableair.errors import CorruptRunError, StableairError
from stableair.experiment import COMPONENT_SETTINGS, EXECUTION, Experiment, components_of_record, settings_of_record
from stableair.files import write_whole
from stableair.results.checksums import digest
from stableair.results.metrics import Row
from stableair.results.run import Run
from stableair.searches import Result, Trial, space
from stableair.validation import choice

FOLDER = Path(__file__).parent / "published"
Curves = dict[str, Experiment]  # the experiment of every curve of a figure, by label


class PublishedRuns(NamedTuple):
    """The published runs of a figure."""

    curves: dict[str, list[Run]]  # by label, the paper's curves first
    environments: dict[str, list[dict[str, Any]]]  # environments by the title of the run
    searches: dict[str, dict[str, Any]]  # contents of search.json, by name
    data: str  # description of the data set
    left_out: list[str]  # one line for each run that cannot be drawn


def allowed_differences(name: str) -> dict[str, str]:
    """Return the settings in which the published runs of a figure may differ from its experiments, with reasons."""
    return json.loads((FOLDER / "differences.json").read_text())[name]


def differences(record: dict[str, Any], experiment: Experiment) -> set[str]:
    """Return the settings and arguments, such as "receiver.C", in which a record differs from an experiment.

    Seed, device and engine are ignored.
    """
    return _differing_keys(_flatten(record), _flatten_experiment(experiment))


def _differing_keys(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    return {key for key in a | b if a.get(key) != b.get(key)}


@lru_cache(maxsize=256)
def _flatten_experiment(experiment: Experiment) -> dict[str, Any]:
    return _flatten(experiment.to_record())


def _flatten(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record by dotted keys; model="auto" is replaced by the data set's default model."""
    data = str(settings_of_record(record)["data"]).partition("(")[0]
    if record["model"] == "auto" and data in IMAGE_SETS:
        record = record | {"model": IMAGE_SETS[data].model}
    ignored = {"seed", *COMPONENT_SETTINGS, *EXECUTION} - {"rounds"}
    flat = {key: value for key, value in settings_of_record(record).items() if key not in ignored}
    for field, components in components_of_record(record).items():
        flat[field] = [component for component, _ in components]
        flat |= {f"{field}.{key}": value for _, arguments in components for key, value in arguments.items()}
    return flat


def curve_name(name: str, record: dict[str, Any], curves: Curves) -> str | None:
    """Return the label of the matching curve with the fewest differences to a record; None if no curve matches."""
    allowed, settings = allowed_differences(name).keys(), _flatten(record)
    differing = {label: _differing_keys(settings, _flatten_experiment(one)) for label, one in curves.items()}
    matching = [label for label, keys in differing.items() if keys <= allowed]
    return min(matching, key=lambda label: len(differing[label]), default=None)


def write(
    name: str,
    curves: Curves,
    runs: dict[str, Run],
    searches: dict[str, Any],
    data: str,
    commits: dict[str, str] | None = None,
) -> list[Path]:
    """Write the two files of a figure; the same runs give the same bytes.

    Args:
        name: The figure.
        curves: The experiment of every curve, by label.
        runs: The runs, by title.
        searches: The contents of search.json of each threshold search, by name.
        data: Description of the data.
        commits: Commits by title, for runs whose environment records no commit or a wrong one.

    Returns:
        The paths of the CSV and the JSON file.
    """
    columns = dict.fromkeys(key for run in runs.values() for row in run.rounds for key in row)
    text = io.StringIO()
    table = csv.DictWriter(text, ["run", *columns], lineterminator="\n")
    table.writeheader()
    for title, run in runs.items():
        table.writerows({"run": title} | {key: _format_cell(value) for key, value in row.items()} for row in run.rounds)
    descriptions = {
        title: {
            "curve": curve_name(name, run.record, curves),
            "experiment": run.record,
            "environment": [
                one | {"commit": (commits or {}).get(title) or one.get("commit", "")} for one in run.environments
            ],
        }
        for title, run in runs.items()
    }
    content = text.getvalue().encode()
    about = {"data": data, "csv": digest(content), "runs": descriptions, "searches": searches}
    return [
        write_whole(FOLDER / f"{name}.csv", content),
        write_whole(FOLDER / f"{name}.json", (json.dumps(about, indent=1) + "\n").encode()),
    ]


def _format_cell(value: float | None) -> str:
    """Return a number with six digits; "null" for a value that is missing or not finite, as in JSON."""
    return "null" if value is None else f"{value:.6g}"


def _parse_cell(column: str, text: str) -> Any:
    if column == "round":
        return int(text)
    return None if text == "null" else column == "diverged" or float(text)


def is_published(name: str) -> bool:
    """Return whether there are published runs of a figure."""
    return (FOLDER / f"{name}.json").exists()


def read(name: str, curves: Curves) -> PublishedRuns:
    """Read the published runs of a figure.

    Args:
        name: The figure, or "choices".
        curves: The experiment of every curve. A run that does not match its curve is listed in `left_out`.

    Raises:
        CorruptRunError: The two files are damaged or do not belong together.
    """
    path = FOLDER / f"{name}.json"
    try:
        about, rows = _read_files(path)
        runs = {title: (one["curve"], Run(one["experiment"], rows.pop(title, [])))
                for title, one in about["runs"].items()}  # fmt: skip
        environments = {title: one["environment"] for title, one in about["runs"].items()}
        published = PublishedRuns({label: [] for label in curves}, environments, about["searches"], about["data"], [])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{name}.csv is missing" if isinstance(error, FileNotFoundError) else error
        raise CorruptRunError(
            f"{path}: cannot read the published runs: {reason}; reinstall stableair",
            code="corrupt-published-runs", path=path,
        ) from None  # fmt: skip
    published.left_out.extend(f"{name}.csv: {title} is not described in {path.name}" for title in rows)
    for title, (label, run) in runs.items():
        if problem := _problem(name, curves, label, run):
            published.left_out.append(f"{name}.csv: {title} {problem}")
        else:
            published.curves[label].append(run)
    return published._replace(curves={label: each for label, each in published.curves.items() if each})


def _read_files(path: Path) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """Return the description of a figure's runs, and the rows of each run."""
    about, content = json.loads(path.read_text()), path.with_suffix(".csv").read_bytes()
    if digest(content) != about["csv"]:
        raise ValueError(f"the checksum of {path.stem}.csv does not match")
    rows: dict[str, list[Row]] = {}
    for line in csv.DictReader(io.StringIO(content.decode())):
        row = {column: _parse_cell(column, text) for column, text in line.items() if text and column != "run"}
        rows.setdefault(line["run"], []).append(row)
    return about, rows


def _problem(name: str, curves: Curves, label: str, run: Run) -> str:
    """Return the reason why a published run cannot be drawn as a curve, or ""."""
    try:
        experiment = curves[choice("curve", label, curves)]
        if unlisted := differences(run.record, experiment) - allowed_differences(name).keys():
            return f"is not the experiment of {label}: it differs in {', '.join(sorted(unlisted))}"
        if not finished(run) or [row["round"] for row in run.rounds] != list(range(len(run))):
            return f"does not have all of its {run.settings['rounds']} rounds"
    except StableairError as error:
        return f"cannot be read: {error}"
    return ""


def finished(run: Run) -> bool:
    """Return whether a run completed all rounds or diverged."""
    return run.diverged is not None or len(run) >= run.settings["rounds"]


def search_result(recorded: dict[str, Any], base: Experiment) -> Result:
    """Return the result of a search, from the contents of its search.json."""
    header = recorded["search"]
    ranges = {key: one for key, text in header.items() if isinstance(text, str) and (one := space(key, text))}
    return Result(base.with_(rounds=header["rounds"], seed=0), ranges, [Trial(**row) for row in recorded["trials"]])


def provenance(published: PublishedRuns) -> str:
    """Return the versions, commits (not recorded by 0.1.0) and devices of the runs as one sentence."""
    environments = [one for each in published.environments.values() for one in each]
    commits: dict[str, set[str]] = {}
    for one in environments:
        commits.setdefault(f"stableair {one['stableair']}", set()).update(filter(None, [one.get("commit")]))
    versions = [f"{version} ({', '.join(sorted(at))})" if at else version for version, at in sorted(commits.items())]
    devices = sorted({f"{one['device']}, {one['engine']}, {one['precision']}" for one in environments})
    return f"computed by {' and '.join(versions)} on {'; '.join(devices)}"


def data_checksums(environments: Iterable[list[dict[str, Any]]]) -> set[str]:
    """Return the checksums of the data files that runs have read."""
    return {checksum for each in environments for one in each for checksum in (one.get("data") or {}).values()}
