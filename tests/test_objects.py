"""Python objects in place of specs: recorded by name and digest, and resumed with the same objects only."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

import stableair as sa
from helpers import errors
from stableair.results.grouping import group

RNG = np.random.default_rng(0)
TABLE = sa.Dataset.from_arrays(RNG.normal(0, 1, (60, 4)), np.arange(60) % 3)


class Net(nn.Module):
    def __init__(self, width=3, scale=1.0):
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
        self.scale = scale

    def forward(self, x):
        return self.scale * self.out(torch.relu(self.norm(self.hidden(x.flatten(1)))))


def net(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def soft(C):
    return lambda g: C * (g / C).tanh()


def smoothed(beta=0.9):
    def apply(received, mean):
        mean = torch.lerp(received.g, mean, beta)
        return mean, mean, {"norm": mean.norm().item()}

    return sa.Rule(apply, init=torch.zeros_like)


def halving(w, g):
    return w - 0.01 * g


@pytest.fixture
def base():
    return sa.Experiment(clients=5, rounds=4, device="cpu")


def objects(**changes):
    return {"data": TABLE, "model": net(), "receiver": smoothed()} | changes


def rows(run):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in run.rounds]


def refused(code, *args, **options):
    return errors.refused(code, sa.run, *args, **options)


# -------------------------------------------------------------------------------------------------------------- results


def test_objects_give_the_results_of_registered_components(base, registries):
    sa.dataset("mine")(lambda: TABLE)
    sa.model("mine")(lambda: lambda shape, classes: net())
    sa.receiver("mine")(lambda C: soft(C))
    sa.server("mine")(lambda: halving)
    names = base.with_(data="mine", model="mine", receiver="mine(C=2)", server="mine", clients=4)
    with_objects = sa.run(base.with_(clients=4), data=TABLE, model=net(), receiver=soft(2.0), server=halving)
    assert rows(with_objects) == rows(sa.run(names))
    assert rows(with_objects) != rows(
        sa.run(base.with_(clients=4), data=TABLE, model=net(), receiver=soft(3.0), server=halving)
    )


halved = lambda g: g / 2  # noqa: E731


@pytest.mark.parametrize("receiver", [halved, lambda g: g / 2], ids=["of a module", "anonymous"])
def test_a_lambda_is_a_receiver(base, receiver, tmp_path):
    run = sa.run(base, tmp_path / "a", data=TABLE, model=net(), receiver=receiver)
    assert sa.load(tmp_path / "a")["test/loss"] == run["test/loss"]


def test_a_module_is_the_initial_model_and_does_not_change(base):
    module = net()
    before = copy.deepcopy(module.state_dict())
    server = lambda w, g: w  # noqa: E731 (a lambda is an object too)
    trained = sa.run(base, data=TABLE, model=module, server=server)
    for values in (module.state_dict(), {name: trained.state_dict()[name] for name, _ in module.named_parameters()}):
        assert all(torch.equal(before[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    "factory",
    [
        Net,
        lambda: Net(),
        lambda shape, classes: Net(),
        lambda width=3: lambda shape, classes: Net(width),
        sa.models.logistic,
        sa.models.mlp(width=3),
    ],
)
def test_factories_of_models_are_accepted(base, factory):
    run = sa.run(base.with_(rounds=1), data=TABLE, model=factory)
    again = sa.run(base.with_(rounds=1, seed=1), data=TABLE, model=factory)
    first, other = (one.state.model.w for one in (run, again))
    assert not torch.equal(first, other), "the seed draws the initial model"
    assert rows(sa.run(base.with_(rounds=1), data=TABLE, model=factory)) == rows(run)


def test_specs_are_accepted_in_place_of_objects(base):
    run = sa.run(base.with_(rounds=1), data="synthetic(samples=60)", model="logistic()", receiver="none()")
    assert run.settings["receiver"] == "none()"
    assert rows(run) == rows(
        sa.run(base.with_(rounds=1, data="synthetic(samples=60)", model="logistic()", receiver="none()"))
    )


# ---------------------------------------------------------------------------------------------------- record and resume


def test_a_run_with_objects_is_read_plotted_and_labelled(base, tmp_path):
    sa.run(base, tmp_path / "a", **objects())
    sa.run(base, tmp_path / "b", **objects(receiver=soft(2.0)))
    read = sa.load(tmp_path / "a")
    record = json.loads((tmp_path / "a" / "experiment.json").read_text())
    assert "test_objects.Net" in record["model"]
    assert read.experiment.id() == sa.load(tmp_path / "a").experiment.id() != sa.load(tmp_path / "b").experiment.id()
    assert sa.Experiment.from_json(read.experiment.to_json()) == read.experiment
    labels = list(group([read, sa.load(tmp_path / "b")]))
    assert labels == ["test_objects.smoothed.apply", "test_objects.soft.lambda"]
    assert "object" not in read.experiment.name
    assert set(sa.table([tmp_path])["receiver"]) == set(labels)


def test_a_resumed_run_equals_an_uninterrupted_one(base, tmp_path):
    whole = sa.run(base, tmp_path / "whole", **objects())
    sa.run(base.with_(rounds=2), tmp_path / "parts", **objects())
    parts = sa.run(base, tmp_path / "parts", resume=True, **objects())
    assert rows(parts) == rows(whole)
    assert torch.equal(parts.state.model.w, whole.state.model.w)
    resumed = sa.run(parts.experiment.with_(rounds=5), tmp_path / "parts", resume=True, **objects())
    assert len(resumed) == 5, "the recorded experiment is accepted too"


CHANGES = {
    "parameters": {"model": net(seed=1)},
    "structure": {"model": net(width=4)},
    "attribute": {"model": net(scale=2.0)},
    "factory": {"model": Net},
    "closure": {"receiver": smoothed(0.8)},
    "function": {"receiver": soft(1.0)},
    "labels": {"data": TABLE._replace(train=TABLE.train._replace(y=TABLE.train.y.flip(0)))},
    "one value": {"data": TABLE._replace(test=TABLE.test._replace(x=TABLE.test.x + 1e-6))},
    "scaling": {"data": TABLE._replace(std=2.0)},
    "model left out": {"model": None},
    "data left out": {"data": None},
    "receiver left out": {"receiver": None},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_other_objects_are_refused(base, tmp_path, change):
    sa.run(base.with_(rounds=1), tmp_path / "a", **objects())
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    error = refused("object-changed", base, tmp_path / "a", resume=True, **objects(**CHANGES[change]))
    assert error.fields["name"] == next(iter(CHANGES[change]))
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_recorded_experiment_without_its_object_is_refused(base, tmp_path):
    recorded = sa.run(base.with_(rounds=1), tmp_path / "a", **objects()).experiment
    for setting in ("data", "model", "receiver"):
        given = objects(**{setting: None})
        error = refused("object-needed", recorded.with_(rounds=2), tmp_path / "a", resume=True, **given)
        assert setting in str(error)
    assert len(sa.run(recorded, tmp_path / "a", resume=True)) == 1, "a finished run needs no objects"


def test_objects_do_not_change_the_ids_of_other_experiments(base):
    before = base.id()
    changed = sa.run(base.with_(rounds=1), **objects()).experiment
    assert base.id() == before
    plain = {"data": base.data, "model": base.model, "receiver": base.receiver}
    assert changed.with_(**plain).id() == before


# -------------------------------------------------------------------------------------------------- the trained network


def test_the_trained_network_has_the_accuracy_of_the_last_round(base, tmp_path):
    run = sa.run(base, tmp_path / "a", **objects())
    for module in (run.module(), sa.load(tmp_path / "a").module(model=Net(), data=TABLE)):
        right = module(TABLE.inputs(TABLE.test.x)).argmax(1) == TABLE.test.y
        assert right.double().mean().item() == pytest.approx(run["test/accuracy"][-1])
        assert not module.training
    assert torch.equal(nn.utils.parameters_to_vector(run.module().parameters()), run.state.model.w)
    assert run.state_dict()["norm.running_mean"].tolist() == run.state.model.stats[:3].tolist()


def test_the_network_of_a_spec_is_rebuilt(tiny, tmp_path):
    run = sa.run(tiny, tmp_path / "a")
    read = sa.load(tmp_path / "a").state_dict()
    assert read.keys() == run.state_dict().keys()
    assert torch.equal(torch.cat([t.flatten() for t in read.values()]), run.state.model.w)


def test_the_network_of_a_read_run_needs_its_objects(base, tmp_path):
    sa.run(base.with_(rounds=1), tmp_path / "a", **objects())
    read = sa.load(tmp_path / "a")
    for given, code in (
        ({}, "object-needed"),
        ({"data": TABLE}, "object-needed"),
        ({"data": TABLE, "model": Net(9)}, "wrong-model"),
    ):
        errors.refused(code, read.module, **given)


# ------------------------------------------------------------------------------------------------------------ bad input


def test_objects_of_a_wrong_type_are_refused(base):
    for data in ([1, 2], np.ones((3, 4)), torch.utils.data.TensorDataset(torch.ones(3))):
        assert "sa.Dataset.from_arrays(x, y)" in refused("wrong-type", base, data=data).advice
    refused("wrong-type", base, data=TABLE, model=3)
    refused("wrong-type", base, data=TABLE, model=net(), receiver=3)
    refused("invalid-model", base, data=TABLE, model=lambda: 3)
    refused("invalid-model", base, data=TABLE, model=nn.Linear(4, 2))


@pytest.mark.parametrize("value", [TABLE, net(), soft(1.0), 3], ids=["data set", "module", "function", "number"])
@pytest.mark.parametrize("setting", ["data", "model", "receiver", "server"])
def test_an_experiment_refuses_objects_and_names_the_call_that_takes_them(setting, value):
    error = errors.refused("not-a-spec", sa.Experiment, **{setting: value})
    assert f"sa.run(experiment, {setting}=...)" in error.advice


@pytest.mark.parametrize(
    "function", [lambda a: net(), lambda a, b, c: net(), lambda: lambda a: net(), nn.Conv2d, lambda *, width: net()]
)
def test_a_model_function_takes_the_shape_and_the_classes_or_nothing(base, function):
    assert "(shape, classes) or no argument" in str(refused("invalid-model", base, data=TABLE, model=function))


def test_a_class_of_torch_that_fails_is_named(base):
    assert str(refused("component-failed", base, data=TABLE, model=nn.Linear)).startswith("Linear: ")


def test_a_registered_model_function_takes_the_shape_and_the_classes(base, registries):
    sa.model("one_argument")(lambda: lambda shape: net())
    assert __file__ in str(errors.refused("invalid-model", sa.run, base.with_(model="one_argument"), data=TABLE))


def test_a_network_of_torch_for_other_data_is_refused_without_a_line_of_torch(base):
    text = str(refused("invalid-model", base, data=TABLE, model=nn.Linear(5, 3)))
    assert text.startswith("the model does not accept the data: inputs of shape (2, 4)")
    assert "linear.py" not in text
    wider = sa.Dataset.from_arrays(RNG.normal(0, 1, (60, 5)), np.arange(60) % 3)
    assert __file__ in str(refused("invalid-model", base, data=wider, model=net()))


def test_an_error_in_an_object_is_one_line_with_its_file_and_line(base):
    def broken(g):
        return g / [][0]

    error = refused("component-failed", base, data=TABLE, model=net(), receiver=broken)
    assert __file__ in str(error)
    assert "IndexError" in str(error)
    assert __file__ in str(refused("wrong-shape", base, data=TABLE, model=net(), receiver=lambda g: g[:-1]))


def test_the_name_of_objects_cannot_be_registered(registries):
    with pytest.raises(sa.InputError) as error:
        sa.receiver("object")(lambda: None)
    assert error.value.code == "name-taken"
