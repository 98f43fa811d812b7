"""Adaptive receivers: they estimate the interference from the received vector and set their threshold from it.

For a signal far below the noise the best threshold is C*(alpha) tau (`theory.best_threshold`). For a stronger signal it
is larger. A single vector does not show this, because its tails may be noise or signal; two rounds do, because their
noise is independent and their signal is nearly the same. If a larger threshold aligns the clipped vector better with
the previous rounds, it keeps more additional signal than noise. The threshold is doubled while the alignment improves.
Correlations between rounds also show the share of the signal that clipping removes, and the share of noise in the rest.
"""

import math

import numpy as np
import torch
from torch import Tensor

from stableair import stable
from stableair.contracts import Memory, Metrics, Reception, Rule
from stableair.errors import InputError
from stableair.receivers.median import median

# theory.best_threshold(alpha), and the best K of the Cauchy score; both diverge as alpha approaches 2.
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 1.95, 1.99)
BEST_C = (0.01102, 0.03844, 0.09054, 0.1689, 0.2714, 0.3948, 0.5359, 0.6926, 0.8638, 1.050, 1.255, 1.483, 1.748, 2.078,
          2.565, 2.988, 3.832)  # fmt: skip
BEST_K = (0.1022, 0.2249, 0.3868, 0.5757, 0.7819, 1.000, 1.228, 1.465, 1.716, 1.986, 2.285, 2.632, 3.063, 3.663, 4.729,
          5.912, 9.396)  # fmt: skip

MEMORY = 10  # rounds over which estimates are averaged
DOUBLINGS = 16  # maximum: 65,536 times the threshold of a weak signal
SIGNIFICANCE = 2.0  # standard errors by which a doubling must improve the alignment
EVIDENCE_DECAY = 0.9  # factor on the evidence per round
REFERENCE_DECAY = 0.5  # factor on the weight of a past vector in the reference, per round of age
TINY = 1e-60  # replaces the energy of a zero vector
HORIZON = 25  # rounds over which the usual noise is averaged
HARM, HARM_TIMES_D = 1 / 625, 6.0  # the harm of noise is max(HARM, HARM_TIMES_D / d) times its energy
CHANGE = 0.25  # assumed relative change of the signal's energy per round
OVERSHOT = 3.0  # standard errors by which a round must point against the previous ones
SHORTER, LONGER = 0.5, 1.2  # factors on the step after such a round, and after any other (as in Rprop)


class NoiseEstimate:
    """A running estimate of the interference's (alpha, tau); `AdaptiveMac` and `AdaptiveCauchy` extend it.

    An instance is used in one round: it is created from the memory, updated, and stored as the next memory.
    """

    def __init__(self, rounds: int = 0, alpha: float = 0.0, log_tau: float = 0.0):
        self.rounds, self.alpha, self.log_tau = rounds, alpha, log_tau  # the first round replaces alpha and log_tau

    def update(self, sample: Tensor, memory: int = MEMORY) -> bool:
        """Update the estimate with a sample, averaged over `memory` rounds; return False if the sample is constant."""
        try:
            alpha, tau = stable.estimate(sample[sample.isfinite()])
        except InputError:  # empty or constant: without variation there is no noise
            return False
        self.rounds += 1
        weight = 1 / min(self.rounds, memory)
        self.alpha += weight * (alpha - self.alpha)
        self.log_tau += weight * (math.log(tau) - self.log_tau)
        return True

    def best(self, table: tuple[float, ...]) -> float:
        """Interpolate the best threshold for the estimated law from a table."""
        return math.exp(np.interp(self.alpha, ALPHAS, np.log(table)) + self.log_tau)

    def metrics(self) -> Metrics:
        return {"alpha": self.alpha, "tau": math.exp(self.log_tau)} if self.rounds else {"alpha": None, "tau": None}


class MacTracker(NoiseEstimate):
    """The estimates of mac(C="auto") in one round.

    With x = g - med(g) and the round's own (alpha, tau), y = clip(x, [-C, C]) / gain, where C is C*(alpha) tau times a
    power of two and the gain is the share of the signal that passes the clipping. With S and N the energies of signal
    and noise per entry of y, the round is weighted by min(1, (usual N + S / h) / N)^2 with
    h = max(1 / 625, 6 / d). The weight is 1 unless N exceeds the usual noise and its harm h N exceeds the benefit S. A
    round that points against the previous rounds indicates that the steps are too long: it halves the step; every other
    round multiplies the step by 1.2, up to 1.
    """

    def __init__(
        self,
        rounds: int = 0,
        alpha: float = 0.0,
        log_tau: float = 0.0,
        evidence: dict[int, tuple[float, ...]] | None = None,
        before: Tensor | None = None,
        trust: float = 0.0,
        signal: float = 0.0,
        known: float = 0.0,
        log_noise: float = 0.0,
        brake: float = 1.0,
    ):
        super().__init__(rounds, alpha, log_tau)
        self.evidence = dict(evidence or {})  # per octave of C: decayed sums of `doublings`, and their variance
        self.before = before  # mean of past rounds, weighted by REFERENCE_DECAY^age / energy
        self.trust = trust  # sum of these weights
        self.signal, self.known = signal, known  # estimate of S, and the inverse of its variance
        self.log_noise = log_noise  # the usual N; the first round replaces it
        self.brake = brake  # factor on the step, in (0, 1]
        self.C, self.gain, self.weight = math.inf, 1.0, 1.0  # of this round

    def memory(self) -> Memory:
        """The memory of the next round."""
        names = "rounds", "alpha", "log_tau", "evidence", "before", "trust", "signal", "known", "log_noise", "brake"
        return {name: getattr(self, name) for name in names}

    def adapt(self, x: Tensor, pilot: Tensor | None) -> None:
        """Set C, the gain and the weight of the round from x = g - med(g): (d,)."""
        C = self.best(BEST_C)
        largest = C * 2**DOUBLINGS
        x = x.double().clamp(-largest, largest)
        before = torch.zeros_like(x) if self.before is None else self.before.to(x)
        self.C, passed = self._threshold(x, before, C)
        self.gain = passed * _share(x, self.C)
        y = x.clamp(-self.C, self.C) / self.gain
        energy = y.square().mean().item() or TINY
        self._update_signal(y, before.clamp(-2 * self.C, 2 * self.C) / _share(before, 2 * self.C), energy)
        self.weight = self.brake * self._round_weight(energy, len(x), pilot)
        if energy > TINY:
            self.trust = REFERENCE_DECAY * self.trust + 1 / energy
            self.before = (before + (x - before) / (energy * self.trust)).float()

    def _update_signal(self, y: Tensor, reference: Tensor, energy: float) -> None:
        """Track S = y r / d over rounds with a Kalman filter; under noise alone its variance is |y|^2 |r|^2 / d^3."""
        variance = energy * reference.square().mean().item() / len(y)
        if 0 < variance < math.inf:
            measured = (y @ reference).item() / len(y)
            overshot = measured < -OVERSHOT * math.sqrt(variance)
            self.brake = SHORTER * self.brake if overshot else min(LONGER * self.brake, 1.0)
            self.known = self.known / (1 + self.known * (CHANGE * max(self.signal, 0.0)) ** 2) + 1 / variance
            self.signal += (measured - self.signal) / (variance * self.known)

    def _round_weight(self, energy: float, d: int, pilot: Tensor | None) -> float:
        """The weight of a round, without the brake, from the energy per entry of its vector (d,)."""
        signal = max(self.signal, 0.0)
        noise = max(energy - signal, energy / 10) if pilot is None else self._pilot_energy(pilot)
        if self.rounds == 1:
            self.log_noise = math.log(noise)
        tolerated = signal / max(HARM, HARM_TIMES_D / d) + math.exp(self.log_noise)
        self.log_noise += (math.log(noise) - self.log_noise) / min(self.rounds, HORIZON)
        return min(1.0, tolerated / noise) ** 2

    def _pilot_energy(self, pilot: Tensor) -> float:
        """Energy of the pilot after the clipping and the division by the gain."""
        return (pilot.double().clamp(-self.C, self.C).square().mean() / self.gain**2).item()

    def _threshold(self, x: Tensor, before: Tensor, C: float) -> tuple[float, float]:
        """Return C, doubled while the alignment improves, and a correction factor of the gain."""
        start = math.floor(math.log2(C))
        steps = doublings(x, before, C)
        decays = EVIDENCE_DECAY, EVIDENCE_DECAY, EVIDENCE_DECAY, EVIDENCE_DECAY**2  # of three sums and their variance
        for octave, step in enumerate(steps, start):
            sums = zip(self.evidence.get(octave, (0.0,) * 4), (*step, 1.0), decays, strict=True)
            self.evidence[octave] = tuple(decay * old + new for old, new, decay in sums)
        passed, doubling = 1.0, True
        for octave in range(start, start + len(steps)):
            improvement, before_doubling, after_doubling, variance = self.evidence[octave]
            margin = SIGNIFICANCE * math.sqrt(variance)
            doubling = doubling and improvement > margin
            if doubling:
                C *= 2
            elif after_doubling - before_doubling > margin and before_doubling > 0:
                passed *= max(before_doubling / (after_doubling - margin), 0.5)
            else:
                break
        return C, passed

    def metrics(self) -> Metrics:
        return {"C": self.C, "gain": self.gain, "counts": self.weight, "brake": self.brake} | super().metrics()


def noise_sample(received: Reception, pilots: int, x: Tensor) -> Tensor:
    """Entries to estimate the noise from: the pilots of the round if the rule uses pilots, otherwise x."""
    if pilots and received.pilot is None:
        text = f"pilot={pilots} needs a channel with pilots: set pilot=0 outside an experiment"
        raise InputError(text, code="no-pilots", setting="receiver")
    return received.pilot if pilots and received.pilot is not None else x


def _clipped(g: Tensor, C: float, gain: float, weight: float = 1.0) -> Tensor:
    """MAC with the gain restored: weight (m + clip(g - m, [-C, C]) / gain). (d,) -> (d,)."""
    m = median(g)
    clipped = g.clamp(m - C, m + C)
    repaired = m + (clipped - m) / gain if gain != 1 else clipped
    return repaired if weight == 1 else weight * repaired


def adaptive_mac(gain: bool, pilots: int) -> Rule:
    """mac(C="auto"); with gain=False the clipped part is not divided by the gain."""

    def apply(received: Reception, memory: Memory) -> tuple[Tensor, Memory, Metrics]:
        x, tracker = received.g - median(received.g), MacTracker(**memory)
        if tracker.update(noise_sample(received, pilots, x), memory=1):
            tracker.adapt(x, received.pilot if pilots else None)
        divisor = tracker.gain if gain else 1.0
        g = received.blocks.map(lambda block: _clipped(block, tracker.C, divisor, tracker.weight), received.g)
        return g, tracker.memory(), tracker.metrics()

    return Rule(apply, init=lambda like: MacTracker().memory(), pilots=pilots)


def mac_with_gain(C: float) -> Rule:
    """mac(C, gain=True): the clipped part is divided by the share of unclipped entries of the whole vector."""

    def apply(received: Reception, memory: Memory) -> tuple[Tensor, Memory, Metrics]:
        gain = _share(received.g - median(received.g), C)
        g = received.blocks.map(lambda block: _clipped(block, C, gain), received.g)
        return g, memory, {"C": C, "gain": gain}

    return Rule(apply)


def _share(x: Tensor, C: float) -> float:
    """The share of entries within C."""
    return (x.abs() <= C).double().mean().item()


def doublings(x: Tensor, before: Tensor, C: float) -> list[list[float]]:
    """The effect of doubling C, 2C, 4C, ... on x, measured against the previous rounds, in standard errors: (n, 3).

    Let u and v be x clipped at C and at 2C, and r the reference `before` clipped at 2C. The unit is
    |v - u| |r| / sqrt(d). The first number is (v - u) r with u and v scaled to length 1: the improvement of the
    direction. The others are u r and v r with u and v divided by their shares of unclipped entries: the signal in each.
    Under noise alone, with any tails, the first number and the difference of the others have mean 0 and variance 1. A
    weak signal passes both thresholds equally. Clipping r at the larger threshold avoids a bias to the smaller one.
    """
    effects: list[list[float]] = []
    u, share_u = x.clamp(-C, C), _share(x, C)
    while len(effects) < DOUBLINGS and share_u < 1:  # while C clips an entry
        C *= 2
        v, r, share_v = x.clamp(-C, C), before.clamp(-C, C), _share(x, C)
        products = torch.stack([u @ u, v @ v, r @ r, u @ v, u @ r, v @ r]).tolist()
        along_u, along_v = _along(products, math.sqrt(products[0]), math.sqrt(products[1]), len(x))
        effects.append([along_v - along_u, *_along(products, share_u, share_v, len(x))])
        u, share_u = v, share_v
    return effects


def _along(products: list[float], a: float, b: float, d: int) -> tuple[float, float]:
    """(u/a) r and (v/b) r in units of |v/b - u/a| |r| / sqrt(d), from products of u, v and r; 0 if u/a = v/b."""
    uu, vv, rr, uv, ur, vr = products
    squared_distance = uu / a**2 + vv / b**2 - 2 * uv / (a * b)
    if not (squared_distance > 1e-12 * vv / b**2 and rr > 0):
        return 0.0, 0.0
    unit = math.sqrt(squared_distance * rr / d)
    return ur / (a * unit), vr / (b * unit)


def adaptive_cauchy() -> Rule:
    """cauchy(K="auto")."""

    def apply(received: Reception, memory: Memory) -> tuple[Tensor, Memory, Metrics]:
        noise = NoiseEstimate(**memory)
        K = noise.best(BEST_K) if noise.update(received.g - median(received.g)) else math.inf
        g = received.blocks.map(lambda block: myriad(block, K), received.g)
        return g, vars(noise), {"K": K} | noise.metrics()

    return Rule(apply, init=lambda like: vars(NoiseEstimate()))


def myriad(g: Tensor, K: float) -> Tensor:
    """x / (1 + (x / K)^2), which suppresses entries far beyond K: (...) -> (...)."""
    return torch.where(g.isinf(), 0, g / (1 + (g / K).square())) if math.isfinite(K) else g
