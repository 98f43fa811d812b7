"""Runs over Flower, recorded and resumed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import (
    FedAdam,
    FedAvg,
    FedAvgM,
)

import stableair as sa
import stableair.flower.strategy
from helpers.flower import NODES, Nodes, averaging, bits, nodes_with_our_app, reply, run_over_the_air, samples
from stableair.errors import InputError
from stableair.flower import OverTheAir
from stableair.results.grouping import group
from stableair.results.reading import find


@pytest.mark.parametrize("kind", [FedAvg, FedAdam, FedAvgM])
@pytest.mark.parametrize("payload", ["gradient", "delta"])
def test_a_finished_run_is_extended(kind, payload, tmp_path):
    options = {FedAvg: {}, FedAdam: {"eta": 0.5}, FedAvgM: {"server_learning_rate": 0.5, "server_momentum": 0.9}}[kind]
    settings = {"receiver": "mac(C=auto)", "server": "momentum()", "payload": payload}
    _, result = run_over_the_air(rounds=4, strategy=averaging(kind, **options), **settings)
    for rounds in (1, 3, 4, 4):
        _, resumed = run_over_the_air(rounds=rounds, strategy=averaging(kind, **options), folder=tmp_path, **settings)
    assert bits(resumed.arrays) == bits(result.arrays)
    run = sa.load(tmp_path)
    assert run["channel/senders"] == [4] * 4
    assert run["gradient/norm"] == [result.train_metrics_clientapp[k]["gradient/norm"] for k in (1, 2, 3, 4)]
    assert [entry["first_round"] for entry in run.environments] == [0, 1, 3]
    assert run.environments[0]["strategy"].startswith(kind.__name__)


def test_a_resumed_run_continues_the_round_numbers_of_the_clients(tmp_path):
    seen = []

    def answer(message):
        seen.append(message.content["config"]["server-round"])
        return reply(message)

    run_over_the_air(answer, rounds=1, folder=tmp_path)
    _, result = run_over_the_air(answer, rounds=3, folder=tmp_path)
    assert seen == [1] * 4 + [2] * 4 + [3] * 4
    assert list(result.train_metrics_clientapp) == [2, 3]


def test_another_run_in_the_folder_is_refused(tmp_path):
    run_over_the_air(rounds=1, folder=tmp_path)
    with pytest.raises(InputError) as error:
        run_over_the_air(folder=tmp_path, strategy=averaging(FedAdam))
    assert error.value.code == "other-strategy"
    with pytest.raises(InputError) as error:
        run_over_the_air(folder=tmp_path, noise="none()")
    assert (error.value.code, error.value.fields["settings"]) == ("other-experiment", ["noise"])
    strategy = OverTheAir(averaging(), folder=tmp_path, lr=0.1, receiver="mac(C=0.5)")
    with pytest.raises(InputError) as error:
        strategy.start(Nodes(reply), ArrayRecord({"w": Array(np.ones(3, np.float32))}))
    assert error.value.code == "other-network"


def test_runs_with_other_strategies_and_networks_are_other_runs(tmp_path):
    run_over_the_air(folder=tmp_path / "average")
    run_over_the_air(folder=tmp_path / "again")
    for eta in (0.01, 0.1):
        run_over_the_air(folder=tmp_path / f"adam{eta}", strategy=averaging(FedAdam, eta=eta))
    strategy = OverTheAir(averaging(), folder=tmp_path / "network", lr=0.1, receiver="mac(C=0.5)")
    strategy.start(Nodes(reply), ArrayRecord({"w": Array(np.ones(3, np.float32))}), 2)
    runs, left_out = find([tmp_path])
    assert len(runs) == 4
    assert len(left_out) == 1, "the second run of FedAvg is a copy of the first"
    labels = group(runs)
    assert len(labels) == 4
    assert sum("eta=0.01" in label for label in labels) == 1
    assert sum("3 parameters" in label for label in labels) == 1
    assert {"strategy", "network"} <= set(sa.table(runs).columns)


def test_the_evaluation_is_recorded(tmp_path):
    def evaluate(server_round, arrays):
        return MetricRecord({"accuracy": 0.25 * server_round, "custom/score": 1.0}) if server_round != 2 else None

    _, result = run_over_the_air(rounds=3, evaluate_fn=evaluate, folder=tmp_path)
    run = sa.load(tmp_path)
    assert run["test/accuracy"] == [0.25, None, 0.75]
    assert run["custom/score"] == [1.0, None, 1.0]
    assert {k: metrics["accuracy"] for k, metrics in result.evaluate_metrics_serverapp.items()} == {
        0: 0.0,
        1: 0.25,
        3: 0.75,
    }
    assert run["train/loss"][0] == pytest.approx(1 + sum(NODES) / 4000)


def test_without_losses_of_the_clients_no_loss_is_recorded(tmp_path):
    run_over_the_air(lambda message: reply(message, train_loss=None), folder=tmp_path)
    assert sa.load(tmp_path)["train/loss"] == [None, None]


def test_the_clients_metrics_reach_flower():
    _, result = run_over_the_air(lambda message: reply(message, speed=2.0 * message.metadata.dst_node_id))
    weights = np.array([samples(node) for node in NODES])
    assert result.train_metrics_clientapp[1]["speed"] == pytest.approx((2 * weights * NODES).sum() / weights.sum())


def test_a_resumed_run_uses_the_recorded_number_of_threads(tmp_path):
    counts = []

    def answer(message):
        counts.append(torch.get_num_threads())
        return reply(message)

    before = torch.get_num_threads()
    try:
        for threads, rounds in ((2, 1), (1, 2)):
            torch.set_num_threads(threads)
            run_over_the_air(answer, rounds=rounds, folder=tmp_path)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert set(counts) == {2}
    assert [entry["threads"] for entry in sa.load(tmp_path).environments] == [2, 2]


def test_a_resumed_run_refuses_other_data_files(small, tmp_path, monkeypatch):
    def start(version, rounds):
        with monkeypatch.context() as patch:
            build = stableair.flower.strategy.build
            patch.setattr("stableair.flower.strategy.build", lambda e: replace(build(e), files={"a.csv": version}))
            OverTheAir(averaging(), small, tmp_path / "a").start(nodes_with_our_app(small), num_rounds=rounds)

    start("1", rounds=1)
    start("1", rounds=2)
    with pytest.raises(InputError) as error:
        start("2", rounds=3)
    assert (error.value.code, error.value.fields["before"]) == ("data-changed", {"a.csv": "1"})
    assert len(sa.load(tmp_path / "a")) == 2
