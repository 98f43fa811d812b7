"""One node sends arbitrary replies: the server finishes, and the model is that of a run without the node."""

import io
from functools import lru_cache

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM
from hypothesis import given, settings
from hypothesis import strategies as st

import stableair as sa
from helpers.flower import NODES, Nodes, averaging, bits, reply, run_over_the_air

HOSTILE = max(NODES)
CLIENTS = {node: client for client, node in enumerate(sorted(NODES))}
OVERFLOW = 3e38  # finite in float32; its square is not


def run(hostile=None, **settings):
    """A run of two rounds in which the hostile node replies with hostile(message, honest reply).

    Args:
        hostile: None for an honest node.
        settings: Arguments of `run_over_the_air`.
    """

    def answer(message):
        node = message.metadata.dst_node_id
        honest = reply(message, client=CLIENTS[node])
        return hostile(message, honest) if hostile and node == HOSTILE else honest

    return run_over_the_air(grid=Nodes(answer), **settings)


def unavailable(message, honest):
    return None


@lru_cache(1)
def model_without_the_node():
    return bits(run(unavailable)[1].arrays)


@lru_cache(1)
def model_of_honest_nodes():
    return bits(run()[1].arrays)


def changed(honest, arrays=None, metrics=None):
    """The honest reply with some arrays and metrics replaced; None removes one."""
    new = []
    for kind, record, changes in ((ArrayRecord, "arrays", arrays), (MetricRecord, "metrics", metrics)):
        both = dict(honest.content[record]) | (changes or {})
        new.append(kind({name: value for name, value in both.items() if value is not None}))
    honest.content["arrays"], honest.content["metrics"] = new
    return honest


# ------------------------------------------------------------------------------------------------ unusable replies

PARAMETERS = {"0.weight": (4, 3), "0.bias": (4,), "1.weight": (4,), "2.weight": (1, 4), "2.bias": (1,)}
BUFFERS = {"1.running_mean": (4,), "1.running_var": (4,)}
FLOATS = PARAMETERS | BUFFERS
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
names = st.sampled_from(sorted(FLOATS))


def saved(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def huge_header():
    """The header of an array of 2^40 entries, without its entries."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)})
    return file.getvalue()


BYTES = st.one_of(
    st.binary(max_size=80),
    st.sampled_from([huge_header(), saved(np.array([{}]), allow_pickle=True), b"PK\x03\x04", b"\x93NUMPY"]),
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def bad_arrays(draw):
    """One array of the model with other bytes, another shape or type, or an entry that is not a finite float32."""
    name = draw(names)
    shape = FLOATS[name]
    kind = draw(st.sampled_from(["bytes", "shape", "dtype", "value", "missing", "unknown"]))
    if kind == "bytes":
        return {name: Array("float32", shape, draw(st.sampled_from(["numpy.ndarray", "x"])), draw(BYTES))}
    if kind == "shape":
        return {name: Array(np.zeros(draw(SHAPES.filter(lambda other: other != shape)), np.float32))}
    if kind == "dtype":
        return {name: Array(np.zeros(shape, draw(st.sampled_from(["bool", "complex64", "U3", "S2", "M8[s]"]))))}
    if kind == "value":
        value = draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e39, -1e300]))
        return {name: Array(np.full(shape, value))}
    return (
        {name: None} if kind == "missing" else {draw(TEXT.filter(lambda text: text not in FLOATS)): Array(np.ones(2))}
    )


NO_NUMBER = st.one_of(st.none(), st.lists(st.floats(), max_size=3), st.sampled_from([np.nan, np.inf, -np.inf]))
BAD_METRICS = st.one_of(
    st.one_of(NO_NUMBER, st.floats(max_value=-1e-9)).map(lambda value: {"num-examples": value}),
    st.sampled_from([np.nan, np.inf, 1e39, 10**40, 10**400]).map(lambda value: {"train_loss": value}),
    st.one_of(st.integers().filter(lambda client: client != CLIENTS[HOSTILE]), st.floats(), st.just([0])).map(
        lambda value: {"client": value}
    ),
)
RECORDS = st.dictionaries(
    TEXT,
    st.sampled_from(
        [ArrayRecord({}), ArrayRecord({"0.bias": Array(np.ones(4))}), MetricRecord({"x": 1}), ConfigRecord({"x": "y"})]
    ),
    max_size=3,
)
UNUSABLE = st.one_of(
    bad_arrays().map(lambda arrays: lambda message, honest: changed(honest, arrays)),
    BAD_METRICS.map(lambda metrics: lambda message, honest: changed(honest, metrics=metrics)),
    RECORDS.map(lambda records: lambda message, honest: Message(RecordDict(records), reply_to=message)),
    st.tuples(st.integers(0, 300), TEXT).map(
        lambda error: lambda message, honest: Message(Error(code=error[0], reason=error[1]), reply_to=message)
    ),
)


def check_unusable(hostile):
    strategy, result = run(hostile)
    assert [(dropped.k, dropped.node) for dropped in strategy.left_out] == [(0, HOSTILE), (1, HOSTILE)]
    assert all(dropped.reason.isprintable() and len(dropped.reason) < 400 for dropped in strategy.left_out)
    assert bits(result.arrays) == model_without_the_node()


@settings(max_examples=30)
@given(UNUSABLE)
def test_an_unusable_reply_has_the_effect_of_an_unavailable_node(hostile):
    check_unusable(hostile)


@pytest.mark.slow
@settings(max_examples=150)
@given(UNUSABLE)
def test_many_unusable_replies_have_the_effect_of_an_unavailable_node(hostile):
    check_unusable(hostile)


VALUES = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.lists(st.integers(-5, 5), max_size=3),
    st.lists(st.floats(), max_size=3),
)
OTHER_METRICS = st.dictionaries(
    st.one_of(TEXT, st.just("channel/senders")).filter(lambda name: name not in ("client", "num-examples")),
    VALUES,
    max_size=3,
)


@settings(max_examples=20)
@given(OTHER_METRICS, st.one_of(st.just(1), st.just([0.5]), st.none(), st.lists(st.floats(), max_size=3)))
def test_a_metric_changes_no_bit_of_the_model(metrics, loss):
    strategy, result = run(lambda message, honest: changed(honest, metrics=metrics | {"train_loss": loss}))
    assert not strategy.left_out
    assert bits(result.arrays) == model_of_honest_nodes()
    assert result.train_metrics_clientapp[2]["channel/senders"] == 4


def test_no_metric_replaces_a_recorded_one():
    _, result = run_over_the_air(lambda message: reply(message, **{"channel/senders": 99}))
    assert result.train_metrics_clientapp[1]["channel/senders"] == 4


# ---------------------------------------------------------------------------------------------------------- overflow


def enlarged(name, value):
    def hostile(message, honest):
        shape = honest.content["arrays"][name].shape
        return changed(honest, {name: Array(np.full(shape, value, np.float32))})

    return hostile


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("value", [OVERFLOW, -OVERFLOW])
def test_a_norm_buffer_whose_square_overflows_is_left_out(name, value, tmp_path):
    strategy, result = run(enlarged(name, value), folder=tmp_path)
    if name == "1.running_mean":
        assert {dropped.node for dropped in strategy.left_out} == {HOSTILE}
        assert bits(result.arrays) == model_without_the_node()
    assert sa.load(tmp_path).state.model.stats.isfinite().all()


MOMENTUM = {"server_learning_rate": 1.0, "server_momentum": 0.9}
OVERFLOWING = {
    "the model": (FedAvg, {}, {"server": "sgd(lr=30)"}),
    "the momentum of the server": (FedAvg, {}, {"server": "adam_ota(alpha=2, lr=1e-9)"}),
    "the moments of FedAdam": (FedAdam, {}, {}),
    "the momentum of FedAvgM": (FedAvgM, MOMENTUM, {"server": "sgd(lr=30)"}),
    "the interference": (FedAvg, {}, {"power": "limit(P=1e-4)", "channel": "flat(noise_on=sum)", "noise": "none()"}),
}


@pytest.mark.parametrize("part", OVERFLOWING)
def test_a_reply_that_makes_the_state_non_finite_is_left_out(part, tmp_path):
    kind, options, settings = OVERFLOWING[part]
    settings = {"fading": "unit()", "receiver": "none()", "lr": 1.0} | settings

    def model(hostile, folder):
        strategy, result = run(hostile, strategy=averaging(kind, **options), folder=tmp_path / folder, **settings)
        return strategy, bits(result.arrays)

    strategy, arrays = model(enlarged("0.weight", 1e38), "hostile")
    assert [(dropped.k, dropped.node) for dropped in strategy.left_out] == [(0, HOSTILE), (1, HOSTILE)]
    assert arrays == model(unavailable, "unavailable")[1]
    assert sa.load(tmp_path / "hostile").diverged is None


def test_the_evaluation_sees_only_finite_models():
    """A hostile node must not make the server's own evaluation fail."""

    def evaluate(server_round, arrays):
        assert all(np.isfinite(array.numpy()).all() for array in arrays.values())

    settings = {"fading": "unit()", "receiver": "none()", "server": "sgd(lr=30)"}
    run(enlarged("0.weight", 1e37), evaluate_fn=evaluate, **settings)


# -------------------------------------------------------------------------------------------------------- evaluation


class Evaluating(Nodes):
    """Nodes that also evaluate; `metrics` are those of the hostile node, or the text of its error."""

    def __init__(self, metrics):
        super().__init__(lambda message: reply(message, client=CLIENTS[message.metadata.dst_node_id]))
        self.metrics = metrics

    def send_and_receive(self, messages, timeout=None):
        messages = list(messages)
        if not messages or messages[0].metadata.message_type == "train":
            return super().send_and_receive(messages, timeout)
        return [self.evaluated(message) for message in messages]

    def evaluated(self, message):
        if message.metadata.dst_node_id != HOSTILE:
            metrics = {"accuracy": 0.5, "num-examples": 10}
        elif isinstance(self.metrics, str):
            return Message(Error(code=1, reason=self.metrics), reply_to=message)
        else:
            metrics = self.metrics
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


@pytest.mark.parametrize(
    "metrics",
    [
        {"accuracy": [0.5], "num-examples": 10},
        {"accuracy": 0.5},
        {"accuracy": np.nan, "num-examples": 10},
        {"accuracy": 0.9, "num-examples": [1]},
        {"num-examples": 1, "x": 1},
        {},
        "an error\x1b[2J\nwith control characters",
    ],
)
def test_an_evaluation_of_one_node_cannot_stop_the_server(metrics, caplog):
    strategy = FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
    _, result = run_over_the_air(grid=Evaluating(metrics), strategy=strategy)
    assert {k: dict(m) for k, m in result.evaluate_metrics_clientapp.items()} == {
        1: {"accuracy": 0.5},
        2: {"accuracy": 0.5},
    }
    records = [record for record in caplog.records if record.levelname == "WARNING"]
    warnings = [record.getMessage() for record in records if str(HOSTILE) in record.getMessage()]
    assert len(warnings) >= 2
    assert all(text.isprintable() for text in warnings)
