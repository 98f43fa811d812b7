"""A channel of one's own: interference that is loud in stretches, and shadowing, against three receivers.

A noise is a function (d, source) -> (d,), a fading (n, source) -> (n,). Both draw from `source` and from nothing
else: then every receiver meets the same channel, and a stopped run goes on as if it had not been stopped.

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
    """Normal noise that is `strength` times as strong in a `share` of the stretches of `length` entries."""
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1]: got {share}")

    def draw(d, source):
        loud = source.uniform(math.ceil(d / length)) < share  # one number for a stretch
        return torch.where(loud.repeat_interleave(length)[:d], strength * std, std) * source.normal(d)

    return draw


@sa.fading("shadowing")
def shadowing(db):
    """Amplitudes of unit mean whose logarithm is normal, of `db` decibels standard deviation: obstacles on the way."""
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
            print("   it chose C = " + ", ".join(f"{run['receiver/C'][-1]:.2f}" for run in runs) + " in the last round")


if __name__ == "__main__":
    main()
