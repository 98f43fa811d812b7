"""A channel that ignores a setting accepts values that mean that the part is absent."""

import pytest

import stableair as sa
from stableair.channels.assembly import is_absent
from stableair.channels.registries import noise
from stableair.errors import InputError

ABSENT = ["none()", "gaussian(std=0)", "sas(tau=0)", "sas(alpha=1.2, tau=0.0)", "student_t(df=3, scale=0)",
          "middleton(A=1, gamma=1, std=0)", "bursts(tau=0)"]  # fmt: skip


@pytest.mark.parametrize("spec", ABSENT)
def test_digital_accepts_a_noise_that_is_absent(tiny, spec):
    e = tiny.with_(channel="digital()", fading="unit()", rounds=1)
    one, other = (sa.run(e.with_(noise=text)) for text in (spec, "none()"))
    assert one.state.model.w.equal(other.state.model.w)


@pytest.mark.parametrize("spec", ABSENT)
def test_an_absent_noise_is_zero_on_an_analog_channel(tiny, spec):
    assert sa.run(tiny.with_(noise=spec, rounds=1))["channel/snr_db"] == [None]


@pytest.mark.parametrize(
    "settings",
    [
        {"noise": "gaussian(std=0.1)"},
        {"noise": "student_t(df=3)"},
        {"noise": "field(density=0.1)"},
        {"noise": "markov(good='none()', bad='sas(tau=3)', p=0.01)"},  # most of its rounds have no noise
        {"noise": "none()", "fading": "rayleigh()"},
        {"noise": "none()", "power": "limit(P=1)", "fading": "rayleigh()"},
    ],
)
def test_digital_refuses_a_part_that_it_would_ignore(tiny, settings):
    with pytest.raises(InputError) as error:
        sa.run(tiny.with_(**{"channel": "digital()", "fading": "unit()"} | settings))
    name = list(settings)[-1]
    assert (error.value.code, list(error.value.fields["unused"])) == ("unused-setting", [name])
    assert ("scale 0" in str(error.value)) == (name == "noise")


def test_a_declared_scale_is_a_parameter_of_the_noise():
    for name, entry in noise.entries.items():
        scale = entry.declared.get("scale")
        assert scale is None or scale in entry.signature, name


def test_a_noise_without_a_declared_scale_is_not_absent(registries):
    noise("mine")(lambda tau=0: None)
    assert not is_absent("noise", noise.one("mine()"))
