"""Partitions: each training sample belongs to exactly one client, and no client is empty.

A partition is a function (train, clients, rng) -> a list of index arrays (m_n,) int64, one per client. Together they
contain each index 0 ... m-1 once.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from stableair.contracts import Split
from stableair.errors import InputError
from stableair.optional import require
from stableair.spec import Registry
from stableair.validation import choice, integer, positive, short_repr

Partition = Callable[[Split, int, np.random.Generator], list[np.ndarray]]  # (train, clients, rng) -> indices

partition = Registry("partition", "partitions")


def divide(rule: Partition, train: Split, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Apply a partition and check the result: every sample exactly once, no client empty.

    Args:
        rule: The partition.
        train: The training samples.
        clients: Number of clients.
        rng: Random numbers.

    Returns:
        The indices of each client's samples.

    Raises:
        InputError: There are fewer samples than clients (`out-of-range`), a client is empty (`empty-client`), or a
            sample has no client or several (`invalid-partition`).
    """
    if clients > len(train.y):
        text = f"clients must be at most the number of training samples, {len(train.y)}: got {clients}"
        raise InputError(text, code="out-of-range", name="clients", value=clients, high=len(train.y))
    parts = rule(train, clients, rng)
    is_list = isinstance(parts, list | tuple) and all(isinstance(p, np.ndarray) and p.ndim == 1 for p in parts)
    if not is_list or any(len(p) and not np.issubdtype(p.dtype, np.integer) for p in parts):
        allowed = "a list of the indices of each client, integers of shape (m,)"
        text = f"the partition must return {allowed}: got {short_repr(parts)}"
        raise InputError(text, code="invalid-partition", setting="partition")
    if len(parts) != clients or any(len(p) == 0 for p in parts):
        empty = [len(p) for p in parts].count(0)
        text = f"the partition must give samples to each of {clients} clients: got {len(parts)} parts, {empty} empty"
        raise InputError(text, code="empty-client", setting="partition")
    indices = np.concatenate(parts)
    times = np.bincount(indices, minlength=len(train.y)) if indices.min() >= 0 else np.zeros(0)
    if len(times) != len(train.y) or (times != 1).any():
        unassigned, repeated = (times == 0).sum(), (times > 1).sum()
        counts = f"{unassigned} to none, {repeated} to several"
        text = f"the partition must give every sample to exactly one client: it gives {counts}"
        raise InputError(text, code="invalid-partition", setting="partition")
    return list(parts)


def labels(parts: list[np.ndarray], train: Split, classes: int) -> np.ndarray:
    """Count the samples of each class per client: (clients, classes)."""
    y = train.y.cpu().numpy()
    return np.stack([np.bincount(y[part], minlength=classes) for part in parts])


@partition("iid")
def iid() -> Partition:
    """Random assignment of samples; client sizes differ by at most one.

    Returns:
        The partition, (train, clients, rng) -> indices of each client.

    >>> import torch
    >>> train = Split(torch.zeros(10, 1, 1, 1), torch.arange(10) % 2)
    >>> [len(part) for part in iid()(train, 4, np.random.default_rng(0))]
    [3, 3, 2, 2]
    """
    return lambda train, clients, rng: np.array_split(rng.permutation(len(train.y)), clients)


@partition("dirichlet")
def dirichlet(beta: float) -> Partition:
    """Each client draws its class mix from Dir(beta); client sizes differ by at most one.

    Clients draw one sample at a time in random order: first a class from the client's mix q_n ~ Dir(beta), restricted
    to the classes that still have samples, then a sample of that class (Hsu, Qi and Brown, 2019):

        P(class c) = q_nc / sum of q_n over the classes that still have samples

    Args:
        beta: Concentration, above 0; 0.3 in the paper. A smaller beta gives a client fewer classes.

    Returns:
        The partition, (train, clients, rng) -> indices of each client.

    >>> import torch
    >>> train = Split(torch.zeros(600, 1, 1, 1), torch.arange(600) % 2)
    >>> parts = dirichlet(0.001)(train, 3, np.random.default_rng(0))
    >>> [len(part) for part in parts]
    [200, 200, 200]
    >>> int(labels(parts, train, 2).max())  # a small beta: one class per client while samples last
    200
    """
    beta = positive("beta", beta)

    def split(train: Split, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        pools = _by_class(train, rng)
        left = np.array([len(pool) for pool in pools])
        mix = _mixes(beta, clients, len(pools), rng)
        turns = rng.permutation(np.arange(left.sum()) % clients)
        parts: list[list[int]] = [[] for _ in range(clients)]
        start = 0
        while start < len(turns):
            # The probabilities are constant until a class has no samples left: draw the classes of many turns at once.
            takers = turns[start : start + 4096]
            cumulative = _restricted(mix, left).cumsum(1)[takers]
            u = rng.random(len(takers)) * cumulative[:, -1]
            classes = (cumulative <= np.minimum(u, np.nextafter(cumulative[:, -1], 0))[:, None]).sum(1)
            stop = min(_last_turn(classes, c, count) for c, count in enumerate(left) if count)
            for client, c in zip(takers[:stop].tolist(), classes[:stop].tolist(), strict=True):
                parts[client].append(pools[c].pop())
            left -= np.bincount(classes[:stop], minlength=len(left))
            start += stop
        return [np.array(part) for part in parts]

    return split


def _last_turn(classes: np.ndarray, c: int, count: int) -> int:
    """Return the number of draws until class c has been drawn `count` times, or the number of all draws."""
    hits = np.flatnonzero(classes == c)
    return hits[count - 1] + 1 if len(hits) >= count else len(classes)


def _mixes(beta: float, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Draw rows of Dir(beta): (rows, columns); a row that underflows is one-hot."""
    beta = min(beta, 1e12)  # above, numpy overflows; the rows are uniform anyway
    mix = np.nan_to_num(rng.dirichlet(np.full(columns, beta), size=rows))
    underflowed = mix.sum(1) < 0.5
    mix[underflowed] = np.eye(columns)[rng.integers(columns, size=underflowed.sum())]
    return mix


def _restricted(mix: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Restrict the mixes to classes with samples left; replace an empty mix by the remaining class frequencies."""
    mix = mix * (left > 0)
    empty = mix.sum(1) < np.finfo(float).tiny
    mix[empty] = left / left.sum()
    return mix


def _by_class(train: Split, rng: np.random.Generator) -> list[list[int]]:
    """Return the shuffled sample indices of each class that occurs."""
    y = train.y.cpu().numpy()
    return [rng.permutation(np.flatnonzero(y == c)).tolist() for c in np.unique(y)]


@partition("dirichlet_by_class")
def dirichlet_by_class(beta: float) -> Partition:
    """Each class is divided among the clients by a draw from Dir(beta); client sizes differ.

        client n gets the share q_cn of class c,    q_c ~ Dir(beta)    (Yurochkin et al., 2019)

    Args:
        beta: Concentration, above 0. With a smaller beta, fewer clients share a class.

    Returns:
        The partition, (train, clients, rng) -> indices of each client.

    >>> import torch
    >>> train = Split(torch.zeros(600, 1, 1, 1), torch.arange(600) % 2)
    >>> parts = dirichlet_by_class(1e12)(train, 3, np.random.default_rng(0))
    >>> labels(parts, train, 2).tolist()  # a huge beta: equal shares
    [[100, 100], [100, 100], [100, 100]]
    """
    beta = positive("beta", beta)

    def split(train: Split, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        parts: list[list[int]] = [[] for _ in range(clients)]
        for pool in _by_class(train, rng):
            share = _mixes(beta, 1, clients, rng)[0]
            cuts = np.round(share.cumsum()[:-1] * len(pool)).astype(int)
            for part, piece in zip(parts, np.split(np.array(pool), cuts), strict=True):
                part.extend(piece.tolist())
        for part in parts:
            if not part:  # an empty client gets a sample of the largest client
                part.append(max(parts, key=len).pop())
        return [np.array(part) for part in parts]

    return split


@partition("shards")
def shards(k: int = 2) -> Partition:
    """Samples sorted by class and cut into shards; each client gets k random shards.

    McMahan et al. (2017) use k = 2 and 100 clients.

    Args:
        k: Shards per client, at least 1.

    Returns:
        The partition, (train, clients, rng) -> indices of each client.

    >>> import torch
    >>> train = Split(torch.zeros(600, 1, 1, 1), torch.arange(600) % 2)
    >>> parts = shards(k=1)(train, 2, np.random.default_rng(0))
    >>> sorted(labels(parts, train, 2).tolist())
    [[0, 300], [300, 0]]
    """
    k = integer("k", k, 1)

    def split(train: Split, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        if k * clients > len(train.y):
            text = f"{k} shards for each of {clients} clients need {k * clients} samples: got {len(train.y)}"
            raise InputError(text, code="out-of-range", name="k", value=k)
        pieces = np.array_split(np.concatenate([np.array(pool) for pool in _by_class(train, rng)]), k * clients)
        return [
            np.concatenate([pieces[i] for i in shard]) for shard in rng.permutation(k * clients).reshape(clients, k)
        ]

    return split


@partition("by_writer")
def by_writer() -> Partition:
    """Random assignment of whole writers; the numbers of writers per client differ by at most one.

    The data set must have writers, such as femnist, or a CSV file with `writer=...`.

    Returns:
        The partition, (train, clients, rng) -> indices of each client.

    >>> import torch
    >>> train = Split(torch.zeros(6, 1, 1, 1), torch.zeros(6).long(), writer=torch.tensor([3, 3, 5, 5, 5, 8]))
    >>> sorted(part.tolist() for part in by_writer()(train, 3, np.random.default_rng(0)))
    [[0, 1], [2, 3, 4], [5]]
    """

    def split(train: Split, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        if train.writer is None:
            sets = "femnist, hf(..., writer=COLUMN), csv(..., writer=COLUMN) or npz with an array writer"
            text = f"by_writer needs data with writers: {sets}"
            raise InputError(text, code="no-writers")
        writer = train.writer.cpu().numpy()
        writers = np.unique(writer)
        if clients > len(writers):
            text = f"clients must be at most the number of writers, {len(writers)}: got {clients}"
            raise InputError(text, code="out-of-range", name="clients", value=clients, high=len(writers))
        owner = rng.permutation(np.arange(len(writers)) % clients)[np.searchsorted(writers, writer)]
        return [np.flatnonzero(owner == client) for client in range(clients)]

    return split


@partition("flwr")
def flwr(partitioner: str, **options: Any) -> Partition:
    """A partitioner of flwr-datasets, such as flwr(DirichletPartitioner, alpha=0.3).

    It needs the extra `partitioners`.

    Args:
        partitioner: Name of a class in `flwr_datasets.partitioner`.
        **options: Arguments of the class. By default num_partitions is the number of clients, partition_by is "label",
            and the seed is derived from the experiment's seed.

    Returns:
        The partition, (train, clients, rng) -> indices of each client.

    >>> str(partition.one("flwr(DirichletPartitioner, alpha=0.3)"))
    'flwr(partitioner=DirichletPartitioner, alpha=0.3)'
    """

    def split(train: Split, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        module = require("flwr_datasets.partitioner", extra="partitioners")
        datasets = require("datasets", extra="partitioners")
        factory = getattr(module, choice("partitioner", partitioner, module.__all__))
        parameters = inspect.signature(factory).parameters
        defaults = {"num_partitions": clients, "partition_by": "label", "seed": int(rng.integers(2**31))}
        columns = {"index": np.arange(len(train.y)), "label": train.y.cpu().numpy()}
        if train.writer is not None:
            columns["writer"] = train.writer.cpu().numpy()
        try:
            arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
            rule = factory(**{key: value for key, value in defaults.items() if key in parameters} | arguments)
            rule.dataset = datasets.Dataset.from_dict(columns)
            if rule.num_partitions != clients:
                text = f"{partitioner} returns {rule.num_partitions} parts; set clients={rule.num_partitions}"
                raise InputError(text, code="wrong-partition-count", parts=rule.num_partitions, clients=clients)
            return [np.array(rule.load_partition(i)["index"]) for i in range(clients)]
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, InputError):
                raise
            text = f"{partitioner}: {error}; allowed arguments: {', '.join(parameters)}"
            raise InputError(text, code="partitioner-failed", name=partitioner) from error

    return split
