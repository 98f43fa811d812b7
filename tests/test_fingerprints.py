"""Digests of objects: equal for equal content and code, in this process and in another one."""

import functools
import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from helpers import ROOT
from stableair.fingerprints import fingerprint, qualified_name

SCRIPT = """
import sys
import torch
from torch import nn
import stableair as sa
from stableair.fingerprints import fingerprint

LIMIT = {limit}

def clip(g):
    return g.clamp(-LIMIT, LIMIT)

def apply(received, memory):
    return {body}, memory, {{}}

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

class Net(Base):
    size = property(lambda self: {attribute})

    @staticmethod
    def scale(x):
        return {scale} * x

    def forward(self, x):
        return self.scale(self.fc(x))

torch.manual_seed(0)
print(*map(fingerprint, (sa.Rule(apply), lambda g: clip(g) + 0, Net, Net())))
"""
SAME = {"limit": "2.0", "body": "clip(received.g)", "attribute": "1", "scale": "3"}


@dataclass
class Point:
    x: float
    y: object = None


class Slotted:
    __slots__ = ("x",)


def scaled(factor):
    return lambda g: factor * g


def recursive_list():
    loop = [1]
    loop.append(loop)
    return loop


def recursive(n):
    return recursive(n - 1) if n else 0


DIFFERENT = [
    None, 0, 1, 1.0, True, "1", b"1", 1j,
    (1, 2), [1, 2], [2, 1], {1, 2}, {"a": 1}, {"a": 2}, {"b": 1}, [[1], 2], [1, [2]],
    np.float64(1), np.ones(2), np.ones(2, np.float32), np.ones((2, 1)), np.zeros(2), np.array(["a", None], object),
    torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, 1), torch.zeros(2), torch.ones(2).requires_grad_(),
    torch.ones(2, dtype=torch.bfloat16), torch.tensor(1.0), torch.empty(0), torch.float32,
    torch.Generator().manual_seed(1),
    Point(1.0), Point(2.0), Point(1.0, Point(2.0)), Point, Slotted, torch.tanh, np.tanh, len, str.upper, torch,
    functools, scaled(1.0), scaled(2.0), scaled, recursive,
    functools.partial(scaled, 1), functools.partial(scaled, factor=1),
    lambda g: g + 1, lambda g: g - 1, lambda g=1: g - 1, Point(1.0).__eq__, recursive_list(),
    nn.Linear(2, 2), nn.ReLU(), nn.ReLU(inplace=True), nn.Sequential(nn.ReLU()),
    nn.Sequential(OrderedDict(a=nn.ReLU())),
]  # fmt: skip


def test_different_objects_have_different_digests():
    digests = [fingerprint(value) for value in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT), [i for i, d in enumerate(digests) if digests.count(d) > 1]


@pytest.mark.parametrize("i", range(len(DIFFERENT)))
def test_an_object_keeps_its_digest(i):
    assert fingerprint(DIFFERENT[i]) == fingerprint(DIFFERENT[i])


def test_equal_objects_have_equal_digests():
    for make in (
        recursive_list,
        lambda: scaled(2.0),
        lambda: Point(1.0, [torch.ones(3)]),
        lambda: {"a": 1, "b": {2, 3}},
    ):
        assert fingerprint(make()) == fingerprint(make())
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint(torch.arange(6).view(2, 3).T) == fingerprint(torch.tensor([[0, 3], [1, 4], [2, 5]]))


def test_forward_hooks_change_the_fingerprint():
    layer, hooked = nn.ReLU(), nn.ReLU()
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    assert fingerprint(layer) != fingerprint(hooked)


def test_qualified_names():
    assert qualified_name(Point) == qualified_name(Point(1.0)) == f"{__name__}.Point"
    assert qualified_name(scaled(1.0)) == f"{__name__}.scaled.lambda"
    scripted = scaled(1.0)
    scripted.__module__ = "__main__"
    assert qualified_name(scripted) == "scaled.lambda"
    assert qualified_name(functools.partial(scaled, 1)) == f"{__name__}.scaled"


def digests_of_script(folder, as_file, **changes):
    text = SCRIPT.format(**SAME | changes)
    (folder / "script.py").write_text(text)
    words = [sys.executable, "script.py"] if as_file else [sys.executable, "-c", text]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True, env=env)
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("as_file", [True, False])
def test_digests_are_equal_in_other_processes(tmp_path, as_file):
    rule, function, kind, module = digests_of_script(tmp_path, as_file)
    assert digests_of_script(tmp_path, as_file) == [rule, function, kind, module]
    changed = digests_of_script(tmp_path, as_file, **({"limit": "4.0"} if as_file else {"scale": "5"}))
    if as_file:  # a global variable that the rule and the function use
        assert changed[0] != rule and changed[1] != function
        assert changed[2:] == [kind, module]
    else:
        assert changed[:2] == [rule, function]
        assert changed[2] != kind and changed[3] != module
