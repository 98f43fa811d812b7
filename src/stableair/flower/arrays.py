"""Conversion between Flower's named arrays and the two flat vectors of a `ModelState`."""

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from stableair.errors import InputError
from stableair.vector import Layout, ModelState, make_layout

NORM_BUFFERS = "running_mean", "running_var"  # last part of the names of norm buffers in a state_dict
PAYLOAD = "payload"  # name of a reply's record with u_n and the moments of the norm buffers instead of weights


def layouts(arrays: ArrayRecord) -> tuple[Layout, Layout]:
    """Return the layouts of the parameters and of the norm buffers of a state_dict.

    Integer arrays are counters, which are in neither layout.

    Raises:
        InputError: There is no parameter.
    """
    shapes = {name: array.shape for name, array in arrays.items() if np.dtype(array.dtype).kind == "f"}
    norms = [name for name in shapes if name.rpartition(".")[2] in NORM_BUFFERS]
    if len(shapes) == len(norms):
        text = f"the initial arrays hold no parameter: got {', '.join(arrays) or 'no arrays'}"
        raise InputError(text, code="missing-model", name="initial_arrays")
    weights = [name for name in shapes if name not in norms]
    layout, buffers = (make_layout((name, tuple(shapes[name])) for name in names) for names in (weights, norms))
    return layout, buffers


def describe_network(layout: Layout, norms: Layout) -> str:
    """Return the number of parameters, and a digest of the names and shapes of all arrays: `2740 parameters (1a2b3c4)`.

    Args:
        layout: Layout of the parameters.
        norms: Layout of the norm buffers.
    """
    digest = hashlib.sha256(repr([(each.names, each.shapes) for each in (layout, norms)]).encode()).hexdigest()[:7]
    return f"{layout.offsets[-1]} parameters ({digest})"


def flat(arrays: ArrayRecord, layout: Layout, dtype: torch.dtype = torch.float32) -> Tensor:
    """Concatenate the arrays of a layout into one vector (d,).

    Raises:
        InputError: An array is missing, has another shape, or does not hold real numbers.
    """
    blocks = [torch.empty(0, dtype=dtype)]
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if name not in arrays:
            raise InputError(f"the array {name} is missing", code="missing-array", name=name)
        block = arrays[name].numpy()
        if block.shape != shape:
            text = f"{name} must have shape {shape}: got {block.shape}"
            raise InputError(text, code="wrong-shape", name=name, expected=shape, actual=block.shape)
        if block.dtype.kind not in "fiu":
            text = f"{name} must hold real numbers: got {block.dtype}"
            raise InputError(text, code="wrong-dtype", name=name, actual=str(block.dtype))
        blocks.append(torch.from_numpy(np.array(block)).reshape(-1).to(dtype))
    return torch.cat(blocks)


def with_vectors(arrays: ArrayRecord, vectors: Iterable[tuple[Layout, Tensor]]) -> ArrayRecord:
    """Return the arrays with the blocks of the vectors in place of the arrays of the same names.

    Each array keeps its dtype.
    """
    replaced = dict(arrays)
    for layout, v in vectors:
        for name, shape, block in zip(layout.names, layout.shapes, layout.split(v.cpu()), strict=True):
            dtype = np.dtype(arrays[name].dtype) if name in arrays else block.numpy().dtype
            replaced[name] = Array(block.reshape(shape).numpy().astype(dtype))
    return ArrayRecord(replaced)


def to_array_record(state: ModelState, layout: Layout, norms: Layout) -> ArrayRecord:
    """Return a model as the arrays of a state_dict."""
    return with_vectors(ArrayRecord(), [(layout, state.w), (norms, state.stats)])
