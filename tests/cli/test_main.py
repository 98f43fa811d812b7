"""Errors on the command line: one line, an exit code, and an option that helps."""

import os
import re
import sys

import pytest

import stableair as sa
from stableair.cli import main as cli
from stableair.cli.advice import FLAGS


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "roudns=3"], "did you mean 'rounds'"),
        (["run", "rounds=0"], "rounds must be at least 1: got 0"),
        (["run", "rounds=x"], "rounds must be a whole number: got 'x'"),
        (["run", "digist"], "did you mean 'digits'"),
        (["run", "missing.toml"], "missing.toml: No such file"),
        (["run", "clients=9999"], "clients must be at most the number of training samples"),
        (["run", "receiver=mac()"], "the signature is mac(C, gain=None, pilot=0)"),
        (["run", "receiver=mac(C=__import__('os'))"], "is code"),
        (["run", "--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["run", "--plugin", "missing.py"], "plug-in missing.py does not exist"),
        (["run", "--out", "/dev/null/x"], "cannot write to /dev/null/x"),
        (["run", "--seeds", "0"], "--seeds"),
        (["run", "--sedes", "3"], "No such option"),
        (["rum"], "No such command 'rum'"),
        (["plot", "missing"], "missing: there is no such folder"),
        (["plot"], "such as: stableair plot runs -o curves.png"),
        (["report"], "name at least one folder of runs"),
        (["sweep"], "name at least one setting with several values"),
        (["compare"], "or folders of runs"),
        (["search"], "receiver.C=0.01:10:log"),
        (["run", "noise.tau=-1"], "tau must be at least 0 and finite: got -1"),
        (["run", "receiver=mac"], "; add receiver.C=VALUE"),
        (["run", "receiver=mac()"], "; write mac(C=VALUE)"),
        (["run", "receiver=mac | gnc"], "; write mac(C=VALUE)"),
        (["run", "data=csv"], "; add data.path=VALUE data.label=VALUE"),
        (["run", "fading=block(of='nakagami')"], "; write nakagami(m=VALUE)"),
        (["run", "power=limit(P=1)"], "power limit(P=1): the power rule needs the interference on the sum"),
        (["run", "power=limit(P=1)"], "; set channel.noise_on=sum"),
        (["list", "recevers"], "did you mean 'receivers'"),
        (["data", "check", "cifar11"], "did you mean 'cifar10'"),
        (["data", "prepare", "digits"], "set of the hub 'digits' is unknown; allowed: cifar10, cifar100, femnist, hf"),
        (["data", "check", "hf(a/b)"], "is code"),
        (
            ["data", "check", "hf('a/b')"],
            "is not prepared; with a network: stableair data prepare with the same name; without: copy ",
        ),
        (["data", "show", "femnist", "--partition", "by_writer()"], "at most the number of"),
        (["theory", "--alpha", "3"], "alpha must be in [0.5, 2]: got 3"),
        (["theory", "--tau", "0", "--plot", "t.png"], "tau must be positive"),
        (["theory", "--tau", "1e308"], "too large or too small to compute with"),
        (["theory", "--d", "9" * 400], "d must be at most 9,223,372,036,854,775,807: got a number of 400 digits"),
        (["theory", "--check", "--plot", "t.xyz"], "its extension must be a picture format"),
        (["run", "model=mlp(2, depth=1000000000)"], "depth must be at most 1,000"),
        (["run", "data=hf('')"], "needs a name such as 'user/set'"),
        (["run", "data=hf('/proc')"], "/proc holds no images"),
        (["plot", "a" * 300], "a path has at most 4,095 bytes, and each name in it at most 255"),
        (["report", "a" * 300], "a path has at most 4,095 bytes, and each name in it at most 255"),
        (["bench", "--record", "/dev/null/x"], "cannot write /dev/null/x: Not a directory; choose another --record"),
        (["bench", "--record", "/proc/x"], "cannot write /proc/x"),
        (["figure", "fig3a", "--max-norm", "0"], "max_norm must be positive"),
        (["search", "digits", "receiver.C=0.1:1", "--device", "x"], "device 'x' is not available"),
        (
            ["search", "cifar10", "receiver.C=0.1:1", "--data-dir", "empty"],
            "cifar10 is not prepared; with a network: pip install 'stableair[hub]', then stableair data prepare",
        ),
    ],
)
def test_bad_input_is_one_line_exit_code_2_and_nothing_written(command, tmp_path, words, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # no download
    monkeypatch.setenv("STABLEAIR_DATA", os.environ["STABLEAIR_DATA"])  # restored after the test
    code, out, errors = command(*words)
    assert code == 2
    assert errors.startswith("error: ")
    assert expected in errors
    assert errors.count("\n") == 1
    assert out == ""
    assert not list(tmp_path.iterdir())


def refused(message, hint):
    """An error as the library raises it."""
    error = sa.InputError(message)
    error.hint = hint
    return error


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("resume", "a is taken; add --resume or choose another --out"),
        ("folder", "a is taken; choose another --out"),
        ("record", "a is taken; choose another --record"),
        ("data", "a is taken; choose another --data-dir"),
        ("", "a is taken"),
        ("something else", "a is taken"),
    ],
)
def test_the_command_line_adds_the_option_of_the_hint(command, monkeypatch, hint, expected):
    def plan(*_, **__):
        raise refused("a is taken", hint)

    monkeypatch.setattr("stableair.paper.figures.plan", plan)
    assert command("figure", "fig3a") == (2, "", f"error: {expected}\n")


def test_an_error_without_advice_is_unchanged(command, monkeypatch):
    def plan(*_, **__):
        raise sa.InputError("a is taken")

    monkeypatch.setattr("stableair.paper.figures.plan", plan)
    assert command("figure", "fig3a") == (2, "", "error: a is taken\n")


def test_every_option_of_a_hint_exists():
    from typer.main import get_command

    groups = get_command(cli.app).commands, get_command(cli.data.app).commands
    known = {word for group in groups for one in group.values() for option in one.params for word in option.opts}
    hinted = re.findall(r"--[a-z-]+", " ".join(FLAGS.values()))
    assert len(hinted) >= len(FLAGS)
    assert set(hinted) <= known


@pytest.mark.parametrize(
    "words", [["run", "receiver=smoothed()"], ["sweep", "model=mine()"], ["run", "noise=markov(bad='mine()')"]]
)
def test_an_unknown_component_hints_at_plugins(command, words):
    code, _, errors = command(*words)
    assert code == 2
    assert errors.endswith("; a custom component needs --plugin FILE.py\n")


@pytest.mark.parametrize("words", [["--debug", "run", "rounds=0"], ["run", "rounds=0", "--debug"]])
def test_debug_prints_the_traceback_in_any_position(command, words):
    code, _, errors = command(*words)
    assert code == 2
    assert errors.startswith("Traceback (most recent call last):")
    assert errors.endswith("\nerror: rounds must be at least 1: got 0\n")
    assert "Traceback" in command("nothing")[2], "the option also sets the environment variable"


def test_a_suggested_command_is_printed_once(command):
    assert command("plott")[2] == "error: No such command 'plott'. Did you mean 'plot'?\n"


def test_an_internal_error_is_one_line_and_another_exit_code(command, monkeypatch):
    monkeypatch.setattr("stableair.paper.figures.plan", lambda *_, **__: {}["not there"])
    code, out, errors = command("figure", "fig3a")
    assert (code, out) == (1, "")
    assert errors.startswith("error: KeyError: 'not there' (internal error")
    assert "--debug" in errors
    assert errors.count("\n") == 1
