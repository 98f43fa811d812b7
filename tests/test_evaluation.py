import random
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stableair as sa
from helpers.runs import recorded_metrics
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.contracts import Dataset
from stableair.engine import EngineChoice, accelerate
from stableair.errors import CorruptRunError, InputError
from stableair.evaluation import Evaluate, calibration_sample
from stableair.literals import NormStats
from stableair.results.checkpoint import read_checkpoint, save_checkpoint
from stableair.results.lock import locked
from stableair.vector import ModelState
from stableair.vector import state as state_of

NORM_STATS = get_args(NormStats)


@pytest.fixture
def normed(tiny, registries):
    """An experiment whose model has a batch norm, and a dropout that must be inactive in every evaluation."""

    @sa.model("normed")
    def normed(momentum=0.1):
        return lambda shape, classes: nn.Sequential(
            nn.BatchNorm2d(1, momentum=momentum), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4, classes)
        )

    return tiny.with_(model="normed()")


def accuracies(metrics):
    return [metrics[f"test/accuracy_{treatment}"] for treatment in NORM_STATS]


def shifted(sim, by):
    """The model of the start, with a shift of its norm statistics."""
    return sim.start.model._replace(stats=sim.start.model.stats + by)


def test_all_norm_statistics_are_recorded_and_the_selected_one_is_the_accuracy(normed):
    for treatment in NORM_STATS:
        sim = build(normed.with_(norm_stats=treatment))
        found = sim.evaluate(shifted(sim, 3))
        assert found["test/accuracy"] == found[f"test/accuracy_{treatment}"]
        assert list(found) == ["test/accuracy", "test/loss", *(f"test/accuracy_{t}" for t in NORM_STATS)]
    losses = {t: build(normed.with_(norm_stats=t)).evaluate(shifted(sim, 3))["test/loss"] for t in NORM_STATS}
    assert len(set(losses.values())) == 3, "the loss also depends on it"


def test_the_statistics_of_the_clients_affect_only_their_treatment(normed):
    sim = build(normed)
    right, wrong = sim.evaluate(sim.start.model), sim.evaluate(shifted(sim, 50))
    assert accuracies(right)[1:] == accuracies(wrong)[1:]
    assert right["test/loss"] != wrong["test/loss"]


def test_each_treatment_equals_a_direct_computation(normed):
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
    data = sim.train.work.data
    stats = sim.evaluate._recalibrated(sim.start.model, data.scaling("cpu")).stats
    expected = torch.stack([torch.stack([b.mean(), b.var()]) for b in batches]).mean(0)
    torch.testing.assert_close(stats, expected, rtol=1e-5, atol=1e-6)


def test_an_evaluation_does_not_change_the_module(normed):
    sim = build(normed.with_(model="normed(momentum=0.3)", norm_stats="recalibrated"))
    module = sim.train.work.module
    before = sim.start.model.stats.clone(), module[0].num_batches_tracked.clone()
    first = sim.evaluate(sim.start.model)
    assert sim.evaluate(sim.start.model) == first
    assert torch.equal(sim.start.model.stats, before[0])
    assert torch.equal(module[0].num_batches_tracked, before[1])
    assert module[0].momentum == 0.3


def test_a_model_with_a_counter_and_random_draws_is_evaluated_reproducibly(tiny, registries):
    """Its counter and the generators of the caller do not change, and every evaluation draws the same numbers."""

    class Noisy(nn.Linear):
        def __init__(self, classes):
            super().__init__(4, classes)
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x):
            self.calls += 1
            x = x + torch.randn_like(x) + random.random() + np.random.random()
            return super().forward(x.flatten(1)) * self.calls

    sa.model("noisy")(lambda: lambda shape, classes: Noisy(classes))
    sim = build(tiny.with_(model="noisy()"))
    module, calls = sim.train.work.module, sim.train.work.module.calls.item()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = torch.rand(1), random.random(), np.random.random()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    first = sim.evaluate(sim.start.model)
    assert (torch.rand(1), random.random(), np.random.random()) == expected
    assert sim.evaluate(sim.start.model) == first
    assert module.calls == calls


def test_the_norm_statistics_of_the_evaluation_do_not_affect_the_training(normed):
    sims = [build(normed.with_(norm_stats=treatment)) for treatment in NORM_STATS]
    runs = [[r.state.model for r in simulate(sim, sim.start, 3)] for sim in sims]
    for other in runs[1:]:
        assert all(torch.equal(a.w, b.w) and torch.equal(a.stats, b.stats) for a, b in zip(runs[0], other, strict=True))


def test_the_calibration_sample_has_forty_shuffled_samples_of_each_client():
    parts = [torch.arange(0, 100), torch.arange(100, 130), torch.arange(130, 300)]
    sample = calibration_sample(parts, seed=3)
    counts = [((sample >= low) & (sample < high)).sum().item() for low, high in ((0, 100), (100, 130), (130, 300))]
    assert counts == [40, 30, 40]
    assert len(sample.unique()) == len(sample)
    assert torch.equal(sample, calibration_sample(parts, seed=3))
    assert not torch.equal(sample, calibration_sample(parts, seed=4))
    assert len((sample[:40] // 100).unique()) == 3, "the first batch has samples of all clients"


def test_a_model_without_norm_statistics_has_one_accuracy_and_logs_it(tiny, caplog):
    sim = build(tiny.with_(norm_stats="batch"))
    assert "norm_stats=batch changes nothing: the model keeps no norm statistics" in caplog.text
    assert list(sim.evaluate(sim.start.model)) == ["test/accuracy", "test/loss"]
    caplog.clear()
    build(tiny)
    assert not caplog.records
    with pytest.raises(InputError) as error:
        tiny.with_(norm_stats="client")
    assert (error.value.code, error.value.fields["name"]) == ("unknown-value", "norm_stats")


def test_test_batches_never_have_a_single_sample(normed):
    sim = build(normed.with_(norm_stats="batch"))
    odd = Evaluate(sim.train.work.module, sim.train.work.data, "test", "batch", sim.evaluate.calibration, batch=11)
    assert len(sim.train.work.data.test.y) % 11 == 1, "equal batches of 11 would leave a single sample"
    assert odd(state_of(sim.train.work.module))["test/accuracy"] >= 0


def test_an_evaluation_synchronises_once(normed, monkeypatch):
    """Batches and layers transfer no numbers between host and device: each transfer would synchronise a GPU."""
    monkeypatch.setattr("stableair.evaluation.BATCH", 7)
    evaluate, at = replace(build(normed).evaluate, batch=4), build(normed).start.model
    transfers = []

    def counted(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **by_name: transfers.append(name) or real(*given, **by_name))

    for name in ("__float__", "__int__", "__bool__", "item", "tolist"):
        counted(torch.Tensor, name)
    counted(Dataset, "scaling")
    evaluate(at)
    assert transfers == ["scaling", "tolist"]


@pytest.mark.gpu
def test_an_evaluation_synchronises_once_on_a_gpu(cuda):
    e = sa.Experiment(data="cifar10", model="resnet18()", clients=5, device=cuda, norm_stats="recalibrated")
    sim = build(e)
    evaluate, scaling = sim.evaluate.at("bf16"), sim.train.work.data.scaling(cuda)
    evaluate(sim.start.model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad(), evaluate._arithmetic():
            for treatment in NORM_STATS:
                evaluate._score(sim.start.model, treatment, scaling)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------------------------- average


@pytest.mark.parametrize("treatment", NORM_STATS)
def test_the_averaged_model_follows_its_formula_and_is_evaluated_with_the_selected_statistics(normed, treatment):
    sim = build(normed.with_(average=0.7, norm_stats=treatment))
    plain, w, stats = build(normed.with_(norm_stats=treatment)), None, None
    for k, state, metrics in simulate(sim, sim.start, 4):
        new, averaged = state.model, ModelState(*state.average)
        w = new.w.double() if w is None else 0.7 * w + 0.3 * new.w.double()
        stats = new.stats.double() if stats is None else 0.7 * stats + 0.3 * new.stats.double()
        torch.testing.assert_close(averaged.w, w.float(), msg=f"round {k}")
        torch.testing.assert_close(averaged.stats, stats.float())
        expected = plain.evaluate(averaged)
        assert metrics["test/accuracy_averaged"] == expected["test/accuracy"] == expected[f"test/accuracy_{treatment}"]
    assert not torch.allclose(averaged.w, new.w)


def test_the_average_affects_only_the_evaluation(tiny):
    one, other = sa.run(tiny), sa.run(tiny.with_(average=0.9))
    assert torch.equal(one.state.model.w, other.state.model.w)
    assert "test/accuracy_averaged" not in one.rounds[0]
    assert recorded_metrics(one) == [
        {k: v for k, v in row.items() if "averaged" not in k} for row in recorded_metrics(other)
    ]
    assert sa.run(tiny.with_(average=1e-12))["test/accuracy_averaged"] == one["test/accuracy"]
    assert "validation/accuracy_averaged" in sa.run(tiny.with_(average=0.5, evaluate="validation", rounds=1)).rounds[0]


@pytest.mark.parametrize("engine", ["reference", "fast"])
@pytest.mark.parametrize("participation", ["all()", "bernoulli(0.3)"])
def test_an_average_is_resumed_bit_for_bit(normed, tmp_path, engine, participation):
    model = "normed()" if engine == "reference" else "mlp(width=4)"
    e = normed.with_(average=0.8, norm_stats="recalibrated", engine=engine, participation=participation, rounds=6)
    e = e.with_(model=model)
    whole = sa.run(e, tmp_path / "whole")
    sa.run(e.with_(rounds=3), tmp_path / "a")
    resumed = sa.run(e, tmp_path / "a", resume=True)
    assert recorded_metrics(resumed) == recorded_metrics(whole)
    one, other = (read_checkpoint(tmp_path / name).state for name in ("whole", "a"))
    assert all(torch.equal(a, b) for a, b in zip(one.average, other.average, strict=True))
    assert one.average[0].shape == one.model.w.shape


@pytest.mark.parametrize(
    "average",
    [
        (torch.zeros(3), torch.zeros(0)),
        (torch.zeros(35),),
        (None, torch.zeros(0)),
        {"w": torch.zeros(35), "stats": torch.zeros(0)},
        "w",
    ],
)
def test_a_checkpoint_with_an_average_of_another_structure_is_refused(tiny, tmp_path, average):
    e = tiny.with_(average=0.8, rounds=2)
    sa.run(e, tmp_path / "a")
    good = read_checkpoint(tmp_path / "a")
    assert good.state.average[0].shape == (35,)
    with locked(tmp_path / "a") as folder:
        save_checkpoint(folder, good._replace(state=good.state._replace(average=average)))
    with pytest.raises(CorruptRunError) as error:
        sa.run(e.with_(rounds=3), tmp_path / "a", resume=True)
    assert "\n" not in str(error.value)


def test_a_run_that_diverges_ends_with_its_average(tiny, tmp_path):
    e = tiny.with_(average=0.8, server="sgd(lr=1e30)", receiver="none()")
    run = sa.run(e, tmp_path / "a")
    assert run.diverged is not None
    assert run.rounds[-1]["test/accuracy_averaged"] is None
    assert len(sa.run(e, tmp_path / "a", resume=True)) == len(run)


def test_an_average_is_evaluated_in_the_engines_precision(tiny):
    fast = accelerate(build(tiny.with_(average=0.8)), EngineChoice("stacked", "tf32", 5, ""))
    assert fast.average is not None
    assert fast.evaluate.precision == "tf32"
