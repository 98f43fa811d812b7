"""Checks and numbering of labels and writers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stableair.errors import InputError
from stableair.validation import short_repr

Place = Callable[[int], str]  # the place of a sample in a file or an array, for messages


def in_rows(row: int) -> str:
    """Return the place of a sample whose row number starts at 0."""
    return f"row {row}"


def checked_labels(values: list[Any], title: str, column: str, place: Place = in_rows) -> np.ndarray:
    """Return labels or writers as an array: (n,) of integers or text.

    Args:
        values: The labels or writers.
        title: The file or the arrays, for messages.
        column: The column, for messages.
        place: The place of a sample, for messages.

    Raises:
        InputError: A value is missing (`missing-label`: None, NaN, below 0, or empty text), or is not a class
            (`invalid-label`: a fraction, or neither a number nor text). The fields contain the row and the value.
    """
    for row, value in enumerate(values):
        if _is_missing(value):
            code, problem = "missing-label", "no value"
        elif not isinstance(value, str) and not (isinstance(value, int | float) and float(value).is_integer()):
            code, problem = "invalid-label", "neither a whole number, nor a boolean, nor text"
        else:
            continue
        problem = f"column {column!r} has {problem}: got {short_repr(value)}"
        text = f"{title}, {place(row)}: {problem}; remove or correct the row"
        raise InputError(text, code=code, row=row, column=column, value=value)
    return np.array([value if isinstance(value, str) else int(value) for value in values])


def _is_missing(value: Any) -> bool:
    if isinstance(value, int | float):
        return not value >= 0  # NaN too
    return value is None or (isinstance(value, str) and not value.strip())


def number_from_zero(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Number classes or writers from 0 without gaps, the same in all arrays.

    >>> [codes.tolist() for codes in number_from_zero([np.array(["dog", "cat"]), np.array(["dog"])])]
    [[1, 0], [1]]
    """
    _, codes = np.unique(np.concatenate(arrays), return_inverse=True)
    return np.split(codes.astype(np.int64), np.cumsum([len(array) for array in arrays])[:-1])


def class_numbers(
    train: np.ndarray, test: np.ndarray | None, classes: int | Sequence[Any] | None, titles: tuple[str, str],
    places: tuple[Place, Place] = (in_rows, in_rows),
) -> tuple[np.ndarray, np.ndarray | None, int]:  # fmt: skip
    """Number the labels of two splits.

    Args:
        train: Checked labels of the training samples: (m,).
        test: Checked labels of the test samples; None without a test split.
        classes: Number of classes, if the labels are numbers from 0; or the labels of the classes in order. None: use
            the sorted labels of the training samples.
        titles: The names of the two columns of labels, for messages.
        places: The places of the samples of both splits, for messages.

    Returns:
        The class numbers (m,) int64 of both splits, and the number of classes.

    Raises:
        InputError: A label belongs to no class (`unknown-class`), or there are fewer than two classes.
    """
    import pandas

    names = pandas.Index(
        range(classes) if isinstance(classes, int) else np.unique(train) if classes is None else classes
    )
    if len(names) < 2 or not names.is_unique:
        text = f"{titles[0]}: there must be two or more distinct classes: got {short_repr(names.tolist())}"
        raise InputError(text, code="invalid-classes", classes=names.tolist())

    def numbers(labels: np.ndarray, title: str, place: Place) -> np.ndarray:
        if isinstance(names[0], str):
            labels = labels.astype(str)  # test labels may all be numbers
        codes = names.get_indexer(pandas.Index(labels))
        if (unknown := np.flatnonzero(codes < 0)).size:
            row, value = int(unknown[0]), labels[unknown[0]].item()
            text = f"{title}, {place(row)}: the label {value!r} is not one of the classes {short_repr(names.tolist())}"
            raise InputError(text, code="unknown-class", row=row, value=value)
        return codes.astype(np.int64)

    y_test = None if test is None else numbers(test, titles[1], places[1])
    return numbers(train, titles[0], places[0]), y_test, len(names)
