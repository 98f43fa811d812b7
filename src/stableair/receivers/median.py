"""Eq. (5): the vector median, the one in the project."""

import torch
from torch import Tensor

from stableair.errors import InputError
from stableair.validation import short_repr


def median(g: Tensor) -> Tensor:
    """Eq. (5), the vector median: the median entry, the lower of the middle two for even d. (..., d) -> (..., 1).

    >>> median(torch.tensor([9.0, 1.0, 3.0, 2.0])).item()
    2.0
    """
    if not isinstance(g, Tensor) or not g.ndim or not g.shape[-1] or g.is_complex() or g.dtype == torch.bool:
        raise InputError(f"the median needs a tensor of at least one real number: got {short_repr(g)}")
    if g.is_cuda:  # there torch.median takes many times as long as sorting, which puts NaN last
        ordered = g.sort(dim=-1).values
        last, middle = ordered[..., -1:], ordered[..., (g.shape[-1] - 1) // 2, None]
        return torch.where(last.isnan(), last, middle)
    return g.median(dim=-1, keepdim=True).values
