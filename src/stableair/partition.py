"""Who holds which samples: every index to exactly one client, and no client empty."""

from collections.abc import Callable

import numpy as np

from stableair.checks import InputError, positive, whole
from stableair.data import Split
from stableair.spec import registry

Partition = Callable[[Split, int, np.random.Generator], list[np.ndarray]]  # (train, clients, rng) -> indices of each

partition = registry("partition", "partitions", __name__)


def divide(rule: Partition, train: Split, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Apply a partition rule and hold it to its promise: exact cover, no client empty."""
    if clients > len(train.y):
        raise InputError(f"clients must be at most the number of training samples, {len(train.y)}: got {clients}")
    parts = rule(train, clients, rng)
    if len(parts) != clients or any(len(p) == 0 for p in parts):
        raise InputError(f"the partition left a client empty: {[len(p) for p in parts].count(0)} of {clients}")
    if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(train.y))):
        raise InputError("the partition does not give every sample to exactly one client")
    return parts


@partition("iid")
def iid() -> Partition:
    """Samples dealt at random; sizes equal within one."""
    return lambda train, clients, rng: np.array_split(rng.permutation(len(train.y)), clients)


@partition("dirichlet")
def dirichlet(beta) -> Partition:
    """Each client draws its class mix from Dir(beta) (the paper's Dir = 0.3); sizes equal within one.

    Clients take turns in random order. At its turn a client draws a class from its own mix, restricted to the
    classes that still have samples, and takes one of that class.
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
def dirichlet_by_class(beta) -> Partition:
    """Each class is divided over the clients by a draw from Dir(beta); sizes differ."""
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
def shards(k=2) -> Partition:
    """Samples sorted by class and cut into k shards a client, dealt at random."""
    k = whole("k", k, 1)

    def split(train: Split, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        if k * clients > len(train.y):
            raise InputError(f"{k} shards for each of {clients} clients need {k * clients} samples: got {len(train.y)}")
        pieces = np.array_split(np.concatenate([np.array(pool) for pool in _by_class(train, rng)]), k * clients)
        return [np.concatenate([pieces[i] for i in mine]) for mine in rng.permutation(k * clients).reshape(clients, k)]

    return split
