"""The Python code and the commands of the README and the documentation run unchanged."""

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import stableair
from helpers import ROOT
from helpers.isolation import restored_registries
from helpers.pages import PAGES, PLAN, PLUGIN, README, TABLE, TUTORIAL, blocks, commands
from stableair.cli import main as cli
from stableair.models import model
from stableair.paper.catalogue import DRAWINGS, FIGURES

SLOW_COMMANDS = {  # command.md is in the fast run
    "air-signals.md", "air.md", "compare.md", "link-budget.md", "observe.md", "paper-figures.md", "reproduce.md",
    "servers.md", "sweeps.md", "tutorial.md",
}  # fmt: skip
# In the fast run: an experiment, a sweep with a callback, a plain model, and custom components.
FAST_PYTHON = {"python.md-1", "observe.md-1", "observe.md-2", "python.md-8", "extending.md-2", "extending.md-3"}


def python_blocks():
    for page in PAGES:
        for i, text in enumerate(blocks(page, "python"), 1):
            name = f"{page.name}-{i}"
            yield pytest.param(text, id=name, marks=[] if name in FAST_PYTHON else [pytest.mark.slow])


def pages_with_commands():
    for page in (page for page in PAGES if commands(page) and page != TUTORIAL):  # see test_default_install.py
        yield pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW_COMMANDS else [])


@pytest.fixture(scope="module")
def interpreters(request, tmp_path_factory, data_folder):
    """The requested blocks, each run in a new interpreter and an empty folder, two at a time."""
    package = str(Path(stableair.__file__).parents[1])  # the path may be relative, and the folder is another
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    env = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONPATH": path}

    def run(text):
        words, folder = [sys.executable, "-c", text], tmp_path_factory.mktemp("block")
        return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600)

    requested = [item.callspec.params["text"] for item in request.session.items if "interpreters" in item.fixturenames]
    with ThreadPoolExecutor(2) as pool:
        yield {text: pool.submit(run, text) for text in requested}


@pytest.mark.parametrize("text", list(python_blocks()))
def test_the_python_runs(text, interpreters):
    done = interpreters[text].result()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_compiles(page):
    for i, text in enumerate(blocks(page, "python"), 1):
        compile(text, f"{page.name}-{i}", "exec")


@pytest.mark.parametrize("page", list(pages_with_commands()))
def test_the_commands_run(page, monkeypatch, tmp_path, capsys, registries):
    monkeypatch.chdir(tmp_path)
    for rule in (text for text in blocks(page, "python") if text.startswith(PLUGIN)):
        (tmp_path / "my_rule.py").write_text(rule)
    for plan in (text for text in blocks(page, "toml") if text.startswith(PLAN)):
        (tmp_path / "plan.toml").write_text(plan)
    for table in blocks(page, "csv"):
        (tmp_path / TABLE).write_text(table)
    for line in commands(page):
        words = shlex.split(line, comments=True)
        if words[1] == "figure" and words[2] in FIGURES and "--published" not in words:
            # small runs, since figures have separate tests
            words += ["--smoke", "--rounds", "1", "model=logistic()"]
        monkeypatch.setattr(sys, "argv", words)
        with restored_registries(), pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0, (line, capsys.readouterr().err)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_are_valid_shell_code(page):
    """For example, brackets need quotes. Includes the commands that take too long to be run here."""
    shown = re.findall(r"^    ((?:stableair|torchrun|python|pip|flwr|make) .*)$", page.read_text(), re.MULTILINE)
    text = "\n".join([*shown, *blocks(page, "sh")])
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert not done.stderr


def test_pages_with_a_receiver_file_also_run_it():
    assert [page.name for page in PAGES if any(text.startswith(PLUGIN) for text in blocks(page, "python"))] == [
        page.name for page in PAGES if any("my_rule.py" in line for line in commands(page))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_all_links_have_a_target(page):
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_plain_markdown_does_not_change_formulas(page):
    """GitHub, for example, removes the backslash before a comma and reads a line that starts with + as a list."""
    text = re.sub(r"^```.*?^```|^    .*?$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert text.count("$") % 2 == 0
    for formula in re.findall(r"\$\$(.+?)\$\$|\$(.+?)\$", text, re.DOTALL):
        inside = "".join(formula)
        assert not re.search(r"\\[^A-Za-z]|[*]|^\s*[-+] ", inside, re.MULTILINE), inside


def test_every_figure_has_a_page():
    shown = (ROOT / "docs/figures/index.md").read_text()
    for name in (*FIGURES, *DRAWINGS):
        link = re.search(rf"\[[^]]*\b{name}\b[^]]*\]\(([\w-]+\.md)\)", shown)
        page = (ROOT / "docs/figures" / link[1]).read_text()
        assert f"stableair figure {name}" in page
        parts = "**Content.**", "**Command.**", "**Result", "**Differences from the paper.**"
        assert all(part in page for part in parts)


def test_the_documented_sizes_of_the_models_are_correct():
    shown = (ROOT / "docs/models.md").read_text()
    for spec, shape, classes in [("mlp()", (1, 8, 8), 10), ("cnn()", (1, 28, 28), 62), ("resnet18()", (3, 32, 32), 10),
                                 ("resnet34()", (3, 32, 32), 100), ("logistic()", (1, 8, 8), 10)]:  # fmt: skip
        module = model.one(spec)()(shape, classes)
        name = spec.partition("(")[0]
        row = next(line for line in shown.splitlines() if line.startswith(f"| `{name}("))
        assert f"| {sum(p.numel() for p in module.parameters()):,} on" in row


def test_the_make_targets_exist():
    lines = [line for text in blocks(README, "sh") for line in text.splitlines()]
    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_module_table_lists_every_file():
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Reading the code")[1].split("\n## ")[0]
    shown = set(re.findall(r"`([\w/]+\.py)`", text))
    source = ROOT / "src/stableair"
    files = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    assert shown == {file for file in files if not file.startswith("engine/") and not file.endswith("__.py")}
