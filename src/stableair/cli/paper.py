"""The commands that make what the paper shows: figure, demo."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stableair.checks import InputError
from stableair.cli.display import describe_run, print_line, progress
from stableair.cli.options import DataDir, Device, Plugin, given, load_plugins, place, use_data_folder
from stableair.cli.stopping import stop_politely
from stableair.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

    from stableair.paper.figures import Plan
    from stableair.results.run import Run


def figure(
    name: Annotated[str, typer.Argument(help="fig2, fig3a to fig3f, fig4a to fig4c, interval.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of your own.")] = None,
    out: Annotated[
        Path | None,
        place("Where the picture and its runs go (default: runs, with --smoke or --published a folder in it)."),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The same figure, very small: about a minute.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Communication rounds.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds; two or more give a band.")] = 1,
    trials: Annotated[int | None, typer.Option(min=1, help="Values to try in the search for a threshold.")] = None,
    search_rounds: Annotated[int | None, typer.Option(min=1, help="Rounds to judge each of them by.")] = None,
    c: Annotated[float | None, typer.Option("--C", help="MAC's threshold, instead of searching it.")] = None,
    max_norm: Annotated[float | None, typer.Option(help="GNC's threshold, instead of searching it.")] = None,
    search_each: Annotated[bool, typer.Option("--search-each", help="Fig. 4: a searched C for every curve.")] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Draw the runs that come with the package: no GPU, no data, at once.")
    ] = False,
    own: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="With --published: lay your own runs over them.")
    ] = None,
    metric: Annotated[
        str,
        typer.Option(help="With --published: another metric of rounds.jsonl than the figure's.", show_default=False),
    ] = "",
    device: Device = None,
    data_dir: DataDir = None,
    plugin: Plugin = None,
) -> None:
    """Make a figure of the paper: compute the runs that are missing, then draw NAME.png and NAME.pdf."""
    use_data_folder(data_dir)
    load_plugins(plugin)
    from stableair.experiment import settings_of
    from stableair.paper import figures
    from stableair.results import plot

    out = out or Path(figures.default_folder(smoke, published))
    if not published:
        figures.refuse("these are for published runs, with --published", {"--own": own, "--metric": metric})
    if name in figures.DRAWINGS:
        if words:
            raise InputError(f"{name} takes no settings: got {' '.join(words)}")
        figures.refuse(f"{name} is drawn without runs", {"--published": published})
        picture = figures.drawing(name)
    elif published:
        useless = {
            "settings": words, "--rounds": rounds, "--seeds": seeds != 1, "--trials": trials, "--smoke": smoke,
            "--search-rounds": search_rounds, "--C": c, "--max-norm": max_norm, "--search-each": search_each,
        }  # fmt: skip
        figures.refuse("published runs are drawn as they are", useless)
        picture = figures.draw_published(name, own or (), metric)
    else:
        plan = figures.plan(
            name,
            settings_of(words or []) | given(rounds=rounds, device=device),
            smoke=smoke,
            seeds=seeds,
            given=given(MAC=c, GNC=max_norm),
            search_each=search_each,
            **given(trials=trials, search_rounds=search_rounds),
        )
        picture = _computed(plan, out)
    for ending in ("png", "pdf"):
        print(plot.save(picture, out / f"{figures.stem(name, metric)}.{ending}"))


def _computed(plan: "Plan", out: Path) -> "Picture":
    """A figure from runs that are computed where they are missing; each is told in a line."""
    from stableair.paper import figures

    with stop_politely("the same command goes on from here"), progress(every_round=False) as start_run:
        curves, notes = figures.compute(plan, out, start_run, print_line)
    for label, runs in curves.items():
        for run in runs:
            print(f"{label:<16} {describe_run(run, plan.base.evaluate)}")
    return figures.draw(plan, curves, notes)


def demo(
    out: Annotated[Path, place("The folder for demo.png, demo.json and runs/demo.")] = Path("."),
) -> None:
    """The paper's four methods on the embedded data: a table, demo.png and demo.json in about half a minute."""
    from stableair.experiment import PRESETS, Experiment
    from stableair.paper.demo import LABELS
    from stableair.paper.demo import demo as run_demo
    from stableair.results import plot

    base = Experiment(**PRESETS["demo"])
    folder = out / "runs" / "demo"
    print_line(f"{base.data}, {base.clients} clients, {base.rounds} rounds, {base.noise}; runs in {folder}")
    with stop_politely("the same command goes on from here"), progress(every_round=False) as start_run:
        runs = run_demo(folder, print_line, start_run)
    print_methods({LABELS[method]: run for method, run in runs.items()})
    curves = {LABELS[method]: [run] for method, run in runs.items()}
    print(plot.save(plot.curves(curves, title=f"{base.data}, {base.noise}"), out / "demo.png"))
    accuracies = {method: run["test/accuracy"][-1] for method, run in runs.items()}
    print(write_whole(out / "demo.json", (json.dumps(accuracies, indent=2) + "\n").encode()))


def print_methods(runs: dict[str, "Run"]) -> None:
    """A table with a line for each method."""
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
