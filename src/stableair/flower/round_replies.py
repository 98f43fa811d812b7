"""The replies of a round: the nodes that transmit, and the reasons why other nodes are dropped."""

from collections.abc import Iterable, Iterator
from logging import WARNING

import torch
from flwr.app import ArrayRecord, Message
from flwr.common import log
from torch import Tensor

from stableair.contracts import Upload
from stableair.errors import InputError
from stableair.flower.client_numbers import ClientNumbers
from stableair.flower.replies import DroppedNode, Reply, ReplyFormat, error_text, one_line, read_reply
from stableair.validation import pluralize
from stableair.vector import ModelState


class RoundReplies:
    """The replies of the nodes, round by round. The usable replies are the uploads of Algorithm 1.

    Args:
        expected: The contents that every reply must have.
        numbers: The client numbers of the nodes.
        enough: Minimum number of replies; with fewer replies, none is used.
        timeout: Seconds to wait for replies, for the log.
    """

    def __init__(self, expected: ReplyFormat, numbers: ClientNumbers, enough: int, timeout: float):
        self.expected, self.numbers, self.enough, self.timeout = expected, numbers, enough, timeout
        self.k = 0
        self.sampled: list[int] = []  # node ids
        self.valid: list[Reply] = []
        self.used: list[Reply] = []  # in the order of summation
        self.faults: dict[int, str] = {}  # reasons why replies are invalid, by node
        self.refused: dict[int, str] = {}  # reasons why client numbers are invalid, by node

    def read(self, messages: Iterable[Message], broadcast: ArrayRecord, k: int) -> None:
        """Read the replies of the sampled nodes in round k, and select all of them."""
        replies: dict[int, Reply] = {}
        self.k, self.faults = k, {}
        no_reply = f"no reply within {self.timeout:g} s"
        for message in messages:
            node = message.metadata.src_node_id
            if node not in self.sampled:
                if message.has_error():  # the SuperLink replies for a node that it has lost
                    no_reply = error_text(message.error)
                else:
                    self.faults[node] = "it was not sampled in this round"
            elif node in replies:
                self.faults[node] = "it replied more than once"
            else:
                try:
                    replies[node] = read_reply(message, broadcast, self.expected, k)
                except Exception as error:  # a node may send anything
                    self.faults[node] = one_line(error) or type(error).__name__
        self.faults |= {node: no_reply for node in self.sampled if node not in replies and node not in self.faults}
        self.valid = [reply for node, reply in replies.items() if node not in self.faults]
        self.select(self.valid)

    def select(self, replies: Iterable[Reply]) -> None:
        """Use the replies with valid client numbers; if there are fewer than `enough`, use none."""
        numbered, self.refused = self.numbers.resolve(replies)
        enough = len(numbered) >= self.enough
        self.used = sorted(numbered, key=lambda reply: (-reply.samples, reply.client)) if enough else []

    def log_dropped(self) -> list[DroppedNode]:
        """Log the nodes whose replies are not used in this round, and return them."""
        reasons = self.faults | self.refused
        dropped = [DroppedNode(self.k, node, reasons[node]) for node in sorted(reasons)]
        for k, node, reason in dropped:
            log(WARNING, "round %d: node %d is left out: %s", k, node, reason)
        return dropped

    def check_any(self) -> None:
        """Refuse a round in which no reply can be used.

        Raises:
            InputError: Every reply is invalid, or no node was sampled (`no-replies`).
        """
        if len(self.refused) < len(self.valid):
            return
        reasons = self.faults | self.refused
        reason = f"the first: {reasons[min(reasons)]}" if reasons else "the strategy sampled no node"
        text = f"round {self.k}: no reply of {pluralize(len(self.sampled), 'node')} can be used; {reason}"
        raise InputError(text, code="no-replies", k=self.k, nodes=len(self.sampled))

    def mean_loss(self) -> float | None:
        """Return the mean training loss over the used replies that hold one."""
        losses = [reply.loss for reply in self.used if reply.loss is not None]
        return sum(losses) / len(losses) if losses else None

    def senders(self, k: int) -> Tensor:
        """Return the clients whose replies are used, in the order of summation: (m,)."""
        return torch.tensor([reply.client for reply in self.used], dtype=torch.int64)

    def uploads(self, model: ModelState, k: int, clients: Tensor) -> Iterator[Upload]:
        """Yield the used replies as uploads."""
        for reply in self.used:
            rows = reply.update[None], reply.stats[None], torch.tensor([reply.loss or 0.0])
            yield Upload(torch.tensor([reply.client]), *(row.to(model.w.device) for row in rows))
