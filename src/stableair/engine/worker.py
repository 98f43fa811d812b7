"""What trains a chunk of clients together: their local steps laid out, the memory they take, and a step in it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stableair.contracts import Upload, Work, crop_flip, normalised
from stableair.engine.stacked import Stacked, Tap, Tensors
from stableair.engine.vmapped import Vmapped
from stableair.local import SMALL, float32_matmul, threads_for
from stableair.vector import Layout, State, moments, parameters


@dataclass(frozen=True)
class Schedule:
    """The local steps of a chunk's clients in one round, T steps of up to B samples for N clients."""

    index: Tensor  # (T, N, B) int64, the samples
    weight: Tensor  # (T, N, B) float64, 1 / (samples in the batch), 0 where there is no sample
    steps: list[int]  # how many steps each client takes
    moves: Tensor | None = None  # (T, N, B, 3), how the images are moved and mirrored, if they are

    @property
    def active(self) -> list[int]:
        """After how many clients, in each step, there is none that still has one to take."""
        last = torch.zeros(len(self.index), dtype=torch.int64)
        for row, steps in enumerate(self.steps):
            last[:steps] = row + 1
        return last.tolist()

    def to(self, device: torch.device) -> "Schedule":
        moves = None if self.moves is None else self.moves.to(device)
        return replace(self, index=self.index.to(device), weight=self.weight.to(device), moves=moves)


def schedule(work: Work, k: int, clients: list[int]) -> Schedule:
    """The batches of the work, side by side; clients with as many samples are laid out together."""
    rows: dict[int, list[int]] = {}
    for row, n in enumerate(clients):
        rows.setdefault(work.sizes[n], []).append(row)
    size = work.largest_batch
    steps = [work.steps(n) for n in clients]
    shape = max(steps), len(clients), size
    index, weight = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.float64)
    moves = None if work.augment == "none" else index.new_zeros(*shape, 3)
    for m, group in rows.items():
        who = [clients[row] for row in group]
        orders, ones = work.orders(k, who), torch.ones(1, work.epochs, m, dtype=torch.float64)
        samples = torch.stack([work.parts[n] for n in who])
        t = steps[group[0]]
        index[:t, group] = _in_batches(samples.gather(1, orders.flatten(1)).view_as(orders), size)
        weight[:t, group] = F.normalize(_in_batches(ones, size), p=1, dim=-1)
        if moves is not None and (drawn := work.moves(k, who)) is not None:
            moves[:t, group] = _in_batches(drawn, size)
    return Schedule(index, weight, steps, moves)


def _in_batches(of_epochs: Tensor, size: int) -> Tensor:
    """What N clients go through, (N, E, m, ...), in batches: (T, N, size, ...), with zeros where the last is short."""
    n, epochs, m, *rest = of_epochs.shape
    padded = of_epochs.new_zeros(n, epochs, -(-m // size) * size, *rest)
    padded[:, :, :m] = of_epochs
    return padded.view(n, -1, size, *rest).transpose(0, 1)


class Worker:
    """The memory of N clients and a round in it; on a GPU the step is captured once and replayed."""

    def __init__(self, work: Work, precision: str, n: int):
        self.work, self.lr, b = work, work.lr, work.largest_batch
        self.layout, self.norms = parameters(work.module), work.norms
        self.device = work.parts[0].device
        master = next(work.module.parameters()).dtype
        self.dtype = torch.bfloat16 if precision == "bf16" else master
        self.tf32 = precision == "tf32"

        def stack(layout: Layout) -> Tensors:
            each = zip(layout.names, layout.shapes, strict=True)
            return {name: torch.empty(n, *shape, dtype=master, device=self.device) for name, shape in each}

        self.p, self.stats = stack(self.layout), stack(self.norms)
        self.mean, self.std = work.data.scaling(self.device)  # in a captured graph nothing may be copied from the host
        self.index = torch.zeros(n, b, dtype=torch.int64, device=self.device)
        self.weight = torch.zeros(n, b, dtype=master, device=self.device)
        moving = work.augment != "none"
        self.moves = torch.zeros(n, b, 3, dtype=torch.int64, device=self.device) if moving else None
        self.loss = torch.zeros(n, dtype=master, device=self.device)
        self.entries = sum(p[0].numel() for p in self.p.values())
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, state: State, plan: Schedule, clients: list[int]) -> Upload:
        sizes, steps = plan.active, torch.tensor(plan.steps, device=self.device)
        with _current_device(self.device), float32_matmul(self.tf32), _deterministic_cudnn(), threads_for(self.entries):
            if self.device.type == "cuda":
                sizes = [_graph_size(m, len(clients)) for m in sizes]
                self._capture(state, plan, sizes)
            self.load_state(state)
            for t, m in enumerate(sizes):
                self.load_batches(plan, t)
                if self.graphs:
                    self.graphs[m].replay()
                else:
                    self.step(m)
        m = len(clients)
        rows = torch.cat([p[:m].reshape(m, -1) for p in self.p.values()], 1)
        update = torch.sub(state.w, rows, out=rows).mul_(self.work.scale)
        stats = torch.cat([rows[:, :0], *(s[:m].reshape(m, -1) for s in self.stats.values())], 1)
        return Upload(torch.tensor(clients), update, moments(stats, self.norms), self.loss[:m] / steps)

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        """Give every client the broadcast model."""
        for tensors, layout, flat in ((self.p, self.layout, state.w), (self.stats, self.norms, state.stats)):
            for t, part in zip(tensors.values(), layout.split(flat), strict=True):
                t.copy_(part.view(t.shape[1:]).expand_as(t))
        self.loss.zero_()

    def load_batches(self, plan: Schedule, t: int) -> None:
        """Lay the batches of step t out, where the step finds them."""
        n = plan.index.shape[1]
        self.index[:n].copy_(plan.index[t])
        self.weight[:n].copy_(plan.weight[t])
        if self.moves is not None and plan.moves is not None:
            self.moves[:n].copy_(plan.moves[t])

    def inputs(self, m: int) -> Tensor:
        """The batches of the first m clients as the module takes them: (m, B, c, h, w)."""
        x = self.work.data.train.x[self.index[:m]]
        x = x if self.moves is None else crop_flip(x, self.moves[:m])
        return normalised(x, self.mean, self.std).to(self.dtype)

    def step(self, m: int) -> None:
        """One local step of the first m clients, on the samples of `index`."""
        raise NotImplementedError

    def _capture(self, state: State, plan: Schedule, sizes: list[int]) -> None:
        """Warm up on a stream of its own, then record the steps that are not; the next load undoes what they did."""
        for m in sorted(set(sizes) - self.graphs.keys(), reverse=True):  # the largest makes room for the others
            self.load_state(state)
            self.load_batches(plan, 0)
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


def taps_dense(device: torch.device) -> bool:
    """On a GPU it takes longer to write a gradient down than to compute it; on a CPU runs keep their bits."""
    return device.type == "cuda"


def _graph_size(m: int, n: int) -> int:
    """The least of n, 3/4 n, n/2, 3/8 n, ... that holds m clients: few graphs, and little work for nobody."""
    sizes = [-(-n * share // 64) for share in (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)]
    return min(size for size in sizes if size >= m)


class StackedWorker(Worker):
    """Any module that can be stacked or vmapped; a weight of zero on all of its samples leaves a client as it is."""

    def __init__(self, work: Work, precision: str, n: int, program: Stacked | Vmapped):
        super().__init__(work, precision, n)
        self.program = program
        sizes = set(work.sizes)
        full = len(sizes) == 1 and not sizes.pop() % work.largest_batch  # every batch of every client
        self.masked = program.mixes_samples and not full
        self.learning = [name for name, p in work.module.named_parameters() if p.requires_grad]
        if program.has_convolutions:
            self.entries = SMALL  # convolutions are work enough for all threads

    def step(self, m: int) -> None:
        p = {name: t[:m].requires_grad_(name in self.learning) for name, t in self.p.items()}
        stats = {name: t[:m] for name, t in self.stats.items()}
        y = self.work.data.train.y[self.index[:m]]
        taps: list[Tap] = []
        loss = self._loss(p, stats, self.inputs(m), y, self.weight[:m], taps if taps_dense(self.device) else None)
        own = [p[name] for name in self.learning]
        wanted: list[Any] = [*own, *(tap.output for tap in taps)]
        grads = torch.autograd.grad(loss.sum(), wanted, allow_unused=True)  # None for what the loss does not depend on
        slopes, outputs = grads[: len(own)], grads[len(own) :]
        with torch.no_grad():
            moving = [(t, slope) for t, slope in zip(own, slopes, strict=True) if slope is not None]
            torch._foreach_add_([t for t, _ in moving], [slope for _, slope in moving], alpha=-self.lr)
            for tap, dy in zip(taps, outputs, strict=True):
                if dy is not None:
                    weight = p[tap.weight]
                    weight.baddbmm_(dy.mT.to(weight.dtype), tap.x.to(weight.dtype), alpha=-self.lr)
            self.loss[:m].add_(loss)

    def _loss(
        self, parameters: Tensors, buffers: Tensors, x: Tensor, y: Tensor, weight: Tensor, taps: list[Tap] | None
    ) -> Tensor:
        """Each client's mean loss over its batch: (N,)."""
        mask = (weight > 0).to(weight.dtype) if self.masked else None
        logits = self.program(parameters, buffers, x, mask, taps).to(weight.dtype)
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return (each.view_as(weight) * weight).sum(1)


def _current_device(device: torch.device) -> AbstractContextManager[None]:
    """Streams, graphs and kernels belong to the current device, which need not be the first."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _deterministic_cudnn() -> Iterator[None]:
    """Sums in the same order always: a resumed run equals an uninterrupted one."""
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
