"""Files written whole: whoever reads one, whenever, sees the old content or the new, and never a part."""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def write_whole(path: str | Path, content: bytes | memoryview | Callable[[BinaryIO], object]) -> Path:
    """Replace a file by the content, or by what a function writes into the file it is handed.

    The new content stands beside the old one, under a name that nobody else has, until it is complete and on the disk.
    Whatever goes wrong, the old file stays and nothing is left beside it.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}.tmp")
    fresh = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with naming(path):
        descriptor = os.open(temporary, fresh, 0o666)  # as readable as the umask lets it be, like its neighbours
        try:
            with open(descriptor, "wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return path


def remove_leftovers(folder: Path, older: float = 0.0) -> None:
    """Remove what `write_whole` left behind where its process was killed, so many seconds ago or more."""
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):
            if re.search(r"\.[0-9a-f]{8}\.tmp$", path.name) and time.time() - path.lstat().st_mtime >= older:
                path.unlink()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of the system in here, such as a full disk, is about this file."""
    try:
        yield
    except OSError as error:
        if error.errno:
            error.filename = str(path)
        raise
