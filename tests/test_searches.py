import json

import pytest

import stableair as sa
import stableair.runner
import stableair.searches.study
from helpers.callbacks import Hooks
from stableair.data.datasets import dataset, synthetic
from stableair.errors import CorruptRunError, InputError, NonFiniteUpload
from stableair.searches import OneOf, Range, Result, Trial, draw, search, space


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.01:10:log", Range(0.01, 10, log=True)),
        ("1:9", Range(1, 9)),
        ("1:9:int", Range(1, 9, int=True)),
        ("1:64:log:int", Range(1, 64, log=True, int=True)),
        ("1e-3:1E2:log", Range(1e-3, 100, log=True)),
        ("0.5,0.9", OneOf((0.5, 0.9))),
        ("auto,1", OneOf(("auto", 1))),
        ("0.5", None),
        ("mac(C=1)", None),
        ("synthetic(samples=5, classes=2)", None),
    ],
)
def test_the_space_of_a_word(text, expected):
    assert space("receiver.C", text) == expected
    if expected:
        assert space("receiver.C", str(expected)) == expected, "the text of a range gives the same range"


def test_an_integer_setting_has_integer_trials(tiny, tmp_path):
    assert space("local_epochs", "1:9") == Range(1, 9, int=True)
    found = search(tiny.with_(rounds=1), {"local_epochs": space("local_epochs", "1:3")}, tmp_path, trials=2)
    assert all(type(t.values["local_epochs"]) is int for t in found.trials)


def test_a_text_setting_has_no_range():
    assert space("device", "cuda:0") is None
    assert space("blocks", "tensor,layer") == OneOf(("tensor", "layer"))


@pytest.mark.parametrize(
    "text", ["a:b", "1:2:lag", "2:1", "1:1", "0:1:log", "-1:1:log", "1:", ":2", "1:1e400", "0.5:3:int", "0:3:log:int"]
)
def test_invalid_ranges_are_refused(text):
    with pytest.raises(InputError) as error:
        space("receiver.C", text)
    assert error.value.code == "invalid-range"


def test_ranges_are_spaced_evenly():
    assert Range(0.01, 100, log=True).at(0.5) == pytest.approx(1)
    assert Range(0, 10).at(0.25) == 2.5
    assert Range(1, 9, int=True).at(0.3) == 3
    assert [OneOf("abc").at(share) for share in (0, 0.5, 0.99, 1)] == ["a", "b", "c", "c"]


def noisy(tiny, **settings):
    """An experiment in which small thresholds hardly change the model."""
    return tiny.with_(noise="sas(alpha=1.5, tau=0.1)", rounds=6, **settings)


def test_a_search_finds_a_threshold_that_learns_and_reports_every_trial(tiny, tmp_path):
    ended = []
    hooks = Hooks(end=lambda one, run: ended.append((one.receiver, len(run))))
    found = search(noisy(tiny), {"receiver.C": Range(1e-6, 10, log=True)}, tmp_path, trials=6, callbacks=[hooks])
    assert ended == [(f"mac(C={t.values['receiver.C']})", t.rounds) for t in found.trials]
    assert len(ended) == 6
    assert found.winner.values["receiver.C"] > 1e-3
    assert found.winner.score == max(t.score for t in found.trials if not t.stopped)
    assert found.best.receiver == f"mac(C={found.winner.values['receiver.C']:g})"
    assert found.best.evaluate == "test"
    recorded = json.loads((tmp_path / "search.json").read_text())
    assert [row["values"] for row in recorded["trials"]] == [t.values for t in found.trials]
    assert recorded["best"]["score"] == found.winner.score


def test_the_score_is_that_of_the_recorded_validation_runs_over_all_seeds(tiny, tmp_path):
    found = search(noisy(tiny), {"receiver.C": Range(0.1, 10, log=True)}, tmp_path, trials=2, seeds=2)
    for trial in found.trials:
        each = [noisy(tiny, evaluate="validation", seed=s).with_(**trial.values) for s in (0, 1)]
        scores = [sa.load(tmp_path / one.name).settled("validation/accuracy") for one in each]
        assert trial.score == pytest.approx(sum(scores) / 2)
        assert trial.rounds == 12


def test_a_search_does_not_use_the_test_split(tiny, tmp_path, registries):
    @dataset("no_test_split")
    def no_test_split():
        return synthetic(samples=60, classes=3, shape=(1, 2, 2))._replace(test=None)

    base = noisy(tiny, data="no_test_split")
    found = search(base, {"receiver.C": Range(0.1, 10)}, tmp_path, trials=2)
    with pytest.raises(sa.InputError) as error:
        sa.run(found.best)  # the test split is missing
    assert (error.value.code, error.value.setting) == ("invalid-data", "data")
    for folder in tmp_path.glob("no_test_split*"):
        assert not any(key.startswith("test/") for key in sa.load(folder).rounds[0])


def test_hopeless_trials_are_stopped_early(tiny, tmp_path, monkeypatch):
    tried = [(1.0,), (2.0,), (3.0,), (4.0,), (1e-9,), (1e-8,), (1e-7,)]
    monkeypatch.setattr(stableair.searches.study, "_spread", lambda *_: tried)
    base = noisy(tiny).with_(rounds=12)
    found = search(base, {"receiver.C": OneOf(tuple(c for (c,) in tried))}, tmp_path, trials=7)
    stopped = [t for t in found.trials if t.stopped]
    assert stopped
    assert all(t.values["receiver.C"] < 1e-3 for t in stopped)
    assert all(4 < t.rounds < 12 for t in stopped)
    run = sa.load(tmp_path / base.with_(evaluate="validation", **stopped[0].values).name)
    assert len(run) == stopped[0].rounds
    ended = []
    again = Hooks(start=lambda engine: pytest.fail("computed again"), end=lambda one, run: ended.append(len(run)))
    search(base, {"receiver.C": OneOf(tuple(c for (c,) in tried))}, tmp_path, trials=7, callbacks=[again])
    assert ended == [t.rounds for t in found.trials], "a stopped trial ends with its rounds so far"


def test_a_search_interrupted_at_any_round_finds_the_same(tiny, tmp_path):
    spaces = {"receiver.C": Range(1e-6, 10, log=True)}
    whole = search(noisy(tiny), spaces, tmp_path / "whole", trials=5)

    class Stop(Exception):
        pass

    def stop_after(remaining):
        def on_round(row):
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                raise Stop

        return Hooks(round=on_round)

    attempts = 0
    while True:
        attempts += 1
        try:
            again = search(noisy(tiny), spaces, tmp_path / "parts", trials=5, callbacks=[stop_after(7)])
            break
        except Stop:
            assert attempts < 20
    assert attempts > 2
    assert again.trials == whole.trials


def test_a_finished_search_is_not_computed_again(tiny, tmp_path, monkeypatch):
    spaces = {"receiver.C": Range(0.1, 10)}
    first = search(noisy(tiny), spaces, tmp_path, trials=3)
    monkeypatch.setattr(stableair.runner, "build", lambda *_: pytest.fail("computed again"))
    assert search(noisy(tiny), spaces, tmp_path, trials=3).trials == first.trials


def test_a_diverged_trial_has_the_score_0_and_the_search_continues(tiny, tmp_path):
    base = tiny.with_(receiver="none()", rounds=3)
    found = search(base, {"noise.tau": OneOf((0.01, 1e37))}, tmp_path, trials=2)
    scores = {t.values["noise.tau"]: t.score for t in found.trials}
    assert scores[1e37] == 0 < scores[0.01]


def test_a_diverged_seed_is_no_early_stop(tiny, tmp_path):
    base = tiny.with_(receiver="none()", rounds=3, noise="sas(alpha=0.5, tau=1e32)")
    found = search(base, {"noise.tau": OneOf((1e32, 1e33))}, tmp_path, trials=2, seeds=2)
    assert not any(t.stopped for t in found.trials)
    assert found.winner.score == 0


def test_a_trial_that_overflows_at_once_is_reported_and_the_search_continues(tiny, tmp_path):
    failed = []
    hooks = Hooks(end=lambda one, outcome: isinstance(outcome, NonFiniteUpload) and failed.append(one.lr))
    found = search(tiny, {"lr": OneOf((0.03, 1e38))}, tmp_path / "a", trials=2, callbacks=[hooks])
    assert found.winner.values == {"lr": 0.03}
    assert failed == [1e38]
    (text,) = [str(t) for t in found.trials if t.failed]
    assert "failed: round 0: client 0 uploaded a non-finite update" in text
    with pytest.raises(InputError) as error:
        search(tiny, {"lr": OneOf((1e37, 1e38))}, tmp_path / "b", trials=2)
    assert error.value.code == "every-trial-failed"


def test_an_error_in_a_trial_ends_the_search(tiny, tmp_path):
    """A locked or damaged folder, or an impossible value, must not decide the search."""
    with pytest.raises(InputError) as error:
        search(tiny, {"clients": OneOf((5, 6000))}, tmp_path / "a", trials=2)
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", "clients")
    search(tiny, {"receiver.C": OneOf((1.0, 2.0))}, tmp_path / "b", trials=2)
    (first, *_) = sorted((tmp_path / "b").glob("*/rounds.jsonl"))
    first.write_bytes(first.read_bytes().replace(b"0", b"1", 1))
    with pytest.raises(CorruptRunError) as error:
        search(tiny, {"receiver.C": OneOf((1.0, 2.0))}, tmp_path / "b", trials=2)
    assert error.value.code == "corrupt-run"


def test_ranges_can_be_written_as_on_the_command_line(tiny, tmp_path):
    found = search(tiny.with_(rounds=1), {"receiver.C": "0.1:10:log", "blocks": "tensor,model"}, tmp_path, trials=2)
    assert found.spaces == {"receiver.C": Range(0.1, 10, log=True), "blocks": OneOf(("tensor", "model"))}
    with pytest.raises(InputError) as error:
        search(tiny, {"receiver.C": "3"}, tmp_path / "b")
    assert (error.value.code, error.value.fields["name"]) == ("one-value", "receiver.C")


def test_choices_are_mixed_and_none_is_tried_twice(tiny, tmp_path):
    spaces = {"blocks": OneOf(("tensor", "layer", "model")), "batch_size": OneOf((2, 5, 10))}
    few = search(tiny.with_(rounds=1), spaces, tmp_path / "a", trials=3)
    assert all(len({t.values[key] for t in few.trials}) > 1 for key in spaces)
    many = search(tiny.with_(rounds=1), spaces, tmp_path / "b", trials=20)
    assert len(many.trials) == len({tuple(t.values.values()) for t in many.trials}) == 9


def test_a_best_value_at_the_boundary_of_its_range_is_reported():
    def found(value):
        return Result(None, {"C": Range(0.01, 1, log=True)}, [Trial({"C": value}, 0.5, 1)])

    assert [found(value).at_boundary for value in (0.01, 0.1, 1.0, 0.95)] == [["C"], [], ["C"], ["C"]]


def test_a_best_value_at_the_end_of_its_range_is_logged(tiny, tmp_path, caplog):
    search(noisy(tiny), {"receiver.C": OneOf((1.0, 2.0))}, tmp_path / "a", trials=1)
    assert not caplog.messages
    found = search(noisy(tiny), {"local_epochs": Range(1, 2, int=True)}, tmp_path / "b", trials=1)
    assert f"the best local_epochs is at an end of the range {found.spaces['local_epochs']}" in caplog.text


def test_a_search_has_a_default_folder_and_a_picture(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = tiny.with_(rounds=1)
    found = search(base, {"receiver.C": "1,2"}, trials=2)
    assert str(found.folder) == f"runs/search-{base.name}"
    found.plot("s.png")
    assert (tmp_path / "s.png").stat().st_size > 1000


def test_several_settings_are_searched_together(tiny, tmp_path):
    spaces = {
        "receiver.C": Range(0.1, 10, log=True),
        "local_epochs": Range(1, 3, int=True),
        "server": OneOf(("sgd()", "momentum()")),
    }
    found = search(noisy(tiny), spaces, tmp_path, trials=4)
    assert {type(t.values["local_epochs"]) for t in found.trials} == {int}
    assert len({t.values["server"] for t in found.trials}) == 2


def test_invalid_searches_are_refused(tiny, tmp_path):
    with pytest.raises(InputError) as error:
        search(tiny, {}, tmp_path)
    assert error.value.code == "nothing-to-search"
    with pytest.raises(InputError) as error:
        search(tiny, {"receiver.c": Range(1, 2)}, tmp_path)
    assert (error.value.code, error.value.fields["name"]) == ("unknown-argument", "c")
    for key in ("evaluate", "seed", "device", "rounds"):
        with pytest.raises(InputError) as error:
            search(tiny, {key: OneOf((1, 2))}, tmp_path)
        assert error.value.code == "not-searchable"
    with pytest.raises(InputError) as error:
        search(tiny, {"receiver.C": Range(-1, 2)}, tmp_path)
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", "C")
    assert not list(tmp_path.iterdir())
    search(tiny.with_(rounds=1), {"receiver.C": Range(1, 2)}, tmp_path, trials=1)
    with pytest.raises(InputError) as error:
        search(tiny.with_(rounds=1), {"receiver.C": Range(1, 3)}, tmp_path, trials=1)
    assert error.value.code == "another-search"


@pytest.mark.parametrize(("log", "tried"), [(False, [1, 2, 3]), (False, [2]), (True, [1, 3, 60])])
def test_the_axis_of_an_integer_has_integer_ticks(log, tried):
    space = Range(1, 64, log=log, int=True)
    (axes,) = draw(Result(sa.Experiment(), {"clients": space}, [Trial({"clients": n}, 0.5, 1) for n in tried])).axes
    low, high = axes.get_xlim()
    shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert shown
    assert all(tick == round(tick) for tick in shown)


def test_the_run_of_a_trial_is_never_changed(tiny, tmp_path):
    class Report:
        def report(self, score, step):
            pass

        def should_prune(self):
            return False

    reporter = stableair.searches.study._TrialReporter(Report(), 2, tmp_path, "refuse")
    reporter.start_seed(tiny)
    before = reporter.runs[-1]
    for k in (0, 1):
        reporter.report([{"round": k, "validation/accuracy": 0.5}])
    assert (len(before), len(reporter.runs[-1]), reporter.score) == (0, 2, 0.5)
