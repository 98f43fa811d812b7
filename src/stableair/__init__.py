"""Federated learning over the air under heavy-tailed interference. `import stableair as sa`."""

import ast
import os
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.3.0.dev0"

# Threads of torch that spin while they wait make a busy machine several times slower. OpenMP reads this variable when
# torch is imported, so it has no effect in a program that has imported torch before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@cache
def _public() -> dict[str, str]:
    """The module of each public name, read from the stub that type checkers read too."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return ["__version__", *_public()]
    if name not in _public():
        raise AttributeError(f"module 'stableair' has no attribute {name!r}")
    module = _public()[name]
    return import_module(f"{module}.{name}") if module == __name__ else getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_public()])
