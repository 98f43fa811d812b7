"""Transmit power: what a client does to its payload before it sends it, and how strong the noise is beside it."""

from torch import Tensor

from stableair.channels.kinds import power
from stableair.channels.superposition import Total


class Power:
    """A power rule; by default it changes nothing.

    A client of fading h_n is heard with gain(h_n) in place of h_n: g = (1/N) sum_n gain(h_n) u_n + noise(xi).
    """

    def gain(self, h: Tensor) -> Tensor:
        """What arrives of each sender's payload, given its fading: (m,) -> (m,)."""
        return h

    def noise(self, xi: Tensor, total: Total) -> Tensor:
        """The interference beside the payloads, once all of them are known: (d,) -> (d,)."""
        return xi


@power("none")
def none() -> Power:
    """No power rule: payloads are sent as they are, and the interference does not depend on them (the paper's).

    >>> none().gain(Tensor([0.5, 2.0])).tolist()
    [0.5, 2.0]
    """
    return Power()
