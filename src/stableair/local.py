"""What one client does in a round, and the reference trainer that does it for one client after another."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from stableair.checks import InputError
from stableair.contracts import Upload, Work, crop_flip
from stableair.streams import generator
from stableair.vector import State, attach, moments

CHUNK = 10  # clients whose updates are in memory at once, unless somebody says otherwise
SMALL = 1_000_000  # entries below which a second thread costs more than it computes


@dataclass(frozen=True)
class Reference:
    """The obvious trainer: one client after the other. Every other trainer is held to what this one gives."""

    work: Work
    chunk: int = CHUNK

    def client(self, state: State, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """What client n makes of w_k: its payload, its norm buffers and its mean loss."""
        work = self.work
        images, y, _ = work.data.train.take(work.parts[n])
        local = State(state.w.clone(), state.stats.clone())
        grad = torch.zeros_like(local.w)
        attach(work.module, local, grad)
        losses = []
        moves = work.moves(k, [n])
        batch_moves = None if moves is None else work.batches(moves[0].to(images.device))
        x = work.data.inputs(images).to(state.w.dtype) if batch_moves is None else None
        for step, batch in enumerate(work.batches(work.orders(k, [n])[0].to(images.device))):
            grad.zero_()
            if x is not None:
                inputs = x[batch]
            elif batch_moves is not None:
                inputs = work.data.inputs(crop_flip(images[batch], batch_moves[step])).to(state.w.dtype)
            loss = F.cross_entropy(work.module(inputs), y[batch])
            loss.backward()
            local.w.sub_(grad, alpha=work.lr)
            losses.append(loss.detach())
        return (state.w - local.w).mul_(work.scale), local.stats, torch.stack(losses).mean()

    def train(self, state: State, k: int, clients: Tensor) -> Upload:
        """The uploads of some clients in round k."""
        work = self.work
        counters = [(b, b.clone()) for b in work.module.buffers() if not b.is_floating_point()]  # batches seen
        with threads_for(len(state.w)), _own_randomness(state.w.device), float32_matmul():
            work.module.train()
            rows = []
            for n in clients.tolist():
                torch.manual_seed(generator(work.seed, "dropout", k, n).key[0])  # for models that draw by themselves
                try:
                    rows.append(self.client(state, k, n))
                except ValueError as error:  # such as batch norm over a single sample
                    raise InputError(f"round {k}: client {n} cannot train: {error}") from error
                finally:
                    for counter, first in counters:
                        counter.copy_(first)
        update, stats, loss = (torch.stack(column) for column in zip(*rows, strict=True))
        return Upload(clients, update, moments(stats, work.norms), loss)

    def __call__(self, state: State, k: int, clients: Tensor) -> Iterator[Upload]:
        for some in clients.split(self.chunk) if len(clients) else ():
            yield self.train(state, k, some)


def _own_randomness(device: torch.device) -> AbstractContextManager[None]:
    """Leave torch's own generators as they were."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


@contextmanager
def float32_matmul(tf32: bool = False) -> Iterator[None]:
    """How products of float32 round on a GPU: as float32 says, where convolutions would else take TF32, or as TF32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def threads_for(entries: int) -> Iterator[None]:
    """One thread while the work is small: starting a second takes longer than its share of it."""
    with threads(1 if entries < SMALL else None):
        yield


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """So many threads, or as many as before: in large models their number changes the last bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
