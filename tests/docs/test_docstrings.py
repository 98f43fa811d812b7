"""Docstrings of the public API: a summary, every argument, the result, and an example that runs as a doctest."""

from collections.abc import Iterator

import griffe
import pytest
import yaml

import stableair as sa
from helpers import ROOT
from helpers.pages import docs_module
from stableair.cli.reference import describe_arguments
from stableair.experiment import COMPONENT_SETTINGS, NESTED_COMPONENTS, registry
from stableair.spec import Entry

NO_DOCTEST = {  # paths of public names without an example that runs, and the reason
    "stableair.flower.app.client_app": "an extra",
    "stableair.flower.app.server_app": "an extra",
    "stableair.flower.mods.limited": "an extra",
    "stableair.paper.demo.demo": "half a minute",
    "stableair.results.trackers.MLflow": "an extra",
    "stableair.results.trackers.TensorBoard": "an extra",
    "stableair.results.trackers.WandB": "an extra, and a service",
    "stableair.spec.load_plugin": "the registered component would stay",
    "stableair.sweeps.clusters.submit": "SLURM",
}
SUMMARY = 100  # characters, which a summary must not reach

SOURCE = griffe.load("stableair", search_paths=[ROOT / "src"])
ENTRIES = [entry for setting in COMPONENT_SETTINGS | NESTED_COMPONENTS for entry in registry(setting)]
PATHS = {f"{entry.factory.__module__}.{entry.factory.__qualname__}": entry for entry in ENTRIES}
COMPONENTS = {path: entry for path, entry in PATHS.items() if path.startswith("stableair.")}


def find(path: str) -> griffe.Object:
    """The module, function or class of a path; a name that is imported there stands for the original."""
    found = SOURCE[path.removeprefix("stableair.")]
    return found.final_target if found.is_alias else found


NAMES = {find(f"{module}.{name}").path for name, module in sa._public().items()}
NAMES |= {"stableair.spec.Registry"}  # the class of the decorators, such as sa.receiver


def front_matter(key: str) -> set[str]:
    """The paths that the pages of the reference list under a key of their front matter."""
    pages = [page.read_text() for page in (ROOT / "docs/reference").glob("*.md")]
    heads = [yaml.safe_load(text.split("---")[1]) for text in pages if text.startswith("---")]
    return {f"stableair.{path}" for head in heads for path in head.get(key, [])}


def whole_modules() -> set[str]:
    """The modules that are public names, and the modules that a page of the reference shows completely."""
    return front_matter("whole") | {name for name in NAMES if find(name).is_module}


def documented() -> list[griffe.Object]:
    """The public functions and classes, the factories of the components, and other entries of the reference."""
    content = [member for path in whole_modules() for member in find(path).members.values()]
    members = {member.path for member in content if member.is_public and not member.is_alias}
    others = {find(path).path for path in front_matter("also")}
    found = map(find, sorted(NAMES | COMPONENTS.keys() | members | others))
    return [obj for obj in found if obj.is_function or obj.is_class]


def sections(obj: griffe.Object) -> dict[str, griffe.DocstringSection]:
    """The sections of a docstring by their kinds, such as "parameters"."""
    parsed = obj.docstring.parse("google", returns_multiple_items=False, returns_named_value=False)
    return {section.kind.value: section for section in parsed}


def descriptions(obj: griffe.Object) -> dict[str, str]:
    """The descriptions in the Args section by the names of the arguments."""
    parameters = sections(obj)["parameters"].value if "parameters" in sections(obj) else []
    return {parameter.name.lstrip("*"): " ".join(parameter.description.split()) for parameter in parameters}


def argument_problems(obj: griffe.Object) -> Iterator[str]:
    """Arguments without a description, and descriptions of unknown arguments; fields may have comments instead."""
    described = descriptions(obj).keys()
    if obj.is_function or ("__init__" in obj.members and "dataclass" not in obj.labels):
        needed = {parameter.name for parameter in obj.parameters} - {"self", "cls"}
        yield from (f"{name} is not an argument" for name in sorted(described - needed))
    else:
        docs = docs_module("docstrings")
        needed = {field.name for field in docs.fields(obj) if not docs.description(field)}
    yield from (f"no description of {name}" for name in sorted(needed - described))


def summary_problems(obj: griffe.Object) -> Iterator[str]:
    first, *rest = obj.docstring.value.split("\n") if obj.docstring else [""]
    if not first:
        yield f"{obj.name} has no summary"
    if rest and rest[0]:
        yield f"the summary of {obj.name} has several lines"
    if len(first) >= SUMMARY:
        yield f"the summary of {obj.name} has {len(first)} characters"


def result_problems(obj: griffe.Object) -> Iterator[str]:
    results = [section for kind, section in sections(obj).items() if kind in ("returns", "yields")]
    if not results and str(obj.returns) not in ("None", "NoReturn"):
        yield "no Returns"
    for section in results:
        if str(section.value[0].annotation) not in str(obj.returns):
            yield f"read as a type: {section.value[0].annotation}"  # the text before a colon


def example_problems(obj: griffe.Object) -> Iterator[str]:
    is_needed = obj.is_function or obj.path in NAMES | COMPONENTS.keys()  # functions show records and protocols
    if is_needed and obj.path not in NO_DOCTEST and ">>> " not in obj.docstring.value:
        yield "no example"
    if "+SKIP" in obj.docstring.value:
        yield "a doctest is skipped"


def methods(obj: griffe.Object) -> list[griffe.Object]:
    """The public methods and properties of a class."""
    members = [member for member in obj.members.values() if obj.is_class and not member.name.startswith("_")]
    return [member for member in members if member.is_function or "property" in member.labels]


def problems(obj: griffe.Object) -> list[str]:
    """The gaps in a docstring, and in the summaries of the methods of a class."""
    found = list(summary_problems(obj))
    if obj.docstring:
        found += [*argument_problems(obj), *example_problems(obj)]
        found += result_problems(obj) if obj.is_function else []
    return found + [problem for method in methods(obj) for problem in summary_problems(method)]


@pytest.mark.parametrize("obj", documented(), ids=lambda obj: obj.path)
def test_a_docstring_is_complete(obj):
    assert problems(obj) == []


def test_every_exception_from_the_doctests_is_needed():
    assert [path for path in NO_DOCTEST if ">>> " in find(path).docstring.value] == []


@pytest.mark.parametrize("path", COMPONENTS)
def test_the_lists_of_components_describe_arguments_as_the_site_does(path):
    assert describe_arguments(COMPONENTS[path]) == descriptions(find(path))


def test_a_component_without_a_docstring_has_no_descriptions():
    assert describe_arguments(Entry("soft", lambda C: None, {})) == {}


RECORD = '''
from dataclasses import dataclass


class Point(NamedTuple):
    """A point.

    >>> Point(1.0).x
    1.0
    """

    x: float  # abscissa, in m | km
    y: float = 0.0


class Circle(NamedTuple):
    """A circle.

    Args:
        r: The radius.
    """

    r: float  # not shown twice


@dataclass
class Settings:
    lr: float = _setting(0.03, "Learning rate.", RATE)
'''


@pytest.fixture
def package():
    extension = docs_module("docstrings").Docstrings()
    modules, extensions = {"__init__.py": RECORD}, griffe.load_extensions(extension)
    with griffe.temporary_visited_package("records", modules, extensions=extensions) as package:
        yield package


@pytest.fixture
def records(package):
    return {name: package[name].docstring.value for name in ("Point", "Circle", "Settings")}


def test_the_site_shows_fields_as_a_table_with_their_comments(records):
    rows = [line for line in records["Point"].splitlines() if line.startswith("| `")]
    assert rows == ["| `x` | <code>float</code> | abscissa, in m &#124; km |", "| `y` | <code>float = 0.0</code> |  |"]


def test_the_site_shows_settings_with_their_defaults_and_help_texts(records):
    assert "| `lr` | <code>float = 0.03</code> | Learning rate. |" in records["Settings"]


def test_the_site_shows_the_defaults_of_settings_in_the_signature(package):
    assert str(package["Settings"].parameters["lr"].default) == "0.03"


def test_the_site_shows_arguments_once(records):
    assert "radius" in records["Circle"]
    assert "not shown twice" not in records["Circle"]


def test_the_site_shows_doctests_as_code(records):
    assert "```pycon\n>>> Point(1.0).x\n1.0\n```" in records["Point"]
