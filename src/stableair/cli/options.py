"""Options that several commands share."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from stableair.results.options import RunOptions

DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the data files (default: $STABLEAIR_DATA, else the user's cache).")
]
Device = Annotated[str | None, typer.Option(help="Device: auto, cpu, cuda, cuda:1, ...")]
Plugin = Annotated[
    list[Path] | None, typer.Option(help="Python file that registers custom components; may be repeated.")
]
PluginChanged = Annotated[
    str,
    typer.Option(
        metavar="keep|recompute",
        show_default=False,
        help="Results of a plug-in that has changed since: use them, or restart such runs (default: refuse).",
    ),
]
Stop = Annotated[
    str,
    typer.Option(
        metavar="CONDITION", help="Stop a run when this holds, such as 'test/accuracy > 0.9' or 'energy >= 1e6'."
    ),
]
Patience = Annotated[
    int, typer.Option(min=0, help="Stop a run when the monitored metric has not improved for this many rounds.")
]
Monitor = Annotated[
    str, typer.Option(metavar="METRIC", help="Metric of --patience and --keep-best (default: the accuracy).")
]
KeepBest = Annotated[
    bool, typer.Option("--keep-best", help="Also keep the model of the best round, in checkpoint.best.pt.")
]
Track = Annotated[
    list[str] | None, typer.Option(help="Also log to a tracker: tensorboard, wandb or mlflow; may be repeated.")
]
Profile = Annotated[
    bool,
    typer.Option(
        "--profile", help="Record the seconds of each step of a round and the peak memory; `run` prints them."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that were not written by stableair.")]
Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders that contain run folders.")
]


Style = Annotated[
    str,
    typer.Option(
        metavar="screen|paper|dark",
        help="paper: an IEEE column, 3.5 inches wide, in 8 pt, without title and explanations; dark: for a dark page.",
    ),
]


def out_option(help: str) -> Any:
    """Return the option -o, --out. An empty path is refused: Python would interpret it as the current folder."""
    return typer.Option("--out", "-o", parser=_path, metavar="PATH", help=help)


def seeds_option(help: str) -> Any:
    """Return the option --seeds."""
    return typer.Option(min=1, max=1000, help=help)


def _path(text: str | Path) -> Path:
    if not str(text).strip() or "\0" in str(text):
        raise typer.BadParameter("the path must not be empty")
    return Path(text)


def use_data_folder(data_dir: Path | None) -> None:
    """Set the data folder of this process and of its child processes."""
    if data_dir:
        os.environ["STABLEAIR_DATA"] = str(data_dir)


def load_plugins(files: list[Path] | None) -> None:
    """Load the files of --plugin."""
    from stableair.spec import load_plugin

    for file in files or []:
        load_plugin(file)


def plugin_change(word: str) -> Any:
    """Check the value of --plugin-changed before anything is computed."""
    from stableair.literals import PluginChange

    return literal_option("--plugin-changed", word, PluginChange)


def plot_style(word: str) -> Any:
    """Check the value of --style before anything is computed."""
    from stableair.literals import PlotStyle

    return literal_option("--style", word, PlotStyle)


def literal_option(option: str, word: str, literal: Any) -> Any:
    """Check the value of an option that takes one of the values of a Literal."""
    from typing import get_args

    from stableair.validation import choice

    return choice(option, word, get_args(literal))


def drop_unset(**options: Any) -> dict[str, Any]:
    """Return the options that are neither None nor an empty string."""
    return {name: value for name, value in options.items() if value is not None and value != ""}


def run_options(
    stop: str, patience: int, monitor: str, keep_best: bool, track: list[str] | None, profile: bool
) -> "RunOptions":
    """Return the options that observe or stop runs; the commands display the progress themselves."""
    return {
        "stop": stop, "patience": patience, "monitor": monitor, "keep_best": keep_best, "track": track or [],
        "profile": profile, "progress": False,
    }  # fmt: skip
