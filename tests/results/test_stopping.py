"""Early stopping: a function of the recorded rounds; stopped runs are finished, and continue without the rule."""

import json
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import stableair as sa
from helpers.callbacks import Hooks
from helpers.errors import refused
from helpers.runs import Stop, same, stop_after
from stableair.results.metrics import metric_names
from stableair.results.resources import RESOURCES, totals
from stableair.results.stopping import Progress, StoppingRule, is_better, parse_condition, stopping_rule
from stableair.sweeps.workers import SweepProgress


def rows(*values, metric="test/accuracy"):
    return [{"round": k, metric: value} for k, value in enumerate(values)]


@pytest.mark.parametrize(
    ("condition", "met"),
    [
        ("test/accuracy > 0.8", False), ("test/accuracy>=0.8", True), ("test/accuracy < 0.3", True),
        ("test/accuracy < .2", False), ("test/accuracy <= 2e-1", True),
    ],
)  # fmt: skip
def test_a_condition_holds_in_some_round(condition, met):
    assert StoppingRule(condition).is_met(rows(0.2, None, 0.8, 0.5)) is met


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ((0.5, 0.4, 0.3), True), ((0.5, 0.4, 0.6), False), ((0.5, 0.5, 0.5), True), ((0.5, None, 0.4), True),
        ((0.5, 0.4), False), ((None, 0.5, 0.4), False), ((0.1, 0.5, 0.4, 0.3, 0.9), True), ((), False),
    ],
)  # fmt: skip
def test_patience_counts_rounds_without_a_better_value(values, met):
    assert StoppingRule(patience=2, monitor="test/accuracy").is_met(rows(*values)) is met
    losses = [None if value is None else -value for value in values]
    assert StoppingRule(patience=2, monitor="test/loss").is_met(rows(*losses, metric="test/loss")) is met


def stops_by_scan(rule, rows):
    """The stopping rule as one scan over all rounds of a run."""
    metric, comparison, target = parse_condition(rule.stop)
    values = totals(rows, metric) if metric in RESOURCES else [row[metric] for row in rows]
    if any(value is not None and getattr(operator, COMPARISONS[comparison])(value, target) for value in values):
        return True
    best = 0
    for k, row in enumerate(rows):
        if is_better(rule.monitor, row[rule.monitor], rows[best][rule.monitor]):
            best = k
        elif k - best >= rule.patience > 0:
            return True
    return False


COMPARISONS = {">": "gt", ">=": "ge", "<": "lt", "<=": "le"}
ACCURACIES = st.lists(st.none() | st.sampled_from([0.1, 0.2, 0.3, 0.4]), min_size=1, max_size=12)


@given(
    ACCURACIES, st.sampled_from(["test/accuracy", "test/loss"]), st.integers(0, 4), st.sampled_from([*COMPARISONS]),
    st.sampled_from([("monitored", 0.35), ("symbols", 5), ("energy_max", 0.35)]), st.integers(0, 12),
)  # fmt: skip
def test_advancing_by_rounds_is_a_scan_over_all_rounds(values, monitor, patience, comparison, target, at_once):
    recorded = [
        row | {"channel/uses": 10 * (row[monitor] or 0), "channel/energy_total_max": row[monitor] or 0}
        for row in rows(*values, metric=monitor)
    ]
    name, number = (monitor, target[1]) if target[0] == "monitored" else target
    rule = StoppingRule(f"{name} {comparison} {number}", patience, monitor)
    progress = rule.advance(Progress(), recorded[:at_once])
    assert progress.met is (at_once > 0 and stops_by_scan(rule, recorded[:at_once]))
    for n in range(at_once + 1, len(recorded) + 1):
        progress = rule.advance(progress, recorded[:n])
        assert progress.met is stops_by_scan(rule, recorded[:n])


@pytest.mark.parametrize("stop", ["", "test/accuracy > 2", "symbols > 1e9"])
def test_a_new_round_reads_no_earlier_round(stop):
    """Otherwise the time of a round would grow with the number of rounds."""
    first, last = ({"test/accuracy": a, "channel/uses": 5.0} for a in (0.5, 0.4))
    rule = StoppingRule(stop, 3, "test/accuracy")
    unreadable = [None] * 999
    progress = rule.advance(Progress(), [first])._replace(rounds=1000)
    assert rule.advance(progress, [first, *unreadable, last]).stale == 1


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("invalid-condition", {"stop": "test/accuracy"}), ("invalid-condition", {"stop": "test/accuracy == 1"}),
        ("invalid-condition", {"stop": "test/accuracy > high"}), ("unknown-metric", {"stop": "validation/loss < 1"}),
        ("unknown-metric", {"monitor": "validation/loss"}), ("unknown-metric", {"stop": "test/acc > 0.9"}),
        ("unknown-metric", {"monitor": "foo"}), ("unknown-metric", {"monitor": "energy"}),
        ("out-of-range", {"patience": -1}),
        ("wrong-type", {"patience": 1.5}), ("wrong-type", {"stop": 0.9}),
    ],
)  # fmt: skip
def test_invalid_rules_are_refused_before_anything_is_computed(code, options, tiny, tmp_path):
    refused(code, sa.run, tiny, tmp_path / "a", **options)
    refused(code, sa.sweep, [tiny], tmp_path / "s", **options)
    assert not list(tmp_path.iterdir())


def test_a_metric_that_is_not_recorded_is_refused(tiny):
    for metric in ("receiver/C", "test/accuracy_batch"):  # they depend on the receiver and the model
        recorded = refused("unknown-metric", sa.run, tiny, stop=f"{metric} > 1").fields["recorded"]
        assert "channel/senders" in recorded


def test_every_recorded_metric_may_be_used(tiny):
    """Names are checked before the first round."""
    rich = tiny.with_(evaluate_clients=True, average=0.9, snr_blocks="layer", receiver="mac(C=auto)", rounds=1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    run = sa.run(rich, model=model, profile=True)
    names = [*metric_names(run.rounds), *RESOURCES]
    assert len(names) > 25
    for name in names:
        stopping_rule(f"{name} > 1", 0, "" if name in RESOURCES else name, "test")


def test_a_stopped_run_is_finished_until_it_is_run_without_the_rule(tiny, tmp_path, monkeypatch):
    whole = sa.run(tiny, tmp_path / "whole")
    rule = {"stop": f"train/loss <= {whole['train/loss'][1]}"}
    stopped = sa.run(tiny, tmp_path / "a", **rule)
    assert (len(stopped), sa.load(tmp_path / "a").stopped, whole.stopped) == (2, True, False)
    assert stopped.rounds[1]["test/loss"] == whole.rounds[1]["test/loss"]
    with monkeypatch.context() as patch:
        patch.setattr("stableair.runner.build", lambda *_: pytest.fail("computed again"))
        assert len(sa.run(tiny, tmp_path / "a", resume=True, **rule)) == 2
    longer = sa.run(tiny, tmp_path / "a", resume=True)
    assert same(longer, whole)
    assert not sa.load(tmp_path / "a").stopped


def test_a_rule_that_recorded_rounds_already_satisfy_is_recorded(tiny, tmp_path):
    with pytest.raises(Stop):
        sa.run(tiny, tmp_path, callbacks=[Hooks(round=stop_after(1))])
    assert not sa.load(tmp_path).stopped
    run = sa.run(tiny, tmp_path, resume=True, stop="test/loss > 0")
    assert (len(run), run.stopped, sa.load(tmp_path).stopped) == (2, True, True)


def test_an_interrupted_run_stops_where_an_uninterrupted_one_does(tiny, tmp_path):
    e = tiny.with_(rounds=12)
    options = {"patience": 2, "monitor": "channel/snr_db"}
    whole = sa.run(e, **options)
    assert 3 <= len(whole) < 12
    with pytest.raises(Stop):
        sa.run(e, tmp_path, callbacks=[Hooks(round=stop_after(1))], **options)
    assert same(sa.run(e, tmp_path, resume=True, **options), whole)


def test_the_stopping_rule_is_not_part_of_the_experiment(tiny, tmp_path):
    stopped = sa.run(tiny, tmp_path, stop="test/loss > 0")
    assert stopped.experiment.id() == tiny.id()
    assert json.loads((tmp_path / "environment.json").read_text())[0]["stopping"]["stop"] == "test/loss > 0"


def test_stopped_runs_are_finished_in_comparisons_and_in_the_progress_of_a_sweep(tiny, tmp_path):
    plan = [tiny, tiny.with_(receiver="none()")]
    sa.run(plan[1], tmp_path / plan[1].name)
    assert len(sa.run(plan[0], tmp_path / plan[0].name, stop="test/loss > 0")) == 1
    lines = next(iter(sa.compare(tmp_path).lines.values()))
    assert {len(line.runs[0]) for line in lines} == {1, 4}
    assert all(one.finished for one in SweepProgress(plan, tmp_path).refresh())


def test_a_run_in_memory_knows_that_it_stopped(tiny):
    whole, stopped = sa.run(tiny.with_(receiver="none()")), sa.run(tiny, stop="test/loss > 0")
    assert (whole.stopped, stopped.stopped) == (False, True)
    lines = next(iter(sa.compare([whole, stopped]).lines.values()))
    assert {len(line.runs[0]) for line in lines} == {1, 4}
    assert {len(line.runs[0]) for line in sa.compare([whole, stopped], equal="symbols").lines.popitem()[1]} == {1}
    assert not sa.run(tiny, stop="test/loss < 0").stopped


@pytest.mark.parametrize("call", [sa.sweep, sa.compare])
def test_sweeps_and_comparisons_stop_their_runs(call, tiny, tmp_path):
    plan = [tiny, tiny.with_(receiver="none()")]
    call(plan, tmp_path, stop="test/loss > 0", keep_best=True)
    assert [len(sa.load(tmp_path / one.name)) for one in plan] == [1, 1]
    assert all(torch.equal(run.best.state.model.w, run.state.model.w) for run in map(sa.load, tmp_path.iterdir()))


def test_a_search_stops_its_trials(tiny, tmp_path):
    result = sa.search(tiny, {"receiver.C": "1,2"}, tmp_path, stop="validation/loss > 0", trials=2)
    assert [trial.rounds for trial in result.trials] == [1, 1]
    refused("unknown-metric", sa.search, tiny, {"receiver.C": "1,2"}, tmp_path / "b", stop="test/loss > 0")


def test_the_default_metric_is_the_accuracy_of_the_evaluated_split():
    assert stopping_rule("", 3, "", "validation").monitor == "validation/accuracy"
