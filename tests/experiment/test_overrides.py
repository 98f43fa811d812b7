"""Dotted keys and words of the command line."""

import pytest

from helpers.errors import refused
from stableair.experiment import (
    Experiment,
    from_words,
)


def test_a_dotted_key_changes_one_argument():
    e = Experiment(receiver="mac(C=1) | gnc(max_norm=3)").with_(**{"receiver.C": 0.3, "noise.alpha": 1.2})
    assert (e.receiver, e.noise) == ("mac(C=0.3) | gnc(max_norm=3)", "sas(alpha=1.2, tau=0.1)")
    assert e.with_(**{"receiver.blocks": "layer"}).receiver == "mac(C=0.3) | gnc(max_norm=3, blocks=layer)"
    error = refused("unknown-argument", e.with_, **{"receiver.c": 1})
    assert str(error).endswith("has no argument 'c'; did you mean 'C'? allowed: C, gain, pilot, max_norm, blocks")
    assert (error.fields["name"], "C" in error.fields["allowed"]) == ("c", True)
    assert refused("unknown-value", e.with_, **{"reciever.C": 1}).fields["value"] == "reciever"


def test_the_constructor_accepts_the_keys_of_with_():
    settings = {"clients": 5, "noise": "markov", "noise.p": 0.2, "receiver.C": 3}
    assert Experiment(**settings) == Experiment().with_(**settings)
    refused("unknown-value", Experiment, **{"reciever.C": 1})
    refused("unknown-setting", Experiment, **{"noise.tau": 1, "client": 3})


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"noise": "markov", "noise.bad.tau": 3}, "noise.bad='sas(tau=3)'"),
        ({"noise": "markov(p=0.2)", "noise.bad.std": 3}, "noise.bad='gaussian(std=3)'"),
        ({"fading.of.mean": 2}, "fading.of='rayleigh(mean=2)'"),
        ({"noise.tau.x": 3}, "noise.ARGUMENT=VALUE"),
    ],
)
def test_a_key_with_two_dots_names_the_nested_spec(settings, fix):
    assert str(refused("unknown-argument", Experiment().with_, **settings)).endswith(f"; write {fix}")


def test_words_of_a_command_line(tmp_path):
    (tmp_path / "mine.toml").write_text("clients = 3")
    e = from_words([str(tmp_path / "mine.toml"), "rounds=5", "lr=1e-2", "receiver=mac(C=0.5)", "noise.tau=0.2"])
    assert e == Experiment(clients=3, rounds=5, lr=0.01, receiver="mac(C=0.5)", noise="sas(tau=0.2, alpha=1.5)")
    assert from_words([]) == Experiment()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["digts"], "unknown-preset"),
        (["missing.toml"], "unreadable-file"),
        (["digits", "demo"], "not-a-setting"),
        (["rounds=many"], "wrong-type"),
        (["rounds=2.5"], "wrong-type"),
        (["lr=fast"], "wrong-type"),
        (["round=3"], "unknown-setting"),
        (["receiver.C=0"], "out-of-range"),
        (["=3"], "unknown-setting"),
        (["model.width=3"], "unknown-argument"),
        (["lr=" + "1" * 400], "out-of-range"),
        (["digits", "digits"], "not-a-setting"),
        (["noise=none", "noise.tau=3"], "unknown-argument"),
        (["noise=gaussian"], "missing-argument"),
        (["noise_on=sum"], "unknown-setting"),
    ],
)
def test_invalid_words_are_refused(words, code):
    refused(code, from_words, words)


def test_the_last_value_of_a_repeated_setting_is_used_with_a_note(caplog):
    caplog.set_level("INFO", "stableair")
    e = from_words(["clients=5", "noise=none", "clients=6", "noise=sas(tau=1)"])
    assert (e.clients, e.noise) == (6, "sas(tau=1)")
    assert [record.getMessage() for record in caplog.records] == [
        "clients is given twice: 6 replaces 5", "noise is given twice: sas(tau=1) replaces none",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("tau=0.3", "did you mean noise.tau=0.3?"),
        ("max_norm=5", "did you mean receiver.max_norm=5?"),
        ("alpha=1.2", "did you mean noise.alpha=1.2?"),  # not of the server: the default components come first
        ("recever=none()", "did you mean 'receiver'?"),
    ],
)
def test_an_argument_without_its_component_suggests_the_dotted_key(word, advice):
    assert advice in str(refused("unknown-setting", from_words, [word]))


def test_the_text_of_errors_with_values():
    assert str(refused("unknown-preset", from_words, ["digts"])).startswith(
        "'digts' is not a preset, a file or key=value; did you mean 'digits'? allowed: digits, "
    )
    text = "setting model.width: auto has no argument 'width'; it takes none; set model= first"
    assert str(refused("unknown-argument", from_words, ["model.width=3"])) == text


def test_a_bare_name_takes_its_arguments_from_dotted_keys():
    e = Experiment().with_(noise="gaussian", **{"noise.std": 1.5})
    assert e.noise == "gaussian(std=1.5)"
    e = from_words(["receiver=gnc", "receiver.max_norm=3", "receiver.blocks=tensor", "data=cifar10", "data.train=50"])
    assert (e.receiver, e.data) == ("gnc(max_norm=3, blocks=tensor)", "cifar10(train=50)")
    assert from_words(["noise=sas(tau=2)", "noise.alpha=1.2"]).noise == "sas(alpha=1.2, tau=2)"
