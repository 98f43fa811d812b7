"""The reference trainer in several processes, one thread each: for CPUs and models too large to gain from stacking.

A worker that waits does so on its pipe. When the parent is gone, killed or not, the pipe ends and so does the worker.
"""

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

from stableair.checks import InputError
from stableair.contracts import Upload, Work
from stableair.local import Reference
from stableair.vector import State


@dataclass
class ProcessTrainer:
    """The clients of a chunk dealt to the workers; the uploads come back in shared memory, in the clients' order."""

    work: Work
    chunk: int
    workers: int
    _pool: "_Pool | None" = field(default=None, repr=False)

    def __call__(self, state: State, k: int, clients: Tensor) -> Iterator[Upload]:
        if self._pool is None:
            self._pool = _Pool(Reference(self.work, self.chunk), self.workers, state)
        for some in clients.split(self.chunk) if len(clients) else ():
            yield self._pool.train(state, k, some)


class _Pool:
    """The workers and the memory they share with the parent."""

    def __init__(self, reference: Reference, workers: int, state: State):
        chunk = min(reference.chunk, len(reference.work.parts))
        shapes = {"update": (chunk, len(state.w)), "stats": (chunk, len(state.stats)), "loss": (chunk,)}
        dtypes = {"stats": torch.float64}
        self.shared = {
            name: torch.zeros(shape, dtype=dtypes.get(name)).share_memory_() for name, shape in shapes.items()
        }
        self.start = State(*(torch.empty_like(t).share_memory_() for t in state))
        context = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        resource_tracker.ensure_running()  # its start would let Ctrl-C through again
        with _no_ctrl_c():
            for _ in range(workers):
                ours, theirs = context.Pipe()
                given = theirs, reference, self.start, self.shared
                process = context.Process(target=_worker_loop, args=given, daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        weakref.finalize(self, _shut_down, self.pipes, self.processes)

    def train(self, state: State, k: int, clients: Tensor) -> Upload:
        for mine, given in zip(self.start, state, strict=True):
            mine.copy_(given)
        try:
            for i, pipe in enumerate(self.pipes):
                pipe.send((k, [(row, n) for row, n in enumerate(clients.tolist()) if row % len(self.pipes) == i]))
            failures = [failure for pipe in self.pipes if (failure := pipe.recv())]
        except (EOFError, OSError):
            raise InputError(
                "a worker process has ended: for lack of memory, or because the script that runs this does not keep "
                'what it does under if __name__ == "__main__"; engine=reference needs no processes'
            ) from None
        if failures:
            raise InputError(failures[0])
        return Upload(clients, *(t[: len(clients)].clone() for t in self.shared.values()))


@contextmanager
def _no_ctrl_c() -> Iterator[None]:
    """What is started here never hears of Ctrl-C, not even while it imports: that is the parent's business."""
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


def _worker_loop(pipe: Connection, reference: Reference, start: State, shared: dict[str, Tensor]) -> None:
    """What a worker does until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be blocked
    torch.set_num_threads(1)
    while True:
        try:
            k, mine = pipe.recv()
        except (EOFError, OSError):
            return
        failure = ""
        try:
            for row, n in mine:
                upload = reference.train(start, k, torch.tensor([n]))
                for name, t in shared.items():
                    t[row].copy_(getattr(upload, name)[0])
        except InputError as error:
            failure = str(error)
        except Exception as error:
            failure = f"round {k}: a worker process failed: {type(error).__name__}: {error}"
        try:
            pipe.send(failure)
        except (BrokenPipeError, OSError):
            return
