"""Flower's nodes as the clients of Algorithm 1, with replies that are made up here."""

import importlib
import itertools
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
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
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

import stableair as sa
from stableair.algorithm import Simulation, simulate
from stableair.builder import receiving_side
from stableair.checks import InputError, Note
from stableair.contracts import Upload
from stableair.flower import OverTheAir, client_app, limited
from stableair.flower.app import OPTIONS, experiment_of
from stableair.flower.arrays import flat, layouts
from stableair.vector import State, moments

EXAMPLE = Path(__file__).parent.parent / "examples/flower"
NODES = [901, 17, 560, 44]  # as they come; in order they are 17, 44, 560, 901


@pytest.fixture(autouse=True)
def a_run(monkeypatch):
    """Messages belong to a run of Flower's; here to one that is made up."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Nodes:
    """A grid whose nodes answer here and now: (message, number of the round) -> reply, or None for none."""

    def __init__(self, answer, nodes=NODES, arrival=None):
        self.answer, self.nodes, self.arrival = answer, nodes, arrival or (lambda replies: replies)
        self.asked = 0

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, timeout=None):
        messages = list(messages)
        self.asked += len(messages)
        replies = [self.answer(message) for message in messages]
        return self.arrival([reply for reply in replies if reply is not None])


def model_of(seed=0):
    """A state_dict with a parameter of shape (1,), norm buffers and a counter."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def start_arrays():
    return ArrayRecord({name: Array(tensor.numpy()) for name, tensor in model_of().items()})


def samples(node):
    return 5 + 10 * (node % 4)


def reply(message, change=None, **metrics):
    """What a stock client returns: other weights, which depend on the node and on what it was sent."""
    node, sent = message.metadata.dst_node_id, message.content["arrays"]
    source = np.random.default_rng(node)
    weights = {}
    for name, array in sent.items():
        a = array.numpy()
        step = source.normal(size=a.shape).astype(a.dtype) if a.dtype.kind == "f" else np.ones_like(a)
        weights[name] = abs(a + a.dtype.type(0.1) * step) if "var" in name else a + a.dtype.type(0.1) * step
    if change:
        change(weights)
    told = {"train_loss": 1.0 + node / 1000, "num-examples": samples(node)} | metrics
    arrays = ArrayRecord({name: Array(np.asarray(w)) for name, w in weights.items()})
    told = MetricRecord({name: value for name, value in told.items() if value is not None})
    return Message(RecordDict({"arrays": arrays, "metrics": told}), reply_to=message)


def averaging(kind=FedAvg, **options):
    return kind(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, **options)


def air(answer=reply, rounds=2, strategy=None, grid=None, evaluate_fn=None, timeout=5.0, **settings):
    """A whole run; the strategy, and what Flower has collected."""
    over = OverTheAir(strategy or averaging(), **{"lr": 0.1, "receiver": "mac(C=0.5)"} | settings)
    found = over.start(grid or Nodes(answer), start_arrays(), rounds, timeout, evaluate_fn=evaluate_fn)
    return over, found


def bits(arrays):
    return {name: array.numpy().tobytes() for name, array in arrays.items()}


# -------------------------------------------------------------------------------------------------- the same bits


def algorithm_1(e, rounds, heard=(0, 1, 2, 3)):
    """What simulate() makes of the same payloads, added up by falling samples and then by number."""
    arrays = start_arrays()
    layout, norms = layouts(arrays)
    order = sorted(heard, key=lambda n: (-samples(sorted(NODES)[n]), n))
    assert order != sorted(order), "else the order would not be seen"

    def train(state, k, who):
        given = dict(arrays)
        for part, v in ((layout, state.w), (norms, state.stats)):
            for name, shape, block in zip(part.names, part.shapes, part.split(v), strict=True):
                given[name] = Array(block.reshape(shape).numpy())
        for n in who.tolist():
            content = RecordDict({"arrays": ArrayRecord(given)})
            message = Message(content, dst_node_id=sorted(NODES)[n], message_type="train")
            back = reply(message).content
            u = (state.w - flat(back["arrays"], layout)) * (1 / 0.1)
            loss = torch.tensor([back["metrics"]["train_loss"]])
            yield Upload(torch.tensor([n]), u[None], moments(flat(back["arrays"], norms), norms)[None], loss)

    begin = State(flat(arrays, layout), flat(arrays, norms))
    side, who = receiving_side(e, layout, norms)._asdict(), torch.tensor(order)
    sim = Simulation(4, 0, begin, layout, train, **side, evaluate=lambda s: {}, participants=lambda k: who)
    return list(simulate(sim, begin, rounds)), layout, norms


def test_the_replies_are_the_uploads_of_algorithm_1():
    over, found = air(rounds=3)
    rounds, layout, norms = algorithm_1(over.experiment.with_(clients=4), 3)
    assert torch.equal(flat(found.arrays, layout), rounds[-1].state.w)
    assert torch.equal(flat(found.arrays, norms), rounds[-1].state.stats)
    for k, round_ in enumerate(rounds, 1):
        told = found.train_metrics_clientapp[k]
        assert {name: told[name] for name in round_.metrics if round_.metrics[name] is not None} == {
            name: value for name, value in round_.metrics.items() if value is not None
        }


SILENT = {"noise": "none()", "fading": "unit()"}


@pytest.mark.parametrize(
    "settings",
    [{}, {"channel": "waveform(basis=hadamard, antennas=3)"}, {"channel": "digital(aggregate=median)"} | SILENT],
    ids=lambda settings: settings.get("channel", "flat"),
)
def test_only_those_that_replied_are_on_the_air(settings):
    over, found = air(lambda m: None if m.metadata.dst_node_id == 44 else reply(m), **settings)
    rounds, layout, _ = algorithm_1(over.experiment.with_(clients=4), 2, heard=(0, 2, 3))
    assert torch.equal(flat(found.arrays, layout), rounds[-1].state.w)


@pytest.mark.parametrize("aggregate", ["krum(f=0)", "trimmed_mean(f=1)"])
def test_with_fewer_replies_than_the_aggregator_needs_the_model_stays(aggregate, tmp_path):
    def answer(message):
        late = message.content["config"]["server-round"] == 2 and message.metadata.dst_node_id in (17, 44)
        return None if late else reply(message)

    settings = SILENT | {"channel": f"digital(aggregate={aggregate!r})"}
    with pytest.warns(Note, match="nobody was heard"):
        _, found = air(answer, rounds=2, folder=tmp_path, **settings)
    assert bits(found.arrays) == bits(air(rounds=1, **settings)[1].arrays)
    _, found = air(answer, rounds=3, folder=tmp_path, **settings)
    assert bits(found.arrays) == bits(air(rounds=2, **settings)[1].arrays)
    assert sa.load(tmp_path)["channel/senders"] == [4, 0, 4]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[5::7])
def test_the_order_of_arrival_changes_nothing(order):
    grid = Nodes(reply, nodes=[NODES[i] for i in order], arrival=lambda replies: [replies[i] for i in order if replies])
    assert bits(air(grid=grid)[1].arrays) == bits(air()[1].arrays)


@pytest.fixture
def small(registries):
    """An experiment with unequal clients and a model with batch norm."""

    @sa.model("normed")
    def normed():
        return lambda shape, classes: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, classes)
        )

    return sa.Experiment(
        data="digits", partition="dirichlet_by_class(beta=2.0)", model="normed()", clients=4, rounds=3, local_epochs=1,
        batch_size=40, receiver="mac(C=auto)", server="momentum(beta=0.5)", average=0.5, device="cpu",
        engine="reference",
    )  # fmt: skip


def ours(experiment, mods=None, **changes):
    """Nodes that run our own client app, the last node first."""
    app = client_app(experiment.with_(**changes), mods)

    def answer(message):
        n = sorted(NODES).index(message.metadata.dst_node_id)
        try:
            return app(message, Context(1, 1, {"partition-id": 3 - n}, RecordDict(), {}))
        except Exception as error:
            return Message(Error(code=0, reason=str(error)), reply_to=message)

    return Nodes(answer, arrival=lambda replies: replies[::-1])


def test_our_app_gives_the_bits_of_a_plain_run(small, tmp_path):
    plain = sa.run(small, tmp_path / "plain")
    OverTheAir(averaging(), small, tmp_path / "flower").start(ours(small), num_rounds=3)
    run = sa.load(tmp_path / "flower")
    assert [row | {"seconds": 0} for row in run.rounds] == [row | {"seconds": 0} for row in plain.rounds]
    assert torch.equal(run.state.w, plain.state.w)
    assert torch.equal(run.state.stats, plain.state.stats)
    assert run.experiment == plain.experiment
    assert run.labels == plain.labels


def test_what_flower_began_a_plain_run_finishes(small, tmp_path):
    OverTheAir(averaging(), small, tmp_path).start(ours(small), num_rounds=2)
    resumed = sa.run(small, tmp_path, resume=True)
    assert torch.equal(resumed.state.w, sa.run(small).state.w)


# ----------------------------------------------------------------------------------------------- strategies within


@pytest.mark.parametrize("kind", [FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan, QFedAvg])
def test_a_strategy_that_compares_replies_is_refused(kind):
    strategy = kind(client_learning_rate=0.1) if kind is QFedAvg else kind()
    with pytest.raises(InputError, match=r"compares the replies of the clients: over the air .*sum alone"):
        OverTheAir(strategy)


def test_so_is_one_that_clips_replies_and_one_that_is_none():
    with pytest.raises(InputError, match="compares the replies"):
        OverTheAir(DifferentialPrivacyServerSideFixedClipping(averaging(), 1.0, 1.0, 2))
    with pytest.raises(InputError, match="wraps a strategy"):
        OverTheAir("FedAvg")


def test_a_strategy_of_ones_own_says_that_one_reply_will_do():
    class Own(FedAvg):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, replies)

    with pytest.raises(InputError, match=r"Own compares the replies.*over_the_air = True"):
        OverTheAir(averaging(Own))
    Own.over_the_air = True
    assert bits(air(strategy=averaging(Own))[1].arrays) == bits(air()[1].arrays)


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedYogi, FedAvgM])
def test_a_strategy_that_steps_itself_keeps_types_and_norm_buffers(kind):
    options = {"server_learning_rate": 0.5, "server_momentum": 0.9} if kind is FedAvgM else {"eta": 0.5}
    found, plain = air(strategy=averaging(kind, **options))[1].arrays, air()[1].arrays
    assert [array.dtype for array in found.values()] == [array.dtype for array in start_arrays().values()]
    assert bits(found)["0.weight"] != bits(plain)["0.weight"]
    once = air(strategy=averaging(kind, **options), rounds=1)[1].arrays
    assert bits(once)["1.running_var"] == bits(air(rounds=1)[1].arrays)["1.running_var"], "they are no weights"
    assert bits(once)["1.num_batches_tracked"] == bits(start_arrays())["1.num_batches_tracked"]


def test_fedprox_asks_in_its_own_way():
    seen = []

    def answer(message):
        seen.append(message.content["config"]["proximal-mu"])
        return reply(message)

    air(answer, strategy=averaging(FedProx, proximal_mu=0.25), rounds=1)
    assert seen == [0.25] * 4


# ------------------------------------------------------------------------------------------------------------ faults


def set_to(name, value):
    def change(weights):
        weights[name] = value(weights[name]) if callable(value) else value

    return change


FAULTS = {
    "nan": ({"change": set_to("0.weight", lambda w: w * np.float32(np.nan))}, "weights must be finite"),
    "inf in a buffer": ({"change": set_to("1.running_mean", lambda w: w + np.float32(np.inf))}, "norm buffers must be"),
    "shape (1,)": ({"change": set_to("0.bias", np.ones(1, np.float32))}, r"0.bias has shape \(1,\) where \(4,\)"),
    "no key": ({"change": lambda weights: weights.pop("2.bias")}, "there is no array 2.bias"),
    "another model": ({"change": set_to("9.weight", np.ones(2, np.float32))}, "the model has no array 9.weight"),
    "text": ({"change": set_to("0.bias", np.array(["a"] * 4))}, "no real numbers"),
    "number too large": ({"client": 7}, "must be one of the 4 clients, from 0: got 7"),
    "loss": ({"train_loss": float("nan")}, "train_loss must be finite"),
    "no samples": ({"num-examples": None}, "must hold num-examples"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_is_left_out_and_named(fault):
    """The round is what it would be, had the node died; and it is said why."""
    changes, why = FAULTS[fault]
    faulty = NODES[2]

    def answer(message):
        return reply(message, **changes if message.metadata.dst_node_id == faulty else {})

    def dead(message):
        if message.metadata.dst_node_id == faulty:
            return Message(Error(code=1, reason="<class 'a.b.OSError'>:<'it\nbroke'>"), reply_to=message)
        return reply(message)

    over, found = air(answer)
    without, same = air(dead)
    assert bits(found.arrays) == bits(same.arrays)
    assert all(np.isfinite(array.numpy()).all() for array in found.arrays.values())
    assert [(fault.k, fault.node) for fault in over.left_out] == [(0, faulty), (1, faulty)]
    assert re.search(why, over.left_out[0].why)
    assert without.left_out[0].why == "OSError: it broke"
    told = found.train_metrics_clientapp[2]
    assert (told["channel/senders"], told["clients/left_out"]) == (3, 1)


def test_two_nodes_with_one_number_are_both_left_out():
    numbers = dict(zip(NODES, [0, 1, 1, 3], strict=True))
    over, found = air(lambda message: reply(message, client=numbers[message.metadata.dst_node_id]), rounds=1)
    assert {fault.node for fault in over.left_out} == {NODES[1], NODES[2]}
    assert over.left_out[0].why == "2 nodes say that they are client 1"
    assert found.train_metrics_clientapp[1]["channel/senders"] == 2


def test_a_node_that_never_answers_is_named():
    over, _ = air(lambda message: None if message.metadata.dst_node_id == 44 else reply(message), rounds=1)
    assert over.left_out == [(0, 44, "no reply within 5 s")]


def test_a_node_that_the_superlink_gives_up_is_named_with_its_reason():
    def answer(message):
        if message.metadata.dst_node_id != 44:
            return reply(message)
        gone = Message(Error(code=3, reason="Node Unavailable"), reply_to=message)
        gone.metadata.__dict__["_src_node_id"] = 1  # it is the SuperLink that says so
        return gone

    over, _ = air(answer, rounds=1)
    assert over.left_out == [(0, 44, "Node Unavailable")]


def test_with_too_few_replies_the_model_stays(tmp_path):
    def answer(message):
        late = message.content["config"]["server-round"] == 2 and message.metadata.dst_node_id != 17
        return None if late else reply(message)

    with pytest.warns(Note, match="nobody was heard"):
        over, found = air(answer, enough=2, folder=tmp_path)
    assert bits(found.arrays) == bits(air(rounds=1)[1].arrays)
    assert sa.load(tmp_path)["channel/senders"] == [4, 0]
    assert len(over.left_out) == 3


def test_if_nobody_can_be_heard_at_first_it_ends_at_once(tmp_path):
    with pytest.raises(InputError, match="round 0: of 4 nodes none can be heard; the first: another version"):
        air(lambda m: Message(Error(code=1, reason="another version"), reply_to=m), folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_if_nodes_do_not_come_it_ends():
    with pytest.raises(InputError, match=r"4 of 5 nodes have connected within 0\.01 s"):
        air(clients=5, timeout=0.01)


def test_a_model_that_diverges_ends_the_run_and_asks_nobody_any_more(tmp_path):
    grid = Nodes(reply)
    over, _ = air(grid=grid, rounds=5, server="sgd(lr=1e39)", receiver="none()", folder=tmp_path)
    assert over.over
    assert sa.load(tmp_path).diverged == 0
    assert grid.asked == 4


# ------------------------------------------------------------------------------------------------ recorded and resumed


@pytest.mark.parametrize("kind", [FedAvg, FedAdam, FedAvgM])
@pytest.mark.parametrize("payload", ["gradient", "delta"])
def test_a_run_goes_on_where_it_ended(kind, payload, tmp_path):
    options = {FedAvg: {}, FedAdam: {"eta": 0.5}, FedAvgM: {"server_learning_rate": 0.5, "server_momentum": 0.9}}[kind]
    settings = {"receiver": "mac(C=auto)", "server": "momentum()", "payload": payload}
    _, found = air(rounds=4, strategy=averaging(kind, **options), **settings)
    for rounds in (1, 3, 4, 4):
        _, resumed = air(rounds=rounds, strategy=averaging(kind, **options), folder=tmp_path, **settings)
    assert bits(resumed.arrays) == bits(found.arrays)
    run = sa.load(tmp_path)
    assert run["channel/senders"] == [4] * 4
    assert run["gradient/norm"] == [found.train_metrics_clientapp[k]["gradient/norm"] for k in (1, 2, 3, 4)]
    assert [entry["first_round"] for entry in run.environments] == [0, 1, 3]
    assert run.environments[0]["strategy"].startswith(kind.__name__)


def test_the_rounds_that_the_clients_see_go_on_too(tmp_path):
    seen = []

    def answer(message):
        seen.append(message.content["config"]["server-round"])
        return reply(message)

    air(answer, rounds=1, folder=tmp_path)
    _, found = air(answer, rounds=3, folder=tmp_path)
    assert seen == [1] * 4 + [2] * 4 + [3] * 4
    assert list(found.train_metrics_clientapp) == [2, 3]


def test_another_run_in_the_folder_is_refused(tmp_path):
    air(rounds=1, folder=tmp_path)
    with pytest.raises(InputError, match=r"was begun with FedAvg\(\), and not with FedAdam\(.*eta=0.1"):
        air(folder=tmp_path, strategy=averaging(FedAdam))
    with pytest.raises(InputError, match="another experiment, with another noise"):
        air(folder=tmp_path, noise="none()")
    over = OverTheAir(averaging(), folder=tmp_path, lr=0.1, receiver="mac(C=0.5)")
    with pytest.raises(InputError, match="entries for a model of"):
        over.start(Nodes(reply), ArrayRecord({"w": Array(np.ones(3, np.float32))}))


def test_the_evaluation_is_recorded_as_that_of_any_run(tmp_path):
    def evaluate(server_round, arrays):
        return MetricRecord({"accuracy": 0.25 * server_round, "own/score": 1.0}) if server_round != 2 else None

    _, found = air(rounds=3, evaluate_fn=evaluate, folder=tmp_path)
    run = sa.load(tmp_path)
    assert run["test/accuracy"] == [0.25, None, 0.75]
    assert run["own/score"] == [1.0, None, 1.0]
    assert {k: told["accuracy"] for k, told in found.evaluate_metrics_serverapp.items()} == {0: 0.0, 1: 0.25, 3: 0.75}
    assert run["train/loss"][0] == pytest.approx(1 + sum(NODES) / 4000)


def test_without_a_loss_there_is_none(tmp_path):
    air(lambda message: reply(message, train_loss=None), folder=tmp_path)
    assert sa.load(tmp_path)["train/loss"] == [None, None]


def test_the_clients_metrics_reach_flower():
    _, found = air(lambda message: reply(message, speed=2.0 * message.metadata.dst_node_id))
    weights = np.array([samples(node) for node in NODES])
    assert found.train_metrics_clientapp[1]["speed"] == pytest.approx((2 * weights * NODES).sum() / weights.sum())


# -------------------------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"noize": "none()"}, "did you mean 'noise'"),
        ({"local_epochs": 3}, "setting: 'local_epochs' is unknown"),
        ({"receiver": "mac(D=1)"}, "mac"),
        ({"enough": 0}, "enough must be at least 1"),
        ({"power": "limit(P=1)"}, r"needs the interference on the sum .* add channel='flat\(noise_on=sum\)'"),
    ],
)
def test_settings_are_checked(settings, why):
    with pytest.raises(InputError, match=why):
        OverTheAir(averaging(), **settings)


def test_who_takes_part_is_the_strategys_to_say(small, registries):
    @sa.participation("nobody")
    def nobody():
        return lambda n, source: torch.arange(0)

    with pytest.raises(InputError, match="fraction_train"):
        OverTheAir(averaging(), small.with_(participation="nobody()"))


def test_a_stock_run_needs_a_model():
    over = OverTheAir(averaging())
    with pytest.raises(InputError, match="needs the initial_arrays"):
        over.start(Nodes(reply))
    with pytest.raises(InputError, match="no parameter among the arrays"):
        over.start(Nodes(reply), ArrayRecord({"counter": Array(np.ones(2, np.int64))}))


def another(small, node, **changes):
    """Our own nodes, one of which has other settings, or with `version` another version of stableair."""
    good, odd = ours(small), ours(small.with_(**{key: v for key, v in changes.items() if key != "version"}))

    def answer(message):
        if message.metadata.dst_node_id != node:
            return good.answer(message)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sa, "__version__", changes.get("version", sa.__version__))
            return odd.answer(message)

    return Nodes(answer)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": "0.0.1"}, f"the server has stableair {sa.__version__}, this node 0.0.1"),
        ({"model": "logistic()"}, "the server has model normed(), this node logistic()"),
        ({"lr": 0.5, "seed": 1}, "the server has seed 0, this node 1; lr 0.03, this node 0.5"),
    ],
)
def test_a_node_of_another_model_or_version_is_left_out_and_says_so(small, changes, why):
    over = OverTheAir(averaging(), small)
    found = over.start(another(small, NODES[2], **changes), num_rounds=1)
    assert over.left_out == [(0, NODES[2], why)]
    assert found.train_metrics_clientapp[1]["channel/senders"] == 3


def test_a_payload_of_another_length_is_left_out(small):
    """A node whose app compares nothing, and has a wider layer."""

    def wider(message, context, call_next):
        back = call_next(message, context)
        if back.content["metrics"]["client"] == 1:
            arrays = back.content["payload"]
            back.content["payload"] = ArrayRecord(dict(arrays) | {"1.bias": Array(np.zeros(6, np.float32))})
        return back

    over = OverTheAir(averaging(), small)
    over.start(ours(small, mods=[wider]), num_rounds=1)
    assert [fault.why for fault in over.left_out] == ["1.bias has shape (6,) where (5,) belongs"]


def test_if_all_nodes_have_another_experiment_the_run_ends_with_the_reason(small):
    with pytest.raises(InputError, match=r"none can be heard; the first: the server has lr 0\.03, this node 0\.5"):
        OverTheAir(averaging(), small).start(ours(small, lr=0.5), num_rounds=1)


def test_a_node_without_a_number_is_told_how_to_get_one(small):
    told = ConfigRecord({"stableair": sa.__version__, "experiment": small.to_json(), "server-round": 1})
    message = Message(RecordDict({"arrays": start_arrays(), "config": told}), dst_node_id=1, message_type="train")
    with pytest.raises(InputError, match="--node-config 'partition-id=0', and so on to 3"):
        client_app(small)(message, Context(1, 1, {}, RecordDict(), {}))


@pytest.mark.parametrize("missing", ["flwr", "flwr.serverapp.strategy"])  # none at all; one of before
def test_without_the_extra_the_pip_command_is_told(missing, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("stableair.flower")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r"needs Flower 1\.41: pip install 'stableair\[flower\]'"):
        importlib.import_module("stableair.flower")


# ---------------------------------------------------------------------------------------------------- on the client


def limits(message, **bounds):
    """The reply of a stock client behind the mod."""
    return limited(**bounds)(message, None, lambda given, context: reply(given))


def moved(message, back):
    layout, norms = layouts(message.content["arrays"])
    u = flat(back.content["arrays"], layout) - flat(message.content["arrays"], layout)
    return u, flat(back.content["arrays"], norms)


def test_the_mod_clips_and_limits_the_power():
    message = Message(RecordDict({"arrays": start_arrays()}), dst_node_id=17, message_type="train")
    u, stats = moved(message, reply(message))
    assert u.norm() > 0.3
    short, same = moved(message, limits(message, norm=0.25))
    torch.testing.assert_close(short, u * (0.25 / u.norm()), rtol=1e-4, atol=1e-6)
    assert torch.equal(same, stats)
    weak, _ = moved(message, limits(message, power=1e-4, norm=10))
    assert weak.square().mean().item() == pytest.approx(1e-4, rel=1e-3)
    assert torch.equal(moved(message, limits(message, norm=1e3))[0], u), "what is short enough keeps its bits"
    with pytest.raises(InputError, match="norm must be positive"):
        limited(norm=0)


def test_the_mod_limits_payloads_too(small):
    quiet = small.with_(noise="none()", fading="unit()")
    found = OverTheAir(averaging(), quiet).start(ours(quiet, mods=[limited(norm=0.5)]), num_rounds=1)
    assert 0.1 < found.train_metrics_clientapp[1]["gradient/norm"] <= 0.5
    free = OverTheAir(averaging(), quiet).start(ours(quiet), num_rounds=1)
    assert free.train_metrics_clientapp[1]["gradient/norm"] > 1


def test_the_app_for_flwr_run_knows_the_settings_and_their_defaults():
    config = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert config["components"] == {
        "serverapp": "stableair.flower.app:server",
        "clientapp": "stableair.flower.app:client",
    }
    e = experiment_of(config["config"])
    assert e.with_(clients=50, rounds=100) == sa.Experiment()
    assert set(OPTIONS) <= set(config["config"])
    given = tomllib.loads((EXAMPLE / "settings.toml").read_text())
    assert set(given) <= set(config["config"]), "Flower refuses a setting that the app does not name"


def test_the_example_around_a_stock_client_is_short():
    assert len((EXAMPLE.parent / "flower_stock.py").read_text().splitlines()) < 40
