"""The commands that look at recorded runs: plot, report."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from stableair.cli.options import Folders, place


def plot(
    folders: Folders,
    out: Annotated[Path, place("The picture, as .png, .pdf or .svg.", "-o")] = Path("curves.png"),
    metric: Annotated[str, typer.Option(help="What to draw, as named in rounds.jsonl.")] = "test/accuracy",
    log: Annotated[bool, typer.Option("--log", help="A logarithmic axis for it.")] = False,
) -> None:
    """Draw a metric of one or more runs; runs that differ in the seed alone become one line with a band."""
    from stableair.results.plot import check_picture, curves, save
    from stableair.results.run import find, group, with_metric

    check_picture(out)
    found, unreadable = find(folders)
    runs, others = with_metric(found, metric)
    print_left_out([*unreadable, *(f"{run.folder} has no {metric}" for run in others)])
    print(save(curves(group(runs), metric, log=log), out))


def report(
    folders: Folders,
    out: Annotated[Path, place("The page.", "-o")] = Path("report.html"),
) -> None:
    """One self-contained page of one or more runs: curves, tables, a paired comparison."""
    from stableair.results.report import check_page, page, write
    from stableair.results.run import find

    check_page(out)
    runs, unreadable = find(folders)
    print_left_out(unreadable)
    print(write(page(runs, unreadable), out))


def print_left_out(lines: list[str]) -> None:
    for line in lines:
        print(f"left out: {line}", file=sys.stderr)
