"""How good a model is: accuracy and loss on the test split, under each treatment of the norm statistics.

The clients measure the running means and variances of batch norm before the interference moves the weights. So the same
weights can be judged in three ways, which touch the evaluation alone: with the `clients`' statistics, as averaged over
the side link; with statistics `recalibrated` for the new weights on a sample of the clients' training data; and with
the statistics of the test `batch` itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from stableair.choices import NORM_STATS
from stableair.contracts import Dataset, Metrics
from stableair.local import float32_matmul
from stableair.streams import generator
from stableair.vector import State, attach

SAMPLES = 40  # of each client, to recalibrate on
BATCH = 200  # in each forward pass over them


def norm_layers(module: nn.Module) -> list[_BatchNorm]:
    """The layers of a module that keep running statistics."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]


def calibration_sample(parts: Sequence[Tensor], seed: int) -> Tensor:
    """Up to 40 training samples of each client, the same in every round, in an order that mixes the clients: (m,)."""
    each = [part[generator(seed, "calibration", n).permutation(len(part))[:SAMPLES]] for n, part in enumerate(parts)]
    samples = torch.cat(each)
    return samples[generator(seed, "calibration").permutation(len(samples))]


@dataclass(frozen=True)
class Evaluate:
    """Accuracy and mean loss of a state on the data's test split, recorded under `name`."""

    module: nn.Module
    data: Dataset
    name: str = "test"
    norm_stats: str = "clients"  # the treatment that the plain accuracy and loss are taken with
    calibration: Tensor | None = None  # (m,) int64, training samples: without them there is the one treatment alone
    batch: int = 1000
    precision: str = "fp32"  # of the products on a GPU

    def __call__(self, state: State) -> Metrics:
        treatments = NORM_STATS if self.calibration is not None and norm_layers(self.module) else NORM_STATS[:1]
        with torch.no_grad(), self._arithmetic(), _restored(self.module):
            seen = torch.stack([self._score(state, treatment) for treatment in treatments])  # fetched once, at the end
        scores = dict(zip(treatments, (seen / len(self.data.test.y)).tolist(), strict=True))
        accuracy, loss = scores.get(self.norm_stats, scores["clients"])
        found: Metrics = {f"{self.name}/accuracy": accuracy, f"{self.name}/loss": loss}
        if len(scores) > 1:
            found |= {f"{self.name}/accuracy_{treatment}": score[0] for treatment, score in scores.items()}
        return found

    def _score(self, state: State, treatment: str) -> Tensor:
        """The hits and the summed loss on the test split, with the norm statistics of a treatment: (2,)."""
        state = self._recalibrated(state) if treatment == "recalibrated" else state._replace(stats=state.stats.clone())
        attach(self.module, state)
        self.module.eval()
        if treatment == "batch":
            for layer in norm_layers(self.module):
                layer.train()
        test = self.data.test
        seen = torch.zeros(2, dtype=torch.float64, device=state.w.device)
        for x, y in zip(_evenly(test.x, self.batch), _evenly(test.y, self.batch), strict=True):
            output = self._output(x)
            loss = F.cross_entropy(output.double(), y, reduction="sum")
            seen += torch.stack([(output.argmax(1) == y).sum(), loss])
        return seen

    def _recalibrated(self, state: State) -> State:
        """The state with norm statistics of its own weights: the plain mean over batches of the calibration sample."""
        state = State(state.w, state.stats.clone())
        attach(self.module, state)
        self.module.eval()
        for layer in norm_layers(self.module):
            layer.reset_running_stats()
            layer.momentum = None  # a cumulative average
            layer.train()
        assert self.calibration is not None, "without a sample nothing is recalibrated"
        for index in _evenly(self.calibration, BATCH):
            self._output(self.data.train.x[index])
        return state

    def _output(self, x: Tensor) -> Tensor:
        x = self.data.inputs(x)
        return self.module(x if self.precision == "fp32" else x.contiguous(memory_format=torch.channels_last))

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        lower = self.precision == "bf16"
        with float32_matmul(self.precision != "fp32"), torch.autocast("cuda", torch.bfloat16, enabled=lower):
            yield


def _evenly(rows: Tensor, most: int) -> tuple[Tensor, ...]:
    """The rows in as few batches of about the same size as hold at most so many each."""
    return rows.tensor_split(-(-len(rows) // most))


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Leave the norm layers' momenta and counters as they were."""
    layers = norm_layers(module)
    momenta = [layer.momentum for layer in layers]
    counters = [(c, c.clone()) for layer in layers if (c := layer.num_batches_tracked) is not None]
    try:
        yield
    finally:
        module.eval()
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for counter, before in counters:
            counter.copy_(before)
