"""What the clients sent, added up: the first of the three steps of a superposition.

Accumulate what the clients sent, in one fixed order; reduce, where several processes have accumulated a part each;
finish: interference, division, rounding. The first step is the same for every channel that adds on the air.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from stableair.checks import InputError
from stableair.contracts import Upload, check_finite


class Total(NamedTuple):
    """Sums over the senders, in float64."""

    faded: Tensor  # (d,), of the payloads times their gains
    clean: Tensor  # (d,), of the payloads
    stats: Tensor  # (b,), of the moments of the norm buffers
    loss: Tensor  # (), of the training losses
    senders: int
    dtype: torch.dtype  # the payloads' own


def accumulate(uploads: Iterable[Upload], gains: dict[int, float], d: int, k: int, device: torch.device) -> Total:
    """The sums of round k, client by client in the order they come in, so that chunks change no bit of them.

    faded = sum_n gains[n] u_n and clean = sum_n u_n, from chunks of payloads u (m, d): (d,) each.
    """
    faded, clean = torch.zeros(2, d, dtype=torch.float64, device=device)
    stats = loss = torch.zeros((), dtype=torch.float64, device=device)
    senders, dtype = 0, torch.float32
    for upload in uploads:
        if not len(upload.clients):
            continue
        check_finite(upload, k)
        for client, update in zip(upload.clients.tolist(), upload.update, strict=True):
            faded.add_(update, alpha=gains[client])
            clean.add_(update)
        for of_client, lost in zip(upload.stats.double(), upload.loss.double(), strict=True):
            stats, loss = stats + of_client, loss + lost
        senders, dtype = senders + len(upload.clients), upload.update.dtype
        del upload, update  # before the next is made
    if not senders:
        raise InputError(f"round {k}: nobody sent anything")
    return Total(faded, clean, stats, loss, senders, dtype)
