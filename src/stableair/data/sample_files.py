"""Reading of CSV and npz files with samples."""

import csv
import hashlib
import io
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from stableair.data.arrays import Channels, Files, Samples, samples
from stableair.data.labels import Place, checked_labels
from stableair.errors import InputError, first_line
from stableair.validation import as_path, short_repr, suggest

File = tuple[str, str]  # the name of a file and its SHA-256
SEPARATORS = ";", "\t", "|"  # other separators that a file with one column may have
NPZ_NAMES = {"x": "train.x", "y": "train.y", "writer": "train.writer", "x_test": "test.x", "y_test": "test.y"}


def read_csv(
    path: str | Path, test_path: str | Path | None, label: str, features: Sequence[str] | None = None,
    writer: str | None = None, sep: str = ",",
) -> tuple[Samples, Samples | None, Files]:  # fmt: skip
    """Read CSV files with a line of column names: features that are numbers, labels, and possibly writers.

    Args:
        path: The file.
        test_path: The file of the test samples, if there is one; it needs the same columns, in any order.
        label: Column of the labels: whole numbers or text.
        features: Columns of the features, in this order; None for all other columns.
        writer: Column of the author of each sample.
        sep: The character between two columns.

    Returns:
        The training samples, the test samples if they have a file, and the files.

    Raises:
        InputError: A file cannot be read, lacks a column, or holds an invalid value, which is named with its line. The
            field `row` of the error starts at 0, below the line of names.
    """
    special = [label, *([writer] if writer else [])]
    train = _read_table(path, sep)
    columns = [name for name in train.rows.columns if name not in special] if features is None else list(features)
    samples_of_train = _samples_of_table(train, path, columns, special)
    if test_path is None:
        return samples_of_train, None, (train.file,)
    test = _read_table(test_path, sep)
    return samples_of_train, _samples_of_table(test, test_path, columns, special), (train.file, test.file)


class _Table(NamedTuple):
    """The rows of a CSV file."""

    rows: Any  # a data frame
    file: File
    place: Place  # the line of a row


def _samples_of_table(table: _Table, path: str | Path, chosen: list[str], special: list[str]) -> Samples:
    """Convert a table to samples: `chosen` are the feature columns, `special` the label and possibly the writer."""
    rows = table.rows
    for name in (*special, *chosen):
        if name not in rows.columns:
            allowed = list(rows.columns)
            advice = _advice_on_names(allowed) or suggest(str(name), allowed)
            text = f"{path} has no column {short_repr(name)}; {advice}"
            raise InputError(text, code="unknown-column", name=name, allowed=allowed)
    if _is_row_of_data(rows, special):
        text = f"{path}: {_need_names(list(rows.columns))}"
        raise InputError(text, code="missing-column-names", path=path, names=list(rows.columns))
    if not chosen or set(chosen) & set(special):
        text = f"{path}: features must be one or more columns without the label and the writer: got {chosen}"
        raise InputError(text, code="wrong-columns", columns=chosen)
    if not len(rows):
        raise InputError(f"{path} is empty: it has column names, but no rows", code="empty-data", path=path)
    x = np.stack([_numbers(rows[name], str(path), name, table.place) for name in chosen], 1)
    y, *authors = (checked_labels(_numbers_or_text(rows[name]), str(path), name, table.place) for name in special)
    title = f"{path}: column {special[0]!r}"
    return Samples(torch.from_numpy(x), y, authors[0] if authors else None, title, table.place)


def _advice_on_names(names: list[str]) -> str:
    """Return the advice for a file with another separator, or without a line of column names; "" for other names."""
    if len(names) == 1 and (found := [sep for sep in SEPARATORS if sep in names[0]]):
        columns = f"the file has only one column, {short_repr(names[0])}"
        return f"{columns}; if its separator is {found[0]!r}, set sep={found[0]!r}"
    if sum(map(_is_number, names)) > len(names) / 2:
        return _need_names(names)
    return ""


def _need_names(names: list[str]) -> str:
    """Return the advice for a file whose first line is a sample."""
    got = f"the first line must contain the column names: got {short_repr(', '.join(names))}"
    return f"{got}; insert a line with names, such as x1,x2,label"


def _is_row_of_data(rows: Any, special: list[str]) -> bool:
    """Whether the line of column names is a sample: pandas would lose it.

    Names such as 0,1,2 are the default of pandas' data frames, and numbers beside a column "label" may be, for example,
    wavelengths.
    """
    names = list(rows.columns)
    features = [name for name in names if name not in special]
    if not all(map(_is_number, features)) or names == [str(i) for i in range(len(names))]:
        return False
    return all(_is_number(name) or name in set(rows[name].astype(str)) for name in special)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_npz(path: str | Path, channels: Channels = "auto") -> tuple[Samples, Samples | None, Files]:
    """Read an npz file with the arrays x and y, and possibly x_test, y_test and writer.

    The names train.x, train.y, test.x, test.y and train.writer are also valid.

    Args:
        path: The file.
        channels: Axis of the channels of images.

    Returns:
        The training samples, the test samples if the file has them, and the file.

    Raises:
        InputError: The file cannot be read, lacks an array, or holds an invalid array.
    """
    content, file = _read(path)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        text = f"{path} is not an npz file of arrays of numbers or text: {first_line(error)}"
        raise InputError(text, code="unreadable-file", path=path) from None
    parts = {short: arrays[name] for short, long in NPZ_NAMES.items() for name in (long, short) if name in arrays}
    wanted = ["x", "y", *(["x_test", "y_test"] if {"x_test", "y_test"} & parts.keys() else [])]
    if missing := [name for name in wanted if name not in parts]:
        text = f"{path} has no array {missing[0]}; it holds {', '.join(arrays) or 'none'}"
        raise InputError(text, code="missing-array", path=path, name=missing[0], found=list(arrays))
    train = samples(parts["x"], parts["y"], parts.get("writer"), "", channels, str(path))
    test = samples(parts["x_test"], parts["y_test"], None, "_test", channels, str(path)) if "x_test" in parts else None
    return train, test, (file,)


def _read(path: str | Path) -> tuple[bytes, File]:
    """Return the content of a file, its name and its SHA-256."""
    path = as_path("path", path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", code="unreadable-file", path=path) from None
    return content, (path.as_posix(), hashlib.sha256(content).hexdigest())


def _read_table(path: str | Path, sep: str) -> _Table:
    """Read a CSV file; cells that are not numbers stay text."""
    import pandas

    content, file = _read(path)
    try:
        names = next(csv.reader(io.StringIO(content.decode("utf-8-sig")), delimiter=sep), [])
        if "" in (names or [""]):
            raise ValueError(f"column {names.index('')} has no name" if any(names) else "it is empty")
        if repeated := [name for name in names if names.count(name) > 1]:
            advice = _advice_on_names(names)
            raise ValueError(f"the column {repeated[0]!r} occurs twice" + (f"; {advice}" if advice else ""))
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)  # rows with more fields than columns
            rows = pandas.read_csv(
                io.BytesIO(content), sep=sep, index_col=False, keep_default_na=False, encoding="utf-8-sig",
                low_memory=False,
            )  # fmt: skip
    except (ValueError, TypeError, csv.Error, pandas.errors.ParserWarning) as error:  # pandas' errors are ValueErrors
        reason = first_line(error).removeprefix("Error tokenizing data. ").removeprefix("C error: ")
        raise InputError(f"{path} cannot be read as CSV: {reason}", code="unreadable-file", path=path) from None
    return _Table(rows, file, lambda row: f"line {_line(content, sep, row)}")


def _line(content: bytes, sep: str, row: int) -> int:
    """Return the line, from 1, where a row begins; like pandas, skip empty lines. Row 0 is below the column names."""
    reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), delimiter=sep)
    begins, rows = 1, -1
    for fields in reader:
        rows += bool("".join(fields).strip() or len(fields) > 1)
        if rows > row:
            break
        begins = reader.line_num + 1
    return begins


def _numbers(column: Any, path: str, name: str, place: Place) -> np.ndarray:
    """Convert a column of features to float32."""
    import pandas

    values = pandas.to_numeric(column, errors="coerce").to_numpy(np.float64)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    if (wrong := np.flatnonzero(~np.isfinite(single))).size:
        row = int(wrong[0])
        value = column.iloc[row]
        advice = "encode it as numbers, or leave the column out with features=..."
        text = f"{path}, {place(row)}: column {name!r} must hold finite numbers: got {short_repr(value)}; {advice}"
        raise InputError(text, code="invalid-feature", row=row, column=name, value=value)
    return single


def _numbers_or_text(column: Any) -> list[Any]:
    """Convert a column of labels or writers to numbers if every cell is a number, otherwise to text."""
    import pandas

    numbers = pandas.to_numeric(column, errors="coerce")
    text = column.astype(object).fillna("").astype(str)  # a row with too few fields has missing cells
    return (text if numbers.isna().any() else numbers).tolist()
