"""The front page and the docs run: their Python as it stands, their commands as they are typed."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from stableair import cli

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_python_runs(page, registries):
    for text in blocks(page, "python"):
        exec(compile(text, page.name, "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_run(page, monkeypatch, tmp_path, capsys, registries):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rule.py").write_text(next(text for text in blocks(README, "python") if "@sa.receiver" in text))
    typed = [line for text in blocks(page, "sh") for line in text.splitlines() if line.startswith("stableair ")]
    typed += re.findall(r"`(stableair run [^`]*my_rule.py)`", page.read_text())
    assert typed
    for line in typed:
        monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0, (line, capsys.readouterr().err)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_make_targets_are_there_and_the_map_shows_every_file():
    lines = [line for text in blocks(README, "sh") for line in text.splitlines()]
    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    shown = set(re.findall(r"`(\w+\.py)`", README.read_text().split("## Reading the code")[1].split("##")[0]))
    source = {p.name for p in (ROOT / "src/stableair").glob("*.py")}
    assert shown == source - {"__init__.py", "__main__.py", "checks.py"}
