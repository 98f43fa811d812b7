"""The workloads of the benchmark, including one with a custom network."""

import pytest
import torch

from stableair import bench
from stableair.builder import build
from stableair.spec import passed_objects
from stableair.workloads import OBJECTS, WORKLOADS, grouped_cnn

SMALL = {"data": "synthetic(samples=8, classes=3, shape=(3, 8, 8))", "clients": 2, "local_epochs": 1, "device": "cpu"}


@pytest.mark.parametrize("name", ["resnet18", "resnet18-group", "resnet34", "plugin"])
def test_a_workload_can_be_built_in_a_reduced_form(name):
    with passed_objects(OBJECTS):
        sim = build(WORKLOADS[name].with_(**SMALL))
    kinds = {type(layer) for layer in sim.train.work.module.modules()}
    assert (torch.nn.GroupNorm in kinds) == (name in ("resnet18-group", "plugin"))


def test_the_network_of_the_plugin_is_compared_and_timed():
    rows = bench.measure(WORKLOADS["plugin"].with_(**SMALL), 1, lambda line: None, only=["reference", "stacked"])
    assert [row.name for row in rows] == ["reference, fp32", "stacked, fp32"]


def test_the_network_of_the_plugin_has_grouped_and_strided_convolutions():
    module = grouped_cnn((3, 32, 32), 10)
    convolutions = [layer for layer in module if isinstance(layer, torch.nn.Conv2d)]
    assert [(layer.groups, layer.stride) for layer in convolutions] == [(1, (1, 1)), (4, (2, 2)), (8, (2, 2))]
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
