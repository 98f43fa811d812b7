"""How good a model is: accuracy and loss on the test split, under each treatment of the norm statistics.

The clients measure the running means and variances of batch norm before the interference moves the weights. So the same
weights can be judged in three ways, which touch the evaluation alone: with the `clients`' statistics, as averaged over
the side link; with statistics `recalibrated` for the new weights on a sample of the clients' training data; and with
the statistics of the test `batch` itself.

On a GPU nothing here waits for the device until all of it has been asked for: the many small steps of a recalibration
are sent while the test data are still at work.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from stableair import vector
from stableair.checks import InputError
from stableair.choices import NORM_STATS
from stableair.contracts import Dataset, Metrics, Rule, normalised
from stableair.local import float32_matmul
from stableair.streams import generator
from stableair.vector import State, attach

SAMPLES = 40  # of each client, to recalibrate on
BATCH = 200  # in each forward pass over them

Scaling = tuple[Tensor, Tensor]  # of the inputs: see Dataset


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

    @property
    def treatments(self) -> tuple[str, ...]:
        """Those that can be told apart."""
        return NORM_STATS if self.calibration is not None and norm_layers(self.module) else NORM_STATS[:1]

    @property
    def named(self) -> str:
        """The treatment that the plain accuracy and loss are taken with."""
        return self.norm_stats if self.norm_stats in self.treatments else "clients"

    def at(self, precision: str) -> "Evaluate":
        """The same evaluation in another precision."""
        return replace(self, precision=precision)

    def __call__(self, state: State) -> Metrics:
        scores = self.scores(state, self.treatments)
        accuracy, loss = scores[self.named]
        found: Metrics = {f"{self.name}/accuracy": accuracy, f"{self.name}/loss": loss}
        if len(scores) > 1:
            found |= {f"{self.name}/accuracy_{treatment}": score[0] for treatment, score in scores.items()}
        return found

    def scores(self, state: State, treatments: Sequence[str]) -> dict[str, tuple[float, float]]:
        """Accuracy and mean loss under each of these treatments."""
        scaling = self.data.scaling(state.w.device)
        with torch.no_grad(), self._arithmetic(), _restored(self.module):
            seen = torch.stack([self._score(state, treatment, scaling) for treatment in treatments])
        shares = (seen / len(self.data.test.y)).tolist()  # here alone the host waits
        return {treatment: (accuracy, loss) for treatment, (accuracy, loss) in zip(treatments, shares, strict=True)}

    def _score(self, state: State, treatment: str, scaling: Scaling) -> Tensor:
        """The hits and the summed loss on the test split, with the norm statistics of a treatment: (2,)."""
        recalibrated = treatment == "recalibrated"
        state = self._recalibrated(state, scaling) if recalibrated else state._replace(stats=state.stats.clone())
        attach(self.module, state)
        self.module.eval()
        if treatment == "batch":
            _train(norm_layers(self.module), 0.0)
        test = self.data.test
        seen = torch.zeros(2, dtype=torch.float64, device=state.w.device)
        for x, y in zip(_evenly(test.x, self.batch), _evenly(test.y, self.batch), strict=True):
            output = self._output(x, scaling)
            loss = F.cross_entropy(output.double(), y, reduction="sum")
            seen += torch.stack([(output.argmax(1) == y).sum(), loss])
        return seen

    def _recalibrated(self, state: State, scaling: Scaling) -> State:
        """The state with norm statistics of its own weights: the plain mean over batches of the calibration sample."""
        state = State(state.w, state.stats.clone())
        attach(self.module, state)
        self.module.eval()
        layers = norm_layers(self.module)
        for layer in layers:
            layer.reset_running_stats()
        assert self.calibration is not None, "without a sample nothing is recalibrated"
        for i, index in enumerate(_evenly(self.calibration, BATCH)):
            _train(layers, 1 / (i + 1))  # a cumulative average; momentum=None is one too, and asks the device each time
            self._output(self.data.train.x[index], scaling)
        return state

    def _output(self, x: Tensor, scaling: Scaling) -> Tensor:
        x = normalised(x, *scaling)
        return self.module(x if self.precision == "fp32" else x.contiguous(memory_format=torch.channels_last))

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        lower = self.precision == "bf16"
        with float32_matmul(self.precision != "fp32"), torch.autocast("cuda", torch.bfloat16, enabled=lower):
            yield


@dataclass
class Averaged(Rule):
    """An evaluation that also judges the average of the model over the rounds, which nothing is trained from.

    a_k = keep a_{k-1} + (1 - keep) w_{k+1} from a_0 = w_1, and the norm buffers alike: (d,) and (b,). Its accuracy,
    `test/accuracy_averaged`, is taken with the norm statistics that `norm_stats` names: `recalibrated` and `batch` ones
    are its own. A round in which nobody was heard counts like any other: its model is the one before.
    """

    evaluate: Evaluate
    keep: float
    model: State | None = None

    def at(self, precision: str) -> "Averaged":
        """The same evaluation in another precision."""
        return replace(self, evaluate=self.evaluate.at(precision))

    def __call__(self, state: State) -> Metrics:
        old = self.model or state
        self.model = State(*(before.lerp(now, 1 - self.keep) for before, now in zip(old, state, strict=True)))
        treatment = self.evaluate.named
        accuracy, _ = self.evaluate.scores(self.model, [treatment])[treatment]
        return self.evaluate(state) | {f"{self.evaluate.name}/accuracy_averaged": accuracy}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.model is None else self.model._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        like = vector.state(self.evaluate.module)._asdict()
        given = {name: (t.shape, t.dtype) for name, t in state.items() if isinstance(t, Tensor)}
        if given != {name: (t.shape, t.dtype) for name, t in like.items()} or len(given) < len(state):
            sizes = " and ".join(f"{name} of {len(t)} entries" for name, t in like.items())
            raise InputError(f"the averaged model must be {sizes}")
        self.model = State(**state)


def _train(layers: list[_BatchNorm], momentum: float) -> None:
    """Let norm layers take the statistics of a batch, and add that share of them to the running ones."""
    for layer in layers:
        layer.momentum = momentum
        layer.train()


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
