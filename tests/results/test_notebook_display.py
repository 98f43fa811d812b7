"""How experiments, runs, sweeps and comparisons are shown in a notebook: short texts, and well-formed HTML."""

from statistics import stdev
from xml.etree import ElementTree

import pytest
import torch

import stableair as sa
from stableair.markup import HEIGHT, WIDTH, sparkline
from stableair.searches import Range, Result, Trial


def parsed(shown):
    """The HTML as a tree: it must be well-formed."""
    return ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")


def texts(tree):
    return [cell.text for cell in tree.iter("td")]


def settled(run):
    return run.settled("test/accuracy")


def points(svg):
    path = ElementTree.fromstring(svg).find("path").attrib["d"]
    return [
        (word[0], *map(float, word[1:].split()))
        for word in path.replace("M", " ,M").replace("L", " ,L").split(" ,")[1:]
    ]


def test_the_text_of_an_experiment_is_its_constructor_call():
    e = sa.Experiment(clients=7, noise="gaussian(std=1)", lr=0.1)
    assert repr(e) == "Experiment(clients=7, lr=0.1, noise='gaussian(std=1)')"
    assert eval(repr(e), {"Experiment": sa.Experiment}) == e
    assert repr(sa.Experiment()) == "Experiment()"
    assert texts(parsed(e)) == ["clients", "7", "lr", "0.1", "noise", "gaussian(std=1)", "other settings", "defaults"]


def test_a_run_shows_its_result_and_a_line(tiny, tmp_path):
    run = sa.run(tiny, tmp_path / "<a>")
    assert "4 rounds" in repr(run)
    assert f"test accuracy {run['test/accuracy'][-1]:.4f}" in repr(run)
    assert len(repr(run)) < 250
    tree = parsed(run)
    assert str(tmp_path / "<a>") in texts(tree)
    assert len(list(tree.iter("svg"))) == 1
    assert not list(parsed(sa.Run(run.record, [])).iter("svg"))
    assert "2 of 4 rounds" in repr(sa.Run(run.record, run.rounds[:2])), "a run that is not finished"
    assert texts(tree)[6:10] == ["seed", "0", "rounds", "4"]
    diverged = sa.run(tiny.with_(receiver="none()", noise="sas(alpha=0.5, tau=1e37)"))
    assert f"diverged at round {diverged.diverged + 1}" in repr(diverged)


def test_a_run_with_python_objects_shows_their_names(tiny):
    data = sa.Dataset.from_arrays(torch.randn(60, 4), torch.arange(60) % 3)
    run = sa.run(tiny, data=data)
    assert ("Dataset" in repr(run), "digest" in repr(run)) == (True, False)


def test_a_sweep_is_a_list_with_a_row_for_each_setting(tiny, tmp_path):
    runs = sa.sweep([tiny.with_(seed=seed, receiver=r) for r in ("mac(C=1)", "none()") for seed in (0, 1)], tmp_path)
    assert isinstance(runs, list)
    means = {runs[i].settings["receiver"]: (settled(runs[i]) + settled(runs[i + 1])) / 2 for i in (0, 2)}
    best = max(means, key=means.get)
    assert repr(runs) == f"Sweep(4 runs, 2 configurations; best accuracy: {best} {means[best]:.4f})"
    assert repr(sa.Sweep()) == "Sweep(0 runs, 0 configurations)"
    tree = parsed(runs)
    rows = list(zip(*[iter(texts(tree))] * 5, strict=True))
    assert [row[:3] for row in rows] == [("mac(C=1)", "2", "4"), ("none()", "2", "4")]
    assert rows[0][3] == f"{means['mac(C=1)']:.4f} ± {stdev(map(settled, runs[:2])):.4f}"
    assert len(list(tree.iter("svg"))) == 2


def test_a_row_shows_runs_of_different_lengths_and_runs_without_an_accuracy(tiny):
    whole = sa.run(tiny)
    shown = sa.Sweep([whole, sa.Run(whole.record | {"seed": 1}, whole.rounds[:2])])
    assert texts(parsed(shown))[:3] == ["mac(C=1)", "2", "2 to 4"]
    assert repr(sa.Sweep([sa.Run(whole.record, [])])) == "Sweep(1 run, 1 configuration)"
    assert texts(parsed(sa.Sweep([sa.Run(whole.record, [])])))[1:4] == ["1", "0", None]
    assert texts(parsed(sa.Sweep([sa.Run(whole.record, [{"round": 0}])])))[1:4] == ["1", "1", None], "not evaluated"


def test_a_search_shows_its_best_trial_and_a_row_for_each(tiny):
    trials = [Trial({"lr": 0.1}, 0.25, 4), Trial({"lr": 0.2}, 0.5, 4), Trial({"lr": 0.3}, 0.75, 2, stopped=True)]
    shown = Result(tiny, {"lr": Range(0.1, 1)}, [*trials, Trial({"lr": 0.4}, 0.0, 0, failed="<NaN>")])
    assert repr(shown) == "Result(4 trials; best: lr=0.2 with validation accuracy 0.5000)"
    assert str(shown) == repr(shown)
    rows = list(zip(*[iter(texts(parsed(shown)))] * 4, strict=True))
    assert rows == [
        ("0.1", "4", "0.2500", None), ("0.2", "4", "0.5000", None), ("0.3", "2", "0.7500", "stopped early"),
        ("0.4", "0", None, "failed: <NaN>"),
    ]  # fmt: skip
    assert repr(shown._replace(trials=shown.trials[2:])) == "Result(2 trials)", "no trial is complete"


def test_a_comparison_has_a_table_for_each_channel(tiny, tmp_path):
    plan = [tiny.with_(receiver=r, **{"noise.tau": tau}) for r in ("mac(C=1)", "none()") for tau in (0.1, 9)]
    result = sa.compare(plan, tmp_path)
    assert repr(result).startswith("Comparison(2 channels; best accuracy: ")
    assert "\n" not in repr(result)
    tree = parsed(result)
    assert [table.find("caption").text for table in tree.iter("table")] == list(result.lines)
    for table, lines in zip(tree.iter("table"), result.lines.values(), strict=True):
        assert texts(table)[0] == lines[0].receiver
    assert len(list(tree.iter("svg"))) == 4


def test_a_line_rises_with_the_values_and_has_gaps():
    drawn = points(sparkline([0.1, 0.9, None, 0.5, 0.5]))
    assert [command for command, _, _ in drawn] == ["M", "L", "M", "L"]
    heights = [y for _, _, y in drawn]
    assert heights[1] < heights[2] == heights[3] < heights[0]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for _, x, y in drawn)
    assert len(points(sparkline([0.3, 0.3]))) == 2


@pytest.mark.parametrize("values", [[], [0.5], [None, 0.5, None]])
def test_a_sparkline_needs_two_values(values):
    assert sparkline(values) == ""
