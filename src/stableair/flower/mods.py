"""Flower mods that change a client's update before it is sent: `ClientApp(mods=[limited(norm=1.0)])`."""

import math

import torch
from flwr.app import Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable, Mod

from stableair.flower.arrays import PAYLOAD, flat, layouts, with_vectors
from stableair.validation import positive


def limited(norm: float | None = None, power: float | None = None) -> Mod:
    """Return a Flower mod that limits the norm and the power of a client's update.

    The update u (d,) becomes u min(1, norm / |u|, sqrt(power d) / |u|). If the client returns weights, u is their
    difference, w_{k,n} - w_k; if it returns a payload, u is the payload. Norm buffers and non-finite updates stay
    unchanged; the server drops non-finite updates.

    Args:
        norm: Maximum norm; None for no limit.
        power: Maximum mean power per entry; None for no limit.

    Returns:
        The mod, for `ClientApp(mods=[...])`.

    Raises:
        InputError: A limit is not positive (`out-of-range`).

    ```python
    app = ClientApp(mods=[limited(norm=1.0, power=1e-4)])
    ```
    """
    max_norm = math.inf if norm is None else positive("norm", norm)
    max_power = math.inf if power is None else positive("power", power)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        received = dict(message.content.array_records)
        reply = call_next(message, context)
        if not message.metadata.message_type.startswith(MessageType.TRAIN) or reply.has_error():
            return reply
        for name, arrays in list(reply.content.array_records.items()):
            layout, _ = layouts(arrays)
            w = torch.zeros(layout.offsets[-1]) if name == PAYLOAD else flat(next(iter(received.values())), layout)
            u = flat(arrays, layout) - w
            length = torch.linalg.vector_norm(u, dtype=torch.float64).item()
            bound = min(max_norm, math.sqrt(max_power * len(u)))
            if bound < length < math.inf:
                reply.content[name] = with_vectors(arrays, [(layout, w + bound / length * u)])
        return reply

    return mod
