import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import stableair as sa
from helpers.components import EXAMPLES, RepeatedReceiver
from stableair.contracts import Reception, Rule
from stableair.errors import InputError
from stableair.receivers import (
    as_receiver,
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
from stableair.receivers.median import vector_median
from stableair.streams import generator
from stableair.vector import Layout

VECTORS = arrays("float32", st.integers(1, 40), elements=st.floats(-1e6, 1e6, width=32)).map(torch.from_numpy)
THRESHOLDS = st.floats(1e-3, 1e3)
RULES = [receiver.one(text) for text in EXAMPLES["receivers"]]
BLOCKS = Layout(("a", "b", "c"), ((3,), (1,), (4,)), (0, 3, 4, 8))


@given(VECTORS)
def test_the_median_is_an_entry_and_the_lower_middle(g):
    ordered = g.sort().values
    assert median(g).item() == ordered[(len(g) - 1) // 2] == vector_median(g)
    assert vector_median(g).shape == ()
    g[len(g) // 2] = math.nan
    assert median(g).isnan()
    assert vector_median(g).isnan()


@given(VECTORS, THRESHOLDS)
def test_mac_keeps_every_entry_within_c_of_the_median(g, C):
    out, m = mac(C)(g), median(g)
    slack = 1e-6 * (g.abs().max() + C)
    assert ((out - m).abs() <= C + slack).all()
    kept = (g - m).abs() < C - slack
    assert torch.equal(out[kept], g[kept]), "unclipped entries are bit-identical"
    assert torch.equal(mac(C)(out), out), "clipping again changes nothing"
    assert torch.equal(mac(math.inf)(g), g)


def test_mac_of_infinities_and_nan():
    assert mac(math.inf)(torch.tensor([math.inf])).tolist() == [math.inf]
    assert mac(1.0)(torch.tensor([0.0, math.nan, 1.0])).isnan().all(), (
        "a NaN makes the median NaN; the channel refuses NaN"
    )


@pytest.mark.gpu
def test_the_median_is_the_same_on_a_gpu(cuda):
    for g in (torch.randn(3, 8), torch.tensor([0.0, math.inf, -math.inf, 1.0]), torch.tensor([0.0, math.nan, 1.0])):
        torch.testing.assert_close(median(g.to(cuda)).cpu(), median(g), equal_nan=True)


def test_mac_is_anchored_at_the_median_before_clipping():
    g = generator(0, "g").normal(101)
    shifted = mac(0.5)(g + 7)  # a second median, after centring, would be zero and lose the shift
    torch.testing.assert_close(shifted, mac(0.5)(g) + 7)
    assert (clip(0.5)(g + 7) == 0.5).all(), "clipping at zero is another rule"


def test_a_single_spike_separates_mac_from_gnc():
    g = torch.tensor([0.1, -0.2, 0.3, 0.0, 1e6])
    torch.testing.assert_close(mac(1.0)(g)[:4], g[:4], rtol=0, atol=0)
    assert gnc(1.0)(g)[:4].abs().max() < 1e-6, "scaling the norm keeps the spike and loses the other entries"


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


def test_gnc_with_infinite_entries_is_its_limit():
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
    assert torch.equal(g, before), "not in place"
    assert out.shape == g.shape
    assert out.dtype == g.dtype
    assert torch.equal(rule(g), out)
    order = generator(0, "order").permutation(len(g))
    torch.testing.assert_close(rule(g[order]), out[order])  # equivariant to permutation
    both = rule(torch.stack([g, 2 * g]))
    torch.testing.assert_close(both, torch.stack([out, rule(2 * g)]))  # (..., d): each row separately


@pytest.mark.parametrize("call", [c for c in RULES if c.entry.name != "none"], ids=str)
def test_an_infinite_entry_gives_finite_values(call):
    g = torch.tensor([0.5, -math.inf, 1.0, 0.25, 0.0])
    assert call()(g).isfinite().all()


def test_the_other_rules_entry_by_entry():
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


def test_blockwise_repairs_each_block_separately():
    g = torch.tensor([0.0, 1.0, 90.0, 5.0, 7.0, 7.0, 7.0, -50.0])
    assert blockwise(mac(1.0), BLOCKS)(g).tolist() == [0.0, 1.0, 2.0, 5.0, 7.0, 7.0, 7.0, 6.0]
    assert blockwise(mac(1.0), BLOCKS.merge("model"))(g).tolist() == [4.0, 4.0, 6.0, 5.0, 6.0, 6.0, 6.0, 4.0]


def test_assemble_gives_each_rule_its_requested_blocks():
    g = torch.arange(8.0) + 1
    whole = assemble(receiver.parse("gnc(max_norm=1)"), BLOCKS, "tensor")(g)
    assert whole.norm().item() == pytest.approx(1)
    each = assemble(receiver.parse("gnc(max_norm=1, blocks=tensor)"), BLOCKS, "model")(g)
    assert [block.norm().item() for block in BLOCKS.split(each)] == pytest.approx([1, 1, 1])
    assert torch.equal(assemble(receiver.parse("mac(C=1)"), BLOCKS, "model")(g), mac(1.0)(g))
    assert torch.equal(assemble(receiver.parse("mac(C=1)"), BLOCKS, "tensor")(g), blockwise(mac(1.0), BLOCKS)(g))
    both = assemble(receiver.parse("mac(C=1) | gnc(max_norm=1)"), BLOCKS, "tensor")(g)
    torch.testing.assert_close(both, gnc(1.0)(blockwise(mac(1.0), BLOCKS)(g)))


class Counting:
    """A rule with memory: multiply by the number of vectors so far."""

    def init(self, like):
        return {"lengths": []}

    def apply(self, received, memory):
        lengths = [*memory["lengths"], len(received.g)]
        return received.g * len(lengths), {"lengths": lengths}, {"seen": len(lengths)}


def test_a_class_with_apply_and_init_is_a_rule_for_the_whole_vector(registries):
    sa.receiver("counting")(Counting)
    rule = RepeatedReceiver(assemble(receiver.parse("none() | counting()"), BLOCKS, "tensor"), BLOCKS)
    g = torch.ones(8)
    assert [rule(g).tolist() for _ in range(3)] == [[1.0] * 8, [2.0] * 8, [3.0] * 8]
    assert rule.memory == ((), {"lengths": [8, 8, 8]}), "the whole vector, once a round"
    assert rule.metrics == {"seen": 3}
    assert rule.rule(g).tolist() == [1.0] * 8, "outside a run it starts from fresh memory"


@pytest.mark.parametrize("factory", [mac, clip, gnc])
@pytest.mark.parametrize("bad", [0, -1, math.nan, "1", None, True])
def test_invalid_thresholds_are_refused(factory, bad):
    with pytest.raises(InputError) as error:
        factory(bad)
    assert error.value.code in ("out-of-range", "wrong-type")


def test_invalid_blocks_are_refused():
    with pytest.raises(InputError) as error:
        gnc(1.0, blocks="tensors")
    assert (error.value.code, error.value.fields["name"]) == ("unknown-value", "blocks")


def centred(step=1.0):
    """Subtract the mean of the whole vector, which is unknown within a block; count the rounds."""

    def apply(received, rounds):
        centre = received.g.mean().item()
        return received.blocks.map(lambda block: (block - centre) * step, received.g), rounds + 1, {"centre": centre}

    return Rule(apply, init=lambda like: 0)


G = torch.tensor([0.0, 3.0, 90.0, -2.0, 7.0, 1.0, -50.0, 4.0])
WHOLE = BLOCKS.merge("model")


def nestings():
    """The same two rules, nested in every way."""
    yield chain(blockwise(mac(2.0), BLOCKS), blockwise(centred(3.0), BLOCKS))
    yield blockwise(chain(mac(2.0), centred(3.0)), BLOCKS)
    yield chain(chain(blockwise(mac(2.0), BLOCKS)), chain(blockwise(centred(3.0), BLOCKS)))
    yield blockwise(chain(blockwise(mac(2.0), BLOCKS), centred(3.0)), BLOCKS)
    yield chain(blockwise(chain(mac(2.0), centred(3.0)), BLOCKS))


def test_chains_and_blocks_can_be_nested_in_any_order():
    clipped = torch.cat([mac(2.0)(block) for block in BLOCKS.split(G)])
    expected = (clipped - clipped.mean()) * 3
    assert not torch.allclose(expected, mac(2.0)(G) - mac(2.0)(G).mean()), "blocks matter here"
    for rule in nestings():
        out, memory, metrics = rule.apply(Reception(G, WHOLE), rule.init(G))
        torch.testing.assert_close(out, expected)
        assert metrics == {"centre": pytest.approx(clipped.mean().item())}
        assert memory == ((), 1), "one entry per rule"


def test_the_memory_does_not_depend_on_the_nesting():
    for one in nestings():
        _, memory, _ = one.apply(Reception(G, WHOLE), one.init(G))
        for other in nestings():
            assert other.apply(Reception(G, WHOLE), memory)[1] == ((), 2)


def test_a_bound_rule_keeps_its_blocks():
    g = torch.arange(8.0) ** 2
    bound = blockwise(mac(1.0), BLOCKS)
    assert torch.equal(blockwise(bound, WHOLE)(g), bound(g))
    assert not torch.equal(blockwise(mac(1.0), WHOLE)(g), bound(g))


def test_metrics_of_several_equal_rules_are_numbered():
    both = RepeatedReceiver(chain(centred(1.0), centred(2.0), centred(3.0)))
    both(G + 1)
    assert list(both.metrics) == ["centre", "centre_2", "centre_3"]
    assert list(both.metrics.values()) == pytest.approx([(G + 1).mean().item(), 0, 0], abs=1e-5)
    several = RepeatedReceiver(chain(mac("auto"), mac(1.0, gain=True)))
    several(G)
    assert list(several.metrics) == ["C", "gain", "step", "alpha", "tau", "clipped", "C_2", "gain_2", "clipped_2"]


def pilot_mean(pilots):
    """Subtract the mean of the pilots."""

    def apply(received, memory):
        return received.g - received.pilot.mean(), memory, {"pilots": len(received.pilot)}

    return Rule(apply, pilots=pilots)


def test_a_nested_rule_gets_its_requested_pilots(registries, tiny):
    for nested in (
        chain(none(), pilot_mean(7)),
        blockwise(chain(pilot_mean(7)), BLOCKS),
        chain(blockwise(pilot_mean(7), BLOCKS), pilot_mean(5)),
    ):
        assert nested.pilots == 7
        out = nested.apply(Reception(G, WHOLE, torch.full((7,), 0.5)), nested.init(G))[0]
        assert torch.equal(out, G - 0.5 * sum(rule.pilots > 0 for rule in nested.parts)), "all rules get the pilot"
    sa.receiver("pilot_mean")(lambda: pilot_mean(5))
    assert sa.run(tiny.with_(receiver="none() | pilot_mean()", rounds=1))["receiver/pilots"] == [5]


def test_a_class_requests_pilots_by_an_attribute():
    class WithPilots:
        pilots = 7

        def init(self, like):
            return ()

        def apply(self, received, memory):
            return received.g, memory, {}

    assert chain(none(), WithPilots()).pilots == 7


@pytest.mark.parametrize("wrong", [3, None, Counting, "mac(C=1)"])
def test_objects_other_than_rules_are_refused(wrong):
    with pytest.raises(InputError) as error:
        chain(mac(1.0), wrong)
    assert (error.value.code, error.value.setting) == ("wrong-type", "receiver")


def test_a_module_is_a_function():
    assert as_receiver(torch.nn.ReLU())(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_metrics_of_a_single_rule_keep_their_names():
    def with_metrics(**metrics):
        return Rule(lambda received, memory: (received.g, memory, metrics))

    def metrics(*rules):
        combined = RepeatedReceiver(chain(*rules))
        combined(G)
        return combined.metrics

    assert metrics(with_metrics(clip_low=1, clip=2)) == {"clip_low": 1, "clip": 2}
    assert metrics(with_metrics(C_2=1), with_metrics(C=2), with_metrics(C=3)) == {"C_2": 1, "C": 2, "C_3": 3}
