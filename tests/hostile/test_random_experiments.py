"""Random experiments give the same bits stopped and resumed and in two ranks, and the engines agree."""

from collections import Counter

import pytest

import stableair as sa
from helpers.components import EXAMPLES
from helpers.random_experiments import PLUGINS, draw, register
from helpers.zoo import REPEATABLE
from hostile.random_experiments import command, failures
from stableair.experiment.settings import TYPES
from stableair.spec import REGISTRIES

EXPERIMENTS = 12  # the rest on demand: python -m hostile.random_experiments --minutes 15
NOT_DRAWN = {"device", "engine", "precision"}  # settings: the checks choose the engines
TOO_LARGE = {"resnet18", "resnet34", "cifar10", "cifar100", "femnist", "hf", "remote"}
NEED_A_FILE = {"csv", "npz"}


@pytest.mark.slow
def test_random_experiments(registries):
    register()
    counts = Counter()
    found = [f"{failure}\n{command(number)}" for number, failure in failures(range(EXPERIMENTS), counts)]
    assert not found, "\n\n".join(found)
    refused = sum(count for name, count in counts.items() if name.startswith("refused"))
    assert counts["experiments"] == EXPERIMENTS
    assert refused < EXPERIMENTS / 3
    assert {"engine stacked", "engine reference"} <= counts.keys(), counts


def test_every_component_setting_and_model_is_drawn():
    drawn = [draw(number).settings for number in range(2000)]
    text = "\n".join(str(value) for settings in drawn for value in settings.values())
    names = {entry.name for registry in REGISTRIES.values() for entry in registry} - TOO_LARGE - NEED_A_FILE
    names |= {factory.__name__ for factories in PLUGINS.values() for factory in factories}
    assert not [name for name in names if f"{name}(" not in text and f"={name}" not in text]
    assert not [name for name in REPEATABLE if f"zoo(name={name})" not in text]
    assert not [name for name in TYPES.keys() - NOT_DRAWN if len({settings.get(name) for settings in drawn}) < 2]
    assert len(EXAMPLES["noises"]) < len({settings["noise"] for settings in drawn})


def test_an_experiment_is_a_function_of_its_number():
    assert draw(3) == draw(3) != draw(4)


def test_most_random_experiments_are_valid(registries):
    register()
    refused = 0
    for number in range(100):
        try:
            draw(number).experiment("auto")
        except sa.InputError:
            refused += 1
    assert refused <= 5
