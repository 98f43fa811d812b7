"""Participation: the clients that take part in round k, and their order."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stableair.contracts import Participation
from stableair.errors import InputError
from stableair.spec import Registry
from stableair.streams import Generator, generator
from stableair.validation import fraction, integer, number, positive, short_repr

participation = Registry("participation", "participations")


@participation("all")
def everybody() -> Participation:
    """Every client takes part in every round, as in the paper.

    Returns:
        The participation rule, (n, source) -> clients (m,).

    >>> everybody()(3, generator(0, "participation", 0)).tolist()
    [0, 1, 2]
    """
    return lambda n, source: torch.arange(n)


@participation("sample")
def sample(m: int) -> Participation:
    """m clients take part, drawn in every round without replacement.

    They are the first m clients of a random permutation of all n, so a larger m adds clients. m = n is equivalent to
    `all()`.

    Args:
        m: Number of participants, at most the number of clients.

    Returns:
        The participation rule, (n, source) -> clients (m,).

    >>> sample(2)(5, generator(0, "participation", 0)).tolist()
    [2, 0]
    """
    m = integer("m", m, 1)

    def draw(n: int, source: Generator) -> Tensor:
        if m > n:
            text = f"participation sample(m={m}): m must be at most the number of clients, {n}"
            raise InputError(text, code="out-of-range", name="m", value=m, high=n)
        return source.permutation(n)[:m]

    return draw


@participation("bernoulli")
class bernoulli:
    """Each client takes part with probability q, independently of the others.

    The sum is divided by the number of senders, or with expected=True by the expected number of participants, N q. With
    expected=True the server receives

        (1 / N q) sum_n b_n u_n,    b_n = 1 with probability q, else 0

    Its expectation, which includes rounds without participants, is the mean of all u_n.

    Args:
        q: Probability that a client takes part, in (0, 1].
        expected: Whether to divide the sum by N q instead of the number of senders.

    >>> bernoulli(0.5)(5, generator(0, "participation", 0)).tolist()
    [1, 3, 4]
    >>> bernoulli(0.5, expected=True).divisor(5)
    2.5
    """

    def __init__(self, q: float, expected: bool = False):
        self.q = number("q", positive("q", q), high=1.0)
        if not isinstance(expected, bool):
            text = f"expected must be true or false: got {short_repr(expected)}"
            raise InputError(text, code="wrong-type", name="expected", value=expected)
        self.expected = expected

    def __call__(self, n: int, source: Generator) -> Tensor:
        return (source.uniform(n) < self.q).nonzero()[:, 0]

    def divisor(self, n: int) -> float | None:
        """Divisor of the sum over n clients: N q with expected=True, else None."""
        return n * self.q if self.expected else None


@participation("dropout", specs={"of": participation})
class dropout:
    """Each participant of another rule drops out with probability p, after its local training.

    The server receives nothing from a client that drops out, so its training is not computed. Dropouts are drawn from a
    separate stream: the participants of `of` are the same as without dropout. If `of` divides by an expected number of
    participants, that number is multiplied by 1 - p.

    Args:
        p: Probability that a participant drops out, in [0, 1).
        of: Spec of the other participation rule.

    Raises:
        InputError: `of` is also a dropout (`not-nestable`).

    >>> dropout(0.5, of="sample(4)")(5, generator(0, "participation", 2)).tolist()
    [0, 3]
    """

    def __init__(self, p: float, of: str = "all()"):
        self.p = fraction("p", p)
        self.of: Participation = participation.one(of)()
        if isinstance(self.of, dropout):
            text = "of must not be dropout; two dropouts p and q are one dropout with probability p + q - p q"
            raise InputError(text, code="not-nestable", name="dropout")

    def __call__(self, n: int, source: Generator) -> Tensor:
        stays = source.substream("dropout").uniform(n) >= self.p
        clients = self.of(n, source)
        return clients[stays[clients]]

    def divisor(self, n: int) -> float | None:
        """Divisor of the sum over n clients: 1 - p times the divisor of the other rule, if it has one."""
        expected = divisor(self.of, n)
        return None if expected is None else (1 - self.p) * expected


def divisor(rule: Participation, n: int) -> float | None:
    """Return the divisor of the sum over n clients that a rule defines; None for the number of senders."""
    expected = rule.divisor(n) if hasattr(rule, "divisor") else None
    return None if expected is None else positive("the divisor of the participation", expected)


def participants(rule: Participation, sizes: Sequence[int], seed: int) -> Callable[[int], Tensor]:
    """Return the function that draws the participants of a round, in the order of training and summation.

    The clients are sorted by their number of samples, largest first, then by index. The order is fixed, so that sums
    are bit-identical for every engine, chunk size and number of processes.

    Args:
        rule: Participation rule.
        sizes: Number of samples of each client.
        seed: Seed of the experiment.

    Returns:
        A function from the round k to its clients, (m,) int64 on the host. It raises an InputError if the rule does not
        return distinct clients.
    """
    n = len(sizes)
    position = {client: i for i, client in enumerate(sorted(range(n), key=lambda client: (-sizes[client], client)))}

    def draw_participants(k: int) -> Tensor:
        drawn = rule(n, generator(seed, "participation", k))
        if not isinstance(drawn, Tensor) or drawn.ndim != 1 or drawn.dtype != torch.int64:
            is_tensor = isinstance(drawn, Tensor)
            actual = f"{drawn.dtype} of shape {tuple(drawn.shape)}" if is_tensor else type(drawn).__name__
            text = f"the participation must return client indices, int64 of shape (m,): got {actual}"
            raise InputError(text, code="wrong-shape", setting="participation", actual=actual)
        clients = drawn.tolist()
        if len(set(clients)) < len(clients) or not position.keys() >= set(clients):
            allowed = f"distinct clients from 0 to {n - 1}"
            text = f"round {k}: the participation must return {allowed}: got {short_repr(clients)}"
            raise InputError(text, code="unknown-clients", setting="participation", k=k, clients=clients)
        return torch.tensor(sorted(clients, key=position.__getitem__), dtype=torch.int64)

    return draw_participants
