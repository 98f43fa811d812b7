"""Each combination of channel, power rule, fading and noise works, or is refused before anything is computed."""

import random
from itertools import product

import pytest
import torch

import stableair as sa
from helpers.components import EXAMPLES
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.channels import assembly
from stableair.channels.registries import channel, fading, noise, power
from stableair.contracts import Upload
from stableair.errors import InputError
from stableair.vector import NOTHING

N, D = 6, 23
REGISTRIES = {"channel": channel, "power": power, "fading": fading, "noise": noise}
PARTS = {
    "channel": [
        "flat()",
        *EXAMPLES["channels"],
        *(f"waveform('{basis}', phase=0.3, noise_on=sum)" for basis in EXAMPLES["bases"]),
        "waveform(hadamard, antennas=3, noise_on=sum)",
    ],
    "power": [
        *EXAMPLES["powers"],
        "inversion(P=1, threshold=0.1)",
        "inversion(P=1, threshold=0.1, csi=0.8, phase=0.2)",
        "inversion(P=1, threshold=0)",
        "inversion(P=1, threshold=2)",  # above the power gain of unit()
    ],
    "fading": EXAMPLES["fadings"],
    "noise": EXAMPLES["noises"],
}
CODES = {
    "unused-setting",
    "noise-not-on-sum",
    "unsupported-noise",
    "unsupported-fading",
    "unsupported-power",
    "unbounded-power",
    "no-senders",
}
COMBINATIONS = list(product(*PARTS.values()))


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr("stableair.channels.power.DRAWS", 1000)


def assembled(specs):
    """The channel of a combination, or the code of its refusal."""
    calls = {name: REGISTRIES[name].one(spec) for name, spec in zip(PARTS, specs, strict=True)}
    pilots = 0 if specs[0].startswith("digital") else 5
    try:
        return assembly.assemble(calls, pilots, NOTHING, None)
    except InputError as error:
        assert "\n" not in str(error)
        return error.code


def received(link, seed, chunk):
    clients = torch.arange(N)
    update = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    rows = clients, update, torch.zeros(N, 0), torch.ones(N)
    chunks = [Upload(*(t[i : i + chunk] for t in rows)) for i in range(0, N, chunk)]
    return link.superpose(chunks, link.draw(N, clients, D, seed, 2))


def check(specs):
    """The code of the refusal, or "" if the channel keeps the contract."""
    link = assembled(specs)
    if isinstance(link, str):
        return link
    first, again = received(link, 3, 1), received(assembled(specs), 3, 4)
    for a, b in ((first.g, again.g), (first.pilot, again.pilot), (first.clean, again.clean)):
        assert (a is None and b is None) or torch.equal(a, b), specs
    assert first.resources == again.resources, specs
    assert len(first.resources.energies) == first.senders, specs
    assert all(energy > 0 for energy in first.resources.energies.values()), specs
    assert first.resources.symbols > 0 or not first.senders, specs
    assert first.g.isfinite().all(), specs
    return ""


def test_some_combinations_work_and_the_others_are_refused():
    outcomes = [check(specs) for specs in random.Random(0).sample(COMBINATIONS, 200)]
    assert set(outcomes) <= {"", *CODES}
    assert outcomes.count("") > 30


@pytest.mark.slow
def test_every_combination_works_or_is_refused():
    outcomes = [check(specs) for specs in COMBINATIONS]
    assert set(outcomes) == {"", *CODES}


@pytest.mark.parametrize(
    ("channel", "power", "fading", "noise", "code"),
    [
        ("waveform(noise_on=sum)", "inversion(P=1, threshold=0.1, cfo=0.1)", "unit()", "none()", "unsupported-power"),
        ("waveform(antennas=2, noise_on=sum)", "inversion(P=1, threshold=1)", "unit()", "none()", "unsupported-power"),
        ("waveform()", "limit(P=1)", "unit()", "none()", "noise-not-on-sum"),
        ("flat()", "limit(P=1)", "unit()", "none()", "noise-not-on-sum"),
        ("digital()", "inversion(P=1, threshold=0.1, phase=0.1)", "unit()", "none()", "unsupported-power"),
        ("digital()", "inversion(P=1, threshold=0.1, cfo=0.1)", "unit()", "none()", "unsupported-power"),
        ("digital()", "limit(P=1)", "rayleigh()", "none()", "unused-setting"),
        ("digital()", "inversion(P=1, threshold=0.1)", "block(entries=5)", "none()", "unsupported-fading"),
        ("digital()", "inversion(P=1, threshold=0.1)", "rayleigh()", "sas()", "unused-setting"),
        ("digital()", "inversion(P=1, threshold=0)", "rayleigh()", "none()", "unbounded-power"),
        ("digital()", "inversion(P=1, threshold=0.1)", "rayleigh()", "none()", ""),
        ("digital()", "limit(P=1)", "unit()", "none()", ""),
        ("waveform(antennas=2, noise_on=sum)", "limit(P=1)", "rayleigh()", "sas()", ""),
        ("waveform(noise_on=sum)", "inversion(P=1, threshold=0.1, phase=1)", "rayleigh()", "bursts()", ""),
        ("flat(noise_on=sum)", "inversion(P=1, threshold=0.1, cfo=0.1)", "rayleigh()", "field(density=1)", ""),
    ],
)  # fmt: skip
def test_the_code_of_a_combination(channel, power, fading, noise, code):
    assert check((channel, power, fading, noise)) == code


RUNS = {
    "inversion over signals": {
        "channel": "waveform('ofdm(n=8, prefix=2)', timing=1, phase=0.1, noise_on=sum)",
        "power": "inversion(P=1, threshold=0.1, csi=0.9, phase=0.2)",
        "noise": "bursts(length=5)",
    },
    "limit over antennas": {
        "channel": "waveform(hadamard, antennas=3, noise_on=sum)",
        "power": "limit(P=1)",
        "noise": "markov(good='sas(tau=0.01)', bad='sas(tau=0.1)')",
    },
    "inversion of digital links": {
        "channel": "digital('qsgd(s=3)')",
        "power": "inversion(P=1, threshold=0.3, csi=0.9)",
        "noise": "none()",
    },
    "leaking symbols": {
        "channel": "flat(noise_on=sum)",
        "power": "inversion(P=1, threshold=0.1, csi=0.9, phase=0.2, cfo=0.01)",
        "noise": "field(density=0.01, hold=5)",
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_one(name, tiny, tmp_path):
    experiment = tiny.with_(**RUNS[name], fading="rayleigh(power=1)")
    whole = sa.run(experiment)
    sa.run(experiment.with_(rounds=2), tmp_path / "stopped")
    resumed = sa.run(experiment, tmp_path / "stopped", resume=True)
    for metric in ("test/loss", "channel/energy_mean", "channel/energy_max", "channel/uses", "channel/senders"):
        assert resumed[metric] == whole[metric]
    assert torch.equal(resumed.state.model.w, whole.state.model.w)


@pytest.mark.parametrize("name", RUNS)
def test_chunks_change_no_bit(name, tiny):
    experiment = tiny.with_(**RUNS[name], fading="rayleigh(power=1)")
    sims = build(experiment), build(experiment.with_(chunk=2))
    for whole, in_chunks in zip(*(simulate(sim, sim.start, 4) for sim in sims), strict=True):
        assert torch.equal(in_chunks.state.model.w, whole.state.model.w)
        assert in_chunks.metrics == whole.metrics
