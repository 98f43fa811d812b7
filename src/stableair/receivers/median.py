"""Eq. (5): the vector median."""

import torch
from torch import Tensor

from stableair.errors import InputError
from stableair.validation import short_repr


def median(g: Tensor) -> Tensor:
    """Median of the entries of a vector, Eq. (5).

    For even d it is the lower of the two middle entries. If an entry is NaN, so is the median.

    Args:
        g: Real numbers, (..., d), with d at least 1.

    Returns:
        The medians, (..., 1).

    >>> median(torch.tensor([9.0, 1.0, 3.0, 2.0])).item()
    2.0
    """
    if not isinstance(g, Tensor) or not g.ndim or not g.shape[-1] or g.is_complex() or g.dtype == torch.bool:
        raise InputError(f"the median needs a tensor of at least one real number: got {short_repr(g)}")
    if g.is_cuda:  # on a GPU torch.median is much slower than sorting, which puts NaN last
        ordered = g.sort(dim=-1).values
        last, middle = ordered[..., -1:], ordered[..., (g.shape[-1] - 1) // 2, None]
        return torch.where(last.isnan(), last, middle)
    return g.median(dim=-1, keepdim=True).values


def vector_median(g: Tensor) -> Tensor:
    """Median of a vector as a scalar: (d,) -> (). A median of zero may have another sign than that of `median`.

    On a CPU it is faster than `median`, because torch then selects among entries instead of indices.

    >>> vector_median(torch.tensor([9.0, 1.0, 3.0, 2.0]))
    tensor(2.)
    """
    return median(g)[0] if g.is_cuda else g.median()
