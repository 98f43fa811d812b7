"""Invalid words and options for every command, generated from the command tree and the types of the options."""

import signal
import sys
import warnings

import pytest
from matplotlib.figure import Figure
from typer.main import get_command

import stableair as sa
from helpers.isolation import reset_logger
from stableair import theory, workloads
from stableair.cli import main as cli
from stableair.data import hub
from stableair.experiment import PRESETS, TYPES
from stableair.paper import demo, theorem

pytestmark = pytest.mark.slow  # errors and attacks of users; each test prints the number of its attempts

PATIENCE = 2  # seconds; a command that runs longer has accepted its words
TEXTS = [
    "", "x", ".", "--", "-x", "/dev/null/x", "/proc", "/proc/x", "a" * 300, "a/" * 2500, "\udcff", "☃.png", "a\nb",
    "x.xyz", "*", "(", "=", "x=1", "__import__('os')", "mac(C=1",
]  # fmt: skip
INVALID = {
    "integer": ["", " ", "x", "1.5", "1e3", "-1", "0", "nan", "inf", "9" * 400, "99999999999999999999"],
    "float": ["", " ", "x", "1,5", "-1", "0", "nan", "inf", "-inf", "1e308", "1e-320", "1e999", "9" * 400],
    "text": TEXTS,
}
SETTINGS = ["", "x", "-1", "0", "nan", "1e308", "9" * 400, "(", "a" * 600, "x()", "__import__('os')", "mac(C=1, C=2)"]
TINY = [
    "data=synthetic(samples=60, classes=3, shape=(1, 2, 2))", "model=mlp(width=4)", "clients=5", "rounds=1",
    "device=cpu", "local_epochs=1",
]  # fmt: skip
VALID = {  # valid words of small size, for the commands that need words
    "run": TINY,
    "search": [*TINY, "receiver.C=0.1:10:log", "--trials", "1"],
    "sweep": TINY,
    "compare": [*TINY, "receiver=mac(C=1),none()", "--seeds", "1"],
    "air": ["markov"],
    "figure": ["fig3c", *TINY, "partition=iid()", "--C", "1", "--max-norm", "1"],
    "plot": ["../run"],
    "export": ["../run"],
    "report": ["../run"],
    "bench": ["digits", "--rounds", "1", "--only", "reference"],
    "data prepare": ["cifar10"],
    "data check": ["cifar10"],
    "data show": ["synthetic(samples=60)", "--clients", "3"],
}


def tree(group, path=()):
    """The commands: (words, command)."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from tree(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(tree(get_command(cli.app)))


def kind(parameter):
    name = parameter.type.name
    return next((known for known in INVALID if name.startswith(known)), "text")


def with_setting(words, word):
    """The words, with one setting added or replaced."""
    key = word.partition("=")[0] + "="
    return [*(one for one in words if not ("=" in word and one.startswith(key))), word]


def share(values, number, parts=3):
    """Every third value, from `number` on: three successive numbers select all values."""
    return values[number % parts :: parts]


def lines(path, command):
    """Command lines, each with one invalid or unusual part."""
    words = VALID.get(path, [])
    for number, parameter in enumerate(command.params, start=list(COMMANDS).index(path)):
        if parameter.param_type_name == "argument":
            many = parameter.nargs == -1
            for value in share(TEXTS, number):
                yield [*words, value] if many else [value, *words[1:]]
                yield [value]
        elif parameter.is_flag:
            yield from ([*words, f"{parameter.opts[0]}={value}"] for value in ("x", ""))
        else:
            yield from ([*words, parameter.opts[0], value] for value in share(INVALID[kind(parameter)], number))
            yield [*words, parameter.opts[0]]
        yield [*words, *(f"{option}x" for option in parameter.opts)]
    yield from (
        [*words, *unusual] for unusual in (["--nonsense"], ["--nonsense=1"], ["-q"], ["--debug=x"], ["--"], ["x"] * 300)
    )
    if any("KEY=VALUE" in str(parameter.metavar) for parameter in command.params):
        keys = *TYPES, "receiver.C", "noise.tau", "channel.noise_on", "rounds.x", ".", "receiver.", ".C"
        for number, key in enumerate(keys):
            values = share(SETTINGS, number) if path == "run" else share(SETTINGS[:2], number, parts=2)
            yield from (with_setting(words, f"{key}={value}") for value in values)
        if path == "search":
            yield from (
                with_setting(words, f"receiver.C={text}")
                for text in ("1:", ":1", "1:2:3", "2:1", "0:1:log", "a,b", ",")
            )


class TooLong(BaseException):
    """The command runs longer than PATIENCE."""


@pytest.fixture
def run_command(tmp_path, monkeypatch, capfd, registries):
    """Run a command line: (exit code or name of the exception, standard error)."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(hub.VARIABLE, str(hub.folder()))
    tiny = sa.Experiment().with_(**dict(word.split("=", 1) for word in TINY if word[:4] in ("data", "mode")), clients=5,
                                 rounds=1, local_epochs=1, device="cpu")  # fmt: skip
    monkeypatch.setitem(PRESETS, "demo", tiny.to_dict())
    monkeypatch.setattr(demo, "TUNING_ROUNDS", 1)
    monkeypatch.setattr(demo, "GRID", {name: (spec, values[:1]) for name, (spec, values) in demo.GRID.items()})
    monkeypatch.setattr(theorem, "CHECKS", theorem.CHECKS[:1])
    for name in workloads.WORKLOADS:
        monkeypatch.setitem(workloads.WORKLOADS, name, tiny)
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: file.write(b"a picture"))  # the slowest step
    sa.run(tiny, tmp_path / "run")
    theory.best_threshold(1.5)  # computed once
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}

    def interrupt(*_):
        raise TooLong

    def invoke(*words, patience=PATIENCE):
        monkeypatch.setattr(sys, "argv", ["stableair", *words])
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, patience)
        try:
            cli.main()
        except SystemExit as stop:
            outcome = stop.code
        except BaseException as error:
            outcome = type(error).__name__
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return outcome, capfd.readouterr().err

    yield invoke
    reset_logger()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_accepts_or_refuses_every_word_and_option(path, run_command):
    refused, accepted, failures = 0, 0, []
    if path in VALID:
        run_command(*path.split(), *VALID[path], patience=0)  # without a limit: no import may be interrupted
    for words in lines(path, COMMANDS[path]):
        outcome, errors = run_command(*path.split(), *words)
        last = errors.splitlines()[-1] if errors.strip() else ""
        if outcome == 2 and errors.count("error: ") == 1 and last.startswith("error: ") and "Traceback" not in errors:
            refused += 1
        elif outcome in (0, "TooLong"):
            accepted += 1
        else:
            failures.append((outcome, " ".join(words)[-100:], errors[-300:]))
    print(f"\n{path}: {refused + accepted + len(failures)} command lines, {refused} refused in one line, "
          f"{accepted} accepted, {len(failures)} failures")  # fmt: skip
    assert not failures, failures
    assert refused
