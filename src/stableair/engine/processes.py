"""The reference trainer in several processes, one thread each: for CPUs and models too large to gain from stacking.

A worker waits on its pipe. When the parent exits or is killed, the pipe closes and the worker exits.
"""

import os
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch import multiprocessing as mp

from stableair.contracts import Upload
from stableair.errors import InputError, ResourceError, StableairError
from stableair.training.local_training import LocalTraining
from stableair.training.reference import Reference
from stableair.vector import ModelState


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class ProcessTrainer:
    """A trainer that distributes the clients of a chunk to worker processes, which write uploads to shared memory."""

    work: LocalTraining
    chunk: int
    workers: int
    _pool: "_Pool | None" = field(default=None, repr=False)

    def __call__(self, state: ModelState, k: int, clients: Tensor) -> Iterator[Upload]:
        if self._pool is None:
            self._pool = _Pool(Reference(self.work, self.chunk), self.workers, state)
        for chunk in clients.split(self.chunk) if len(clients) else ():
            try:
                upload = self._pool.train(state, k, chunk)
            except BaseException:  # such as Ctrl-C: late replies of these workers must not be read
                self._pool = None
                raise
            yield upload


class _Pool:
    """The worker processes and the memory that they share with the parent."""

    def __init__(self, reference: Reference, workers: int, state: ModelState):
        chunk = min(reference.chunk, len(reference.work.parts))
        shapes = {"update": (chunk, len(state.w)), "stats": (chunk, len(state.stats)), "loss": (chunk,)}
        dtypes = {"stats": torch.float64}
        self.shared = {
            name: torch.zeros(shape, dtype=dtypes.get(name)).share_memory_() for name, shape in shapes.items()
        }
        self.start = ModelState(*(torch.empty_like(t).share_memory_() for t in state))
        context = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        resource_tracker.ensure_running()  # started later, it would unblock Ctrl-C in the block below
        with _no_ctrl_c():
            for _ in range(workers):
                ours, theirs = context.Pipe()
                arguments = theirs, reference, self.start, self.shared
                process = context.Process(target=_worker_loop, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        weakref.finalize(self, _shut_down, self.pipes, self.processes)

    def train(self, state: ModelState, k: int, clients: Tensor) -> Upload:
        for shared, broadcast in zip(self.start, state, strict=True):
            shared.copy_(broadcast)
        try:
            for i, pipe in enumerate(self.pipes):
                pipe.send((k, [(row, n) for row, n in enumerate(clients.tolist()) if row % len(self.pipes) == i]))
            failures = [failure for pipe in self.pipes if (failure := pipe.recv())]
        except (EOFError, OSError):
            text = (
                "a worker process has exited: the memory is exhausted, or the script that starts the run lacks "
                'if __name__ == "__main__":; engine=reference needs no worker processes'
            )
            raise ResourceError(text, code="worker-ended") from None
        if failures:
            raise failures[0]
        return Upload(clients, *(t[: len(clients)].clone() for t in self.shared.values()))


@contextmanager
def _no_ctrl_c() -> Iterator[None]:
    """Block Ctrl-C in the processes that are started in this block, also while they import: the parent handles it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _shut_down(pipes: list[Connection], processes: list[Any]) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(timeout=5)


def _worker_loop(pipe: Connection, reference: Reference, start: ModelState, shared: dict[str, Tensor]) -> None:
    """Train clients until the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for platforms where it cannot be blocked
    torch.set_num_threads(1)
    while True:
        try:
            k, mine = pipe.recv()
        except (EOFError, OSError):
            return
        failure: StableairError | None = None
        try:
            for row, n in mine:
                upload = reference.train(start, k, torch.tensor([n]))
                for name, t in shared.items():
                    t[row].copy_(getattr(upload, name)[0])
        except StableairError as error:
            failure = error
        except Exception as error:
            text = f"round {k}: a worker process failed: {type(error).__name__}: {error}"
            failure = InputError(text, code="worker-failed", round=k)
        try:
            pipe.send(failure)
        except (BrokenPipeError, OSError):
            return
