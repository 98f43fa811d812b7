"""Who takes part in round k, and in which order everybody counts them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stableair.checks import InputError, fraction, number, positive, shown, whole
from stableair.spec import Registry
from stableair.streams import Generator, generator

# (n, source) -> (m,) int64, clients of 0 ... n-1, each at most once. A method divisor(n) may state what their sum is
# divided by; else it is the number of clients that were heard.
Participation = Callable[[int, Generator], Tensor]

participation = Registry("participation", "participations")


@participation("all")
def everybody() -> Participation:
    """Every client in every round (the paper's).

    >>> everybody()(3, generator(0, "participation", 0)).tolist()
    [0, 1, 2]
    """
    return lambda n, source: torch.arange(n)


@participation("sample")
def sample(m: int) -> Participation:
    """m of the clients, drawn anew in every round without replacement.

    The first m of a random order of all n: whoever is among m is also among m + 1. With m = n it is `all()`.

    >>> sample(2)(5, generator(0, "participation", 0)).tolist()
    [2, 0]
    """
    m = whole("m", m, 1)

    def draw(n: int, source: Generator) -> Tensor:
        if m > n:
            raise InputError(f"participation sample(m={m}): m must be at most the number of clients, {n}")
        return source.permutation(n)[:m]

    return draw


@participation("bernoulli")
class bernoulli:
    """Each client comes with probability q, independently of the others; the sum is divided by the number that came.

    With expected=true it is divided by N q instead, the number to be expected. Of payloads u_n the server then receives
    (1 / N q) sum_n b_n u_n, b_n being 1 with probability q and else 0: on average over all rounds, those included in
    which nobody comes, that is the mean of all u_n.

    >>> bernoulli(0.5)(5, generator(0, "participation", 0)).tolist()
    [1, 3, 4]
    >>> bernoulli(0.5, expected=True).divisor(5)
    2.5
    """

    def __init__(self, q: float, expected: bool = False):
        self.q = number("q", positive("q", q), high=1.0)
        if not isinstance(expected, bool):
            raise InputError(f"expected must be true or false: got {shown(expected)}")
        self.expected = expected

    def __call__(self, n: int, source: Generator) -> Tensor:
        return (source.uniform(n) < self.q).nonzero()[:, 0]

    def divisor(self, n: int) -> float | None:
        """N q, where it is asked for."""
        return n * self.q if self.expected else None


@participation("dropout", specs={"of": participation})
class dropout:
    """Of the clients that another rule names, each is lost with probability p: it trained, and is not heard.

    Nothing of a lost client reaches the server, so what it trained is not computed. Who is lost is drawn from a stream
    of its own: the clients that `of` names are the same as without dropout. Where `of` divides by an expected number,
    that is (1 - p) times as many.

    >>> dropout(0.5, of="sample(4)")(5, generator(0, "participation", 2)).tolist()
    [0, 3]
    """

    def __init__(self, p: float, of: str = "all()"):
        self.p = fraction("p", p)
        self.of: Participation = participation.one(of)()
        if isinstance(self.of, dropout):
            raise InputError("of must be another rule than dropout: to lose p and then q is to lose p + q - p q")

    def __call__(self, n: int, source: Generator) -> Tensor:
        heard = source.beside("dropout").uniform(n) >= self.p
        named = self.of(n, source)
        return named[heard[named]]

    def divisor(self, n: int) -> float | None:
        """That of the rule, less those who are lost."""
        stated = divisor(self.of, n)
        return None if stated is None else (1 - self.p) * stated


def divisor(rule: Participation, n: int) -> float | None:
    """What a rule says that the sum over n clients is divided by; None for the number of those that were heard."""
    stated = rule.divisor(n) if hasattr(rule, "divisor") else None
    return None if stated is None else positive("the divisor of the participation", stated)


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
            wanted = "the numbers of clients, int64 of shape (m,)"
            raise InputError(f"the participation must return {wanted}: got {found}", part="participation")
        clients = who.tolist()
        if len(set(clients)) < len(clients) or not place.keys() >= set(clients):
            known = f"some of the clients 0 to {len(sizes) - 1}, each once"
            text = f"round {k}: the participation must return {known}: got {shown(clients)}"
            raise InputError(text, part="participation")
        return torch.tensor(sorted(clients, key=place.__getitem__), dtype=torch.int64)

    return of_round
