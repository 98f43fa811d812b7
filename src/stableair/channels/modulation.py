"""Modulation with orthonormal bases: payloads to complex samples in time, and back with matched filters.

A payload of d real entries consists of d / 2 complex symbols c_i = u_2i + j u_2i+1. A basis modulates them to the
samples x_t = sum_i c_i phi_i(t), and demodulates received samples to y_i = sum_t conj(phi_i(t)) r_t. Symbols form
blocks of n; a new block starts every `hop` samples.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from stableair.channels.registries import basis
from stableair.errors import InputError
from stableair.validation import choice, integer, number

EQUALISE = "full", "phase", "off"
MAX_BLOCK = 1 << 16  # samples of a block
MAX_PULSE = 1 << 12  # samples of a pulse; orthonormal() solves for all samples at once
MAX_TAPS = 1 << 10  # paths of a client; each path is drawn and added separately


@dataclass(frozen=True)
class Basis:
    """Base class of the bases: a subclass overrides `modulate` and `demodulate`.

    A unit of time is the duration of one complex symbol that is transmitted alone. Interference, delays and carrier
    offsets are given per unit of time. A basis with several samples per unit of time declares this number as its
    `oversampling`, and then has the same interference, delays and offsets.

    >>> basis = ofdm(n=64, prefix=16)
    >>> basis.blocks(1000), basis.samples(8), basis.symbol_time
    (8, 640, 1.25)
    """

    n: int  # complex symbols per block
    hop: int  # samples from the start of a block to the start of the next one
    length: int  # samples of a block; if longer than `hop`, blocks overlap
    max_delay: int  # largest delay of a client, in samples
    uses: float  # complex channel uses per block
    taps: int = 1  # propagation paths per client, one sample apart
    oversampling: int = 1  # samples per unit of time; interference, delays and offsets are given per unit of time
    delay_limit: ClassVar[str] = "a block"  # the limit of the delay in words, for error messages

    @property
    def symbol_time(self) -> float:
        """Units of time per complex symbol, with the cyclic prefix."""
        return self.hop / (self.n * self.oversampling)

    def blocks(self, entries: int) -> int:
        """Number of blocks that carry `entries` real entries; the last block is zero-padded."""
        return -(-entries // (2 * self.n))

    def samples(self, blocks: int) -> int:
        """Number of samples of `blocks` blocks."""
        return blocks * self.hop + self.length - self.hop

    def modulate(self, c: Tensor) -> Tensor:
        """x_t = sum_i c_i phi_i(t): (blocks, n) -> (samples,)."""
        raise NotImplementedError

    def demodulate(self, r: Tensor) -> Tensor:
        """y_i = sum_t conj(phi_i(t)) r_t: (samples,) -> (blocks, n)."""
        raise NotImplementedError

    def precode(self, c: Tensor, impulse_response: Tensor) -> Tensor:
        """Symbols that a client transmits if it knows its impulse response.

        Args:
            c: Complex symbols of the payload, (blocks, n).
            impulse_response: Gains of the client's paths, (taps,).

        Returns:
            The symbols to modulate, (blocks, n).
        """
        return c


@dataclass(frozen=True)
class Pulse(Basis):
    """One pulse p per symbol, `hop` samples apart.

        phi_i(t) = p_{t - i hop}

    >>> pulse(span=8, samples=4).shape.shape
    torch.Size([8, 4])
    """

    shape: Tensor = field(default_factory=lambda: torch.ones(1, 1))  # (span, hop) float64, p row by row

    def modulate(self, c: Tensor) -> Tensor:
        x = c.new_zeros(len(c) + len(self.shape) - 1, self.hop)
        for j, part in enumerate(self.shape.to(c.device, c.real.dtype)):
            x[j : j + len(c)] += c * part
        return x.flatten()

    def demodulate(self, r: Tensor) -> Tensor:
        rows = r.view(-1, self.hop)
        blocks = len(rows) - len(self.shape) + 1
        y = r.new_zeros(blocks)
        for j, part in enumerate(self.shape.to(r.device, r.real.dtype)):
            y += (rows[j : j + blocks] * part).sum(1)
        return y[:, None]


@dataclass(frozen=True)
class OFDM(Basis):
    """n subcarriers, each block after its cyclic prefix.

        phi_f(t) = exp(2 pi j f t / n) / sqrt(n)

    >>> ofdm(n=64, prefix=16).prefix
    16
    """

    equalise: str = "full"
    delay_limit: ClassVar[str] = "the cyclic prefix"

    @property
    def prefix(self) -> int:
        """Samples of the cyclic prefix."""
        return self.hop - self.n

    def modulate(self, c: Tensor) -> Tensor:
        x = torch.fft.ifft(c, norm="ortho")
        return torch.cat([x[:, self.n - self.prefix :], x], 1).flatten()

    def demodulate(self, r: Tensor) -> Tensor:
        return torch.fft.fft(r.view(-1, self.hop)[:, self.prefix :], norm="ortho")

    def precode(self, c: Tensor, impulse_response: Tensor) -> Tensor:
        if self.equalise == "off":
            return c
        response = torch.fft.fft(impulse_response, self.n)  # A(f)
        return c * (1 / response if self.equalise == "full" else torch.sgn(response).conj()).to(c)


@dataclass(frozen=True)
class Hadamard(Basis):
    """n codes of +-1 / sqrt(n), the rows of Sylvester's matrix, which is its own inverse.

        phi_i(t) = H_it / sqrt(n),    H_2n = [[H_n, H_n], [H_n, -H_n]],    H_1 = 1

    >>> hadamard(n=4).demodulate(torch.tensor([1.0, 0.0, 0.0, 0.0])).tolist()
    [[0.5, 0.5, 0.5, 0.5]]
    """

    def modulate(self, c: Tensor) -> Tensor:
        return self.demodulate(c.reshape(-1)).flatten()

    def demodulate(self, r: Tensor) -> Tensor:
        x = r.view(-1, self.n)
        for stride in (1 << i for i in range(self.n.bit_length() - 1)):  # the fast Walsh-Hadamard transform
            a, b = x.view(len(x), -1, 2, stride).unbind(2)
            x = torch.stack([a + b, a - b], 2).view(len(x), self.n)
        return x / self.n**0.5


@basis("pulse")
def pulse(rolloff: float = 0.25, span: int = 8, samples: int = 4) -> Basis:
    """Root-raised-cosine pulses: an impulse in time affects mainly the symbol at that time.

        phi_i(t) = p_{t - i samples}

    A root-raised cosine truncated to `span` symbols is not orthogonal to its shifts; p is the nearest pulse that is
    orthogonal to them, up to rounding (`orthonormal`). A symbol takes 1 + rolloff complex channel uses. The
    interference of an entry does not depend on `samples`, up to the error of the sampled pulse.

    Args:
        rolloff: Excess bandwidth, in [0, 1].
        span: Length of a pulse in symbols, in [2, 256].
        samples: Samples per symbol, in [2, 256]; a pulse has at most 4096 samples.

    Returns:
        The basis.

    Raises:
        InputError: An argument is out of range, or the pulse is too long.

    >>> p = pulse(span=8, samples=4).shape.flatten()
    >>> abs((p[:-4] * p[4:]).sum().item()) < 1e-12
    True
    """
    samples, span = integer("samples", samples, 2, 256), integer("span", span, 2, 256)
    rolloff = number("rolloff", rolloff, 0.0, 1.0)
    if span * samples > MAX_PULSE:
        text = f"a pulse has at most {MAX_PULSE} samples: got span={span} times samples={samples}"
        raise InputError(text, code="out-of-range", name="span * samples", value=span * samples, high=MAX_PULSE)
    p = orthonormal(root_raised_cosine((np.arange(span * samples) - span * samples // 2) / samples, rolloff), samples)
    shape = torch.from_numpy(p).view(span, samples)
    return Pulse(1, samples, span * samples, max_delay=samples, uses=1 + rolloff, oversampling=samples, shape=shape)


@basis("ofdm")
def ofdm(n: int = 64, prefix: int = 16, taps: int = 1, equalise: Literal["full", "phase", "off"] = "full") -> Basis:
    """OFDM with a cyclic prefix: an impulse in time affects all entries of a block.

        phi_f(t) = exp(2 pi j f t / n) / sqrt(n),    A(f) = sum_l a_l exp(-2 pi j f l / n)

    A client has `taps` paths, one sample apart. For taps > 1 their gains a_l are i.i.d. CN(0, 1 / taps) in each round,
    and subcarrier f has the gain A(f). A block takes n + prefix complex channel uses.

    Args:
        n: Subcarriers of a block, at most 65536.
        prefix: Samples of the cyclic prefix, at most n.
        taps: Paths of each client, at most prefix + 1.
        equalise: Symbol of a client on subcarrier f: "full" c_f / A(f), "phase" c_f conj(A(f)) / |A(f)|, "off" c_f.

    Returns:
        The basis.

    Raises:
        InputError: An argument is out of range, or the prefix is too short for the paths.

    >>> ofdm(n=64, prefix=16, taps=4).max_delay
    13
    """
    n, prefix = integer("n", n, 1, MAX_BLOCK), integer("prefix", prefix, 0)
    if prefix > n:
        text = f"the prefix repeats the end of a block, so it has at most n={n} samples: got {prefix}"
        raise InputError(text, code="out-of-range", name="prefix", value=prefix, high=n)
    if integer("taps", taps, 1, MAX_TAPS) > prefix + 1:
        text = f"the prefix of {prefix} samples is too short for taps={taps}: taps must be at most {prefix + 1}"
        raise InputError(text, code="out-of-range", name="taps", value=taps, high=prefix + 1)
    choice("equalise", equalise, EQUALISE)
    return OFDM(n, n + prefix, n + prefix, prefix - taps + 1, n + prefix, taps, equalise=equalise)


@basis("hadamard")
def hadamard(n: int = 64) -> Basis:
    """Codes of n chips, the rows of a Hadamard matrix; an impulse in time spreads over n symbols.

        phi_i(t) = +-1 / sqrt(n)

    Interference of scale tau in time has scale tau n^(1/alpha - 1/2) in an entry.

    Args:
        n: Chips of a code and symbols of a block, a power of two, at most 65536.

    Returns:
        The basis.

    Raises:
        InputError: n is out of range or not a power of two.

    >>> hadamard(n=2).modulate(torch.tensor([[1.0, 1.0]]) * 2**0.5).tolist()
    [2.0, 0.0]
    """
    if integer("n", n, 1, MAX_BLOCK) & (n - 1):
        below = 1 << n.bit_length() - 1
        text = f"n must be a power of two, such as {below} or {2 * below}: got {n}"
        raise InputError(text, code="not-a-power-of-two", name="n", value=n)
    return Hadamard(n, n, n, max_delay=n - 1, uses=n)


def root_raised_cosine(t: np.ndarray, rolloff: float) -> np.ndarray:
    """Compute the root-raised-cosine pulse of energy 1.

        p(t) = (sin(pi t (1 - b)) + 4 b t cos(pi t (1 + b))) / (pi t (1 - (4 b t)^2)),    b = rolloff

    Args:
        t: Times in symbols, (...).
        rolloff: Excess bandwidth, in [0, 1].

    Returns:
        The pulse at these times, (...).

    >>> t = np.arange(-800, 800) / 100
    >>> round((root_raised_cosine(t, 0.5) ** 2).sum().item() / 100, 3)
    1.0
    """
    b, near = rolloff, 1e-9
    t = np.where(np.abs(t) < near, near, t)
    t = np.where(np.abs(np.abs(4 * b * t) - 1) < near, t * (1 + 10 * near), t)  # removable; error of p below 1e-7
    top = np.sin(np.pi * t * (1 - b)) + 4 * b * t * np.cos(np.pi * t * (1 + b))
    return top / (np.pi * t * (1 - (4 * b * t) ** 2))


def orthonormal(p: np.ndarray, step: int) -> np.ndarray:
    """Compute the pulse closest to p that is orthonormal to its shifts by multiples of `step`.

        sum_t p_t p_{t + m step} = 1 for m = 0, and 0 otherwise

    The equations are solved with Newton's method and least-norm steps.

    Args:
        p: Samples of a pulse, (n,).
        step: Number of samples from one symbol to the next.

    Returns:
        Samples of the orthonormal pulse, (n,).

    >>> p = orthonormal(np.array([1.0, 1.0, 0.2, 0.0]), step=2)
    >>> round((p @ p).item(), 12), abs(p[:2] @ p[2:]).item() < 1e-12
    (1.0, True)
    """
    p = p / np.linalg.norm(p)
    for _ in range(100):
        shifted = [np.pad(p[m:], (0, m)) for m in range(0, len(p), step)]
        error = np.array(shifted) @ p
        error[0] -= 1
        if np.abs(error).max() < 1e-14:
            break
        slope = [later + np.pad(p, (m * step, 0))[: len(p)] for m, later in enumerate(shifted)]
        p = p - np.linalg.lstsq(np.array(slope), error, rcond=None)[0]
    return p
