"""Compare a custom receiver with median anchored clipping on the same fading, interference and batches.

All randomness is a function of the seed, the round and the client. Two receivers with the same seed therefore get the
same random numbers, and their paired differences are more precise than the difference of their means.

    python examples/own_receiver.py
"""

from statistics import mean, stdev

import torch

import stableair as sa

SEEDS, LAST = range(3), 5
SETTINGS = {"clients": 20, "rounds": 12, "noise": "sas(alpha=1.5, tau=0.5)"}


@sa.receiver("reset")
def reset(C):
    """Replace every entry that is further than C from the median by the median; MAC clips it to this distance."""
    if not C > 0:
        raise ValueError(f"C must be positive: got {C}")  # the error names the spec: receiver reset(C=0): ...

    def apply(g):  # one tensor of the model at a time: (d,) -> (d,)
        m = g.median(dim=-1, keepdim=True).values
        return torch.where((g - m).abs() > C, m, g)

    return apply


def accuracies(receiver):
    """Mean test accuracy of the last rounds, for each seed."""
    runs = [sa.run(sa.Experiment(receiver=receiver, seed=seed, **SETTINGS)) for seed in SEEDS]
    return [mean(run["test/accuracy"][-LAST:]) for run in runs]


def main():
    print(f"test accuracy, mean of the last {LAST} of {SETTINGS['rounds']} rounds, and its difference from mac(C=1)")
    print(f"{'receiver':<12}{'accuracy':>9}   {'difference by seed':<24}{'mean':>6}  standard error")
    base = accuracies("mac(C=1)")
    print(f"{'mac(C=1)':<12}{mean(base):>9.3f}")
    for receiver in ("reset(C=1)", "reset(C=3)", "none()"):
        found = accuracies(receiver)
        pairs = [a - b for a, b in zip(found, base, strict=True)]
        each = " ".join(f"{d:+.3f}" for d in pairs)
        error = stdev(pairs) / len(pairs) ** 0.5
        print(f"{receiver:<12}{mean(found):>9.3f}   {each:<24}{mean(pairs):>+6.3f}  {error:.3f}", flush=True)


if __name__ == "__main__":
    main()
