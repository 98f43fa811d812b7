"""What one client does in a round, and the reference trainer that does it for one client after another."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stableair.checks import InputError
from stableair.data import Dataset
from stableair.streams import generator
from stableair.vector import State, attach

PAYLOADS = "gradient", "delta"
SMALL = 1_000_000  # entries below which a second thread costs more than it computes


class Upload(NamedTuple):
    """What m clients send: a chunk of a round."""

    clients: Tensor  # (m,) int64
    update: Tensor  # (m, d), the payload that goes over the air
    stats: Tensor  # (m, b), norm buffers on the noiseless side link
    loss: Tensor  # (m,), mean loss over the client's local steps


Trainer = Callable[[State, int], Iterator[Upload]]  # (w_k, k) -> chunks: an N x d matrix need never exist


def reference(
    module: nn.Module,
    data: Dataset,
    parts: list[Tensor],
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    payload: str,
    seed: int,
    chunk: int,
) -> Trainer:
    """The obvious trainer: E epochs of minibatch SGD, one client after the other.

    The payload is the accumulated gradient (w_k - w_{k,n}) / eta, or with "delta" the plain difference w_k - w_{k,n}.
    """
    scale = 1 / lr if payload == "gradient" else 1.0
    counters = [(b, b.clone()) for b in module.buffers() if not b.is_floating_point()]  # batches seen, and the like

    def client(state: State, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        x, y = data.inputs(data.train.x[parts[n]]), data.train.y[parts[n]]
        order = generator(seed, "batches", k, n, device=state.w.device)
        local = State(state.w.clone(), state.stats.clone())
        grad = torch.zeros_like(local.w)
        attach(module, local, grad)
        losses, size = [], min(batch_size, len(y))
        for _ in range(epochs):
            epoch = order.permutation(len(y))
            for xs, ys in zip(x[epoch].split(size), y[epoch].split(size), strict=True):
                grad.zero_()
                loss = F.cross_entropy(module(xs), ys)
                loss.backward()
                local.w.sub_(grad, alpha=lr)
                losses.append(loss.detach())
        return (state.w - local.w).mul_(scale), local.stats, torch.stack(losses).mean()

    def train(state: State, k: int) -> Iterator[Upload]:
        for clients in torch.arange(len(parts)).split(min(chunk, len(parts))):
            with _threads_for(len(state.w)), _own_randomness(state.w.device):
                module.train()
                rows = []
                for n in clients.tolist():
                    torch.manual_seed(generator(seed, "dropout", k, n).key[0])  # for models that draw by themselves
                    for counter, first in counters:
                        counter.copy_(first)
                    try:
                        rows.append(client(state, k, n))
                    except ValueError as error:  # such as batch norm over a single sample
                        raise InputError(f"round {k}: client {n} cannot train: {error}") from error
            yield Upload(clients, *(torch.stack(column) for column in zip(*rows, strict=True)))

    return train


def _own_randomness(device: torch.device) -> AbstractContextManager[None]:
    """Leave torch's own generators as they were."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


@contextmanager
def _threads_for(entries: int) -> Iterator[None]:
    """One thread while the model is small: starting a second takes longer than its share of the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if entries < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
