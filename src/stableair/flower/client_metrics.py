"""Validation and aggregation of the metrics that the nodes send. An invalid metric cannot stop the server."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from logging import WARNING
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict
from flwr.common import log

from stableair.errors import InputError
from stableair.flower.replies import CLIENT, error_text, metric_record, one_line, sample_count

Aggregate = Callable[[list[RecordDict], str], MetricRecord]


def common_metrics(records: dict[int, MetricRecord], k: int) -> dict[int, MetricRecord]:
    """Select the metrics of the nodes that can be averaged.

    A metric is used if more than half of the nodes send it as finite values of the same length. Any other metric is
    dropped, and so are all metrics of a node that lacks a metric of the majority. Both are logged.

    Args:
        records: Metrics by node id.
        k: The round, for the log.
    """
    lengths = {node: {name: _length(value) for name, value in record.items()} for node, record in records.items()}
    counts = Counter(item for record in lengths.values() for item in record.items())
    used = {name: n for (name, n), count in counts.items() if n != UNUSABLE and 2 * count > len(records)}
    used.pop(CLIENT, None)
    common = {}
    for node, record in records.items():
        if dropped := [name for name, n in lengths[node].items() if name != CLIENT and used.get(name, UNUSABLE) != n]:
            _log_dropped(k, node, dropped)
        if all(lengths[node].get(name, UNUSABLE) == n for name, n in used.items()):
            common[node] = MetricRecord({name: record[name] for name in used})
        else:
            log(WARNING, "round %d: node %d lacks metrics that most nodes send; its metrics are dropped", k, node)
    return common


UNUSABLE = -2
NUMBER = -1


def _length(value: Any) -> int:
    """Return the length of a list of finite numbers; NUMBER for one finite number, UNUSABLE for any other value."""
    try:
        values = value if isinstance(value, list) else [value]
        finite = all(math.isfinite(v) for v in values)
    except (TypeError, OverflowError):  # an int may exceed the range of a float
        return UNUSABLE
    if not finite:
        return UNUSABLE
    return len(value) if isinstance(value, list) else NUMBER


def _log_dropped(k: int, node: int, names: Iterable[str]) -> None:
    text = one_line(", ".join(names))
    log(WARNING, "round %d: metrics of node %d are dropped, since their type or length is unusual: %s", k, node, text)


def aggregate_metrics(aggregate: Aggregate, records: Iterable[MetricRecord], weight: str, k: int) -> dict[str, Any]:
    """Aggregate metrics with a strategy's function; if it fails, log the error and return no metrics."""
    try:
        return dict(aggregate([RecordDict({"metrics": record}) for record in records], weight))
    except Exception as error:  # the values that nodes send can make it fail
        log(WARNING, "round %d: the metrics of the clients cannot be aggregated: %s", k, one_line(error))
        return {}


def evaluation_replies(messages: Iterable[Message], weight: str, k: int) -> list[Message]:
    """Return the replies to an evaluation that a strategy can aggregate; log the other replies."""
    valid = {}
    for message in messages:
        try:
            if message.has_error():
                raise InputError(error_text(message.error), code="node-error")
            sample_count(metric_record(message), weight)
            valid[message.metadata.src_node_id] = message
        except Exception as error:  # a node may send anything
            node = message.metadata.src_node_id
            log(WARNING, "round %d: the evaluation of node %d is left out: %s", k, node, one_line(error))
    common = common_metrics({node: metric_record(message) for node, message in valid.items()}, k)
    return [
        Message(RecordDict({"metrics": record}), metadata=valid[node].metadata)  # type: ignore[call-overload]
        for node, record in common.items()
    ]
