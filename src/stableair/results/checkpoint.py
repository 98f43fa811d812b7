"""The checkpoint of a run: all that the next round needs, with a checksum, and the one before it."""

import hashlib
import io
import os
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stableair.checks import InputError, Note
from stableair.files import write_whole
from stableair.results.sealed import CHECKPOINT, PREVIOUS, read_environments, read_plain
from stableair.vector import State

_TRAILER = re.compile(rb"\nsha256 ([0-9a-f]{64})\n\Z")


class Checkpoint(NamedTuple):
    """All that the next round needs."""

    rounds: int  # complete so far
    w: torch.Tensor
    stats: torch.Tensor
    receiver: dict[str, Any]
    server: dict[str, Any]
    average: dict[str, Any]  # the averaged model, where there is one

    @property
    def state(self) -> State:
        return State(self.w, self.stats)


REMEMBERED = Checkpoint._fields[-3:]


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The last checkpoint that is whole; where that is the one before the last, a note says so."""
    wrong = None
    for name in (CHECKPOINT, PREVIOUS):
        if (folder / name).exists():
            try:
                found = parse_checkpoint(folder / name)
            except InputError as error:
                wrong = wrong or error
                continue
            if wrong:
                note = f"{wrong}; going on from the one before it, after round {found.rounds}"
                warnings.warn(note, Note, stacklevel=2)
            return found
    if wrong:
        raise wrong
    return None


def parse_checkpoint(path: Path) -> Checkpoint:
    raw = read_plain(path)
    seal = _TRAILER.search(raw[-80:])
    try:
        if seal:
            raw = raw[: -len(seal[0])]
            if hashlib.sha256(raw).hexdigest() != seal[1].decode():
                raise ValueError("its checksum does not fit")
        elif not _from_0_1(path.parent) or zipfile.ZipFile(io.BytesIO(raw)).testzip():
            raise ValueError("its checksum is gone")
        content = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        return _checked(content)
    except (
        OSError, RuntimeError, ValueError, TypeError, EOFError, KeyError, AttributeError, pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:  # fmt: skip
        why = str(error).partition("\n")[0] if isinstance(error, ValueError) else type(error).__name__
        raise InputError(f"{path} is corrupted ({why}); restore it", hint="folder") from None


def _checked(content: Any) -> Checkpoint:
    """The checkpoint that a dict stands for, its names, types and shapes checked."""
    if isinstance(content, dict) and tuple(content) == Checkpoint._fields[:-1]:
        content["average"] = {}  # written before there was one
    if not isinstance(content, dict) or tuple(content) != Checkpoint._fields:
        raise ValueError(f"it does not hold {', '.join(Checkpoint._fields)}")
    found = Checkpoint(**content)
    if type(found.rounds) is not int or found.rounds < 1:
        raise ValueError("the number of rounds is none")
    for name in ("w", "stats"):
        tensor = getattr(found, name)
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != 1 or not tensor.is_floating_point():
            raise ValueError(f"{name} is no vector")
    for name in REMEMBERED:
        if not isinstance(getattr(found, name), dict):
            raise ValueError(f"the memory of the {name} is no dict")
    return found


def _from_0_1(folder: Path) -> bool:
    """Whether the folder was last written before there were checksums."""
    return all(str(entry.get("stableair")).startswith("0.1.") for entry in read_environments(folder))


def is_sealed(path: Path) -> bool:
    """Whether a checkpoint carries a checksum."""
    return bool(_TRAILER.search(read_plain(path)[-80:]))


def save_checkpoint(folder: Path, checkpoint: Checkpoint, check: bool, keep: bool = True) -> None:
    """Write a checkpoint; the one before it is kept."""
    file = io.BytesIO()
    torch.save(checkpoint._asdict(), file)
    if check:  # once a run: what cannot be read back must not be found out when it is needed
        try:
            torch.load(io.BytesIO(file.getbuffer()), weights_only=True)
        except pickle.UnpicklingError:
            raise InputError(
                "the state_dict of the receiver or the server rule cannot be saved: "
                "it may hold tensors, numbers, text, lists and dicts alone"
            ) from None
    file.seek(0, io.SEEK_END)
    file.write(f"\nsha256 {hashlib.sha256(file.getbuffer()).hexdigest()}\n".encode())
    if keep and (folder / CHECKPOINT).exists():
        os.replace(folder / CHECKPOINT, folder / PREVIOUS)
    write_whole(folder / CHECKPOINT, file.getbuffer())
