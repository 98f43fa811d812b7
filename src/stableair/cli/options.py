"""Options that several commands share, and what they do."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

DataDir = Annotated[
    Path | None, typer.Option(help="Where the data files are (default: $STABLEAIR_DATA, else the user's cache).")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Plugin = Annotated[list[Path] | None, typer.Option(help="A Python file that registers components of your own.")]
Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders that hold some.")]


def place(help: str, *names: str) -> Any:
    """The option --out; an empty text is no path, though Python takes it for the current folder."""
    return typer.Option("--out", *names, parser=_path, metavar="PATH", help=help)


def _path(text: str | Path) -> Path:
    if not str(text).strip() or "\0" in str(text):
        raise typer.BadParameter("it must not be empty")
    return Path(text)


def use_data_folder(data_dir: Path | None) -> None:
    """Make the folder the one of this process and of what it starts."""
    if data_dir:
        os.environ["STABLEAIR_DATA"] = str(data_dir)


def load_plugins(files: list[Path] | None) -> None:
    from stableair.spec import load_plugin

    for file in files or []:
        load_plugin(file)


def given(**options: Any) -> dict[str, Any]:
    """The options that were given a value; an empty text is none."""
    return {name: value for name, value in options.items() if value is not None and value != ""}
