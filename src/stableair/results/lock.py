"""Locks of run folders: only one process at a time can write to a run folder."""

import itertools
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

from stableair.errors import InputError, ResourceError, RunBusyError
from stableair.files import attach_filename, write_whole

log = logging.getLogger("stableair")

LOCK = ".lock"
ATTEMPTS = 100  # attempts to lock a folder that other processes remove at the same time
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True)
class LockedFolder:
    """A run folder locked by this process; all writes go through it.

    A lock belongs to a file, not to a path. If the folder is deleted or replaced, another process can lock the new
    folder at the same path. Therefore all files are opened relative to the descriptor of the locked folder. Each write
    first checks that the lock file at the path is still the file that this process has locked.

    Args:
        path: The folder, as an absolute path.
        lock: Descriptor of the lock file.
        directory: Descriptor of the folder; None on Windows, where files are opened by path.
    """

    path: Path
    lock: int
    directory: int | None

    def is_in_place(self) -> bool:
        """Return whether the lock file at the path is the file that this process has locked."""
        try:
            return os.path.samestat(os.fstat(self.lock), os.stat(self.path / LOCK, follow_symlinks=False))
        except OSError:
            return False

    def check(self) -> None:
        """Refuse to write to a folder that was deleted, moved or replaced.

        Raises:
            ResourceError: The lock file at the path is not the file that this process has locked (`folder-replaced`).
        """
        if not self.is_in_place():
            text = f"{self.path} was deleted, moved or replaced while this process was writing to it: the run stops"
            raise ResourceError(text, code="folder-replaced", path=str(self.path))

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a whole file atomically; an existing file is replaced."""
        with self._checked(name):
            write_whole(self.path / name, content, dir_fd=self.directory)

    def append(self, name: str, line: bytes) -> None:
        """Append a line to an existing file, and wait until the line is on the disk."""
        with self._checked(name):
            descriptor = os.open(self._file(name), os.O_WRONLY | os.O_APPEND | NOFOLLOW, dir_fd=self.directory)
            with open(descriptor, "ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())

    def rename(self, old: str, new: str) -> None:
        """Rename a file; an existing file with the new name is replaced."""
        with self._checked(old):
            os.replace(self._file(old), self._file(new), src_dir_fd=self.directory, dst_dir_fd=self.directory)

    def remove(self, *names: str) -> None:
        """Remove files; missing files are ignored."""
        for name in names:
            with self._checked(name), suppress(FileNotFoundError):
                os.unlink(self._file(name), dir_fd=self.directory)

    def _file(self, name: str) -> str | Path:
        return self.path / name if self.directory is None else name

    @contextmanager
    def _checked(self, name: str) -> Iterator[None]:
        """Check the folder before a file is changed, and add the file's name to system errors."""
        self.check()
        with attach_filename(self.path / name):
            try:
                yield
            except FileNotFoundError:
                self.check()  # the folder was removed after the first check
                raise


def check_writable(folder: Path) -> None:
    """Refuse a folder that is not writable, before any computation.

    Raises:
        InputError: The folder, or its nearest existing parent, is not a writable folder (`not-writable`).
    """
    nearest = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        text = f"cannot write to {folder}: {nearest} is not a writable folder"
        raise InputError(text, code="not-writable", hint="folder", path=str(folder))


@contextmanager
def locked(folder: Path) -> Iterator[LockedFolder]:
    """Create a folder if needed and lock it against other processes; finally remove it if it is new and empty.

    Args:
        folder: The run folder.

    Yields:
        The locked folder.

    Raises:
        InputError: The folder is not writable (`not-writable`).
        RunBusyError: Another process has locked the folder.
        ResourceError: The file system does not support lock files (`folder-replaced`).
    """
    check_writable(folder)
    for attempt in itertools.count():
        try:
            created = _create(folder)
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | NOFOLLOW, 0o666)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and attempt < ATTEMPTS:
                continue  # the process that created the folder has just removed it
            text = f"cannot write to {folder}: {error.strerror}"  # check_writable cannot detect every reason
            raise InputError(text, code="not-writable", hint="folder", path=str(folder)) from None
        try:
            _lock(descriptor, folder)
            with _opened(folder) as directory:
                holder = LockedFolder(folder.absolute(), descriptor, directory)
                if holder.is_in_place():  # else the previous holder has just removed the file: try again
                    try:
                        yield holder
                        return
                    finally:
                        _release(holder, created)
        finally:
            os.close(descriptor)
        if attempt >= ATTEMPTS:
            text = f"cannot lock {folder}: its file system changes the identity of the lock file; use another disk"
            raise ResourceError(text, code="folder-replaced", path=str(folder))


@contextmanager
def _opened(folder: Path) -> Iterator[int | None]:
    """Open a folder and yield its descriptor; yield None on Windows, which cannot open folders."""
    if os.open not in os.supports_dir_fd:
        yield None
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # just removed
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _release(holder: LockedFolder, created: list[Path]) -> None:
    """Remove the lock file and the created folders that are empty; do not touch a folder that replaced this one."""
    if not holder.is_in_place():
        return
    holder.remove(LOCK)
    with suppress(OSError):  # not empty
        for path in created:
            path.rmdir()


def has_locks(folder: Path) -> bool:
    """Return whether the file system of an existing folder supports file locks."""
    if fcntl is None:
        return False
    with tempfile.NamedTemporaryFile(dir=folder, prefix=LOCK) as file:
        return _supports_locks(file.fileno())


def _supports_locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return True


def _create(folder: Path) -> list[Path]:
    """Create a folder and its missing parents; return the created folders, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _lock(descriptor: int, folder: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = f"another process is writing to {folder}; wait for it to exit"
        raise RunBusyError(text, hint="folder", path=str(folder)) from None
    except OSError:
        log.warning("%s is on a disk without file locks: make sure that only one process writes there", folder)
