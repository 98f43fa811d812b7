"""The fast engine, a leaf: `accelerate` gives an equal simulation with faster callables."""

import copy
import math
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from stableair.algorithm import Simulation
from stableair.checks import InputError, typed
from stableair.checks import choice as check_choice
from stableair.choices import PRECISIONS
from stableair.contracts import Trainer, Work
from stableair.engine.processes import ProcessTrainer
from stableair.engine.stacked import Stacked, Tap, Tensors, Unsupported, stacked_layer
from stableair.engine.trainer import StackedTrainer
from stableair.engine.vmapped import Vmapped, check_samples_apart, perturbed
from stableair.engine.worker import taps_dense
from stableair.evaluation import Averaged, Evaluate
from stableair.local import SMALL, Reference, float32_matmul

__all__ = ["KINDS", "EngineChoice", "Unsupported", "accelerate", "choose", "stacked_layer", "trainer_of"]

KINDS = "reference", "stacked", "vmapped", "kernels", "processes"  # what `auto` and `fast` choose from
LOOPS = "reference", "processes"  # those of them that go through the reference's code

CPU_CHUNK = 50  # clients to stack on a CPU; more gain nothing
# When processes gain something on a CPU.
PROCESSES_MAX_ENTRIES = 10_000_000  # from here on the threads work better together on one client than each on its own
PROCESSES_MIN_WORK = 10_000_000_000  # entries times local steps in a run that repay the seconds it takes to start them
PROCESSES_MIN_STEPS = 50  # of a client in a round; below, handing its update over takes longer than the steps

CANNOT_ACCELERATE = "engine fast cannot take this model: {}; engine=auto takes the next best, in fp32"
REASONS = {
    "kernels": "kernels of our own for its convolutions",
    "stacked": "the clients' models stacked",
    "vmapped": "the clients' models vmapped",
    "reference": "one client after the other",
}


class EngineChoice(NamedTuple):
    """How a run is computed, and why so; a resumed run is computed the same way."""

    engine: str  # one of KINDS
    precision: str
    chunk: int
    why: str


def trainer_of(sim: Simulation) -> Trainer:
    """The trainer of a simulation, which says what the clients compute; a plain function does not."""
    train = sim.train
    if not isinstance(getattr(train, "work", None), Work) or not isinstance(getattr(train, "chunk", None), int):
        raise InputError(f"an engine needs a trainer with its work and its chunk: got {type(train).__name__}")
    return cast(Trainer, train)


def choose(sim: Simulation, engine: str, precision: str = "auto", chunk: int = 0, rounds: int = 1) -> EngineChoice:
    """The fastest engine for the model and the device, or the one that is asked for; bench/RECORDS.md has the times."""
    if sim.start.w.device.type == "cpu":
        if precision not in ("auto", "fp32"):
            raise InputError(f"precision must be fp32 on a CPU: got {precision}")
        return _choose_on_cpu(sim, engine, chunk, rounds)
    return _choose_on_gpu(sim, engine, precision, chunk)


def _choose_on_gpu(sim: Simulation, engine: str, precision: str, chunk: int) -> EngineChoice:
    try:
        program = _fastest_program(sim)
    except Unsupported as obstacle:
        if engine == "fast" or precision not in ("auto", "fp32"):
            raise InputError(CANNOT_ACCELERATE.format(obstacle)) from None
        return EngineChoice("reference", "fp32", min(chunk or trainer_of(sim).chunk, sim.n), str(obstacle))
    kind, failure = _kind_of(program), ""
    if precision == "auto":  # what is shown to train as well as fp32
        gains = kind == "stacked" and program.has_convolutions
        precision = "bf16" if gains and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if precision == "bf16" and _has_kernels(program):
        failure = _kernel_failure(sim)
        kind = "stacked" if failure else "kernels"
    chunk = min(chunk or _clients_that_fit(sim), sim.n)
    return EngineChoice(kind, precision, chunk, f"{REASONS[kind]}, on a GPU{failure}")


def _has_kernels(program: Stacked | Vmapped) -> bool:
    """Whether kernels of our own compute all of a program, or convolutions of it."""
    if not isinstance(program, Stacked) or not find_spec("triton"):
        return False
    from stableair.engine.convolution import taken

    return bool(taken(program))


def _kernel_failure(sim: Simulation) -> str:
    """Why the kernels do not run on a device, where they do not: no compiler, too little shared memory, ..."""
    from stableair.engine.convolution import try_kernels

    try:
        try_kernels(sim.start.w.device)
        if not _is_resnet(sim):
            _by_kernels(sim)
    except Exception as error:  # whatever Triton and its compiler raise
        return f"; our kernels do not run on it: {type(error).__name__}: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _fastest_program(sim: Simulation) -> Stacked | Vmapped:
    """The model for many clients at once: stacked where that can be, else vmapped."""
    try:
        return _checked_program(Stacked, sim)
    except Unsupported as first:
        try:
            return _checked_program(Vmapped, sim)
        except Unsupported as second:
            raise Unsupported(f"{first}; and {second}") from None


def _program_of(engine: str, sim: Simulation) -> Stacked | Vmapped:
    """What an engine that trains clients side by side computes; `Unsupported` if it cannot."""
    if engine != "kernels":
        return _checked_program(Vmapped if engine == "vmapped" else Stacked, sim)
    if not _has_kernels(Stacked(trainer_of(sim).work.module)):
        raise Unsupported("it has no convolution that our kernels compute, or there is no Triton")
    return _checked_program(Stacked, sim) if _is_resnet(sim) else _by_kernels(sim)


def _is_resnet(sim: Simulation) -> bool:
    """Whether there are kernels for every layer of the model."""
    from stableair.engine.resnet import supports

    return supports(trainer_of(sim).work.module)


def _by_kernels(sim: Simulation) -> Stacked | Vmapped:
    """The stacked model with its convolutions by the kernels, tried as it will run: what is compiled is used again."""
    from stableair.engine.convolution import by_kernels

    rounded = sim.start.w.is_cuda  # elsewhere they are interpreted, which knows no bfloat16
    return _checked_program(lambda module: by_kernels(Stacked(module)), sim, rounded)


def _checked_program(
    make: Callable[[nn.Module], Stacked | Vmapped], sim: Simulation, rounded: bool = False
) -> Stacked | Vmapped:
    """The module's program, if for two clients and a few samples it gives what the module itself gives.

    A program that is `rounded`, computed in bfloat16, need only come near it.
    """
    work = trainer_of(sim).work
    data, module = work.data, work.module
    way = "vmapped" if make is Vmapped else "stacked"
    samples = data.inputs(data.train.x[: max(3, work.largest_batch)]).to(sim.start.w.dtype)
    try:
        with float32_matmul():
            program = make(copy.deepcopy(module))
            same = _matches_module(program, module, samples, rounded=rounded)
            if program.has_user_layers and len(samples) > 1:  # ours are known to leave out a place without a sample
                same = same and _matches_module(program, module, samples, missing=1, rounded=rounded)
        if isinstance(program, Vmapped):
            check_samples_apart(module, samples)
    except Unsupported:
        raise
    except Exception as error:  # whatever a module's own code does with tensors of another shape
        raise Unsupported(f"{way} it fails: {_first_line(error).partition('. ')[0]}") from error
    if not same:
        raise Unsupported(f"{way} it gives something else, or other gradients")
    return make(module)


def _matches_module(
    program: Stacked | Vmapped, module: nn.Module, samples: Tensor, missing: int = 0, rounded: bool = False
) -> bool:
    """Whether two clients with different weights get the outputs and gradients that the module gives them.

    Tried on copies, whose buffers may move, with dense layers tapped where they will be. The last `missing` places hold
    no sample.
    """
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters()):
        return False  # a copy of the module would not have them
    clients = [copy.deepcopy(module).train(), perturbed(module)]
    names = [name for name, b in module.named_buffers() if b.is_floating_point()]
    buffers = {name: torch.stack([c.get_buffer(name) for c in clients]) for name in names}
    own = {
        name: torch.stack([c.get_parameter(name).detach() for c in clients]) for name, _ in module.named_parameters()
    }
    learning = {name: own[name].requires_grad_() for name, p in module.named_parameters() if p.requires_grad}
    taps: list[Tap] = []
    there = len(samples) - missing
    mask = None
    if missing and program.mixes_samples:
        mask = samples.new_ones(2, len(samples))
        mask[:, there:] = 0
    inputs = samples.expand(2, *samples.shape).to(torch.bfloat16 if rounded else samples.dtype)
    got = program(own, buffers, inputs, mask, taps if taps_dense(samples.device) else None)[:, :there].to(samples.dtype)
    expected = torch.stack([c(samples[:there]) for c in clients])
    weights = torch.linspace(-1, 1, got.numel(), dtype=got.dtype, device=got.device).view_as(got)
    pairs = [(got, expected), *zip(
        _tapped_gradients((got * weights).sum(), learning, taps),
        _gradients((expected * weights).sum(), clients),
        strict=True,
    )]  # fmt: skip
    distance, size = _norm([a - b for a, b in pairs]), _norm([b for _, b in pairs])
    return got.shape == expected.shape and distance <= (0.5 if rounded else 0.02) * size + 1e-6


def _tapped_gradients(loss: Tensor, learning: Tensors, taps: list[Tap]) -> list[Tensor]:
    """The gradients of what learns, those of tapped layers made of their taps."""
    wanted: list[Any] = [*learning.values(), *(tap.output for tap in taps)]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    slopes, outputs = found[: len(learning)], found[len(learning) :]
    each = zip(learning.items(), slopes, strict=True)
    grads = {name: torch.zeros_like(t) if slope is None else slope for (name, t), slope in each}
    for tap, dy in zip(taps, outputs, strict=True):
        if dy is not None:
            grads[tap.weight] = grads[tap.weight] + (dy.mT @ tap.x).to(grads[tap.weight].dtype)
    return list(grads.values())


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(t.square().sum().item() for t in tensors))


def _gradients(loss: Tensor, clients: list[nn.Module]) -> list[Tensor]:
    """The gradients of what learns in each of them, side by side."""
    each = [[p for p in client.parameters() if p.requires_grad] for client in clients]
    flat = torch.autograd.grad(loss, [p for ps in each for p in ps], materialize_grads=True)
    return [torch.stack(pair) for pair in zip(flat[: len(each[0])], flat[len(each[0]) :], strict=True)]


def _kind_of(program: Stacked | Vmapped) -> str:
    return "stacked" if isinstance(program, Stacked) else "vmapped"


def _choose_on_cpu(sim: Simulation, engine: str, chunk: int, rounds: int) -> EngineChoice:
    train = trainer_of(sim)
    entries, cores, loop = len(sim.start.w), _cores(), min(chunk or train.chunk, sim.n)
    steps = sum(map(train.work.steps, range(sim.n)))  # in a round
    if entries < SMALL:
        try:
            kind = _kind_of(_fastest_program(sim))
        except Unsupported as obstacle:
            if engine == "fast":
                raise InputError(CANNOT_ACCELERATE.format(obstacle)) from None
            return EngineChoice("reference", "fp32", loop, str(obstacle))
        return EngineChoice(kind, "fp32", min(chunk or CPU_CHUNK, sim.n), f"a small model, {REASONS[kind]}")
    worth_it = (
        entries < PROCESSES_MAX_ENTRIES
        and steps >= PROCESSES_MIN_STEPS * sim.n
        and rounds * steps * entries > PROCESSES_MIN_WORK
    )
    if cores > 1 and (engine == "fast" or worth_it):
        return EngineChoice("processes", "fp32", loop, f"one process on each of {cores} cores")
    if engine == "fast":
        raise InputError(
            "engine fast has nothing for a model of this size on a single core; engine=auto takes the loop"
        )
    return EngineChoice("reference", "fp32", loop, REASONS["reference"])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _clients_that_fit(sim: Simulation) -> int:
    """How many clients fit into the free memory of the GPU; a first guess, halved when it proves too large."""
    free, _ = torch.cuda.mem_get_info(sim.start.w.device)
    each = 4 * len(sim.start.w) * 12  # weights, gradients, what is sent, and about as much again for activations
    return max(1, int(0.6 * free) // each)


@typed
def accelerate(sim: Simulation, choice: EngineChoice | None = None) -> Simulation:
    """An equal simulation whose clients train side by side: the same work in the hands of another trainer."""
    work = trainer_of(sim).work
    choice = choice or choose(sim, "fast")
    kind, precision, chunk, _ = choice
    check_choice("engine", kind, KINDS)
    check_choice("precision", precision, PRECISIONS)
    if kind in LOOPS and precision != "fp32":
        raise InputError(f"engine {kind} computes in fp32: got precision {precision}")
    if kind == "kernels" and precision != "bf16":
        raise InputError(f"engine kernels computes in bf16: got precision {precision}")
    if kind == "reference":
        fast = replace(sim, train=Reference(work, chunk))
    elif kind == "processes":
        fast = replace(sim, train=ProcessTrainer(work, chunk, min(_cores(), chunk)))
    else:
        try:
            program = _program_of(kind, sim)
        except Unsupported as obstacle:
            raise Unsupported(f"engine {kind} cannot take this model: {obstacle}") from None
        resnet = kind == "kernels" and _is_resnet(sim)
        fast = replace(sim, train=StackedTrainer(work, program, precision, chunk, resnet))
    if isinstance(sim.evaluate, Evaluate | Averaged):
        fast = replace(fast, evaluate=sim.evaluate.at(precision))
    return fast
