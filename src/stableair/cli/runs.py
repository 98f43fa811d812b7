"""The commands that compute single experiments: run, search."""

import logging
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import stableair as sa
from stableair.cli.advice import with_flag
from stableair.cli.display import ProgressDisplay, describe_length
from stableair.cli.options import (
    DataDir,
    Device,
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
from stableair.errors import StableairError
from stableair.results.callbacks import is_main_process
from stableair.validation import pluralize

if TYPE_CHECKING:
    from stableair.experiment import Experiment
    from stableair.results.run import Run
    from stableair.searches import Space

log = logging.getLogger("stableair")


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PRESET|FILE.toml] [KEY=VALUE]...",
            help="Experiment; see `stableair list presets` and `stableair list settings`.",
        ),
    ] = None,
    out: Annotated[Path | None, out_option("Run folder (default: runs/NAME).")] = None,
    seeds: Annotated[int, seeds_option("Number of runs, with the seeds seed, seed+1, ...")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue after the last complete round.")] = False,
    device: Device = None,
    engine: Annotated[str | None, typer.Option(help="Engine: auto, reference or fast.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Rounds between two checkpoints.")] = 1,
    stop: Stop = "",
    patience: Patience = 0,
    monitor: Monitor = "",
    keep_best: KeepBest = False,
    track: Track = None,
    profile: Profile = False,
    data_dir: DataDir = None,
    plugin: Plugin = None,
    plugin_changed: PluginChanged = "refuse",
) -> None:
    """Run an experiment and record it in a folder.

    Example: `stableair run digits rounds=20 noise.tau=0.3 --out runs/mac`.
    `stableair list presets` and `stableair list settings` describe the arguments.
    """
    use_data_folder(data_dir)
    load_plugins(plugin)
    from stableair.experiment import from_words
    from stableair.sweeps.plans import over_seeds

    changed = plugin_change(plugin_changed)
    base = from_words(words or []).with_(**drop_unset(device=device, engine=engine))
    runs = {run_folder(one, out, seeds): one for one in over_seeds(base, seeds)}
    options = run_options(stop, patience, monitor, keep_best, track, profile)
    if is_main_process():
        for folder, experiment in runs.items():
            point = sa.resume_point(folder, experiment, resume, changed)  # refuse all runs if one of them is refused
            if point.rounds >= experiment.rounds and not point.diverged:
                done = pluralize(point.rounds, "round")
                log.info("%s is complete with %s; increase rounds to continue", folder, done)
    for folder, experiment in runs.items():
        with ExitStack() as stack:
            stack.enter_context(advise_on_stopped_run(list(runs)))
            display = stack.enter_context(SeedDisplay(every_round=True))
            result = sa.run(
                experiment, folder, resume=resume, checkpoint_every=checkpoint_every, plugin_changed=changed,
                callbacks=[display], **options,
            )  # fmt: skip
        if profile:
            print_profile(result)


@contextmanager
def advise_on_stopped_run(folders: list[Path]) -> Iterator[None]:
    """Print how to continue if the user stops the block; a run that has recorded nothing has no folder.

    Args:
        folders: The folders of all runs of the command, in their order.
    """
    try:
        yield
    except (KeyboardInterrupt, BrokenPipeError):
        started = [folder for folder in folders if folder.exists()]
        complete = f"{started[-1]} holds every complete round; continue with --resume" if started else ""
        with advise_on_stop(complete or "nothing was recorded; run the same command again"):
            raise


def print_profile(result: "Run") -> None:
    """Print the mean duration of each step of a round, and the peak memory."""
    from rich.console import Console
    from rich.table import Table

    from stableair.results.profiling import PEAK, profile_rows

    table = Table("step", "seconds per round", "share")
    for step, seconds, share in profile_rows(result):
        table.add_row(step, f"{seconds:.4f}", f"{100 * share:.1f} %")
    Console().print(table)
    peaks = [row[PEAK] for row in result.rounds if row.get(PEAK) is not None]
    if peaks:
        print(f"peak memory: {max(peaks):,.0f} MB")


def run_folder(experiment: "Experiment", out: Path | None, seeds: int) -> Path:
    """Return the folder of a run; with several seeds, each run has a subfolder."""
    if out is None:
        return Path("runs") / experiment.name
    return out / f"seed{experiment.seed}" if seeds > 1 else out


class SeedDisplay(ProgressDisplay):
    """The progress of runs that differ only in the seed."""

    def title(self, experiment: "Experiment") -> str:
        return f"seed {experiment.seed}"

    def end(self, experiment: "Experiment", outcome: "Run | StableairError") -> None:
        if not isinstance(outcome, StableairError):  # main() prints the error
            super().end(experiment, outcome)


def search(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PRESET|FILE.toml] [KEY=VALUE]... KEY=LOW:HIGH[:log|:int]...",
            help="The experiment and the settings to search, such as receiver.C=0.01:10:log or local_epochs=1,2,5.",
        ),
    ],
    trials: Annotated[int, typer.Option(min=1, help="Number of trials.")] = 12,
    seeds: Annotated[int, seeds_option("Number of seeds per trial.")] = 1,
    out: Annotated[Path | None, out_option("Folder of the search (default: runs/search-NAME).")] = None,
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
    """Search the best values of settings on a validation split; the test data are not used.

    Example: `stableair search digits rounds=20 receiver.C=0.01:10:log`.
    Append :log or :int to a range if needed; separate single values by commas.
    """
    use_data_folder(data_dir)
    load_plugins(plugin)
    from stableair.experiment import from_words
    from stableair.searches import RESULT

    changed = plugin_change(plugin_changed)
    settings, spaces = separate_spaces(words)
    base = from_words([*settings, *first_values(settings, spaces)]).with_(**drop_unset(device=device))
    with advise_on_stop("the same command continues from here"), TrialDisplay(list(spaces)) as display:
        result = sa.search(
            base, spaces, out, trials=trials, seeds=seeds, plugin_changed=changed, callbacks=[display],
            **run_options(stop, patience, monitor, keep_best, track, profile),
        )  # fmt: skip
    assert result.folder is not None
    print(f"best: {result.winner}")
    command = ["stableair", "run", *settings, *(f"{key}={value}" for key, value in result.winner.values.items())]
    options: list[tuple[str, Path | str | None]] = [("--plugin", file) for file in plugin or []]
    options += [("--data-dir", data_dir), ("--device", device)]
    for option, value in options:
        if value:
            command += [option, str(value)]
    print(shlex.join(command))
    print(result.folder / RESULT)
    result.plot(result.folder / "search.png")
    print(result.folder / "search.png")


class TrialDisplay(ProgressDisplay):
    """The progress of the trials of a search."""

    def __init__(self, keys: list[str]):
        super().__init__()
        self.fields = list(dict.fromkeys(key.partition(".")[0] for key in keys))

    def title(self, experiment: "Experiment") -> str:
        values = [f"{field}={getattr(experiment, field)}" for field in self.fields]
        return "  ".join([*values, f"seed {experiment.seed}"])

    def result(self, experiment: "Experiment", outcome: "Run | StableairError") -> str:
        if isinstance(outcome, StableairError):
            return f"{self.title(experiment)}  failed: {with_flag(outcome)}"
        rounds = describe_length(outcome, experiment)
        return f"{self.title(experiment)}  {rounds}, validation accuracy {outcome.settled('validation/accuracy'):.4f}"


def separate_spaces(words: list[str]) -> tuple[list[str], dict[str, "Space"]]:
    """Split the arguments into settings of the experiment and spaces to search."""
    from stableair.experiment import last_of_each
    from stableair.searches import space

    settings: list[str] = []
    spaces: dict[str, Space] = {}
    for word in last_of_each(words):
        key, _, text = word.partition("=")
        if parsed := space(key, text):
            spaces[key] = parsed
        else:
            settings.append(word)
    return settings, spaces


def first_values(settings: list[str], spaces: dict[str, "Space"]) -> list[str]:
    """Return a first value for each searched argument of a component that the settings name without arguments.

    For example, receiver=mac is valid only with a value of C.
    """
    named = {key for key, _, text in (word.partition("=") for word in settings) if text.isidentifier()}
    return [f"{key}={one.ends()[0]}" for key, one in spaces.items() if key.partition(".")[0] in named - {key}]
