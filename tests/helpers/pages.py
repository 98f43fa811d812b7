"""The pages of the documentation: their blocks of code and their commands."""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from helpers import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIAL = ROOT / "docs" / "tutorial.md"
PLUGIN = "# my_rule.py\n"  # how a block begins that is to be saved under that name
PLAN = "# plan.toml\n"  # likewise
TABLE = "flowers.csv"  # the file of a block of CSV


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    typed = [line for text in blocks(page, "sh") for line in text.splitlines() if line.startswith("stableair ")]
    return typed + re.findall(r"`(stableair run [^`]*my_rule.py)`", page.read_text())


def docs_module(name: str) -> ModuleType:
    """A module of docs/, such as reference_tables."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(ROOT / "docs"))
