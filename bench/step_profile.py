"""Where the time of a local step goes: its kernels, and the extra time of the first round of a process.

    python bench/step_profile.py resnet18 resnet18-group femnist          (on a GPU; a CPU shows torch's operations)

The program trains the clients of a workload of `stableair bench` for some rounds, without a channel, and profiles the
last round with torch's profiler. Each workload then runs in two new processes that share an empty folder for Triton's
compilation cache: the first one compiles the kernels, the second one reads them from the cache. Their difference to the
time of a later round is what a user waits at the start of a run.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch.profiler import ProfilerActivity, profile

from stableair.builder import build
from stableair.engine import accelerate, choose, reference_trainer
from stableair.experiment import Experiment
from stableair.spec import passed_objects
from stableair.workloads import OBJECTS, WORKLOADS

ROUNDS = 3  # the first one compiles and captures; the last one is timed and profiled


class Kernel(NamedTuple):
    """One kernel in a round: its name, its time in milliseconds, and how often it is launched."""

    name: str
    milliseconds: float
    calls: int


class Profile(NamedTuple):
    """The local training of a workload."""

    engine: str
    steps: int  # of the client with the most samples
    rounds: list[float]  # seconds of each round
    kernels: list[Kernel]  # of the last round, the slowest first


@passed_objects(OBJECTS)
def train(experiment: Experiment, kernels: bool = True) -> Profile:
    """Train for some rounds and profile the last one; without `kernels` only time the rounds."""
    start = time.perf_counter()
    sim = build(experiment)
    choice = choose(sim, "auto")
    fast = accelerate(sim, choice)
    trainer = reference_trainer(sim)
    cuda, clients = sim.start.model.w.is_cuda, torch.arange(sim.n)

    def compute(k: int) -> None:
        for _ in fast.train(sim.start.model, k, clients):
            pass
        if cuda:
            torch.cuda.synchronize()

    times = [start]
    for k in range(ROUNDS):
        compute(k)
        times.append(time.perf_counter())
    events: Any = []
    if kernels:
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
            compute(ROUNDS)
        events = profiler.key_averages()
    attribute = "self_device_time_total" if cuda else "self_cpu_time_total"  # microseconds
    measured = [Kernel(event.key, getattr(event, attribute) / 1000, event.count) for event in events]
    return Profile(
        f"{choice.engine}, {choice.precision}",
        max(map(trainer.work.steps, range(sim.n))),
        [after - before for before, after in itertools.pairwise(times)],
        sorted((each for each in measured if each.milliseconds > 0), key=lambda each: -each.milliseconds),
    )


def table(profiled: Profile, most: int) -> str:
    """Return the slowest kernels as a Markdown table, per local step of all clients."""
    lines = ["| kernel | ms per step | launches per step |", "|---|---|---|"]
    for name, milliseconds, calls in profiled.kernels[:most]:
        lines.append(f"| `{name[:90]}` | {milliseconds / profiled.steps:.3f} | {calls / profiled.steps:.1f} |")
    rest = profiled.kernels[most:]
    if rest:
        sums = sum(each.milliseconds for each in rest), sum(each.calls for each in rest)
        lines.append(f"| {len(rest)} other kernels | {sums[0] / profiled.steps:.3f} | {sums[1] / profiled.steps:.1f} |")
    return "\n".join(lines)


def first_rounds(workload: str) -> list[float]:
    """Return the extra seconds of the first round of a process, with an empty and with a filled compilation cache."""
    extra = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            command = [sys.executable, __file__, workload, "--rounds-only"]
            env = os.environ | {"TRITON_CACHE_DIR": cache}
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
            rounds = json.loads(done.stdout.splitlines()[-1])
            extra.append(rounds[0] - rounds[-1])
    return extra


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workloads", nargs="+", choices=WORKLOADS, metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--most", type=int, default=15, help="number of kernels to list")
    parser.add_argument("--rounds-only", action="store_true", help="print the seconds of each round as JSON, and stop")
    options = parser.parse_args()
    for workload in options.workloads:
        if options.rounds_only:
            print(json.dumps(train(WORKLOADS[workload], kernels=False).rounds))
            continue
        profiled = train(WORKLOADS[workload])
        whole = sum(each.milliseconds for each in profiled.kernels) / profiled.steps
        step = 1000 * profiled.rounds[-1] / profiled.steps
        print(f"\n{workload}: {profiled.engine}, {step:.2f} ms per step, {whole:.2f} ms in kernels\n")
        print(table(profiled, options.most))
        empty, filled = first_rounds(workload)
        print(f"\nfirst round: {empty:.1f} s longer with an empty compilation cache, {filled:.1f} s with a filled one")


if __name__ == "__main__":
    main()
