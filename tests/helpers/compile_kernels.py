"""Compile the kernels of a small network for a GPU of compute capability 9.0, on a machine without one.

    python -m helpers.compile_kernels

Prints the number of kernels of a local step of one client, and the number that a step of two clients still compiles.
It runs in a separate process, because the tests' process interprets kernels.
"""

import logging

import torch
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stableair.data.datasets import synthetic
from stableair.engine import launch
from stableair.engine.kernel_layers import by_kernels
from stableair.engine.resnet import ResNetWorker
from stableair.engine.stacked import Stacked
from stableair.engine.worker import StackedWorker
from stableair.models import ResNet
from stableair.training.local_training import LocalTraining
from stableair.vector import state


class Hopper:
    """The part of a GPU's driver that compilation needs."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def worker(norm):
    torch.manual_seed(0)
    module = ResNet(3, (1, 1), 4, norm, first=16)
    data = synthetic(samples=8, classes=4, shape=(3, 8, 8))
    parts = [torch.arange(4), torch.arange(4, 8)]
    work = LocalTraining(module, data, parts, epochs=1, batch_size=4, lr=0.02, payload="gradient", seed=1)
    if norm is nn.BatchNorm2d:
        made = ResNetWorker(work, "bf16", 2)
    else:
        made = StackedWorker(work, "bf16", 2, by_kernels(Stacked(module)))
    made.load_state(state(module))
    return made


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    driver.set_active(Hopper())
    compiled = []
    compile_one = JITFunction._do_compile
    JITFunction._do_compile = lambda self, *rest: (compiled.append(self), compile_one(self, *rest))[1]
    workers = [worker(norm) for norm in (nn.BatchNorm2d, lambda channels: nn.GroupNorm(4, channels))]
    launch.REPORT_INTERVAL = 0.2
    for each in workers:
        each._compile()
    print(len({*compiled}), len(compiled))
    compiled.clear()
    for each in workers:
        launch.compile_in_parallel(lambda each=each: each.step(2))
    print(len({*compiled}), len(compiled))


if __name__ == "__main__":
    main()
