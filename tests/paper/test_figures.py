import json
import math
import sys

import numpy as np
import pytest

import stableair as sa
from helpers.callbacks import Hooks
from stableair import runner
from stableair.cli import main as cli
from stableair.data import hub
from stableair.errors import InputError
from stableair.experiment import IDEAL
from stableair.paper import figures
from stableair.paper.catalogue import DRAWINGS, FIGURES, SEARCHED
from stableair.paper.drawing import caption, draw, draw_without_runs
from stableair.paper.plans import plan

SMALL = {"model": "logistic()"}  # a small model; the slow tests use the networks of the figures


@pytest.fixture
def no_data(tmp_path, monkeypatch):
    monkeypatch.setenv(hub.VARIABLE, str(tmp_path / "no-data"))


def compute(name, folder, settings=SMALL, **options):
    """The plan, the runs and the notes of a very small figure: the arguments of `draw`."""
    planned = plan(name, settings | {"rounds": 1, "clients": 4}, smoke=True, **{"trials": 2} | options)
    return planned, *figures.compute(planned, folder)


def texts(picture):
    legend = picture.axes[0].get_legend() or picture.legends[0]  # outside of the axes if it would cover a line
    return [text.get_text() for text in legend.get_texts()]


def test_every_figure_of_the_paper_exists():
    assert set(FIGURES) | set(DRAWINGS) == {
        "fig2", "fig3a", "fig3b", "fig3c", "fig3d", "fig3e", "fig3f", "fig4a", "fig4b", "fig4c", "interval",
    }  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_the_set_up_is_that_of_the_paper(name):
    e = plan(name, {}).base
    assert (e.clients, e.lr, e.local_epochs, e.batch_size) == (50, 0.03, 5, 10)
    assert (e.noise, e.fading, e.payload) == ("sas(alpha=1.5, tau=0.1)", "rayleigh(mean=1)", "gradient")
    data, partition = {
        "3a": ("cifar10()", "iid()"), "3b": ("cifar100()", "iid()"), "3c": ("femnist()", "by_writer()"),
        "3d": ("cifar10()", "iid()"), "3e": ("cifar100()", "iid()"), "3f": ("femnist()", "by_writer()"),
    }.get(name[3:], ("cifar10()", "dirichlet(beta=0.3)"))  # fmt: skip
    assert (e.data, e.partition) == (data, partition)
    assert FIGURES[name].metric == ("test/loss" if name[3:] in ("3d", "3e", "3f") else "test/accuracy")


@pytest.mark.parametrize(
    "name", ["fig3a", "fig3f", *(pytest.param(f"fig3{panel}", marks=pytest.mark.slow) for panel in "bcde")]
)
def test_the_curves_are_the_four_methods_of_the_paper(name, tmp_path, no_data):
    planned, runs, _notes = compute(name, tmp_path)
    picture = draw(planned, runs)
    assert texts(picture) == ["Ideal", "MAC", "GNC", "Noisy"]
    assert picture.axes[0].get_title() == f"Fig. 3({name[-1]}): smoke test on digits, changed settings"
    settings = {label: one.settings for label, (one,) in runs.items()}
    assert {k: settings["Ideal"][k] for k in IDEAL} == IDEAL
    assert settings["Noisy"]["receiver"] == "none()"
    for method in ("MAC", "GNC"):
        spec = SEARCHED[method][0]
        best = [json.loads(p.read_text())["best"] for p in tmp_path.glob(f"search-*-{method.lower()}-*/search.json")]
        assert len(best) == 1
        assert settings[method]["receiver"] == str(
            planned.base.with_(receiver=spec).with_(**best[0]["values"]).receiver
        )
    others = {label: {k: v for k, v in s.items() if k not in IDEAL} for label, s in settings.items()}
    assert all(other == others["MAC"] for other in others.values()), "nothing else differs"
    assert {s["evaluate"] for s in settings.values()} == {"test"}


def test_accuracy_and_loss_figures_use_the_same_runs(tmp_path, no_data, monkeypatch):
    compute("fig3a", tmp_path)
    monkeypatch.setattr(runner, "build", lambda *_: pytest.fail("computed again"))
    planned, runs, _notes = compute("fig3d", tmp_path)
    picture = draw(planned, runs)
    assert (picture.axes[0].get_ylabel(), picture.axes[0].get_yscale()) == ("test loss", "log")
    assert picture.axes[0].lines[1].get_ydata().tolist() == runs["MAC"][0]["test/loss"]


VARIED = [("fig4a", "alpha", "noise"), ("fig4b", "tau", "noise"), ("fig4c", "C", "receiver")]


@pytest.mark.parametrize(("name", "key", "field"), VARIED)
def test_exactly_one_setting_is_varied(name, key, field, tmp_path, no_data):
    planned, runs, _notes = compute(name, tmp_path)
    values = [runs_from[0].settings[field] for runs_from in runs.values()]
    assert len(set(values)) == len(values) == len(planned.figure.values)
    assert all(f"{key}={v:g}" in text for v, text in zip(planned.figure.values, values, strict=True))
    rest = [{k: v for k, v in r[0].settings.items() if k != field} for r in runs.values()]
    assert all(other == rest[0] for other in rest), "all curves use the same C"
    labels = texts(draw(planned, runs))
    symbol = {"alpha": "α", "tau": "τ", "C": "C"}[key]
    assert all(text.startswith(f"{symbol} = {v:g}") for v, text in zip(planned.figure.values, labels, strict=True))
    assert len(list(tmp_path.glob("search-*"))) == (name != "fig4c")


def test_the_measured_snr_is_shown_with_that_of_the_paper(tmp_path, no_data):
    planned, runs, _notes = compute("fig4b", tmp_path, SMALL | {"clients": 3}, seeds=2)
    labels = texts(draw(planned, runs))
    found = [[one["channel/snr_db"][0] for one in each] for each in list(runs.values())[:2]]
    half, whole = map(np.mean, found)
    ratio = 10 * np.log10(np.mean(10 ** (np.array(found[1]) / 10)))
    assert labels[1] == f"τ = 0.1, SNR: mean {whole:.1f} dB, linear {ratio:.1f} dB (paper: up to -41 dB) (2 seeds)"
    assert half - whole == pytest.approx(20 * math.log10(2), abs=0.01)


def test_a_threshold_for_each_point_is_an_option(tmp_path, no_data):
    _, runs, _ = compute("fig4b", tmp_path, search_each=True)
    assert len(list(tmp_path.glob("search-*"))) == len(runs) == 4
    assert all(f"C = {each[0].experiment.receiver[6:-1]}" in label for label, each in runs.items())


def test_thresholds_of_the_user_are_used_and_reported(tmp_path, no_data):
    planned, runs, notes = compute("fig3a", tmp_path, thresholds={"MAC": 0.5, "GNC": 7.0})
    taken = [runs[method][0].settings["receiver"] for method in ("MAC", "GNC")]
    assert taken == ["mac(C=0.5)", "gnc(max_norm=7)"]
    assert not list(tmp_path.glob("search-*"))
    assert "C = 0.5 was set, not searched" in caption(planned, runs, notes)


def test_the_caption_names_the_data_and_differences_from_the_paper(tmp_path, no_data):
    planned, runs, notes = compute("fig3a", tmp_path)
    text = caption(planned, runs, notes)
    assert "Changed settings: model=logistic()" in text
    assert "Smoke test on digits: " in text
    assert "Not from the paper: 1 round; C = " in text
    assert "the best of 2 between 0.01 and 10 after 1 round on a validation split" in text
    full = caption(plan("fig3a", {}, seeds=3), runs, [])
    assert full.startswith("Data: cifar10, 1,437 training samples. 50 clients")
    assert "Changed settings" not in full
    assert "seeds 0 to 2 for the curves marked 3 seeds, seed 0 for the others" in full
    assert "100 rounds" in full


def test_bands_over_seeds_and_custom_settings(tmp_path, no_data):
    planned, runs, _notes = compute("fig3c", tmp_path, SMALL | {"clients": 3, "noise.tau": 0.7}, seeds=2)
    assert {one.settings["seed"] for one in runs["MAC"]} == {0, 1}
    assert {one.settings["noise"] for one in runs["MAC"]} == {"sas(alpha=1.5, tau=0.7)"}
    assert len(draw(planned, runs).axes[0].collections) == 4


def test_an_older_run_with_more_rounds_is_truncated(tmp_path, no_data):
    planned, _, _ = compute("fig4c", tmp_path)
    longer = planned.base.with_(receiver="mac(C=0.05)", rounds=3)
    sa.run(longer, tmp_path / longer.name, resume=True)
    _, runs, _ = compute("fig4c", tmp_path)
    assert {len(one) for each in runs.values() for one in each} == {1}


@pytest.mark.parametrize(
    ("name", "key"),
    [("fig4a", "noise.alpha"), ("fig3a", "receiver"), ("fig4c", "receiver.C"), ("fig3a", "evaluate")],
)
def test_settings_of_the_curves_cannot_be_changed(name, key):
    with pytest.raises(InputError) as error:
        plan(name, {key: 1})
    assert (error.value.code, error.value.fields) == ("figure-sets-this", {"figure": name, "name": key})


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("fig4c", {"thresholds": {"MAC": 1}}, "threshold-not-searched"),
        ("fig4a", {"thresholds": {"GNC": 1}}, "threshold-not-searched"),
        ("fig3a", {"search_each": True}, "search-each-unavailable"),
        ("fig4a", {"search_each": True, "thresholds": {"MAC": 1}}, "search-each-unavailable"),
    ],
)
def test_thresholds_that_a_figure_cannot_use_are_refused(name, options, code):
    with pytest.raises(InputError) as error:
        plan(name, **options)
    assert (error.value.code, error.value.fields["figure"]) == (code, name)


def test_an_unknown_figure_is_refused_with_a_suggestion():
    with pytest.raises(InputError) as error:
        plan("fig3g")
    assert (error.value.code, error.value.fields["name"]) == ("unknown-value", "figure")


def test_the_drawings_show_the_steps_of_mac():
    steps = draw_without_runs("fig2")
    assert [axes.get_title()[:2] for axes in steps.axes] == ["1.", "2.", "3."]
    centred, clipped, recovered = (axes.collections[1].get_offsets()[:, 1] for axes in steps.axes)
    assert np.abs(centred).max() > 5, "the drawing shows an impulse"
    np.testing.assert_allclose(clipped, np.clip(centred, -1, 1))
    shift = recovered - clipped
    np.testing.assert_allclose(shift, shift[0], atol=1e-7)
    assert shift[0] != 0, "the median is added back"
    assert draw_without_runs("interval").axes[0].get_xlabel()


def test_the_command_draws_png_and_pdf(tmp_path, monkeypatch, capsys, no_data):
    monkeypatch.chdir(tmp_path)
    words = "stableair figure fig3a --smoke --rounds 1 --out f model=logistic()"
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", words.split())
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert out.splitlines()[-3:] == ["f/fig3a.png", "f/fig3a.pdf", "f/fig3a.txt"]
        assert all((tmp_path / "f" / f"fig3a.{ending}").stat().st_size > 5000 for ending in ("png", "pdf"))
        monkeypatch.setattr(runner, "build", lambda *_: pytest.fail("computed again"))


def test_a_figure_from_python_equals_the_figure_of_the_command(tmp_path, monkeypatch, no_data):
    monkeypatch.chdir(tmp_path)
    picture = sa.figure("fig3c", smoke=True, rounds=1, settings=SMALL, thresholds={"MAC": 0.5, "GNC": 7})
    assert texts(picture) == ["Ideal", "MAC", "GNC", "Noisy"]
    assert all((tmp_path / "runs/smoke" / f"fig3c.{ending}").stat().st_size > 5000 for ending in ("png", "pdf"))
    ids = {path.parent.name for path in (tmp_path / "runs/smoke").rglob("rounds.jsonl")}
    assert len(ids) == 4
    words = "stableair figure fig3c --smoke --rounds 1 --C 0.5 --max-norm 7 model=logistic()"
    monkeypatch.setattr(sys, "argv", words.split())
    monkeypatch.setattr(runner, "build", lambda *_: pytest.fail("computed again"))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0


def test_a_figure_from_python_accepts_the_options_of_the_command(tmp_path, no_data):
    picture = sa.figure(
        "fig4b", tmp_path, smoke=True, rounds=3, seeds=2, settings=SMALL | {"noise.alpha": 2}, search_each=True,
        trials=1, search_rounds=2,
    )  # fmt: skip
    searches = list(tmp_path.glob("search-*"))
    assert len(searches) == 4
    assert all(folder.name.endswith("-1x2") for folder in searches)
    assert all(", C = " in text and text.endswith("(2 seeds)") for text in texts(picture))
    assert sa.figure("interval", tmp_path).axes[0].get_xlabel()
    assert (tmp_path / "interval.pdf").stat().st_size > 5000


def test_callbacks_observe_each_trial_and_each_run(tmp_path, no_data):
    ended = []
    observer = Hooks(
        end=lambda experiment, run: ended.append((experiment.evaluate, experiment.call("noise").arguments))
    )
    sa.figure("fig4a", tmp_path, smoke=True, rounds=1, settings=SMALL, trials=2, callbacks=[observer])
    assert [split for split, _ in ended] == ["validation"] * 2 + ["test"] * 5
    assert [noise["alpha"] for _, noise in ended[2:]] == list(FIGURES["fig4a"].values)
    assert all(path.exists() for path in figures.output_files("fig4a", tmp_path))


@pytest.mark.parametrize(
    ("name", "options", "unused"),
    [
        ("fig2", {"rounds": 3, "thresholds": {"MAC": 1}}, ["rounds", "thresholds"]),
        ("fig2", {"seeds": 2}, ["seeds"]),
        ("fig2", {"published": True}, ["published"]),
        ("fig3a", {"overlay": "runs"}, ["overlay"]),
        ("fig3a", {"metric": "test/loss"}, ["metric"]),
        ("fig3a", {"published": True, "rounds": 3, "settings": {"lr": 1}}, ["rounds", "settings", "smoke"]),
    ],
)
def test_options_without_effect_are_refused(name, options, unused, tmp_path):
    with pytest.raises(InputError) as error:
        sa.figure(name, tmp_path, smoke=True, **options)
    assert (error.value.code, error.value.fields["options"]) == ("unused-options", unused)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("fig3a", {"thresholds": {"mac": 1}}, "'mac'"),
        ("fig3a", {"thresholds": {"GNC": -1}}, "max_norm"),
        ("fig3a", {"seeds": 0}, "seeds"),
        ("fig3a", {"trials": 0}, "trials"),
        ("fig3a", {"rounds": 0}, "rounds"),
        ("fig3a", {"search_rounds": 0}, "search_rounds"),
        ("fig3a", {"search_each": True}, "search_each"),
        ("fig3a", {"settings": {"device": "cuda:99"}}, "cuda:99"),
        ("fig3", {}, "'fig3'"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_computed(
    name, options, expected, tmp_path, monkeypatch, no_data
):
    monkeypatch.setattr(runner, "build", lambda *_: pytest.fail("a run was computed"))
    with pytest.raises(InputError) as error:
        sa.figure(name, tmp_path, smoke=True, **options)
    assert expected in str(error.value)
    assert "--" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig3a", "fig4b"])
def test_a_smoke_test_shows_the_order_of_the_paper(name, tmp_path, no_data):
    runs, _ = figures.compute(plan(name, smoke=True), tmp_path)
    accuracy = {label: each[0].settled("test/accuracy") for label, each in runs.items()}
    if name == "fig3a":
        assert accuracy["Ideal"] > accuracy["MAC"] > max(accuracy["GNC"], accuracy["Noisy"])
    else:
        assert accuracy["τ = 0.05"] > accuracy["τ = 0.3"]
    assert all(0.8 < each < 1 for each in accuracy.values())
