"""Eq. (3) at the waveform level: payloads are modulated, delayed, rotated, added as samples, and demodulated."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stableair.channels.modulation import Basis, ofdm
from stableair.channels.power import Power, mean_square
from stableair.channels.registries import basis as bases
from stableair.channels.registries import channel, make_part
from stableair.channels.superposition import (
    NOISE_ON,
    accumulate,
    amplitudes,
    check_one_amplitude,
    finish,
    fit_power,
)
from stableair.contracts import (
    Accumulated,
    ChannelFactory,
    Fading,
    Modulation,
    Noise,
    NoiseLaw,
    PowerRule,
    Received,
    Transmission,
    Upload,
)
from stableair.errors import InputError
from stableair.memory import unchanged
from stableair.streams import Generator, generator
from stableair.validation import choice, integer, number
from stableair.vector import NOTHING, Layout

PIECE = 1 << 15  # complex symbols that are modulated at once: they fit into the cache of a CPU
PIECE_ELSEWHERE = 1 << 21


class Link(NamedTuple):
    """The channel from one client to the server in one round."""

    gain: complex  # gain by the power rule and the fading, rotated by the phase error
    delay: int  # delay, in samples
    cfo: float  # carrier frequency offset, in cycles per sample
    impulse_response: Tensor  # (taps,) complex128, on the host
    energy: float = 1.0  # energy of the signal per energy of the modulated payload; before the common scaling


class WaveformDraw(NamedTuple):
    """Random state of the waveform channel in round k."""

    k: int
    clients: Tensor  # (m,) int64, the participants that transmit
    links: list[Link]  # one per client that transmits
    xi: Tensor  # (d,), the interference at the output of the matched filters
    pilot: Tensor | None = None  # noise-only symbols at the output of the matched filters, if the receiver needs them


@dataclass(frozen=True)
class Waveform:
    """Over-the-air aggregation sample by sample.

    Client n sends x_n(t) = sum_i c_i phi_i(t), c_i = u_2i + j u_2i+1. The server receives
    r(t) = sum_n a_n exp(2 pi j eps_n t) x_n(t - delta_n) + z(t) and computes y_i = sum_t conj(phi_i(t)) r(t). Its real
    and imaginary parts are the entries of the sum: g = (1/N) sum_n h_n u_n + xi if a_n = h_n, delta_n = eps_n = 0. xi
    is the output of the matched filters for z, the complex samples of the noise. The sum is complex128; a client's
    signal is computed in pieces. A power rule sets the effective gains a_n and selects the clients that transmit.

    With stable noise, z is isotropic and the scale of xi is tau_s (sum_t |phi_i(t)|^alpha)^(1/alpha). The noise sets
    the density of the interference: its scale is tau at the output of a filter of unit energy that lasts one unit of
    time. A basis with s samples per unit of time samples the same interference with filters of unit energy and length
    1/s. A sample then has the scale tau_s = tau s^(1/2 - 1/alpha), and the scale of xi tends to
    tau (int |phi_i(t)|^alpha dt)^(1/alpha) for large s. tau_s is tau for alpha = 2 or s = 1.

    A power rule scales the energies E_n = sum_t |x_n(t)|^2: `noise_scale` receives max_n sqrt(E_n / T) in place of the
    largest norm max_n |u_n|, with T units of time per complex symbol. T is 1 + prefix / n for OFDM, and 1 for pulses
    and Hadamard codes, for which the two are equal.

    With M antennas, y_m = sum_n a_mn u_n + z_m, the server knows only H_m = sum_n a_mn and computes
    sum_m conj(H_m) y_m / (M N s^2), s^2 = E|a|^2. This is equivalent to one antenna, client gains
    sum_m conj(H_m) a_mn / (M s^2) and noise z of scale tau (sum_m |H_m|^alpha)^(1/alpha) / (M s^2), as computed here.

    Args:
        fading: Amplitudes of the clients; one amplitude per client and round.
        noise: Interference per unit of time: a `NoiseLaw` with complex samples.
        power: Transmit power rule. Its gains include the fading; `phase` and the offsets are applied in addition.
        pilots: Noise-only symbols per round.
        norms: Layout of the norm buffers on the side link.
        divisor: Divisor of the sum; None for the number of senders.
        noise_on: "mean" adds the interference to the mean, as in Eq. (3); "sum" adds it to the sum.
        basis: Modulation.
        timing: Largest delay of a client, in units of time; a whole number of samples.
        cfo: Largest carrier frequency offset, in cycles per unit of time.
        phase: Largest phase error, in radians.
        antennas: Number of antennas that the server combines blindly; 0 for one antenna and clients that know their
            phase.

    Raises:
        InputError: The noise has no complex samples, or with antennas no independent samples ("unsupported-noise"); the
            fading changes along the vector ("unsupported-fading"); the power rule has frequency errors, or with
            antennas adapts to the fading ("unsupported-power"), or needs the noise on the sum ("noise-not-on-sum").
    """

    fading: Fading
    noise: Noise
    power: PowerRule = field(default_factory=Power)
    pilots: int = 0
    norms: Layout = NOTHING
    divisor: float | None = None
    noise_on: str = "mean"
    basis: Modulation = field(default_factory=ofdm)
    timing: float = 0.0
    cfo: float = 0.0
    phase: float = 0.0
    antennas: int = 0

    def __post_init__(self) -> None:
        law = self._noise_law()
        check_one_amplitude(self.fading, "waveform")
        if self.antennas and not law.combined_scale:
            text = "antennas require independent samples of the noise: choose noise=sas, gaussian, none or a"
            raise InputError(f"{text} markov chain of them, or antennas=0", code="unsupported-noise", setting="noise")
        if self.antennas and self.power.adapts_to_fading:
            text = "with antennas no client knows its channel, but this power rule needs it: choose power=limit or none"
            raise InputError(text, code="unsupported-power", setting="power")
        if "cfo" in self.power.rotations:
            text = "channel waveform has carrier offsets: leave out cfo of the power rule, and set waveform(cfo=...) in"
            text += f" cycles per unit of time; with this basis a complex symbol takes {self.basis.symbol_time:g}"
            raise InputError(text, code="unsupported-power", setting="power")
        object.__setattr__(self, "power", fit_power(self.power, self.fading, self.noise_on, "waveform"))

    @property
    def max_delay(self) -> int:
        """Largest delay of a client, in samples."""
        return round(self.timing * self.basis.oversampling)

    def _noise_law(self) -> NoiseLaw:
        """Return the law of the noise, which must define complex samples."""
        if isinstance(self.noise, NoiseLaw) and self.noise.samples:
            return self.noise
        text = "channel waveform needs complex samples of the noise: choose noise=sas, gaussian, bursts, field, none"
        text += " or a markov chain of them, or choose channel=flat"
        raise InputError(text, code="unsupported-noise", setting="noise")

    def draw(
        self, n: int, clients: Tensor, d: int, seed: int, k: int, device: torch.device | str = "cpu"
    ) -> WaveformDraw:
        """Draw the links of the participants `clients` (m,), and xi_k (d,).

        A client's link is a function of (seed, k, client), except for the combined gains of several antennas.

        Args:
            n: Number of all clients.
            clients: The participants, (m,).
            d: Entries of a payload.
            seed: Seed of the experiment.
            k: The round.
            device: Device of the interference.

        Returns:
            The draw, a function of (seed, k).

        Raises:
            InputError: A component breaks its contract, or the power rule has a gain per entry ("unsupported-power").
        """
        transmissions, noise_scale = self._transmissions(n, clients, seed, k)
        senders = torch.tensor(list(transmissions), dtype=torch.int64)
        gains, energies = zip(*transmissions.values(), strict=True) if transmissions else ((), ())
        delays = (generator(seed, "timing", k).uniform(n) * (self.max_delay + 1)).long()
        offsets = self.cfo / self.basis.oversampling * (2 * generator(seed, "cfo", k).uniform(n) - 1)
        responses = torch.ones(n, 1, dtype=torch.complex128)
        if (taps := self.basis.taps) > 1:
            parts = generator(seed, "echoes", k).normal(n, taps, 2) / math.sqrt(2 * taps)
            responses = torch.view_as_complex(parts)
        of_sender = delays[senders].tolist(), offsets[senders].tolist(), responses[senders]
        links = [Link(*row) for row in zip(gains, *of_sender, energies, strict=True)]
        for_data, for_pilots = (generator(seed, stream, k, device=device) for stream in ("noise", "pilot"))
        xi = self._filtered_noise(d, for_data, noise_scale)
        pilot = self._filtered_noise(self.pilots, for_pilots, noise_scale) if self.pilots else None
        return WaveformDraw(k, senders, links, xi, pilot)

    def superpose(self, uploads: Iterable[Upload], draw: WaveformDraw) -> Received:
        """Add the signals, demodulate the sum and apply Eq. (3): chunks of (m, d) payloads -> g (d,).

        Args:
            uploads: Chunks of uploads with payloads (m, d). The result does not depend on the size of the chunks.
            draw: The random state of the round.

        Returns:
            The received sum g (d,), the noise-free reference, and the resources of the round.

        Raises:
            InputError: The interference or a gain is NaN ("nan-in-channel").
            NonFiniteUpload: An upload is not finite.
        """
        symbols = (self.basis.blocks(len(draw.xi)) + self.basis.blocks(self.pilots)) * self.basis.uses
        total = self._accumulate(uploads, draw)
        return finish(self, total, draw, symbols)

    def _accumulate(self, uploads: Iterable[Upload], draw: WaveformDraw) -> Accumulated:
        """Add the signals of all clients, and demodulate the sum to `faded` (d,)."""
        d, device = len(draw.xi), draw.xi.device
        samples = self.basis.samples(self.basis.blocks(d)) + self.max_delay + self.basis.taps - 1
        received = torch.zeros(samples, dtype=torch.complex128, device=device)
        links = dict(zip(draw.clients.tolist(), draw.links, strict=True))

        modulated = [0.0]  # energies of the modulated payloads

        def transmit(client: int, u: Tensor) -> float:
            modulated.append(self.transmit(u, links[client], received))
            return modulated[-1]

        transmissions = {client: Transmission(link.gain, link.energy) for client, link in links.items()}
        total = accumulate(uploads, transmissions, d, draw.k, device, transmit=transmit)
        pieces = (received[first:last] for first, last in self._windows(d, device))
        largest = math.sqrt(max(modulated) / self.basis.symbol_time)
        return total._replace(faded=self._demodulate(pieces, d), max_norm=largest)

    def transmit(self, u: Tensor, link: Link, received: Tensor) -> float:
        """Add a client's signal to the received samples.

        Args:
            u: The payload, (d,).
            link: The client's link.
            received: Samples of the sum, (samples,) complex128; changed in place.

        Returns:
            The energy sum_t |x_t|^2 of the modulated payload, with prefix and precoding, before the power rule.
        """
        energy = torch.zeros((), dtype=torch.float64, device=u.device)
        response = link.impulse_response.to(u.device)
        for (first, _), c in zip(self._windows(len(u), u.device), self._symbols(u), strict=True):
            x = self.basis.modulate(self.basis.precode(c, response))
            energy += torch.linalg.vector_norm(torch.view_as_real(x), dtype=torch.float64) ** 2  # 25 times as fast
            start = first + link.delay
            if link.cfo:
                t = torch.arange(start, start + len(x), dtype=torch.float64, device=x.device)
                x *= torch.polar(torch.ones_like(t), (2 * math.pi * link.cfo) * t).to(x.dtype)
            for delay, tap in enumerate(link.impulse_response.tolist()):
                received[start + delay : start + delay + len(x)].add_(x, alpha=link.gain * tap)
        return energy.item()

    def _transmissions(self, n: int, clients: Tensor, seed: int, k: int) -> tuple[dict[int, Transmission], float]:
        """Return the links of the clients that transmit in round k, and the factor of the interference's scale."""
        if self.antennas:
            gains, noise_scale = self.combine(n, clients, seed, k)
            return dict(zip(clients.tolist(), map(Transmission, gains.tolist()), strict=True)), noise_scale
        h = amplitudes(self.fading, n, seed, k)
        with unchanged("power", h, clients):
            transmissions = self.power.transmissions(h, clients, seed, k)
        angle = self.phase * (2 * generator(seed, "phase", k).uniform(n) - 1)
        phasors = torch.polar(torch.ones_like(angle), angle).tolist()
        return {client: _rotated(sent, phasors[client]) for client, sent in transmissions.items()}, 1.0

    def combine(self, n: int, clients: Tensor, seed: int, k: int) -> tuple[Tensor, float]:
        """Combine several antennas in round k: sum_m conj(H_m) a_mn / (M s^2).

        Args:
            n: Number of all clients.
            clients: The participants, (m,).
            seed: Seed of the experiment.
            k: The round.

        Returns:
            The complex gains of the `clients` (m,), and the factor of the scale of the interference.
        """
        a = self._antenna_gains(n, seed, k)[:, clients]  # (M, m)
        summed = a.sum(1)  # H_m
        weight = self.antennas * self.mean_square
        combined_scale = self._noise_law().combined_scale
        assert combined_scale, "checked at construction"
        return summed.conj() @ a / weight, combined_scale(generator(seed, "noise", k), summed) / weight

    def _antenna_gains(self, n: int, seed: int, k: int) -> Tensor:
        """Draw a_mn, the fading's amplitudes with uniform phases: (M, n)."""
        h = amplitudes(self.fading, self.antennas * n, seed, k)
        phases = generator(seed, "phase", k).uniform(len(h))
        return torch.polar(h, 2 * math.pi * phases).view(-1, n)

    @cached_property
    def mean_square(self) -> float:
        """E h^2 of the fading."""
        return mean_square(self.fading)

    def _filtered_noise(self, entries: int, source: Generator, scale: float) -> Tensor:
        """Return the output of the matched filters for the noise times `scale`: (entries,) float32."""
        samples = self._noise_law().samples
        assert samples, "checked at construction"
        z = samples(source, self.basis.oversampling, scale)
        windows = self._windows(entries, source.device)
        pieces = (_check_samples(z(first, last), last - first) for first, last in windows)
        return self._demodulate(pieces, entries).float()

    def _demodulate(self, pieces: Iterable[Tensor], entries: int) -> Tensor:
        """Return the real output of the matched filters for pieces of a signal: (samples,) each -> (entries,)."""
        outputs = []
        for r in pieces:
            with unchanged("basis", r, setting="channel"):  # pieces may share samples
                y = self.basis.demodulate(r)
            outputs.append(torch.view_as_real(y).flatten())
        return torch.cat(outputs)[:entries]

    def _blocks_per_piece(self, device: torch.device) -> int:
        return max(1, (PIECE if device.type == "cpu" else PIECE_ELSEWHERE) // self.basis.n)

    def _windows(self, entries: int, device: torch.device) -> Iterator[tuple[int, int]]:
        """Yield the first and last sample of the pieces of a signal; pieces overlap if blocks overlap."""
        blocks, step = self.basis.blocks(entries), self._blocks_per_piece(device)
        for first in range(0, blocks, step):
            start = first * self.basis.hop
            yield start, start + self.basis.samples(min(step, blocks - first))

    def _symbols(self, u: Tensor) -> Iterator[Tensor]:
        """Yield the complex symbols of a payload piece by piece, with the last block zero-padded: (blocks, n) each."""
        n = 2 * self.basis.n
        for piece in u.split(n * self._blocks_per_piece(u.device)):
            padded = torch.nn.functional.pad(piece.float(), (0, -len(piece) % n))
            yield torch.view_as_complex(padded.view(-1, 2)).view(-1, self.basis.n)


def _check_samples(z: Tensor, length: int) -> Tensor:
    """Check that the noise returned this number of complex samples: (length,)."""
    if not isinstance(z, Tensor) or z.shape != (length,) or not z.is_complex():
        actual = f"{z.dtype} {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
        text = f"samples of the noise must return a complex tensor of shape ({length},): got {actual}"
        raise InputError(text, code="wrong-shape", setting="noise", expected=(length,), actual=actual)
    return z


def _rotated(sent: Transmission, phasor: complex) -> Transmission:
    """Return a transmission with its gain multiplied by a phasor.

    Raises:
        InputError: The power rule has a gain for every entry ("unsupported-power").
    """
    if callable(sent.gain):
        text = "channel waveform needs one gain per client and round from the power rule, not one per entry"
        raise InputError(text, code="unsupported-power", setting="power")
    return Transmission(sent.gain * phasor, sent.energy)


def _check_timing(timing: float, basis: Basis, spec: str) -> None:
    """Check that the largest delay fits the basis and is a whole number of samples."""
    most, step = basis.max_delay / basis.oversampling, 1 / basis.oversampling
    if timing > most:
        text = f"timing={timing:g} is beyond {basis.delay_limit}: with {spec} it is at most {most:g}"
        raise InputError(text, code="out-of-range", name="timing", value=timing, high=most)
    if not math.isclose(timing, round(timing / step) * step, abs_tol=1e-3 * step):
        text = f"timing={timing:g} is not a whole number of samples: with {spec} a sample is {step:.4g}"
        raise InputError(text, code="out-of-range", name="timing", value=timing, high=most)


@channel("waveform", uses=("fading", "noise", "power", "pilots"), specs={"basis": bases})
def waveform(
    basis: str = "ofdm()",
    timing: float = 0,
    cfo: float = 0,
    phase: float = 0,
    antennas: int = 0,
    noise_on: Literal["mean", "sum"] = "mean",
) -> ChannelFactory:
    """Waveform-level channel: modulation, delays, phase errors, carrier offsets and several antennas.

    The class `Waveform` has the equations. In each round a client's delay is a whole number of samples from 0 to
    `timing` units of time, its phase error is uniform in [-phase, phase] radians, and its carrier offset is at most
    `cfo` cycles per unit of time. A unit of time is one sample of `ofdm` and `hadamard`, and one symbol of `pulse`,
    which has `samples` samples. With `antennas`, its gain at each antenna is the fading's amplitude with an independent
    uniform phase, and the server combines the antennas without knowledge of the phases. Power rules with a power limit
    need noise_on=sum.

    Args:
        basis: Spec of the basis.
        timing: Largest delay of a client, in units of time; a whole number of samples.
        cfo: Largest carrier frequency offset, in cycles per unit of time.
        phase: Largest phase error, in radians.
        antennas: Number of antennas that the server combines blindly; 0 for one antenna and clients that know their
            phase.
        noise_on: "mean" adds the interference to the mean, as in Eq. (3); "sum" adds it to the sum.

    Returns:
        A factory of the channel.

    Raises:
        InputError: An argument is out of its range, the delay is too long for the basis or not a whole number of
            samples ("out-of-range"), or antennas are combined with phase errors or echoes ("conflicting-arguments").

    >>> from stableair.channels.fading import unit
    >>> from stableair.channels.noise import none
    >>> waveform("ofdm(n=64, prefix=16)", timing=16)(fading=unit(), noise=none()).basis.hop
    80
    """
    modulation = make_part(bases, basis, Basis)
    timing, antennas = number("timing", timing, 0.0), integer("antennas", antennas, 0, 1 << 16)
    _check_timing(timing, modulation, basis)
    phase = number("phase", phase, 0.0, math.pi)
    if antennas and (phase or modulation.taps > 1):
        text = "antennas requires phase=0 and a basis with taps=1: each client has one path of random phase"
        raise InputError(text, code="conflicting-arguments")
    return partial(
        Waveform,
        basis=modulation,
        timing=timing,
        cfo=number("cfo", cfo, 0.0, 0.5),
        phase=phase,
        antennas=antennas,
        noise_on=choice("noise_on", noise_on, NOISE_ON),
    )
