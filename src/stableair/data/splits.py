"""Test samples that are held out of the training data."""

import numpy as np

from stableair.streams import Generator


def held_out(strata: np.ndarray, share: float, source: Generator) -> np.ndarray:
    """Choose test samples at random: a share of each stratum, at least one of two or more samples, never all of them.

    Args:
        strata: The class, or the writer, of each sample: (m,).
        share: Share of the samples, between 0 and 1.
        source: Random numbers.

    Returns:
        Whether each sample is a test sample: (m,) bool.

    >>> from stableair.streams import generator
    >>> test = held_out(np.array([0, 0, 0, 0, 1, 1, 2]), 0.5, generator(0, "doctest", 0))
    >>> [int(part.sum()) for part in (test[:4], test[4:6], test[6:])]
    [2, 1, 0]
    """
    shuffled = source.permutation(len(strata)).numpy()
    order = shuffled[np.argsort(strata[shuffled], kind="stable")]  # by stratum, in random order within a stratum
    _, first, count = np.unique(strata[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(first, count)  # position of a sample within its stratum
    chosen = np.minimum(np.maximum(1, np.round(share * count)), count - 1)  # single samples are training samples
    test = np.empty(len(order), bool)
    test[order] = rank < np.repeat(chosen, count)
    return test
