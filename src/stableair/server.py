"""Eq. (4), the server's step: w_{k+1} = w_k - eta g_k."""

from collections.abc import Callable

from torch import Tensor

from stableair.checks import number, positive
from stableair.spec import registry

Update = Callable[[Tensor, Tensor], Tensor]  # (w (d,), g (d,)) -> (d,), never in place

server = registry("server", "servers", __name__)


@server("sgd")
def sgd(lr=None) -> Update:
    """Eq. (4). In an experiment lr=None is the clients' lr for payload "gradient", and 1 for "delta"."""
    lr = 1.0 if lr is None else positive("lr", lr)
    return lambda w, g: w - lr * g


@server("momentum")
class momentum:
    """Heavy-ball momentum: v = beta v + g, w - lr v; lr=None as in sgd."""

    def __init__(self, lr=None, beta=0.9):
        self.lr = 1.0 if lr is None else positive("lr", lr)
        self.beta = number("beta", beta, 0.0, 1.0)
        self.velocity: Tensor | None = None

    def __call__(self, w: Tensor, g: Tensor) -> Tensor:
        self.velocity = g if self.velocity is None else self.beta * self.velocity + g
        return w - self.lr * self.velocity

    def state_dict(self) -> dict[str, Tensor | None]:
        return {"velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        self.velocity = state["velocity"]
