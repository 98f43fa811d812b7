import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stableair as sa
from stableair.algorithm import observe, simulate, snr, used
from stableair.builder import build
from stableair.channels.superposition import check_finite
from stableair.contracts import Received, Resources, Rule, Upload
from stableair.data.datasets import synthetic
from stableair.errors import InputError, NonFiniteUpload
from stableair.participants import participation
from stableair.receivers import as_receiver
from stableair.runner import run
from stableair.servers import as_server_rule
from stableair.vector import powers

IDEAL = {"fading": "unit()", "noise": "none()", "receiver": "none()"}


def rounds(experiment, **parts):
    sim = replace(build(experiment), **parts)
    return list(simulate(sim, sim.start, experiment.rounds))


def test_the_ideal_transmission_is_federated_averaging(tiny):
    sim = build(tiny.with_(**IDEAL, payload="delta"))
    (first, *_) = simulate(sim, sim.start, 1)
    (upload,) = sim.train(sim.start.model, 0, sim.participants(0))
    clients = sim.start.model.w - upload.update
    torch.testing.assert_close(first.state.model.w, clients.mean(0))
    assert first.metrics["channel/snr_db"] is None
    assert first.metrics["clip/fraction"] == 0


def test_gradient_and_delta_give_the_same_noiseless_trajectory_with_another_payload(tiny):
    gradient, delta = (rounds(tiny.with_(**IDEAL, payload=payload)) for payload in ("gradient", "delta"))
    for a, b in zip(gradient, delta, strict=True):
        torch.testing.assert_close(a.state.model.w, b.state.model.w, rtol=1e-4, atol=1e-5)
        assert a.metrics["gradient/norm"] == pytest.approx(b.metrics["gradient/norm"] / tiny.lr, rel=1e-3)


def test_all_receivers_get_the_same_channel_and_batches(tiny):
    observed = {}
    for spec in ("mac(C=0.01)", "gnc(max_norm=0.1)", "clip(C=0.02)", "none()"):
        sim, log = build(tiny.with_(receiver=spec)), []

        def superpose(uploads, fade, channel=sim.channel, log=log):
            log.append((fade.h, fade.xi))
            return channel.superpose(uploads, fade)

        channel = type("Watched", (), {"draw": staticmethod(sim.channel.draw), "superpose": staticmethod(superpose)})()
        states = [r.state.model.w for r in simulate(replace(sim, channel=channel), sim.start, 3)]
        batches = torch.cat(
            [u.update for u in sim.train(sim.start.model, 2, sim.participants(2))]
        )  # from the same state, equal batches give equal updates
        observed[spec] = (log, states, batches)
    (first, *others) = observed.values()
    for log, states, batches in others:
        for (h, xi), (h0, xi0) in zip(log, first[0], strict=True):
            assert torch.equal(h, h0)
            assert torch.equal(xi, xi0)
        assert torch.equal(batches, first[2])
        assert not torch.equal(states[-1], first[1][-1])


def test_observed_rounds_equal_the_recorded_rounds(tiny):
    sim = build(tiny.with_(receiver="mac(C=0.05)"))
    (first,) = simulate(sim, sim.start, 1)
    fade = sim.channel.draw(5, torch.arange(5), len(sim.start.model.w), 0, 0)
    got = sim.channel.superpose(sim.train(sim.start.model, 0, sim.participants(0)), fade)
    clean, m = got.clean, first.metrics
    assert m["gradient/norm"] == pytest.approx(clean.norm().item())
    power = clean.square().sum() / fade.xi.double().square().sum()
    assert m["channel/snr_db"] == pytest.approx(10 * math.log10(power), rel=1e-9)  # the paper's ratio of powers
    assert m["train/loss"] == pytest.approx(got.loss.item())
    changed = [(block - block.median()).abs() > 0.05 for block in sim.layout.split(got.g)]
    assert m["clip/fraction"] == pytest.approx(torch.cat(changed).double().mean().item(), abs=1e-3)
    assert 0 < m["clip/fraction"] < 1


def test_accuracy_and_loss_are_of_the_new_model(tiny):
    sim = build(tiny)
    (first,) = simulate(sim, sim.start, 1)
    assert sim.evaluate(first.state.model).items() <= first.metrics.items()
    assert sim.evaluate(sim.start.model) != sim.evaluate(first.state.model)


def test_accuracy_and_loss_are_means_over_all_samples_for_any_batch_size(tiny):
    sim = build(tiny)
    train = sim.train.work
    for batch in (5, 12, 1000):
        got = replace(sim.evaluate, batch=batch)(sim.start.model)
        output = train.module(train.data.inputs(train.data.test.x))
        assert got["test/loss"] == pytest.approx(F.cross_entropy(output, train.data.test.y).item(), rel=1e-5)
        assert got["test/accuracy"] == pytest.approx((output.argmax(1) == train.data.test.y).double().mean().item())


def test_the_model_learns(tiny):
    longer = tiny.with_(rounds=15, receiver="mac(C=1)", **{"noise.tau": 0.01})
    accuracy = [r.metrics["test/accuracy"] for r in rounds(longer)]
    assert accuracy[-1] > 0.8


def test_validation_does_not_use_the_test_data(tiny, registries):
    @sa.dataset("nan_test_data")
    def nan_test_data():
        data = synthetic(samples=60, classes=3, shape=(1, 2, 2))
        return data._replace(test=data.test._replace(x=data.test.x * math.nan))

    last = rounds(tiny.with_(data="nan_test_data", evaluate="validation"))[-1].metrics
    assert math.isfinite(last["validation/loss"])
    assert not any(name.startswith("test/") for name in last)
    assert math.isnan(rounds(tiny.with_(data="nan_test_data"))[-1].metrics["test/loss"]), (
        "a use of the test data gives NaN"
    )


def test_evaluation_uses_the_running_statistics_and_does_not_change_them(tiny, registries):
    @sa.model("normed")
    def normed():
        return lambda shape, classes: nn.Sequential(
            nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4, classes)
        )

    sim = build(tiny.with_(model="normed()"))
    (first,) = simulate(sim, sim.start, 1)
    model = first.state.model
    before = model.stats.clone()
    assert sim.evaluate(model) == sim.evaluate(model)
    assert torch.equal(model.stats, before)
    assert sim.evaluate(model._replace(stats=model.stats + 3)) != sim.evaluate(model)


def test_a_bad_upload_names_round_and_client(tiny):
    good = build(tiny).train

    def train(state, k, clients):
        for upload in good(state, k, clients):
            if k == 2:
                upload.update[3, 0] = math.nan
            yield Upload(*upload)

    with pytest.raises(NonFiniteUpload) as error:
        rounds(tiny, train=train)
    assert (error.value.k, error.value.client, error.value.what) == (2, 3, "update")


@pytest.mark.parametrize("column", [1, 2, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_upload_names_its_client(column, bad):
    upload = Upload(torch.tensor([2, 3, 5]), torch.ones(3, 4), torch.ones(3, 2), torch.ones(3))
    check_finite(upload, 0)
    upload[column][1] = bad
    with pytest.raises(NonFiniteUpload) as error:
        check_finite(upload, 7)
    assert (error.value.k, error.value.client) == (7, 3)


def test_a_receiver_with_a_wrong_shape_is_refused(tiny):
    for wrong in (as_receiver(lambda g: g[:-1]), Rule(lambda received, memory: (received.g[:-1], memory, {}))):
        with pytest.raises(InputError) as error:
            rounds(tiny, receiver=wrong)
        assert (error.value.code, error.value.setting) == ("wrong-shape", "receiver")


@pytest.mark.parametrize("function", [lambda g: g * 1j, lambda g: g > 0, lambda g: g.long()])
def test_a_receiver_must_return_real_numbers(tiny, function):
    with pytest.raises(InputError) as error:
        rounds(tiny, receiver=as_receiver(function))
    assert (error.value.code, error.value.setting) == ("wrong-dtype", "receiver")


@pytest.mark.parametrize(
    ("function", "code"), [(lambda w, g: w[:-1], "wrong-shape"), (lambda w, g: w * 1j, "wrong-dtype")]
)
def test_a_server_that_breaks_its_contract_is_refused(tiny, function, code):
    with pytest.raises(InputError) as error:
        rounds(tiny, server=as_server_rule(function))
    assert (error.value.code, error.value.setting) == (code, "server")


def test_the_snr_without_signal_or_noise_is_none():
    g = torch.ones(2)
    loud = Received(g, g, g.double(), g.sum(), noise=torch.tensor([0.0, math.inf]), senders=1, divisor=1)
    assert observe(loud, g)["channel/snr_db"] is None
    assert observe(loud._replace(noise=torch.zeros(2)), g)["channel/snr_db"] is None
    assert observe(loud._replace(clean=0 * g.double(), noise=g), g)["channel/snr_db"] is None


@pytest.mark.parametrize(
    "reported",
    [
        Resources(symbols=torch.tensor(5.0)), Resources(symbols=math.nan), Resources(bits=-1.0),
        Resources(energies=(1.0,)), Resources(energies={9999: 1.0}), Resources(energies={0: "1"}),
    ],
)  # fmt: skip
def test_a_channel_must_report_its_resources_as_numbers(tiny, reported):
    with pytest.raises(InputError) as error:
        used(reported, (), build(tiny))
    assert (error.value.code, error.value.setting) == ("wrong-type", "channel")


def test_a_continued_simulation_equals_an_uninterrupted_one(tiny):
    sim = build(tiny)
    whole = list(simulate(sim, sim.start, 4))
    later = list(simulate(sim, whole[1].state, 4, start=2))
    assert [r.k for r in later] == [2, 3]
    assert torch.equal(later[-1].state.model.w, whole[-1].state.model.w)
    assert later[-1].metrics == whole[-1].metrics


@pytest.mark.gpu
def test_a_gpu_follows_the_cpu(tiny, cuda):
    on_cpu, on_gpu = (rounds(tiny.with_(device=device)) for device in ("cpu", cuda))
    for a, b in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(b.state.model.w.cpu(), a.state.model.w, rtol=1e-3, atol=1e-4)
        assert b.metrics["channel/snr_db"] == pytest.approx(a.metrics["channel/snr_db"], rel=1e-4)


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_a_round_without_senders_changes_nothing(tiny, engine, registries, caplog):
    """Every second round has no senders."""
    participation("sometimes")(lambda: lambda n, source: torch.arange(n if source.round % 2 else 0))
    e = tiny.with_(participation="sometimes()", receiver="mac(C=auto)", server="momentum()", engine=engine)
    result = run(e)
    assert "round 2: no client was received; the model stays unchanged" in caplog.text
    silent, loud = result.rounds[2], result.rounds[3]
    assert [silent[name] for name in ("train/loss", "channel/snr_db", "clip/fraction")] == [None] * 3
    assert (silent["channel/senders"], loud["channel/senders"]) == (0, 5)
    assert silent["test/loss"] == result.rounds[1]["test/loss"] != loud["test/loss"]
    assert silent["receiver/tau"] is None
    assert None is not loud["receiver/tau"] != result.rounds[1]["receiver/tau"]


def test_the_powers_of_the_blocks_add_up_to_the_total_power(tiny):
    """Also where the squares of impulses overflow float32."""
    layout, g = build(tiny).layout, torch.Generator().manual_seed(0)
    v = torch.randn(layout.offsets[-1], generator=g)
    v[5] = 1e30
    whole = v.double().square().sum()
    for blocks in ("tensor", "layer", "model"):
        parts = powers(v, layout.merge(blocks))
        assert parts.dtype == torch.float64
        assert len(parts) == len(layout.merge(blocks).names)
        torch.testing.assert_close(parts.sum(), whole, rtol=1e-12, atol=0)
    first, second = powers(v, layout.merge("layer")).tolist()
    assert first == pytest.approx(1e60, rel=1e-6)
    assert second == pytest.approx(layout.merge("layer").split(v)[1].double().norm().item() ** 2)


@pytest.mark.parametrize("blocks", ["tensor", "layer"])
def test_the_snr_of_each_block_is_recorded_on_request(tiny, blocks):
    sim = build(tiny.with_(snr_blocks=blocks))
    (first,) = simulate(sim, sim.start, 1)
    fade = sim.channel.draw(5, torch.arange(5), len(sim.start.model.w), 0, 0)
    clean = sim.channel.superpose(sim.train(sim.start.model, 0, sim.participants(0)), fade).clean
    parts = sim.layout.merge(blocks)
    recorded = {name: value for name, value in first.metrics.items() if name.startswith("channel/snr_db/")}
    assert list(recorded) == [f"channel/snr_db/{name}" for name in parts.names]
    for ratio, signal, noise in zip(recorded.values(), parts.split(clean), parts.split(fade.xi), strict=True):
        assert ratio == pytest.approx(20 * math.log10(signal.norm() / noise.double().norm()), rel=1e-6)
    noise = {name: powers(fade.xi, parts)[i].item() for i, name in enumerate(parts.names)}
    signal = sum(noise[name] * 10 ** (recorded[f"channel/snr_db/{name}"] / 10) for name in parts.names)
    assert 10 * math.log10(signal / sum(noise.values())) == pytest.approx(first.metrics["channel/snr_db"])
    plain = build(tiny)
    assert next(simulate(plain, plain.start, 1)).metrics == {
        k: v for k, v in first.metrics.items() if k not in recorded
    }


def test_the_snr_of_a_block_without_signal_or_noise_is_none(tiny, caplog):
    layout = build(tiny).layout.merge("layer")
    clean, noise = torch.ones(2, layout.offsets[-1])
    noise[: layout.offsets[1]] = 0
    assert list(snr(clean, noise, layout).values()) == [None, 0.0]
    noise[:] = math.inf
    assert set(snr(clean, noise, layout).values()) == {None}
    silent = run(tiny.with_(participation="bernoulli(1e-9)", snr_blocks="layer", rounds=1)).rounds[0]
    assert "no client was received" in caplog.text
    assert [value for name, value in silent.items() if name.startswith("channel/snr_db")] == [None] * 3


@pytest.mark.parametrize(("lr", "warns"), [(0.03, False), (30.0, True)])
def test_a_first_step_that_is_much_larger_than_the_weights_logs_a_warning(lr, warns, tiny, caplog):
    experiment = tiny.with_(server=f"sgd(lr={lr})", receiver="mac(C=0.1)", rounds=3)
    sa.run(experiment)
    assert caplog.text.count("can destroy the model") == warns
