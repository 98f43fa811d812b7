"""All clients of a chunk trained together: one stacked step for each local step, on a GPU as one captured graph."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from stableair.checks import InputError, Note
from stableair.data import moved
from stableair.engine.stacked import Stacked, Tensors
from stableair.engine.vmapped import Vmapped
from stableair.local import SMALL, Reference, Upload, products, threads_for
from stableair.vector import Layout, State, buffers, parameters

PRECISIONS = "fp32", "tf32", "bf16"


@dataclass(frozen=True)
class Schedule:
    """The local steps of a chunk's clients in one round, T steps of up to B samples for N clients."""

    index: Tensor  # (T, N, B) int64, the samples
    weight: Tensor  # (T, N, B), 1 / (samples in the batch), 0 where there is no sample
    steps: list[int]  # how many steps each client takes
    even: bool  # whether every client has a full batch in every step
    moves: Tensor | None = None  # (T, N, B, 3), how the images are moved and mirrored, if they are

    @property
    def active(self) -> list[int]:
        """After how many clients, in each step, there is none that still has one to take."""
        last = torch.zeros(len(self.index), dtype=torch.int64)
        for row, steps in enumerate(self.steps):
            last[:steps] = row + 1
        return last.tolist()


def schedule(reference: Reference, k: int, clients: list[int], place: torch.device | str = "cpu") -> Schedule:
    """The batches of the reference trainer, side by side; laid out on the host, where that is quick."""
    index, weight, moves = [], [], []
    for n in clients:
        part = reference.parts[n]
        size, here = min(reference.batch_size, len(part)), torch.ones(reference.epochs, len(part))
        index.append(_cut(part[reference.orders(k, n)], size))
        weight.append(F.normalize(_cut(here, size), p=1, dim=1))
        if reference.augment != "none":
            moves.append(_cut(reference.moves(k, n), size))
    steps = [len(t) for t in index]
    even = all(t.shape == index[0].shape and t.all() for t in weight)
    index, weight, moves = (_side_by_side(t, place) if t else None for t in (index, weight, moves))
    return Schedule(index, weight, steps, even, moves)


def _cut(of_epochs: Tensor, size: int) -> Tensor:
    """What a client goes through, (E, m, ...), in batches: (steps, size, ...), with zeros where the last is short."""
    epochs, m, *rest = of_epochs.shape
    room = of_epochs.new_zeros(epochs, -(-m // size) * size, *rest)
    room[:, :m] = of_epochs
    return room.view(-1, size, *rest)


def _side_by_side(clients: list[Tensor], place: torch.device | str) -> Tensor:
    """What each client has, (steps, size, ...), as (T, N, B, ...), with zeros where one has less than another."""
    steps, size = (max(t.shape[i] for t in clients) for i in (0, 1))
    out = clients[0].new_zeros(steps, len(clients), size, *clients[0].shape[2:])
    for row, t in enumerate(clients):
        out[: len(t), row, : t.shape[1]] = t
    return out.to(place)


@dataclass
class StackedTrainer:
    """The reference trainer's work, a chunk of clients at a time."""

    reference: Reference
    program: Stacked | Vmapped
    precision: str
    chunk: int
    kernels: bool = False  # whether the network has kernels of its own here
    _workers: dict[tuple, "Worker"] = field(default_factory=dict)

    def __post_init__(self):
        self.host = replace(self.reference, parts=[part.cpu() for part in self.reference.parts])

    def __call__(self, state: State, k: int) -> Iterator[Upload]:
        left = sorted(range(len(self.reference.parts)), key=lambda n: -len(self.reference.parts[n]))
        while left:  # those with many samples together, so that few wait for the others
            mine = left[: self.chunk]
            try:
                plan = schedule(self.host, k, mine, state.w.device)
                upload = self._worker(plan)(state, plan, mine)
            except torch.cuda.OutOfMemoryError:
                self._halve(len(mine))
                continue
            yield upload
            left = left[len(mine) :]

    def _halve(self, clients: int) -> None:
        """Try again with half as many clients: nothing of the chunk has been sent yet."""
        self._workers.clear()
        torch.cuda.empty_cache()
        if clients == 1:
            raise InputError("the device has too little memory for one client of this model; choose another device")
        self.chunk = clients // 2
        warnings.warn(f"out of memory: {self.chunk} clients at a time from here on", Note, stacklevel=2)

    def _worker(self, plan: Schedule) -> "Worker":
        """The memory for a whole chunk, which a smaller one uses too."""
        key = plan.index.shape[2], plan.even or self.kernels or not self.program.normalises
        if key not in self._workers:
            self._workers[key] = self._new(min(self.chunk, len(self.reference.parts)), *key)
        return self._workers[key]

    def _new(self, n: int, b: int, even: bool) -> "Worker":
        """By hand where there are kernels for the network, else stacked or vmapped."""
        if self.kernels:
            from stableair.engine.resnet import ResNetWorker

            return ResNetWorker(self.reference, self.precision, n, b)
        return StackedWorker(self.reference, self.precision, n, b, self.program, even)


class Worker:
    """The memory of N clients with batches of B, and a round in it; on a GPU the step is captured once and replayed."""

    def __init__(self, reference: Reference, precision: str, n: int, b: int):
        self.reference, self.lr = reference, reference.lr
        self.layout, self.norms = parameters(reference.module), buffers(reference.module)
        self.device = reference.parts[0].device
        master = next(reference.module.parameters()).dtype
        self.dtype = torch.bfloat16 if precision == "bf16" else master
        self.tf32 = precision == "tf32"

        def stack(layout: Layout) -> Tensors:
            each = zip(layout.names, layout.shapes, strict=True)
            return {name: torch.empty(n, *shape, dtype=master, device=self.device) for name, shape in each}

        self.p, self.stats = stack(self.layout), stack(self.norms)
        data = reference.data
        self.mean, self.std = (torch.tensor(t, device=self.device).view(-1, 1, 1) for t in (data.mean, data.std))
        self.index = torch.zeros(n, b, dtype=torch.int64, device=self.device)
        self.weight = torch.zeros(n, b, dtype=master, device=self.device)
        moving = reference.augment != "none"
        self.moves = torch.zeros(n, b, 3, dtype=torch.int64, device=self.device) if moving else None
        self.loss = torch.zeros(n, dtype=master, device=self.device)
        self.entries = sum(p[0].numel() for p in self.p.values())
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, state: State, plan: Schedule, clients: list[int]) -> Upload:
        sizes = plan.active
        with products(self.tf32), _same_every_time(), threads_for(self.entries):
            if self.device.type == "cuda":
                sizes = [_room(m, len(clients)) for m in sizes]
                self._capture(state, plan, sizes)
            self.load(state)
            for t, m in enumerate(sizes):
                self.take(plan, t)
                self.graphs[m].replay() if self.graphs else self.step(m)
        m = len(clients)
        rows = torch.cat([p[:m].flatten(1) for p in self.p.values()], 1)
        update = torch.sub(state.w, rows, out=rows).mul_(self.reference.scale)
        stats = torch.cat([rows[:, :0], *(s[:m].flatten(1) for s in self.stats.values())], 1)
        loss = self.loss[:m] / torch.tensor(plan.steps, device=self.device)
        return Upload(torch.tensor(clients), update, stats, loss)

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Give every client the broadcast model."""
        for tensors, layout, flat in ((self.p, self.layout, state.w), (self.stats, self.norms, state.stats)):
            for t, part in zip(tensors.values(), layout.split(flat), strict=True):
                t.copy_(part.view(t.shape[1:]).expand_as(t))
        self.loss.zero_()

    def take(self, plan: Schedule, t: int) -> None:
        """Lay the batches of step t out, where the step finds them."""
        n = plan.index.shape[1]
        self.index[:n].copy_(plan.index[t])
        self.weight[:n].copy_(plan.weight[t])
        if self.moves is not None:
            self.moves[:n].copy_(plan.moves[t])

    def inputs(self, m: int) -> Tensor:
        """The batches of the first m clients as the module takes them: (m, B, c, h, w)."""
        x = self.reference.data.train.x[self.index[:m]]
        x = x if self.moves is None else moved(x, self.moves[:m])
        return ((x.float() - self.mean) / self.std).to(self.dtype)

    def step(self, m: int) -> None:
        """One local step of the first m clients, on the samples of `index`."""
        raise NotImplementedError

    def _capture(self, state: State, plan: Schedule, sizes: list[int]) -> None:
        """Warm up on a stream of its own, then record the steps that are not; the next load undoes what they did."""
        for m in sorted(set(sizes) - self.graphs.keys(), reverse=True):  # the largest makes room for the others
            self.load(state)
            self.take(plan, 0)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.step(m)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=next(iter(self.graphs.values())).pool() if self.graphs else None):
                self.step(m)
            self.graphs[m] = graph


def _room(m: int, n: int) -> int:
    """The least of n, 3/4 n, n/2, 3/8 n, ... that holds m clients: few graphs, and little work for nobody."""
    sizes = [-(-n * share // 64) for share in (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)]
    return min(size for size in sizes if size >= m)


class StackedWorker(Worker):
    """Any module that can be stacked; a weight of zero on all of its samples leaves a client as it is."""

    def __init__(self, reference: Reference, precision: str, n: int, b: int, program: Stacked | Vmapped, even: bool):
        super().__init__(reference, precision, n, b)
        self.program, self.even = program, even
        if program.convolves:
            self.entries = SMALL  # convolutions are work enough for all threads

    def step(self, m: int) -> None:
        p = {name: t[:m].requires_grad_() for name, t in self.p.items()}
        stats = {name: t[:m] for name, t in self.stats.items()}
        y = self.reference.data.train.y[self.index[:m]]
        loss = self._loss(p, stats, self.inputs(m), y, self.weight[:m])
        grads = torch.autograd.grad(loss.sum(), list(p.values()))
        with torch.no_grad():
            torch._foreach_add_(list(p.values()), grads, alpha=-self.lr)
            self.loss[:m].add_(loss)

    def _loss(self, parameters: Tensors, buffers: Tensors, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Each client's mean loss over its batch: (N,)."""
        mask = None if self.even else (weight > 0).to(weight.dtype)
        logits = self.program(parameters, buffers, x, mask).to(weight.dtype)
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return (each.view_as(weight) * weight).sum(1)


@contextmanager
def _same_every_time() -> Iterator[None]:
    """Sums in the same order always: a resumed run equals an uninterrupted one."""
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
