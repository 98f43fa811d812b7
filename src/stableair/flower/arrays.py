"""Named arrays, as Flower sends them, and the two flat vectors that a model is here."""

from collections.abc import Iterable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from stableair.checks import InputError
from stableair.vector import Layout, State, layout_of

NORM_BUFFERS = "running_mean", "running_var"  # how a state_dict calls them, whatever the module
PAYLOAD = "payload"  # the record of a reply that holds u_n and the moments of the norm buffers, in place of the weights


def layouts(arrays: ArrayRecord) -> tuple[Layout, Layout]:
    """The blocks of the parameters and of the norm buffers of a state_dict; whole numbers are counters, and neither."""
    shapes = {name: array.shape for name, array in arrays.items() if np.dtype(array.dtype).kind == "f"}
    norms = [name for name in shapes if name.rpartition(".")[2] in NORM_BUFFERS]
    if len(shapes) == len(norms):
        raise InputError(
            f"there is no parameter among the arrays to start from: {', '.join(arrays) or 'there is none'}"
        )
    weights = [name for name in shapes if name not in norms]
    return layout_of((name, tuple(shapes[name])) for name in weights), layout_of((n, tuple(shapes[n])) for n in norms)


def flat(arrays: ArrayRecord, layout: Layout, dtype: torch.dtype = torch.float32) -> Tensor:
    """The arrays of a layout as one vector (d,); one that is missing or of another shape is refused."""
    blocks = [torch.empty(0, dtype=dtype)]
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if name not in arrays:
            raise InputError(f"there is no array {name}")
        block = arrays[name].numpy()
        if block.shape != shape:
            raise InputError(f"{name} has shape {block.shape} where {shape} belongs")
        if block.dtype.kind not in "fiu":
            raise InputError(f"{name} holds {block.dtype}, which are no real numbers")
        blocks.append(torch.from_numpy(np.array(block)).reshape(-1).to(dtype))
    return torch.cat(blocks)


def with_vectors(arrays: ArrayRecord, vectors: Iterable[tuple[Layout, Tensor]]) -> ArrayRecord:
    """The same arrays with those of the layouts replaced, each of the type that it had."""
    found = dict(arrays)
    for layout, v in vectors:
        for name, shape, block in zip(layout.names, layout.shapes, layout.split(v.cpu()), strict=True):
            kind = np.dtype(arrays[name].dtype) if name in arrays else block.numpy().dtype
            found[name] = Array(block.reshape(shape).numpy().astype(kind))
    return ArrayRecord(found)


def record_of(state: State, layout: Layout, norms: Layout) -> ArrayRecord:
    """A state as the arrays of a state_dict."""
    return with_vectors(ArrayRecord(), [(layout, state.w), (norms, state.stats)])
