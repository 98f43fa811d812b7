import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.components import EXAMPLES
from stableair.contracts import Split
from stableair.data.partitions import by_writer, dirichlet, dirichlet_by_class, divide, labels, partition
from stableair.errors import InputError
from stableair.streams import generator


def samples(y) -> Split:
    y = torch.as_tensor(y)
    return Split(torch.zeros(len(y), 1, 1, 1), y, torch.arange(len(y)) // 2 * 3)


def parts_of(rule, y, clients, seed=0):
    return divide(rule, samples(y), clients, generator(seed, "partition").numpy())


def sizes(parts):
    return [len(p) for p in parts]


def concentration(parts, y):
    """Mean share of a client's most frequent class."""
    return np.mean([np.bincount(np.asarray(y)[p]).max() / len(p) for p in parts])


@pytest.mark.parametrize("spec", EXAMPLES["partitions"])
@given(data=st.data())
def test_every_sample_belongs_to_one_client_and_no_client_is_empty(spec, data):
    clients = data.draw(st.integers(1, 30))
    y = data.draw(st.lists(st.integers(0, 5), min_size=2 * clients, max_size=200))
    parts = parts_of(partition.one(spec)(), y, clients, seed=data.draw(st.integers(0, 5)))  # divide() checks the cover
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(y)))
    assert min(sizes(parts)) >= 1
    assert len(parts) == clients


@pytest.mark.parametrize("spec", EXAMPLES["partitions"])
def test_sixty_thousand_samples_are_divided_over_a_thousand_clients(spec):
    y = np.arange(60_000) % 62
    assert len(parts_of(partition.one(spec)(), y, 1000)) == 1000


@pytest.mark.parametrize("beta", [1e-300, 1e-6, 1e-3, 0.1, 1.0, 1e3, 1e9, 1e308])
@pytest.mark.parametrize("rule", [dirichlet, dirichlet_by_class])
def test_any_dirichlet_concentration_covers_all_samples(rule, beta):
    y = np.arange(997) % 10
    assert len(np.concatenate(parts_of(rule(beta), y, 40))) == 997


@given(st.integers(1, 60), st.integers(60, 300), st.sampled_from([0.01, 0.3, 10.0]))
def test_dirichlet_clients_have_equal_numbers_of_samples_within_one(clients, n, beta):
    found = sizes(parts_of(dirichlet(beta), np.arange(n) % 7, clients))
    assert max(found) - min(found) <= 1


def test_a_huge_concentration_gives_an_even_mix():
    y = np.arange(10_000) % 10
    for beta in (1e6, 1e308):
        assert concentration(parts_of(dirichlet(beta), y, 20), y) < 0.16


def test_clients_take_turns_in_random_order():
    # Clients take samples in turn until their preferred classes are exhausted. One client after the other, most would
    # get all samples of their preferred classes: the mean share of the most frequent class is then 0.73, not 0.51.
    y = np.arange(1000) % 10
    assert np.mean([concentration(parts_of(dirichlet(0.05), y, 10, seed), y) for seed in range(30)]) < 0.6
    one, other = (np.concatenate(parts_of(partition.one("shards(1)")(), y, 10, seed)) for seed in (0, 1))
    assert set(map(tuple, one.reshape(10, 100))) != set(map(tuple, other.reshape(10, 100))), "pools are shuffled"


def test_dirichlet_by_class_gives_unequal_sizes():
    found = sizes(parts_of(dirichlet_by_class(0.3), np.arange(5000) % 10, 50))
    assert max(found) > 2 * min(found)


@pytest.mark.parametrize("rule", [dirichlet, dirichlet_by_class])
def test_a_small_concentration_means_few_classes_per_client(rule):
    y = np.arange(10_000) % 10
    few, some, many = (concentration(parts_of(rule(beta), y, 50), y) for beta in (0.05, 0.3, 1000.0))
    assert few > some > many
    assert many < 0.2
    assert few > 0.5


def test_dirichlet_mixes_have_the_requested_concentration():
    # With far more samples than the clients take from any class, a client's mix is Dir(beta) itself: the mean of
    # sum p^2 over Dir(beta) on c classes is (beta + 1) / (c beta + 1).
    y, beta = np.arange(200_000) % 10, 0.3
    rng, mixes = generator(0, "test").numpy(), []
    for _ in range(40):
        parts = dirichlet(beta)(samples(y), 50, rng)
        mixes += [np.bincount(y[p[:400]], minlength=10) / 400 for p in parts[:2]]
    found = np.mean([(p**2).sum() for p in mixes])
    assert found == pytest.approx((beta + 1) / (10 * beta + 1), rel=0.15)


def test_shards_hold_few_classes():
    y = np.repeat(np.arange(10), 100)
    parts = parts_of(partition.one("shards(k=2)")(), y, 20)
    assert all(len(np.unique(y[p])) <= 4 for p in parts)
    assert set(sizes(parts)) == {50}
    with pytest.raises(InputError) as error:
        parts_of(partition.one("shards(k=100)")(), y, 20)
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", "k")


def test_a_partition_is_a_function_of_the_seed():
    y = np.arange(100) % 5
    one, same, other = (parts_of(dirichlet(1.0), y, 5, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_more_clients_than_samples_are_refused():
    with pytest.raises(InputError) as error:
        parts_of(partition.one("iid()")(), [0, 1, 2], 4)
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", "clients")


def test_a_partition_that_omits_or_repeats_samples_is_refused():
    twice = lambda train, clients, rng: [np.array([0, 1]), np.array([1])]  # noqa: E731
    empty = lambda train, clients, rng: [np.array([0, 1]), np.array([], dtype=int)]  # noqa: E731
    with pytest.raises(InputError) as error:
        parts_of(twice, [0, 1], 2)
    assert error.value.code == "invalid-partition"
    with pytest.raises(InputError) as error:
        parts_of(empty, [0, 1], 2)
    assert error.value.code == "empty-client"


@pytest.mark.parametrize("text", ["dirichlet(0)", "dirichlet(-1)", "dirichlet(nan)", "dirichlet(inf)", "shards(0)"])
def test_invalid_arguments_are_refused(text):
    with pytest.raises(InputError) as error:
        partition.one(text)()
    assert error.value.code == "out-of-range"


def test_no_writer_is_divided_and_clients_have_equal_numbers_of_writers():
    split = Split(torch.zeros(90, 1, 1, 1), torch.zeros(90).long(), torch.arange(90) % 23 * 5)
    parts = divide(by_writer(), split, 6, generator(0, "partition").numpy())
    held = [set(split.writer[p].tolist()) for p in parts]
    assert sorted(w for writers in held for w in writers) == sorted(split.writer.unique().tolist())
    assert sorted(map(len, held)) == [3, 4, 4, 4, 4, 4]
    other = divide(by_writer(), split, 6, generator(1, "partition").numpy())
    assert {frozenset(p) for p in parts} != {frozenset(p) for p in other}, "the writers of a client are random"


def test_by_writer_needs_enough_known_writers():
    split = Split(torch.zeros(9, 1, 1, 1), torch.zeros(9).long(), torch.arange(9) % 3)
    with pytest.raises(InputError) as error:
        divide(by_writer(), split, 4, generator(0, "partition").numpy())
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", "clients")
    with pytest.raises(InputError) as error:
        divide(by_writer(), split._replace(writer=None), 2, generator(0, "partition").numpy())
    assert error.value.code == "no-writers"


def test_partitioners_of_flower():
    y = np.arange(2000) % 10
    skewed = parts_of(partition.one("flwr(DirichletPartitioner, alpha=0.1)")(), y, 8)
    assert concentration(skewed, y) > 2 * concentration(parts_of(partition.one("flwr(IidPartitioner)")(), y, 8), y)
    again = parts_of(partition.one("flwr(DirichletPartitioner, alpha=0.1)")(), y, 8, seed=1)
    assert sizes(again) != sizes(skewed), "it draws from the experiment's seed"
    assert len(parts_of(partition.one("flwr(NaturalIdPartitioner, partition_by=writer)")(), y, 1000)) == 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flwr(DirichletPartitionr, alpha=1)", "did you mean 'DirichletPartitioner'"),
        (
            "flwr(DirichletPartitioner)",
            "missing 1 required positional argument: 'alpha'; allowed arguments: num_partitions",
        ),
        ("flwr(DirichletPartitioner, alpah=1)", "unexpected keyword argument 'alpah'"),
        ("flwr(NaturalIdPartitioner, partition_by=writer)", "returns 50 parts; set clients=50"),
        ("flwr(NaturalIdPartitioner, partition_by=who)", "who"),
    ],
)
def test_an_error_of_flowers_partitioner_is_raised_as_one_line(text, expected):
    with pytest.raises(InputError) as error:
        parts_of(partition.one(text)(), np.arange(100) % 10, 5)
    assert expected in str(error.value)


def test_an_incomplete_partition_is_refused():
    with pytest.raises(InputError) as error:
        parts_of(lambda train, clients, rng: [np.arange(4), np.arange(3, 6)], np.zeros(10, int), 2)
    assert error.value.code == "invalid-partition"


def test_labels_are_counted_for_each_client():
    counts = labels([np.array([0, 3]), np.array([1, 2, 4])], samples([2, 0, 0, 2, 1]), classes=4)
    assert counts.tolist() == [[0, 0, 2, 0], [2, 1, 0, 0]]
