"""Warnings about components that draw from a global generator."""

import random

import numpy as np
import pytest
import torch

import stableair as sa

DRAWS = {
    "torch's generator": lambda d: torch.randn(d),
    "numpy.random": lambda d: torch.as_tensor(np.random.randn(d), dtype=torch.float32),
    "Python's random": lambda d: torch.full((d,), random.random()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_noise_that_draws_from_a_global_generator_logs_a_warning_once(name, tiny, registries, caplog):
    @sa.noise("global_noise")
    def global_noise():
        return lambda d, source: DRAWS[name](d)

    sa.run(tiny.with_(noise="global_noise()", rounds=3))
    (warning,) = [each.getMessage() for each in caplog.records if "draws from" in each.getMessage()]
    assert f"the channel draws from {name}" in warning
    assert "source.normal" in warning


@pytest.mark.parametrize("kind", ["receiver", "server"])
def test_a_rule_that_draws_from_a_global_generator_logs_a_warning(kind, tiny, caplog):
    rule = {"receiver": lambda g: g + torch.randn_like(g), "server": lambda w, g: w - g * torch.rand(1)}[kind]
    sa.run(tiny.with_(rounds=2), **{kind: rule})
    assert f"the {kind} draws from torch's generator" in caplog.text
    assert "sa.streams.generator" in caplog.text


def test_components_that_draw_from_their_source_log_no_warning(tiny, caplog):
    for receiver in ("mac(C=auto)", "none()"):
        sa.run(tiny.with_(receiver=receiver, participation="sample(3)", server="momentum()"))
    assert "draws from" not in caplog.text
