"""The test set of each client, and statistics of the clients' test accuracies.

A client's test set contains the test samples of its writers. This requires that the training samples of each writer are
at exactly one client, and that every client has such test samples. Otherwise, a client's test set is the whole test
split, weighted by the client's mix of classes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stableair.contracts import Dataset, Metrics
from stableair.errors import InputError

PERCENTILE = 10


class ClientTests(NamedTuple):
    """The clients' test sets, as mixes of groups of test samples: of the classes, or of the writers."""

    group: Tensor  # (m,) int64, the group of each test sample
    mix: Tensor  # (n, groups) float64, the weight of each group at each client; a row adds up to 1

    def to(self, device: torch.device) -> "ClientTests":
        """Copy the test sets to a device."""
        return ClientTests(self.group.to(device), self.mix.to(device))

    def accuracies(self, correct: Tensor) -> Tensor:
        """Compute the accuracy of each client: (m,) bool -> (n,) float64."""
        groups = self.mix.shape[1]
        right = torch.bincount(self.group, weights=correct.double(), minlength=groups)
        return self.mix @ (right / torch.bincount(self.group, minlength=groups).clamp(min=1))

    def metrics(self, correct: Tensor, name: str) -> Metrics:
        """Mean, 10th percentile and minimum of the clients' accuracies: (m,) bool -> `test/client_accuracy_...`."""
        accuracies = self.accuracies(correct).cpu()
        statistics = {
            "mean": accuracies.mean(),
            f"p{PERCENTILE}": accuracies.quantile(PERCENTILE / 100),
            "worst": accuracies.min(),
        }
        return {f"{name}/client_accuracy_{key}": value.item() for key, value in statistics.items()}


def client_tests(data: Dataset, parts: Sequence[Tensor]) -> ClientTests:
    """Build the test sets of clients from the indices of their training samples.

    Raises:
        InputError: A client has none of the classes in the test split (`no-client-test`).
    """
    return _by_writer(data, parts) or _by_class(data, parts)


def _by_writer(data: Dataset, parts: Sequence[Tensor]) -> ClientTests | None:
    """Build test sets from the test samples of each client's writers; None if the writers do not allow it."""
    if data.train.writer is None or data.test.writer is None:
        return None
    writers, group = data.test.writer.cpu().unique(return_inverse=True)
    owned = torch.stack([torch.isin(writers, data.train.writer.cpu()[part]) for part in parts])
    own_counts = [len(data.train.writer.cpu()[part].unique()) for part in parts]
    samples = owned * group.bincount(minlength=len(writers))
    if sum(own_counts) != len(data.train.writer.unique()) or not samples.sum(1).all():
        return None
    return ClientTests(group, _normalised(samples))


def _by_class(data: Dataset, parts: Sequence[Tensor]) -> ClientTests:
    """Build test sets from the whole test split, weighted by each client's mix of the classes that occur in it."""
    train, test = data.train.y.cpu(), data.test.y.cpu()
    counts = torch.stack([train[part].bincount(minlength=data.classes) for part in parts])
    counts = counts * (test.bincount(minlength=data.classes) > 0)
    if empty := (counts.sum(1) == 0).nonzero().flatten().tolist():
        problem = f"the test split has no sample of the classes of client {empty[0]}"
        text = f"evaluate_clients: {problem}; set evaluate_clients=false"
        raise InputError(text, code="no-client-test", name="evaluate_clients", client=empty[0])
    return ClientTests(test, _normalised(counts))


def _normalised(counts: Tensor) -> Tensor:
    """Rows that add up to 1: (n, groups) -> (n, groups) float64."""
    return counts.double() / counts.sum(1, keepdim=True)
