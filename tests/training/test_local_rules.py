"""The optimisers of the local training: comparison with torch.optim, and common properties."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import stableair as sa
from helpers.components import EXAMPLES
from helpers.errors import refused
from stableair.contracts import LocalRule
from stableair.data.datasets import synthetic
from stableair.memory import tensors
from stableair.training.local_rules import PLAIN_SGD, LocalSteps, adam, adamw, as_local_rule, fedprox, local, sgd
from stableair.training.local_training import LocalTraining
from stableair.training.reference import Reference
from stableair.vector import state

LR = 0.05
TORCH_OPTIMISERS = {
    "sgd()": lambda p: torch.optim.SGD(p, LR),
    "sgd(momentum=0.9)": lambda p: torch.optim.SGD(p, LR, momentum=0.9),
    "sgd(weight_decay=0.1)": lambda p: torch.optim.SGD(p, LR, weight_decay=0.1),
    "sgd(momentum=0.9, weight_decay=0.1, nesterov=true)": lambda p: torch.optim.SGD(
        p, LR, momentum=0.9, weight_decay=0.1, nesterov=True
    ),
    "adam()": lambda p: torch.optim.Adam(p, LR),
    "adam(b1=0.5, b2=0.9, eps=0.01, weight_decay=0.1)": lambda p: torch.optim.Adam(
        p, LR, betas=(0.5, 0.9), eps=0.01, weight_decay=0.1
    ),
    "adamw()": lambda p: torch.optim.AdamW(p, LR),
    "adamw(weight_decay=0.5)": lambda p: torch.optim.AdamW(p, LR, weight_decay=0.5),
}


def gradients(steps, d=20):
    return torch.randn(steps, d, generator=torch.Generator().manual_seed(1))


def trajectory(rule, received, start=None):
    """The parameters after each step: (steps, d)."""
    rule = as_local_rule(rule)
    w = torch.linspace(-1, 1, received.shape[1]) if start is None else start
    memory, seen = rule.init(w), []
    for g in received:
        w, memory = rule.step(w, g, memory, LR)
        seen.append(w)
    return torch.stack(seen)


def torch_trajectory(optimiser, received, change=lambda w: None):
    """The same for an optimiser of torch; `change` acts on the parameter and its gradient before each step."""
    w = nn.Parameter(torch.linspace(-1, 1, received.shape[1]))
    step, seen = optimiser([w]), []
    for g in received:
        w.grad = g.clone()
        change(w)
        step.step()
        seen.append(w.detach().clone())
    return torch.stack(seen)


@pytest.mark.parametrize("spec", TORCH_OPTIMISERS)
def test_each_step_equals_that_of_torch(spec):
    received = gradients(8)
    torch.testing.assert_close(
        trajectory(local.one(spec)(), received), torch_trajectory(TORCH_OPTIMISERS[spec], received)
    )


def test_clipping_is_clip_grad_norm():
    received = gradients(8) * torch.tensor([1e-3, 10])[torch.arange(8) % 2][:, None]  # every second gradient is clipped
    expected = torch_trajectory(
        lambda p: torch.optim.SGD(p, LR, momentum=0.9, weight_decay=0.1),
        received,
        lambda w: nn.utils.clip_grad_norm_([w], 0.5),
    )
    torch.testing.assert_close(trajectory(sgd(momentum=0.9, weight_decay=0.1, clip=0.5), received), expected)


def test_fedprox_is_sgd_on_the_loss_with_its_proximal_term():
    received, start = gradients(8), torch.linspace(-1, 1, 20)

    def with_proximal_term(w):
        loss = w @ w.grad + 0.3 / 2 * (w - start).square().sum()
        w.grad = torch.autograd.grad(loss, w)[0]

    expected = torch_trajectory(lambda p: torch.optim.SGD(p, LR, momentum=0.9), received, with_proximal_term)
    torch.testing.assert_close(trajectory(fedprox(mu=0.3, momentum=0.9), received), expected)


def test_fedprox_clips_the_gradient_of_the_loss_only():
    w, start = torch.full((4,), 100.0), torch.zeros(4)
    rule = fedprox(mu=1, clip=0.5)
    new, _ = rule.step(w, torch.zeros(4), rule.init(start), LR)
    torch.testing.assert_close(new, (1 - LR) * w)


def test_arguments_without_effect_give_plain_sgd():
    """The engines have faster programs for plain SGD."""
    assert sgd() == fedprox(mu=0) == PLAIN_SGD
    assert PLAIN_SGD not in (sgd(momentum=0.1), sgd(weight_decay=0.1), sgd(clip=1), fedprox(mu=0.1), adam(), adamw())


@pytest.mark.parametrize("spec", EXAMPLES["local"])
def test_every_rule_steps_against_the_gradient_and_not_in_place(spec):
    rule = local.one(spec)()
    w, g = torch.tensor([0.01, -0.01, 0.0]), torch.tensor([5.0, -5.0, 0.0])
    memory = rule.init(w)
    before = [t.clone() for t in (w, g, *tensors(memory))]
    new, _ = rule.step(w, g, memory, LR)
    assert new[0] < w[0]
    assert new[1] > w[1]
    assert new[2] == 0
    assert (new.dtype, new.shape) == (w.dtype, w.shape)
    assert all(torch.equal(a, b) for a, b in zip(before, (w, g, *tensors(memory)), strict=True))


@pytest.mark.parametrize("spec", EXAMPLES["local"])
def test_an_entrywise_rule_is_the_same_on_a_part_of_the_vector(spec):
    rule, received = local.one(spec)(), gradients(5)
    start = torch.linspace(-1, 1, 20)
    part = trajectory(rule, received[:, 7:12], start[7:12])
    assert torch.allclose(part, trajectory(rule, received, start)[:, 7:12], rtol=1e-6) == rule.entrywise


@pytest.mark.parametrize("spec", EXAMPLES["local"])
def test_every_rule_is_the_same_in_another_process(spec):
    rule, received = local.one(spec)(), gradients(3)
    other = pickle.loads(pickle.dumps(rule))
    assert torch.equal(trajectory(other, received), trajectory(rule, received))
    assert (other == PLAIN_SGD) == (rule == PLAIN_SGD)


def client(module, rule, **changes):
    """A trainer with one client of ten samples."""
    data = synthetic(samples=10, classes=3, shape=(1, 2, 2))
    settings = {"epochs": 2, "batch_size": 5, "lr": LR, "payload": "delta", "seed": 5, "rule": rule} | changes
    return Reference(LocalTraining(module, data, [torch.arange(10)], **settings))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def update(trainer, k=0):
    return next(iter(trainer(state(network()), k, torch.tensor([0])))).update[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("spec", TORCH_OPTIMISERS)
def test_a_client_trains_like_a_loop_of_torch(spec, smoothing):
    trainer, module = client(network(), local.one(spec)(), label_smoothing=smoothing), network()
    optimiser, data = TORCH_OPTIMISERS[spec](module.parameters()), trainer.work.data.train
    loss = nn.CrossEntropyLoss(label_smoothing=smoothing)
    for batch in trainer.work.batches(trainer.work.orders(0, [0])[0]):
        optimiser.zero_grad()
        loss(module(data.x[batch]), data.y[batch]).backward()
        optimiser.step()
    torch.testing.assert_close(update(trainer), state(network()).w - state(module).w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", EXAMPLES["local"])
def test_the_memory_is_reset_in_every_round(spec):
    trainer = client(network(), local.one(spec)())
    first = update(trainer)
    update(trainer, k=1)
    assert torch.equal(update(trainer), first)


@pytest.mark.parametrize("spec", EXAMPLES["local"])
def test_frozen_parameters_do_not_change(spec):
    module = network()
    module[1].weight.requires_grad_(False)
    difference = update(client(module, local.one(spec)()))
    assert not difference[:24].any()
    assert difference[24:].any()


def test_the_payload_is_the_difference_divided_by_the_rate():
    delta, gradient = (update(client(network(), adam(), payload=payload)) for payload in ("delta", "gradient"))
    torch.testing.assert_close(gradient, delta / LR)


def test_a_memory_may_refer_to_the_arguments():
    """The trainer reuses the storage of parameters and gradients."""

    def step(w, g, memory, lr):
        before, earlier = memory
        return w - lr * (g + 0.5 * earlier) + 0.1 * (w - before), (w, g)

    def copying(w, g, memory, lr):
        new, memory = step(w, g, memory, lr)
        return new, tuple(t.clone() for t in memory)

    one, other = (
        update(client(network(), LocalRule(each, lambda w: (w, torch.zeros_like(w))))) for each in (step, copying)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (lambda w, g, memory, lr: (w.sub_(lr * g), memory), "changed-in-place"),
        (lambda w, g, memory, lr: (w - lr * g.mul_(2), memory), "changed-in-place"),
        (lambda w, g, memory, lr: (w - lr * g, memory.add_(1)), "changed-in-place"),
        (lambda w, g, memory, lr: w - lr * g, "wrong-type"),
        (lambda w, g, memory, lr: (w[:-1], memory), "wrong-shape"),
        (lambda w, g, memory, lr: (w.long(), memory), "wrong-shape"),
        (lambda w, g, memory, lr: (None, memory), "wrong-shape"),
    ],
)
def test_a_rule_that_breaks_the_contract_is_refused(step, code):
    steps = LocalSteps(LocalRule(step, torch.zeros_like), nn.Linear(2, 1, bias=False), torch.ones(2), LR)
    assert refused(code, steps, torch.ones(2)).setting == "local"


def test_a_custom_local_rule_is_a_function_a_local_rule_or_a_class(tiny, registries):
    @sa.local("signs")
    def signs(share: float = 0.1):
        """Steps of one length."""
        return lambda w, g, memory, lr: (w - lr * share * g.sign(), memory)

    @sa.local("class_of_signs")
    def class_of_signs():
        class Signs:
            entrywise = True

            def init(self, w):
                return ()

            def step(self, w, g, memory, lr):
                return w - lr * 0.1 * g.sign(), memory

        return Signs()

    assert as_local_rule(class_of_signs()).entrywise
    runs = [sa.run(tiny.with_(local=spec, engine="reference")) for spec in ("signs()", "class_of_signs()")]
    assert torch.equal(*(run.state.model.w for run in runs))
    assert refused("wrong-type", as_local_rule, 3).setting == "local"


def test_the_decay_of_adamw_does_not_depend_on_the_gradient():
    """In contrast to Adam, the decay is not divided by the size of the gradient."""
    w, big = torch.ones(2), torch.full((2,), 1e6)
    for rule, expected in ((adamw(weight_decay=1), 1 - LR - LR), (adam(weight_decay=1), 1 - LR)):
        torch.testing.assert_close(rule.step(w, big, rule.init(w), LR)[0], torch.full((2,), expected))


@pytest.mark.parametrize("payload", ["gradient", "delta"])
def test_the_default_training_keeps_its_bits(tiny, payload):
    written_out = "sgd(momentum=0, weight_decay=0, nesterov=false, clip=none)"
    e = tiny.with_(payload=payload)
    other = e.with_(local=written_out, lr_decay="constant()", label_smoothing=0)
    assert other.id() == e.id()
    assert torch.equal(sa.run(e).state.model.w, sa.run(other).state.model.w)
    slow = sa.build(e).train
    generic = replace(slow, work=replace(slow.work, rule=LocalRule(PLAIN_SGD.step)))
    start, who = state(slow.work.module), torch.arange(5)
    assert all(
        torch.equal(a.update, b.update) for a, b in zip(slow(start, 0, who), generic(start, 0, who), strict=True)
    )
