"""One simulation in many processes, on one machine or several: torchrun starts them, each trains some of the clients.

    torchrun --standalone --nproc-per-node 4 -m stableair run ... --resume

The result does not depend on their number, bit for bit. The clients of a round are dealt out by the chunk, in the order
in which they are added up. After each wave of chunks the ranks exchange what they have computed by slices of the
vector: each gets its slice of every client's payload, and adds it client by client, as one process alone does it with
whole vectors. In the end the slices are put together. Adding up partial sums instead would be less to send, and another
result for another number of ranks.
"""

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stableair.algorithm import Simulation
from stableair.channels.flat import Flat
from stableair.channels.superposition import Total
from stableair.checks import InputError, Note
from stableair.contracts import Channel, Fade, Gain, Trainer, Upload, check_finite
from stableair.vector import State

T = TypeVar("T")

ANSWER = 20.0  # seconds that the first rank may take to open its address
JOIN = timedelta(minutes=1)  # until all ranks have found each other
WAIT = timedelta(hours=6)  # for a rank that is still training; one that has died is noticed at once
TELLABLE = InputError, OSError  # errors that every rank can be told of
_joined = count()  # how often this process has joined the others


class Alone:
    """The only process there is."""

    rank, size = 0, 1

    def first(self, function: Callable[[], T]) -> T:
        """What the function gives."""
        return function()

    every = first

    def share(self, sim: Simulation) -> Simulation:
        """All of it."""
        return sim

    def tell(self, rounds: int) -> None:
        """There is nothing to tell."""


@dataclass
class Ranks:
    """The processes of torchrun, of which this is one."""

    rank: int
    size: int
    device: torch.device  # where tensors have to be to travel
    sent: int = 0  # bytes, to other ranks

    def first(self, function: Callable[[], T]) -> T:
        """What the function gives on the first rank, on every one of them; its error likewise."""
        told: list[Any] = [None, None]
        if self.rank == 0:
            try:
                told[0] = function()
            except TELLABLE as error:
                told[1] = error
        _talk(dist.broadcast_object_list, told, src=0)
        if told[1] is not None:
            raise told[1]
        return told[0]

    def every(self, function: Callable[[], T]) -> T:
        """What the function gives on this rank; the error of one is the error of all, who say whose it is."""
        try:
            made, error = function(), None
        except (*TELLABLE, MemoryError, RuntimeError) as caught:
            error = caught
        told = self.each(None if error is None else str(error) or type(error).__name__)
        if error is not None:
            raise error
        for rank, said in enumerate(told):
            if said is not None:
                raise InputError(f"rank {rank}: {said}")
        return made

    def each(self, value: T) -> list[T]:
        """The value of every rank, on every one of them."""
        values: list[Any] = [None] * self.size
        _talk(dist.all_gather_object, values, value)
        return values

    def share(self, sim: Simulation) -> Simulation:
        """The simulation with this rank's share of the work; the first alone evaluates."""
        slices = type(sim.channel) is Flat
        channel: Channel = Sliced(**vars(sim.channel), ranks=self) if slices else sim.channel
        evaluate = sim.evaluate if self.rank == 0 else lambda state: {}
        return replace(sim, train=Share(sim.train, self, slices), channel=channel, evaluate=evaluate)  # type: ignore[arg-type]

    def tell(self, rounds: int) -> None:
        """How much had to be sent."""
        if self.rank == 0 and rounds:
            each = f"{self.sent / rounds / 1e6:,.3g} MB"
            warnings.warn(f"each of {self.size} ranks sent {each} a round", Note, stacklevel=2)

    def slice(self, d: int, of: int | None = None) -> slice:
        """The entries of a vector that a rank adds up; without `of` this one."""
        size = -(-d // self.size)
        begin = min(d, (self.rank if of is None else of) * size)
        return slice(begin, min(d, begin + size))

    def gather(self, mine: Tensor) -> Tensor:
        """What every rank has, in the order of the ranks: (...) -> (ranks, ...)."""
        mine = mine.contiguous()
        every = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=self.device)
        _talk(dist.all_gather_into_tensor, every.view(-1), mine.to(self.device).view(-1))
        self.sent += (self.size - 1) * mine.nbytes
        return every.to(mine.device)

    def assemble(self, mine: Tensor, d: int) -> Tensor:
        """Vectors of d entries, of which every rank has its slice: (m, d of the slice) -> (m, d)."""
        padded = mine.new_zeros(len(mine), -(-d // self.size))
        padded[:, : mine.shape[1]] = mine
        return self.gather(padded).transpose(0, 1).flatten(1)[:, :d]

    def scatter(self, rows: Tensor) -> Tensor:
        """This rank's slice of every rank's rows: (m, d) -> (ranks, m, d of the slice)."""
        m, d = rows.shape
        size = -(-d // self.size)
        apart = rows.new_zeros(self.size, m, size, device=self.device)
        for r in range(self.size):
            part = rows[:, self.slice(d, r)]
            apart[r, :, : part.shape[1]] = part
        mine = torch.empty_like(apart)
        _talk(dist.all_to_all_single, mine, apart)
        self.sent += (self.size - 1) * apart[0].nbytes
        here = self.slice(d)
        return mine[..., : here.stop - here.start].to(rows.device)


@dataclass
class Share:
    """A trainer whose clients are dealt out to the ranks, a chunk at a time; every rank gets what all have sent.

    Of the payloads it gets its slice, or all of them where the channel needs them whole.
    """

    inner: Trainer
    ranks: Ranks
    slices: bool

    def __post_init__(self) -> None:
        self.work, self.chunk = self.inner.work, self.inner.chunk

    def __call__(self, state: State, k: int, clients: Tensor) -> Iterator[Upload]:
        chunks = clients.split(self.chunk) if len(clients) else ()
        for first in range(0, len(chunks), self.ranks.size):
            wave = chunks[first : first + self.ranks.size]
            mine = wave[self.ranks.rank] if self.ranks.rank < len(wave) else clients[:0]
            yield self._exchanged(wave, self._trained(state, k, mine))

    def _trained(self, state: State, k: int, mine: Tensor) -> Upload | Exception:
        """What this rank's clients send, or why they cannot."""
        try:
            uploads = list(self.inner(state, k, mine)) if len(mine) else []
            for upload in uploads:
                check_finite(upload, k)
            if self.inner.chunk < self.chunk:
                raise InputError(f"rank {self.ranks.rank} is out of memory; choose a chunk below {self.chunk}")
        except (*TELLABLE, MemoryError, RuntimeError) as error:
            return error if isinstance(error, TELLABLE) else InputError(f"rank {self.ranks.rank}: {error}")
        if not uploads:
            empty = state.w.new_zeros
            return Upload(mine, empty(0, len(state.w)), empty(0, len(state.stats)).double(), empty(0))
        return Upload(*(torch.cat(parts) for parts in zip(*(u[:4] for u in uploads), strict=True)))

    def _exchanged(self, wave: tuple[Tensor, ...], mine: Upload | Exception) -> Upload:
        """What all ranks' clients of this wave send, in order; the error of one is the error of all."""
        for error in self.ranks.each(mine if isinstance(mine, Exception) else None):
            if error is not None:
                raise error
        assert isinstance(mine, Upload)
        beside = torch.cat([mine.stats.double(), mine.loss.double()[:, None], mine.norms()[:, None]], 1)
        missing = self.chunk - len(mine.clients)
        rows, side = (torch.cat([t, t.new_zeros(missing, t.shape[1])]) for t in (mine.update, beside))
        exchange = self.ranks.scatter if self.slices else self.ranks.gather
        payloads, sides = (
            torch.cat([of_rank[: len(clients)] for of_rank, clients in zip(each, wave, strict=False)])
            for each in (exchange(rows), self.ranks.gather(side))
        )
        return Upload(torch.cat(wave), payloads, sides[:, :-2], sides[:, -2], sides[:, -1])


@dataclass(frozen=True, kw_only=True)
class Sliced(Flat):
    """Eq. (3) of which every rank adds up its slice."""

    ranks: Ranks

    def accumulate(self, uploads: Iterable[Upload], fade: Fade) -> Total:
        """The sums over this rank's slice of the payloads."""
        d, mine = len(fade.xi), self.ranks.slice(len(fade.xi))

        def sliced(gain: Gain) -> Gain:
            return (lambda _, device: gain(d, device)[mine]) if callable(gain) else gain

        gains = None if fade.gains is None else {client: sliced(gain) for client, gain in fade.gains.items()}
        return super().accumulate(uploads, fade._replace(xi=fade.xi[mine], gains=gains))

    def reduce(self, total: Total, fade: Fade) -> Total:
        """The slices of all ranks put together."""
        faded, clean = self.ranks.assemble(torch.stack([total.faded, total.clean]), len(fade.xi))
        return total._replace(faded=faded, clean=clean)


@contextmanager
def joined(*about: str) -> Iterator[Alone | Ranks]:
    """The other processes that torchrun has started, if it has; all must be about the same."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or "RANK" not in os.environ:
        yield Alone()
        return
    ranks = _join()
    try:
        for other, theirs in enumerate(ranks.each(about)):
            if theirs != about:
                raise InputError(f"the ranks disagree: rank {other} has {theirs}, rank {ranks.rank} {about}")
        yield ranks
        _talk(dist.barrier)  # nobody leaves while another still listens
    finally:
        dist.destroy_process_group()


def _join() -> Ranks:
    local, here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(local % gpus)
    own = gpus >= here  # NCCL wants a GPU for each
    try:
        if os.environ["RANK"] != "0":
            _await(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store, number, size = next(dist.rendezvous("env://", timeout=JOIN))
        # Ranks that are started again must not find the addresses of those before them.
        life = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_joined)}"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if own else "gloo",
            store=dist.PrefixStore(f"stableair/{life}", store),
            rank=number,
            world_size=size,
            timeout=WAIT,
        )
    except (dist.DistError, KeyError, ValueError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise InputError(f"the ranks have not found each other: {first}; start them with torchrun") from error
    return Ranks(number, size, torch.device("cuda" if own else "cpu"))


def _talk(together: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Do what takes all ranks."""
    try:
        together(*args, **options)
    except RuntimeError as error:
        advice = "resumed, the run goes on from its last checkpoint"
        raise InputError(f"another rank has ended, and so this one has to; {advice}") from error


def _await(host: str, port: int) -> None:
    """Wait until somebody answers there; torch itself would try for minutes, and fill the screen."""
    end = time.monotonic() + ANSWER
    while True:
        try:
            return socket.create_connection((host, port), timeout=ANSWER).close()
        except (OSError, OverflowError) as error:
            if time.monotonic() > end:
                raise InputError(f"nobody answers at {host}:{port} ({error})") from None
        time.sleep(0.1)
