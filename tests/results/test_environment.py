"""What is recorded of the surroundings of a run."""

import shutil
import subprocess

import pytest

import stableair as sa
from stableair.results.environment import commit


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_a_run_names_the_commit_of_a_source_under_git_and_of_nothing_else(tmp_path, monkeypatch, request):
    """A package that was installed into somebody's repository is not of that repository's commit."""
    request.addfinalizer(commit.cache_clear)

    def seen():
        commit.cache_clear()
        return commit()

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, "-C", tmp_path, *words], check=True, capture_output=True, text=True).stdout

    source = tmp_path / "stableair" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.setattr(sa, "__file__", str(source))
    assert seen() == "", "no repository"
    git("init")
    git("commit", "--allow-empty", "-m", "theirs")
    assert seen() == "", "not in it"
    git("add", ".")
    git("commit", "-m", "ours")
    assert seen() == git("rev-parse", "--short", "HEAD").strip()
    source.write_text("changed = True")
    assert seen() == git("rev-parse", "--short", "HEAD").strip() + "+"
    monkeypatch.setenv("PATH", "")
    assert seen() == "", "no git"
