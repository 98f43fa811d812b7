"""The commands that read recorded runs: plot, export, report, watch."""

from pathlib import Path
from typing import Annotated, Any

import typer

import stableair as sa
from stableair.cli.display import print_line
from stableair.cli.options import Folders, Force, Style, literal_option, out_option, plot_style
from stableair.cli.stopping import advise_on_stop
from stableair.literals import Band, TableRow


def plot(
    folders: Folders,
    out: Annotated[Path, out_option("Picture to write: .png, .pdf or .svg.")] = Path("curves.png"),
    metric: Annotated[
        str | None,
        typer.Option(help="Metric to draw: its name in rounds.jsonl (default: the accuracy).", show_default=False),
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="Use a logarithmic axis for the metric.")] = False,
    x: Annotated[
        str,
        typer.Option(
            "--x",
            help="Horizontal axis: round; a resource (symbols, airtime, energy, energy_max, bits); or an argument that "
            "differs, such as receiver.C.",
        ),
    ] = "round",
    band: Annotated[
        str,
        typer.Option(
            metavar="std|sem|ci95",
            help="Band over the seeds: one standard deviation, one standard error, or a 95 % confidence interval.",
        ),
    ] = "std",
    style: Style = "screen",
    size: Annotated[
        str | None, typer.Option(metavar="WIDTH,HEIGHT", help="Size in inches (default: the size of the style).")
    ] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="NAME,NAME,...", help="Names of the lines, in the order of the legend.")
    ] = None,
    force: Force = False,
) -> None:
    """Draw a metric of recorded runs against the rounds, a resource or an argument, with a band over the seeds.

    Example: `stableair plot runs --x receiver.C --band ci95`.
    Runs that differ only in the seed become one line.
    """
    sa.plot(
        folders, metric, out, log, x=x, band=literal_option("--band", band, Band),
        style=plot_style(style), size=_lengths(size),
        labels=None if labels is None else [name.strip() for name in labels.split(",")], force=force,
    )  # fmt: skip
    print(out)


def _lengths(text: str | None) -> Any:
    """Return the numbers of --size; `sa.plot` checks that there are two."""
    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"--size must be a width and a height such as 3.5,2.4: got {text}") from None


def export(
    folders: Folders,
    out: Annotated[Path, out_option("Table to write: .csv, .parquet or .tex.")] = Path("results.csv"),
    per: Annotated[str, typer.Option(metavar="run|round", help="Content of a row.")] = "run",
    metric: Annotated[
        list[str] | None, typer.Option(help="Metric to show; may be repeated (default: all).", show_default=False)
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="With --per run: number of last rounds to average over.")] = 1,
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="RESOURCE=BUDGET", help="Only the rounds within a budget, such as energy=1e6."),
    ] = None,
    force: Force = False,
) -> None:
    """Write recorded runs as a table: a column for each argument that differs and for each metric.

    Example: `stableair export runs --per round --out rounds.csv`.
    """
    print(
        sa.export(
            folders,
            out,
            literal_option("--per", per, TableRow),
            metrics=metric,
            last=last,
            at=_budgets(at),
            force=force,
        )
    )


def _budgets(words: list[str] | None) -> Any:
    """Return the values of --at; `sa.export` checks them."""
    from stableair.experiment import parse_overrides
    from stableair.spec import literal

    return {name: literal(text) for name, text in parse_overrides(words or []).items()}


def report(
    folders: Folders,
    out: Annotated[Path, out_option("HTML file to write.")] = Path("report.html"),
    force: Force = False,
) -> None:
    """Write one self-contained HTML page about recorded runs: curves, tables, a paired comparison."""
    print(sa.report(folders, out, force=force))


def watch(
    folders: Folders,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for a free port.")] = 8000,
) -> None:
    """Serve the report about runs to a browser on this machine, and update it after each round.

    Example: `stableair watch runs` prints the address. Ctrl-C stops the server.
    """
    with sa.watch(folders, port) as server, advise_on_stop("the runs continue"):
        print_line(f"http://127.0.0.1:{server.server_port} shows the runs; Ctrl-C stops")
        server.serve_forever()
