"""Training of a whole chunk of clients at once: each local step is one stacked step, on a GPU a captured graph."""

import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from stableair.contracts import Upload
from stableair.engine.stacked import Stacked
from stableair.engine.vmapped import Vmapped
from stableair.engine.worker import Schedule, StackedWorker, Worker, schedule
from stableair.errors import ResourceError, StableairError
from stableair.training.local_training import LocalTraining
from stableair.training.reference import cannot_train, restored_generators
from stableair.validation import pluralize
from stableair.vector import ModelState

log = logging.getLogger("stableair")


@dataclass
class StackedTrainer:
    """A trainer that computes one chunk of clients at a time."""

    work: LocalTraining
    program: Stacked | Vmapped
    precision: str
    chunk: int
    resnet: bool = False  # whether kernels compute every layer of the model
    _last_clients: list[int] = field(default_factory=list, repr=False)  # clients of the last call
    _worker: Worker | None = field(default=None, repr=False)
    _prepared: dict[tuple[int, tuple[int, ...]], Schedule] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.host = replace(self.work, parts=[part.cpu() for part in self.work.parts])
        self.chunk = min(self.chunk, len(self.work.parts))

    def __call__(self, state: ModelState, k: int, clients: Tensor) -> Iterator[Upload]:
        all_clients = remaining = clients.tolist()  # most samples first, so that the clients of a chunk are similar
        same_clients, self._last_clients = all_clients == self._last_clients, all_clients
        while remaining:
            current = remaining[: self.chunk]
            upload = self._train(state, k, current)
            if upload is None:
                self._halve_chunk()
                continue
            remaining = remaining[len(current) :]
            if state.w.is_cuda:  # the host prepares the next batches while the device computes
                if remaining:
                    self._prepare(k, remaining)
                elif same_clients:  # the next round probably has the same clients, too
                    self._prepare(k + 1, all_clients)
            yield upload
            del upload  # free it before the next one is computed

    def _prepare(self, k: int, clients: list[int]) -> Schedule:
        """Return the schedule of the first chunk of these clients; only the latest schedule is kept."""
        key = k, tuple(clients[: self.chunk])
        if key not in self._prepared:
            self._prepared = {key: schedule(self.host, k, list(key[1]))}
        return self._prepared[key]

    def _train(self, state: ModelState, k: int, clients: list[int]) -> Upload | None:
        """Return the upload of a chunk; None if the device is out of memory."""
        plan = self._prepare(k, clients).to(state.w.device)
        self._check_single_samples(k, plan, clients)
        try:
            self._worker = self._worker or self._new_worker()
            return self._worker(state, plan, clients)
        except torch.cuda.OutOfMemoryError:
            return None
        except StableairError:
            raise
        except ValueError as error:
            raise cannot_train(k, clients[0], error) from error

    def _check_single_samples(self, k: int, plan: Schedule, clients: list[int]) -> None:
        """Refuse a batch of one sample if the module does, as batch norm refuses a single value per channel."""
        rows = (plan.samples == 1).any(0).nonzero().flatten().tolist()
        if rows and (error := self._single_sample_error):
            raise cannot_train(k, clients[rows[0]], error) from error

    @cached_property
    def _single_sample_error(self) -> ValueError | None:
        """The error that the module raises in training mode on one sample; None if it raises none."""
        module = copy.deepcopy(self.work.module).train()
        x = self.work.data.inputs(self.work.data.train.x[:1], next(module.parameters()).dtype)
        try:
            with torch.no_grad(), restored_generators(x.device):
                module(x)
        except ValueError as error:
            return error
        return None

    def _halve_chunk(self) -> None:
        """Halve the chunk from now on; the uploads of the current chunk have not been yielded yet."""
        self._worker = None
        torch.cuda.empty_cache()
        if self.chunk == 1:
            text = "the device has too little memory for one client of this model; choose another device"
            raise ResourceError(text, code="out-of-memory")
        self.chunk //= 2
        log.warning("out of memory: training %s at a time from now on", pluralize(self.chunk, "client"))

    def _new_worker(self) -> Worker:
        """Create a worker with memory for a whole chunk; smaller chunks use it too."""
        if self.resnet:
            from stableair.engine.resnet import ResNetWorker

            return ResNetWorker(self.work, self.precision, self.chunk)
        return StackedWorker(self.work, self.precision, self.chunk, self.program)
