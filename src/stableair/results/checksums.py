"""Names of the files of a run folder, and JSON files with a checksum that detects damage.

The last key of a sealed object is "checksum". A sealed list has this key in its last object. The checksum covers all
other bytes of the file. Files of version 0.1 have no checksum.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from stableair.errors import CorruptRunError, InputError

EXPERIMENT, ENVIRONMENT, CLIENTS = "experiment.json", "environment.json", "clients.json"
ROUNDS, CHECKPOINT, PREVIOUS = "rounds.jsonl", "checkpoint.pt", "checkpoint.previous.pt"
BEST = "checkpoint.best.pt"  # the state after the best round; written with keep_best

_SEAL = re.compile(rb',(?:\n +| )"checksum": "([0-9a-f]{16})"((?:\n *)?\}(?:\n\])?\n)\Z')


def digest(content: bytes | memoryview) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def seal(content: dict[str, Any] | list[dict[str, Any]], indent: int | None = 2) -> bytes:
    """Return an object, or a list of objects, as JSON with a checksum; indent=None gives a single line."""
    text = json.dumps(content, indent=indent, allow_nan=False).encode() + b"\n"
    brace = text.rindex(b"}")
    end = len(text[:brace].rstrip())  # end of the last value in the last object
    depth = 0 if indent is None else indent * (2 if isinstance(content, list) else 1)
    space = b" " if indent is None else b"\n" + b" " * depth
    return text[:end] + b"," + space + f'"checksum": "{digest(text)}"'.encode() + text[end:]


def unseal(raw: bytes) -> tuple[Any, bool]:
    """Parse sealed JSON: return its content, and whether it has a checksum.

    Raises:
        ValueError: The checksum does not match, or the text is not JSON.
    """
    checksum = _SEAL.search(raw)
    if not checksum:
        return json.loads(raw), False
    text = raw[: checksum.start()] + checksum[2]
    if digest(text) != checksum[1].decode():
        raise ValueError("its checksum does not match its content")
    return json.loads(text), True


def corrupted(path: Path, reason: object, line: int | None = None) -> CorruptRunError:
    """Return the error about a damaged file of a run, or about a damaged line of the file."""
    position = "" if line is None else f" in line {line}"
    return CorruptRunError(f"{path} is corrupted{position}: {reason}", path=path, line=line)


def read_sealed(path: Path, kind: type) -> tuple[Any, bool]:
    """Read a sealed file whose content has the type `kind`.

    Returns:
        The content, and whether the file has a checksum.

    Raises:
        CorruptRunError: The file is damaged, or its content has another type.
        InputError: As for `read_plain`.
    """
    try:
        content, sealed = unseal(read_plain(path))
    except (ValueError, RecursionError) as error:
        raise corrupted(path, error) from None
    if not isinstance(content, kind):
        raise corrupted(path, f"expected a {kind.__name__}: got a {type(content).__name__}")
    return content, sealed


def read_plain(path: Path) -> bytes:
    """Read the bytes of a plain file. A pipe is refused, because reading from it may block forever.

    Raises:
        InputError: The path is not a plain file (`not-a-file`), or the file cannot be read (`cannot-read`).
    """
    try:
        if not path.is_file():
            text = f"{path} is not a plain file" if path.exists() else f"{path} does not exist"
            raise InputError(text, code="not-a-file", path=path)
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", code="cannot-read", path=path) from None


def read_environments(folder: Path) -> list[dict[str, Any]]:
    """Read the environments of a run, one entry for each time that the run was started or resumed.

    Raises:
        CorruptRunError: The file is damaged.
    """
    path = folder / ENVIRONMENT
    entries, sealed = read_sealed(path, list)
    kinds = {"first_round": int, "device": str, "engine": str, "precision": str, "chunk": int, "data": dict}
    kinds |= {"plugins": dict, "plugins_kept": dict, "stopping": dict, "best_metric": str}
    for entry in entries:
        valid = isinstance(entry, dict) and all(isinstance(entry.get(k, kind()), kind) for k, kind in kinds.items())
        if not valid:
            raise corrupted(path, "an entry is not a valid environment")
        if not sealed and not str(entry.get("stableair")).startswith("0.1."):
            raise corrupted(path, "its checksum is missing")
    return entries
