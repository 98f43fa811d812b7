"""The reference trainer: local training of one client after the other."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stableair.contracts import Upload
from stableair.errors import InputError, StableairError
from stableair.streams import generator
from stableair.training.augmentation import crop_flip
from stableair.training.local_rules import LocalSteps
from stableair.training.local_training import LocalTraining
from stableair.vector import Layout, ModelState, attach, moments

CHUNK = 10  # default number of clients whose updates are in memory at once
SMALL = 1_000_000  # entries of a model; below, one thread is faster than two


@dataclass(frozen=True)
class Reference:
    """The reference trainer: one client after the other. Every other trainer is tested against it."""

    work: LocalTraining
    chunk: int = CHUNK

    def client(self, state: ModelState, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Train client n from w_k; return its payload, its norm buffers and its mean loss."""
        work = self.work
        images, y, _ = work.data.train.take(work.parts[n])
        local = ModelState(state.w.clone(), state.stats.clone())
        grad = torch.zeros_like(local.w)
        attach(work.module, local, grad, work.norms)
        take_step = LocalSteps(work.rule, work.module, local.w, work.lr_in_round(k))
        losses = []
        moves = work.moves(k, [n])
        batch_moves = None if moves is None else work.batches(moves[0].to(images.device))
        x = work.data.inputs(images, state.w.dtype) if batch_moves is None else None
        for step, batch in enumerate(work.batches(work.orders(k, [n])[0].to(images.device))):
            grad.zero_()
            if x is not None:
                inputs = x[batch]
            elif batch_moves is not None:
                inputs = work.data.inputs(crop_flip(images[batch], batch_moves[step]), state.w.dtype)
            loss = F.cross_entropy(work.module(inputs), y[batch], label_smoothing=work.label_smoothing)
            loss.backward()
            take_step(grad)
            losses.append(loss.detach())
        return (state.w - local.w).mul_(work.scale(k)), local.stats, torch.stack(losses).mean()

    def train(self, state: ModelState, k: int, clients: Tensor) -> Upload:
        """Train some clients in round k, and return their uploads."""
        work = self.work
        with threads_for(len(state.w)), restored_generators(state.w.device), float32_matmul():
            work.module.train()
            rows = []
            for n in clients.tolist():
                seed_generators(generator(work.seed, "dropout", k, n).key[0])
                try:
                    with restored_buffers(work.module, work.norms):
                        rows.append(self.client(state, k, n))
                except StableairError:
                    raise
                except ValueError as error:  # such as batch norm over a single value
                    raise cannot_train(k, n, error) from error
        update, stats, loss = (torch.stack(column) for column in zip(*rows, strict=True))
        return Upload(clients, update, moments(stats, work.norms), loss)

    def __call__(self, state: ModelState, k: int, clients: Tensor) -> Iterator[Upload]:
        for chunk in clients.split(self.chunk) if len(clients) else ():
            yield self.train(state, k, chunk)


def cannot_train(k: int, client: int, error: Exception) -> InputError:
    """Return the error for a client whose batches the model refuses, such as one value per channel for batch norm."""
    text = f"round {k}: client {client} cannot train: {str(error).strip().partition(chr(10))[0]}"
    return InputError(text, code="client-cannot-train", round=k, client=client)


@contextmanager
def restored_buffers(module: nn.Module, norms: Layout) -> Iterator[None]:
    """Restore all buffers except the norm statistics on exit: counters and masks are reset for every client."""
    buffers = [(b, b.clone()) for name, b in module.named_buffers() if name not in norms.names]
    try:
        yield
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


@contextmanager
def restored_generators(device: torch.device) -> Iterator[None]:
    """Restore the states of the global generators of torch, Python and numpy on exit."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def seed_generators(seed: int) -> None:
    """Seed the global generators, for models that draw random numbers in their forward pass."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def float32_matmul(tf32: bool = False) -> Iterator[None]:
    """Set the precision of float32 products on a GPU: float32, or TF32. torch's default is TF32 for convolutions."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def threads_for(entries: int) -> Iterator[None]:
    """Use one thread for small models: starting a second thread costs more time than it saves."""
    with threads(1 if entries < SMALL else None):
        yield


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Set the number of threads; None keeps it. In large models the number changes the last bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
