"""Define a custom channel, bursts of strong noise and shadowing, and compare three receivers over it.

A noise is a function (d, source) -> (d,), a fading a function (n, source) -> (n,). Both draw random numbers only from
`source`. Therefore every receiver sees the same channel, and a resumed run equals an uninterrupted one.

    python examples/own_channel_noise.py
"""

import math
from statistics import mean

import torch

import stableair as sa

SEEDS, LAST = range(3), 5
SETTINGS = {"clients": 20, "rounds": 12, "noise": "stretches(share=0.02, std=0.3)", "fading": "shadowing(db=6)"}


@sa.noise("stretches")
def stretches(share, std, length=16, strength=100):
    """Normal noise, `strength` times as strong in a `share` of the blocks of `length` entries."""
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1]: got {share}")

    def draw(d, source):
        loud = source.uniform(math.ceil(d / length)) < share  # one number per block
        return torch.where(loud.repeat_interleave(length)[:d], strength * std, std) * source.normal(d)

    return draw


@sa.fading("shadowing")
def shadowing(db):
    """Log-normal shadowing: amplitudes of unit mean, with a standard deviation of `db` decibels."""
    sigma = db * math.log(10) / 20
    return lambda n, source: (sigma * source.normal(n) - sigma**2 / 2).exp()


def main():
    print(f"test accuracy, mean of the last {LAST} of {SETTINGS['rounds']} rounds; noise={SETTINGS['noise']}")
    print(f"{'receiver':<14}{'accuracy':>9}   by seed")
    for receiver in ("mac(C=1)", "mac(C=auto)", "none()"):
        runs = [sa.run(sa.Experiment(receiver=receiver, seed=seed, **SETTINGS)) for seed in SEEDS]
        found = [mean(run["test/accuracy"][-LAST:]) for run in runs]
        print(f"{receiver:<14}{mean(found):>9.3f}   " + " ".join(f"{a:.3f}" for a in found), flush=True)
        if receiver == "mac(C=auto)":
            print("   C = " + ", ".join(f"{run['receiver/C'][-1]:.2f}" for run in runs) + " in the last round")


if __name__ == "__main__":
    main()
