"""Receivers over channels on paired seeds."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import stableair as sa
from stableair.checks import Note
from stableair.comparisons import comparison
from stableair.results import report
from stableair.results.run import Run, find

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
    """The rules on n seeds: the second is two points below the first, give or take, the third the same as the first."""
    chance = np.random.default_rng(0)
    level, behind = 0.7 + 0.1 * chance.standard_normal(n), 0.02 + 0.002 * chance.standard_normal(n)
    each = {RULES[0]: level, RULES[1]: level - behind, RULES[2]: level}
    runs = [made(a, receiver=rule, noise=noise, seed=i, **more) for rule, of in each.items() for i, a in enumerate(of)]
    return runs, behind


def test_the_table_pairs_seed_by_seed():
    """Between the seeds there are ten points, between the rules two: only the paired difference can tell."""
    runs, behind = many(5)
    found = comparison(runs)
    (channel,) = found.lines
    pair = found.pair(channel, "mac(C=1)", "clip(C=1)")
    low, high = stats.t.interval(0.95, 4, behind.mean(), behind.std(ddof=1) / 5**0.5)
    assert (pair.better, pair.worse, pair.seeds) == ("mac(C=1)", "clip(C=1)", 5)
    assert pair.interval == pytest.approx((low, high))
    accuracies = [[run["test/accuracy"][0] for run in runs if run.settings["receiver"] == rule] for rule in RULES[:2]]
    assert pair.p == pytest.approx(3 * stats.ttest_rel(*accuracies).pvalue), "the smallest of three"
    assert found.pair(channel, "mac(C=1)", "none()").p == 1, "seeds that do not differ at all"
    text = str(found)
    line = next(line for line in text.splitlines() if line.startswith("clip"))
    own = 100 * np.mean(accuracies[1]), 100 * np.std(accuracies[1], ddof=1)
    interval = 100 * behind.mean(), 100 * low, 100 * high
    shown = "clip(C=1) {:.2f} ± {:.2f} {:.2f} {:.2f} to {:.2f} {:.2g} * 5 2.0".format(*own, *interval, pair.p)
    assert line.split() == shown.split()
    assert "-0.00" not in text, "the third does as the first"
    assert "by Holm over the 3 pairs of a channel" in text
    assert "no mark" not in text
    assert "channel uses" not in text, "where nobody counted them"


def test_fewer_than_five_seeds_get_no_marks_and_a_line_that_says_why():
    found = comparison(many(4)[0])
    assert all(pair.p is None and not pair.mark for pairs in found.pairs.values() for pair in pairs)
    assert "*" not in str(found)
    assert "fewer than 5 seeds get no mark" in str(found)
    assert all(pair.interval for pairs in found.pairs.values() for pair in pairs), "the intervals are there"


def test_holm_is_over_the_pairs_of_a_channel():
    one, two = many(6)[0], many(6, noise="gaussian(std=1)")[0]
    alone, both = comparison(one), comparison([*one, *two])
    assert list(both.lines) == list(both.pairs) == ["gaussian(std=1)", "none()"]
    assert both.pairs["none()"] == alone.pairs["none()"], "another channel changes nothing"
    more = [
        made(run["test/accuracy"][0], receiver="sign(step=1)", noise="none()", seed=i) for i, run in enumerate(one[:6])
    ]
    assert comparison([*one, *more]).pair("none()", *RULES[:2]).p > alone.pair("none()", *RULES[:2]).p, "more pairs"


def test_holm_against_its_definition():
    """Sorted p times 3, 2, 1, never falling; a pair with too few seeds has no part in it."""

    def pair(p, seeds=5):
        return report.Paired("a", "b", seeds, float(stats.t.isf(p / 2, seeds - 1)), 1.0, (0.0, 0.0))

    assert report._holm([pair(0.04), pair(0.01), pair(0.03)]) == pytest.approx([0.06, 0.03, 0.06])
    assert report._holm([pair(0.01), pair(0.02, seeds=4), pair(0.5)]) == [
        pytest.approx(0.02), None, pytest.approx(0.5),
    ]  # fmt: skip
    assert report._holm([pair(0.9), pair(0.8)]) == pytest.approx([1.0, 1.0])


def test_holm_marks_seldom_where_there_is_nothing_to_mark():
    """Under no difference at all some pair of a channel is marked in at most 5 % of comparisons, within 3 errors."""
    chance, marked, repeats = np.random.default_rng(1), 0, 200
    for _ in range(repeats):
        draws = chance.standard_normal((4, 5))
        pairs = [
            report.Paired("a", "b", 5, abs(d.mean()), float(d.std(ddof=1) / 5**0.5), None)
            for i in range(4) for d in [draws[i] - draws[j] for j in range(i)]
        ]  # fmt: skip
        marked += any(p < 0.05 for p in report._holm(pairs))
    assert marked / repeats < 0.05 + 3 * (0.05 * 0.95 / repeats) ** 0.5


def test_uses_seconds_and_divergence():
    runs = [made(0.5, uses=100, receiver="mac(C=1)", seed=i) for i in range(2)]
    ended = [made(0.9, uses=50, receiver="none()", seed=i) for i in range(2)]
    for run in ended:
        run.rounds.append(dict.fromkeys(run.rounds[0]) | {"round": 1, "seconds": 0.0, "diverged": True})
    (lines,) = comparison([*runs, *ended]).lines.values()
    assert [(line.uses, line.seconds, line.accuracy, line.diverged) for line in lines] == [
        (100, 2, 0.5, 0),
        (50, 2, 0, 2),
    ]
    text = str(comparison([*runs, *ended]))
    assert "0.00 ± 0.00, 2 diverged" in text
    assert "a run that diverged counts as 0" in text


def test_compare_computes_reports_and_is_not_computed_again(tmp_path, monkeypatch):
    plan = TINY | {"receiver": ["mac(C=1)", "none()"], "rounds": 1}
    found = sa.compare(plan, tmp_path / "c")
    assert list(found.lines) == ["sas(alpha=1.5, tau=0.1)"]
    assert all(len(line.runs) == 5 for lines in found.lines.values() for line in lines), "five seeds"
    assert all(line.uses for lines in found.lines.values() for line in lines)
    monkeypatch.setattr("stableair.runner.build", lambda *_: pytest.fail("computed again"))
    assert str(sa.compare(plan, tmp_path / "c")) == str(found) == str(comparison(tmp_path / "c"))
    page = report.page(find([tmp_path / "c"])[0])
    for pair in (pair for pairs in found.pairs.values() for pair in pairs):
        assert f"<td class=n>{pair.p:.2g} {pair.mark}</td>" in page


def test_seeds_of_ones_own(tmp_path):
    two = sa.compare(TINY | {"receiver": ["mac(C=1)", "none()"], "seed": [3, 8]}, tmp_path)
    assert [[run.settings["seed"] for run in line.runs] for line in two.lines.popitem()[1]] == [[3, 8], [3, 8]]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"receiver": ["mac(C=1)", "none()"], "clients": [5, 6]}, "do not pair: clients is 5 and 6"),
        ({"receiver": "mac(C=1)", "noise.tau": [0.1, 0.2]}, "there is mac(C=1) alone; give two receivers"),
        ({"runs": [{"receiver": "mac(C=1)", "seed": 0}, {"receiver": "none()", "seed": 7}]}, "no two receivers share"),
        ({"receiver": ["mac(C=1)", "none()"], "noise": "nois()"}, "unknown"),
    ],
)
def test_what_does_not_pair_is_one_line_and_nothing_is_computed(plan, said, tmp_path):
    with pytest.raises(sa.InputError) as error:
        sa.compare(TINY | plan, tmp_path / "c")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_runs_that_have_not_come_as_far_are_left_out():
    runs, _ = many(6)
    behind = [replace(run, rounds=[row | {"round": k} for k in range(2) for row in run.rounds]) for run in runs]
    behind[0] = runs[0]  # mac(C=1), seed 0
    with pytest.warns(Note, match="1 run left out: 1 round, where others have 2"):
        found = comparison(behind)
    (lines,) = found.lines.values()
    assert {line.receiver: len(line.runs) for line in lines} == {"mac(C=1)": 5, "clip(C=1)": 6, "none()": 6}
    with pytest.warns(Note, match="12 runs left out"), pytest.raises(sa.InputError, match=r"there is mac\(C=1\) alone"):
        comparison(behind[1:6] + runs[6:])


def test_runs_that_do_not_pair_or_are_not_there():
    with pytest.raises(sa.InputError, match="do not pair: model is auto and mlp"):
        comparison([made(0.5), made(0.6, receiver="none()", model="mlp(3)")])
    with pytest.raises(sa.InputError, match="no two receivers share a seed"):
        comparison([made(0.5), made(0.6, receiver="none()", seed=1)])
    with pytest.raises(sa.InputError, match="nothing to compare"):
        comparison([Run(sa.Experiment().to_record(), [])])


def test_the_command_computes_and_reads(command, tmp_path):
    words = [f"{key}={value}" for key, value in TINY.items()]
    code, out, errors = command("compare", *words, "receiver=mac(C=1),none()", "--seeds", 2, "--out", "c")
    assert (code, errors) == (0, "")
    head, table = out.split("sas(alpha=1.5, tau=0.1)\n")
    assert len(head.splitlines()) == 4
    assert command("compare", "c") == (0, f"sas(alpha=1.5, tau=0.1)\n{table}", "")
    code, again, errors = command("compare", "c", "nothing")
    assert (code, again, errors) == (0, out[len(head) :], "left out: nothing: there is no such folder\n")
    code, _, errors = command("compare", "nothing")
    assert code == 2
    assert "'nothing' is neither a preset, a plan's file, a folder of runs nor key=value" in errors
    code, _, errors = command("compare", *words, "receiver=mac(C=1),none()", "partition=iid(),shards(2)", "--out", "d")
    assert (code, errors.count("\n")) == (2, 1)
    assert "partition is iid() and shards(" in errors
    assert not (tmp_path / "d").exists()
