"""Plans that name one experiment twice, and files with a byte-order mark."""

import pytest

import stableair as sa
from stableair.comparisons import comparison_plan
from stableair.errors import InputError
from stableair.sweeps.plans import expand_plan, read_plan

BOM = b"\xef\xbb\xbf"


def test_two_spellings_of_an_experiment_are_one_experiment():
    (one,) = expand_plan({"receiver": ["mac(C=1)", "mac(C=1, gain=none)"]})
    assert one.receiver == "mac(C=1)", "the first spelling is kept"


def test_a_comparison_of_two_spellings_of_a_receiver_is_refused():
    with pytest.raises(InputError) as error:
        comparison_plan({"receiver": ["mac(C=1)", "mac(C=1, gain=none)"]})
    assert error.value.code == "not-paired"


def test_an_experiment_with_two_numbers_of_rounds_is_refused_with_both():
    with pytest.raises(InputError) as error:
        expand_plan([sa.Experiment(rounds=3), sa.Experiment(rounds=5), sa.Experiment(rounds=5, device="cpu")])
    assert error.value.code == "planned-twice"
    assert error.value.fields["different"] == ["rounds"]
    assert "rounds=3 and rounds=5" in str(error.value)


def test_a_plan_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_bytes(BOM + b'receiver = ["mac(C=1)", "none()"]\n')
    assert [one.receiver for one in expand_plan(path)] == ["mac(C=1)", "none()"]


@pytest.mark.parametrize(("name", "text"), [("one.toml", b"rounds = 7\n"), ("one.json", b'{"rounds": 7}')])
def test_an_experiment_with_a_byte_order_mark_is_read(tmp_path, name, text):
    (tmp_path / name).write_bytes(BOM + text)
    assert sa.Experiment.read(tmp_path / name).rounds == 7


@pytest.mark.parametrize(
    ("content", "code"), [(b"rounds = ", "not-toml"), (b"data = '\xff'", "unreadable-file"), (None, "unreadable-file")]
)
def test_a_file_without_a_plan_is_refused(tmp_path, content, code):
    path = tmp_path / "plan.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_plan(path)
    assert error.value.code == code
    assert error.value.fields["path"] == path


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ({"noise.tau": []}, "empty-list"),
        ({"rounds": [1, 2]}, "execution-varies"),
        ({"seeds": 10_001}, "plan-too-large"),
        ({"runs": [3]}, "wrong-type"),
        ({3: 4}, "wrong-type"),
        ({"nois": "none()"}, "unknown-setting"),
        ([], "empty-plan"),
        ([3], "wrong-type"),
    ],
)
def test_invalid_plans_are_refused(plan, code):
    with pytest.raises(InputError) as error:
        expand_plan(plan)
    assert error.value.code == code
