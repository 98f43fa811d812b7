"""The fast engine against the slow truth: each client's upload, then whole trajectories."""

import copy
import gc
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import stableair as sa
import stableair.engine
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.checks import InputError
from stableair.choices import PRECISIONS
from stableair.contracts import Work
from stableair.data.sets import synthetic
from stableair.engine import EngineChoice, accelerate, choose, stacked_layer
from stableair.engine.stacked import LAYERS, Stacked, Tap, Unsupported, as_vectors
from stableair.engine.trainer import StackedTrainer
from stableair.engine.vmapped import Vmapped
from stableair.engine.worker import StackedWorker, _graph_size, schedule
from stableair.evaluation import Evaluate
from stableair.local import Reference
from stableair.models import ResNet, model
from stableair.participants import everybody as all_of_them
from stableair.participants import participants
from stableair.receivers import assemble
from stableair.vector import buffers, parameters, pooled, state

MODELS = ["logistic()", "mlp(width=5, depth=2)", "cnn(width=7)", "batch", "group"]
NORMS = {"batch": nn.BatchNorm2d, "group": lambda channels: nn.GroupNorm(4, channels)}


def reference(module, data, sizes, device="cpu", **changes):
    """A trainer over clients of the given sizes."""
    parts = [part.to(device) for part in torch.arange(sum(sizes)).split(sizes)]
    settings = {"epochs": 2, "batch_size": 4, "lr": 0.03, "payload": "gradient", "seed": 3}
    return Reference(Work(module.to(device), data.to(device), parts, **settings | changes))


def built(spec, shape=(3, 8, 8), classes=3):
    """A network of the registry, or with the name of a norm a small ResNet that has it."""
    torch.manual_seed(0)
    if spec in NORMS:
        return ResNet(shape[0], (1, 2), classes, NORMS[spec], first=8)
    return model.one(spec)()(shape, classes)


def everybody(train):
    """All clients, in the order in which they are added up."""
    return participants(all_of_them(), train.work.sizes, seed=0)(0)


def uploads(train, start, k=0):
    """The uploads of a round in the order of the clients."""
    sent = (upload[:4] for upload in train(start, k, everybody(train)))  # the norm is for ranks alone
    clients, *rest = map(torch.cat, zip(*sent, strict=True))
    assert all(len(column) == len(clients) for column in rest)
    order = clients.argsort().to(rest[0].device)
    return [column[order] for column in rest]


def stacked(slow, chunk=4, precision="fp32"):
    return StackedTrainer(slow.work, Stacked(slow.work.module), precision, chunk)


def agree(slow, fast, start, tolerance=1e-9, k=0):
    for a, b in zip(uploads(slow, start, k), uploads(fast, start, k), strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * a.norm(), (a - b).norm() / a.norm()


@pytest.mark.parametrize("spec", MODELS)
@pytest.mark.parametrize("sizes", [[8, 8], [6, 6], [9, 4, 2, 13, 6]], ids=["full batches", "short ones", "unequal"])
def test_every_upload_is_the_references(spec, sizes):
    """In float64: in float32 the rounding of a deep network grows within a few steps into another trajectory."""
    data = synthetic(samples=sum(sizes), classes=3, shape=(3, 16, 16))
    slow = reference(built(spec, (3, 16, 16)).double(), data, sizes)
    agree(slow, stacked(slow), state(slow.work.module))


class Reused(nn.Module):
    """Dense layers that are called twice, one of them on the input itself and without a bias, and one for nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.narrow, self.again = nn.Linear(192, 192, bias=False), nn.Linear(192, 6), nn.Linear(6, 6)
        self.relu, self.fc, self.idle = nn.ReLU(inplace=True), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        x = self.narrow(self.first(torch.tanh(self.first(x.flatten(1)))))
        x = self.relu(self.again(self.relu(self.again(x))))
        self.idle(x)
        return self.fc(x)


@pytest.mark.parametrize("spec", ["logistic()", "mlp(width=5, depth=2)", "cnn(width=7)", "reused", "weight", "bias"])
def test_a_dense_layer_that_is_tapped_takes_the_references_steps(spec, monkeypatch):
    """As on a GPU, where the gradients of its weights are not stored."""
    data, sizes = synthetic(samples=34, classes=3, shape=(3, 8, 8)), [9, 4, 2, 13, 6]
    torch.manual_seed(0)
    frozen = spec in ("weight", "bias")
    module = Reused() if spec == "reused" else built("mlp(width=5)" if frozen else spec)
    for name, p in module.named_parameters():
        p.requires_grad_(not name.endswith(spec))
    slow = reference(module.double(), data, sizes)
    monkeypatch.setattr(stableair.engine.worker, "taps_dense", lambda device: True)
    agree(slow, stacked(slow), state(module))


def test_taps_stand_for_the_gradients_of_dense_weights():
    module, taps = Reused().double(), []
    own = {name: torch.stack(2 * [p.detach()]).requires_grad_() for name, p in module.named_parameters()}
    x = torch.randn(2, 4, 3, 8, 8).double()
    loss = Stacked(module)(own, {}, x, taps=taps).square().sum()
    assert [tap.weight.removesuffix(".weight") for tap in taps] == ["first", "narrow", "again", "again", "idle", "fc"]
    dy = torch.autograd.grad(loss, [tap.output for tap in taps], retain_graph=True, allow_unused=True)
    assert dy[4] is None, "nothing makes use of it"
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loss, own["fc.weight"])
    (expected,) = torch.autograd.grad(Stacked(module)(own, {}, x).square().sum(), own["fc.weight"])
    torch.testing.assert_close(dy[5].mT @ taps[5].x, expected)


def test_the_trial_taps_what_the_steps_will(monkeypatch):
    sim = around(Reused().double(), (9, 4, 7))
    monkeypatch.setattr(stableair.engine, "taps_dense", lambda device: True)
    assert choose(sim, "auto").engine == "stacked"
    monkeypatch.setattr(stableair.engine.stacked, "Tap", lambda weight, x, output: Tap(weight, 2 * x, output))
    assert choose(sim, "auto").engine == "vmapped", "what is tapped is wrong"


@pytest.mark.parametrize("sizes", [[8, 8, 8], [9, 4, 2]], ids=["equal", "unequal"])
def test_crop_and_flip_are_the_references(sizes):
    data = synthetic(samples=sum(sizes), classes=3, shape=(3, 16, 16))
    slow = reference(built("cnn(width=8)", (3, 16, 16)).double(), data, sizes, augment="crop_flip")
    plain = replace(slow, work=replace(slow.work, augment="none"))
    agree(slow, stacked(slow), state(slow.work.module))
    assert not torch.equal(uploads(slow, state(slow.work.module))[0], uploads(plain, state(slow.work.module))[0])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_any_sizes_chunks_and_batches(sizes, batch, chunk, epochs):
    data = synthetic(samples=sum(sizes), classes=3, shape=(1, 4, 4))
    slow = reference(built("cnn(width=5)", (1, 4, 4)), data, sizes, batch_size=batch, epochs=epochs, lr=0.05)
    agree(slow, stacked(slow, chunk), state(slow.work.module), 1e-4, k=2)


def test_a_masked_batch_norm_is_exactly_each_clients_own():
    """In float64, where nothing hides in rounding: gradients and running statistics, down to a single sample."""
    module, sizes, b = built("batch", (3, 16, 16)).double(), [5, 3, 1, 0], 5
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
        alone = copy.deepcopy(module).train()
        if size:
            F.cross_entropy(alone(x[row, :size]), y[row, :size]).backward()
        for got, parameter in zip(grads, alone.parameters(), strict=True):
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(got[row], expected, rtol=1e-8, atol=1e-10)
        for name, buffer in alone.named_buffers():
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


def test_clients_that_have_finished_take_no_work(monkeypatch):
    slow = reference(built("logistic()"), synthetic(samples=24, classes=3, shape=(3, 8, 8)), [4, 14, 6])
    real, taken = StackedWorker.step, []
    monkeypatch.setattr(StackedWorker, "step", lambda self, m: (taken.append(m), real(self, m)))
    agree(slow, stacked(slow), state(slow.work.module), 1e-5)
    assert taken == [3, 3, 2, 2, 1, 1, 1, 1], "two epochs of 4, 2 and 1 batches, the longest first"


@given(st.integers(1, 300), st.data())
def test_a_graph_has_room_for_its_clients_and_little_more(n, data):
    m = data.draw(st.integers(1, n))
    assert m <= _graph_size(m, n) <= min(n, max(1.5 * m + 1, n / 64 + 1))
    assert len({_graph_size(m, n) for m in range(1, n + 1)}) <= 12, "few graphs"


def test_what_is_laid_out_ahead_is_what_is_taken(monkeypatch):
    slow = reference(built("logistic()"), synthetic(samples=24, classes=3, shape=(3, 8, 8)), [9, 4, 11])
    made = []
    real = stableair.engine.trainer.schedule
    monkeypatch.setattr(stableair.engine.trainer, "schedule", lambda *args: (made.append(args[1:]), real(*args))[1])
    for chunk, chunks in ((2, [[2, 0], [1]]), (3, [[2, 0, 1]])):
        made.clear()
        fast = stacked(slow, chunk)
        fast._prepare(3, [2, 0, 1])
        agree(slow, fast, state(slow.work.module), 1e-5, k=3)
        assert made == [(3, clients) for clients in chunks], "the first was there"
        agree(slow, fast, state(slow.work.module), 1e-5, k=4)
        assert made[len(chunks) :] == [(4, clients) for clients in chunks], "and is not taken for another round"


def test_the_schedule_is_the_references_batches():
    slow = reference(built("logistic()"), synthetic(samples=33, classes=3, shape=(3, 8, 8)), [9, 4, 11, 9])
    plan = schedule(slow.work, 5, [3, 2, 0, 1])
    assert plan.steps == [6, 6, 6, 2]
    assert plan.active == [4, 4, 3, 3, 3, 3], "the client with few samples stands last"
    for row, n in enumerate([3, 2, 0, 1]):
        for t, batch in enumerate(slow.work.batches(slow.work.orders(5, [n])[0])):
            there = plan.weight[t, row] > 0
            assert plan.index[t, row][there].tolist() == slow.work.parts[n][batch].tolist()
            assert plan.weight[t, row].sum() == pytest.approx(1)
        assert plan.weight[int(plan.steps[row]) :, row].sum() == 0
    assert schedule(slow.work, 5, [1]).index.shape == (2, 1, 4), "room for the largest batch of anybody"


@pytest.mark.parametrize("spec", ["batch", "group"])
def test_a_trajectory_with_norms_and_unequal_clients_is_the_references(spec):
    """In float64, over three rounds: one client has a single sample, others a short last batch."""
    module, sizes = built(spec, (3, 16, 16)).double(), [9, 4, 1]
    data = synthetic(samples=14, classes=3, shape=(3, 16, 16))
    layout, train = parameters(module), reference(module, data, sizes)
    made = build(sa.Experiment(device="cpu", noise="sas(alpha=1.5, tau=0.001)"))
    receive = assemble("mac(C=0.1)", layout, "tensor")
    channel, evaluate = replace(made.channel, norms=buffers(module)), lambda state: {}
    sim = replace(
        made, n=3, start=state(module), layout=layout, train=train, channel=channel, receive=receive, evaluate=evaluate,
        participants=participants(all_of_them(), sizes, seed=0),
    )  # fmt: skip
    fast = replace(sim, train=stacked(train, chunk=2))
    for a, b in zip(simulate(sim, sim.start, 3), simulate(fast, fast.start, 3), strict=True):
        torch.testing.assert_close(a.state.w, b.state.w, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a.state.stats, b.state.stats, rtol=1e-5, atol=1e-6)


def test_a_trajectory_is_the_references(tiny):
    e = tiny.with_(partition="dirichlet_by_class(1)", server="momentum()")
    slow, fast = build(e), accelerate(build(e))
    assert isinstance(fast.train, StackedTrainer)
    for a, b in zip(simulate(slow, slow.start, 3), simulate(fast, fast.start, 3), strict=True):
        torch.testing.assert_close(a.state.w, b.state.w, rtol=1e-4, atol=1e-5)
        assert a.metrics["channel/snr_db"] == pytest.approx(b.metrics["channel/snr_db"], abs=1e-3)


class Odd(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 3)

    def forward(self, x):
        return self.fc(x.flatten(1)) if x.sum() > 0 else self.fc(-x.flatten(1))


class Own(nn.Module):
    """A user's own network out of known parts."""

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
    """The input itself meets what was made of it."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(192, 3)

    def forward(self, x):
        return self.fc(F.relu(x + self.conv(x)).flatten(1))


def test_a_shortcut_around_the_first_layer():
    sim = around(Shortcut().double(), (9, 4, 7))
    assert choose(sim, "auto").engine == "stacked"
    agree(sim.train, stacked(sim.train), sim.start)


class Odds(nn.Module):
    """A layer that nothing calls, and two with the same weights."""

    def __init__(self):
        super().__init__()
        self.unused, self.first, self.second = nn.Linear(2, 2), nn.Linear(192, 192), nn.Linear(192, 192)
        self.second.weight, self.fc = self.first.weight, nn.Linear(192, 3)

    def forward(self, x):
        return self.fc(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


def test_a_layer_that_nothing_calls_and_tied_weights():
    sim = around(Odds().double(), (9, 4, 7))
    choice = choose(sim, "auto")
    assert choice.engine == "vmapped", "which ties weights as the module does"
    agree(sim.train, accelerate(sim, choice).train, sim.start)


class Tricky(nn.Module):
    """A network that is not what its outputs at the start make of it."""

    def __init__(self, trick):
        super().__init__()
        self.first, self.fc, self.trick = nn.Linear(192, 5), nn.Linear(5, 3), trick
        self.share, self.scale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        if self.trick == "blocked":
            with torch.no_grad():
                h = self.first(x.flatten(1))
        else:
            h = self.first(x.flatten(1))
        if self.trick == "mixed later":
            h = h + self.share * h.mean(0)
        if self.trick == "mixed in full batches" and len(h) >= 4:
            h = h - h.mean(0)
        if self.trick == "counted":
            self.calls += 1
        return self.fc(torch.tanh(h)) * self.scale


@pytest.mark.parametrize(
    ("trick", "engine"),
    [("none", "vmapped"), ("blocked", "vmapped"), ("hooked", "reference"), ("hooked later", "reference"),
     ("mixed later", "reference"), ("mixed in full batches", "reference"), ("counted", "reference")],
)  # fmt: skip
def test_a_trial_sees_more_than_the_outputs_at_the_start(trick, engine):
    module = Tricky(trick).double()
    if trick == "hooked":
        module.first.weight.register_hook(lambda grad: -grad)
    if trick == "hooked later":
        module.first.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", -p.grad))
    sim = around(module, (9, 4, 7))
    choice = choose(sim, "auto")
    assert choice.engine == engine
    assert module.calls == 0, "and leaves no trace"
    agree(sim.train, accelerate(sim, choice).train, sim.start)


def test_a_blocked_gradient_is_not_stacked():
    class Blocked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.fc = nn.Linear(192, 5), nn.Linear(5, 3)

        def forward(self, x):
            with torch.no_grad():
                h = self.first(x.flatten(1)).relu()
            return self.fc(h)

    sim = around(Blocked().double(), (9, 4, 7))
    choice = choose(sim, "auto")
    assert choice.engine == "vmapped"
    fast = accelerate(sim, choice).train
    agree(sim.train, fast, sim.start)
    assert not uploads(fast, sim.start)[0][:, : 192 * 5].any()


@pytest.mark.parametrize("program", [Stacked, Vmapped])
def test_a_frozen_layer_stays_as_it_is(program):
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    module[1].weight.requires_grad_(False)
    slow = reference(module, synthetic(samples=20, classes=3, shape=(3, 8, 8)), [9, 4, 7])
    fast = StackedTrainer(slow.work, program(module), "fp32", 4)
    agree(slow, fast, state(module))
    assert not uploads(fast, state(module))[0][:, : 192 * 5].any()


def test_a_batch_norm_over_a_single_number():
    """Where the reference refuses it; its gradient is zero, and its running variance moves to zero."""
    module = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3)).double()
    slow = reference(module, synthetic(samples=4, classes=3, shape=(3, 8, 8)), [2, 2], batch_size=1, epochs=1)
    update, stats, loss = uploads(stacked(slow), state(module))
    assert update.isfinite().all()
    assert not update[:, : 3 * 4 * 64].any()
    variances = pooled(stats, buffers(module))[:, 4:]
    torch.testing.assert_close(variances, torch.full_like(variances, 0.81))
    assert loss.isfinite().all()


def test_a_users_own_network():
    torch.manual_seed(0)
    slow = reference(Own().double(), synthetic(samples=20, classes=3, shape=(3, 8, 8)), [9, 4, 7])
    agree(slow, stacked(slow), state(slow.work.module))


def test_which_networks_have_convolutions_for_the_kernels():
    pytest.importorskip("triton", reason="Triton is not installed")
    grouped = nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.Flatten(), nn.Linear(108, 3))
    expected = {"cnn(width=7)": True, "batch": True, "group": True, "mlp(width=5)": False, "logistic()": False}
    assert {spec: stableair.engine._has_kernels(Stacked(built(spec))) for spec in expected} == expected
    assert not stableair.engine._has_kernels(Stacked(grouped))
    assert not stableair.engine._has_kernels(Vmapped(built("cnn(width=7)"))), "which is not stacked"


class Crossed(nn.Module):
    """What it makes of a sample depends on the others."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.fc(x + x.mean(0))


class Attentive(nn.Module):
    """A network of layers that are not stacked."""

    def __init__(self):
        super().__init__()
        self.query, self.norm, self.fc = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = x.flatten(1, 2)
        return self.fc(self.norm(x + torch.softmax(self.query(x) @ x.transpose(1, 2), -1) @ x).mean(1))


class Doubled(nn.Module):
    """Another network in training than in evaluation."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 3)

    def forward(self, x):
        y = self.fc(x.flatten(1))
        return y - 3 * y if self.training else y - y


def around(module, sizes=(8,)):
    """A simulation with that module for a model."""
    train = reference(module, synthetic(samples=sum(sizes), classes=3, shape=(3, 8, 8)), list(sizes))
    return replace(build(sa.Experiment(device="cpu")), train=train, n=len(sizes), start=state(module))


@pytest.mark.parametrize(
    ("module", "stacking", "vmapping"),
    [
        (nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 3)), "layer 1 is a Dropout", "random operation"),
        (
            nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.Flatten(), nn.Linear(192, 3)),
            "layer 0 is a BatchNorm2d with momentum=None",
            "it changes its buffers",
        ),
        (Odd(), "its code cannot be traced", "data-dependent control flow"),
        (nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 8, 0.0, batch_first=True), nn.Flatten(),
                       nn.Linear(192, 3)), "layer 1 is a Transf|other axes", "vmapped it fails"),
        (Crossed(), "it takes a mean over the axes 0", "depends on the others in the batch"),
    ],
    ids=["dropout", "momentum", "control flow", "no batching rule", "coupled samples"],
)  # fmt: skip
def test_what_cannot_be_trained_side_by_side_is_named(module, stacking, vmapping):
    sim = around(module)
    with pytest.raises(InputError, match=f"engine fast cannot take this model: .*({stacking}).*; and .*{vmapping}"):
        choose(sim, "fast")
    choice = choose(sim, "auto")
    assert choice.engine == "reference"
    assert vmapping in choice.why, "and it says why"


def test_what_stacked_gives_something_else_is_not_stacked():
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).double()
    module[1].register_forward_hook(lambda layer, inputs, output: 2 * output)  # which a traced program does not see
    sim = around(module, (9, 4, 7))
    choice = choose(sim, "auto")
    assert choice.engine == "vmapped"
    agree(sim.train, accelerate(sim, choice).train, sim.start)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(192, 3)),
         "layer 0 is a Conv2d with padding_mode=circular"),
        (nn.Sequential(nn.Flatten(), nn.LayerNorm(192), nn.Linear(192, 3)), "layer 1 is a LayerNorm"),
        (Attentive(), r"it calls .transpose"),
        (Doubled().eval(), "it calls sub"),
    ],
    ids=["padding", "layer norm", "attention", "training mode"],
)  # fmt: skip
def test_what_cannot_be_stacked_is_vmapped(module, said):
    with pytest.raises(Unsupported, match=said):
        Stacked(module)
    sim = around(module.double(), (9, 4, 7))
    choice = choose(sim, "auto")
    assert choice.engine == "vmapped"
    agree(sim.train, accelerate(sim, choice).train, sim.start)


@pytest.fixture
def layers():
    """Whatever a test makes known is forgotten after it."""
    before = dict(LAYERS)
    yield LAYERS
    LAYERS.clear()
    LAYERS.update(before)


class Gain(nn.Module):
    """A user's own layer, with a parameter of another name and a norm over its features."""

    def __init__(self):
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.linspace(0.5, 2, 192)), nn.LayerNorm(192)

    def forward(self, x):
        return self.gain * self.inner(x)


def stacked_gain(layer, x, n, own, mask):
    x = as_vectors(n, x)
    x = (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True, unbiased=False) + layer.inner.eps).rsqrt()
    gain, weight, bias = (own[key][:, None].to(x.dtype) for key in ("gain", "inner.weight", "inner.bias"))
    return gain * (weight * x + bias)


def test_a_layer_of_ones_own_is_stacked_once_it_is_known(layers):
    sim = around(nn.Sequential(nn.Flatten(), Gain(), nn.Linear(192, 3)).double(), (9, 4, 7))
    assert choose(sim, "auto").engine == "vmapped"
    assert stacked_layer(Gain)(stacked_gain) is stacked_gain
    choice = choose(sim, "auto")
    assert choice.engine == "stacked"
    agree(sim.train, accelerate(sim, choice).train, sim.start)


def test_a_known_layer_that_is_wrong_is_not_stacked(layers):
    sim = around(nn.Sequential(nn.Flatten(), Gain(), nn.Linear(192, 3)).double(), (9, 4, 7))
    stacked_layer(Gain)(lambda layer, x, *rest: 1.1 * stacked_gain(layer, x, *rest))
    with pytest.raises(Unsupported, match="stacked it gives something else, or other gradients"):
        accelerate(sim, EngineChoice("stacked", "fp32", 3, ""))
    assert choose(sim, "auto").engine == "vmapped"


class Centred(nn.Module):
    """A layer that mixes the samples of a batch."""

    def forward(self, x):
        return x - x.mean(0)


def stacked_centred(layer, x, n, own, mask):
    x = as_vectors(n, x)
    there = x.new_ones(x.shape[:2]) if mask is None else mask
    return x - (x * there[..., None]).sum(1, keepdim=True) / there.sum(1).clamp(min=1)[:, None, None]


@pytest.mark.parametrize("declared", [True, False])
def test_a_layer_that_mixes_samples_gets_the_mask_or_is_not_stacked(layers, declared):
    """Batches are short here: a place without a sample must not count."""
    sim = around(nn.Sequential(nn.Flatten(), nn.Linear(192, 5), Centred(), nn.Linear(5, 3)).double(), (9, 4, 7))
    stacked_layer(Centred, mixes_samples=declared)(stacked_centred)
    choice = choose(sim, "auto")
    assert choice.engine == ("stacked" if declared else "reference")
    agree(sim.train, accelerate(sim, choice).train, sim.start)


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ((nn.Linear,), "the stacked layer Linear is already registered"),
        ((nn.ReLU,), "the stacked layer ReLU is already registered"),
        ((Centred, nn.Conv2d), "the stacked layer Conv2d is already registered"),
        ((), "stacked_layer needs classes of layers, .*: got None"),
        ((stacked_gain,), "stacked_layer needs classes of layers, .*: got <function stacked_gain"),
        ((int,), "stacked_layer needs classes of layers, .*: got <class 'int'>"),
    ],
    ids=["known", "elementwise", "one of two", "none", "a function", "no layer"],
)
def test_what_cannot_be_made_a_stacked_layer(layers, kinds, said):
    before = dict(LAYERS)
    with pytest.raises(InputError, match=said):
        stacked_layer(*kinds)(stacked_gain)
    assert before == LAYERS, "nothing was made known"


def test_a_cell_of_a_notebook_may_register_its_layer_again(layers):
    first, second = (lambda layer, x, n, own, mask: x for _ in range(2))
    first.__module__ = second.__module__ = "__main__"
    for function in (first, second):
        stacked_layer(Centred)(function)
    assert LAYERS[Centred].function is second


def test_what_is_chosen_on_a_cpu(tiny, monkeypatch):
    monkeypatch.setattr(stableair.engine, "_cores", lambda: 2)
    sim = build(tiny.with_(batch_size=1))  # twelve samples and five epochs a client: sixty steps
    assert choose(sim, "auto")[:3] == ("stacked", "fp32", 5)
    assert choose(sim, "fast", chunk=2)[:3] == ("stacked", "fp32", 2)
    middle = replace(sim, start=sim.start._replace(w=torch.empty(6_600_000)))
    assert choose(middle, "auto", rounds=1).engine == "reference", "not worth the start of the processes"
    assert choose(middle, "auto", rounds=1000).engine == "processes"
    quick = replace(middle, train=Reference(replace(sim.train.work, epochs=1, batch_size=6)))
    assert choose(quick, "auto", rounds=10**6).engine == "reference", "too few steps to hand an update over for"
    large = replace(sim, start=sim.start._replace(w=torch.empty(11_000_000)))
    assert choose(large, "auto", rounds=1000).engine == "reference"
    assert choose(large, "fast").engine == "processes"
    dropping = nn.Sequential(nn.Dropout(0.5), sim.train.work.module)
    noisy = replace(middle, train=Reference(replace(sim.train.work, module=dropping)))
    assert choose(noisy, "fast").engine == "processes", "which take any module"
    monkeypatch.setattr(stableair.engine, "_cores", lambda: 1)
    assert choose(middle, "auto", rounds=1000).engine == "reference"
    with pytest.raises(InputError, match="engine fast has nothing for a model of this size on a single core"):
        choose(middle, "fast")


def test_what_is_refused(tiny):
    sim = build(tiny)
    for engine in ("auto", "fast"):
        with pytest.raises(InputError, match="precision must be fp32 on a CPU: got bf16"):
            choose(sim, engine, "bf16")
    for known in ({}, {"chunk": 2}, {"work": sim.train.work}, {"work": 1, "chunk": 2}):
        plain = lambda state, k, clients: iter(())  # noqa: E731
        plain.__dict__.update(known)
        for engine in (accelerate, lambda sim: choose(sim, "auto")):
            with pytest.raises(InputError, match="an engine needs a trainer with its work and its chunk: got function"):
                engine(replace(sim, train=plain))
    with pytest.raises(InputError, match="engine: 'stackd' is unknown; did you mean 'stacked'"):
        accelerate(sim, EngineChoice("stackd", "fp32", 5, ""))
    for loop in ("reference", "processes"):
        with pytest.raises(InputError, match=f"engine {loop} computes in fp32: got precision tf32"):
            accelerate(sim, EngineChoice(loop, "tf32", 5, ""))
    with pytest.raises(InputError, match="engine=reference computes in fp32: leave out precision=bf16"):
        sa.run(tiny.with_(engine="reference", precision="bf16"))
    with pytest.raises(
        InputError, match="engine kernels cannot take this model: it has no convolution that our kernels compute"
    ):
        accelerate(sim, EngineChoice("kernels", "bf16", 5, ""))
    with pytest.raises(InputError, match="engine kernels computes in bf16: got precision tf32"):
        accelerate(sim, EngineChoice("kernels", "tf32", 5, ""))


def test_the_evaluation_rounds_as_the_training_does(tiny):
    sim = build(tiny)
    for precision in PRECISIONS:
        assert accelerate(sim, EngineChoice("stacked", precision, 5, "")).evaluate.precision == precision


def test_an_accelerated_simulation_is_accelerated_anew(tiny):
    """The work says what is computed, whoever computed it so far."""
    sim = build(tiny)
    low = accelerate(sim, EngineChoice("stacked", "bf16", 2, ""))
    for kind in ("reference", "stacked", "processes"):
        again, once = (accelerate(s, EngineChoice(kind, "fp32", 3, "")) for s in (low, sim))
        assert type(again.train) is type(once.train)
        assert (again.train.chunk, again.evaluate.precision) == (3, "fp32")
        for a, b in zip(uploads(again.train, sim.start), uploads(once.train, sim.start), strict=True):
            assert torch.equal(a, b)


def test_a_trainer_of_ones_own_is_accelerated(tiny):
    class Trainer:
        work, chunk = build(tiny).train.work, 2

        def __call__(self, state, k, clients):
            yield from Reference(self.work, self.chunk)(state, k, clients)

    sim = replace(build(tiny), train=Trainer())
    agree(sim.train, accelerate(sim).train, sim.start, 1e-5)


def test_a_simulation_with_an_evaluation_of_its_own_is_accelerated(tiny):
    own = lambda state: {"test/loss": 1.0}  # noqa: E731
    assert accelerate(replace(build(tiny), evaluate=own)).evaluate is own


def test_processes_do_what_the_loop_does_bit_for_bit(tiny):
    sim = build(tiny.with_(partition="dirichlet_by_class(1)"))
    fast = accelerate(sim, EngineChoice("processes", "fp32", 2, "")).train
    for k in (0, 3):
        expected, got = uploads(replace(sim.train, chunk=2), sim.start, k), uploads(fast, sim.start, k)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert [len(u.clients) for u in fast(sim.start, 0, sim.participants(0))] == [2, 2, 1]


def test_a_worker_that_has_gone_is_one_line(tiny):
    fast = accelerate(build(tiny), EngineChoice("processes", "fp32", 2, "")).train
    list(fast(build(tiny).start, 0, torch.arange(5)))
    for process in fast._pool.processes:
        process.kill()
        process.join()
    with pytest.raises(InputError, match="a worker process has ended: for lack of memory, or"):
        list(fast(build(tiny).start, 1, torch.arange(5)))


def test_whatever_fails_in_a_worker_is_named(tiny):
    sim = build(tiny)
    wrong = Reference(replace(sim.train.work, parts=[torch.tensor([0, 10**6])] * 2))
    fast = accelerate(replace(sim, train=wrong, n=2), EngineChoice("processes", "fp32", 2, "")).train
    with pytest.raises(InputError, match="round 0: a worker process failed: IndexError: "):
        list(fast(sim.start, 0, torch.arange(2)))


def test_what_a_worker_refuses_reaches_the_parent(tiny):
    sim = build(tiny)
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3))
    single = Reference(replace(sim.train.work, module=module, parts=[torch.arange(4), torch.arange(1)]))
    with pytest.raises(InputError, match="round 2: client 1 cannot train: Expected more than 1 value per channel"):
        fast = accelerate(replace(sim, train=single, n=2), EngineChoice("processes", "fp32", 2, "")).train
        list(fast(state(module), 2, torch.arange(2)))


PARENT = """
import sys, torch, stableair as sa
from dataclasses import replace
from stableair.engine import EngineChoice, accelerate
from stableair.builder import build
if __name__ == "__main__":
    e = sa.Experiment(data="synthetic(samples=20, shape=(1, 2, 2))", clients=2, device="cpu")
    sim = accelerate(build(e), EngineChoice("processes", "fp32", 2, ""))
    list(sim.train(sim.start, 0, torch.arange(sim.n)))
    print(*[process.pid for process in sim.train._pool.processes], flush=True)
    if sys.argv[1] == "stay":
        sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["leave", "killed"])
def test_the_workers_end_with_their_parent(tmp_path, end):
    (tmp_path / "parent.py").write_text(PARENT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, str(tmp_path / "parent.py"), "stay" if end == "killed" else "go"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as parent:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) >= 1
        if end == "killed":
            parent.kill()
        parent.wait(timeout=30)
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("asked", [{"engine": "fast"}, {"precision": "fp32"}, {"engine": "auto"}])
def test_a_resumed_run_goes_on_as_it_began_whatever_fits_now(tiny, tmp_path, monkeypatch, asked):
    sa.run(tiny.with_(rounds=2, **asked), tmp_path / "a")
    monkeypatch.setattr(stableair.engine, "CPU_CHUNK", 2)
    told = []
    sa.run(tiny.with_(**asked), tmp_path / "a", resume=True, on_start=told.append)
    assert told[0]["chunk"] == 5
    sa.run(tiny.with_(rounds=5, chunk=3, **asked), tmp_path / "a", resume=True, on_start=told.append)
    assert (told[1]["chunk"], told[1]["engine"]) == (3, "stacked"), "unless it is asked for something else"


def test_another_chunk_is_no_other_engine(tiny, tmp_path):
    told = []
    sa.run(tiny.with_(rounds=1, engine="reference"), tmp_path / "a")
    sa.run(tiny.with_(chunk=3), tmp_path / "a", resume=True, on_start=told.append)
    assert (told[0]["engine"], told[0]["chunk"]) == ("reference", 3)


def test_a_run_says_how_it_is_computed_and_a_resumed_one_goes_on_so(tiny, tmp_path):
    told = []
    slow = tiny.with_(engine="reference", chunk=2)
    sa.run(slow.with_(rounds=2), tmp_path / "a", on_start=told.append)
    resumed = sa.run(tiny, tmp_path / "a", resume=True, on_start=told.append)  # engine=auto would be another one here
    assert [(how["engine"], how["chunk"]) for how in told] == [("reference", 2)] * 2
    whole = sa.run(slow)
    assert torch.equal(resumed.state.w, whole.state.w)
    assert resumed["test/loss"] == whole["test/loss"]
    assert [e["engine"] for e in record_of(tmp_path / "a")] == ["reference", "reference"]


def record_of(folder):
    import json

    return json.loads((folder / "environment.json").read_text())


def test_the_chunk_does_not_change_a_run_beyond_rounding(tiny):
    one, all_ = (sa.run(tiny.with_(engine="fast", chunk=chunk)) for chunk in (1, 5))
    torch.testing.assert_close(one.state.w, all_.state.w, rtol=1e-5, atol=1e-6)


def scarce(monkeypatch, most=2):
    """No memory for more than that many clients; returns how many were tried."""
    real, asked = StackedWorker.__call__, []

    def worker(self, state, plan, clients):
        asked.append(len(clients))
        if len(self.loss) > most:
            raise torch.cuda.OutOfMemoryError
        return real(self, state, plan, clients)

    monkeypatch.setattr(StackedWorker, "__call__", worker)
    return asked


def test_a_chunk_that_memory_has_halved_is_recorded_and_kept(tiny, tmp_path, monkeypatch):
    scarce(monkeypatch)
    with pytest.warns(UserWarning, match="out of memory: 2 clients at a time"):
        sa.run(tiny.with_(rounds=2), tmp_path / "a")
    monkeypatch.undo()
    assert [e["chunk"] for e in record_of(tmp_path / "a")] == [2]
    told = []
    sa.run(tiny, tmp_path / "a", resume=True, on_start=told.append)
    assert (told[0]["chunk"], told[0]["why"]) == (2, "as the rounds before")


def test_out_of_memory_elsewhere_is_one_line(tiny, monkeypatch):
    monkeypatch.setattr(Evaluate, "__call__", lambda *_: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError()))
    with pytest.raises(InputError, match="the device is out of memory; chunk=2 needs less"):
        sa.run(tiny)


def test_out_of_memory_halves_the_chunk_and_repeats_it(tiny, monkeypatch):
    fast = accelerate(build(tiny), EngineChoice("stacked", "fp32", 4, "")).train
    asked = scarce(monkeypatch)
    start = build(tiny).start
    with pytest.warns(UserWarning, match="out of memory: 2 clients at a time from here on"):
        got = uploads(fast, start)
    assert asked == [4, 2, 2, 1], "nothing is done twice, nobody left out"
    assert len(fast._worker.loss) == 2, "and its memory is given back"
    monkeypatch.undo()
    expected = uploads(accelerate(build(tiny), EngineChoice("stacked", "fp32", 2, "")).train, start)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    scarce(monkeypatch, most=0)
    with pytest.warns(UserWarning), pytest.raises(InputError, match="too little memory for one client"):
        list(fast(start, 0, torch.arange(5)))


def test_without_the_engine_everything_works_slowly(tmp_path):
    package = Path(sa.__file__).parent
    shutil.copytree(package, tmp_path / "stableair", ignore=shutil.ignore_patterns("engine", "__pycache__"))
    code = (
        "import stableair as sa\n"
        "e = sa.Experiment(data='synthetic(samples=20, shape=(1, 2, 2))', clients=2, rounds=1, device='cpu')\n"
        "print(len(sa.run(e, on_start=lambda how: print(how['why']))))\n"
        "try: sa.run(e.with_(engine='fast'))\n"
        "except sa.InputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.stdout.splitlines() == [
        "there is no other", "1", "engine fast is not there: this installation has no stableair.engine",
    ], done.stderr  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("spec", MODELS)
@pytest.mark.parametrize("sizes", [[8, 8, 8], [9, 4, 2, 13, 6]], ids=["equal", "unequal"])
def test_on_a_gpu_every_upload_is_the_references(cuda, spec, sizes):
    data = synthetic(samples=sum(sizes), classes=3, shape=(3, 16, 16))
    slow = reference(built(spec, (3, 16, 16)).double(), data, sizes, device=cuda)
    agree(slow, stacked(slow), state(slow.work.module))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "update", "rest"), [("fp32", 1e-5, 1e-6), ("tf32", 0.1, 1e-3), ("bf16", 0.3, 1e-2)]
)
@pytest.mark.parametrize("spec", MODELS)
def test_on_a_gpu_one_step_is_as_exact_as_the_precision(cuda, spec, precision, update, rest):
    """Losses and norm buffers closely; a gradient jumps where rounding carries an entry over the kink of a relu."""
    data = synthetic(samples=24, classes=3, shape=(3, 16, 16))
    slow = reference(built(spec, (3, 16, 16)), data, [8, 8, 8], device=cuda, batch_size=8, epochs=1, lr=0.1)
    start = state(slow.work.module)
    pairs = zip(
        uploads(slow, start), uploads(stacked(slow, precision=precision), start), (update, rest, rest), strict=True
    )
    for a, b, tolerance in pairs:
        assert (a - b).norm() <= tolerance * a.norm(), (a - b).norm() / a.norm()


@pytest.mark.gpu
def test_on_a_gpu_a_resnet_has_kernels_unless_they_do_not_run(cuda, tiny, monkeypatch):
    sim = build(tiny.with_(device=cuda, model="resnet18()", data="synthetic(samples=60, classes=3, shape=(3, 8, 8))"))
    assert choose(sim, "auto")[:2] == ("kernels", "bf16")
    assert choose(sim, "auto", "tf32")[:2] == ("stacked", "tf32")
    broken = lambda device: (_ for _ in ()).throw(OSError("no compiler"))  # noqa: E731
    monkeypatch.setattr("stableair.engine.convolution.try_kernels", broken)
    assert choose(sim, "auto")[:2] == ("stacked", "bf16")
    assert "our kernels do not run on it: OSError: no compiler" in choose(sim, "auto").why


@pytest.mark.gpu
def test_on_a_gpu_memory_that_does_not_suffice_is_used_by_fewer_clients(cuda, tiny):
    data = "synthetic(samples=200, classes=3, shape=(3, 16, 16))"
    sim = build(tiny.with_(device=cuda, model="resnet18()", data=data, clients=20, local_epochs=1))
    fast = accelerate(sim, EngineChoice("stacked", "fp32", 20, "")).train
    gc.collect()  # what other tests have left
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2.5 * 2**30) / total)
    try:
        with pytest.warns(UserWarning, match="out of memory: 10 clients at a time"):
            made = [n for upload in fast(sim.start, 0, torch.arange(20)) for n in upload.clients.tolist()]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sorted(made) == list(range(20))


@pytest.mark.gpu
def test_on_a_gpu_a_trajectory_in_fp32_is_the_references(cuda, tiny):
    data = "synthetic(samples=60, classes=3, shape=(1, 8, 8))"
    e = tiny.with_(device=cuda, data=data, model="cnn(width=8)", partition="dirichlet_by_class(1)", precision="fp32")
    slow, fast = build(e), accelerate(build(e), choose(build(e), "fast", "fp32"))
    for a, b in zip(simulate(slow, slow.start, 3), simulate(fast, fast.start, 3), strict=True):
        torch.testing.assert_close(a.state.w, b.state.w, rtol=1e-3, atol=1e-4)
        assert a.metrics["test/loss"] == pytest.approx(b.metrics["test/loss"], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[8, 8, 8], [9, 4, 2, 13, 6]], ids=["equal", "unequal"])
def test_on_a_gpu_what_cannot_be_stacked_is_vmapped(cuda, sizes):
    data = synthetic(samples=sum(sizes), classes=3, shape=(3, 8, 8))
    train = reference(Attentive().double(), data, sizes, device=cuda)
    sim = replace(build(sa.Experiment(device=cuda)), train=train, n=len(sizes), start=state(train.work.module))
    choice = choose(sim, "auto")
    assert choice[:2] == ("vmapped", "fp32")
    agree(train, accelerate(sim, choice).train, sim.start)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["cnn(width=8)", "batch"])
def test_on_a_gpu_crop_and_flip_are_the_references(cuda, spec):
    data = synthetic(samples=24, classes=3, shape=(3, 16, 16))
    slow = reference(built(spec, (3, 16, 16)).double(), data, [8, 9, 7], device=cuda, augment="crop_flip")
    agree(slow, stacked(slow), state(slow.work.module))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "engine"), [("mlp(width=4)", "stacked"), ("cnn(width=8)", "kernels"), ("resnet18()", "kernels")]
)
def test_on_a_gpu_a_resumed_run_equals_an_uninterrupted_one(cuda, tiny, tmp_path, model, engine):
    data = "synthetic(samples=60, classes=3, shape=(1, 8, 8))"
    e = tiny.with_(device=cuda, model=model, data=data, partition="dirichlet_by_class(1)")
    sa.run(e.with_(rounds=2), tmp_path / "a")
    resumed, whole = sa.run(e, tmp_path / "a", resume=True), sa.run(e)
    assert record_of(tmp_path / "a")[0]["engine"] == engine, "which auto takes"
    assert torch.equal(resumed.state.w, whole.state.w)
