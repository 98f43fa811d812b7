"""Eq. (4), the server's step: w_{k+1} = w_k - eta g_k, and its relatives.

What a rule remembers are vectors like the model, in its precision and on its device; rounds in which nobody was heard
are none for it.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from stableair.checks import InputError, choice, fraction, number, positive, shown, whole
from stableair.contracts import Metrics, Update, UpdateLike
from stableair.spec import Registry

server = Registry("server", "servers")

SMALLEST_EPS = 1e-16  # its root, for any alpha, is still a float32


@server("sgd")
def sgd(
    lr: float | None = None,
    decay: Literal["constant", "inverse", "cosine"] = "constant",
    over: int = 100,
    floor: float = 0.01,
) -> UpdateLike:
    """Eq. (4). In an experiment lr=None is the clients' lr for payload "gradient", and 1 for "delta".

    w_{k+1} = w_k - lr s_k g_k: (d,), (d,) -> (d,). The share s_k is 1; with decay="inverse" it is 1 / (1 + k / over),
    but at least `floor`; with "cosine" it falls from 1 to `floor` in `over` rounds, along half a wave, and stays there.
    `over` is the rule's own, and not the number of rounds of the experiment: to extend a run changes nothing in it.

    >>> sgd(0.5)(Tensor([1.0, 2.0]), Tensor([2.0, 0.0])).tolist()
    [0.0, 2.0]
    >>> rule, w = sgd(1, decay="inverse", over=1), Tensor([1.0])
    >>> [(w := rule(w, Tensor([1.0]))).item() for k in range(2)]  # steps of 1 and 1/2
    [0.0, -0.5]
    """
    step = 1.0 if lr is None else positive("lr", lr)
    over = whole("over", over, 1)
    least = number("floor", floor, high=1.0)
    if not least > 0:
        raise InputError(f"floor must be above 0, since a step of nothing learns nothing: got {least:g}")
    if choice("decay", decay, SHARES) == "constant":
        return lambda w, g: w - step * g
    return Decaying(step, lambda k: SHARES[decay](k, over, least))


SHARES: dict[str, Callable[[int, int, float], float]] = {
    "constant": lambda k, over, floor: 1.0,
    "inverse": lambda k, over, floor: max(floor, 1 / (1 + k / over)),
    "cosine": lambda k, over, floor: floor + (1 - floor) * (1 + math.cos(math.pi * min(k / over, 1))) / 2,
}  # of lr in step k


class Decaying(Update):
    """sgd with a step that changes as it counts its rounds."""

    remembered = ("rounds",)

    def __init__(self, lr: float, share: Callable[[int], float]):
        self.lr, self.share = lr, share
        self.rounds = 0  # steps taken so far

    def apply(self, w: Tensor, g: Tensor) -> Tensor:
        step = self.lr * self.share(self.rounds)
        self.rounds += 1
        return w - step * g

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.rounds = whole("rounds", self.rounds, 0)

    def metrics(self) -> Metrics:
        return {"lr": self.lr * self.share(self.rounds - 1) if self.rounds else None}


class Remembering(Update):
    """A step that remembers vectors as long as the model; None before its first round."""

    def observe(self, g: Tensor) -> None:
        for old in self.state_dict().values():
            if old is not None and old.shape != g.shape:
                raise InputError(f"{type(self).__name__} remembers {len(old)} entries: got a vector of {len(g)}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, value in state.items():
            if value is not None and not (isinstance(value, Tensor) and value.ndim == 1):
                raise InputError(f"{name} of {type(self).__name__} must be a vector: got {shown(value)}")


@server("momentum")
class momentum(Remembering):
    """Heavy-ball momentum: v = beta v + g, w - lr v; lr=None as in sgd.

    v_k = beta v_{k-1} + g_k and w_{k+1} = w_k - lr v_k (Polyak, 1964): (d,), (d,) -> (d,). v_0 = g_0.

    >>> rule, g = momentum(lr=1, beta=0.5), Tensor([1.0])
    >>> rule(rule(Tensor([0.0]), g), g).tolist()
    [-2.5]
    """

    remembered = ("velocity",)

    def __init__(self, lr: float | None = None, beta: float = 0.9):
        self.lr = 1.0 if lr is None else positive("lr", lr)
        self.beta = number("beta", beta, 0.0, 1.0)
        self.velocity: Tensor | None = None

    def apply(self, w: Tensor, g: Tensor) -> Tensor:
        return w - self.lr * self.gathered(g)

    def gathered(self, g: Tensor) -> Tensor:
        """The velocity with this round's vector in it: (d,) -> (d,)."""
        self.velocity = g if self.velocity is None else self.beta * self.velocity + g
        return self.velocity


@server("fedavgm")
class fedavgm(momentum):
    """FedAvgM (Hsu, Qi and Brown, 2019): `momentum` by the name it has in federated learning; nesterov looks ahead.

    v_k = beta v_{k-1} + g_k and w_{k+1} = w_k - lr v_k, or with nesterov=true w_k - lr (g_k + beta v_k): (d,), (d,) ->
    (d,). With payload="delta" and lr=1, or payload="gradient" and the clients' lr, it is the paper's w - v.

    >>> rule, g = fedavgm(lr=1, beta=0.5, nesterov=True), Tensor([1.0])
    >>> rule(rule(Tensor([0.0]), g), g).tolist()
    [-3.25]
    """

    def __init__(self, lr: float | None = None, beta: float = 0.9, nesterov: bool = False):
        super().__init__(lr, beta)
        if not isinstance(nesterov, bool):
            raise InputError(f"nesterov must be true or false: got {shown(nesterov)}")
        self.nesterov = nesterov

    def apply(self, w: Tensor, g: Tensor) -> Tensor:
        v = self.gathered(g)
        return w - self.lr * (g + self.beta * v if self.nesterov else v)


class Adota(Remembering):
    """What ADOTA's two rules have in common: D = b1 D + (1 - b1) g, and w - lr D / (v + eps)^(1/alpha)."""

    remembered = "D", "v"

    def __init__(self, lr: float, b1: float, alpha: float, eps: float):
        self.lr = positive("lr", lr)
        self.b1 = fraction("b1", b1)
        self.alpha = number("alpha", alpha, 0.5, 2.0)
        self.eps = number("eps", eps, SMALLEST_EPS, 1.0)
        self.D: Tensor | None = None
        self.v: Tensor | None = None

    def apply(self, w: Tensor, g: Tensor) -> Tensor:
        D, v = (torch.zeros_like(g) if old is None else old for old in (self.D, self.v))
        self.D = D.lerp(g, 1 - self.b1)
        self.v = self.gathered(v, self.D.abs().pow_(self.alpha))
        return w.addcdiv(self.D, (self.v + self.eps).pow_(1 / self.alpha), value=-self.lr)

    def gathered(self, v: Tensor, power: Tensor) -> Tensor:
        """v, from the one of the round before and this round's |D|^alpha: (d,), (d,) -> (d,)."""
        raise NotImplementedError


@server("adagrad_ota")
class adagrad_ota(Adota):
    """AdaGrad over the air (ADOTA): each entry's step is divided by all of |D|^alpha so far, alpha being the noise's.

    D_k = b1 D_{k-1} + (1 - b1) g_k, v_k = v_{k-1} + |D_k|^alpha, w_{k+1} = w_k - lr D_k / (v_k + eps)^(1/alpha), from
    D = v = 0 (Wang et al., arXiv 2403.06528): (d,), (d,) -> (d,). alpha is meant to be the tail index of the
    interference. With b1 = 0, alpha = 2 and eps -> 0 it is AdaGrad.

    >>> rule, g = adagrad_ota(lr=1, b1=0, alpha=2), Tensor([3.0, -0.1])
    >>> rule(Tensor([0.0, 0.0]), g).round(decimals=4).tolist()  # the first step is of length lr, whatever g
    [-1.0, 1.0]
    """

    def __init__(self, lr: float = 0.01, b1: float = 0.9, alpha: float = 1.5, eps: float = 1e-8):
        super().__init__(lr, b1, alpha, eps)

    def gathered(self, v: Tensor, power: Tensor) -> Tensor:
        return v + power


@server("adam_ota")
class adam_ota(Adota):
    """Adam over the air (ADOTA): each entry's step is divided by a mean of |D|^alpha over the last rounds.

    As `adagrad_ota` with v_k = b2 v_{k-1} + (1 - b2) |D_k|^alpha: (d,), (d,) -> (d,). Nothing makes up for the start
    from D = v = 0. With b1 = 0, alpha = 2 and eps -> 0 it is RMSprop; with b2 = 0 too it is the sign, w - lr sign(g).

    >>> rule, g = adam_ota(lr=1, b1=0, b2=0), Tensor([3.0, -0.1])
    >>> rule(Tensor([0.0, 0.0]), g).round(decimals=4).tolist()
    [-1.0, 1.0]
    """

    def __init__(self, lr: float = 0.01, b1: float = 0.9, b2: float = 0.9, alpha: float = 1.5, eps: float = 1e-8):
        super().__init__(lr, b1, alpha, eps)
        self.b2 = fraction("b2", b2)

    def gathered(self, v: Tensor, power: Tensor) -> Tensor:
        return v.lerp(power, 1 - self.b2)
