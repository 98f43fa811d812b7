"""mac(C=auto) against fixed thresholds where the channel or the task changes from round to round.

    python bench/auto_patterns.py [--seeds 3] [--workers 2] [--only NAME ...]

Embedded digits, mlp(50), 30 rounds, 50 clients, Rayleigh fading. Each pattern runs with mac(C=auto) and with C = 0.1,
0.3, 1, 3 and 10, without the gain put back and with it, on the same fading, noise and batches. The table goes to
standard output as Markdown: mean accuracies in per cent, and auto minus the best of the ten.
"""

import argparse
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import stableair as sa
from stableair import stable
from stableair.algorithm import Simulation, simulate
from stableair.builder import build
from stableair.data.sets import digits
from stableair.engine import accelerate, choose
from stableair.streams import generator

ROUNDS, TURN = 30, 15
FIXED = [f"mac(C={C}{gain})" for gain in ("", ", gain=True") for C in (0.1, 0.3, 1, 3, 10)]

LAWS = {  # the (alpha, tau) of round k
    "every fifth round 3, else 0.1": lambda k: (1.5, 3 if k % 5 == 4 else 0.1),
    "0.03 and 3 in turn": lambda k: (1.5, 3 if k % 2 else 0.03),
    "labels permuted at round 15": lambda k: (1.5, 0.1),
    "labels permuted, tau = 0.5": lambda k: (1.5, 0.5),
    "labels permuted, every fifth round 3": lambda k: (1.5, 3 if k % 5 == 4 else 0.1),
    "from 0.03 to 3, slowly": lambda k: (1.5, 0.03 * 100 ** (k / 29)),
    "from 3 to 0.03, slowly": lambda k: (1.5, 3 * 0.01 ** (k / 29)),
    "from 0.1 to 3 at round 15": lambda k: (1.5, 3 if k >= TURN else 0.1),
    "from 0.03 to 1 at round 10": lambda k: (1.5, 1 if k >= 10 else 0.03),
    "from 3 to 0.1 at round 15": lambda k: (1.5, 0.1 if k >= TURN else 3),
    "five rounds 0.1, five rounds 3": lambda k: (1.5, 3 if k // 5 % 2 else 0.1),
    "five rounds 0.1, five rounds 1": lambda k: (1.5, 1 if k // 5 % 2 else 0.1),
    "three rounds 10, else 0.1": lambda k: (1.5, 10 if k in (4, 13, 22) else 0.1),
    "every fifth round 0.001, else 1": lambda k: (1.5, 0.001 if k % 5 == 2 else 1),
    "log-normal": lambda k: (1.5, 0.1 * (1.5 * generator(5, "tau", k).normal(1)).exp().item()),
    "alpha 1.1 and 1.9 in turn, tau = 1": lambda k: (1.1 if k % 2 else 1.9, 1),
    "normal, then Cauchy, tau = 0.3": lambda k: (2.0 if k < TURN else 1.0, 0.3),
    "pilots, 0.03 and 3 in turn": lambda k: (1.5, 3 if k % 2 else 0.03),
    "whole vector, every fifth round 3": lambda k: (1.5, 3 if k % 5 == 4 else 0.1),
    "server lr 0.3, tau = 0.1": lambda k: (1.5, 0.1),
}


@sa.noise("pattern")
def pattern(name: str):
    """The interference of a named pattern."""
    return lambda d, source: stable.sample(d, *LAWS[name](source.round), source)


@sa.dataset("permuted_digits")
def permuted_digits():
    """The digits with other names."""
    names, data = generator(0, "names").permutation(10), digits()
    train, test = (split._replace(y=names[split.y]) for split in (data.train, data.test))
    return data._replace(train=train, test=test)


def simulation(experiment: sa.Experiment) -> Simulation:
    sim = build(experiment)
    return accelerate(sim, choose(sim, "fast", "auto", 0, ROUNDS))


def accuracy(job: tuple[str, str, int]) -> float:
    """The final accuracy of a receiver in a pattern with a seed."""
    torch.set_num_threads(1)
    name, receiver, seed = job
    if name.startswith("pilots") and "auto" in receiver:
        receiver = "mac(C=auto, pilot=1000)"
    e = sa.Experiment(
        rounds=ROUNDS,
        seed=seed,
        device="cpu",
        model="mlp(50)",
        noise=f"pattern('{name}')",
        receiver=receiver,
        blocks="model" if name.startswith("whole vector") else "tensor",
        server="sgd(lr=0.3)" if name.startswith("server") else "sgd()",
    )
    sim = simulation(e)
    *_, last = simulate(sim, sim.start, TURN)
    if name.startswith("labels permuted"):
        sim = replace(simulation(e.with_(data="permuted_digits()")), receive=sim.receive, update=sim.update)
    *_, last = simulate(sim, last.state, ROUNDS, TURN)
    return 100 * last.metrics["test/accuracy"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--only", nargs="+", default=list(LAWS), choices=LAWS, metavar="NAME")
    given = options.parse_args()
    rules = ["mac(C=auto)", *FIXED]
    print("| pattern | best fixed | accuracy with it | best without gain | accuracy with auto | auto minus best |")
    print("|---|---|---|---|---|---|")
    with ProcessPoolExecutor(given.workers) as pool:
        for name in given.only:
            jobs = [(name, rule, seed) for rule in rules for seed in range(given.seeds)]
            found = dict(zip(jobs, pool.map(accuracy, jobs), strict=True))
            mean = {rule: statistics.mean(found[name, rule, s] for s in range(given.seeds)) for rule in rules}
            best, plain = (max(some, key=mean.__getitem__) for some in (FIXED, FIXED[:5]))
            auto, label = mean["mac(C=auto)"], best.removeprefix("mac(").removesuffix(")").replace("gain=True", "gain")
            values = f"{mean[best]:.1f} | {mean[plain]:.1f} | {auto:.1f} | {auto - mean[best]:+.1f}"
            print(f"| {name} | {label} | {values} |", flush=True)


if __name__ == "__main__":
    main()
