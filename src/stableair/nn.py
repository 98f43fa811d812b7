"""Median anchored clipping for any training loop, in the style of `torch.nn.utils.clip_grad_norm_`."""

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from stableair.errors import InputError
from stableair.receivers.adaptive import weak_signal_threshold
from stableair.receivers.median import vector_median
from stableair.validation import positive

log = logging.getLogger("stableair")

__all__ = ["clip_grad_mac_"]


@torch.no_grad()
def clip_grad_mac_(
    parameters: Tensor | Iterable[Tensor],
    C: float | Literal["auto"],
    layerwise: bool = True,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip gradients in place to within C of their median (median anchored clipping, Eqs. 5-8).

        m = med(g),    g_i -> m + clip(g_i - m, [-C, C])

    Call it between `loss.backward()` and `optimizer.step()`. An infinite entry is clipped like any other; if most
    entries are infinite, so is the median. A NaN makes all entries that share its median NaN, and these entries are
    counted as clipped. Only `error_if_nonfinite`, C="auto" and gradients on several devices make the host wait for
    the device.

    The median takes most of the time. On one CPU core, a call for 9 million entries takes about 40 times as long as
    `clip_grad_norm_`, and with C="auto" 160 times. [Use from Python](../python.md#clip-gradients-in-a-pytorch-loop)
    describes the measurement.

    Args:
        parameters: One tensor or several, of any shapes, dtypes and devices. Tensors without a gradient are skipped.
        C: Threshold, above 0; inf changes nothing. "auto" estimates the interference from these gradients alone,
            without a memory of earlier calls, and uses the best threshold for a gradient far below the interference. It
            does not restore the gain. It also clips gradients without noise, because it takes their spread for noise.
        layerwise: Whether each gradient has its own median; if false, the entries of all gradients share one median.
        error_if_nonfinite: Whether to raise an error, and change nothing, if a gradient has NaN or infinite entries.

    Returns:
        The share of clipped entries of all gradients, () on the device of the first gradient.

    Raises:
        InputError: An argument is invalid (`wrong-type`), or a gradient is sparse or complex (`unsupported-gradient`).
        RuntimeError: A gradient has NaN or infinite entries, and `error_if_nonfinite` is true.

    >>> weight, bias = torch.zeros(3, requires_grad=True), torch.zeros(1, requires_grad=True)
    >>> weight.grad, bias.grad = torch.tensor([0.0, 1.0, 90.0]), torch.tensor([7.0])
    >>> clip_grad_mac_([weight, bias], C=1.0)
    tensor(0.2500)
    >>> weight.grad, bias.grad
    (tensor([0., 1., 2.]), tensor([7.]))
    """
    threshold = None if isinstance(C, str) and C == "auto" else positive("C", C, finite=False, otherwise="or auto")
    if not isinstance(layerwise, bool):  # catches a norm_type, which clip_grad_norm_ takes here
        raise InputError(
            f"layerwise must be True or False: got {layerwise!r}", code="wrong-type", name="layerwise", value=layerwise
        )
    gradients = _gradients(parameters)
    if not gradients:
        return torch.tensor(0.0)
    device = gradients[0].device
    if error_if_nonfinite and not torch.stack([g.isfinite().all().to(device) for g in gradients]).all():
        raise RuntimeError(
            "The gradients from `parameters` have NaN or infinite entries, so they are not clipped. To disable this "
            "error and clip the infinite entries, set `error_if_nonfinite=False`"
        )
    filled = [g for g in gradients if g.numel()]  # an empty gradient has no median
    blocks = [[g] for g in filled] if layerwise else [filled]
    threshold = _estimated_threshold(blocks, device) if threshold is None else threshold
    if not filled or math.isinf(threshold):  # inf - inf would be NaN
        return torch.zeros((), device=device)
    clipped = [_clip(block, threshold).to(device) for block in blocks]
    return torch.stack(clipped).sum() / sum(g.numel() for g in filled)


def _estimated_threshold(blocks: list[list[Tensor]], device: torch.device) -> float:
    """Estimate the threshold for C="auto" from the entries of all gradients, each less the median of its block."""
    entries = [_entries(block, device).float() for block in blocks]
    return weak_signal_threshold(torch.cat([g - vector_median(g) for g in entries])) if entries else math.inf


def _clip(gradients: list[Tensor], C: float) -> Tensor:
    """Clip gradients in place about one median; return the number of clipped entries, () int64."""
    device = gradients[0].device
    m = vector_median(_entries(gradients, device))  # () in the widest dtype; the sign of a zero does not change m - C
    changed = torch.zeros((), dtype=torch.int64, device=device)
    for g in gradients:
        out = g.clamp((m - C).to(g), (m + C).to(g))  # unclipped entries stay bit-identical
        changed += (out != g).count_nonzero().to(device)
        g.copy_(out)
    return changed


def _entries(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return the entries of gradients on one device, (d,): a view of a single contiguous gradient."""
    flat = [g.flatten().to(device) for g in gradients]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of the distinct parameters that have one; all must be dense and real."""
    many = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor)
    tensors: list[Any] = list(parameters) if many else [parameters]
    if not tensors and isinstance(parameters, Iterator):
        log.warning("parameters is an empty generator: no gradient is clipped")
    if wrong := [type(p).__name__ for p in tensors if not isinstance(p, Tensor)]:
        text = f"parameters must be tensors, such as model.parameters(): got {wrong[0]}"
        raise InputError(text, code="wrong-type", name="parameters", value=wrong[0])
    gradients: list[Tensor] = [p.grad for p in {id(p): p for p in tensors}.values() if p.grad is not None]
    for g in gradients:
        if g.layout != torch.strided or g.is_complex():
            kind = g.dtype if g.layout == torch.strided else g.layout
            text = f"gradients must be dense and real, to have a median: got {kind}"
            raise InputError(text, code="unsupported-gradient", kind=str(kind))
    return gradients
