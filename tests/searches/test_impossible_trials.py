import pytest

import stableair.runner
import stableair.searches.study
from stableair.errors import InputError, ResourceError
from stableair.searches import OneOf, Range, search
from stableair.searches.study import MAX_CHECKS, _extremes


def test_an_integer_argument_has_integer_trials(tiny, tmp_path):
    base = tiny.with_(clients=5, rounds=1, participation="sample(m=1)")
    result = search(base, {"participation.m": "1:5"}, tmp_path, trials=4)
    assert all(type(trial.values["participation.m"]) is int for trial in result.trials)


@pytest.mark.parametrize(
    "spaces",
    [
        {"participation.m": "1:9"},
        {"participation.m": "1:5", "clients": "3:5"},  # each end is possible, but not every combination
        {"participation.m": OneOf((1, 2, 9))},
    ],
)
def test_a_search_with_an_impossible_trial_is_refused_before_the_first_trial(tiny, tmp_path, monkeypatch, spaces):
    monkeypatch.setattr(stableair.runner, "build", lambda *_: pytest.fail("a trial ran"))
    base = tiny.with_(clients=5, participation="sample(m=1)")
    with pytest.raises(InputError) as error:
        search(base, spaces, tmp_path / "search", trials=2)
    assert error.value.code == "out-of-range"
    assert error.value.fields["name"] == "m"
    assert not (tmp_path / "search").exists()


def test_the_base_experiment_may_be_impossible(tiny, tmp_path):
    base = tiny.with_(clients=3, rounds=1, participation="sample(m=9)")
    result = search(base, {"participation.m": Range(1, 3)}, tmp_path, trials=2)
    assert len(result.trials) == 2


def test_every_end_is_checked_if_there_are_many_combinations():
    ends = [(1, 2), tuple(range(20)), ("a", "b", "c")]
    combinations = _extremes(ends)
    assert len(combinations) == 20 > MAX_CHECKS
    assert [set(values) for values in zip(*combinations, strict=True)] == [set(values) for values in ends]


def test_a_very_wide_range_of_learning_rates_can_be_searched(tiny, tmp_path):
    result = search(tiny.with_(rounds=1, payload="delta"), {"lr": "1e-38:1e38:log"}, tmp_path, trials=3)
    assert any(not trial.failed for trial in result.trials)
    assert all(1e-38 <= trial.values["lr"] <= 1e38 for trial in result.trials)


def test_a_search_of_quantiles_stays_in_its_range(tiny, tmp_path):
    base = tiny.with_(rounds=1, receiver="quantile_clip(q=0.9995)")
    result = search(base, {"receiver.q": "0.9991:0.9999"}, tmp_path, trials=4)
    values = [trial.values["receiver.q"] for trial in result.trials]
    assert all(0.9991 <= value <= 0.9999 for value in values)
    assert len(set(values)) == 4


def test_an_out_of_memory_model_is_refused_before_the_first_trial(tiny, tmp_path, monkeypatch):
    def build(experiment):
        raise MemoryError

    monkeypatch.setattr(stableair.searches.study, "build", build)
    with pytest.raises(ResourceError):
        search(tiny, {"receiver.C": "1:2"}, tmp_path / "search", trials=1)
    assert not (tmp_path / "search").exists()
