"""Optimisers of the clients' local training.

Every client resets the memory of a rule in every round. The learning rate follows the settings `lr` and `lr_decay` of
the experiment.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from stableair.components import as_rule
from stableair.contracts import LocalRule, LocalRuleLike, LocalStep, Memory
from stableair.errors import InputError
from stableair.memory import unchanged
from stableair.spec import Registry
from stableair.validation import boolean, fraction, number, positive, short_repr

local = Registry("local", "local")

Momenta = dict[str, Tensor]  # SGD: "velocity", and "start" for the proximal term; Adam: "m", "v" and "t"


@local("sgd")
def sgd(
    momentum: float = 0, weight_decay: float = 0, nesterov: bool = False, clip: float | None = None
) -> LocalRuleLike:
    """SGD, by default without momentum, weight decay and clipping; arguments as in torch.optim.SGD.

        g = min(1, clip / (norm(grad) + 1e-6)) grad + weight_decay w,    v = momentum v + g,
        w -> w - lr v,    with nesterov=True w - lr (g + momentum v)

    Args:
        momentum: Factor of the last velocity v, in [0, 1).
        weight_decay: Factor of w in the gradient.
        nesterov: Whether to use Nesterov's momentum.
        clip: Largest norm of the gradient, the max_norm of torch.nn.utils.clip_grad_norm_; by default not limited.

    Returns:
        The local rule, with steps (w (d,), gradient (d,), memory, lr) -> (w (d,), memory).

    Raises:
        InputError: `nesterov` is true without momentum (`nesterov-without-momentum`).

    >>> rule, w, g = sgd(momentum=0.5), Tensor([1.0]), Tensor([1.0])
    >>> w, memory = rule.step(w, g, rule.init(w), 0.5)
    >>> rule.step(w, g, memory, 0.5)[0].item()  # 1 - 0.5 * 1 - 0.5 * 1.5
    -0.25
    """
    return _sgd_rule(0.0, momentum, weight_decay, nesterov, clip)


@local("fedprox")
def fedprox(
    mu: float,
    momentum: float = 0,
    weight_decay: float = 0,
    nesterov: bool = False,
    clip: float | None = None,
) -> LocalRuleLike:
    """FedProx (Li et al., 2020): SGD with a proximal term that keeps w near the start of the round.

        SGD on the loss plus mu / 2 norm(w - w_k)^2

    `clip` limits the gradient of the loss, without the proximal term and the weight decay.

    Args:
        mu: Weight of the proximal term, at least 0; 0 is `sgd`.
        momentum: Factor of the last velocity, in [0, 1).
        weight_decay: Factor of w in the gradient.
        nesterov: Whether to use Nesterov's momentum.
        clip: Largest norm of the gradient of the loss; by default not limited.

    Returns:
        The local rule, with steps (w (d,), gradient (d,), memory, lr) -> (w (d,), memory).

    Raises:
        InputError: `nesterov` is true without momentum (`nesterov-without-momentum`).

    >>> rule, start = fedprox(mu=0.5), Tensor([1.0])
    >>> rule.step(Tensor([3.0]), Tensor([0.0]), rule.init(start), 1.0)[0].item()  # 3 - 0.5 (3 - 1)
    2.0
    """
    return _sgd_rule(number("mu", mu, 0.0), momentum, weight_decay, nesterov, clip)


@local("adam")
def adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0) -> LocalRuleLike:
    """Adam (Kingma and Ba, 2015), as torch.optim.Adam.

        g = grad + weight_decay w,    m = b1 m + (1 - b1) g,    v = b2 v + (1 - b2) g^2,
        w -> w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)    in step t

    It needs a smaller learning rate than SGD, such as lr=0.001.

    Args:
        b1: Factor of the last m, in [0, 1).
        b2: Factor of the last v, in [0, 1).
        eps: Number that is added to the denominator, above 0.
        weight_decay: Factor of w in the gradient.

    Returns:
        The local rule, with steps (w (d,), gradient (d,), memory, lr) -> (w (d,), memory).

    >>> rule, w = adam(), Tensor([1.0, 1.0])
    >>> rule.step(w, Tensor([5.0, -0.1]), rule.init(w), 0.5)[0].round(decimals=4).tolist()  # a first step of length lr
    [0.5, 1.5]
    """
    return _adam_rule(b1, b2, eps, number("weight_decay", weight_decay, 0.0), decoupled=False)


@local("adamw")
def adamw(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01) -> LocalRuleLike:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as torch.optim.AdamW.

        the step of `adam` with g = grad, from (1 - lr weight_decay) w

    Args:
        b1: Factor of the last m, in [0, 1).
        b2: Factor of the last v, in [0, 1).
        eps: Number that is added to the denominator, above 0.
        weight_decay: Weight decay per unit of the learning rate.

    Returns:
        The local rule, with steps (w (d,), gradient (d,), memory, lr) -> (w (d,), memory).

    >>> rule, w = adamw(weight_decay=0.5), Tensor([1.0])
    >>> rule.step(w, Tensor([0.0]), rule.init(w), 0.5)[0].item()
    0.75
    """
    return _adam_rule(b1, b2, eps, number("weight_decay", weight_decay, 0.0), decoupled=True)


def as_local_rule(rule: LocalRuleLike) -> LocalRule:
    """Convert an optimiser to a `LocalRule`.

    Args:
        rule: A LocalRule; an object with its methods `step` and `init`; or a function (w, g, memory, lr) -> (w,
            memory), whose memory before the first step is ().

    Returns:
        The rule.

    Raises:
        InputError: The argument is not a local rule (`wrong-type`).

    >>> rule = as_local_rule(lambda w, g, memory, lr: (w - lr * g, memory))
    >>> rule.step(Tensor([1.0]), Tensor([2.0]), (), 0.5)[0].item()
    0.0
    """
    return as_rule("local", rule, LocalRule, LocalRule)


class LocalSteps:
    """The local steps of one client in a round.

    Args:
        rule: The optimiser.
        module: The model; only its parameters with requires_grad are trained.
        w: Parameters of the client, (d,); each call changes them in place.
        lr: Learning rate of the round.
    """

    def __init__(self, rule: LocalRule, module: nn.Module, w: Tensor, lr: float):
        self.rule, self.w, self.lr = rule, w, lr
        if rule == PLAIN_SGD:
            return
        trained = [p.new_full((p.numel(),), p.requires_grad, dtype=torch.bool) for p in module.parameters()]
        all_trained = all(p.requires_grad for p in module.parameters())
        self.trained = slice(None) if all_trained else torch.cat(trained)
        self.values = w[self.trained].clone()  # a copy, since a memory may refer to it
        self.memory = rule.init(self.values)

    def __call__(self, grad: Tensor) -> None:
        """Take a step with the gradient of a batch: (d,)."""
        if self.rule == PLAIN_SGD:
            self.w.sub_(grad, alpha=self.lr)
            return
        g = grad[self.trained].clone()  # a copy, for the same reason
        with unchanged("local rule", self.values, g, self.memory, setting="local"):
            result = self.rule.step(self.values, g, self.memory, self.lr)
        self.values, self.memory = _checked_step(result, self.values)
        self.w[self.trained] = self.values


def _checked_step(result: object, before: Tensor) -> tuple[Tensor, Memory]:
    """Check that a local step returned parameters like the old ones and a memory, and return them."""
    if not isinstance(result, tuple) or len(result) != 2:
        text = f"the step of the local rule must return the new parameters and its memory: got {short_repr(result)}"
        raise InputError(text, code="wrong-type", setting="local")
    w, memory = result
    if not isinstance(w, Tensor) or w.shape != before.shape or not w.is_floating_point():
        actual = f"shape {tuple(w.shape)}, {w.dtype}" if isinstance(w, Tensor) else type(w).__name__
        text = f"the step of the local rule must return parameters of shape {tuple(before.shape)}: got {actual}"
        raise InputError(text, code="wrong-shape", setting="local")
    return w.to(before.dtype), memory


# ------------------------------------------------------------------------------------------------------------------ SGD


def _plain_step(w: Tensor, g: Tensor, memory: Memory, lr: float) -> tuple[Tensor, Memory]:
    return torch.sub(w, g, alpha=lr), memory


PLAIN_SGD = LocalRule(_plain_step, entrywise=True)  # engines have faster programs for this rule


def _sgd_rule(mu: float, momentum: float, weight_decay: float, nesterov: bool, clip: float | None) -> LocalRule:
    momentum, weight_decay = fraction("momentum", momentum), number("weight_decay", weight_decay, 0.0)
    clip = None if clip is None else positive("clip", clip)
    if boolean("nesterov", nesterov) and not momentum:
        text = f"nesterov=true needs a momentum above 0: got {momentum:g}; set momentum=0.9, for example"
        raise InputError(text, code="nesterov-without-momentum", name="nesterov", value=nesterov)
    if not (mu or momentum or weight_decay or clip):
        return PLAIN_SGD
    step = SGDStep(mu, momentum, weight_decay, nesterov)
    init = partial(_sgd_memory, mu=mu, momentum=momentum)
    if clip is None:
        return LocalRule(step, init, entrywise=True)
    return LocalRule(partial(_clipped_step, step=step, clip=clip), init)


def _sgd_memory(w: Tensor, mu: float, momentum: float) -> Momenta:
    return ({"start": w} if mu else {}) | ({"velocity": torch.zeros_like(w)} if momentum else {})


@dataclass(frozen=True)
class SGDStep:
    """A step of SGD; the stacked engine recognises this class and computes the step in place."""

    mu: float
    momentum: float
    weight_decay: float
    nesterov: bool

    def __call__(self, w: Tensor, g: Tensor, memory: Momenta, lr: float) -> tuple[Tensor, Momenta]:
        if self.weight_decay:
            g = g + self.weight_decay * w
        if self.mu:
            g = g + self.mu * (w - memory["start"])
        if self.momentum:
            v = self.momentum * memory["velocity"] + g
            memory, g = memory | {"velocity": v}, g + self.momentum * v if self.nesterov else v
        return torch.sub(w, g, alpha=lr), memory


def _clipped_step(
    w: Tensor, g: Tensor, memory: Memory, lr: float, step: LocalStep, clip: float
) -> tuple[Tensor, Memory]:
    """Take a step with the gradient scaled to a norm of at most `clip`, as torch.nn.utils.clip_grad_norm_ does."""
    share = (clip / (torch.linalg.vector_norm(g) + 1e-6)).clamp(max=1)
    return step(w, share * g, memory, lr)


# ----------------------------------------------------------------------------------------------------------------- Adam


def _adam_rule(b1: float, b2: float, eps: float, weight_decay: float, decoupled: bool) -> LocalRule:
    b1, b2, eps = fraction("b1", b1), fraction("b2", b2), positive("eps", eps)
    step = partial(_adam_step, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, decoupled=decoupled)
    return LocalRule(step, _adam_memory, entrywise=True)


def _adam_memory(w: Tensor) -> Momenta:
    return {"m": torch.zeros_like(w), "v": torch.zeros_like(w), "t": w.new_zeros((), dtype=torch.float64)}


def _adam_step(
    w: Tensor, g: Tensor, memory: Momenta, lr: float, b1: float, b2: float, eps: float, weight_decay: float,
    decoupled: bool,
) -> tuple[Tensor, Momenta]:  # fmt: skip
    if decoupled:
        w = (1 - lr * weight_decay) * w
    elif weight_decay:
        g = g + weight_decay * w
    m, v, t = memory["m"].lerp(g, 1 - b1), b2 * memory["v"] + (1 - b2) * g.square(), memory["t"] + 1
    m_share, v_share = (1 - b1**t).to(w.dtype), (1 - b2**t).to(w.dtype)  # float64: 1 - 0.999 in float32 is inexact
    w = w - lr / m_share * m / ((v / v_share).sqrt() + eps)
    return w, {"m": m, "v": v, "t": t}
