"""A client number belongs to the node that used it first."""

import pytest

import stableair as sa
from helpers.flower import NODES, Nodes, bits, reply, run_over_the_air
from stableair.flower.client_numbers import ClientNumbers, recorded_owners
from stableair.flower.replies import Reply

FIRST, SECOND, THIRD, LAST = sorted(NODES)


def replies(claims):
    """Replies of nodes with these claims: {node: client number or None}."""
    return [Reply(node, claim, 1.0, None, None, None, None) for node, claim in claims.items()]


def resolved(numbers, claims):
    """The client numbers of the replies that are accepted, by node, and the nodes that are refused."""
    numbered, refused = numbers.resolve(replies(claims))
    return {reply.node: reply.client for reply in numbered}, set(refused)


def test_nodes_without_a_number_are_numbered_by_their_ids():
    numbers = ClientNumbers(4)
    numbers.assign(NODES)
    expected = {node: client for client, node in enumerate(sorted(NODES))}
    assert resolved(numbers, dict.fromkeys(NODES)) == (expected, set())


def test_a_node_that_disconnects_frees_its_assigned_number():
    numbers = ClientNumbers(2)
    numbers.assign([5, 6])
    numbers.assign([6, 7])
    assert resolved(numbers, {6: None, 7: None}) == ({6: 1, 7: 0}, set())


def test_of_two_first_claims_the_lower_id_wins():
    assert resolved(ClientNumbers(2), {9: 1, 8: 1}) == ({8: 1}, {9})


def test_a_bound_number_is_refused_to_other_nodes():
    numbers = ClientNumbers(2)
    numbers.bind(numbers.resolve(replies({9: 1}))[0])
    assert resolved(numbers, {8: 1, 9: 1}) == ({9: 1}, {8})
    assert resolved(numbers, {8: 1}) == ({}, {8}), "also while its node is away"


def test_a_node_has_one_number():
    numbers = ClientNumbers(3)
    numbers.bind(numbers.resolve(replies({9: 1}))[0])
    assert resolved(numbers, {9: 2}) == ({}, {9})
    assert resolved(numbers, {9: None}) == ({9: 1}, set())


def test_a_claim_cannot_take_the_number_of_a_node_that_claims_none():
    numbers = ClientNumbers(2)
    numbers.assign([5, 6])
    assert resolved(numbers, {5: 1, 6: None}) == ({6: 1}, {5})


def test_assigned_numbers_avoid_bound_ones():
    numbers = ClientNumbers(3, {0: 9})
    numbers.assign([3, 9])
    assert resolved(numbers, {3: None, 9: None}) == ({3: 1, 9: 0}, set())


@pytest.mark.parametrize("client", [-1, 2, 2**70])
def test_a_number_outside_the_clients_is_refused(client):
    assert resolved(ClientNumbers(2), {5: client}) == ({}, {5})


@pytest.mark.parametrize(
    ("memory", "connected", "owners"),
    [({"nodes": {0: 5, 1: 6}}, [6, 7], {0: 5, 1: 6}), ({"nodes": {0: 5}}, [6, 7], {}), ((), [5], {})],
    ids=["some connected", "all ids are new", "nothing recorded"],
)
def test_recorded_client_numbers_are_used_if_nodes_keep_their_ids(memory, connected, owners):
    assert recorded_owners(memory, connected) == owners


# --------------------------------------------------------------------------------------------------------- whole runs


def claiming(claims, from_round=1):
    """Replies of nodes that claim these client numbers; the impostor replies from round `from_round` on."""

    def answer(message):
        node = message.metadata.dst_node_id
        if node == FIRST and message.content["config"]["server-round"] < from_round:
            return None
        return reply(message, client=claims[node])

    return answer


IMPOSTOR = {FIRST: 1, SECOND: 1, THIRD: 2, LAST: 3}  # with the lowest id, so that it would win a first claim


def without_the_impostor(message):
    return claiming(IMPOSTOR, from_round=99)(message)


def test_a_node_with_the_number_of_another_node_is_left_out():
    strategy, result = run_over_the_air(claiming(IMPOSTOR, from_round=2), rounds=3)
    assert {dropped.node for dropped in strategy.left_out} == {FIRST}
    assert bits(result.arrays) == bits(run_over_the_air(without_the_impostor, rounds=3)[1].arrays)


def test_a_resumed_run_keeps_the_client_numbers_of_its_nodes(tmp_path):
    run_over_the_air(without_the_impostor, rounds=1, folder=tmp_path)
    assert sa.load(tmp_path).state.clients == {"nodes": {1: SECOND, 2: THIRD, 3: LAST}}
    strategy, result = run_over_the_air(claiming(IMPOSTOR), rounds=3, folder=tmp_path)
    assert [(dropped.k, dropped.node) for dropped in strategy.left_out] == [(1, FIRST), (2, FIRST)]
    assert bits(result.arrays) == bits(run_over_the_air(without_the_impostor, rounds=3)[1].arrays)


def test_nodes_with_new_ids_resume_a_run(tmp_path):
    """A simulation draws new node ids at every start."""
    clients = {node: client for client, node in enumerate(sorted(NODES))}
    run_over_the_air(claiming(clients), rounds=1, folder=tmp_path)
    new = {node + 1000: client for node, client in clients.items()}
    grid = Nodes(lambda message: reply(message, client=new[message.metadata.dst_node_id]), nodes=list(new))
    strategy, _ = run_over_the_air(grid=grid, rounds=2, folder=tmp_path)
    assert not strategy.left_out
    assert sa.load(tmp_path)["channel/senders"] == [4, 4]
