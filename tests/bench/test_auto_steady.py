"""bench/auto_steady.py: its settings do not change, and finished runs are not repeated."""

import hashlib
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers import ROOT


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("auto_steady")


def test_the_settings_are_those_that_were_drawn(bench):
    ids = [each.id() for each in bench.settings().values()]
    rounds = [each.rounds for each in bench.settings().values()]
    assert len(set(zip(ids, rounds, strict=True))) == len(ids) == 90
    assert hashlib.sha256(repr((ids[:60], rounds[:60])).encode()).hexdigest()[:12] == "2ffa0cab4c79"
    assert hashlib.sha256(repr((ids[60:], rounds[60:])).encode()).hexdigest()[:12] == "045f69e238ff"


def test_the_first_two_groups_have_noiseless_settings(bench):
    noiseless = [bench.group(number) for number, each in bench.settings().items() if each.noise == "none()"]
    assert sorted(noiseless) == ["held-out"] * 3 + ["tuning"] * 3


def test_each_group_has_thirty_settings(bench):
    groups = [bench.group(number) for number in bench.settings()]
    assert {name: groups.count(name) for name in bench.GROUPS} == dict.fromkeys(bench.GROUPS, 30)


def test_finished_runs_are_not_repeated(bench, tmp_path):
    jobs, computed = [bench.Job("4", rule, "test", 0) for rule in bench.FIXED[:3]], []

    def score(job):
        computed.append(job)
        return 50.0 + len(computed)

    with ThreadPoolExecutor(1) as pool:
        bench.Results(tmp_path / "all.csv").compute(jobs[:2], score, pool)
        results = bench.Results(tmp_path / "all.csv")
        results.compute([*jobs, *jobs], score, pool)
    assert computed == jobs
    assert results.of(jobs) == [51, 52, 53]
    assert results.best([[job] for job in jobs]) == jobs[2].receiver


def test_a_changed_rule_runs_again_and_fixed_thresholds_do_not(bench, tmp_path, monkeypatch, capsys):
    computed = []
    monkeypatch.setattr(bench, "score", lambda job: computed.append(job.receiver) or float("auto" in job.receiver))
    monkeypatch.setattr(bench, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(sys, "argv", ["auto_steady.py", "--settings", "4", "--out", str(tmp_path / "all.csv")])
    for digest in ("one", "two", "two"):
        monkeypatch.setattr(bench, "rule_digest", lambda digest=digest: digest)
        bench.main()
    assert computed.count("mac(C=auto)") == 2 * 5
    assert len(computed) == 2 * 5 + 10 * 2 + 5 + 5
    assert "| tuning | 1 | +1.00 |" in capsys.readouterr().out
