"""Comparisons at equal symbols, airtime, energy or bits."""

import numpy as np
import pytest

import stableair as sa
from helpers.errors import refused
from stableair.comparisons import comparison
from stableair.results.budgets import Budget, at_equal
from stableair.results.resources import RESOURCES
from stableair.results.run import Run
from stableair.results.statistics import holm, p_value
from test_comparisons import TINY

DIGITAL = {"fading": "unit()", "noise": "none()", "channel": "digital()", "receiver": "none()"}


def made(accuracy, cost, name="energy", **settings):
    metric = RESOURCES[name].metric
    rows = [
        {"round": k, "test/accuracy": a, "seconds": 1.0} | {metric: cost if isinstance(cost, float) else cost[k]}
        for k, a in enumerate(accuracy)
    ]
    return Run(sa.Experiment(**{"rounds": len(rows), **settings}).to_record(), rows)


def pair(**settings):
    """An efficient run of four rounds and a costly one of two."""
    return [made([0.1, 0.2, 0.3, 0.4], 1.0), made([0.6, 0.8], 3.0, receiver="none()", **settings)]


def test_the_smallest_total_is_the_budget():
    runs, budget = at_equal(pair(), "energy")
    assert budget == Budget("energy", 4.0)
    assert [len(run) for run in runs] == [4, 1]


def test_a_specified_budget_cuts_all_runs():
    runs, _ = at_equal(pair(), "energy", 3.5)
    assert [len(run) for run in runs] == [3, 1]


def test_impossible_budgets_are_refused():
    assert refused("budget-too-small", at_equal, pair(), "energy", 2.5).fields["budget"] == 2.5
    assert refused("budget-too-large", at_equal, pair(), "energy", 4.5).fields["budget"] == 4.5
    refused("out-of-range", at_equal, pair(), "energy", 0)
    refused("unknown-value", at_equal, pair(), "joule")
    refused("resource-not-recorded", at_equal, pair(), "symbols")
    unused = [made([0.1], 0.0, "bits"), made([0.1], 8.0, "bits", receiver="none()")]
    unused = [
        Run(run.record, [row | {"channel/uses": 5.0, "channel/seconds": 0.0} for row in run.rounds]) for run in unused
    ]
    error = refused("resource-not-used", at_equal, unused, "bits")
    assert str(error).endswith("resources that all runs used: symbols"), (
        "bits and airtime are not used, the others are not recorded"
    )
    assert error.fields["allowed"] == ["symbols"]


def test_unfinished_runs_are_left_out_unless_they_have_used_the_budget(caplog):
    runs = [*pair(), made([0.5, 0.5], 1.0, seed=1, rounds=9)]
    cut, budget = at_equal(runs, "energy")
    assert (len(cut), budget.amount) == (2, 4)
    assert "1 run left out: unfinished" in caplog.text
    assert len(at_equal([runs[0], runs[2]], "energy", 2.0)[0]) == 2
    refused("no-rounds", at_equal, runs[2:], "energy")


def test_a_run_that_diverged_sets_no_budget_and_has_accuracy_zero():
    diverging = made([0.9], 1.0, seed=1)
    diverging.rounds.append(dict.fromkeys(diverging.rounds[0]) | {"round": 1, "diverged": True})
    cut, budget = at_equal([*pair(), diverging], "energy")
    assert budget.amount == 4
    assert cut[2].settled("test/accuracy") == 0
    late = made([0.9] * 6, 1.0, seed=1)
    late.rounds.append(dict.fromkeys(late.rounds[0]) | {"round": 6, "diverged": True})
    assert at_equal([*pair(), late], "energy")[0][2].settled("test/accuracy") == pytest.approx(0.9), "within the budget"


def diverged(cost, after, name="energy", **settings):
    """A run that diverged after some complete rounds."""
    run = made([0.9] * after, cost, name, **{"rounds": 9} | settings)
    run.rounds.append({"round": after, "test/accuracy": None, RESOURCES[name].metric: None, "diverged": True})
    return run


def test_runs_that_all_diverged_need_a_budget():
    runs = [diverged(1.0, 2), diverged(1.0, 3, seed=1)]
    refused("all-diverged", at_equal, runs, "energy")
    cut, budget = at_equal(runs, "energy", 5.0)
    assert budget.amount == 5
    assert [run.diverged for run in cut] == [2, 3]
    assert at_equal([diverged(1.0, 0), *pair()], "energy")[1].amount == 4


def test_a_run_is_cut_before_its_divergence_if_the_budget_ends_there():
    assert [len(diverged(1.0, 6).within("energy", budget)) for budget in (2, 6, 7)] == [2, 6, 7]


def test_a_budget_of_ten_equal_rounds_holds_ten_rounds():
    """Sums of 0.1 are not exact: 0.1 + ... + 0.1 is 0.9999999999999999."""
    tenths = made([0.5] * 10, 0.1)
    assert at_equal([tenths], "energy", 1.0)[1].amount == 1.0
    assert len(tenths.within("energy", 0.3)) == 3


def test_an_analog_run_that_diverged_does_not_prevent_a_comparison_of_bits():
    diverging = diverged(0.0, 1, "bits")
    cut, _ = at_equal([made([0.5, 0.6], 8.0, "bits", receiver="none()"), diverging], "bits")
    assert [run.diverged for run in cut] == [None, 1]


def test_longer_recorded_runs_take_part_in_a_comparison(tmp_path):
    plan = TINY | {"receiver": ["mac(C=1)", "none()"], "seeds": 1}
    sa.sweep(plan | {"rounds": 3, "receiver": "mac(C=1)"}, tmp_path)
    found = sa.compare(plan | {"rounds": 2}, tmp_path, equal="symbols")
    (lines,) = found.lines.values()
    assert sorted((line.receiver, line.rounds) for line in lines) == [("mac(C=1)", 2), ("none()", 2)]


def test_all_channels_share_a_table_with_rounds_and_resources():
    runs = [run for seed in range(2) for run in (
        made([0.1, 0.2, 0.3, 0.4], 1.0, seed=seed), made([0.6, 0.8], 3.0, seed=seed, **DIGITAL)
    )]  # fmt: skip
    found = comparison(runs, "energy")
    ((name, lines),) = found.lines.items()
    assert (name, [line.rounds for line in lines], [line.total("energy") for line in lines]) == (
        "all channels", [1, 4], [3, 4],
    )  # fmt: skip
    head, first, *_ = str(found).splitlines()[1:]
    assert head.split() == ["accuracy", "behind", "95", "%", "interval", "seeds", "rounds", "energy", "seconds"]
    assert first.split()[-4:] == ["2", "1", "3", "1.0"]
    assert "Budget: 4 J per client. Each run is compared up to its last round within it" in str(found)
    assert found.pairs[name][0].difference == pytest.approx(0.6 - 0.35), "over the rounds of each run"
    assert found.to_pandas()[["rounds", "energy"]].values.tolist() == [[1, 3], [4, 4]]
    assert "rounds  " not in str(comparison([pair()[0], made([0.5] * 4, 1.0, receiver="none()")]))
    refused("not-paired", comparison, runs)


@pytest.mark.parametrize("name", RESOURCES)
def test_the_resource_of_the_budget_has_a_column(name):
    """Every resource can be the budget; the other resources have no column."""
    cheap = made([0.1, 0.2], [2.0, 4.0], name)
    costly = made([0.6, 0.8], [3.0, 9.0], name, receiver="none()")
    head, first, second, *_ = str(comparison([cheap, costly], name)).splitlines()[1:]
    assert head.split()[-3:] == ["rounds", name, "seconds"]
    total = "4" if name == "energy_max" else "6"  # energy_max is recorded as a total
    assert [line.split()[-3:-1] for line in (first, second)] == [["1", "3"], ["2", total]]


def test_holm_is_over_all_pairs_of_the_table():
    chance = np.random.default_rng(0).normal(0.5, 0.05, (3, 6))
    channels = {}, {"noise": "none()"}, DIGITAL
    runs = [
        made([a], 1.0, seed=seed, **more)
        for of_method, more in zip(chance, channels, strict=True)
        for seed, a in enumerate(of_method)
    ]
    found = comparison(runs, "energy").pairs["all channels"]
    raw = [p_value(chance[i], chance[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert sorted(pair.p for pair in found) == pytest.approx(sorted(holm(raw)))


def test_runs_of_a_plan_stop_when_they_have_used_the_budget(tmp_path):
    digital = DIGITAL | {"channel": "digital(quantize='qsgd(s=1)')"}  # 5 (32 + 2 d) symbols a round, not d / 2
    plan = TINY | {"rounds": 40, "runs": [{"receiver": "mac(C=1)"}, digital], "seeds": 1}
    analog = sa.run(sa.Experiment(**TINY).with_(rounds=1))["symbols"][0]
    found = sa.compare(plan, tmp_path, equal="symbols", budget=30 * analog)
    (lines,) = found.lines.values()
    by_channel = {line.runs[0].settings["channel"].partition("(")[0]: line for line in lines}
    assert [by_channel[name].rounds for name in ("flat", "digital")] == [30, 1]
    assert [len(run) for run in sa.load(tmp_path) if "digital" in run.settings["channel"]] == [2]


def test_contradictory_options_are_refused(tmp_path):
    plan = TINY | {"receiver": ["mac(C=1)", "none()"]}
    refused("budget-without-equal", sa.compare, plan, tmp_path / "a", budget=3)
    refused("unknown-value", sa.compare, plan, tmp_path / "a", equal="joule")
    refused("out-of-range", sa.compare, plan, tmp_path / "a", equal="energy", budget=-1)
    assert not (tmp_path / "a").exists()


def test_the_commands_accept_a_budget(command):
    words = [f"{key}={value}" for key, value in TINY.items()]
    code, out, errors = command(
        "compare", *words, "receiver=mac(C=1),none()", "--seeds", 1, "--equal", "symbols", "--out", "c"
    )
    assert (code, errors) == (0, "")
    assert command("compare", "c", "--equal", "symbols")[1] in out
    one = next(iter(sa.compare("c").lines.values()))[0].total("symbols") / TINY["rounds"]
    code, out, _ = command("compare", "c", "--equal", "symbols", "--budget", one)
    assert (code, f"Budget: {one:.4g} complex symbols." in out) == (0, True)
    assert command("plot", "c", "--x", "energy", "-o", "e.png")[0] == 0
    assert command("export", "c", "--at", f"symbols={one}", "--metric", "symbols", "-o", "a.csv")[0] == 0
    code, _, errors = command("compare", "c", "--budget", 3)
    assert (code, errors.count("\n")) == (2, 1)
