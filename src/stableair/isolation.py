"""Isolate a run from the modes of torch that the calling program has set.

A run gives the same numbers whether or not the caller is inside `torch.autocast`, `torch.no_grad`,
`torch.inference_mode` or `torch.device`, and for any default dtype and default device of the caller.
"""

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@contextmanager
def isolated() -> Iterator[None]:
    """Set the modes of torch that a run needs, and restore the caller's modes afterwards.

    Inside: gradients are recorded, no autocast, float32 by default, tensors on the CPU by default. Use it as a context
    manager or as the decorator of a function; `isolated_steps` is the decorator of a generator.

    >>> with torch.no_grad(), isolated():
    ...     torch.is_grad_enabled()
    True
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_dtype() != torch.float32:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        if torch.empty(0).device.type != "cpu":  # torch 2.6: get_default_device() fails after set_default_device(None)
            stack.enter_context(torch.device("cpu"))
        yield


def isolated_steps(
    generator: Callable[Arguments, Iterator[Result]],
) -> Callable[Arguments, Generator[Result, None, None]]:
    """Isolate each step of a generator; the caller's modes are restored while the caller holds a result."""

    @functools.wraps(generator)
    def steps(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Generator[Result, None, None]:
        with isolated():
            results = iter(generator(*args, **kwargs))
        try:
            while True:
                with isolated():
                    try:
                        result = next(results)
                    except StopIteration:
                        return
                yield result
                del result  # free it before the next one is computed
        finally:
            if isinstance(results, Generator):
                results.close()

    return steps
