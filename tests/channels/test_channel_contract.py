"""Properties of every channel: shapes, chunks, participants, empty rounds, side link, declared settings, resuming."""

import pytest
import torch
from torch import nn

import stableair as sa
from helpers.components import EXAMPLES
from stableair.builder import build
from stableair.channels.assembly import ABSENT, used_settings
from stableair.channels.registries import channel, fading, noise
from stableair.contracts import Upload
from stableair.errors import InputError
from stableair.vector import buffers, moments

D = 37
REGISTRIES = {"fading": fading, "noise": noise}


def settings(spec):
    quiet = spec.startswith("digital")
    return {"fading": "unit()" if quiet else "rayleigh()", "noise": "none()" if quiet else "sas(alpha=1.5, tau=0.1)"}


@pytest.fixture(params=EXAMPLES["channels"])
def spec(request):
    return request.param


@pytest.fixture
def make(spec):
    call, specs = channel.one(spec), settings(spec)
    parts = {name: REGISTRIES[name].one(text)() for name, text in specs.items() if name in used_settings(call)}
    return lambda **others: call()(**parts, **others)


def uploads(clients, update, stats=None, chunk=2):
    stats = torch.zeros(len(update), 0) if stats is None else stats
    rows = clients, update, *(t.to(update.device) for t in (stats, clients.float()))
    return [Upload(*(t[i : i + chunk] for t in rows)) for i in range(0, len(update), chunk)]


def test_received_values_have_the_documented_shapes(make):
    link, clients = make(), torch.arange(5)
    got = link.superpose(uploads(clients, torch.randn(5, D)), link.draw(5, clients, D, 0, 0))
    assert (got.g.shape, got.noise.shape, got.clean.shape) == ((D,), (D,), (D,))
    assert (got.g.dtype, got.noise.dtype, got.clean.dtype) == (torch.float32, torch.float32, torch.float64)
    assert (got.senders, got.divisor, got.loss.item(), got.pilot) == (5, 5, 2, None)
    assert got.g.isfinite().all()
    assert got.resources.symbols > 0


def test_a_round_is_a_function_of_its_draw_and_chunks_change_no_bit(make):
    update, clients = torch.randn(7, D) * 1e3, torch.arange(7)
    link = make()
    draw = link.draw(7, clients, D, 0, 3)
    first, *others = (link.superpose(uploads(clients, update, chunk=chunk), draw).g for chunk in (1, 1, 3, 7))
    again = make().draw(7, clients, D, 0, 3)
    for g in [*others, link.superpose(uploads(clients, update), again).g]:
        assert torch.equal(g, first)


def test_only_senders_are_averaged(make):
    clients, update = torch.tensor([4, 1, 3]), torch.randn(3, D)
    link = make()
    got = link.superpose(uploads(clients, update), link.draw(6, clients, D, 0, 0))
    assert got.senders == 3
    assert got.loss.item() == pytest.approx(8 / 3)
    torch.testing.assert_close(got.clean, update.double().mean(0))


def test_uploads_of_other_clients_are_dropped(make):
    clients, update, link = torch.tensor([4, 1, 3]), torch.randn(4, D), make()
    draw = link.draw(6, clients, D, 0, 0)
    with_extra_upload = link.superpose(uploads(torch.tensor([4, 1, 3, 0]), update), draw)
    assert with_extra_upload.senders == 3
    assert torch.equal(with_extra_upload.g, link.superpose(uploads(clients, update[:3]), draw).g)


def test_a_round_without_senders_is_empty(make):
    link = make()
    got = link.superpose([], link.draw(3, torch.arange(0), D, 0, 0))
    assert (got.senders, got.g.shape) == (0, (D,))
    assert not got.clean.any()
    assert torch.equal(got.g, got.noise)


def test_norm_buffers_are_pooled_on_the_side_link(make):
    """Without fading, noise, quantisation; the variance is the mean of the variances plus that of the means."""
    norms = buffers(nn.BatchNorm1d(1))
    mean, var = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([[1.0], [2.0], [3.0]])
    link, clients = make(norms=norms), torch.arange(3)
    stats = moments(torch.cat([mean, var], 1), norms)
    got = link.superpose(uploads(clients, torch.randn(3, D), stats), link.draw(3, clients, D, 0, 0))
    torch.testing.assert_close(got.stats, torch.tensor([3.0, 2 + 8 / 3]))


def test_a_stopped_run_continues_bit_for_bit(spec, tiny, tmp_path):
    experiment = tiny.with_(channel=spec, **settings(spec))
    uninterrupted = sa.run(experiment, tmp_path / "uninterrupted")
    sa.run(experiment.with_(rounds=2), tmp_path / "stopped")
    resumed = sa.run(experiment, tmp_path / "stopped", resume=True)
    for name in ("test/loss", "gradient/norm", "channel/senders", "channel/uses"):
        assert uninterrupted[name] == resumed[name]
    assert uninterrupted["channel/senders"] == [5] * 4
    assert sa.Experiment.from_json(experiment.to_json()) == experiment


PRESENT = {"fading": "rician(K=1)", "noise": "sas(tau=0.2)", "power": "limit(P=1)"}


@pytest.mark.parametrize("name", PRESENT)
def test_a_channel_uses_a_setting_or_refuses_it(spec, tiny, name):
    """No setting is ignored: it changes the run, or the experiment is refused."""
    uses = used_settings(channel.one(spec))
    base = tiny.with_(channel=spec, **ABSENT | ({"noise": "gaussian(std=1)"} if "noise" in uses else {}), rounds=1)
    with_part = base.with_(**{name: PRESENT[name]})
    if name in uses and (name != "power" or "noise_on=sum" in spec or spec.startswith("digital")):
        metric = "channel/energy_mean" if name == "power" else "test/loss"
        assert sa.run(with_part)[metric] != sa.run(base)[metric]
        return
    with pytest.raises(InputError) as error:
        build(with_part)
    if name in uses:
        assert error.value.code == "noise-not-on-sum"
    else:
        assert (error.value.code, list(error.value.fields["unused"])) == ("unused-setting", [name])


def test_pilots_are_received_or_refused(spec, tiny):
    base = tiny.with_(channel=spec, **settings(spec), receiver="mac(C=auto, pilot=50)", rounds=1)
    if "pilots" in used_settings(channel.one(spec)):
        link = build(base).channel
        assert len(link.superpose([], link.draw(5, torch.arange(5), D, 0, 0)).pilot) == 50
        return
    with pytest.raises(InputError) as error:
        build(base)
    assert (error.value.code, error.value.fields["unused"]) == ("unused-setting", {"pilots": 50})


def test_a_custom_channel_receives_the_parts_that_it_declares(tiny, registries):
    received = []

    def declare(name, **declared):
        @channel(name, **declared)
        def factory():
            return lambda norms, divisor, **parts: received.append(sorted(parts)) or channel.one("digital()")()()

    declare("silent_air", uses=("fading",))
    declare("undeclared_air")
    declare("powered_air", uses=("power", "noise"))
    declare("misspelt_air", uses=("nosie",))
    build(tiny.with_(channel="silent_air()", noise="none()"))
    build(tiny.with_(channel="undeclared_air()"))
    assert received == [["fading"], ["fading", "noise", "pilots", "power"]]
    build(tiny.with_(channel="powered_air()", power="limit(P=1)", fading="unit()"))
    build(tiny.with_(channel="powered_air()", power="inversion(P=1, threshold=0.1)"))
    assert received[2:] == [["noise", "power"], ["fading", "noise", "power"]], "an adaptive power rule needs the fading"
    with pytest.raises(InputError) as error:
        build(tiny.with_(channel="silent_air()"))
    assert error.value.fields["unused"] == {"noise": tiny.noise}
    with pytest.raises(InputError) as error:
        build(tiny.with_(channel="misspelt_air()"))
    assert (error.value.code, error.value.fields["name"]) == ("unknown-setting", "nosie")


@pytest.mark.gpu
def test_a_gpu_receives_what_a_cpu_receives(make, cuda):
    link, clients, d = make(), torch.arange(5), 40_001
    update = torch.randn(5, d)
    on_cpu, on_gpu = (
        link.superpose(uploads(clients, update.to(device)), link.draw(5, clients, d, 0, 0, device))
        for device in ("cpu", cuda)
    )
    assert on_gpu.g.device.type == "cuda"
    torch.testing.assert_close(on_gpu.g.cpu(), on_cpu.g, rtol=1e-4, atol=1e-4)
    assert on_gpu.resources.symbols == on_cpu.resources.symbols
