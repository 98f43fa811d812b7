"""Server rules: the server's step, Eq. (4), w_{k+1} = w_k - eta g_k, and other optimisers.

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

SMALLEST_EPS = 1e-16  # eps^(1/alpha) is above the smallest float32 for every alpha


@server("sgd")
def sgd(
    lr: float | None = None,
    decay: Literal["constant", "inverse", "cosine"] = "constant",
    over: int = 100,
    floor: float = 0.01,
) -> ServerRuleLike:
    """Gradient descent, Eq. (4), with an optional schedule of the learning rate.

        w_{k+1} = w_k - lr s_k g_k

    The share s_k is 1; for decay="inverse" it is 1 / (1 + k / over), but at least `floor`; for "cosine" it falls from 1
    to `floor` in `over` rounds along half a cosine wave and then stays constant. `over` does not depend on the
    experiment's number of rounds, so a run can be extended.

    Args:
        lr: Learning rate, above 0. By default the clients' lr for payload "gradient", otherwise 1.
        decay: Schedule of the learning rate: "constant", "inverse" or "cosine".
        over: Number of rounds after which an "inverse" share is 1/2 and a "cosine" share is `floor`.
        floor: Smallest share of the learning rate, in (0, 1].

    Returns:
        The server rule, (w (d,), g (d,)) -> w (d,).

    >>> sgd(0.5)(Tensor([1.0, 2.0]), Tensor([2.0, 0.0])).tolist()
    [0.0, 2.0]
    >>> rule, w, g = sgd(1, decay="inverse", over=1), Tensor([1.0]), Tensor([1.0])
    >>> w, rounds, _ = rule.apply(w, g, rule.init(w))  # a step of 1
    >>> rule.apply(w, g, rounds)[0].item()  # a step of 1/2
    -0.5
    """
    step = 1.0 if lr is None else positive("lr", lr)
    shares = {"inverse": inverse(over, floor), "cosine": cosine(over, floor)}  # of lr, by the number of steps
    if choice("decay", decay, ("constant", *shares)) == "constant":
        return lambda w, g: w - step * g

    def apply(w: Tensor, g: Tensor, rounds: int) -> tuple[Tensor, int, Metrics]:
        rate = step * shares[decay](rounds)
        return w - rate * g, rounds + 1, {"lr": rate}

    return ServerRule(apply, init=lambda like: 0)


@server("momentum")
def momentum(lr: float | None = None, beta: float = 0.9) -> ServerRuleLike:
    """Heavy-ball momentum (Polyak, 1964).

        v_k = beta v_{k-1} + g_k,    w_{k+1} = w_k - lr v_k,    v_0 = g_0

    Args:
        lr: Learning rate, above 0. By default the clients' lr for payload "gradient", otherwise 1.
        beta: Factor of the last velocity, in [0, 1].

    Returns:
        The server rule, (w (d,), g (d,)) -> w (d,).

    >>> rule, g = momentum(lr=1, beta=0.5), Tensor([1.0])
    >>> w, v, _ = rule.apply(Tensor([0.0]), g, rule.init(g))
    >>> rule.apply(w, g, v)[0].tolist()
    [-2.5]
    """
    return fedavgm(lr, beta)


@server("fedavgm")
def fedavgm(lr: float | None = None, beta: float = 0.9, nesterov: bool = False) -> ServerRuleLike:
    """FedAvgM (Hsu, Qi and Brown, 2019): server momentum, optionally in Nesterov's form.

        v_k = beta v_{k-1} + g_k,    w_{k+1} = w_k - lr v_k,    with nesterov=True w_k - lr (g_k + beta v_k)

    It is the rule of the cited paper for payload "delta" with lr=1, and for payload "gradient" with the clients' lr.

    Args:
        lr: Learning rate, above 0. By default the clients' lr for payload "gradient", otherwise 1.
        beta: Factor of the last velocity, in [0, 1].
        nesterov: Whether to use Nesterov's momentum.

    Returns:
        The server rule, (w (d,), g (d,)) -> w (d,).

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
    """Return an ADOTA rule: D = b1 D + (1 - b1) g, w - lr D / (v + eps)^(1/alpha).

    `accumulate` computes the new v from the last v and |D|^alpha of this round: (d,), (d,) -> (d,).
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
    """AdaGrad over the air (ADOTA): divide each entry's step by the accumulated |D|^alpha.

        D_k = b1 D_{k-1} + (1 - b1) g_k,    v_k = v_{k-1} + |D_k|^alpha,
        w_{k+1} = w_k - lr D_k / (v_k + eps)^(1/alpha)

    D and v start at 0 (Wang et al., arXiv 2403.06528). With b1 = 0, alpha = 2 and eps -> 0 it is AdaGrad.

    Args:
        lr: Learning rate, above 0.
        b1: Factor of the last D, in [0, 1).
        alpha: Exponent, in [0.5, 2]; meant to be the tail index of the interference.
        eps: Number that is added to v, in [1e-16, 1].

    Returns:
        The server rule, (w (d,), g (d,)) -> w (d,).

    >>> rule, g = adagrad_ota(lr=1, b1=0, alpha=2), Tensor([3.0, -0.1])
    >>> rule(Tensor([0.0, 0.0]), g).round(decimals=4).tolist()  # the first step has length lr for any g
    [-1.0, 1.0]
    """
    return _adota(lr, b1, alpha, eps, lambda v, power: v + power)


@server("adam_ota")
def adam_ota(
    lr: float = 0.01, b1: float = 0.9, b2: float = 0.9, alpha: float = 1.5, eps: float = 1e-8
) -> ServerRuleLike:
    """Adam over the air (ADOTA): divide each entry's step by a moving average of |D|^alpha.

        D_k = b1 D_{k-1} + (1 - b1) g_k,    v_k = b2 v_{k-1} + (1 - b2) |D_k|^alpha,
        w_{k+1} = w_k - lr D_k / (v_k + eps)^(1/alpha)

    D and v start at 0, without a bias correction (Wang et al., arXiv 2403.06528). With b1 = 0, alpha = 2 and eps ->
    0 it is RMSprop; with b2 = 0 too it is the sign, w - lr sign(g).

    Args:
        lr: Learning rate, above 0.
        b1: Factor of the last D, in [0, 1).
        b2: Factor of the last v, in [0, 1).
        alpha: Exponent, in [0.5, 2]; meant to be the tail index of the interference.
        eps: Number that is added to v, in [1e-16, 1].

    Returns:
        The server rule, (w (d,), g (d,)) -> w (d,).

    >>> rule, g = adam_ota(lr=1, b1=0, b2=0), Tensor([3.0, -0.1])
    >>> rule(Tensor([0.0, 0.0]), g).round(decimals=4).tolist()
    [-1.0, 1.0]
    """
    b2 = fraction("b2", b2)
    return _adota(lr, b1, alpha, eps, lambda v, power: v.lerp(power, 1 - b2))


def as_server_rule(rule: ServerRuleLike) -> ServerRule:
    """Convert a server rule to a `ServerRule`.

    Args:
        rule: A ServerRule; an object with its methods `apply` and `init`; or a function (w, g) -> w.

    Returns:
        The rule.

    Raises:
        InputError: The argument is not a server rule (`wrong-type`).

    >>> as_server_rule(lambda w, g: w - 2 * g)(Tensor([1.0]), Tensor([1.0])).item()
    -1.0
    """

    def from_function(function: Callable[[Tensor, Tensor], Tensor]) -> ServerRule:
        return ServerRule(lambda w, g, memory: (function(w, g), memory, {}))

    return as_rule("server", rule, ServerRule, from_function)
