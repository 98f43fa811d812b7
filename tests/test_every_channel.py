"""What holds for every channel: shapes, chunks, who takes part, empty rounds, the side link, going on after a stop."""

import pytest
import torch
from torch import nn

import stableair as sa
from components import EXAMPLES
from stableair.channels.kinds import channel, fading, noise
from stableair.contracts import Upload
from stableair.vector import buffers, moments

D = 37


def settings(spec):
    quiet = spec.startswith("digital")
    return {"fading": "unit()" if quiet else "rayleigh()", "noise": "none()" if quiet else "sas(alpha=1.5, tau=0.1)"}


@pytest.fixture(params=EXAMPLES["channels"])
def spec(request):
    return request.param


@pytest.fixture
def make(spec):
    parts = settings(spec)
    return lambda **others: channel.one(spec)()(
        fading=fading.one(parts["fading"])(), noise=noise.one(parts["noise"])(), **others
    )


def uploads(clients, update, stats=None, chunk=2):
    stats = torch.zeros(len(update), 0) if stats is None else stats
    rows = clients, update, *(t.to(update.device) for t in (stats, clients.float()))
    return [Upload(*(t[i : i + chunk] for t in rows)) for i in range(0, len(update), chunk)]


def test_what_is_received_has_its_shapes(make):
    link, who = make(), torch.arange(5)
    got = link.superpose(uploads(who, torch.randn(5, D)), link.draw(5, who, D, 0, 0))
    assert (got.g.shape, got.noise.shape, got.clean.shape) == ((D,), (D,), (D,))
    assert (got.g.dtype, got.noise.dtype, got.clean.dtype) == (torch.float32, torch.float32, torch.float64)
    assert (got.senders, got.divisor, got.loss.item(), got.pilot) == (5, 5, 2, None)
    assert got.g.isfinite().all()
    assert got.uses > 0


def test_a_round_is_a_function_of_its_draw_and_chunks_change_no_bit(make):
    update, who = torch.randn(7, D) * 1e3, torch.arange(7)
    link = make()
    fade = link.draw(7, who, D, 0, 3)
    first, *others = (link.superpose(uploads(who, update, chunk=chunk), fade).g for chunk in (1, 1, 3, 7))
    again = make().draw(7, who, D, 0, 3)
    for g in [*others, link.superpose(uploads(who, update), again).g]:
        assert torch.equal(g, first)


def test_only_those_who_sent_count(make):
    who, update = torch.tensor([4, 1, 3]), torch.randn(3, D)
    link = make()
    got = link.superpose(uploads(who, update), link.draw(6, who, D, 0, 0))
    assert got.senders == 3
    assert got.loss.item() == pytest.approx(8 / 3)
    torch.testing.assert_close(got.clean, update.double().mean(0))


def test_a_client_that_was_not_drawn_is_not_heard(make):
    who, update, link = torch.tensor([4, 1, 3]), torch.randn(4, D), make()
    fade = link.draw(6, who, D, 0, 0)
    stranger = link.superpose(uploads(torch.tensor([4, 1, 3, 0]), update), fade)
    assert stranger.senders == 3
    assert torch.equal(stranger.g, link.superpose(uploads(who, update[:3]), fade).g)


def test_where_nobody_sends_the_round_is_empty(make):
    link = make()
    got = link.superpose([], link.draw(3, torch.arange(0), D, 0, 0))
    assert (got.senders, got.g.shape) == (0, (D,))
    assert not got.clean.any()
    assert torch.equal(got.g, got.noise)


def test_norm_buffers_are_pooled_on_the_side_link(make):
    """Neither faded nor noisy nor quantised: the variance of all is the mean variance and that of the means."""
    norms = buffers(nn.BatchNorm1d(1))
    mean, var = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([[1.0], [2.0], [3.0]])
    link, who = make(norms=norms), torch.arange(3)
    stats = moments(torch.cat([mean, var], 1), norms)
    got = link.superpose(uploads(who, torch.randn(3, D), stats), link.draw(3, who, D, 0, 0))
    torch.testing.assert_close(got.stats, torch.tensor([3.0, 2 + 8 / 3]))


def test_a_stopped_run_goes_on_bit_for_bit(spec, tiny, tmp_path):
    experiment = tiny.with_(channel=spec, **settings(spec))
    straight = sa.run(experiment, tmp_path / "straight")
    sa.run(experiment.with_(rounds=2), tmp_path / "stopped")
    resumed = sa.run(experiment, tmp_path / "stopped", resume=True)
    for name in ("test/loss", "gradient/norm", "channel/senders", "channel/uses"):
        assert straight[name] == resumed[name]
    assert straight["channel/senders"] == [5] * 4
    assert sa.Experiment.from_json(experiment.to_json()) == experiment


@pytest.mark.gpu
def test_a_gpu_hears_what_a_cpu_hears(make, cuda):
    link, who, d = make(), torch.arange(5), 40_001
    update = torch.randn(5, d)
    here, there = (
        link.superpose(uploads(who, update.to(place)), link.draw(5, who, d, 0, 0, place)) for place in ("cpu", cuda)
    )
    assert there.g.device.type == "cuda"
    torch.testing.assert_close(there.g.cpu(), here.g, rtol=1e-4, atol=1e-4)
    assert there.uses == here.uses
