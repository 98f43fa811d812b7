"""Options that several commands share."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the data files (default: $STABLEAIR_DATA, else the user's cache).")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Plugin = Annotated[list[Path] | None, typer.Option(help="A Python file that registers your components.")]
PluginChanged = Annotated[
    str,
    typer.Option(
        metavar="keep|recompute",
        show_default=False,
        help="Use the results of a plug-in that has changed since, or restart such runs (default: refuse).",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that stableair has not made.")]
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
    """The option -o, --out. An empty path is rejected: Python would interpret it as the current folder."""
    return typer.Option("--out", "-o", parser=_path, metavar="PATH", help=help)


def _path(text: str | Path) -> Path:
    if not str(text).strip() or "\0" in str(text):
        raise typer.BadParameter("it must not be empty")
    return Path(text)


def use_data_folder(data_dir: Path | None) -> None:
    """Set the data folder of this process and of its child processes."""
    if data_dir:
        os.environ["STABLEAIR_DATA"] = str(data_dir)


def load_plugins(files: list[Path] | None) -> None:
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
