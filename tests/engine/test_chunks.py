"""The number of clients that are trained together, and its reduction when memory is insufficient."""

import pytest
import torch

import stableair as sa
import stableair.engine
from helpers.callbacks import Hooks
from helpers.engine import recorded_engines, uploads
from stableair.builder import build
from stableair.engine import EngineChoice, accelerate
from stableair.engine.worker import StackedWorker
from stableair.errors import ResourceError
from stableair.evaluation import Evaluate


def test_the_chunk_does_not_change_a_run_beyond_rounding(tiny):
    one, all_ = (sa.run(tiny.with_(engine="fast", chunk=chunk)) for chunk in (1, 5))
    torch.testing.assert_close(one.state.model.w, all_.state.model.w, rtol=1e-5, atol=1e-6)


def limit_memory(monkeypatch, max_clients=2):
    """Run out of memory for more than `max_clients` clients; returns the numbers of clients that are tried."""
    real, tried = StackedWorker.__call__, []

    def worker(self, state, plan, clients):
        tried.append(len(clients))
        if len(self.loss) > max_clients:
            raise torch.cuda.OutOfMemoryError
        return real(self, state, plan, clients)

    monkeypatch.setattr(StackedWorker, "__call__", worker)
    return tried


def test_a_chunk_that_was_halved_for_lack_of_memory_is_recorded_and_kept(tiny, tmp_path, monkeypatch, caplog):
    limit_memory(monkeypatch)
    sa.run(tiny.with_(rounds=2), tmp_path / "a")
    assert "out of memory: training 2 clients at a time" in caplog.text
    monkeypatch.undo()
    assert [e["chunk"] for e in recorded_engines(tmp_path / "a")] == [2]
    engines = []
    sa.run(tiny, tmp_path / "a", resume=True, callbacks=[Hooks(start=engines.append)])
    assert (engines[0]["chunk"], engines[0]["why"]) == (2, "as in the earlier rounds")


def test_out_of_memory_in_the_evaluation_is_reported(tiny, monkeypatch):
    monkeypatch.setattr(Evaluate, "__call__", lambda *_: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError()))
    with pytest.raises(ResourceError) as error:
        sa.run(tiny)
    assert error.value.code == "out-of-memory"


def test_out_of_memory_halves_the_chunk_and_repeats_it(tiny, monkeypatch, caplog):
    fast = accelerate(build(tiny), EngineChoice("stacked", "fp32", 4, "")).train
    tried = limit_memory(monkeypatch)
    start = build(tiny).start.model
    got = uploads(fast, start)
    assert "out of memory: training 2 clients at a time from now on" in caplog.text
    assert tried == [4, 2, 2, 1], "every client is trained once"
    assert len(fast._worker.loss) == 2, "the worker for 4 clients is released"
    monkeypatch.undo()
    expected = uploads(accelerate(build(tiny), EngineChoice("stacked", "fp32", 2, "")).train, start)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    limit_memory(monkeypatch, max_clients=0)
    with pytest.raises(ResourceError) as error:
        list(fast(start, 0, torch.arange(5)))
    assert error.value.code == "out-of-memory"
