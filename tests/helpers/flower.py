"""Flower's nodes as the clients of Algorithm 1, with made-up replies."""

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    FedAvg,
)
from torch import nn

from stableair.flower import OverTheAir, client_app

NODES = [901, 17, 560, 44]  # in order of arrival; sorted: 17, 44, 560, 901


class Nodes:
    """A grid whose nodes reply at once: `answer(message)` is the reply, or None for no reply."""

    def __init__(self, answer, nodes=NODES, arrival=None):
        self.answer, self.nodes, self.arrival = answer, nodes, arrival or (lambda replies: replies)
        self.messages_sent = 0

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, timeout=None):
        messages = list(messages)
        self.messages_sent += len(messages)
        replies = [self.answer(message) for message in messages]
        return self.arrival([reply for reply in replies if reply is not None])


def model_of(seed=0):
    """A state_dict with a parameter of shape (1,), norm buffers and a counter."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def start_arrays():
    return ArrayRecord({name: Array(tensor.numpy()) for name, tensor in model_of().items()})


def samples(node):
    return 5 + 10 * (node % 4)


def reply(message, change=None, **metrics):
    """The reply of a stock client: weights that depend on the node and on the received weights."""
    node, sent = message.metadata.dst_node_id, message.content["arrays"]
    source = np.random.default_rng(node)
    weights = {}
    for name, array in sent.items():
        a = array.numpy()
        step = source.normal(size=a.shape).astype(a.dtype) if a.dtype.kind == "f" else np.ones_like(a)
        weights[name] = abs(a + a.dtype.type(0.1) * step) if "var" in name else a + a.dtype.type(0.1) * step
    if change:
        change(weights)
    results = {"train_loss": 1.0 + node / 1000, "num-examples": samples(node)} | metrics
    arrays = ArrayRecord({name: Array(np.asarray(w)) for name, w in weights.items()})
    results = MetricRecord({name: value for name, value in results.items() if value is not None})
    return Message(RecordDict({"arrays": arrays, "metrics": results}), reply_to=message)


def averaging(kind=FedAvg, **options):
    return kind(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, **options)


def run_over_the_air(answer=reply, rounds=2, strategy=None, grid=None, evaluate_fn=None, timeout=5.0, **settings):
    """A run over Flower: the strategy, and the result of Flower."""
    over_the_air = OverTheAir(strategy or averaging(), **{"lr": 0.1, "receiver": "mac(C=0.5)"} | settings)
    result = over_the_air.start(grid or Nodes(answer), start_arrays(), rounds, timeout, evaluate_fn=evaluate_fn)
    return over_the_air, result


def bits(arrays):
    return {name: array.numpy().tobytes() for name, array in arrays.items()}


def nodes_with_our_app(experiment, mods=None, **changes):
    """Nodes that run the client app of stableair; they reply in reverse order, and the last node is client 0."""
    app = client_app(experiment.with_(**changes), mods)

    def answer(message):
        n = sorted(NODES).index(message.metadata.dst_node_id)
        try:
            return app(message, Context(1, 1, {"partition-id": 3 - n}, RecordDict(), {}))
        except Exception as error:
            return Message(Error(code=0, reason=str(error)), reply_to=message)

    return Nodes(answer, arrival=lambda replies: replies[::-1])
