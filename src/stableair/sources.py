"""The source code of components that users define: its file, and a version that changes with the code."""

import ast
import functools
import hashlib
import inspect
import secrets
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parent
STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
INSTALLED = {"site-packages", "dist-packages"}
UNKNOWN = "unknown:"  # prefix of the version of a component without source code


class Source(NamedTuple):
    """Location and version of the code of a component.

    Args:
        file: The file of the plug-in or the script; a name such as "<stdin>" for an interactive session.
        version: "sha256:..." of the code. Without source code: "unknown:..." with a random number. It then differs from
            the version of every other registration, so that another process cannot reuse the results.
    """

    file: str
    version: str


def source_of(factory: Callable[..., Any]) -> Source | None:
    """Find the source of a component; None for a component of this package.

    For a component in a module, the version covers the module's file and the local modules that it imports: at the top
    or in a function, with a statement or with `importlib.import_module("name")`. If a package loads its modules on
    demand (its __init__.py defines `__getattr__`), the version covers all of its modules. It does not cover modules
    whose name is computed, and files that are read or executed in another way. For a component in a script or a
    notebook, the version covers the code of the component only.
    """
    function = inspect.unwrap(factory)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if not hasattr(function, "__module__"):
        function = type(function)
    name = function.__module__ or ""
    if name.partition(".")[0] == PACKAGE.name:
        return None
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file and name != "__main__" and Path(file).is_file():
        return Source(str(file), _version(_local_files(Path(file), getattr(module, "__package__", None) or "")))
    location = getattr(getattr(function, "__code__", None), "co_filename", name)
    try:
        return Source(location, _version({location: inspect.getsource(function)}))
    except (OSError, TypeError):
        return Source(location, UNKNOWN + secrets.token_hex(8))


def _version(texts: dict[str, str]) -> str:
    """Compute the hash of texts and their names."""
    return f"sha256:{hashlib.sha256(repr(sorted(texts.items())).encode(errors='surrogatepass')).hexdigest()}"


def _local_files(file: Path, package: str) -> dict[str, str]:
    """Compute the hashes of a Python file and of the local modules that it imports, directly or indirectly."""
    hashes: dict[Path, str] = {}
    pending = [(file, package)]
    while pending:
        path, package = pending.pop()
        if path in hashes:
            continue
        status = path.stat()
        hashes[path], imports, on_demand = _read(path, status.st_mtime_ns, status.st_size)
        if on_demand and path.name == "__init__.py":
            for other in path.parent.rglob("*.py"):
                pending.append((other, ".".join([package, *other.parent.relative_to(path.parent).parts])))
        for name in _module_names(imports, package):
            module_file, is_package = _module_file(name)
            if module_file and is_local(module_file):
                pending.append((module_file, name if is_package else name.rpartition(".")[0]))
    return {f"{path.name} {digest}": digest for path, digest in hashes.items()}


@functools.lru_cache(1000)
def _read(path: Path, changed: int, size: int) -> tuple[str, tuple[tuple[int, str], ...], bool]:
    """Read the hash of a file, its imports as (number of leading dots, name), and whether it defines `__getattr__`.

    The modification time `changed` and the `size` are keys of the cache.
    """
    content = path.read_bytes()
    tree = ast.parse(content)
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = f"{node.module}." if node.module else ""
            imports += [(node.level, start + alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and (name := _imported_by_call(node)):
            imports.append((len(name) - len(name.lstrip(".")), name.lstrip(".")))
    return hashlib.sha256(content).hexdigest(), tuple(imports), any(map(_defines_getattr, tree.body))


def _imported_by_call(call: ast.Call) -> str:
    """Return the name in `importlib.import_module("name")` or `__import__("name")`; "" for any other call."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    argument = call.args[0] if call.args else None
    if function not in ("import_module", "__import__") or not isinstance(argument, ast.Constant):
        return ""
    return argument.value if isinstance(argument.value, str) else ""


def _defines_getattr(statement: ast.stmt) -> bool:
    """Whether a statement of a module defines `__getattr__`, with def or by an assignment."""
    if isinstance(statement, ast.FunctionDef):
        return statement.name == "__getattr__"
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(getattr(node, "id", "") == "__getattr__" for target in targets for node in ast.walk(target))


def _module_names(imports: tuple[tuple[int, str], ...], package: str) -> Iterator[str]:
    """Yield the modules that imports may load: for a.b.c the names a, a.b and a.b.c."""
    for level, name in imports:
        try:
            parts = resolve_name("." * level + name, package or None).split(".")
        except ImportError:  # a relative import outside a package
            continue
        yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _module_file(name: str) -> tuple[Path | None, bool]:
    """Find the file of a module, and whether it is a package; the module is not imported."""
    if name in sys.modules:
        module = sys.modules[name]
        file = getattr(module, "__file__", None)
        return (Path(file) if file else None), hasattr(module, "__path__")
    spec = _module_spec(name)
    is_package = bool(spec and spec.submodule_search_locations is not None)
    return (Path(spec.origin) if spec and spec.origin else None), is_package


def _module_spec(name: str) -> ModuleSpec | None:
    """Find the import spec of a module; neither the module nor its parents are imported."""
    parent = name.rpartition(".")[0]
    if not parent:
        return PathFinder.find_spec(name)
    if parent in sys.modules:
        path = getattr(sys.modules[parent], "__path__", None)
    else:
        spec = _module_spec(parent)
        path = spec.submodule_search_locations if spec else None
    return None if path is None else PathFinder.find_spec(name, list(path))


def is_local(file: Path) -> bool:
    """Whether a module belongs to the user: not to this package, an installed package or the standard library."""
    path = file.absolute()
    is_known = path.is_relative_to(PACKAGE) or path.is_relative_to(STANDARD_LIBRARY) or INSTALLED & set(path.parts)
    return path.suffix == ".py" and path.is_file() and not is_known
