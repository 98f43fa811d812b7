"""Receivers that set their own threshold: they estimate the interference from what they receive.

For a signal far below the noise the best threshold is C*(alpha) tau (`theory.best_threshold`). For a stronger signal it
is larger, and one vector alone cannot tell: its tails may be noise or signal. Two vectors can. The noise of two rounds
is independent, the signal is nearly the same, so whatever makes a round's clipped vector point more along the rounds
before has kept more signal than it has let in noise. The threshold is doubled as long as that is so. In the same way
two rounds tell how much of the signal clipping has cut, and how much of what is left is noise.
"""

import math

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

MEMORY = 10  # rounds over which estimates are averaged
DOUBLINGS = 16  # at most: to 65,536 times the threshold of a weak signal
SIGNIFICANCE = 2.0  # standard errors by which a doubling has to be better
FADE = 0.9  # of a round's evidence for the next
RECENT = 0.5  # what a round's vector counts in the reference for each round that it lies back
TINY = 1e-60  # the energy of a vector of zeros
HORIZON = 25  # rounds over which the noise is averaged that is usual
HARM, TRACE = 1 / 625, 6.0  # noise is taken to do this share of its energy in harm, or TRACE / d if that is more
CHANGE = 0.25  # of the signal's energy from round to round
OVERSHOT = 3.0  # standard errors by which a round has to point against those before
SHORTER, LONGER = 0.5, 1.2  # the step after a round that does, and after one that does not (Rprop's)


class Adaptive(Receiver):
    """The common part: (alpha, tau) from the vector or from pilots, averaged over rounds, saved and resumed."""

    def __init__(self, pilot: int = 0):
        self.pilots = pilot
        self.heard: Tensor | None = None
        self.rounds = 0
        self.alpha = self.log_tau = 0.0  # the first round replaces them

    def listen(self, pilot: Tensor) -> None:
        """Take the round's noise-only symbols."""
        self.heard = pilot

    def estimate(self, x: Tensor, memory: int = MEMORY) -> bool:
        """Update (alpha, tau) from the pilots, else from x; False where there is no noise to speak of."""
        if self.pilots and self.heard is None:
            raise InputError(f"pilot={self.pilots} needs a channel with pilots; outside an experiment leave it out")
        sample = self.heard if self.pilots and self.heard is not None else x
        try:
            alpha, tau = stable.estimate(sample[sample.isfinite()])
        except InputError:  # empty or constant: nothing varies, so nothing is noise
            return False
        self.rounds += 1
        weight = 1 / min(self.rounds, memory)
        self.alpha += weight * (alpha - self.alpha)
        self.log_tau += weight * (math.log(tau) - self.log_tau)
        return True

    def best(self, table: tuple[float, ...]) -> float:
        """The table's threshold for the estimated law."""
        return math.exp(np.interp(self.alpha, ALPHAS, np.log(table)) + self.log_tau)

    def metrics(self) -> Metrics:
        return {"alpha": self.alpha, "tau": math.exp(self.log_tau)} if self.rounds else {"alpha": None, "tau": None}


class AdaptiveMac(Adaptive):
    """mac(C="auto"), and mac with the gain put back.

    With x = g - med(g) and the round's own (alpha, tau), y = clip(x, [-C, C]) / gain, where C is C*(alpha) tau times a
    power of two and the gain is the share of the signal that the clipping lets through. With S and N the signal's and
    the noise's energy in an entry of y, the round counts min(1, (usual N + S / h) / N)^2 with h = max(1 / 625, 6 / d):
    in full, unless its noise is beyond what is usual and does more harm, h N, than the signal does good, S. A round
    that points against those before tells of steps that are too long: it halves the step, and each that does not
    lengthens it by a fifth, up to 1.
    """

    remembered = "rounds", "alpha", "log_tau", "evidence", "before", "trust", "signal", "known", "log_noise", "brake"

    def __init__(self, C: float | None, gain: bool, pilot: int = 0):
        super().__init__(pilot)
        self.fixed = C  # None: set by itself
        self.put_back = gain
        self.C, self.gain, self.counts = C or math.inf, 1.0, 1.0
        self.evidence: dict[int, tuple[float, ...]] = {}  # of an octave of C: faded sums of `doublings`, and variance
        self.before: Tensor | None = None  # the mean of the rounds before, each by RECENT^age over its energy
        self.trust = 0.0  # the sum of these weights
        self.signal, self.known = 0.0, 0.0  # S as far as it is known, and the inverse of its variance
        self.log_noise = 0.0  # the usual N; the first round replaces it
        self.brake = 1.0  # the share of the step that is taken

    def observe(self, g: Tensor) -> None:
        x = g - median(g)
        if self.fixed is not None:
            self.gain = _share(x, self.fixed)
        elif self.estimate(x, memory=1):
            self._adapt(x)
        else:
            self.C, self.gain, self.counts = math.inf, 1.0, 1.0

    def apply(self, g: Tensor) -> Tensor:
        m = median(g)
        clipped = g.clamp(m - self.C, m + self.C)
        repaired = m + (clipped - m) / self.gain if self.put_back and self.gain != 1 else clipped
        return repaired if self.counts == 1 else self.counts * repaired

    def _adapt(self, x: Tensor) -> None:
        """Set C, the gain and what the round counts, and remember it."""
        C = self.best(BEST_C)
        largest = C * 2**DOUBLINGS
        x = x.double().clamp(-largest, largest)
        if self.before is not None and self.before.shape != x.shape:
            raise InputError(f"mac(C=auto) remembers {len(self.before)} entries: got a vector of {len(x)}")
        before = torch.zeros_like(x) if self.before is None else self.before.to(x)
        self.C, passed = self._threshold(x, before, C)
        self.gain = passed * _share(x, self.C)
        y = x.clamp(-self.C, self.C) / self.gain
        energy = y.square().mean().item() or TINY
        self._learn_signal(y, before.clamp(-2 * self.C, 2 * self.C) / _share(before, 2 * self.C), energy)
        self.counts = self.brake * self._weigh(energy, len(x))
        if energy > TINY:
            self.trust = RECENT * self.trust + 1 / energy
            self.before = (before + (x - before) / (energy * self.trust)).float()

    def _learn_signal(self, y: Tensor, reference: Tensor, energy: float) -> None:
        """S = y r / d, tracked over rounds by a Kalman filter: noise alone gives variance |y|^2 |r|^2 / d^3."""
        variance = energy * reference.square().mean().item() / len(y)
        if 0 < variance < math.inf:
            found = (y @ reference).item() / len(y)
            overshot = found < -OVERSHOT * math.sqrt(variance)
            self.brake = SHORTER * self.brake if overshot else min(LONGER * self.brake, 1.0)
            self.known = self.known / (1 + self.known * (CHANGE * max(self.signal, 0.0)) ** 2) + 1 / variance
            self.signal += (found - self.signal) / (variance * self.known)

    def _weigh(self, energy: float, d: int) -> float:
        """What a round counts whose d entries have this energy, but for the brake."""
        signal = max(self.signal, 0.0)
        noise = self._heard() if self.pilots else max(energy - signal, energy / 10)
        if self.rounds == 1:
            self.log_noise = math.log(noise)
        tolerated = signal / max(HARM, TRACE / d) + math.exp(self.log_noise)
        self.log_noise += (math.log(noise) - self.log_noise) / min(self.rounds, HORIZON)
        return min(1.0, tolerated / noise) ** 2

    def _threshold(self, x: Tensor, before: Tensor, C: float) -> tuple[float, float]:
        """C doubled as long as it pays, and what passes there of the signal, beyond the share of unclipped entries."""
        start = math.floor(math.log2(C))
        found = doublings(x, before, C)
        for octave, new in enumerate(found, start):
            sums = zip(self.evidence.get(octave, (0.0,) * 4), (*new, 1.0), (FADE, FADE, FADE, FADE**2), strict=True)
            self.evidence[octave] = tuple(fade * old + now for old, now, fade in sums)
        passed, doubling = 1.0, True
        for octave in range(start, start + len(found)):
            turned, less, more, variance = self.evidence[octave]
            enough = SIGNIFICANCE * math.sqrt(variance)
            doubling = doubling and turned > enough
            if doubling:
                C *= 2
            elif more - less > enough and less > 0:
                passed *= max(less / (more - enough), 0.5)
            else:
                break
        return C, passed

    def _heard(self) -> float:
        """The energy of a pilot, clipped as the vector and with the gain put back."""
        assert self.heard is not None
        return (self.heard.double().clamp(-self.C, self.C).square().mean() / self.gain**2).item()

    def metrics(self) -> Metrics:
        own: Metrics = {"C": self.C, "gain": self.gain}
        return own if self.fixed is not None else own | {"counts": self.counts, "brake": self.brake} | super().metrics()


def _share(x: Tensor, C: float) -> float:
    """The share of entries within C."""
    return (x.abs() <= C).double().mean().item()


def doublings(x: Tensor, before: Tensor, C: float) -> list[list[float]]:
    """What doubling C, 2C, 4C, ... does to x, told by the rounds before, in standard errors: (n, 3).

    With u and v the vector x clipped at C and at 2C and r the other one clipped at 2C, the unit is
    |v - u| |r| / sqrt(d). With u and v scaled to length 1 the first number is (v - u) r: whether the direction gets
    better. With u and v over their shares of unclipped entries the others are u r and v r: what each has of the signal.
    Noise alone gives the first, and the difference of the others, mean 0 and variance 1, whatever its tails; a weak
    signal passes both thresholds alike. Clipping the reference at the larger one keeps from favouring the smaller.
    """
    found: list[list[float]] = []
    u, kept = x.clamp(-C, C), _share(x, C)
    while len(found) < DOUBLINGS and kept < 1:  # while something lies beyond C
        C *= 2
        v, r, keeps = x.clamp(-C, C), before.clamp(-C, C), _share(x, C)
        products = torch.stack([u @ u, v @ v, r @ r, u @ v, u @ r, v @ r]).tolist()
        less, more = _along(products, math.sqrt(products[0]), math.sqrt(products[1]), len(x))
        found.append([more - less, *_along(products, kept, keeps, len(x))])
        u, kept = v, keeps
    return found


def _along(products: list[float], a: float, b: float, d: int) -> tuple[float, float]:
    """(u/a) r and (v/b) r in units of |v/b - u/a| |r| / sqrt(d), from products of u, v and r; 0 where equal."""
    uu, vv, rr, uv, ur, vr = products
    apart = uu / a**2 + vv / b**2 - 2 * uv / (a * b)
    if not (apart > 1e-12 * vv / b**2 and rr > 0):
        return 0.0, 0.0
    unit = math.sqrt(apart * rr / d)
    return ur / (a * unit), vr / (b * unit)


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
