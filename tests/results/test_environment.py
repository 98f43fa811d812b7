"""The recorded environment of a run."""

import shutil
import subprocess

import pytest

import stableair as sa
from stableair.results.environment import commit


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_the_commit_is_recorded_only_for_a_source_that_git_tracks(tmp_path, monkeypatch, request):
    """A package that is installed inside another repository does not have the commit of this repository."""
    request.addfinalizer(commit.cache_clear)

    def current_commit():
        commit.cache_clear()
        return commit()

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, "-C", tmp_path, *words], check=True, capture_output=True, text=True).stdout

    source = tmp_path / "stableair" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.setattr(sa, "__file__", str(source))
    assert current_commit() == "", "no repository"
    git("init")
    git("commit", "--allow-empty", "-m", "theirs")
    assert current_commit() == "", "not tracked"
    git("add", ".")
    git("commit", "-m", "ours")
    assert current_commit() == git("rev-parse", "--short", "HEAD").strip()
    source.write_text("changed = True")
    assert current_commit() == git("rev-parse", "--short", "HEAD").strip() + "+"
    monkeypatch.setenv("PATH", "")
    assert current_commit() == "", "no git"
