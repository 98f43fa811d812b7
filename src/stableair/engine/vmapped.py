"""A module run for many clients at once, whatever it is made of, by `torch.vmap`: for what cannot be stacked.

It must treat each sample by itself, so that a batch may hold places without a sample.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from stableair.engine.stacked import Tap, Tensors, Unsupported


class Vmapped:
    """A module's forward pass for N clients: program(parameters, buffers, x, mask, taps) -> logits (N, B, classes)."""

    mixes_samples = False  # as `check_samples_apart` has seen
    has_user_layers = False

    def __init__(self, module: nn.Module):
        self.module = module
        self.has_convolutions = any(isinstance(m, nn.Conv2d) for m in module.modules())

    def __call__(
        self, parameters: Tensors, buffers: Tensors, x: Tensor, mask: Tensor | None = None,
        taps: list[Tap] | None = None,
    ) -> Tensor:  # fmt: skip
        """x: (N, B, c, h, w). Nothing is tapped: every weight has its gradient."""
        self.module.train()

        def one_client(p: Tensors, b: Tensors, x: Tensor) -> Tensor:
            return functional_call(self.module, (p, b), (x,))

        p, b = ({name: t.to(x.dtype) for name, t in group.items()} for group in (parameters, buffers))
        with _no_vmap_fallback():
            return vmap(one_client, randomness="error")(p, b, x)


@contextmanager
def _no_vmap_fallback() -> Iterator[None]:
    """Refuse what vmap itself would do one client after the other: the reference does that better."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


@torch.no_grad()
def perturbed(module: nn.Module) -> nn.Module:
    """A copy in training with somewhat other weights: what is zero at the start may not stay so."""
    other = copy.deepcopy(module).train()
    for p in other.parameters():
        p.mul_(0.9).add_(torch.arange(p.numel(), device=p.device).cos().view_as(p), alpha=0.05)
    return other


@torch.no_grad()
def check_samples_apart(module: nn.Module, samples: Tensor) -> None:
    """Refuse a module that mixes the samples of a batch or remembers them: a batch may hold places without a sample."""
    trial = perturbed(module)
    whole, fewer = trial(samples), trial(samples[1:])
    if any(not torch.equal(a, b) for a, b in zip(trial.buffers(), module.buffers(), strict=True)):
        raise Unsupported("it changes its buffers")
    if not torch.allclose(whole[1:], fewer, rtol=1e-3, atol=1e-4):
        raise Unsupported("what it makes of a sample depends on the others in the batch")
