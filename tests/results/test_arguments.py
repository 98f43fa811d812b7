"""Arguments of runs by name: which differ, their order, and the lines of a plot against one of them."""

import pytest

import stableair as sa
from stableair.results.arguments import arguments, by_argument, differing, in_order, only_numeric_argument, ordered
from stableair.results.grouping import group
from stableair.results.run import Run


def made(**settings):
    return Run(sa.Experiment().with_(**settings).to_record(), [{"round": 0, "test/accuracy": 0.5}])


def grid(*values, seeds=1, **more):
    return [made(receiver=f"mac(C={C})", seed=seed, **more) for C in values for seed in range(seeds)]


def labels(lines):
    return {label: list(line) for label, line in lines.lines.items()}, list(lines.references)


def test_names_are_those_of_the_command_line():
    values = arguments(made(**{"noise.tau": 0.3, "receiver": "mac(C=2)", "clients": 7, "seed": 3}))
    assert (values["noise"], values["noise.tau"], values["receiver"], values["receiver.C"]) == ("sas", 0.3, "mac", 2)
    assert (values["clients"], list(values)[-1], values["seed"]) == (7, "seed", 3)
    assert "rounds" not in values, "an execution setting"
    assert sa.Experiment().with_(**{"receiver.C": values["receiver.C"]}).receiver == "mac(C=2)"


def test_an_argument_of_a_chain_has_the_values_of_its_receivers():
    assert arguments(made(receiver="mac(C=1) | clip(C=1)"))["receiver.C"] == 1
    chain = arguments(made(receiver="mac(C=1) | clip(C=2)"))
    assert (chain["receiver"], chain["receiver.C"]) == ("mac | clip", "1 | 2")


def test_an_argument_differs_if_it_has_two_values_where_it_exists():
    assert differing([made(receiver="mac(C=1)"), made(receiver="gnc(max_norm=3)")]) == ["receiver"]
    assert differing([made(receiver="mac(C=1)", seed=1), made(receiver="mac(C=2)", clients=3)]) == [
        "clients", "receiver.C", "seed",
    ]  # fmt: skip
    assert differing([made(receiver="mac(C=1)"), made(receiver="mac(C=1.0)")]) == []


def test_numbers_are_in_numerical_order_and_texts_follow():
    runs = [*grid("auto", 10, 2, 0.5), made(receiver="none()")]
    assert list(in_order(group(runs))) == ["mac(C=0.5)", "mac(C=2)", "mac(C=10)", "mac(C=auto)", "none()"]
    assert [run.settings["seed"] for run in ordered([made(seed=10), made(seed=9)])] == [9, 10]


def test_lines_are_the_combinations_of_the_other_arguments():
    runs = [*grid(10, 2, seeds=2), *grid(2, 10, **{"noise.tau": 0.3}), made(receiver="none()")]
    lines = by_argument(runs, "receiver.C")
    assert labels(lines) == ({"sas(tau=0.1)": [2, 10], "sas(tau=0.3)": [2, 10]}, ["none()"])
    assert [len(runs) for runs in lines.lines["sas(tau=0.1)"].values()] == [2, 2], "seeds share a point"


def test_a_run_without_a_number_is_a_horizontal_line():
    assert labels(by_argument(grid(1, 2, "auto"), "receiver.C")) == ({"mac": [1, 2]}, ["mac(C=auto)"])


def test_a_component_is_an_argument_with_its_whole_spec():
    runs = [*grid(2, 1), made(receiver="none()")]
    assert labels(by_argument(runs, "receiver")) == ({"mean": ["mac(C=1)", "mac(C=2)", "none()"]}, [])


@pytest.mark.parametrize("name", ["receiver.c", "nonsense", "clients", "receiver.max_norm"])
def test_an_argument_without_several_values_is_refused_with_those_that_have(name):
    with pytest.raises(sa.InputError) as error:
        by_argument(grid(1, 2, seeds=2), name)
    assert (error.value.code, error.value.fields["name"]) == ("unknown-x", name)
    assert error.value.fields["allowed"] == ["round", "receiver.C", "seed"]
    assert "\n" not in str(error.value)


def test_the_only_numeric_argument_that_differs():
    assert only_numeric_argument(group([*grid(1, 2), made(receiver="none()")])) == "receiver.C"
    assert only_numeric_argument(group([*grid(1, 2), *grid(1, clients=5)])) is None, "two differ"
    assert only_numeric_argument(group([*grid(1), made(receiver="none()")])) is None, "none differs"
    assert only_numeric_argument(group(grid(1, "auto"))) is None, "a single number is no axis"
