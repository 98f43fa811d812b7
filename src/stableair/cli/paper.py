"""The commands that reproduce the paper: figure, demo."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import stableair as sa
from stableair.cli.display import ProgressDisplay, print_line
from stableair.cli.options import (
    DataDir,
    Device,
    Force,
    Plugin,
    PluginChanged,
    Style,
    drop_unset,
    load_plugins,
    out_option,
    plot_style,
    plugin_change,
    seeds_option,
    use_data_folder,
)
from stableair.cli.stopping import advise_on_stop

if TYPE_CHECKING:
    from stableair.errors import StableairError
    from stableair.experiment import Experiment
    from stableair.results.run import Run

Published = Annotated[
    bool, typer.Option("--published", help="Draw the runs that come with the package, without a GPU and data.")
]
Overlay = Annotated[
    list[Path] | None, typer.Option(metavar="DIR", help="With --published: draw your runs over the published ones.")
]


def figure(
    name: Annotated[str, typer.Argument(help="fig2, fig3a to fig3f, fig4a to fig4c, interval.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the experiments to override.")
    ] = None,
    out: Annotated[
        Path | None,
        out_option("Folder of the pictures and runs (default: runs, runs/smoke or runs/published)."),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Make a small version on the embedded digits, in half a minute.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Communication rounds.")] = None,
    seeds: Annotated[int, seeds_option("Number of seeds; two or more give a band.")] = 1,
    trials: Annotated[int | None, typer.Option(min=1, help="Trials of each threshold search.")] = None,
    search_rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each trial.")] = None,
    c: Annotated[float | None, typer.Option("--C", help="MAC's threshold, instead of a search.")] = None,
    max_norm: Annotated[float | None, typer.Option(help="GNC's threshold, instead of a search.")] = None,
    search_each: Annotated[bool, typer.Option("--search-each", help="Fig. 4: search C for every curve.")] = False,
    published: Published = False,
    overlay: Overlay = None,
    metric: Annotated[
        str,
        typer.Option(help="With --published: metric to draw instead of the figure's.", show_default=False),
    ] = "",
    style: Style = "screen",
    force: Force = False,
    device: Device = None,
    data_dir: DataDir = None,
    plugin: Plugin = None,
    plugin_changed: PluginChanged = "refuse",
) -> None:
    """Make a figure of the paper: compute the missing runs, then write NAME.png, NAME.pdf and a caption.

    NAME is one of fig2, fig3a to fig3f, fig4a to fig4c, and interval.
    Example: `stableair figure fig3c --smoke`, a small version in half a minute.
    """
    use_data_folder(data_dir)
    load_plugins(plugin)
    from stableair.experiment import parse_overrides
    from stableair.paper import figures

    with advise_on_stop("run the same command to continue"), CurveDisplay(name) as display:
        figures.figure(
            name, out, settings=parse_overrides(words or []) | drop_unset(device=device),
            thresholds=drop_unset(MAC=c, GNC=max_norm), smoke=smoke, rounds=rounds, seeds=seeds, trials=trials,
            search_rounds=search_rounds, search_each=search_each, published=published, overlay=overlay or (),
            metric=metric, style=plot_style(style), force=force, plugin_changed=plugin_change(plugin_changed),
            callbacks=[display],
        )  # fmt: skip
    folder = out or Path(figures.default_folder(smoke, published))
    for path in figures.output_files(name, folder, metric):
        print(path)


class CurveDisplay(ProgressDisplay):
    """The progress of the runs of a figure, each with the label of its curve.

    Args:
        name: The figure.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def title(self, experiment: "Experiment") -> str:
        from stableair.paper.catalogue import FIGURES

        if experiment.evaluate == "validation":
            return f"search, {experiment.receiver}"
        return f"{FIGURES[self.name].curve_of(experiment)}, seed {experiment.seed}"

    def result(self, experiment: "Experiment", outcome: "Run | StableairError") -> str:
        return f"{self.title(experiment)}: {super().result(experiment, outcome)}"


def demo(
    out: Annotated[Path, out_option("Folder of demo.png, demo.json and runs/demo.")] = Path("."),
    force: Force = False,
) -> None:
    """Run the paper's four methods on the embedded data in half a minute: a table, demo.png, demo.json."""
    from stableair.experiment import preset
    from stableair.paper.demo import FILES, RUNS
    from stableair.paper.methods import LABELS

    base = preset("demo")
    print_line(f"{base.data}, {base.clients} clients, {base.rounds} rounds, {base.noise}; runs in {out / RUNS}")
    with advise_on_stop("run the same command to continue"), ProgressDisplay() as display:
        runs = sa.demo(out, force=force, callbacks=[display])
    print_methods({LABELS[method]: run for method, run in runs.items()})
    for name in FILES:
        print(out / name)


def print_methods(runs: dict[str, "Run"]) -> None:
    """Print a table with one row per method."""
    from rich.console import Console
    from rich.table import Table

    from stableair.results.run import LAST

    table = Table("method", "receiver", "test accuracy", f"mean of the last {LAST} rounds")
    for label, run in runs.items():
        numbers = ["diverged", ""]
        if run.diverged is None:
            numbers = [f"{run['test/accuracy'][-1]:.3f}", f"{run.settled('test/accuracy'):.3f}"]
        table.add_row(label, run.settings["receiver"], *numbers)
    Console().print(table)
