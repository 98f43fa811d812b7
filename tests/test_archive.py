"""The published runs: each is the experiment of its curve, and every figure is drawn from them."""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import stableair as sa
from stableair import runner
from stableair.checks import InputError, Note
from stableair.cli import main as cli
from stableair.experiment import Experiment
from stableair.paper import archive, figures
from stableair.results.run import Run, load

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import publish  # noqa: E402
import reproduce  # noqa: E402

PUBLISHED = [name for name in figures.FIGURES if archive.is_published(figures.SAME_RUNS.get(name, name))]
ARCHIVES = [name for name in publish.NAMES if archive.is_published(name)]
UNPUBLISHED = [name for name in figures.FIGURES if name not in PUBLISHED]
SETTINGS = {"data": "cifar10", "norm_stats": "recalibrated", "rounds": 3}  # of Fig. 3(a), but for the receiver


def made(rounds=3, snr=-40.0, **settings):
    rows = [{"round": k, "test/accuracy": 0.1 * (k + 1), "test/loss": 2 / (k + 1)} for k in range(rounds)]
    return Run(Experiment(**SETTINGS | settings).to_record(), [row | {"channel/snr_db": snr} for row in rows])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Published files in a folder of their own, with two runs of Fig. 3(a)."""
    folder = tmp_path / "published"
    folder.mkdir()
    shutil.copy(archive.FOLDER / "differences.json", folder)
    monkeypatch.setattr(archive, "FOLDER", folder)
    noisy = made(2, receiver="none()")
    noisy.rounds.append(
        {"round": 2, "test/accuracy": None, "test/loss": None, "channel/snr_db": None, "diverged": True}
    )
    runs = {"mac": made(receiver="mac(C=0.7)"), "noisy": noisy}
    archive.write("fig3a", figures.published_curves("fig3a"), runs, {}, "made up")
    return folder


def changed(folder, change):
    """The published Fig. 3(a) with something in its description changed."""
    about = json.loads((folder / "fig3a.json").read_text())
    change(about)
    (folder / "fig3a.json").write_text(json.dumps(about))
    return archive.read("fig3a", figures.published_curves("fig3a"))


def test_something_is_published():
    assert {"fig3a", "fig3d"} <= set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_figure_is_drawn_from_its_files(name, tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(runner, "build", lambda *_: pytest.fail("computed"))
    monkeypatch.setenv("STABLEAIR_DATA", str(tmp_path / "no-data"))
    picture = sa.figure(name, tmp_path, published=True)
    assert not [note for note in recwarn if note.category is Note], "nothing is left out"
    assert all((tmp_path / f"{name}.{ending}").stat().st_size > 5000 for ending in ("png", "pdf"))
    found = figures.published_runs(name)
    (first, *_), metric = found.curves.values(), figures.FIGURES[name].metric
    mean = np.mean([run[metric] for run in first], axis=0)
    np.testing.assert_allclose(picture.axes[0].lines[0].get_ydata(), mean)
    assert found.data[:60] in picture.get_supxlabel().replace("\n", " "), "which data they are is said"


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_published_run_is_the_experiment_of_its_curve_but_for_what_is_listed(name):
    about = json.loads((archive.FOLDER / f"{name}.json").read_text())
    curves, listed = figures.published_curves(name), archive.reasons(name)
    assert all(len(reason) > 20 for reason in listed.values()), "each has a reason"
    for title, said in about["runs"].items():
        unlike = archive.differences(said["experiment"], curves[said["curve"]])
        assert unlike <= listed.keys(), f"{title}: {unlike - listed.keys()} differ; differences.json does not say why"
        assert said["environment"][0]["device"]
    assert archive.read(name, curves).left_out == []


@pytest.mark.parametrize("name", [name for name in ARCHIVES if name.startswith("fig3")])
def test_the_thresholds_are_those_that_were_searched(name):
    found = figures.published_runs(name)
    base = figures.plan(name, {}).base
    best = {}
    for one in found.searches.values():
        best |= archive.search_of(one, base).winner.values
    for method, key in (("MAC", "receiver.C"), ("GNC", "receiver.max_norm")):
        for run in found.curves.get(method, []):
            assert (
                run.experiment.receiver == base.with_(receiver=figures.SEARCHED[method][0], **{key: best[key]}).receiver
            )


@pytest.mark.parametrize("name", ARCHIVES)
def test_the_published_rounds_are_those_of_the_folders(name):
    found = figures.published_curves(name)
    about = json.loads((archive.FOLDER / f"{name}.json").read_text())["runs"]
    read = {id(run): run for runs in archive.read(name, found).curves.values() for run in runs}.values()
    for title, said in about.items():
        if (folder := reproduce.FOLDER / title).exists():
            (mine,) = (run for run in read if run.record == said["experiment"])
            original = load(folder)
            assert mine.record == original.record
            for metric in ("test/accuracy", "test/loss", "channel/snr_db"):
                np.testing.assert_allclose(
                    np.array(mine[metric], float), np.array(original[metric], float), rtol=1e-5, err_msg=title
                )


def test_they_are_small_and_part_of_the_package():
    files = [path for path in archive.FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["stableair"]
    package = archive.FOLDER.parents[1]
    assert set(files) <= {path for pattern in patterns for path in package.glob(pattern)}


def test_the_caption_names_versions_and_the_commits_that_are_known():
    made = {"device": "a GPU", "engine": "kernels", "precision": "bf16"}
    places = [{"stableair": "0.1.0"}, {"stableair": "0.2.0", "commit": "b"}, {"stableair": "0.2.0", "commit": "a"}]
    found = archive.Archive({}, {"x": [made | place for place in places]}, {}, "", [])
    assert archive.computed(found) == "computed by stableair 0.1.0 and stableair 0.2.0 (a, b) on a GPU, kernels, bf16"


def test_a_run_that_diverged_is_said_to_have(elsewhere):
    """A difference of points to a run that has no accuracy would mean nothing."""
    text = publish.section("fig3a", "images")
    assert "| MAC markedly improves the accuracy | Noisy diverged at round 3, seed 0 | holds in one seed |" in text
    assert "| Noisy | `none()` | 1 x 3 | diverged at round 3 | – | – | -40.0 |" in text
    assert "clients'" not in text, "columns that no run fills"
    words = figures.draw_published("fig3a").texts[-1].get_text().split()
    assert "×: the last round before a run diverged." in " ".join(words)


@pytest.mark.parametrize("page", publish.PAGES, ids=lambda page: page.name)
def test_the_tables_of_the_pages_are_those_of_the_published_files(page):
    assert publish.MARKED.search(page.read_text())
    assert publish.rewritten(page) == page.read_text(), "python bench/reproduce.py publish writes them anew"


def test_what_is_written_is_read_and_written_alike(elsewhere):
    found = archive.read("fig3a", figures.published_curves("fig3a"))
    assert (list(found.curves), found.data, found.left_out) == (["MAC", "Noisy"], "made up", [])
    (mac,), (noisy,) = found.curves.values()
    assert mac["test/accuracy"] == pytest.approx([0.1, 0.2, 0.3])
    assert (noisy.diverged, noisy["test/loss"]) == (2, [2, 1, None])
    before = (elsewhere / "fig3a.csv").read_bytes(), (elsewhere / "fig3a.json").read_bytes()
    archive.write("fig3a", figures.published_curves("fig3a"), {"mac": mac, "noisy": noisy}, {}, "made up")
    assert before == ((elsewhere / "fig3a.csv").read_bytes(), (elsewhere / "fig3a.json").read_bytes())


def test_the_curve_of_a_run_is_found_by_its_settings():
    curves = figures.published_curves("fig3a")

    def curve(**settings):
        return archive.curve_of("fig3a", Experiment(**SETTINGS | settings).to_record(), curves)

    assert curve(receiver="mac(C=0.7)", seed=5, device="cpu") == "MAC"
    assert curve(receiver="mac(C=auto)") == "MAC, C = auto", "the nearest of two that fit"
    assert curve(receiver="gnc(max_norm=3)", model="resnet18()") == "GNC", "its own model by its name"
    assert curve(receiver="none()", noise="none()", fading="unit()") == "Ideal"
    assert curve(receiver="none()", noise="none()") is None
    for other in ({"model": "resnet18(init=he)"}, {"payload": "delta"}, {"partition": "dirichlet(0.3)"}, {"lr": 0.1}):
        assert curve(receiver="mac(C=0.7)", **other) is None, other
    old = json.loads((ROOT / "tests/data/run-0.1/experiment.json").read_text())
    assert "norm_stats" not in old
    old |= {"data": "cifar10", "partition": "iid()", "receiver": "mac(C=1)", "clients": 50, "model": "auto"}
    assert "model.init" in archive.differences(old, curves["MAC"]), "read through the migration of old settings"


def test_what_does_not_match_its_experiment_is_named_and_left_out(elsewhere, recwarn):
    def other_partition(about):
        about["runs"]["mac"]["experiment"]["partition"] = "dirichlet(beta=0.3)"
        about["runs"]["mac"]["experiment"].pop("arguments")

    found = changed(elsewhere, other_partition)
    assert list(found.curves) == ["Noisy"]
    assert found.left_out == [
        "fig3a.csv: mac is not the experiment of MAC: it differs in partition, partition.beta"
    ]  # fmt: skip
    picture = figures.draw_published("fig3a")
    assert [text.get_text() for text in picture.axes[0].get_legend().get_texts()] == ["Noisy, diverged at round 3"]
    assert "mac is not the experiment" in str(recwarn.pop(Note).message)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda about: about["runs"]["mac"].update(curve="GNC"), "not the experiment of GNC: it differs in receiver"),
        (lambda about: about["runs"]["mac"].update(curve="MAK"), "did you mean 'MAC'"),
        (lambda about: about["runs"]["mac"]["experiment"].update(rounds=9), "mac has not all of its 9 rounds"),
        (lambda about: about["runs"]["mac"]["experiment"].pop("data"), "mac cannot be read: no data"),
        (lambda about: about["runs"].pop("mac"), "mac is not described in fig3a.json"),
    ],
)  # fmt: skip
def test_whatever_is_wrong_with_a_published_run_is_said(change, said, elsewhere):
    found = changed(elsewhere, change)
    assert list(found.curves) == ["Noisy"]
    assert said in found.left_out[0]


def test_files_that_do_not_belong_together_are_refused(elsewhere):
    table = elsewhere / "fig3a.csv"
    table.write_text(table.read_text().replace("0.2", "0.9"))
    with pytest.raises(InputError, match=r"fig3a\.csv is not the file that it describes"):
        sa.figure("fig3a", elsewhere / "out", published=True)
    (elsewhere / "fig3a.json").write_text("{")
    with pytest.raises(InputError, match=r"fig3a\.json: nothing is drawn from it: .*; install stableair again"):
        figures.published_runs("fig3a")
    assert not (elsewhere / "out").exists()


def test_runs_of_ones_own_are_laid_over_them(elsewhere, recwarn):
    own = [made(receiver="cauchy(K=1)"), made(receiver="gnc(max_norm=5)"), made(receiver="cauchy(K=1)", clients=7)]
    picture = figures.draw_published("fig3d", own)
    texts = [text.get_text() for text in picture.axes[0].get_legend().get_texts()]
    assert texts == ["MAC", "Noisy, diverged at round 3", "yours: cauchy(K=1)", "yours: gnc(max_norm=5)"]
    assert picture.axes[0].get_ylabel() == "test loss"
    assert "not the set-up of fig3d, it differs in clients" in str(recwarn.pop(Note).message)
    assert "another copy" not in picture.get_supxlabel()
    mine, left_out = figures.own_runs("fig3a", made(0))
    assert (mine, left_out) == ({}, ["None: no complete round"])
    assert figures.own_runs("fig3a", made(evaluate="validation"))[0] == {}, "judged on other data"
    noniid = {"partition": "dirichlet(beta=0.3)"}
    for noise, fits in (("sas(alpha=1.2)", True), ("sas(alpha=1.2, tau=0.3)", False)):
        assert bool(figures.own_runs("fig4a", made(noise=noise, **noniid))[0]) == fits, (
            "what the figure varies may vary"
        )


def test_runs_on_another_copy_of_the_data_are_said_to_be(elsewhere, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(reproduce.FOLDER / "cifar10-mac-seed0", folder)
    picture = figures.draw_published("fig3a", folder)  # what is published here has read none
    assert "yours read another copy of the data" in picture.get_supxlabel().replace("\n", " ")
    assert picture.axes[0].get_legend().get_texts()[-1].get_text() == "yours: mac(C=0.316)"


def test_on_the_command_line(elsewhere, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["stableair", "figure", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code, *capsys.readouterr())

    assert command("fig3a", "--published")[:2] == (0, "runs/published/fig3a.png\nruns/published/fig3a.pdf\n")
    sa.run(Experiment(clients=4, rounds=1), tmp_path / "mine")
    code, out, errors = command("fig3a", "--published", "--own", "mine", "--out", "over")
    assert (code, out) == (0, "over/fig3a.png\nover/fig3a.pdf\n")
    assert re.fullmatch(r"note: left out: mine: not the set-up of fig3a, it differs in clients, data.*\n", errors)
    for words, said in [
        (["fig4a", "--published"], "nothing is published of fig4a yet; there are runs of fig3a, fig3d"),
        (["fig3a", "--own", "mine"], "these are for published runs, with --published: leave out --own"),
        (["fig3a", "--metric", "test/loss"], "these are for published runs, with --published: leave out --metric"),
        (["fig3a", "--published", "--metric", "test/los"], "metric: 'test/los' is unknown; did you mean 'test/loss'"),
        (["fig3a", "--published", "--rounds", "3", "lr=1"], "drawn as they are: leave out settings, --rounds"),
        (["fig3a", "--published", "--own", "nowhere"], "nowhere: there is no such folder"),
        (["fig2", "--published"], "fig2 is drawn without runs: leave out --published"),
    ]:
        code, _, errors = command(*words)
        assert (code, errors.count("\n")) == (2, 1)
        assert said in errors


def test_from_python_what_has_no_use_is_refused(elsewhere, tmp_path):
    for options, said in [
        ({"published": True, "rounds": 3}, "published runs are drawn as they are: leave out rounds"),
        ({"published": True, "smoke": True}, "leave out smoke"),
        ({"own": "runs"}, "with published=True: leave out own"),
    ]:
        with pytest.raises(InputError, match=said):
            sa.figure("fig3a", tmp_path, **options)
    with pytest.raises(InputError, match="fig2 is drawn without runs: leave out published"):
        sa.figure("fig2", tmp_path, published=True)


@pytest.mark.parametrize("name", UNPUBLISHED)
def test_a_figure_of_which_nothing_is_published_says_so(name, tmp_path):
    with pytest.raises(InputError, match=f"nothing is published of {name} yet; there are runs of fig3a"):
        sa.figure(name, tmp_path, published=True)


def test_every_run_of_the_plan_belongs_to_a_curve(tmp_path):
    """Whatever bench/reproduce.py computes will be published: its list and the curves of the figures agree."""
    curves = {name: figures.published_curves(name) for name in publish.NAMES}
    missing = {name: set(labels) for name, labels in curves.items()}
    for job in reproduce.jobs(reproduce.FOLDER):
        if not job.method:
            record = job.experiment.to_record()
            homes = {name: archive.curve_of(name, record, curves[name]) for name in curves}
            assert any(homes.values()), job.name
            for name, label in homes.items():
                missing[name].discard(label)
    searched = {"MAC", "GNC"}  # listed once their thresholds are known
    assert {label for labels in missing.values() for label in labels} - searched == {
        "α = 1.2, C = auto", "α = 1.3, C = auto", "α = 1.4, C = auto",
    }  # fmt: skip
