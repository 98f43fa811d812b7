"""The simulation that is built from an experiment."""

import numpy as np
import pytest
import torch
from torch import nn

import stableair as sa
from helpers.errors import refused
from helpers.isolation import restored_registries
from stableair.builder import build
from stableair.errors import ResourceError
from stableair.experiment import (
    Experiment,
)


def test_more_clients_than_samples_are_refused_by_build():
    error = refused("out-of-range", build, Experiment(clients=1438))
    assert (error.fields["name"], error.fields["value"], error.fields["high"]) == ("clients", 1438, 1437)


@pytest.mark.parametrize("name", ["cuda:99", "cdua", "tpu", "meta"])
def test_a_missing_device_is_refused(name):
    with pytest.raises(sa.InputError) as error:
        build(Experiment(device=name))
    assert (error.value.code, error.value.fields["value"]) == ("unknown-device", name)
    assert error.value.fields["allowed"][:2] == ["auto", "cpu"]


def test_build_follows_the_settings():
    sim = build(
        Experiment(data="synthetic(samples=40, shape=(1, 2, 2))", model="logistic()", clients=4, blocks="model")
    )
    assert sim.n == 4
    assert len(sim.start.model.w) == 5 * 10
    assert sim.layout.names == ("1.weight", "1.bias")
    same, other = (build(Experiment(model="mlp(3)", seed=seed)).start.model.w for seed in (0, 1))
    assert torch.equal(same, build(Experiment(model="mlp(3)")).start.model.w)
    assert not torch.equal(same, other)


@pytest.mark.parametrize(
    ("payload", "server", "step"), [("gradient", "sgd()", 0.03), ("delta", "sgd()", 1.0), ("delta", "sgd(lr=0.5)", 0.5)]
)
def test_the_default_learning_rate_of_the_server(payload, server, step):
    rule = build(Experiment(payload=payload, server=server)).server
    torch.testing.assert_close(rule(torch.zeros(2), torch.ones(2)), torch.full((2,), -step))


def test_the_default_arguments_of_a_server_are_kept(registries):
    sa.server("slow")(lambda lr=0.001: lambda w, g: w - lr * g)
    rule = build(Experiment(server="slow()")).server
    torch.testing.assert_close(rule(torch.zeros(2), torch.ones(2)), torch.full((2,), -0.001))


def test_blocks_reach_the_receiver_and_the_seed_the_partition():
    rules = [build(Experiment(blocks=blocks)).receiver.parts[0] for blocks in ("tensor", "layer", "model")]
    assert [len(rule.blocks.names) for rule in rules] == [4, 2, 1]
    # One negligible step over all data of a client: the loss identifies the samples of the client.
    one_step = Experiment(partition="shards(2)", lr=1e-12, local_epochs=1, batch_size=1000, chunk=50)
    start = build(one_step).start.model
    sims = [build(one_step.with_(seed=seed)) for seed in (0, 0, 1)]
    (first,), (same,), (other,) = (sim.train(start, 0, torch.arange(50)) for sim in sims)
    assert torch.equal(first.loss, same.loss)
    assert not torch.allclose(first.loss, other.loss, rtol=1e-3)


def test_building_does_not_change_the_generator_of_torch():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    build(Experiment(model="mlp(3)"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [{"model": "mlp(99999999999999)"}, {"data": "synthetic(samples=99999999999999)"}])
def test_insufficient_memory_is_refused_and_leaves_no_folder(size, tmp_path):
    with pytest.raises(ResourceError) as error:
        sa.run(Experiment(rounds=1, device="cpu", **size), tmp_path / "a")
    assert error.value.code == "out-of-memory"
    assert not (tmp_path / "a").exists()


def built_with(data, **settings):
    with restored_registries():
        sa.dataset("table")(lambda: data)
        return build(Experiment(data="table", clients=3, device="cpu", **settings))


TABLE = sa.Dataset.from_arrays(np.ones((30, 4)), np.arange(30) % 3)


def test_token_ids_need_a_model():
    data = sa.Dataset.from_arrays(np.arange(120).reshape(30, 4) % 9, np.arange(30) % 3)
    refused("no-default-model", built_with, data)
    refused("invalid-model", built_with, data, model="mlp(4)")


def test_a_vocabulary_that_is_too_small_is_detected_before_the_first_round(registries):
    tokens = np.arange(120).reshape(30, 4) % 9
    tokens[20, 2] = 9  # in a single sample
    data = sa.Dataset.from_arrays(tokens, np.arange(30) % 3)
    sa.model("bag")(lambda vocabulary: lambda shape, classes: nn.EmbeddingBag(vocabulary, classes))
    built_with(data, model="bag(vocabulary=10)")
    refused("invalid-model", built_with, data, model="bag(vocabulary=9)")


def test_augmentation_needs_images():
    refused("not-images", built_with, TABLE, augment="crop_flip")


@pytest.mark.parametrize("change", [{"mean": (0.0, 1.0)}, {"std": (1.0,) * 3}])
def test_a_scale_must_fit_the_columns(change):
    refused("invalid-data", built_with, TABLE._replace(**change))


def test_splits_of_different_kinds_are_refused():
    test = TABLE.test._replace(x=TABLE.test.x.long())
    refused("invalid-data", built_with, TABLE._replace(test=test))
