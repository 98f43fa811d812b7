import math

import pytest
import torch

import stableair as sa
from helpers.components import EXAMPLES, RepeatedServer
from stableair.builder import build
from stableair.contracts import ServerRule
from stableair.errors import InputError
from stableair.memory import tensors
from stableair.servers import adagrad_ota, adam_ota, as_server_rule, fedavgm, momentum, server, sgd
from stableair.streams import generator


def vectors(rounds, d=50, seed=0):
    """The received vectors of some rounds: (rounds, d)."""
    return generator(seed, "received").normal(rounds, d).float()


def trajectory(rule, received, w=None):
    """The model after each round, from zero: (rounds, d)."""
    rule = rule if isinstance(rule, RepeatedServer) else RepeatedServer(rule)
    w = torch.zeros_like(received[0]) if w is None else w
    return torch.stack([w := rule(w, g) for g in received])


def torch_trajectory(optimiser, received):
    """The model after each step of an optimiser of torch."""
    w = torch.nn.Parameter(torch.zeros_like(received[0]))
    step, seen = optimiser([w]), []
    for g in received:
        w.grad = g.clone()
        step.step()
        seen.append(w.detach().clone())
    return torch.stack(seen)


@pytest.mark.parametrize("spec", EXAMPLES["servers"])
def test_every_rule_steps_against_the_gradient_and_not_in_place(spec):
    rule = RepeatedServer(server.one(spec).with_("lr", 0.1)())
    for _ in range(3):
        w, g = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -0.5, 0.0])
        out = rule(w, g)
        assert out[0] < 1
        assert out[1] > 2
        assert out[2] == 3
        assert (out.dtype, out.shape) == (torch.float32, (3,))
        assert w.tolist() == [1.0, 2.0, 3.0]
        assert g.tolist() == [0.5, -0.5, 0.0]


@pytest.mark.parametrize("spec", EXAMPLES["servers"])
def test_every_rule_continues_from_its_memory_bit_for_bit(spec):
    received, rule = vectors(6), RepeatedServer(server.one(spec)())
    whole = trajectory(rule.rule, received)
    half = trajectory(rule, received[:3])
    continued = RepeatedServer(rule.rule)
    continued.memory = rule.memory
    assert torch.equal(trajectory(rule, received[3:], half[-1]), whole[3:])
    assert torch.equal(trajectory(continued, received[3:], half[-1]), whole[3:]), "the rule itself has no memory"
    assert all(t.dtype == torch.float32 for t in tensors(rule.memory))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", EXAMPLES["servers"])
def test_the_memory_is_on_the_models_device(spec, cuda):
    received, call = vectors(4), server.one(spec)
    rule = RepeatedServer(call())
    torch.testing.assert_close(trajectory(rule, received.to(cuda)).cpu(), trajectory(call(), received))
    assert all(t.is_cuda for t in tensors(rule.memory))


@pytest.mark.parametrize("spec", EXAMPLES["servers"])
@pytest.mark.parametrize("participation", ["all()", "bernoulli(0.3)"])
def test_every_rule_is_resumed_in_a_run(tiny, tmp_path, spec, participation):
    """Also with rounds without senders, which the server does not count."""
    e = tiny.with_(server=spec, participation=participation, rounds=6, engine="reference")
    whole = sa.run(e)
    assert (0 in whole["channel/senders"]) == (participation != "all()")
    sa.run(e.with_(rounds=4), tmp_path / "a")
    assert torch.equal(sa.run(e, tmp_path / "a", resume=True).state.model.w, whole.state.model.w)


def test_sgd_is_equation_4():
    w, g = torch.randn(10), torch.randn(10)
    assert torch.equal(sgd(0.03)(w, g), w - 0.03 * g)


def test_momentum_equals_that_of_torch():
    w = torch.nn.Parameter(torch.randn(5))
    flat, rule = w.detach().clone(), RepeatedServer(momentum(0.1, beta=0.8))
    optimiser = torch.optim.SGD([w], lr=0.1, momentum=0.8)
    for step in range(4):
        w.grad = torch.full((5,), float(step + 1))
        flat = rule(flat, w.grad)
        optimiser.step()
    torch.testing.assert_close(flat, w.detach())


def test_fedavgm_equals_momentum_and_nesterov_momentum_of_torch():
    received = vectors(8)
    assert torch.equal(trajectory(fedavgm(0.1, beta=0.8), received), trajectory(momentum(0.1, beta=0.8), received))
    expected = torch_trajectory(lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.8, nesterov=True), received)
    torch.testing.assert_close(trajectory(fedavgm(0.1, beta=0.8, nesterov=True), received), expected)
    assert not torch.allclose(expected, trajectory(fedavgm(0.1, beta=0.8), received), rtol=1e-3)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("b1", [0.0, 0.7, 0.9])
@pytest.mark.parametrize("b2", [None, 0.0, 0.6])
def test_adota_follows_its_formula(alpha, b1, b2):
    """Entry by entry, in Python floats."""
    received, lr, eps = 3 * vectors(6, d=8), 0.02, 0.1
    rule = adagrad_ota(lr, b1, alpha, eps) if b2 is None else adam_ota(lr, b1, b2, alpha, eps)
    found = trajectory(rule, received)
    for i in range(8):
        w = D = v = 0.0
        for k, g in enumerate(received[:, i].tolist()):
            D = b1 * D + (1 - b1) * g
            v = v + abs(D) ** alpha if b2 is None else b2 * v + (1 - b2) * abs(D) ** alpha
            w -= lr * D / (v + eps) ** (1 / alpha)
            assert found[k, i].item() == pytest.approx(w, rel=1e-4, abs=1e-7)


def test_adota_has_adagrad_rmsprop_and_the_sign_as_limits():
    received, eps = vectors(8), 1e-12
    adagrad = torch_trajectory(lambda w: torch.optim.Adagrad(w, lr=0.1, eps=0), received)
    torch.testing.assert_close(trajectory(adagrad_ota(0.1, b1=0, alpha=2, eps=eps), received), adagrad)
    rmsprop = torch_trajectory(lambda w: torch.optim.RMSprop(w, lr=0.1, alpha=0.7, eps=0), received)
    torch.testing.assert_close(trajectory(adam_ota(0.1, b1=0, b2=0.7, alpha=2, eps=eps), received), rmsprop)
    for alpha in (1.0, 1.5, 2.0):
        found = trajectory(adam_ota(0.1, b1=0, b2=0, alpha=alpha, eps=1e-16), received)
        torch.testing.assert_close(found, -0.1 * received.sign().cumsum(0))
    assert not torch.allclose(trajectory(adam_ota(0.1, b1=0, b2=0.7, alpha=1.5), received), rmsprop, rtol=1e-2)


def test_the_eps_of_adota_is_under_the_root():
    """For entries far below eps, a step is lr g / eps^(1/alpha)."""
    g = torch.tensor([1e-6, -2e-6])
    step = adagrad_ota(1.0, b1=0, alpha=1.5, eps=1e-3)(torch.zeros(2), g)
    torch.testing.assert_close(step, -g / 1e-3 ** (1 / 1.5), rtol=1e-4, atol=0)


def test_entries_without_gradient_do_not_change():
    for rule in (adagrad_ota(alpha=0.5, eps=1e-16), adam_ota(alpha=0.5, eps=1e-16)):
        assert trajectory(rule, torch.zeros(3, 2)).tolist() == [[0.0, 0.0]] * 3


def steps(rule, rounds):
    """The length of each step."""
    w, repeated = torch.zeros(1, dtype=torch.float64), RepeatedServer(rule)
    return [-repeated(w, torch.ones_like(w)).item() for _ in range(rounds)]


def test_the_steps_decay_as_documented():
    inverse, cosine = sgd(0.5, "inverse", over=4, floor=0.1), sgd(0.5, "cosine", over=4, floor=0.1)
    assert steps(inverse, 60) == pytest.approx([0.5 * max(0.1, 1 / (1 + k / 4)) for k in range(60)])
    half_wave = [0.05 + 0.45 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)]
    assert steps(cosine, 9) == pytest.approx(half_wave + [0.05] * 4)
    assert half_wave[0] == 0.5
    assert cosine.apply(torch.zeros(1), torch.ones(1), 9)[2] == {"lr": pytest.approx(0.05)}


def test_plain_sgd_has_no_memory_and_the_former_id(tiny):
    assert as_server_rule(sgd(0.1)).init(torch.zeros(2)) == ()
    assert build(tiny).start.server == ()
    assert sa.Experiment(server="sgd(decay=constant, over=100, floor=0.01)").id() == sa.Experiment().id()
    assert sa.Experiment(server="sgd(decay=cosine)").id() != sa.Experiment().id()


def test_extending_a_run_does_not_change_its_schedule(tiny, tmp_path):
    e = tiny.with_(server="sgd(decay=cosine, over=5)")
    assert sa.run(e)["server/lr"] == sa.run(e.with_(rounds=8))["server/lr"][:4]
    assert sa.run(e)["server/lr"][0] == tiny.lr, "lr=None is the rate of the clients"


def test_the_rate_of_adota_does_not_depend_on_that_of_the_clients(tiny):
    for payload in ("gradient", "delta"):
        sim = build(tiny.with_(payload=payload, server="adam_ota(b1=0, b2=0, eps=1e-16)"))
        assert sim.server(torch.zeros(1), torch.ones(1)).item() == pytest.approx(-0.01)


@pytest.mark.parametrize("wrong", [3, None, ServerRule, "sgd()"])
def test_objects_other_than_server_rules_are_refused(wrong):
    with pytest.raises(InputError) as error:
        as_server_rule(wrong)
    assert (error.value.code, error.value.setting) == ("wrong-type", "server")


@pytest.mark.parametrize(
    "text",
    [
        "sgd(lr=0)", "sgd(lr=-1)", "sgd(lr=inf)", "momentum(beta=1.5)", "sgd(over=0)", "sgd(over=2.5)",
        "sgd(decay=cosine, floor=0)", "sgd(decay=inverse, floor=-1)", "sgd(floor=2)", "fedavgm(nesterov=1)",
        "adagrad_ota(lr=None)", "adagrad_ota(b1=1)", "adagrad_ota(alpha=0)", "adagrad_ota(alpha=2.5)",
        "adagrad_ota(eps=0)", "adam_ota(b2=1)", "adam_ota(b2=-0.1)", "adam_ota(eps=nan)",
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(text):
    with pytest.raises(InputError) as error:
        server.one(text)()
    assert error.value.code in ("out-of-range", "wrong-type")
    assert f"{error.value.fields['name']}=" in text


def test_an_unknown_decay_is_refused():
    with pytest.raises(InputError) as error:
        server.one("sgd(decay=cosin)")()
    assert (error.value.code, error.value.fields["name"]) == ("unknown-value", "decay")


def test_the_metrics_of_a_server_are_recorded(tiny, registries):
    @sa.server("with_metrics")
    class WithMetrics:
        def init(self, like):
            return ()

        def apply(self, w, g, memory):
            return w - g, memory, {"length": g.norm().item()}

    run = sa.run(tiny.with_(server="with_metrics()", rounds=2))
    assert all(length > 0 for length in run["server/length"])
    assert "server/length" not in sa.run(tiny.with_(rounds=1)).rounds[0]


@pytest.mark.parametrize("metrics", [None, 3, {"length": "long"}, {"length": object()}])
def test_metrics_that_are_no_numbers_are_refused(tiny, registries, metrics):
    sa.server("with_metrics")(lambda: ServerRule(lambda w, g, memory: (w - g, memory, metrics)))
    with pytest.raises(InputError) as error:
        sa.run(tiny.with_(server="with_metrics()", rounds=2))
    assert (error.value.code, error.value.setting) == ("wrong-type", "server")


@pytest.mark.parametrize("result", [None, torch.zeros(3), (torch.zeros(3), ())])
def test_a_rule_that_does_not_return_three_values_is_refused(tiny, registries, result):
    sa.server("short")(lambda: ServerRule(lambda w, g, memory: result))
    with pytest.raises(InputError) as error:
        sa.run(tiny.with_(server="short()", rounds=2))
    assert (error.value.code, error.value.setting) == ("wrong-type", "server")
