"""Receivers over channels on paired seeds."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import stableair as sa
from helpers.errors import refused
from stableair.comparisons import comparison
from stableair.results import report
from stableair.results.reading import find
from stableair.results.run import Run

TINY = {
    "data": "synthetic(samples=60, classes=3, shape=(1, 2, 2))", "model": "mlp(width=4)", "clients": 5, "rounds": 2,
    "device": "cpu",
}  # fmt: skip
RULES = "mac(C=1)", "clip(C=1)", "none()"


def made(accuracy, uses=None, **settings):
    """A run of one round."""
    row = {"round": 0, "test/accuracy": accuracy, "seconds": 2.0} | ({} if uses is None else {"channel/uses": uses})
    return Run(sa.Experiment(**settings).to_record(), [row])


def many(n, noise="none()", **more):
    """The rules on n seeds: the second is about two points below the first, the third is equal to the first."""
    chance = np.random.default_rng(0)
    level, behind = 0.7 + 0.1 * chance.standard_normal(n), 0.02 + 0.002 * chance.standard_normal(n)
    each = {RULES[0]: level, RULES[1]: level - behind, RULES[2]: level}
    runs = [made(a, receiver=rule, noise=noise, seed=i, **more) for rule, of in each.items() for i, a in enumerate(of)]
    return runs, behind


def test_the_table_pairs_seed_by_seed():
    """Seeds differ by ten points, rules by two: only the paired difference is significant."""
    runs, behind = many(5)
    found = comparison(runs)
    (channel,) = found.lines
    pair = found.pair(channel, "mac(C=1)", "clip(C=1)")
    low, high = stats.t.interval(0.95, 4, behind.mean(), behind.std(ddof=1) / 5**0.5)
    assert (pair.better, pair.worse, pair.seeds) == ("mac(C=1)", "clip(C=1)", 5)
    assert pair.interval == pytest.approx((low, high))
    accuracies = [[run["test/accuracy"][0] for run in runs if run.settings["receiver"] == rule] for rule in RULES[:2]]
    assert pair.p == pytest.approx(3 * stats.ttest_rel(*accuracies).pvalue), "the smallest of three"
    assert found.pair(channel, "mac(C=1)", "none()").p is None, "equal on every seed: no test"
    text = str(found)
    line = next(line for line in text.splitlines() if line.startswith("clip"))
    accuracy = 100 * np.mean(accuracies[1]), 100 * np.std(accuracies[1], ddof=1)
    interval = 100 * behind.mean(), 100 * low, 100 * high
    shown = "clip(C=1) {:.2f} ± {:.2f} {:.2f} {:.2f} to {:.2f} {:.2g} * 5 2.0".format(*accuracy, *interval, pair.p)
    assert line.split() == shown.split()
    assert "-0.00" not in text, "the third rule equals the first"
    assert "Holm's correction over the 3 pairs of a channel" in text
    assert "no p-value for a difference that is the same for every seed" in text
    assert "fewer than" not in text.partition("behind:")[2]
    assert "symbols" not in text, "the runs did not record them"


def test_a_difference_that_rounds_to_zero_has_no_sign():
    text = str(comparison([made(0.5), made(0.9, seed=1), made(0.5 + 1e-6, receiver="none()")]))
    assert text.splitlines()[3].split()[:3] == ["none()", "50.00", "0.00"]


def test_fewer_than_five_seeds_get_no_marks_and_a_line_with_the_reason():
    found = comparison(many(4)[0])
    assert all(pair.p is None and not pair.mark for pairs in found.pairs.values() for pair in pairs)
    assert "*" not in str(found)
    assert "no p-value: it needs at least 5 seeds" in str(found)
    assert "the same for every seed" not in str(found)
    assert all(pair.interval for pairs in found.pairs.values() for pair in pairs), "but they have intervals"


def test_holm_is_over_the_pairs_of_a_channel():
    one, two = many(6)[0], many(6, noise="gaussian(std=1)")[0]
    separate, both = comparison(one), comparison([*one, *two])
    assert list(both.lines) == list(both.pairs) == ["none()", "gaussian(std=1)"]
    assert both.pairs["none()"] == separate.pairs["none()"], "another channel has no effect"
    more = [
        made(run["test/accuracy"][0], receiver="sign(step=1)", noise="none()", seed=i) for i, run in enumerate(one[:6])
    ]
    assert comparison([*one, *more]).pair("none()", *RULES[:2]).p > separate.pair("none()", *RULES[:2]).p, "more pairs"


def test_runs_of_earlier_versions_with_another_spelling_are_paired():
    runs = many(5)[0]
    old = [Run(run.record | {"noise": "none", "data": "digits"}, run.rounds) for run in runs[:5]]
    old += [Run(run.record | {"receiver": "none", "power": "none"}, run.rounds) for run in runs[10:]]
    found, same = comparison([*runs[5:10], *old]), comparison(runs)
    assert (str(found), found.pairs) == (str(same), same.pairs)
    assert found.pair("none", "none", "mac(C=1)") == same.pair("none()", "mac(C=1)", "none()") is not None


def test_the_table_has_symbols_seconds_and_divergence():
    runs = [made(0.5, uses=100, receiver="mac(C=1)", seed=i) for i in range(2)]
    ended = [made(0.9, uses=50, receiver="none()", seed=i) for i in range(2)]
    for run in ended:
        run.rounds.append(dict.fromkeys(run.rounds[0]) | {"round": 1, "seconds": 0.0, "diverged": True})
    (lines,) = comparison([*runs, *ended]).lines.values()
    assert [(line.total("symbols"), line.seconds, line.accuracy, line.diverged) for line in lines] == [
        (100, 2, 0.5, 0),
        (50, 2, 0, 2),
    ]
    text = str(comparison([*runs, *ended]))
    assert "0.00 ± 0.00, 2 diverged" in text
    assert "the accuracy of a run that diverged is 0" in text


def test_channels_keep_the_order_of_the_plan(tmp_path):
    noises = ["sas(tau=10)", "gaussian(std=1)", "sas(tau=2)"]
    plan = TINY | {"receiver": ["mac(C=1)", "none()"], "noise": noises, "rounds": 1}
    assert list(sa.compare(plan, tmp_path / "c", seeds=1).lines) == noises
    assert list(comparison(tmp_path / "c").lines) == sorted(noises), "the order of folders has no meaning"


def test_finished_runs_of_a_comparison_are_not_computed_again(tmp_path, monkeypatch):
    plan = TINY | {"receiver": ["mac(C=1)", "none()"], "rounds": 1}
    found = sa.compare(plan, tmp_path / "c")
    assert list(found.lines) == ["sas(alpha=1.5, tau=0.1)"]
    assert all(len(line.runs) == 5 for lines in found.lines.values() for line in lines), "five seeds"
    assert all(line.total("symbols") for lines in found.lines.values() for line in lines)
    monkeypatch.setattr("stableair.runner.build", lambda *_: pytest.fail("computed again"))
    assert str(sa.compare(plan, tmp_path / "c")) == str(found) == str(comparison(tmp_path / "c"))
    page = report.page(find([tmp_path / "c"])[0])
    for pair in (pair for pairs in found.pairs.values() for pair in pairs):
        p = "–" if pair.p is None else f"{pair.p:.2g} {pair.mark}".rstrip()
        assert f">{p}</td>" in page


def test_a_plan_may_list_its_seeds(tmp_path):
    two = sa.compare(TINY | {"receiver": ["mac(C=1)", "none()"], "seed": [3, 8]}, tmp_path)
    assert [[run.settings["seed"] for run in line.runs] for line in two.lines.popitem()[1]] == [[3, 8], [3, 8]]


@pytest.mark.parametrize(
    ("plan", "fields"),
    [
        ({"receiver": ["mac(C=1)", "none()"], "clients": [5, 6]}, {"name": "clients"}),
        ({"receiver": "mac(C=1)", "noise.tau": [0.1, 0.2]}, {"channel": "sas(alpha=1.5, tau=0.1)"}),
        (
            {"runs": [{"receiver": "mac(C=1)", "seed": 0}, {"receiver": "none()", "seed": 7}]},
            {"channel": "sas(alpha=1.5, tau=0.1)"},
        ),
    ],
)
def test_experiments_that_do_not_pair_are_refused_and_nothing_is_computed(plan, fields, tmp_path):
    with pytest.raises(sa.InputError) as error:
        sa.compare(TINY | plan, tmp_path / "c")
    assert (error.value.code, error.value.fields) == ("not-paired", fields)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_runs_with_fewer_rounds_are_left_out(caplog):
    runs, _ = many(6)
    behind = [replace(run, rounds=[row | {"round": k} for k in range(2) for row in run.rounds]) for run in runs]
    behind[0] = runs[0]  # mac(C=1), seed 0
    found = comparison(behind)
    assert "1 run left out: 1 round, while the longest run has 2" in caplog.text
    (lines,) = found.lines.values()
    assert {line.receiver: len(line.runs) for line in lines} == {"mac(C=1)": 5, "clip(C=1)": 6, "none()": 6}
    with pytest.raises(sa.InputError) as error:
        comparison(behind[1:6] + runs[6:])
    assert error.value.code == "not-paired"
    assert "12 runs left out" in caplog.text


def test_the_rounds_of_runs_that_stopped_early_are_shown(tmp_path):
    whole = sa.Experiment(**TINY)
    sa.run(whole, tmp_path / "whole")
    sa.run(whole.with_(receiver="none()"), tmp_path / "short", stop="test/accuracy >= 0")
    text = str(comparison(tmp_path))
    assert {line.split()[0]: line.split()[-3] for line in text.splitlines()[2:4]} == {"mac(C=1)": "2", "none()": "1"}
    assert "over the rounds that both runs of a pair have" in text
    sa.run(whole.with_(receiver="none()"), tmp_path / "short", resume=True)
    assert "rounds  " not in str(comparison(tmp_path))


def test_unpaired_and_missing_runs_are_refused():
    with pytest.raises(sa.InputError) as error:
        comparison([made(0.5), made(0.6, receiver="none()", model="mlp(3)")])
    assert (error.value.code, error.value.fields) == ("not-paired", {"name": "model"})
    with pytest.raises(sa.InputError) as error:
        comparison([made(0.5), made(0.6, receiver="none()", seed=1)])
    assert error.value.code == "not-paired"
    with pytest.raises(sa.InputError) as error:
        comparison([Run(sa.Experiment().to_record(), [])])
    assert error.value.code == "no-rounds"


@pytest.mark.parametrize("options", [{"seeds": 3}, {"stop": "test/accuracy > 0.5", "patience": 2}, {"profile": True}])
def test_options_of_runs_are_refused_for_recorded_runs(options):
    error = refused("unused-options", sa.compare, many(2)[0], **options)
    assert error.fields["options"] == list(options)


def test_the_command_computes_and_reads(command, tmp_path):
    words = [f"{key}={value}" for key, value in TINY.items()]
    code, out, errors = command("compare", *words, "receiver=mac(C=1),none()", "--seeds", 2, "--out", "c")
    assert (code, errors) == (0, "")
    head, table = out.split("sas(alpha=1.5, tau=0.1)\n")
    assert [line.partition("  ")[0] for line in head.splitlines()[1:]] == ["1/4", "2/4", "3/4", "4/4"]
    assert command("compare", "c") == (0, f"sas(alpha=1.5, tau=0.1)\n{table}", "")
    code, again, errors = command("compare", "c", "nothing")
    assert (code, again, errors) == (0, out[len(head) :], "warning: left out: nothing: there is no such folder\n")
    code, _, errors = command("compare", "c", "--seeds", 3)
    assert (code, errors) == (2, "error: recorded runs are compared as they are: leave out seeds\n")
    code, _, errors = command("compare", "nothing")
    assert code == 2
    assert "'nothing' is neither a preset, the file of a plan, a folder of runs nor key=value" in errors
    code, _, errors = command("compare", *words, "receiver=mac(C=1),none()", "partition=iid(),shards(2)", "--out", "d")
    assert (code, errors.count("\n")) == (2, 1)
    assert "partition is iid() and shards(" in errors
    assert not (tmp_path / "d").exists()
