"""The files of a run folder, and JSON that carries a checksum of itself: a flipped bit is found when it is read.

A sealed object has "checksum" as its last key, a sealed list has it in its last object. It is over the bytes of the
text without it, so nothing of the text can change unnoticed. What was written before 0.2 has none.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from stableair.checks import InputError

EXPERIMENT, ENVIRONMENT, CLIENTS = "experiment.json", "environment.json", "clients.json"
ROUNDS, CHECKPOINT, PREVIOUS = "rounds.jsonl", "checkpoint.pt", "checkpoint.previous.pt"

_SEAL = re.compile(rb',(?:\n +| )"checksum": "([0-9a-f]{16})"((?:\n *)?\}(?:\n\])?\n)\Z')


def digest(content: bytes | memoryview) -> str:
    """Sixteen hex digits of SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def seal(content: dict[str, Any] | list[dict[str, Any]], indent: int | None = 2) -> bytes:
    """An object, or a list of objects, as JSON with its checksum; with indent=None in one line."""
    text = json.dumps(content, indent=indent, allow_nan=False).encode() + b"\n"
    brace = text.rindex(b"}")
    end = len(text[:brace].rstrip())  # where the last object's last value ends
    depth = 0 if indent is None else indent * (2 if isinstance(content, list) else 1)
    space = b" " if indent is None else b"\n" + b" " * depth
    return text[:end] + b"," + space + f'"checksum": "{digest(text)}"'.encode() + text[end:]


def unseal(raw: bytes) -> tuple[Any, bool]:
    """The content, and whether it was sealed; a seal that is broken is a ValueError."""
    found = _SEAL.search(raw)
    if not found:
        return json.loads(raw), False
    text = raw[: found.start()] + found[2]
    if digest(text) != found[1].decode():
        raise ValueError("its checksum does not fit: something in it has changed")
    return json.loads(text), True


def read_sealed(path: Path, kind: type) -> tuple[Any, bool]:
    """The content of a sealed file, which must be of that type, and whether it was sealed."""
    try:
        content, sealed = unseal(read_plain(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is corrupted: {error}") from None
    if not isinstance(content, kind):
        raise InputError(f"{path} is corrupted: it holds a {type(content).__name__}, not a {kind.__name__}")
    return content, sealed


def read_plain(path: Path) -> bytes:
    """The bytes of a plain file; what is none, such as a pipe that would never end, is refused."""
    try:
        if not path.is_file():
            raise InputError(f"{path} is not a plain file" if path.exists() else f"{path} is not there")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def read_environments(folder: Path) -> list[dict[str, Any]]:
    """Where and how the rounds of a folder were computed, one entry for each time it was begun or resumed."""
    path = folder / ENVIRONMENT
    entries, sealed = read_sealed(path, list)
    kinds = {"first_round": int, "device": str, "engine": str, "precision": str, "chunk": int, "data": dict}
    for entry in entries:
        good = isinstance(entry, dict) and all(isinstance(entry.get(k, kind()), kind) for k, kind in kinds.items())
        if not good:
            raise InputError(f"{path} is corrupted: an entry does not say where rounds were computed")
        if not sealed and not str(entry.get("stableair")).startswith("0.1."):
            raise InputError(f"{path} is corrupted: its checksum is gone")
    return entries
