import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stableair as sa
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.checks import InputError, Note
from stableair.choices import NORM_STATS
from stableair.evaluation import Evaluate, calibration_sample
from stableair.vector import state


@pytest.fixture
def normed(tiny, registries):
    """An experiment whose model has a batch norm, and a dropout that must stay asleep in every evaluation."""

    @sa.model("normed")
    def normed(momentum=0.1):
        return lambda shape, classes: nn.Sequential(
            nn.BatchNorm2d(1, momentum=momentum), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4, classes)
        )

    return tiny.with_(model="normed()")


def accuracies(metrics):
    return [metrics[f"test/accuracy_{treatment}"] for treatment in NORM_STATS]


def shifted(sim, by):
    """What the clients measured is far off; the weights are the same."""
    return sim.start._replace(stats=sim.start.stats + by)


def test_every_treatment_is_recorded_and_the_one_named_is_the_accuracy(normed):
    for treatment in NORM_STATS:
        sim = build(normed.with_(norm_stats=treatment))
        found = sim.evaluate(shifted(sim, 3))
        assert found["test/accuracy"] == found[f"test/accuracy_{treatment}"]
        assert list(found) == ["test/accuracy", "test/loss", *(f"test/accuracy_{t}" for t in NORM_STATS)]
    losses = {t: build(normed.with_(norm_stats=t)).evaluate(shifted(sim, 3))["test/loss"] for t in NORM_STATS}
    assert len(set(losses.values())) == 3, "the loss follows too"


def test_the_clients_statistics_count_for_the_clients_treatment_alone(normed):
    sim = build(normed)
    right, wrong = sim.evaluate(sim.start), sim.evaluate(shifted(sim, 50))
    assert accuracies(right)[1:] == accuracies(wrong)[1:]
    assert right["test/loss"] != wrong["test/loss"]


def test_each_treatment_is_what_a_direct_computation_gives(normed):
    for treatment in NORM_STATS:
        sim = build(normed.with_(norm_stats=treatment))
        data, module, at = sim.train.work.data, sim.train.work.module, shifted(sim, 2)
        x, linear = data.inputs(data.test.x), module[3]
        found = sim.evaluate(at)["test/loss"]
        sample = data.inputs(data.train.x[sim.evaluate.calibration])  # fewer than 200: one batch
        mean, var = {
            "clients": at.stats,
            "recalibrated": (sample.mean(), sample.var()),
            "batch": (x.mean(), x.var(correction=0)),
        }[treatment]
        output = F.linear(((x - mean) / (var + 1e-5).sqrt()).flatten(1), linear.weight, linear.bias)
        assert found == pytest.approx(F.cross_entropy(output, data.test.y).item(), rel=1e-5)


def test_recalibration_averages_its_batches_evenly(normed, monkeypatch):
    monkeypatch.setattr("stableair.evaluation.BATCH", 7)
    sim = build(normed.with_(norm_stats="recalibrated"))
    sample = sim.train.work.data.inputs(sim.train.work.data.train.x[sim.evaluate.calibration])
    batches = sample.tensor_split(-(-len(sample) // 7))
    assert len(batches) > 3
    assert max(map(len, batches)) - min(map(len, batches)) <= 1
    stats = sim.evaluate._recalibrated(sim.start).stats
    expected = torch.stack([torch.stack([b.mean(), b.var()]) for b in batches]).mean(0)
    torch.testing.assert_close(stats, expected, rtol=1e-5, atol=1e-6)


def test_an_evaluation_leaves_no_trace(normed):
    sim = build(normed.with_(model="normed(momentum=0.3)", norm_stats="recalibrated"))
    module = sim.train.work.module
    before = sim.start.stats.clone(), module[0].num_batches_tracked.clone()
    first = sim.evaluate(sim.start)
    assert sim.evaluate(sim.start) == first
    assert torch.equal(sim.start.stats, before[0])
    assert torch.equal(module[0].num_batches_tracked, before[1])
    assert module[0].momentum == 0.3


def test_the_treatment_never_touches_the_training(normed):
    sims = [build(normed.with_(norm_stats=treatment)) for treatment in NORM_STATS]
    runs = [[r.state for r in simulate(sim, sim.start, 3)] for sim in sims]
    for other in runs[1:]:
        assert all(torch.equal(a.w, b.w) and torch.equal(a.stats, b.stats) for a, b in zip(runs[0], other, strict=True))


def test_the_calibration_sample_is_forty_of_each_client_and_mixed():
    parts = [torch.arange(0, 100), torch.arange(100, 130), torch.arange(130, 300)]
    sample = calibration_sample(parts, seed=3)
    counts = [((sample >= low) & (sample < high)).sum().item() for low, high in ((0, 100), (100, 130), (130, 300))]
    assert counts == [40, 30, 40]
    assert len(sample.unique()) == len(sample)
    assert torch.equal(sample, calibration_sample(parts, seed=3))
    assert not torch.equal(sample, calibration_sample(parts, seed=4))
    assert len((sample[:40] // 100).unique()) == 3, "the first batch holds all clients"


def test_a_model_without_norm_statistics_has_one_accuracy_and_says_so(tiny):
    with pytest.warns(Note, match="norm_stats=batch changes nothing: the model keeps no norm statistics"):
        sim = build(tiny.with_(norm_stats="batch"))
    assert list(sim.evaluate(sim.start)) == ["test/accuracy", "test/loss"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(tiny)
    with pytest.raises(InputError, match="norm_stats: 'client' is unknown; did you mean 'clients'"):
        tiny.with_(norm_stats="client")


def test_test_batches_never_hold_a_single_sample(normed):
    sim = build(normed.with_(norm_stats="batch"))
    odd = Evaluate(sim.train.work.module, sim.train.work.data, "test", "batch", sim.evaluate.calibration, batch=11)
    assert len(sim.train.work.data.test.y) % 11 == 1, "plain batches of 11 would leave one sample over"
    assert odd(state(sim.train.work.module))["test/accuracy"] >= 0
