"""mac(C=auto) against a searched threshold on the embedded data, over alpha and tau.

    python bench/auto_grid.py [--out runs/auto-grid] [--workers 2] [--alphas 1.5 ...] [--taus 0.1 ...]

For each (alpha, tau), eight thresholds run with seed 0 on a validation split, without and with gain correction. The
best threshold of each kind and mac(C=auto) then run with seeds 1 to 5 on the test split, paired. The last two columns
separate the effect of the threshold from that of the step length. Finished runs are not repeated: the program may be
stopped and started again. It prints the table as Markdown.
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
    """Return the final accuracy of an experiment, computed or read from its folder."""
    import torch

    torch.set_num_threads(1)
    experiment, root = job
    run = sa.run(experiment, root / experiment.id(), resume=True, checkpoint_every=experiment.rounds)
    return run[f"{experiment.evaluate}/accuracy"][-1]


def compute(jobs: list, pool: ProcessPoolExecutor) -> dict[sa.Experiment, float]:
    """Return the accuracy of each experiment, and print the progress."""
    accuracies = {}
    for (experiment, _), value in zip(jobs, pool.map(accuracy, jobs), strict=True):
        accuracies[experiment] = value
        print(f"\r{len(accuracies)}/{len(jobs)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/auto-grid"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--alphas", type=float, nargs="+", default=ALPHAS)
    parser.add_argument("--taus", type=float, nargs="+", default=TAUS)
    options = parser.parse_args()
    base = sa.Experiment(rounds=options.rounds, device="cpu", engine="fast")
    channels = {(a, t): base.with_(noise=f"sas(alpha={a}, tau={t})") for a, t in product(options.alphas, options.taus)}

    def trial(channel: sa.Experiment, rule: str) -> sa.Experiment:
        return channel.with_(receiver=rule, evaluate="validation")

    with ProcessPoolExecutor(options.workers) as pool:
        search = compute([(trial(e, r), options.out) for e in channels.values() for some in RULES for r in some], pool)
        rules = {
            at: [*(max(some, key=lambda r, e=e: search[trial(e, r)]) for some in RULES), "mac(C=auto)"]
            for at, e in channels.items()
        }
        runs = {at: [[e.with_(receiver=r, seed=s) for s in SEEDS] for r in rules[at]] for at, e in channels.items()}
        accuracies = compute([(e, options.out) for three in runs.values() for five in three for e in five], pool)

    print("| alpha | tau | C | accuracy | C with gain | accuracy | auto | auto minus C | auto minus C with gain |")
    print("|" + "---|" * 9)
    for (alpha, tau), three in runs.items():
        plain, gained, auto = ([100 * accuracies[e] for e in five] for five in three)
        C, with_gain, _ = (rule.removeprefix("mac(C=").partition(",")[0].rstrip(")") for rule in rules[alpha, tau])
        means = [f"{statistics.mean(five):.1f}" for five in (plain, gained, auto)]
        cells = [alpha, tau, C, means[0], with_gain, *means[1:], difference(auto, plain), difference(auto, gained)]
        print(f"| {' | '.join(map(str, cells))} |")


def difference(ours: list[float], theirs: list[float]) -> str:
    """Return the mean paired difference with its standard error; (!) marks a loss beyond 2 points and 2 errors."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(SEEDS))
    return f"{mean:+.1f} ± {error:.1f}" + ("" if mean >= -max(2.0, 2 * error) else " (!)")


if __name__ == "__main__":
    main()
