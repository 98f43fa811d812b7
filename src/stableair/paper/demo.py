"""Compare the paper's four methods on the embedded data, with the same fading, noise and batches."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from stableair.experiment import Experiment, preset
from stableair.files import write_whole
from stableair.paper.methods import LABELS, METHODS, experiments
from stableair.results.callbacks import Callback
from stableair.results.curves import curves
from stableair.results.outputs import GENERATOR, check_output
from stableair.results.plot import save
from stableair.results.run import LAST, Run
from stableair.runner import run
from stableair.validation import as_path, typed

log = logging.getLogger("stableair")

GRID = {  # receiver and candidate thresholds by method
    "mac": (METHODS["mac"].receiver, (0.5, 1, 2, 4)),
    "gnc": (METHODS["gnc"].receiver, (30, 100, 300, 1000)),
}
FILES = "demo.png", "demo.json"
RUNS = Path("runs", "demo")
TUNING_ROUNDS = 30  # half of the rounds, which is enough to rank the thresholds


@typed
def demo(out: str | Path = ".", *, force: bool = False, callbacks: Sequence[Callback] = ()) -> dict[str, Run]:
    """Compare the paper's four methods on the embedded data. `stableair demo` calls this function.

    It tunes the thresholds of MAC and GNC on a validation split, and runs all four methods on the test split: half a
    minute on two cores. It writes the picture demo.png, and demo.json with the final accuracies.

    Args:
        out: Folder of the two files; the runs are in its subfolder runs/demo. Finished runs are not computed again.
        force: Whether to replace files that were not written by stableair.
        callbacks: Observers of the runs.

    Returns:
        The runs of the methods "ideal", "mac", "gnc" and "noisy".

    Raises:
        InputError: A file was not written by stableair (`file-exists`), or cannot be written (`cannot-write`).

    ```python
    runs = sa.demo()
    print({method: run["test/accuracy"][-1] for method, run in runs.items()})
    ```
    """
    out = as_path("out", out)
    picture, table = (check_output(out / name, force) for name in FILES)
    base = preset("demo")
    runs = compute(base, out / RUNS, callbacks)
    title = f"{base.data}, {base.noise}"
    save(curves({LABELS[method]: [run] for method, run in runs.items()}, title=title), picture, force)
    accuracies = {method: run["test/accuracy"][-1] for method, run in runs.items()} | {"generator": GENERATOR}
    write_whole(table, (json.dumps(accuracies, indent=2) + "\n").encode())
    return runs


def compute(base: Experiment, folder: Path, callbacks: Sequence[Callback] = ()) -> dict[str, Run]:
    """Tune MAC and GNC on a validation split, then run all four methods on the test split.

    Args:
        base: The settings that the methods share.
        folder: Folder of the runs.
        callbacks: Observers of the runs.

    Returns:
        The run of each method, by name.
    """

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
