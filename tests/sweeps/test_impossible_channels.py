"""A plan with an experiment whose channel cannot work is refused before any experiment is computed."""

import pytest

import stableair as sa
import stableair.sweeps.workers
from helpers.errors import refused
from stableair.builder import check_channels
from stableair.searches import OneOf
from stableair.searches.study import MAX_CHECKS
from stableair.sweeps import clusters
from stableair.sweeps.plans import expand_plan

CHANNELS = ["flat(noise_on=sum)", "waveform(noise_on=sum)", "waveform()"]
DIGITAL = {"noise": "none()", "receiver": "none()", "fading": "unit()"}


@pytest.fixture
def plan(tiny, monkeypatch):
    """Three channels with a power rule that the last one does not support."""
    monkeypatch.setattr(stableair.sweeps.workers, "run", lambda *_, **__: pytest.fail("an experiment was computed"))
    settings = {name: getattr(tiny, name) for name in ("data", "model", "clients", "rounds", "device")}
    return settings | {"channel": CHANNELS, "power": "limit(P=1)"}


def submit(plan, folder):
    return sa.submit(expand_plan(plan), folder, options={"partition": "gpu"})


@pytest.mark.parametrize("call", [sa.sweep, sa.compare, submit])
def test_a_plan_is_refused_as_a_whole(plan, call, tmp_path, monkeypatch):
    monkeypatch.setattr(clusters, "require", lambda *_, **__: None)  # without submitit
    if call is sa.compare:
        plan |= {"receiver": ["mac(C=1)", "none()"]}
    error = refused("noise-not-on-sum", call, plan, tmp_path / "s")
    wrong = next(one for one in expand_plan(plan | {"channel": CHANNELS[2:]}))
    assert str(error).startswith(f"{wrong.name} with channel=waveform")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("code", "settings"),
    [
        ("too-few-clients", {"channel": ["digital()", "digital(aggregate='krum(f=2)')"], **DIGITAL}),
        ("divisor-without-mean",
         {"channel": "digital(aggregate=median)", "participation": "bernoulli(0.5, expected=true)", **DIGITAL}),
        ("out-of-range", {"channel": "flat()", "power": "none()", "participation": "sample(m=6)"}),
        ("unused-setting", {"channel": ["flat(noise_on=sum)", "digital()"]}),
    ],
)  # fmt: skip
def test_plans_with_impossible_settings_are_refused(plan, code, settings, tmp_path):
    refused(code, sa.sweep, plan | settings, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_the_smallest_possible_plan_passes(plan):
    krum = plan | {"channel": "digital(aggregate='krum(f=1)')", "participation": "sample(m=5)"} | DIGITAL
    check_channels(expand_plan(krum))
    refused("too-few-clients", check_channels, expand_plan(krum | {"clients": [5, 4], "participation": "all()"}))


def test_seeds_with_the_same_channel_are_checked_once(plan, monkeypatch):
    assembled = []
    monkeypatch.setattr("stableair.builder.assembly.assemble", lambda *_: assembled.append(1))
    check_channels(expand_plan(plan | {"seeds": 5, "lr": [0.1, 0.2]}))
    assert len(assembled) == len(CHANNELS)


def test_a_search_checks_the_channels_of_all_combinations_of_values(tiny, tmp_path):
    """Only one of 25 combinations is impossible; trials are built for fewer combinations."""
    values = OneOf((*(f"digital(rate={i})" for i in range(1, 5)), "digital(aggregate='krum(f=2)')"))
    base = tiny.with_(**DIGITAL)
    spaces = {"clients": OneOf((10, 9, 8, 7, 6)), "channel": values}
    assert len(values.values) ** 2 > MAX_CHECKS
    error = refused("too-few-clients", sa.search, base, spaces, tmp_path / "s")
    assert "clients=6 channel=digital(aggregate='krum(f=2)')" in str(error)
    assert not (tmp_path / "s").exists()


def test_the_command_names_the_experiment(command, tiny):
    words = [f"data={tiny.data}", "model=mlp(width=4)", "clients=5", "rounds=1", f"channel={','.join(CHANNELS)}"]
    code, out, errors = command("sweep", *words, "power=limit", "power.P=1", "--out", "s")
    assert (code, out) == (2, "")
    assert "with channel=waveform" in errors
