"""mac(C=auto) against fixed thresholds where the channel or the task changes from round to round.

    python bench/auto_patterns.py [--seeds 0 1 2] [--only NAME ...] [--groups SEEN ...] [--processes 2]

Embedded digits, mlp(50), 30 rounds, 50 clients, Rayleigh fading. Each pattern runs with mac(C=auto), with C = 0.1, 0.3,
1, 3 and 10, without and with gain correction, and with neither noise nor receiver, on the same fading, noise and
batches. The score of a run is its final accuracy. The best fixed threshold is chosen in hindsight.

Every run is one line of a CSV file; finished runs are not repeated. Runs of mac(C=auto) are recorded with a digest of
the rule's code and repeated if it has changed. The program prints a table and the distribution of the paired
differences as Markdown, as bench/auto_steady.py does.

The rule of version 0.2 was developed on the patterns of SEEN; HELD_OUT, SECOND and THIRD were written before it or
before its last change. The rule of version 0.3 was developed on all of these. FOURTH was written after its h was
chosen.
"""

import argparse
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
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
from stableair import stable
from stableair.algorithm import Simulation, simulate
from stableair.builder import build
from stableair.data.datasets import digits
from stableair.engine import accelerate, choose
from stableair.streams import generator

ROUNDS = 30
HEADER = ["", "noiseless", "best C", "accuracy", "best without gain", "auto", "auto minus best C"]
HEADER += ["best C minus noiseless"]


class Pattern(NamedTuple):
    """The (alpha, tau) of round k, the data from round `turn` on, and the settings that differ from the defaults."""

    law: Callable[[int], tuple[float, float]]
    data: str = ""
    turn: int = 15
    change: Mapping[str, str] = MappingProxyType({})


def every(n: int, loud: float, quiet: float) -> Callable[[int], tuple[float, float]]:
    """tau = loud in every n-th round, else quiet."""
    return lambda k: (1.5, loud if k % n == n - 1 else quiet)


def still(alpha: float, tau: float) -> Callable[[int], tuple[float, float]]:
    """The same law in every round."""
    return lambda k: (alpha, tau)


def listed(taus: list[float]) -> Callable[[int], tuple[float, float]]:
    """The tau of each round from a list."""
    return lambda k: (1.5, taus[k])


def walk(step: float, stream: int) -> list[float]:
    """A random walk of log tau, from 0.3, between 0.02 and 5."""
    steps = (step * generator(stream, "walk").normal(ROUNDS)).tolist()
    path = accumulate(steps, lambda at, by: min(max(at + by, math.log(0.02)), math.log(5)), initial=math.log(0.3))
    return [math.exp(at) for at in path]


def markov(good: float, bad: float, stay: float, stream: int) -> list[float]:
    """Return a Markov chain of good and bad rounds: the state stays the same with probability `stay`."""
    turns = (generator(stream, "markov").uniform(ROUNDS) > stay).tolist()
    return [bad if odd % 2 else good for odd in accumulate(turns)]


def log_uniform(low: float, high: float, stream: int) -> list[float]:
    return (low * (high / low) ** generator(stream, "tau").uniform(ROUNDS)).tolist()


SEEN = {
    "every fifth round 3, else 0.1": Pattern(every(5, 3, 0.1)),
    "0.03 and 3 in turn": Pattern(every(2, 3, 0.03)),
    "labels permuted at round 15": Pattern(still(1.5, 0.1), "permuted_digits(0)"),
    "labels permuted, tau = 0.5": Pattern(still(1.5, 0.5), "permuted_digits(0)"),
    "labels permuted, every fifth round 3": Pattern(every(5, 3, 0.1), "permuted_digits(0)"),
    "labels permuted, another way for each seed": Pattern(still(1.5, 0.1), "permuted_digits({seed})"),
    "from 0.03 to 3, slowly": Pattern(lambda k: (1.5, 0.03 * 100 ** (k / 29))),
    "from 3 to 0.03, slowly": Pattern(lambda k: (1.5, 3 * 0.01 ** (k / 29))),
    "from 0.1 to 3 at round 15": Pattern(lambda k: (1.5, 3 if k >= 15 else 0.1)),
    "from 0.03 to 1 at round 10": Pattern(lambda k: (1.5, 1 if k >= 10 else 0.03)),
    "from 3 to 0.1 at round 15": Pattern(lambda k: (1.5, 0.1 if k >= 15 else 3)),
    "five rounds 0.1, five rounds 3": Pattern(lambda k: (1.5, 3 if k // 5 % 2 else 0.1)),
    "five rounds 0.1, five rounds 1": Pattern(lambda k: (1.5, 1 if k // 5 % 2 else 0.1)),
    "three rounds 10, else 0.1": Pattern(lambda k: (1.5, 10 if k in (4, 13, 22) else 0.1)),
    "every fifth round 0.001, else 1": Pattern(lambda k: (1.5, 0.001 if k % 5 == 2 else 1)),
    "log-normal": Pattern(lambda k: (1.5, 0.1 * (1.5 * generator(5, "tau", k).normal(1)).exp().item())),
    "alpha 1.1 and 1.9 in turn, tau = 1": Pattern(lambda k: (1.1 if k % 2 else 1.9, 1)),
    "normal, then Cauchy, tau = 0.3": Pattern(lambda k: (2.0 if k < 15 else 1.0, 0.3)),
    "pilots, 0.03 and 3 in turn": Pattern(every(2, 3, 0.03)),
    "whole vector, every fifth round 3": Pattern(every(5, 3, 0.1), change={"blocks": "model"}),
    "server lr 0.3, tau = 0.1": Pattern(still(1.5, 0.1), change={"server": "sgd(lr=0.3)"}),
}

HELD_OUT = {
    "random walk, steps of 0.5": Pattern(listed(walk(0.5, 1))),
    "random walk, steps of 1": Pattern(listed(walk(1.0, 2))),
    "log-uniform from 0.03 to 3, first": Pattern(listed(log_uniform(0.03, 3, 11))),
    "log-uniform from 0.03 to 3, second": Pattern(listed(log_uniform(0.03, 3, 12))),
    "good 0.1 or bad 2, for five rounds on average": Pattern(listed(markov(0.1, 2, 0.8, 3))),
    "good 0.03 or bad 0.7, for three rounds on average": Pattern(listed(markov(0.03, 0.7, 0.67, 4))),
    "two rounds 2, six rounds 0.05": Pattern(lambda k: (1.5, 2 if k % 8 in (5, 6) else 0.05)),
    "alpha falls from 1.9 to 1.2 as tau rises": Pattern(lambda k: (1.9 - k % 6 * 0.14, 0.05 * 2 ** (k % 6))),
    "saw tooth, 0.03 to 3 in six rounds": Pattern(lambda k: (1.5, 0.03 * 100 ** (k % 6 / 5))),
    "saw tooth, 3 to 0.03 in ten rounds": Pattern(lambda k: (1.5, 3 * 0.01 ** (k % 10 / 9))),
    "from 1 to 0.05 at round 8": Pattern(lambda k: (1.5, 0.05 if k >= 8 else 1)),
    "0.05, from round 20 on 2": Pattern(lambda k: (1.5, 2 if k >= 20 else 0.05)),
    "labels permuted at round 10, for each seed, tau = 0.2": Pattern(still(1.5, 0.2), "permuted_digits({seed})", 10),
    "a third of the labels changed at round 12, tau = 0.3": Pattern(still(1.5, 0.3), "shifted_digits()", 12),
    "10 of 50 clients, every fourth round 2": Pattern(every(4, 2, 0.1), change={"participation": "sample(10)"}),
    "logistic, every third round 2": Pattern(every(3, 2, 0.1), change={"model": "logistic()"}),
    "mlp(200), every third round 2": Pattern(every(3, 2, 0.1), change={"model": "mlp(200)"}),
    "Dirichlet 0.3, 0.1 and 1 in turn": Pattern(every(2, 1, 0.1), change={"partition": "dirichlet(0.3)"}),
    "server lr 0.01, 0.1 and 2 in turn": Pattern(every(2, 2, 0.1), change={"server": "sgd(lr=0.01)"}),
    "momentum, every fifth round 2": Pattern(every(5, 2, 0.1), change={"server": "momentum(lr=0.01, beta=0.7)"}),
}  # fmt: skip

SECOND = {
    "logistic, log-uniform from 0.03 to 3": Pattern(listed(log_uniform(0.03, 3, 13)), change={"model": "logistic()"}),
    "logistic, 0.1, from round 15 on 1": Pattern(
        lambda k: (1.5, 1 if k >= 15 else 0.1), change={"model": "logistic()"}
    ),
    "logistic, 0.03 and 1 in turn": Pattern(every(2, 1, 0.03), change={"model": "logistic()"}),
    "mlp(20), two rounds 2, six rounds 0.05": Pattern(
        lambda k: (1.5, 2 if k % 8 in (5, 6) else 0.05), change={"model": "mlp(20)"}
    ),
    "two hidden layers, every fourth round 2": Pattern(every(4, 2, 0.1), change={"model": "mlp(50, depth=2)"}),
    "5 of 50 clients, 0.1 and 1 in turn": Pattern(every(2, 1, 0.1), change={"participation": "sample(5)"}),
    "server lr 0.1, every fifth round 1": Pattern(every(5, 1, 0.1), change={"server": "sgd(lr=0.1)"}),
    "good 0.05 or bad 1.5, for four rounds on average": Pattern(listed(markov(0.05, 1.5, 0.75, 6))),
}

THIRD = {
    "mlp(10), every third round 1": Pattern(every(3, 1, 0.05), change={"model": "mlp(10)"}),
    "mlp(20), log-uniform from 0.03 to 3": Pattern(listed(log_uniform(0.03, 3, 14)), change={"model": "mlp(20)"}),
    "mlp(100), every fourth round 3": Pattern(every(4, 3, 0.1), change={"model": "mlp(100)"}),
    "mlp(400), two rounds 2, six rounds 0.05": Pattern(
        lambda k: (1.5, 2 if k % 8 in (5, 6) else 0.05), change={"model": "mlp(400)"}
    ),
    "logistic, five rounds 0.1, five rounds 1": Pattern(
        lambda k: (1.5, 1 if k // 5 % 2 else 0.1), change={"model": "logistic()"}
    ),
    "logistic, alpha = 1.2, every fourth round 1": Pattern(
        lambda k: (1.2, 1 if k % 4 == 3 else 0.05), change={"model": "logistic()"}
    ),
    "20 of 50 clients, good 0.1 or bad 2": Pattern(
        listed(markov(0.1, 2, 0.7, 7)), change={"participation": "sample(20)"}
    ),
    "server lr 0.06, every third round 1": Pattern(every(3, 1, 0.1), change={"server": "sgd(lr=0.06)"}),
}

FOURTH = {
    "log-uniform from 0.03 to 3, third": Pattern(listed(log_uniform(0.03, 3, 15))),
    "good 0.05 or bad 1, for three rounds on average": Pattern(listed(markov(0.05, 1, 0.67, 8))),
    "from 0.05 to 0.5 at round 12": Pattern(lambda k: (1.5, 0.5 if k >= 12 else 0.05)),
    "alpha = 1.2, every third round 1": Pattern(lambda k: (1.2, 1 if k % 3 == 2 else 0.05)),
    "mlp(30), every fourth round 1.5": Pattern(every(4, 1.5, 0.1), change={"model": "mlp(30)"}),
    "mlp(100), random walk, steps of 0.7": Pattern(listed(walk(0.7, 10)), change={"model": "mlp(100)"}),
    "logistic, good 0.1 or bad 1": Pattern(listed(markov(0.1, 1, 0.7, 9)), change={"model": "logistic()"}),
    "server lr 0.1, two rounds 1, four rounds 0.1": Pattern(
        lambda k: (1.5, 1 if k % 6 > 3 else 0.1), change={"server": "sgd(lr=0.1)"}
    ),
}

GROUPS = {"SEEN": SEEN, "HELD_OUT": HELD_OUT, "SECOND": SECOND, "THIRD": THIRD, "FOURTH": FOURTH}
PATTERNS = SEEN | HELD_OUT | SECOND | THIRD | FOURTH


@sa.noise("pattern")
def pattern(name: str):
    """The interference of a named pattern."""
    return lambda d, source: stable.sample(d, *PATTERNS[name].law(source.round), source)


@sa.dataset("permuted_digits")
def permuted_digits(seed: int):
    """The digits with permuted labels."""
    return relabelled(generator(seed, "names").permutation(10))


@sa.dataset("shifted_digits")
def shifted_digits():
    """The digits with the labels 0, 1 and 2 changed to 1, 2 and 0."""
    return relabelled(torch.tensor([1, 2, 0, *range(3, 10)]))


def relabelled(labels: torch.Tensor):
    """Return the digits with labels[y] instead of y."""
    data = digits()
    train, test = (split._replace(y=labels[split.y]) for split in (data.train, data.test))
    return data._replace(train=train, test=test)


def simulation(experiment: sa.Experiment) -> Simulation:
    sim = build(experiment)
    return accelerate(sim, choose(sim, "fast", "auto", 0, ROUNDS))


def score(job: Job) -> float:
    """Run a job and return its final accuracy in per cent."""
    torch.set_num_threads(1)
    _, data, turn, change = PATTERNS[job.setting]
    receiver = "mac(C=auto, pilot=1000)" if job.receiver == AUTO and job.setting.startswith("pilots") else job.receiver
    base = {"model": "mlp(50)", "noise": f"pattern('{job.setting}')", "rounds": ROUNDS, "device": "cpu"}
    e = sa.Experiment(**base | overrides(receiver) | dict(change), evaluate=job.evaluate, seed=job.seed)
    sim = simulation(e)
    *_, last = simulate(sim, sim.start, turn)
    if data:
        sim = replace(simulation(e.with_(data=data.format(seed=job.seed))), receiver=sim.receiver, server=sim.server)
    *_, last = simulate(sim, last.state, ROUNDS, turn)
    return 100 * last.metrics[f"{job.evaluate}/accuracy"]


def main() -> None:
    options = arguments()
    results, rule = Results(options.out), rule_digest()
    names = options.only or list(chain.from_iterable(GROUPS[group] for group in options.groups))

    def jobs(name: str, receiver: str) -> list[Job]:
        return [Job(name, receiver, "test", seed, rule if "auto" in receiver else "") for seed in options.seeds]

    with ProcessPoolExecutor(options.processes) as pool:
        every = (job for name in names for each in (NOISELESS, AUTO, *FIXED) for job in jobs(name, each))
        results.compute(every, score, pool)
    rows, comparisons = [], {}
    for name in names:
        best, plain = (results.best([jobs(name, each) for each in some]) for some in (FIXED, FIXED[:5]))
        noiseless, fixed, auto = comparisons[name] = Comparison(
            *(results.of(jobs(name, each)) for each in (NOISELESS, best, AUTO))
        )
        accuracies = [noiseless, short(best), fixed, results.of(jobs(name, plain)), auto]
        rows.append([name, *accuracies, loss(auto, fixed), difference(fixed, noiseless)])
    print(f"\n\nThe rule {rule}, seeds {options.seeds}:\n")
    print(table(HEADER, rows), "", distribution("patterns", list(comparisons.values())), sep="\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--only", nargs="+", choices=PATTERNS, metavar="NAME", help="patterns by name")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "auto_patterns.csv")
    return parser.parse_args()


if __name__ == "__main__":
    main()
