"""What a client does to its update before it leaves the node: `ClientApp(mods=[limited(norm=1.0)])`."""

import math

import torch
from flwr.app import Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable, Mod

from stableair.checks import positive
from stableair.flower.arrays import PAYLOAD, flat, layouts, with_vectors


def limited(norm: float | None = None, power: float | None = None) -> Mod:
    """Clip a client's update to a norm, and to a mean power an entry, before it is sent.

    u (d,) becomes u min(1, norm / |u|, sqrt(power d) / |u|). It is the difference of the weights, w_{k,n} - w_k, where
    the client returns weights, and the payload where it returns that. Norm buffers pass as they are, and so does what
    is not finite: the server leaves it out and says so.
    """
    longest = math.inf if norm is None else positive("norm", norm)
    strongest = math.inf if power is None else positive("power", power)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        given = dict(message.content.array_records)
        reply = call_next(message, context)
        if not message.metadata.message_type.startswith(MessageType.TRAIN) or reply.has_error():
            return reply
        for name, arrays in list(reply.content.array_records.items()):
            layout, _ = layouts(arrays)
            w = torch.zeros(layout.offsets[-1]) if name == PAYLOAD else flat(next(iter(given.values())), layout)
            u = flat(arrays, layout) - w
            length = torch.linalg.vector_norm(u, dtype=torch.float64).item()
            bound = min(longest, math.sqrt(strongest * len(u)))
            if bound < length < math.inf:
                reply.content[name] = with_vectors(arrays, [(layout, w + bound / length * u)])
        return reply

    return mod
