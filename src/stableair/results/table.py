"""Tables of recorded runs: one row per run or round, and one column for each argument that differs."""

import logging
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

from stableair.errors import InputError
from stableair.files import write_whole
from stableair.literals import TableRow
from stableair.optional import require
from stableair.results.arguments import arguments, differing, ordered
from stableair.results.budgets import Budget
from stableair.results.grouping import describe_seeds
from stableair.results.metrics import metric_names
from stableair.results.outputs import GENERATOR, check_output
from stableair.results.plugins import mixed_components
from stableair.results.reading import log_left_out, runs_from, with_metric
from stableair.results.resources import RESOURCES, ROUNDING, check_resource
from stableair.results.run import Run
from stableair.validation import as_path, integer, pluralize, positive, texts, typed

log = logging.getLogger("stableair")

DataFrame = Any  # pandas.DataFrame; the import of pandas takes half a second
FORMATS = ".csv", ".parquet", ".tex"
TABLE_INDEX = "run folder"  # first column of a CSV file, by which `check_output` recognises a table


@typed
def table(
    runs: Run | str | Path | Iterable[Run | str | Path],
    per: TableRow = "run",
    *,
    metrics: list[str] | tuple[str, ...] | None = None,
    last: int = 1,
    at: dict[str, float] | None = None,
) -> DataFrame:
    """Return recorded runs as a pandas DataFrame. `stableair export` writes it to a file.

    The index is the run folder. The columns are:

    - each argument that differs between the runs, named as on the command line: `receiver` (the component),
      `receiver.C`, `noise.tau`, `seed`;
    - with one row per run: `rounds` (the number of complete rounds) and `diverged`; with one row per round: `round`
      (zero-based);
    - `earlier_version`, if a run contains results of an earlier version of a plug-in;
    - each metric;
    - the total of each resource: `symbols`, `airtime` (s), `energy` (J, mean over the clients), `energy_max` (J,
      largest of a client) and `bits`.

    Args:
        runs: Runs, run folders, or folders that contain run folders.
        per: Whether a row is a "run" or a "round".
        metrics: Metrics and resources to show. None: all that were recorded.
        last: For rows that are runs: number of last rounds over which each metric is averaged; 1 gives the last value.
            A run that diverged has no metrics.
        at: A resource and its budget, such as {"energy": 1e6}. Only the rounds within the budget are used. Runs
            without this resource are left out.

    Returns:
        The table.

    Raises:
        InputError: No run can be read (`no-run`), no run has a complete round (`no-rounds`), no run has one of the
            metrics (`unknown-metric`), or the first round of a run exceeds the budget (`budget-too-small`).

    >>> import stableair as sa
    >>> base = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2)
    >>> runs = [sa.run(base.with_(receiver=receiver)) for receiver in ("mac(C=1)", "none()")]
    >>> print(sa.table(runs, metrics=["channel/senders"]).to_string(index=False))
    receiver  rounds  diverged  channel/senders
         mac       2     False              3.0
        none       2     False              3.0
    """
    integer("last", last, least=1)
    every_run, left_out = runs_from(runs)
    shown = [run for run in every_run if run.rounds]
    if not shown:
        raise InputError("nothing to show: no run has a complete round", code="no-rounds")
    without = [f"{run.folder}: no complete round" for run in every_run if not run.rounds]
    budgets = [Budget(check_resource(name), positive("budget", amount)) for name, amount in (at or {}).items()]
    for metric in (*texts("metrics", metrics or ()), *(budget.resource for budget in budgets)):
        shown, others = with_metric(shown, metric)
        without += [f"{run.folder} has no {metric}" for run in others]
    for budget in budgets:
        _warn_of_short_runs(shown, budget)
        shown = [run.within(*budget) for run in shown]
    log_left_out([*left_out, *without])
    used = [name for name in RESOURCES if any(run.has(name) for run in shown)]
    names = [*metric_names(run.rounds[-1] for run in shown), *used] if metrics is None else list(metrics)
    columns = differing(shown)
    rows = [
        row for run in ordered(shown) for row in (_run_rows if per == "run" else _round_rows)(run, columns, names, last)
    ]
    frame = _frame(rows, names)
    averaged = f"averaged over the last {last} rounds" if last > 1 else "of the last round"
    if per == "round":
        averaged = "of every round"
    frame.attrs["description"] = f"a row per {per}; metrics {averaged}; seeds: {describe_seeds(shown)}"
    return frame


def _warn_of_short_runs(runs: list[Run], budget: Budget) -> None:
    """Log a warning for runs that ended before they used a budget: their rows are not at the budget."""
    short = [run for run in runs if run.diverged is None and run[budget.resource][-1] * (1 + ROUNDING) < budget.amount]
    if short:
        used = Budget(budget.resource, short[0][budget.resource][-1])
        log.warning("%s used less than %s, such as %s: %s", pluralize(len(short), "run"), budget, short[0].folder, used)


def _frame(rows: list[dict[str, Any]], metrics: list[str]) -> DataFrame:
    import pandas

    frame = pandas.DataFrame(rows).set_index(TABLE_INDEX)
    return frame.astype({name: float for name in metrics if frame[name].dtype == object})  # None becomes NaN


def _run_rows(run: Run, columns: Iterable[str], metrics: Iterable[str], last: int) -> list[dict[str, Any]]:
    values = {name: _run_value(run, name, last) for name in metrics}
    return [
        _first_cells(run, columns)
        | {"rounds": len(run), "diverged": run.diverged is not None, **_earlier_version(run)}
        | values
    ]


def _run_value(run: Run, name: str, last: int) -> float | None:
    """Return the mean of a metric over the last rounds, or the total of a resource; None if it was not recorded."""
    if not run.has(name):
        return None
    return run[name][-1] if name in RESOURCES else run.mean_of_last(name, last)


def _earlier_version(run: Run) -> dict[str, bool]:
    """Return the cell that marks a run with results of several versions of a plug-in; {} for any other run."""
    return {"earlier_version": True} if mixed_components([run]) else {}


def _round_rows(run: Run, columns: Iterable[str], metrics: Iterable[str], last: int) -> list[dict[str, Any]]:
    first = _first_cells(run, columns)
    used = {name: run[name] for name in metrics if name in RESOURCES and run.has(name)}
    return [
        first | {"round": row["round"]} | {name: used[name][k] if name in used else row.get(name) for name in metrics}
        for k, row in enumerate(run.rounds)
    ]


def _first_cells(run: Run, columns: Iterable[str]) -> dict[str, Any]:
    values = arguments(run)
    return {TABLE_INDEX: "" if run.folder is None else str(run.folder)} | {name: values.get(name) for name in columns}


@typed
def export(
    runs: Run | str | Path | Iterable[Run | str | Path],
    out: str | Path,
    per: TableRow = "run",
    *,
    metrics: list[str] | tuple[str, ...] | None = None,
    last: int = 1,
    at: dict[str, float] | None = None,
    force: bool = False,
) -> Path:
    """Write recorded runs to a file, as a table. `stableair export` calls this function.

    Args:
        runs: Runs, run folders, or folders that contain run folders.
        out: File to write: .csv, .parquet (requires the extra "parquet") or .tex (for the LaTeX package booktabs,
            without the run folders, with accuracies in per cent).
        per: As for `table`.
        metrics: As for `table`.
        last: As for `table`.
        at: As for `table`.
        force: Whether to replace a file that was not written by stableair.

    Returns:
        The path of the file.

    Raises:
        InputError: The format is unknown (`unknown-format`), the file cannot be written (`cannot-write`), or the runs
            cannot be read, as for `table`.
        MissingExtraError: pyarrow is not installed, and the file is .parquet.

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> run = sa.run(sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2))
    >>> with TemporaryDirectory() as folder:
    ...     path = sa.export(run, f"{folder}/rounds.csv", "round", metrics=["channel/senders"])
    ...     print(path.read_text(), end="")
    run folder,round,channel/senders
    ,0,3
    ,1,3
    """
    path = check_table(out, force)
    return write_table(table(runs, per, metrics=metrics, last=last, at=at), path, force)


def check_table(path: str | Path, force: bool = False) -> Path:
    """Check that a table can be written to a path, and return the path.

    Raises:
        InputError: The format of the extension is unknown (`unknown-format`), or the file may not be written, as for
            `check_output`.
        MissingExtraError: pyarrow is not installed, and the file is .parquet.
    """
    path = as_path("the table", path)
    if path.suffix not in FORMATS:
        text = f"cannot write {path}: its extension must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise InputError(text, code="unknown-format", path=path, allowed=list(FORMATS))
    if path.suffix == ".parquet":
        require("pyarrow", "parquet")
    return check_output(path, force)


def write_table(frame: DataFrame, path: str | Path, force: bool = False, tex: str | None = None) -> Path:
    """Write a DataFrame to a file; its extension determines the format. Missing folders are created.

    Args:
        frame: The table.
        path: The file.
        force: Whether to replace a file that was not written by stableair.
        tex: The content of a .tex file. None: the columns of the table.

    Returns:
        The path.

    Raises:
        InputError: The format is unknown, or the file cannot be written.
    """
    path = check_table(path, force)
    frame.attrs["generator"] = GENERATOR  # stored in a Parquet file
    if path.suffix == ".csv":
        content = frame.to_csv().encode()
    elif path.suffix == ".parquet":
        content = _parquet(frame)
    else:
        comment = f"% {frame.attrs['description']}\n" if "description" in frame.attrs else ""
        content = f"% {GENERATOR}\n{comment + to_latex(frame) if tex is None else tex}".encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", code="cannot-write", path=path) from None


def to_latex(frame: DataFrame) -> str:
    """Return a table as LaTeX for the package booktabs, with accuracies in per cent."""
    accuracies = [name for name in frame if "/" in name and "accuracy" in name]
    frame = frame.assign(**{name: 100 * frame[name] for name in accuracies})
    frame = frame.rename(columns={name: f"{name} (%)" for name in accuracies})
    return frame.to_latex(index=False, escape=True, float_format="%.4g", na_rep="--")


def _parquet(frame: DataFrame) -> bytes:
    """Return a table as Parquet; a column of numbers and strings, such as 1 and auto, becomes a column of strings."""
    mixed = [name for name in frame if frame[name].map(type).nunique() > 1 and frame[name].dtype == object]
    buffer = BytesIO()
    frame.astype(dict.fromkeys(mixed, str)).to_parquet(buffer)
    return buffer.getvalue()
