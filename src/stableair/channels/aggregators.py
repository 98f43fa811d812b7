"""Aggregation of individual updates: (N, d) -> (d,), by slices of the vector.

An aggregator either works entry by entry, (N, s) -> (s,) on a slice, or computes a weight per client from the squared
distances between the updates (N, N), which are summed over slices. The N x d matrix of floats is never stored.
"""

import torch
from torch import Tensor

from stableair.channels.registries import aggregator
from stableair.contracts import Aggregator
from stableair.validation import integer


@aggregator("mean")
def mean() -> Aggregator:
    """The mean of the updates, which are not stored.

        g = (1/N) sum_n u_n

    Returns:
        The aggregator.

    >>> mean().keeps_updates
    False
    """
    return Aggregator()


@aggregator("trimmed_mean")
def trimmed_mean(f: int) -> Aggregator:
    """Entry-wise mean without the f largest and the f smallest values (Yin et al., 2018).

        g_i = (1 / (N - 2 f)) sum of the N - 2 f middle values of u_1i, ..., u_Ni

    Args:
        f: Number of largest and of smallest values to leave out, at least 0.

    Returns:
        The aggregator, (N, s) -> (s,); it needs more than 2 f clients.

    Raises:
        InputError: f is negative.

    >>> trimmed_mean(f=1).per_entry(Tensor([[1.0], [2.0], [4.0], [90.0]])).tolist()
    [3.0]
    """
    f = integer("f", f, 0)
    return Aggregator(per_entry=lambda rows: _middle(rows, f), min_clients=2 * f + 1, reason="more than 2 f")


@aggregator("median")
def median() -> Aggregator:
    """Entry-wise median of the clients' values.

        g_i = med(u_1i, ..., u_Ni)

    For an even number of clients, it is the mean of the two middle values.

    Returns:
        The aggregator, (N, s) -> (s,).

    >>> median().per_entry(Tensor([[1.0], [2.0], [4.0], [90.0]])).tolist()
    [3.0]
    """
    return Aggregator(per_entry=lambda rows: _middle(rows, (len(rows) - 1) // 2))


def _middle(rows: Tensor, f: int) -> Tensor:
    """Compute the mean over the clients without the f largest and the f smallest values: (N, s) -> (s,)."""
    return rows.sort(0).values[f : len(rows) - f].mean(0)


@aggregator("krum")
def krum(f: int, keep: int = 1) -> Aggregator:
    """Krum (Blanchard et al., 2017): the update that is closest to its nearest N - f - 2 updates.

        score_n = sum of the N - f - 2 smallest |u_n - u_m|^2, m != n

    Krum tolerates f Byzantine clients of N >= 2 f + 3. With keep > 1 it is multi-Krum, which averages at most N - f - 2
    updates (El Mhamdi, Guerraoui and Rouault, 2020, arXiv 1905.04374): a mean of more updates can include those of
    Byzantine clients.

    Args:
        f: Number of tolerated Byzantine clients, at least 0.
        keep: Number of updates to average, those with the smallest scores; at most N - f - 2.

    Returns:
        The aggregator; it needs max(2 f + 3, keep + f + 2) clients.

    Raises:
        InputError: f is negative, or keep is below 1.

    >>> squares = torch.cdist(*[Tensor([[0.0], [1.0], [1.1], [1.3], [9.0]])] * 2) ** 2
    >>> krum(f=1).weights(squares).tolist()
    [0.0, 0.0, 1.0, 0.0, 0.0]
    """
    f, keep = integer("f", f, 0), integer("keep", keep, 1)

    def weights(squares: Tensor) -> Tensor:
        nearest = squares.sort(1).values[:, 1 : len(squares) - f - 1]  # the first is the distance to itself
        best = nearest.sum(1).argsort(stable=True)[:keep]
        return torch.zeros(len(squares), dtype=torch.float64).index_fill_(0, best, 1 / len(best))

    if keep <= f + 1:
        return Aggregator(weights=weights, min_clients=2 * f + 3, reason="2 f + 3")
    reason = "keep + f + 2, because krum averages at most N - f - 2 updates"
    return Aggregator(weights=weights, min_clients=keep + f + 2, reason=reason)


@aggregator("geometric_median")
def geometric_median(steps: int = 100) -> Aggregator:
    """The point with the smallest sum of distances to the updates, by Weiszfeld's method.

        g = argmin_z sum_n |u_n - z|;    z = sum_n w_n u_n,    w_n ~ 1 / |u_n - z|

    With the squared distances D between the updates, |u_n - z|^2 = (D w)_n - w' D w / 2, so no iteration needs a vector
    of length d. Distances are at least 1e-6 times the largest distance between two updates (smoothing as in Pillutla et
    al., 2022).

    Args:
        steps: Largest number of iterations.

    Returns:
        The aggregator.

    Raises:
        InputError: steps is below 1 or above 100,000.

    >>> squares = torch.cdist(*[Tensor([[0.0], [1.0], [90.0]])] * 2) ** 2
    >>> geometric_median().weights(squares).numpy().round(3)
    array([0., 1., 0.])
    """
    steps = integer("steps", steps, 1, 100_000)

    def weights(squares: Tensor) -> Tensor:
        w = torch.full((len(squares),), 1 / len(squares), dtype=torch.float64)
        least = 1e-6 * squares.max().sqrt()
        if not least > 0:  # all updates are equal
            return w
        for _ in range(steps):
            mean_squares = squares.double() @ w  # (D w)_n
            new = 1 / (mean_squares - w @ mean_squares / 2).clamp_(min=0).sqrt_().clamp_(min=least)
            new /= new.sum()
            if torch.allclose(new, w, rtol=1e-9, atol=1e-12):
                break
            w = new
        return w

    return Aggregator(weights=weights)
