"""Wrong values for every argument of every component, every setting and every option, found by their signatures."""

import inspect
import math
import sys
import warnings

import numpy as np
import pytest
import torch

import stableair as sa
from components import EXAMPLES
from stableair.cli import main as cli
from stableair.experiment import HOMES, TYPES, Experiment, from_words, registry
from stableair.spec import REGISTRIES

pytestmark = pytest.mark.slow  # what an unlucky or a hostile user does; each test prints how often it tried

BAD = [
    None, True, -1, 0, 1.5, math.nan, math.inf, -math.inf, 10**30, 1e308, "", "x", "auto", "a" * 3000, (), (1, 2), [1],
    {"a": 1}, object(), b"x", np.float64(-1), np.array([1.0]), torch.ones(2), 1j, "__import__('os')", "\x00",
]  # fmt: skip
ALLOWED = (sa.InputError,)


def refused(call):
    """Whether the call is refused, in one line; anything else than an InputError is a failure of the test."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except ALLOWED as error:
        assert "\n" not in str(error), error
        return True
    return False


def test_every_setting_takes_or_refuses_every_value():
    tried = told = 0
    for key in TYPES:
        for value in BAD:
            tried += 1
            told += refused(lambda key=key, value=value: Experiment(**{key: value}))
            told += refused(lambda key=key, value=value: Experiment().with_(**{key: value}))
    print(f"\nsettings: {2 * tried} values, {told} refused in one line, no other error")


@pytest.mark.parametrize("field", [field for field in HOMES if field != "data"])
def test_every_argument_of_every_component_takes_or_refuses_every_value(field):
    tried = told = 0
    examples = {text.partition("(")[0]: text for text in EXAMPLES[registry(field).plural]}
    for entry in list(registry(field)):
        call = registry(field).one(examples[entry.name])
        for parameter in inspect.signature(entry.factory).parameters:
            for value in BAD:
                tried += 1
                told += refused(lambda call=call, parameter=parameter, value=value: call.with_(parameter, value)())
                key = f"{field}.{parameter}"
                base = Experiment(**{field: examples[entry.name]})
                told += refused(lambda base=base, key=key, value=value: base.with_(**{key: value}))
    print(f"\n{field}: {2 * tried} values, {told} refused in one line, no other error")


def test_numpy_numbers_are_numbers():
    e = Experiment().with_(**{"noise.tau": np.float64(0.5), "clients": np.int64(7), "lr": np.float32(0.5)})
    assert (e.noise, e.clients, e.lr) == ("sas(alpha=1.5, tau=0.5)", 7, 0.5)


WORDS = [
    "=", "clients", "clients=", "clients=five", "clients=-1", "clients=0", "clients=1e3", "lr=nan", "lr=-1", "seed=x",
    "noise=", "noise=(", "noise=sas(", "noise=sas(alpha=3)", "noise=sas(tau=-1)", "noise=sas(1,2,3)", "noise.tau=",
    "noise.tau=x", "noise.tau=-1", "noise.=1", ".tau=1", "noise..tau=1", "noise.tau.x=1", "receiver=mac()",
    "receiver=|",
    "receiver=mac(C=1)|", "receiver=mac(C=1) | | clip(1)", "receiver=mac(C=open('x'))", "receiver=mac(C=1)(2)",
    "receiver=lambda g: g", "receiver=mac(**{})", "receiver=mac(C=1, C=2)", "model=mlp(0)", "model=resnet18()",
    "data=cifar11", "data=synthetic(shape=3)", "partition=dirichlet(-1)", "payload=x", "blocks=x", "evaluate=train",
    "engine=slow", "precision=fp8", "device=gpu9", "chunk=-1", "channel=sharp()", "channel.noise_on=all",
    "power=loud()",
    "participation=nobody()", "noise_on=sum", "augment=x", "norm_stats=x", "batch_size=0", "local_epochs=0", "rounds=0",
    "clients=99999999999999999999999", "clients=5 ", "☃=1", "noise=☃", "lr=1e300", "model=mlp(2, depth=1000000000)",
]  # fmt: skip


@pytest.mark.parametrize("command", ["run", "search", "figure"])
def test_every_wrong_word_is_one_line(command, monkeypatch, tmp_path, capsys):
    """On the command line: exit code 2, one line that begins with error:, and nothing made."""
    monkeypatch.chdir(tmp_path)
    first = {"run": ["run"], "search": ["search", "receiver.C=1:2"], "figure": ["figure", "fig3a", "--smoke"]}[command]
    for word in WORDS:
        monkeypatch.setattr(sys, "argv", ["stableair", *first, *([] if command == "figure" else ["rounds=1"]), word])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, errors = capsys.readouterr()
        errors = [line for line in errors.splitlines() if not line.startswith("note:")]
        assert stop.value.code == 2, (word, out)
        assert len(errors) == 1, (word, errors)
        assert errors[0].startswith("error: "), word
        assert not list(tmp_path.iterdir()), word
    print(f"\n{command}: {len(WORDS)} wrong words, each one line")


OPTIONS = [
    ["run", "--out", ""], ["run", "--seeds", "0"], ["run", "--seeds", "x"], ["run", "--device", "x"],
    ["run", "--engine", "x"], ["run", "--checkpoint-every", "0"], ["run", "--track", "x"], ["run", "--plugin", "no.py"],
    ["run", "--seeds", "10000000"], ["run", "no.toml"], ["run", "nopreset"], ["run", "digits", "cifar10"],
    ["run", "--x"],
    ["search"], ["search", "receiver.C=1"], ["search", "receiver.C=2:1"], ["search", "receiver.C=0:1:log"],
    ["search", "receiver.C=a:b"], ["search", "receiver.C=1:2", "--trials", "0"], ["search", "evaluate=test,validation"],
    ["search", "seed=1,2"], ["search", "receiver.C=1:2", "--device", "x"], ["search", "receiver.C=1:2", "--out", ""],
    ["figure"], ["figure", "fig9"], ["figure", "fig3a", "--C", "0"], ["figure", "fig3a", "--max-norm", "0"],
    ["figure", "fig3a", "--device", "x"], ["figure", "fig4c", "--C", "1"], ["figure", "fig2", "clients=3"],
    ["figure", "fig3a", "receiver.C=3"], ["figure", "fig3a", "--rounds", "0"], ["figure", "fig3a", "--out", ""],
    ["plot"], ["plot", "nowhere"], ["plot", "."], ["plot", "nowhere", "--metric", "x"], ["report"],
    ["report", "nowhere"],
    ["list", "things"], ["theory", "--alpha", "3"], ["theory", "--tau", "0"], ["theory", "--tau", "1e308"],
    ["theory", "--tau", "nan"], ["theory", "--C", "-1"], ["theory", "--d", "9" * 400], ["theory", "--d", "0"],
    ["theory", "--eta", "1e308"], ["theory", "--L", "inf"], ["theory", "--G", "1e308"], ["theory", "--rounds", "0"],
    ["theory", "--gap", "nan"], ["theory", "--plot", "x"], ["data"], ["data", "show", "no"], ["data", "check", "no"],
    ["data", "prepare", "no"], ["data", "show", "digits", "--clients", "0"], ["data", "show", "digits", "--out", "x"],
    ["data", "show", "digits", "--partition", "x"], ["data", "show", "hf('')"], ["bench", "x"],
    ["bench", "--rounds", "0"],
    ["bench", "--record", "/no/such/place"], ["bench", "--only", "x", "--scaling"], ["demo", "--out", ""], ["nothing"],
]  # fmt: skip


@pytest.mark.parametrize("words", OPTIONS, ids=lambda words: " ".join(words)[:40])
def test_every_wrong_option_is_one_line(words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["stableair", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, errors = capsys.readouterr()
    errors = [line for line in errors.splitlines() if not line.startswith("note:")]
    assert stop.value.code == 2, out
    assert words == ["data"] or (len(errors) == 1 and errors[0].startswith("error: ")), errors
    assert not list(tmp_path.iterdir())


def public():
    """The public functions that take plain values, each with arguments that are right."""
    g = torch.arange(5.0)
    yield sa.stable.sample, {"shape": 4, "alpha": 1.5, "tau": 0.1}
    for name in ("pdf", "cdf", "sf", "score"):
        yield getattr(sa.stable, name), {"x": g, "alpha": 1.5, "tau": 0.1}
    yield sa.stable.quantile, {"p": 0.3, "alpha": 1.5, "tau": 0.1}
    yield sa.stable.estimate, {"x": sa.stable.sample(400, 1.5, 0.1)}
    yield sa.theory.unclipped, {"C": 1.0, "alpha": 1.5, "tau": 0.1, "G": 0.1}
    yield sa.theory.best_threshold, {"alpha": 1.5}
    yield sa.theory.bound, {
        "rounds": 10, "C": 1.0, "alpha": 1.5, "tau": 0.1, "eta": 0.03, "L": 1.0, "G": 0.1, "d": 100, "gap": 1.0,
    }  # fmt: skip
    for rule in ("mac", "clip", "blank", "tanh_clip"):
        yield getattr(sa, rule), {"C": 1.0}
    yield sa.load, {"folder": "nowhere"}
    yield sa.plot, {"runs": ["nowhere"]}
    yield sa.report, {"runs": ["nowhere"], "out": "x.html"}


@pytest.mark.parametrize(("function", "right"), list(public()), ids=lambda value: getattr(value, "__name__", ""))
def test_every_public_function_takes_or_refuses_every_value(function, right, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    told = tried = 0
    for name in right:
        for value in BAD:
            if name in ("rounds", "d") and value == 10**30:
                continue
            tried += 1
            told += refused(lambda name=name, value=value: function(**right | {name: value}))
    print(f"\n{function.__name__}: {tried} values, {told} refused in one line, no other error")


def test_words_are_words(tmp_path):
    told = sum(refused(lambda word=word: from_words([word])) for word in WORDS)
    print(f"\n{len(WORDS)} words, {told} refused in one line")


def test_every_kind_is_tried():
    assert {registry(field).plural for field in HOMES} == set(REGISTRIES) & set(EXAMPLES)
