"""The published runs: each is the experiment of its curve, and every figure is drawn from them."""

import json
import re
import shutil
import sys
import tomllib

import numpy as np
import pytest

import stableair as sa
from helpers import ROOT
from stableair import runner
from stableair.cli import main as cli
from stableair.errors import CorruptRunError, InputError
from stableair.experiment import Experiment, from_words
from stableair.paper import published_runs
from stableair.paper.catalogue import FIGURES, SAME_RUNS, SEARCHED, published_curves
from stableair.paper.drawing import caption
from stableair.paper.figures import draw_published, fitting_command, overlay_runs, published_content, read_published
from stableair.results.reading import read_run
from stableair.results.run import Run

sys.path.insert(0, str(ROOT / "bench"))
import publish
import reproduce

PUBLISHED = [name for name in FIGURES if published_runs.is_published(SAME_RUNS.get(name, name))]
ENDINGS = "png", "pdf", "txt"
ARCHIVES = [name for name in publish.NAMES if published_runs.is_published(name)]
UNPUBLISHED = [name for name in FIGURES if name not in PUBLISHED]
SETTINGS = {"data": "cifar10", "norm_stats": "recalibrated", "rounds": 3}  # of Fig. 3(a), except the receiver


def recorded_run(rounds=3, snr=-40.0, **settings):
    rows = [{"round": k, "test/accuracy": 0.1 * (k + 1), "test/loss": 2 / (k + 1)} for k in range(rounds)]
    return Run(Experiment(**SETTINGS | settings).to_record(), [row | {"channel/snr_db": snr} for row in rows])


@pytest.fixture
def published_folder(tmp_path, monkeypatch):
    """A temporary folder of published files, with two runs of Fig. 3(a)."""
    folder = tmp_path / "published"
    folder.mkdir()
    shutil.copy(published_runs.FOLDER / "differences.json", folder)
    monkeypatch.setattr(published_runs, "FOLDER", folder)
    noisy = recorded_run(2, receiver="none()")
    noisy.rounds.append(
        {"round": 2, "test/accuracy": None, "test/loss": None, "channel/snr_db": None, "diverged": True}
    )
    runs = {"mac": recorded_run(receiver="mac(C=0.7)"), "noisy": noisy}
    published_runs.write("fig3a", published_curves("fig3a"), runs, {}, "made up")
    return folder


def changed(folder, change):
    """Change the description of the published Fig. 3(a), and read it again."""
    about = json.loads((folder / "fig3a.json").read_text())
    change(about)
    (folder / "fig3a.json").write_text(json.dumps(about))
    return published_runs.read("fig3a", published_curves("fig3a"))


def test_published_runs_exist():
    assert {"fig3a", "fig3d"} <= set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_figure_is_drawn_from_its_files(name, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(runner, "build", lambda *_: pytest.fail("computed"))
    monkeypatch.setenv("STABLEAIR_DATA", str(tmp_path / "no-data"))
    picture = sa.figure(name, tmp_path, published=True)
    assert "left out" not in caplog.text
    assert all((tmp_path / f"{name}.{ending}").stat().st_size > 5000 for ending in ("png", "pdf"))
    found = read_published(name)
    (first, *_), metric = found.curves.values(), FIGURES[name].metric
    mean = np.mean([run[metric] for run in first], axis=0)
    np.testing.assert_allclose(picture.axes[0].lines[0].get_ydata(), mean)
    assert found.data in (tmp_path / f"{name}.txt").read_text(), "the caption describes the data"
    assert not picture.get_supxlabel(), "the caption is in a separate file"


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_published_run_is_the_experiment_of_its_curve_except_for_listed_differences(name):
    about = json.loads((published_runs.FOLDER / f"{name}.json").read_text())
    curves, listed = publish.published_curves(name), published_runs.allowed_differences(name)
    assert all(len(reason) > 20 for reason in listed.values()), "each has a reason"
    for title, described in about["runs"].items():
        different = published_runs.differences(described["experiment"], curves[described["curve"]])
        assert different <= listed.keys(), f"{title}: {different - listed.keys()} without a reason in differences.json"
        assert described["environment"][0]["device"]
    assert published_runs.read(name, curves).left_out == []


@pytest.mark.parametrize("name", [name for name in ARCHIVES if name.startswith("fig3")])
def test_the_published_thresholds_are_the_results_of_the_searches(name):
    found = read_published(name)
    base = FIGURES[name].setup
    best = {}
    for one in found.searches.values():
        best |= published_runs.search_result(one, base).winner.values
    for method, key in (("MAC", "receiver.C"), ("GNC", "receiver.max_norm")):
        for run in found.curves.get(method, []):
            assert run.experiment.receiver == base.with_(receiver=SEARCHED[method][0], **{key: best[key]}).receiver


@pytest.mark.parametrize("name", ARCHIVES)
def test_the_published_rounds_are_those_of_the_folders(name):
    found = publish.published_curves(name)
    about = json.loads((published_runs.FOLDER / f"{name}.json").read_text())["runs"]
    read = {id(run): run for runs in published_runs.read(name, found).curves.values() for run in runs}.values()
    for title, described in about.items():
        if (folder := reproduce.FOLDER / title).exists():
            (published,) = (run for run in read if run.record == described["experiment"])
            original = read_run(folder)
            assert published.record == original.record
            for metric in ("test/accuracy", "test/loss", "channel/snr_db"):
                np.testing.assert_allclose(
                    np.array(published[metric], float), np.array(original[metric], float), rtol=1e-5, err_msg=title
                )


def test_the_published_files_are_small_and_in_the_package():
    files = [path for path in published_runs.FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["stableair"]
    package = published_runs.FOLDER.parents[1]
    assert set(files) <= {path for pattern in patterns for path in package.glob(pattern)}


def test_the_caption_names_versions_and_the_commits_that_are_known():
    device = {"device": "a GPU", "engine": "kernels", "precision": "bf16"}
    versions = [{"stableair": "0.1.0"}, {"stableair": "0.2.0", "commit": "b"}, {"stableair": "0.2.0", "commit": "a"}]
    published = published_runs.PublishedRuns({}, {"x": [device | version for version in versions]}, {}, "", [])
    text = "computed by stableair 0.1.0 and stableair 0.2.0 (a, b) on a GPU, kernels, bf16"
    assert published_runs.provenance(published) == text


@pytest.mark.parametrize("missing", [[], ["GNC"], ["MAC", "Noisy"]], ids=str)
def test_the_caption_names_the_curves_without_runs(missing, monkeypatch):
    published = published_content("fig3a").runs
    runs = {label: each for label, each in published.items() if label not in missing}
    read = published_runs.read
    monkeypatch.setattr(published_runs, "read", lambda *words: read(*words)._replace(curves=runs))
    text = caption(*published_content("fig3a"))
    assert (f"Without runs: {', '.join(missing)}." in text) == bool(missing)
    assert ("Without runs" in text) == bool(missing)


def test_a_diverged_run_is_marked_as_diverged(published_folder):
    """The difference to a run without an accuracy would have no meaning."""
    text = publish.section("fig3a", "images")
    assert "| MAC markedly improves the accuracy | Noisy diverged at round 3 with seed 0 | holds, seed 0 |" in text
    assert "| Noisy | `none()` | 0 | 3 | diverged at round 3 | – | – | -40.0 |" in text
    assert "clients'" not in text, "columns that no run fills"
    assert "×: the last round before a run diverged." in caption(*published_content("fig3a"))


@pytest.mark.parametrize("page", publish.PAGES, ids=lambda page: page.name)
def test_the_tables_of_the_pages_are_those_of_the_published_files(page):
    assert publish.MARKED.search(page.read_text())
    assert publish.rewritten(page) == page.read_text(), "update them with: python bench/reproduce.py publish"


def test_written_published_runs_are_read_and_written_again_unchanged(published_folder):
    found = published_runs.read("fig3a", published_curves("fig3a"))
    assert (list(found.curves), found.data, found.left_out) == (["MAC", "Noisy"], "made up", [])
    (mac,), (noisy,) = found.curves.values()
    assert mac["test/accuracy"] == pytest.approx([0.1, 0.2, 0.3])
    assert (noisy.diverged, noisy["test/loss"]) == (2, [2, 1, None])
    before = (published_folder / "fig3a.csv").read_bytes(), (published_folder / "fig3a.json").read_bytes()
    published_runs.write("fig3a", published_curves("fig3a"), {"mac": mac, "noisy": noisy}, {}, "made up")
    assert before == ((published_folder / "fig3a.csv").read_bytes(), (published_folder / "fig3a.json").read_bytes())


@pytest.mark.parametrize(("title", "recorded"), [("cifar10-mac-seed0", ""), ("femnist-auto-seed0", "1c92cc3+")])
def test_a_supplied_commit_replaces_the_recorded_one(published_folder, title, recorded):
    run = read_run(reproduce.FOLDER / title)  # cifar10-mac-seed0 was recorded by 0.1.0, without a commit
    for commits, expected in ((None, recorded), ({"mac": "abc", "other": "def"}, "abc")):
        published_runs.write("fig3a", published_curves("fig3a"), {"mac": run}, {}, "made up", commits)
        environments = published_runs.read("fig3a", published_curves("fig3a")).environments["mac"]
        assert [one["commit"] for one in environments] == [expected] * len(run.environments) != []


def test_the_curve_of_a_run_is_found_by_its_settings():
    curves = published_curves("fig3a")

    def curve(**settings):
        return published_runs.curve_name("fig3a", Experiment(**SETTINGS | settings).to_record(), curves)

    assert curve(receiver="mac(C=0.7)", seed=5, device="cpu") == "MAC"
    assert curve(receiver="mac(C=auto)") == "MAC, C = auto", "the most similar of two curves that fit"
    assert curve(receiver="gnc(max_norm=3)", model="resnet18()") == "GNC", "the default model by its name"
    assert curve(receiver="none()", noise="none()", fading="unit()") == "Ideal"
    assert curve(receiver="none()", noise="none()") is None
    for other in ({"model": "resnet18(init=he)"}, {"payload": "delta"}, {"partition": "dirichlet(0.3)"}, {"lr": 0.1}):
        assert curve(receiver="mac(C=0.7)", **other) is None, other


def test_the_runs_recorded_by_version_0_1_are_read_and_drawn():
    """Their records have the setting noise_on, and no arguments of the components."""
    about = json.loads((published_runs.FOLDER / "fig3a.json").read_text())["runs"].values()
    old = [one for one in about if one["environment"][0]["stableair"] == "0.1.0"]
    assert {one["curve"] for one in old} == {"Ideal", "MAC"}
    curves = read_published("fig3a").curves
    lines = draw_published("fig3a").axes[0].lines
    for one in old:
        assert "noise_on" in one["experiment"]
        assert "arguments" not in one["experiment"]
        (run,) = (run for run in curves[one["curve"]] if run.record == one["experiment"])
        assert run.experiment.channel == "flat()"
        assert len(run) == run.settings["rounds"] == 60
        label = list(curves).index(one["curve"])
        mean = np.mean([each["test/accuracy"] for each in curves[one["curve"]]], axis=0)
        np.testing.assert_allclose(lines[label].get_ydata(), mean)


def test_runs_that_do_not_match_their_experiment_are_named_and_left_out(published_folder, caplog):
    def other_partition(about):
        about["runs"]["mac"]["experiment"]["partition"] = "dirichlet(beta=0.3)"
        about["runs"]["mac"]["experiment"].pop("arguments")

    found = changed(published_folder, other_partition)
    assert list(found.curves) == ["Noisy"]
    assert found.left_out == [
        "fig3a.csv: mac is not the experiment of MAC: it differs in partition, partition.beta"
    ]  # fmt: skip
    picture = draw_published("fig3a")
    assert [text.get_text() for text in picture.axes[0].get_legend().get_texts()] == ["Noisy, diverged at round 3"]
    assert "mac is not the experiment" in caplog.text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda about: about["runs"]["mac"].update(curve="GNC"), "not the experiment of GNC: it differs in receiver"),
        (lambda about: about["runs"]["mac"].update(curve="MAK"), "did you mean 'MAC'"),
        (lambda about: about["runs"]["mac"]["experiment"].update(rounds=9), "mac does not have all of its 9 rounds"),
        (lambda about: about["runs"]["mac"]["experiment"].pop("data"), "mac cannot be read: "),
        (lambda about: about["runs"].pop("mac"), "mac is not described in fig3a.json"),
    ],
)  # fmt: skip
def test_the_problem_with_a_published_run_is_reported(change, problem, published_folder):
    found = changed(published_folder, change)
    assert list(found.curves) == ["Noisy"]
    assert problem in found.left_out[0]


def damage_table(folder):
    table = folder / "fig3a.csv"
    table.write_text(table.read_text().replace("0.2", "0.9"))


@pytest.mark.parametrize(
    "damage",
    [
        damage_table,
        lambda folder: (folder / "fig3a.csv").unlink(),
        lambda folder: (folder / "fig3a.json").write_text("{"),
        lambda folder: (folder / "fig3a.json").write_text("[]"),
    ],
)
def test_damaged_files_are_refused(damage, published_folder):
    damage(published_folder)
    with pytest.raises(CorruptRunError) as error:
        sa.figure("fig3a", published_folder / "out", published=True)
    assert error.value.code == "corrupt-published-runs"
    assert error.value.fields == {"path": published_folder / "fig3a.json"}
    assert not (published_folder / "out").exists()


def test_a_figure_without_a_drawable_run_is_refused(published_folder, caplog):
    changed(published_folder, lambda about: about["runs"].clear())
    with pytest.raises(InputError) as error:
        draw_published("fig3a")
    assert (error.value.code, error.value.fields) == ("no-drawable-run", {"figure": "fig3a"})


def test_the_users_runs_are_drawn_over_the_published_ones(published_folder, caplog):
    overlay = [
        recorded_run(receiver="cauchy(K=1)"),
        recorded_run(receiver="gnc(max_norm=5)"),
        recorded_run(receiver="cauchy(K=1)", clients=7),
    ]
    picture = draw_published("fig3d", overlay)
    texts = [text.get_text() for text in picture.axes[0].get_legend().get_texts()]
    assert texts == ["MAC", "Noisy, diverged at round 3", "yours: cauchy(K=1)", "yours: gnc(max_norm=5)"]
    assert picture.axes[0].get_ylabel() == "test loss"
    assert "not the set-up of fig3d, it differs in clients\n" in caplog.text
    assert "different copy" not in caption(*published_content("fig3d", overlay))
    runs, left_out = overlay_runs("fig3a", recorded_run(0))
    assert (runs, left_out) == ({}, [f"{recorded_run(0)}: no complete round"])
    assert overlay_runs("fig3a", recorded_run(evaluate="validation"))[0] == {}, "evaluated on validation data"
    noniid = {"partition": "dirichlet(beta=0.3)"}
    for noise, fits in (("sas(alpha=1.2)", True), ("sas(alpha=1.2, tau=0.3)", False)):
        assert bool(overlay_runs("fig4a", recorded_run(noise=noise, **noniid))[0]) == fits, "the varied setting is free"


def test_one_warning_covers_all_runs_that_do_not_fit(published_folder, caplog):
    others = [recorded_run(clients=7, seed=seed) for seed in range(4)] + [recorded_run(noise="gaussian(std=1)")]
    picture = draw_published("fig3a", [recorded_run(receiver="cauchy(K=1)"), *others, recorded_run(0)])
    assert picture.axes[0].get_legend().get_texts()[-1].get_text() == "yours: cauchy(K=1)"
    first, second = caplog.messages
    assert first.startswith("left out: 5 runs, such as Run(cifar10()")
    assert first.endswith(": not the set-up of fig3a, they differ in clients, noise"), "not in noise.tau as well"
    assert second.endswith(": no complete round")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("fig3a", "stableair run cifar10 rounds=3 receiver=..."),
        ("fig3d", "stableair run cifar10 rounds=3 receiver=..."),
    ],
)
def test_an_overlay_of_runs_that_do_not_fit_is_refused(name, command, published_folder, caplog):
    others = [recorded_run(clients=7, seed=seed) for seed in range(9)]
    with pytest.raises(InputError) as error:
        sa.figure(name, published_folder / "out", published=True, overlay=others)
    assert (error.value.code, error.value.fields) == ("no-fitting-run", {"figure": name})
    text = str(error.value)
    assert text.startswith(f"no run of the overlay can be drawn over {name}: 9 runs, such as ")
    assert text.endswith(f": not the set-up of {name}, they differ in clients; start from: {command}")
    assert (caplog.messages, (published_folder / "out").exists()) == ([], False)
    with pytest.raises(InputError) as error:
        draw_published(name, recorded_run(0))
    assert error.value.code == "no-fitting-run"
    draw_published(name, [])


@pytest.mark.parametrize("name", FIGURES)
def test_the_advised_command_gives_runs_that_fit(name):
    """The advice is a command; with a receiver and a value it is the set-up of the figure."""
    words = fitting_command(name, 60).removeprefix("stableair run ").split()
    value = FIGURES[name].values[0] if FIGURES[name].vary else ""
    settings = [word.replace("...", "mac(C=2)" if word.startswith("receiver") else str(value)) for word in words]
    e = from_words(settings)
    run = Run(e.to_record(), [{"round": 0, "test/accuracy": 0.1}])
    assert e.rounds == 60
    assert len(overlay_runs(name, run)[0]) == 1


def test_the_caption_mentions_a_different_copy_of_the_data(published_folder, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(reproduce.FOLDER / "cifar10-mac-seed0", folder)
    picture = draw_published("fig3a", folder)  # the published runs here have read no data file
    assert "your runs used a different copy of the data" in caption(*published_content("fig3a", folder))
    assert picture.axes[0].get_legend().get_texts()[-1].get_text() == "yours: mac(C=0.316)"


def test_published_figures_on_the_command_line(published_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["stableair", "figure", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code, *capsys.readouterr())

    assert command("fig3a", "--published")[:2] == (0, "".join(f"runs/published/fig3a.{ending}\n" for ending in ENDINGS))
    sa.run(Experiment(clients=4, rounds=1), tmp_path / "mine")
    code, out, errors = command("fig3a", "--published", "--overlay", "mine", "--out", "over")
    assert (code, out, errors.count("\n"), (tmp_path / "over").exists()) == (2, "", 1, False)
    assert re.search(
        r" mine: not the set-up of fig3a, it differs in clients, data, .*; start from: stableair run", errors
    )
    code, out, _ = command("fig3a", "--published", "--metric", "test/loss", "--out", "over")
    assert (code, out) == (0, "".join(f"over/fig3a-test-loss.{ending}\n" for ending in ENDINGS))
    for words, expected in [
        (["fig4a", "--published"], "fig4a has no published runs; these figures have: fig3a, fig3d"),
        (["fig3a", "--overlay", "mine"], "leave out overlay"),
        (["fig3a", "--metric", "test/loss"], "leave out metric"),
        (["fig3a", "--published", "--metric", "test/los"], "did you mean 'test/loss'"),
        (["fig3a", "--published", "--rounds", "3", "lr=1"], "leave out rounds, settings"),
        (["fig3a", "--published", "--overlay", "nowhere"], "nowhere"),
        (["fig2", "--published"], "leave out published"),
    ]:
        code, _, errors = command(*words)
        assert (code, errors.count("\n")) == (2, 1)
        assert expected in errors


@pytest.mark.parametrize("name", UNPUBLISHED)
def test_a_figure_without_published_runs_is_refused(name, tmp_path):
    with pytest.raises(InputError) as error:
        sa.figure(name, tmp_path, published=True)
    assert error.value.code == "not-published"
    assert error.value.fields == {"figure": name, "available": PUBLISHED}


def test_every_run_of_the_plan_belongs_to_a_curve(tmp_path):
    """All runs of bench/reproduce.py are published: its list agrees with the curves of the figures."""
    curves = {name: publish.published_curves(name) for name in publish.NAMES}
    missing = {name: set(labels) for name, labels in curves.items()}
    for job in reproduce.jobs(reproduce.FOLDER):
        if not job.method:
            record = job.experiment.to_record()
            homes = {name: published_runs.curve_name(name, record, curves[name]) for name in curves}
            assert any(homes.values()), job.name
            for name, label in homes.items():
                missing[name].discard(label)
    searched = {"MAC", "GNC"}  # listed once their thresholds are known
    assert {label for labels in missing.values() for label in labels} - searched == {
        "α = 1.2, C = auto", "α = 1.3, C = auto", "α = 1.4, C = auto",
    }  # fmt: skip
