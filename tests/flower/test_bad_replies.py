"""Replies that cannot be used, and nodes that do not answer."""

import re

import numpy as np
import pytest
from flwr.app import Error, Message

import stableair as sa
from helpers.flower import NODES, Nodes, bits, reply, run_over_the_air
from stableair.errors import InputError


def set_to(name, value):
    def change(weights):
        weights[name] = value(weights[name]) if callable(value) else value

    return change


FAULTS = {
    "nan": ({"change": set_to("0.weight", lambda w: w * np.float32(np.nan))}, "weights must be finite"),
    "inf in a buffer": ({"change": set_to("1.running_mean", lambda w: w + np.float32(np.inf))}, "norm buffers must be"),
    "shape (1,)": ({"change": set_to("0.bias", np.ones(1, np.float32))}, r"0.bias must have shape \(4,\): got \(1,\)"),
    "no key": ({"change": lambda weights: weights.pop("2.bias")}, "the array 2.bias is missing"),
    "another model": ({"change": set_to("9.weight", np.ones(2, np.float32))}, "the model has no array 9.weight"),
    "text": ({"change": set_to("0.bias", np.array(["a"] * 4))}, "must hold real numbers"),
    "number too large": ({"client": 7}, r"its client number must be 0 \.\.\. 3: got 7"),
    "loss": ({"train_loss": float("nan")}, "train_loss must be finite"),
    "no samples": ({"num-examples": None}, "must hold num-examples"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_is_left_out_and_named(fault):
    """The round equals a round without the node, and the reason is recorded."""
    changes, reason = FAULTS[fault]
    faulty = NODES[2]

    def answer(message):
        return reply(message, **changes if message.metadata.dst_node_id == faulty else {})

    def unavailable(message):
        if message.metadata.dst_node_id == faulty:
            return Message(Error(code=1, reason="<class 'a.b.OSError'>:<'it\nbroke'>"), reply_to=message)
        return reply(message)

    strategy, result = run_over_the_air(answer)
    without_node, expected = run_over_the_air(unavailable)
    assert bits(result.arrays) == bits(expected.arrays)
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())
    assert [(fault.k, fault.node) for fault in strategy.left_out] == [(0, faulty), (1, faulty)]
    assert re.search(reason, strategy.left_out[0].reason)
    assert without_node.left_out[0].reason == "OSError: it broke"
    metrics = result.train_metrics_clientapp[2]
    assert (metrics["channel/senders"], metrics["clients/left_out"]) == (3, 1)


def test_a_node_that_does_not_reply_is_named():
    strategy, _ = run_over_the_air(
        lambda message: None if message.metadata.dst_node_id == 44 else reply(message), rounds=1
    )
    assert strategy.left_out == [(0, 44, "no reply within 5 s")]


def test_a_node_that_the_superlink_drops_is_named_with_the_reason():
    def answer(message):
        if message.metadata.dst_node_id != 44:
            return reply(message)
        dropped = Message(Error(code=3, reason="Node Unavailable"), reply_to=message)
        dropped.metadata.__dict__["_src_node_id"] = 1  # the sender is the SuperLink
        return dropped

    strategy, _ = run_over_the_air(answer, rounds=1)
    assert strategy.left_out == [(0, 44, "Node Unavailable")]


def test_with_too_few_replies_the_model_stays(tmp_path, caplog):
    def answer(message):
        missing = message.content["config"]["server-round"] == 2 and message.metadata.dst_node_id != 17
        return None if missing else reply(message)

    strategy, result = run_over_the_air(answer, enough=2, folder=tmp_path)
    assert [r.args for r in caplog.records if "no client was received" in r.msg] == [(1,)]
    assert bits(result.arrays) == bits(run_over_the_air(rounds=1)[1].arrays)
    assert sa.load(tmp_path)["channel/senders"] == [4, 0]
    assert len(strategy.left_out) == 3


def test_a_run_without_replies_in_its_first_round_is_refused(tmp_path):
    with pytest.raises(InputError) as error:
        run_over_the_air(
            lambda m: Message(Error(code=1, reason="another version"), reply_to=m), folder=tmp_path / "new"
        )
    assert (error.value.code, error.value.fields["nodes"]) == ("no-replies", 4)
    assert "another version" in str(error.value)
    assert not (tmp_path / "new").exists()


def test_a_run_with_too_few_nodes_is_refused():
    with pytest.raises(InputError) as error:
        run_over_the_air(clients=5, timeout=0.01)
    assert (error.value.code, error.value.fields["connected"]) == ("missing-nodes", 4)


def test_a_model_that_diverges_ends_the_run_without_further_requests(tmp_path):
    grid = Nodes(reply)
    strategy, _ = run_over_the_air(grid=grid, rounds=5, server="sgd(lr=1e39)", receiver="none()", folder=tmp_path)
    assert strategy.diverged
    assert sa.load(tmp_path).diverged == 0
    assert grid.messages_sent == 4
