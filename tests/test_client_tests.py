"""The test set of each client, and the statistics of the clients' accuracies."""

import pytest
import torch

import stableair as sa
from helpers.errors import refused
from stableair.builder import build
from stableair.client_tests import ClientTests, client_tests
from stableair.contracts import Dataset, Split

STATISTICS = ["test/client_accuracy_mean", "test/client_accuracy_p10", "test/client_accuracy_worst"]


def dataset(train_y, test_y, train_writer=None, test_writer=None, classes=3):
    def split(y, writer):
        return Split(torch.zeros(len(y), 1, 1, 1), torch.tensor(y), None if writer is None else torch.tensor(writer))

    return Dataset(split(train_y, train_writer), split(test_y, test_writer), classes, "logistic()")


def parts(*indices):
    return [torch.tensor(index) for index in indices]


def test_a_client_is_tested_with_its_mix_of_classes():
    data = dataset([0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 1, 2])
    tests = client_tests(data, parts([0, 1, 2, 3], [4, 5]))
    correct = torch.tensor([True, False, False, False, True, True, False])  # 1/4, 1 and 0 of the classes
    assert tests.accuracies(correct).tolist() == pytest.approx([3 / 4 * 1 / 4 + 1 / 4 * 1, 1 / 2 * 1 + 1 / 2 * 0])


def test_a_class_without_test_samples_is_left_out():
    tests = client_tests(dataset([0, 0, 1, 2], [0, 0, 2]), parts([0, 1, 2], [3]))
    assert tests.accuracies(torch.tensor([True, False, True])).tolist() == [0.5, 1.0]
    with_none = dataset([0, 1], [0, 0])
    assert refused("no-client-test", client_tests, with_none, parts([0], [1])).fields["client"] == 1


def test_a_client_with_all_samples_of_its_writers_is_tested_on_the_writers_test_samples():
    """Every sample has the same weight, and samples of other writers have no effect."""
    data = dataset([0, 0, 0, 0], [0, 1, 2, 0, 0, 1], [5, 5, 7, 9], [5, 7, 7, 9, 9, 8])
    tests = client_tests(data, parts([0, 1, 2], [3]))
    correct = torch.tensor([True, False, False, True, False, True])
    assert tests.accuracies(correct).tolist() == pytest.approx([1 / 3, 1 / 2])


@pytest.mark.parametrize(
    ("test_writer", "indices"),
    [
        pytest.param([5, 7, 9], [[0, 2], [1, 3]], id="a writer at two clients"),
        pytest.param([5, 7, 5], [[0, 1, 2], [3]], id="a client without test samples"),
        pytest.param(None, [[0, 1, 2], [3]], id="no writers of the test samples"),
    ],
)
def test_without_writers_the_class_proportions_are_used(test_writer, indices):
    data = dataset([0, 1, 1, 2], [0, 1, 2], [5, 5, 7, 9], test_writer)
    without_writers = dataset([0, 1, 1, 2], [0, 1, 2])
    tests, expected = (client_tests(each, parts(*indices)) for each in (data, without_writers))
    assert torch.equal(tests.mix, expected.mix)
    assert torch.equal(tests.group, expected.group)


def test_the_statistics_are_those_of_the_clients():
    tests = ClientTests(torch.arange(4).repeat_interleave(10), torch.eye(4, dtype=torch.float64))
    correct = torch.cat([torch.arange(10) < right for right in (2, 4, 6, 10)])  # 0.2, 0.4, 0.6 and 1
    metrics = tests.metrics(correct, "validation")
    assert metrics == pytest.approx(
        {
            "validation/client_accuracy_mean": 0.55,
            "validation/client_accuracy_p10": 0.2 + 0.3 * 0.2,  # a share of 0.3 of the way to the second
            "validation/client_accuracy_worst": 0.2,
        }
    )


def test_one_client_with_the_mix_of_the_test_split_has_its_accuracy(tiny):
    e = tiny.with_(data="synthetic(samples=60, classes=3, shape=(1, 2, 2), spread=3)", clients=1, evaluate_clients=True)
    sim = build(e)
    metrics = sim.evaluate(sim.start.model)  # as many samples of each class in either split
    assert all(metrics[name] == pytest.approx(metrics["test/accuracy"]) for name in STATISTICS)


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_the_accuracies_are_recorded_on_request_and_change_nothing_else(tiny, engine):
    e = tiny.with_(partition="dirichlet_by_class(0.3)", engine=engine)
    plain, run = sa.run(e), sa.run(e.with_(evaluate_clients=True))
    assert torch.equal(plain.state.model.w, run.state.model.w)
    for before, row in zip(plain.rounds, run.rounds, strict=True):
        assert [name for name in row if name not in before] == STATISTICS
        assert all(row[name] == before[name] for name in before if name != "seconds")
        mean, p10, worst = (row[name] for name in STATISTICS)
        assert 0 <= worst <= p10 <= mean <= 1
    assert run.experiment.id() != e.id()


def test_the_accuracies_use_the_selected_norm_statistics(tiny, registries):
    @sa.model("normed")
    def normed():
        return lambda shape, classes: torch.nn.Sequential(
            torch.nn.BatchNorm2d(1), torch.nn.Flatten(), torch.nn.Linear(4, classes)
        )

    for treatment in ("clients", "recalibrated", "batch"):
        sim = build(tiny.with_(model="normed()", clients=1, evaluate_clients=True, norm_stats=treatment))
        shifted = sim.start.model._replace(stats=sim.start.model.stats + 3)
        metrics = sim.evaluate(shifted)
        assert metrics["test/client_accuracy_mean"] == pytest.approx(metrics[f"test/accuracy_{treatment}"])


def test_the_command_line_enables_the_accuracies_of_clients(command):
    words = "rounds=1", "clients=3", "data=synthetic(samples=30)", "--out", "runs/a"
    for value, recorded in (("true", True), ("false", False)):
        code, _, errors = command("run", *words[:-1], f"runs/{value}", f"evaluate_clients={value}")
        assert code == 0, errors
        assert ("test/client_accuracy_worst" in sa.load(f"runs/{value}").rounds[0]) == recorded
    assert command("run", *words, "evaluate_clients=yes")[0] == 2
