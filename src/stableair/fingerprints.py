"""Digests of Python objects: their values, and the code of their functions and classes.

Equal objects have equal digests in every process. Of code in this package and in installed packages, the digest covers
only the name. An object whose content cannot be read has a different digest in every process.
"""

import functools
import hashlib
import inspect
import pickle
import secrets
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stableair.sources import is_local, source_of

PROCESS = secrets.token_hex(8)
PLAIN = type(None), bool, int, float, complex, str, bytes, Enum, Path, torch.dtype, torch.device, np.generic
MODULE_INTERNALS = vars(nn.Module()).keys()
HOOKS = "_forward_hooks", "_forward_pre_hooks"


def fingerprint(value: Any) -> str:
    """Return 16 hex digits that depend on the content and the code of an object.

    >>> fingerprint({"a": [1.0, 2]}) == fingerprint({"a": [1.0, 2]})
    True
    >>> fingerprint([1, 2]) == fingerprint([2, 1])
    False
    """
    return _digest(value, frozenset())[:16]


def qualified_name(value: Any) -> str:
    """Return the module and the name of a function or a class, or of the class of another object.

    The module of a script or a notebook is left out.

    >>> qualified_name(nn.ReLU())
    'torch.nn.modules.activation.ReLU'
    """
    while isinstance(value, functools.partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{named.__module__}.{named.__qualname__}".removeprefix("__main__.")
    return name.replace(".<locals>", "").replace("<lambda>", "lambda")


def _digest(value: Any, outer: frozenset[int]) -> str:
    """Compute the digest of an object; of an object within itself, only the type is used."""
    result = hashlib.sha256(f"{type(value).__module__}.{type(value).__qualname__}".encode())
    if id(value) not in outer:
        for part in _parts(value):
            inner = part if isinstance(part, bytes) else _digest(part, outer | {id(value)}).encode()
            result.update(len(inner).to_bytes(8) + inner)
    return result.hexdigest()


def _parts(value: Any) -> Iterator[Any]:
    """Yield the parts of an object: bytes, or further objects."""
    if isinstance(value, PLAIN):
        yield repr(value).encode(errors="surrogatepass")
    elif isinstance(value, Tensor):
        yield repr((value.dtype, tuple(value.shape), value.requires_grad)).encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield repr((value.dtype, value.shape)).encode()
        yield value.tobytes()
    elif isinstance(value, dict):
        yield from sorted(value.items(), key=lambda pair: repr(pair[0]))
    elif isinstance(value, set | frozenset):
        yield from sorted(value, key=repr)
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, ModuleType | BuiltinFunctionType) or hasattr(value, "__objclass__"):  # implemented in C
        yield getattr(value, "__qualname__", value.__name__).encode()
    elif isinstance(value, FunctionType | type):
        yield from _code_parts(value)
    else:
        yield from _object_parts(value)


def _object_parts(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield from (value.fget, value.fset, value.fdel)
    elif isinstance(value, nn.Module):
        attributes = {name: one for name, one in vars(value).items() if name not in MODULE_INTERNALS}
        yield from (
            type(value),
            dict(value._parameters),
            dict(value._buffers),
            list(value._modules.items()),
            attributes,
        )
        yield [list(getattr(value, name).values()) for name in HOOKS]
    elif isinstance(value, torch.Generator):
        yield value.get_state()
    elif hasattr(value, "__dict__"):
        yield from (type(value), vars(value))
    else:
        yield type(value)
        try:
            yield pickle.dumps(value)
        except Exception:  # objects of any library
            yield f"{PROCESS} {id(value)}".encode()


def _code_parts(value: Any) -> Iterator[Any]:
    """Yield the code of a function or a class, and the objects that it refers to."""
    yield qualified_name(value).encode()
    is_function, is_script = isinstance(value, FunctionType), _is_script(value)
    if not is_script and _is_users(value):
        source = source_of(value)
        yield source.version.encode() if source else b""
    if is_function:
        yield from (value.__defaults__, value.__kwdefaults__, _closure(value))
        if is_script or value.__name__ == "<lambda>":
            yield from _bytecode(value.__code__)
    elif is_script:
        yield list(value.__mro__[1:-1])
        yield {name: one for name, one in vars(value).items() if _is_defined(name, one)}
    if is_script and is_function:
        names = _names(value.__code__) & value.__globals__.keys()
        yield {name: value.__globals__[name] for name in names}


def _is_script(code: Any) -> bool:
    """Whether a function or class was defined in a script, a notebook or an interactive session."""
    module = sys.modules.get(code.__module__ or "")
    return code.__module__ == "__main__" or not module


def _is_users(code: Any) -> bool:
    """Whether a function or class belongs to the user: it is neither in this package nor installed."""
    file = getattr(sys.modules[code.__module__], "__file__", None) or ""
    return is_local(Path(file))


def _is_defined(name: str, value: Any) -> bool:
    """Whether the body of a class defines this attribute."""
    return not (name.startswith("__") and name.endswith("__")) or inspect.isfunction(value)


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return {name: cell.cell_contents for name, cell in cells.items() if cell != CellType()}


def _bytecode(code: CodeType) -> Iterator[Any]:
    """Yield the instructions of a function and of the functions in it, without file names and line numbers."""
    yield code.co_code
    yield [*code.co_names, *code.co_varnames, *code.co_freevars]
    for constant in code.co_consts:
        yield list(_bytecode(constant)) if isinstance(constant, CodeType) else constant


def _names(code: CodeType) -> set[str]:
    """Return the names that a function and the functions in it use."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
