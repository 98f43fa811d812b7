"""A digital reference: each client sends its quantised update separately, without transmission errors."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stableair.channels.fading import unit
from stableair.channels.power import Power
from stableair.channels.registries import aggregator, channel, make_part, quantizer
from stableair.channels.superposition import (
    accumulate,
    amplitudes,
    check_one_amplitude,
    noise_scale,
    scaled_energies,
    side_link,
)
from stableair.contracts import (
    Aggregator,
    ChannelFactory,
    Fading,
    Message,
    PowerRule,
    Quantizer,
    Received,
    Resources,
    Transmission,
    Upload,
)
from stableair.errors import InputError, ResourceError
from stableair.memory import unchanged
from stableair.streams import Generator, generator
from stableair.validation import choice, integer, positive
from stableair.vector import NOTHING, Layout

Coding = Literal["plain", "elias"]
CODINGS: tuple[Coding, ...] = "plain", "elias"
SLICE = 1 << 16  # entries per client that are converted to floats at once, on a CPU
SLICE_ELSEWHERE = 1 << 20

log = logging.getLogger("stableair")


@quantizer("none")
def none() -> Quantizer:
    """No quantisation: 32 bits per entry.

    Returns:
        The quantiser.

    >>> none().quantize(torch.ones(10), generator(0, "quantize", 0)).bits
    320
    """
    return Quantizer(lambda u, source: Message(1.0, u.to(torch.float32, copy=True), 32 * len(u)), torch.float32)


@quantizer("qsgd")
def qsgd(s: int, coding: Coding = "plain") -> Quantizer:
    """QSGD (Alistarh et al., 2017): unbiased random rounding to multiples of norm(u) / s.

        Q(u)_i = norm(u) sign(u_i) l_i / s,    l_i = floor(s |u_i| / norm(u) + v_i),    v_i uniform on (0, 1)

    E Q(u) = u and E norm(Q(u) - u)^2 <= min(d / s^2, sqrt(d) / s) norm(u)^2. The norm takes 32 bits. Levels are stored
    as int8 up to s = 127, and as int16 above.

    Args:
        s: Number of levels above 0, from 1 to 32767.
        coding: "plain" uses a sign and ceil(log2(s + 1)) bits per entry; "elias" uses Elias' gamma code of l + 1, which
            has 2 floor(log2(l + 1)) + 1 bits, and a sign where l > 0.

    Returns:
        The quantiser.

    Raises:
        InputError: s is out of range, or the coding is unknown.

    >>> message = qsgd(s=1).quantize(torch.tensor([3.0, -4.0]), generator(0, "quantize", 0))
    >>> message.scale, message.bits, set(message.levels.abs().tolist()) <= {0, 1}
    (5.0, 36, True)
    """
    s = integer("s", s, 1, 2**15 - 1)
    choice("coding", coding, CODINGS)
    kind = torch.int8 if s < 2**7 else torch.int16

    def quantize(u: Tensor, source: Generator) -> Message:
        norm = torch.linalg.vector_norm(u, dtype=torch.float64).item()
        levels, bits = torch.zeros(len(u), dtype=kind, device=u.device), 32
        for level, entries in zip(levels.split(slice_length(u.device)), u.split(slice_length(u.device)), strict=True):
            if norm:
                size = entries.double().abs().mul_(s / norm).add_(source.uniform(len(entries)))
                level.copy_(size.floor_().clamp_(max=s).copysign_(entries))
            bits += len(entries) * (1 + s.bit_length()) if coding == "plain" else elias(level)
        return Message(norm / s, levels, bits)

    return Quantizer(quantize, kind)


def elias(levels: Tensor) -> int:
    """Count the bits of signed levels in Elias' gamma code of |l| + 1, plus a sign for nonzero levels.

    >>> elias(torch.tensor([0, 1, -2, 3]))
    15
    """
    size = levels.abs().double()
    return int((2 * (size + 1).log2().floor() + 1 + (size > 0)).sum().item())


def slice_length(device: torch.device) -> int:
    """Return the number of entries per client that are converted to floats at once."""
    return SLICE if device.type == "cpu" else SLICE_ELSEWHERE


class DigitalDraw(NamedTuple):
    """Random state of the digital channel in round k."""

    k: int
    clients: Tensor  # (m,) int64, the participants that transmit; empty if they are too few for the aggregator
    sources: dict[int, Generator]  # random numbers for the rounding, per transmitting client
    transmissions: dict[int, Transmission]  # links of the transmitting clients, of which only the energies are used
    d: int
    device: torch.device


@dataclass(frozen=True)
class Digital:
    """Error-free orthogonal transmission: g = aggregate(Q(u_1), ..., Q(u_N)), (d,).

    There is neither fading of the updates nor noise. The N messages take sum_n bits_n / rate complex symbols. The mean
    stores no message. Other aggregators store all N messages, with 1 byte per entry for int8 levels, and convert one
    slice at a time to floats.

    A power rule selects the clients that transmit, and sets the energy of their symbols: 1 without a rule, 2 P with a
    limit, and 2 rho / |h_hat_n|^2 with inversion. This is its energy for a payload of two real entries and norm 1.

    Args:
        norms: Layout of the norm buffers on the side link.
        divisor: Divisor of the sum; None for the number of senders. Requires the mean.
        quantizer: Encoding of an update.
        aggregator: Aggregation of the updates.
        rate: Bits per complex symbol.
        power: Transmit power rule.
        fading: Amplitudes of the clients, for a power rule that adapts to them.

    Raises:
        InputError: A divisor with an aggregator other than the mean ("divisor-without-mean"); a power rule with phase
            or frequency errors, which an error-free channel does not have ("unsupported-power"); fading that changes
            along the vector ("unsupported-fading").
    """

    norms: Layout = NOTHING
    divisor: float | None = None
    quantizer: Quantizer = field(default_factory=none)
    aggregator: Aggregator = field(default_factory=Aggregator)
    rate: float = 1.0
    power: PowerRule = field(default_factory=Power)
    fading: Fading = field(default_factory=unit)

    def __post_init__(self) -> None:
        if self.divisor and self.aggregator.keeps_updates:
            text = f"a divisor of the sum ({self.divisor:g}) needs channel digital(aggregate=mean)"
            raise InputError(text, code="divisor-without-mean", divisor=self.divisor)
        check_one_amplitude(self.fading, "digital")
        if self.power.rotations:
            names = " and ".join(self.power.rotations)
            text = f"channel digital transmits without errors: leave out {names} of the power rule, or choose flat or"
            raise InputError(f"{text} waveform", code="unsupported-power", setting="power", names=self.power.rotations)
        object.__setattr__(self, "power", self.power.for_fading(self.fading))

    def draw(
        self, n: int, clients: Tensor, d: int, seed: int, k: int, device: torch.device | str = "cpu"
    ) -> DigitalDraw:
        """Draw the links of the participants and the random sources of their rounding: functions of (seed, k, client).

        If fewer clients transmit than the aggregator needs, the round has no senders.

        Raises:
            InputError: The number of all clients n is too small for the aggregator (`too-few-clients`).
            ResourceError: The updates that the aggregator keeps do not fit into memory.
        """
        h = amplitudes(self.fading, n, seed, k)
        with unchanged("power", h, clients):
            transmissions = self.power.transmissions(h, clients, seed, k)
        if not enough_clients(self.aggregator, k, len(transmissions), n):
            transmissions = {}
        clients = torch.tensor(list(transmissions), dtype=torch.int64)
        device = torch.device(device)
        sources = {client: generator(seed, "quantize", k, client, device=device) for client in clients.tolist()}
        if self.aggregator.keeps_updates:
            check_memory(len(clients) * d * self.quantizer.dtype.itemsize, device, len(clients))
        return DigitalDraw(k, clients, sources, transmissions, d, device)

    def superpose(self, uploads: Iterable[Upload], draw: DigitalDraw) -> Received:
        """Aggregate the messages of the clients: chunks of (m, d) payloads -> g (d,)."""
        summed = torch.zeros(draw.d, dtype=torch.float64, device=draw.device)
        levels: list[Tensor] = []
        scales: list[float] = []
        bits = 0.0

        def transmit(client: int, u: Tensor) -> float:
            nonlocal bits
            with unchanged("quantizer", u, setting="channel"):
                message = self.quantizer.quantize(u, draw.sources[client].ahead(0))
            bits += message.bits
            if self.aggregator.keeps_updates:
                levels.append(message.levels)
                scales.append(message.scale)
            else:
                summed.add_(message.levels, alpha=message.scale)
            return message.bits / self.rate  # symbols of modulus 1

        total = accumulate(uploads, draw.transmissions, draw.d, draw.k, draw.device, transmit=transmit)
        n = self.divisor or max(total.senders, 1)
        g = (aggregate_slices(self.aggregator, levels, scales) if levels else summed / n).to(total.dtype)
        stats, loss = side_link(total, self.norms)
        energies = scaled_energies(total.energies, noise_scale(self.power, 1.0, 2))
        used = Resources(bits / self.rate, energies, bits)
        return Received(g, stats, total.clean / n, loss, torch.zeros_like(g), total.senders, n, None, used)


def enough_clients(aggregator: Aggregator, k: int, senders: int, clients: int) -> bool:
    """Whether round k has enough senders for the aggregator.

    Raises:
        InputError: The number of all clients is too small (`too-few-clients`).
    """
    needed = f"the aggregator needs at least {aggregator.min_clients} clients ({aggregator.reason})"
    if clients < aggregator.min_clients:
        text = f"{needed}: there are {clients}"
        raise InputError(text, code="too-few-clients", clients=clients, low=aggregator.min_clients)
    if 0 < senders < aggregator.min_clients:
        log.warning("round %d: %s, but only %d transmit; the round has no senders", k, needed, senders)
    return senders >= aggregator.min_clients


def aggregate_slices(rule: Aggregator, levels: list[Tensor], scales: list[float]) -> Tensor:
    """Aggregate N updates scale * levels of (d,), one slice at a time: (d,) float64."""
    device, d = levels[0].device, len(levels[0])
    scale = torch.tensor(scales, dtype=torch.float64, device=device)[:, None]

    def slices() -> Iterable[Tensor]:
        for first in range(0, d, slice_length(device)):
            yield torch.stack([row[first : first + slice_length(device)] for row in levels]).double() * scale

    if rule.per_entry:
        return torch.cat([rule.per_entry(rows) for rows in slices()])
    assert rule.weights
    gram = torch.zeros(len(levels), len(levels), dtype=torch.float64, device=device)
    for rows in slices():
        gram += rows @ rows.T
    sizes = gram.diagonal()
    w = rule.weights((sizes + sizes[:, None] - 2 * gram).clamp_(min=0).cpu()).to(device)
    return torch.cat([w @ rows for rows in slices()])


def free_memory(device: torch.device) -> float:
    """Return the free memory of a device in bytes; infinity if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), math.inf)


def check_memory(needed: int, device: torch.device, clients: int) -> None:
    """Raise ResourceError if the updates of the clients do not fit into the free memory of a device.

    Args:
        needed: Bytes of all updates.
        device: Where the updates are kept.
        clients: Number of updates, for the error message.
    """
    if needed > (free := free_memory(device)):
        sizes = f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        advice = "choose aggregate=mean, which keeps no updates, or a coarser quantize=qsgd(s)"
        text = f"the updates of {clients} clients take {sizes}; {advice}"
        raise ResourceError(text, code="out-of-memory", needed=needed, free=free)


@channel("digital", uses=("power",), specs={"quantize": quantizer, "aggregate": aggregator})
def digital(quantize: str = "none()", aggregate: str = "mean()", rate: float = 1) -> ChannelFactory:
    """Error-free digital reference: clients send quantised updates, which the server aggregates.

        g = aggregate(Q(u_1), ..., Q(u_N))

    A round takes bits / rate complex symbols. The power of a symbol is 1, or 2 P with power=limit(P), or 2 rho /
    |h_hat_n|^2 with power=inversion(P, threshold); clients below the threshold do not transmit. Only power rules that
    adapt to the fading use the fading. The channel has no noise and no pilots.

    Args:
        quantize: Spec of the quantiser: none() or qsgd(s).
        aggregate: Spec of the aggregator: mean(), median(), trimmed_mean(f), krum(f) or geometric_median().
        rate: Bits per complex symbol.

    Returns:
        A factory of the channel.

    Raises:
        InputError: A spec or an argument is invalid.

    >>> digital("qsgd(s=4)", "krum(f=1)")().rate
    1.0
    """
    return partial(
        Digital,
        quantizer=make_part(quantizer, quantize, Quantizer),
        aggregator=make_part(aggregator, aggregate, Aggregator),
        rate=positive("rate", rate),
    )
