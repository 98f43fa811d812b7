"""Numbers that are too large are refused in one line."""

import pytest

import stableair as sa
from stableair.errors import InputError
from stableair.validation import FLOAT32_MAX, count_digits, integer, short_repr

HUGE = 10**5000  # Python does not convert integers of more than 4,300 digits to text


@pytest.mark.parametrize("name", ["seed", "clients", "rounds", "chunk"])
@pytest.mark.parametrize("value", [HUGE, -HUGE], ids=["positive", "negative"])
def test_a_huge_integer_setting_is_refused(name, value):
    with pytest.raises(InputError) as error:
        sa.Experiment(**{name: value})
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", name)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", ["lr", "data", "device", "payload", "average"])
def test_a_huge_integer_in_another_setting_is_refused(name):
    with pytest.raises(InputError) as error:
        sa.Experiment(**{name: HUGE})
    assert len(str(error.value)) < 400


def test_the_digits_of_an_integer_are_counted():
    for number in (0, 1, 9, 10, 99, 100, 2**63, 10**17 - 1, 10**17, -5):
        assert count_digits(number) == len(str(abs(number)))
    with pytest.raises(InputError) as error:
        integer("n", HUGE)
    assert "5001 digits" in str(error.value)
    assert short_repr(HUGE) == "int of 5,001 digits"
    assert short_repr([HUGE]) == "list"


@pytest.mark.parametrize("spec", ["receiver=clip(C=1e39)", "server=adam_ota(lr=1e39)", "server=adagrad_ota(lr=1e39)"])
def test_a_number_beyond_float32_is_refused(spec, command):
    key, _, text = spec.partition("=")
    with pytest.raises(InputError) as error:
        sa.Experiment(**{key: text})
    assert error.value.code == "out-of-range"
    assert error.value.fields["high"] == FLOAT32_MAX
    code, _, errors = command("run", spec)
    assert (code, errors.count("\n")) == (2, 1), errors


@pytest.mark.parametrize("lr", [1e-39, 1e39])
def test_a_learning_rate_beyond_float32_or_with_such_an_inverse_is_refused(lr):
    with pytest.raises(InputError) as error:
        sa.Experiment(lr=lr)
    assert error.value.code == "out-of-range"


def test_infinite_threshold_is_allowed():
    assert sa.Experiment(receiver="clip(C=inf)").receiver == "clip(C=inf)"


@pytest.mark.parametrize("word", [f"seed={'9' * 5000}", f"receiver.C={'9' * 5000}", f"clients={'9' * 5000}"])
def test_command_prints_one_short_line(word, command):
    code, _, errors = command("run", word)
    assert (code, errors.count("\n")) == (2, 1), errors[:300]
    assert len(errors) < 400
