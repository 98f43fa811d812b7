"""`sa.Dataset`: data sets from arrays, torch data sets and files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from stableair import contracts
from stableair.data.arrays import Channels, Files, Options, Samples, assemble, samples
from stableair.data.sample_files import read_csv, read_npz
from stableair.errors import InputError
from stableair.validation import short_repr, typed


class Dataset(contracts.Dataset):
    """A data set: training and test split, number of classes, scaling of the inputs, and default model.

    `from_arrays`, `from_torch`, `from_csv` and `from_npz` create data sets, for the argument `data` of `sa.run`.

    >>> data = Dataset.from_arrays([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1], test=0.5)
    >>> data
    Dataset(2 training and 2 test samples of shape (1,), 2 classes, model mlp(200))
    """

    __slots__ = ()

    def __repr__(self) -> str:
        sizes = f"{len(self.train.y):,} training and {len(self.test.y):,} test samples"
        model = f"model {self.model}" if self.model else "no default model"
        return f"Dataset({sizes} of shape {tuple(self.train.x.shape[1:])}, {self.classes} classes, {model})"

    @classmethod
    def from_arrays(
        cls, x: Any, y: Any, *, x_test: Any = None, y_test: Any = None, writer: Any = None, channels: Channels = "auto",
        **options: Any,
    ) -> "Dataset":  # fmt: skip
        """Create a data set from arrays, tensors, data frames or lists.

        Args:
            x: Features (m, ...). Tables (m, f) are scaled per column, images (m, c, h, w) or (m, h, w, c) per channel.
                Integers other than uint8 that are not images are token ids: they are not scaled and stay integers.
            y: Labels (m,): whole numbers from 0, booleans or text.
            x_test: Test features; by default a part of x is held out.
            y_test: Test labels.
            writer: The author of each training sample (m,), for the partition by_writer.
            channels: Axis of the channels of images: "first", "last", or "auto", which is the last axis if it has 1, 3
                or 4 entries and axis 1 has another number, otherwise axis 1.
            **options: `test` (0.2): the share of each class that is held out, drawn with `seed` (0). `classes`: the
                number of classes of labels from 0, or the labels in order; by default the sorted labels of y. `mean`
                and `std`: numbers, or one for each channel or column; by default computed from the training samples.
                `model`: the default model; by default cnn() for images, mlp(200) for other numbers, none for token ids.

        Returns:
            The data set.

        Raises:
            InputError: An array is empty, holds an invalid value, or has another length than the other arrays.

        >>> data = Dataset.from_arrays([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]], ["b", "a", "b", "a"], test=0.5)
        >>> tuple(data.train.x.shape), sorted(data.train.y.tolist()), data.classes, data.model
        ((2, 2), [0, 1], 2, 'mlp(200)')
        """
        if (x_test is None) != (y_test is None):
            raise InputError("x_test and y_test must be passed together: pass both or neither", code="missing-array")
        train = samples(x, y, writer, "", channels)
        test = None if x_test is None else samples(x_test, y_test, None, "_test", channels)
        return cls._of(train, test, options)

    @classmethod
    def from_torch(cls, dataset: Any, test_dataset: Any = None, **options: Any) -> "Dataset":
        """Create a data set from a `torch.utils.data.Dataset` whose items are (features, label).

        Args:
            dataset: The training data; features are tensors, arrays or images of one shape.
            test_dataset: The test data; by default a part of `dataset` is held out.
            **options: As for `from_arrays`.

        Returns:
            The data set.

        Raises:
            InputError: An item is not a pair (`wrong-type`), or has features of another shape (`mixed-samples`).

        >>> import torch
        >>> rows = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)
        >>> tuple(Dataset.from_torch(rows).train.x.shape)
        (16, 3)
        """
        x, y = _columns(dataset, "dataset")
        x_test, y_test = (None, None) if test_dataset is None else _columns(test_dataset, "test_dataset")
        return cls.from_arrays(x, y, x_test=x_test, y_test=y_test, **options)

    @classmethod
    @typed
    def from_csv(
        cls, path: str | Path, label: str, *, test_path: str | Path | None = None,
        features: str | tuple[str, ...] | None = None, writer: str | None = None, sep: str = ",", **options: Any,
    ) -> "Dataset":  # fmt: skip
        """Create a data set from a CSV file with a line of column names.

        Args:
            path: The file.
            label: Column of the labels: whole numbers from 0, or text.
            test_path: A file with test samples; by default a part of the samples is held out.
            features: Columns of the features, which must be numbers; by default all other columns.
            writer: Column of the author of each sample.
            sep: The character between two columns.
            **options: As for `from_arrays`.

        Returns:
            The data set.

        Raises:
            InputError: A file cannot be read (`unreadable-file`), lacks a column, or holds an invalid value.
        """
        columns = (features,) if isinstance(features, str) else features
        train, test, files = read_csv(path, test_path, label, columns, writer, sep)
        return cls._of(train, test, options, files)

    @classmethod
    @typed
    def from_npz(cls, path: str | Path, *, channels: Channels = "auto", **options: Any) -> "Dataset":
        """Create a data set from an npz file with the arrays x and y, and possibly x_test, y_test and writer.

        Args:
            path: The file. The names train.x, train.y, test.x, test.y and train.writer are also valid.
            channels: As for `from_arrays`.
            **options: As for `from_arrays`.

        Returns:
            The data set.

        Raises:
            InputError: The file cannot be read (`unreadable-file`), lacks an array, or holds an invalid array.
        """
        train, test, files = read_npz(path, channels)
        return cls._of(train, test, options, files)

    @classmethod
    def _of(cls, train: Samples, test: Samples | None, options: dict[str, Any], files: Files = ()) -> "Dataset":
        if unknown := options.keys() - set(Options._fields):
            text = f"unknown options: {', '.join(sorted(unknown))}; allowed: {', '.join(Options._fields)}"
            raise InputError(text, code="unknown-option", names=sorted(unknown))
        return cls(*assemble(train, test, Options(**options), files))


def _columns(dataset: Any, title: str) -> tuple[np.ndarray, list[Any]]:
    """Return the features and the labels of a torch data set."""
    features: list[np.ndarray] = []
    labels: list[Any] = []
    for row, item in enumerate(_items(dataset, title)):
        if not isinstance(item, tuple | list) or len(item) < 2:
            text = f"{title}, item {row} must be (features, label): got {short_repr(item)}"
            raise InputError(text, code="wrong-type", row=row)
        x, y = _as_array(item[0]), item[1]
        if features and x.shape != features[0].shape:
            text = f"{title}, item {row} has features of shape {x.shape}, item 0 of shape {features[0].shape}"
            raise InputError(text, code="mixed-samples", row=row)
        features.append(x)
        labels.append(y.item() if isinstance(y, Tensor) and y.numel() == 1 else y)
    if not features:
        raise InputError(f"{title} is empty", code="empty-data")
    return np.stack(features), labels


def _items(dataset: Any, title: str) -> Iterator[Any]:
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return (dataset[i] for i in range(len(dataset)))
    if hasattr(dataset, "__iter__"):
        return iter(dataset)
    text = f"{title} must be a torch.utils.data.Dataset: got {short_repr(dataset)}"
    raise InputError(text, code="wrong-type", value=dataset)


def _as_array(x: Any) -> np.ndarray:
    """Return the features of an item as an array: an array, a tensor, or an image of Pillow as (c, h, w)."""
    if isinstance(x, Tensor):
        return x.detach().cpu().numpy()
    if hasattr(x, "getbands"):
        pixels = np.asarray(x)
        return np.moveaxis(pixels, 2, 0) if pixels.ndim == 3 else pixels[None]
    return np.asarray(x)
