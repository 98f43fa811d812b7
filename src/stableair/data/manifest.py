"""Manifest of a local image folder: size, modification time and SHA-256 of each file.

The data file of a local folder is created once. The manifest shows whether the folder has changed since then.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

# Extensions of the files that the hub's library reads from an image folder.
TABLES = ".parquet", ".arrow"
ARCHIVES = ".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"
IMAGES = (
    ".apng", ".blp", ".bmp", ".bufr", ".bw", ".cur", ".dcx", ".dds", ".dib", ".emf", ".eps", ".fit", ".fits", ".flc",
    ".fli", ".ftc", ".ftu", ".gbr", ".gif", ".grib", ".icb", ".icns", ".ico", ".iim", ".im", ".j2c", ".j2k", ".jfif",
    ".jp2", ".jpc", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx", ".mpeg", ".mpg", ".msp", ".pbm", ".pcd", ".pcx", ".pgm",
    ".png", ".pnm", ".ppm", ".ps", ".psd", ".pxr", ".ras", ".rgb", ".rgba", ".sgi", ".tga", ".tif", ".tiff", ".vda",
    ".vst", ".webp", ".wmf", ".xbm", ".xpm",
)  # fmt: skip
READABLE = (*TABLES, *ARCHIVES, *IMAGES)
LABELS = "metadata.csv", "metadata.jsonl", "metadata.parquet", "README.md"  # files with the labels or the splits

Manifest = dict[str, tuple[int, int, str]]  # relative path: size in bytes, modification time in ns, SHA-256


def manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder; this reads every file."""
    return {name: (*_size_and_time(path), sha256(path)) for name, path in sorted(_files(folder))}


def first_change(recorded: Manifest, folder: Path, contents: bool = False) -> str | None:
    """Compare a folder with its manifest.

    Args:
        recorded: The manifest.
        folder: The folder.
        contents: Whether to compare the SHA-256 of each file too; this reads every file.

    Returns:
        The first difference, such as "cat/3.png was added", or None.
    """
    present = dict(_files(folder))
    for name in sorted(recorded.keys() | present.keys()):
        if name not in recorded:
            return f"{name} was added"
        if name not in present:
            return f"{name} was removed"
        size, time, digest = recorded[name]
        if _size_and_time(present[name]) != (size, time) or (contents and sha256(present[name]) != digest):
            return f"{name} was modified"
    return None


def ignored_folders(folder: Path) -> list[str]:
    """Return the folders of classes without samples: innermost folders without images, and links to other folders.

    The hub's library does not follow links to folders.
    """
    with_images = {path.parent for _, path in _files(folder)}
    parents = [Path(parent, name) for parent, folders, _ in _walk(folder) for name in folders]
    inner = (path for path in parents if path.is_symlink() or not any(entry.is_dir() for entry in path.iterdir()))
    return sorted(path.relative_to(folder).as_posix() for path in inner if path not in with_images)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the relative and the full path of the images and label files below a folder."""
    for parent, _, names in _walk(folder):
        for name in names:
            path = Path(parent, name)
            wanted = not name.startswith(".") and (name.lower().endswith(READABLE) or name in LABELS)
            if wanted and path.is_file():  # not a broken link
                yield path.relative_to(folder).as_posix(), path


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder as `os.walk` does, without hidden folders."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        yield parent, folders, names


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
