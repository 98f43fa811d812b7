"""The commands that read recorded runs: plot, report."""

from pathlib import Path
from typing import Annotated

import typer

import stableair as sa
from stableair.cli.options import Folders, Force, out_option


def plot(
    folders: Folders,
    out: Annotated[Path, out_option("Picture to write: .png, .pdf or .svg.")] = Path("curves.png"),
    metric: Annotated[str, typer.Option(help="Metric to draw, by its name in rounds.jsonl.")] = "test/accuracy",
    log: Annotated[bool, typer.Option("--log", help="Use a logarithmic axis for the metric.")] = False,
    force: Force = False,
) -> None:
    """Draw a metric of one or more runs; runs that differ only in the seed become one line with a band."""
    sa.plot(folders, metric, out, log, force=force)
    print(out)


def report(
    folders: Folders,
    out: Annotated[Path, out_option("HTML file to write.")] = Path("report.html"),
    force: Force = False,
) -> None:
    """Write one self-contained HTML page about one or more runs: curves, tables, a paired comparison."""
    print(sa.report(folders, out, force=force))
