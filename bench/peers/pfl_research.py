"""pfl-research's simulation: its FederatedAveraging on its SimulatedBackend, in one process."""

import time
from itertools import pairwise

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn import functional as F
from work import network, print_result, read

work = read()
torch.set_num_threads(1)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network(work)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        self.train(not eval)
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict:
        return {"loss": Weighted(F.cross_entropy(self(x), y, reduction="sum").item(), len(y))}


class Clock(TrainingProcessCallback):
    def __init__(self) -> None:
        self.stamps = [time.perf_counter()]

    def after_central_iteration(self, *_, **__) -> tuple[bool, Metrics]:
        self.stamps.append(time.perf_counter())
        return False, Metrics()


def users(i: int) -> PyTorchTensorDataset:
    return PyTorchTensorDataset((work.x[work.parts[i]], work.y[work.parts[i]]), user_id=i)


data = FederatedDataset(users, get_user_sampler("minimize_reuse", list(range(len(work.parts)))))
module, clock = Network(), Clock()
model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
FederatedAveraging().run(
    NNAlgorithmParams(
        work.rounds + 1, evaluation_frequency=10**6, train_cohort_size=len(work.parts), val_cohort_size=0
    ),
    SimulatedBackend(data, data),
    model,
    NNTrainHyperParams(local_num_epochs=work.epochs, local_learning_rate=work.lr, local_batch_size=work.batch),
    NNEvalHyperParams(local_batch_size=None),
    callbacks=[clock],
)
print_result([b - a for a, b in pairwise(clock.stamps)], module.body, work)
