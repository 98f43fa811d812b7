"""Batches, memory and idle clients of the stacked engine's worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stableair.engine
from helpers.engine import assert_uploads_agree, network, reference, stacked
from stableair.data.datasets import synthetic
from stableair.engine.worker import StackedWorker, _graph_size, schedule
from stableair.vector import state


def test_finished_clients_are_not_computed(monkeypatch):
    slow = reference(network("logistic()"), synthetic(samples=24, classes=3, shape=(3, 8, 8)), [4, 14, 6])
    real, taken = StackedWorker.step, []
    monkeypatch.setattr(StackedWorker, "step", lambda self, m: (taken.append(m), real(self, m)))
    assert_uploads_agree(slow, stacked(slow), state(slow.work.module), 1e-5)
    assert taken == [3, 3, 2, 2, 1, 1, 1, 1], "two epochs of 4, 2 and 1 batches, the longest first"


@given(st.integers(1, 300), st.data())
def test_a_graph_has_room_for_its_clients_and_little_more(n, data):
    m = data.draw(st.integers(1, n))
    assert m <= _graph_size(m, n) <= min(n, max(1.5 * m + 1, n / 64 + 1))
    assert len({_graph_size(m, n) for m in range(1, n + 1)}) <= 12, "few graphs"


def test_prepared_batches_equal_the_batches_of_the_round(monkeypatch):
    slow = reference(network("logistic()"), synthetic(samples=24, classes=3, shape=(3, 8, 8)), [9, 4, 11])
    made = []
    real = stableair.engine.trainer.schedule
    monkeypatch.setattr(stableair.engine.trainer, "schedule", lambda *args: (made.append(args[1:]), real(*args))[1])
    for chunk, chunks in ((2, [[2, 0], [1]]), (3, [[2, 0, 1]])):
        made.clear()
        fast = stacked(slow, chunk)
        fast._prepare(3, [2, 0, 1])
        assert_uploads_agree(slow, fast, state(slow.work.module), 1e-5, k=3)
        assert made == [(3, clients) for clients in chunks], "the first was there"
        assert_uploads_agree(slow, fast, state(slow.work.module), 1e-5, k=4)
        assert made[len(chunks) :] == [(4, clients) for clients in chunks], "and is not taken for another round"


def test_the_schedule_is_the_references_batches():
    slow = reference(network("logistic()"), synthetic(samples=33, classes=3, shape=(3, 8, 8)), [9, 4, 11, 9])
    plan = schedule(slow.work, 5, [3, 2, 0, 1])
    assert plan.steps == [6, 6, 6, 2]
    assert plan.active == [4, 4, 3, 3, 3, 3], "the client with few samples stands last"
    for row, n in enumerate([3, 2, 0, 1]):
        for t, batch in enumerate(slow.work.batches(slow.work.orders(5, [n])[0])):
            there = plan.weight[t, row] > 0
            assert plan.index[t, row][there].tolist() == slow.work.parts[n][batch].tolist()
            assert plan.weight[t, row].sum() == pytest.approx(1)
        assert plan.weight[int(plan.steps[row]) :, row].sum() == 0
    assert schedule(slow.work, 5, [1]).index.shape == (2, 1, 4), "room for the largest batch of anybody"
