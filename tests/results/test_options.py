"""Options that runs, sweeps, searches and comparisons share: trackers and the progress bar."""

import inspect
import sys
from typing import get_type_hints

import pytest

import stableair as sa
from helpers.callbacks import Hooks
from helpers.errors import refused
from helpers.words import with_changes, words_of
from stableair.cli.display import EngineDisplay
from stableair.cli.main import COMMANDS
from stableair.results import options
from stableair.results.options import RunControl, RunOptions, observing
from stableair.results.progress import ProgressBar, is_interactive
from stableair.results.trackers import TRACKERS, Tracker

CALLS = {
    "run": lambda e, folder, **more: sa.run(e, folder, **more),
    "sweep": lambda e, folder, **more: sa.sweep([e], folder, **more),
    "compare": lambda e, folder, **more: sa.compare([e, e.with_(receiver="none()")], folder, **more),
    "search": lambda e, folder, **more: sa.search(e, {"receiver.C": "1,2"}, folder, trials=2, **more),
}


@pytest.fixture
def logged(monkeypatch):
    """Two trackers that record their calls: (tracker, call)."""
    calls = []

    def tracker(tracker_name):
        class RecordingTracker(Tracker):
            name = tracker_name

            def __init__(self, folder):
                self.folder, self.active = folder, False

            def _open(self, experiment):
                calls.append((self.name, "open"))

            def _log(self, metrics, k):
                calls.append((self.name, k))

            def _close(self):
                calls.append((self.name, "close"))

        return RecordingTracker

    for name in ("tensorboard", "mlflow"):
        monkeypatch.setitem(TRACKERS, name, tracker(name))
    return calls


@pytest.mark.parametrize("name", CALLS)
def test_several_trackers_record_a_run(name, logged, tiny, tmp_path):
    CALLS[name](tiny.with_(rounds=2), tmp_path / "r", track=["tensorboard", "mlflow", "mlflow"])
    for tracker in ("tensorboard", "mlflow"):
        calls = [call for tracker_name, call in logged if tracker_name == tracker]
        assert calls == ["open", 0, 1, "close"] * (1 if name in ("run", "sweep") else 2)


@pytest.mark.parametrize("words", [["run"], ["sweep"], ["compare", "receiver=mac(C=1),none", "--seeds", 1]])
def test_trackers_are_selected_on_the_command_line(words, logged, command, tiny):
    name, *more = words
    code, _, errors = command(
        name,
        *words_of(tiny),
        *more,
        "--track",
        "tensorboard",
        "--track",
        "mlflow",
        "-o",
        "r",
    )
    assert (code, errors.replace("note: receiver is given twice: mac(C=1),none replaces mac(C=1)\n", "")) == (0, "")
    assert {tracker_name for tracker_name, _ in logged} == {"tensorboard", "mlflow"}


@pytest.mark.parametrize("name", ["run", "search", "sweep", "compare"])
def test_every_option_is_one_of_the_command(name):
    """The commands display the progress themselves."""
    assert get_type_hints(RunOptions).keys() - {"progress"} <= inspect.signature(COMMANDS[name]).parameters.keys()


@pytest.mark.parametrize("name", ["sweep", "compare"])
def test_all_runs_of_a_plan_are_profiled(name, command, tiny, tmp_path):
    words = with_changes(words_of(tiny.with_(rounds=1)), "receiver=mac(C=1),none")
    code, _, errors = command(name, *words, "--seeds", 1, "--profile", "-o", "r")
    assert (code, errors) == (0, "")
    assert all(run["seconds/training"][0] > 0 for run in sa.load("r"))


@pytest.mark.parametrize("name", CALLS)
def test_invalid_options_are_refused_before_anything_is_computed(name, tiny, tmp_path):
    refused("unknown-value", CALLS[name], tiny, tmp_path / "r", track="tensorbord")
    refused("wrong-type", CALLS[name], tiny, tmp_path / "r", track=3)
    refused("wrong-type", CALLS[name], tiny, tmp_path / "r", progress="no")
    assert refused("unknown-option", CALLS[name], tiny, tmp_path / "r", patients=3).fields["name"] == "patients"
    assert "with_(rounds=3)" in str(refused("unknown-option", CALLS[name], tiny, tmp_path / "r", rounds=3))
    assert 'with_(**{"noise.tau": 3})' in str(
        refused("unknown-option", CALLS[name], tiny, tmp_path / "r", **{"noise.tau": 3})
    )
    assert not list(tmp_path.iterdir())
    refused("needs-folder", sa.run, tiny, track="tensorboard")


def test_the_progress_bar_is_shown_only_in_interactive_terminals(monkeypatch, tiny, capsys):
    assert not is_interactive()
    sa.run(tiny)
    assert capsys.readouterr().out == ""
    made = []
    monkeypatch.setattr(
        options, "ProgressBar", lambda experiments: made.append(experiments) or ProgressBar(experiments)
    )
    monkeypatch.setattr(options, "is_interactive", lambda: True)
    sa.run(tiny, progress=False)
    sa.run(tiny, callbacks=[EngineDisplay()])  # the command displays the rounds itself
    assert made == []
    sa.run(tiny, callbacks=[Hooks()])
    assert made == [1]


@pytest.mark.parametrize(("name", "experiments"), [("sweep", 1), ("compare", 2), ("search", 2)])
def test_one_bar_for_all_experiments(name, experiments, monkeypatch, tiny, tmp_path):
    bars = []

    def bar(number):
        bars.append(ProgressBar(number))
        return bars[-1]

    monkeypatch.setattr(options, "ProgressBar", bar)
    CALLS[name](tiny, tmp_path / "r", progress=True)
    (only,) = bars
    assert only.experiments == experiments
    assert only.bars.tasks[-1].completed == 4
    assert "accuracy 0." in only.bars.tasks[-1].fields["text"]
    assert experiments == 1 or only.bars.tasks[0].completed == experiments


def test_a_terminal_is_interactive(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert is_interactive()
    with observing([], {}, None) as observer:
        assert isinstance(observer.callbacks[0], ProgressBar)


def test_none_is_the_default_of_every_option():
    nothing = dict.fromkeys(("stop", "patience", "monitor", "keep_best", "profile", "track", "progress"))
    assert RunControl.create(nothing, "test", None) == RunControl.create({}, "test", None)
