import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stableair as sa
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.checks import InputError, Note
from stableair.choices import NORM_STATS
from stableair.contracts import Dataset
from stableair.engine import EngineChoice, accelerate
from stableair.evaluation import Averaged, Evaluate, calibration_sample
from stableair.results.checkpoint import read_checkpoint, save_checkpoint
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
    data = sim.train.work.data
    stats = sim.evaluate._recalibrated(sim.start, data.scaling("cpu")).stats
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


def test_the_host_waits_once(normed, monkeypatch):
    """Neither a batch nor a layer asks for a number or sends one: on a GPU each would empty its queue."""
    monkeypatch.setattr("stableair.evaluation.BATCH", 7)
    evaluate, at = replace(build(normed).evaluate, batch=4), build(normed).start
    asked = []

    def counted(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **by_name: asked.append(name) or real(*given, **by_name))

    for name in ("__float__", "__int__", "__bool__", "item", "tolist"):
        counted(torch.Tensor, name)
    counted(Dataset, "scaling")
    evaluate(at)
    assert asked == ["scaling", "tolist"]


@pytest.mark.gpu
def test_the_host_waits_once_on_a_gpu(cuda):
    e = sa.Experiment(data="cifar10", model="resnet18()", clients=5, device=cuda, norm_stats="recalibrated")
    sim = build(e)
    evaluate, scaling = sim.evaluate.at("bf16"), sim.train.work.data.scaling(cuda)
    evaluate(sim.start)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad(), evaluate._arithmetic():
            for treatment in NORM_STATS:
                evaluate._score(sim.start, treatment, scaling)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------------------------- average


def numbers(run):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in run.rounds]


@pytest.mark.parametrize("treatment", NORM_STATS)
def test_the_averaged_model_is_its_formula_and_is_judged_as_named(normed, treatment):
    sim = build(normed.with_(average=0.7, norm_stats=treatment))
    plain, w, stats = build(normed.with_(norm_stats=treatment)), None, None
    for k, new, metrics in simulate(sim, sim.start, 4):
        w = new.w.double() if w is None else 0.7 * w + 0.3 * new.w.double()
        stats = new.stats.double() if stats is None else 0.7 * stats + 0.3 * new.stats.double()
        torch.testing.assert_close(sim.evaluate.model.w, w.float(), msg=f"round {k}")
        torch.testing.assert_close(sim.evaluate.model.stats, stats.float())
        of_average = plain.evaluate(sim.evaluate.model)
        assert (
            metrics["test/accuracy_averaged"] == of_average["test/accuracy"] == of_average[f"test/accuracy_{treatment}"]
        )
    assert not torch.allclose(sim.evaluate.model.w, new.w)


def test_the_average_touches_the_evaluation_alone(tiny):
    one, other = sa.run(tiny), sa.run(tiny.with_(average=0.9))
    assert torch.equal(one.state.w, other.state.w)
    assert "test/accuracy_averaged" not in one.rounds[0]
    assert numbers(one) == [{k: v for k, v in row.items() if "averaged" not in k} for row in numbers(other)]
    assert sa.run(tiny.with_(average=1e-12))["test/accuracy_averaged"] == one["test/accuracy"]
    assert "validation/accuracy_averaged" in sa.run(tiny.with_(average=0.5, evaluate="validation", rounds=1)).rounds[0]


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.parametrize("engine", ["reference", "fast"])
@pytest.mark.parametrize("participation", ["all()", "bernoulli(0.3)"])
def test_an_average_is_resumed_bit_for_bit(normed, tmp_path, engine, participation):
    model = "normed()" if engine == "reference" else "mlp(width=4)"
    e = normed.with_(average=0.8, norm_stats="recalibrated", engine=engine, participation=participation, rounds=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)
        e = e.with_(model=model)
        whole = sa.run(e, tmp_path / "whole")
        sa.run(e.with_(rounds=3), tmp_path / "a")
        resumed = sa.run(e, tmp_path / "a", resume=True)
    assert numbers(resumed) == numbers(whole)
    saved = [read_checkpoint(tmp_path / name).average for name in ("whole", "a")]
    assert torch.equal(saved[0]["w"], saved[1]["w"])
    assert torch.equal(saved[0]["stats"], saved[1]["stats"])


@pytest.mark.parametrize(
    "average",
    [
        {},
        {"w": torch.zeros(3), "stats": torch.zeros(0)},
        {"w": None, "stats": torch.zeros(0)},
        {"w": "w"},
        {"w": torch.zeros(35), "stats": torch.zeros(0), "more": 1},
        {"w": torch.zeros(35, dtype=torch.float64), "stats": torch.zeros(0)},
        [],
    ],
)
def test_an_averaged_model_made_by_hand_is_held_to_its_form(tiny, tmp_path, average):
    e = tiny.with_(average=0.8, rounds=2)
    sa.run(e, tmp_path / "a")
    good = read_checkpoint(tmp_path / "a")
    assert good.average["w"].shape == (35,)
    save_checkpoint(tmp_path / "a", good._replace(average=average), check=False)
    (tmp_path / "a" / "checkpoint.previous.pt").unlink()
    with pytest.raises(InputError, match=r"checkpoint\.pt is corrupted") as told:
        sa.run(e.with_(rounds=3), tmp_path / "a", resume=True)
    assert "\n" not in str(told.value)


def test_an_averaged_model_that_nobody_asked_for_is_refused(tiny, tmp_path):
    sa.run(tiny.with_(rounds=2), tmp_path / "a")
    good = read_checkpoint(tmp_path / "a")
    assert good.average == {}
    save_checkpoint(tmp_path / "a", good._replace(average={"w": good.w, "stats": good.stats}), check=False)
    with pytest.raises(InputError, match=r"the average kept something else: .* remembers nothing: got w, stats"):
        sa.run(tiny, tmp_path / "a", resume=True)


def test_a_checkpoint_from_before_there_was_an_average_is_read(tiny, tmp_path):
    sa.run(tiny.with_(rounds=2), tmp_path / "a")
    content = read_checkpoint(tmp_path / "a")._asdict()
    content.pop("average")
    older = type("Older", (), {"_asdict": lambda self: content})()
    save_checkpoint(tmp_path / "a", older, check=False)
    assert numbers(sa.run(tiny, tmp_path / "a", resume=True)) == numbers(sa.run(tiny))


def test_a_run_that_diverges_ends_with_its_average(tiny, tmp_path):
    e = tiny.with_(average=0.8, server="sgd(lr=1e30)", receiver="none()")
    run = sa.run(e, tmp_path / "a")
    assert run.diverged is not None
    assert run.rounds[-1]["test/accuracy_averaged"] is None
    assert len(sa.run(e, tmp_path / "a", resume=True)) == len(run)


def test_an_average_is_evaluated_in_the_engines_precision(tiny):
    fast = accelerate(build(tiny.with_(average=0.8)), EngineChoice("stacked", "tf32", 5, ""))
    assert isinstance(fast.evaluate, Averaged)
    assert (fast.evaluate.keep, fast.evaluate.evaluate.precision) == (0.8, "tf32")
