"""Accuracy and loss of a model on the test split, under each treatment of the norm statistics.

The clients measure the running means and variances of batch norm before the interference moves the weights. So the same
weights can be evaluated in three ways, without effect on the training: with the `clients`' statistics, as averaged over
the side link; with statistics `recalibrated` for the new weights on a sample of the clients' training data; and with
the statistics of each test `batch`.

On a GPU the host waits for the device only once, at the end. It queues the small steps of a recalibration while the
device still computes on the test data.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from stableair.client_tests import ClientTests
from stableair.contracts import Average, Dataset, Memory, Metrics
from stableair.literals import NormStats
from stableair.streams import generator
from stableair.training.reference import float32_matmul, restored_buffers, restored_generators, seed_generators
from stableair.vector import Layout, ModelState, attach, buffers

SAMPLES = 40  # samples per client for the recalibration
BATCH = 200  # samples per forward pass of the recalibration

Scaling = tuple[Tensor, Tensor]  # mean and standard deviation per channel: see Dataset.scaling


def norm_layers(module: nn.Module) -> list[_BatchNorm]:
    """Return the layers of a module that keep running statistics."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]


def calibration_sample(parts: Sequence[Tensor], seed: int) -> Tensor:
    """Choose up to 40 training samples of each client, the same in every round, in an order that mixes the clients.

    Args:
        parts: Indices of each client's training samples.
        seed: Seed of the experiment.

    Returns:
        Indices of the chosen samples, (m,).
    """
    each = [part[generator(seed, "calibration", n).permutation(len(part))[:SAMPLES]] for n, part in enumerate(parts)]
    samples = torch.cat(each)
    return samples[generator(seed, "calibration").permutation(len(samples))]


class Score(NamedTuple):
    """Accuracy and mean loss of a model under one treatment, and the correctness of each prediction."""

    accuracy: float
    loss: float
    correct: Tensor


@dataclass(frozen=True)
class Evaluate:
    """Evaluation of a model on the test split of the data; the metrics are recorded under `name`."""

    module: nn.Module
    data: Dataset
    name: str = "test"
    norm_stats: str = "clients"  # treatment for the metrics "accuracy" and "loss"
    calibration: Tensor | None = None  # (m,) int64, training samples; None: evaluate `clients` only
    clients: ClientTests | None = None  # test sets of the clients; None: no accuracy per client
    batch: int = 1000
    precision: str = "fp32"  # precision of matrix products on a GPU

    @cached_property
    def norms(self) -> Layout:
        """Layout of the norm buffers."""
        return buffers(self.module)

    @property
    def treatments(self) -> tuple[str, ...]:
        """The treatments that differ for this model."""
        treatments = get_args(NormStats)
        return treatments if self.calibration is not None and norm_layers(self.module) else treatments[:1]

    @property
    def named(self) -> str:
        """Treatment for the metrics "accuracy" and "loss"."""
        return self.norm_stats if self.norm_stats in self.treatments else "clients"

    def at(self, precision: str) -> "Evaluate":
        """Return the same evaluation in another precision."""
        return replace(self, precision=precision)

    def __call__(self, state: ModelState, averaged: ModelState | None = None) -> Metrics:
        """Compute the metrics of a model, and the accuracy of an averaged model under the treatment `norm_stats`."""
        scores = self.scores(state, self.treatments)
        named = scores[self.named]
        metrics: Metrics = {f"{self.name}/accuracy": named.accuracy, f"{self.name}/loss": named.loss}
        if len(scores) > 1:
            metrics |= {f"{self.name}/accuracy_{treatment}": score.accuracy for treatment, score in scores.items()}
        if self.clients:
            metrics |= self.clients.metrics(named.correct, self.name)
        if averaged is not None:
            metrics[f"{self.name}/accuracy_averaged"] = self.scores(averaged, [self.named])[self.named].accuracy
        return metrics

    def scores(self, state: ModelState, treatments: Sequence[str]) -> dict[str, Score]:
        """Compute the scores of a model under each of these treatments."""
        scaling = self.data.scaling(state.w.device)
        device = state.w.device
        with torch.no_grad(), self._arithmetic(), _restored(self.module, self.norms), restored_generators(device):
            totals, correct = zip(*(self._score(state, t, scaling) for t in treatments), strict=True)
        means = (torch.stack(totals) / len(self.data.test.y)).tolist()  # the only synchronisation with the device
        scores = zip(treatments, means, correct, strict=True)
        return {treatment: Score(accuracy, loss, right) for treatment, (accuracy, loss), right in scores}

    def _score(self, state: ModelState, treatment: str, scaling: Scaling) -> tuple[Tensor, Tensor]:
        """Count the correct predictions and sum the loss, (2,), and mark the correct predictions, (m,) bool."""
        recalibrated = treatment == "recalibrated"
        state = self._recalibrated(state, scaling) if recalibrated else state._replace(stats=state.stats.clone())
        attach(self.module, state, norms=self.norms)
        self.module.eval()
        seed_generators(0)  # for models that draw random numbers in evaluation mode, too
        if treatment == "batch":
            _train(norm_layers(self.module), 0.0)
        test = self.data.test
        totals, correct = torch.zeros(2, dtype=torch.float64, device=state.w.device), []
        for x, y in zip(_evenly(test.x, self.batch), _evenly(test.y, self.batch), strict=True):
            output = self._output(x, scaling)
            loss = F.cross_entropy(output.double(), y, reduction="sum")
            correct.append(output.argmax(1) == y)
            totals += torch.stack([correct[-1].sum(), loss])
        return totals, torch.cat(correct)

    def _recalibrated(self, state: ModelState, scaling: Scaling) -> ModelState:
        """Recompute the norm statistics of a state for its weights, as the mean over batches of the sample."""
        state = ModelState(state.w, state.stats.clone())
        attach(self.module, state, norms=self.norms)
        self.module.eval()
        layers = norm_layers(self.module)
        for layer in layers:
            layer.reset_running_stats()
        assert self.calibration is not None, "recalibration needs a sample"
        for i, index in enumerate(_evenly(self.calibration, BATCH)):
            _train(layers, 1 / (i + 1))  # cumulative average; momentum=None would wait for the device each time
            self._output(self.data.train.x[index], scaling)
        return state

    def _output(self, x: Tensor, scaling: Scaling) -> Tensor:
        x = self.data.inputs(x, scaling=scaling)
        fast_images = self.precision != "fp32" and x.ndim == 4
        return self.module(x.contiguous(memory_format=torch.channels_last) if fast_images else x)

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        lower = self.precision == "bf16"
        with float32_matmul(self.precision != "fp32"), torch.autocast("cuda", torch.bfloat16, enabled=lower):
            yield


def model_average(keep: float) -> Average:
    """Return the exponential moving average of the model over the rounds; only the evaluation uses it.

        a_k = keep a_{k-1} + (1 - keep) w_{k+1},    a_0 = w_1

    The norm buffers are averaged in the same way. A round without senders repeats the previous model.

    Args:
        keep: Factor of the last average, in [0, 1).

    Returns:
        A function (memory, model) -> (memory, averaged model).
    """

    def average(memory: Memory, model: ModelState) -> tuple[Memory, ModelState]:
        before = memory or model
        mean = ModelState(*(old.lerp(new, 1 - keep) for old, new in zip(before, model, strict=True)))
        return tuple(mean), mean

    return average


def _train(layers: list[_BatchNorm], momentum: float) -> None:
    """Make norm layers use batch statistics, and update their running statistics with `momentum`."""
    for layer in layers:
        layer.momentum = momentum
        layer.train()


def _evenly(rows: Tensor, max_rows: int) -> tuple[Tensor, ...]:
    """Split rows into as few batches of similar size as possible, with at most `max_rows` rows each."""
    return rows.tensor_split(-(-len(rows) // max_rows))


@contextmanager
def _restored(module: nn.Module, norms: Layout) -> Iterator[None]:
    """Restore the momenta of the norm layers, and all buffers but the norm statistics, on exit."""
    layers = norm_layers(module)
    momenta = [layer.momentum for layer in layers]
    with restored_buffers(module, norms):
        try:
            yield
        finally:
            module.eval()
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
