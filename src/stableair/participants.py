"""Who takes part in round k, and in which order everybody counts them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stableair.checks import InputError, shown
from stableair.spec import Registry
from stableair.streams import Generator, generator

Participation = Callable[[int, Generator], Tensor]  # (n, source) -> (m,) int64, clients of 0 ... n-1, each at most once

participation = Registry("participation", "participations")


@participation("all")
def everybody() -> Participation:
    """Every client in every round (the paper's).

    >>> everybody()(3, generator(0, "participation", 0)).tolist()
    [0, 1, 2]
    """
    return lambda n, source: torch.arange(n)


def participants(rule: Participation, sizes: Sequence[int], seed: int) -> Callable[[int], Tensor]:
    """The clients of round k, those with the most samples first, then by number: (m,) int64, on the host.

    This order is the one in which every trainer works and every sum is taken, so that neither an engine, nor a chunk,
    nor a number of processes changes a bit of the sum.
    """
    place = {n: i for i, n in enumerate(sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)))}

    def of_round(k: int) -> Tensor:
        who = rule(len(sizes), generator(seed, "participation", k))
        if not isinstance(who, Tensor) or who.ndim != 1 or who.dtype != torch.int64:
            found = f"{who.dtype} of shape {tuple(who.shape)}" if isinstance(who, Tensor) else type(who).__name__
            raise InputError(f"the participation must return the numbers of clients, int64 of shape (m,): got {found}")
        clients = who.tolist()
        if len(set(clients)) < len(clients) or not place.keys() >= set(clients):
            known = f"some of the clients 0 to {len(sizes) - 1}, each once"
            raise InputError(f"round {k}: the participation must return {known}: got {shown(clients)}")
        return torch.tensor(sorted(clients, key=place.__getitem__), dtype=torch.int64)

    return of_round
