"""The progress of a sweep, read from its folders."""

import re

import stableair as sa
from helpers.sweeps import PLAN, SETTINGS
from stableair.cli.sweeps import progress_table
from stableair.results.lock import locked
from stableair.results.reading import load
from stableair.sweeps.plans import expand_plan
from stableair.sweeps.workers import SweepProgress


def test_progress_is_read_from_the_folders(tmp_path):
    experiments = expand_plan(PLAN | {"seeds": 2})
    progress = SweepProgress(experiments, tmp_path)
    assert [(one.rounds, one.finished) for one in progress.refresh()] == [(0, False)] * 4
    sa.run(experiments[0], tmp_path / experiments[0].name)
    sa.run(experiments[1].with_(rounds=2), tmp_path / experiments[1].name)
    with locked(tmp_path / experiments[2].name):
        found = progress.refresh()
    assert [one.rounds for one in found] == [3, 2, 0, 0]
    assert [one.finished for one in found] == [True, False, False, False]
    assert [one.running for one in found] == [False, False, True, False]
    assert found[1].row["test/accuracy"] == load(tmp_path / experiments[1].name)["test/accuracy"][-1]
    with open(tmp_path / experiments[1].name / "rounds.jsonl", "ab") as file:
        file.write(b'{"round": 2, "test/acc')
    assert progress.refresh()[1].rounds == 2, "an incomplete line is not a round"


def test_the_table_has_a_row_for_each_setting_and_running_ones_first(tmp_path):
    experiments = expand_plan(SETTINGS | {"rounds": 2, "noise.tau": [0.1, 0.2, 0.3, 0.4], "seeds": 2})
    sa.run(experiments[0], tmp_path / experiments[0].name)
    lines = {f"tau {i}": [one.name for one in experiments[2 * i : 2 * i + 2]] for i in range(4)}
    with locked(tmp_path / experiments[7].name):
        shown = progress_table(lines, SweepProgress(experiments, tmp_path), height=40)
        few = progress_table(lines, SweepProgress(experiments, tmp_path), height=8)
    assert list(shown.columns[1].cells) == ["1/2", "0/2", "0/2", "0/2"]
    assert list(shown.columns[2].cells) == ["2/4", "0/4", "0/4", "0/4"]
    assert list(shown.columns[3].cells) == ["", "", "", "seed 1"]
    assert list(shown.columns[5].cells)[1:] == [""] * 3
    assert re.fullmatch(r"1 of 8 finished, about .* left", shown.caption)
    assert list(few.columns[0].cells) == ["tau 3", "tau 0"]
    assert re.fullmatch(r"1 of 8 finished, about .* left, 2 settings not shown", few.caption)
