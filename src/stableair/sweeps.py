"""Many experiments that belong together."""

from stableair.checks import whole
from stableair.experiment import Experiment


def over_seeds(experiment: Experiment, count: int) -> list[Experiment]:
    """The experiment with the seeds seed, seed + 1, ..., so many of them.

    >>> [one.seed for one in over_seeds(Experiment(seed=3), 2)]
    [3, 4]
    """
    return [experiment.with_(seed=experiment.seed + i) for i in range(whole("seeds", count, 1))]
