"""Python objects in sweeps, searches and comparisons."""

import numpy as np
import pytest
import torch
from torch import nn

import stableair as sa
from helpers.callbacks import Hooks
from helpers.errors import refused
from helpers.runs import recorded_metrics

RNG = np.random.default_rng(0)
TABLE = sa.Dataset.from_arrays(RNG.normal(0, 1, (60, 4)), np.arange(60) % 3)
SETTINGS = {"clients": 3, "rounds": 2, "device": "cpu"}
EXPERIMENT = sa.Experiment(**SETTINGS)


def net():
    return nn.Linear(4, 3)


def bounded(g):
    return g.clamp(-2, 2)


def halving(w, g):
    return w - 0.01 * g


OBJECTS = {"data": TABLE, "model": net}


def test_every_run_of_a_sweep_uses_its_objects(tmp_path):
    objects = OBJECTS | {"receiver": bounded, "server": halving}
    runs = sa.sweep(SETTINGS | {"seeds": 2}, tmp_path, **objects)
    assert [recorded_metrics(run) for run in runs] == [
        recorded_metrics(sa.run(EXPERIMENT.with_(seed=k), **objects)) for k in (0, 1)
    ]
    trained = runs[0].module()
    assert torch.equal(nn.utils.parameters_to_vector(trained.parameters()), runs[0].state.model.w)


@pytest.mark.parametrize(
    "plan",
    [
        SETTINGS | {"data": TABLE, "model": net, "receiver": ["mac", bounded], "receiver.C": 2},
        SETTINGS | {"data": [TABLE], "model": (net,), "runs": [{"receiver": "mac(C=2)"}, {"receiver": bounded}]},
    ],
    ids=["list", "tables"],
)
def test_a_plan_may_contain_objects(plan, tmp_path):
    runs = sa.sweep(plan, tmp_path)
    expected = [sa.run(EXPERIMENT, receiver=receiver, **OBJECTS) for receiver in ("mac(C=2)", bounded)]
    assert [recorded_metrics(run) for run in runs] == list(map(recorded_metrics, expected))


def test_a_sweep_with_the_same_objects_is_not_computed_again(tmp_path):
    sa.sweep([EXPERIMENT], tmp_path, **OBJECTS)
    computed = Hooks(round=lambda *_: pytest.fail("computed again"))
    sa.sweep([EXPERIMENT], tmp_path, callbacks=[computed], **OBJECTS)
    assert len(sa.sweep([EXPERIMENT], tmp_path, data=TABLE, model=nn.Linear(4, 3))) == 1
    assert len(sa.load(tmp_path)) == 2, "another object is another experiment"


def test_an_object_is_compared_with_a_registered_component(tmp_path):
    comparison = sa.compare(SETTINGS | {"receiver": ["none()", bounded]}, tmp_path, seeds=2, **OBJECTS)
    (lines,) = comparison.lines.values()
    accuracies = {line.receiver: line.accuracies for line in lines}
    runs = [sa.run(EXPERIMENT.with_(seed=k), receiver=bounded, **OBJECTS) for k in (0, 1)]
    assert accuracies["test_plan_objects.bounded"] == [run.settled("test/accuracy") for run in runs]
    refused("unused-options", sa.compare, tmp_path, model=net)


def test_a_search_with_objects_continues_with_the_same_objects_only(tmp_path):
    spaces = {"local_epochs": "1,2"}
    result = sa.search(EXPERIMENT, spaces, tmp_path, receiver=bounded, **OBJECTS)
    for trial in result.trials:
        candidate = EXPERIMENT.with_(evaluate="validation", **trial.values)
        assert trial.score == sa.run(candidate, receiver=bounded, **OBJECTS).settled("validation/accuracy")
    assert sa.search(EXPERIMENT, spaces, tmp_path, receiver=bounded, **OBJECTS).trials == result.trials
    refused("another-search", sa.search, EXPERIMENT, spaces, tmp_path, receiver=lambda g: g, **OBJECTS)
    assert len(sa.run(result.best, receiver=bounded, **OBJECTS)) == 2


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (sa.sweep, {"parallel": 2}), (sa.sweep, {"ray": "auto"}), (sa.compare, {"parallel": 2}), (sa.submit, {}),
    ],
)  # fmt: skip
def test_other_processes_do_not_have_the_objects(call, options, tmp_path):
    plan = SETTINGS | {"receiver": ["none()", bounded]}
    assert refused("object-needs-process", call, plan, tmp_path, **options).fields["name"] == "receiver"
    assert not list(tmp_path.iterdir())


def test_an_object_does_not_replace_several_values_of_a_plan(tmp_path):
    plan = SETTINGS | {"receiver": ["none()", "mac(C=1)"]}
    for call in (sa.sweep, sa.compare):
        assert refused("object-and-plan", call, plan, tmp_path, receiver=bounded).fields["name"] == "receiver"


def test_objects_of_a_wrong_type_are_refused(tmp_path):
    refused("wrong-type", sa.sweep, [EXPERIMENT], tmp_path, data=[1, 2])
    refused("wrong-type", sa.search, EXPERIMENT, {"local_epochs": "1,2"}, tmp_path, model=3)
