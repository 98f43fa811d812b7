"""`stableair demo`, `stableair theory`, `stableair search` and `stableair figure`."""

import json
import os
import shlex
import sys

import pytest

import stableair as sa
from stableair.experiment import PRESETS
from stableair.paper import demo, theorem


def test_search_prints_its_result_and_the_command_that_runs_it(command, small, tmp_path):
    words = [word for word in small if not word.startswith("receiver=")]
    options = "--trials", 2, "--device", "cpu", "--out", "s"
    code, out, errors = command("search", *words, "receiver.C=0.1:10:log", *options)
    assert (code, errors) == (0, "")
    lines = out.splitlines()
    best = next(line for line in lines if line.startswith("best: ")).split()[1]
    trials = [line for line in lines if "seed 0  4 rounds, validation accuracy 0." in line]
    value = float(best.partition("=")[2])
    assert [line.split()[0] for line in trials].count(f"receiver=mac(C={value:g})") == 1
    assert len(trials) == 2
    again = shlex.split(next(line for line in lines if line.startswith("stableair run ")))
    assert again == ["stableair", "run", *words, best, "--device", "cpu"]
    assert lines[-2:] == ["s/search.json", "s/search.png"]
    assert (tmp_path / "s" / "search.png").stat().st_size > 1000
    assert command(*again[1:], "--out", "r")[0] == 0


def test_theory_prints_every_form_and_writes_a_plot(command, tmp_path):
    code, out, _ = command("theory", "--G", 0.1, "--plot", "t.png")
    assert code == 0
    names = ["p_C printed", "p_C corrected", "p_C exact", "p_C at most", "bound printed", "bound corrected"]
    assert [line[:16].strip() for line in out.splitlines()] == [*names, "C* weak signal", "t.png"]
    least, most = (float(line.split()[2 + ("most" in line)]) for line in out.splitlines()[2:4])
    assert least < most
    assert (tmp_path / "t.png").stat().st_size > 1000
    _, out, _ = command("theory", "--C", 1, "--G", 1)
    assert "C > sqrt2 G is violated" in out
    assert "there is no bound" in out


def test_theory_checks_the_theorem(command, monkeypatch):
    monkeypatch.setattr(theorem, "CHECKS", [(1.5, 0.03, 1.8, 0.03)])
    code, out, _ = command("theory", "--check", "--plot", "t.png")
    assert code == 0
    assert "exceeds the printed bound" in out


def test_the_demo_tunes_on_validation_and_compares_on_test(command, monkeypatch, tmp_path, tiny):
    monkeypatch.setitem(PRESETS, "demo", tiny.with_(rounds=3).to_dict())
    monkeypatch.setattr(demo, "TUNING_ROUNDS", 2)
    monkeypatch.setitem(demo.GRID, "mac", ("mac(C={})", (1e-6, 1, 1e-5)))
    code, _, errors = command("demo")
    assert code == 0
    final = json.loads((tmp_path / "demo.json").read_text())
    assert list(final) == ["ideal", "mac", "gnc", "noisy", "generator"]
    assert (tmp_path / "demo.png").stat().st_size > 1000
    runs = {p.name: sa.load(p) for p in (tmp_path / "runs" / "demo").iterdir()}
    for name, run in runs.items():
        tuning = name.startswith("tune-")
        assert run.settings["evaluate"] == ("validation" if tuning else "test")
        assert any(key.startswith("test/") for key in run.rounds[0]) != tuning, "tuning does not use the test data"
        assert not tuning or run.settings["receiver"] in errors
    assert final["mac"] == runs["mac"]["test/accuracy"][-1]
    tuned = [run for name, run in runs.items() if name.startswith("tune-mac")]
    assert len({run.settled("validation/accuracy") for run in tuned}) > 1, "the thresholds differ"
    assert runs["mac"].settings["receiver"] == "mac(C=1)", "the best threshold is used"
    written = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("rounds.jsonl")}
    assert command("demo")[0] == 0
    assert final | {name: run["test/accuracy"][-1] for name, run in sa.demo().items()} == final
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("rounds.jsonl")} == written, "nothing is computed twice"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--device", "x"], "device 'x' is not available"),
        (["--data-dir", "empty"], "cifar10 is not prepared"),
    ],
)
def test_missing_inputs_of_a_figure_are_found_before_its_search(command, tmp_path, words, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # no download
    monkeypatch.setenv("STABLEAIR_DATA", os.environ["STABLEAIR_DATA"])
    monkeypatch.setattr("stableair.sweeps.workers.run", lambda *_, **__: pytest.fail("a run was computed"))
    code, _, errors = command("figure", "fig3a", *words)
    assert (code, expected in errors, errors.count("\n")) == (2, True, 1)
    assert not list(tmp_path.iterdir())
