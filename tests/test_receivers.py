import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import stableair as sa
from components import EXAMPLES
from stableair.checks import InputError
from stableair.contracts import Receiver, as_receiver
from stableair.receivers import (
    assemble,
    blank,
    blockwise,
    cauchy,
    chain,
    clip,
    gnc,
    mac,
    median,
    none,
    quantile_clip,
    receiver,
    sign,
    tanh_clip,
)  # fmt: skip
from stableair.streams import generator
from stableair.vector import Layout

VECTORS = arrays("float32", st.integers(1, 40), elements=st.floats(-1e6, 1e6, width=32)).map(torch.from_numpy)
THRESHOLDS = st.floats(1e-3, 1e3)
RULES = [receiver.one(text) for text in EXAMPLES["receivers"]]
BLOCKS = Layout(("a", "b", "c"), ((3,), (1,), (4,)), (0, 3, 4, 8))


@given(VECTORS)
def test_the_median_is_an_entry_and_the_lower_middle(g):
    ordered = g.sort().values
    assert median(g).item() == ordered[(len(g) - 1) // 2]


@given(VECTORS, THRESHOLDS)
def test_mac_keeps_every_entry_within_c_of_the_median(g, C):
    out, m = mac(C)(g), median(g)
    slack = 1e-6 * (g.abs().max() + C)
    assert ((out - m).abs() <= C + slack).all()
    kept = (g - m).abs() < C - slack
    assert torch.equal(out[kept], g[kept]), "what is not clipped stays bit-identical"
    assert torch.equal(mac(C)(out), out), "clipping again changes nothing"
    assert torch.equal(mac(math.inf)(g), g)


def test_mac_of_infinities_and_nan():
    assert mac(math.inf)(torch.tensor([math.inf])).tolist() == [math.inf]
    assert mac(1.0)(torch.tensor([0.0, math.nan, 1.0])).isnan().all(), "one NaN poisons a median: it is refused before"


@pytest.mark.gpu
def test_the_median_is_the_same_on_a_gpu(cuda):
    for g in (torch.randn(3, 8), torch.tensor([0.0, math.inf, -math.inf, 1.0]), torch.tensor([0.0, math.nan, 1.0])):
        torch.testing.assert_close(median(g.to(cuda)).cpu(), median(g), equal_nan=True)


def test_mac_is_anchored_at_the_median_before_clipping():
    g = generator(0, "g").normal(101)
    shifted = mac(0.5)(g + 7)  # a median taken again after centring would be zero and lose the shift
    torch.testing.assert_close(shifted, mac(0.5)(g) + 7)
    assert (clip(0.5)(g + 7) == 0.5).all(), "clipping at zero is another rule"


def test_one_spike_is_what_separates_mac_from_gnc():
    g = torch.tensor([0.1, -0.2, 0.3, 0.0, 1e6])
    torch.testing.assert_close(mac(1.0)(g)[:4], g[:4], rtol=0, atol=0)
    assert gnc(1.0)(g)[:4].abs().max() < 1e-6, "scaling the norm leaves the spike and loses the rest"


@given(VECTORS, THRESHOLDS)
def test_gnc_bounds_the_norm_and_keeps_the_direction(g, max_norm):
    out, norm = gnc(max_norm)(g), g.double().norm()
    if norm <= max_norm:
        assert torch.equal(out, g)
    else:
        assert out.double().norm().item() == pytest.approx(max_norm, rel=1e-5)
        torch.testing.assert_close(out.double(), g.double() * (max_norm / norm), rtol=1e-5, atol=1e-30)


def test_gnc_of_a_huge_vector_does_not_overflow():
    assert gnc(1.0)(torch.tensor([3e38, 3e38])).tolist() == pytest.approx([0.5**0.5] * 2)


def test_gnc_with_infinities_is_the_limit_and_not_nan():
    assert gnc(2.0)(torch.tensor([1.0, math.inf, -3.0])).tolist() == [0.0, 2.0, 0.0]
    assert gnc(1.0)(torch.tensor([[math.inf, -math.inf], [0.3, 0.4]])).tolist() == [
        pytest.approx([0.5**0.5, -(0.5**0.5)]),
        pytest.approx([0.3, 0.4]),
    ]


@pytest.mark.parametrize("call", RULES, ids=str)
@given(g=VECTORS)
def test_every_rule_is_a_pure_function_of_the_vector(call, g):
    rule, before = call(), g.clone()
    out = rule(g)
    assert torch.equal(g, before), "never in place"
    assert out.shape == g.shape
    assert out.dtype == g.dtype
    assert torch.equal(rule(g), out)
    order = generator(0, "order").permutation(len(g))
    torch.testing.assert_close(rule(g[order]), out[order])  # equivariant to permutation
    both = rule(torch.stack([g, 2 * g]))
    torch.testing.assert_close(both, torch.stack([out, rule(2 * g)]))  # (..., d): each row on its own


@pytest.mark.parametrize("call", [c for c in RULES if c.entry.name != "none"], ids=str)
def test_one_infinity_stays_finite(call):
    g = torch.tensor([0.5, -math.inf, 1.0, 0.25, 0.0])
    assert call()(g).isfinite().all()


def test_the_neighbours_entry_by_entry():
    g = torch.tensor([-4.0, -0.5, 0.0, 1.0, 2.0])
    assert blank(1.5)(g).tolist() == [0.0, -0.5, 0.0, 1.0, 0.0]
    assert sign(0.3)(g).tolist() == pytest.approx([-0.3, -0.3, 0.0, 0.3, 0.3])
    assert quantile_clip(0.6)(g).tolist() == [-1.0, -0.5, 0.0, 1.0, 1.0]  # three of five magnitudes are at most 1
    assert tanh_clip(2.0)(g).tolist() == pytest.approx([2 * math.tanh(x / 2) for x in g.tolist()])
    assert cauchy(2.0)(g).tolist() == pytest.approx([x / (1 + (x / 2) ** 2) for x in g.tolist()])


def test_the_receivers_differ():
    g = torch.tensor([2.0, 2.5, 3.0, 9.0])
    results = [tuple(rule(g).tolist()) for rule in (mac(1), clip(1), gnc(1), none())]
    assert len(set(results)) == 4
    assert results[0] == (2.0, 2.5, 3.0, 3.5)


def test_chain_applies_in_order():
    g = torch.tensor([0.0, 1.0, 90.0])
    assert chain(mac(1), gnc(1))(g).norm().item() == pytest.approx(1)
    assert torch.equal(chain()(g), g)
    assert chain(gnc(1), mac(1))(g)[1] < 0.02 < chain(mac(1), gnc(1))(g)[1]


def test_blockwise_takes_each_block_on_its_own():
    g = torch.tensor([0.0, 1.0, 90.0, 5.0, 7.0, 7.0, 7.0, -50.0])
    assert blockwise(mac(1.0), BLOCKS)(g).tolist() == [0.0, 1.0, 2.0, 5.0, 7.0, 7.0, 7.0, 6.0]
    assert blockwise(mac(1.0), BLOCKS.merge("model"))(g).tolist() == [4.0, 4.0, 6.0, 5.0, 6.0, 6.0, 6.0, 4.0]


def test_assemble_gives_each_rule_the_blocks_it_asks_for():
    g = torch.arange(8.0) + 1
    whole = assemble("gnc(max_norm=1)", BLOCKS, "tensor")(g)
    assert whole.norm().item() == pytest.approx(1)
    each = assemble("gnc(max_norm=1, blocks=tensor)", BLOCKS, "model")(g)
    assert [block.norm().item() for block in BLOCKS.split(each)] == pytest.approx([1, 1, 1])
    assert torch.equal(assemble("mac(C=1)", BLOCKS, "model")(g), mac(1.0)(g))
    assert torch.equal(assemble("mac(C=1)", BLOCKS, "tensor")(g), blockwise(mac(1.0), BLOCKS)(g))
    both = assemble("mac(C=1) | gnc(max_norm=1)", BLOCKS, "tensor")(g)
    torch.testing.assert_close(both, gnc(1.0)(blockwise(mac(1.0), BLOCKS)(g)))


class Counting:
    """A rule with a memory: it scales by how many vectors it was shown."""

    def __init__(self):
        self.seen, self.lengths = 0, []

    def observe(self, g):
        self.seen += 1
        self.lengths.append(len(g))

    def __call__(self, g):
        return g * self.seen

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def metrics(self):
        return {"seen": float(self.seen)}


def test_a_rule_with_a_memory(registries):
    made = []
    sa.receiver("counting")(lambda: made.append(Counting()) or made[-1])
    rule = assemble("none() | counting()", BLOCKS, "tensor")
    g = torch.ones(8)
    rule(g), rule(g)
    assert made[-1].lengths == [8, 8], "it is shown the whole vector, once a round"
    assert rule.metrics() == {"seen": 2.0}
    fresh = assemble("none() | counting()", BLOCKS, "tensor")
    fresh.load_state_dict(rule.state_dict())
    assert fresh(g).tolist() == [3.0] * 8


@pytest.mark.parametrize("factory", [mac, clip, gnc])
@pytest.mark.parametrize("bad", [0, -1, math.nan, "1", None, True])
def test_bad_thresholds(factory, bad):
    with pytest.raises(InputError, match="must be"):
        factory(bad)


def test_bad_blocks():
    with pytest.raises(InputError, match="did you mean 'tensor'"):
        gnc(1.0, blocks="tensors")


class Anchored(Receiver):
    """Centres on the mean of the whole vector, which a block alone does not know; remembers how often."""

    def __init__(self, step=1.0):
        self.step, self.centre, self.times = step, 0.0, 0

    def observe(self, g):
        self.centre, self.times = g.mean().item(), self.times + 1

    def apply(self, g):
        return (g - self.centre) * self.step

    def metrics(self):
        return {"centre": self.centre}

    def state_dict(self):
        return {"times": self.times}

    def load_state_dict(self, state):
        self.times = state["times"]


G = torch.tensor([0.0, 3.0, 90.0, -2.0, 7.0, 1.0, -50.0, 4.0])


def nestings():
    """The same two rules, nested in every way."""
    yield chain(blockwise(mac(2.0), BLOCKS), blockwise(Anchored(3.0), BLOCKS))
    yield blockwise(chain(mac(2.0), Anchored(3.0)), BLOCKS)
    yield chain(chain(blockwise(mac(2.0), BLOCKS)), chain(blockwise(Anchored(3.0), BLOCKS)))
    yield blockwise(chain(blockwise(mac(2.0), BLOCKS), Anchored(3.0)), BLOCKS)
    yield chain(blockwise(chain(mac(2.0), Anchored(3.0)), BLOCKS))


def test_chains_and_blocks_nest_either_way():
    clipped = torch.cat([mac(2.0)(block) for block in BLOCKS.split(G)])
    expected = (clipped - clipped.mean()) * 3
    assert not torch.allclose(expected, mac(2.0)(G) - mac(2.0)(G).mean()), "blocks matter here"
    for rule in nestings():
        torch.testing.assert_close(rule(G), expected)
        assert rule.metrics() == {"centre": pytest.approx(clipped.mean().item())}
        assert rule.state_dict() == {"1": {"times": 1}}, "it has observed once"


def test_the_memory_of_one_nesting_fits_the_others():
    for one in nestings():
        one(G), one(G)
        for other in nestings():
            other.load_state_dict(one.state_dict())
            other(G)
            assert other.state_dict() == {"1": {"times": 3}}


def test_a_memory_that_is_missing_or_foreign_is_refused():
    for state, said in (({}, "the memory of rule 1 is missing"), ({"0": {"times": 1}}, "remembers nothing: got times"),
                        ({"1": {"times": 1}, "7": {}}, "there is no rule 7 to remember: there are 2")):  # fmt: skip
        with pytest.raises(InputError, match=said):
            chain(none(), Anchored()).load_state_dict(state)
    with pytest.raises(InputError, match="Receiver remembers nothing: got seen"):
        as_receiver(none()).load_state_dict({"seen": 1})
    with pytest.raises(InputError, match="AdaptiveMac remembers rounds, alpha"):
        mac("auto").load_state_dict({"rounds": 1})


def test_two_rules_of_one_kind_keep_their_metrics_apart():
    both = chain(Anchored(1.0), Anchored(2.0), Anchored(3.0))
    both(G + 1)
    assert list(both.metrics()) == ["centre", "centre_2", "centre_3"]
    assert list(both.metrics().values()) == pytest.approx([(G + 1).mean().item(), 0, 0], abs=1e-5)
    assert list(chain(mac("auto"), mac(1.0, gain=True)).metrics()) == [
        "C",
        "gain",
        "counts",
        "brake",
        "alpha",
        "tau",
        "C_2",
        "gain_2",
    ]


def test_a_rule_that_wants_pilots_is_found_however_it_is_nested(registries, tiny):
    class Hearing(Receiver):
        pilots = 7

        def __init__(self):
            self.heard = None

        def listen(self, pilot):
            self.heard = pilot

        def apply(self, g):
            return g

    rule = Hearing()
    for nested in (chain(none(), rule), blockwise(chain(rule), BLOCKS), chain(blockwise(rule, BLOCKS))):
        assert nested.pilots == 7
        nested.listen(torch.arange(7))
        assert len(rule.heard) == 7
        rule.heard = None

    made = []

    @sa.receiver("hearing")
    def hearing(pilot: int = 5):
        """By the name of its argument, as in 0.1."""
        rule = Hearing()
        rule.pilots = 0
        made.append(rule)
        return rule

    sa.run(tiny.with_(receiver="none() | hearing()", rounds=1))
    assert len(made[-1].heard) == 5, "its default asks for them"


def test_what_is_no_rule_is_refused():
    with pytest.raises(InputError, match="the receiver must be a function or a Rule: got int"):
        chain(mac(1.0), 3)


def test_metrics_of_one_rule_keep_their_names_whatever_they_are():
    class Telling(Receiver):
        def __init__(self, **told):
            self.told = told

        def apply(self, g):
            return g

        def metrics(self):
            return self.told

    assert chain(Telling(clip_low=1, clip=2)).metrics() == {"clip_low": 1, "clip": 2}
    assert chain(Telling(C_2=1), Telling(C=2), Telling(C=3)).metrics() == {"C_2": 1, "C": 2, "C_3": 3}


def test_a_memory_that_is_empty_at_first_is_resumed():
    class Later(Receiver):
        def __init__(self):
            self.seen = None

        def apply(self, g):
            self.seen = g.sum().item()
            return g

        def state_dict(self):
            return {} if self.seen is None else {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    one, other = chain(Later(), none()), chain(Later(), none())
    one(G)
    other.load_state_dict(one.state_dict())
    assert other.rules[0].seen == G.sum().item()
