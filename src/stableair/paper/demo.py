"""The paper's four methods on the embedded data, with the same fading, noise and batches for all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stableair.experiment import PRESETS, Experiment
from stableair.paper.methods import LABELS, METHODS, experiments
from stableair.results.run import LAST, Row, Run
from stableair.runner import run

GRID = {
    "mac": (METHODS["mac"].receiver, (0.5, 1, 2, 4)),
    "gnc": (METHODS["gnc"].receiver, (30, 100, 300, 1000)),
}
TUNING_ROUNDS = 30  # half the rounds tell the thresholds apart, in half the time


def demo(
    folder: Path, log: Callable[[str], Any], progress: Callable[[str, int], Callable[[Row], Any]]
) -> dict[str, Run]:
    """Tune MAC and GNC on a validation split, then run all four on the test split; finished runs are not repeated.

    `log` takes a line of text; `progress(title, rounds)` gives what is shown each round.
    """
    base = Experiment(**PRESETS["demo"])

    def recorded(name: str, experiment: Experiment) -> Run:
        return run(experiment, folder / name, resume=True, on_round=progress(name, experiment.rounds))

    def tuned(method: str) -> Experiment:
        spec, thresholds = GRID[method]
        log(f"{LABELS[method]}: {TUNING_ROUNDS} rounds on a validation split, mean accuracy of the last {LAST}")
        found: dict[float, float] = {}
        for threshold in thresholds:
            candidate = base.with_(receiver=spec.format(threshold), evaluate="validation", rounds=TUNING_ROUNDS)
            found[threshold] = recorded(f"tune-{method}-{threshold}", candidate).settled("validation/accuracy")
            log(f"  {candidate.receiver:<20} validation accuracy {found[threshold]:.3f}")
        best = max(found, key=lambda threshold: found[threshold])
        log(f"  best: {spec.format(best)}")
        return base.with_(receiver=spec.format(best))

    return {method: recorded(method, experiment) for method, experiment in experiments(base, tuned).items()}
