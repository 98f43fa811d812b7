"""Checks of output files: pictures, pages and tables never overwrite a file of a run.

stableair records itself as the generator of each file: in the metadata of a picture or a Parquet table, in the
generator tag of a page, in a comment of a LaTeX table, or below a caption. A CSV table has no comments; its first
columns identify it. Files of stableair may be overwritten; overwriting any other file requires `force`.
"""

import os
import re
from pathlib import Path

from stableair import __version__
from stableair.errors import InputError
from stableair.results.checksums import BEST, CHECKPOINT, CLIENTS, ENVIRONMENT, EXPERIMENT, PREVIOUS, ROUNDS
from stableair.results.lock import LOCK

GENERATOR = f"stableair {__version__}"
METADATA = {  # metadata for Figure.savefig by format; other formats have no field for the generator
    "png": {"Software": GENERATOR},
    **{name: {"Creator": GENERATOR} for name in ("pdf", "svg", "ps", "eps")},
}
RUN_FILES = EXPERIMENT, ENVIRONMENT, CLIENTS, ROUNDS, CHECKPOINT, PREVIOUS, BEST, LOCK
SEARCHED_BYTES = 2**16  # at the start and at the end of a file, where the generator is searched

_DAMAGED = re.compile(r"checkpoint\.damaged\.\d+\.pt")
_GENERATED = re.compile(
    rb'(?:Software\0|/Creator \(|%%Creator: |<dc:title>|"generator" content="|"generator": "|Drawn by |\A% )'
    rb"stableair \d|\A(?:run folder|channel,receiver,accuracy),"
)


def check_output(path: Path, force: bool = False) -> Path:
    """Check that a file may be written, and return its path.

    Args:
        path: The file. It need not exist.
        force: Whether to replace a file that was not written by stableair.

    Raises:
        InputError: The path is a file of a run (`run-file`), an existing file that was not written by stableair
            (`file-exists`), or a folder or device (`cannot-write`), or its folder cannot be written (`cannot-write`).
    """
    _check_folder(path)
    if path.exists() and not path.is_file():
        text = f"cannot write {path}: it is {'a folder' if path.is_dir() else 'not a plain file'}"
        raise InputError(text, code="cannot-write", hint="folder", path=path)
    check_no_run_file(path)
    if path.exists() and not force and not _is_generated(path):
        text = f"{path} exists and was not written by stableair"
        raise InputError(text, code="file-exists", hint="force", advice="force=True replaces it", path=path)
    return path


def _check_folder(path: Path) -> None:
    """Refuse a file whose folder is a file or may not be changed; missing folders will be created."""
    folder = next((one for one in path.absolute().parents if os.path.lexists(one)), path)
    if not folder.is_dir():
        problem = f"{folder} is not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"no permission to write in {folder}"
    else:
        return
    raise InputError(f"cannot write {path}: {problem}", code="cannot-write", path=path)


def check_no_run_file(path: Path) -> None:
    """Refuse a path that is a file of a run folder, or a link to such a file.

    Raises:
        InputError: The path is a file of a run (`run-file`).
    """
    for file in (path.absolute(), path.resolve()):
        if not file.name:  # the root folder
            continue
        names = [name for name in RUN_FILES if file.name == name or _is_same(file, file.with_name(name))]
        is_run_folder = any(file.with_name(name).exists() for name in (EXPERIMENT, ROUNDS))
        if is_run_folder and (names or _DAMAGED.fullmatch(file.name)):
            text = f"cannot write {path}: it is a file of the run in {file.parent}; choose another name"
            raise InputError(text, code="run-file", path=path)


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two paths are the same file, also through links or on file systems that ignore case."""
    return one.exists() and other.exists() and one.samefile(other)


def _is_generated(path: Path) -> bool:
    """Return whether a file was written by stableair."""
    with open(path, "rb") as file:
        start = file.read(SEARCHED_BYTES)
        file.seek(max(0, path.stat().st_size - SEARCHED_BYTES))
        return bool(_GENERATED.search(start) or _GENERATED.search(file.read()))
