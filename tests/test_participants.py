import pytest
import torch

import stableair as sa
from stableair.builder import build
from stableair.engine import accelerate, choose
from stableair.participants import everybody, participants, participation
from stableair.streams import generator


def test_everybody_takes_part_those_with_the_most_samples_first():
    who = participants(everybody(), [3, 7, 3, 9, 7], seed=0)
    assert who(0).tolist() == who(5).tolist() == [3, 1, 4, 0, 2]
    assert participants(everybody(), [4, 4, 4], seed=0)(0).tolist() == [0, 1, 2], "among equals by number"


@pytest.fixture
def few(registries):
    """A rule that takes other clients in every round."""

    @participation("few")
    def few(m: int):
        return lambda n, source: source.permutation(n)[:m]

    return "few(m=2)"


def test_who_takes_part_is_a_function_of_seed_and_round(few):
    who = participants(participation.one(few)(), [1, 2, 3, 4, 5, 6], seed=3)
    rounds = [who(k).tolist() for k in range(20)]
    assert rounds == [who(k).tolist() for k in range(20)]
    assert len(set(map(tuple, rounds))) > 5
    assert all(one == sorted(one, reverse=True) for one in rounds), "in the fixed order: falling number of samples"
    drawn = generator(3, "participation", 4).permutation(6)[:2]
    assert set(rounds[4]) == set(drawn.tolist())


def test_a_round_of_few_clients_is_the_mean_of_those_that_sent(tiny, few):
    e = tiny.with_(participation=few, fading="unit()", noise="none()", receiver="none()", payload="delta")
    sim = build(e.with_(partition="dirichlet_by_class(1)"))
    (first,) = sa.simulate(sim, sim.start, 1)
    who = sim.participants(0)
    assert len(who) == 2
    (upload,) = sim.train(sim.start, 0, who)
    assert upload.clients.tolist() == who.tolist()
    torch.testing.assert_close(first.state.w, sim.start.w - upload.update.mean(0))
    assert first.metrics["train/loss"] == pytest.approx(upload.loss.double().mean().item())


def test_what_a_client_does_does_not_depend_on_who_else_takes_part(tiny, few):
    sim = build(tiny.with_(partition="dirichlet_by_class(1)"))
    (everyone,) = sim.train(sim.start, 3, torch.arange(5))
    (some,) = sim.train(sim.start, 3, torch.tensor([4, 1]))
    assert torch.equal(some.update, everyone.update[[4, 1]])


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_few_clients_are_resumed_and_accelerated_as_all_are(tiny, few, tmp_path, engine):
    e = tiny.with_(participation=few, partition="dirichlet_by_class(1)", engine=engine, rounds=6)
    whole = sa.run(e)
    sa.run(e.with_(rounds=3), tmp_path / "a")
    resumed = sa.run(e, tmp_path / "a", resume=True)
    assert torch.equal(resumed.state.w, whole.state.w)
    slow = sa.run(e.with_(engine="reference"))
    torch.testing.assert_close(whole.state.w, slow.state.w, rtol=1e-4, atol=1e-5)


NORMED = "normed()"


@pytest.fixture
def normed(registries):
    @sa.model("normed")
    def normed():
        from torch import nn

        return lambda shape, classes: nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, classes))


def test_neither_a_chunk_nor_processes_change_a_bit_of_any_sum(tiny, normed):
    """Payloads, norm buffers and losses of clients of unequal size."""
    e = tiny.with_(partition="dirichlet_by_class(1)", model=NORMED, data="synthetic(samples=90, shape=(1, 2, 2))")
    e = e.with_(batch_size=7, clients=6)
    paths = []
    for chunk in (1, 4, 6):
        sim = build(e.with_(chunk=chunk))
        paths.append(list(sa.simulate(sim, sim.start, 3)))
    how = choose(build(e), "auto")
    crew = accelerate(build(e), how._replace(engine="processes", precision="fp32", chunk=4))
    paths.append(list(sa.simulate(crew, crew.start, 3)))
    assert len(set(build(e).train.work.sizes)) > 2
    for path in paths[1:]:
        for one, other in zip(paths[0], path, strict=True):
            assert torch.equal(one.state.w, other.state.w)
            assert torch.equal(one.state.stats, other.state.stats)
            assert one.metrics == other.metrics


@pytest.mark.parametrize(
    ("who", "said"),
    [
        (torch.tensor([True, False, True, False]), "int64 of shape .m,.: got torch.bool of shape .4,."),
        (torch.tensor([0.0, 1.0]), "got torch.float32"),
        ([0, 1], "got list"),
        (torch.tensor([[0, 1]]), r"of shape \(1, 2\)"),
        (torch.tensor([1, 1, 2]), r"round 3: .* each once: got \[1, 1, 2\]"),
        (torch.tensor([9]), "clients 0 to 3, each once"),
        (torch.tensor([-1]), "clients 0 to 3, each once"),
    ],
)
def test_what_a_rule_returns_is_held_to_its_contract(who, said):
    with pytest.raises(sa.InputError, match=said):
        participants(lambda n, source: who, [1, 1, 1, 1], seed=0)(3)
