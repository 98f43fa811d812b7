"""Median anchored clipping for any training loop: the sibling of `torch.nn.utils.clip_grad_norm_`."""

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from stableair.checks import InputError, Note, positive
from stableair.receivers.medians import median

__all__ = ["clip_grad_mac_"]


@torch.no_grad()
def clip_grad_mac_(
    parameters: Tensor | Iterable[Tensor], C: float, layerwise: bool = True, error_if_nonfinite: bool = False
) -> Tensor:
    """Median anchored clipping of gradients in place (Eqs. 5-8): pull each entry to within C of the median.

    Call it between `loss.backward()` and `optimizer.step()`. Each gradient has a median of its own; with
    layerwise=False one median is taken over the entries of all gradients together. C=inf changes nothing.

    parameters: one tensor or many, of any shapes, dtypes and devices; those without a gradient are left out.
    Returns the share of entries that were clipped, of all gradients together: () on the first gradient's device.

    An infinite entry is clipped like any other; where most entries are infinite, so is the median. A NaN makes all
    that shares its median NaN, and counts it as clipped. With error_if_nonfinite=True either is a RuntimeError, and
    nothing is changed. Only that check waits for the device, as do gradients on several devices.

    >>> weight, bias = torch.zeros(3, requires_grad=True), torch.zeros(1, requires_grad=True)
    >>> weight.grad, bias.grad = torch.tensor([0.0, 1.0, 90.0]), torch.tensor([7.0])
    >>> clip_grad_mac_([weight, bias], C=1.0)
    tensor(0.2500)
    >>> weight.grad, bias.grad
    (tensor([0., 1., 2.]), tensor([7.]))
    """
    C = positive("C", C, finite=False)
    if not isinstance(layerwise, bool):  # the place of clip_grad_norm_'s norm_type
        raise InputError(f"layerwise must be True or False: got {layerwise!r}")
    gradients = _gradients(parameters)
    if not gradients:
        return torch.tensor(0.0)
    home = gradients[0].device
    if error_if_nonfinite and not torch.stack([g.isfinite().all().to(home) for g in gradients]).all():
        raise RuntimeError(
            "The gradients from `parameters` have NaN or infinite entries, so they are not clipped. To disable this "
            "error and clip the infinite entries, set `error_if_nonfinite=False`"
        )
    filled = [g for g in gradients if g.numel()]  # nothing has no median
    if not filled or math.isinf(C):  # an infinite median less an infinite C would be NaN
        return torch.zeros((), device=home)
    clipped = [_clip(block, C).to(home) for block in ([[g] for g in filled] if layerwise else [filled])]
    return torch.stack(clipped).sum() / sum(g.numel() for g in filled)


def _clip(gradients: list[Tensor], C: float) -> Tensor:
    """Clip about one median in place; how many entries that changed, () int64."""
    device = gradients[0].device
    m = median(torch.cat([g.flatten().to(device) for g in gradients]))[0]  # () in the widest of the dtypes
    changed = torch.zeros((), dtype=torch.int64, device=device)
    for g in gradients:
        out = g.clamp((m - C).to(g), (m + C).to(g))  # what is not clipped stays bit-identical
        changed += (out != g).sum().to(device)
        g.copy_(out)
    return changed


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The gradients that are there, those of a parameter given twice once; all dense and real."""
    many = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor)
    given: list[Any] = list(parameters) if many else [parameters]
    if not given and isinstance(parameters, Iterator):
        warnings.warn("parameters is an empty generator: no gradient is clipped", Note, stacklevel=4)
    if wrong := [type(p).__name__ for p in given if not isinstance(p, Tensor)]:
        raise InputError(f"parameters must be tensors, such as model.parameters(): got {wrong[0]}")
    gradients: list[Tensor] = [p.grad for p in {id(p): p for p in given}.values() if p.grad is not None]
    for g in gradients:
        if g.layout != torch.strided or g.is_complex():
            kind = g.dtype if g.layout == torch.strided else g.layout
            raise InputError(f"gradients must be dense and real, to have a median: got {kind}")
    return gradients
