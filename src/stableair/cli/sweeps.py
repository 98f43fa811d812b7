"""The commands that compute many experiments: sweep, compare."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import stableair as sa
from stableair.cli.display import EngineDisplay, ProgressDisplay, duration
from stableair.cli.options import (
    DataDir,
    Device,
    Force,
    KeepBest,
    Monitor,
    Patience,
    Plugin,
    PluginChanged,
    Profile,
    Stop,
    Track,
    drop_unset,
    load_plugins,
    out_option,
    plugin_change,
    run_options,
    seeds_option,
    use_data_folder,
)
from stableair.cli.stopping import advise_on_stop
from stableair.errors import InputError
from stableair.validation import pluralize

if TYPE_CHECKING:
    from rich.table import Table

    from stableair.experiment import Experiment
    from stableair.results.comparison import Comparison
    from stableair.sweeps.workers import ExperimentProgress, SweepProgress

ADVICE = "every complete round is recorded; the same command continues from there"
Parallel = Annotated[int, typer.Option(min=1, max=1000, help="Number of worker processes.")]
SlurmOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Option of the SLURM jobs, such as partition=gpu or time=120 (minutes); may be repeated.",
    ),
]
Ray = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Run on the Ray cluster at this address, or auto.")]


def sweep(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PLAN.toml|PRESET] [KEY=VALUE[,VALUE]...]...",
            help="Experiments to run: every combination of the values of the settings.",
        ),
    ],
    out: Annotated[Path, out_option("Folder of the run folders.")] = Path("runs"),
    seeds: Annotated[int | None, seeds_option("Number of seeds per experiment: seed, seed+1, ...")] = None,
    parallel: Parallel = 1,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit an array of --parallel SLURM jobs instead.")] = False,
    slurm_option: SlurmOption = None,
    ray: Ray = None,
    cpus: Annotated[float, typer.Option(min=0, help="CPUs per Ray task.")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs per Ray task, such as 0.5.")] = 0,
    stop: Stop = "",
    patience: Patience = 0,
    monitor: Monitor = "",
    keep_best: KeepBest = False,
    track: Track = None,
    profile: Profile = False,
    device: Device = None,
    data_dir: DataDir = None,
    plugin: Plugin = None,
    plugin_changed: PluginChanged = "refuse",
) -> None:
    """Run all combinations of settings: in several processes, on several machines, or on a cluster.

    Example: `stableair sweep 'receiver=mac(C=1),none()' --seeds 3`.
    The same command on a machine with the same disk shares the work.
    """
    use_data_folder(data_dir)
    load_plugins(plugin)
    from stableair.sweeps.plans import expand_plan, parse_plan

    check_cluster(slurm, slurm_option, ray)
    changed = plugin_change(plugin_changed)
    options = run_options(stop, patience, monitor, keep_best, track, profile)
    experiments = expand_plan(parse_plan(words) | drop_unset(seeds=seeds, device=device))
    if slurm:
        job_options = slurm_options(slurm_option or [])
        job = sa.submit(experiments, out, jobs=parallel, options=job_options, plugin_changed=changed, **options)
        print(f"SLURM job {job}, an array of {parallel}: its logs go to {out / 'slurm'}")
        return
    with advise_on_stop(ADVICE), sweep_display(experiments, out) as display:
        sa.sweep(experiments, out, parallel=parallel, ray=ray, cpus=cpus, gpus=gpus, plugin_changed=changed,
                 callbacks=[display], **options)  # fmt: skip
    print(f"{pluralize(len(experiments), 'experiment')} in {out}; stableair report {out} writes a page about them")


def check_cluster(slurm: bool, slurm_option: list[str] | None, ray: str | None) -> None:
    """Refuse --slurm together with --ray, and options of SLURM without --slurm."""
    if slurm and ray:
        raise InputError("choose one of --slurm and --ray", code="slurm-and-ray")
    if slurm_option and not slurm:
        raise InputError("--slurm-option needs --slurm", code="slurm-option")


def slurm_options(words: list[str]) -> dict[str, Any]:
    """Return the values of --slurm-option by name."""
    from stableair.experiment import parse_overrides
    from stableair.spec import literal

    return {key: literal(text) for key, text in parse_overrides(words).items()}


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PLAN.toml|PRESET] [KEY=VALUE[,VALUE]...]... | DIR...",
            help="Receivers and channels, such as receiver='mac(C=1),none()' noise.tau=0.1,0.5; or folders of runs.",
        ),
    ],
    out: Annotated[Path, out_option("Folder of the run folders.")] = Path("runs/compare"),
    seeds: Annotated[int | None, seeds_option("Number of seeds, shared by all experiments (default: 5).")] = None,
    equal: Annotated[
        str | None,
        typer.Option(
            metavar="symbols|airtime|energy|energy_max|bits",
            help="Give every run the same budget of a resource instead of equal rounds, in one table.",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Budget of --equal; runs stop when they have used it (default: the smallest total of a run)."
        ),
    ] = None,
    parallel: Parallel = 1,
    table: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Also write the table: .tex (booktabs), .csv or .parquet.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TEXT",
            help="Text of a receiver or a channel in a .tex table, such as 'mac(C=1)=MAC, $C = 1$'; may be repeated.",
        ),
    ] = None,
    force: Force = False,
    stop: Stop = "",
    patience: Patience = 0,
    monitor: Monitor = "",
    keep_best: KeepBest = False,
    track: Track = None,
    profile: Profile = False,
    device: Device = None,
    data_dir: DataDir = None,
    plugin: Plugin = None,
    plugin_changed: PluginChanged = "refuse",
) -> None:
    """Compare receivers over channels with paired seeds: accuracy, differences, intervals, p-values.

    Example: `stableair compare 'receiver=mac(C=1),none()' noise.tau=0.1,0.5`.
    Folders of runs are compared without computing anything.
    """
    use_data_folder(data_dir)
    load_plugins(plugin)
    from stableair.comparisons import comparison_plan
    from stableair.experiment import PRESETS
    from stableair.results.table import check_table
    from stableair.sweeps.plans import parse_plan

    if table:
        check_table(table, force)
    if label and (table is None or table.suffix != ".tex"):
        raise InputError("--label needs --table with a .tex file", code="label-without-table")
    changed = plugin_change(plugin_changed)
    options = run_options(stop, patience, monitor, keep_best, track, profile)
    if words[0] not in PRESETS and Path(words[0]).is_dir():
        compared = sa.compare(words, seeds=seeds, equal=equal, budget=budget, **options)
        print_comparison(compared, table, label or [], force)
        return
    experiments = comparison_plan(parse_plan(words, "a folder of runs") | drop_unset(device=device), seeds, equal)
    with advise_on_stop(ADVICE), sweep_display(experiments, out) as display:
        comparison = sa.compare(
            experiments, out, equal=equal, budget=budget, parallel=parallel, plugin_changed=changed,
            callbacks=[display], **options,
        )  # fmt: skip
    print_comparison(comparison, table, label or [], force)


def print_comparison(comparison: "Comparison", table: Path | None, labels: list[str], force: bool) -> None:
    """Print the tables of a comparison, and write them to a file if requested."""
    print(comparison)
    if table:
        print(comparison.save(table, labels=parse_labels(labels, comparison), force=force))


def parse_labels(words: list[str], comparison: "Comparison") -> dict[str, str]:
    """Return the texts of --label by name. Names may contain `=`, so a word is compared with the known names."""
    from stableair.results.comparison import by_spelling

    names = [*comparison.lines, *(line.receiver for lines in comparison.lines.values() for line in lines)]
    labels = {}
    for word in words:
        name = next((name for name in by_spelling(names) if word.startswith(f"{name}=")), word.rpartition("=")[0])
        labels[name] = word.removeprefix(f"{name}=")
    return labels


@contextmanager
def sweep_display(experiments: "list[Experiment]", folder: Path) -> Iterator[EngineDisplay]:
    """Show a live table of all experiments on a terminal; elsewhere print a line for each finished experiment."""
    if not (sys.stdout and sys.stdout.isatty()):
        with ProgressDisplay(total=len(experiments)) as display:
            yield display
        return
    from rich.console import Console
    from rich.live import Live

    from stableair.results.grouping import group
    from stableair.results.run import Run
    from stableair.sweeps.workers import SweepProgress

    progress, console = SweepProgress(experiments, folder), Console()
    groups = group([Run(one.to_record(), []) for one in experiments])
    settings = {label: [run.experiment.name for run in runs] for label, runs in groups.items()}
    with Live(
        console=console,
        get_renderable=lambda: progress_table(settings, progress, console.height),
        refresh_per_second=1,
    ):
        yield EngineDisplay()


def progress_table(settings: dict[str, list[str]], progress: "SweepProgress", height: int) -> "Table":
    """Return a table of the progress of a sweep, one row per setting; running settings have priority.

    Args:
        settings: Names of the experiments by the label of their setting.
        progress: Progress of the experiments.
        height: Lines of the terminal, which limit the rows.
    """
    from rich.table import Table

    by_name = {one.experiment.name: one for one in progress.refresh()}
    rows = {label: [by_name[name] for name in names] for label, names in settings.items()}
    fitting = max(1, height - 6)
    if len(rows) > fitting:
        rows = dict(sorted(rows.items(), key=lambda row: _priority(row[1]))[:fitting])
    caption = [f"{sum(one.finished for one in by_name.values())} of {len(by_name)} finished"]
    if left := _seconds_left(list(by_name.values())):
        caption.append(f"about {duration(left)} left")
    if hidden := len(settings) - len(rows):
        caption.append(f"{pluralize(hidden, 'setting')} not shown")
    table = Table("", "finished", "rounds", "running", "accuracy", "time per round", caption=", ".join(caption))
    for label, experiments in rows.items():
        table.add_row(label, *_cells(experiments))
    return table


def _priority(experiments: "list[ExperimentProgress]") -> int:
    """Return the sorting key of a setting: 0 if it is running, 1 if it is waiting, 2 if it is finished."""
    return 0 if any(one.running for one in experiments) else 1 + all(one.finished for one in experiments)


def _seconds_left(experiments: "list[ExperimentProgress]") -> float:
    """Estimate the remaining time from the mean duration of the last rounds and the number of running processes."""
    seconds = [one.row["seconds"] for one in experiments if one.row.get("seconds")]
    left = sum(one.experiment.rounds - one.rounds for one in experiments if not one.finished)
    processes = sum(one.running and not one.finished for one in experiments)
    return left * sum(seconds) / len(seconds) / processes if seconds and processes else 0.0


def _cells(experiments: "list[ExperimentProgress]") -> list[str]:
    metrics = [(one.row, f"{one.experiment.evaluate}/accuracy") for one in experiments if one.rounds]
    accuracies = [row[metric] for row, metric in metrics if row.get(metric) is not None]
    running = [one.experiment.seed for one in experiments if one.running and not one.finished]
    seconds = [one.row["seconds"] for one in experiments if one.row.get("seconds")]
    return [
        f"{sum(one.finished for one in experiments)}/{len(experiments)}",
        f"{sum(one.rounds for one in experiments)}/{sum(one.experiment.rounds for one in experiments)}",
        f"seed {', '.join(map(str, running))}" if running else "",
        f"{sum(accuracies) / len(accuracies):.4f}" if accuracies else "",
        duration(sum(seconds) / len(seconds)) if seconds else "",
    ]
