"""`stableair plot`, `export` and `compare`."""

import subprocess
import sys

import pandas
import pytest

import stableair as sa
from helpers.words import with_changes


def test_runs_without_the_metric_are_left_out_and_logged(command, small):
    command("run", *small, "--out", "r/test")
    command("run", *with_changes(small, "evaluate=validation"), "--out", "r/validation")
    code, out, errors = command("plot", "r", "-o", "c.png", "--metric", "test/accuracy")
    assert (code, out, errors) == (0, "c.png\n", "warning: left out: r/validation has no test/accuracy\n")


def test_the_trials_of_a_search_are_read_like_other_runs(command, small):
    """They are evaluated on the validation split."""
    command("search", *small, "receiver.C=0.1:10:log", "--trials", 3, "--out", "r/search")
    assert command("plot", "r/search", "-o", "c.png") == (0, "c.png\n", "")
    assert command("export", "r/search", "-o", "c.csv", "--metric", "validation/accuracy")[0] == 0
    assert command("report", "r/search", "-o", "c.html") == (0, "c.html\n", "")
    code, out, errors = command("compare", "r/search")
    assert (code, "on the validation data" in out, errors) == (0, True, "")
    assert sa.plot("r/search").axes[0].get_ylabel() == "validation accuracy"


def test_trials_are_left_out_with_one_warning_if_there_are_runs_on_the_test_data(command, small):
    command("search", *small, "receiver.C=0.1:10:log", "--trials", 3, "--out", "r/search")
    for receiver in ("none()", "clip(C=1)"):
        command("run", *with_changes(small, f"receiver={receiver}"), "--out", f"r/{receiver[:4]}")
    for words in (["plot", "r"], ["compare", "r"]):
        code, out, errors = command(*words)
        assert (code, errors.count("\n")) == (0, 1)
        assert errors.startswith("warning: left out: 3 runs on validation data, such as r/search/")
    assert "on the test data" in out
    figure = sa.plot("r")
    assert figure.axes[0].get_ylabel() == "test accuracy"
    assert sorted(text.get_text() for text in figure.axes[0].get_legend().get_texts()) == ["clip(C=1)", "none()"]


def test_plot_does_not_import_torch(tiny, tmp_path):
    sa.run(tiny, tmp_path / "a")
    code = (
        "import sys; sys.argv = ['stableair', 'plot', 'a']\n"
        "from stableair.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "curves.png\n", "")


def test_an_unreadable_folder_does_not_affect_the_others(command, small, caplog):
    command("run", *small, "--out", "good")
    for words in (["plot"], ["report"]):
        code, _, errors = command(*words, "missing", "a" * 300, "good")
        assert code == 0
        assert errors.count("left out: ") == errors.count("\n") == 2
    sa.plot(["missing", "good"])
    assert "left out: missing: there is no such folder" in caplog.text


@pytest.fixture
def runs(tmp_path):
    """The folder of a grid of C on two seeds."""
    data = "synthetic(samples=60, classes=3, shape=(1, 2, 2))"
    plan = {"data": data, "model": "mlp(width=4)", "clients": 5, "rounds": 2, "receiver.C": [0.1, 1.0], "seeds": 2}
    sa.sweep(plan, tmp_path / "runs")
    return "runs"


def test_plot_against_an_argument(command, runs):
    words = [
        "plot",
        runs,
        "--x",
        "receiver.C",
        "--band",
        "ci95",
        "--style",
        "paper",
        "--size",
        "3,2",
        "--labels",
        "MAC",
    ]
    assert command(*words, "-o", "a.pdf") == (0, "a.pdf\n", "")
    code, _, errors = command("plot", runs, "--x", "C")
    assert (code, errors.count("\n")) == (2, 1)
    assert "allowed: round, symbols, airtime, energy, energy_max, bits, receiver.C, seed" in errors


@pytest.mark.parametrize(
    "words",
    [["--size", "3"], ["--size", "a,b"], ["--size", "3,-1"], ["--band", "x"], ["--style", "x"], ["--labels", "a,b,c"]],
    ids=" ".join,
)
def test_options_of_plot_are_refused_in_one_line(command, runs, words):
    code, out, errors = command("plot", runs, *words)
    assert (code, out, errors.count("\n")) == (2, "", 1)


def test_export_writes_the_result_of_table(command, runs):
    assert command("export", runs) == (0, "results.csv\n", "")
    assert command("export", runs, "-o", "a.csv", "--per", "round", "--metric", "test/loss") == (0, "a.csv\n", "")
    frame = pandas.read_csv("a.csv", index_col=0)
    pandas.testing.assert_frame_equal(frame, sa.table(runs, "round", metrics=["test/loss"]))
    assert pandas.read_csv("results.csv")["receiver.C"].tolist() == [0.1, 0.1, 1, 1]
    code, _, errors = command("export", runs, "-o", "a.xlsx")
    assert (code, errors.count("\n")) == (2, 1)
    assert ".csv, .parquet or .tex" in errors


def test_compare_writes_its_table(command, runs):
    code, out, _ = command("compare", runs, "--table", "a.tex")
    assert (code, out.splitlines()[-1]) == (0, "a.tex")
    with open("a.tex") as file:
        assert file.read().endswith(sa.compare(runs).to_latex())
    code, out, errors = command("compare", runs, "--table", "a.txt")
    assert (code, out, errors.count("\n")) == (2, "", 1)


def test_compare_refuses_a_table_before_its_runs(command, small, tmp_path):
    (tmp_path / "file").write_text("")
    words = with_changes(small, "receiver=none(),clip(C=1)")
    code, _, errors = command("compare", *words, "--table", "file/a.tex")
    assert (code, errors) == (2, f"error: cannot write file/a.tex: {tmp_path / 'file'} is not a folder\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing was computed"


def test_compare_labels_the_receivers_of_its_table(command, runs):
    names = [line.receiver for line in next(iter(sa.compare(runs).lines.values()))]
    labels = {names[0]: "MAC, $C = 1$", names[1]: "other"}
    words = [word for name, text in labels.items() for word in ("--label", f"{name}={text}")]
    code, _, _ = command("compare", runs, "--table", "a.tex", *words)
    with open("a.tex") as file:
        assert (code, file.read().endswith(sa.compare(runs).to_latex(labels))) == (0, True)
    for wrong in (["--table", "a.tex", "--label", "mac(C=7)=x"], ["--label", words[1]], ["--table", "a.csv", *words]):
        code, _, errors = command("compare", runs, *wrong)
        assert (code, errors.count("\n")) == (2, 1)
