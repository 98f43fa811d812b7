"""Memories: trees of tensors that components keep between rounds; checks that components change nothing in place."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stableair.contracts import Memory, State, Upload
from stableair.errors import InputError
from stableair.validation import short_repr

LEAVES = bool, int, float, str, type(None)
MAX_BITS = 2000  # limit of an integer in a memory


def map_tensors(change: Callable[[Tensor], Tensor], memory: Memory) -> Memory:
    """Return the tree in new containers, with every tensor replaced by change(tensor).

    >>> map_tensors(lambda t: 2 * t, {"v": torch.ones(2), "rounds": 3})
    {'v': tensor([2., 2.]), 'rounds': 3}
    """
    if isinstance(memory, Tensor):
        return change(memory)
    if isinstance(memory, dict):
        return {key: map_tensors(change, value) for key, value in memory.items()}
    if isinstance(memory, tuple | list):
        changed = [map_tensors(change, value) for value in memory]
        return type(memory)(*changed) if hasattr(memory, "_fields") else type(memory)(changed)
    return memory


def tensors(memory: Memory) -> Iterator[Tensor]:
    """All tensors of a tree."""
    return (leaf for leaf in leaves(memory) if isinstance(leaf, Tensor))


def leaves(memory: Memory) -> Iterator[Any]:
    """All values of a tree that are not containers."""
    if isinstance(memory, dict | tuple | list):
        for value in memory.values() if isinstance(memory, dict) else memory:
            yield from leaves(value)
    else:
        yield memory


def check_memory(kind: str, memory: Memory, path: str = "memory") -> Memory:
    """Return the memory that a component returned, in types that a checkpoint can hold.

    Numbers of numpy become Python numbers. Tensors are detached from their graph and from Python attributes.

    Args:
        kind: The component, for the error: "receiver".
        memory: A tree of dense tensors, numbers, text, None, tuples, lists and dicts.
        path: Position of the tree, for the error: "memory[0]['mean']".

    Raises:
        InputError: The memory holds a value that a checkpoint cannot hold (`bad-memory`; fields kind, path, type).
    """
    if isinstance(memory, np.generic):
        memory = memory.item()
    if type(memory) is Tensor and memory.layout == torch.strided and memory.device.type != "meta":
        return memory.detach() if memory.requires_grad or memory.__dict__ else memory
    if type(memory) in LEAVES and _can_be_pickled(memory):
        return memory
    try:
        if type(memory) is dict and all(type(key) in (str, int) and _can_be_pickled(key) for key in memory):
            return {key: check_memory(kind, value, f"{path}[{key!r}]") for key, value in memory.items()}
        if type(memory) in (tuple, list):
            return type(memory)(check_memory(kind, value, f"{path}[{i}]") for i, value in enumerate(memory))
    except RecursionError:  # a list that contains itself
        raise _bad_memory(kind, path[:60], memory, "nested too deeply") from None
    raise _bad_memory(kind, path, memory, f"got {type(memory).__name__} {short_repr(memory)}")


def _can_be_pickled(leaf: Any) -> bool:
    """Whether torch.load(weights_only=True) can read a leaf: not a huge integer, nor text that is not valid UTF-8."""
    if isinstance(leaf, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in leaf)
    return type(leaf) is not int or leaf.bit_length() < MAX_BITS


def _bad_memory(kind: str, path: str, memory: Memory, problem: str) -> InputError:
    allowed = "dense tensors, numbers, text, None, tuples, lists and dicts"
    text = f"the memory of the {kind} may hold {allowed}: {path}: {problem}"
    return InputError(text, code="bad-memory", setting=kind, kind=kind, path=path, type=type(memory).__name__)


def check_structure(kind: str, memory: Memory, before: Memory) -> Memory:
    """Return a memory; it must have the structure of the one before, since a checkpoint could not be resumed otherwise.

    Raises:
        InputError: The memory has another structure (`memory-structure`).
    """
    if not same_structure(memory, before):
        text = f"the memory of the {kind} must keep its structure: it was {_describe(before)}, now {_describe(memory)}"
        raise InputError(text, code="memory-structure", setting=kind, kind=kind)
    return memory


def same_structure(memory: Memory, like: Memory) -> bool:
    """Whether a memory has the keys, lengths and tensor shapes of another one; None may become any structure."""
    if like is None:
        return True
    if isinstance(like, dict):
        nested = {key: value for key, value in like.items() if isinstance(value, Tensor | tuple)}
        return (
            isinstance(memory, dict)
            and set(memory) == set(like)
            and all(same_structure(memory[key], value) for key, value in nested.items())
        )
    if isinstance(like, tuple) and like:
        return isinstance(memory, tuple) and len(memory) == len(like) and all(map(same_structure, memory, like))
    if isinstance(like, Tensor):
        return isinstance(memory, Tensor) and memory.shape == like.shape
    return type(memory) is type(like) or (
        isinstance(memory, bool | int | float) and isinstance(like, bool | int | float)
    )


def non_finite_parts(state: State, infinite_memories: bool = False) -> set[str]:
    """The parts of a state that are not finite: "model", "receiver", "server", "average" or "clients".

    The energies are not a part: no later model depends on them.

    Parameters and norm buffers must be finite: clients cannot train a model with other values. In a memory, infinity
    can be correct: for example a limit that is not set yet, or the largest entry of a received sum. NaN is never
    correct: every computation with it gives NaN again.

    Args:
        state: The state after a round.
        infinite_memories: Whether the tensors of memories may be infinite. Python numbers may always be infinite.
    """
    memories = {name: memory for name, memory in state._asdict().items() if name not in ("model", "energies")}
    parts = {name for name, memory in memories.items() if not _is_finite(memory, infinite_memories)}
    return parts if _is_finite(state.model) else parts | {"model"}


def _is_finite(memory: Memory, infinity: bool = False) -> bool:
    """Whether no number or tensor of a tree is NaN, and no tensor infinite unless `infinity` is true."""
    for leaf in leaves(memory):
        if isinstance(leaf, Tensor):
            wrong = leaf.isnan() if infinity else leaf.isfinite().logical_not()
            if wrong.any():
                return False
        elif isinstance(leaf, float) and math.isnan(leaf):
            return False
    return True


def _describe(memory: Memory) -> str:
    """Describe the outer structure of a memory in a few words."""
    if isinstance(memory, Tensor):
        return f"tensor{tuple(memory.shape)}"
    if isinstance(memory, dict):
        return f"dict with {short_repr(list(memory))}"
    if isinstance(memory, tuple):
        return f"tuple({', '.join(map(_describe, memory))})"[:200]
    return type(memory).__name__


@contextmanager
def unchanged(kind: str, *arguments: Any, setting: str = "") -> Iterator[None]:
    """Refuse a component that changes a tensor of its arguments in place.

    A `Round.state` that the caller keeps, the checkpoint that a thread is writing, and the metrics of the round share
    these tensors. Writes that bypass torch (`g.numpy()[:] = 0`, `g.data.zero_()`) do not change the version counter and
    are not detected.

    Args:
        kind: The component, for the error message.
        arguments: Trees of tensors.
        setting: The setting of the component; by default its kind.

    Raises:
        InputError: The version counter of a tensor has changed (`changed-in-place`).
    """
    watched = [t for t in tensors(arguments) if not t.is_inference()]
    before = [t._version for t in watched]
    yield
    if [t._version for t in watched] != before:
        text = f"the {kind} changes its input or its memory in place; return a new tensor, as torch.clamp does"
        raise InputError(text, code="changed-in-place", setting=setting or kind)


def unchanged_uploads(kind: str, uploads: Iterable[Upload]) -> Iterator[Upload]:
    """Yield the uploads, and refuse a component that changes one of them in place.

    Each upload is checked, and its reference dropped, before the next one is computed.
    """
    for upload in uploads:
        with unchanged(kind, upload):
            yield upload
        del upload


def to_device(memory: Memory, device: torch.device) -> Memory:
    """The tree with its tensors on a device."""
    return map_tensors(lambda t: t.to(device), memory)
