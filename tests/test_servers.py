import copy
import math

import pytest
import torch

import stableair as sa
from components import EXAMPLES
from stableair.builder import build
from stableair.checks import InputError
from stableair.contracts import Update, as_update
from stableair.servers import adagrad_ota, adam_ota, fedavgm, momentum, server, sgd
from stableair.streams import generator


def vectors(rounds, d=50, seed=0):
    """What a server receives in some rounds: (rounds, d)."""
    return generator(seed, "received").normal(rounds, d).float()


def path(rule, received, w=None):
    """The model after each round, from zero: (rounds, d)."""
    w = torch.zeros_like(received[0]) if w is None else w
    return torch.stack([w := rule(w, g) for g in received])


def path_of(optimiser, received):
    """The same by one of torch's optimisers."""
    w = torch.nn.Parameter(torch.zeros_like(received[0]))
    step, seen = optimiser([w]), []
    for g in received:
        w.grad = g.clone()
        step.step()
        seen.append(w.detach().clone())
    return torch.stack(seen)


@pytest.mark.parametrize("spec", EXAMPLES["servers"])
def test_every_rule_steps_against_the_gradient_and_not_in_place(spec):
    rule = as_update(server.one(spec).with_("lr", 0.1)())
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
def test_every_rule_goes_on_from_what_it_remembers_bit_for_bit(spec):
    """What was saved stays as it was while the rule goes on."""
    received, call = vectors(6), server.one(spec)
    rule = as_update(call())
    whole = path(rule, received)
    rule = as_update(call())
    half = path(rule, received[:3])
    saved = rule.state_dict()
    kept = copy.deepcopy(saved)
    path(rule, received[3:], half[-1])
    again = as_update(call())
    again.load_state_dict(saved)
    assert torch.equal(path(again, received[3:], half[-1]), whole[3:])
    for name, value in kept.items():
        assert torch.equal(saved[name], value) if isinstance(value, torch.Tensor) else saved[name] == value
    assert all(value.dtype == torch.float32 for value in saved.values() if isinstance(value, torch.Tensor))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", EXAMPLES["servers"])
def test_every_rule_remembers_on_the_models_device(spec, cuda):
    received, call = vectors(4), server.one(spec)
    here, rule = path(as_update(call()), received), as_update(call())
    torch.testing.assert_close(path(rule, received.to(cuda)).cpu(), here)
    assert all(value.is_cuda for value in rule.state_dict().values() if isinstance(value, torch.Tensor))


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.parametrize("spec", EXAMPLES["servers"])
@pytest.mark.parametrize("participation", ["all()", "bernoulli(0.3)"])
def test_every_rule_is_resumed_in_a_run(tiny, tmp_path, spec, participation):
    """Also where rounds are silent: the server has not counted them."""
    e = tiny.with_(server=spec, participation=participation, rounds=6, engine="reference")
    whole = sa.run(e)
    assert (0 in whole["channel/senders"]) == (participation != "all()")
    sa.run(e.with_(rounds=4), tmp_path / "a")
    assert torch.equal(sa.run(e, tmp_path / "a", resume=True).state.w, whole.state.w)


def test_sgd_is_equation_4():
    w, g = torch.randn(10), torch.randn(10)
    assert torch.equal(sgd(0.03)(w, g), w - 0.03 * g)


def test_momentum_is_torchs_and_keeps_its_velocity():
    w = torch.nn.Parameter(torch.randn(5))
    flat, rule, optimiser = w.detach().clone(), momentum(0.1, beta=0.8), torch.optim.SGD([w], lr=0.1, momentum=0.8)
    for step in range(4):
        if step == 2:  # saved and restored half way
            saved, rule = rule.state_dict(), momentum(0.1, beta=0.8)
            rule.load_state_dict(saved)
        w.grad = torch.full((5,), float(step + 1))
        flat = rule(flat, w.grad)
        optimiser.step()
    torch.testing.assert_close(flat, w.detach())


def test_fedavgm_is_momentum_and_with_nesterov_torchs():
    received = vectors(8)
    assert torch.equal(path(fedavgm(0.1, beta=0.8), received), path(momentum(0.1, beta=0.8), received))
    torchs = path_of(lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.8, nesterov=True), received)
    torch.testing.assert_close(path(fedavgm(0.1, beta=0.8, nesterov=True), received), torchs)
    assert not torch.allclose(torchs, path(fedavgm(0.1, beta=0.8), received), rtol=1e-3)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("b1", [0.0, 0.7, 0.9])
@pytest.mark.parametrize("b2", [None, 0.0, 0.6])
def test_adota_is_its_formula(alpha, b1, b2):
    """Entry by entry, in Python's numbers."""
    received, lr, eps = 3 * vectors(6, d=8), 0.02, 0.1
    rule = adagrad_ota(lr, b1, alpha, eps) if b2 is None else adam_ota(lr, b1, b2, alpha, eps)
    found = path(rule, received)
    for i in range(8):
        w = D = v = 0.0
        for k, g in enumerate(received[:, i].tolist()):
            D = b1 * D + (1 - b1) * g
            v = v + abs(D) ** alpha if b2 is None else b2 * v + (1 - b2) * abs(D) ** alpha
            w -= lr * D / (v + eps) ** (1 / alpha)
            assert found[k, i].item() == pytest.approx(w, rel=1e-4, abs=1e-7)


def test_adota_has_adagrad_rmsprop_and_the_sign_as_limits():
    received, eps = vectors(8), 1e-12
    adagrad = path_of(lambda w: torch.optim.Adagrad(w, lr=0.1, eps=0), received)
    torch.testing.assert_close(path(adagrad_ota(0.1, b1=0, alpha=2, eps=eps), received), adagrad)
    rmsprop = path_of(lambda w: torch.optim.RMSprop(w, lr=0.1, alpha=0.7, eps=0), received)
    torch.testing.assert_close(path(adam_ota(0.1, b1=0, b2=0.7, alpha=2, eps=eps), received), rmsprop)
    for alpha in (1.0, 1.5, 2.0):
        found = path(adam_ota(0.1, b1=0, b2=0, alpha=alpha, eps=1e-16), received)
        torch.testing.assert_close(found, -0.1 * received.sign().cumsum(0))
    assert not torch.allclose(path(adam_ota(0.1, b1=0, b2=0.7, alpha=1.5), received), rmsprop, rtol=1e-2)


def test_the_eps_of_adota_stands_under_the_root():
    """For what is far below it a step is lr g / eps^(1/alpha)."""
    g = torch.tensor([1e-6, -2e-6])
    step = adagrad_ota(1.0, b1=0, alpha=1.5, eps=1e-3)(torch.zeros(2), g)
    torch.testing.assert_close(step, -g / 1e-3 ** (1 / 1.5), rtol=1e-4, atol=0)


def test_an_entry_that_never_moves_stays_where_it_is():
    for rule in (adagrad_ota(alpha=0.5, eps=1e-16), adam_ota(alpha=0.5, eps=1e-16)):
        assert path(rule, torch.zeros(3, 2)).tolist() == [[0.0, 0.0]] * 3


def steps(rule, rounds):
    """The length of each step."""
    w, lengths = torch.zeros(1, dtype=torch.float64), []
    for _ in range(rounds):
        lengths.append(-rule(w, torch.ones_like(w)).item())
    return lengths


def test_the_steps_decay_as_they_are_said_to():
    inverse, cosine = sgd(0.5, "inverse", over=4, floor=0.1), sgd(0.5, "cosine", over=4, floor=0.1)
    assert steps(inverse, 60) == pytest.approx([0.5 * max(0.1, 1 / (1 + k / 4)) for k in range(60)])
    half_wave = [0.05 + 0.45 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)]
    assert steps(cosine, 9) == pytest.approx(half_wave + [0.05] * 4)
    assert half_wave[0] == 0.5
    assert cosine.metrics() == {"lr": pytest.approx(0.05)}
    assert sgd(0.5, "cosine").metrics() == {"lr": None}, "before the first"


def test_plain_sgd_counts_nothing_and_is_what_it_was(tiny):
    assert as_update(sgd(0.1)).state_dict() == as_update(sgd(0.1, over=7)).state_dict() == {}
    assert sa.Experiment(server="sgd(decay=constant, over=100, floor=0.01)").id() == sa.Experiment().id()
    assert sa.Experiment(server="sgd(decay=cosine)").id() != sa.Experiment().id()


def test_to_extend_a_run_changes_nothing_in_its_schedule(tiny, tmp_path):
    e = tiny.with_(server="sgd(decay=cosine, over=5)")
    assert sa.run(e)["server/lr"] == sa.run(e.with_(rounds=8))["server/lr"][:4]
    assert sa.run(e)["server/lr"][0] == tiny.lr, "lr=None is the clients'"


@pytest.mark.parametrize(
    ("spec", "memory"),
    [
        ("momentum()", {}),
        ("momentum()", {"velocity": "fast"}),
        ("adam_ota()", {"D": torch.zeros(2), "v": torch.zeros(1, 2)}),
        ("adam_ota()", {"D": torch.zeros(2)}),
        ("sgd(decay=cosine)", {"rounds": -1}),
        ("sgd(decay=cosine)", {"rounds": 0.5}),
        ("sgd()", {"rounds": 1}),
    ],
)
def test_what_a_rule_cannot_have_remembered_is_refused(spec, memory):
    with pytest.raises(InputError) as told:
        as_update(server.one(spec)()).load_state_dict(memory)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("spec", ["momentum()", "fedavgm()", "adagrad_ota()", "adam_ota()"])
def test_another_model_than_the_one_remembered_is_named(spec):
    rule = server.one(spec)()
    rule(torch.zeros(3), torch.ones(3))
    name = spec.partition("(")[0]
    with pytest.raises(InputError, match=f"{name} remembers 3 entries: got a vector of 4"):
        rule(torch.zeros(4), torch.ones(4))


def test_the_lr_of_adota_is_its_own_and_not_the_clients(tiny):
    for payload in ("gradient", "delta"):
        assert build(tiny.with_(payload=payload, server="adam_ota()")).update.lr == 0.01


@pytest.mark.parametrize(
    "text",
    [
        "sgd(lr=0)", "sgd(lr=-1)", "sgd(lr=inf)", "momentum(beta=1.5)", "sgd(over=0)", "sgd(over=2.5)",
        "sgd(decay=cosine, floor=0)", "sgd(decay=inverse, floor=-1)", "sgd(floor=2)", "fedavgm(nesterov=1)",
        "adagrad_ota(lr=None)", "adagrad_ota(b1=1)", "adagrad_ota(alpha=0)", "adagrad_ota(alpha=2.5)",
        "adagrad_ota(eps=0)", "adam_ota(b2=1)", "adam_ota(b2=-0.1)", "adam_ota(eps=nan)",
    ],
)  # fmt: skip
def test_bad_arguments(text):
    with pytest.raises(InputError, match="must be"):
        server.one(text)()


def test_a_decay_that_is_unknown():
    with pytest.raises(InputError, match=r"server sgd.*decay: 'cosin' is unknown; did you mean 'cosine'"):
        server.one("sgd(decay=cosin)")()


def test_the_metrics_of_a_server_are_recorded(tiny, registries):
    @sa.server("telling")
    class Telling(Update):
        def apply(self, w, g):
            self.length = g.norm().item()
            return w - g

        def metrics(self):
            return {"length": self.length}

    run = sa.run(tiny.with_(server="telling()", rounds=2))
    assert all(length > 0 for length in run["server/length"])
    assert "server/length" not in sa.run(tiny.with_(rounds=1)).rounds[0]
