"""Eq. (4), the server's step: w_{k+1} = w_k - eta g_k."""

from typing import Any

from torch import Tensor

from stableair.checks import InputError, number, positive
from stableair.contracts import Update, UpdateLike
from stableair.spec import Registry

server = Registry("server", "servers")


@server("sgd")
def sgd(lr: float | None = None) -> UpdateLike:
    """Eq. (4). In an experiment lr=None is the clients' lr for payload "gradient", and 1 for "delta".

    w_{k+1} = w_k - lr g_k: (d,), (d,) -> (d,).

    >>> sgd(0.5)(Tensor([1.0, 2.0]), Tensor([2.0, 0.0])).tolist()
    [0.0, 2.0]
    """
    step = 1.0 if lr is None else positive("lr", lr)
    return lambda w, g: w - step * g


@server("momentum")
class momentum(Update):
    """Heavy-ball momentum: v = beta v + g, w - lr v; lr=None as in sgd.

    v_k = beta v_{k-1} + g_k and w_{k+1} = w_k - lr v_k (Polyak, 1964): (d,), (d,) -> (d,). v_0 = g_0.

    >>> rule, g = momentum(lr=1, beta=0.5), Tensor([1.0])
    >>> rule(rule(Tensor([0.0]), g), g).tolist()
    [-2.5]
    """

    def __init__(self, lr: float | None = None, beta: float = 0.9):
        self.lr = 1.0 if lr is None else positive("lr", lr)
        self.beta = number("beta", beta, 0.0, 1.0)
        self.velocity: Tensor | None = None

    def apply(self, w: Tensor, g: Tensor) -> Tensor:
        if self.velocity is not None and self.velocity.shape != g.shape:
            raise InputError(f"momentum remembers {len(self.velocity)} entries: got a vector of {len(g)}")
        self.velocity = g if self.velocity is None else self.beta * self.velocity + g
        return w - self.lr * self.velocity

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"velocity"}:
            raise InputError(f"momentum remembers velocity: got {', '.join(state)}")
        self.velocity = state["velocity"]
