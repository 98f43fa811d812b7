"""`Experiment`: settings, checks, parsed specs."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, fields

import pytest

import stableair as sa
from helpers.errors import refused
from stableair.experiment import (
    COMPONENT_SETTINGS,
    PRESETS,
    SETTING_FIELDS,
    TYPES,
    Experiment,
    allowed_values,
    from_words,
)
from stableair.spec import Registry


def test_the_defaults_are_the_set_up_of_the_paper():
    e = Experiment()
    assert (e.clients, e.lr, e.local_epochs, e.batch_size) == (50, 0.03, 5, 10)
    assert (e.noise, e.fading, e.payload) == ("sas(alpha=1.5, tau=0.1)", "rayleigh(mean=1)", "gradient")
    assert (e.data, e.receiver, e.server, e.blocks, e.rounds) == ("digits()", "mac(C=1)", "sgd()", "tensor", 100)


def test_an_experiment_is_immutable_and_hashable():
    with pytest.raises(FrozenInstanceError):
        Experiment().clients = 3
    assert len({Experiment(), Experiment(), Experiment(clients=3)}) == 2
    assert {f.name for f in fields(Experiment)} == set(TYPES)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"client": 5}, "unknown-setting"),
        *(({name: 0}, "out-of-range") for name in ("clients", "rounds", "local_epochs", "batch_size", "lr")),
        *(({"clients": value}, "wrong-type") for value in (2.5, "5", True, None)),
        ({"clients": 10**10}, "out-of-range"),
        ({"local_epochs": 10**19}, "out-of-range"),
        ({"chunk": -1}, "out-of-range"),
        ({"seed": 0.5}, "wrong-type"),
        ({"seed": 10**30}, "out-of-range"),
        ({"seed": -1}, "out-of-range"),
        *(({"lr": value}, "out-of-range") for value in (-1, math.nan, math.inf, 1e300)),
        ({"lr": "fast"}, "wrong-type"),
        *(({"average": value}, "out-of-range") for value in (1, -0.1, math.nan)),
        ({"average": "much"}, "wrong-type"),
        *(({name: "gradients"}, "unknown-value") for name in TYPES if allowed_values(name)),
        ({"snr_blocks": "model"}, "unknown-value"),
        ({"label_smoothing": 1}, "out-of-range"),
        ({"evaluate_clients": 1}, "wrong-type"),
        ({"lr_decay": "cosine(floor=0)"}, "out-of-range"),
        ({"lr_decay": "inverse(over=0)"}, "out-of-range"),
        ({"local": "sgd(nesterov=true)"}, "nesterov-without-momentum"),
        ({"local": "sgd(momentum=1)"}, "out-of-range"),
        ({"local": "fedprox(mu=-1)"}, "out-of-range"),
        ({"local": "adam(lr=0.1)"}, "unknown-argument"),
        ({"device": 3}, "wrong-type"),
        ({"server": "sgd(decay=cosine, floor=0)"}, "out-of-range"),
        ({"noise": "sas(alpha=0.1)"}, "out-of-range"),
        ({"noise": "sas(tau=-1)"}, "out-of-range"),
        ({"noise": "gauss(std=1)"}, "unknown-component"),
        ({"noise": "gaussian(std=1) | none()"}, "not-one-component"),
        ({"fading": "rayleigh(mean=0)"}, "out-of-range"),
        ({"receiver": "mac()"}, "missing-argument"),
        ({"receiver": "mac(C=0)"}, "out-of-range"),
        ({"receiver": "mac(C=nan)"}, "out-of-range"),
        ({"receiver": "mac(C='a')"}, "wrong-type"),
        ({"receiver": 3}, "not-a-spec"),
        ({"partition": "dirichlet(0)"}, "out-of-range"),
        ({"partition": "dirichlet"}, "missing-argument"),
        ({"model": "mpl(200)"}, "unknown-component"),
        ({"data": "digit"}, "unknown-component"),
        ({"server": "sdg()"}, "unknown-component"),
    ],
)
def test_invalid_settings_are_refused_when_the_experiment_is_made(settings, code):
    ((name, value),) = settings.items()
    for make in (Experiment, Experiment().with_):
        with pytest.raises(sa.InputError) as caught:
            make(**settings)
        error = caught.value
        assert "\n" not in str(error)
        assert error.code == code
        if name in TYPES and name not in COMPONENT_SETTINGS:
            assert error.fields["name"] == name
            assert error.fields.get("value", value) is value or error.fields["value"] == value


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"client": 5}, "setting 'client' is unknown; did you mean 'clients'? allowed: data, partition, "),
        ({"clients": 0}, "clients must be at least 1: got 0"),
        ({"local_epochs": 10**19}, "local_epochs must be at most 1,000,000,000: got a number of 20 digits"),
        ({"lr": math.nan}, "lr must be positive and finite: got nan"),
        ({"lr": 1e300}, "lr must be in [1e-38, 1e+38]: got 1e+300"),
        (
            {"payload": "gradients"},
            "payload 'gradients' is unknown; did you mean 'gradient'? allowed: gradient, delta",
        ),
        ({"receiver": "mac(C='a')"}, "receiver mac(C=a): C must be a number or auto: got 'a'"),
        ({"noise": "gauss(std=1)"}, "noise 'gauss' is unknown; did you mean 'gaussian'? allowed: sas, gaussian, "),
    ],
)
def test_the_text_of_errors(settings, text):
    with pytest.raises(sa.InputError) as caught:
        Experiment(**settings)
    assert str(caught.value).startswith(text)


def test_positional_settings_are_refused():
    assert refused("positional-setting", Experiment, "digits").fields["value"] == "digits"


def test_an_experiment_keeps_its_parsed_specs():
    e = Experiment(receiver="mac(0.5) | gnc(10)", noise="sas(tau=2)")
    assert e.call("noise").arguments == {"tau": 2}
    assert [(call.name, call.arguments) for call in e.calls("receiver")] == [
        ("mac", {"C": 0.5}),
        ("gnc", {"max_norm": 10}),
    ]
    assert e.calls("model") == ()
    for setting in ("model", "receiver"):
        assert refused("not-one-component", e.call, setting).fields["name"] == setting
    assert refused("unknown-value", e.calls, "clients").fields["value"] == "clients"
    assert e.with_(seed=1).call("noise").arguments == {"tau": 2}
    assert (e, hash(e), e.to_dict()) == (same := Experiment(**e.to_dict()), hash(same), same.to_dict())


@pytest.mark.parametrize(
    ("setting", "spelling", "form"),
    [
        ("receiver", "none", "none()"),
        ("receiver", "none|mac(1.0) | none()", "none() | mac(C=1) | none()"),
        ("server", "sgd", "sgd()"),
        ("data", "digits", "digits()"),
        ("model", "auto", "auto"),
        ("fading", "block(of=rayleigh, rounds=2)", "block(of='rayleigh(mean=1, power=None)', rounds=2)"),
        ("noise", "markov(good='none')", "markov(good='none()')"),
    ],
)
def test_every_spelling_of_a_spec_is_one_experiment(setting, spelling, form):
    one, other = Experiment(**{setting: spelling}), Experiment(**{setting: form})
    assert getattr(one, setting) == getattr(other, setting) == form
    assert (one, hash(one), one.id(), one.to_record()) == (other, hash(other), other.id(), other.to_record())


def test_a_setting_written_as_its_default_is_not_a_change():
    written = {"server": "sgd", "data": "digits", "power": "none", "channel": "flat"}
    assert (Experiment(**written), repr(Experiment(**written))) == (Experiment(), "Experiment()")


def test_a_run_parses_no_spec_again(tiny, monkeypatch, tmp_path):
    parsed, parse = [], Registry.parse

    def counted(registry, text):
        parsed.append(text)
        return parse(registry, text)

    auto_model = tiny.with_(model="auto", rounds=1)
    monkeypatch.setattr(Registry, "parse", counted)
    sa.run(tiny)
    sa.run(tiny, tmp_path / "a")
    assert parsed == []
    sa.run(auto_model)
    assert len(parsed) == 1, "the default model of the data set is not known before the run"
    parsed.clear()
    Experiment()
    assert len(parsed) == len(COMPONENT_SETTINGS) - 1, "every setting once; model=auto names none"


def test_making_an_experiment_builds_each_component_once(registries):
    built = []

    @sa.receiver("counting")
    def counting(C: float):
        built.append(C)
        return lambda g: g

    e = Experiment(receiver="counting(1)")
    e.with_(**{"receiver.C": 2, "noise.tau": 1, "noise.alpha": 2})
    assert built == [1, 2]


def test_an_experiment_can_be_pickled_and_copied(registries):
    sa.receiver("local")(lambda C: lambda g: g)  # a factory that pickle cannot handle
    e = Experiment(receiver="local(3)", clients=7)
    for again in (pickle.loads(pickle.dumps(e)), copy.deepcopy(e)):
        assert (again, again.id()) == (e, e.id())
        assert again.call("receiver").arguments == {"C": 3}


def test_an_experiment_uses_the_last_registration_of_a_notebook(registries):
    def factory(gain):
        def scaled(C: float):
            return lambda g: gain * g

        scaled.__module__ = "__main__"
        return scaled

    sa.receiver("again")(factory(1))
    e = Experiment(receiver="again(C=1)")
    sa.receiver("again")(factory(2))
    assert e.call("receiver")()(3) == 6


def test_every_setting_has_a_description_and_its_type_is_checked():
    for name, field in SETTING_FIELDS.items():
        assert field.metadata["help"].endswith("."), name
        assert TYPES[name] is type(field.default)
        if allowed := allowed_values(name):
            assert field.default in allowed
            assert all(getattr(Experiment(**{name: value}), name) == value for value in allowed)
            assert refused("unknown-value", Experiment, **{name: "x"}).fields["allowed"] == list(allowed)
    fixed = {"augment", "payload", "blocks", "evaluate", "norm_stats", "snr_blocks", "engine", "precision"}
    assert {name for name in SETTING_FIELDS if allowed_values(name)} == fixed


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_experiments(name):
    assert sa.preset(name) == from_words([name]) == Experiment(**PRESETS[name])


def test_an_unknown_preset_is_refused():
    assert str(refused("unknown-value", sa.preset, "cifar")).startswith(
        "preset 'cifar' is unknown; did you mean 'cifar1"
    )
    refused("unknown-value", sa.preset, ["cifar10"])


def test_a_setting_that_is_given_twice_is_refused():
    assert (
        refused("duplicate-setting", Experiment.from_json, '{"clients": 5, "clients": 6}').fields["name"] == "clients"
    )
    refused("not-toml", Experiment.from_toml, "clients = 5\nclients = 6\n")


def test_settings_nested_too_deeply_are_refused():
    refused("not-json", Experiment.from_json, '{"a":' * 100_000)
    refused("not-toml", Experiment.from_toml, "a = " + "[" * 100_000)
