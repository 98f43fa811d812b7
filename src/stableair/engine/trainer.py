"""All clients of a chunk trained together: one stacked step for each local step, on a GPU as one captured graph."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stableair.checks import InputError, Note
from stableair.contracts import Upload, Work
from stableair.engine.stacked import Stacked
from stableair.engine.vmapped import Vmapped
from stableair.engine.worker import Schedule, StackedWorker, Worker, schedule
from stableair.vector import State


@dataclass
class StackedTrainer:
    """The work of a round, a chunk of clients at a time."""

    work: Work
    program: Stacked | Vmapped
    precision: str
    chunk: int
    resnet: bool = False  # whether it is one that has kernels for every layer, to be taken here
    _before: list[int] = field(default_factory=list, repr=False)  # whom it trained the last time
    _worker: Worker | None = field(default=None, repr=False)
    _prepared: dict[tuple[int, tuple[int, ...]], Schedule] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.host = replace(self.work, parts=[part.cpu() for part in self.work.parts])
        self.chunk = min(self.chunk, len(self.work.parts))

    def __call__(self, state: State, k: int, clients: Tensor) -> Iterator[Upload]:
        everybody = left = clients.tolist()  # those with many samples come first: few wait for the others
        as_before, self._before = everybody == self._before, everybody
        while left:
            mine = left[: self.chunk]
            upload = self._train(state, k, mine)
            if upload is None:
                self._halve_chunk()
                continue
            left = left[len(mine) :]
            if state.w.is_cuda:  # which is still at work: the host has time for the next batches
                if left:
                    self._prepare(k, left)
                elif as_before:  # and so, it seems, in the next round
                    self._prepare(k + 1, everybody)
            yield upload
            del upload  # before the next is made

    def _prepare(self, k: int, clients: list[int]) -> Schedule:
        """The batches of the first chunk of these clients; kept, in place of the last ones, until they are needed."""
        key = k, tuple(clients[: self.chunk])
        if key not in self._prepared:
            self._prepared = {key: schedule(self.host, k, list(key[1]))}
        return self._prepared[key]

    def _train(self, state: State, k: int, clients: list[int]) -> Upload | None:
        """The upload of a chunk, None where the memory does not suffice."""
        plan = self._prepare(k, clients).to(state.w.device)
        try:
            self._worker = self._worker or self._new_worker()
            return self._worker(state, plan, clients)
        except torch.cuda.OutOfMemoryError:
            return None

    def _halve_chunk(self) -> None:
        """Half as many clients from here on: nothing of the chunk has been sent yet."""
        self._worker = None
        torch.cuda.empty_cache()
        if self.chunk == 1:
            raise InputError("the device has too little memory for one client of this model; choose another device")
        self.chunk //= 2
        warnings.warn(f"out of memory: {self.chunk} clients at a time from here on", Note, stacklevel=2)

    def _new_worker(self) -> Worker:
        """The memory for a whole chunk, which a smaller one uses too."""
        if self.resnet:
            from stableair.engine.resnet import ResNetWorker

            return ResNetWorker(self.work, self.precision, self.chunk)
        return StackedWorker(self.work, self.precision, self.chunk, self.program)
