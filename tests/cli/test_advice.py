"""Advice where a setting was written as an option, or an option as a setting."""

import shlex

import pytest

import stableair as sa
from stableair.cli import reference
from stableair.paper import air_plots, signal_plots


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["run", "--rounds", 2], "write rounds=2"),
        (["run", "digits", "--rounds=2", "--resume"], "write rounds=2"),
        (["sweep", "--batch-size", 3], "write batch_size=3"),
        (["run", "--noise.tau", 0.3], "write noise.tau=0.3"),
        (["search", "--C", 1], "write receiver.C=1"),
        (["run", "--round", 3], "write rounds=3"),
        (["run", "-rounds", 3], "write rounds=3"),
        (["run", "digits", "-rounds=3"], "write rounds=3"),
        (["sweep", "-noise.tau", 3], "write noise.tau=3"),
        (["search", "-C", 1], "write receiver.C=1"),
        (["run", "-seeds", 3], "write --seeds"),
        (["run", "-checkpoint-every", 3], "write --checkpoint-every"),
        (["sweep", "--locl-epochs=3"], "write local_epochs=3"),
        (["run", "seeds=3"], "write --seeds 3"),
        (["search", "receiver.C=1:2", "trials=4"], "write --trials 4"),
        (["run", "checkpoint_every=5"], "write --checkpoint-every 5"),
        (["run", "resume=true"], "write --resume"),
    ],
)
def test_the_error_names_the_right_form(words, advice, command, tmp_path):
    code, out, errors = command(*words)
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert errors.endswith(f": {advice}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [["plot", "--rounds", 2], ["run", "--bogus", 2], ["run", "--sedes", 2], ["list", "--tau", 2], ["run", "-x"]],
)
def test_options_without_a_similar_setting_get_no_advice(words, command):
    code, _, errors = command(*words)
    assert (code, "No such option" in errors, "write" in errors) == (2, True, False)


@pytest.mark.parametrize(("words", "name"), [(["air"], "digital"), (["figure"], "fig4c"), (["data", "show"], "digits")])
def test_a_missing_argument_is_described(words, name, command):
    code, _, errors = command(*words)
    assert (code, errors.startswith("error: Missing argument 'NAME': "), name in errors) == (2, True, True)


def test_the_pictures_of_air_are_listed():
    assert [*reference.PICTURES] == [*(air_plots.PICTURES | signal_plots.PICTURES)]


def test_a_sweep_accepts_seeds_as_a_setting(command, small):
    code, out, _ = command("sweep", *small, "seeds=2", "-o", "s")
    assert (code, out.splitlines()[-1][:16]) == (0, "2 experiments in")


def test_dotted_settings_need_no_quotes(command, small):
    words = [word for word in small if not word.startswith("receiver=")]
    assert command("run", *words, "receiver=mac", "receiver.C=0.7", "-o", "a")[0] == 0
    assert sa.load("a").experiment.receiver == "mac(C=0.7)"
    code, out, _ = command("search", *words, "receiver=mac", "receiver.C=0.1:10:log", "--trials", 2, "-o", "s")
    assert (code, "receiver=mac" in out) == (0, True)
    again = shlex.split(next(line for line in out.splitlines() if line.startswith("stableair run ")))
    assert command(*again[1:], "-o", "b")[0] == 0


def test_the_last_range_of_a_repeated_setting_is_used(command, small, tmp_path):
    words = [word for word in small if not word.startswith("receiver=")]
    spaces = "receiver.C=5:10", "receiver.C=0.1,0.2"
    code, _, errors = command("search", *words, *spaces, "--trials", 2, "-o", "s")
    assert (code, errors.splitlines()[0]) == (0, "note: receiver.C is given twice: 0.1,0.2 replaces 5:10")
    receivers = {sa.load(path.parent).experiment.receiver for path in tmp_path.rglob("experiment.json")}
    assert receivers == {"mac(C=0.1)", "mac(C=0.2)"}
