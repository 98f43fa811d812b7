"""Every noise, fading and power rule in whole runs; invalid arguments of them."""

import pytest
import torch

from helpers.components import EXAMPLES
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.channels.registries import fading, noise, power
from stableair.errors import InputError
from stableair.participants import participation

PARTS = [
    *({"power": spec, "channel": "flat(noise_on=sum)"} for spec in EXAMPLES["powers"]),
    *({"noise": spec} for spec in EXAMPLES["noises"]),
    *({"fading": spec} for spec in EXAMPLES["fadings"]),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: next(iter(part.values())))
def test_every_part_is_independent_of_resumption_chunks_and_other_clients(tiny, part, registries):
    participation("most")(lambda: lambda n, source: source.permutation(n)[: n - 1])
    e = tiny.with_(**part, participation="most()")
    sim = build(e)
    whole = list(simulate(sim, sim.start, 4))
    again = build(e.with_(chunk=2))
    assert torch.equal(list(simulate(again, whole[1].state, 4, start=2))[-1].state.model.w, whole[-1].state.model.w)
    all_clients, some = (sim.channel.draw(5, clients, 20, 0, 2) for clients in (torch.arange(5), torch.tensor([3, 1])))
    assert torch.equal(some.h, all_clients.h[[3, 1]])
    assert torch.equal(some.xi, all_clients.xi)


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS, ids=lambda part: next(iter(part.values())))
def test_every_part_is_the_same_on_a_gpu(tiny, part, cuda):
    on_cpu, on_gpu = (list(simulate(sim := build(tiny.with_(**part, device=d)), sim.start, 2)) for d in ("cpu", cuda))
    for a, b in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(b.state.model.w.cpu(), a.state.model.w, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("registry", "text", "expected"),
    [
        (noise, "bursts(length=0)", ("out-of-range", "length")),
        (noise, "bursts(alpha=2.1)", ("out-of-range", "alpha")),
        (noise, "field(density=0)", ("out-of-range", "density")),
        (noise, "field(density=1, exponent=2)", ("out-of-range", "exponent")),
        (noise, "field(density=1, exponent=9)", ("out-of-range", "exponent")),
        (noise, "field(density=1, hold=0.5)", ("wrong-type", "hold")),
        (noise, "field(density=1, power=inf)", ("out-of-range", "power")),
        (noise, "markov(p=0, q=0)", ("conflicting-arguments", None)),
        (noise, "markov(p=1.2)", ("out-of-range", "p")),
        (noise, "markov(good='sos()')", ("unknown-component", "sos")),
        (noise, "markov(bad='sas(tua=1)')", ("unknown-argument", "tua")),
        (noise, "markov(bad='sas(tau=-1)')", ("out-of-range", "tau")),
        (noise, "markov(bad=3)", ("not-a-spec", None)),
        (noise, "markov(bad='sas() | sas()')", ("not-one-component", None)),
        (noise, "markov(bad='markov()')", ("not-nestable", "markov")),
        (fading, "block()", ("missing-argument", None)),
        (fading, "block(rounds=0)", ("out-of-range", "rounds")),
        (fading, "block(entries=1.5)", ("wrong-type", "entries")),
        (fading, "block(of='rayliegh()', rounds=2)", ("unknown-component", "rayliegh")),
        (fading, "block(of='block(rounds=2)', rounds=2)", ("not-nestable", "block")),
        (fading, "ar(a=1.1)", ("out-of-range", "a")),
        (fading, "ar(a=0.5, of='block(rounds=2)')", ("not-nestable", "block")),
        (power, "limit(P=0)", ("out-of-range", "P")),
        (power, "inversion(P=1, threshold=-1)", ("out-of-range", "threshold")),
        (power, "inversion(P=1, threshold=1, csi=1.1)", ("out-of-range", "csi")),
        (power, "inversion(P=1, threshold=1, phase=-1)", ("out-of-range", "phase")),
        (power, "inversion(P=1, threshold=1, phase_law=normal)", ("unknown-value", "phase_law")),
        (power, "inversion(P=1, threshold=1, cfo=1)", ("out-of-range", "cfo")),
        (power, "inversion(P=1)", ("missing-argument", None)),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused_in_one_line(registry, text, expected):
    with pytest.raises(InputError) as error:
        registry.one(text)()
    assert (error.value.code, error.value.fields.get("name")) == expected
    assert "\n" not in str(error.value)
