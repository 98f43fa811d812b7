"""Receivers that set their own threshold: they estimate the interference from what they receive.

For a signal far below the noise the best threshold is C*(alpha) tau (`theory.best_threshold`). For a stronger signal it
is larger, and one vector alone cannot tell: its tails may be noise or signal. Two vectors can. The noise of two rounds
is independent, the signal is nearly the same, so whatever makes a round's clipped vector point more along the round
before has kept more signal than it has let in noise. The threshold is doubled as long as that is so.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stableair import stable
from stableair.checks import InputError
from stableair.contracts import Metrics, Receiver
from stableair.receivers.medians import median

# theory.best_threshold(alpha), and the same for the score of the Cauchy law; towards alpha = 2 both go to infinity.
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 1.95, 1.99)
BEST_C = (0.01102, 0.03844, 0.09054, 0.1689, 0.2714, 0.3948, 0.5359, 0.6926, 0.8638, 1.050, 1.255, 1.483, 1.748, 2.078,
          2.565, 2.988, 3.832)  # fmt: skip
BEST_K = (0.1022, 0.2249, 0.3868, 0.5757, 0.7819, 1.000, 1.228, 1.465, 1.716, 1.986, 2.285, 2.632, 3.063, 3.663, 4.729,
          5.912, 9.396)  # fmt: skip

MEMORY = 10  # rounds over which the estimates are averaged
DOUBLINGS = 16  # at most: to 65,536 times the threshold of a weak signal
SIGNIFICANCE = 2.0  # standard errors by which a doubling has to be better
FADE = 0.9  # of a round's evidence for the next


class Adaptive(Receiver):
    """The common part: (alpha, tau) from the vector or from pilots, averaged over rounds, saved and resumed."""

    remembered: tuple[str, ...] = ()

    def __init__(self, pilot: int = 0):
        self.pilots = pilot
        self.heard: Tensor | None = None
        self.rounds = 0
        self.alpha = self.log_tau = 0.0  # the first round replaces them

    def listen(self, pilot: Tensor) -> None:
        """Take the round's noise-only symbols."""
        self.heard = pilot

    def estimate(self, x: Tensor) -> bool:
        """Update (alpha, tau) from the pilots, else from x; False where there is no noise to speak of."""
        if self.pilots and self.heard is None:
            raise InputError(f"pilot={self.pilots} needs a channel with pilots; outside an experiment leave it out")
        sample = self.heard if self.pilots and self.heard is not None else x
        try:
            alpha, tau = stable.estimate(sample[sample.isfinite()])
        except InputError:  # empty or constant: nothing varies, so nothing is noise
            return False
        self.rounds += 1
        weight = 1 / min(self.rounds, MEMORY)
        self.alpha += weight * (alpha - self.alpha)
        self.log_tau += weight * (math.log(tau) - self.log_tau)
        return True

    def best(self, table: tuple[float, ...]) -> float:
        """The table's threshold for the estimated law."""
        return math.exp(np.interp(self.alpha, ALPHAS, np.log(table)) + self.log_tau)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.remembered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != set(self.remembered):
            raise InputError(f"{type(self).__name__} remembers {', '.join(self.remembered)}: got {', '.join(state)}")
        for name, value in state.items():
            setattr(self, name, value)

    def metrics(self) -> Metrics:
        return {"alpha": self.alpha, "tau": math.exp(self.log_tau)} if self.rounds else {"alpha": None, "tau": None}


class AdaptiveMac(Adaptive):
    """mac(C="auto"), and mac with the gain put back."""

    remembered = "rounds", "alpha", "log_tau", "evidence", "weight", "before"

    def __init__(self, C: float | None, gain: bool, pilot: int = 0):
        super().__init__(pilot)
        self.fixed = C  # None: set by itself
        self.put_back = gain
        self.C, self.gain = C or math.inf, 1.0
        self.evidence, self.weight = [0.0] * DOUBLINGS, 0.0
        self.before: Tensor | None = None

    def observe(self, g: Tensor) -> None:
        x = g - median(g)
        if self.fixed is None:
            self.C = self._threshold(x) if self.estimate(x) else math.inf
            self.before = x
        self.gain = (x.abs() <= self.C).double().mean().item() if self.put_back else 1.0

    def apply(self, g: Tensor) -> Tensor:
        m = median(g)
        clipped = g.clamp(m - self.C, m + self.C)
        return clipped if self.gain == 1 else m + (clipped - m) / self.gain

    def _threshold(self, x: Tensor) -> float:
        C = self.best(BEST_C)
        if self.before is None:
            return C
        worth = doublings(x, self.before, C)
        self.evidence = [FADE * old + new for old, new in zip(self.evidence, worth, strict=True)]
        self.weight = FADE**2 * self.weight + 1
        for score in self.evidence:
            if score <= SIGNIFICANCE * math.sqrt(self.weight):
                break
            C *= 2
        return C

    def metrics(self) -> Metrics:
        return {"C": self.C, "gain": self.gain} | (super().metrics() if self.fixed is None else {})


def doublings(x: Tensor, before: Tensor, C: float) -> list[float]:
    """Whether doubling C, 2C, 4C, ... makes x point more along the vector of the round before, in standard errors.

    With u and v the vector x clipped at C and at 2C and scaled to length 1, and r the other one clipped at 2C, it is
    (v - u) r sqrt(d) / (|v - u| |r|). Noise alone gives mean 0 and variance 1, whatever its tails. Clipping the
    reference at the larger threshold keeps the comparison from favouring the smaller.
    """
    x, before = (t.double().nan_to_num(posinf=1e100, neginf=-1e100) for t in (x, before))
    found, u = [], x.clamp(-C, C)
    for _ in range(DOUBLINGS):
        C *= 2
        v, r = x.clamp(-C, C), before.clamp(-C, C)
        step = v / v.norm() - u / u.norm()
        size = (step.norm() * r.norm()).item()
        if not size > 1e-9 * r.norm().item():  # nothing lies beyond C: there is nothing to gain from here on
            break
        found.append((step @ r).item() * math.sqrt(len(x)) / size)
        u = v
    return found + [0.0] * (DOUBLINGS - len(found))


class AdaptiveCauchy(Adaptive):
    """cauchy(K="auto")."""

    remembered = "rounds", "alpha", "log_tau"

    def __init__(self) -> None:
        super().__init__()
        self.K = math.inf

    def observe(self, g: Tensor) -> None:
        self.K = self.best(BEST_K) if self.estimate(g - median(g)) else math.inf

    def apply(self, g: Tensor) -> Tensor:
        return myriad(g, self.K)

    def metrics(self) -> Metrics:
        return {"K": self.K} | super().metrics()


def myriad(g: Tensor, K: float) -> Tensor:
    """x / (1 + (x / K)^2): what is far beyond K hardly counts. (...) -> (...)."""
    return torch.where(g.isinf(), 0, g / (1 + (g / K).square())) if math.isfinite(K) else g
