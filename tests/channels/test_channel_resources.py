"""Resources of a round without a power rule, against independent formulas, and the recorded metrics."""

from dataclasses import replace

import pytest
import torch

import stableair as sa
from helpers.channels import received
from stableair.algorithm import simulate, used
from stableair.builder import build
from stableair.channels.registries import channel, fading, noise
from stableair.contracts import Resources, Upload

N, D = 4, 300


def resources(spec, update, clients=None):
    """The resources of the clients (default: all) that send the rows of an update (m, d)."""
    parts = {} if spec.startswith("digital") else {"fading": fading.one("rayleigh()")(), "noise": noise.one("none()")()}
    link, clients = channel.one(spec)()(**parts), torch.arange(len(update)) if clients is None else clients
    upload = Upload(clients, update, torch.zeros(len(update), 0), torch.zeros(len(update)))
    return link.superpose([upload], link.draw(10, clients, update.shape[1], 0, 0)).resources


def energies(spec, update):
    return list(resources(spec, update).energies.values())


def payloads(d=D):
    return torch.randn(N, d, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [2.0], [0.5], [0.0]])


@pytest.mark.parametrize(
    "spec",
    [
        "flat()", "flat(noise_on=sum)", "waveform(basis=pulse)", "waveform(basis='pulse(rolloff=0.5, samples=7)')",
        "waveform(basis='hadamard(n=16)')", "waveform(basis='ofdm(n=16, prefix=0)')",
        "waveform(basis=pulse, timing=0.5, cfo=1e-3, phase=1)", "waveform(basis='hadamard(n=16)', antennas=3)",
    ],
)  # fmt: skip
def test_orthonormal_waveforms_have_the_energy_of_the_payload(spec):
    """Neither fading nor synchronisation errors change the transmitted energy."""
    u = payloads()
    assert energies(spec, u) == pytest.approx(u.double().square().sum(1).tolist(), rel=1e-6)


@pytest.mark.parametrize("basis", ["pulse", "'ofdm(n=8, prefix=2)'", "'hadamard(n=8)'"])
def test_the_energy_of_a_signal_does_not_depend_on_its_division_into_pieces(basis, monkeypatch):
    """Pieces of pulses overlap, but their symbols are orthogonal."""
    whole = energies(f"waveform(basis={basis})", payloads())
    monkeypatch.setattr("stableair.channels.waveform.PIECE", 16)
    assert energies(f"waveform(basis={basis})", payloads()) == pytest.approx(whole)


def test_a_cyclic_prefix_adds_its_share_to_the_energy_of_a_constant_block():
    u = torch.zeros(2, 64)
    u[0, 0], u[1, 1] = 3, 2  # the real and the imaginary part of the subcarrier 0, whose samples are constant
    assert energies("waveform(basis='ofdm(n=16, prefix=4)')", u) == pytest.approx([9 * 20 / 16, 4 * 20 / 16])


def test_the_energy_of_an_equalised_signal_includes_the_equaliser():
    """A subcarrier of a channel with two equal paths of opposite sign is weak and takes more energy."""
    spec = "waveform(basis='ofdm(n=8, prefix=1, taps=2, equalise={})')"
    u = torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    link = channel.one(spec.format("full"))()(fading=fading.one("unit()")(), noise=noise.one("none()")())
    (response,) = (each.impulse_response for each in link.draw(10, torch.arange(1), 16, 0, 0).links)
    c = torch.view_as_complex(u.double().view(8, 2)) / torch.fft.fft(response, 8)
    x = torch.fft.ifft(c) * 8**0.5
    expected = x.abs().square().sum() + x[-1].abs() ** 2
    assert energies(spec.format("full"), u) == pytest.approx([expected.item()])
    c = torch.view_as_complex(u.double().view(8, 2)) * torch.fft.fft(response, 8).conj().sgn()
    x = torch.fft.ifft(c) * 8**0.5
    expected = x.abs().square().sum() + x[-1].abs() ** 2
    assert energies(spec.format("phase"), u) == pytest.approx([expected.item()])


@pytest.mark.parametrize(("quantize", "bits"), [("none()", 32 * D), ("qsgd(s=3)", 32 + 3 * D)])
def test_a_digital_message_takes_a_symbol_of_energy_one_for_every_rate_bits(quantize, bits):
    got = resources(f"digital(quantize='{quantize}', rate=2)", payloads())
    assert (got.bits, got.symbols) == (N * bits, N * bits / 2)
    assert got.energies == dict.fromkeys(range(N), bits / 2)


@pytest.mark.parametrize("spec", ["flat()", "waveform()", "digital()"])
def test_only_senders_have_an_energy(spec):
    clients, u = torch.tensor([7, 2]), payloads()[:2]
    assert list(resources(spec, u, clients).energies) == [7, 2]
    assert resources(spec, u[:0], clients[:0]).energies == {}


def test_only_digital_channels_use_more_symbols_for_more_clients():
    one, four = payloads()[:1], payloads()
    assert resources("flat()", one).symbols == resources("flat()", four).symbols == D / 2
    assert resources("digital()", four).symbols == 4 * resources("digital()", one).symbols


@pytest.mark.parametrize(("d", "pilots"), [(5, 0), (6, 0), (5, 7), (6, 7), (1, 1)])
@pytest.mark.parametrize("spec", ["flat()", "waveform('hadamard(n=1)')"])
def test_an_odd_number_of_entries_or_pilots_is_padded_with_a_zero(spec, d, pilots):
    parts = {"fading": fading.one("unit()")(), "noise": noise.one("none()")()}
    got, _ = received(channel.one(spec)()(pilots=pilots, **parts), payloads(d))
    assert got.resources.symbols == (d + d % 2) / 2 + (pilots + pilots % 2) / 2


def test_the_metrics_of_a_round_in_physical_units(tiny):
    sim = build(tiny.with_(clients=8, bandwidth=2e6, symbol_energy=0.5))
    total, metrics = used(Resources(symbols=100.0, energies={6: 3.0, 2: 5.0, 0: 4.0}, bits=7.0), (), sim)
    assert total.tolist() == [2.0, 0, 2.5, 0, 0, 0, 1.5, 0]
    assert metrics == {
        "channel/uses": 100.0,
        "channel/seconds": 100 / 2e6,
        "channel/energy_mean": 0.5 * 12 / 8,  # five of eight clients do not transmit
        "channel/energy_max": 2.5,
        "channel/energy_total_max": 2.5,
        "channel/bits": 7.0,
    }
    after, second = used(Resources(symbols=100.0, energies={6: 3.0}), total, sim)
    assert (second["channel/energy_max"], second["channel/energy_total_max"]) == (1.5, 3.0), "client 6 has sent twice"
    after, silent = used(Resources(symbols=100.0), after, sim)
    assert [silent[f"channel/energy_{name}"] for name in ("mean", "max", "total_max")] == [0, 0, 3.0]
    assert total.tolist()[6] == 1.5, "the energies of an earlier state do not change"


def test_a_run_records_the_energy_of_its_payloads(tiny):
    experiment = tiny.with_(participation="sample(m=2)", symbol_energy=3.0)
    sim = build(experiment)
    (upload,) = sim.train(sim.start.model, 0, sim.participants(0))
    (first,) = simulate(replace(sim, train=lambda *_: [upload]), sim.start, 1)
    energies = upload.update.double().square().sum(1)
    assert len(energies) == 2
    assert first.metrics["channel/energy_mean"] == pytest.approx(3 * energies.sum().item() / tiny.clients)
    assert first.metrics["channel/energy_max"] == pytest.approx(3 * energies.max().item())


def test_bandwidth_and_symbol_energy_only_scale_the_recorded_resources(tiny):
    base, scaled = sa.run(tiny), sa.run(tiny.with_(bandwidth=2e6, symbol_energy=3.0))
    assert scaled["test/loss"] == base["test/loss"]
    assert scaled["channel/uses"] == base["channel/uses"]
    assert scaled["channel/seconds"] == pytest.approx([x / 2 for x in base["channel/seconds"]])
    assert scaled["channel/energy_max"] == pytest.approx([3 * x for x in base["channel/energy_max"]])
