"""The front page and the docs run: their Python as it stands, their commands as they are typed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import forgotten
from stableair.cli import main as cli
from stableair.models import model
from stableair.paper import figures

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_python_runs(page, registries):
    for text in blocks(page, "python"):
        exec(compile(text, page.name, "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")], ids=lambda page: page.name)
def test_the_commands_run(page, monkeypatch, tmp_path, capsys, registries):
    monkeypatch.chdir(tmp_path)
    for rule in (text for text in blocks(page, "python") if "@sa.receiver" in text):
        (tmp_path / "my_rule.py").write_text(rule)
    typed = [line for text in blocks(page, "sh") for line in text.splitlines() if line.startswith("stableair ")]
    typed += re.findall(r"`(stableair run [^`]*my_rule.py)`", page.read_text())
    assert typed
    for line in typed:
        words = shlex.split(line, comments=True)
        if words[1] == "figure" and words[2] in figures.FIGURES:  # its own tests make it at its own size
            words += ["--smoke", "--rounds", "1", "model=logistic()"]
        monkeypatch.setattr(sys, "argv", words)
        with forgotten(), pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0, (line, capsys.readouterr().err)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_site_builds_without_a_complaint(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figures" / "index.html").is_file()


def test_every_figure_has_a_page():
    shown = (ROOT / "docs/figures/index.md").read_text()
    for name in (*figures.FIGURES, *figures.DRAWINGS):
        link = re.search(rf"\[[^]]*\b{name}\b[^]]*\]\(([\w-]+\.md)\)", shown)
        page = (ROOT / "docs/figures" / link[1]).read_text()
        assert f"stableair figure {name}" in page
        assert all(part in page for part in ("**What.**", "**Command", "**What we got", "**Where we differ"))


def test_the_sizes_in_the_docs_are_the_models_own():
    shown = (ROOT / "docs/models.md").read_text()
    for spec, shape, classes in [("mlp()", (1, 8, 8), 10), ("cnn()", (1, 28, 28), 62), ("resnet18()", (3, 32, 32), 10),
                                 ("resnet34()", (3, 32, 32), 100), ("logistic()", (1, 8, 8), 10)]:  # fmt: skip
        module = model.one(spec)()(shape, classes)
        name = spec.partition("(")[0]
        row = next(line for line in shown.splitlines() if line.startswith(f"| `{name}("))
        assert f"| {sum(p.numel() for p in module.parameters()):,} on" in row


def test_the_make_targets_are_there():
    lines = [line for text in blocks(README, "sh") for line in text.splitlines()]
    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_map_shows_every_file():
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Reading the code")[1].split("\n## ")[0]
    shown = set(re.findall(r"`([\w/]+\.py)`", text))
    source = ROOT / "src/stableair"
    files = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    assert shown == {file for file in files if not file.startswith("engine/") and not file.endswith("__.py")}
