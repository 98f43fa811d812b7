"""The commands that compute experiments of one's own: run, search."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stableair.checks import InputError
from stableair.cli.display import OnRound, Row, describe_run, print_line, progress, show_engine, speaks
from stableair.cli.options import DataDir, Device, Plugin, given, load_plugins, place, use_data_folder
from stableair.cli.stopping import stop_politely

if TYPE_CHECKING:
    from stableair.experiment import Experiment
    from stableair.searches import Space


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PRESET|FILE.toml] [KEY=VALUE]...", help="What to run: `stableair list presets`, `list settings`."
        ),
    ] = None,
    out: Annotated[Path | None, place("The run's folder (default: one under runs/ with its name).")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Run seed, seed+1, ..., each in its own folder.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete round.")] = False,
    device: Device = None,
    engine: Annotated[str | None, typer.Option(help="auto, reference or fast.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Rounds between two checkpoints.")] = 1,
    track: Annotated[str | None, typer.Option(help="Tell a tracker as well: tensorboard, wandb or mlflow.")] = None,
    data_dir: DataDir = None,
    plugin: Plugin = None,
) -> None:
    """Run an experiment and record it in a folder."""
    use_data_folder(data_dir)
    load_plugins(plugin)
    from stableair.experiment import from_words
    from stableair.results.track import check_installed
    from stableair.results.track import track as track_run
    from stableair.runner import resume_point
    from stableair.runner import run as run_experiment
    from stableair.sweeps.plans import over_seeds

    check_installed(track)
    base = from_words(words or []).with_(**given(device=device, engine=engine))
    experiments = over_seeds(base, seeds)
    folders = [run_folder(experiment, out, seeds) for experiment in experiments]
    for experiment, folder in zip(experiments, folders, strict=True) if speaks() else ():
        resume_point(folder, experiment, resume)  # none is begun where one would be refused
    for experiment, folder in zip(experiments, folders, strict=True):
        advice = f"{folder} holds every complete round, --resume goes on from there"
        with (
            stop_politely(advice),
            progress() as start_run,
            track_run(track if speaks() else None, experiment, folder) as track_round,
        ):
            result = run_experiment(
                experiment,
                folder,
                resume=resume,
                checkpoint_every=checkpoint_every,
                on_round=in_turn(start_run(f"seed {experiment.seed}", experiment.rounds), track_round),
                on_start=show_engine,
            )
        print(describe_run(result, experiment.evaluate))


def run_folder(experiment: "Experiment", out: Path | None, seeds: int) -> Path:
    if out is None:
        return Path("runs") / experiment.name
    return out / f"seed{experiment.seed}" if seeds > 1 else out


def in_turn(*observers: OnRound) -> OnRound:
    """Show a round to each of them."""

    def on_round(row: Row) -> None:
        for observe in observers:
            observe(row)

    return on_round


def search(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PRESET|FILE.toml] [KEY=VALUE]... KEY=LOW:HIGH[:log|:int]...",
            help="The experiment, and what to search of it, such as receiver.C=0.01:10:log or local_epochs=1,2,5.",
        ),
    ],
    trials: Annotated[int, typer.Option(min=1, help="How many values to try.")] = 12,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds each value is judged over.")] = 1,
    out: Annotated[Path | None, place("The search's folder (default: one under runs/).")] = None,
    device: Device = None,
    data_dir: DataDir = None,
    plugin: Plugin = None,
) -> None:
    """Search any parameters on a validation split of the training data; the test data stay unseen."""
    use_data_folder(data_dir)
    load_plugins(plugin)
    from stableair import searches
    from stableair.experiment import from_words
    from stableair.results import plot

    settings, spaces = separate_spaces(words)
    base = from_words(settings).with_(**given(device=device))
    folder = out or Path("runs") / f"search-{base.name}"
    with stop_politely("the same command goes on from here"), progress(every_round=False) as start_run:
        found = searches.search(base, spaces, folder, trials=trials, seeds=seeds, progress=start_run, log=print_line)
    print(f"best: {searches.describe(found.winner, base.rounds * seeds)}")
    for key in found.at_boundary:
        print(f"note: the best {key} is at the end of {found.spaces[key]}; the best may lie beyond")
    command = ["stableair", "run", *settings, *(f"{key}={value}" for key, value in found.winner.values.items())]
    options: list[tuple[str, Path | str | None]] = [("--plugin", file) for file in plugin or []]
    options += [("--data-dir", data_dir), ("--device", device)]
    for option, value in options:
        if value:
            command += [option, str(value)]
    print(shlex.join(command))
    print(folder / searches.RESULT)
    print(plot.save(searches.draw(found), folder / "search.png"))


def separate_spaces(words: list[str]) -> tuple[list[str], dict[str, "Space"]]:
    """The words that say which experiment it is, and what is to be searched by its key."""
    from stableair.searches import space

    settings: list[str] = []
    spaces: dict[str, Space] = {}
    keys = [word.partition("=")[0] for word in words if "=" in word]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise InputError(f"{', '.join(repeated)} is given twice")
    for word in words:
        key, _, text = word.partition("=")
        if found := space(key, text):
            spaces[key] = found
        else:
            settings.append(word)
    return settings, spaces
