"""Compare the paper's four methods on the embedded data, with the same fading, noise and batches."""

import logging
from collections.abc import Sequence
from pathlib import Path

from stableair.experiment import PRESETS, Experiment
from stableair.paper.methods import LABELS, METHODS, experiments
from stableair.results.callbacks import Callback
from stableair.results.run import LAST, Run
from stableair.runner import run

log = logging.getLogger("stableair")

GRID = {  # receiver and candidate thresholds by method
    "mac": (METHODS["mac"].receiver, (0.5, 1, 2, 4)),
    "gnc": (METHODS["gnc"].receiver, (30, 100, 300, 1000)),
}
TUNING_ROUNDS = 30  # half of the rounds are enough to rank the thresholds


def demo(folder: Path, callbacks: Sequence[Callback] = ()) -> dict[str, Run]:
    """Tune MAC and GNC on a validation split, then run all four methods on the test split.

    Args:
        folder: Folder of the runs. Finished runs are not computed again.
        callbacks: Observers of the runs.

    Returns:
        The run of each method, by name.
    """
    base = Experiment(**PRESETS["demo"])

    def run_in(name: str, experiment: Experiment) -> Run:
        return run(experiment, folder / name, resume=True, callbacks=callbacks)

    def tune(method: str) -> Experiment:
        spec, thresholds = GRID[method]
        accuracies: dict[float, float] = {}
        for threshold in thresholds:
            candidate = base.with_(receiver=spec.format(threshold), evaluate="validation", rounds=TUNING_ROUNDS)
            accuracies[threshold] = run_in(f"tune-{method}-{threshold}", candidate).settled("validation/accuracy")
        best = max(accuracies, key=lambda threshold: accuracies[threshold])
        values = ", ".join(f"{value:.3f} with {spec.format(threshold)}" for threshold, value in accuracies.items())
        log.info("%s: mean validation accuracy of the last %d of %d rounds: %s; best: %s",
                 LABELS[method], LAST, TUNING_ROUNDS, values, spec.format(best))  # fmt: skip
        return base.with_(receiver=spec.format(best))

    return {method: run_in(method, experiment) for method, experiment in experiments(base, tune).items()}
