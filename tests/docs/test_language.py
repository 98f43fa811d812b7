"""Phrases that the documentation avoids, because readers have to read them twice."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import ROOT

PHRASES = {  # pattern: what to write instead
    r"\bof (?:its|one's|our|their|your) own\b": "separate, custom",
    r"\bparts of your own\b": "custom components",
    r"\b(?:said|told)\b": "printed, logged, recorded",
    r"\b(?:speaks?|talks?) (?:by|to|first)\b|\bthe first one speaks\b": "prints, communicates",
    r"\bheard\b": "received",
    r"\b(?:nobody|whoever|whatever)\b": "a noun",
    r"\bso many\b|\bthe same of each\b": "the noun",
    r"\bwhat (?:is|was|are) (?:sent|heard|kept|given|left|named|there|not)\b": "a noun: payload, update, ...",
    r"\bwith what\b|\bof what they\b": "a noun",
    r"\bthose (?:that|who|which|alone)\b": "the noun",
    r"\bbe it\b": "including",
    r"\bhas the last word\b|\bin the way\b|\bat hand\b|\bin no one's way\b": "a literal description",
    r"\bunless (?:it|you) says?\b": "by default",
    r"\bgo(?:es)? on (?:where|exactly|after|in its place)\b": "continues",
    r"\b(?:beside|MAC and) its neighbours\b": "comparison with other receivers",
    r"\bcounts? in full\b": "has full weight",
    r"\bthe air says\b|\bchannels? that say\b|\bmemory that walks\b": "a literal description",
}
PHRASE = re.compile("|".join(f"(?:{pattern})" for pattern in PHRASES), re.IGNORECASE)
COMMIT = re.compile(r"^(?!\||\[\^).*\bcommit [0-9a-f]{7}\b", re.MULTILINE)  # neither in a table nor in a footnote
# Capitalised words that may be in a heading.
NAMES = {"Fig.", "Flower", "Gaussian", "Hadamard", "Lemma", "Poisson", "Python", "Ray", "Theorem"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PROGRAMS = [path for folder in ("src", "bench", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    """A page without its blocks of code and its inline code."""
    return re.sub(r"^```.*?^```|^    .*?$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def docstrings(path: Path) -> Iterator[str]:
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, documented):
            yield ast.get_docstring(node) or ""


def avoided(text: str) -> list[str]:
    """The phrases of a text that should be avoided; a line break inside a phrase does not hide it."""
    return [match[0] for match in PHRASE.finditer(" ".join(text.split()))]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_avoids_the_phrases(page):
    assert avoided(without_code(page.read_text())) == []


@pytest.mark.parametrize("folder", ["src", "bench", "examples"])
def test_docstrings_avoid_the_phrases(folder):
    programs = [path for path in PROGRAMS if name_of(path).startswith(f"{folder}/")]
    texts = {name_of(path): avoided("\n".join(docstrings(path))) for path in programs}
    assert {name: found for name, found in texts.items() if found} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_commit_is_in_a_table_or_a_footnote(page):
    assert COMMIT.findall(without_code(page.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_headings_are_in_sentence_case(page):
    for heading in re.findall(r"^#+ (?:\d+\. )?(.+)$", without_code(page.read_text()), re.MULTILINE):
        first, *others = (word.strip("[](),:") for word in re.sub(r"\]\([^)]*\)", "", heading).split())
        assert not first[0].islower() or "." in first or first == "stableair", heading  # examples are named by file
        capitalised = {word for word in others if word[0].isupper() and word[1:].islower()}  # no acronyms: GPU, LaTeX
        assert capitalised <= NAMES, heading
