"""Eq. (4), the server's step: w_{k+1} = w_k - eta g_k, and its relatives.

The memory of a rule holds vectors like the model, in its precision and on its device. Rounds without senders leave it
unchanged.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from stableair.components import as_rule
from stableair.contracts import Metrics, ServerRule, ServerRuleLike
from stableair.schedules import cosine, inverse
from stableair.spec import Registry
from stableair.validation import boolean, choice, float32, fraction, number, positive

server = Registry("server", "servers")

SMALLEST_EPS = 1e-16  # its root, for any alpha, is still a float32


@server("sgd")
def sgd(
    lr: float | None = None,
    decay: Literal["constant", "inverse", "cosine"] = "constant",
    over: int = 100,
    floor: float = 0.01,
) -> ServerRuleLike:
    """Eq. (4). In an experiment lr=None is the clients' lr for payload "gradient", and 1 for "delta".

    w_{k+1} = w_k - lr s_k g_k: (d,), (d,) -> (d,). The share s_k is 1; with decay="inverse" it is 1 / (1 + k / over),
    but at least `floor`; with "cosine" it falls from 1 to `floor` in `over` rounds, along half a wave, and stays there.
    `over` does not depend on the experiment's number of rounds, so a run can be extended.

    >>> sgd(0.5)(Tensor([1.0, 2.0]), Tensor([2.0, 0.0])).tolist()
    [0.0, 2.0]
    >>> rule, w, g = sgd(1, decay="inverse", over=1), Tensor([1.0]), Tensor([1.0])
    >>> w, rounds, _ = rule.apply(w, g, rule.init(w))  # a step of 1
    >>> rule.apply(w, g, rounds)[0].item()  # and one of 1/2
    -0.5
    """
    step = 1.0 if lr is None else positive("lr", lr)
    shares = {"inverse": inverse(over, floor), "cosine": cosine(over, floor)}  # of lr, by the number of steps
    if choice("decay", decay, ("constant", *shares)) == "constant":
        return lambda w, g: w - step * g

    def apply(w: Tensor, g: Tensor, rounds: int) -> tuple[Tensor, int, Metrics]:
        length = step * shares[decay](rounds)
        return w - length * g, rounds + 1, {"lr": length}

    return ServerRule(apply, init=lambda like: 0)


@server("momentum")
def momentum(lr: float | None = None, beta: float = 0.9) -> ServerRuleLike:
    """Heavy-ball momentum: v = beta v + g, w - lr v; lr=None as in sgd.

    v_k = beta v_{k-1} + g_k and w_{k+1} = w_k - lr v_k (Polyak, 1964): (d,), (d,) -> (d,). v_0 = g_0.

    >>> rule, g = momentum(lr=1, beta=0.5), Tensor([1.0])
    >>> w, v, _ = rule.apply(Tensor([0.0]), g, rule.init(g))
    >>> rule.apply(w, g, v)[0].tolist()
    [-2.5]
    """
    return fedavgm(lr, beta)


@server("fedavgm")
def fedavgm(lr: float | None = None, beta: float = 0.9, nesterov: bool = False) -> ServerRuleLike:
    """FedAvgM (Hsu, Qi and Brown, 2019): `momentum` by its name in federated learning; nesterov looks ahead.

    v_k = beta v_{k-1} + g_k and w_{k+1} = w_k - lr v_k, or with nesterov=true w_k - lr (g_k + beta v_k): (d,), (d,) ->
    (d,). With payload="delta" and lr=1, or payload="gradient" and the clients' lr, it is the paper's w - v.

    >>> rule, g = fedavgm(lr=1, beta=0.5, nesterov=True), Tensor([1.0])
    >>> w, v, _ = rule.apply(Tensor([0.0]), g, rule.init(g))
    >>> rule.apply(w, g, v)[0].tolist()
    [-3.25]
    """
    step = 1.0 if lr is None else positive("lr", lr)
    beta = number("beta", beta, 0.0, 1.0)
    boolean("nesterov", nesterov)

    def apply(w: Tensor, g: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        v = beta * v + g
        return w - step * (g + beta * v if nesterov else v), v, {}

    return ServerRule(apply, init=torch.zeros_like)


def _adota(
    lr: float, b1: float, alpha: float, eps: float, accumulate: Callable[[Tensor, Tensor], Tensor]
) -> ServerRuleLike:
    """The common part of ADOTA's two rules: D = b1 D + (1 - b1) g, w - lr D / (v + eps)^(1/alpha).

    `accumulate` makes v from the v of the round before and this round's |D|^alpha: (d,), (d,) -> (d,).
    """
    lr, b1 = float32("lr", positive("lr", lr)), fraction("b1", b1)
    alpha, eps = number("alpha", alpha, 0.5, 2.0), number("eps", eps, SMALLEST_EPS, 1.0)

    def apply(w: Tensor, g: Tensor, memory: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor], Metrics]:
        D, v = memory
        D = D.lerp(g, 1 - b1)
        v = accumulate(v, D.abs().pow_(alpha))
        return w.addcdiv(D, (v + eps).pow_(1 / alpha), value=-lr), (D, v), {}

    return ServerRule(apply, init=lambda like: (torch.zeros_like(like), torch.zeros_like(like)))


@server("adagrad_ota")
def adagrad_ota(lr: float = 0.01, b1: float = 0.9, alpha: float = 1.5, eps: float = 1e-8) -> ServerRuleLike:
    """AdaGrad over the air (ADOTA): each entry's step is divided by the sum of |D|^alpha so far.

    D_k = b1 D_{k-1} + (1 - b1) g_k, v_k = v_{k-1} + |D_k|^alpha, w_{k+1} = w_k - lr D_k / (v_k + eps)^(1/alpha), from
    D = v = 0 (Wang et al., arXiv 2403.06528): (d,), (d,) -> (d,). alpha is meant to be the tail index of the
    interference. With b1 = 0, alpha = 2 and eps -> 0 it is AdaGrad.

    >>> rule, g = adagrad_ota(lr=1, b1=0, alpha=2), Tensor([3.0, -0.1])
    >>> rule(Tensor([0.0, 0.0]), g).round(decimals=4).tolist()  # the first step has length lr for any g
    [-1.0, 1.0]
    """
    return _adota(lr, b1, alpha, eps, lambda v, power: v + power)


@server("adam_ota")
def adam_ota(
    lr: float = 0.01, b1: float = 0.9, b2: float = 0.9, alpha: float = 1.5, eps: float = 1e-8
) -> ServerRuleLike:
    """Adam over the air (ADOTA): each entry's step is divided by a mean of |D|^alpha over the last rounds.

    As `adagrad_ota` with v_k = b2 v_{k-1} + (1 - b2) |D_k|^alpha: (d,), (d,) -> (d,). The start from D = v = 0 is not
    corrected. With b1 = 0, alpha = 2 and eps -> 0 it is RMSprop; with b2 = 0 too it is the sign, w - lr sign(g).

    >>> rule, g = adam_ota(lr=1, b1=0, b2=0), Tensor([3.0, -0.1])
    >>> rule(Tensor([0.0, 0.0]), g).round(decimals=4).tolist()
    [-1.0, 1.0]
    """
    b2 = fraction("b2", b2)
    return _adota(lr, b1, alpha, eps, lambda v, power: v.lerp(power, 1 - b2))


def as_server_rule(rule: ServerRuleLike) -> ServerRule:
    """A server's step as a ServerRule.

    Args:
        rule: A ServerRule; an object with the methods `apply` and `init` of one; or a function (w, g) -> w.
    """

    def lift(function: Callable[[Tensor, Tensor], Tensor]) -> ServerRule:
        return ServerRule(lambda w, g, memory: (function(w, g), memory, {}))

    return as_rule("server", rule, ServerRule, lift)
