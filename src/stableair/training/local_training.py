"""Local training of the clients in a round: E epochs of minibatches in an order drawn from seed, round and client."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from stableair.contracts import Dataset, LocalRule, Upload
from stableair.schedules import Schedule, full_rate, share_in_round
from stableair.streams import first_bits, generator
from stableair.training.augmentation import CROP
from stableair.training.local_rules import PLAIN_SGD
from stableair.vector import Layout, ModelState, buffers


def payload_scale(payload: str, lr: float) -> float:
    """Return the factor from a difference of weights to the payload: 1 / eta_k, or 1 for "delta"."""
    return 1 / lr if payload == "gradient" else 1.0


@dataclass(frozen=True)
class LocalTraining:
    """The local training of all clients in a round, independent of the engine: E epochs of minibatches.

    The payload is the accumulated gradient (w_k - w_{k,n}) / eta_k, or with "delta" the difference w_k - w_{k,n}.
    """

    module: nn.Module
    data: Dataset
    parts: list[Tensor]  # indices of each client's samples
    epochs: int
    batch_size: int
    lr: float
    payload: str
    seed: int
    augment: str = "none"  # or "crop_flip": shift and mirror every image at random
    rule: LocalRule = PLAIN_SGD  # the optimiser
    lr_share: Schedule = full_rate  # k -> the share of lr in round k
    label_smoothing: float = 0.0  # label smoothing of the training loss, the cross entropy

    @property
    def is_plain(self) -> bool:
        """Whether the steps are plain SGD on the cross entropy, for which engines have faster programs."""
        return self.rule == PLAIN_SGD and not self.label_smoothing

    def lr_in_round(self, k: int) -> float:
        """Learning rate eta_k of round k."""
        return self.lr * share_in_round(self.lr_share, k)

    def scale(self, k: int) -> float:
        """Factor from a difference of weights to the payload in round k."""
        return payload_scale(self.payload, self.lr_in_round(k))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of samples of each client."""
        return [len(part) for part in self.parts]

    @cached_property
    def largest_batch(self) -> int:
        """Number of samples in the largest batch of any client."""
        return min(self.batch_size, max(self.sizes))

    @cached_property
    def smallest_batch(self) -> int:
        """Number of samples in the smallest batch of any client."""
        return min(size % self.batch_size or min(size, self.batch_size) for size in self.sizes)

    @cached_property
    def norms(self) -> Layout:
        """Layout of the norm buffers."""
        return buffers(self.module)

    def steps(self, client: int) -> int:
        """Number of local steps of a client in a round."""
        return self.epochs * -(-self.sizes[client] // self.batch_size)

    def _bits(self, stream: str, k: int, clients: Sequence[int], each: int = 1) -> Tensor:
        """Draw bits for every sample of clients with m samples each in round k, on the host: (N, E, m * each)."""
        shape = len(clients), self.epochs, self.sizes[clients[0]] * each
        sources = [generator(self.seed, stream, k, n) for n in clients]
        return first_bits(sources, math.prod(shape[1:])).view(shape)

    def orders(self, k: int, clients: Sequence[int]) -> Tensor:
        """Draw the batch order of clients with m samples each in round k: (N, E, m)."""
        return self._bits("batches", k, clients).sort(stable=True).indices

    def moves(self, k: int, clients: Sequence[int]) -> Tensor | None:
        """Draw the shifts and flips of these samples: (N, E, m, 3); None without augmentation."""
        if self.augment == "none":
            return None
        bits = self._bits("augment", k, clients, each=3).unflatten(-1, (-1, 3))
        down, right, mirrored = (bits & 0x7FFFFFFF).unbind(-1)
        span = 2 * CROP + 1
        return torch.stack([down % span - CROP, right % span - CROP, mirrored % 2], -1)

    def batches(self, of_epochs: Tensor) -> list[Tensor]:
        """Split the epochs of a client into batches: (E, m, ...) -> (batch, ...) each."""
        return [batch for epoch in of_epochs for batch in epoch.split(min(self.batch_size, len(epoch)))]


class Trainer(Protocol):
    """Computes the local training of a round: the reference trainer, or an engine."""

    work: LocalTraining
    chunk: int  # clients whose updates are in memory at once; an N x d matrix is not needed

    def __call__(self, state: ModelState, k: int, clients: Tensor) -> Iterator[Upload]:
        """Train these clients from w_k in round k; yield their uploads chunk by chunk, in the order of `clients`."""
        ...
