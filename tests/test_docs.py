"""The front page runs: its Python as it stands, its commands as they are typed."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from stableair import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]


def test_the_python_blocks_run(registries):
    python = [text for language, text in BLOCKS if language == "python"]
    assert len(python) == 3
    for text in python:
        exec(compile(text, "README.md", "exec"), {"__name__": "readme"})


def test_the_commands_run(monkeypatch, tmp_path, capsys, registries):
    monkeypatch.chdir(tmp_path)
    rule = next(text for language, text in BLOCKS if "@sa.receiver" in text)
    (tmp_path / "my_rule.py").write_text(rule)
    typed = [line for line in COMMANDS if line.startswith("stableair ")] + re.findall(
        r"`(stableair run [^`]*my_rule.py)`", README
    )
    assert len(typed) == 6
    for line in typed:
        monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0, (line, capsys.readouterr().err)
    assert (tmp_path / "curves.png").exists()


def test_the_make_targets_and_files_are_there():
    targets = [line.split()[1] for line in COMMANDS if line.startswith("make ")]
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    named = set(re.findall(r"`(\w+\.py)`", README.split("## Reading the code")[1].split("##")[0]))
    source = {p.name for p in (ROOT / "src/stableair").glob("*.py")} - {"__init__.py", "__main__.py", "checks.py"}
    assert named == source, "the map shows every file"
