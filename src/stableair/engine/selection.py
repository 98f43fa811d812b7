"""Choice of the engine of a simulation: a function of the model and the device, never of the seed."""

import gc
import logging
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple, cast, get_args

import torch

from stableair import vector
from stableair.algorithm import Simulation
from stableair.contracts import holds_tokens
from stableair.engine.equivalence import Program, check_kernels, checked_program, mixes_samples
from stableair.engine.inspection import check_pure, check_separable
from stableair.engine.processes import ProcessTrainer, available_cores
from stableair.engine.stacked import Stacked, Unsupported
from stableair.engine.stacked_rule import check_rule
from stableair.engine.trainer import StackedTrainer
from stableair.engine.vmapped import Vmapped
from stableair.errors import InputError, first_line
from stableair.evaluation import Evaluate
from stableair.isolation import isolated
from stableair.literals import Precision
from stableair.training.local_rules import PLAIN_SGD
from stableair.training.local_training import LocalTraining, Trainer
from stableair.training.reference import SMALL, Reference
from stableair.validation import choice as check_choice
from stableair.validation import typed
from stableair.vector import Layout

log = logging.getLogger("stableair")

ENGINES = "reference", "stacked", "vmapped", "kernels", "processes"  # the choices of `auto` and `fast`
REFERENCE_ENGINES = "reference", "processes"  # engines that run the reference trainer

CPU_CHUNK = 50  # clients to stack on a CPU; more clients are not faster
# Processes are faster on a CPU within these limits.
PROCESSES_MAX_ENTRIES = 10_000_000  # larger models: all threads on one client are faster than one client per thread
PROCESSES_MIN_WORK = 10_000_000_000  # entries times local steps of a run; below, starting processes takes longer
PROCESSES_MIN_STEPS = 50  # local steps of a client in a round; below, sending its update takes longer than the steps

CANNOT_ACCELERATE = "no fast engine supports this model: {}; engine=auto precision=auto uses the reference engine"
KERNELS_FAIL = "our kernels do not run on it: {}: {}"
REASONS = {
    "kernels": "Triton kernels for its convolutions",
    "stacked": "the clients are trained together",
    "vmapped": "the clients are trained together with torch.vmap",
    "reference": "one client after the other",
}
SLOW = "engine=auto has no fast engine for this model and trains one client after the other: %s"

TOO_LARGE = "use a GPU, or a model with fewer than 10 million parameters, such as model=cnn"


@dataclass(frozen=True, eq=False, repr=False)
class CheckedEngine:
    """An engine that was verified against the reference for one local training."""

    engine: str
    work: LocalTraining
    program: Program | None  # None for an engine that runs the reference trainer


class EngineChoice(NamedTuple):
    """How a run is computed, and why; a resumed run keeps the choice."""

    engine: str  # one of ENGINES
    precision: str
    chunk: int  # clients that are computed at once
    why: str  # reason for the choice
    checked: CheckedEngine | None = None  # engine that `choose` has verified, so that `accelerate` need not repeat it

    def record(self) -> dict[str, Any]:
        """Return the choice in the form that is recorded with a run."""
        return {name: value for name, value in self._asdict().items() if name != "checked"}


def reference_trainer(sim: Simulation) -> Trainer:
    """Return the trainer of a simulation; an engine needs its `work` and `chunk`, which a plain function lacks."""
    train = sim.train
    has_work = isinstance(getattr(train, "work", None), LocalTraining)
    if not has_work or not isinstance(getattr(train, "chunk", None), int):
        text = f"an engine needs a trainer with its work and its chunk: got {type(train).__name__}"
        raise InputError(text, code="wrong-type", name="train", value=train)
    return cast(Trainer, train)


@isolated()
def choose(sim: Simulation, engine: str, precision: str = "auto", chunk: int = 0, rounds: int = 1) -> EngineChoice:
    """Choose the fastest engine for the model and the device; bench/RECORDS.md has the times.

    Args:
        sim: The simulation, on its device.
        engine: "auto", or "fast" to refuse a model that only the reference can train.
        precision: "auto", "fp32", "tf32" or "bf16".
        chunk: Clients to compute at once; 0: a number that fits into the memory.
        rounds: Number of rounds: on a CPU, worker processes are faster for long runs only.

    Raises:
        InputError: No engine supports the requested precision or model.
    """
    if sim.start.model.w.device.type == "cpu":
        if precision not in ("auto", "fp32"):
            text = f"precision must be fp32 on a CPU: got {precision}"
            raise InputError(text, code="unsupported-precision", name="precision", value=precision)
        return _choose_on_cpu(sim, engine, chunk, rounds)
    return _choose_on_gpu(sim, engine, precision, chunk)


def _choose_on_gpu(sim: Simulation, engine: str, precision: str, chunk: int) -> EngineChoice:
    work = reference_trainer(sim).work
    try:
        program, note = fastest_program(work)
    except Unsupported as obstacle:
        requested = engine if precision in ("auto", "fp32") else "fast"
        return _reference_or_error(sim, requested, min(chunk or reference_trainer(sim).chunk, sim.n), obstacle)
    kind = _program_name(program)
    if precision == "auto":  # bf16 where it was shown to train as well as fp32
        gains = kind == "stacked" and program.has_convolutions and not holds_tokens(work.data.train.x)
        precision = "bf16" if gains and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if precision == "bf16":
        without = kernel_obstacle(program)
        note += f"; {without}" if without else ""
        if has_kernels(program):
            try:
                program, kind = _tried_kernel_program(work, program), "kernels"
            except Exception as error:  # Triton and its compiler raise many kinds
                note += f"; {KERNELS_FAIL.format(type(error).__name__, first_line(error))}"
    chunk = min(chunk or _clients_that_fit(sim), sim.n)
    checked = CheckedEngine(kind, work, program)
    return EngineChoice(kind, precision, chunk, f"{REASONS[kind]}, on a GPU{note}{_rule_note(work, kind)}", checked)


def fastest_program(work: LocalTraining) -> tuple[Program, str]:
    """Build the program for many clients at once: stacked if possible, otherwise vmapped.

    Returns:
        The program, and a note with the reason if it is not stacked.

    Raises:
        Unsupported: The module is not a pure function, or neither program matches it.
    """
    _check_side_by_side(work)
    try:
        return checked_program(Stacked, work), ""
    except Unsupported as stacked:
        try:
            return vmapped_program(work), f"; not stacked: {stacked}"
        except Unsupported as vmapped:
            raise Unsupported(f"stacked: {stacked}; vmapped: {vmapped}") from None


def _check_side_by_side(work: LocalTraining) -> None:
    """Check that the module and the local rule can be computed for many clients at once.

    Raises:
        Unsupported: The module is not a pure function, or the rule cannot be vmapped.
    """
    check_pure(work)
    if work.rule != PLAIN_SGD:
        check_rule(work.rule, vector.state(work.module).w)


def vmapped_program(work: LocalTraining) -> Program:
    """Build and check the vmapped program of a module."""
    return checked_program(partial(Vmapped, mixes_samples=mixes_samples(work)), work)


def has_kernels(program: Program) -> bool:
    """Whether our kernels support a convolution of a program."""
    if not isinstance(program, Stacked) or not find_spec("triton"):
        return False
    from stableair.engine.kernel_layers import kernel_convolutions

    return bool(kernel_convolutions(program))


def kernel_obstacle(program: Program) -> str:
    """Return why our kernels do not compute all convolutions of a program; "" if they do, or if it has none."""
    if not isinstance(program, Stacked) or not program.has_convolutions:
        return ""
    if not find_spec("triton"):
        return "no kernels: Triton is not installed"
    from stableair.engine.kernel_layers import other_convolutions

    layers = [f"layer {name} ({reason})" for name, reason in other_convolutions(program).items()]
    return f"no kernels for {', '.join(layers)}" if layers else ""


def _tried_kernel_program(work: LocalTraining, program: Program) -> Program:
    """Return the program with kernels; raise if there is no compiler, too little shared memory, or a wrong result."""
    from stableair.engine.kernel_layers import try_kernels

    try_kernels(work.parts[0].device)
    return _kernel_program(work, program)


def _kernel_program(work: LocalTraining, program: Program) -> Program:
    """Return the stacked program with layers computed by kernels, checked against the program without kernels."""
    from stableair.engine.kernel_layers import by_kernels

    assert isinstance(program, Stacked), "only convolutions of stacked programs have kernels"
    fast = by_kernels(program)
    check_kernels(work, program, fast, uses_fused_steps(work))
    return fast


def uses_fused_steps(work: LocalTraining) -> bool:
    """Whether kernels compute every layer of the model together with its step: for plain SGD on the cross entropy."""
    from stableair.engine.resnet import supports

    return work.is_plain and supports(work.module)


def _build_program(engine: str, work: LocalTraining) -> Program:
    """Build the program of an engine that trains several clients at once.

    Raises:
        Unsupported: The engine cannot compute this model.
    """
    _check_side_by_side(work)
    if engine == "vmapped":
        return vmapped_program(work)
    program = checked_program(Stacked, work)
    if engine == "stacked":
        return program
    if not has_kernels(program):
        raise Unsupported(kernel_obstacle(program) or "it has no convolution that our kernels compute")
    try:
        return _kernel_program(work, program)
    except Unsupported:
        raise
    except Exception as error:  # Triton and its compiler raise many kinds
        raise Unsupported(KERNELS_FAIL.format(type(error).__name__, first_line(error))) from error


def _rule_note(work: LocalTraining, kind: str) -> str:
    """Describe how an engine computes local steps other than plain SGD on the cross entropy; "" for plain SGD."""
    if work.rule == PLAIN_SGD:
        steps = ""
    elif work.rule.entrywise:
        steps = "; the local rule tensor by tensor"
    else:
        steps = "; the local rule vmapped"
    if kind == "kernels" and not work.is_plain:
        steps += "; no fused steps, which are for plain SGD without label smoothing"
    return steps


def _program_name(program: Program) -> str:
    return "stacked" if isinstance(program, Stacked) else "vmapped"


def _choose_on_cpu(sim: Simulation, engine: str, chunk: int, rounds: int) -> EngineChoice:
    train = reference_trainer(sim)
    entries, cores, loop = len(sim.start.model.w), available_cores(), min(chunk or train.chunk, sim.n)
    steps = sum(map(train.work.steps, range(sim.n)))  # in a round
    if entries < SMALL:
        try:
            program, note = fastest_program(train.work)
        except Unsupported as obstacle:
            return _reference_or_error(sim, engine, loop, obstacle)
        kind = _program_name(program)
        checked = CheckedEngine(kind, train.work, program)
        why = f"the model is small, so {REASONS[kind]}{note}{_rule_note(train.work, kind)}"
        return EngineChoice(kind, "fp32", min(chunk or CPU_CHUNK, sim.n), why, checked)
    worth_it = (
        entries < PROCESSES_MAX_ENTRIES
        and steps >= PROCESSES_MIN_STEPS * sim.n
        and rounds * steps * entries > PROCESSES_MIN_WORK
    )
    if cores > 1 and (engine == "fast" or worth_it):
        try:
            check_separable(train.work)
        except Unsupported as obstacle:
            return _reference_or_error(sim, engine, loop, obstacle)
        checked = CheckedEngine("processes", train.work, None)
        return EngineChoice("processes", "fp32", loop, f"one process on each of {cores} cores", checked)
    if engine == "fast":
        text = "engine=fast does not speed up a model of this size on a single core; set engine=auto"
        raise InputError(text, code="no-fast-engine")
    if entries >= PROCESSES_MAX_ENTRIES:
        reason = f"{entries / 1e6:.1f} million parameters on a CPU"
        _warn_once(f"{reason}; {TOO_LARGE}", sim.layout)
    else:
        reason = "a single core" if cores == 1 else "the run is too short for several processes"
    return EngineChoice("reference", "fp32", loop, f"{REASONS['reference']}: {reason}")


def _reference_or_error(sim: Simulation, engine: str, chunk: int, obstacle: Unsupported) -> EngineChoice:
    """Choose the reference engine because of an obstacle, with a warning; refuse engine=fast with an InputError."""
    if engine == "fast":
        raise InputError(CANNOT_ACCELERATE.format(obstacle), code="no-fast-engine") from None
    _warn_once(str(obstacle), sim.layout)
    return EngineChoice("reference", "fp32", chunk, str(obstacle))


@cache
def _warn_once(reason: str, model: Layout) -> None:
    """Warn that no fast engine supports a model: once per process, not in each run of a sweep."""
    log.warning(SLOW, reason)


def _clients_that_fit(sim: Simulation) -> int:
    """Estimate the number of clients that fit into the free memory of the GPU; the trainer halves it if necessary."""
    gc.collect()
    torch.cuda.empty_cache()  # free the memory of the trials
    free, _ = torch.cuda.mem_get_info(sim.start.model.w.device)
    each = 4 * len(sim.start.model.w) * 12  # weights, gradients, the update, and about as much again for activations
    return max(1, int(0.6 * free) // each)


@typed
@isolated()
def accelerate(sim: Simulation, choice: EngineChoice | None = None) -> Simulation:
    """Return an equivalent simulation that trains its clients with a fast engine.

    The engine is checked against the reference before it is used. It computes the same updates up to the rounding of
    its precision, and uses the same batches, fading and noise. [Engines and performance](../engine.md) describes the
    engines.

    Args:
        sim: A simulation from `build`.
        choice: Engine, precision and number of clients to train together; None: the fastest engine for this model.

    Returns:
        The simulation with another trainer; `sim` stays unchanged.

    Raises:
        InputError: No fast engine can compute this model (`no-fast-engine`), the engine or its precision is unsupported
            (`unsupported-precision`), or the trainer of `sim` is a plain function (`wrong-type`).

    >>> import stableair as sa
    >>> sim = sa.build(sa.Experiment(data="synthetic(samples=60)", model="mlp(width=4)", clients=3, device="cpu"))
    >>> type(sa.accelerate(sim).train).__name__
    'StackedTrainer'
    """
    work = reference_trainer(sim).work
    choice = choice or choose(sim, "fast")
    kind, precision, chunk, *_ = choice
    check_choice("engine", kind, ENGINES)
    check_choice("precision", precision, get_args(Precision))
    if kind in REFERENCE_ENGINES and precision != "fp32":
        text = f"engine {kind} computes in fp32: got precision {precision}"
        raise InputError(text, code="unsupported-precision", name="precision", value=precision)
    if kind == "kernels" and precision != "bf16":
        text = f"engine kernels computes in bf16: got precision {precision}"
        raise InputError(text, code="unsupported-precision", name="precision", value=precision)
    if precision == "bf16" and holds_tokens(work.data.train.x):
        text = "token ids cannot be computed in bf16: set precision=fp32 or tf32"
        raise InputError(text, code="unsupported-precision", name="precision", value=precision)
    if kind == "reference":
        fast = replace(sim, train=Reference(work, chunk))
    else:
        program = _checked_engine(choice, work).program
        if program is None:
            fast = replace(sim, train=ProcessTrainer(work, chunk, min(available_cores(), chunk)))
        else:
            resnet = kind == "kernels" and uses_fused_steps(work)
            fast = replace(sim, train=StackedTrainer(work, program, precision, chunk, resnet))
    if isinstance(sim.evaluate, Evaluate):
        fast = replace(fast, evaluate=sim.evaluate.at(precision))
    return fast


def _checked_engine(choice: EngineChoice, work: LocalTraining) -> CheckedEngine:
    """Return the engine that `choose` has checked for this local training, or check it now."""
    checked, kind = choice.checked, choice.engine
    if checked and checked.work is work and checked.engine == kind:
        return checked
    try:
        if kind == "processes":
            check_separable(work)
            return CheckedEngine(kind, work, None)
        return CheckedEngine(kind, work, _build_program(kind, work))
    except Unsupported as obstacle:
        raise Unsupported(f"engine {kind} does not support this model: {obstacle}", code=obstacle.code) from None
