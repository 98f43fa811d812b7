"""The data folder: one safetensors file per image set, converted once from the Hugging Face hub and memory-mapped.

`<name>.safetensors` holds train.x, train.y, test.x and test.y, and train.writer and test.writer if the set names the
writer of each sample. Images are uint8, uint16 or float32 of shape (n, h, w, c); labels and writers are int64, (n,).
`<name>.json` records its SHA-256 and source, and the manifest of a local image folder.
"""

import itertools
import json
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stableair.data.columns import columns, with_test_split
from stableair.data.image_sets import IMAGE_SETS, Source
from stableair.data.labels import number_from_zero
from stableair.data.manifest import READABLE, Manifest, first_change, ignored_folders, manifest, sha256
from stableair.errors import InputError, MissingExtraError, StableairError, first_line
from stableair.files import remove_leftovers, write_whole
from stableair.optional import require

log = logging.getLogger("stableair")

VARIABLE = "STABLEAIR_DATA"
OTHER_FOLDER = f"or set {VARIABLE} to its folder"  # advice for Python callers
TEST_SPLITS = "test", "validation", "valid", "val"  # names of a test split on the hub, in order of preference
MAX_FILES_CHECKED = 10_000  # files of a local folder to check for images
PIXEL_TYPES = torch.uint8, torch.uint16, torch.float32

NAMED = {name: known.source for name, known in IMAGE_SETS.items()}


def folder() -> Path:
    """Return the data folder: $STABLEAIR_DATA, else the user's cache folder."""
    if value := os.environ.get(VARIABLE):
        return Path(value)
    if cache := os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME"):
        return Path(cache) / "stableair"
    try:
        return Path.home() / ".cache" / "stableair"
    except RuntimeError:
        text = f"there is no home folder for the data: set {VARIABLE} to a folder"
        raise InputError(text, code="no-data-folder", hint="data") from None


def file(name: str) -> Path:
    """Return the data file of a set."""
    return folder() / f"{name}.safetensors"


def description_file(name: str) -> Path:
    """Return the description of a data file: its SHA-256, source and shapes."""
    return file(name).with_suffix(".json")


def read(name: str, source: Source) -> tuple[dict[str, Tensor], str]:
    """Return the memory-mapped tensors of a set and the SHA-256 of its file; a missing file is prepared first."""
    if not file(name).exists():
        prepare(name, source)
    digest = check(name)
    if not description_file(name).exists():
        log.warning("%s is unchecked: its description %s is missing", file(name), description_file(name).name)
    return _tensors(name), digest


def check(name: str, contents: bool = False) -> str:
    """Compare a data file with its description, and a local image folder with the files that were converted.

    Args:
        name: The set.
        contents: Whether to read every file of a local image folder, and not only sizes and modification times.

    Returns:
        The SHA-256 of the data file.

    Raises:
        InputError: The file is missing (`missing-data`), damaged or not the file of the description (`corrupt-data`),
            or its image folder has changed since (`changed-data`).
    """
    path, description = file(name), description_file(name)
    if not path.is_file():
        text = f"{name} is not prepared; {_how_to_get(name)}"
        raise InputError(text, code="missing-data", hint="data", advice=OTHER_FOLDER, path=path)
    digest = sha256(path)
    if description.exists():
        try:
            about = json.loads(description.read_text("utf-8"))
            expected, files = about["sha256"], {key: tuple(value) for key, value in about.get("files", {}).items()}
            source = Source(**about["source"]) if files else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            text = f"{description} is corrupted: {error!r}; {_how_to_repair(name)}"
            raise InputError(text, code="corrupt-data", path=description) from None
        if expected != digest:
            text = f"{path} is truncated or altered: {description.name} has another SHA-256; {_how_to_repair(name)}"
            raise InputError(text, code="corrupt-data", path=path)
        if source:
            _check_unchanged(source, files, contents)
    _tensors(name)
    return digest


def _check_unchanged(source: Source, files: Manifest, contents: bool) -> None:
    """Refuse a local image folder that differs from the manifest; a folder that was deleted or moved is accepted."""
    try:
        change = first_change(files, source.folder, contents) if source.folder else None
    except OSError as error:
        raise InputError(
            f"cannot read {error.filename}: {error.strerror}", code="cannot-read", path=error.filename
        ) from error
    if change:
        command = f"stableair data prepare {shlex.quote(source.spec)} --again"
        text = f"{source.repo} has changed since it was converted: {change}; restore it, or run {command}"
        raise InputError(text, code="changed-data", path=source.folder, change=change)


def describe(name: str, source: Source | None, note: str = "", files: Manifest | None = None) -> Path:
    """Write the description of an existing data file.

    Args:
        name: Name of the data file.
        source: The set, if it is known.
        note: A remark for the description.
        files: Manifest of a local image folder.

    Returns:
        The file with the description.
    """
    about: dict[str, Any] = {"sha256": sha256(file(name)), "source": source._asdict() if source else None}
    about |= {"note": note} if note else {}
    about["shapes"] = {key: list(t.shape) for key, t in sorted(_tensors(name).items())}
    about |= {"files": files} if files else {}
    _write_whole(description_file(name), (json.dumps(about, indent=2) + "\n").encode())
    return description_file(name)


def prepare(name: str, source: Source, again: bool = False) -> Path:
    """Convert a set of the hub, or a local image folder, into its data file.

    Args:
        name: Name of the data file.
        source: The set and the names of its columns.
        again: Whether to replace an existing file.

    Returns:
        The data file.

    Raises:
        InputError: An existing file is damaged, or the set cannot be downloaded, used or written.
        MissingExtraError: The packages of the extra `hub` are not installed.
    """
    described = description_file(name).exists()
    if file(name).exists() and not again and (described or not source.folder):
        check(name)
        if not described:  # the file was copied here, or the writing process was killed
            describe(name, source, "described as found")
        return file(name)
    _check_writable()
    _check_folder(source.repo)
    if source.folder:
        source = source._replace(repo=str(source.folder))
    try:
        files = manifest(source.folder) if source.folder else None  # before the conversion: later changes are detected
        sets = _fetch(name, source)
        if source.folder and sets["train"].info.builder_name == "imagefolder":
            _warn_of_ignored_folders(source.folder)
        tensors = _convert(sets, source)
    except StableairError:
        raise
    except OSError as error:
        text = f"cannot read {error.filename or source.repo}: {error.strerror or first_line(error)}"
        raise InputError(text, code="cannot-read", path=error.filename) from error
    except Exception as error:  # columns may hold anything
        text = f"{source.repo} cannot be read as images with labels: {first_line(error)}"
        raise InputError(text, code="not-an-image-set") from error
    write(name, tensors, source, files)
    return file(name)


def _warn_of_ignored_folders(images: Path) -> None:
    if ignored := ignored_folders(images):
        log.warning("%s: no images are read from %s (empty, or a link)", images, ", ".join(ignored))


def _convert(sets: Any, source: Source) -> dict[str, np.ndarray]:
    """Return the tensors of a data file: "train.x", "train.y", "test.x", "test.y" and possibly the writers."""
    test = next((key for key in TEST_SPLITS if key in sets), None)
    splits = {"train": columns(sets["train"], source, "train")}
    if test:
        splits["test"] = columns(sets[test], source, test, like=splits["train"]["x"][0])
    for part in splits["train"].keys() - {"x"}:
        numbers = number_from_zero([split[part] for split in splits.values()])
        for split, values in zip(splits.values(), numbers, strict=True):
            split[part] = values
    if not test:
        splits = with_test_split(splits["train"])
    return {f"{name}.{part}": values for name, split in splits.items() for part, values in split.items()}


def write(name: str, tensors: dict[str, np.ndarray], source: Source, files: Manifest | None = None) -> None:
    """Write the file of a set and its description."""
    from safetensors.numpy import save

    def fill(new: BinaryIO) -> None:
        new.write(save({key: np.ascontiguousarray(t) for key, t in tensors.items()}))
        description_file(name).unlink(missing_ok=True)  # the description of the old file

    remove_leftovers(file(name).parent, older=3600)  # younger files may belong to another process
    _write_whole(file(name), fill)
    describe(name, source, files=files)


def _write_whole(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    _check_writable()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {path}: {error}", code="cannot-write", path=path) from None


def _check_writable() -> None:
    """Refuse a data folder that cannot be written; of a missing folder, test the nearest existing parent."""
    nearest = next(path for path in (folder(), *folder().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        text = f"cannot write to {folder()}: {error.strerror}; set {VARIABLE} to another folder"
        raise InputError(text, code="cannot-write", hint="data", path=folder()) from None


def _fetch(name: str, source: Source) -> Any:
    """Load a set with the hub's library, from the network or a local folder: {"train": ..., "test": ...}."""
    try:
        datasets, huggingface_hub = (require(module, extra="hub") for module in ("datasets", "huggingface_hub"))
    except MissingExtraError as error:
        install = f"pip install 'stableair[{error.fields['extra']}]', then "
        text = f"{name} is not prepared; {_how_to_get(name, install)}"
        raise MissingExtraError(text, hint="data", advice=OTHER_FOLDER, **error.fields) from error
    print(f"{'reading' if source.folder else 'downloading'} {source.repo}", file=sys.stderr)
    huggingface_hub.logging.set_verbosity_error()  # otherwise it logs every retry; the error below is one line
    try:
        # The library keeps a converted copy of a local folder, and misses changes that keep the modification time.
        fresh = {"download_mode": "reuse_cache_if_exists"} if source.folder else {}
        splits = datasets.load_dataset(source.repo, source.config, **fresh)
    except Exception as error:  # the library raises many unrelated types
        reason = first_line(error)
        if source.folder:
            raise InputError(f"cannot read {source.repo}: {reason}", code="not-an-image-set") from error
        text = f"{name} is not prepared, and {source.repo} cannot be downloaded: {reason}; {_how_to_get(name)}"
        raise InputError(text, code="download-failed", hint="data", advice=OTHER_FOLDER) from error
    if "train" not in splits:
        text = f"{source.repo} has no split 'train'; its splits are {', '.join(splits)}"
        raise InputError(text, code="no-train-split", allowed=list(splits))
    return splits


def _check_folder(repo: str) -> None:
    """Refuse a folder without image files before the hub's library reads all of it."""
    if not Path(repo).is_dir():
        return
    names = (name for _, _, names in os.walk(repo) for name in names)
    if not any(name.lower().endswith(READABLE) for name in itertools.islice(names, MAX_FILES_CHECKED)):
        text = f"{repo} holds no images: its first {MAX_FILES_CHECKED:,} files are of other kinds"
        raise InputError(text, code="not-an-image-set")


def _tensors(name: str) -> dict[str, Tensor]:
    """Read and check the tensors of a data file."""
    path = file(name)
    try:
        with safe_open(path, "pt") as content:
            tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        text = f"{path} is truncated or not a safetensors file ({error}); {_how_to_repair(name)}"
        raise InputError(text, code="corrupt-data", path=path) from None
    for split, part in itertools.product(("train", "test"), ("x", "y", "writer")):
        _check_tensor(name, tensors, split, part)
    _check_shapes(name, tensors)
    return tensors


def _check_tensor(name: str, tensors: dict[str, Tensor], split: str, part: str) -> None:
    """Check the dtype, the number of rows and the range of one tensor."""
    path, key = file(name), f"{split}.{part}"
    if key not in tensors:
        if part == "writer":
            return
        text = f"{path} has no {key}: it must hold train.x, train.y, test.x and test.y"
        raise InputError(text, code="invalid-data-file", name=key)
    t, dimensions = tensors[key], 4 if part == "x" else 1
    dtypes = (torch.int64,) if part != "x" else (torch.uint8,) if name in IMAGE_SETS else PIXEL_TYPES
    if t.dtype not in dtypes or t.ndim != dimensions or len(t) != len(tensors[f"{split}.x"]) or not len(t):
        allowed = f"{' or '.join(map(str, dtypes))} with {dimensions} axes, one row per image"
        text = f"{path}: {key} must be {allowed}: got {t.dtype} {tuple(t.shape)}"
        raise InputError(text, code="invalid-data-file", name=key)
    if part != "x" and t.min() < 0:
        text = f"{path}: {key} must not be negative: got {int(t.min())}"
        raise InputError(text, code="invalid-data-file", name=key)


def _check_shapes(name: str, tensors: dict[str, Tensor]) -> None:
    """Check that the images of both splits have one shape, that of a named set, and one dtype."""
    path, train, test = file(name), tensors["train.x"], tensors["test.x"]
    height, width, channels = train.shape[1:]
    if name in IMAGE_SETS:
        channels, height, width = IMAGE_SETS[name].shape
    shape = f"({height}, {width}, {channels})" if channels in (1, 3) else "(height, width, 1 or 3)"
    for key in ("train.x", "test.x"):
        if tuple(tensors[key].shape[1:]) != (height, width, channels) or channels not in (1, 3):
            text = f"{path}: an image of {key} must be {shape}: got {tuple(tensors[key].shape[1:])}"
            raise InputError(text, code="invalid-data-file", name=key)
    if train.dtype != test.dtype:
        text = f"{path}: train.x and test.x must have one dtype: got {train.dtype} and {test.dtype}"
        raise InputError(text, code="invalid-data-file", name="test.x")


def _how_to_get(name: str, install: str = "") -> str:
    """Return the advice for a missing data file; `install` is the command that has to run first."""
    command = f"stableair data prepare {name}" if name in NAMED else "stableair data prepare with the same name"
    return f"with a network: {install}{command}; without: copy {name}.safetensors into {folder()}"


def _how_to_repair(name: str) -> str:
    """Return the advice for a damaged data file."""
    command = f"stableair data prepare {name}" if name in NAMED else "the next use"
    return f"restore it, or delete it, and {command} creates it again"
