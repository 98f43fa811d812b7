"""mac(C=auto) against a searched threshold on the embedded data, over alpha and tau.

    python bench/auto_grid.py [--out runs/auto-grid] [--workers 2]

For each (alpha, tau) eight thresholds are tried with seed 0 on a validation split; the best of them and mac(C=auto)
then run with seeds 1 to 5 on the test split, paired. Stop and start it as you like: finished runs are not repeated.
The table goes to standard output as Markdown.
"""

import argparse
import math
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import stableair as sa

ALPHAS = 1.1, 1.3, 1.5, 1.8
TAUS = 0.03, 0.1, 0.3, 1, 3
THRESHOLDS = 0.1, 0.3, 0.6, 1, 2, 4, 8, 16
SEEDS = 1, 2, 3, 4, 5


def accuracy(job: tuple[sa.Experiment, Path]) -> float:
    """The final accuracy of an experiment, computed or read from its folder."""
    import torch

    torch.set_num_threads(1)
    experiment, root = job
    run = sa.run(experiment, root / experiment.id(), resume=True, checkpoint_every=experiment.rounds)
    return run[f"{experiment.evaluate}/accuracy"][-1]


def progress(jobs: list, pool: ProcessPoolExecutor) -> dict[sa.Experiment, float]:
    found = {}
    for (experiment, _), value in zip(jobs, pool.map(accuracy, jobs), strict=True):
        found[experiment] = value
        print(f"\r{len(found)}/{len(jobs)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--out", type=Path, default=Path("runs/auto-grid"))
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--rounds", type=int, default=30)
    given = options.parse_args()
    base = sa.Experiment(rounds=given.rounds, device="cpu")
    places = {(a, t): base.with_(noise=f"sas(alpha={a}, tau={t})") for a, t in product(ALPHAS, TAUS)}

    def tried(place: sa.Experiment, C: float) -> sa.Experiment:
        return place.with_(receiver=f"mac(C={C})", evaluate="validation")

    with ProcessPoolExecutor(given.workers) as pool:
        search = progress([(tried(e, C), given.out) for e in places.values() for C in THRESHOLDS], pool)
        best = {at: max(THRESHOLDS, key=lambda C, e=e: search[tried(e, C)]) for at, e in places.items()}
        rules = {at: (f"mac(C={best[at]})", "mac(C=auto)") for at in places}
        pairs = {
            at: [[e.with_(receiver=rule, seed=seed) for seed in SEEDS] for rule in rules[at]]
            for at, e in places.items()
        }
        found = progress([(e, given.out) for two in pairs.values() for five in two for e in five], pool)

    print("| alpha | tau | searched C | accuracy with it | accuracy with auto | auto minus searched | holds |")
    print("|---|---|---|---|---|---|---|")
    for (alpha, tau), two in pairs.items():
        fixed, auto = ([100 * found[e] for e in five] for five in two)
        differences = [a - f for a, f in zip(auto, fixed, strict=True)]
        mean, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(SEEDS))
        holds = "yes" if mean >= -max(1.0, 2 * error) else "no"
        print(
            f"| {alpha} | {tau} | {best[alpha, tau]} | {statistics.mean(fixed):.1f} | {statistics.mean(auto):.1f} "
            f"| {mean:+.1f} +- {error:.1f} | {holds} |"
        )


if __name__ == "__main__":
    main()
