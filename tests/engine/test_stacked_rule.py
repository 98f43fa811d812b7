"""Local rules in the fast engines: the results of the reference, and the engines of custom rules."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import stableair as sa
from helpers.components import EXAMPLES
from helpers.engine import assert_uploads_agree, network, reference, simulation_of, uploads
from stableair.builder import build
from stableair.contracts import LocalRule
from stableair.data.datasets import synthetic
from stableair.engine import EngineChoice, accelerate, choose
from stableair.engine.equivalence import Trial
from stableair.engine.selection import uses_fused_steps
from stableair.engine.stacked import Stacked, Unsupported
from stableair.engine.stacked_rule import check_rule
from stableair.engine.trainer import StackedTrainer
from stableair.engine.vmapped import Vmapped
from stableair.engine.worker import StackedWorker, schedule
from stableair.errors import InputError
from stableair.models import ResNet
from stableair.training.local_rules import PLAIN_SGD, local, sgd
from stableair.vector import state

RULES = [spec for spec in EXAMPLES["local"] if spec != "sgd()"]
DATA = synthetic(samples=24, classes=3, shape=(3, 8, 8))
SIZES = [9, 4, 11]  # with short batches, and clients that finish early


def slow(spec="mlp(width=5)", rule="sgd()", sizes=SIZES, **changes):
    return reference(network(spec).double(), DATA, sizes, rule=local.one(rule)(), **changes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("program", ["stacked", "vmapped", "in groups"])
def test_every_rule_equals_the_reference(rule, program):
    """In groups: a program that mixes samples gets batches without padding."""
    train = slow(rule=rule, label_smoothing=0.1)
    module = train.work.module
    programs = {"stacked": Stacked, "vmapped": lambda m: Vmapped(m, mixes_samples=False), "in groups": Vmapped}
    fast = StackedTrainer(train.work, programs[program](module), "fp32", 2)
    start = state(module)
    for k in (0, 1):  # every round resets the memories
        assert_uploads_agree(train, fast, start, k=k)
    plain = slow(rule="sgd()", label_smoothing=0.1)
    assert not torch.allclose(uploads(plain, start)[0], uploads(train, start)[0], rtol=1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_a_client_that_has_finished_does_not_change(rule):
    """A rule with memory would change a client without a gradient; the client with the fewest samples is first."""
    train, order = slow(rule=rule), torch.tensor([1, 0, 2])
    module, start = train.work.module, state(train.work.module)
    expected, actual = (
        torch.cat([upload.update for upload in trainer(start, 0, order)])
        for trainer in (train, StackedTrainer(train.work, Stacked(module), "fp32", 3))
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("model", ["batch", "cnn(width=7)"])
@pytest.mark.parametrize("rule", ["sgd(momentum=0.9, weight_decay=0.01, clip=1)", "adam()"])
def test_rules_on_networks_with_norms_and_convolutions(model, rule):
    train = slow(model, rule, sizes=[8, 4], epochs=1)
    module = train.work.module
    assert_uploads_agree(train, StackedTrainer(train.work, Stacked(module), "fp32", 2), state(module), 1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_frozen_and_unused_parameters(rule):
    """A frozen parameter does not change; an unused parameter has a zero gradient."""

    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.idle, self.fc = nn.Linear(192, 4), nn.Linear(3, 3), nn.Linear(4, 3)
            self.first.bias.requires_grad_(False)

        def forward(self, x):
            return self.fc(torch.tanh(self.first(x.flatten(1))))

    torch.manual_seed(0)
    train = reference(Idle().double(), DATA, SIZES, rule=local.one(rule)())
    module = train.work.module
    fast = StackedTrainer(train.work, Stacked(module), "fp32", 3)
    start = state(module)
    assert_uploads_agree(train, fast, start)
    assert not uploads(fast, start)[0][:, 192 * 4 : 192 * 4 + 4].any()


def test_label_smoothing_is_in_the_loss_of_every_engine():
    train = slow(label_smoothing=0.3)
    module, start = train.work.module, state(train.work.module)
    for program in (Stacked(module), Vmapped(module)):
        assert_uploads_agree(train, StackedTrainer(train.work, program, "fp32", 3), start)
    assert not torch.allclose(uploads(train, start)[2], uploads(slow(), start)[2], rtol=1e-3)


@pytest.mark.parametrize(
    ("rule", "note"),
    [("sgd()", ""), ("sgd(momentum=0.9)", "tensor by tensor"), ("sgd(clip=1)", "vmapped"), ("adam()", "by tensor")],
)
def test_the_reason_of_the_engine_names_how_steps_are_computed(tiny, rule, note):
    choice = choose(build(tiny.with_(local=rule)), "auto")
    assert choice.engine == "stacked"
    assert note in choice.why
    assert bool(note) == ("local rule" in choice.why)


def counting(w, g, memory, lr):
    return w - lr / (1 + memory) * g, memory + 1


def branching(w, g, memory, lr):
    return (w - lr * g, memory) if g.norm() > 0.1 else (w - 2 * lr * g, memory)


def in_place(w, g, memory, lr):
    return w.sub_(lr * g), memory


def normed(w, g, memory, lr):
    return w - lr * g / g.norm(), memory


@pytest.mark.parametrize(
    ("rule", "engine"),
    [
        (LocalRule(counting, lambda w: w.new_zeros(())), "stacked"),
        (LocalRule(normed), "stacked"),
        (LocalRule(counting, lambda w: 0), "reference"),
        (LocalRule(branching), "reference"),
        (LocalRule(normed, entrywise=True), "reference"),
        (LocalRule(lambda w, g, memory, lr: (w - lr * torch.randn_like(g), memory)), "reference"),
    ],
    ids=["counter as tensor", "norm", "counter as number", "branches", "not entrywise", "random"],
)
def test_a_custom_local_rule_gets_the_fastest_engine_that_supports_it(tiny, rule, engine):
    sim = build(tiny.with_(partition="dirichlet_by_class(1)"))
    sim = replace(sim, train=replace(sim.train, work=replace(sim.train.work, rule=rule)))
    choice = choose(sim, "auto")
    assert choice.engine == engine, choice.why
    if engine == "stacked":
        assert_uploads_agree(sim.train, accelerate(sim, choice).train, sim.start.model, 1e-5)
    else:
        assert "its local rule" in choice.why
        with pytest.raises(InputError) as error:
            choose(sim, "fast")
        assert error.value.code == "no-fast-engine"
        with pytest.raises(Unsupported) as error:
            accelerate(sim, EngineChoice("stacked", "fp32", 5, ""))
        assert error.value.code == "unsupported-rule"


def test_a_rule_that_changes_its_arguments_is_not_stacked(tiny, registries):
    """In a stack it would also change the clients that have finished."""
    with pytest.raises(Unsupported):
        check_rule(LocalRule(in_place), torch.zeros(5))
    sa.local("in_place")(lambda: in_place)
    with pytest.raises(InputError) as error:
        sa.run(tiny.with_(local="in_place()"))
    assert (error.value.code, error.value.setting) == ("changed-in-place", "local")


def test_the_trial_trains_with_the_rule():
    work = replace(simulation_of(network("logistic()")).train.work, rule=sgd(momentum=0.9), label_smoothing=0.2)
    assert Trial(work, torch.float64).work.rule == work.rule
    assert Trial(work, torch.float64).work.label_smoothing == 0.2


def test_a_new_rate_discards_the_captured_graphs(monkeypatch):
    """The graphs contain the rate as a constant."""
    train = slow(lr=0.5, lr_share=lambda k: 0.5 ** (k // 2))
    worker = StackedWorker(train.work, "fp32", 3, Stacked(train.work.module))
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(worker.lr))
    plans = [schedule(train.work, k, [2, 0, 1]) for k in range(4)]
    kept = []
    for plan in plans:
        worker.graphs = worker.graphs or {3: object()}
        before = worker.graphs[3]
        worker._set_lr(plan.lr)
        kept.append(worker.graphs.get(3) is before)
    assert kept == [True, True, False, True]
    assert [plan.lr for plan in plans] == [0.5, 0.5, 0.25, 0.25]
    assert waited == [0.5], "a graph may still run"


@pytest.mark.slow  # it starts processes
def test_processes_train_with_the_rule_bit_for_bit(tiny):
    e = tiny.with_(local="fedprox(mu=0.1, momentum=0.9, clip=1)", lr_decay="cosine(over=2)", label_smoothing=0.1)
    sim = build(e)
    fast = accelerate(sim, EngineChoice("processes", "fp32", 5, "")).train
    pairs = zip(uploads(sim.train, sim.start.model, 1), uploads(fast, sim.start.model, 1), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_rule_that_cannot_be_pickled_is_not_sent_to_processes(tiny):
    sim = build(tiny)
    closure = replace(sim.train.work, rule=LocalRule(lambda w, g, memory, lr: (w - lr * g, memory)))
    with pytest.raises(Unsupported) as error:
        accelerate(replace(sim, train=replace(sim.train, work=closure)), EngineChoice("processes", "fp32", 5, ""))
    assert error.value.code == "unpicklable-model"


def test_only_plain_sgd_has_fused_steps():
    pytest.importorskip("triton", reason="Triton is not installed")
    work = reference(ResNet(3, (1,), 3, nn.BatchNorm2d, first=16), DATA, [8]).work
    assert work.rule == PLAIN_SGD
    assert uses_fused_steps(work)
    assert uses_fused_steps(replace(work, lr_share=lambda k: 0.5))
    assert not uses_fused_steps(replace(work, label_smoothing=0.1))
    assert not uses_fused_steps(replace(work, rule=sgd(momentum=0.1)))


@pytest.mark.slow  # in Triton's interpreter, where there is no GPU
def test_convolutions_by_kernels_give_their_gradients_to_the_rule():
    pytest.importorskip("triton", reason="Triton is not installed")
    from stableair.engine.kernel_layers import by_kernels

    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    train = reference(module, DATA, [4, 3], epochs=1, rule=local.one("sgd(momentum=0.9, weight_decay=0.1)")())
    fast = StackedTrainer(train.work, by_kernels(Stacked(module)), "fp32", 2)
    assert_uploads_agree(train, fast, state(module), 1e-4)
