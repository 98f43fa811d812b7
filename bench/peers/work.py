"""The workload of every peer: federated averaging of a small network with the same clients, data and batch size.

Reads the file of `stableair bench` without importing stableair, and prints the seconds of each round and the final
accuracy.
"""

import json
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch import nn


class Work(NamedTuple):
    x: torch.Tensor  # (m, 64), scaled
    y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    parts: list[torch.Tensor]
    start: torch.Tensor  # initial parameters as one flat vector
    epochs: int
    batch: int
    lr: float
    rounds: int


def read() -> Work:
    stored = np.load(sys.argv[1])
    x, y, test_x, test_y, start = (torch.from_numpy(stored[key]) for key in ("x", "y", "test_x", "test_y", "start"))
    parts = list(torch.from_numpy(stored["order"]).split(stored["sizes"].tolist()))
    numbers = int(stored["epochs"]), int(stored["batch"]), float(stored["lr"]), int(sys.argv[2])
    return Work(x, y, test_x, test_y, parts, start, *numbers)


def network(work: Work) -> nn.Module:
    module = nn.Sequential(nn.Linear(work.x.shape[1], 200), nn.ReLU(), nn.Linear(200, 10))
    nn.utils.vector_to_parameters(work.start, module.parameters())
    return module


def accuracy(module: nn.Module, work: Work) -> float:
    with torch.no_grad():
        return (module(work.test_x).argmax(1) == work.test_y).float().mean().item()


def print_result(seconds: list[float], module: nn.Module, work: Work) -> None:
    """Print the times and the accuracy as the last line of the output; the first round is a warm-up."""
    print(json.dumps({"seconds": seconds[1:], "accuracy": accuracy(module, work)}))
