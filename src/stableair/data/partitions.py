"""Who holds which samples: every index to exactly one client, and no client empty.

A partition takes the training split of m samples, the number of clients and a source of chance, and gives the indices
of each client's samples: (train, clients, rng) -> a list of (m_n,) int64, which together are 0 ... m-1.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from stableair.checks import InputError, choice, positive, shown, whole
from stableair.contracts import Split
from stableair.spec import Registry

Partition = Callable[[Split, int, np.random.Generator], list[np.ndarray]]  # (train, clients, rng) -> indices of each

partition = Registry("partition", "partitions")


def divide(rule: Partition, train: Split, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Apply a partition rule and hold it to its promise: exact cover, no client empty."""
    if clients > len(train.y):
        raise InputError(f"clients must be at most the number of training samples, {len(train.y)}: got {clients}")
    parts = rule(train, clients, rng)
    good = isinstance(parts, list | tuple) and all(isinstance(p, np.ndarray) and p.ndim == 1 for p in parts)
    if not good or any(len(p) and not np.issubdtype(p.dtype, np.integer) for p in parts):
        wanted = "a list of the indices of each client, integers of shape (m,)"
        raise InputError(f"the partition must return {wanted}: got {shown(parts)}", part="partition")
    if len(parts) != clients or any(len(p) == 0 for p in parts):
        text = f"the partition left a client empty: {[len(p) for p in parts].count(0)} of {clients}"
        raise InputError(text, part="partition")
    every = np.concatenate(parts)
    times = np.bincount(every, minlength=len(train.y)) if every.min() >= 0 else np.zeros(0)
    if len(times) != len(train.y) or (times != 1).any():
        lost, twice = (times == 0).sum(), (times > 1).sum()
        raise InputError(
            f"the partition does not give every sample to exactly one client: {lost} to none, {twice} to several",
            part="partition",
        )
    return list(parts)


def labels(parts: list[np.ndarray], train: Split, classes: int) -> np.ndarray:
    """How many samples of each class a client holds: (clients, classes)."""
    y = train.y.cpu().numpy()
    return np.stack([np.bincount(y[part], minlength=classes) for part in parts])


@partition("iid")
def iid() -> Partition:
    """Samples dealt at random; sizes equal within one.

    >>> import torch
    >>> train = Split(torch.zeros(10, 1, 1, 1), torch.arange(10) % 2)
    >>> [len(part) for part in iid()(train, 4, np.random.default_rng(0))]
    [3, 3, 2, 2]
    """
    return lambda train, clients, rng: np.array_split(rng.permutation(len(train.y)), clients)


@partition("dirichlet")
def dirichlet(beta: float) -> Partition:
    """Each client draws its class mix from Dir(beta) (the paper's Dir = 0.3); sizes equal within one.

    Clients take turns in random order. At its turn a client draws a class from its own mix q_n ~ Dir(beta), restricted
    to the classes that still have samples, and takes one of that class: P(class c) = q_nc / sum of q_n over these
    (Hsu, Qi and Brown, 2019).

    >>> import torch
    >>> train = Split(torch.zeros(600, 1, 1, 1), torch.arange(600) % 2)
    >>> parts = dirichlet(0.001)(train, 3, np.random.default_rng(0))
    >>> [len(part) for part in parts]
    [200, 200, 200]
    >>> int(labels(parts, train, 2).max())  # a small beta: a client has one class as long as there is any of it
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
            # As long as no class runs out the mixes stand still, so the classes of many turns can be drawn at once.
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
    """After how many turns class c has been drawn `count` times (all of them, if it never is)."""
    hits = np.flatnonzero(classes == c)
    return hits[count - 1] + 1 if len(hits) >= count else len(classes)


def _mixes(beta: float, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of Dir(beta); a concentration so small that a row underflows gives all to one entry."""
    beta = min(beta, 1e12)  # beyond, numpy overflows, and every row is even anyway
    mix = np.nan_to_num(rng.dirichlet(np.full(columns, beta), size=rows))
    lost = mix.sum(1) < 0.5
    mix[lost] = np.eye(columns)[rng.integers(columns, size=lost.sum())]
    return mix


def _restricted(mix: np.ndarray, left: np.ndarray) -> np.ndarray:
    """The mixes on the classes that have samples left; a mix with nothing there takes what there is."""
    mix = mix * (left > 0)
    empty = mix.sum(1) < np.finfo(float).tiny
    mix[empty] = left / left.sum()
    return mix


def _by_class(train: Split, rng: np.random.Generator) -> list[list[int]]:
    """The indices of each class that occurs, in random order."""
    y = train.y.cpu().numpy()
    return [rng.permutation(np.flatnonzero(y == c)).tolist() for c in np.unique(y)]


@partition("dirichlet_by_class")
def dirichlet_by_class(beta: float) -> Partition:
    """Each class is divided over the clients by a draw from Dir(beta); sizes differ.

    Of class c client n gets the share q_cn, q_c ~ Dir(beta) (Yurochkin et al., 2019).

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
            if not part:  # nobody sits out: the largest gives one
                part.append(max(parts, key=len).pop())
        return [np.array(part) for part in parts]

    return split


@partition("shards")
def shards(k: int = 2) -> Partition:
    """Samples sorted by class and cut into k shards a client, dealt at random.

    After McMahan et al. (2017), who give k = 2 shards to each of 100 clients.

    >>> import torch
    >>> train = Split(torch.zeros(600, 1, 1, 1), torch.arange(600) % 2)
    >>> parts = shards(k=1)(train, 2, np.random.default_rng(0))
    >>> sorted(labels(parts, train, 2).tolist())
    [[0, 300], [300, 0]]
    """
    k = whole("k", k, 1)

    def split(train: Split, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        if k * clients > len(train.y):
            raise InputError(f"{k} shards for each of {clients} clients need {k * clients} samples: got {len(train.y)}")
        pieces = np.array_split(np.concatenate([np.array(pool) for pool in _by_class(train, rng)]), k * clients)
        return [np.concatenate([pieces[i] for i in mine]) for mine in rng.permutation(k * clients).reshape(clients, k)]

    return split


@partition("by_writer")
def by_writer() -> Partition:
    """Writers dealt at random, none of them split; each client has as many writers as the others, within one.

    >>> import torch
    >>> train = Split(torch.zeros(6, 1, 1, 1), torch.zeros(6).long(), writer=torch.tensor([3, 3, 5, 5, 5, 8]))
    >>> sorted(part.tolist() for part in by_writer()(train, 3, np.random.default_rng(0)))
    [[0, 1], [2, 3, 4], [5]]
    """

    def split(train: Split, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        if train.writer is None:
            raise InputError("by_writer needs data that know their writers, such as femnist or hf(..., writer=...)")
        writer = train.writer.cpu().numpy()
        writers = np.unique(writer)
        if clients > len(writers):
            raise InputError(f"clients must be at most the number of writers, {len(writers)}: got {clients}")
        owner = rng.permutation(np.arange(len(writers)) % clients)[np.searchsorted(writers, writer)]
        return [np.flatnonzero(owner == client) for client in range(clients)]

    return split


@partition("flwr")
def flwr(partitioner: str, **options: Any) -> Partition:
    """Any partitioner of flwr-datasets with its own options: flwr(DirichletPartitioner, alpha=0.3).

    >>> str(partition.one("flwr(DirichletPartitioner, alpha=0.3)"))
    'flwr(partitioner=DirichletPartitioner, alpha=0.3)'
    """

    def split(train: Split, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        try:
            from datasets import Dataset
            from flwr_datasets import partitioner as known
        except ImportError:
            raise InputError("flwr needs flwr-datasets: pip install 'stableair[partitioners]'") from None
        make = getattr(known, choice("partitioner", partitioner, known.__all__))
        takes = inspect.signature(make).parameters
        ours = {"num_partitions": clients, "partition_by": "label", "seed": int(rng.integers(2**31))}
        columns = {"index": np.arange(len(train.y)), "label": train.y.cpu().numpy()}
        if train.writer is not None:
            columns["writer"] = train.writer.cpu().numpy()
        try:
            given = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
            rule = make(**{key: value for key, value in ours.items() if key in takes} | given)
            rule.dataset = Dataset.from_dict(columns)
            if rule.num_partitions != clients:
                raise InputError(f"{partitioner} makes {rule.num_partitions} parts: set clients={rule.num_partitions}")
            return [np.array(rule.load_partition(i)["index"]) for i in range(clients)]
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{partitioner}: {error}; it takes {', '.join(takes)}") from error

    return split
