"""The strategy OverTheAir: replies as the uploads of Algorithm 1, and the strategies that it wraps."""

import importlib
import itertools
import sys

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
)

import stableair as sa
from helpers.errors import refused
from helpers.flower import NODES, Nodes, averaging, bits, reply, run_over_the_air, samples, start_arrays
from stableair.algorithm import Simulation, simulate
from stableair.builder import receiving_side, start_state
from stableair.contracts import Upload
from stableair.errors import InputError, MissingExtraError
from stableair.flower import OverTheAir
from stableair.flower.arrays import flat, layouts
from stableair.vector import ModelState, moments


def algorithm_1(e, rounds, senders=(0, 1, 2, 3)):
    """The rounds of simulate() with the same payloads, summed by decreasing number of samples, then by client."""
    arrays = start_arrays()
    layout, norms = layouts(arrays)
    order = sorted(senders, key=lambda n: (-samples(sorted(NODES)[n]), n))
    assert order != sorted(order), "otherwise the order would have no effect"

    def train(state, k, clients):
        sent = dict(arrays)
        for part, v in ((layout, state.w), (norms, state.stats)):
            for name, shape, block in zip(part.names, part.shapes, part.split(v), strict=True):
                sent[name] = Array(block.reshape(shape).numpy())
        for n in clients.tolist():
            content = RecordDict({"arrays": ArrayRecord(sent)})
            message = Message(content, dst_node_id=sorted(NODES)[n], message_type="train")
            replied = reply(message).content
            u = (state.w - flat(replied["arrays"], layout)) * (1 / 0.1)
            loss = torch.tensor([replied["metrics"]["train_loss"]])
            yield Upload(torch.tensor([n]), u[None], moments(flat(replied["arrays"], norms), norms)[None], loss)

    side, clients = receiving_side(e, layout, norms), torch.tensor(order)
    start = start_state(ModelState(flat(arrays, layout), flat(arrays, norms)), side)
    sim = Simulation(
        4,
        0,
        start,
        layout,
        train,
        **side._asdict(),
        evaluate=lambda model, averaged: {},
        participants=lambda k: clients,
    )
    return list(simulate(sim, start, rounds)), layout, norms


def test_the_replies_are_the_uploads_of_algorithm_1():
    strategy, result = run_over_the_air(rounds=3)
    rounds, layout, norms = algorithm_1(strategy.experiment.with_(clients=4), 3)
    assert torch.equal(flat(result.arrays, layout), rounds[-1].state.model.w)
    assert torch.equal(flat(result.arrays, norms), rounds[-1].state.model.stats)
    for k, round_ in enumerate(rounds, 1):
        metrics = result.train_metrics_clientapp[k]
        assert {name: metrics[name] for name in round_.metrics if round_.metrics[name] is not None} == {
            name: value for name, value in round_.metrics.items() if value is not None
        }


def test_the_metrics_follow_their_settings(tmp_path):
    run_over_the_air(rounds=2, folder=tmp_path, bandwidth=2e7, symbol_energy=1e-3, snr_blocks="tensor")
    plain, scaled = run_over_the_air(rounds=1)[1].train_metrics_clientapp[1], sa.load(tmp_path)
    assert scaled["channel/seconds"][0] == pytest.approx(plain["channel/uses"] / 2e7)
    assert scaled["energy"][0] == pytest.approx(1e-3 * plain["channel/energy_mean"])
    assert len(scaled["channel/snr_db/0.weight"]) == 2


SILENT = {"noise": "none()", "fading": "unit()"}


@pytest.mark.parametrize(
    "settings",
    [{}, {"channel": "waveform(basis=hadamard, antennas=3)"}, {"channel": "digital(aggregate=median)"} | SILENT],
    ids=lambda settings: settings.get("channel", "flat"),
)
def test_only_clients_that_replied_are_in_the_sum(settings):
    strategy, result = run_over_the_air(lambda m: None if m.metadata.dst_node_id == 44 else reply(m), **settings)
    rounds, layout, _ = algorithm_1(strategy.experiment.with_(clients=4), 2, senders=(0, 2, 3))
    assert torch.equal(flat(result.arrays, layout), rounds[-1].state.model.w)


def test_returned_weights_become_payloads_of_the_rounds_rate():
    """Without interference the model is the mean of the weights returned by the clients, for every learning rate."""
    noiseless = SILENT | {"receiver": "none()"}
    decaying, constant = (
        run_over_the_air(rounds=3, lr_decay=decay, **noiseless)[1].arrays for decay in ("inverse(over=1)", "constant()")
    )
    layout, _ = layouts(start_arrays())
    torch.testing.assert_close(flat(decaying, layout), flat(constant, layout))


@pytest.mark.parametrize("aggregate", ["krum(f=0)", "trimmed_mean(f=1)"])
def test_with_fewer_replies_than_the_aggregator_needs_the_model_stays(aggregate, tmp_path, caplog):
    def answer(message):
        missing = message.content["config"]["server-round"] == 2 and message.metadata.dst_node_id in (17, 44)
        return None if missing else reply(message)

    settings = SILENT | {"channel": f"digital(aggregate={aggregate!r})"}
    _, result = run_over_the_air(answer, rounds=2, folder=tmp_path, **settings)
    assert [r.args for r in caplog.records if r.levelname == "WARNING" and "no client was received" in r.msg] == [(1,)]
    assert bits(result.arrays) == bits(run_over_the_air(rounds=1, **settings)[1].arrays)
    _, result = run_over_the_air(answer, rounds=3, folder=tmp_path, **settings)
    assert bits(result.arrays) == bits(run_over_the_air(rounds=2, **settings)[1].arrays)
    assert sa.load(tmp_path)["channel/senders"] == [4, 0, 4]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[5::7])
def test_the_order_of_arrival_changes_nothing(order):
    grid = Nodes(reply, nodes=[NODES[i] for i in order], arrival=lambda replies: [replies[i] for i in order if replies])
    assert bits(run_over_the_air(grid=grid)[1].arrays) == bits(run_over_the_air()[1].arrays)


@pytest.mark.parametrize("kind", [FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan, QFedAvg])
def test_a_strategy_that_compares_replies_is_refused(kind):
    strategy = kind(client_learning_rate=0.1) if kind is QFedAvg else kind()
    with pytest.raises(InputError) as error:
        OverTheAir(strategy)
    assert (error.value.code, error.value.fields["strategy"]) == ("needs-replies", kind.__name__)
    assert "FedProx" in str(error.value)


def test_a_class_and_a_wrapped_strategy_are_refused_with_the_fix():
    assert "pass an instance: FedAvg()" in str(refused("wrong-type", OverTheAir, FedAvg, lr=0.1))
    assert "OverTheAir already" in str(refused("wrong-type", OverTheAir, OverTheAir(FedAvg())))


def test_a_strategy_that_clips_replies_and_an_object_without_strategy_are_refused():
    with pytest.raises(InputError) as error:
        OverTheAir(DifferentialPrivacyServerSideFixedClipping(averaging(), 1.0, 1.0, 2))
    assert error.value.code == "needs-replies"
    with pytest.raises(InputError) as error:
        OverTheAir("FedAvg")
    assert error.value.code == "wrong-type"


def test_a_custom_strategy_may_accept_a_single_reply():
    class Custom(FedAvg):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, replies)

    with pytest.raises(InputError) as error:
        OverTheAir(averaging(Custom))
    assert error.value.code == "needs-replies"
    Custom.over_the_air = True
    assert bits(run_over_the_air(strategy=averaging(Custom))[1].arrays) == bits(run_over_the_air()[1].arrays)


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedYogi, FedAvgM])
def test_a_strategy_with_a_server_optimiser_keeps_types_and_norm_buffers(kind):
    options = {"server_learning_rate": 0.5, "server_momentum": 0.9} if kind is FedAvgM else {"eta": 0.5}
    arrays, plain = run_over_the_air(strategy=averaging(kind, **options))[1].arrays, run_over_the_air()[1].arrays
    assert [array.dtype for array in arrays.values()] == [array.dtype for array in start_arrays().values()]
    assert bits(arrays)["0.weight"] != bits(plain)["0.weight"]
    once = run_over_the_air(strategy=averaging(kind, **options), rounds=1)[1].arrays
    assert bits(once)["1.running_var"] == bits(run_over_the_air(rounds=1)[1].arrays)["1.running_var"], (
        "norm buffers are not weights"
    )
    assert bits(once)["1.num_batches_tracked"] == bits(start_arrays())["1.num_batches_tracked"]


def test_the_proximal_term_of_flowers_fedprox_is_used():
    seen = []

    def answer(message):
        seen.append(message.content["config"]["proximal-mu"])
        return reply(message)

    run_over_the_air(answer, strategy=averaging(FedProx, proximal_mu=0.25), rounds=1)
    assert seen == [0.25] * 4


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"noize": "none()"}, ("unknown-value", "setting")),
        ({"local_epochs": 3}, ("unknown-value", "setting")),
        ({"receiver": "mac(D=1)"}, ("unknown-argument", "D")),
        ({"enough": 0}, ("out-of-range", "enough")),
        ({"power": "limit(P=1)"}, ("noise-not-on-sum", None)),
    ],
)
def test_settings_are_checked(settings, expected):
    with pytest.raises(InputError) as error:
        OverTheAir(averaging(), **settings)
    assert (error.value.code, error.value.fields.get("name")) == expected


def test_a_participation_rule_is_refused_because_the_strategy_selects_clients(small, registries):
    @sa.participation("no_clients")
    def no_clients():
        return lambda n, source: torch.arange(0)

    with pytest.raises(InputError) as error:
        OverTheAir(averaging(), small.with_(participation="no_clients()"))
    assert error.value.code == "unsupported-participation"


def test_a_stock_run_needs_a_model():
    strategy = OverTheAir(averaging())
    with pytest.raises(InputError) as error:
        strategy.start(Nodes(reply))
    assert (error.value.code, error.value.fields["name"]) == ("missing-model", "initial_arrays")
    with pytest.raises(InputError) as error:
        strategy.start(Nodes(reply), ArrayRecord({"counter": Array(np.ones(2, np.int64))}))
    assert (error.value.code, error.value.fields["name"]) == ("missing-model", "initial_arrays")


@pytest.mark.parametrize("missing", ["flwr", "flwr.serverapp.strategy"])  # not installed; an older version
def test_without_the_extra_the_import_raises(missing, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("stableair.flower", f"{missing}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError) as error:
        importlib.import_module("stableair.flower")
    assert error.value.fields["extra"] == "flower"
