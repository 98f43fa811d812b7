"""What the clients sent, added up: the first of the three steps of a superposition.

Accumulate what the clients sent, in one fixed order; reduce, where several processes have accumulated a part each;
finish: interference, division, rounding. The first step is the same for every channel that adds on the air.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stableair.contracts import Gain, Upload, check_finite
from stableair.vector import Layout, pooled


class Total(NamedTuple):
    """Sums over the senders, in float64."""

    faded: Tensor  # (d,), of the payloads times their gains
    clean: Tensor  # (d,), of the payloads
    stats: Tensor  # (b,), of the moments of the norm buffers
    loss: Tensor  # (), of the training losses
    largest: float  # norm of a payload
    senders: int
    dtype: torch.dtype  # the payloads' own


def accumulate(
    uploads: Iterable[Upload],
    gains: Mapping[int, Gain],
    d: int,
    k: int,
    device: torch.device,
    hear: Callable[[int, Tensor], None] | None = None,
) -> Total:
    """The sums of round k, client by client in the order they come in, so that chunks change no bit of them.

    faded = sum_n gains[n] u_n and clean = sum_n u_n, from chunks of payloads u (m, d): (d,) each. A client without a
    gain is not heard; a gain that differs from entry to entry is made when its payload is here, (d,) at a time. A
    channel that makes something else of the payloads has hear(n, u_n) called for each instead.
    """
    faded, clean = torch.zeros(2, d, dtype=torch.float64, device=device)
    stats = loss = torch.zeros((), dtype=torch.float64, device=device)
    largest, senders, dtype = 0.0, 0, torch.float32
    for upload in uploads:
        if not len(upload.clients):
            continue
        upload = upload._replace(norm=upload.norms())  # they are needed twice
        check_finite(upload, k)
        norms = upload.norms().tolist()
        for i, client in enumerate(upload.clients.tolist()):
            if client in gains:
                gain = gains[client]
                if hear:
                    hear(client, upload.update[i])
                elif callable(gain):
                    faded.add_(gain(d, device).mul_(upload.update[i]))
                else:
                    faded.add_(upload.update[i], alpha=gain)
                clean.add_(upload.update[i])
                stats, loss = stats + upload.stats[i].double(), loss + upload.loss[i].double()
                largest, senders = max(largest, norms[i]), senders + 1
        dtype = upload.update.dtype
        del upload  # before the next is made
    return Total(faded, clean, stats, loss, largest, senders, dtype)


def side_link(total: Total, norms: Layout) -> tuple[Tensor, Tensor]:
    """The norm buffers of all senders together, (b,), and the mean of their losses, (): neither fades nor is noisy."""
    senders = max(total.senders, 1)
    stats = pooled(total.stats / senders, norms).to(total.dtype) if total.senders else total.stats
    return stats, total.loss / senders
