"""The version of a plug-in covers every local module that it may load."""

import sys

import pytest

import stableair as sa
from stableair.sources import source_of

PLUGIN = """
import stableair as sa
{line}

@sa.receiver("covering")
def covering():
    {inner}
    return lambda g: g
"""
LAZY = {
    "a function": "def __getattr__(name):\n    return __import__('importlib').import_module('.' + name, __name__)\n",
    "an assignment": "import lazy_loader as z\n__getattr__, __dir__, __all__ = z.attach_stub(__name__, __file__)\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the path with a package `toolbox` of two modules, none of which is imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    package = tmp_path / "toolbox"
    (package / "deep").mkdir(parents=True)
    for name in ("__init__.py", "gains.py", "deep/__init__.py", "deep/limits.py"):
        (package / name).write_text("VALUE = 1\n")
    return tmp_path


def version(folder, line="", inner="pass"):
    """The version of a plug-in with an import at its top or in its function, which is not called."""
    file = folder / "covering_rules.py"
    file.write_text(PLUGIN.format(line=line, inner=inner))
    sys.modules.pop("stableair_plugin_covering_rules", None)
    sa.receiver.entries.pop("covering", None)
    sa.load_plugin(file)
    return source_of(sa.receiver.entries["covering"].factory).version


@pytest.mark.parametrize(
    ("inner", "module"),
    [
        ("import toolbox.gains", "gains"),
        ("from toolbox.deep import limits", "deep/limits"),
        ("from toolbox.deep.limits import VALUE", "deep/limits"),
        ("import importlib; importlib.import_module('toolbox.gains')", "gains"),
        ("from importlib import import_module; import_module('toolbox.deep.limits')", "deep/limits"),
        ("__import__('toolbox.gains')", "gains"),
    ],
)
def test_imports_in_functions_are_covered(folder, registries, inner, module):
    before = version(folder, inner=inner)
    assert version(folder, inner=inner) == before
    (folder / "toolbox" / f"{module}.py").write_text("VALUE = 2\n")
    assert version(folder, inner=inner) != before
    assert not [name for name in sys.modules if name.startswith("toolbox")], "the version imports nothing"


def test_modules_that_are_not_imported_do_not_change_the_version(folder, registries):
    before = version(folder, inner="import toolbox.gains")
    (folder / "toolbox" / "deep" / "limits.py").write_text("VALUE = 2\n")
    assert version(folder, inner="import toolbox.gains") == before


@pytest.mark.parametrize("init", LAZY.values(), ids=LAZY)
def test_all_modules_of_a_package_that_loads_them_on_demand_are_covered(folder, registries, init):
    (folder / "toolbox" / "__init__.py").write_text(init)
    before = version(folder, inner="import toolbox; toolbox.deep.limits")
    (folder / "toolbox" / "deep" / "limits.py").write_text("VALUE = 2\n")
    assert version(folder, inner="import toolbox; toolbox.deep.limits") != before


def test_a_method_getattr_of_a_class_loads_nothing(folder, registries):
    (folder / "toolbox" / "__init__.py").write_text("class A:\n    def __getattr__(self, name):\n        return 1\n")
    before = version(folder, inner="import toolbox")
    (folder / "toolbox" / "gains.py").write_text("VALUE = 2\n")
    assert version(folder, inner="import toolbox") == before
