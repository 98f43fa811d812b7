"""The files of the wheel and the sdist, and the version that the package, its changelog and its citations name."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import stableair
from helpers import ROOT
from helpers.pages import README, blocks

VERSION = re.compile(r"^## (\d+\.\d+\.\d+) (?:\((unreleased)\)|- \d{4}-\d\d-\d\d)$", re.MULTILINE)
ADDED_BY_SETUPTOOLS = {"PKG-INFO", "setup.cfg"}


def tracked_files():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("needs a git checkout")
    return [name for name in done.stdout.split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A wheel and an sdist, built from a copy of the tracked files."""
    copy, target = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in tracked_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(copy)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.slow
def test_wheel_contains_all_files_of_the_package_and_no_others(archives):
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == {name.removeprefix("src/") for name in tracked_files() if name.startswith("src/")}


@pytest.mark.slow
def test_sdist_is_a_copy_of_the_source(archives):
    with tarfile.open(next(archives.glob("*.tar.gz"))) as sdist:
        paths = [PurePosixPath(*Path(member.name).parts[1:]) for member in sdist if member.isfile()]
    files = {str(path) for path in paths if not any(part.endswith(".egg-info") for part in path.parts)}
    assert files - ADDED_BY_SETUPTOOLS == set(tracked_files()) - {".gitignore"}


def test_only_an_unreleased_version_is_a_development_version():
    """The changelog has `0.3.0 (unreleased)` for version 0.3.0.dev0, and `0.3.0 - 2026-12-31` for version 0.3.0."""
    version, unreleased = VERSION.search((ROOT / "CHANGELOG.md").read_text()).groups()
    assert stableair.__version__ == (f"{version}.dev0" if unreleased else version)


def test_citations_have_the_version_of_the_package():
    version = stableair.__version__.removesuffix(".dev0")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    for page in (README, ROOT / "docs/citation.md"):
        _, software = blocks(page, "bibtex")[0].split("\n\n")
        fields = dict(re.findall(r"^ +(\w+) += \{(.*)\}", software, re.MULTILINE))
        assert software.startswith("@misc{"), "a type that all styles know"
        assert fields["version"] == version
        assert fields["note"].endswith(f"version {version}"), "styles print the note, not the version"
        assert fields["year"] == "2026"


def test_citations_have_the_same_title_and_authors():
    yaml = pytest.importorskip("yaml")
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    authors = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    for page in (README, ROOT / "docs/citation.md"):
        article, _ = blocks(page, "bibtex")[0].split("\n\n")
        fields = dict(re.findall(r"^ +(\w+) += \{(.*)\}", article, re.MULTILINE))
        assert fields == {key: str(paper[key]) for key in ("title", "journal", "year")} | {"author": authors}
