"""The data folder: a safetensors file for each image set, made once from the hub and memory-mapped ever after.

`<name>.safetensors` holds train.x, train.y, test.x, test.y (uint8 images (n, h, w, c); int64 labels), and where the set
knows who made a sample train.writer, test.writer. `<name>.json` beside it has its SHA-256 and where it came from.
"""

import hashlib
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stableair.checks import InputError, Note
from stableair.data.table import IMAGE_SETS, Source
from stableair.files import remove_leftovers, write_whole
from stableair.streams import generator

VARIABLE = "STABLEAIR_DATA"
HELD_OUT = 0.1  # share of a set that comes without a test split
TESTS = "test", "validation", "valid", "val"  # what the hub's sets call it, the first that is there
IMAGES = ".parquet", ".arrow", ".zip", ".tar", ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"
LOOKED_AT = 10_000  # files of a folder
FORM = {"x": (torch.uint8, 4), "y": (torch.int64, 1), "writer": (torch.int64, 1)}


NAMED = {name: known.source for name, known in IMAGE_SETS.items()}


def folder() -> Path:
    """Where the data files are: $STABLEAIR_DATA, else the user's cache folder."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    if cache := os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME"):
        return Path(cache) / "stableair"
    try:
        return Path.home() / ".cache" / "stableair"
    except RuntimeError:
        raise InputError(f"there is no home folder for the data: set {VARIABLE} to a folder", hint="data") from None


def file(name: str) -> Path:
    return folder() / f"{name}.safetensors"


def description_file(name: str) -> Path:
    """The file that says what the data file is."""
    return file(name).with_suffix(".json")


def read(name: str, source: Source) -> tuple[dict[str, Tensor], str]:
    """The tensors of a set, memory-mapped, and the SHA-256 of their file; prepared first where it is not there."""
    if not file(name).exists():
        prepare(name, source)
    digest = check(name)
    if not description_file(name).exists():
        text = f"{file(name)} is unchecked: there is no {description_file(name).name} beside it"
        warnings.warn(text, Note, stacklevel=2)
    return _tensors(name), digest


def check(name: str) -> str:
    """The file's SHA-256, which must be that of its description, if it has one."""
    path, description = file(name), description_file(name)
    if not path.is_file():
        raise InputError(f"{path} is not there; {_how_to_get(name)}", hint="data")
    digest = _digest(path)
    if description.exists():
        try:
            expected = json.loads(description.read_text("utf-8"))["sha256"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{description} is corrupted: {error!r}; {_how_to_repair(name)}") from None
        if expected != digest:
            raise InputError(
                f"{path} is truncated or altered: {description.name} tells of another SHA-256; {_how_to_repair(name)}"
            )
    _tensors(name)
    return digest


def describe(name: str, source: Source | None, note: str = "") -> Path:
    """Write the description of a file as it is."""
    about: dict[str, Any] = {"sha256": _digest(file(name)), "source": source._asdict() if source else None}
    about |= {"note": note} if note else {}
    about["shapes"] = {key: list(t.shape) for key, t in sorted(_tensors(name).items())}
    _write_whole(description_file(name), (json.dumps(about, indent=2) + "\n").encode())
    return description_file(name)


def prepare(name: str, source: Source, again: bool = False) -> Path:
    """Fetch a set from the hub and write its file; one that is there is left alone."""
    if file(name).exists() and not again:
        check(name)
        if not description_file(name).exists():  # copied here, or its maker was stopped just before the end
            describe(name, source, "described as found")
        return file(name)
    _check_writable()
    sets = _fetch(name, source)
    test = next((key for key in TESTS if key in sets), None)
    splits = {"train": sets["train"]} | ({"test": sets[test]} if test else {})
    tensors: dict[str, np.ndarray] = {}
    try:
        for split, rows in splits.items():
            tensors |= {f"{split}.{part}": t for part, t in _columns(rows, source, f"{source.repo} {split}").items()}
        for part in ("y", "writer"):
            _number_from_zero([key for key in (f"train.{part}", f"test.{part}") if key in tensors], tensors)
    except InputError:
        raise
    except Exception as error:  # whatever stands in somebody's columns
        raise InputError(f"{source.repo} cannot be read as images with labels: {_first_line(error)}") from error
    write(name, tensors if test else _with_test_split(tensors), source)
    return file(name)


def write(name: str, tensors: dict[str, np.ndarray], source: Source) -> None:
    """A set's file and its description."""
    from safetensors.numpy import save

    def fill(new: BinaryIO) -> None:
        new.write(save({key: np.ascontiguousarray(t) for key, t in tensors.items()}))
        description_file(name).unlink(missing_ok=True)  # the old one must not stand beside the new file

    remove_leftovers(file(name).parent, older=3600)  # another process may be at work on its own
    _write_whole(file(name), fill)
    describe(name, source)


def _write_whole(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    _check_writable()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {path}: {error}") from None


def _check_writable() -> None:
    """Refuse a folder that cannot be written before anything is fetched; one that is not there is not made yet."""
    trial = folder() / f".{os.getpid()}.tmp"
    try:
        missing = [path for path in (folder(), *folder().parents) if not path.exists()]
        folder().mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
        for path in missing:
            path.rmdir()
    except OSError as error:
        text = f"cannot write to {folder()}: {error.strerror}; set {VARIABLE} to another folder"
        raise InputError(text, hint="data") from None


def _fetch(name: str, source: Source) -> Any:
    """The set as the hub's library gives it: {"train": ..., "test": ...}."""
    _check_folder(source.repo)
    try:
        import datasets
        import huggingface_hub
    except ImportError:
        raise InputError(f"{file(name)} is not there; {_how_to_get(name)}", hint="data") from None
    print(f"fetching {source.repo}", file=sys.stderr)
    huggingface_hub.logging.set_verbosity_error()  # its retries are many lines; what failed is said in one
    try:
        found = datasets.load_dataset(source.repo, source.config)
    except Exception as error:  # its library has many, not all of one family
        text = f"the hub did not give {source.repo}: {_first_line(error)}; {_how_to_get(name)}"
        raise InputError(text, hint="data") from error
    if "train" not in found:
        raise InputError(f"{source.repo} has no split 'train'; its splits are {', '.join(found)}")
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")


def _check_folder(repo: str) -> None:
    """Refuse a folder without a file that could hold images, before the hub's library goes through all of it."""
    if not Path(repo).is_dir():
        return
    names = (name for _, _, names in os.walk(repo) for name in names)
    if not any(name.lower().endswith(IMAGES) for name in itertools.islice(names, LOOKED_AT)):
        raise InputError(f"{repo} holds no images: there is no {', '.join(IMAGES)} among its first {LOOKED_AT:,} files")


def _columns(rows: Any, source: Source, title: str) -> dict[str, np.ndarray]:
    """The wanted columns of one split as arrays."""
    from datasets import Image
    from rich.console import Console
    from rich.progress import track

    named = {"x": source.image, "y": source.label} | ({"writer": source.writer} if source.writer else {})
    for column in named.values():
        if column not in rows.column_names:
            there = ", ".join(rows.column_names)
            raise InputError(f"{source.repo} has no column {column!r}; its columns are {there}")
    if not isinstance(rows.features[source.image], Image):
        others = [key for key, feature in rows.features.items() if isinstance(feature, Image)]
        raise InputError(f"{source.repo}: column {source.image!r} holds no images; those that do: {others or 'none'}")
    kept = rows.select_columns(list(named.values()))
    out: dict[str, Any] = {part: [] for part in named if part != "x"}
    x, done, size = None, 0, 500
    for batch in track(kept.iter(size), title, total=-(-len(kept) // size), console=Console(stderr=True)):
        for image in batch[source.image]:
            if x is None:
                mode = "L" if image.mode in ("L", "1") else "RGB"
                x = np.empty((len(kept), image.height, image.width, len(mode)), np.uint8)
            if (image.height, image.width) != x.shape[1:3]:
                raise InputError(
                    f"{source.repo}: images must be of one size: {image.width} x {image.height} in row {done}, "
                    f"{x.shape[2]} x {x.shape[1]} before"
                )
            x[done] = np.asarray(image.convert(mode)).reshape(x.shape[1:])
            done += 1
        for part in out:
            out[part] += batch[named[part]]
    if x is None:
        raise InputError(f"{title} is empty")
    return {"x": x} | {part: np.array(values) for part, values in out.items()}


def _number_from_zero(keys: list[str], tensors: dict[str, np.ndarray]) -> None:
    """Whatever names the classes or the writers, as numbers from 0 without a gap, common to both splits."""
    if not keys:
        return
    values = [tensors[key] for key in keys]
    if any(v.dtype.kind in "iu" and v.min() < 0 for v in values):
        raise InputError(f"{keys[-1]} is below 0: the set has samples without a label")
    _, code = np.unique(np.concatenate(values), return_inverse=True)
    codes = np.split(code, np.cumsum([len(v) for v in values])[:-1])
    tensors |= {key: code.astype(np.int64) for key, code in zip(keys, codes, strict=True)}


def _with_test_split(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A test split out of the training data: a tenth of each writer's samples, at least one, always the same."""
    writer = tensors.get("train.writer", np.zeros(len(tensors["train.y"]), np.int64))
    shuffled = generator(0, "hub test").permutation(len(writer)).numpy()
    order = shuffled[np.argsort(writer[shuffled], kind="stable")]  # by writer, in random order within
    _, first, count = np.unique(writer[order], return_index=True, return_counts=True)
    place = np.arange(len(order)) - np.repeat(first, count)
    taken = np.minimum(np.maximum(1, np.round(HELD_OUT * count)), count - 1)  # a single sample is for training
    test = np.empty(len(order), bool)
    test[order] = place < np.repeat(taken, count)
    parts = {key.partition(".")[2]: t for key, t in tensors.items()}
    rows = {"train": ~test, "test": test}
    return {f"{split}.{part}": t[rows[split]] for split in rows for part, t in parts.items()}


def _tensors(name: str) -> dict[str, Tensor]:
    """The content of a data file, held to its form."""
    path = file(name)
    try:
        with safe_open(path, "pt") as content:
            found = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is truncated or no safetensors file ({error}); {_how_to_repair(name)}") from None
    for split in ("train", "test"):
        for part, (dtype, dimensions) in FORM.items():
            key = f"{split}.{part}"
            if key not in found:
                if part == "writer":
                    continue
                raise InputError(f"{path} has no {key}: it must hold train.x, train.y, test.x and test.y")
            t = found[key]
            if t.dtype != dtype or t.ndim != dimensions or len(t) != len(found[f"{split}.x"]) or not len(t):
                wanted = f"{dtype} with {dimensions} axes, one row an image"
                raise InputError(f"{path}: {key} must be {wanted}: got {t.dtype} {tuple(t.shape)}")
            if part != "x" and t.min() < 0:
                raise InputError(f"{path}: {key} must not be negative: got {int(t.min())}")
    height, width, channels = found["train.x"].shape[1:]
    if name in IMAGE_SETS:
        channels, height, width = IMAGE_SETS[name].shape
    shape = f"({height}, {width}, {channels})" if channels in (1, 3) else "(height, width, 1 or 3)"
    for key in ("train.x", "test.x"):
        if tuple(found[key].shape[1:]) != (height, width, channels) or channels not in (1, 3):
            raise InputError(f"{path}: an image of {key} must be {shape}: got {tuple(found[key].shape[1:])}")
    return found


def _digest(path: Path) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _how_to_get(name: str) -> str:
    """How to come by a data file."""
    install = "" if find_spec("datasets") else "pip install 'stableair[hub]' and "
    command = f"stableair data prepare {name}" if name in NAMED else "the same command"
    return (
        f"with a network, {install}{command} makes it; without one, copy {name}.safetensors into {folder()}, "
        f"or set {VARIABLE} to the folder that has it"
    )


def _how_to_repair(name: str) -> str:
    maker = f"stableair data prepare {name}" if name in NAMED else "the next use"
    return f"restore it, or delete it, and {maker} makes it anew"
