"""The stacked engine against the reference: each client's upload, then whole trajectories."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import stableair as sa
from helpers.engine import MODELS, Reused, assert_uploads_agree, network, reference, simulation_of, stacked, uploads
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.contracts import State
from stableair.data.datasets import synthetic
from stableair.engine import accelerate, choose
from stableair.engine.stacked import Stacked, Taps
from stableair.engine.trainer import StackedTrainer
from stableair.engine.vmapped import Vmapped
from stableair.errors import InputError
from stableair.models import ResNet
from stableair.participants import everybody, participants
from stableair.receivers import assemble, receiver
from stableair.vector import buffers, parameters, state


@pytest.mark.parametrize("spec", MODELS)
@pytest.mark.parametrize("sizes", [[8, 8], [6, 6], [9, 4, 2, 13, 6]], ids=["full batches", "short ones", "unequal"])
def test_uploads_equal_those_of_the_reference(spec, sizes):
    """In float64; in float32, rounding changes the trajectory of a deep network within a few steps."""
    data = synthetic(samples=sum(sizes), classes=3, shape=(3, 16, 16))
    slow = reference(network(spec, (3, 16, 16)).double(), data, sizes)
    assert_uploads_agree(slow, stacked(slow), state(slow.work.module))


@pytest.mark.parametrize("spec", ["logistic()", "mlp(width=5, depth=2)", "cnn(width=7)", "reused", "weight", "bias"])
def test_tapped_dense_layers_take_the_steps_of_the_reference(spec):
    data, sizes = synthetic(samples=34, classes=3, shape=(3, 8, 8)), [9, 4, 2, 13, 6]
    torch.manual_seed(0)
    frozen = spec in ("weight", "bias")
    module = Reused() if spec == "reused" else network("mlp(width=5)" if frozen else spec)
    for name, p in module.named_parameters():
        p.requires_grad_(not name.endswith(spec))
    slow = reference(module.double(), data, sizes)
    assert_uploads_agree(slow, stacked(slow), state(module))


def test_inputs_and_output_gradients_replace_the_gradients_of_dense_weights():
    module, taps = Reused().double(), Taps()
    weights = {name: torch.stack(2 * [p.detach()]).requires_grad_() for name, p in module.named_parameters()}
    x = torch.randn(2, 4, 3, 8, 8).double()
    loss = Stacked(module)(weights, {}, x, taps=taps).square().sum()
    assert [tap.weight.removesuffix(".weight") for tap in taps] == ["first", "narrow", "again", "again", "idle", "fc"]
    dy = torch.autograd.grad(loss, [tap.output for tap in taps], retain_graph=True, allow_unused=True)
    assert dy[4] is None, "its output is unused"
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loss, weights["fc.weight"])
    (expected,) = torch.autograd.grad(Stacked(module)(weights, {}, x).square().sum(), weights["fc.weight"])
    torch.testing.assert_close(dy[5].mT @ taps[5].x, expected)


@pytest.mark.parametrize("sizes", [[8, 8, 8], [9, 4, 2]], ids=["equal", "unequal"])
def test_crop_and_flip_equal_the_reference(sizes):
    data = synthetic(samples=sum(sizes), classes=3, shape=(3, 16, 16))
    slow = reference(network("cnn(width=8)", (3, 16, 16)).double(), data, sizes, augment="crop_flip")
    plain = replace(slow, work=replace(slow.work, augment="none"))
    assert_uploads_agree(slow, stacked(slow), state(slow.work.module))
    assert not torch.equal(uploads(slow, state(slow.work.module))[0], uploads(plain, state(slow.work.module))[0])


@settings(max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_uploads_for_any_sizes_chunks_and_batches(sizes, batch, chunk, epochs):
    data = synthetic(samples=sum(sizes), classes=3, shape=(1, 4, 4))
    slow = reference(network("cnn(width=5)", (1, 4, 4)), data, sizes, batch_size=batch, epochs=epochs, lr=0.05)
    assert_uploads_agree(slow, stacked(slow, chunk), state(slow.work.module), 1e-4, k=2)


def test_a_masked_batch_norm_equals_the_batch_norm_of_each_client():
    """Gradients and running statistics, down to a single sample; in float64, so that rounding hides no error."""
    module, sizes, b = network("batch", (3, 16, 16)).double(), [5, 3, 1, 0], 5
    n, x, y = len(sizes), torch.randn(len(sizes), 5, 3, 16, 16).double(), torch.randint(3, (len(sizes), 5))
    weight = torch.zeros(n, b).double()
    for row, size in enumerate(sizes):
        weight[row, :size] = 1 / max(size, 1)
    p = {name: t.detach().expand(n, *t.shape).clone().requires_grad_() for name, t in module.named_parameters()}
    buffers = {name: t.expand(n, *t.shape).clone() for name, t in module.named_buffers() if t.is_floating_point()}
    logits = Stacked(module)(p, buffers, x, (weight > 0).double())
    losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(n, b) * weight
    grads = torch.autograd.grad(losses.sum(), list(p.values()))
    for row, size in enumerate(sizes):
        single = copy.deepcopy(module).train()
        if size:
            F.cross_entropy(single(x[row, :size]), y[row, :size]).backward()
        for got, parameter in zip(grads, single.parameters(), strict=True):
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(got[row], expected, rtol=1e-8, atol=1e-10)
        for name, buffer in single.named_buffers():
            if buffer.is_floating_point():
                torch.testing.assert_close(buffers[name][row], buffer, rtol=1e-6, atol=1e-7)


def test_a_client_that_has_finished_does_not_overflow_in_a_deep_network():
    torch.manual_seed(0)
    module = ResNet(3, (3, 3, 3), 3, nn.BatchNorm2d, first=4)
    slow = reference(module, synthetic(samples=18, classes=3, shape=(3, 16, 16)), [16, 2], epochs=1, lr=1e-3)
    start = state(module)
    for got, expected in zip(uploads(stacked(slow), start), uploads(slow, start), strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got[1], expected[1], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("spec", ["batch", "group"])
def test_a_trajectory_with_norms_and_unequal_clients_equals_the_reference(spec):
    """In float64, over three rounds: one client has a single sample, others a short last batch."""
    module, sizes = network(spec, (3, 16, 16)).double(), [9, 4, 1]
    data = synthetic(samples=14, classes=3, shape=(3, 16, 16))
    layout, train = parameters(module), reference(module, data, sizes)
    made = build(sa.Experiment(device="cpu", noise="sas(alpha=1.5, tau=0.001)"))
    receive = assemble(receiver.parse("mac(C=0.1)"), layout, "tensor")
    channel, evaluate = replace(made.channel, norms=buffers(module)), lambda model, averaged: {}
    start = State(state(module), receive.init(state(module).w), made.server.init(state(module).w))
    sim = replace(
        made, n=3, start=start, layout=layout, train=train, channel=channel, receiver=receive, evaluate=evaluate,
        participants=participants(everybody(), sizes, seed=0),
    )  # fmt: skip
    fast = replace(sim, train=stacked(train, chunk=2))
    for a, b in zip(simulate(sim, sim.start, 3), simulate(fast, fast.start, 3), strict=True):
        torch.testing.assert_close(a.state.model.w, b.state.model.w, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a.state.model.stats, b.state.model.stats, rtol=1e-5, atol=1e-6)


def test_a_trajectory_equals_the_reference(tiny):
    e = tiny.with_(partition="dirichlet_by_class(1)", server="momentum()")
    slow, fast = build(e), accelerate(build(e))
    assert isinstance(fast.train, StackedTrainer)
    for a, b in zip(simulate(slow, slow.start, 3), simulate(fast, fast.start, 3), strict=True):
        torch.testing.assert_close(a.state.model.w, b.state.model.w, rtol=1e-4, atol=1e-5)
        assert a.metrics["channel/snr_db"] == pytest.approx(b.metrics["channel/snr_db"], abs=1e-3)


class Custom(nn.Module):
    """A custom network of known layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(16, 3, bias=False)

    def forward(self, x):
        x = F.gelu(self.norm(self.conv(x)))
        return self.fc(torch.flatten(self.pool(x + x.tanh()), 1))


class Shortcut(nn.Module):
    """A shortcut connection around the first layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(192, 3)

    def forward(self, x):
        return self.fc(F.relu(x + self.conv(x)).flatten(1))


def test_a_shortcut_around_the_first_layer():
    sim = simulation_of(Shortcut().double(), (9, 4, 7))
    assert choose(sim, "auto").engine == "stacked"
    assert_uploads_agree(sim.train, stacked(sim.train), sim.start.model)


class UnusedAndTied(nn.Module):
    """An unused layer, and two layers with tied weights."""

    def __init__(self):
        super().__init__()
        self.unused, self.first, self.second = nn.Linear(2, 2), nn.Linear(192, 192), nn.Linear(192, 192)
        self.second.weight, self.fc = self.first.weight, nn.Linear(192, 3)

    def forward(self, x):
        return self.fc(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


def test_an_unused_layer_and_tied_weights():
    sim = simulation_of(UnusedAndTied().double(), (9, 4, 7))
    choice = choose(sim, "auto")
    assert choice.engine == "vmapped", "the vmapped engine keeps tied weights"
    assert_uploads_agree(sim.train, accelerate(sim, choice).train, sim.start.model)


@pytest.mark.parametrize("program", [Stacked, Vmapped])
def test_a_frozen_layer_does_not_change(program):
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    module[1].weight.requires_grad_(False)
    slow = reference(module, synthetic(samples=20, classes=3, shape=(3, 8, 8)), [9, 4, 7])
    fast = StackedTrainer(slow.work, program(module), "fp32", 4)
    assert_uploads_agree(slow, fast, state(module))
    assert not uploads(fast, state(module))[0][:, : 192 * 5].any()


def test_a_batch_norm_over_a_single_value_is_refused():
    """One value per channel has no variance: the reference and the engine refuse it with the same error."""
    module = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3)).double()
    slow = reference(module, synthetic(samples=11, classes=3, shape=(3, 8, 8)), [4, 5, 2], epochs=1)
    errors = []
    for train in (slow, stacked(slow), StackedTrainer(slow.work, Vmapped(module), "fp32", 4)):
        with pytest.raises(InputError) as error:
            uploads(train, state(module), k=2)
        errors.append((error.value.code, error.value.fields, str(error.value)))
    assert errors[0][:2] == ("client-cannot-train", {"round": 2, "client": 1})
    assert errors[1] == errors[2] == errors[0]


def test_a_custom_network_equals_the_reference():
    torch.manual_seed(0)
    slow = reference(Custom().double(), synthetic(samples=20, classes=3, shape=(3, 8, 8)), [9, 4, 7])
    assert_uploads_agree(slow, stacked(slow), state(slow.work.module))
