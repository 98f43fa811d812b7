"""A component that changes its input in place is refused by name: the metrics and kept states share these tensors."""

import gc
import weakref
from functools import partial

import pytest
import torch

import stableair as sa
from stableair.algorithm import Simulation, simulate
from stableair.builder import build
from stableair.channels.flat import Flat
from stableair.channels.modulation import OFDM
from stableair.channels.power import Power
from stableair.channels.registries import aggregator, basis, channel, power, quantizer
from stableair.channels.superposition import accumulate
from stableair.contracts import FadingLaw, Message, Quantizer, Rule, Transmission, Upload
from stableair.errors import InputError
from stableair.memory import unchanged_uploads

ABSENT = {"fading": "unit()", "noise": "none()"}


def refused(experiment):
    with pytest.raises(InputError) as error:
        sa.run(experiment)
    assert error.value.code == "changed-in-place"
    return error.value


def test_a_receiver_that_changes_the_pilot_is_refused(tiny, registries):
    @sa.receiver("in_place")
    def in_place():
        def apply(received, memory):
            received.pilot.abs_()
            return received.g, memory, {}

        return Rule(apply, pilots=50)

    assert refused(tiny.with_(receiver="in_place()")).setting == "receiver"


def test_a_rule_of_a_chain_that_changes_the_memory_of_another_is_refused(tiny, registries):
    """The output of the first rule is also its memory."""

    @sa.receiver("smoothed")
    def smoothed():
        def apply(received, mean):
            mean = mean.lerp(received.g, 0.5)
            return mean, mean, {}

        return Rule(apply, init=torch.zeros_like)

    @sa.receiver("in_place")
    def in_place():
        return Rule(lambda received, memory: (received.g.clamp_(-1, 1), memory, {}))

    assert refused(tiny.with_(receiver="smoothed() | in_place()")).setting == "receiver"


class ChangedDraw(Flat):
    def superpose(self, uploads, draw):
        draw.xi.zero_()
        return super().superpose(uploads, draw)


class ChangedClients(Flat):
    def draw(self, n, clients, d, seed, k, device="cpu"):
        return super().draw(n, clients.copy_(clients.flip(0)), d, seed, k, device)


class ChangedUpload(Flat):
    def superpose(self, uploads, draw):
        def doubled():
            for upload in uploads:
                upload.update.mul_(2)
                yield upload

        return super().superpose(doubled(), draw)


@pytest.mark.parametrize("changing", [ChangedDraw, ChangedClients, ChangedUpload])
def test_a_channel_that_changes_a_draw_or_an_upload_is_refused(tiny, registries, changing):
    channel("in_place")(lambda: partial(changing))
    assert refused(tiny.with_(channel="in_place()")).setting == "channel"


class ChangedAmplitudes(Power):
    def transmissions(self, h, clients, seed, k):
        return super().transmissions(h.clamp_(max=1), clients, seed, k)


class ChangedParticipants(Power):
    def transmissions(self, h, clients, seed, k):
        return super().transmissions(h, clients.copy_(clients.flip(0)), seed, k)


@pytest.mark.parametrize("channel_spec", ["flat()", "waveform()", "digital()"])
@pytest.mark.parametrize("changing", [ChangedAmplitudes, ChangedParticipants])
def test_a_power_rule_that_changes_its_input_is_refused(tiny, registries, changing, channel_spec):
    power("in_place")(changing)
    noise = "none()" if channel_spec == "digital()" else tiny.noise
    assert refused(tiny.with_(power="in_place()", channel=channel_spec, noise=noise)).setting == "power"


def test_a_noise_that_reuses_its_tensor_is_refused_if_it_changes_a_draw(tiny, registries):
    """The pilot would overwrite the interference of the payloads."""

    @sa.noise("in_place")
    def in_place():
        buffer = torch.zeros(100)
        return lambda d, source: buffer[:d].copy_(source.normal(d))

    few = tiny.with_(noise="in_place()", model="logistic()", data="synthetic(samples=70, classes=3, shape=(1, 2, 2))")
    assert refused(few.with_(receiver="mac(C=auto, pilot=50)")).setting == "noise"
    sa.run(few.with_(receiver="mac(C=1)", rounds=2))


def test_a_fading_that_reuses_its_tensor_gives_the_same_bits(tiny, registries):
    """Inversion draws from the fading twice in a round: the amplitudes, and the error of their estimate."""
    plain = FadingLaw(lambda n, source: 0.5 + source.uniform(n))
    buffer = torch.zeros(1_000_000, dtype=torch.float64)

    sa.fading("plain")(lambda: plain)
    sa.fading("in_place")(lambda: FadingLaw(lambda n, source: buffer[:n].copy_(plain(n, source))))
    base = tiny.with_(channel="flat(noise_on=sum)", power="inversion(P=1, threshold=0.1, csi=0.8)", rounds=2)
    one, other = (sa.run(base.with_(fading=f"{name}()")).state.model.w for name in ("plain", "in_place"))
    assert torch.equal(one, other)


def test_the_channel_does_not_change_a_gain_of_the_power_rule():
    gain = torch.full((4,), 0.5, dtype=torch.float64)
    upload = Upload(torch.arange(2), torch.full((2, 4), 3.0), torch.zeros(2, 0), torch.zeros(2))
    sent = Transmission(lambda d, device: gain)
    total = accumulate([upload], {0: sent, 1: sent}, 4, 0, torch.device("cpu"))
    assert total.faded.tolist() == [3.0] * 4
    assert gain.tolist() == [0.5] * 4


def test_a_quantizer_that_changes_the_payload_is_refused(tiny, registries):
    quantizer("in_place")(lambda: Quantizer(lambda u, source: Message(1.0, u.sign_(), len(u)), torch.float32))
    error = refused(tiny.with_(channel="digital(quantize='in_place()')", **ABSENT))
    assert error.setting == "channel"
    assert "the quantizer changes" in str(error)


def test_a_basis_that_changes_the_received_samples_is_refused(tiny, registries):
    class InPlace(OFDM):
        def demodulate(self, r):
            return super().demodulate(r.mul_(2))

    basis("in_place")(lambda: InPlace(8, 8, 8, 0, 8))
    error = refused(tiny.with_(channel="waveform(basis='in_place()')"))
    assert error.setting == "channel"
    assert "the basis changes" in str(error)


def test_a_trainer_that_changes_the_model_is_refused(tiny):
    sim = build(tiny)

    def train(model, k, clients):
        model.w.add_(1)
        yield from sim.train(model, k, clients)

    in_place = Simulation(**{**vars(sim), "train": train})
    with pytest.raises(InputError) as error:
        list(simulate(in_place, sim.start, 1))
    assert (error.value.code, error.value.setting) == ("changed-in-place", "model")


def test_a_change_of_the_last_upload_is_detected():
    upload = Upload(torch.arange(2), torch.ones(2, 3), torch.zeros(2, 0), torch.zeros(2))
    with pytest.raises(InputError) as error:
        for each in unchanged_uploads("channel", [upload]):
            each.update.zero_()
    assert error.value.code == "changed-in-place"


def test_no_upload_is_kept_while_the_next_one_is_computed():
    alive, alive_counts = weakref.WeakSet(), []

    def uploads():
        for n in range(3):
            gc.collect()
            alive_counts.append(len(alive))
            payloads = torch.ones(1, 3)
            alive.add(payloads)
            yield Upload(torch.tensor([n]), payloads, torch.zeros(1, 0), torch.zeros(1))
            del payloads

    sent = dict.fromkeys(range(3), Transmission(1.0))
    accumulate(unchanged_uploads("channel", uploads()), sent, 3, 0, torch.device("cpu"))
    assert alive_counts == [0, 0, 0]


def test_an_aggregator_may_change_its_rows(tiny, registries):
    """The rows are copies for the aggregator."""
    aggregator("in_place")(lambda: sa.contracts.Aggregator(per_entry=lambda rows: rows.mul_(2).mean(0) / 2))
    base = tiny.with_(rounds=1, **ABSENT)
    one, other = (sa.run(base.with_(channel=f"digital(aggregate='{name}()')")) for name in ("in_place", "mean"))
    assert torch.allclose(one.state.model.w, other.state.model.w)
    assert one["gradient/norm"] == other["gradient/norm"]
