"""The commands that look at recorded runs: plot, report."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from stableair.cli.options import Folders


def plot(
    folders: Folders,
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture, as .png, .pdf or .svg.")] = Path("curves.png"),
    metric: Annotated[str, typer.Option(help="What to draw, as named in rounds.jsonl.")] = "test/accuracy",
    log: Annotated[bool, typer.Option("--log", help="A logarithmic axis for it.")] = False,
) -> None:
    """Draw a metric of one or more runs; runs that differ in the seed alone become one line with a band."""
    from stableair.results.plot import curves, find, label, recorded, save

    found, unreadable = find(folders)
    runs, others = recorded(found, metric)
    print_left_out([*unreadable, *(f"{run.folder} has no {metric}" for run in others)])
    print(save(curves(label(runs), metric, log=log), out))


def report(
    folders: Folders,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """One self-contained page of one or more runs: curves, tables, a paired comparison."""
    from stableair.results.plot import find
    from stableair.results.report import report as make_report
    from stableair.results.report import write

    runs, unreadable = find(folders)
    print_left_out(unreadable)
    print(write(make_report(runs, unreadable), out))


def print_left_out(lines: list[str]) -> None:
    for line in lines:
        print(f"left out: {line}", file=sys.stderr)
