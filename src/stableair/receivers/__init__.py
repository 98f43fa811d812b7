"""Receivers, Eqs. (5)-(8): rules that the server applies to the received sum."""

from stableair.receivers.compose import as_receiver, assemble, blockwise, chain
from stableair.receivers.median import median
from stableair.receivers.rules import (
    blank,
    cauchy,
    clip,
    gnc,
    mac,
    none,
    quantile_clip,
    receiver,
    sign,
    tanh_clip,
)  # fmt: skip

__all__ = [
    "as_receiver", "assemble", "blank", "blockwise", "cauchy", "chain", "clip", "gnc", "mac", "median", "none",
    "quantile_clip", "receiver", "sign", "tanh_clip",
]  # fmt: skip
