"""The paper's four methods on the embedded data, with the same fading, noise and batches for all."""

from collections.abc import Callable
from pathlib import Path

from stableair.experiment import IDEAL, PRESETS, Experiment
from stableair.results.run import LAST, Run
from stableair.runner import run

GRID = {"mac": ("mac(C={})", (0.5, 1, 2, 4)), "gnc": ("gnc(max_norm={})", (30, 100, 300, 1000))}
TUNING_ROUNDS = 30  # half the rounds tell the thresholds apart, in half the time
LABELS = {"ideal": "ideal", "mac": "MAC", "gnc": "GNC", "noisy": "noisy"}


def demo(folder: Path, say: Callable[[str], None], watch: Callable[[str, int], Callable]) -> dict[str, Run]:
    """Tune MAC and GNC on a validation split, then run all four on the test split; finished runs are not repeated.

    `say` takes a line of the log; `watch(title, rounds)` gives what shows each round.
    """
    base = Experiment(**PRESETS["demo"])

    def go(name: str, experiment: Experiment) -> Run:
        return run(experiment, folder / name, resume=True, on_round=watch(name, experiment.rounds))

    def tuned(method: str) -> Experiment:
        spec, thresholds = GRID[method]
        say(f"{LABELS[method]}: {TUNING_ROUNDS} rounds on a validation split, mean accuracy of the last {LAST}")
        found = {}
        for threshold in thresholds:
            candidate = base.with_(receiver=spec.format(threshold), evaluate="validation", rounds=TUNING_ROUNDS)
            found[threshold] = go(f"tune-{method}-{threshold}", candidate).settled("validation/accuracy")
            say(f"  {candidate.receiver:<20} validation accuracy {found[threshold]:.3f}")
        best = max(found, key=found.get)
        say(f"  best: {spec.format(best)}")
        return base.with_(receiver=spec.format(best))

    methods = {
        "ideal": base.with_(**IDEAL),
        "mac": tuned("mac"),
        "gnc": tuned("gnc"),
        "noisy": base.with_(receiver="none()"),
    }
    return {method: go(method, experiment) for method, experiment in methods.items()}
