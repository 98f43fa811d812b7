"""The private names of torch that the engine needs, since torch has no public interface for them.

`tests/engine/test_privates.py` fails if a version of torch changes one of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

FORWARD_HOOKS = "_forward_hooks", "_forward_pre_hooks"
BACKWARD_HOOKS = "_backward_hooks", "_backward_pre_hooks"
PARAMETER_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"


@contextmanager
def without_vmap_fallback() -> Iterator[None]:
    """Make vmap refuse operations that it would compute one client after the other: the reference trainer is faster."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def forward_hook(module: nn.Module) -> str:
    """Describe the first forward hook or forward pre-hook of a module or its submodules; "" if there is none."""
    return _module_hook(module, FORWARD_HOOKS, "forward hook")


def gradient_hook(module: nn.Module) -> str:
    """Describe the first hook on the gradient of a submodule or parameter; "" if there is none."""
    for name, p in module.named_parameters():
        if any(getattr(p, kind) for kind in PARAMETER_HOOKS):
            return f"parameter {name} has a gradient hook"
    return _module_hook(module, BACKWARD_HOOKS, "backward hook")


def forward_hook_functions(module: nn.Module) -> list[Any]:
    """Return the forward hooks and pre-hooks of one module."""
    return [hook for kind in FORWARD_HOOKS for hook in getattr(module, kind).values()]


def _module_hook(module: nn.Module, kinds: tuple[str, ...], title: str) -> str:
    if any(getattr(torch_module, f"_global{kind}") for kind in kinds):
        return f"all modules have a {title}"
    for name, layer in module.named_modules():
        if any(getattr(layer, kind) for kind in kinds):
            return f"layer {name} has a {title}" if name else f"it has a {title}"
    return ""
