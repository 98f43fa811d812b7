"""The client app and the server app of an experiment."""

import tomllib

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

import stableair as sa
from helpers import ROOT
from helpers.flower import NODES, Nodes, averaging, bits, nodes_with_our_app, start_arrays
from stableair.errors import InputError
from stableair.flower import OverTheAir, client_app
from stableair.flower.app import OPTIONS, experiment_from_config
from stableair.flower.arrays import to_array_record

EXAMPLE = ROOT / "examples/flower"


def test_our_app_gives_the_bits_of_a_plain_run(small, tmp_path):
    plain = sa.run(small, tmp_path / "plain")
    OverTheAir(averaging(), small, tmp_path / "flower").start(nodes_with_our_app(small), num_rounds=3)
    run = sa.load(tmp_path / "flower")
    assert [row | {"seconds": 0} for row in run.rounds] == [row | {"seconds": 0} for row in plain.rounds]
    assert torch.equal(run.state.model.w, plain.state.model.w)
    assert torch.equal(run.state.model.stats, plain.state.model.stats)
    assert torch.equal(run.state.energies, plain.state.energies)
    assert run.experiment == plain.experiment
    assert run.labels == plain.labels


def test_our_clients_train_with_the_local_rule_and_the_rounds_rate(small):
    e = small.with_(local="sgd(momentum=0.9, clip=1)", lr_decay="inverse(over=1)", label_smoothing=0.1)
    strategy = OverTheAir(averaging(), e)
    result = strategy.start(nodes_with_our_app(e), num_rounds=3)
    assert bits(result.arrays) == bits(
        to_array_record(sa.run(e).state.model, strategy.expected.layout, strategy.expected.norms)
    )


def test_a_plain_run_continues_a_run_of_flower(small, tmp_path):
    OverTheAir(averaging(), small, tmp_path).start(nodes_with_our_app(small), num_rounds=2)
    resumed, plain = sa.run(small, tmp_path, resume=True), sa.run(small)
    assert torch.equal(resumed.state.model.w, plain.state.model.w)
    assert resumed["energy_max"] == plain["energy_max"]


def nodes_with_one_difference(small, node, **changes):
    """Nodes with our app, one of which has other settings or, with `version`, another version of stableair."""
    good, odd = (
        nodes_with_our_app(small),
        nodes_with_our_app(small.with_(**{key: v for key, v in changes.items() if key != "version"})),
    )

    def answer(message):
        if message.metadata.dst_node_id != node:
            return good.answer(message)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sa, "__version__", changes.get("version", sa.__version__))
            return odd.answer(message)

    return Nodes(answer)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"version": "0.0.1"},
            f"the server has stableair {sa.__version__}, this node has 0.0.1; install the same version",
        ),
        ({"model": "logistic()"}, "the server has model normed(), this node has logistic()"),
        ({"lr": 0.5, "seed": 1}, "the server has seed 0, this node has 1; lr 0.03, this node has 0.5"),
    ],
)
def test_a_node_with_another_model_or_version_is_left_out_and_logs_it(small, changes, reason):
    strategy = OverTheAir(averaging(), small)
    result = strategy.start(nodes_with_one_difference(small, NODES[2], **changes), num_rounds=1)
    assert strategy.left_out == [(0, NODES[2], reason)]
    assert result.train_metrics_clientapp[1]["channel/senders"] == 3


def test_a_payload_of_another_length_is_left_out(small):
    """A node with a wider layer, whose app does not compare experiments."""

    def wider(message, context, call_next):
        reply = call_next(message, context)
        if reply.content["metrics"]["client"] == 1:
            arrays = reply.content["payload"]
            reply.content["payload"] = ArrayRecord(dict(arrays) | {"1.bias": Array(np.zeros(6, np.float32))})
        return reply

    strategy = OverTheAir(averaging(), small)
    strategy.start(nodes_with_our_app(small, mods=[wider]), num_rounds=1)
    assert [fault.reason for fault in strategy.left_out] == ["1.bias must have shape (5,): got (6,)"]


def test_if_all_nodes_have_another_experiment_the_error_has_the_reason(small):
    with pytest.raises(InputError) as error:
        OverTheAir(averaging(), small).start(nodes_with_our_app(small, lr=0.5), num_rounds=1)
    assert error.value.code == "no-replies"
    assert "the server has lr 0.03, this node has 0.5" in str(error.value)


def test_the_error_of_a_node_without_a_number_has_the_fix(small):
    config = ConfigRecord({"stableair": sa.__version__, "experiment": small.to_json(), "server-round": 1})
    message = Message(RecordDict({"arrays": start_arrays(), "config": config}), dst_node_id=1, message_type="train")
    with pytest.raises(InputError) as error:
        client_app(small)(message, Context(1, 1, {}, RecordDict(), {}))
    assert (error.value.code, error.value.fields["name"]) == ("unknown-client", "partition-id")


def test_the_app_for_flwr_run_knows_the_settings_and_their_defaults():
    config = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert config["components"] == {
        "serverapp": "stableair.flower.app:server",
        "clientapp": "stableair.flower.app:client",
    }
    e = experiment_from_config(config["config"])
    assert e.with_(clients=50, rounds=100) == sa.Experiment()
    assert set(OPTIONS) <= set(config["config"])
    settings = tomllib.loads((EXAMPLE / "settings.toml").read_text())
    assert set(settings) <= set(config["config"]), "Flower refuses a setting that the app does not name"


def test_the_example_around_a_stock_client_is_short():
    assert len((EXAMPLE.parent / "flower_stock.py").read_text().splitlines()) < 40
