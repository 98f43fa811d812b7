"""Time the stable law against scipy: sampling, distribution function and estimate, all in one process.

    python bench/stable_law.py

Both are compared first, then timed. scipy's distribution function is timed on fewer points; the time is scaled up.
"""

import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from scipy.stats import levy_stable

from stableair import stable
from stableair.streams import generator

ALPHA, TAU = 1.5, 0.1
ENTRIES, POINTS, FEW = 11_200_000, 1_000_000, 5_000


def seconds(work: Callable, repeats: int = 3) -> float:
    """Return the median time of several calls, after a warm-up call."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def main() -> None:
    x = np.geomspace(0.01, 50, FEW)
    np.testing.assert_allclose(
        stable.cdf(torch.from_numpy(x[::100]), ALPHA), levy_stable.cdf(x[::100], ALPHA, 0), rtol=1e-6
    )
    draws = stable.sample(ENTRIES, ALPHA, TAU, generator(0, "bench"))
    theirs = levy_stable.rvs(ALPHA, 0, scale=TAU, size=ENTRIES // 100, random_state=0)
    quartiles = [np.quantile(sample, [0.25, 0.75]) for sample in (draws.numpy(), theirs)]
    np.testing.assert_allclose(*quartiles, rtol=0.05)

    many = torch.linspace(-50, 50, POINTS)
    ours = {
        "sample": seconds(lambda: stable.sample(ENTRIES, ALPHA, TAU, generator(0, "bench"))),
        "cdf": seconds(lambda: stable.cdf(many, ALPHA)),
        "estimate": seconds(lambda: stable.estimate(draws)),
    }
    scipy = {
        "sample": seconds(lambda: levy_stable.rvs(ALPHA, 0, scale=TAU, size=ENTRIES, random_state=0), 1),
        "cdf": seconds(lambda: levy_stable.cdf(x, ALPHA, 0), 1) * POINTS / FEW,
    }
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, alpha = {ALPHA}")
    for name, n in (("sample", ENTRIES), ("cdf", POINTS)):
        ratio = scipy[name] / ours[name]
        print(f"{name} of {n:,}: {ours[name]:.3f} s, scipy {scipy[name]:.2f} s: {ratio:.1f} times as fast")
    share = ours["estimate"] / ours["sample"]
    print(f"estimate from {ENTRIES:,}: {ours['estimate']:.3f} s, {share:.2f} of the time to sample them")


if __name__ == "__main__":
    main()
