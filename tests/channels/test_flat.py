import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from helpers.components import EXAMPLES
from stableair.builder import build
from stableair.channels.flat import Flat
from stableair.channels.power import Power
from stableair.channels.registries import fading, noise, power
from stableair.channels.superposition import accumulate
from stableair.contracts import FlatDraw, Transmission, Upload
from stableair.errors import InputError
from stableair.streams import generator


def amplitudes(spec, n=400_000):
    return fading.one(spec)()(n, generator(0, "fading", 0))


def noises(spec, d=400_000):
    return noise.one(spec)()(d, generator(0, "noise", 0))


def uploads(update, stats=None, chunk=2):
    n = len(update)
    stats = torch.zeros(n, 0) if stats is None else stats
    rows = torch.arange(n), update, stats, torch.ones(n)
    return [Upload(*(t[i : i + chunk] for t in rows)) for i in range(0, n, chunk)]


@pytest.fixture
def channel():
    return Flat(fading.one("rayleigh()")(), noise.one("sas()")())


def test_superpose_is_equation_3(channel):
    update, stats = torch.randn(5, 1000), torch.randn(5, 7)
    draw = channel.draw(5, torch.arange(5), 1000, seed=1, k=2)
    got = channel.superpose(uploads(update, stats), draw)
    exact = (draw.h[:, None] * update.double()).sum(0) / 5 + draw.xi.double()  # the noise comes after the mean
    torch.testing.assert_close(got.g, exact.float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(got.clean, update.double().mean(0))
    torch.testing.assert_close(got.stats, stats.mean(0))
    assert got.loss == 1


def test_chunks_do_not_change_the_sum(channel):
    update, draw = torch.randn(7, 500) * 1e3, channel.draw(7, torch.arange(7), 500, 0, 0)
    sums = [channel.superpose(uploads(update, chunk=chunk), draw).g for chunk in (1, 3, 7)]
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def test_the_interference_is_drawn_on_the_device_and_the_fading_on_the_host():
    draw = Flat(fading.one("rayleigh()")(), noise.one("none()")()).draw(3, torch.arange(3), 5, 0, 0, device="meta")
    assert (draw.h.device.type, draw.xi.device.type) == ("cpu", "meta")


def test_a_draw_is_a_function_of_seed_and_round(channel):
    draw, same = channel.draw(5, torch.arange(5), 100, 1, 2), channel.draw(5, torch.arange(5), 100, 1, 2)
    assert torch.equal(draw.h, same.h)
    assert torch.equal(draw.xi, same.xi)
    for other in (channel.draw(5, torch.arange(5), 100, 1, 3), channel.draw(5, torch.arange(5), 100, 2, 2)):
        assert not torch.equal(draw.h, other.h)
        assert not torch.equal(draw.xi, other.xi)


def test_the_fading_does_not_depend_on_the_noise(channel):
    quiet = Flat(channel.fading, noise.one("none()")())
    assert torch.equal(quiet.draw(5, torch.arange(5), 100, 1, 2).h, channel.draw(5, torch.arange(5), 100, 1, 2).h)


def test_infinite_noise_is_accepted_and_nan_is_refused(channel):
    chunks, clients, h = uploads(torch.ones(2, 3)), torch.arange(2), torch.ones(2, dtype=torch.float64)
    loud = FlatDraw(0, clients, h, torch.tensor([0.0, math.inf, 0.0]))
    assert channel.superpose(chunks, loud).g.tolist() == [1, math.inf, 1]
    with pytest.raises(InputError) as error:
        channel.superpose(chunks, loud._replace(xi=torch.tensor([0.0, math.nan, 0.0])))
    assert (error.value.code, error.value.setting) == ("nan-in-channel", "noise")


def test_a_gain_or_amplitude_that_is_nan_is_refused_with_its_setting(channel):
    class Wrong(Power):
        def gain(self, h):
            return torch.full_like(h, math.nan)

    with pytest.raises(InputError) as error:
        wrong = Flat(fading.one("unit()")(), noise.one("none()")(), Wrong())
        wrong.superpose(uploads(torch.ones(2, 3)), wrong.draw(2, torch.arange(2), 3, 0, 0))
    assert (error.value.code, error.value.setting) == ("nan-in-channel", "power")
    with pytest.raises(InputError) as error:
        Flat(lambda n, source: torch.full((n,), math.nan), channel.noise).draw(2, torch.arange(2), 3, 0, 0)
    assert (error.value.code, error.value.setting) == ("nan-in-channel", "fading")


@pytest.mark.parametrize("spec", EXAMPLES["fadings"])
def test_every_fading_has_unit_mean_and_no_negative_amplitude(spec):
    h = amplitudes(spec)
    assert h.dtype == torch.float64
    assert h.min() >= 0
    assert abs(h.mean() - 1) < 4.5 * max(h.std().item(), 1e-9) / len(h) ** 0.5


def test_rayleigh_has_unit_mean_and_not_unit_power():
    h = amplitudes("rayleigh(mean=1)")
    assert h.var().item() == pytest.approx(4 / math.pi - 1, rel=0.02)
    assert stats.kstest(h.numpy(), stats.rayleigh(scale=math.sqrt(2 / math.pi)).cdf).pvalue > 1e-3
    assert amplitudes("rayleigh(mean=3)").mean().item() == pytest.approx(3, rel=0.01)
    assert amplitudes("rayleigh(power=1)").square().mean().item() == pytest.approx(1, rel=0.01)


def test_mean_and_power_exclude_each_other():
    with pytest.raises(InputError) as error:
        fading.one("rayleigh(mean=2, power=1)")()
    assert error.value.code == "conflicting-arguments"


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ({"fading": lambda n, s: torch.ones(n - 1)}, "wrong-shape"),
        ({"fading": lambda n, s: [1.0] * n}, "wrong-shape"),
        ({"fading": lambda n, s: torch.ones(n, dtype=torch.int64)}, "wrong-dtype"),
        ({"noise": lambda d, s: torch.zeros(d + 1)}, "wrong-shape"),
        ({"noise": lambda d, s: None}, "wrong-shape"),
    ],
)
def test_a_component_that_breaks_its_contract_is_refused(channel, parts, code):
    with pytest.raises(InputError) as error:
        replace(channel, **parts).draw(5, torch.arange(5), 10, 0, 0)
    assert (error.value.code, error.value.setting) == (code, *parts)


def test_float64_noise_is_rounded_to_float32(channel):
    wide = replace(channel, noise=lambda d, s: torch.zeros(d, dtype=torch.float64))
    assert wide.draw(5, torch.arange(5), 10, 0, 0).xi.dtype == torch.float32


def test_rician_and_nakagami_against_scipy():
    h = amplitudes("rician(K=2)")
    law = stats.rice(b=2.0)  # b = sqrt(2 K)
    assert stats.kstest(h.numpy() * law.mean(), law.cdf).pvalue > 1e-3
    h = amplitudes("nakagami(m=2)")
    law = stats.nakagami(2)
    assert stats.kstest(h.numpy() * law.mean(), law.cdf).pvalue > 1e-3
    rayleigh = stats.rayleigh(scale=math.sqrt(2 / math.pi)).cdf
    assert stats.kstest(amplitudes("rician(K=0)").numpy(), rayleigh).pvalue > 1e-3
    assert stats.kstest(amplitudes("nakagami(m=1)").numpy(), rayleigh).pvalue > 1e-3
    assert amplitudes("nakagami(m=1000)").std() < 0.05
    assert amplitudes("rician(K=1000)").std() < 0.05


@pytest.mark.parametrize("spec", EXAMPLES["noises"])
def test_every_noise_is_symmetric_and_of_the_right_shape(spec):
    xi = noises(spec)
    assert xi.shape == (400_000,)
    assert xi.dtype == torch.float32
    assert xi.isfinite().all()
    assert abs((xi > 0).double().mean() - (xi < 0).double().mean()) < 4.5 / len(xi) ** 0.5


@pytest.mark.parametrize(
    ("spec", "law"),
    [
        ("gaussian(std=2)", stats.norm(scale=2)),
        ("student_t(df=3)", stats.t(3)),
        ("student_t(df=1.5, scale=0.2)", stats.t(1.5, scale=0.2)),
        ("sas(alpha=1, tau=0.2)", stats.cauchy(scale=0.2)),
        ("sas(alpha=2, tau=0.5)", stats.norm(scale=0.5 * 2**0.5)),
    ],
)
def test_noises_against_scipy(spec, law):
    assert stats.kstest(noises(spec).numpy(), law.cdf).pvalue > 1e-3


def test_middleton_class_a_is_its_mixture():
    A, gamma, std = 0.3, 0.05, 1.5
    xi = noises(f"middleton(A={A}, gamma={gamma}, std={std})").numpy()

    def cdf(x):
        weights = [stats.poisson.pmf(m, A) for m in range(30)]
        scales = [std * math.sqrt((m / A + gamma) / (1 + gamma)) for m in range(30)]
        return sum(w * stats.norm.cdf(x, scale=s) for w, s in zip(weights, scales, strict=True))

    assert stats.kstest(xi, cdf).pvalue > 1e-3
    assert xi.std() == pytest.approx(std, rel=0.02)


@pytest.mark.parametrize(
    ("registry", "text"),
    [
        (fading, "rayleigh(mean=0)"), (fading, "rayleigh(mean=-1)"), (fading, "rayleigh(power=0)"),
        (fading, "rician(K=-1)"),
        (fading, "nakagami(m=0.4)"), (fading, "nakagami(m=1, mean=nan)"), (fading, "rayleigh(mean=one)"),
        (noise, "sas(alpha=0.4)"), (noise, "sas(alpha=2.1)"), (noise, "sas(tau=-0.1)"), (noise, "sas(alpha=nan)"),
        (noise, "gaussian(std=-1)"), (noise, "student_t(df=0)"), (noise, "middleton(A=0, gamma=1)"),
        (noise, "middleton(A=1, gamma=0)"), (noise, f"gaussian(std={'1' * 400})"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(registry, text):
    with pytest.raises(InputError) as error:
        registry.one(text)()
    assert error.value.code in ("out-of-range", "wrong-type")


def test_noise_on_the_sum_is_divided_by_the_number_of_clients_too():
    payloads = torch.randn(4, 6)
    got = {}
    for noise_on in ("mean", "sum"):
        channel = Flat(fading.one("unit()")(), noise.one("gaussian(std=2)")(), pilots=3, noise_on=noise_on)
        draw = channel.draw(4, torch.arange(4), 6, seed=0, k=1)
        got[noise_on] = channel.superpose(uploads(payloads), draw)
    torch.testing.assert_close(got["sum"].noise, got["mean"].noise / 4)
    torch.testing.assert_close(got["sum"].pilot, got["mean"].pilot / 4)
    summed = payloads.double().sum(0) + got["mean"].noise
    torch.testing.assert_close(got["sum"].g, (summed / 4).float())


def test_the_mean_is_over_the_clients_that_sent(channel):
    """If two of four clients send ones, the received payload, norm buffers and loss are 1."""
    ideal = Flat(fading.one("unit()")(), noise.one("none()")())
    draw = ideal.draw(4, torch.tensor([1, 3]), 5, seed=0, k=0)
    sent = [Upload(torch.tensor([1, 3]), torch.ones(2, 5), torch.ones(2, 3).double(), torch.ones(2))]
    got = ideal.superpose(sent, draw)
    assert (got.g.tolist(), got.stats.tolist(), got.clean.tolist(), got.loss.item()) == ([1] * 5, [1] * 3, [1] * 5, 1)
    assert (got.senders, got.divisor) == (2, 2)


def test_fading_and_batches_do_not_depend_on_other_clients(channel):
    all_clients = channel.draw(6, torch.arange(6), 10, seed=1, k=2)
    some = channel.draw(6, torch.tensor([4, 1]), 10, seed=1, k=2)
    assert torch.equal(some.h, all_clients.h[[4, 1]])
    assert torch.equal(some.xi, all_clients.xi)
    update = torch.randn(2, 10)
    got = channel.superpose([Upload(some.clients, update, torch.zeros(2, 0), torch.ones(2))], some)
    exact = (all_clients.h[[4, 1], None] * update.double()).mean(0) + some.xi.double()
    torch.testing.assert_close(got.g, exact.float(), rtol=1e-6, atol=1e-7)


def test_without_senders_only_the_interference_is_received(channel):
    draw = channel.draw(2, torch.arange(0), 5, seed=0, k=3)
    got = channel.superpose([], draw)
    assert got.senders == 0
    assert torch.equal(got.g, draw.xi)
    assert not got.clean.any()


def test_a_stated_divisor_divides_the_payloads_only():
    """The divisor is the expected number of clients, 4; the side link is averaged over the 2 senders."""
    ideal = Flat(fading.one("unit()")(), noise.one("none()")(), divisor=4)
    sent = [Upload(torch.tensor([1, 3]), torch.ones(2, 5), torch.ones(2, 3).double(), torch.ones(2))]
    got = ideal.superpose(sent, ideal.draw(4, torch.tensor([1, 3]), 5, seed=0, k=0))
    assert (got.g.tolist(), got.clean.tolist(), got.stats.tolist(), got.loss.item()) == (
        [0.5] * 5,
        [0.5] * 5,
        [1] * 3,
        1,
    )
    assert (got.senders, got.divisor) == (2, 4)


def test_two_entries_or_two_pilots_share_a_symbol():
    channel = Flat(fading.one("unit()")(), noise.one("none()")(), pilots=4)
    assert (
        channel.superpose(uploads(torch.ones(3, 6)), channel.draw(3, torch.arange(3), 6, 0, 0)).resources.symbols == 5
    )


@pytest.mark.parametrize(
    ("fades", "rule"),
    [
        ("rayleigh()", "none()"),
        ("block(entries=7)", "limit(P=1)"),
        ("rayleigh()", "inversion(P=1, threshold=0.1, csi=0.8)"),
        ("rayleigh()", "inversion(P=1, threshold=0.1, cfo=0.1)"),
    ],
)
def test_separately_summed_slices_equal_the_whole_sum(fades, rule):
    """Two processes sum one slice each (here without a process group): the sum is equal bit for bit."""
    d, update = 49, torch.randn(4, 49)
    whole = Flat(fading.one(fades)(), noise.one("sas()")(), power.one(rule)(), noise_on="sum")
    draw = whole.draw(4, torch.arange(4), d, 0, 0)
    slices = slice(0, 26), slice(26, 49)

    class Half:
        def __init__(self, rank):
            self.rank = rank

        def slice(self, d):
            return slices[self.rank]

        def assemble(self, *parts, d):
            return parts

    partial_sums = []
    for rank, part in enumerate(slices):
        mine = [upload._replace(update=upload.update[:, part], norm=upload.norms()) for upload in uploads(update)]
        partial_sums.append(whole.with_reduction(Half(rank)).accumulate(mine, draw))
    total = whole.accumulate(uploads(update), draw)
    for name in ("faded", "clean"):
        assert torch.equal(torch.cat([getattr(one, name) for one in partial_sums]), getattr(total, name))
    assert all(one.max_norm == total.max_norm and one.energies == total.energies for one in partial_sums)


def test_a_noise_with_memory_starts_its_recursion_in_round_zero(registries):
    """The noise of round k depends on all earlier rounds, but is a function of (seed, k), so a run can be resumed."""

    @noise("walk")
    def walk():
        return lambda d, source: sum(source.at(j).normal(d) for j in range(source.round + 1)).float()

    channel = Flat(fading.one("unit()")(), noise.one("walk()")())
    walked = [channel.draw(1, torch.arange(1), 8, seed=5, k=k).xi for k in range(4)]
    steps = [generator(5, "noise", k).normal(8) for k in range(4)]
    torch.testing.assert_close(walked[3], sum(steps).float())
    assert torch.equal(walked[3], channel.draw(1, torch.arange(1), 8, seed=5, k=3).xi)


class Half(Power):
    """Half the amplitude, and twice the interference."""

    def gain(self, h):
        return h / 2

    def noise_scale(self, max_norm, d):
        return 2


def test_a_power_rule_changes_gains_interference_and_pilots():
    plain = Flat(fading.one("unit()")(), noise.one("gaussian(std=1)")(), pilots=4)
    half = Flat(plain.fading, plain.noise, Half(), pilots=4)
    update, draw = torch.randn(3, 6), plain.draw(3, torch.arange(3), 6, 0, 0)
    before, after = (c.superpose(uploads(update), c.draw(3, torch.arange(3), 6, 0, 0)) for c in (plain, half))
    torch.testing.assert_close(after.g, (update.double().mean(0) / 2 + 2 * draw.xi).float())
    torch.testing.assert_close(after.pilot, 2 * before.pilot)
    assert (after.g.dtype, after.noise.dtype) == (torch.float32, torch.float32)
    assert list(after.resources.energies.values()) == pytest.approx((update.double().norm(dim=1) ** 2 / 4 / 4).tolist())


@pytest.mark.parametrize(
    ("hook", "code"), [({"gain": torch.ones(1)}, "wrong-shape"), ({"noise_scale": -1.0}, "wrong-type"),
                       ({"noise_scale": math.nan}, "wrong-type"), ({"noise_scale": torch.ones(3)}, "wrong-type")]
)  # fmt: skip
def test_a_power_rule_that_breaks_its_contract_is_refused(hook, code):
    ((name, value),) = hook.items()
    wrong = type("Wrong", (Power,), {name: lambda self, *_: value})()
    channel = Flat(fading.one("unit()")(), noise.one("none()")(), wrong)
    with pytest.raises(InputError) as error:
        channel.superpose(uploads(torch.ones(3, 5)), channel.draw(3, torch.arange(3), 5, 0, 0))
    assert (error.value.code, error.value.setting) == (code, "power")


@pytest.mark.parametrize("gains", [torch.ones(4), torch.ones(5).to(torch.complex64), 1])
def test_gains_along_the_vector_have_one_entry_or_one_symbol_each(gains):
    sent = {0: Transmission(lambda d, device: gains)}
    with pytest.raises(InputError) as error:
        accumulate(uploads(torch.ones(1, 5)), sent, 5, 0, torch.device("cpu"))
    assert (error.value.code, error.value.setting) == ("wrong-shape", "power")


def test_a_chunk_without_clients_changes_nothing(channel):
    update, draw = torch.randn(3, 8), channel.draw(3, torch.arange(3), 8, 0, 0)
    empty = Upload(torch.arange(0), torch.zeros(0, 8), torch.zeros(0, 0), torch.zeros(0))
    with_empty_chunks = channel.superpose([empty, *uploads(update), empty], draw)
    assert torch.equal(with_empty_chunks.g, channel.superpose(uploads(update), draw).g)


def test_an_invalid_power_rule_is_refused(tiny, registries):
    power("loud")(lambda: 3)
    with pytest.raises(InputError) as error:  # the error has its file and line
        build(tiny.with_(power="loud()"))
    assert (error.value.code, error.value.fields["actual"]) == ("wrong-type", "int")
