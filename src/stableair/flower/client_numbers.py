"""Assignment of client numbers to nodes: a client number belongs to the node that claimed it first."""

import itertools
from collections.abc import Iterable, Mapping

from stableair.contracts import Memory
from stableair.flower.replies import Reply


class ClientNumbers:
    """Client numbers 0 ... n-1 and their nodes.

    A node may claim a number in its reply. The claim binds the number to the node's id for the rest of the run, so that
    no other node can transmit in its place. Of two nodes that first claim a number in the same round, the one with the
    lower id gets it. A node that claims no number is assigned a free one while it is connected.

    Args:
        n: Number of clients.
        owners: Node ids of the numbers that are already bound, by client number.
    """

    def __init__(self, n: int, owners: Mapping[int, int] | None = None):
        self.n = n
        self.owners = dict(owners or {})  # client -> node
        self.assigned: dict[int, int] = {}  # node -> client, for nodes that claim no number

    def assign(self, connected: Iterable[int]) -> None:
        """Assign the lowest free numbers to the connected nodes that have none, in the order of their ids."""
        nodes = sorted(set(connected) - set(self.owners.values()))
        kept = {node: self.assigned[node] for node in nodes if node in self.assigned}
        self.assigned = {node: client for node, client in kept.items() if client not in self.owners}
        used = {*self.owners, *self.assigned.values()}
        free = (client for client in itertools.count() if client not in used)
        for node in nodes:
            if node not in self.assigned:
                self.assigned[node] = next(free)

    def resolve(self, replies: Iterable[Reply]) -> tuple[list[Reply], dict[int, str]]:
        """Assign client numbers to the replies of a round, without binding any number.

        Returns:
            The replies with a valid number, and for each other node the reason why its reply is refused.
        """
        numbered, refused = [], {}
        owners = dict(self.owners)
        clients = {node: client for client, node in owners.items()}
        for reply in sorted(replies, key=lambda reply: (reply.claim is not None, reply.node)):
            node, bound = reply.node, clients.get(reply.node)
            client = reply.claim
            if client is None:
                client = self.assigned.get(node, -1) if bound is None else bound
            if not 0 <= client < self.n:
                refused[node] = f"its client number must be 0 ... {self.n - 1}: got {client}"
            elif bound not in (None, client):
                refused[node] = f"it claims to be client {client}, but was client {bound} before"
            elif owners.setdefault(client, node) != node:
                refused[node] = f"client {client} belongs to node {owners[client]}; a node keeps its id if it has a key"
            else:
                numbered.append(reply._replace(client=client))
        return numbered, refused

    def bind(self, replies: Iterable[Reply]) -> None:
        """Bind the numbers that the nodes of these replies claim."""
        self.owners |= {reply.client: reply.node for reply in replies if reply.claim is not None}

    def memory(self) -> Memory:
        """Return the bound numbers, for the checkpoint; () if there are none."""
        return {"nodes": dict(self.owners)} if self.owners else ()


def recorded_owners(memory: Memory, connected: Iterable[int]) -> dict[int, int]:
    """Return the bound numbers of a checkpoint.

    Node ids last as long as the SuperLink's database; a simulation draws new ids at every start. So if none of the
    recorded nodes is connected, no number is bound.
    """
    owners: dict[int, int] = memory.get("nodes", {}) if isinstance(memory, dict) else {}
    return owners if set(owners.values()) & set(connected) else {}
