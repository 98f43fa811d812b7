"""Atomic writes: a reader sees the old content of a file or the new content, never a part."""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def write_whole(
    path: str | Path, content: bytes | memoryview | Callable[[BinaryIO], object], *, dir_fd: int | None = None
) -> Path:
    """Replace a file as a whole: a reader sees the old content or the new content, never a part.

    The new content is written to a temporary file in the same folder, flushed to the disk and renamed. If anything
    fails, the old file stays and the temporary file is removed.

    Args:
        path: The file.
        content: The new content, or a function that writes it into an open file.
        dir_fd: Descriptor of the folder of the file, to write there even if the path has been replaced.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}.tmp")
    source, target = (temporary, path) if dir_fd is None else (Path(temporary.name), Path(path.name))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with attach_filename(path):
        descriptor = os.open(source, flags, 0o666, dir_fd=dir_fd)  # the umask restricts the permissions
        try:
            with open(descriptor, "wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(source, dir_fd=dir_fd)
            raise
    return path


def remove_leftovers(folder: Path, older: float = 0.0) -> None:
    """Remove the temporary files of killed processes that `write_whole` left in a folder.

    Args:
        folder: The folder.
        older: Minimum age of the files, in seconds.
    """
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):
            if re.search(r"\.[0-9a-f]{8}\.tmp$", path.name) and time.time() - path.lstat().st_mtime >= older:
                path.unlink()


@contextmanager
def attach_filename(path: Path) -> Iterator[None]:
    """Add the name of this file to an error of the operating system, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno:
            error.filename = str(path)
        raise
