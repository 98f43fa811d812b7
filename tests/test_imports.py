"""Who imports whom, read from the source: no cycles, nothing upward, and the leaves by their seams alone.

An import counts wherever it stands: at the top, within a function, relative, for the type checker, by the name of a
module in a string or a table of strings, or through the names that the package itself loads when they are asked for.
"""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

import stableair

# From bottom to top: a part imports only what is below it. Within a folder anything goes but a cycle.
LAYERS = (
    "checks", "choices", "files", "streams", "spec", "stable", "vector", "contracts", "data", "models", "participants",
    "local", "channels", "receivers", "servers", "evaluation", "algorithm", "baseline", "experiment", "builder",
    "results", "ranks", "runner", "sweeps", "comparisons", "searches", "theory", "paper", "nn", "engine", "flower",
    "cli", "__main__",
)  # fmt: skip
SEAMS = {"engine": {"runner", "cli"}, "flower": {"cli"}}  # the leaves, and who may know that they are there
KNOWN: dict[tuple[str, str], str] = {  # imports that have to go, and why they are still there: none
}

Graph = dict[str, set[str]]  # each module, and the modules that it imports


def modules(package: Path) -> dict[str, Path]:
    """Every module of a package by its full name; that of a folder is its __init__.py."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(package: Path) -> Graph:
    """What each module of a package imports of it. The package's own __init__.py is left out: it may load anything."""
    known = modules(package)
    trees = {name: ast.parse(path.read_text()) for name, path in known.items()}
    lazy = lazy_names(package.name, trees.pop(package.name), set(known))
    return {name: Reader(name, known, lazy).read(tree) for name, tree in trees.items()}


def lazy_names(package: str, tree: ast.Module, known: set[str]) -> dict[str, str]:
    """The names that a package loads when they are asked for, and the module that each comes from."""
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Dict(keys=keys, values=values):
                pairs = list(zip(keys, values, strict=True))
            case ast.Tuple(elts=values) | ast.List(elts=values):
                pairs = list(zip(values, values, strict=True))
            case _:
                pairs = []
        for pair in pairs:
            match pair:
                case ast.Constant(value=str() as name), ast.Constant(value=str() as home):
                    if f"{package}.{home}" in known:
                        found[name] = f"{package}.{home}"
    return found


class Reader(ast.NodeVisitor):
    """The imports of one module."""

    def __init__(self, name: str, known: dict[str, Path], lazy: dict[str, str]):
        self.name, self.known, self.lazy = name, known, lazy
        self.package = name.partition(".")[0]
        self.folder = name if known[name].name == "__init__.py" else name.rpartition(".")[0]
        self.found: set[str] = set()
        self.package_names: set[str] = set()  # what the package itself is called here
        self.loaders = {"import_module", "__import__"}
        self.prefixes: set[str] = set()  # of names that are put together to be imported

    def read(self, tree: ast.Module) -> set[str]:
        self.visit(tree)
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=package), attr=name) if package in self.package_names:
                    self.add_from(self.package, name)
                case ast.Constant(value=str() as text):
                    for prefix in self.prefixes:
                        if prefix + text in self.known:
                            self.add(prefix + text)
        return self.found - {self.name}

    def add(self, name: str) -> None:
        """A module, and with it the folders around it that this one does not lie in: they are loaded first."""
        while name and name not in self.known:
            name = name.rpartition(".")[0]
        if name == self.package or not name:
            return
        self.found.add(name)
        while (name := name.rpartition(".")[0]) != self.package:
            if not f"{self.name}.".startswith(f"{name}."):
                self.found.add(name)

    def add_from(self, module: str, name: str) -> None:
        """What `from module import name` loads."""
        if f"{module}.{name}" in self.known:
            self.add(f"{module}.{name}")
        elif module == self.package:
            self.add(self.lazy.get(name, ""))
        else:
            self.add(module)

    def absolute(self, module: str) -> str:
        """The full name of `.module`, `..module`, ..."""
        rest = module.lstrip(".")
        base = self.folder.split(".")
        base = base[: len(base) + 1 - (len(module) - len(rest))] if rest != module else []
        return ".".join([*base, *filter(None, [rest])])

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name)
            if alias.name.partition(".")[0] == self.package and (not alias.asname or alias.name == self.package):
                self.package_names.add(alias.asname or self.package)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self.absolute("." * node.level + (node.module or ""))
        for alias in node.names:
            self.add_from(module, alias.name)
            if module == "importlib" and alias.name == "import_module":
                self.loaders.add(alias.asname or alias.name)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in self.loaders and node.args:
            match node.args[0]:
                case ast.Constant(value=str() as name):
                    self.add(self.absolute(name))
                case ast.JoinedStr(values=[ast.Constant(value=str() as prefix), *_]):
                    self.prefixes.add(self.absolute(prefix))
                case ast.BinOp(left=ast.Constant(value=str() as prefix)):
                    self.prefixes.add(self.absolute(prefix))
                case _:
                    self.prefixes.add("")  # from a table, whose strings are whole names
        self.generic_visit(node)


def cycle(graph: Graph) -> list[str]:
    """The modules of a cycle, each of which imports the next; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def layer(module: str) -> str:
    """`results` of stableair.results.plot."""
    return module.split(".")[1]


def edges(graph: Graph) -> list[tuple[str, str]]:
    return [(name, other) for name in sorted(graph) for other in sorted(graph[name])]


def upward(graph: Graph, layers: tuple[str, ...], seams: dict[str, set[str]]) -> list[str]:
    """The imports of something above; that of a leaf by its seam is none."""
    place = {name: i for i, name in enumerate(layers)}
    return [
        f"{name} imports {other}"
        for name, other in edges(graph)
        if place[layer(other)] > place[layer(name)] and layer(name) not in seams.get(layer(other), ())
    ]


def strangers(graph: Graph, seams: dict[str, set[str]]) -> list[str]:
    """The imports of a leaf by anything but its seam and itself."""
    return [
        f"{name} imports {other}"
        for name, other in edges(graph)
        if layer(other) in seams and layer(name) not in seams[layer(other)] | {layer(other)}
    ]


# --------------------------------------------------------------------------------------------------- the house as it is


@pytest.fixture(scope="module")
def house():
    return imports(Path(stableair.__file__).parent)


@pytest.fixture(scope="module")
def settled(house):
    """Without the imports that are known to have to go."""
    return {name: {other for other in found if (name, other) not in KNOWN} for name, found in house.items()}


def test_every_module_has_a_layer(house):
    assert {layer(name) for name in house} <= set(LAYERS)


def test_no_module_imports_itself_by_way_of_others(settled):
    assert " imports ".join(cycle(settled)) == ""


def test_nothing_is_imported_upward(settled):
    assert upward(settled, LAYERS, SEAMS) == []


def test_a_leaf_is_imported_by_its_seam_alone(settled):
    assert strangers(settled, SEAMS) == []


def test_what_is_known_is_still_there(house):
    assert [edge for edge in KNOWN if edge[1] not in house.get(edge[0], ())] == [], "take it out of KNOWN"


def test_the_reader_sees_the_imports_of_the_house(house):
    assert house["stableair.receivers.compose"] >= {"stableair.contracts", "stableair.receivers.rules"}
    assert house["stableair.experiment"] >= {"stableair.data.sets", "stableair.receivers", "stableair.servers"}
    assert "stableair.engine" in house["stableair.runner"], "within a function"
    assert house["stableair.checks"] == house["stableair.streams"] - {"stableair.checks"} == set()
    assert house["stableair.spec"] == {"stableair.checks"}, "where something was in 0.1 is no import"


def test_scipy_stats_is_not_loaded_before_it_is_needed():
    parts = "channels", "builder", "runner", "searches", "theory", "paper.figures", "results.report", "nn"
    load = "; ".join(f"import stableair.{part}" for part in parts)
    code = f"import sys; {load}; assert 'scipy.stats' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------- the reader can fail


def house_of(folder, files):
    """The imports of a package `house` with these files."""
    for name, text in ({"__init__": ""} | files).items():
        path = folder / "house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return imports(folder / "house")


@pytest.mark.parametrize(
    "text",
    [
        "import house.b",
        "import house.b as c",
        "from house import b",
        "from house.b import something",
        "from house.b import *",
        "from . import b",
        "from .b import something",
        "def f():\n    from house.b import g",
        "def f():\n    class C:\n        import house.b",
        "try:\n    import house.b\nexcept ImportError:\n    pass",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.b import C",
        "import importlib\nimportlib.import_module('house.b')",
        "from importlib import import_module\nimport_module('house.b')",
        "from importlib import import_module as load\nload('house.b')",
        "from importlib import import_module\nimport_module('.b', __package__)",
        "__import__('house.b')",
        "from importlib import import_module\nfor x in ['b']: import_module(f'house.{x}')",
        "from importlib import import_module\nfor x in ['b']: import_module('house.' + x)",
        "from importlib import import_module\nHOMES = {'x': ('house.b', 'y')}\nimport_module(HOMES['x'][0])",
        "from house import name",
        "import house\nhouse.name",
        "import house as h\ndef f():\n    h.name",
        "import house\nhouse.b.something",
    ],
)
def test_every_way_to_import_is_seen(text, tmp_path):
    table = "from importlib import import_module\n_HOME = {'name': 'b'}\ndef __getattr__(n): ..."
    assert house_of(tmp_path, {"__init__": table, "a": text, "b": ""})["house.a"] == {"house.b"}


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "'house.b'",
        "MOVED = {'x': 'house.b'}",
        "from importlib import import_module\nimport_module('b')",
        "import house\nhouse.__version__",
        "from house import __version__",
        "import other.house.b",
        "# import house.b",
    ],
)
def test_what_is_no_import_is_not(text, tmp_path):
    assert house_of(tmp_path, {"a": text, "b": ""})["house.a"] == set()


def test_relative_imports_climb_from_where_they_stand(tmp_path):
    found = house_of(
        tmp_path,
        {
            "rooms/__init__": "from . import one",
            "rooms/one": "from .. import cellar\nfrom ..attic import box\nfrom .two import x",
            "rooms/two": "",
            "attic/__init__": "",
            "attic/box": "",
            "cellar": "from .rooms import two",
        },
    )
    assert found["house.rooms"] == {"house.rooms.one"}
    assert found["house.rooms.one"] == {"house.cellar", "house.attic", "house.attic.box", "house.rooms.two"}
    assert found["house.cellar"] == {"house.rooms", "house.rooms.two"}, "the folder is loaded with what is in it"


def test_a_lazy_cycle_is_a_cycle(tmp_path):
    graph = house_of(tmp_path, {"a": "import house.b", "b": "import house.c", "c": "def f():\n    from . import a"})
    found = cycle(graph)
    assert found[0] == found[-1]
    assert set(found) == {"house.a", "house.b", "house.c"}
    assert all(after in graph[before] for before, after in pairwise(found))
    assert cycle(graph | {"house.c": set()}) == []


def test_a_cycle_by_way_of_a_folder_is_one(tmp_path):
    room = {"room/__init__": "from house.room import two", "room/one": "", "room/two": "import house.a"}
    graph = house_of(tmp_path, {"a": "from house.room import one"} | room)
    assert set(cycle(graph)) == {"house.a", "house.room", "house.room.two"}


def test_an_upward_import_is_found(tmp_path):
    graph = house_of(tmp_path, {"low": "def f():\n    import house.high", "high": "import house.low"})
    assert upward(graph, ("low", "high"), {}) == ["house.low imports house.high"]
    assert upward(graph, ("high", "low"), {}) == ["house.high imports house.low"]
    assert upward(graph, ("low", "high"), {"high": {"low"}}) == []


def test_a_leaf_that_a_stranger_imports_is_found(tmp_path):
    leaf = {"leaf/__init__": "", "leaf/tool": "import house.leaf"}
    graph = house_of(tmp_path, {"seam": "import house.leaf", "top": "from house.leaf import tool"} | leaf)
    found = strangers(graph, {"leaf": {"seam"}})
    assert found == ["house.top imports house.leaf", "house.top imports house.leaf.tool"]
    assert upward(graph, ("seam", "leaf", "top"), {"leaf": {"seam"}}) == []
