"""The lock of a run folder: one process at a time writes into it."""

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
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

from stableair.errors import InputError, ResourceError, RunBusyError
from stableair.files import attach_filename, write_whole

log = logging.getLogger("stableair")

LOCK = ".lock"
ATTEMPTS = 100  # to lock a folder while other processes remove it
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True)
class LockedFolder:
    """A run folder locked by this process; all writes go through it.

    A lock belongs to a file, not to a path: if the folder is deleted or replaced, another process can lock the
    new folder at the same path. So files are opened relative to the descriptor of the locked folder, and each write
    first checks that the lock file at the path is still the one that this process holds.

    Args:
        path: The folder, as an absolute path.
        lock: Descriptor of the lock file.
        directory: Descriptor of the folder; None on Windows, where files are opened by their path.
    """

    path: Path
    lock: int
    directory: int | None

    def is_in_place(self) -> bool:
        """Whether the lock file at the path is the one that this process holds."""
        try:
            return os.path.samestat(os.fstat(self.lock), os.stat(self.path / LOCK, follow_symlinks=False))
        except OSError:
            return False

    def check(self) -> None:
        """Refuse to write into a folder that was deleted, moved or replaced.

        Raises:
            ResourceError: The lock file at the path is not the one that this process holds (`folder-replaced`).
        """
        if not self.is_in_place():
            text = f"{self.path} was deleted, moved or replaced while this process was writing to it: the run stops"
            raise ResourceError(text, code="folder-replaced", path=str(self.path))

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Replace a file as a whole."""
        with self._checked(name):
            write_whole(self.path / name, content, dir_fd=self.directory)

    def append(self, name: str, line: bytes) -> None:
        """Append a line to an existing file and wait until it is on the disk."""
        with self._checked(name):
            descriptor = os.open(self._file(name), os.O_WRONLY | os.O_APPEND | NOFOLLOW, dir_fd=self.directory)
            with open(descriptor, "ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())

    def rename(self, old: str, new: str) -> None:
        """Rename a file; a file with the new name is replaced."""
        with self._checked(old):
            os.replace(self._file(old), self._file(new), src_dir_fd=self.directory, dst_dir_fd=self.directory)

    def remove(self, *names: str) -> None:
        """Remove the files that exist."""
        for name in names:
            with self._checked(name), suppress(FileNotFoundError):
                os.unlink(self._file(name), dir_fd=self.directory)

    def _file(self, name: str) -> str | Path:
        return self.path / name if self.directory is None else name

    @contextmanager
    def _checked(self, name: str) -> Iterator[None]:
        """Check the folder before a file is changed; add the file's name to system errors."""
        self.check()
        with attach_filename(self.path / name):
            try:
                yield
            except FileNotFoundError:
                self.check()  # the folder was removed after the first check
                raise


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before anything is computed.

    Raises:
        InputError: The folder, or its nearest existing parent, is not a writable folder.
    """
    nearest = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        text = f"cannot write to {folder}: {nearest} is not a writable folder"
        raise InputError(text, code="not-writable", hint="folder", path=str(folder))


@contextmanager
def locked(folder: Path) -> Iterator[LockedFolder]:
    """Create the folder and lock it against other processes; remove it afterwards if it is empty.

    Raises:
        InputError: The folder cannot be written to.
        RunBusyError: Another process holds the lock.
    """
    check_writable(folder)
    for attempt in itertools.count():
        try:
            created = _create(folder)
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | NOFOLLOW, 0o666)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and attempt < ATTEMPTS:
                continue  # the process that created the folder has just removed it
            text = f"cannot write to {folder}: {error.strerror}"  # not detected by check_writable
            raise InputError(text, code="not-writable", hint="folder", path=str(folder)) from None
        try:
            _lock(descriptor, folder)
            with _opened(folder) as directory:
                holder = LockedFolder(folder.absolute(), descriptor, directory)
                if holder.is_in_place():  # otherwise the process that held the lock has just removed it: try again
                    try:
                        yield holder
                        return
                    finally:
                        _release(holder, created)
        finally:
            os.close(descriptor)
        if attempt >= ATTEMPTS:
            text = f"cannot keep a lock file in {folder}: its file system gives it a new identity each time"
            raise ResourceError(text, code="folder-replaced", path=str(folder))


@contextmanager
def _opened(folder: Path) -> Iterator[int | None]:
    """The descriptor of a folder; None on Windows, which cannot open folders."""
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
    """Remove the lock file, and the created folders that are empty; leave a folder that replaced this one alone."""
    if not holder.is_in_place():
        return
    holder.remove(LOCK)
    with suppress(OSError):  # not empty
        for path in created:
            path.rmdir()


def has_locks(folder: Path) -> bool:
    """Whether the disk of an existing folder supports locks."""
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
    """Create a folder and its parents; return the created folders, innermost first."""
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
