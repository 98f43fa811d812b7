"""Validation of the nodes' replies: `read_reply` converts a message to a `Reply`, or raises a one-line error."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from flwr.app import ArrayRecord, Error, Message, MetricRecord
from torch import Tensor

from stableair.errors import InputError
from stableair.flower.arrays import PAYLOAD, flat
from stableair.vector import Layout, moments

CLIENT = "client"  # the metric that holds the number of a node's client
MAX_LENGTH = 300  # characters of a node's text in a log line


class DroppedNode(NamedTuple):
    """A node whose reply is not used in round k."""

    k: int
    node: int
    reason: str


class Reply(NamedTuple):
    """A valid reply of a node."""

    node: int
    claim: int | None  # the client number that the node claims
    samples: float
    update: Tensor  # (d,), the payload
    stats: Tensor  # (b,) float64, the moments of its norm buffers
    loss: float | None
    message: Message
    client: int = -1  # the client number of the node


class ReplyFormat(NamedTuple):
    """The contents that every reply must have."""

    model: ArrayRecord  # the model before the first round
    layout: Layout  # layout of the parameters
    norms: Layout  # layout of the norm buffers
    scale: Callable[[int], float]  # round k -> factor from the difference w_k - w_{k,n} to the payload
    weight: str  # the metric that holds the number of samples
    loss: str  # the metric that holds the training loss


def read_reply(message: Message, broadcast: ArrayRecord, expected: ReplyFormat, k: int) -> Reply:
    """Read a node's reply to the arrays that were broadcast in round k.

    Raises:
        InputError: The reply is an error, or cannot be used.
    """
    if message.has_error():
        raise InputError(error_text(message.error), code="node-error")
    if len(message.content.array_records) != 1:
        text = f"a reply must hold one record of arrays: got {len(message.content.array_records)}"
        raise InputError(text, code="wrong-records")
    (name, arrays), metrics = next(iter(message.content.array_records.items())), metric_record(message)
    if unknown := arrays.keys() - expected.model.keys():
        raise InputError(f"the model has no array {min(unknown)}", code="unknown-array", name=min(unknown))
    if name == PAYLOAD:
        update, stats = flat(arrays, expected.layout), flat(arrays, expected.norms, torch.float64)
    else:
        difference = flat(broadcast, expected.layout) - flat(arrays, expected.layout)
        update, stats = difference.mul_(expected.scale(k)), moments(flat(arrays, expected.norms), expected.norms)
    loss = metrics.get(expected.loss)
    loss = None if isinstance(loss, list) or loss is None else float(loss)
    # The pooled norm buffers are averages of the moments. So they are finite in float32 if all moments are.
    parts = {"weights": update, "norm buffers": stats.float(), expected.loss: torch.tensor(loss or 0.0)}
    for part, values in parts.items():
        if not values.isfinite().all():
            raise InputError(f"its {part} must be finite in float32", code="non-finite", part=part)
    samples, claim = sample_count(metrics, expected.weight), metrics.get(CLIENT)
    if claim is not None and not isinstance(claim, int):
        raise InputError(f"its client number must be a whole number: got {claim}", code="wrong-type", name=CLIENT)
    return Reply(message.metadata.src_node_id, claim, samples, update, stats, loss, message)


def metric_record(message: Message) -> MetricRecord:
    """Return the record of metrics of a reply.

    Raises:
        InputError: The reply holds no record of metrics, or several.
    """
    records = list(message.content.metric_records.values())
    if len(records) != 1:
        raise InputError(f"a reply must hold one record of metrics: got {len(records)}", code="wrong-records")
    return records[0]


def sample_count(metrics: MetricRecord, name: str) -> float:
    """Return the number of samples of a node.

    Raises:
        InputError: The metric `name` is missing, negative, not finite, or not a number.
    """
    samples = metrics.get(name)
    if not isinstance(samples, int | float) or not 0 <= samples < math.inf:
        text = f"its metrics must hold {name}, the number of its samples: got {samples}"
        raise InputError(text, code="no-samples", name=name, value=samples)
    return samples


def one_line(text: object) -> str:
    """Return a node's text for the log: one line of printable characters, of limited length."""
    characters = str(text)[: 20 * MAX_LENGTH]
    line = " ".join("".join(c if c.isprintable() else " " for c in characters).split())
    return line if len(line) <= MAX_LENGTH else f"{line[:MAX_LENGTH]}..."


def error_text(error: Error) -> str:
    """Return a node's error as one line.

    Flower wraps an exception as <class 'module.Kind'>:<'text'>; its simulation wraps it twice.
    """
    text = " ".join((error.reason or f"error {error.code}").split()).removesuffix("'>")
    text = re.sub(r"^<class '(?:[\w.]*\.)?(\w+)'>:<'", r"\1: ", text).rpartition(" occurred. Message: ")[2]
    return one_line(text)
