"""Conversion of the columns of a hub data set to arrays: images, labels and writers."""

import os
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from stableair.data import images
from stableair.data.image_sets import Mode, Source
from stableair.data.labels import checked_labels
from stableair.data.splits import held_out
from stableair.errors import InputError
from stableair.streams import generator

BATCH = 500  # rows to read at once
HELD_OUT = 0.1  # share of test samples for a set without a test split


def columns(rows: Any, source: Source, split: str, like: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Convert one split.

    Args:
        rows: The split, a `datasets.Dataset`.
        source: The set and the names of its columns.
        split: Name of the split, for messages.
        like: An image of another split; all images must have its size and kind.

    Returns:
        The images x (n, h, w, c), the labels y (n,) and, if the set has writers, writer (n,).

    Raises:
        InputError: A column is missing, an image is unusable or different from the others, or a label is missing.
    """
    names = {"x": source.image, "y": source.label} | ({"writer": source.writer} if source.writer else {})
    _check_columns(rows, source, list(names.values()))
    if not len(rows):
        raise InputError(f"{source.repo}: the split {split} is empty", code="empty-split", split=split)
    text = {part: name for part, name in names.items() if part != "x"}
    values = rows.select_columns(list(text.values()))[:]
    classes = {part: checked_labels(values[name], f"{source.repo} {split}", name) for part, name in text.items()}
    return classes | {"x": _images(rows.select_columns([source.image]), source, split, like)}


def _check_columns(rows: Any, source: Source, names: list[str]) -> None:
    from datasets import Image

    for name in names:
        if name not in rows.column_names:
            text = f"{source.repo} has no column {name!r}; its columns are {', '.join(rows.column_names)}"
            if rows.column_names == ["image"] and source.folder:
                text += "; put the images of each class into a folder, with two classes or more"
            raise InputError(text, code="unknown-column", name=name, allowed=list(rows.column_names))
    if not isinstance(rows.features[source.image], Image):
        others = [key for key, feature in rows.features.items() if isinstance(feature, Image)]
        text = f"{source.repo}: column {source.image!r} does not hold images; columns with images: {others or 'none'}"
        raise InputError(text, code="unknown-column", name=source.image, allowed=others)


def _images(rows: Any, source: Source, split: str, like: np.ndarray | None) -> np.ndarray:
    """Decode a column of images of one size and kind into one array, (n, h, w, c)."""
    x, first = None, "the other split"
    for row, (name, image) in enumerate(_decoded(rows, source, f"{source.repo} {split}")):
        if like is None:
            like, first = image, name
        if (image.shape, image.dtype) != (like.shape, like.dtype):
            kinds = f"{images.describe(image)}, {first} has {images.describe(like)}"
            text = f"{name}: images must have one size and one kind: this one has {kinds}; {_fix(image, like)}"
            raise InputError(text, code="mixed-images", row=row, split=split)
        if x is None:
            x = np.empty((len(rows), *image.shape), image.dtype)
        x[row] = image
    assert x is not None  # the split is not empty
    return x


def _decoded(rows: Any, source: Source, title: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name of each image for messages, and its pixels."""
    from datasets import Image
    from rich.console import Console
    from rich.progress import track

    roots = _roots(rows, source)
    encoded = rows.cast_column(source.image, Image(decode=False))  # the library would read any path
    files = (file for batch in encoded.iter(BATCH) for file in batch[source.image])
    for row, file in enumerate(track(files, title, total=len(rows), console=Console(stderr=True))):
        content, path = (file["bytes"], file["path"]) if file else (None, None)
        name = f"{title}, row {row}" + (f" ({path.removeprefix(f'{source.folder}/')})" if path else "")
        try:
            yield name, _decode(content, path, roots, source.mode)
        except InputError as error:
            raise error.with_message(f"{name}: {error.message}") from error.__cause__


def _fix(image: np.ndarray, like: np.ndarray) -> str:
    """Return the advice for two images of different size or kind."""
    if image.shape[:2] != like.shape[:2]:
        return "resize them to one size"
    if image.dtype == like.dtype == np.uint8:
        return "set mode=RGB or mode=L to convert all of them"
    return "convert them to one kind"


def _decode(content: bytes | None, path: str | None, roots: Sequence[Path], mode: Mode | None) -> np.ndarray:
    """Decode the image of one row: its embedded bytes, or else the file at its path."""
    if content is not None:
        return images.decode(BytesIO(content), mode)
    if path is None:
        raise InputError("the image is missing; remove the row", code="missing-image")
    return images.decode(_below(path, roots), mode)


def _below(path: str, roots: Sequence[Path]) -> Path:
    """Return the path of an image file, which must be in one of the folders; a relative path starts at the first one.

    The check is needed because a downloaded set may hold any path. Links within the folders are followed.
    """
    for root in roots:
        file = Path(os.path.normpath(root / path))
        if file.is_relative_to(root):
            return file
    allowed = f"only files below {roots[0]} are read" if roots else "only embedded images are read"
    raise InputError(f"the path is outside the data set; {allowed}", code="path-outside-data", path=path)


def _roots(rows: Any, source: Source) -> list[Path]:
    """Return the folders with the image files of a set: its local folder, or its folder in the hub's cache."""
    import datasets
    from huggingface_hub import constants, file_download

    if source.folder:
        roots = [source.folder, source.folder.resolve()]
    else:
        name = file_download.repo_folder_name(repo_id=source.repo, repo_type="dataset")
        roots = [Path(constants.HF_HUB_CACHE).absolute() / name]
    if rows.info.builder_name == "imagefolder":  # the library lists the files itself, and unpacks archives there
        roots.append(Path(datasets.config.DOWNLOADED_DATASETS_PATH).absolute())
    return roots


def with_test_split(columns: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Hold out test samples: a tenth of each writer's samples, at least one, always the same samples.

    Args:
        columns: The columns of all samples: x (n, h, w, c), y (n,) and possibly writer (n,), numbered from 0.

    Returns:
        The columns of "train" and of "test".
    """
    writer = columns.get("writer", np.zeros(len(columns["y"]), np.int64))
    test = held_out(writer, HELD_OUT, generator(0, "hub test"))
    if not test.any():
        text = "the set has no test split and too few samples for one: a writer, or the whole set, needs at least 2"
        raise InputError(text, code="too-few-samples", samples=len(test))
    return {
        split: {part: values[chosen] for part, values in columns.items()}
        for split, chosen in {"train": ~test, "test": test}.items()
    }
