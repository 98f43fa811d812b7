"""The digital reference channel: QSGD, aggregation of single updates, and its resources."""

import math
import re

import pytest
import torch
from scipy.optimize import minimize

from helpers.components import EXAMPLES
from stableair.builder import build
from stableair.channels import digital as module
from stableair.channels.registries import aggregator, channel, quantizer
from stableair.contracts import Upload
from stableair.errors import InputError, ResourceError
from stableair.runner import run
from stableair.streams import generator


def build_channel(spec, **others):
    return channel.one(spec)()(**others)


def superposed(link, update, clients=None, k=0):
    clients = torch.arange(len(update)) if clients is None else torch.tensor(clients)
    rows = Upload(clients, update, torch.zeros(len(update), 0), torch.ones(len(update)))
    return link.superpose([rows], link.draw(50, clients, update.shape[1], seed=1, k=k))


def dequantised(spec, u, draws):
    """The dequantised payload u in many draws: (draws, d)."""
    rule = quantizer.one(spec)()
    messages = [rule.quantize(u, generator(i, "quantize", 0)) for i in range(draws)]
    return torch.stack([m.levels.double() * m.scale for m in messages])


@pytest.mark.parametrize(("d", "s"), [(10, 1), (200, 1), (200, 4), (50, 100)])
def test_qsgd_is_unbiased_and_its_error_is_within_the_bound(d, s):
    u = generator(d, "u").normal(d).float()
    received = dequantised(f"qsgd(s={s})", u, 3000)
    step = u.double().norm() / s
    share = (u.double().abs() / step) % 1
    error = step * (share * (1 - share) / 3000).sqrt()
    assert ((received.mean(0) - u).abs() < 5 * error + 5 * step / 3000).all()  # skewed where rounding up is rare
    errors = (received - u).square().sum(1)
    exact = (step**2 * share * (1 - share)).sum()  # of rounding up or down at random
    assert abs(errors.mean() - exact) < 4.5 * errors.std() / 3000**0.5 + 1e-9
    assert errors.mean() <= min(d / s**2, math.sqrt(d) / s) * u.double().norm() ** 2
    assert torch.equal(received.sign() * u.sign(), (received != 0).double())  # no entry changes its sign


@pytest.mark.parametrize(
    ("s", "dtype"), [(1, torch.int8), (127, torch.int8), (128, torch.int16), (32_767, torch.int16)]
)
def test_levels_fit_into_their_integer_type(s, dtype):
    for u in (torch.tensor([-2.0, 0.0]), torch.tensor([0.0, 3e30]), torch.zeros(3)):
        message = quantizer.one(f"qsgd(s={s})")().quantize(u, generator(0, "quantize", 0))
        assert message.levels.dtype == dtype
        torch.testing.assert_close(message.levels.double() * message.scale, u.double())  # the norm itself is level s


def gamma_code(number):
    """The Elias gamma code of a number of n bits: n - 1 zeros and the n bits."""
    return "0" * (number.bit_length() - 1) + f"{number:b}"


@pytest.mark.parametrize("s", [1, 7, 300])
def test_the_number_of_bits_is_the_length_of_the_code(s):
    u = generator(0, "u").normal(1000).float()
    plain = quantizer.one(f"qsgd(s={s})")().quantize(u, generator(0, "quantize", 0))
    coded = quantizer.one(f"qsgd(s={s}, coding=elias)")().quantize(u, generator(0, "quantize", 0))
    assert torch.equal(plain.levels, coded.levels)
    assert plain.bits == 32 + 1000 * (1 + math.ceil(math.log2(s + 1)))
    code = "".join(gamma_code(abs(level) + 1) + ("+-"[level < 0] if level else "") for level in coded.levels.tolist())
    assert coded.bits == 32 + len(code)
    assert quantizer.one("none()")().quantize(u, generator(0, "quantize", 0)).bits == 32_000


def test_the_messages_of_all_clients_take_bits_divided_by_rate_symbols():
    assert (
        superposed(build_channel("digital(quantize='qsgd(s=3)', rate=2)"), torch.ones(4, 10)).resources.symbols
        == 4 * (32 + 30) / 2
    )


ROWS = torch.tensor([[0, 4, 1], [1, 3, 1.1], [2, 2, 0.9], [3.5, 1, 1], [1.2, 2.7, 1.05], [90, -80, 70]])


def geometric(rows):
    def distances(z):
        return (rows - torch.tensor(z)).norm(dim=1).sum().item()

    options = {"xatol": 1e-8, "fatol": 1e-10, "maxiter": 5000}
    return torch.tensor(minimize(distances, rows.median(0).values, method="Nelder-Mead", options=options).x)


def krum(rows, f):
    near = torch.cdist(rows, rows).square().sort(1).values[:, 1 : len(rows) - f - 1].sum(1)
    return rows[near.argmin()]


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("mean", lambda rows: rows.mean(0)),
        ("median", lambda rows: rows.sort(0).values[2:4].mean(0)),
        ("trimmed_mean(f=1)", lambda rows: rows.sort(0).values[1:5].mean(0)),
        ("krum(f=1)", lambda rows: krum(rows, 1)),
        ("geometric_median(steps=1000)", geometric),
    ],
)
def test_aggregators_against_direct_computations(spec, rule, monkeypatch):
    monkeypatch.setattr(module, "SLICE", 2)
    exact = rule(ROWS.double())
    got = superposed(build_channel(f"digital(aggregate='{spec}')"), ROWS)
    torch.testing.assert_close(got.g.double(), exact.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.clean, ROWS.double().mean(0))
    assert not got.noise.any()


def test_krum_with_keep_averages_the_best_updates():
    squares = torch.cdist(ROWS.double(), ROWS.double()).square()
    weights = aggregator.one("krum(f=1, keep=3)")().weights(squares)
    assert sorted(weights.tolist()) == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 1 / 3])
    assert weights[5] == 0


@pytest.mark.parametrize("spec", [spec for spec in EXAMPLES["aggregators"] if spec != "mean()"])
def test_one_faulty_client_of_nine_changes_a_robust_aggregate_little(spec):
    update = 1 + 0.1 * generator(0, "u").normal(9, 40).float()
    update[4] = -1e6
    got = superposed(build_channel(f"digital(aggregate='{spec}')"), update)
    assert (got.g - 1).abs().max() < 0.5


@pytest.mark.parametrize("spec", EXAMPLES["aggregators"])
def test_the_aggregate_of_equal_updates_is_this_update(spec):
    got = superposed(build_channel(f"digital(aggregate='{spec}')"), torch.arange(6.0).repeat(7, 1))
    torch.testing.assert_close(got.g, torch.arange(6.0))


def test_rounding_depends_neither_on_other_clients_nor_on_the_aggregator():
    update = torch.randn(6, 30)
    of_one = [superposed(build_channel("digital(quantize='qsgd(s=2)')"), update[i : i + 1], [i]).g for i in range(6)]
    together = superposed(build_channel("digital(quantize='qsgd(s=2)')"), update[[4, 1]], [4, 1]).g
    torch.testing.assert_close(together, (of_one[4] + of_one[1]) / 2)
    middle = superposed(build_channel("digital(quantize='qsgd(s=2)', aggregate=median)"), update[:3]).g
    torch.testing.assert_close(middle, torch.stack(of_one[:3]).median(0).values)
    later = superposed(build_channel("digital(quantize='qsgd(s=2)')"), update[:1], [0], k=1).g
    assert not torch.equal(later, of_one[0])


def test_uploads_may_be_overwritten_after_their_use():
    """An engine may use one buffer for all chunks."""
    buffer = torch.empty(1, 4)

    def chunks():
        for client in range(3):
            yield Upload(torch.tensor([client]), buffer.fill_(client), torch.zeros(1, 0), torch.ones(1))

    link = build_channel("digital(aggregate=median)")
    assert link.superpose(chunks(), link.draw(3, torch.arange(3), 4, 0, 0)).g.tolist() == [1] * 4


MIN_CLIENTS = [("krum(f=2)", 7), ("krum(f=2, keep=3)", 7), ("krum(f=2, keep=4)", 8), ("trimmed_mean(f=2)", 5)]


@pytest.mark.parametrize(("spec", "min_clients"), MIN_CLIENTS)
def test_too_few_clients_are_refused_before_the_training(spec, min_clients):
    link = build_channel(f"digital(aggregate='{spec}')")
    with pytest.raises(InputError) as error:
        link.draw(min_clients - 1, torch.arange(min_clients - 1), 5, 0, 0)
    assert (error.value.code, error.value.fields) == (
        "too-few-clients",
        {"clients": min_clients - 1, "low": min_clients},
    )
    assert len(link.draw(min_clients, torch.arange(min_clients), 5, 0, 0).clients) == min_clients


@pytest.mark.parametrize(("spec", "min_clients"), MIN_CLIENTS)
def test_a_round_with_too_few_of_the_clients_is_empty(spec, min_clients, caplog):
    link, few = build_channel(f"digital(aggregate='{spec}')"), torch.arange(min_clients - 1)
    draw = link.draw(9, few, 5, 0, 3)
    assert re.search(
        rf"round 3: the aggregator needs at least {min_clients} clients .*, but only {min_clients - 1} transmit",
        caplog.text,
    )
    upload = Upload(few, torch.ones(len(few), 5), torch.zeros(len(few), 0), torch.ones(len(few)))
    got = link.superpose([upload], draw)
    assert (got.senders, got.resources.symbols, got.g.tolist()) == (0, 0, [0.0] * 5)


def test_krum_that_keeps_all_its_clients_is_refused_before_they_train(tiny):
    e = tiny.with_(clients=5, fading="unit()", noise="none()", channel="digital(aggregate='krum(f=1, keep=5)')")
    with pytest.raises(InputError) as error:
        run(e)
    assert (error.value.code, error.value.fields["low"]) == ("too-few-clients", 8)
    assert "\n" not in str(error.value)


def test_insufficient_memory_is_refused(monkeypatch):
    assert module.free_memory(torch.device("cpu")) > 2**20
    monkeypatch.setattr(module, "free_memory", lambda device: 2**30)
    clients, d = torch.arange(50), 10_000_000
    with pytest.raises(ResourceError) as error:
        build_channel("digital(aggregate=median)").draw(50, clients, d, 0, 0)
    assert (error.value.code, error.value.fields["needed"]) == ("out-of-memory", 50 * d * 4)
    build_channel("digital(aggregate=median, quantize='qsgd(s=100)')").draw(50, clients, d, 0, 0)  # 0.5 GiB
    build_channel("digital()").draw(50, clients, d, 0, 0)  # keeps no updates


def test_a_divisor_needs_the_mean():
    with pytest.raises(InputError) as error:
        build_channel("digital(aggregate=median)", divisor=4.0)
    assert error.value.code == "divisor-without-mean"


def test_a_stated_divisor_divides_the_sum():
    got = superposed(build_channel("digital()", divisor=4.0), torch.ones(2, 3))
    assert (got.g.tolist(), got.divisor) == ([0.5] * 3, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("digital(quantize=qsgd)", ("missing-argument", None)),
        ("digital(quantize='qsgd(s=0)')", ("out-of-range", "s")),
        ("digital(quantize='qsgd(s=40000)')", ("out-of-range", "s")),
        ("digital(quantize='qsgd(s=4, coding=huffman)')", ("unknown-value", "coding")),
        ("digital(aggregate='krum(f=-1)')", ("out-of-range", "f")),
        ("digital(aggregate=meen)", ("unknown-component", "meen")),
        ("digital(rate=0)", ("out-of-range", "rate")),
    ],
)
def test_invalid_specs_are_refused_in_one_line(text, expected):
    with pytest.raises(InputError) as error:
        channel.one(text)()
    assert (error.value.code, error.value.fields.get("name")) == expected
    assert "\n" not in str(error.value)


def test_the_default_fading_and_noise_are_refused_with_the_values_to_set(tiny):
    with pytest.raises(InputError) as error:
        build(tiny.with_(channel="digital()"))
    assert error.value.code == "unused-setting"
    assert error.value.fields == {
        "channel": "digital",
        "unused": {"fading": tiny.fading, "noise": tiny.noise},
    }
    build(tiny.with_(channel="digital()", fading="unit", noise="none"))
