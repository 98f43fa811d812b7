"""The fast engine, a leaf: `accelerate` gives an equal simulation with faster callables."""

import copy
import os
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stableair.algorithm import Simulation
from stableair.checks import InputError, choice
from stableair.choices import PRECISIONS
from stableair.engine.processes import ProcessTrainer
from stableair.engine.stacked import Stacked, Unsupported
from stableair.engine.trainer import StackedTrainer
from stableair.engine.vmapped import Vmapped, check_samples_apart, perturbed
from stableair.evaluation import Evaluate
from stableair.local import SMALL, Reference, float32_matmul

__all__ = ["Choice", "Unsupported", "accelerate", "choose"]

LARGE = 10_000_000  # entries from which a CPU's threads work together better on one client than each on its own
WORTH = 10_000_000_000  # entries times local steps in a run that repay the seconds it takes to start the processes
FEW = 50  # local steps of a client below which handing its update over takes longer than the steps
CLIENTS = 50  # to stack on a CPU; more gain nothing


class Choice(NamedTuple):
    """How a run is computed, and why so; a resumed run is computed the same way."""

    engine: str  # "reference", "stacked", "vmapped", "kernels" or "processes"
    precision: str
    chunk: int
    why: str


CANNOT = "engine fast cannot take this model: {}; engine=auto takes the next best, in fp32"
WHY = {
    "kernels": "kernels of our own for this network",
    "stacked": "the clients' models stacked",
    "vmapped": "the clients' models vmapped",
    "reference": "one client after the other",
}


def choose(sim: Simulation, engine: str, precision: str = "auto", chunk: int = 0, rounds: int = 1) -> Choice:
    """The fastest engine for the model and the device, or the one that is asked for; bench/RECORDS.md has the times."""
    if sim.start.w.device.type == "cpu":
        if precision not in ("auto", "fp32"):
            raise InputError(f"precision must be fp32 on a CPU: got {precision}")
        return _on_cpu(sim, engine, chunk, rounds)
    return _on_gpu(sim, engine, precision, chunk)


def _on_gpu(sim: Simulation, engine: str, precision: str, chunk: int) -> Choice:
    try:
        program = _program(sim)
    except Unsupported as obstacle:
        if engine == "fast" or precision not in ("auto", "fp32"):
            raise InputError(CANNOT.format(obstacle)) from None
        return Choice("reference", "fp32", min(chunk or sim.train.chunk, sim.n), str(obstacle))
    kind, why = _name(program), ""
    if precision == "auto":  # what is shown to train as well as fp32
        fit = kind == "stacked" and program.convolves and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if fit else "fp32"
    if precision == "bf16" and kind == "stacked" and has_kernels(sim):  # what stacks has the convolutions we know
        why = _trouble(sim.start.w.device)
        kind = kind if why else "kernels"
    return Choice(kind, precision, min(chunk or _fitting(sim), sim.n), f"{WHY[kind]}, on a GPU{why}")


def _trouble(device: torch.device) -> str:
    """Why the kernels do not run on a device, where they do not: no compiler, too little shared memory, ..."""
    from stableair.engine.resnet import try_kernels

    try:
        try_kernels(device)
    except Exception as error:  # whatever Triton and its compiler raise
        return f"; our kernels do not run on it: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def _program(sim: Simulation) -> Stacked | Vmapped:
    """The model for many clients at once: stacked where that can be, else vmapped."""
    try:
        return _tried(Stacked, sim)
    except Unsupported as first:
        try:
            return _tried(Vmapped, sim)
        except Unsupported as second:
            raise Unsupported(f"{first}; and {second}") from None


def _tried(kind: type, sim: Simulation) -> Stacked | Vmapped:
    """The program of that kind, if for two clients and a few samples it gives what the module itself gives."""
    work = sim.train.work
    data, module = work.data, work.module
    samples = data.inputs(data.train.x[: max(3, work.largest_batch)]).to(sim.start.w.dtype)
    try:
        with float32_matmul():
            same = _same(kind(copy.deepcopy(module)), module, samples)
        if kind is Vmapped:
            check_samples_apart(module, samples)
    except Unsupported:
        raise
    except Exception as error:  # whatever a module's own code does with tensors of another shape
        said = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise Unsupported(f"{kind.__name__.lower()} it fails: {said}") from error
    if not same:
        raise Unsupported(f"{kind.__name__.lower()} it gives something else, or other gradients")
    return kind(module)


def _same(program: Stacked | Vmapped, module: nn.Module, samples: Tensor) -> bool:
    """Whether two clients with different weights get the outputs and gradients that the module gives them.

    Tried on copies, whose buffers may move.
    """
    if any(p._backward_hooks for p in module.parameters()):
        return False  # a copy of the module would not have them
    clients = [copy.deepcopy(module).train(), perturbed(module)]
    names = [name for name, b in module.named_buffers() if b.is_floating_point()]
    buffers = {name: torch.stack([c.get_buffer(name) for c in clients]) for name in names}
    own = {
        name: torch.stack([c.get_parameter(name).detach() for c in clients]) for name, _ in module.named_parameters()
    }
    learning = [own[name].requires_grad_() for name, p in module.named_parameters() if p.requires_grad]
    got, expected = program(own, buffers, samples.expand(2, *samples.shape)), torch.stack([c(samples) for c in clients])
    weights = torch.linspace(-1, 1, got.numel(), dtype=got.dtype, device=got.device).view_as(got)
    pairs = [(got, expected), *zip(
        torch.autograd.grad((got * weights).sum(), learning, materialize_grads=True),
        _gradients((expected * weights).sum(), clients),
        strict=True,
    )]  # fmt: skip
    apart, size = (
        sum(t.square().sum() for t in ts).sqrt() for ts in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    return got.shape == expected.shape and bool(apart <= 0.02 * size + 1e-6)


def _gradients(loss: Tensor, clients: list[nn.Module]) -> list[Tensor]:
    """The gradients of what learns in each of them, side by side."""
    each = [[p for p in client.parameters() if p.requires_grad] for client in clients]
    flat = torch.autograd.grad(loss, [p for ps in each for p in ps], materialize_grads=True)
    return [torch.stack(pair) for pair in zip(flat[: len(each[0])], flat[len(each[0]) :], strict=True)]


def _name(program: Stacked | Vmapped) -> str:
    return "stacked" if isinstance(program, Stacked) else "vmapped"


def _on_cpu(sim: Simulation, engine: str, chunk: int, rounds: int) -> Choice:
    entries, cores, loop = len(sim.start.w), _cores(), min(chunk or sim.train.chunk, sim.n)
    steps = sum(map(sim.train.work.steps, range(sim.n)))  # in a round
    if entries < SMALL:
        try:
            kind = _name(_program(sim))
        except Unsupported as obstacle:
            if engine == "fast":
                raise InputError(CANNOT.format(obstacle)) from None
            return Choice("reference", "fp32", loop, str(obstacle))
        return Choice(kind, "fp32", min(chunk or CLIENTS, sim.n), f"a small model, {WHY[kind]}")
    worth = entries < LARGE and steps >= FEW * sim.n and rounds * steps * entries > WORTH
    if cores > 1 and (engine == "fast" or worth):
        return Choice("processes", "fp32", loop, f"one process on each of {cores} cores")
    if engine == "fast":
        raise InputError(
            "engine fast has nothing for a model of this size on a single core; engine=auto takes the loop"
        )
    return Choice("reference", "fp32", loop, WHY["reference"])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fitting(sim: Simulation) -> int:
    """How many clients fit into the free memory of the GPU; a first guess, halved when it proves too large."""
    free, _ = torch.cuda.mem_get_info(sim.start.w.device)
    each = 4 * len(sim.start.w) * 12  # weights, gradients, what is sent, and about as much again for activations
    return max(1, int(0.6 * free) // each)


def accelerate(sim: Simulation, how: Choice | None = None) -> Simulation:
    """An equal simulation whose clients train side by side."""
    if not isinstance(sim.train, Reference):
        raise InputError("accelerate needs a simulation with the reference trainer")
    how = how or choose(sim, "fast")
    choice("precision", how.precision, PRECISIONS)
    plain = replace(sim.train, chunk=how.chunk)
    match how.engine:
        case "reference":
            return replace(sim, train=plain)
        case "processes":
            return replace(sim, train=ProcessTrainer(plain, min(_cores(), how.chunk)))
    by_hand = how.engine == "kernels"
    if by_hand and (how.precision != "bf16" or not has_kernels(sim)):
        raise InputError("engine kernels is for our ResNets with batch norm, in bf16, and needs Triton")
    program = _tried(Vmapped if how.engine == "vmapped" else Stacked, sim)
    train = StackedTrainer(plain.work, program, how.precision, how.chunk, by_hand)
    fast = replace(sim, train=train)
    if isinstance(sim.evaluate, Evaluate):
        fast = replace(fast, evaluate=replace(sim.evaluate, precision=how.precision))
    return fast


def has_kernels(sim: Simulation) -> bool:
    """Whether there are kernels of our own for the model."""
    if not find_spec("triton"):
        return False
    from stableair.engine.resnet import supports

    return supports(sim.train.work.module)
