"""The commands that compute many experiments at once: sweep, compare."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stableair.checks import InputError, count
from stableair.cli.display import describe_run, print_line
from stableair.cli.options import DataDir, Device, Plugin, given, load_plugins, place, use_data_folder
from stableair.cli.results import print_left_out
from stableair.cli.stopping import stop_politely

if TYPE_CHECKING:
    from rich.table import Table

    from stableair.experiment import Experiment
    from stableair.sweeps.cooperative import Board, Standing

ADVICE = "every complete round is kept, the same command goes on from there"
Parallel = Annotated[int, typer.Option(min=1, max=1000, help="So many processes on this machine.")]


def sweep(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PLAN.toml|PRESET] [KEY=VALUE[,VALUE]...]...",
            help="What to run: every combination of the values of the settings.",
        ),
    ],
    out: Annotated[Path, place("The folder that all their folders go into.")] = Path("runs"),
    seeds: Annotated[int | None, typer.Option(min=1, max=1000, help="Seeds of each: seed, seed+1, ...")] = None,
    parallel: Parallel = 1,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit an array of --parallel SLURM jobs instead.")] = False,
    slurm_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of these jobs: partition=gpu, time=120 (minutes), ..."),
    ] = None,
    ray: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Use the Ray cluster there, or auto.")] = None,
    cpus: Annotated[float, typer.Option(min=0, help="CPUs of each task on Ray.")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs of each task on Ray, such as 0.5.")] = 0,
    device: Device = None,
    data_dir: DataDir = None,
    plugin: Plugin = None,
) -> None:
    """Run many experiments, each in its folder; start it as often as you like, on all machines that share the disk."""
    use_data_folder(data_dir)
    load_plugins(plugin)
    from stableair.sweeps import clusters, processes
    from stableair.sweeps.plans import plan_of_words, planned

    if slurm and ray:
        raise InputError("choose one of --slurm and --ray")
    if slurm_option and not slurm:
        raise InputError("--slurm-option goes with --slurm")
    experiments = planned(plan_of_words(words) | given(seeds=seeds, device=device))
    if slurm:
        from stableair.experiment import settings_of
        from stableair.spec import literal

        options = {key: literal(text) for key, text in settings_of(slurm_option or []).items()}
        job = clusters.submit(experiments, out, jobs=parallel, options=options)
        print(f"SLURM job {job}, an array of {parallel}: its logs go to {out / 'slurm'}")
        return
    with stop_politely(ADVICE), table(experiments, out) as done:
        if ray:
            clusters.sweep_on_ray(experiments, out, ray, cpus=cpus, gpus=gpus, done=done)
        else:
            processes.sweep(experiments, out, parallel=parallel, done=done)
    print(f"{count(len(experiments), 'experiment')} in {out}; stableair report {out} makes a page of them")


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PLAN.toml|PRESET] [KEY=VALUE[,VALUE]...]... | DIR...",
            help="Receivers and channels, such as receiver='mac(C=1),none()' noise.tau=0.1,0.5; or folders of runs.",
        ),
    ],
    out: Annotated[Path, place("The folder that the runs go into.")] = Path("runs/compare"),
    seeds: Annotated[int | None, typer.Option(min=1, max=1000, help="Seeds that all share (default: 5).")] = None,
    parallel: Parallel = 1,
    device: Device = None,
    data_dir: DataDir = None,
    plugin: Plugin = None,
) -> None:
    """Compare receivers over channels on the same seeds: accuracy with paired intervals, channel uses, seconds."""
    use_data_folder(data_dir)
    load_plugins(plugin)
    from stableair import comparisons
    from stableair.experiment import PRESETS
    from stableair.results.run import find
    from stableair.sweeps import processes
    from stableair.sweeps.plans import plan_of_words

    if words[0] not in PRESETS and Path(words[0]).is_dir():  # what else is none is left out and told
        found, unreadable = find(words)
        print_left_out(unreadable)
        print(comparisons.comparison(found))
        return
    experiments = comparisons.compared(plan_of_words(words, "a folder of runs") | given(device=device), seeds)
    with stop_politely(ADVICE), table(experiments, out) as done:
        runs = processes.sweep(experiments, out, parallel=parallel, done=done)
    print(comparisons.comparison(runs))


@contextmanager
def table(experiments: "list[Experiment]", folder: Path) -> "Iterator[Callable[[Experiment, Any], None]]":
    """A live table of all experiments on a terminal; where the output is piped, a line for each that has ended."""
    if not (sys.stdout and sys.stdout.isatty()):
        yield _ended_lines(len(experiments))
        return
    from rich.console import Console
    from rich.live import Live

    from stableair.results.run import Run, group
    from stableair.sweeps.cooperative import Board

    board, console = Board(experiments, folder), Console()
    settings = group([Run(one.to_record(), []) for one in experiments])
    lines = {name: [run.experiment.name for run in runs] for name, runs in settings.items()}
    with Live(console=console, get_renderable=lambda: standing(lines, board, console.height), refresh_per_second=1):
        yield lambda experiment, outcome: None


def _ended_lines(total: int) -> "Callable[[Experiment, Any], None]":
    ended = 0

    def done(experiment: "Experiment", outcome: Any) -> None:
        nonlocal ended
        ended += 1
        failed = isinstance(outcome, InputError)
        said = f"{experiment.name}: {outcome}" if failed else describe_run(outcome, experiment.evaluate)
        print_line(f"{ended}/{total}  {said}")

    return done


def standing(settings: dict[str, list[str]], board: "Board", height: int) -> "Table":
    """How far the sweep is: a line for each setting, those that are not done first where not all of them fit."""
    from rich.table import Table

    of = {one.experiment.name: one for one in board.look()}
    lines = {setting: [of[name] for name in names] for setting, names in settings.items()}
    room = max(1, height - 6)
    if len(lines) > room:
        lines = dict(sorted(lines.items(), key=lambda line: _rank(line[1]))[:room])
    hidden = len(settings) - len(lines)
    more = f", {count(hidden, 'setting')} not shown" if hidden else ""
    caption = f"{sum(one.finished for one in of.values())} of {len(of)} finished{more}"
    shown = Table("", "finished", "rounds", "at work", "accuracy", caption=caption)
    for name, mine in lines.items():
        shown.add_row(name, *_cells(mine))
    return shown


def _rank(standings: "list[Standing]") -> int:
    """What is at work first, then what waits, then what is finished."""
    return 0 if any(one.at_work for one in standings) else 1 + all(one.finished for one in standings)


def _cells(standings: "list[Standing]") -> list[str]:
    metrics = [(one.row, f"{one.experiment.evaluate}/accuracy") for one in standings if one.rounds]
    accuracies = [row[metric] for row, metric in metrics if row.get(metric) is not None]
    at_work = [one.experiment.seed for one in standings if one.at_work and not one.finished]
    return [
        f"{sum(one.finished for one in standings)}/{len(standings)}",
        f"{sum(one.rounds for one in standings)}/{sum(one.experiment.rounds for one in standings)}",
        f"seed {', '.join(map(str, at_work))}" if at_work else "",
        f"{sum(accuracies) / len(accuracies):.4f}" if accuracies else "",
    ]
