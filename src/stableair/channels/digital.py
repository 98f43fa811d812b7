"""A digital reference: every client sends its update by itself, quantised and free of errors."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stableair.channels.aggregators import Aggregator
from stableair.channels.kinds import Fading, Make, Noise, aggregator, channel, part, quantizer
from stableair.channels.power import Power
from stableair.channels.superposition import accumulate, side_link
from stableair.checks import InputError, choice, positive, whole
from stableair.contracts import Received, Upload
from stableair.streams import Generator, generator
from stableair.vector import NOTHING, Layout

Coding = Literal["plain", "elias"]
CODINGS: tuple[Coding, ...] = "plain", "elias"
SLICE = 1 << 16  # entries of all clients that are floats at once
SLICE_ELSEWHERE = 1 << 20


class Message(NamedTuple):
    """What a client sends: its update is scale * levels."""

    scale: float
    levels: Tensor  # (d,), small integers where it is quantised
    bits: float


Quantize = Callable[[Tensor, Generator], Message]  # u (d,), a source -> what is sent


@dataclass(frozen=True)
class Quantizer:
    """How an update becomes a message, and in what it is kept."""

    quantize: Quantize
    dtype: torch.dtype


@quantizer("none")
def none() -> Quantizer:
    """Every entry as it is, in 32 bits.

    >>> none().quantize(torch.ones(10), generator(0, "quantize", 0)).bits
    320
    """
    return Quantizer(lambda u, source: Message(1.0, u.to(torch.float32, copy=True), 32 * len(u)), torch.float32)


@quantizer("qsgd")
def qsgd(s: int, coding: Coding = "plain") -> Quantizer:
    """QSGD (Alistarh et al., 2017): each entry a multiple of norm(u) / s, rounded up or down at random, without bias.

    Q(u)_i = norm(u) sign(u_i) l_i / s with l_i = floor(s |u_i| / norm(u) + v_i), v_i uniform on (0, 1): E Q(u) = u and
    E norm(Q(u) - u)^2 <= min(d / s^2, sqrt(d) / s) norm(u)^2. Bits: 32 for the norm, and for each entry with
    coding=plain a sign and ceil(log2(s + 1)), with coding=elias the 2 floor(log2(l + 1)) + 1 of Elias' gamma code of
    l + 1, and a sign where l > 0. Levels are kept as int8 up to s = 127, as int16 above.

    >>> message = qsgd(s=1).quantize(torch.tensor([3.0, -4.0]), generator(0, "quantize", 0))
    >>> message.scale, message.bits, set(message.levels.abs().tolist()) <= {0, 1}
    (5.0, 36, True)
    """
    s = whole("s", s, 1, 2**15 - 1)
    choice("coding", coding, CODINGS)
    kind = torch.int8 if s < 2**7 else torch.int16

    def quantize(u: Tensor, source: Generator) -> Message:
        norm = torch.linalg.vector_norm(u, dtype=torch.float64).item()
        levels, bits = torch.zeros(len(u), dtype=kind, device=u.device), 32
        for level, entries in zip(levels.split(slice_on(u.device)), u.split(slice_on(u.device)), strict=True):
            if norm:
                size = entries.double().abs().mul_(s / norm).add_(source.uniform(len(entries)))
                level.copy_(size.floor_().clamp_(max=s).copysign_(entries))
            bits += len(entries) * (1 + s.bit_length()) if coding == "plain" else elias(level)
        return Message(norm / s, levels, bits)

    return Quantizer(quantize, kind)


def elias(levels: Tensor) -> int:
    """The bits of signed levels in Elias' gamma code of |l| + 1, with a sign where they are not zero: (...) -> int.

    >>> elias(torch.tensor([0, 1, -2, 3]))
    15
    """
    size = levels.abs().double()
    return int((2 * (size + 1).log2().floor() + 1 + (size > 0)).sum().item())


def slice_on(device: torch.device) -> int:
    return SLICE if device.type == "cpu" else SLICE_ELSEWHERE


class Turns(NamedTuple):
    """Who sends in round k, and the source of each one's rounding."""

    k: int
    clients: Tensor  # (m,) int64
    sources: dict[int, Generator]
    d: int
    device: torch.device


@dataclass(frozen=True)
class Digital:
    """Error-free orthogonal transmission: g = aggregate(Q(u_1), ..., Q(u_N)), (d,).

    The N messages take sum_n bits_n / rate complex uses. A mean keeps none of them; any other aggregator keeps all N,
    with int8 levels 1 byte an entry, and makes floats of a slice of them at a time. There is neither fading nor noise.
    """

    fading: Fading
    noise: Noise
    power: Power = field(default_factory=Power)
    pilots: int = 0
    norms: Layout = NOTHING  # of the norm buffers on the side link
    divisor: float | None = None  # of the sum, where it is not the number of clients that sent
    quantizer: Quantizer = field(default_factory=none)
    aggregator: Aggregator = field(default_factory=Aggregator)
    rate: float = 1.0  # bits a complex use

    def __post_init__(self) -> None:
        if self.noise(8, generator(0, "noise", 0)).any() or (self.fading(8, generator(0, "fading", 0)) != 1).any():
            raise InputError("channel digital is free of errors; set noise=none() and fading=unit()")
        if type(self.power) is not Power:
            raise InputError("channel digital knows no power rule; set power=none()")
        if self.pilots:
            raise InputError("channel digital has no noise to listen to; leave out the receiver's pilot")
        if self.divisor and self.aggregator.keeps:
            raise InputError(f"a divisor of the sum ({self.divisor:g}) needs channel digital(aggregate=mean)")

    def draw(self, n: int, who: Tensor, d: int, seed: int, k: int, device: torch.device | str = "cpu") -> Turns:
        """Whose turn it is, and the source of each one's rounding: a function of (seed, k) and of the client alone.

        Where fewer send than the aggregator needs nobody is heard.
        """
        if not self.aggregator.enough(k, len(who), n):
            who = who[:0]
        device = torch.device(device)
        sources = {client: generator(seed, "quantize", k, client, device=device) for client in who.tolist()}
        if self.aggregator.keeps:
            check_memory(len(who) * d * self.quantizer.dtype.itemsize, device, f"the updates of {len(who)} clients")
        return Turns(k, who, sources, d, device)

    def superpose(self, uploads: Iterable[Upload], fade: Turns) -> Received:
        """The aggregate of what the clients sent. Chunks of (m, d) payloads -> g (d,)."""
        summed = torch.zeros(fade.d, dtype=torch.float64, device=fade.device)
        kept: list[Tensor] = []
        scales: list[float] = []
        bits = 0.0

        def hear(client: int, u: Tensor) -> None:
            nonlocal bits
            message = self.quantizer.quantize(u, fade.sources[client].ahead(0))
            bits += message.bits
            if self.aggregator.keeps:
                kept.append(message.levels)
                scales.append(message.scale)
            else:
                summed.add_(message.levels, alpha=message.scale)

        total = accumulate(uploads, dict.fromkeys(fade.sources, 1.0), fade.d, fade.k, fade.device, hear)
        n = self.divisor or max(total.senders, 1)
        g = (aggregated(self.aggregator, kept, scales) if kept else summed / n).to(total.dtype)
        stats, loss = side_link(total, self.norms)
        uses = bits / self.rate
        return Received(g, stats, total.clean / n, loss, torch.zeros_like(g), total.senders, n, None, uses)


def aggregated(rule: Aggregator, levels: list[Tensor], scales: list[float]) -> Tensor:
    """The aggregate of the updates scale * levels, N of (d,), a slice at a time: (d,) float64."""
    device, d = levels[0].device, len(levels[0])
    scale = torch.tensor(scales, dtype=torch.float64, device=device)[:, None]

    def slices() -> Iterable[Tensor]:
        for first in range(0, d, slice_on(device)):
            yield torch.stack([row[first : first + slice_on(device)] for row in levels]).double() * scale

    if rule.entries:
        return torch.cat([rule.entries(rows) for rows in slices()])
    assert rule.weights
    gram = torch.zeros(len(levels), len(levels), dtype=torch.float64, device=device)
    for rows in slices():
        gram += rows @ rows.T
    sizes = gram.diagonal()
    w = rule.weights((sizes + sizes[:, None] - 2 * gram).clamp_(min=0).cpu()).to(device)
    return torch.cat([w @ rows for rows in slices()])


def free_memory(device: torch.device) -> float:
    """The bytes that are free on a device; infinite where nobody can tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), math.inf)


def check_memory(needed: int, device: torch.device, what: str) -> None:
    """Refuse what will not fit into the free memory of a device."""
    if needed > (free := free_memory(device)):
        sizes = f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        raise InputError(f"{what} take {sizes}; take aggregate=mean, which keeps none, or a coarser quantize=qsgd(s)")


@channel("digital", specs={"quantize": quantizer, "aggregate": aggregator})
def digital(quantize: str = "none()", aggregate: str = "mean()", rate: float = 1) -> Make:
    """A digital reference without errors: each update quantised and sent by itself, the server aggregates them.

    g = aggregate(Q(u_1), ..., Q(u_N)); quantize is none() or qsgd(s), aggregate mean(), median(), trimmed_mean(f),
    krum(f) or geometric_median(). It takes bits / rate complex uses.

    >>> from stableair.channels import fading, noise
    >>> digital("qsgd(s=4)", "krum(f=1)")(fading=fading.unit(), noise=noise.none()).rate
    1.0
    """
    return partial(
        Digital,
        quantizer=part(quantizer, quantize, Quantizer),
        aggregator=part(aggregator, aggregate, Aggregator),
        rate=positive("rate", rate),
    )
