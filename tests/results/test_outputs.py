"""Commands never overwrite files of a run, or files that stableair did not write."""

import os
from pathlib import Path

import pytest

import stableair as sa
from stableair import bench
from stableair.errors import InputError
from stableair.results import plot
from stableair.results.outputs import RUN_FILES, check_output


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    data = "synthetic(samples=60, classes=3, shape=(1, 2, 2))"
    e = sa.Experiment(data=data, model="mlp(width=4)", clients=5, rounds=2, device="cpu")
    return sa.run(e, tmp_path_factory.mktemp("runs") / "a").folder


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", [*RUN_FILES, "checkpoint.damaged.2.pt"])
def test_files_of_a_run_are_never_written(run_folder, name, force):
    before = content(run_folder)
    with pytest.raises(InputError) as error:
        sa.report([run_folder], run_folder / name, force=force)
    assert (error.value.code, error.value.fields["path"]) == ("run-file", run_folder / name)
    assert content(run_folder) == before


def test_links_to_files_of_a_run_are_refused(run_folder, tmp_path):
    (tmp_path / "link.html").symlink_to(run_folder / "rounds.jsonl")
    os.link(run_folder / "rounds.jsonl", run_folder / "hard.html")
    for path in (tmp_path / "link.html", run_folder / "hard.html"):
        with pytest.raises(InputError) as error:
            sa.report([run_folder], path, force=True)
        assert error.value.code == "run-file"
    (run_folder / "hard.html").unlink()


def test_other_files_in_a_run_folder_are_allowed(run_folder):
    sa.plot([run_folder], out=run_folder / "curves.png")
    (run_folder / "curves.png").unlink()


def test_the_same_names_elsewhere_are_allowed(tmp_path):
    assert check_output(tmp_path / "rounds.jsonl") == tmp_path / "rounds.jsonl"


@pytest.mark.parametrize("name", ["r.pdf", "r.png", "r"])
def test_a_report_is_an_html_file(run_folder, tmp_path, name):
    with pytest.raises(InputError, match=r"must be \.html or \.htm$") as error:
        sa.report([run_folder], tmp_path / name)
    assert error.value.code == "unknown-format"
    assert sa.report([run_folder], tmp_path / "r.HTM").exists()


@pytest.mark.parametrize("ending", ["png", "pdf", "svg", "eps", "ps"])
def test_pictures_of_stableair_are_replaced(run_folder, tmp_path, ending):
    for _ in range(2):
        sa.plot([run_folder], out=tmp_path / f"a.{ending}")


def test_pages_of_stableair_are_replaced(run_folder, tmp_path):
    for _ in range(2):
        sa.report([run_folder], tmp_path / "a.html")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.png", lambda runs, out, **options: sa.plot(runs, out=out, **options)),
        ("a.jpg", lambda runs, out, **options: sa.plot(runs, out=out, **options)),
        ("a.html", lambda runs, out, **options: sa.report(runs, out, **options)),
        ("fig2.pdf", lambda runs, out, **options: sa.figure("fig2", out.parent, **options)),
    ],
)
def test_other_files_need_force(run_folder, tmp_path, name, write):
    (tmp_path / name).write_text("a page about stableair 0.3")
    with pytest.raises(InputError) as error:
        write([run_folder], tmp_path / name)
    assert (error.value.code, error.value.hint) == ("file-exists", "force")
    assert (tmp_path / name).read_text() == "a page about stableair 0.3"
    write([run_folder], tmp_path / name, force=True)
    assert (tmp_path / name).stat().st_size > 1000


def test_figure_is_refused_before_its_runs(tmp_path, monkeypatch):
    (tmp_path / "fig3a.png").write_text("mine")
    with pytest.raises(InputError) as error:
        sa.figure("fig3a", tmp_path, smoke=True)
    assert error.value.code == "file-exists"
    assert [path.name for path in tmp_path.iterdir()] == ["fig3a.png"], "nothing was computed"


def test_devices_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "pipe.png", tmp_path / "folder.png"):
        with pytest.raises(InputError) as error:
            check_output(path, force=True)
        assert error.value.code == "cannot-write"


def test_bench_appends_to_no_run_file(run_folder):
    with pytest.raises(InputError) as error:
        bench.check_record(run_folder / "rounds.jsonl")
    assert error.value.code == "run-file"


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["plot", "RUN", "-o", "x.png"], "x.png"),
        (["report", "RUN", "-o", "x.html"], "x.html"),
        (["air", "bursts", "-o", "x.png"], "x.png"),
        (["theory", "--plot", "x.png"], "x.png"),
        (["data", "show", "digits", "-o", "x.png"], "x.png"),
        (["figure", "fig2", "--out", "."], "fig2.png"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_command_has_force(words, file, run_folder, command, tmp_path):
    words = [run_folder if word == "RUN" else word for word in words]
    (tmp_path / file).write_text("mine")
    code, _, errors = command(*words)
    assert (code, errors.count("\n")) == (2, 1), errors
    assert errors.endswith("add --force or choose another file\n")
    assert (tmp_path / file).read_text() == "mine"
    assert command(*words, "--force")[0] == 0
    assert command(*words)[0] == 0, "the command replaces its own file"


def test_demo_is_refused_before_its_runs(command, tmp_path):
    (tmp_path / "demo.json").write_text('{"mine": 1}')
    code, _, errors = command("demo")
    assert (code, errors.count("\n")) == (2, 1), errors
    assert not (tmp_path / "runs").exists()


def test_formats_without_metadata_are_written(run_folder, tmp_path):
    figure = sa.plot([run_folder])
    for ending in ("jpg", "tif", "webp", "svgz"):
        assert plot.save(figure, tmp_path / f"a.{ending}").stat().st_size > 500


@pytest.mark.parametrize("name", ["x.html", "below/x.html"])
def test_a_folder_that_is_a_file_or_may_not_be_changed_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / "file").write_text("")
    for folder, problem in (("file", "is not a folder"), ("denied", "no permission to write in ")):
        if folder == "denied":  # root may write everywhere
            (tmp_path / folder).mkdir()
            monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "denied" or not mode & os.W_OK)
        with pytest.raises(InputError, match=problem) as error:
            check_output(tmp_path / folder / name)
        assert (error.value.code, str(tmp_path / folder) in str(error.value)) == ("cannot-write", True)
    assert check_output(tmp_path / "new" / name), "missing folders are created"


def test_the_current_folder_is_refused_as_output_file():
    with pytest.raises(InputError) as error:
        check_output(Path())
    assert error.value.code == "cannot-write"
