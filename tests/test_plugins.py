"""An error in a custom component is reported in one line, with its file and line."""

import logging

import pytest
import torch

import stableair as sa
from helpers.callbacks import Hooks
from stableair.experiment import COMPONENT_SETTINGS, registry

KNOWN = {field: registry(field) for field in COMPONENT_SETTINGS}  # all are imported before anything is registered
HEAD = """import numpy as np
import torch
from torch import nn
import stableair as sa
from stableair.channels.power import Power
from stableair.contracts import Dataset, Split
X, Y = torch.zeros(60, 1, 2, 2), torch.arange(60) % 3

@sa.{kind}("mine")
def mine():
    {body}
"""
HEADER, BODY = 9, 11  # the lines of the decorator and of the body
MISTAKES = [
    ("receiver", "1 / 0", BODY), ("receiver", "return lambda g: 1 / 0", BODY),
    ("receiver", "return lambda g: g[:-1]", HEADER), ("receiver", "return lambda g: None", HEADER),
    ("receiver", "return lambda g: g.long()", HEADER), ("receiver", "return lambda g, more: g", HEADER),
    ("receiver", "return 3", HEADER),
    ("local", "return lambda w, g, memory, lr: w", HEADER), ("local", "return 3", HEADER),
    ("local", "return lambda w, g, memory, lr: (w[:-1], memory)", HEADER),
    ("local", "return lambda w, g, memory, lr: 1 / 0", BODY), ("lr_decay", "return lambda k: 1 / 0", BODY),
    ("local", "return lambda w, g, memory, lr: (w.sub_(lr * g), memory)", HEADER),
    ("lr_decay", "return lambda k: 0", HEADER), ("lr_decay", "return 3", HEADER),
    ("server", "return lambda w, g: w[:-1]", HEADER), ("server", "return lambda w, g: [][0]", BODY),
    ("noise", "return lambda d, source: torch.zeros(d).long()", HEADER), ("noise", "return 3", HEADER),
    ("noise", "return lambda d, source: torch.full((d,), torch.nan)", HEADER),
    ("fading", "return lambda n, source: torch.ones(n + 1)", HEADER), ("fading", "raise KeyError('x')", BODY),
    ("power", "return 3", HEADER), ("channel", "return 3", HEADER), ("channel", "return lambda **parts: 3", HEADER),
    ("channel", "return lambda: 3", HEADER), ("participation", "return lambda n, source: [0]", HEADER),
    ("participation", "return None", HEADER), ("partition", "return lambda train, n, rng: [np.zeros(1)] * n", HEADER),
    ("partition", "return lambda train, n, rng: [np.array([-1])] * n", HEADER), ("partition", "return 3", HEADER),
    ("model", "return lambda shape, classes: 1 / 0", BODY), ("model", "return 3", HEADER),
    ("model", "return lambda shape, classes: nn.Flatten()", HEADER),
    ("dataset", "return Dataset(Split(X, Y), Split(X, Y + 9), 3, 'logistic()')", HEADER),
    ("dataset", "return Dataset(Split(X, Y.float()), Split(X, Y), 3, 'logistic()')", HEADER),
    ("dataset", "return Dataset(Split(X, Y[:5]), Split(X, Y), 3, 'logistic()')", HEADER),
    ("dataset", "return Dataset(Split(X, Y), Split(X, Y), 3, 'nothing()')", HEADER), ("dataset", "return 3", HEADER),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "line"), MISTAKES)
def test_an_error_in_a_plug_in_names_its_file_and_line(kind, body, line, tmp_path, registries, tiny):
    (file := tmp_path / "mine.py").write_text(HEAD.format(kind=kind, body=body))
    sa.load_plugin(file)
    setting = {"dataset": "data"}.get(kind, kind)
    with pytest.raises(sa.InputError) as error:
        sa.run(tiny.with_(**{setting: "mine", "rounds": 1} | ({"model": "auto"} if kind == "dataset" else {})))
    assert f"{file}, line {line}: " in str(error.value)
    assert "\n" not in str(error.value)
    if line == BODY:
        assert error.value.__cause__.__class__ in (ZeroDivisionError, IndexError, KeyError), (
            "the original exception is kept"
        )


def test_a_plug_in_that_does_not_import_names_its_line(tmp_path):
    (file := tmp_path / "mine.py").write_text("import torch\n\ntorch.nothing()\n")
    with pytest.raises(sa.InputError) as error:
        sa.load_plugin(file)
    assert error.value.code == "plugin-failed"
    assert f"{file}, line 3: AttributeError" in str(error.value)


@pytest.mark.parametrize(
    ("setting", "body"), [("receiver", "lambda g: g / 0"), ("server", "lambda w, g: w + torch.nan"), ("", "")]
)
def test_the_component_that_returns_nan_is_named(setting, body, tmp_path, registries, tiny, caplog):
    experiment = tiny.with_(rounds=2)
    if setting:
        (file := tmp_path / "mine.py").write_text(HEAD.format(kind=setting, body=f"return {body}"))
        sa.load_plugin(file)
        experiment = experiment.with_(**{setting: "mine"})
    else:  # the interference is the cause
        experiment = experiment.with_(receiver="none()", noise="sas(alpha=0.5, tau=1e38)")
    with caplog.at_level(logging.WARNING, "stableair"):
        assert sa.run(experiment).diverged == 0
    assert [message.partition(" returned")[0] for message in caplog.messages] == (
        [f"round 0: the {setting}"] if setting else []
    )


def test_an_exception_of_the_caller_is_unchanged(tiny, registries):
    """A callback is not part of a custom component in the same file."""

    @sa.receiver("mine")
    def mine():
        return lambda g: g

    def stop(row):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        sa.run(tiny.with_(receiver="mine"), callbacks=[Hooks(round=stop)])


def test_components_of_the_package_have_no_plug_in_file():
    assert [entry.name for known in KNOWN.values() for entry in known if entry.user_location] == []


def test_a_rule_that_is_not_a_factory_is_explained(registries):
    @sa.receiver("plain")
    def plain(g):
        return g.clamp(-1, 1)

    @sa.receiver("annotated")
    def annotated(g: torch.Tensor):
        return g.clamp(-1, 1)

    @sa.server("step")
    def step(w: "torch.Tensor", g: "torch.Tensor"):
        return w - g

    @sa.receiver("number")
    def number(C: float):
        return lambda g: g.clamp(-C, C)

    texts = {}
    for setting, name in (("receiver", "plain"), ("receiver", "annotated"), ("server", "step"), ("receiver", "number")):
        with pytest.raises(sa.InputError) as error:
            sa.Experiment(**{setting: name})
        texts[name] = error.value.code, str(error.value)
    assert texts["plain"][0] == "missing-argument", "g may be a hyper-parameter"
    assert "if g is the received vector, write `def plain(): return lambda g: ...`" in texts["plain"][1]
    assert texts["annotated"] == (
        "not-a-factory",
        "receiver annotated: annotated must return a function g -> g: it is a factory; "
        "write `def annotated(): return lambda g: ...`",
    )
    assert texts["step"][0] == "not-a-factory"
    assert "(w, g) -> w" in texts["step"][1]
    assert texts["number"][0] == "missing-argument"
    assert "lambda" not in texts["number"][1]


def test_arguments_are_checked_against_simple_annotations(registries):
    @sa.receiver("mine")
    def mine(C: float, name: str | None = None, more: torch.Tensor | None = None, other=None):
        return lambda g: g.clamp(-C, C)

    sa.Experiment(receiver="mine(1, name=word, more=3, other=word)")
    sa.Experiment(receiver="mine(0.5, none)")
    for argument, value in (("C", "abc"), ("C", True), ("C", None), ("name", 3)):
        with pytest.raises(sa.InputError) as error:
            sa.Experiment().with_(receiver="mine(C=1)").with_(**{f"receiver.{argument}": value})
        assert (error.value.code, error.value.fields) == ("wrong-type", {"name": argument, "value": value})


def test_a_component_without_a_name_is_explained():
    def bare():
        return lambda g: g

    for register, text in ((sa.receiver, '@sa.receiver("bare")'), (sa.dataset, '@sa.dataset("bare")')):
        with pytest.raises(sa.InputError) as error:
            register(bare)
        assert error.value.code == "not-an-identifier"
        assert str(error.value).endswith(f"write {text}")


def test_a_plug_in_that_registers_nothing_is_announced(tmp_path, registries, caplog):
    (empty := tmp_path / "empty.py").write_text("import stableair.channels.waveform\n\ndef rule():\n    return abs\n")
    (mine := tmp_path / "mine.py").write_text(HEAD.format(kind="receiver", body="return lambda g: g"))
    with caplog.at_level(logging.WARNING, "stableair"):
        sa.load_plugin(mine)
        assert not caplog.messages
        sa.load_plugin(empty)
    assert [str(empty) in message for message in caplog.messages] == [True]
