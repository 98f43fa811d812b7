"""The best checkpoint of a run."""

import pytest
import torch

import stableair as sa
from helpers.callbacks import Hooks
from helpers.errors import refused
from helpers.runs import Stop, flipped, stop_after
from stableair.results.checksums import BEST


def best_round(run, metric, best):
    values = run[metric]
    return values.index(best(values))


def states(experiment, rounds):
    return [sa.run(experiment.with_(rounds=k + 1)).state.model.w for k in range(rounds)]


@pytest.mark.parametrize(("metric", "best"), [("channel/snr_db", max), ("train/loss", min), ("test/loss", min)])
def test_the_best_checkpoint_is_the_state_after_the_best_round(metric, best, tiny, tmp_path):
    run = sa.run(tiny, tmp_path, keep_best=True, monitor=metric)
    k = best_round(run, metric, best)
    kept = sa.load(tmp_path).best
    assert kept.rounds == k + 1
    assert torch.equal(kept.state.model.w, states(tiny, 4)[k])


@pytest.mark.parametrize("stopped_after", range(4))
@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_a_resumed_run_keeps_the_same_best_round(stopped_after, checkpoint_every, tiny, tmp_path):
    options = {"keep_best": True, "monitor": "channel/snr_db", "checkpoint_every": checkpoint_every}
    e = tiny.with_(rounds=5)
    with pytest.raises(Stop):
        sa.run(e, tmp_path, callbacks=[Hooks(round=stop_after(stopped_after))], **options)
    run = sa.run(e, tmp_path, resume=True, **options)
    assert run.best.rounds == best_round(run, "channel/snr_db", max) + 1


def test_the_best_checkpoint_is_updated_and_a_damaged_one_is_replaced(tiny, tmp_path):
    sa.run(tiny.with_(rounds=1), tmp_path, keep_best=True, monitor="test/loss")
    sa.run(tiny.with_(rounds=3), tmp_path, resume=True, monitor="train/loss")
    run = sa.load(tmp_path)
    assert run.best.rounds == best_round(run, "train/loss", min) + 1 > 1
    (tmp_path / BEST).write_bytes(flipped((tmp_path / BEST).read_bytes(), 4000))
    with pytest.raises(sa.CorruptRunError):
        _ = run.best
    longer = sa.run(tiny, tmp_path, resume=True, keep_best=True, monitor="train/loss")
    assert longer.best.rounds == best_round(longer, "train/loss", min) + 1


@pytest.mark.parametrize("keep_best", [False, True])
def test_a_resumed_run_keeps_the_metric(keep_best, tiny, tmp_path):
    """With another metric after the resumption, the file would hold the best round of neither metric."""
    metric = "channel/snr_db"
    runs = {"a": sa.run(tiny, tmp_path / "whole", keep_best=True, monitor=metric)}
    for stopped in range(1, 4):
        sa.run(tiny.with_(rounds=stopped), tmp_path / str(stopped), keep_best=True, monitor=metric)
        runs[str(stopped)] = sa.run(tiny, tmp_path / str(stopped), resume=True, keep_best=keep_best)
    assert {run.best.rounds for run in runs.values()} == {best_round(runs["a"], metric, max) + 1}


def test_the_last_round_before_a_resumption_can_be_the_best(tiny, tmp_path):
    monitor = "gradient/norm"
    k = best_round(sa.run(tiny), monitor, max)
    assert k < 3, "the best round is not the last one"
    sa.run(tiny.with_(rounds=k + 1), tmp_path)
    assert sa.run(tiny, tmp_path, resume=True, keep_best=True, monitor=monitor).best.rounds == k + 1


def test_a_best_checkpoint_of_a_lost_round_is_ignored(tiny, tmp_path):
    """The process was killed after it wrote the best checkpoint and before the last checkpoint was on the disk."""
    sa.run(tiny.with_(rounds=1), tmp_path / "a", keep_best=True)
    sa.run(tiny, tmp_path / "b", keep_best=True, monitor="train/loss")
    (tmp_path / "b" / BEST).replace(tmp_path / "a" / BEST)
    run = sa.run(tiny, tmp_path / "a", resume=True, keep_best=True, monitor="test/loss")
    assert run.best.rounds == best_round(run, "test/loss", min) + 1


def test_by_default_there_is_no_best_checkpoint(tiny, tmp_path):
    run = sa.run(tiny, tmp_path)
    assert not (tmp_path / BEST).exists()
    refused("no-best", lambda: run.best)
    refused("needs-folder", sa.run, tiny, keep_best=True)
    refused("wrong-type", sa.run, tiny, tmp_path / "b", keep_best="yes")


def test_a_diverged_round_is_not_the_best(tiny, tmp_path):
    e = tiny.with_(receiver="none()", noise="sas(alpha=0.5, tau=1e32)")
    run = sa.run(e.with_(rounds=30), tmp_path, keep_best=True, monitor="gradient/norm")
    assert run.diverged
    assert run.best.rounds <= run.diverged
    assert run.best.state.model.w.isfinite().all()
