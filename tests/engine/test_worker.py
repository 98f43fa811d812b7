"""Batches, memory and idle clients of the stacked engine's worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stableair.engine
from helpers.engine import assert_uploads_agree, network, reference, stacked
from stableair.data.datasets import synthetic
from stableair.engine.worker import StackedWorker, _graph_size, schedule
from stableair.vector import state


def test_finished_clients_are_not_trained(monkeypatch):
    slow = reference(network("logistic()"), synthetic(samples=24, classes=3, shape=(3, 8, 8)), [4, 14, 6])
    real, active = StackedWorker.step, []
    monkeypatch.setattr(StackedWorker, "step", lambda self, m: (active.append(m), real(self, m)))
    assert_uploads_agree(slow, stacked(slow), state(slow.work.module), 1e-5)
    assert active == [3, 3, 2, 2, 1, 1, 1, 1], "two epochs of 4, 2 and 1 batches, the longest first"


@given(st.integers(1, 300), st.data())
def test_a_graph_is_large_enough_for_its_clients_and_little_larger(n, data):
    m = data.draw(st.integers(1, n))
    assert m <= _graph_size(m, n) <= min(n, max(1.5 * m + 1, n / 64 + 1))
    assert len({_graph_size(m, n) for m in range(1, n + 1)}) <= 12, "few graphs"


def test_prepared_batches_equal_the_batches_of_the_round(monkeypatch):
    slow = reference(network("logistic()"), synthetic(samples=24, classes=3, shape=(3, 8, 8)), [9, 4, 11])
    scheduled = []
    real = stableair.engine.trainer.schedule
    monkeypatch.setattr(
        stableair.engine.trainer, "schedule", lambda *args: (scheduled.append(args[1:]), real(*args))[1]
    )
    for chunk, chunks in ((2, [[2, 0], [1]]), (3, [[2, 0, 1]])):
        scheduled.clear()
        fast = stacked(slow, chunk)
        fast._prepare(3, [2, 0, 1])
        assert_uploads_agree(slow, fast, state(slow.work.module), 1e-5, k=3)
        assert scheduled == [(3, clients) for clients in chunks], "the first chunk was prepared"
        assert_uploads_agree(slow, fast, state(slow.work.module), 1e-5, k=4)
        assert scheduled[len(chunks) :] == [(4, clients) for clients in chunks], (
            "prepared batches are not used in another round"
        )


def test_the_schedule_has_the_batches_of_the_reference():
    slow = reference(network("logistic()"), synthetic(samples=33, classes=3, shape=(3, 8, 8)), [9, 4, 11, 9])
    plan = schedule(slow.work, 5, [3, 2, 0, 1])
    assert plan.steps == [6, 6, 6, 2]
    assert plan.active == [4, 4, 3, 3, 3, 3], "the client with the fewest samples is the last row"
    for row, n in enumerate([3, 2, 0, 1]):
        for t, batch in enumerate(slow.work.batches(slow.work.orders(5, [n])[0])):
            present = plan.weight[t, row] > 0
            assert plan.index[t, row][present].tolist() == slow.work.parts[n][batch].tolist()
            assert plan.weight[t, row].sum() == pytest.approx(1)
        assert plan.weight[int(plan.steps[row]) :, row].sum() == 0
    assert schedule(slow.work, 5, [1]).index.shape == (2, 1, 4), "padded to the largest batch of all clients"
