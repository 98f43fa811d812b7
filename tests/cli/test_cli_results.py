"""`stableair plot` and what it needs."""

import subprocess
import sys

import stableair as sa
from helpers.words import but


def test_runs_without_the_metric_are_left_out_and_logged(command, small):
    command("run", *small, "--out", "r/test")
    command("run", *but(small, "evaluate=validation"), "--out", "r/validation")
    code, out, errors = command("plot", "r", "-o", "c.png")
    assert (code, out, errors) == (0, "c.png\n", "warning: left out: r/validation has no test/accuracy\n")


def test_plot_itself_needs_no_torch(tiny, tmp_path):
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


def test_one_bad_folder_does_not_spoil_the_others(command, small, caplog):
    command("run", *small, "--out", "good")
    for words in (["plot"], ["report"]):
        code, _, errors = command(*words, "missing", "a" * 300, "good")
        assert code == 0
        assert errors.count("left out: ") == errors.count("\n") == 2
    sa.plot(["missing", "good"])
    assert "left out: missing: there is no such folder" in caplog.text
