import json
import sys

import pytest
import torch

from helpers import ROOT
from stableair import bench, workloads
from stableair.cli import main as cli
from stableair.engine.trainer import StackedTrainer
from stableair.errors import InputError

PEERS = ROOT / "bench" / "peers"
TRIAL_CLIENTS = 2  # clients in the equivalence check of the engine, which a wrong trainer has to pass here


@pytest.mark.slow
def test_every_mode_is_compared_and_timed(tiny):
    lines = []
    rows = bench.measure(tiny, 2, lines.append)
    assert [row.name for row in rows] == ["reference, fp32", "stacked, fp32", "vmapped, fp32", "processes, fp32"]
    assert all(len(row.seconds) == 2 and min(row.seconds) > 0 for row in rows)
    assert all(0 < sum(row.training) < sum(row.seconds) for row in rows)
    assert len(lines) == 4
    assert [row.name for row in bench.measure(tiny, 1, lines.append, only=["stacked", "proc"])] == [
        "stacked, fp32", "processes, fp32",
    ]  # fmt: skip


def test_a_mode_with_wrong_updates_is_not_timed(tiny, monkeypatch):
    real = StackedTrainer.__call__

    def wrong(self, state, k, clients):
        for upload in real(self, state, k, clients):
            yield upload._replace(update=upload.update * (1 if len(clients) == TRIAL_CLIENTS else 1.1))

    monkeypatch.setattr(StackedTrainer, "__call__", wrong)
    with pytest.raises(InputError) as error:
        bench.measure(tiny, 1, lambda line: None)
    assert (error.value.code, error.value.fields["mode"]) == ("mode-differs", "stacked, fp32")


def test_a_mode_with_wrong_losses_is_not_timed(tiny, monkeypatch):
    real = StackedTrainer.__call__

    def wrong(self, state, k, clients):
        for upload in real(self, state, k, clients):
            yield upload._replace(loss=upload.loss * (1 if len(clients) == TRIAL_CLIENTS else 1.01))

    monkeypatch.setattr(StackedTrainer, "__call__", wrong)
    with pytest.raises(InputError) as error:
        bench.measure(tiny, 1, lambda line: None)
    assert (error.value.code, error.value.fields["mode"]) == ("mode-differs", "stacked, fp32")


def test_rounds_with_their_records_are_timed(tiny):
    row = bench.recorded(tiny, 3)
    assert row.name == "stacked, fp32, recorded in a folder"
    assert len(row.seconds) == 3
    assert min(row.seconds) > 0


def test_the_table_has_ratios_to_the_reference_of_the_same_run():
    rows = [bench.Row("reference", [0.4, 0.2, 0.3]), bench.Row("fast", [0.1], [0.08], 4, 1.5)]
    lines = bench.table("digits", rows).splitlines()
    assert "commit " in lines[0]
    assert "50 clients" in lines[0]
    assert lines[-2:] == [
        "| reference | 3 | 0.3000 | 0.2000 to 0.4000 | 1.00 |  |  |  |",
        "| fast | 1 | 0.1000 | 0.1000 to 0.1000 | 3.00 | 20.00 | 20.0% | 1.5 GiB |",
    ]


@pytest.mark.slow
def test_the_plain_loop_runs_and_missing_peers_are_reported(tmp_path):
    for name in ("plain.py", "work.py"):
        (tmp_path / name).write_text((PEERS / name).read_text())
    lines = []
    (row,) = bench.peers(tmp_path, 2, lines.append)
    assert (row.name, len(row.seconds)) == ("plain", 2)
    assert [line.split(":")[0] for line in lines] == ["plain", "flower", "pfl_research"]
    assert float(lines[0].rpartition(" ")[2]) > 0.3, "the model learns"


def test_a_peer_that_fails_is_named(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text("raise SystemExit('no such thing')")
    with pytest.raises(InputError) as error:
        bench.peers(tmp_path, 1, lambda line: None)
    assert (error.value.code, error.value.fields["peer"]) == ("peer-failed", "plain")
    assert "no such thing" in str(error.value)


def test_scaling_prints_the_chosen_engine():
    text = bench.scaling((2, 3), {"logistic()": (1, 2, 2)}, 1, lambda line: None)
    assert "commit " in text.splitlines()[0]
    assert all(float(line.split(" | ")[-1].split()[0]) > 0 for line in text.splitlines()[4:]), "memory"
    assert [line.split(" | ")[2:4] for line in text.splitlines()[4:]] == [
        ["2", "stacked, 2 at a time"], ["3", "stacked, 3 at a time"],
    ]  # fmt: skip


def test_the_command_prints_and_records(tmp_path, monkeypatch, capsys, tiny):
    modes = bench.modes
    monkeypatch.setitem(workloads.WORKLOADS, "digits", tiny)
    (tmp_path / "records.md").write_text("# Records\n")
    monkeypatch.setattr(bench, "modes", lambda sim: list(modes(sim))[:2])  # the reference and the stacked engine
    words = ["stableair", "bench", "--rounds", "1", "--record", str(tmp_path / "records.md")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert "| stacked, fp32 | 1 |" in capsys.readouterr().out
    assert (tmp_path / "records.md").read_text().startswith("# Records\n\n20")


@pytest.mark.parametrize("where", [".", "missing/records.md"])
def test_a_record_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch, capsys, where):
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("a mode was timed"))
    monkeypatch.setattr(sys, "argv", ["stableair", "bench", "--record", str(tmp_path / where)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: cannot write ")


def test_the_exported_workload_is_that_of_the_experiment(tmp_path, monkeypatch):
    import numpy as np

    stored = np.load(bench._export_work(workloads.WORKLOADS["digits"], tmp_path / "w.npz"))
    assert sorted(stored["order"].tolist()) == list(range(1437))
    assert (stored["x"].shape, len(stored["sizes"]), stored["x"].max()) == ((1437, 64), 50, 1)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "w.npz"), "3"])
    monkeypatch.syspath_prepend(str(PEERS))
    import work

    read = work.read()
    flat = torch.cat([p.flatten() for p in work.network(read).parameters()])
    assert torch.equal(flat, torch.from_numpy(stored["start"]))
    assert json.dumps(read.rounds) == "3"
