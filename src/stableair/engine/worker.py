"""Training of a chunk of clients at once: the schedule of their local steps, their memory, and one step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stableair.contracts import Upload
from stableair.engine.stacked import Stacked, Taps, Tensors
from stableair.engine.stacked_rule import StackedRule
from stableair.engine.vmapped import Vmapped
from stableair.training.augmentation import crop_flip
from stableair.training.local_rules import PLAIN_SGD
from stableair.training.local_training import LocalTraining
from stableair.training.reference import SMALL, float32_matmul, threads_for
from stableair.vector import Layout, ModelState, moments, parameters


@dataclass(frozen=True)
class Schedule:
    """The local steps of a chunk's clients in one round, T steps of up to B samples for N clients."""

    index: Tensor  # (T, N, B) int64, indices of the samples
    weight: Tensor  # (T, N, B) float64, 1 / (samples in the batch), 0 where there is no sample
    samples: Tensor  # (T, N) int64, on the host: number of samples in each batch, 0 for a client that has finished
    steps: list[int]  # number of local steps of each client
    lr: float  # learning rate of the round
    scale: float  # factor from a difference of weights to the payload
    moves: Tensor | None = None  # (T, N, B, 3), crops and flips; None without augmentation

    @property
    def active(self) -> list[int]:
        """For each step, the smallest number of leading clients that include every client with steps left."""
        last = torch.zeros(len(self.index), dtype=torch.int64)
        for row, steps in enumerate(self.steps):
            last[:steps] = row + 1
        return last.tolist()

    def groups(self, t: int) -> list[tuple[int, list[int]]]:
        """Group the clients of step t by the size of their batches: (samples, rows) each."""
        rows: dict[int, list[int]] = {}
        for row, samples in enumerate(self.samples[t].tolist()):
            if samples:
                rows.setdefault(samples, []).append(row)
        return list(rows.items())

    def to(self, device: torch.device) -> "Schedule":
        moves = None if self.moves is None else self.moves.to(device)
        return replace(self, index=self.index.to(device), weight=self.weight.to(device), moves=moves)


def schedule(work: LocalTraining, k: int, clients: list[int]) -> Schedule:
    """Build the schedule of some clients; clients with the same number of samples are filled in at once."""
    rows: dict[int, list[int]] = {}
    for row, n in enumerate(clients):
        rows.setdefault(work.sizes[n], []).append(row)
    size = work.largest_batch
    steps = [work.steps(n) for n in clients]
    shape = max(steps), len(clients), size
    index, weight = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.float64)
    moves = None if work.augment == "none" else index.new_zeros(*shape, 3)
    for m, group in rows.items():
        members = [clients[row] for row in group]
        orders, ones = work.orders(k, members), torch.ones(1, work.epochs, m, dtype=torch.float64)
        samples = torch.stack([work.parts[n] for n in members])
        t = steps[group[0]]
        index[:t, group] = _in_batches(samples.gather(1, orders.flatten(1)).view_as(orders), size)
        weight[:t, group] = F.normalize(_in_batches(ones, size), p=1, dim=-1)
        if moves is not None and (drawn := work.moves(k, members)) is not None:
            moves[:t, group] = _in_batches(drawn, size)
    return Schedule(index, weight, (weight > 0).sum(-1), steps, work.lr_in_round(k), work.scale(k), moves)


def _in_batches(of_epochs: Tensor, size: int) -> Tensor:
    """Split epochs of N clients (N, E, m, ...) into batches (T, N, size, ...); a short batch is padded with zeros."""
    n, epochs, m, *rest = of_epochs.shape
    padded = of_epochs.new_zeros(n, epochs, -(-m // size) * size, *rest)
    padded[:, :, :m] = of_epochs
    return padded.view(n, -1, size, *rest).transpose(0, 1)


class Worker:
    """Memory of N clients, and a round of training in it. On a GPU the step is captured once and replayed."""

    def __init__(self, work: LocalTraining, precision: str, n: int):
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
        self.scaling = work.data.scaling(self.device)  # a captured graph may not copy it from the host
        self.index = torch.zeros(n, b, dtype=torch.int64, device=self.device)
        self.weight = torch.zeros(n, b, dtype=master, device=self.device)
        moving = work.augment != "none"
        self.moves = torch.zeros(n, b, 3, dtype=torch.int64, device=self.device) if moving else None
        self.loss = torch.zeros(n, dtype=master, device=self.device)
        self.entries = sum(p[0].numel() for p in self.p.values())
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.exact_batches = False  # whether batches must have no padding
        self.has_kernels = False  # whether a step launches our kernels

    def __call__(self, state: ModelState, plan: Schedule, clients: list[int]) -> Upload:
        sizes, steps = plan.active, torch.tensor(plan.steps, device=self.device)
        self._set_lr(plan.lr)
        with _current_device(self.device), float32_matmul(self.tf32), _deterministic_cudnn(), threads_for(self.entries):
            if self.device.type == "cuda" and not self.exact_batches:
                sizes = [_graph_size(m, len(clients)) for m in sizes]
                self._capture(state, plan, sizes)
            self.load_state(state)
            for t, m in enumerate(sizes):
                self.load_batches(plan, t)
                if self.exact_batches:
                    self.step_in_groups(plan.groups(t))
                elif self.graphs:
                    self.graphs[m].replay()
                else:
                    self.step(m)
        m = len(clients)
        rows = torch.cat([p[:m].reshape(m, -1) for p in self.p.values()], 1)
        update = torch.sub(state.w, rows, out=rows).mul_(plan.scale)
        stats = torch.cat([rows[:, :0], *(s[:m].reshape(m, -1) for s in self.stats.values())], 1)
        return Upload(torch.tensor(clients), update, moments(stats, self.norms), self.loss[:m] / steps)

    @torch.no_grad()
    def load_state(self, state: ModelState) -> None:
        """Copy the broadcast model to every client."""
        for tensors, layout, flat in ((self.p, self.layout, state.w), (self.stats, self.norms, state.stats)):
            for t, part in zip(tensors.values(), layout.split(flat), strict=True):
                t.copy_(part.view(t.shape[1:]).expand_as(t))
        self.loss.zero_()

    def load_batches(self, plan: Schedule, t: int) -> None:
        """Copy the batches of step t to the memory that the step reads."""
        n = plan.index.shape[1]
        self.index[:n].copy_(plan.index[t])
        self.weight[:n].copy_(plan.weight[t])
        if self.moves is not None and plan.moves is not None:
            self.moves[:n].copy_(plan.moves[t])

    def inputs(self, m: int) -> Tensor:
        """Return the batches of the first m clients as inputs of the module: (m, B, ...)."""
        x = self.work.data.train.x[self.index[:m]]
        x = x if self.moves is None else crop_flip(x, self.moves[:m])
        return self.work.data.inputs(x, self.dtype, self.scaling)

    def step(self, m: int) -> None:
        """Take one local step of the first m clients, on the samples of `index`."""
        raise NotImplementedError

    def step_in_groups(self, groups: list[tuple[int, list[int]]]) -> None:
        """Take one local step of the clients in `groups`, (samples, rows) each, without padding."""
        raise NotImplementedError

    def _set_lr(self, lr: float) -> None:
        """Set the learning rate; a captured graph holds the earlier one as a constant."""
        if lr != self.lr and self.graphs:
            torch.cuda.synchronize()
            self.graphs.clear()
        self.lr = lr

    def _capture(self, state: ModelState, plan: Schedule, sizes: list[int]) -> None:
        """Warm up on a separate stream, then capture the missing graphs; the next `load_state` undoes their steps."""
        missing = sorted(set(sizes) - self.graphs.keys(), reverse=True)
        if self.has_kernels and missing:
            self._compile()
        for m in missing:  # the largest allocates for all
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

    def _compile(self) -> None:
        """Compile the kernels of a step for one client: the kernels do not depend on the number of clients."""
        from stableair.engine.launch import compile_in_parallel

        compile_in_parallel(lambda: self.step(1))


def _graph_size(m: int, n: int) -> int:
    """Return the smallest of n, 3/4 n, n/2, 3/8 n, ... that is at least m: few graphs, and little padding."""
    sizes = [-(-n * share // 64) for share in (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)]
    return min(size for size in sizes if size >= m)


class StackedWorker(Worker):
    """A worker for any stacked or vmapped module. A client whose samples all have weight zero stays unchanged."""

    def __init__(self, work: LocalTraining, precision: str, n: int, program: Stacked | Vmapped):
        super().__init__(work, precision, n)
        self.program = program
        sizes = set(work.sizes)
        full = len(sizes) == 1 and not sizes.pop() % work.largest_batch  # whether every batch is full
        self.masked = isinstance(program, Stacked) and program.mixes_samples and not full
        self.exact_batches = isinstance(program, Vmapped) and program.mixes_samples
        self.fixed: Tensors = {}  # counters and masks, one copy per client: a vmapped program may change them
        if isinstance(program, Vmapped):
            buffers = {name: b for name, b in work.module.named_buffers() if name not in self.norms.names}
            self.fixed = {name: b.expand(n, *b.shape).clone() for name, b in buffers.items()}
        self.learning = [name for name, p in work.module.named_parameters() if p.requires_grad]
        self.rule = None if work.rule == PLAIN_SGD else StackedRule(work.rule, self.learning)
        if program.has_convolutions:
            self.entries = SMALL  # convolutions use all threads
        self.has_kernels = program.has_kernels
        self.operands = {} if self.rule else self._kernel_weights()

    def _kernel_weights(self) -> Tensors:
        """Store weights with kernel steps in the kernels' layout; return their copies in the products' precision."""
        operands = {}
        for layer, fused in self.program.fused.items():
            if fused.by_kernels:
                name = f"{layer}.weight"
                p = self.p[name]
                if p.ndim == 5:  # of a convolution: (N, O, C, K, K), in memory (N, O, K, K, C)
                    n, o, c, *kernel = p.shape
                    self.p[name] = p.new_empty(n, o, *kernel, c).movedim(-1, 2)
                if self.dtype != p.dtype:
                    operands[name] = torch.empty_like(self.p[name], dtype=self.dtype)
        return operands

    @torch.no_grad()
    def load_state(self, state: ModelState) -> None:
        super().load_state(state)
        for name, operand in self.operands.items():
            operand.copy_(self.p[name])
        for name, copies in self.fixed.items():
            copies.copy_(self.work.module.get_buffer(name).expand_as(copies))
        if self.rule:
            self.rule.restart(self.p)

    def step(self, m: int) -> None:
        p = {name: t[:m] for name, t in self.p.items()}
        buffers = {name: t[:m] for name, t in (self.stats | self.fixed).items()}
        loss = self._local_step(p, buffers, self.inputs(m), self.index[:m], self.weight[:m], slice(m))
        self.loss[:m].add_(loss)

    def step_in_groups(self, groups: list[tuple[int, list[int]]]) -> None:
        inputs = self.inputs(len(self.index))
        for samples, rows in groups:
            chosen = torch.tensor(rows, device=self.device)
            stacks = [{name: t[chosen] for name, t in group.items()} for group in (self.p, self.stats, self.fixed)]
            p, stats, fixed = stacks
            x, index, weight = (t[chosen, :samples] for t in (inputs, self.index, self.weight))
            self.loss[chosen] += self._local_step(p, stats | fixed, x, index, weight, chosen)
            with torch.no_grad():
                for group, trained in zip((self.p, self.stats, self.fixed), stacks, strict=True):
                    for name, t in group.items():
                        t[chosen] = trained[name]

    def _local_step(
        self, p: Tensors, buffers: Tensors, x: Tensor, index: Tensor, weight: Tensor, rows: slice | Tensor
    ) -> Tensor:
        """Take one local step on the stacks of the clients in these rows, in place; return the clients' losses (N,)."""
        p = {name: t.requires_grad_(name in self.learning) for name, t in p.items()}
        taps = Taps({name: t[rows] for name, t in self.operands.items()})
        y = self.work.data.train.y[index]
        loss = self._loss(p, buffers, x, y, weight, None if self.rule else taps)  # a rule needs the gradients
        learned = [p[name] for name in self.learning]
        targets: list[Any] = [*learned, *(tap.output for tap in taps)]
        grads = torch.autograd.grad(loss.sum(), targets, allow_unused=True)  # None where the loss does not depend on it
        slopes, outputs = grads[: len(learned)], grads[len(learned) :]
        with torch.no_grad():
            if self.rule:
                pairs = zip(self.learning, learned, slopes, strict=True)
                gradients = {name: torch.zeros_like(t) if slope is None else slope for name, t, slope in pairs}
                self.rule.step(p, gradients, self.lr, (weight > 0).any(1), rows)
                return loss.detach()
            moving = [(t, slope) for t, slope in zip(learned, slopes, strict=True) if slope is not None]
            torch._foreach_add_([t for t, _ in moving], [slope for _, slope in moving], alpha=-self.lr)
            for tap, dy in zip(taps, outputs, strict=True):
                if dy is not None:
                    tap.step(p[tap.weight], dy, self.lr, taps.operands.get(tap.weight))
        return loss.detach()

    def _loss(
        self, parameters: Tensors, buffers: Tensors, x: Tensor, y: Tensor, weight: Tensor, taps: Taps | None
    ) -> Tensor:
        """Compute each client's mean loss over its batch: (N,)."""
        mask = (weight > 0).to(weight.dtype) if self.masked else None
        logits = self.program(parameters, buffers, x, mask, taps).to(weight.dtype)
        smoothing = self.work.label_smoothing
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none", label_smoothing=smoothing)
        return (each.view_as(weight) * weight).sum(1)


def _current_device(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` the current one: streams, graphs and kernels belong to the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _deterministic_cudnn() -> Iterator[None]:
    """Sum in a fixed order, so that a resumed run equals an uninterrupted one."""
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
