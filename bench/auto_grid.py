"""mac(C=auto) against a searched threshold on the embedded data, over alpha and tau.

    python bench/auto_grid.py [--out runs/auto-grid] [--workers 2] [--alphas 1.5 ...] [--taus 0.1 ...]

For each (alpha, tau) eight thresholds are tried with seed 0 on a validation split, without the gain put back and with
it; the best of each kind and mac(C=auto) then run with seeds 1 to 5 on the test split, paired. So the last columns tell
threshold from step length. Stop and start it as you like: finished runs are not repeated. The table goes to standard
output as Markdown.
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
RULES = [f"mac(C={C})" for C in THRESHOLDS], [f"mac(C={C}, gain=True)" for C in THRESHOLDS]
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
    options.add_argument("--alphas", type=float, nargs="+", default=ALPHAS)
    options.add_argument("--taus", type=float, nargs="+", default=TAUS)
    given = options.parse_args()
    base = sa.Experiment(rounds=given.rounds, device="cpu", engine="fast")
    places = {(a, t): base.with_(noise=f"sas(alpha={a}, tau={t})") for a, t in product(given.alphas, given.taus)}

    def tried(place: sa.Experiment, rule: str) -> sa.Experiment:
        return place.with_(receiver=rule, evaluate="validation")

    with ProcessPoolExecutor(given.workers) as pool:
        search = progress([(tried(e, r), given.out) for e in places.values() for some in RULES for r in some], pool)
        rules = {
            at: [*(max(some, key=lambda r, e=e: search[tried(e, r)]) for some in RULES), "mac(C=auto)"]
            for at, e in places.items()
        }
        runs = {at: [[e.with_(receiver=r, seed=s) for s in SEEDS] for r in rules[at]] for at, e in places.items()}
        found = progress([(e, given.out) for three in runs.values() for five in three for e in five], pool)

    print("| alpha | tau | C | accuracy | C, gain put back | accuracy | auto | auto minus C | auto minus C with gain |")
    print("|" + "---|" * 9)
    for (alpha, tau), three in runs.items():
        plain, gained, auto = ([100 * found[e] for e in five] for five in three)
        C, with_gain, _ = (rule.removeprefix("mac(C=").partition(",")[0].rstrip(")") for rule in rules[alpha, tau])
        means = [f"{statistics.mean(five):.1f}" for five in (plain, gained, auto)]
        cells = [alpha, tau, C, means[0], with_gain, *means[1:], difference(auto, plain), difference(auto, gained)]
        print(f"| {' | '.join(map(str, cells))} |")


def difference(ours: list[float], theirs: list[float]) -> str:
    """The mean of the paired differences with its standard error, and a mark where it does not hold."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(SEEDS))
    return f"{mean:+.1f} ± {error:.1f}" + ("" if mean >= -max(2.0, 2 * error) else " (!)")


if __name__ == "__main__":
    main()
