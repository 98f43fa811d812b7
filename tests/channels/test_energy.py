"""The transmitted energy, sum_t |x_t|^2 per client, of every channel and power rule."""

import math

import pytest
import torch
from scipy import special

from helpers.channels import assert_mean, received
from stableair.channels.power import Power
from stableair.channels.registries import channel, fading, noise, power
from stableair.contracts import Transmission
from stableair.errors import InputError

P = 3.0
RHO = P / special.exp1(0.2)  # power scale of INVERSION under Rayleigh fading of power 1
INVERSION = f"inversion(P={P}, threshold=0.2)"


def build_channel(spec, rule, fades="rayleigh(power=1)", **others):
    parts = {"fading": fading.one(fades)(), "power": power.one(rule)() if isinstance(rule, str) else rule}
    if not spec.startswith("digital"):
        parts["noise"] = noise.one("none()")()
    return channel.one(spec)()(**parts, **others)


def squares(update):
    return update.double().square().sum(1)


@pytest.mark.parametrize("spec", ["flat(noise_on=sum)", "waveform('hadamard(n=1)', noise_on=sum)"])
def test_the_energy_of_the_payloads_by_power_rule(spec):
    update = torch.randn(40, 30) * torch.linspace(0.1, 3, 40)[:, None]
    exact = squares(update)
    got = received(build_channel(spec, "none()"), update)[0]
    assert list(got.resources.energies.values()) == pytest.approx(exact.tolist())
    got = received(build_channel(spec, f"limit(P={P})"), update)[0]
    assert list(got.resources.energies.values()) == pytest.approx((P * 30 * exact / exact.max()).tolist())
    link = build_channel(spec, INVERSION)
    got, h = received(link, update)[0], received(build_channel("flat()", "none()"), update)[1].h
    active = h**2 >= 0.2
    exact = exact[active]
    assert got.senders == active.sum() < 40
    assert list(got.resources.energies.values()) == pytest.approx(
        (RHO * 30 * exact / exact.max() / h[active] ** 2).tolist()
    )


@pytest.mark.parametrize("csi", [1, 0.7])
@pytest.mark.parametrize("spec", ["flat(noise_on=sum)", "waveform('hadamard(n=1)', noise_on=sum)", "digital()"])
def test_inversion_uses_the_power_p_on_average(spec, csi):
    """All payloads have the same norm; a client that does not transmit uses no energy."""
    n, d = 4000, 2
    rule = f"inversion(P={P}, threshold=0.2, csi={csi})"
    got, _ = received(build_channel(spec, rule), torch.ones(n, d))
    energies = torch.zeros(n).double()
    energies[: got.senders] = torch.tensor(list(got.resources.energies.values())).double()
    symbols = d / 2 if "digital" not in spec else 32 * d  # of a client
    assert_mean(energies, 2 * P * symbols)


@pytest.mark.parametrize("basis", ["pulse()", "ofdm(n=8, prefix=3)", "ofdm(n=8, prefix=3, taps=2)", "hadamard(n=16)"])
@pytest.mark.parametrize("rule", ["none()", f"limit(P={P})", INVERSION])
def test_the_energy_of_a_waveform_is_that_of_its_samples(basis, rule):
    """Including prefix, padding and precoding; the flat channel gives the amplitude."""
    link, update = build_channel(f"waveform('{basis}', noise_on=sum)", rule), torch.randn(5, 30)
    got, draw = received(link, update)
    flat, _ = received(build_channel("flat(noise_on=sum)", rule), update)
    payloads = squares(update[draw.clients])
    modulated = torch.stack([x.abs().square().sum() for x in signals(link, draw, update)])
    of_rule = (
        torch.tensor(list(flat.resources.energies.values())) / payloads * (1 if rule == "none()" else payloads.max())
    )
    of_all = 1 if rule == "none()" else modulated.max() / (11 / 8 if "prefix" in basis else 1)  # see `limit`
    assert list(got.resources.energies.values()) == pytest.approx((of_rule * modulated / of_all).tolist(), rel=1e-5)
    if "prefix" in basis and "taps" not in basis and rule == "none()":
        assert sum(got.resources.energies.values()) > 1.1 * payloads.sum()


def signals(link, draw, update):
    """The modulated and precoded payloads of the senders."""
    n, d = link.basis.n, update.shape[1]
    for row, client in enumerate(draw.clients.tolist()):
        c = torch.view_as_complex(torch.nn.functional.pad(update[client].double(), (0, -d % (2 * n))).view(-1, 2))
        yield link.basis.modulate(link.basis.precode(c.view(-1, n), draw.links[row].impulse_response))


@pytest.mark.parametrize(
    ("basis", "time"),
    [
        ("pulse(rolloff=0.5, samples=3)", 1), ("hadamard(n=64)", 1), ("ofdm(n=8, prefix=3)", 11 / 8),
        *((f"ofdm(n=8, prefix=3, taps=4, equalise={equalise})", 11 / 8) for equalise in ("full", "phase", "off")),
    ],
)  # fmt: skip
def test_no_signal_exceeds_the_power_of_the_limit(basis, time):
    """P d units of energy in d / 2 complex symbols; a prefix takes time and has the power P, too."""
    link, update = build_channel(f"waveform('{basis}', noise_on=sum)", f"limit(P={P})"), torch.randn(6, 30)
    for k in range(10):  # the impulse responses, and therefore the precoding, change in every round
        energies = received(link, update, k)[0].resources.energies.values()
        assert max(energies) == pytest.approx(P * 30 * time)
        assert min(energies) > 0


def test_a_cyclic_prefix_adds_its_share_of_the_energy():
    update = torch.randn(1, 80_000)
    energy = received(build_channel("waveform('ofdm(n=64, prefix=16)')", "none()"), update)[0].resources.energies[0]
    assert energy / squares(update).item() == pytest.approx(1 + 16 / 64, rel=0.01)


def test_a_limit_with_antennas_is_the_energy_of_the_payloads():
    update = torch.randn(6, 30)
    got, _ = received(build_channel("waveform('hadamard(n=1)', antennas=4, noise_on=sum)", f"limit(P={P})"), update)
    exact = squares(update)
    assert list(got.resources.energies.values()) == pytest.approx((P * 30 * exact / exact.max()).tolist())


@pytest.mark.parametrize(("rule", "power"), [("none()", 1), (f"limit(P={P})", 2 * P)])
def test_a_digital_symbol_has_the_power_of_two_real_entries(rule, power):
    update = torch.randn(4, 30)
    got, _ = received(build_channel("digital('qsgd(s=3)', rate=2)", rule, "unit()"), update)
    symbols = (32 + 30 * 3) / 2
    assert list(got.resources.energies.values()) == pytest.approx([power * symbols] * 4)
    assert got.resources.symbols == 4 * symbols
    assert got.g.equal(received(build_channel("digital('qsgd(s=3)')", "none()", "unit()"), update)[0].g)


def test_digital_clients_below_the_threshold_do_not_transmit():
    update = torch.randn(40, 30)
    got, draw = received(build_channel("digital()", INVERSION), update)
    h = received(build_channel("flat()", "none()"), update)[1].h
    active = h**2 >= 0.2
    assert draw.clients.tolist() == active.nonzero().flatten().tolist()
    assert list(got.resources.energies.values()) == pytest.approx((2 * RHO / h[active] ** 2 * 30 * 32).tolist())
    torch.testing.assert_close(got.g, update[active].mean(0), rtol=1e-5, atol=1e-6)


def test_a_digital_round_with_too_few_active_clients_is_empty():
    update = torch.randn(7, 4)
    assert 0 < received(build_channel("digital()", "inversion(P=1, threshold=1)"), update)[0].senders < 5
    got, _ = received(build_channel("digital(aggregate='krum(f=1)')", "inversion(P=1, threshold=1)"), update)
    assert (got.senders, got.resources.energies, got.g.tolist()) == (0, {}, [0.0] * 4)


class Boost(Power):
    """Amplify a weak channel by a factor of at most two."""

    def gain(self, h):
        return (2 * h).clamp(max=1)


@pytest.mark.parametrize("spec", ["flat()", "waveform('hadamard(n=1)')", "digital()"])
def test_the_energy_of_a_rule_that_overrides_the_gain_follows_its_amplitude(spec):
    update = torch.randn(6, 30)
    got, _ = received(build_channel(spec, Boost()), update)
    h = received(build_channel("flat()", "none()"), update)[1].h
    one = squares(update) if spec != "digital()" else torch.full((6,), 32.0 * 30)
    amplitude = (2 * h).clamp(max=1) / h
    assert list(got.resources.energies.values()) == pytest.approx((amplitude**2 * one).tolist())


def test_a_client_whose_fading_is_zero_has_a_finite_energy():
    silent = Power().transmissions(torch.tensor([0.0, 2.0]).double(), torch.arange(2), 0, 0)
    assert silent == {0: Transmission(0.0, 1.0), 1: Transmission(2.0, 1.0)}


@pytest.mark.parametrize("rule", [f"limit(P={P})", INVERSION])
def test_a_zero_payload_has_no_energy(rule):
    got, _ = received(build_channel("flat(noise_on=sum)", rule), torch.zeros(9, 4))
    assert set(got.resources.energies.values()) == {0.0}


def test_a_waveform_refuses_gains_along_the_vector():
    class Along(Power):
        def transmissions(self, h, clients, seed, k):
            return {client: Transmission(lambda d, device: torch.ones(d)) for client in clients.tolist()}

    with pytest.raises(InputError) as error:
        received(build_channel("waveform()", Along()), torch.ones(3, 4))
    assert (error.value.code, error.value.setting) == ("unsupported-power", "power")


@pytest.mark.parametrize("basis", ["pulse()", "ofdm(n=8, prefix=3)", "hadamard(n=4)"])
def test_inversion_over_signals_is_inversion_over_entries(basis):
    """The same clients transmit, and the sum is the same up to rounding, for every impairment of the rule."""
    rule, update = "inversion(P=2, threshold=0.3, csi=0.9, phase=0.4)", torch.randn(12, 31)
    (flat, _), (signals, draw) = (
        received(build_channel(spec, rule), update)
        for spec in ("flat(noise_on=sum)", f"waveform('{basis}', noise_on=sum)")
    )
    assert signals.senders == flat.senders == len(draw.clients) < 12
    torch.testing.assert_close(signals.g, flat.g, rtol=1e-5, atol=1e-5)


def test_the_phases_of_inversion_and_of_the_waveform_are_independent():
    n, a = 2000, 1.0

    def gains(arguments, rule):
        link = build_channel(f"waveform({arguments}noise_on=sum)", rule, "unit()")
        return torch.tensor([one.gain for one in link.draw(n, torch.arange(n), 2, 0, 0).links])

    waveform, rule = gains(f"phase={a}, ", "none()"), gains("", f"inversion(P=1, threshold=0, phase={a})")
    torch.testing.assert_close(gains(f"phase={a}, ", f"inversion(P=1, threshold=0, phase={a})"), waveform * rule)
    assert not torch.isin(waveform.angle().float(), rule.angle().float()).sum() > 3, (
        "both rules use the same random numbers"
    )
    assert_mean((waveform * rule).real, (math.sin(a) / a) ** 2)


@pytest.mark.parametrize("noise_spec", ["sas(alpha=1.5, tau=0.1)", "bursts(length=3)"])
@pytest.mark.parametrize("rule", [f"limit(P={P})", INVERSION])
@pytest.mark.parametrize(("basis", "time"), [("hadamard(n=2)", 1), ("ofdm(n=8, prefix=3, taps=3)", 11 / 8)])
def test_a_power_rule_scales_the_interference_of_the_waveform(basis, time, rule, noise_spec):
    update = torch.randn(6, 30)
    parts = {"fading": fading.one("rayleigh(power=1)")(), "noise": noise.one(noise_spec)()}
    link = channel.one(f"waveform('{basis}', noise_on=sum)")()(power=power.one(rule)(), pilots=8, **parts)
    got, draw = received(link, update)
    largest = max(x.norm().item() for x in signals(link, draw, update)) / time**0.5
    scale = largest / math.sqrt(30 * (P if "limit" in rule else RHO)) / got.divisor
    torch.testing.assert_close(got.noise, draw.xi * scale)
    torch.testing.assert_close(got.pilot, draw.pilot * scale)


class Halved(Power):
    """Transmit half of each payload."""

    def transmissions(self, h, clients, seed, k):
        return {n: Transmission(0.5 * h[n].item(), 0.25) for n in clients.tolist()}


@pytest.mark.parametrize("rule", [Boost(), Halved()], ids=["gain", "transmissions"])
@pytest.mark.parametrize("spec", ["flat()", "digital()", "waveform()"])
def test_fading_along_the_vector_is_refused_with_an_adaptive_power_rule(spec, rule):
    with pytest.raises(InputError) as error:
        build_channel(spec, rule, "block(entries=5)")
    assert error.value.code == "unsupported-fading"
    build_channel("flat(noise_on=sum)", "limit(P=1)", "block(entries=5)")
