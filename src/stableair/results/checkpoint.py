"""Checkpoints: the state of a run after a round, with a checksum. The previous checkpoint is kept, too."""

import hashlib
import io
import logging
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stableair.contracts import State
from stableair.errors import CorruptRunError, InputError, StableairError
from stableair.results.checksums import BEST, CHECKPOINT, PREVIOUS, read_plain
from stableair.results.lock import LockedFolder
from stableair.vector import ModelState

log = logging.getLogger("stableair")

_TRAILER = re.compile(rb"\nsha256 ([0-9a-f]{64})\n\Z")


class Checkpoint(NamedTuple):
    """The state of a run after a round, from which the run can continue."""

    rounds: int  # number of completed rounds
    state: State  # the model and all memories after these rounds


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Read the last checkpoint, or the previous one with a warning if the last one is damaged.

    Returns:
        The checkpoint; None if the folder has none.

    Raises:
        CorruptRunError: Both checkpoints are damaged.
    """
    damage = None
    for name in (CHECKPOINT, PREVIOUS):
        if (folder / name).exists():
            try:
                checkpoint = parse_checkpoint(folder / name)
            except StableairError as error:
                damage = damage or error
                continue
            if damage:
                log.warning("%s; resuming from the previous one, after round %d", damage, checkpoint.rounds)
            return checkpoint
    if damage:
        raise damage
    return None


def read_best(folder: Path | None) -> Checkpoint:
    """Read the best checkpoint of a run.

    Raises:
        InputError: The run has no best checkpoint (`no-best`).
        CorruptRunError: The file is damaged.
    """
    if folder is None or not (folder / BEST).exists():
        text = f"{folder or 'a run in memory'} has no {BEST}: compute the run with keep_best"
        raise InputError(text, code="no-best", folder=folder)
    return parse_checkpoint(folder / BEST)


def parse_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        CorruptRunError: The file is damaged.
    """
    raw = read_plain(path)
    seal = _TRAILER.search(raw[-80:])
    try:
        if not seal:
            raise ValueError("its checksum is missing")
        raw = raw[: -len(seal[0])]
        if hashlib.sha256(raw).hexdigest() != seal[1].decode():
            raise ValueError("its checksum does not match")
        content = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        return _checked(content)
    except (
        OSError, RuntimeError, ValueError, TypeError, EOFError, KeyError, AttributeError, pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:  # fmt: skip
        reason = str(error).partition("\n")[0] if isinstance(error, ValueError) else type(error).__name__
        raise CorruptRunError(f"{path} is corrupted ({reason}); restore it", hint="folder", path=str(path)) from None


def _checked(content: Any) -> Checkpoint:
    """Convert the content of a file to a checkpoint.

    Raises:
        ValueError: A name, a type or a shape is wrong.
    """
    if isinstance(content, dict):
        content = {"energies": None} | content  # development versions of 0.3 did not record them
    if not isinstance(content, dict) or set(content) != {"rounds", *State._fields}:
        missing = {"rounds", *State._fields} - set(content)
        raise ValueError(f"damaged, or written before version 0.3: missing fields: {', '.join(sorted(missing))}")
    rounds, model = content["rounds"], content["model"]
    if type(rounds) is not int or rounds < 1:
        raise ValueError("invalid round count")
    for name in ModelState._fields:
        tensor = model.get(name) if isinstance(model, dict) else None
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != 1 or not tensor.is_floating_point():
            raise ValueError(f"{name} is not a vector")
    memories = {name: content[name] for name in State._fields if name != "model"}
    return Checkpoint(rounds, State(ModelState(**model), **memories))


def save_checkpoint(folder: LockedFolder, checkpoint: Checkpoint, keep: bool = True, name: str = CHECKPOINT) -> None:
    """Write a checkpoint, with a checksum at the end of the file.

    Args:
        folder: The run folder.
        checkpoint: The checkpoint. Its memories hold plain types only (see `memory.check_memory`), so that `torch.load`
            can read them with weights_only=True.
        keep: Whether to keep the previous checkpoint as checkpoint.previous.pt.
        name: Name of the file.
    """
    state = checkpoint.state
    content = {"rounds": checkpoint.rounds} | state._asdict() | {"model": state.model._asdict()}
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0, io.SEEK_END)
    file.write(f"\nsha256 {hashlib.sha256(file.getbuffer()).hexdigest()}\n".encode())
    if keep and (folder.path / name).exists():
        folder.rename(name, PREVIOUS)
    folder.write(name, file.getbuffer())
