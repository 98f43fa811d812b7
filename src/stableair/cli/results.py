"""The commands that read recorded runs: plot, report, watch."""

from pathlib import Path
from typing import Annotated

import typer

import stableair as sa
from stableair.cli.display import print_line
from stableair.cli.options import Folders, Force, out_option
from stableair.cli.stopping import advise_on_stop


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


def watch(
    folders: Folders,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for a free one.")] = 8000,
) -> None:
    """Serve the report about runs on this machine; the page in the browser follows the runs that are going on."""
    with sa.watch(folders, port) as server, advise_on_stop("the runs go on"):
        print_line(f"http://127.0.0.1:{server.server_port} shows the runs; Ctrl-C stops")
        server.serve_forever()
