"""Eq. (3) in three steps that the analog channels share: accumulate, reduce, finish.

`accumulate` sums the payloads in a fixed order. A `Reduction` assembles the slices of several processes.
`finish` divides, adds the interference and rounds.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Protocol

import torch
from torch import Tensor

from stableair.contracts import (
    Accumulated,
    Fading,
    FadingLaw,
    Gain,
    PowerRule,
    Received,
    Resources,
    Transmission,
    Upload,
)
from stableair.errors import InputError, NonFiniteUpload
from stableair.streams import generator
from stableair.validation import short_repr
from stableair.vector import Layout, check_shape, pooled

NOISE_ON = "mean", "sum"
PIECE = 1 << 15  # complex symbols that are added at once on a CPU: they fit into its cache


class WholeVector:
    """The reduction of a single process: it sums the whole vector."""

    def slice(self, d: int) -> slice:
        return slice(0, d)

    def assemble(self, *parts: Tensor, d: int) -> tuple[Tensor, ...]:
        return parts


def amplitudes(fading: Fading, n: int, seed: int, k: int) -> Tensor:
    """Draw the amplitudes h_{n,k} of all n clients in round k: (n,) float64, on the host.

    >>> from stableair.channels.fading import unit
    >>> amplitudes(unit(), 2, seed=0, k=0).tolist()
    [1.0, 1.0]
    """
    h = check_shape("fading", fading(n, generator(seed, "fading", k)), n)
    if h.isnan().any():
        text = "the channel's fading is NaN; every amplitude must be a number or infinite"
        raise InputError(text, code="nan-in-channel", setting="fading")
    return h.to(torch.float64, copy=True)  # a fading may reuse the tensor that it returned


def accumulate(
    uploads: Iterable[Upload],
    transmissions: Mapping[int, Transmission],
    d: int,
    k: int,
    device: torch.device,
    entries: slice | None = None,
    transmit: Callable[[int, Tensor], float] | None = None,
) -> Accumulated:
    """Sum the uploads of round k, client by client in a fixed order, so that the result does not depend on the chunks.

    The sums are faded = sum_n a_n u_n with the gains a_n, and clean = sum_n u_n, (d,) each.

    Args:
        uploads: Chunks of uploads with payloads (m, d), or only the `entries` of the payloads.
        transmissions: Link of each client that transmits. Uploads of other clients are dropped. A gain per entry is
            computed when its payload arrives, one vector at a time.
        d: Length of the vector.
        k: The round, for error messages.
        device: Device of the payloads.
        entries: Entries of the vector that the payloads hold; None for all d.
        transmit: Called as transmit(client, u) instead of the addition of gain times u to `faded`, which then stays
            zero. It returns the energy sum_t |x_t|^2 of the modulated payload; by default this is |u|^2. The recorded
            energy is this number times the energy of the client's transmission.

    Returns:
        The sums in float64, the largest norm and the energies of the senders.

    Raises:
        NonFiniteUpload: An upload is not finite.
    """
    entries = slice(0, d) if entries is None else entries
    faded, clean = torch.zeros(2, entries.stop - entries.start, dtype=torch.float64, device=device)
    stats = loss = torch.zeros((), dtype=torch.float64, device=device)
    max_norm, dtype = 0.0, torch.float32
    energies: dict[int, float] = {}
    for upload in _finite_chunks(uploads, k):
        norms = upload.norms().tolist()
        for i, client in enumerate(upload.clients.tolist()):
            if client not in transmissions:
                continue
            gain, energy = transmissions[client]
            if transmit:
                energies[client] = energy * transmit(client, upload.update[i])
            else:
                _add_faded(faded, gain, upload.update[i], d, entries)
                energies[client] = energy * norms[i] ** 2
            clean.add_(upload.update[i])
            stats, loss = stats + upload.stats[i].double(), loss + upload.loss[i].double()
            max_norm = max(max_norm, norms[i])
        dtype = upload.update.dtype
        del upload  # free the chunk before the next one is computed
    return Accumulated(faded, clean, stats, loss, max_norm, len(energies), dtype, energies)


def _finite_chunks(uploads: Iterable[Upload], k: int) -> Iterator[Upload]:
    """Yield the non-empty chunks, checked and with norms; free each chunk before the next one is computed."""
    for upload in uploads:
        if len(upload.clients):
            upload = upload._replace(norm=upload.norms())  # computed once, used twice
            check_finite(upload, k)
            yield upload
        del upload


def _add_faded(faded: Tensor, gain: Gain, u: Tensor, d: int, entries: slice) -> None:
    """Add gain times the payload u to the sum `faded`; both hold only these `entries` of the d entries."""
    if not callable(gain):
        if gain.imag:
            _add_symbols(faded, torch.tensor(gain, dtype=torch.complex128, device=u.device).expand(-(-len(u) // 2)), u)
        else:
            faded.add_(u, alpha=gain.real)
        return
    gains = gain(d, faded.device)  # the power rule owns this tensor: do not change it in place
    if isinstance(gains, Tensor) and gains.is_complex():
        check_shape("power", gains.real, -(-d // 2))
        _add_symbols(faded, gains[entries.start // 2 : -(-entries.stop // 2)], u)
    else:
        faded.add_(check_shape("power", gains, d)[entries] * u)


def _add_symbols(faded: Tensor, gains: Tensor, u: Tensor) -> None:
    """Add the complex symbols u_2i + j u_2i+1, times their gains, to the real entries of the sum.

    Each operation rounds once, so that the bits of an entry do not depend on its position in a slice.

    Args:
        faded: The sum, (s,) float64.
        gains: Complex gains, (ceil(s / 2),).
        u: The payload, (s,). A zero completes an odd number of entries.
    """
    symbols = PIECE if u.device.type == "cpu" else max(len(gains), 1)
    for out, entries, gain in zip(faded.split(2 * symbols), u.split(2 * symbols), gains.split(symbols), strict=True):
        i, q = torch.nn.functional.pad(entries.double(), (0, len(entries) % 2)).view(-1, 2).unbind(1)
        product = torch.stack([gain.real * i - gain.imag * q, gain.imag * i + gain.real * q], 1)
        out.add_(product.flatten()[: len(entries)])


class AnalogDraw(Protocol):
    """The interference of a round, as `finish` needs it."""

    @property
    def xi(self) -> Tensor: ...  # (d,)
    @property
    def pilot(self) -> Tensor | None: ...  # noise-only symbols, if any


class AnalogChannel(Protocol):
    """The parts of an analog channel that `finish` needs."""

    @property
    def power(self) -> PowerRule: ...  # sets the scale of the interference and of the energies
    @property
    def norms(self) -> Layout: ...  # layout of the norm buffers
    @property
    def divisor(self) -> float | None: ...  # divisor of the sum; None for the number of senders
    @property
    def noise_on(self) -> str: ...  # "mean" adds xi to the mean; "sum" adds it to the sum, so that xi is divided, too


def finish(channel: AnalogChannel, total: Accumulated, draw: AnalogDraw, symbols: float) -> Received:
    """Divide the sums, add the scaled interference, and round to the dtype of the interference: Eq. (3).

    Args:
        channel: The channel.
        total: Sums over all senders.
        draw: The interference of the round.
        symbols: Complex symbols of the round.

    Returns:
        The reception of the round.

    Raises:
        InputError: The interference or a gain is NaN ("nan-in-channel"). Infinite entries are legal.
    """
    n = channel.divisor or max(total.senders, 1)
    scale = noise_scale(channel.power, total.max_norm, len(draw.xi))
    xi, pilot = _scaled(draw.xi, scale), None if draw.pilot is None else _scaled(draw.pilot, scale)
    if channel.noise_on == "sum":
        xi, pilot = xi / n, None if pilot is None else pilot / n
    g = (total.faded / n + xi).to(xi.dtype)  # Eq. (3)
    if g.isnan().any():
        if xi.isnan().any():
            text = "the channel's noise is NaN; every entry must be a number or infinite"
            raise InputError(text, code="nan-in-channel", setting="noise")
        text = "the received sum is NaN: a gain of the power rule is NaN, or infinite where a payload has an entry of 0"
        raise InputError(text, code="nan-in-channel", setting="power")
    stats, loss = side_link(total, channel.norms)
    used = Resources(symbols, scaled_energies(total.energies, scale))
    return Received(g, stats, total.clean / n, loss, xi, total.senders, n, pilot, used)


def noise_scale(power: PowerRule, max_norm: float, d: int) -> float:
    """Return the checked scale of the interference relative to the payloads: see `PowerRule.noise_scale`."""
    scale = power.noise_scale(max_norm, d)
    if not isinstance(scale, Real) or not scale >= 0:
        text = f"noise_scale of the power must return a number of at least 0: got {short_repr(scale)}"
        raise InputError(text, code="wrong-type", setting="power", expected="number", actual=type(scale).__name__)
    return float(scale)


def _scaled(noise: Tensor, scale: float) -> Tensor:
    """Scale the interference; a scale of 0 gives zero, even for infinite entries."""
    if scale == 1:
        return noise
    return noise * scale if scale else torch.zeros_like(noise)


def scaled_energies(energies: Mapping[int, float], scale: float) -> dict[int, float]:
    """Divide energies by the square of a power rule's `scale`; a scale of 0 means that nothing was sent.

    >>> scaled_energies({3: 1.0, 7: 8.0}, 2.0)
    {3: 0.25, 7: 2.0}
    """
    return {client: energy / scale / scale if scale else 0.0 for client, energy in energies.items()}


def fit_power(power: PowerRule, fading: Fading, noise_on: str, channel: str) -> PowerRule:
    """Return the power rule for this fading. The name of the channel appears in the error message.

    Raises:
        InputError: The rule needs the interference on the sum ("noise-not-on-sum"), or does not support this fading.
    """
    if power.needs_noise_on_sum and noise_on != "sum":
        text = f"the power rule needs the interference on the sum of the payloads: got noise_on={noise_on}"
        advice = f"set noise_on=sum, such as channel='{channel}(noise_on=sum)'"
        raise InputError(text, code="noise-not-on-sum", hint="noise_on", advice=advice)
    return power.for_fading(fading)


def check_one_amplitude(fading: Fading, channel: str) -> None:
    """Refuse a fading whose amplitude changes along the vector, for a channel that does not support it."""
    if isinstance(fading, FadingLaw) and fading.block_length:
        text = f"channel {channel} does not support fading that changes along the vector; leave out entries=..."
        raise InputError(text, code="unsupported-fading")


def side_link(total: Accumulated, norms: Layout) -> tuple[Tensor, Tensor]:
    """Pool the norm buffers over the senders (b,), and average their losses (), without fading and noise."""
    senders = max(total.senders, 1)
    stats = pooled(total.stats / senders, norms).to(total.dtype) if total.senders else total.stats
    return stats, total.loss / senders


def check_finite(upload: Upload, k: int) -> None:
    """Raise NonFiniteUpload if an upload of round k is not finite; the error names the client."""
    m = len(upload.clients)
    sizes = {"update": upload.norms()}  # squares of float32 numbers do not overflow in float64
    for what, rows in (("norm buffer", upload.stats), ("loss", upload.loss)):
        if rows.numel():
            sizes[what] = torch.linalg.vector_norm(rows.reshape(m, -1), math.inf, dim=1)
    for what, size in sizes.items():
        bad = size.isfinite().logical_not().nonzero()
        if len(bad):
            raise NonFiniteUpload(k, int(upload.clients[int(bad[0])]), what)
