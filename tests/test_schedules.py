"""The schedule of the learning rate of the clients, which the server may follow."""

import math

import pytest
import torch

import stableair as sa
from helpers.components import EXAMPLES
from helpers.errors import refused
from stableair.builder import build
from stableair.engine import accelerate
from stableair.schedules import constant, cosine, inverse, lr_decay, share_in_round

NOISELESS = {"fading": "unit()", "noise": "none()", "receiver": "none()"}


@pytest.mark.parametrize("k", [0, 1, 5, 10, 11, 1000])
def test_the_shares_follow_their_formulas(k):
    assert constant()(k) == 1
    assert inverse(over=10, floor=0.02)(k) == max(0.02, 1 / (1 + k / 10))
    wave = 0.2 + 0.8 * (1 + math.cos(math.pi * k / 10)) / 2
    assert cosine(over=10, floor=0.2)(k) == pytest.approx(wave if k < 10 else 0.2)


@pytest.mark.parametrize("spec", EXAMPLES["lr_decays"])
def test_every_schedule_starts_with_the_full_rate_and_never_increases(spec):
    shares = [lr_decay.one(spec)()(k) for k in range(200)]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] > 0


@pytest.mark.parametrize("share", [0, -1, math.inf, math.nan, None, "half"])
def test_a_share_that_is_not_positive_is_refused(share):
    error = refused("invalid-share", share_in_round, lambda k: share, 3)
    assert (error.setting, error.fields["round"]) == ("lr_decay", 3)


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_a_round_is_trained_with_its_learning_rate(tiny, engine):
    """Round k equals a round with the rate of round k as constant rate."""

    def uploads(e, k):
        sim = build(e)
        sim = sim if engine == "reference" else accelerate(sim)
        return next(iter(sim.train(sim.start.model, k, torch.arange(5)))).update

    e = tiny.with_(lr=0.5, lr_decay="inverse(over=1)")
    for k, lr in ((0, 0.5), (1, 0.25), (3, 0.125)):
        assert torch.equal(uploads(e, k), uploads(e.with_(lr=lr, lr_decay="constant()"), k))


@pytest.mark.parametrize("server", ["sgd()", "sgd(decay=inverse, over=2)", "momentum()", "fedavgm(nesterov=true)"])
@pytest.mark.parametrize("participation", ["all()", "bernoulli(0.3)"])
def test_gradients_and_differences_give_the_same_trajectory(tiny, server, participation):
    """Also with rounds without senders: the server uses the rate of the round, not the number of its steps."""
    e = tiny.with_(lr=0.2, lr_decay="inverse(over=1)", server=server, participation=participation, **NOISELESS)
    gradient, delta = (sa.run(e.with_(payload=payload, rounds=6)) for payload in ("gradient", "delta"))
    assert (0 in gradient["channel/senders"]) == (participation != "all()")
    torch.testing.assert_close(gradient.state.model.w, delta.state.model.w, rtol=1e-4, atol=1e-6)
    plain = sa.run(e.with_(lr_decay="constant()", rounds=6)).state.model.w
    assert not torch.allclose(gradient.state.model.w, plain, rtol=1e-2)


def test_an_explicit_server_rate_does_not_follow_the_schedule(tiny):
    e = tiny.with_(lr=0.2, lr_decay="inverse(over=1)", rounds=2, **NOISELESS)
    explicit = build(e.with_(server="sgd(lr=0.2)"))
    assert [build(e).server_share(k) for k in (0, 1)] == [1.0, 0.5]
    assert [build(e.with_(payload="delta")).server_share(k) for k in (0, 1)] == [1.0, 1.0]
    assert [explicit.server_share(k) for k in (0, 1)] == [1.0, 1.0]


def test_the_interference_shrinks_with_the_servers_step(tiny):
    """The payload keeps its size in units of the gradient, and so does the SNR."""
    e = tiny.with_(lr=0.01, lr_decay="inverse(over=1)", local_epochs=1, rounds=2)
    first, later = (build(e).train.work.scale(k) * build(e).train.work.lr_in_round(k) for k in (0, 7))
    assert first == later == pytest.approx(1)


def test_a_run_with_a_schedule_is_resumed(tiny, tmp_path):
    e = tiny.with_(lr_decay="cosine(over=3)", local="sgd(momentum=0.9)", participation="bernoulli(0.5)", rounds=5)
    sa.run(e.with_(rounds=2), tmp_path / "a")
    assert torch.equal(sa.run(e, tmp_path / "a", resume=True).state.model.w, sa.run(e).state.model.w)


def test_a_custom_schedule_is_used(tiny, registries):
    @sa.lr_decay("steps")
    def steps(every: int = 2):
        """Half the rate after every few rounds."""
        return lambda k: 0.5 ** (k // every)

    assert [build(tiny.with_(lr_decay="steps()")).train.work.lr_in_round(k) / tiny.lr for k in range(5)] == [
        1, 1, 0.5, 0.5, 0.25,
    ]  # fmt: skip
