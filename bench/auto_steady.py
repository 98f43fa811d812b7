"""mac(C=auto) against fixed thresholds chosen on a validation split, in interference that does not change.

    python bench/auto_steady.py [--group tuning] [--seeds 0 1 2 3 4] [--settings 3 17 ...] [--processes 2]

60 settings are drawn once by a hash: 54 with interference, 6 without. The 30 with an even number are for the tuning of
the rule, the 30 with an odd number are held out until the rule is frozen. The next 30 settings of the same draw, with
interference, were added after the rule had been frozen, and no rule was chosen with them (`unseen`).

In each setting, C = 0.1, 0.3, 1, 3 and 10, without and with gain correction, run on a validation split with the seeds
of --validation-seeds. The best of them, mac(C=auto), and a run with neither noise nor receiver, run on the test split
with the seeds of --seeds, paired. The score of a run is its settled accuracy: the mean of the last ten rounds, and 0 if
it diverged. With --hindsight all ten fixed thresholds run on the test split; the table then also shows the best of
them, which cannot be known beforehand.

Every run is one line of a CSV file; finished runs are not repeated. Runs of mac(C=auto) are recorded with a digest of
the rule's code and repeated if it has changed. The program prints a table and the distribution of the paired
differences as Markdown, also for the settings where the fixed threshold does not exceed the noiseless run by more than
a standard error.
"""

import argparse
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from auto_results import (
    AUTO,
    FIXED,
    NOISELESS,
    Comparison,
    Job,
    Results,
    difference,
    distribution,
    loss,
    overrides,
    rule_digest,
    short,
    table,
)

import stableair as sa

ALPHAS = 0.8, 1.1, 1.5, 1.8, 2.0
TAUS = 0.03, 0.1, 0.3, 1.0, 3.0
COMMON = (
    (0.01, 0.03, 0.1),  # server's learning rate
    (30, 120),  # rounds
    ("logistic()", "mlp(50)", "mlp(50, depth=2)", "cnn(width=16)"),
    ("all()", "sample(10)"),
)
NOISY, WITHOUT_NOISE, UNSEEN = 54, 6, 30
GROUPS = "tuning", "held-out", "unseen"
HEADER = ["", "alpha", "tau", "lr", "rounds", "model", "clients", "noiseless", "C, validated", "accuracy", "auto"]
HEADER += ["auto minus C", "C minus noiseless"]
HINDSIGHT = ["C, in hindsight", "accuracy", "auto minus C"]


def drawn(candidates: Iterable[tuple], n: int) -> list[tuple]:
    """Return the first n candidates in the order of their hashes."""
    return sorted(candidates, key=lambda each: hashlib.sha256(repr(each).encode()).digest())[:n]


def settings() -> dict[int, sa.Experiment]:
    """Return the 90 settings by number."""
    noisy = [(f"sas(alpha={a}, tau={t})", *rest) for a, t, *rest in product(ALPHAS, TAUS, *COMMON)]
    first, unseen = (some := drawn(noisy, NOISY + UNSEEN))[:NOISY], some[NOISY:]
    every = first + drawn(product(["none()"], *COMMON), WITHOUT_NOISE) + unseen
    return {number: experiment(*each) for number, each in enumerate(every)}


def group(number: int) -> str:
    """Return the group of a setting: even numbers below 60 are for tuning, odd ones are held out."""
    return GROUPS[number % 2 if number < NOISY + WITHOUT_NOISE else 2]


def experiment(noise: str, lr: float, rounds: int, model: str, participation: str) -> sa.Experiment:
    return sa.Experiment(
        noise=noise, server=f"sgd(lr={lr})", rounds=rounds, model=model, participation=participation, device="cpu"
    )


def score(job: Job) -> float:
    """Run a job and return its settled accuracy in per cent."""
    import torch

    torch.set_num_threads(1)
    e = settings()[int(job.setting)].with_(evaluate=job.evaluate, seed=job.seed, **overrides(job.receiver))
    return 100 * sa.run(e).settled(f"{job.evaluate}/accuracy")


def main() -> None:
    options = arguments()
    results, rule = Results(options.out), rule_digest()
    chosen = [n for n in settings() if n in options.settings] if options.settings else range(len(settings()))
    numbers = [n for n in chosen if options.group in (None, group(n))]

    def jobs(number: int, receiver: str, evaluate: str = "test") -> list[Job]:
        seeds = options.seeds if evaluate == "test" else options.validation_seeds
        return [Job(str(number), receiver, evaluate, seed, rule if "auto" in receiver else "") for seed in seeds]

    with ProcessPoolExecutor(options.processes) as pool:
        searches = {n: [jobs(n, receiver, "validation") for receiver in FIXED] for n in numbers}
        results.compute((job for n in numbers for some in searches[n] for job in some), score, pool)
        validated = {n: results.best(searches[n]) for n in numbers}
        receivers = {n: [NOISELESS, validated[n], options.receiver, *FIXED * options.hindsight] for n in numbers}
        results.compute((job for n in numbers for each in receivers[n] for job in jobs(n, each)), score, pool)
    comparisons = {n: Comparison(*(results.of(jobs(n, each)) for each in receivers[n][:3])) for n in numbers}
    rows = [row(n, validated[n], comparisons[n]) for n in numbers]
    if options.hindsight:
        for n, cells in zip(numbers, rows, strict=True):
            best = results.best([jobs(n, receiver) for receiver in FIXED])
            known = results.of(jobs(n, best))
            cells += [short(best), known, loss(comparisons[n].auto, known)]
    print(f"\n\nThe rule {rule}, seeds {options.seeds}, validation seeds {options.validation_seeds}:\n")
    print(table(HEADER + HINDSIGHT * options.hindsight, rows))
    for name in GROUPS:
        if some := [comparisons[n] for n in numbers if group(n) == name]:
            print("", distribution(name, some), sep="\n")


def row(n: int, validated: str, comparison: Comparison) -> list:
    """Return the cells of a setting."""
    e = settings()[n]
    law, lr = e.call("noise").arguments, e.call("server").arguments["lr"]
    setting = [n, law.get("alpha", "none"), law.get("tau", ""), lr, e.rounds, e.model]
    noiseless, fixed, auto = comparison
    accuracies = [noiseless, short(validated), fixed, auto, loss(auto, fixed), difference(fixed, noiseless)]
    return [*setting, e.participation.removesuffix("()"), *accuracies]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--group", choices=GROUPS, help="group of settings (default: all)")
    parser.add_argument("--settings", type=int, nargs="+", help="numbers of settings, 0 to 89 (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--validation-seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--receiver", default=AUTO)
    parser.add_argument("--hindsight", action="store_true", help="run all fixed thresholds on the test split")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "auto_steady.csv")
    return parser.parse_args()


if __name__ == "__main__":
    main()
