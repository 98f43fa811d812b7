"""Read and check the files of a run folder: the experiment, the rounds, and the label counts."""

import sys
from pathlib import Path
from typing import Any

from stableair.errors import StableairError
from stableair.experiment import ARGUMENTS, settings_of_record
from stableair.results.checksums import CLIENTS, EXPERIMENT, ROUNDS, corrupted, read_plain, read_sealed, unseal
from stableair.results.metrics import Row


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of the experiment of a run folder.

    Raises:
        CorruptRunError: The file is damaged, or its record is invalid.
    """
    record, has_checksum = read_sealed(folder / EXPERIMENT, dict)
    if ARGUMENTS in record and not has_checksum:
        raise corrupted(folder / EXPERIMENT, "its checksum is missing")
    try:
        settings_of_record(record)
    except StableairError as error:
        raise corrupted(folder / EXPERIMENT, str(error)) from None
    return record


def read_rounds(folder: Path) -> list[Row]:
    """Read and check the complete lines of rounds.jsonl; an incomplete last line is ignored.

    Raises:
        CorruptRunError: A line is damaged.
    """
    path = folder / ROUNDS
    if not path.exists():
        return []
    rows: list[Row] = []
    with_checksum = set()
    *lines, rest = read_plain(path).split(b"\n")
    for number, line in enumerate([*lines, *([rest] if _has_checksum(rest[:-1]) else [])]):
        try:
            if number == len(lines):  # only the line break is damaged
                raise ValueError("its end is damaged")
            row, has_checksum = unseal(line + b"\n")
            with_checksum.add(has_checksum)
            _check_row(row, number, rows[-1] if rows else {})
            if len(with_checksum) > 1:
                raise ValueError("its checksum is missing")
        except (ValueError, RecursionError) as error:
            raise corrupted(path, str(error), line=number + 1) from None
        rows.append(row)
    return rows


def read_labels(folder: Path) -> list[list[int]] | None:
    """Read the number of samples per client and class, (clients, classes); None if it was not recorded.

    Raises:
        CorruptRunError: The file is damaged.
    """
    path = folder / CLIENTS
    if not path.exists():
        return None
    content, has_checksum = read_sealed(path, dict)
    counts: Any = content.get("labels")
    if (not has_checksum and set(content) != {"labels"}) or not _is_count_table(counts):
        raise corrupted(path, "expected the number of samples per client and class")
    return counts


def _check_row(row: Any, number: int, previous: Row) -> None:
    """Check that a row belongs to round `number` and has all metrics of the previous row.

    Raises:
        ValueError: It does not.
    """
    if not isinstance(row, dict) or row.get("round") != number:
        got = row.get("round") if isinstance(row, dict) else row
        raise ValueError(f"expected round {number}: got {got}")
    if invalid := [key for key, value in row.items() if not _is_number(value)]:
        raise ValueError(f"{invalid[0]} is not a number")
    if missing := previous.keys() - row.keys():  # a newer version may add metrics
        raise ValueError(f"missing metric: {min(missing)}, which the previous round has")


def _is_count_table(value: object) -> bool:
    """Return whether a value is a non-empty table of integers of at least 0, as lists of equal length."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return False
    counts = [n for row in value for n in row]
    return len({len(row) for row in value}) == 1 and bool(counts) and all(type(n) is int and n >= 0 for n in counts)


def _is_number(value: object) -> bool:
    """Return whether a value is None or a number in the range of a float; JSON allows larger integers."""
    return value is None or (isinstance(value, int | float) and not abs(value) > sys.float_info.max)


def _has_checksum(line: bytes) -> bool:
    try:
        return unseal(line + b"\n")[1]
    except (ValueError, RecursionError):
        return False
