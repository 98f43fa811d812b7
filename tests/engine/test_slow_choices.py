"""Warnings if the fastest engine does not support a model, on a CPU and on a GPU."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import stableair as sa
from helpers.engine import simulation_of
from stableair.engine import choose, selection


def dropping():
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 3))


def convolutional(*before, **options):
    return nn.Sequential(*before, nn.Conv2d(3, 3, 3, **options), nn.Flatten(), nn.LazyLinear(3))


def on_gpu(module):
    """A simulation that is on a GPU according to `choose`; its trials run on the CPU."""
    module(torch.zeros(1, 3, 8, 8))  # gives a lazy layer its shape
    sim = simulation_of(module)
    return replace(sim, start=sim.start._replace(model=sim.start.model._replace(w=torch.empty(1, device="meta"))))


def choice(module):
    return choose(on_gpu(module), "auto", "bf16", chunk=1)


@pytest.fixture
def compiler(monkeypatch):
    """A working compiler; Triton's interpreter needs none."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr("stableair.engine.kernel_layers.try_kernels", lambda device: None)


@pytest.fixture(autouse=True)
def no_earlier_warnings():
    """Forget the warnings of earlier tests: each is logged once per process."""
    selection._warn_once.cache_clear()


def test_a_model_without_fast_engine_is_logged_before_the_first_round(registries, caplog):
    @sa.model("dropping")
    def model():
        return lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, classes))

    e = sa.Experiment(clients=2, rounds=1, device="cpu", model="dropping()")
    with caplog.at_level(logging.WARNING, "stableair"):
        sa.run(e.with_(engine="reference"))
        assert not caplog.records, "the setting requests it"
        sa.run(e)
        sa.run(e.with_(seed=1))
    (warning,) = caplog.messages  # one for both runs
    assert "one client after the other: its forward pass draws from torch's generator (for example dropout)" in warning
    sa.run(e.with_(data="synthetic(samples=60, shape=(1, 8, 8), classes=3)"))
    assert len(caplog.messages) == 2, "another model has its own warning"


def test_on_a_gpu_the_choice_of_the_reference_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "stableair"):
        assert choose(on_gpu(dropping()), "auto").engine == "reference"
    assert "draws from torch's generator" in caplog.text


def test_a_model_too_large_for_a_cpu_is_logged(caplog, monkeypatch):
    sim = simulation_of(nn.Sequential(nn.Flatten(), nn.Linear(192, 5300), nn.Linear(5300, 3)))  # a million parameters
    with caplog.at_level(logging.WARNING, "stableair"):
        chosen = choose(sim, "auto")
        why = "one client after the other: the run is too short for several processes"
        assert (chosen.engine, chosen.why) == ("reference", why)
        assert not caplog.messages
        monkeypatch.setattr("stableair.engine.selection.PROCESSES_MAX_ENTRIES", 10**6)
        assert choose(sim, "auto").why == "one client after the other: 1.0 million parameters on a CPU"
    (warning,) = caplog.messages
    assert "one client after the other: 1.0 million parameters on a CPU; use a GPU, or " in warning
    monkeypatch.setattr("stableair.engine.selection.available_cores", lambda: 1)
    monkeypatch.setattr("stableair.engine.selection.PROCESSES_MAX_ENTRIES", 10**7)
    assert choose(sim, "auto").why == "one client after the other: a single core"


def test_a_layer_that_is_not_stacked_is_named():
    module = nn.Sequential(nn.Flatten(), nn.LayerNorm(192), nn.Linear(192, 3))
    chosen = choose(simulation_of(module), "auto")
    assert chosen.engine == "vmapped"
    assert "not stacked: layer 1 is a LayerNorm" in chosen.why


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"groups": 3}, "layer 0 (groups=3)"), ({"dilation": 2}, "layer 0 (dilation=(2, 2))"),
     ({"stride": (1, 2)}, "layer 0 (stride=(1, 2))"), ({"padding": "same"}, "layer 0 (padding=same)")],
)  # fmt: skip
def test_a_convolution_without_kernel_is_named(compiler, options, reason):
    chosen = choice(convolutional(**options))
    assert chosen.engine == "stacked"
    assert chosen.why.endswith(f"no kernels for {reason}")


def test_the_other_convolutions_have_kernels(compiler):
    chosen = choice(convolutional(nn.Conv2d(3, 3, 3, stride=2), groups=3))
    assert chosen.engine == "kernels"
    assert chosen.why.endswith("no kernels for layer 1 (groups=3)")


def test_a_missing_or_failing_compiler_is_named(compiler, monkeypatch):
    def fail(device):
        raise OSError("no compiler")

    monkeypatch.setattr("stableair.engine.kernel_layers.try_kernels", fail)
    assert choice(convolutional())[:2] == ("stacked", "bf16")
    assert "OSError: no compiler" in choice(convolutional()).why
    monkeypatch.setattr("stableair.engine.selection.find_spec", lambda name: None)
    assert choice(convolutional())[:2] == ("stacked", "bf16")
    assert "Triton is not installed" in choice(convolutional()).why


def test_kernels_with_wrong_results_are_not_used(compiler, monkeypatch):
    from stableair.engine import kernels

    right = kernels.conv_weight_grad_sgd
    wrong = lambda dy, x, w, copy, lr, *rest: right(dy, x, w, copy, 1.1 * lr, *rest)  # noqa: E731
    monkeypatch.setattr(kernels, "conv_weight_grad_sgd", wrong)
    chosen = choice(convolutional(stride=4))
    assert chosen.engine == "stacked"
    assert "its updates differ" in chosen.why


def test_the_memory_of_the_trials_is_released_before_the_chunk_is_chosen(monkeypatch):
    freed = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: freed.append(True))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (10**9 if freed else 0, 10**9))
    sim = replace(on_gpu(nn.Sequential(nn.Flatten(), nn.Linear(192, 3))), n=50)
    assert choose(sim, "auto", "fp32").chunk == 50
