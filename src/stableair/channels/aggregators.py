"""What a server makes of updates that it has one by one: (N, d) -> (d,), by slices of the vector.

An aggregator works entry by entry, (N, s) -> (s,) on a slice; or it gives each client a weight, from the squared
distances between the updates (N, N), which are added up slice by slice. An N x d matrix of floats never exists.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stableair.channels.kinds import aggregator
from stableair.checks import InputError, Note, whole


@dataclass(frozen=True)
class Aggregator:
    """A rule over individual updates: entry by entry, or by weights; with neither it is their mean."""

    entries: Callable[[Tensor], Tensor] | None = None  # (N, s) -> (s,)
    weights: Callable[[Tensor], Tensor] | None = None  # squared distances (N, N) float64 -> (N,) float64, of sum 1
    least: int = 1  # clients that it needs
    why: str = ""  # in words

    def enough(self, k: int, senders: int, clients: int) -> bool:
        """Whether so many of the clients are enough in round k; where all of them are too few it is refused."""
        needed = f"the aggregator needs at least {self.least} clients ({self.why})"
        if clients < self.least:
            raise InputError(f"{needed}: there are {clients}")
        if 0 < senders < self.least:
            warnings.warn(f"round {k}: {needed}, and {senders} sent", Note, stacklevel=2)
        return senders >= self.least

    @property
    def keeps(self) -> bool:
        """Whether it needs the updates one by one."""
        return bool(self.entries or self.weights)


@aggregator("mean")
def mean() -> Aggregator:
    """The mean of the updates; none of them is kept.

    >>> mean().keeps
    False
    """
    return Aggregator()


@aggregator("trimmed_mean")
def trimmed_mean(f: int) -> Aggregator:
    """In each entry the mean without the f largest and the f smallest values (Yin et al., 2018); more than 2 f clients.

    >>> trimmed_mean(f=1).entries(Tensor([[1.0], [2.0], [4.0], [90.0]])).tolist()
    [3.0]
    """
    f = whole("f", f, 0)
    return Aggregator(entries=lambda rows: _middle(rows, f), least=2 * f + 1, why="more than 2 f")


@aggregator("median")
def median() -> Aggregator:
    """In each entry the median of the clients' values, of an even number the mean of the two in the middle.

    >>> median().entries(Tensor([[1.0], [2.0], [4.0], [90.0]])).tolist()
    [3.0]
    """
    return Aggregator(entries=lambda rows: _middle(rows, (len(rows) - 1) // 2))


def _middle(rows: Tensor, f: int) -> Tensor:
    """The mean over the clients of all values but the f largest and the f smallest: (N, s) -> (s,)."""
    return rows.sort(0).values[f : len(rows) - f].mean(0)


@aggregator("krum")
def krum(f: int, keep: int = 1) -> Aggregator:
    """Krum (Blanchard et al., 2017): the update nearest to its N - f - 2 nearest, or the mean of the best `keep`.

    score_n = the sum of the N - f - 2 smallest |u_n - u_m|^2, m != n. It stands f false clients of N >= 2 f + 3.

    >>> squares = torch.cdist(*[Tensor([[0.0], [1.0], [1.1], [1.3], [9.0]])] * 2) ** 2
    >>> krum(f=1).weights(squares).tolist()
    [0.0, 0.0, 1.0, 0.0, 0.0]
    """
    f, keep = whole("f", f, 0), whole("keep", keep, 1)

    def weights(squares: Tensor) -> Tensor:
        nearest = squares.sort(1).values[:, 1 : len(squares) - f - 1]  # the first is the distance to itself
        best = nearest.sum(1).argsort(stable=True)[:keep]
        return torch.zeros(len(squares), dtype=torch.float64).index_fill_(0, best, 1 / len(best))

    return Aggregator(weights=weights, least=2 * f + 3, why="2 f + 3")


@aggregator("geometric_median")
def geometric_median(steps: int = 100) -> Aggregator:
    """The point with the least sum of distances to the updates, by at most `steps` steps of Weiszfeld's.

    z = sum_n w_n u_n with w_n ~ 1 / |u_n - z|. The distances follow from those between the updates,
    |u_n - z|^2 = (D w)_n - w' D w / 2, so that no step sees a vector. A distance below 1e-6 of the largest counts as
    that (smoothed so by Pillutla et al., 2022).

    >>> squares = torch.cdist(*[Tensor([[0.0], [1.0], [90.0]])] * 2) ** 2
    >>> geometric_median().weights(squares).numpy().round(3)
    array([0., 1., 0.])
    """
    steps = whole("steps", steps, 1, 100_000)

    def weights(squares: Tensor) -> Tensor:
        w = torch.full((len(squares),), 1 / len(squares), dtype=torch.float64)
        least = 1e-6 * squares.max().sqrt()
        if not least > 0:  # all are the same
            return w
        for _ in range(steps):
            towards = squares.double() @ w
            new = 1 / (towards - w @ towards / 2).clamp_(min=0).sqrt_().clamp_(min=least)
            new /= new.sum()
            if torch.allclose(new, w, rtol=1e-9, atol=1e-12):
                break
            w = new
        return w

    return Aggregator(weights=weights)
