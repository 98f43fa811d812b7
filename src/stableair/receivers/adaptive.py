"""Adaptive receivers: they estimate the interference from the received vector and set their threshold from it.

For a signal far below the noise, the best threshold is C*(alpha) tau (`theory.best_threshold`). For a stronger signal,
the best threshold is larger. A single vector cannot show this, because its tails may be noise or signal. Two rounds
can, because their noise is independent and their signal is nearly the same. If a larger threshold aligns the clipped
vector better with the previous rounds, it adds more signal than noise. The receiver uses the threshold with the best
alignment. Correlations between rounds also show the share of the signal that clipping removes, the share of noise in
the clipped vector, and whether the steps still make progress.
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
DOUBLINGS = 16  # largest number: 65,536 times the threshold of a weak signal
SIGNIFICANCE = 3.0  # standard errors for each test: a larger threshold is better, rounds agree, a round opposes them
EVIDENCE_DECAY = 0.9  # factor on the evidence per round
REFERENCE_DECAY = 0.5  # factor on the weight of a past vector in the reference, per round of age
TINY = 1e-60  # replaces the energy of a zero vector
HORIZON = 25  # rounds over which the usual noise is averaged
CHANGE = 0.25  # assumed relative change of the signal's energy per round
CURVATURE, TRACE = 1 / 300, 12.0  # the assumed h, mean curvature times learning rate, is max(CURVATURE, TRACE / d)
CUT = 0.5  # factor on the budget when rounds make no more progress; undone when they certainly make progress
SHORTER, LONGER = 0.5, 1.2  # factors on the brake after a round that overshot, and after any other (as in Rprop)
PFLUG_ERRORS, PFLUG_ROUNDS = 0.5, 5  # standard errors and smallest number of full steps in the test of progress


class NoiseEstimate:
    """A running estimate of the interference's (alpha, tau); `MacTracker` extends it.

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
    power of two and the gain is the share of the signal that passes the clipping. Let E_s and E_xi be the energies of
    signal and noise per entry of y, and h the mean curvature of the loss times the server's learning rate. A step w y
    gains w E_s and loses w^2 h E_xi / 2, so that w = min(1, E_s / (h E_xi)) is best.

    E_s is not measured itself. The correlation R of y with the earlier rounds is E_s - h U, because the noise of the
    earlier steps, of energy U, has moved the model, and the gradient points back. So E_s / h = U + R / h. The receiver
    uses the geometric mean of E_xi as U, the usual noise, assumes h = max(1 / 300, 12 / d), and replaces a negative R
    by 0.

    If the rounds no longer point in the direction of the previous rounds, the steps are too long. The budget B starts
    at U. It is halved when the correlations since its last change add up to less than -1/2 standard error (Pflug,
    1990), and doubled again when they add up to more than 3 standard errors. With c = min(1, B / U), at least 5 / c
    rounds precede a cut, since shorter steps need more rounds to show an effect. So c falls at most as 5 / rounds, and
    chance alone does not end the training.

    The weight of a round is w = min(1, c (U + R / h) / E_xi), times a brake. A single round that points against the
    previous rounds by three standard errors shows that a step overshot, and halves the brake. Every other round
    multiplies the brake by 1.2, up to 1.
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
        budget: float = math.inf,
        progress: float = 0.0,
        since_change: int = 0,
        brake: float = 1.0,
    ):
        super().__init__(rounds, alpha, log_tau)
        self.evidence = dict(evidence or {})  # per octave of C: decayed sums of `doublings`, and their variance
        self.before = before  # mean of past rounds, weighted by REFERENCE_DECAY^age / energy
        self.trust = trust  # sum of these weights
        self.signal, self.known = signal, known  # estimate of R, and the inverse of its variance
        self.log_noise = log_noise  # logarithm of the usual noise U; the first round replaces it
        self.budget = budget  # B; infinite until its first change
        self.progress = progress  # sum of the correlations since the last change of B
        self.since_change = since_change  # number of these correlations
        self.brake = brake  # factor on the step, in (0, 1]
        self.C, self.gain, self.step = math.inf, 1.0, 1.0  # values of this round

    def memory(self) -> Memory:
        """Return the memory for the next round."""
        names = (
            "rounds", "alpha", "log_tau", "evidence", "before", "trust", "signal", "known", "log_noise", "budget",
            "progress", "since_change", "brake",
        )  # fmt: skip
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
        self._correlate(y, before.clamp(-2 * self.C, 2 * self.C) / _share(before, 2 * self.C), energy)
        self.step = self._step_factor(energy, len(x), pilot)
        if energy > TINY:
            self.trust = REFERENCE_DECAY * self.trust + 1 / energy
            self.before = (before + (x - before) / (energy * self.trust)).float()

    def _correlate(self, y: Tensor, reference: Tensor, energy: float) -> None:
        """Update R and the sum of correlations from y r / d; under noise alone its variance is |y|^2 |r|^2 / d^3."""
        variance = energy * reference.square().mean().item() / len(y)
        if 0 < variance < math.inf:
            measured = (y @ reference).item() / len(y)
            self.known = self.known / (1 + self.known * (CHANGE * self.signal) ** 2) + 1 / variance
            self.signal += (measured - self.signal) / (variance * self.known)  # Kalman filter
            errors = measured / math.sqrt(variance)
            self.brake = SHORTER * self.brake if errors < -SIGNIFICANCE else min(LONGER * self.brake, 1.0)
            self.progress += errors
            self.since_change += 1

    def _step_factor(self, energy: float, d: int, pilot: Tensor | None) -> float:
        """Compute the factor on the step from the energy per entry of y: (d,)."""
        signal = max(self.signal, 0.0)
        noise = max(energy - signal, energy / 10) if pilot is None else self._pilot_energy(pilot)
        if self.rounds == 1:
            self.log_noise = math.log(noise)
        usual = math.exp(self.log_noise)
        self._test_progress(usual)
        self.log_noise += (math.log(noise) - self.log_noise) / min(self.rounds, HORIZON)
        affordable = min(1.0, self.budget / usual) * (usual + signal / max(CURVATURE, TRACE / d))
        return self.brake * min(1.0, affordable / noise)

    def _test_progress(self, usual: float) -> None:
        """Halve the budget if the rounds since its last change point against each other; double it if they agree."""
        share, error = min(1.0, self.budget / usual), math.sqrt(self.since_change)
        if share == 1:
            self.progress = min(self.progress, SIGNIFICANCE)  # so that early progress does not delay the first cut
        elif self.progress > SIGNIFICANCE * error:
            self.budget, self.progress, self.since_change = self.budget / CUT, 0.0, 0
        if share * self.since_change >= PFLUG_ROUNDS and self.progress < -PFLUG_ERRORS * error:
            self.budget, self.progress, self.since_change = CUT * min(self.budget, usual), 0.0, 0

    def _pilot_energy(self, pilot: Tensor) -> float:
        """Compute the energy of the pilot after the clipping and the division by the gain."""
        return (pilot.double().clamp(-self.C, self.C).square().mean() / self.gain**2).item()

    def _threshold(self, x: Tensor, before: Tensor, C: float) -> tuple[float, float]:
        """Return the octave of C with the best alignment, and a correction factor of the gain.

        Only rounds that point in the direction of the previous rounds show which octave is best. In other rounds, a
        threshold that adds mostly noise would improve the alignment.
        """
        start = math.floor(math.log2(C))
        steps = doublings(x, before, C)
        decays = EVIDENCE_DECAY, EVIDENCE_DECAY, EVIDENCE_DECAY, EVIDENCE_DECAY**2  # of three sums and their variance
        total = total_variance = best = 0.0
        chosen = 0
        aligned = bool(steps) and steps[0][2] > 0
        for i, (unit, effect, *signals) in enumerate(steps):
            sums = zip(self.evidence.get(start + i, (0.0,) * 4), (aligned * effect, *signals, 1.0), decays, strict=True)
            improvement, _, _, variance = self.evidence[start + i] = tuple(d * old + new for old, new, d in sums)
            total, total_variance = total + unit * improvement, total_variance + unit**2 * variance
            bound = total - SIGNIFICANCE * math.sqrt(total_variance)
            if bound > best:
                best, chosen = bound, i + 1
        return C * 2**chosen, self._passed(range(start + chosen, start + len(steps)))

    def _passed(self, octaves: range) -> float:
        """Estimate the share of the signal that passes the clipping, relative to the share of unclipped entries."""
        passed = 1.0
        for octave in octaves:
            _, before_doubling, after_doubling, variance = self.evidence[octave]
            margin = SIGNIFICANCE * math.sqrt(variance)
            if not (after_doubling - before_doubling > margin and before_doubling > 0):
                break
            passed *= max(before_doubling / (after_doubling - margin), 0.5)
        return passed

    def metrics(self) -> Metrics:
        return {"C": self.C, "gain": self.gain, "step": self.step} | super().metrics()


def noise_sample(received: Reception, pilots: int, x: Tensor) -> Tensor:
    """Return the entries from which to estimate the noise: the pilots if the rule uses pilots, otherwise x."""
    if pilots and received.pilot is None:
        text = f"pilot={pilots} needs a channel with pilots: set pilot=0 outside an experiment"
        raise InputError(text, code="no-pilots", setting="receiver")
    return received.pilot if pilots and received.pilot is not None else x


def _clip(received: Reception, C: float, gain: float, step: float = 1.0) -> tuple[Tensor, Metrics]:
    """MAC with the gain restored: step (m + clip(g - m, [-C, C]) / gain) per block, and the clipped share."""
    counts: list[int] = []

    def clip(block: Tensor) -> Tensor:
        m = median(block)
        clipped = block.clamp(m - C, m + C)
        counts.append(int((clipped != block).sum()))
        repaired = m + (clipped - m) / gain if gain != 1 else clipped
        return repaired if step == 1 else step * repaired

    g = received.blocks.map(clip, received.g)
    return g, {"clipped": sum(counts) / len(g)}


def adaptive_mac(gain: bool, pilots: int) -> Rule:
    """mac(C="auto"); with gain=False the clipped part is not divided by the gain."""

    def apply(received: Reception, memory: Memory) -> tuple[Tensor, Memory, Metrics]:
        x, tracker = received.g - median(received.g), MacTracker(**memory)
        if tracker.update(noise_sample(received, pilots, x), memory=1):
            tracker.adapt(x, received.pilot if pilots else None)
        divisor = tracker.gain if gain else 1.0
        g, clipped = _clip(received, tracker.C, divisor, tracker.step)
        return g, tracker.memory(), tracker.metrics() | clipped

    return Rule(apply, init=lambda like: MacTracker().memory(), pilots=pilots)


def mac_with_gain(C: float) -> Rule:
    """mac(C, gain=True): the clipped part is divided by the share of unclipped entries of the whole vector."""

    def apply(received: Reception, memory: Memory) -> tuple[Tensor, Memory, Metrics]:
        gain = _share(received.g - median(received.g), C)
        g, clipped = _clip(received, C, gain)
        return g, memory, {"C": C, "gain": gain} | clipped

    return Rule(apply)


def _share(x: Tensor, C: float) -> float:
    """Compute the share of entries within C."""
    return (x.abs() <= C).double().mean().item()


def doublings(x: Tensor, before: Tensor, C: float) -> list[tuple[float, ...]]:
    """Measure the effect of doubling C, 2C, 4C, ... on x with the previous rounds as reference: (n, 4).

    Let u and v be x clipped at C and at 2C, and r the reference `before` clipped at 2C. The four numbers per doubling:

    - |v - u| with u and v scaled to length 1, which makes the improvements of several doublings comparable;
    - (v - u) r with u and v scaled to length 1: the improvement of the direction, in standard errors
      |v - u| |r| / sqrt(d);
    - u r and v r with u and v divided by their shares of unclipped entries: the signal in each, in standard errors.

    Under noise alone, with any tails, the second number and the difference of the last two numbers have mean 0 and
    variance 1. A weak signal passes both thresholds equally. Clipping r at the larger threshold avoids a bias to the
    smaller threshold.
    """
    effects: list[tuple[float, ...]] = []
    u, share_u = x.clamp(-C, C), _share(x, C)
    while len(effects) < DOUBLINGS and share_u < 1:  # while C clips an entry
        C *= 2
        v, r, share_v = x.clamp(-C, C), before.clamp(-C, C), _share(x, C)
        products = torch.stack([u @ u, v @ v, r @ r, u @ v, u @ r, v @ r]).tolist()
        distance, along_u, along_v = _along(products, math.sqrt(products[0]), math.sqrt(products[1]), len(x))
        effects.append((distance, along_v - along_u, *_along(products, share_u, share_v, len(x))[1:]))
        u, share_u = v, share_v
    return effects


def _along(products: list[float], a: float, b: float, d: int) -> tuple[float, float, float]:
    """Compute |v/b - u/a|, and (u/a) r and (v/b) r in units of |v/b - u/a| |r| / sqrt(d), from products."""
    uu, vv, rr, uv, ur, vr = products
    squared_distance = uu / a**2 + vv / b**2 - 2 * uv / (a * b)
    if not (squared_distance > 1e-12 * vv / b**2 and rr > 0):  # u/a = v/b, or no reference
        return 0.0, 0.0, 0.0
    distance = math.sqrt(squared_distance)
    unit = distance * math.sqrt(rr / d)
    return distance, ur / (a * unit), vr / (b * unit)


def weak_signal_threshold(x: Tensor) -> float:
    """Estimate the best threshold for a signal far below the noise in x = g - med(g): (d,); inf if x is constant."""
    noise = NoiseEstimate()
    return noise.best(BEST_C) if noise.update(x) else math.inf


def adaptive_cauchy() -> Rule:
    """cauchy(K="auto")."""

    def apply(received: Reception, memory: Memory) -> tuple[Tensor, Memory, Metrics]:
        noise = NoiseEstimate(**memory)
        K = noise.best(BEST_K) if noise.update(received.g - median(received.g)) else math.inf
        g = received.blocks.map(lambda block: myriad(block, K), received.g)
        return g, vars(noise), {"K": K} | noise.metrics()

    return Rule(apply, init=lambda like: vars(NoiseEstimate()))


def myriad(g: Tensor, K: float) -> Tensor:
    """Compute x / (1 + (x / K)^2), which suppresses entries far beyond K: (...) -> (...)."""
    return torch.where(g.isinf(), 0, g / (1 + (g / K).square())) if math.isfinite(K) else g
