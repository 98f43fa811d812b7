"""Progress as lines and as a live line."""

import sys

import pytest

import stableair as sa
from stableair.cli.display import EngineDisplay, ProgressDisplay, describe_round
from stableair.cli.runs import SeedDisplay

ROW = {"round": 1, "test/accuracy": 0.5, "test/loss": 1.0, "train/loss": 2.0, "channel/snr_db": -41.26}


def test_the_text_of_a_round():
    assert describe_round(ROW) == "test accuracy 0.5000  train loss 2  SNR of this round -41.3 dB"
    assert describe_round(ROW | {"channel/snr_db": None}).endswith("  no SNR"), "for example without senders"
    assert describe_round(ROW | {"channel/snr_db": None}, has_noise=False).endswith("  no noise")
    assert describe_round(ROW | {"diverged": True, "test/accuracy": None}) == "diverged"


ENGINE = {"engine": "stacked", "precision": "fp32", "chunk": 5, "why": "a small model", "ranks": 1}
ENGINE_LINE = "engine stacked, fp32, 5 clients at a time: a small model\n"


@pytest.mark.parametrize(("every_round", "shown"), [(True, f"seed 7  2/3  {describe_round(ROW)}\n"), (False, "")])
def test_piped_output_has_one_line_per_round_or_none(capsys, every_round, shown):
    with SeedDisplay(every_round) as display:
        display.round(sa.Experiment(seed=7, rounds=3), ROW)
    assert capsys.readouterr().out == shown


def test_a_round_shows_the_time_per_round_and_the_time_left(capsys):
    e = sa.Experiment(rounds=100)
    with ProgressDisplay(every_round=True) as display:
        for k in range(30):
            display.round(e, ROW | {"round": k, "seconds": 120.0 if k >= 20 else 1.0})
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.endswith("  1 s per round, 1 min 39 s left")
    assert last.endswith("  2 min per round, 2 h 20 min left"), (
        "the mean of the last rounds: the first rounds may include compilation"
    )


def test_the_engine_and_the_projected_time_are_printed_at_the_start(capsys):
    display, e = EngineDisplay(), sa.Experiment(rounds=100)
    display.start(e, ENGINE)
    display.start(e, ENGINE)
    assert capsys.readouterr().out == ENGINE_LINE, "once for runs with the same engine"
    display.start(e, ENGINE | {"projected_seconds": 12_000, "projected_rounds": 60})
    assert capsys.readouterr().out == "about 3 h 20 min for 60 rounds, estimated from the first local steps\n"
    display.start(e, ENGINE | {"ranks": 2, "engine": "reference"})
    assert capsys.readouterr().out == "engine reference, fp32, 2 ranks: a small model\n"


def test_a_terminal_has_one_live_line(capsys, monkeypatch):
    monkeypatch.setattr("rich._console", None)  # rich shares a console, which keeps the settings of its first use
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with SeedDisplay(every_round=True) as display:
        for seed, accuracy in ((7, 0.25), (8, 0.5)):
            e = sa.Experiment(seed=seed, rounds=3)
            display.start(e, ENGINE)
            display.round(e, ROW | {"test/accuracy": accuracy})
    erase = "\x1b[2K"
    shown = capsys.readouterr().out.rpartition(erase)[2]  # the text that stays on the screen
    assert "seed 8" in shown
    assert "2/3" in shown
    assert "test accuracy 0.5000" in shown
    assert "seed 7" not in shown
