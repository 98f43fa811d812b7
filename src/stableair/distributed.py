"""One simulation in several processes, on one machine or several: torchrun starts them, each trains some clients.

    torchrun --standalone --nproc-per-node 4 -m stableair run ... --resume

Results do not depend on the number of ranks, bit for bit. The clients of a round are distributed in chunks, in their
order of summation: in each wave, every rank trains one chunk. After a wave the ranks exchange their payloads in slices:
each rank gets its slice of every client's payload and sums it client by client, as a single process does with whole
vectors. At the end of the round the ranks assemble the slices. A plain all-reduce would send less data but changes the
last bits of the sum.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from stableair.algorithm import Simulation
from stableair.channels.superposition import check_finite
from stableair.contracts import ReducibleChannel, Upload
from stableair.errors import InputError, ResourceError, StableairError
from stableair.training.local_training import Trainer
from stableair.validation import short_repr
from stableair.vector import ModelState

log = logging.getLogger("stableair")

T = TypeVar("T")

CONNECT_TIMEOUT = 20.0  # seconds within which rank 0 must listen on its address
JOIN_TIMEOUT = timedelta(minutes=1)  # within which all ranks must join
COLLECTIVE_TIMEOUT = timedelta(hours=6)  # the longest training of a chunk; the exit of a rank is detected at once
SHARED_ERRORS = StableairError, OSError  # errors that are sent unchanged to the other ranks
_joins = count()  # numbers the process groups that this process has joined


class SingleProcess:
    """A run in one process."""

    rank, size = 0, 1

    def broadcast_from_main(self, function: Callable[[], T]) -> T:
        """Call the function and return its result."""
        return function()

    run_on_every_rank = broadcast_from_main

    def all_gather_objects(self, value: T) -> list[T]:
        """Return a list of this value: there is no other rank."""
        return [value]

    def check_agreement(self, settings: Mapping[str, Any]) -> None:
        """Check nothing: there is no other rank."""

    def shard(self, sim: Simulation) -> Simulation:
        """Return the simulation unchanged."""
        return sim

    def log_traffic(self, rounds: int) -> None:
        """Log nothing: a single process sends nothing."""


@dataclass
class ProcessGroup:
    """The process group of torchrun, seen from one rank.

    It is a `Reduction`: each rank sums one slice of the vector.

    Args:
        rank: Index of this process.
        size: Number of processes.
        device: Device of the tensors that are sent.
        sent: Bytes that this rank has sent to other ranks.
    """

    rank: int
    size: int
    device: torch.device
    sent: int = 0

    def broadcast_from_main(self, function: Callable[[], T]) -> T:
        """Call the function on rank 0 and return its result on every rank, or raise its error on every rank."""
        outcome: list[Any] = [None, None]  # result, error
        if self.rank == 0:
            try:
                outcome[0] = function()
            except SHARED_ERRORS as error:
                outcome[1] = error
        _collective(dist.broadcast_object_list, outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def run_on_every_rank(self, function: Callable[[], T]) -> T:
        """Call the function on every rank and return this rank's result; raise the error of any rank on all ranks."""
        try:
            result, error = function(), None
        except (*SHARED_ERRORS, MemoryError, RuntimeError) as caught:
            error = caught
        errors = self.all_gather_objects(None if error is None else _shared_error(error))
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                raise other.with_message(f"rank {rank}: {other}")
        return result

    def check_agreement(self, settings: Mapping[str, Any]) -> None:
        """Check that all ranks have the same settings; otherwise they would wait for each other, or mix two runs.

        Raises:
            InputError: A setting differs between two ranks ("ranks-disagree"). Every rank raises the same error.
        """
        every = self.all_gather_objects(dict(settings))
        names = dict.fromkeys(name for each in every for name in each)
        values = {name: [each.get(name) for each in every] for name in names}
        differing = {name: row for name, row in values.items() if any(value != row[0] for value in row)}
        if not differing:
            return
        parts = []
        for name, row in differing.items():
            other = next(rank for rank, value in enumerate(row) if value != row[0])
            parts.append(f"{name} is {short_repr(row[0])} on rank 0 and {short_repr(row[other])} on rank {other}")
        text = f"the ranks disagree: {'; '.join(parts)}; start every rank with the same settings"
        raise InputError(text, code="ranks-disagree", differing=differing)

    def all_gather_objects(self, value: T) -> list[T]:
        """Gather a value of every rank, on every rank."""
        values: list[Any] = [None] * self.size
        _collective(dist.all_gather_object, values, value)
        return values

    def shard(self, sim: Simulation) -> Simulation:
        """Return the simulation with this rank's share of the clients; only rank 0 evaluates."""
        channel, in_slices = sim.channel, isinstance(sim.channel, ReducibleChannel)
        if isinstance(channel, ReducibleChannel):
            channel = channel.with_reduction(self)
        evaluate = sim.evaluate if self.rank == 0 else lambda model, averaged: {}
        train = ShardedTrainer(sim.train, self, in_slices)  # type: ignore[arg-type]
        return replace(sim, train=train, channel=channel, evaluate=evaluate)

    def log_traffic(self, rounds: int) -> None:
        """Log on rank 0 how much data a rank has sent per round."""
        if self.rank == 0 and rounds:
            log.info("each of %d ranks sent %s MB per round", self.size, f"{self.sent / rounds / 1e6:,.3g}")

    def slice(self, d: int, rank: int | None = None) -> slice:
        """Return the slice of a vector of length d that a rank sums; default: this rank."""
        length = self.slice_length(d)
        start = min(d, (self.rank if rank is None else rank) * length)
        return slice(start, min(d, start + length))

    def slice_length(self, d: int) -> int:
        """Return the length of the longest slice: an even number, so that both entries of a symbol are in one slice."""
        return 2 * -(-d // (2 * self.size))

    def assemble(self, *parts: Tensor, d: int) -> tuple[Tensor, ...]:
        """Assemble vectors of length d from the slices of all ranks."""
        rows = torch.stack(parts)
        padded = rows.new_zeros(len(rows), self.slice_length(d))
        padded[:, : rows.shape[1]] = rows
        return tuple(self.all_gather(padded).transpose(0, 1).flatten(1)[:, :d])

    def all_gather(self, rows: Tensor) -> Tensor:
        """Gather the rows of every rank, in the order of the ranks: (...) -> (ranks, ...)."""
        rows = rows.contiguous()
        gathered = torch.empty((self.size, *rows.shape), dtype=rows.dtype, device=self.device)
        _collective(dist.all_gather_into_tensor, gathered.view(-1), rows.to(self.device).view(-1))
        self.sent += (self.size - 1) * rows.nbytes
        return gathered.to(rows.device)

    def exchange_slices(self, rows: Tensor) -> Tensor:
        """Return this rank's slice of every rank's rows: (m, d) -> (ranks, m, length of the slice)."""
        m, d = rows.shape
        outgoing = rows.new_zeros(self.size, m, self.slice_length(d), device=self.device)
        for rank in range(self.size):
            part = rows[:, self.slice(d, rank)]
            outgoing[rank, :, : part.shape[1]] = part
        incoming = torch.empty_like(outgoing)
        _collective(dist.all_to_all_single, incoming, outgoing)
        self.sent += (self.size - 1) * outgoing[0].nbytes
        entries = self.slice(d)
        return incoming[..., : entries.stop - entries.start].to(rows.device)


@dataclass
class ShardedTrainer:
    """A trainer that distributes the clients over the ranks in chunks; every rank receives all uploads.

    Args:
        inner: Trainer of this rank's clients.
        group: The processes.
        in_slices: Whether the channel needs only this rank's slice of the payloads.
    """

    inner: Trainer
    group: ProcessGroup
    in_slices: bool

    def __post_init__(self) -> None:
        self.work, self.chunk = self.inner.work, self.inner.chunk

    def __call__(self, state: ModelState, k: int, clients: Tensor) -> Iterator[Upload]:
        chunks = clients.split(self.chunk) if len(clients) else ()
        for first in range(0, len(chunks), self.group.size):
            wave = chunks[first : first + self.group.size]
            local = wave[self.group.rank] if self.group.rank < len(wave) else clients[:0]
            yield self._exchange(wave, self._train(state, k, local))

    def _train(self, state: ModelState, k: int, clients: Tensor) -> Upload | Exception:
        """Return the upload of this rank's clients, or the error that stopped their training."""
        try:
            uploads = list(self.inner(state, k, clients)) if len(clients) else []
            for upload in uploads:
                check_finite(upload, k)
            if self.inner.chunk < self.chunk:
                text = f"rank {self.group.rank} is out of memory; choose a chunk below {self.chunk}"
                raise ResourceError(text, code="out-of-memory", chunk=self.chunk)
        except SHARED_ERRORS as error:
            return error
        except (MemoryError, RuntimeError) as error:
            return ResourceError(f"rank {self.group.rank}: {error}", code="rank-failed", rank=self.group.rank)
        if not uploads:
            empty = state.w.new_zeros
            return Upload(clients, empty(0, len(state.w)), empty(0, len(state.stats)).double(), empty(0))
        return Upload(*(torch.cat(parts) for parts in zip(*(u[:4] for u in uploads), strict=True)))

    def _exchange(self, wave: tuple[Tensor, ...], local: Upload | Exception) -> Upload:
        """Return the uploads of all clients of a wave, in order; raise the error of any rank on all ranks."""
        for error in self.group.all_gather_objects(local if isinstance(local, Exception) else None):
            if error is not None:
                raise error
        assert isinstance(local, Upload)
        scalars = torch.cat([local.stats.double(), local.loss.double()[:, None], local.norms()[:, None]], 1)
        missing = self.chunk - len(local.clients)
        rows, side = (torch.cat([t, t.new_zeros(missing, t.shape[1])]) for t in (local.update, scalars))
        exchange = self.group.exchange_slices if self.in_slices else self.group.all_gather
        payloads, sides = (
            torch.cat([of_rank[: len(clients)] for of_rank, clients in zip(gathered, wave, strict=False)])
            for gathered in (exchange(rows), self.group.all_gather(side))
        )
        return Upload(torch.cat(wave), payloads, sides[:, :-2], sides[:, -2], sides[:, -1])


@contextmanager
def join_process_group(settings: Mapping[str, Any]) -> Iterator[SingleProcess | ProcessGroup]:
    """Join the process group of torchrun; outside torchrun there is a single process.

    Args:
        settings: Values that must be the same on every rank, such as the settings of the experiment.

    Raises:
        InputError: The settings of two ranks differ.
        ResourceError: The ranks cannot connect, or one of them has exited.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or "RANK" not in os.environ:
        yield SingleProcess()
        return
    group = _join()
    if group.rank:
        log.addFilter(_is_error)
    try:
        group.check_agreement(settings)
        yield group
        _collective(dist.barrier)  # no rank leaves while another still communicates
    finally:
        log.removeFilter(_is_error)
        dist.destroy_process_group()


def _is_error(record: logging.LogRecord) -> bool:
    """Keep errors only: rank 0 logs the same notes and warnings as every other rank."""
    return record.levelno >= logging.ERROR


def _join() -> ProcessGroup:
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(local_rank % gpus)
    use_nccl = gpus >= local_size  # NCCL needs one GPU per rank
    try:
        if os.environ["RANK"] != "0":
            _wait_for_main(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store, rank, size = next(rendezvous("env://", timeout=JOIN_TIMEOUT))
        # Restarted ranks must not find the addresses of their predecessors.
        attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_joins)}"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_nccl else "gloo",
            store=PrefixStore(f"stableair/{attempt}", store),
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    except (dist.DistError, KeyError, ValueError, OSError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        text = f"the ranks could not connect: {reason}; start them with torchrun"
        raise ResourceError(text, code="ranks-not-connected") from error
    return ProcessGroup(rank, size, torch.device("cuda" if use_nccl else "cpu"))


def _shared_error(error: BaseException) -> StableairError:
    """Convert an error for the other ranks; errors of stableair keep their class."""
    if isinstance(error, StableairError):
        return error
    kind = InputError if isinstance(error, OSError) else ResourceError
    return kind(str(error) or type(error).__name__, code="rank-failed")


def _collective(operation: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Run an operation in which all ranks take part."""
    try:
        operation(*args, **options)
    except RuntimeError as error:
        advice = "resume the run to continue from its last checkpoint"
        raise ResourceError(f"another rank has exited; {advice}", code="rank-exited") from error


def _wait_for_main(host: str, port: int) -> None:
    """Wait until rank 0 listens; torch itself would retry for minutes and log each attempt."""
    deadline = time.monotonic() + CONNECT_TIMEOUT
    while True:
        try:
            return socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
        except (OSError, OverflowError) as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 does not answer at {host}:{port} ({error})") from None
        time.sleep(0.1)
