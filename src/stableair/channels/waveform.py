"""Eq. (3) as signals: payloads modulated, delayed, rotated, added up sample by sample, and heard by matched filters."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stableair import stable
from stableair.channels.bases import Basis, ofdm
from stableair.channels.flat import NOISE_ON, Flat
from stableair.channels.kinds import Law, Make, channel, part
from stableair.channels.kinds import basis as bases
from stableair.channels.noise import Stable
from stableair.channels.power import DRAWS, Power
from stableair.channels.superposition import Total, accumulate
from stableair.checks import InputError, choice, number, whole
from stableair.contracts import Received, Upload, check_shape
from stableair.streams import Generator, generator

PIECE = 1 << 15  # complex symbols that are signals at once: on a CPU they stay in cache
PIECE_ELSEWHERE = 1 << 21


class Path(NamedTuple):
    """How one client is heard in a round."""

    gain: complex
    delay: int  # samples
    turn: float  # of the carrier, in turns a sample
    echoes: Tensor  # (taps,) complex128, on the host


class Signals(NamedTuple):
    """What the channel does in round k."""

    k: int
    clients: Tensor  # (m,) int64, who sends
    paths: list[Path]  # m of them
    xi: Tensor  # (d,), the matched filters' output of the noise
    pilot: Tensor | None = None  # the same of noise alone, where a receiver asked for it


@dataclass(frozen=True)
class Waveform(Flat):
    """Over-the-air aggregation sample by sample.

    Client n sends x_n(t) = sum_i c_i phi_i(t), c_i = u_2i + j u_2i+1, and the server hears
    r(t) = sum_n a_n exp(2 pi j eps_n t) x_n(t - delta_n) + z(t), takes y_i = sum_t conj(phi_i(t)) r(t), and their real
    and imaginary parts as the entries of the sum: g = (1/N) sum_n h_n u_n + xi where a_n = h_n, delta_n = eps_n = 0. xi
    are the matched filters' outputs of z, isotropic stable with the noise's alpha and tau in both of its parts, and
    of scale tau (sum_t |phi_i(t)|^alpha)^(1/alpha). The sum is kept in complex128, a client's signal a piece at a time.

    Of M antennas, y_m = sum_n a_mn u_n + z_m, the server knows H_m = sum_n a_mn alone and takes
    sum_m conj(H_m) y_m / (M N s^2), s^2 = E|a|^2. That is one antenna on which client n has the gain
    sum_m conj(H_m) a_mn / (M s^2) and z the scale tau (sum_m |H_m|^alpha)^(1/alpha) / (M s^2), and so it is computed.
    """

    basis: Basis = field(default_factory=ofdm)
    timing: int = 0
    cfo: float = 0.0
    phase: float = 0.0
    antennas: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.noise, Stable):
            raise InputError("channel waveform knows complex samples of noise=sas, gaussian and none alone; take one")
        if isinstance(self.fading, Law) and self.fading.entries:
            raise InputError("channel waveform knows no fading that changes along the vector; leave out its entries")
        if type(self.power) is not Power:
            raise InputError("channel waveform knows no power rule; set power=none()")

    def draw(self, n: int, who: Tensor, d: int, seed: int, k: int, device: torch.device | str = "cpu") -> Any:
        """The paths of the clients `who` (m,) and xi_k (d,) as `Signals`: functions of (seed, k) and of the client."""
        gains, loudness = self.heard(n, who, seed, k)
        delays = (generator(seed, "timing", k).uniform(n) * (self.timing + 1)).long()
        turns = self.cfo * (2 * generator(seed, "cfo", k).uniform(n) - 1)
        echoes = torch.ones(n, 1, dtype=torch.complex128)
        if (taps := self.basis.taps) > 1:
            parts = generator(seed, "echoes", k).normal(n, taps, 2) / math.sqrt(2 * taps)
            echoes = torch.view_as_complex(parts)
        ways = zip(gains.tolist(), delays[who].tolist(), turns[who].tolist(), echoes[who], strict=True)
        noise, apart = (generator(seed, stream, k, device=device) for stream in ("noise", "pilot"))
        pilot = self._filtered(self.pilots, apart, loudness) if self.pilots else None
        return Signals(k, who, [Path(*way) for way in ways], self._filtered(d, noise, loudness), pilot)

    def accumulate(self, uploads: Iterable[Upload], fade: Any) -> Total:
        """The signals added up, and what the matched filters hear: chunks of (m, d) payloads -> faded (d,)."""
        d, device = len(fade.xi), fade.xi.device
        samples = self.basis.samples(self.basis.blocks(d)) + self.timing + self.basis.taps - 1
        air = torch.zeros(samples, dtype=torch.complex128, device=device)
        paths = dict(zip(fade.clients.tolist(), fade.paths, strict=True))
        heard = dict.fromkeys(paths, 1.0)
        total = accumulate(uploads, heard, d, fade.k, device, lambda n, u: self.transmit(u, paths[n], air))
        return total._replace(faded=self._entries((air[first:last] for first, last in self._windows(d, device)), d))

    def finish(self, total: Total, fade: Any) -> Received:
        """As in Eq. (3), at the price of the basis."""
        blocks = self.basis.blocks(len(fade.xi)) + self.basis.blocks(self.pilots)
        return super().finish(total, fade)._replace(uses=blocks * self.basis.uses)

    def transmit(self, u: Tensor, path: Path, air: Tensor) -> None:
        """Add a client's signal to what is on the air: u (d,), air (samples,) complex128."""
        echoes = path.echoes.to(u.device)
        for (first, _), c in zip(self._windows(len(u), u.device), self._symbols(u), strict=True):
            x = self.basis.modulate(self.basis.precode(c, echoes))
            start = first + path.delay
            if path.turn:
                t = torch.arange(start, start + len(x), dtype=torch.float64, device=x.device)
                x *= torch.polar(torch.ones_like(t), (2 * math.pi * path.turn) * t).to(x.dtype)
            for late, echo in enumerate(path.echoes.tolist()):
                air[start + late : start + late + len(x)].add_(x, alpha=path.gain * echo)

    def heard(self, n: int, who: Tensor, seed: int, k: int) -> tuple[Tensor, float]:
        """The complex gains of the clients `who` (m,), and what the interference is multiplied by."""
        if not self.antennas:
            h = check_shape("fading", self.fading(n, generator(seed, "fading", k)), n).double()
            angle = self.phase * (2 * generator(seed, "phase", k).uniform(n) - 1)
            return torch.polar(h, angle)[who], 1.0
        a = self._antennas(n, seed, k)[:, who]  # (M, m)
        known = a.sum(1)  # H_m
        weight = self.antennas * self.mean_square
        assert isinstance(self.noise, Stable)
        loudness = known.abs().pow(self.noise.alpha).sum().pow(1 / self.noise.alpha).item() / weight
        return known.conj() @ a / weight, loudness

    def _antennas(self, n: int, seed: int, k: int) -> Tensor:
        """a_mn, the fading's amplitudes with uniform phases: (M, n)."""
        every = self.antennas * n
        h = check_shape("fading", self.fading(every, generator(seed, "fading", k)), every).double()
        turns = generator(seed, "phase", k).uniform(every)
        return torch.polar(h, 2 * math.pi * turns).view(-1, n)

    @cached_property
    def mean_square(self) -> float:
        """E h^2 of the fading, the average of a million draws."""
        return self.fading(DRAWS, generator(0, "mean square", 0)).square().mean().item()

    def _filtered(self, entries: int, source: Generator, loudness: float) -> Tensor:
        """The matched filters' output of isotropic stable noise: (entries,) float32."""
        assert isinstance(self.noise, Stable)
        alpha, tau = self.noise.alpha, self.noise.tau * loudness
        windows = self._windows(entries, source.device)
        z = (stable.isotropic(last - first, alpha, tau, source.ahead(4 * first)) for first, last in windows)
        return self._entries(z, entries).float()

    def _entries(self, pieces: Iterable[Tensor], entries: int) -> Tensor:
        """What the matched filters make of pieces of a signal, as real entries: (samples,) each -> (entries,)."""
        heard = [torch.view_as_real(self.basis.demodulate(r)).flatten() for r in pieces]
        return torch.cat(heard)[:entries]

    def _blocks_at_once(self, device: torch.device) -> int:
        return max(1, (PIECE if device.type == "cpu" else PIECE_ELSEWHERE) // self.basis.n)

    def _windows(self, entries: int, device: torch.device) -> Iterator[tuple[int, int]]:
        """The pieces of a signal of so many entries: first sample and last, which overlap where blocks do."""
        blocks, step = self.basis.blocks(entries), self._blocks_at_once(device)
        for first in range(0, blocks, step):
            start = first * self.basis.hop
            yield start, start + self.basis.samples(min(step, blocks - first))

    def _symbols(self, u: Tensor) -> Iterator[Tensor]:
        """The complex symbols of a payload, a piece at a time, the last block filled up: (d,) -> (blocks, n) each."""
        n = 2 * self.basis.n
        for piece in u.split(n * self._blocks_at_once(u.device)):
            filled = torch.nn.functional.pad(piece.float(), (0, -len(piece) % n))
            yield torch.view_as_complex(filled.view(-1, 2)).view(-1, self.basis.n)


@channel("waveform", specs={"basis": bases})
def waveform(
    basis: str = "ofdm()",
    timing: int = 0,
    cfo: float = 0,
    phase: float = 0,
    antennas: int = 0,
    noise_on: Literal["mean", "sum"] = "mean",
) -> Make:
    """The channel as signals: a basis (pulse, ofdm, hadamard), clients late, off in phase and carrier, many antennas.

    `Waveform` has the equations. In each round each client is 0 to `timing` samples late, its phase is uniform in
    [-phase, phase] radians, and its carrier is off by up to `cfo` turns a sample. With `antennas` its gain at every
    antenna is the fading's amplitude with a uniform phase of its own, and the server combines them blindly.

    >>> from stableair.channels.fading import unit
    >>> from stableair.channels.noise import none
    >>> waveform("ofdm(n=64, prefix=16)", timing=16)(fading=unit(), noise=none()).basis.hop
    80
    """
    made = part(bases, basis, Basis)
    timing, antennas = whole("timing", timing, 0), whole("antennas", antennas, 0, 1 << 16)
    if timing > made.slack:
        raise InputError(f"timing={timing} is beyond {made.room}: with {basis} it is at most {made.slack} samples")
    phase = number("phase", phase, 0.0, math.pi)
    if antennas and (phase or made.taps > 1):
        raise InputError("antennas combine one path of any phase from each client: leave out phase, and take taps=1")
    return partial(
        Waveform,
        basis=made,
        timing=timing,
        cfo=number("cfo", cfo, 0.0, 0.5),
        phase=phase,
        antennas=antennas,
        noise_on=choice("noise_on", noise_on, NOISE_ON),
    )
