"""Totals of resources: along the rounds, as axis, in tables, as stopping condition, and of runs of earlier versions."""

import json
import math

import numpy as np
import pytest

import stableair as sa
from helpers.callbacks import Hooks
from helpers.errors import refused
from helpers.runs import Stop, same, stop_after
from stableair.results import report
from stableair.results.checksums import EXPERIMENT, ROUNDS, seal
from stableair.results.curves import MAX_POINTS, mean_curve
from stableair.results.resources import RESOURCES
from stableair.results.run import Run
from stableair.results.stopping import StoppingRule

METRICS = [resource.metric for resource in RESOURCES.values()]


def made(accuracy, energy, **settings):
    """A run with an accuracy and an energy per round; a round takes 100 symbols and 2 seconds on the air.

    The client with the largest energy changes: the largest total is 1.5 times the mean, not twice the mean.
    """
    rows = [
        {"round": k, "test/accuracy": a, "seconds": 9.0, "channel/uses": 100.0, "channel/seconds": 2.0,
         "channel/energy_mean": e, "channel/energy_max": 2 * e, "channel/bits": 0.0,
         "channel/energy_total_max": 1.5 * sum(energy[: k + 1])}
        for k, (a, e) in enumerate(zip(accuracy, energy, strict=True))
    ]  # fmt: skip
    return Run(sa.Experiment(rounds=len(rows)).with_(**settings).to_record(), rows)


def without_resources(run):
    return Run(run.record, [{k: v for k, v in row.items() if k not in METRICS} for row in run.rounds])


def diverged(run):
    last = dict.fromkeys(run.rounds[-1]) | {"round": len(run), "diverged": True}
    return Run(run.record, [*run.rounds, last])


def test_a_run_has_the_totals_after_each_round():
    run = made([0.1, 0.2, 0.3], [1.0, 2.0, 4.0])
    assert run["energy"] == [1, 3, 7]
    assert run["symbols"] == [100, 200, 300]
    assert run["airtime"] == [2, 4, 6], "not the computing time"
    assert run["seconds"] == [9, 9, 9]
    assert run["energy_max"] == [1.5, 4.5, 10.5], "recorded as a total"
    assert diverged(run)["energy"] == [1, 3, 7, 7]
    assert diverged(run)["energy_max"] == [1.5, 4.5, 10.5, 10.5]


def test_totals_of_a_real_run(tiny):
    run = sa.run(tiny)
    for name, resource in RESOURCES.items():
        recorded = run[resource.metric]
        assert run[name] == (recorded if name == "energy_max" else pytest.approx(np.cumsum(recorded)))
    assert run["energy"][0] > 0


def test_a_total_needs_the_resource_of_every_round():
    run = made([0.1, 0.2], [1.0, 2.0])
    del run.rounds[0]["channel/energy_mean"]
    assert refused("resource-not-recorded", lambda: run["energy"]).fields["resource"] == "energy"
    assert run["symbols"] == [100, 200]


def test_a_run_is_cut_to_the_rounds_within_a_budget():
    run = made([0.1, 0.2, 0.3], [1.0, 2.0, 4.0])
    assert [len(run.within("energy", budget)) for budget in (1, 2.9, 3, 6.9, 7, 99)] == [1, 1, 2, 2, 3, 3]
    assert len(made([0.1] * 3, [0.1] * 3).within("energy", 0.3)) == 3, "three times 0.1 is 0.30000000000000004"
    assert refused("budget-too-small", run.within, "energy", 0.9).fields == {"resource": "energy", "budget": 0.9}
    refused("unknown-value", run.within, "joule", 1)
    refused("out-of-range", run.within, "energy", 0)


def test_a_run_that_diverged_after_the_budget_has_not_diverged_within_it():
    diverging = diverged(made([0.1, 0.9], [1.0, 2.0]))  # a total of 3, then the round in which it diverged
    assert [diverging.within("energy", budget).diverged for budget in (1, 3, 3.1)] == [None, None, 2]


def test_the_axis_of_equal_totals_is_that_of_the_rounds():
    runs = [made([0.1, 0.3], [1.0, 2.0]), made([0.3, 0.7], [5.0, 5.0], seed=1)]
    curve, along_rounds = mean_curve(runs, "test/accuracy", x="symbols"), mean_curve(runs, "test/accuracy")
    assert curve.x.tolist() == [100, 200, 200]
    assert curve.mean.tolist() == pytest.approx([0.2, 0.2, 0.5])
    assert curve.half_width[[0, 2]].tolist() == along_rounds.half_width.tolist()


def test_a_run_keeps_its_value_until_the_budget_covers_the_next_round():
    runs = [made([0.1, 0.3, 0.5], [1.0, 2.0, 2.0]), made([0.5, 0.9], [2.0, 2.0], seed=1)]  # totals 1, 3, 5 and 2, 4
    curve = mean_curve(runs, "test/accuracy", x="energy")
    at = dict(zip(curve.x.tolist(), curve.mean.tolist(), strict=True))
    assert at == pytest.approx({2: 0.3, 3: 0.4, 4: 0.6}), (
        "from the first round of both runs to the end of the shorter one"
    )
    for budget, accuracy in at.items():
        assert np.mean([run.within("energy", budget)["test/accuracy"][-1] for run in runs]) == pytest.approx(accuracy)


def test_a_run_that_diverged_neither_ends_the_curve_nor_contributes_after_its_end():
    diverging = diverged(made([0.9], [1.0]))
    curve = mean_curve([diverging, made([0.1, 0.2], [1.0, 2.0], seed=1)], "test/accuracy", x="energy")
    assert dict(zip(curve.x, curve.mean, strict=True)) == pytest.approx({1: 0.5, 3: 0.2})
    assert curve.crosses == [(1, pytest.approx(0.5))]
    assert mean_curve([diverging], "test/accuracy", x="energy").x.tolist() == [1]
    first = diverged(made([0.9], [1.0]))
    del first.rounds[0]
    first.rounds[0]["round"] = 0
    assert mean_curve([first, made([0.1], [1.0], seed=1)], "test/accuracy", x="energy").mean.tolist() == [0.1]
    assert np.isnan(mean_curve([first], "test/accuracy", x="energy").mean).all()


def test_a_curve_has_a_bounded_number_of_points():
    rng = np.random.default_rng(0)
    runs = [made(np.linspace(0, 1, 900).tolist(), rng.uniform(1, 2, 900).tolist(), seed=seed) for seed in range(3)]
    curve = mean_curve(runs, "test/accuracy", x="energy")
    assert len(curve.x) <= 2 * MAX_POINTS
    assert (np.diff(curve.x) >= 0).all()
    assert (np.diff(curve.mean) > -1e-12).all()
    assert curve.x[-1] == min(run["energy"][-1] for run in runs)


def test_a_picture_with_a_resource_as_axis(tmp_path, caplog):
    runs = [made([0.1, 0.2], [1.0, 2.0]), made([0.1, 0.4], [20.0, 20.0], receiver="none()")]
    axes = sa.plot([*runs, without_resources(made([0.5], [1.0], seed=4))], x="energy").axes[0]
    assert (axes.get_xlabel(), axes.get_xscale()) == (RESOURCES["energy"].label, "log")
    assert len(axes.lines) == 2
    assert "has no energy" in caplog.text
    assert sa.plot(runs, x="airtime", out=tmp_path / "a.png").axes[0].get_xscale() == "linear"
    assert sa.plot(runs, "symbols").axes[0].get_ylabel() == RESOURCES["symbols"].label
    error = refused("unknown-metric", sa.plot, list(map(without_resources, runs)), x="energy")
    assert "did you mean 'energy'" not in str(error)
    assert not [name for name in RESOURCES if f" {name}," in f"{str(error).partition(';')[2]},"], "none was recorded"
    assert "airtime" in refused("unknown-x", sa.plot, runs, x="seconds").fields["allowed"]


def test_the_report_has_the_totals_and_the_axes():
    runs = [made([0.1, 0.2], [1.0, 2.0]), made([0.1, 0.4], [20.0, 20.0], receiver="none()")]
    old = without_resources(made([0.5], [1.0], receiver="sign(step=1)"))
    resources = report._resources({"a": runs[:1], "b": runs[1:]}, "test/accuracy")
    assert resources["table"].rows == [["a", "200", "4", "3", "4.5", "4"], ["b", "200", "4", "40", "60", "40"]], (
        "no bits"
    )
    lines = [trace for trace in resources["curves"]["data"] if trace["name"] == "b"]
    assert [line["x"] for line in lines] == [[100, 200, 200], [2, 4, 4], [20, 40, 40], [30, 60, 60]]
    layout = resources["curves"]["layout"]
    assert [layout[axis]["type"] for axis in ("xaxis", "xaxis2", "xaxis3")] == ["linear", "linear", "log"]
    assert "<h2>Resources</h2>" in report.page([*runs, old])
    assert "<h2>Resources</h2>" not in report.page([old])


def test_the_report_omits_unused_resources():
    silent = made([0.1, 0.2], [0.0, 0.0])
    for row in silent.rounds:
        row |= {"channel/uses": 0.0, "channel/seconds": 0.0}
    assert "<h2>Resources</h2>" not in report.page([silent])
    overflowed = made([0.5], [1.0], receiver="sign(step=1)")
    overflowed.rounds[0]["channel/uses"] = None
    found = report._resources({"a": [made([0.1], [1.0])], "b": [overflowed]}, "test/accuracy")
    assert [row[:3] for row in found["table"].rows] == [["a", "100", "2"], ["b", report.MISSING, "2"]]
    assert [trace["name"] for trace in found["curves"]["data"]].count("b") == len(RESOURCES) - 2, "no symbols, no bits"


def test_a_picture_of_a_resource_against_an_argument_shows_the_totals():
    runs = [made([0.1, 0.2, 0.3], [1.0, 2.0, 4.0]), made([0.1] * 3, [5.0] * 3, receiver="mac(C=2)")]
    runs[1] = diverged(runs[1])
    axes = sa.plot(runs, "energy", x="receiver.C").axes[0]
    assert axes.lines[0].get_ydata().tolist() == [7, 15]


def test_tables_have_totals_per_run_and_per_round():
    runs = [made([0.1, 0.2, 0.3], [1.0, 2.0, 4.0]), made([0.5, 0.6], [1.0, 1.0], seed=1, rounds=3)]
    frame = sa.table(runs)
    assert frame[[*RESOURCES]].values.tolist() == [[300, 6, 7, 10.5, 0], [200, 4, 2, 3, 0]]
    assert sa.table(runs, "round", metrics=["energy"])["energy"].tolist() == [1, 3, 7, 1, 2]
    ended = sa.table([diverged(runs[0])])
    assert (math.isnan(ended["test/accuracy"].iloc[0]), ended["energy"].iloc[0]) == (True, 7)
    mixed = sa.table([runs[0], without_resources(runs[1])])
    assert mixed["energy"].isna().tolist() == [False, True]
    assert not set(RESOURCES) & set(sa.table(without_resources(runs[0])))
    refused("unknown-metric", sa.table, without_resources(runs[0]), metrics=["energy"])


def test_a_table_may_be_cut_at_a_budget():
    runs = [made([0.1, 0.2, 0.3], [1.0, 2.0, 4.0]), made([0.5, 0.6], [2.0, 2.0], seed=1)]
    frame = sa.table(runs, at={"energy": 3})
    assert frame[["rounds", "test/accuracy", "energy"]].values.tolist() == [[2, 0.2, 3], [1, 0.5, 2]]
    refused("budget-too-small", sa.table, runs, at={"energy": 1.5})
    refused("unknown-metric", sa.table, list(map(without_resources, runs)), at={"energy": 3})


def test_a_table_at_a_budget_names_the_runs_that_do_not_reach_it(caplog):
    runs = [
        made([0.1, 0.2, 0.3], [1.0, 2.0, 4.0]),
        made([0.5], [2.0], seed=1),
        without_resources(made([0.5], [1.0], seed=2)),
    ]
    assert sa.table(runs, at={"energy": 2})["energy"].tolist() == [1, 2]
    assert "has no energy" in caplog.text
    assert "used less" not in caplog.text
    assert sa.table(runs, at={"energy": 3})["energy"].tolist() == [3, 2]
    assert "1 run used less than 3 J per client" in caplog.text


@pytest.mark.parametrize(
    ("condition", "met"),
    [
        ("energy > 7", False), ("energy >= 7", True), ("symbols > 299", True), ("symbols > 300", False),
        ("energy_max > 10", True), ("energy_max > 11", False), ("airtime >= 6", True), ("seconds > 10", False),
        ("bits > 0", False),
    ],
)  # fmt: skip
def test_a_stopping_condition_may_use_a_total(condition, met):
    assert StoppingRule(condition).is_met(made([0.1, 0.2, 0.3], [1.0, 2.0, 4.0]).rounds) is met


def test_a_run_stops_by_its_energy_also_after_an_interruption(tiny, tmp_path):
    energy = sa.run(tiny)["energy"]
    rule = {"stop": f"energy > {energy[1]!r}"}
    whole = sa.run(tiny, **rule)
    assert len(whole) == 3
    with pytest.raises(Stop):
        sa.run(tiny, tmp_path, callbacks=[Hooks(round=stop_after(0))], **rule)
    assert same(sa.run(tiny, tmp_path, resume=True, **rule), whole)
    assert sa.load(tmp_path).stopped


@pytest.fixture
def old_run(tiny, tmp_path):
    """The folder of a run of an earlier version, interrupted after two rounds: without resources and their settings."""
    folder = tmp_path / "old"
    sa.run(tiny.with_(rounds=2), folder)
    rows = [{k: v for k, v in row.items() if k not in (*METRICS, "channel/energy_max", "checksum")}
            for row in map(json.loads, (folder / ROUNDS).read_text().splitlines())]  # fmt: skip
    (folder / ROUNDS).write_bytes(b"".join(seal(row, None) for row in rows))
    record = json.loads((folder / EXPERIMENT).read_text())
    record = {k: v for k, v in record.items() if k not in ("bandwidth", "symbol_energy", "checksum")}
    (folder / EXPERIMENT).write_bytes(seal(record))
    return folder


def test_a_run_of_an_earlier_version_is_read_drawn_compared_and_resumed(old_run, tiny, tmp_path):
    assert sa.load(old_run).settings["symbol_energy"] == 1
    assert sa.plot(old_run).axes
    assert "symbols" not in sa.table(old_run)
    other = sa.run(tiny.with_(rounds=2, receiver="none()"), tmp_path / "new")
    found = sa.compare([old_run, other])
    assert [line.total("energy") is None for line in found.lines.popitem()[1]].count(True) == 1
    refused("resource-not-recorded", sa.compare, [old_run, other], equal="energy")
    refused("resource-not-recorded", sa.run, tiny, old_run, resume=True, stop="energy > 1")
    resumed = sa.run(tiny, old_run, resume=True)
    assert resumed["test/loss"] == sa.run(tiny)["test/loss"]
    assert resumed["channel/energy_mean"][:2] == [None, None]
    assert not sa.load(old_run).has("energy")


def test_a_curve_of_seeds_without_a_common_total_is_left_out(caplog):
    """The first seed ends before the second one completes a round: a point would be the mean of one seed."""
    apart = [made([0.1], [1.0]), made([0.7], [1.2], seed=1)]
    common = [made([0.2], [3.0], receiver="none()"), made([0.4], [3.0], receiver="none()", seed=1)]
    axes = sa.plot([*apart, *common], x="energy").axes[0]
    assert [line.get_label() for line in axes.lines] == ["none() (2 seeds)"]
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([0.3])
    assert "left out: mac(C=1): its seeds have no total of energy in common" in caplog.text
    assert not sa.plot(apart, x="energy").axes[0].lines
    assert len(sa.plot(apart, x="symbols").axes[0].lines) == 1
    traces = report._resources({"a": apart, "b": common}, "test/accuracy")["curves"]["data"]
    assert [trace.get("name") for trace in traces].count("a") == 2, "over symbols and airtime"
    assert mean_curve([apart[0], diverged(apart[1])], "test/accuracy", x="energy").x.size == 0
