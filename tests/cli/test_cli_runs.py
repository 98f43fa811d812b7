"""`stableair run`."""

import re

import stableair as sa
from helpers.words import with_changes


def test_run_records_and_prints_its_result(command, small, tmp_path):
    code, out, errors = command("run", *small, "--out", "a")
    assert (code, errors) == (0, "")
    lines = out.splitlines()
    assert (
        lines.pop(0)
        == "engine stacked, fp32, 5 clients at a time: the model is small, so the clients are trained together"
    )
    assert lines[0].startswith("seed 0  1/4  test accuracy 0.")
    assert re.search(r" dB  \S+ s per round, \S+ s left$", lines[0])
    assert re.search(r" dB  \S+ s per round$", lines[3])
    assert lines[-1].startswith("a: 4 rounds, test accuracy")
    assert len(sa.load("a")) == 4


def test_an_existing_run_is_refused_without_resume(command, small):
    command("run", *with_changes(small, "rounds=2"), "--out", "a")
    code, _, errors = command("run", *small, "--out", "a")
    assert code == 2
    assert errors.startswith("error: a already holds this run; add --resume")
    code, out, _ = command("run", *small, "--out", "a", "--resume")
    assert code == 0
    assert [line[:10] for line in out.splitlines()[1:-1]] == ["seed 0  3/", "seed 0  4/"]
    code, out, errors = command("run", *small, "--out", "a", "--resume")
    assert (code, len(out.splitlines())) == (0, 1), "a finished run is not computed again"
    assert errors == "note: a is complete with 4 rounds; increase rounds to continue\n"
    code, out, errors = command("run", *with_changes(small, "seed=1"), "--out", "a", "--resume")
    assert (code, out, "seed: 0 in the folder, 1 now; repeat the settings" in errors) == (2, "", True)


def test_each_seed_has_a_separate_folder(command, small, tmp_path):
    code, _, _ = command("run", *with_changes(small, "seed=4"), "--seeds", 3, "--out", "a")
    assert code == 0
    assert {sa.load(p).experiment.seed: p.name for p in (tmp_path / "a").iterdir()} == {
        4: "seed4",
        5: "seed5",
        6: "seed6",
    }
    code, out, _ = command("plot", "a", "-o", "a.png")
    assert (code, out) == (0, "a.png\n")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_advice_after_ctrl_c_names_a_folder_that_exists(command, small, registries):
    interrupted = iter([True, False, True])  # the only run of the first command, the second run of the other one

    @sa.model("stop")
    def stop():
        def build(shape, classes):
            if next(interrupted):
                raise KeyboardInterrupt
            return sa.models.logistic()(shape, classes)

        return build

    words = [*with_changes(small, "model=stop", "rounds=1"), "--out", "a", "--seeds", 2]
    assert command("run", *words)[::2] == (130, "stopped; nothing was recorded; run the same command again\n")
    assert command("run", *words)[::2] == (130, "stopped; a/seed0 holds every complete round; continue with --resume\n")


def test_without_out_the_folder_is_named_after_the_run(command, small, tiny, tmp_path):
    assert command("run", *small)[0] == 0
    assert [p.name for p in (tmp_path / "runs").iterdir()] == [f"synthetic-mac-seed0-{tiny.id()}"]


def test_a_run_of_a_toml_file_with_a_plug_in(command, small, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import stableair as sa\n@sa.receiver('twice')\ndef twice():\n    '''Double.'''\n    return lambda g: 2 * g\n"
    )
    (tmp_path / "e.toml").write_text('receiver = "twice()"\nrounds = 1\n')
    code, _, errors = command(
        "run", "e.toml", *[w for w in small if w[:5] not in ("recei", "round")], "--plugin", "mine.py", "-o", "a"
    )
    assert (code, errors) == (0, "")
    assert sa.load(tmp_path / "a").settings["receiver"] == "twice()"


def test_a_diverged_run_exits_0_and_prints_that_it_diverged(command, small):
    code, out, _ = command(
        "run", *with_changes(small, "receiver=none()", "noise=sas(alpha=0.5, tau=1e37)"), "--out", "a"
    )
    assert code == 0
    assert out.splitlines()[-1].startswith("a: diverged at round ")
    assert out.splitlines()[-2].endswith("diverged")
    command("run", *small, "--out", "b")
    assert command("plot", "a", "b")[0] == 0


def test_one_refused_seed_refuses_all(command, small, tmp_path):
    command("run", *with_changes(small, "seed=1"), "--out", "a/seed1")
    code, out, errors = command("run", *small, "--seeds", 2, "--out", "a")
    assert (code, out) == (2, "")
    assert "a/seed1 already holds this run" in errors
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["seed1"]
