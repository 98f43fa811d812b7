"""The files of a run folder, and JSON with a checksum, which detects damaged bits when a file is read.

A sealed object has "checksum" as its last key; a sealed list has it in its last object. The checksum covers all other
bytes of the text. Files of version 0.1 have no checksum.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from stableair.errors import CorruptRunError, InputError

EXPERIMENT, ENVIRONMENT, CLIENTS = "experiment.json", "environment.json", "clients.json"
ROUNDS, CHECKPOINT, PREVIOUS = "rounds.jsonl", "checkpoint.pt", "checkpoint.previous.pt"
BEST = "checkpoint.best.pt"  # the state after the best round, with keep_best

_SEAL = re.compile(rb',(?:\n +| )"checksum": "([0-9a-f]{16})"((?:\n *)?\}(?:\n\])?\n)\Z')


def digest(content: bytes | memoryview) -> str:
    """Sixteen hex digits of SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def seal(content: dict[str, Any] | list[dict[str, Any]], indent: int | None = 2) -> bytes:
    """Write an object or a list of objects as JSON with a checksum; indent=None writes one line."""
    text = json.dumps(content, indent=indent, allow_nan=False).encode() + b"\n"
    brace = text.rindex(b"}")
    end = len(text[:brace].rstrip())  # end of the last value of the last object
    depth = 0 if indent is None else indent * (2 if isinstance(content, list) else 1)
    space = b" " if indent is None else b"\n" + b" " * depth
    return text[:end] + b"," + space + f'"checksum": "{digest(text)}"'.encode() + text[end:]


def unseal(raw: bytes) -> tuple[Any, bool]:
    """Return the content, and whether it has a checksum.

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
    """Return the error about a damaged file of a run, or a line of it."""
    position = "" if line is None else f" in line {line}"
    return CorruptRunError(f"{path} is corrupted{position}: {reason}", path=path, line=line)


def read_sealed(path: Path, kind: type) -> tuple[Any, bool]:
    """Read a sealed file: its content, which must have the type `kind`, and whether it has a checksum.

    Raises:
        CorruptRunError: The file is damaged or holds another type.
    """
    try:
        content, sealed = unseal(read_plain(path))
    except (ValueError, RecursionError) as error:
        raise corrupted(path, error) from None
    if not isinstance(content, kind):
        raise corrupted(path, f"it holds a {type(content).__name__}, not a {kind.__name__}")
    return content, sealed


def read_plain(path: Path) -> bytes:
    """Read the bytes of a regular file. Pipes are rejected: reading one may never return.

    Raises:
        InputError: The path is not a plain file (`not-a-file`) or cannot be read (`cannot-read`).
    """
    try:
        if not path.is_file():
            text = f"{path} is not a plain file" if path.exists() else f"{path} does not exist"
            raise InputError(text, code="not-a-file", path=path)
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", code="cannot-read", path=path) from None


def read_environments(folder: Path) -> list[dict[str, Any]]:
    """Read the environments of a run: one entry per start or resumption."""
    path = folder / ENVIRONMENT
    entries, sealed = read_sealed(path, list)
    kinds = {"first_round": int, "device": str, "engine": str, "precision": str, "chunk": int, "data": dict}
    kinds |= {"plugins": dict, "plugins_kept": dict, "stopping": dict, "best_metric": str}
    for entry in entries:
        valid = isinstance(entry, dict) and all(isinstance(entry.get(k, kind()), kind) for k, kind in kinds.items())
        if not valid:
            raise corrupted(path, "an entry does not describe an environment")
        if not sealed and not str(entry.get("stableair")).startswith("0.1."):
            raise corrupted(path, "its checksum is missing")
    return entries
