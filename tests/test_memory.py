"""Every memory that is accepted can be read from its checkpoint; every other memory is refused before it is written."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stableair as sa
from stableair.contracts import Round, Rule, State
from stableair.errors import InputError
from stableair.memory import check_memory, non_finite_parts, same_structure
from stableair.results.checkpoint import Checkpoint, parse_checkpoint, read_checkpoint, save_checkpoint
from stableair.results.checksums import CHECKPOINT
from stableair.results.lock import locked
from stableair.vector import ModelState

MODEL = ModelState(torch.zeros(2), torch.zeros(0))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers().map(lambda i: i**99), st.floats(allow_nan=False), st.text(),
    st.text(st.characters(categories=["Cs", "L"])), st.floats(width=32, allow_nan=False).map(np.float32),
    st.floats(allow_nan=False).map(np.float64), st.integers(0, 9).map(np.int64), st.booleans().map(np.bool_),
    st.just(torch.ones(2, requires_grad=True) * 2), st.just(torch.ones(2).to_sparse()), st.just(np.ones(2)),
    st.just(torch.zeros(2, device="meta")), st.complex_numbers(), st.binary(), st.just(len),
)  # fmt: skip
MEMORIES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.one_of(st.text(), st.integers()), inner)
    ),
    max_leaves=6,
)


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and not other.requires_grad
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


@given(MEMORIES)
def test_accepted_memory_can_be_read(tmp_path_factory, memory):
    try:
        memory = check_memory("receiver", memory)
    except InputError as error:
        assert error.code == "bad-memory"
        return
    with locked(tmp_path_factory.mktemp("run") / "a") as folder:
        save_checkpoint(folder, Checkpoint(1, State(MODEL, receiver=memory)))
        assert equal(parse_checkpoint(folder.path / CHECKPOINT).state.receiver, memory)


@pytest.mark.parametrize(
    ("memory", "path", "type_name"),
    [
        ({"a": (1, [np.ones(2)])}, "memory['a'][1][0]", "ndarray"),
        ((1, {7: lambda: 1}), "memory[1][7]", "function"),
        ([torch.ones(2).to_sparse()], "memory[0]", "Tensor"),
        (10**5000, "memory", "int"),
        ({"a": "\ud800"}, "memory['a']", "str"),
        ({10**5000: 1}, "memory", "dict"),
    ],
    ids=["array", "function", "sparse", "integer", "text", "key"],
)
def test_error_names_component_and_path(memory, path, type_name):
    with pytest.raises(InputError) as error:
        check_memory("server", memory)
    fields = {"kind": "server", "path": path, "type": type_name}
    assert (error.value.code, error.value.setting, error.value.fields) == ("bad-memory", "server", fields)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_memory_that_contains_itself_is_refused():
    memory = []
    memory.append(memory)
    with pytest.raises(InputError) as error:
        check_memory("receiver", memory)
    assert error.value.code == "bad-memory"
    assert len(str(error.value)) < 300


def test_attributes_of_a_tensor_are_dropped():
    tensor = torch.ones(2)
    tensor.note = lambda: 1
    assert not check_memory("receiver", tensor).__dict__


def test_numpy_number_from_round_3_is_converted(tiny, tmp_path, registries):
    @sa.receiver("late")
    def late():
        def apply(received, seen):
            return received.g, seen + 1 if received.k < 2 else np.float32(seen + 0.1), {"seen": seen}

        return Rule(apply, init=lambda like: 0)

    e = tiny.with_(receiver="late()", rounds=5)
    whole = sa.run(e, tmp_path / "a")
    assert type(whole.state.receiver[0]) is float
    sa.run(e.with_(rounds=3), tmp_path / "b")
    assert sa.run(e, tmp_path / "b", resume=True)["receiver/seen"] == whole["receiver/seen"]


@pytest.mark.parametrize(
    "memories",
    [
        (torch.zeros(2), torch.zeros(3)),
        ((1,), (1, 2)),
        ({"a": 1}, {"b": 1}),
        (1, torch.zeros(2)),
        (torch.zeros(2), None),
    ],
    ids=["shape", "length", "keys", "type", "none"],
)
def test_changed_structure_is_refused_in_its_round(tiny, tmp_path, registries, memories):
    """Otherwise the checkpoint could not be loaded, because its structure is compared with the memory of `init`."""
    first, later = memories
    rule = Rule(lambda received, m: (received.g, later if received.k == 2 else m, {}), init=lambda like: first)
    sa.receiver("changing")(lambda: rule)
    e = tiny.with_(receiver="changing()")
    with pytest.raises(InputError) as error:
        sa.run(e, tmp_path / "a")
    assert (error.value.code, error.value.setting) == ("memory-structure", "receiver")
    assert len(sa.run(e.with_(rounds=2), tmp_path / "a", resume=True)) == 2


def test_none_and_numbers_may_change(tiny, tmp_path, registries):
    later = (torch.ones(2), 0.5, ["a", "b"])
    rule = Rule(lambda received, m: (received.g, later, {}), init=lambda like: (None, 0, []))
    sa.receiver("changing")(lambda: rule)
    e = tiny.with_(receiver="changing()")
    sa.run(e.with_(rounds=2), tmp_path / "a")
    assert equal(sa.run(e, tmp_path / "a", resume=True).state.receiver, (later,))


def test_recorded_rounds_of_any_source_are_checked(tiny, tmp_path):
    good, bad = State(MODEL, server=(1,)), State(MODEL, server=({2},))
    rounds = iter([Round(0, good, {"test/accuracy": 0.1}), Round(1, bad, {"test/accuracy": 0.2})])
    recording = sa.recorded(rounds, tmp_path / "a", sa.RunMetadata(tiny, {"stableair": "0.3.0"}))
    next(recording)
    with pytest.raises(InputError) as error:
        next(recording)
    assert (error.value.code, error.value.fields["path"]) == ("bad-memory", "memory[0]")
    assert len(sa.load(tmp_path / "a")) == 1
    assert sa.resume_point(tmp_path / "a", tiny, resume=True).rounds == 1


def test_command_prints_one_line_for_a_lambda(tmp_path, command):
    (tmp_path / "mine.py").write_text(
        "import stableair as sa\n\n@sa.receiver('kept')\ndef kept():\n"
        "    return sa.Rule(lambda received, memory: (received.g, {'f': lambda: 1}, {}), init=lambda like: {})\n"
    )
    words = ["data=synthetic(samples=60)", "clients=3", "rounds=2", "receiver=kept()", "--plugin", "mine.py"]
    code, _, errors = command("run", *words)
    (line,) = errors.splitlines()
    assert code == 2
    assert line.startswith("error: mine.py, line ")
    assert "memory[0]['f']" in line


def test_a_vector_inside_a_dict_keeps_its_shape():
    like = {"mean": torch.zeros(3), "evidence": {}}
    assert same_structure({"mean": torch.ones(3), "evidence": {1: 2.0}}, like)
    assert not same_structure({"mean": torch.ones(1), "evidence": {}}, like)


def test_the_non_finite_parts_of_a_state_are_named():
    finite = State(ModelState(torch.ones(2), torch.zeros(0)))
    assert non_finite_parts(finite) == set()
    inf, nan = torch.tensor([1.0, math.inf]), torch.tensor([math.nan])
    assert non_finite_parts(finite._replace(model=ModelState(inf, torch.zeros(0)))) == {"model"}
    assert non_finite_parts(finite._replace(model=ModelState(torch.ones(2), inf)), infinite_memories=True) == {"model"}
    state = finite._replace(receiver={"limit": math.inf, "n": torch.tensor([3])}, server=(inf, "text"), average=[nan])
    assert non_finite_parts(state) == {"server", "average"}
    assert non_finite_parts(state, infinite_memories=True) == {"average"}
    assert non_finite_parts(finite._replace(clients=({"x": math.nan},)), infinite_memories=True) == {"clients"}
    small = torch.ones(2).to(torch.float8_e4m3fn)  # torch has no isfinite for it
    assert non_finite_parts(finite._replace(server=small), infinite_memories=True) == set()


def with_value(kind, value, at):
    """A component whose memory becomes `value` in round `at`, while the model stays finite."""

    def apply(*arguments):
        *_, memory = arguments
        vector = arguments[0].g if kind == "receiver" else arguments[0]
        return vector, {"k": memory["k"] + 1, "x": value if memory["k"] == at else memory["x"]}, {}

    rule = sa.Rule if kind == "receiver" else sa.ServerRule
    return rule(apply, lambda like: {"k": 0, "x": torch.zeros(3)})


@pytest.mark.parametrize("kind", ["receiver", "server"])
def test_a_memory_that_becomes_nan_ends_the_run(tiny, tmp_path, registries, caplog, kind):
    getattr(sa, kind)("odd")(lambda: with_value(kind, torch.tensor([1.0, math.nan, 2.0]), at=2))
    run = sa.run(tiny.with_(**{kind: "odd()"}), tmp_path / "a")
    assert (run.diverged, len(run)) == (2, 3)
    assert read_checkpoint(tmp_path / "a").rounds == 2
    assert sa.run(tiny.with_(**{kind: "odd()"}), tmp_path / "a", resume=True).diverged == 2
    assert f"the memory of the {kind} contains NaN" in caplog.text


@pytest.mark.parametrize("kind", ["receiver", "server"])
def test_a_memory_may_be_infinite(tiny, tmp_path, registries, kind):
    getattr(sa, kind)("odd")(lambda: with_value(kind, torch.tensor([1.0, math.inf, 2.0]), at=1))
    run = sa.run(tiny.with_(**{kind: "odd()"}), tmp_path / "a")
    assert (run.diverged, len(run)) == (None, 4)


def test_norm_buffers_that_are_not_finite_end_the_run(tiny, tmp_path):
    w = torch.ones(2)
    states = [State(ModelState(w, torch.tensor([x]))) for x in (1.0, math.inf)]
    rounds = [Round(k, state, {"test/loss": 0.5}) for k, state in enumerate(states)]
    recorded = list(sa.recorded(rounds, tmp_path / "a", sa.RunMetadata(tiny.with_(rounds=2), {})))
    assert [each.metrics.get("diverged") for each in recorded] == [None, True]
    assert read_checkpoint(tmp_path / "a").rounds == 1
