import math

import pytest
import torch

import stableair as sa
from helpers.components import EXAMPLES
from helpers.runs import recorded_metrics
from stableair.builder import build
from stableair.channels.flat import Flat
from stableair.contracts import Upload
from stableair.engine import accelerate, choose
from stableair.participants import bernoulli, divisor, dropout, everybody, participants, participation, sample
from stableair.streams import generator


def test_all_clients_participate_in_decreasing_order_of_samples():
    who = participants(everybody(), [3, 7, 3, 9, 7], seed=0)
    assert who(0).tolist() == who(5).tolist() == [3, 1, 4, 0, 2]
    assert participants(everybody(), [4, 4, 4], seed=0)(0).tolist() == [0, 1, 2], (
        "with equal numbers of samples, in ascending order"
    )


@pytest.fixture
def few(registries):
    """A rule that selects m random clients in every round."""

    @participation("few")
    def few(m: int):
        return lambda n, source: source.permutation(n)[:m]

    return "few(m=2)"


def test_participation_is_a_function_of_seed_and_round(few):
    who = participants(participation.one(few)(), [1, 2, 3, 4, 5, 6], seed=3)
    rounds = [who(k).tolist() for k in range(20)]
    assert rounds == [who(k).tolist() for k in range(20)]
    assert len(set(map(tuple, rounds))) > 5
    assert all(one == sorted(one, reverse=True) for one in rounds), (
        "in the fixed order: by decreasing number of samples"
    )
    drawn = generator(3, "participation", 4).permutation(6)[:2]
    assert set(rounds[4]) == set(drawn.tolist())


def test_a_round_of_few_clients_is_the_mean_of_their_payloads(tiny, few):
    e = tiny.with_(participation=few, fading="unit()", noise="none()", receiver="none()", payload="delta")
    sim = build(e.with_(partition="dirichlet_by_class(1)"))
    (first,) = sa.simulate(sim, sim.start, 1)
    who = sim.participants(0)
    assert len(who) == 2
    (upload,) = sim.train(sim.start.model, 0, who)
    assert upload.clients.tolist() == who.tolist()
    torch.testing.assert_close(first.state.model.w, sim.start.model.w - upload.update.mean(0))
    assert first.metrics["train/loss"] == pytest.approx(upload.loss.double().mean().item())


def test_local_training_does_not_depend_on_other_clients(tiny, few):
    sim = build(tiny.with_(partition="dirichlet_by_class(1)"))
    (everyone,) = sim.train(sim.start.model, 3, torch.arange(5))
    (some,) = sim.train(sim.start.model, 3, torch.tensor([4, 1]))
    assert torch.equal(some.update, everyone.update[[4, 1]])


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_a_run_with_sampled_clients_is_resumed_and_accelerated(tiny, few, tmp_path, engine):
    e = tiny.with_(participation=few, partition="dirichlet_by_class(1)", engine=engine, rounds=6)
    whole = sa.run(e)
    sa.run(e.with_(rounds=3), tmp_path / "a")
    resumed = sa.run(e, tmp_path / "a", resume=True)
    assert torch.equal(resumed.state.model.w, whole.state.model.w)
    slow = sa.run(e.with_(engine="reference"))
    torch.testing.assert_close(whole.state.model.w, slow.state.model.w, rtol=1e-4, atol=1e-5)


NORMED = "normed()"


@pytest.fixture
def normed(registries):
    @sa.model("normed")
    def normed():
        from torch import nn

        return lambda shape, classes: nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, classes))


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_neither_a_chunk_nor_processes_change_a_bit_of_any_sum(tiny, normed, processes):
    """Payloads, norm buffers and losses of clients of unequal size."""
    e = tiny.with_(partition="dirichlet_by_class(1)", model=NORMED, data="synthetic(samples=90, shape=(1, 2, 2))")
    e = e.with_(batch_size=7, clients=6)
    trajectories = []
    for chunk in (1, 4, 6):
        sim = build(e.with_(chunk=chunk))
        trajectories.append(list(sa.simulate(sim, sim.start, 3)))
    if processes:
        choice = choose(build(e), "auto")
        sim = accelerate(build(e), choice._replace(engine="processes", precision="fp32", chunk=4))
        trajectories.append(list(sa.simulate(sim, sim.start, 3)))
    assert len(set(build(e).train.work.sizes)) > 2
    for trajectory in trajectories[1:]:
        for one, other in zip(trajectories[0], trajectory, strict=True):
            assert torch.equal(one.state.model.w, other.state.model.w)
            assert torch.equal(one.state.model.stats, other.state.model.stats)
            assert one.metrics == other.metrics


@pytest.mark.parametrize(
    ("who", "code"),
    [
        (torch.tensor([True, False, True, False]), "wrong-shape"),
        (torch.tensor([0.0, 1.0]), "wrong-shape"),
        ([0, 1], "wrong-shape"),
        (torch.tensor([[0, 1]]), "wrong-shape"),
        (torch.tensor([1, 1, 2]), "unknown-clients"),
        (torch.tensor([9]), "unknown-clients"),
        (torch.tensor([-1]), "unknown-clients"),
    ],
)
def test_a_rule_with_an_invalid_result_is_refused(who, code):
    with pytest.raises(sa.InputError) as error:
        participants(lambda n, source: who, [1, 1, 1, 1], seed=0)(3)
    assert error.value.code == code


@pytest.mark.parametrize("spec", EXAMPLES["participations"])
@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_every_rule_is_resumed_bit_for_bit(tiny, tmp_path, spec, engine):
    e = tiny.with_(participation=spec, receiver="mac(C=auto)", server="momentum()", blocks="layer", rounds=6)
    e = e.with_(partition="dirichlet_by_class(1)", engine=engine)
    whole = sa.run(e)
    sa.run(e.with_(rounds=3), tmp_path / "a")
    resumed = sa.run(e, tmp_path / "a", resume=True)
    assert torch.equal(resumed.state.model.w, whole.state.model.w)
    assert recorded_metrics(resumed) == recorded_metrics(whole)
    senders = [len(build(e).participants(k)) for k in range(6)]
    assert whole["channel/senders"] == senders


@pytest.mark.parametrize("spec", EXAMPLES["participations"])
def test_fading_and_batches_do_not_depend_on_the_participation_rule(tiny, spec):
    """The fading, interference and batches are those of a round with all clients."""
    everyone, some = build(tiny), build(tiny.with_(participation=spec))
    for k in range(4):
        who = some.participants(k)
        d = len(some.start.model.w)
        fade_of_all, fade = (sim.channel.draw(5, sim.participants(k), d, 0, k) for sim in (everyone, some))
        assert torch.equal(fade.xi, fade_of_all.xi)
        assert torch.equal(fade.h, fade_of_all.h[who]), "clients of equal size are in ascending order"
        updates = torch.cat([u.update for u in everyone.train(everyone.start.model, k, torch.arange(5))])
        for upload in some.train(some.start.model, k, who) if len(who) else ():
            assert torch.equal(upload.update, updates[upload.clients])


@pytest.mark.parametrize("of", ["sample(5)", "bernoulli(1)", "bernoulli(1, expected=true)", "dropout(0)"])
def test_a_participation_rule_that_selects_all_clients_equals_all(tiny, of):
    e = tiny.with_(partition="dirichlet_by_class(1)")
    one, other = sa.run(e), sa.run(e.with_(participation=of))
    assert torch.equal(one.state.model.w, other.state.model.w)
    assert recorded_metrics(one) == recorded_metrics(other)


def drawn(rule, n, rounds):
    """1 for each participating client: (rounds, n)."""
    selected = torch.zeros(rounds, n, dtype=torch.float64)
    for k in range(rounds):
        who = rule(n, generator(0, "participation", k))
        assert len(who.unique()) == len(who)
        selected[k, who] = 1
    return selected


def near(values, expected, variance, rounds, errors=5):
    """Whether means over rounds equal their expected value, within `errors` standard errors."""
    return bool(((values - expected).abs() < errors * math.sqrt(variance / rounds)).all())


def test_a_sample_contains_each_client_and_each_pair_equally_often():
    m, n, rounds = 3, 7, 3000
    selected = drawn(sample(m), n, rounds)
    assert (selected.sum(1) == m).all()
    share, pair = m / n, m * (m - 1) / (n * (n - 1))
    assert near(selected.mean(0), share, share * (1 - share), rounds)
    together = (selected.T @ selected / rounds)[~torch.eye(n, dtype=torch.bool)]
    assert near(together, pair, pair * (1 - pair), rounds), "without replacement: less often than by chance"
    assert not near(together, share**2, pair * (1 - pair), rounds)
    assert (drawn(sample(4), n, 50) >= selected[:50]).all(), "a larger sample contains the smaller one"


@pytest.mark.parametrize(("rule", "share"), [(bernoulli(0.3), 0.3), (dropout(0.7), 0.3)])
def test_participation_and_loss_are_independent(rule, share):
    n, rounds = 6, 3000
    selected = drawn(rule, n, rounds)
    assert near(selected.mean(0), share, share * (1 - share), rounds)
    together = (selected.T @ selected / rounds)[~torch.eye(n, dtype=torch.bool)]
    assert near(together, share**2, share**2, rounds)
    again = (selected[1:] * selected[:-1]).mean(0)
    assert near(again, share**2, share**2, rounds), "rounds are independent, too"


def test_the_loss_of_a_client_does_not_depend_on_the_selected_clients():
    lost = [drawn(dropout(0.4, of=of), 6, 200) for of in ("all()", "sample(3)", "bernoulli(0.5)")]
    for of, selected in zip((sample(3), bernoulli(0.5)), lost[1:], strict=True):
        assert torch.equal(selected, drawn(of, 6, 200) * lost[0])


@pytest.mark.parametrize(
    ("spec", "factor"),
    [
        ("bernoulli(0.2, expected=true)", 1.0),
        ("dropout(0.5, of='bernoulli(0.4, expected=true)')", 1.0),
        ("bernoulli(0.2)", 1 - 0.8**4),  # rounds without clients have no step
    ],
)
def test_division_by_the_expected_number_is_unbiased(spec, factor):
    """The mean of the received vector over many rounds, compared with the mean of all clients."""
    n, rounds, rule = 4, 1000, participation.one(spec)()
    unit, silent = lambda n, source: torch.ones(n), lambda d, source: torch.zeros(d)
    channel = Flat(unit, silent, divisor=divisor(rule, n))
    updates = torch.tensor([[1.0, -3.0], [2.0, 0.0], [5.0, 1.0], [0.0, -2.0]])
    received = torch.zeros(rounds, 2, dtype=torch.float64)
    for k in range(rounds):
        who = rule(n, generator(1, "participation", k))
        upload = Upload(who, updates[who], torch.zeros(len(who), 0), torch.zeros(len(who)))
        received[k] = channel.superpose([upload], channel.draw(n, who, 2, 1, k)).g
    assert near(received.mean(0), factor * updates.mean(0), received.var(0).max().item(), rounds)
    assert (rounds**-0.5 * received.std(0) < 0.1).all(), "precise enough to distinguish the two divisors"


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_the_stated_divisor_reaches_the_channel(tiny, engine):
    """One step from the same model with the same clients: its length changes by actual / expected clients."""
    e = tiny.with_(fading="unit()", noise="none()", receiver="none()", rounds=1, engine=engine)
    specs = "bernoulli(0.5)", "bernoulli(0.5, expected=true)"
    trajectories, start = [sa.run(e.with_(participation=spec)) for spec in specs], build(e).start.model.w
    senders = trajectories[0]["channel/senders"][0]
    assert senders == trajectories[1]["channel/senders"][0]
    torch.testing.assert_close(
        trajectories[1].state.model.w - start,
        (trajectories[0].state.model.w - start) * senders / 2.5,
        rtol=1e-3,
        atol=1e-6,
    )
    assert trajectories[1]["gradient/norm"][0] == pytest.approx(
        trajectories[0]["gradient/norm"][0] * senders / 2.5, rel=1e-5
    )
    assert trajectories[1]["train/loss"] == trajectories[0]["train/loss"], "the loss is the mean over the senders"


def test_a_rule_states_its_divisor_or_none():
    assert divisor(everybody(), 5) is divisor(sample(2), 5) is divisor(bernoulli(0.5), 5) is None
    assert divisor(bernoulli(0.5, expected=True), 5) == 2.5
    assert divisor(dropout(0.2, of="bernoulli(0.5, expected=true)"), 5) == 2.0
    assert divisor(dropout(0.2), 5) is None
    odd = type("Odd", (), {"divisor": lambda self, n: 0})()
    with pytest.raises(sa.InputError) as error:
        divisor(odd, 5)
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", "the divisor of the participation")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("sample(0)", ("out-of-range", "m")),
        ("sample(2.5)", ("wrong-type", "m")),
        ("bernoulli(0)", ("out-of-range", "q")),
        ("bernoulli(1.5)", ("out-of-range", "q")),
        ("bernoulli(0.5, expected=1)", ("wrong-type", "expected")),
        ("dropout(1)", ("out-of-range", "p")),
        ("dropout(-0.1)", ("out-of-range", "p")),
        ("dropout(nan)", ("out-of-range", "p")),
        ("dropout(0.1, of='some()')", ("unknown-component", "some")),
        ("dropout(0.1, of='sample(n=3)')", ("unknown-argument", "n")),
        ("dropout(0.1, of='sample(0)')", ("out-of-range", "m")),
        ("dropout(0.1, of=3)", ("not-a-spec", None)),
        ("dropout(0.1, of='dropout(0.2)')", ("not-nestable", "dropout")),
        ("dropout(0.1, of=sample(3))", ("unquoted-spec", "of")),
    ],
)
def test_bad_rules_are_refused_when_the_experiment_is_made(spec, expected):
    with pytest.raises(sa.InputError) as error:
        sa.Experiment(participation=spec)
    assert (error.value.code, error.value.fields.get("name")) == expected
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", ["sample(6)", "dropout(0.5, of='sample(6)')"])
def test_sampling_more_clients_than_exist_is_refused_by_build(tiny, spec, tmp_path):
    with pytest.raises(sa.InputError) as error:
        sa.run(tiny.with_(participation=spec), tmp_path / "a")
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", "m")
    assert not (tmp_path / "a").exists()
    build(tiny.with_(participation=spec, clients=6))


def test_a_nested_rule_is_written_as_text_and_read_again():
    e = sa.Experiment(participation="dropout(0.5, of='sample(3)')")
    assert e.participation == "dropout(p=0.5, of='sample(m=3)')"
    assert sa.Experiment.from_record(e.to_record()) == sa.Experiment.from_toml(e.to_toml()) == e
    changed = e.with_(**{"participation.of": "bernoulli(0.5)"})
    assert changed.participation == "dropout(p=0.5, of='bernoulli(q=0.5, expected=False)')"


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "ahead"), [("all()", 1), ("sample(2)", 0)])
def test_batches_of_the_next_round_are_prepared_if_its_clients_are_known(tiny, cuda, spec, ahead):
    sim = accelerate(build(tiny.with_(participation=spec, device=cuda, seed=1)))  # successive rounds differ in clients
    for k in range(4):
        who = sim.participants(k)
        list(sim.train(sim.start.model, k, who))
        assert list(sim.train._prepared) == [(k + (ahead if k else 0), tuple(who.tolist()))]
