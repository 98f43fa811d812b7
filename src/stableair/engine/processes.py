"""The reference trainer in several processes, one thread each: for CPUs and models too large to gain from stacking.

A worker that waits does so on its pipe. When the parent is gone, killed or not, the pipe ends and so does the worker.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
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

    reference: Reference
    workers: int
    _crew: "_Crew | None" = field(default=None, repr=False)

    @property
    def work(self) -> Work:
        return self.reference.work

    @property
    def chunk(self) -> int:
        return self.reference.chunk

    def __call__(self, state: State, k: int, clients: Tensor) -> Iterator[Upload]:
        if self._crew is None:
            self._crew = _Crew(self.reference, self.workers, state)
        for some in clients.split(self.chunk):
            yield self._crew.train(state, k, some)


class _Crew:
    """The workers and the memory they share with the parent."""

    def __init__(self, reference: Reference, workers: int, state: State):
        chunk = min(reference.chunk, len(reference.work.parts))
        shapes = {"update": (chunk, len(state.w)), "stats": (chunk, len(state.stats)), "loss": (chunk,)}
        kinds = {"stats": torch.float64}
        self.shared = {
            name: torch.zeros(shape, dtype=kinds.get(name)).share_memory_() for name, shape in shapes.items()
        }
        self.start = State(*(torch.empty_like(t).share_memory_() for t in state))
        context = mp.get_context("spawn")
        self.lines: list[Connection] = []
        self.members = []
        for _ in range(workers):
            here, there = context.Pipe()
            member = context.Process(target=_work, args=(there, reference, self.start, self.shared), daemon=True)
            member.start()
            there.close()
            self.lines.append(here)
            self.members.append(member)
        weakref.finalize(self, _dismiss, self.lines, self.members)

    def train(self, state: State, k: int, clients: Tensor) -> Upload:
        for mine, given in zip(self.start, state, strict=True):
            mine.copy_(given)
        try:
            for i, line in enumerate(self.lines):
                line.send((k, [(row, n) for row, n in enumerate(clients.tolist()) if row % len(self.lines) == i]))
            wrong = [said for line in self.lines if (said := line.recv())]
        except (EOFError, OSError):
            raise InputError(
                "a worker process has ended: for lack of memory, or because the script that runs this does not keep "
                'what it does under if __name__ == "__main__"; engine=reference needs no processes'
            ) from None
        if wrong:
            raise InputError(wrong[0])
        return Upload(clients, *(t[: len(clients)].clone() for t in self.shared.values()))


def _dismiss(lines: list[Connection], members: list[Any]) -> None:
    for line in lines:
        line.close()
    for member in members:
        member.join(timeout=5)


def _work(line: Connection, reference: Reference, start: State, shared: dict[str, Tensor]) -> None:
    """What a worker does until its parent is gone."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(1)
    while True:
        try:
            k, mine = line.recv()
        except (EOFError, OSError):
            return
        wrong = ""
        try:
            for row, n in mine:
                upload = reference.train(start, k, torch.tensor([n]))
                for name, t in shared.items():
                    t[row].copy_(getattr(upload, name)[0])
        except InputError as error:
            wrong = str(error)
        except Exception as error:
            wrong = f"round {k}: a worker process failed: {type(error).__name__}: {error}"
        try:
            line.send(wrong)
        except (BrokenPipeError, OSError):
            return
