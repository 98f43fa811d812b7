"""The generated tables of the reference: complete, and readable as Markdown."""

import re

import pytest

from helpers import ROOT
from helpers.pages import docs_module
from stableair.cli.main import COMMANDS
from stableair.experiment import COMPONENT_SETTINGS, NESTED_COMPONENTS, SETTING_FIELDS, registry

TESTED_CODE = re.compile(r"""(?:code == |refused\(\s*)["']([a-z]+(?:-[a-z]+)+)["']""")


@pytest.fixture(scope="module")
def tables():
    return {name: list(lines()) for name, lines in docs_module("reference_tables").TABLES.items()}


def first_cells(lines):
    return [match[1] for line in lines if (match := re.match(r"\| `([^`(]+)", line))]


def test_every_setting_is_listed(tables):
    assert first_cells(tables["settings"]) == list(SETTING_FIELDS)


def test_every_component_is_listed(tables):
    listed = set(first_cells(tables["components"]))
    assert {entry.name for field in COMPONENT_SETTINGS | NESTED_COMPONENTS for entry in registry(field)} <= listed


def test_every_argument_of_a_component_is_listed_with_its_description(tables):
    text = "\n".join(tables["components"])
    assert "<br>`beta: float`: Concentration, above 0; 0.3 in the paper." in text
    for field in COMPONENT_SETTINGS | NESTED_COMPONENTS:
        assert all(f"<br>`{typed}`: " in text for entry in registry(field) for typed in entry.typed_parameters.values())


def test_every_command_and_option_is_listed(tables):
    text = "\n".join(tables["commands"])
    assert re.findall(r"^### stableair (\w+)$", text, re.MULTILINE) == [*COMMANDS, "data"]
    assert "### stableair data prepare" in text
    assert "`--keep-best`" in text
    assert "| `DIR...` |  | Run folders, or folders that contain run folders. |" in tables["commands"]


def test_the_error_codes_are_those_of_the_source(tables):
    listed = set(first_cells(tables["errors"]))
    source = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    written = {code for text in source for code in re.findall(r'\bcode="([a-z-]+)"', text)}
    assert written <= listed
    assert not [code for code in listed if not any(f'"{code}"' in text for text in source)]


def test_codes_that_tests_expect_are_listed(tables):
    """Also codes that the source does not write as code="...", such as not-json."""
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    expected = {code for text in texts for code in TESTED_CODE.findall(text)}
    assert "not-json" in expected
    assert expected <= set(first_cells(tables["errors"]))


@pytest.mark.parametrize("name", ["settings", "components", "commands", "errors"])
def test_every_row_has_the_columns_of_its_head(tables, name):
    columns = 0
    for line in tables[name]:
        bars = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))
        columns = bars if line.startswith("|---") else columns if line.startswith("|") else 0
        assert not columns or bars == columns, line
