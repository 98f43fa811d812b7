"""What one client does in a round, and the reference trainer that does it for one client after another."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stableair.checks import InputError
from stableair.data import REACH, Dataset, moved
from stableair.streams import first_bits, generator
from stableair.vector import Layout, State, attach, buffers, moments

PAYLOADS = "gradient", "delta"
CHUNK = 10  # clients whose updates are in memory at once, unless somebody says otherwise
SMALL = 1_000_000  # entries below which a second thread costs more than it computes


class Upload(NamedTuple):
    """What m clients send: a chunk of a round."""

    clients: Tensor  # (m,) int64
    update: Tensor  # (m, d), the payload that goes over the air
    stats: Tensor  # (m, b) float64, the `moments` of the norm buffers, on the noiseless side link
    loss: Tensor  # (m,), mean loss over the client's local steps


Trainer = Callable[[State, int], Iterator[Upload]]  # (w_k, k) -> chunks: an N x d matrix need never exist


@dataclass(frozen=True)
class Reference:
    """The obvious trainer: E epochs of minibatch SGD, one client after the other.

    The payload is the accumulated gradient (w_k - w_{k,n}) / eta, or with "delta" the plain difference w_k - w_{k,n}.
    """

    module: nn.Module
    data: Dataset
    parts: list[Tensor]  # the samples of each client
    epochs: int
    batch_size: int
    lr: float
    payload: str
    seed: int
    chunk: int = CHUNK
    augment: str = "none"  # or "crop_flip": every image of a batch is moved and mirrored at random

    @property
    def scale(self) -> float:
        """What the payload is of a difference of weights."""
        return 1 / self.lr if self.payload == "gradient" else 1.0

    @cached_property
    def largest_batch(self) -> int:
        """The samples in the largest batch of any client."""
        return min(self.batch_size, max(map(len, self.parts)))

    @cached_property
    def norms(self) -> Layout:
        """The blocks of the norm buffers."""
        return buffers(self.module)

    def _bits(self, stream: str, k: int, clients: Sequence[int], each: int = 1) -> Tensor:
        """Random bits for all that clients with m samples each go through in round k, on the host: (N, E, m * each)."""
        shape = len(clients), self.epochs, len(self.parts[clients[0]]) * each
        sources = [generator(self.seed, stream, k, n) for n in clients]
        return first_bits(sources, math.prod(shape[1:])).view(shape)

    def orders(self, k: int, clients: Sequence[int]) -> Tensor:
        """The orders in which clients with m samples each go through them in round k: (N, E, m)."""
        return self._bits("batches", k, clients).sort(stable=True).indices

    def moves(self, k: int, clients: Sequence[int]) -> Tensor | None:
        """How they move and mirror each of these, if they do: (N, E, m, 3)."""
        if self.augment == "none":
            return None
        bits = self._bits("augment", k, clients, each=3).unflatten(-1, (-1, 3))
        down, right, mirrored = (bits & 0x7FFFFFFF).unbind(-1)
        span = 2 * REACH + 1
        return torch.stack([down % span - REACH, right % span - REACH, mirrored % 2], -1)

    def batches(self, of_epochs: Tensor) -> list[Tensor]:
        """The local steps of a client, from what it goes through in each epoch: (E, m, ...) -> (batch, ...) each."""
        return [batch for epoch in of_epochs for batch in epoch.split(min(self.batch_size, len(epoch)))]

    def client(self, state: State, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """What client n makes of w_k: its payload, its norm buffers and its mean loss."""
        images, y, _ = self.data.train[self.parts[n]]
        x = self.data.inputs(images).to(state.w.dtype) if self.augment == "none" else None
        local = State(state.w.clone(), state.stats.clone())
        grad = torch.zeros_like(local.w)
        attach(self.module, local, grad)
        losses = []
        moves = self.batches(self.moves(k, [n])[0].to(images.device)) if x is None else []
        for step, batch in enumerate(self.batches(self.orders(k, [n])[0].to(images.device))):
            grad.zero_()
            now = x[batch] if x is not None else self.data.inputs(moved(images[batch], moves[step])).to(state.w.dtype)
            loss = F.cross_entropy(self.module(now), y[batch])
            loss.backward()
            local.w.sub_(grad, alpha=self.lr)
            losses.append(loss.detach())
        return (state.w - local.w).mul_(self.scale), local.stats, torch.stack(losses).mean()

    def train(self, state: State, k: int, clients: Tensor) -> Upload:
        """The uploads of some clients in round k."""
        counters = [(b, b.clone()) for b in self.module.buffers() if not b.is_floating_point()]  # batches seen
        with threads_for(len(state.w)), _own_randomness(state.w.device), products():
            self.module.train()
            rows = []
            for n in clients.tolist():
                torch.manual_seed(generator(self.seed, "dropout", k, n).key[0])  # for models that draw by themselves
                try:
                    rows.append(self.client(state, k, n))
                except ValueError as error:  # such as batch norm over a single sample
                    raise InputError(f"round {k}: client {n} cannot train: {error}") from error
                finally:
                    for counter, first in counters:
                        counter.copy_(first)
        update, stats, loss = (torch.stack(column) for column in zip(*rows, strict=True))
        return Upload(clients, update, moments(stats, self.norms), loss)

    def __call__(self, state: State, k: int) -> Iterator[Upload]:
        for clients in torch.arange(len(self.parts)).split(self.chunk):
            yield self.train(state, k, clients)


def _own_randomness(device: torch.device) -> AbstractContextManager[None]:
    """Leave torch's own generators as they were."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


@contextmanager
def products(tf32: bool = False) -> Iterator[None]:
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
    before = torch.get_num_threads()
    torch.set_num_threads(1 if entries < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
