"""Wrong values for every argument of every component and every setting, found by their signatures."""

import inspect
import math
import warnings

import numpy as np
import pytest
import torch

import stableair as sa
from components import EXAMPLES
from stableair.experiment import HOMES, PARTS, TYPES, Experiment, registry
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


def public():
    """The public functions that take plain values, each with arguments that are right."""
    for rule in ("mac", "clip", "blank", "tanh_clip"):
        yield getattr(sa, rule), {"C": 1.0}


@pytest.mark.parametrize(("function", "right"), list(public()), ids=lambda value: getattr(value, "__name__", ""))
def test_every_public_function_takes_or_refuses_every_value(function, right, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    told = tried = 0
    for name in right:
        for value in BAD:
            tried += 1
            told += refused(lambda name=name, value=value: function(**right | {name: value}))
    print(f"\n{function.__name__}: {tried} values, {told} refused in one line, no other error")


def test_every_kind_is_tried():
    assert {registry(field).plural for field in HOMES | PARTS} == set(REGISTRIES) & set(EXAMPLES)
