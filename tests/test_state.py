"""The state that a round passes to the next one is an immutable value, and components are pure functions of it."""

import math

import numpy as np
import pytest
import torch

import stableair as sa
from helpers.components import EXAMPLES
from stableair.builder import build
from stableair.contracts import Reception, Rule, ServerRule
from stableair.errors import InputError
from stableair.memory import map_tensors, tensors
from stableair.participants import participation
from stableair.receivers import blockwise, chain, clip, mac
from stableair.results.checkpoint import read_checkpoint
from stableair.vector import Layout

SETTINGS = [
    *({"receiver": spec} for spec in [*EXAMPLES["receivers"], "mac(C=auto)", "mac(C=auto, pilot=50)", "cauchy(K=auto)",
                                      "mac(C=auto) | clip(C=1) | cauchy(K=auto)"]),
    *({"server": spec} for spec in EXAMPLES["servers"]),
    {"average": 0.8},
    {"average": 0.8, "receiver": "mac(C=auto)", "server": "momentum()", "participation": "bernoulli(0.3)"},
]  # fmt: skip
KINDS = "receiver", "server"


def same(one, other):
    """Whether two trees have the same structure and the same bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def copied(tree):
    return map_tensors(torch.clone, tree)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_simulation_continues_from_any_state_bit_for_bit(tiny, settings):
    """Twice on one simulation; and from every round's state, after later rounds were computed."""
    sim = build(tiny.with_(**settings))
    start, rounds, copies = copied(sim.start), [], []
    for each in sa.simulate(sim, sim.start, 4):
        rounds.append(each)
        copies.append(copied(each.state))
    assert same(list(sa.simulate(sim, sim.start, 4)), rounds)
    for each in reversed(rounds):
        assert same(list(sa.simulate(sim, each.state, 4, start=each.k + 1)), rounds[each.k + 1 :])
    assert same([each.state for each in rounds], copies), "a kept state does not change"
    assert same(sim.start, start)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_all_memory_of_components_is_in_the_state(tiny, settings):
    """Without its declared memory, the next round of a component changes."""
    sim = build(tiny.with_(**settings))
    *_, third, fourth = sa.simulate(sim, sim.start, 4)
    without_memory = sim.start._replace(model=third.state.model, energies=third.state.energies)
    (again,) = sa.simulate(sim, without_memory, 4, start=3)
    kept = [name for name in ("receiver", "server", "average") if list(tensors(getattr(third.state, name)))]
    changed = not same(again.state, fourth.state)
    assert changed or not kept
    if not any(name in settings for name in ("server", "average")) and "auto" not in settings.get("receiver", ""):
        assert not changed, "a component without memory does not depend on earlier rounds"


# -------------------------------------------------------------------------------------------------------------- chains


def smoothed(beta=0.9):
    """Exponential smoothing of the received vector over rounds."""

    def apply(received, mean):
        mean = torch.lerp(received.g, mean, beta)
        return mean, mean, {"norm": mean.norm().item()}

    return Rule(apply, init=torch.zeros_like)


G = torch.tensor([0.0, 3.0, 90.0, -2.0, 7.0, 1.0, -50.0, 4.0])
BLOCKS = Layout(("a", "b", "c"), ((3,), (1,), (4,)), (0, 3, 4, 8))


def three():
    return smoothed(0.5), mac("auto"), smoothed(0.25)


@pytest.mark.parametrize(
    "nested",
    [
        lambda a, b, c: chain(chain(a, b), c),
        lambda a, b, c: chain(a, chain(b, c)),
        lambda a, b, c: chain(chain(chain(a)), chain(), chain(chain(b), c)),
        lambda a, b, c: blockwise(chain(a, chain(b, c)), BLOCKS),
        lambda a, b, c: chain(blockwise(chain(a, b), BLOCKS), blockwise(c, BLOCKS)),
    ],
)
def test_nested_chains_equal_flat_ones(nested):
    flat, other = blockwise(chain(*three()), BLOCKS), nested(*three())
    memories = flat.init(G), other.init(G)
    for k in range(4):
        received = Reception(G * (1 + k), BLOCKS, None, k)
        one, two = flat.apply(received, memories[0]), other.apply(received, memories[1])
        assert same(one, two), "output, memory and metrics"
        memories = one[1], two[1]
        assert type(one[1]) is tuple
        assert len(one[1]) == 3
        assert list(one[2])[-1] == "norm_2"


def test_a_chain_applies_its_rules_one_after_the_other():
    a, b = smoothed(0.5), clip(2.0)
    both, memory, mean = chain(a, b), chain(a, b).init(G), a.init(G)
    for k in range(3):
        out, memory, _ = both.apply(Reception(G, BLOCKS, None, k), memory)
        middle, mean, _ = a.apply(Reception(G, BLOCKS, None, k), mean)
        assert torch.equal(out, b(middle))
        assert same(memory, (mean, ()))


# ------------------------------------------------------------------------------------------------ plug-ins with memory


SMOOTHED = '''
import torch
import stableair as sa

@sa.receiver("smoothed")
def smoothed(beta: float = 0.9) -> sa.Rule:
    """Exponential smoothing of the received vector over rounds."""
    def apply(received, mean):
        mean = torch.lerp(received.g, mean, beta)
        return mean, mean, {"norm": mean.norm().item()}
    return sa.Rule(apply, init=torch.zeros_like)
'''


@pytest.mark.parametrize(
    "spec", ["smoothed(beta=0.5)", "mac(C=1) | smoothed()", "smoothed() | mac(C=auto) | smoothed()"]
)
def test_a_plug_in_with_memory_is_saved_and_resumed_bit_for_bit(tiny, tmp_path, registries, spec):
    (tmp_path / "mine.py").write_text(SMOOTHED)
    sa.load_plugin(tmp_path / "mine.py")
    e = tiny.with_(receiver=spec, rounds=6)
    whole = sa.run(e, tmp_path / "whole")
    assert all(norm > 0 for norm in whole["receiver/norm"])
    for stop in (1, 4):
        sa.run(e.with_(rounds=stop), tmp_path / str(stop))
        resumed = sa.run(e, tmp_path / str(stop), resume=True)
        assert same(resumed.state, whole.state)
        assert resumed["receiver/norm"] == whole["receiver/norm"]
        assert same(read_checkpoint(tmp_path / str(stop)), read_checkpoint(tmp_path / "whole"))


# --------------------------------------------------------------------------------------------------- in-place changes


def changing(change):
    """Factories of a receiver and of a server that call `change` in every round after the first one."""

    def receiver():
        def apply(received, memory):
            if memory["rounds"]:
                change(received.g, memory["v"])
            return received.g * 0.5, {"v": memory["v"] + 1, "rounds": memory["rounds"] + 1}, {}

        return Rule(apply, init=lambda like: {"v": torch.zeros_like(like), "rounds": 0})

    def server():
        def apply(w, g, memory):
            if memory["rounds"]:
                change(g, memory["v"], w)
            return w - 0.01 * g, {"v": memory["v"] + 1, "rounds": memory["rounds"] + 1}, {}

        return ServerRule(apply, init=lambda like: {"v": torch.zeros_like(like), "rounds": 0})

    return {"receiver": receiver, "server": server}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("receiver", lambda g, v: g.clamp_(-1, 1)),
        ("receiver", lambda g, v: v.add_(1)),
        ("receiver", lambda g, v: g[:2].zero_()),
        ("server", lambda g, v, w: g.mul_(2)),
        ("server", lambda g, v, w: v.mul_(0.9)),
        ("server", lambda g, v, w: w.sub_(g)),
    ],
    ids=["receiver-g", "receiver-memory", "receiver-view", "server-g", "server-memory", "server-w"],
)
def test_a_change_in_place_is_refused_and_names_the_component(tiny, tmp_path, registries, kind, change):
    getattr(sa, kind)("in_place")(changing(change)[kind])
    with pytest.raises(InputError) as error:
        sa.run(tiny.with_(**{kind: "in_place()"}), tmp_path / "a")
    assert (error.value.code, error.value.setting) == ("changed-in-place", kind)
    assert f"the {kind} changes" in str(error.value)
    assert read_checkpoint(tmp_path / "a").rounds == 1, "the checkpoint of the round before is kept"


def test_a_change_in_place_within_a_chain_is_refused(tiny, registries):
    sa.receiver("in_place")(lambda: lambda g: g.clamp_(-1, 1))
    with pytest.raises(InputError) as error:
        sa.run(tiny.with_(receiver="in_place() | mac(C=1)"))
    assert (error.value.code, error.value.setting) == ("changed-in-place", "receiver")


def test_changed_containers_do_not_affect_a_kept_state(tiny, registries):
    """The caller passes fresh containers: only tensors are shared."""

    @sa.receiver("listing")
    def listing():
        def apply(received, memory):
            memory["seen"].append(received.k)
            return received.g, memory, {}

        return Rule(apply, init=lambda like: {"seen": []})

    sim = build(tiny.with_(receiver="listing()"))
    rounds = list(sa.simulate(sim, sim.start, 3))
    assert [each.state.receiver for each in rounds] == [({"seen": list(range(k + 1))},) for k in range(3)]
    assert sim.start.receiver == ({"seen": []},)


# ------------------------------------------------------------------------------------------------ memory of other types


class Vector(torch.Tensor):
    """A subclass of Tensor."""


BAD = {
    "numpy": lambda: np.ones(2),
    "lambda": lambda: lambda: 1,
    "set": lambda: {1, 2},
    "subclass": lambda: torch.zeros(2).as_subclass(Vector),
    "complex": lambda: 1j,
    "nested": lambda: {"a": [(1, {"b": {3}})]},
    "key": lambda: {(1, 2): 3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", BAD)
def test_a_memory_that_cannot_be_saved_is_refused_in_its_round(tiny, tmp_path, registries, kind, bad):
    """Also with rare checkpoints; the earlier rounds can be read and continued."""

    def broken(k=2):
        def apply(*arguments):
            *given, rounds = arguments
            vector = given[0].g if kind == "receiver" else given[0] - 0.01 * given[1]
            return vector, BAD[bad]() if rounds == k else rounds + 1, {}

        return (Rule if kind == "receiver" else ServerRule)(apply, init=lambda like: 0)

    getattr(sa, kind)("broken")(broken)
    e = tiny.with_(**{kind: "broken()"})
    with pytest.raises(InputError) as error:
        sa.run(e, tmp_path / "a", checkpoint_every=100)
    assert (error.value.code, error.value.setting) == ("bad-memory", kind)
    assert "\n" not in str(error.value)
    saved = read_checkpoint(tmp_path / "a")
    assert saved.rounds == len(sa.load(tmp_path / "a")) == 2
    assert same(saved.state, sa.run(e.with_(rounds=2)).state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_that_cannot_be_saved_is_refused_before_the_first_round(tiny, tmp_path, registries, kind):
    make = Rule if kind == "receiver" else ServerRule
    getattr(sa, kind)("broken")(lambda: make(lambda *_: pytest.fail("applied"), init=lambda like: {1}))
    with pytest.raises(InputError) as error:
        sa.run(tiny.with_(**{kind: "broken()"}), tmp_path / "a")
    assert error.value.code == "bad-memory"
    assert not (tmp_path / "a").exists()


def test_every_allowed_type_is_saved_and_restored(tiny, tmp_path, registries):
    memory = {
        "tensor": torch.arange(3), "number": 0.1, "inf": math.inf, "count": 7, "yes": True, "text": "t", "none": None,
        "tuple": (1, (2.0, torch.zeros(0))), "list": [torch.ones(2, dtype=torch.float64), []], 5: {"deep": ()},
    }  # fmt: skip
    sa.receiver("rich")(lambda: Rule(lambda received, m: (received.g, m, {}), init=lambda like: memory))
    result = sa.run(tiny.with_(receiver="rich()", rounds=2), tmp_path / "a")
    assert same(result.state.receiver, (memory,))
    assert same(read_checkpoint(tmp_path / "a").state, result.state)


# ----------------------------------------------------------------------------------------------- rounds without senders


@pytest.mark.parametrize("receiver", ["mac(C=auto)", "cauchy(K=auto)", "mac(C=auto, pilot=50)"])
@pytest.mark.parametrize("server", ["momentum()", "adam_ota()", "sgd(decay=inverse, over=2)"])
def test_a_round_without_senders_changes_the_average_only(tiny, registries, receiver, server):
    participation("skips_a_round")(lambda: lambda n, source: torch.arange(0 if source.round == 2 else n))
    sim = build(tiny.with_(participation="skips_a_round()", receiver=receiver, server=server, average=0.5))
    before, silent, after = [each.state for each in sa.simulate(sim, sim.start, 4)][1:]
    assert same(silent._replace(average=()), before._replace(average=()))
    mean = 0.5 * before.average[0].double() + 0.5 * before.model.w.double()
    torch.testing.assert_close(silent.average[0].double(), mean, rtol=1e-5, atol=1e-6)
    assert not torch.equal(silent.average[0], before.average[0])
    assert not any(same(getattr(after, name), getattr(silent, name)) for name in ("model", *KINDS))
