"""The data folder: a safetensors file for each image set, made once from the hub and memory-mapped ever after.

`<name>.safetensors` holds train.x, train.y, test.x, test.y (uint8 images (n, h, w, c); int64 labels), and where the set
knows who made a sample train.writer, test.writer. `<name>.json` beside it has its SHA-256 and where it came from.
"""

import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stableair.checks import InputError, choice
from stableair.streams import generator

VARIABLE = "STABLEAIR_DATA"
HELD_OUT = 0.1  # share of a set that comes without a test split
LOADED: dict[str, str] = {}  # the files read so far and their SHA-256: a run records them


class Source(NamedTuple):
    """A set on the hub, and which of its columns are meant."""

    repo: str
    image: str
    label: str
    writer: str | None = None
    config: str | None = None

    @property
    def name(self) -> str:
        """What its file is called where the set has no name of its own."""
        if any(not isinstance(text, str) for text in (*self[:3], *filter(None, self))):
            raise InputError(f"a set of the hub and its columns must be names: got {', '.join(map(repr, self))}")
        return "hf-" + re.sub(r"[^\w.]+", "-", "-".join(filter(None, (self.repo.strip("./"), *self[1:]))))


NAMED = {
    "cifar10": Source("uoft-cs/cifar10", "img", "label"),
    "cifar100": Source("uoft-cs/cifar100", "img", "fine_label"),
    "femnist": Source("flwrlabs/femnist", "image", "character", "writer_id"),
}


def folder() -> Path:
    """Where the data files are: $STABLEAIR_DATA, else the user's cache folder."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    cache = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "stableair"


def file(name: str) -> Path:
    return folder() / f"{name}.safetensors"


def described(name: str) -> Path:
    """The file that says what the data file is."""
    return file(name).with_suffix(".json")


def read(name: str, source: Source) -> dict[str, Tensor]:
    """The tensors of a set, memory-mapped; it is prepared first where the folder does not have it."""
    if not file(name).exists():
        prepare(name, source)
    if not check(name):
        warnings.warn(f"{file(name)} is unchecked: there is no {described(name).name} beside it", stacklevel=2)
    return _tensors(file(name))


def check(name: str) -> bool:
    """Whether the file is the one its description tells of; False where it has none, an error where it is another."""
    path, description = file(name), described(name)
    if not path.exists():
        raise InputError(f"{path} is not there; {_ways(name)}")
    digest = _digest(path)
    LOADED[path.name] = digest
    if not description.exists():
        _tensors(path)
        return False
    try:
        told = json.loads(description.read_text())["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{description} is corrupted ({type(error).__name__}); delete it, or {_again(name)}") from None
    if told != digest:
        raise InputError(f"{path} is truncated or altered: {description.name} tells of another SHA-256; {_again(name)}")
    _tensors(path)
    return True


def prepare(name: str, source: Source, again: bool = False) -> Path:
    """Fetch a set from the hub and write its file; one that is there is left alone."""
    path = file(name)
    if path.exists() and not again:
        check(name)
        return path
    sets = _fetch(name, source)
    tensors = {}
    for split in ("train", "test") if "test" in sets else ("train",):
        tensors |= {f"{split}.{part}": t for part, t in _columns(sets[split], source, f"{name} {split}").items()}
    for part in ("y", "writer"):  # after both splits are there: the codes are common to them
        _coded([key for key in ("train." + part, "test." + part) if key in tensors], tensors)
    if "test" not in sets:
        tensors = _divided(tensors)
    _write(path, tensors, source)
    return path


def _write(path: Path, tensors: dict[str, np.ndarray], source: Source) -> None:
    from safetensors.numpy import save_file

    description = path.with_suffix(".json")
    with _whole(path) as temporary:
        save_file({key: np.ascontiguousarray(t) for key, t in tensors.items()}, temporary)
        about = {"sha256": _digest(temporary), "source": source._asdict()}
        about["shapes"] = {key: list(t.shape) for key, t in sorted(tensors.items())}
        description.unlink(missing_ok=True)  # the old one must not stand beside the new file
    with _whole(description) as temporary:
        temporary.write_text(json.dumps(about, indent=2) + "\n")


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A place to write that becomes the file when all is written, and is gone when it is not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path.parent}: {error.strerror}; choose another --data-dir") from None
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _fetch(name: str, source: Source) -> Any:
    """The set as the hub's library gives it: {"train": ..., "test": ...}."""
    try:
        import datasets
        import huggingface_hub
    except ImportError:
        raise InputError(f"{file(name)} is not there; {_ways(name)}") from None
    print(f"fetching {source.repo}", file=sys.stderr)
    huggingface_hub.logging.set_verbosity_error()  # its retries are many lines; what failed is said in one
    try:
        found = datasets.load_dataset(source.repo, source.config)
    except (OSError, ValueError, RuntimeError) as error:
        what = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"the hub did not give {source.repo}: {what}; {_ways(name)}") from None
    choice(f"{source.repo}: the split", "train", list(found))
    return found


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
        there = [key for key, feature in rows.features.items() if isinstance(feature, Image)]
        raise InputError(f"{source.repo}: column {source.image!r} holds no images; those that do: {there or 'none'}")
    kept = rows.select_columns(list(named.values()))
    out: dict[str, Any] = {part: [] for part in named if part != "x"}
    x, done, size = None, 0, 500
    for batch in track(kept.iter(size), title, total=-(-len(kept) // size), console=Console(stderr=True)):
        for image in batch[source.image]:
            mode = "L" if image.mode in ("L", "1") else "RGB"
            if x is None:
                first = mode
                x = np.empty((len(kept), image.height, image.width, len(first)), np.uint8)
            if (image.height, image.width) != x.shape[1:3]:
                raise InputError(
                    f"{source.repo}: images must be of one size: {image.width} x {image.height} in row {done}, "
                    f"{x.shape[2]} x {x.shape[1]} before"
                )
            x[done] = np.asarray(image.convert(first)).reshape(x.shape[1:])
            done += 1
        for part in out:
            out[part] += batch[named[part]]
    if x is None:
        raise InputError(f"{source.repo}: the split of {title} is empty")
    return {"x": x} | {part: np.array(values) for part, values in out.items()}


def _coded(keys: list[str], tensors: dict[str, np.ndarray]) -> None:
    """Whatever names the classes or the writers, as numbers from 0; numbers that are such already stay."""
    values = [tensors[key] for key in keys]
    if not values:
        return
    if all(v.dtype.kind in "iu" and v.min() >= 0 for v in values):
        codes = values
    else:
        _, code = np.unique(np.concatenate(values), return_inverse=True)
        codes = np.split(code, np.cumsum([len(v) for v in values])[:-1])
    tensors |= {key: code.astype(np.int64) for key, code in zip(keys, codes, strict=True)}


def _divided(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
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


def _tensors(path: Path) -> dict[str, Tensor]:
    """The content of a data file, held to its form."""
    try:
        with safe_open(path, "pt") as content:
            found = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is truncated or no safetensors file ({error})") from None
    form = {"x": (torch.uint8, 4), "y": (torch.int64, 1), "writer": (torch.int64, 1)}
    for split in ("train", "test"):
        for part, (dtype, dimensions) in form.items():
            key = f"{split}.{part}"
            if key not in found:
                if part == "writer":
                    continue
                raise InputError(f"{path} has no {key}: it must hold train.x, train.y, test.x and test.y")
            t = found[key]
            if t.dtype != dtype or t.ndim != dimensions or len(t) != len(found[f"{split}.x"]) or not len(t):
                wanted = f"{dtype} with {dimensions} axes, one row an image"
                raise InputError(f"{path}: {key} must be {wanted}: got {t.dtype} {tuple(t.shape)}")
    return found


def _digest(path: Path) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _ways(name: str) -> str:
    """How to come by a data file."""
    install = "" if find_spec("datasets") else "pip install 'stableair[hub]' and "
    command = f"stableair data prepare {name}" if name in NAMED else "the same command"
    return (
        f"with a network, {install}{command} makes it; without one, copy {name}.safetensors into {folder()}, "
        f"or name another folder with --data-dir"
    )


def _again(name: str) -> str:
    return f"restore it, or stableair data prepare {name} --again"
