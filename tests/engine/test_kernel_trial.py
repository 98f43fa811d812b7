"""The check of the kernels: bfloat16 resolves the gradients of its trials, and wrong programs are refused."""

import copy

import pytest
import torch

from helpers.engine import network, reference
from stableair.data.datasets import synthetic
from stableair.engine.equivalence import NORM_BIAS, Trial, check_distances, check_kernels, distances
from stableair.engine.stacked import Stacked, Unsupported
from stableair.engine.vmapped import Vmapped

SHAPE = (3, 16, 16)


def local_training(spec):
    data = synthetic(samples=6, classes=3, shape=SHAPE)
    return reference(network(spec, SHAPE), data, [3, 3], batch_size=3).work


@pytest.mark.parametrize("spec", ["cnn(width=7)", "batch", "group", pytest.param("resnet34()", marks=pytest.mark.slow)])
def test_a_correct_program_is_within_the_tolerance_and_a_zero_gradient_is_not(spec):
    """The correct program rounds to bfloat16 in another order; a zero gradient has the distance 1."""
    trial = Trial(local_training(spec), torch.float32, 0, 1, NORM_BIAS)
    stacked = Stacked(trial.work.module)
    exact = trial.by_program(stacked)
    rounding = distances(trial.by_program(stacked, "bf16"), exact)
    check_distances(distances(trial.by_program(Vmapped(trial.work.module), "bf16"), exact), rounding)
    for part in rounding:
        with pytest.raises(Unsupported, match=part):
            check_distances(rounding | {part: 1.0}, rounding)


def test_each_part_is_compared_with_its_own_rounding():
    rounding = {"updates": 0.1, "losses": 0.001}
    check_distances({"updates": 0.5, "losses": 0.005}, rounding)
    with pytest.raises(Unsupported, match="losses"):
        check_distances({"updates": 0.1, "losses": 0.05}, rounding)


class Scaled(Stacked):
    """A program that is wrong after some calls."""

    def __init__(self, module, calls):
        super().__init__(module)
        self.calls = calls

    def __call__(self, *arguments):
        self.calls -= 1
        return super().__call__(*arguments) * (1 if self.calls >= 0 else 1.1)


@pytest.mark.parametrize("calls", [0, 1, 2], ids=["the first step", "a short batch", "the second step"])
def test_a_wrong_step_is_refused(calls):
    trained = local_training("cnn(width=7)")
    correct = Stacked(trained.module)
    with pytest.raises(Unsupported):
        check_kernels(trained, correct, Scaled(trained.module, calls), resnet=False)
    check_kernels(trained, correct, copy.copy(correct), resnet=False)
