"""Detection of side effects in the Python code of a module: random draws, and state that changes.

The reference trainer runs the Python code of a module for each client and step. A stacked program runs it once, to
trace it; a vmapped program runs it once per step for all clients. Both are correct only if the code is a pure function
of parameters, buffers and inputs. The equivalence check alone cannot decide this: a branch that is taken with
probability 0.9, or from the hundredth call on, often has no effect in the few steps of a trial.
"""

import inspect
import io
import pickle
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stableair.engine.equivalence import Trial
from stableair.engine.privates import forward_hook_functions, gradient_hook
from stableair.engine.stacked import Unsupported
from stableair.errors import first_line
from stableair.global_generators import generator_states
from stableair.training.local_training import LocalTraining
from stableair.training.reference import restored_generators

SAME_OUTPUT = 1e-4  # tolerance between two outputs for the same input: GPUs add in varying order
MODULE_INTERNALS = vars(nn.Module()).keys() - {"training"}

Snapshot = dict[str, Any]  # fingerprints of values by a description of each value


class Effects(NamedTuple):
    """Side effects of a forward pass; "" where there is none."""

    draws: str
    state: str


def check_pure(work: LocalTraining) -> None:
    """Refuse a module whose Python code cannot be run once for all clients.

    Raises:
        Unsupported: It has hooks on gradients, draws random numbers or changes Python state.
    """
    draws, state = _inspected(work)
    if reason := gradient_hook(work.module) or draws or state:
        raise Unsupported(reason, code="impure-model")


def check_separable(work: LocalTraining) -> None:
    """Refuse a module that computes other results in several processes, of which each has a copy.

    Raises:
        Unsupported: It has hooks on gradients, changes Python state, or cannot be pickled with its local rule.
    """
    if reason := gradient_hook(work.module) or _inspected(work).state:  # pickling drops hooks of parameters
        raise Unsupported(reason, code="impure-model")
    try:
        pickle.Pickler(_Discard()).dump((work.module, work.rule, work.lr_share))
    except Exception as error:  # lambdas, local classes and objects of any library
        raise Unsupported(f"it cannot be sent to a process: {error}", code="unpicklable-model") from None


def _inspected(work: LocalTraining) -> Effects:
    """Return the side effects of a forward pass.

    Raises:
        Unsupported: A value of the module cannot be compared, such as a sparse tensor or a list that contains itself.
    """
    try:
        return forward_effects(work)
    except (RuntimeError, TypeError, ValueError, RecursionError) as error:
        raise Unsupported(f"its state cannot be inspected: {first_line(error)}", code="impure-model") from None


class _Discard(io.RawIOBase):
    """A file that discards all data."""

    def write(self, data: Any) -> int:
        return len(data)


def forward_effects(work: LocalTraining) -> Effects:
    """Run forward passes of a copy of the module and compare generators, outputs and Python state.

    The first two passes have the same input, in the largest batch of the run. The third has other samples, in the
    smallest batch.
    """
    module = work.module
    trial = Trial(work, next(module.parameters()).dtype)
    module, x = trial.work.module, trial.work.data.inputs(trial.work.data.train.x, trial.state.w.dtype)
    large, small = x[: work.largest_batch], x[work.largest_batch :][: work.smallest_batch]
    buffers = [(b, b.clone()) for b in module.buffers()]
    outputs, snapshots = [], [python_state(module)]
    with restored_generators(x.device):
        before = generator_states(x.device)
        for inputs in (large, large, small):
            outputs.append(_output(module, inputs))
            snapshots.append(python_state(module))
            for buffer, value in buffers:
                buffer.data.copy_(value)
        draws = _difference(before, generator_states(x.device))
    state = _difference(*map(_without_tensor_values, snapshots[:2])) or _difference(*snapshots[1:3])
    state = state or _difference(*snapshots[2:4])
    if draws:
        example = " (for example dropout)" if "torch" in draws else ""
        draws = f"its forward pass draws from {draws}{example}"
    elif not state and not _close(*outputs[:2]):
        draws = "its forward pass returns different outputs for the same input"
    return Effects(draws, f"its forward pass changes {state}" if state else "")


def _output(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return the output of a module; None if it fails, such as a batch norm on a single value."""
    try:
        return module(x).detach()
    except Exception:  # raised by the module's code; the equivalence check reports it
        return None


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=SAME_OUTPUT, atol=SAME_OUTPUT, equal_nan=True)


def python_state(module: nn.Module) -> Snapshot:
    """Return the fingerprints of the Python values that the forward passes and the hooks of a module can change."""
    snapshot: Snapshot = {f"requires_grad of {name}": p.requires_grad for name, p in module.named_parameters()}
    for name, layer in module.named_modules():
        attributes = {key: value for key, value in vars(layer).items() if key not in MODULE_INTERNALS}
        snapshot |= {f"the attribute {name}{'.' * bool(name)}{key}": _fingerprint(v) for key, v in attributes.items()}
        for kind in type(layer).__mro__:
            if not _is_torch(kind.__module__):
                snapshot |= {f"{kind.__name__}.{key}": _fingerprint(v) for key, v in _data_of(vars(kind)).items()}
        for function in (layer.forward, *forward_hook_functions(layer)):
            snapshot |= {f"the variable {key}": _fingerprint(v) for key, v in _variables(function).items()}
    return snapshot


def _variables(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the data among the closure variables and the global variables of a user's function."""
    if _is_torch(getattr(function, "__module__", None) or ""):
        return {}
    try:
        variables = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # a callable object
        return _data_of(getattr(function, "__dict__", {}))
    return _data_of({**variables.globals, **variables.nonlocals})


def _data_of(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a namespace that hold data, not code."""
    return {key: value for key, value in names.items() if not key.startswith("__") and not _is_code(value)}


def _is_code(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, type | ModuleType | property)


def _is_torch(name: str) -> bool:
    return name == "torch" or name.startswith("torch.")


def _fingerprint(value: Any) -> Any:
    """Return the fingerprint of a value: it is the same before and after a forward pass that does not change it."""
    if isinstance(value, Tensor):
        return _TensorPrint((tuple(value.shape), value.dtype), _bytes(value))
    if isinstance(value, torch.Generator):
        return _bytes(value.get_state())
    if isinstance(value, dict):
        return {repr(key): _fingerprint(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_fingerprint(one) for one in value]
    if isinstance(value, nn.Module) or _is_code(value):
        return id(value)
    try:
        return pickle.dumps(value)
    except Exception:  # objects of any library
        return id(value)


class _TensorPrint(NamedTuple):
    """The fingerprint of a tensor."""

    form: tuple[Any, ...]
    content: bytes


def _without_tensor_values(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot without the contents of tensors: the first forward pass may compute them from new weights."""
    return {key: value.form if isinstance(value, _TensorPrint) else value for key, value in snapshot.items()}


def _bytes(t: Tensor) -> bytes:
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _difference(before: Snapshot, after: Snapshot) -> str:
    """Return the first key whose value differs between two snapshots, or ""."""
    keys = dict.fromkeys([*before, *after])
    return next((key for key in keys if key not in before or key not in after or before[key] != after[key]), "")
